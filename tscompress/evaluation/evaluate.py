"""Forecast quality on an evaluation suite, by the protocol of the Chronos benchmark.

Each series is forecast once, over its last window. MASE and the weighted quantile loss (WQL) at the
levels 0.1 … 0.9 come from gluonts, and a model is summed up by the geometric mean over datasets of
its scores relative to a baseline (Ansari et al. 2024, "Chronos: Learning the Language of Time
Series", section 5.3).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from chronos import BaseChronosPipeline
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from rich import box
from rich.table import Table

from tscompress.data.suites import EvaluationDataset, Suite, find_suite, load_suite
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.batching import (
    AUTO,
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
from tscompress.evaluation.score_cache import ScoreCache, model_digest, score_key
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.files import write_text_atomically
from tscompress.io.untrusted import UnreadableFileError, regular_file

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")
    from gluonts.dataset.split import split
    from gluonts.ev.metrics import MASE, MeanWeightedSumQuantileLoss
    from gluonts.ev.ts_stats import seasonal_error
    from gluonts.model.evaluation import evaluate_forecasts
    from gluonts.model.forecast import Forecast, QuantileForecast, SampleForecast
    from gluonts.model.seasonal_naive import SeasonalNaivePredictor

QUANTILE_LEVELS = [float(level) for level in np.arange(0.1, 1.0, 0.1).round(1)]
SEASONAL_NAIVE = "seasonal-naive"
METRICS = ("MASE", "WQL")
SCORES_FILE = "scores.json"

Quantiles = npt.NDArray[np.floating[Any]]
"""``[N, 9, horizon]``: series, levels 0.1 … 0.9, steps."""

_STRICT = ConfigDict(extra="forbid", frozen=True)


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


class SeriesContributions(BaseModel):
    """What each series adds to the scores of its dataset, as columns of ``[N]`` numbers.

    WQL and MASE are ratios of sums over the series, so that these columns give them for any
    selection of series, or resample: that is what paired statistics are computed from.
    """

    model_config = _STRICT

    quantile_loss: tuple[float, ...]
    """Sum over the steps of the quantile loss, averaged over the levels 0.1 … 0.9."""
    absolute_label: tuple[float, ...]
    """Sum over the steps of |label|; the same for every model."""
    scaled_error: tuple[float, ...]
    """Sum over the steps of the median's absolute error in units of the seasonal error."""
    scaled_steps: tuple[int, ...]
    """Steps in ``scaled_error``: 0 where the seasonal error is zero; the same for every model."""

    @model_validator(mode="after")
    def _same_lengths(self) -> SeriesContributions:
        lengths = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns differ in length: {lengths}")
        return self

    def parts(self, metric: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Numerator and denominator of ``"WQL"`` or ``"MASE"``, each ``[N]``."""
        columns = {
            "WQL": (self.quantile_loss, self.absolute_label),
            "MASE": (self.scaled_error, self.scaled_steps),
        }
        over, under = columns[metric]
        return np.array(over, dtype=np.float64), np.array(under, dtype=np.float64)

    def score(self, metric: str) -> float:
        """``"WQL"`` or ``"MASE"`` of all the series; NaN or infinite where nothing counts."""
        over, under = self.parts(metric)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(over.sum() / under.sum())


class Sampling(BaseModel):
    """How sample paths were drawn; two models share random numbers where all three agree."""

    model_config = _STRICT

    seeds: tuple[int, ...]
    num_samples: int
    batch_size: int


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
    series: SeriesContributions | None = None
    """None in results of versions that did not keep it."""
    windows: int | None = None
    """Windows of each measured series, which ``series_count`` counts as so many; None: one."""
    cached: Literal[True] | None = None
    """True if an earlier run measured it: ``seconds`` are of that run."""

    @model_validator(mode="after")
    def _every_series(self) -> DatasetScore:
        if self.series is not None and len(self.series.quantile_loss) != self.series_count:
            raise ValueError(
                f"{len(self.series.quantile_loss)} series contribute, series_count is "
                f"{self.series_count}"
            )
        return self


class EvaluationResult(BaseModel):
    """Scores of one model on a suite, in the suite's order."""

    model_config = _STRICT

    suite: str
    model: str
    rows: tuple[DatasetScore, ...]
    sampling: Sampling | None = None
    """None for models that draw nothing, and in results of versions that did not keep it."""

    def frame(self) -> pd.DataFrame:
        """The columns ``dataset, model, MASE, WQL`` of the published tables, sorted by dataset."""
        columns = ["dataset", "model", *METRICS]
        frame = pd.DataFrame([row.model_dump(include=set(columns)) for row in self.rows])
        return frame.reindex(columns=columns).sort_values("dataset", ignore_index=True)

    def to_csv(self, path: str | Path) -> None:
        """Write :meth:`frame`; the file is replaced in one step or not at all."""
        write_text_atomically(Path(path), self.frame().to_csv(index=False, lineterminator="\n"))

    def to_dict(self, *, series: bool = True) -> dict[str, Any]:
        """Plain data, for JSON; :meth:`from_dict` reads it back.

        Parameters
        ----------
        series
            With what each series contributes, which is most of the data.
        """
        left_out = None if series else {"rows": {"__all__": {"series"}}}
        return self.model_dump(mode="json", exclude=left_out, exclude_none=True)

    def save(self, path: str | Path) -> None:
        """Write JSON with every series; the file is replaced in one step or not at all."""
        write_text_atomically(Path(path), results_json({"result": self.to_dict()}))

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

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Read what :meth:`save` or ``tscompress evaluate --output`` wrote.

        Parameters
        ----------
        path
            The JSON file, or the directory with ``scores.json`` in it.

        Raises
        ------
        DataError
            There is no such file, or it holds something else.
        """
        return load_results(path)[0]


def load_results(path: str | Path) -> tuple[EvaluationResult, ...]:
    """The result in a file and, where the file has one, the one it was compared with.

    Parameters
    ----------
    path
        See :meth:`EvaluationResult.load`. Files of versions that kept no series are read too.

    Raises
    ------
    DataError
        There is no such file, or it holds something else.
    """
    file = Path(path) / SCORES_FILE if Path(path).is_dir() else Path(path)
    try:
        regular_file(file)  # a pipe would hang
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if not isinstance(error, (OSError, UnreadableFileError)):
            reason = f"not JSON: {error}"
        raise DataError(
            f"{str(path)!r} holds no evaluation result ({file.name}: {reason}); give what "
            "`tscompress evaluate --output` wrote."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{str(path)!r} is not an evaluation result: it is no JSON object.")
    found = [content[key] for key in ("result", "against") if key in content] or [content]
    return tuple(EvaluationResult.from_dict(one) for one in found)


def results_json(content: Mapping[str, Any]) -> str:
    """JSON for people: indented, with each list of numbers on one line."""
    # Strings in JSON hold no line breaks, so that this matches lists alone.
    lists = re.compile(r"\[\n([^\[\]{}\"]*)\n\s*\]")
    text = json.dumps(content, indent=2)
    return lists.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


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
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    *,
    num_samples: int | None = None,
    stream: str = "",
    starts: Sequence[pd.Period] | None = None,
) -> list[Forecast]:
    """Forecast series with a Chronos pipeline.

    Batches hold series of similar length and depend on nothing but the lengths and ``batch_size``.
    The random numbers of a batch depend on nothing but ``seed``, ``stream`` and its position, so
    that two models are compared on common random numbers; the global generator is left as it was.
    A batch that does not fit into memory is computed in parts, which draw the same numbers, and
    the processes of ``torchrun`` share the batches: neither changes a forecast by more
    than rounding.

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
    batch_size
        Series in a batch. ``auto``: as many as fit into free memory, by an estimate; Chronos-T5
        keeps the draws of batches of 32.
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
) -> npt.NDArray[np.float32]:
    """What :func:`forecast` puts into gluonts' objects, as one array.

    Returns
    -------
    ndarray
        Samples ``[N, num_samples, horizon]`` of Chronos-T5, quantiles 0.1 … 0.9
        ``[N, 9, horizon]`` of the others.
    """
    _check_forecast_options(pipeline, batch_size, num_samples)
    tensors = [torch.as_tensor(np.asarray(values, dtype=np.float32)) for values in contexts]
    lengths = [len(values) for values in tensors]
    processes = Processes()
    size, at_once = processes.agree(
        lambda: batch_sizes(pipeline, lengths, horizon, batch_size, num_samples)
    )
    parts = Parts(at_once)
    found: dict[int, npt.NDArray[np.float32]] = {}
    for position, indices in enumerate(batches_by_length(lengths, size)):
        if not processes.has(position):
            continue
        batch = [tensors[index] for index in indices]
        key = f"{seed}/{stream}/{position}"
        output = parts.compute(
            len(batch), partial(_predict_part, pipeline, batch, horizon, num_samples, key)
        )
        found |= dict(zip(indices, output, strict=True))
    found = processes.gather(found)
    return np.stack([found[index] for index in range(len(tensors))])


