"""Sweeps: which points there are, that they go on where they stopped, and what is the front."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from other_process import claimed_elsewhere
from rich.console import Console
from shared_fixtures import Command, Forbid, hear_ctrl_c
from typer.testing import CliRunner

from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.sizes import bytes_on_disk, parameter_count
from tscompress.checkpoints.load import load
from tscompress.cli import app as cli
from tscompress.compression.fold_config import FoldConfig
from tscompress.errors import (
    DataError,
    FactorizationError,
    LeakError,
    OutputExistsError,
    RecipeError,
    TscompressError,
)
from tscompress.evaluation.intervals import pareto_front
from tscompress.io.own_outputs import is_own_file
from tscompress.workflows import measure_point as measuring
from tscompress.workflows import sweep as sweeping
from tscompress.workflows import sweep_points
from tscompress.workflows.early_checks import check_sources_are_read
from tscompress.workflows.measure_point import Measured
from tscompress.workflows.recipe import EvaluationConfig
from tscompress.workflows.sweep import sweep
from tscompress.workflows.sweep_points import (
    Grid,
    SweepRecipe,
    load_sweep_recipe,
    original_digest,
    points_of,
    suite_content,
)
from tscompress.workflows.sweep_results import COSTS, SweepResult, sweep_figure, sweep_table


def settings(model: Path | str, output: Path | str, **changes: Any) -> dict[str, Any]:
    """A recipe that takes seconds, but for the processes in which memory is measured."""
    return {
        "model": str(model),
        "output": str(output),
        "grid": [{"rank": [4, 2], "ff_ratio": [None, 0.5]}, {"method": "svd", "rank": [3]}],
        "calibration": {"source": "synthetic", "num_series": 8, "context_length": 32},
        "recover": {
            "buckets": [{"context_length": 32, "horizon": 8, "batch_size": 4}],
            "held_out_series": 4,
        },
        "evaluation": {"datasets": ["monash_m1_yearly"], "max_series": 4, "batch_size": 4},
        "bench": {"batch_size": 2, "context_length": 32, "horizon": 8, "repeats": 5, "warmup": 0},
        **changes,
    }


def recipe(model: Path | str = "m", output: Path | str = "o", **changes: Any) -> SweepRecipe:
    return SweepRecipe.model_validate(settings(model, output, **changes))


def labels(**changes: Any) -> list[str]:
    return [point.label for point in points_of(recipe(**changes))]


class Record:
    """What ``sweep`` told of points."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.failed: list[str] = []

    def __call__(self, found: Measured | None, text: str, done: int, total: int) -> None:
        (self.failed if found is None else self.measured).append(text)


# --- which points ---------------------------------------------------------------------------------


def test_points_are_all_combinations() -> None:
    assert labels() == [
        "fold, d_kv 4",
        "fold, d_kv 4, d_ff 50%",
        "fold, d_kv 2",
        "fold, d_kv 2, d_ff 50%",
        "svd, rank 3",
    ]


def test_recipes_of_points_can_be_run_alone() -> None:
    """Files that some points read are not named by others; settings of folding are of folds."""
    found = recipe(
        fold={"refit": "none"},
        calibration={"source": "sales.csv"},
        series={"id_column": "shop"},
        grid=[{"rank": [4]}, {"method": "svd", "rank": [3]}],
    )
    for point in points_of(found):
        check_sources_are_read(point.recipe)
        assert (point.recipe.fold == FoldConfig()) == (point.recipe.method == "svd")
        assert (point.recipe.calibration.source == "sales.csv") == (point.recipe.method == "fold")


def test_unchanged_combination_is_left_out() -> None:
    assert labels(grid=[{"rank": [None, 4], "ff_ratio": [1.0, 0.5], "recover_steps": [0, 9]}]) == [
        "fold, d_ff 50%",
        "fold, d_ff 50%, 9 steps",
        "fold, d_kv 4",
        "fold, d_kv 4, 9 steps",
        "fold, d_kv 4, d_ff 50%",
        "fold, d_kv 4, d_ff 50%, 9 steps",
    ]
    with pytest.raises(RecipeError, match="no combination that changes the model"):
        points_of(recipe(grid=[{"rank": [None]}]))


def test_a_budget_beside_the_whole_width_chooses_no_other() -> None:
    for layout in ("folded", "factored"):
        grid = {"budget": ["parameters=0.5"], "width": [None, 1.0, 0.5], "layout": layout}
        assert [point.recipe.width for point in points_of(recipe(grid=[grid]))] == [None, 1.0, 0.5]


