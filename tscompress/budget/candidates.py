"""Candidates: sizes for a whole model, with their costs and the loss that is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from tscompress.budget.costs import CostModel
from tscompress.budget.part_costs import Costs, Measure, SizeKind
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.errors import PlanError
from tscompress.families.registry import adapter_of

HEADS: tuple[SizeKind, ...] = ("qk", "vo")
HIDDEN: tuple[SizeKind, ...] = ("hidden",)
TOKEN_RANK: tuple[SizeKind, ...] = ("embedding",)


@dataclass(frozen=True)
class Candidate:
    """Sizes for a whole model, as :func:`~tscompress.compression.fold_plans.fold_plan` takes them.

    Attributes
    ----------
    qk, vo, hidden
        Sizes of a stock config, or sizes by name.
    kept_layers
        Stack to the original's indices of the kept layers; None: all.
    loss
        Predicted rise of the forecast loss.
    costs
        Exact, of the whole model.
    width
        New residual-stream width; None: unchanged.
    embedding
        Rank of the token embedding, by its name; empty: it stays, or there is none.
    """

    qk: int | Mapping[str, int] = field(hash=False)
    vo: int | Mapping[str, int] = field(hash=False)
    hidden: int | Mapping[str, int] = field(hash=False)
    kept_layers: Mapping[str, tuple[int, ...]] | None = field(hash=False)
    loss: float
    costs: Costs
    width: int | None = None
    embedding: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        words = [] if self.width is None else [f"d_model {self.width}"]
        qk, vo, hidden = map(_range_text, (self.qk, self.vo, self.hidden))
        if qk == vo and " " not in qk + hidden:  # one size each
            words += [f"d_kv {qk}", f"d_ff {hidden}"]
        else:
            words += [f"queries and keys {qk}", f"values {vo}", f"hidden units {hidden}"]
        words += [f"token embedding {rank}" for rank in self.embedding.values()]
        kept = (self.kept_layers or {}).items()
        return ", ".join([*words, *(f"{stack} layers {len(layers)}" for stack, layers in kept)])


def _range_text(sizes: int | Mapping[str, int]) -> str:
    """``8``, or ``2 to 8`` for sizes that differ."""
    found = sorted({sizes} if isinstance(sizes, int) else set(sizes.values()))
    return " to ".join(map(str, dict.fromkeys([found[0], found[-1]])))


def folded_candidates(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    *,
    original: CostModel | None = None,
    width: int | None = None,
    multiple: int = 1,
    depth: bool = False,
    narrower: Callable[[int], CostModel] | None = None,
) -> list[Candidate]:
    """Every stock config of measured sizes, including the original's.

    Parameters
    ----------
    original
        Costs of the whole model, where ``cost_model`` is of one that is narrower already; None:
        that is whole.
    width
        The residual-stream width of that narrower model.
    multiple
        Changed sizes are multiples of this: measured ones are rounded up.
    depth
        Also with fewer layers. The least sensitive are dropped first; each stack keeps one, and a
        Chronos-T5 keeps as many in the encoder as in the decoder or more: stock transformers 5
        counts the decoder's caches by the encoder's layers and cannot generate otherwise.
    narrower
        Gives the costs of the model at another residual-stream width; None: keep ``d_model``.

    Raises
    ------
    PlanError
        The sensitivity has no sizes common to all layers, no layers, or is of another model.
    """
    head_sizes = _common_sizes(sensitivity, HEADS, multiple)
    full, family = head_sizes[0], adapter_of(sensitivity.family)
    head_sizes = [size for size in head_sizes if family.allows_head_size(full, size)]
    unit_sizes = _common_sizes(sensitivity, HIDDEN, multiple)
    candidates = []
    for at, lost_width, costs in widths_of(sensitivity, cost_model, multiple, narrower, width):
        # No head has use for more dimensions than the stream that it reads.
        widest = full if at is None else max(at, head_sizes[-1])
        useful = [size for size in head_sizes if size <= widest]
        header = header_cost(costs, original or cost_model)
        for kept, lost_layers in _depths(sensitivity, cost_model, depth):
            base, lost = costs.costs(kept_layers=kept) + header, lost_width + lost_layers
            # Costs are affine in these sizes: price each size once, not each pair.
            heads = [(n, *_priced(sensitivity, costs, HEADS, n, kept)) for n in useful]
            units = [(n, *_priced(sensitivity, costs, HIDDEN, n, kept)) for n in unit_sizes]
            candidates += [
                Candidate(d, d, d_ff, kept, lost + loss_h + loss_u, base + costs_h + costs_u, at)
                for (d, loss_h, costs_h), (d_ff, loss_u, costs_u) in product(heads, units)
            ]
    return candidates


def header_cost(costs: CostModel, original: CostModel) -> Costs:
    """What the header of a narrower model's weights adds: an untied head is one name more."""
    return Costs(bytes=max(0, costs.header_bytes - original.header_bytes))


