"""Five ways to a smaller model, side by side (paper Fig. 6): time against WQL, time against MASE.

    python eval/comparison.py --output eval/results/comparison --model reference/bolt \\
        --smaller results/bolt-nano --by-design results/bolt-tiny-by-design-table3-5-0.35

Held against the dense reference: truncated SVD and activation-aware SVD of its attention; folding;
folding and some minutes of recovery; and, if they have been trained, a dense model of the next
smaller size and one compressed by design, each from scratch on the data and steps of the reference
(`tscompress pretrain recipes/pretrain/bolt-nano.yaml --output results/bolt-nano` and the like).

Each row has the ratios of WQL and MASE on the offline suite (Chronos-T5 with common random
numbers), of parameters, and of latency, for which all models take turns in one process. What is
fitted is fitted once for each `--seed`, which draws calibration series and the batches of recovery;
what was trained is what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from fold import REFERENCES
from methods import WORKLOADS
from rich.console import Console

import tscompress
from tscompress.api import score
from tscompress.calibration import CalibrationConfig
from tscompress.evaluation import relative
from tscompress.figures import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes
from tscompress.files import write_text_atomically
from tscompress.latency import bench
from tscompress.loading import LoadedModel, cast_parameters_, load
from tscompress.recipe import EvaluationConfig
from tscompress.recovery_config import RecoveryConfig

#: Shares of attention that factorizations keep, and sizes of folded heads and hidden units.
FACTORED = (0.25, 0.125)
FOLDED = ((16, 1.0), (8, 1.0), (16, 0.5), (8, 0.25), (4, 0.25))
KINDS = ("svd", "activation-svd", "fold", "fold + recovery", "next smaller size", "by design")


class Contender(NamedTuple):
    """A model that stands for the dense one."""

    kind: str
    label: str
    model: LoadedModel
    seed: int | None = None


def contenders(
    name: str, minutes: float, seeds: Sequence[int], trained: Sequence[tuple[str, Path]]
) -> Iterator[Contender]:
    """All but the dense model, in float32 on weights as they would be stored."""
    for kind, path in trained:
        yield Contender(kind, path.name, load(path, dtype="float32"))
    yield from (
        Contender("svd", f"{share:.1%} of attention", _svd(name, "svd", share, 0))
        for share in FACTORED
    )
    for seed in seeds:
        for share in FACTORED:
            label = f"{share:.1%} of attention"
            yield Contender(
                "activation-svd", label, _svd(name, "activation-svd", share, seed), seed
            )
        for head_size, ff_ratio in FOLDED:
            label = f"d_kv {head_size}, d_ff {ff_ratio:.0%}"
            calibration = CalibrationConfig(seed=seed)
            sizes = {"rank": head_size, "ff_ratio": None if ff_ratio == 1 else ff_ratio}
            folded = tscompress.compress(name, **sizes, calibration=calibration)
            config = RecoveryConfig(minutes=minutes, seed=seed)
            recovered = tscompress.recover(folded, name, config)
            for kind, model in (("fold", folded), ("fold + recovery", recovered)):
                cast_parameters_(model.model, torch.float32)
                yield Contender(kind, label, model, seed)


def _svd(name: str, method: Any, share: float, seed: int) -> LoadedModel:
    calibration = CalibrationConfig(seed=seed)
    model = tscompress.compress(name, method=method, budget=share, calibration=calibration)
    cast_parameters_(model.model, torch.float32)
    return model


def measure(
    name: str, found: Iterator[Contender], config: EvaluationConfig, console: Console
) -> pd.DataFrame:
    """One row a contender; the dense model is the first."""
    original = load(name, dtype="float32")
    dense = score(original.forecaster, name, config)
    rows: list[dict[str, Any]] = [{"kind": "dense", "label": name, "WQL": 1.0, "MASE": 1.0}]
    timed = [("dense", original.forecaster)]
    for number, contender in enumerate(found):
        forecaster = contender.model.forecaster
        quality = relative(score(forecaster, contender.label, config), dense)
        rows.append(
            {
                "kind": contender.kind,
                "label": contender.label,
                "seed": contender.seed,
                "WQL": quality["WQL"],
                "MASE": quality["MASE"],
            }
        )
        timed.append((f"{number}", forecaster))
        console.print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    result = bench(timed, WORKLOADS[original.family], measure_macs=False)
    for row, (label, _) in zip(rows, timed, strict=True):
        ratios = result.ratios(label)
        low, high = result.latency_ratio_interval(label) or (float("nan"),) * 2
        row |= {"parameters": ratios["parameters"], "latency": ratios["latency_ms"]}
        row |= {"latency low": low, "latency high": high, "model": name}
    return pd.DataFrame(rows)


def over_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean of each model over the seeds, and how far the furthest seed is from it."""
    grouped = frame.groupby(["kind", "label"], sort=False)
    mean = grouped[["parameters", "latency", "latency low", "latency high", "WQL", "MASE"]].mean()
    for metric in ("WQL", "MASE"):
        mean[f"{metric} spread"] = grouped[metric].agg(lambda v: (v - v.mean()).abs().max())
    return mean.reset_index()


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the dense model."""
    lines = [
        "| | | parameters | latency (95 %) | WQL | MASE |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in over_seeds(frame).to_dict("records"):
        scores = (
            f"{row[m]:.4f}" + (f" ± {row[f'{m} spread']:.4f}" if row[f"{m} spread"] else "")
            for m in ("WQL", "MASE")
        )
        latency = f"{row['latency']:.2f} ({row['latency low']:.2f}–{row['latency high']:.2f})"
        lines.append(
            f"| {row['kind']} | {row['label']} | {row['parameters']:.1%} | "
            f"{'1' if row['kind'] == 'dense' else latency} | {' | '.join(scores)} |"
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
        for kind, color, marker in zip(KINDS, PALETTE, MARKERS, strict=True):
            of_kind = means[means["kind"] == kind]
            if len(of_kind):
                axes.errorbar(
                    of_kind["latency"], of_kind[metric], yerr=of_kind[f"{metric} spread"],
                    fmt=marker, color=color, ms=6, elinewidth=0.8, label=kind,
                )  # fmt: skip
        axes.set_xlim(left=0)
    legend_beside(figure, panels[1])
    figure.savefig(path, dpi=160)


def _front(latency: pd.Series[float], metric: pd.Series[float]) -> tuple[list[float], list[float]]:
    """Corners of the best metric at each latency or less."""
    x: list[float] = []
    y: list[float] = []
    for time, value in sorted(zip(latency, metric, strict=True)):
        if not y or value < y[-1]:
            x.append(time)
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
    parser.add_argument("--minutes", type=float, default=5.0, help="of recovery")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1, 2")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    arguments = parser.parse_args()
    console = Console()
    trained = [("next smaller size", path) for path in arguments.smaller]
    trained += [("by design", path) for path in arguments.by_design]
    frame = measure(
        arguments.model,
        contenders(arguments.model, arguments.minutes, arguments.seed or (0, 1, 2), trained),
        EvaluationConfig(max_series=arguments.max_series, batch_size=64),
        console,
    )
    stem = f"{arguments.output}-{arguments.model.rsplit('/', 1)[-1]}"
    write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
    write_text_atomically(Path(f"{stem}.md"), markdown(frame))
    draw(frame, Path(f"{stem}.png"))
    console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
