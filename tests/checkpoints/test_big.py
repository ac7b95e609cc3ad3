"""Checkpoints of several weight files, in and out, and the memory that big ones take."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from chronos import BaseChronosPipeline
from families_of_tests import two_stacks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared_fixtures import ROOT, Command

import tscompress
from tscompress.benchmark.sizes import kv_cache_bytes
from tscompress.benchmark.workload import Workload
from tscompress.budget.plan_within_budget import workload_for
from tscompress.checkpoints import format as factored
from tscompress.checkpoints.integrity import source_files, weight_files
from tscompress.checkpoints.load import LoadedModel, find, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.errors import CorruptCheckpointError, UsageError, VerificationError
from tscompress.hub import push as hub
from tscompress.io.hashing import sha256_of
from tscompress.plan.schedules import PlannedSchedule, parse_budget
from tscompress.workflows.memory import compression_memory_bytes
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.save import CompressedModel

SCRIPT = ROOT / "eval" / "big.py"
INDEX = "model.safetensors.index.json"
BYTES = 9000
CALIBRATION = CalibrationConfig(source="synthetic", num_series=4, context_length=48)
OPTIONS: dict[str, dict[str, Any]] = {
    "folded": {"rank": 4, "calibration": CALIBRATION},
    "factored": {"method": "svd", "rank": 3},
}


def small(source: Path, kind: str) -> CompressedModel:
    return tscompress.compress(source, **OPTIONS[kind])


def in_shards(source: Path, directory: Path) -> Path:
    """The same checkpoint, as transformers writes it in several files."""
    load(source).model.save_pretrained(directory, max_shard_size=BYTES)  # type: ignore[operator]
    assert len(weight_files(directory)) > 2
    return directory


def forecast(pipeline: BaseChronosPipeline) -> torch.Tensor:
    torch.manual_seed(0)
    found = pipeline.predict([torch.sin(torch.arange(40.0))], prediction_length=8)
    return torch.cat([part.flatten() for part in found])


def aligned(loaded: LoadedModel) -> BaseChronosPipeline:
    """In memory of its own: weights in a file begin where they may, which rounds products so."""
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.clone()
    return loaded.forecaster


def edit_index(directory: Path, **changes: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= changes
    (directory / INDEX).write_text(json.dumps(index))


# --------------------------------------------------------------------------------------------------
# Out
# --------------------------------------------------------------------------------------------------


@two_stacks
@pytest.mark.parametrize("kind", OPTIONS)
def test_shards_load_as_one_file_does(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    compressed = small(checkpoint, kind)
    one = tscompress.save(compressed, tmp_path / "one")
    several = tscompress.save(compressed, tmp_path / "several", max_shard_size=BYTES)
    assert [path.name for path in weight_files(one)] == ["model.safetensors"]
    shards = weight_files(several)
    assert len(shards) > 2
    assert not (several / "model.safetensors").exists()
    whole = load_file(one / "model.safetensors")
    parts = [load_file(path) for path in shards]
    for part in parts:
        # What is larger than a file may be has one to itself.
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= BYTES
    index = json.loads((several / INDEX).read_text())
    assert index["weight_map"] == {
        name: path.name for path, part in zip(shards, parts, strict=True) for name in part
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert {n: t.tolist() for part in parts for n, t in part.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }
    if kind == "folded":
        stock = BaseChronosPipeline.from_pretrained(several)
        assert torch.equal(forecast(stock), forecast(load(several).forecaster))
    assert torch.equal(forecast(aligned(load(several))), forecast(aligned(load(one))))


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_shard_is_recorded_and_pushed(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    compressed = small(checkpoints["chronos-bolt"], kind)
    output = tscompress.save(compressed, tmp_path / "small", max_shard_size=BYTES)
    shards = weight_files(output)
    record = json.loads((output / "provenance.json").read_text())["sha256"]
    named = [*source_files(output), output / "plan.json", output / "recipe.yaml"]
    assert {path.name: sha256_of(path) for path in named} == record
    assert {INDEX, *(path.name for path in shards)} <= record.keys()
    planned = hub.push(output, "someone/small", dry_run=True)
    assert {INDEX, *(path.name for path in shards)} <= planned.files.keys()
    assert planned.left_behind == ()

    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    with pytest.raises(VerificationError, match=shards[1].name):
        hub.push(output, "someone/small", dry_run=True)
    shards[1].unlink()
    with pytest.raises(CorruptCheckpointError, match=shards[1].name):
        hub.push(output, "someone/small", dry_run=True)


def test_one_file_at_a_time_is_written(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def watch(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        written.append((path.name, sum(tensor.nbytes for tensor in tensors.values())))
        save(tensors, path, metadata)

    save = factored.save_tensors
    monkeypatch.setattr(factored, "save_tensors", watch)
    compressed = small(checkpoints["chronos-t5"], "folded")
    output = tscompress.save(compressed, tmp_path / "small", max_shard_size="9KB")
    assert [name for name, _ in written] == [path.name for path in weight_files(output)]
    assert max(size for _, size in written) <= 9000


@pytest.fixture(scope="module")
def factored_bolt(checkpoints: dict[str, Path]) -> CompressedModel:
    return small(checkpoints["chronos-bolt"], "factored")


@pytest.mark.parametrize("size", ["", "large", "5 parsecs", "GB", 0, -1, "-5GB", "0GB"])
def test_invalid_shard_sizes_are_refused(
    factored_bolt: CompressedModel, tmp_path: Path, size: int | str
) -> None:
    with pytest.raises(UsageError, match="size"):
        tscompress.save(factored_bolt, tmp_path / "small", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def test_command_takes_a_shard_size_and_estimates_memory(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    done = command(
        "compress", checkpoints["chronos-bolt"], "--method", "svd", "--rank", 3,
        "--max-shard-size", "9KB", "--output", tmp_path / "small",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.err.startswith("memory, about: ")
    assert len(weight_files(tmp_path / "small")) > 2


# --------------------------------------------------------------------------------------------------
# In
# --------------------------------------------------------------------------------------------------


@two_stacks
@pytest.mark.parametrize("kind", OPTIONS)
def test_shards_compress_as_one_file_does(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    source = in_shards(checkpoint, tmp_path / "shards")
    ours = tscompress.save(small(source, kind), tmp_path / "ours")
    theirs = tscompress.save(small(checkpoint, kind), tmp_path / "theirs")
    assert sha256_of(ours / "model.safetensors") == sha256_of(theirs / "model.safetensors")
    recorded = json.loads((ours / "provenance.json").read_text())["source"]["sha256"]
    assert recorded == {path.name: sha256_of(path) for path in source_files(source)}
    assert {"config.json", INDEX} <= recorded.keys()


@pytest.fixture(scope="module", params=["stock", "factored"])
def whole_shards(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    factored_bolt: CompressedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "shards"
    if request.param == "stock":
        return in_shards(checkpoints["chronos-bolt"], directory)
    return tscompress.save(factored_bolt, directory, max_shard_size=BYTES)


@pytest.fixture
def shards(whole_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_shards, tmp_path / "shards"))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_refused(shards: Path) -> None:
    lost = weight_files(shards)[1]
    lost.unlink()
    refused(shards, f"lacks {lost.name}")


def test_truncated_shard_is_refused(shards: Path) -> None:
    cut = weight_files(shards)[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    refused(shards, f"{cut.name} is truncated or damaged")


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, second = weight_files(shards)[:2]
    tensors = load_file(first)
    name = min(tensors)
    save_file(load_file(second) | {name: tensors[name] + 1}, second, {"format": "pt"})
    refused(shards, f"has '{name}' in two files")


def test_index_without_a_shard_is_refused(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    left_out = weight_files(shards)[1].name
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != left_out}
    (shards / INDEX).write_text(json.dumps(index))
    refused(shards, r"lacks|keys missing|weights missing")


def test_index_of_other_files_is_refused(shards: Path) -> None:
    (shards / "weights.bin").write_bytes(b"pickled")
    edit_index(shards, planted="weights.bin")
    refused(shards, "names files that are not safetensors")


def test_empty_index_is_refused(shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": {}}))
    refused(shards, "names files that are not safetensors")


def test_one_whole_file_goes_before_an_index(checkpoint: Path, tmp_path: Path) -> None:
    """As in transformers: an index that was left behind is no reason to read old files."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / INDEX).write_text("{")
    assert [path.name for path in weight_files(copy)] == ["model.safetensors"]
    assert torch.equal(forecast(load(copy).forecaster), forecast(load(checkpoint).forecaster))


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def recipe(source: Path, **changes: Any) -> Recipe:
    settings = {"model": str(source), "output": "-", "calibration": {"num_series": 4}}
    return Recipe.model_validate(settings | changes)


SVD: dict[str, Any] = {"method": "svd", "schedule": {"kind": "budget", "parameter_ratio": 0.5}}


def test_memory_is_estimated_from_headers_alone(checkpoint: Path) -> None:
    found = find(checkpoint)
    with safe_open(checkpoint / "model.safetensors", framework="pt") as reader:
        shapes = {n: reader.get_slice(n).get_shape() for n in reader.keys()}  # noqa: SIM118
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    attention = sum(n for name, n in sizes.items() if name[-9:-8] in "qkvo" and name[-10] == ".")
    parts = compression_memory_bytes(found, recipe(checkpoint, **SVD))
    assert found.parameters == sum(sizes.values())
    assert parts["weights"] == 4 * found.parameters
    assert parts["work"] == max(found.bytes_on_disk, 4 * attention)
    assert 0 < parts["process"] <= psutil.Process().memory_info().rss + 2**28
    with_feed_forward = compression_memory_bytes(
        found, recipe(checkpoint, **SVD, feed_forward=True)
    )
    assert with_feed_forward["work"] >= parts["work"]


def planned(budget: str, **options: Any) -> dict[str, Any]:
    return PlannedSchedule(budget=parse_budget(budget), **options).model_dump()


def test_every_copy_of_the_weights_is_counted(checkpoint: Path) -> None:
    found = find(checkpoint)
    once = 4 * found.parameters
    for changes, copies in (
        ({}, 1),
        ({"layers": [1]}, 2),
        ({"recover": {"minutes": 1}}, 2),
        ({"layers": [1], "recover": {"minutes": 1}}, 3),
        ({"schedule": planned("parameters=0.5")}, 2),  # a candidate of each width is folded
        ({"schedule": planned("parameters=0.5", keep_width=True)}, 1),
        # A candidate, and then the narrower model.
        ({"schedule": planned("parameters=0.5", layout="factored")}, 2),
        ({"schedule": planned("parameters=0.5", layout="factored", keep_width=True)}, 1),
        ({"schedule": planned("parameters=0.5"), "width": 0.5}, 2),
        ({"schedule": planned("parameters=0.5", layout="factored"), "width": 1.0}, 1),
        ({"schedule": planned("wql=1%"), "recover": {"minutes": 1}}, 3),
        ({"schedule": planned("wql=1%"), "width": 16}, 3),
        ({"schedule": planned("wql=1%"), "width": 0.5}, 3),
        ({"schedule": planned("wql=1%"), "width": 1.0}, 2),
    ):
        parts = compression_memory_bytes(found, recipe(checkpoint, **changes))
        assert parts["weights"] == copies * once


def test_more_series_and_a_recovery_need_more(checkpoint: Path) -> None:
    found = find(checkpoint)
    few, many, recovered = (
        compression_memory_bytes(found, recipe(checkpoint, **changes))
        for changes in (
            {"calibration": {"num_series": 1000}},
            {"calibration": {"num_series": 4000}},
            {"calibration": {"num_series": 4000}, "recover": {"minutes": 1}},
        )
    )
    assert many["work"] == 4 * few["work"]
    assert recovered["weights"] == 2 * many["weights"]
    assert recovered["work"] == many["work"]


def test_forecasts_that_cuts_of_a_t5_are_compared_with_are_counted(checkpoint: Path) -> None:
    found = find(checkpoint)
    many = {"calibration": {"num_series": 4000}}
    folded, by_budget = (
        compression_memory_bytes(found, recipe(checkpoint, **many, **changes))["work"]
        for changes in ({}, {"schedule": planned("parameters=0.5")})
    )
    if checkpoint.name != "chronos-t5":
        assert by_budget == folded
        return
    ahead, tokens = found.config["chronos_config"]["prediction_length"], found.config["vocab_size"]
    assert by_budget - folded == 4 * 1000 * ahead * tokens


def test_the_cache_of_a_forecast_that_is_timed_is_counted(checkpoint: Path) -> None:
    timed = recipe(checkpoint, schedule=planned("latency=0.5"))
    parts = compression_memory_bytes(find(checkpoint), timed)
    loaded = load(checkpoint)
    workload = workload_for(loaded, timed.bench or Workload())
    cache = kv_cache_bytes(loaded.model, workload, dtype=torch.float32)
    assert parts["work"] >= cache
    if checkpoint.name == "chronos-t5":  # which holds one of each path
        assert parts["work"] == cache


def test_impossible_configs_are_refused_before_counting(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoints["chronos-t5"], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"d_model": "wide"}))
    with pytest.raises(CorruptCheckpointError, match="d_model 'wide'"):
        compression_memory_bytes(find(copy), recipe(copy))