def widths_of(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    multiple: int,
    narrower: Callable[[int], CostModel] | None,
    width: int | None = None,
) -> Iterator[tuple[int | None, float, CostModel]]:
    """Residual-stream widths, the predicted loss of each, and the costs of a model of that width.

    The first is ``width``, that of ``cost_model``; None: the original's. Others are narrower.
    """
    yield width, 0.0, cost_model
    if narrower is None:
        return
    for part in sensitivity.parts:
        if part.kind == "width" and part.sizes:
            for width in sizes_of(sensitivity, part, multiple)[1:]:
                yield width, sensitivity.cost(part.name, "width", width), narrower(width)


def efficient(candidates: Iterable[Candidate], measure: Measure) -> list[Candidate]:
    """The Pareto front of predicted loss and ``measure``, most expensive first."""
    best = math.inf
    kept = []
    for candidate in sorted(candidates, key=lambda one: (one.costs.of(measure), one.loss)):
        if candidate.loss <= best:
            best = candidate.loss
            kept.append(candidate)
    return kept[::-1]


def sizes_of(sensitivity: Sensitivity, part: Part, multiple: int) -> list[int]:
    """Sizes to choose from, descending, the full one first."""
    if multiple < 1:
        raise PlanError(f"sizes cannot be multiples of {multiple}; give 8 or 16, or 1 for any.")
    rounded = {min(part.size, math.ceil(size / multiple) * multiple) for size in part.sizes}
    free = sensitivity.settings.get("fold", {}).get("frequencies") == "free"
    if part.kind == "qk" and not free:
        # A rounded size may not be one at which a stock config keeps the rotary frequencies.
        allows = adapter_of(sensitivity.family).allows_head_size
        rounded = {size for size in rounded if size in part.sizes or allows(part.size, size)}
    if part.kind == "embedding":
        # Above the largest rank that is measured factors may have more weights.
        rounded = {size for size in rounded if size <= part.sizes[0]}
    return sorted(rounded | {part.size}, reverse=True)


def _common_sizes(
    sensitivity: Sensitivity, kinds: tuple[SizeKind, ...], multiple: int
) -> list[int]:
    found = [
        set(sizes_of(sensitivity, part, multiple))
        for part in sensitivity.parts
        if part.kind in kinds
    ]
    common = set.intersection(*found) if found else set()
    if not common:
        raise PlanError(
            f"the sensitivity has no {' or '.join(kinds)} size common to all layers; "
            "measure every layer at the same sizes."
        )
    return sorted(common, reverse=True)


def _priced(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    kinds: tuple[SizeKind, ...],
    size: int,
    kept: Mapping[str, tuple[int, ...]] | None,
) -> tuple[float, Costs]:
    """Loss and costs added by one size for all parts of these kinds in the kept layers."""
    sizes: dict[str, dict[str, int]] = {kind: {} for kind in kinds}
    loss = 0.0
    for part in sensitivity.parts:
        layer = cost_model.layer_of(part.name)
        gone = kept and layer and layer[1] not in kept.get(layer[0], (layer[1],))
        if part.kind in kinds and not gone:
            sizes[part.kind][part.name] = size
            loss += sensitivity.cost(part.name, part.kind, size)
    # The saving of a size does not depend on other layers, so names may be those before dropping.
    return loss, costs_of(cost_model, sizes) - cost_model.original


def costs_of(cost_model: CostModel, sizes: Mapping[str, Mapping[str, int]]) -> Costs:
    """Costs of the whole model with these sizes, by kind and by name of the part."""
    return cost_model.costs(
        sizes.get("qk"), sizes.get("vo"), sizes.get("hidden"), sizes.get("embedding")
    )


def _depths(
    sensitivity: Sensitivity, cost_model: CostModel, depth: bool
) -> Iterator[tuple[dict[str, tuple[int, ...]] | None, float]]:
    """Kept layers and the predicted loss, from all layers to fewer."""
    yield None, 0.0
    if not depth:
        return
    costs = {
        layer: sensitivity.cost(part.name, "layer", 0)
        for part in sensitivity.parts
        if part.kind == "layer" and part.sizes and (layer := cost_model.layer_of(part.name))
    }
    if not costs:
        raise PlanError("the sensitivity has no layers; measure them, or leave depth out.")
    kept: dict[str, set[int]] = {}
    for part in sensitivity.parts:
        if layer := cost_model.layer_of(part.name):
            kept.setdefault(layer[0], set()).add(layer[1])
    family = adapter_of(sensitivity.family)

    def may_go(stack: str) -> bool:
        left = {name: len(stay) - (name == stack) for name, stay in kept.items()}
        return left[stack] > 0 and family.layers_refused(left) is None

    order = sorted(costs, key=lambda layer: costs[layer])
    lost = 0.0
    while gone := next((layer for layer in order if may_go(layer[0])), None):
        order.remove(gone)
        kept[gone[0]].remove(gone[1])
        lost += costs[gone]
        yield {stack: tuple(sorted(stay)) for stack, stay in kept.items()}, lost
