"""Tasks with covariates: what is drawn, models that use them and that do not, and who is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from shared_fixtures import Command, assert_refused, tiny_chronos2

import tscompress
from tscompress.compression.calibration import CalibrationConfig
from tscompress.errors import DataError, RecipeError, UsageError
from tscompress.evaluation.forecasting import predict
from tscompress.families.covariates import Covariates, Joint
from tscompress.families.registry import adapter_of_pipeline
from tscompress.plan.schedules import RankSchedule
from tscompress.probing.covariates import Covariate, Driven
from tscompress.probing.measure import ProbeConfig, probe, score_task
from tscompress.probing.results import ProbeResult, TaskScore, load_probes
from tscompress.probing.tables import probe_tables
from tscompress.probing.tasks import TASKS, ProbeTask, choose_tasks, load_tasks
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.run import run

EVERY = [task for task in TASKS.values() if task.covariates]
Array = np.ndarray[Any, np.dtype[np.float64]]


def without_noise(name: str) -> ProbeTask:
    task = TASKS[name]
    return task.model_copy(update={"process": task.process.model_copy(update={"noise": 0.0})})


class Regression(Chronos2Pipeline):
    """Least squares on covariates, their squares and their lags, from what the pipeline is given.

    With ``period`` also on the steps of a season.
    """

    lags: tuple[int, ...] = (0, 4, 24)
    period: int | None = None

    def predict_quantiles(
        self,
        inputs: Sequence[Any],
        prediction_length: int,
        quantile_levels: list[float],
        **_: Any,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        points = [self.forecast(one, prediction_length) for one in inputs]
        rows = [torch.as_tensor(point, dtype=torch.float32)[None] for point in points]  # [1, H]
        return [row[..., None].repeat(1, 1, len(quantile_levels)) for row in rows], rows

    def forecast(self, given: Any, horizon: int) -> Array:
        target = given["target"] if isinstance(given, dict) else given
        total = len(target) + horizon
        columns = [np.ones(total), *self.season(total)]
        for name, past in self.covariates(given).items():
            assert len(past) == len(target)
            future = given["future_covariates"].get(name, torch.full((horizon,), torch.nan))
            assert len(future) == horizon
            series = np.concatenate([past.numpy(), future.numpy()])
            moved = [np.r_[np.full(lag, np.nan), series[: total - lag]] for lag in self.lags]
            columns += [column for row in moved for column in (row, row**2)]
        usable = [c for c in columns if np.isfinite(c[len(target) :]).all()]
        table = np.stack(usable, axis=1).astype(np.float64)  # [T + H, F]
        whole = np.isfinite(table[: len(target)]).all(axis=1)
        known = target.numpy().astype(np.float64)[whole]
        weights, *_ = np.linalg.lstsq(table[: len(target)][whole], known, rcond=None)
        return np.asarray(table[len(target) :] @ weights)

    def covariates(self, given: Any) -> dict[str, torch.Tensor]:
        return given["past_covariates"] if isinstance(given, dict) else {}

    def season(self, total: int) -> list[Array]:
        if self.period is None:
            return []
        return [(np.arange(total) % self.period == step) * 1.0 for step in range(1, self.period)]


class Ignorant(Regression):
    """Looks at no covariate."""

    def covariates(self, given: Any) -> dict[str, torch.Tensor]:
        return {}


class Seasonal(Regression):
    period = 12


@pytest.fixture(scope="module")
def chronos2() -> torch.nn.Module:
    return tiny_chronos2().eval()


# --------------------------------------------------------------------------------------------------
# What is drawn
# --------------------------------------------------------------------------------------------------


def test_there_is_a_task_for_each_use_of_covariates() -> None:
    assert {task.name for task in EVERY} == {
        "covariate-lag-0", "covariate-lag-4", "covariate-noise", "covariate-squared", "promotions",
        "leading-series", "covariate-and-season", "covariate-with-gap", "one-covariate-of-8",
        "irrelevant-covariates",
    }  # fmt: skip
    assert {task.group for task in EVERY} == {"covariates"}
    assert choose_tasks(["covariates"]) == tuple(EVERY)


@pytest.mark.parametrize("task", EVERY, ids=[task.name for task in EVERY])
def test_known_covariates_come_first_and_have_a_future(task: ProbeTask) -> None:
    drawn = task.draw()
    assert drawn.covariates is not None
    length = task.context_length
    count, total = len(task.covariates), length + task.horizon
    assert drawn.covariates.shape == (task.num_series, count, total)
    future = np.isfinite(drawn.covariates[..., length:])
    assert future[:, : drawn.known].all()
    assert not future[:, drawn.known :].any()


def test_a_gap_is_one_stretch_of_the_past() -> None:
    drawn = TASKS["covariate-with-gap"].draw()
    assert drawn.covariates is not None
    missing = np.isnan(drawn.covariates[:, 0])
    np.testing.assert_array_equal(missing.sum(axis=1), round(0.3 * 192))
    starts = np.diff(np.pad(missing, ((0, 0), (1, 1))).astype(int), axis=1) == 1
    np.testing.assert_array_equal(starts.sum(axis=1), 1)
    assert not missing[:, 192:].any()
    lagged = ProbeTask(
        name="lagged",
        process=Driven(covariates=(Covariate(lag=30, missing=0.5),)),
        context_length=100,
    ).draw()
    assert lagged.covariates is not None
    assert np.isfinite(lagged.covariates[:, 0, 70:]).all()  # what the label depends on


def test_promotions_are_pulses_and_only_raise() -> None:
    drawn = without_noise("promotions").draw()
    assert drawn.covariates is not None
    pulses = drawn.covariates[:, 0]
    assert set(np.unique(pulses)) == {0.0, 1.0}
    assert 0.1 < pulses.mean() < 0.25
    values = np.concatenate([drawn.context, drawn.label], axis=1)
    base = values.min(axis=1, keepdims=True)
    height = values.max(axis=1, keepdims=True) - base
    np.testing.assert_allclose(values, base + height * pulses)
    assert ((height >= 1.5) & (height <= 4.5)).all()


def test_a_leading_series_is_the_target_some_steps_before() -> None:
    drawn = without_noise("leading-series").draw()
    assert drawn.covariates is not None
    lead = drawn.covariates[:, 0]
    values = np.concatenate([drawn.context, drawn.label], axis=1)
    for series, leading in zip(values[:, 24:], lead[:, :192], strict=True):
        assert abs(np.corrcoef(series, leading)[0, 1]) == pytest.approx(1)


# --------------------------------------------------------------------------------------------------
# Models that use covariates, and models that do not
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("covariate-lag-0", Regression),
        ("covariate-lag-4", Regression),
        ("covariate-noise", Regression),
        ("covariate-squared", Regression),
        ("promotions", Regression),
        ("leading-series", Regression),
        ("covariate-with-gap", Regression),
        ("one-covariate-of-8", Regression),
        ("covariate-and-season", Seasonal),
    ],
)
def test_a_model_that_uses_covariates_perfectly_has_skill_1(
    chronos2: torch.nn.Module, name: str, kind: type[Regression]
) -> None:
    (score,) = probe(kind(chronos2), [without_noise(name)]).tasks
    assert score.skill.value == pytest.approx(1, abs=1e-3)
    assert score.without_covariates is not None
    assert score.covariates_add is not None
    assert score.without_covariates.value < 0.5
    assert score.covariates_add.value == pytest.approx(
        score.skill.value - score.without_covariates.value
    )
    assert score.covariates_add.low is not None
    assert score.covariates_add.low > 0.5


def test_a_model_that_ignores_covariates_has_equal_skill_without(chronos2: torch.nn.Module) -> None:
    found = probe(Ignorant(chronos2), ["covariates"], num_series=5)
    for score in found.tasks:
        assert score.without_covariates == score.skill
        assert score.covariates_add is not None
        assert (score.covariates_add.low, score.covariates_add.high) == (0, 0)
        assert score.losses.without_covariates == score.losses.model


def test_covariates_without_an_effect_cost_a_good_model_little(chronos2: torch.nn.Module) -> None:
    pipeline = Seasonal(chronos2)
    pipeline.lags = (0,)
    (score,) = probe(pipeline, ["irrelevant-covariates"]).tasks
    assert score.skill.value > 0.9
    assert score.covariates_add is not None
    assert abs(score.covariates_add.value) < 0.05


def scored(name: str, share: float, alone: float) -> TaskScore:
    """Of a forecaster at shares of the way from the best constant to the best, with and without."""
    task = TASKS[name]
    drawn = task.draw()
    constant = np.broadcast_to(drawn.constant[:, None, None], drawn.best.shape)
    mixed = [part * drawn.best + (1 - part) * constant for part in (share, alone)]
    return score_task(task, drawn, *mixed)


def result_of(name: str, shares: dict[str, tuple[float, float]]) -> ProbeResult:
    tasks = tuple(scored(task, *pair) for task, pair in shares.items())
    return ProbeResult(model=name, seed=0, tasks=tasks)


def test_lost_use_of_covariates_is_said() -> None:
    original = result_of("big", {
        "covariate-lag-0": (0.9, 0.0), "promotions": (0.8, 0.0), "covariate-and-season": (0.9, 0.4),
        "irrelevant-covariates": (0.9, 0.9),
    })  # fmt: skip
    compressed = result_of("small", {
        "covariate-lag-0": (0.3, 0.0), "promotions": (0.8, 0.0), "covariate-and-season": (0.8, 0.3),
        "irrelevant-covariates": (0.6, 0.9),
    })  # fmt: skip
    found = compressed.against(original)
    changes = {one.name: one.change for one in found.covariates}
    assert changes == {
        "covariate-lag-0": "lost", "promotions": "kept", "covariate-and-season": "kept",
        "irrelevant-covariates": "misled",
    }  # fmt: skip
    assert found.covariates_kept is not None
    before, after = (
        sum(s.skill.value - s.losses.skill("without_covariates") for s in result.tasks[:3])
        for result in (original, compressed)
    )
    assert found.covariates_kept.value == pytest.approx(after / before)
    text = "\n".join(found.lines())
    assert "use of covariates was lost" in text
    assert "covariate-lag-0 (0.9" in text
    assert "small is misled by covariates: irrelevant-covariates" in text
    kept = original.against(original)
    assert kept.covariates_kept is not None
    assert kept.covariates_kept.value == 1
    assert "use of covariates" not in "\n".join(kept.lines())


def test_a_model_that_ignores_keeps_nothing_of_the_use(chronos2: torch.nn.Module) -> None:
    tasks = ["covariate-lag-0", "leading-series"]
    used, ignored = (probe(kind(chronos2), tasks) for kind in (Regression, Ignorant))
    found = ignored.against(used)
    assert found.covariates_kept is not None
    assert found.covariates_kept.value == 0
    assert {one.change for one in found.covariates} == {"lost"}
    assert len(probe_tables(ignored, used)) == 3


def test_results_with_covariates_are_read_back(tmp_path: Path) -> None:
    result = result_of("big", {"covariate-lag-0": (0.9, 0.1), "leading-series": (0.5, 0.0)})
    path = tmp_path / "probe.json"
    result.save(path)
    assert ProbeResult.load(path) == result
    content = json.loads(path.read_text())
    for spoil in ("without_covariates", "covariates_add"):
        other = json.loads(json.dumps(content))
        other["result"]["tasks"][0][spoil] = None
        path.write_text(json.dumps(other))
        with pytest.raises(DataError):
            load_probes(path)


# --------------------------------------------------------------------------------------------------
# Chronos-2
# --------------------------------------------------------------------------------------------------


def random_covariates(count: int, lengths: Sequence[int], known: int) -> list[Covariates]:
    draws = torch.Generator().manual_seed(1)
    return [
        Covariates(
            torch.randn(count, length, generator=draws), torch.randn(known, 8, generator=draws)
        )
        for length in lengths
    ]


@pytest.fixture(scope="module")
def pipeline(checkpoints: dict[str, Path]) -> BaseChronosPipeline:
    return tscompress.load(checkpoints["chronos-2"]).forecaster


def test_covariates_reach_the_stock_pipeline(pipeline: BaseChronosPipeline) -> None:
    adapter = adapter_of_pipeline(pipeline)
    contexts = [torch.randn(length) for length in (40, 33)]
    given = random_covariates(2, (40, 33), known=1)

    def quantiles(covariates: Sequence[Covariates]) -> torch.Tensor:
        each = zip(contexts, covariates, strict=True)
        tasks = [Joint(context[None], beside) for context, beside in each]
        return adapter.joint_quantiles(pipeline, tasks, 8, [0.1, 0.5])[:, 0]

    found = quantiles(given)
    assert found.shape == (2, 8, 2)
    stock, _ = pipeline.predict_quantiles(
        [
            {
                "target": context,
                "past_covariates": {"a": one.past[0], "b": one.past[1]},
                "future_covariates": {"a": one.future[0]},
            }
            for context, one in zip(contexts, given, strict=True)
        ],
        prediction_length=8,
        quantile_levels=[0.1, 0.5],
    )
    torch.testing.assert_close(found, torch.cat(list(stock)))
    for changed in (
        [one._replace(future=one.future + 1) for one in given],
        [one._replace(past=one.past * 2 + one.past**2) for one in given],
        [one._replace(future=one.future[:0]) for one in given],
    ):
        assert not torch.allclose(found, quantiles(changed))


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_forecasts_with_covariates_do_not_depend_on_batches(
    pipeline: BaseChronosPipeline, batch_size: Any
) -> None:
    lengths = [40, 33, 20, 40, 35]
    contexts = [torch.randn(length) for length in lengths]
    given = random_covariates(3, lengths, known=2)
    whole = predict(pipeline, contexts, 8, batch_size=32, covariates=given)
    assert whole.shape == (5, 9, 8)
    found = predict(pipeline, contexts, 8, batch_size=batch_size, covariates=given)
    np.testing.assert_allclose(found, whole, rtol=1e-3, atol=1e-4)


def test_parts_of_a_batch_have_their_covariates(
    pipeline: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [20, 33, 40]
    contexts = [torch.randn(length) for length in lengths]
    given = random_covariates(2, lengths, known=1)
    whole = predict(pipeline, contexts, 8, covariates=given)
    stock = type(pipeline).predict_quantiles

    def little_memory(self: Any, inputs: Sequence[Any], **options: Any) -> Any:
        if len(inputs) > 1:
            raise MemoryError
        return stock(self, inputs, **options)

    monkeypatch.setattr(type(pipeline), "predict_quantiles", little_memory)
    parts = predict(pipeline, contexts, 8, covariates=given)
    np.testing.assert_allclose(parts, whole, rtol=1e-3, atol=1e-4)


def test_chronos_2_is_asked_by_default(checkpoints: dict[str, Path]) -> None:
    names = [task.name for task in EVERY]
    found = probe(checkpoints["chronos-2"], num_series=2)
    assert [score.name for score in found.tasks] == list(TASKS)
    assert found.skipped == ()
    for score in found.tasks:
        assert (score.covariates_add is None) == (score.name not in names)
        assert len(score.example.covariates) == min(3, len(score.task.covariates))
    again = probe(checkpoints["chronos-2"], ["leading-series"], num_series=2)
    assert again.tasks[0] == found.tasks[names.index("leading-series") - len(names)]


# --------------------------------------------------------------------------------------------------
# Families without covariates
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
def test_other_families_read_no_covariates(checkpoints: dict[str, Path], family: str) -> None:
    pipeline = tscompress.load(checkpoints[family]).forecaster
    given = random_covariates(1, (30,), known=1)
    with pytest.raises(UsageError, match=f"{family} .* leave covariates"):
        predict(pipeline, [torch.randn(30)], 8, covariates=given)
    with pytest.raises(UsageError, match=f"'covariate-lag-0'.*{family}"):
        probe(checkpoints[family], [TASKS["covariate-lag-0"]])


def test_bolt_skips_them_with_a_word(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    few = {name: TASKS[name] for name in ("period-4", "covariate-lag-0", "promotions")}
    for module in ("tasks", "measure"):
        monkeypatch.setattr(f"tscompress.probing.{module}.TASKS", few)
    monkeypatch.setattr("tscompress.probing.tasks.RESPONSES", {})
    bolt = probe(checkpoints["chronos-bolt"], num_series=3)
    assert bolt.skipped == ("covariate-lag-0", "promotions")
    assert list(bolt.skills()) == ["period-4"]
    # What only one of two models was asked is left out.
    other = probe(checkpoints["chronos-2"], num_series=3)
    assert [task.name for task in bolt.against(other).tasks] == ["period-4"]
    assert [task.name for task in other.against(bolt).tasks] == ["period-4"]
    outcome = command(
        "probe", checkpoints["chronos-bolt"], "--num-series", 3, "--against",
        checkpoints["chronos-2"],
    )  # fmt: skip
    assert outcome.code == 0
    words = " ".join(outcome.out.split())
    assert "2 tasks with covariates skipped: chronos-bolt reads none" in words
    assert "promotions" not in words


OWN = """
tasks:
  - name: sales
    context_length: 120
    horizon: 12
    num_series: 3
    process:
      kind: driven
      seasons: [{period: 7}]
      noise: 0.2
      covariates:
        - {shape: pulses, strength: 2}
        - {shape: smooth, lag: 12, known: false, missing: 0.2}
        - {strength: 0, count: 2}
