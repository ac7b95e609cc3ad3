"""Spectra of W_Q while a model trains (Yu et al., 2025, App. G.2, Fig. 13).

    python eval/lab/watch.py --output results/lab-watch [--quick] [--runs results/lab]

Trains the micro T5 of recipes/lab/watch.yaml with initial weights of factor 0.05, as Chronos has
them, and 1, as T5 has. Ranks are those of the rank watch, histograms those of its snapshots.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from micro import moments, options_of, trained, variant
from verdicts import Found, Verdict, measure, one_line_errors, plain_ticks

from tscompress.checkpoints.load import load
from tscompress.linalg import singular_values
from tscompress.plotting import PALETTE, new_figure, style_axes
from tscompress.profiling.measure import weight_matrix
from tscompress.training.rank_watch import EPSILONS, read_ranks

FACTORS = (0.05, 1.0)
#: Growth of sigma_1 that counts as orders of magnitude, and of the median that counts as staying.
GROWN, STAYED = 10.0, 10.0


def run(runs: Path, factor: float, quick: bool) -> Path:
    """The directory of the training with this initial scale."""
    directory = runs / f"watch-{factor:g}"
    trained(variant("watch", quick=quick, initializer_factor=factor), directory)
    return directory


def watched(directory: Path, factor: float) -> pd.DataFrame:
    """Rows of W_Q: sigma_1, stable rank and ε-ranks by step."""
    rows = [row for row in read_ranks(directory / "ranks.jsonl") if row["role"] == "q"]
    return pd.DataFrame(
        [
            {"factor": factor, "step": row["step"], "block": f"{row['kind']} {row['depth']}",
             "σ_1": row["sigma_1"], "stable rank": row["stable_rank"],
             **{f"rank {e:g}": rank for e, rank in zip(EPSILONS, row["ranks"], strict=True)}}
            for row in rows
        ]
    )  # fmt: skip


def spectra(directory: Path) -> dict[int, np.ndarray[Any, Any]]:
    """Step to singular values ``[layers, d]`` of the encoder's W_Q: snapshots and the end."""
    last = read_ranks(directory / "ranks.jsonl")[-1]["step"]
    found = {}
    for step, path in moments(directory, last).items():
        loaded = load(path)
        names = [b.projections["q"] for b in loaded.architecture.attention if b.kind == "encoder"]
        matrices = [weight_matrix(loaded.model.get_submodule(name)) for name in names]
        found[step] = np.stack([singular_values(W).numpy() for W in matrices])
    return found


def figure_13(runs: Path, quick: bool) -> Found:
    """Growth of sigma_1, fall of the ranks, and what a large initial scale hides."""
    directories = {factor: run(runs, factor, quick) for factor in FACTORS}
    frames = {factor: watched(path, factor) for factor, path in directories.items()}
    small, large = (frames[factor] for factor in FACTORS)
    values = {factor: spectra(path) for factor, path in directories.items()}
    first, *_, last = values[FACTORS[0]].values()
    verdicts = [
        _growth(small),
        Verdict(
            "Fig. 13, factor 0.05", "the bulk of the singular values stays, beside σ_1",
            f"the encoder's σ_1 grows {np.median(last[:, 0] / first[:, 0]):.3g} times, the median "
            f"singular value {np.median(np.median(last, 1) / np.median(first, 1)):.3g} times",
            f"the median less than {STAYED:g} times",
            bool(np.median(np.median(last, 1) / np.median(first, 1)) < STAYED),
        ),
        _collapse(small),
        _unchanged(large),
    ]  # fmt: skip
    frame = pd.concat(frames.values(), ignore_index=True)
    return Found(verdicts, frame, _figure(frames, values[FACTORS[0]]))


