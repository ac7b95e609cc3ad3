"""Sizes of a layer before and after: factors, heads, hidden units, embedding, stream width."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from tscompress.errors import PlanError
from tscompress.io.strict import Strict
from tscompress.plan.architecture import BlockKind

INPUT_PATCHES, OUTPUT_PATCHES = "input_patch_embedding", "output_patch_embedding"
#: The token embedding of T5, which its stacks share.
TOKENS: Literal["shared"] = "shared"
#: Upper bound of a size; no layer is larger.
Size = Annotated[int, Field(ge=1, le=2**31)]


class ProjectionPlan(Strict):
    """A Linear layer that becomes two factors or stays dense."""

    name: str
    part: Literal["attention", "feed_forward"]
    out_features: Size
    in_features: Size
    rank: Size | None = Field(default=None, description="null: the layer stays dense")
    reason: str | None = Field(default=None, description="why it stays dense")

    @model_validator(mode="after")
    def _factors_are_smaller(self) -> ProjectionPlan:
        if self.rank is not None and self.parameters >= self.dense_parameters:
            raise ValueError(
                f"rank {self.rank} of {self.name} gives {self.parameters} parameters, no fewer "
                f"than the dense {self.dense_parameters}; set rank to null or below "
                f"{self.dense_parameters / (self.out_features + self.in_features):.1f}"
            )
        return self

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise PlanError unless the layer is ``[out_features, in_features]``."""
        if shape != (self.out_features, self.in_features):
            found = "x".join(map(str, shape))
            raise PlanError(
                f"the plan has {self.name} as {self.out_features}x{self.in_features}; "
                f"the model has {found}."
            )

    @property
    def dense_parameters(self) -> int:
        """Weights before; biases are not counted."""
        return self.out_features * self.in_features

    @property
    def parameters(self) -> int:
        """Weights after."""
        if self.rank is None:
            return self.dense_parameters
        return self.rank * (self.out_features + self.in_features)


