"""The weighted quantile loss on windows, of series without and with covariates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tscompress.budget.window_loss import LossRatios, WindowLoss, batch_quantiles, with_drivers
from tscompress.checkpoints.load import load
from tscompress.data.batch import ForecastBatch
from tscompress.data.evaluation_sets import QUANTILE_LEVELS


def test_a_loss_with_covariates_is_not_outweighed(checkpoints: dict[str, Path]) -> None:
    """Many series without any, of which none changes, do not make up for it."""
    original, other = (load(checkpoints["chronos-2"]) for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in other.model.named_parameters():
            if name.endswith("layer.1.self_attention.q.weight"):
                weight.copy_(3 * torch.randn(weight.shape, generator=rng))
    values = torch.randn(40, 40, generator=rng).cumsum(1)
    alone = ForecastBatch(values[:, :32], values[:, 32:])
    found = with_drivers(original, [alone.rows(slice(2))])
    (driven,) = [batch for batch in found if batch.future is not None]
    assert driven.driven.any()
    ratios = WindowLoss(original, [alone, driven]).ratios(other)
    assert ratios.without_covariates == 1.0
    assert ratios.with_covariates == WindowLoss(original, [driven]).ratios(other).with_covariates
    assert ratios.with_covariates is not None
    assert ratios.with_covariates != 1.0
    nothing, half = LossRatios(None, math.nan), LossRatios(1.0, 0.5)
    assert math.isnan(nothing.worst)
    assert half.worst == 1.0


def test_covariates_known_ahead_are_given(checkpoints: dict[str, Path]) -> None:
    """Whatever the sizes of groups, as to the stock pipeline."""
    loaded = load(checkpoints["chronos-2"])
    rng = torch.Generator().manual_seed(0)
    context = torch.randn(7, 32, generator=rng).cumsum(1)
    groups = torch.tensor([3, 1, 1, 1, 2, 2, 3])
    future = torch.full((7, 8), math.nan)
    known = torch.tensor([2, 5])
    future[known] = torch.randn(2, 8, generator=rng)
    batch = ForecastBatch(context, future, groups, future)
    found = batch_quantiles(loaded, batch, 0)  # [7, 8, 9]
    assert found[known].isnan().all()
    for targets, covariate in (([1, 3], 2), ([4], 5), ([0, 6], None)):
        task: dict[str, Any] = {"target": context[targets].numpy()}
        if covariate is not None:
            task["past_covariates"] = {"x": context[covariate].numpy()}
            task["future_covariates"] = {"x": future[covariate].numpy()}
        (expected,), _ = loaded.forecaster.predict_quantiles(
            [task], prediction_length=8, quantile_levels=list(QUANTILE_LEVELS)
        )
        torch.testing.assert_close(found[targets], expected.to(torch.float64))
