"""Skill: perfect is 1, constant is 0; comparisons; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from known_skill import mixture, result_of
from shared_fixtures import ROOT

import tscompress
from tscompress.checkpoints.load import load
from tscompress.cli import app as cli
from tscompress.errors import DataError, TscompressError, UsageError
from tscompress.probing.measure import ProbeConfig, probe, score_task
from tscompress.probing.processes import Structural
from tscompress.probing.results import (
    FLOOR,
    ProbeResult,
    compare_probes,
    load_probes,
    probe_content,
)
from tscompress.probing.skill import draws, estimate
from tscompress.probing.tables import probe_tables
from tscompress.probing.tasks import TASKS, ProbeTask, seasonal_naive
from tscompress.workflows.recipe import Recipe, load_recipe
from tscompress.workflows.run import run

#: Of the seasons alone, which differ in little else, the shortest and the longest period.
VARIOUS = [t for n, t in TASKS.items() if n[:7] != "period-" or t.season_length in (4, 52)]
FEW = ["period-4", "period-7", "linear-trend", "random-demand"]


@pytest.mark.parametrize("task", VARIOUS, ids=[task.name for task in VARIOUS])
def test_the_best_forecast_has_skill_1_and_the_best_constant_0(task: ProbeTask) -> None:
    best, constant = mixture(task, 1.0), mixture(task, 0.0)
    assert best.skill.value == pytest.approx(1)
    assert constant.skill.value == pytest.approx(0, abs=1e-12)
    assert best.skill.low == pytest.approx(1)
    assert best.crossing_rate == 0
    assert (best.coverage is None) == (not task.process.continuous)
    if task.group == "intermittent":  # the best quantiles of counts cover more
        assert best.coverage is None
    if task.group == "seasons":
        assert best.seasonal_naive == pytest.approx(1)
        assert mixture(task, 0.5).skill.value == pytest.approx(0.5)


def test_skill_of_repeats_is_one_minus_the_ratio_of_errors() -> None:
    task = TASKS["period-12"]
    drawn = task.draw()
    forecast = drawn.best + np.random.default_rng(0).normal(size=drawn.best.shape)
    score = score_task(task, drawn, forecast)
    median = np.median(drawn.label, axis=1, keepdims=True)
    error = np.abs(drawn.label - forecast[:, 4]).mean()
    assert score.skill.value == pytest.approx(1 - error / np.abs(drawn.label - median).mean())
    assert score.skill.low is not None
    assert score.skill.high is not None
    assert score.skill.low < score.skill.value < score.skill.high


def test_seasonal_naive_skill_is_that_of_the_tasks() -> None:
    task = TASKS["period-12-noise-0.3"]
    drawn = task.draw()
    naive = seasonal_naive(drawn.context, 12, task.horizon)
    score = score_task(task, drawn, np.repeat(naive[:, None], 9, axis=1))
    assert score.skill.value == pytest.approx(score.seasonal_naive)


def test_one_series_has_no_interval_and_a_flat_task_is_refused() -> None:
    alone = TASKS["period-7"].model_copy(update={"num_series": 1})
    assert mixture(alone, 0.5).skill.low is None
    with pytest.raises(UsageError, match="'random-walk' cannot distinguish models: for its 1 ser"):
        probe("reference/bolt-nano", num_series=1, on_task=lambda *_: pytest.fail("forecast"))
    with pytest.raises(UsageError, match="'random-walk' cannot distinguish"):
        ProbeConfig(num_series=1).check_reads(load("reference/bolt-nano").forecaster)
    flat = ProbeTask(name="flat", process=Structural(), context_length=20)
    with pytest.raises(UsageError, match="'flat' cannot distinguish"):
        mixture(flat, 1.0)


def test_resamples_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(draws("season", 9)))
    monkeypatch.setattr("tscompress.probing.skill.MAX_DRAWS", 700)
    parts = list(draws("season", 9))
    assert whole.shape == (1000, 8)
    assert len(parts) == 13
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_draws_that_are_not_defined_widen_an_interval() -> None:
    """They took it away, and what had none was taken as sure."""
    spread = np.linspace(0, 1, 1000)
    whole = estimate(0.5, spread)
    assert (whole.low, whole.high) == (pytest.approx(0.025), pytest.approx(0.975))
    few, many = spread.copy(), spread.copy()
    few[500:510] = np.nan
    many[400:600] = np.nan
    some, most = estimate(0.5, few), estimate(0.5, many)
    assert some.low == pytest.approx(0.015, abs=1e-3)
    assert some.high == pytest.approx(0.985, abs=1e-3)
    assert (most.low, most.high) == (0, 1)
    assert estimate(0.5, np.full(1000, np.nan)).low is None


def test_a_random_walk_has_an_interval() -> None:
    """In some resamples its best constant is perfect."""
    walk = TASKS["random-walk"].model_copy(update={"num_series": 8})
    score = mixture(walk, 0.6)
    assert not np.isfinite(score.draws()).all()
    assert score.skill.low is not None
    assert score.skill.low < score.skill.value
    result = ProbeResult(model="m", seed=0, tasks=(score, mixture(TASKS["period-4"], 0.7)))
    assert result.overall().low is not None
    assert result.groups()["stochastic"].high is not None


# --------------------------------------------------------------------------------------------------
# Two models
# --------------------------------------------------------------------------------------------------


def test_lost_and_absent_skills_are_named() -> None:
    shares = {"period-4": 1.0, "period-7": 0.0, "period-12": 0.8, "linear-trend": 0.9}
    original = result_of("big", shares)
    compressed = result_of("small", {**shares, "period-12": 0.2})
    comparison = compressed.against(original)
    changes = {task.name: task.change for task in comparison.tasks}
    assert changes == {
        "period-4": "kept", "period-7": "absent", "period-12": "lost", "linear-trend": "kept",
    }  # fmt: skip
    seasons, trends = comparison.groups
    assert (seasons.able, seasons.tasks) == (2, 3)
    assert seasons.kept is not None
    assert seasons.kept.value == pytest.approx(1.2 / 1.8)
    assert trends.kept is not None
    assert trends.kept.value == pytest.approx(1)
    text = "\n".join(comparison.lines())
    assert "lost in seasons, 67%" in text
    assert "period-12 (0.80 → 0.20)" in text
    assert "could not be lost: period-7; the original cannot do these (skill 0.1 or less" in text
    assert "3 of 4 tasks" in text


def test_a_model_keeps_all_of_itself() -> None:
    original = result_of("big", {"period-4": 0.7, "ar1": 0.5})
    comparison = compare_probes(original, original)
    assert comparison.kept is not None
    assert (comparison.kept.low, comparison.kept.value, comparison.kept.high) == (1, 1, 1)
    assert "none of them got worse" in comparison.lines()[0]
    nothing = result_of("none", {"period-4": 0.0, "ar1": 0.0})
    assert compare_probes(original, nothing).kept is None
    assert "nothing to lose" in compare_probes(original, nothing).lines()[0]
    assert {task.change for task in compare_probes(original, nothing).tasks} == {"gained"}


def test_only_the_same_series_are_compared() -> None:
    one, other = result_of("a", {"period-4": 1.0}), result_of("b", {"period-5": 1.0})
    with pytest.raises(UsageError, match="different tasks or seeds"):
        one.against(other)
    with pytest.raises(UsageError, match="different tasks or seeds"):
        one.against(one.model_copy(update={"seed": 1}))


def test_groups_count_once_and_a_failure_is_bounded() -> None:
    result = result_of("a", {"period-4": 1.0, "period-5": 0.5, "linear-trend": -9.0})
    groups = result.groups()
    assert groups["seasons"].value == pytest.approx(0.75)
    assert groups["trends"].value == FLOOR
    assert result.overall().value == pytest.approx((0.75 + FLOOR) / 2)
    assert result.skills()["linear-trend"] < FLOOR


def test_results_are_read_back(tmp_path: Path) -> None:
    original, compressed = (result_of(n, {"period-4": 0.9, "gaps-7": 0.5}) for n in "ab")
    path = tmp_path / "probe.json"
    original.save(path)
    assert ProbeResult.load(path) == original
    path.write_text(path.read_text() + " " * 2**24)  # of thousands of series
    assert ProbeResult.load(path) == original
    path.write_text(json.dumps(probe_content(compressed, original), allow_nan=False))
    assert load_probes(path) == (compressed, original)
    for content in ("{", "[]", '{"result": {"model": 1}}'):
        path.write_text(content)
        with pytest.raises(DataError):
            load_probes(path)


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


def test_every_family_is_probed_the_same_way_twice(checkpoint: Path) -> None:
    first = tscompress.probe(checkpoint, FEW, num_series=3)
    assert first == probe(tscompress.load(checkpoint), FEW, num_series=3)
    assert first.model == checkpoint.name
    assert [score.name for score in first.tasks] == FEW
    assert (first.num_samples is None) == (checkpoint.name != "chronos-t5")
    other = probe(checkpoint, FEW[:2], num_series=3, seed=1)
    assert other.skills()["period-4"] != first.skills()["period-4"]
    # A task alone has the forecasts that it has among others.
    assert probe(checkpoint, ["period-7"], num_series=3).tasks[0] == first.tasks[1]


def test_chronos_t5_has_half_of_the_series_by_default(
    checkpoints: dict[str, Path],
) -> None:
    own = TASKS["gaps-7"].model_copy(update={"name": "own", "num_series": 3})
    for family, count in (("chronos-t5", 16), ("chronos-bolt", 32)):
        found = probe(checkpoints[family], [TASKS["short-7"], own])
        assert [score.task.num_series for score in found.tasks] == [count, 3]


def test_horizons_beyond_the_models_own_are_rolled_out(checkpoint: Path) -> None:
    task = TASKS["long-12"].model_copy(update={"num_series": 2, "horizon": 40})
    (score,) = probe(checkpoint, [task], num_samples=None).tasks
    assert len(score.example.label) == len(score.example.forecast[0]) == 40


def test_a_pipeline_that_stops_early_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tscompress.load(checkpoints["chronos-bolt"])
    predict = type(loaded.forecaster).predict
    monkeypatch.setattr(
        type(loaded.forecaster), "predict", lambda *a, **k: predict(*a, **k)[..., :5]
    )
    with pytest.raises(UsageError, match=r"5 steps, .*'gaps-7'"):
        probe(loaded, ["gaps-7"], num_series=2)


def test_forecasts_that_are_not_finite_are_refused(checkpoints: dict[str, Path]) -> None:
    loaded = tscompress.load(checkpoints["chronos-bolt"])
    next(loaded.model.parameters()).data[:] = np.nan
    with pytest.raises(DataError, match="NaN or infinity at the task 'gaps-7'"):
        probe(loaded, ["gaps-7"], num_series=2)


@pytest.mark.parametrize(
    "options", [{"tasks": []}, {"tasks": "gaps"}, {"num_series": 0}, {"seed": -1}]
)
def test_bad_options_are_refused(checkpoints: dict[str, Path], options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        probe(checkpoints["chronos-bolt"], **options)  # type: ignore[arg-type]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tscompress", "probe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_the_command_shows_writes_and_compares(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkpoints["chronos-bolt"])
    few = (model, "--tasks", "period-4,gaps", "--num-series", "3")
    code, out, _ = command(capsys, *few, "--against", model)
    assert code == 0
    assert "skill of chronos-bolt (2)" in out
    assert "gaps-12-noise-0.1" in out
    output = tmp_path / "probe.json"
    apart = (model, "--tasks", "period-4", "--tasks", "gaps", *few[3:])
    code, out, _ = command(capsys, *apart, "--against", model, "--json", "--output", str(output))
    content = json.loads(out)
    assert content["comparison"]["lines"]
    assert content["summary"]["groups"].keys() == {"seasons", "gaps"}
    assert "losses" not in content["result"]["tasks"][0]
    compressed, original = load_probes(output)
    assert compressed.skills() == original.skills()
    assert probe_tables(compressed)
    code, _, err = command(capsys, *few, "--output", str(output))
    assert (code, "--force" in err) == (2, True)


def test_a_quantile_model_is_compared_with_one_that_draws_samples(
    checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bolt, t5 = (str(checkpoints[name]) for name in ("chronos-bolt", "chronos-t5"))
    few = ("--tasks", "period-4", "--num-samples", "3", "--json")
    code, out, err = command(capsys, bolt, "--against", t5, *few)
    assert code == 0, err
    sizes = [
        json.loads(out)[key]["tasks"][0]["task"]["num_series"] for key in ("result", "against")
    ]
    assert sizes[0] == sizes[1] == TASKS["period-4"].num_series // 2


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("--tasks", "gaps,nothing"), 2, "no task 'nothing'; groups: seasons"),
        (("--tasks-file", "none.yaml"), 2, "no file of tasks"),
        (("--num-samples", "3", "--tasks", "gaps"), 2, "num_samples"),
        (("--batch-size", "0"), 2, "batch_size"),
    ],
)
def test_invalid_input_is_refused_in_one_line(
    checkpoints: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    exit_code: int,
    says: str,
) -> None:
    code, out, err = command(capsys, str(checkpoints["chronos-bolt"]), *arguments)
    assert (code, out) == (exit_code, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert says in line
    assert "Traceback" not in err


def test_a_recipe_with_an_unknown_task_is_refused_before_the_work(tmp_path: Path) -> None:
    recipe = Recipe(
        model="nowhere/none", output=str(tmp_path / "out"), probe=ProbeConfig(tasks=("nothing",))
    )
    with pytest.raises(UsageError, match="no task 'nothing'"):
        run(recipe)
    with pytest.raises(ValueError, match="speed"):
        ProbeConfig.model_validate({"speed": 3})
    assert load_recipe(ROOT / "recipes/demo.yaml").probe == ProbeConfig()


def test_a_model_for_profiling_only_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(TscompressError, match="does not forecast"):
        probe(tmp_path / "t5")
    code, _, err = command(capsys, str(tmp_path / "t5"))
    assert (code, "does not forecast" in err) == (1, True)
