"""Exports: what is in a directory, precisions, parity of layers, refusals."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline
from shared_fixtures import Command, Forbid, assert_refused, made_smaller, tiny_recipe

import tscompress
from tscompress import runtime
from tscompress.checkpoints.load import load
from tscompress.errors import (
    OutputExistsError,
    UnsupportedModelError,
    UsageError,
    VerificationError,
)
from tscompress.exporting import parity
from tscompress.exporting.graph import _without_advice, onnx_graph
from tscompress.exporting.parity import largest_difference
from tscompress.families.registry import adapter_of
from tscompress.io.files import check_output
from tscompress.layers.sized_attention import SizedT5Attention, same_sizes
from tscompress.runtime.record import GRAPH_FILE, RECORD_FILE
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import Architecture

onnx: Any = pytest.importorskip("onnx")


def record_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / RECORD_FILE).read_text())
    return content


GRAPHS = {
    "chronos-t5": {"encoder.onnx", "decoder.onnx"},
    "chronos-bolt": {GRAPH_FILE},
    "chronos-2": {GRAPH_FILE},
}


@pytest.mark.parametrize("family", GRAPHS)
def test_directory_has_graphs_record_and_card(
    family: str, exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    directory = exported[family]
    files = {path.name for path in directory.iterdir()}
    assert files == GRAPHS[family] | {RECORD_FILE, "README.md"}
    record = record_of(directory)
    assert record["family"] == family
    assert Path(record["source"]["model"]).name == checkpoints[family].name
    assert set(record["source"]["sha256"]) >= {"config.json", "model.safetensors"}
    model = load(checkpoints[family]).model
    assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < record["difference"] < 1e-5
    assert record["libraries"]["onnxruntime"]
    card = (directory / "README.md").read_text()
    assert f"{record['difference']:.1e}" in card
    assert ("logits" in card) == (family == "chronos-t5")


@pytest.mark.parametrize("family", GRAPHS)
def test_graph_has_no_texts_for_people(family: str, exported: dict[str, Path]) -> None:
    for file in GRAPHS[family]:
        model = onnx.load(str(exported[family] / file))
        onnx.checker.check_model(model)
        assert not model.metadata_props
        assert not model.graph.value_info
        assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
        assert record_of(exported[family])["opset"] == model.opset_import[0].version


def test_output_is_replaced_only_as_it_was_written(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(exported["chronos-bolt"], directory)
    check_output(directory, force=True)
    with pytest.raises(OutputExistsError, match="--force"):
        tscompress.export("reference/bolt", directory)
    (directory / "README.md").write_text("my notes")
    with pytest.raises(OutputExistsError, match=r"README\.md"):
        tscompress.export("reference/bolt", directory, force=True)


def small_bolt() -> torch.nn.Module:
    shape = Architecture(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4,
        context_length=64, prediction_length=16, vocab_size=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(tiny_recipe("chronos-bolt", architecture=shape))
    for parameter in model.parameters():
        parameter.data *= 4
    return model.eval()


@pytest.fixture(scope="module")
def kept() -> dict[torch.dtype, Any]:
    """What the exporter made of a small Bolt, by the number format of its weights."""
    return {}


@pytest.mark.parametrize(
    ("precision", "share", "difference"),
    [("int8", 0.8, 2e-2), ("int8-weights", 0.8, 2e-2), ("float16", 0.65, 5e-3)],
)
def test_smaller_precisions(
    precision: Any, share: float, difference: float, kept: dict[torch.dtype, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    export = torch.onnx.export

    def export_once(module: torch.nn.Module, *arguments: Any, **options: Any) -> SimpleNamespace:
        dtype = next(module.parameters()).dtype
        if dtype not in kept:
            kept[dtype] = export(module, *arguments, **options).model_proto  # type: ignore[union-attr]
        return SimpleNamespace(model_proto=deepcopy(kept[dtype]))

    monkeypatch.setattr(torch.onnx, "export", export_once)
    model: Any = small_bolt()
    (source,) = adapter_of("chronos-bolt").graph_sources(model).values()
    content = onnx_graph(source, precision)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    graph = onnx.load_from_string(content).graph
    stored = {tuple(one.dims): one.data_type for one in graph.initializer}
    assert sum(len(one.raw_data) for one in graph.initializer) < share * weights
    head = stored[(64, 9 * 16)]  # hidden units to quantiles and steps
    types = onnx.TensorProto
    assert head == (types.FLOAT16 if precision == "float16" else types.FLOAT)
    layers = {one.data_type for one in graph.initializer if tuple(one.dims) == (32, 64)}
    assert (types.FLOAT16 if precision == "float16" else types.INT8) in layers
    kinds = {node.op_type for node in graph.node}
    assert ("MatMulInteger" in kinds) == (precision == "int8")
    if precision == "int8":  # products of pairs with 8 bits of input fit into 16
        numbers = [onnx.numpy_helper.to_array(one) for one in graph.initializer]
        matrices = [one for one in numbers if one.dtype == np.int8 and one.ndim == 2]
        assert 2**5 < max(np.abs(one.astype(np.int16)).max() for one in matrices) <= 2**6
    context = torch.sin(torch.arange(48.0) / 3)[None] * 1e6  # beyond what half precision holds
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    feed = {"context": context.numpy(), "observed": np.ones((1, 48), np.float32)}
    found = session.run(None, feed)[0]
    with torch.no_grad():
        expected = model(context=context).quantile_preds.numpy()
    assert np.abs(found - expected).max() < difference * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "difference"), [("int8", 5e-2), ("int8-weights", 5e-2), ("float16", 5e-3)]
)
def test_smaller_precisions_of_a_sampling_model(
    precision: Any, difference: float, checkpoints: dict[str, Path], tmp_path: Path,
    exported: dict[str, Path],
) -> None:  # fmt: skip
    result = tscompress.export(checkpoints["chronos-t5"], tmp_path / "out", precision=precision)
    assert 1e-6 < result.difference < difference
    assert result.compared == "logits"
    whole = sum((exported["chronos-t5"] / file).stat().st_size for file in GRAPHS["chronos-t5"])
    assert result.graph_bytes < 0.85 * whole
    types = onnx.TensorProto
    graph = onnx.load(str(tmp_path / "out" / "decoder.onnx")).graph
    stored = {tuple(one.dims): one.data_type for one in graph.initializer}
    looked_up, product = stored[(64, 24)], stored[(24, 64)]
    half = precision == "float16"
    assert product == (types.FLOAT16 if half else types.FLOAT)
    eighth = types.INT8 if precision == "int8-weights" else types.FLOAT
    assert looked_up == (types.FLOAT16 if half else eighth)
    assert stored[(24, 40)] == (types.FLOAT16 if half else types.INT8)
    forecaster: Any = runtime.load(tmp_path / "out")
    paths = forecaster.predict([np.sin(np.arange(48.0)) * 1e6], 16, seed=0)
    assert np.isfinite(paths).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("chronos-t5", {"method": "svd", "rank": 3}),
        ("chronos-t5", {"schedule": (3, 0.35), "ff_ratio": 0.5}),
        ("chronos-t5", {"latent": 12}),
        ("chronos-t5", {"embedding_rank": 6}),
        ("chronos-t5", {"rank": 4, "width": 16}),
        ("chronos-bolt", {"method": "svd", "rank": 3}),
        ("chronos-bolt", {"schedule": (3, 0.35), "ff_ratio": 0.5}),
        ("chronos-bolt", {"latent": 12}),
        ("chronos-2", {"method": "svd", "rank": 3}),
        ("chronos-2", {"rank": 4, "width": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_compressed_models_are_exported_as_they_are(
    family: str, options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    few = tscompress.CalibrationConfig(num_series=8, context_length=32, batch_size=4)
    small = tscompress.compress(checkpoints[family], calibration=few, **options)
    before = {name: tensor.clone() for name, tensor in small.model.state_dict().items()}
    result = tscompress.export(small, tmp_path / "out")
    assert result.difference < 1e-5
    after = small.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_head_sizes_of_queries_and_values_become_one() -> None:
    stock: Any = small_bolt()
    attention = stock.encoder.block[0].layer[0].SelfAttention
    hidden = torch.randn(2, 5, 32)
    for sizes in ((3, 6), (7, 4)):
        sized = SizedT5Attention.empty_like(attention, *sizes).eval()
        for projection in (sized.q, sized.k, sized.v, sized.o):
            torch.nn.init.normal_(projection.weight, std=0.3)
        with torch.no_grad():
            expected, found = sized(hidden)[0], same_sizes(sized)(hidden)[0]
        assert torch.allclose(found, expected, atol=1e-5)


def test_other_tokenizers_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command, forbid: Forbid
) -> None:
    forbid("tscompress.workflows.export.onnx_graph")
    directory = tmp_path / "model"
    shutil.copytree(checkpoints["chronos-t5"], directory)
    config = json.loads((directory / "config.json").read_text())
    config["chronos_config"]["tokenizer_class"] = "ChronosTokenizer"
    (directory / "config.json").write_text(json.dumps(config))
    outcome = command("export", directory, "--output", tmp_path / "out")
    assert_refused(outcome, 1, "ChronosTokenizer")
    assert not (tmp_path / "out").exists()


def test_overlapping_patches_are_refused() -> None:
    model: Any = small_bolt()
    model.chronos_config.input_patch_stride = 8
    with pytest.raises(UnsupportedModelError, match="input_patch_stride"):
        adapter_of("chronos-bolt").graph_sources(model)


def test_options_are_refused_before_a_model_is_loaded(
    tmp_path: Path, command: Command, forbid: Forbid, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid("tscompress.workflows.export.loaded_of")
    out = tmp_path / "out"
    outcome = command("export", "reference/bolt", "--output", out, "--precision", "int4")
    assert_refused(outcome, 2, "int4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"onnxscript.*tscompress\[onnx\]"):
        tscompress.export("reference/bolt", out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("precision", "difference", "kept"),
    [
        ("float32", 9e-5, True), ("float32", 2e-4, False), ("float32", float("nan"), False),
        ("int8", 0.1, True), ("int8", 0.46, False), ("int8", float("nan"), False),
    ],
)  # fmt: skip
def test_a_graph_that_forecasts_otherwise_is_not_kept(
    precision: Any, difference: float, kept: bool, checkpoints: dict[str, Path],
    exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = (exported["chronos-bolt"] / GRAPH_FILE).read_bytes()
    exporting = "tscompress.workflows.export"
    monkeypatch.setattr(f"{exporting}.onnx_graph", lambda source, precision: graph)
    monkeypatch.setattr(f"{exporting}.largest_difference", lambda *_: difference)
    out = tmp_path / "out"
    if kept:
        result = tscompress.export(checkpoints["chronos-bolt"], out, precision=precision)
        assert result.difference == difference
        return
    with pytest.raises(VerificationError, match=f"{precision}.*quantiles"):
        tscompress.export(checkpoints["chronos-bolt"], out, precision=precision)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_difference_that_is_no_number_counts_in_either_length(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [1e-3, 1e-3]
    found[lost] = math.nan
    differences = iter(found)
    monkeypatch.setattr(parity, "_difference", lambda *_: next(differences))
    graph: Any = SimpleNamespace(context_length=64)
    assert math.isnan(parity.largest_difference(graph, graph))


def test_command_exports(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch,
    exported: dict[str, Path],
) -> None:  # fmt: skip
    graph = (exported["chronos-bolt"] / GRAPH_FILE).read_bytes()
    monkeypatch.setattr("tscompress.workflows.export.onnx_graph", lambda *_: graph)
    out = tmp_path / "out"
    outcome = command("export", checkpoints["chronos-bolt"], "--output", out, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["graph_bytes"] == len(graph)
    assert 0 < outcome.json["difference"] < 1e-5
    # A graph of another model is not kept.
    other = tmp_path / "other"
    outcome = command("export", "reference/bolt-nano", "--output", other)
    assert_refused(outcome, 1, "nothing was kept")
    assert not other.exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", GRAPHS)
def test_a_model_in_bfloat16_is_exported(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load(checkpoints[family], dtype="bfloat16")
    assert tscompress.export(loaded, tmp_path / "out").difference < 1e-5


def test_a_model_in_bfloat16_is_cast_and_left_as_it_is(
    checkpoints: dict[str, Path], exported: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = (exported["chronos-bolt"] / GRAPH_FILE).read_bytes()
    seen = set()

    def dtype_of(module: torch.nn.Module) -> None:
        seen.update(one.dtype for one in module.parameters())

    def written(source: Any, precision: str) -> bytes:
        dtype_of(source.module)
        return graph

    def compared(pipeline: Any, forecaster: Any) -> float:
        dtype_of(pipeline.inner_model)
        return 0.0

    monkeypatch.setattr("tscompress.workflows.export.onnx_graph", written)
    monkeypatch.setattr("tscompress.workflows.export.largest_difference", compared)
    loaded = load(checkpoints["chronos-bolt"], dtype="bfloat16")
    tscompress.export(loaded, tmp_path / "out")
    assert seen == {torch.float32}
    assert {one.dtype for one in loaded.model.parameters()} == {torch.bfloat16}
    # The files have more digits than the weights that were exported.
    assert record_of(tmp_path / "out")["source"]["sha256"] == {}


def test_the_record_names_only_files_that_hold_the_weights(
    checkpoints: dict[str, Path], exported: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = (exported["chronos-bolt"] / GRAPH_FILE).read_bytes()
    monkeypatch.setattr("tscompress.workflows.export.onnx_graph", lambda *_: graph)
    monkeypatch.setattr("tscompress.workflows.export.largest_difference", lambda *_: 0.0)

    def source_of(model: Any) -> Any:
        return record_of(tscompress.export(model, tmp_path / "out", force=True).directory)["source"]

    stored = checkpoints["chronos-bolt"]
    assert source_of(load(stored)) == source_of(stored)
    assert set(source_of(stored)["sha256"]) >= {"config.json", "model.safetensors"}
    small = made_smaller(stored, "folded")
    assert source_of(small)["sha256"] == {}
    assert "other weights" in (tmp_path / "out" / "README.md").read_text()
    saved = tscompress.save(small, tmp_path / "small")
    assert source_of(small) == source_of(saved)
    page = (tmp_path / "out" / "README.md").read_text()
    assert "other weights" not in page
    assert "of small" in page
    assert str(tmp_path) not in page
    with torch.no_grad():
        next(small.model.parameters()).add_(1)
    assert source_of(small)["sha256"] == {}


def test_the_directory_of_a_pipeline_is_not_replaced(
    compressed: dict[tuple[str, str], Path], tmp_path: Path, forbid: Forbid
) -> None:
    forbid("tscompress.workflows.export.onnx_graph")
    directory = Path(shutil.copytree(compressed["chronos-bolt", "folded"], tmp_path / "model"))
    pipeline = BaseChronosPipeline.from_pretrained(directory)
    with pytest.raises(OutputExistsError, match="input"):
        tscompress.export(pipeline, directory, force=True)
    assert (directory / "model.safetensors").is_file()


def test_a_model_without_a_median_is_compared(
    checkpoints: dict[str, Path], exported: dict[str, Path], tmp_path: Path
) -> None:
    found = []
    for source, name in ((checkpoints, "config.json"), (exported, RECORD_FILE)):
        directory = Path(shutil.copytree(source["chronos-bolt"], tmp_path / name))
        content = json.loads((directory / name).read_text())
        levels = content.get("config", content)["chronos_config"]["quantiles"]
        levels[levels.index(0.5)] = 0.45
        (directory / name).write_text(json.dumps(content))
        found.append(directory)
    model, graph = found
    assert largest_difference(load(model).forecaster, runtime.load(graph)) < 1e-5


@pytest.mark.parametrize("before", [logging.NOTSET, logging.ERROR])
def test_the_callers_switch_of_logging_stays(before: int) -> None:
    logging.disable(before)
    try:
        with _without_advice():
            assert logging.root.manager.disable >= max(before, logging.WARNING)
        assert logging.root.manager.disable == before
    finally:
        logging.disable(logging.NOTSET)