class HeadPlan(Strict):
    """Head sizes of one attention block.

    Attributes
    ----------
    head_size
        Head size of the original, for queries, keys and values.
    qk_size, vo_size
        Head size after folding, of queries and keys, and of values.
    frequencies
        With rotary embedding: indices of the ``qk_size / 2`` frequencies kept of the original's
        ``head_size / 2``; the same in every head.
    latent
        Whether cross-attention reads one latent of the encoder's output as keys and values, of
        ``qk_size`` = ``vo_size`` dimensions, for all heads of all layers.
    univariate
        Whether every series is a group of its own, in group attention. Its softmax is then over one
        element: queries and keys are dropped, and ``qk_size`` = ``vo_size`` is a share of the rank
        of the product of outputs and values.
    single_key
        The same of self-attention in a decoder that reads a single token.
    constant_query
        Whether the block is the first of such a decoder, whose queries are the same for all series:
        one dimension a head is exact, of queries and keys in cross-attention, of values in
        self-attention.
    """

    name: str
    kind: BlockKind
    d_model: Size
    num_heads: Size
    head_size: Size
    qk_size: Size
    vo_size: Size
    frequencies: tuple[int, ...] | None = None
    latent: bool = False
    univariate: bool = False
    single_key: bool = False
    constant_query: bool = False

    @model_validator(mode="after")
    def _is_group_attention(self) -> HeadPlan:
        if self.univariate and (self.kind != "group" or self.qk_size != self.vo_size):
            raise ValueError(
                f"{self.name}: only group attention is univariate, with qk_size = vo_size"
            )
        return self

    @model_validator(mode="after")
    def _is_of_a_single_token(self) -> HeadPlan:
        if self.single_key and (self.kind != "decoder" or self.qk_size != self.vo_size):
            raise ValueError(
                f"{self.name}: only decoder self-attention has a single key, with qk_size = vo_size"
            )
        constant = self.single_key or (self.kind == "cross" and not self.latent)
        if self.constant_query and not (constant and self.qk_size == 1):
            raise ValueError(f"{self.name}: only a decoder has a constant query, with qk_size 1")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> HeadPlan:
        if self.latent:
            if self.kind != "cross" or self.qk_size != self.vo_size:
                raise ValueError(
                    f"{self.name}: only cross-attention has a latent, with qk_size = vo_size"
                )
            if self.qk_size > self.d_model:
                raise ValueError(
                    f"{self.name}: a latent of size {self.qk_size} is not smaller than d_model, "
                    f"which is {self.d_model}"
                )
            return self
        if max(self.qk_size, self.vo_size) > self.head_size:
            raise ValueError(
                f"{self.name} has head size {self.head_size}; "
                f"{self.qk_size} and {self.vo_size} would not be smaller"
            )
        if self.kind != "time":
            if self.frequencies is not None:
                raise ValueError(f"{self.name} has no rotary embedding, so frequencies: null")
            return self
        if self.qk_size % 2 or self.frequencies is None:
            raise ValueError(
                f"{self.name} has rotary embeddings: give an even qk_size and its frequencies"
            )
        known = {index for index in self.frequencies if 0 <= index < self.head_size // 2}
        if not len(known) == len(self.frequencies) == self.qk_size // 2:
            raise ValueError(
                f"{self.name} needs {self.qk_size // 2} different frequencies below "
                f"{self.head_size // 2}"
            )
        return self

    @property
    def values_only(self) -> bool:
        """Whether queries and keys are dropped."""
        return self.univariate or self.single_key

    @property
    def merged(self) -> bool:
        """Whether values and outputs are one matrix, which has no more weights than the two."""
        return self.values_only and self.d_model <= 2 * self.num_heads * self.vo_size

    @property
    def unchanged(self) -> bool:
        """Whether the original's forecasts are kept, of single series if it is univariate."""
        if self.constant_query:
            return self.values_only or self.vo_size == self.head_size
        whole = self.head_size == self.qk_size == self.vo_size and not self.latent
        return whole or self.merged

    @property
    def dense_parameters(self) -> int:
        """Weights of the four projections before."""
        return 4 * self.d_model * self.num_heads * self.head_size

    @property
    def parameters(self) -> int:
        """Weights after, of this block; a projection to a latent belongs to all blocks."""
        if self.latent:
            return 2 * self.d_model * self.num_heads * self.qk_size
        if self.values_only:
            return self.d_model * min(self.d_model, 2 * self.num_heads * self.vo_size)
        return 2 * self.d_model * self.num_heads * (self.qk_size + self.vo_size)

    @property
    def text(self) -> str:
        """The sizes after, for people."""
        if self.latent:
            return f"latent {self.qk_size}"
        if self.values_only:
            rank = "" if self.merged else f" of rank {self.num_heads * self.vo_size}"
            return f"{'univariate' if self.univariate else 'single key'}, values and outputs{rank}"
        if self.qk_size == self.vo_size:
            return f"head size {self.qk_size}"
        return f"head sizes {self.qk_size} (q, k), {self.vo_size} (v)"


class HiddenPlan(Strict):
    """Hidden units of one feed-forward, or of one patch embedding, which has biases.

    Attributes
    ----------
    d_ff, kept
        Hidden units before and after.
    gated
        Whether hidden units are products of two input projections.
    """

    name: str
    part: Literal["feed_forward", "patch"]
    in_features: Size
    out_features: Size
    d_ff: Size
    kept: Size
    gated: bool = False

    @model_validator(mode="after")
    def _keeps_no_more(self) -> HiddenPlan:
        if self.kept > self.d_ff:
            raise ValueError(f"{self.name} has {self.d_ff} hidden units, fewer than {self.kept}")
        return self

    @property
    def stream_sides(self) -> tuple[str, ...]:
        """Sides (``in_features``, ``out_features``) that are the residual stream."""
        if self.part == "feed_forward":
            return ("in_features", "out_features")
        return ("out_features",) if self.name == INPUT_PATCHES else ("in_features",)

    def _parameters(self, units: int) -> int:
        per_unit = self.in_features * (2 if self.gated else 1) + self.out_features
        return units * (per_unit + (1 if self.part == "patch" else 0))

    @property
    def dense_parameters(self) -> int:
        """Weights before, and biases of a patch embedding."""
        return self._parameters(self.d_ff)

    @property
    def parameters(self) -> int:
        """Weights after, and biases of a patch embedding."""
        return self._parameters(self.kept)

    @property
    def text(self) -> str:
        """The sizes after, for people."""
        return f"{self.kept} hidden units"


class TokenTable(NamedTuple):
    """Shape of a token embedding; ``tied``: the output head is the same table."""

    vocabulary: int
    d_model: int
    tied: bool

    @property
    def weights(self) -> int:
        """Of the embedding, and of a head of its own."""
        return self.vocabulary * self.d_model * (1 if self.tied else 2)

    def factored(self, rank: int) -> int:
        """Weights of one table of that rank and of two projections."""
        return rank * (self.vocabulary + 2 * self.d_model)

    @property
    def break_even(self) -> float:
        """The rank at which factors have as many weights."""
        return self.weights / self.factored(1)


class EmbeddingPlan(Strict):
    """Token embedding and output head of a Chronos-T5, which become one table of lower rank.

    A token is embedded by the table, ``[vocabulary, rank]``, and a projection to the residual
    stream, and scored by the table after a projection of the stream.

    Attributes
    ----------
    tied
        Whether embedding and head were one table before.
    """

    name: Literal["shared"] = TOKENS
    part: Literal["embedding"] = "embedding"
    vocabulary: Size
    d_model: Size
    rank: Size
    tied: bool = True

    def narrowed(self, width: int) -> EmbeddingPlan:
        """In a model of that width, whose rotated stream has a head of its own."""
        return self.model_copy(update={"d_model": width, "tied": False})

    def check(self, width: int | None = None) -> None:
        """Raise PlanError unless factors are smaller, in a model of another ``width``."""
        after = self if width is None else self.narrowed(width)
        if width is not None and self.rank > width:
            raise PlanError(f"rank {self.rank} of the token embedding is above the width, {width}.")
        if after.parameters >= after.dense_parameters:
            raise PlanError(
                f"rank {self.rank} of the token embedding gives {after.parameters:,} parameters, "
                f"no fewer than the {after.dense_parameters:,} without factors; give a lower rank."
            )

    @property
    def dense_parameters(self) -> int:
        """Weights before, of the embedding and of a head of its own."""
        return self._table.weights

    @property
    def parameters(self) -> int:
        """Weights after, of the table and of both projections."""
        return self._table.factored(self.rank)

    @property
    def _table(self) -> TokenTable:
        return TokenTable(self.vocabulary, self.d_model, self.tied)

    @property
    def text(self) -> str:
        """The size after, for people."""
        return f"rank {self.rank}"


class WidthPlan(Strict):
    """Residual-stream width, ``d_model``: the original's, and the new one in ``kept``."""

    d_model: Size
    kept: Size

    @model_validator(mode="after")
    def _is_narrower(self) -> WidthPlan:
        if self.kept >= self.d_model:
            raise ValueError(
                f"width {self.kept} is not smaller than d_model, which is {self.d_model}"
            )
        return self


PlannedLayer = ProjectionPlan | HeadPlan | HiddenPlan | EmbeddingPlan


def stock_frequencies(head_size: int, qk_size: int) -> tuple[int, ...] | None:
    """Indices of the original's rotary frequencies that a stock config of ``qk_size`` keeps.

    theta^(-2 j / qk_size) is one of the original's frequencies theta^(-2 i / head_size) when
    ``qk_size`` divides ``head_size``: i = j head_size / qk_size. None otherwise.
    """
    if head_size % qk_size or qk_size % 2:
        return None
    return tuple(range(0, head_size // 2, head_size // qk_size))


def part_of(layer: PlannedLayer) -> str:
    """``attention``, ``feed_forward``, ``patch`` or ``embedding``."""
    return "attention" if isinstance(layer, HeadPlan) else layer.part


def sizes_text(layer: PlannedLayer) -> str:
    """Sizes of a planned layer, for people."""
    if isinstance(layer, ProjectionPlan):
        return "dense" if layer.rank is None else str(layer.rank)
    return layer.text
