"""Measure a model on tasks: forecasts, their losses, and skills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import BaseChronosPipeline
from pydantic import Field

from tscompress.checkpoints.given import AnyModel, loaded_of
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import UsageError
from tscompress.evaluation.batching import DEFAULT_BATCH_SIZE, BatchSize, GivenBatchSize
from tscompress.evaluation.calibration import calibration
from tscompress.evaluation.metrics import MEDIAN, Quantiles, band
from tscompress.evaluation.typical_series import known
from tscompress.families.groups import kind_of, reads_covariates
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.arguments import check_counts, check_list, check_type
from tscompress.io.strict import Strict
from tscompress.probing.forecasts import Forecaster
from tscompress.probing.processes import Array
from tscompress.probing.regressions import Regressions, ResponseTask
from tscompress.probing.responses import Medians, ResponseScore, median, score_response
from tscompress.probing.results import Example, ProbeResult, TaskScore
from tscompress.probing.skill import Estimate, Losses, estimate
from tscompress.probing.tasks import (
    TASKS,
    AnyTask,
    Drawn,
    ProbeTask,
    choose_tasks,
    load_tasks,
    seasonal_naive,
)

#: Covariates in the figure of a task.
_DRAWN = 3
_LEVELS = np.array(QUANTILE_LEVELS)[:, None]  # [9, 1]

OnTask = Callable[[TaskScore | ResponseScore, int, int], None]


class ProbeConfig(Strict):
    """Section ``probe`` of a recipe; see :func:`probe`."""

    tasks: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="names, groups or shell patterns; null: all"
    )
    tasks_file: str | None = Field(default=None, description="YAML with tasks of your own")
    num_series: int | None = Field(
        default=None, ge=1, le=10**6, description="null: each task's own"
    )
    num_samples: int | None = Field(
        default=None, ge=1, le=10**5, description="paths of a Chronos-T5"
    )
    batch_size: GivenBatchSize = DEFAULT_BATCH_SIZE
    seed: int = Field(default=0, ge=0, lt=2**63)

    def chosen(self) -> tuple[AnyTask, ...]:
        """The tasks; UsageError if one is unknown or the file is invalid."""
        return _chosen(self.tasks, self.tasks_file, self.num_series)

    def check_reads(self, pipeline: BaseChronosPipeline, *, univariate: bool = False) -> None:
        """UsageError if a task was chosen, by name or in a file, that the model cannot read.

        Or if the series of one, as they are drawn, cannot distinguish models.
        Nor may it have covariates if the model is to become ``univariate``.
        """
        battery = self.tasks is None and self.tasks_file is None
        readable = _readable(self.chosen(), pipeline, battery=battery)
        halved = adapter_of_pipeline(pipeline).draws_samples
        _check_drawn(_sized(readable, self.num_series, halved=halved), self.seed)
        unread = [task.name for task in self.chosen() if task.covariates]
        if univariate and unread and not battery:
            raise UsageError(
                f"the task {unread[0]!r} has covariates, and a univariate model reads none; choose "
                "tasks without."
            )


def probe(
    model: AnyModel,
    tasks: Sequence[str] | Sequence[AnyTask] | None = None,
    *,
    tasks_file: str | Path | None = None,
    num_series: int | None = None,
    num_samples: int | None = None,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    halved: bool | None = None,
    name: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    on_task: OnTask = lambda score, done, total: None,
) -> ProbeResult:
    """Skill of a model at tasks whose best possible forecast is known.

    Nothing is cached: it takes seconds for a tiny Chronos-Bolt. Tasks with covariates are forecast
    twice, with and without them; those of the response to covariates four times.

    Parameters
    ----------
    model
        A directory, a Hub id, a loaded model, a Chronos pipeline or a predictor around one; see
        :mod:`tscompress.checkpoints.given`.
    tasks
        Names, groups or shell patterns, such as ``"seasons"`` or ``"period-7*"``; or tasks of your
        own. None: all of them, without those that the model cannot read, or those of
        ``tasks_file``.
    tasks_file
        YAML with tasks of your own; ``tasks`` may select them too.
    num_series
        Series of each task; None: the task's own number. Chronos-T5, which is tens of times slower,
        gets half of that in the tasks of the battery.
    num_samples, batch_size
        See :func:`tscompress.evaluation.forecasting.forecast`.
    halved
        Whether tasks of the battery have half of their series, without ``num_series``; None: those
        of a Chronos-T5. A model that is compared with one needs it, too.
    seed
        Of the series and of the sample paths of Chronos-T5.
    name
        Name of the model in the result.
    revision, device, dtype
        Of a directory or a Hub id, as for :func:`tscompress.load`; by default float32 on the CPU.
    on_task
        Called with each score, tasks done and tasks in all.

    Returns
    -------
    ProbeResult
        Each of its ``tasks`` has a skill with an interval; ``skills()`` is task to skill,
        ``groups()`` and ``overall()`` are means; ``against(original)`` gives the share of skill
        that was kept.

    Raises
    ------
    UsageError
        A task is unknown, a file of tasks is invalid, the model forecasts too few steps, reads no
        covariates and is asked for a task with some, or an argument is of a wrong type.
    UnsupportedModelError
        The model does not forecast.
    DataError
        A forecast is not finite.
    """
    check_counts(num_series=num_series, num_samples=num_samples, seed=seed)
    chosen = _chosen(tasks, tasks_file, num_series)
    if seed is None or seed < 0:
        raise UsageError(f"seed is {seed}; it must not be negative.")
    loaded = loaded_of(model, name=name, revision=revision, device=device, dtype=dtype)
    pipeline, name = loaded.forecaster, loaded.name
    readable = _readable(chosen, pipeline, battery=tasks is None and tasks_file is None)
    skipped = tuple(task.name for task in chosen if task not in readable)
    if halved is None:
        halved = adapter_of_pipeline(pipeline).draws_samples
    readable = _sized(readable, num_series, halved=halved)
    _check_drawn(readable, seed)
    forecaster = Forecaster(pipeline, name, seed, batch_size, num_samples)
    scores = []
    for task in readable:
        scores.append(_score(forecaster, task, task.draw(seed)))
        on_task(scores[-1], len(scores), len(readable))
    paths = None
    if adapter_of_pipeline(pipeline).draws_samples:
        own: Any = pipeline.inner_model
        paths = num_samples or int(own.config.chronos_config["num_samples"])
    return ProbeResult(
        model=name,
        seed=seed,
        num_samples=paths,
        tasks=tuple(one for one in scores if isinstance(one, TaskScore)),
        skipped=skipped,
        responses=tuple(one for one in scores if isinstance(one, ResponseScore)),
    )


def _chosen(
    tasks: Sequence[str] | Sequence[AnyTask] | None,
    tasks_file: str | Path | None,
    num_series: int | None,
) -> tuple[AnyTask, ...]:
    if isinstance(tasks, str):
        raise UsageError(f"tasks is {tasks!r}; give a list of names.")
    if num_series is not None and num_series < 1:
        raise UsageError(f"num_series is {num_series}; it must be at least 1.")
    check_list("tasks", tasks, (str, ProbeTask, ResponseTask), "names, or of tasks")
    check_type("tasks_file", tasks_file, (str, Path, type(None)), "the path of a YAML file")
    own = () if tasks_file is None else load_tasks(tasks_file)
    if tasks is None:
        chosen = choose_tasks(None, own)
    else:
        names = [task for task in tasks if isinstance(task, str)]
        given = tuple(task for task in tasks if not isinstance(task, str))
        chosen = (choose_tasks(names, own) if names else ()) + given
    if not chosen:
        raise UsageError("no task is chosen; leave tasks out for all of them.")
    if num_series is None:
        return chosen
    return tuple(task.model_copy(update={"num_series": num_series}) for task in chosen)


def _readable(
    tasks: Sequence[AnyTask], pipeline: BaseChronosPipeline, *, battery: bool
) -> tuple[AnyTask, ...]:
    """Tasks that the model can read; of the whole ``battery`` the others are left out.

    Raises
    ------
    UsageError
        It cannot read one that was asked for.
    """
    if reads_covariates(pipeline):
        return tuple(tasks)
    unreadable = [task.name for task in tasks if task.covariates]
    if unreadable and not battery:
        raise UsageError(
            f"the task {unreadable[0]!r} has covariates, and {kind_of(pipeline)} reads none; "
            "choose tasks without."
        )
    return tuple(task for task in tasks if not task.covariates)


def _sized(
    tasks: Sequence[AnyTask], num_series: int | None, *, halved: bool
) -> tuple[AnyTask, ...]:
    """The tasks with the number of series that a model is probed on unless it was given."""
    if num_series is None and halved:
        return tuple(map(_halved, tasks))
    return tuple(tasks)


def _halved(task: AnyTask) -> AnyTask:
    """A task of the battery with half of its series; other tasks unchanged."""
    if TASKS.get(task.name) != task:
        return task
    return task.model_copy(update={"num_series": task.num_series // 2})


def _check_drawn(tasks: Sequence[AnyTask], seed: int) -> None:
    """Draw the series of each task before any is forecast; those of one at a time are held.

    Raises
    ------
    UsageError
        They cannot distinguish models.
    """
    for task in tasks:
        drawn = task.draw(seed)
        if isinstance(task, ProbeTask) and isinstance(drawn, Drawn):
            _bounds(task, drawn)


def _bounds(task: ProbeTask, drawn: Drawn) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Losses of each series of the best possible forecast, and of the best constant one.

    Raises
    ------
    UsageError
        The second are no worse than the first.
    """
    constant = np.broadcast_to(drawn.constant[:, None], drawn.label.shape)
    losses = _losses(task, drawn.best, drawn.label), _losses(task, _certain(constant), drawn.label)
    if sum(losses[1]) <= sum(losses[0]):
        raise UsageError(
            f"the task {task.name!r} cannot distinguish models: for its {task.num_series} series "
            "no forecast is better than a constant; give it more series, or more of a pattern."
        )
    return losses


