"""Charts of how forecasts changed: calibration, shift of quantiles, drift over the horizon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.evaluation.fidelity import DatasetFidelity, Fidelity
from tscompress.reports.svg import Chart, Value, limits_of, number


def calibration_chart(fidelity: Fidelity) -> Chart:
    """Share of labels at or below each quantile, mean over the datasets."""
    levels = list(QUANTILE_LEVELS)
    lines = {
        side: _means([getattr(part, side).frequencies for part in fidelity.datasets])
        for side in ("original", "compressed")
    }
    chart = Chart(
        label="share of labels at or below each quantile: "
        + "; ".join(f"{name} {ys[0]:.2f} to {ys[-1]:.2f}" for name, ys in lines.items()),
        x_range=(0.0, 1.0),
        y_range=(0.0, 1.0),
        x_label="quantile level",
        y_label="labels at or below",
        title="Calibration",
    )
    chart.axes()
    chart.line([0.0, 1.0], [0.0, 1.0], "one")
    for name, ys in lines.items():
        chart.line(levels, ys, name)
        chart.dots(levels, ys, name)
    tips = [
        "\n".join([f"level {level:g}", *(f"{name}: {ys[i]:.3f}" for name, ys in lines.items())])
        for i, level in enumerate(levels)
    ]
    chart.hits(levels, tips)
    chart.legend = [("original", "original"), ("compressed", "compressed"), ("one", "calibrated")]
    return chart


def shift_chart(fidelity: Fidelity) -> Chart:
    """How far each quantile moved, in seasonal errors."""
    lines = {part.dataset: list(part.shift) for part in fidelity.datasets}
    chart = _dataset_chart(lines, list(fidelity.shift), list(QUANTILE_LEVELS), start=0.0)
    chart.title, chart.x_label = "Shift of quantiles", "quantile level"
    chart.y_label = "mean shift (seasonal errors)"
    return _finished(chart, lines, fidelity.shift, QUANTILE_LEVELS, "level")


def drift_chart(fidelity: Fidelity) -> Chart:
    """Ratio of the losses at each step of the horizon."""
    lines = {part.dataset: list(part.drift) for part in fidelity.datasets}
    steps = [float(step) for step in range(1, len(fidelity.drift) + 1)]
    chart = _dataset_chart(lines, list(fidelity.drift), steps, around=1.0)
    chart.title, chart.x_label = "Drift over the horizon", "step"
    chart.y_label = "loss, compressed / original"
    return _finished(chart, lines, fidelity.drift, steps, "step")


def _dataset_chart(
    lines: Mapping[str, Sequence[Value]],
    mean: Sequence[float],
    xs: Sequence[float],
    *,
    start: float | None = None,
    around: float | None = None,
) -> Chart:
    """An empty panel for a line of each dataset and their mean."""
    values: list[Value] = [*mean, *(value for line in lines.values() for value in line)]
    low, high = limits_of([*values, *([around] if around is not None else [])])
    x_range = limits_of(xs, pad=0.04) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    return Chart(label="", x_range=x_range, y_range=(low if start is None else start, high))


def _finished(
    chart: Chart,
    lines: Mapping[str, Sequence[Value]],
    mean: Sequence[float],
    xs: Sequence[float],
    unit: str,
) -> Chart:
    chart.label = (
        f"{chart.title}, {chart.y_label}: mean from {number(mean[0])} to {number(mean[-1])}"
    )
    chart.axes(whole=unit == "step")
    chart.level(1.0)
    several = len(lines) > 1
    for values in lines.values() if several else ():
        chart.line(xs[: len(values)], values, "thin")
    chart.line(xs, mean, "compressed solid")
    chart.dots(xs, mean, "compressed")
    tips = []
    for index, x in enumerate(xs):
        members = [f"{name}: {number(v[index])}" for name, v in lines.items() if index < len(v)]
        tips.append("\n".join([f"{unit} {x:g}: {number(mean[index])}", *members[:12]]))
    chart.hits(xs, tips)
    if several:
        chart.legend = [("compressed solid", "all datasets"), ("thin", "each dataset")]
    return chart


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def fidelity_row(part: DatasetFidelity) -> dict[str, Any]:
    """A line of the table by dataset."""
    middle = QUANTILE_LEVELS.index(0.5)
    return {
        "dataset": part.dataset,
        "shift": part.shift[middle],
        "coverage": (part.original.coverage, part.compressed.coverage),
        "error": (part.original.error, part.compressed.error),
        "crossing": (part.original.crossing_rate, part.compressed.crossing_rate),
    }
