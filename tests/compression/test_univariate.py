"""Chronos-2 of which every series is a group of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from shared_fixtures import Command, assert_refused
from single_key import (
    FEW,
    NOT_WITH_IT,
    SHORT_RECOVERY,
    WAVE,
    WAVES,
    assert_option_refused,
    difference,
)

import tscompress
import tscompress.pipelines  # registers the pipeline class
from tscompress import FoldConfig
from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.factored_methods import adapted_layers
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import calibration_batches
from tscompress.errors import PlanError, RecipeError, UsageError
from tscompress.families.groups import group_size, reads_covariates
from tscompress.layers.univariate import OwnValues, is_univariate
from tscompress.plan.plan import Plan
from tscompress.profiling.measure import profile
from tscompress.workflows.options import recipe_of

UNIVARIATE = FoldConfig(univariate=True)


@pytest.fixture(scope="module")
def chronos2(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["chronos-2"]


@pytest.fixture(scope="module")
def univariate(chronos2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without other changes."""
    small = tscompress.compress(chronos2, fold=UNIVARIATE)
    return tscompress.save(small, tmp_path_factory.mktemp("univariate") / "chronos-2")


# --------------------------------------------------------------------------------------------------
# Alone
# --------------------------------------------------------------------------------------------------


def test_forecasts_are_the_originals_to_rounding(chronos2: Path, univariate: Path) -> None:
    original, small = load(chronos2), load(univariate)
    assert difference(small.forecaster, original.forecaster, steps=40) < 1e-5
    # Beyond one call, of series with missing patches, and of single ones.
    with pytest.warns(UserWarning, match="prediction length"):
        assert difference(small.forecaster, original.forecaster, steps=100) < 1e-5
    gaps = WAVE.clone()
    gaps[20:56] = torch.nan
    for contexts in ([gaps, WAVE], [gaps]):
        found, expected = (
            torch.cat(loaded.forecaster.predict(contexts, prediction_length=20))
            for loaded in (small, original)
        )
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_parameters_are_those_of_the_plan(chronos2: Path, univariate: Path) -> None:
    original, small = load(chronos2), load(univariate)
    assert small.plan is not None
    before, after = small.plan.parameters()
    assert parameter_count(original.model) - parameter_count(small.model) == before - after
    # Per layer: four of 24 x 32 become one of 24 x 24.
    assert before - after == 2 * (4 * 24 * 32 - 24 * 24)
    assert [head.merged for head in small.plan.heads] == [False, True] * 2
    assert small.plan.uniform_sizes is None


def test_no_series_is_read(
    chronos2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    monkeypatch.setattr(
        "tscompress.workflows.compress.calibration_batches", lambda *_, **__: pytest.fail("read")
    )
    small = tscompress.compress(chronos2, fold=UNIVARIATE)
    assert small.calibration == {}
    with pytest.raises(UsageError, match="univariate"):
        tscompress.compress(chronos2, fold=UNIVARIATE, series=[WAVE.numpy()])
    outcome = command("compress", chronos2, "--univariate", "--output", tmp_path / "out",
                      "--calibration-series", 4)  # fmt: skip
    assert_refused(outcome, 2, "--calibration-series")


def test_checkpoint_opens_in_chronos(univariate: Path) -> None:
    expected = load(univariate).forecaster
    for opener in (BaseChronosPipeline, Chronos2Pipeline):
        found = opener.from_pretrained(univariate)
        assert is_univariate(found.inner_model)
        assert difference(found, expected) == 0
        assert found.embed(list(WAVES))[0][0].shape[-1] == 24
    assert json.loads((univariate / "config.json").read_text())["model_type"] == "tscompress"


def test_attention_weights_of_a_series_are_its_own(univariate: Path) -> None:
    model: Any = load(univariate).model
    output = model(torch.stack([WAVE, WAVE]), output_attentions=True)
    weights = output.enc_group_self_attn_weights
    assert len(weights) == 2
    assert torch.equal(weights[0][0, 0], torch.eye(2))


# --------------------------------------------------------------------------------------------------
# With other sizes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "merged"),
    [
        ({"rank": 4}, True),
        ({"rank": 2}, False),
        ({"width": 16, "ff_ratio": 0.5}, True),
        ({"width": 16, "rank": 2}, True),
        ({"layers": 1, "width": 12}, True),
    ],
    ids=str,
)
def test_folds_combine_with_it(
    chronos2: Path, tmp_path: Path, options: dict[str, Any], merged: bool
) -> None:
    small = tscompress.compress(chronos2, fold=UNIVARIATE, calibration=FEW, **options)
    plan = small.plan
    assert plan is not None
    groups = [head for head in plan.narrowed().heads if head.univariate]
    assert {head.merged for head in groups} == {merged}
    width = options.get("width", 24)
    values: Any = small.model.get_submodule(groups[0].name)
    assert (values.vo is not None) == merged
    if merged:
        assert values.vo.weight.shape == (width, width)
    else:
        assert values.v.weight.shape == (4 * options["rank"], width)
        assert groups[0].parameters < width * width
    again = load(tscompress.save(small, tmp_path / "out"))
    assert parameter_count(again.model) == parameter_count(small.model)
    assert difference(again.forecaster, small.forecaster) < 1e-6


