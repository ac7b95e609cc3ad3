"""The response to covariates: oracles at the ends of every measure, comparisons, who is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import Chronos2Pipeline
from shared_fixtures import Command, assert_refused, tiny_chronos2

from tscompress.errors import DataError, UsageError
from tscompress.probing.measure import probe
from tscompress.probing.regressions import (
    GROUP,
    RESPONSES,
    SHIFT,
    Regressions,
    ResponseTask,
    ridge_regression,
    two_stage,
)
from tscompress.probing.responses import Medians, ResponseScore, score_response
from tscompress.probing.results import ProbeResult, load_probes
from tscompress.probing.tables import probe_tables
from tscompress.probing.tasks import TASKS, choose_tasks

Array = np.ndarray[Any, np.dtype[np.float64]]
EVERY = list(RESPONSES.values())
EXOGENOUS = [task for task in EVERY if not task.confounded]
CONFOUNDED = [task for task in EVERY if task.confounded]


def each(tasks: Sequence[ResponseTask]) -> Any:
    return pytest.mark.parametrize("task", tasks, ids=[task.name for task in tasks])


def responding(
    task: ResponseTask, coefficients: Array, *, leak: float = 0.0, shuffled: float = 0.0
) -> ResponseScore:
    """Of a forecaster with these coefficients ``[N]``, as accurate as ridge regression."""
    drawn = task.draw()
    points, _ = ridge_regression(drawn, task.noise**2)
    change = np.zeros_like(points)
    change[np.arange(len(points)), drawn.steps] = SHIFT * coefficients
    change += np.roll(change, 1, axis=1) * leak
    level = np.repeat(drawn.context.mean(axis=1, keepdims=True), task.horizon, axis=1)
    return score_response(
        task, drawn, Medians(points, points + change, level, level + shuffled * change)
    )


def result_of(name: str, share: float, *, leak: float = 0.0) -> ProbeResult:
    scores = [responding(task, share * task.draw().associations, leak=leak) for task in EVERY]
    return ProbeResult(model=name, seed=0, tasks=(), responses=tuple(scores))


class LeastSquares(Chronos2Pipeline):
    """On the covariates that the pipeline is given, past and future."""

    def predict_quantiles(
        self, inputs: Sequence[Any], prediction_length: int, quantile_levels: list[float], **_: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rows = [self.forecast(one, prediction_length)[None] for one in inputs]  # [1, H]
        return [row[..., None].repeat(1, 1, len(quantile_levels)) for row in rows], rows

    def forecast(self, given: Any, horizon: int) -> torch.Tensor:
        past, ahead = given["past_covariates"], given["future_covariates"]
        columns = [np.concatenate([past[name].numpy(), ahead[name].numpy()]) for name in past]
        length = len(given["target"])
        table = np.stack([np.ones(length + horizon), *columns], axis=1).astype(np.float64)
        weights, *_ = np.linalg.lstsq(table[:length], given["target"].numpy(), rcond=None)
        return torch.as_tensor(table[length:] @ weights, dtype=torch.float32)


class Blind(LeastSquares):
    """Forecasts the context's mean."""

    def forecast(self, given: Any, horizon: int) -> torch.Tensor:
        return given["target"].mean().repeat(horizon)


@pytest.fixture(scope="module")
def chronos2() -> torch.nn.Module:
    return tiny_chronos2().eval()


# --------------------------------------------------------------------------------------------------
# What is drawn
# --------------------------------------------------------------------------------------------------


@each(EVERY)
def test_one_value_ahead_of_one_covariate_is_shifted(task: ResponseTask) -> None:
    drawn = task.draw()
    change = drawn.shifted() - drawn.covariates
    assert drawn.covariates.shape == (
        task.num_series, task.covariates + task.instrument, task.context_length + task.horizon
    )  # fmt: skip
    np.testing.assert_allclose(change[change != 0], SHIFT)
    assert (np.count_nonzero(change, axis=(1, 2)) == 1).all()
    assert not change[..., : task.context_length].any()
    assert not change[:, task.covariates :].any()  # the instrument stays
    again = task.draw()
    np.testing.assert_array_equal(again.context, drawn.context)
    assert not np.array_equal(task.draw(1).context, drawn.context)


