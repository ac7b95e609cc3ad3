"""Whether a series has a season, from the autocorrelation of its steps."""

from __future__ import annotations

import numpy as np

from tscompress.data.synthetic import FloatArray
from tscompress.io.text import percent

#: Of the correlation that a season needs; white noise reaches 4 standard errors in few series.
_LEAST_CORRELATION = 0.3
_STANDARD_ERRORS = 4.0
_FEWEST_STEPS = 12
#: With at least this share of seasonal series a calibration needs no note.
_FEW = 0.05


def has_season(values: FloatArray) -> bool:
    """Whether the differences of a series repeat at some lag from 2 to half of its length.

    The autocorrelation of the differences must have a peak of 0.3 and of 4 standard errors of white
    noise. Trends, levels and random walks have none, since differences take them out. Missing
    values count as no change.

    Parameters
    ----------
    values
        ``[L]``; NaN where nothing was observed.
    """
    observed = np.flatnonzero(np.isfinite(values))
    if observed.size < _FEWEST_STEPS:
        return False
    steps = np.diff(values[observed[0] : observed[-1] + 1].astype(np.float64))
    steps = np.where(np.isfinite(steps), steps, np.nan)
    if not np.isfinite(steps).any():  # no two values in a row
        return False
    steps = np.nan_to_num(steps - np.nanmean(steps))
    length = len(steps)
    power = np.abs(np.fft.rfft(steps, 2 * length)) ** 2
    covariance = np.fft.irfft(power)[: length // 2 + 2]
    if covariance[0] <= 0:
        return False
    lags = np.arange(len(covariance))
    correlation = covariance / covariance[0] * length / (length - lags)
    inner = correlation[2:-1]
    peaks = (inner >= correlation[1:-2]) & (inner >= correlation[3:])
    least = np.maximum(_LEAST_CORRELATION, _STANDARD_ERRORS / np.sqrt(length - lags[2:-1]))
    return bool((peaks & (inner > least)).any())


def season_note(share: float | None, count: int) -> str | None:
    """A caveat on a compression with ``count`` series of which ``share`` hold a season.

    Folding keeps what the calibration series use: without seasons among them, a model that could
    repeat a season can lose that.
    """
    if share is None or share > _FEW:
        return None
    found = "none" if share == 0 else f"only {percent(share, 1)}"
    return (
        f"{found} of the {count} calibration series hold a season; what the model can do with "
        "seasons may be lost. Calibrate on series that have some, and look at tscompress probe."
    )
