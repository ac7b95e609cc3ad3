"""Tasks of fev, the forecast evaluation library behind fev-bench: its windows, metrics, summaries.

Only forecasts are made here. fev excludes series whose seasonal error is zero, gluonts excludes
steps, and fev averages over windows: so its scores are in separate tables and must not be compared
with those of :mod:`tscompress.evaluation.metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from chronos import BaseChronosPipeline
from rich import box
from rich.table import Table

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import DataError, RecipeError, UsageError
from tscompress.evaluation.batching import DEFAULT_BATCH_SIZE, BatchSize
from tscompress.evaluation.forecasting import SeasonalNaive, check_sampling, forecast
from tscompress.evaluation.joint import check_settings
from tscompress.evaluation.results import SEASONAL_NAIVE, Settings
from tscompress.families.chronos2_tasks import cross_learning_option
from tscompress.families.groups import reads_covariates
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.files import user_path
from tscompress.io.own_outputs import table_csv
from tscompress.io.untrusted import UnreadableFileError, read_yaml, single_line

#: fev's name of the baseline.
BASELINE = "seasonal_naive"
SUMMARIES_FILE = "fev-summaries.csv"

#: Metrics whose best point forecast is the mean; for the others it is the median.
_METRICS_OF_MEANS = ("MSE", "RMSE", "RMSSE")
_INSTALL = "pip install 'tscompress[fev]'"

DEFAULT_SETTINGS = Settings()
Model: TypeAlias = "BaseChronosPipeline | Literal['seasonal-naive']"
Summary = dict[str, Any]


def load_tasks(path: str | Path) -> list[Any]:
    """Tasks of a YAML file of ``fev.Benchmark``: a key ``tasks`` with a list.

    Datasets are read later, from the Hub or from ``dataset_path``, a Parquet or Arrow file.

    Returns
    -------
    list of fev.Task

    Raises
    ------
    RecipeError
        The file cannot be read or has no list of tasks.
    DataError
        The package fev is not installed.
    """
    fev = _fev()
    try:
        content = read_yaml(user_path(path))
        tasks: list[Any] = fev.Benchmark.from_list(content["tasks"]).tasks
    except (
        OSError, UnreadableFileError, KeyError, TypeError, ValueError, AssertionError,
    ) as error:  # fmt: skip
        reason = "no key 'tasks'" if isinstance(error, KeyError) else single_line(error)
        raise RecipeError(
            f"{str(path)!r} holds no tasks of fev: {reason}; expected a key 'tasks' with a list of "
            "tasks, as fev.Benchmark.from_yaml reads it."
        ) from error
    if not tasks:
        raise RecipeError(f"{str(path)!r} has an empty list of tasks.")
    return tasks


def _fev() -> Any:
    try:
        import fev
    except ImportError as error:
        raise DataError(f"tasks of fev need the package fev: {_INSTALL}.") from error
    return fev


def evaluate_tasks(
    model: Model,
    tasks: Sequence[Any],
    *,
    name: str,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    num_samples: int | None = None,
    settings: Settings = DEFAULT_SETTINGS,
    trained_on: Collection[str] = (),
    on_task: Callable[[Summary], None] | None = None,
) -> list[Summary]:
    """Forecast every window of tasks, scored by fev.

    Parameters
    ----------
    model
        A Chronos pipeline, or ``"seasonal-naive"``.
    tasks
        See :func:`load_tasks`.
    name
        ``model_name`` in the summaries.
    batch_size, seed, num_samples
        See :func:`tscompress.evaluation.forecasting.forecast`.
    settings
        See :func:`predict_task`.
    trained_on
        Names of dataset configs that the model was trained on, for fev's leaderboards.
    on_task
        Called with each summary when it is complete.

    Returns
    -------
    list of dict
        One ``fev.Task.evaluation_summary`` for each task.

    Raises
    ------
    UsageError
        A task asks for quantiles that the model does not forecast.
    DataError
        A dataset cannot be read, or fev refuses a forecast.
    """
    summaries = []
    for task in tasks:
        try:
            predictions, seconds = predict_task(
                model,
                task,
                batch_size=batch_size,
                seed=seed,
                num_samples=num_samples,
                settings=settings,
            )
            summary = task.evaluation_summary(
                predictions,
                model_name=name,
                training_time_s=0.0,
                inference_time_s=seconds,
                trained_on_this_dataset=task.dataset_config in trained_on,
            )
        # fev's errors for datasets that are missing, irregular or too short.
        except (RuntimeError, ValueError, AssertionError, OSError) as error:
            raise DataError(f"task {task.task_name!r} of fev: {single_line(error)}.") from error
        summaries.append(summary)
        if on_task is not None:
            on_task(summary)
    return summaries


def predict_task(
    model: Model,
    task: Any,
    *,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    num_samples: int | None = None,
    settings: Settings = DEFAULT_SETTINGS,
) -> tuple[list[Any], float]:
    """Forecasts of all windows of a task, and the seconds that they took.

    Chronos-2 forecasts with its ``predict_fev``, all targets together and with covariates. The
    others forecast each target separately, without covariates. Quantiles of Chronos-T5 are those of
    its raw samples.

    Parameters
    ----------
    settings
        Of Chronos-2: with ``as_univariate`` it forecasts as the others do.

    Returns
    -------
    list of datasets.DatasetDict
        For each window a dataset for each target, with a row for each series: ``predictions`` and
        the task's quantile levels, each ``[horizon]``.

    Raises
    ------
    UsageError
        The task asks for quantiles that the model does not forecast.
    """
    from datasets import Dataset, DatasetDict  # a dependency of fev

    check_task(model, task, batch_size, num_samples, settings)
    # If series attend to each other, the targets of a task are forecast together.
    if not isinstance(model, str) and _forecasts_together(model, settings):
        size = DEFAULT_BATCH_SIZE if batch_size == "auto" else batch_size
        together = cross_learning_option(model) if settings.cross_learning else {}
        predictions, seconds = model.predict_fev(task, batch_size=size, **together)
        return list(predictions), float(seconds)
    windows, seconds = [], 0.0
    for position, window in enumerate(task.iter_windows(num_proc=1)):
        past, _ = window.get_input_data()
        started = time.perf_counter()
        rows = {
            target: _forecasts(
                model,
                [np.asarray(row[target], dtype=np.float64) for row in past],
                task,
                stream=f"{task.task_name}/{position}/{target}",
                batch_size=batch_size,
                seed=seed,
                num_samples=num_samples,
            )
            for target in task.target_columns
        }
        seconds += time.perf_counter() - started
        windows.append(
            DatasetDict({name: Dataset.from_list(found) for name, found in rows.items()})
        )
    return windows, seconds


def check_task(
    model: Model, task: Any, batch_size: BatchSize, num_samples: int | None, settings: Settings
) -> None:
    """Refuse a task that the model cannot forecast, with these settings.

    Raises
    ------
    UsageError
    """
    _check_levels(model, task.quantile_levels, settings)
    if not isinstance(model, str):
        check_settings(model, settings, batch_size)
        check_sampling(model, batch_size, num_samples)


def scored_windows(task: Any) -> list[tuple[EvaluationDataset, int]]:
    """Series of each window of a task, every target by itself, with the steps to forecast.

    Returns
    -------
    list of (EvaluationDataset, int)
        With each window the steps from the first that is scored to the end of a series; where the
        task counts from the start, or gives a time, those of all its windows.

    Raises
    ------
    DataError
        The dataset cannot be read.
    """
    found = []
    try:
        for window in task.iter_windows(num_proc=1):
            past, _ = window.get_input_data()
            rows = list(zip(past, window.get_ground_truth(), strict=True))
            series = [
                np.concatenate([np.asarray(part[target], dtype=np.float64) for part in parts])
                for target in task.target_columns
                for parts in rows
            ]
            cutoff = window.cutoff
            from_end = isinstance(cutoff, int) and cutoff < 0
            needed = -cutoff if from_end else task.horizon * task.num_windows
            found.append((_dataset(series, task), needed))
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise DataError(f"task {task.task_name!r} of fev: {single_line(error)}.") from error
    return found


def has_covariates(task: Any) -> bool:
    """Whether a task has columns beside its targets."""
    return bool(task.known_dynamic_columns or task.past_dynamic_columns)


def _forecasts_together(model: BaseChronosPipeline, settings: Settings) -> bool:
    return reads_covariates(model) and not settings.as_univariate


def _check_levels(model: Model, levels: Sequence[float], settings: Settings) -> None:
    if isinstance(model, str) or adapter_of_pipeline(model).draws_samples:
        return
    known = model.quantiles if _forecasts_together(model, settings) else QUANTILE_LEVELS
    missing = [level for level in levels if not np.isclose(level, known).any()]
    if missing:
        kind = "this model forecasts" if known is not QUANTILE_LEVELS else "series alone have"
        raise UsageError(
            f"a task asks for the quantiles {missing}; {kind} "
            f"{[round(float(level), 4) for level in known]}."
        )


def _forecasts(
    model: Model,
    contexts: list[Any],
    task: Any,
    *,
    stream: str,
    batch_size: BatchSize,
    seed: int,
    num_samples: int | None,
) -> list[dict[str, list[float]]]:
    """Forecasts of one target of a window, in fev's format."""
    if isinstance(model, str):
        found = _seasonal_naive(contexts, task)
    else:
        found = forecast(
            model, contexts, task.horizon, seed, batch_size, num_samples=num_samples, stream=stream
        )
    metric = task.eval_metric
    name = metric["name"] if isinstance(metric, dict) else metric
    of_mean = str(name).upper() in _METRICS_OF_MEANS  # fev takes any case
    return [_row(one, task.quantile_levels, of_mean) for one in found]


