"""Figures of the HTML report as plain data: marks of an SVG with everything placed.

The template draws them, so that all text is escaped in one place and colours follow the reader's
light or dark scheme. Panels are as wide as a phone; the page puts several beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from matplotlib.ticker import EngFormatter, MaxNLocator

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.evaluation.comparison import ModelComparison, Ratio
from tscompress.evaluation.fidelity import DatasetFidelity, Fidelity, WorstSeries
from tscompress.evaluation.typical_series import ForecastExample
from tscompress.plan.plan import Plan
from tscompress.probing.results import Estimate, ProbeResult, TaskScore
from tscompress.profiling.rank_profile import RankProfile
from tscompress.reports.content import cost_label
from tscompress.reports.points import Point, front

WIDTH, HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 36
_COLORS = 6
_MAX_NAME = 30
_LEAST_CONTEXT = 12
#: The locator of ticks takes limits that are smaller for zero.
_ZERO = 1e-280
#: Of names in figures, about.
_LETTER_WIDTH, _LINE_HEIGHT = 6.0, 12.0
#: Where a name may stand from its point, the first free place is taken.
_BELOW, _ABOVE = (16.0, -8.0, 30.0, -22.0), (-8.0, 16.0, -22.0, 30.0)
#: With more models than this, only those that nothing beats have their names drawn.
_MAX_NAMED = 6
#: A model that is worse by more is in the table alone: it would press all others onto one line.
FAR = 0.1

Value = float | None


class Mark(NamedTuple):
    """One SVG element."""

    tag: str
    css: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Chart:
    """A panel. ``label`` says what it shows to those who do not see it."""

    label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_label: str = ""
    y_label: str = ""
    title: str = ""
    height: int = HEIGHT
    marks: list[Mark] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    """Class and name of what is drawn, where the panel has a legend of its own."""

    width = WIDTH

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def add(self, tag: str, css: str, text: str = "", **attributes: float | str) -> None:
        """Append an element; numbers are rounded to a tenth of a pixel."""
        placed = {
            name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in attributes.items()
        }
        self.marks.append(Mark(tag, css, placed, text))

    def axes(self, *, whole: bool = False) -> None:
        """Grid, ticks and labels; ``whole`` numbers on x only."""
        bottom = self.height - _BOTTOM
        for tick, text in ticks(self.y_range, 4):
            at = self.y(tick)
            self.add("line", "grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at)
            self.add("text", "tick end", text, x=_LEFT - 5.0, y=at + 3.5)
        for tick, text in ticks(self.x_range, 6, whole=whole):
            self.add("text", "tick middle", text, x=self.x(tick), y=bottom + 14.0)
        self.add("line", "axis", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom)
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        self.add("text", "axis-label middle", self.x_label, x=middle, y=self.height - 5.0)
        if self.y_label:
            center = (_TOP + bottom) / 2
            turn = f"rotate(-90 10 {center:.1f})"
            self.add("text", "axis-label middle", self.y_label, x=10.0, y=center, transform=turn)

    def line(self, xs: Sequence[float], ys: Sequence[Value], css: str) -> None:
        """A line with a gap where a value is missing."""
        for part in _runs(xs, ys):
            points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in part)
            self.add("polyline", f"line {css}", points=points)

    def dots(self, xs: Sequence[float], ys: Sequence[Value], css: str) -> None:
        for x, y in zip(xs, ys, strict=True):
            if y is not None and math.isfinite(y):
                self.add("circle", f"dot {css}", cx=self.x(x), cy=self.y(y), r=2.5)

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str
    ) -> None:
        corners = [*zip(xs, low, strict=True), *zip(xs[::-1], high[::-1], strict=True)]
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in corners)
        self.add("polygon", f"band {css}", points=points)

    def level(self, value: float, css: str = "one") -> None:
        """A horizontal line across the panel, if it is inside."""
        if self.y_range[0] <= value <= self.y_range[1]:
            y = self.y(value)
            self.add("line", css, x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y)

    def hits(self, xs: Sequence[float], tips: Sequence[str]) -> None:
        """Invisible columns that show a text under the pointer."""
        if not xs:
            return
        step = (self.x(xs[-1]) - self.x(xs[0])) / max(1, len(xs) - 1) or WIDTH - _LEFT - _RIGHT
        for x, tip in zip(xs, tips, strict=True):
            self.add(
                "rect",
                "hit",
                x=self.x(x) - step / 2,
                width=step,
                y=_TOP,
                height=self.height - _TOP - _BOTTOM,
                data_tip=tip,
            )


# --------------------------------------------------------------------------------------------------
# Scales
# --------------------------------------------------------------------------------------------------


def ticks(
    limits: tuple[float, float], count: int, *, whole: bool = False
) -> list[tuple[float, str]]:
    """Round numbers within the limits, and how they are written."""
    found = MaxNLocator(count, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(*limits)
    slack = 1e-9 * (limits[1] - limits[0])
    inside = [float(v) for v in found if limits[0] - slack <= v <= limits[1] + slack]
    step = inside[1] - inside[0] if len(inside) > 1 else max(map(abs, limits)) or 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits and round(step * 10**digits, 6) % 1:  # steps of 0.25 need one digit more
        digits += 1
    forms: list[Callable[[float], str]] = [lambda value: f"{value:.3g}", repr]
    if digits <= 6:
        forms.insert(0, lambda value: f"{value:.{digits}f}")
    if max(map(abs, limits)) >= 10_000:
        forms.insert(0, EngFormatter(sep=""))
    texts = [[write(value) for value in inside] for write in forms]
    # The shortest way that tells them apart.
    chosen = next(text for text in texts if len(set(text)) == len(text))
    return list(zip(inside, chosen, strict=True))


def _limits(values: Iterable[Value], *, pad: float = 0.06) -> tuple[float, float]:
    """Least to greatest, and a little more; never empty."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if max(abs(low), abs(high)) < _ZERO:
        return low - 1.0, high + 1.0
    margin = pad * (high - low) or 0.05 * abs(high)
    return low - margin, high + margin