@each(EVERY)
def test_the_control_keeps_values_and_loses_the_effect(task: ResponseTask) -> None:
    drawn = task.model_copy(update={"num_series": 400}).draw()
    shuffled = drawn.shuffled()
    np.testing.assert_array_equal(
        np.sort(shuffled.covariates, axis=2), np.sort(drawn.covariates, axis=2)
    )
    _, before = ridge_regression(drawn, task.noise**2)
    _, after = ridge_regression(shuffled, task.noise**2)
    assert np.corrcoef(before, drawn.associations)[0, 1] > 0.95
    assert abs(np.corrcoef(after, drawn.associations)[0, 1]) < 0.15


@pytest.mark.parametrize("instrument", [False, True])
def test_estimates_meet_their_closed_form_limits(instrument: bool) -> None:
    task = ResponseTask(
        name="long", confounded=True, instrument=instrument, context_length=8000, num_series=40
    )
    drawn = task.draw()
    bias = drawn.associations - drawn.effects
    _, given = ridge_regression(drawn, 0)
    np.testing.assert_allclose(given, drawn.associations, atol=0.12)
    alone = drawn._replace(covariates=drawn.covariates[:, :1])
    _, of_x = ridge_regression(alone, 0)
    np.testing.assert_allclose(of_x, drawn.effects + task.least_squares_limit * bias, atol=0.12)
    if instrument:
        assert task.least_squares_limit == pytest.approx(0.6)
        np.testing.assert_allclose(two_stage(drawn), drawn.effects, atol=0.15)


@pytest.mark.parametrize(
    "options",
    [{"covariates": 2, "confounded": True}, {"instrument": True}, {"noise": 0}, {"covariates": 0}],
)
def test_tasks_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ResponseTask(name="one", **options)


# --------------------------------------------------------------------------------------------------
# Oracles
# --------------------------------------------------------------------------------------------------


@each(EVERY)
def test_the_best_response_has_slope_1_and_no_leakage(task: ResponseTask) -> None:
    score = responding(task, task.draw().associations)
    assert score.slope.value == pytest.approx(1)
    assert score.r_squared.value == pytest.approx(1)
    assert score.leakage is not None
    assert score.leakage.value == pytest.approx(0, abs=1e-12)
    assert score.regret.value == pytest.approx(0, abs=1e-12)
    assert (score.slope.low, score.slope.high) == (pytest.approx(1), pytest.approx(1))
    assert score.shuffled_slope.value == 0
    assert score.shuffled_regret.value == pytest.approx(1)
    assert score.ridge_slope == pytest.approx(1, abs=0.05)
    assert score.ridge_r_squared > 0.98


def test_size_noise_and_leakage_are_told_apart() -> None:
    task = RESPONSES["response-2"]
    true = task.draw().associations
    half = responding(task, 0.5 * true, leak=0.25)
    assert half.slope.value == pytest.approx(0.5)
    assert half.r_squared.value == pytest.approx(1)
    assert half.leakage is not None
    assert half.leakage.value == pytest.approx(0.2)
    noisy = responding(task, true + np.random.default_rng(0).standard_normal(len(true)))
    assert noisy.r_squared.value == pytest.approx(0.5, abs=0.15)
    assert noisy.slope.low is not None
    assert noisy.slope.high is not None
    assert noisy.slope.low < 1 < noisy.slope.high


@each(EVERY)
def test_a_blind_forecaster_does_not_respond(task: ResponseTask) -> None:
    score = responding(task, np.zeros(task.num_series))
    assert (score.slope.value, score.r_squared.value, score.leakage) == (0, 0, None)
    assert score.association is None
    assert not score.responds


