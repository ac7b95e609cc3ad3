"""Folding on the reference checkpoints: what each switch is worth, and what each size costs.

    python eval/fold.py switches --output eval/results/fold-switches [--model reference/bolt]
    python eval/fold.py sizes --output eval/results/fold-sizes [--max-series 100]
    python eval/fold.py attention --output eval/results/fold-attention [--ratio 0.125]
    python eval/fold.py latent --output eval/results/fold-latent
    python eval/fold.py widths --output eval/results/fold-widths

`switches` folds each reference with one switch of `FoldConfig` (or of the calibration) changed at
a time, at sizes at which something is lost. `sizes` is the table of folded models: a narrower
residual stream, fewer hidden units, smaller heads. `attention` folds one kind of
attention block at a time, values or queries and keys, to see where the loss sits, and then gives
each block its own sizes at the same number of parameters. `latent` folds cross-attention alone,
into one latent of the encoder's output or into smaller heads. `widths` makes one thing smaller at
a time: hidden units, heads, the residual stream. All but `switches` take any model with heads of
64.

Every row is one folded model against its original: the ratios of WQL and MASE on the offline suite,
or another `--suite`, with 95 % intervals (paired bootstrap over series; Chronos-T5 with common
random numbers, and with `--seeds 0,1,2` averaged over several draws), that of SQL, the loss of WQL
with every series in units of its seasonal error, the share of the original's skill that is kept
(`tscompress probe`: of all tasks, and of noise-free seasons), and the forecast loss on held-out
synthetic windows (for Chronos-T5 nats a token, for the others scaled pinball loss). Calibration is
on synthetic and real series, or on what `--source` says, `--calibration-series` of them, drawn with
`--draw`; of the real ones no evaluation suite holds any. Both models compute in float32 on the
weights as they are stored, which is bfloat16 for the references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from output import parser_of, rounded, write_tables
from rich.console import Console
from testbed import (
    HELD_OUT,
    REFERENCES,
    SIZES,
    Size,
    Testbed,
    parts_in,
    short_name,
    with_interval,
)

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel
from tscompress.budget.measure_sensitivity import measure_sensitivity
from tscompress.budget.search import choose_factored
from tscompress.checkpoints.load import LoadedModel, cast_parameters_
from tscompress.compression.calibration import (
    MIXED,
    OWN_SOURCES,
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.data.competitions import OFFLINE_SUITE
from tscompress.data.suites import COVARIATES_SUITE, FREQUENCIES_SUITE
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import Budget

SUITES = (OFFLINE_SUITE, FREQUENCIES_SUITE, COVARIATES_SUITE)
#: Head size and share of hidden units at which each reference loses something.
HARD = {
    "reference/bolt": (16, 0.125),
    "reference/t5": (16, 0.125),
    "reference/chronos2": (16, 0.125),
}
#: One thing smaller at a time; `sizes` shows those of the other scripts.
WIDTHS = (
    Size(64, 0.5), Size(64, 0.25), Size(32), Size(16), Size(64, 1.0, 192), Size(64, 1.0, 128),
    Size(64, 1.0, 96), Size(64, 1.0, 64),
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One way to fold a model."""

    label: str
    plan: Plan
    fold: FoldConfig = field(default_factory=FoldConfig)
    calibration: CalibrationConfig | None = None


def plan_of(bed: Testbed, size: Size) -> Plan:
    """The same sizes everywhere."""
    model, architecture = bed.original.model, bed.original.architecture
    whole = fold_plan(model, architecture)
    return fold_plan(
        model,
        architecture,
        qk=size.head_size,
        vo=size.head_size,
        hidden={entry.name: round(size.ff_ratio * entry.d_ff) for entry in whole.hidden},
        width=size.width,
    )


