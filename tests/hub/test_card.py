"""The model card: what it says, where it gets it from, and whose card it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hub_server import card_problems
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from shared_fixtures import COMPRESSIONS, FAMILIES, tiny_recipe

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.errors import (
    CorruptCheckpointError,
    DataError,
    OutputError,
    OutputExistsError,
    UsageError,
    VerificationError,
)
from tscompress.evaluation.results import (
    DatasetScore,
    EvaluationResult,
    SeriesContributions,
    Settings,
)
from tscompress.hub.card import card_by_hand, card_of, licence_of, make_card, write_card
from tscompress.hub.card_scores import (
    CardScores,
    about_measurements,
    bench_of_run,
    read_bench,
    read_scores,
    scores_of_run,
)
from tscompress.hub.origin import read_checkpoint_record, without_paths
from tscompress.io.hashing import sha256_of
from tscompress.io.own_outputs import is_marked
from tscompress.plan.schedules import RankSchedule
from tscompress.reports.write import write_report
from tscompress.training.pretraining import pretrain
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows.recipe import EvaluationConfig, Recipe
from tscompress.workflows.run import run

CALIBRATION = CalibrationConfig(source="synthetic", num_series=4, context_length=32, batch_size=4)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def original(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a card of its own."""
    target = tmp_path_factory.mktemp("original") / "chronos-bolt"
    shutil.copytree(checkpoints["chronos-bolt"], target)
    (target / "README.md").write_text("---\nlicense: apache-2.0\n---\n# original\n")
    return target


@pytest.fixture(scope="module")
def saved(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    fold = tscompress.compress(original, rank=4, calibration=CALIBRATION)
    svd = tscompress.compress(original, method="svd", rank=3)
    return {
        "fold": tscompress.save(fold, root / "chronos-bolt-fold"),
        "svd": tscompress.save(svd, root / "chronos-bolt-svd"),
    }


@pytest.fixture
def fold(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["fold"], tmp_path / "chronos-bolt-fold"))


def result(model: str, factor: float, *, series: bool = True) -> EvaluationResult:
    """Scores on two datasets of 20 series that differ a little."""
    rows = []
    for dataset in ("monash_m1_yearly", "monash_m3_yearly"):
        loss = tuple(factor * (1 + 0.1 * (i % 3)) for i in range(20))
        columns = SeriesContributions(
            quantile_loss=loss, absolute_label=(10.0,) * 20, scaled_error=loss,
            scaled_steps=(6,) * 20,
        )  # fmt: skip
        rows.append(
            DatasetScore(
                dataset=dataset,
                model=model,
                MASE=columns.score("MASE"),
                WQL=columns.score("WQL"),
                series_count=20,
                seconds=1.0,
                series=columns if series else None,
            )
        )
    return EvaluationResult(suite="offline", model=model, rows=tuple(rows))


