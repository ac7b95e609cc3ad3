"""A panel of the HTML report as plain data: marks of an SVG with everything placed.

The template draws them, so that all text is escaped in one place and colours follow the reader's
light or dark scheme. Panels are as wide as a phone; the page puts several beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib import dates
from matplotlib.ticker import EngFormatter, MaxNLocator

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 36
COLORS = 6

#: The locator of ticks takes limits that are smaller for zero.
_ZERO = 1e-280

Value = float | None


class Mark(NamedTuple):
    """One SVG element."""

    tag: str
    css: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Chart:
    """A panel. ``label`` describes it for screen readers."""

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
        """Horizontal position of a value, in pixels."""
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical position of a value, in pixels from the top."""
        low, high = self.y_range
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def add(self, tag: str, css: str, text: str = "", **attributes: float | str) -> None:
        """Append an element; numbers are rounded to a tenth of a pixel."""
        placed = {
            name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in attributes.items()
        }
        self.marks.append(Mark(tag, css, placed, text))

    def axes(
        self, *, whole: bool = False, x_ticks: Sequence[tuple[float, str]] | None = None
    ) -> None:
        """Grid, ticks and labels; ``whole`` numbers on x only, or those that are given."""
        bottom = self.height - BOTTOM
        for tick, text in ticks(self.y_range, 4):
            at = self.y(tick)
            self.add("line", "grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at)
            self.add("text", "tick end", text, x=LEFT - 5.0, y=at + 3.5)
        for tick, text in ticks(self.x_range, 6, whole=whole) if x_ticks is None else x_ticks:
            self.add("text", "tick middle", text, x=self.x(tick), y=bottom + 14.0)
        self.add("line", "axis", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom)
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.add("text", "axis-label middle", self.x_label, x=middle, y=self.height - 5.0)
        if self.y_label:
            center = (TOP + bottom) / 2
            turn = f"rotate(-90 10 {center:.1f})"
            self.add("text", "axis-label middle", self.y_label, x=10.0, y=center, transform=turn)

    def line(self, xs: Sequence[float], ys: Sequence[Value], css: str) -> None:
        """A line with a gap where a value is missing."""
        for part in _runs(xs, ys):
            points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in part)
            self.add("polyline", f"line {css}", points=points)

    def dots(self, xs: Sequence[float], ys: Sequence[Value], css: str) -> None:
        """A dot at each finite point."""
        for x, y in zip(xs, ys, strict=True):
            if y is not None and math.isfinite(y):
                self.add("circle", f"dot {css}", cx=self.x(x), cy=self.y(y), r=2.5)

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str
    ) -> None:
        """The area between two lines."""
        corners = [*zip(xs, low, strict=True), *zip(xs[::-1], high[::-1], strict=True)]
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in corners)
        self.add("polygon", f"band {css}", points=points)

    def level(self, value: float, css: str = "one") -> None:
        """A horizontal line across the panel, if it is inside."""
        if self.y_range[0] <= value <= self.y_range[1]:
            y = self.y(value)
            self.add("line", css, x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)

    def hits(self, xs: Sequence[float], tips: Sequence[str]) -> None:
        """Invisible columns that show a text under the pointer."""
        if not xs:
            return
        step = (self.x(xs[-1]) - self.x(xs[0])) / max(1, len(xs) - 1) or WIDTH - LEFT - RIGHT
        for x, tip in zip(xs, tips, strict=True):
            self.add(
                "rect",
                "hit",
                x=self.x(x) - step / 2,
                width=step,
                y=TOP,
                height=self.height - TOP - BOTTOM,
                data_tip=tip,
            )


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


def time_ticks(times: Sequence[str], xs: Sequence[float]) -> list[tuple[float, str]]:
    """Round dates within ISO ``times``, placed along ``xs``, and how they are written.

    Parameters
    ----------
    times, xs
        ``[N]`` each, ascending.
    """
    untyped: Any = dates
    numbers = untyped.date2num(
        np.array([time.replace(" ", "T") for time in times], dtype="datetime64[s]")
    )
    locator = untyped.AutoDateLocator(minticks=3, maxticks=6)
    found = locator.tick_values(*untyped.num2date(numbers[[0, -1]]))
    inside = [float(tick) for tick in found if numbers[0] <= tick <= numbers[-1]]
    texts = untyped.ConciseDateFormatter(locator).format_ticks(inside)
    return list(zip(np.interp(inside, numbers, xs).tolist(), texts, strict=True))


def limits_of(values: Iterable[Value], *, pad: float = 0.06) -> tuple[float, float]:
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


def number(value: Value) -> str:
    """Four significant digits, for people."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
