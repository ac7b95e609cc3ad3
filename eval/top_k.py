"""How many tokens Chronos-T5 should sample from, on synthetic series that training never saw.

    python eval/top_k.py [--model reference/t5] [--series 512]

Prints the median over series of WQL (raw samples, levels 0.1 to 0.9), relative to the first
value of top_k. The series are synthetic, of another seed than the recipes', so that no evaluation
dataset takes part in the choice.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from tscompress.checkpoints.load import load
from tscompress.data.synthetic import SyntheticCorpus

TOP_K = (50, 100, 200, 400, 800, 4096)
LEVELS = torch.linspace(0.1, 0.9, 9)
CONTEXT, HORIZON, BATCH_SIZE = 120, 18, 32


def weighted_quantile_loss(samples: torch.Tensor, target: torch.Tensor) -> float:
    """Median over series of the WQL of ``samples`` ``[N, S, H]`` for ``target`` ``[N, H]``."""
    quantiles = torch.quantile(samples, LEVELS, dim=1)  # [9, N, H]
    error = target - quantiles
    loss = 2 * torch.maximum(LEVELS[:, None, None] * error, (LEVELS[:, None, None] - 1) * error)
    return float((loss.mean(0).sum(-1) / target.abs().sum(-1).clamp_min(1e-9)).median())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="reference/t5")
    parser.add_argument("--series", type=int, default=512)
    arguments = parser.parse_args()
    pipeline = load(arguments.model, dtype="float32").forecaster
    rng = np.random.default_rng(20_000)
    series = torch.from_numpy(SyntheticCorpus().sample(rng, arguments.series, CONTEXT + HORIZON))
    context, target = series[:, :CONTEXT], series[:, CONTEXT:]
    scores = {}
    for top_k in TOP_K:
        torch.manual_seed(0)
        parts = [
            pipeline.predict(chunk, prediction_length=HORIZON, top_k=top_k)
            for chunk in context.split(BATCH_SIZE)
        ]
        samples = torch.cat(parts)  # [N, S, H]
        scores[top_k] = weighted_quantile_loss(samples, target)
        print(f"top_k {top_k:5d}: WQL {scores[top_k] / scores[TOP_K[0]]:.4f}")


if __name__ == "__main__":
    main()
