"""Ranks and angles against the number of heads (Yu et al., 2025, Fig. 14 and 16).

    python eval/lab/heads.py --output results/lab-heads [--quick] [--runs results/lab]

Trains the micro T5 of recipes/lab/heads.yaml, 64 wide, with 1 to 16 heads and three seeds, 15
models. Takes the ε-ranks of W_Q and of its heads, and the angles between rows of W_Q of the first
encoder layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from micro import (
    EPSILONS,
    mean_head_rank,
    mean_rank,
    options_of,
    query_weights,
    trained,
    variant,
)
from verdicts import Found, Verdict, listed, measure, one_line_errors, plain_ticks

from tscompress.checkpoints.load import LoadedModel
from tscompress.linalg import angle_matrix
from tscompress.plotting import (
    MARKERS,
    PALETTE,
    SEQUENTIAL,
    legend_beside,
    new_figure,
    style_axes,
)
from tscompress.profiling.heads import head_angles, sharing_index
from tscompress.profiling.measure import weight_matrix

HEADS, SEEDS, WIDTH = (1, 2, 4, 8, 16), (0, 1, 2), 64
#: Relative deviation of a head's rank from its mean over numbers of heads that counts as constant.
ABOUT = 0.4


def models(seeds: Sequence[int], quick: bool) -> list[tuple[int, int]]:
    """Number of heads, and seed."""
    if quick:
        return [(2, 0), (16, 0)]
    return [(heads, seed) for seed in seeds for heads in HEADS]


def model(runs: Path, heads: int, seed: int, quick: bool) -> LoadedModel:
    """The model with so many heads, trained if it is not there."""
    shape = {"num_heads": heads, "d_kv": WIDTH // heads}
    recipe = variant("heads", quick=quick, seed=seed, architecture=shape)
    return trained(recipe, runs / f"heads-{heads}-{seed}")


# --------------------------------------------------------------------------------------------------
# Figure 16, left and middle
# --------------------------------------------------------------------------------------------------


def figure_16(runs: Path, seeds: Sequence[int], quick: bool) -> Found:
    """Mean ε-ranks of W_Q and of its heads against the number of heads."""
    rows: list[dict[str, Any]] = []
    for heads, seed in models(seeds, quick):
        weights = query_weights(model(runs, heads, seed, quick))
        for index, epsilon in enumerate(EPSILONS):
            index_of_sharing = fmean(
                sharing_index(w.spectrum.ranks[index], [h.ranks[index] for h in w.heads])
                for w in weights
            )
            rows.append(
                {"heads": heads, "seed": seed, "ε": epsilon, "W_Q": mean_rank(weights, index),
                 "head": mean_head_rank(weights, index), "sharing index": index_of_sharing}
            )  # fmt: skip
    frame = pd.DataFrame(rows)
    verdicts = [v for epsilon in EPSILONS[:3] for v in _rank_verdicts(frame, epsilon)]
    return Found(verdicts, frame, _rank_figure(frame))


def _rank_verdicts(frame: pd.DataFrame, epsilon: float) -> list[Verdict]:
    part = frame[frame["ε"] == epsilon]
    few, many = (part[part["heads"] == heads].set_index("seed")["W_Q"] for heads in (2, 16))
    means = part.groupby("heads")[["W_Q", "head", "sharing index"]].mean()
    several = means[means.index > 1]
    deviation = float((several["head"] / several["head"].mean() - 1).abs().max())
    names = listed(list(means.index))
    return [
        Verdict(
            f"Fig. 16, left, ε = {epsilon:g}",
            "the mean ε-rank of W_Q is higher with 16 heads than with 2",
            f"{listed(many.tolist())} against {listed(few.tolist())} by seed; means "
            f"{listed(means['W_Q'].tolist())} with {names} heads",
            f"in {len(few)} of {len(few)} seeds", bool((many > few).all()),
        ),
        Verdict(
            f"Fig. 16, middle, ε = {epsilon:g}", "that of a head is about constant",
            f"means {listed(means['head'].tolist())}; from 2 heads on within "
            f"{100 * deviation:.0f}% of their mean",
            f"within {100 * ABOUT:.0f}%", deviation <= ABOUT,
        ),
    ]  # fmt: skip


def _rank_figure(frame: pd.DataFrame) -> Figure:
    figure = new_figure(10.4, 3.2)
    panels = figure.subplots(1, 3)
    titles = {"W_Q": "Mean ε-rank of W_Q", "head": "Mean ε-rank of a head",
              "sharing index": "Sharing index"}  # fmt: skip
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        style_axes(axes, xlabel="heads", title=title)
        for (epsilon, group), color, marker in zip(
            frame.groupby("ε", sort=False), PALETTE, MARKERS, strict=False
        ):
            means = group.groupby("heads")[column].mean()
            axes.plot(means.index, means, f"{marker}-", color=color, ms=5, label=f"{epsilon:g}")
            axes.plot(group["heads"], group[column], marker, color=color, ms=3, alpha=0.4)
        axes.set_xscale("log", base=2)
        plain_ticks(axes.xaxis, HEADS)
        axes.set_ylim(bottom=0)
    legend_beside(figure, panels[0], "ε")
    return figure


# --------------------------------------------------------------------------------------------------
# Figure 14, and 16 right
# --------------------------------------------------------------------------------------------------


def figure_14(runs: Path, seeds: Sequence[int], quick: bool) -> Found:
    """Angles between the rows of W_Q of the first encoder layer, within and between heads."""
    rows, pictures = [], {}
    for heads, seed in models(seeds, quick):
        if heads == 1:
            continue
        loaded = model(runs, heads, seed, quick)
        block = loaded.architecture.attention[0]
        W = weight_matrix(loaded.model.get_submodule(block.projections["q"]))
        found = head_angles(W, heads, block.projections["q"])
        assert found is not None
        rows.append(
            {"heads": heads, "seed": seed, "within": found.within, "between": found.between}
        )
        if seed == min(seeds):
            pictures[heads] = angle_matrix(W).numpy()
    frame = pd.DataFrame(rows)
    means = frame.groupby("heads")[["within", "between"]].mean()
    verdict = Verdict(
        "Fig. 14", "rows of one head are at smaller angles than rows of two",
        "; ".join(
            f"{heads} heads: {row['within']:.2f} within, {row['between']:.2f} between"
            for heads, row in means.iterrows()
        ),
        f"smaller within, for every number of heads and {frame['seed'].nunique()} seeds",
        bool((frame["within"] < frame["between"]).all()),
    )  # fmt: skip
    return Found([verdict], frame, _angle_figure(pictures))


def _angle_figure(pictures: dict[int, np.ndarray[Any, Any]]) -> Figure:
    figure = new_figure(2.5 * len(pictures) + 1.0, 2.9)
    panels = figure.subplots(1, len(pictures), squeeze=False)[0]
    for axes, (heads, angles) in zip(panels, pictures.items(), strict=True):
        style_axes(axes, xlabel="row of W_Q", title=f"{heads} heads")
        image = axes.imshow(angles, cmap=SEQUENTIAL, vmin=0, vmax=np.pi / 2)
        axes.grid(visible=False)
        for edge in range(WIDTH // heads, WIDTH, WIDTH // heads):
            axes.axhline(edge - 0.5, color="white", lw=0.3)
            axes.axvline(edge - 0.5, color="white", lw=0.3)
    bar = figure.colorbar(image, ax=list(panels), ticks=[0, np.pi / 4, np.pi / 2])
    bar.ax.set_yticklabels(["0", "π/4", "π/2"])
    bar.set_label("angle", fontsize=9)
    return figure


def main() -> None:
    given = options_of(__doc__, SEEDS)
    sections = {
        "figure-16": partial(figure_16, given.runs, given.seeds),
        "figure-14": partial(figure_14, given.runs, given.seeds),
    }
    with one_line_errors():
        measure(sections, given.output, quick=given.quick)


if __name__ == "__main__":
    main()
