"""In-context regression with endogenous regressors and instruments: prompts and estimators.

Letters are those of "Transformers Handle Endogeneity in In-Context Linear Regression" (Liang et
al., 2025): y = <beta, x> + e1, x = Theta' z + e2, with e1 and e2 correlated, so that least squares
is biased, and instruments z that are not correlated with e1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tscompress.errors import DataError, UsageError

Array = NDArray[np.float64]
#: How instruments act on regressors.
Effect = Literal["linear", "quadratic", "network"]
#: Columns that are nearly twice another: none, the last (Figure 5a), or half of them (Figure 5b).
Collinearity = Literal["none", "last", "half"]

_NEARLY = 1e-3  # standard deviation around twice the other column
#: Singular values below this share of the largest count as 0; what a pseudo-inverse cuts.
RANK_TOLERANCE = 1e-12


class SingularStageWarning(UserWarning):
    """Estimates of minimum norm stand where a stage of a regression has no unique one."""


# --------------------------------------------------------------------------------------------------
# Prompts
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstrumentPrompts:
    """Labelled examples and one query each, without endogeneity in the query.

    Attributes
    ----------
    z, x, y
        Instruments ``[B, n, q]``, regressors ``[B, n, p]``, outcomes ``[B, n]``.
    query_z, query_x, query_y
        ``[B, q]``, ``[B, p]``, ``[B]``.
    beta
        ``[B, p]``, the causal effects; NaN where nobody knows them.
    """

    z: Array
    x: Array
    y: Array
    query_z: Array
    query_x: Array
    query_y: Array
    beta: Array


@dataclass(frozen=True)
class InstrumentTask:
    """A distribution of prompts (Algorithm 1), and the changes to it of Figures 1, 2 and 5 to 7.

    Attributes
    ----------
    p, q
        Regressors and instruments.
    strength
        Factor r on Theta (Figure 1b).
    endogeneity
        Factor r on the confounder u (Figure 7).
    effect
        How z acts: linear, Theta' z^2 (Figure 2a), or a two-layer network of q hidden units
        (Figure 6; the paper does not state their number).
    live
        Instruments that are not 0 (Figure 2b); None: all.
    collinear
        Figure 5; y is made from the columns as they are then.
    noise
        Standard deviation of the exogenous error of y.
    """

    p: int
    q: int
    strength: float = 1.0
    endogeneity: float = 1.0
    effect: Effect = "linear"
    live: int | None = None
    collinear: Collinearity = "none"
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.p < 1:
            raise UsageError(f"p is {self.p}; at least one regressor is needed.")
        if self.q < self.p:
            raise UsageError(
                f"q is {self.q} and p is {self.p}; give at least one instrument for a regressor."
            )
        if self.live is not None and not 1 <= self.live <= self.q:
            raise UsageError(f"live is {self.live}; give 1 to {self.q}, the instruments.")

    def draw(self, batch: int, n: int, rng: np.random.Generator) -> InstrumentPrompts:
        """``batch`` prompts of ``n`` labelled examples.

        Raises
        ------
        UsageError
            ``n`` is below 1.
        """
        if n < 1:
            raise UsageError(f"n is {n}; give at least one labelled example.")
        normal, p, q = rng.standard_normal, self.p, self.q
        theta, beta = normal((batch, q, p)), normal((batch, p))
        first, phi = normal((batch, p, p)), normal((batch, p))
        z = self._collinear(normal((batch, n + 1, q)), rng)
        z[..., self.live :] = 0 if self.live is not None else z[..., self.live :]
        u = self.endogeneity * normal((batch, n + 1, p))
        u[:, -1] = 0  # the query has no confounder
        x = self.strength * self._effect_of(z, theta, rng) + u @ first + normal((batch, n + 1, p))
        x = self._collinear(x, rng)
        noise = self.noise * normal((batch, n + 1))
        y = np.einsum("bnp,bp->bn", x, beta) + np.einsum("bnp,bp->bn", u, phi) + noise
        return InstrumentPrompts(
            z[:, :-1], x[:, :-1], y[:, :-1], z[:, -1], x[:, -1], y[:, -1], beta
        )

    def _effect_of(self, z: Array, theta: Array, rng: np.random.Generator) -> Array:
        """``[B, n + 1, p]``, what z adds to x."""
        if self.effect == "network":
            hidden = z @ rng.standard_normal((len(z), self.q, self.q))
            return np.asarray(np.maximum(hidden, 0) @ theta)
        return np.asarray((z**2 if self.effect == "quadratic" else z) @ theta)

    def _collinear(self, values: Array, rng: np.random.Generator) -> Array:
        """The last column, or the last half, near twice the one before, or the half before."""
        columns = values.shape[-1]
        count = {"none": 0, "last": 1, "half": columns // 2}[self.collinear]
        count = min(count, columns // 2)
        if count:
            source = 2 * values[..., columns - 2 * count : columns - count]
            values = values.copy()
            values[..., columns - count :] = source + _NEARLY * rng.standard_normal(source.shape)
        return values


# --------------------------------------------------------------------------------------------------
# Estimators in closed form
# --------------------------------------------------------------------------------------------------


def ordinary_least_squares(x: Array, y: Array, ridge: float = 0.0) -> Array:
    """(X'X + ridge I)^{-1} X'y of ``x`` ``[..., n, p]``, ``y`` ``[..., n]``; ``[..., p]``.

    Biased where x is endogenous. Where X'X is singular the estimate of least norm stands, with a
    :class:`SingularStageWarning`.
    """
    _check_finite(x, y)
    return _solve(_gram(x), _moments(x, y[..., None]), ridge, "X'X")[..., 0]


def first_stage(z: Array, x: Array, ridge: float = 0.0) -> Array:
    """(Z'Z + ridge I)^{-1} Z'X, ``[..., q, p]``: regressors from instruments (eq. 2)."""
    _check_finite(z, x)
    return _solve(_gram(z), _moments(z, x), ridge, "Z'Z")


def two_stage_least_squares(
    z: Array, x: Array, y: Array, ridge: float = 0.0, first_ridge: float = 0.0
) -> Array:
    """2SLS, ``[..., p]``: least squares of y on Z Theta, Theta the first stage (eq. 2).

    With penalties the fixed point of eq. 63, which is (T'Z'ZT + ridge I)^{-1} T'Z'y; the objective
    printed above it has another one.
    """
    _check_finite(y)
    projected = z @ first_stage(z, x, first_ridge)
    return _solve(_gram(projected), _moments(projected, y[..., None]), ridge, "first stage")[..., 0]


def _gram(a: Array) -> Array:
    return np.asarray(np.swapaxes(a, -1, -2) @ a)


def _moments(a: Array, b: Array) -> Array:
    return np.asarray(np.swapaxes(a, -1, -2) @ b)


def _solve(gram: Array, right: Array, ridge: float, name: str) -> Array:
    """(gram + ridge I)^+ right, and a warning where that is no inverse."""
    if ridge < 0 or not np.isfinite(ridge):
        raise UsageError(f"a ridge of {ridge} was given; it must be finite and at least 0.")
    values, vectors = np.linalg.eigh(gram + ridge * np.eye(gram.shape[-1]))
    kept = values > RANK_TOLERANCE * np.maximum(values[..., -1:], np.finfo(float).tiny)
    singular = int((~kept).any(-1).sum())
    if singular:
        warnings.warn(
            f"{name} is singular in {singular} of {kept[..., 0].size} prompts; the estimate of "
            "least norm (pseudo-inverse) stands there. Give more examples, or a ridge.",
            SingularStageWarning,
            stacklevel=3,
        )
    inverse = np.where(kept, 1 / np.where(kept, values, 1), 0)
    rotated = np.swapaxes(vectors, -1, -2) @ right
    return np.asarray(vectors @ (inverse[..., None] * rotated))


def _check_finite(*arrays: Array) -> None:
    if not all(np.isfinite(a).all() for a in arrays):
        raise DataError("examples hold values that are not finite; drop or impute those.")


# --------------------------------------------------------------------------------------------------
# 2SLS by gradient descent
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSizes:
    """Step sizes of GD-2SLS and its penalties (eqs. 7 and 63).

    Attributes
    ----------
    alpha, eta
        Of beta and of Theta.
    ridge, first_ridge
        Penalties on beta and on Theta; lambda and tau in the paper.
    """

    alpha: float
    eta: float
    ridge: float = 0.0
    first_ridge: float = 0.0


def step_limits(
    z: Array, x: Array, ridge: float = 0.0, first_ridge: float = 0.0
) -> tuple[Array, Array]:
    """Below these alpha and eta GD-2SLS converges (Theorem 3.1), each ``[...]``.

    2 / (smax(Z Theta)^2 + ridge) and 2 / (smax(Z)^2 + first_ridge), Theta of the first stage.
    """
    projected = z @ first_stage(z, x, first_ridge)
    return 2 / (_largest(projected) + ridge), 2 / (_largest(z) + first_ridge)


def convergence_rate(z: Array, x: Array, sizes: StepSizes) -> tuple[Array, Array]:
    """gamma and kappa, each ``[...]``; errors shrink by their maximum Lambda each step (eq. 8).

    Where both are equal the errors are O(t Lambda^t), not O(Lambda^t) as Theorem 3.1 has it.
    """
    projected = z @ first_stage(z, x, sizes.first_ridge)
    return (
        _radius(projected, sizes.alpha, sizes.ridge),
        _radius(z, sizes.eta, sizes.first_ridge),
    )


def gd_2sls(
    z: Array, x: Array, y: Array, sizes: StepSizes, steps: int, *, check: bool = True
) -> tuple[Array, Array]:
    """beta after 0 to ``steps`` steps, ``[steps + 1, ..., p]``, and the last Theta; from zero.

    Both updates of a step use the Theta before it (eq. 7).

    Raises
    ------
    UsageError
        ``check`` and a step size is outside the range of :func:`step_limits`.
    """
    _check_finite(z, x, y)
    if check:
        _check_sizes(z, x, sizes)
    theta = np.zeros((*z.shape[:-2], z.shape[-1], x.shape[-1]))
    betas = [np.zeros((*x.shape[:-2], x.shape[-1]))]
    for _ in range(steps):
        fitted = z @ theta
        beta = betas[-1]
        residual = (fitted @ beta[..., None])[..., 0] - y
        gradient = _moments(fitted, residual[..., None])[..., 0] + sizes.ridge * beta
        theta = theta - sizes.eta * (_moments(z, fitted - x) + sizes.first_ridge * theta)
        betas.append(beta - sizes.alpha * gradient)
    return np.stack(betas), theta


def _check_sizes(z: Array, x: Array, sizes: StepSizes) -> None:
    limits = step_limits(z, x, sizes.ridge, sizes.first_ridge)
    for name, limit in zip(("alpha", "eta"), limits, strict=True):
        size, lowest = getattr(sizes, name), float(np.min(limit))
        if not 0 < size < lowest:
            raise UsageError(
                f"{name} is {size:g}; GD-2SLS converges on these examples for {name} above 0 and "
                f"below {lowest:.3g}."
            )


def _largest(a: Array) -> Array:
    """Squared largest singular value."""
    return np.asarray(np.linalg.eigvalsh(_gram(a))[..., -1])


def _radius(a: Array, size: float, ridge: float) -> Array:
    """Spectral radius of I - size (A'A + ridge I)."""
    return np.asarray(np.abs(1 - size * (np.linalg.eigvalsh(_gram(a)) + ridge)).max(-1))


# --------------------------------------------------------------------------------------------------
# What a predictor implies
# --------------------------------------------------------------------------------------------------

#: Forecasts ``[B]`` of the queries' outcomes.
Predictor = Callable[[InstrumentPrompts], Array]


def coefficients(predict: Predictor, prompts: InstrumentPrompts, delta: float = 5.0) -> Array:
    """Implied coefficients ``[B, p]`` of any predictor (Algorithm 2).

    Each is the change of the forecast, for ``delta`` more of one regressor of the query, divided
    by ``delta``.

    Raises
    ------
    UsageError
        ``delta`` is 0 or not finite.
    """
    if not np.isfinite(delta) or delta == 0:
        raise UsageError(f"delta is {delta}; give a finite number that is not 0.")
    base = predict(prompts)
    columns = []
    for k in range(prompts.query_x.shape[-1]):
        moved = prompts.query_x.copy()
        moved[:, k] += delta
        columns.append((predict(replace(prompts, query_x=moved)) - base) / delta)
    return np.stack(columns, axis=-1)


def linear_predictor(estimate: Callable[[InstrumentPrompts], Array]) -> Predictor:
    """The predictor <b, x> of an estimator of coefficients ``[B, p]``."""
    return lambda prompts: np.asarray((estimate(prompts) * prompts.query_x).sum(-1))


def bias_slope(estimated: Array, biased: Array, beta: Array) -> float:
    """Slope of an estimate's errors on those of least squares, all ``[B, p]``.

    0 for an estimate that endogeneity does not bias, 1 for least squares. Estimates on the same
    examples share their noise, so that 2SLS has a slope above 0: more examples lower it.
    """
    errors, reference = (estimated - beta).ravel(), (biased - beta).ravel()
    return float(errors @ reference / (reference @ reference))
