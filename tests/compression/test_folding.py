"""Folding on tiny checkpoints: what must not change, what must, and what is written."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chronos import BaseChronosPipeline
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from families_of_tests import two_stacks
from hooks import hook_count
from pydantic import ValidationError
from shared_fixtures import FAMILIES, tiny_chronos2, tiny_recipe
from torch import Tensor, nn

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.budget.measure_sensitivity import unmeasured
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import fold_config, fold_layers, fold_moments
from tscompress.compression.apply import apply_fold_, keep_layers_
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
)
from tscompress.compression.complete_fold_plan import complete_fold_plan
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_layers import choose_frequencies
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.layer_walk import is_across, walk
from tscompress.compression.recording import record, record_entry
from tscompress.data.batch import ForecastBatch
from tscompress.errors import FactorizationError, PlanError, RecipeError, UsageError
from tscompress.families.registry import adapter_of
from tscompress.layers.sized_attention import SizedT5Attention
from tscompress.plan.plan import Plan
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.workflows.recipe import load_recipe

SIZE, D_FF = 8, 40  # of the checkpoints in shared_fixtures
CALIBRATION = CalibrationConfig(source="synthetic", num_series=12, context_length=40, batch_size=4)
FOLD = FoldConfig(precision="float32")
with_each_refit = pytest.mark.parametrize(
    "config",
    [FOLD, *(FOLD.model_copy(update={"refit": refit}) for refit in ("none", "layer"))],
    ids=["default", "no refit", "layer"],
)


def waves(count: int = 8, steps: int = 64) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(0)
    time = np.arange(steps)
    return [
        (np.sin(time / (2 + i)) + 2 + 0.3 * rng.standard_normal(steps)).astype(np.float32)
        for i in range(count)
    ]


def folded(
    checkpoint: Path,
    config: FoldConfig = FOLD,
    batches: Sequence[ForecastBatch] | None = None,
    **sizes: Any,
) -> LoadedModel:
    """The checkpoint with heads and hidden units of these sizes."""
    loaded = load(checkpoint)
    if batches is None:
        batches = calibration_batches(loaded, CALIBRATION)
    apply_fold_(loaded, fold_plan(loaded.model, loaded.architecture, **sizes), batches, config)
    return loaded


def output(loaded: LoadedModel, batch: ForecastBatch) -> Tensor:
    result = run_teacher_forced(loaded, batch)
    found: Tensor = result.logits if "logits" in result else result.quantile_preds
    return found


def outputs(loaded: LoadedModel, batches: Sequence[ForecastBatch] | None = None) -> Tensor:
    """Of all batches in one row."""
    batches = calibration_batches(loaded, CALIBRATION) if batches is None else batches
    return torch.cat([output(loaded, batch).flatten() for batch in batches])


def predict(loaded: LoadedModel | BaseChronosPipeline) -> Tensor:
    """Forecasts as a user gets them; Chronos-2's of variates that are told of one another."""
    pipeline = loaded.forecaster if isinstance(loaded, LoadedModel) else loaded
    series = torch.tensor(np.stack(waves(4, 48))).view(2, 2, 48)
    series[0, 0, :9] = torch.nan
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if type(pipeline).__name__ != "Chronos2Pipeline":
            forecast: Tensor = pipeline.predict(series.flatten(0, 1), prediction_length=4)
            return forecast
        covariates = {
            "target": series[0],
            "past_covariates": {"known": series[1, 0].numpy(), "past": series[1, 1].numpy()},
            "future_covariates": {"known": np.linspace(1, 2, 12, dtype=np.float32)},
        }
        several = pipeline.predict(series, prediction_length=12)
        told = pipeline.predict([covariates], prediction_length=12)
        return torch.cat([forecast.flatten() for forecast in (*several, *told)])


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the expected."""
    return float((found - expected).norm() / expected.norm())


def weights(loaded: LoadedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in loaded.model.named_parameters()}


# --------------------------------------------------------------------------------------------------
# Nothing is lost that need not be
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "precision"),
    [
        ("chronos-t5", "float32"),
        *itertools.product(("chronos-bolt", "chronos-2"), ("float32", "bfloat16")),
    ],
    indirect=["checkpoint"],
)
def test_full_sizes_keep_outputs(checkpoint: Path, precision: str) -> None:
    original = load(checkpoint)
    same = folded(checkpoint, FOLD.model_copy(update={"precision": precision}))
    assert same.plan is not None
    assert not same.plan.changes_anything
    assert distance(outputs(same), outputs(original)) < 1e-6
    for role in ("q", "k", "v", "wi"):
        for name, weight in weights(original).items():
            if name.endswith(f".{role}.weight"):
                assert torch.equal(weights(same)[name], weight), name
    assert distance(predict(same), predict(original)) < (
        0.2 if original.family == "chronos-t5" else 1e-5  # one token of a path may be drawn anew
    )


def make_redundant_(model: Any, architecture: Any) -> None:
    """Give every head half the rank of its size, and silence half of the hidden units."""
    generator = torch.Generator().manual_seed(0)
    for block in architecture.attention:
        for role in "qkv":
            linear = model.get_submodule(block.projections[role])
            heads = linear.weight.data.unflatten(0, (block.num_heads, SIZE))
            if block.kind == "time" and role != "v":  # pairs 1 and 3 are silent
                heads[:, [1, 3, 5, 7]] = 0
                continue
            mix = torch.randn(block.num_heads, SIZE, SIZE // 2, generator=generator) / 2
            linear.weight.data = (mix @ heads[:, : SIZE // 2]).flatten(0, 1)
    inputs = [feed_forward.projections["wi"] for feed_forward in architecture.feed_forward]
    for name in ("input_patch_embedding", "output_patch_embedding"):
        if hasattr(model, name):
            inputs.append(f"{name}.hidden_layer")
    for name in inputs:
        for parameter in model.get_submodule(name).parameters():
            parameter.data[D_FF // 2 :] = 0


# The decoder of a Chronos-T5 has many positions, that of a Chronos-Bolt one.
@with_each_refit
def test_redundant_dimensions_fold_without_loss(
    checkpoint: Path, tmp_path: Path, config: FoldConfig
) -> None:
    original = load(checkpoint)
    make_redundant_(original.model, original.architecture)
    original.model.save_pretrained(tmp_path)
    small = folded(tmp_path, config, qk=SIZE // 2, vo=SIZE // 2, hidden=D_FF // 2)
    assert (small.config["d_kv"], small.config["d_ff"]) == (SIZE // 2, D_FF // 2)
    assert distance(outputs(small), outputs(original)) < 1e-4
    assert distance(predict(small), predict(original)) < 1e-4


def test_rotary_pairs_of_equal_frequency_are_merged(checkpoints: dict[str, Path]) -> None:
    """Where two frequencies are one and their queries proportional, one pair says the same."""
    original, small = load(checkpoints["chronos-2"]), load(checkpoints["chronos-2"])
    generator = torch.Generator().manual_seed(0)
    for loaded in (original, small):
        for block in loaded.architecture.attention:
            if block.kind != "time":
                continue
            attention: Any = loaded.model.get_submodule(block.name)
            for buffer in attention.rope_embed.buffers():
                buffer.copy_(torch.tensor([0.7, 0.7, 0.1, 0.1]))
            queries = attention.q.weight.data.unflatten(0, (block.num_heads, 2, SIZE // 2))
            turn = torch.randn(2, generator=generator.manual_seed(1))
            for kept, merged in ((0, 1), (2, 3)):
                real, imaginary = queries[:, 0, kept].clone(), queries[:, 1, kept].clone()
                queries[:, 0, merged] = turn[0] * real - turn[1] * imaginary
                queries[:, 1, merged] = turn[1] * real + turn[0] * imaginary
    times = {b.name: 4 for b in small.architecture.attention if b.kind == "time"}
    batches = calibration_batches(small, CALIBRATION)
    before = outputs(original)
    apply_fold_(small, fold_plan(small.model, small.architecture, qk=times), batches, FOLD)
    assert distance(outputs(small), before) < 1e-5
    assert distance(predict(small), predict(original)) < 1e-5


@two_stacks
def test_smaller_sizes_lose_more(checkpoint: Path) -> None:
    before = outputs(load(checkpoint))
    lost = [distance(outputs(folded(checkpoint, qk=n, vo=n, hidden=5 * n)), before) for n in (4, 2)]
    assert 0 < lost[0] < lost[1] < 1


def test_frequencies_are_chosen_by_score_energy(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    recording = record(loaded, calibration_batches(loaded, CALIBRATION))
    step = next(
        iter(walk(loaded, recording, on_compressed=False, residual_targets=False))
    )  # time attention comes first
    attention: Any = loaded.model.get_submodule(step.block.name)
    pairs = attention.k.weight.data.view(4, 2, SIZE // 2, -1)
    pairs[:, :, [0, 2]] *= 0.01
    moments = fold_moments.attention_moments(loaded, step)
    assert choose_frequencies(attention, 4, 2, moments) == (1, 3)
    assert choose_frequencies(attention, 4, 4, moments) == (0, 1, 2, 3)


def test_series_that_are_alone_do_not_count_for_scores_of_group_attention(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-2"])
    config = CALIBRATION.model_copy(update={"num_series": 8})
    alone, other = (
        dataclasses.replace(batch, group_ids=None, future=None)
        for batch in calibration_batches(loaded, config, waves(8))[:2]
    )
    grouped = dataclasses.replace(other, group_ids=torch.tensor([0, 0, 1, 1]))

    def moments(*batches: ForecastBatch) -> fold_moments.AttentionMoments:
        steps = walk(
            loaded, record(loaded, list(batches)), on_compressed=False, residual_targets=False
        )
        step = next(step for step in steps if is_across(step.block))
        return fold_moments.attention_moments(loaded, step)

    pairs, both, none = moments(grouped), moments(alone, grouped), moments(alone)
    torch.testing.assert_close(both.queries, pairs.queries)
    torch.testing.assert_close(both.keys, pairs.keys)
    assert not torch.allclose(both.values, pairs.values)
    assert none.queries.any()  # there is nothing else to go by


def test_every_pair_of_a_query_and_a_key_is_counted() -> None:
    stream = torch.zeros(2, 3, 1)
    counted = fold_moments._distances(None, None, stream, 4)
    assert counted.tolist() == [6, 8, 4, 0]
    last = torch.tensor([[False, False, True]] * 2)
    assert fold_moments._distances(last, None, stream, 4).tolist() == [2, 2, 2, 0]
    assert fold_moments._distances(None, last, stream, 4).tolist() == [2, 2, 2, 0]
    assert fold_moments._distances(last, last, stream, 4).tolist() == [2, 0, 0, 0]


def test_batches_of_one_shape_give_rows_of_other_positions() -> None:
    rows = torch.arange(8 * 129.0)[:, None]
    found = [fold_moments.thinned(rows, 17, batch) for batch in range(40)]
    assert {len(one) for one in found} == {17}
    positions = {int(value) % 129 for one in found for value in one}
    assert len(positions) > 120
    assert torch.equal(found[3], fold_moments.thinned(rows, 17, 3))


def test_a_frequency_is_named_once(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    content = fold_plan(loaded.model, loaded.architecture, qk=4, vo=4).model_dump(mode="json")
    for head in content["heads"]:
        if head["frequencies"]:
            head["frequencies"] = [0, 0]
    with pytest.raises(ValidationError, match="2 different frequencies"):
        Plan.model_validate(content)
    for head in content["heads"]:
        if head["frequencies"]:
            head["frequencies"] = [0, 1, 1]
    with pytest.raises(ValidationError, match="2 different frequencies"):
        Plan.model_validate(content)


def test_heads_wider_than_the_model_lose_what_is_beyond_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = tiny_recipe("chronos-bolt")
    wide = recipe.architecture.model_copy(update={"d_kv": 2 * recipe.architecture.d_model})
    save_pretrained(build_model(recipe.model_copy(update={"architecture": wide})), tmp_path)
    d_model = wide.d_model
    with pytest.raises(PlanError, match=f"head size {d_model + 1} is above d_model {d_model}"):
        tscompress.compress(str(tmp_path), calibration=CALIBRATION, rank=d_model + 1)
    whole = tscompress.compress(
        str(tmp_path), calibration=CALIBRATION, rank=d_model, fold=FoldConfig(refit="none")
    )
    context = torch.arange(40.0).sin()
    expected: Any = tscompress.load(tmp_path).forecaster
    found: Any = whole.forecaster
    same = {"rtol": 1e-3, "atol": 1e-4}  # to the rounding of what is near zero
    torch.testing.assert_close(found.predict(context), expected.predict(context), **same)
    tried = unmeasured(load(tmp_path), FoldConfig(), layers=False).parts
    sizes = [size for part in tried if part.kind in ("qk", "vo") for size in part.sizes]
    assert max(sizes) <= d_model


@pytest.mark.parametrize("strip", [1, 16, 30])
def test_moments_of_many_units_are_computed_in_strips(
    strip: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wide product only half is computed; the other half is the same."""
    loaded = load(checkpoints["chronos-bolt"])
    batches = calibration_batches(loaded, CALIBRATION)
    found = []
    for first in (D_FF + 1, D_FF):  # whole, then in strips
        monkeypatch.setattr(fold_moments, "STRIPS_FROM", first)
        monkeypatch.setattr(fold_moments, "STRIP", strip)
        steps = walk(loaded, record(loaded, batches), on_compressed=False, residual_targets=False)
        step = next(s for s in steps if s.block.name == "encoder.block.1.layer.1.DenseReluDense")
        found.append(fold_moments.hidden_moments(loaded, step).hidden)
        steps.close()
    assert found[0][:strip, strip:].any()
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[1][:strip, strip:], found[1][strip:, :strip].T)


