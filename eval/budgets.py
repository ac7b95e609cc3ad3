"""Sizes by layer beside the same sizes in all layers, within the same budget, without training.

    python eval/budgets.py --output eval/results/budgets --models results/budgets \\
        [--model reference/bolt] [--budget parameters=0.4 --budget macs=0.3] [--arm uniform]

Four ways to meet each budget, chosen by the same search from measured sensitivities (`tscompress
compress MODEL --budget parameters=0.4`) and folded on the same calibration series: `uniform`, the
same sizes in all layers, of which the width of the residual stream is one; `uniform, whole width`,
the same with the stream as it was (`--keep-width`); `by layer`, sizes of their own for each layer,
queries and values, of which the width is one, too (`--layout factored`); and `by layer, whole
width`, such sizes with the stream as it was. The uniform ones are stock checkpoints, the others
need tscompress.

Every row is one of them, as it was saved, against its original: the ratios of WQL, SQL and MASE on
the offline suite with 95 % intervals (paired bootstrap over series), the share of the original's
skill that is kept (`tscompress probe`), the rise of the forecast loss on held-out synthetic
windows, and the ratios of parameters, of multiply-accumulates, of the bytes of the checkpoint, of
peak memory (each in a process of its own), and of latency and CPU time, for which all models take
turns in one process; of one thread the second is the first on a machine without other work.
Everything computes in float32 on weights as they are stored.

Whether the search sees what is asked of its result: `--draw` draws other calibration series;
`--planned-on` has sizes chosen on another source, `real` or `synthetic`, and on
`--planned-series` of it, and folded as ever. No source holds a
series of an evaluation suite.
Scores are written as they are there; a run that is started again takes them from the .csv, and
models from `--models`, if original, options, code and versions are the same.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from output import parser_of, rounded, rows_with, write_tables
from rich.console import Console
from testbed import HELD_OUT, KEPT, RATIOS, WORKLOADS, Testbed, parts_in, short_name, with_interval

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.results import BenchResult
from tscompress.budget.plan_within_budget import plan_within_budget
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import (
    MIXED,
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.batch import ForecastBatch
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.io.files import write_text_atomically
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import Budget, PlannedSchedule, parse_budget

#: What each way lets the search choose.
ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "uniform, whole width": {"keep_width": True},
    "by layer": {"layout": "factored"},
    "by layer, whole width": {"layout": "factored", "keep_width": True},
}
BUDGETS = ("parameters=0.6", "parameters=0.4", "parameters=0.25", "macs=0.3")
REAL = "real"
#: On a machine with other work; the medians of fewer rounds move by a few percent.
ROUNDS = 31
#: Columns of costs: of the table, and of a bench.
COSTS = {
    "parameters": "parameters",
    "MACs": "macs",
    "bytes": "bytes_on_disk",
    "memory": "peak_memory_bytes",
}
TIMES = ("latency", "CPU time")


#: Of a row: a budget, and a way to meet it.
Key = tuple[str, str]


@dataclass(frozen=True)
class Trial:
    """One way to meet one budget."""

    budget: Budget
    arm: str

    @property
    def key(self) -> Key:
        return str(self.budget), self.arm

    @property
    def schedule(self) -> PlannedSchedule:
        return PlannedSchedule(budget=self.budget, **ARMS[self.arm])


def planning_windows(bed: Testbed, source: str, count: int | None = None) -> list[ForecastBatch]:
    """``count`` windows of a source that sensitivities are measured on; None: as in calibration."""
    config = bed.calibration if count is None else _changed(bed.calibration, num_series=count)
    if source == REAL:
        return calibration_batches(bed.original, config, training_series(TRAINING_COLLECTIONS))
    return calibration_batches(bed.original, _changed(config, source=source))


def _changed(config: CalibrationConfig, **changes: Any) -> CalibrationConfig:
    return config.model_copy(update=changes)


def planned(bed: Testbed, trial: Trial, windows: Sequence[ForecastBatch]) -> Plan:
    """Sizes as `compress --budget` chooses them, for the `predict` call that is timed."""
    original = bed.original
    fold, workload = FoldConfig().resolved(original), WORKLOADS[original.family]
    return plan_within_budget(original, trial.schedule, windows, fold, workload)


def compressed(
    bed: Testbed, trial: Trial, windows: Sequence[ForecastBatch], path: Path
) -> LoadedModel:
    """The model at ``path``, made first if there is none."""
    if not path.exists():
        plan = planned(bed, trial, windows)
        tscompress.save(
            tscompress.compress(bed.model, plan=plan, calibration=bed.calibration), path
        )
    return load(path, dtype="float32")


def measure(
    bed: Testbed,
    trials: Sequence[Trial],
    windows: Sequence[ForecastBatch],
    models: Path,
    table: Path,
    console: Console,
) -> pd.DataFrame:
    """The table: a row for every trial, and those of its settings that it had before.

    Costs come at the end.
    """
    settings = bed.settings("budgets", "testbed")
    rows = rows_with(table, ("SQL", "own skill"), {settings})
    found = {(row["budget"], row["arm"]): row for row in rows}
    paths = {
        trial.key: models / settings / re.sub("[,:]", "", "-".join(trial.key)).replace(" ", "-")
        for trial in trials
    }
    for trial in trials:
        small = compressed(bed, trial, windows, paths[trial.key])
        if trial.key not in found:
            plan = Plan.load(paths[trial.key] / "plan.json")
            row = {"model": bed.model, "budget": trial.key[0], "arm": trial.arm}
            row |= {"sizes": sizes_text(plan), **bed.row(small.forecaster, str(trial.key))}
            found[trial.key] = row | {"loss": bed.loss_rise(small), "settings": settings}
            console.print(rounded(found[trial.key]))
            write_text_atomically(table, pd.DataFrame(found.values()).to_csv(index=False))
    for key, costs in costs_of(bed, paths).items():
        found[key] |= costs
    others = [key for key in found if key not in paths]
    return pd.DataFrame([found[key] for key in (*paths, *others)])


def costs_of(bed: Testbed, paths: Mapping[Key, Path]) -> dict[Key, dict[str, float]]:
    """Costs of saved models as ratios to the original's, which takes turns with them."""
    workload = WORKLOADS[bed.original.family].model_copy(update={"repeats": ROUNDS})
    models = {bed.model: bed.model} | {str(key): path for key, path in paths.items()}
    timed = bench(models, workload, measure_memory=True)
    worked = bench(models, workload, measure_macs=False, clock=time.process_time)
    found = {}
    for key in paths:
        ratios = timed.ratios(str(key))
        costs = {column: ratios[measure] for column, measure in COSTS.items()}
        found[key] = costs | _time("latency", timed, key) | _time("CPU time", worked, key)
    return found


