"""Results of an evaluation: scores by dataset and by series, and ratios to a baseline.

The summary of a model is the geometric mean over datasets of its scores relative to a baseline
(Ansari et al. 2024, "Chronos: Learning the Language of Time Series", section 5.3).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import model_validator

from tscompress.errors import DataError, UsageError
from tscompress.io.files import user_path, write_text_atomically
from tscompress.io.own_outputs import table_csv
from tscompress.io.results import Result, results_json
from tscompress.io.strict import Strict

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")

SEASONAL_NAIVE = "seasonal-naive"
METRICS = ("MASE", "WQL")
#: Metric to its name, spelled out where a text first uses it.
METRIC_NAMES = {
    "WQL": "weighted quantile loss",
    "MASE": "mean absolute scaled error",
    "SQL": "scaled quantile loss",
}
SCORES_FILE = "scores.json"
Measure = Literal["coverage", "coverage_error", "crossing_rate"]
#: Of the quantiles of a model on a dataset, beside the metrics.
MEASURES: tuple[Measure, ...] = ("coverage", "coverage_error", "crossing_rate")


class SeriesContributions(Strict):
    """Contributions of each series to the scores of its dataset, as columns ``[N]``.

    WQL and MASE are ratios of sums over series, so these columns give the scores of any subset or
    resample of series, for paired statistics.
    """

    quantile_loss: tuple[float, ...]
    """Sum over the steps of the quantile loss, averaged over the levels 0.1 … 0.9."""
    absolute_label: tuple[float, ...]
    """Sum over the steps of |label|; the same for every model."""
    scaled_error: tuple[float, ...]
    """Sum over the steps of the median's absolute error in units of the seasonal error."""
    scaled_steps: tuple[int, ...]
    """Steps in ``scaled_error``: 0 where the seasonal error is zero; the same for every model."""
    groups: tuple[int, ...] | None = None
    """Equal for series that are forecast together, and their windows. None: each by itself."""

    @model_validator(mode="after")
    def _same_lengths(self) -> SeriesContributions:
        columns = {name: getattr(self, name) for name in type(self).model_fields}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns differ in length: {lengths}")
        return self

    def parts(self, metric: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Numerator and denominator of ``"WQL"`` or ``"MASE"``, each ``[N]``."""
        columns = {
            "WQL": (self.quantile_loss, self.absolute_label),
            "MASE": (self.scaled_error, self.scaled_steps),
        }
        over, under = columns[metric]
        return np.array(over, dtype=np.float64), np.array(under, dtype=np.float64)

    def score(self, metric: str) -> float:
        """``"WQL"`` or ``"MASE"`` of all series; NaN or infinite if the denominator is 0."""
        over, under = self.parts(metric)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(over.sum() / under.sum())


class Sampling(Strict):
    """Settings of sampling; two models share random numbers if all three are equal."""

    seeds: tuple[int, ...]
    num_samples: int
    batch_size: int


class Settings(Strict):
    """Which series see one another in a forecast, and what is done with its quantiles."""

    cross_learning: bool = False
    """All series of a batch do, as by chronos-forecasting's option of that name."""
    as_univariate: bool = False
    """None does: groups are forecast one by one, and covariates are not read. Of a result: its
    suite has groups or covariates."""
    sort_quantiles: bool = False
    """Each step's quantiles are put in order."""
    batch_size: int | None = None
    """Of a result with cross-learning, which depends on it."""

    def words(self) -> list[str]:
        """What is unlike the default."""
        together = f"cross-learning in batches of {self.batch_size}"
        said = {
            together if self.batch_size else "cross-learning": self.cross_learning,
            "each series alone": self.as_univariate,
            "sorted quantiles": self.sort_quantiles,
        }
        return [words for words, is_so in said.items() if is_so]


class DatasetScore(Strict):
    """Scores of one model on one dataset."""

    dataset: str
    model: str
    MASE: float
    WQL: float
    series_count: int
    seconds: float
    """Wall time of forecasting, without reading data and computing metrics."""
    coverage: float | None = None
    """Share of labels from the quantile 0.1 to 0.9. None in results of earlier versions."""
    coverage_error: float | None = None
    """|coverage − 0.8|."""
    crossing_rate: float | None = None
    """Share of neighbouring quantiles that cross."""
    series: SeriesContributions | None = None
    """None in results of earlier versions."""
    series_names: tuple[str, ...] | None = None
    """Ids of the series in the user's file, one per window; None where they have none."""
    seasonality: int | None = None
    """Steps of the season whose error MASE is in units of. None in results of earlier versions."""
    windows: int | None = None
    """Windows of each series; ``series_count`` counts windows. None: one."""
    cached: Literal[True] | None = None
    """Whether it is from an earlier run, which ``seconds`` are of."""

    @property
    def clusters(self) -> npt.NDArray[np.int64]:
        """Number ``[N]`` of the series, or group of series, that each of the N windows is of."""
        if self.series is not None and self.series.groups is not None:
            return np.array(self.series.groups)
        return np.arange(self.series_count) // (self.windows or 1)

    @property
    def cluster_count(self) -> int:
        """Series or groups that are independent of one another."""
        return len(np.unique(self.clusters))

    def drawn(self, counted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Number ``[n]`` of what an interval draws, of the n windows ``counted`` ``[N]``.

        :attr:`clusters`; of a single one its windows.
        """
        clusters = self.clusters[counted]
        if self.windows is None or len(np.unique(clusters)) > 1:
            return clusters
        return (np.arange(self.series_count) % self.windows)[counted]

    @model_validator(mode="after")
    def _every_series(self) -> DatasetScore:
        if self.series is not None and len(self.series.quantile_loss) != self.series_count:
            raise ValueError(
                f"{len(self.series.quantile_loss)} series contribute, series_count is "
                f"{self.series_count}"
            )
        return self


class EvaluationResult(Result):
    """Scores of one model on a suite, in the suite's order."""

    kind: ClassVar[str] = "an evaluation result"
    command: ClassVar[str] = "tscompress evaluate --output"

    suite: str
    model: str
    rows: tuple[DatasetScore, ...]
    sampling: Sampling | None = None
    """None for models that do not sample, and in results of earlier versions."""
    settings: Settings | None = None
    """None for seasonal naive, and in results of earlier versions."""
    sha256: dict[str, str] | None = None
    """Of the files of a compressed or pretrained checkpoint, if it was scored as it is stored."""

    def mean_of(self, measure: Measure) -> float | None:
        """Mean over the datasets; None where one has none."""
        values = [getattr(row, measure) for row in self.rows]
        return None if not values or None in values else float(np.mean(values))

    def __repr__(self) -> str:
        scores = [
            f"{metric} {geometric_mean(values):.4g}"
            for metric in METRICS
            if (values := [getattr(row, metric) for row in self.rows])
            and all(math.isfinite(value) and value > 0 for value in values)
        ]
        count = len(self.rows)
        windows = sum(row.series_count for row in self.rows)
        series = sum(row.series_count // (row.windows or 1) for row in self.rows)
        size = f"{count} dataset{'s' * (count != 1)}, {series:,} series"
        size += f" in {windows:,} windows" if windows > series else ""
        mean = [f"geometric mean of {', '.join(scores)}"] if scores and count > 1 else scores
        return f"EvaluationResult({', '.join([repr(self.model), repr(self.suite), size, *mean])})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        return str(self.frame().to_html(index=False))

    def frame(self) -> pd.DataFrame:
        """The columns ``dataset, model, MASE, WQL`` of the published tables, sorted by dataset."""
        columns = ["dataset", "model", *METRICS]
        frame = pd.DataFrame([row.model_dump(include=set(columns)) for row in self.rows])
        return frame.reindex(columns=columns).sort_values("dataset", ignore_index=True)

    def to_csv(self, path: str | Path) -> None:
        """Write :meth:`frame`; the file is replaced in one step or not at all."""
        write_text_atomically(user_path(path), table_csv(self.frame()))

    def to_dict(self, *, series: bool = True) -> dict[str, Any]:
        """Plain data, for JSON; :meth:`from_dict` reads it back.

        Parameters
        ----------
        series
            Include contributions of every series, which are most of the data.
        """
        left_out = None if series else {"rows": {"__all__": {"series"}}}
        return self.model_dump(mode="json", exclude=left_out, exclude_none=True)

    def save(self, path: str | Path) -> None:
        """Write JSON with every series; the file is replaced in one step or not at all."""
        write_text_atomically(user_path(path), results_json({"result": self.to_dict()}))

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Read a result of :meth:`save` or ``tscompress evaluate --output``.

        Parameters
        ----------
        path
            The JSON file, or a directory with ``scores.json``.

        Raises
        ------
        DataError
            There is no such file, or it holds something else.
        """
        return load_results(path)[0]


def load_results(path: str | Path) -> tuple[EvaluationResult, ...]:
    """The result in a file and, if the file has it, the one that it was compared with.

    Parameters
    ----------
    path
        See :meth:`EvaluationResult.load`. Files of earlier versions are read too.

    Raises
    ------
    DataError
        There is no such file, or it holds something else.
    """
    given = user_path(path)
    file = given / SCORES_FILE if given.is_dir() else given
    return EvaluationResult.read_file(file)


def series_text(count: int, windows: int | None) -> str:
    """``20``, or ``20 × 3``: series, and how many windows each has; ``count`` counts windows."""
    return f"{count:,}" if windows is None else f"{count // windows:,} × {windows}"


def relative(result: EvaluationResult, baseline: EvaluationResult) -> dict[str, Any]:
    """Scores divided by those of a baseline; below 1 is better.

    Returns
    -------
    dict
        ``MASE`` and ``WQL``: geometric means over the datasets. ``datasets``: the two ratios of
        each dataset, in the order of ``result``.

    Raises
    ------
    UsageError
        The two do not cover the same series of the same datasets.
    DataError
        A ratio is not finite and positive.
    """
    reference = {row.dataset: row for row in baseline.rows}
    _check_same_series(result, baseline)
    ratios = {
        row.dataset: {metric: _ratio(row, reference[row.dataset], metric) for metric in METRICS}
        for row in result.rows
    }
    means = {metric: geometric_mean([r[metric] for r in ratios.values()]) for metric in METRICS}
    return {**means, "datasets": ratios}


def relative_or_none(result: EvaluationResult, baseline: EvaluationResult) -> dict[str, Any] | None:
    """:func:`relative`; None where a ratio is not finite and positive.

    Raises
    ------
    UsageError
        As :func:`relative`.
    """
    try:
        return relative(result, baseline)
    except DataError:
        return None


def _check_same_series(result: EvaluationResult, baseline: EvaluationResult) -> None:
    ours = {row.dataset: row.series_count for row in result.rows}
    theirs = {row.dataset: row.series_count for row in baseline.rows}
    if ours != theirs or not ours:
        differing = sorted(d for d in {*ours, *theirs} if ours.get(d) != theirs.get(d))
        raise UsageError(
            f"{result.model!r} and {baseline.model!r} were not evaluated on the same series: "
            f"{differing or 'no dataset'}; evaluate both with the same suite, datasets and "
            "max_series."
        )
    seasons = {row.dataset: row.seasonality for row in baseline.rows}
    for row in result.rows:
        season = seasons[row.dataset]
        if None not in (row.seasonality, season) and row.seasonality != season:
            raise UsageError(
                f"{result.model!r} and {baseline.model!r} were scored in units of seasons of "
                f"{row.seasonality} and {season} steps of {row.dataset!r}; evaluate both with the "
                "same --seasonality."
            )


#: Without which a score is not finite, whatever the forecast.
_NEEDS = {
    "WQL": "Leave out datasets whose values to forecast are all 0.",
    "MASE": (
        "No series differs from the season before, in the steps before those to forecast. Leave "
        "the dataset out, or lower horizon or windows; of a file of series, give another "
        "seasonality (--seasonality)."
    ),
}


def _ratio(row: DatasetScore, reference: DatasetScore, metric: str) -> float:
    ours, theirs = getattr(row, metric), getattr(reference, metric)
    if not (math.isfinite(ours) and math.isfinite(theirs) and ours > 0 and theirs > 0):
        raise DataError(
            f"{metric} of {row.dataset!r} is {ours:g} for {row.model!r} and {theirs:g} for "
            f"{reference.model!r}; a ratio needs two finite positive scores."
            f"{_remedy(metric, ours, theirs, reference.model)}"
        )
    return float(ours / theirs)


def _remedy(metric: str, ours: float, theirs: float, reference: str) -> str:
    """What to do about two scores without a ratio; empty where it is not known."""
    if not math.isfinite(theirs):
        return f" {_NEEDS[metric]}"
    if theirs == 0 and reference == SEASONAL_NAIVE:
        return (
            " Every step to forecast equals that of the season before: leave the dataset out, or "
            "of a file of series give another seasonality (--seasonality)."
        )
    return (
        " Leave out datasets that a model forecasts without error." if 0 in (ours, theirs) else ""
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of one or more positive values."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def aggregate(result: EvaluationResult, seasonal_naive: EvaluationResult) -> pd.DataFrame:
    """Scores relative to seasonal naive as ``benchmark, metric, value``, as published."""
    scores = relative(result, seasonal_naive)
    rows = [(result.suite, metric, scores[metric]) for metric in METRICS]
    return pd.DataFrame(rows, columns=["benchmark", "metric", "value"])
