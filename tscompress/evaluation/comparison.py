"""Comparisons of forecast quality: ratios with confidence intervals, and a verdict.

Models are compared by the geometric mean over datasets of the ratio of their scores. Another
benchmark of the same kind would have other series, so series are resampled: within each dataset,
with replacement, the same ones for all models (Efron and Tibshirani 1993, "An Introduction to the
Bootstrap", chapter 8). Windows of a series, and series that are forecast together, depend on one
another and are drawn as one (Davison and Hinkley 1997, "Bootstrap Methods and their Application",
section 3.8); of a single series the windows are drawn, and a note says so. Randomness of sample
paths is part of each series' contribution. Intervals do not account for large series outside the
sample: a note names datasets where few series dominate the score.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.errors import DataError, UsageError
from tscompress.evaluation.intervals import Values, percentile_interval, resampled_log_ratios
from tscompress.evaluation.results import (
    METRICS,
    DatasetScore,
    EvaluationResult,
    SeriesContributions,
    relative,
)
from tscompress.io.strict import Strict
from tscompress.io.text import numbered, percent, ratio_text

#: With fewer, intervals are clearly too narrow (``eval/coverage.py``).
_FEW_SERIES = 15
#: What to read where a sum over series is carried by few of them.
_BESIDE = {"WQL": ", and read MASE, which scales each series, beside it", "MASE": ""}
#: Of intervals, and draws of the bootstrap.
_CONFIDENCE, _RESAMPLES = 0.95, 2000


class Ratio(Strict):
    """A score divided by the reference's, below 1 is better, and its confidence interval.

    ``low`` and ``high`` are None without at least two series with recorded contributions.
    """

    ratio: float
    low: float | None = None
    high: float | None = None


class DatasetComparison(Strict):
    """One model against the reference on one dataset."""

    dataset: str
    series_count: int
    windows: int | None = None
    """Of each series; ``series_count`` counts windows. None: one."""
    MASE: Ratio
    WQL: Ratio


class ModelComparison(Strict):
    """One model against the reference: geometric means over the datasets, and each dataset."""

    model: str
    MASE: Ratio
    WQL: Ratio
    verdicts: tuple[str, ...]
    datasets: tuple[DatasetComparison, ...]


class Comparison(Strict):
    """Several models against the first, ``reference``."""

    reference: str
    models: tuple[ModelComparison, ...]
    confidence: float
    margin: float
    resamples: int
    seed: int
    notes: tuple[str, ...] = ()
    """Caveats for the intervals."""

    def __repr__(self) -> str:
        ratios = [
            f"{one.model!r} "
            + ", ".join(
                f"{metric} × {ratio_text(part.ratio, part.low, part.high, 3)}"
                for metric in METRICS
                if (part := getattr(one, metric))
            )
            for one in self.models
        ]
        return f"Comparison(with {self.reference!r}: {'; '.join(ratios)})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        return str(self.frame().to_html(index=False))

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


def compare_results(
    results: Sequence[EvaluationResult],
    *,
    margin: float = 0.005,
    confidence: float = _CONFIDENCE,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """:func:`tscompress.compare` of results that are in memory.

    Raises
    ------
    UsageError
        Fewer than two results, results on different series, or an option out of range.
    DataError
        A score or a contribution is not finite, or a score is zero.
    """
    check_comparison(len(results), margin, confidence, resamples, seed)
    reference, *others = results
    names = distinct_names(results)
    points = [relative(other, reference) for other in others]
    for other in others:
        check_contributions(reference, other)
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


def check_comparison(
    count: int,
    margin: float,
    confidence: float = _CONFIDENCE,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> None:
    """Refuse fewer than two results, and options of a comparison out of range; UsageError."""
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
    """The models' names; repeated ones get a number."""
    names: list[str] = []
    for result in results:
        names.append(numbered(result.model, names))
    return names


def check_contributions(reference: EvaluationResult, other: EvaluationResult) -> None:
    """Refuse contributions that are not finite, or are for series with other labels.

    Raises
    ------
    UsageError
        The message names the models and the dataset.
    """
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
            f"contributions of series {bad[0]} of {dataset!r} to the scores of {model!r} are not "
            f"finite, or negative (and of {bad.size - 1} more series); evaluate it again."
        )


def _draws(
    results: Sequence[EvaluationResult], metric: str, resamples: int, seed: int
) -> dict[str, Values]:
    """Resampled log ratios ``[resamples, K]`` of each dataset, in the order of the reference.

    Models without contributions have NaN, and so has a dataset with one window of one series.
    """
    reference, *others = results
    found: dict[str, Values] = {}
    for row in reference.rows:
        found[row.dataset] = np.full((resamples, len(others)), np.nan)
        if row.series is None:
            continue
        columns = [next(r.series for r in o.rows if r.dataset == row.dataset) for o in others]
        known = [index for index, column in enumerate(columns) if column is not None]
        over, counted = row.series.parts(metric)[0], _counted(row.series, metric)
        clusters = row.drawn(counted)
        if not known or len(np.unique(clusters)) < 2:
            continue
        stacked = np.stack([c.parts(metric)[0] for c in columns if c is not None], axis=1)
        # A generator for each dataset: its interval does not depend on the others.
        rng = np.random.default_rng([seed, zlib.crc32(row.dataset.encode())])
        found[row.dataset][:, known] = resampled_log_ratios(
            _summed(over[counted], clusters), _summed(stacked[counted], clusters), resamples, rng
        )
    return found


def _counted(columns: SeriesContributions, metric: str) -> npt.NDArray[np.bool_]:
    """Windows ``[N]`` of a metric; those without a seasonal error are not part of MASE."""
    under = columns.parts(metric)[1]
    return under > 0 if metric == "MASE" else np.full(len(under), True)


