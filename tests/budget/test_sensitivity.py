"""What each part costs in forecast loss: the loss itself, the pass, its cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families_of_tests import any_family, two_stacks
from hooks import hook_count
from shared_fixtures import FAMILIES
from torch import nn

from tscompress.budget import forecast_loss as losses_module
from tscompress.budget import measure_sensitivity as sensitivity
from tscompress.budget import sensitivity_cache
from tscompress.budget.forecast_loss import (
    Forecasts,
    forecast_loss,
    forecast_losses,
)
from tscompress.budget.measure_sensitivity import default_head_sizes, measure_sensitivity
from tscompress.budget.sensitivity import Part, PartKind, Sensitivity, rising
from tscompress.budget.sensitivity_cache import SensitivityStore
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import fold_layers
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.fold import fold_, refit_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.layer_walk import Step
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError, FactorizationError, PlanError
from tscompress.families import patches
from tscompress.families.registry import adapter_of, build_empty, wrap_pipeline

HEAD_SIZE, D_FF = 8, 40  # of the checkpoints in shared_fixtures
FOLD = FoldConfig(precision="float32")
GROUPS = torch.tensor([0, 0, 0, 1, 1, 2])  # that Chronos-2 attends across
#: What is measured least.
FEWEST: dict[str, Any] = {"head_sizes": (), "hidden_ratios": (), "layers": ("decoder",)}


@pytest.fixture(autouse=True)
def _one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here asks how well values are fitted."""
    monkeypatch.setattr(fold_layers, "VALUE_SWEEPS", 1)


def windows(
    seed: int = 0, steps: int = 48, horizon: int = 16, *, grouped: bool = False
) -> ForecastBatch:
    rows = len(GROUPS)
    rng = np.random.default_rng(seed)
    time = np.arange(steps + horizon)
    periods = rng.uniform(4, 20, (rows, 1))
    values = np.sin(2 * np.pi * time / periods) + 0.2 * rng.standard_normal((rows, len(time)))
    scaled = torch.tensor(10.0 ** rng.uniform(-1, 2, (rows, 1)) * (values + 1), dtype=torch.float32)
    context, target = scaled[:, :steps].clone(), scaled[:, steps:].clone()
    context[0, : steps // 2] = torch.nan  # a shorter series
    return ForecastBatch(context, target, GROUPS if grouped else None)


BATCHES = [windows(0, grouped=True), windows(1, steps=32, horizon=8)]


def measure(loaded: LoadedModel, **options: Any) -> Sensitivity:
    few = {"head_sizes": (4, 2), "hidden_ratios": (0.5,), "width_ratios": ()}
    few |= {"embedding_ratios": (0.5,)}
    options = {"fold": FOLD, "cache": None, **few} | options
    return measure_sensitivity(loaded, options.pop("batches", BATCHES), **options)


def mean_loss(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch] = BATCHES,
    original: LoadedModel | None = None,
) -> float:
    """A step, as cuts of ``original``, by default of ``loaded``, are compared."""
    compared_with = adapter_of(loaded.family).compared_with
    outputs = [run_teacher_forced(original or loaded, batch) for batch in batches]
    found = [
        forecast_losses(loaded, batch, compared_with(output))
        for batch, output in zip(batches, outputs, strict=True)
    ]
    totals = [total for both in found for total in both]
    return sum(total for total, _ in totals) / sum(count for _, count in totals)


