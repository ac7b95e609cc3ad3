"""Exported Chronos-2 without group attention: each series is forecast alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tscompress.errors import UsageError
from tscompress.runtime.chronos2 import Chronos2Forecaster, Rows
from tscompress.runtime.contexts import Task
from tscompress.runtime.quantiles import FloatArray

_KIND = "this model, compressed with --univariate, forecasts each series alone"
CROSS_LEARNING = f"cross_learning is True, and {_KIND}; leave it out, or take the original."


def groups_message(size: int) -> str:
    """Why a univariate model refuses a group of ``size`` series."""
    return (
        f"a task has {size} series (targets, covariates), and {_KIND}; give single series, or take "
        "the original."
    )


class UnivariateForecaster(Chronos2Forecaster):
    """Forecasts of an exported univariate Chronos-2."""

    inputs = ("context", "observed", "steps_ahead")

    def forecast(
        self,
        tasks: Sequence[Task],
        steps: int,
        *,
        batch_size: int = 256,
        cross_learning: bool = False,
    ) -> list[FloatArray]:
        """As :meth:`Chronos2Forecaster.forecast`, of tasks of one series.

        Raises
        ------
        UsageError
            A task has several, ``cross_learning`` is true, or ``batch_size`` is out of range.
        """
        if cross_learning:
            raise UsageError(CROSS_LEARNING)
        largest = max((len(task.context) for task in tasks), default=1)
        if largest > 1:
            raise UsageError(groups_message(largest))
        return super().forecast(tasks, steps, batch_size=batch_size)

    def _call(self, rows: Rows, steps: int) -> FloatArray:
        ahead = self.steps_of_call(steps)
        return self.graph(
            **self.patched(rows.context[:, -self.context_length :]),
            steps_ahead=np.arange(ahead, dtype=np.float32),
        )
