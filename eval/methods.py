"""Folding and factoring on the reference checkpoints (paper Table 2), in one run.

    python eval/methods.py --output eval/results/methods [--max-series 100] [--model reference/bolt]

Each row is one compressed model against its original: the share of attention parameters kept, the
ratios of WQL, SQL and MASE on the offline suite with 95 % intervals (paired bootstrap over series;
Chronos-T5 with common random numbers), the share of the original's skill that is kept (`tscompress
probe`), and the ratio of latencies, for which all models take turns in one process. `fold` has one
head size everywhere, a stock checkpoint; `fold by block` as many parameters, shared out among
blocks, queries and values by what each was measured to cost, a factored one; `svd` and
`activation-svd` have two factors a layer. A second table sets each folded model beside what else is
no slower, and a figure shows latency against quality. Everything computes in float32 on weights as
they are stored. Scores are written as they are there, and a run that is started again takes them
from the CSV, if model, options, code and versions are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from fold import BlockPlanner
from output import parser_of, rounded, rows_with, write_tables
from panels import quality_panels
from rich.console import Console
from testbed import KEPT, WORKLOADS, Testbed, as_stored, short_name, with_interval

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.io.files import write_text_atomically
from tscompress.plotting import MARKERS, PALETTE, new_figure

SHARES = (0.75, 0.5, 0.25, 0.125)
BY_BLOCK = "fold by block"
METHODS = ("fold", BY_BLOCK, "svd", "activation-svd")
HEAD_SIZE = 64
#: Latencies closer than this are called equal.
TOLERANCE = 0.02
#: A ratio from which a figure is drawn by orders of magnitude, and where its ticks are.
FAR, TICKS = 5, (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def compressed_models(
    bed: Testbed, methods: Sequence[str]
) -> Iterator[tuple[str, float, tscompress.CompressedModel]]:
    """Every method at every share of the attention parameters."""
    planner = (
        BlockPlanner(bed.original, CalibrationConfig(num_series=128))
        if BY_BLOCK in methods
        else None
    )
    for method in methods:
        for ratio in SHARES:
            size = round(ratio * HEAD_SIZE)
            if method == BY_BLOCK:
                assert planner is not None
                model, blocks = bed.original.model, bed.original.architecture
                plan = planner.plan(fold_plan(model, blocks, qk=size, vo=size))
                compressed = tscompress.compress(bed.model, plan=plan)
            elif method == "fold":
                compressed = tscompress.compress(bed.model, method=method, rank=size)
            else:
                compressed = tscompress.compress(bed.model, method=method, budget=ratio)
            as_stored(compressed)
            yield method, ratio, compressed


def measure(bed: Testbed, methods: Sequence[str], path: Path, console: Console) -> pd.DataFrame:
    """A row for every method and ratio; the first is the original itself."""
    settings = bed.settings("methods", "fold", "testbed")
    known = rows_with(path, ("SQL", "own skill"), [settings])
    dense = {"model": bed.model, "method": "dense", "budget": 1.0, "attention": 1.0}
    rows: list[dict[str, Any]] = [dense | bed.original_row() | {"settings": settings}]
    models = [("dense", bed.original.forecaster)]
    for method, ratio, compressed in compressed_models(bed, methods):
        models.append((f"{method} {ratio}", compressed.forecaster))
        row = next((r for r in known if (r["method"], r["budget"]) == (method, ratio)), None)
        if row is None:
            assert compressed.plan is not None
            share = compressed.plan.attention_parameter_ratio
            row = {"model": bed.model, "method": method, "budget": ratio, "attention": share}
            row |= bed.row(compressed.forecaster, method) | {"settings": settings}
            console.print(rounded(row))
        rows.append(row)
        found = {(r["method"], r["budget"]) for r in rows}
        later = [r for r in known if (r["method"], r["budget"]) not in found]
        write_text_atomically(path, pd.DataFrame([*rows, *later]).to_csv(index=False))
    timed = bench(models, WORKLOADS[bed.original.family], measure_macs=False)
    for row, (label, _) in zip(rows, models, strict=True):
        cost = timed.ratios(label)
        low, high = timed.latency_ratio_interval(label) or (1.0, 1.0)
        row |= {"latency": cost["latency_ms"], "latency low": low, "latency high": high}
        row["parameters"] = cost["parameters"]
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """Both tables as GitHub shows them; ratios to the original, latency with its 95 % interval."""
    lines = [
        "| method | attention | parameters | WQL (95 %) | SQL (95 %) | MASE (95 %) | "
        "skill kept (95 %) | of seasons | latency (95 %) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        ratios = [with_interval(row, name, 3 if name == "skill" else 4) for name in KEPT]
        ratios += [f"{with_interval(row, 'seasons', 3)}", with_interval(row, "latency", 2)]
        if row["method"] == "dense":
            ratios = ["1"] * len(ratios)
        lines.append(
            f"| {row['method']} | {row['attention']:.2%} | {row['parameters']:.1%} | "
            f"{' | '.join(ratios)} |"
        )
    return "\n".join(lines) + "\n\n" + at_equal_latency(frame)


def at_equal_latency(frame: pd.DataFrame) -> str:
    """For each folded model the best of every other method that is no slower."""
    others = [method for method in METHODS if method != "fold" and method in set(frame["method"])]
    lines = [
        "Lowest WQL, its MASE and the skill kept, among the sizes that are no slower than fold "
        f"(within {TOLERANCE:.0%} of the original's time):",
        "",
        "| fold, attention | latency | fold | " + " | ".join(others) + " |",
        "|--:|--:|--:|" + "--:|" * len(others),
    ]
    for fold in frame[frame["method"] == "fold"].to_dict("records"):
        cells = [_measures(fold)]
        for method in others:
            fast = frame["latency"] <= fold["latency"] + TOLERANCE
            rivals = frame[(frame["method"] == method) & fast].sort_values("WQL")
            cell = "none as fast"
            if len(rivals):
                best = rivals.iloc[0]
                cell = f"{_measures(best)} ({best['attention']:.1%})"
            cells.append(cell)
        lines.append(f"| {fold['attention']:.1%} | {fold['latency']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measures(row: Any) -> str:
    return f"{row['WQL']:.4f} / {row['MASE']:.4f} / {row['skill']:.3f}"


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Latency against WQL, MASE and the skill kept, a line for each method."""
    drawn = new_figure(12, 3.4)
    for metric, axes in quality_panels(drawn):
        axes.plot([1], [1], "*", color="black", ms=10, label="dense")
        for method, color, marker in zip(METHODS, PALETTE, MARKERS, strict=False):
            rows = frame[frame["method"] == method]
            if len(rows):
                axes.plot(
                    rows["latency"], rows[metric], color=color, marker=marker, ms=5, label=method
                )
        if metric != "skill" and frame[metric].max() > FAR:
            axes.set_yscale("log")
            shown = [tick for tick in TICKS if tick < 1.2 * frame[metric].max()]
            axes.set_yticks(shown, labels=[f"{tick:g}" for tick in shown])
            axes.minorticks_off()
    drawn.savefig(path, dpi=160)


def main() -> None:
    parser = parser_of(__doc__, ".csv, .md and .png", max_series=True, device=True)
    parser.add_argument("--model", action="append", help="default: both references")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    arguments = parser.parse_args()
    console = Console()
    for model in arguments.model or ["reference/bolt", "reference/t5"]:
        stem = f"{arguments.output}-{short_name(model)}"
        bed = Testbed(model, arguments.max_series, device=arguments.device)
        frame = measure(bed, arguments.method or METHODS, Path(f"{stem}.csv"), console)
        write_tables(stem, frame, markdown(frame))
        figure(frame, Path(f"{stem}.png"))
        console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
