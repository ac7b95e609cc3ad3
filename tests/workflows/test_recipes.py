"""Recipes: the ones in the repository, and what a bad one says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from shared_fixtures import ROOT

from tscompress.compression.fold_config import FoldConfig
from tscompress.data.suites import find_suite
from tscompress.errors import RecipeError
from tscompress.plan.schedules import PlannedSchedule, RankSchedule
from tscompress.workflows.recipe import (
    Recipe,
    inputs_of,
    load_pretrain_recipe,
    load_recipe,
    validate,
)
from tscompress.workflows.sweep_points import load_sweep_recipe, points_of

RECIPES = ROOT / "recipes"
STRENGTHS = ("gentle", "balanced", "extreme")
OF_ANY_MODEL = [RECIPES / f"{strength}.yaml" for strength in STRENGTHS]
OF_OWN_DATA = RECIPES / "own-data.yaml"
COMPRESSION = sorted([RECIPES / "demo.yaml", *OF_ANY_MODEL])
#: Of all published Chronos models.
HEAD_SIZE = 64
#: Those of in-context learners are tested with the scripts of eval/lab, which read them.
OF_LEARNERS = sorted(
    path for size in ("cpu", "gpu", "paper") for path in (RECIPES / "lab").glob(f"*-{size}.yaml")
)
PRETRAINING = sorted(
    [*(RECIPES / "pretrain").glob("*.yaml"), *{*(RECIPES / "lab").glob("*.yaml")} - {*OF_LEARNERS}]
)
SWEEPS = sorted((RECIPES / "sweep").glob("*.yaml"))
MODELS = ["amazon/chronos-t5-base", "amazon/chronos-bolt-tiny", "amazon/chronos-2"]


# --------------------------------------------------------------------------------------------------
# The ones that ship
# --------------------------------------------------------------------------------------------------


def shipped(path: Path) -> Recipe:
    """One of ours; for a model of the caller's choice where it names none."""
    return load_recipe(path, model=MODELS[0] if path in OF_ANY_MODEL else None)


@pytest.mark.parametrize("path", COMPRESSION, ids=lambda path: path.stem)
def test_compression_recipes_are_valid(path: Path) -> None:
    recipe = shipped(path)
    assert path.read_text().startswith(f"# tscompress run recipes/{path.name}")
    assert recipe.evaluation is not None
    find_suite(recipe.evaluation.suite).select(recipe.evaluation.datasets)


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_pretraining_recipes_are_valid(path: Path) -> None:
    recipe = load_pretrain_recipe(path)
    command = f"# tscompress pretrain recipes/{path.parent.name}/{path.name} --output "
    assert path.read_text().startswith(command)
    assert recipe.total_steps > 100


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_recipes_of_sweeps_are_valid(path: Path) -> None:
    recipe = load_sweep_recipe(path)
    assert path.read_text().startswith(f"# tscompress sweep recipes/sweep/{path.name}")
    assert len(points_of(recipe)) > 5
    find_suite(recipe.evaluation.suite).select(recipe.evaluation.datasets)


def test_no_recipe_lies_elsewhere() -> None:
    assert sorted(RECIPES.rglob("*.y*ml")) == sorted(
        [*COMPRESSION, OF_OWN_DATA, *PRETRAINING, *OF_LEARNERS, *SWEEPS]
    )


def test_heads_stay_whole_unless_a_schedule_says_otherwise() -> None:
    """As of the command and of `tscompress.compress`."""
    whole: list[dict[str, Any]] = [
        {"width": 0.5}, {"ff_ratio": 0.5}, {"latent": 8}, {"fold": {"univariate": True}},
        {"fold": FoldConfig(single_token=True)}, {"univariate": True},
    ]  # fmt: skip
    for sizes in whole:
        recipe = Recipe.model_validate(MINIMAL | sizes)
        assert recipe.schedule is None, sizes
        assert recipe.calibrates == (not recipe.fold.dropped)
    others = [{}, {"method": "svd"}, {"fold": {"damping": 0.1}}, {"width": None}]
    for sizes in others:
        assert Recipe.model_validate(MINIMAL | sizes).schedule == RankSchedule(rank=16), sizes
    given = Recipe.model_validate(MINIMAL | {"width": 0.5, "schedule": "rank=32"})
    assert given.schedule == RankSchedule(rank=32)