def _runs(xs: Sequence[float], ys: Sequence[Value]) -> Iterable[list[tuple[float, float]]]:
    """Stretches without a missing value; one point alone is drawn as a dot, twice the same."""
    part: list[tuple[float, float]] = []
    for x, y in [*zip(xs, ys, strict=True), (0.0, None)]:
        if y is not None and math.isfinite(y):
            part.append((x, y))
        elif part:
            yield part if len(part) > 1 else part * 2
            part = []


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def number(value: Value) -> str:
    """Four significant digits, for people."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


# --------------------------------------------------------------------------------------------------
# Cost against quality
# --------------------------------------------------------------------------------------------------


def pareto_chart(points: Sequence[Point], metric: str, cost: str) -> Chart:
    """Every model's cost and score relative to the original's; whiskers are 95 % intervals."""
    shown = [point for point in points if cost in point.costs and not is_far(point, metric)]
    bounds = [
        bound
        for point in shown
        for bound in (point.quality[metric].ratio, *_bounds(point.quality[metric]))
    ]
    chart = Chart(
        label=f"{metric} against {cost_label(cost)}, both relative to the original: "
        + "; ".join(
            f"{p.name} {p.quality[metric].ratio:.3f} at {p.costs[cost]:.3f}" for p in shown
        ),
        x_range=(0.0, 1.08 * max(point.costs[cost] for point in shown)),
        y_range=_limits([*bounds, 0.99, 1.01], pad=0.12),
        x_label=f"{cost_label(cost)}, relative",
        y_label=f"{metric}, relative",
        title=f"{metric} and {cost_label(cost)}",
        height=250,
    )
    chart.axes()
    chart.level(1.0)
    for point in reversed(shown):  # the run's own models on top
        _add_point(chart, point, metric, cost)
    best = front(shown, metric, cost)
    named = [p for p in shown if p.kind != "other" or len(shown) <= _MAX_NAMED or p.name in best]
    _add_names(chart, named, metric, cost)
    return chart


def is_far(point: Point, metric: str) -> bool:
    """Whether another's model is too much worse than the original to be drawn beside the rest."""
    return point.kind == "other" and point.quality[metric].ratio > 1 + FAR