def _score(
    forecaster: Forecaster, task: AnyTask, drawn: Drawn | Regressions
) -> TaskScore | ResponseScore:
    """Forecast the series of a task, and score the forecasts."""
    if isinstance(task, ResponseTask):
        assert isinstance(drawn, Regressions)
        return _respond(forecaster, task, drawn)
    assert isinstance(drawn, Drawn)
    given = forecaster.quantiles(task, drawn.context, drawn.covariates, drawn.known)
    alone = forecaster.quantiles(task, drawn.context) if task.covariates else None
    return score_task(task, drawn, given, alone)


def _respond(forecaster: Forecaster, task: ResponseTask, drawn: Regressions) -> ResponseScore:
    shuffled = drawn.shuffled()
    given, shifted, moved, moved_shifted = (
        median(forecaster.quantiles(task, drawn.context, covariates, covariates.shape[1]))
        for one in (drawn, shuffled)
        for covariates in (one.covariates, one.shifted())
    )
    return score_response(task, drawn, Medians(given, shifted, moved, moved_shifted))


def score_task(
    task: ProbeTask, drawn: Drawn, quantiles: Quantiles, alone: Quantiles | None = None
) -> TaskScore:
    """Skill of one model's quantiles ``[N, 9, H]`` at a task.

    Parameters
    ----------
    alone
        Its quantiles without covariates, of a task that has some.

    Raises
    ------
    UsageError
        The best constant forecast of the series is no worse than the best possible one.
    """
    naive = seasonal_naive(drawn.context, task.season_length, task.horizon)
    best, constant = _bounds(task, drawn)
    losses = Losses(
        model=_losses(task, quantiles, drawn.label),
        best=best,
        constant=constant,
        seasonal_naive=_losses(task, _certain(naive), drawn.label),
        without_covariates=None if alone is None else _losses(task, alone, drawn.label),
    )
    found = calibration(quantiles, drawn.label)
    return TaskScore(
        task=task,
        skill=estimate(losses.skill(), losses.resampled(task.name)),
        seasonal_naive=losses.skill("seasonal_naive"),
        coverage=found.coverage if task.process.continuous else None,
        crossing_rate=found.crossing_rate,
        losses=losses,
        example=_example(task, drawn, quantiles),
        **_without_covariates(task, losses),
    )