def _check_forecast_options(
    pipeline: BaseChronosPipeline, batch_size: BatchSize, num_samples: int | None
) -> None:
    check_batch_size(batch_size)
    if num_samples is None:
        return
    if not _draws(pipeline):
        raise UsageError(
            f"{type(pipeline).__name__} forecasts quantiles and draws no samples; "
            "leave num_samples out."
        )
    if num_samples < 1:
        raise UsageError(f"num_samples is {num_samples}; it must be at least 1.")


def _predict_part(
    pipeline: BaseChronosPipeline,
    batch: Sequence[torch.Tensor],
    horizon: int,
    num_samples: int | None,
    key: str,
    rows: slice,
) -> npt.NDArray[np.float32]:
    """Forecasts of some rows of a batch, as :func:`_predict_batch` gives them for all of it."""
    whole = rows.stop - rows.start == len(batch)
    draws = contextlib.nullcontext() if whole else DrawsOfPart(rows, len(batch))
    with common_random_numbers(pipeline, key), draws:
        return _predict_batch(pipeline, part_of_batch(batch, rows), horizon, num_samples)


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
        family = adapter_of_pipeline(pipeline)
        if family.draws_samples:
            samples = family.predict(pipeline, contexts, horizon, num_samples)
            return np.asarray(samples, dtype=np.float32)
        quantiles = family.quantiles(pipeline, contexts, horizon, QUANTILE_LEVELS)
    return np.asarray(quantiles.swapaxes(-1, -2), dtype=np.float32)