def rows(bed: Testbed, trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    """One row a trial, as they are measured."""
    for trial in trials:
        folded = tscompress.compress(
            bed.model,
            plan=trial.plan,
            fold=trial.fold,
            calibration=trial.calibration or bed.calibration,
        )
        cast_parameters_(folded.model, torch.float32)
        before, after = trial.plan.parameters()
        yield {
            "model": bed.model,
            "trial": trial.label,
            "parameters": parameter_count(folded.model) / parameter_count(bed.original.model),
            "planned layers": after / before,
            "attention": trial.plan.attention_parameter_ratio,
            **bed.row(folded.forecaster, trial.label),
            "loss": bed.loss_rise(folded),
        }


def switch_trials(bed: Testbed) -> list[Trial]:
    """The default, and every switch turned the other way.

    Commit 27dc031 has the rows of switches that were removed since.
    """
    head_size, ff_ratio = HARD[bed.model]
    heads, hidden = plan_of(bed, Size(head_size)), plan_of(bed, Size(64, ff_ratio))
    switches: tuple[dict[str, Any], ...] = (
        {"refit": "layer"},
        {"refit": "none"},
        {"damping": 0.01 if bed.original.family == "chronos-2" else 0.1},
    )
    if any(block.rotary for block in bed.original.architecture.attention):
        switches += ({"frequencies": "free"},)
    trials = [Trial(f"d_kv {head_size}", heads)]
    trials += [Trial(_label(head_size, s), heads, FoldConfig(**s)) for s in switches]
    trials += [
        Trial(f"d_kv {head_size}, {n} series", heads, calibration=calibrated(bed, num_series=n))
        for n in (64, 256, 1024)
    ]
    synthetic = calibrated(bed, source=SYNTHETIC)
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


def calibrated(bed: Testbed, **changes: Any) -> CalibrationConfig:
    """The calibration of a testbed, but for ``changes``."""
    return bed.calibration.model_copy(update=changes)


def size_trials(bed: Testbed, sizes: Sequence[Size]) -> list[Trial]:
    """The table of sizes."""
    return [Trial(size.label, plan_of(bed, size)) for size in sizes]


def attention_trials(bed: Testbed, ratio: float) -> list[Trial]:
    """Where the loss sits at one head size, and how sizes by block compare."""
    original = bed.original
    blocks = original.architecture.attention
    size = round(ratio * 64)
    trials = [Trial(f"all at {size}", plan_of(bed, Size(size)))]
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
    plan = BlockPlanner(original, calibrated(bed, num_series=128)).plan(trials[0].plan)
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


def latent_trials(bed: Testbed) -> list[Trial]:
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
    parts = parts_in(frame)
    lines = [
        "| trial | parameters | attention | WQL (95 %) | SQL (95 %) | MASE (95 %) | skill kept | "
        f"{''.join(f'of {part} | ' for part in parts)}loss |",
        f"|---|{'--:|' * (7 + len(parts))}",
    ]
    for row in frame.to_dict("records"):
        lines.append(
            f"| {row['trial']} | {row['parameters']:.1%} | {row['attention']:.2%} | "
            f"{with_interval(row, 'WQL')} | {with_interval(row, 'SQL')} | "
            f"{with_interval(row, 'MASE')} | {with_interval(row, 'skill', 3)} | "
            f"{''.join(f'{with_interval(row, part, 3)} | ' for part in parts)}"
            f"{row['loss']:+.4f} |"
        )
    return "\n".join(lines) + "\n"


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True, device=True)
    parser.add_argument("what", choices=("switches", "sizes", "widths", "attention", "latent"))
    parser.add_argument("--model", action="append", help="default: both references")
    parser.add_argument(
        "--source", choices=OWN_SOURCES, default=MIXED, help="calibration series, default: mixed"
    )
    parser.add_argument("--suite", default=OFFLINE_SUITE, choices=SUITES, help="that scores are on")
    parser.add_argument("--draw", type=int, default=0, help="of the calibration series: a seed")
    parser.add_argument("--calibration-series", type=int, help="default: the family's")
    parser.add_argument("--ratio", type=float, default=0.125, help="of attention: head size / 64")
    parser.add_argument(
        "--size", action="append", type=Size.parse,
        help="for sizes and widths: D_KV,SHARE of hidden units[,D_MODEL]",
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
    count = arguments.calibration_series
    suffix += f"-{count}series" if count else ""
    for model in arguments.model or REFERENCES:
        calibration = CalibrationConfig(
            source=arguments.source, seed=arguments.draw, num_series=count
        )
        bed = Testbed(
            model,
            arguments.max_series,
            suite=arguments.suite,
            calibration=calibration,
            seeds=arguments.seeds,
            device=arguments.device,
        )
        trials = {
            "switches": lambda bed=bed: switch_trials(bed),
            "sizes": lambda bed=bed: size_trials(bed, arguments.size or SIZES),
            "widths": lambda bed=bed: size_trials(bed, arguments.size or WIDTHS),
            "latent": lambda bed=bed: latent_trials(bed),
            "attention": lambda bed=bed: attention_trials(bed, arguments.ratio),
        }[arguments.what]()
        stem = f"{arguments.output}-{short_name(model)}{suffix}"
        found = []
        for row in rows(bed, trials):
            console.print(rounded(row))
            found.append(row)
            frame = pd.DataFrame(found)
            table = markdown(frame)
            write_tables(stem, frame, table)
        console.print(table, markup=False)


if __name__ == "__main__":
    main()
