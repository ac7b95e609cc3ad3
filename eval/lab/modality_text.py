"""The text half of Table 2: neighbours of sentences, with every attention matrix cut."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import torch
from modality_inputs import opened, sentences, tokenizer
from torch import Tensor
from torch.nn import functional as F
from verdicts import Found, Verdict

from tscompress.plotting import MARKERS, PALETTE, legend_beside, new_figure, style_axes

#: Table 2: share of the rank that is kept, overlap of T5's ten likeliest tokens on C4, and of
#: Chronos' on electricity.
PUBLISHED = (
    (0.889, 0.954, 0.999),
    (0.755, 0.871, 0.999),
    (0.569, 0.730, 0.997),
    (0.393, 0.568, 0.979),
    (0.237, 0.345, 0.883),
    (0.151, 0.301, 0.717),
    (0.073, 0.227, 0.308),
)
TOP, SENTENCES, QUICK_SENTENCES = 10, 400, 100


def text_cut(quick: bool) -> Found:
    """MiniLM at the paper's ratios: ten nearest sentences before and after, and cosines."""
    number = QUICK_SENTENCES if quick else SENTENCES
    loaded: Any = opened("minilm")
    dense = vectors(loaded.model, number)
    before = nearest(dense)
    factors = {
        name: torch.linalg.svd(loaded.model.get_submodule(name).weight.detach().double())
        for _, _, name in loaded.architecture.attention_projections()
    }
    rows = []
    for ratio, text, series in PUBLISHED:
        cut = copy.deepcopy(loaded.model)
        for name, (left, sigma, right) in factors.items():
            rank = int(len(sigma) * ratio)
            kept = (left[:, :rank] * sigma[:rank]) @ right[:rank]
            cut.get_submodule(name).weight.data.copy_(kept)
        after = vectors(cut, number)
        rows.append(
            {"ratio": ratio, "rank": int(384 * ratio), "overlap": overlap(before, nearest(after)),
             "cosine": float((dense * after).sum(1).mean()), "published T5": text,
             "published Chronos": series}
        )  # fmt: skip
    numbers = pd.DataFrame(rows)
    return Found(_verdicts(numbers), numbers, _figure(numbers, number))


@torch.no_grad()
def vectors(model: Any, number: int) -> Tensor:
    """Sentences as mean states of their pieces, of length one: ``[N, d]``."""
    found = []
    ordered = sorted(enumerate(sentences(number)), key=lambda pair: len(pair[1]))
    for start in range(0, number, 50):
        texts = [text for _, text in ordered[start : start + 50]]
        batch = tokenizer()(texts, padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        states = model(**batch).last_hidden_state
        found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found)


def nearest(rows: Tensor) -> Tensor:
    """Indices of the ten nearest of the others, ``[N, TOP]``."""
    alike = rows @ rows.T
    return alike.fill_diagonal_(-2).topk(TOP, dim=1).indices


def overlap(a: Tensor, b: Tensor) -> float:
    """Mean Jaccard overlap of sets of ten."""
    common = (a[:, :, None] == b[:, None, :]).sum((1, 2)).double()
    return float((common / (2 * TOP - common)).mean())


def _figure(numbers: pd.DataFrame, number: int) -> Any:
    figure = new_figure(7.6, 3.6, "Every attention matrix cut to a share of its rank")
    axes = figure.subplots()
    style_axes(axes, xlabel="rank / width", ylabel="Jaccard overlap of the ten first")
    lines = {
        "overlap": f"MiniLM: nearest of {number} sentences",
        "published T5": "published, T5 (LM-adapted base): tokens",
        "published Chronos": "published, Chronos (base): tokens",
    }
    for (column, label), color, marker in zip(lines.items(), PALETTE, MARKERS, strict=False):
        axes.plot(numbers["ratio"], numbers[column], color=color, marker=marker, label=label)
    axes.set_ylim(0, 1.03)
    legend_beside(figure, axes)
    return figure


def _verdicts(numbers: pd.DataFrame) -> list[Verdict]:
    mild = numbers[numbers["ratio"] >= 0.393]
    apart = (mild["overlap"] - mild["published T5"]).abs().max()
    at = numbers[numbers["ratio"] == 0.393].iloc[0]
    return [
        Verdict(
            "Table 2", "a text model loses its neighbours at mild cuts as the published T5 does",
            ", ".join(f"{value:.3f}" for value in mild["overlap"]) + f"; at most {apart:.3f} apart",
            "within 0.05 down to a ratio of 0.393: no, sentences lose theirs sooner",
            bool(apart <= 0.05), False,
        ),
        Verdict(
            "Table 2", "text is harder to cut than Chronos at the same ratio",
            f"overlap {at['overlap']:.3f} at 0.393, Chronos {at['published Chronos']:.3f}",
            "lower by more than 0.2", bool(at["overlap"] < at["published Chronos"] - 0.2),
        ),
        Verdict(
            "Table 2", "overlap falls with every cut",
            ", ".join(f"{value:.3f}" for value in numbers["overlap"]), "falling",
            bool(numbers["overlap"].is_monotonic_decreasing),
        ),
    ]  # fmt: skip
