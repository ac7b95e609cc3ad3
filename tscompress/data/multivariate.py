"""Series that depend on one another, for Chronos-2: covariates, leading series, common trends.

Univariate families (:mod:`tscompress.data.synthetic`) are combined, at one step or with lags, as
Chronos-2 was trained (Ansari et al., 2025: cotemporaneous and sequential multivariatizers). A group
is one task. Of some of its series the future is known, as of a calendar or planned promotions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tscompress.data.batch import ForecastBatch
from tscompress.data.synthetic import FloatArray, SyntheticCorpus
from tscompress.io.strict import Strict

_Values = NDArray[np.float64]

#: Shapes of the effect of a covariate, on its standardised values.
_EFFECTS: tuple[Callable[[_Values], _Values], ...] = (
    lambda x: x,
    np.abs,
    np.square,
    lambda x: np.tanh(2 * x),
    lambda x: np.maximum(x, 0),
)
#: Of the tasks of a batch that calibration has in groups.
GROUPED_SHARE = 0.8


class GroupsConfig(Strict):
    """Mixture of the relations between the series of a group; weights need not sum to 1."""

    share: float = Field(default=0.5, ge=0, le=1, description="of tasks with several series")
    largest: int = Field(default=6, ge=2, description="most series of a group")
    longest_lag: int = Field(default=24, ge=1, description="most steps between cause and effect")
    known_share: float = Field(default=0.5, ge=0, le=1, description="of drivers known ahead")
    lagged_share: float = Field(default=0.4, ge=0, le=1, description="of drivers with a lag")
    white_share: float = Field(default=0.0, ge=0, le=1, description="of drivers that are noise")
    nonlinear_share: float = Field(default=0.4, ge=0, le=1, description="of drivers, in effect")
    least_share: float = Field(
        default=0.2, ge=0, le=1, description="of a driven series' variance that is not its own"
    )
    positive: bool = Field(default=False, description="a driver and what it drives go one way")
    driven_weight: float = Field(default=0.35, ge=0, description="covariates drive a series")
    events_weight: float = Field(default=0.15, ge=0, description="pulses and calendars drive it")
    mixed_weight: float = Field(default=0.15, ge=0, description="mixtures at one step")
    leading_weight: float = Field(default=0.15, ge=0, description="one series leads the others")
    leading_lags: tuple[int, ...] = Field(
        default=(), description="lags of what leads; none: 2 to longest_lag, short ones more often"
    )
    white_leader_share: float = Field(
        default=0.0, ge=0, le=1, description="of leading series that are noise"
    )
    cointegrated_weight: float = Field(default=0.1, ge=0, description="a common random walk")
    unrelated_weight: float = Field(default=0.1, ge=0, description="nothing in common")
    calendar_weight: float = Field(
        default=0.0, ge=0, description="a season, and flags that mostly repeat it"
    )

    @model_validator(mode="after")
    def _can_be_drawn(self) -> GroupsConfig:
        off = [lag for lag in self.leading_lags if not 1 <= lag <= self.longest_lag]
        if off:
            raise ValueError(
                f"leading_lags has {off[0]}; give lags of 1 to longest_lag, {self.longest_lag}"
            )
        _ = self.weights
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Relation to its probability.

        Raises
        ------
        ValueError
            All weights are 0.
        """
        given = {name: float(getattr(self, f"{name}_weight")) for name in _RELATIONS}
        total = sum(given.values())
        if total <= 0:
            raise ValueError("groups need at least one relation with a weight above 0")
        return {name: weight / total for name, weight in given.items()}


