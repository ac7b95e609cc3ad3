"""Tasks of fev: forecasts in its form, scored by it, in tables that its leaderboard reads."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from shared_fixtures import ROOT
from typer.testing import CliRunner

from tscompress.checkpoints.load import load
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import DataError, RecipeError, UsageError
from tscompress.evaluation.fev_tasks import (
    evaluate_tasks,
    load_tasks,
    predict_task,
    summaries_csv,
    summaries_table,
)
from tscompress.evaluation.forecasting import forecast
from tscompress.evaluation.results import Settings

fev = pytest.importorskip("fev")


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once: what was read of a file is not read again of it."""
    rng = np.random.default_rng(0)
    data = tmp_path_factory.mktemp("data") / "hours.parquet"
    hours = pd.date_range("2024-01-01", periods=60, freq="h")
    pd.concat(
        pd.DataFrame({"id": name, "timestamp": hours, "target": 9 + rng.normal(size=60)}).assign(
            other=lambda table: 3 * table["target"]
        )
        for name in "abc"
    ).to_parquet(data, index=False)
    return data


@pytest.fixture
def task_file(data_file: Path, tmp_path: Path) -> Path:
    """Two windows of three univariate series by WQL, and one window of two targets by RMSE."""
    common = {"dataset_path": str(data_file), "horizon": 6, "seasonality": 24}
    quantiles = {"quantile_levels": [0.1, 0.5, 0.9], "eval_metric": "WQL", "num_windows": 2}
    tasks = [
        {**common, **quantiles, "extra_metrics": ["MASE"], "task_name": "one"},
        {**common, "target": ["target", "other"], "eval_metric": "RMSE", "task_name": "two"},
    ]
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": tasks}))
    return path


def test_all_families_forecast_all_windows(checkpoint: Path, task_file: Path) -> None:
    model = load(checkpoint)
    tasks = load_tasks(task_file)
    first, second = evaluate_tasks(model.forecaster, tasks, name="m", batch_size=2)
    assert (first["task_name"], first["num_forecasts"]) == ("one", 6)
    assert (second["task_name"], second["num_forecasts"]) == ("two", 6)
    assert first["test_error"] == first["WQL"] > 0
    assert np.isfinite([first["MASE"], second["RMSE"], first["inference_time_s"]]).all()


def test_forecasts_are_those_of_evaluation(checkpoints: dict[str, Path], task_file: Path) -> None:
    pipeline = load(checkpoints["chronos-t5"]).forecaster
    task = load_tasks(task_file)[0]
    predictions, _ = predict_task(pipeline, task, seed=3)
    contexts = [row["target"] for row in task.get_window(1).get_input_data()[0]]
    expected = forecast(pipeline, contexts, 6, 3, stream="one/1/target")
    for row, one in zip(predictions[1]["target"], expected, strict=True):
        # Quantiles of the samples themselves: level 0.1 is not the lowest of nine of them.
        assert row["0.1"] == pytest.approx(np.quantile(one.samples, 0.1, axis=0).tolist())
        assert row["predictions"] == pytest.approx(np.median(one.samples, axis=0).tolist())


def test_means_for_squared_errors(checkpoints: dict[str, Path], task_file: Path) -> None:
    pipeline = load(checkpoints["chronos-t5"]).forecaster
    task = load_tasks(task_file)[1]
    (predictions,), _ = predict_task(pipeline, task)
    contexts = [row["other"] for row in task.get_window(0).get_input_data()[0]]
    expected = forecast(pipeline, contexts, 6, stream="two/0/other")
    points = [row["predictions"] for row in predictions["other"]]
    assert np.allclose(points, [one.samples.mean(axis=0) for one in expected])


def test_seasonal_naive_repeats_the_season_of_the_task(task_file: Path) -> None:
    tasks = load_tasks(task_file)
    (predictions,), _ = predict_task("seasonal-naive", tasks[1])
    for row, past in zip(
        predictions["target"], tasks[1].get_window(0).get_input_data()[0], strict=True
    ):
        assert row["predictions"] == pytest.approx(past["target"][-24:-18].tolist(), rel=1e-6)
    assert predictions["target"].column_names == ["predictions"]  # the task asks for no quantiles
    quantiles, _ = predict_task("seasonal-naive", tasks[0])
    assert quantiles[0]["target"].column_names == ["predictions", "0.1", "0.5", "0.9"]
    (summary, _) = evaluate_tasks("seasonal-naive", tasks, name="seasonal_naive")
    assert summary["MASE"] > 0


