"""The transformer written by hand against gradient descent, at sizes drawn by hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscompress.errors import UsageError
from tscompress.lab.explicit_2sls import Explicit2SLS
from tscompress.lab.instruments import (
    InstrumentPrompts,
    InstrumentTask,
    StepSizes,
    convergence_rate,
    gd_2sls,
    step_limits,
    two_stage_least_squares,
)


def case(
    p: int, q: int, n: int, seed: int = 0, ridge: float = 0.0, first_ridge: float = 0.0
) -> tuple[InstrumentPrompts, StepSizes]:
    """Two prompts, and step sizes below half of the limit of either."""
    prompts = InstrumentTask(p, q).draw(2, n, np.random.default_rng(seed))
    alpha, eta = step_limits(prompts.z, prompts.x, ridge, first_ridge)
    return prompts, StepSizes(
        0.45 * float(alpha.min()), 0.45 * float(eta.min()), ridge, first_ridge
    )


@settings(max_examples=20, deadline=None)
@given(
    p=st.integers(1, 4), more=st.integers(0, 4), rows=st.integers(0, 12),
    seed=st.integers(0, 2**16), ridge=st.sampled_from([0.0, 1.0]),
    first_ridge=st.sampled_from([0.0, 2.0]),
)  # fmt: skip
def test_each_block_is_a_step_of_gradient_descent_over_100_steps(
    p: int, more: int, rows: int, seed: int, ridge: float, first_ridge: float
) -> None:
    """Theorem 3.2, and with penalties Appendix C.2."""
    q = p + more
    prompts, sizes = case(p, q, q + 2 + rows, seed, ridge, first_ridge)
    model = Explicit2SLS(p, q, q + 2 + rows, sizes)
    betas, theta = gd_2sls(prompts.z, prompts.x, prompts.y, sizes, 100)
    tokens = model.embed(prompts)
    for beta in betas[1:]:
        tokens = model.step(tokens)
        np.testing.assert_allclose(model.beta(tokens), beta, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(model.theta(tokens), theta, rtol=1e-12, atol=1e-12)
    expected = (betas[-1] * prompts.query_x).sum(-1)
    np.testing.assert_allclose(model.forecast(tokens), expected, rtol=1e-11, atol=1e-11)


def test_sizes_are_those_of_the_theorem() -> None:
    prompts, sizes = case(5, 10, 50)
    plain = Explicit2SLS(5, 10, 50, sizes)
    assert plain.width == 78 == 10 * 5 + 3 * 5 + 10 + 3
    assert [len(layer.q) for layer in (plain.first, plain.second, plain.read_out)] == [10, 12, 2]
    with_ridge = Explicit2SLS(5, 10, 50, StepSizes(sizes.alpha, sizes.eta, 1.0))
    assert len(with_ridge.second.q) == 3 * 5 + 3
    assert plain.embed(prompts).shape == (2, 51, 78)


def test_loops_reach_2sls_at_the_rate_of_the_corollary() -> None:
    """Up to the factor t of equal rates; errors cross 0 on the way."""
    prompts, sizes = case(1, 3, 40)
    rate = max(float(np.max(one)) for one in convergence_rate(prompts.z, prompts.x, sizes))
    model = Explicit2SLS(1, 3, 40, sizes)
    limit = two_stage_least_squares(prompts.z, prompts.x, prompts.y)
    expected = (limit * prompts.query_x).sum(-1)
    tokens, first = model.embed(prompts), np.abs(expected).max()
    for t in range(50):
        error = np.abs(model.forecast(tokens) - expected).max()
        assert error <= 2 * first * (t + 1) * rate**t
        tokens = model.step(tokens)
    assert error < 1e-8


def test_the_printed_constant_lets_the_query_into_the_sums() -> None:
    """max |Theta' z| is 0 at the start."""
    prompts, sizes = case(2, 4, 20)
    printed = Explicit2SLS(2, 4, 20, sizes, removal=0.0)
    _, theta = gd_2sls(prompts.z, prompts.x, prompts.y, sizes, 1)
    found = printed.theta(printed.step(printed.embed(prompts)))
    assert np.abs(found - theta).max() > 1e-3


def test_prompts_of_another_size_are_refused() -> None:
    prompts, sizes = case(2, 4, 20)
    with pytest.raises(UsageError, match="20"):
        Explicit2SLS(2, 4, 21, sizes).embed(prompts)
    with pytest.raises(UsageError, match="q >= p"):
        Explicit2SLS(4, 2, 20, sizes)
