"""Forecasts without torch: equal to the stock pipelines, and refusals of graphs and series."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tscompress import runtime
from tscompress.benchmark.bench import bench
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import (
    CorruptCheckpointError,
    DataError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.families.exported import exported_pipeline
from tscompress.runtime.contexts import stacked
from tscompress.runtime.quantiles import empirical, interpolated, weighted
from tscompress.runtime.record import GRAPH_FILE, RECORD_FILE

onnx: Any = pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings(
    "ignore:We recommend keeping prediction length",
    "ignore:prediction_length is",
    "ignore:quantile levels are",
)
FAMILIES = ("chronos-bolt", "chronos-2")  # of one graph each
LEVELS = [[0.1, 0.5, 0.9], [0.05, 0.33, 0.5, 0.97]]


def series(*lengths: int) -> list[np.ndarray]:
    """Random walks; of all but the first a part is missing."""
    draw = np.random.default_rng(0)
    found = [draw.normal(size=steps).cumsum().astype(np.float32) + 3 for steps in lengths]
    for values in found[1:]:
        values[len(values) // 3 : len(values) // 2] = np.nan
    return found


def assert_close(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("levels", LEVELS, ids=["own", "between"])
@pytest.mark.parametrize("horizon", [7, 16, 50])
@pytest.mark.parametrize("lengths", [(48,), (5, 64, 100)], ids=str)
def test_bolt_forecasts_as_the_stock_pipeline(
    lengths: tuple[int, ...], horizon: int, levels: list[float],
    exported: dict[str, Path], checkpoints: dict[str, Path],
) -> None:  # fmt: skip
    contexts = series(*lengths)
    stock: Any = load(checkpoints["chronos-bolt"]).forecaster
    expected = stock.predict_quantiles(
        [torch.from_numpy(one) for one in contexts], horizon, quantile_levels=levels
    )
    found = runtime.load(exported["chronos-bolt"]).predict_quantiles(contexts, horizon, levels)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


def tasks(horizon: int) -> list[Any]:
    """Targets in one and two rows, with covariates that are known ahead but for some steps."""
    one, two, past, ahead = series(40, 40, 40, 40)
    known = np.linspace(-1, 1, horizon).astype(np.float32)
    known[2:4] = np.nan
    return [
        {
            "target": np.stack([one, two]) * (1 + index),
            "past_covariates": {"price": ahead, "a": past},
            "future_covariates": {"price": known},
        }
        for index in range(3)
    ]


@pytest.mark.parametrize("levels", LEVELS, ids=["own", "between"])
@pytest.mark.parametrize("horizon", [7, 64, 150])
@pytest.mark.parametrize("kind", ["series", "rows", "covariates", "array", "cross-learning"])
def test_chronos2_forecasts_as_the_stock_pipeline(
    kind: str, horizon: int, levels: list[float],
    exported: dict[str, Path], checkpoints: dict[str, Path],
) -> None:  # fmt: skip
    contexts: Any = {
        "series": series(48, 20, 200),
        "rows": [np.stack(series(30, 30)), *series(70)],
        "covariates": tasks(horizon),
        "array": np.stack(series(32, 32, 32, 32)).reshape(2, 2, 32),
        "cross-learning": series(48, 48, 40),
    }[kind]
    # Beyond one call one path of each row at a time, some, or all.
    batch_size = {"series": 12, "rows": 64}.get(kind, 5)
    options: dict[str, Any] = {"batch_size": batch_size, "cross_learning": kind == "cross-learning"}
    stock: Any = load(checkpoints["chronos-2"]).forecaster
    expected = stock.predict_quantiles(contexts, horizon, levels, **options)
    forecaster: Any = runtime.load(exported["chronos-2"])
    found = forecaster.predict_quantiles(contexts, horizon, levels, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)


def test_calls_for_paths_have_no_more_rows_than_the_batch(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forecaster: Any = runtime.load(exported["chronos-2"])
    graph, rows = forecaster.graph, []

    def counted(**inputs: Any) -> Any:
        rows.append(len(inputs["group_ids"]))
        return graph(**inputs)

    monkeypatch.setattr(forecaster, "graph", counted)
    forecaster.predict_quantiles(series(48, 20, 30, 60), 150, [0.5], batch_size=4)
    assert max(rows) == 4
    assert len(rows) > 9


def test_threads_do_not_spin_after_a_call(exported: dict[str, Path]) -> None:
    found: Any = runtime.load(exported["chronos-bolt"])
    options = found.graph._session.get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_target_that_has_not_begun_is_forecast_as_by_the_stock_pipeline(
    exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    given = tasks(7)
    given[1]["target"][1] = np.nan
    stock: Any = load(checkpoints["chronos-2"]).forecaster
    expected, _ = stock.predict_quantiles(given, 7, QUANTILE_LEVELS)
    pipeline = exported_pipeline(runtime.load(exported["chronos-2"]))
    found, _ = pipeline.predict_quantiles(given, 7, QUANTILE_LEVELS)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_is_the_default(family: str, exported: dict[str, Path]) -> None:
    forecaster: Any = runtime.load(exported[family], threads=1)
    found = forecaster.predict(series(30, 20))
    assert np.asarray(found).shape[-2:] == (9, forecaster.prediction_length)
    assert family in repr(forecaster)


def test_masked_steps_and_nan_are_the_same(exported: dict[str, Path]) -> None:
    graph = runtime.load(exported["chronos-bolt"]).graph
    context = series(48, 48)[1][None]
    there = np.isfinite(context).astype(np.float32)
    by_nan = graph(context=context, observed=np.ones_like(there))
    by_mask = graph(context=np.where(there > 0, context, 7e5).astype(np.float32), observed=there)
    assert np.array_equal(by_nan, by_mask)


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_large_values_beside_missing_ones(family: str, exported: dict[str, Path]) -> None:
    """The square of what a masked step is away from the mean is beyond float32."""
    wave = np.sin(np.arange(30.0))
    gaps = wave.copy()
    gaps[7] = np.nan
    forecaster = runtime.load(exported[family])
    found, _ = forecaster.predict_quantiles([5e19 + 1e18 * wave, 5e19 + 1e18 * gaps], 4, [0.5])
    assert np.isfinite(np.asarray(found)).all()


def test_a_graph_is_opened_before_it_is_timed(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forecaster = runtime.load(exported["chronos-bolt"], threads=torch.get_num_threads() + 1)
    events = []

    def opened(*given: Any, **options: Any) -> Any:
        events.append("open")
        return runtime.load(*given, **options)

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr("tscompress.families.exported.load", opened)
    workload = Workload(batch_size=2, context_length=32, horizon=4, repeats=1, warmup=0)
    pipeline = exported_pipeline(forecaster)
    pipeline.inner_model.eval()
    bench({"graph": pipeline}, workload, measure_macs=False, clock=clock)
    assert events == ["open", "clock", "clock"]


WITHOUT_TORCH = """
import json, sys, warnings
for name in ("torch", "transformers", "chronos", "pandas", "onnx", "pydantic", "yaml"):
    sys.modules[name] = None