def metadata(card: ModelCard) -> dict[str, Any]:
    assert card_problems(str(card)) == ([], [])
    (front,) = re.findall(r"\A---\n(.*?)\n---\n", str(card), flags=re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def edit_provenance(directory: Path, **source: object) -> None:
    path = directory / "provenance.json"
    content = json.loads(path.read_text())
    content["source"].update(source)
    path.write_text(json.dumps(content))


def edit_recipe(directory: Path, **changes: object) -> None:
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


# --------------------------------------------------------------------------------------------------
# What it says
# --------------------------------------------------------------------------------------------------


def test_every_card_has_sizes_loading_and_limits(saved: dict[str, Path], original: Path) -> None:
    card = make_card(saved["fold"], "me/chronos-bolt-fold")
    data = metadata(card)
    assert data["library_name"] == "chronos-forecasting"
    assert data["pipeline_tag"] == "time-series-forecasting"
    assert {"chronos-bolt", "fold", "tscompress"} <= set(data["tags"])
    # A directory is no model on the Hub, but its card says under which licence it is.
    assert "base_model" not in data
    assert data["license"] == "apache-2.0"
    text = card.text
    made = read_checkpoint_record(saved["fold"])
    stored = load_file(saved["fold"] / "model.safetensors")
    assert made.parameters == sum(tensor.numel() for tensor in stored.values())
    assert f"{made.parameters:,} parameters" in text
    assert made.plan.summary() in text
    assert 'from_pretrained("me/chronos-bolt-fold")' in text
    assert "import tscompress" not in text
    assert "Not measured for this card" in text
    # Paths of this machine stay out of the recipe that is shown.
    assert f"output: {saved['fold'].name}\n" in text
    assert "model: chronos-bolt\n" in text
    assert str(saved["fold"].parent) not in text
    assert str(original.parent) not in text
    assert "Latencies hold" not in text
    assert "{" not in text.replace("{}", "")


@pytest.mark.parametrize(
    ("given", "known"),
    [("[apache-2.0]", "apache-2.0"), ("[mit, apache-2.0]", None), ("{a: b}", None), ("3", None)],
)
def test_a_licence_is_one_text(
    given: str, known: str | None, fold: Path, original: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(original, base)
    (base / "README.md").write_text(f"---\nlicense: {given}\n---\n# original\n")
    edit_provenance(fold, model=str(base))
    edit_recipe(fold, model=str(base))
    assert metadata(make_card(fold)).get("license") == known


def test_another_programs_report_is_no_measurement(fold: Path) -> None:
    for text in ("[]", "no JSON", '{"plan": 1}'):
        (fold.parent / "report.json").write_text(text)
        assert "Not measured for this card" in make_card(fold).text


def test_card_of_a_factored_checkpoint_names_the_import(saved: dict[str, Path]) -> None:
    card = make_card(saved["svd"])
    assert metadata(card)["library_name"] == "tscompress"
    assert "import tscompress.pipelines\n" in card.text
    assert 'from_pretrained("chronos-bolt-svd")' in card.text


def test_a_model_from_the_hub_is_the_base_model(fold: Path) -> None:
    (fold / "recipe.yaml").unlink()
    edit_provenance(fold, model="amazon/chronos-bolt-tiny", revision=COMMIT)
    card = make_card(fold)
    assert metadata(card)["base_model"] == "amazon/chronos-bolt-tiny"
    assert f"at commit `{COMMIT[:12]}`" in card.text
    # Without a network its licence is not known, and that is said.
    assert "license" not in metadata(card)
    assert "Not known: the card of `amazon/chronos-bolt-tiny` could not be read" in card.text
    licence = {"license": "other", "license_name": "theirs", "license_link": "https://x.invalid"}
    given = make_card(fold, licence=licence)
    assert metadata(given).items() >= licence.items()
    assert "theirs, that of" not in given.text
    assert "\ntheirs.\n" in given.text


@pytest.mark.parametrize(
    ("model", "revision"),
    [("reference/bolt", None), ("a/b/c", COMMIT), ("small", None), ("amazon/x", "main")],
)
def test_original_off_the_hub_is_no_base_model(
    fold: Path, model: str, revision: str | None
) -> None:
    (fold / "recipe.yaml").unlink()
    edit_provenance(fold, model=model, revision=revision)
    assert "base_model" not in metadata(make_card(fold))


@pytest.mark.parametrize("model", ["m/chronos-bolt", "../client-x/chronos-bolt"])
def test_a_local_original_is_not_shown_as_if_it_were_on_the_hub(fold: Path, model: str) -> None:
    edit_recipe(fold, model=model)
    edit_provenance(fold, model=model)
    text = make_card(fold).text
    assert "`chronos-bolt`, a local model, made smaller by tscompress" in text
    assert "--against chronos-bolt`" in text
    assert "client-x" not in text
    assert "m/chronos-bolt" not in text
    assert model in read_checkpoint_record(fold).local_paths
    edit_recipe(fold, model="reference/bolt")
    edit_provenance(fold, model="reference/bolt")
    assert "`reference/bolt`, made smaller by tscompress" in make_card(fold).text


def test_paths_of_the_users_data_stay_out_of_the_card(
    original: Path, fold: Path, tmp_path: Path
) -> None:
    series = tmp_path / "clients" / "acme.csv"
    recover = RecoveryConfig(series=("./more/beta.parquet", str(series), "owner/on-hub:daily"))
    evaluation = EvaluationConfig(suite="suites/gamma.yaml", root="/data/delta")
    edit_recipe(
        fold,
        calibration=CALIBRATION.model_copy(update={"source": str(series)}).model_dump(),
        recover=recover.model_dump(mode="json"),
        evaluation=evaluation.model_dump(mode="json"),
    )
    record = json.loads((fold / "provenance.json").read_text())
    record["calibration"]["source"] = str(series)
    (fold / "provenance.json").write_text(json.dumps(record))
    text = make_card(fold).text
    for shown in ("(source: `acme.csv`)", "source: acme.csv\n", "- beta.parquet\n", "- acme.csv\n",
                  "- owner/on-hub:daily\n", "suite: gamma.yaml\n", "root: delta\n"):  # fmt: skip
        assert shown in text
    for hidden in (str(tmp_path), "clients", "more/", "suites/", "/data"):
        assert hidden not in text
    assert read_checkpoint_record(fold).local_paths == sorted(
        {str(series), "./more/beta.parquet", "suites/gamma.yaml", "/data/delta", str(original),
         read_checkpoint_record(fold).recipe.output}
    )  # fmt: skip


def test_the_model_that_an_embedding_is_from_is_shown_by_name(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    theirs = str(checkpoints["chronos-bolt"])
    made = pretrain(tiny_recipe("chronos-bolt", embedding_from=theirs), tmp_path / "run")
    assert made is not None
    text = make_card(made).text
    assert "Trained from scratch by tscompress" in text
    assert "import tscompress.pipelines" not in text  # it is dense
    assert "embedding_from: chronos-bolt\n" in text
    assert theirs not in text
    assert read_checkpoint_record(made).local_paths == [theirs]


def grown_from(start: str | Path, output: Path) -> Path:
    made = pretrain(tiny_recipe("chronos-bolt", start_from=str(start)), output)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def grown_model(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a start on this machine."""
    return grown_from(checkpoints["chronos-bolt"], tmp_path_factory.mktemp("grown") / "run")


def test_a_grown_model_names_what_it_was_grown_from(
    checkpoints: dict[str, Path], grown_model: Path
) -> None:
    theirs = str(checkpoints["chronos-bolt"])
    card = make_card(grown_model)
    assert "start_from: chronos-bolt\n" in card.text
    assert "Grown from `chronos-bolt`" in card.text
    assert "from scratch" not in card.text
    assert "None was chosen" not in card.text  # of licences: that of the start applies
    assert theirs not in card.text
    record = read_checkpoint_record(grown_model)
    assert record.local_paths == [theirs]
    assert record.pretraining is not None
    recipe = record.pretraining.model_copy(update={"start_from": "reference/bolt"})
    grown = replace(record, pretraining=recipe)
    assert licence_of(grown) == {"license": "apache-2.0"}
    assert "base_model" not in metadata(card_of(grown))


def test_the_licence_of_an_original_below_the_home_directory(
    fold: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(original.parent))
    edit_provenance(fold, model=f"~/{original.name}")
    edit_recipe(fold, model=f"~/{original.name}")
    assert licence_of(read_checkpoint_record(fold)) == {"license": "apache-2.0"}


def cached_model(checkpoint: Path, repo_id: str, cache: Path) -> None:
    """As huggingface_hub leaves a downloaded model."""
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(checkpoint, folder / "snapshots" / COMMIT)
    (folder / "snapshots" / COMMIT / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


@pytest.mark.parametrize("place", ["hub", "directory"])
def test_a_start_is_of_the_hub_only_if_it_came_from_there(
    place: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    stored = checkpoints["chronos-bolt"]
    if place == "directory":
        shutil.copytree(stored, "runs/bolt")
    else:
        cached_model(stored, "runs/bolt", tmp_path / "hub")
        snapshot = tmp_path / "hub/models--runs--bolt/snapshots" / COMMIT
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    made = grown_from("runs/bolt", tmp_path / "run")
    recorded = json.loads((made / "provenance.json").read_text())["pretraining"]
    shutil.rmtree("runs", ignore_errors=True)
    if place == "directory":  # now a stranger's model of that name is in the cache
        cached_model(stored, "runs/bolt", tmp_path / "hub")
    record = read_checkpoint_record(made)
    card = card_of(record)
    is_of_hub = place == "hub"
    assert recorded["start_revision"] == (COMMIT if is_of_hub else None)
    assert metadata(card).get("base_model") == ("runs/bolt" if is_of_hub else None)
    assert licence_of(record, fetch=True) == ({"license": "mit"} if is_of_hub else {})
    assert ("runs/bolt" in card.text) == is_of_hub
    assert f"start_from: {'runs/bolt' if is_of_hub else 'bolt'}\n" in card.text
    assert (COMMIT[:12] in card.text) == is_of_hub
    assert record.local_paths == ([] if is_of_hub else ["runs/bolt"])


def test_a_start_without_a_record_of_its_commit_is_local(grown_model: Path) -> None:
    """As earlier versions wrote it."""
    record = read_checkpoint_record(grown_model)
    assert record.pretraining is not None
    recipe = record.pretraining.model_copy(update={"start_from": "someone/else"})
    for trained in ({"start_from": "someone/else"}, {}, None):
        grown = replace(
            record, pretraining=recipe, provenance={**record.provenance, "pretraining": trained}
        )
        card = card_of(grown)
        assert "base_model" not in metadata(card)
        assert "Grown from `else`, a local model" in card.text
        assert "someone" not in card.text


def test_the_tasks_of_a_probe_are_shown_by_name() -> None:
    recipe = {"probe": {"tasks_file": "/home/me/mine.yaml"}}
    assert without_paths(recipe) == {"probe": {"tasks_file": "mine.yaml"}}


def test_the_original_is_the_one_that_both_records_name(fold: Path) -> None:
    edit_recipe(fold, model="someone/else", revision=COMMIT)
    with pytest.raises(VerificationError, match=r"recipe\.yaml .*'someone/else'"):
        make_card(fold)
    # What was recovered has the student as its source; the recipe knows the student's original.
    record = json.loads((fold / "provenance.json").read_text())
    (fold / "provenance.json").write_text(json.dumps(record | {"recovery": {"steps": 1}}))
    assert metadata(make_card(fold))["base_model"] == "someone/else"


def test_a_recipe_says_that_its_series_were_given_in_memory(
    original: Path, fold: Path, tmp_path: Path
) -> None:
    series = [np.sin(np.arange(64) / step) for step in range(2, 6)]
    small = tscompress.compress(original, rank=4, series=series)
    directory = tscompress.save(small, tmp_path / "small")
    said = "this recipe alone calibrates on others."
    first, second = (directory / "recipe.yaml").read_text().splitlines()[:2]
    assert first == f"# Calibrated on series given in memory; {said}"
    assert second == f"model: {original}"
    assert f"Its calibration series were given in memory: {said}" in make_card(directory).text
    assert said not in make_card(fold).text + (fold / "recipe.yaml").read_text()


def test_the_licence_is_that_of_the_very_weights(
    fold: Path, original: Path, tmp_path: Path
) -> None:
    assert licence_of(read_checkpoint_record(fold)) == {"license": "apache-2.0"}
    other = Path(shutil.copytree(original, tmp_path / "other"))
    (fold / "recipe.yaml").unlink()
    edit_provenance(fold, model=str(other))
    assert licence_of(read_checkpoint_record(fold)) == {"license": "apache-2.0"}
    (other / "README.md").write_text("---\n[\n---\n")
    assert licence_of(read_checkpoint_record(fold)) == {}
    (other / "README.md").write_text("---\nlicense: mit\n---\n")
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    assert licence_of(read_checkpoint_record(fold)) == {}
    edit_provenance(fold, model="reference/bolt")
    assert licence_of(read_checkpoint_record(fold)) == {"license": "apache-2.0"}


# --------------------------------------------------------------------------------------------------
# Scores and latencies
# --------------------------------------------------------------------------------------------------


def test_scores_are_metadata_and_a_table(saved: dict[str, Path], tmp_path: Path) -> None:
    ours, theirs = result("small", 1.1), result("large", 1.0)
    content = {"result": ours.to_dict(), "against": theirs.to_dict()}
    (tmp_path / "scores.json").write_text(json.dumps(content))
    scores = read_scores(tmp_path / "scores.json")
    assert scores.ratios == pytest.approx({"MASE": 1.1, "WQL": 1.1})
    for metric in ("MASE", "WQL"):
        low, high = scores.intervals[metric]
        assert low == pytest.approx(1.1)
        assert high == pytest.approx(1.1)
    card = make_card(saved["fold"], "me/small", scores=scores)
    assert make_card(saved["fold"], "me/small", scores=tmp_path / "scores.json").text == card.text
    (index,) = metadata(card)["model-index"]
    assert index["name"] == "small"
    values = {
        (one["dataset"]["name"], metric["name"]): metric["value"]
        for one in index["results"]
        for metric in one["metrics"]
    }
    expected = {
        (row.dataset, metric): pytest.approx(getattr(row, metric), abs=1e-6)
        for row in ours.rows
        for metric in ("MASE", "WQL")
    }
    assert values == expected
    assert index["results"][0]["dataset"]["args"] == {"series": 20}
    assert "WQL **1.1000** (1.1000 to 1.1000)" in card.text
    assert re.search(r"\| monash_m1_yearly \| 20 \| 0\.\d{4} \| 0\.\d{4} \| 1\.1000 \|", card.text)


def test_settings_of_an_evaluation_are_told(saved: dict[str, Path]) -> None:
    settings = Settings(cross_learning=True, sort_quantiles=True, batch_size=8)
    found = result("small", 1.1).model_copy(update={"settings": settings})
    text = make_card(saved["fold"], scores=CardScores.of(found)).text
    assert "suite offline, cross-learning in batches of 8, sorted quantiles; WQL and" in text


def test_windows_are_not_counted_as_series(saved: dict[str, Path]) -> None:
    found = result("small", 1.1)
    rows = tuple(row.model_copy(update={"windows": 5}) for row in found.rows)
    card = make_card(saved["fold"], scores=CardScores.of(found.model_copy(update={"rows": rows})))
    (index,) = metadata(card)["model-index"]
    assert {one["dataset"]["args"]["series"] for one in index["results"]} == {4}
    assert "| monash_m1_yearly | 4 × 5 |" in card.text


def test_scores_of_the_model_alone(saved: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(result("small", 1.1, series=False).to_dict()))
    card = make_card(saved["fold"], scores=read_scores(path))
    assert len(metadata(card)["model-index"][0]["results"]) == 2
    assert "original was not evaluated beside it" in card.text
    assert "ratio to the original" not in card.text
    assert "| dataset | series | MASE | WQL |\n|---|--:|--:|--:|\n" in card.text
    # Ratios without intervals, where the series were not kept.
    both = CardScores.of(result("a", 1.1, series=False), result("b", 1.0, series=False))
    assert both.intervals == {}
    assert "WQL **1.1000**." in make_card(saved["fold"], scores=both).text


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"models": []}', '{"result": 1}'])
def test_other_files_are_no_measurements(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(DataError):
        read_scores(path)
    with pytest.raises(DataError):
        read_bench(path)


def bench_content(made: Path) -> dict[str, Any]:
    models: list[dict[str, Any]] = [
        {"name": "large", "latency_ms": 120.0, "parameters": 8_000_000, "ratios": {}},
        {
            "name": made.name, "latency_ms": 60.0,
            "parameters": read_checkpoint_record(made).parameters,
            "ratios": {"latency_ms": 0.5, "parameters": 0.25},
            "latency_ratio_interval": [0.48, 0.53],
        },
    ]  # fmt: skip
    return {
        "workload": {"batch_size": 32, "context_length": 512, "horizon": 64, "device": "cpu"},
        "threads": 2, "device_name": "x86_64", "torch_version": "2.13.0", "models": models,
    }  # fmt: skip


def test_latencies_come_with_their_hardware(saved: dict[str, Path], tmp_path: Path) -> None:
    content = bench_content(saved["fold"])
    (tmp_path / "bench.json").write_text(json.dumps(content))
    text = make_card(saved["fold"], bench=read_bench(tmp_path / "bench.json")).text
    assert "32 series × 512 steps, horizon 64, on cpu (x86_64, 2 threads), torch 2.13.0" in text
    assert "| latency, median (ms) | 120 | 60 | 0.500 (0.480–0.530) |" in text
    work = {**content["workload"], "num_samples": 20, "cross_learning": True}
    models = [{**model, "dtype": "bfloat16"} for model in content["models"]]
    other = make_card(saved["fold"], bench={**content, "workload": work, "models": models}).text
    assert "horizon 64, 20 sample paths, cross-learning, bfloat16, on cpu" in other
    assert "| parameters (M) | 8 | 0.03109 | 0.250 |" in text
    assert "Latencies hold for the hardware" in text
    assert make_card(saved["fold"], bench=str(tmp_path / "bench.json")).text == text
    with pytest.raises(UsageError, match=r"bench is 3; give the JSON of bench"):
        make_card(saved["fold"], bench=3)  # type: ignore[arg-type]
    alone = {**content, "models": content["models"][1:]}
    text = make_card(saved["fold"], bench=alone).text
    assert "| | original | this model | ratio |" in text
    assert "| latency, median (ms) | – | 60 | – |" in text


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("workload", "x", "workload: "),
        ("torch_version", None, "torch_version: "),
        ("models", [], "models: "),
        ("ratios", [1], "models.1.ratios: "),
        ("parameters", "8M", "models.1.parameters: "),
        ("latency_ms", float("inf"), "models.1.latency_ms: "),
        ("latency_ratio_interval", [0.5], "models.1.latency_ratio_interval"),
    ],
)
def test_a_bench_that_makes_no_sense_is_named(
    saved: dict[str, Path], tmp_path: Path, key: str, value: object, where: str
) -> None:
    content = bench_content(saved["fold"])
    (content if key in content else content["models"][1])[key] = value
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        read_bench(path)
    expected = f"{str(path)!r} is not what `tscompress bench --json` prints: {where}"
    assert str(caught.value).startswith(expected)
    with pytest.raises(DataError, match="the bench is not what"):
        make_card(saved["fold"], bench=content)


def test_measurements_of_another_model_are_refused(saved: dict[str, Path]) -> None:
    made = read_checkpoint_record(saved["fold"])
    content = bench_content(saved["fold"])
    swapped = {**content, "models": content["models"][::-1]}
    with pytest.raises(UsageError, match="'large' against 'chronos-bolt-fold'"):
        make_card(saved["fold"], bench=swapped)
    with pytest.raises(UsageError, match=f"{made.parameters:,} parameters"):
        make_card(saved["svd"], bench=content)
    several = {**content, "models": [*content["models"], content["models"][1]]}
    with pytest.raises(UsageError, match="of 3 models; a card has"):
        make_card(saved["fold"], bench=several)
    backwards = CardScores.of(result("large", 1.0), result("small", 1.1))
    with pytest.raises(UsageError, match="'large' against 'small'"):
        make_card(saved["fold"], "me/small", scores=backwards)
    # A name alone proves nothing, but it is told.
    scores = CardScores.of(result("small", 1.1), result("large", 1.0))
    assert about_measurements(made, "me/small", scores, content) == []
    content["models"][1]["name"] = "other"
    assert about_measurements(made, "me/fold", scores, content) == [
        "the scores are of a model called 'small'; check that it is this one",
        "the latencies are of a model called 'other'; check that it is this one",
    ]


def test_scores_of_a_checkpoint_as_it_was_are_refused(fold: Path, original: Path) -> None:
    scored = tscompress.evaluate(fold, datasets=["monash_m1_yearly"], max_series=2)
    assert scored.sha256 is not None
    assert scored.sha256["model.safetensors"] == sha256_of(fold / "model.safetensors")
    loaded = load(fold)
    same = tscompress.evaluate(loaded, datasets=["monash_m1_yearly"], max_series=2)
    assert same.sha256 == scored.sha256
    with torch.no_grad():
        loaded.model.shared.weight += 1
    changed = tscompress.evaluate(loaded, datasets=["monash_m1_yearly"], max_series=2)
    assert changed.sha256 is None
    make_card(fold, "me/small", scores=CardScores.of(scored))

    again = tscompress.compress(original, rank=3, calibration=CALIBRATION)
    tscompress.save(again, fold, force=True)
    with pytest.raises(UsageError, match="other weights or settings than"):
        make_card(fold, "me/small", scores=CardScores.of(scored))


@pytest.mark.parametrize("name", ["chronos-bolt", "/data/chronos-bolt", "chronos-bolt (2)"])
def test_what_is_called_the_original_is_the_original(saved: dict[str, Path], name: str) -> None:
    content = bench_content(saved["fold"])
    content["models"][0]["name"] = name
    scores = CardScores.of(result("chronos-bolt-fold", 1.1), result(name, 1.0))
    text = make_card(saved["fold"], scores=scores, bench=content).text
    assert "Geometric mean over the datasets of the ratio to the original" in text
    assert "| dataset | series | MASE | original | ratio | WQL | original | ratio |" in text
    assert "| | original | this model | ratio |" in text
    assert "not evaluated beside it" not in text


def test_an_original_behind_a_link_is_the_original(original: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(original)
    small = tscompress.compress(tmp_path / "link", method="svd", rank=3)
    record = read_checkpoint_record(tscompress.save(small, tmp_path / "small"))
    assert all(map(record.is_original, ("chronos-bolt", "link", "original", None)))
    assert not record.is_original("small")
    assert record.recipe is not None
    of_hub = {"model": "owner/chronos-bolt", "revision": "0123456789" * 4}
    record = replace(record, recipe=record.recipe.model_copy(update=of_hub))
    assert all(map(record.is_original, ("owner/chronos-bolt", "/data/chronos-bolt")))
    assert not record.is_original("other/chronos-bolt")
    shipped = record.recipe.model_copy(update={"model": "reference/bolt", "revision": None})
    record = replace(record, recipe=shipped)
    assert all(map(record.is_original, ("reference/bolt", "bolt", "original")))
    assert not record.is_original("other/bolt")


def test_another_model_is_not_called_the_original(saved: dict[str, Path]) -> None:
    content = bench_content(saved["fold"])
    content["models"][0]["name"] = "nano"
    scores = CardScores.of(result("chronos-bolt-fold", 1.1), result("seasonal-naive", 1.0))
    text = make_card(saved["fold"], scores=scores, bench=content).text
    assert "Geometric mean over the datasets of the ratio to `seasonal-naive`" in text
    assert "| dataset | series | MASE | `seasonal-naive` | ratio |" in text
    assert "| | `nano` | this model | ratio |" in text
    assert "- The original was not evaluated beside it." in text


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_bench_counts_them(
    compressed: dict[tuple[str, str], Path], family: str, kind: str
) -> None:
    directory = compressed[family, kind]
    assert read_checkpoint_record(directory).parameters == parameter_count(
        load(directory).forecaster.inner_model
    )


@pytest.mark.slow
def test_a_run_leaves_its_measurements_for_the_card(original: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        model=str(original),
        output=str(tmp_path / "out"),
        schedule=RankSchedule(rank=4),
        calibration=CALIBRATION,
        profile=None,
        evaluation=EvaluationConfig(datasets=("monash_m1_yearly",), max_series=3),
        bench=Workload(batch_size=2, context_length=32, horizon=4, repeats=2, warmup=0),
    )
    done = run(recipe)
    write_report(done, recipe)
    directory = tmp_path / "out" / "chronos-bolt-fold"
    card = make_card(directory)
    assert done.compressed is not None
    (row,) = done.compressed.rows
    (scored,) = metadata(card)["model-index"][0]["results"]
    assert {m["name"]: m["value"] for m in scored["metrics"]} == pytest.approx(
        {"MASE": row.MASE, "WQL": row.WQL}, rel=1e-4
    )
    assert "2 series × 32 steps, horizon 4, on cpu" in card.text
    assert re.search(r"\| latency, median \(ms\) \| [\d.]+ \| [\d.]+ \| [\d.]+", card.text)
    # What was measured of another plan is not said of this one.
    shutil.copytree(directory, tmp_path / "out" / "other")
    measured = read_checkpoint_record(directory)
    assert measured.plan is not None
    assert scores_of_run(measured) is not None
    changed = measured.plan.model_copy(update={"kept_layers": {"encoder": (0,)}})
    assert scores_of_run(replace(measured, plan=changed)) is None
    assert bench_of_run(replace(measured, plan=changed)) is None
    # Nor of other weights with the same plan, as a recovery has them.
    weights = tmp_path / "out" / "other" / "model.safetensors"
    save_file({name: 2 * weight for name, weight in load_file(weights).items()}, weights)
    provenance = weights.with_name("provenance.json")
    content = json.loads(provenance.read_text())
    content["sha256"]["model.safetensors"] = sha256_of(weights)
    provenance.write_text(json.dumps(content))
    other = read_checkpoint_record(weights.parent)
    assert other.plan == measured.plan
    assert scores_of_run(other) is None
    assert bench_of_run(other) is None


# --------------------------------------------------------------------------------------------------
# Whose card it is
# --------------------------------------------------------------------------------------------------


def test_a_card_by_hand_is_kept(fold: Path) -> None:
    path = write_card(fold)
    assert is_marked(path.read_text())
    first = path.read_text()
    assert write_card(fold, "me/elsewhere").read_text() != first
    for by_hand in ("# mine\n", path.read_text() + "\nOne line by hand.\n", ""):
        path.write_text(by_hand)
        with pytest.raises(OutputExistsError, match=r"by hand; keep it, or pass --force\."):
            write_card(fold)
        assert path.read_text() == by_hand
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OutputExistsError, match="cannot be read as a card: 'utf-8'"):
        write_card(fold)
    write_card(fold, force=True)
    assert path.read_text() == first
    assert {p.name for p in fold.iterdir() if p.name.startswith(".")} == set()


def test_unreadable_card_is_refused(fold: Path) -> None:
    path = fold / "README.md"
    os.mkfifo(path)  # whose reader would wait for ever
    with pytest.raises(OutputExistsError, match="not a regular file"):
        write_card(fold)
    path.unlink()
    path.symlink_to("/dev/zero")  # which has no end
    with pytest.raises(OutputExistsError, match="is a link; put the file itself there"):
        write_card(fold)
    with pytest.raises(OutputError, match="device"):
        write_card(fold, force=True)
    path.unlink()
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(OutputExistsError, match="at most 1,048,576 are read"):
        write_card(fold)
    path.unlink()
    path.mkdir()
    for force in (False, True):
        with pytest.raises(OutputExistsError, match=r"is a directory, .* belongs; move it away"):
            write_card(fold, force=force)


def test_a_card_by_hand_keeps_its_line_ends(fold: Path) -> None:
    (fold / "README.md").write_bytes(b"# mine\r\n")
    assert card_by_hand(fold / "README.md") == "# mine\r\n"


def test_a_loaded_card_is_the_one_that_was_written(fold: Path) -> None:
    path = write_card(fold, scores=CardScores.of(result("a", 1.1), result("b", 1.0)))
    assert is_marked(path.read_text())
    loaded = ModelCard.load(path)
    assert len(loaded.data.eval_results) == 4
    assert loaded.data.pipeline_tag == "time-series-forecasting"


def test_other_directories_have_no_card(original: Path, fold: Path, tmp_path: Path) -> None:
    for directory in (original, tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            make_card(directory)
    (fold / "recipe.yaml").unlink()
    (fold / "provenance.json").write_text('{"source": {"model": 1, "revision": 2, "family": 3}}')
    with pytest.raises(CorruptCheckpointError, match="is incomplete"):
        make_card(fold)
