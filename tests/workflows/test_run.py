"""The whole walk from one recipe, and the page it leaves."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file, save_file
from shared_fixtures import Forbid, tiny_recipe

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.compression import calibration
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.evaluation_sets import EvaluationDataset, LongFormat
from tscompress.data.fingerprints import label_fingerprints
from tscompress.data.leakage import guarded
from tscompress.data.reading.format import GivenSeries
from tscompress.data.suites import load_suite
from tscompress.data.training_collections import training_series
from tscompress.errors import DataError, LeakError, OutputExistsError, TscompressError, UsageError
from tscompress.exporting import packages
from tscompress.hub.card_scores import bench_of_run
from tscompress.hub.origin import read_checkpoint_record
from tscompress.io.files import new_directory
from tscompress.io.own_outputs import foreign_part, is_own_file
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import RankSchedule
from tscompress.probing import tasks
from tscompress.probing.measure import ProbeConfig
from tscompress.reports.content import make_report, verdict_of
from tscompress.reports.write import (
    report_files,
    report_tables,
    write_report,
)
from tscompress.runtime.record import GRAPH_FILE, read_record
from tscompress.training import recovery_batches
from tscompress.training.pretrain_model import build_model
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket
from tscompress.workflows import run as running
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.export import ExportResult
from tscompress.workflows.recipe import (
    EvaluationConfig,
    ExportConfig,
    ProfileConfig,
    Recipe,
    labels_of,
    load_recipe,
)
from tscompress.workflows.run import RunResult, finishing_run, run
from tscompress.workflows.run_files import is_same_original, load_run


def small_recipe(model: Path, output: Path, **changes: object) -> Recipe:
    recipe = Recipe(
        model=str(model),
        output=str(output),
        schedule=RankSchedule(rank=4),
        calibration=CalibrationConfig(num_series=6, context_length=32, batch_size=3),
        profile=ProfileConfig(epsilons=(0.3, 0.1)),
        evaluation=EvaluationConfig(
            datasets=("monash_m3_yearly", "monash_m1_yearly"), max_series=3
        ),
        bench=Workload(batch_size=2, context_length=32, horizon=4, repeats=2, warmup=1),
    )
    return recipe.model_copy(update=changes)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("chronos-t5", "fold"),
        ("chronos-2", "fold"),
        ("chronos-bolt", "activation-svd"),
    ],
)
def test_the_walk_leaves_a_checkpoint_scores_and_a_page(
    checkpoints: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest,
    family: str, method: str,
) -> None:  # fmt: skip
    # Figures of a profile look alike for all; one family's are enough. They are drawn elsewhere.
    profile = ProfileConfig(epsilons=(0.3, 0.1)) if family == "chronos-t5" else None
    drawn = method == "activation-svd"
    if drawn:
        request.getfixturevalue("drawn_figures")
    recipe = small_recipe(checkpoints[family], tmp_path / "out", method=method, profile=profile)
    result = run(recipe)
    page = write_report(result, recipe)

    # AutoGluon reads the original's name in the output's.
    checkpoint = tmp_path / "out" / f"{family}-{method}"
    assert foreign_part(checkpoint) is None
    beside = [path for path in (tmp_path / "out").rglob("*") if checkpoint not in path.parents]
    assert [path for path in beside if path.is_file() and not is_own_file(path)] == []
    assert Plan.load(checkpoint / "plan.json") == result.plan
    assert load(checkpoint).plan == (None if method == "fold" else result.plan)
    scores = pd.read_csv(tmp_path / "out" / "scores.csv")
    assert list(scores.columns) == ["dataset", "model", "MASE", "WQL"]
    assert set(scores["dataset"]) == {"monash_m3_yearly", "monash_m1_yearly"}

    naive = pd.read_csv(tmp_path / "out" / "scores-seasonal-naive.csv")
    assert list(naive["dataset"]) == list(scores["dataset"])
    assert result.bench is not None
    assert all(model.peak_memory_bytes for model in result.bench.models)

    text = page.read_text()
    assert "of the parameters" in verdict_of(result, recipe).sentence
    assert verdict_of(result, recipe).clauses[0].split(" on ")[0] in text
    for figure in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (page.parent / figure).stat().st_size > (1000 if drawn else 100)
    assert "{{" not in text
    assert "{%" not in text
    numbers = json.loads((page.parent / "report.json").read_text())
    assert numbers["relative"]["WQL"] > 0
    assert numbers["attention_parameter_ratio"] == result.plan.attention_parameter_ratio
    assert report_tables(result, recipe)


def test_a_seasonal_naive_without_error_keeps_no_checkpoint_from_its_page(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A price that stays, which the season before forecasts exactly: no ratio to that."""
    days = pd.date_range("2024-01-01", periods=60)
    values = np.r_[np.random.default_rng(0).normal(50, 9, 46).round(2), np.full(14, 20)]
    file = tmp_path / "prices.csv"
    pd.DataFrame({"day": days, "price": values}).to_csv(file, index=False)
    columns = {"time_column": "day", "target_column": "price"}
    form = LongFormat.model_validate({"horizon": 7, **columns})
    scored = EvaluationConfig(suite=str(file), long_format=form)
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", profile=None, bench=None, evaluation=scored
    )
    result = run(recipe)
    assert result.baseline is not None
    assert result.baseline.rows[0].WQL == 0
    page = write_report(result, recipe)
    assert "seasonal naive the compressed model" not in page.read_text()
    record = json.loads((page.parent / "report.json").read_text())
    assert record["relative_to_seasonal_naive"] is None
    assert record["relative"]["WQL"] > 0
    assert report_tables(result, recipe)


