"""What eval/budgets.py compares, keeps and prints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from eval_scripts import imported
from rich.console import Console

from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.workload import Workload
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.synthetic import MOSTLY_PATTERNS
from tscompress.plan.schedules import parse_budget
from tscompress.probing.measure import ProbeConfig

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is measured of the tiny model serves all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def budgets(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(cache))
    with imported(["budgets"]) as found:
        workload = Workload(batch_size=2, context_length=32, horizon=8, repeats=1, warmup=0)
        monkeypatch.setitem(found.budgets.WORKLOADS, "chronos-bolt", workload)
        monkeypatch.setattr(found.budgets, "ROUNDS", 1)
        # Its own process for each model takes seconds; tests/benchmark measures with one.
        monkeypatch.setattr("tscompress.benchmark.bench.memory_of", lambda *_: MemoryUse(1, 2, 3))
        yield found.budgets


@pytest.fixture
def bed(budgets: Any, checkpoints: dict[str, Path]) -> Any:
    """A tiny model, two of whose series are evaluated."""
    little = CalibrationConfig(num_series=24, context_length=48, batch_size=8)
    made = budgets.Testbed(str(checkpoints["chronos-bolt"]), 2, calibration=little)
    made.config = made.config.model_copy(update={"datasets": ("monash_m1_yearly",)})
    made.probe = ProbeConfig(tasks=("seasons", "trends"), num_series=2)
    return made


def trials_of(budgets: Any, *names: str) -> list[Any]:
    return [budgets.Trial(parse_budget("parameters=0.6"), name) for name in names or budgets.ARMS]


def unmeasured(_: Any, paths: dict[Any, Path]) -> dict[Any, dict[str, float]]:
    """No costs."""
    return {key: {} for key in paths}


def test_every_way_meets_the_budget_and_a_run_started_again_measures_only_costs(
    budgets: Any, bed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, table = trials_of(budgets), tmp_path / "b.csv"
    windows = budgets.planning_windows(bed, "mixed")

    def measured() -> pd.DataFrame:
        found: pd.DataFrame = budgets.measure(bed, trials, windows, tmp_path, table, QUIET)
        return found

    frame = measured()
    assert frame["arm"].tolist() == list(budgets.ARMS)
    assert (frame["parameters"] <= 0.6).all()
    assert frame[["MACs", "bytes", "memory", "latency", "CPU time"]].gt(0).all(axis=None)
    sizes = dict(zip(frame["arm"], frame["sizes"], strict=True))
    narrows = {trial.arm: trial.schedule.may_narrow for trial in trials}
    assert {arm for arm, may in narrows.items() if may} == {"uniform", "by layer"}
    assert not any("d_model" in sizes[arm] for arm, may in narrows.items() if not may)
    text = budgets.markdown(frame)
    assert len({line.count("|") for line in text.splitlines()}) == 1
    monkeypatch.setattr(type(bed), "row", None)  # nothing is scored again
    monkeypatch.setattr(budgets, "planned", None)  # nor compressed
    monkeypatch.setattr(budgets, "costs_of", unmeasured)
    columns = ["budget", "arm", "sizes", "WQL", "skill", "loss"]
    pd.testing.assert_frame_equal(measured()[columns], frame[columns])
    rows = pd.read_csv(table)
    assert len(rows) == len(trials)


def test_a_row_that_is_missing_is_measured(
    budgets: Any, bed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "costs_of", unmeasured)
    table, windows = tmp_path / "b.csv", budgets.planning_windows(bed, "mixed")
    both, first = trials_of(budgets, "uniform", "by layer"), trials_of(budgets, "uniform")
    budgets.measure(bed, first, windows, tmp_path, table, QUIET)
    kept = pd.read_csv(table).assign(own=0.5)
    kept.to_csv(table, index=False)
    frame = budgets.measure(bed, both, windows, tmp_path, table, QUIET)
    assert frame["own"].isna().tolist() == [False, True]
    assert not math.isnan(frame["skill"].iloc[1])
    frame.to_csv(table, index=False)
    again = budgets.measure(bed, both[1:], windows, tmp_path, table, QUIET)
    assert again["arm"].tolist() == ["by layer", "uniform"]  # what is not asked for stays
    frame.assign(settings="others").to_csv(table, index=False)
    fresh = budgets.measure(bed, first, windows, tmp_path, table, QUIET)
    assert fresh["arm"].tolist() == ["uniform"]
    assert "own" not in fresh


def test_real_windows_hold_no_synthetic_series(budgets: Any, bed: Any) -> None:
    """Another mixture of synthetic series draws other windows, but of real ones the same."""

    def windows(source: str) -> list[list[float]]:
        batches = budgets.planning_windows(bed, source)
        return [row.nansum().item() for batch in batches for row in batch.context]

    before = {source: windows(source) for source in ("mixed", "synthetic", "real")}
    other = MOSTLY_PATTERNS.model_copy(update={"seasonal_weight": 0.0})
    bed.calibration = bed.calibration.model_copy(update={"corpus": other})
    assert windows("real") == before["real"]
    assert windows("synthetic") != before["synthetic"]
    assert windows("mixed") != before["mixed"]


def test_sizes_by_layer_are_told_by_their_ends(budgets: Any, bed: Any) -> None:
    windows = budgets.planning_windows(bed, "mixed")
    texts = {
        trial.arm: budgets.sizes_text(budgets.planned(bed, trial, windows))
        for trial in trials_of(budgets)
    }
    assert "values" in texts["by layer, whole width"]
    assert "d_kv" in texts["uniform"]
    assert "–" not in texts["uniform"]
