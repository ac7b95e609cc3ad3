"""Folding beside others' ways to a smaller model: one run, one process, the same data for all.

    python eval/peers.py --output eval/results/peers --model reference/bolt \\
        --smaller results/bolt-nano/model
    python eval/peers.py --output eval/results/peers --model reference/t5 --max-series 10

The peers (``peer_methods.py`` has them):

- the paper's SVD of q, k, v and o by its schedules, multiplied back to dense as in its own code;
- SVD-LLM: whitening by Cholesky of every Linear in attention and feed-forwards, without and with
  its sequential closed-form update, at the parameters of folded models;
- ASVD: columns scaled by mean |input|^0.5, at the same parameters, without its search for ranks;
- torchao's int8, of weights alone and with dynamic activations (``pip install tscompress[peers]``),
  and bfloat16;
- half the layers of each stack: every second, or those that calibration loss needs most;
- a dense model of the next smaller size, from scratch on the data and steps of the reference.

Ours are folded models, and one of them in int8 and in bfloat16 too. Whatever looks at data sees the
toolkit's default calibration series; for Chronos-T5 also followed by paths that it draws itself.

Each row has the ratios of WQL and MASE on the offline suite to the dense model's, with 95 %
intervals (paired bootstrap over series; Chronos-T5 with common random numbers). Weights are
rounded to the dtype they are stored in, and all but bfloat16 compute in float32. A row is written
as soon as it is there, and a run that is started again goes on after the last. Bytes, memory and
latency come at the end, when all models take turns in one process, on one thread unless
`--threads` says more; they depend on shapes alone, so models are made anew for them with little
calibration. "On disk" counts weights in the checkpoint's dtype, or int8 and its scales; "in
memory" as they are held; "peak" adds the most that one forecast had allocated at a time. "CPU
minutes" leave out the pass over the calibration series that SVD-LLM and ASVD share.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pandas as pd
import torch
from fold import REFERENCES, quality, with_interval
from matplotlib.axes import Axes
from methods import WORKLOADS
from peer_methods import (
    InputStatistics,
    asvd_,
    every_second,
    held_bytes,
    input_statistics,
    int8_,
    least_needed_gone,
    multiply_back_,
    stored_bytes,
    svd_llm_,
)
from rich.console import Console

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.workload import Workload, forecast, synthetic_batch
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.apply import keep_layers_
from tscompress.compression.calibration import (
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
    drawn_continuations,
    small_batches,
)
from tscompress.compression.fold_plans import fold_plan
from tscompress.data.batch import ForecastBatch
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.files import write_text_atomically
from tscompress.plotting import GREY, PALETTE, legend_beside, new_figure, style_axes
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

#: Two of the paper's schedules (sec. 5): rank of each head in the first layer, and its power.
PAPER = ((5, 0.35), (3, 0.27))
#: Head sizes and shares of hidden units of folded models; SVD-LLM and ASVD get as many parameters.
FOLDED = ((8, 1.0), (16, 0.5), (8, 0.25), (4, 0.25))
#: Narrower ones: head size, share of hidden units, and of the residual stream.
NARROW: dict[str, tuple[tuple[int, float, float], ...]] = {
    "chronos-bolt": ((16, 0.5, 0.5), (8, 0.25, 0.125), (4, 0.125, 0.125)),
    "chronos-t5": ((16, 0.5, 0.5),),
}
#: The folded model whose weights get fewer bits as well.
COMPOSED = (8, 0.25)
#: One batch in so many is enough to choose layers by.
LAYER_BATCHES = 4
#: What decides a shape needs no more.
_LITTLE = CalibrationConfig(source=SYNTHETIC, num_series=16, context_length=64)
_MEBI = 2**20


class Bed:
    """The dense model, and what a peer may look at."""

    def __init__(self, name: str, config: CalibrationConfig) -> None:
        self.name, self.config = name, config
        self.original = load(name, dtype="float32")

    def dense(self) -> LoadedModel:
        """A copy to change."""
        return load(self.name, dtype="float32")

    @cached_property
    def batches(self) -> list[ForecastBatch]:
        """As folding sees them."""
        batches = calibration_batches(self.original, self.config)
        if self.original.family == "chronos-t5":
            batches += drawn_continuations(self.original, batches)
        return small_batches(self.original, batches)

    @cached_property
    def statistics(self) -> dict[str, InputStatistics]:
        """Of what the layers of the original see."""
        return input_statistics(self.original, self.batches)

    def share_of(self, head_size: int, ff_ratio: float) -> float:
        """Parameters of a folded model, as a share of the dense one's."""
        model, architecture = self.original.model, self.original.architecture
        hidden = {
            entry.name: round(ff_ratio * entry.d_ff)
            for entry in fold_plan(model, architecture).hidden
        }
        plan = fold_plan(model, architecture, qk=head_size, vo=head_size, hidden=hidden)
        before, after = plan.parameters()
        return 1 - (before - after) / sum(p.numel() for p in model.parameters())