def test_leaderboard_reads_summaries(
    checkpoints: dict[str, Path], task_file: Path, tmp_path: Path
) -> None:
    tasks = load_tasks(task_file)
    pipeline = load(checkpoints["chronos-bolt"]).forecaster
    seen: list[Any] = []
    ours = evaluate_tasks(pipeline, tasks, name="bolt", trained_on=["x"], on_task=seen.append)
    assert seen == ours
    summaries = [*ours, *evaluate_tasks("seasonal-naive", tasks, name="seasonal_naive")]
    path = tmp_path / "summaries.csv"
    path.write_text(summaries_csv(summaries))
    board = fev.leaderboard(str(path))
    ratios = [a["test_error"] / b["test_error"] for a, b in zip(ours, summaries[2:], strict=True)]
    skill = 1 - np.exp(np.mean(np.log(ratios)))
    assert board.loc["bolt", "skill_score"] == pytest.approx(skill)
    assert board.loc["bolt", "training_corpus_overlap"] == 0
    table = summaries_table(summaries)
    assert [column.header for column in table.columns] == [
        "task",
        "metric",
        "bolt",
        "seasonal_naive",
    ]
    assert table.columns[2].footer == f"{skill:.3f}"
    assert list(table.columns[1].cells) == ["WQL", "RMSE"]


def test_errors_are_shown_where_there_is_no_leaderboard(task_file: Path) -> None:
    tasks = load_tasks(task_file)
    naive = evaluate_tasks("seasonal-naive", tasks, name="seasonal_naive")
    never_wrong = [{**one, "test_error": 0.0} for one in naive]
    table = summaries_table([*naive, *({**one, "model_name": "m"} for one in never_wrong), *naive])
    assert "no skill scores: fev makes no leaderboard" in str(table.caption)
    assert not table.show_footer
    assert list(table.columns[3].cells)[:2] == ["0.0000", "0.0000"]


def test_means_for_squared_errors_in_any_case(
    checkpoints: dict[str, Path], task_file: Path
) -> None:
    content = yaml.safe_load(task_file.read_text())
    pipeline = load(checkpoints["chronos-t5"]).forecaster
    found = []
    for metric in ("RMSE", "rmse", {"name": "rmse"}):
        content["tasks"][1]["eval_metric"] = metric
        task_file.write_text(yaml.safe_dump(content))
        (predictions,), _ = predict_task(pipeline, load_tasks(task_file)[1])
        found.append([row["predictions"] for row in predictions["other"]])
    assert found[0] == found[1] == found[2]


def test_samples_of_a_model_that_draws_none_are_refused(
    checkpoints: dict[str, Path], task_file: Path
) -> None:
    task = load_tasks(task_file)[0]
    for family in ("chronos-bolt", "chronos-2"):
        with pytest.raises(UsageError, match="forecasts quantiles, not samples"):
            predict_task(load(checkpoints[family]).forecaster, task, num_samples=5)


def test_missing_quantile_levels_are_refused(checkpoints: dict[str, Path], task_file: Path) -> None:
    content = yaml.safe_load(task_file.read_text())
    content["tasks"][0]["quantile_levels"] = [0.05, 0.5]
    task_file.write_text(yaml.safe_dump(content))
    task = load_tasks(task_file)[0]
    with pytest.raises(UsageError, match=r"\[0\.05\].*\[0\.1, 0\.2"):
        predict_task(load(checkpoints["chronos-bolt"]).forecaster, task)
    predictions, _ = predict_task(load(checkpoints["chronos-t5"]).forecaster, task)
    assert "0.05" in predictions[0]["target"].column_names
    assert 0.05 not in QUANTILE_LEVELS


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tasks: []", "empty list of tasks"),
        ("suite: x", "no key 'tasks'"),
        ("- a", "tasks of fev"),
        ("tasks: [{dataset_path: x.parquet, horizons: 3}]", "horizons"),
        ("tasks: [{dataset_path: x.parquet, eval_metric: nonsense}]", "nonsense"),
        ("tasks: [", "tasks of fev"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=match) as caught:
        load_tasks(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="fev"):
        load_tasks(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dataset_path": "missing.parquet"}, "Failed to load the dataset"),
        ({"horizon": 90}, "too short"),
        ({"target": "sales"}, "sales"),
    ],
)
def test_unusable_datasets_are_refused(task_file: Path, change: dict[str, Any], match: str) -> None:
    content = yaml.safe_load(task_file.read_text())
    content["tasks"] = [content["tasks"][0] | {"num_windows": 1} | change]
    task_file.write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match=rf"task 'one' of fev: .*{match}") as caught:
        evaluate_tasks("seasonal-naive", load_tasks(task_file), name="n")
    assert "\n" not in str(caught.value)


