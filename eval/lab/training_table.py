"""What a token table learns of the number line while it trains: ranks, and angles of neighbours.

No figure of the paper, which says (sec. 2, App. C) that a table has to learn what a continuous map
of values has from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from micro import EPSILONS, moments, trained, variant
from torch import Tensor
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.linalg import epsilon_rank, singular_values
from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    SEQUENTIAL,
    TICK_SIZE,
    legend_beside,
    new_figure,
    style_axes,
)
from tscompress.training.pretrain_batches import make_batch, stage_corpora
from tscompress.training.pretrain_recipe import PretrainRecipe

FACTORS = (0.05, 1.0)
#: Bins between two rows whose cosine is taken.
DISTANCES = (1, 4, 16, 64)
#: Bins from that of zero, whose rows are compared across zero and on one side of it.
ASIDE = range(12, 21)


class Bins(NamedTuple):
    """Rows of a table that stand for values: the first is row ``start``.

    Attributes
    ----------
    counts
        How often the training read or forecast each, ``[bins]``, float64.
    """

    start: int
    counts: Tensor


@torch.no_grad()
def bins_of(recipe: PretrainRecipe, loaded: LoadedModel) -> Bins:
    """Tokens of the training, context and target, counted over all of its batches."""
    tokenizer: Any = loaded.forecaster.tokenizer
    corpora, vocabulary = stage_corpora(recipe), recipe.architecture.vocab_size
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for step in range(recipe.total_steps):
        batch = make_batch(recipe, corpora, step)
        ids, mask, scale = tokenizer.context_input_transform(batch.context)
        labels, observed, _ = tokenizer._input_transform(batch.target, scale=scale)
        counts += torch.bincount(torch.cat([ids[mask], labels[observed]]), minlength=vocabulary)
    start = int(tokenizer.config.n_special_tokens)
    return Bins(start, counts[start:])


def rows_of(model: Path, bins: Bins) -> Tensor:
    """Rows of the table that stand for values, ``[bins, d]`` in float64."""
    table: Any = load(model).model.get_input_embeddings()
    return table.weight.detach().double()[bins.start :]


def cosine(rows: Tensor, weights: Tensor, distance: int) -> float:
    """Mean cosine of rows ``distance`` apart, each pair by the smaller of its weights.

    Rows are taken without their weighted mean, which a table learns first and which says nothing
    of order.
    """
    mean = (weights[:, None] * rows).sum(0) / weights.sum()
    unit = torch.nn.functional.normalize(rows - mean, dim=1)
    pairs = torch.minimum(weights[:-distance], weights[distance:])
    return float(((unit[:-distance] * unit[distance:]).sum(1) * pairs).sum() / pairs.sum())


def across_zero(rows: Tensor, weights: Tensor) -> tuple[float, float]:
    """Mean cosine of rows as far below zero as above it, and of as distant ones on one side."""
    mean = (weights[:, None] * rows).sum(0) / weights.sum()
    unit = torch.nn.functional.normalize(rows - mean, dim=1)
    zero = len(rows) // 2
    across = [unit[zero - j] @ unit[zero + j] for j in ASIDE]
    beside = [unit[zero + side * j] @ unit[zero + 3 * side * j] for j in ASIDE for side in (-1, 1)]
    return float(torch.stack(across).mean()), float(torch.stack(beside).mean())


def measured(rows: Tensor, bins: Bins) -> dict[str, float]:
    """ε-ranks of the table as training reads it and as it lies, and cosines of its rows."""
    read = singular_values(bins.counts.sqrt()[:, None] * rows)
    whole = singular_values(rows)
    never = (bins.counts == 0).double()
    unread = rows[bins.counts == 0]
    found: dict[str, float] = {}
    for epsilon in EPSILONS:
        found[f"rank {epsilon:g}, by counts"] = epsilon_rank(read, epsilon)
        found[f"rank {epsilon:g}, all bins"] = epsilon_rank(whole, epsilon)
    for distance in DISTANCES:
        found[f"cosine at {distance}"] = cosine(rows, bins.counts, distance)
        found[f"cosine at {distance}, never read"] = cosine(rows, never, distance)
    found["cosine across zero"], found["cosine on one side"] = across_zero(rows, bins.counts)
    found["norm of the mean, never read"] = float(unread.mean(0).norm())
    found["spread, never read"] = float((unread - unread.mean(0)).norm(dim=1).mean())
    return found


def token_table(runs: Path, quick: bool) -> Found:
    """Ranks and cosines by step, from small and from large initial rows."""
    numbers, tables = [], {}
    for factor in FACTORS:
        recipe = variant("token-table", quick=quick, initializer_factor=factor)
        directory = runs / f"token-table-{factor:g}"
        bins = bins_of(recipe, trained(recipe, directory))
        for step, path in moments(directory, recipe.total_steps).items():
            rows = rows_of(path, bins)
            numbers.append({"factor": factor, "step": step, **measured(rows, bins)})
        tables[factor] = rows
    frame = pd.DataFrame(numbers)
    return Found(_verdicts(frame, bins), frame, _figure(frame, tables, bins))


def _verdicts(frame: pd.DataFrame, bins: Bins) -> list[Verdict]:
    small, large = (frame[frame["factor"] == factor] for factor in FACTORS)
    ends = {factor: (part.iloc[0], part.iloc[-1]) for factor, part in frame.groupby("factor")}
    first, last = ends[FACTORS[0]]
    begun, ended = ends[FACTORS[1]]
    by_counts, whole = "rank 0.1, by counts", "rank 0.1, all bins"
    cosines = [float(last[f"cosine at {distance}"]) for distance in DISTANCES]
    never = float(last["cosine at 1, never read"])
    read = int((bins.counts > 0).sum())
    return [
        Verdict(
            "Section 2, factor 0.05", "a random table learns that neighbours are alike",
            f"mean cosine of neighbours {listed(small['cosine at 1'].tolist())} after "
            f"{listed(small['step'].tolist(), 4)} steps",
            "below 0.1 at first, above 0.5 at last",
            first["cosine at 1"] < 0.1 and last["cosine at 1"] > 0.5,
        ),
        Verdict(
            "Section 2, factor 0.05", "it learns their order: rows further apart are less alike",
            f"cosines {listed(cosines)} at {listed(DISTANCES)} bins", "falling",
            sorted(cosines, reverse=True) == cosines,
        ),
        Verdict(
            "Section 2, factor 0.05", "it learns sizes before signs: rows across zero are alike",
            f"mean cosine {last['cosine across zero']:.2f} of bins {ASIDE[0]} to {ASIDE[-1]} above "
            f"and below zero, {last['cosine on one side']:.2f} as far apart on one side",
            "higher across zero, set after the run",
            last["cosine across zero"] > last["cosine on one side"],
        ),
        Verdict(
            "Section 2, factor 0.05", "its rank falls as it learns, rows weighted by counts",
            f"at ε = 0.1 {listed(small[by_counts].tolist(), 3)}", "below half of the first",
            last[by_counts] < first[by_counts] / 2,
        ),
        Verdict(
            "Section 2, factor 0.05", "rows that training never read stay random",
            f"mean cosine of neighbours {never:.2f} among the {len(bins.counts) - read} of "
            f"{len(bins.counts)} bins", "below 0.1", never < 0.1,
        ),
        Verdict(
            "Section 2, factor 0.05", "so the plain table, of all bins, does not show it",
            f"at ε = 0.1 {first[whole]:.0f} at first, {last[whole]:.0f} at last: the mean of rows "
            f"never read has the norm {last['norm of the mean, never read']:.2g}, their spread "
            f"about it is {last['spread, never read']:.2g}, as at first",
            "at least 0.8 of the first", last[whole] >= 0.8 * first[whole],
        ),
        Verdict(
            "Section 2, factor 1", "large initial rows hide it: the rank by counts stays",
            f"at ε = 0.1 {listed(large[by_counts].tolist(), 3)}; cosine of neighbours "
            f"{ended['cosine at 1']:.2f}", "at least 0.8 of the first",
            ended[by_counts] >= 0.8 * begun[by_counts],
        ),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Figure
# --------------------------------------------------------------------------------------------------


def _figure(frame: pd.DataFrame, tables: Mapping[float, Tensor], bins: Bins) -> Figure:
    figure = new_figure(12.4, 3.4, "A token table that starts at random, while it trains")
    panels = figure.subplots(1, 4)
    _rank_lines(panels[0], frame)
    _cosine_lines(panels[1], frame)
    for axes, (factor, rows) in zip(panels[2:], tables.items(), strict=True):
        style_axes(axes, xlabel="1st direction", title=f"at the end, factor {factor:g}")
        points = _projected(rows, bins)
        never = bins.counts == 0
        axes.scatter(*points[never].T, s=4, color="#D0D0D0", linewidths=0, label="bin never read")
        used = points[~never]
        image = axes.scatter(*used.T, s=6, c=torch.arange(len(used)), cmap=SEQUENTIAL, linewidths=0)
    panels[2].set_ylabel("2nd direction", fontsize=9)
    bar = figure.colorbar(image, ax=panels[3], aspect=25, pad=0.02)
    bar.set_ticks([0, len(used) - 1], labels=["lowest", "highest"])
    bar.ax.tick_params(labelsize=TICK_SIZE)
    bar.set_label("value of the bin", fontsize=TICK_SIZE)
    legend_beside(figure, panels[:3])
    return figure


def _rank_lines(axes: Any, frame: pd.DataFrame) -> None:
    style_axes(axes, xlabel="step", title="ε-rank at 0.1")
    for (factor, part), color in zip(frame.groupby("factor"), PALETTE, strict=False):
        label = f"factor {factor:g}"
        axes.plot(part["step"], part["rank 0.1, by counts"], "o-", ms=4, color=color,
                  label=f"{label}, by counts")  # fmt: skip
        axes.plot(part["step"], part["rank 0.1, all bins"], "o:", ms=3, color=color,
                  label=f"{label}, all bins")  # fmt: skip
    _steps(axes, frame)
    axes.set_ylim(bottom=0)


def _cosine_lines(axes: Any, frame: pd.DataFrame) -> None:
    style_axes(axes, xlabel="step", title=f"cosine of rows, factor {FACTORS[0]:g}")
    part = frame[frame["factor"] == FACTORS[0]]
    for distance, color, marker in zip(DISTANCES, PALETTE[2:], MARKERS[1:], strict=False):
        label = f"{distance} bin{'s' if distance > 1 else ''} apart"
        values = part[f"cosine at {distance}"]
        axes.plot(part["step"], values, f"{marker}-", ms=4, color=color, label=label)
    values = part["cosine at 1, never read"]
    axes.plot(part["step"], values, "--", color=GREY, label="1 bin apart, never read")
    _steps(axes, frame)


def _steps(axes: Any, frame: pd.DataFrame) -> None:
    axes.set_xscale("log")
    plain_ticks(axes.xaxis, sorted(set(frame["step"])))


def _projected(rows: Tensor, bins: Bins) -> Tensor:
    """On the two leading directions of the rows by their counts, their mean left out."""
    mean = (bins.counts[:, None] * rows).sum(0) / bins.counts.sum()
    centred = rows - mean
    _, _, right = torch.linalg.svd(bins.counts.sqrt()[:, None] * centred, full_matrices=False)
    return centred @ right[:2].T
