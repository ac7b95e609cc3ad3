"""Time, bytes and quality of exported models, original and folded, beside the original in torch.

    python eval/exported.py --model reference/bolt --output eval/results/exported [--max-series 50]
    python eval/exported.py --model reference/t5 --size 64,0.5,160 --output OUT --quality-only

Writes `OUTPUT-MODEL.csv` and `.md`. The original and models folded to each `--size` (by default the
recipe `balanced` and the smallest of RESULTS) run in torch, and as ONNX graphs in float32, int8 and
with weights of 8 bits (`int8-weights`), all in turn in one process on one thread, for one series
and for 32 of 512 and 2048 steps (Chronos-T5: 4 series and 20 paths, 256 steps). Ratios of latency
are to the original in torch, with 95 % intervals over the rounds; those of quality to its scores,
on the first `--max-series` of each dataset, skill to that of its probe. Peak memory is that of a
process of its own, which opens the model and forecasts, beyond the interpreter and its libraries;
of the first and the last call.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from output import parser_of, rounded, write_tables
from rich import print as show
from testbed import Size, Testbed, short_name, with_interval

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.sizes import bytes_on_disk
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.given import loaded_of
from tscompress.exporting.graph import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "int8", "int8-weights")
#: The recipe `balanced`, and the smallest size of RESULTS, of a tiny model.
SIZES = {
    "chronos-bolt": ("64,0.5,128", "32,0.25,96"),
    "chronos-2": ("64,0.5,128", "64,0.25,64"),
    "chronos-t5": ("64,0.5,128",),
}
#: Series and steps of each timed call.
SHAPES = {
    "chronos-bolt": ((1, 512), (32, 512), (1, 2048), (32, 2048)),
    "chronos-2": ((1, 512), (32, 512), (1, 2048)),
    "chronos-t5": ((4, 256),),
}
_PATHS = 20
_ENDS = ("", " low", " high")
#: What a column of peak memory starts with, in bytes.
_PEAK = "peak bytes, "
#: Of forecasts, without the original, by their heads in the table.
_MEASURES = {"coverage": "80 % band covers", "crossing_rate": "quantiles cross"}


def directories(bed: Testbed, sizes: list[Size], place: Path) -> dict[str, Path]:
    """Every model by its label: in torch, and exported; the original in torch is first."""
    sources = {"original": Path(str(bed.original.directory))}
    for size in sizes:
        sources[size.label] = place / size.label.replace(" ", "").replace(",", "-")
        tscompress.save(bed.folded(size), sources[size.label])
    return directories_of(sources, place)


def directories_of(sources: Mapping[str, Path], place: Path) -> dict[str, Path]:
    """Each source in torch, then its exports, which go below ``place``."""
    found = {f"{label}, torch": path for label, path in sources.items()}
    for number, (label, path) in enumerate(sources.items()):
        for precision in PRECISIONS:
            target = place / f"{number}-{precision}"
            tscompress.export(path, target, precision=precision)
            found[f"{label}, {precision}"] = target
    return found


def in_turn(
    models: Mapping[str, Path], workload: Workload, *, memory: bool
) -> dict[str, dict[str, float]]:
    """Of each model ``latency``, a ratio to the first's, with the ends of its 95 % interval,
    ``latency ms``, and with ``memory`` its ``peak bytes``, otherwise NaN."""
    result = bench(dict(models), workload, measure_macs=False, measure_memory=memory)
    columns = {}
    for label, model in zip(models, result.models, strict=True):
        ratio = result.ratios(label)["latency_ms"]
        low, high = result.latency_ratio_interval(label) or (ratio, ratio)
        columns[label] = {
            "latency": ratio,
            "latency low": low,
            "latency high": high,
            "latency ms": model.latency_ms,
            "peak bytes": math.nan if model.peak_memory_bytes is None else model.peak_memory_bytes,
        }
    return columns


def latencies(models: Mapping[str, Path], family: str, repeats: int) -> dict[str, dict[str, float]]:
    """Columns of each model: ratios of latency with the ends of their intervals; peak memory of
    the first and the last call."""
    columns: dict[str, dict[str, float]] = {label: {} for label in models}
    shapes = SHAPES[family]
    for batch, steps in shapes:
        workload = Workload(
            batch_size=batch,
            context_length=steps,
            horizon=64 if family != "chronos-t5" else 16,
            repeats=repeats,
            warmup=2,
            threads=1,
            num_samples=_PATHS if family == "chronos-t5" else None,
        )
        weighed = (batch, steps) in (shapes[0], shapes[-1])
        for label, found in in_turn(models, workload, memory=weighed).items():
            name = f"{batch} × {steps}"
            columns[label] |= {f"{name}{end}": found[f"latency{end}"] for end in _ENDS}
            if weighed:
                columns[label][f"{_PEAK}{name}"] = found["peak bytes"]
    return columns


def qualities(bed: Testbed, models: Mapping[str, Path]) -> Iterator[tuple[str, dict[str, float]]]:
    """Columns of each model: ratios of scores, kept skill, coverage and crossing quantiles."""
    for label, path in models.items():
        pipeline = loaded_of(str(path)).forecaster
        scores = bed.score(pipeline, label)
        measured = {name: scores.mean_of(name) for name in _MEASURES}
        yield label, {**bed.row(pipeline, label), **measured}


def graph_bytes(path: Path) -> int:
    """Of graphs or weights."""
    graphs = [file.stat().st_size for file in path.glob("*.onnx")]
    return sum(graphs) if graphs else bytes_on_disk(path)


def markdown(frame: pd.DataFrame, shapes: list[str]) -> str:
    """The table for people."""
    timed = [shape for shape in shapes if shape in frame]
    shown = [name for name in ("WQL", "MASE", "skill") if name in frame]
    peaks = [name for name in frame if str(name).startswith(_PEAK)]
    heads = ["model", "MB", *timed, *(name.replace("bytes", "MB") for name in peaks)]
    heads += [*shown, *(_MEASURES.values() if shown else ())]
    lines = [" | ".join(heads), " | ".join(["---"] + ["--:"] * (len(heads) - 1))]
    for row in frame.to_dict("records"):
        cells = [str(row["model"]), f"{row['bytes'] / 1e6:.2f}"]
        cells += [with_interval(row, name, 3) for name in timed]
        cells += [f"{row[name] / 1e6:.0f}" for name in peaks]
        cells += [with_interval(row, name) for name in shown]
        cells += [f"{row[name]:.1%}" for name in _MEASURES if shown]
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def measured(bed: Testbed, options: Any, place: Path) -> pd.DataFrame:
    """A row for each model."""
    family = bed.original.family
    sizes = [Size.parse(text) for text in options.size or SIZES[family]]
    models = directories(bed, sizes, place)
    rows: dict[str, dict[str, Any]] = {
        label: {"model": label, "bytes": graph_bytes(path)} for label, path in models.items()
    }
    if not options.quality_only:
        for label, found in latencies(models, family, options.repeats).items():
            rows[label] |= found
    if not options.time_only:
        for label, quality in qualities(bed, models):
            rows[label] |= quality
            show(rounded(rows[label]))
    return pd.DataFrame(rows.values())


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", action="append", help="HEAD,UNITS[,WIDTH]; repeatable")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--time-only", action="store_true")
    only.add_argument("--quality-only", action="store_true")
    options = parser.parse_args()
    bed = Testbed(options.model, options.max_series)
    with tempfile.TemporaryDirectory() as place:
        frame = measured(bed, options, Path(place))
    shapes = [f"{batch} × {steps}" for batch, steps in SHAPES[bed.original.family]]
    stem = f"{options.output}-{short_name(options.model)}"
    write_tables(stem, frame, markdown(frame, shapes))


if __name__ == "__main__":
    main()
