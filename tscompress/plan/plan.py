"""The plan: what becomes of each layer. Plain data that one can read and edit.

A plan says for each projection whether it stays dense or the rank of its two factors (``svd``,
``activation-svd``), or for each attention block and feed-forward the smaller size it gets
(``fold``). It rebuilds the architecture of a compressed checkpoint, so it is saved inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tscompress.errors import PlanError
from tscompress.io.files import write_text_atomically
from tscompress.io.untrusted import UnreadableFileError, first_problem
from tscompress.io.untrusted import read_json as read_json_file
from tscompress.plan.architecture import BlockKind

PLAN_VERSION: Literal[1] = 1
INPUT_PATCHES, OUTPUT_PATCHES = "input_patch_embedding", "output_patch_embedding"
#: No layer is larger; products of sizes beyond it are no numbers of parameters.
Size = Annotated[int, Field(ge=1, le=2**31)]


class ProjectionPlan(BaseModel):
    """What becomes of one Linear layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        return self.out_features * self.in_features

    @property
    def parameters(self) -> int:
        if self.rank is None:
            return self.dense_parameters
        return self.rank * (self.out_features + self.in_features)


class HeadPlan(BaseModel):
    """Head sizes of one attention block.

    Attributes
    ----------
    head_size
        Of the original: queries, keys and values of each head have this many numbers.
    qk_size, vo_size
        After folding, of queries and keys, and of values.
    frequencies
        With rotary embedding: which of the original's ``head_size / 2`` frequencies the
        ``qk_size / 2`` pairs of numbers turn with; the same in every head.
    latent
        Cross-attention whose keys and values are one and the same latent of the encoder's output,
        with ``qk_size`` = ``vo_size`` numbers, for all heads of all layers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: BlockKind
    d_model: Size
    num_heads: Size
    head_size: Size
    qk_size: Size
    vo_size: Size
    frequencies: tuple[int, ...] | None = None
    latent: bool = False

    @model_validator(mode="after")
    def _sizes_fit(self) -> HeadPlan:
        if self.latent:
            if self.kind != "cross" or self.qk_size != self.vo_size:
                raise ValueError(
                    f"{self.name}: only cross-attention has a latent, with qk_size = vo_size"
                )
            if self.qk_size > self.d_model:
                raise ValueError(
                    f"{self.name}: a latent of {self.qk_size} numbers would not be smaller than "
                    f"what it is of, which has {self.d_model}"
                )
            return self
        if max(self.qk_size, self.vo_size) > self.head_size:
            raise ValueError(
                f"{self.name} has heads of size {self.head_size}; "
                f"{self.qk_size} and {self.vo_size} would not be smaller"
            )
        if self.kind != "time":
            if self.frequencies is not None:
                raise ValueError(f"{self.name} has no rotary embedding, so frequencies: null")
            return self
        if self.qk_size % 2 or self.frequencies is None:
            raise ValueError(f"{self.name} turns pairs: an even qk_size, and their frequencies")
        known = {index for index in self.frequencies if 0 <= index < self.head_size // 2}
        if not len(known) == len(self.frequencies) == self.qk_size // 2:
            raise ValueError(
                f"{self.name} needs {self.qk_size // 2} different frequencies below "
                f"{self.head_size // 2}"
            )
        return self

    @property
    def dense_parameters(self) -> int:
        return 4 * self.d_model * self.num_heads * self.head_size

    @property
    def parameters(self) -> int:
        """Of the block alone: the projection to a latent belongs to all blocks."""
        if self.latent:
            return 2 * self.d_model * self.num_heads * self.qk_size
        return 2 * self.d_model * self.num_heads * (self.qk_size + self.vo_size)

    @property
    def text(self) -> str:
        if self.latent:
            return f"latent {self.qk_size}"
        if self.qk_size == self.vo_size:
            return f"head size {self.qk_size}"
        return f"head sizes {self.qk_size} (q, k), {self.vo_size} (v)"


class HiddenPlan(BaseModel):
    """Hidden units of one feed-forward, or of one patch embedding, which has biases.

    Attributes
    ----------
    d_ff, kept
        Hidden units before and after.
    gated
        Two input projections, whose product is the hidden unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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
            raise ValueError(f"{self.name} has {self.d_ff} hidden units, not {self.kept} to keep")
        return self

    @property
    def stream_sides(self) -> tuple[str, ...]:
        """Which of its features are the residual stream's."""
        if self.part == "feed_forward":
            return ("in_features", "out_features")
        return ("out_features",) if self.name == INPUT_PATCHES else ("in_features",)

    def _parameters(self, units: int) -> int:
        per_unit = self.in_features * (2 if self.gated else 1) + self.out_features
        return units * (per_unit + (1 if self.part == "patch" else 0))

    @property
    def dense_parameters(self) -> int:
        return self._parameters(self.d_ff)

    @property
    def parameters(self) -> int:
        return self._parameters(self.kept)

    @property
    def text(self) -> str:
        return f"{self.kept} hidden units"


