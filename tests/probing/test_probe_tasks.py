"""The tasks: what is drawn, and that the best possible forecast is the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import RecipeError, UsageError
from tscompress.evaluation.metrics import MEDIAN
from tscompress.probing.processes import Autoregressive, Intermittent, Season, Structural
from tscompress.probing.regressions import RESPONSES
from tscompress.probing.tasks import (
    PERIODS,
    TASKS,
    ProbeTask,
    choose_tasks,
    load_tasks,
    seasonal_naive,
)

#: Of the seasons alone, which differ in little else, the shortest and the longest period.
VARIOUS = [t for n, t in TASKS.items() if n[:7] != "period-" or t.season_length in (4, 52)]
with_various = pytest.mark.parametrize("task", VARIOUS, ids=[task.name for task in VARIOUS])


def many(task: ProbeTask, count: int = 400) -> ProbeTask:
    return task.model_copy(update={"num_series": count})


@with_various
def test_the_same_seed_gives_the_same_series(task: ProbeTask) -> None:
    first, again, other = task.draw(3), task.draw(3), task.draw(4)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first.label, other.label)
    assert first.context.shape == (task.num_series, task.context_length)
    assert first.label.shape == (task.num_series, task.horizon)
    assert first.best.shape == (task.num_series, 9, task.horizon)
    assert np.isfinite(first.label).all()


@with_various
def test_the_best_forecast_is_calibrated_and_best(task: ProbeTask) -> None:
    drawn = many(task).draw(1)
    error = drawn.label[:, None] - drawn.best  # [N, 9, H]
    assert (np.diff(drawn.best, axis=1) >= 0).all()
    if isinstance(task.process, Intermittent):  # of few values: levels are reached, not met
        assert ((error <= 0).mean(axis=(0, 2)) > np.array(QUANTILE_LEVELS) - 0.02).all()
    elif not task.process.continuous:
        assert np.abs(error).max() == 0
        return
    else:
        inside = (error[:, 0] >= 0) & (error[:, -1] <= 0)
        assert abs(inside.mean() - 0.8) < 0.03
    levels = np.array(QUANTILE_LEVELS)[:, None]
    loss = np.maximum(levels * error, (levels - 1) * error).mean()
    for shift in (0.9, 1.1):
        worse = drawn.label[:, None] - shift * drawn.best
        assert loss < np.maximum(levels * worse, (levels - 1) * worse).mean()


def test_there_is_a_task_for_each_period_noise_and_shape() -> None:
    for period in PERIODS:
        for name in (f"period-{period}", f"period-{period}-smooth-noise-0.3"):
            task = TASKS[name]
            assert task.season_length == period
            assert task.context_length >= 8 * period
            assert task.horizon == 24
    assert {task.group for task in TASKS.values()} == {
        "seasons", "noisy-seasons", "compound", "trends", "stochastic", "gaps", "intermittent",
        "short", "long", "covariates",
    }  # fmt: skip


def test_patterns_repeat_and_gaps_are_a_fifth() -> None:
    task = TASKS["gaps-7"]
    drawn, whole = task.draw(), task.model_copy(update={"missing": 0.0}).draw()
    assert np.isnan(drawn.context).mean() == pytest.approx(0.2, abs=0.01)
    np.testing.assert_array_equal(whole.context[:, :7], whole.context[:, 7:14])
    known = np.isfinite(drawn.context)
    np.testing.assert_array_equal(drawn.context[known], whole.context[known])


def test_a_walk_is_best_continued_by_its_last_value() -> None:
    drawn = TASKS["random-walk"].draw()
    last = np.repeat(drawn.context[:, -1:], 24, axis=1)
    np.testing.assert_allclose(drawn.best[:, MEDIAN], last)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 12), st.integers(1, 40), st.integers(0, 11), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_seasonal_naive_repeats(period: int, horizon: int, more: int, seed: int) -> None:
    pattern = np.random.default_rng(seed).normal(size=(3, period))
    length = 2 * period + more
    path = pattern[:, np.arange(length + horizon) % period]
    found = seasonal_naive(path[:, :length], period, horizon)
    np.testing.assert_array_equal(found, path[:, length:])
    gaps = path[:, :length].copy()
    gaps[:, length - 1 - more % period] = np.nan  # known one season before
    np.testing.assert_array_equal(seasonal_naive(gaps, period, horizon), found)


# --------------------------------------------------------------------------------------------------
# Which tasks
# --------------------------------------------------------------------------------------------------


def test_tasks_are_chosen_by_name_group_and_pattern() -> None:
    assert choose_tasks() == (*TASKS.values(), *RESPONSES.values())
    assert [task.name for task in choose_tasks(["ar1", "period-7"])] == ["period-7", "ar1"]
    assert len(choose_tasks(["period-7*"])) == 6
    assert {task.group for task in choose_tasks(["gaps", "gaps-7"])} == {"gaps"}
    with pytest.raises(UsageError, match=r"no task 'gap'"):
        choose_tasks(["seasons", "gap"])


WEEK = """
tasks:
  - name: half-hours
    context_length: 400
    horizon: 48
    num_series: 2
    process: {kind: structural, seasons: [{period: 48}, {period: 336, shape: smooth}], noise: 0.1}
  - name: stock
    group: mine
    context_length: 50
    process: {kind: autoregressive, coefficient: 1}