@dataclass(frozen=True)
class Groups:
    """Series of several tasks.

    Attributes
    ----------
    series
        ``[B, L]``; NaN is left padding.
    group_ids
        ``[B]``; series of one group are one task. Groups are contiguous.
    known
        ``[B]``; whether the future is known. At least one series of a group is not.
    """

    series: FloatArray
    group_ids: NDArray[np.int64]
    known: NDArray[np.bool_]

    def with_alone(self, series: FloatArray) -> Groups:
        """Followed by ``series`` ``[N, L]``, each of them a task of its own."""
        ids = self.group_ids[-1] + 1 + np.arange(len(series))
        return Groups(
            np.concatenate([self.series, series]),
            np.concatenate([self.group_ids, ids]),
            np.concatenate([self.known, np.zeros(len(series), dtype=bool)]),
        )

    def batch(self, context: FloatArray, target: FloatArray) -> ForecastBatch:
        """The batch of contexts ``[B, T]`` and targets ``[B, H]`` cut from the series.

        Last H steps of series that are known ahead are given, and are not forecast.
        """
        ahead = self.series[:, self.series.shape[1] - target.shape[1] :]
        known, nothing = self.known[:, None], np.float32(np.nan)
        return ForecastBatch(
            torch.from_numpy(context),
            torch.from_numpy(np.where(known, nothing, target)),
            group_ids=torch.from_numpy(self.group_ids),
            future=torch.from_numpy(np.where(known, ahead, nothing)),
        )


def draw_groups(
    rng: np.random.Generator,
    corpus: SyntheticCorpus,
    count: int,
    length: int,
    config: GroupsConfig,
) -> Groups:
    """``count`` series of ``length`` steps, in groups of 1 to ``config.largest``."""
    windows = corpus.sample(rng, count, length + config.longest_lag)
    return related(rng, windows, config)


def related(
    rng: np.random.Generator, windows: FloatArray, config: GroupsConfig, block: int | None = None
) -> Groups:
    """Independent series ``[B, lag + L]`` as groups of series ``[B, L]`` that are related.

    ``config.longest_lag`` is the lag. Missing values stay missing. No group crosses a multiple of
    ``block`` rows, if one is given.
    """
    count, lag = len(windows), config.longest_lag
    relations = config.weights
    names, probabilities = list(relations), list(relations.values())
    series = windows[:, lag:].copy()
    group_ids = np.empty(count, dtype=np.int64)
    known = np.zeros(count, dtype=bool)
    start, group = 0, 0
    while start < count:
        together = rng.random() < config.share
        size = int(rng.integers(2, config.largest + 1)) if together else 1
        end = count if block is None else min(count, start + block - start % block)
        rows = slice(start, min(start + size, end))
        if rows.stop - start > 1:
            relation = _RELATIONS[rng.choice(names, p=probabilities)]
            drawn, ahead = relation(_Group(rng, windows[rows], config))
            series[rows] = np.where(np.isfinite(series[rows]), drawn, np.nan)
            known[rows] = ahead
        group_ids[rows] = group
        start, group = rows.stop, group + 1
    return Groups(series, group_ids, known)


def related_windows(
    rng: np.random.Generator,
    windows: FloatArray,
    horizon: int,
    group_size: int,
    config: GroupsConfig | None = None,
) -> Groups:
    """Windows ``[B, T + H]`` as related series ``[B, T' + H]``, T' at least three quarters of T.

    Groups have up to ``group_size`` series, and none crosses a multiple of it. The steps that are
    lost are the past of what leads another series. ``config`` has the mixture of relations.
    """
    config = (config or GroupsConfig(share=GROUPED_SHARE)).model_copy(
        update={"largest": group_size}
    )
    return _related_by(rng, windows, horizon, config, group_size)


def driven_windows(rng: np.random.Generator, windows: FloatArray, horizon: int) -> Groups:
    """Windows ``[B, T + H]`` in groups of which the first is driven by some of the others.

    These are white noise, or events, some of them regular, and known ahead: hardly anything else
    tells their part of the first, so that the loss on it is a measure of the use of covariates.
    Groups have up to six series, as to attend to two is hardly to choose. Series are as long as
    those of :func:`related_windows`.
    """
    config = _only(known_share=1, white_share=1, driven_weight=0.7, events_weight=0.3)
    return _related_by(rng, windows, horizon, config, config.largest)


