"""Fidelity: shift, calibration, drift and worst series of a compressed model's forecasts.

Scores measure forecasts on average; fidelity measures how they changed, and for which series. It
uses the quantiles 0.1 … 0.9 of both models on the same windows. Ratios are of quantile losses,
compressed / original: below 1 is better.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset, SeriesArray
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.calibration import Calibration, calibration
from tscompress.evaluation.metrics import (
    MEDIAN,
    Band,
    Quantiles,
    band,
    quantile_losses,
    seasonal_errors,
)
from tscompress.evaluation.results import geometric_mean
from tscompress.io.results import Result
from tscompress.io.strict import Strict
from tscompress.plotting import ForecastPanel

#: Upper ends of the buckets of context lengths, in steps.
CONTEXT_BUCKETS = (32, 64, 128, 256, 512, 1024)
WORST_SERIES = 10

_UNDEFINED = np.full(len(QUANTILE_LEVELS), math.nan)
Vector = tuple[float, ...]
#: NaN where there is no value; null in JSON, which has no NaN.
Gaps = tuple[
    Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)], ...
]


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


class GroupRatio(Strict):
    """Quantile loss of some series, relative to the original's."""

    group: str
    series_count: int
    ratio: float


class WorstSeries(Strict):
    """A series whose forecast got worse, with the data of its figure."""

    dataset: str
    series: int
    """Index in the dataset."""
    name: str | None = None
    """Its id in the user's file; None where it has none."""
    times: tuple[str, ...] = ()
    """Of ``context`` and ``label``, ISO 8601; empty where the file has none."""
    severity: float
    """Sort key: ratio of the losses per step in units of the series' seasonal error, after adding
    the dataset's median loss to both. So a series that the original forecasts almost exactly is not
    first only because of its ratio."""
    ratio: float | None
    """Compressed / original loss; None where the original had none."""
    original_loss: float
    compressed_loss: float
    """Quantile loss summed over steps, mean over levels: the series' contribution to WQL."""
    context: Gaps
    """The last steps before the forecast."""
    label: Gaps
    original: Band
    compressed: Band

    def panel(self) -> ForecastPanel:
        """For :func:`tscompress.plotting.forecast_figure`."""
        times = "" if self.ratio is None else f", loss × {self.ratio:.2f}"
        name = (
            str(self.series) if self.name is None else self.name.replace("$", r"\$")
        )  # no formula
        title = f"{self.dataset}, series {name}{times}"
        return ForecastPanel(title, self.context, self.label, self.original, self.compressed)


class DatasetFidelity(Strict):
    """Both models on one dataset."""

    dataset: str
    freq: str
    series_count: int
    ratio: float
    """Of WQL."""
    shift: Gaps
    """Mean |compressed − original| of each quantile, in units of the series' seasonal errors; NaN
    where no series has one."""
    original: Calibration
    compressed: Calibration
    drift: tuple[float | None, ...]
    """Ratio of the losses at each step of the horizon; None where the original has no loss."""
    contexts: tuple[GroupRatio, ...]
    """By length of the context."""
    worst: tuple[WorstSeries, ...] = ()


class Fidelity(Result):
    """Both models on a suite. Means over datasets count each dataset once, as the scores do."""

    kind: ClassVar[str] = "a comparison of forecasts"
    command: ClassVar[str] = "tscompress evaluate --output"

    datasets: tuple[DatasetFidelity, ...]
    shift: Gaps
    drift: Gaps
    """Geometric means over the datasets that reach a step; NaN where none has a loss."""
    frequencies: tuple[GroupRatio, ...]
    contexts: tuple[GroupRatio, ...]
    """Geometric means over the datasets that have such series."""
    worst: tuple[WorstSeries, ...]

    @property
    def coverage(self) -> tuple[float, float]:
        """Share of labels from the quantile 0.1 to 0.9, of original and compressed model."""
        return (
            float(np.mean([part.original.coverage for part in self.datasets])),
            float(np.mean([part.compressed.coverage for part in self.datasets])),
        )

    def __repr__(self) -> str:
        drift = [value for value in self.drift if math.isfinite(value)]
        found = (
            f", loss ratio {drift[0]:.3f} at step 1, {drift[-1]:.3f} at the last" if drift else ""
        )
        return f"Fidelity({len(self.datasets)} datasets{found})"

    def __str__(self) -> str:
        return repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; :meth:`from_dict` reads it back, without each dataset's worst."""
        text = self.model_dump_json(exclude={"datasets": {"__all__": {"worst"}}})  # null for NaN
        content: dict[str, Any] = json.loads(text)
        return content


# --------------------------------------------------------------------------------------------------
# One dataset
# --------------------------------------------------------------------------------------------------


