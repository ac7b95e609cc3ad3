"""How far the forecasts of a graph are from those of the model that it was exported from."""

from __future__ import annotations

import numpy as np
from chronos import BaseChronosPipeline

from tscompress.families.registry import adapter_of_pipeline
from tscompress.runtime.forecaster import Forecaster

_SERIES = 3


def largest_difference(pipeline: BaseChronosPipeline, forecaster: Forecaster) -> float:
    """Largest difference of a quantile, as a share of the largest quantile of its series.

    Of series with gaps, in two lengths, neither of them in whole patches, over one call. Of a
    family that draws samples, of logits.
    """
    longest = forecaster.context_length
    lengths = (max(longest // 2 - 3, 1), longest)
    # Python's max would leave out a NaN that comes second.
    return float(np.max([_difference(pipeline, forecaster, steps) for steps in lengths]))


def _difference(pipeline: BaseChronosPipeline, forecaster: Forecaster, steps: int) -> float:
    family = adapter_of_pipeline(pipeline)
    ours, theirs = family.compared(pipeline, forecaster, _contexts(steps))
    scale = np.abs(theirs).max(axis=tuple(range(1, theirs.ndim)), keepdims=True)
    return float((np.abs(ours - theirs) / np.maximum(scale, 1e-30)).max())


def _contexts(steps: int) -> list[np.ndarray]:
    """Seasons of three lengths around zero, ``[steps]`` each; of the second a part is missing."""
    time = np.arange(steps, dtype=np.float32)
    found = [np.sin(2 * np.pi * time / (5 + 7 * row)) for row in range(_SERIES)]
    found = [(one + 0.1 * np.cos(time**1.5)).astype(np.float32) for one in found]
    found[1][steps // 3 : steps // 2] = np.nan
    return found
