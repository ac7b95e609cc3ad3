"""Time of folded shapes against the dense ones, with random weights: time does not depend on them.

    python eval/shapes.py --output eval/results/shapes [--quick] [--device cpu|cuda] [--threads 2]

Models of the published Chronos-T5 and Chronos-Bolt shapes, with smaller heads (d_kv), fewer hidden
units (d_ff), a narrower residual stream (d_model) or half of the decoder's layers, take turns in
one process with the dense original and with the next smaller official size, which every compressed
model has to beat. Some T5 run once more with sample paths that share the cross-attention keys and
values of their series (tscompress.share_cross_attention). Ratios are to the dense original.

float32 on the CPU. With `--device cuda`: bfloat16, the base shapes too, and peak memory. Chronos
asks for exactly as many new tokens as the horizon has steps, so random weights cannot end early.
`--quick` only shows that it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from chronos import BaseChronosPipeline
from output import parser_of, write_tables
from rich.console import Console

from tscompress.benchmark.bench import bench
from tscompress.benchmark.results import BenchResult
from tscompress.benchmark.workload import Workload
from tscompress.budget.search import fill_randomly_
from tscompress.compression.residual_stream import sliced_config
from tscompress.families.registry import build_empty, wrap_pipeline
from tscompress.io.text import ratio_text
from tscompress.layers.shared_cross_attention import share_cross_attention
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

FamilyName = Literal["chronos-t5", "chronos-bolt"]
DENSE_D_KV = 64
#: d_model, d_ff, layers of each stack, heads; the same in both families.
PUBLISHED = {
    "mini": (384, 1536, 4, 8),
    "small": (512, 2048, 6, 8),
    "base": (768, 3072, 12, 12),
}
SMALLER = {"small": "mini", "base": "small"}
CONTEXT_LENGTH = {"chronos-t5": 512, "chronos-bolt": 2048}
PAPER = "The paper reports 0.346 of the time and 0.186 of the memory for its compressed Chronos-T5."


@dataclass(frozen=True)
class Shape:
    """A published shape, or one folded to smaller heads, and shares of the hidden units, of the
    decoder's layers and of the residual stream; ``shared``: as the paths of it are run."""

    family: FamilyName
    size: str
    d_kv: int = DENSE_D_KV
    d_ff_share: float = 1.0
    decoder_share: float = 1.0
    width_share: float = 1.0
    shared: bool = False

    @property
    def d_model(self) -> int:
        return round(PUBLISHED[self.size][0] * self.width_share)

    @property
    def d_ff(self) -> int:
        return round(PUBLISHED[self.size][1] * self.d_ff_share)

    @property
    def layers(self) -> tuple[int, int]:
        """Of encoder and decoder."""
        layers = PUBLISHED[self.size][2]
        return layers, round(layers * self.decoder_share)

    @property
    def name(self) -> str:
        layers = "+".join(map(str, self.layers))
        sizes = f"d_model {self.d_model} d_kv {self.d_kv} d_ff {self.d_ff} layers {layers}"
        return f"{self.family}-{self.size} {sizes}{' shared' if self.shared else ''}"


@dataclass(frozen=True)
class Comparison:
    """Folded shapes of one published model, under one workload.

    ``folded`` has their d_kv, share of d_ff and, if not all of them stay, of decoder layers and of
    d_model; ``shared`` likewise those that run with shared cross-attention.
    """

    family: FamilyName
    size: str
    folded: tuple[tuple[float, ...], ...]
    workload: Workload
    shared: tuple[tuple[float, ...], ...] = ()

    @property
    def shapes(self) -> list[Shape]:
        """The dense original, what it is folded to, and the next smaller official size."""
        folded = [
            Shape(self.family, self.size, int(d_kv), *shares, shared=shared)
            for sizes, shared in ((self.folded, False), (self.shared, True))
            for d_kv, *shares in sizes
        ]
        smaller = Shape(self.family, SMALLER[self.size])
        return [Shape(self.family, self.size), *folded, smaller]


T5_FOLDED = (
    (8, 1.0), (8, 0.25), (16, 1.0), (8, 1.0, 0.5), (8, 0.25, 0.5), (16, 0.5, 1.0, 0.5),
)  # fmt: skip
T5_SHARED = ((64, 1.0), (8, 1.0), (8, 0.25), (16, 0.5, 1.0, 0.5))
BOLT_FOLDED = (
    (8, 1.0), (64, 0.25), (8, 0.25), (16, 0.5), (64, 1.0, 1.0, 0.25), (8, 0.25, 1.0, 0.25),
    (4, 0.125, 1.0, 0.125),
)  # fmt: skip
T5_WORKLOAD = Workload(
    batch_size=4, context_length=512, horizon=16, num_samples=20, repeats=11, warmup=2
)
BOLT_WORKLOAD = Workload(batch_size=32, context_length=2048, horizon=64, repeats=15, warmup=3)
SMALL = (
    Comparison("chronos-t5", "small", T5_FOLDED, T5_WORKLOAD, T5_SHARED),
    Comparison("chronos-bolt", "small", BOLT_FOLDED, BOLT_WORKLOAD),
)
BASE = (
    Comparison(
        "chronos-t5", "base", T5_FOLDED,
        T5_WORKLOAD.model_copy(update={"batch_size": 32, "horizon": 64}), T5_SHARED,
    ),
    Comparison("chronos-bolt", "base", BOLT_FOLDED, BOLT_WORKLOAD),
)  # fmt: skip
QUICK = {"batch_size": 1, "context_length": 32, "horizon": 2, "repeats": 5, "warmup": 1}


