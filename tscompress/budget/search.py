"""From sensitivities to sizes: the candidate of least predicted loss within a budget.

Losses of parts are assumed to add up. This ranks candidates well but does not predict their loss.
So budgets in parameters, bytes, compute or cache are met by exact counts, and budgets in latency or
forecast quality by measuring a few candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tscompress.budget.candidates import (
    HEADS,
    HIDDEN,
    TOKEN_RANK,
    Candidate,
    costs_of,
    efficient,
    folded_candidates,
    header_cost,
    sizes_of,
    widths_of,
)
from tscompress.budget.costs import CostModel
from tscompress.budget.part_costs import Costs, Measure
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.errors import FactorizationError, PlanError, UsageError
from tscompress.plan.schedules import Budget

#: Of a candidate, as a ratio to the original; or its loss, which is only compared.
Measurement = Callable[[Candidate], float]
#: Most candidates that are folded to choose among residual-stream widths.
FINALISTS = 4
#: Of sizes by layer those are folded whose predicted loss is at most this many times the least, as
#: predictions erred only between near ones (eval/notes/folding.md), and the whole stream's.
NEAR = 1.5
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
    return _of_least_loss(_best_of_each_width(best_first), budget, original, measure_loss)


def _of_least_loss(
    best_first: Sequence[Candidate],
    budget: Budget,
    original: CostModel,
    measure_loss: Measurement | None,
) -> Candidate:
    """The candidate of least measured loss among the first few, which have different widths.

    Raises
    ------
    FactorizationError
        No finalist has a finite loss.
    """
    finalists = best_first[:FINALISTS]
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


def choose_width_by_layer(
    sensitivity: Sensitivity,
    cost_model: CostModel,
    budget: Budget,
    narrower: Callable[[int], CostModel],
    *,
    multiple: int = 1,
    measure_loss: Measurement | None = None,
) -> Candidate:
    """Sizes by layer at the residual-stream width that keeps most, the whole one among them.

    Each width has its own sizes within the budget, by sensitivities of the whole model. Those
    predicted to lose at most :data:`NEAR` times the least, and those of the whole stream beside
    them, are folded, up to :data:`FINALISTS` and as in :func:`choose_folded`. No width is below a
    head size, as heads are measured whole, and none is tried that saves nothing of what the budget
    counts.

    Parameters
    ----------
    budget
        Neither in latency nor in WQL.
    narrower
        Gives the costs of the model at another width.
    measure_loss
        Of a folded candidate; None: the prediction decides.

    Raises
    ------
    PlanError
        No size fits the budget at any width.
    FactorizationError
        No finalist has a finite loss.
    """
    measure = budget.measure
    assert measure != "latency"
    assert measure != "wql"
    found: list[Candidate] = []
    smallest: list[PlanError] = []
    heads = max(part.size for part in sensitivity.parts if part.kind in HEADS)
    for width, lost, costs in widths_of(sensitivity, cost_model, multiple, narrower):
        saves = costs.original.of(measure) < cost_model.original.of(measure)
        if width is not None and (width < heads or not saves):
            continue
        within = sensitivity if width is None else sensitivity.of_width(width)
        try:
            one = choose_factored(
                within, costs, budget, original=cost_model, width=width, multiple=multiple
            )
        except PlanError as error:
            smallest.append(error)
            continue
        found.append(replace(one, loss=one.loss + lost))
    if not found:
        raise smallest[-1]
    best_first = sorted(found, key=lambda one: (one.loss, one.costs.parameters))
    best = best_first[0]
    near = [one for one in best_first if one.loss <= NEAR * best.loss or one.width is None]
    return _of_least_loss(near, budget, cost_model, measure_loss)


class _Step(NamedTuple):
    """A change of one size, and the ``loss`` and ``costs`` that it adds."""

    part: Part
    before: int
    after: int
    loss: float
    costs: Costs

    def done(self, candidate: Candidate) -> Candidate:
        sizes = {**getattr(candidate, self.part.kind), self.part.name: self.after}
        if self.part.kind == "embedding" and self.after == self.part.size:
            sizes = {}
        changes: dict[str, Any] = {
            self.part.kind: sizes,
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
            costs_of(cost_model, {part.kind: {part.name: size}}),
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
        for kind in (*HEADS, *HIDDEN)
    )
    costs = cost_model.original + header_cost(cost_model, original)
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
        points = _points(sensitivity, cost_model, part, measure, multiple)
        slope = 0.0
        for (*_, before), (*_, after) in pairwise(_hull(points)):
            step = _step(sensitivity, cost_model, part, before, after)
            # Measured losses of 0 tie: then prefer the step that leaves most of its part.
            slope = max(slope, step.loss / -step.costs.of(measure))  # rounding must not reorder
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
            _step(sensitivity, cost_model, part, now, size)
            for part in sensitivity.parts
            if part.kind in (*HEADS, *HIDDEN, *TOKEN_RANK)
            for now in [getattr(candidate, part.kind).get(part.name, part.size)]
            for size in sizes_of(sensitivity, part, multiple)
            if size > now
        )
        left = allowed - candidate.costs.of(measure)
        fitting = [step for step in ways if step.loss < 0 and step.costs.of(measure) <= left]
        if not fitting:
            return candidate
        candidate = min(fitting, key=lambda step: step.loss).done(candidate)


#: Cost of the whole model with a part at a size, predicted loss, and the size.
_Point = tuple[int, float, int]


def _points(
    sensitivity: Sensitivity, cost_model: CostModel, part: Part, measure: Measure, multiple: int
) -> list[_Point]:
    """Sizes of a part, each cheaper than those before it."""
    found: list[_Point] = []
    for size in sizes_of(sensitivity, part, multiple):
        cost = costs_of(cost_model, {part.kind: {part.name: size}}).of(measure)
        # Factors of nearly full rank may cost more than what they replace.
        if not found or cost < found[-1][0]:
            found.append((cost, sensitivity.cost(part.name, part.kind, size), size))
    return found


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """Points, of descending cost, on the lower convex hull, so that slopes ascend."""

    def slope(dearer: _Point, cheaper: _Point) -> float:
        return (cheaper[1] - dearer[1]) / (dearer[0] - cheaper[0])

    hull: list[_Point] = []
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
