"""Figures of cuts: measures against the size of heads, before and after recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from cuts import METHODS, UNCUT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from verdicts import plain_ticks

from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    legend_beside,
    new_figure,
    save_figure,
    style_axes,
)

NAMES = {"svd": "truncated SVD", "activation-svd": "activation-aware SVD", "fold": "folding"}
#: Slots of the palette, by method.
_SLOTS = {"svd": 1, "activation-svd": 2, "fold": 0}
_LINES = ("-", "--", ":")


def draw_cuts(
    frame: pd.DataFrame,
    measures: Mapping[str, str],
    lines: Mapping[str, Mapping[str, float]],
    path: Path | None = None,
    *,
    zero: Sequence[str] = (),
    most: Mapping[str, float] | None = None,
    across: bool = False,
) -> Figure:
    """Measures against the size of heads; solid: cut alone, hollow and dotted: recovered.

    Parameters
    ----------
    measures
        Column of ``frame`` to its label: a row of panels, and a column for each model.
    lines
        Column to names and values of grey lines.
    path
        Also write it there.
    zero
        Columns whose axis ends at 0.
    most
        Column to the largest value that its axis shows.
    across
        Of one model: measures side by side.
    """
    models = list(dict.fromkeys(frame["model"]))
    rows, columns = (1, len(measures)) if across else (len(measures), len(models))
    figure = new_figure(1.6 + 2.5 * columns, 0.9 + 2.1 * rows)
    rows_alike = False if across else "row"
    grid = figure.subplots(rows, columns, squeeze=False, sharex="col", sharey=rows_alike)
    for place, (column, label) in enumerate(measures.items()):
        for index, model in enumerate(models[:1] if across else models):
            axes = grid[0, place] if across else grid[place, index]
            of_model = frame[frame["model"] == model]
            title = label if across else (model if place == 0 else "")
            side = "" if across or index else label
            below = "size of a head" if across or place == rows - 1 else ""
            style_axes(axes, title=title, ylabel=side, xlabel=below)
            _draw_panel(axes, of_model, column, lines.get(column, {}))
    for place, column in enumerate(measures):  # once all panels of a row have their lines
        for axes in grid[:, place] if across else grid[place]:
            _limit(axes, frame[column], (most or {}).get(column), column in zero)
    legend_beside(figure, grid.flat)
    if path is not None:
        save_figure(figure, path)
    return figure


def _draw_panel(axes: Axes, frame: pd.DataFrame, column: str, lines: Mapping[str, float]) -> None:
    for style, (name, value) in zip(_LINES, lines.items(), strict=False):
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=style, label=name)
    for recovered in (False, True):
        chosen = frame[frame["recovered"] == recovered]
        uncut = chosen[chosen["method"] == UNCUT]
        for method in METHODS:
            one = pd.concat([chosen[chosen["method"] == method], uncut]).sort_values("size")
            if one.empty:
                continue
            slot = _SLOTS[method]
            axes.plot(
                one["size"], one[column], ":" if recovered else "-", color=PALETTE[slot],
                marker=MARKERS[slot], ms=4, linewidth=1.2, mfc="white" if recovered else None,
                label=NAMES[method] + (", recovered" if recovered else ""),
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    largest = int(frame["size"].max())
    few = list(range(1, largest + 1)) if largest < 8 else [1, 2, 4, 8, 16, 32]
    plain_ticks(axes.xaxis, [one for one in few if one <= largest])


def _limit(axes: Axes, values: pd.Series, most: float | None, zero: bool) -> None:
    """Cut off what has diverged."""
    top = float(values.max())
    if most is not None and top > most:
        axes.set_ylim(top=most)
    if zero:
        axes.set_ylim(bottom=min(0.0, float(values.min())))
