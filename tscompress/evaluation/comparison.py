"""How sure a comparison of forecast quality is: paired bootstrap over series, and a verdict.

Models are compared by the geometric mean over datasets of the ratio of their scores. Series are
what would differ in another benchmark of the same kind, so series are resampled: within each
dataset, with replacement, the same ones for all models (Efron and Tibshirani 1993, "An Introduction
to the Bootstrap", chapter 8). Chance in sampled forecasts is a part of what a series contributes.

Intervals are percentiles of the resampled ratios. A dataset of n series is resampled with n − 1
draws, which makes the bootstrap variance of a mean unbiased however few series there are (Rao and
Wu 1988, "Resampling inference with complex survey data"). Measured against percentiles of n draws,
BCa intervals and the normal approximation it covered best (``eval/coverage.py``). None of them can
know of large series that were not drawn: where few carry the score, a note says so.

``scipy.stats.bootstrap`` is not used: it would be one more dependency, its jackknife takes
quadratic time, and it would draw anew for each dataset, metric and model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import BaseModel, ConfigDict
from rich import box
from rich.markup import escape
from rich.table import Table

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.evaluate import (
    METRICS,
    EvaluationResult,
    SeriesContributions,
    mean_contributions,
    relative,
    seasonal_errors,
)

Values = npt.NDArray[np.float64]

_STRICT = ConfigDict(extra="forbid", frozen=True)
#: Numbers of draws held at a time; 32 MB.
_CELLS = 4_000_000
#: With fewer, intervals are clearly too narrow (``eval/coverage.py``).
_FEW_SERIES = 15


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


class Ratio(BaseModel):
    """A score divided by the reference's, below 1 is better, and its confidence interval.

    ``low`` and ``high`` are None where the series cannot tell: there is one, or none was kept.
    """

    model_config = _STRICT

    ratio: float
    low: float | None = None
    high: float | None = None


class DatasetComparison(BaseModel):
    """One model against the reference on one dataset."""

    model_config = _STRICT

    dataset: str
    series_count: int
    MASE: Ratio
    WQL: Ratio


class ModelComparison(BaseModel):
    """One model against the reference: geometric means over the datasets, and each dataset."""

    model_config = _STRICT

    model: str
    MASE: Ratio
    WQL: Ratio
    verdicts: tuple[str, ...]
    datasets: tuple[DatasetComparison, ...]


class Comparison(BaseModel):
    """Several models against the first, ``reference``."""

    model_config = _STRICT

    reference: str
    models: tuple[ModelComparison, ...]
    confidence: float
    margin: float
    resamples: int
    seed: int
    notes: tuple[str, ...] = ()
    """What a reader of the intervals has to know."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return self.model_dump(mode="json")

    def frame(self) -> pd.DataFrame:
        """One row for each model, dataset (or ``geometric mean``) and metric."""
        rows = []
        for model in self.models:
            for part in (*model.datasets, model):
                name = part.dataset if isinstance(part, DatasetComparison) else "geometric mean"
                for metric in METRICS:
                    ratio = getattr(part, metric).model_dump()
                    rows.append({"model": model.model, "dataset": name, "metric": metric, **ratio})
        frame = pd.DataFrame(rows)
        frame.insert(1, "reference", self.reference)
        return frame

    def lines(self) -> list[str]:
        """The verdicts and notes, for people."""
        found = [f"{model.model}: {line}." for model in self.models for line in model.verdicts]
        return [*found, *(f"note: {note}." for note in self.notes)]


# --------------------------------------------------------------------------------------------------
# Bootstrap
# --------------------------------------------------------------------------------------------------


def resampled_log_ratios(
    reference: Values, others: Values, resamples: int, rng: np.random.Generator
) -> Values:
    """Logarithms of ratios of sums, for resamples of the series.

    Parameters
    ----------
    reference
        ``[N]``: what each of at least two series adds to the reference's score, at least 0.
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
    step = max(1, _CELLS // count)
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
    """The middle of the resampled ratios; None where some of them are not finite.

    Parameters
    ----------
    log_ratios
        ``[resamples]``.
    """
    if not np.isfinite(log_ratios).all():
        return None
    low, high = np.exp(np.quantile(log_ratios, [(1 - confidence) / 2, (1 + confidence) / 2]))
    return float(low), float(high)


# --------------------------------------------------------------------------------------------------
# Comparison
# --------------------------------------------------------------------------------------------------


def compare(
    results: Sequence[EvaluationResult],
    *,
    margin: float = 0.005,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Ratios of scores to those of the first result, with intervals and verdicts.

    Parameters
    ----------
    results
        The reference, usually the original, and one or more others.
    margin
        The loss that is still acceptable, as a share: 0.005 is half a per cent.
    confidence
        Of the two-sided intervals.
    resamples, seed
        Of the bootstrap.

    Raises
    ------
    UsageError
        Fewer than two results, results on different series, or an option out of range.
    DataError
        A score or a contribution is not finite, or a score is zero.
    """
    _check_options(len(results), margin, confidence, resamples, seed)
    reference, *others = results
    names = distinct_names(results)
    points = [relative(other, reference) for other in others]
    for other in others:
        _check_contributions(reference, other)
    draws = {metric: _draws(results, metric, resamples, seed) for metric in METRICS}
    models = []
    for index, (point, name) in enumerate(zip(points, names[1:], strict=True)):
        parts = {
            metric: {dataset: values[:, index] for dataset, values in draws[metric].items()}
            for metric in METRICS
        }
        models.append(_model_comparison(name, reference, point, parts, confidence, margin))
    return Comparison(
        reference=names[0],
        models=tuple(models),
        confidence=confidence,
        margin=margin,
        resamples=resamples,
        seed=seed,
        notes=tuple(_notes(results, names)),
    )


