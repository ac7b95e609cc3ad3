"""From sensitivities to sizes: the candidate of least predicted loss within a budget.

Losses of parts are assumed to add up. This ranks candidates well but does not predict their loss.
So budgets in parameters, bytes, compute or cache are met by exact counts, and budgets in latency or
forecast quality by measuring a few candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from tscompress.budget.costs import CostModel, Costs, Measure, SizeKind
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.errors import FactorizationError, PlanError, UsageError
from tscompress.families.registry import adapter_of
from tscompress.plan.schedules import Budget

_HEADS: tuple[SizeKind, ...] = ("qk", "vo")
_HIDDEN: tuple[SizeKind, ...] = ("hidden",)


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
    """

    qk: int | Mapping[str, int] = field(hash=False)
    vo: int | Mapping[str, int] = field(hash=False)
    hidden: int | Mapping[str, int] = field(hash=False)
    kept_layers: Mapping[str, tuple[int, ...]] | None = field(hash=False)
    loss: float
    costs: Costs
    width: int | None = None

    def __str__(self) -> str:
        words = [] if self.width is None else [f"d_model {self.width}"]
        qk, vo, hidden = map(_range_text, (self.qk, self.vo, self.hidden))
        if qk == vo and " " not in qk + hidden:  # one size each
            words += [f"d_kv {qk}", f"d_ff {hidden}"]
        else:
            words += [f"queries and keys {qk}", f"values {vo}", f"hidden units {hidden}"]
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
    head_sizes = _common_sizes(sensitivity, _HEADS, multiple)
    full, family = head_sizes[0], adapter_of(sensitivity.family)
    head_sizes = [size for size in head_sizes if family.allows_head_size(full, size)]
    unit_sizes = _common_sizes(sensitivity, _HIDDEN, multiple)
    candidates = []
    given = width, 0.0, cost_model
    for at, lost_width, costs in [given, *_widths(sensitivity, multiple, narrower)]:
        header = _header(costs, original or cost_model)
        for kept, lost_layers in _depths(sensitivity, cost_model, depth):
            base, lost = costs.costs(kept_layers=kept) + header, lost_width + lost_layers
            # Costs are affine in these sizes: price each size once, not each pair.
            heads = [(n, *_priced(sensitivity, costs, _HEADS, n, kept)) for n in head_sizes]
            units = [(n, *_priced(sensitivity, costs, _HIDDEN, n, kept)) for n in unit_sizes]
            candidates += [
                Candidate(d, d, d_ff, kept, lost + loss_h + loss_u, base + costs_h + costs_u, at)
                for (d, loss_h, costs_h), (d_ff, loss_u, costs_u) in product(heads, units)
            ]
    return candidates


def _header(costs: CostModel, original: CostModel) -> Costs:
    """What the header of a narrower model's weights adds: an untied head is one name more."""
    return Costs(bytes=max(0, costs.header_bytes - original.header_bytes))


def _widths(
    sensitivity: Sensitivity, multiple: int, narrower: Callable[[int], CostModel] | None
) -> Iterator[tuple[int, float, CostModel]]:
    """Narrower residual streams, the predicted loss, and the costs of a model of that width."""
    if narrower is None:
        return
    for part in sensitivity.parts:
        if part.kind == "width" and part.sizes:
            for width in _sizes(sensitivity, part, multiple)[1:]:
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


def _sizes(sensitivity: Sensitivity, part: Part, multiple: int) -> list[int]:
    """Sizes to choose from, descending, the full one first."""
    if multiple < 1:
        raise PlanError(f"sizes cannot be multiples of {multiple}; give 8 or 16, or 1 for any.")
    rounded = {min(part.size, math.ceil(size / multiple) * multiple) for size in part.sizes}
    free = sensitivity.settings.get("fold", {}).get("frequencies") == "free"
    if part.kind == "qk" and not free:
        # A rounded size may not be one at which a stock config keeps the rotary frequencies.
        allows = adapter_of(sensitivity.family).allows_head_size
        rounded = {size for size in rounded if size in part.sizes or allows(part.size, size)}
    return sorted(rounded | {part.size}, reverse=True)


