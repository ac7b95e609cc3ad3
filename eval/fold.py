"""Folding on the reference checkpoints: what each switch is worth, and what each size costs.

    python eval/fold.py switches --output eval/results/fold-switches [--model reference/bolt]
    python eval/fold.py sizes --output eval/results/fold-sizes [--max-series 100]
    python eval/fold.py attention --output eval/results/fold-attention [--ratio 0.125]
    python eval/fold.py latent --output eval/results/fold-latent
    python eval/fold.py widths --output eval/results/fold-widths

`switches` folds each reference with one switch of `FoldConfig` (or of the calibration) changed at
a time, at sizes at which something is lost. `sizes` is the table of head sizes and hidden units.
`attention` folds one kind of attention block at a time, values or queries and keys, to see where
the loss sits, and then gives each block its own sizes at the same number of parameters. `latent`
folds cross-attention alone, into one latent of the encoder's output or into smaller heads.
`widths` are narrower residual streams. All but `switches` take any model with heads of 64.

Every row is one folded model against its original: the ratios of WQL and MASE on the offline suite,
with 95 % intervals (paired bootstrap over series; Chronos-T5 with common random numbers, and with
`--seeds 0,1,2` averaged over several draws), that of SQL, the loss of WQL with every series in
units of its seasonal error, the share of the original's skill that is kept (`tscompress probe`: of
all tasks, and of noise-free seasons), and the forecast loss on held-out synthetic windows (for
Chronos-T5 nats a token, for the others scaled pinball loss). Calibration is on synthetic and real
series, or on what `--source` says, drawn with `--draw`; of the real ones no evaluation suite holds
any. Both models compute in float32 on the weights as they are stored, which is bfloat16 for the
references.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from output import write_tables
from rich.console import Console

import tscompress
from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel
from tscompress.budget.forecast_loss import forecast_loss
from tscompress.budget.measure_sensitivity import measure_sensitivity
from tscompress.budget.search import choose_factored
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import (
    MIXED,
    OWN_SOURCES,
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.data.batch import ForecastBatch
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.suites import load_suite
from tscompress.evaluation.comparison import compare
from tscompress.evaluation.derived import scaled_quantile_losses
from tscompress.evaluation.results import METRICS, EvaluationResult
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.text import ratio_text
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import Budget
from tscompress.probing.measure import probe
from tscompress.probing.results import ProbeResult
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

REFERENCES = ("reference/bolt", "reference/t5")
#: What :func:`quality` gives, in the order of the tables.
RATIOS = ("WQL", "SQL", "MASE")
#: Head size and share of hidden units at which each reference loses something.
HARD = {"reference/bolt": (3, 0.125), "reference/t5": (8, 0.25)}
SIZES: tuple[tuple[int, float, int | None], ...] = (
    (32, 1.0, None), (16, 1.0, None), (8, 1.0, None), (4, 1.0, None), (64, 0.5, None),
    (64, 0.25, None), (32, 0.75, None), (16, 0.5, None), (8, 0.25, None),
)  # fmt: skip
#: Narrower streams: head size, share of hidden units, d_model (256 before).
WIDTHS: dict[str, tuple[tuple[int, float, int | None], ...]] = {
    "chronos-bolt": (
        (64, 1.0, 64), (64, 1.0, 32), (64, 1.0, 24), (8, 0.25, 64), (8, 0.25, 32), (4, 0.25, 24),
        (4, 0.125, 32), (4, 0.125, 24), (2, 0.0625, 24),
    ),
    "chronos-t5": (
        (64, 1.0, 192), (64, 1.0, 128), (16, 0.5, 192), (16, 0.5, 128), (16, 0.5, 96),
        (8, 0.25, 128), (8, 0.25, 96),
    ),
}  # fmt: skip
HELD_OUT = CalibrationConfig(source=SYNTHETIC, num_series=128, seed=7)


@dataclass(frozen=True)
class Trial:
    """One way to fold a model."""

    label: str
    plan: Plan
    fold: FoldConfig = field(default_factory=FoldConfig)
    calibration: CalibrationConfig | None = None


class Bed:
    """An original, its scores and its losses: what every trial is held against."""

    def __init__(
        self,
        model: str,
        max_series: int | None,
        console: Console,
        *,
        source: str = MIXED,
        draw: int = 0,
        seeds: Sequence[int] = (0,),
    ) -> None:
        self.model = model
        self.calibration = CalibrationConfig(source=source, seed=draw)
        self.console = console
        self.config = EvaluationConfig(max_series=max_series, batch_size=64)
        self.original = load(model, dtype="float32")
        self.held_out = calibration_batches(self.original, HELD_OUT)
        self.loss = mean_loss(self.original, self.held_out)
        self.seeds = seeds if self.original.family == "chronos-t5" else None
        self.scores = self.score(self.original, model)
        self.skills = probe(self.original.forecaster)
        self.datasets = list(load_suite(self.config.suite, max_series))

    def score(self, loaded: LoadedModel, label: str) -> EvaluationResult:
        return score(loaded.forecaster, label, self.config, seeds=self.seeds, cache=ScoreCache())

    def calibrated(self, **changes: Any) -> CalibrationConfig:
        """The calibration of this bed, but for ``changes``."""
        return self.calibration.model_copy(update=changes)

    def plan(self, head_size: int, ff_ratio: float, width: int | None = None) -> Plan:
        """The same sizes everywhere."""
        whole = fold_plan(self.original.model, self.original.architecture)
        return fold_plan(
            self.original.model,
            self.original.architecture,
            qk=head_size,
            vo=head_size,
            hidden={entry.name: round(ff_ratio * entry.d_ff) for entry in whole.hidden},
            width=width,
        )

    def rows(self, trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
        """One row a trial, as they are measured."""
        for trial in trials:
            folded = tscompress.compress(
                self.model,
                plan=trial.plan,
                fold=trial.fold,
                calibration=trial.calibration or self.calibration,
            )
            cast_parameters_(folded.model, torch.float32)
            result = self.score(folded, trial.label)
            before, after = trial.plan.parameters()
            row: dict[str, Any] = {
                "model": self.model,
                "trial": trial.label,
                "parameters": (folded_parameters(folded) / folded_parameters(self.original)),
                "planned layers": after / before,
                "attention": trial.plan.attention_parameter_ratio,
                **quality(result, self.scores, self.datasets),
                **skills_kept(probe(folded.forecaster), self.skills),
                "loss": mean_loss(folded, self.held_out) - self.loss,
            }
            self.console.print({k: _short(v) for k, v in row.items()})
            yield row


def quality(
    result: EvaluationResult,
    reference: EvaluationResult,
    datasets: Sequence[EvaluationDataset] = (),
) -> dict[str, float]:
    """Ratios of WQL and MASE, with ``datasets`` also of SQL, and the ends of 95 % intervals."""
    found = compare([reference, result]).models[0]
    ratios = {metric: getattr(found, metric) for metric in reversed(METRICS)}
    if datasets:
        pair = [scaled_quantile_losses(one, datasets) for one in (reference, result)]
        ratios["SQL"] = compare(pair).models[0].WQL
    columns: dict[str, float] = {}
    for metric, ratio in ratios.items():
        low, high = (float("nan") if end is None else end for end in (ratio.low, ratio.high))
        columns |= {metric: ratio.ratio, f"{metric} low": low, f"{metric} high": high}
    return columns


def skills_kept(after: ProbeResult, before: ProbeResult) -> dict[str, float]:
    """Share of the original's skill that is kept: of all tasks that it can do, and of seasons."""
    change = after.against(before)
    of = {group.group: group.kept for group in change.groups} | {"all": change.kept}
    return {
        name: float("nan") if kept is None else kept.value
        for name, kept in (("skill", of["all"]), ("seasons", of["seasons"]))
    }


