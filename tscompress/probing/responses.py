"""How a model responds to a covariate: coefficients that its forecasts imply, and the true ones.

A forecast can gain from covariates and still answer a question of the kind "what if this value
were one higher" badly: at the wrong size, or at other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from tscompress.evaluation.metrics import MEDIAN, Quantiles
from tscompress.io.strict import Strict
from tscompress.io.text import percent
from tscompress.probing.processes import Array
from tscompress.probing.regressions import (
    SHIFT,
    Regressions,
    ResponseTask,
    ridge_regression,
    two_stage,
)
from tscompress.probing.skill import RESAMPLES, Estimate, draws, estimate

#: A model does not respond where its slope is at most this, or may be 0.
RESPONDS = 0.1
#: Smallest share of a slope, or of what regression gains, that counts as kept.
KEPT = 0.95
_NAMED = 2


class Medians(NamedTuple):
    """Forecasts of one model for the groups of a task, each ``[N, H]``."""

    given: Array
    """With the covariates as they are."""
    shifted: Array
    """With :data:`SHIFT` more of one at one step."""
    shuffled: Array
    """With the covariates in another order."""
    shuffled_shifted: Array
    """With both."""


class Columns(Strict):
    """What was measured of each group, ``[N]`` numbers each."""

    effect: tuple[float, ...]
    """True causal effect of the covariate that is shifted."""
    association: tuple[float, ...]
    """Its coefficient in the best forecast."""
    implied: tuple[float, ...]
    """The model's: the change of its median at the step, over the shift."""
    at_step: tuple[float, ...]
    elsewhere: tuple[float, ...]
    """Absolute change at the step, and the sum of it over all others."""
    implied_shuffled: tuple[float, ...]
    ridge: tuple[float, ...]
    """Coefficient of ridge regression on the context."""
    two_stage: tuple[float, ...] | None = None
    """Of 2SLS; None: there is no instrument."""
    error: tuple[float, ...]
    error_shuffled: tuple[float, ...]
    error_of_ridge: tuple[float, ...]
    error_of_mean: tuple[float, ...]
    """Mean squared errors of the medians, of ridge regression and of the context's mean."""


class ResponseScore(Strict):
    """Response of one model to the covariates of a task; intervals are of a bootstrap over groups.

    Slopes are of a line through 0.
    """

    task: ResponseTask
    slope: Estimate
    """Of implied coefficients on those of the best forecast: 1 right, 0 no response."""
    r_squared: Estimate
    leakage: Estimate | None
    """Share of the absolute change at other steps; None: no forecast changed."""
    regret: Estimate
    """0: as accurate as ridge regression on the context; 1: as the context's mean."""
    shuffled_slope: Estimate
    shuffled_regret: Estimate
    """The same with covariates in another order: 0, and 1 or more."""
    ridge_slope: float
    ridge_r_squared: float
    """What ridge regression has in the place of the model."""
    association: Estimate | None = None
    """Response to the biased part of the association over that to the causal effect: 0 causal, 1
    the association. None: nothing is confounded, or the model does not respond to the effect."""
    ridge_association: float | None = None
    two_stage_association: float | None = None
    """The same of ridge regression and of 2SLS on the context."""
    columns: Columns

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def responds(self) -> bool:
        """Whether there is a response that can be lost; see :data:`RESPONDS`."""
        return _surely_above(self.slope, RESPONDS)

    def draws(self, measure: Measure) -> Array:
        """A measure on resampled groups, ``[RESAMPLES]``; the same groups for each model."""
        return _resampled(self.name, self.columns, measure)


# --------------------------------------------------------------------------------------------------
# Measures; columns are [..., N], and so are resamples of them
# --------------------------------------------------------------------------------------------------

#: From columns ``[..., N]`` by name to ``[...]``.
Measure = Callable[[dict[str, Array]], Array]


