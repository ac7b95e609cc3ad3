"""Forecasts of two models for typical series of each dataset, for figures.

Series are taken by the original's error, so that none is hand-picked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.evaluation.fidelity import check_quantiles
from tscompress.evaluation.metrics import Band, Quantiles, band, series_contributions
from tscompress.io.strict import Strict

#: Missing values are None: JSON has no NaN.
Known = tuple[float | None, ...]
#: Series that are drawn; of many datasets one each.
EXAMPLES = 6


class ForecastExample(Strict):
    """One series with its labels and the forecasts of two models."""

    dataset: str
    series: int
    """Index in the dataset."""
    name: str | None = None
    """Its id in the user's file; None where it has none."""
    times: tuple[str, ...] = ()
    """Of ``context`` and ``label``, ISO 8601; empty where the file has none."""
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


def typical_examples(
    original: Quantiles, compressed: Quantiles, dataset: EvaluationDataset, count: int = 1
) -> list[ForecastExample]:
    """Series of a dataset at even steps of the original's scaled error, the least first.

    Parameters
    ----------
    original, compressed
        ``[N, 9, horizon]``: quantiles 0.1 … 0.9, see
        :func:`tscompress.evaluation.metrics.quantile_array`.
    count
        At most this many; one is that of median error.

    Raises
    ------
    UsageError
        The shapes are not those of the dataset.
    DataError
        A forecast is not finite.
    """
    check_quantiles(original, compressed, dataset)
    order = _by_error(original, dataset)
    tail = max(4 * dataset.horizon, 3 * dataset.seasonality)
    count = min(count, len(order))
    # The middles of ``count`` equal parts: neither the best nor the worst series.
    places = [((2 * part + 1) * len(order) - 1) // (2 * count) for part in range(count)]
    return [
        ForecastExample(
            dataset=dataset.name,
            series=index,
            name=dataset.series_name(index),
            times=dataset.times(index, min(tail + dataset.horizon, len(dataset.series[index]))),
            context=known(dataset.contexts[index][-tail:]),
            label=known(dataset.labels[index]),
            original=band(original[index]),
            compressed=band(compressed[index]),
        )
        for index in (int(order[place]) for place in places)
    ]


def _by_error(original: Quantiles, dataset: EvaluationDataset) -> npt.NDArray[np.int64]:
    """Series with a seasonal error, the least error first; the first series if none has one."""
    columns = series_contributions(original, dataset, name="the original")
    errors, steps = columns.parts("MASE")
    counted = np.flatnonzero(steps > 0)
    if not counted.size:
        return np.zeros(1, dtype=np.int64)
    order: npt.NDArray[np.int64] = counted[
        np.argsort(errors[counted] / steps[counted], kind="stable")
    ]
    return order


def known(values: npt.NDArray[np.floating[Any]]) -> Known:
    """Values with None for missing ones."""
    return tuple(float(value) if np.isfinite(value) else None for value in values)