def _growth(frame: pd.DataFrame) -> Verdict:
    by_block = frame.groupby("block", sort=False)["σ_1"]
    grown = by_block.last() / by_block.first()
    return Verdict(
        "Fig. 13, factor 0.05", "σ_1 of every W_Q grows by orders of magnitude",
        f"from {grown.min():.3g} to {grown.max():.3g} times over layers",
        f"at least {GROWN:g} times", bool((grown >= GROWN).all()),
    )  # fmt: skip


def _collapse(frame: pd.DataFrame) -> Verdict:
    means = frame.groupby("step")["rank 0.1"].mean()
    lowest = int(means.idxmin())
    return Verdict(
        "Fig. 13, factor 0.05",
        "the mean ε-rank at 0.1 collapses, and then rises slowly",
        f"{means.iloc[0]:.3g} at first, {means.min():.3g} at step {lowest}, {means.iloc[-1]:.3g} "
        f"at step {means.index[-1]}",
        "lowest below a quarter of the first, and the last above the lowest",
        bool(means.min() < means.iloc[0] / 4 and means.iloc[-1] > means.min()),
    )


def _unchanged(frame: pd.DataFrame) -> Verdict:
    means = frame.groupby("step")["rank 0.1"].mean()
    by_block = frame.groupby("block", sort=False)["σ_1"]
    grown = by_block.last() / by_block.first()
    return Verdict(
        "Fig. 13, factor 1", "large initial weights hide it: the rank stays as it began",
        f"{means.iloc[0]:.3g} at first, {means.min():.3g} at the lowest, {means.iloc[-1]:.3g} at "
        f"the end; σ_1 grows {grown.min():.3g} to {grown.max():.3g} times",
        "never below 0.8 of the first", bool(means.min() > 0.8 * means.iloc[0]),
    )  # fmt: skip


def _figure(
    frames: dict[float, pd.DataFrame], spectra_of: dict[int, np.ndarray[Any, Any]]
) -> Figure:
    figure = new_figure(10.4, 5.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    _lines(top, frames)
    _histograms(bottom, spectra_of)
    return figure


def _lines(part: Any, frames: dict[float, pd.DataFrame]) -> None:
    panels = part.subplots(1, 3)
    columns = {
        "σ_1": "σ₁ of W_Q, and mean over layers",
        "stable rank": "Stable rank",
        "rank 0.1": "ε-rank at 0.1",
    }
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        style_axes(axes, xlabel="step", title=title)
        for (factor, frame), color in zip(frames.items(), PALETTE, strict=False):
            for _, block in frame.groupby("block", sort=False):
                axes.plot(block["step"], block[column], color=color, lw=0.7, alpha=0.35)
            means = frame.groupby("step")[column].mean()
            axes.plot(means.index, means, color=color, lw=1.8, label=f"factor {factor:g}")
        axes.set_xscale("symlog", linthresh=1)
        plain_ticks(axes.xaxis, (0, 1, 10, 100, 1000))
        axes.set_xlim(left=0)
        if column == "σ_1":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    panels[1].legend(frameon=False, fontsize=8)


def _histograms(part: Any, spectra_of: dict[int, np.ndarray[Any, Any]]) -> None:
    panels = part.subplots(1, len(spectra_of), sharex=True, sharey=True, squeeze=False)[0]
    everything = np.concatenate([values.ravel() for values in spectra_of.values()])
    low = max(float(np.quantile(everything, 0.01)), float(everything.max()) * 1e-5)
    edges = np.geomspace(low, float(everything.max()) * 1.01, 25)
    for axes, (step, values) in zip(panels, spectra_of.items(), strict=True):
        style_axes(axes, xlabel="singular value", title=f"Step {step}")
        axes.hist(values.ravel().clip(min=low), bins=edges, color=PALETTE[0])
        axes.set_xscale("log")
    panels[0].set_ylabel("of the encoder's W_Q", fontsize=9)


def main() -> None:
    given = options_of(__doc__)
    sections = {"figure-13": partial(figure_13, given.runs)}
    with one_line_errors():
        measure(sections, given.output, quick=given.quick)


if __name__ == "__main__":
    main()