def _bounds(ratio: Ratio) -> tuple[Value, Value]:
    return ratio.low, ratio.high


def _add_point(chart: Chart, point: Point, metric: str, cost: str) -> None:
    ratio = point.quality[metric]
    x, y = chart.x(point.costs[cost]), chart.y(ratio.ratio)
    interval = ""
    if ratio.low is not None and ratio.high is not None and ratio.high > ratio.low:
        interval = f"\n95 %: {ratio.low:.4f} to {ratio.high:.4f}"
        low, high = chart.y(ratio.low), chart.y(ratio.high)
        chart.add("line", f"whisker {point.kind}", x1=x, x2=x, y1=low, y2=high)
    tip = (
        f"{point.name}\n{cost_label(cost)} × {point.costs[cost]:.3f}\n"
        f"{metric} × {ratio.ratio:.4f}{interval}"
    )
    chart.add("circle", f"point {point.kind}", cx=x, cy=y, r=5.5, data_tip=tip)


def _add_names(chart: Chart, points: Sequence[Point], metric: str, cost: str) -> None:
    """Names beside their points; one that would lie on another before it is left out."""
    taken: list[tuple[float, float, float]] = []  # left, right and baseline
    for point in points:
        ratio = point.quality[metric].ratio
        name = _short(point.name)
        width = _LETTER_WIDTH * len(name)
        right = point.costs[cost] > 0.5 * chart.x_range[1]
        x = chart.x(point.costs[cost]) + (-9 if right else 9)
        left = x - width if right else x
        # Away from the line at 1, which would strike the name through.
        for beside in _BELOW if ratio < 1 else _ABOVE:
            y = chart.y(ratio) + beside
            if all(
                left > end or left + width < start or abs(y - line) > _LINE_HEIGHT
                for start, end, line in taken
            ):
                taken.append((left, left + width, y))
                chart.add("text", f"name {'end' if right else 'start'}", name, x=x, y=y)
                break


# --------------------------------------------------------------------------------------------------
# Ratios by dataset
# --------------------------------------------------------------------------------------------------


class ForestRow(NamedTuple):
    """A ratio on a strip; positions in per cent of its width."""

    name: str
    series_count: int | None
    ratio: Ratio
    at: float
    low: float | None
    high: float | None


class Forest(NamedTuple):
    """Ratios of all datasets on one logarithmic scale, the geometric mean last."""

    rows: tuple[ForestRow, ...]
    one: float
    ticks: tuple[tuple[float, str], ...]


def forest(model: ModelComparison, metric: str) -> Forest:
    """Where the ratios of one metric lie on a strip."""
    named: list[tuple[str, int | None, Ratio]] = [
        (part.dataset, part.series_count, getattr(part, metric)) for part in model.datasets
    ]
    named.append(("geometric mean", None, getattr(model, metric)))
    values = [v for _, _, r in named for v in (r.ratio, r.low, r.high) if v is not None and v > 0]
    low, high = _limits([math.log(value) for value in [*values, 0.995, 1.005]])

    def place(value: Value) -> float | None:
        if value is None or value <= 0 or not math.isfinite(value):
            return None
        return round(100 * (math.log(value) - low) / (high - low), 2)

    rows = tuple(
        ForestRow(
            name, count, ratio, place(ratio.ratio) or 0.0, place(ratio.low), place(ratio.high)
        )
        for name, count, ratio in named
    )
    shown = ticks((math.exp(low), math.exp(high)), 3)
    placed = tuple((at, text) for value, text in shown if (at := place(value)) is not None)
    return Forest(rows, place(1.0) or 0.0, placed)


# --------------------------------------------------------------------------------------------------
# Ranks
# --------------------------------------------------------------------------------------------------


