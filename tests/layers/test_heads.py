"""Attention and feed-forwards whose sizes differ by layer, against the stock modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chronos.chronos2.layers import MHA
from shared_fixtures import cache_of
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.errors import PlanError
from tscompress.families.registry import build_empty, wrap_pipeline
from tscompress.layers.resize import replace_heads_, resize_hidden_
from tscompress.layers.sized_attention import SizedChronos2Attention, SizedT5Attention
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan

D_MODEL, HEADS, SIZE, D_FF = 24, 4, 8, 40  # of the checkpoints in shared_fixtures
#: Numbers of queries and keys, and of values: fewer, more and as many of the one as of the other.
SIZES = ((4, 5), (6, 2), (2, 8), (4, 4))
FREQUENCIES = {2: (3,), 4: (3, 1), 6: (0, 3, 1)}
ATTENTION = ("eager", "sdpa")


def head_plans(loaded: LoadedModel, *sizes: tuple[int, int]) -> list[HeadPlan]:
    """Of every block; ``sizes`` take turns."""
    plans = []
    for index, block in enumerate(loaded.architecture.attention):
        qk_size, vo_size = sizes[index % len(sizes)]
        frequencies = FREQUENCIES.get(qk_size, (0, 1, 2, 3)) if block.kind == "time" else None
        plans.append(
            HeadPlan(
                name=block.name,
                kind=block.kind,
                d_model=D_MODEL,
                num_heads=HEADS,
                head_size=SIZE,
                qk_size=qk_size,
                vo_size=vo_size,
                frequencies=frequencies,
            )
        )
    return plans


def slots(plan: HeadPlan) -> dict[str, Tensor]:
    """Role to which of the original's inner numbers ``[heads * size]`` the smaller ones are."""
    if plan.frequencies is None:
        qk = torch.arange(plan.qk_size)
    else:  # pairs are half a head apart
        pairs = torch.tensor(plan.frequencies)
        qk = torch.cat((pairs, pairs + plan.head_size // 2))
    starts = plan.head_size * torch.arange(plan.num_heads)[:, None]
    qk, vo = ((starts + chosen).flatten() for chosen in (qk, torch.arange(plan.vo_size)))
    return {"q": qk, "k": qk, "v": vo, "o": vo}


def cut_down_(attention: nn.Module, plan: HeadPlan) -> dict[str, Tensor]:
    """Zero what the plan does not keep of a stock module; returns the weights of the sized one."""
    weights = {}
    for role, kept in slots(plan).items():
        weight = attention.get_parameter(f"{role}.weight").data
        dim = 1 if role == "o" else 0
        weights[f"{role}.weight"] = small = weight.index_select(dim, kept)
        weight.zero_().index_copy_(dim, kept, small)
    return weights


def pair(checkpoint: Path, *sizes: tuple[int, int]) -> tuple[LoadedModel, LoadedModel]:
    """A stock model in which part of every head is zero, and the smaller model it equals."""
    stock, sized = load(checkpoint), load(checkpoint)
    for plan in head_plans(stock, *sizes):
        weights = cut_down_(stock.model.get_submodule(plan.name), plan)
        module = replace_heads_(sized.model, plan)
        assert sized.model.get_submodule(plan.name) is module
        module.load_state_dict(weights, strict=False)
    return stock, sized


def set_attention_(model: Any, implementation: str) -> None:
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("T5 of this transformers has no sdpa")
    module: Any
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation


def predict(loaded: LoadedModel) -> Tensor:
    """Forecasts of four series that go through the pipeline, as a user gets them."""
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(2, 2, 64, generator=generator).cumsum(-1)
    series[0, 0, :9] = torch.nan
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if loaded.family == "chronos-2":  # two variates a group, so that group attention mixes
            return torch.cat(loaded.forecaster.predict(series, prediction_length=32))
        forecast: Tensor = loaded.forecaster.predict(series.flatten(0, 1), prediction_length=4)
        return forecast


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    """Of a T5, teacher-forced, with a mask."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 7:] = 0
    with torch.no_grad():
        found: Tensor = model(
            input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens[:, :6], **inputs
        ).logits
    return found


def assert_same_forecasts(found: LoadedModel, expected: LoadedModel) -> None:
    forecasts = predict(found), predict(expected)
    if found.family == "chronos-t5":
        # Which token is drawn can hang on the last digit of a logit, and a path on a token.
        torch.testing.assert_close(
            logits(found.model, use_cache=False),
            logits(expected.model, use_cache=False),
            rtol=1e-5,
            atol=1e-5,
        )
        same = torch.isclose(*forecasts, rtol=1e-4, atol=1e-5).all(-1)  # [series, samples]
        assert same.float().mean() > 0.9
    else:
        torch.testing.assert_close(*forecasts, rtol=1e-4, atol=1e-5)


def parameters(module: Any, *roles: str) -> int:
    return sum(getattr(module, role).weight.numel() for role in roles)


# --------------------------------------------------------------------------------------------------
# The same numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ATTENTION)
def test_the_original_sizes_and_weights_give_the_original_forecast(
    checkpoint: Path, implementation: str
) -> None:
    stock, sized = pair(checkpoint, (SIZE, SIZE))
    for loaded in (stock, sized):
        set_attention_(loaded.model, implementation)
    assert predict(load(checkpoint)).isfinite().all()
    torch.testing.assert_close(predict(sized), predict(stock), rtol=0, atol=0)
    assert sized.model.state_dict().keys() == stock.model.state_dict().keys()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_smaller_heads_equal_larger_ones_filled_up_with_zeros(
    checkpoint: Path, sizes: tuple[int, int]
) -> None:
    stock, sized = pair(checkpoint, sizes)
    # What is cut off matters.
    assert not torch.allclose(predict(load(checkpoint)), predict(stock), rtol=1e-3)
    assert_same_forecasts(sized, stock)


def test_sizes_may_differ_by_layer_and_eager_equals_sdpa(checkpoint: Path) -> None:
    stock, sized = pair(checkpoint, *SIZES)
    for implementation in ATTENTION:
        set_attention_(sized.model, implementation)
        assert_same_forecasts(sized, stock)


def test_generation_with_a_cache_equals_generation_without(checkpoints: dict[str, Path]) -> None:
    _, sized = pair(checkpoints["chronos-t5"], *SIZES)
    tokens = torch.arange(3, 27).view(2, 12)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "top_k": None}
    for implementation in ATTENTION:
        set_attention_(sized.model, implementation)
        runs = [
            sized.model.generate(  # type: ignore[operator]
                tokens,
                use_cache=use_cache,
                output_logits=True,
                return_dict_in_generate=True,
                **settings,
            )
            for use_cache in (True, False)
        ]
        cached, uncached = runs
        assert torch.equal(cached.sequences, uncached.sequences)
        torch.testing.assert_close(
            torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-4, atol=1e-5
        )


def test_the_cache_holds_no_more_than_the_smaller_heads(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("transformers", minversion="4.54")  # before, the cache had no layers
    _, sized = pair(checkpoints["chronos-t5"], *SIZES)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        cache = cache_of(sized.model(input_ids=tokens, decoder_input_ids=tokens[:, :5]))
    for plan in head_plans(sized, *SIZES):
        if plan.kind == "encoder":
            continue
        layer, own = int(plan.name.split(".")[2]), plan.kind == "decoder"
        held = (cache.self_attention_cache if own else cache.cross_attention_cache).layers[layer]
        length = 5 if own else 12
        assert held.keys.shape == (2, HEADS, length, plan.qk_size)
        assert held.values.shape == (2, HEADS, length, plan.vo_size)
        module: Any = sized.model.get_submodule(plan.name)
        numbers = held.keys.numel() + held.values.numel()
        assert numbers == 2 * length * (module.k.out_features + module.v.out_features)
        assert numbers == 2 * length * module.n_heads * (module.qk_size + module.vo_size)


def test_gradients_equal_those_of_larger_heads(checkpoint: Path) -> None:
    stock, sized = pair(checkpoint, *SIZES)
    for plan in head_plans(stock, *SIZES):
        modules = [loaded.model.get_submodule(plan.name).double() for loaded in (stock, sized)]
        states = torch.randn(2, 5, D_MODEL, generator=torch.Generator().manual_seed(1)).double()
        inputs: dict[str, Any] = {"mask": torch.zeros(2, HEADS, 5, 5).double()}
        if plan.kind in ("time", "group"):
            inputs["position_ids"] = torch.arange(5).expand(2, -1)
        else:  # given, so that no version of T5 asks where in the sequence the states are
            inputs["position_bias"] = (
                torch.linspace(-1, 1, 25 * HEADS).view(1, HEADS, 5, 5).double()
            )
        for module in modules:
            module(states, **inputs)[0].square().sum().backward()
        for role, kept in slots(plan).items():
            whole, small = (module.get_parameter(f"{role}.weight").grad for module in modules)
            assert whole is not None
            assert small is not None
            picked = whole.index_select(1 if role == "o" else 0, kept)
            torch.testing.assert_close(small, picked)


# --------------------------------------------------------------------------------------------------
# Chronos-2
# --------------------------------------------------------------------------------------------------


def chronos2_attention(loaded: LoadedModel, plan: HeadPlan) -> MHA:
    return loaded.model.get_submodule(plan.name)


def test_attention_weights_come_on_request(checkpoints: dict[str, Path]) -> None:
    stock, sized = pair(checkpoints["chronos-2"], *SIZES)
    for plan in head_plans(stock, *SIZES):
        states = torch.randn(2, 5, D_MODEL, generator=torch.Generator().manual_seed(1))
        inputs = {"mask": torch.zeros(2, 1, 5, 5), "position_ids": torch.arange(5).expand(2, -1)}
        with torch.no_grad():
            expected, found = (
                chronos2_attention(loaded, plan)(states, output_attentions=True, **inputs)
                for loaded in (stock, sized)
            )
            silent = chronos2_attention(sized, plan)(states, **inputs)
        assert found.attn_weights.shape == (2, HEADS, 5, 5)
        torch.testing.assert_close(found.attn_weights, expected.attn_weights)
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
        torch.testing.assert_close(silent.hidden_states, expected.hidden_states)
        assert silent.attn_weights is None


def test_cross_attention_of_chronos2_has_no_rotary_embedding(checkpoints: dict[str, Path]) -> None:
    stock, sized = pair(checkpoints["chronos-2"], (4, 5))
    plan = head_plans(stock, (4, 5))[0]
    states, source = torch.randn(2, 2, 5, D_MODEL, generator=torch.Generator().manual_seed(1))
    inputs = {"mask": torch.zeros(2, 1, 5, 5), "position_ids": torch.arange(5).expand(2, -1)}
    with torch.no_grad():
        expected, found = (
            chronos2_attention(loaded, plan)(states, encoder_states=source, **inputs)
            for loaded in (stock, sized)
        )
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)


def test_rotary_frequencies_are_the_chosen_ones_and_stay_float32(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-2"], dtype="bfloat16")
    model = build_empty("chronos-2", loaded.config)
    for target in (loaded.model, model):
        for plan in head_plans(loaded, (4, 2)):
            original = target.get_submodule(plan.name)
            sized = replace_heads_(target, plan)
            assert isinstance(sized, SizedChronos2Attention)
            assert (sized.rope_embed is not None) if plan.kind == "time" else not sized.use_rope
            for name, buffer in original.named_buffers():
                chosen = sized.get_buffer(name)
                assert chosen.dtype == torch.float32
                assert not chosen.is_meta
                assert torch.equal(chosen, buffer[list(FREQUENCIES[4])])
                assert len(buffer) == SIZE // 2  # the original is as it was
        assert not any("freq" in name for name in target.state_dict())


# --------------------------------------------------------------------------------------------------
# Empty modules
# --------------------------------------------------------------------------------------------------


def test_models_are_built_on_the_meta_device_and_filled(checkpoint: Path) -> None:
    _, sized = pair(checkpoint, *SIZES)
    model = build_empty(sized.family, sized.config)
    before = torch.random.get_rng_state()
    for plan in head_plans(sized, *SIZES):
        module: Any = replace_heads_(model, plan)
        assert module.q.weight.is_meta
        assert parameters(module, *"qkvo") == plan.parameters
    assert torch.equal(torch.random.get_rng_state(), before)
    model.load_state_dict(sized.model.state_dict(), assign=True)
    model.tie_weights()  # type: ignore[operator]
    filled = replace(sized, model=model, pipeline=wrap_pipeline(sized.family, model.eval()))
    torch.testing.assert_close(predict(filled), predict(sized), rtol=0, atol=0)


def test_settings_and_relative_bias_are_taken_over(checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    for plan in head_plans(loaded, (4, 2)):
        original = loaded.model.get_submodule(plan.name).requires_grad_(False)
        sized: Any = replace_heads_(loaded.model, plan)
        changed = {"key_value_proj_dim", "kv_proj_dim", "inner_dim", "qk_size", "vo_size"}
        own = set(vars(nn.Module())) - {"training"}
        for name, value in vars(original).items():
            if name not in own | changed:
                assert vars(sized)[name] is value, name
        for role in "qkvo":
            linear: Any = sized.get_submodule(role)
            assert linear.weight.dtype == torch.bfloat16
            assert linear.bias is None
            assert not linear.training
            assert not linear.weight.requires_grad
        assert (sized.qk_size, sized.vo_size) == (4, 2)
        if getattr(original, "has_relative_attention_bias", False):
            assert sized.relative_attention_bias is original.relative_attention_bias
        # Nothing is hooked to or registered in both.
        assert sized._parameters is not original._parameters
        assert sized._modules is not original._modules
        assert sized._forward_hooks is not original._forward_hooks


def test_copies_are_whole(checkpoint: Path) -> None:
    _, sized = pair(checkpoint, *SIZES)
    expected, twin = predict(sized), copy.deepcopy(sized)
    for parameter in sized.model.parameters():
        parameter.data.zero_()
    assert torch.equal(predict(twin), expected)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_what_takes_the_place_of_values_gives_values(
    checkpoints: dict[str, Path], family: str
) -> None:
    """As an adapter does, whose sum with the layer's output is a plain tensor."""

    class Wrapper(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.layer(inputs)
            return found + 0

    _, sized = pair(checkpoints[family], *SIZES)
    expected = predict(sized)
    for block in sized.architecture.attention:
        attention: Any = sized.model.get_submodule(block.name)
        attention.v = attention.v  # as replicas do: no second hook
        assert len(attention.v._forward_hooks) == 1
        attention.v = Wrapper(attention.v)
    assert torch.equal(predict(sized), expected)
    assert torch.equal(predict(copy.deepcopy(sized)), expected)


def test_replacement_attention_equals_stock(checkpoints: dict[str, Path]) -> None:
    for family, stock, sized in (
        ("chronos-t5", T5Attention, SizedT5Attention),
        ("chronos-bolt", T5Attention, SizedT5Attention),
        ("chronos-2", MHA, SizedChronos2Attention),
    ):
        loaded = load(checkpoints[family])
        for plan in head_plans(loaded, (4, 2)):
            module = replace_heads_(loaded.model, plan)
            assert isinstance(module, stock)
            assert type(module) is sized
        assert loaded.architecture == load(checkpoints[family]).architecture


# --------------------------------------------------------------------------------------------------
# Hidden units
# --------------------------------------------------------------------------------------------------


def hidden_plan(model: nn.Module, name: str, kept: int) -> tuple[HiddenPlan, list[str], str]:
    """The plan, and the roles of the layers into and out of the hidden units."""
    module: Any = model.get_submodule(name)
    inputs = [role for role in ("wi", "wi_0", "wi_1", "hidden_layer") if hasattr(module, role)]
    output = "output_layer" if "hidden_layer" in inputs else "wo"
    plan = HiddenPlan(
        name=name,
        part="patch" if output == "output_layer" else "feed_forward",
        in_features=getattr(module, inputs[0]).in_features,
        out_features=getattr(module, output).out_features,
        d_ff=D_FF,
        kept=kept,
        gated=len(inputs) == 2,
    )
    return plan, inputs, output


def resize_and_fill_(stock: nn.Module, sized: nn.Module, name: str, kept: int) -> None:
    """Keep every third unit from the first: the others of ``stock`` become zero."""
    plan, inputs, output = hidden_plan(stock, name, kept)
    units = torch.arange(kept) * 3
    module: Any = stock.get_submodule(name)
    weights = {}
    for role in inputs:
        for key, tensor in getattr(module, role).named_parameters():
            weights[f"{role}.{key}"] = small = tensor.data[units]
            tensor.data.zero_()[units] = small
    last = getattr(module, output)
    weights[f"{output}.weight"] = last.weight.data[:, units]
    if last.bias is not None:
        weights[f"{output}.bias"] = last.bias.data
    residual = getattr(sized.get_submodule(name), "residual_layer", None)
    resize_hidden_(sized, plan)
    small_module = sized.get_submodule(name)
    assert getattr(small_module, "residual_layer", None) is residual
    small_module.load_state_dict(weights, strict=False)
    shapes = {key: tensor.shape for key, tensor in small_module.state_dict().items()}
    assert all(shapes[key] == tensor.shape for key, tensor in weights.items())
    output_bias = 0 if last.bias is None else last.bias.numel()
    found = sum(tensor.numel() for tensor in weights.values()) - output_bias
    assert found == plan.parameters


def hidden_names(loaded: LoadedModel) -> list[str]:
    names = [block.name for block in loaded.architecture.feed_forward]
    if loaded.family != "chronos-t5":
        names += ["input_patch_embedding", "output_patch_embedding"]
    return names


def test_fewer_hidden_units_equal_all_of_them_with_zeros(checkpoint: Path) -> None:
    stock, sized = load(checkpoint), load(checkpoint)
    original = predict(stock)
    for index, name in enumerate(hidden_names(stock)):
        resize_and_fill_(stock.model, sized.model, name, kept=3 + index)
    assert not torch.allclose(original, predict(stock), rtol=1e-3)
    assert_same_forecasts(sized, stock)


def gated_t5() -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=D_MODEL,
        d_kv=SIZE,
        d_ff=D_FF,
        num_layers=2,
        num_heads=HEADS,
        vocab_size=64,
        feed_forward_proj="gated-gelu",
    )
    return T5ForConditionalGeneration(config).eval()


def test_gated_feed_forwards_lose_units_of_both_input_projections() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stock = gated_t5()
    sized = copy.deepcopy(stock)
    for stack in ("encoder", "decoder"):
        name = f"{stack}.block.1.layer.{1 if stack == 'encoder' else 2}.DenseReluDense"
        resize_and_fill_(stock, sized, name, kept=11)
    torch.testing.assert_close(logits(sized), logits(stock), rtol=1e-5, atol=1e-5)


def test_hidden_layers_keep_dtype_device_and_lack_of_gradient(checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    loaded.model.requires_grad_(False)
    empty = build_empty(loaded.family, loaded.config)
    for name in hidden_names(loaded):
        plan, inputs, output = hidden_plan(loaded.model, name, kept=7)
        module: Any = loaded.model.get_submodule(name)
        dtypes = {role: getattr(module, role).weight.dtype for role in (*inputs, output)}
        before = torch.random.get_rng_state()
        resize_hidden_(loaded.model, plan)
        resize_hidden_(empty, plan)
        assert torch.equal(torch.random.get_rng_state(), before)
        for role, dtype in dtypes.items():  # some versions keep wo in float32
            linear = getattr(module, role)
            assert linear.weight.dtype == dtype
            assert not linear.weight.requires_grad
            assert (linear.bias is not None) == (plan.part == "patch")
            assert empty.get_submodule(f"{name}.{role}").weight.is_meta


# --------------------------------------------------------------------------------------------------
# Plans that do not fit
# --------------------------------------------------------------------------------------------------

TIME = "encoder.block.0.layer.0.self_attention"
GROUP = "encoder.block.0.layer.1.self_attention"
SELF = "encoder.block.0.layer.0.SelfAttention"


@pytest.mark.parametrize(
    ("family", "name", "changes", "message"),
    [
        ("chronos-t5", "encoder.nothing", {}, "'encoder.nothing'"),
        ("chronos-t5", f"{SELF}.q", {}, r"SelfAttention\.q', a Linear"),
        ("chronos-t5", SELF, {"num_heads": 2}, "2 heads .* 4 heads"),
        ("chronos-t5", SELF, {"d_model": 32}, "d_model 32, .* d_model 24"),
        ("chronos-t5", SELF, {"head_size": 16}, r"size 16 \(q, k\).* size 8"),
        (
            "chronos-bolt",
            SELF,
            {"kind": "time", "frequencies": (0, 1)},
            "with rotary embedding; .*, without rotary",
        ),
        (
            "chronos-2",
            GROUP,
            {"kind": "time", "frequencies": (0, 1)},
            "with rotary embedding; .*, without rotary",
        ),
        (
            "chronos-2",
            TIME,
            {"kind": "group"},
            "without rotary embedding; .*, with rotary",
        ),
    ],
)
def test_impossible_head_sizes_are_refused(
    checkpoints: dict[str, Path], family: str, name: str, changes: dict[str, Any], message: str
) -> None:
    loaded = load(checkpoints[family])
    before = str(loaded.model)
    fields = {
        "name": name,
        "kind": "encoder",
        "d_model": D_MODEL,
        "num_heads": HEADS,
        "head_size": SIZE,
        "qk_size": 4,
        "vo_size": 2,
    }
    plan = HeadPlan.model_validate(fields | changes)
    with pytest.raises(PlanError, match=message) as caught:
        replace_heads_(loaded.model, plan)
    assert "\n" not in str(caught.value)
    assert str(loaded.model) == before


def test_heads_are_not_resized_twice(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    plan = head_plans(loaded, (SIZE, 2))[0]
    replace_heads_(loaded.model, plan)
    with pytest.raises(PlanError, match=r"size 8 \(q, k\) and 2 \(v\)"):
        replace_heads_(loaded.model, plan)


def feed_forward(**changes: Any) -> Callable[[], HiddenPlan]:
    fields = {
        "name": "encoder.block.0.layer.1.DenseReluDense",
        "part": "feed_forward",
        "in_features": D_MODEL,
        "out_features": D_MODEL,
        "d_ff": D_FF,
        "kept": 10,
    }
    return lambda: HiddenPlan.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (feed_forward(name="nothing"), "'nothing'"),
        (feed_forward(name=SELF), "a T5Attention"),
        (feed_forward(d_ff=64), "24 -> 64 units.* 24 -> 40 units"),
        (feed_forward(in_features=32), "feed_forward 32 -> .* feed_forward 24 ->"),
        (feed_forward(out_features=32), "units -> 32; .* units -> 24"),
        (feed_forward(gated=True), "gated feed_forward .* has feed_forward"),
        (feed_forward(part="patch"), "patch 24 .* feed_forward"),
        (
            feed_forward(name="input_patch_embedding", in_features=32),
            "feed_forward .* patch 32",
        ),
    ],
)
def test_impossible_hidden_units_are_refused(
    checkpoints: dict[str, Path], plan: Callable[[], HiddenPlan], message: str
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    before = str(loaded.model)
    with pytest.raises(PlanError, match=message) as caught:
        resize_hidden_(loaded.model, plan())
    assert "\n" not in str(caught.value)
    assert str(loaded.model) == before
