"""A vectorised corpus of synthetic series for pretraining and calibration.

Every generator returns a whole batch, float32 ``[B, L]``, and draws only from the
``numpy.random.Generator`` it is given: the same seed gives the same series on every machine, and
a training run that starts again at step ``n`` sees what it would have seen.

The families follow what the Chronos authors found useful (Ansari et al., 2024): compositions of
Gaussian-process kernels and convex mixtures of series (TSMixup). Sums and products of kernels are
drawn as sums and products of independent paths, which have exactly the composed covariance but,
for products, are not Gaussian; that is what lets a batch be drawn without an ``O(L^3)``
factorization per series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tscompress.io.strict import Strict

FloatArray = NDArray[np.float32]

#: Seasonal periods of common sampling frequencies, with how often each is drawn.
COMMON_PERIODS = (4, 5, 6, 7, 12, 24, 30, 48, 52, 60, 96, 168, 288, 336)
PERIOD_WEIGHTS = (5.0, 1.0, 1.0, 4.0, 9.0, 5.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5)

#: Steps of the repeated patterns of :func:`seasonal_series`.
SEASONAL_PERIODS = (4, 5, 6, 7, 12, 24, 30, 48, 52)


class CorpusConfig(Strict):
    """Mixture weights and corruptions of :class:`SyntheticCorpus`; weights need not sum to 1."""

    kernel_weight: float = Field(default=0.25, ge=0, description="Gaussian-process compositions")
    structural_weight: float = Field(default=0.45, ge=0, description="trend, season and noise")
    stochastic_weight: float = Field(default=0.15, ge=0, description="AR and random-walk paths")
    count_weight: float = Field(default=0.05, ge=0, description="intermittent and seasonal counts")
    real_weight: float = Field(default=0.10, ge=0, description="windows of given real series")
    trend_weight: float = Field(default=0.0, ge=0, description="trends alone, with little noise")
    seasonal_weight: float = Field(default=0.0, ge=0, description="repeated patterns")
    seasonal_periods: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=SEASONAL_PERIODS, min_length=1, description="steps of repeated patterns"
    )
    seasonal_extras: bool = Field(
        default=True, description="repeated patterns: second seasons, growth, drifting levels"
    )
    seasonal_noise_free: float = Field(
        default=0.25, ge=0, le=1, description="share of repeated patterns without noise"
    )
    noise_scale: float = Field(default=1.0, ge=0, description="factor on structural noise")
    seasonal_share: float = Field(default=0.75, ge=0, le=1, description="of structural series")
    longest_period: float | None = Field(
        default=None, gt=0, description="structural: longest period as a share of the length"
    )
    mixup_probability: float = Field(default=0.2, ge=0, le=1)
    shift_probability: float = Field(default=0.05, ge=0, le=1)
    outlier_probability: float = Field(default=0.05, ge=0, le=1)


#: Half, or three quarters, of the synthetic series repeat a pattern: without, compression forgets
#: seasons (eval/notes/calibration.md).
HALF_PATTERNS = CorpusConfig(seasonal_weight=0.9)
MOSTLY_PATTERNS = CorpusConfig(seasonal_weight=2.7)


class SyntheticCorpus:
    """Draws batches of series of any length from a mixture of families.

    Parameters
    ----------
    config
        The mixture.
    real_series
        Series, each a 1-D array, from which windows are drawn with ``config.real_weight``.
        Windows shorter than the length asked for are padded with NaN on the left.
    """

    def __init__(
        self, config: CorpusConfig | None = None, real_series: Sequence[FloatArray] = ()
    ) -> None:
        self.config = config or CorpusConfig()
        self.real_series = [np.asarray(series, dtype=np.float32) for series in real_series]
        weights = {
            "kernel": self.config.kernel_weight,
            "structural": self.config.structural_weight,
            "stochastic": self.config.stochastic_weight,
            "count": self.config.count_weight,
            "real": self.config.real_weight if self.real_series else 0.0,
            "seasonal": self.config.seasonal_weight,
        }
        if self.config.trend_weight:  # one more family of weight 0 would change what is drawn
            weights["trend"] = self.config.trend_weight
        total = sum(weights.values())
        if total <= 0:
            raise ValueError("a corpus needs at least one family with a weight above 0")
        self.families = list(weights)
        self.probabilities = np.array([weights[name] / total for name in self.families])

    def sample(self, rng: np.random.Generator, batch_size: int, length: int) -> FloatArray:
        """``batch_size`` series of ``length`` steps, float32 ``[B, L]``; NaN is left padding."""
        counts = rng.multinomial(batch_size, self.probabilities)
        parts = [
            self._draw(name, rng, int(count), length)
            for name, count in zip(self.families, counts, strict=True)
            if count
        ]
        series = np.concatenate(parts)  # [B, L]
        rng.shuffle(series, axis=0)
        series = _mixup(rng, series, self.config.mixup_probability)
        series = _level_shifts(rng, series, self.config.shift_probability)
        return _outliers(rng, series, self.config.outlier_probability)

    def _draw(self, name: str, rng: np.random.Generator, count: int, length: int) -> FloatArray:
        if name == "real":
            return _real_windows(rng, self.real_series, count, length)
        if name == "structural":
            return structural_series(rng, count, length, self.config)
        if name == "seasonal":
            return seasonal_series(rng, count, length, self.config)
        generators: dict[str, Callable[[np.random.Generator, int, int], FloatArray]] = {
            "kernel": kernel_compositions,
            "stochastic": stochastic_series,
            "count": count_series,
            "trend": trend_series,
        }
        return generators[name](rng, count, length)


# --------------------------------------------------------------------------------------------------
# Families
# --------------------------------------------------------------------------------------------------


def kernel_compositions(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Paths whose covariance is a random composition of kernels (KernelSynth), ``[count, L]``."""
    components = rng.integers(1, 6, size=count)  # kernels a series
    path = _kernel_path(rng, count, length)
    for index in range(1, 5):
        active = components > index
        if not active.any():
            break
        other = _kernel_path(rng, int(active.sum()), length)
        multiply = rng.random((len(other), 1)) < 0.35
        path[active] = np.where(multiply, path[active] * other, path[active] + other)
    level = np.where(rng.random((count, 1)) < 0.5, rng.gamma(2.0, 2.0, (count, 1)), 0.0)
    return _finish(rng, path + level * path.std(axis=1, keepdims=True), positive_share=0.3)


