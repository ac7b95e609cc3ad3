"""Theorem 3 beside trained learners: attention that reads projected inputs, and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from cut_learners import Asked, looped_subject, regressor_subject
from cuts import Subject
from matplotlib.figure import Figure
from torch import Tensor, nn
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.lab.attention import product_norm, spectral_norm
from tscompress.lab.in_context_models import SelfAttention
from tscompress.plotting import (
    MARKERS,
    PALETTE,
    legend_beside,
    new_figure,
    style_axes,
)

#: Prompts whose columns the projector is fitted to, and on which errors are measured.
FITTED, MEASURED = 256, 32
LN10 = math.log(10)


@dataclass(frozen=True)
class Read:
    """What an attention layer reads of prompts, and what it is.

    Attributes
    ----------
    columns
        ``[B, T, d]``; of a looped model all loops, one below the other.
    """

    name: str
    attention: SelfAttention
    columns: Tensor

    def directions(self) -> Tensor:
        """Left singular vectors ``[d, d]`` of all columns together, descending."""
        rows = self.columns.flatten(0, 1).double()
        return torch.linalg.eigh(rows.T @ rows)[1].flip(1)


def inputs_of_attention(subject: Subject) -> list[Read]:
    """What every attention layer reads of the calibration prompts."""
    learner: Any = subject.learner
    parts = [block.layer[0].attention for block in learner.encoder.block]
    seen: dict[int, list[Tensor]] = {index: [] for index in range(len(parts))}
    handles = [
        part.register_forward_pre_hook(lambda _, args, i=index: seen[i].append(args[0].detach()))
        for index, part in enumerate(parts)
    ]
    with torch.no_grad():
        subject.calibrate(learner)
    for handle in handles:
        handle.remove()
    return [
        Read(f"layer {index + 1}", part, torch.cat([one[:FITTED] for one in seen[index]]))
        for index, part in enumerate(parts)
    ]


def heads_output(attention: SelfAttention, columns: Tensor) -> Tensor:
    """Outputs of the heads, one below the other, without the output projection: ``[B, T, d]``."""
    q, k, v = (
        one(columns).unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)
        for one in (attention.q, attention.k, attention.v)
    )
    return attention.attend(q, k, v).transpose(1, 2).flatten(2)


def constant_of(attention: SelfAttention, radius: float) -> float:
    """C of Theorem 5, with columns divided by their largest norm, ``radius``."""
    heads = attention.n_heads
    q, k, v = (
        one.weight.detach().double().chunk(heads) for one in (attention.q, attention.k, attention.v)
    )
    root = math.sqrt(attention.head_size)
    scores = max(product_norm(a, b) for a, b in zip(q, k, strict=True)) * radius**2 / root
    values = max(spectral_norm(a) for a in v) * radius / root
    return max(1.0, scores, values)


def log10_bound(sigma_next: float, d: int, C: float) -> float:
    """log10 of :func:`tscompress.lab.bounds.reduced_attention_bound` at m = 1, which overflows."""
    return math.log10(C + 2 * C**4) + 2 * C**3 / LN10 + 0.5 * math.log10(d) + math.log10(sigma_next)


@torch.no_grad()
def errors_of(read: Read, ranks: list[int]) -> list[dict[str, float]]:
    """Measured and bounded errors of one attention layer, at each rank of the projector."""
    attention = read.attention
    vectors, columns = read.directions(), read.columns[:: max(1, len(read.columns) // MEASURED)]
    radius = float(read.columns.norm(dim=-1).max())
    C, whole = constant_of(attention, radius), heads_output(attention, columns)
    rows = []
    for rank in ranks:
        kept = (vectors[:, :rank] @ vectors[:, :rank].T).to(columns.dtype)
        projected = columns @ kept
        left = torch.linalg.matrix_norm(columns - projected, 2)  # of each prompt
        error = torch.linalg.matrix_norm(heads_output(attention, projected) - whole)
        worst = int(error.argmax())
        sigma = max(float(left[worst]) / radius, 1e-12)
        rows.append(
            {
                "layer": read.name, "rank": rank, "C": C,
                "relative error": float((error / torch.linalg.matrix_norm(whole)).mean()),
                "sigma": float((left / torch.linalg.matrix_norm(columns, 2)).mean()),
                "log10 error": math.log10(max(float(error[worst]), 1e-12)),
                "log10 bound": log10_bound(sigma, columns.shape[-1], C),
            }
        )  # fmt: skip
    return rows


@contextmanager
def projecting(learner: Any, reads: list[Read], rank: int) -> Iterator[None]:
    """All attention reads its inputs projected to their first directions: W U_r U_r^T for W."""
    handles = []
    for block, read in zip(learner.encoder.block, reads, strict=True):
        vectors = read.directions()[:, :rank]
        kept = (vectors @ vectors.T).to(read.columns.dtype)
        handles.append(block.layer[0].attention.register_forward_pre_hook(_projected(kept)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _projected(kept: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    return lambda _, args: (args[0] @ kept,)


def ranks_up_to(d: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and d - 1."""
    steps = [base << k for k in range(d.bit_length()) for base in (2, 3)]
    return sorted({1, d - 1, *(one for one in steps if one < d)})