def _time(column: str, timed: BenchResult, key: Key) -> dict[str, float]:
    """Ratio of the medians, and the ends of its interval."""
    low, high = timed.latency_ratio_interval(str(key)) or (math.nan, math.nan)
    ratio = timed.ratios(str(key))["latency_ms"]
    return {column: ratio, f"{column} low": low, f"{column} high": high}


def sizes_text(plan: Plan) -> str:
    """``d_model 160, d_kv 48, d_ff 25%``; of sizes by layer the smallest and the largest."""
    words = [] if plan.width is None else [f"d_model {plan.width.kept}"]
    qk, vo = ([getattr(head, name) for head in plan.heads] for name in ("qk_size", "vo_size"))
    units = _range([100 * entry.kept / entry.d_ff for entry in plan.hidden])
    if plan.uniform_sizes is None:
        words += [f"queries and keys {_range(qk)}", f"values {_range(vo)}"]
    else:
        words.append(f"d_kv {_range(qk)}")
    words.append(f"d_ff {units}%")
    if plan.embedding is not None:
        words.append(f"embedding of rank {plan.embedding.rank}")
    return ", ".join(words)


def _range(sizes: Sequence[float]) -> str:
    """``8``, or ``2–8`` for sizes that differ."""
    return "–".join(dict.fromkeys(f"{size:.4g}" for size in (min(sizes), max(sizes))))


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the original."""
    parts = parts_in(frame)
    measured = (*TIMES, *RATIOS)
    lines = [
        f"| budget | | sizes | {' | '.join(COSTS)} | {' (95 %) | '.join(measured)} (95 %) | "
        f"skill kept | {''.join(f'of {part} | ' for part in parts)}loss |",
        f"|---|---|---|{'--:|' * (len(COSTS) + len(measured) + len(parts) + 2)}",
    ]
    for row in frame.to_dict("records"):
        cells = [f"{row[cost]:.1%}" for cost in COSTS]
        cells += [with_interval(row, name, 2) for name in TIMES]
        cells += [with_interval(row, name, 3 if name == "skill" else 4) for name in KEPT]
        cells += [with_interval(row, part, 3) for part in parts]
        cells.append(f"{row['loss']:+.4f}")
        lines.append(f"| {row['budget']} | {row['arm']} | {row['sizes']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True, device=True)
    parser.add_argument("--model", default="reference/bolt", help="default: reference/bolt")
    parser.add_argument(
        "--models", type=Path, required=True, help="a directory for the compressed models"
    )
    parser.add_argument(
        "--budget", action="append", type=parse_budget, help=f"default: {', '.join(BUDGETS)}"
    )
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all")
    parser.add_argument("--draw", type=int, default=0, help="of the calibration series: a seed")
    parser.add_argument(
        "--planned-on", choices=(MIXED, SYNTHETIC, REAL), default=MIXED,
        help="series that sizes are chosen on; default: mixed, those that are folded on",
    )  # fmt: skip
    parser.add_argument("--planned-series", type=int, help="how many; default: as in calibration")
    arguments = parser.parse_args()
    if arguments.draw == HELD_OUT.seed:
        parser.error(f"--draw {HELD_OUT.seed} is that of the held-out windows; take another.")
    arms = arguments.arm or ARMS
    suffix = "" if arguments.planned_on == MIXED else f"-{arguments.planned_on}"
    suffix += f"-{arguments.planned_series}" if arguments.planned_series else ""
    suffix += f"-draw{arguments.draw}" if arguments.draw else ""
    name = f"{short_name(arguments.model)}{suffix}"
    calibration = CalibrationConfig(seed=arguments.draw)
    bed = Testbed(
        arguments.model, arguments.max_series, calibration=calibration, device=arguments.device
    )
    budgets = arguments.budget or [parse_budget(text) for text in BUDGETS]
    trials = [Trial(budget, arm) for budget in budgets for arm in arms]
    windows = planning_windows(bed, arguments.planned_on, arguments.planned_series)
    stem, console = f"{arguments.output}-{name}", Console()
    models = arguments.models / name
    frame = measure(bed, trials, windows, models, Path(f"{stem}.csv"), console)
    table = markdown(frame.head(len(trials)))  # without rows of earlier runs
    write_tables(stem, frame, table)
    console.print(table, markup=False)


if __name__ == "__main__":
    main()
