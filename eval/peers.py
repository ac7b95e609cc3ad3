"""Folding beside others' ways to a smaller model: one run, one process, the same data for all.

    python eval/peers.py --output eval/results/peers --model reference/bolt \\
        --smaller reference/bolt-nano
    python eval/peers.py --output eval/results/peers --model reference/t5 --device cuda \\
        --smaller reference/t5-nano

The peers (``peer_methods.py`` has them):

- the paper's SVD of q, k, v and o by its schedules, multiplied back to dense as in its own code;
- SVD-LLM: whitening by Cholesky of every Linear in attention and feed-forwards, without and with
  its sequential closed-form update, at the parameters of folded models;
- ASVD: columns scaled by mean |input|^0.5, at the same parameters, without its search for ranks;
- torchao's int8, of weights alone and with dynamic activations (``pip install tscompress[peers]``),
  and bfloat16;
- half the layers of each stack: every second, or those that calibration loss needs most;
- a dense model of the next smaller size, trained from scratch by the recipe of its own;
- Fracast-0, 85,001 parameters that others trained (``pip install tscompress[peers]``, too).

Ours are folded models, and one of them in int8 and in bfloat16 too. Whatever looks at data sees the
toolkit's default calibration series.

Each row has the ratios of WQL, SQL and MASE on the offline suite to the dense model's, with 95 %
intervals (paired bootstrap over series; Chronos-T5 with common random numbers), its skill against
the best possible forecasts (`tscompress probe`) and the share of the dense model's skill that it
keeps. Weights are rounded to the dtype they are stored in, and all but bfloat16 compute in float32.
A row is written as soon as it is there, and a run that is started again resumes after the last, if
model, options, code and versions are the same. Bytes, memory and latency come at the end, when all
models take turns in one process, on one thread unless `--threads` says more; they depend on shapes
alone, so models are made anew for them with little calibration. "On disk" counts weights in the
checkpoint's dtype, or int8 and its scales; "in memory" as they are held; "peak" adds the most that
one forecast had allocated at a time. "CPU minutes" leave out the pass over the calibration series
that SVD-LLM and ASVD share.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from chronos import BaseChronosPipeline
from fracast_pipeline import Fracast, load_fracast
from matplotlib.axes import Axes
from output import parser_of, rounded, rows_with, write_tables
from peer_methods import (
    PeerTestbed,
    every_second,
    held_bytes,
    int8_,
    least_needed_gone,
    multiply_back_,
    stored_bytes,
)
from rich.console import Console
from testbed import (
    FRONT_SIZES,
    KEPT,
    LITTLE,
    PARTS,
    REFERENCES,
    SIZES,
    WORKLOADS,
    Size,
    Testbed,
    as_stored,
    digest,
    short_name,
    with_interval,
)

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.workload import Workload, forecast, synthetic_batch
from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.apply import keep_layers_
from tscompress.io.files import write_text_atomically
from tscompress.plotting import GREY, PALETTE, legend_beside, new_figure, style_axes

#: Two of the paper's schedules (sec. 5): rank of each head in the first layer, and its power.
PAPER = ((5, 0.35), (3, 0.27))
#: Folded models whose parameters SVD-LLM and ASVD get; what they leave dense is more than a smaller
#: Chronos-Bolt has.
MATCHED = FRONT_SIZES[:3]
#: The folded model whose weights get fewer bits as well.
COMPOSED = Size(64, 0.5, 128)
#: One batch in this many is enough to choose layers by.
LAYER_BATCHES = 4
_MEBI = 2**20


# --------------------------------------------------------------------------------------------------
# Who takes part
# --------------------------------------------------------------------------------------------------


Model = LoadedModel | Fracast
Build = Callable[[PeerTestbed], Model]


@dataclass(frozen=True)
class Peer:
    """One smaller model.

    Attributes
    ----------
    build
        Makes it, in float32 unless it is a matter of the dtype.
    given
        The model that it is, if it is made of no other.
    """

    kind: str
    label: str
    build: Build
    given: str | None = None


def paper_svd(schedule: tuple[int, float], bed: PeerTestbed) -> LoadedModel:
    d_0, alpha = schedule
    power_law = tscompress.PowerLawSchedule(d_0=d_0, alpha=alpha, powers_of_two=True)
    loaded = tscompress.compress(bed.dense(), method="svd", schedule=power_law)
    cast_parameters_(loaded.model, torch.float32)
    multiply_back_(loaded)
    return as_stored(loaded)


def svd_llm(size: Size, update: bool, bed: PeerTestbed) -> LoadedModel:
    return bed.svd_llm(size, update=update)


def asvd(size: Size, bed: PeerTestbed) -> LoadedModel:
    return bed.asvd(size)


def half_the_layers(by_loss: bool, bed: PeerTestbed) -> LoadedModel:
    loaded = bed.dense()
    batches = bed.batches[::LAYER_BATCHES]
    keep_layers_(loaded, least_needed_gone(loaded, batches) if by_loss else every_second(loaded))
    return loaded


def folded(size: Size, bed: PeerTestbed) -> LoadedModel:
    return bed.folded(size)


def smaller(model: str, bed: PeerTestbed) -> LoadedModel:
    return load(model, dtype="float32")


def fracast(bed: PeerTestbed) -> Fracast:
    return load_fracast()


def in_int8(build: Build, dynamic: bool, bed: PeerTestbed) -> Model:
    loaded = build(bed)
    int8_(loaded.model, dynamic=dynamic)
    return loaded


def in_bfloat16(build: Build, bed: PeerTestbed) -> Model:
    loaded = build(bed)
    cast_parameters_(loaded.model, torch.bfloat16)
    return loaded


def lower_precision(kind: str, label: str, build: Build) -> tuple[Peer, Peer, Peer]:
    """int8 in both ways, and bfloat16."""
    return (
        Peer(kind, f"{label}int8 weights", partial(in_int8, build, False)),
        Peer(kind, f"{label}int8 dynamic", partial(in_int8, build, True)),
        Peer(kind, f"{label}bfloat16", partial(in_bfloat16, build)),
    )


def peers(trained: Sequence[str]) -> list[Peer]:
    """All but the dense model; those that decide the comparison come first."""
    found = [Peer("fold", size.label, partial(folded, size)) for size in SIZES]
    found += [Peer("next smaller size", short_name(path), partial(smaller, path), path)
              for path in trained]  # fmt: skip
    for size in MATCHED:
        at = f"parameters of {size.label}"
        found.append(Peer("SVD-LLM, updated", at, partial(svd_llm, size, True)))
        found.append(Peer("ASVD", at, partial(asvd, size)))
    found += lower_precision("fewer bits", "", PeerTestbed.dense)
    build = partial(folded, COMPOSED)
    found += lower_precision("fold, fewer bits", f"{COMPOSED.label}, ", build)
    for how, by_loss in (("by loss", True), ("every second", False)):
        found.append(Peer("half the layers", how, partial(half_the_layers, by_loss)))
    for first, power in PAPER:
        build = partial(paper_svd, (first, power))
        found.append(Peer("SVD, multiplied back", f"schedule {first}, {power}", build))
    for size in MATCHED:
        at = f"parameters of {size.label}"
        found.append(Peer("SVD-LLM", at, partial(svd_llm, size, False)))
    return [*found, Peer("Fracast-0", "trained by others", fracast)]


# --------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------


#: Columns without which a row of an earlier run is measured again.
MEASURED = ("SQL", "own skill")


def measure(bed: PeerTestbed, found: Sequence[Peer], path: Path, console: Console) -> pd.DataFrame:
    """Quality of all peers; rows that ``path`` has already are kept."""
    alike = bed.settings("peers", "peer_methods", "fracast_pipeline", "testbed")
    wanted = {
        (peer.kind, peer.label): alike if peer.given is None else with_weights(alike, peer.given)
        for peer in found
    }
    rows = rows_with(path, MEASURED, {alike, *wanted.values()})
    known = {(row["kind"], row["label"], row["settings"]) for row in rows}
    for peer in found:
        settings = wanted[peer.kind, peer.label]
        if (peer.kind, peer.label, settings) in known:
            continue
        if peer.kind.startswith(("SVD-LLM", "ASVD")):
            _ = bed.statistics  # shared by several rows, so no row's own time
        started = time.process_time()
        loaded = peer.build(bed)
        minutes = (time.process_time() - started) / 60
        row = {"model": bed.model, "kind": peer.kind, "label": peer.label}
        row |= bed.row(loaded.forecaster, peer.label)
        rows.append({**row, "CPU minutes": minutes, "settings": settings})
        write_text_atomically(path, pd.DataFrame(rows).to_csv(index=False))
        console.print(rounded(rows[-1]))
    return pd.DataFrame(rows)


def with_weights(settings: str, model: str) -> str:
    """Settings of the row of a model that is scored as it is, which may be trained anew."""
    return digest(settings, model_digest(load(model, dtype="float32").forecaster))


def with_costs(
    bed: PeerTestbed, frame: pd.DataFrame, found: Sequence[Peer], workload: Workload
) -> pd.DataFrame:
    """The same rows, and first the dense model's, with bytes, memory and latency."""
    little = PeerTestbed(bed.model, calibration=LITTLE)
    models: dict[str, Model] = {"dense": bed.original}
    for peer in found:
        models[f"{peer.kind}: {peer.label}"] = peer.build(little)
    timed = bench(
        {key: model.forecaster for key, model in models.items()}, workload, measure_macs=False
    )
    stored = {key: bytes_on_disk(model, bed) for key, model in models.items()}
    dense = {"model": bed.model, "kind": "dense", "label": "", **bed.original_row()}
    rows = []
    for row in [dense, *frame.to_dict("records")]:
        key = "dense" if row["kind"] == "dense" else f"{row['kind']}: {row['label']}"
        if key not in models:  # of a run with other peers
            continue
        ratios = timed.ratios(key)
        low, high = timed.latency_ratio_interval(key) or (math.nan, math.nan)
        held = held_bytes(models[key].model)
        row |= {"parameters": ratios["parameters"], "on disk": stored[key] / stored["dense"]}
        row |= {"in memory MiB": held / _MEBI, "KV cache": ratios.get("kv_cache_bytes")}
        row["peak MiB"] = (held + working_bytes(models[key].forecaster, workload)) / _MEBI
        row |= {"latency": ratios["latency_ms"], "latency low": low, "latency high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def bytes_on_disk(model: Model, bed: PeerTestbed) -> int:
    """Bytes of the weights in a file, as the original's are stored."""
    if isinstance(model, Fracast):
        return model.bytes_on_disk
    return stored_bytes(model.model, bed.original.stored_dtype)


def working_bytes(pipeline: BaseChronosPipeline, workload: Workload) -> int:
    """The most that PyTorch had allocated at a time during one forecast, weights aside."""
    series = synthetic_batch(workload)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        forecast(pipeline, series, workload)
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
    "dense", "fold", "fold, fewer bits", "fewer bits", "SVD-LLM, updated", "SVD-LLM", "ASVD",
    "SVD, multiplied back", "half the layers", "next smaller size", "Fracast-0",
)  # fmt: skip


