"""Forecasts of series that see one another: groups, covariates and cross-learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from chronos import BaseChronosPipeline

from tscompress.data.covariates import SeriesCovariates
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import NotEnoughMemoryError, UsageError
from tscompress.evaluation.batching import (
    AUTO,
    BatchSize,
    Parts,
    Processes,
    batch_sizes,
    batches_by_length,
    memory_ran_out,
)
from tscompress.evaluation.results import Settings
from tscompress.families.covariates import Joint, JointSeries
from tscompress.families.groups import kind_of, reads_covariates
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.quiet import quiet_horizons


def check_settings(
    pipeline: BaseChronosPipeline, settings: Settings, batch_size: BatchSize
) -> None:
    """Refuse cross-learning where it cannot be, before any forecast.

    Raises
    ------
    UsageError
        The model sees one series at a time, or scores would depend on the free memory.
    """
    if not settings.cross_learning:
        return
    if not reads_covariates(pipeline):
        kind = kind_of(pipeline)
        raise UsageError(f"{kind} forecasts each series alone; leave out --cross-learning.")
    if settings.as_univariate:
        raise UsageError("--as-univariate forecasts each series alone; leave out --cross-learning.")
    if batch_size == AUTO:
        raise UsageError(
            "with cross-learning the series of a batch see one another, so that scores depend on "
            "its size; give a number with --batch-size."
        )


def are_joint(
    pipeline: BaseChronosPipeline, dataset: EvaluationDataset, settings: Settings
) -> bool:
    """Whether series of a dataset see others in a forecast.

    Raises
    ------
    UsageError
        The dataset has covariates, and the model reads none.
    """
    if settings.as_univariate:
        return False
    reads = reads_covariates(pipeline)
    if dataset.covariates and not reads:
        raise UsageError(
            f"{dataset.name!r} has covariates, and {kind_of(pipeline)} reads none; "
            "forecast its series alone (--as-univariate, as_univariate: true)."
        )
    grouped = bool(dataset.covariates or dataset.groups) and reads
    return grouped or settings.cross_learning


def _tasks(dataset: EvaluationDataset) -> list[list[int]]:
    """Places in the dataset of the series that are forecast together."""
    groups = dataset.groups or range(len(dataset.series))
    found: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group, []).append(place)
    return list(found.values())


def notes_of(
    dataset: EvaluationDataset, batch_size: BatchSize, settings: Settings
) -> Iterator[str]:
    """What a user may not expect of a joint forecast."""
    yield from dataset.notes
    largest = max(map(len, _tasks(dataset)))
    if batch_size != AUTO and largest > batch_size:
        whole = "sees no other" if settings.cross_learning else "is forecast whole"
        yield (
            f"{dataset.name}: a group of {largest} series is larger than the batch of "
            f"{batch_size}; each {whole}"
        )
    if settings.cross_learning and _ends_differ(dataset):
        yield (
            f"{dataset.name}: series end at different times, so that with cross-learning the "
            "forecast of one may see later steps of another"
        )


def _ends_differ(dataset: EvaluationDataset) -> bool:
    """Whether forecasts of one window begin at different times, where these are known."""
    if dataset.step is None or not dataset.begins:
        return False
    first = [
        dataset.step.times(begin, [len(context)])[0]
        for begin, context in zip(dataset.begins, dataset.contexts, strict=True)
    ]
    return any(len(set(first[window :: dataset.windows])) > 1 for window in range(dataset.windows))


def predict_joint(
    pipeline: BaseChronosPipeline,
    dataset: EvaluationDataset,
    batch_size: BatchSize,
    *,
    cross_learning: bool = False,
    on_series: Callable[[int], None] = lambda done: None,
) -> npt.NDArray[np.float32]:
    """Quantiles 0.1 … 0.9 of each series of a dataset, ``[N, 9, horizon]``.

    A batch has series of one window alone: with cross-learning an earlier one would see its future
    in a later one, as it does where series end at different times, see :func:`notes_of`. It has
    whole groups; one that is larger than a batch is a batch by itself.

    Parameters
    ----------
    batch_size
        Series in a batch, without covariates; see
        :func:`tscompress.evaluation.forecasting.predict`.
    on_series
        Called after each batch with the number of series up to its end.

    Raises
    ------
    NotEnoughMemoryError
        A group, or with cross-learning a batch, does not fit.
    """
    processes = Processes()
    found: dict[int, npt.NDArray[np.float32]] = {}
    position = done = 0
    for tasks in _by_window(dataset):
        joint = _encoded(pipeline, dataset, tasks)
        lengths = [one.targets.shape[1] for one in joint]
        count, rows = len(joint[0].targets), joint[0].rows
        series, at_once = processes.agree(
            lambda lengths=lengths, rows=rows: batch_sizes(  # type: ignore[misc]
                pipeline, lengths, dataset.horizon, batch_size, None, rows
            )
        )
        share = 1 if batch_size == AUTO else count  # what fits is counted in rows of whole groups
        size = max(1, series // share)
        parts = Parts(max(1, at_once // share))
        order = _in_order if cross_learning else batches_by_length
        for indices in order(lengths, size):
            position += 1
            done += sum(len(tasks[index]) for index in indices)
            if not processes.has(position):
                continue
            batch = [joint[index] for index in indices]
            quantiles = _batch(pipeline, batch, dataset.horizon, parts, cross_learning)
            for index, of_task in zip(indices, quantiles, strict=True):
                found |= dict(zip(tasks[index], of_task, strict=True))
            on_series(done)
    found = processes.gather(found)
    return np.stack([found[place] for place in range(len(dataset.series))])


def predict_tasks(
    pipeline: BaseChronosPipeline,
    tasks: Sequence[Joint],
    horizon: int,
    *,
    cross_learning: bool = False,
) -> npt.NDArray[np.float32]:
    """Quantiles 0.1 … 0.9 of tasks of R targets each, as one batch, ``[B, R, 9, horizon]``.

    Raises
    ------
    UsageError
        The model sees one series at a time.
    """
    family = adapter_of_pipeline(pipeline)
    with quiet_horizons():
        quantiles = family.joint_quantiles(
            pipeline, tasks, horizon, QUANTILE_LEVELS, cross_learning=cross_learning
        )
    return np.asarray(quantiles.swapaxes(-1, -2), dtype=np.float32)


def _by_window(dataset: EvaluationDataset) -> Iterator[list[list[int]]]:
    """Tasks of each window, the earliest first; windows of one series follow one another."""
    tasks = _tasks(dataset)
    for window in range(dataset.windows):
        yield [task for task in tasks if task[0] % dataset.windows == window]


def _in_order(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Batches in the order of the dataset, as chronos-forecasting's."""
    for first in range(0, len(lengths), size):
        yield list(range(first, min(first + size, len(lengths))))