"""


def test_own_tasks_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(WEEK)
    own = load_tasks(tmp_path / "own.yaml")
    assert [task.group for task in own] == ["own", "mine"]
    assert own[0].process == Structural(
        seasons=(Season(period=48), Season(period=336, shape="smooth")), noise=0.1
    )
    assert own[1].process == Autoregressive(coefficient=1)
    assert own[0].draw().label.shape == (2, 48)
    assert choose_tasks(None, own) == own
    assert [task.name for task in choose_tasks(["mine", "ar1"], own)] == ["ar1", "stock"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("context_length: 400", "context_length: 300", "tasks.0: .*336 steps is longer than .*300"),
        ("horizon: 48", "horizont: 48", "unknown key 'tasks.0.horizont'"),
        ("horizon: 48", "horizon: 0", r"tasks.0.horizon: .*\(got 0\)"),
        ("period: 48}", "period: 1}", r"seasons.0.period: .*\(got 1\)"),
        ("coefficient: 1}", "coefficient: 1.5}", r"coefficient: .*\(got 1.5\)"),
        ("kind: autoregressive", "kind: walk", r"tasks.1.process: .*autoregressive"),
        ("name: stock", "name: half-hours", "'half-hours' is taken"),
        ("name: stock", "name: period-7", "'period-7' is taken"),
        ("name: stock", "name: '<b>'", "tasks.1.name: "),
        ("tasks:", "jobs:", "unknown key 'jobs'|tasks: missing; add it"),
        (WEEK, "[]", "not a mapping"),
        (WEEK, "tasks: []", "tasks: "),
        (WEEK, "{", "cannot be read as YAML"),
    ],
)
def test_a_bad_file_of_tasks_is_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(WEEK.replace(old, new))
    with pytest.raises(RecipeError, match=says) as caught:
        load_tasks(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="no file of tasks"):
        load_tasks(tmp_path / "none.yaml")


def test_a_short_context_keeps_a_value() -> None:
    task = TASKS["ar1"].model_copy(update={"missing": 0.9, "context_length": 4})
    assert (np.isfinite(task.draw().context).sum(axis=1) == 1).all()


def test_the_constant_is_of_what_is_seen() -> None:
    task = TASKS["level-shift"].model_copy(update={"missing": 0.6})
    drawn = task.draw()
    assert task.process.ends_constant
    np.testing.assert_array_equal(drawn.constant, np.nanmedian(drawn.context, axis=1))


@pytest.mark.parametrize("changes", [{"missing": 1.0}, {"num_series": 0}, {"noise": 1}])
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ProbeTask(
            **{"name": "one", "process": Autoregressive(coefficient=1), "context_length": 9}
            | changes
        )


def test_gaps_hide_no_value_that_the_best_forecast_needs() -> None:
    with pytest.raises(ValueError, match="needs its last value; leave missing out"):
        ProbeTask(
            name="walk",
            group="mine",
            process=Autoregressive(coefficient=1),
            context_length=32,
            missing=0.5,
        )
