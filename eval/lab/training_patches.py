"""Figure 3a of the paper: embedded patches of Chronos-Bolts trained with patches of six sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from micro import EPSILONS, moments, trained, variant
from modality_inputs import signals
from theory_embeddings import embedded_patches, share_of_bound
from torch import Tensor
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.checkpoints.load import load
from tscompress.linalg import epsilon_rank, singular_values
from tscompress.plotting import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes
from tscompress.training.pretrain_recipe import PretrainRecipe

SIZES, QUICK_SIZES = (1, 2, 4, 8, 16, 32), (2, 16)
#: Patches of a context, whatever their size.
PATCHES = 64
#: As wide as these, with patches of so many values, and trained for 8000 steps of larger batches.
LONGER, LONGER_SIZE = "reference/bolt-nano", 16

#: Size of the patch and step to singular values.
Spectra = Mapping[tuple[int, int], Tensor]


def recipe_of(k: int, quick: bool) -> PretrainRecipe:
    """Patches of ``k`` values, and contexts as many times as long."""
    stages = variant("patches", quick=False).model_dump()["stages"]
    for bucket in stages[0]["buckets"]:
        bucket["context_length"] = PATCHES * k
    shape = {"patch_size": k, "context_length": PATCHES * k}
    return variant("patches", quick=quick, architecture=shape, stages=stages)


def measured(runs: Path, k: int, quick: bool) -> tuple[dict[int, Tensor], float]:
    """Singular values of embedded signals by step, and |W_2| |W_1 X| at the end."""
    recipe, directory = recipe_of(k, quick), runs / f"patches-{k}"
    trained(recipe, directory)
    contexts = signals(8 if quick else 64, PATCHES * k)
    found, scale = {}, 0.0
    for step, path in moments(directory, recipe.total_steps).items():
        (vectors,), scale = embedded_patches(load(path, dtype="float32"), [contexts])
        found[step] = singular_values(vectors)
    return found, scale


def figure_3a(runs: Path, quick: bool) -> Found:
    """ε-ranks of embedded patches against their size, and while training."""
    spectra: dict[tuple[int, int], Tensor] = {}
    shares = []
    for k in QUICK_SIZES if quick else SIZES:
        by_step, scale = measured(runs, k, quick)
        spectra |= {(k, step): sigma for step, sigma in by_step.items()}
        shares.append(share_of_bound(by_step[max(by_step)], scale, k, biases=True))
    (vectors,), _ = embedded_patches(
        load(LONGER, dtype="float32"), [signals(8 if quick else 64, PATCHES * LONGER_SIZE)]
    )
    longer = singular_values(vectors)
    numbers = pd.DataFrame(
        {"k": k, "step": step, "j": j, "sigma": float(value)}
        for (k, step), sigma in spectra.items()
        for j, value in enumerate(sigma, 1)
    )
    verdicts = [*_verdicts(spectra, shares), _comes_back(spectra, longer)]
    return Found(verdicts, numbers, _figure(spectra, longer))


def ranks_at(spectra: Spectra, step: int, epsilon: float) -> list[int]:
    """By size of the patch."""
    return [epsilon_rank(sigma, epsilon) for (_, at), sigma in spectra.items() if at == step]


def rises(ranks: Sequence[int]) -> bool:
    """Whether no rank is below the one before."""
    return all(a <= b for a, b in pairwise(ranks))


def _verdicts(spectra: Spectra, shares: Sequence[float]) -> list[Verdict]:
    sizes = list(dict.fromkeys(k for k, _ in spectra))
    first, last = (end(step for _, step in spectra) for end in (min, max))
    ranks = {epsilon: ranks_at(spectra, last, epsilon) for epsilon in EPSILONS}
    begun = {epsilon: ranks_at(spectra, first, epsilon) for epsilon in EPSILONS}
    names = listed(sizes)
    return [
        Verdict(
            "Fig. 3a, trained", "the rank of embedded patches rises with their size",
            "; ".join(f"ε {e:g}: {listed(row, 3)}" for e, row in ranks.items())
            + f" for k = {names}",
            "rising at every ε", all(rises(row) for row in ranks.values()),
        ),
        Verdict(
            "Fig. 3a, trained", "the same at ε = 0.01 alone", f"{listed(ranks[0.01], 3)}",
            "rising, set after the run", rises(ranks[0.01]),
        ),
        Verdict(
            "Fig. 3a, untrained", "continuous maps are of low rank from the start",
            f"after a step {listed(begun[0.3], 3)} for k = {names} at ε = 0.3", "at most k + 2",
            all(rank <= k + 2 for rank, k in zip(begun[0.3], sizes, strict=True)),
        ),
        Verdict(
            "Fig. 3a, trained", "training does not raise the rank of embedded patches, at ε = 0.1",
            f"{listed(begun[0.1], 3)} after a step, {listed(ranks[0.1], 3)} after {last}",
            "no higher for any k",
            all(b <= a for a, b in zip(begun[0.1], ranks[0.1], strict=True)),
        ),
        _growth(spectra, first, last),
        Verdict(
            "Theorem 2 with biases, trained",
            "at most (1 + ε⁻²)(k + 1) values are above ε‖W_2‖‖W_1X‖",
            f"largest shares of the bound {listed(shares)} for k = {names}", "at most 1",
            max(shares) <= 1,
        ),
    ]  # fmt: skip


def _growth(spectra: Spectra, first: int, last: int) -> Verdict:
    sizes = list(dict.fromkeys(k for k, _ in spectra))
    grown = [spectra[k, last] / spectra[k, first] for k in sizes]
    middle = [float(ratio[len(ratio) // 2]) for ratio in grown]
    return Verdict(
        "Fig. 3a, trained", "σ_1 grows and the bulk stays, as of W_Q in Fig. 13",
        f"σ_1 {listed([float(ratio[0]) for ratio in grown])} times, the middle value "
        f"{listed(middle)} times", "σ_1 more than twice, the middle less, set after the run",
        all(float(ratio[0]) > 2 for ratio in grown) and max(middle) < 2,
    )  # fmt: skip


def _comes_back(spectra: Spectra, longer: Tensor) -> Verdict:
    short = spectra[LONGER_SIZE, max(step for _, step in spectra)]
    ranks = [[epsilon_rank(sigma, epsilon) for epsilon in EPSILONS] for sigma in (short, longer)]
    return Verdict(
        "Fig. 3a, trained", f"{LONGER}, as wide, trained otherwise and longer, has more, k = 16",
        f"{listed(ranks[1], 3)} at ε = {listed(EPSILONS)}, {listed(ranks[0], 3)} here",
        "higher at 0.1, set after the run", ranks[1][1] > ranks[0][1],
    )  # fmt: skip


def _figure(spectra: Spectra, longer: Tensor) -> Figure:
    sizes = list(dict.fromkeys(k for k, _ in spectra))
    last = max(step for _, step in spectra)
    figure = new_figure(11.4, 3.4, "Embedded patches of k values, 64 a context")
    panels = figure.subplots(1, 3)
    style_axes(panels[0], xlabel="j", ylabel=r"$\sigma_j / \sigma_1$", title="trained (Fig. 3a)")
    for k, color in zip(sizes, PALETTE, strict=False):
        sigma = spectra[k, last]
        panels[0].plot(range(1, len(sigma) + 1), sigma / sigma[0], lw=1.3, color=color)
    panels[0].plot(
        range(1, len(longer) + 1), longer / longer[0], "--", lw=1.3, color=GREY,
        label=f"{LONGER},\nk = {LONGER_SIZE}, trained for longer",
    )  # fmt: skip
    panels[0].set_yscale("log")
    panels[0].set_ylim(1e-4, 1.5)
    _by_size(panels[1], spectra, sizes, last)
    style_axes(panels[2], xlabel="step", ylabel="ε-rank at 0.1", title="while training")
    for k, color, marker in zip(sizes, PALETTE, MARKERS, strict=False):
        steps = [step for size, step in spectra if size == k]
        ranks = [epsilon_rank(spectra[k, step], 0.1) for step in steps]
        panels[2].plot(steps, ranks, f"{marker}-", ms=4, lw=1.2, color=color, label=f"k = {k}")
    panels[2].set_xscale("log")
    plain_ticks(panels[2].xaxis, list(dict.fromkeys(step for _, step in spectra)))
    panels[2].set_ylim(bottom=0)
    legend_beside(figure, [panels[2], panels[0]])
    return figure


def _by_size(axes: Axes, spectra: Spectra, sizes: Sequence[int], last: int) -> None:
    style_axes(axes, xlabel="k", ylabel="ε-rank", title="by size, trained")
    for epsilon, marker in zip(EPSILONS, MARKERS, strict=False):
        ranks = ranks_at(spectra, last, epsilon)
        axes.plot(sizes, ranks, f"{marker}-", ms=4, lw=1.2, color="black", alpha=0.75)
        axes.annotate(
            f"{epsilon:g}", (sizes[-1], ranks[-1]), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.plot(sizes, [k + 1 for k in sizes], ":", color=GREY, lw=1.2)
    axes.annotate(
        "k + 1", (sizes[0], sizes[0] + 1), xytext=(0, -10), textcoords="offset points",
        fontsize=8, color=GREY,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    plain_ticks(axes.xaxis, sizes)
    plain_ticks(axes.yaxis, (1, 2, 4, 8, 16, 32, 64, 128))
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 1.7)