def _row(one: Any, levels: Sequence[float], of_mean: bool) -> dict[str, list[float]]:
    samples = getattr(one, "samples", None)  # [samples, H]
    if samples is not None:
        # Interpolated, as in chronos; gluonts would take the nearest sample.
        quantiles = np.quantile(samples, [0.5, *levels], axis=0)  # [1 + levels, H]
        point = samples.mean(axis=0) if of_mean else quantiles[0]
    else:
        # Quantile models have no mean; chronos takes the median too.
        quantiles = [one.quantile(level) for level in (0.5, *levels)]
        point = quantiles[0]
    named = zip(map(str, levels), quantiles[1:], strict=True)
    return {"predictions": point.tolist(), **{name: row.tolist() for name, row in named}}


def _seasonal_naive(contexts: list[Any], task: Any) -> list[Any]:
    unknown = np.full(task.horizon, np.nan)
    series = [np.concatenate([values, unknown]) for values in contexts]
    return SeasonalNaive().forecast(_dataset(series, task))


def _dataset(series: Sequence[Any], task: Any) -> EvaluationDataset:
    return EvaluationDataset(
        name=task.task_name,
        horizon=task.horizon,
        series=tuple(series),
        # fev defines the season length, so the frequency is ignored.
        starts=(pd.Period("1970-01-01", freq="D"),) * len(series),
        season_length=task.seasonality,
    )