def test_values_of_a_lower_rank_have_the_least_error(chronos2: Path) -> None:
    # At rank 2 a head, group attention alone: the best of rank 8 is no worse than heads of 2.
    original = load(chronos2)
    rest = {"exclude": ["*layer.0*", "*mlp", "*patch*"], "calibration": FEW, "rank": 2}
    fits = FoldConfig(refit="none", univariate=True)
    small = tscompress.compress(chronos2, fold=fits, **rest)
    kept: Any = small.model.get_submodule("encoder.block.0.layer.1.self_attention")
    dense: Any = original.model.get_submodule("encoder.block.0.layer.1.self_attention")
    product = OwnValues.of(dense).product()
    best = torch.linalg.svdvals(product)[8:].square().sum()
    error = (kept.product() - product).square().sum()
    assert best <= error < 3 * best


def test_plan_is_applied_again(chronos2: Path, univariate: Path, tmp_path: Path) -> None:
    plan = Plan.load(univariate / "plan.json")
    assert not plan.calibrates
    small = tscompress.compress(chronos2, plan=plan)
    assert difference(small.forecaster, load(univariate).forecaster) == 0
    # What a plan by hand does not name becomes univariate too.
    heads = [head for head in plan.heads if head.univariate][:1]
    partial = plan.model_copy(update={"heads": tuple(heads), "hidden": ()})
    again = tscompress.compress(chronos2, plan=partial)
    assert difference(again.forecaster, small.forecaster) == 0
    content = plan.model_dump(mode="json")
    content["heads"][1]["univariate"] = False
    with pytest.raises(PlanError, match="group attention"):
        Plan.parse(content)
    content["heads"][1]["kind"] = "time"
    content["heads"][1]["univariate"] = True
    with pytest.raises(PlanError, match="group attention"):
        Plan.parse(content)


def test_calibration_and_recovery_have_no_groups(chronos2: Path, univariate: Path) -> None:
    original, small = load(chronos2), load(univariate)
    sizes = [group_size(loaded.family, loaded.model) for loaded in (original, small)]
    assert sizes == [4, 1]
    grouped = [
        any(batch.group_ids is not None for batch in calibration_batches(loaded, FEW, **how))
        for loaded, how in ((original, {}), (original, {"grouped": False}), (small, {}))
    ]
    assert grouped == [True, False, False]
    recovered = tscompress.recover(small, original, SHORT_RECOVERY)
    assert recovered.recovery is not None
    assert recovered.recovery.finished
    assert is_univariate(recovered.model)


def test_an_adapter_changes_group_attention_too(univariate: Path) -> None:
    layers = adapted_layers(load(univariate).model)
    assert {"vo"} == {name.rpartition(".")[2] for name in layers if ".layer.1.self_att" in name}


