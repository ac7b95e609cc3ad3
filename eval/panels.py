"""Panels that several figures of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tscompress.plotting import GREY, legend_beside, style_axes

_LABELS = {
    "WQL": "WQL, ratio to dense",
    "MASE": "MASE, ratio to dense",
    "skill": "share of the dense model's skill",
}


def quality_panels(figure: Figure) -> Iterator[tuple[str, Axes]]:
    """Three panels of quality against latency, each with a line at the dense model's.

    Yields
    ------
    tuple
        ``WQL``, ``MASE`` or ``skill``, and the axes to draw on. The legend is added at the end.
    """
    panels = figure.subplots(1, len(_LABELS))
    for axes, (name, label) in zip(panels, _LABELS.items(), strict=True):
        style_axes(axes, xlabel="latency, ratio to dense", ylabel=label)
        axes.axhline(1, color=GREY, linewidth=0.8)
        yield name, axes
    legend_beside(figure, panels[-1])
