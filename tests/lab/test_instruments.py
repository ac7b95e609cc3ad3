"""Estimators with instruments against closed forms, fixed points and a linear predictor."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from tscompress.errors import DataError, UsageError
from tscompress.lab.instruments import (
    InstrumentPrompts,
    InstrumentTask,
    SingularStageWarning,
    StepSizes,
    bias_slope,
    coefficients,
    convergence_rate,
    first_stage,
    gd_2sls,
    linear_predictor,
    ordinary_least_squares,
    step_limits,
    two_stage_least_squares,
)


def drawn(batch: int = 4, n: int = 30, seed: int = 0, **settings: object) -> InstrumentPrompts:
    task = InstrumentTask(**({"p": 2, "q": 4} | settings))  # type: ignore[arg-type]
    return task.draw(batch, n, np.random.default_rng(seed))


# --------------------------------------------------------------------------------------------------
# Prompts
# --------------------------------------------------------------------------------------------------


def test_regressors_have_the_variance_of_instruments_confounders_and_noise() -> None:
    prompts = drawn(20_000, 3)
    assert prompts.x.var() == pytest.approx(4 + 2 + 1, rel=0.03)  # q + p + 1
    assert prompts.query_x.var() == pytest.approx(4 + 1, rel=0.03)  # no confounder


def test_queries_have_no_confounder_and_examples_do() -> None:
    prompts = drawn(20_000, 2, endogeneity=2.0)
    query = prompts.query_y - (prompts.query_x * prompts.beta).sum(-1)
    examples = prompts.y - np.einsum("bnp,bp->bn", prompts.x, prompts.beta)
    assert query.var() == pytest.approx(1, rel=0.03)
    assert examples.var() == pytest.approx(1 + 4 * 2, rel=0.05)


def test_strength_scales_instruments_alone_and_endogeneity_the_confounder_alone() -> None:
    weak = drawn(20_000, 1, strength=0.5)
    assert weak.x.var() == pytest.approx(0.25 * 4 + 2 + 1, rel=0.03)
    calm = drawn(20_000, 1, endogeneity=0.0)
    assert calm.x.var() == pytest.approx(4 + 1, rel=0.03)


def test_effects_and_dead_instruments() -> None:
    assert drawn(20_000, 1, effect="quadratic").x.var() > 4 + 2 + 1
    dead = drawn(50, 5, live=3)
    assert np.abs(dead.z[..., 3:]).max() == np.abs(dead.query_z[..., 3:]).max() == 0
    assert np.abs(dead.z[..., 2]).min() > 0
    assert np.isfinite(drawn(effect="network").x).all()


def test_collinear_columns_are_nearly_twice_others_and_outcomes_follow_them() -> None:
    last = drawn(50, 20, p=5, q=10, collinear="last", noise=0.0, endogeneity=0.0)
    assert np.abs(last.x[..., 4] - 2 * last.x[..., 3]).std() < 2e-3
    assert np.abs(last.z[..., 9] - 2 * last.z[..., 8]).std() < 2e-3
    assert np.abs(last.x[..., 3] - 2 * last.x[..., 2]).std() > 1
    np.testing.assert_allclose(last.y, np.einsum("bnp,bp->bn", last.x, last.beta))
    half = drawn(50, 20, p=5, q=10, collinear="half")
    for j in (3, 4):
        assert np.abs(half.x[..., j] - 2 * half.x[..., j - 2]).std() < 2e-3
    for j in range(5, 10):
        assert np.abs(half.z[..., j] - 2 * half.z[..., j - 5]).std() < 2e-3


# --------------------------------------------------------------------------------------------------
# Closed forms
# --------------------------------------------------------------------------------------------------


def test_2sls_is_least_squares_on_the_fitted_regressors() -> None:
    prompts = drawn()
    found = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    for z, x, y, one in zip(prompts.z, prompts.x, prompts.y, found, strict=True):
        fitted = z @ np.linalg.lstsq(z, x)[0]
        np.testing.assert_allclose(one, np.linalg.lstsq(fitted, y)[0], rtol=1e-9)


def test_penalties_of_zero_change_nothing_and_others_follow_their_formula() -> None:
    prompts = drawn()
    z, x, y = prompts.z[0], prompts.x[0], prompts.y[0]
    plain = two_stage_least_squares(z, x, y)
    np.testing.assert_allclose(two_stage_least_squares(z, x, y, 0.0, 0.0), plain, rtol=1e-12)
    theta = np.linalg.solve(z.T @ z + 2 * np.eye(4), z.T @ x)
    np.testing.assert_allclose(first_stage(z, x, 2.0), theta)
    gram = theta.T @ z.T @ z @ theta + 3 * np.eye(2)
    expected = np.linalg.solve(gram, theta.T @ z.T @ y)
    np.testing.assert_allclose(two_stage_least_squares(z, x, y, 3.0, 2.0), expected)
    expected = np.linalg.solve(x.T @ x + 3 * np.eye(2), x.T @ y)
    np.testing.assert_allclose(ordinary_least_squares(x, y, 3.0), expected)


def test_2sls_removes_the_bias_of_least_squares() -> None:
    prompts = drawn(200, 2000, endogeneity=2.0)
    biased = ordinary_least_squares(prompts.x, prompts.y)
    causal = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    assert bias_slope(biased, biased, prompts.beta) == pytest.approx(1)
    assert abs(bias_slope(causal, biased, prompts.beta)) < 0.05


def test_too_few_examples_have_the_estimate_of_least_norm_and_one_warning() -> None:
    prompts = drawn(n=1)
    with pytest.warns(SingularStageWarning, match="X'X") as caught:
        found = ordinary_least_squares(prompts.x, prompts.y)
    assert len(caught) == 1
    for x, y, one in zip(prompts.x, prompts.y, found, strict=True):
        np.testing.assert_allclose(one, np.linalg.pinv(x) @ y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordinary_least_squares(prompts.x, prompts.y, 0.1)


def test_a_dead_instrument_is_a_singular_stage_that_is_named() -> None:
    prompts = drawn(live=1)
    with pytest.warns(SingularStageWarning) as caught:
        found = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    assert ["Z'Z" in str(caught[0].message), "first stage" in str(caught[1].message)] == [True] * 2
    assert np.isfinite(found).all()


# --------------------------------------------------------------------------------------------------
# Gradient descent
# --------------------------------------------------------------------------------------------------


def sizes_of(prompts: InstrumentPrompts, share: float = 0.45, **penalties: float) -> StepSizes:
    alpha, eta = step_limits(prompts.z, prompts.x, *penalties.values())
    return StepSizes(share * float(alpha.min()), share * float(eta.min()), **penalties)


@pytest.mark.parametrize("penalties", [{}, {"ridge": 3.0, "first_ridge": 2.0}])
def test_gradient_descent_ends_at_2sls(penalties: dict[str, float]) -> None:
    prompts = drawn(1)
    betas, theta = gd_2sls(prompts.z, prompts.x, prompts.y, sizes_of(prompts, **penalties), 20_000)
    expected = two_stage_least_squares(prompts.z, prompts.x, prompts.y, *penalties.values())
    np.testing.assert_allclose(betas[-1], expected, atol=1e-9)
    stage = first_stage(prompts.z, prompts.x, penalties.get("first_ridge", 0.0))
    np.testing.assert_allclose(theta, stage, atol=1e-9)


def test_errors_shrink_at_the_rate_of_theorem_3_1() -> None:
    prompts = drawn(1, 40)
    sizes = sizes_of(prompts, 0.3)
    gamma, kappa = (float(one[0]) for one in convergence_rate(prompts.z, prompts.x, sizes))
    betas, _ = gd_2sls(prompts.z, prompts.x, prompts.y, sizes, 400)
    limit = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    errors = np.linalg.norm(betas - limit, axis=-1)[:, 0]
    below = int(np.argmax(errors < 1e-8))
    fitted = np.exp(np.polyfit(np.arange(below - 15, below), np.log(errors[below - 15 : below]), 1))
    assert gamma != pytest.approx(kappa, abs=0.01)
    assert fitted[0] == pytest.approx(max(gamma, kappa), rel=0.01)


def test_equal_rates_add_a_factor_t() -> None:
    z = np.ones((1, 1)) * np.sqrt(2)
    x, y = z.copy(), np.array([1.0])  # Z'Z = 2, Theta = 1
    sizes = StepSizes(0.25, 0.25)
    assert [float(one) for one in convergence_rate(z, x, sizes)] == pytest.approx([0.5, 0.5])
    betas, _ = gd_2sls(z, x, y, sizes, 40)
    errors = np.abs(betas[:, 0] - two_stage_least_squares(z, x, y)[0])
    scaled = errors / 0.5 ** np.arange(41)
    assert scaled[40] > 1.8 * scaled[20] > 3 * scaled[10] > 0


@pytest.mark.parametrize("name", ["alpha", "eta"])
@pytest.mark.parametrize("share", [0.0, 1.01])
def test_unstable_step_sizes_are_refused_with_their_limit(name: str, share: float) -> None:
    prompts = drawn(1)
    limits = dict(zip(("alpha", "eta"), step_limits(prompts.z, prompts.x), strict=True))
    sizes = replace(sizes_of(prompts), **{name: share * float(limits[name][0])})
    with pytest.raises(UsageError, match=f"{name} .*{float(limits[name][0]):.3g}"):
        gd_2sls(prompts.z, prompts.x, prompts.y, sizes, 5)


# --------------------------------------------------------------------------------------------------
# Algorithm 2
# --------------------------------------------------------------------------------------------------


def test_implied_coefficients_of_a_linear_predictor_are_its_own() -> None:
    prompts = drawn(50)
    estimate = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    predict = linear_predictor(lambda p: two_stage_least_squares(p.z, p.x, p.y))
    for delta in (5.0, -1.0):
        np.testing.assert_allclose(coefficients(predict, prompts, delta), estimate, atol=1e-10)


def test_refusals() -> None:
    prompts = drawn()
    with pytest.raises(UsageError, match="q is 1"):
        InstrumentTask(2, 1)
    with pytest.raises(UsageError, match="live"):
        InstrumentTask(2, 4, live=5)
    with pytest.raises(UsageError, match="n is 0"):
        drawn(n=0)
    with pytest.raises(UsageError, match="ridge"):
        ordinary_least_squares(prompts.x, prompts.y, -1.0)
    with pytest.raises(UsageError, match="delta"):
        coefficients(lambda p: p.query_y, prompts, 0.0)
    with pytest.raises(DataError, match="finite"):
        two_stage_least_squares(prompts.z, prompts.x * np.inf, prompts.y)