def test_a_plan_that_reads_no_series_says_so(chronos2: Path, univariate: Path) -> None:
    plan = load(univariate).plan
    with pytest.raises(UsageError, match="univariate alone"):
        tscompress.compress(chronos2, plan=plan, series=[WAVE.numpy()] * 3)


def test_a_recipe_has_the_key(chronos2: Path, tmp_path: Path, command: Command) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: x\noutput: y\nfold: {univariate: true}\nschedule: null\n")
    out = tmp_path / "out"
    outcome = command("compress", chronos2, "--output", out, "--recipe", recipe)
    assert outcome.code == 0, outcome.err
    assert is_univariate(load(out).model)
    assert "univariate: true" in (out / "recipe.yaml").read_text()
    assert recipe_of({"univariate": True}).schedule is None


# --------------------------------------------------------------------------------------------------
# What is measured of it
# --------------------------------------------------------------------------------------------------


def test_a_univariate_model_is_profiled_and_probed(univariate: Path) -> None:
    small = load(univariate)
    assert not reads_covariates(small.forecaster)
    found = profile(small, calibration=FEW)
    assert {weight.role for weight in found.weights if weight.kind == "group"} >= {"vo"}
    with pytest.raises(UsageError, match="univariate"):
        tscompress.probe(small, tasks=["covariate-lag-0"], num_series=2)


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.stack([WAVE, WAVE])],
        [{"target": WAVE.numpy(), "past_covariates": {"a": np.ones(60)}}],
        [
            {
                "target": WAVE.numpy(),
                "past_covariates": {"a": np.ones(60)},
                "future_covariates": {"a": np.ones(8)},
            }
        ],
    ],
    ids=["targets", "past", "future"],
)
def test_several_series_in_a_group_are_refused(univariate: Path, inputs: Any) -> None:
    pipeline: Any = load(univariate).forecaster
    with pytest.raises(UsageError, match="2 series"):
        pipeline.predict(inputs, prediction_length=8)


def test_cross_learning_is_refused(univariate: Path) -> None:
    pipeline: Any = load(univariate).forecaster
    for series in ([WAVE], list(WAVES)):
        with pytest.raises(UsageError, match="cross_learning"):
            pipeline.predict_quantiles(series, prediction_length=8, cross_learning=True)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_families_without_groups_are_refused(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    assert_option_refused(command, checkpoints[family], "--univariate", tmp_path / "out")


@pytest.mark.parametrize("options", NOT_WITH_IT, ids=str)
def test_budgets_and_factors_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="univariate"):
        recipe_of({"univariate": True, **options})


def test_a_univariate_model_is_not_compressed_again(univariate: Path) -> None:
    for model in (univariate, load(univariate)):
        with pytest.raises(PlanError):
            tscompress.compress(model, fold=UNIVARIATE)
        with pytest.raises(PlanError):
            tscompress.compress(model, ff_ratio=0.5, calibration=FEW)


def test_group_attention_with_queries_is_no_univariate_checkpoint(
    univariate: Path, tmp_path: Path
) -> None:
    # A plan that names one block fewer would attend to a batch without a mask.
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in univariate.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    plan = Plan.load(broken / "plan.json")
    plan.model_copy(update={"heads": plan.heads[:-1]}).save(broken / "plan.json")
    with pytest.raises(PlanError, match="univariate"):
        load(broken)


def test_evaluation_refuses_covariates_and_cross_learning(
    univariate: Path, tmp_path: Path, command: Command
) -> None:
    lines = [f"a,2024-{1 + month:02d}-01,{month % 4},{month}" for month in range(12)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["id,date,y,price", *lines]))
    columns = ("--suite", table, "--horizon", 2, "--target-column", "y")
    outcome = command("evaluate", univariate, *columns, "--known-covariates", "price")
    assert_refused(outcome, 2, "univariate chronos-2")
    outcome = command("evaluate", univariate, "--cross-learning", "--batch-size", 4)
    assert_refused(outcome, 2, "univariate chronos-2")
    outcome = command("bench", univariate, "--cross-learning", "--context-length", 64)
    assert_refused(outcome, 2, "univariate chronos-2")
