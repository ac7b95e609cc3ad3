"""Figures of a rank profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tscompress.errors import UsageError
from tscompress.plotting import (
    GREY,
    LABEL_SIZE,
    MARKERS,
    PALETTE,
    SEQUENTIAL,
    TICK_SIZE,
    legend_beside,
    new_figure,
    save_figure,
    style_axes,
)
from tscompress.profiling.rank_profile import (
    EmbeddingGroup,
    InputProfile,
    RankProfile,
    Spectrum,
    WeightProfile,
)

#: What :func:`save_profile_figures` may write.
FIGURE_FILES = (
    "embedding.png", "weight_ranks.png", "spectra.png", "head_ranks.png", "flow_of_ranks.png",
)  # fmt: skip


def depth_colors(depths: Sequence[int]) -> ListedColormap:
    """One colour a depth, dark to light; the palest end, lost on white, is left out."""
    base = colormaps[SEQUENTIAL]
    last = max(1, len(depths) - 1)
    return ListedColormap([base(0.9 * index / last) for index in range(len(depths))])


def depth_colorbar(figure: Figure, panels: Sequence[Axes], depths: Sequence[int]) -> None:
    """The key to :func:`depth_colors`, to the right of ``panels``."""
    norm = BoundaryNorm([index - 0.5 for index in range(len(depths) + 1)], len(depths))
    mappable = ScalarMappable(norm, depth_colors(depths))
    bar = figure.colorbar(mappable, ax=panels, aspect=30, pad=0.02, fraction=0.03)
    step = -(-len(depths) // 12)
    bar.set_ticks(list(range(0, len(depths), step)), labels=list(map(str, depths[::step])))
    bar.ax.tick_params(labelsize=TICK_SIZE, length=0)
    bar.minorticks_off()
    bar.set_label("depth (layers)", fontsize=LABEL_SIZE)
    bar.outline.set_visible(False)


RELATIVE_SINGULAR_VALUE = "relative singular value $\\sigma_j / \\sigma_1$"


def save_profile_figures(profile: RankProfile, directory: str | Path) -> list[Path]:
    """Write every figure that the profile has data for, as PNG; returns the paths."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[RankProfile], Figure]] = {"embedding": embedding_figure}
    if profile.weights:
        figures |= {"weight_ranks": weight_rank_figure, "spectra": spectrum_figure}
    if any(weight.heads for weight in profile.weights):
        figures["head_ranks"] = per_head_figure
    if profile.inputs:
        figures["flow_of_ranks"] = flow_of_ranks_figure
    paths = []
    for name, draw in figures.items():
        path = target / f"{name}.png"
        save_figure(draw(profile), path)
        paths.append(path)
    return paths


def embedding_figure(profile: RankProfile) -> Figure:
    """Spectrum of the embedding, its two leading directions, and angles (paper Fig. 2, 3)."""
    pictured = [group for group in profile.embedding if group.coordinates]
    # The paper contrasts waves with noise; a table is a group of its own.
    contrasted = [group for group in pictured if group.name in ("sinusoids", "white noise")]
    compared = pictured if len(pictured) == 1 else contrasted
    figure = new_figure(6.6 + 2.6 * len(compared), 3.0, f"{profile.model}: embedded inputs")
    panels = figure.subplots(1, 2 + len(compared))
    _draw_embedding_spectra(panels[0], profile)
    _draw_projection(figure, panels[1], pictured)
    for axes, group in zip(panels[2:], compared, strict=True):
        _draw_angles(axes, group)
    bar = figure.colorbar(panels[-1].images[0], ax=panels[2:], aspect=25, pad=0.02)
    bar.set_ticks([0, math.pi / 4, math.pi / 2], labels=["0", "π/4", "π/2"])
    bar.ax.tick_params(labelsize=TICK_SIZE)
    bar.set_label("angle (rad)", fontsize=LABEL_SIZE)
    if len(profile.embedding) > 1:
        legend_beside(figure, panels[0])
    return figure


def _draw_embedding_spectra(axes: Axes, profile: RankProfile) -> None:
    style_axes(axes, xlabel="index $j$", ylabel=RELATIVE_SINGULAR_VALUE, title="singular values")
    for group, color in zip(profile.embedding, _group_colors(profile.embedding), strict=True):
        _draw_spectrum(axes, group.spectrum, color, label=group.name)
    _logarithmic(axes, profile)