def structural_series(
    rng: np.random.Generator, count: int, length: int, config: CorpusConfig | None = None
) -> FloatArray:
    """Level, trend, season and noise, additive or multiplicative, ``[count, L]``."""
    config = config or CorpusConfig()
    time = np.arange(length, dtype=np.float32)[None, :]
    trend = _trend(rng, count, length)
    period = _periods(rng, count)
    if config.longest_period is not None:
        # Fold long periods into what a short window can show at least once.
        longest = max(4.0, config.longest_period * length)
        period = np.where(period > longest, 2 + period % (longest - 1), period).astype(np.float32)
    season = _seasonal_pattern(rng, count, length, period)
    second = _seasonal_pattern(rng, count, length, period * rng.choice([4, 5, 7, 12], size=count))
    season += (rng.random((count, 1)) < 0.1) * rng.uniform(0.2, 1.0, (count, 1)) * second

    # The strength of a season drifts in some series, as shopping or weather seasons do.
    drift = 1 + rng.normal(0, 0.5, (count, 1)) * (time / length - 0.5)
    drifting = rng.random((count, 1)) < 0.3
    seasonal_strength = _log_uniform(rng, 0.02, 0.6, (count, 1)) * (
        rng.random((count, 1)) < config.seasonal_share
    )
    season = seasonal_strength * season * np.where(drifting, drift, 1.0)

    noise_strength = config.noise_scale * _log_uniform(rng, 0.002, 0.25, (count, 1))
    noise = noise_strength * _autoregressive(rng, count, length) * _volatility(rng, count, length)

    multiplicative = rng.random((count, 1)) < 0.5
    level = np.where(multiplicative, np.exp(trend + season + noise), 1 + trend + season + noise)
    return _finish(rng, level.astype(np.float32), positive_share=0.5, scale_only=True)