def _check_options(count: int, margin: float, confidence: float, resamples: int, seed: int) -> None:
    if count < 2:
        raise UsageError(f"{count} result given; a comparison needs at least two.")
    for name, value, allowed, fits in (
        ("margin", margin, "a share from 0 to below 1, such as 0.005", 0 <= margin < 1),
        ("confidence", confidence, "between 0.5 and 1, such as 0.95", 0.5 <= confidence < 1),
        ("resamples", resamples, "at least 100", resamples >= 100),
        ("seed", seed, "at least 0", seed >= 0),
    ):
        if not fits:
            raise UsageError(f"{name} is {value}; it must be {allowed}.")


def distinct_names(results: Sequence[EvaluationResult]) -> list[str]:
    """The models' names; those that come again get a number."""
    names: list[str] = []
    for result in results:
        again = sum(other.model == result.model for other in results[: len(names)])
        names.append(f"{result.model} ({again + 1})" if again else result.model)
    return names


def _check_contributions(reference: EvaluationResult, other: EvaluationResult) -> None:
    """Refuse contributions that are not finite, or of series with other labels."""
    theirs = {row.dataset: row.series for row in reference.rows}
    for row in other.rows:
        pair = (theirs[row.dataset], row.series)
        for model, columns in zip((reference.model, other.model), pair, strict=True):
            if columns is not None:
                _check_finite(model, row.dataset, columns)
        first, second = pair
        if first is None or second is None:
            continue
        for metric in METRICS:
            if not np.allclose(first.parts(metric)[1], second.parts(metric)[1], rtol=1e-9, atol=0):
                raise UsageError(
                    f"{other.model!r} and {reference.model!r} were not evaluated on the same "
                    f"series of {row.dataset!r}: their labels differ; evaluate both again."
                )


def _check_finite(model: str, dataset: str, columns: SeriesContributions) -> None:
    values = np.array([columns.quantile_loss, columns.absolute_label, columns.scaled_error])
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)).all(axis=0))
    if bad.size:
        raise DataError(
            f"what series {bad[0]} of {dataset!r} contributes to the scores of {model!r} is not "
            f"finite, or negative (and {bad.size - 1} more series); evaluate it again."
        )


def _draws(
    results: Sequence[EvaluationResult], metric: str, resamples: int, seed: int
) -> dict[str, Values]:
    """Resampled log ratios ``[resamples, K]`` of each dataset, in the order of the reference.

    Models without contributions have NaN, and so has a dataset with one series.
    """
    reference, *others = results
    found: dict[str, Values] = {}
    for row in reference.rows:
        found[row.dataset] = np.full((resamples, len(others)), np.nan)
        if row.series is None:
            continue
        columns = [next(r.series for r in o.rows if r.dataset == row.dataset) for o in others]
        known = [index for index, column in enumerate(columns) if column is not None]
        over, under = row.series.parts(metric)
        # Series without a seasonal error are no part of MASE: resampling them adds nothing.
        counted = under > 0 if metric == "MASE" else np.full(len(over), True)
        if not known or counted.sum() < 2:
            continue
        stacked = np.stack([c.parts(metric)[0] for c in columns if c is not None], axis=1)
        # A generator for each dataset: its interval is the same whatever else is compared.
        rng = np.random.default_rng([seed, zlib.crc32(row.dataset.encode())])
        found[row.dataset][:, known] = resampled_log_ratios(
            over[counted], stacked[counted], resamples, rng
        )
    return found


def _model_comparison(
    name: str,
    reference: EvaluationResult,
    point: Mapping[str, Any],
    draws: Mapping[str, Mapping[str, Values]],
    confidence: float,
    margin: float,
) -> ModelComparison:
    def ratio(value: float, log_ratios: Values) -> Ratio:
        low, high = percentile_interval(log_ratios, confidence) or (None, None)
        return Ratio(ratio=value, low=low, high=high)

    datasets = tuple(
        DatasetComparison(
            dataset=row.dataset,
            series_count=row.series_count,
            **{
                metric: ratio(point["datasets"][row.dataset][metric], draws[metric][row.dataset])
                for metric in METRICS
            },
        )
        for row in reference.rows
    )
    means = {
        metric: ratio(point[metric], np.mean(list(draws[metric].values()), axis=0))
        for metric in METRICS
    }
    verdicts = tuple(verdict(metric, means[metric], margin, confidence) for metric in METRICS)
    return ModelComparison(model=name, **means, verdicts=verdicts, datasets=datasets)