def test_recipe_of_own_data_leaves_out_what_it_scores() -> None:
    recipe = load_recipe(OF_OWN_DATA, model=MODELS[1])
    assert recipe.calibration.source == recipe.evaluation.suite
    assert recipe.evaluation.long_format is not None
    assert recipe.series.hold_out == recipe.evaluation.long_format.horizon


@pytest.mark.parametrize("path", OF_ANY_MODEL, ids=lambda path: path.stem)
def test_a_strength_is_of_any_model(path: Path) -> None:
    refused(load_recipe, path, "model")
    recipes = [load_recipe(path, model=model) for model in MODELS]
    assert [recipe.model for recipe in recipes] == MODELS
    assert len({recipe.output for recipe in recipes}) == len(MODELS)
    assert {recipe.method for recipe in recipes} == {"fold"}


def test_strengths_are_in_order() -> None:
    recipes = [shipped(path) for path in OF_ANY_MODEL]
    widths = [recipe.width or 1.0 for recipe in recipes]  # shares of d_model
    ratios = [recipe.ff_ratio or 1.0 for recipe in recipes]
    heads = [getattr(recipe.schedule, "rank", HEAD_SIZE) / HEAD_SIZE for recipe in recipes]
    for sizes in (ratios, heads):  # feed-forwards and attention both shrink with the width
        kept = [size * width for size, width in zip(sizes, widths, strict=True)]
        assert kept == sorted(set(kept), reverse=True)


def test_outputs_are_distinct() -> None:
    outputs = [shipped(path).output for path in COMPRESSION]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.parametrize("path", COMPRESSION, ids=lambda path: path.stem)
def test_yaml_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = shipped(path)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe


# --------------------------------------------------------------------------------------------------
# Bad ones
# --------------------------------------------------------------------------------------------------


def refused(load: Callable[[Path], object], path: Path, match: str) -> None:
    with pytest.raises(RecipeError, match=match) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


MINIMAL: dict[str, Any] = {"model": "reference/bolt", "output": "out"}
PLANNED: dict[str, Any] = {"kind": "planned", "budget": {"measure": "parameters", "ratio": 0.5}}


def test_model_and_output_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_recipe(path) == Recipe(**MINIMAL)