def stochastic_series(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Random walks with drift, integrated walks and AR paths, some seasonal, ``[count, L]``."""
    steps = _autoregressive(rng, count, length) * _volatility(rng, count, length)
    drift = rng.normal(0.03, 0.15, (count, 1)) * (rng.random((count, 1)) < 0.6)
    walk = np.cumsum(steps + drift, axis=1)
    smooth_walk = np.cumsum(walk, axis=1) / 20.0
    kind = rng.choice(4, size=(count, 1), p=[0.45, 0.1, 0.25, 0.2])
    spread = _log_uniform(rng, 0.005, 0.15, (count, 1))
    geometric = np.exp(np.clip(spread * walk, -6, 6))
    path = np.select([kind == 0, kind == 1, kind == 2], [walk, smooth_walk, steps], geometric)
    seasonal = rng.random((count, 1)) < 0.35
    season = _seasonal_pattern(rng, count, length, _periods(rng, count))
    strength = _log_uniform(rng, 0.1, 2.0, (count, 1))
    path = path + seasonal * strength * path.std(axis=1, keepdims=True) * season
    level = rng.gamma(2.0, 3.0, (count, 1)) * np.where(rng.random((count, 1)) < 0.7, 1.0, 0.0)
    return _finish(
        rng, (path + level * path.std(axis=1, keepdims=True)).astype(np.float32), positive_share=0.5
    )


def count_series(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Poisson counts with a seasonal, drifting rate, many of them intermittent, ``[count, L]``."""
    rate = _log_uniform(rng, 0.3, 60.0, (count, 1))
    season = _seasonal_pattern(rng, count, length, _periods(rng, count))
    log_rate = np.log(rate) + rng.uniform(0, 0.8, (count, 1)) * season
    log_rate = log_rate + 0.5 * _trend(rng, count, length)
    counts = rng.poisson(np.exp(np.clip(log_rate, -5, 6)))
    occurrence = np.where(rng.random((count, 1)) < 0.5, rng.uniform(0.1, 0.9, (count, 1)), 1.0)
    counts = counts * (rng.random((count, length)) < occurrence)
    return counts.astype(np.float32)


def trend_series(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Straight, damped, accelerating and kinked trends with little noise, ``[count, L]``.

    They run over the whole series, so that a context shows how fast they level off. The noise has
    0.001 to 0.2 of the spread, and no memory.
    """
    time = np.linspace(0, 1, length, dtype=np.float32)[None, :]
    rate = _log_uniform(rng, 0.5, 6.0, (count, 1))
    damped = (1 - np.exp(-rate * time)) / (1 - np.exp(-rate))
    accelerating = np.expm1(rate * time / 2) / np.expm1(rate / 2)
    knot = rng.uniform(0.2, 0.8, (count, 1))
    kinked = time + rng.normal(0, 1.0, (count, 1)) * np.maximum(time - knot, 0)
    kind = rng.choice(4, size=(count, 1), p=[0.35, 0.35, 0.15, 0.15])
    path = np.select([kind == 0, kind == 1, kind == 2], [time, damped, accelerating], kinked)
    path = (path - path.mean(axis=1, keepdims=True)) / (path.std(axis=1, keepdims=True) + 1e-6)
    path *= rng.choice([-1.0, 1.0], (count, 1))
    noise = _log_uniform(rng, 0.001, 0.2, (count, 1)) * rng.standard_normal((count, length))
    level = rng.gamma(1.5, 2.0, (count, 1)) * (rng.random((count, 1)) < 0.7)
    return _finish(rng, (path + noise + level).astype(np.float32), positive_share=0.4)


def seasonal_series(
    rng: np.random.Generator, count: int, length: int, config: CorpusConfig | None = None
) -> FloatArray:
    """Patterns of whole periods, repeated with little noise, ``[count, L]``.

    What is asked of a model is to look one period back. Three in five patterns have a free value
    at each step of the period, the others few harmonics; ``seasonal_noise_free`` of them have no
    noise, the others 0.01 to 0.4 of the pattern's standard deviation. Some have a trend; with
    ``seasonal_extras`` some have a second season, an amplitude that grows or shrinks, or a level
    that walks.
    """
    config = config or CorpusConfig()
    extras = config.seasonal_extras
    time = np.linspace(-0.5, 0.5, length, dtype=np.float32)[None, :]
    path = _repeated_pattern(rng, count, length, config.seasonal_periods)
    second = _repeated_pattern(rng, count, length, config.seasonal_periods)
    path += second * (rng.random((count, 1)) < 0.15 * extras) * rng.uniform(0.2, 1.0, (count, 1))
    growth = np.exp(rng.normal(0, 1.0, (count, 1)) * time)
    path *= np.where(rng.random((count, 1)) < 0.2 * extras, growth, 1.0)

    slope = rng.normal(0, 2.0, (count, 1)) * min(1.0, (length / 128.0) ** 0.5)
    rate = rng.uniform(1, 4, (count, 1))
    damped = (1 - np.exp(-rate * (time + 0.5))) / (1 - np.exp(-rate)) - 0.5
    trend = slope * np.where(rng.random((count, 1)) < 0.3, damped, time)
    path += trend * (rng.random((count, 1)) < 0.4)
    walk = np.cumsum(rng.standard_normal((count, length)), axis=1)
    walk *= _log_uniform(rng, 0.01, 0.2, (count, 1))
    path += walk * (rng.random((count, 1)) < 0.1 * extras)

    noisy = rng.random((count, 1)) < 1 - config.seasonal_noise_free
    noise = _log_uniform(rng, 0.01, 0.4, (count, 1)) * noisy
    path += noise * rng.standard_normal((count, length))
    level = rng.gamma(1.5, 2.0, (count, 1)) * (rng.random((count, 1)) < 0.7)
    return _finish(rng, (path + level).astype(np.float32), positive_share=0.4)


def _repeated_pattern(
    rng: np.random.Generator, count: int, length: int, periods: Sequence[int]
) -> FloatArray:
    """Patterns of unit variance that repeat exactly, ``[count, L]``.

    Periods are drawn alike from those that a series shows twice, or the shortest.
    """
    shown = [period for period in periods if 2 * period <= length] or [min(periods)]
    period = rng.choice(np.asarray(shown), size=(count, 1))
    longest = max(shown)
    step = np.arange(longest)[None, :]
    free = rng.standard_normal((count, longest))
    free = np.where(rng.random((count, 1)) < 0.25, np.abs(free) ** 2, free)
    smooth = np.zeros((count, longest))
    decay = rng.uniform(0.3, 2.0, (count, 1))
    for harmonic in range(1, 5):
        allowed = harmonic <= np.maximum(period / 2, 1)
        angle = 2 * np.pi * harmonic * step / period
        sine, cosine = rng.standard_normal((2, count, 1)) * allowed / harmonic**decay
        smooth += sine * np.sin(angle) + cosine * np.cos(angle)
    pattern = np.where(rng.random((count, 1)) < 0.6, free, smooth)
    inside = step < period
    mean = np.where(inside, pattern, 0).sum(axis=1, keepdims=True) / period
    pattern = np.where(inside, pattern - mean, 0)
    pattern /= np.sqrt((pattern**2).sum(axis=1, keepdims=True) / period) + 1e-3
    offset = rng.integers(longest, size=(count, 1))
    index = (np.arange(length)[None, :] + offset) % period
    repeated: FloatArray = np.take_along_axis(pattern, index, axis=1).astype(np.float32)
    return repeated


def _real_windows(
    rng: np.random.Generator, series: Sequence[FloatArray], count: int, length: int
) -> FloatArray:
    picks = rng.integers(len(series), size=count)
    return np.stack([cut_window(rng, series[pick], length) for pick in picks])


def cut_window(rng: np.random.Generator, values: FloatArray, length: int) -> FloatArray:
    """A window of ``values`` that ends anywhere, ``[length]``; NaN on the left if it is shorter."""
    window = np.full(length, np.nan, dtype=np.float32)
    end = int(rng.integers(min(len(values), max(8, length // 2)), len(values) + 1))
    values = values[max(0, end - length) : end]
    window[length - len(values) :] = values
    return window


# --------------------------------------------------------------------------------------------------
# Building blocks
# --------------------------------------------------------------------------------------------------


def _log_uniform(
    rng: np.random.Generator, low: float, high: float, size: tuple[int, ...]
) -> FloatArray:
    return np.exp(rng.uniform(np.log(low), np.log(high), size)).astype(np.float32)


def _periods(rng: np.random.Generator, count: int) -> FloatArray:
    weights = np.asarray(PERIOD_WEIGHTS) / np.sum(PERIOD_WEIGHTS)
    common = rng.choice(COMMON_PERIODS, size=count, p=weights).astype(np.float32)
    odd = _log_uniform(rng, 3.0, 200.0, (count,))
    return np.where(rng.random(count) < 0.9, common, odd).astype(np.float32)


def _spectral_noise(rng: np.random.Generator, density: FloatArray, length: int) -> FloatArray:
    """Stationary Gaussian paths with the given power spectrum, variance about 2, ``[count, L]``.

    ``density`` is ``[count, L + 1]``: the spectrum on the frequencies of a circle of ``2 L`` steps,
    of which only the first half is kept, so that the ends of a path are not alike.
    """
    amplitude = np.sqrt(density)
    shape = density.shape
    coefficients = amplitude * (rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
    path = np.fft.irfft(coefficients, n=2 * length, axis=1)[:, :length]
    power = np.sqrt(np.maximum((amplitude**2).sum(axis=1, keepdims=True), 1e-20))
    scale: FloatArray = (path * (length * 2**0.5 / power)).astype(np.float32)
    return scale


def _kernel_path(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """One kernel a series: periodic, squared exponential, rational quadratic, linear, noise."""
    frequency = np.arange(length + 1, dtype=np.float32)[None, :] / (2 * length)  # cycles a step
    scale = _log_uniform(rng, 0.02, 1.0, (count, 1)) * length
    squared_exponential = np.exp(-0.5 * (2 * np.pi * scale * frequency) ** 2)
    long_tailed = 1.0 / (1.0 + (2 * np.pi * scale * frequency) ** 2)
    kind = rng.choice(5, size=(count, 1), p=[0.4, 0.2, 0.15, 0.15, 0.1])
    density = np.select(
        [kind == 1, kind == 2], [squared_exponential, long_tailed], np.ones_like(frequency)
    )
    path = _spectral_noise(rng, density.astype(np.float32), length)
    periodic = _seasonal_pattern(rng, count, length, _periods(rng, count))
    line = np.linspace(-1, 1, length, dtype=np.float32)[None, :]
    linear = rng.standard_normal((count, 1)) * line + rng.standard_normal((count, 1))
    chosen: FloatArray = np.select([kind == 0, kind == 3], [periodic, linear], path)
    return chosen.astype(np.float32)


def _seasonal_pattern(
    rng: np.random.Generator, count: int, length: int, period: FloatArray
) -> FloatArray:
    """Unit-variance periodic patterns, ``[count, L]``.

    Half of them have a smooth profile of few harmonics, the others a free profile (one value for
    each step of the period, as working days or months have) or a peaked one.
    """
    phase = rng.uniform(0, 1, (count, 1)) + np.arange(length)[None, :] / period[:, None]
    decay = rng.uniform(0.5, 2.5, (count, 1))
    pattern = np.zeros((count, length), dtype=np.float32)
    for harmonic in range(1, 7):
        allowed = harmonic <= period[:, None] / 2  # no aliasing above the Nyquist frequency
        amplitude = rng.standard_normal((count, 2, 1)) * (allowed / harmonic**decay)[:, None, :]
        angle = (2 * np.pi * harmonic * phase).astype(np.float32)
        pattern += (amplitude[:, 0] * np.sin(angle) + amplitude[:, 1] * np.cos(angle)).astype(
            np.float32
        )
    free_length = 64
    profile = rng.standard_normal((count, free_length)).astype(np.float32)
    peaked = rng.random((count, 1)) < 0.3
    profile = np.where(peaked, np.abs(profile) ** 3, profile)
    steps = np.maximum(np.round(period), 2).astype(int)[:, None]
    offset = rng.integers(0, 1 << 16, (count, 1))
    index = (np.arange(length)[None, :] + offset) % steps * np.minimum(free_length, steps) // steps
    free = np.take_along_axis(profile, index, axis=1)
    pattern = np.where(rng.random((count, 1)) < 0.55, pattern, free)
    pattern = pattern - pattern.mean(axis=1, keepdims=True)
    unit: FloatArray = pattern / (pattern.std(axis=1, keepdims=True) + 1e-3)
    return unit.astype(np.float32)


def _trend(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Trends around 0, ``[count, L]``: none, linear, damped, piecewise linear or a slow walk."""
    time = np.linspace(0, 1, length, dtype=np.float32)[None, :]
    # A short series spans less of its history, so its trend is less.
    strength = rng.normal(0.15, 0.7, (count, 1)) * min(1.0, (length / 200.0) ** 0.5)
    linear = time - 0.5
    rate = rng.uniform(1, 6, (count, 1))
    damped = (1 - np.exp(-rate * time)) / (1 - np.exp(-rate)) - 0.5
    knot = rng.uniform(0.2, 0.9, (count, 1))
    kinked = linear + rng.normal(0, 1.5, (count, 1)) * np.maximum(time - knot, 0)
    steps = rng.standard_normal((count, length)) / np.sqrt(length)
    walk = np.cumsum(steps, axis=1)
    kind = rng.choice(5, size=(count, 1), p=[0.15, 0.25, 0.1, 0.25, 0.25])
    shape = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4],
        [linear, damped, kinked, walk + 0.5 * linear],
        0.0,
    )
    trend: FloatArray = (strength * shape).astype(np.float32)
    return trend


