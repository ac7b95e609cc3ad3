"""One latent of the encoder's output for all cross-attention, against the dense original."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_fixtures import Forbid, cache_of
from stock_chronos import StockChronos
from torch import Tensor, nn
from typer.testing import CliRunner

import tscompress
from tscompress.benchmark.sizes import count_macs, kv_cache_bytes, parameter_bytes, parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel
from tscompress.budget.part_costs import Costs
from tscompress.checkpoints.format import apply_structure_, unique_tensors
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.cli.app import app
from tscompress.compression.apply import apply_fold_, keep_layers_
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan, fold_plan_of
from tscompress.errors import PlanError, RecipeError, UnsupportedModelError, UsageError
from tscompress.families.registry import build_empty, wrap_pipeline
from tscompress.layers.latent_cross_attention import LatentCrossAttention
from tscompress.layers.resize import replace_heads_
from tscompress.linalg import Roots, shared_latent
from tscompress.plan.layer_plans import HeadPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import RankSchedule

D_MODEL, HEADS, SIZE = 24, 4, 8  # of the checkpoints in shared_fixtures
FAMILIES = ("chronos-t5", "chronos-bolt")
ATTENTION = ("eager", "sdpa")
CALIBRATION = CalibrationConfig(source="synthetic", num_series=6, context_length=48)
CROSS = "decoder.block.{}.layer.1.EncDecAttention"


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    """Of each family that has cross-attention."""
    return checkpoints[request.param]


def latent_plan(loaded: LoadedModel, latent: int, **sizes: Any) -> Plan:
    return fold_plan(loaded.model, loaded.architecture, latent=latent, **sizes)


def folded(
    checkpoint: Path | LoadedModel,
    latent: int,
    config: FoldConfig | None = None,
    kept_layers: Mapping[str, tuple[int, ...]] | None = None,
    **sizes: Any,
) -> LoadedModel:
    """A model after surgery, with everything but cross-attention dense by default."""
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else load(checkpoint)
    if kept_layers:
        keep_layers_(loaded, kept_layers)
    plan = latent_plan(loaded, latent, kept_layers=kept_layers, **sizes)
    apply_fold_(loaded, plan, calibration_batches(loaded, CALIBRATION), config or FoldConfig())
    return loaded


@pytest.fixture(scope="module")
def folded_to_6(checkpoints: dict[str, Path]) -> dict[str, LoadedModel]:
    return {family: folded(checkpoints[family], 6) for family in FAMILIES}


@pytest.fixture
def latent6(checkpoint: Path, folded_to_6: dict[str, LoadedModel]) -> LoadedModel:
    """A copy of each family's model with latents of 6 dimensions."""
    return copy.deepcopy(folded_to_6[checkpoint.name])


@pytest.fixture
def t5_latent6(folded_to_6: dict[str, LoadedModel]) -> LoadedModel:
    return copy.deepcopy(folded_to_6["chronos-t5"])


def cross_attention(loaded: LoadedModel) -> list[Any]:
    """Of each decoder layer, in order."""
    return [loaded.model.get_submodule(CROSS.format(layer)) for layer in (0, 1)]


def loud(checkpoint: Path) -> LoadedModel:
    """A dense model whose forecasts hang on its cross-attention, and on where that looks."""
    loaded = load(checkpoint)
    for attention in cross_attention(loaded):
        for role in "qkvo":
            attention.get_submodule(role).weight.data *= 10 if loaded.family != "chronos-t5" else 1
    return loaded


def with_each_attention(loaded: LoadedModel) -> Iterator[str]:
    """Its name, once the model uses it; T5 of some transformers has no sdpa."""
    module: Any
    assert loaded.model._supports_sdpa or loaded.family == "chronos-t5"
    for implementation in ATTENTION if loaded.model._supports_sdpa else ("eager",):
        for module in loaded.model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = implementation
        yield implementation


TOKENS = torch.arange(3, 39).view(3, 12)


@torch.no_grad()
def outputs(loaded: LoadedModel, **options: Any) -> Tensor:
    """Logits of a T5, teacher-forced, or quantiles of a Bolt; part of the input is missing."""
    if loaded.family == "chronos-t5":
        mask = torch.ones_like(TOKENS)
        mask[0, :5] = 0
        found = loaded.model(
            input_ids=TOKENS, attention_mask=mask, decoder_input_ids=TOKENS[:, :6], **options
        )
        logits: Tensor = found.logits
        return logits
    series = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).cumsum(-1)
    series[0, :33] = torch.nan
    quantiles: Tensor = loaded.model(context=series).quantile_preds
    return quantiles