@each(CONFOUNDED)
def test_association_is_1_and_causal_effect_0(task: ResponseTask) -> None:
    drawn = task.draw()
    for share in (0.0, 1.0):
        mixed = drawn.effects + share * (drawn.associations - drawn.effects)
        score = responding(task, 0.4 * mixed)  # shrinkage is not causality
        assert score.association is not None
        assert score.association.value == pytest.approx(share, abs=1e-9)
    assert score.ridge_association == pytest.approx(1, abs=0.1)
    assert (score.two_stage_association is None) == (not task.instrument)
    if score.two_stage_association is not None:
        assert score.two_stage_association == pytest.approx(0, abs=0.15)


def test_least_squares_in_a_pipeline_is_an_oracle_and_a_mean_is_blind(
    chronos2: torch.nn.Module,
) -> None:
    oracle = probe(LeastSquares(chronos2), [GROUP])
    assert [score.name for score in oracle.responses] == list(RESPONSES)
    for score in oracle.responses:
        assert score.slope.value == pytest.approx(1, abs=0.05)
        assert score.leakage is not None
        assert score.leakage.value < 1e-5
        assert score.regret.value == pytest.approx(0, abs=0.05)
        assert score.shuffled_slope.value == pytest.approx(0, abs=0.1)
        assert score.shuffled_regret.value > 0.95
    for score in probe(Blind(chronos2), [GROUP], num_series=4).responses:
        assert score.slope.value == 0
        assert score.regret.value == pytest.approx(1, abs=1e-6)


def test_a_single_group_has_no_intervals() -> None:
    task = RESPONSES["instrument"].model_copy(update={"num_series": 1})
    score = responding(task, task.draw().associations)
    assert score.slope.value == pytest.approx(1)
    assert score.slope.low is None
    assert score.association is None


# --------------------------------------------------------------------------------------------------
# Two models
# --------------------------------------------------------------------------------------------------


def test_there_is_no_share_of_a_gain_that_may_be_none() -> None:
    task = RESPONSES["response-2"]
    accurate = responding(task, task.draw().associations)
    of = accurate.columns
    pairs = zip(of.error_of_ridge, of.error_of_mean, strict=True)
    error = tuple(low + (high - low) * (1.9 * (i % 2)) for i, (low, high) in enumerate(pairs))
    unsure = accurate.model_copy(update={"columns": of.model_copy(update={"error": error})})
    compressed, original = (
        ProbeResult(model=name, seed=0, tasks=(), responses=(score,))
        for name, score in (("small", accurate), ("big", unsure))
    )
    found = compressed.against(original).response
    assert found is not None
    assert found.gain_kept is None
    (change,) = found.tasks
    assert (change.gain_kept, change.change) == (None, "kept")
    back = original.against(compressed).response
    assert back is not None
    assert back.gain_kept is not None


def test_a_lost_response_is_named_with_paired_intervals() -> None:
    original, compressed = result_of("big", 0.8), result_of("small", 0.4, leak=0.5)
    found = compressed.against(original).response
    assert found is not None
    assert {one.change for one in found.tasks} == {"lost"}
    assert found.slope_kept is not None
    assert found.slope_kept.value == pytest.approx(0.5)
    # Both models have the same groups: half of each group's response is half of any resample.
    assert found.slope_kept.low == pytest.approx(0.5)
    assert found.gain_kept is not None
    assert found.gain_kept.value == pytest.approx(1)
    (line,) = compressed.against(original).lines()
    assert "response to covariates was lost, 50%" in line
    assert "slope 0.80 → 0.40" in line
    assert "leakage 0.00 → 0.33" in line


def test_a_model_keeps_its_own_response() -> None:
    original = result_of("big", 0.8)
    found = original.against(original)
    assert found.response is not None
    assert found.response.slope_kept is not None
    kept = found.response.slope_kept
    assert (kept.low, kept.value, kept.high) == (1, 1, 1)
    assert {one.change for one in found.response.tasks} == {"kept"}
    assert found.lines() == []
    nothing = result_of("none", 0.0)
    (line,) = original.against(nothing).lines()
    assert "does not respond" in line


