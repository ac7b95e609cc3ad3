"""Ways to a smaller model, side by side (paper Fig. 6): time against WQL, MASE and skill.

    python eval/comparison.py --output eval/results/comparison --model reference/bolt \\
        --smaller reference/bolt-nano

Held against the dense reference: truncated SVD and activation-aware SVD of its attention; folding,
SVD-LLM and ASVD at the same parameters, each before and after a short recovery; a model of the
folded shape with random weights, distilled for as long; and a dense model of the next smaller size,
from scratch on the data of the reference. All that recover or are distilled take the same steps on
the same batches.

Each row has the ratios of WQL, SQL (the same loss with every series in a scale of its own) and MASE
on the offline suite (Chronos-T5 with common random numbers), the share of the dense model's skill
that is kept (`tscompress probe`: of all tasks, and of noise-free seasons), and the ratios of
parameters and of latency. What is fitted is fitted once for each `--seed`, which draws calibration
series, random weights and the batches of recovery; what was trained is what it is. Everything
computes in float32 on weights as they are stored. A row is written as soon as it is there, and a
run that is started again resumes after the last; a row of other series, of another recovery or of
other code stays in the .csv and is left out of table and figure. Latency comes at the end, when
models of all shapes take turns in one process (recovery changes no shape, and shares that of its
folded model). CPU minutes are of fit and recovery, without the pass over the calibration series
that SVD-LLM and ASVD share.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from output import parser_of, rounded, write_tables
from panels import quality_panels
from peer_methods import PeerTestbed
from rich.console import Console
from testbed import (
    CODE,
    FRONT_SIZES,
    LITTLE,
    PARTS,
    RATIOS,
    REFERENCES,
    WORKLOADS,
    Size,
    as_stored,
    digest,
    parts_in,
    short_name,
    with_interval,
)

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.io.files import write_text_atomically
from tscompress.plotting import GREY, MARKERS, PALETTE, new_figure
from tscompress.training.pretrain_model import fourier_token_embedding
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import RecoveryConfig, rate_by_distance

#: Shares of attention that factorizations keep, and sizes of folded models.
FACTORED = (0.25, 0.125)
FOLDED = FRONT_SIZES[1:]
#: Those met by SVD-LLM and ASVD with as many parameters, and by one of that shape from scratch.
MATCHED = (Size(32, 0.25, 160),)
RECOVERY = " + recovery"
SCRATCH = "distilled from scratch"
#: Colour, marker and fill of each kind; what was not trained after the cut is hollow.
STYLES = {
    "svd": (GREY, "x", False),
    "activation-svd": (GREY, "+", False),
    "fold": (PALETTE[0], MARKERS[0], False),
    "fold + recovery": (PALETTE[0], MARKERS[0], True),
    "SVD-LLM": (PALETTE[2], MARKERS[2], False),
    "SVD-LLM + recovery": (PALETTE[2], MARKERS[2], True),
    "ASVD": (PALETTE[3], MARKERS[3], False),
    "ASVD + recovery": (PALETTE[3], MARKERS[3], True),
    SCRATCH: (PALETTE[1], MARKERS[1], True),
    "next smaller size": (PALETTE[5], MARKERS[5], True),
}
#: A point beyond it is drawn there.
_WORST = {"WQL": 1.6, "MASE": 1.6, "skill": -0.4}
#: Of recovery: some five minutes of one quiet core for a tiny model.
STEPS = {"reference/bolt": 600, "reference/t5": 400}
#: What a row has beside its name.
_MEASURES = (*RATIOS, "skill", *PARTS, "own skill")

Build = Callable[[PeerTestbed], LoadedModel]


@dataclass(frozen=True)
class Contender:
    """A smaller model in place of the dense one.

    Attributes
    ----------
    build
        Makes it, before any recovery.
    seed
        Of what it is fitted and recovered on; -1: it depends on none.
    recovers
        It is distilled from the dense model.
    shaped_as
        Kind and label of the contender whose latency it shares; None: its own.
    """

    kind: str
    label: str
    build: Build
    seed: int = -1
    recovers: bool = False
    shaped_as: tuple[str, str] | None = None

    @property
    def shape(self) -> tuple[str, str]:
        return self.shaped_as or (self.kind, self.label)


def trained_model(model: str, bed: PeerTestbed) -> LoadedModel:
    return load(model, dtype="float32")


def factored(method: Any, share: float, bed: PeerTestbed) -> LoadedModel:
    """Two factors for each projection of attention."""
    loaded = tscompress.compress(
        bed.model, method=method, budget=share, calibration=bed.calibration
    )
    cast_parameters_(loaded.model, torch.float32)
    return loaded


def with_random_weights(size: Size, bed: PeerTestbed) -> LoadedModel:
    """A model of the folded shape, drawn as `tscompress pretrain` draws one."""
    loaded = bed.folded(size, LITTLE)
    draw_weights_(loaded, bed.calibration.seed)
    return loaded


def draw_weights_(loaded: LoadedModel, seed: int) -> None:
    """Draw all weights of a stock model anew.

    The tokens of Chronos-T5 get their Fourier table. A narrower one has a head of its own, which
    starts as the tied head of `tscompress pretrain` does.
    """
    model: Any = loaded.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(model)(copy.deepcopy(model.config))
    model.load_state_dict(fresh.state_dict())
    if loaded.family == "chronos-t5":
        pipeline: Any = loaded.forecaster
        width = model.config.d_model
        table = fourier_token_embedding(pipeline.tokenizer.centers, width)
        with torch.no_grad():
            model.shared.weight[2 : 2 + len(table)] = table
            if model.lm_head.weight is not model.shared.weight:
                # A tied head is given states divided by the root of d_model.
                model.lm_head.weight.copy_(model.shared.weight * width**-0.5)


def contenders(seeds: Sequence[int], trained: Sequence[tuple[str, str]]) -> Iterator[Contender]:
    """All but the dense model; what recovers comes just after its like that does not."""
    for kind, model in trained:
        yield Contender(kind, short_name(model), partial(trained_model, model))
    for share in FACTORED:
        yield Contender("svd", f"{share:.1%} of attention", partial(factored, "svd", share))
    for seed in seeds:
        for share in FACTORED:
            build = partial(factored, "activation-svd", share)
            yield Contender("activation-svd", f"{share:.1%} of attention", build, seed)
        for size in FOLDED:
            yield from recovered_too("fold", size, partial(PeerTestbed.folded, size=size), seed)
        for size in MATCHED:
            build = partial(PeerTestbed.svd_llm, size=size)
            yield from recovered_too("SVD-LLM", size, build, seed)
            yield from recovered_too("ASVD", size, partial(PeerTestbed.asvd, size=size), seed)
            build = partial(with_random_weights, size)
            yield Contender(SCRATCH, size.label, build, seed, True, ("fold", size.label))


def recovered_too(kind: str, size: Size, build: Build, seed: int) -> Iterator[Contender]:
    """A contender without and with recovery."""
    yield Contender(kind, size.label, build, seed)
    yield Contender(kind + RECOVERY, size.label, build, seed, True, (kind, size.label))


class Comparison:
    """A dense model, how contenders recover, and their rows."""

    def __init__(self, model: str, max_series: int | None, steps: int) -> None:
        self.bed = PeerTestbed(model, max_series)
        self.recovery = RecoveryConfig(steps=steps)
        self.of_seeds: dict[int, PeerTestbed] = {}
        self._little = PeerTestbed(model, calibration=LITTLE)
        self._settings: dict[tuple[str, str], str] = {}

    def at_seed(self, seed: int) -> PeerTestbed:
        """The testbed whose calibration series are those of a seed."""
        if seed not in self.of_seeds:
            calibration = CalibrationConfig(seed=max(seed, 0))
            self.of_seeds[seed] = PeerTestbed(self.bed.model, calibration=calibration)
        return self.of_seeds[seed]

    def shape(self, contender: Contender) -> LoadedModel:
        """A model as fast as this one, and never scored."""
        return contender.build(self._little)

    @cached_property
    def _scored(self) -> str:
        """Of every row; taken once, as the code may change while it runs."""
        scripts = "comparison", "peer_methods", "testbed"
        return self.bed.settings(*scripts, code=(*CODE, "training"))

    def settings(self, contender: Contender) -> str:
        """What a row depends on beside its contender; of a recovery, all that it resolves to."""
        if contender.seed < 0:  # it is what it is, also when it has been trained anew
            return digest(self._scored, model_digest(self.shape(contender).forecaster))
        if not contender.recovers:
            return digest(self._scored)
        if contender.shape not in self._settings:  # the learning rate depends on what is left
            recovery = self.recovery.resolved(self.shape(contender), self.bed.original)
            bound = rate_by_distance(self.bed.original.family, recovery.optimizer)
            self._settings[contender.shape] = digest(self._scored, recovery, bound)
        return self._settings[contender.shape]

    def row(self, contender: Contender) -> dict[str, Any]:
        """Fit, recover where it is asked for, and measure."""
        if contender.kind.startswith(("SVD-LLM", "ASVD")):
            _ = self.at_seed(contender.seed).statistics  # shared by several rows, so no row's own
        started = time.process_time()
        loaded = self.fitted(contender)
        cpu_minutes = (time.process_time() - started) / 60
        found = self.bed.row(as_stored(loaded).forecaster, contender.label)
        return {
            "model": self.bed.model,
            "kind": contender.kind,
            "label": contender.label,
            "seed": contender.seed,
            **{name: found[name] for name in _MEASURES},
            "CPU minutes": cpu_minutes,
            "settings": self.settings(contender),
        }

    def fitted(self, contender: Contender) -> LoadedModel:
        """The contender, with its recovery.

        Raises
        ------
        KeyboardInterrupt
            The recovery was stopped.
        """
        loaded = contender.build(self.at_seed(contender.seed))
        if contender.recovers:
            config = self.recovery.model_copy(update={"seed": contender.seed})
            if not recover_(loaded, self.bed.original, config).finished:
                raise KeyboardInterrupt  # it took the signal for itself
        return loaded


def measure(
    comparison: Comparison, found: Sequence[Contender], path: Path, console: Console
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of all contenders, those that ``path`` has as they are; and what else it has."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = pd.read_csv(path, dtype={"settings": str}).to_dict("records")
    wanted = [(c.kind, c.label, c.seed, comparison.settings(c)) for c in found]
    for identity, contender in zip(wanted, found, strict=True):
        if identity in map(_identity, rows):
            continue
        rows.append(comparison.row(contender))
        write_text_atomically(path, pd.DataFrame(rows).to_csv(index=False))
        console.print(rounded(rows[-1]))
    known = {_identity(row): row for row in rows}
    others = [row for name, row in known.items() if name not in wanted and row["kind"] != "dense"]
    return pd.DataFrame([known[name] for name in wanted]), pd.DataFrame(others)


def _identity(row: Mapping[str, Any]) -> tuple[str, str, int, str]:
    return row["kind"], row["label"], row["seed"], row.get("settings", "")


def with_latency(
    comparison: Comparison, frame: pd.DataFrame, found: Sequence[Contender]
) -> pd.DataFrame:
    """The same rows, and first the dense model's, with ratios of latency and parameters."""
    bed = comparison.bed
    timed = {"dense": bed.original.forecaster}
    for contender in found:
        name = " ".join(contender.shape)
        if name not in timed:
            timed[name] = comparison.shape(contender).forecaster
    result = bench(timed, WORKLOADS[bed.original.family], measure_macs=False)
    names = {(c.kind, c.label): " ".join(c.shape) for c in found}
    dense = {"model": bed.model, "kind": "dense", "label": "", "seed": -1, **bed.original_row()}
    rows = []
    for row in [dense, *frame.to_dict("records")]:
        name = names.get((row["kind"], row["label"]), "dense")
        ratios = result.ratios(name)
        low, high = result.latency_ratio_interval(name) or (1.0, 1.0)
        row |= {"parameters": ratios["parameters"], "latency": ratios["latency_ms"]}
        rows.append(row | {"latency low": low, "latency high": high})
    return pd.DataFrame(rows)


