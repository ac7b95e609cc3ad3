"""Figure 4a of the paper on models of our own: rank of W_Q against the width, all else alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure
from micro import EPSILONS, mean_rank, query_weights, trained, variant
from modality_weights import GOLDEN, random_share
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.checkpoints.load import LoadedModel
from tscompress.plotting import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes

WIDTHS, QUICK_WIDTHS, SEEDS = (64, 128, 256, 384), (64, 128), (0, 1)
HEAD_SIZE = 16
KINDS = {"all": None, "encoder": "encoder", "decoder": "decoder", "cross": "cross"}
#: Growth of the rank from the least width to the largest that counts as flat: a third of theirs.
FLAT = 2.0


def model(runs: Path, width: int, seed: int, quick: bool) -> LoadedModel:
    """The model of this width, trained if it is not there."""
    shape = {"d_model": width, "d_ff": 4 * width, "num_heads": width // HEAD_SIZE}
    recipe = variant("widths", quick=quick, seed=seed, architecture=shape)
    return trained(recipe, runs / f"widths-{width}-{seed}")


def figure_4a(runs: Path, seeds: Sequence[int], quick: bool) -> Found:
    """Mean ε-rank of W_Q against the width."""
    rows = []
    for width in QUICK_WIDTHS if quick else WIDTHS:
        for seed in seeds[:1] if quick else seeds:
            loaded = model(runs, width, seed, quick)
            rows += [
                {"d": width, "seed": seed, "attention": name, "ε": epsilon,
                 "mean rank": mean_rank(query_weights(loaded, kind), index),
                 "random": width * random_share(width, epsilon)}
                for name, kind in KINDS.items()
                for index, epsilon in enumerate(EPSILONS)
            ]  # fmt: skip
    numbers = pd.DataFrame(rows)
    return Found(_verdicts(numbers), numbers, _figure(numbers))


def growth(numbers: pd.DataFrame, epsilon: float, attention: str = "all") -> float:
    """Mean rank at the largest width over that at the least, in the mean over seeds."""
    part = numbers[(numbers["ε"] == epsilon) & (numbers["attention"] == attention)]
    means = part.groupby("d")["mean rank"].mean()
    return float(means.iloc[-1] / means.iloc[0])


def _verdicts(numbers: pd.DataFrame) -> list[Verdict]:
    every = numbers[numbers["attention"] == "all"]
    widths = sorted(set(every["d"]))
    found = []
    for epsilon in (0.1, 0.03):
        means = every[every["ε"] == epsilon].groupby("d")["mean rank"].mean()
        times = growth(numbers, epsilon)
        found.append(
            Verdict(
                f"Fig. 4a, own models, ε = {epsilon:g}",
                "rank of W_Q of a time-series model hardly grows with d",
                f"{listed(means.tolist(), 3)} at d = {listed(widths, 3)}: × {times:.2g}",
                f"below × {FLAT:g}, while d grows × {widths[-1] / widths[0]:g}", times < FLAT,
            )
        )  # fmt: skip
    text = fmean(GOLDEN["minilm", "encoder"])
    widest = every[(every["d"] == widths[-1]) & (every["ε"] == 0.1)]["mean rank"].mean()
    found.append(
        Verdict(
            "Fig. 4, own models", "W_Q of series has a lower rank than W_Q of text, as wide",
            f"{widest:.3g} at d = {widths[-1]}, MiniLM {text:.0f} at 384", "less than half",
            widest < text / 2,
        )
    )  # fmt: skip
    return found


def _figure(numbers: pd.DataFrame) -> Figure:
    figure = new_figure(11.4, 3.3, "Mean ε-rank of $W_Q$ against the width, models of our own")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    widths = sorted(set(numbers["d"]))
    for axes, name in zip(panels, KINDS, strict=True):
        style_axes(axes, xlabel="width $d$", title="all attention" if name == "all" else name)
        part = numbers[numbers["attention"] == name]
        for epsilon, color, marker in zip(EPSILONS, PALETTE, MARKERS, strict=False):
            one = part[part["ε"] == epsilon]
            means = one.groupby("d")["mean rank"].mean()
            axes.plot(means.index, means, f"{marker}-", color=color, ms=5, label=f"ε = {epsilon:g}")
            axes.plot(one["d"], one["mean rank"], marker, color=color, ms=3, alpha=0.4)
        random = part[part["ε"] == 0.1].groupby("d")["random"].mean()
        axes.plot(random.index, random, ":", color=GREY, label="random matrix,\nε = 0.1")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        plain_ticks(axes.xaxis, widths)
        plain_ticks(axes.yaxis, (1, 2, 4, 8, 16, 32, 64, 128, 256))
    panels[0].set_ylabel("mean ε-rank", fontsize=9)
    legend_beside(figure, panels[0])
    return figure
