"""Figures of several rank profiles in one axis; each model has a colour, each attention a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter, ScalarFormatter

from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    TICK_SIZE,
    legend_beside,
    new_figure,
    save_figure,
    style_axes,
)
from tscompress.profiling.figures import RELATIVE_SINGULAR_VALUE
from tscompress.profiling.rank_profile import RankProfile, WeightProfile

#: What :func:`save_compared_figures` writes.
COMPARED_FIGURES = ("compared_embeddings.png", "compared_ranks.png", "compared_spectra.png")

Profiles = Mapping[str, RankProfile]
#: Tol's muted colours after those of the package: twelve that can be told apart.
COLORS = (*PALETTE, "#332288", "#882255", "#44AA99", "#999933", "#000000", "#AA4499")
_LINES = {"encoder": "-", "time": "-", "decoder": "--", "cross": ":", "group": "--"}
#: Edges of the bins of relative singular values, and the smallest that is drawn.
_BINS = np.logspace(-4, 0, 41)


def save_compared_figures(profiles: Profiles, directory: Path) -> list[Path]:
    """Write the three figures as PNG; returns the paths."""
    drawers: tuple[Callable[[Profiles], Figure], ...] = (
        compared_embeddings_figure, compared_ranks_figure, compared_spectra_figure,
    )  # fmt: skip
    paths = [directory / name for name in COMPARED_FIGURES]
    for draw, path in zip(drawers, paths, strict=True):
        save_figure(draw(profiles), path)
    return paths


def compared_embeddings_figure(profiles: Profiles) -> Figure:
    """Spectra of the embedded inputs in one axis (paper Fig. 2a)."""
    figure = new_figure(7.4, 3.6, "Embedded inputs")
    axes = figure.subplots()
    style_axes(axes, xlabel="index $j$", ylabel=RELATIVE_SINGULAR_VALUE)
    for (name, profile), color in zip(profiles.items(), COLORS, strict=False):
        group = profile.embedding[0]
        values = [value for value in group.spectrum.relative if value > 0]
        places = range(1, len(values) + 1)
        axes.plot(places, values, color=color, lw=1.4, label=f"{name}: {group.name}")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_ylim(_smallest(profiles) / 10, 1.5)
    legend_beside(figure, axes)
    return figure


def _smallest(profiles: Profiles) -> float:
    """The smallest ε."""
    return min(profile.epsilons[-1] for profile in profiles.values())


def compared_ranks_figure(profiles: Profiles) -> Figure:
    """ε-rank of W_Q against the width, and as a share of it by layer (paper Fig. 4, 5a, b)."""
    first = next(iter(profiles.values()))
    epsilon = first.epsilons[first.middle]
    figure = new_figure(10.4, 3.6, f"ε-rank of $W_Q$ at ε = {epsilon:g}")
    against_width, by_layer = figure.subplots(1, 2, width_ratios=[1, 1.4])
    style_axes(against_width, xlabel="width $d$", ylabel="mean ε-rank of the layers")
    style_axes(by_layer, xlabel="layer of its stack", ylabel="ε-rank / full rank")
    drawn: dict[str, list[str]] = {}
    for (name, profile), color in zip(profiles.items(), COLORS, strict=False):
        for members in _by_kind(profile):
            kind = members[0].kind
            line = _LINES.get(kind, "-")
            drawn[line] = list(dict.fromkeys([*drawn.get(line, []), kind]))
            _draw_ranks(against_width, by_layer, members, profile.middle, color, line)
        by_layer.plot([], [], color=color, lw=1.4, label=name)
    for line, kinds in drawn.items():
        style = {"color": GREY, "ls": line, "marker": _marker(line), "ms": 4, "lw": 1.3}
        by_layer.plot([], [], **style, label=", ".join(kinds))
    _draw_constant_shares(against_width, profiles)
    by_layer.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    by_layer.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_layer.set_ylim(0, 1.05)
    legend_beside(figure, by_layer)
    return figure


def _by_kind(profile: RankProfile) -> list[list[WeightProfile]]:
    """W_Q of the layers of each kind of attention."""
    kinds: dict[str, list[WeightProfile]] = {}
    for weight in profile.weights:
        if weight.role == "q":
            kinds.setdefault(weight.kind, []).append(weight)
    return list(kinds.values())


def _ranks(weights: Sequence[WeightProfile], index: int) -> list[int]:
    return [weight.spectrum.ranks[index] for weight in weights]


def _marker(line: str) -> str:
    return dict(zip(("-", "--", ":"), MARKERS, strict=False))[line]


def _draw_ranks(
    against_width: Axes,
    by_layer: Axes,
    weights: Sequence[WeightProfile],
    index: int,
    color: str,
    line: str,
) -> None:
    mean = fmean(_ranks(weights, index))
    style = {"color": color, "marker": _marker(line), "ms": 4}
    against_width.plot([weights[0].in_features], [mean], ls="", **style)  # type: ignore[arg-type]
    shares = [weight.spectrum.relative_ranks()[index] for weight in weights]
    by_layer.plot(range(len(shares)), shares, ls=line, lw=1.3, **style)  # type: ignore[arg-type]


def _draw_constant_shares(axes: Axes, profiles: Profiles) -> None:
    """Logarithmic axes with lines on which the rank is one share of the width."""
    shown = [(one, kind) for one in profiles.values() for kind in _by_kind(one)]
    widths = {kind[0].in_features for _, kind in shown} or {1}
    low, high = min(widths) / 1.3, max(widths) * 1.3
    least = min((fmean(_ranks(kind, one.middle)) for one, kind in shown), default=1.0)
    bottom = max(0.5, min(least, 0.2 * low) / 1.3)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, high))
    for share in (0.05, 0.2, 0.8):
        axes.add_line(Line2D([low, high], [share * low, share * high], color=GREY, lw=0.7, ls=":"))
        if share * high > bottom:
            place = (high, share * high)
            axes.annotate(f" {share:.0%}", place, fontsize=TICK_SIZE - 1, color=GREY, va="center")
    axes.set_xticks(sorted(widths))
    axes.set_yticks([tick for tick in (2**power for power in range(20)) if bottom < tick < high])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def compared_spectra_figure(profiles: Profiles) -> Figure:
    """Histograms of relative singular values of W_Q and of the feed-forwards (paper Fig. 12)."""
    figure = new_figure(9.6, 3.4, "Relative singular values of the weights")
    panels = figure.subplots(1, 2, sharey=True)
    parts = {"$W_Q$": "q", "feed-forward": None}
    for axes, (title, role) in zip(panels, parts.items(), strict=True):
        style_axes(axes, xlabel="$\\sigma_j / \\sigma_1$", title=title)
        axes.set_xscale("log")
        axes.set_xlim(_BINS[0], 1)
        for (name, profile), color in zip(profiles.items(), COLORS, strict=False):
            values = _relative_values(profile, role)
            if len(values):
                weights = np.full(len(values), 1 / len(values))
                options = {"histtype": "step", "color": color, "lw": 1.3, "label": name}
                axes.hist(values, _BINS, weights=weights, **options)
    panels[0].set_ylabel("share of singular values")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_beside(figure, max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[0])))
    return figure


def _relative_values(profile: RankProfile, role: str | None) -> np.ndarray:
    """Of all matrices of a role, or of the feed-forwards; what is below the axis is at its end."""
    chosen = [
        weight.spectrum.relative
        for weight in profile.weights
        if (weight.role == role if role else weight.part == "feed_forward")
    ]
    return np.concatenate(chosen).clip(_BINS[0], 1) if chosen else np.array([])
