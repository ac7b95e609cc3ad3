"""Forecasts by a Chronos pipeline or seasonal naive for the series of a dataset."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from chronos import BaseChronosPipeline

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import UsageError
from tscompress.evaluation.batching import (
    DEFAULT_BATCH_SIZE,
    BatchSize,
    DrawsOfPart,
    Parts,
    Processes,
    batch_sizes,
    batches_by_length,
    check_batch_size,
    common_random_numbers,
    part_of_batch,
)
from tscompress.evaluation.joint import predict_tasks
from tscompress.evaluation.metrics import backtest
from tscompress.families.covariates import Covariates, Joint
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.quiet import quiet_horizons
from tscompress.layers.shared_cross_attention import cross_attention_shared

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")
    from gluonts.model.forecast import Forecast, QuantileForecast, SampleForecast
    from gluonts.model.seasonal_naive import SeasonalNaivePredictor


class SeasonalNaive:
    """Repeats the last observed season; every quantile is the same value.

    This is the baseline of the published tables: gluonts' predictor, which fills missing values
    forward and forecasts the mean of a context shorter than a season.
    """

    def forecast(self, dataset: EvaluationDataset) -> list[Forecast]:
        """One forecast for each series."""
        predictor = SeasonalNaivePredictor(
            prediction_length=dataset.horizon, season_length=dataset.seasonality
        )
        return list(predictor.predict(backtest(dataset).input))


def forecast(
    pipeline: BaseChronosPipeline,
    contexts: Sequence[npt.ArrayLike],
    horizon: int,
    seed: int = 0,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    *,
    num_samples: int | None = None,
    stream: str = "",
    starts: Sequence[pd.Period] | None = None,
) -> list[Forecast]:
    """Forecast series with a Chronos pipeline.

    Batches have series of similar length and depend only on the lengths and ``batch_size``. The
    random numbers of a batch depend only on ``seed``, ``stream`` and its position, so two models
    are compared on common random numbers; the global generator is restored. A batch that does not
    fit into memory is computed in parts with the same random numbers, the processes of ``torchrun``
    share the batches, and the paths of a Chronos-T5 share the cross-attention keys and values of
    their series: all change forecasts only by rounding, which in an int8 graph depends on all
    series of a call.

    Parameters
    ----------
    pipeline
        Chronos-T5, Chronos-Bolt or Chronos-2.
    contexts
        Each ``[T_i]``; missing values are NaN.
    horizon
        Steps to forecast.
    seed, stream
        Seeds of the random numbers; ``stream`` is the name of the dataset.
    batch_size
        Series in a batch. ``auto``: as many as fit into free memory, by an estimate; Chronos-T5
        keeps the random numbers of batches of 32.
    num_samples
        Sample paths of a Chronos-T5; None: its default. Quantile models have none.
    starts
        Period of the first value of each context, for the dates of the forecasts.

    Returns
    -------
    list of Forecast
        In the order of ``contexts``: raw samples for Chronos-T5, the quantiles 0.1 … 0.9 for the
        others. Chronos-T5 has samples rather than quantiles: gluonts would take nine quantiles for
        nine samples and shift every level.

    Raises
    ------
    UsageError
        ``num_samples`` for a model that does not sample, or a number below 1.
    NotEnoughMemoryError
        A single series does not fit.
    """
    values = predict(
        pipeline, contexts, horizon, seed, batch_size, num_samples=num_samples, stream=stream
    )
    if starts is None:
        starts = [pd.Period("1970-01-01", freq="D")] * len(contexts)
    return [
        _to_gluonts(pipeline, of_series, start + np.size(context))
        for of_series, start, context in zip(values, starts, contexts, strict=True)
    ]


def predict(
    pipeline: BaseChronosPipeline,
    contexts: Sequence[npt.ArrayLike],
    horizon: int,
    seed: int = 0,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    *,
    num_samples: int | None = None,
    stream: str = "",
    covariates: Sequence[Covariates] | None = None,
    on_series: Callable[[int], None] = lambda done: None,
) -> npt.NDArray[np.float32]:
    """Forecasts as in :func:`forecast`, as one array.

    Parameters
    ----------
    covariates
        N, each with as many steps as its context and ``horizon``, all with equal numbers of
        covariates and of those known ahead; None: without any.
    on_series
        Called after each batch with the number of series up to its end.

    Returns
    -------
    ndarray
        Samples ``[N, num_samples, horizon]`` of Chronos-T5, quantiles 0.1 … 0.9
        ``[N, 9, horizon]`` of the others.

    Raises
    ------
    UsageError
        As for :func:`forecast`; or covariates for a model that reads none.
    """
    check_sampling(pipeline, batch_size, num_samples)
    tensors = [torch.as_tensor(np.asarray(values, dtype=np.float32)) for values in contexts]
    lengths = [len(values) for values in tensors]
    processes = Processes()
    input_rows = 1 + len(covariates[0].past) if covariates else 1
    found: dict[int, npt.NDArray[np.float32]] = {}
    done = 0
    with cross_attention_shared(pipeline):
        size, at_once = processes.agree(
            lambda: batch_sizes(pipeline, lengths, horizon, batch_size, num_samples, input_rows)
        )
        parts = Parts(at_once)
        for position, indices in enumerate(batches_by_length(lengths, size)):
            done += len(indices)
            if not processes.has(position):
                continue
            batch = [tensors[index] for index in indices]
            beside = None if covariates is None else [covariates[index] for index in indices]
            key = f"{seed}/{stream}/{position}"
            output = parts.compute(
                len(batch),
                partial(_predict_part, pipeline, batch, beside, horizon, num_samples, key),
            )
            found |= dict(zip(indices, output, strict=True))
            on_series(done)
    found = processes.gather(found)
    return np.stack([found[index] for index in range(len(tensors))])


def check_sampling(
    pipeline: BaseChronosPipeline, batch_size: BatchSize, num_samples: int | None
) -> None:
    """Refuse what :func:`forecast` does not take.

    Raises
    ------
    UsageError
        ``batch_size`` or ``num_samples`` is out of range, the model draws no samples, or it does
        not forecast the quantiles that scores are of.
    """
    check_batch_size(batch_size)
    draws = draws_samples(pipeline)
    known = [] if draws else [float(level) for level in pipeline.quantiles]
    if not draws and not all(np.isclose(level, known).any() for level in QUANTILE_LEVELS):
        # Stock pipelines of Bolt would give others under these names, without a word.
        raise UsageError(
            f"the model forecasts the quantiles {', '.join(f'{level:g}' for level in known)}; "
            f"scores are of {QUANTILE_LEVELS[0]:g}, 0.2, ..., {QUANTILE_LEVELS[-1]:g}."
        )
    if num_samples is None:
        return
    if not draws:
        raise UsageError(
            f"{type(pipeline).__name__} forecasts quantiles, not samples; leave num_samples out."
        )
    if num_samples < 1:
        raise UsageError(f"num_samples is {num_samples}; it must be at least 1.")


def _predict_part(
    pipeline: BaseChronosPipeline,
    batch: Sequence[torch.Tensor],
    covariates: Sequence[Covariates] | None,
    horizon: int,
    num_samples: int | None,
    key: str,
    rows: slice,
) -> npt.NDArray[np.float32]:
    """Forecasts of some rows of a batch, equal to those of :func:`_predict_batch`."""
    whole = rows.stop - rows.start == len(batch)
    draws = contextlib.nullcontext() if whole else DrawsOfPart(rows, len(batch))
    contexts = part_of_batch(batch, rows)
    beside = None if covariates is None else list(map(_as_long, covariates[rows], contexts))
    with common_random_numbers(pipeline, key), draws:
        return _predict_batch(pipeline, contexts, beside, horizon, num_samples)


def _as_long(covariates: Covariates, context: torch.Tensor) -> Covariates:
    """Covariates padded on the left as their series was."""
    missing = len(context) - covariates.past.shape[1]
    past = torch.nn.functional.pad(covariates.past, (missing, 0), value=torch.nan)
    return covariates._replace(past=past)


def _predict_batch(
    pipeline: BaseChronosPipeline,
    contexts: list[torch.Tensor],
    covariates: Sequence[Covariates] | None,
    horizon: int,
    num_samples: int | None,
) -> npt.NDArray[np.float32]:
    """Samples ``[B, num_samples, horizon]`` or quantiles ``[B, 9, horizon]`` of one batch."""
    if covariates is not None:
        each = zip(contexts, covariates, strict=True)
        tasks = [Joint(context[None], beside) for context, beside in each]
        return predict_tasks(pipeline, tasks, horizon)[:, 0]
    family = adapter_of_pipeline(pipeline)
    with quiet_horizons():
        if family.draws_samples:
            samples = family.predict(pipeline, contexts, horizon, num_samples)
            return np.asarray(samples, dtype=np.float32)
        quantiles = family.quantiles(pipeline, contexts, horizon, QUANTILE_LEVELS)
    return np.asarray(quantiles.swapaxes(-1, -2), dtype=np.float32)


def _to_gluonts(
    pipeline: BaseChronosPipeline, values: npt.NDArray[np.float32], start: pd.Period
) -> Forecast:
    if draws_samples(pipeline):
        return SampleForecast(samples=values, start_date=start)
    keys = [str(level) for level in QUANTILE_LEVELS]
    return QuantileForecast(forecast_arrays=values, start_date=start, forecast_keys=keys)


def draws_samples(pipeline: BaseChronosPipeline) -> bool:
    """Whether forecasts are random sample paths; otherwise they are quantiles."""
    return adapter_of_pipeline(pipeline).draws_samples
