"""Folding, truncated SVD and activation-aware SVD on the reference checkpoints (paper Table 2).

    python eval/methods.py --output eval/results/methods [--max-series 100] [--model reference/bolt]

Each row is one compressed model against its original: the share of attention parameters kept, the
ratios of WQL and MASE on the offline suite (Chronos-T5 with common random numbers), and the ratio
of latencies of the two models taking turns in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

import tscompress
from tscompress.api import score
from tscompress.evaluation import SEASONAL_NAIVE, relative
from tscompress.files import write_text_atomically
from tscompress.latency import Workload, bench
from tscompress.loading import load
from tscompress.recipe import EvaluationConfig

RATIOS = (0.5, 0.25, 0.125, 0.0625)
METHODS = ("fold", "svd", "activation-svd")
HEAD_SIZE = 64
WORKLOADS = {
    "chronos-bolt": Workload(batch_size=32, context_length=512, horizon=64, repeats=15, warmup=3),
    "chronos-t5": Workload(
        batch_size=4, context_length=256, horizon=16, num_samples=20, repeats=9, warmup=2
    ),
}


def measure(
    model: str, methods: Sequence[str], max_series: int | None, console: Console
) -> list[dict[str, Any]]:
    """Rows of every method and ratio, for one model; the first is the original itself."""
    config = EvaluationConfig(max_series=max_series, batch_size=64)
    original = load(model, dtype="float32")
    naive = score(SEASONAL_NAIVE, SEASONAL_NAIVE, config)
    dense = score(original.forecaster, model, config)
    against_naive = relative(dense, naive)
    rows: list[dict[str, Any]] = [
        {"model": model, "method": "dense", "attention": 1.0, "WQL": 1.0, "MASE": 1.0,
         "latency": 1.0, "parameters": 1.0,
         "WQL / seasonal naive": against_naive["WQL"],
         "MASE / seasonal naive": against_naive["MASE"]},
    ]  # fmt: skip
    for method in methods:
        for ratio in RATIOS:
            # With fold the share of attention that stays is that of the head size.
            size = {"rank": round(ratio * HEAD_SIZE)} if method == "fold" else {"budget": ratio}
            compressed = tscompress.compress(model, method=method, **size)
            compressed.model.float()
            result = score(compressed.forecaster, method, config)
            quality, quality_naive = relative(result, dense), relative(result, naive)
            timed = bench(
                [("original", original.forecaster), ("compressed", compressed.forecaster)],
                WORKLOADS[original.family],
                measure_macs=False,
            )
            cost = timed.ratios("compressed")
            assert compressed.plan is not None
            low, high = timed.latency_ratio_interval("compressed") or (float("nan"),) * 2
            rows.append(
                {
                    "model": model,
                    "method": method,
                    "attention": compressed.plan.attention_parameter_ratio,
                    "WQL": quality["WQL"],
                    "MASE": quality["MASE"],
                    "latency": cost["latency_ms"],
                    "latency low": low,
                    "latency high": high,
                    "parameters": cost["parameters"],
                    "WQL / seasonal naive": quality_naive["WQL"],
                    "MASE / seasonal naive": quality_naive["MASE"],
                }
            )
            console.print({k: round(v, 4) if isinstance(v, float) else v
                           for k, v in rows[-1].items()})  # fmt: skip
    return rows


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the original, latency with its 95 % interval."""
    lines = [
        "| method | attention | parameters | WQL | MASE | latency (95 %) "
        "| WQL / naive | MASE / naive |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        latency = "1"
        if row["method"] != "dense":
            latency = f"{row['latency']:.2f} ({row['latency low']:.2f}–{row['latency high']:.2f})"
        lines.append(
            f"| {row['method']} | {row['attention']:.2%} | {row['parameters']:.1%} | "
            f"{row['WQL']:.4f} | {row['MASE']:.4f} | {latency} | "
            f"{row['WQL / seasonal naive']:.3f} | {row['MASE / seasonal naive']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv and .md")
    parser.add_argument("--model", action="append", help="default: both references")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    arguments = parser.parse_args()
    console = Console()
    for model in arguments.model or ["reference/bolt", "reference/t5"]:
        frame = pd.DataFrame(
            measure(model, arguments.method or METHODS, arguments.max_series, console)
        )
        stem = f"{arguments.output}-{model.rsplit('/', 1)[-1]}"
        write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
        write_text_atomically(Path(f"{stem}.md"), markdown(frame))
        console.print(markdown(frame))


if __name__ == "__main__":
    main()