def flow_charts(profile: RankProfile) -> list[Chart]:
    """ε-rank of what each kind of attention reads, by depth (the paper's Fig. 5c)."""
    inputs = [entry for entry in profile.inputs if entry.part == "attention"]
    full = max((entry.spectrum.full_rank for entry in inputs), default=1)
    # Inputs are of low rank, which is the point: the panel ends not far above them.
    highest = max((rank for entry in inputs for rank in entry.spectrum.ranks), default=1)
    top = min(1.05 * full, 1.2 * highest)
    names = [f"ε = {epsilon:g}" for epsilon in profile.epsilons]
    charts = []
    for kind in dict.fromkeys(entry.kind for entry in inputs):
        members = [entry for entry in inputs if entry.kind == kind]
        depths = [entry.depth for entry in members]
        lines = {
            name: [float(entry.spectrum.ranks[index]) for entry in members]
            for index, name in enumerate(names)
        }
        label = f"ε-rank of the input, of {full}"
        charts.append(_depth_chart(f"{kind} attention", label, depths, lines, top))
    return charts


def head_charts(profile: RankProfile, plan: Plan) -> list[Chart]:
    """Mean ε-rank of the heads by depth and role, and the size that they were folded to."""
    at = profile.middle
    weights = [weight for weight in profile.weights if weight.heads]
    full = max((weight.heads[0].full_rank for weight in weights), default=1)
    charts = []
    for kind in dict.fromkeys(weight.kind for weight in weights):
        members = [weight for weight in weights if weight.kind == kind]
        depths = sorted({weight.depth for weight in members})
        lines: dict[str, list[float]] = {}
        for weight in members:  # in the order of depth
            ranks = [head.ranks[at] for head in weight.heads]
            lines.setdefault(weight.role, []).append(sum(ranks) / len(ranks))
        kept = None if plan.uniform_sizes is None else float(plan.uniform_sizes[0])
        label = f"mean ε-rank of a head, of {full}"
        charts.append(_depth_chart(f"{kind} attention", label, depths, lines, 1.05 * full, kept))
    return charts


def _depth_chart(
    title: str,
    y_label: str,
    depths: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    top: float,
    kept: float | None = None,
) -> Chart:
    xs = [float(depth) for depth in depths]
    chart = Chart(
        label=f"{y_label} by depth, {title}: "
        + "; ".join(f"{name} from {ys[0]:.3g} to {ys[-1]:.3g}" for name, ys in lines.items()),
        x_range=_limits(xs, pad=0.04),
        y_range=(0.0, top),
        x_label="depth (layers)",
        y_label=y_label,
        title=title,
    )
    chart.axes(whole=True)
    if kept is not None:
        chart.level(kept, "kept")
    for index, (name, ys) in enumerate(lines.items()):
        css = f"s{index % _COLORS}"
        chart.line(xs, ys, css)
        chart.dots(xs, ys, css)
        chart.legend.append((css, name))
    if kept is not None:
        chart.legend.append(("kept", f"size kept: {kept:g}"))
    tips = [
        "\n".join([f"depth {depth}", *(f"{name}: {ys[index]:.3g}" for name, ys in lines.items())])
        for index, depth in enumerate(depths)
    ]
    chart.hits(xs, tips)
    return chart


# --------------------------------------------------------------------------------------------------
# Forecasts
# --------------------------------------------------------------------------------------------------


def forecast_chart(
    series: ForecastExample | WorstSeries, title: str, *, least_context: int = _LEAST_CONTEXT
) -> Chart:
    """The end of a series, what happened, and medians and 80 % bands of both models."""
    horizon = len(series.label)
    context = series.context[-max(least_context, 2 * horizon) :]
    before = [float(step) for step in range(1 - len(context), 1)]
    steps = [float(step) for step in range(1, horizon + 1)]
    models = {"original": series.original, "compressed": series.compressed}
    values = [
        *context,
        *series.label,
        *(v for m in models.values() for row in m for v in row),
    ]
    chart = Chart(
        label=f"{series.dataset}, series {series.series}: the end of the series, what happened, "
        f"and the forecasts of both models over {horizon} steps",
        x_range=(before[0] if before else 0.5, steps[-1] + 0.5),
        y_range=_limits(values),
        x_label="steps from the forecast",
        title=title,
        height=190,
    )
    chart.axes(whole=True)
    origin = chart.x(0.5)
    chart.add("line", "origin", x1=origin, x2=origin, y1=_TOP, y2=chart.height - _BOTTOM)
    for name, (low, _, high) in models.items():
        chart.band(steps, low, high, name)
    chart.line([*before, *steps], [*context, *series.label], "truth")
    for name, (_, median, _) in models.items():
        chart.line(steps, median, name)
    chart.hits(steps, [_forecast_tip(series.label, models, step) for step in range(horizon)])
    return chart