def state(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """Weights, modules with their types, and how many hooks there are."""
    modules = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    return {k: v.clone() for k, v in model.state_dict().items()}, modules, hook_count(model)


def assert_untouched(model: nn.Module, before: tuple[dict[str, torch.Tensor], Any, int]) -> None:
    weights, modules, hooks = state(model)
    assert (modules, hooks) == before[1:]
    assert list(weights) == list(before[0])
    for name, weight in weights.items():
        assert torch.equal(weight, before[0][name]), name
    assert not any("forward" in vars(module) for module in model.modules())


# --------------------------------------------------------------------------------------------------
# The data
# --------------------------------------------------------------------------------------------------


def part(**changes: Any) -> Part:
    fields = {"name": "a", "kind": "qk", "size": 8, "sizes": (4, 2, 1), "losses": (-0.1, 0.3, 0.2)}
    return Part.model_validate(fields | changes)


def holding(*parts: Part) -> Sensitivity:
    return Sensitivity(family="chronos-bolt", base_loss=1.0, parts=parts)


def test_costs_rise_and_meet_the_measurements() -> None:
    found = holding(part())
    assert [found.cost("a", "qk", size) for size in (8, 7, 5, 4)] == [0, 0, 0, 0]
    assert found.cost("a", "qk", 2) == found.cost("a", "qk", 1) == pytest.approx(0.25)
    # The line is straight over the logarithm of the size.
    share = np.log(4 / 3) / np.log(4 / 2)
    assert found.cost("a", "qk", 3) == pytest.approx(0.25 * share)


def test_costs_between_the_full_size_and_the_first_measurement() -> None:
    found = holding(part(sizes=(2,), losses=(0.4,)))
    assert found.cost("a", "qk", 4) == pytest.approx(0.2)
    layer = holding(part(name="encoder.block.0", kind="layer", size=1, sizes=(0,), losses=(0.5,)))
    assert layer.cost("encoder.block.0", "layer", 0) == 0.5
    assert layer.cost("encoder.block.0", "layer", 1) == 0


@pytest.mark.parametrize("size", [9, 1])
def test_unmeasured_sizes_are_refused(size: int) -> None:
    with pytest.raises(PlanError, match=r"measured at sizes 8 to 2, not"):
        holding(part(sizes=(4, 2), losses=(0.0, 0.1))).cost("a", "qk", size)


def test_unmeasured_parts_are_refused() -> None:
    with pytest.raises(PlanError, match=r"holds no vo of 'a'"):
        holding(part()).cost("a", "vo", 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": (0.1,)}, "3 sizes and 1 losses"),
        ({"sizes": (8, 2, 1)}, "descend from below 8"),
        ({"sizes": (4, 4, 1)}, "descend from below 8"),
        ({"sizes": (4, 2, 0)}, "descend from below 8"),
        ({"losses": (0.1, float("nan"), 0.2)}, "not finite"),
    ],
)
def test_invalid_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part(**changes)


def test_ranks_of_an_embedding_are_below_the_width() -> None:
    ranks: dict[str, Any] = {"sizes": (192, 128, 96, 64), "losses": (0.1, 0.2, 0.3, 0.4)}
    table = Part(name="shared", kind="embedding", size=256, **ranks)
    units = Part(name="feed", kind="hidden", size=512, sizes=(256,), losses=(0.5,))
    whole = Sensitivity(family="chronos-t5", base_loss=1.0, parts=(table, units))
    assert whole.cost("shared", "embedding", 96) == 0.3
    narrow = whole.of_width(128)
    assert [part.sizes for part in narrow.parts] == [(96, 64), (256,)]
    found = [narrow.cost("shared", "embedding", rank) for rank in (128, 96, 64)]
    assert found == [0.0, 0.3, 0.4]
    assert narrow.cost("feed", "hidden", 256) == 0.5
    assert whole.of_width(256) == whole
    assert whole.of_width(64).parts[0].sizes == ()


def test_rising_is_the_nearest_monotone_sequence() -> None:
    assert rising([0.1, 0.3, 0.2, 0.25, 0.9]) == pytest.approx([0.1, 0.25, 0.25, 0.25, 0.9])
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([]) == []


def test_save_and_load(tmp_path: Path) -> None:
    found = holding(part(losses=(0.1 + 0.2, -1e-17, 3e300)))
    found.cost("a", "qk", 2)
    found.save(tmp_path / "new" / "sensitivity.json")
    assert Sensitivity.load(tmp_path / "new" / "sensitivity.json") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "sensitivity: "),
        ('{"family": "x", "base_loss": 1, "parts": [], "extra": 1}', "extra: "),
        ('{"incomplete": {"family": "x", "base_loss": 1, "parts": []}}', "family: "),
    ],
)
def test_invalid_sensitivity_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        Sensitivity.load(tmp_path / "x.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="sensitivity"):
        Sensitivity.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(64, (48, 32, 24, 16, 12, 8, 6, 4, 2, 1)), (8, (6, 4, 2, 1)), (6, (3, 1)), (1, ())],
)
def test_default_head_sizes(size: int, sizes: tuple[int, ...]) -> None:
    assert default_head_sizes(size) == sizes


# --------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------