"""


def test_own_tasks_have_covariates(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    (task,) = load_tasks(path)
    assert task.covariates == (
        "pulses", "noise, no effect", "noise, no effect", "smooth, lag 12, not known ahead",
    )  # fmt: skip
    drawn = task.draw()
    assert drawn.known == 3
    outcome = command("probe", checkpoints["chronos-2"], "--tasks-file", path, "--json")
    assert outcome.code == 0
    (score,) = outcome.json["result"]["tasks"]
    assert score["covariates_add"]["value"] == pytest.approx(
        score["skill"]["value"] - score["without_covariates"]["value"]
    )
    shown = command("probe", checkpoints["chronos-2"], "--tasks-file", path)
    assert "what covariates add" in shown.out


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
def test_tasks_with_covariates_are_refused_in_one_line(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command, family: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    for options in (("--tasks", "covariates"), ("--tasks-file", path)):
        outcome = command("probe", checkpoints[family], *options)
        assert_refused(outcome, 2, f"has covariates, and {family} reads none")


def test_a_recipe_for_bolt_is_refused_before_the_work(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = Recipe(
        model=str(checkpoints["chronos-bolt"]),
        output=str(tmp_path / "out"),
        schedule=RankSchedule(rank=2),
        calibration=CalibrationConfig(num_series=6, context_length=32, batch_size=3),
        probe=ProbeConfig(tasks=("promotions",)),
    )
    with pytest.raises(UsageError, match="'promotions' has covariates"):
        run(recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("lag: 12", "lag: 11", "lag of 11"),
        ("lag: 12", "lag: 120", "not shorter than the context"),
        ("lag: 12", "lag: 100", "share of 0.2"),
        ("strength: 0,", "strength: 0, lag: 2,", "leave out lag and effect"),
        ("shape: pulses,", "shape: pulses, effect: square,", "linear effect"),
        ("count: 2", "count: 63", "65 covariates are more than 64"),
        ("count: 2", "count: 0", "count"),
        ("shape: smooth", "shape: sharp", "shape"),
        ("known: false", "ahead: false", "unknown key 'tasks.0.process.covariates.1.ahead'"),
    ],
)
def test_a_bad_task_with_covariates_is_one_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises(RecipeError, match=says) as caught:
        load_tasks(path)
    assert "\n" not in str(caught.value)