def check_quantiles(original: Quantiles, compressed: Quantiles, dataset: EvaluationDataset) -> None:
    """Check the forecasts of two models against their dataset.

    Raises
    ------
    UsageError
        The shapes are not ``[N, 9, horizon]`` of the dataset.
    DataError
        A forecast is not finite.
    """
    shape = (len(dataset.series), len(QUANTILE_LEVELS), dataset.horizon)
    for name, values in (("original", original), ("compressed", compressed)):
        if values.shape != shape:
            raise UsageError(
                f"quantiles of the {name} have shape {values.shape}; expected {shape} for "
                f"{dataset.name!r}."
            )
        if not np.isfinite(values).all():
            raise DataError(f"the {name} forecasts NaN or infinity on {dataset.name!r}.")


def dataset_fidelity(
    original: Quantiles, compressed: Quantiles, dataset: EvaluationDataset
) -> DatasetFidelity:
    """Compare the forecasts of two models for the series of a dataset.

    Parameters
    ----------
    original, compressed
        ``[N, 9, horizon]``: quantiles 0.1 … 0.9, see
        :func:`tscompress.evaluation.metrics.quantile_array`.

    Raises
    ------
    UsageError
        The shapes are not those of the dataset.
    DataError
        A forecast is not finite, all labels are missing, or the original's loss is zero.
    """
    check_quantiles(original, compressed, dataset)
    losses = [quantile_losses(values, dataset).mean(axis=1) for values in (original, compressed)]
    totals = [np.ma.filled(loss.sum(axis=1), 0.0) for loss in losses]  # [N] each
    if not all(total.sum() > 0 for total in totals):
        raise DataError(f"no ratio of losses on {dataset.name!r}: one of them is zero.")
    scale = seasonal_errors(dataset)  # [N]
    moved = np.abs(compressed - original)[scale > 0] / scale[scale > 0, None, None]  # [n, 9, H]
    steps = [np.ma.filled(loss.sum(axis=0), 0.0) for loss in losses]  # [H] each
    return DatasetFidelity(
        dataset=dataset.name,
        freq=dataset.freq.split("-")[0],
        series_count=len(dataset.series),
        ratio=float(totals[1].sum() / totals[0].sum()),
        shift=_floats(moved.mean(axis=(0, 2)) if len(moved) else _UNDEFINED),
        original=calibration(original, dataset.labels),
        compressed=calibration(compressed, dataset.labels),
        drift=tuple(_ratio(after, before) for before, after in zip(*steps, strict=True)),
        contexts=tuple(_context_ratios(dataset, *totals)),
        worst=tuple(_worst_series(dataset, original, compressed, losses, scale)),
    )


def _context_ratios(
    dataset: EvaluationDataset, original: SeriesArray, compressed: SeriesArray
) -> Iterator[GroupRatio]:
    """Ratios of summed losses ``[N]`` by length of the context, shortest first."""
    lengths = np.array([len(context) for context in dataset.contexts])
    buckets = np.searchsorted(CONTEXT_BUCKETS, lengths)
    for bucket in np.unique(buckets):
        chosen = buckets == bucket
        ratio = _ratio(compressed[chosen].sum(), original[chosen].sum())
        if ratio is not None:
            name = _bucket_name(int(bucket))
            yield GroupRatio(group=name, series_count=int(chosen.sum()), ratio=ratio)


def _bucket_name(bucket: int) -> str:
    if bucket == len(CONTEXT_BUCKETS):
        return f"> {CONTEXT_BUCKETS[-1]}"
    first = CONTEXT_BUCKETS[bucket - 1] + 1 if bucket else 1
    return f"{first}–{CONTEXT_BUCKETS[bucket]}"


def _worst_series(
    dataset: EvaluationDataset,
    original: Quantiles,
    compressed: Quantiles,
    losses: Sequence[Any],
    scale: SeriesArray,
) -> Iterator[WorstSeries]:
    """The series of greatest :attr:`WorstSeries.severity` among those that got worse."""
    before, after = (np.ma.filled(loss.sum(axis=1), 0.0) for loss in losses)  # [N]
    steps = np.maximum(1, np.ma.count(losses[0], axis=1))
    # Flat contexts have no seasonal error; their size is the unit instead.
    size = np.array([np.ma.masked_invalid(np.abs(values)).mean() for values in dataset.series])
    unit = np.where(scale > 0, scale, np.where(size > 0, size, 1.0))
    scaled = [loss / (steps * unit) for loss in (before, after)]  # [N] each
    typical = max(float(np.median(scaled[0])), float(np.finfo(float).tiny))
    severity = (scaled[1] + typical) / (scaled[0] + typical)
    for index in np.argsort(-severity, kind="stable")[:WORST_SERIES].tolist():
        if severity[index] <= 1:
            return
        # Enough for a season or two, but not so much that the forecast is a corner of the figure.
        tail = max(2 * dataset.horizon, 2 * dataset.seasonality)
        yield WorstSeries(
            dataset=dataset.name,
            series=index,
            name=dataset.series_name(index),
            times=dataset.times(index, min(tail + dataset.horizon, len(dataset.series[index]))),
            severity=float(severity[index]),
            ratio=_ratio(after[index], before[index]),
            original_loss=float(before[index]),
            compressed_loss=float(after[index]),
            context=_floats(dataset.contexts[index][-tail:]),
            label=_floats(dataset.labels[index]),
            original=band(original[index]),
            compressed=band(compressed[index]),
        )