def predict(loaded: LoadedModel) -> Tensor:
    """As users get it."""
    series = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        forecast: Tensor = loaded.forecaster.predict(series, prediction_length=4)
    return forecast


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------
# The same numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refit", ["residual", "none"])
def test_latent_of_d_model_is_exact(checkpoint: Path, refit: Any) -> None:
    expected = outputs(loud(checkpoint))
    loaded = folded(loud(checkpoint), D_MODEL, FoldConfig(refit=refit, precision="float32"))
    for _ in with_each_attention(loaded):
        assert_close(outputs(loaded), expected)
        for role in "qo":
            blind = copy.deepcopy(loaded)
            for module in cross_attention(blind):
                module.get_submodule(role).weight.data.zero_()
            assert (outputs(blind) - expected).abs().max() > 0.002 * expected.abs().max()


def test_latent_of_full_rank_is_exact(checkpoint: Path) -> None:
    dense = loud(checkpoint)
    basis = torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(2))
    basis = torch.linalg.qr(basis.T).Q.T
    for attention in cross_attention(dense):
        for linear in (attention.k, attention.v):
            linear.weight.data = linear.weight.data @ basis.T @ basis
    original = outputs(dense)
    twin = replace(dense, model=copy.deepcopy(dense.model))
    twin.pipeline = wrap_pipeline(twin.family, twin.model)
    config = FoldConfig(refit="none")
    assert_close(outputs(folded(dense, 5, config)), original)
    lossy = outputs(folded(twin, 3, config))
    assert (lossy - original).abs().max() > 1e-3 * original.abs().max()


def test_eager_equals_sdpa_equals_the_stock_forward(latent6: LoadedModel) -> None:
    expected = [stock_forward(latent6, layer) for layer in (0, 1)]
    for implementation in with_each_attention(latent6):
        for module, (arguments, output) in zip(cross_attention(latent6), expected, strict=True):
            with torch.no_grad():
                found, bias, weights = module(**arguments)
            assert_close(found, output)
            assert bias is None
            known = implementation == "eager" and hasattr(module, "config")
            assert (weights is not None) == known
            if weights is not None:
                assert weights.shape == (2, HEADS, 3, 7)
                assert_close(weights.sum(-1), torch.ones(2, HEADS, 3))
                assert torch.equal(weights[0, ..., :2], torch.zeros(HEADS, 3, 2))


