"""What tests of attention to a single key share: of series alone, and of a decoder of one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared_fixtures import Command, assert_refused

import tscompress
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket

FEW = tscompress.CalibrationConfig(num_series=16, context_length=64, batch_size=8)
#: Options of sizes that go with neither.
NOT_WITH_IT = [{"budget": "parameters=0.5"}, {"method": "svd", "rank": 3}]
WAVE = torch.sin(torch.arange(60.0) / 3)
WAVES = (WAVE, WAVE[:40].square())
SHORT_RECOVERY = RecoveryConfig(
    steps=4,
    buckets=(Bucket(context_length=32, horizon=16, batch_size=8),),
    held_out_series=8,
    real_series=(),
)


def difference(
    ours: Any, theirs: Any, series: Sequence[torch.Tensor] = WAVES, steps: int = 16
) -> float:
    """Largest difference of a quantile, as a share of the largest of its series."""
    contexts = list(series)
    forecasts = (one.predict(contexts, prediction_length=steps) for one in (ours, theirs))
    pairs = zip(*forecasts, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def assert_option_refused(command: Command, checkpoint: Path, option: str, out: Path) -> None:
    """``compress`` has nothing to drop of this checkpoint, says of which family, writes nothing."""
    outcome = command("compress", checkpoint, option, "--output", out)
    assert_refused(outcome, 2, checkpoint.name)
    assert not out.exists()
