"""Regression prompts against their moments, and predictors from examples against loops."""

from __future__ import annotations

import numpy as np
import pytest

from tscompress.errors import DataError, UsageError
from tscompress.lab.in_context import (
    FunctionClass,
    RegressionPrompts,
    RegressionTask,
    averaging_predictions,
    last_index_loss,
    least_squares_predictions,
    neighbour_predictions,
    validation_loss,
)


def drawn(batch: int = 8, **settings: object) -> RegressionPrompts:
    task = RegressionTask(**({"dim": 3, "history": 10} | settings))  # type: ignore[arg-type]
    return task.draw(batch, np.random.default_rng(0))


@pytest.mark.parametrize("function", ["linear", "network"])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_targets_have_the_variance_of_the_null_loss(function: FunctionClass, noise: float) -> None:
    task = RegressionTask(4, 5, function, noise)
    prompts = task.draw(20_000, np.random.default_rng(1))
    assert prompts.x.shape == (20_000, 6, 4)
    assert prompts.x.var() == pytest.approx(1, rel=0.02)
    assert (prompts.y**2).mean() == pytest.approx(task.null_loss, rel=0.05)


def test_seeds_determine_prompts() -> None:
    np.testing.assert_array_equal(drawn().y, drawn().y)


def test_least_squares_is_exact_once_examples_are_as_many_as_covariates() -> None:
    prompts = drawn()
    found = least_squares_predictions(prompts, ridge=1e-9)
    assert np.abs(found[:, 0]).max() == 0
    np.testing.assert_allclose(found[:, 6:], prompts.y[:, 6:], atol=1e-4)
    w = np.linalg.lstsq(prompts.x[0, :7], prompts.y[0, :7])[0]
    assert found[0, 7] == pytest.approx(prompts.x[0, 7] @ w, abs=1e-6)


def test_averaging_and_neighbours_follow_their_definitions() -> None:
    prompts = drawn(noise=1.0)
    x, y, t = prompts.x[2], prompts.y[2], 7
    mean = (y[:t, None] * x[:t]).mean(0)
    assert averaging_predictions(prompts)[2, t] == pytest.approx(x[t] @ mean)
    order = sorted(range(t), key=lambda s: float(((x[s] - x[t]) ** 2).sum()))
    assert neighbour_predictions(prompts, 3)[2, t] == pytest.approx(y[order[:3]].mean())
    assert neighbour_predictions(prompts, 3)[2, 1] == pytest.approx(y[0])


def test_losses_are_those_of_the_query_and_of_points_after_twice_the_covariates() -> None:
    prompts = drawn()
    forecasts = prompts.y.copy()
    forecasts[:, :6] += 10  # points 1 to 2 d
    assert validation_loss(forecasts, prompts) == 0
    forecasts[:, -1] += 2
    assert last_index_loss(forecasts, prompts) == pytest.approx(4)
    assert validation_loss(forecasts, prompts) == pytest.approx(4 / 5)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="dim"):
        RegressionTask(0, 5)
    with pytest.raises(UsageError, match="noise"):
        RegressionTask(1, 5, noise=float("nan"))
    with pytest.raises(UsageError, match="neighbours"):
        neighbour_predictions(drawn(), 0)
    short = drawn(dim=6)
    with pytest.raises(UsageError, match="history"):
        validation_loss(short.y, short)
    broken = drawn()
    broken.x[0, 0, 0] = np.nan
    with pytest.raises(DataError, match="finite"):
        least_squares_predictions(broken)
