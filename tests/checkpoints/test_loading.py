"""Checkpoints of every kind, whole and broken: what loads, and what each failure says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from chronos import BaseChronosPipeline
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel, T5Model

import tscompress
from tscompress.api import compress
from tscompress.checkpoints.format import write_weights
from tscompress.checkpoints.given import loaded_of
from tscompress.checkpoints.integrity import (
    check_generation_file,
    read_config,
    stored_dtype,
    weight_files,
)
from tscompress.checkpoints.load import load
from tscompress.errors import (
    CorruptCheckpointError,
    GatedModelError,
    ModelLoadError,
    ModelNotFoundError,
    OfflineError,
    OutputError,
    PlanError,
    TscompressError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.families.empty import without_weights
from tscompress.workflows.save import save

WEIGHTS = "model.safetensors"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def copy(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    return Path(shutil.copytree(checkpoints["chronos-bolt"], tmp_path / "copy"))


def edit_config(directory: Path, change: Change) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def edit_weights(directory: Path, change: Change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def shard(directory: Path) -> dict[str, str]:
    """Split the weights over two files; returns the weight map."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for index, chunk in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{index:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in chunk}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chunk, file)
    (directory / WEIGHTS).unlink()
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def refused(error: type[Exception], match: str, directory: Path | str, **options: Any) -> None:
    with pytest.raises(error, match=match or None) as caught:
        load(directory, **options)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# What loads
# --------------------------------------------------------------------------------------------------


def test_every_family_loads_and_forecasts(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    assert loaded.family == loaded.name == checkpoint.name
    assert loaded.source == str(checkpoint)
    assert not loaded.model.training
    assert loaded.config == read_config(checkpoint, "")
    assert (loaded.revision, loaded.plan) == (None, None)
    quantiles, mean = loaded.forecaster.predict_quantiles(
        [torch.sin(torch.arange(40.0))], prediction_length=8
    )
    assert torch.isfinite(quantiles[0]).all()
    assert torch.isfinite(mean[0]).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_dtype_is_the_stored_one_unless_asked(
    checkpoint: Path, tmp_path: Path, stored: torch.dtype
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    edit_weights(copy, lambda ts: ts.update({name: ts[name].to(stored) for name in ts}))
    assert stored_dtype(copy) is stored
    asked: list[tuple[Any, torch.dtype]] = [
        (None, stored),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ]
    for dtype, expected in asked:
        loaded = load(copy, dtype=dtype)
        assert {p.dtype for p in loaded.model.parameters()} == {expected}
        assert loaded.stored_dtype is stored


def test_weights_in_memory_are_the_stored_ones(checkpoint: Path) -> None:
    state = load(checkpoint).model.state_dict()
    for name, tensor in load_file(checkpoint / WEIGHTS).items():
        assert torch.equal(state[name], tensor), name


def test_sharded_weights_load_the_same(copy: Path) -> None:
    whole = load(copy).model.state_dict()
    shard(copy)
    assert [path.name for path in weight_files(copy)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    parts = load(copy).model.state_dict()
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", ["T5Model", "T5EncoderModel", "BertModel"])
def test_other_transformers_load_for_profiling_only(tmp_path: Path, name: str) -> None:
    t5 = T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, vocab_size=32)
    bert = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=16,
    )
    model = {
        "T5Model": lambda: T5Model(t5),
        "T5EncoderModel": lambda: T5EncoderModel(t5),
        "BertModel": lambda: BertModel(bert),
    }[name]()
    model.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    stored = load_file(tmp_path / "model" / WEIGHTS)
    # Every block is a stored one: nothing that was made up when the checkpoint lacked it.
    projections = [name for _, _, name in loaded.architecture.attention_projections()]
    assert projections
    for projection in projections:
        weight = loaded.model.get_submodule(projection).weight
        assert torch.equal(weight, stored[f"{projection}.weight"]), projection
    with pytest.raises(UnsupportedModelError, match=r"does not forecast.*chronos"):
        _ = loaded.forecaster


def test_unknown_reference_is_refused() -> None:
    refused(ModelNotFoundError, "there is no 'reference/gpt'; shipped:", "reference/gpt")


# --------------------------------------------------------------------------------------------------
# Where it is not
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "~/no/where", "a/b/c", "", "  "])
def test_missing_directory(source: str) -> None:
    refused(ModelNotFoundError, "there is no directory", source)