def build(shape: Shape, device: str, dtype: torch.dtype) -> BaseChronosPipeline:
    """A pipeline of random weights in the official initial distribution."""
    d_model, _, _, heads = PUBLISHED[shape.size]
    encoder, decoder = shape.layers
    recipe = PretrainRecipe(
        family=shape.family,
        name=shape.name,
        architecture=Architecture(
            d_model=d_model, d_kv=shape.d_kv, d_ff=shape.d_ff, num_layers=encoder,
            num_decoder_layers=decoder, num_heads=heads,
            context_length=CONTEXT_LENGTH[shape.family],
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=8, horizon=1, batch_size=1),)),),
        token_embedding="normal",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = build_model(recipe)
    if shape.d_model < d_model:  # a Chronos-T5 then has a head of its own
        config = sliced_config(shape.family, model.config.to_dict(), shape.d_model)
        model = build_empty(shape.family, config)
        fill_randomly_(model, dtype, device)
    model = model.to(device=device, dtype=dtype).eval()
    pipeline = wrap_pipeline(shape.family, model)
    return share_cross_attention(pipeline) if shape.shared else pipeline


def measure(
    comparison: Comparison, *, quick: bool, device: str, threads: int | None
) -> BenchResult:
    """All shapes of a comparison, taking turns."""
    changes = {"device": device, "threads": threads} | (QUICK if quick else {})
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return bench(
        [(shape.name, build(shape, device, dtype)) for shape in comparison.shapes],
        comparison.workload.model_copy(update=changes),
        measure_memory=device == "cuda",
    )


def rows(comparison: Comparison, result: BenchResult) -> list[dict[str, Any]]:
    """One row a shape; ratios to the dense original, the first."""
    found = []
    for shape, model in zip(comparison.shapes, result.models, strict=True):
        ratios = result.ratios(model.name)
        low, high = result.latency_ratio_interval(model.name) or (float("nan"),) * 2
        found.append(
            {
                "model": f"{shape.family}-{shape.size}",
                "paths share": shape.shared,
                "d_model": shape.d_model,
                "d_kv": shape.d_kv,
                "d_ff": shape.d_ff,
                "layers": f"{shape.layers[0]} + {shape.layers[1]}",
                "parameters": ratios["parameters"],
                "bytes": ratios["parameter_bytes"],
                "MACs": ratios["macs"],
                "KV cache": ratios["kv_cache_bytes"],
                "latency": ratios["latency_ms"],
                "latency low": low,
                "latency high": high,
                "latency ms": model.latency_ms,
                "peak memory": ratios.get("peak_memory_bytes", float("nan")),
            }
        )
    return found


def markdown(comparison: Comparison, result: BenchResult) -> str:
    """A heading that says what was run, and the table as GitHub shows it."""
    workload = result.workload
    samples = f", {workload.num_samples} samples" if comparison.family == "chronos-t5" else ""
    dtype = "bfloat16" if workload.device == "cuda" else "float32"
    has_memory = workload.device == "cuda"
    lines = [
        f"### {comparison.family}-{comparison.size}",
        "",
        f"{workload.batch_size} series × {workload.context_length} steps{samples}, horizon "
        f"{workload.horizon}, {dtype}, {result.device_name}, {result.threads} threads, "
        f"{workload.repeats} rounds, torch {result.torch_version}.",
        "",
        "| shape | d_model | d_kv | d_ff | layers | parameters | MACs | KV cache | latency (95 %) |"
        + (" ms | peak memory |" if has_memory else ""),
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|" + ("--:|--:|" if has_memory else ""),
    ]
    for place, row in enumerate(rows(comparison, result)):
        latency = "1"
        if place:
            latency = ratio_text(row["latency"], row["latency low"], row["latency high"], 3)
        # Absolute times of a shared CPU say nothing.
        memory = f" {row['latency ms']:.0f} | {row['peak memory']:.3f} |" if has_memory else ""
        lines.append(
            f"| {row['model']}{', shared' if row['paths share'] else ''} | {row['d_model']} | "
            f"{row['d_kv']} | {row['d_ff']} | {row['layers']} | "
            f"{row['parameters']:.3f} | {row['MACs']:.3f} | {row['KV cache']:.3f} | {latency} |"
            f"{memory}"
        )
    if has_memory and comparison.family == "chronos-t5":
        lines += ["", PAPER]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md")
    parser.add_argument("--quick", action="store_true", help="tiny workloads: does it run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="default: as PyTorch is set")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; use --device cpu.")
    console = Console()
    table: list[dict[str, Any]] = []
    text: list[str] = []
    for comparison in SMALL + (BASE if arguments.device == "cuda" else ()):
        result = measure(
            comparison,
            quick=arguments.quick,
            device=arguments.device,
            threads=arguments.threads,
        )
        table += rows(comparison, result)
        text.append(markdown(comparison, result))
        console.print(text[-1], markup=False, soft_wrap=True)
        # After each comparison, so that a long run that is cut short leaves what it has measured.
        frame = pd.DataFrame(table)
        write_tables(arguments.output, frame, "\n".join(text))


if __name__ == "__main__":
    main()
