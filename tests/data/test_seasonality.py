"""Seasons in series: found where there are some, and a note where there are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tscompress
from tscompress.checkpoints.load import load
from tscompress.cli.app import app
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    seasonal_share,
)
from tscompress.data.seasonality import has_season, season_note
from tscompress.data.synthetic import FloatArray


def repeated(period: int, length: int, noise: float = 0.0, seed: int = 0) -> FloatArray:
    rng = np.random.default_rng(seed)
    pattern = rng.standard_normal(period)
    values = np.tile(pattern, length // period + 1)[:length]
    return (values + noise * rng.standard_normal(length)).astype(np.float32)


@pytest.mark.parametrize("period", [4, 7, 12, 24])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_repeated_pattern_is_a_season(period: int, noise: float) -> None:
    values = repeated(period, 8 * max(period, 8), noise)
    assert has_season(values)
    assert has_season(1e4 + 50 * values + 3 * np.arange(len(values), dtype=np.float32))


def test_noise_walks_and_trends_have_none() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((300, 100)).astype(np.float32)
    assert np.mean([has_season(row) for row in noise]) < 0.05
    assert np.mean([has_season(row.cumsum()) for row in noise]) < 0.05
    assert not has_season(np.arange(60, dtype=np.float32))
    assert not has_season(np.full(60, 3.0, dtype=np.float32))


def test_missing_values_and_short_series() -> None:
    values = repeated(7, 70)
    values[[3, 20, 21]] = np.nan
    assert has_season(values)
    assert not has_season(np.full(40, np.nan, dtype=np.float32))
    assert not has_season(np.ones(3, dtype=np.float32))


def test_default_calibration_holds_seasons() -> None:
    loaded = load("reference/bolt")
    batches = calibration_batches(loaded, CalibrationConfig(num_series=128))
    assert seasonal_share(batches) > 0.3


def test_note_where_there_is_no_season() -> None:
    assert season_note(0.3, 10) is None
    assert season_note(None, 10) is None
    assert "none of the 7" in (season_note(0.0, 7) or "")
    assert "only 2.0%" in (season_note(0.02, 100) or "")


def test_compress_says_that_the_series_hold_no_season(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = str(checkpoints["chronos-bolt"])
    rng = np.random.default_rng(0)
    walks = [rng.standard_normal(80).cumsum().astype(np.float32) for _ in range(4)]
    compressed = tscompress.compress(model, rank=4, series=walks)
    assert compressed.calibration["seasonal_share"] == 0
    assert "none of the" in (compressed.note or "")
    table = tmp_path / "walks.csv"
    table.write_text("a,b\n" + "\n".join(f"{x},{y}" for x, y in zip(*walks[:2], strict=True)))
    arguments = ["compress", model, "--rank", "4", "--series", str(table)]
    arguments += ["--target-column", "*"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "hold a season" in result.stderr
