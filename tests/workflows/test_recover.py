"""Recoveries beside their outputs: one process at a time trains there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from other_process import claimed_elsewhere
from safetensors.torch import load_file
from shared_fixtures import Command, assert_refused

from tscompress.api import compress, recover
from tscompress.data.reading.format import GivenSeries
from tscompress.errors import OutputExistsError
from tscompress.hub.card import make_card
from tscompress.hub.origin import read_checkpoint_record
from tscompress.io.making_way import claimed, journal_of
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows import compress as compressing
from tscompress.workflows import unfinished
from tscompress.workflows.compress import compress_checkpoint
from tscompress.workflows.recipe import Recipe, load_recipe
from tscompress.workflows.recover import recover_checkpoint
from tscompress.workflows.run import WORK, run
from tscompress.workflows.save import save
from tscompress.workflows.unfinished import recovery_directory

RECOVER: dict[str, Any] = {
    "steps": 2, "precision": "no", "held_out_series": 4, "warmup_steps": 1, "evaluate_every": 2,
    "checkpoint_steps": 1, "real_series": ["aus_production"],
    "buckets": [{"context_length": 16, "horizon": 8, "batch_size": 2}],
}  # fmt: skip


@pytest.fixture(scope="module")
def student(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = compress(checkpoints["chronos-bolt"], method="svd", rank=4)
    return save(small, tmp_path_factory.mktemp("recover") / "student")


def recipe_of(teacher: Path, output: Path, **changes: Any) -> Recipe:
    given = {
        "method": "svd",
        "schedule": {"kind": "rank", "rank": 2},
        "recover": RECOVER,
        "profile": None,
    }
    given |= {"model": str(teacher), "output": str(output)}
    return Recipe.model_validate(given | changes)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("options", [[], ["--force"], ["--resume"], ["--force", "--resume"]])
def test_where_another_process_trains_nothing_is_read_or_written(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    student: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    options: list[str],
) -> None:
    output, teacher = tmp_path / "small", checkpoints["chronos-bolt"]
    work = recovery_directory(output)
    monkeypatch.setattr("tscompress.workflows.recover.load", lambda *_, **__: pytest.fail("loaded"))
    with claimed_elsewhere([work]):
        (work / "checkpoint").mkdir(parents=True)
        (work / "checkpoint" / "state.safetensors").write_bytes(b"theirs")
        outcome = command(
            "recover", student, "--teacher", teacher, "--output", output, "--steps", 2, *options
        )
        assert_refused(outcome, 2, f"another process writes to '{work}'")
        assert (work / "checkpoint" / "state.safetensors").read_bytes() == b"theirs"
    assert names(tmp_path) == ["small.recovery"]


def test_where_another_process_trains_no_recipe_is_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = recipe_of(checkpoints["chronos-bolt"], tmp_path / "out")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(recipe.model_dump_json(exclude_unset=True))))
    monkeypatch.setattr(
        "tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("a model was loaded")
    )
    compressed = ["compress", recipe.model, "--recipe", path, "--output", tmp_path / "out"]
    ran = ["run", path, "--output", tmp_path / "out"]
    for arguments, work in (
        (compressed, recovery_directory(tmp_path / "out")),
        (ran, tmp_path / "out" / WORK),
    ):
        with claimed_elsewhere([work]):
            outcome = command(*arguments, "--force")
            assert_refused(outcome, 2, f"another process writes to '{work}'")


def test_a_recovery_names_the_original_of_a_student_without_a_recipe(
    student: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    pulled = Path(copytree(student, tmp_path / "pulled"))
    (pulled / "recipe.yaml").unlink()  # as it is in a cache of the Hub
    teacher, config = str(checkpoints["chronos-bolt"]), RecoveryConfig.model_validate(RECOVER)
    for once, again in (("pulled", "once"), ("once", "twice")):
        recover_checkpoint(str(tmp_path / once), teacher, tmp_path / again, config)
        record = json.loads((tmp_path / again / "provenance.json").read_text())
        assert record["source"]["model"] == str(tmp_path / once)
        assert record["original"] == json.loads((student / "provenance.json").read_text())["source"]
        base = read_checkpoint_record(tmp_path / again).base
        assert base is not None
        assert base.source == teacher


def test_the_recipe_of_a_recovery_replays_it(
    student: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """It reads files in its own way, and comes after another one."""
    file, teacher = tmp_path / "c.csv", str(checkpoints["chronos-bolt"])
    days = [f"2024-01-{day:02d}" for day in range(1, 31)]
    file.write_text("item_id,timestamp,target\n" + "".join(f"a,{day},{day[-1]}\n" for day in days))
    config = RecoveryConfig.model_validate({**RECOVER, "series": [str(file)]})
    recover_checkpoint(str(student), teacher, tmp_path / "once", config)
    config = RecoveryConfig.model_validate(RECOVER)
    recover_checkpoint(str(tmp_path / "once"), teacher, tmp_path / "twice", config)
    recover_checkpoint(str(tmp_path / "twice"), teacher, tmp_path / "thrice", config)
    recipe = load_recipe(tmp_path / "once" / "recipe.yaml")
    assert recipe.recover is not None
    assert recipe.recover.series_format == GivenSeries()
    records = [
        json.loads((tmp_path / name / "provenance.json").read_text())
        for name in ("once", "twice", "thrice")
    ]
    earlier = [record["recovery"] for record in records]
    assert "earlier_recoveries" not in records[0]
    assert records[1]["earlier_recoveries"] == earlier[:1]
    assert records[2]["earlier_recoveries"] == earlier[:2]
    text = make_card(tmp_path / "thrice").text
    assert "distilled from the original, 3 times; the recipe has the last;" in text
    assert "distilled from the original; `prov" in make_card(tmp_path / "once").text
    recover_checkpoint(str(tmp_path / "once"), str(student), tmp_path / "other", config)
    assert (
        "distilled from `student`, where the recipe takes the original, 2 times"
        in make_card(tmp_path / "other").text
    )


@pytest.mark.parametrize("method", ["svd", "fold"])
def test_a_recovery_on_arrays_is_not_what_its_recipe_replays(
    checkpoints: dict[str, Path], tmp_path: Path, method: str
) -> None:
    model, config = checkpoints["chronos-bolt"], RecoveryConfig.model_validate(RECOVER)
    series = [*np.random.default_rng(0).normal(size=(8, 60))]
    given = {"series": series} if method == "svd" else {}  # beside a method that reads none
    small = compress(model, method=method, rank=4, recover=config if given else None, **given)
    if not given:
        small = recover(save(small, tmp_path / "small"), model, config, series=series)
    again = recover(small, model, config)
    for name, done, is_so in (("once", small, True), ("twice", again, False)):
        save(done, tmp_path / name)
        said = (
            "Recovered on more series than it names"
            in (tmp_path / name / "recipe.yaml").read_text()
        )
        assert said == is_so
        text = make_card(tmp_path / name).text
        assert ("recovered on more series than the recipe names" in text) == is_so
    assert "distilled from the original, 2 times" in make_card(tmp_path / "twice").text


def test_what_was_recovered_before_there_was_a_record_of_it_keeps_its_original(
    student: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its record has its student as the source, or is gone; the recipe names the original."""
    teacher, config = str(checkpoints["chronos-bolt"]), RecoveryConfig.model_validate(RECOVER)
    commit = "a" * 40
    old = Path(copytree(student, tmp_path / "old"))
    recipe = old / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("revision: null", f"revision: {commit}"))
    record = json.loads((old / "provenance.json").read_text())
    record["source"]["model"], record["recovery"] = "/gone/student", {"steps": 1}
    for output, content in (("first", json.dumps(record)), ("second", "{}")):
        (old / "provenance.json").write_text(content)
        recover_checkpoint(str(old), teacher, tmp_path / output, config)
        written = json.loads((tmp_path / output / "provenance.json").read_text())
        assert (written["original"]["model"], written["original"]["revision"]) == (teacher, commit)
        assert load_recipe(tmp_path / output / "recipe.yaml").revision == commit