def summaries_csv(summaries: Sequence[Summary]) -> str:
    """Summaries as the CSV of ``fev.leaderboard`` and fev-bench."""
    return table_csv(pd.DataFrame(list(summaries)))


def summaries_table(summaries: Sequence[Summary]) -> Table:
    """Errors of each task, a column per model, and fev's skill scores.

    Where fev makes no leaderboard of them, as where the baseline is never wrong, the caption says
    so in place of the skill scores.
    """
    models = list(dict.fromkeys(str(summary["model_name"]) for summary in summaries))
    caption = f"skill score: 1 - geometric mean of errors relative to {BASELINE}"
    skill: Mapping[str, float] = {}
    try:
        skill = dict(_fev().leaderboard(list(summaries), baseline_model=BASELINE)["skill_score"])
    except (ValueError, AssertionError) as error:
        caption = f"no skill scores: fev makes no leaderboard of these ({single_line(error)})"
    table = Table(
        title="by fev's metrics", caption=caption, show_footer=bool(skill), box=box.SIMPLE_HEAD
    )
    table.add_column("task", footer="skill score", no_wrap=True)
    table.add_column("metric")
    for model in models:
        footer = f"{skill[model]:.3f}" if skill else ""
        table.add_column(model, justify="right", footer=footer)
    rows: dict[int, list[str]] = {}
    for model in models:
        own = (summary for summary in summaries if summary["model_name"] == model)
        for index, summary in enumerate(own):
            metric = summary["eval_metric"]
            name = metric["name"] if isinstance(metric, dict) else metric
            row = rows.setdefault(index, [str(summary["task_name"]), str(name)])
            row.append(f"{summary['test_error']:.4f}")
    for row in rows.values():
        table.add_row(*row)
    return table


def model_name(name: str) -> str:
    """The model's name in summaries: fev's name for seasonal naive."""
    return BASELINE if name == SEASONAL_NAIVE else name
