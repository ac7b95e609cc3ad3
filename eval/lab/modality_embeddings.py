"""Figures 2 and 8 of the paper: spectra, two leading directions, and angles of embedded inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from modality_inputs import (
    TOY_NAMES,
    Rows,
    all_rows,
    bolt_rows,
    opened,
    scaled,
    t5_rows,
    toy,
    toy_rows,
)
from modality_models import check_wheels
from torch import Tensor
from verdicts import Found, Verdict

from tscompress.linalg import angle_matrix, epsilon_rank, even_picks
from tscompress.plotting import (
    LABEL_SIZE,
    PALETTE,
    SEQUENTIAL,
    TICK_SIZE,
    TITLE_SIZE,
    legend_beside,
    new_figure,
    style_axes,
)

EPSILONS = (0.3, 0.1, 0.03, 0.01)
#: Where verdicts are given.
EPSILON = 0.1
_COLORS = {
    "time series": PALETTE[0],
    "text": PALETTE[1],
    "images": PALETTE[2],
    "tables": PALETTE[3],
}
_LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


def spectrum(rows: Tensor) -> Tensor:
    """Singular values of ``[N, d]``, descending, through the smaller Gram matrix."""
    gram = rows.T @ rows if len(rows) >= rows.shape[1] else rows @ rows.T
    return torch.linalg.eigvalsh(gram).clamp_min(0).flip(0).sqrt()


def variants(rows: Tensor) -> dict[str, Tensor]:
    """As they are, without their mean, and each of length one."""
    return {
        "raw": rows,
        "centred": rows - rows.mean(0),
        "of length one": rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12),
    }


# --------------------------------------------------------------------------------------------------
# Figure 2a
# --------------------------------------------------------------------------------------------------


def spectra(quick: bool) -> Found:
    """Spectra of embedded inputs over modalities."""
    check_wheels()
    found = list(all_rows(quick))
    numbers = pd.DataFrame([row for one in found for row in _ranks(one)])
    return Found(_spectra_verdicts(numbers), numbers, _spectra_figure(found))


def _ranks(one: Rows) -> list[dict[str, Any]]:
    stages = {"embedded": one.embedded, "as fed": one.fed}
    listing = []
    for stage, rows in stages.items():
        for variant, changed in variants(rows).items() if rows is not None else ():
            sigma = spectrum(changed)
            ranks = {f"rank at {epsilon:g}": epsilon_rank(sigma, epsilon) for epsilon in EPSILONS}
            listing.append(
                {
                    "modality": one.modality,
                    "model": one.model,
                    "inputs": one.inputs,
                    "stage": stage,
                    "variant": variant,
                    "rows": len(changed),
                    "d": changed.shape[1],
                    **ranks,
                    "share at 0.1": ranks["rank at 0.1"] / changed.shape[1],
                }
            )
    return listing


def _spectra_figure(found: Sequence[Rows]) -> Figure:
    found = [one for one in found if not one.model.endswith("untrained")]  # those are in the table
    figure = new_figure(12.6, 6.4, "Embedded inputs across modalities")
    panels = figure.subplots(2, 2, sharey=True)
    shown: tuple[tuple[str, str, Callable[[Rows], Tensor | None]], ...] = (
        ("embedded", "raw", lambda one: one.embedded),
        ("embedded", "centred", lambda one: one.embedded),
        ("as fed (after the first norm)", "raw", lambda one: one.fed),
        ("as fed (after the first norm)", "centred", lambda one: one.fed),
    )
    for axes, (stage, variant, of) in zip(panels.flat, shown, strict=True):
        style_axes(axes, title=f"{stage}, {variant}")
        seen: dict[str, int] = {}
        for one in found:
            number = seen.setdefault(one.modality, 0)
            seen[one.modality] += 1
            rows = of(one)
            if rows is not None:
                _draw_spectrum(axes, one, spectrum(variants(rows)[variant]), number)
        axes.set(yscale="log", xscale="log", ylim=(1e-4, 1.5), xlim=(1, 400))
    for axes in panels[-1]:
        axes.set_xlabel("index $j$", fontsize=LABEL_SIZE)
    for axes in panels[:, 0]:
        axes.set_ylabel("$\\sigma_j / \\sigma_1$", fontsize=LABEL_SIZE)
    legend_beside(figure, panels[0, 0])
    return figure


def _draw_spectrum(axes: Axes, one: Rows, sigma: Tensor, number: int) -> None:
    relative = (sigma / sigma[0]).tolist()
    values = [value for value in relative if value > 1e-7]
    # A modality has a colour; more models than lines are drawn thinner.
    options = {
        "color": _COLORS[one.modality],
        "ls": _LINES[number % len(_LINES)],
        "lw": 1.5 if number < len(_LINES) else 0.8,
        "marker": "o" if len(values) < 4 else None,
        "ms": 4,
    }
    label = f"{one.model}: {one.inputs}"
    axes.plot(range(1, len(values) + 1), values, label=label, **options)


def _spectra_verdicts(numbers: pd.DataFrame) -> list[Verdict]:
    raw = numbers[(numbers["stage"] == "embedded") & (numbers["variant"] == "raw")]
    fed = numbers[(numbers["stage"] == "as fed") & (numbers["variant"] == "raw")]

    def share(model: str, inputs: str, frame: pd.DataFrame = raw) -> float:
        chosen = frame[(frame["model"] == model) & frame["inputs"].str.startswith(inputs)]
        return float(chosen["share at 0.1"].iloc[0])

    bolt, text = share("reference/bolt", "signals"), share("MiniLM", "text", fed)
    t5 = share("reference/t5", "signals")
    tables = raw.set_index("model")["rank at 0.3"]
    drawn, learnt = tables["toy Chronos, untrained"], tables["toy Chronos, trained"]
    large, small = share("ViT-S", "crops of 224"), share("ViT-S", "crops of 32")
    cells, rows = share("Linear(1, d), as Mitra", "cells"), "rows of 20 cells"
    ranks = {one: raw[raw["inputs"] == one]["rank at 0.01"].iloc[0] for one in ("cells", rows)}
    return [
        Verdict(
            "Fig. 2a", "patches of series (Bolt) have far lower rank than text as fed",
            f"{bolt:.1%} of d, text {text:.1%}", "less than a quarter", bolt < text / 4,
        ),
        Verdict(
            "Fig. 2a", "Bolt (k = 16) lies below a Chronos table (k = 1)",
            f"{bolt:.1%} of d, reference/t5 {t5:.1%}", "lower", bolt < t5,
        ),
        Verdict(
            "Fig. 2a", "a random table of values loses rank as it learns the number line",
            f"at ε = 0.3 {drawn} of 128 untrained, {learnt} after training", "less than half",
            learnt < drawn / 2,
        ),
        Verdict(
            "Fig. 2a", "series lie below images (crops of 224 pixels)",
            f"{bolt:.1%} of d, images {large:.1%}", "lower", bolt < large,
        ),
        Verdict(
            "Fig. 2a, as drawn", "series lie below images whatever their resolution",
            f"{bolt:.1%} of d, crops of 32 pixels, enlarged {small:.1%}",
            "no: enlarged pixels are smooth", bolt < small / 2, False,
        ),
        Verdict(
            "Fig. 2a, as drawn", "tables lie above series, embedded by cells (Mitra)",
            f"rank {ranks['cells']} at 0.01, {cells:.1%} of d at 0.1; Bolt {bolt:.1%}",
            "no: a linear map of one number has rank 2", cells > bolt, False,
        ),
        Verdict(
            "Theorem 2", "rows as tokens: the rank is at most that of 20 features and labels",
            f"{ranks[rows]} of 128 at 0.01", "at most 20 + 3", ranks[rows] <= 23,
        ),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Figure 2b, c
# --------------------------------------------------------------------------------------------------


def projections(quick: bool) -> Found:
    """Tables of tokens on their two leading directions: a curve of values, a cloud of words."""
    bert: Any = opened("minilm").model
    whisper: Any = opened("whisper").model
    t5: Any = opened("reference/t5").model
    tables = {
        "reference/t5": t5.get_input_embeddings().weight,
        "toy Chronos, trained": toy("tokens", quick).embedding.table.weight,
        "MiniLM": bert.embeddings.word_embeddings.weight,
        "Whisper, decoder": whisper.decoder.embed_tokens.weight,
    }
    flat = {name: _projected(table.detach().double()) for name, table in tables.items()}
    steps = {name: _step(points) for name, points in flat.items()}
    numbers = pd.DataFrame(
        [{"model": name, "tokens": len(flat[name]), "step": steps[name]} for name in flat]
    )
    figure = new_figure(12.0, 3.4, "Token tables on their two leading directions, by token id")
    panels = figure.subplots(1, len(flat))
    panels[0].set_ylabel("2nd singular vector", fontsize=LABEL_SIZE)
    for axes, (name, points) in zip(panels, flat.items(), strict=True):
        style_axes(axes, title=name, xlabel="1st singular vector", ylabel=axes.get_ylabel())
        chosen = points[even_picks(len(points), 2048)]
        order = torch.arange(len(chosen))
        image = axes.scatter(*chosen.T, s=4, c=order, cmap=SEQUENTIAL, linewidths=0)
    bar = figure.colorbar(image, ax=axes, aspect=25, pad=0.02)
    bar.set_ticks([0, len(order) - 1], labels=["first", "last"])
    bar.ax.tick_params(labelsize=TICK_SIZE)
    claims = {"reference/t5": True, "MiniLM": False, "Whisper, decoder": False}
    verdicts = [
        Verdict(
            "Fig. 2b" if curve else "Fig. 2c",
            f"{name}: {'a curve: neighbours lie together' if curve else 'a cloud without order'}",
            f"{steps[name]:.2f}",
            f"step between neighbours / between any two {'< 0.2' if curve else '> 0.5'}",
            steps[name] < 0.2 if curve else steps[name] > 0.5,
        )
        for name, curve in claims.items()
    ]
    return Found(verdicts, numbers, figure)


def _projected(table: Tensor) -> Tensor:
    _, vectors = torch.linalg.eigh(table.T @ table)
    return table @ vectors[:, [-1, -2]]


def _step(points: Tensor) -> float:
    """Median distance of neighbours over that of tokens in any order."""
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    apart = (points[1:] - points[:-1]).norm(dim=1).median()
    return float(apart / (points[order][1:] - points[order][:-1]).norm(dim=1).median())


# --------------------------------------------------------------------------------------------------
# Figure 8
# --------------------------------------------------------------------------------------------------


def angles(quick: bool) -> Found:
    """One series of 512 steps through five embeddings: angles of its vectors, and spectra."""
    time = torch.arange(512.0)
    noise = torch.randn(512, generator=torch.Generator().manual_seed(0))
    series = {"sin(t)": torch.sin(time), "noise": noise}
    embedded = {name: _embedded(values[None], quick) for name, values in series.items()}
    numbers = pd.DataFrame(
        [
            {
                "series": name,
                "embedding": model,
                "vectors": len(rows),
                "d": rows.shape[1],
                **{f"rank at {e:g}": epsilon_rank(spectrum(rows), e) for e in (*EPSILONS, 1e-4)},
                "mean angle": float(angle_matrix(rows).mean()),
            }
            for name, of in embedded.items()
            for model, rows in of.items()
        ]
    )
    return Found(_angle_verdicts(numbers, embedded["sin(t)"]), numbers, _angle_figure(embedded))


def _embedded(series: Tensor, quick: bool) -> dict[str, Tensor]:
    named = {
        f"{TOY_NAMES[kind]}": toy_rows(toy(kind, quick), scaled(series), "").embedded
        for kind in ("wavelet tokens", "gated value")
    }
    tables = {"Chronos (reference/t5)": t5_rows(series), "Bolt (reference/bolt)": bolt_rows(series)}
    return {**{name: rows.embedded for name, rows in tables.items()}, **named}


def _angle_figure(embedded: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    models = list(next(iter(embedded.values())))
    figure = new_figure(3.0 + 2.3 * len(models), 5.2, "One series of 512 steps, embedded")
    panels = figure.subplots(len(embedded), 1 + len(models))
    for axes, model in zip(panels[0], models, strict=False):
        axes.set_title(model, fontsize=TITLE_SIZE, loc="left")
    for row, (name, of) in zip(panels, embedded.items(), strict=True):
        style_axes(row[-1], title=f"spectra, {name}", xlabel="index $j$")
        for axes, (model, rows), color in zip(row, of.items(), PALETTE, strict=False):
            style_axes(axes, title=axes.get_title(loc="left"))
            axes.grid(visible=False)
            matrix = angle_matrix(rows[even_picks(len(rows), 256)])
            image = axes.imshow(matrix, cmap=SEQUENTIAL, vmin=0, vmax=math.pi / 2)
            axes.set(xticks=[], yticks=[])
            sigma = spectrum(rows)
            values = [value for value in (sigma / sigma[0]).tolist() if value > 1e-7]
            row[-1].plot(range(1, len(values) + 1), values, color=color, label=model, lw=1.4)
        row[-1].set(yscale="log", xscale="log", ylim=(1e-5, 1.5))
        row[0].set_ylabel(name, fontsize=LABEL_SIZE)
    bar = figure.colorbar(image, ax=panels[:, -1], aspect=30, pad=0.02)
    bar.set_ticks([0, math.pi / 4, math.pi / 2], labels=["0", "π/4", "π/2"])
    bar.set_label("angle (rad)", fontsize=LABEL_SIZE)
    legend_beside(figure, panels[0, -1])
    return figure


def _angle_verdicts(numbers: pd.DataFrame, sine: Mapping[str, Tensor]) -> list[Verdict]:
    def of(model: str, series: str, column: str) -> float:
        chosen = numbers[(numbers["embedding"] == model) & (numbers["series"] == series)]
        return float(chosen[column].iloc[0])

    models = list(sine)
    ranks = {one: [of(one, name, "rank at 0.03") for name in ("sin(t)", "noise")] for one in models}
    gated, wavelets = TOY_NAMES["gated value"], TOY_NAMES["wavelet tokens"]
    others = [one for one in models if one != wavelets]
    angle = {one: of(one, "sin(t)", "mean angle") for one in models}
    within, between = _blocks(sine[wavelets])
    return [
        Verdict(
            "Fig. 8", "noise has higher rank than a sine",
            "; ".join(f"{one} {ranks[one][0]:.0f}, {ranks[one][1]:.0f}" for one in others),
            "higher at ε = 0.03", all(ranks[one][0] < ranks[one][1] for one in others),
        ),
        Verdict(
            "Fig. 8", "noise has higher rank than a sine, of wavelet tokens",
            f"{ranks[wavelets][0]:.0f}, {ranks[wavelets][1]:.0f} of 128",
            "no: the toy's table is still near its random start",
            ranks[wavelets][0] < ranks[wavelets][1], False,
        ),
        Verdict(
            "Fig. 8", "the gated map of one value (Time-MoE) has the smallest angles",
            "; ".join(f"{one} {value:.2f}" for one, value in angle.items()),
            "smallest mean angle", angle[gated] == min(angle.values()),
        ),
        Verdict(
            "Cor. 2", "the gated map has rank at most 3 at ε = 1e-4",
            f"{of(gated, 'sin(t)', 'rank at 0.0001'):.0f}", "≤ 3",
            of(gated, "sin(t)", "rank at 0.0001") <= 3,
        ),
        Verdict(
            "Fig. 8", "angles of wavelet tokens form four blocks: approximation, three details",
            f"mean angle {within:.2f} within, {between:.2f} between",
            "smaller within by a tenth: no, as above", within < 0.9 * between, False,
        ),
    ]  # fmt: skip


def _blocks(rows: Tensor) -> tuple[float, float]:
    """Mean angle of wavelet coefficients of one level, and of different ones."""
    size = len(rows) // 8
    level = torch.tensor([0] * size + [1] * size + [2] * 2 * size + [3] * 4 * size)
    matrix, same = angle_matrix(rows), level[:, None] == level[None, :]
    off = ~torch.eye(len(rows), dtype=torch.bool)
    return float(matrix[same & off].mean()), float(matrix[~same].mean())