def _forecast_tip(
    label: Sequence[Value], models: Mapping[str, Sequence[Sequence[float]]], step: int
) -> str:
    lines = [f"step {step + 1}: {number(label[step])}"]
    for name, (low, median, high) in models.items():
        band = f"{number(low[step])} to {number(high[step])}"
        lines.append(f"{name}: {number(median[step])} ({band})")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Skill
# --------------------------------------------------------------------------------------------------


class SkillRow(NamedTuple):
    """Mean skill of a group of tasks on a strip; positions in per cent of its width."""

    name: str
    tasks: int
    original: float
    compressed: float
    seasonal_naive: float
    kept: Estimate | None
    able: int
    at: tuple[float, float, float]
    """Of original, compressed and seasonal naive."""


class SkillStrip(NamedTuple):
    """Skills of all groups on one scale, the mean of the groups last."""

    rows: tuple[SkillRow, ...]
    zero: float
    ticks: tuple[tuple[float, str], ...]


def skill_strip(original: ProbeResult, compressed: ProbeResult) -> SkillStrip:
    """Where the skills of both models and of seasonal naive lie on a strip."""
    comparison = compressed.against(original)
    before, after, naive = original.groups(), compressed.groups(), compressed.naive_groups()
    values = {
        change.group: (before[change.group].value, after[change.group].value, naive[change.group])
        for change in comparison.groups
    }
    means = (original.overall().value, compressed.overall().value, sum(naive.values()) / len(naive))
    # Seasonal naive may be far below, where there is no season; it then lies at the edge.
    low = min(-0.25, *(value for row in (*values.values(), means) for value in row[:2])) - 0.03
    high = max(1.0, *(value for row in (*values.values(), means) for value in row)) + 0.03

    def place(value: float) -> float:
        return round(100 * (max(low, value) - low) / (high - low), 2)

    def row(name: str, kept: Estimate | None, able: int, tasks: int) -> SkillRow:
        skills = values.get(name, means)
        at = place(skills[0]), place(skills[1]), place(skills[2])
        return SkillRow(name, tasks, *skills, kept, able, at)

    rows = [row(c.group, c.kept, c.able, c.tasks) for c in comparison.groups]
    able = sum(change.able for change in comparison.groups)
    rows.append(row("mean of the groups", comparison.kept, able, len(comparison.tasks)))
    shown = tuple((place(value), f"{value:g}") for value in (-1.0, -0.5, 0.0, 0.5, 1.0))
    inside = tuple((at, text) for at, text in shown if float(text) > low)
    return SkillStrip(tuple(rows), place(0.0), inside)


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


# --------------------------------------------------------------------------------------------------
# Fidelity
# --------------------------------------------------------------------------------------------------


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
    low, high = _limits([*values, *([around] if around is not None else [])])
    return Chart(
        label="", x_range=_limits(xs, pad=0.04), y_range=(low if start is None else start, high)
    )


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
    for values in lines.values():
        chart.line(xs[: len(values)], values, "thin")
    chart.line(xs, mean, "compressed solid")
    chart.dots(xs, mean, "compressed")
    tips = []
    for index, x in enumerate(xs):
        members = [f"{name}: {number(v[index])}" for name, v in lines.items() if index < len(v)]
        tips.append("\n".join([f"{unit} {x:g}: {number(mean[index])}", *members[:12]]))
    chart.hits(xs, tips)
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