def test_a_fold_that_drops_parts_is_a_point_without_other_sizes() -> None:
    fold, grid = {"single_token": True}, [{"ff_ratio": [None, 0.5]}]
    assert labels(fold=fold, grid=grid) == ["fold, single token", "fold, single token, d_ff 50%"]
    assert all(point.recipe.fold.single_token for point in points_of(recipe(fold=fold, grid=grid)))
    with pytest.raises(RecipeError, match="single_token"):
        points_of(recipe(fold=fold, grid=[{"method": "svd", "rank": [3]}]))


def test_points_that_come_twice_count_once() -> None:
    assert labels(grid=[{"rank": [4]}, {"rank": [8, 4]}]) == ["fold, d_kv 4", "fold, d_kv 8"]


def test_every_option_of_a_grid_reaches_the_recipe() -> None:
    (point,) = points_of(
        recipe(grid=[{"budget": ["parameters=0.5"], "layout": "factored", "recover_steps": [7]}])
    )
    assert point.label == "fold, parameters=0.5, factored, 7 steps"
    assert point.recipe.schedule is not None
    assert point.recipe.schedule.model_dump()["layout"] == "factored"
    assert point.recipe.recover is not None
    assert (point.recipe.recover.steps, point.recipe.recover.held_out_series) == (7, 4)
    found = points_of(
        recipe(
            grid=[
                {"schedule": [[3, 0.27]]},
                {"fit": [0.1]},
                {"latent": [8]},
                {"rank": [4], "layers": [[2, 1]]},
                {"layers": [[1]]},
                {"method": "activation-svd", "epsilon": [0.1]},
                {"method": "svd", "energy": [0.9]},
                {"method": "svd", "budget": [0.25]},
            ]
        )
    )
    kinds = [None if p.recipe.schedule is None else p.recipe.schedule.kind for p in found]
    assert kinds == ["power-law", "fit", None, "rank", None, "epsilon", "energy", "budget"]
    layers = [(p.label, p.recipe.layers) for p in found if p.recipe.layers]
    assert layers == [("fold, d_kv 4, layers 2, 1", (2, 1)), ("fold, layers 1", (1,))]
    assert found[2].recipe.latent == 8
    assert [p.label for p in found][:2] == ["fold, schedule 3.0, 0.27", "fold, fit 0.1"]


@pytest.mark.parametrize(
    ("grid", "match"),
    [
        ([{"rank": [4], "epsilon": [0.1]}], "rank and epsilon were given"),
        ([{"method": "svd", "ff_ratio": [0.5]}], "none was given"),
        ([{"method": "svd", "rank": [4], "ff_ratio": [0.5]}], "ff_ratio is for fold"),
        ([{"rank": [0]}], "rank"),
        ([{"budget": ["parameters=2x"]}], "is no budget"),
    ],
)
def test_refused_combinations_are_named(grid: list[Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        points_of(recipe(grid=grid))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"modle": "x"}, "unknown key 'modle'"),
        ({"grid": [{"ranks": [4]}]}, "ranks"),
        ({"grid": []}, "grid"),
        ({"grid": [{"rank": []}]}, "rank"),
        ({"grid": [{"rank": [4], "recover_steps": [-1]}]}, "recover_steps must be at least 0"),
        ({"keep": "some"}, "keep"),
        ({"recover": {"minutes": 5}}, "give recover_steps in grid"),
        ({"recover": {"steps": 5}}, "give recover_steps in grid"),
        (
            {"grid": [{"rank": [4]}], "recover": {"series": ["sales.csv"]}},
            "none in grid has any; give these, or leave the series out",
        ),
    ],
)
def test_invalid_sweep_recipes_are_refused(
    change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings("m", "o", **change)))
    with pytest.raises(RecipeError, match=match):
        load_sweep_recipe(path)


