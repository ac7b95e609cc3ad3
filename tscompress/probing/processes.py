"""Processes that series are drawn from, and the best possible forecast of each series.

The parameters of a process are known, so the predictive distribution is exact and its quantiles are
the best possible forecast. Values are dimensionless; a season has a standard deviation of 1, or of
its amplitude.

To add a process, write a class with :meth:`paths` and put it into ``Process`` of
:mod:`tscompress.probing.tasks`. Processes whose series come with covariates are in
:mod:`tscompress.probing.covariates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.evaluation.metrics import Quantiles
from tscompress.io.strict import Strict

Array = npt.NDArray[np.float64]

#: Quantiles 0.1 … 0.9 of the standard normal distribution, ``[9, 1]``.
NORMAL = np.array([[NormalDist().inv_cdf(level)] for level in QUANTILE_LEVELS])
#: How strongly a season of amplitude 1 multiplies the level.
_SEASON_FACTOR = 0.3
#: Largest demand, where the distribution of sizes is truncated.
_LARGEST_DEMAND = 200


class Paths(NamedTuple):
    """Series of one process, and their best possible forecast."""

    values: Array
    """``[N, T + H]``: context and label."""
    best: Quantiles
    """``[N, 9, H]``: quantiles 0.1 … 0.9 of the label, given the process and the context."""
    covariates: Array | None = None
    """``[N, C, T + H]``; NaN where missing, or not known ahead."""
    known: int = 0
    """Covariates known ahead, the first ones."""


class Season(Strict):
    """A repeated pattern: free, with independent values of each step, or a few smooth waves."""

    period: int = Field(ge=2)
    shape: Literal["free", "smooth"] = "free"
    amplitude: PositiveFloat = 1.0

    def pattern(self, rng: np.random.Generator, count: int) -> Array:
        """One period of each series, ``[N, period]``: mean 0, standard deviation the amplitude."""
        if self.shape == "free":
            pattern = rng.standard_normal((count, self.period))
        else:
            step = np.arange(self.period)
            pattern = np.zeros((count, self.period))
            for harmonic in range(1, min(3, self.period // 2) + 1):
                sine, cosine = rng.standard_normal((2, count, 1)) / harmonic
                angle = 2 * np.pi * harmonic * step / self.period
                pattern += sine * np.sin(angle) + cosine * np.cos(angle)
        pattern -= pattern.mean(axis=1, keepdims=True)
        return np.asarray(self.amplitude * pattern / pattern.std(axis=1, keepdims=True))


def seasonal_path(
    rng: np.random.Generator, seasons: Sequence[Season], count: int, length: int
) -> Array:
    """The sum of all seasons, each at a random phase, ``[count, length]``."""
    path = np.zeros((count, length))
    for season in seasons:
        index = (np.arange(length) + rng.integers(season.period, size=(count, 1))) % season.period
        path += np.take_along_axis(season.pattern(rng, count), index, axis=1)
    return path


class Trend(Strict):
    """A rise, or fall, over the context: linear, or damped to an end."""

    kind: Literal["linear", "damped"] = "linear"
    rise: PositiveFloat = Field(default=10.0, description="over the context, on average")

    def path(self, rng: np.random.Generator, count: int, length: int, context: int) -> Array:
        """``[N, length]``, 0 at the start; signs are random."""
        time = np.arange(length) / context
        # Damped with half of the context as its scale: a seventh of the rise remains.
        shape = time if self.kind == "linear" else (1 - np.exp(-2 * time)) / (1 - np.exp(-2))
        rise = self.rise * rng.uniform(0.5, 1.5, (count, 1)) * rng.choice([-1.0, 1.0], (count, 1))
        return np.asarray(rise * shape)


class Seasonal(Strict):
    """What processes with seasons and white noise have in common."""

    seasons: tuple[Season, ...] = ()
    noise: float = Field(default=0.0, ge=0, description="standard deviation")

    @property
    def season_length(self) -> int:
        """Steps that a seasonal naive forecast looks back."""
        return max((season.period for season in self.seasons), default=1)

    @property
    def continuous(self) -> bool:
        """Whether outcomes have a density: then the best 80% interval covers 0.8 of them."""
        return self.noise > 0


class Structural(Seasonal):
    """Level, trend, seasons, a shift of the level, and white noise.

    The best forecast is the continuation without noise, and quantiles of the noise around it.
    """

    kind: Literal["structural"] = "structural"
    trend: Trend | None = None
    multiplicative: bool = Field(default=False, description="seasons grow with the level")
    level_shift: PositiveFloat | None = Field(
        default=None, description="average size of a jump in the second half of the context"
    )

    @property
    def ends_constant(self) -> bool:
        """Whether a constant can be the best possible forecast."""
        return not self.seasons and self.trend is None

    def paths(self, rng: np.random.Generator, count: int, context: int, horizon: int) -> Paths:
        """``count`` series ``[count, context + horizon]`` and their best forecast."""
        length = context + horizon
        path = np.repeat(rng.uniform(0, 3, (count, 1)), length, axis=1)
        if self.trend is not None:
            rise = self.trend.path(rng, count, length, context)
            path += np.abs(rise) if self.multiplicative else rise
        season = seasonal_path(rng, self.seasons, count, length)
        path = (
            (1 + path) * np.exp(_SEASON_FACTOR * season) if self.multiplicative else path + season
        )
        if self.level_shift is not None:
            size = self.level_shift * rng.uniform(0.5, 1.5, (count, 1))
            start = context * rng.uniform(0.5, 0.8, (count, 1))
            path += size * rng.choice([-1.0, 1.0], (count, 1)) * (np.arange(length) >= start)
        values = path + self.noise * rng.standard_normal((count, length))
        return Paths(values, path[:, None, context:] + self.noise * NORMAL)


class Autoregressive(Strict):
    """x_t = c x_{t-1} + e_t around a level, with normal e_t; 1 is a random walk."""

    kind: Literal["autoregressive"] = "autoregressive"
    coefficient: float = Field(gt=0, le=1)

    season_length: ClassVar[int] = 1
    continuous: ClassVar[bool] = True
    ends_constant: ClassVar[bool] = True

    def paths(self, rng: np.random.Generator, count: int, context: int, horizon: int) -> Paths:
        """``count`` series ``[count, context + horizon]`` and their best forecast."""
        length, factor = context + horizon, self.coefficient
        noise = rng.standard_normal((count, length))
        if factor < 1:  # starts in its stationary distribution
            noise[:, 0] /= (1 - factor**2) ** 0.5
        values = np.empty((count, length))
        values[:, 0] = noise[:, 0]
        for step in range(1, length):
            values[:, step] = factor * values[:, step - 1] + noise[:, step]
        ahead = np.arange(1, horizon + 1)
        median = values[:, context - 1, None] * factor**ahead  # [N, H]
        spread = np.sqrt(np.cumsum(factor ** (2 * (ahead - 1))))  # [H]
        level = rng.uniform(0, 10, (count, 1))
        best = (level + median)[:, None] + spread * NORMAL
        return Paths(level + values, best)


class Intermittent(Strict):
    """Demand of 1 + Poisson units at some steps, nothing between: at random ones, or regularly."""

    kind: Literal["intermittent"] = "intermittent"
    interval: int = Field(default=4, ge=2, description="steps from demand to demand, on average")
    regular: bool = Field(default=False, description="exactly interval steps apart")
    mean_size: float = Field(default=5.0, ge=1, le=50)

    continuous: ClassVar[bool] = False

    @property
    def season_length(self) -> int:
        """Steps that a seasonal naive forecast looks back."""
        return self.interval if self.regular else 1

    @property
    def ends_constant(self) -> bool:
        """Whether a constant can be the best possible forecast."""
        return not self.regular

    def paths(self, rng: np.random.Generator, count: int, context: int, horizon: int) -> Paths:
        """``count`` series ``[count, context + horizon]`` and their best forecast."""
        shape = (count, context + horizon)
        if self.regular:
            time = np.arange(context + horizon) + rng.integers(self.interval, size=(count, 1))
            likely = (time % self.interval == 0).astype(float)
        else:
            likely = np.full(shape, 1 / self.interval)
        sizes = 1 + rng.poisson(self.mean_size - 1, shape)
        values = (rng.random(shape) < likely) * sizes.astype(float)
        chances = (0.0, 1 / self.interval, 1.0)
        quantiles = np.array([[self._quantile(x, c) for c in chances] for x in QUANTILE_LEVELS])
        which = np.searchsorted(chances, likely[:, context:])  # [N, H]
        return Paths(values, quantiles[:, which].swapaxes(0, 1))

    def _quantile(self, level: float, chance: float) -> float:
        """Quantile of the demand at a step that has demand with this probability."""
        if level <= 1 - chance:
            return 0.0
        # Probabilities of 1, 2, ... units, up to a factor.
        sizes = np.cumprod([1.0, *((self.mean_size - 1) / np.arange(1, _LARGEST_DEMAND))])
        below = 1 - chance + chance * np.cumsum(sizes) / sizes.sum()
        return float(1 + np.searchsorted(below, level))