def test_the_package_is_optional(task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fev", None)
    with pytest.raises(DataError, match=r"pip install 'tscompress\[fev\]'"):
        load_tasks(task_file)


def test_model_for_submissions(checkpoints: dict[str, Path], task_file: Path) -> None:
    spec = importlib.util.spec_from_file_location("fev_model", ROOT / "eval" / "fev_model.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    found = fev.ForecastingModel.get_model_cls("tscompress")
    model: Any = found(str(checkpoints["chronos-bolt"]), trained_on=("m5_1D",))
    task = load_tasks(task_file)[0]
    summary = task.evaluation_summary(
        model.fit_predict(task), model_name="m", inference_time_s=model.inference_time
    )
    (own, *_) = evaluate_tasks(model.pipeline, [task], name="m")
    assert summary["test_error"] == own["test_error"]
    assert model.trained_on_datasets == ["m5_1D"]
    assert model.inference_time > 0


# --- the command ----------------------------------------------------------------------------------


def invoke(*arguments: object) -> Any:
    from tscompress.cli.app import app

    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_command(checkpoints: dict[str, Path], task_file: Path, tmp_path: Path) -> None:
    done = invoke(
        checkpoints["chronos-bolt"], "--suite", f"fev:{task_file}", "--output", tmp_path / "s.csv",
        "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    summaries = json.loads(done.stdout)["summaries"]
    assert [summary["model_name"] for summary in summaries] == [
        "chronos-bolt", "chronos-bolt", "seasonal_naive", "seasonal_naive",
    ]  # fmt: skip
    assert len(fev.leaderboard(str(tmp_path / "s.csv"))) == 2


def test_summaries_are_a_table(task_file: Path, tmp_path: Path) -> None:
    outcome = invoke(
        "seasonal-naive", "--suite", f"fev:{task_file}", "--output", tmp_path / "s.json"
    )
    assert isinstance(outcome.exception, UsageError)
    assert "FILE.csv" in str(outcome.exception)
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    "options", [["--horizon", "3"], ["--dataset", "one"], ["--seeds", "0,1"], ["--max-series", "3"]]
)
def test_options_that_fev_decides(task_file: Path, options: list[str]) -> None:
    outcome = invoke("seasonal-naive", "--suite", f"fev:{task_file}", *options)
    assert isinstance(outcome.exception, UsageError)
    assert f"{options[0]} cannot go with it" in str(outcome.exception)


@pytest.fixture
def joint_task_file(tmp_path: Path) -> Path:
    """Two targets with a known and a past covariate."""
    rng = np.random.default_rng(1)
    days = pd.date_range("2024-01-01", periods=40)
    data = tmp_path / "days.parquet"
    pd.concat(
        pd.DataFrame({"id": name, "timestamp": days, "target": rng.normal(size=40)}).assign(
            other=lambda table: table["target"] ** 2,
            price=rng.normal(size=40),
            guests=rng.normal(size=40),
        )
        for name in "ab"
    ).to_parquet(data, index=False)
    task = {
        "dataset_path": str(data), "horizon": 4, "target": ["target", "other"],
        "known_dynamic_columns": ["price"], "past_dynamic_columns": ["guests"],
        "quantile_levels": [0.1, 0.5, 0.9], "eval_metric": "WQL",
    }  # fmt: skip
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task]}))
    return path


def test_covariates_groups_and_cross_learning(
    checkpoints: dict[str, Path], joint_task_file: Path
) -> None:
    (task,) = load_tasks(joint_task_file)
    pipeline = load(checkpoints["chronos-2"]).forecaster
    every = (Settings(), Settings(as_univariate=True), Settings(cross_learning=True))
    found = [
        np.array(predict_task(pipeline, task, settings=one)[0][0]["target"]["predictions"])
        for one in every
    ]
    for one in (1, 2):
        assert np.abs(found[one] - found[0]).max() > 1e-4
    with pytest.raises(UsageError, match="chronos-bolt"):
        predict_task(load(checkpoints["chronos-bolt"]).forecaster, task, settings=every[2])


def test_covariates_that_a_model_does_not_read_are_noted(
    checkpoints: dict[str, Path], joint_task_file: Path
) -> None:
    done = {
        family: invoke(checkpoints[family], "--suite", f"fev:{joint_task_file}", *options)
        for family, *options in (("chronos-bolt",), ("chronos-2",))
    }
    for family, result in done.items():
        assert result.exit_code == 0, result.output
        assert (
            "chronos-bolt reads no covariates; the series of 1 task"
            in " ".join(result.output.split())
        ) == (family == "chronos-bolt")
    alone = invoke(
        checkpoints["chronos-bolt"], "--suite", f"fev:{joint_task_file}", "--as-univariate"
    )
    assert "reads no covariates" not in alone.output


def test_the_command_passes_what_series_see(
    checkpoints: dict[str, Path], joint_task_file: Path
) -> None:
    pipeline = load(checkpoints["chronos-2"]).forecaster
    for option in ("cross_learning", "as_univariate"):
        settings = Settings.model_validate({option: True})
        (own,) = evaluate_tasks(pipeline, load_tasks(joint_task_file), name="m", settings=settings)
        given = f"fev:{joint_task_file}", f"--{option.replace('_', '-')}", "--json"
        done = invoke(checkpoints["chronos-2"], "--suite", *given)
        assert done.exit_code == 0, done.output
        error = json.loads(done.stdout)["summaries"][0]["test_error"]
        assert error == pytest.approx(own["test_error"], rel=1e-6)
        (plain,) = evaluate_tasks(pipeline, load_tasks(joint_task_file), name="m")
        assert error != pytest.approx(plain["test_error"], rel=1e-4)