def stock_forward(loaded: LoadedModel, layer: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments, and what stock attention with the latent repeated for each head makes of them."""
    module = cross_attention(loaded)[layer]
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(2, 3, D_MODEL, generator=generator)
    encoded = torch.randn(2, 7, D_MODEL, generator=generator)
    mask = torch.zeros(2, 1, 3, 7)
    mask[0, ..., :2] = torch.finfo(torch.float32).min
    down = cross_attention(loaded)[0].down.weight
    with torch.no_grad():
        z = encoded @ down.T  # [B, S, r]
        queries = module.q(states).unflatten(-1, (HEADS, -1))  # [B, T, H, r]
        scores = torch.einsum("bthr,bsr->bhts", queries, z) + mask
        mixed = torch.einsum("bhts,bsr->bthr", scores.softmax(-1), z)
        output = module.o(mixed.flatten(2))
    return {"hidden_states": states, "key_value_states": encoded, "mask": mask}, output


def test_boolean_masks_are_additive_ones(t5_latent6: LoadedModel) -> None:
    arguments, output = stock_forward(t5_latent6, 1)
    for _ in with_each_attention(t5_latent6):
        with torch.no_grad():
            found = cross_attention(t5_latent6)[1](**{**arguments, "mask": arguments["mask"] == 0})
        assert_close(found[0], output)


def test_older_transformers_arguments_are_accepted(t5_latent6: LoadedModel) -> None:
    arguments, output = stock_forward(t5_latent6, 0)
    bias = arguments["mask"].expand(2, HEADS, 3, 7)  # what dense layers would have passed on
    with torch.no_grad():
        found = cross_attention(t5_latent6)[0](
            **arguments, position_bias=bias, past_key_value=None, output_attentions=True
        )
    assert_close(found[0], output)
    assert found[1:3] == (None, None)
    assert found[3].shape == (2, HEADS, 3, 7)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache_equals_generation_without(
    t5_latent6: LoadedModel, beams: int
) -> None:
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "top_k": None}
    for _ in with_each_attention(t5_latent6):
        cached, uncached = (
            t5_latent6.model.generate(  # type: ignore[operator]
                TOKENS,
                use_cache=use_cache,
                num_beams=beams,
                output_scores=True,
                return_dict_in_generate=True,
                **settings,
            )
            for use_cache in (True, False)
        )
        assert torch.equal(cached.sequences, uncached.sequences)
        assert_close(torch.stack(cached.scores), torch.stack(uncached.scores))


def test_a_pass_with_a_cache_equals_one_without(t5_latent6: LoadedModel) -> None:
    cached, uncached = (outputs(t5_latent6, use_cache=kept) for kept in (True, False))
    torch.testing.assert_close(cached, uncached, rtol=0, atol=0)


def test_forecasts(checkpoint: Path) -> None:
    loaded = folded(checkpoint, 6, qk=4, vo=4, hidden=20)
    assert predict(loaded).isfinite().all()
    assert not torch.equal(predict(loaded), predict(load(checkpoint)))


def test_every_layer_trains_the_latent(latent6: LoadedModel) -> None:
    modules = cross_attention(latent6)
    gradients = []
    for module in modules:
        latent6.model.train().zero_grad()
        arguments, _ = stock_forward(latent6, 0)
        module(**arguments)[0].square().sum().backward()
        gradients.append(modules[0].down.weight.grad.clone())
        latent6.model.eval()
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)
    assert not torch.equal(*gradients)


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------

WORKLOADS = (
    Workload(batch_size=3, context_length=37, horizon=9, num_samples=5),
    Workload(batch_size=1, context_length=16, horizon=1),
)


def held(cache: Any) -> Iterator[Tensor]:
    """Keys and values of a cache of any version."""
    if hasattr(cache, "layers"):
        for layer in cache.layers:
            yield from (states for states in (layer.keys, layer.values) if states is not None)
    else:
        yield from (*cache.key_cache, *cache.value_cache)


def test_latent_cache_has_the_counted_size(checkpoint: Path) -> None:
    pytest.importorskip("transformers", minversion="4.54")  # before, a tuple came back
    loaded = folded(checkpoint, 6, FoldConfig(refit="none"), vo=5)
    caches: list[Any] = []
    loaded.model.decoder.register_forward_hook(  # type: ignore[union-attr, operator]
        lambda *call: caches.append(cache_of(call[-1]))
    )
    dense = load(checkpoint).model
    for workload in WORKLOADS:
        assert_cache_is_counted(loaded, caches, workload)
        assert kv_cache_bytes(loaded.model, workload) < kv_cache_bytes(dense, workload)


def assert_cache_is_counted(loaded: LoadedModel, caches: list[Any], workload: Workload) -> None:
    """Of a forecast, which adds those of its passes to ``caches``."""
    series = torch.randn(workload.batch_size, workload.context_length).cumsum(-1)
    options = {"num_samples": workload.num_samples} if loaded.family == "chronos-t5" else {}
    loaded.forecaster.predict(series, prediction_length=workload.horizon, **options)
    cross, own = (
        list(held(getattr(caches[-1], f"{c}_attention_cache"))) for c in ("cross", "self")
    )
    storages = {states.untyped_storage().data_ptr(): states.untyped_storage() for states in cross}
    rows, _, tokens, _ = cross[0].shape
    assert sum(storage.nbytes() for storage in storages.values()) == 4 * rows * tokens * 6
    found = sum(states.numel() * states.itemsize for states in (*cross, *own))
    # The last token of a sample path is drawn, but never read.
    said = kv_cache_bytes(loaded.model, workload)
    assert said - found in (0, 4 * rows * 2 * HEADS * (SIZE + 5))


@pytest.mark.parametrize("latent", [1, 20])
def test_costs_are_those_counted(checkpoint: Path, latent: int) -> None:
    loaded = folded(checkpoint, latent, FoldConfig(refit="none"), qk=3, vo=5, hidden=11)
    dense = load(checkpoint)
    assert loaded.plan is not None
    for workload in WORKLOADS:
        costs = CostModel(dense.family, dense.model, workload, bytes_per_number=4)
        assert costs.of_plan(loaded.plan) == counted(loaded, workload)
    before, after = loaded.plan.parameters()
    saved = parameter_count(dense.model) - parameter_count(loaded.model)
    assert before - after == saved
    before, after = loaded.plan.parameters("attention")
    whole = sum(after for _, after in map(loaded.plan.parameters, ("feed_forward", "patch")))
    assert after + whole == loaded.plan.parameters()[1]


def test_costs_with_dropped_layers(checkpoint: Path) -> None:
    kept = {"encoder": (1,), "decoder": (1,)}
    loaded, dense = folded(checkpoint, 6, kept_layers=kept), load(checkpoint)
    costs = CostModel(dense.family, dense.model, WORKLOADS[0], bytes_per_number=4)
    assert loaded.plan is not None
    assert costs.of_plan(loaded.plan) == counted(loaded, WORKLOADS[0])


def counted(loaded: LoadedModel, workload: Workload) -> Costs:
    return Costs(
        parameter_count(loaded.model),
        parameter_bytes(loaded.model),
        count_macs(wrap_pipeline(loaded.family, loaded.model), workload),
        kv_cache_bytes(loaded.model, workload),
    )


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


def test_saved_and_loaded_bit_equal_and_refused_by_stock(
    checkpoint: Path, tmp_path: Path, stock_chronos: StockChronos
) -> None:
    small = tscompress.compress(checkpoint, latent=6, calibration=CALIBRATION)
    output = tscompress.save(small, tmp_path / "small")
    loaded = load(output)
    assert [type(module) for module in cross_attention(loaded)] == [LatentCrossAttention] * 2
    assert loaded.plan == small.plan
    ours, theirs = unique_tensors(small.model), unique_tensors(loaded.model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [name for name in ours if "down" in name] == [f"{CROSS.format(0)}.down.weight"]
    assert torch.equal(outputs(loaded), outputs(small))
    assert torch.equal(predict(loaded), predict(small))
    refused = stock_chronos.refusal(output)
    assert refused is not None
    assert "model type `tscompress`" in refused[1]


def test_a_latent_is_not_looked_into_again(checkpoint: Path, tmp_path: Path) -> None:
    small = tscompress.compress(checkpoint, latent=6, calibration=CALIBRATION)
    output = tscompress.save(small, tmp_path / "small")
    for again in (tscompress.profile, lambda model: tscompress.compress(model, rank=4)):
        with pytest.raises(
            (UnsupportedModelError, PlanError), match=r"compress the original checkpoint\.$"
        ):
            again(load(output))
    assert small.plan is not None
    with pytest.raises(PlanError, match="latent already"):
        apply_structure_(small.model, small.plan)


def test_built_on_the_meta_device_and_filled(latent6: LoadedModel) -> None:
    model = build_empty(latent6.family, latent6.config)
    assert latent6.plan is not None
    apply_structure_(model, latent6.plan)
    first, second = (model.get_submodule(CROSS.format(layer)) for layer in (0, 1))
    assert first.down.weight.is_meta  # type: ignore[union-attr]
    assert {name for name, _ in second.named_parameters()} == {"q.weight", "o.weight"}
    workload = WORKLOADS[0]
    expected = kv_cache_bytes(latent6.model, workload)
    assert kv_cache_bytes(model, workload, dtype=torch.float32) == expected
    assert model.state_dict().keys() == latent6.model.state_dict().keys()
    model.load_state_dict(latent6.model.state_dict(), strict=True, assign=True)
    model.tie_weights()  # type: ignore[operator]
    filled = replace(latent6, model=model.eval(), pipeline=wrap_pipeline(latent6.family, model))
    assert torch.equal(outputs(filled), outputs(latent6))


def test_copies_are_whole(latent6: LoadedModel) -> None:
    expected, twin = outputs(latent6), copy.deepcopy(latent6)
    first, second = cross_attention(twin)
    assert second.first is first
    assert first is not cross_attention(latent6)[0]
    for parameter in latent6.model.parameters():
        parameter.data.zero_()
    assert torch.equal(outputs(twin), expected)


def test_settings_dtype_and_lack_of_gradient_are_taken_over(checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    loaded.model.requires_grad_(False)
    originals = cross_attention(loaded)
    apply_structure_(loaded.model, latent_plan(loaded, 6))
    for original, module in zip(originals, cross_attention(loaded), strict=True):
        assert module.layer_idx == original.layer_idx
        assert getattr(module, "config", None) is getattr(original, "config", None)
        assert not module.training
        for parameter in module.parameters():
            assert parameter.dtype == torch.bfloat16
            assert not parameter.requires_grad
        assert original.k.weight.shape == (HEADS * SIZE, D_MODEL)  # as it was


def test_bfloat16(latent6: LoadedModel) -> None:
    expected = outputs(latent6)
    small = replace(latent6, model=copy.deepcopy(latent6.model).bfloat16())
    found = outputs(small).float()
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()


# --------------------------------------------------------------------------------------------------
# Nothing to go by
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", ["encoder", "keys and values", "queries and outputs"])
def test_silent_weights_give_finite_ones(checkpoint: Path, silent: str) -> None:
    dense = load(checkpoint)
    if silent == "encoder":
        dense.model.encoder.final_layer_norm.weight.data.zero_()  # type: ignore[union-attr]
    else:
        roles = "kv" if silent == "keys and values" else "qo"
        for attention in cross_attention(dense):
            for role in roles:
                attention.get_submodule(role).weight.data.zero_()
    original = outputs(dense)
    loaded = folded(dense, 6)
    assert all(bool(p.isfinite().all()) for p in loaded.model.parameters())
    assert_close(outputs(loaded), original)


def test_the_best_latent_of_a_matrix() -> None:
    generator = torch.Generator().manual_seed(5)
    W, y = torch.randn(9, 7, generator=generator), torch.randn(500, 7, generator=generator)
    y = (y * torch.logspace(0, -3, 7)).double()
    C = Roots.of(y.T @ y / len(y))
    W = W.double()
    sigma = torch.linalg.svdvals(W @ C.root)
    for rank in range(1, 8):
        down, up = shared_latent(W.T @ W, C, rank)
        assert down.shape == (rank, 7)
        lost = (W - W @ up @ down) @ C.root
        torch.testing.assert_close(lost.square().sum(), sigma[rank:].square().sum())
        torch.testing.assert_close(down @ up, torch.eye(rank).double())


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


def head(**changes: Any) -> dict[str, Any]:
    fields = {
        "name": CROSS.format(0),
        "kind": "cross",
        "d_model": D_MODEL,
        "num_heads": HEADS,
        "head_size": SIZE,
        "qk_size": 16,
        "vo_size": 16,
        "latent": True,
    }
    return fields | changes


def test_a_latent_may_be_larger_than_a_head_but_not_than_the_model() -> None:
    plan = HeadPlan.model_validate(head())
    assert plan.text == "latent 16"
    assert plan.parameters == 2 * D_MODEL * HEADS * 16
    for changes, message in (
        ({"kind": "decoder"}, "cross-attention"),
        ({"vo_size": 8}, "qk_size = vo_size"),
        ({"qk_size": 25, "vo_size": 25}, "size 25 .*d_model, .*24"),
        ({"latent": False}, "would not be smaller"),
    ):
        with pytest.raises(ValueError, match=message):
            HeadPlan.model_validate(head(**changes))


@pytest.mark.parametrize(
    "other", [{"latent": False, "qk_size": 8, "vo_size": 8}, {"qk_size": 8, "vo_size": 8}]
)
def test_all_cross_attention_reads_the_same_latent_or_none(other: dict[str, Any]) -> None:
    heads = [head(), head(name=CROSS.format(1), **other)]
    with pytest.raises(PlanError, match="latent"):
        Plan.parse({"family": "chronos-t5", "method": "fold", "heads": heads})


def test_latent_plan_is_described(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load(checkpoint)
    plan = latent_plan(loaded, SIZE)
    assert plan.latent == SIZE
    assert plan.uniform_sizes is None  # although every number is that of the original
    assert plan.changes_anything
    assert "fold, all cross-attention: one latent of 8" in plan.summary()
    assert plan.diff(latent_plan(loaded, 4)) == [
        f"{CROSS.format(layer)}: latent 8 -> latent 4" for layer in (0, 1)
    ]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert fold_plan(loaded.model, loaded.architecture).latent is None


def test_sizes_and_exclusions_that_do_not_go_with_a_latent(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    model, architecture = loaded.model, loaded.architecture
    with pytest.raises(PlanError, match="latent of size 25"):
        latent_plan(loaded, 25)
    with pytest.raises(PlanError, match="EncDecAttention reads the latent"):
        latent_plan(loaded, 6, vo={CROSS.format(1): 4})
    with pytest.raises(PlanError, match=r"block\.1.* is excluded"):
        fold_plan_of(model, architecture, None, latent=6, exclude=["decoder.block.1.*"])
    plan = fold_plan_of(
        model, architecture, RankSchedule(rank=3), latent=6, exclude=["encoder.block.0.*"]
    )
    sizes = {(entry.kind, entry.latent, entry.qk_size, entry.vo_size) for entry in plan.heads}
    assert sizes == {
        ("encoder", False, SIZE, SIZE),
        ("encoder", False, 3, 3),
        ("decoder", False, 3, 3),
        ("cross", True, 6, 6),
    }
    assert plan.schedule == {"kind": "rank", "rank": 3, "latent": 6}


def test_chronos2_has_no_cross_attention(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match="chronos-2 model has no cross-attention"):
        tscompress.compress(checkpoints["chronos-2"], latent=6, calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": CROSS.format(1)}, r"block\.1.*decoder\.block\.0"),
        ({"name": "encoder.block.0.layer.0.SelfAttention"}, "cross-attention"),
        ({"num_heads": 2}, "2 heads .* 4 heads"),
    ],
)
def test_impossible_latents_are_refused(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    loaded = load(checkpoint)
    before = str(loaded.model)
    with pytest.raises(PlanError, match=message):
        replace_heads_(loaded.model, HeadPlan.model_validate(head(**changes)))
    assert str(loaded.model) == before


def test_a_plan_that_names_a_part_of_the_cross_attention_is_refused_before_any_work(
    checkpoint: Path, forbid: Forbid
) -> None:
    loaded = load(checkpoint)
    whole = fold_plan(loaded.model, loaded.architecture, latent=8)
    first = next(head for head in whole.heads if head.latent)
    assert sum(head.latent for head in whole.heads) > 1
    forbid("tscompress.compression.fold.record")
    with pytest.raises(PlanError, match="all cross-attention reads one latent"):
        tscompress.compress(checkpoint, plan=whole.model_copy(update={"heads": (first,)}))


def test_the_second_layer_has_the_first_ones_size(checkpoint: Path) -> None:
    model: nn.Module = load(checkpoint).model
    replace_heads_(model, HeadPlan.model_validate(head()))
    other = HeadPlan.model_validate(head(name=CROSS.format(1), qk_size=6, vo_size=6))
    with pytest.raises(PlanError, match="with latent 6 too"):
        replace_heads_(model, other)


# --------------------------------------------------------------------------------------------------
# Asking for it
# --------------------------------------------------------------------------------------------------


def test_alone_or_with_sizes(checkpoint: Path) -> None:
    alone = tscompress.compress(checkpoint, latent=6, calibration=CALIBRATION)
    both = tscompress.compress(checkpoint, latent=6, rank=4, ff_ratio=0.5, calibration=CALIBRATION)
    for small, size, units in ((alone, 8, 40), (both, 4, 20)):
        assert small.plan is not None
        assert small.plan.latent == 6
        assert {entry.qk_size for entry in small.plan.heads if not entry.latent} == {size}
        assert {entry.kept for entry in small.plan.hidden} == {units}
        assert small.recipe is not None
        assert small.recipe.latent == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"latent": 0}, RecipeError, "latent: "),
        ({"budget": "parameters=0.5"}, RecipeError, "no latent"),
        ({"method": "svd", "rank": 4}, RecipeError, "latent is for fold"),
    ],
)
def test_options_incompatible_with_a_latent_are_refused(
    checkpoint: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tscompress.compress(checkpoint, **{"latent": 6, **options})


def test_plan_option_brings_its_latent(checkpoint: Path) -> None:
    plan = latent_plan(load(checkpoint), 6)
    with pytest.raises(UsageError, match="a plan has every size"):
        tscompress.compress(checkpoint, plan=plan, latent=6)
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)
    assert [type(module) for module in cross_attention(small)] == [LatentCrossAttention] * 2


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "small"
    arguments = ["compress", str(checkpoint), "--output", str(output), "--latent", "6"]
    done = CliRunner().invoke(app, [*arguments, "--calibration-series", "6"])
    assert done.exit_code == 0, done.output
    assert "one latent of 6" in done.output
    plan = load(output).plan
    assert plan is not None
    assert {entry.qk_size for entry in plan.heads if not entry.latent} == {SIZE}
    mixed = CliRunner().invoke(app, [*arguments, "--force", "--plan", str(output / "plan.json")])
    assert "--latent cannot go with it" in str(mixed.exception)
