"""Which calibration series keep what a model can do: the share of repeated patterns, and how many.

    python eval/calibration.py --model reference/bolt --rank 16 --ff-ratio 0.5
        --output eval/results/calibration [--shares 0,0.25,0.5,0.75,1] [--counts 256,1024,4096]

A model is folded without training, once for each share of repeated patterns among the synthetic
series (the other half of the series is real, as by default; `1` is repeated patterns alone), and at
the default share once for each number of series. Each row has the forecast loss on held-out windows
of every synthetic family and the skill that is kept of each group of tasks of the probe, both
relative to the original. No evaluation series is read: this is what the default was chosen by.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from output import plain_table, rounded, write_tables
from rich.console import Console
from testbed import Testbed, short_name

import tscompress
from tscompress.budget.forecast_loss import forecast_loss
from tscompress.checkpoints.load import LoadedModel, cast_parameters_
from tscompress.compression.calibration import (
    MIXED,
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
)
from tscompress.data.synthetic import CorpusConfig

FAMILIES = ("kernel", "structural", "stochastic", "count", "seasonal")
#: Weights of the other synthetic families by default; shares of repeated patterns are beside them.
_OTHERS = {"kernel": 0.25, "structural": 0.45, "stochastic": 0.15, "count": 0.05}


@dataclass(frozen=True)
class Trial:
    """One calibration."""

    label: str
    config: CalibrationConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference/bolt")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ff-ratio", type=float, default=0.5)
    parser.add_argument("--width", type=int)
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,1")
    parser.add_argument("--counts", default="256,1024,4096")
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv and .md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = {"rank": given.rank, "ff_ratio": given.ff_ratio, "width": given.width}
    rows: list[dict[str, Any]] = []
    for row in measure(given.model, size, trials(given.shares, given.counts), Console()):
        rows.append(row)
        frame = pd.DataFrame(rows)
        write_tables(f"{given.output}-{short_name(given.model)}", frame, plain_table(frame))


def trials(shares: str, counts: str) -> list[Trial]:
    """Each share with the default number of series, each number with the default share."""
    found = [Trial(f"{float(share):.0%} patterns", with_share(float(share)))
             for share in shares.split(",")]  # fmt: skip
    numbers = [int(count) for count in counts.split(",")]
    return found + [Trial(f"{n} series", CalibrationConfig(num_series=n)) for n in numbers]


def with_share(share: float) -> CalibrationConfig:
    """The default calibration with this share of repeated patterns among synthetic series."""
    weights = {f"{name}_weight": (1 - share) * value for name, value in _OTHERS.items()}
    weights["seasonal_weight"] = share * sum(_OTHERS.values())
    source = SYNTHETIC if share == 1 else MIXED
    return CalibrationConfig(source=source, corpus=CorpusConfig(**weights))


def measure(
    model: str, size: dict[str, Any], chosen: list[Trial], console: Console
) -> Iterator[dict[str, Any]]:
    """One row a calibration."""
    bed = Testbed(model)
    losses = held_out_losses(bed.original)
    for trial in chosen:
        folded = tscompress.compress(model, calibration=trial.config, **size)
        cast_parameters_(folded.model, torch.float32)
        after = held_out_losses(folded)
        row: dict[str, Any] = {"model": model, "calibration": trial.label, **size}
        row |= {f"loss {name}": after[name] / losses[name] for name in FAMILIES}
        row |= {f"kept {name}": share for name, share in kept_by_group(bed, folded).items()}
        console.print(rounded(row))
        yield row


def held_out_losses(loaded: LoadedModel, count: int = 96) -> dict[str, float]:
    """Mean forecast loss on windows of each synthetic family alone."""
    found = {}
    for family in FAMILIES:
        weights = {f"{name}_weight": float(name == family) for name in FAMILIES}
        corpus = CorpusConfig(**weights, real_weight=0, mixup_probability=0)
        config = CalibrationConfig(
            source=SYNTHETIC, num_series=count, seed=77, corpus=corpus, context_length=512
        )
        pairs = [forecast_loss(loaded, batch) for batch in calibration_batches(loaded, config)]
        found[family] = sum(loss for loss, _ in pairs) / sum(steps for _, steps in pairs)
    return found


def kept_by_group(bed: Testbed, folded: LoadedModel) -> dict[str, float]:
    """Share of the original's skill in each group that is kept, of tasks that it can do."""
    groups = bed.probed(folded.forecaster).against(bed.skills).groups
    return {group.group: group.kept.value for group in groups if group.kept is not None}


if __name__ == "__main__":
    main()
