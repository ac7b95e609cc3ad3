"""Narrower residual streams on tiny checkpoints: what must not change, and what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chronos import BaseChronosPipeline
from families_of_tests import any_family, two_stacks
from hooks import hook_count
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_folding import (
    CALIBRATION,
    FOLD,
    distance,
    folded,
    outputs,
    predict,
    waves,
    weights,
    with_each_refit,
)
from torch import Tensor, nn
from typer.testing import CliRunner

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.cli.app import app
from tscompress.compression.apply import fold_planned_, keep_layers_
from tscompress.compression.calibration import calibration_batches
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.layer_walk import reconstruction
from tscompress.compression.residual_stream import principal_directions, rotate_, streams_of
from tscompress.data.batch import ForecastBatch
from tscompress.errors import PlanError, RecipeError, UnsupportedModelError, UsageError
from tscompress.families.registry import adapter_of
from tscompress.families.t5_stack import has_own_head
from tscompress.plan.layer_plans import WidthPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule
from tscompress.plan.width import dimensions_of
from tscompress.reports.content import plan_label
from tscompress.training.distillation import check_comparable
from tscompress.training.norm_sizes import keep_norm_sizes_
from tscompress.workflows.recipe import Recipe, validate
from tscompress.workflows.sweep_points import SweepRecipe, points_of

D_MODEL, WIDTH = 24, 12  # of the checkpoints in shared_fixtures, and of what is made of them
EPSILON = 0.05


def with_norms(checkpoint: Path) -> LoadedModel:
    """The checkpoint with norms whose weights are not all 1, as those of trained models.

    What keeps their mean of squares from 0 is large, so that it has to be right.
    """
    loaded = load(checkpoint)
    generator = torch.Generator().manual_seed(0)
    for name in streams_of(loaded.model).norms:
        norm: Any = loaded.model.get_submodule(name)
        norm.weight.data = 0.5 + torch.rand(norm.weight.shape, generator=generator)
        norm.variance_epsilon = EPSILON
    loaded.model.config.layer_norm_epsilon = EPSILON  # type: ignore[union-attr]
    return loaded


def saved(loaded: LoadedModel, directory: Path) -> Path:
    loaded.model.save_pretrained(directory)  # type: ignore[operator]
    return directory


def random_basis(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(D_MODEL, D_MODEL, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(matrix).Q


def make_narrow_(loaded: LoadedModel, width: int) -> None:
    """Let nothing write outside a random subspace of each stream, another one for each stack."""
    model: Any = loaded.model
    alike = loaded.family != "chronos-bolt"
    spaces = {stack: random_basis(0 if alike else i)[:, :width] for i, stack in enumerate(STACKS)}
    project = {stack: (space @ space.T).float() for stack, space in spaces.items()}
    for name, stack in streams_of(model).writers.items():
        linear = model.get_submodule(name)
        linear.weight.data = project[stack] @ linear.weight.data
        if linear.bias is not None:
            linear.bias.data = project[stack] @ linear.bias.data
    table = model.shared.weight
    rows = table.data @ project["encoder"]
    if not alike:
        start = model.config.decoder_start_token_id
        rows[start] = table.data[start] @ project["decoder"]
    table.data.copy_(rows)


STACKS = ("encoder", "decoder")


# --------------------------------------------------------------------------------------------------
# Turning
# --------------------------------------------------------------------------------------------------


def test_every_linear_layer_reads_or_writes_a_stream(checkpoint: Path) -> None:
    """But for the ends of the patch embeddings, which hold series, and hidden units."""
    model: Any = load(checkpoint).model
    streams = streams_of(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reads, writes = name in streams.readers, name in streams.writers
        sides = (module.in_features, module.out_features)
        touches = tuple(size == D_MODEL for size in sides)
        assert (reads, writes) == touches, name
    norms = [name for name, module in model.named_modules() if "LayerNorm" in type(module).__name__]
    assert sorted(norms) == sorted(streams.norms)
    assert set(streams.readers.values()) == set(norms)


def test_rotated_stream_keeps_outputs(checkpoint: Path) -> None:
    loaded = with_norms(checkpoint)
    expected, before = outputs(loaded), weights(loaded)
    names = STACKS if loaded.family != "chronos-2" else STACKS[:1]
    alike = loaded.family != "chronos-bolt"
    rotate_(loaded, {stack: random_basis(0 if alike else i) for i, stack in enumerate(names)})
    assert distance(outputs(loaded), expected) < 1e-5
    found = weights(loaded)
    streams = streams_of(loaded.model)
    for name in streams.norms:
        assert torch.equal(found[f"{name}.weight"], torch.ones(D_MODEL))
    for name in (*streams.readers, *streams.writers):
        key = f"{name}.weight"
        if key in before:  # a tied head has no name of its own
            assert distance(found[key], before[key]) > 0.1


def test_bases_are_principal_directions(checkpoint: Path) -> None:
    loaded = with_norms(checkpoint)
    make_narrow_(loaded, 5)
    bases = principal_directions(loaded, calibration_batches(loaded, CALIBRATION))
    alike = loaded.family != "chronos-bolt"
    for index, (stack, basis) in enumerate(sorted(bases.items(), reverse=True)):
        assert torch.allclose(basis.T @ basis, torch.eye(D_MODEL, dtype=torch.float64), atol=1e-9)
        space = random_basis(0 if alike else index)[:, :5]
        assert torch.allclose(space @ (space.T @ basis[:, :5]), basis[:, :5], atol=1e-5), stack


def test_directions_with_most_energy_come_first(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    batches = calibration_batches(loaded, CALIBRATION)
    seen: list[Tensor] = []
    norm = loaded.model.get_submodule("decoder.block.1.layer.2.layer_norm")
    bases = principal_directions(loaded, batches)
    rotate_(loaded, bases)
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    outputs(loaded, batches)
    handle.remove()
    energy = torch.cat(seen).square().mean(0)
    assert energy[:4].sum() > 0.9 * energy.sum()


@two_stacks
def test_padding_is_ignored_and_hooks_are_removed(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    series = waves(4, 40)
    padded = [torch.nn.functional.pad(torch.tensor(s), (24, 0), value=torch.nan) for s in series]
    given = calibration_batches(loaded, CALIBRATION, series)
    longer = calibration_batches(loaded, CALIBRATION, [s.numpy() for s in padded])
    for found, expected in zip(
        principal_directions(loaded, longer).values(),
        principal_directions(loaded, given).values(),
        strict=True,
    ):
        torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-3, atol=1e-3)
    assert hook_count(loaded.model) == 0


def test_long_batches_run_in_parts_and_have_the_same_bases(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    make_narrow_(loaded, 5)  # the space of the first five is not a matter of rounding
    steps = 2048 if loaded.family == "chronos-t5" else 2048 * 8
    context, target = (torch.randn(32, length).cumsum(-1) for length in (steps // 8, 4))
    target[::3, 2:] = torch.nan
    batches = [ForecastBatch(context, target), ForecastBatch(context[:3, -9:], target[:3])]
    calls: list[int] = []
    handle = loaded.model.encoder.register_forward_hook(
        lambda _, args, out: calls.append(out[0].shape[:2].numel())
    )
    found = principal_directions(loaded, batches)
    parts = calls.copy()
    monkeypatch.setattr(
        "tscompress.compression.residual_stream.small_batches", lambda _, batches, **__: batches
    )
    expected = principal_directions(loaded, batches)
    handle.remove()
    assert len(parts) >= 5
    assert 4 * max(parts) <= max(calls)
    for stack, basis in found.items():
        ours, theirs = (one[:, :5] @ one[:, :5].T for one in (basis, expected[stack]))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Slicing
# --------------------------------------------------------------------------------------------------


@two_stacks
@with_each_refit
def test_stream_of_few_directions_is_sliced_without_loss(
    checkpoint: Path, tmp_path: Path, config: FoldConfig
) -> None:
    original = with_norms(checkpoint)
    make_narrow_(original, WIDTH)
    expected, forecast = outputs(original), predict(original)
    narrow = folded(saved(original, tmp_path), config, width=WIDTH)
    assert narrow.config["d_model"] == narrow.model.config.d_model == WIDTH  # type: ignore[union-attr]
    assert distance(outputs(narrow), expected) < 1e-4
    assert distance(predict(narrow), forecast) < 1e-4


@two_stacks
def test_sliced_dimensions_are_reconstructed(checkpoint: Path, tmp_path: Path) -> None:
    """Output projections are fitted to the stream of the original, in the directions that stay."""
    original = with_norms(checkpoint)
    directory = saved(original, tmp_path)
    expected = outputs(original)
    lost = {
        refit: distance(outputs(folded(directory, config, width=WIDTH)), expected)
        for refit, config in {
            "residual": FOLD,
            "none": FoldConfig(refit="none", precision="float32"),
        }.items()
    }
    assert lost["residual"] < 0.95 * lost["none"]
    wider = distance(outputs(folded(directory, FOLD, width=2 * WIDTH - 4)), expected)
    assert wider < lost["residual"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliced_checkpoint_is_stock(checkpoint: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    original = with_norms(checkpoint)
    original.model.to(dtype)
    source = saved(original, tmp_path / "source")
    small = tscompress.compress(
        source, rank=4, ff_ratio=0.5, width=WIDTH, calibration=CALIBRATION, fold=FOLD
    )
    assert small.plan is not None
    assert small.plan.summary().startswith(
        "fold to a stock config with d_model 12, d_kv 4, d_ff 20"
    )
    tscompress.save(small, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (config["d_model"], config["d_kv"], config["d_ff"]) == (WIDTH, 4, 20)
    assert config["layer_norm_epsilon"] == pytest.approx(2 * EPSILON)
    options = {"torch_dtype": dtype}
    stock = BaseChronosPipeline.from_pretrained(tmp_path / "small", **options)
    assert torch.equal(predict(stock), predict(load(tmp_path / "small")))
    assert torch.equal(predict(stock), predict(small))
    assert stock.inner_model.config.d_model == WIDTH


@two_stacks
@pytest.mark.parametrize(
    "options", [{"schedule": (2.5, 0.5)}, {"rank": 4, "exclude": ["*layer.0*"]}]
)
def test_sizes_by_layer_are_a_factored_checkpoint(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    small = tscompress.compress(
        checkpoint, width=WIDTH, **options, calibration=CALIBRATION, fold=FOLD
    )
    assert small.plan is not None
    assert "fold, residual stream: 12 of 24" in small.plan.summary()
    tscompress.save(small, tmp_path / "small")
    again = tscompress.load(tmp_path / "small")
    assert again.plan == small.plan
    assert torch.equal(predict(again), predict(small))
    assert parameter_count(again.model) == parameter_count(small.model)


def test_latent_of_full_rank_is_exact_after_slicing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    for family in ("chronos-t5", "chronos-bolt"):
        original = with_norms(checkpoints[family])
        make_narrow_(original, WIDTH)
        expected = outputs(original)
        small = folded(saved(original, tmp_path / family), width=WIDTH, latent=WIDTH)
        assert distance(outputs(small), expected) < 1e-4


def test_with_a_latent(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    small = tscompress.compress(
        checkpoints["chronos-t5"], width=WIDTH, latent=6, calibration=CALIBRATION, fold=FOLD
    )
    tscompress.save(small, tmp_path / "small")
    assert torch.equal(predict(tscompress.load(tmp_path / "small")), predict(small))
    assert small.plan is not None
    roles = ("q", "k", "v", "o", "down")
    found = [
        weight.numel() for name, weight in weights(small).items() if name.split(".")[-2] in roles
    ]
    assert small.plan.parameters("attention")[1] == sum(found)


def test_parameter_counts_of_the_plan_are_exact(checkpoint: Path) -> None:
    small = folded(checkpoint, width=WIDTH, qk=4, vo=4, hidden=20)
    assert small.plan is not None
    model: Any = small.model
    counted = 0
    for part in ("attention", "feed_forward"):
        counted += small.plan.parameters(part)[1]
    streams = streams_of(model)
    inside = {name for name in (*streams.readers, *streams.writers) if ".block." in name}
    assert counted == sum(model.get_submodule(name).weight.numel() for name in inside)
    units = [h for h in small.plan.narrowed().hidden if h.part == "patch"]
    for entry in units:
        patch = model.get_submodule(entry.name)
        linears = patch.hidden_layer, patch.output_layer
        assert entry.parameters == sum(x.weight.numel() for x in linears) + len(linears[0].bias)


@two_stacks
def test_a_plan_is_applied_again_and_compared(checkpoint: Path, tmp_path: Path) -> None:
    first = tscompress.compress(checkpoint, width=WIDTH, calibration=CALIBRATION, fold=FOLD)
    assert first.plan is not None
    assert first.plan.changes_anything
    first.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    again = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION, fold=FOLD)
    for name, weight in weights(again).items():
        assert torch.equal(weight, weights(first)[name]), name
    loaded = load(checkpoint)
    whole = fold_plan(loaded.model, loaded.architecture)
    assert whole.diff(plan) == ["width: all -> 12"]
    with pytest.raises(PlanError, match=r"d_model of 24.* 12"):
        tscompress.compress(_folded_again(first, tmp_path), plan=_of_width(plan, 12))


def _folded_again(small: Any, tmp_path: Path) -> Path:
    tscompress.save(small, tmp_path / "small")
    return tmp_path / "small"


def _of_width(plan: Plan, d_model: int) -> Plan:
    """A plan of a narrower model that takes it for the wider one."""
    return plan.narrowed().model_copy(update={"width": plan.width})


def test_narrow_again(checkpoint: Path, tmp_path: Path) -> None:
    """What is narrow may become narrower."""
    first = tscompress.compress(checkpoint, width=16, calibration=CALIBRATION, fold=FOLD)
    tscompress.save(first, tmp_path / "first")
    second = tscompress.compress(tmp_path / "first", width=8, calibration=CALIBRATION, fold=FOLD)
    assert second.config["d_model"] == 8
    assert second.config["layer_norm_epsilon"] == pytest.approx(3e-6)
    assert predict(second).isfinite().all()


def test_with_fewer_layers(checkpoint: Path, tmp_path: Path) -> None:
    small = tscompress.compress(
        checkpoint, width=WIDTH, layers=1, calibration=CALIBRATION, fold=FOLD
    )
    assert small.config["d_model"] == WIDTH
    assert small.config["num_layers"] == 1
    tscompress.save(small, tmp_path / "small")
    stock = BaseChronosPipeline.from_pretrained(tmp_path / "small")
    assert torch.equal(predict(stock), predict(small))


@pytest.mark.parametrize("options", [{}, {"layers": 1}], ids=["all layers", "one layer"])
def test_norms_of_a_student_get_the_size_of_its_teachers(
    options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """And it says the same to the bit, as sizes are powers of two."""
    teacher = with_norms(checkpoint)
    for place, name in enumerate(streams_of(teacher.model).norms):
        norm: Any = teacher.model.get_submodule(name)
        norm.weight.data *= 2.0 ** -(place % 4)
    directory = saved(teacher, tmp_path)
    student = tscompress.compress(
        directory, width=WIDTH, calibration=CALIBRATION, fold=FOLD, **options
    )
    assert student.plan is not None
    before, kept = predict(student), student.plan.kept_layers or {}
    keep_norm_sizes_(student, teacher)
    assert torch.equal(predict(student), before)
    sizes = set()
    stacks = [stack for stack in STACKS if hasattr(student.model, stack)]
    for name in streams_of(student.model).norms:
        old = name
        if kept and ".block.0." in name:  # the only one left
            old = name.replace(".0.", f".{kept[name.split('.')[0]][0]}.", 1)
        ours, theirs = (
            float(model.get_submodule(path).weight.detach().square().mean().sqrt())  # type: ignore[union-attr, operator]
            for model, path in ((student.model, name), (teacher.model, old))
        )
        if name == f"{stacks[-1]}.final_layer_norm":  # no layer reads it
            assert ours == 1
        else:
            assert 2**-0.5 <= ours / theirs <= 2**0.5, name
        sizes.add(ours)
    assert len(sizes) > 2
    for other in (teacher, student):  # the student may lack the layer that it is asked for
        keep_norm_sizes_(student, other)
        assert torch.equal(predict(student), before)


def test_layers_that_say_nothing_go_at_no_cost(checkpoint: Path, tmp_path: Path) -> None:
    original = with_norms(checkpoint)
    make_narrow_(original, WIDTH)
    for name, _ in streams_of(original.model).writers.items():
        if ".block.0." in name:
            original.model.get_submodule(name).weight.data.zero_()  # type: ignore[union-attr, operator]
    expected = outputs(original)
    directory = saved(original, tmp_path)
    loaded = load(directory)
    stacks = [stack for stack in STACKS if hasattr(loaded.model, stack)]
    fewer = load(directory)
    keep_layers_(fewer, dict.fromkeys(stacks, (1,)))
    plan = fold_plan(
        fewer.model, fewer.architecture, width=WIDTH, kept_layers=dict.fromkeys(stacks, (1,))
    )
    small = tscompress.compress(directory, plan=plan, calibration=CALIBRATION, fold=FOLD)
    assert distance(outputs(small), expected) < 1e-3


def test_token_head_is_untied(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    small = tscompress.compress(
        checkpoints["chronos-t5"], width=WIDTH, calibration=CALIBRATION, fold=FOLD
    )
    model: Any = small.model
    assert has_own_head(model.config)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    tscompress.save(small, tmp_path / "small")
    again: Any = tscompress.load(tmp_path / "small").model
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.decoder.embed_tokens.weight, model.shared.weight)
    # Folded once more it keeps it.
    more = tscompress.compress(tmp_path / "small", rank=4, calibration=CALIBRATION, fold=FOLD)
    assert torch.equal(more.model.lm_head.weight, model.lm_head.weight)  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------
# Asked for, and refused
# --------------------------------------------------------------------------------------------------


@two_stacks
def test_invalid_widths_are_refused(checkpoint: Path) -> None:
    for width in (D_MODEL, D_MODEL + 1):
        with pytest.raises(PlanError, match=f"width {width} .* d_model"):
            tscompress.compress(checkpoint, width=width)
    with pytest.raises(RecipeError, match="width"):
        tscompress.compress(checkpoint, width=0)
    with pytest.raises(UsageError, match=r"a number of dimensions, .* or a share of d_model"):
        tscompress.compress(checkpoint, width="most", budget="parameters=0.5")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="width is for fold"):
        tscompress.compress(checkpoint, method="svd", rank=2, width=WIDTH)
    schedule = PlannedSchedule(budget="parameters=0.5", keep_width=True)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="keep_width"):
        tscompress.compress(checkpoint, budget=schedule, width=WIDTH)
    with pytest.raises(PlanError, match=f"width {D_MODEL} .* d_model"):
        tscompress.compress(checkpoint, budget="parameters=0.5", width=D_MODEL)
    plan = fold_plan(load(checkpoint).model, load(checkpoint).architecture, width=WIDTH)
    with pytest.raises(UsageError, match="a plan has every size"):
        tscompress.compress(checkpoint, plan=plan, width=WIDTH)


@two_stacks
def test_a_share_of_all_keeps_the_width_beside_a_budget(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To meet so little the stream would be narrowed; the refusal is before any measuring."""
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path))
    with pytest.raises(PlanError, match=r"parameters=0\.1 allows"):
        tscompress.compress(
            checkpoint, budget="parameters=0.1", width=1.0, calibration=CALIBRATION, fold=FOLD
        )


