"""Series that a regression on covariates explains, and the same series with one covariate shifted.

A model that reads covariates implies a coefficient: the change of its median, for one more of a
covariate at one step ahead (Algorithm 2 of Liang et al., 2025). Here the true one is known.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from tscompress.io.strict import Strict
from tscompress.lab.instruments import ordinary_least_squares, two_stage_least_squares
from tscompress.probing.processes import Array

Indices = npt.NDArray[np.int64]
GROUP = "response"
#: Of a covariate at one step ahead: one standard deviation, so that values stay usual.
SHIFT = 1.0
#: Shares of the variance of an endogenous covariate: of instrument, confounder and its own noise.
INSTRUMENT, CONFOUNDER, OWN = 0.4, 0.4, 0.2


class ResponseTask(Strict):
    """Forecast y_t = a + sum_j w_j x_jt + noise, w ~ N(0, I), x white noise and known ahead.

    ``confounded``: there is one x, and an unseen u acts on it and on y, so that the coefficient of
    the best forecast is not the causal effect w (Liang et al., 2025, Algorithm 1). With
    ``instrument`` an instrument z, which acts on y through x alone, is a second covariate.
    """

    name: str
    covariates: int = Field(default=1, ge=1, le=16, description="x, without the instrument")
    noise: float = Field(default=0.5, gt=0, description="standard deviation")
    confounded: bool = False
    instrument: bool = False
    context_length: int = Field(default=128, ge=16, le=8192)
    horizon: int = Field(default=16, ge=1, le=1024)
    num_series: int = Field(default=128, ge=1, le=4096)

    @model_validator(mode="after")
    def _instrument_fits(self) -> ResponseTask:
        if self.confounded and self.covariates > 1:
            raise ValueError("a confounded task has one covariate; leave covariates out")
        if self.instrument and not self.confounded:
            raise ValueError("an instrument is for a confounded task; set confounded: true")
        return self

    def draw(self, seed: int = 0) -> Regressions:
        """Draw the groups; they depend only on the task and the seed."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        count, length = self.num_series, self.context_length + self.horizon
        level = rng.uniform(0, 3, (count, 1))
        weights = rng.standard_normal((count, self.covariates))
        picked = rng.integers(self.covariates, size=count)
        steps = rng.integers(self.horizon, size=count)
        order = rng.random((count, length)).argsort(axis=1)
        noise = self.noise * rng.standard_normal((count, length))
        effects = weights[np.arange(count), picked]
        if self.confounded:
            covariates, hidden = _endogenous(rng, count, length)
            size = rng.standard_normal((count, 1))
            noise += size * hidden
            associations = effects + self.bias * size[:, 0]
            covariates = covariates[:, : 1 + self.instrument]
        else:
            covariates = rng.standard_normal((count, self.covariates, length))
            associations = effects
        values = level + np.einsum("nc,ncl->nl", weights, covariates[:, : self.covariates]) + noise
        return Regressions(
            values[:, : self.context_length], values[:, self.context_length :], covariates,
            effects, associations, picked, steps, order,
        )  # fmt: skip

    @property
    def group(self) -> str:
        """By which all of them are chosen."""
        return GROUP

    @property
    def bias(self) -> float:
        """Coefficient of the best forecast minus the causal effect, for one unit of u on y.

        cov(x, u) / var(x); with an instrument both given z, so that the bias is larger: z explains
        the part of x that u has no share in.
        """
        if not self.confounded:
            return 0.0
        return math.sqrt(CONFOUNDER) / (1 - INSTRUMENT if self.instrument else 1)

    @property
    def least_squares_limit(self) -> float:
        """Bias of least squares of y on x alone, as a share of :attr:`bias`; 2SLS has 0."""
        return math.sqrt(CONFOUNDER) / self.bias if self.confounded else 1.0


class Regressions(NamedTuple):
    """Groups of a task: a target, covariates, and which value of them is shifted."""

    context: Array
    """``[N, T]``."""
    label: Array
    """``[N, H]``."""
    covariates: Array
    """``[N, C, T + H]``, all known ahead; an instrument is the last."""
    effects: Array
    """``[N]``: w, the causal effect of the covariate that is shifted."""
    associations: Array
    """``[N]``: its coefficient in the best forecast; ``effects`` unless u confounds it."""
    picked: Indices
    """``[N]``: the covariate that is shifted."""
    steps: Indices
    """``[N]``: the step ahead, from 0, at which it is."""
    order: Indices
    """``[N, T + H]``: a permutation of the steps, for the control."""

    def shuffled(self) -> Regressions:
        """The same values of the covariates in another order, without use for the target."""
        moved = np.take_along_axis(self.covariates, self.order[:, None], axis=2)
        return self._replace(covariates=moved)

    def shifted(self) -> Array:
        """Covariates with :data:`SHIFT` more of one at one step ahead, ``[N, C, T + H]``."""
        moved = self.covariates.copy()
        at = self.context.shape[1] + self.steps
        moved[np.arange(len(moved)), self.picked, at] += SHIFT
        return moved


def _endogenous(rng: np.random.Generator, count: int, length: int) -> tuple[Array, Array]:
    """x and its instrument z ``[N, 2, L]``, both of variance 1, and the confounder ``[N, L]``."""
    z, u, own = rng.standard_normal((3, count, length))
    x = INSTRUMENT**0.5 * z + CONFOUNDER**0.5 * u + OWN**0.5 * own
    return np.stack([x, z], axis=1), u


# --------------------------------------------------------------------------------------------------
# Estimates from the context
# --------------------------------------------------------------------------------------------------


def ridge_regression(drawn: Regressions, penalty: float) -> tuple[Array, Array]:
    """Forecasts ``[N, H]``, and the coefficient of the shifted covariate ``[N]``.

    With the variance of the noise as ``penalty`` the coefficients are the posterior means under
    w ~ N(0, I): without a confounder, and but for the level, no forecast from the context is
    better.
    """
    length = drawn.context.shape[1]
    x = drawn.covariates.swapaxes(1, 2)  # [N, T + H, C]
    means = x[:, :length].mean(axis=1, keepdims=True)
    level = drawn.context.mean(axis=1, keepdims=True)
    weights = ordinary_least_squares(x[:, :length] - means, drawn.context - level, penalty)
    ahead = ((x[:, length:] - means) * weights[:, None]).sum(axis=-1)
    return level + ahead, weights[np.arange(len(weights)), drawn.picked]


def two_stage(drawn: Regressions) -> Array:
    """2SLS on the context of x, the first covariate, and its instrument, the last, ``[N]``."""
    length = drawn.context.shape[1]
    past = drawn.covariates[..., :length]
    x, z = (past[:, index, :, None] for index in (0, -1))
    centred = [part - part.mean(axis=1, keepdims=True) for part in (z, x, drawn.context)]
    return two_stage_least_squares(*centred)[:, 0]


#: By name; they come with the probe, for models that read covariates.
RESPONSES: dict[str, ResponseTask] = {
    task.name: task
    for task in (
        *(ResponseTask(name=f"response-{count}", covariates=count) for count in (1, 2, 4)),
        ResponseTask(name="confounded", confounded=True, noise=0.3),
        ResponseTask(name="instrument", confounded=True, instrument=True, noise=0.3),
    )
}