def test_a_name_that_is_too_long_is_missing() -> None:
    for source in ("x" * 300, f"./{'x' * 300}"):
        with pytest.raises(ModelNotFoundError, match=source):
            load(source)
        with pytest.raises(ModelNotFoundError, match=source):
            loaded_of(source)
    with pytest.raises(UsageError, match="x" * 300):
        tscompress.push("x" * 300, "me/model", dry_run=True)


@pytest.mark.parametrize("sizes", [("5GB", "20kB"), ("20kB", "5GB"), ("20kB", "40kB")], ids=str)
def test_a_factored_model_saved_again_leaves_no_earlier_weights(
    sizes: tuple[str, str], compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    model: Any = load(compressed["chronos-bolt", "factored"]).model
    alone, again = tmp_path / "alone", tmp_path / "again"
    model.save_pretrained(again, max_shard_size=sizes[0])
    (again / "notes.safetensors").write_bytes(b"mine")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    for directory in (alone, again):
        model.save_pretrained(directory, max_shard_size=sizes[1])
    assert {one.name for one in again.iterdir()} == {
        *(one.name for one in alone.iterdir()), "notes.safetensors",
    }  # fmt: skip
    (again / "notes.safetensors").unlink()
    expected, found = (load(one).model.state_dict() for one in (alone, again))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_earlier_weights_that_cannot_be_removed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()  # which unlink refuses
    with pytest.raises(OutputError, match=name):
        write_weights({"a": torch.zeros(2)}, tmp_path, "5GB")


def test_file_instead_of_directory(checkpoint: Path) -> None:
    refused(ModelNotFoundError, "is a file; give the directory", checkpoint / WEIGHTS)


def test_revision_goes_with_a_hub_id(checkpoint: Path) -> None:
    refused(UsageError, "a revision goes with a Hub id only", checkpoint, revision="main")


def test_no_weights(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    refused(ModelNotFoundError, "has no model.safetensors", copy)


def test_pickled_weights_are_never_read(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    torch.save({"weight": torch.zeros(1)}, copy / "pytorch_model.bin")
    refused(UnsupportedModelError, r"pickled weights \(pytorch_model\.bin\)", copy)


# --------------------------------------------------------------------------------------------------
# Configs
# --------------------------------------------------------------------------------------------------


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    refused(ModelNotFoundError, "has no config.json; is it a checkpoint", copy)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"{", r"config\.json .*JSON"),
        (b"", r"config\.json .*JSON"),
        (b"\xff\xfe", r"config\.json .*JSON"),
        (b"[1]", r"config\.json .*object"),
        (b"[" * 100_000, r"config\.json .*JSON"),
    ],
)
def test_config_is_not_a_json_object(copy: Path, text: bytes, match: str) -> None:
    (copy / "config.json").write_bytes(text)
    refused(CorruptCheckpointError, match, copy)


def as_gpt2(config: dict[str, Any]) -> None:
    config.clear()
    config["model_type"] = "gpt2"


@pytest.mark.parametrize(
    "change",
    [
        as_gpt2,
        lambda config: config.clear(),
        lambda config: config.update(chronos_pipeline_class="OtherPipeline"),
        lambda config: config.update(
            chronos_pipeline_class="ChronosPipeline", chronos_config={"model_type": "causal"}
        ),
    ],
    ids=["gpt2", "empty", "unknown pipeline", "causal"],
)
def test_unknown_families(copy: Path, change: Change) -> None:
    edit_config(copy, change)
    match = "not supported; supported (families: chronos-t5|pipelines: ChronosPipeline), "
    refused(UnsupportedModelError, match, copy)


