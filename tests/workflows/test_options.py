"""Options to a recipe: objects, their texts, and old keywords give the same one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import tscompress
from tscompress import (
    Budget,
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    FitSchedule,
    FoldConfig,
    PlannedSchedule,
    PowerLawSchedule,
    RankSchedule,
)
from tscompress.cli.app import app
from tscompress.errors import RecipeError, UsageError
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import parse_schedule
from tscompress.workflows.options import SIZE_OPTIONS, recipe_of
from tscompress.workflows.recipe import Recipe, validate
from tscompress.workflows.sweep_points import Grid

POWER_LAW = PowerLawSchedule(d_0=5, alpha=0.35)
HALF = Budget(measure="parameters", ratio=0.5)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("5,0.35", POWER_LAW),
        ("power-law=5,0.35", POWER_LAW),
        (" 5, 0.35 ", POWER_LAW),
        ("rank=16", RankSchedule(rank=16)),
        ("epsilon=0.1", EpsilonSchedule(epsilon=0.1)),
        ("energy=0.9", EnergySchedule(energy=0.9)),
        ("fit=0.1", FitSchedule(epsilon=0.1)),
    ],
)
def test_a_schedule_has_a_text(text: str, schedule: Any) -> None:
    assert parse_schedule(text) == schedule
    assert recipe_of({"schedule": text}).schedule == schedule
    assert recipe_of({"schedule": schedule}).schedule == schedule
    assert (
        validate(Recipe, {"model": "m", "output": "o", "schedule": text}, "").schedule == schedule
    )


@pytest.mark.parametrize(
    "text", ["", "5", "=5", "rank", "rank=", "rank=1,2", "rank=1.5", "rank=0", "epsilon=1", "0,1",
             "energy=nan", "5,inf", "size=3", "a,b"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="schedule"):
        parse_schedule(text)
    with pytest.raises(RecipeError, match="schedule"):
        validate(Recipe, {"model": "m", "output": "o", "schedule": text}, "here")


def test_forms_of_one_option_give_one_recipe() -> None:
    planned = PlannedSchedule(budget=HALF, layout="factored", multiple=8, keep_width=True)
    how = {"layout": "factored", "multiple": 8, "keep_width": True}
    for same in (
        {"budget": planned},
        {"schedule": planned},
        {"budget": "parameters=0.5", **how},
        {"budget": HALF, **how},
        {"budget": PlannedSchedule(budget=HALF), **how},
    ):
        assert recipe_of(same).schedule == planned
    svd = {"method": "svd", "budget": 0.25}
    assert recipe_of(svd).schedule == BudgetSchedule(parameter_ratio=0.25)
    assert recipe_of(svd | {"budget": "0.25"}) == recipe_of(svd)
    rounded = POWER_LAW.model_copy(update={"powers_of_two": True})
    for schedule in ((5, 0.35), "5,0.35", POWER_LAW):
        assert recipe_of({"schedule": schedule, "powers_of_two": True}).schedule == rounded
    assert recipe_of({"ff_ratio": 0.5, "layers": 2}).layers == (2,)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "none was given; give exactly one of"),
        ({"rank": 0}, "rank: "),
        ({"rank": 3, "schedule": "rank=3"}, "rank and schedule were given"),
        ({"schedule": "rank=3", "powers_of_two": True}, "rounds a power law"),
        ({"schedule": "rank=3", "multiple": 8}, "go with a budget of fold"),
        ({"method": "svd", "budget": HALF}, "'parameters=0.5' is for fold"),
        ({"method": "svd", "budget": PlannedSchedule(budget=HALF)}, "svd needs a schedule of kind"),
        ({"budget": 0.5}, "measure"),
        ({"budget": HALF, "layout": "loose"}, "layout: "),
        ({"budget": {"measure": "parameters", "ratio": 0.5}}, "budget is .*; give a share"),
        ({"schedule": 0.1}, "schedule is .*; give a text such as"),
        ({"schedule": (5,)}, r"give a pair \(d_0, alpha\)"),
        ({"schedule": (5, 0.3, 1)}, r"give a pair \(d_0, alpha\)"),
    ],
)
def test_refused_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        recipe_of(options)


@pytest.mark.parametrize("name", SIZE_OPTIONS)
def test_a_plan_goes_without_sizes(name: str) -> None:
    plan = Plan(family="chronos-bolt", method="fold")
    with pytest.raises(UsageError, match="no schedule or selection"):
        recipe_of({name: True}, plan=plan)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"epsilon": 0.3}, {"schedule": "epsilon=0.3"}),
        ({"energy": 0.9}, {"schedule": EnergySchedule(energy=0.9)}),
        (
            {"schedule": (3, 0.3), "powers_of_two": True},
            {"schedule": PowerLawSchedule(d_0=3, alpha=0.3, powers_of_two=True)},
        ),
    ],
    ids=str,
)
def test_keywords_that_moved_still_work(
    checkpoints: dict[str, Path], old: dict[str, Any], new: dict[str, Any]
) -> None:
    source = checkpoints["chronos-bolt"]
    with pytest.warns(DeprecationWarning, match="moved; give schedule="):
        before = tscompress.compress(source, method="svd", **old)
    after = tscompress.compress(source, method="svd", **new)
    assert before.plan == after.plan
    assert before.recipe == after.recipe


@pytest.mark.parametrize(
    ("family", "name"), [("chronos-2", "univariate"), ("chronos-bolt", "single_token")]
)
def test_exact_drops_of_a_fold_have_several_forms(
    family: str, name: str, checkpoints: dict[str, Path]
) -> None:
    source, fold = checkpoints[family], FoldConfig(refit="layer")
    with pytest.warns(DeprecationWarning, match=f"fold=FoldConfig\\({name}=True\\)"):
        before = tscompress.compress(source, **{name: True}, fold=fold)
    after = tscompress.compress(source, fold=FoldConfig(**{"refit": "layer", name: True}))
    assert before.plan == after.plan
    assert before.recipe == after.recipe
    assert after.recipe is not None
    with pytest.raises(UsageError, match="give no schedule"):
        tscompress.compress(source, **{name: True}, plan=after.plan)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give no schedule"):
        tscompress.compress(source, fold=after.recipe.fold, plan=after.plan)
    with pytest.raises(UsageError, match=name):
        tscompress.compress(source, **{name: "yes"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=name):
        tscompress.sensitivities(source, fold=FoldConfig(**{name: True}))


@pytest.mark.parametrize("name", ["univariate", "single_token"])
def test_recipes_written_before_have_the_drops_outside_of_fold(name: str) -> None:
    known = {"model": "m", "output": "o", "schedule": None}
    new = validate(Recipe, known | {"fold": {name: True}}, "")
    for fold in ({}, {"fold": {}}, {"fold": {name: True}}, {"fold": FoldConfig()}):
        assert validate(Recipe, known | {name: True} | fold, "") == new
    assert validate(Recipe, known | {name: False, "ff_ratio": 0.5}, "").fold == FoldConfig()
    assert recipe_of({name: True}).fold == recipe_of({}, fold={name: True}).fold == new.fold
    for odd in ({name: True, "fold": {name: False}}, {name: True, "fold": 3}, {name: "so"}):
        with pytest.raises(RecipeError, match=f"fold|{name}: "):
            validate(Recipe, known | odd, "")


def test_public_functions_have_few_parameters() -> None:
    for function in (tscompress.compress, tscompress.recover, tscompress.run):
        assert len(inspect.signature(function).parameters) <= 20


def test_command_and_sweep_have_the_same_sizes() -> None:
    command = get_command(app).commands["compress"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert {"method", *SIZE_OPTIONS} <= names
    known = {"method", *SIZE_OPTIONS}
    assert set(Grid.model_fields) - {"recover_steps"} <= known
