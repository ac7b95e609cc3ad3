"""Charts of ε-ranks by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tscompress.plan.plan import Plan
from tscompress.profiling.rank_profile import RankProfile
from tscompress.reports.svg import COLORS, Chart, limits_of


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
        x_range=limits_of(xs, pad=0.04),
        y_range=(0.0, top),
        x_label="depth (layers)",
        y_label=y_label,
        title=title,
    )
    chart.axes(whole=True)
    if kept is not None:
        chart.level(kept, "kept")
    for index, (name, ys) in enumerate(lines.items()):
        css = f"s{index % COLORS}"
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