def over_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean of each model over the seeds, and how far the furthest seed is from it."""
    grouped = frame.groupby(["kind", "label"], sort=False)
    mean = grouped[["parameters", "latency", "latency low", "latency high", "CPU minutes"]].mean()
    mean["seeds"] = grouped["seed"].nunique()
    for name in (name for name in _MEASURES if name in frame):
        mean[name] = grouped[name].agg(lambda v: v.mean(skipna=False))
        mean[f"{name} spread"] = grouped[name].agg(lambda v: (v - v.mean()).abs().max())
    return mean.reset_index()


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the dense model."""
    parts = parts_in(frame)
    lines = [
        f"| | | parameters | latency (95 %) | {' | '.join(RATIOS)} | skill kept "
        f"{''.join(f'| of {part} ' for part in parts)}| own skill | CPU minutes | seeds |",
        f"|---|---|{'--:|' * (6 + len(RATIOS) + len(parts))}",
    ]
    names = (*RATIOS, "skill", *parts, "own skill")
    for row in over_seeds(frame).to_dict("records"):
        several = row["seeds"] > 1
        measures = " | ".join(_mean(row, name, spread=several) for name in names)
        minutes = f"{row['CPU minutes']:.1f}" if row["CPU minutes"] > 0.05 else ""
        lines.append(
            f"| {row['kind']} | {row['label']} | {row['parameters']:.1%} | "
            f"{'1' if row['kind'] == 'dense' else with_interval(row, 'latency', 2)} | {measures} | "
            f"{minutes} | {row['seeds'] if several else ''} |"
        )
    return "\n".join(lines) + "\n"