def _summed(values: Values, clusters: npt.NDArray[np.int64]) -> Values:
    """Sums ``[C]`` or ``[C, K]`` over the rows ``[N]`` or ``[N, K]`` of each cluster."""
    _, places = np.unique(clusters, return_inverse=True)
    sums = np.zeros((places.max() + 1, *values.shape[1:]))
    np.add.at(sums, places, values)
    return sums


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
            windows=row.windows,
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
    """The conclusion from an interval, in words.

    Better or worse if the interval excludes 1; no worse by more than the margin if its upper end is
    at most 1 + ``margin`` (non-inferiority, at half the error rate of the interval); otherwise the
    two cannot be distinguished.
    """
    low, high = ratio.low, ratio.high
    if low is None or high is None:
        return f"{metric} × {ratio.ratio:.4f}, without an interval"
    if low == high == 1:
        return f"{metric} is the same"
    level = f"({percent(confidence)})"
    allowed = percent(margin)
    if high < 1:
        return f"{metric} is better by between {_change(high)} and {_change(low)} {level}"
    if low > 1:
        tail = f", no more than the margin of {allowed}" if high <= 1 + margin else ""
        return f"{metric} is worse by between {_change(low)} and {_change(high)} {level}{tail}"
    span = f"between {_change(low)} better and {_change(high)} worse"
    if high <= 1 + margin:
        return f"{metric} is no worse by more than {allowed} {level}: {span}"
    return f"{metric} cannot be distinguished from equal: {span} {level}"


def _change(ratio: float) -> str:
    return percent(abs(ratio - 1), 2)


def _notes(results: Sequence[EvaluationResult], names: Sequence[str]) -> list[str]:
    notes = []
    without = [
        name
        for name, result in zip(names, results, strict=True)
        if any(row.series is None for row in result.rows)
    ]
    if without:
        notes.append(
            f"no contributions of series for {', '.join(without)}; evaluate again for intervals"
        )
    single = [row for row in results[0].rows if row.series is not None and _is_single(row)]
    for found, of_windows in (("no interval", False), ("an interval over windows alone", True)):
        if listed := [row.dataset for row in single if (row.windows is not None) == of_windows]:
            notes.append(
                f"{found} from a single series, or a single group that is forecast together: "
                f"{', '.join(listed)}"
            )
    for metric, few in few_series(results[0]).items():
        if few:
            rests = "; ".join(
                f"that of {dataset} on {_carried(*counts)}" for dataset, counts in few.items()
            )
            notes.append(
                f"{metric} rests on few series, so its intervals are too narrow: {rests}. Score "
                f"more series{_BESIDE[metric]}"
            )
    forecast = [
        (name, result.settings.words())
        for name, result in zip(names, results, strict=True)
        if result.settings is not None
    ]
    if any(words != forecast[0][1] for _, words in forecast):
        each = "; ".join(f"{name}: {', '.join(words) or 'none'}" for name, words in forecast)
        notes.append(f"the models were evaluated with different settings ({each})")
    drawn = {result.sampling for result in results if result.sampling is not None}
    if len(drawn) > 1:
        notes.append(
            "sample paths have different seeds, numbers or batch sizes, so intervals are wider "
            "than necessary"
        )
    return notes


def _is_single(row: DatasetScore) -> bool:
    """Whether a metric of a row with contributions is of a single series or group."""
    assert row.series is not None
    return any(
        len(np.unique(row.clusters[_counted(row.series, metric)])) == 1 for metric in METRICS
    )


def _carried(effective: float, count: int) -> str:
    """``about 6 of its 20 series``."""
    return (
        f"its {count:,}" if round(effective) >= count else f"about {effective:.0f} of its {count:,}"
    )


def few_series(result: EvaluationResult) -> dict[str, dict[str, tuple[float, int]]]:
    """Metric to the datasets whose score rests on few series.

    Returns
    -------
    dict
        Of each such dataset the effective number of series and the number scored; a group that
        is forecast together counts as one.
    """
    return {
        metric: {
            row.dataset: (effective, row.cluster_count)
            for row in result.rows
            if row.series is not None
            and row.cluster_count > 1
            and (effective := effective_series(row, metric)) < _FEW_SERIES
        }
        for metric in METRICS
    }


def effective_series(row: DatasetScore, metric: str) -> float:
    """Effective number of series, (Σ c)² / Σ c² for contributions c (Kish 1965).

    A series contributes with all its windows, and a group that is forecast together as one series.

    Raises
    ------
    DataError
        The row has no contributions.
    """
    if row.series is None:
        raise DataError(
            f"no series of {row.dataset!r} were kept for {row.model!r}; evaluate again."
        )
    values = _summed(row.series.parts(metric)[0], row.clusters)
    return float(values.sum() ** 2 / max(float(np.square(values).sum()), np.finfo(float).tiny))


def series_frame(results: Sequence[EvaluationResult]) -> pd.DataFrame:
    """Contributions of every series, one row for each model, dataset and series."""
    columns = [name for name in SeriesContributions.model_fields if name != "groups"]
    parts = [
        pd.DataFrame(row.series.model_dump()).assign(
            model=name,
            dataset=row.dataset,
            series=range(row.series_count),
            name=row.series_names or [""] * row.series_count,
        )
        for name, result in zip(distinct_names(results), results, strict=True)
        for row in result.rows
        if row.series is not None
    ]
    order = ["model", "dataset", "series", "name", *columns]
    return pd.concat(parts)[order] if parts else pd.DataFrame(columns=order)