@two_stacks
def test_sizes_by_layer_may_narrow_the_stream_unless_it_is_kept(checkpoint: Path) -> None:
    """What no size fits is refused by the smallest candidate, before any measuring."""
    for keeps, width, narrow in (
        (False, None, r", d_model \d+"),
        (False, 1.0, ""),
        (True, None, ""),
    ):
        budget = PlannedSchedule(budget="parameters=0.0001", layout="factored", keep_width=keeps)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=f"the smallest candidate{narrow}, (?!d_model)"):
            tscompress.compress(checkpoint, budget=budget, width=width, calibration=CALIBRATION)


@any_family
def test_a_narrow_student_learns(checkpoint: Path) -> None:
    small = tscompress.compress(checkpoint, width=WIDTH, calibration=CALIBRATION, fold=FOLD)
    before = weights(small)
    settings: dict[str, Any] = {"steps": 2, "held_out_series": 4, "evaluate_every": 1}
    settings["buckets"] = ({"context_length": 32, "horizon": 8, "batch_size": 4, "weight": 1},)
    config = tscompress.RecoveryConfig(**settings, learning_rate=1e-2)
    recovered = tscompress.recover(small, checkpoint, config)
    assert recovered.recovery is not None
    assert recovered.config["d_model"] == WIDTH
    assert set(weights(recovered)) == set(before)
    with pytest.raises(UsageError, match=r"d_model 24 .* 12"):
        check_comparable(small, load(checkpoint))


