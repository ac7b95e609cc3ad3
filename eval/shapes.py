"""Time of folded shapes against the dense ones, with random weights: time does not depend on them.

    python eval/shapes.py --output eval/results/shapes [--quick] [--threads 2] [--memory]
    python eval/shapes.py --output eval/results/shapes-gpu --device cuda
        --models chronos-2-base chronos-bolt-base chronos-t5-base

Models of the published Chronos-T5, Chronos-Bolt and Chronos-2 shapes at the sizes of the recipes
and some more take turns in one process with the dense original and with the next smaller official
size, which every compressed model has to beat. Some T5 run once more with sample paths that share
the cross-attention keys and values of their series (tscompress.share_cross_attention), some
Chronos-2 without the queries and keys of group attention (compress --univariate). Ratios are to
the dense original. Weights have one dtype, so that bytes have the ratio of parameters.

float32 on the CPU; `--memory` then writes each model to a temporary directory and measures its peak
in a process of its own. With `--device cuda`: bfloat16, and peak memory. Time is that of the whole
predict call, with what the pipeline does on the CPU. A batch of 32 series keeps a large GPU waiting
for launches, so Chronos-Bolt and Chronos-2 run there with 256 series too. Chronos-T5 waits at every
step of its decoder: its base shape has 8 series × 20 paths and 16 steps, on a CPU as
well; the second command is meant to end within two minutes on an H100. Chronos asks for exactly as
many new tokens as the horizon has steps, so random weights cannot end early. `--quick` only shows
that it runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from chronos import BaseChronosPipeline
from output import parser_of, write_tables
from rich.console import Console

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.results import BenchResult
from tscompress.benchmark.workload import Workload
from tscompress.budget.candidate_latency import fill_randomly_
from tscompress.checkpoints.format import apply_structure_
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.residual_stream import sliced_config
from tscompress.errors import UsageError
from tscompress.families.registry import build_empty, describe, wrap_pipeline
from tscompress.io.text import ratio_text
from tscompress.layers.shared_cross_attention import share_cross_attention
from tscompress.training.pretrain_model import build_model, design
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

FamilyName = Literal["chronos-t5", "chronos-bolt", "chronos-2"]
DENSE_D_KV = 64
PAPER = "The paper reports 0.346 of the time and 0.186 of the memory for its compressed Chronos-T5."


@dataclass(frozen=True)
class Published:
    """Sizes of an official model; ``layers`` of its encoder and of its decoder, if it has one."""

    d_model: int
    d_ff: int
    layers: tuple[int, int]
    heads: int
    settings: Mapping[str, Any]


def _with_decoder(**settings: Any) -> dict[str, Published]:
    """The official models of Chronos-T5 and Chronos-Bolt."""
    return {
        "mini": Published(384, 1536, (4, 4), 8, settings),
        "small": Published(512, 2048, (6, 6), 8, settings),
        "base": Published(768, 3072, (12, 12), 12, settings),
    }


_CHRONOS2 = {"context_length": 8192, "prediction_length": 1024}
_13_LEVELS = (0.01, 0.05, *(round(0.1 * step, 1) for step in range(1, 10)), 0.95, 0.99)
_21_LEVELS = (0.01, *(round(0.05 * step, 2) for step in range(1, 20)), 0.99)
OFFICIAL: Mapping[FamilyName, Mapping[str, Published]] = {
    "chronos-t5": _with_decoder(context_length=512),
    "chronos-bolt": _with_decoder(context_length=2048),
    "chronos-2": {
        "small": Published(512, 2048, (6, 0), 8, _CHRONOS2 | {"quantiles": _13_LEVELS}),
        "base": Published(768, 3072, (12, 0), 12, _CHRONOS2 | {"quantiles": _21_LEVELS}),
    },
}
SMALLER = {"small": "mini", "base": "small"}


@dataclass(frozen=True)
class Fold:
    """What is left: head size, shares of the residual stream, of the hidden units and of the
    decoder's layers; and how it runs, ``shared`` as the paths of Chronos-T5 do, ``univariate`` as
    ``compress --univariate`` leaves Chronos-2."""

    width: float = 1.0
    d_ff: float = 1.0
    d_kv: int = DENSE_D_KV
    decoder: float = 1.0
    shared: bool = False
    univariate: bool = False


@dataclass(frozen=True)
class Shape:
    """A published shape, or one folded from it."""

    family: FamilyName
    size: str
    fold: Fold = Fold()

    @property
    def published(self) -> Published:
        return OFFICIAL[self.family][self.size]

    @property
    def d_model(self) -> int:
        return round(self.published.d_model * self.fold.width)

    @property
    def d_ff(self) -> int:
        return round(self.published.d_ff * self.fold.d_ff)

    @property
    def layers(self) -> tuple[int, int]:
        """Of encoder and decoder."""
        encoder, decoder = self.published.layers
        return encoder, round(decoder * self.fold.decoder)

    @property
    def layers_text(self) -> str:
        """``12 + 12``, or ``12`` without a decoder."""
        return " + ".join(str(count) for count in self.layers if count)

    @property
    def label(self) -> str:
        """For the table, which has sizes in columns."""
        marks = {"shared": self.fold.shared, "univariate": self.fold.univariate}
        return ", ".join(
            [f"{self.family}-{self.size}", *(mark for mark, is_so in marks.items() if is_so)]
        )

    @property
    def name(self) -> str:
        """Of no other shape."""
        sizes = f"d_model {self.d_model} d_kv {self.fold.d_kv} d_ff {self.d_ff}"
        return f"{self.label} {sizes} layers {self.layers_text}"


@dataclass(frozen=True)
class Comparison:
    """Folded shapes of one published model.

    Attributes
    ----------
    folded
        Without the dense original and the next smaller size, which are always there.
    workload
        On either device.
    large_batch
        Series of a further workload on a GPU; None: there is none.
    by_default
        Whether it runs on a CPU if no names are given; a GPU then runs all.
    """

    family: FamilyName
    size: str
    folded: tuple[Fold, ...]
    workload: Workload
    large_batch: int | None = None
    by_default: bool = True

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size}"

    @property
    def shapes(self) -> list[Shape]:
        """The dense original, what it is folded to, and the next smaller official size."""
        dense = Shape(self.family, self.size)
        folded = [replace(dense, fold=fold) for fold in self.folded]
        return [dense, *folded, Shape(self.family, SMALLER[self.size])]

    def workloads(self, device: str) -> list[Workload]:
        """What is measured on ``device``."""
        batches = [self.workload.batch_size]
        if device == "cuda" and self.large_batch is not None:
            batches.append(self.large_batch)
        changes = [{"device": device, "batch_size": batch} for batch in batches]
        return [self.workload.model_copy(update=change) for change in changes]


#: Of recipes/gentle.yaml, balanced.yaml and extreme.yaml.
RECIPES = (Fold(0.625, 0.5), Fold(0.5, 0.5), Fold(0.625, 0.25, 32))
T5_FOLDED = (
    *RECIPES, Fold(d_kv=16), Fold(d_ff=0.5, decoder=0.5),
    Fold(shared=True), Fold(0.5, 0.5, shared=True),
)  # fmt: skip
# Those of the front page of the README, and smaller heads alone.
BOLT_FOLDED = (Fold(d_ff=0.5), *RECIPES, Fold(0.4375, 0.25, 32), Fold(d_kv=32))
CHRONOS2_FOLDED = (
    *RECIPES, Fold(0.375, 0.25), Fold(d_kv=32),
    Fold(univariate=True), Fold(0.5, 0.5, univariate=True),
)  # fmt: skip
T5_WORKLOAD = Workload(
    batch_size=4, context_length=512, horizon=16, num_samples=20, repeats=11, warmup=2
)
PATCH_WORKLOAD = Workload(batch_size=32, context_length=2048, horizon=64, repeats=15, warmup=3)
LARGE_BATCH = 256
COMPARISONS = (
    Comparison("chronos-t5", "small", T5_FOLDED, T5_WORKLOAD),
    Comparison("chronos-bolt", "small", BOLT_FOLDED, PATCH_WORKLOAD, LARGE_BATCH),
    Comparison(
        "chronos-t5", "base", T5_FOLDED,
        T5_WORKLOAD.model_copy(update={"batch_size": 8, "warmup": 1}),
        by_default=False,
    ),
    Comparison(
        "chronos-bolt", "base", BOLT_FOLDED, PATCH_WORKLOAD, LARGE_BATCH, by_default=False
    ),
    Comparison(
        "chronos-2", "base", CHRONOS2_FOLDED, PATCH_WORKLOAD, LARGE_BATCH, by_default=False
    ),
)  # fmt: skip
QUICK = {"batch_size": 1, "context_length": 32, "horizon": 2, "repeats": 5, "warmup": 1}


def chosen(names: Sequence[str] | None, device: str) -> list[Comparison]:
    """Comparisons of these names, in their order; of none, the default on ``device``.

    Raises
    ------
    UsageError
        There is no comparison of such a name.
    """
    known = {comparison.name: comparison for comparison in COMPARISONS}
    if not names:
        return [one for one in COMPARISONS if one.by_default or device == "cuda"]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no comparison of {unknown[0]!r}; there are {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)]


def recipe_of(shape: Shape) -> PretrainRecipe:
    """One that a model of the shape could be trained by, at the published width."""
    encoder, decoder = shape.layers
    return PretrainRecipe(
        family=shape.family,
        name=shape.name,
        architecture=Architecture(
            d_model=shape.published.d_model, d_kv=shape.fold.d_kv, d_ff=shape.d_ff,
            num_layers=encoder, num_decoder_layers=decoder, num_heads=shape.published.heads,
            **shape.published.settings,
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=8, horizon=1, batch_size=1),)),),
        token_embedding="normal" if shape.family == "chronos-t5" else "fourier",
    )  # fmt: skip


def build(shape: Shape, device: str, dtype: torch.dtype) -> BaseChronosPipeline:
    """A pipeline of random weights, which are drawn on ``device``.

    They are of the official initial distribution; of a shape that no pretraining makes, a narrower
    or a univariate one, uniform.
    """
    torch.manual_seed(0)
    recipe = recipe_of(shape)
    model: Any
    if shape.fold.width == 1 and not shape.fold.univariate:
        with torch.device(device):
            model = build_model(recipe)
    else:
        config, _ = design(recipe)
        settings = config.to_dict()
        if shape.d_model < config.d_model:  # a Chronos-T5 then has a head of its own
            settings = sliced_config(shape.family, settings, shape.d_model)
        model = build_empty(shape.family, settings)
        if shape.fold.univariate:
            apply_structure_(
                model, fold_plan(model, describe(shape.family, model), univariate=True)
            )
        fill_randomly_(model, dtype, device)
    pipeline = wrap_pipeline(shape.family, model.to(device=device, dtype=dtype).eval())
    return share_cross_attention(pipeline) if shape.fold.shared else pipeline


def write_checkpoint(shape: Shape, directory: Path) -> Path:
    """A checkpoint of the shape, of other random weights; univariate as the command leaves it."""
    stock = build(replace(shape, fold=replace(shape.fold, univariate=False)), "cpu", torch.float32)
    path = directory / "stock"
    stock.inner_model.save_pretrained(path)
    if not shape.fold.univariate:
        return path
    small = tscompress.compress(path, fold=tscompress.FoldConfig(univariate=True))
    return tscompress.save(small, directory / "univariate")


def measure(
    comparison: Comparison,
    *,
    device: str,
    quick: bool = False,
    threads: int | None = None,
    repeats: int | None = None,
    memory: bool = False,
) -> list[BenchResult]:
    """All shapes of a comparison taking turns, by workload; ``memory`` on the CPU too."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    changes: dict[str, Any] = {"threads": threads} | (QUICK if quick else {})
    changes |= {} if repeats is None else {"repeats": repeats}
    workloads = [one.model_copy(update=changes) for one in comparison.workloads(device)]
    pipelines = [(shape.name, build(shape, device, dtype)) for shape in comparison.shapes]
    with tempfile.TemporaryDirectory() as place:
        directories = {
            shape.name: write_checkpoint(shape, Path(place) / str(number))
            for number, shape in enumerate(comparison.shapes)
            if memory and device == "cpu"
        }
        return [
            bench(
                pipelines,
                workload,
                directories=directories,
                measure_memory=memory or device == "cuda",
            )
            for workload in dict.fromkeys(workloads)  # quick ones have one batch
        ]


