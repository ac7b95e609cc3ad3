"""The evaluation protocol: published figures, metrics by hand, and comparable forecasts."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from pydantic import ValidationError
from rich.console import Console
from transformers import set_seed

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import (
    DataError,
    NotEnoughMemoryError,
    OfflineError,
    RecipeError,
    UsageError,
)
from tscompress.evaluation import batching, forecasting, metrics
from tscompress.evaluation.batching import (
    DrawsOfPart,
    Parts,
    Processes,
    batches_by_length,
    forecast_bytes,
    memory_ran_out,
    parse_batch_size,
    series_that_fit,
)
from tscompress.evaluation.calibration import calibration
from tscompress.evaluation.comparison import compare_results
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.forecasting import SeasonalNaive, forecast
from tscompress.evaluation.metrics import (
    quantile_array,
    sample_quantiles,
    seasonal_errors,
    series_contributions,
)
from tscompress.evaluation.results import (
    DatasetScore,
    EvaluationResult,
    Sampling,
    aggregate,
    relative,
)
from tscompress.evaluation.tables import comparison_tables, evaluation_table
from tscompress.io.results import results_json
from tscompress.layers.shared_cross_attention import cross_attention_shared
from tscompress.probing.measure import ProbeConfig
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

PUBLISHED = Path(__file__).with_name("published-seasonal-naive.csv")
YEARLY = ["monash_m1_yearly"]


def tiny_recipe(family: Any) -> PretrainRecipe:
    return PretrainRecipe(
        family=family,
        name="tiny",
        architecture=Architecture(
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            context_length=64,
            prediction_length=16,
            vocab_size=128,
            patch_size=8,
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=64, horizon=16, batch_size=2),)),),
    )


def tiny_pipeline(family: str, directory: Path) -> BaseChronosPipeline:
    set_seed(0)
    save_pretrained(build_model(tiny_recipe(family)), directory)
    return BaseChronosPipeline.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> BaseChronosPipeline:
    return tiny_pipeline("chronos-t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def bolt(tmp_path_factory: pytest.TempPathFactory) -> BaseChronosPipeline:
    return tiny_pipeline("chronos-bolt", tmp_path_factory.mktemp("bolt"))


@pytest.fixture(scope="module")
def chronos2() -> Chronos2Pipeline:
    from chronos.chronos2 import Chronos2Model
    from chronos.chronos2.config import Chronos2CoreConfig

    set_seed(0)
    config = Chronos2CoreConfig(
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        reg_token_id=1,
        chronos_config={
            "context_length": 64,
            "output_patch_size": 8,
            "input_patch_size": 8,
            "input_patch_stride": 8,
            "quantiles": [0.01, *QUANTILE_LEVELS, 0.99],
            "use_reg_token": True,
            "use_arcsinh": True,
            "max_output_patches": 4,
            "time_encoding_scale": 64,
        },
    )
    return Chronos2Pipeline(Chronos2Model(config).eval())


def contexts(count: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=rng.integers(10, 60)).cumsum() + 50 for _ in range(count)]


def arrays(forecasts: list[Any]) -> np.ndarray:
    """``[N, samples or quantiles, H]``."""
    first = forecasts[0]
    name = "samples" if isinstance(first, forecasting.SampleForecast) else "forecast_array"
    return np.stack([getattr(item, name) for item in forecasts])


def result(model: str, scores: dict[str, tuple[float, float]], series: int = 3) -> EvaluationResult:
    rows = tuple(
        DatasetScore(
            dataset=name, model=model, MASE=mase, WQL=wql, series_count=series, seconds=0.5
        )
        for name, (mase, wql) in scores.items()
    )
    return EvaluationResult(suite="zero-shot", model=model, rows=rows)


def dataset_of(series: list[list[float]], horizon: int, freq: str = "Q") -> EvaluationDataset:
    start = pd.Period("2000-01-01", freq=freq)
    values = tuple(np.array(item, dtype=np.float64) for item in series)
    return EvaluationDataset("toy", horizon, values, (start,) * len(values))


# --- seasonal naive -------------------------------------------------------------------------------


def test_seasonal_naive_reproduces_the_published_scores() -> None:
    published = pd.read_csv(PUBLISHED)
    ours = evaluate_pipeline("seasonal-naive", "offline", name="seasonal-naive").frame()
    assert ours["dataset"].tolist() == published["dataset"].tolist()
    for metric in ("MASE", "WQL"):
        np.testing.assert_allclose(ours[metric], published[metric], rtol=1e-3)


@pytest.mark.network
def test_the_hub_holds_the_published_series() -> None:
    published = pd.read_csv(PUBLISHED).set_index("dataset").loc[YEARLY]
    try:
        (row,) = evaluate_pipeline(
            "seasonal-naive", "zero-shot", name="naive", datasets=YEARLY
        ).rows
    except OfflineError:
        pytest.skip("the Hub cannot be reached")
    scores = published[["MASE", "WQL"]].iloc[0].tolist()
    assert pytest.approx(tuple(scores), rel=1e-3) == (row.MASE, row.WQL)


def test_seasonal_naive_repeats_the_last_season_at_every_level() -> None:
    dataset = dataset_of([[1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0]], horizon=6)
    (item,) = SeasonalNaive().forecast(dataset)
    for level in ("0.1", "0.5", "0.9"):
        assert item.quantile(level).tolist() == [5, 6, 7, 8, 5, 6]


def test_seasonal_naive_carries_values_over_gaps() -> None:
    dataset = dataset_of([[1, 2, 3, 4, 5, np.nan, 7, 8, 0, 0]], horizon=2)
    (item,) = SeasonalNaive().forecast(dataset)
    assert item.quantile("0.5").tolist() == [5, 5]


# --- metrics --------------------------------------------------------------------------------------


def score_forecasts(forecasts: Iterable[Any], dataset: EvaluationDataset) -> dict[str, float]:
    return metrics.score_quantiles(metrics.quantile_array(forecasts), dataset)


def test_scores_by_hand() -> None:
    # Yearly: the seasonal error is the mean absolute step, here 1 and 2.
    dataset = dataset_of([[1, 2, 3, 4, 6], [10, 8, 10, 7, 9]], horizon=2, freq="Y")
    medians = np.array([[3.0, 4.0], [9.0, 9.0]])
    spread = np.arange(-4, 5)[:, None]  # level 0.1 is four below the median, 0.9 four above
    forecasts = [
        forecasting.QuantileForecast(
            forecast_arrays=median + spread,
            start_date=start + 3,
            forecast_keys=[str(level) for level in QUANTILE_LEVELS],
        )
        for median, start in zip(medians, dataset.starts, strict=True)
    ]
    labels = dataset.labels
    mase = np.mean(np.abs(labels - medians) / np.array([[1.0], [2.0]]))
    losses = []
    for level, shift in zip(QUANTILE_LEVELS, spread[:, 0], strict=True):
        error = labels - (medians + shift)
        losses.append(2 * np.sum(np.maximum(level * error, (level - 1) * error)))
    wql = np.mean(losses) / np.abs(labels).sum()

    scores = score_forecasts(forecasts, dataset)
    assert scores == {"MASE": pytest.approx(mase), "WQL": pytest.approx(wql)}


def test_missing_labels_and_flat_contexts_are_left_out_of_mase() -> None:
    dataset = dataset_of([[1, 2, 3, 4, np.nan], [5, 5, 5, 5, 5], [5, 5, 5, 6, 6]], 2, freq="Y")
    naive = SeasonalNaive().forecast(dataset)
    # Of the first series one step counts, |4 - 3| / 1; the others have no seasonal error.
    scores = score_forecasts(naive, dataset)
    assert scores["MASE"] == pytest.approx(1.0)
    assert scores["WQL"] == pytest.approx((1 + 1 + 1) / (4 + 5 + 5 + 6 + 6))


def test_scoring_keeps_the_terminal_silent(capfd: pytest.CaptureFixture[str]) -> None:
    evaluate_pipeline("seasonal-naive", name="naive", datasets=YEARLY, max_series=2)
    assert capfd.readouterr() == ("", "")


def test_the_coverage_error_is_that_of_the_mean_coverage(
    t5: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter((0.7, 0.94))

    def calibrated(*given: Any) -> Any:
        return calibration(*given).model_copy(update={"coverage": next(measured)})

    monkeypatch.setattr("tscompress.evaluation.evaluate.calibration", calibrated)
    options: dict[str, Any] = {"datasets": YEARLY, "max_series": 2, "seeds": (0, 1)}
    (row,) = evaluate_pipeline(t5, name="m", **options).rows
    assert row.coverage == pytest.approx(0.82)
    assert row.coverage_error == pytest.approx(0.02)


# --- what each series contributes -----------------------------------------------------------------


def awkward_dataset() -> EvaluationDataset:
    """Missing values, flat contexts, contexts shorter than a season, and labels of zero."""
    rng = np.random.default_rng(0)
    series = [rng.normal(size=length).cumsum() * 10 + 40 for length in (60, 30, 25, 9, 40, 5, 31)]
    series[0][[3, 20, -1, -4]] = np.nan
    series[1][:-4] = 7.0
    series[2][-4:] = 0.0
    series[4][-4:] = np.nan
    return dataset_of([list(values) for values in series], horizon=4, freq="M")


@pytest.mark.parametrize("family", ["t5", "bolt"])
def test_contributions_give_the_scores_of_gluonts(
    request: pytest.FixtureRequest, family: str
) -> None:
    dataset = awkward_dataset()
    forecasts = forecast(request.getfixturevalue(family), dataset.contexts, dataset.horizon)
    scores = score_forecasts(forecasts, dataset)
    own = metrics.evaluate_forecasts(
        forecasts,
        test_data=metrics.backtest(dataset),
        metrics=[metrics.MASE(), metrics.MeanWeightedSumQuantileLoss(QUANTILE_LEVELS)],
        seasonality=dataset.seasonality,
    ).iloc[0]
    assert scores["MASE"] == own["MASE[0.5]"]
    assert scores["WQL"] == own["mean_weighted_sum_quantile_loss"]
    columns = series_contributions(quantile_array(forecasts), dataset)
    for metric in ("WQL", "MASE"):
        assert columns.score(metric) == pytest.approx(scores[metric], rel=1e-12)
    assert columns.scaled_steps[1] == 0  # no seasonal error
    assert columns.scaled_steps[4] == 0  # no label
    assert columns.scaled_steps[0] == 2
    assert columns.quantile_loss[4] == columns.absolute_label[4] == 0


def test_contributions_agree_with_fev(bolt: BaseChronosPipeline) -> None:
    metrics = pytest.importorskip("fev.metrics")
    rng = np.random.default_rng(1)
    values = [rng.normal(size=length).cumsum() * 9 + 90 for length in (60, 40, 44, 50)]
    values[1][-1] = np.nan
    dataset = dataset_of([list(one) for one in values], horizon=4, freq="M")
    quantiles = quantile_array(forecast(bolt, dataset.contexts, dataset.horizon))
    columns = series_contributions(quantiles, dataset)
    arguments = {
        "y_true": dataset.labels[..., None],  # [N, H, 1]
        "y_pred": quantiles[:, 4, :, None].astype(float),
        "y_past": np.concatenate(dataset.contexts)[:, None],
        "y_past_lengths": np.array([len(context) for context in dataset.contexts]),
        "q_pred": quantiles.swapaxes(1, 2)[:, :, None].astype(float),  # [N, H, 1, 9]
        "seasonality": dataset.seasonality,
        "quantile_levels": QUANTILE_LEVELS,
    }
    assert columns.score("MASE") == pytest.approx(metrics.MASE().compute(**arguments), rel=1e-6)
    assert columns.score("WQL") == pytest.approx(metrics.WQL().compute(**arguments), rel=1e-6)


def test_seasonal_errors_are_those_of_gluonts() -> None:
    dataset = awkward_dataset()
    shorter = dataset_of([[1, 3, 9, 4], [2.0] * 15 + [1], list(range(16))], 3, freq="M")
    for one in (dataset, shorter):  # a season is 12; contexts of 1, 12 and 13 steps are among them
        expected = [
            np.ma.filled(
                metrics.seasonal_error(np.ma.masked_invalid(c), one.seasonality, time_axis=-1), 0
            )
            for c in one.contexts
        ]
        np.testing.assert_allclose(seasonal_errors(one), np.ravel(expected), rtol=1e-14)


@pytest.mark.parametrize("num_samples", [1, 2, 9, 20, 21])
def test_quantiles_of_samples_are_those_of_gluonts(num_samples: int) -> None:
    samples = np.random.default_rng(0).normal(size=(3, num_samples, 5)).astype(np.float32)
    start = pd.Period("2000-01-01", freq="D")
    theirs = [forecasting.SampleForecast(samples=one, start_date=start) for one in samples]
    np.testing.assert_array_equal(sample_quantiles(samples), quantile_array(theirs))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_forecasts_that_are_not_finite_are_refused(bad: float) -> None:
    dataset = dataset_of([[1, 2, 3, 4], [1, 2, 3, 4]], horizon=1, freq="Y")
    quantiles = np.ones((2, 9, 1))
    quantiles[1, 8] = bad
    with pytest.raises(DataError, match=r"'m' .* 1 of 2 series of 'toy'"):
        series_contributions(quantiles, dataset, name="m")


def test_evaluate_keeps_every_series(t5: BaseChronosPipeline) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def run(**options: Any) -> EvaluationResult:
        return evaluate_pipeline(
            t5, name="t", max_series=3, datasets=YEARLY, num_samples=3, **options
        )

    both = run(seeds=(0, 5), on_forecasts=lambda data, q: seen.append((data.name, q.shape)))
    assert seen == [("monash_m1_yearly", (3, 9, 6))]
    assert both.sampling == Sampling(seeds=(0, 5), num_samples=3, batch_size=32)
    singles = [run(seed=seed).rows[0] for seed in (0, 5)]
    (row,) = both.rows
    assert row.series is not None
    for metric in ("WQL", "MASE"):
        mean = np.mean([getattr(single, metric) for single in singles])
        assert getattr(row, metric) == pytest.approx(mean)
        assert row.series.score(metric) == pytest.approx(mean)


def test_models_that_draw_nothing_forecast_once(bolt: BaseChronosPipeline) -> None:
    once = evaluate_pipeline(bolt, name="b", max_series=2, datasets=YEARLY, seeds=(0, 1, 2))
    assert once.sampling is None
    single = evaluate_pipeline(bolt, name="b", max_series=2, datasets=YEARLY)
    assert once.rows[0].series == single.rows[0].series
    assert once.rows[0].seasonality == 1  # of years
    with pytest.raises(UsageError, match=r"seeds are \[\]; give one or more"):
        evaluate_pipeline(bolt, name="b", datasets=YEARLY, seeds=())
    with pytest.raises(UsageError, match=r"seeds are \[-3\]; give one or more from 0 on"):
        evaluate_pipeline(bolt, name="b", datasets=YEARLY, seeds=(-3,))


# --- forecasts ------------------------------------------------------------------------------------


def test_t5_forecasts_are_its_raw_samples(t5: BaseChronosPipeline) -> None:
    forecasts = forecast(t5, contexts(3), 5, num_samples=12)
    assert all(isinstance(item, forecasting.SampleForecast) for item in forecasts)
    assert arrays(forecasts).shape == (3, 12, 5)


def test_t5_default_number_of_samples_is_its_own(t5: BaseChronosPipeline) -> None:
    assert arrays(forecast(t5, contexts(2), 3)).shape == (2, 20, 3)


def test_quantile_models_forecast_nine_quantiles(
    bolt: BaseChronosPipeline, chronos2: Chronos2Pipeline
) -> None:
    for pipeline in (bolt, chronos2):
        forecasts = forecast(pipeline, contexts(3), 5)
        assert all(isinstance(item, forecasting.QuantileForecast) for item in forecasts)
        assert arrays(forecasts).shape == (3, 9, 5)
        direct, _ = pipeline.predict_quantiles(
            [torch.tensor(contexts(3)[1], dtype=torch.float32)],
            prediction_length=5,
            quantile_levels=QUANTILE_LEVELS,
        )
        expected = np.asarray(direct[0]).reshape(5, 9)
        for column, level in enumerate(QUANTILE_LEVELS):
            np.testing.assert_allclose(
                forecasts[1].quantile(level), expected[:, column], rtol=1e-4, atol=1e-4
            )


def test_a_model_of_other_quantiles_is_not_scored(
    bolt: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(bolt), "quantiles", [0.05, 0.5, 0.95])
    with pytest.raises(UsageError, match=r"the quantiles 0\.05, 0\.5, 0\.95; scores are of 0\.1"):
        forecast(bolt, contexts(2), 3)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_order_and_batches_do_not_change_quantiles(
    bolt: BaseChronosPipeline, chronos2: Chronos2Pipeline, batch_size: int
) -> None:
    shuffled = np.random.default_rng(0).permutation(7)
    for pipeline in (bolt, chronos2):
        reference = arrays(forecast(pipeline, contexts(), 5, batch_size=7))
        others = [contexts()[i] for i in shuffled]
        found = arrays(forecast(pipeline, others, 5, batch_size=batch_size))
        np.testing.assert_allclose(found, reference[shuffled], rtol=1e-4, atol=1e-4)


def test_batches_hold_similar_lengths_and_every_series() -> None:
    batches = list(batches_by_length([5, 1, 5, 2, 9], 2))
    assert batches == [[1, 3], [0, 2], [4]]


def test_forecasts_start_after_their_context(bolt: BaseChronosPipeline) -> None:
    starts = [pd.Period("2020-01", freq="M"), pd.Period("2021-01", freq="M")]
    forecasts = forecast(bolt, [np.arange(20.0), np.arange(12.0)], 3, starts=starts)
    assert [str(item.start_date) for item in forecasts] == ["2021-09", "2022-01"]


def test_horizons_beyond_the_model_are_allowed(
    t5: BaseChronosPipeline, bolt: BaseChronosPipeline
) -> None:
    for pipeline in (t5, bolt):
        assert arrays(forecast(pipeline, contexts(2), 20)).shape[-1] == 20


def test_missing_values_in_contexts(bolt: BaseChronosPipeline, t5: BaseChronosPipeline) -> None:
    values = contexts(1)[0]
    values[3:6] = np.nan
    for pipeline in (bolt, t5):
        assert np.isfinite(arrays(forecast(pipeline, [values], 4))).all()


def test_common_random_numbers(t5: BaseChronosPipeline) -> None:
    def draw(**options: Any) -> np.ndarray:
        return arrays(forecast(t5, contexts(), 4, batch_size=3, **options))

    reference = draw(seed=1, stream="a")
    torch.rand(10)  # the state of the global generator is of no consequence
    np.testing.assert_array_equal(draw(seed=1, stream="a"), reference)
    assert not np.array_equal(draw(seed=2, stream="a"), reference)
    assert not np.array_equal(draw(seed=1, stream="b"), reference)


def test_models_that_hardly_differ_draw_the_same_paths(t5: BaseChronosPipeline) -> None:
    close = copy.deepcopy(t5)
    with torch.no_grad():
        for parameter in close.inner_model.parameters():
            parameter.mul_(1 + 1e-6)
    first, second = (arrays(forecast(model, contexts(), 4)) for model in (t5, close))
    assert np.mean(np.isclose(first, second)) > 0.99


def test_batches_draw_different_numbers(t5: BaseChronosPipeline) -> None:
    same = [np.arange(30.0)] * 2
    first, second = arrays(forecast(t5, same, 4, batch_size=1))
    assert not np.array_equal(first, second)


def test_the_global_generator_is_left_alone(t5: BaseChronosPipeline) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    forecast(t5, contexts(2), 2)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_forecast_options_are_checked(t5: BaseChronosPipeline, bolt: BaseChronosPipeline) -> None:
    with pytest.raises(UsageError, match="num_samples"):
        forecast(bolt, contexts(1), 2, num_samples=5)
    with pytest.raises(UsageError, match="num_samples is 0"):
        forecast(t5, contexts(1), 2, num_samples=0)
    with pytest.raises(UsageError, match="batch_size is 0"):
        forecast(t5, contexts(1), 2, batch_size=0)


# --- memory ---------------------------------------------------------------------------------------


def with_little_memory(
    pipeline: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch, fit: int, error: Exception
) -> list[int]:
    """Let ``predict`` fail for more series than ``fit``; the list gets the sizes of all calls."""
    sizes: list[int] = []
    predict = pipeline.predict

    def limited(inputs: list[torch.Tensor], **options: Any) -> Any:
        sizes.append(len(inputs))
        if len(inputs) > fit:
            raise error
        return predict(inputs, **options)

    monkeypatch.setattr(pipeline, "predict", limited)
    return sizes


CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("family", ["t5", "bolt", "chronos2"])
def test_a_batch_that_does_not_fit_is_computed_in_parts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    pipeline = request.getfixturevalue(family)
    whole = arrays(forecast(pipeline, contexts(9), 20, batch_size=6))
    sizes = with_little_memory(pipeline, monkeypatch, 2, CUDA_ERROR)
    parts = arrays(forecast(pipeline, contexts(9), 20, batch_size=6))
    # 6 and 3 do not fit; what was learnt from the first batch holds for the second.
    assert sizes == [6, 3, 2, 2, 2, 2, 1]
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)


def test_parts_draw_exactly_the_numbers_of_the_whole() -> None:
    probabilities = torch.rand(12, 40).softmax(-1)  # 4 series of 3 paths
    torch.manual_seed(7)
    whole = torch.multinomial(probabilities, num_samples=1)
    for rows in (slice(0, 4), slice(0, 1), slice(1, 3)):
        ours = slice(rows.start * 3, rows.stop * 3)
        torch.manual_seed(7)
        with DrawsOfPart(rows, 4):
            assert torch.equal(torch.multinomial(probabilities[ours], num_samples=1), whole[ours])


def test_one_series_that_does_not_fit_is_an_error(
    bolt: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = with_little_memory(bolt, monkeypatch, 0, CUDA_ERROR)
    with pytest.raises(NotEnoughMemoryError, match="memory"):
        forecast(bolt, contexts(4), 2)
    assert sizes == [4, 2, 1]


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    bolt: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = with_little_memory(bolt, monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        forecast(bolt, contexts(4), 2)
    assert sizes == [4]


def test_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)  # more than any address space has
    assert memory_ran_out(caught.value)
    assert memory_ran_out(CUDA_ERROR)
    assert memory_ran_out(MemoryError())
    of_windows = "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    assert memory_ran_out(RuntimeError(of_windows))
    assert not memory_ran_out(RuntimeError("out of range"))
    assert not memory_ran_out(ValueError())


def test_parts_cover_every_series_once() -> None:
    seen: list[slice] = []

    def compute(rows: slice) -> np.ndarray:
        seen.append(rows)
        return np.arange(rows.start, rows.stop, dtype=np.float32)

    assert Parts(3).compute(8, compute).tolist() == list(range(8))
    assert seen == [slice(0, 3), slice(3, 6), slice(6, 8)]


@pytest.mark.parametrize(("family", "most"), [("bolt", 40), ("t5", 32)])
def test_automatic_batches_follow_the_free_memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str, most: int
) -> None:
    pipeline = request.getfixturevalue(family)
    default = arrays(forecast(pipeline, contexts(40), 4))
    longest = max(map(len, contexts(40)))
    # Chronos-T5 keeps the batches of 32 that its random numbers depend on.
    for fit, largest in ((0, 1), (5, 5), (10**6, most)):
        with monkeypatch.context() as patch:
            with cross_attention_shared(pipeline):  # as where the batches are chosen
                free = 2 * fit * forecast_bytes(pipeline, longest, 4, None)
            patch.setattr(batching, "free_bytes", lambda _, free=free: free)
            sizes = with_little_memory(pipeline, patch, 10**6, CUDA_ERROR)
            found = arrays(forecast(pipeline, contexts(40), 4, batch_size="auto"))
        np.testing.assert_allclose(found, default, rtol=1e-3, atol=1e-3)
        assert max(sizes) == largest


def test_memory_estimate_grows_with_model_and_workload(
    t5: BaseChronosPipeline, bolt: BaseChronosPipeline
) -> None:
    base = forecast_bytes(t5, 32, 8, 4)
    assert forecast_bytes(t5, 64, 8, 4) > base
    assert forecast_bytes(t5, 32, 16, 4) > base
    assert forecast_bytes(t5, 32, 8, 8) > 1.3 * base
    assert forecast_bytes(t5, 640, 8, 4) == forecast_bytes(t5, 64, 8, 4)  # it reads 64 steps
    assert forecast_bytes(bolt, 32, 32, None) > 5 * forecast_bytes(bolt, 32, 16, None)
    assert series_that_fit(t5, 64, 8, None) == 256  # of a model this small, the most there is


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5", "", "--5", "2000000", "9" * 5000])
def test_batch_sizes_in_words(text: str) -> None:
    assert parse_batch_size("64") == 64
    assert parse_batch_size("auto") == "auto"
    with pytest.raises(UsageError, match=r"^batch_size is .*'auto'\.$"):
        parse_batch_size(text)
    with pytest.raises(ValidationError) as refused:
        ProbeConfig.model_validate({"batch_size": text})
    assert [problem["loc"] for problem in refused.value.errors()] == [("batch_size",)]
    assert ProbeConfig.model_validate({"batch_size": "64"}).batch_size == 64


# --- processes ------------------------------------------------------------------------------------


def test_processes_share_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Processes()
    assert (alone.is_main, alone.count, alone.device("cuda")) == (True, 1, "cuda")
    assert alone.gather({1: "a"}) == {1: "a"}
    assert alone.agree(lambda: 5) == 5
    for name, value in (("RANK", 1), ("WORLD_SIZE", 3), ("LOCAL_RANK", 1)):
        monkeypatch.setenv(name, str(value))
    second = Processes()
    assert [second.has(position) for position in range(6)] == [False, True, False] * 2
    assert (second.is_main, second.device("cuda"), second.device("cpu")) == (False, "cuda:1", "cpu")


@pytest.mark.slow
def test_two_processes_score_as_one_bit_for_bit(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tscompress = str(Path(sys.executable).with_name("tscompress"))

    def run(*launcher: str, output: Path) -> dict[str, Any]:
        command = [
            *launcher, tscompress, "evaluate", str(checkpoints["chronos-t5"]),
            "--dataset", "monash_m1_yearly", "--dataset", "monash_m3_yearly", "--max-series", "11",
            "--batch-size", "2", "--num-samples", "3", "--no-cache", "--output", str(output),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ("2 processes share the batches" in done.stderr) == (len(launcher) > 1)
        content: dict[str, Any] = json.loads(output.read_text())["result"]
        for row in content["rows"]:
            del row["seconds"]
        return content

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node", "2"]  # fmt: skip
    alone = run(sys.executable, output=tmp_path / "alone.json")
    assert run(*torchrun, output=tmp_path / "both.json") == alone


# --- evaluate -------------------------------------------------------------------------------------


def test_evaluate_a_model(t5: BaseChronosPipeline) -> None:
    seen: list[str] = []

    def run(seed: int, on_dataset: Callable[[DatasetScore], None] | None = None) -> Any:
        return evaluate_pipeline(
            t5,
            name="tiny",
            max_series=4,
            datasets=["monash_m1_yearly", "monash_m3_yearly"],
            batch_size=2,
            seed=seed,
            num_samples=5,
            on_dataset=on_dataset,
        )

    first = run(0, lambda row: seen.append(row.dataset))
    assert seen == ["monash_m1_yearly", "monash_m3_yearly"]
    assert [row.series_count for row in first.rows] == [4, 4]
    assert all(np.isfinite([row.MASE, row.WQL]).all() and row.seconds > 0 for row in first.rows)
    pd.testing.assert_frame_equal(run(0).frame(), first.frame(), check_exact=True)
    assert not run(1).frame()["WQL"].equals(first.frame()["WQL"])


def test_progress_is_told_within_a_dataset(t5: BaseChronosPipeline) -> None:
    told: list[tuple[str, int, int]] = []
    evaluate_pipeline(
        t5, name="tiny", max_series=3, datasets=YEARLY, batch_size=2, seeds=(0, 1), num_samples=2,
        on_progress=lambda *step: told.append(step),
    )  # fmt: skip
    assert {(stage, total) for stage, _, total in told} == {("tiny on monash_m1_yearly", 6)}
    assert list(dict.fromkeys(done for _, done, _ in told)) == [0, 2, 3, 5, 6]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_results_are_read_as_shells_redirect_them(encoding: str, tmp_path: Path) -> None:
    """PowerShell writes UTF-16."""
    result = evaluate_pipeline("seasonal-naive", name="a", max_series=2, datasets=YEARLY)
    (tmp_path / "scores.json").write_text(results_json(result.to_dict()), encoding=encoding)
    assert EvaluationResult.load(tmp_path / "scores.json").frame().equals(result.frame())


def test_a_narrow_terminal_cuts_no_figure() -> None:
    first = evaluate_pipeline("seasonal-naive", name="a", max_series=8, datasets=YEARLY)
    comparison = compare_results([first, first.model_copy(update={"model": "b"})])
    for width in (70, 110):
        console = Console(width=width, file=StringIO())
        for table in comparison_tables(comparison):
            console.print(table)
        printed = console.file.getvalue()
        assert "…" not in printed
        assert printed.count("(1.0000–1.0000)") >= 4


def test_evaluate_quantile_models(bolt: BaseChronosPipeline, chronos2: Chronos2Pipeline) -> None:
    for pipeline in (bolt, chronos2):
        (row,) = evaluate_pipeline(pipeline, name="tiny", datasets=YEARLY, max_series=3).rows
        assert np.isfinite([row.MASE, row.WQL]).all()


def test_unknown_models_and_options_are_refused() -> None:
    with pytest.raises(UsageError, match="'seasonal-naive'"):
        evaluate_pipeline("amazon/chronos-t5-tiny", name="x")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="no suite 'nope'"):
        evaluate_pipeline("seasonal-naive", "nope", name="x")
    with pytest.raises(DataError, match="is missing"):
        evaluate_pipeline("seasonal-naive", name="x", root="/nonexistent")


# --- results --------------------------------------------------------------------------------------


def test_csv_has_the_published_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scores.csv"
    result("m", {"b": (1.5, 0.25), "A": (2.0, 0.5)}).to_csv(path)
    assert path.read_text() == '"dataset",model,MASE,WQL\nA,m,2.0,0.5\nb,m,1.5,0.25\n'
    assert [file.name for file in path.parent.iterdir()] == ["scores.csv"]


def test_empty_csv_has_the_header(tmp_path: Path) -> None:
    result("m", {}).to_csv(tmp_path / "scores.csv")
    assert (tmp_path / "scores.csv").read_text() == '"dataset",model,MASE,WQL\n'


def test_result_survives_a_dict() -> None:
    original = result("m", {"a": (1.5, 0.25)})
    assert EvaluationResult.from_dict(original.to_dict()) == original
    with pytest.raises(DataError, match="not an evaluation result"):
        EvaluationResult.from_dict(original.to_dict() | {"extra": 1})


def test_results_survive_a_file(tmp_path: Path) -> None:
    kept = evaluate_pipeline("seasonal-naive", name="naive", datasets=YEARLY, max_series=3)
    assert kept.rows[0].series is not None
    kept.save(tmp_path / "scores.json")
    assert EvaluationResult.load(tmp_path / "scores.json") == kept
    assert EvaluationResult.load(tmp_path) == kept
    short = EvaluationResult.from_dict(kept.to_dict(series=False))
    assert short.rows[0].series is None
    assert short.frame().equals(kept.frame())


def test_results_of_before_there_were_series_are_read(tmp_path: Path) -> None:
    old = {
        "suite": "offline",
        "model": "m",
        "rows": [
            {"dataset": "a", "model": "m", "MASE": 1.0, "WQL": 0.5, "series_count": 3,
             "seconds": 0.1}
        ],
    }  # fmt: skip
    (tmp_path / "scores.json").write_text(json.dumps({"result": old, "relative_to": {}}))
    loaded = EvaluationResult.load(tmp_path)
    assert loaded.rows[0].series is None
    assert loaded.to_dict() == old


def test_lists_of_numbers_are_one_line_and_strings_stay() -> None:
    content = {"a [ 1 ]": [1, 2.5], "b": [], "c": [[1, 2], [3]], "d": [{"e": [1]}], "f": "[\n1]"}
    text = results_json(content)
    assert json.loads(text) == content
    assert "[1, 2.5]" in text


def test_contributions_of_other_series_are_refused() -> None:
    kept = evaluate_pipeline(
        "seasonal-naive", name="naive", datasets=YEARLY, max_series=3
    ).to_dict()
    kept["rows"][0]["series_count"] = 4
    with pytest.raises(DataError, match="series_count is 4"):
        EvaluationResult.from_dict(kept)
    kept["rows"][0]["series"]["quantile_loss"] = [1.0]
    with pytest.raises(DataError, match="the columns differ in length"):
        EvaluationResult.from_dict(kept)


def test_relative_is_the_geometric_mean_of_ratios() -> None:
    ours = result("ours", {"a": (1.0, 0.2), "b": (4.0, 0.3)})
    theirs = result("theirs", {"b": (2.0, 0.1), "a": (2.0, 0.6)})
    scores = relative(ours, theirs)
    assert scores["MASE"] == pytest.approx(1.0)
    assert scores["WQL"] == pytest.approx(1.0)
    assert scores["datasets"]["a"] == {"MASE": 0.5, "WQL": pytest.approx(1 / 3)}
    assert relative(ours, ours)["MASE"] == 1.0


@pytest.mark.parametrize(
    "other", [result("other", {"b": (1.0, 1.0)}), result("other", {"a": (1.0, 1.0)}, series=4)]
)
def test_relative_needs_the_same_series(other: EvaluationResult) -> None:
    with pytest.raises(UsageError, match="not evaluated on the same series"):
        relative(result("ours", {"a": (1.0, 1.0)}), other)
    with pytest.raises(UsageError, match="no dataset"):
        relative(result("ours", {}), result("other", {}))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_relative_needs_positive_scores(bad: float) -> None:
    with pytest.raises(DataError, match="WQL of 'a'"):
        relative(result("ours", {"a": (1.0, 1.0)}), result("other", {"a": (1.0, bad)}))


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ((math.nan, 1.0), "MASE .* season before.*--seasonality"),
        ((1.0, math.inf), "WQL .* Leave out datasets whose values to forecast are all 0"),
        ((1.0, 0.0), "WQL .* Leave out"),
    ],
)
def test_a_score_that_is_undefined_has_its_cause(scores: tuple[float, float], says: str) -> None:
    with pytest.raises(DataError, match=says):
        relative(result("ours", {"a": scores}), result("other", {"a": scores}))


def test_a_perfect_seasonal_naive_has_its_remedy() -> None:
    naive = result("seasonal-naive", {"a": (1.0, 0.0)})
    with pytest.raises(DataError, match=r"WQL of 'a' .*--seasonality"):
        relative(result("ours", {"a": (1.0, 0.2)}), naive)


def test_aggregate_has_the_published_columns() -> None:
    frame = aggregate(result("ours", {"a": (1.0, 0.2)}), result("naive", {"a": (2.0, 0.8)}))
    assert frame.to_csv(index=False) == (
        "benchmark,metric,value\nzero-shot,MASE,0.5\nzero-shot,WQL,0.25\n"
    )


def test_table_shows_scores_ratios_and_means() -> None:
    ours = result("small", {"a": (1.0, 0.2), "b": (4.0, 0.3)})
    original = result("large", {"a": (2.0, 0.4), "b": (2.0, 0.3)})
    naive = result("naive", {"a": (4.0, 0.4), "b": (4.0, 0.6)})
    console = Console(file=StringIO(), width=120)
    console.print(evaluation_table(ours, against=original, baseline=naive))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    def numbers(line: str) -> list[str]:
        return [word for word in line.split() if "." in word]

    row = next(line for line in lines if line.split()[:1] == ["b"])
    assert numbers(row) == ["4.000", "0.3000", "2.000", "1.000", "1.000", "0.500"]
    mean = next(line for line in lines if "geometric mean" in line)
    assert numbers(mean) == ["1.000", "0.707", "0.500", "0.500"]


def test_table_alone_has_no_mean_row() -> None:
    table = evaluation_table(result("small", {"a": (1.0, 0.2)}))
    assert not table.show_footer
    assert [column.header for column in table.columns] == ["dataset", "series", "MASE", "WQL"]