def test_only_a_recovered_bolt_gets_norms_as_small_as_its_teachers(
    checkpoint: Path, tmp_path: Path
) -> None:
    teacher = with_norms(checkpoint)
    for name in streams_of(teacher.model).norms:
        norm: Any = teacher.model.get_submodule(name)
        norm.weight.data *= 0.125
    directory = saved(teacher, tmp_path)
    small = tscompress.compress(directory, width=WIDTH, calibration=CALIBRATION, fold=FOLD)
    settings: dict[str, Any] = {"steps": 1, "held_out_series": 4, "learning_rate": 1e-9}
    settings["buckets"] = ({"context_length": 32, "horizon": 8, "batch_size": 4, "weight": 1},)
    found = tscompress.recover(small, directory, tscompress.RecoveryConfig(**settings)).model
    for name in {*streams_of(found).norms} - {f"{stack}.final_layer_norm" for stack in STACKS}:
        size = 0.125 if teacher.family == "chronos-bolt" else 1.0
        weight = found.get_submodule(name).weight.detach()
        torch.testing.assert_close(weight, torch.full_like(weight, size))  # type: ignore[arg-type]


def test_a_latent_wider_than_the_new_stream_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match=f"latent of size {WIDTH + 1} is above the new d_model"):
        tscompress.compress(
            checkpoints["chronos-t5"], width=WIDTH, latent=WIDTH + 1, calibration=CALIBRATION
        )