def _encoded(
    pipeline: BaseChronosPipeline, dataset: EvaluationDataset, tasks: Sequence[Sequence[int]]
) -> list[Joint]:
    contexts = dataset.contexts
    given = [
        JointSeries(
            [contexts[place] for place in task],
            dataset.covariates[task[0]] if dataset.covariates else SeriesCovariates(),
        )
        for task in tasks
    ]
    return adapter_of_pipeline(pipeline).encoded(given, dataset.horizon)


def _batch(
    pipeline: BaseChronosPipeline,
    batch: Sequence[Joint],
    horizon: int,
    parts: Parts,
    cross_learning: bool,
) -> npt.NDArray[np.float32]:
    """Quantiles ``[B, R, 9, horizon]`` of the tasks of a batch, in parts where memory is short."""
    longest = max(one.targets.shape[1] for one in batch)
    padded = [_padded(one, longest) for one in batch]

    def compute(rows: slice) -> npt.NDArray[np.float32]:
        return predict_tasks(pipeline, padded[rows], horizon, cross_learning=cross_learning)

    if not cross_learning:
        return parts.compute(len(batch), compute)
    try:
        return compute(slice(0, len(batch)))
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
    raise NotEnoughMemoryError(
        f"there is not enough memory for {len(batch)} groups that see one another; give a smaller "
        "--batch-size, a smaller dtype such as bfloat16, or another device."
    )


def _padded(one: Joint, length: int) -> Joint:
    """With missing values in front, so that a part of a batch is computed as in the whole."""
    width = (length - one.targets.shape[1], 0)
    pad = torch.nn.functional.pad
    past = pad(one.covariates.past, width, value=torch.nan)
    beside = one.covariates._replace(past=past)
    return Joint(pad(one.targets, width, value=torch.nan), beside)
