"""Quantiles of forecasts in float32, with the interpolation of the stock pipelines.

Computed in the same order of operations, so that forecasts beyond one call differ from theirs by
rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
#: Levels at which forecasts are asked for and scored.
DEFAULT_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def empirical(values: FloatArray, levels: Sequence[float]) -> FloatArray:
    """Quantiles of ``values`` ``[..., N]`` that weigh the same, ``[..., Q]``.

    Between two values, linear in the rank.
    """
    ordered = np.sort(values, axis=-1)
    last = values.shape[-1] - 1
    ranks = np.asarray(levels, np.float32) * np.float32(last)
    below = np.floor(ranks).astype(int)
    above = np.minimum(below + 1, last)
    share = (ranks - below).astype(np.float32)
    low, high = ordered[..., below], ordered[..., above]
    step = high - low
    found = np.where(share < 0.5, low + share * step, high - step * (1 - share))
    quantiles: FloatArray = found.astype(np.float32)
    return quantiles


def interpolated(
    values: FloatArray, known: Sequence[float] | FloatArray, levels: Sequence[float]
) -> FloatArray:
    """Quantiles at ``levels`` between those at ``known`` levels, linear in the level.

    Parameters
    ----------
    values
        ``[..., N]``.
    known
        Ascending levels, ``[N]`` or ``[..., N]``. Below the first and above the last, quantiles
        are those at the first and the last.
    levels
        ``[Q]``.

    Returns
    -------
    ndarray
        ``[..., Q]``.
    """
    at = np.broadcast_to(np.asarray(known, np.float32), values.shape)
    edges = [(0, 0)] * (values.ndim - 1) + [(1, 1)]
    at = np.pad(at, edges, constant_values=((0, 1),))
    values = np.pad(values, edges, mode="edge")
    return np.stack([_at_level(values, at, np.float32(one)) for one in levels], axis=-1)


def _at_level(values: FloatArray, at: FloatArray, level: np.float32) -> FloatArray:
    above = np.minimum((at <= level).sum(axis=-1, keepdims=True), at.shape[-1] - 1)
    low_level, high_level, low, high = (
        np.take_along_axis(array, index, axis=-1)[..., 0]
        for array in (at, values)
        for index in (above - 1, above)
    )
    gap = high_level - low_level
    weight = np.where(gap == 0, 0, (level - low_level) / np.where(gap == 0, 1, gap))
    found: FloatArray = (low + weight * (high - low)).astype(np.float32)
    return found


def weighted(values: FloatArray, weights: FloatArray, levels: Sequence[float]) -> FloatArray:
    """Quantiles of ``values`` ``[..., N]`` of which each has a weight, ``[N]``: ``[..., Q]``."""
    order = np.argsort(values, axis=-1, kind="stable")
    share = (weights / weights.sum()).astype(np.float32)
    # As torch does: summed in float64. Weights are small beside their sum, and so is the step
    # between two of them, by which a quantile is interpolated.
    summed = np.cumsum(share[order], axis=-1, dtype=np.float64).astype(np.float32)
    cumulative = np.clip(summed, 0, 1)
    return interpolated(np.take_along_axis(values, order, axis=-1), cumulative, levels)


def probability_masses(levels: Sequence[float]) -> FloatArray:
    """How much of the probability each quantile stands for, by the trapezoidal rule: ``[Q]``."""
    edges = np.concatenate([[0], levels, [1]]).astype(np.float32)
    mass = (edges[2:] - edges[:-2]) / 2
    found: FloatArray = mass / np.cumsum(mass)[-1]  # one after the other, as torch sums so few
    return found