def _to_gluonts(
    pipeline: BaseChronosPipeline, values: npt.NDArray[np.float32], start: pd.Period
) -> Forecast:
    if _draws(pipeline):
        return SampleForecast(samples=values, start_date=start)
    keys = [str(level) for level in QUANTILE_LEVELS]
    return QuantileForecast(forecast_arrays=values, start_date=start, forecast_keys=keys)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def evaluate(
    model: BaseChronosPipeline | Literal["seasonal-naive"],
    suite: str | Path | Suite = "offline",
    *,
    name: str,
    max_series: int | None = None,
    datasets: Iterable[str] | None = None,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    root: str | Path | None = None,
    cache: ScoreCache | None = None,
    on_dataset: Callable[[DatasetScore], None] | None = None,
    on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None = None,
) -> EvaluationResult:
    """Score a model on a suite.

    Parameters
    ----------
    model
        A Chronos pipeline, or ``"seasonal-naive"``.
    suite, max_series, datasets, root
        What to forecast; see :func:`tscompress.data.suites.load_suite`.
    name
        Goes into the column ``model`` of the result.
    batch_size, seed, num_samples
        See :func:`forecast`. Two models are comparable when all three are the same; seasonal naive
        depends on none of them.
    seeds
        Instead of ``seed``: forecast once with each, and average what each series contributes, so
        that less of the scores of a Chronos-T5 is chance. The other models draw nothing and
        forecast once.
    cache
        Take the scores of datasets that it has, and keep those of the others as soon as they are
        there: a run that was stopped goes on. With ``on_forecasts`` nothing is taken from it.
    on_dataset
        Called with the score of each dataset as soon as it is there.
    on_forecasts
        Called with each dataset and the quantiles of the first seed.

    Raises
    ------
    UsageError
        An option is not allowed, or ``model`` is neither of the two.
    DataError, OfflineError
        A dataset cannot be read, or a forecast is not finite.
    """
    if isinstance(model, str) and model != SEASONAL_NAIVE:
        raise UsageError(
            f"model is {model!r}; expected a loaded Chronos pipeline or {SEASONAL_NAIVE!r}."
        )
    draws = not isinstance(model, str) and _draws(model)
    used = _distinct_seeds((seed,) if seeds is None else seeds)[: None if draws else 1]
    protocol = _Protocol(model, name, used, batch_size, num_samples)
    digest = "" if cache is None else model_digest(model)
    rows = []
    sampling: Sampling | None = None
    for dataset in load_suite(suite, max_series, datasets, root=root):
        key = score_key(model, digest, dataset, protocol.to_dict()) if cache is not None else {}
        reused = None if on_forecasts is not None else _reused(cache, key, dataset, name)
        row, sampling = reused or protocol.score(dataset, on_forecasts)
        if cache is not None and reused is None and Processes().is_main:
            cache.write(key, _Scored(row, sampling).to_dict())
        rows.append(row)
        if on_dataset is not None:
            on_dataset(row)
    suite_name = find_suite(suite).name
    return EvaluationResult(suite=suite_name, model=name, rows=tuple(rows), sampling=sampling)