def slope(of: dict[str, Array], on: str = "association", implied: str = "implied") -> Array:
    """Least-squares slope through 0, ``[...]``."""
    return _ratio((of[implied] * of[on]).sum(-1), (of[on] ** 2).sum(-1))


def r_squared(of: dict[str, Array], on: str = "association", implied: str = "implied") -> Array:
    """Share ``[...]`` of the squares of implied coefficients on that line; 0 without response."""
    both = (of[implied] * of[on]).sum(-1) ** 2
    squares = (of[implied] ** 2).sum(-1) * (of[on] ** 2).sum(-1)
    return np.where(squares > 0, _ratio(both, np.where(squares > 0, squares, 1)), 0.0)


def leakage(of: dict[str, Array]) -> Array:
    """Share ``[...]`` of the absolute change at other steps than that of the shift."""
    elsewhere = of["elsewhere"].sum(-1)
    return _ratio(elsewhere, elsewhere + of["at_step"].sum(-1))


def gain(of: dict[str, Array], error: str = "error") -> Array:
    """Gain ``[...]`` on the context's mean, as a share of that of ridge regression."""
    mean = of["error_of_mean"].sum(-1)
    return _ratio(mean - of[error].sum(-1), mean - of["error_of_ridge"].sum(-1))


def regret(of: dict[str, Array], error: str = "error") -> Array:
    """1 minus :func:`gain`, ``[...]``."""
    return 1 - gain(of, error)


def association_share(of: dict[str, Array], implied: str = "implied") -> Array:
    """Slope on the bias of the association over that on the causal effect, of both together.

    ``[...]``. Shrinkage, which both slopes share, cancels.
    """
    effect, bias, y = of["effect"], of["association"] - of["effect"], of[implied]
    ee, eb, bb = ((one * two).sum(-1) for one, two in
                  ((effect, effect), (effect, bias), (bias, bias)))  # fmt: skip
    ey, by = (effect * y).sum(-1), (bias * y).sum(-1)
    return _ratio(ee * by - eb * ey, bb * ey - eb * by)


def causal_slope(of: dict[str, Array]) -> Array:
    """Slope ``[...]`` on the causal effect, with the bias of the association beside it."""
    effect, bias, y = of["effect"], of["association"] - of["effect"], of["implied"]
    ee, eb, bb = (effect**2).sum(-1), (effect * bias).sum(-1), (bias**2).sum(-1)
    return _ratio(bb * (effect * y).sum(-1) - eb * (bias * y).sum(-1), ee * bb - eb**2)