def with_interval(row: Mapping[str, Any], metric: str, digits: int = 4) -> str:
    """``1.0021 (0.9987–1.0055)``."""
    return ratio_text(row[metric], row[f"{metric} low"], row[f"{metric} high"], digits)


def mean_loss(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> float:
    """Forecast loss of each observed target, over all batches."""
    sums, counts = zip(*(forecast_loss(loaded, batch) for batch in batches), strict=True)
    return float(sum(sums)) / sum(counts)


def folded_parameters(loaded: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in loaded.model.parameters())


def switch_trials(bed: Bed) -> list[Trial]:
    """The default, and every switch turned the other way.

    The git tag ``ablations-2026-11`` has the rows of switches that were removed since.
    """
    head_size, ff_ratio = HARD[bed.model]
    heads, hidden = bed.plan(head_size, 1.0), bed.plan(64, ff_ratio)
    switches: tuple[dict[str, Any], ...] = (
        {"refit": "layer"},
        {"refit": "none"},
        {"damping": 0.1},
    )
    if bed.original.family == "chronos-t5":
        switches += ({"continuations": "given"},)
    trials = [Trial(f"d_kv {head_size}", heads)]
    trials += [Trial(_label(head_size, s), heads, FoldConfig(**s)) for s in switches]
    trials += [
        Trial(f"d_kv {head_size}, {n} series", heads, calibration=bed.calibrated(num_series=n))
        for n in (64, 256, 1024)
    ]
    synthetic = bed.calibrated(source=SYNTHETIC)
    trials.append(Trial(f"d_kv {head_size}, source synthetic", heads, calibration=synthetic))
    of_hidden: tuple[dict[str, Any], ...] = (
        {},
        {"refit": "layer"},
        {"refit": "none"},
    )
    trials += [Trial(_label(f"{ff_ratio:.1%}", s), hidden, FoldConfig(**s)) for s in of_hidden]
    label = f"d_ff {ff_ratio:.1%}, source synthetic"
    trials.append(Trial(label, hidden, calibration=synthetic))
    return trials


def _label(size: object, switches: Mapping[str, Any]) -> str:
    what = f"d_kv {size}" if isinstance(size, int) else f"d_ff {size}"
    return ", ".join([what, *(f"{key} {value}" for key, value in switches.items())])


def size_trials(bed: Bed, sizes: Sequence[tuple[int, float, int | None]]) -> list[Trial]:
    """The table of sizes; by default the last three are the strengths of the recipes."""
    trials = []
    for head_size, ff_ratio, width in sizes:
        narrow = "" if width is None else f"d_model {width}, "
        label = f"{narrow}d_kv {head_size}, d_ff {_percent(ff_ratio)}"
        trials.append(Trial(label, bed.plan(head_size, ff_ratio, width)))
    return trials


def _percent(share: float) -> str:
    """``25%``, ``12.5%``, ``6.25%``."""
    return f"{100 * share:g}%"


def attention_trials(bed: Bed, ratio: float) -> list[Trial]:
    """Where the loss sits at one head size, and how sizes by block compare."""
    original = bed.original
    blocks = original.architecture.attention
    size = round(ratio * 64)
    trials = [Trial(f"all at {size}", bed.plan(size, 1.0))]
    for kind in dict.fromkeys(block.kind for block in blocks):
        small = {block.name: size for block in blocks if block.kind == kind}
        for role in ("qk", "vo"):
            sizes: dict[str, Any] = {role: small}
            plan = fold_plan(original.model, original.architecture, **sizes)
            trials.append(Trial(f"{kind} {role} at {size}", plan))
    if any(block.kind == "decoder" for block in blocks):
        # As many parameters: in T5 and Bolt decoder self-attention is a third of all blocks.
        uneven = {
            block.name: 2 * size if block.kind == "decoder" else size // 2 for block in blocks
        }
        plan = fold_plan(original.model, original.architecture, qk=uneven, vo=uneven)
        trials.append(Trial(f"decoder at {2 * size}, the rest at {size // 2}", plan))
    plan = BlockPlanner(original, bed.calibrated(num_series=128)).plan(trials[0].plan)
    trials.append(Trial("by block, as measured", plan))
    return trials


class BlockPlanner:
    """Head sizes by block, chosen by what each was measured to cost; hidden units stay."""

    def __init__(self, original: LoadedModel, calibration: CalibrationConfig) -> None:
        self.original = original
        batches = calibration_batches(original, calibration)
        found = measure_sensitivity(original, batches, fold=FoldConfig(), layers=False)
        whole = {"sizes": (), "losses": ()}
        parts = tuple(
            part.model_copy(update=whole) if part.kind == "hidden" else part for part in found.parts
        )
        self.sensitivity = found.model_copy(update={"parts": parts})
        self.costs = CostModel(original.family, original.model, Workload(), bytes_per_number=4)

    def plan(self, like: Plan) -> Plan:
        """At most as many parameters as ``like`` has."""
        limit = Budget(measure="parameters", limit=self.costs.of_plan(like).parameters)
        chosen = choose_factored(self.sensitivity, self.costs, limit)
        model, architecture = self.original.model, self.original.architecture
        return fold_plan(model, architecture, qk=chosen.qk, vo=chosen.vo)


def latent_trials(bed: Bed) -> list[Trial]:
    """Cross-attention alone: one latent for all of it, and heads of a size."""
    model, architecture = bed.original.model, bed.original.architecture
    cross = [block.name for block in architecture.attention if block.kind == "cross"]
    trials = [
        Trial(f"latent {size}", fold_plan(model, architecture, latent=size))
        for size in (16, 32, 64)
    ]
    for size in (1, 8):
        small = dict.fromkeys(cross, size)
        plan = fold_plan(model, architecture, qk=small, vo=small)
        trials.append(Trial(f"cross-attention d_kv {size}", plan))
    return trials


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the original."""
    lines = [
        "| trial | parameters | attention | WQL (95 %) | SQL (95 %) | MASE (95 %) | skill kept | "
        "of seasons | loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        lines.append(
            f"| {row['trial']} | {row['parameters']:.1%} | {row['attention']:.2%} | "
            f"{with_interval(row, 'WQL')} | {with_interval(row, 'SQL')} | "
            f"{with_interval(row, 'MASE')} | {row['skill']:.3f} | {row['seasons']:.3f} | "
            f"{row['loss']:+.4f} |"
        )
    return "\n".join(lines) + "\n"


def _size(text: str) -> tuple[int, float, int | None]:
    head_size, ff_ratio, *width = text.split(",")
    return int(head_size), float(ff_ratio), int(*width) if width else None


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def short_name(model: str) -> str:
    """Of a reference its last part, of what `pretrain` wrote the directory above `model`."""
    path = Path(model)
    return path.parent.name if path.name == "model" else path.name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("switches", "sizes", "widths", "attention", "latent"))
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv and .md")
    parser.add_argument("--model", action="append", help="default: both references")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    parser.add_argument(
        "--source", choices=OWN_SOURCES, default=MIXED, help="calibration series, default: mixed"
    )
    parser.add_argument("--draw", type=int, default=0, help="of the calibration series: a seed")
    parser.add_argument("--ratio", type=float, default=0.125, help="of attention: head size / 64")
    parser.add_argument(
        "--size", action="append", type=_size,
        help="for sizes: D_KV,SHARE of hidden units[,D_MODEL]",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=_seeds, default=(0,), help="of the sample paths of Chronos-T5: 0,1,2"
    )
    arguments = parser.parse_args()
    if arguments.what == "switches" and not set(arguments.model or ()) <= HARD.keys():
        parser.error(f"switches are for {' and '.join(HARD)}; give one of them as --model.")
    if arguments.draw == HELD_OUT.seed:
        parser.error(f"--draw {HELD_OUT.seed} is that of the held-out windows; take another.")
    console = Console()
    suffix = "" if arguments.source == MIXED else f"-{arguments.source}"
    suffix += f"-draw{arguments.draw}" if arguments.draw else ""
    for model in arguments.model or REFERENCES:
        bed = Bed(
            model,
            arguments.max_series,
            console,
            source=arguments.source,
            draw=arguments.draw,
            seeds=arguments.seeds,
        )
        trials = {
            "switches": lambda bed=bed: switch_trials(bed),
            "sizes": lambda bed=bed: size_trials(bed, arguments.size or SIZES),
            "widths": lambda bed=bed: size_trials(bed, WIDTHS[bed.original.family]),
            "latent": lambda bed=bed: latent_trials(bed),
            "attention": lambda bed=bed: attention_trials(bed, arguments.ratio),
        }[arguments.what]()
        stem = f"{arguments.output}-{short_name(model)}{suffix}"
        rows = []
        for row in bed.rows(trials):
            rows.append(row)
            frame = pd.DataFrame(rows)
            table = markdown(frame)
            write_tables(stem, frame, table)
        console.print(table, markup=False)


if __name__ == "__main__":
    main()