@pytest.mark.parametrize("pipeline", ["ChronosPipeline", "Chronos2Pipeline"])
def test_config_of_another_family(copy: Path, pipeline: str) -> None:
    edit_config(copy, lambda config: config.update(chronos_pipeline_class=pipeline))
    refused(CorruptCheckpointError, "the weights do not fit the config|lacks", copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_kv", 16),
        ("d_kv", "wide"),
        ("d_kv", [8, 8]),
        ("d_model", 0),
        ("num_layers", 3),
        ("num_layers", -1),
        ("num_heads", None),
        ("model_type", 5),
        ("chronos_config", {}),
        ("chronos_config", []),
        ("chronos_config", None),
        ("chronos_config", {"model_type": "seq2seq"}),
        ("num_layers", 1),
    ],
)
def test_config_of_other_weights_is_refused(
    checkpoint: Path, tmp_path: Path, key: str, value: object
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    edit_config(copy, lambda config: config.update({key: value}))
    with pytest.raises(ModelLoadError) as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    assert "copy" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"d_kv": "wide"}, CorruptCheckpointError),
        ({"d_kv": 16}, PlanError),
        ({"num_layers": 1}, PlanError),
        ({"chronos_config": None}, CorruptCheckpointError),
        ({"chronos_config": {}}, CorruptCheckpointError),
        ({"chronos_pipeline_class": "OtherPipeline"}, UnsupportedModelError),
    ],
)
def test_factored_checkpoint_with_a_bad_base_config(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    output = save(compress(checkpoint, rank=2, method="svd"), tmp_path / "factored")
    assert load(output).plan is not None
    edit_config(output, lambda config: config["base_config"].update(change))
    refused(error, "", output)


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4, 200, -100])
def test_truncated_weights(checkpoint: Path, tmp_path: Path, size: int) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:size])
    refused(CorruptCheckpointError, "model.safetensors is truncated or damaged", copy)


