"""Chronos-Bolt without what its decoder, which reads a single token, never needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chronos import BaseChronosPipeline
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
from tscompress.benchmark.sizes import kv_cache_bytes, parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.univariate import separate_and_merge_
from tscompress.errors import PlanError, RecipeError, UsageError
from tscompress.layers.single_token import OwnToken
from tscompress.plan.plan import Plan
from tscompress.profiling.measure import profile
from tscompress.workflows.options import recipe_of

GAPS = torch.where((torch.arange(60) > 20) & (torch.arange(60) < 56), torch.nan, WAVE)
SERIES = (*WAVES, GAPS)
SINGLE = FoldConfig(single_token=True)


@pytest.fixture(scope="module")
def bolt(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["chronos-bolt"]


@pytest.fixture(scope="module")
def single(bolt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without other changes."""
    small = tscompress.compress(bolt, fold=SINGLE)
    return tscompress.save(small, tmp_path_factory.mktemp("single") / "chronos-bolt")


def rescaled(bolt: Path, scale: float = 3.0) -> LoadedModel:
    """The checkpoint in float64, whose attention is far from uniform."""
    loaded = load(bolt)
    loaded.model.double()
    for name, parameter in loaded.model.named_parameters():
        if name.endswith((".q.weight", ".k.weight", ".v.weight", ".o.weight")):
            parameter.data *= scale
    return loaded


# --------------------------------------------------------------------------------------------------
# Alone
# --------------------------------------------------------------------------------------------------


def test_forecasts_are_the_originals_to_rounding(bolt: Path, single: Path) -> None:
    original, small = load(bolt), load(single)
    found = difference(small.forecaster, original.forecaster, SERIES)
    print(f"float32: {found:.1e}")
    assert found < 1e-5
    with pytest.warns(UserWarning, match="length"):  # beyond one call
        assert difference(small.forecaster, original.forecaster, SERIES, steps=40) < 1e-5


def test_the_decoder_agrees_in_float64(bolt: Path) -> None:
    original, small = rescaled(bolt), rescaled(bolt)
    separate_and_merge_(small, fold_plan(small.model, small.architecture, single_token=True))
    context = torch.nn.utils.rnn.pad_sequence(SERIES, batch_first=True, padding_value=torch.nan)

    def decoded(loaded: LoadedModel) -> torch.Tensor:  # quantiles are scaled back in float32
        model: Any = loaded.model
        with torch.no_grad():
            states, _, patches, mask = model.encode(context)
            found: torch.Tensor = model.decode(patches, mask, states)
        return found

    theirs = decoded(original)
    assert theirs.dtype == torch.float64
    found = float((decoded(small) - theirs).abs().max() / theirs.abs().max())
    print(f"float64: {found:.1e}")
    assert found < 1e-12
    # The keys of the first cross-attention matter.
    keys = original.model.get_parameter("decoder.block.0.layer.1.EncDecAttention.k.weight")
    keys.data.zero_()
    assert float((decoded(original) - theirs).abs().max() / theirs.abs().max()) > 1e-4


def test_parameters_are_those_of_the_plan(bolt: Path, single: Path) -> None:
    original, small = load(bolt), load(single)
    assert small.plan is not None
    before, after = small.plan.parameters()
    # The relative bias, 32 x 4, is of the decoder's self-attention too.
    assert parameter_count(original.model) - parameter_count(small.model) == before - after + 32 * 4
    # Self-attention: four of 24 x 32 become one of 24 x 24, in the first layer two of 24 x 4.
    # Queries and keys of the first cross-attention: from 24 x 32 to 24 x 4.
    dropped = (4 * 24 * 32 - 24 * 24) + (4 * 24 * 32 - 2 * 24 * 4) + 2 * 24 * (32 - 4)
    assert before - after == dropped
    assert small.plan.uniform_sizes is None
    assert not small.plan.calibrates


def test_no_series_is_read(bolt: Path, tmp_path: Path, command: Command) -> None:
    assert tscompress.compress(bolt, fold=SINGLE).calibration == {}
    with pytest.raises(UsageError, match="single_token"):
        tscompress.compress(bolt, fold=SINGLE, series=[WAVE.numpy()])
    outcome = command("compress", bolt, "--single-token", "--output", tmp_path / "out",
                      "--calibration-series", 4)  # fmt: skip
    assert_refused(outcome, 2, "--calibration-series")


def test_checkpoint_opens_in_chronos(single: Path) -> None:
    found = BaseChronosPipeline.from_pretrained(single)
    assert difference(found, load(single).forecaster) == 0
    attention = found.inner_model.get_submodule("decoder.block.1.layer.0.SelfAttention")
    assert isinstance(attention, OwnToken)


def test_several_tokens_are_refused(single: Path) -> None:
    model: Any = load(single).model
    encoded = torch.zeros(1, 3, 24)
    one, two = (
        {"input_ids": torch.zeros(1, count, dtype=torch.long), "encoder_hidden_states": encoded}
        for count in (1, 2)
    )
    assert model.decoder(**one).last_hidden_state.shape == (1, 1, 24)
    with pytest.raises(UsageError, match="2 tokens"):
        model.decoder(**two)


