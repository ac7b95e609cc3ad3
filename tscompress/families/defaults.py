"""Default settings of calibration and recovery, as each family has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class BatchShape(NamedTuple):
    """Steps of context and target, series in a batch, and the share of batches of this shape."""

    context_length: int
    horizon: int
    batch_size: int
    weight: float


@dataclass(frozen=True)
class FamilyDefaults:
    """Default settings of calibration and recovery.

    Attributes
    ----------
    calibration_windows
        Series, or windows of long ones. With fewer, fits of wide decoder layers follow the noise.
    loss_windows
        Of those held out, about how many the loss of each cut is measured on, where there are more;
        None: all.
    calibration_length_power
        The number of synthetic series of length L is proportional to L to the minus this.
    collection_steps
        Longest window of the collections of real series; None: the model's context length.
    batch_shapes
        Of recovery.
    target_weight
        Weight of the loss on targets, in recovery.
    held_out_series
        Series for choosing the weights that a recovery keeps.
    real_weight
        Weight of windows of the collections in the corpus of recovery; None: they are read as given
        series are, where none are given.
    trend_weight
        Weight of trends alone in that corpus.
    learning_rates
        Of recovery, by optimizer.
    learning_rate_when_small
        Of Muon, for a model with less than half of its teacher's parameters; None: as above.
    learning_rate_by_distance
        Of Muon, at most this times the distance to the teacher on held-out series before the first
        step: its steps have a size of their own, and lead away where little is to be won back.
        None: no such bound.
    keeps_norm_sizes
        In recovery, norms of the student become as large as its teacher's
        (:mod:`tscompress.training.norm_sizes`).
    recovery_scheme
        Rises when its recovery draws other batches or takes other steps than before: an
        unfinished one of before is then not resumed.
    """

    calibration_windows: int
    calibration_length_power: float
    collection_steps: int | None
    batch_shapes: tuple[BatchShape, ...]
    target_weight: float
    held_out_series: int
    real_weight: float | None
    learning_rates: Mapping[str, float]
    trend_weight: float = 0.0
    learning_rate_when_small: float | None = None
    learning_rate_by_distance: float | None = None
    keeps_norm_sizes: bool = False
    recovery_scheme: int = 1
    loss_windows: int | None = None