def test_one_recipe_serves_many_models(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": "out"}))
    refused(load_recipe, path, "model: missing")
    assert load_recipe(path, model="amazon/chronos-bolt-tiny") == Recipe(
        model="amazon/chronos-bolt-tiny", output="out/chronos-bolt-tiny"
    )
    path.write_text(yaml.safe_dump(MINIMAL | {"revision": "v1"}))
    other = load_recipe(path, model="reference/t5", output=tmp_path / "t5")
    assert (other.model, other.revision) == ("reference/t5", None)  # v1 is one of reference/bolt
    assert other.output == str(tmp_path / "t5")
    same = load_recipe(path, model="reference/bolt")
    assert (same.revision, same.output) == ("v1", "out/bolt")
    path.write_text(yaml.safe_dump({"output": "out", "revision": "v1"}))
    assert load_recipe(path, model="reference/t5").revision == "v1"  # it is of no other model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"modle": "x"}, "unknown key 'modle'"),
        ({"calibration": {"num_serie": 3}}, "unknown key 'calibration.num_serie'"),
        ({"evaluation": {"horizon": 3}}, "unknown key 'evaluation.horizon'"),
        ({"bench": {"repeat": 3}}, "unknown key 'bench.repeat'"),
        ({"schedule": {"kind": "rank", "rank": 3, "x": 1}}, "unknown key 'schedule.x'"),
        ({"schedule": {"kind": "rank", "rank": -1}}, r"schedule.rank: .*greater.*got -1"),
        ({"schedule": {"kind": "rank", "rank": 1.5}}, r"schedule.rank: .*got 1.5"),
        ({"schedule": {"kind": "magic"}}, "schedule: "),
        ({"schedule": {"kind": "budget", "parameter_ratio": 0}}, "parameter_ratio: .*got 0"),
        ({"schedule": {"kind": "budget", "parameter_ratio": 1.1}}, "parameter_ratio: .*got 1.1"),
        ({"schedule": {"kind": "epsilon", "epsilon": 0}}, "epsilon: .*got 0"),
        ({"schedule": None}, "fold needs a schedule of head sizes"),
        ({"model": 3}, "model: .*valid string.*got 3"),
        ({"model": None}, "model: "),
        ({"method": "magic"}, "method: .*got 'magic'"),
        ({"feed_forward": "perhaps"}, "feed_forward: .*got 'perhaps'"),
        ({"exclude": "encoder"}, "exclude: .*got 'encoder'"),
        ({"calibration": {"num_series": 0}}, "calibration.num_series: .*got 0"),
        ({"profile": {"epsilons": []}}, r"profile.epsilons: .*got \[\]"),
        ({"model": "x" * 10_000, "method": ["y" * 10_000] * 100}, "method: "),
        ({"ff_ratio": 0}, "ff_ratio: .*got 0"),
        ({"ff_ratio": 1.1}, "ff_ratio: .*got 1.1"),
        ({"fold": {"refits": "none"}}, "unknown key 'fold.refits'"),
        ({"fold": {"refit": "all"}}, "fold.refit: .*got 'all'"),
        ({"fold": {"damping": 0}}, "fold.damping: .*got 0"),
        ({"fold": {"refit": "none", "damping": 0.1}}, "fold: damping is 0.1, and refit: none fits"),
        ({"schedule": {"kind": "budget", "parameter_ratio": 0.5}}, "budget for fold"),
        ({"feed_forward": True}, "fold sizes feed-forwards by ff_ratio"),
        (
            {"schedule": {"kind": "planned", "budget": {"measure": "wql", "ratio": 0.5}}},
            r"schedule.budget: .*wql takes percent, got ratio",
        ),
        ({"schedule": PLANNED | {"layout": "loose"}}, "schedule.layout: .*got 'loose'"),
        ({"schedule": PLANNED | {"multiple": 3}}, "schedule.multiple: .*got 3"),
        (
            {"schedule": PLANNED | {"layout": "factored", "depth": True}},
            "depth goes with the folded layout only",
        ),
        ({"schedule": PLANNED, "ff_ratio": 0.5}, "give no ff_ratio with it"),
        ({"schedule": PLANNED, "exclude": ["*"]}, "give no exclude with it"),
        ({"method": "svd", "schedule": None}, "svd needs a schedule"),
        ({"method": "svd", "schedule": PLANNED}, "svd needs a schedule"),
        ({"method": "svd", "schedule": {"kind": "fit", "epsilon": 0.1}}, "svd needs a schedule"),
        ({"method": "svd", "ff_ratio": 0.5}, "ff_ratio is for fold"),
        ({3: 4}, "recipe.yaml"),
    ],
)
def test_bad_values_name_their_key(tmp_path: Path, change: dict[Any, Any], match: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | change))
    refused(load_recipe, path, match)


@pytest.mark.parametrize("missing", ["model", "output"])
def test_missing_keys(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != missing}))
    refused(load_recipe, path, f"{missing}: (missing|Field required)")


@pytest.mark.parametrize("load", [load_recipe, load_pretrain_recipe])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "mapping"),
        (b"- model: x", "mapping"),
        (b"just words", "mapping"),
        (b"model: [", "cannot be read as YAML"),
        (b"model: \xff\xfe", "cannot be read as YAML"),
        (b"model: x\x00", "cannot be read as YAML"),
        (b"? [a]\n: b", "cannot be read as YAML"),
        (b"[" * 600, "cannot be read as YAML"),
        (b"model: !!python/object/apply:os.system [ls]", "cannot be read as YAML"),
    ],
)
def test_files_without_recipe_are_refused(
    tmp_path: Path, load: Callable[[Path], object], content: bytes, match: str
) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    refused(load, tmp_path / "recipe.yaml", match)


@pytest.mark.parametrize("load", [load_recipe, load_pretrain_recipe])
def test_missing_files(tmp_path: Path, load: Callable[[Path], object]) -> None:
    refused(load, tmp_path / "none.yaml", "there is no recipe at")
    refused(load, tmp_path, "cannot be read as YAML")


def bomb(key: str) -> str:
    lines = ['a0: &a0 ["x", "x"]']
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join([*lines, f"{key}: *a11"])