def test_memory_is_that_of_a_process_for_each_model(
    checkpoints: dict[str, Path], tmp_path: Path, memory_of_a_process: list[Path]
) -> None:
    model = checkpoints["chronos-bolt"]
    result = run(small_recipe(model, tmp_path / "out", profile=None, evaluation=None))
    assert result.bench is not None
    assert memory_of_a_process == [model, tmp_path / "out" / "chronos-bolt-fold"]
    for measured in result.bench.models:
        assert measured.peak_memory_bytes is not None
        assert measured.peak_memory_bytes > 0


def test_the_page_says_how_to_make_it_again(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", profile=None, evaluation=None, bench=None
    )
    page = write_report(run(recipe), recipe)
    text = page.read_text()
    (quoted,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "again.yaml").write_text(quoted)
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert "## Forecast quality" not in text
    assert "## Cost" not in text


def test_the_record_of_a_run_has_the_commit_of_its_original(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / ("a" * 40)
    shutil.copytree(checkpoints["chronos-bolt"], snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    nothing = {"profile": None, "evaluation": None, "bench": None}
    recipe = small_recipe(Path("me/bolt"), tmp_path / "out", **nothing)
    page = write_report(run(recipe), recipe)
    assert load_run(tmp_path / "out")[1].revision == "a" * 40
    assert f"revision: {'a' * 40}" in page.read_text()
    commit, other = (recipe.model_copy(update={"revision": one * 40}) for one in "ab")
    branch = recipe.model_copy(update={"revision": "v2"})
    assert is_same_original(commit, recipe)
    assert is_same_original(branch, commit)
    assert not is_same_original(commit, other)
    assert not is_same_original(branch, recipe)


def test_a_profile_beside_svd_reads_series_as_the_recipe_says(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    days = pd.date_range("2024-01-01", periods=60)
    values = np.random.default_rng(0).normal(50, 9, 60).round(2)
    file = tmp_path / "sales.csv"
    pd.DataFrame({"store": "a", "when": days, "sold": values}).to_csv(file, index=False)
    columns = {"id_column": "store", "time_column": "when", "target_column": "sold"}
    recipe = small_recipe(
        checkpoints["chronos-bolt"],
        tmp_path / "out",
        method="svd",
        series=GivenSeries.model_validate({**columns, "hold_out": 7}),
        calibration=CalibrationConfig(source=str(file), context_length=32),
        evaluation=EvaluationConfig(
            suite=str(file), long_format=LongFormat.model_validate({"horizon": 7, **columns})
        ),
        bench=None,
    )
    result = run(recipe)
    assert result.profile is not None
    assert result.compressed is not None


@pytest.mark.parametrize("given", ["recipes/demo.yaml", Path("recipes/demo.yaml"), {}, None])
def test_what_is_no_recipe_is_refused_in_a_line(given: Any) -> None:
    with pytest.raises(UsageError, match="give a Recipe, as tscompress") as caught:
        run(given)
    assert "\n" not in str(caught.value)


def test_a_recipe_does_not_learn_what_it_is_scored_on(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(6, 90)).cumsum(axis=1)

    def write(name: str, values: Any) -> Path:
        times = pd.date_range("2020-01-01", periods=values.shape[1], freq="D")
        parts = [pd.DataFrame({"id": i, "date": times, "y": row}) for i, row in enumerate(values)]
        pd.concat(parts).to_csv(tmp_path / name, index=False)
        return tmp_path / name

    whole = write("sales.csv", walks)
    copied, history = write("copy.csv", 3 * walks[:, 40:] + 1), write("history.csv", walks[:, :-7])
    evaluation = EvaluationConfig(suite=str(whole), long_format=LongFormat(horizon=7))
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", evaluation=evaluation, bench=None
    )

    def calibrated_on(path: Path) -> Recipe:
        return recipe.model_copy(
            update={"calibration": CalibrationConfig(source=str(path), context_length=32)}
        )

    for leaking in (whole, copied):
        with pytest.raises(LeakError, match="6 of 6 series belong"):
            run(calibrated_on(leaking))
        recovery = RecoveryConfig(steps=1, series=(str(leaking),))
        with pytest.raises(LeakError, match=f"series 0 of '{leaking.name}' belongs"):
            run(recipe.model_copy(update={"recover": recovery}), force=True)
        with pytest.raises(LeakError, match="6 of 6 series belong"):
            compress_loaded_(load(recipe.model, dtype="float32"), calibrated_on(leaking))
        with pytest.raises(LeakError, match="6 of 6 series belong"):
            compress_loaded_(load(recipe.model, dtype="float32"), recipe, series=leaking)
    # What came before the steps that are forecast may be learnt from.
    assert run(calibrated_on(history), force=True).compressed is not None


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("horizon", [1, 2, 7, 24])
def test_labels_are_recognised_and_their_history_is_not(horizon: int, missing: float) -> None:
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(40, 120)).cumsum(axis=1)
    walks[rng.random(walks.shape) < missing] = np.nan
    walks[:, -1] = rng.normal(size=40)  # one of the steps to be forecast was observed
    dataset = replace(some_dataset(), series=tuple(walks), horizon=horizon)
    known = label_fingerprints(dataset)
    assert all(known.recognise(2 * walk + 3) for walk in walks)
    assert not any(known.recognise(walk[:-horizon]) for walk in walks)


@pytest.mark.parametrize("windows", [1, 2])
def test_labels_that_repeat_their_history_are_not_recognised(windows: int) -> None:
    rng = np.random.default_rng(0)
    weeks, horizon = np.tile(rng.normal(size=(4, 7)), (1, 18)), 7
    walk = rng.normal(size=weeks.shape[1]).cumsum()
    cuts = [
        values[: len(values) - horizon * behind]
        for values in (*weeks, walk)
        for behind in reversed(range(windows))
    ]
    dataset = replace(some_dataset(), series=tuple(cuts), horizon=horizon, windows=windows)
    known = label_fingerprints(dataset)
    assert not any(known.recognise(week[: -horizon * windows]) for week in weeks)
    assert not known.recognise(walk[: -horizon * windows])
    assert known.recognise(walk[: 1 - horizon * windows])  # one step is enough


def test_series_given_besides_a_recipe_are_held_against_suites_that_have_names(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wheels have in common with them is not offered anyway; what a user has may be theirs."""
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(6, 90)).cumsum(axis=1).astype(np.float32)
    dataset = replace(some_dataset(), series=tuple(walks), horizon=7)
    monkeypatch.setattr("tscompress.workflows.recipe.load_suite", lambda *_, **__: [dataset])
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path, evaluation=EvaluationConfig(suite="zero-shot")
    )
    assert labels_of(recipe) == []
    with pytest.raises(LeakError, match="6 of 6 series belong"):
        compress_loaded_(load(recipe.model, dtype="float32"), recipe, series=list(walks))


def some_dataset() -> EvaluationDataset:
    return next(iter(load_suite("offline", 1, ("monash_m1_yearly",))))


def test_real_series_of_wheels_are_left_out_where_they_are_scored_on(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smooth series look like many others, and are not recognised.
    beer, *_ = training_series(["aus_production"])
    times = pd.date_range("1960-01-01", periods=len(beer), freq="QS")
    pd.DataFrame({"id": 0, "date": times, "y": 2 * beer}).to_csv(tmp_path / "beer.csv", index=False)
    evaluation = EvaluationConfig(
        suite=str(tmp_path / "beer.csv"), long_format=LongFormat(horizon=8)
    )
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", evaluation=evaluation, bench=None
    )
    collection = training_series(["aus_production"])
    with guarded(labels_of(recipe)):
        left = training_series(["aus_production"])
    assert len(left) < len(collection)
    assert not any(np.array_equal(series, beer, equal_nan=True) for series in left)
    assert labels_of(recipe.model_copy(update={"evaluation": EvaluationConfig()})) == []

    # All the way down to what calibration and recovery draw from.
    drawn: dict[str, list[Any]] = {}
    for module in (calibration, recovery_batches):

        def offered(names: Any, where: str = module.__name__) -> list[Any]:
            drawn[where] = training_series(names)
            return drawn[where]

        monkeypatch.setattr(module, "training_series", offered)
    recovery = RecoveryConfig(
        steps=1,
        real_series=("aus_production",),
        buckets=(Bucket(context_length=32, horizon=8, batch_size=4),),
        held_out_series=4,
    )
    mixed = recipe.calibration.model_copy(update={"source": "mixed"})
    whole = recipe.model_copy(update={"recover": recovery, "calibration": mixed})
    compress_loaded_(load(recipe.model, dtype="float32"), whole)
    assert len(drawn) == 2
    for series in drawn.values():
        assert len(series) >= len(left)
        assert not any(np.array_equal(one, beer, equal_nan=True) for one in series)


# --------------------------------------------------------------------------------------------------
# What is refused before the first stage, and what a failure leaves
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bench": Workload(batch_size=2, context_length=10**6)}, "context_length"),
        ({"bench": Workload(batch_size=2, context_length=32, num_samples=3)}, "num_samples"),
        ({"evaluation": EvaluationConfig(datasets=("nothing",))}, "nothing"),
        ({"evaluation": EvaluationConfig(suite="none.yaml")}, "none.yaml"),
        ({"schedule": RankSchedule(rank=1000)}, "1000"),
        ({"width": 10**6}, "1000000"),
        ({"probe": ProbeConfig(tasks=("none",))}, "none"),
        ({"evaluation": EvaluationConfig(cross_learning=True)}, "alone"),
        ({"evaluation": EvaluationConfig(suite="covariates")}, "covariates"),
        ({"recover": RecoveryConfig(steps=1, series=("gone.csv",))}, "gone.csv"),
        ({"probe": ProbeConfig(num_samples=3)}, "not samples; leave num_samples out"),
        ({"evaluation": EvaluationConfig(suite="zero-shot", root="gone")}, "no Parquet files in"),
        ({"evaluation": EvaluationConfig(suite="covariates", root="gone")}, "give no root"),
        ({"fold": FoldConfig(frequencies="free")}, "a chronos-bolt has none; leave it out"),
        ({"method": "svd", "fold": FoldConfig(refit="none")}, "svd reads none; leave fold out"),
        ({"recover": RecoveryConfig(steps=1, accumulate=5)}, "does not divide into 1 process"),
        (
            {"latent": 3, "schedule": None, "recover": RecoveryConfig(steps=1, watch_ranks=True)},
            "leave watch_ranks out",
        ),
    ],
)
def test_refusals_of_later_stages_come_first(
    checkpoints: dict[str, Path], tmp_path: Path, forbid: Forbid, changes: dict[str, Any], text: str
) -> None:
    forbid("tscompress.workflows.run.profile")
    recipe = small_recipe(checkpoints["chronos-bolt"], tmp_path / "out", **changes)
    with pytest.raises(TscompressError, match=text):
        run(recipe)
    assert not (tmp_path / "out").exists()


def test_a_model_of_other_quantiles_is_refused_before_it_is_compressed(
    tmp_path: Path, forbid: Forbid
) -> None:
    forbid("tscompress.workflows.run.profile")
    recipe = tiny_recipe("chronos-bolt")
    few = recipe.architecture.model_copy(update={"quantiles": (0.1, 0.5, 0.9)})
    model = tmp_path / "few"
    build_model(recipe.model_copy(update={"architecture": few})).save_pretrained(model)
    with pytest.raises(TscompressError, match=r"quantiles 0.1, 0.5, 0.9; scores are of 0.1, 0.2"):
        run(small_recipe(model, tmp_path / "out"))


def test_a_run_that_fails_leaves_its_output_as_it_was(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", profile=None, evaluation=None
    )
    with monkeypatch.context() as patch:
        patch.setattr(running, "bench", fail)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert list((tmp_path / "out").iterdir()) == []
    first = run(recipe).checkpoint  # nothing hinders the next start
    before = (first / "provenance.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(running, "bench", fail)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, force=True)
    assert (first / "provenance.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == [first.name]


def test_a_walk_replaces_a_checkpoint_when_asked_and_none_that_was_trained_further(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", profile=None, evaluation=None, bench=None
    )
    weights = run(recipe).checkpoint / "model.safetensors"
    with pytest.raises(OutputExistsError, match="--force"):
        run(recipe)
    run(recipe, force=True)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(OutputExistsError, match=r"model\.safetensors"):
        run(recipe, force=True)


def test_a_report_of_another_method_is_not_replaced_unasked(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is named after its method, a report is not."""
    nothing = {"profile": None, "evaluation": None, "bench": None}
    first = small_recipe(checkpoints["chronos-bolt"], tmp_path / "out", method="svd", **nothing)
    second = first.model_copy(update={"method": "fold"})

    def walk(recipe: Recipe, **options: Any) -> None:
        beside = report_files(tmp_path / "out")
        with finishing_run(recipe, beside=beside, **options) as result:
            write_report(result, recipe)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    walk(first)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(running, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        with pytest.raises(OutputExistsError, match=r"report\.json.*--force"):
            walk(second)
    assert contents(tmp_path) == before
    walk(second, force=True)
    assert load_run(tmp_path / "out")[1] == second
    after = contents(tmp_path)
    kept = [name for name in before if "-svd/" in name or name.endswith("notes.md")]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert len(kept) > 1


@pytest.mark.parametrize(
    ("force", "stage"), [(False, "scores"), (False, "report"), (True, "report")]
)
def test_files_of_a_killed_run_make_way(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    force: bool,
    stage: str,
) -> None:
    """A copy of the output, as it lies there in the middle, is what a kill leaves."""
    bolt, out, left = checkpoints["chronos-bolt"], tmp_path / "out", tmp_path / "left"
    one = EvaluationConfig(datasets=("monash_m1_yearly",), max_series=1)
    recipe = small_recipe(bolt, out, profile=None, bench=None, evaluation=one)
    if force:
        write_report(run(recipe), recipe)
    before = contents(out)

    def stop(*_: Any, **__: Any) -> None:
        shutil.copytree(out, left)
        raise KeyboardInterrupt

    def walk(given: Recipe, force: bool) -> None:
        beside = report_files(Path(given.output))
        with finishing_run(given, force=force, beside=beside) as result:
            write_report(result, given)
            if stage == "report" and given is recipe:
                stop()

    if force:
        recipe = recipe.model_copy(update={"schedule": RankSchedule(rank=2)})
    with monkeypatch.context() as patch:
        if stage == "scores":
            patch.setattr(running, "evaluate_models", stop)
        with pytest.raises(KeyboardInterrupt):
            walk(recipe, force)
    assert contents(out) == before
    assert contents(left) != before
    again = recipe.model_copy(update={"output": str(left)})
    if force:  # what was whole is whole again, and no start replaces it unasked
        with pytest.raises(OutputExistsError, match="--force"):
            walk(again, False)
        assert contents(left) == before
    walk(again, force)
    assert not [name for name in contents(left) if Path(name).name.startswith(".")]
    assert load_run(left)[0].plan == Plan.load(left / "chronos-bolt-fold" / "plan.json")


def test_another_method_undoes_what_a_killed_run_left(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Or its report would be taken for that of the killed run, and go without ``--force``."""
    bolt, left = checkpoints["chronos-bolt"], tmp_path / "left"
    nothing: dict[str, Any] = {"profile": None, "bench": None, "evaluation": None}

    def walk(recipe: Recipe, kill: bool = False) -> None:
        beside = report_files(Path(recipe.output))
        with finishing_run(recipe, beside=beside) as result:
            write_report(result, recipe)
            if kill:
                shutil.copytree(recipe.output, left)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walk(small_recipe(bolt, tmp_path / "out", **nothing), kill=True)
    assert (left / "report.json").is_file()
    walk(small_recipe(bolt, left, method="svd", **nothing))
    before = contents(left)
    assert not [name for name in before if "-fold/" in name or Path(name).name.startswith(".")]
    with pytest.raises(OutputExistsError, match="--force"):
        walk(small_recipe(bolt, left, **nothing))
    assert contents(left) == before


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def exporting_recipe(model: Path, output: Path, precision: Any) -> Recipe:
    return small_recipe(model, output, profile=None, export=ExportConfig(precision=precision))


@dataclass(frozen=True)
class ExportedRun:
    """A run that exported what it made, with its page."""

    recipe: Recipe
    result: RunResult
    page: Path

    @property
    def output(self) -> Path:
        return Path(self.recipe.output)


@pytest.fixture(scope="module")
def exported_run(
    checkpoints: dict[str, Path],
    exported: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> ExportedRun:
    """Of a fold that is exact, so that the graph of the original is that of the compressed model:
    making one takes long."""
    family, exact = "chronos-bolt", {"schedule": None, "fold": FoldConfig(single_token=True)}
    graph = (exported[family] / GRAPH_FILE).read_bytes()
    recipe = exporting_recipe(
        checkpoints[family], tmp_path_factory.mktemp("exported-run") / "out", "float32"
    ).model_copy(update=exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tscompress.workflows.export.onnx_graph", lambda *_: graph)
        result = run(recipe)
    return ExportedRun(recipe, result, write_report(result, recipe))


def test_an_exported_graph_is_scored_and_timed_beside_the_models(
    exported_run: ExportedRun,
) -> None:
    recipe, result, page = exported_run.recipe, exported_run.result, exported_run.page
    assert result.exported is not None
    assert result.exported.precision == "float32"
    graph = result.exported.directory
    assert graph == result.checkpoint.with_name(f"{result.checkpoint.name}-onnx")
    assert foreign_part(graph) is None
    assert result.compressed is not None
    assert result.exported_scores is not None
    assert read_record(graph).parameters == read_checkpoint_record(result.checkpoint).parameters
    # The graph computes what the compressed model does.
    for ours, theirs in zip(result.compressed.rows, result.exported_scores.rows, strict=True):
        assert pytest.approx(ours.WQL, rel=1e-4) == theirs.WQL
        assert pytest.approx(ours.MASE, rel=1e-4) == theirs.MASE
    assert result.bench is not None
    assert [model.name for model in result.bench.models][2] == graph.name
    beside = [path for path in exported_run.output.rglob("*") if graph not in path.parents]
    beside = [path for path in beside if result.checkpoint not in path.parents]
    assert [path for path in beside if path.is_file() and not is_own_file(path)] == []

    # A card of the checkpoint has its own latencies, not the graph's.
    on_card = bench_of_run(read_checkpoint_record(result.checkpoint))
    assert on_card is not None
    assert [model["name"] for model in on_card["models"]] == [
        model.name for model in result.bench.models[:2]
    ]

    # Both forecast as the original does: of twice the scores of the graph the ratio is 2.
    scores = result.exported_scores
    twice = tuple(row.model_copy(update={"WQL": 2 * row.WQL}) for row in scores.rows)
    worse = replace(result, exported_scores=scores.model_copy(update={"rows": twice}))
    rows = make_report(worse, recipe).exported
    assert {"WQL", "MASE", "latency, median", "size on disk"} <= {row.label for row in rows}
    by_label = {row.label: row for row in rows}
    wql, mase = by_label["WQL"], by_label["MASE"]
    assert wql.exported.ratio == pytest.approx(2 * wql.compressed.ratio, rel=1e-4)
    assert mase.exported.ratio == pytest.approx(mase.compressed.ratio, rel=1e-4)
    folded, exported = (model.bytes_on_disk for model in result.bench.models[1:])
    assert folded is not None
    assert exported == result.exported.graph_bytes
    sizes = by_label["size on disk"]
    assert sizes.exported.ratio / sizes.compressed.ratio == pytest.approx(exported / folded)
    assert "exported, float32" in page.read_text()
    html = page.with_suffix(".html").read_text()
    assert 'id="exported"' in html
    assert "geometric mean, exported" in html
    assert any("exported (float32)" in str(shown) for shown in report_tables(result, recipe))


def test_an_exported_run_is_read_again_where_it_was_moved_to(
    exported_run: ExportedRun, tmp_path: Path
) -> None:
    recipe, result = exported_run.recipe, exported_run.result
    first = make_report(result, recipe)
    moved = tmp_path / "moved"
    exported_run.output.rename(moved)
    try:
        again, theirs = load_run(moved)
        second = make_report(again, recipe)
    finally:
        moved.rename(exported_run.output)
    assert theirs == recipe
    assert result.exported is not None
    assert again.exported == replace(
        result.exported, directory=moved / result.exported.directory.name
    )
    assert again.exported_scores is not None
    assert result.exported_scores is not None
    assert again.exported_scores.frame().equals(result.exported_scores.frame())
    assert first.exported == second.exported
    assert first.exported_note == second.exported_note
    assert [point.kind for point in second.points] == ["original", "compressed", "exported"]


def test_a_graph_of_before_is_not_replaced_unasked(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    bolt = checkpoints["chronos-bolt"]
    recipe = exporting_recipe(bolt, tmp_path / "out", "float32").model_copy(
        update={"evaluation": None, "bench": None}
    )
    other = tmp_path / "out" / "chronos-bolt-fold-onnx"
    other.mkdir(parents=True)
    (other / "mine.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(OutputExistsError):
            run(recipe, force=force)
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert not other.with_name("chronos-bolt-fold").exists()


def test_a_graph_of_before_goes_with_its_checkpoint(
    exported_run: ExportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(exported_run.output, output)
    checkpoint = output / exported_run.result.checkpoint.name
    graph = checkpoint.with_name(f"{checkpoint.name}-onnx")
    nothing = {"export": None, "evaluation": None, "bench": None}
    plain = exported_run.recipe.model_copy(update={"output": str(output), **nothing})
    before = contents(tmp_path)
    # It alone is enough, as after someone removed the checkpoint.
    checkpoint.rename(tmp_path / "elsewhere")
    with pytest.raises(OutputExistsError, match=graph.name):
        run(plain)
    (tmp_path / "elsewhere").rename(checkpoint)

    def stop(*_: object) -> None:
        assert not graph.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(running, "_measure_", stop)
        with pytest.raises(KeyboardInterrupt):
            run(plain, force=True)
    assert contents(tmp_path) == before

    (graph / "mine.txt").write_text("mine")  # not ours alone any more
    with pytest.raises(OutputExistsError, match=r"mine\.txt"):
        run(plain, force=True)
    (graph / "mine.txt").unlink()
    assert contents(tmp_path) == before

    assert run(plain, force=True).exported is None
    assert not graph.exists()


def test_scores_of_another_model_are_not_taken_for_those_of_a_run(
    exported_run: ExportedRun, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(exported_run.output, output)
    scores = json.loads((output / "scores.json").read_text())
    foreign: tuple[dict[str, Any], ...] = (
        {"sha256": {"model.safetensors": "0" * 64}},
        {"sha256": None, "model": "other"},
    )
    for change in foreign:
        changed = scores | {"result": scores["result"] | change}
        (output / "scores.json").write_text(json.dumps(changed))
        with pytest.raises(UsageError, match="has scores of another model than the run's"):
            load_run(output)


def test_a_graph_is_replaced_with_its_checkpoint(
    exported_run: ExportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(exported_run.output, output)
    graph = output / f"{exported_run.result.checkpoint.name}-onnx"
    found = exported_run.result.exported
    assert found is not None

    def copied(checkpoint: Path, target: Path, *, precision: str) -> ExportResult:
        with new_directory(target) as directory:
            shutil.copytree(found.directory, directory, dirs_exist_ok=True)
        return replace(found, directory=target)

    monkeypatch.setattr(running, "export", copied)
    nothing = {"evaluation": None, "bench": None}
    again = exported_run.recipe.model_copy(update={"output": str(output), **nothing})
    exported = run(again, force=True).exported
    assert exported is not None
    assert exported.directory == graph
    assert foreign_part(graph) is None
    assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_a_run_of_an_original_that_changes_meanwhile_fails(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path(shutil.copytree(checkpoints["chronos-bolt"], tmp_path / "original"))
    recipe = small_recipe(original, tmp_path / "out", profile=None, bench=None, evaluation=None)

    def compressed(*given: Any, **options: Any) -> Any:
        found = compress_loaded_(*given, **options)
        weights = load_file(original / "model.safetensors")
        weights["shared.weight"] = weights["shared.weight"] + 1
        save_file(weights, original / "model.safetensors", {"format": "pt"})
        return found

    monkeypatch.setattr(running, "compress_loaded_", compressed)
    with pytest.raises(DataError, match="changed while the run went on"):
        run(recipe)
    assert not (tmp_path / "out" / "original-fold").exists()


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_files_that_no_run_exported_stay_beside_a_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    recipe = small_recipe(
        checkpoints["chronos-bolt"], tmp_path / "out", profile=None, evaluation=None, bench=None
    )
    other, elsewhere = tmp_path / "out" / "chronos-bolt-fold-onnx", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tscompress-export.json").write_text("{}")
    other.parent.mkdir()
    if kind == "link":
        other.symlink_to(elsewhere)
    else:
        other.mkdir()
        (other / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    for force in (False, True):
        run(recipe, force=force)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert other.is_symlink() == (kind == "link")


@pytest.mark.parametrize("missing", [True, False])
def test_an_export_that_cannot_be_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    recipe = Recipe(model="no/such", output=str(tmp_path / "out"), export=ExportConfig())
    if missing:
        monkeypatch.setattr(packages, "LIBRARIES", ("onnx", "no_such_library"))
    with pytest.raises(UsageError) as refused:
        run(recipe, device="cpu" if missing else "cuda")
    assert ("no_such_library" if missing else "'cuda'") in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def univariate_recipe(checkpoint: Path, output: Path, **changes: Any) -> Recipe:
    return small_recipe(
        checkpoint, output, schedule=None, fold=FoldConfig(univariate=True), **changes
    )


def test_covariate_tasks_of_a_model_that_will_read_none_are_refused_first(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    probe = ProbeConfig(tasks=("response",), num_series=2)
    recipe = univariate_recipe(checkpoints["chronos-2"], tmp_path / "out", probe=probe)
    with pytest.raises(UsageError) as refused:
        run(recipe)
    assert "univariate" in str(refused.value)
    assert not (tmp_path / "out" / "chronos-2-fold").exists()


def test_covariate_tasks_that_a_univariate_model_skips_are_not_in_its_report(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: tasks.TASKS[name] for name in ("period-4", "covariate-lag-0")}
    monkeypatch.setattr(tasks, "TASKS", some)
    monkeypatch.setattr(tasks, "RESPONSES", dict(list(tasks.RESPONSES.items())[:1]))
    recipe = univariate_recipe(
        checkpoints["chronos-2"],
        tmp_path / "out",
        probe=ProbeConfig(num_series=2),
        profile=None,
        evaluation=None,
        bench=None,
    )
    result = run(recipe)
    page = write_report(result, recipe)
    assert result.probes is not None
    original, compressed = result.probes
    assert compressed.skipped
    assert len(original.tasks) > len(compressed.tasks)
    for text in (page.read_text(), page.with_suffix(".html").read_text()):
        assert compressed.tasks[0].task.group in text
        assert compressed.skipped[0] not in text
    assert load_run(tmp_path / "out")[0].probes == result.probes
