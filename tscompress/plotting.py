"""Figures for reports. Nothing here touches pyplot, so importing it changes no global state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tscompress._version import __version__
from tscompress.errors import UsageError

# --------------------------------------------------------------------------------------------------
# Style
# --------------------------------------------------------------------------------------------------

#: Okabe and Ito's colours, distinguishable with colour-vision deficiencies.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
#: For ordered quantities; perceptually uniform and readable in grey.
SEQUENTIAL = "viridis"
GREY = "#8C8C8C"
DPI = 150
TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 10.0, 9.0, 8.0


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of ``width`` by ``height`` inches with constrained layout."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=TITLE_SIZE + 1, x=0.01, ha="left")
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write PNG that records its software, by which a later run knows it for its own."""
    software = {"Software": f"tscompress {__version__}, Matplotlib"}
    temporary = path.with_name(f".{path.name}.tmp")  # a kill leaves no half of a figure
    try:
        figure.savefig(temporary, dpi=DPI, format="png", metadata=software)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def style_axes(axes: Axes, *, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Labels in this module's sizes, no box, and a light grid."""
    axes.set_xlabel(xlabel, fontsize=LABEL_SIZE)
    axes.set_ylabel(ylabel, fontsize=LABEL_SIZE)
    axes.set_title(title, fontsize=TITLE_SIZE, loc="left")
    axes.tick_params(labelsize=TICK_SIZE, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)


def legend_beside(figure: Figure, axes: Axes | Iterable[Axes], title: str | None = None) -> None:
    """The legend of ``axes``, of several all that any draws, to the right of all panels."""
    entries: dict[str, Any] = {}
    for one in [axes] if isinstance(axes, Axes) else axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        title=title,
        loc="outside right upper",
        frameon=False,
        fontsize=TICK_SIZE,
        title_fontsize=TICK_SIZE,
    )


# --------------------------------------------------------------------------------------------------
# Comparisons
# --------------------------------------------------------------------------------------------------


class ComparisonRow(NamedTuple):
    """One compressed model against its original: ratios, below 1 is better; None is not drawn."""

    name: str
    relative_wql: float | None
    relative_mase: float | None
    latency_ratio: float | None
    parameter_ratio: float | None


def comparison_figure(
    rows: Sequence[ComparisonRow], title: str = "compressed / original"
) -> Figure:
    """Accuracy, latency and size of several models as dots around 1, the original."""
    metrics = {
        "WQL": [row.relative_wql for row in rows],
        "MASE": [row.relative_mase for row in rows],
        "latency": [row.latency_ratio for row in rows],
        "parameters": [row.parameter_ratio for row in rows],
    }
    figure = new_figure(7.0, 1.3 + 0.55 * len(rows), title)
    axes = figure.subplots()
    style_axes(axes, xlabel="ratio to the original (below 1 is better)")
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color=GREY, linewidth=1)
    for slot, (name, values) in enumerate(metrics.items()):
        offset = 0.18 * (slot - (len(metrics) - 1) / 2)
        drawn = [(value, row + offset) for row, value in enumerate(values) if value is not None]
        x, y = zip(*drawn, strict=True) if drawn else ((), ())
        axes.hlines(y, 1, x, color=PALETTE[slot], linewidth=1, alpha=0.5)
        axes.plot(x, y, MARKERS[slot], color=PALETTE[slot], ms=6, label=name)
    axes.set_yticks(range(len(rows)), labels=[row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    legend_beside(figure, axes)
    return figure


# --------------------------------------------------------------------------------------------------
# Forecasts
# --------------------------------------------------------------------------------------------------


class ForecastPanel(NamedTuple):
    """One series and two forecasts of it; NaN is not drawn."""

    title: str
    context: Sequence[float]
    label: Sequence[float]
    original: Sequence[Sequence[float]]
    """Quantiles 0.1, 0.5 and 0.9, each ``[horizon]``."""
    compressed: Sequence[Sequence[float]]


def forecast_figure(
    panels: Sequence[ForecastPanel], title: str = "series that got worst"
) -> Figure:
    """Medians and 80% intervals of two models with the observed values, two panels per row.

    Raises
    ------
    UsageError
        There is no panel.
    """
    if not panels:
        raise UsageError("no series to draw; a figure needs at least one.")
    rows = -(-len(panels) // 2)
    figure = new_figure(9.0, 1.0 + 1.7 * rows, title)
    grid = figure.subplots(rows, 2, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_visible(False)
            continue
        last = index >= len(panels) - 2
        style_axes(
            axes, xlabel="steps from the forecast" if last else "", title=panels[index].title
        )
        _draw_forecasts(axes, panels[index])
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=TICK_SIZE
    )
    return figure


def _draw_forecasts(axes: Axes, panel: ForecastPanel) -> None:
    before = range(1 - len(panel.context), 1)
    steps = range(1, 1 + len(panel.label))
    axes.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.plot(
        [*before, *steps],
        [*panel.context, *panel.label],
        color="black",
        linewidth=1,
        label="series",
    )
    # One interval is an area, the other two lines: two areas would mix their colours.
    low, median, high = panel.original
    name = "original, 80% interval"
    axes.fill_between(steps, low, high, color=PALETTE[0], alpha=0.2, linewidth=0, label=name)
    axes.plot(steps, median, color=PALETTE[0], linewidth=1.6, label="original, median")
    low, median, high = panel.compressed
    axes.plot(steps, low, "--", color=PALETTE[1], linewidth=0.9, label="compressed, 80% interval")
    axes.plot(steps, high, "--", color=PALETTE[1], linewidth=0.9)
    axes.plot(steps, median, color=PALETTE[1], linewidth=1.6, label="compressed, median")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))
    axes.margins(x=0.02)


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def loss_figure(lines: Sequence[Mapping[str, float | None]], best_step: int) -> Figure:
    """Losses and learning rate of a recovery, from the lines of its log."""
    figure = new_figure(8.0, 3.2)
    parts, rates = figure.subplots(1, 2, width_ratios=(3, 1))
    style_axes(parts, xlabel="step", ylabel="loss", title="training, and held-out series")
    drawn = (
        ("teacher", "to the teacher", PALETTE[0], "-"),
        ("held_out_teacher", "to the teacher, held out", PALETTE[0], "o--"),
        ("truth", "to the truth", PALETTE[1], "-"),
        ("held_out_truth", "to the truth, held out", PALETTE[1], "o--"),
    )
    for key, label, color, style in drawn:
        steps, values = _present(lines, key)
        if any(values):
            parts.plot(steps, values, style, color=color, label=label, linewidth=1.2, ms=3)
    parts.set_yscale("log")
    parts.axvline(best_step, color=GREY, linewidth=1, linestyle=":", label="weights kept")
    style_axes(rates, xlabel="step", title="learning rate")
    rates.plot(*_present(lines, "learning_rate"), color=GREY)
    rates.ticklabel_format(axis="y", scilimits=(0, 0))
    legend_beside(figure, parts)
    return figure


def _present(
    lines: Sequence[Mapping[str, float | None]], key: str
) -> tuple[list[float], list[float]]:
    """Steps and values of the lines that have ``key``."""
    pairs = [(line["step"] or 0, value) for line in lines if (value := line[key]) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
