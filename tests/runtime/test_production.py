"""Exported models in servers: containers, processes, many series, and series of sensors."""

from __future__ import annotations

import importlib.metadata
import math
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tscompress import runtime
from tscompress.errors import CorruptCheckpointError, DataError, UsageError
from tscompress.exporting.packages import library_versions
from tscompress.runtime import graph
from tscompress.runtime.graph import cores_of_quota, thread_count
from tscompress.runtime.record import GRAPH_FILE

pytest.importorskip("onnx")
SERIES = [np.sin(np.arange(48.0)) + row for row in range(5)]


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2", "chronos-t5"])
def test_a_sensor_that_died_before_the_context_is_refused(
    family: str, exported: dict[str, Path]
) -> None:
    forecaster = runtime.load(exported[family])
    dead = np.full(forecaster.context_length + 9, np.nan)
    dead[:9] = 1e6
    said = f"series 1 has only missing values in the last {forecaster.context_length} steps"
    with pytest.raises(DataError, match=said):
        forecaster.predict_quantiles([SERIES[0], dead], 4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([True, False] * 24, "has categories"),
        ([True, None] * 24, "has categories"),
        ([[1.0, 2.0], [3.0]], "is not numeric"),
        (np.ma.array(["1", "7"] * 24), "is not numeric"),
        (["1", "7"] * 24, "is not numeric"),
        (np.array(["1", "7"] * 24, object), "is not numeric"),
        (np.arange("2024-01-01", "2024-02-18", dtype="datetime64[D]"), "is not numeric"),
    ],
)
def test_categories_are_not_read_as_numbers(
    values: Any, said: str, exported: dict[str, Path]
) -> None:
    task = {"target": SERIES[0], "past_covariates": {"promo": values}}
    with pytest.raises(DataError, match=f"promo {said}"):
        runtime.load(exported["chronos-2"]).predict_quantiles([task], 4)


def test_masked_values_are_missing(exported: dict[str, Path]) -> None:
    forecaster = runtime.load(exported["chronos-bolt"])
    missing = SERIES[0].copy()
    missing[7:9] = np.nan
    masked = np.ma.masked_invalid(missing)
    masked.data[7:9] = 1e20
    for ours, theirs in zip(
        forecaster.predict_quantiles([masked], 4),
        forecaster.predict_quantiles([missing], 4),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_levels_that_the_model_does_not_reach_are_said(exported: dict[str, Path]) -> None:
    for family in ("chronos-bolt", "chronos-2"):
        forecaster: Any = runtime.load(exported[family])
        with pytest.warns(UserWarning, match=r"levels are 0\.01, 0\.99, and the model .* 0\.1 to"):
            forecaster.predict_quantiles(SERIES[:1], 4, [0.01, 0.5, 0.99])
        forecaster.predict_quantiles(SERIES[:1], 4, [(1 - 0.8) / 2, 0.9])  # 0.09999999999999998


@pytest.mark.filterwarnings("ignore:prediction_length is")
@pytest.mark.parametrize("steps", [7, 40])
def test_batches_of_a_bolt_change_nothing(steps: int, exported: dict[str, Path]) -> None:
    forecaster: Any = runtime.load(exported["chronos-bolt"])
    whole = forecaster.predict(SERIES, steps)
    np.testing.assert_allclose(forecaster.predict(SERIES, steps, batch_size=2), whole, atol=1e-5)
    with pytest.raises(UsageError, match="batch_size"):
        forecaster.predict(SERIES, steps, batch_size=0)


def test_a_forecaster_is_pickled_as_its_directory(exported: dict[str, Path]) -> None:
    forecaster = runtime.load(exported["chronos-bolt"], threads=1)
    copied = pickle.loads(pickle.dumps(forecaster))
    assert copied.threads == 1
    found, expected = (one.predict_quantiles(SERIES, 4)[0] for one in (copied, forecaster))
    np.testing.assert_array_equal(found, expected)


def test_onnxruntime_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_the_plain_one(name: str) -> str:
        if name == "onnxruntime":  # onnxruntime-gpu is installed
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    expected = library_versions()
    monkeypatch.setattr(importlib.metadata, "version", without_the_plain_one)
    assert library_versions() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_opens_the_graph_again(exported: dict[str, Path]) -> None:
    forecaster = runtime.load(exported["chronos-bolt"], threads=2)
    expected = forecaster.predict_quantiles(SERIES, 4)[0]
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def forecast() -> None:
        theirs.send(forecaster.predict_quantiles(SERIES, 4)[0])
        os._exit(0)  # pytest's own clean-up is not this process's

    process = multiprocessing.get_context("fork").Process(target=forecast)
    process.start()
    assert ours.poll(60)
    np.testing.assert_array_equal(ours.recv(), expected)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_quota_of_cores_bounds_threads(
    content: dict[str, str], cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores_of_quota(tmp_path) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(graph, "cores_of_quota", lambda: cores)
    assert thread_count(None) == min(64, max(1, math.ceil(min(cores, 64))))
    assert thread_count(3) == 3


def test_a_graph_that_is_no_file_is_not_waited_for(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    for file in exported["chronos-bolt"].iterdir():
        if file.name != GRAPH_FILE:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    os.mkfifo(tmp_path / GRAPH_FILE)
    with pytest.raises(CorruptCheckpointError, match="is not a file of at most 2 GB"):
        runtime.load(tmp_path)
