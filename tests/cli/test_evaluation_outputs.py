"""Outputs of ``evaluate`` and ``compare``: one process at a time writes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from other_process import claimed_elsewhere
from shared_fixtures import Command, assert_refused

from tscompress.errors import OutputExistsError
from tscompress.io.files import new_directory
from tscompress.io.making_way import claimed
from tscompress.workflows import evaluate_models as workflow

DATA = ("--dataset", "monash_m1_yearly", "--max-series", 2, "--no-cache")
FEV = """
tasks:
  - dataset_path: monash_m1_yearly.parquet
    horizon: 2
"""


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", ["scores", "scores.json"])
@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_where_another_process_writes_no_model_is_loaded(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    verb: str,
    name: str,
    there: bool,
) -> None:
    output, bolt = tmp_path / name, checkpoints["chronos-bolt"]
    against = [bolt] if verb == "compare" else []
    arguments = [verb, bolt, *against, *DATA, "--output", output]
    if there:
        assert command(*arguments).code == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(
        "tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("a model was loaded")
    )
    with claimed_elsewhere([output]):
        outcome = command(*arguments, *(["--force"] if there else []))
        assert_refused(outcome, 2, f"another process writes to '{output}'; wait for its end")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_where_another_process_writes_no_task_of_fev_is_read(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("fev")
    (tmp_path / "tasks.yaml").write_text(FEV)
    monkeypatch.setattr(
        "tscompress.evaluation.fev_tasks.load_tasks", lambda *_: pytest.fail("tasks were read")
    )
    output = tmp_path / "summaries.csv"
    with claimed_elsewhere([output]):
        outcome = command(
            "evaluate", "seasonal-naive", "--suite", f"fev:{tmp_path / 'tasks.yaml'}",
            "--output", output,
        )  # fmt: skip
        assert_refused(outcome, 2, f"another process writes to '{output}'")


@pytest.mark.parametrize("name", ["scores", "scores.json"])
def test_an_evaluation_keeps_others_out_until_its_scores_are_saved(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    output, steps = tmp_path / "outputs" / name, list[str]()

    def looking(function: Callable[..., Any], step: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            steps.append(step)
            with pytest.raises(OutputExistsError):
                claimed([output]).__enter__()
            return function(*given, **options)

        return call

    for step in ("evaluate_models", "save_evaluation"):
        monkeypatch.setattr(workflow, step, looking(getattr(workflow, step), step))
    outcome = command("evaluate", "seasonal-naive", *DATA, "--output", output)
    assert outcome.code == 0, outcome.err
    assert steps == ["evaluate_models", "save_evaluation"]
    assert [path.name for path in output.parent.iterdir()] == [name]
    with claimed([output]):  # free again
        pass


def test_no_file_of_an_earlier_evaluation_stays_beside_those_of_another(
    command: Command, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    bolt, output = checkpoints["chronos-bolt"], tmp_path / "scores"
    both = command("evaluate", bolt, "--against", "seasonal-naive", *DATA, "--output", output)
    assert both.code == 0, both.err
    assert (output / "scores-against.csv").exists()
    layout = command("evaluate", bolt, *DATA, "--gift-eval", "--output", output, "--force")
    assert layout.code == 0, layout.err
    assert (output / "all_results.csv").exists()
    (output / "notes.txt").write_text("mine")
    (output / "config.json").write_text('{"mine": 1}')
    alone = command("evaluate", bolt, *DATA, "--output", output, "--force")
    assert alone.code == 0, alone.err
    files = {"scores.json", "scores.csv", "agg-rel-scores.csv", "notes.txt", "config.json"}
    assert {path.name for path in output.iterdir()} == files


def test_outputs_beside_other_files_are_claimed(tmp_path: Path) -> None:
    output = tmp_path / "scores"
    with new_directory(output, writes=["log"]) as directory:
        with pytest.raises(OutputExistsError):
            claimed([output]).__enter__()
        (directory / "log").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["scores"]