def _ratio(after: float, before: float) -> float | None:
    return float(after / before) if before > 0 else None


def _floats(values: npt.NDArray[Any]) -> Vector:
    return tuple(float(value) for value in values)


# --------------------------------------------------------------------------------------------------
# A suite
# --------------------------------------------------------------------------------------------------


def summarize(parts: Sequence[DatasetFidelity]) -> Fidelity:
    """Summary over datasets.

    Raises
    ------
    UsageError
        There are none.
    """
    if not parts:
        raise UsageError("no dataset to summarize; compare at least one.")
    longest = max(len(part.drift) for part in parts)
    drift = [[p.drift[step] for p in parts if step < len(p.drift)] for step in range(longest)]
    by_length = {
        name: [group for part in parts for group in part.contexts if group.group == name]
        for name in map(_bucket_name, range(len(CONTEXT_BUCKETS) + 1))
    }
    by_frequency: dict[str, list[GroupRatio]] = {}
    for part in parts:
        group = GroupRatio(group=part.freq, series_count=part.series_count, ratio=part.ratio)
        by_frequency.setdefault(part.freq, []).append(group)
    everyone = (series for part in parts for series in part.worst)
    return Fidelity(
        datasets=tuple(parts),
        shift=_floats(_mean_shift(parts)),
        drift=tuple(math.nan if (mean := _known_mean(r)) is None else mean for r in drift),
        frequencies=_merged(by_frequency),
        contexts=_merged(by_length),
        worst=tuple(heapq.nlargest(WORST_SERIES, everyone, key=lambda one: one.severity)),
    )


def _mean_shift(parts: Sequence[DatasetFidelity]) -> npt.NDArray[Any]:
    """Of the datasets that have one."""
    shifts = [part.shift for part in parts if math.isfinite(part.shift[MEDIAN])]
    return np.mean(shifts, axis=0) if shifts else _UNDEFINED


#: Called with the quantiles ``[N, 9, horizon]`` of original and compressed model, of a dataset.
OnPair = Callable[[Quantiles, Quantiles, EvaluationDataset], None]


class PairedForecasts:
    """Collects the forecasts of two models, one after the other, and compares them.

    Pass :meth:`original` and then :meth:`compressed` as ``on_forecasts`` to
    :func:`tscompress.evaluation.evaluate.evaluate_pipeline`. When both models' quantiles of a
    dataset are known, they are passed to ``on_pair``.
    """

    def __init__(self, on_pair: OnPair | None = None) -> None:
        self._on_pair = on_pair
        self._quantiles: dict[str, Quantiles] = {}
        self._parts: list[DatasetFidelity] = []

    def original(self, dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        """Keep the original's forecasts ``[N, 9, horizon]``."""
        self._quantiles[dataset.name] = quantiles

    def compressed(self, dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        """Compare with the original's.

        Raises
        ------
        UsageError
            The original has none for this dataset.
        """
        if dataset.name not in self._quantiles:
            raise UsageError(f"the original has no forecasts for {dataset.name!r}; run it first.")
        original = self._quantiles.pop(dataset.name)
        self._parts.append(dataset_fidelity(original, quantiles, dataset))
        if self._on_pair is not None:
            self._on_pair(original, quantiles, dataset)

    def summary(self) -> Fidelity:
        """See :func:`summarize`."""
        return summarize(self._parts)


def _merged(groups: Mapping[str, Sequence[GroupRatio]]) -> tuple[GroupRatio, ...]:
    return tuple(
        GroupRatio(
            group=name, series_count=sum(member.series_count for member in members), ratio=ratio
        )
        for name, members in groups.items()
        if (ratio := _known_mean(member.ratio for member in members)) is not None
    )


def _known_mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric mean of the ratios that are known and positive."""
    known = [ratio for ratio in ratios if ratio]
    return geometric_mean(known) if known else None
