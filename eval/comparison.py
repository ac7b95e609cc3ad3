"""Ways to a smaller model, side by side (paper Fig. 6): time against WQL, time against MASE.

    python eval/comparison.py --output eval/results/comparison --model reference/bolt \\
        --smaller results/bolt-nano/model \\
        --by-design results/bolt-tiny-by-design-table3-5-0.35/model

Held against the dense reference: truncated SVD and activation-aware SVD of its attention; folding;
folding and a short recovery, both with a narrower residual stream as well; and, if they have been
trained, a dense model of the next smaller size and one compressed by design, each from scratch on
the data and steps of the reference (`tscompress pretrain recipes/pretrain/bolt-nano.yaml --output
results/bolt-nano` and the like).

Each row has the ratios of WQL, SQL (the same loss with every series in a scale of its own) and MASE
on the offline suite (Chronos-T5 with common random numbers), of parameters, and of latency. What is
fitted is fitted once for each `--seed`, which draws calibration series and the batches of recovery;
what was trained is what it is. Everything computes in float32 on weights as they are stored. A row
is written as soon as it is there, and a run that is started again goes on after the last; a row of
other series or of another recovery stays in the .csv and is left out of table and figure. Latency
comes at the end, when models of all shapes take turns in one process (recovery changes no shape,
and shares that of its folded model).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fold import RATIOS, REFERENCES, quality, with_interval
from methods import WORKLOADS
from output import write_tables
from pydantic import BaseModel
from rich.console import Console

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import SYNTHETIC, CalibrationConfig
from tscompress.data.suites import load_suite
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.files import write_text_atomically
from tscompress.plotting import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

#: Shares of attention that factorizations keep, and sizes of folded heads and hidden units.
FACTORED = (0.25, 0.125)
FOLDED = ((8, 1.0), (8, 0.25), (4, 0.25), (2, 0.125))
#: Of folded ones whose stream is narrower as well; last the share of `d_model`.
NARROW: dict[str, tuple[tuple[int, float, float], ...]] = {
    "chronos-bolt": ((8, 0.25, 0.125), (4, 0.125, 0.125)),
    "chronos-t5": ((16, 0.5, 0.5),),
}
RECOVERY = " + recovery"
#: Colour, marker and fill of each kind; what has a narrower stream is hollow.
STYLES = {
    "svd": (PALETTE[0], MARKERS[0], True),
    "activation-svd": (PALETTE[1], MARKERS[1], True),
    "fold": (PALETTE[2], MARKERS[2], True),
    "fold + recovery": (PALETTE[3], MARKERS[3], True),
    "fold, narrower": (PALETTE[2], MARKERS[2], False),
    "fold, narrower + recovery": (PALETTE[3], MARKERS[3], False),
    "next smaller size": (PALETTE[4], MARKERS[4], True),
    "by design": (PALETTE[5], MARKERS[5], True),
}
#: Of recovery: some five minutes of one quiet core for a tiny model.
STEPS = {"reference/bolt": 600, "reference/t5": 400}
#: Latency depends on shapes alone; these models are never scored.
_ANY = CalibrationConfig(source=SYNTHETIC, num_series=16, context_length=64)


@dataclass(frozen=True)
class Contender:
    """A model that stands for the dense one.

    Attributes
    ----------
    seed
        Of what it is fitted and recovered on; -1: it depends on none.
    """

    kind: str
    label: str
    seed: int = -1
    path: Path | None = None
    share: float = 1.0
    head_size: int = 0
    ff_ratio: float = 1.0
    width: float | None = None  # share of `d_model`

    @property
    def recovers(self) -> bool:
        return self.kind.endswith(RECOVERY)

    def compressed(self, name: str, calibration: CalibrationConfig) -> LoadedModel:
        """Before any recovery."""
        if self.path is not None:
            return load(self.path, dtype="float32")
        if self.kind in ("svd", "activation-svd"):
            method: Any = self.kind
            return tscompress.compress(
                name, method=method, budget=self.share, calibration=calibration
            )
        ratio = None if self.ff_ratio == 1 else self.ff_ratio
        width = None
        if self.width is not None:
            width = round(self.width * load(name).config["d_model"])
        return tscompress.compress(
            name, rank=self.head_size, ff_ratio=ratio, width=width, calibration=calibration
        )

    def shape(self, name: str) -> LoadedModel:
        """A model as fast as this one."""
        model = self.compressed(name, _ANY)
        cast_parameters_(model.model, torch.float32)
        return model


def contenders(
    seeds: Sequence[int],
    trained: Sequence[tuple[str, Path]],
    narrow: Sequence[tuple[int, float, float]] = (),
) -> Iterator[Contender]:
    """All but the dense model; the folded ones come just before they are recovered."""
    for kind, path in trained:
        path = path.resolve()
        yield Contender(kind, path.parent.name if path.name == "model" else path.name, path=path)
    for share in FACTORED:
        yield Contender("svd", f"{share:.1%} of attention", share=share)
    for seed in seeds:
        for share in FACTORED:
            yield Contender("activation-svd", f"{share:.1%} of attention", seed, share=share)
        for head_size, ff_ratio in FOLDED:
            label = f"d_kv {head_size}, d_ff {ff_ratio:.1%}"
            for kind in ("fold", f"fold{RECOVERY}"):
                yield Contender(kind, label, seed, head_size=head_size, ff_ratio=ff_ratio)
        for head_size, ff_ratio, width in narrow:
            label = f"d_model {width:.1%}, d_kv {head_size}, d_ff {ff_ratio:.1%}"
            for kind in ("fold, narrower", f"fold, narrower{RECOVERY}"):
                yield Contender(
                    kind, label, seed, head_size=head_size, ff_ratio=ff_ratio, width=width
                )


def digest(*configs: BaseModel) -> str:
    """Eight characters that change with any setting."""
    content = "".join(config.model_dump_json() for config in configs)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


class Bed:
    """A dense model and its scores: what every contender is held against."""

    def __init__(self, name: str, max_series: int | None, steps: int) -> None:
        self.name, self.recovery = name, RecoveryConfig(steps=steps)
        self.config = EvaluationConfig(max_series=max_series, batch_size=64)
        self.original = load(name, dtype="float32")
        self._settings: dict[tuple[int, float, float | None], str] = {}
        self.dense = score(self.original.forecaster, name, self.config, cache=ScoreCache())
        self.datasets = list(load_suite(self.config.suite, max_series))

    def settings(self, contender: Contender) -> str:
        """What a row depends on beside its contender; of a recovery, all that it resolves to."""
        if not contender.recovers:
            return digest(self.config)
        size = contender.head_size, contender.ff_ratio, contender.width
        if size not in self._settings:  # the learning rate depends on what is left
            recovery = self.recovery.resolved(contender.shape(self.name), self.original)
            self._settings[size] = digest(self.config, recovery)
        return self._settings[size]

    def row(self, contender: Contender) -> dict[str, Any]:
        """Fit, recover where it is asked for, and score."""
        started = time.process_time()
        model = self._fitted(contender)
        cpu_minutes = (time.process_time() - started) / 60
        cast_parameters_(model.model, model.stored_dtype)
        cast_parameters_(model.model, torch.float32)
        scores = score(model.forecaster, contender.label, self.config, cache=ScoreCache())
        found = quality(scores, self.dense, self.datasets)
        return {
            "model": self.name,
            "kind": contender.kind,
            "label": contender.label,
            "seed": contender.seed,
            **{metric: found[metric] for metric in RATIOS},
            "CPU minutes": 0.0 if contender.path is not None else cpu_minutes,
            "settings": self.settings(contender),
        }

    def _fitted(self, contender: Contender) -> LoadedModel:
        calibration = CalibrationConfig(seed=max(contender.seed, 0))
        if not contender.recovers:
            return contender.compressed(self.name, calibration)
        student: Any = contender.compressed(self.name, calibration)
        config = self.recovery.model_copy(update={"seed": contender.seed})
        recovered = tscompress.recover(student, self.name, config)
        if recovered.recovery is None or not recovered.recovery.finished:
            raise KeyboardInterrupt  # it took the signal for itself
        return recovered


def measure(
    bed: Bed, found: Sequence[Contender], path: Path, console: Console
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of all contenders, those that ``path`` has as they are; and what else it has."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = pd.read_csv(path, dtype={"settings": str}).to_dict("records")
    wanted = [(c.kind, c.label, c.seed, bed.settings(c)) for c in found]
    for identity, contender in zip(wanted, found, strict=True):
        if identity in map(_identity, rows):
            continue
        rows.append(bed.row(contender))
        write_text_atomically(path, pd.DataFrame(rows).to_csv(index=False))
        console.print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    known = {_identity(row): row for row in rows}
    others = [row for name, row in known.items() if name not in wanted and row["kind"] != "dense"]
    return pd.DataFrame([known[name] for name in wanted]), pd.DataFrame(others)


def _identity(row: Mapping[str, Any]) -> tuple[str, str, int, str]:
    return row["kind"], row["label"], row["seed"], row.get("settings", "")


def with_latency(bed: Bed, frame: pd.DataFrame, found: Sequence[Contender]) -> pd.DataFrame:
    """The same rows, and first the dense model's, with ratios of latency and parameters."""
    timed = [("dense", bed.original.forecaster)]
    names = {}
    for contender in found:
        kind = contender.kind.removesuffix(RECOVERY)
        if (kind, contender.label) not in names:
            names[kind, contender.label] = f"{kind} {contender.label}"
            timed.append((names[kind, contender.label], contender.shape(bed.name).forecaster))
    result = bench(timed, WORKLOADS[bed.original.family], measure_macs=False)
    dense = {"model": bed.name, "kind": "dense", "label": "", "seed": -1}
    dense |= dict.fromkeys(RATIOS, 1.0)
    rows = []
    for row in [dense, *frame.to_dict("records")]:
        shape = row["kind"].removesuffix(RECOVERY), row["label"]
        name = "dense" if row["kind"] == "dense" else names[shape]
        ratios = result.ratios(name)
        low, high = result.latency_ratio_interval(name) or (1.0, 1.0)
        row |= {"parameters": ratios["parameters"], "latency": ratios["latency_ms"]}
        rows.append(row | {"latency low": low, "latency high": high})
    return pd.DataFrame(rows)


