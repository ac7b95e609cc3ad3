"""Batch shapes, and windows of series cut into context and target as a model meets them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tscompress.data.synthetic import FloatArray
from tscompress.io.strict import Strict


class Bucket(Strict):
    """One batch shape, drawn with ``weight`` against the others."""

    context_length: int = Field(ge=2, le=10**7)
    horizon: int = Field(ge=1, le=10**6)
    batch_size: int = Field(ge=1, le=10**6)
    weight: float = Field(default=1.0, gt=0)


def draw_bucket(rng: np.random.Generator, buckets: Sequence[Bucket]) -> Bucket:
    """One of the buckets, in proportion to their weights."""
    weights = np.array([bucket.weight for bucket in buckets])
    return buckets[rng.choice(len(weights), p=weights / weights.sum())]


def split_windows(
    rng: np.random.Generator,
    windows: FloatArray,
    context_length: int,
    missing_probability: float,
    shorten_probability: float = 0.5,
    group_ids: NDArray[np.int64] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Context ``[B, T]`` and target ``[B, H]`` of windows ``[B, T + H]``, as a model meets them.

    A share ``shorten_probability`` of the contexts is shortened, in a share
    ``missing_probability`` of them values go missing, and targets that cannot follow from their
    context are NaN. Series of one group, by ``group_ids`` ``[B]``, have contexts of one length.
    """
    context, target = windows[:, :context_length].copy(), windows[:, context_length:].copy()
    _shorten_contexts(rng, context, shorten_probability, group_ids)
    _drop_values(rng, context, missing_probability)
    _mask_unpredictable(context, target)
    # A context in which nothing is observed has no scale; give it one value to normalise by.
    context[~np.isfinite(context).any(axis=1), -1] = 0.0
    return context, target


def _shorten_contexts(
    rng: np.random.Generator,
    context: FloatArray,
    probability: float,
    group_ids: NDArray[np.int64] | None,
) -> None:
    """Some of the series keep a shorter history, uniformly from 6 steps to the bucket's."""
    count, length = context.shape
    kept = rng.integers(min(6, length), length + 1, size=count)
    kept[rng.random(count) >= probability] = length
    if group_ids is not None:
        kept = kept[np.unique(group_ids, return_index=True)[1]][group_ids]
    context[np.arange(length)[None, :] < length - kept[:, None]] = np.nan


def _drop_values(rng: np.random.Generator, context: FloatArray, probability: float) -> None:
    count, length = context.shape
    share = rng.uniform(0, 0.3, (count, 1)) * (rng.random((count, 1)) < probability)
    context[rng.random((count, length)) < share] = np.nan


def _mask_unpredictable(context: FloatArray, target: FloatArray) -> None:
    """Targets many deviations away from their context teach nothing and swamp the loss."""
    with np.errstate(all="ignore"):
        observed = np.isfinite(context)
        count = np.maximum(observed.sum(axis=1, keepdims=True), 1)
        mean = np.where(observed, context, 0).sum(axis=1, keepdims=True) / count
        spread = np.sqrt(
            (np.where(observed, context - mean, 0) ** 2).sum(axis=1, keepdims=True) / count
        )
        distant = ~(np.abs(target - mean) <= 15 * spread + 1e-6 * np.abs(mean))
    target[distant] = np.nan