def setting(bed: Testbed, workload: Workload) -> str:
    """What a table is of, in a line."""
    max_series = bed.config.max_series
    series = "all series" if max_series is None else f"the first {max_series} series"
    paths = f" × {workload.num_samples} paths" if workload.num_samples else ""
    where = f"scores and skill on one {bed.scored_on}, of Fracast-0 on the CPU"
    on = f"; {where}" if bed.scored_on else ""
    return (
        f"{bed.model}: WQL, SQL and MASE on {series} of each dataset of the offline suite; skill "
        "of `tscompress probe`, against the best possible forecasts and as the share of the dense "
        f"model's that is kept. Latency, peak and KV cache of {workload.batch_size} series × "
        f"{workload.context_length} steps{paths}, horizon {workload.horizon}; threads: "
        f"{workload.threads}, {workload.repeats} rounds, torch {torch.__version__}{on}. "
        "Fracast-0 is a model of others: its training data may hold the test series, and nothing "
        "of it comes from the dense model.\n\n"
    )


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it, kind by kind and the largest first; ratios to the dense."""
    frame = frame.sort_values("parameters", ascending=False, kind="stable")
    frame = frame.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable")
    parts = [part for part in PARTS if part in frame and frame[part].notna().any()]
    heads = [
        "parameters", "on disk", "in memory, MiB", "peak, MiB", "KV cache",
        "latency (95 %)", "WQL (95 %)", "SQL (95 %)", "MASE (95 %)", "skill kept (95 %)",
        *(f"of {part}" for part in parts), "own skill", "CPU minutes",
    ]  # fmt: skip
    lines = [f"| | | {' | '.join(heads)} |", f"|---|---|{'--:|' * len(heads)}"]
    for row in frame.to_dict("records"):
        dense = row["kind"] == "dense"
        ratios = [with_interval(row, "latency", 2)]
        ratios += [with_interval(row, name, 3 if name == "skill" else 4) for name in KEPT]
        cells = [row["kind"], row["label"], f"{row['parameters']:.1%}", f"{row['on disk']:.1%}"]
        cells += [f"{row['in memory MiB']:.1f}", f"{row['peak MiB']:.0f}"]
        cells.append("" if pd.isna(row["KV cache"]) else f"{row['KV cache']:.1%}")
        cells += ["1"] * len(ratios) if dense else ratios
        cells += [with_interval(row, part, 3) for part in parts]
        cells += [f"{row['own skill']:.3f}", "" if dense else f"{row['CPU minutes']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
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
    "fold, fewer bits": Style(PALETTE[0], "o", filled=False),
    "Fracast-0": Style("black", "h", filled=False),
}
PANELS = (("latency", "WQL"), ("latency", "MASE"), ("latency", "skill"), ("on disk", "skill"))
TIMES = (0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 50)
TICKS = (-30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100)


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Time against what it costs in both metrics, and time and bytes against the skill kept."""
    figure = new_figure(11, 7)
    panels = figure.subplots(2, 2)
    for axes, (cost, metric) in zip(panels.flat, PANELS, strict=True):
        skill = metric == "skill"
        above = "share of the dense model's skill" if skill else f"{metric}, % above dense"
        style_axes(axes, xlabel=f"{cost}, ratio to dense", ylabel=above)
        axes.axhline(float(skill), color=GREY, linewidth=0.8)
        axes.plot([1], [float(skill)], "*", color="black", ms=11, label="dense", zorder=4)
        for kind, style in STYLES.items():
            rows = frame[frame["kind"] == kind].sort_values(cost)
            if len(rows):
                _points(axes, rows, cost, metric, kind, style)
        if not skill:
            # Costs run from a tenth of a per cent to tens of them, on either side of zero.
            axes.set_yscale("symlog", linthresh=1)
            axes.set_yticks(TICKS, labels=[f"{tick:+g}" if tick else "0" for tick in TICKS])
            shown = 100 * (frame[[f"{metric} low", f"{metric} high"]].to_numpy() - 1)
            axes.set_ylim(min(-0.3, 1.3 * shown.min()), max(0.5, 1.3 * shown.max()))
        if cost == "latency":  # from a quarter of the dense model's to many times as long
            axes.set_xscale("log")
            shown = [t for t in TIMES if 0.8 * frame[cost].min() < t < 1.2 * frame[cost].max()]
            axes.set_xticks(shown, labels=[f"{time:g}" for time in shown])
            axes.minorticks_off()
        else:
            axes.set_xlim(left=-0.02)  # the mark of a hundredth is whole
    legend_beside(figure, panels[0, 1])
    figure.savefig(path, dpi=160)