class _Scored(NamedTuple):
    row: DatasetScore
    sampling: Sampling | None

    def to_dict(self) -> dict[str, Any]:
        sampling = None if self.sampling is None else self.sampling.model_dump(mode="json")
        return {"row": self.row.model_dump(mode="json"), "sampling": sampling}


def _reused(
    cache: ScoreCache | None, key: Mapping[str, Any], dataset: EvaluationDataset, name: str
) -> _Scored | None:
    """Scores that an earlier run kept, maybe of the same model under another name, if any."""
    if cache is None:
        return None
    content = Processes().agree(lambda: cache.read(key))
    try:
        row = DatasetScore.model_validate({**content["row"], "model": name, "cached": True})
        sampling = content["sampling"]
        if sampling is not None:
            sampling = Sampling.model_validate(sampling)
    except (TypeError, KeyError, ValidationError):
        return None
    if (row.dataset, row.series_count) != (dataset.name, len(dataset.series)):
        return None
    cache.hits.append(dataset.name)
    return _Scored(row, sampling)


class _Protocol(NamedTuple):
    """How a model is scored on each dataset."""

    model: BaseChronosPipeline | Literal["seasonal-naive"]
    name: str
    seeds: tuple[int, ...]
    batch_size: BatchSize
    num_samples: int | None

    @property
    def draws(self) -> bool:
        return not isinstance(self.model, str) and _draws(self.model)

    def to_dict(self) -> dict[str, Any]:
        """What scores depend on besides model and data; what has no say is left out."""
        content: dict[str, Any] = {"quantile_levels": QUANTILE_LEVELS, "metrics": METRICS}
        if self.draws:
            content |= {"seeds": self.seeds, "num_samples": self.num_samples}
        if not isinstance(self.model, str):
            content["batch_size"] = self.drawn_together if self.draws else self.batch_size
        return content

    @property
    def drawn_together(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size == AUTO else self.batch_size

    def score(
        self,
        dataset: EvaluationDataset,
        on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None,
    ) -> _Scored:
        runs = []
        seconds = 0.0
        for seed in self.seeds:
            started = time.perf_counter()
            quantiles, paths = self._forecast(dataset, seed)
            seconds += time.perf_counter() - started
            if on_forecasts is not None and seed == self.seeds[0]:
                on_forecasts(dataset, quantiles)
            contributions = series_contributions(quantiles, dataset, name=self.name)
            runs.append((score_quantiles(quantiles, dataset), contributions))
        sampling = None
        if paths is not None:
            sampling = Sampling(seeds=self.seeds, num_samples=paths, batch_size=self.drawn_together)
        row = DatasetScore(
            dataset=dataset.name,
            model=self.name,
            # The denominators of both are the same for all seeds: means of scores are the scores
            # of mean contributions.
            **{
                metric: float(np.mean([scores[metric] for scores, _ in runs])) for metric in METRICS
            },
            series_count=len(dataset.series),
            windows=dataset.windows if dataset.windows > 1 else None,
            seconds=seconds,
            series=mean_contributions([contributions for _, contributions in runs]),
        )
        return _Scored(row, sampling)

    def _forecast(self, dataset: EvaluationDataset, seed: int) -> tuple[Quantiles, int | None]:
        """Quantiles, and of how many sample paths they are, if of any."""
        if isinstance(self.model, str):
            return quantile_array(SeasonalNaive().forecast(dataset)), None
        values = predict(
            self.model,
            dataset.contexts,
            dataset.horizon,
            seed,
            self.batch_size,
            num_samples=self.num_samples,
            stream=dataset.name,
        )
        return (sample_quantiles(values), values.shape[1]) if self.draws else (values, None)


def _draws(pipeline: BaseChronosPipeline) -> bool:
    return adapter_of_pipeline(pipeline).draws_samples


def _distinct_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"seeds are {list(seeds)}; give one or more, each once.")
    return tuple(seeds)