@pytest.mark.parametrize("start", [0, 8, 40])
def test_garbage_in_the_header(copy: Path, start: int) -> None:
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[start : start + 8] = b"\xfe" * 8
    (copy / WEIGHTS).write_bytes(content)
    refused(CorruptCheckpointError, "model.safetensors is truncated or damaged", copy)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("chronos-t5", "decoder_start_token_id"),
        ("chronos-bolt", "decoder_start_token_id"),
        ("chronos-bolt", "d_model"),
        ("chronos-2", "d_model"),
    ],
)
def test_config_without_what_forecasting_or_folding_reads_is_refused(
    family: str, name: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoints[family], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    del config[name]
    (copy / "config.json").write_text(json.dumps(config))
    refused(CorruptCheckpointError, name, copy)


def test_missing_weights_are_not_made_up(checkpoint: Path, tmp_path: Path) -> None:
    """transformers would start them at random and only log it."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    name = next(n for n in load_file(copy / WEIGHTS) if n.endswith("q.weight"))
    edit_weights(copy, lambda tensors: tensors.pop(name))
    refused(CorruptCheckpointError, rf"lacks '{name}' \(1 weights missing\)", copy)


def test_wrong_shape(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    name = next(n for n in load_file(copy / WEIGHTS) if n.endswith("q.weight"))
    edit_weights(copy, lambda tensors: tensors.update({name: tensors[name][:8].clone()}))
    refused(CorruptCheckpointError, "the weights do not fit the config", copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_refused(checkpoint: Path, tmp_path: Path, value: float) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    name = next(n for n in load_file(copy / WEIGHTS) if n.endswith("q.weight"))
    edit_weights(copy, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    refused(CorruptCheckpointError, f"{name} has values that are not finite", copy)


def test_missing_shard(copy: Path) -> None:
    shard(copy)
    (copy / "model-00002-of-00002.safetensors").unlink()
    refused(CorruptCheckpointError, "lacks model-00002-of-00002.safetensors", copy)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_index_outside_the_directory_is_refused(copy: Path, name: str) -> None:
    weight_map = shard(copy)
    write_index(copy, weight_map | {"shared.weight": name})
    refused(CorruptCheckpointError, "points outside its directory", copy)


@pytest.mark.parametrize("weight_map", [None, 3, [], {"shared.weight": 3}, {"shared.weight": []}])
def test_invalid_index_is_refused(copy: Path, weight_map: object) -> None:
    shard(copy)
    write_index(copy, weight_map)
    refused(CorruptCheckpointError, "is not a safetensors index", copy)


def test_code_in_a_checkpoint_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    trace = tmp_path / "executed"
    (copy / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
        "class PlantedConfig: pass\nclass PlantedModel: pass\n"
    )
    names = ("AutoModel", "AutoModelForSeq2SeqLM")
    auto_map = {"AutoConfig": "planted.PlantedConfig"} | dict.fromkeys(
        names, "planted.PlantedModel"
    )
    edit_config(copy, lambda config: config.update(auto_map=auto_map))
    load(copy)
    assert not trace.exists()
    edit_config(copy, lambda config: config.update(model_type="planted"))
    with pytest.raises(ModelLoadError):
        load(copy)
    assert not trace.exists()


# --------------------------------------------------------------------------------------------------
# Options
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_cuda(checkpoint: Path, device: str) -> None:
    refused(UsageError, "CUDA", checkpoint, device=device)


@pytest.mark.parametrize("device", ["tpu9", "", "gpu", "cpu:x", "meta"])
def test_unknown_device(checkpoint: Path, device: str) -> None:
    refused(UsageError, "is not a device; try cpu or cuda", checkpoint, device=device)


@pytest.mark.parametrize("dtype", ["int8", "", "float64", torch.int64])
def test_unknown_dtype(checkpoint: Path, dtype: Any) -> None:
    match = "is not one of float32, bfloat16, float16"
    refused(UsageError, match, checkpoint, dtype=dtype)


# --------------------------------------------------------------------------------------------------
# The Hub
# --------------------------------------------------------------------------------------------------


def answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api"))


@pytest.mark.parametrize(
    ("raised", "error", "match"),
    [
        (
            RepositoryNotFoundError("404\nmore", response=answer(404)),
            ModelNotFoundError,
            "someone/model",
        ),
        (
            GatedRepoError("403\nmore", response=answer(403)),
            GatedModelError,
            "gated",
        ),
        (
            RevisionNotFoundError("404\nmore", response=answer(404)),
            ModelNotFoundError,
            "revision 'v9'",
        ),
        (HFValidationError("bad\nid"), ModelNotFoundError, "nor a Hub id such as"),
        (LocalEntryNotFoundError("no\nnetwork"), OfflineError, "the Hub cannot be reached"),
        (httpx.ConnectTimeout("slow"), OfflineError, "the Hub cannot be reached"),
        (ConnectionResetError(), OfflineError, "the Hub cannot be reached"),
        (HfHubHTTPError("500", response=answer(500)), ModelLoadError, "with HTTP status 500"),
        (HfHubHTTPError("429", response=answer(429)), ModelLoadError, "with HTTP status 429"),
    ],
)
def test_every_answer_of_the_hub_has_its_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, error: type[Exception], match: str
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("tscompress.io.network.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    refused(error, match, "someone/model", revision="v9")


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(OfflineError, "HF_HUB_OFFLINE is set; unset it, or give a dir", "someone/model")


def test_a_hub_id_becomes_its_snapshot_and_commit(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = copy.rename(tmp_path / "0123abc")
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load("someone/model", revision="v9")
    assert (loaded.name, loaded.source, loaded.revision) == ("someone/model",) * 2 + ("0123abc",)
    assert (asked["name"], asked["revision"]) == ("someone/model", "v9")
    # Neither pickles nor code are fetched.
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "README.md"]
    assert asked["ignore_patterns"] == ["*/*"]


def test_a_cached_commit_is_found_without_a_network(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub looks up a branch in its cache, and asks the Hub what a commit holds."""
    folder, commit = tmp_path / "hub" / "models--someone--model", "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(copy, folder / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("someone/model").revision == commit
    assert load("someone/model", revision=commit).revision == commit
    with pytest.raises(OfflineError):
        load("someone/model", revision=commit[::-1])
    with pytest.raises(OfflineError):
        load("someone/model", revision="v9")
    with monkeypatch.context() as patch:
        fetch = huggingface_hub.snapshot_download

        def download(*args: Any, local_files_only: bool, **options: Any) -> str:
            if not local_files_only:
                raise HfHubHTTPError("401", response=answer(401))
            return fetch(*args, local_files_only=True, **options)

        def refuse(*_: Any, **__: Any) -> None:
            raise HfHubHTTPError("401", response=answer(401))

        patch.setattr(huggingface_hub, "snapshot_download", download)
        patch.setattr(huggingface_hub.HfApi, "list_repo_tree", refuse)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert load("someone/model", revision=commit).revision == commit
        with pytest.raises(TscompressError):
            load("someone/model", revision=commit[::-1])
        record = folder / "snapshots" / commit / "provenance.json"
        record.write_text(json.dumps({"sha256": {"plan.json": "0" * 64}}))
        with pytest.raises(TscompressError):  # its plan did not arrive
            load("someone/model", revision=commit)
        record.unlink()
    for name in ("model.safetensors", "config.json"):  # as where a card alone was looked at
        (folder / "snapshots" / commit / name).unlink()
        with pytest.raises(OfflineError, match="not in the local cache"):
            load("someone/model", revision=commit)


def test_a_checkpoint_is_opened_as_it_is_now(copy: Path) -> None:
    """Whatever was opened there before, and whatever has become of that."""
    first = load(copy)
    name, weight = next(iter(first.model.named_parameters()))
    stored = weight.detach().clone()
    weight.data.zero_()
    assert torch.equal(load(copy).model.get_parameter(name), stored)
    tensors = load_file(copy / WEIGHTS)
    save_file(
        {key: 2 * tensor for key, tensor in tensors.items()}, copy / WEIGHTS, {"format": "pt"}
    )
    assert torch.equal(load(copy).model.get_parameter(name), 2 * stored)
    assert load(copy, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(copy).model.dtype == stored.dtype


def test_weights_lie_in_memory_as_those_of_stock_chronos(copy: Path) -> None:
    """Products of differently aligned memory round differently on some processors."""
    for _ in range(2):
        ours = load(copy).model.state_dict()
        theirs = BaseChronosPipeline.from_pretrained(copy).model.state_dict()
        assert {name: weight.data_ptr() % 64 for name, weight in ours.items()} == {
            name: weight.data_ptr() % 64 for name, weight in theirs.items()
        }


def test_ignored_and_renamed_weights_are_accepted(tmp_path: Path) -> None:
    """google-t5/t5-small stores a bias that nothing reads; old BERTs say gamma and beta."""
    t5 = T5Config(d_model=24, d_kv=8, d_ff=40, num_layers=1, num_heads=2, vocab_size=32)
    T5Model(t5).save_pretrained(tmp_path / "t5")
    tensors = load_file(tmp_path / "t5" / WEIGHTS)
    spare = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | {spare: torch.zeros(32, 2)}, tmp_path / "t5" / WEIGHTS, {"format": "pt"})
    assert load(tmp_path / "t5").family == "t5"

    bert = BertConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32, max_position_embeddings=16,
    )  # fmt: skip
    BertModel(bert).save_pretrained(tmp_path / "bert")
    tensors = load_file(tmp_path / "bert" / WEIGHTS)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    gamma = "encoder.layer.0.output.LayerNorm.gamma"
    old[gamma] = torch.arange(24.0)
    save_file(old, tmp_path / "bert" / WEIGHTS, {"format": "pt"})
    norm = load(tmp_path / "bert").model.get_submodule(gamma.removesuffix(".gamma"))
    assert torch.equal(norm.weight, torch.arange(24.0))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="has MPS")
def test_unusable_device_is_refused(checkpoint: Path) -> None:
    refused(UsageError, "'mps'", checkpoint, device="mps")


def test_tokens_beside_a_config_without_a_vocabulary_pass(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints["chronos-bolt"], tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    config.pop("vocab_size", None)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"pad_token_id": 0}')
    check_generation_file(path, config, str(path))


def test_a_loop_of_links(copy: Path) -> None:
    (copy / "generation_config.json").unlink(missing_ok=True)
    (copy / "generation_config.json").symlink_to("generation_config.json")
    refused(CorruptCheckpointError, "link to itself", copy)


def test_models_are_built_by_one_thread_at_a_time(checkpoints: dict[str, Path]) -> None:
    """Libraries change ``nn.Module`` while they build one, and another would keep that."""
    register = torch.nn.Module.register_parameter
    with ThreadPoolExecutor(1) as pool:
        with without_weights():
            other = pool.submit(load, checkpoints["chronos-bolt"])
            with pytest.raises(TimeoutError):
                other.result(timeout=1)
        assert next(other.result().model.parameters()).device.type == "cpu"
    assert torch.nn.Module.register_parameter is register
