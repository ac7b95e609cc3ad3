"""Charts of single forecasts: the end of a series, what happened, and both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tscompress.evaluation.fidelity import WorstSeries
from tscompress.evaluation.typical_series import ForecastExample
from tscompress.io.text import counted
from tscompress.probing.results import TaskScore
from tscompress.reports.svg import BOTTOM, TOP, Chart, Value, limits_of, number, time_ticks

_LEAST_CONTEXT = 12


def forecast_chart(
    series: ForecastExample | WorstSeries, title: str, *, least_context: int = _LEAST_CONTEXT
) -> Chart:
    """The end of a series, what happened, and medians and 80% bands of both models."""
    horizon = len(series.label)
    context = series.context[-max(least_context, 2 * horizon) :]
    before = [float(step) for step in range(1 - len(context), 1)]
    steps = [float(step) for step in range(1, horizon + 1)]
    models = {"original": series.original, "compressed": series.compressed}
    times = series.times[-len(context) - horizon :]
    values = [
        *context,
        *series.label,
        *(v for m in models.values() for row in m for v in row),
    ]
    chart = Chart(
        label=f"{series.dataset}, series {series.name or series.series}: the end of the series, "
        f"what happened, and the forecasts of both models over {counted(horizon, 'step')}"
        + (f", {times[-horizon]} to {times[-1]}" if times else ""),
        x_range=(before[0] if before else 0.5, steps[-1] + 0.5),
        y_range=limits_of(values),
        x_label=f"forecast from {times[-horizon]}" if times else "steps from the forecast",
        title=title,
        height=190,
    )
    every = [*before, *steps]
    chart.axes(whole=True, x_ticks=time_ticks(times, every) if len(times) > 1 else None)
    origin = chart.x(0.5)
    chart.add("line", "origin", x1=origin, x2=origin, y1=TOP, y2=chart.height - BOTTOM)
    for name, (low, _, high) in models.items():
        chart.band(steps, low, high, name)
    chart.line(every, [*context, *series.label], "truth")
    for name, (_, median, _) in models.items():
        chart.line(steps, median, name)
    named = [f"step {step + 1}" for step in range(horizon)]
    if times:
        named = [f"{time} ({name})" for time, name in zip(times[-horizon:], named, strict=True)]
    tips = [_forecast_tip(name, series.label, models, step) for step, name in enumerate(named)]
    chart.hits(steps, tips)
    return chart


def _forecast_tip(
    name: str,
    label: Sequence[Value],
    models: Mapping[str, Sequence[Sequence[float]]],
    step: int,
) -> str:
    lines = [f"{name}: {number(label[step])}"]
    for name, (low, median, high) in models.items():
        band = f"{number(low[step])} to {number(high[step])}"
        lines.append(f"{name}: {number(median[step])} ({band})")
    return "\n".join(lines)


def task_chart(original: TaskScore, compressed: TaskScore) -> Chart:
    """The first series of a task, what happened, and the forecasts of both models."""
    series = ForecastExample(
        dataset=original.name,
        series=0,
        context=original.example.context,
        label=original.example.label,
        original=original.example.forecast,
        compressed=compressed.example.forecast,
    )
    title = f"{original.name}: skill {original.skill.value:.2f} → {compressed.skill.value:.2f}"
    return forecast_chart(series, title, least_context=len(series.context))


def covariate_chart(score: TaskScore) -> Chart | None:
    """The first covariates of a task, at the steps of :func:`task_chart`; None without any."""
    rows = score.example.covariates
    if not rows:
        return None
    horizon = len(score.example.label)
    every = [float(step) for step in range(1 - (len(rows[0]) - horizon), horizon + 1)]
    labels = score.task.covariates[: len(rows)]
    more = len(score.task.covariates) - len(rows)
    chart = Chart(
        label=f"{score.name}: covariates: {'; '.join(labels)}"
        + (f"; {more} more are not drawn" if more else ""),
        x_range=(every[0], every[-1] + 0.5),
        y_range=limits_of(value for row in rows for value in row),
        x_label="covariates" if len(score.task.covariates) > 1 else "covariate",
        height=110,
    )
    chart.axes(whole=True)
    origin = chart.x(0.5)
    chart.add("line", "origin", x1=origin, x2=origin, y1=TOP, y2=chart.height - BOTTOM)
    for index, (label, row) in enumerate(zip(labels, rows, strict=True)):
        chart.line(every, row, f"s{index}")
        chart.legend.append((f"s{index}", label))
    return chart
