"""Results derived from others: the mean of several runs, and scores in seasonal errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import DataError
from tscompress.evaluation.calibration import BAND
from tscompress.evaluation.comparison import check_contributions
from tscompress.evaluation.metrics import mean_contributions, seasonal_errors
from tscompress.evaluation.results import (
    METRICS,
    DatasetScore,
    EvaluationResult,
    SeriesContributions,
    relative,
)


def mean_of_runs(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """Mean scores of several models as one result, such as those of several seeds of a recovery.

    WQL, MASE, coverage and crossing rate of each dataset are means over the runs; intervals are
    only over series. (A ratio is a geometric mean of means over the runs, not the mean of the runs'
    ratios.)

    Parameters
    ----------
    results
        One or more; the mean has the name and seconds of the first.

    Raises
    ------
    DataError
        A result has no contributions of series.
    UsageError
        The results are for different series.
    """
    first = results[0]
    for result in results:
        relative(result, first)  # refuses other datasets or numbers of series
        check_contributions(first, result)
    rows = []
    for row in first.rows:
        columns = mean_contributions([_series_of(result, row.dataset) for result in results])
        scores = {metric: columns.score(metric) for metric in METRICS}
        rows.append(
            row.model_copy(
                update={
                    "series": columns,
                    "cached": None,
                    **scores,
                    **_mean_measures([_row_of(result, row.dataset) for result in results]),
                }
            )
        )
    alike = all(result.sampling == first.sampling for result in results)
    sampling = first.sampling if alike else None
    one = all(result.sha256 == first.sha256 for result in results)
    sha256 = first.sha256 if one else None
    return first.model_copy(update={"rows": tuple(rows), "sampling": sampling, "sha256": sha256})


def _mean_measures(rows: Sequence[DatasetScore]) -> dict[str, float | None]:
    """Means of coverage and crossing rate, None where one has none, and the error of the mean."""
    measures = {
        name: None if None in values else float(np.mean(values))
        for name in ("coverage", "crossing_rate")
        if (values := [getattr(row, name) for row in rows])
    }
    coverage = measures["coverage"]
    error = None if coverage is None else abs(coverage - BAND)
    return {**measures, "coverage_error": error}


def scaled_quantile_losses(
    result: EvaluationResult, datasets: Iterable[EvaluationDataset]
) -> EvaluationResult:
    """The same forecasts with each series in units of its seasonal error: its WQL is SQL.

    SQL scales the quantile loss as MASE scales the absolute error (Shchur et al. 2025,
    "fev-bench"): a mean over series and steps that does not depend on their size, while large
    series dominate WQL. Series whose seasonal error is zero are excluded, and those of exactly one
    season. For a shorter context the seasonal error is that of the previous step, as in MASE here;
    fev excludes such series.

    Parameters
    ----------
    datasets
        The datasets of ``result``, or some of them; the others are dropped.

    Raises
    ------
    DataError
        ``result`` lacks a dataset, has no contributions of series, or is for other series.
    """
    rows = []
    for dataset in datasets:
        columns, errors = _series_of(result, dataset.name), seasonal_errors(dataset)
        steps = np.array(columns.scaled_steps)
        if len(errors) != len(steps) or not (errors[steps > 0] > 0).all():
            raise DataError(
                f"{result.model!r} was evaluated on other series of {dataset.name!r}; evaluate it "
                "again."
            )
        known = steps > 0
        losses = np.where(known, columns.quantile_loss, 0) / np.where(known, errors, 1)
        scaled = columns.model_copy(
            update={
                "quantile_loss": tuple(losses.tolist()),
                "absolute_label": tuple(steps.astype(np.float64).tolist()),
            }
        )
        row = _row_of(result, dataset.name)
        rows.append(row.model_copy(update={"series": scaled, "WQL": scaled.score("WQL")}))
    return result.model_copy(update={"rows": tuple(rows)})


def _row_of(result: EvaluationResult, dataset: str) -> DatasetScore:
    return next(row for row in result.rows if row.dataset == dataset)


def _series_of(result: EvaluationResult, dataset: str) -> SeriesContributions:
    for row in result.rows:
        if row.dataset == dataset and row.series is not None:
            return row.series
    raise DataError(f"no series of {dataset!r} were kept for {result.model!r}; evaluate again.")
