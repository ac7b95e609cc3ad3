"""Theorem 3 on trained models: encoder layers cut to the leading directions of what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn
from verdicts import Found, Verdict, listed, slope

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import (
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
)
from tscompress.data.batch import ForecastBatch
from tscompress.linalg import singular_values
from tscompress.plotting import GREY, SEQUENTIAL, TICK_SIZE, new_figure, style_axes

MODELS = ("reference/bolt", "reference/t5")
RANKS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224)
CONTEXT = 128
#: Below this, of sigma_1, no more is asked: forecasts do not notice it.
SMALL = 1e-3


def whole(loaded: LoadedModel, number: int) -> ForecastBatch:
    """The last steps of synthetic calibration series, of those without a missing value there."""
    config = CalibrationConfig(source=SYNTHETIC, num_series=6 * number, context_length=2 * CONTEXT)
    contexts, targets = [], []
    for batch in calibration_batches(loaded, config):
        last = batch.context[:, -CONTEXT:]
        if last.shape[1] == CONTEXT:
            full = torch.isfinite(last).all(1)
            contexts.append(last[full])
            targets.append(batch.target[full])
    horizon = min(target.shape[1] for target in targets)
    return ForecastBatch(
        torch.cat(contexts)[:number], torch.cat([one[:, :horizon] for one in targets])[:number]
    )


def encoder_attention(loaded: LoadedModel) -> Iterator[tuple[int, nn.Module]]:
    """Depth and module of every self-attention of the encoder."""
    for block in loaded.architecture.attention:
        if block.kind == "encoder":
            name, _, _ = block.projections["q"].rpartition(".")
            yield block.depth, loaded.model.get_submodule(name)


@torch.no_grad()
def calls(loaded: LoadedModel, batch: ForecastBatch) -> dict[int, tuple[Any, Any]]:
    """Arguments of each encoder attention in one forward pass, by depth."""
    seen: dict[int, tuple[Any, Any]] = {}

    def keep(depth: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[depth] = (args, kwargs)

        return hook

    handles = [
        module.register_forward_pre_hook(keep(depth), with_kwargs=True)
        for depth, module in encoder_attention(loaded)
    ]
    run_teacher_forced(loaded, batch)
    for handle in handles:
        handle.remove()
    return seen


@torch.no_grad()
def layer_rows(name: str, number: int) -> list[dict[str, Any]]:
    """Relative error of each encoder attention's output against sigma_{r+1} of its inputs."""
    loaded = load(name, dtype="float32")
    batch = whole(loaded, number)
    loaded.model.to(torch.float64)
    seen = calls(loaded, batch)
    rows = []
    for depth, module in encoder_attention(loaded):
        args, kwargs = seen[depth]
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        inputs = hidden.reshape(-1, hidden.shape[-1])  # [B L, d]
        sigma = singular_values(inputs)
        right = torch.linalg.eigh(inputs.T @ inputs).eigenvectors.flip(1)  # [d, d]
        output = module(*args, **kwargs)[0]
        for rank in RANKS:
            if rank >= len(sigma):
                continue
            P = right[:, :rank] @ right[:, :rank].T
            reduced = [(layer, layer.weight) for layer in (module.q, module.k, module.v)]
            for layer, weight in reduced:
                layer.weight = nn.Parameter(weight @ P, requires_grad=False)
            error = torch.linalg.vector_norm(output - module(*args, **kwargs)[0])
            for layer, weight in reduced:
                layer.weight = weight
            rows.append(
                {"model": name, "depth": depth, "rank": rank,
                 "sigma": float(sigma[rank] / sigma[0]),
                 "error": float(error / torch.linalg.vector_norm(output))}
            )  # fmt: skip
    return rows


def real_layers(quick: bool) -> Found:
    """How well sigma_{r+1} of its inputs tells the error of a reduced layer (Theorem 3)."""
    models = MODELS[:1] if quick else MODELS
    frame = pd.DataFrame([row for name in models for row in layer_rows(name, 32 if quick else 64)])
    verdicts = []
    for name, part in frame.groupby("model", sort=False):
        used = part[part["sigma"] > SMALL]
        slopes = [slope(one["sigma"], one["error"]) for _, one in used.groupby("depth")]
        ratios = used["error"] / used["sigma"]
        cut = part[part["sigma"] <= 0.01].groupby("depth").first()
        verdicts.append(
            Verdict(
                "Theorem 3.1, trained", f"{name}: the error is linear in σ_{{r+1}} of the inputs",
                f"slopes {listed(slopes)} of the encoder layers; relative error is "
                f"{ratios.min():.2f} to {ratios.max():.1f} times σ_{{r+1}}/σ_1", "in 0.7 … 1.4",
                all(0.7 <= one <= 1.4 for one in slopes),
            )
        )  # fmt: skip
        verdicts.append(
            Verdict(
                "Theorem 3.1, trained", f"{name}: cut where σ_{{r+1}} ≤ 0.01 σ_1, error ≤ 5%",
                f"ranks {listed(cut['rank'].tolist(), 3)} of 256, errors "
                f"{', '.join(f'{error:.1%}' for error in cut['error'])}", "at most 5%",
                bool((cut["error"] <= 0.05).all()),
            )
        )  # fmt: skip
    return Found(verdicts, frame, _figure(frame))


def _figure(frame: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(frame["model"]))
    figure = new_figure(3.2 + 3.4 * len(names), 3.4)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        style_axes(
            axes, xlabel=r"$\sigma_{r+1} / \sigma_1$ of the inputs",
            ylabel="relative error of the output", title=f"{name}, encoder",
        )  # fmt: skip
        part = frame[(frame["model"] == name) & (frame["sigma"] > 1e-4)]
        depths = sorted(part["depth"].unique())
        for number, depth in enumerate(depths):
            one = part[part["depth"] == depth]
            color = colormaps[SEQUENTIAL](0.9 * number / max(1, len(depths) - 1))
            label = f"layer {depth + 1}"
            axes.loglog(one["sigma"], one["error"], "o-", ms=4, lw=1.2, color=color, label=label)
        ends = [part["sigma"].min(), part["sigma"].max()]
        axes.loglog(ends, ends, "--", color=GREY, lw=1, label="slope 1")
        axes.legend(frameon=False, fontsize=TICK_SIZE)
    return figure
