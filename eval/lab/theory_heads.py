"""Theorem 6 and Appendix F.2: one sketch for all heads against one sketch a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from theory_embeddings import seeded
from torch import Tensor
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.lab.attention import spectral_norm
from tscompress.lab.constructions import interleaved_heads, sketched_attention
from tscompress.lab.sketches import sketch_distance, sparse_sketch
from tscompress.lab.spectra import exponential_spectrum, gaussian, orthonormal_columns
from tscompress.linalg import singular_values
from tscompress.plotting import GREY, PALETTE, SEQUENTIAL, TICK_SIZE, new_figure, style_axes

#: d, h, L and the rank of which numbers are named.
SHAPES = ((32, 4, 64, 2), (64, 4, 128, 4), (64, 8, 64, 2), (48, 4, 96, 6))
RANK = 4

# --------------------------------------------------------------------------------------------------
# Theorem 6
# --------------------------------------------------------------------------------------------------


def reductions(d: int, heads: int, L: int) -> list[dict[str, Any]]:
    """Errors of the best shared values and of a sketch of each head, for every rank below d_h."""
    sigma = exponential_spectrum(d, 0.1)
    layer = interleaved_heads(sigma, heads, L, seeded(0))
    output = layer.weights(layer.U)
    shared = singular_values(output)  # all heads attend alike: rank r leaves sigma_{r+1}
    rows = []
    for rank in range(1, d // heads):
        reduced = sketched_attention(layer, rank)
        smaller = all(
            float(torch.linalg.matrix_norm(a)) <= float(torch.linalg.matrix_norm(b)) * (1 + 1e-12)
            for a, b in zip(reduced[:3], layer.weights[:3], strict=True)
        )
        rows.append(
            {"shape": f"d {d}, h {heads}, L {L}", "rank": rank, "shared": float(shared[rank]),
             "per head": spectral_norm(output - reduced(layer.U)),
             "lower": float(sigma[rank]) / 2,
             "upper": 4 * math.sqrt(heads) * float(sigma[heads * rank]),
             "sigma": float(sigma[rank]), "sigma of heads": float(sigma[heads * rank]),
             "smaller": smaller}
        )  # fmt: skip
    return rows


def theorem_6(quick: bool) -> Found:
    """Both inequalities of Theorem 6 on its example."""
    shapes = SHAPES[:2] if quick else SHAPES
    frame = pd.DataFrame([row for d, h, L, _ in shapes for row in reductions(d, h, L)])
    named = [
        frame[(frame["shape"] == f"d {d}, h {h}, L {L}") & (frame["rank"] == rank)].iloc[0]
        for d, h, L, rank in shapes
    ]
    pairs = ", ".join(f"{row['shared']:.2g} : {row['per head']:.2g}" for row in named)
    cases = "; ".join(str(shape) for shape in shapes)
    verdicts = [
        Verdict(
            "Theorem 6.1", "no shared W_V of rank r has an error below σ_{r+1}/2",
            f"least ratio of the best one {(frame['shared'] / frame['lower']).min():.2f}",
            "at least 1", bool((frame["shared"] >= frame["lower"]).all()),
        ),
        Verdict(
            "Theorem 6.2", "factors of r + 1 in each head have an error of at most 4√h σ_{hr+1}",
            f"largest ratio {(frame['per head'] / frame['upper']).max():.2f}", "at most 1",
            bool((frame["per head"] <= frame["upper"]).all()),
        ),
        Verdict(
            "Theorem 6.2", "with Frobenius norms that are not larger",
            f"in {int(frame['smaller'].sum())} of {len(frame)} cases", "in all",
            bool(frame["smaller"].all()),
        ),
        Verdict(
            "Theorem 6", "heads with a sketch each beat a shared one",
            f"shared : per head {pairs} for (d, h, L, r) = {cases}", "per head is smaller",
            all(row["per head"] < row["shared"] for row in named),
        ),
    ]  # fmt: skip
    return Found(verdicts, frame, _theorem_6_figure(frame))


def _theorem_6_figure(frame: pd.DataFrame) -> Figure:
    shapes = list(dict.fromkeys(frame["shape"]))
    figure = new_figure(10.4, 3.0)
    panels = figure.subplots(1, len(shapes), sharey=True)
    lines = (
        ("shared", "best shared sketch", "o-", PALETTE[1]),
        ("sigma", r"$\sigma_{r+1}$", "--", "black"),
        ("per head", "one sketch a head", "s-", PALETTE[0]),
        ("sigma of heads", r"$\sigma_{hr+1}$", "-.", "black"),
        ("upper", r"$4\sqrt{h}\,\sigma_{hr+1}$", ":", GREY),
    )
    for axes, shape in zip(panels, shapes, strict=True):
        style_axes(axes, xlabel="rank r", title=shape)
        part = frame[frame["shape"] == shape]
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for column, label, style, color in lines:
            axes.semilogy(
                part["rank"], part[column], style, color=color, ms=4, lw=1.2, label=label,
                zorder=3 if color == "black" else 2,
            )  # fmt: skip
    panels[0].set_ylabel("spectral norm of the error", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=TICK_SIZE
    )
    return figure


# --------------------------------------------------------------------------------------------------
# Appendix F.2
# --------------------------------------------------------------------------------------------------


def reached(sigma: Tensor, distance: float) -> int:
    """The first j with sigma_{j+1} below this distance."""
    return int((sigma < distance).to(torch.int64).argmax()) if bool(sigma[-1] < distance) else 0


def distances(d: int, heads: Sequence[int], draws: int) -> pd.DataFrame:
    """Distances of sparse and dense sketches of h r rows from the row space of X (paper eq. 18)."""
    sigma = exponential_spectrum(d, 0.05)
    visible = int((sigma > 1e-16).sum())  # the others change no distance in float64
    rows = []
    for draw in range(draws):
        generator = seeded(draw)
        X = orthonormal_columns(d, visible, generator) * sigma[:visible]
        for h in heads:
            sketches_ = {"sparse": sparse_sketch(d, h, RANK, generator)}
            if draw < 2:
                sketches_["dense"] = gaussian(h * RANK, d, generator=generator)
            for kind, W in sketches_.items():
                distance = sketch_distance(W, X)
                rows.append({"kind": kind, "draw": draw, "heads": h, "distance": distance,
                             "j": reached(sigma, distance)})  # fmt: skip
    return pd.DataFrame(rows)


def sketches(quick: bool) -> Found:
    """App. F.2 with the control that the paper names: dense sketches of as many rows."""
    d = 128 if quick else 2048
    heads = [2**n for n in range(5 if quick else 8)]
    frame = distances(d, heads, 3)
    means = frame.groupby(["kind", "heads"])[["distance", "j"]].mean()
    sparse, dense = means.loc["sparse"], means.loc["dense"]
    share = (sparse["j"] / (RANK * sparse.index)).tolist()
    apart = float((sparse["distance"] / dense["distance"]).map(lambda x: max(x, 1 / x)).max())
    verdicts = [
        Verdict(
            "Figure 10", "the effective rank j grows with h",
            f"j {listed(sparse['j'].tolist(), 3)} for h = {listed(heads, 3)}", "rising",
            sparse["j"].is_monotonic_increasing,
        ),
        Verdict(
            "Figure 10, reading", "j is proportional to h: the rules are evenly spaced",
            f"j/(rh) {listed(share)}", "fails: it grows faster, towards rh",
            max(share) <= 1.2 * min(share), False,
        ),
        Verdict(
            "Figure 10", "j stays below the number of rows rh", f"largest j/(rh) {max(share):.2f}",
            "at most 1", max(share) <= 1,
        ),
        Verdict(
            "Figure 10", "sparse sketches are as good as dense ones of as many rows",
            f"mean distances apart by a factor of at most {apart:.2f}", "at most 1.5", apart <= 1.5,
        ),
    ]  # fmt: skip
    return Found(verdicts, frame, _sketch_figure(frame, d))


def _sketch_figure(frame: pd.DataFrame, d: int) -> Figure:
    figure = new_figure(10.4, 3.4)
    left, middle, right = figure.subplots(1, 3)
    sigma = exponential_spectrum(d, 0.05)
    means = frame[frame["kind"] == "sparse"].groupby("heads")[["distance", "j"]].mean()
    shown = min(d, int(1.25 * means["j"].max()) + 5)
    style_axes(left, xlabel="j", ylabel=r"$\sigma_j / \sigma_1$", title="rules at j of each h")
    left.semilogy(range(1, shown + 1), sigma[:shown], color="black", lw=1.2)
    colors = _colors(len(means))
    for color, (h, row) in zip(colors, means.iterrows(), strict=True):
        left.axvline(row["j"], color=color, lw=1.2, label=f"h = {h}")
    left.legend(
        facecolor="white",
        edgecolor="white",
        framealpha=1,
        fontsize=TICK_SIZE - 1,
        loc="upper right",
    )
    style_axes(middle, xlabel="heads h", ylabel="distance of row spaces", title="r = 4 rows a head")
    style_axes(right, xlabel="heads h", ylabel="j / (rh)", title="effective rank of a row")
    for color, (kind, part) in zip(PALETTE, frame.groupby("kind", sort=False), strict=False):
        mean = part.groupby("heads")[["distance", "j"]].mean()
        label = f"{kind} sketch"
        middle.loglog(mean.index, mean["distance"], "o-", ms=4, lw=1.2, color=color, label=label)
        right.semilogx(
            mean.index,
            mean["j"] / (RANK * mean.index),
            "o-",
            ms=4,
            lw=1.2,
            color=color,
            label=label,
        )
    for axes in (middle, right):
        plain_ticks(axes.xaxis, sorted(frame["heads"].unique()))
    right.set_ylim(0, 1)
    middle.legend(frameon=False, fontsize=TICK_SIZE)
    right.legend(frameon=False, fontsize=TICK_SIZE)
    return figure


def _colors(number: int) -> list[Any]:
    return [colormaps[SEQUENTIAL](0.9 * n / max(1, number - 1)) for n in range(number)]
