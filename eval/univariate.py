"""What `compress --univariate` saves of a Chronos-2 of random weights, and whether it is exact.

    python eval/univariate.py tiny
    python eval/univariate.py true
    python eval/univariate.py tiny --latency

`tiny` is the shape of recipes/pretrain/chronos2-tiny.yaml, `true` that of amazon/chronos-2. Parity
is the largest difference of a quantile from the original's, as a share of the largest quantile of
its series. `--latency` exports both models and times their graphs in turn, on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from chronos.chronos2 import Chronos2Model
from torch import nn

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.sizes import bytes_on_disk, parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.families.registry import adapter_of
from tscompress.io.text import percent
from tscompress.training.pretrain_recipe import Architecture

_SHAPE = {"context_length": 2048, "prediction_length": 192, "patch_size": 16}
_13 = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_21 = (0.01, *(round(0.05 * step, 2) for step in range(1, 20)), 0.99)
SHAPES = {
    "tiny": Architecture(
        d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_decoder_layers=0, num_heads=4,
        quantiles=_13, **_SHAPE,
    ),
    "true": Architecture(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_decoder_layers=0, num_heads=12,
        quantiles=_21, **{**_SHAPE, "context_length": 8192, "prediction_length": 1024},
    ),
}  # fmt: skip


def random_checkpoint(shape: Architecture, directory: Path) -> Path:
    """A checkpoint of random weights of unit scale, whose layers all matter."""
    torch.manual_seed(0)
    model = Chronos2Model(adapter_of("chronos-2").stock_config(shape))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # scores, which are not scaled, of unit variance too
            scale = shape.d_kv**-0.5 if name.endswith(".q") else 1.0
            nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
        elif name.endswith("layer_norm"):
            nn.init.ones_(module.weight)
    model.save_pretrained(directory)
    return directory


def largest_difference(first: Path, second: Path) -> float:
    """Of quantiles of series of several lengths, as a share of each series' largest."""
    time = torch.arange(700.0)
    series = [torch.sin(time[:steps] / 7) + 0.01 * time[:steps] for steps in (700, 96, 40)]
    ours, theirs = (
        tscompress.load(path).forecaster.predict(series, prediction_length=96)
        for path in (first, second)
    )
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def sizes(original: Path, univariate: Path) -> str:
    """Parameters, bytes and parity, for people."""
    before, after = (parameter_count(tscompress.load(p).model) for p in (original, univariate))
    stored = [bytes_on_disk(path) for path in (original, univariate)]
    return (
        f"parameters {before:,} -> {after:,} (-{percent(1 - after / before, 1)})\n"
        f"bytes {stored[0]:,} -> {stored[1]:,} (-{percent(1 - stored[1] / stored[0], 1)})\n"
        f"quantiles differ by at most {largest_difference(univariate, original):.1e} of the largest"
    )


def latencies(original: Path, univariate: Path, repeats: int) -> str:
    """Latency of the graphs at batches of 1 and 32, and its ratio with a 95% interval."""
    models = {"full": original, "univariate": univariate}
    graphs = {name: path.parent / f"{path.name}-graph" for name, path in models.items()}
    for name, path in models.items():
        print(tscompress.export(path, graphs[name]))
    lines = []
    for batch in (1, 32):
        workload = Workload(
            batch_size=batch, context_length=512, horizon=64, repeats=repeats, warmup=3, threads=1
        )
        result = bench(graphs, workload, measure_macs=False, measure_memory=False)
        ours = result.ratios("univariate")["latency_ms"]
        low, high = result.latency_ratio_interval("univariate") or (ours, ours)
        medians = ", ".join(f"{one.name} {one.latency_ms:.2f} ms" for one in result.models)
        lines.append(f"batch {batch}: {medians}; ratio {ours:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        original = random_checkpoint(SHAPES[options.shape], Path(place) / "chronos-2")
        univariate = Path(place) / "chronos-2-univariate"
        small = tscompress.compress(original, fold=tscompress.FoldConfig(univariate=True))
        tscompress.save(small, univariate)
        print(small.plan.summary() if small.plan else "")
        del small
        print(sizes(original, univariate))
        if options.latency:
            print(latencies(original, univariate, options.repeats))


if __name__ == "__main__":
    main()