def over_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean of each model over the seeds, and how far the furthest seed is from it."""
    grouped = frame.groupby(["kind", "label"], sort=False)
    means = ["parameters", "latency", "latency low", "latency high", *RATIOS, "CPU minutes"]
    mean = grouped[means].mean()
    mean["seeds"] = grouped["seed"].nunique()
    for metric in RATIOS:
        mean[metric] = grouped[metric].agg(lambda v: v.mean(skipna=False))
        mean[f"{metric} spread"] = grouped[metric].agg(lambda v: (v - v.mean()).abs().max())
    return mean.reset_index()


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the dense model."""
    lines = [
        f"| | | parameters | latency (95 %) | {' | '.join(RATIOS)} | CPU minutes | seeds |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in over_seeds(frame).to_dict("records"):
        several = row["seeds"] > 1
        scores = [
            ""  # not taken of every seed
            if math.isnan(row[metric])
            else f"{row[metric]:.4f}" + (f" ± {row[f'{metric} spread']:.4f}" if several else "")
            for metric in RATIOS
        ]
        latency = with_interval(row, "latency", 2)
        minutes = f"{row['CPU minutes']:.1f}" if row["CPU minutes"] > 0 else ""
        lines.append(
            f"| {row['kind']} | {row['label']} | {row['parameters']:.1%} | "
            f"{'1' if row['kind'] == 'dense' else latency} | {' | '.join(scores)} | {minutes} | "
            f"{row['seeds'] if several else ''} |"
        )
    return "\n".join(lines) + "\n"


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Time against both metrics, and who is on the front of each."""
    means = over_seeds(frame)
    figure = new_figure(8.6, 3.4)
    panels = figure.subplots(1, 2)
    for axes, metric in zip(panels, ("WQL", "MASE"), strict=True):
        style_axes(axes, xlabel="latency, ratio to dense", ylabel=f"{metric}, ratio to dense")
        axes.axhline(1, color=GREY, linewidth=0.8)
        front = _front(means["latency"], means[metric])
        axes.step(
            *front, where="post", color=GREY, linewidth=1, linestyle="--", label="Pareto front"
        )
        dense = means[means["kind"] == "dense"]
        axes.plot(dense["latency"], dense[metric], "*", color="black", ms=10, label="dense")
        for kind, (color, marker, filled) in STYLES.items():
            of_kind = means[means["kind"] == kind]
            if len(of_kind):
                axes.errorbar(
                    of_kind["latency"], of_kind[metric], yerr=of_kind[f"{metric} spread"],
                    fmt=marker, color=color, mfc=color if filled else "white", ms=6, elinewidth=0.8,
                    label=kind,
                )  # fmt: skip
        axes.set_xlim(left=0)
    legend_beside(figure, panels[1])
    figure.savefig(path, dpi=160)


def _front(latency: pd.Series[float], metric: pd.Series[float]) -> tuple[list[float], list[float]]:
    """Corners of the best metric at each latency or less."""
    x: list[float] = []
    y: list[float] = []
    for seconds, value in sorted(zip(latency, metric, strict=True)):
        if not y or value < y[-1]:
            x.append(seconds)
            y.append(value)
    return [*x, float(latency.max())], [*y, y[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv, .md and .png")
    parser.add_argument("--model", required=True, choices=REFERENCES)
    parser.add_argument("--smaller", type=Path, action="append", default=[], help="a directory")
    parser.add_argument("--by-design", type=Path, action="append", default=[], help="a directory")
    parser.add_argument("--steps", type=int, help="of recovery; default: 600, T5 400")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1, 2")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    arguments = parser.parse_args()
    console = Console()
    trained = [("next smaller size", path) for path in arguments.smaller]
    trained += [("by design", path) for path in arguments.by_design]
    steps = arguments.steps or STEPS[arguments.model]
    bed = Bed(arguments.model, arguments.max_series, steps)
    narrow = NARROW[bed.original.family]
    found = list(contenders(arguments.seed or (0, 1, 2), trained, narrow))
    stem = f"{arguments.output}-{arguments.model.rsplit('/', 1)[-1]}"
    measured, others = measure(bed, found, Path(f"{stem}.csv"), console)
    frame = with_latency(bed, measured, found)
    write_tables(stem, pd.concat([frame, others]), markdown(frame))
    draw(frame, Path(f"{stem}.png"))
    console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
