"""Is a larger model, compressed, better than the next smaller one?

    tscompress pretrain recipes/pretrain/bolt-mini.yaml --output results/bolt-mini
    python eval/family.py --output eval/results/family-bolt --larger results/bolt-mini/model \\
        --smaller reference/bolt

and, after t5-mini.yaml, --output eval/results/family-t5 --larger results/t5-mini/model --smaller
reference/t5 --max-series 100.

The larger model, as it is and folded to several sizes, against a smaller one trained on the
same data and steps: ratios of WQL, SQL and MASE on the offline suite with 95 % intervals (paired
bootstrap over series), of parameters, and of latency, for which all models take turns in one
process. No training after the cut; calibration on the default series.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from fold import RATIOS, quality, with_interval
from methods import WORKLOADS
from output import write_tables
from rich.console import Console

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.checkpoints.load import cast_parameters_, load
from tscompress.data.suites import load_suite
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

#: Sizes of heads, and shares of hidden units.
FOLDED = ((16, 0.5), (8, 0.25), (4, 0.125))


def measure(larger: str, smaller: str, max_series: int | None) -> pd.DataFrame:
    """A row for the larger model and each of its folded ones."""
    config = EvaluationConfig(max_series=max_series, batch_size=64)
    datasets = list(load_suite(config.suite, max_series))
    models = {"as it is": load(larger, dtype="float32")}
    for head_size, ff_ratio in FOLDED:
        folded = tscompress.compress(larger, rank=head_size, ff_ratio=ff_ratio)
        cast_parameters_(folded.model, torch.float32)
        models[f"d_kv {head_size}, d_ff {ff_ratio:.1%}"] = folded
    reference = load(smaller, dtype="float32")
    scores = score(reference.forecaster, "smaller", config, cache=ScoreCache())
    timed = [("smaller", reference.forecaster), *((n, m.forecaster) for n, m in models.items())]
    times = bench(timed, WORKLOADS[reference.family], measure_macs=False)
    rows = []
    for name, loaded in models.items():
        low, high = times.latency_ratio_interval(name) or (float("nan"), float("nan"))
        ratios = times.ratios(name)
        rows.append({
            "model": name,
            "parameters": ratios["parameters"],
            "latency": ratios["latency_ms"],
            "latency low": low,
            "latency high": high,
            **quality(score(loaded.forecaster, name, config), scores, datasets),
        })  # fmt: skip
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the smaller model, 95 % intervals."""
    lines = [
        f"| the larger model | parameters | latency | {' | '.join(RATIOS)} |",
        f"|---|--:|--:{'|--:' * len(RATIOS)}|",
    ]
    for row in frame.to_dict("records"):
        latency = with_interval(row, "latency", 2)
        metrics = (with_interval(row, metric) for metric in RATIOS)
        lines.append(
            f"| {row['model']} | {row['parameters']:.1%} | {latency} | {' | '.join(metrics)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv and .md")
    parser.add_argument("--larger", required=True, help="a directory or a name")
    parser.add_argument("--smaller", required=True, help="a directory or a name")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    arguments = parser.parse_args()
    frame = measure(arguments.larger, arguments.smaller, arguments.max_series)
    table = markdown(frame)
    write_tables(arguments.output, frame, table)
    Console().print(table, markup=False)


if __name__ == "__main__":
    main()
