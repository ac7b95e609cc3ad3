"""Folding and factoring on the reference checkpoints (paper Table 2), in one run.

    python eval/methods.py --output eval/results/methods [--max-series 100] [--model reference/bolt]

Each row is one compressed model against its original: the share of attention parameters kept, the
ratios of WQL and MASE on the offline suite with 95 % intervals (paired bootstrap over series;
Chronos-T5 with common random numbers), and the ratio of latencies, for which all models take turns
in one process. `fold` has one head size everywhere, a plain checkpoint; `fold by block` as many
parameters, shared out among blocks, queries and values by what each was measured to cost, a
factored one; `svd` and `activation-svd` have two factors a layer. A second table sets each folded
model beside what else is no slower, and a figure shows latency against quality. Everything computes
in float32 on weights as they are stored. Scores are written as they are there, and a run that is
started again takes them from the CSV.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from fold import BlockPlanner, quality, with_interval
from rich.console import Console

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.files import write_text_atomically
from tscompress.plotting import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

RATIOS = (0.5, 0.25, 0.125, 0.0625)
BY_BLOCK = "fold by block"
METHODS = ("fold", BY_BLOCK, "svd", "activation-svd")
HEAD_SIZE = 64
#: Latencies closer than this are called equal.
TOLERANCE = 0.02
WORKLOADS = {
    "chronos-bolt": Workload(batch_size=32, context_length=512, horizon=64, repeats=15, warmup=3),
    "chronos-t5": Workload(
        batch_size=4, context_length=256, horizon=16, num_samples=20, repeats=9, warmup=2
    ),
}


def compressed_models(
    name: str, original: LoadedModel, methods: Sequence[str]
) -> Iterator[tuple[str, float, tscompress.CompressedModel]]:
    """Every method at every share of the attention parameters."""
    planner = (
        BlockPlanner(original, CalibrationConfig(num_series=128)) if BY_BLOCK in methods else None
    )
    for method in methods:
        for ratio in RATIOS:
            size = round(ratio * HEAD_SIZE)
            if method == BY_BLOCK:
                assert planner is not None
                model, blocks = original.model, original.architecture
                plan = planner.plan(fold_plan(model, blocks, qk=size, vo=size))
                compressed = tscompress.compress(name, plan=plan)
            elif method == "fold":
                compressed = tscompress.compress(name, method=method, rank=size)
            else:
                compressed = tscompress.compress(name, method=method, budget=ratio)
            cast_parameters_(compressed.model, compressed.stored_dtype)
            compressed.model.float()
            yield method, ratio, compressed


def measure(
    name: str, methods: Sequence[str], max_series: int | None, path: Path, console: Console
) -> pd.DataFrame:
    """A row for every method and ratio; the first is the original itself."""
    config = EvaluationConfig(max_series=max_series, batch_size=64)
    original = load(name, dtype="float32")
    scores = score(original.forecaster, name, config, cache=ScoreCache())
    known = pd.read_csv(path).to_dict("records") if path.exists() else []
    rows: list[dict[str, Any]] = [
        {"model": name, "method": "dense", "budget": 1.0, "attention": 1.0, "WQL": 1.0, "MASE": 1.0}
    ]
    models = [("dense", original.forecaster)]
    for method, ratio, compressed in compressed_models(name, original, methods):
        models.append((f"{method} {ratio}", compressed.forecaster))
        row = next((r for r in known if (r["method"], r["budget"]) == (method, ratio)), None)
        if row is None:
            assert compressed.plan is not None
            share = compressed.plan.attention_parameter_ratio
            found = quality(score(compressed.forecaster, method, config), scores)
            row = {"model": name, "method": method, "budget": ratio, "attention": share, **found}
            console.print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        rows.append(row)
        write_text_atomically(path, pd.DataFrame(rows).to_csv(index=False))
    timed = bench(models, WORKLOADS[original.family], measure_macs=False)
    for row, (label, _) in zip(rows, models, strict=True):
        cost = timed.ratios(label)
        low, high = timed.latency_ratio_interval(label) or (1.0, 1.0)
        row |= {"latency": cost["latency_ms"], "latency low": low, "latency high": high}
        row["parameters"] = cost["parameters"]
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """Both tables as GitHub shows them; ratios to the original, latency with its 95 % interval."""
    lines = [
        "| method | attention | parameters | WQL (95 %) | MASE (95 %) | latency (95 %) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        latency = wql = mase = "1"
        if row["method"] != "dense":
            wql, mase = with_interval(row, "WQL"), with_interval(row, "MASE")
            latency = with_interval(row, "latency", 2)
        lines.append(
            f"| {row['method']} | {row['attention']:.2%} | {row['parameters']:.1%} | "
            f"{wql} | {mase} | {latency} |"
        )
    return "\n".join(lines) + "\n\n" + at_equal_latency(frame)


def at_equal_latency(frame: pd.DataFrame) -> str:
    """For each folded model the best of every other method that is no slower."""
    others = [method for method in METHODS if method != "fold" and method in set(frame["method"])]
    lines = [
        "Lowest WQL, and its MASE, among the sizes that are no slower than fold "
        f"(within {TOLERANCE:.0%} of the original's time):",
        "",
        "| fold, attention | latency | fold | " + " | ".join(others) + " |",
        "|--:|--:|--:|" + "--:|" * len(others),
    ]
    for fold in frame[frame["method"] == "fold"].to_dict("records"):
        cells = [f"{fold['WQL']:.4f} / {fold['MASE']:.4f}"]
        for method in others:
            fast = frame["latency"] <= fold["latency"] + TOLERANCE
            rivals = frame[(frame["method"] == method) & fast].sort_values("WQL")
            cell = "none as fast"
            if len(rivals):
                best = rivals.iloc[0]
                cell = f"{best['WQL']:.4f} / {best['MASE']:.4f} ({best['attention']:.1%})"
            cells.append(cell)
        lines.append(f"| {fold['attention']:.1%} | {fold['latency']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Latency against WQL and against MASE, a line for each method."""
    drawn = new_figure(8.6, 3.4)
    panels = drawn.subplots(1, 2)
    for axes, metric in zip(panels, ("WQL", "MASE"), strict=True):
        style_axes(axes, xlabel="latency, ratio to dense", ylabel=f"{metric}, ratio to dense")
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.plot([1], [1], "*", color="black", ms=10, label="dense")
        for method, color, marker in zip(METHODS, PALETTE, MARKERS, strict=False):
            rows = frame[frame["method"] == method]
            if len(rows):
                axes.plot(
                    rows["latency"], rows[metric], color=color, marker=marker, ms=5, label=method
                )
    legend_beside(drawn, panels[1])
    drawn.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv, .md and .png")
    parser.add_argument("--model", action="append", help="default: both references")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    arguments = parser.parse_args()
    console = Console()
    for model in arguments.model or ["reference/bolt", "reference/t5"]:
        stem = f"{arguments.output}-{model.rsplit('/', 1)[-1]}"
        methods = arguments.method or METHODS
        path = Path(f"{stem}.csv")
        frame = measure(model, methods, arguments.max_series, path, console)
        write_text_atomically(path, frame.to_csv(index=False))
        write_text_atomically(Path(f"{stem}.md"), markdown(frame))
        figure(frame, Path(f"{stem}.png"))
        console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
