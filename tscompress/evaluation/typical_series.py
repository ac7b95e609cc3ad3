"""Forecasts of two models for one typical series of each dataset, for figures.

The series of each dataset with the original's median error, so that none is hand-picked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, model_validator

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.evaluation.fidelity import check_quantiles
from tscompress.evaluation.metrics import Band, Quantiles, band, series_contributions

#: Missing values are None: JSON has no NaN.
Known = tuple[float | None, ...]


class ForecastExample(BaseModel):
    """One series with its labels and the forecasts of two models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    series: int
    """Index in the dataset."""
    name: str | None = None
    """Its id in the user's file; None where it has none."""
    context: Known
    """The last steps before the forecast."""
    label: Known
    original: Band
    compressed: Band

    @model_validator(mode="after")
    def _same_horizon(self) -> ForecastExample:
        lengths = {len(row) for row in (self.label, *self.original, *self.compressed)}
        if len(lengths) > 1:
            raise ValueError(f"labels and quantiles differ in length: {sorted(lengths)}")
        return self


def typical_example(
    original: Quantiles, compressed: Quantiles, dataset: EvaluationDataset
) -> ForecastExample:
    """The series of a dataset with the original's median scaled error.

    Parameters
    ----------
    original, compressed
        ``[N, 9, horizon]``: quantiles 0.1 … 0.9, see
        :func:`tscompress.evaluation.metrics.quantile_array`.

    Raises
    ------
    UsageError
        The shapes are not those of the dataset.
    DataError
        A forecast is not finite.
    """
    check_quantiles(original, compressed, dataset)
    index = _median_series(original, dataset)
    tail = max(4 * dataset.horizon, 3 * dataset.seasonality)
    return ForecastExample(
        dataset=dataset.name,
        series=index,
        name=dataset.series_name(index),
        context=known(dataset.contexts[index][-tail:]),
        label=known(dataset.labels[index]),
        original=band(original[index]),
        compressed=band(compressed[index]),
    )


def _median_series(original: Quantiles, dataset: EvaluationDataset) -> int:
    """Median among the series with a seasonal error; the first series if none has one."""
    columns = series_contributions(original, dataset, name="the original")
    errors, steps = columns.parts("MASE")
    counted = np.flatnonzero(steps > 0)
    if not counted.size:
        return 0
    order = counted[np.argsort(errors[counted] / steps[counted], kind="stable")]
    return int(order[(len(order) - 1) // 2])


def known(values: npt.NDArray[np.floating[Any]]) -> Known:
    """Values with None for missing ones."""
    return tuple(float(value) if np.isfinite(value) else None for value in values)
