"""Fingerprints of series: hashes that do not depend on level, scale or where a series was cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tscompress.data.evaluation_sets import EvaluationDataset, SeriesArray

HashArray = npt.NDArray[np.uint64]

# Differences in a window. Sixteen observed values have four windows of the long length; the short
# one is for series with fewer values than that, of which only the beginning is compared. Hours are
# many and often small counts, so that windows of theirs are alike by chance unless they are longer.
_WINDOW_DIFFERENCES = 12
_HOURLY_WINDOW_DIFFERENCES = 36
_HOURLY_WINDOW_DISTANCE = 8  # of which only every so many is known: two are in any 53 values
_BEGINNING_DIFFERENCES = 8
_MIN_VALUES_FOR_WINDOWS = 16
_MIN_MATCHING_WINDOWS = 2
_WINDOWS_AT_ONCE = 1 << 16
_RECENT = 4096  # steps of a history in which an exact season is looked for


@dataclass(frozen=True)
class Fingerprints:
    """What a set of series is recognised by.

    Attributes
    ----------
    windows
        Hashes of all windows of 13 observed values, sorted.
    beginnings
        Hashes of the first 9 observed values, sorted.
    hourly_windows
        Hashes of every eighth window of 37 observed values of series of hours or less, sorted.
    """

    windows: HashArray
    beginnings: HashArray
    hourly_windows: HashArray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    def recognise(self, values: npt.ArrayLike) -> bool:
        """Whether a 1-D series is one of the set or a stretch of one.

        Of a series with at least 16 observed values two windows must be known, so that one chance
        resemblance accuses nobody; a shorter one may also begin like a series of the set. Of those
        of hours or less, two windows of 37 values must be known.
        """
        observed = _observed(values)
        if _known(window_fingerprints([observed]), self.windows) >= _MIN_MATCHING_WINDOWS:
            return True
        if len(self.hourly_windows):
            hourly = _hashes([observed], _HOURLY_WINDOW_DIFFERENCES)
            if _known(hourly, self.hourly_windows) >= _MIN_MATCHING_WINDOWS:
                return True
        short = len(observed) < _MIN_VALUES_FOR_WINDOWS
        return short and _known(_beginnings([observed]), self.beginnings) > 0


def fingerprints(arrays: Iterable[npt.ArrayLike]) -> Fingerprints:
    """Fingerprints of 1-D series; values that are not finite count as missing."""
    observed = [_observed(array) for array in arrays]
    return Fingerprints(window_fingerprints(observed), _beginnings(observed))


def label_fingerprints(dataset: EvaluationDataset) -> Fingerprints:
    """What series are recognised by that hold steps a dataset asks to forecast.

    The history before those steps may be trained on: one window of it alone is known, and it takes
    two to recognise a series. The other windows end in a step to be forecast that was observed. One
    that is in the recent history of the same series, as of an exact season, tells nothing.
    """
    tails, ends, histories = [], [], []
    contexts = dataset.contexts  # all of them are cut each time
    for index, values in enumerate(dataset.series):
        asked = len(_observed(values[-dataset.horizon :]))
        tails.append(_observed(values)[-asked - _WINDOW_DIFFERENCES - 1 :])
        ends.append(tails[-1][-asked - _WINDOW_DIFFERENCES :])
        first = index - index % dataset.windows
        histories.append(contexts[first][-_RECENT:])
    hashes = window_fingerprints(tails)
    if len(np.intersect1d(window_fingerprints(ends), window_fingerprints(histories))):
        of_each = [_new_windows(*parts) for parts in zip(tails, ends, histories, strict=True)]
        hashes = np.unique(np.concatenate(of_each))
    return Fingerprints(hashes, np.zeros(0, dtype=np.uint64))


def _new_windows(tail: SeriesArray, end: SeriesArray, history: SeriesArray) -> HashArray:
    """Hashes of the windows of a tail that its history does not have; none if no end is new."""
    of_end = window_fingerprints([end])
    repeated = np.intersect1d(of_end, window_fingerprints([history]))
    found: HashArray = np.setdiff1d(window_fingerprints([tail]), repeated)
    return found if len(repeated) < len(of_end) else found[:0]


def window_fingerprints(arrays: Iterable[npt.ArrayLike]) -> HashArray:
    """Hashes of every window of 13 observed values, sorted, each once.

    They are the same for any level and scale of a series and wherever it was cut. Windows that are
    common to unrelated series have none: constants, straight lines, smooth curves and counts of
    very few distinct values.
    """
    return _hashes([_observed(array) for array in arrays], _WINDOW_DIFFERENCES)


def hourly_fingerprints(arrays: Iterable[npt.ArrayLike]) -> HashArray:
    """Hashes of every eighth window of 37 observed values, sorted, each once."""
    observed = [_observed(array) for array in arrays]
    return _hashes(observed, _HOURLY_WINDOW_DIFFERENCES, _HOURLY_WINDOW_DISTANCE)


def _observed(values: npt.ArrayLike) -> SeriesArray:
    # Through float32, so that a copy stored in single precision gives the same hashes.
    with np.errstate(over="ignore"):
        single = np.asarray(values, dtype=np.float32).astype(np.float64)
    observed: SeriesArray = single[np.isfinite(single)]
    return observed


def _beginnings(observed: Iterable[SeriesArray]) -> HashArray:
    length = _BEGINNING_DIFFERENCES
    return _hashes([values[: length + 1] for values in observed], length)


def _known(hashes: HashArray, known: HashArray) -> int:
    """How many of ``hashes`` are in ``known``, which is sorted."""
    if not len(known):
        return 0
    place = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return int((known[place] == hashes).sum())


def _hashes(series: Iterable[SeriesArray], length: int, distance: int = 1) -> HashArray:
    """Hashes of windows of ``length`` differences of any series, sorted, each once."""
    # A NaN parts one series from the next: no window reaches over it.
    parts = [part for values in series for part in (values, [np.nan])]
    differences = np.diff(np.concatenate(parts)) if parts else np.zeros(0)
    if len(differences) < length:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(differences, length)[
        ::distance
    ]  # [N, length]
    blocks = range(0, len(windows), _WINDOWS_AT_ONCE)
    hashes = [_hash_block(windows[start : start + _WINDOWS_AT_ONCE]) for start in blocks]
    return np.unique(np.concatenate(hashes))


def _hash_block(windows: SeriesArray) -> HashArray:
    largest = np.abs(windows).max(axis=1, keepdims=True)  # [N, 1]; NaN where a window has NaN
    usable = largest[:, 0] > 0
    # Percent of the largest difference. Ratios of integers often lie half-way between two whole
    # percents; the odd offset keeps those clear of the edge, on which rounding noise would decide.
    pattern = np.floor(100 * windows[usable] / largest[usable] + 0.381966).astype(np.int16)
    bends = np.diff(pattern, axis=1)
    pattern = pattern[(_distinct(pattern) >= 6) & (_distinct(bends) >= windows.shape[1] // 2)]
    # A random linear map modulo 2^64, the same in every process.
    factors = np.random.default_rng(0).integers(1, 2**63, size=windows.shape[1], dtype=np.uint64)
    hashes: HashArray = (pattern.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _distinct(rows: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """Number of distinct values in each row."""
    ordered = np.sort(rows, axis=1)
    count: npt.NDArray[np.int64] = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    return count
