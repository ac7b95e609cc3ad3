"""Peak memory of compressing big checkpoints: estimated before the start, and measured.

    python eval/big.py --output eval/results/big --size base --size large

Checkpoints have the shapes of chronos-t5-base and -large, random weights in bfloat16, and several
weight files; they are written file by file into a temporary directory, and gone afterwards. Each is
compressed in a process of its own. ``--limit`` bounds that process's private writable memory
(RLIMIT_DATA), which cannot be given back to the system; RLIMIT_AS would also count the gigabytes of
address space that torch reserves and never touches.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from tscompress.families.registry import build_empty
from tscompress.training.pretrain_model import design
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

#: d_model, d_ff, layers of each stack, heads
SHAPES = {
    "tiny": (256, 1024, 4, 4),
    "mini": (384, 1536, 4, 8),
    "base": (768, 3072, 12, 12),
    "large": (1024, 4096, 24, 16),
}
GIGA = 1e9


def main() -> None:
    arguments = parse()
    if arguments.child:
        print(json.dumps(compress(json.loads(arguments.child))))
        return
    rows = []
    for size in arguments.size:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measure(size, Path(directory), arguments))
        print(as_line(rows[-1]), flush=True)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", action="append", choices=SHAPES, help="repeatable")
    parser.add_argument("--method", default="svd", choices=("svd", "activation-svd", "fold"))
    parser.add_argument("--series", type=int, default=4, help="to calibrate on")
    parser.add_argument("--shard", default="500MB", help="of one weight file, in and out")
    parser.add_argument("--limit", type=float, help="private writable memory of the process, GB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="NAME.json is written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.size = arguments.size or ["base"]
    return arguments


def measure(size: str, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint, compress it in a process of its own, and say what that took."""
    job = {
        "source": str(directory / f"chronos-t5-{size}"),
        "output": str(directory / "small"),
        "method": arguments.method,
        "series": arguments.series,
        "shard": arguments.shard,
        "threads": arguments.threads,
        "limit": None if arguments.limit is None else int(arguments.limit * GIGA),
    }
    write_checkpoint(size, Path(job["source"]), arguments.shard)
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{size}: status {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told = {name: job[name] for name in ("method", "series", "shard", "threads", "limit")}
    return {"size": size, **told, **found}


def write_checkpoint(size: str, directory: Path, max_shard_size: str) -> None:
    """Random weights as T5 draws them, in bfloat16, one file in memory at a time."""
    d_model, d_ff, layers, heads = SHAPES[size]
    shape = Architecture(
        d_model=d_model, d_kv=64, d_ff=d_ff, num_layers=layers, num_decoder_layers=layers,
        num_heads=heads, context_length=512,
    )  # fmt: skip
    bucket = Bucket(context_length=64, horizon=8, batch_size=1)
    stages = (Stage(steps=1, buckets=(bucket,)),)
    recipe = PretrainRecipe(family="chronos-t5", name=size, architecture=shape, stages=stages)
    config = design(recipe)[0].to_dict() | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    empty = build_empty("chronos-t5", config)
    empty.tie_weights()  # type: ignore[operator]
    shapes = dict(empty.named_parameters())  # a tied one once
    split = split_state_dict_into_shards_factory(
        shapes, get_storage_size=lambda p: 2 * p.numel(),
        filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size,
    )  # fmt: skip
    directory.mkdir(parents=True)
    torch.manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        shard = {name: draw(name, tuple(shapes[name].shape)) for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:  # norms
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 1.0 if name.startswith("shared") else shape[-1] ** -0.5
    if name.endswith(".q.weight"):
        scale *= 64**-0.5
    return (torch.randn(shape) * scale).to(torch.bfloat16)


def compress(job: dict[str, Any]) -> dict[str, Any]:
    """In the process that is measured: peaks of the resident set, in bytes, by phase."""
    from tscompress.checkpoints.load import find, load
    from tscompress.compression.calibration import CalibrationConfig
    from tscompress.workflows.compress import compress_loaded_
    from tscompress.workflows.memory import compression_memory_bytes
    from tscompress.workflows.options import recipe_of
    from tscompress.workflows.save import save

    torch.set_num_threads(job["threads"])
    if job["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (job["limit"], job["limit"]))
    fold = job["method"] == "fold"
    calibration = CalibrationConfig(source="synthetic", num_series=job["series"])
    recipe = recipe_of(
        {"method": job["method"], "rank": 16 if fold else None, "budget": None if fold else 0.25},
        model=job["source"],
        output=job["output"],
        calibration=calibration,
    )
    checkpoint = find(job["source"])
    estimate = compression_memory_bytes(checkpoint, recipe)
    peaks = {}
    started = time.monotonic()
    loaded = load(checkpoint, dtype=torch.float32)
    peaks["load"] = peak_bytes()
    compressed = compress_loaded_(loaded, recipe)
    peaks["compress"] = peak_bytes()
    save(compressed, job["output"], max_shard_size=job["shard"])
    peaks["save"] = peak_bytes()
    small = find(job["output"])
    return {
        "parameters": checkpoint.parameters,
        "files": len(list(Path(job["source"]).glob("*.safetensors"))),
        "bytes_on_disk": checkpoint.bytes_on_disk,
        "small_parameters": small.parameters,
        "small_files": len(list(Path(job["output"]).glob("*.safetensors"))),
        "small_bytes_on_disk": small.bytes_on_disk,
        "estimate_bytes": estimate,
        "peak_bytes": peaks,
        "seconds": round(time.monotonic() - started, 1),
    }


def peak_bytes() -> int:
    """The largest resident set since the last call, mapped files included."""
    status = Path("/proc/self/status").read_text()
    (line,) = [one for one in status.splitlines() if one.startswith("VmHWM")]
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(line.split()[1])


def as_line(row: dict[str, Any]) -> str:
    peaks = ", ".join(f"{k} {v / GIGA:.2f}" for k, v in row["peak_bytes"].items())
    return (
        f"{row['size']}: {row['parameters'] / 1e6:.0f}M parameters, {row['files']} files of "
        f"{row['bytes_on_disk'] / GIGA:.2f} GB -> {row['small_files']} of "
        f"{row['small_bytes_on_disk'] / GIGA:.2f} GB by {row['method']} in {row['seconds']} s; "
        f"peak memory {max(row['peak_bytes'].values()) / GIGA:.2f} GB ({peaks}), "
        f"estimated {sum(row['estimate_bytes'].values()) / GIGA:.2f} GB"
    )


if __name__ == "__main__":
    main()
