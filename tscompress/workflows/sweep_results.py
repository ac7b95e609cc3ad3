"""Results of a sweep: a table of its points, their Pareto fronts, and a figure of both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.markup import escape
from rich.table import Table

from tscompress.benchmark.results import BenchResult
from tscompress.evaluation.comparison import ModelComparison, compare_results
from tscompress.evaluation.intervals import pareto_front
from tscompress.evaluation.results import METRICS
from tscompress.io.text import interval_text, percent
from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    TICK_SIZE,
    legend_beside,
    new_figure,
    style_axes,
)
from tscompress.workflows.measure_point import ORIGINAL, Measured, shape_name
from tscompress.workflows.sweep_points import SweepRecipe

#: Columns of the table that fronts are drawn over, and what people call them.
COSTS = {"latency_ms": "latency", "bytes_on_disk": "size on disk", "peak_memory_bytes": "memory"}


@dataclass
class SweepResult:
    """Results of a sweep, possibly with failed points.

    Attributes
    ----------
    frame
        A row for the original and each point: sizes, latency, ratios to the original with 95%
        intervals, and for each cost and metric whether it is on the Pareto front.
    failures
        Label of a point, and why it could not be measured.
    gone
        Ids of points whose weights an earlier sweep removed, and this one would keep.
    """

    recipe: SweepRecipe
    directory: Path
    frame: pd.DataFrame
    failures: dict[str, str] = field(default_factory=dict)
    bench: BenchResult | None = None
    gone: tuple[str, ...] = ()


def results_frame(
    dense: Measured, done: Sequence[Measured], timed: BenchResult | None, output: Path
) -> pd.DataFrame:
    """See :class:`SweepResult`."""
    comparison = compare_results([dense.scores, *(point.scores for point in done)])
    rows = [_row(dense, None, timed, ORIGINAL)]
    for point, quality in zip(done, comparison.models, strict=True):
        rows.append(_row(point, quality, timed, shape_name(output, point)))
    frame = pd.DataFrame(rows)
    frame.insert(0, "number", range(len(frame)))
    # Models of one shape take the same memory; differences are noise of the process.
    frame["peak_memory_bytes"] = frame.groupby("shape")["peak_memory_bytes"].transform("min")
    for cost, metric in itertools.product(COSTS, METRICS):
        if frame[cost].notna().all():
            frame[f"front_{cost}_{metric}"] = pareto_front(
                frame[cost].to_numpy(dtype=float), frame[f"{metric}_ratio"].to_numpy(dtype=float)
            )
    return frame


def _row(
    point: Measured,
    quality: ModelComparison | None,
    timed: BenchResult | None,
    shape: str,
) -> dict[str, Any]:
    row = point.model_dump(exclude={"scores", "checkpoint"}) | {"shape": shape}
    for metric in METRICS:
        ratio = None if quality is None else getattr(quality, metric)
        row[f"{metric}_ratio"] = 1.0 if ratio is None else ratio.ratio
        row[f"{metric}_low"] = None if ratio is None else ratio.low
        row[f"{metric}_high"] = None if ratio is None else ratio.high
    speed = None if timed is None else next(m for m in timed.models if m.name == shape)
    row["latency_ms"] = None if speed is None else speed.latency_ms
    interval = None if timed is None or shape == ORIGINAL else timed.latency_ratio_interval(shape)
    row["latency_low"], row["latency_high"] = interval or (None, None)
    row["macs"] = None if speed is None else speed.macs
    row["kv_cache_bytes"] = None if speed is None else speed.kv_cache_bytes
    if speed is not None and speed.peak_memory_bytes is not None:
        row["peak_memory_bytes"] = speed.peak_memory_bytes
    return row


def sweep_table(result: SweepResult) -> Table:
    """One row per point, ratios to the original, and the fronts that it is on."""
    frame = result.frame
    costs = _shown_costs(frame)
    model = escape(str(result.recipe.model))
    table = Table(
        title=f"{model}: {len(frame) - 1} points, ratios to the original (95%)",
        box=box.SIMPLE_HEAD,
        caption="front: nothing else is as good at no more "
        + ", ".join(f"{name} ({name[0].upper()})" for name in costs.values()),
    )
    for name in ("#", "", "parameters", *costs.values()):
        table.add_column(name, justify="right" if name else "left")
    for metric in METRICS:
        table.add_column(metric, justify="right", no_wrap=True, min_width=len("(1.000–1.000)"))
    for metric in METRICS:
        table.add_column(f"front\n{metric}")
    dense = frame.iloc[0]
    for row in frame.to_dict("records"):
        table.add_row(
            str(row["number"]),
            row["label"],
            percent(row["parameters"] / dense["parameters"], 1),
            *(f"{row[cost] / dense[cost]:.2f}" for cost in costs),
            *(f"{row[f'{metric}_ratio']:.4f}{_interval(row, metric)}" for metric in METRICS),
            *(_fronts(row, metric) for metric in METRICS),
        )
    return table


def _shown_costs(frame: pd.DataFrame) -> dict[str, str]:
    return {cost: name for cost, name in COSTS.items() if frame[cost].notna().all()}


def _interval(row: Mapping[Any, Any], metric: str) -> str:
    text = interval_text(row[f"{metric}_low"], row[f"{metric}_high"], 3)
    return f"\n{text}" if text else ""


def _fronts(row: Mapping[Any, Any], metric: str) -> str:
    """Initials of the costs at which no other point is as good, such as ``LM``."""
    names = [name for cost, name in COSTS.items() if row.get(f"front_{cost}_{metric}")]
    return "".join(name[0].upper() for name in names)


def sweep_figure(frame: pd.DataFrame, model: str) -> Any:
    """A panel for each metric and cost: points, numbered as in the table, and the fronts."""
    costs = _shown_costs(frame)
    named = len(_named(frame))
    height = 5.4 + 0.16 * math.ceil(named / 2)
    figure = new_figure(1.8 + 2.9 * len(costs), height, f"{model}: quality against cost")
    panels = figure.subplots(len(METRICS), len(costs), squeeze=False, sharey="row", sharex="col")
    for row, metric in zip(panels, METRICS, strict=True):
        for axes, (cost, name) in zip(row, costs.items(), strict=True):
            last = metric == METRICS[-1]
            first = axes is row[0]
            style_axes(
                axes,
                xlabel=f"{name}, ratio to original" if last else "",
                ylabel=f"{metric}, ratio to original" if first else "",
            )
            _draw_panel(axes, frame, cost, metric)
    for row, metric in zip(panels, METRICS, strict=True):  # their limits are known by now
        for axes, cost in zip(row, costs, strict=True):
            _number_points(axes, frame, cost, metric)
    legend_beside(figure, panels[0][0])
    _name_points(figure, frame)
    return figure


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """The points on any front."""
    fronts = frame[[name for name in frame.columns if name.startswith("front_")]]
    return frame[fronts.any(axis=1) & (frame.index > 0)]


def _name_points(figure: Figure, frame: pd.DataFrame) -> None:
    """What the numbers in the panels stand for."""
    named = _named(frame)
    if named.empty:
        return
    figure.legend(
        [Line2D([], [], linestyle="none") for _ in named.index],
        [f"{number}  {label}" for number, label in zip(named.number, named.label, strict=True)],
        loc="outside lower left",
        ncols=2,
        handlelength=0,
        handletextpad=0,
        frameon=False,
        fontsize=TICK_SIZE,
    )


def _draw_panel(axes: Any, frame: pd.DataFrame, cost: str, metric: str) -> None:
    x = frame[cost] / frame[cost].iloc[0]
    y = frame[f"{metric}_ratio"]
    axes.axhline(1, color=GREY, linewidth=0.8)
    front = frame[f"front_{cost}_{metric}"]
    corners = pd.DataFrame({"x": x[front], "y": y[front]}).sort_values(["x", "y"])
    axes.step(
        [*corners["x"], float(x.max())], [*corners["y"], corners["y"].iloc[-1]],
        where="post", color=GREY, linewidth=1, linestyle="--", label="Pareto front",
    )  # fmt: skip
    kinds = frame["method"] + frame["recovered"].map({True: " + recovery", False: ""})
    styles = iter(zip(PALETTE, MARKERS, strict=True))
    for kind in dict.fromkeys(kinds):
        color, marker = ("black", "*") if kind == ORIGINAL else next(styles)
        of_kind = kinds == kind
        axes.plot(x[of_kind], y[of_kind], marker, color=color, ms=5.5, label=kind)
    axes.set_xlim(0, 1.08 * max(1.0, float(x.max())))  # no dot is cut off


#: Of a panel without its margins, and of a number, both in points.
_PANEL, _NUMBER = (170.0, 140.0), (10.0, 9.0)
#: Where a number goes beside its dot, the first that is free.
_PLACES = ((8, 5), (8, -6), (-8, 5), (-8, -6), (0, 10), (0, -11), (15, 0), (-15, 0))


def _number_points(axes: Any, frame: pd.DataFrame, cost: str, metric: str) -> None:
    """The numbers of the points that are named, beside their dots and apart from one another."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    points = pd.DataFrame(
        {
            "number": frame["number"],
            "x": (frame[cost] / frame[cost].iloc[0] - left) / (right - left) * _PANEL[0],
            "y": (frame[f"{metric}_ratio"] - low) / (high - low) * _PANEL[1],
        }
    )
    taken = [(x, y, 6.0, 6.0) for x, y in points[["x", "y"]].to_numpy()]
    for number, x, y in points.loc[_named(frame).index].sort_values("x").to_numpy():
        places = [(x + dx, y + dy, *_NUMBER) for dx, dy in _PLACES]
        free = next((p for p in places if not any(_overlap(p, t) for t in taken)), places[0])
        taken.append(free)
        axes.annotate(
            f"{number:.0f}",
            (free[0] / _PANEL[0], free[1] / _PANEL[1]),
            xycoords="axes fraction",
            ha="center", va="center", fontsize=TICK_SIZE - 1,
        )  # fmt: skip


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes do, each given by its centre and its size."""
    return all(abs(one[i] - other[i]) < (one[i + 2] + other[i + 2]) / 2 for i in (0, 1))