def led_windows(rng: np.random.Generator, windows: FloatArray, horizon: int) -> Groups:
    """Windows ``[B, T + H]`` in groups of which the last leads the others, and is white noise.

    Of no series the future is known. Otherwise as :func:`driven_windows`.
    """
    config = _only(known_share=0, white_leader_share=1, leading_weight=1)
    return _related_by(rng, windows, horizon, config, config.largest)


def _only(**changes: float) -> GroupsConfig:
    """Groups alone, of the relations that ``changes`` give a weight."""
    none = {f"{name}_weight": 0.0 for name in _RELATIONS}
    return GroupsConfig.model_validate({"share": 1, **none, **changes})


def _related_by(
    rng: np.random.Generator,
    windows: FloatArray,
    horizon: int,
    config: GroupsConfig,
    group_size: int,
) -> Groups:
    lag = max(1, min(24, (windows.shape[1] - horizon) // 4))
    config = config.model_copy(update={"longest_lag": lag})
    # What is missing in one series leaves no jump in another.
    groups = related(rng, np.stack([_filled(row) for row in windows]), config, block=group_size)
    groups.series[np.isnan(windows[:, lag:])] = np.nan
    return groups


def _filled(values: FloatArray) -> FloatArray:
    """Gaps on straight lines, ends at the nearest value."""
    known = np.isfinite(values)
    if known.all() or not known.any():
        return values
    steps = np.arange(len(values))
    filled: FloatArray = np.interp(steps, steps[known], values[known]).astype(np.float32)
    return filled


class _Group:
    """Independent series ``[k, lag + L]``, and what relations make of them."""

    def __init__(self, rng: np.random.Generator, base: FloatArray, config: GroupsConfig) -> None:
        self.rng, self.config = rng, config
        self.lag = config.longest_lag
        observed = np.isfinite(base)
        values = np.where(observed, base, 0).astype(np.float64)
        counted = np.maximum(observed.sum(axis=1, keepdims=True), 1)
        self.level = values.sum(axis=1, keepdims=True) / counted
        spread = np.where(observed, base - self.level, 0)
        self.scale = np.sqrt((spread**2).sum(axis=1, keepdims=True) / counted) + 1e-6 * (
            np.abs(self.level) + 1e-6
        )
        self.values: _Values = np.clip(spread / self.scale, -20, 20)  # 0 where missing

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def own(self) -> _Values:
        """``[k, L]``."""
        return self.values[:, self.lag :]

    def lagged(self, row: int, lag: int) -> _Values:
        """Values of a row ``lag`` steps before each step, ``[L]``."""
        return self.values[row, self.lag - lag : self.values.shape[1] - lag]

    def some_lag(self, shortest: int = 1) -> int:
        """Short ones more often."""
        most = np.log(self.lag + 1)
        return max(shortest, int(np.exp(self.rng.uniform(np.log(shortest), most))))

    def leading_lag(self) -> int:
        """Of a leading series."""
        if self.config.leading_lags:
            return min(self.lag, int(self.rng.choice(self.config.leading_lags)))
        return self.some_lag(shortest=min(2, self.lag))

    def whiten_leader(self) -> None:
        """The last series sometimes becomes white noise, which nothing else predicts."""
        share = self.config.white_leader_share
        if share and self.rng.random() < share:  # no draw without a share, as with drivers
            self.values[-1] = self.rng.standard_normal(self.values.shape[1])

    def whiten_drivers(self) -> None:
        """Some of the series but the first become white noise, which nothing else predicts."""
        if not self.config.white_share:  # no draw: batches of older recipes stay as they were
            return
        white = self.rng.random(self.size) < self.config.white_share
        white[0] = False
        noise = self.rng.standard_normal(self.values.shape)
        self.values = np.where(white[:, None], noise, self.values)

    @property
    def effect_weights(self) -> list[float]:
        """Of :data:`_EFFECTS`."""
        bent = self.config.nonlinear_share
        return [1 - bent, *[bent / 4] * 4]

    def some_share(self) -> float:
        """Share of the variance that comes from other series; sometimes all of it."""
        if self.rng.random() < 0.15:
            return 1.0
        return float(self.rng.uniform(self.config.least_share, 1.0))

    def in_units(self, values: _Values) -> FloatArray:
        """Standardised values ``[k, L]`` at the level and scale of the independent series."""
        drawn: FloatArray = (self.level + self.scale * values).astype(np.float32)
        return drawn

    def drivers_known(self, probability: float) -> NDArray[np.bool_]:
        """All drivers known ahead, none, or some of them; never the first series, ``[k]``."""
        known = np.full(self.size, self.rng.random() < probability)
        if self.rng.random() < 0.3:
            known = self.rng.random(self.size) < probability
        known[0] = False
        return known


_Drawn = tuple[FloatArray, NDArray[np.bool_]]


def _driven(group: _Group) -> _Drawn:
    """The first series depends on some of the others, now or some steps ago."""
    rng = group.rng
    group.whiten_drivers()
    values = group.own.copy()
    weights = rng.standard_normal(group.size) * (rng.random(group.size) < 0.75)
    weights[1] = weights[1] or 1.0
    if group.config.positive:
        weights = np.abs(weights)
    drive = np.zeros(values.shape[1])
    for row in range(1, group.size):
        lag = 0 if rng.random() < 1 - group.config.lagged_share else group.some_lag()
        effect = _EFFECTS[rng.choice(len(_EFFECTS), p=group.effect_weights)]
        drive += weights[row] * effect(group.lagged(row, lag))
    values[0] = _blend(values[0], drive, group.some_share())
    return group.in_units(values), group.drivers_known(group.config.known_share)


def _events(group: _Group) -> _Drawn:
    """The first series responds to pulses or a calendar, in its own spread or in proportion."""
    rng, values = group.rng, group.own.copy()
    steps = values.shape[1]
    marks = np.stack([_marks(rng, steps) for _ in range(group.size - 1)])  # [k - 1, L]
    size = rng.uniform(0.5, 4, (len(marks), 1)) * rng.choice([-1, 1, 1], (len(marks), 1))
    size *= rng.random((len(marks), 1)) < 0.8
    response = (size * marks).sum(axis=0)
    if rng.random() < 0.3:  # an effect that fades
        fade = rng.uniform(0.2, 0.8) ** np.arange(8)
        response = np.convolve(response, fade)[:steps]
    if rng.random() < 0.3:
        response = response * (1 + 0.3 * values[0])
    values[0] += response
    drawn = group.in_units(values)
    unit = np.where(rng.random(len(marks)) < 0.6, 1.0, rng.gamma(2.0, 5.0, len(marks)))
    drawn[1:] = (unit[:, None] * marks).astype(np.float32)
    return drawn, group.drivers_known(0.5 + 0.5 * group.config.known_share)


def _mixed(group: _Group) -> _Drawn:
    """Every series is a mixture of all at one step, half of the time through a nonlinearity."""
    rng = group.rng
    mixing = rng.standard_normal((group.size, group.size)) + np.eye(group.size)
    mixing /= np.linalg.norm(mixing, axis=1, keepdims=True)
    values = mixing @ group.own
    if rng.random() < 0.5:
        bend = rng.uniform(0.3, 2.0, (group.size, 1))
        values = np.tanh(bend * values) / bend
    return group.in_units(values), group.drivers_known(0.5 * group.config.known_share)


def _leading(group: _Group) -> _Drawn:
    """The last series leads all others by some steps each."""
    rng, leader = group.rng, group.size - 1
    group.whiten_leader()
    values = group.own.copy()
    for row in range(leader):
        led = group.lagged(leader, group.leading_lag()) * rng.choice([-1, 1, 1])
        values[row] = _blend(values[row], led, group.some_share())
    known = np.zeros(group.size, dtype=bool)
    known[leader] = rng.random() < 0.2 * group.config.known_share
    return group.in_units(values), known


def _cointegrated(group: _Group) -> _Drawn:
    """All series follow one random walk, each with a deviation that returns to zero."""
    rng, values = group.rng, group.own
    walk = np.cumsum(rng.standard_normal(values.shape[1]))
    walk = (walk - walk.mean()) / (walk.std() + 1e-6)
    loading = rng.uniform(0.5, 2.0, (group.size, 1)) * rng.choice([-1, 1, 1, 1], (group.size, 1))
    deviation = rng.uniform(0.05, 0.6, (group.size, 1)) * values
    return group.in_units(loading * walk + deviation), group.drivers_known(
        0.3 * group.config.known_share
    )


def _unrelated(group: _Group) -> _Drawn:
    """Nothing in common."""
    return group.in_units(group.own), group.drivers_known(group.config.known_share)


def _calendar(group: _Group) -> _Drawn:
    """The first series has a season; flags beside it repeat one step of it, or last for weeks.

    Some flags are promotions, which alone say more than the past of the series.
    """
    rng, values = group.rng, group.own.copy()
    step = np.arange(values.shape[1])
    period = int(rng.choice([4, 5, 7, 7, 7, 12, 24]))
    phase = (step + rng.integers(period)) % period
    pattern = rng.standard_normal(period)
    pattern[0] -= rng.uniform(0, 4)  # the step that a flag marks
    values[0] = _blend(values[0], pattern[phase], float(rng.uniform(0.3, 0.95)))
    marks = np.empty((group.size - 1, len(step)))
    for row in range(len(marks)):
        kind = rng.integers(3)
        if kind == 0:
            marks[row] = phase == 0
        elif kind == 1:
            marks[row] = _spells(rng, len(step), rate=0.01, shortest=10, longest=60)
            values[0] += rng.choice([0, 0, rng.normal(0, 0.3)]) * marks[row]
        else:
            marks[row] = _spells(rng, len(step), rate=0.06, shortest=3, longest=8)
            values[0] += rng.uniform(0.3, 2.0) * marks[row]
        if rng.random() < 0.3:
            marks[row] = 1 - marks[row]
    drawn = group.in_units(values)
    drawn[1:] = marks
    return drawn, group.drivers_known(0.5 + 0.5 * group.config.known_share)


_RELATIONS: dict[str, Callable[[_Group], _Drawn]] = {
    "driven": _driven,
    "events": _events,
    "mixed": _mixed,
    "leading": _leading,
    "cointegrated": _cointegrated,
    "unrelated": _unrelated,
    "calendar": _calendar,
}


def _blend(own: _Values, other: _Values, share: float) -> _Values:
    centred = other - other.mean()
    centred /= centred.std() + 1e-6
    blended: _Values = np.sqrt(1 - share) * own + np.sqrt(share) * centred
    return blended


def _marks(rng: np.random.Generator, steps: int) -> _Values:
    """Zeros and ones: single events, spans of some steps, or one step of every period."""
    kind = rng.integers(3)
    marks: _Values
    if kind == 0:
        marks = (rng.random(steps) < rng.uniform(0.03, 0.3)).astype(np.float64)
    elif kind == 1:
        starts = rng.random(steps) < rng.uniform(0.01, 0.08)
        span = np.ones(int(rng.integers(2, 9)))
        marks = np.minimum(np.convolve(starts, span)[:steps], 1.0)
    else:
        period = int(rng.choice([4, 5, 7, 12, 24]))
        marks = (np.arange(steps) % period == rng.integers(period)).astype(np.float64)
    return marks


def _spells(
    rng: np.random.Generator, steps: int, *, rate: float, shortest: int, longest: int
) -> _Values:
    """Zeros, and spans of ones of up to ``longest`` steps; one in ``1 / rate`` steps begins one."""
    marks = np.zeros(steps)
    for first in np.flatnonzero(rng.random(steps) < rate):
        marks[first : first + int(rng.integers(shortest, longest + 1))] = 1
    return marks
