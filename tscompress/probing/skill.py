"""Skill from losses, and its interval.

skill = (loss of the best constant − loss of the model) / (loss of the best constant − best loss)

is 1 for the best possible forecast and 0 for the best constant one; worse than that is negative.
Loss is the mean absolute error of the median, or of all quantiles for tasks ``by_quantiles``.
Series are resampled for 95% intervals, the same ones for all models (see
:mod:`tscompress.evaluation.intervals`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from tscompress.evaluation.intervals import MAX_DRAWS
from tscompress.io.strict import Strict

Array = npt.NDArray[np.float64]

RESAMPLES = 1000


class Estimate(Strict):
    """A value and its 95% interval; None for a single series."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f}{interval}"


Column = Literal["model", "seasonal_naive", "without_covariates"]


class Losses(Strict):
    """Loss of each series, as columns of ``[N]`` numbers, each a mean over the steps."""

    model: tuple[float, ...]
    best: tuple[float, ...]
    constant: tuple[float, ...]
    seasonal_naive: tuple[float, ...]
    without_covariates: tuple[float, ...] | None = None
    """Of the model on the same series alone; None: the task has no covariates."""

    @model_validator(mode="after")
    def _same_lengths(self) -> Losses:
        columns = {name: getattr(self, name) for name in type(self).model_fields}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(lengths.values())) > 1 or not self.model:
            raise ValueError(f"the columns are empty or differ in length: {lengths}")
        return self

    def skill(self, of: Column = "model") -> float:
        """Of all series together."""
        return float(_skill(*(np.array([getattr(self, name)]) for name in _columns(of)))[0])

    def resampled(self, name: str, of: Column = "model") -> Array:
        """Skill on resampled series, ``[RESAMPLES]``.

        The same series for each model, chosen by the name of the task; n − 1 of n, as
        :mod:`tscompress.evaluation.intervals` explains. NaN of a single series.
        """
        count = len(self.model)
        if count == 1:
            return np.full(RESAMPLES, np.nan)
        columns = [np.array(getattr(self, column)) for column in _columns(of)]
        parts = [_skill(*(column[picks] for column in columns)) for picks in draws(name, count)]
        return np.concatenate(parts)


def draws(name: str, count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Resamples ``[R, count − 1]`` of series for the task ``name``, some at a time."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    step = max(1, MAX_DRAWS // count)
    for first in range(0, RESAMPLES, step):
        yield rng.integers(count, size=(min(step, RESAMPLES - first), count - 1))


def _columns(of: str) -> tuple[str, str, str]:
    return of, "best", "constant"


def _skill(losses: Array, best: Array, constant: Array) -> Array:
    """Skill over the last axis, series ``[..., N]``; NaN if the best constant is perfect."""
    losses, best, constant = (column.sum(axis=-1) for column in (losses, best, constant))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(constant > best, (constant - losses) / (constant - best), np.nan)


def estimate(value: float, draws: Array) -> Estimate:
    """A value with the middle 95% of its draws ``[R]``; no interval if no draw is defined.

    Draws that are not, as of series on which the best constant is perfect, may lie anywhere: they
    count as the lowest of the others for the lower end, and as the highest for the upper one.
    """
    defined = np.isfinite(draws)
    if not defined.any():
        return Estimate(value=value)
    lowest, highest = draws[defined].min(), draws[defined].max()
    low = np.quantile(np.where(defined, draws, lowest), 0.025)
    high = np.quantile(np.where(defined, draws, highest), 0.975)
    return Estimate(value=value, low=float(low), high=float(high))
