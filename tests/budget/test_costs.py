"""Costs computed from shapes are those counted on models of these shapes, to the last unit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chronos.chronos2 import Chronos2Model
from shared_fixtures import FAMILIES, tiny_chronos2, tiny_recipe
from torch import nn

from tscompress.benchmark.sizes import (
    bytes_on_disk,
    count_macs,
    kv_cache_bytes,
    parameter_bytes,
    parameter_count,
)
from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel
from tscompress.budget.part_costs import Costs
from tscompress.checkpoints.load import cast_parameters_, kept_whole, load
from tscompress.errors import PlanError, UnsupportedModelError, UsageError
from tscompress.families.registry import adapter_of, build_empty, describe, wrap_pipeline
from tscompress.layers.low_rank import LowRankLinear
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan, ProjectionPlan, stock_frequencies
from tscompress.plan.plan import Plan
from tscompress.training.pretrain_model import build_model

D_MODEL, D_KV, D_FF, HEADS = 24, 8, 40, 4
#: Context and horizon are no multiples of the patches.
WORKLOADS = (
    Workload(batch_size=3, context_length=37, horizon=9, num_samples=5),
    Workload(batch_size=1, context_length=16, horizon=1),
)


def tiny_model(family: str, **shape: int) -> Any:
    """A tiny model of another ``d_kv``, ``d_ff`` or number of layers."""
    if family == "chronos-2":
        config = tiny_chronos2().config.to_dict()
        shape.pop("num_decoder_layers", None)
        return Chronos2Model(Chronos2Model.config_class(**config | shape)).eval()
    architecture = tiny_recipe(family).architecture.model_copy(update=shape)
    return build_model(tiny_recipe(family, architecture=architecture)).eval()


def counted(family: str, model: Any, workload: Workload) -> Costs:
    """The same costs, counted on the model itself."""
    return Costs(
        parameter_count(model),
        parameter_bytes(model),
        count_macs(wrap_pipeline(family, model), workload),
        kv_cache_bytes(model, workload),
    )


def cost_model(family: str, workload: Workload = WORKLOADS[0], **shape: int) -> CostModel:
    return CostModel(family, tiny_model(family, **shape), workload, bytes_per_number=4)


def blocks(family: str, model: nn.Module) -> list[str]:
    return [block.name for block in describe(family, model).attention]


def hidden_names(family: str, model: nn.Module) -> list[str]:
    found = [block.name for block in describe(family, model).feed_forward]
    return found + [name for name, _ in model.named_children() if name.endswith("patch_embedding")]


def fold_plan(
    family: str,
    qk: int,
    vo: int,
    units: int,
    kept_layers: Mapping[str, tuple[int, ...]] | None = None,
    **shape: int,
) -> Plan:
    """Every block of a tiny model at the same sizes; ``shape`` is that after dropping layers."""
    model = tiny_model(family, **shape)
    patch_sides = {
        name: (
            model.get_submodule(f"{name}.hidden_layer").in_features,
            model.get_submodule(f"{name}.output_layer").out_features,
        )
        for name in hidden_names(family, model)
        if name.endswith("patch_embedding")
    }
    return Plan(
        family=family,
        method="fold",
        heads=tuple(
            HeadPlan(
                name=block.name,
                kind=block.kind,
                d_model=D_MODEL,
                num_heads=HEADS,
                head_size=D_KV,
                qk_size=qk,
                vo_size=vo,
                frequencies=stock_frequencies(D_KV, qk) if block.kind == "time" else None,
            )
            for block in describe(family, model).attention
        ),
        hidden=tuple(
            HiddenPlan(
                name=name,
                part="patch" if name in patch_sides else "feed_forward",
                in_features=patch_sides.get(name, (D_MODEL, D_MODEL))[0],
                out_features=patch_sides.get(name, (D_MODEL, D_MODEL))[1],
                d_ff=D_FF,
                kept=units,
            )
            for name in hidden_names(family, model)
        ),
        kept_layers=dict(kept_layers) if kept_layers else None,
    )


# --------------------------------------------------------------------------------------------------
# Agreement with what is counted
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=["batch", "single"])
@pytest.mark.parametrize("family", FAMILIES)
def test_costs_of_the_original_equal_counts(family: str, workload: Workload) -> None:
    model = tiny_model(family)
    costs = CostModel(family, model, workload, bytes_per_number=4)
    assert costs.original == counted(family, model, workload)
    assert costs.costs() == costs.original
    if family == "chronos-2":  # the only one that puts out several patches
        workload = workload.model_copy(update={"horizon": 50})
        costs = CostModel(family, model, workload, bytes_per_number=4)
        assert costs.original == counted(family, model, workload)
    assert costs.of_plan(Plan(family=family, method="fold")) == costs.original


def test_a_loaded_checkpoint(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    costs = CostModel(
        loaded.family,
        loaded.model,
        WORKLOADS[0],
        bytes_per_number=loaded.stored_dtype.itemsize,
    )
    assert costs.original == counted(loaded.family, loaded.model, WORKLOADS[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_model_without_its_ties_costs_the_same(family: str) -> None:
    empty = build_empty(family, tiny_model(family).config.to_dict())
    assert next(empty.parameters()).is_meta
    costs = CostModel(family, empty, WORKLOADS[0], bytes_per_number=4)
    assert costs.original == cost_model(family).original


@pytest.mark.parametrize(("size", "units"), [(2, 40), (8, 10), (4, 1)])
@pytest.mark.parametrize("workload", WORKLOADS, ids=["batch", "single"])
@pytest.mark.parametrize("family", FAMILIES)
def test_costs_of_a_plan_equal_counts_of_the_folded_model(
    family: str, workload: Workload, size: int, units: int
) -> None:
    costs = cost_model(family, workload).of_plan(fold_plan(family, size, size, units))
    assert costs == counted(family, tiny_model(family, d_kv=size, d_ff=units), workload)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_may_differ_by_block(family: str) -> None:
    model = tiny_model(family)
    sizes = {name: 2 + 2 * (place % 3) for place, name in enumerate(blocks(family, model))}
    units = {name: 7 + place for place, name in enumerate(hidden_names(family, model))}
    predicted = cost_model(family).costs(qk=sizes, vo=sizes, hidden=units)
    for name, size in sizes.items():
        resize_attention_(model.get_submodule(name), size)
    for name, count in units.items():
        resize_hidden_(model.get_submodule(name), count)
    assert predicted == counted(family, model, WORKLOADS[0])


def resize_attention_(attention: Any, size: int) -> None:
    for role in "qkv":
        setattr(attention, role, nn.Linear(D_MODEL, HEADS * size, bias=False))
    attention.o = nn.Linear(HEADS * size, D_MODEL, bias=False)
    attention.inner_dim = HEADS * size
    attention.key_value_proj_dim = attention.kv_proj_dim = size  # T5's name and Chronos-2's
    if getattr(attention, "use_rope", False):
        attention.rope_embed.inv_freq = attention.rope_embed.inv_freq[: size // 2]


def resize_hidden_(module: Any, units: int) -> None:
    first, last = (
        ("hidden_layer", "output_layer") if hasattr(module, "hidden_layer") else ("wi", "wo")
    )
    old_first, old_last = getattr(module, first), getattr(module, last)
    bias = old_first.bias is not None
    setattr(module, first, nn.Linear(old_first.in_features, units, bias=bias))
    setattr(module, last, nn.Linear(units, old_last.out_features, bias=bias))


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_layers_cost_nothing(family: str) -> None:
    costs = cost_model(family, num_layers=4, num_decoder_layers=3)
    kept = {"encoder": (1, 2, 3), "decoder": (0, 2)}
    if family == "chronos-2":
        del kept["decoder"]
    after = {"num_layers": 3, "num_decoder_layers": 2}
    assert costs.costs(kept_layers=kept) == counted(
        family, tiny_model(family, **after), WORKLOADS[0]
    )
    plan = fold_plan(family, 4, 4, 9, kept, **after)
    small = tiny_model(family, d_kv=4, d_ff=9, **after)
    assert costs.of_plan(plan) == counted(family, small, WORKLOADS[0])


def test_names_are_those_after_the_drop() -> None:
    """A model whose layers differ: what stays at index 0 was the layer at index 1."""
    model = tiny_model("chronos-bolt")
    resize_hidden_(model.get_submodule("encoder.block.1.layer.1.DenseReluDense"), 11)
    costs = CostModel("chronos-bolt", model, WORKLOADS[0], bytes_per_number=4)
    name = "encoder.block.0.layer.1.DenseReluDense"
    kept = {"encoder": (1,)}
    whole = costs.costs(kept_layers=kept)
    assert costs.costs(hidden={name: 11}, kept_layers=kept) == whole
    assert whole.parameters - costs.costs(hidden={name: 10}, kept_layers=kept).parameters == 48


# --------------------------------------------------------------------------------------------------
# Unit costs
# --------------------------------------------------------------------------------------------------


def unit_cost(costs: CostModel, name: str, kind: Any, measure: Any) -> float:
    """Of one dimension in each head of a block, or of one hidden unit."""
    full = D_FF if kind == "hidden" else D_KV
    halved = costs.costs(**{kind: {name: full // 2}})
    return (costs.original.of(measure) - halved.of(measure)) / (full - full // 2)


@pytest.mark.parametrize("measure", ["parameters", "bytes", "macs", "kv-cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unit_costs_add_up(family: str, measure: Any) -> None:
    model, costs = tiny_model(family), cost_model(family)
    attention, hidden = blocks(family, model), hidden_names(family, model)
    qk = dict.fromkeys(attention, 4)
    vo = dict.fromkeys(attention, 3)
    units = dict.fromkeys(hidden, 5)
    saved = sum(
        (full - size) * unit_cost(costs, name, kind, measure)
        for kind, full, sizes in (("qk", D_KV, qk), ("vo", D_KV, vo), ("hidden", D_FF, units))
        for name, size in sizes.items()
    )
    small = costs.costs(qk, vo, units)
    assert costs.original.of(measure) - small.of(measure) == saved
    if (family, measure) != ("chronos-2", "kv-cache"):
        assert 0 < small.of(measure) < costs.original.of(measure)


def test_costs_of_queries_and_keys_equal_a_hand_count() -> None:
    """No stock model has values of another size than keys, so this one is counted by hand."""
    workload = Workload(batch_size=3, context_length=20, horizon=6, num_samples=5)
    costs = cost_model("chronos-t5", workload)
    name = "decoder.block.1.layer.1.EncDecAttention"
    keys, paths = 21, 15
    projections = paths * (6 + keys) * D_MODEL
    for kind in ("qk", "vo"):
        assert unit_cost(costs, name, kind, "parameters") == 2 * D_MODEL * HEADS
        assert unit_cost(costs, name, kind, "macs") == HEADS * (projections + paths * 6 * keys)
        assert unit_cost(costs, name, kind, "kv-cache") == 4 * HEADS * paths * keys


def test_cache_costs_equal_a_hand_count() -> None:
    costs = cost_model("chronos-t5")
    assert unit_cost(costs, "encoder.block.0.layer.0.SelfAttention", "qk", "kv-cache") == 0
    assert unit_cost(costs, "decoder.block.0.layer.2.DenseReluDense", "hidden", "kv-cache") == 0
    own = unit_cost(costs, "decoder.block.0.layer.0.SelfAttention", "vo", "kv-cache")
    assert own == 4 * HEADS * 3 * 5 * 9


def test_rotary_angles_have_a_cost() -> None:
    costs = cost_model("chronos-2")
    name = "encoder.block.0.layer.0.self_attention"
    tokens = 3 + 1 + 1  # 37 steps in patches of 16, REG, one output patch
    turned = unit_cost(costs, name, "qk", "macs") - unit_cost(costs, name, "vo", "macs")
    assert turned == tokens / 2


def test_bytes_follow_the_dtype() -> None:
    model = tiny_model("chronos-t5").to(torch.bfloat16)
    half = CostModel("chronos-t5", model, WORKLOADS[0], bytes_per_number=2)
    assert half.original == counted("chronos-t5", model, WORKLOADS[0])
    full = cost_model("chronos-t5").original
    assert (2 * half.original.bytes, half.original.macs) == (full.bytes, full.macs)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_what_is_stored_in_float32_beside_float16_costs_as_much(family: str) -> None:
    model = tiny_model(family)
    cast_parameters_(model, torch.float16)
    whole = kept_whole(model, torch.float16)
    costs = CostModel(family, model, WORKLOADS[0], bytes_per_number=2, whole=whole)
    assert whole == {"wo"}
    assert costs.original.bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert not kept_whole(model, torch.bfloat16)
    linear = model.encoder.block[0].layer[-1].DenseReluDense
    name = "encoder.block.0.layer.1.DenseReluDense"
    expected = 2 * linear.wi.in_features + 4 * linear.wo.out_features
    assert unit_cost(costs, name, "hidden", "bytes") == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_header_takes_no_more_than_is_set_aside(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    costs = cost_model(family)
    header = bytes_on_disk(tmp_path) - costs.original.bytes
    assert 0.6 * costs.header_bytes < header <= costs.header_bytes


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qk": {"encoder.block.9": 4}}, "'encoder.block.9'"),
        ({"vo": {"encoder.block.0.layer.0.self_attention": 0}}, "vo size 0"),
        ({"qk": {"encoder.block.0.layer.0.self_attention": 3}}, "qk size 3"),
        ({"kept_layers": {"decoder": (0,)}}, r"\[0\] of 'decoder'"),
        ({"kept_layers": {"encoder": (0, 0)}}, r"\[0, 0\] of 'encoder'"),
        ({"kept_layers": {"encoder": ()}}, r"\[\] of 'encoder'"),
        (
            {"hidden": {"encoder.block.1.layer.2.mlp": 3}, "kept_layers": {"encoder": (1,)}},
            "'encoder.block.1.layer.2.mlp'",
        ),
    ],
)
def test_impossible_sizes_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cost_model("chronos-2").costs(**arguments)


def test_plans_of_another_kind_or_model() -> None:
    costs = cost_model("chronos-bolt")
    with pytest.raises(PlanError, match="fold plan for a chronos-t5"):
        costs.of_plan(Plan(family="chronos-t5", method="fold"))
    projection = ProjectionPlan(name="x", part="attention", out_features=4, in_features=4)
    with pytest.raises(PlanError, match="svd plan for a chronos-bolt"):
        costs.of_plan(Plan(family="chronos-bolt", method="svd", projections=(projection,)))
    other = cost_model("chronos-bolt", d_ff=41)
    with pytest.raises(PlanError, match=r"1,920.*1,968"):
        other.of_plan(fold_plan("chronos-bolt", 4, 4, 40))


@pytest.mark.parametrize(("family", "longest"), [*zip(FAMILIES, (16, 16, 64), strict=True)])
def test_workloads_of_several_passes(family: str, longest: int) -> None:
    cost_model(family, Workload(context_length=64, horizon=longest))
    with pytest.raises(UsageError, match=f"horizon {longest + 1} .* {longest} steps"):
        cost_model(family, Workload(context_length=64, horizon=longest + 1))
    with pytest.raises(UsageError, match="context_length is 200"):
        cost_model(family, Workload(context_length=200, horizon=1))


def test_paths_of_chronos2_count_beyond_one_call() -> None:
    settings = {"input_patch_size": 16, "input_patch_stride": 16, "output_patch_size": 16}
    settings |= {"context_length": 128, "max_output_patches": 4}
    call = Workload(batch_size=3, context_length=64, horizon=150)  # ten patches: 4, 4 and 2
    found = list(adapter_of("chronos-2").passes(settings, call))
    assert [one.series for one in found] == [3, 27, 27]
    assert [one.outputs for one in found] == [4, 4, 2]
    assert [one.input_patches for one in found] == [4 + 4, 8 + 4, 8 + 2]


def test_factored_and_encoder_models_are_refused() -> None:
    model = tiny_model("chronos-bolt")
    with pytest.raises(UnsupportedModelError, match="bert"):
        CostModel("bert", model, WORKLOADS[0], bytes_per_number=4)
    model.encoder.block[0].layer[0].SelfAttention.q = LowRankLinear(D_MODEL, HEADS * D_KV, 2)
    with pytest.raises(UnsupportedModelError, match="LowRankLinear"):
        CostModel("chronos-bolt", model, WORKLOADS[0], bytes_per_number=4)
