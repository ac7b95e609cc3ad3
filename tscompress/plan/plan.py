"""The plan: sizes of each layer before and after, as data to read and edit.

A plan has the rank of each projection, or null if it stays dense (``svd``, ``activation-svd``), or
the smaller size of each attention block and feed-forward (``fold``). It defines the architecture
of a compressed checkpoint, so it is saved with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from tscompress.errors import PlanError
from tscompress.io.files import write_text_atomically
from tscompress.io.strict import Strict
from tscompress.io.text import percent, rounded_count
from tscompress.io.untrusted import UnreadableFileError, first_problem
from tscompress.io.untrusted import read_json as read_json_file
from tscompress.plan.layer_plans import (
    EmbeddingPlan,
    HeadPlan,
    HiddenPlan,
    PlannedLayer,
    ProjectionPlan,
    WidthPlan,
    part_of,
    sizes_text,
    stock_frequencies,
)

PLAN_VERSION: Literal[1] = 1
#: Options that drop what a forecast never needs; a fold of these alone is exact.
DROPS = ("univariate", "single_token")
_PLACE = re.compile(r"(\w+)\.block\.(\d+)(?=\.|$)")
M = TypeVar("M", bound=BaseModel)


class Plan(Strict):
    """Sizes of every layer, and the schedule that chose them.

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
    embedding
        Of ``fold`` of a Chronos-T5 with a token embedding of lower rank.
    kept_layers
        Of ``fold`` with fewer layers: stack to the original's indices of the kept layers.
    width
        Of ``fold`` with a smaller ``d_model``; ``heads`` and ``hidden`` have the original's.
    calibrated_on
        The user's series that were read, in one line, for the record.
    """

    version: Literal[1] = PLAN_VERSION
    family: str
    method: Literal["fold", "svd", "activation-svd"]
    schedule: dict[str, Any] = Field(default_factory=dict)
    projections: tuple[ProjectionPlan, ...] = ()
    heads: tuple[HeadPlan, ...] = ()
    hidden: tuple[HiddenPlan, ...] = ()
    embedding: EmbeddingPlan | None = None
    kept_layers: dict[str, tuple[int, ...]] | None = None
    width: WidthPlan | None = None
    calibrated_on: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Plan:
        names = Counter(layer.name for layer in self.layers)
        repeated = sorted(name for name, count in names.items() if count > 1)
        if repeated:
            raise ValueError(f"layers named more than once: {', '.join(repeated)}")
        folds = bool(self.heads or self.hidden or self.embedding or self.kept_layers or self.width)
        if folds if self.method != "fold" else bool(self.projections):
            raise ValueError(f"a {self.method} plan cannot have layers of another method")
        if self.width is not None:
            sizes = [(head.name, head.d_model) for head in self.heads]
            for layer in self.hidden:
                sizes += [(layer.name, getattr(layer, side)) for side in layer.stream_sides]
            if self.embedding is not None:
                sizes.append((self.embedding.name, self.embedding.d_model))
            for name, size in sizes:
                if size != self.width.d_model:
                    raise ValueError(
                        f"{name} has d_model {size}, and width has d_model {self.width.d_model}"
                    )
        if self.embedding is not None:
            try:
                self.embedding.check(None if self.width is None else self.width.kept)
            except PlanError as error:
                raise ValueError(str(error).removesuffix(".")) from None
        cross = [head for head in self.heads if head.kind == "cross"]
        latents = [head.qk_size for head in cross if head.latent]
        if self.width is not None and max(latents, default=0) > self.width.kept:
            raise ValueError(
                f"a latent of size {max(latents)} is above the new d_model {self.width.kept}; give "
                "that, or less"
            )
        if len({head.qk_size if head.latent else None for head in cross}) > 1:
            raise ValueError("all cross-attention reads one latent: give every block the same size")
        if len({head.univariate for head in self.heads if head.kind == "group"}) > 1:
            raise ValueError("all group attention is univariate, or none of it")
        if len({head.single_key for head in self.heads if head.kind == "decoder"}) > 1:
            raise ValueError("all decoder self-attention has a single key, or none of it")
        return self

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """Every planned layer."""
        tokens = () if self.embedding is None else (self.embedding,)
        return (*self.projections, *self.heads, *self.hidden, *tokens)

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank of the projections that become two factors."""
        return {p.name: p.rank for p in self.projections if p.rank is not None}

    @property
    def latent(self) -> int | None:
        """Dimensions of the latent that all cross-attention reads; None without one."""
        return next((head.qk_size for head in self.heads if head.latent), None)

    @property
    def univariate(self) -> bool:
        """Whether every series is a group of its own, so that no series attends to others."""
        return any(head.univariate for head in self.heads)

    @property
    def single_token(self) -> bool:
        """Whether the decoder reads a single token, and what that makes useless is dropped."""
        return any(head.single_key or head.constant_query for head in self.heads)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those of :data:`DROPS` that the plan has."""
        return tuple(name for name in DROPS if getattr(self, name))

    @property
    def calibrates(self) -> bool:
        """Whether the model is fitted to series; without, only what does nothing is dropped."""
        if not self.dropped:
            return self.method != "svd"
        sizes = (entry.kept < entry.d_ff for entry in self.hidden)
        heads = (not head.unchanged for head in self.heads)
        others = self.kept_layers or self.width or self.embedding
        return bool(others) or any(sizes) or any(heads)

    @property
    def changes_anything(self) -> bool:
        """Whether it makes the model or its cache smaller."""
        return bool(self.kept_layers or self.latent or self.width) or any(
            layer.parameters < layer.dense_parameters for layer in self.layers
        )

    @property
    def uniform_sizes(self) -> tuple[int, int] | None:
        """``(d_kv, d_ff)`` of the stock config of the folded model; None if sizes differ."""
        sizes = {size for head in self.heads for size in (head.qk_size, head.vo_size)}
        units = {hidden.kept for hidden in self.hidden}
        own_layers = self.latent or self.dropped or self.embedding
        if self.method != "fold" or len(sizes) != 1 or len(units) != 1 or own_layers:
            return None
        (d_kv,), (d_ff,) = sizes, units
        stock = all(
            head.frequencies is None or head.frequencies == stock_frequencies(head.head_size, d_kv)
            for head in self.heads
        )
        return (d_kv, d_ff) if stock else None

    def name_before(self, name: str) -> str:
        """What a planned layer was called before layers were dropped: they are numbered anew."""
        place = _PLACE.match(name)
        kept = None if place is None else (self.kept_layers or {}).get(place[1])
        if place is None or kept is None:
            return name
        return f"{place[1]}.block.{kept[int(place[2])]}{name[place.end() :]}"

    def drops_layer_of(self, name: str) -> bool:
        """Whether the plan drops the layer of the original that ``name`` is in."""
        place = _PLACE.match(name)
        kept = None if place is None else (self.kept_layers or {}).get(place[1])
        return place is not None and kept is not None and int(place[2]) not in kept

    def narrowed(self) -> Plan:
        """The plan for the model that is already sliced to this plan's width."""
        if self.width is None:
            return self
        kept = self.width.kept
        heads = (head.model_copy(update={"d_model": kept}) for head in self.heads)
        hidden = (
            layer.model_copy(update=dict.fromkeys(layer.stream_sides, kept))
            for layer in self.hidden
        )
        tokens = None if self.embedding is None else self.embedding.narrowed(kept)
        return self.model_copy(
            update={
                "heads": tuple(heads), "hidden": tuple(hidden), "embedding": tokens, "width": None
            }
        )  # fmt: skip

    def parameters(self, part: str | None = None) -> tuple[int, int]:
        """Parameters of the planned layers ``(before, after)``.

        ``part``: ``attention``, ``feed_forward``, ``patch``, ``embedding``; None for all of them.
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
        """After / before, of the attention projections of the kept layers."""
        before, after = self.parameters("attention")
        return after / before if before else 1.0

    def diff(self, other: Plan) -> list[str]:
        """One line for each layer that differs, ``name: old -> new``."""
        ours, theirs = ({p.name: _diff_text(p) for p in plan.layers} for plan in (self, other))
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

    def __repr__(self) -> str:
        before, after = self.parameters()
        size = f"{rounded_count(before)} -> {rounded_count(after)} parameters of planned layers"
        return f"Plan({self.family}, {self._sizes_summary()[0]}, {size})"

    def __str__(self) -> str:
        return repr(self)

    def summary(self) -> str:
        """Sizes, and reasons for layers that stay dense, in a few lines."""
        read = [f"calibrated on {self.calibrated_on}"] if self.calibrated_on else []
        return "\n".join([*self._sizes_summary(), *read])

    def _sizes_summary(self) -> list[str]:
        before, after = self.parameters("attention")
        share = percent(self.attention_parameter_ratio, 1)
        of_kept = " of the kept layers" if self.kept_layers else ""
        attention = f"attention {before:,} -> {after:,} parameters{of_kept} ({share})"
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
            lines.append(f"fold to a stock config with {width}d_kv {uniform[0]}, d_ff {uniform[1]}")
        else:
            if self.width:
                lines.append(f"fold, residual stream: {self.width.kept} of {self.width.d_model}")
            heads = [head for head in self.heads if not (head.latent or head.values_only)]
            kept = {
                "queries and keys": [head.qk_size for head in heads],
                "values": [head.vo_size for head in heads],
                "hidden units": [hidden.kept for hidden in self.hidden],
            }
            for label, sizes in kept.items() if self.calibrates else ():
                lines.append(f"fold, {label}: {min(sizes)} to {max(sizes)}" if sizes else "")
            if self.latent:
                lines.append(f"fold, all cross-attention: one latent of {self.latent}")
            if self.embedding is not None:
                tokens = self.embedding
                lines.append(f"fold, token embedding: {tokens.text} of {tokens.d_model}")
            lines += self._dropped()
        lines = [*filter(None, lines), attention]
        before, after = (
            a + b
            for a, b in zip(self.parameters("feed_forward"), self.parameters("patch"), strict=True)
        )
        if after < before:
            lines.append(
                f"feed-forward and patch layers {before:,} -> {after:,} parameters "
                f"({percent(after / before, 1)})"
            )
        if self.kept_layers:
            lines.append(f"layers kept: {_layers_text(self.kept_layers)}")
        found = self.schedule.get("found")
        if isinstance(found, dict):
            lines.append(f"budget {self.schedule.get('budget')}: {_found_text(found)}")
        return lines

    def _dropped(self) -> list[str]:
        """Attention that lost its queries and keys, a line a kind."""
        kinds = {
            "univariate: group attention": [h for h in self.narrowed().heads if h.univariate],
            "single token: decoder self-attention": [
                h for h in self.narrowed().heads if h.single_key
            ],
        }
        return [
            f"{kind} without queries and keys, {sum(head.merged for head in heads)} of "
            f"{len(heads)} blocks one matrix"
            for kind, heads in kinds.items()
            if heads
        ]

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing the file in one step."""
        write_text_atomically(Path(path), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises
        ------
        PlanError
            The file is missing, is not JSON, or is not a plan; the message names the first
            offending key.
        """
        return cls.parse(read_json(path, "plan"), source=repr(str(path)))

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str = "the plan") -> Plan:
        """Validate a plan given as a dictionary; raises as :meth:`load`."""
        return validated(cls, content, source, "plan")


def validated(model: type[M], content: Any, source: str, kind: str) -> M:
    """``content`` as ``model``; PlanError names ``source`` and the first offending key."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        where, reason, _ = first_problem(error)
        raise PlanError(f"{source}: {where or kind}: {reason}.") from None


def read_json(path: str | Path, kind: str) -> Any:
    """Content of a JSON file; PlanError if it is missing or is not JSON."""
    try:
        return read_json_file(Path(path))
    except FileNotFoundError:
        raise PlanError(f"there is no {kind} at {str(path)!r}.") from None
    except UnreadableFileError as error:
        raise PlanError(f"{str(path)!r} cannot be read as JSON: {error}.") from None


def _layers_text(kept: Mapping[str, tuple[int, ...]] | None) -> str:
    if not kept:
        return "all"
    return "; ".join(f"{stack} {', '.join(map(str, layers))}" for stack, layers in kept.items())


def _found_text(found: Mapping[str, float]) -> str:
    """Ratios to the original that a budget led to: measured ones, and costs."""
    measured, costs = [], []
    for name, ratio in found.items():
        if name.startswith("measured"):
            what = name.removeprefix("measured_").replace("_", " ")
            measured.append(f"{what} {ratio:.4f}")
        elif name != "predicted_loss":
            costs.append(f"{name} {ratio:.3f}")
    return "; ".join(filter(None, [", ".join(measured), f"of the original's {', '.join(costs)}"]))


def _diff_text(layer: PlannedLayer) -> str:
    """Sizes of a layer, and its rotary frequencies where no stock config has them."""
    text = sizes_text(layer)
    if isinstance(layer, HeadPlan) and layer.frequencies is not None:
        stock = stock_frequencies(layer.head_size, layer.qk_size)
        text += "" if layer.frequencies == stock else f", frequencies {layer.frequencies}"
    return text
