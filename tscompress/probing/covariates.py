"""Series with covariates: driven by some of them, beside others that do not matter.

The best possible forecast is given the covariates. It is known exactly where the covariates are
known ahead, or lead the series by the whole horizon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from tscompress.io.strict import Strict
from tscompress.probing.processes import NORMAL, Array, Paths, Seasonal, seasonal_path

#: From one step to the next, of a smooth covariate.
_SMOOTHNESS = 0.9
#: Of a step, to be the first of a pulse of two steps.
_PULSE_CHANCE = 1 / 12
MAX_COVARIATES = 64


class Covariate(Strict):
    """A series beside the target, and its effect.

    Noise and smooth covariates have mean 0 and standard deviation 1, pulses are 1 for two steps and
    0 between.
    """

    shape: Literal["noise", "smooth", "pulses"] = "noise"
    effect: Literal["linear", "square", "sign"] = "linear"
    lag: int = Field(default=0, ge=0, le=1024, description="steps from the covariate to its effect")
    known: bool = Field(default=True, description="ahead; otherwise it ends with the series")
    strength: float = Field(
        default=1.0, ge=0, description="standard deviation of the effect, height of pulses; 0: none"
    )
    missing: float = Field(default=0.0, ge=0, le=0.9, description="share of its past, one stretch")
    count: int = Field(default=1, ge=1, le=MAX_COVARIATES, description="of such covariates")

    @model_validator(mode="after")
    def _effect_fits(self) -> Covariate:
        if not self.strength and (self.lag or self.effect != "linear"):
            raise ValueError("a covariate of strength 0 has no effect; leave out lag and effect")
        if self.shape == "pulses" and self.effect != "linear":
            raise ValueError("pulses are 0 and 1, and have a linear effect alone; leave it out")
        return self

    @property
    def label(self) -> str:
        """A few words, for figures."""
        parts = [self.shape, *(f"lag {self.lag}" for _ in range(bool(self.lag)))]
        parts += [self.effect] if self.effect != "linear" else []
        parts += ["no effect"] if not self.strength else []
        parts += [] if self.known else ["not known ahead"]
        return ", ".join(parts)

    def path(self, rng: np.random.Generator, count: int, length: int) -> Array:
        """``[count, length]``."""
        noise = rng.standard_normal((count, length))
        if self.shape == "noise":
            return noise
        if self.shape == "pulses":
            starts = rng.random((count, length + 1)) < _PULSE_CHANCE
            return np.asarray(starts[:, 1:] | starts[:, :-1], dtype=np.float64)
        path = noise.copy()
        for step in range(1, length):
            new = (1 - _SMOOTHNESS**2) ** 0.5 * noise[:, step]
            path[:, step] = _SMOOTHNESS * path[:, step - 1] + new
        return path

    def effect_of(self, rng: np.random.Generator, path: Array) -> Array:
        """The effect of ``path`` ``[N, L]``, with a size of each series; signs of pulses are +."""
        size = self.strength * rng.uniform(0.5, 1.5, (len(path), 1))
        if self.shape == "pulses":
            return np.asarray(size * path)
        sign = rng.choice([-1.0, 1.0], (len(path), 1))
        effects = {"linear": path, "square": (path**2 - 1) / 2**0.5, "sign": np.sign(path)}
        return np.asarray(sign * size * effects[self.effect])

    def hide(self, rng: np.random.Generator, past: Array) -> None:
        """Set one stretch of ``past`` ``[N, T]`` to NaN, which no later step needs."""
        length = past.shape[1]
        stretch = round(self.missing * length)
        if stretch:
            first = rng.integers(length - self.lag - stretch + 1, size=(len(past), 1))
            step = np.arange(length)
            past[(step >= first) & (step < first + stretch)] = np.nan


class Driven(Seasonal):
    """Level, seasons, the effects of covariates, and white noise.

    The best forecast has the effects at their true sizes, which the context shows.
    """

    kind: Literal["driven"] = "driven"
    covariates: tuple[Covariate, ...] = Field(min_length=1)

    ends_constant: ClassVar[bool] = False

    @model_validator(mode="after")
    def _not_too_many(self) -> Driven:
        count = sum(covariate.count for covariate in self.covariates)
        if count > MAX_COVARIATES:
            raise ValueError(f"{count} covariates are more than {MAX_COVARIATES}; give fewer")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Of each covariate ``[C]``, those known ahead first."""
        return tuple(one.label for one in self._each())

    def check_fits(self, context: int, horizon: int) -> None:
        """Raise ValueError where the best forecast is not known at these lengths."""
        for one in self.covariates:
            if one.lag >= context:
                raise ValueError(
                    f"a lag of {one.lag} steps is not shorter than the context of {context}; give "
                    "a longer context_length"
                )
            if one.strength and not one.known and one.lag < horizon:
                raise ValueError(
                    f"a covariate that is not known ahead has a lag of {one.lag}; give it at least "
                    f"the horizon, {horizon}, or the best forecast is unknown"
                )
            if round(one.missing * context) > context - one.lag:
                raise ValueError(
                    f"of a covariate with a lag of {one.lag} a share of {one.missing:g} is missing;"
                    " give less, or the best forecast is unknown"
                )

    def paths(self, rng: np.random.Generator, count: int, context: int, horizon: int) -> Paths:
        """``count`` series ``[count, context + horizon]`` and their best forecast."""
        length = context + horizon
        path = np.repeat(rng.uniform(0, 3, (count, 1)), length, axis=1)
        path += seasonal_path(rng, self.seasons, count, length)
        covariates = []
        for one in self._each():
            whole = one.path(rng, count, one.lag + length)
            path += one.effect_of(rng, whole[:, :length])
            seen = whole[:, one.lag :]
            one.hide(rng, seen[:, :context])
            if not one.known:
                seen[:, context:] = np.nan
            covariates.append(seen)
        values = path + self.noise * rng.standard_normal((count, length))
        best = path[:, None, context:] + self.noise * NORMAL
        known = sum(one.known for one in self._each())
        return Paths(values, best, np.stack(covariates, axis=1), known)

    def _each(self) -> Iterator[Covariate]:
        """Each covariate, those known ahead first."""
        for known in (True, False):
            for one in self.covariates:
                if one.known == known:
                    yield from [one] * one.count
