"""Rank of a fixed token table against the rank of W_Q (Yu et al., 2025, Fig. 4c and App. H).

    python eval/lab/chebyshev.py --output results/lab-chebyshev [--quick] [--runs results/lab]

Trains the micro T5 of recipes/lab/chebyshev.yaml with tables of several ranks and seeds, 16 models,
and takes the mean ε-rank of W_Q over layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from micro import (
    EPSILONS,
    mean_rank,
    options_of,
    query_weights,
    spearman,
    trained,
    variant,
)
from verdicts import Found, Verdict, listed, measure, one_line_errors, plain_ticks

from tscompress.plotting import (
    MARKERS,
    PALETTE,
    legend_beside,
    new_figure,
    style_axes,
)

RANKS, SEEDS = (1, 2, 4, 8, 16, 32), (0, 1, 2)
#: Spearman's coefficient from which on W_Q counts as following the table.
ENOUGH = 0.8


def models(seeds: Sequence[int], quick: bool) -> list[tuple[int, int]]:
    """Rank of the table and seed; rank 1, which teaches little, once."""
    if quick:
        return [(2, 0), (8, 0), (32, 0)]
    return [(rank, seed) for seed in seeds for rank in RANKS if rank > 1 or seed == 0]


def measured(runs: Path, rank: int, seed: int, *, quick: bool) -> list[dict[str, Any]]:
    """Mean ε-ranks of W_Q, of all attention and of the encoder's, for every ε."""
    recipe = variant("chebyshev", quick=quick, embedding_rank=rank, seed=seed)
    loaded = trained(recipe, runs / f"chebyshev-{rank}-{seed}")
    return [
        {"table rank": rank, "seed": seed, "attention": kind or "all", "ε": epsilon,
         "mean rank": mean_rank(query_weights(loaded, kind), index)}
        for kind in (None, "encoder")
        for index, epsilon in enumerate(EPSILONS)
    ]  # fmt: skip


def figure_4c(runs: Path, seeds: Sequence[int], quick: bool) -> Found:
    """Mean rank of W_Q against the rank of the table."""
    rows = [
        row
        for rank, seed in models(seeds, quick)
        for row in measured(runs, rank, seed, quick=quick)
    ]
    frame = pd.DataFrame(rows)
    verdicts = [
        rises(frame, "all", 0.1),
        rises(frame, "all", 0.03),
        rises(frame, "encoder", 0.1),
        rises(frame, "encoder", 0.03),
    ]
    return Found(verdicts, frame, _figure(frame))


def rises(frame: pd.DataFrame, attention: str, epsilon: float) -> Verdict:
    of = frame[(frame["attention"] == attention) & (frame["ε"] == epsilon)]
    part = of[of["table rank"] > 1]
    means = part.groupby("table rank")["mean rank"].mean()
    found = spearman(means.index, means)
    seeds = [spearman(one["table rank"], one["mean rank"]) for _, one in part.groupby("seed")]
    where = "every W_Q" if attention == "all" else "the encoder's W_Q"
    return Verdict(
        f"Fig. 4c, ε = {epsilon:g}",
        f"the mean ε-rank of {where} rises with the rank of the table",
        f"Spearman {found:.2f} (seeds {listed(seeds)}); ranks {listed(means.tolist())} at tables "
        f"of rank {listed(list(means.index))}",
        f"at least {ENOUGH}",
        found >= ENOUGH,
    )


def _figure(frame: pd.DataFrame) -> Figure:
    figure = new_figure(8.6, 3.2)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (kind, title) in zip(
        panels, (("all", "All attention"), ("encoder", "Encoder")), strict=True
    ):
        style_axes(axes, xlabel="rank of the token table", title=title)
        part = frame[frame["attention"] == kind]
        for (epsilon, group), color, marker in zip(
            part.groupby("ε", sort=False), PALETTE, MARKERS, strict=False
        ):
            means = group.groupby("table rank")["mean rank"].mean()
            axes.plot(means.index, means, f"{marker}-", color=color, ms=5, label=f"{epsilon:g}")
            axes.plot(group["table rank"], group["mean rank"], marker, color=color, ms=3, alpha=0.4)
        axes.set_xscale("log", base=2)
        plain_ticks(axes.xaxis, RANKS)
    panels[0].set_ylabel("mean ε-rank of W_Q", fontsize=9)
    legend_beside(figure, panels[0], "ε")
    return figure


def main() -> None:
    given = options_of(__doc__, SEEDS)
    sections = {"figure-4c": partial(figure_4c, given.runs, given.seeds)}
    with one_line_errors():
        measure(sections, given.output, quick=given.quick)


if __name__ == "__main__":
    main()