def _without_covariates(task: ProbeTask, losses: Losses) -> dict[str, Estimate]:
    """Skill of the series alone, and what covariates add to it; nothing without covariates."""
    if losses.without_covariates is None:
        return {}
    skill = losses.skill("without_covariates")
    draws = losses.resampled(task.name, "without_covariates")
    return {
        "without_covariates": estimate(skill, draws),
        "covariates_add": estimate(losses.skill() - skill, losses.resampled(task.name) - draws),
    }


def _certain(point: Array) -> Quantiles:
    """A point forecast ``[N, H]`` as quantiles ``[N, 9, H]``."""
    return np.repeat(point[:, None], len(QUANTILE_LEVELS), axis=1)


def _losses(task: ProbeTask, quantiles: Quantiles, label: Array) -> tuple[float, ...]:
    """Mean over the steps of the absolute error of the median, or of twice the pinball loss."""
    error = label[:, None] - quantiles  # [N, 9, H]
    if task.by_quantiles:  # for a point forecast this is the absolute error
        loss = 2 * np.maximum(_LEVELS * error, (_LEVELS - 1) * error).mean(axis=1)
    else:
        loss = np.abs(error[:, MEDIAN])
    return tuple(loss.mean(axis=1).tolist())


def _example(task: ProbeTask, drawn: Drawn, quantiles: Quantiles) -> Example:
    """The first series, so that none is hand-picked."""
    tail = max(2 * task.season_length, 2 * task.horizon, 24)
    shown = len(drawn.context[0, -tail:]) + task.horizon
    rows = () if drawn.covariates is None else drawn.covariates[0, :_DRAWN, -shown:]
    return Example(
        context=known(drawn.context[0, -tail:]),
        label=known(drawn.label[0]),
        best=tuple(map(float, drawn.best[0, MEDIAN])),
        forecast=band(quantiles[0]),
        covariates=tuple(map(known, rows)),
    )