def _common_sizes(
    sensitivity: Sensitivity, kinds: tuple[SizeKind, ...], multiple: int
) -> list[int]:
    found = [
        set(_sizes(sensitivity, part, multiple)) for part in sensitivity.parts if part.kind in kinds
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
    return loss, _costs_of(cost_model, sizes) - cost_model.original


def _costs_of(cost_model: CostModel, sizes: Mapping[str, Mapping[str, int]]) -> Costs:
    return cost_model.costs(sizes.get("qk"), sizes.get("vo"), sizes.get("hidden"))


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


# --------------------------------------------------------------------------------------------------
# Choosing
# --------------------------------------------------------------------------------------------------

#: Of a candidate, as a ratio to the original; or its loss, which is only compared.
Measurement = Callable[[Candidate], float]
#: Most candidates that are folded to choose among residual-stream widths.
FINALISTS = 4
OnMeasured = Callable[[Candidate, float], None]


def choose_folded(
    candidates: Sequence[Candidate],
    budget: Budget,
    cost_model: CostModel,
    *,
    original: CostModel | None = None,
    measure_latency: Measurement | None = None,
    measure_wql: Measurement | None = None,
    measure_loss: Measurement | None = None,
    on_measured: OnMeasured = lambda candidate, ratio: None,
) -> Candidate:
    """The candidate of least predicted loss within the budget; among equals, the cheapest.

    Where the residual stream may be narrowed, the best of each width, up to :data:`FINALISTS`, are
    folded, and the one of least measured loss is taken: what a width costs is predicted without
    the fits of a fold.

    For ``latency`` and ``wql`` about log2(n) + 2 of the efficient candidates are measured: for
    ``latency`` to find the one of least predicted loss that is fast enough, for ``wql`` the one of
    fewest parameters that is good enough.

    Parameters
    ----------
    original
        Costs of the model that a budget is a share of; None: ``cost_model``.
    measure_latency, measure_wql
        Ratio of a candidate to the original; required for a budget in that measure.
    measure_loss
        Of a folded candidate; None: the prediction decides.
    on_measured
        Called with each measured candidate and its ratio.

    Raises
    ------
    PlanError
        No candidate fits; the message gives the costs of the smallest.
    FactorizationError
        No finalist has a finite loss.
    """
    original = original or cost_model
    smaller = [candidate for candidate in candidates if candidate.costs != original.original]
    if budget.measure == "latency":
        # Among equal predictions the cheapest, which is last.
        ranked = {candidate.loss: candidate for candidate in efficient(smaller, "macs")}
        return _first_within(budget, list(ranked.values()), measure_latency, on_measured)
    if budget.measure == "wql":
        cheapest_first = efficient(smaller, "parameters")[::-1]
        return _first_within(budget, cheapest_first, measure_wql, on_measured)
    measure, allowed = budget.measure, _allowed(budget, budget.measure, original)
    fitting = [candidate for candidate in candidates if candidate.costs.of(measure) <= allowed]
    if not fitting:
        smallest = min(candidates, key=lambda candidate: candidate.costs.of(measure))
        raise _unreachable(budget, measure, smallest, original)
    best_first = sorted(
        fitting, key=lambda one: (one.loss, one.costs.of(measure), one.costs.parameters)
    )
    finalists = _best_of_each_width(best_first)[:FINALISTS]
    is_whole = finalists[0].costs == original.original
    if measure_loss is None or is_whole or len(finalists) == 1:
        return finalists[0]
    losses = [measure_loss(one) for one in finalists]
    if math.isinf(min(losses)):
        raise FactorizationError(f"no candidate within {budget} has finite forecasts once folded.")
    return finalists[losses.index(min(losses))]


def _best_of_each_width(best_first: Iterable[Candidate]) -> list[Candidate]:
    best: dict[int | None, Candidate] = {}
    for candidate in best_first:
        best.setdefault(candidate.width, candidate)
    return list(best.values())


def choose_factored(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    budget: Budget,
    *,
    original: CostModel | None = None,
    width: int | None = None,
    multiple: int = 1,
    measure_latency: Measurement | None = None,
    measure_wql: Measurement | None = None,
    on_measured: OnMeasured = lambda candidate, ratio: None,
) -> Candidate:
    """Sizes by layer within the budget.

    Greedy: starting from the full sizes, take the step of least predicted loss per saving until
    the budget is met. The predicted loss is at most that of a stock config within the budget. For
    ``latency`` and ``wql`` the steps save compute or parameters, and where to stop is found by
    measuring, as in :func:`choose_folded`. Parameters and errors are as there.
    """
    original = original or cost_model
    if budget.measure == "latency" or budget.measure == "wql":
        counted: Measure = "macs" if budget.measure == "latency" else "parameters"
        path = _path(sensitivity, cost_model, original, width, counted, multiple)
        smaller = [candidate for candidate in path if candidate.costs != original.original]
        if budget.measure == "latency":
            return _first_within(budget, smaller, measure_latency, on_measured)
        return _first_within(budget, smaller[::-1], measure_wql, on_measured)
    measure, allowed = budget.measure, _allowed(budget, budget.measure, original)
    path = _path(sensitivity, cost_model, original, width, measure, multiple)
    chosen = next((one for one in path if one.costs.of(measure) <= allowed), None)
    if chosen is None:
        raise _unreachable(budget, measure, path[-1], original)
    chosen = _grown(chosen, sensitivity, cost_model, measure, allowed, multiple)
    stock = folded_candidates(
        sensitivity, cost_model, original=original, width=width, multiple=multiple
    )
    fitting = [one for one in stock if one.costs.of(measure) <= allowed]
    return min([chosen, *fitting], key=lambda one: (one.loss, one.costs.of(measure)))


class _Step(NamedTuple):
    """A change of one size, and the ``loss`` and ``costs`` that it adds."""

    part: Part
    before: int
    after: int
    loss: float
    costs: Costs

    def done(self, candidate: Candidate) -> Candidate:
        changes: dict[str, Any] = {
            self.part.kind: {**getattr(candidate, self.part.kind), self.part.name: self.after},
            "loss": candidate.loss + self.loss,
            "costs": candidate.costs + self.costs,
        }
        return replace(candidate, **changes)


def _step(
    sensitivity: Sensitivity, cost_model: CostModel, part: Part, before: int, after: int
) -> _Step:
    (old_loss, old_costs), (loss, costs) = (
        (
            sensitivity.cost(part.name, part.kind, size),
            _costs_of(cost_model, {part.kind: {part.name: size}}),
        )
        for size in (before, after)
    )
    return _Step(part, before, after, loss - old_loss, costs - old_costs)


def _path(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    original: CostModel,
    width: int | None,
    measure: Measure,
    multiple: int,
) -> list[Candidate]:
    """Candidates after 0, 1, 2, ... steps down."""
    qk, vo, hidden = (
        {part.name: part.size for part in sensitivity.parts if part.kind == kind}
        for kind in (*_HEADS, *_HIDDEN)
    )
    costs = cost_model.original + _header(cost_model, original)
    start = Candidate(qk, vo, hidden, None, 0.0, costs, width)
    steps = _steps(sensitivity, cost_model, measure, multiple)
    return list(accumulate(steps, lambda candidate, step: step.done(candidate), initial=start))


def _steps(
    sensitivity: Sensitivity, cost_model: CostModel, measure: Measure, multiple: int
) -> list[_Step]:
    """Steps down in all parts, sorted by added loss per saving in ``measure``."""
    ranked = []
    for part in sensitivity.parts:
        if part.kind == "layer":
            continue
        points = [
            (size, sensitivity.cost(part.name, part.kind, size))
            for size in _sizes(sensitivity, part, multiple)
        ]
        slope = 0.0
        for (before, _), (after, _) in pairwise(_hull(points)):
            step = _step(sensitivity, cost_model, part, before, after)
            if saved := -step.costs.of(measure):
                # Measured losses of 0 tie: then prefer the step that leaves most of its part.
                slope = max(slope, step.loss / saved)  # rounding must not reorder a part's steps
                ranked.append((slope, -after / part.size, step))
    return [step for *_, step in sorted(ranked, key=lambda entry: entry[:2])]


def _grown(
    candidate: Candidate,
    sensitivity: Sensitivity,
    cost_model: CostModel,
    measure: Measure,
    allowed: int,
    multiple: int,
) -> Candidate:
    """Enlarge sizes within the budget, where that gains most.

    The last step down may have saved more than needed.
    """
    while True:
        ways = (
            _step(sensitivity, cost_model, part, sizes[part.name], size)
            for part in sensitivity.parts
            if part.kind in (*_HEADS, *_HIDDEN)
            for sizes in [getattr(candidate, part.kind)]
            for size in _sizes(sensitivity, part, multiple)
            if size > sizes[part.name]
        )
        left = allowed - candidate.costs.of(measure)
        fitting = [step for step in ways if step.loss < 0 and step.costs.of(measure) <= left]
        if not fitting:
            return candidate
        candidate = min(fitting, key=lambda step: step.loss).done(candidate)


def _hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Points (size, descending, and loss) on the lower convex hull, so that slopes ascend."""

    def slope(larger: tuple[int, float], smaller: tuple[int, float]) -> float:
        return (smaller[1] - larger[1]) / (larger[0] - smaller[0])

    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and slope(hull[-1], point) < slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _allowed(budget: Budget, measure: Measure, cost_model: CostModel) -> int:
    """Largest figure within a budget in a counted measure."""
    original = cost_model.original.of(measure)
    if not original:
        raise PlanError(f"a {cost_model.family} model has no {measure}; choose another budget.")
    if budget.limit is not None:
        header = cost_model.header_bytes if measure == "bytes" else 0  # of the file
        return max(0, budget.limit - header)
    return math.floor(Fraction(repr(budget.ratio)) * original)  # as written, without rounding


def _unreachable(
    budget: Budget, measure: Measure, smallest: Candidate, cost_model: CostModel
) -> PlanError:
    figure, original = (costs.of(measure) for costs in (smallest.costs, cost_model.original))
    ratio = math.ceil(1e4 * figure / original) / 1e4
    return PlanError(
        f"{budget} allows {_allowed(budget, measure, cost_model):,}; the smallest candidate, "
        f"{smallest}, takes {figure:,}, which is {ratio} of the original's: allow that much."
    )


def _first_within(
    budget: Budget,
    ranked: Sequence[Candidate],
    measure: Measurement | None,
    on_measured: OnMeasured,
) -> Candidate:
    """First of ``ranked`` measured to be within the budget, if those after it are too."""
    if measure is None:
        raise UsageError(f"{budget} needs measurements: give measure_{budget.measure}.")
    allowed = budget.ratio or 1 + (budget.percent or 0) / 100
    ratios: dict[int, float] = {}

    def fits(index: int) -> bool:
        if index not in ratios:
            ratios[index] = measure(ranked[index])
            on_measured(ranked[index], ratios[index])
        return ratios[index] <= allowed

    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    # Measurements are noisy and need not be monotone, so also try beyond the edge.
    for index in range(max(0, low - 2), min(low + 1, len(ranked))):
        if fits(index):
            return ranked[index]
    if not ratios:
        raise PlanError("the sensitivity has no smaller size to try.")
    best = min(ratios, key=lambda index: ratios[index])
    raise PlanError(
        f"none of the {len(ratios)} measured candidates is within {budget}: the best, "
        f"{ranked[best]}, has {ratios[best]:.4f} of the original's {budget.measure}."
    )