def _points(
    axes: Axes, rows: pd.DataFrame, cost: str, metric: str, kind: str, style: Style
) -> None:
    """Points, their 95 % intervals, and faintly the line through them."""
    x, *of_metric = rows[[cost, metric, f"{metric} low", f"{metric} high"]].to_numpy().T
    y, low, high = (values if metric == "skill" else 100 * (values - 1) for values in of_metric)
    axes.plot(x, y, color=style.color, linestyle=style.line, linewidth=0.9, alpha=0.6)
    axes.errorbar(
        x, y, yerr=[y - low, high - y], fmt=style.marker, color=style.color, ms=6,
        mfc=style.color if style.filled else "white", elinewidth=0.7, label=kind,
    )  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, ".csv, .md and .png", max_series=True, device=True)
    parser.add_argument("--model", required=True, choices=REFERENCES)
    parser.add_argument("--smaller", action="append", default=[], help="a directory or a name")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    stem = f"{arguments.output}-{short_name(arguments.model)}"
    bed = PeerTestbed(arguments.model, arguments.max_series, device=arguments.device)
    found = peers(arguments.smaller)
    frame = measure(bed, found, Path(f"{stem}.csv"), console)
    workload = WORKLOADS[bed.original.family].model_copy(update={"threads": arguments.threads})
    frame = with_costs(bed, frame, found, workload)
    table = setting(bed, workload) + markdown(frame)
    write_tables(stem, frame, table)
    draw(frame, Path(f"{stem}.png"))
    console.print(table, markup=False)


if __name__ == "__main__":
    main()