def verdict(metric: str, ratio: Ratio, margin: float, confidence: float) -> str:
    """What an interval says, in words.

    Better or worse where the interval leaves out 1; no worse by more than the margin where its
    upper end does not pass 1 + ``margin`` (non-inferiority, at half the error that the interval
    allows); and else that the two cannot be told apart.
    """
    low, high = ratio.low, ratio.high
    if low is None or high is None:
        return f"{metric} × {ratio.ratio:.4f}, without an interval"
    if low == high == 1:
        return f"{metric} is the same"
    level = f"({100 * confidence:g} %)"
    allowed = f"{100 * margin:g} %"
    if high < 1:
        return f"{metric} is better by between {_percent(high)} and {_percent(low)} {level}"
    if low > 1:
        tail = f", no more than the margin of {allowed}" if high <= 1 + margin else ""
        return f"{metric} is worse by between {_percent(low)} and {_percent(high)} {level}{tail}"
    span = f"between {_percent(low)} better and {_percent(high)} worse"
    if high <= 1 + margin:
        return f"{metric} is no worse by more than {allowed} {level}: {span}"
    return f"{metric} cannot be told from equal: {span} {level}"


def _percent(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.2f} %"


def _notes(results: Sequence[EvaluationResult], names: Sequence[str]) -> list[str]:
    notes = []
    without = [
        name
        for name, result in zip(names, results, strict=True)
        if any(row.series is None for row in result.rows)
    ]
    if without:
        notes.append(f"no series were kept for {', '.join(without)}; evaluate again for intervals")
    single = [row.dataset for row in results[0].rows if row.series_count == 1]
    if single:
        notes.append(f"one series says nothing about others: {', '.join(single)}")
    for metric in METRICS:
        few = [
            f"{row.dataset} ({effective_series(row.series, metric):.0f})"
            for row in results[0].rows
            if row.series is not None
            and row.series_count > 1
            and effective_series(row.series, metric) < _FEW_SERIES
        ]
        if few:
            notes.append(
                f"{metric} rests on few series, and its intervals are too narrow, in "
                f"{', '.join(few)}"
            )
    drawn = {result.sampling for result in results if result.sampling is not None}
    if len(drawn) > 1:
        notes.append(
            "sample paths were drawn with different seeds, numbers or batch sizes, so intervals "
            "are wider than they need be"
        )
    return notes


def effective_series(columns: SeriesContributions, metric: str) -> float:
    """How many series of equal size would be as many: (Σ c)² / Σ c² (Kish 1965)."""
    values, _ = columns.parts(metric)
    return float(values.sum() ** 2 / max(float(np.square(values).sum()), np.finfo(float).tiny))


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
        _check_contributions(first, result)
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


def pareto_front(costs: Values, scores: Values) -> npt.NDArray[np.bool_]:
    """Which of ``[N]`` points no other beats: none is as good in both and better in one.

    Smaller is better in ``costs`` and ``scores``; of two that are equal both are on the front.
    """
    as_cheap, as_good = costs[:, None] <= costs, scores[:, None] <= scores  # [other, point]
    better = (costs[:, None] < costs) | (scores[:, None] < scores)
    return np.logical_not((as_cheap & as_good & better).any(axis=0))


def series_frame(results: Sequence[EvaluationResult]) -> pd.DataFrame:
    """What every series contributes, one row for each model, dataset and series."""
    columns = list(SeriesContributions.model_fields)
    parts = [
        pd.DataFrame(row.series.model_dump()).assign(
            model=name, dataset=row.dataset, series=range(row.series_count)
        )
        for name, result in zip(distinct_names(results), results, strict=True)
        for row in result.rows
        if row.series is not None
    ]
    order = ["model", "dataset", "series", *columns]
    return pd.concat(parts)[order] if parts else pd.DataFrame(columns=order)


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Ratios with their intervals: all models, where there are several, and each by dataset."""
    tables = []
    if len(comparison.models) > 1:
        table = _ratio_table(f"relative to {comparison.reference}", "model", comparison)
        for model in comparison.models:
            table.add_row(escape(model.model), *(_cell(getattr(model, m)) for m in METRICS))
        tables.append(table)
    for model in comparison.models:
        title = f"{model.model} relative to {comparison.reference}"
        table = _ratio_table(title, "dataset", comparison, model)
        for part in model.datasets:
            cells = (_cell(getattr(part, metric)) for metric in METRICS)
            table.add_row(part.dataset, str(part.series_count), *cells)
        tables.append(table)
    return tables


def _ratio_table(
    title: str, first: str, comparison: Comparison, total: ModelComparison | None = None
) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, show_footer=total is not None)
    table.add_column(first, footer="geometric mean", no_wrap=True)
    if total is not None:
        table.add_column("series", justify="right")
    for metric in METRICS:
        footer = "" if total is None else _cell(getattr(total, metric))
        header = f"{metric} ({100 * comparison.confidence:g} %)"
        table.add_column(header, justify="right", footer=footer, no_wrap=True)
    return table


def _cell(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.4f}"
    return f"{ratio.ratio:.4f} ({ratio.low:.4f}–{ratio.high:.4f})"
