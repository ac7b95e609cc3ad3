"""Forecast quality on an evaluation suite, by the protocol of the Chronos benchmark.

Each series is forecast once, over its last window. MASE and the weighted quantile loss (WQL) at the
levels 0.1 … 0.9 come from gluonts, and a model is summed up by the geometric mean over datasets of
its scores relative to a baseline (Ansari et al. 2024, "Chronos: Learning the Language of Time
Series", section 5.3).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline, ForecastType
from pydantic import BaseModel, ConfigDict, ValidationError
from rich import box
from rich.table import Table

from tscompress.errors import DataError, UsageError
from tscompress.files import write_text_atomically
from tscompress.suites import EvaluationDataset, find_suite, load_suite

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")
    from gluonts.dataset.split import split
    from gluonts.ev.metrics import MASE, MeanWeightedSumQuantileLoss
    from gluonts.model.evaluation import evaluate_forecasts
    from gluonts.model.forecast import Forecast, QuantileForecast, SampleForecast
    from gluonts.model.seasonal_naive import SeasonalNaivePredictor

QUANTILE_LEVELS = [float(level) for level in np.arange(0.1, 1.0, 0.1).round(1)]
SEASONAL_NAIVE = "seasonal-naive"
METRICS = ("MASE", "WQL")

_STRICT = ConfigDict(extra="forbid", frozen=True)


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


class DatasetScore(BaseModel):
    """Scores of one model on one dataset."""

    model_config = _STRICT

    dataset: str
    model: str
    MASE: float
    WQL: float
    series_count: int
    seconds: float
    """Wall time of forecasting, without reading data and computing metrics."""


class EvaluationResult(BaseModel):
    """Scores of one model on a suite, in the suite's order."""

    model_config = _STRICT

    suite: str
    model: str
    rows: tuple[DatasetScore, ...]

    def frame(self) -> pd.DataFrame:
        """The columns ``dataset, model, MASE, WQL`` of the published tables, sorted by dataset."""
        columns = ["dataset", "model", *METRICS]
        frame = pd.DataFrame([row.model_dump(include=set(columns)) for row in self.rows])
        return frame.reindex(columns=columns).sort_values("dataset", ignore_index=True)

    def to_csv(self, path: str | Path) -> None:
        """Write :meth:`frame`; the file is replaced in one step or not at all."""
        write_text_atomically(Path(path), self.frame().to_csv(index=False, lineterminator="\n"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; :meth:`from_dict` reads it back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvaluationResult:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        DataError
            A key is missing, unknown or of the wrong type.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"not an evaluation result: {reason}.") from error


# --------------------------------------------------------------------------------------------------
# Forecasts
# --------------------------------------------------------------------------------------------------


class SeasonalNaive:
    """Repeats the last observed season; every quantile is that one value.

    This is the baseline of the published tables: gluonts' predictor, which carries the last value
    forward over missing ones and falls back to the mean of a context shorter than a season.
    """

    def forecast(self, dataset: EvaluationDataset) -> list[Forecast]:
        """One forecast for each series."""
        predictor = SeasonalNaivePredictor(
            prediction_length=dataset.horizon, season_length=dataset.seasonality
        )
        return list(predictor.predict(_backtest(dataset).input))


def forecast(
    pipeline: BaseChronosPipeline,
    contexts: Sequence[npt.ArrayLike],
    horizon: int,
    seed: int = 0,
    batch_size: int = 32,
    *,
    num_samples: int | None = None,
    stream: str = "",
    starts: Sequence[pd.Period] | None = None,
) -> list[Forecast]:
    """Forecast series with a Chronos pipeline.

    Batches hold series of similar length and depend on nothing but the lengths and ``batch_size``.
    The random numbers of a batch depend on nothing but ``seed``, ``stream`` and its position, so
    that two models are compared on common random numbers; the global generator is left as it was.

    Parameters
    ----------
    pipeline
        Chronos-T5, Chronos-Bolt or Chronos-2.
    contexts
        Each ``[T_i]``; missing values are NaN.
    horizon
        Steps to forecast.
    seed, stream
        Select the random numbers; ``stream`` is the name of the dataset.
    num_samples
        Sample paths of a Chronos-T5; by default its own number. Quantile models have none.
    starts
        Period of the first value of each context, for the dates of the forecasts.

    Returns
    -------
    list of Forecast
        In the order of ``contexts``: raw samples for Chronos-T5, the quantiles 0.1 … 0.9 for the
        others. Quantiles of Chronos-T5 are not forecast directly: gluonts would take nine of them
        for nine samples and shift every level.

    Raises
    ------
    UsageError
        ``num_samples`` for a model that does not sample, or a number below 1.
    """
    _check_forecast_options(pipeline, batch_size, num_samples)
    tensors = [torch.as_tensor(np.asarray(values, dtype=np.float32)) for values in contexts]
    lengths = [len(values) for values in tensors]
    if starts is None:
        starts = [pd.Period("1970-01-01", freq="D")] * len(tensors)
    forecasts: dict[int, Forecast] = {}
    for position, indices in enumerate(_batches_by_length(lengths, batch_size)):
        with _common_random_numbers(pipeline, f"{seed}/{stream}/{position}"):
            output = _predict_batch(pipeline, [tensors[i] for i in indices], horizon, num_samples)
        for index, values in zip(indices, output, strict=True):
            forecasts[index] = _to_gluonts(pipeline, values, starts[index] + lengths[index])
    return [forecasts[index] for index in range(len(tensors))]


def _check_forecast_options(
    pipeline: BaseChronosPipeline, batch_size: int, num_samples: int | None
) -> None:
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1.")
    if num_samples is None:
        return
    if pipeline.forecast_type != ForecastType.SAMPLES:
        raise UsageError(
            f"{type(pipeline).__name__} forecasts quantiles and draws no samples; "
            "leave num_samples out."
        )
    if num_samples < 1:
        raise UsageError(f"num_samples is {num_samples}; it must be at least 1.")


def _batches_by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices in batches, shortest series first; equal lengths keep their order."""
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]


@contextlib.contextmanager
def _common_random_numbers(pipeline: BaseChronosPipeline, key: str) -> Iterator[None]:
    """Seed torch from ``key`` inside the block, and restore its generators after it."""
    device = next(pipeline.inner_model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    digest = hashlib.sha256(key.encode()).digest()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: seeds are signed
        yield


def _predict_batch(
    pipeline: BaseChronosPipeline,
    contexts: list[torch.Tensor],
    horizon: int,
    num_samples: int | None,
) -> npt.NDArray[np.float32]:
    """Samples ``[B, num_samples, horizon]`` or quantiles ``[B, 9, horizon]`` of one batch."""
    with warnings.catch_warnings():
        # Models warn about horizons longer than their own; here the suite sets the horizon.
        warnings.filterwarnings("ignore", message="We recommend keeping prediction length")
        if pipeline.forecast_type == ForecastType.SAMPLES:
            samples = pipeline.predict(contexts, prediction_length=horizon, num_samples=num_samples)
            return np.asarray(samples, dtype=np.float32)
        # Chronos-2 cuts what it is given into batches of its own size.
        own = {"batch_size": len(contexts)} if isinstance(pipeline, Chronos2Pipeline) else {}
        quantiles, _ = pipeline.predict_quantiles(
            contexts, prediction_length=horizon, quantile_levels=QUANTILE_LEVELS, **own
        )
    if isinstance(quantiles, list):  # Chronos-2: [variates, horizon, 9] for each series
        quantiles = torch.cat(quantiles)
    return np.asarray(quantiles.swapaxes(-1, -2), dtype=np.float32)


def _to_gluonts(
    pipeline: BaseChronosPipeline, values: npt.NDArray[np.float32], start: pd.Period
) -> Forecast:
    if pipeline.forecast_type == ForecastType.SAMPLES:
        return SampleForecast(samples=values, start_date=start)
    keys = [str(level) for level in QUANTILE_LEVELS]
    return QuantileForecast(forecast_arrays=values, start_date=start, forecast_keys=keys)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def evaluate(
    model: BaseChronosPipeline | Literal["seasonal-naive"],
    suite: str | Path = "offline",
    *,
    name: str,
    max_series: int | None = None,
    datasets: Iterable[str] | None = None,
    batch_size: int = 32,
    seed: int = 0,
    num_samples: int | None = None,
    root: str | Path | None = None,
    on_dataset: Callable[[DatasetScore], None] | None = None,
) -> EvaluationResult:
    """Score a model on a suite.

    Parameters
    ----------
    model
        A Chronos pipeline, or ``"seasonal-naive"``.
    suite, max_series, datasets, root
        What to forecast; see :func:`tscompress.suites.load_suite`.
    name
        Goes into the column ``model`` of the result.
    batch_size, seed, num_samples
        See :func:`forecast`. Two models are comparable when all three are the same; seasonal naive
        depends on none of them.
    on_dataset
        Called with the score of each dataset as soon as it is there.

    Raises
    ------
    UsageError
        An option is not allowed, or ``model`` is neither of the two.
    DataError, OfflineError
        A dataset cannot be read.
    """
    if isinstance(model, str) and model != SEASONAL_NAIVE:
        raise UsageError(
            f"model is {model!r}; expected a loaded Chronos pipeline or {SEASONAL_NAIVE!r}."
        )
    rows = []
    for dataset in load_suite(suite, max_series, datasets, root=root):
        started = time.perf_counter()
        if isinstance(model, str):
            forecasts = SeasonalNaive().forecast(dataset)
        else:
            forecasts = forecast(
                model,
                dataset.contexts,
                dataset.horizon,
                seed,
                batch_size,
                num_samples=num_samples,
                stream=dataset.name,
                starts=dataset.starts,
            )
        seconds = time.perf_counter() - started
        row = DatasetScore(
            dataset=dataset.name,
            model=name,
            **score_forecasts(forecasts, dataset),
            series_count=len(dataset.series),
            seconds=seconds,
        )
        rows.append(row)
        if on_dataset is not None:
            on_dataset(row)
    return EvaluationResult(suite=find_suite(suite).name, model=name, rows=tuple(rows))


def score_forecasts(forecasts: Iterable[Forecast], dataset: EvaluationDataset) -> dict[str, float]:
    """MASE and WQL of forecasts, over all series and steps of a dataset.

    MASE is the mean absolute error of the median in units of the context's seasonal error
    (steps whose seasonal error is zero are left out); WQL is the mean over the levels of the
    quantile loss, summed over series and steps, relative to the sum of absolute labels. Missing
    labels are left out of both.
    """
    # gluonts opens a progress bar that cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        scores = evaluate_forecasts(
            forecasts,
            test_data=_backtest(dataset),
            metrics=[MASE(), MeanWeightedSumQuantileLoss(QUANTILE_LEVELS)],
            seasonality=dataset.seasonality,
            batch_size=5000,
        ).iloc[0]
    return {
        "MASE": float(scores["MASE[0.5]"]),
        "WQL": float(scores["mean_weighted_sum_quantile_loss"]),
    }


def _backtest(dataset: EvaluationDataset) -> Any:
    """The dataset as gluonts' pairs of input and label."""
    _, template = split(dataset.entries(), offset=-dataset.horizon)
    return template.generate_instances(dataset.horizon)


# --------------------------------------------------------------------------------------------------
# Comparison
# --------------------------------------------------------------------------------------------------


def relative(result: EvaluationResult, baseline: EvaluationResult) -> dict[str, Any]:
    """Scores divided by those of a baseline; below 1 is better than it.

    Returns
    -------
    dict
        ``MASE`` and ``WQL``: geometric means over the datasets. ``datasets``: the two ratios of
        each dataset, in the order of ``result``.

    Raises
    ------
    UsageError
        The two do not cover the same series of the same datasets.
    DataError
        A ratio is not finite and positive.
    """
    reference = {row.dataset: row for row in baseline.rows}
    _check_same_series(result, baseline)
    ratios = {
        row.dataset: {metric: _ratio(row, reference[row.dataset], metric) for metric in METRICS}
        for row in result.rows
    }
    means = {metric: _geometric_mean([r[metric] for r in ratios.values()]) for metric in METRICS}
    return {**means, "datasets": ratios}


def _check_same_series(result: EvaluationResult, baseline: EvaluationResult) -> None:
    ours = {row.dataset: row.series_count for row in result.rows}
    theirs = {row.dataset: row.series_count for row in baseline.rows}
    if ours != theirs or not ours:
        differing = sorted(d for d in {*ours, *theirs} if ours.get(d) != theirs.get(d))
        raise UsageError(
            f"{result.model!r} and {baseline.model!r} were not evaluated on the same series: "
            f"{differing or 'no dataset'}; evaluate both with the same suite, datasets and "
            "max_series."
        )


def _ratio(row: DatasetScore, reference: DatasetScore, metric: str) -> float:
    ours, theirs = getattr(row, metric), getattr(reference, metric)
    if not (math.isfinite(ours) and math.isfinite(theirs) and ours > 0 and theirs > 0):
        raise DataError(
            f"{metric} of {row.dataset!r} is {ours:g} for {row.model!r} and {theirs:g} for "
            f"{reference.model!r}; a ratio needs two finite positive scores."
        )
    return float(ours / theirs)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def aggregate(result: EvaluationResult, seasonal_naive: EvaluationResult) -> pd.DataFrame:
    """Scores relative to seasonal naive as ``benchmark, metric, value``, as published."""
    scores = relative(result, seasonal_naive)
    rows = [(result.suite, metric, scores[metric]) for metric in METRICS]
    return pd.DataFrame(rows, columns=["benchmark", "metric", "value"])


def evaluation_table(
    result: EvaluationResult,
    against: EvaluationResult | None = None,
    baseline: EvaluationResult | None = None,
) -> Table:
    """The scores of each dataset, and their ratios to those of up to two other results.

    Parameters
    ----------
    against
        The model that ``result`` replaces, usually the original.
    baseline
        What both are measured by, usually seasonal naive.
    """
    references = [reference for reference in (against, baseline) if reference is not None]
    table = Table(
        title=f"{result.model} on {result.suite}",
        caption=", ".join(f"({i}) = {r.model}" for i, r in enumerate(references, start=1)) or None,
        show_footer=bool(references),
        box=box.SIMPLE_HEAD,
    )
    table.add_column("dataset", footer="geometric mean", no_wrap=True)
    table.add_column("series", justify="right")
    for metric in METRICS:
        table.add_column(metric, justify="right")
    comparisons = [relative(result, reference) for reference in references]
    for index, comparison in enumerate(comparisons, start=1):
        for metric in METRICS:
            header = f"{metric}\n/ ({index})"
            table.add_column(header, justify="right", footer=f"{comparison[metric]:.3f}")
    for row in result.rows:
        ratios = [
            f"{comparison['datasets'][row.dataset][metric]:.3f}"
            for comparison in comparisons
            for metric in METRICS
        ]
        scores = [f"{row.MASE:.3f}", f"{row.WQL:.4f}"]
        table.add_row(row.dataset, str(row.series_count), *scores, *ratios)
    return table