def _group_colors(groups: Sequence[EmbeddingGroup]) -> list[str]:
    if len(groups) == 1:
        return [PALETTE[0]]
    return ["black", *PALETTE[: len(groups) - 1]]


def _draw_projection(figure: Figure, axes: Axes, groups: Sequence[EmbeddingGroup]) -> None:
    style_axes(axes, xlabel="1st singular vector", ylabel="2nd singular vector", title="projection")
    # Lines of points (a learnt number line) matter more than equal scales here.
    for group, color in zip(groups, PALETTE, strict=False):
        x, y = zip(*group.coordinates, strict=True)
        if len(groups) > 1:
            axes.scatter(x, y, s=5, color=color, alpha=0.5, linewidths=0)
            continue
        order = [index / max(1, len(x) - 1) for index in range(len(x))]
        points = axes.scatter(x, y, s=5, c=order, cmap=SEQUENTIAL, linewidths=0)
        bar = figure.colorbar(points, ax=axes, aspect=25, pad=0.02)
        bar.set_ticks([0, 1], labels=["first", "last"])
        bar.ax.tick_params(labelsize=TICK_SIZE)
        bar.set_label(f"{group.name} by {group.order.removeprefix('token ')}", fontsize=LABEL_SIZE)


def _draw_angles(axes: Axes, group: EmbeddingGroup) -> None:
    style_axes(axes, xlabel=f"by {group.order}", title=f"angles: {group.name}")
    axes.grid(visible=False)
    axes.imshow(group.angles, cmap=SEQUENTIAL, vmin=0, vmax=math.pi / 2, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def weight_rank_figure(profile: RankProfile) -> Figure:
    """Relative ε-rank of every projection, a heat map for each ε (paper Fig. 4, 5a, b)."""
    kinds = _kinds(profile.weights)
    roles = list(dict.fromkeys(weight.role for weight in profile.weights))
    depths = {kind: _depths(profile.weights, kind) for kind in kinds}
    rows = sum(map(len, depths.values()))
    size = (1.8 + len(profile.epsilons) * (0.5 + 0.3 * len(roles)), 1.4 + 0.16 * max(8, rows))
    figure = new_figure(*size, f"{profile.model}: ε-rank of the weights")
    panels = figure.subplots(
        len(kinds),
        len(profile.epsilons),
        squeeze=False,
        gridspec_kw={"height_ratios": [len(depths[kind]) for kind in kinds]},
    )
    for row, kind in enumerate(kinds):
        for column, epsilon in enumerate(profile.epsilons):
            axes = panels[row, column]
            cells = _relative_rank_cells(profile, kind, depths[kind], roles, column)
            image = axes.imshow(cells, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
            style_axes(axes, title=f"ε = {epsilon:g}" if row == 0 else "")
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            axes.set_xticks(range(len(roles)), labels=roles if row == len(kinds) - 1 else [])
            step = -(-len(depths[kind]) // 12)
            shown = depths[kind][::step] if column == 0 else []
            axes.set_yticks(range(0, len(shown) * step, step), labels=list(map(str, shown)))
        panels[row, 0].set_ylabel(f"{kind}\ndepth", fontsize=LABEL_SIZE)
    for axes in panels[-1]:
        axes.set_xlabel("projection", fontsize=LABEL_SIZE)
    bar = figure.colorbar(image, ax=panels, aspect=35, pad=0.02, fraction=0.05)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    bar.ax.tick_params(labelsize=TICK_SIZE)
    bar.set_label("ε-rank / full rank", fontsize=LABEL_SIZE)
    bar.outline.set_visible(False)
    return figure


def _relative_rank_cells(
    profile: RankProfile, kind: str, depths: Sequence[int], roles: Sequence[str], index: int
) -> list[list[float]]:
    """Shares in [0, 1], one row a depth, one column a role; NaN where there is no projection."""
    shares = {
        (weight.depth, weight.role): weight.spectrum.relative_ranks()[index]
        for weight in profile.weights
        if weight.kind == kind
    }
    return [[shares.get((depth, role), math.nan) for role in roles] for depth in depths]


def per_head_figure(profile: RankProfile, epsilon: float | None = None) -> Figure:
    """ε-rank of the heads by depth: mean as a line, smallest to largest as a band (Fig. 16).

    Parameters
    ----------
    epsilon
        One of the profile's; None takes the middle one.

    Raises
    ------
    UsageError
        The profile has no such ε.
    """
    index = _epsilon_index(profile, epsilon)
    weights = [weight for weight in profile.weights if weight.heads]
    kinds = _kinds(weights)
    title = f"{profile.model}: ε-rank of heads at ε = {profile.epsilons[index]:g}"
    figure = new_figure(1.9 + 2.3 * len(kinds), 2.9, title)
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    fit = profile.power_laws[index]
    for axes, kind in zip(panels, kinds, strict=True):
        style_axes(axes, xlabel="depth (layers)", title=f"{kind} attention")
        _draw_heads(axes, [weight for weight in weights if weight.kind == kind], index)
        depths = _depths(weights, kind)
        curve = [fit.d_0 * (1 + depth) ** fit.alpha for depth in depths]
        axes.plot(depths, curve, color="black", linewidth=1, linestyle=":", label="power-law fit")
        _draw_full_rank(axes, [weight for weight in weights if weight.kind == kind])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panels[0].set_ylabel("ε-rank of a head", fontsize=LABEL_SIZE)
    panels[0].set_ylim(bottom=0)
    legend_beside(figure, panels[0])
    return figure


def _draw_heads(axes: Axes, weights: Sequence[WeightProfile], index: int) -> None:
    roles = list(dict.fromkeys(weight.role for weight in weights))
    for role, color, marker in zip(roles, PALETTE, MARKERS, strict=False):
        members = [weight for weight in weights if weight.role == role]
        depths = [weight.depth for weight in members]
        ranks = [[head.ranks[index] for head in weight.heads] for weight in members]
        means = [sum(values) / len(values) for values in ranks]
        axes.fill_between(
            depths, list(map(min, ranks)), list(map(max, ranks)), color=color, alpha=0.15, lw=0
        )
        axes.plot(depths, means, color=color, marker=marker, ms=3.5, lw=1.3, label=role)


def _draw_full_rank(axes: Axes, weights: Sequence[WeightProfile]) -> None:
    """Steps of a head's full rank by depth; several lines where it differs between roles."""
    sizes: dict[str, dict[int, int]] = {}
    for weight in weights:
        sizes.setdefault(weight.role, {})[weight.depth] = weight.heads[0].full_rank
    for line in {tuple(sorted(of_role.items())): None for of_role in sizes.values()}:
        depths, ranks = zip(*line, strict=True)
        middles = [(one + other) / 2 for one, other in pairwise(depths)]
        edges = [depths[0] - 0.5, *middles, depths[-1] + 0.5]
        axes.stairs(ranks, edges, baseline=None, color=GREY, linewidth=1, label="full rank")


def flow_of_ranks_figure(profile: RankProfile) -> Figure:
    """Spectra of the inputs of each layer, and their ε-ranks by depth (paper Fig. 5c).

    Raises
    ------
    UsageError
        The profile has no layer inputs.
    """
    inputs = [entry for entry in profile.inputs if entry.part == "attention"]
    if not inputs:
        raise UsageError(f"the profile has no layer inputs to draw: {profile.inputs_reason}.")
    kinds = list(dict.fromkeys(entry.kind for entry in inputs))
    figure = new_figure(
        4.4 + 2.3 * len(kinds), 3.0, f"{profile.model}: inputs of attention, on {profile.corpus}"
    )
    panels = figure.subplots(1, 1 + len(kinds), width_ratios=[1.2, *[1.0] * len(kinds)])
    first = [entry for entry in inputs if entry.kind == kinds[0]]
    _draw_input_spectra(figure, panels[0], profile, first)
    for axes, kind in zip(panels[1:], kinds, strict=True):
        style_axes(axes, xlabel="depth (layers)", title=f"{kind} attention")
        members = [entry for entry in inputs if entry.kind == kind]
        for index, epsilon in enumerate(profile.epsilons):
            axes.plot(
                [entry.depth for entry in members],
                [entry.spectrum.ranks[index] for entry in members],
                color=PALETTE[index % len(PALETTE)],
                marker=MARKERS[index % len(MARKERS)],
                ms=3.5,
                lw=1.3,
                label=f"ε = {epsilon:g}",
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.sharey(panels[1])
        axes.tick_params(labelleft=axes is panels[1])
    panels[1].set_ylim(bottom=0)
    panels[1].set_ylabel("ε-rank of the input", fontsize=LABEL_SIZE)
    legend_beside(figure, panels[1])
    return figure


def _draw_input_spectra(
    figure: Figure, axes: Axes, profile: RankProfile, inputs: Sequence[InputProfile]
) -> None:
    style_axes(
        axes,
        xlabel="index $j$",
        ylabel=RELATIVE_SINGULAR_VALUE,
        title=f"{inputs[0].kind} attention",
    )
    depths = [entry.depth for entry in inputs]
    for entry, color in zip(inputs, depth_colors(depths).colors, strict=True):  # type: ignore[arg-type]
        _draw_spectrum(axes, entry.spectrum, color)
    _logarithmic(axes, profile)
    _shade_rounding(axes, profile.input_floor, named=True)
    depth_colorbar(figure, [axes], depths)


def spectrum_figure(profile: RankProfile) -> Figure:
    """Relative singular values of every projection (paper Fig. 12), coloured by depth."""
    kinds = _kinds(profile.weights)
    roles = list(dict.fromkeys(weight.role for weight in profile.weights))
    depths = sorted({weight.depth for weight in profile.weights})
    colors = dict(zip(depths, depth_colors(depths).colors, strict=True))  # type: ignore[arg-type]
    size = (1.6 + 1.6 * len(roles), 1.0 + 1.6 * len(kinds))
    figure = new_figure(*size, f"{profile.model}: singular values of the weights")
    panels = figure.subplots(len(kinds), len(roles), squeeze=False, sharex=True, sharey=True)
    for row, kind in enumerate(kinds):
        for column, role in enumerate(roles):
            axes = panels[row, column]
            style_axes(
                axes,
                xlabel="index $j$" if row == len(kinds) - 1 else "",
                ylabel=f"{kind}\n$\\sigma_j / \\sigma_1$" if column == 0 else "",
                title=role if row == 0 else "",
            )
            chosen = [w for w in profile.weights if (w.kind, w.role) == (kind, role)]
            for weight in chosen:
                _draw_spectrum(axes, weight.spectrum, colors[weight.depth])
            if chosen:
                _logarithmic(axes, profile)
                _shade_rounding(axes, profile.weight_floor, named=row == column == 0)
            else:
                axes.set_visible(False)
    depth_colorbar(figure, list(panels.flat), depths)
    return figure


def _draw_spectrum(axes: Axes, spectrum: Spectrum, color: object, label: str | None = None) -> None:
    positive = [value for value in spectrum.relative if value > 0]
    axes.plot(
        range(1, len(positive) + 1),
        positive,
        color=color,
        linewidth=1.3,
        label=label,
    )


def _logarithmic(axes: Axes, profile: RankProfile) -> None:
    """A logarithmic axis down to a tenth of the smallest ε."""
    axes.set_yscale("log")
    axes.set_ylim(profile.epsilons[-1] / 10, 1.5)
    axes.set_xlim(left=0)


def _shade_rounding(axes: Axes, floor: float, *, named: bool) -> None:
    """Grey where singular values can be rounding; ``named`` adds a label."""
    bottom, _ = axes.get_ylim()
    if floor <= bottom:
        return
    axes.axhspan(bottom, floor, color="#F0F0F0", zorder=0, lw=0)
    if named:
        axes.annotate(
            "rounding", (0.03, 0.03), xycoords="axes fraction", fontsize=TICK_SIZE - 1, color=GREY
        )


def _kinds(weights: Sequence[WeightProfile]) -> list[str]:
    return list(dict.fromkeys(weight.kind for weight in weights))


def _depths(weights: Sequence[WeightProfile], kind: str) -> list[int]:
    return sorted({weight.depth for weight in weights if weight.kind == kind})


def _epsilon_index(profile: RankProfile, epsilon: float | None) -> int:
    if epsilon is None:
        return profile.middle
    if epsilon not in profile.epsilons:
        measured = ", ".join(f"{value:g}" for value in profile.epsilons)
        raise UsageError(f"the profile has no ε = {epsilon:g}; it has {measured}.")
    return profile.epsilons.index(epsilon)
