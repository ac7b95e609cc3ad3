"""Paired bootstrap over series: resampled ratios, their intervals, and Pareto fronts.

Intervals are percentiles of the resampled ratios. A dataset of n series is resampled with n − 1
draws, which makes the bootstrap variance of a mean unbiased for any n (Rao and Wu 1988, "Resampling
inference with complex survey data"). Its coverage was best among percentiles of n draws, BCa
intervals and the normal approximation (``eval/coverage.py``).

``scipy.stats.bootstrap`` is not used: it would be one more dependency, its jackknife takes
quadratic time, and it would resample again for each dataset, metric and model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

#: Values of draws held at a time; 32 MB.
MAX_DRAWS = 4_000_000


def resampled_log_ratios(
    reference: Values, others: Values, resamples: int, rng: np.random.Generator
) -> Values:
    """Logarithms of ratios of sums, for resamples of the series.

    Parameters
    ----------
    reference
        ``[N]``: contributions of at least two series to the reference's score, at least 0.
    others
        ``[N, K]``: the same for K other models.
    resamples
        Draws of N − 1 series with replacement, the same for all models.

    Returns
    -------
    ndarray
        ``[resamples, K]``; infinite where one of the two sums is zero, 0 where both are.
    """
    count = len(reference)
    # Differences to the reference: models that agree have a ratio of exactly 1.
    columns = np.column_stack([reference, others - reference[:, None]])  # [N, 1 + K]
    sums = np.empty((resamples, columns.shape[1]))
    step = max(1, MAX_DRAWS // count)
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        draws = rng.integers(count, size=(rows, count - 1)) + count * np.arange(rows)[:, None]
        times = np.bincount(draws.ravel(), minlength=rows * count).reshape(rows, count)
        sums[first : first + rows] = times @ columns
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: Values = np.log1p(sums[:, 1:] / sums[:, :1])
    ratios[np.isnan(ratios)] = 0.0
    return ratios


def percentile_interval(log_ratios: Values, confidence: float) -> tuple[float, float] | None:
    """Percentile interval of the resampled ratios; None if some are not finite.

    Parameters
    ----------
    log_ratios
        ``[resamples]``.
    """
    if not np.isfinite(log_ratios).all():
        return None
    low, high = np.exp(np.quantile(log_ratios, [(1 - confidence) / 2, (1 + confidence) / 2]))
    return float(low), float(high)


def pareto_front(costs: Values, scores: Values) -> npt.NDArray[np.bool_]:
    """Mask of the ``[N]`` points that no other dominates.

    Smaller is better in ``costs`` and ``scores``; equal points are both on the front.
    """
    as_cheap, as_good = costs[:, None] <= costs, scores[:, None] <= scores  # [other, point]
    better = (costs[:, None] < costs) | (scores[:, None] < scores)
    return np.logical_not((as_cheap & as_good & better).any(axis=0))