def test_unattended_patches_are_ignored() -> None:
    """Also where the length of a patch is a multiple of 3, as what Chronos-2 embeds always is."""
    values = torch.tensor([0.0, 1.0, 0.0, -1.0])[:, None].expand(4, 12)
    mask = torch.tensor([[0.0] * 12, [1.0] * 12, [0.0] * 11 + [1.0], [1.0] + [0.0] * 11])
    seen = adapter_of("chronos-bolt").attended_patches(torch.cat([values, mask], dim=1))
    assert seen.tolist() == [False, True, True, True]
    # Time, values and mask of Chronos-2: the past unknown, the past known, the future unknown.
    time = torch.tensor([-1.0, -0.5, 0.0])[:, None].expand(3, 8)
    mask = torch.tensor([0.0, 1.0, 0.0])[:, None].expand(3, 8)
    seen = adapter_of("chronos-2").attended_patches(torch.cat([time, 0 * time, mask], 1))
    assert seen.tolist() == [False, True, True]


def test_streams_are_handed_over_to_the_walk(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    batches = calibration_batches(loaded, CALIBRATION)
    entry = record_entry(loaded, batches)
    next(
        walk(
            loaded,
            record(loaded, batches),
            on_compressed=True,
            residual_targets=True,
            entries=entry,
        )
    )
    assert entry.entries == {}


def test_free_frequencies_make_a_factored_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load(checkpoints["chronos-2"])
    for block in loaded.architecture.attention:
        if block.kind == "time":  # only the slowest two of four pairs turn with anything
            keys: Any = loaded.model.get_submodule(block.projections["k"])
            keys.weight.data.view(4, 2, SIZE // 2, -1)[:, :, [0, 1]] *= 1e-4
    before = outputs(loaded)
    stock = copy.deepcopy(loaded)
    found = {}
    for name, model in (("stock", stock), ("free", loaded)):
        compressed = tscompress.compress(
            model,
            rank=4,
            exclude=["*.layer.1.self_attention"],
            fold=FoldConfig(frequencies=name),  # type: ignore[arg-type]
            calibration=CALIBRATION,
        )
        found[name] = distance(outputs(compressed), before)
        assert compressed.plan is not None
        kept = {head.frequencies for head in compressed.plan.heads if head.kind == "time"}
        assert kept == {(0, 2) if name == "stock" else (2, 3)}
        tscompress.save(compressed, tmp_path / name)
        assert torch.equal(outputs(load(tmp_path / name)), outputs(compressed))
    assert found["free"] < found["stock"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tolerance"), [(64, 1e-4), (32, None), (16, None)])
def test_chronos2_of_the_true_shape(tmp_path: Path, size: int, tolerance: float | None) -> None:
    """Random weights of the published shape: parity at full size, plain configs at 32 and 16."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_chronos2().config
        shape = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
        shape["initializer_factor"] = 0.05  # with that of tiny models forecasts overflow
        model = Chronos2Model(Chronos2CoreConfig(**{**config.to_dict(), **shape}))
    model.save_pretrained(tmp_path / "chronos-2")
    loaded = load(tmp_path / "chronos-2")
    groups = torch.tensor([0, 0, 1])
    context = torch.from_numpy(np.stack(waves(3, 128)))
    batch = ForecastBatch(context, context[:, :16], groups)
    before = output(loaded, batch)
    few = CalibrationConfig(num_series=8, context_length=64, batch_size=8)
    if tolerance is not None:
        plan = fold_plan(loaded.model, loaded.architecture)
        apply_fold_(loaded, plan, calibration_batches(loaded, few), FOLD)
        torch.testing.assert_close(output(loaded, batch), before, rtol=tolerance, atol=tolerance)
        return
    small = tscompress.compress(loaded, rank=size, calibration=few)
    tscompress.save(small, tmp_path / "chronos-2-fold")
    stock = BaseChronosPipeline.from_pretrained(tmp_path / "chronos-2-fold")
    assert type(stock.model) is Chronos2Model
    assert stock.model.config.d_kv == size
    context[1, 5:9] = torch.nan
    task = [{"target": context[:2].numpy(), "past_covariates": {"x": context[2].numpy()}}]
    ours = load(tmp_path / "chronos-2-fold").forecaster.predict(task, prediction_length=16)
    theirs = stock.predict(task, prediction_length=16)
    assert torch.equal(ours[0], theirs[0])
    assert bool(torch.isfinite(ours[0]).all())


def test_a_frozen_model_is_saved(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    small = tscompress.compress(checkpoints["chronos-2"], rank=4, calibration=CALIBRATION)
    small.model.requires_grad_(False)
    assert tscompress.save(small, tmp_path / "small").is_dir()


def test_free_frequencies_allow_any_even_size(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["chronos-2"]
    with pytest.raises(PlanError, match="not at 6"):
        tscompress.compress(path, rank=6, calibration=CALIBRATION)
    free = tscompress.compress(
        path, rank=6, fold=FoldConfig(frequencies="free"), calibration=CALIBRATION
    )
    assert free.plan is not None
    assert all(len(h.frequencies) == 3 for h in free.plan.heads if h.frequencies is not None)
    other = free.plan.model_dump(mode="json")
    turned = next(head for head in other["heads"] if head["frequencies"] is not None)
    before = tuple(turned["frequencies"])
    after = (0, 2, 3) if before == (0, 1, 3) else (0, 1, 3)
    turned["frequencies"] = list(after)
    assert free.plan.diff(Plan.parse(other)) == [
        f"{turned['name']}: head size 6, frequencies {before} -> head size 6, frequencies {after}"
    ]


def test_free_frequencies_are_of_rotary_embeddings(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="a chronos-bolt has none; leave it out"):
        tscompress.compress(
            checkpoints["chronos-bolt"], rank=4, fold=FoldConfig(frequencies="free")
        )


def test_a_device_without_float64_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, empty = load(checkpoints["chronos-bolt"]), torch.empty

    def without_double(*sizes: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return empty(*sizes, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", without_double)
    with pytest.raises(UsageError, match="device 'cpu' has no float64; use cpu"):
        tscompress.compress(loaded, rank=4)


# --------------------------------------------------------------------------------------------------
# Options
# --------------------------------------------------------------------------------------------------

HALVES: dict[str, Any] = {"qk": 4, "vo": 4, "hidden": 20}


@pytest.fixture(scope="session")
def by_default(checkpoints: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    """Family to the weights that the default options give."""
    families = ("chronos-bolt", "chronos-2")
    return {family: weights(folded(checkpoints[family], **HALVES)) for family in families}


@two_stacks
@pytest.mark.parametrize(
    "change",
    [
        {"refit": "layer"},
        {"refit": "none"},
        {"damping": 1.0},
        {"precision": "bfloat16"},
    ],
    ids=str,
)
def test_every_option_changes_the_weights(
    checkpoint: Path, by_default: Mapping[str, Mapping[str, Tensor]], change: dict[str, Any]
) -> None:
    loaded = folded(checkpoint, FOLD.model_copy(update=change), **HALVES)
    default = by_default[loaded.family]
    assert any(not torch.equal(weight, default[name]) for name, weight in weights(loaded).items())
    assert outputs(loaded).isfinite().all()


def test_the_damping_is_that_of_the_family(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    own = 0.1 if loaded.family == "chronos-2" else 0.01
    assert FOLD.resolved(loaded).damping == own


@pytest.mark.parametrize("change", [{"refit": "all"}, {"damping": 0.0}, {"sweeps": 3}], ids=str)
def test_invalid_fold_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        FoldConfig.model_validate(change)


REMOVED: dict[str, tuple[Any, Any]] = {
    "query_moments": (True, False),
    "centre_keys": (True, False),
    "value_moments": ("attention", "inputs"),
    "value_sweeps": (10, 0),
    "order": ("compressed", "original"),
    "select": ("greedy", "leverage"),
    "continuations": ("both", "sampled"),
}


@pytest.mark.parametrize("name", REMOVED)
def test_removed_options_load_with_their_default_alone(name: str, tmp_path: Path) -> None:
    default, other = REMOVED[name]
    path = tmp_path / "recipe.yaml"
    content: dict[str, Any] = {"model": "reference/t5", "output": "out", "fold": {name: default}}
    path.write_text(yaml.safe_dump(content))
    assert load_recipe(path).fold == FoldConfig()
    content["fold"] = {name: other}
    path.write_text(yaml.safe_dump(content))
    message = f"fold: {name} was removed.*commit 27dc031"
    with pytest.raises(RecipeError, match=message) as refused:
        load_recipe(path)
    assert "\n" not in str(refused.value)


def test_a_removed_option_may_say_what_is_done() -> None:
    assert FoldConfig.model_validate({"continuations": "given"}) == FoldConfig()


@two_stacks
def test_two_runs_are_bit_equal(
    checkpoint: Path, by_default: Mapping[str, Mapping[str, Tensor]]
) -> None:
    again = folded(checkpoint, **HALVES)
    for name, weight in weights(again).items():
        assert torch.equal(weight, by_default[again.family][name]), name


def final_states(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> Tensor:
    """What the last stack hands on to forecasts."""
    model: Any = loaded.model
    seen: list[Tensor] = []
    stack = getattr(model, "decoder", model.encoder)
    hook = stack.final_layer_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    outputs(loaded, batches)
    hook.remove()
    family, read = adapter_of(loaded.family), []
    for batch, states in zip(batches, seen, strict=True):
        last = family.positions_ahead(model, batch)
        asked = torch.isfinite(batch.target).any(1)
        read.append((states if last is None else states[asked, -last:]).flatten())
    return torch.cat(read)


@two_stacks
def test_fitting_to_the_residual_stream_brings_it_back(checkpoint: Path) -> None:
    original = load(checkpoint)
    batches = calibration_batches(original, CALIBRATION)
    expected = final_states(original, batches)
    lost = {
        refit: distance(
            final_states(folded(checkpoint, FoldConfig(refit=refit), **HALVES), batches), expected
        )
        for refit in ("none", "layer", "residual")
    }
    assert lost["residual"] < 0.7 * lost["none"]
    assert lost["layer"] < lost["none"]


# --------------------------------------------------------------------------------------------------
# One layer, and only that
# --------------------------------------------------------------------------------------------------


@two_stacks
@pytest.mark.parametrize("refit", ["residual", "none"])
def test_a_plan_of_one_block_leaves_the_others(checkpoint: Path, refit: Any) -> None:
    original = load(checkpoint)
    chosen = original.architecture.attention[-1].name
    config = FoldConfig(refit=refit)
    loaded = folded(checkpoint, config, qk={chosen: 4}, vo={chosen: 2})
    new = weights(loaded)
    for name, weight in weights(original).items():
        if name.startswith(chosen) and name.rpartition(".")[0][-1] in "qkvo":
            assert new[name].numel() < weight.numel()
        elif refit == "none" or name.split(".")[-2] not in ("o", "wo"):
            assert torch.equal(new[name], weight), name


@two_stacks
def test_only_hidden_units_or_only_heads(checkpoint: Path) -> None:
    original = weights(load(checkpoint))
    new = weights(folded(checkpoint, FoldConfig(refit="none"), hidden=10))
    for name, weight in original.items():
        if name.split(".")[-2] in "qkvo":
            assert torch.equal(new[name], weight)
        elif name.split(".")[-2] == "wi":  # rows of the original, in order
            kept = (new[name][:, None] == weight[None]).all(-1).nonzero()[:, 1].tolist()
            assert len(kept) == 10
            assert kept == sorted(kept)


@two_stacks
def test_layers_are_counted_and_no_hook_stays(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = fold_plan(loaded.model, loaded.architecture, qk=4, vo=2, hidden=20)
    seen: list[tuple[int, int]] = []
    batches = calibration_batches(loaded, CALIBRATION)
    apply_fold_(loaded, plan, batches, FOLD, lambda done, total: seen.append((done, total)))
    total = len(plan.heads) + len(plan.hidden)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert hook_count(loaded.model) == 0


# --------------------------------------------------------------------------------------------------
# Hooks and failures
# --------------------------------------------------------------------------------------------------


@two_stacks
def test_no_hook_stays_after_a_failure_between_layers(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = fold_plan(loaded.model, loaded.architecture, qk=4, vo=2, hidden=20)

    def fail(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_fold_(loaded, plan, calibration_batches(loaded, CALIBRATION), FOLD, fail)
    assert hook_count(loaded.model) == 0


@two_stacks
@pytest.mark.parametrize("calls", [0, 1, 3, 5, 8])
def test_no_hook_stays_after_a_failure_within_a_pass(checkpoint: Path, calls: int) -> None:
    loaded = load(checkpoint)
    model: Any = loaded.model
    plan = fold_plan(model, loaded.architecture, qk=4, vo=2, hidden=20)
    left = calls

    def fail(*_: object) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("out of memory")
        left -= 1

    last = model.encoder.block[1].layer[0].layer_norm
    own = last.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        apply_fold_(loaded, plan, calibration_batches(loaded, CALIBRATION), FOLD)
    own.remove()
    assert hook_count(model) == 0


@two_stacks
def test_failed_fold_names_the_layer(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fold_layers.fold_values

    def not_finite(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        P, out = original(*args, **options)
        return P, out / 0

    def diverges(*args: Any, **options: Any) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    name = load(checkpoint).architecture.attention[0].name.replace(".", r"\.")
    monkeypatch.setattr(fold_layers, "fold_values", not_finite)
    with pytest.raises(FactorizationError, match=name):
        folded(checkpoint, vo=4)
    monkeypatch.setattr(fold_layers, "fold_values", diverges)
    with pytest.raises(FactorizationError, match=name):
        folded(checkpoint, vo=4)


@two_stacks
@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"heads": [{**h, "head_size": 16} for h in p["heads"]]},
        lambda p: {"heads": [{**h, "d_model": 32} for h in p["heads"]]},
        lambda p: {"heads": [{**h, "num_heads": 2, "head_size": 16} for h in p["heads"]]},
        lambda p: {"hidden": [{**h, "d_ff": 64} for h in p["hidden"]]},
        lambda p: {"hidden": [{**h, "out_features": 99} for h in p["hidden"]]},
        lambda p: {"heads": [*p["heads"], {**p["heads"][0], "name": "encoder.block.9.q"}]},
        lambda p: {"hidden": [*p["hidden"], {**p["hidden"][0], "name": "encoder.block.9.wi"}]},
    ],
    ids=["head_size", "d_model", "num_heads", "d_ff", "out_features", "a head", "a feed-forward"],
)
def test_a_plan_for_another_model_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    loaded = load(checkpoint)
    sizes = {"qk": 4, "vo": 4, "hidden": 20}
    content = fold_plan(loaded.model, loaded.architecture, **sizes).model_dump(mode="json")  # type: ignore[arg-type]
    before = weights(loaded)
    plan = Plan.parse(content | change(content))
    with pytest.raises(PlanError, match=r"the plan (has|names)"):
        apply_fold_(loaded, plan, calibration_batches(loaded, CALIBRATION), FOLD)
    after = weights(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_plan_of_another_family_is_refused(checkpoints: dict[str, Path]) -> None:
    t5, bolt = load(checkpoints["chronos-t5"]), load(checkpoints["chronos-bolt"])
    plans = {
        x.family: fold_plan(x.model, x.architecture, qk=4, vo=4, hidden=20) for x in (t5, bolt)
    }
    for loaded, family in ((t5, "chronos-bolt"), (bolt, "chronos-t5")):
        with pytest.raises(PlanError, match="plan"):
            tscompress.compress(loaded, plan=plans[family], calibration=CALIBRATION)


# --------------------------------------------------------------------------------------------------
# Degenerate data
# --------------------------------------------------------------------------------------------------

DEGENERATE: dict[str, Any] = {
    "one series": waves(1),
    "constant": [np.full(60, value, dtype=np.float32) for value in (3, 3, 7, -1, 3)],
    "zero": [np.zeros(60, dtype=np.float32)] * 5,
    "short": [np.arange(3, dtype=np.float32), np.arange(4, dtype=np.float32)],
    "gaps": [np.where(np.arange(64) % 3 == i % 3, np.nan, wave) for i, wave in enumerate(waves(5))],
}


@pytest.mark.parametrize("native", [False, True])
def test_the_precision_is_that_of_the_machine_and_is_written_down(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(fold_config, "multiplies_bfloat16", lambda device: native)
    chosen = "bfloat16" if native else "float32"
    found = [
        tscompress.compress(
            checkpoints["chronos-bolt"],
            rank=4,
            ff_ratio=0.5,
            fold=FoldConfig(precision=precision),  # type: ignore[arg-type]
            calibration=CALIBRATION,
        )
        for precision in (None, chosen)
    ]
    first, second = (weights(one) for one in found)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    saved = tscompress.save(found[0], tmp_path / "small")
    assert load_recipe(saved / "recipe.yaml").fold.precision == chosen
    provenance = json.loads((saved / "provenance.json").read_text())
    assert provenance["calibration"]["precision"] == chosen


@two_stacks
def test_feed_forwards_in_bfloat16_lead_to_nearly_the_same_outputs(checkpoint: Path) -> None:
    config = FOLD.model_copy(update={"precision": "bfloat16"})
    original, exact = load(checkpoint), folded(checkpoint, **HALVES)
    near = folded(checkpoint, config, **HALVES)
    lost = distance(outputs(exact), outputs(original))
    assert distance(outputs(near), outputs(original)) < max(1.2 * lost, 1e-4)
    assert all(weight.dtype == torch.float32 for weight in weights(near).values())


@two_stacks
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_calibration_never_gives_nan(checkpoint: Path, kind: str) -> None:
    loaded = load(checkpoint)
    batches = calibration_batches(loaded, CALIBRATION, DEGENERATE[kind])
    apply_fold_(
        loaded,
        fold_plan(loaded.model, loaded.architecture, qk=2, vo=1, hidden=3),
        batches,
        FoldConfig(),
    )
    assert all(weight.isfinite().all() for weight in weights(loaded).values())
    assert outputs(loaded).isfinite().all()


def test_a_decoder_that_sees_one_key_keeps_finite_heads(checkpoints: dict[str, Path]) -> None:
    """The one key of Bolt's decoder self-attention, less the mean over keys, is nothing."""
    loaded = load(checkpoints["chronos-bolt"])
    recording = record(loaded, calibration_batches(loaded, CALIBRATION))
    steps = walk(loaded, recording, on_compressed=False, residual_targets=False)
    step = next(s for s in steps if s.block.name == "decoder.block.0.layer.0.SelfAttention")
    moments = fold_moments.attention_moments(loaded, step)
    assert not moments.keys.any()
    assert moments.queries.any()
    plan = next(
        head
        for head in fold_plan(loaded.model, loaded.architecture, qk=2).heads
        if head.name == step.block.name
    )
    attention = loaded.model.get_submodule(plan.name)
    found = fold_layers.folded_heads(attention, plan, moments, FOLD)
    assert all(weight.isfinite().all() for weight in found.values())


@pytest.mark.parametrize("least", [0, 2**26])
def test_a_large_model_hands_freed_weights_back(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    returned: list[None] = []
    folding = import_module("tscompress.compression.fold")
    monkeypatch.setattr(folding, "LARGE_MODEL", least)
    monkeypatch.setattr(folding, "return_memory", lambda: returned.append(None))
    folded(checkpoints["chronos-bolt"], FOLD, vo=4)
    assert bool(returned) == (least == 0)


def padded(batch: ForecastBatch, steps: int = 16) -> ForecastBatch:
    nothing = torch.full((len(batch.context), steps), torch.nan)
    return dataclasses.replace(batch, context=torch.cat([nothing, batch.context], dim=1))


@pytest.mark.parametrize(
    ("checkpoint", "part"),
    [
        *itertools.product(FAMILIES, ("qk", "vo", "feed-forward")),
        *itertools.product(("chronos-bolt", "chronos-2"), ("input", "output")),
    ],
    indirect=["checkpoint"],
)
def test_padding_does_not_count(checkpoint: Path, part: str) -> None:
    original = load(checkpoint)
    config = CALIBRATION.model_copy(update={"num_series": 40, "batch_size": 8})
    batches = calibration_batches(original, config, waves(40))
    hidden = [layer.name for layer in fold_plan(original.model, original.architecture).hidden]
    patches = [name for name in hidden if "patch" in name]
    sizes: dict[str, Any] = {
        "qk": {"qk": 4},
        "vo": {"vo": 4},
        "feed-forward": {"hidden": {name: 20 for name in hidden if name not in patches}},
    }.get(part, {"hidden": {f"{part}_patch_embedding": 20}})
    alone = folded(checkpoint, FOLD, batches=batches, **sizes)
    among = folded(checkpoint, FOLD, batches=[padded(batch) for batch in batches], **sizes)
    # Of units that say the same either may stay, so what is compared is what they say.
    # The output layer sees few and similar rows: its fit magnifies rounding.
    tolerance = {"output": 3e-5, "feed-forward": 1e-5}.get(part, 1e-6)
    assert distance(outputs(among, batches), outputs(alone, batches)) < tolerance


# --------------------------------------------------------------------------------------------------
# Fewer layers
# --------------------------------------------------------------------------------------------------


def all_layers(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
    model: Any = loaded.model
    stacks = [stack for stack in ("encoder", "decoder") if hasattr(model, stack)]
    return {stack: tuple(range(len(getattr(model, stack).block))) for stack in stacks}


def test_keeping_all_layers_is_the_identity(checkpoint: Path) -> None:
    original, loaded = load(checkpoint), load(checkpoint)
    keep_layers_(loaded, all_layers(loaded))
    assert torch.equal(outputs(loaded), outputs(original))
    assert torch.equal(predict(loaded), predict(original))
    assert weights(loaded).keys() == weights(original).keys()


def without(loaded: LoadedModel, kept: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Outputs with the residual stream led past the layers that are not kept."""

    def past(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, Tensor):
            return args[0]
        if isinstance(result, tuple):
            return (args[0], *result[1:])
        return dataclasses.replace(result, hidden_states=args[0])

    with ExitStack() as stack:
        for name, layers in kept.items():
            for index, block in enumerate(loaded.model.get_submodule(name).block):  # type: ignore[arg-type]
                for sublayer in block.layer if index not in layers else ():
                    stack.callback(sublayer.register_forward_hook(past).remove)
        return outputs(loaded)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_dropping_a_layer_is_leaving_it_out(checkpoint: Path, stack: str, layer: int) -> None:
    original, loaded = load(checkpoint), load(checkpoint)
    if stack not in all_layers(original):
        pytest.skip("the family has no decoder")
    kept = {stack: (layer,)}
    if original.family == "chronos-t5" and stack == "encoder":
        with pytest.raises(PlanError, match="1 encoder and 2 decoder layers"):
            keep_layers_(loaded, kept)
        kept |= {"decoder": (0,)}
    keep_layers_(loaded, kept)
    model: Any = loaded.model
    assert {k: len(v) for k, v in all_layers(loaded).items()} == {
        name: 1 if name in kept else 2 for name in all_layers(original)
    }
    found = outputs(loaded)
    assert not torch.allclose(found, outputs(original), rtol=1e-4)
    torch.testing.assert_close(found, without(original, kept), rtol=1e-5, atol=1e-6)
    biases = [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]
    assert len(biases) == (0 if loaded.family == "chronos-2" else 2)
    assert all(".block.0." in name for name in biases)


@two_stacks
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"encoder": ()}, r"\[\] of 'encoder'"),
        ({"encoder": (2,)}, r"\[2\] of 'encoder'"),
        ({"encoder": (-1,)}, r"\[-1\] of 'encoder'"),
        ({"encoder": (1, 0)}, r"\[1, 0\] of 'encoder'"),
        ({"encoder": (0, 0)}, r"\[0, 0\] of 'encoder'"),
        ({"neck": (0,)}, "of 'neck'"),
    ],
    ids=str,
)
def test_impossible_kept_layers_are_refused(
    checkpoint: Path, kept: dict[str, tuple[int, ...]], message: str
) -> None:
    loaded = load(checkpoint)
    before = outputs(loaded)
    with pytest.raises(PlanError, match=message):
        keep_layers_(loaded, kept)
    assert torch.equal(outputs(loaded), before)


def plan_with_layers(checkpoint: Path, kept: Mapping[str, tuple[int, ...]], **sizes: Any) -> Plan:
    loaded = load(checkpoint)
    keep_layers_(loaded, kept)
    return fold_plan(loaded.model, loaded.architecture, kept_layers=kept, **sizes)


@pytest.mark.parametrize("sizes", [{}, {"qk": 4, "vo": 4, "hidden": 20}], ids=["layers", "sizes"])
def test_fewer_layers_load_in_stock_chronos(
    checkpoint: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    kept = {"encoder": (1,)}
    if "chronos-2" not in checkpoint.name:
        kept["decoder"] = (0,)
    plan = plan_with_layers(checkpoint, kept, **sizes)
    assert "encoder 1" in plan.summary()
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)
    path = tscompress.save(small, tmp_path / "small")
    config = json.loads((path / "config.json").read_text())
    assert config["num_layers"] == 1
    stock = BaseChronosPipeline.from_pretrained(path)
    assert len(stock.inner_model.encoder.block) == 1
    assert type(stock) is type(load(checkpoint).pipeline)
    assert torch.equal(predict(stock), predict(small))


@two_stacks
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_kept_layers_are_fitted_to_dropped_ones(checkpoint: Path, stack: str, layer: int) -> None:
    original = load(checkpoint)
    if stack not in all_layers(original):
        pytest.skip("the family has no decoder")
    kept = all_layers(original) | {stack: (layer,)}
    batches = calibration_batches(original, CALIBRATION)
    expected = final_states(original, batches)

    def lost(whole: LoadedModel | None, **sizes: int) -> float:
        loaded = load(checkpoint)
        keep_layers_(loaded, kept)
        plan = fold_plan(loaded.model, loaded.architecture, kept_layers=kept, **sizes)
        apply_fold_(loaded, plan, batches, FOLD, original=whole)
        return distance(final_states(loaded, batches), expected)

    before = weights(original)
    assert lost(original) < 0.9 * lost(None)
    if layer == 0:
        assert lost(original, **HALVES) < lost(None, **HALVES)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(original).items())


@two_stacks
def test_layers_that_say_nothing_go_at_no_cost(checkpoint: Path) -> None:
    """Also the first one, which knows the position bias of a T5 stack."""
    for gone in (0, 1):
        original = load(checkpoint, dtype="float32")
        kept = dict.fromkeys(all_layers(original), (1 - gone,))
        for name, parameter in original.model.named_parameters():
            if f".block.{gone}." in name and name.endswith((".o.weight", ".wo.weight")):
                parameter.data.zero_()
        batches = calibration_batches(original, CALIBRATION)
        expected = outputs(original, batches)  # afterwards its weights are those that were fitted
        loaded = dataclasses.replace(original)
        keep_layers_(loaded, kept)
        plan = fold_plan(loaded.model, loaded.architecture, kept_layers=kept)
        apply_fold_(loaded, plan, batches, FOLD, original=original)
        torch.testing.assert_close(outputs(loaded, batches), expected, rtol=1e-3, atol=1e-4)


def test_fewer_layers_with_sizes_by_layer(checkpoint: Path, tmp_path: Path) -> None:
    kept = {"encoder": (0,)}
    if "chronos-2" not in checkpoint.name:
        kept["decoder"] = (1,)
    plan = plan_with_layers(checkpoint, kept, vo=2)
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)
    again = load(tscompress.save(small, tmp_path / "small"))
    assert again.plan == plan
    assert torch.equal(predict(again), predict(small))


@two_stacks
def test_a_plan_with_fewer_layers_that_counts_all_of_them(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    kept = dict.fromkeys(all_layers(loaded), (0,))
    plan = fold_plan(loaded.model, loaded.architecture, kept_layers=kept, vo=2)
    keep_layers_(loaded, kept)
    message = r"'encoder\.block\.1\..*'"
    with pytest.raises(PlanError, match=message + ".*kept_layers"):
        complete_fold_plan(loaded.model, loaded.architecture, plan)
    with pytest.raises(PlanError, match=message) as refused:  # of the whole model's layers
        complete_fold_plan(
            loaded.model, loaded.architecture, plan.model_copy(update={"kept_layers": None})
        )
    assert "kept_layers" not in str(refused.value)
    with pytest.raises(PlanError, match="kept_layers"):
        tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)


# --------------------------------------------------------------------------------------------------
# Save, load again
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_uniform_sizes_give_a_stock_checkpoint(
    checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    source = tmp_path / checkpoint.name
    load(checkpoint, dtype=dtype).model.save_pretrained(source)
    small = tscompress.compress(source, rank=4, ff_ratio=0.5, calibration=CALIBRATION)
    path = tscompress.save(small, tmp_path / "small")
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["d_kv"], config["d_ff"]) == ("t5", 4, 20)
    assert config["dtype"] == config["torch_dtype"] == dtype
    assert config["num_layers"] == 2
    stock = BaseChronosPipeline.from_pretrained(path, dtype=dtype)
    assert type(stock) is type(load(checkpoint).pipeline)
    assert type(stock.inner_model) is type(load(checkpoint).model)
    assert {p.dtype for p in stock.inner_model.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(predict(stock), predict(small))
    assert not isinstance(stock.inner_model.encoder.block[0].layer[0], SizedT5Attention)
    again = load(path)
    assert again.plan is None  # an ordinary model
    assert torch.equal(predict(again), predict(small))
    assert Plan.load(path / "plan.json") == small.plan
    # What generates needs the settings of the original.
    generation = "generation_config.json"
    assert (path / generation).exists() == (source / generation).exists()
    if (source / generation).exists():
        assert (path / generation).read_bytes() == (source / generation).read_bytes()


FACTORED: dict[str, dict[str, Any]] = {
    "power law": {"schedule": (2.5, 0.5)},
    "by block": {"exclude": ["encoder.block.0.*"], "rank": 4},
    "hidden": {"exclude": ["*.block.1.layer.*"], "ff_ratio": 0.5},
    "energy": {"schedule": "energy=0.8"},
    "fit": {"schedule": "fit=0.4"},
}


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("chronos-t5", "power law"),
        ("chronos-2", "power law"),
        *(("chronos-bolt", name) for name in FACTORED),
    ],
    indirect=["checkpoint"],
)
def test_sizes_by_layer_are_a_factored_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    small = tscompress.compress(checkpoint, calibration=CALIBRATION, **FACTORED[name])
    assert small.plan is not None
    assert small.plan.uniform_sizes is None
    path = tscompress.save(small, tmp_path / "small")
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "tscompress"
    assert config["base_config"]["d_kv"] == SIZE
    again = load(path)
    assert again.plan == small.plan
    assert again.family == small.family
    assert torch.equal(predict(again), predict(small))
    import_module("tscompress.pipelines")  # registers
    opened = BaseChronosPipeline.from_pretrained(path)
    assert torch.equal(predict(opened), predict(small))


def test_values_of_another_size_are_a_factored_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load(checkpoint)
    plan = fold_plan(loaded.model, loaded.architecture, qk=2, vo=4, hidden=20)
    small = tscompress.compress(loaded, plan=plan, calibration=CALIBRATION)
    path = tscompress.save(small, tmp_path / "small")
    assert torch.equal(predict(load(path)), predict(small))
    # Frequencies of one's own too, though the sizes are alike.
    if loaded.family != "chronos-2":
        return
    fresh = load(checkpoint)
    plan = fold_plan(fresh.model, fresh.architecture, qk=4, vo=4)
    heads = [
        head.model_copy(update={"frequencies": (1, 3)} if head.kind == "time" else {})
        for head in plan.heads
    ]
    plan = plan.model_copy(update={"heads": tuple(heads)})
    assert plan.uniform_sizes is None
    small = tscompress.compress(fresh, plan=plan, calibration=CALIBRATION)
    path = tscompress.save(small, tmp_path / "turned")
    assert torch.equal(predict(load(path)), predict(small))


@two_stacks
@pytest.mark.parametrize(
    "sizes",
    [{"qk": 4, "vo": 4, "hidden": 20}, {"qk": 2, "vo": 4, "hidden": 7}, {}],
    ids=str,
)
def test_parameter_counts_of_the_plan_are_exact(checkpoint: Path, sizes: dict[str, int]) -> None:
    loaded = load(checkpoint)
    original, batches = parameter_count(loaded.model), calibration_batches(loaded, CALIBRATION)[:1]
    small = folded(checkpoint, FoldConfig(refit="none"), batches, **sizes)
    assert small.plan is not None
    before, after = small.plan.parameters()
    assert parameter_count(small.model) == original - before + after
    parts = [small.plan.parameters(part) for part in ("attention", "feed_forward", "patch")]
    assert (before, after) == tuple(map(sum, zip(*parts, strict=True)))
    assert small.plan.changes_anything == (after < before) == bool(sizes)


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


@two_stacks
def test_edited_fold_plan_is_applied_exactly(checkpoint: Path, tmp_path: Path) -> None:
    small = tscompress.compress(checkpoint, rank=4, calibration=CALIBRATION)
    path = tscompress.save(small, tmp_path / "first") / "plan.json"
    content = json.loads(path.read_text())
    content["heads"][-1]["vo_size"] = 1
    content["hidden"][0]["kept"] = 11
    content["calibrated_on"] = "series of an earlier compression"
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(content))
    edited = Plan.load(path)
    first, second = content["heads"][-1]["name"], content["hidden"][0]["name"]
    assert small.plan is not None
    assert small.plan.diff(edited) == [
        f"{first}: head size 4 -> head sizes 4 (q, k), 1 (v)",
        f"{second}: 40 hidden units -> 11 hidden units",
    ]
    again = tscompress.compress(checkpoint, plan=edited, calibration=CALIBRATION)
    assert again.plan == edited.model_copy(update={"calibrated_on": None})
    assert again.recipe is None
    module: Any = again.model.get_submodule(first)
    assert (module.qk_size, module.vo_size) == (4, 1)
    saved = tscompress.save(again, tmp_path / "second")
    assert load(saved).plan == again.plan
    assert not (saved / "recipe.yaml").exists()


@two_stacks
@pytest.mark.parametrize("cut", ["heads", "hidden"])
def test_layers_taken_out_of_a_plan_keep_their_size(
    checkpoint: Path, tmp_path: Path, cut: str
) -> None:
    loaded = load(checkpoint)
    whole = fold_plan(loaded.model, loaded.architecture, qk=4, vo=4, hidden=20)
    plan = whole.model_copy(update={cut: getattr(whole, cut)[:1]})
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)
    before, after = plan.parameters()
    assert parameter_count(small.model) == parameter_count(loaded.model) - before + after
    again = load(tscompress.save(small, tmp_path / "small"))
    assert torch.equal(predict(again), predict(small))


@pytest.mark.parametrize(
    "options",
    [{"rank": 3}, {"ff_ratio": 0.5}, {"exclude": ["*.0.*"]}, {"layout": "factored"},
     {"depth": True}, {"multiple": 8}, {"powers_of_two": True}, {"feed_forward": True}],
    ids=str,
)  # fmt: skip
def test_a_plan_goes_with_no_other_selection(
    checkpoints: dict[str, Path], options: dict[str, Any]
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    plan = fold_plan(loaded.model, loaded.architecture, qk=4)
    with pytest.raises(UsageError, match="no schedule or selection"):
        tscompress.compress(loaded, plan=plan, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "factored"}, "layout"),
        ({"depth": True}, "depth"),
        ({"multiple": 8}, "multiple"),
        ({"powers_of_two": True}, "powers_of_two"),
        ({"feed_forward": True}, "ff_ratio"),
        ({"method": "svd"}, "none was given|ff_ratio"),
    ],
    ids=str,
)
def test_head_options_without_heads_are_refused(
    checkpoints: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(tscompress.errors.TscompressError, match=message):
        tscompress.compress(checkpoints["chronos-bolt"], ff_ratio=0.5, **options)


@two_stacks
def test_hidden_units_alone_leave_heads_as_they_are(checkpoint: Path) -> None:
    small = tscompress.compress(checkpoint, ff_ratio=0.5, calibration=CALIBRATION)
    assert small.plan is not None
    assert small.plan.uniform_sizes == (SIZE, D_FF // 2)
    assert small.recipe is not None
    assert small.recipe.schedule is None


def test_summaries(checkpoint: Path) -> None:
    loaded = load(checkpoint)

    def summary(**sizes: Any) -> list[str]:
        return fold_plan(loaded.model, loaded.architecture, **sizes).summary().splitlines()

    plain = summary(qk=4, vo=4, hidden=20)
    assert plain[0] == "fold to a stock config with d_kv 4, d_ff 20"
    assert plain[1].startswith("attention ")
    assert plain[1].endswith("parameters (50.0%)")
    assert plain[2].startswith("feed-forward and patch layers ")
    assert len(summary(qk=4, vo=4)) == 2  # nothing to say of feed-forwards
    some = loaded.architecture.attention[0].name
    assert summary(vo={some: 2}, hidden=20)[:3] == [
        "fold, queries and keys: 8 to 8",
        "fold, values: 2 to 8",
        "fold, hidden units: 20 to 20",
    ]


def test_differences_name_layers_that_one_plan_lacks(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    whole = fold_plan(loaded.model, loaded.architecture, qk=4, vo=4)
    part = whole.model_copy(
        update={"heads": whole.heads[1:], "kept_layers": {"encoder": (0,)}, "hidden": ()}
    )
    lines = whole.diff(part)
    assert lines[0] == "layers: all -> encoder 0"
    assert lines[1] == f"{whole.heads[0].name}: head size 4 -> absent"
    assert part.diff(whole)[0] == "layers: encoder 0 -> all"
    assert whole.diff(whole) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"qk": 9}, "size 8; 9 and 8|at 9"),
        ({"vo": 9}, "size 8; 8 and 9"),
        ({"vo": 0}, "greater than or equal to 1"),
        ({"hidden": 41}, "40 hidden units, .*41"),
        ({"hidden": 0}, "greater than or equal to 1"),
        ({"hidden": {"nothing": 3}}, "'nothing'"),
    ],
    ids=str,
)
def test_impossible_fold_sizes_are_refused(
    checkpoint: Path, sizes: dict[str, Any], message: str
) -> None:
    loaded = load(checkpoint)
    with pytest.raises(PlanError, match=message):
        fold_plan(loaded.model, loaded.architecture, **sizes)


@pytest.mark.parametrize("size", [1, 3, 5, 6])
def test_rotary_sizes_without_stock_config_are_refused(
    checkpoints: dict[str, Path], size: int
) -> None:
    with pytest.raises(PlanError, match=f"rotary .* {size}"):
        tscompress.compress(checkpoints["chronos-2"], rank=size, calibration=CALIBRATION)


@two_stacks
def test_a_power_law_never_exceeds_the_original(checkpoint: Path) -> None:
    """Sizes beyond the original's are the original's, whatever turns."""
    small = tscompress.compress(checkpoint, schedule=(3.0, 2.0), calibration=CALIBRATION)
    assert small.plan is not None
    assert max(head.vo_size for head in small.plan.heads) == SIZE
    assert max(head.qk_size for head in small.plan.heads) == SIZE
    assert min(head.vo_size for head in small.plan.heads) == 3