import numpy as np, tscompress.runtime
forecaster = tscompress.runtime.load(sys.argv[1])
warnings.simplefilter("ignore")
quantiles, median = forecaster.predict_quantiles([np.arange(40.0), np.arange(9.0)], 70, [0.1, 0.2])
print(json.dumps(np.asarray(quantiles).tolist()))
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_is_not_needed(family: str, exported: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(exported[family])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forecaster = runtime.load(exported[family])
    here, _ = forecaster.predict_quantiles([np.arange(40.0), np.arange(9.0)], 70, [0.1, 0.2])
    assert_close(json.loads(done.stdout), here)


# --------------------------------------------------------------------------------------------------
# Quantiles
# --------------------------------------------------------------------------------------------------


def test_long_series_are_cut_before_others_are_padded() -> None:
    found = stacked([np.arange(1000.0), np.array([5.0])], 3)
    np.testing.assert_array_equal(found, [[997, 998, 999], [np.nan, np.nan, 5]])


def test_quantiles_of_values_are_those_of_torch() -> None:
    values = np.random.default_rng(1).normal(size=(3, 4, 81)).astype(np.float32)
    levels = [0.0, 0.1, 0.37, 0.5, 0.9, 1.0]
    expected = torch.quantile(torch.from_numpy(values), torch.tensor(levels), dim=-1)
    assert np.allclose(empirical(values, levels), expected.permute(1, 2, 0), rtol=0, atol=1e-6)


def test_quantiles_of_equal_weights_lie_between_the_values() -> None:
    values = np.array([[3.0, 1.0, 2.0, 4.0]], np.float32)
    found = weighted(values, np.ones(4, np.float32), [0.0, 0.25, 0.375, 0.5, 1.0])
    assert found.tolist() == [[1.0, 1.0, 1.5, 2.0, 4.0]]
    found = interpolated(values, [0.1, 0.4, 0.6, 0.9], [0.0, 0.25, 0.6, 0.99])
    assert found.tolist() == [[3.0, 2.0, 2.0, 4.0]]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
def test_covariates_are_refused_by_models_that_read_none(
    family: str, exported: dict[str, Path]
) -> None:
    with pytest.raises(UsageError, match=r"series 0 is a mapping, .* and this model reads none"):
        runtime.load(exported[family]).predict_quantiles([{"target": [1.0, 2.0]}], 4)


@pytest.mark.parametrize(
    ("contexts", "error", "said"),
    [
        ([], DataError, "empty"),
        ([[1.0, 2.0], []], DataError, "series 1 is empty"),
        ([[np.nan, np.nan]], DataError, "series 0"),
        ([[1.0, 1e308]], DataError, "float32"),
        ([[1.0, -np.inf]], DataError, "-inf"),
        ([["a", "b"]], DataError, "numeric"),
        ([[[[1.0]]]], DataError, "dimensions"),
        ([1.0, 2.0, 3.0], DataError, "single number"),
        ("abc", UsageError, "str"),
        (5, UsageError, "int"),
    ],
)
@pytest.mark.parametrize("family", [*FAMILIES, "chronos-t5"])
def test_series_that_cannot_be_forecast(
    family: str, contexts: Any, error: type[Exception], said: str, exported: dict[str, Path]
) -> None:
    with pytest.raises(error, match=said) as refused:
        runtime.load(exported[family]).predict_quantiles(contexts, 4)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"past": [1.0]}, "target"),
        ({"target": [1.0, 2.0], "past_covariates": {"x": [1.0]}}, "x"),
        ({"target": [1.0, 2.0], "future_covariates": {"x": [1.0] * 4}}, "past_covariates"),
        (
            {
                "target": [1.0, 2.0],
                "past_covariates": {"x": [1.0, 2.0]},
                "future_covariates": {"x": [1.0]},
            },
            "x ahead",
        ),
        ({"target": [1.0], "past_covariates": {"day": ["monday"]}}, "day"),
        ({"target": [1.0, 2.0], "past_covariates": np.ones(2)}, "past_covariates.*ndarray"),
        ({"target": [1.0, 2.0], "past_covariates": {1: [1.0] * 2, "x": [1.0] * 2}}, "int and str"),
    ],
)
def test_covariates_that_do_not_fit(task: Any, said: str, exported: dict[str, Path]) -> None:
    with pytest.raises((DataError, UsageError), match=said):
        runtime.load(exported["chronos-2"]).predict_quantiles([task], 4)


