"""Calibration of forecasts: how often labels are below their quantiles."""

from __future__ import annotations

import numpy as np

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, SeriesArray
from tscompress.evaluation.metrics import Quantiles
from tscompress.io.strict import Strict

#: Share of labels from the quantile 0.1 to 0.9 of a calibrated forecast.
BAND = 0.8


class Calibration(Strict):
    """How often labels are below the quantiles of one model."""

    frequencies: tuple[float, ...]
    """Share of labels at or below each of the nine quantiles; the levels, if calibrated."""
    coverage: float
    """Share of labels from the quantile 0.1 to 0.9; 0.8, if calibrated."""
    error: float
    """Mean over the levels of |frequency − level|."""
    crossing_rate: float
    """Share of neighbouring quantiles that cross."""


def calibration(quantiles: Quantiles, labels: SeriesArray) -> Calibration:
    """Empirical frequencies of the quantiles of one model.

    Parameters
    ----------
    quantiles
        ``[N, 9, horizon]``.
    labels
        ``[N, horizon]``; missing ones are NaN and excluded.
    """
    known = np.isfinite(labels)
    labels = labels.astype(quantiles.dtype)  # else a value forecast exactly may lie beside itself
    below = (labels[:, None, :] <= quantiles).transpose(1, 0, 2)[:, known]  # [9, labels]
    inside = (labels >= quantiles[:, 0]) & (labels <= quantiles[:, -1])  # [N, H]
    frequencies = below.mean(axis=1)
    return Calibration(
        frequencies=tuple(map(float, frequencies)),
        coverage=float(inside[known].mean()),
        error=float(np.abs(frequencies - QUANTILE_LEVELS).mean()),
        crossing_rate=float((np.diff(quantiles, axis=1) < 0).mean()),
    )
