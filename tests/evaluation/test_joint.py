"""Forecasts of series that see one another: covariates, groups of targets, cross-learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from rich.console import Console
from typer.testing import CliRunner

import tscompress
from tscompress.benchmark.workload import Workload, forecast
from tscompress.checkpoints.given import loaded_of
from tscompress.checkpoints.load import load
from tscompress.cli.app import app
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset, LongFormat
from tscompress.data.suites import find_suite, load_suite
from tscompress.errors import NotEnoughMemoryError, TscompressError, UsageError
from tscompress.evaluation.calibration import calibration
from tscompress.evaluation.comparison import compare_results
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.forecasting import predict
from tscompress.evaluation.joint import predict_joint
from tscompress.evaluation.results import DatasetScore, EvaluationResult, Settings
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.evaluation.tables import evaluation_table
from tscompress.families.registry import adapter_of_pipeline

HORIZON = 5
TARGETS = {"one": ["sales"], "two": ["sales", "returns"]}
DAYS = pd.date_range("2024-01-01", periods=60)


def shops(count: int = 3) -> pd.DataFrame:
    """Series of 60, 50, 40, ... days that covariates drive, with gaps in both."""
    rng = np.random.default_rng(0)
    parts = []
    for number in range(count):
        days = DAYS[10 * (number % 3) :]
        price = rng.normal(size=len(days))
        promo = rng.choice(["none", "small", "large"], len(days)).astype(object)
        sales = 5 + price + (promo == "large") + 0.1 * rng.normal(size=len(days))
        sales[4], price[7], promo[9] = np.nan, np.nan, None
        part = {"id": f"shop {number}", "date": days, "sales": sales, "returns": 2 * sales - price}
        part |= {"promo": promo, "price": price, "guests": np.arange(len(days))}
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


def dataset_of(frame: pd.DataFrame, targets: str = "one", **changes: Any) -> EvaluationDataset:
    form: dict[str, Any] = {
        "horizon": HORIZON,
        "target_column": ",".join(TARGETS[targets]),
        "known_covariates": "promo,price",
        "past_covariates": "guests",
        **changes,
    }
    (found,) = load_suite(find_suite(frame, LongFormat.model_validate(form)))
    return found


def stock_forecasts(
    pipeline: Chronos2Pipeline, frame: pd.DataFrame, targets: str, **options: Any
) -> np.ndarray:
    """Quantiles of chronos-forecasting's own reading of the table, ``[N, 9, horizon]``."""
    if targets == "one":  # other columns are covariates there
        frame = frame.drop(columns="returns")
    last = frame.groupby("id").cumcount(ascending=False) < HORIZON
    found = pipeline.predict_df(
        frame[~last],
        future_df=frame[last].drop(columns=[*TARGETS[targets], "guests"]),
        id_column="id",
        timestamp_column="date",
        target=TARGETS[targets],
        prediction_length=HORIZON,
        quantile_levels=QUANTILE_LEVELS,
        **options,
    )
    values = found[[str(level) for level in QUANTILE_LEVELS]].to_numpy()  # series by series
    return values.reshape(-1, HORIZON, len(QUANTILE_LEVELS)).swapaxes(1, 2)


@pytest.fixture(scope="module")
def chronos2(checkpoints: dict[str, Path]) -> BaseChronosPipeline:
    return load(checkpoints["chronos-2"]).forecaster


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("cross_learning", [False, True])
def test_forecasts_are_those_of_chronos(
    chronos2: Chronos2Pipeline, targets: str, cross_learning: bool
) -> None:
    frame = shops()
    found = predict_joint(chronos2, dataset_of(frame, targets), 32, cross_learning=cross_learning)
    expected = stock_forecasts(chronos2, frame, targets, cross_learning=cross_learning)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_covariates_change_forecasts(chronos2: BaseChronosPipeline) -> None:
    dataset = dataset_of(shops())
    alone = predict(chronos2, dataset.contexts, HORIZON)
    assert np.abs(predict_joint(chronos2, dataset, 32) - alone).max() > 1e-3


