"""Factors that a cut left unequal are balanced before they are trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tscompress
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import CalibrationConfig, run_teacher_forced
from tscompress.data.batch import ForecastBatch
from tscompress.layers.low_rank import LowRankLinear
from tscompress.training.balanced_factors import balance_factors_
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import RecoveryConfig

CALIBRATION = CalibrationConfig(source="synthetic", num_series=8, context_length=32, batch_size=4)


@pytest.fixture
def unequal(checkpoints: dict[str, Path]) -> LoadedModel:
    """A Bolt in two factors, of which one is 64 times as large as it was, the other as small."""
    student = tscompress.compress(
        checkpoints["chronos-bolt"], method="activation-svd", rank=3, calibration=CALIBRATION
    )
    student.model.float()
    with torch.no_grad():
        for module in factors(student):
            module.left.weight.mul_(64)
            module.right.weight.div_(64)
    return student


def factors(loaded: LoadedModel) -> list[LowRankLinear]:
    found = [module for module in loaded.model.modules() if isinstance(module, LowRankLinear)]
    assert found
    return found


def are_balanced(loaded: LoadedModel) -> bool:
    values = [
        [torch.linalg.svdvals(part.weight.detach()) for part in (one.left, one.right)]
        for one in factors(loaded)
    ]
    return all(torch.allclose(left, right, rtol=1e-3, atol=1e-6) for left, right in values)


def test_balanced_factors_are_the_same_product(unequal: LoadedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = ForecastBatch(*(torch.randn(3, steps, generator=generator) for steps in (48, 8)))
    before = run_teacher_forced(unequal, batch).quantile_preds
    assert not are_balanced(unequal)
    balance_factors_(unequal)
    assert are_balanced(unequal)
    after = run_teacher_forced(unequal, batch).quantile_preds
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_recovery_starts_from_balanced_factors(
    unequal: LoadedModel, checkpoints: dict[str, Path]
) -> None:
    config = RecoveryConfig(
        steps=1, learning_rate=1e-9, held_out_series=4, precision="no",
        buckets=({"context_length": 32, "horizon": 8, "batch_size": 4},),
    )  # fmt: skip
    result = recover_(unequal, load(checkpoints["chronos-bolt"]), config)
    assert result.finished
    assert are_balanced(unequal)