def score_forecasts(forecasts: Iterable[Forecast], dataset: EvaluationDataset) -> dict[str, float]:
    """MASE and WQL of forecasts of gluonts; see :func:`score_quantiles`."""
    return score_quantiles(quantile_array(forecasts), dataset)


def score_quantiles(quantiles: Quantiles, dataset: EvaluationDataset) -> dict[str, float]:
    """MASE and WQL of quantiles ``[N, 9, horizon]``, over all series and steps of a dataset.

    MASE is the mean absolute error of the median in units of the context's seasonal error
    (steps whose seasonal error is zero are left out); WQL is the mean over the levels of the
    quantile loss, summed over series and steps, relative to the sum of absolute labels. Missing
    labels are left out of both.
    """
    # All that gluonts asks a forecast for is a level by its name; its own objects look each one up
    # anew, which takes longer than a small model's forecast.
    levels = [str(level) for level in QUANTILE_LEVELS]
    # gluonts opens a progress bar that cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        scores = evaluate_forecasts(
            [dict(zip(levels, of_series, strict=True)) for of_series in quantiles],
            test_data=_backtest(dataset),
            metrics=[MASE(), MeanWeightedSumQuantileLoss(QUANTILE_LEVELS)],
            seasonality=dataset.seasonality,
            batch_size=5000,
        ).iloc[0]
    return {
        "MASE": float(scores["MASE[0.5]"]),
        "WQL": float(scores["mean_weighted_sum_quantile_loss"]),
    }


def quantile_array(forecasts: Iterable[Forecast]) -> Quantiles:
    """The quantiles 0.1 … 0.9 of forecasts, ``[N, 9, horizon]``; of samples, gluonts' way."""
    levels = [str(level) for level in QUANTILE_LEVELS]
    return np.stack([[item.quantile(level) for level in levels] for item in forecasts])


def sample_quantiles(samples: npt.NDArray[np.float32]) -> Quantiles:
    """The quantiles 0.1 … 0.9 of samples ``[N, num_samples, horizon]``, gluonts' way: no mean."""
    places = np.round((samples.shape[1] - 1) * np.array(QUANTILE_LEVELS)).astype(int)
    ordered: Quantiles = np.sort(samples, axis=1)[:, places]
    return ordered