# --------------------------------------------------------------------------------------------------
# Who takes part
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """One smaller model.

    Attributes
    ----------
    build
        Makes it, in float32 unless it is a matter of the dtype.
    """

    kind: str
    label: str
    build: Callable[[Bed], LoadedModel]


def paper_svd(schedule: tuple[int, float], bed: Bed) -> LoadedModel:
    d_0, alpha = schedule
    power_law = tscompress.PowerLawSchedule(d_0=d_0, alpha=alpha, powers_of_two=True)
    loaded = tscompress.compress(bed.dense(), method="svd", schedule=power_law)
    cast_parameters_(loaded.model, torch.float32)
    multiply_back_(loaded)
    return as_stored(loaded)


def svd_llm(size: tuple[int, float], update: bool, bed: Bed) -> LoadedModel:
    loaded = bed.dense()
    svd_llm_(loaded, bed.share_of(*size), bed.statistics, bed.batches if update else None)
    return as_stored(loaded)


def asvd(size: tuple[int, float], bed: Bed) -> LoadedModel:
    loaded = bed.dense()
    asvd_(loaded, bed.share_of(*size), bed.statistics)
    return as_stored(loaded)


def half_the_layers(by_loss: bool, bed: Bed) -> LoadedModel:
    loaded = bed.dense()
    batches = bed.batches[::LAYER_BATCHES]
    keep_layers_(loaded, least_needed_gone(loaded, batches) if by_loss else every_second(loaded))
    return loaded


def folded(size: tuple[int, float], bed: Bed, width: float | None = None) -> LoadedModel:
    head_size, ff_ratio = size
    ratio = None if ff_ratio == 1 else ff_ratio
    narrow = None if width is None else round(width * bed.original.config["d_model"])
    return as_stored(
        tscompress.compress(
            bed.name, rank=head_size, ff_ratio=ratio, width=narrow, calibration=bed.config
        )
    )


def smaller(path: Path, bed: Bed) -> LoadedModel:
    return load(path, dtype="float32")


def in_int8(build: Callable[[Bed], LoadedModel], dynamic: bool, bed: Bed) -> LoadedModel:
    loaded = build(bed)
    int8_(loaded.model, dynamic=dynamic)
    return loaded


def in_bfloat16(build: Callable[[Bed], LoadedModel], bed: Bed) -> LoadedModel:
    loaded = build(bed)
    cast_parameters_(loaded.model, torch.bfloat16)
    return loaded


def as_stored(loaded: LoadedModel) -> LoadedModel:
    """Weights rounded as in a file, and computing in float32 again."""
    cast_parameters_(loaded.model, loaded.stored_dtype)
    cast_parameters_(loaded.model, torch.float32)
    return loaded


def lower_precision(
    kind: str, label: str, build: Callable[[Bed], LoadedModel]
) -> tuple[Peer, Peer, Peer]:
    """int8 in both ways, and bfloat16."""
    return (
        Peer(kind, f"{label}int8 weights", partial(in_int8, build, False)),
        Peer(kind, f"{label}int8 dynamic", partial(in_int8, build, True)),
        Peer(kind, f"{label}bfloat16", partial(in_bfloat16, build)),
    )


def peers(trained: Sequence[Path], family: str) -> list[Peer]:
    """All but the dense model; those that decide the comparison come first."""

    def label(size: tuple[int, float]) -> str:
        return f"d_kv {size[0]}, d_ff {100 * size[1]:g}%"

    found = [Peer("fold", label(size), partial(folded, size)) for size in FOLDED]
    for *sizes, width in NARROW[family]:
        size = int(sizes[0]), sizes[1]
        narrow = f"d_model {100 * width:g}%, {label(size)}"
        found.append(Peer("fold, narrower", narrow, partial(folded, size, width=width)))
    for size in reversed(FOLDED):
        at = f"parameters of {label(size)}"
        found.append(Peer("SVD-LLM, updated", at, partial(svd_llm, size, True)))
        found.append(Peer("ASVD", at, partial(asvd, size)))
    found += lower_precision("fewer bits", "", Bed.dense)
    found += lower_precision("fold, fewer bits", f"{label(COMPOSED)}, ", partial(folded, COMPOSED))
    found.append(Peer("half the layers", "by loss", partial(half_the_layers, True)))
    for path in trained:
        name = path.parent.name if path.name == "model" else path.name
        found.append(Peer("next smaller size", name, partial(smaller, path)))
    found.append(Peer("half the layers", "every second", partial(half_the_layers, False)))
    for first, power in PAPER:
        build = partial(paper_svd, (first, power))
        found.append(Peer("SVD, multiplied back", f"schedule {first}, {power}", build))
    for size in reversed(FOLDED):
        at = f"parameters of {label(size)}"
        found.append(Peer("SVD-LLM", at, partial(svd_llm, size, False)))
    return found