# --------------------------------------------------------------------------------------------------
# With other sizes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 4},
        {"width": 12, "rank": 2},
        {"layers": 1},
        {"latent": 6},
    ],
    ids=str,
)
def test_folds_combine_with_it(bolt: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    small = tscompress.compress(bolt, fold=SINGLE, calibration=FEW, **options)
    without = tscompress.compress(bolt, calibration=FEW, **options)
    assert parameter_count(small.model) < parameter_count(without.model)
    # What is dropped does nothing, so the rest is fitted as well.
    original = load(bolt).forecaster
    ours, theirs = (difference(one.forecaster, original) for one in (small, without))
    assert ours < 1.1 * theirs + 1e-3
    again = load(tscompress.save(small, tmp_path / "out"))
    assert difference(again.forecaster, small.forecaster) < 1e-6


def test_plan_is_applied_again(bolt: Path, single: Path) -> None:
    plan = Plan.load(single / "plan.json")
    small = tscompress.compress(bolt, plan=plan)
    assert difference(small.forecaster, load(single).forecaster) == 0
    # What a plan by hand does not name has a single key too.
    heads = [head for head in plan.heads if head.single_key][:1]
    partial = plan.model_copy(update={"heads": tuple(heads), "hidden": ()})
    again = tscompress.compress(bolt, plan=partial)
    assert difference(again.forecaster, small.forecaster) == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("decoder", {"single_key": False, "constant_query": False}),
        ("encoder", {"single_key": True}),
        ("cross", {"constant_query": True, "qk_size": 2}),
    ],
    ids=["one alone", "encoder", "two dimensions"],
)
def test_plans_that_change_forecasts_are_refused(
    single: Path, kind: str, changes: dict[str, Any]
) -> None:
    content = Plan.load(single / "plan.json").model_dump(mode="json")
    next(head for head in content["heads"] if head["kind"] == kind).update(changes)
    with pytest.raises(PlanError):
        Plan.parse(content)


def test_what_a_block_needs_is_not_dropped_by_a_plan(bolt: Path, single: Path) -> None:
    content = Plan.load(single / "plan.json").model_dump(mode="json")
    first, second = [head for head in content["heads"] if head["kind"] == "cross"]
    assert first["constant_query"]
    second.update(constant_query=True, qk_size=1)
    with pytest.raises(PlanError, match=rf"{second['name']} with constant_query, which it has not"):
        tscompress.compress(bolt, plan=Plan.parse(content))


# --------------------------------------------------------------------------------------------------
# What is measured of it
# --------------------------------------------------------------------------------------------------


def test_a_single_token_model_is_profiled_and_recovered_with_a_smaller_cache(
    bolt: Path, single: Path
) -> None:
    original, small = load(bolt), load(single)
    found = profile(small, calibration=FEW)
    assert {weight.role for weight in found.weights if weight.kind == "decoder"} >= {"vo", "v"}
    workload = Workload(context_length=64, horizon=8, batch_size=1)
    cached = [kv_cache_bytes(loaded.model, workload) for loaded in (original, small)]
    # Of self-attention nothing, and of the first cross-attention keys of one dimension a head.
    patches = 64 // int(original.config["chronos_config"]["input_patch_size"]) + 1
    assert cached[0] - cached[1] == 4 * (4 * 32 + (32 - 4) * patches)
    recovered = tscompress.recover(small, original, SHORT_RECOVERY)
    assert recovered.recovery is not None
    assert recovered.recovery.finished


def test_the_command_has_the_option(bolt: Path, tmp_path: Path, command: Command) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: x\noutput: y\nfold: {single_token: true}\nschedule: null\n")
    outs = tmp_path / "option", tmp_path / "recipe"
    for out, how in zip(outs, (["--single-token"], ["--recipe", recipe]), strict=True):
        outcome = command("compress", bolt, "--output", out, *how)
        assert outcome.code == 0, outcome.err
        assert load(out).plan.single_token  # type: ignore[union-attr]
    first, second = (load(out).forecaster for out in outs)
    assert difference(first, second) == 0
    assert recipe_of({"single_token": True}).schedule is None
    workload = "--context-length", 64, "--repeats", 1, "--warmup", 0, "--no-memory"
    outcome = command("bench", outs[0], "--against", bolt, *workload)
    assert outcome.code == 0, outcome.err


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-2"])
def test_other_families_are_refused(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    assert_option_refused(command, checkpoints[family], "--single-token", tmp_path / "out")


@pytest.mark.parametrize("options", NOT_WITH_IT, ids=str)
def test_budgets_and_factors_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="single_token"):
        recipe_of({"single_token": True, **options})


def test_a_single_token_model_is_not_compressed_again(single: Path) -> None:
    with pytest.raises(PlanError):
        tscompress.compress(single, fold=SINGLE)
