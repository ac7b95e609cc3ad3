"""What a model was fitted to is not what it is scored on, though both are in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tscompress
from tscompress.checkpoints.load import load
from tscompress.data.evaluation_sets import LongFormat
from tscompress.errors import LeakError
from tscompress.workflows.compress import compress_checkpoint
from tscompress.workflows.evaluate_models import evaluate_models
from tscompress.workflows.recipe import EvaluationConfig, Recipe, validate

SCORED = 8


@pytest.fixture(scope="module")
def sales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("series") / "sales.csv"
    rng = np.random.default_rng(0)
    parts = [
        pd.DataFrame(
            {
                "shop": f"s{shop}",
                "day": pd.date_range("2024-01-01", periods=90),
                "sales": rng.normal(50, 9, 90).round(2),
            }
        )
        for shop in range(4)
    ]
    pd.concat(parts).to_csv(path, index=False)
    return path


COLUMNS = {"id_column": "shop", "time_column": "day"}


@pytest.fixture(scope="module")
def compressed(
    checkpoints: dict[str, Path], sales: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """A checkpoint that was calibrated on all but so many steps of each series."""

    def make(hold_out: int) -> Path:
        output = tmp_path_factory.mktemp("compressed") / "small"
        content = {
            "model": str(checkpoints["chronos-bolt"]),
            "output": str(output),
            "schedule": "rank=4",
            "series": {**COLUMNS, "hold_out": hold_out},
            "calibration": {"source": str(sales), "num_series": 4, "context_length": 48},
        }
        said = []
        compress_checkpoint(validate(Recipe, content, source="test"), on_series=said.append)
        (summary,) = said
        assert summary is not None
        assert json.loads((output / "plan.json").read_text())["calibrated_on"] == summary.line()
        record = json.loads((output / "provenance.json").read_text())["calibration"]["read"]
        assert (record["series"], record["hold_out"]) == (4, hold_out)
        return output

    return make


def config(suite: Path) -> EvaluationConfig:
    table = LongFormat(horizon=SCORED // 2, windows=2, **COLUMNS)
    return EvaluationConfig(suite=str(suite), long_format=table)


def test_steps_that_were_calibrated_on_are_not_scored(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.csv"
    copy.write_bytes(sales.read_bytes())
    too_few = compressed(SCORED - 5)
    for file in (sales, copy):
        with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
            evaluate_models(config(file), lambda: load(too_few))
        for model in (too_few, load(too_few)):
            with pytest.raises(LeakError, match="sales"):
                tscompress.evaluate(model, file, horizon=SCORED // 2, windows=2, **COLUMNS)


def test_steps_that_were_held_out_are_scored(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    output, notes = compressed(SCORED), []
    result = evaluate_models(config(sales), lambda: load(output), on_note=notes.append).model
    assert not notes
    assert result.rows[0].series_names == ("s0", "s0", "s1", "s1", "s2", "s2", "s3", "s3")


def test_a_source_that_is_gone_is_noted(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    output, notes = compressed(SCORED), []
    recipe = output / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(sales), str(tmp_path / "gone.csv")))
    evaluate_models(config(sales), lambda: load(output), on_note=notes.append)
    assert "gone.csv" in notes[0]