def test_only_the_same_groups_are_compared() -> None:
    one = result_of("a", 1.0)
    with pytest.raises(UsageError, match="different tasks or seeds"):
        one.model_copy(update={"responses": one.responses[:2]}).against(one)
    # A result of an earlier version took no response; the skills are compared all the same.
    assert one.against(one.model_copy(update={"responses": ()})).response is None


def test_results_are_read_back_and_earlier_ones_still_load(tmp_path: Path) -> None:
    result = result_of("big", 0.9)
    path = tmp_path / "probe.json"
    result.save(path)
    assert ProbeResult.load(path) == result
    content = json.loads(path.read_text())
    del content["result"]["responses"]
    path.write_text(json.dumps(content))
    assert ProbeResult.load(path).responses == ()
    content["result"]["responses"] = [{"slope": 1}]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError):
        load_probes(path)


@pytest.mark.parametrize("known", ["slope_kept", "gain_kept"])
def test_a_lost_response_is_told_by_the_shares_that_are_known(known: str) -> None:
    found = result_of("small", 0.4).against(result_of("big", 0.8)).response
    assert found is not None
    other = {"slope_kept": "gain_kept", "gain_kept": "slope_kept"}[known]
    (line,) = found.model_copy(update={other: None}).lines()
    assert "was lost" in line
    assert ("of its size" in line) == (known == "slope_kept")
    assert ("gain in accuracy" in line) == (known == "gain_kept")


def test_tables_hold_the_values_and_the_kept_shares() -> None:
    original, compressed = result_of("big", 0.8), result_of("small", 0.4)
    table, kept = probe_tables(compressed, original)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == list(RESPONSES)
    assert all(cell.startswith("0.40") for cell in cells[1])
    assert [cell.startswith("50%") for cell in kept.columns[3].cells] == [True] * len(RESPONSES)
    assert len(probe_tables(compressed)) == 1


# --------------------------------------------------------------------------------------------------
# Who is asked
# --------------------------------------------------------------------------------------------------


def test_they_are_chosen_by_name_group_and_pattern() -> None:
    assert choose_tasks([GROUP]) == tuple(EVERY)
    assert choose_tasks(["response-*", "ar1"]) == (TASKS["ar1"], *EXOGENOUS)
    with pytest.raises(UsageError, match=r"groups: .*response"):
        choose_tasks(["respond"])


def test_chronos_2_is_asked_by_the_command(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    model, output = checkpoints["chronos-2"], tmp_path / "probe.json"
    asked = ("probe", model, "--tasks", "response,period-4", "--num-series", 4)
    outcome = command(*asked, "--against", model, "--json", "--output", output)
    assert outcome.code == 0
    content = outcome.json
    assert [one["task"]["name"] for one in content["result"]["responses"]] == list(RESPONSES)
    assert "columns" not in content["result"]["responses"][0]
    assert {one["name"] for one in content["comparison"]["response"]["tasks"]} == set(RESPONSES)
    assert len(load_probes(output)[0].responses) == len(RESPONSES)
    shown = command("probe", model, "--tasks", GROUP, "--num-series", 2)
    assert "bias" in shown.out
    assert "confounded" in shown.out


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
@pytest.mark.parametrize("asked", [GROUP, "confounded"])
def test_other_families_are_refused_in_one_line(
    checkpoints: dict[str, Path], command: Command, family: str, asked: str
) -> None:
    outcome = command("probe", checkpoints[family], "--tasks", asked)
    assert_refused(outcome, 2, f"has covariates, and {family} reads none")


def test_ridge_regression_shrinks_to_the_mean() -> None:
    drawn: Regressions = RESPONSES["response-4"].draw()
    points, weights = ridge_regression(drawn, 1e12)
    np.testing.assert_allclose(weights, 0, atol=1e-6)
    level = np.repeat(drawn.context.mean(axis=1, keepdims=True), points.shape[1], axis=1)
    np.testing.assert_allclose(points, level, atol=1e-6)