def test_a_note_where_memory_is_short(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Short)
    done = command(
        "compress", checkpoints["chronos-bolt"], "--method", "svd", "--rank", 3,
        "--output", tmp_path / "small",
    )  # fmt: skip
    assert done.code == 0
    assert "note: only 0 MB of memory are free" in done.err


def measured(*arguments: object) -> dict[str, Any]:
    """One row of eval/big.py, which compresses in a process of its own."""
    output = Path(str(arguments[-1]))
    command = [sys.executable, str(SCRIPT), *map(str, arguments[:-1]), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.with_suffix(".json").read_text())
    return dict(row)


def check_estimate(row: dict[str, Any]) -> None:
    """Memory was asked for neither far too low nor far too high."""
    estimate, peak = sum(row["estimate_bytes"].values()), max(row["peak_bytes"].values())
    assert 0.6 * estimate <= peak <= 1.25 * estimate, row


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of Linux")
@pytest.mark.parametrize("method", ["svd", "fold"])
def test_the_estimate_holds(tmp_path: Path, method: str) -> None:
    row = measured("--size", "mini", "--shard", "8MB", "--method", method, tmp_path / "row")
    assert row["files"] > 2
    assert row["small_files"] > 1
    check_estimate(row)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of Linux")
def test_a_base_model_compresses_below_three_gigabytes(tmp_path: Path) -> None:
    """Both ways to count: what it may not give back is limited, what it had is below that too."""
    row = measured("--size", "base", "--shard", "100MB", "--limit", "3", tmp_path / "row")
    assert 200e6 < row["parameters"] < 203e6
    assert row["small_parameters"] < 0.75 * row["parameters"]
    assert max(row["peak_bytes"].values()) < 3e9
    check_estimate(row)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of Linux")
def test_a_large_model_compresses_below_24_gibibytes(tmp_path: Path) -> None:
    row = measured("--size", "large", "--shard", "500MB", "--limit", "24", tmp_path / "row")
    assert 700e6 < row["parameters"] < 715e6
    assert max(row["peak_bytes"].values()) < 24 * 2**30
    check_estimate(row)