# --------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------


def measure(
    bed: Bed, found: Sequence[Peer], config: EvaluationConfig, path: Path, console: Console
) -> pd.DataFrame:
    """Quality of all peers; rows that ``path`` has already are kept."""
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    known = {(row["kind"], row["label"]) for row in rows}
    missing = [peer for peer in found if (peer.kind, peer.label) not in known]
    dense = None
    if missing:
        dense = score(bed.original.forecaster, bed.name, config, cache=ScoreCache())
    for peer in missing:
        assert dense is not None
        if peer.kind.startswith(("SVD-LLM", "ASVD")):
            _ = bed.statistics  # shared by several rows, so no row's own time
        started = time.process_time()
        loaded = peer.build(bed)
        minutes = (time.process_time() - started) / 60
        row = {"model": bed.name, "kind": peer.kind, "label": peer.label}
        row |= quality(score(loaded.forecaster, peer.label, config), dense)
        rows.append({**row, "CPU minutes": minutes})
        write_text_atomically(path, pd.DataFrame(rows).to_csv(index=False))
        console.print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return pd.DataFrame(rows)


def with_costs(
    name: str, frame: pd.DataFrame, found: Sequence[Peer], workload: Workload
) -> pd.DataFrame:
    """The same rows, and first the dense model's, with bytes, memory and latency."""
    bed = Bed(name, _LITTLE)
    models = {"dense": bed.original}
    for peer in found:
        models[f"{peer.kind}: {peer.label}"] = peer.build(bed)
    timed = bench(
        {key: loaded.forecaster for key, loaded in models.items()}, workload, measure_macs=False
    )
    stored = {
        key: stored_bytes(loaded.model, bed.original.stored_dtype) for key, loaded in models.items()
    }
    dense = {"model": name, "kind": "dense", "label": ""}
    dense |= {f"{metric}{end}": 1.0 for metric in ("WQL", "MASE") for end in ("", " low", " high")}
    rows = []
    for row in [dense, *frame[frame["kind"] != "dense"].to_dict("records")]:
        key = "dense" if row["kind"] == "dense" else f"{row['kind']}: {row['label']}"
        if key not in models:  # of a run with other peers
            continue
        ratios = timed.ratios(key)
        low, high = timed.latency_ratio_interval(key) or (math.nan, math.nan)
        held = held_bytes(models[key].model)
        row |= {"parameters": ratios["parameters"], "on disk": stored[key] / stored["dense"]}
        row |= {"in memory MiB": held / _MEBI, "KV cache": ratios["kv_cache_bytes"]}
        row["peak MiB"] = (held + working_bytes(models[key], workload)) / _MEBI
        row |= {"latency": ratios["latency_ms"], "latency low": low, "latency high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def working_bytes(loaded: LoadedModel, workload: Workload) -> int:
    """The most that PyTorch had allocated at a time during one forecast, weights aside."""
    series = synthetic_batch(workload)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        forecast(loaded.forecaster, series, workload)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


# --------------------------------------------------------------------------------------------------
# Table and figure
# --------------------------------------------------------------------------------------------------


#: In the order of the table.
KINDS = (
    "dense", "fold", "fold, narrower", "fold, fewer bits", "fewer bits", "SVD-LLM, updated",
    "SVD-LLM", "ASVD", "SVD, multiplied back", "half the layers", "next smaller size",
)  # fmt: skip


def setting(name: str, max_series: int | None, workload: Workload) -> str:
    """What a table is of, in a line."""
    series = "all series" if max_series is None else f"the first {max_series} series"
    paths = f" × {workload.num_samples} paths" if workload.num_samples else ""
    return (
        f"{name}: WQL and MASE on {series} of each dataset of the offline suite. Latency, peak and "
        f"KV cache of {workload.batch_size} series × {workload.context_length} steps{paths}, "
        f"horizon {workload.horizon}; threads: {workload.threads}, {workload.repeats} rounds, "
        f"torch {torch.__version__}.\n\n"
    )


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it, kind by kind and the largest first; ratios to the dense."""
    frame = frame.sort_values("parameters", ascending=False, kind="stable")
    frame = frame.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable")
    lines = [
        "| | | parameters | on disk | in memory, MiB | peak, MiB | KV cache | latency (95 %) "
        "| WQL (95 %) | MASE (95 %) | CPU minutes |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        latency = wql = mase = "1"
        minutes = ""
        if row["kind"] != "dense":
            latency = with_interval(row, "latency", 2)
            wql, mase = with_interval(row, "WQL"), with_interval(row, "MASE")
            minutes = f"{row['CPU minutes']:.1f}"
        lines.append(
            f"| {row['kind']} | {row['label']} | {row['parameters']:.1%} | {row['on disk']:.1%} | "
            f"{row['in memory MiB']:.1f} | {row['peak MiB']:.0f} | {row['KV cache']:.1%} | "
            f"{latency} | {wql} | {mase} | {minutes} |"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Style:
    """How one kind is drawn: what belongs together has one colour, and sizes of one have a line."""

    color: str
    marker: str
    filled: bool = True
    line: str = "none"


STYLES = {
    "SVD, multiplied back": Style(GREY, "X"),
    "SVD-LLM": Style(PALETTE[2], "^", filled=False, line=":"),
    "SVD-LLM, updated": Style(PALETTE[2], "^", line="-"),
    "ASVD": Style(PALETTE[3], "D", line="-"),
    "half the layers": Style(PALETTE[4], "v"),
    "next smaller size": Style(PALETTE[5], "P"),
    "fewer bits": Style(PALETTE[1], "s", filled=False),
    "fold": Style(PALETTE[0], "o", line="-"),
    "fold, narrower": Style(PALETTE[0], "*", line="--"),
    "fold, fewer bits": Style(PALETTE[0], "o", filled=False),
}
PANELS = (("latency", "WQL"), ("latency", "MASE"), ("on disk", "WQL"))
TICKS = (-30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100)


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Time against what it costs in both metrics, and bytes against WQL."""
    figure = new_figure(12, 4)
    panels = figure.subplots(1, len(PANELS))
    for axes, (cost, metric) in zip(panels, PANELS, strict=True):
        style_axes(axes, xlabel=f"{cost}, ratio to dense", ylabel=f"{metric}, % above dense")
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.plot([1], [0], "*", color="black", ms=11, label="dense", zorder=4)
        for kind, style in STYLES.items():
            rows = frame[frame["kind"] == kind].sort_values(cost)
            if len(rows):
                _points(axes, rows, cost, metric, kind, style)
        # Costs run from a tenth of a per cent to tens of them, on either side of zero.
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks(TICKS, labels=[f"{tick:+g}" if tick else "0" for tick in TICKS])
        shown = 100 * (frame[[f"{metric} low", f"{metric} high"]].to_numpy() - 1)
        axes.set_ylim(min(-0.3, 1.3 * shown.min()), max(0.5, 1.3 * shown.max()))
        axes.set_xlim(left=0)
    legend_beside(figure, panels[-1])
    figure.savefig(path, dpi=160)


def _points(
    axes: Axes, rows: pd.DataFrame, cost: str, metric: str, kind: str, style: Style
) -> None:
    """Points, their 95 % intervals, and faintly the line through them."""
    x, *of_metric = rows[[cost, metric, f"{metric} low", f"{metric} high"]].to_numpy().T
    y, low, high = (100 * (values - 1) for values in of_metric)
    axes.plot(x, y, color=style.color, linestyle=style.line, linewidth=0.9, alpha=0.6)
    axes.errorbar(
        x, y, yerr=[y - low, high - y], fmt=style.marker, color=style.color, ms=6,
        mfc=style.color if style.filled else "white", elinewidth=0.7, label=kind,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv, .md and .png")
    parser.add_argument("--model", required=True, choices=REFERENCES)
    parser.add_argument("--smaller", type=Path, action="append", default=[], help="a directory")
    parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    config = EvaluationConfig(max_series=arguments.max_series, batch_size=64)
    stem = f"{arguments.output}-{arguments.model.rsplit('/', 1)[-1]}"
    path = Path(f"{stem}.csv")
    bed = Bed(arguments.model, CalibrationConfig())
    found = peers(arguments.smaller, bed.original.family)
    frame = measure(bed, found, config, path, console)
    workload = WORKLOADS[bed.original.family].model_copy(update={"threads": arguments.threads})
    frame = with_costs(arguments.model, frame, found, workload)
    write_text_atomically(path, frame.to_csv(index=False))
    table = setting(arguments.model, arguments.max_series, workload) + markdown(frame)
    write_text_atomically(Path(f"{stem}.md"), table)
    draw(frame, Path(f"{stem}.png"))
    console.print(table, markup=False)


if __name__ == "__main__":
    main()
