"""In-context regression: prompts of labelled examples, and predictors that are no transformers.

Task and measures of "Transformer Designs for In-Context Learning in Foundation Models for Time
Series Forecasting with Covariates" (Dange et al., section 4), which follow Garg et al. (2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tscompress.errors import DataError, UsageError

Array = NDArray[np.float64]
FunctionClass = Literal["linear", "network"]

#: Added to the Gram matrix of least squares, which is singular for the first ``dim`` examples.
RIDGE = 1e-6


@dataclass(frozen=True)
class RegressionPrompts:
    """Examples of one function a prompt.

    Attributes
    ----------
    x
        ``[B, T, d]``, covariates.
    y
        ``[B, T]``, targets; the last is the one to forecast.
    """

    x: Array
    y: Array


@dataclass(frozen=True)
class RegressionTask:
    """A distribution of prompts.

    Attributes
    ----------
    dim
        Covariates, d.
    history
        Labelled examples, H; prompts have one more.
    function
        ``linear``: y = <w, x>, w ~ N(0, I). ``network``: w_2' relu(W_1' x) with ``hidden`` units,
        scaled by sqrt(2 / hidden), so that Var y = d as of ``linear`` (Garg et al., 2022).
    noise
        Standard deviation of what is added to y.
    """

    dim: int
    history: int
    function: FunctionClass = "linear"
    noise: float = 0.0
    hidden: int = 100

    def __post_init__(self) -> None:
        for name in ("dim", "history", "hidden"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not (np.isfinite(self.noise) and self.noise >= 0):
            raise UsageError(f"noise is {self.noise}; it must be finite and at least 0.")

    @property
    def points(self) -> int:
        """Examples of a prompt with the query, T = H + 1."""
        return self.history + 1

    @property
    def null_loss(self) -> float:
        """E y^2: the loss of forecasting 0."""
        return self.dim + self.noise**2

    def draw(self, batch: int, rng: np.random.Generator) -> RegressionPrompts:
        """``batch`` prompts."""
        x = rng.standard_normal((batch, self.points, self.dim))
        if self.function == "linear":
            y = np.einsum("btd,bd->bt", x, rng.standard_normal((batch, self.dim)))
        else:
            first = rng.standard_normal((batch, self.dim, self.hidden))
            second = rng.standard_normal((batch, self.hidden)) * np.sqrt(2 / self.hidden)
            y = np.einsum("bth,bh->bt", np.maximum(x @ first, 0), second)
        return RegressionPrompts(x, y + self.noise * rng.standard_normal(y.shape))


# --------------------------------------------------------------------------------------------------
# Predictors from the examples before each point
# --------------------------------------------------------------------------------------------------


def least_squares_predictions(prompts: RegressionPrompts, ridge: float = RIDGE) -> Array:
    """Forecasts ``[B, T]`` of y_t by least squares on the t - 1 examples before; 0 at the first."""
    x, y = _checked(prompts)
    before = _before(x[..., :, None] * x[..., None, :])
    moments = _before(x * y[..., None])
    weights = np.linalg.solve(before + ridge * np.eye(x.shape[-1]), moments[..., None])
    return np.asarray(np.einsum("btd,btd->bt", x, weights[..., 0]))


def averaging_predictions(prompts: RegressionPrompts) -> Array:
    """Forecasts ``[B, T]`` of <w, x_t>, w the mean of y_s x_s over s < t (Garg et al., 2022)."""
    x, y = _checked(prompts)
    counts = np.maximum(np.arange(x.shape[1]), 1)
    means = _before(x * y[..., None]) / counts[:, None]
    return np.asarray(np.einsum("btd,btd->bt", x, means))


def neighbour_predictions(prompts: RegressionPrompts, neighbours: int = 3) -> Array:
    """Forecasts ``[B, T]``: mean y of the nearest examples before each point; 0 at the first.

    Raises
    ------
    UsageError
        ``neighbours`` is below 1.
    """
    x, y = _checked(prompts)
    if neighbours < 1:
        raise UsageError(f"neighbours is {neighbours}; it must be at least 1.")
    found = np.zeros_like(y)
    for t in range(1, x.shape[1]):
        distances = ((x[:, :t] - x[:, t : t + 1]) ** 2).sum(-1)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :neighbours]
        found[:, t] = np.take_along_axis(y[:, :t], nearest, axis=1).mean(1)
    return found


def last_index_loss(forecasts: Array, prompts: RegressionPrompts) -> float:
    """Mean squared error of ``[B, T]`` at the query, the last point (Dange et al., section 4)."""
    return float(((forecasts[:, -1] - prompts.y[:, -1]) ** 2).mean())


def validation_loss(forecasts: Array, prompts: RegressionPrompts) -> float:
    """Mean squared error of ``[B, T]``, points 2d + 1 to H + 1 from 1 (Dange et al., section 4).

    Raises
    ------
    UsageError
        Prompts are too short to have such a point.
    """
    first = 2 * prompts.x.shape[-1]
    if first >= prompts.y.shape[1]:
        raise UsageError(
            f"prompts have {prompts.y.shape[1]} points of {prompts.x.shape[-1]} covariates; the "
            f"validation loss starts at point {first + 1}. Give a longer history."
        )
    return float(((forecasts[:, first:] - prompts.y[:, first:]) ** 2).mean())


def _before(values: Array) -> Array:
    """Sums over the points before each, ``[B, T, ...]``."""
    sums = np.cumsum(values, axis=1)
    return np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)


def _checked(prompts: RegressionPrompts) -> tuple[Array, Array]:
    if not (np.isfinite(prompts.x).all() and np.isfinite(prompts.y).all()):
        raise DataError("prompts hold values that are not finite; drop or impute those.")
    return prompts.x, prompts.y
