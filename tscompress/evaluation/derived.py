"""Results made of others: the mean of several runs, and scores in units of seasonal errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import DataError
from tscompress.evaluation.comparison import check_contributions
from tscompress.evaluation.metrics import mean_contributions, seasonal_errors
from tscompress.evaluation.results import METRICS, EvaluationResult, SeriesContributions, relative


def mean_of_runs(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """What several models score on average, as one result: of the seeds of one recovery, say.

    WQL and MASE of each dataset are the means of theirs, and intervals are of the series alone. (A
    ratio of it is a geometric mean of means over the runs, not the mean of the runs' ratios.)

    Parameters
    ----------
    results
        One or more; name and seconds of the mean are those of the first.

    Raises
    ------
    DataError
        A result was kept without its series.
    UsageError
        The results are of different series.
    """
    first = results[0]
    for result in results:
        relative(result, first)  # refuses other datasets, and other numbers of series
        check_contributions(first, result)
    rows = []
    for row in first.rows:
        columns = mean_contributions([_series_of(result, row.dataset) for result in results])
        scores = {metric: columns.score(metric) for metric in METRICS}
        rows.append(row.model_copy(update={"series": columns, "cached": None, **scores}))
    alike = all(result.sampling == first.sampling for result in results)
    sampling = first.sampling if alike else None
    return first.model_copy(update={"rows": tuple(rows), "sampling": sampling})


def scaled_quantile_losses(
    result: EvaluationResult, datasets: Iterable[EvaluationDataset]
) -> EvaluationResult:
    """The same forecasts with each series in units of its seasonal error: its WQL is SQL.

    SQL is to the quantile loss what MASE is to the absolute error (Shchur et al. 2025,
    "fev-bench"): the mean over series and steps, whatever the size of a series, where WQL is a sum
    that large ones carry. Series whose seasonal error is zero are left out. Of a context no longer
    than a season it is that of the step before, as MASE has it here; fev leaves such series out.

    Parameters
    ----------
    datasets
        Those that ``result`` is of, or some of them; the others are dropped.

    Raises
    ------
    DataError
        ``result`` lacks a dataset, was kept without its series, or has other ones.
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
        row = next(row for row in result.rows if row.dataset == dataset.name)
        rows.append(row.model_copy(update={"series": scaled, "WQL": scaled.score("WQL")}))
    return result.model_copy(update={"rows": tuple(rows)})


def _series_of(result: EvaluationResult, dataset: str) -> SeriesContributions:
    for row in result.rows:
        if row.dataset == dataset and row.series is not None:
            return row.series
    raise DataError(f"no series of {dataset!r} were kept for {result.model!r}; evaluate again.")