@pytest.mark.parametrize("targets", TARGETS)
def test_batches_do_not_change_forecasts(chronos2: BaseChronosPipeline, targets: str) -> None:
    dataset = dataset_of(shops(5), targets, windows=2)
    whole = predict_joint(chronos2, dataset, 32)
    for size in (1, 2, 3):
        told: list[int] = []
        found = predict_joint(chronos2, dataset, size, on_series=told.append)
        np.testing.assert_allclose(found, whole, atol=1e-4)
        assert told == sorted(told)
        group = len(TARGETS[targets])
        assert (told[0], told[-1]) == (group * max(1, size // group), len(whole))
    np.testing.assert_allclose(predict_joint(chronos2, dataset, "auto"), whole, atol=1e-4)


def test_cross_learning_depends_on_the_others(chronos2: BaseChronosPipeline) -> None:
    dataset = dataset_of(shops(5), known_covariates=None, past_covariates=None)
    whole = predict_joint(chronos2, dataset, 32, cross_learning=True)
    assert np.abs(predict_joint(chronos2, dataset, 2, cross_learning=True) - whole).max() > 1e-4
    alone = predict_joint(chronos2, dataset, 1, cross_learning=True)
    np.testing.assert_allclose(alone, predict(chronos2, dataset.contexts, HORIZON), atol=1e-4)


def test_no_window_sees_a_later_one(chronos2: BaseChronosPipeline) -> None:
    """What the first window of all series forecasts stays as the last steps change."""
    frame, changed = shops(), shops()
    last = changed.groupby("id").cumcount(ascending=False) < HORIZON
    changed.loc[last, "sales"] += 100
    found = [
        predict_joint(chronos2, dataset_of(one, windows=2), 32, cross_learning=True)
        for one in (frame, changed)
    ]
    np.testing.assert_array_equal(found[0][::2], found[1][::2])


def test_unknown_categories_are_forecast(chronos2: BaseChronosPipeline) -> None:
    frame = shops()
    frame.loc[frame.groupby("id").tail(1).index, "promo"] = "giant"
    for targets in TARGETS:
        dataset = dataset_of(frame, targets)
        assert "giant" in set(dataset.covariates[0].future["promo"])
        assert np.isfinite(predict_joint(chronos2, dataset, 32)).all()


def test_constant_and_missing_covariates_are_forecast(chronos2: BaseChronosPipeline) -> None:
    frame = shops()
    frame["price"] = 3.0
    frame.loc[frame["id"] == "shop 0", ["promo", "guests"]] = None
    for targets in TARGETS:
        assert np.isfinite(predict_joint(chronos2, dataset_of(frame, targets), 32)).all()


def test_exported_models_read_them_as_well(
    exported: dict[str, Path], checkpoints: dict[str, Path], chronos2: BaseChronosPipeline
) -> None:
    pytest.importorskip("onnxruntime")
    graph = loaded_of(exported["chronos-2"]).forecaster
    for targets in TARGETS:
        dataset = dataset_of(shops(), targets)
        for together in (False, True):
            ours, theirs = (
                predict_joint(one, dataset, 32, cross_learning=together)
                for one in (graph, chronos2)
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    frame = shops()
    np.testing.assert_allclose(
        stock_forecasts(graph, frame, "two"), stock_forecasts(chronos2, frame, "two"),
        rtol=1e-3, atol=1e-4,
    )  # fmt: skip


def test_a_batch_that_sees_itself_is_not_parted(
    chronos2: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = type(adapter_of_pipeline(chronos2))
    sizes: list[int] = []

    def small(
        self: Any, pipeline: Any, tasks: Any, horizon: int, levels: Any, **options: Any
    ) -> Any:
        sizes.append(len(tasks))
        if len(tasks) > 1:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(len(tasks), 1, horizon, len(levels))

    monkeypatch.setattr(family, "joint_quantiles", small)
    assert predict_joint(chronos2, dataset_of(shops()), 32).shape == (3, 9, HORIZON)
    assert sizes[0] == 3
    assert set(sizes[2:]) == {1}
    with pytest.raises(NotEnoughMemoryError, match="batch-size"):
        predict_joint(chronos2, dataset_of(shops()), 32, cross_learning=True)


@pytest.mark.parametrize("targets", TARGETS)
def test_automatic_batches_hold_what_fits(
    chronos2: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch, targets: str
) -> None:
    """Of four groups of targets, each beside three covariates."""
    sizes: list[int] = []

    def counted(pipeline: Any, tasks: Any, horizon: int, **options: Any) -> Any:
        sizes.append(len(tasks))
        shape = len(tasks), len(TARGETS[targets]), len(QUANTILE_LEVELS), horizon
        return np.zeros(shape, dtype=np.float32)

    rows = len(TARGETS[targets]) + 3
    monkeypatch.setattr("tscompress.evaluation.batching.series_that_fit", lambda *_: 4 * rows)
    monkeypatch.setattr("tscompress.evaluation.joint.predict_tasks", counted)
    predict_joint(chronos2, dataset_of(shops(8), targets), "auto")
    assert sizes == [4, 4]


# --- scores ---------------------------------------------------------------------------------------


def scores(model: Any, frame: pd.DataFrame, targets: str = "one", **options: Any) -> Any:
    form: dict[str, Any] = {"known_covariates": "promo,price", "past_covariates": "guests"}
    form["target_column"] = ",".join(TARGETS[targets])
    return tscompress.evaluate(model, frame, horizon=HORIZON, **{**form, **options})


def test_results_say_how_they_were_made(checkpoints: dict[str, Path]) -> None:
    model, frame = checkpoints["chronos-2"], shops()
    together = scores(model, frame)
    assert together.settings == Settings()
    alone = scores(model, frame, as_univariate=True)
    assert alone.settings.words() == ["each series alone"]
    crossed = scores(model, frame, cross_learning=True, batch_size=2)
    assert crossed.settings == Settings(cross_learning=True, batch_size=2)
    assert len({result.rows[0].WQL for result in (together, alone, crossed)}) == 3
    assert scores("seasonal-naive", frame, cross_learning=True).settings is None
    assert type(crossed).from_dict(crossed.to_dict()) == crossed
    assert "cross-learning" in str(evaluation_table(crossed).title)


def test_names_are_text_in_tables() -> None:
    row = DatasetScore(dataset="a[/b]", model="m", MASE=1, WQL=1, series_count=2, seconds=1)
    result = EvaluationResult(suite="sales [eu].csv", model="fold [r=16]", rows=(row,))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(evaluation_table(result))
    assert all(name in captured.get() for name in ("a[/b]", "fold [r=16] on sales [eu].csv"))


def test_targets_of_a_group_and_their_windows_are_one_cluster(checkpoints: dict[str, Path]) -> None:
    model = checkpoints["chronos-2"]
    (row,) = scores(model, shops(), "two", windows=2).rows
    assert row.clusters.tolist() == np.repeat(range(3), 4).tolist()
    (alone,) = scores(model, shops(), windows=2).rows
    assert alone.series is not None
    assert alone.series.groups is None
    assert alone.clusters.tolist() == [0, 0, 1, 1, 2, 2]


def test_different_settings_are_noted(checkpoints: dict[str, Path]) -> None:
    model, frame = checkpoints["chronos-2"], shops()
    together, crossed = scores(model, frame), scores(model, frame, cross_learning=True)
    naive = scores("seasonal-naive", frame)
    notes = compare_results([together, crossed]).notes
    assert any("cross-learning in batches of 32" in note for note in notes)
    for same in (together, naive):
        assert not any("settings" in note for note in compare_results([together, same]).notes)


def test_scores_of_other_settings_are_not_reused(
    chronos2: BaseChronosPipeline, tmp_path: Path
) -> None:
    cache = ScoreCache(tmp_path)
    form = LongFormat(horizon=HORIZON, target_column="sales", known_covariates="price")
    suite = find_suite(shops()[["id", "date", "sales", "price"]], form)
    settings = [Settings(), Settings(cross_learning=True), Settings(as_univariate=True)]
    found = [
        evaluate_pipeline(chronos2, suite, name="m", settings=one, cache=cache).rows[0].WQL
        for one in (*settings, *settings)
    ]
    assert found[:3] == found[3:]
    assert len(set(found)) == 3
    assert len(cache.hits) == 3


def test_families_that_see_one_series_forecast_targets_one_by_one(
    checkpoints: dict[str, Path],
) -> None:
    frame = shops()
    both = scores(checkpoints["chronos-bolt"], frame, "two", as_univariate=True)
    assert both.settings.words() == ["each series alone"]
    one = scores(checkpoints["chronos-bolt"], frame, as_univariate=True)
    columns = both.rows[0].series.quantile_loss
    assert columns[::2] == pytest.approx(one.rows[0].series.quantile_loss, rel=1e-4)


def test_sorted_quantiles_do_not_cross(checkpoints: dict[str, Path]) -> None:
    model, frame = checkpoints["chronos-2"], shops()
    as_they_are, in_order = scores(model, frame), scores(model, frame, sort_quantiles=True)
    assert as_they_are.rows[0].crossing_rate > 0
    assert in_order.rows[0].crossing_rate == 0
    assert in_order.settings.words() == ["sorted quantiles"]
    assert in_order.rows[0].WQL < as_they_are.rows[0].WQL


def test_every_family_has_coverage_and_crossings(checkpoint: Path) -> None:
    found: dict[str, Any] = {}

    def keep(dataset: EvaluationDataset, quantiles: Any) -> None:
        found[dataset.name] = calibration(quantiles, dataset.labels)

    frame = shops()[["id", "date", "sales"]]
    result = tscompress.evaluate(checkpoint, frame, horizon=HORIZON, on_forecasts=keep)
    (row,) = result.rows
    assert row.coverage == found["table"].coverage
    assert row.coverage_error == pytest.approx(abs(row.coverage - 0.8))
    assert row.crossing_rate == found["table"].crossing_rate
    assert result.mean_of("coverage") == row.coverage
    titles = [str(column.header) for column in evaluation_table(result).columns]
    assert any("covers" in title for title in titles)
    assert "80% band" in str(evaluation_table(result).caption)


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_families_that_see_one_series_refuse_covariates(
    checkpoints: dict[str, Path], family: str
) -> None:
    for options in ({}, {"cross_learning": True, "as_univariate": True}):
        with pytest.raises(UsageError, match=family):
            scores(checkpoints[family], shops(), **options)
    pipeline = load(checkpoints[family]).forecaster
    with pytest.raises(UsageError, match=family):
        forecast(pipeline, torch.zeros(2, 16), Workload(cross_learning=True, horizon=4))


def test_options_that_exclude_each_other(checkpoints: dict[str, Path]) -> None:
    model = checkpoints["chronos-2"]
    for options in ({"as_univariate": True}, {"batch_size": "auto"}):
        with pytest.raises(UsageError, match="cross-learning"):
            scores(model, shops(), cross_learning=True, **options)


def test_a_group_larger_than_a_batch_is_noted(checkpoints: dict[str, Path]) -> None:
    notes: list[str] = []
    scores(checkpoints["chronos-2"], shops(), "two", batch_size=1, on_note=notes.append)
    assert len(notes) == 1
    assert "group of 2" in notes[0]


def test_series_of_other_ends_are_noted_where_they_see_one_another(
    checkpoints: dict[str, Path],
) -> None:
    frame = shops()
    ends = frame["date"].max()
    shorter = frame[(frame["id"] != "shop 1") | (frame["date"] < ends)]
    noted = {}
    for name, one in {"same": frame, "other": shorter}.items():
        for crossed in (False, True):
            notes: list[str] = []
            scores(checkpoints["chronos-2"], one, cross_learning=crossed, on_note=notes.append)
            noted[name, crossed] = any("end at different times" in note for note in notes)
    assert noted == {
        ("same", False): False, ("same", True): False,
        ("other", False): False, ("other", True): True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--known-covariates", "sales"], "sales"),
        (["--known-covariates", "id"], "id"),
        (["--past-covariates", "nothing"], "nothing"),
        (["--known-covariates", "guests"], "guests"),
    ],
)
def test_bad_columns_are_one_line(
    checkpoints: dict[str, Path], tmp_path: Path, options: list[str], name: str
) -> None:
    frame = shops()
    frame.loc[frame.groupby("id").tail(2).index, "guests"] = np.nan
    frame.to_csv(tmp_path / "x.csv", index=False)
    given = ["evaluate", str(checkpoints["chronos-2"]), "--suite", str(tmp_path / "x.csv")]
    given += ["--horizon", str(HORIZON), "--target-column", "sales", *options]
    outcome = CliRunner().invoke(app, given)
    assert isinstance(outcome.exception, TscompressError)
    assert repr(name) in str(outcome.exception)
    assert "\n" not in str(outcome.exception)


def test_the_command_reads_covariates(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    shops().to_csv(path, index=False)
    given = ["evaluate", str(checkpoints["chronos-2"]), "--suite", str(path), "--horizon", "5"]
    given += ["--target-column", "sales,returns", "--known-covariates", "promo,price"]
    given += ["--past-covariates", "guests", "--cross-learning", "--batch-size", "4", "--json"]
    outcome = CliRunner().invoke(app, [*given, "--no-cache"])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)["result"]
    assert result["settings"] == {
        "cross_learning": True, "as_univariate": False, "sort_quantiles": False, "batch_size": 4,
    }  # fmt: skip
    expected = scores(
        checkpoints["chronos-2"], shops(), "two", cross_learning=True, batch_size=4
    ).rows[0]
    assert result["rows"][0]["WQL"] == pytest.approx(expected.WQL, rel=1e-5)
    assert {"coverage", "coverage_error", "crossing_rate"} <= result["rows"][0].keys()