def test_identities_follow_dependencies_of_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(model_hash: str = "a", **changes: Any) -> str:
        return points_of(recipe(**changes))[0].identity(model_hash)

    base = identity()
    # Where it lies, and how often latency is measured, has no say.
    assert identity(output="other") == base
    assert identity(bench={**settings("", "")["bench"], "repeats": 9, "warmup": 3}) == base
    assert identity(keep="all") == base
    file = tmp_path / "series.csv"
    file.write_text("one")
    calibrated = settings("", "")["calibration"] | {"source": str(file)}
    different = {
        base,
        identity("b"),
        identity(grid=[{"rank": [3]}]),
        identity(grid=[{"rank": [4], "recover_steps": [5]}]),
        identity(fold={"precision": "float32"}),
        identity(calibration={"seed": 1}),
        identity(calibration=calibrated),
        identity(evaluation={"max_series": 5}),
        identity(bench={"batch_size": 3}),
        identity(bench=None),
    }
    assert len(different) == 10
    before = identity(calibration=calibrated)
    file.write_text("another")
    assert identity(calibration=calibrated) != before
    (tmp_path / "more").mkdir()
    learnt = {**settings("", "")["recover"], "series": [str(tmp_path / "more")]}
    recovering = {"grid": [{"rank": [4], "recover_steps": [5]}], "recover": learnt}
    empty = identity(**recovering)
    (tmp_path / "more" / "series.csv").write_text("one")
    assert identity(**recovering) != empty
    assert identity("a") == base
    with monkeypatch.context() as patch:
        patch.setattr(sweep_points, "code_digest", lambda modules: "another")
        assert identity() != base
    monkeypatch.setattr(sweep_points, "versions", lambda: {"torch": "0"})
    assert identity() != base


def test_series_of_a_root_are_part_of_an_identity(tmp_path: Path) -> None:
    times = {"timestamp": [list(pd.date_range("1970-12-31", periods=40, freq="YE"))]}
    place = tmp_path / "monash_m1_yearly"
    place.mkdir()
    name = place / "test-00000-of-00001.parquet"
    given = EvaluationConfig(root=str(tmp_path), datasets=("monash_m1_yearly",))
    pd.DataFrame({**times, "target": [np.arange(40.0)]}).to_parquet(name)
    before = suite_content(given)
    pd.DataFrame({**times, "target": [np.arange(40.0) ** 2]}).to_parquet(name)
    assert before.keys() == {"monash_m1_yearly"}
    assert suite_content(given) != before
    assert suite_content(EvaluationConfig()) == {}


def test_a_shape_is_that_of_the_model_and_not_of_how_it_was_found(
    done: tuple[SweepResult, SweepRecipe], tmp_path: Path
) -> None:
    result, chosen = done
    found = [measuring.finished(Path(chosen.output), name) for name in result.frame["id"]]
    point = next(one for one in found if one is not None and one.checkpoint is not None)
    before = measuring.shape_name(Path(chosen.output), point)
    copy = tmp_path / "out"
    shutil.copytree(chosen.output, copy)
    path = measuring.checkpoint_of(copy, point) / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "schedule": {"kind": "other"}, "calibrated_on": "x"}))
    assert measuring.shape_name(copy, point) == before


def test_series_that_change_while_a_point_is_measured_are_not_filed_under_the_old_ones(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "series.jsonl"
    file.write_text('{"target": [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6]}\n' * 4)
    content = {"source": str(file), "num_series": 4, "context_length": 32}
    chosen = recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", grid=[{"rank": [2]}], bench=None,
        calibration=content,
    )  # fmt: skip
    measured = measuring._measured

    def meanwhile(*given: Any) -> Any:
        file.write_text(file.read_text() + '{"target": [1, 5, 3, 4, 5, 6, 7, 2]}\n')
        return measured(*given)

    monkeypatch.setattr(measuring, "_measured", meanwhile)
    with pytest.raises(TscompressError, match="changed while the sweep ran"):
        sweep(chosen)
    assert not list((tmp_path / "out" / "points").glob("*/point.json"))


