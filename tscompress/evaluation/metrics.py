"""MASE and the weighted quantile loss (WQL) of a dataset, and each series' contributions.

Definitions and values are gluonts'.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import DataError
from tscompress.evaluation.results import SeriesContributions
from tscompress.io.quiet import without_bars

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")
    from gluonts.dataset.split import split
    from gluonts.ev.metrics import MASE, MeanWeightedSumQuantileLoss
    from gluonts.ev.ts_stats import seasonal_error
    from gluonts.model.evaluation import evaluate_forecasts
    from gluonts.model.forecast import Forecast

Quantiles = npt.NDArray[np.floating[Any]]
"""``[N, 9, horizon]``: series, levels 0.1 … 0.9, steps."""
Band = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Quantiles 0.1, 0.5 and 0.9 of one series, each ``[horizon]``."""

#: Place of the median among the quantile levels.
MEDIAN = QUANTILE_LEVELS.index(0.5)
_BAND = [QUANTILE_LEVELS.index(level) for level in (0.1, 0.5, 0.9)]


def band(quantiles: Quantiles) -> Band:
    """Quantiles 0.1, 0.5 and 0.9 of the nine of one series, ``[9, horizon]``."""
    low, median, high = (tuple(map(float, row)) for row in quantiles[_BAND])
    return low, median, high


def score_quantiles(quantiles: Quantiles, dataset: EvaluationDataset) -> dict[str, float]:
    """MASE and WQL of quantiles ``[N, 9, horizon]``, over all series and steps of a dataset.

    MASE is the mean absolute error of the median in units of the context's seasonal error
    (steps whose seasonal error is zero are excluded); WQL is the mean over the levels of the
    quantile loss, summed over series and steps, relative to the sum of absolute labels. Missing
    labels are excluded from both.
    """
    # gluonts only asks a forecast for a level by name; its own objects look up each one again,
    # which takes longer than a small model's forecast.
    levels = [str(level) for level in QUANTILE_LEVELS]
    with without_bars():
        scores = evaluate_forecasts(
            [dict(zip(levels, of_series, strict=True)) for of_series in quantiles],
            test_data=backtest(dataset),
            metrics=[MASE(), MeanWeightedSumQuantileLoss(QUANTILE_LEVELS)],
            seasonality=dataset.seasonality,
            batch_size=5000,
        ).iloc[0]
    return {
        "MASE": float(scores["MASE[0.5]"]),
        "WQL": float(scores["mean_weighted_sum_quantile_loss"]),
    }


def quantile_array(forecasts: Iterable[Forecast]) -> Quantiles:
    """Quantiles 0.1 … 0.9 of forecasts, ``[N, 9, horizon]``; of samples as in gluonts."""
    levels = [str(level) for level in QUANTILE_LEVELS]
    return np.stack([[item.quantile(level) for level in levels] for item in forecasts])


def sample_quantiles(samples: npt.NDArray[np.float32]) -> Quantiles:
    """Quantiles 0.1 … 0.9 of samples ``[N, num_samples, horizon]``, not interpolated (gluonts)."""
    places = np.round((samples.shape[1] - 1) * np.array(QUANTILE_LEVELS)).astype(int)
    ordered: Quantiles = np.sort(samples, axis=1)[:, places]
    return ordered


def quantile_losses(quantiles: Quantiles, dataset: EvaluationDataset) -> Any:
    """Twice the pinball loss, as in gluonts' metrics.

    Parameters
    ----------
    quantiles
        ``[N, 9, horizon]``.

    Returns
    -------
    numpy.ma.MaskedArray
        ``[N, 9, horizon]``, masked where the label is missing.
    """
    labels = np.ma.masked_invalid(dataset.labels)[:, None, :]  # [N, 1, H]
    levels = np.array(QUANTILE_LEVELS)[:, None]  # [9, 1]
    return 2 * np.abs((labels - quantiles) * ((quantiles >= labels) - levels))


def seasonal_errors(dataset: EvaluationDataset) -> npt.NDArray[np.float64]:
    """Mean absolute difference of each context to the season before, ``[N]``; 0 where undefined.

    gluonts' definition: steps with a missing value are excluded, and a context shorter than a
    season is compared with the previous step.
    """
    season = dataset.seasonality
    errors = []
    for context in dataset.contexts:
        # Masks are slow, and only needed for gaps and for contexts of a season or less.
        whole = len(context) > season and bool(np.isfinite(context).all())
        values = context if whole else np.ma.masked_invalid(context)
        errors.append(np.ma.filled(seasonal_error(values, season, time_axis=-1), 0.0))
    return np.array(errors, dtype=np.float64).ravel()


def series_contributions(
    quantiles: Quantiles, dataset: EvaluationDataset, *, name: str = "the model"
) -> SeriesContributions:
    """Contribution of each series to WQL and MASE of its dataset.

    Parameters
    ----------
    quantiles
        ``[N, 9, horizon]``, see :func:`quantile_array`.
    name
        Of the model, for messages.

    Raises
    ------
    DataError
        A forecast is not finite: gluonts would silently exclude it from MASE.
    """
    bad = np.flatnonzero(~np.isfinite(quantiles).all(axis=(1, 2)))
    if bad.size:
        raise DataError(
            f"{name!r} forecasts NaN or infinity for {bad.size} of {len(quantiles)} series of "
            f"{dataset.name!r}, first series {bad[0]}; check the checkpoint, or its dtype."
        )
    labels = np.ma.masked_invalid(dataset.labels)  # [N, H]
    losses = quantile_losses(quantiles, dataset).mean(axis=1)  # [N, H]
    median = quantiles[:, MEDIAN]
    # Masked arrays exclude divisions by zero, as in gluonts.
    scaled = np.abs(labels - median) / seasonal_errors(dataset)[:, None]  # [N, H]
    return SeriesContributions(
        quantile_loss=_sums(losses),
        absolute_label=_sums(np.abs(labels)),
        scaled_error=_sums(scaled),
        scaled_steps=tuple(np.ma.count(scaled, axis=1).tolist()),
        groups=tuple(group // dataset.windows for group in dataset.groups) or None,
    )


def _sums(values: Any) -> tuple[float, ...]:
    """Sum of the unmasked values of each row of ``[N, H]``; 0 if there are none."""
    return tuple(np.ma.filled(values.sum(axis=1), 0.0).tolist())


def mean_contributions(runs: Sequence[SeriesContributions]) -> SeriesContributions:
    """Mean contributions of several runs on the same series."""
    return runs[0].model_copy(
        update={
            name: tuple(np.mean([getattr(run, name) for run in runs], axis=0).tolist())
            for name in ("quantile_loss", "scaled_error")
        }
    )


def backtest(dataset: EvaluationDataset) -> Any:
    """The dataset as gluonts' pairs of input and label."""
    _, template = split(dataset.entries(), offset=-dataset.horizon)
    return template.generate_instances(dataset.horizon)