def test_series_with_covariates_count_as_much_as_those_without(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-2"])
    batch = windows(grouped=True)
    groups = torch.arange(len(batch)).clamp(min=1)  # the first two are one task
    target, future = batch.target.clone(), torch.full_like(batch.target, torch.nan)
    target[0], future[0] = torch.nan, batch.target[0]
    batch = replace(batch, group_ids=groups, target=target, future=future)

    original = adapter_of(loaded.family).compared_with(run_teacher_forced(loaded, batch))

    def means() -> list[float]:
        return [total / count for total, count in forecast_losses(loaded, batch, original)]

    (without, two), (driven, one) = forecast_losses(loaded, batch, original)
    assert (two, one) == ((len(batch) - 2) * target.shape[1], target.shape[1])
    forecasts, before = Forecasts(loaded, [batch]), means()
    assert forecasts.base == pytest.approx((without + driven) / (two + one))
    assert forecasts.loss() == pytest.approx(forecasts.base)
    with torch.no_grad():
        loaded.model.get_parameter("output_patch_embedding.output_layer.weight").mul_(3)
    rises = [after / base for after, base in zip(means(), before, strict=True)]
    assert rises[0] != pytest.approx(rises[1])
    assert forecasts.loss() == pytest.approx(forecasts.base * sum(rises) / 2)


@pytest.mark.parametrize(
    ("family", "last"),
    [
        ("chronos-2", "output_patch_embedding.output_layer.weight"),
        ("chronos-t5", "decoder.final_layer_norm.weight"),
    ],
)
def test_a_model_is_compared_with_its_own_forecasts(
    checkpoints: dict[str, Path], family: str, last: str
) -> None:
    """No change of it has a smaller loss there, though at the truth many have."""
    loaded = load(checkpoints[family])
    batch = windows(grouped=family == "chronos-2")
    batch.target[1, 3:] = torch.nan
    own = adapter_of(loaded.family).compared_with(run_teacher_forced(loaded, batch))
    assert own is not None
    base, truth = forecast_losses(loaded, batch, own)[0], forecast_losses(loaded, batch)[0]
    assert base[1] == truth[1] == int(torch.isfinite(batch.target).sum())
    weight = loaded.model.get_parameter(last)
    better = 0
    for seed in range(20):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.add_(0.05 * noise)
        assert forecast_losses(loaded, batch, own)[0][0] > base[0]
        better += forecast_losses(loaded, batch)[0][0] < truth[0]
        with torch.no_grad():
            weight.sub_(0.05 * noise)
    assert better > 2


def test_a_certain_forecast_counts_as_much_as_an_uncertain_one(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved by half of its own spread, each has the same rise, if losses are relative."""
    monkeypatch.setattr(patches, "LEAST_SPREAD", 0.0)
    loaded = load(checkpoints["chronos-2"])
    model: Any = loaded.model
    batch = windows(grouped=True)
    context = batch.context.nan_to_num()
    center, scale = context.mean(1), context.std(1)
    batch = replace(batch, context=context)
    levels = torch.tensor(model.chronos_config.quantiles)

    def rise(row: int, width: float, *, relative: bool) -> float:
        """Of a series whose forecast spreads by ``width`` of its context's spread."""
        target = torch.full_like(batch.target, torch.nan)
        target[row] = 0
        spread = width * scale[:, None, None]
        own = center[:, None, None] + spread * (levels[:, None] - 0.5)
        own = own.expand(-1, -1, target.shape[1])

        def loss(moved: float) -> float:
            output = SimpleNamespace(quantile_preds=own + moved * spread)
            family, alone = adapter_of(loaded.family), replace(batch, target=target)
            loss_of = family.relative_cut_loss if relative else family.cut_loss
            total, count = loss_of(loaded.forecaster, output, alone, own)
            return total / count

        if relative:
            assert loss(0) == pytest.approx(1)
        return loss(0.5) - loss(0)

    assert rise(0, 0.1, relative=True) == pytest.approx(rise(1, 0.001, relative=True), rel=0.02)
    assert rise(0, 0.1, relative=True) > 0.1
    assert rise(0, 0.1, relative=False) > 50 * rise(1, 0.001, relative=False)


def test_a_copy_is_held_against_the_model(checkpoints: dict[str, Path]) -> None:
    for family in FAMILIES:
        loaded = load(checkpoints[family])
        forecasts = Forecasts(loaded, BATCHES, relative=True)
        before = forecasts.loss()
        assert forecasts.loss(copy.deepcopy(loaded)) == before
        cut = copy.deepcopy(loaded)
        with torch.no_grad():
            for weight in cut.model.parameters():
                weight.mul_(1.5)
        assert forecasts.loss(cut) > before
        assert forecasts.loss() == before
        in_units = forecasts.base != Forecasts(loaded, BATCHES).base
        assert in_units == (family == "chronos-2")


def test_a_bolt_is_compared_with_the_truth(checkpoints: dict[str, Path]) -> None:
    loaded, batch = load(checkpoints["chronos-bolt"]), windows()
    assert adapter_of(loaded.family).compared_with(run_teacher_forced(loaded, batch)) is None


def test_a_model_that_was_cut_is_compared_with_the_original(checkpoints: dict[str, Path]) -> None:
    original, cut = load(checkpoints["chronos-2"]), load(checkpoints["chronos-2"])
    batch = windows(grouped=True)
    with torch.no_grad():
        cut.model.get_parameter("output_patch_embedding.output_layer.weight").mul_(3)
    theirs = adapter_of(original.family).compared_with(run_teacher_forced(original, batch))
    total, count = forecast_losses(cut, batch, theirs)[0]
    forecasts = Forecasts(cut, [batch], original)
    assert forecasts.base == pytest.approx(total / count)
    assert forecasts.loss() == pytest.approx(total / count)
    assert Forecasts(cut, [batch]).base != pytest.approx(total / count)


def test_loss_of_t5_equals_stock_loss(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    batch = windows()
    batch.target[1, 3:] = torch.nan
    total, count = forecast_loss(loaded, batch)
    assert count == int(torch.isfinite(batch.target).sum())
    tokenizer: Any = loaded.forecaster.tokenizer
    input_ids, mask, scale = tokenizer.context_input_transform(batch.context)
    labels, observed, _ = tokenizer._input_transform(batch.target, scale=scale)
    labels[~observed] = -100
    own = loaded.model(input_ids=input_ids, attention_mask=mask, labels=labels).loss
    assert total / count == pytest.approx(own.item(), rel=1e-5)


def test_loss_of_bolt_equals_stock_loss(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    for batch in BATCHES:  # the second has half the model's horizon
        total, count = forecast_loss(loaded, batch)
        assert count == batch.target.numel()
        # Bolt's own: mean over quantile levels and series, sum over steps.
        own = loaded.model(context=batch.context, target=batch.target).loss
        assert total / len(batch.target) == pytest.approx(own.item(), rel=1e-5)


def test_loss_of_chronos_2_equals_stock_loss(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    batch = windows()
    total, count = forecast_loss(loaded, batch)
    assert count == batch.target.numel()
    # Chronos-2's own: sum over quantile levels, mean over steps and series.
    own = loaded.model(context=batch.context, future_target=batch.target).loss
    levels = len(loaded.model.chronos_config.quantiles)  # type: ignore[union-attr,arg-type]
    assert levels * total / count == pytest.approx(own.item(), rel=1e-4)


def test_series_count_alike_whatever_their_scale(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    batch = windows()
    larger = ForecastBatch(1024 * batch.context, 1024 * batch.target)
    assert forecast_loss(loaded, larger)[0] == pytest.approx(forecast_loss(loaded, batch)[0])


def test_missing_targets_do_not_count(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    batch = windows()
    shorter = ForecastBatch(batch.context, batch.target[:, :5])
    padded = ForecastBatch(batch.context, batch.target.clone())
    padded.target[:, 5:] = torch.nan
    total, count = forecast_loss(loaded, padded)
    assert count == 5 * len(batch.target)
    assert total == pytest.approx(forecast_loss(loaded, shorter)[0], rel=1e-6)


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_a_jump_that_nobody_forecasts_does_not_outweigh_the_rest(
    checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, batch = load(checkpoints[family]), windows()
    target = batch.target.clone()
    target[1, 6] += 1e6 * float(batch.context[1].std())
    jump = replace(batch, target=target)
    (usual, count), (jumped, as_many) = (forecast_loss(loaded, one) for one in (batch, jump))
    assert as_many == count
    steps = batch.target.shape[1]
    assert usual < jumped < usual + 2 * steps * patches.FURTHEST
    monkeypatch.setattr(patches, "FURTHEST", np.inf)
    assert forecast_loss(loaded, batch)[0] == usual  # where nothing is far, nothing changes
    unbounded = forecast_loss(loaded, jump)[0]
    # Chronos-2 is trained on arcsinh, which bounds a jump by itself.
    assert unbounded > 1e4 if family == "chronos-bolt" else unbounded == jumped


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_constant_contexts_have_no_scale_and_do_not_count(
    family: str, checkpoints: dict[str, Path]
) -> None:
    loaded = load(checkpoints[family])
    batch = windows()
    batch.context[1] = 3.3
    batch.context[2] = 1000.0 + 1e-3 * torch.rand(batch.context.shape[1])
    batch.context[3] = torch.nan
    total, count = forecast_loss(loaded, batch)
    assert count == (len(batch.target) - 3) * batch.target.shape[1]
    assert total / count < 100


# --------------------------------------------------------------------------------------------------
# The pass
# --------------------------------------------------------------------------------------------------


def test_a_pass_measures_every_part_and_leaves_the_model_alone(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    before, calls = state(loaded.model), []
    base = mean_loss(loaded)
    found = measure(
        loaded, width_ratios=(0.5, 0.25), on_progress=lambda *progress: calls.append(progress)
    )
    assert_untouched(loaded.model, before)
    assert found.base_loss == base == mean_loss(loaded)
    total = sum(len(part.sizes) for part in found.parts)
    assert calls == [(done, total) for done in range(total + 1)]
    plan = fold_plan(loaded.model, loaded.architecture)
    layers = {part.name.rpartition(".layer.")[0] for part in plan.heads}
    assert {(part.name, part.kind) for part in found.parts} == {
        *((head.name, kind) for head in plan.heads for kind in ("qk", "vo")),
        *((hidden.name, "hidden") for hidden in plan.hidden),
        *((layer, "layer") for layer in layers),
        ("stream", "width"),
        *([("shared", "embedding")] if loaded.family == "chronos-t5" else []),
    }
    for measured in found.parts:
        assert found.cost(measured.name, measured.kind, measured.size) == 0
        costs = [found.cost(measured.name, measured.kind, size) for size in measured.sizes]
        assert costs[0] >= 0
        assert costs == sorted(costs)
    assert any(loss != 0 for measured in found.parts for loss in measured.losses)


def folded(loaded: LoadedModel, name: str, kind: PartKind, size: int) -> LoadedModel:
    """A copy with one part folded, by the way that a plan takes."""
    copied = replace(loaded, model=copy.deepcopy(loaded.model))
    sizes: dict[str, Any] = {kind: {name: size}}
    plan = fold_plan(loaded.model, loaded.architecture, **sizes)
    fold_(copied, plan, BATCHES, FOLD.model_copy(update={"refit": "layer"}))
    return copied


def assert_as_folded(loaded: LoadedModel, found: Sensitivity, part: Part) -> None:
    smaller = folded(loaded, part.name, part.kind, part.sizes[-1])
    expected = mean_loss(smaller, original=loaded)
    assert found.base_loss + part.losses[-1] == pytest.approx(expected, rel=1e-5), part.name


def test_losses_are_those_of_folded_models(checkpoint: Path) -> None:
    # Of patches, and of parts late in the model, for which what precedes them was recalled.
    loaded = load(checkpoint)
    found = measure(loaded, head_sizes=(4, 2), layers=False)
    compared = [
        measured for measured in found.parts
        if ".block.0." not in measured.name or "EncDecAttention" in measured.name
        if loaded.family != "chronos-t5" or measured.name.startswith("decoder")
    ]  # fmt: skip
    assert {measured.kind for measured in compared} == {"qk", "vo", "hidden"}
    for measured in compared:
        assert_as_folded(loaded, found, measured)


def test_the_loss_of_a_token_embedding_is_that_of_a_folded_model(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-t5"])
    found = measure(loaded, **FEWEST | {"layers": False})
    (measured,) = (one for one in found.parts if one.sizes)
    assert measured.kind == "embedding"
    assert_as_folded(loaded, found, measured)


def without_layer(loaded: LoadedModel, stack: str, dropped: int) -> LoadedModel:
    """A model built with one layer less and the weights of those that stay."""
    key = "num_decoder_layers" if stack == "decoder" else "num_layers"
    config = {**loaded.config, key: loaded.config[key] - 1}
    if stack == "encoder" and "num_decoder_layers" not in config:
        config["num_decoder_layers"] = loaded.config["num_layers"]
    weights = {}
    for name, weight in loaded.model.state_dict().items():
        if name.startswith(f"{stack}.block."):
            depth = int(name.split(".")[2])
            if depth == dropped and "relative_attention_bias" not in name:
                continue
            moved = 0 if "relative_attention_bias" in name else depth - (depth > dropped)
            name = name.replace(f"{stack}.block.{depth}.", f"{stack}.block.{moved}.", 1)
        weights[name] = weight
    model = build_empty(loaded.family, config)
    model.load_state_dict(weights, strict=True, assign=True)
    return replace(loaded, model=model.eval(), pipeline=wrap_pipeline(loaded.family, model))


def test_a_dropped_layer_is_a_model_without_it(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plain = FOLD.model_copy(update={"refit": "none"})
    found = measure(loaded, head_sizes=(), hidden_ratios=(), fold=plain)
    layers = [part for part in found.parts if part.kind == "layer"]
    assert len(layers) == (2 if loaded.family == "chronos-2" else 4)
    for layer in layers:
        stack, _, depth = layer.name.split(".")
        expected = mean_loss(without_layer(loaded, stack, int(depth)), original=loaded)
        assert found.base_loss + layer.losses[0] == pytest.approx(expected, rel=1e-5)
        assert abs(layer.losses[0]) > 1e-6


def test_feed_forward_before_a_dropped_layer_is_fitted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    plain = FOLD.model_copy(update={"refit": "none"})
    sizes: dict[str, Any] = {"head_sizes": (), "hidden_ratios": ()}

    def losses_of(**options: Any) -> dict[str, tuple[float, ...]]:
        found = measure(loaded, **sizes, **options).parts
        return {part.name: part.losses for part in found if part.kind == "layer"}

    raw = losses_of(fold=plain)
    missed: list[tuple[str, float, float]] = []

    def miss(step: Step) -> float:
        assert step.reference is not None
        return sum(
            float((target - step.run(index))[slice(None) if valid is None else valid].norm())
            for index, (target, valid) in enumerate(zip(step.reference, step.valid, strict=True))
        )

    def refit(step: Step, *args: Any) -> None:
        before = miss(step)
        refit_(step, *args)
        missed.append((step.block.name, before, miss(step)))

    monkeypatch.setattr(sensitivity, "refit_", refit)
    found = losses_of()
    assert found.keys() == raw.keys()
    for name, losses in found.items():
        assert (losses == raw[name]) == name.endswith(".0")
    stacks = ["encoder"] if loaded.family == "chronos-2" else ["encoder", "decoder"]
    assert [name.split(".")[:3] for name, *_ in missed] == [[s, "block", "0"] for s in stacks]
    assert all(after < 0.9 * before for _, before, after in missed)


@two_stacks
def test_holdout_windows_are_those_the_loss_is_measured_on(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    holdout = [windows(7)]
    found = measure(loaded, holdout=holdout, head_sizes=(1,), hidden_ratios=(), layers=False)
    assert found.base_loss == mean_loss(loaded, holdout)
    assert found.settings["holdout_windows"] == len(holdout[0].context)


def test_time_attention_is_tried_at_sizes_of_a_plain_config(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    found = sensitivity.unmeasured(loaded, FOLD, layers=False)
    kinds = {block.name: block.kind for block in loaded.architecture.attention}
    for measured in found.parts:
        if measured.kind in ("qk", "vo"):
            turned = measured.kind == "qk" and kinds[measured.name] == "time"
            assert measured.sizes == ((4, 2) if turned else (6, 4, 2, 1))


def test_a_single_key_makes_scores_irrelevant(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    found = measure(loaded, head_sizes=(2, 1), hidden_ratios=(), layers=False)
    single = [p for p in found.parts if p.name.startswith("decoder") and "SelfAtt" in p.name]
    assert len(single) == 4
    for measured in single:
        if measured.kind == "qk":
            assert max(map(abs, measured.losses)) < 1e-6


@two_stacks
def test_silent_blocks_cost_nothing(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    name = loaded.architecture.attention[0].name
    units = loaded.architecture.feed_forward[0].projections
    with torch.no_grad():
        for role in "qkvo":
            loaded.model.get_parameter(f"{name}.{role}.weight").zero_()
        for linear in units.values():
            loaded.model.get_parameter(f"{linear}.weight").zero_()
    found = measure(loaded)
    for measured in found.parts:
        if measured.name in (name, loaded.architecture.feed_forward[0].name):
            assert set(measured.losses) == {0.0}


@two_stacks
def test_the_model_survives_an_interruption(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    before = state(loaded.model)
    with pytest.raises(KeyboardInterrupt):
        measure(loaded, on_progress=interrupt(7))
    assert_untouched(loaded.model, before)


@two_stacks
def test_the_model_survives_an_error_inside_a_forward_pass(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    before = state(loaded.model)
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 35:
            raise KeyboardInterrupt
        return run_teacher_forced(*args)

    monkeypatch.setattr(losses_module, "run_teacher_forced", failing)
    with pytest.raises(KeyboardInterrupt):
        measure(loaded)
    assert_untouched(loaded.model, before)


def test_a_loss_that_is_not_finite_names_the_part(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    broken = load(checkpoints["chronos-bolt"])
    with torch.no_grad():
        broken.model.get_parameter("output_patch_embedding.output_layer.bias").fill_(torch.nan)
    with pytest.raises(DataError, match="own forecast loss is nan"):
        measure(broken)
    losses = iter([1.0, float("inf")])
    monkeypatch.setattr(losses_module.Forecasts, "loss", lambda self: next(losses))
    with pytest.raises(FactorizationError, match=r"layer of encoder\.block\.0 at 0"):
        measure(loaded)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches": []}, DataError, "at least one batch"),
        ({"holdout": []}, DataError, "at least one batch"),
        ({"head_sizes": (4, 0)}, PlanError, "at least 1, not 0"),
        ({"hidden_ratios": (1.0,)}, PlanError, "between 0 and 1, not 1.0"),
        (
            {"holdout": [ForecastBatch(windows().context, torch.full((6, 4), torch.nan))]},
            DataError,
            "no window",
        ),
    ],
)
def test_unmeasurable_models_and_windows_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(error, match=message):
        measure(load(checkpoints["chronos-bolt"]), **options)


def test_compressed_models_are_not_measured(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    loaded.plan = fold_plan(loaded.model, loaded.architecture, qk=4)
    with pytest.raises(PlanError, match="compressed already"):
        measure(loaded)


# --------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------


def interrupt(after: int) -> Any:
    def on_progress(done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    return on_progress


def cached(directory: Path) -> Path:
    (found,) = (directory / "sensitivity").iterdir()
    return found


class Forwards:
    """How often the model ran."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(lambda *_: self.see())

    def see(self) -> None:
        self.count += 1


@any_family
def test_second_pass_reads_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    found = measure(load(checkpoint), cache=tmp_path)
    again, calls = load(checkpoint), []
    forwards = Forwards(again.model)
    assert measure(again, cache=tmp_path, on_progress=lambda *p: calls.append(p)) == found
    assert forwards.count == 0
    total = sum(len(part.sizes) for part in found.parts)
    assert calls == [(total, total)]
    assert Sensitivity.load(cached(tmp_path)) == found


def test_changed_inputs_miss_the_cache(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    batches = [windows(0, steps=32, horizon=8, grouped=True)]
    same: dict[str, Any] = {
        "batches": batches,
        "head_sizes": (),
        "hidden_ratios": (),
        "layers": False,
        "cache": tmp_path,
    }
    measure(loaded, **same)
    forwards = Forwards(loaded.model)
    changed = [copy.deepcopy(batches[0])]
    changed[0].target[0, 0] += 1e-3
    other = load(checkpoints["chronos-bolt"])
    with torch.no_grad():
        other.model.get_parameter("shared.weight")[0, 0] += 1e-3
    differently: list[tuple[LoadedModel, dict[str, Any]]] = [
        (loaded, {"batches": changed}),
        (loaded, {"holdout": changed}),
        (loaded, {"batches": [replace(batches[0], group_ids=None)]}),
        (loaded, {"hidden_ratios": (0.5,)}),
        (loaded, {"layers": ("decoder",)}),
        (loaded, {"fold": FoldConfig(damping=0.5)}),
        (replace(loaded, config={**loaded.config, "x": 1}), {}),
        (other, {}),
        (load(checkpoints["chronos-bolt"], dtype="bfloat16"), {}),
        (loaded, {"original": other}),
    ]
    for number, (model, options) in enumerate(differently, start=2):
        measure(model, **{**same, **options})
        assert len(list((tmp_path / "sensitivity").iterdir())) == number
    before = forwards.count
    measure(loaded, **same)
    # Fitting to the residual stream makes no difference where one part alone is folded.
    measure(loaded, **same, fold=FOLD.model_copy(update={"refit": "layer"}))
    # Nor does the precision of a walk through the compressed model.
    measure(loaded, **same, fold=FOLD.model_copy(update={"precision": "bfloat16"}))
    assert forwards.count == before
    monkeypatch.setattr(sensitivity_cache, "code_digest", lambda modules: "another")
    measure(loaded, **same)
    assert forwards.count > before
    before = forwards.count
    monkeypatch.setattr(sensitivity_cache, "versions", lambda: {"torch": "0.0.1"})
    measure(loaded, **same)
    assert forwards.count > before


@pytest.mark.parametrize(
    ("checkpoint", "after"), [("chronos-bolt", 17), ("chronos-2", 3)], indirect=["checkpoint"]
)
def test_interrupted_pass_resumes(checkpoint: Path, tmp_path: Path, after: int) -> None:
    loaded = load(checkpoint)
    whole = measure(loaded)
    with pytest.raises(KeyboardInterrupt):
        measure(loaded, cache=tmp_path, on_progress=interrupt(after))
    with pytest.raises(PlanError):
        Sensitivity.load(cached(tmp_path))
    kept = json.loads(cached(tmp_path).read_text())["incomplete"]
    # All parts that were finished before the one it stopped in.
    assert 0 <= after - sum(len(part["sizes"]) for part in kept["parts"]) <= 2
    calls: list[tuple[int, int]] = []
    assert measure(loaded, cache=tmp_path, on_progress=lambda *p: calls.append(p)) == whole
    assert calls[0][0] == sum(len(part["sizes"]) for part in kept["parts"])
    assert calls[-1] == (calls[-1][1],) * 2
    assert Sensitivity.load(cached(tmp_path)) == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\udcff",
        lambda text: json.dumps({**json.loads(text), "version": 2}),
        lambda text: json.dumps({**json.loads(text), "parts": json.loads(text)["parts"][:-1]}),
        lambda text: json.dumps({"incomplete": []}),
        lambda text: text.replace('"size": 8', '"size": 9'),
    ],
)
def test_damaged_files_are_measured_again(
    checkpoints: dict[str, Path], tmp_path: Path, damage: Any
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    found = measure(loaded, **FEWEST, cache=tmp_path)
    path = cached(tmp_path)
    whole = path.read_text()
    damaged = damage(whole)
    assert damaged != whole
    path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    assert measure(loaded, **FEWEST, cache=tmp_path) == found
    assert Sensitivity.load(path) == found


def test_cache_directory_follows_the_environment(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    fewest = FEWEST | {"layers": False, "cache": "default"}
    monkeypatch.delenv("TSCOMPRESS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    measure(loaded, **fewest)
    assert cached(tmp_path / "home" / ".cache" / "tscompress").suffix == ".json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    measure(loaded, **fewest)
    assert cached(tmp_path / "xdg" / "tscompress").exists()
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "own"))
    measure(loaded, **fewest)
    assert cached(tmp_path / "own").exists()


def test_without_a_home_nothing_is_cached(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    loaded = load(checkpoints["chronos-bolt"])
    for name in ("TSCOMPRESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    stored: list[Any] = []
    monkeypatch.setattr(SensitivityStore, "write", lambda *given, **_: stored.append(given))
    assert measure(loaded, **FEWEST, cache="default").parts
    assert not stored


def test_unwritable_cache_warns_once(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = measure(load(checkpoints["chronos-bolt"]), **FEWEST, cache=tmp_path / "file")
    assert found.parts
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TSCOMPRESS_CACHE" in caplog.text
