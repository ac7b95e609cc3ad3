"""What the memory of an exported model counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tscompress.benchmark import process_memory
from tscompress.benchmark.workload import make_workload


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
