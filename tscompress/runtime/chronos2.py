"""Chronos-2: series of a group attend to each other; covariates may be known ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tscompress.errors import UsageError
from tscompress.runtime.contexts import Task, stacked, tasks_of
from tscompress.runtime.forecaster import PatchForecaster, positive_integer
from tscompress.runtime.quantiles import (
    DEFAULT_LEVELS,
    FloatArray,
    interpolated,
    probability_masses,
    weighted,
)
from tscompress.runtime.record import Record, positive

#: Quantiles that continue as paths beyond one call.
_PATHS = DEFAULT_LEVELS


class Rows(NamedTuple):
    """Rows of one call: contexts ``[B, T]``, groups ``[B]``, known values ``[B, F]``."""

    context: FloatArray
    groups: npt.NDArray[np.int64]
    future: FloatArray


class Chronos2Forecaster(PatchForecaster):
    """Forecasts of an exported Chronos-2."""

    inputs: ClassVar[tuple[str, ...]] = (
        "context",
        "observed",
        "group_ids",
        "future",
        "future_observed",
    )

    @staticmethod
    def check_settings(record: Record) -> None:
        PatchForecaster.check_settings(record)
        positive(record.settings.get("max_output_patches", 1), "max_output_patches")

    @property
    def prediction_length(self) -> int:
        """Steps of one call."""
        return int(self.record.settings.get("max_output_patches", 1)) * self.patch_size

    def predict(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        *,
        batch_size: int = 256,
        cross_learning: bool = False,
    ) -> list[FloatArray]:
        """The model's own quantiles of each task.

        Parameters
        ----------
        contexts
            A 3-D array, or a sequence of 1-D or 2-D arrays, or of mappings with covariates; see
            :func:`tscompress.runtime.contexts.tasks_of`. Missing values are NaN.
        prediction_length
            Steps to forecast, H; None: those of one call.
        batch_size
            Rows, covariates included, of one call.
        cross_learning
            All tasks of a call are one group.

        Returns
        -------
        list of ndarray
            ``[R, Q, H]`` of each task.

        Raises
        ------
        UsageError, DataError
            See :meth:`predict_quantiles`.
        """
        steps = self.checked_length(prediction_length)
        return self.forecast(
            tasks_of(contexts, steps, self.context_length),
            steps,
            batch_size=batch_size,
            cross_learning=cross_learning,
        )

    def predict_quantiles(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = DEFAULT_LEVELS,
        *,
        batch_size: int = 256,
        cross_learning: bool = False,
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Quantiles ``[R, H, Q]`` at any levels, and medians ``[R, H]``; see :meth:`predict`.

        Levels that the model does not forecast are between its own, as the stock pipeline's.

        Raises
        ------
        UsageError
            A level, the length or the batch size is out of range, or ``contexts`` of a wrong type.
        DataError
            A series is empty, all NaN or not numeric, or covariates do not fit.
        """
        levels = self.checked_levels(quantile_levels)
        median = self.median_index()
        steps = self.checked_length(prediction_length)
        tasks = tasks_of(contexts, steps, self.context_length)
        found = self.forecast(tasks, steps, batch_size=batch_size, cross_learning=cross_learning)
        own = [one.swapaxes(1, 2) for one in found]  # [R, H, Q]
        return [self._at_levels(one, levels) for one in own], [one[..., median] for one in own]

    def forecast(
        self,
        tasks: Sequence[Task],
        steps: int,
        *,
        batch_size: int = 256,
        cross_learning: bool = False,
    ) -> list[FloatArray]:
        """Quantiles ``[R, Q, steps]`` of tasks, which are not checked.

        Raises
        ------
        UsageError
            ``batch_size`` is not a positive integer.
        """
        batch_size = positive_integer(batch_size, "batch_size")
        found: list[FloatArray] = []
        for batch in _batches(tasks, batch_size):
            sizes = [len(task.context) for task in batch]
            groups = np.repeat(np.arange(len(batch)), sizes)
            rows = Rows(
                stacked([task.context for task in batch], self.context_length),
                np.zeros_like(groups) if cross_learning else groups,
                np.concatenate([task.future for task in batch]),
            )
            starts = np.cumsum([0, *sizes[:-1]])
            output = self._forecast_rows(rows, steps, batch_size)
            found += [
                output[start : start + task.targets]
                for start, task in zip(starts, batch, strict=True)
            ]
        return found

    def _at_levels(self, own: FloatArray, levels: list[float]) -> FloatArray:
        if set(levels) <= set(self.quantiles):
            return own[..., [self.quantiles.index(one) for one in levels]]
        return self._interpolated(own, levels)

    def _interpolated(self, own: FloatArray, levels: Sequence[float]) -> FloatArray:
        order = np.argsort(self.quantiles, kind="stable")
        return interpolated(own[..., order], np.asarray(self.quantiles)[order], levels)

    def _forecast_rows(self, rows: Rows, steps: int, batch_size: int) -> FloatArray:
        """Quantiles ``[B, Q, steps]``; beyond one call, of weighted paths.

        Paths of different quantiles do not attend to each other, so that no call needs all.
        """
        together = max(1, batch_size // len(rows.context))
        output = self._call(rows, steps)
        found, done = [output], output.shape[-1]
        if done < steps:
            rows = self._paths(rows)
        while done < steps:
            rows = self._moved_on(rows, found[-1])
            output = self._call_paths(rows, steps - done, together)  # [B P, Q, h]
            found.append(self._of_paths(output))
            done += output.shape[-1]
        return np.concatenate(found, axis=-1)[..., :steps]

    def _call_paths(self, rows: Rows, steps: int, together: int) -> FloatArray:
        """As :meth:`_call` ``[B P, Q, h]``, of so many paths of every row at a time."""
        count = len(_PATHS)
        parts = []
        for first in range(0, count, together):
            part = Rows(*(_some_paths(values, first, together) for values in rows))
            output = self._call(part, steps)
            parts.append(output.reshape(len(rows.context) // count, -1, *output.shape[1:]))
        found = np.concatenate(parts, axis=1)  # [B, P, Q, h]
        return found.reshape(-1, *found.shape[2:])

    def _call(self, rows: Rows, steps: int) -> FloatArray:
        """Quantiles of the next patches, as many as are needed and one call has."""
        ahead = self.steps_of_call(steps)
        known = _padded(rows.future[:, :ahead], ahead)
        return self.graph(
            **self.patched(rows.context[:, -self.context_length :]),
            group_ids=rows.groups.astype(np.int64),
            **self.masked("future", "future_observed", known),
        )

    def steps_of_call(self, steps: int) -> int:
        """Whole patches for ``steps``, at most those of one call."""
        patches = min(-(-steps // self.patch_size), self.prediction_length // self.patch_size)
        return patches * self.patch_size

    def _paths(self, rows: Rows) -> Rows:
        """Each row once for every path; only paths of the same quantile attend to each other."""
        if not set(_PATHS) <= set(self.quantiles):
            raise UsageError(
                f"a forecast beyond {self.prediction_length} steps continues from the quantiles "
                f"{', '.join(map(str, _PATHS))}, which the model does not all have; forecast fewer."
            )
        count = len(_PATHS)
        groups = rows.groups[:, None] * count + np.arange(count)
        return Rows(
            np.repeat(rows.context, count, axis=0),
            groups.reshape(-1),
            np.repeat(rows.future, count, axis=0),
        )

    def _moved_on(self, rows: Rows, output: FloatArray) -> Rows:
        """The last forecast ``[B, Q, h]`` becomes history: of covariates, what was known."""
        ahead = output.shape[-1]
        paths = self._interpolated(output.swapaxes(1, 2), _PATHS).swapaxes(1, 2)  # [B, P, h]
        context = np.concatenate([rows.context, paths.reshape(-1, ahead)], axis=-1)
        context = context[:, -self.context_length :]
        steps = min(ahead, context.shape[1])
        known = _padded(rows.future[:, :ahead], ahead)[:, -steps:]
        past = context[:, -steps:]
        latest = np.where(np.isnan(known), past, known)
        context = np.concatenate([context[:, :-steps], latest], axis=-1)
        return Rows(context, rows.groups, rows.future[:, ahead:])

    def _of_paths(self, output: FloatArray) -> FloatArray:
        """``[B, Q, h]`` of what all paths of a row forecast, ``[B P, Q, h]``."""
        levels, steps = output.shape[1:]
        every = output.reshape(-1, len(_PATHS) * levels, steps).swapaxes(1, 2)
        masses = np.outer(probability_masses(_PATHS), probability_masses(self.quantiles))
        return weighted(every, masses.reshape(-1), self.quantiles).swapaxes(1, 2)


def _some_paths(values: npt.NDArray[Any], first: int, together: int) -> npt.NDArray[Any]:
    """Of ``[B P, ...]`` the paths from ``first`` on, ``[B together, ...]``."""
    of_rows = values.reshape(-1, len(_PATHS), *values.shape[1:])[:, first : first + together]
    return of_rows.reshape(-1, *values.shape[1:])


def _padded(known: FloatArray, steps: int) -> FloatArray:
    """``[B, steps]``, with NaN after."""
    return np.pad(known, ((0, 0), (0, steps - known.shape[1])), constant_values=np.nan)


def _batches(tasks: Sequence[Task], batch_size: int) -> Iterator[list[Task]]:
    """Tasks in order, as many as it takes to have ``batch_size`` rows."""
    batch: list[Task] = []
    for task in tasks:
        batch.append(task)
        if sum(len(one.context) for one in batch) >= batch_size:
            yield batch
            batch = []
    if batch:
        yield batch