def rows(comparison: Comparison, result: BenchResult) -> list[dict[str, Any]]:
    """One row a shape; ratios to the dense original, the first."""
    found = []
    for shape, model in zip(comparison.shapes, result.models, strict=True):
        ratios = result.ratios(model.name)
        low, high = result.latency_ratio_interval(model.name) or (float("nan"),) * 2
        found.append(
            {
                "model": f"{shape.family}-{shape.size}",
                "series": result.workload.batch_size,
                "paths share": shape.fold.shared,
                "univariate": shape.fold.univariate,
                "d_model": shape.d_model,
                "d_kv": shape.fold.d_kv,
                "d_ff": shape.d_ff,
                "layers": shape.layers_text,
                "parameters": ratios["parameters"],
                "bytes": ratios["parameter_bytes"],
                "MACs": ratios["macs"],
                "KV cache": ratios.get("kv_cache_bytes", float("nan")),
                "latency": ratios["latency_ms"],
                "latency low": low,
                "latency high": high,
                "latency ms": model.latency_ms,
                "peak memory": ratios.get("peak_memory_bytes", float("nan")),
            }
        )
    return found


def conditions(result: BenchResult) -> str:
    """What was run, on what."""
    workload = result.workload
    samples = workload.num_samples and f", {workload.num_samples} samples"
    machine = f"float32, {result.device_name}, {result.threads} threads"
    if workload.device == "cuda":
        machine = f"bfloat16, {result.device_name}"
    return (
        f"{workload.batch_size} series × {workload.context_length} steps{samples or ''}, horizon "
        f"{workload.horizon}, {machine}, {workload.repeats} rounds, torch {result.torch_version}."
    )