def _autoregressive(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """AR(2) noise of variance about 2, white to strongly persistent, ``[count, L]``."""
    persistence = np.where(
        rng.random((count, 1)) < 0.5, 0.0, rng.beta(2, 1.5, (count, 1)) * 0.98
    ).astype(np.float32)
    second = rng.uniform(-0.6, 0.3, (count, 1)) * (rng.random((count, 1)) < 0.3)
    first = persistence * (1 - second)
    omega = np.pi * np.arange(length + 1, dtype=np.float32)[None, :] / length
    response = 1 - first * np.exp(-1j * omega) - second * np.exp(-2j * omega)
    density = (1.0 / np.maximum(np.abs(response) ** 2, 1e-4)).astype(np.float32)
    return _spectral_noise(rng, density, length)


def _volatility(rng: np.random.Generator, count: int, length: int) -> FloatArray:
    """Positive factors of median 1: constant, or clusters of high and low noise."""
    frequency = np.arange(length + 1, dtype=np.float32)[None, :] / (2 * length)
    scale = _log_uniform(rng, 0.05, 0.5, (count, 1)) * length
    density = np.exp(-0.5 * (2 * np.pi * scale * frequency) ** 2).astype(np.float32)
    strength = rng.uniform(0, 0.8, (count, 1)) * (rng.random((count, 1)) < 0.3)
    factor: FloatArray = np.exp(strength * _spectral_noise(rng, density, length))
    return factor.astype(np.float32)


def _finish(
    rng: np.random.Generator, path: FloatArray, positive_share: float, scale_only: bool = False
) -> FloatArray:
    """Keep some series non-negative and give each its own unit of measure."""
    count = len(path)
    shift = np.minimum(path.min(axis=1, keepdims=True), 0)
    positive = rng.random((count, 1)) < positive_share
    path = np.where(positive, path - shift, path)
    flipped = (rng.random((count, 1)) < 0.1) & ~positive & (not scale_only)
    path = np.where(flipped, -path, path)
    unit = _log_uniform(rng, 0.1, 1e4, (count, 1))
    return (path * unit).astype(np.float32)


def _mixup(rng: np.random.Generator, series: FloatArray, probability: float) -> FloatArray:
    """TSMixup: convex combinations of two or three mean-scaled series of the batch."""
    count = len(series)
    chosen = np.flatnonzero(rng.random(count) < probability)
    if not chosen.size:
        return series
    observed = np.isfinite(series)
    magnitude = np.where(observed, np.abs(series), 0).sum(axis=1) / np.maximum(observed.sum(1), 1)
    scaled = series / np.where(magnitude > 0, magnitude, 1)[:, None]
    partners = rng.integers(count, size=(chosen.size, 3))
    partners[:, 0] = chosen
    weights = rng.dirichlet([1.5, 1.5, 1.5], size=chosen.size)
    weights[rng.random(chosen.size) < 0.5, 2] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    used = np.where(weights[:, :, None] > 0, scaled[partners], 0)  # [M, 3, L]
    mixed = (weights[:, :, None] * used).sum(axis=1)
    series = series.copy()
    series[chosen] = mixed.astype(np.float32)
    return series


def _spread(series: FloatArray) -> FloatArray:
    """Standard deviation of what is observed of each series, ``[B, 1]``; 0 of nothing."""
    spread = np.zeros((len(series), 1), dtype=np.float32)
    known = np.isfinite(series).any(axis=1)
    spread[known] = np.nanstd(series[known], axis=1, keepdims=True)
    return spread


def _level_shifts(rng: np.random.Generator, series: FloatArray, probability: float) -> FloatArray:
    count, length = series.shape
    spread = _spread(series)
    shifted = (rng.random((count, 1)) < probability) * rng.normal(0, 1.5, (count, 1)) * spread
    start = rng.integers(0, length, (count, 1))
    return (series + shifted * (np.arange(length)[None, :] >= start)).astype(np.float32)


def _outliers(rng: np.random.Generator, series: FloatArray, probability: float) -> FloatArray:
    count, length = series.shape
    spread = _spread(series)
    hit = (rng.random((count, 1)) < probability) & (rng.random((count, length)) < 0.01)
    return (series + hit * rng.normal(0, 4, (count, length)) * spread).astype(np.float32)