def _mean(row: Mapping[str, Any], name: str, *, spread: bool) -> str:
    """``1.0021 ± 0.0012``; nothing if it was not measured for every seed."""
    if math.isnan(row[name]):
        return ""
    digits = 4 if name in RATIOS else 3
    furthest = f" ± {row[f'{name} spread']:.{digits}f}" if spread else ""
    return f"{row[name]:.{digits}f}{furthest}"


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Time against both metrics and the skill kept, and who is on the front of each."""
    means = over_seeds(frame)
    figure = new_figure(12, 3.6)
    for name, axes in quality_panels(figure):
        sign = -1 if name == "skill" else 1
        beyond = sign * means[name] > sign * _WORST[name]
        if beyond.any():
            axes.yaxis.set_major_formatter(partial(_tick, worst=_WORST[name]))
        means.loc[beyond, name] = _WORST[name]
        x, y = _front(means["latency"], sign * means[name])
        front = [sign * value for value in y]
        axes.step(
            x, front, where="post", color=GREY, linewidth=1, linestyle="--", label="Pareto front"
        )
        dense = means[means["kind"] == "dense"]
        axes.plot(dense["latency"], dense[name], "*", color="black", ms=10, label="dense")
        for kind, (color, marker, filled) in STYLES.items():
            of_kind = means[means["kind"] == kind]
            if len(of_kind):
                axes.errorbar(
                    of_kind["latency"], of_kind[name], yerr=of_kind[f"{name} spread"],
                    fmt=marker, color=color, mfc=color if filled else "white", ms=6, elinewidth=0.8,
                    label=kind,
                )  # fmt: skip
        axes.set_xlim(left=0)
    figure.savefig(path, dpi=160)


def _tick(value: float, _: int, *, worst: float) -> str:
    beyond = ("> " if worst > 1 else "< ") if math.isclose(value, worst) else ""
    return f"{beyond}{value:g}".replace("-", "−")


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
    parser = parser_of(__doc__, ".csv, .md and .png", max_series=True)
    parser.add_argument("--model", required=True, choices=REFERENCES)
    parser.add_argument("--smaller", action="append", default=[], help="a directory or a name")
    parser.add_argument("--steps", type=int, help="of recovery; default: 600, T5 400")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1, 2")
    arguments = parser.parse_args()
    console = Console()
    trained = [("next smaller size", path) for path in arguments.smaller]
    steps = arguments.steps or STEPS[arguments.model]
    comparison = Comparison(arguments.model, arguments.max_series, steps)
    found = list(contenders(arguments.seed or (0, 1, 2), trained))
    stem = f"{arguments.output}-{short_name(arguments.model)}"
    measured, others = measure(comparison, found, Path(f"{stem}.csv"), console)
    frame = with_latency(comparison, measured, found)
    rows = pd.concat([frame.assign(shown=True), others.assign(shown=False)])
    write_tables(stem, rows, markdown(frame))
    draw(frame, Path(f"{stem}.png"))
    console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