def merging_bomb() -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb("model"), bomb("exclude"), merging_bomb()])
def test_a_few_lines_cannot_stand_for_gigabytes(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    refused(load_recipe, tmp_path / "recipe.yaml", "has YAML aliases")


def test_repeated_key_is_refused(tmp_path: Path) -> None:
    """PyYAML would keep the last."""
    path = tmp_path / "recipe.yaml"
    path.write_text("model: a\noutput: b\nfold: {damping: 0.1, damping: 0.2}\n")
    refused(load_recipe, path, "has the key 'damping' twice")


def test_a_budget_is_also_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = "model: a\noutput: b\nschedule: {{kind: planned, budget: {}}}\n"
    path.write_text(text.format("wql=1%"))
    schedule = load_recipe(path).schedule
    assert isinstance(schedule, PlannedSchedule)
    assert str(schedule.budget) == "wql=1%"
    path.write_text(text.format("wql=1"))
    refused(load_recipe, path, "'wql=1' is no budget")
    path.write_text(text.format("bytes=1MB") + "fold: {frequencies: free}\n")
    refused(load_recipe, path, "free frequencies make a factored checkpoint")


# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------

SCHEDULE = {"kind": "rank", "rank": 4}
WHOLE: dict[str, Any] = {
    "model": "m", "output": "o", "schedule": SCHEDULE, "recover": {"steps": 1}, "probe": {},
}  # fmt: skip


def numbers_of(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a recipe has numbers, booleans aside."""
    if isinstance(content, dict | list | tuple):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from numbers_of(value, (*where, key))
    elif type(content) in (int, float):
        yield where


def changed(where: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A whole recipe with another value at a place."""
    content: Any = json.loads(Recipe.model_validate(WHOLE).model_dump_json())
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return content


NUMBERS = list(numbers_of(json.loads(Recipe.model_validate(WHOLE).model_dump_json())))


@pytest.mark.parametrize("where", NUMBERS, ids=lambda where: ".".join(map(str, where)))
@pytest.mark.parametrize("value", [True, 10**30, float("inf"), float("nan")], ids=str)
def test_every_number_has_bounds_and_is_no_boolean(where: tuple[Any, ...], value: Any) -> None:
    assert len(NUMBERS) > 40
    with pytest.raises(RecipeError, match=str(where[-2 if isinstance(where[-1], int) else -1])):
        validate(Recipe, changed(where, value), "recipe")


@pytest.mark.parametrize(
    "name",
    ["steps", "minutes", "warmup_steps", "accumulate", "held_out_series", "shuffle_series",
     "evaluate_every", "patience", "checkpoint_steps", "checkpoint_minutes"],
)  # fmt: skip
def test_a_recovery_without_end_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=name):
        validate(Recipe, {**WHOLE, "recover": {name: 10**15}}, "recipe")


def test_a_name_of_synthetic_series_is_no_directory() -> None:
    assert "mixed" not in inputs_of(validate(Recipe, WHOLE, "recipe"))
    given = validate(Recipe, {**WHOLE, "calibration": {"source": "mixed.csv"}}, "recipe")
    assert "mixed.csv" in inputs_of(given)


@pytest.mark.parametrize("text", ["schedule: {kind: rank, rank: yes}", "bench: {repeats: on}"])
def test_yes_is_not_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model: m\noutput: o\n{text}\n")
    with pytest.raises(RecipeError, match=r"rank|repeats"):
        load_recipe(path)


def test_numbers_as_text_are_still_read() -> None:
    """YAML reads 1e-2 as a text."""
    found = validate(Recipe, {**WHOLE, "fold": {"damping": "1e-2"}}, "recipe")
    assert found.fold.damping == 0.01


def test_a_recipe_of_an_earlier_checkpoint_may_name_a_damping_that_nothing_reads() -> None:
    fold = {"refit": "none", "damping": 0.01, "precision": "float32"}
    assert validate(Recipe, {**WHOLE, "fold": fold}, "recipe").fold.refit == "none"


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="pipe"):
        load_recipe(tmp_path / "pipe")


def test_columns_of_a_recipe_are_those_of_its_evaluation() -> None:
    columns = {"target_column": ["sales", "returns"], "known_covariates": "promo,price"}
    evaluation = {"suite": "x.csv", "long_format": {"horizon": 3}, "cross_learning": True}
    content = {"model": "m", "output": "o", "series": columns, "evaluation": evaluation}
    scored_on = validate(Recipe, content, "x").scored_on
    assert scored_on is not None
    assert scored_on.cross_learning
    assert scored_on.long_format is not None
    assert scored_on.long_format.target_column == "sales,returns"
    assert scored_on.long_format.known_covariates == "promo,price"
