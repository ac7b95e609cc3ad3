"""Graphs of a univariate Chronos-2: no groups, no queries and keys of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import tiny_chronos2

import tscompress
import tscompress.runtime
from tscompress.checkpoints.given import loaded_of
from tscompress.checkpoints.load import load
from tscompress.errors import UsageError
from tscompress.families.groups import reads_covariates
from tscompress.runtime.record import GRAPH_FILE

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

WAVE = np.sin(np.arange(60) / 3).astype(np.float32)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Chronos-2 of one layer: exporting a second tells nothing more."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = tiny_chronos2()
    model.encoder.block = model.encoder.block[:1]
    model.config.num_layers = 1
    directory = tmp_path_factory.mktemp("one-layer") / "chronos-2"
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def graphs(one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A univariate model in memory, and its graph."""
    small = tscompress.compress(
        one_layer,
        fold=tscompress.FoldConfig(univariate=True),
        calibration=tscompress.CalibrationConfig(num_series=8, context_length=32),
    )
    directory = tmp_path_factory.mktemp("univariate") / "graph"
    assert tscompress.export(small, directory).difference < 1e-5
    return small, directory


def test_graph_has_contexts_alone_and_no_pairs_of_series(graphs: tuple[Any, Path]) -> None:
    ours = onnx.load(str(graphs[1] / GRAPH_FILE))
    assert [one.name for one in ours.graph.input] == ["context", "observed", "steps_ahead"]
    # Queries, keys, values and outputs of time attention; those of groups are one matrix.
    shapes = [tuple(one.dims) for one in ours.graph.initializer]
    assert [shapes.count(shape) for shape in ((24, 32), (32, 24), (24, 24))] == [3, 1, 1]
    assert sum(node.op_type == "Softmax" for node in ours.graph.node) == 1


def test_graph_forecasts_as_the_model_beyond_one_call(graphs: tuple[Any, Path]) -> None:
    small, directory = graphs
    runtime: Any = tscompress.runtime.load(directory)
    series = [WAVE, WAVE[:33]]
    for steps in (8, 40, 100):
        beyond = steps > runtime.prediction_length
        with pytest.warns(UserWarning, match="prediction") if beyond else nullcontext():
            found = runtime.predict(series, steps)
        with pytest.warns(UserWarning, match="prediction") if beyond else nullcontext():
            expected = small.forecaster.predict(
                [torch.from_numpy(one) for one in series], prediction_length=steps
            )
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(ours - theirs.numpy()).max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("torch_like", [False, True], ids=["runtime", "pipeline"])
def test_graph_refuses_groups(graphs: tuple[Any, Path], torch_like: bool) -> None:
    _, directory = graphs
    forecaster: Any = tscompress.runtime.load(directory)
    if torch_like:
        forecaster = loaded_of(directory, argument="model").forecaster
        assert not reads_covariates(forecaster)
    known = {"target": WAVE, "past_covariates": {"a": WAVE}, "future_covariates": {"a": WAVE[:8]}}
    with pytest.raises(UsageError, match="2 series"):
        forecaster.predict([known], 8)
    with pytest.raises(UsageError, match="2 series"):
        forecaster.predict([np.stack([WAVE, WAVE])], 8)
    with pytest.raises(UsageError, match="cross_learning"):
        forecaster.predict([WAVE], 8, cross_learning=True)


def test_graphs_of_stock_models_are_unchanged(
    exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    runtime: Any = tscompress.runtime.load(exported["chronos-2"])
    both = np.stack([WAVE, WAVE[::-1]])
    [found] = runtime.predict([both], 20)
    [expected] = load(checkpoints["chronos-2"]).forecaster.predict(
        [torch.from_numpy(both.copy())], prediction_length=20
    )
    assert np.abs(found - expected.numpy()).max() < 1e-5 * expected.abs().max()
