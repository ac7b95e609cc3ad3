"""The layout of GIFT-Eval's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tscompress._version import __version__
from tscompress.checkpoints.load import load
from tscompress.errors import UsageError
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.gift_eval import GiftEvalResults
from tscompress.io.own_outputs import is_own_file

DATASETS = ["monash_m3_yearly", "monash_tourism_quarterly"]
#: As published, in this order.
COLUMNS = [
    "dataset", "model", "eval_metrics/MSE[mean]", "eval_metrics/MSE[0.5]", "eval_metrics/MAE[0.5]",
    "eval_metrics/MASE[0.5]", "eval_metrics/MAPE[0.5]", "eval_metrics/sMAPE[0.5]",
    "eval_metrics/MSIS", "eval_metrics/RMSE[mean]", "eval_metrics/NRMSE[mean]",
    "eval_metrics/ND[0.5]", "eval_metrics/mean_weighted_sum_quantile_loss", "domain",
    "num_variates",
]  # fmt: skip


def evaluated(model: Any, name: str, **options: Any) -> tuple[Any, GiftEvalResults]:
    layout = GiftEvalResults()
    found = evaluate_pipeline(
        model, name=name, max_series=3, datasets=DATASETS, on_forecasts=layout, **options
    )
    return found, layout


def test_all_metrics_of_quantiles(checkpoints: dict[str, Path]) -> None:
    result, layout = evaluated(load(checkpoints["chronos-bolt"]).forecaster, "bolt")
    frame = layout.frame(result)
    assert list(frame.columns) == COLUMNS
    assert frame["dataset"].tolist() == [
        "monash_m3_yearly/A/short", "monash_tourism_quarterly/Q/short",
    ]  # fmt: skip
    assert frame["eval_metrics/MASE[0.5]"].tolist() == pytest.approx(
        [row.MASE for row in result.rows]
    )
    weighted = frame["eval_metrics/mean_weighted_sum_quantile_loss"]
    assert weighted.tolist() == pytest.approx([row.WQL for row in result.rows])
    squared = frame["eval_metrics/MSE[mean]"]
    assert np.sqrt(squared).tolist() == pytest.approx(frame["eval_metrics/RMSE[mean]"].tolist())
    assert squared.tolist() == frame["eval_metrics/MSE[0.5]"].tolist()
    assert np.isfinite(frame.filter(like="eval_metrics").to_numpy()).all()
    assert frame["domain"].isna().all()


def test_metrics_beyond_nine_quantiles_are_empty_for_samples(checkpoints: dict[str, Path]) -> None:
    pipeline = load(checkpoints["chronos-t5"]).forecaster
    result, layout = evaluated(pipeline, "t5", num_samples=4)
    frame = layout.frame(result)
    empty = [name for name in frame.columns if frame[name].isna().all()]
    assert empty == [
        "eval_metrics/MSE[mean]", "eval_metrics/MSIS", "eval_metrics/RMSE[mean]",
        "eval_metrics/NRMSE[mean]", "domain",
    ]  # fmt: skip
    expected = [row.MASE for row in result.rows]
    assert frame["eval_metrics/MASE[0.5]"].tolist() == pytest.approx(expected)


def test_frequencies_have_the_names_of_gift_eval() -> None:
    layout = GiftEvalResults()
    names = ["vic_elec_30min", "electricity_prices_hourly", "us_gasoline_weekly"]
    result = evaluate_pipeline(
        "seasonal-naive",
        "offline-frequencies",
        name="seasonal-naive",
        max_series=1,
        datasets=[*names, "auckland_pedestrians_daily"],
        on_forecasts=layout,
    )
    middle = [name.split("/")[1] for name in layout.frame(result)["dataset"]]
    assert middle == ["D", "H", "W", "30T"]


def invoke(*arguments: object) -> Any:
    from tscompress.cli.app import app

    return CliRunner().invoke(app, ["evaluate", "seasonal-naive", *map(str, arguments)])


def test_command(tmp_path: Path) -> None:
    done = invoke(
        "--dataset", DATASETS[0], "--max-series", 2, "--output", tmp_path / "out", "--gift-eval",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert list(pd.read_csv(tmp_path / "out" / "all_results.csv").columns) == COLUMNS
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model": "seasonal-naive", "model_type": "statistical", "model_dtype": "float32",
        "written_by_tscompress": __version__,
    }  # fmt: skip
    assert all(map(is_own_file, (tmp_path / "out").iterdir()))


@pytest.mark.parametrize("output", [[], ["--output", "scores.json"]])
def test_command_needs_a_directory(output: list[str]) -> None:
    outcome = invoke("--gift-eval", *output)
    assert isinstance(outcome.exception, UsageError)
    assert "--gift-eval writes files; give a directory" in str(outcome.exception)
