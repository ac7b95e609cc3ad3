"""What the memory of an exported model counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tscompress.benchmark import process_memory
from tscompress.benchmark.process_memory import process_memory as real_process_memory
from tscompress.benchmark.workload import make_workload
from tscompress.errors import UsageError
from tscompress.runtime.load import load


def test_a_graph_is_opened_once_whatever_threads_the_workload_names(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    forecasters: list[Any] = []
    sessions: list[Any] = []
    load: Any = process_memory.loaded_of

    def noted(*given: Any, **options: Any) -> Any:
        opened.append(torch.get_num_threads())
        loaded = load(*given, **options)
        forecasters.append(loaded.forecaster)
        sessions.append(loaded.forecaster.forecaster)
        return loaded

    monkeypatch.setattr(process_memory, "loaded_of", noted)
    before = torch.get_num_threads()
    workload = make_workload(
        {"threads": before + 1, "context_length": 16, "horizon": 4, "batch_size": 1}
    )
    measure = process_memory.measure_this_process
    memory = measure(exported["chronos-bolt"], "float32", workload, shared=False)
    assert opened == [before + 1]
    assert forecasters[0].forecaster is sessions[0]
    assert torch.get_num_threads() == before
    assert 0 < memory.before_load_bytes <= memory.peak_bytes


def test_a_graph_without_onnxruntime_is_one_line_that_names_the_extra(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the process, and of the one that started it."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            process_memory.main(command[3:])
        return subprocess.CompletedProcess(command, ended.value.code, *capsys.readouterr())  # type: ignore[arg-type]

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(subprocess, "run", run)
    graph, workload = exported["chronos-bolt"], make_workload({"context_length": 16})
    with pytest.raises(UsageError, match=r"tscompress\[onnx\]") as refused:
        real_process_memory(graph, torch.float32, workload)
    with pytest.raises(UsageError) as elsewhere:
        load(graph)
    assert str(refused.value).endswith(str(elsewhere.value))
    assert "\n" not in str(refused.value)