def bounds(asked: Asked, quick: bool) -> Found:
    """Error of attention against the rank of what it reads, beside sigma and the bound."""
    subjects = [regressor_subject(*one, asked.recipe) for one in asked.regressors()]
    subjects += [looped_subject(*one, asked.recipe) for one in asked.looped()]
    rows = []
    for subject in subjects:
        reads = inputs_of_attention(subject)
        every = ranks_up_to(reads[0].columns.shape[-1])
        ranks = every[:: len(every) // 2] if quick else every
        whole = subject.skill(subject.learner)
        for rank in ranks:
            with projecting(subject.learner, reads, rank):
                skill = subject.skill(subject.learner)
            for read in reads:
                row = errors_of(read, [rank])[0]
                rows.append({"model": subject.name, **row, "skill": skill, "uncut": whole})
    frame = pd.DataFrame(rows)
    return Found([] if quick else _verdicts(frame), frame, draw_bounds(frame))


def _verdicts(frame: pd.DataFrame) -> list[Verdict]:
    slack = frame["log10 bound"] - frame["log10 error"]
    near = {
        f"{model}, {layer}": float(
            np.corrcoef(one["sigma"].rank(), one["relative error"].rank())[0, 1]
        )
        for (model, layer), one in frame.groupby(["model", "layer"], sort=False)
    }
    enough, sigma = _enough(frame)
    return [
        Verdict("Theorem 5, repaired", "the bound is above the error of every layer",
                f"by 10^{slack.min():.0f} to 10^{slack.max():.0f}; C {frame['C'].min():.3g} to "
                f"{frame['C'].max():.3g}", "above", bool((slack >= 0).all())),
        Verdict("Theorem 5, as advice", "its size says something about trained learners",
                f"at least 10^{frame['log10 bound'].min():.0f}", "below 1: no, C is far above 1",
                bool(frame["log10 bound"].min() < 0), should=False),
        Verdict("Theorem 5, as advice", "its shape does: error falls with sigma as the rank grows",
                f"rank correlation at least {min(near.values()):.2f} over {len(near)} layers",
                "at least 0.9", min(near.values()) >= 0.9),
        Verdict("Theorem 5, as advice", "sigma_{r+1} / sigma_1 below 0.1 keeps the ability",
                f"skill kept at the first such rank: {listed(list(enough.values()))} "
                f"({', '.join(enough)}; ranks {', '.join(map(str, sigma.values()))})",
                "at least 95%", min(enough.values()) >= 0.95),
    ]  # fmt: skip


def _enough(frame: pd.DataFrame) -> tuple[dict[str, float], dict[str, int]]:
    """Of each model: skill kept at the first rank at which all layers have sigma below 0.1."""
    kept, ranks = {}, {}
    for model, one in frame.groupby("model", sort=False):
        largest = one.groupby("rank")["sigma"].max()
        rank = (
            int(largest.index[largest < 0.1].min()) if (largest < 0.1).any() else one["rank"].max()
        )
        at = one[one["rank"] == rank].iloc[0]
        kept[str(model)], ranks[str(model)] = float(at["skill"] / at["uncut"]), int(rank)
    return kept, ranks


def draw_bounds(frame: pd.DataFrame) -> Figure:
    """A column for each model: error and sigma of its layers, and below the skill kept."""
    models = list(dict.fromkeys(frame["model"]))
    figure = new_figure(1.6 + 2.3 * len(models), 4.6)
    grid = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for index, model in enumerate(models):
        of_model = frame[frame["model"] == model]
        above, below = grid[:, index]
        style_axes(above, title=model, ylabel="" if index else "relative error of attention")
        style_axes(below, xlabel="rank of what is read", ylabel="" if index else "skill kept")
        for slot, (layer, one) in enumerate(of_model.groupby("layer", sort=False)):
            color = PALETTE[slot % len(PALETTE)]
            above.plot(one["rank"], one["relative error"], color=color, marker=MARKERS[slot], ms=3,
                       linewidth=1.2, label=f"error, {layer}")  # fmt: skip
            above.plot(one["rank"], one["sigma"], ":", color=color, linewidth=1.2,
                       label=f"σ_{{r+1}} / σ_1, {layer}")  # fmt: skip
        first = of_model.drop_duplicates("rank")
        below.plot(first["rank"], first["skill"] / first["uncut"], "o-", color="black", ms=3,
                   linewidth=1.2)  # fmt: skip
        below.axhline(0.95, color="black", linewidth=0.6, linestyle=":")
        below.set_ylim(min(0, max(-0.5, float((first["skill"] / first["uncut"]).min()))), 1.05)
        above.set_yscale("log")
        for axes in (above, below):
            axes.set_xscale("log", base=2)
        plain_ticks(below.xaxis, [2**k for k in range(int(first["rank"].max()).bit_length())])
    legend_beside(figure, grid[0])
    return figure