def markdown(comparison: Comparison, result: BenchResult) -> str:
    """A heading, what was run, and the table as GitHub shows it."""
    frame = pd.DataFrame(rows(comparison, result))
    shown: dict[str, list[str]] = {"shape": [shape.label for shape in comparison.shapes]}
    shown |= {key: list(map(str, frame[key])) for key in ("d_model", "d_kv", "d_ff", "layers")}
    shown["parameters, bytes"] = [f"{value:.3f}" for value in frame["parameters"]]
    # None: without a decoder, or not measured.
    for key in ("MACs", "KV cache"):
        if frame[key].notna().all():
            shown[key] = [f"{value:.3f}" for value in frame[key]]
    timed = zip(frame["latency"], frame["latency low"], frame["latency high"], strict=True)
    ratios = [ratio_text(*one, 3) for one in timed]
    shown["latency (95 %)"] = ["1", *ratios[1:]]
    if result.workload.device == "cuda":  # absolute times of a shared CPU say nothing
        shown["ms"] = [f"{value:.1f}" for value in frame["latency ms"]]
    if frame["peak memory"].notna().all():
        shown["peak memory"] = [f"{value:.3f}" for value in frame["peak memory"]]
    lines = [f"### {comparison.name}", "", conditions(result), ""]
    lines += ["| " + " | ".join(shown) + " |", "|---|" + "--:|" * (len(shown) - 1)]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*shown.values(), strict=True)]
    if "peak memory" in shown and comparison.family == "chronos-t5":
        lines += ["", PAPER]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = parser_of(__doc__, ".csv and .md")
    names = ", ".join(comparison.name for comparison in COMPARISONS)
    found.add_argument("--models", nargs="+", metavar="NAME", help=f"of {names}")
    found.add_argument("--repeats", type=positive, help="rounds; default: as a model needs")
    found.add_argument("--quick", action="store_true", help="tiny workloads: does it run?")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--threads", type=positive, help="default: as PyTorch is set")
    found.add_argument("--memory", action="store_true", help="peak memory on the CPU too")
    return found


def positive(text: str) -> int:
    """A count, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a whole number from 1 on.")
    return int(text)


def main() -> None:
    options = parser()
    arguments = options.parse_args()
    try:
        comparisons = chosen(arguments.models, arguments.device)
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("PyTorch finds no CUDA device; use --device cpu.")
    except UsageError as error:
        options.exit(2, f"{options.prog}: error: {error}\n")
    console = Console()
    table: list[dict[str, Any]] = []
    text: list[str] = []
    for comparison in comparisons:
        results = measure(
            comparison,
            device=arguments.device,
            quick=arguments.quick,
            threads=arguments.threads,
            repeats=arguments.repeats,
            memory=arguments.memory,
        )
        for result in results:
            table += rows(comparison, result)
            text.append(markdown(comparison, result))
            console.print(text[-1], markup=False, soft_wrap=True)
        # After each comparison, so that a long run that is cut short leaves what it has measured.
        write_tables(arguments.output, pd.DataFrame(table), "\n".join(text))


if __name__ == "__main__":
    main()