@two_stacks
def test_plans_that_do_not_fit_change_no_weight(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    stacks = [stack for stack in STACKS if hasattr(loaded.model, stack)]
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    for kept, d_model, message in (
        ((1,), 99, "d_model of 99.* 24"),
        ((0, 1), 24, "kept_layers"),
        ((5,), 24, r"\[5\]"),
    ):
        plan = Plan(
            family=loaded.family,
            method="fold",
            kept_layers=dict.fromkeys(stacks, kept),
            width=WidthPlan(d_model=d_model, kept=WIDTH),
        )
        with pytest.raises(PlanError, match=message):
            fold_planned_(loaded, plan, calibration_batches(loaded, CALIBRATION), FOLD)
        assert all(torch.equal(w, before[n]) for n, w in loaded.model.named_parameters())


@two_stacks
def test_streams_of_two_widths_are_not_compared(checkpoint: Path) -> None:
    narrow = tscompress.compress(checkpoint, width=WIDTH, calibration=CALIBRATION, fold=FOLD)
    narrow.plan = None  # of one that nothing says was narrowed
    with pytest.raises(UsageError, match=r"d_model 12 .* 24"):
        check_comparable(load(checkpoint), narrow)


@two_stacks
def test_plans_of_two_widths_are_refused(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    content = fold_plan(loaded.model, loaded.architecture, width=WIDTH).model_dump()
    content["width"]["d_model"] = D_MODEL + 1
    with pytest.raises(PlanError, match=r"d_model 24, .*d_model 25"):
        Plan.parse(content)


def test_sliced_dimensions_are_least_squares_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(3, 200, 4, generator=generator)
    mix = torch.randn(2, 4, generator=generator)
    original = torch.cat([kept, kept @ mix.T], dim=-1)
    changed = torch.cat([kept, torch.zeros(3, 200, 2)], dim=-1)
    valid = torch.ones(3, 200, dtype=torch.bool)
    valid[0, :150] = False
    changed[0, :150] = 9.0  # does not count
    found = reconstruction([original], [changed], [valid], 4)
    torch.testing.assert_close(found[:4, :4], torch.eye(4).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[4:, :4], mix.double(), atol=0.1, rtol=0.02)
    assert not found[:, 4:].any()
    # Where every second position is looked at, it is not the same one of each series.
    pairs = torch.randn(3000, 2, 6, generator=generator)
    pairs[:, 1, 4:] = pairs[:, 1, :4] @ mix.T
    pairs[:, 0, 4:] = 0
    half = reconstruction([pairs], [pairs], [None], 4)[4:, :4]
    torch.testing.assert_close(half, mix.double() / 2, atol=0.15, rtol=0)


def test_labels_have_the_width(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    plan = fold_plan(loaded.model, loaded.architecture, width=WIDTH)
    assert plan_label(plan) == "fold, d_model 12, d_kv 8, d_ff 40"
    grid: list[dict[str, Any]] = [
        {"rank": [4], "width": [12]},
        {"width": [0.5, 1.0]},  # 1.0 changes nothing
        {"budget": ["parameters=0.5"], "keep_width": True},
        {"budget": ["parameters=0.5"], "keep_width": True, "layout": "factored"},
    ]
    points = points_of(SweepRecipe.model_validate({"model": "m", "output": "o", "grid": grid}))
    assert [point.label for point in points] == [
        "fold, d_kv 4, d_model 12",
        "fold, d_model 50%",
        "fold, parameters=0.5, width kept",
        "fold, parameters=0.5, factored, width kept",
    ]


def test_untied_head_stays_untied(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """transformers 5 says of it that it is tied when it saves it, which transformers 4 believes."""
    small = tscompress.compress(
        checkpoints["chronos-t5"], width=WIDTH, calibration=CALIBRATION, fold=FOLD
    )
    directory = saved(small, tmp_path / "stock")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    again = tscompress.compress(directory, rank=4, calibration=CALIBRATION, fold=FOLD)
    written = json.loads((tscompress.save(again, tmp_path / "again") / "config.json").read_text())
    assert (written["tie_word_embeddings"], written["scale_decoder_outputs"]) == (False, False)
    model: Any = load(checkpoints["chronos-t5"]).model
    model.config.tie_word_embeddings = model.config.scale_decoder_outputs = False
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings"):
        adapter_of("chronos-t5").complete_config(model, {}, ["lm_head.weight"])


@pytest.mark.parametrize("sizes", [{"rank": 4}, {"latent": 6}], ids=["stock", "factored"])
def test_where_the_original_was_loaded_from_is_not_written(
    checkpoints: dict[str, Path], tmp_path: Path, sizes: dict[str, int]
) -> None:
    copy = Path(shutil.copytree(checkpoints["chronos-t5"], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/me/client"}))
    small = tscompress.compress(copy, **sizes, calibration=CALIBRATION, fold=FOLD)
    saved = tscompress.save(small, tmp_path / "small")
    assert "/home/me/client" not in (saved / "config.json").read_text()


def test_a_stored_head_that_the_config_ties_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Transformers 5 keeps both and scales the head as a tied one, transformers 4 ties them."""
    copy = Path(shutil.copytree(checkpoints["chronos-t5"], tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"] + 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="output head of its own, which its config"):
        load(copy)
    weights["lm_head.weight"] = weights["shared.weight"].clone()
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert load(copy).family == "chronos-t5"


@pytest.mark.parametrize(
    ("asked", "read"),
    [(2, 2), (32, 32), ("32", 32), (32.0, 32), (np.int64(8), 8), (0.5, 0.5), ("0.5", 0.5)],
)
def test_a_width_is_dimensions_or_a_share(asked: object, read: float) -> None:
    width = Recipe.model_validate({"model": "m", "output": "o", "width": asked}).width
    assert (width, type(width)) == (read, type(read))
    written = yaml.safe_load(Recipe(model="m", output="o", width=read).to_yaml())
    assert type(written["width"]) is type(read)


@pytest.mark.parametrize(
    "asked", [1, 0, -2, 2.5, 0.0, -0.5, float("nan"), float("inf"), True, "wide", "1", "1e999", [2]]
)
def test_other_widths_are_refused(asked: object) -> None:
    with pytest.raises(RecipeError, match=r"width: .*1\.0"):
        validate(Recipe, {"model": "m", "output": "o", "width": asked}, "here")


@two_stacks
def test_a_share_of_the_width_is_resolved_in_the_plan(checkpoint: Path) -> None:
    share = tscompress.compress(checkpoint, width=0.5, calibration=CALIBRATION, fold=FOLD)
    number = tscompress.compress(checkpoint, width=D_MODEL // 2, calibration=CALIBRATION, fold=FOLD)
    assert share.plan == number.plan
    assert share.plan is not None
    assert share.plan.width == WidthPlan(d_model=D_MODEL, kept=D_MODEL // 2)
    assert share.plan.schedule["width"] == D_MODEL // 2
    ours, theirs = share.model.state_dict(), number.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@given(share=st.floats(0, 1, exclude_min=True), d_model=st.integers(3, 4096))
def test_shares_round_to_the_nearest_dimension(share: float, d_model: int) -> None:
    kept = dimensions_of(share, d_model)
    if kept is None:
        assert round(share * d_model) == d_model
    else:
        assert 2 <= kept < d_model
        assert abs(kept - share * d_model) <= 0.5 or kept == 2
    assert dimensions_of(1.0, d_model) is None
    assert dimensions_of(d_model, d_model) == d_model  # refused by the plan, with its reason


def test_the_command(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source, output = checkpoints["chronos-bolt"], tmp_path / "narrow"
    arguments = ["compress", str(source), "--output", str(output), "--width", "0.5"]
    done = CliRunner().invoke(app, [*arguments, "--calibration-series", "8"])
    assert done.exit_code == 0, done.output
    assert "d_model 12, d_kv 8, d_ff 40" in done.output
    assert json.loads((output / "config.json").read_text())["d_model"] == 12