@pytest.mark.parametrize("family", [*FAMILIES, "chronos-t5"])
def test_options_out_of_range(family: str, exported: dict[str, Path]) -> None:
    forecaster = runtime.load(exported[family])
    for steps in (0, -1, 1.5, True, "4", 10**7):
        with pytest.raises(UsageError, match="prediction_length"):
            forecaster.predict_quantiles([[1.0, 2.0]], steps)  # type: ignore[arg-type]
    given: tuple[Any, ...] = ([], [1.5], [-0.1], 0.5, ["a"], [None])
    for levels in given:
        with pytest.raises(UsageError, match="quantile_levels"):
            forecaster.predict_quantiles([[1.0, 2.0]], 4, levels)
    with pytest.raises(UsageError, match="threads"):
        runtime.load(exported[family], threads=0)
    with pytest.raises(UsageError, match="int"):
        runtime.load(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty"):
        runtime.load("")
    for name in ("~no-such-user/x", "x" * 300):
        with pytest.raises(ModelNotFoundError, match=name):
            runtime.load(name)


@pytest.mark.filterwarnings("default:prediction_length is")
def test_steps_beyond_one_call_are_said(exported: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match="16 steps at once"):
        runtime.load(exported["chronos-bolt"]).predict_quantiles([[1.0, 2.0]], 17)


def write_record(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / RECORD_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def write_graph(directory: Path, model: Any) -> None:
    write_graph_file(directory, GRAPH_FILE, model)


def write_graph_file(directory: Path, file: str, model: Any) -> None:
    """Put another graph in place, with its hash: as somebody would who wants it opened."""
    content = model.SerializeToString()
    (directory / file).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    write_record(directory, lambda record: record["sha256"].update({file: digest}))


def change_bytes(directory: Path) -> None:
    path = directory / GRAPH_FILE
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


def lose_input(directory: Path) -> None:
    model = onnx.load(str(directory / GRAPH_FILE))
    kept = [one for one in model.graph.input if one.name != "observed"]
    ones = onnx.helper.make_tensor("observed", onnx.TensorProto.FLOAT, [1, 1], [1.0])
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.append(ones)
    write_graph(directory, model)


def read_elsewhere(directory: Path) -> None:
    model = onnx.load(str(directory / GRAPH_FILE))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../secret"
    write_graph(directory, model)


def read_elsewhere_in_a_branch(directory: Path) -> None:
    """In a constant of a graph in an attribute of a node."""
    model = onnx.load(str(directory / GRAPH_FILE))
    tensor = onnx.helper.make_tensor("secret", onnx.TensorProto.FLOAT, [1], [1.0])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    constant = onnx.helper.make_node("Constant", [], ["x"], value=tensor)
    branch = onnx.helper.make_graph([constant], "branch", [], [])
    node = onnx.helper.make_node("If", ["context"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)
    write_graph(directory, model)


def write_nonsense(directory: Path) -> None:
    (directory / GRAPH_FILE).write_bytes(b"\x0a\xff\xff\xff\xff\x0fnonsense")
    digest = hashlib.sha256((directory / GRAPH_FILE).read_bytes()).hexdigest()
    write_record(directory, lambda record: record["sha256"].update({GRAPH_FILE: digest}))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (change_bytes, CorruptCheckpointError, "sha256"),
        (lose_input, CorruptCheckpointError, "'observed'"),
        (read_elsewhere, CorruptCheckpointError, "secret"),
        (read_elsewhere_in_a_branch, CorruptCheckpointError, "passwd"),
        (write_nonsense, CorruptCheckpointError, "ONNX"),
        (lambda d: (d / GRAPH_FILE).unlink(), CorruptCheckpointError, GRAPH_FILE),
        (lambda d: (d / RECORD_FILE).unlink(), ModelNotFoundError, RECORD_FILE),
        (lambda d: (d / RECORD_FILE).write_text("["), CorruptCheckpointError, RECORD_FILE),
        (lambda d: (d / RECORD_FILE).write_text("[1]"), CorruptCheckpointError, "object"),
        (lambda d: write_record(d, lambda r: r.update(format=2)), UnsupportedModelError, "format"),
        (lambda d: write_record(d, lambda r: r.update(family="x")), UnsupportedModelError, "'x'"),
        (lambda d: write_record(d, lambda r: r.pop("config")), CorruptCheckpointError, "config"),
        (
            lambda d: write_record(d, lambda r: r["config"]["chronos_config"].update(quantiles=[])),
            CorruptCheckpointError,
            "quantiles",
        ),
        (
            lambda d: write_record(
                d, lambda r: r["config"]["chronos_config"].pop("prediction_length")
            ),
            CorruptCheckpointError,
            "prediction_length",
        ),
    ],
)
def test_directory_that_is_not_as_it_was_exported(
    damage: Callable[[Path], object], error: type[Exception], said: str,
    exported: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    directory = tmp_path / "copy"
    shutil.copytree(exported["chronos-bolt"], directory)
    damage(directory)
    with pytest.raises(error, match=said) as refused:
        runtime.load(directory)
    assert len(str(refused.value).splitlines()) == 1
