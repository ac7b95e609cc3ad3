"""Charts of cost against quality."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from tscompress.evaluation.comparison import Ratio
from tscompress.reports.costs import cost_label
from tscompress.reports.points import Point, front
from tscompress.reports.svg import BOTTOM, Chart, Value, limits_of

#: Of names in figures, about.
_LETTER_WIDTH, _LINE_HEIGHT = 6.0, 12.0
#: Of names beside a point, which may be anywhere in the panel.
_LINE_LETTERS = 20
_DOT = 6.0
#: How far a name may stand from its point, the first free place is taken.
_BELOW = (16.0, 30.0, 44.0)
#: With more models than this, only those that nothing beats have their names drawn.
_MAX_NAMED = 6
#: A model that is worse by more is only in the table: it would flatten the others in the chart.
FAR = 0.1


def pareto_chart(points: Sequence[Point], metric: str, cost: str) -> Chart:
    """Every model's cost and score relative to the original's; whiskers are 95% intervals."""
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
        y_range=limits_of([*bounds, 0.99, 1.01], pad=0.12),
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
    _add_names(chart, named, shown, metric, cost)
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
        interval = f"\n95%: {ratio.low:.4f} to {ratio.high:.4f}"
        low, high = chart.y(ratio.low), chart.y(ratio.high)
        chart.add("line", f"whisker {point.kind}", x1=x, x2=x, y1=low, y2=high)
    tip = (
        f"{point.name}\n{cost_label(cost)} × {point.costs[cost]:.3f}\n"
        f"{metric} × {ratio.ratio:.4f}{interval}"
    )
    chart.add("circle", f"point {point.kind}", cx=x, cy=y, r=5.5, data_tip=tip)


def _add_names(
    chart: Chart, points: Sequence[Point], named: Sequence[Point], metric: str, cost: str
) -> None:
    """Names of some points beside them, where they lie neither on a point nor on another name."""

    def place(point: Point) -> tuple[float, float]:
        return chart.x(point.costs[cost]), chart.y(point.quality[metric].ratio)

    taken = [_Box(x - _DOT, x + _DOT, y - _DOT, y + _DOT) for x, y in map(place, points)]
    for point in named:
        x, y = place(point)
        lines = _lines(point.name)
        right = point.costs[cost] > 0.5 * chart.x_range[1]
        start = x + (-9 if right else 9)
        width = _LETTER_WIDTH * max(map(len, lines))
        left = start - width if right else start
        down = _LINE_HEIGHT * (len(lines) - 1)  # from the first line to the last
        below = [y + beside for beside in _BELOW]
        above = [y - beside - down + _LINE_HEIGHT / 2 for beside in _BELOW]
        # Away from the line at 1, which would strike the name through.
        order = below + above if point.quality[metric].ratio < 1 else above + below
        for first in order:
            box = _Box(left, left + width, first - _LINE_HEIGHT, first + down + 2)
            inside = box.top >= 0 and box.bottom <= chart.height - BOTTOM
            if inside and not any(map(box.overlaps, taken)):
                taken.append(box)
                for index, line in enumerate(lines):
                    at_y = first + _LINE_HEIGHT * index
                    chart.add("text", f"name {'end' if right else 'start'}", line, x=start, y=at_y)
                break


class _Box(NamedTuple):
    left: float
    right: float
    top: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)


def _lines(name: str) -> list[str]:
    """A name in lines, broken at commas where its parts are short enough."""
    parts = (
        p.replace(" ", "\N{NO-BREAK SPACE}") if len(p) < _LINE_LETTERS else p
        for p in name.split(", ")
    )
    lines = textwrap.wrap(", ".join(parts), _LINE_LETTERS, max_lines=3, placeholder=" …") or [""]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