class WidthPlan(BaseModel):
    """Numbers of the residual stream, ``d_model``: of the original, and those that stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: Size
    kept: Size

    @model_validator(mode="after")
    def _is_narrower(self) -> WidthPlan:
        if self.kept >= self.d_model:
            raise ValueError(
                f"a width of {self.kept} is not smaller than d_model, which is {self.d_model}"
            )
        return self


PlannedLayer = ProjectionPlan | HeadPlan | HiddenPlan


class Plan(BaseModel):
    """What every layer becomes, and how that came about.

    Attributes
    ----------
    method
        ``fold``, ``svd`` or ``activation-svd``.
    schedule
        The schedule that chose the sizes, as in a recipe, for the record.
    projections
        Of ``svd`` and ``activation-svd``.
    heads, hidden
        Of ``fold``. Their names are those after layers were dropped.
    kept_layers
        Of ``fold`` with fewer layers: stack to the original's indices of the layers that stay.
    width
        Of ``fold`` with a narrower residual stream. ``heads`` and ``hidden`` have the original's.
    calibrated_on
        What was read of the user's series, in one line, for the record.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = PLAN_VERSION
    family: str
    method: Literal["fold", "svd", "activation-svd"]
    schedule: dict[str, Any] = Field(default_factory=dict)
    projections: tuple[ProjectionPlan, ...] = ()
    heads: tuple[HeadPlan, ...] = ()
    hidden: tuple[HiddenPlan, ...] = ()
    kept_layers: dict[str, tuple[int, ...]] | None = None
    width: WidthPlan | None = None
    calibrated_on: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Plan:
        names = Counter(layer.name for layer in self.layers)
        repeated = sorted(name for name, count in names.items() if count > 1)
        if repeated:
            raise ValueError(f"layers named more than once: {', '.join(repeated)}")
        folds = bool(self.heads or self.hidden or self.kept_layers or self.width)
        if folds if self.method != "fold" else bool(self.projections):
            raise ValueError(f"{self.method} plans and the other methods' layers do not mix")
        if self.width is not None:
            sizes = [(head.name, head.d_model) for head in self.heads]
            for layer in self.hidden:
                sizes += [(layer.name, getattr(layer, side)) for side in layer.stream_sides]
            for name, size in sizes:
                if size != self.width.d_model:
                    raise ValueError(
                        f"{name} reads or writes a stream of {size} numbers, and width has "
                        f"{self.width.d_model} before"
                    )
        cross = [head for head in self.heads if head.kind == "cross"]
        if len({head.qk_size if head.latent else None for head in cross}) > 1:
            raise ValueError("one latent is for all cross-attention: give every block the same one")
        return self

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """Every planned layer."""
        return (*self.projections, *self.heads, *self.hidden)

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank of the projections that become two factors."""
        return {p.name: p.rank for p in self.projections if p.rank is not None}

    @property
    def latent(self) -> int | None:
        """Numbers of the latent that all cross-attention reads; None without."""
        return next((head.qk_size for head in self.heads if head.latent), None)

    @property
    def changes_anything(self) -> bool:
        """Whether applying it makes the model, or its cache, smaller."""
        return bool(self.kept_layers or self.latent or self.width) or any(
            layer.parameters < layer.dense_parameters for layer in self.layers
        )

    @property
    def uniform_sizes(self) -> tuple[int, int] | None:
        """``(d_kv, d_ff)`` of a plain config that the folded model fits; None if there is none."""
        sizes = {size for head in self.heads for size in (head.qk_size, head.vo_size)}
        units = {hidden.kept for hidden in self.hidden}
        if self.method != "fold" or len(sizes) != 1 or len(units) != 1 or self.latent:
            return None
        (d_kv,), (d_ff,) = sizes, units
        stock = all(
            head.frequencies is None or head.frequencies == stock_frequencies(head.head_size, d_kv)
            for head in self.heads
        )
        return (d_kv, d_ff) if stock else None

    def narrowed(self) -> Plan:
        """The plan of the model whose stream is already as narrow as this one asks for."""
        if self.width is None:
            return self
        kept = self.width.kept
        heads = (head.model_copy(update={"d_model": kept}) for head in self.heads)
        hidden = (
            layer.model_copy(update=dict.fromkeys(layer.stream_sides, kept))
            for layer in self.hidden
        )
        return self.model_copy(
            update={"heads": tuple(heads), "hidden": tuple(hidden), "width": None}
        )

    def parameters(self, part: str | None = None) -> tuple[int, int]:
        """Parameters of the planned layers ``(before, after)``.

        ``part``: ``attention``, ``feed_forward``, ``patch``; None for all of them.
        """
        before, after = (
            [layer for layer in plan.layers if part in (None, part_of(layer))]
            for plan in (self, self.narrowed())
        )
        shared = 0
        if self.latent and part in (None, "attention"):
            shared = self.latent * next(head.d_model for head in self.narrowed().heads)
        return sum(p.dense_parameters for p in before), shared + sum(p.parameters for p in after)

    @property
    def attention_parameter_ratio(self) -> float:
        """After / before, of the attention projections of the layers that stay."""
        before, after = self.parameters("attention")
        return after / before if before else 1.0

    def diff(self, other: Plan) -> list[str]:
        """One line for each layer that differs, ``name: old -> new``."""
        ours, theirs = ({p.name: _text(p) for p in plan.layers} for plan in (self, other))
        lines = []
        if self.kept_layers != other.kept_layers:
            old, new = (_layers_text(plan.kept_layers) for plan in (self, other))
            lines.append(f"layers: {old} -> {new}")
        if self.width != other.width:
            old, new = (str(plan.width.kept) if plan.width else "all" for plan in (self, other))
            lines.append(f"width: {old} -> {new}")
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            old, new = (texts.get(name, "absent") for texts in (ours, theirs))
            if old != new:
                lines.append(f"{name}: {old} -> {new}")
        return lines

    def summary(self) -> str:
        """Sizes, and the reasons why layers stay dense, in a few lines."""
        read = [f"calibrated on {self.calibrated_on}"] if self.calibrated_on else []
        return "\n".join([*self._sizes_summary(), *read])

    def _sizes_summary(self) -> list[str]:
        before, after = self.parameters("attention")
        attention = (
            f"attention {before:,} -> {after:,} parameters ({self.attention_parameter_ratio:.1%})"
        )
        if self.method == "fold":
            return self._fold_summary(attention)
        lines = [
            f"{self.method}: {len(self.ranks)} of {len(self.projections)} projections become two "
            f"factors; {attention}"
        ]
        reasons: dict[str, int] = {}
        for projection in self.projections:
            if projection.rank is None:
                reason = projection.reason or "set to dense by hand"
                reasons[reason] = reasons.get(reason, 0) + 1
        return lines + [f"dense: {count} projections, {why}" for why, count in reasons.items()]

    def _fold_summary(self, attention: str) -> list[str]:
        lines = []
        uniform = self.uniform_sizes
        if uniform is not None:
            width = f"d_model {self.width.kept}, " if self.width else ""
            lines.append(f"fold to a plain config with {width}d_kv {uniform[0]}, d_ff {uniform[1]}")
        else:
            if self.width:
                lines.append(f"fold, residual stream: {self.width.kept} of {self.width.d_model}")
            heads = [head for head in self.heads if not head.latent]
            for label, sizes in (
                ("queries and keys", [head.qk_size for head in heads]),
                ("values", [head.vo_size for head in heads]),
                ("hidden units", [hidden.kept for hidden in self.hidden]),
            ):
                lines.append(f"fold, {label}: {min(sizes)} to {max(sizes)}" if sizes else "")
            if self.latent:
                lines.append(f"fold, all cross-attention: one latent of {self.latent}")
        lines = [*filter(None, lines), attention]
        before, after = (
            a + b
            for a, b in zip(self.parameters("feed_forward"), self.parameters("patch"), strict=True)
        )
        if after < before:
            lines.append(
                f"feed-forward and patch layers {before:,} -> {after:,} parameters "
                f"({after / before:.1%})"
            )
        if self.kept_layers:
            lines.append(f"layers kept: {_layers_text(self.kept_layers)}")
        found = self.schedule.get("found")
        if isinstance(found, dict):
            ratios = {name: found[name] for name in found if name != "predicted_loss"}
            measured = ratios.pop("measured", None)
            text = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
            settled = "" if measured is None else f" measured {measured:.4f};"
            lines.append(f"budget {self.schedule.get('budget')}:{settled} of the original's {text}")
        return lines

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing the file in one step."""
        write_text_atomically(Path(path), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises
        ------
        PlanError
            The file is missing, is not JSON, or is not a plan; names the first offending key.
        """
        return cls.parse(read_json(path, "plan"), source=repr(str(path)))

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str = "the plan") -> Plan:
        """Validate a plan given as a dictionary; PlanError as in :meth:`load`."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            where, reason, _ = first_problem(error)
            raise PlanError(f"{source}: {where or 'plan'}: {reason}.") from None


def read_json(path: str | Path, what: str) -> Any:
    """Content of a JSON file; PlanError if it is missing or is not JSON."""
    try:
        return read_json_file(Path(path))
    except FileNotFoundError:
        raise PlanError(f"there is no {what} at {str(path)!r}.") from None
    except UnreadableFileError as error:
        raise PlanError(f"{str(path)!r} cannot be read as JSON: {error}.") from None


def stock_frequencies(head_size: int, qk_size: int) -> tuple[int, ...] | None:
    """Indices of the original's rotary frequencies that a plain config of ``qk_size`` turns with.

    theta^(-2 j / qk_size) is one of the original's frequencies theta^(-2 i / head_size) when
    ``qk_size`` divides ``head_size``: i = j head_size / qk_size. None otherwise.
    """
    if head_size % qk_size or qk_size % 2:
        return None
    return tuple(range(0, head_size // 2, head_size // qk_size))


def part_of(layer: PlannedLayer) -> str:
    """``attention``, ``feed_forward`` or ``patch``."""
    return "attention" if isinstance(layer, HeadPlan) else layer.part


def _text(layer: PlannedLayer) -> str:
    if isinstance(layer, ProjectionPlan):
        return "dense" if layer.rank is None else str(layer.rank)
    return layer.text


def _layers_text(kept: Mapping[str, tuple[int, ...]] | None) -> str:
    if not kept:
        return "all"
    return "; ".join(f"{stack} {', '.join(map(str, layers))}" for stack, layers in kept.items())