def test_a_recipe_names_the_file_that_its_recovery_was_given(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    file, columns = tmp_path / "c.csv", {"id_column": "shop", "time_column": "day"}
    days = [f"2024-01-{day:02d}" for day in range(1, 31)]
    file.write_text("shop,day,sold\n" + "".join(f"a,{day},{day[-1]}\n" for day in days))
    recipe = recipe_of(checkpoints["chronos-bolt"], tmp_path / "small", series=columns)
    compress_checkpoint(recipe, series=str(file))
    saved = load_recipe(tmp_path / "small" / "recipe.yaml")
    assert saved.recover is not None
    assert saved.recover.series == (str(file),)
    assert saved.recover.series_format == GivenSeries.model_validate(columns)
    compress_checkpoint(saved.model_copy(update={"output": str(tmp_path / "again")}))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("small", "again")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_recovery_records_the_commit_of_its_student(
    student: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, commit = tmp_path / "cache" / ("b" * 40), "a" * 40
    copytree(student, snapshot)
    for name in ("recipe.yaml", "provenance.json"):  # its original is of the Hub, too
        text = (snapshot / name).read_text().replace(str(checkpoints["chronos-bolt"]), "me/large")
        text = text.replace('"revision": null', f'"revision": "{commit}"')
        (snapshot / name).write_text(text.replace("revision: null", f"revision: {commit}"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    teacher, config = str(checkpoints["chronos-bolt"]), RecoveryConfig.model_validate(RECOVER)
    recover_checkpoint("me/small", teacher, tmp_path / "out", config)
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert (record["source"]["model"], record["source"]["revision"]) == ("me/small", "b" * 40)
    assert (record["original"]["model"], record["original"]["revision"]) == ("me/large", commit)
    base = read_checkpoint_record(tmp_path / "out").base
    assert base is not None
    assert (base.hub_id, base.revision) == ("me/large", commit)


@pytest.mark.parametrize("there", [False, True])
def test_where_another_process_writes_nothing_is_read_or_written(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    student: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    there: bool,
) -> None:
    teacher, output = checkpoints["chronos-bolt"], tmp_path / "small"
    if there:
        copytree(student, output)
    monkeypatch.setattr(
        "tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("a model was loaded")
    )
    for arguments in (
        ["compress", teacher, "--method", "svd", "--rank", 2],
        ["recover", student, "--teacher", teacher],
    ):
        with claimed_elsewhere([output]):
            outcome = command(*arguments, "--output", output, "--force")
            assert_refused(outcome, 2, f"another process writes to '{output}'; wait for its end")
    assert names(tmp_path) == (["small"] if there else [])


def test_a_compression_keeps_others_out_until_its_result_is_saved(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "outputs" / "small"
    steps: list[str] = []

    def looking(function: Callable[..., Any], step: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            steps.append(step)
            with pytest.raises(OutputExistsError, match=r"another process .*small"):
                claimed([output]).__enter__()
            return function(*given, **options)

        return call

    for name in ("compress_loaded_", "save"):
        monkeypatch.setattr(compressing, name, looking(getattr(compressing, name), name))
    compress_checkpoint(recipe_of(checkpoints["chronos-bolt"], output, recover=None))
    assert steps == ["compress_loaded_", "save"]
    assert names(output.parent) == ["small"]


@pytest.mark.parametrize("verb", ["recover", "compress", "run"])
def test_a_recovery_keeps_others_out_until_its_result_is_saved(
    monkeypatch: pytest.MonkeyPatch,
    student: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    verb: str,
) -> None:
    teacher, output = checkpoints["chronos-bolt"], tmp_path / "outputs" / "small"
    work = output / WORK if verb == "run" else recovery_directory(output)
    steps: list[str] = []

    def look(step: str) -> None:
        steps.append(step)
        with pytest.raises(OutputExistsError, match=f"another process .*{work.name}"):
            claimed([work]).__enter__()

    def looking(function: Callable[..., None], step: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            look(step)
            function(*given)

        return call

    for module in ("recover", "compress", "run"):
        name = f"tscompress.workflows.{module}.finish_recovery"
        monkeypatch.setattr(name, looking(unfinished.finish_recovery, "finish"))
    if verb == "recover":
        config = RecoveryConfig.model_validate(RECOVER)
        recover_checkpoint(
            str(student), str(teacher), output, config, report=lambda _: look("train")
        )
    else:
        call = compress_checkpoint if verb == "compress" else run
        call(
            recipe_of(teacher, output, evaluation=None, bench=None),
            on_progress=lambda stage, *_: look("train") if stage == "recover" else None,
        )
    assert set(steps) == {"train", "finish"}
    assert not work.exists()
    assert not journal_of(work).exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_recovery_that_ends_while_another_loads_is_not_replaced(
    student: Path, checkpoints: dict[str, Path], tmp_path: Path, stopped: bool
) -> None:
    teacher, config = str(checkpoints["chronos-bolt"]), RecoveryConfig.model_validate(RECOVER)
    output = tmp_path / "small"
    state = recovery_directory(output) / "checkpoint" / "state.safetensors"

    def end(needed: object, processes: int) -> None:
        """What another process does meanwhile."""
        if stopped:
            state.parent.mkdir(parents=True)
            state.touch()
        else:
            recover_checkpoint(str(student), teacher, output, config)

    with pytest.raises(
        OutputExistsError, match="holds the state of a recovery" if stopped else "small' exists"
    ):
        recover_checkpoint(
            str(student), teacher, output, config, on_memory=end,
            report=lambda _: pytest.fail("it trained"),
        )  # fmt: skip
    assert state.exists() if stopped else output.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_of_a_killed_recovery_is_free(
    command: Command, student: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    output, config = tmp_path / "small", tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(RECOVER))
    work = recovery_directory(output)
    child = os.fork()
    if child == 0:  # pragma: no cover
        with claimed([work]):
            os._exit(0)  # nothing is cleaned up, as after a kill
    os.waitpid(child, 0)
    assert journal_of(work).exists()
    outcome = command(
        "recover", student, "--teacher", checkpoints["chronos-bolt"], "--output", output,
        "--config", config,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert names(tmp_path) == ["config.yaml", "small"]
