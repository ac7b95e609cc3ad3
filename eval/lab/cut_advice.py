"""Does the bound on low-rank attention tell which blocks may be cut? Advice against measurement.

    python eval/lab/cut_advice.py --output results/lab-cut-advice [--model reference/bolt] [--quick]

The advice for a block is the smallest rank d for which Theorem 3, corrected by the multiplicity m
of repeated columns, bounds the relative error by epsilon: sqrt(m) sigma_{d+1} / sigma_1 <= epsilon,
with the singular values of what its keys read on calibration series. Beside it stands the mean
epsilon-rank of its heads' W_Q. Measured is the loss with only this block's heads at an eighth of
their size. Spearman's coefficient over blocks says whether either ranks them as the loss does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from micro import spearman  # which finds the scripts above this folder
from output import parser_of, plain_table, write_tables
from torch import Tensor

from tscompress.budget.measure_sensitivity import measure_sensitivity
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.batch import ForecastBatch
from tscompress.plan.architecture import AttentionBlock
from tscompress.profiling.measure import profile_inputs, profile_weights

EPSILON = 0.1
#: Of a head's size, what is left of it when sensitivity is measured.
SHARE = 8


def advised_rank(relative: Sequence[float], multiplicity: int, epsilon: float) -> int:
    """The smallest d with sqrt(multiplicity) sigma_{d+1} / sigma_1 <= epsilon.

    Parameters
    ----------
    relative
        sigma_j / sigma_1, descending; what is past its end is zero.
    """
    return sum(math.sqrt(multiplicity) * value > epsilon for value in relative)


def greatest_multiplicity(rows: Tensor) -> int:
    """How often the most frequent of the rows ``[T, d]`` stands among them, bit for bit."""
    content = np.ascontiguousarray(rows.detach().cpu().float().numpy())
    keys = content.view(np.dtype((np.void, content.shape[1] * content.itemsize)))[:, 0]
    return int(np.unique(keys, return_counts=True)[1].max())


def read_by(block: AttentionBlock) -> str:
    """The projection whose input the keys and values are made of."""
    return block.projections["k"]


def multiplicities(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> dict[str, int]:
    """Greatest multiplicity of a column within one series, of every block's inputs of keys."""
    found: dict[str, int] = {}

    def hook(name: str) -> Any:
        def look(_: Any, args: tuple[Tensor, ...]) -> None:
            for rows in args[0]:
                found[name] = max(found.get(name, 1), greatest_multiplicity(rows))

        return look

    names = {read_by(block) for block in loaded.architecture.attention}
    handles = [
        loaded.model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                run_teacher_forced(loaded, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def blocks_of(model: str, windows: int) -> pd.DataFrame:
    """A row for each attention block: advice, ε-rank of its heads, measured losses."""
    loaded = load(model)
    config = CalibrationConfig(num_series=windows)
    batches = calibration_batches(loaded, config)
    inputs = profile_inputs(loaded, (EPSILON,), config)
    weights = profile_weights(loaded, (EPSILON,))
    repeated = multiplicities(loaded, batches[:1])
    size = weights[0].heads[0].full_rank
    sensitivity = measure_sensitivity(
        loaded,
        batches,
        fold=FoldConfig(),
        head_sizes=[max(1, size // SHARE)],
        hidden_ratios=(),
        width_ratios=(),
        embedding_ratios=(),
        layers=False,
    )
    encoder = next((i for i in inputs if i.part == "encoder_output"), None)
    rows = []
    for block in loaded.architecture.attention:
        own = next(
            i for i in inputs if i.part == "attention" and i.name in block.projections.values()
        )
        entry = encoder if block.reads_encoder and encoder is not None else own
        m = repeated[read_by(block)]
        losses = {
            p.kind: p.losses[-1] for p in sensitivity.parts if p.name == block.name and p.losses
        }
        heads = next(w.heads for w in weights if w.name == block.projections["q"])
        rows.append(
            {
                "model": model,
                "block": f"{block.kind} {block.depth}",
                "m": m,
                "advised rank": advised_rank(entry.spectrum.relative, m, EPSILON),
                "advised rank, m = 1": advised_rank(entry.spectrum.relative, 1, EPSILON),
                "ε-rank of a head's W_Q": fmean(head.ranks[0] for head in heads),
                "qk loss": losses.get("qk", 0.0),
                "vo loss": losses.get("vo", 0.0),
                "loss": sum(losses.values()) / sensitivity.base_loss,
            }
        )
    return pd.DataFrame(rows)


def coefficients(frame: pd.DataFrame) -> pd.DataFrame:
    """Spearman's coefficient of each predictor with the measured loss, over blocks."""
    predictors = ["advised rank", "advised rank, m = 1", "ε-rank of a head's W_Q"]
    rows = []
    for model, every in frame.groupby("model", sort=False):
        long = every[~every["block"].str.startswith("decoder")]  # decoders may read one position
        for kind, blocks in (("all", every), ("encoder and cross", long)):
            for name in predictors:
                value = spearman(list(blocks[name]), list(blocks["loss"]))
                rows.append({"model": model, "blocks": kind, "predictor": name, "ρ": value})
    return pd.DataFrame(rows)


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md")
    parser.add_argument("--model", action="append", help="default: reference/bolt, reference/t5")
    parser.add_argument("--quick", action="store_true", help="fewer windows")
    arguments = parser.parse_args()
    models = arguments.model or ["reference/bolt", "reference/t5"]
    windows = 16 if arguments.quick else 64
    frame = pd.concat([blocks_of(model, windows) for model in models], ignore_index=True)
    text = plain_table(frame, 4) + "\n" + plain_table(coefficients(frame))
    write_tables(Path(arguments.output), frame, text)
    print(text)


if __name__ == "__main__":
    main()