def _ratio(above: Array, below: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(above / below)


def _arrays(columns: Columns) -> dict[str, Array]:
    values = {name: getattr(columns, name) for name in type(columns).model_fields}
    return {name: np.array(column) for name, column in values.items() if column is not None}


def _resampled(name: str, columns: Columns, measure: Measure) -> Array:
    count = len(columns.effect)
    if count == 1:
        return np.full(RESAMPLES, np.nan)
    arrays = _arrays(columns)
    parts = [
        measure({key: column[picks] for key, column in arrays.items()})
        for picks in draws(name, count)
    ]
    return np.concatenate(parts)


# --------------------------------------------------------------------------------------------------
# One model
# --------------------------------------------------------------------------------------------------


def median(quantiles: Quantiles) -> Array:
    """``[N, H]``."""
    return np.asarray(quantiles[:, MEDIAN])


def score_response(task: ResponseTask, drawn: Regressions, medians: Medians) -> ResponseScore:
    """Response of one model's medians."""
    columns = _columns(task, drawn, medians)
    values = _arrays(columns)

    def measured(measure: Measure) -> Estimate:
        return estimate(float(measure(values)), _resampled(task.name, columns, measure))

    changed = columns.at_step + columns.elsewhere
    return ResponseScore(
        task=task,
        slope=measured(slope),
        r_squared=measured(r_squared),
        leakage=measured(leakage) if any(changed) else None,
        regret=measured(regret),
        shuffled_slope=measured(lambda of: slope(of, implied="implied_shuffled")),
        shuffled_regret=measured(lambda of: regret(of, "error_shuffled")),
        ridge_slope=float(slope(values, implied="ridge")),
        ridge_r_squared=float(r_squared(values, implied="ridge")),
        columns=columns,
        **(_confounded(values, measured) if task.confounded else {}),
    )


def _confounded(
    values: dict[str, Array], measured: Callable[[Measure], Estimate]
) -> dict[str, Estimate | float | None]:
    """Which of effect and association the model, ridge regression and 2SLS take."""
    if len(values["effect"]) < 2:  # one group cannot tell them apart
        return {}
    causal = measured(causal_slope)
    responds = causal.low is not None and _surely_above(causal, RESPONDS)
    share = measured(association_share) if responds else None
    staged = "two_stage" in values
    return {
        "association": share,
        "ridge_association": float(association_share(values, "ridge")),
        "two_stage_association": float(association_share(values, "two_stage")) if staged else None,
    }


def _columns(task: ResponseTask, drawn: Regressions, medians: Medians) -> Columns:
    rows = np.arange(len(drawn.steps))
    change = medians.shifted - medians.given  # [N, H]
    moved = medians.shuffled_shifted - medians.shuffled
    size = np.abs(change)
    regressed, coefficients = ridge_regression(drawn, task.noise**2)
    mean = drawn.context.mean(axis=1, keepdims=True)

    def error(points: Array) -> tuple[float, ...]:
        return _tuple(((points - drawn.label) ** 2).mean(axis=1))

    return Columns(
        effect=_tuple(drawn.effects),
        association=_tuple(drawn.associations),
        implied=_tuple(change[rows, drawn.steps] / SHIFT),
        at_step=_tuple(size[rows, drawn.steps]),
        elsewhere=_tuple(np.maximum(size.sum(axis=1) - size[rows, drawn.steps], 0)),
        implied_shuffled=_tuple(moved[rows, drawn.steps] / SHIFT),
        ridge=_tuple(coefficients),
        two_stage=_tuple(two_stage(drawn)) if task.instrument else None,
        error=error(medians.given),
        error_shuffled=error(medians.shuffled),
        error_of_ridge=error(regressed),
        error_of_mean=error(mean),
    )


def _tuple(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def _surely_above(one: Estimate, bound: float) -> bool:
    return one.value > bound and (one.low is None or one.low > 0)


# --------------------------------------------------------------------------------------------------
# Two models
# --------------------------------------------------------------------------------------------------


class ResponseChange(Strict):
    """Change of the response at one task; pairs are original and compressed."""

    name: str
    slope: tuple[float, float]
    r_squared: tuple[float, float]
    leakage: tuple[float | None, float | None]
    regret: tuple[float, float]
    association: tuple[float | None, float | None]
    slope_kept: Estimate | None
    """Compressed / original; None where the original does not respond."""
    gain_kept: Estimate | None
    """The same of 1 - regret; None where the original's regret is not surely below the mean's."""
    change: Literal["kept", "lost", "absent"]
    """``absent``: the original does not respond."""

    @property
    def text(self) -> str:
        """What changed, in words."""
        pairs = [("slope", self.slope), ("regret", self.regret), ("leakage", self.leakage)]
        shown = [f"{name} {pair_text(pair)}" for name, pair in pairs]
        return f"{self.name} ({', '.join(shown)})"


class ResponseComparison(Strict):
    """Response of a compressed model relative to its original's."""

    slope_kept: Estimate | None
    """Share of the mean slope at the tasks where the original responds; None without any."""
    gain_kept: Estimate | None
    """Share of the mean gain on the context's mean there."""
    tasks: tuple[ResponseChange, ...]

    def lines(self) -> list[str]:
        """A sentence on what was lost, or that the original has no response."""
        lost = [one for one in self.tasks if one.change == "lost"]
        if lost:
            lost.sort(key=lambda one: one.slope[1] - one.slope[0])
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            shares = {"size": self.slope_kept, "gain in accuracy": self.gain_kept}
            known = [
                f"{_much(kept)} of its {of}" for of, kept in shares.items() if kept is not None
            ]
            kept = f", {' and '.join(known)} is kept" if known else ""
            return [
                f"response to covariates was lost{kept}: "
                f"{', '.join(one.text for one in lost[:_NAMED])}{more}."
            ]
        if self.tasks and self.slope_kept is None:
            return ["the original does not respond to covariates, so no response could be lost."]
        return []


def compare_responses(
    compressed: Sequence[ResponseScore], original: Sequence[ResponseScore]
) -> ResponseComparison | None:
    """Task by task, at equal tasks in equal order; None without tasks."""
    pairs = list(zip(compressed, original, strict=True))
    if not pairs:
        return None
    able = [pair for pair in pairs if pair[1].responds]
    return ResponseComparison(
        slope_kept=_kept(able, slope),
        gain_kept=_kept(able, gain),
        tasks=tuple(_change(*pair) for pair in pairs),
    )


def _kept(
    pairs: Sequence[tuple[ResponseScore, ResponseScore]], measure: Measure
) -> Estimate | None:
    """Ratio of the means of a measure over tasks, compressed to original, with paired draws.

    None: there are no tasks, or the original's mean is not surely above 0.
    """
    if not pairs:
        return None
    ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
    values = [
        float(np.mean([measure(_arrays(one.columns)) for one in side])) for side in (ours, theirs)
    ]
    draws = [np.mean([one.draws(measure) for one in side], axis=0) for side in (ours, theirs)]
    # A ratio to what may be 0 is large, of either sign.
    if not _surely_above(estimate(values[1], draws[1]), 0):
        return None
    return estimate(values[0] / values[1], _ratio(*draws))


def _change(ours: ResponseScore, theirs: ResponseScore) -> ResponseChange:
    both = theirs, ours
    able = [(ours, theirs)] if theirs.responds else []
    kept = [_kept(able, measure) for measure in (slope, gain)]
    change: Literal["kept", "lost", "absent"] = "kept" if able else "absent"
    if any(one is not None and _is_less(one) for one in kept):
        change = "lost"
    return ResponseChange(
        name=ours.name,
        slope=_values([one.slope for one in both]),
        r_squared=_values([one.r_squared for one in both]),
        leakage=_maybe([one.leakage for one in both]),
        regret=_values([one.regret for one in both]),
        association=_maybe([one.association for one in both]),
        slope_kept=kept[0],
        gain_kept=kept[1],
        change=change,
    )


def _is_less(kept: Estimate) -> bool:
    """Whether less than :data:`KEPT`, and surely less than all."""
    return kept.value < KEPT and (kept.high is None or kept.high < 1)


def _values(pair: Sequence[Estimate]) -> tuple[float, float]:
    return pair[0].value, pair[1].value


def _maybe(pair: Sequence[Estimate | None]) -> tuple[float | None, float | None]:
    first, second = (None if one is None else one.value for one in pair)
    return first, second


def pair_text(pair: tuple[float | None, float | None]) -> str:
    """Original and compressed; a dash for None."""
    if pair == (None, None):
        return "–"
    return " → ".join("–" if value is None else f"{value:.2f}" for value in pair)


def _much(share: Estimate) -> str:
    """A share in words; below 0 none is left, and the size of the number says little."""
    return share_text(share) if share.value > 0 else "none"


def share_text(share: Estimate) -> str:
    """A share in per cent, with its interval if there is one."""
    if share.low is None or share.high is None:
        return percent(share.value, 0)
    return f"{percent(share.value, 0)} ({percent(share.low, 0)} to {percent(share.high, 0)})"