def quantile_losses(quantiles: Quantiles, dataset: EvaluationDataset) -> Any:
    """Twice the pinball loss, as gluonts' metrics have it.

    Parameters
    ----------
    quantiles
        ``[N, 9, horizon]``.

    Returns
    -------
    numpy.ma.MaskedArray
        ``[N, 9, horizon]``, masked where the label is missing.
    """
    labels = np.ma.masked_invalid(dataset.labels)[:, None, :]  # [N, 1, H]
    levels = np.array(QUANTILE_LEVELS)[:, None]  # [9, 1]
    return 2 * np.abs((labels - quantiles) * ((quantiles >= labels) - levels))


def seasonal_errors(dataset: EvaluationDataset) -> npt.NDArray[np.float64]:
    """Mean absolute difference of each context to the season before, ``[N]``; 0 where undefined.

    gluonts' definition: steps that miss either value are left out, and a context shorter than a
    season is compared with the step before.
    """
    season = dataset.seasonality
    errors = []
    for context in dataset.contexts:
        # Masks take longer than all the rest; gaps need them, and contexts of a season or less.
        whole = len(context) > season and bool(np.isfinite(context).all())
        values = context if whole else np.ma.masked_invalid(context)
        errors.append(np.ma.filled(seasonal_error(values, season, time_axis=-1), 0.0))
    return np.array(errors, dtype=np.float64).ravel()


def series_contributions(
    quantiles: Quantiles, dataset: EvaluationDataset, *, name: str = "the model"
) -> SeriesContributions:
    """What each series adds to WQL and MASE of its dataset.

    Parameters
    ----------
    quantiles
        ``[N, 9, horizon]``, see :func:`quantile_array`.
    name
        Of the model, for messages.

    Raises
    ------
    DataError
        A forecast is not finite: gluonts would leave it out of MASE without a word.
    """
    bad = np.flatnonzero(~np.isfinite(quantiles).all(axis=(1, 2)))
    if bad.size:
        raise DataError(
            f"{name!r} forecasts NaN or infinity for {bad.size} of {len(quantiles)} series of "
            f"{dataset.name!r}, first series {bad[0]}; check the checkpoint, or its dtype."
        )
    labels = np.ma.masked_invalid(dataset.labels)  # [N, H]
    losses = quantile_losses(quantiles, dataset).mean(axis=1)  # [N, H]
    median = quantiles[:, QUANTILE_LEVELS.index(0.5)]
    # Masked arrays leave out what is divided by zero, as gluonts does.
    scaled = np.abs(labels - median) / seasonal_errors(dataset)[:, None]  # [N, H]
    return SeriesContributions(
        quantile_loss=_sums(losses),
        absolute_label=_sums(np.abs(labels)),
        scaled_error=_sums(scaled),
        scaled_steps=tuple(np.ma.count(scaled, axis=1).tolist()),
    )


def _sums(values: Any) -> tuple[float, ...]:
    """Of the present values of each row, ``[N, H]``; 0 where there are none."""
    return tuple(np.ma.filled(values.sum(axis=1), 0.0).tolist())


def mean_contributions(runs: Sequence[SeriesContributions]) -> SeriesContributions:
    """Of several runs on the same series; what the labels alone decide is the same in all."""
    return runs[0].model_copy(
        update={
            name: tuple(np.mean([getattr(run, name) for run in runs], axis=0).tolist())
            for name in ("quantile_loss", "scaled_error")
        }
    )


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
    notes = [f"({i}) = {r.model}" for i, r in enumerate(references, start=1)]
    if cached := sum(row.cached is True for row in result.rows):
        notes.append(f"{cached} of {len(result.rows)} from an earlier run")
    table = Table(
        title=f"{result.model} on {result.suite}",
        caption=", ".join(notes) or None,
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
        count = row.series_count
        counted = str(count) if row.windows is None else f"{count // row.windows} × {row.windows}"
        table.add_row(row.dataset, counted, *scores, *ratios)
    return table