def test_a_suite_whose_file_changed_is_scored_again(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "sales.csv"
    dates = pd.date_range("2020-01-31", periods=40, freq="ME")
    level = 50 + np.arange(40.0)
    chosen = recipe(
        checkpoints["chronos-bolt"],
        tmp_path / "out",
        grid=[{"rank": [2]}],
        evaluation={"suite": str(file), "long_format": {"horizon": 6}, "batch_size": 4},
        bench=None,
    )

    def measured(values: Any) -> tuple[list[str], list[str]]:
        pd.DataFrame({"date": dates, "target": values}).to_csv(file, index=False)
        told = Record()
        ids: list[str] = sweep(chosen, on_point=told).frame["id"].tolist()
        return told.measured, ids

    first, ids = measured(level)
    assert first == ["fold, d_kv 2"]
    assert measured(level) == ([], ids)
    again, others = measured(level + 30 * (np.arange(40) % 3))
    assert again == first
    assert not set(ids) & set(others)  # of the original, too

    def write_meanwhile(*_: Any) -> None:
        pd.DataFrame({"date": dates, "target": 2 * level}).to_csv(file, index=False)

    pd.DataFrame({"date": dates, "target": level**2}).to_csv(file, index=False)
    with pytest.raises(DataError, match="changed while points were scored"):
        sweep(chosen, on_point=write_meanwhile)


# --- the front ------------------------------------------------------------------------------------


def test_the_front_by_hand() -> None:
    costs = np.array([1.0, 2.0, 2.0, 3.0, 4.0, 1.0])
    scores = np.array([5.0, 3.0, 4.0, 3.0, 1.0, 5.0])
    assert pareto_front(costs, scores).tolist() == [True, True, False, False, True, True]


def test_front_points_are_undominated() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs, scores = rng.integers(6, size=(2, 12)).astype(float)
        front = pareto_front(costs, scores)
        for index in range(12):
            beaten = any(
                costs[j] <= costs[index]
                and scores[j] <= scores[index]
                and (costs[j], scores[j]) != (costs[index], scores[index])
                for j in range(12)
            )
            assert front[index] != beaten


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighed() -> Iterator[None]:
    """In place of a process for each point, which takes long to start, the size of its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measuring,
            "process_memory",
            lambda path, *_: MemoryUse(100, 100, 100 + bytes_on_disk(path)),
        )
        yield


@pytest.fixture(scope="module")
def done(
    weighed: None, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SweepResult, SweepRecipe]:
    output = tmp_path_factory.mktemp("sweep") / "out"
    grid = [{"rank": [4], "ff_ratio": [None, 0.5]}, {"method": "svd", "rank": [3]},
            {"rank": [4], "recover_steps": [2]}]  # fmt: skip
    chosen = recipe(checkpoints["chronos-bolt"], output, grid=grid)
    return sweep(chosen), chosen


def test_a_sweep_measures_every_point(
    done: tuple[SweepResult, SweepRecipe], checkpoints: dict[str, Path]
) -> None:
    result, chosen = done
    frame = result.frame
    assert frame["label"].tolist() == ["original", *(p.label for p in points_of(chosen))]
    assert frame["number"].tolist() == [0, 1, 2, 3, 4]
    dense = load(checkpoints["chronos-bolt"])
    assert frame["parameters"][0] == parameter_count(dense.model)
    assert frame[["WQL_ratio", "MASE_ratio"]].iloc[0].tolist() == [1.0, 1.0]
    assert (frame["parameters"][1:] < frame["parameters"][0]).all()
    assert (frame["bytes_on_disk"][1:] < frame["bytes_on_disk"][0]).all()
    assert (frame[["latency_ms", "peak_memory_bytes", "macs"]] > 0).all(axis=None)
    assert frame["peak_memory_bytes"].tolist() == frame["bytes_on_disk"].tolist()
    assert (frame["WQL_low"] <= frame["WQL_ratio"])[1:].all()
    assert frame["kv_cache_bytes"][1] == frame["kv_cache_bytes"][0] / 2  # heads of 4, not 8
    # Recovery changes numbers, not shapes: the same latency, other scores.
    assert frame["latency_ms"][4] == frame["latency_ms"][1]
    assert frame["recovered"].tolist() == [False] * 4 + [True]
    assert not result.failures


def test_fronts_are_those_of_the_table(done: tuple[SweepResult, SweepRecipe]) -> None:
    frame = done[0].frame
    for cost in ("latency_ms", "bytes_on_disk", "peak_memory_bytes"):
        for metric in ("WQL", "MASE"):
            expected = pareto_front(frame[cost].to_numpy(), frame[f"{metric}_ratio"].to_numpy())
            assert frame[f"front_{cost}_{metric}"].tolist() == expected.tolist()


def test_output_has_table_figure_and_points(done: tuple[SweepResult, SweepRecipe]) -> None:
    result, chosen = done
    written = pd.read_csv(result.directory / "sweep.csv")
    assert written["label"].tolist() == result.frame["label"].tolist()
    assert (result.directory / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert load_sweep_recipe(result.directory / "sweep.yaml") == chosen
    assert not [path for path in result.directory.rglob("*") if path.name.startswith(".")]
    fronts = result.frame.filter(like="front_").any(axis=1)
    for identity, kept in zip(result.frame["id"][1:], fronts[1:], strict=True):
        point = result.directory / "points" / identity
        assert bool(list(point.rglob("*.safetensors"))) == kept
        stored = json.loads((point / "point.json").read_text())
        assert Measured.model_validate(stored["result"]).id == identity
        assert is_own_file(point / "point.json")


def test_the_table_shows_every_point(done: tuple[SweepResult, SweepRecipe]) -> None:
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(sweep_table(done[0]))
    shown = captured.get()
    for label in done[0].frame["label"]:
        assert label in shown
    assert "latency (L), size on disk (S), memory (M)" in shown
    *_, mase, wql = sweep_table(done[0]).columns
    frame = done[0].frame
    initials = {"L": "latency_ms", "S": "bytes_on_disk", "M": "peak_memory_bytes"}
    for column, metric in ((mase, "MASE"), (wql, "WQL")):
        for index, cell in enumerate(column.cells):
            on = {key for key, cost in initials.items() if frame[f"front_{cost}_{metric}"][index]}
            assert set(str(cell)) == on


def test_finished_sweep_reads_its_points(
    done: tuple[SweepResult, SweepRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, chosen = done
    for name in ("compress_loaded_", "score", "process_memory"):
        monkeypatch.setattr(measuring, name, None)
    monkeypatch.setattr(sweeping, "bench", None)
    told = Record()
    again = sweep(chosen, on_point=told)
    assert told.measured == told.failed == []
    pd.testing.assert_frame_equal(again.frame, result.frame)


def test_a_sweep_is_the_same_wherever_it_lies(
    done: tuple[SweepResult, SweepRecipe], tmp_path: Path
) -> None:
    result, chosen = done
    moved = tmp_path / "moved"
    shutil.copytree(chosen.output, moved)
    told = Record()
    again = sweep(chosen.model_copy(update={"output": str(moved)}), on_point=told)
    assert told.measured == []
    assert again.frame["id"].tolist() == result.frame["id"].tolist()


def test_another_device_measures_other_points(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = load(checkpoints["chronos-bolt"])
    here = original_digest(original)
    monkeypatch.setattr(sweep_points, "hardware", lambda device: ["cuda", "a GPU"])
    assert original_digest(original) != here


def test_a_sweep_grows(
    done: tuple[SweepResult, SweepRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, chosen = done
    grown = chosen.model_copy(
        update={"grid": (*chosen.grid, Grid(rank=(2,))), "bench": chosen.bench}
    )
    with pytest.raises(OutputExistsError, match="holds the sweep of another recipe"):
        sweep(grown)
    told = Record()
    larger = sweep(grown, force=True, on_point=told)
    assert told.measured == ["fold, d_kv 2"]
    assert larger.frame["id"][:5].tolist() == result.frame["id"].tolist()
    assert larger.bench is not None
    assert len(larger.bench.models) == 5  # the shapes that were there take their turns again
    sweep(chosen, force=True)


def test_other_outputs_are_left_alone(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputExistsError, match="exists already"):
            sweep(recipe(checkpoints["chronos-bolt"], tmp_path), force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_figure_names_the_points_on_a_front() -> None:
    columns: dict[str, Any] = {
        "number": [0, 1, 2], "label": ["original", "fold, d_kv 8", "fold, d_kv 1"],
        "method": ["original", "fold", "fold"], "recovered": [False] * 3,
        "latency_ms": [2.0, 1.0, 1.5], "bytes_on_disk": [4, 2, 3], "peak_memory_bytes": [4, 2, 3],
        "WQL_ratio": [1.0, 1.01, 1.5], "MASE_ratio": [1.0, 1.01, 1.5],
    }  # fmt: skip
    fronts = [f"front_{cost}_{metric}" for cost in COSTS for metric in ("WQL", "MASE")]
    frame = pd.DataFrame(columns | {name: [True, True, False] for name in fronts})
    texts = [text.get_text() for one in sweep_figure(frame, "m").legends for text in one.texts]
    assert "1  fold, d_kv 8" in texts
    assert not any("d_kv 1" in text for text in texts)


def test_the_figure_cuts_no_dot_off_and_numbers_each_named_point_apart() -> None:
    columns: dict[str, Any] = {
        "number": range(4), "label": ["original", "a", "b", "c"],
        "method": ["original", *["fold"] * 3], "recovered": [False] * 4,
        "latency_ms": [1.0, 1.3, 1.29, 0.5], "bytes_on_disk": [4, 2, 2, 1],
        "peak_memory_bytes": [4, 2, 2, 1],
        "WQL_ratio": [1.0, 1.2, 1.2, 1.5], "MASE_ratio": [1.0, 1.2, 1.2, 1.5],
    }  # fmt: skip
    fronts = {
        f"front_{cost}_{metric}": [True, *[cost != "latency_ms"] * 3]
        for cost in COSTS
        for metric in ("WQL", "MASE")
    }
    figure = sweep_figure(pd.DataFrame(columns | fronts), "m")
    for axes in figure.axes:
        dots = [x for line in axes.lines if line.get_marker() != "None" for x in line.get_xdata()]
        assert max(dots) < axes.get_xlim()[1]
        numbers = {text.get_text(): text.xy for text in axes.texts}
        assert sorted(numbers) == ["1", "2", "3"]
        assert len(set(numbers.values())) == 3


# --- stops and failures ---------------------------------------------------------------------------

QUICK: dict[str, Any] = {"bench": None, "keep": "none"}
TWO_POINTS: list[dict[str, Any]] = [{"rank": [4]}, {"method": "svd", "rank": [3]}]


def test_stopped_sweep_resumes(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [{"rank": [4], "ff_ratio": [None, 0.5]}, {"method": "svd", "rank": [3]}]
    chosen = recipe(checkpoints["chronos-bolt"], tmp_path / "out", grid=grid, **QUICK)
    real = measuring.save
    saved: list[Path] = []

    def stop_at_second(compressed: Any, path: Path, **options: Any) -> Path:
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        return real(compressed, path, **options)

    monkeypatch.setattr(measuring, "save", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        sweep(chosen)
    assert len(list((tmp_path / "out" / "points").iterdir())) == 1  # nothing half-written
    told = Record()
    resumed = sweep(chosen, on_point=told)
    assert len(told.measured) == 2
    assert len(resumed.frame) == 4
    whole = sweep(chosen.model_copy(update={"output": str(tmp_path / "whole")}))
    columns = ["id", "label", "parameters", "bytes_on_disk", "WQL_ratio", "MASE_ratio"]
    pd.testing.assert_frame_equal(resumed.frame[columns], whole.frame[columns])
    assert resumed.frame["latency_ms"].isna().all()
    assert "front_latency_ms_WQL" not in resumed.frame
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def one_point(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SweepResult, SweepRecipe]:
    """A sweep of one point, which is whole after each test."""
    output = tmp_path_factory.mktemp("one-point") / "o"
    chosen = recipe(checkpoints["chronos-bolt"], output, grid=[{"rank": [4]}], **QUICK)
    return sweep(chosen), chosen


def test_a_damaged_point_is_measured_again(one_point: tuple[SweepResult, SweepRecipe]) -> None:
    first, chosen = one_point
    output, identity = Path(chosen.output), first.frame["id"][1]
    path = output / "points" / identity / "point.json"
    text = path.read_text()
    stored = json.loads(text)
    another_figure = {**stored, "result": {**stored["result"], "fit_seconds": 0.0}}
    damaged = ("", "{", "[]", '{"id": "other"}', text[:200], json.dumps(stored["result"]),
               json.dumps(another_figure))  # fmt: skip
    assert measuring.finished(output, identity) is not None
    found = []
    for content in damaged:
        path.write_text(content)
        found.append(measuring.finished(output, identity))
    told = Record()
    again = sweep(chosen, on_point=told)
    assert found == [None] * len(damaged)
    assert told.measured == ["fold, d_kv 4"]
    assert again.frame["WQL_ratio"].tolist() == first.frame["WQL_ratio"].tolist()


def test_a_point_that_fails_does_not_stop_the_others(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(checkpoints["chronos-bolt"], tmp_path / "o", grid=TWO_POINTS, **QUICK)
    real = measuring.compress_loaded_

    def fail(loaded: Any, one: Any, **options: Any) -> Any:
        if one.method == "svd":
            raise FactorizationError("layer 3 does not converge")
        return real(loaded, one, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "compress_loaded_", fail)
        told = Record()
        result = sweep(chosen, on_point=told)
        assert result.failures == {"svd, rank 3": "layer 3 does not converge"}
        assert told.failed == ["svd, rank 3: layer 3 does not converge"]
        assert len(result.frame) == 2
        only = chosen.model_copy(update={"grid": chosen.grid[1:], "output": str(tmp_path / "only")})
        with pytest.raises(TscompressError, match="none of 1 points could be measured; svd"):
            sweep(only)
    assert len(sweep(chosen).frame) == 3  # tried again


def test_a_sweep_keeps_others_out_of_its_points(
    checkpoints: dict[str, Path], tmp_path: Path, forbid: Forbid
) -> None:
    output = tmp_path / "out"
    forbid("tscompress.workflows.sweep.load")
    with (
        claimed_elsewhere([output / "sweep.yaml"]),
        pytest.raises(OutputExistsError, match="another process writes"),
    ):
        sweep(recipe(checkpoints["chronos-bolt"], output, **QUICK))


def test_weights_that_an_earlier_sweep_removed_are_named(
    one_point: tuple[SweepResult, SweepRecipe], command: Command, tmp_path: Path
) -> None:
    result, chosen = one_point
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings(chosen.model, chosen.output, grid=[{"rank": [4]}],
                                            bench=None, keep="all")))  # fmt: skip
    outcome = command("sweep", path, "--force")
    assert outcome.code == 0, outcome.err
    assert f"points/{result.frame['id'][1]}" in outcome.err
    assert "removed weights that this one would keep, of 1 points" in outcome.err
    assert sweep(chosen, force=True).gone == ()


def test_a_killed_process_is_said_to_be_one(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        """Whose only process is killed while it measures."""

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, *_: object) -> Future[Measured]:
            future: Future[Measured] = Future()
            future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
            return future

    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", Pool)
    with pytest.raises(TscompressError, match=r"a process was killed.*fewer --processes"):
        sweep(recipe(checkpoints["chronos-bolt"], tmp_path / "out", **QUICK), processes=2)


# --- processes and the command --------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_measured(
    checkpoints: dict[str, Path], tmp_path: Path, memory_of_a_process: list[Path]
) -> None:
    frame = sweep(recipe(checkpoints["chronos-bolt"], tmp_path / "o", grid=[{"rank": [4]}])).frame
    assert (frame["peak_memory_bytes"] > frame["bytes_on_disk"]).all()
    assert len(memory_of_a_process) == len(frame)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    alone = recipe(checkpoints["chronos-bolt"], tmp_path / "one", **QUICK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = sweep(alone)
        told = Record()
        both = sweep(
            alone.model_copy(update={"output": str(tmp_path / "two")}), processes=2, on_point=told
        )
    finally:
        torch.set_num_threads(threads)
    assert sorted(told.measured) == sorted(one.frame["label"][1:])
    columns = ["id", "label", "parameters", "bytes_on_disk", "WQL_ratio", "MASE_ratio"]
    pd.testing.assert_frame_equal(both.frame[columns], one.frame[columns])


@pytest.mark.slow
def test_ctrl_c_with_processes_leaves_whole_points(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "sweep.yaml"
    many = settings(checkpoints["chronos-bolt"], tmp_path / "out", **QUICK)
    many["grid"] = [{"rank": [1, 2, 3, 4, 5, 6], "ff_ratio": [0.8, 0.5]}]
    path.write_text(yaml.safe_dump(many))
    command = [str(Path(sys.executable).with_name("tscompress")), "sweep", str(path)]
    process = subprocess.Popen(
        [*command, "--processes", "2"], stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("1/12")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    time.sleep(0.5)
    points = [p for p in (tmp_path / "out" / "points").iterdir() if not p.name.startswith("orig")]
    finished = [p for p in points if (p / "point.json").is_file()]
    assert 1 <= len(finished) < 12
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(finished) + 1}/12" in done.stderr


@pytest.mark.usefixtures("drawn_figures")
def test_the_command(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    content = settings(checkpoints["chronos-bolt"], "unused", bench=None, grid=TWO_POINTS)
    path.write_text(yaml.safe_dump(content))
    command = ["sweep", str(path), "--output", str(tmp_path / "out"), "--max-series", "3"]
    shown = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert "2 points, ratios to the original" in " ".join(shown.stdout.split())
    assert str(tmp_path / "out" / "sweep.png") in shown.stdout
    assert "2/2  svd, rank 3" in shown.stderr
    again = CliRunner().invoke(cli.app, [*command, "--json"], catch_exceptions=False)
    told = json.loads(again.stdout)
    assert [point["number"] for point in told["points"]] == [0, 1, 2]
    assert told["failures"] == {}
    assert again.stderr == ""  # nothing was measured again


def test_a_grid_is_counted_before_it_is_built(forbid: Forbid) -> None:
    forbid("tscompress.workflows.sweep_points.Grid.combinations")
    many = [{"rank": list(range(2, 102)), "latent": list(range(2, 102)), "ff_ratio": [0.5, 0.25]}]
    with pytest.raises(RecipeError, match="20,000"):
        points_of(recipe(grid=many))


def test_common_errors_of_points_are_refused_first(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model, output = checkpoints["chronos-bolt"], tmp_path / "out"
    for changes, match in (
        ({"bench": {"context_length": 10**6}}, "context_length"),
        ({"evaluation": {"datasets": ["nothing"]}}, "nothing"),
        ({"evaluation": {"cross_learning": True}}, "alone"),
        ({"calibration": {"source": "gone.csv"}}, "gone.csv"),
        (
            {"grid": [{"rank": [4], "recover_steps": [1]}], "recover": {"series": ["gone.csv"]}},
            "gone.csv",
        ),
        (
            {
                "grid": [{"rank": [2]}, {"rank": [4], "recover_steps": [1]}],
                "recover": {"accumulate": 5},
            },
            "grid: fold, d_kv 4, 1 steps: a batch of .* does not divide",
        ),
        ({"fold": {"frequencies": "free"}}, "grid: fold, d_kv 4: frequencies: free"),
    ):
        with pytest.raises(TscompressError, match=match):
            sweep(recipe(model, output, **changes))
        assert not output.exists()  # and hinders no mended recipe


@pytest.mark.parametrize("fitted", ["calibration", "recover"])
def test_files_are_read_and_held_against_what_is_scored_before_the_first_point(
    checkpoints: dict[str, Path], tmp_path: Path, forbid: Forbid, fitted: str
) -> None:
    forbid("tscompress.workflows.measure_point.compress_loaded_")
    table, said = tmp_path / "shops.csv", []
    days = pd.date_range("2024-01-01", periods=90)
    values = np.random.default_rng(0).normal(50, 9, 90)
    pd.DataFrame({"date": days, "y": values}).to_csv(table, index=False)
    learns = {
        "calibration": {"calibration": {"source": str(table), "context_length": 32}},
        "recover": {
            "recover": {"series": [str(table)]},
            "grid": [{"rank": [4], "recover_steps": [0, 1]}],
        },
    }[fitted]
    scored = {"suite": str(table), "long_format": {"horizon": 8}}
    asked = recipe(checkpoints["chronos-bolt"], tmp_path / "out", evaluation=scored, **learns)
    with pytest.raises(LeakError):
        sweep(asked, on_series=said.append)
    assert [summary.series for summary in said if summary is not None] == [1]  # each file once
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("grid", "label"),
    [
        ({"rank": [4, 1000]}, "fold, d_kv 1000"),
        ({"rank": [8, 4]}, "fold, d_kv 8"),  # as it is
        ({"rank": [4], "width": [None, 10**6]}, "fold, d_kv 4, d_model 1000000"),
        ({"rank": [4], "recover_steps": [0, 2], "width": [48]}, "fold, d_kv 4, d_model 48"),
        ({"ff_ratio": [0.5], "latent": [None, 10**6]}, "fold, d_ff 50%, latent 1000000"),
        ({"layers": [[1], [3]]}, "fold, layers 3"),
        ({"rank": [4], "layers": [[1, 1, 1]]}, "fold, d_kv 4, layers 1, 1, 1"),
        ({"schedule": [[1000, 0.1]]}, "fold, schedule 1000.0, 0.1"),
        ({"method": "svd", "rank": [3, 1000]}, "svd, rank 1000"),
        ({"method": "activation-svd", "rank": [3, 1000]}, "activation-svd, rank 1000"),
    ],
)
def test_a_point_of_sizes_that_the_model_cannot_have_is_refused_first(
    checkpoints: dict[str, Path], tmp_path: Path, forbid: Forbid, grid: dict[str, Any], label: str
) -> None:
    forbid("tscompress.workflows.measure_point.compress_loaded_")
    output = tmp_path / "out"
    with pytest.raises(TscompressError) as refused:
        sweep(recipe(checkpoints["chronos-bolt"], output, grid=[grid]))
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(f"grid: {label}: ")
    assert "\n" not in str(refused.value)
    assert not output.exists()
