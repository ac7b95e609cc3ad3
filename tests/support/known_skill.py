"""Probes of forecasters whose skill is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.probing.measure import score_task
from tscompress.probing.results import ProbeResult, TaskScore
from tscompress.probing.tasks import TASKS, ProbeTask


def constant_forecast(task: ProbeTask) -> np.ndarray[Any, Any]:
    """The best constant of each series, as all quantiles ``[N, Q, H]``."""
    shape = (task.num_series, len(QUANTILE_LEVELS), task.horizon)
    return np.broadcast_to(task.draw().constant[:, None, None], shape)


def mixture(task: ProbeTask, share: float) -> TaskScore:
    """Of a forecaster that is ``share`` of the way from the best constant to the best."""
    drawn = task.draw()
    constant = constant_forecast(task)
    alone = constant if task.covariates else None
    return score_task(task, drawn, share * drawn.best + (1 - share) * constant, alone)


def result_of(name: str, shares: Mapping[str, float]) -> ProbeResult:
    """Of a forecaster that is such a mixture at each of the tasks."""
    scores = tuple(mixture(TASKS[task], share) for task, share in shares.items())
    return ProbeResult(model=name, seed=0, tasks=scores)
