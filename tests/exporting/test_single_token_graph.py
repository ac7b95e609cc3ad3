"""The graph of a Chronos-Bolt without what its decoder never needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tscompress
import tscompress.runtime
from tscompress.runtime.record import GRAPH_FILE

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

WAVE = np.sin(np.arange(60) / 3).astype(np.float32)


def test_graph_is_smaller_and_forecasts_as_the_original(
    checkpoints: dict[str, Path], exported: dict[str, Path], tmp_path: Path
) -> None:
    small = tscompress.compress(
        checkpoints["chronos-bolt"],
        fold=tscompress.FoldConfig(single_token=True),
        calibration=tscompress.CalibrationConfig(num_series=8, context_length=32),
    )
    assert tscompress.export(small, tmp_path / "graph").difference < 1e-5
    places = tmp_path / "graph", exported["chronos-bolt"]
    ours, full = (onnx.load(str(place / GRAPH_FILE)) for place in places)
    softmaxes = [sum(node.op_type == "Softmax" for node in one.graph.node) for one in (ours, full)]
    assert softmaxes == [4, 6]  # of two layers, without the decoder's self-attention
    stored = [
        sum(int(np.prod(one.dims)) for one in model.graph.initializer) for model in (ours, full)
    ]
    # Queries and keys of the first cross-attention are padded: a graph has one head size.
    dropped = (4 * 24 * 32 - 24 * 24) + (4 * 24 * 32 - 2 * 24 * 4)
    assert stored[1] - stored[0] > 0.9 * dropped
    series = [WAVE, WAVE[:33]]
    runtime: Any = tscompress.runtime.load(tmp_path / "graph")
    found = runtime.predict(series, 8)
    expected = tscompress.load(checkpoints["chronos-bolt"]).forecaster.predict(
        [torch.from_numpy(one) for one in series], prediction_length=8
    )
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other.numpy()).max() < 1e-5 * other.abs().max()
