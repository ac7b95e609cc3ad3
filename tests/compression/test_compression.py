"""The walk on tiny checkpoints of every family: calibrate, plan, operate, save, load again."""

from __future__ import annotations

import importlib.metadata
import json
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline
from families_of_tests import any_family, two_stacks
from hooks import hook_count
from safetensors.torch import load_file, save_file
from shared_fixtures import FAMILIES
from stock_chronos import StockChronos

import tscompress
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.activations import Moment, collect_moments
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
)
from tscompress.compression.factor import apply_plan_, make_plan
from tscompress.errors import (
    CorruptCheckpointError,
    FactorizationError,
    OutputExistsError,
    PlanError,
    TscompressError,
    UsageError,
    VerificationError,
)
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import break_even_rank
from tscompress.plan.layer_plans import ProjectionPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import (
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    Method,
    PowerLawSchedule,
    RankSchedule,
)
from tscompress.workflows.compress import compress_checkpoint, compress_loaded_, plan_loaded
from tscompress.workflows.recipe import Recipe, load_recipe, validate

CALIBRATION = CalibrationConfig(source="synthetic", num_series=12, context_length=40, batch_size=4)
METHODS = get_args(Method)


def predict(loaded: LoadedModel) -> torch.Tensor:
    """Forecasts of two series, with fixed random numbers for the sampled family."""
    series = torch.sin(torch.arange(40.0) / torch.tensor([[3.0], [5.0]])) + 2
    inputs = series[:, None, :] if loaded.family == "chronos-2" else series
    with torch.random.fork_rng():
        torch.manual_seed(0)
        forecast = loaded.forecaster.predict(inputs, prediction_length=4)
    return torch.stack(forecast) if isinstance(forecast, list) else forecast


def planned(loaded: LoadedModel, schedule: object, **options: object) -> Plan:
    return make_plan(loaded.model, loaded.architecture, "svd", schedule, **options)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Architectures
# --------------------------------------------------------------------------------------------------


def test_every_attention_linear_is_found_once(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    names = [name for _, _, name in loaded.architecture.attention_projections()]
    expected = {
        name
        for name, module in loaded.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in "qkvo"
    }
    assert len(names) == len(set(names))
    assert set(names) == expected


def test_cross_attention_counts_after_the_encoder(checkpoints: dict[str, Path]) -> None:
    blocks = load(checkpoints["chronos-t5"]).architecture.attention
    assert {(b.kind, b.depth) for b in blocks} == {
        ("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1), ("cross", 2), ("cross", 3),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Calibration
# --------------------------------------------------------------------------------------------------


def test_moments_count_only_valid_positions(checkpoints: dict[str, Path]) -> None:
    """Left padding changes neither the second moment nor the count."""
    loaded = load(checkpoints["chronos-bolt"])
    name = "encoder.block.1.layer.0.SelfAttention.q"
    series = [np.sin(np.arange(52) / 3).astype(np.float32) + 2]
    (short,) = calibration_batches(loaded, CALIBRATION, series)
    padding = torch.full((1, 16), torch.nan)
    padded = type(short)(torch.cat([padding, short.context], dim=1), short.target)
    alone = collect_moments(loaded, [short], [name])[name]
    with_padding = collect_moments(loaded, [padded], [name])[name]
    assert with_padding.count == alone.count
    torch.testing.assert_close(with_padding.second, alone.second, rtol=1e-4, atol=1e-6)


def test_moments_equal_a_direct_computation(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    batches = calibration_batches(loaded, CALIBRATION)
    name = "decoder.block.0.layer.1.EncDecAttention.k"
    seen: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    module = loaded.model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    encoder = loaded.model.get_submodule("encoder").register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"].clone()), with_kwargs=True
    )
    for batch in batches:
        run_teacher_forced(loaded, batch)
    handle.remove()
    encoder.remove()
    rows = torch.cat([x[m > 0] for x, m in zip(seen, masks, strict=True)]).double()
    moment = collect_moments(loaded, batches, [name])[name]
    assert moment.count == len(rows) < sum(x.shape[0] * x.shape[1] for x in seen)
    torch.testing.assert_close(moment.second, rows.T @ rows / len(rows))


def test_padded_targets_do_not_count_in_the_decoder(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    name = "decoder.block.0.layer.0.SelfAttention.q"
    (batch,) = calibration_batches(
        loaded, CALIBRATION, [np.sin(np.arange(52) / 3).astype(np.float32) + 2]
    )
    steps = batch.target.shape[1]
    padding = torch.full((1, 3), torch.nan)
    padded = type(batch)(batch.context, torch.cat([batch.target, padding], dim=1))
    moments = collect_moments(loaded, [batch], [name])[name]
    # The last observed value is fed to the first padded position; only that one is real.
    assert collect_moments(loaded, [padded], [name])[name].count == moments.count + 1 == steps + 1


def test_projections_of_one_input_share_their_moment(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    names = [name for _, _, name in loaded.architecture.attention_projections()]
    moments = collect_moments(loaded, calibration_batches(loaded, CALIBRATION), names)
    for block in loaded.architecture.attention:
        q, k, v, o = (moments[block.projections[role]] for role in "qkvo")
        assert k is v
        assert (q is k) == (block.kind != "cross")
        assert o is not q
        assert q.count > 0


@two_stacks
def test_hooks_are_gone_even_after_a_failure(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    batches = calibration_batches(loaded, CALIBRATION)
    names = [name for _, _, name in loaded.architecture.attention_projections()]

    def fail(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_moments(loaded, batches, names, on_batch=fail)
    assert hook_count(loaded.model) == 0


def test_given_series_are_used_and_seeded(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    series = [np.full(30, value, dtype=np.float32) for value in range(1, 6)]
    batches = calibration_batches(loaded, CALIBRATION, series)
    values = {float(v) for batch in batches for v in batch.context[:, -1]}
    assert values == {1.0, 2.0, 3.0, 4.0, 5.0}
    few = CALIBRATION.model_copy(update={"num_series": 2})
    first, again = (calibration_batches(loaded, few, series) for _ in range(2))
    assert len(first[0].context) == 2
    assert torch.equal(first[0].context, again[0].context)
    picked = set()
    for seed in range(6):
        seeded = few.model_copy(update={"seed": seed})
        (batch,) = calibration_batches(loaded, seeded, series)
        picked.add(tuple(batch.context[:, -1].tolist()))
    assert len(picked) > 1


@pytest.mark.parametrize("count", [1, 7, 12])
def test_synthetic_calibration_has_the_number_of_series_asked_for(
    checkpoints: dict[str, Path], count: int
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    config = CALIBRATION.model_copy(update={"num_series": count})
    assert sum(len(b.context) for b in calibration_batches(loaded, config)) == count


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


@two_stacks
@pytest.mark.parametrize(
    "schedule",
    [
        RankSchedule(rank=3),
        EpsilonSchedule(epsilon=0.6),
        EnergySchedule(energy=0.5),
        PowerLawSchedule(d_0=1, alpha=0.3),
        BudgetSchedule(parameter_ratio=0.5),
    ],
)
def test_parameter_counts_equal_the_plans(checkpoint: Path, schedule: object) -> None:
    loaded = load(checkpoint)
    before = sum(p.numel() for p in loaded.model.parameters())
    plan = planned(loaded, schedule)
    assert plan.ranks
    apply_plan_(loaded, plan)
    dense, after = plan.parameters()
    assert sum(p.numel() for p in loaded.model.parameters()) == before - dense + after
    factored = {n for n, m in loaded.model.named_modules() if isinstance(m, LowRankLinear)}
    assert factored == set(plan.ranks)


@two_stacks
@pytest.mark.parametrize("ratio", [0.2, 0.37, 0.5, 0.8, 1.0])
def test_a_budget_is_kept_and_used(checkpoint: Path, ratio: float) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, BudgetSchedule(parameter_ratio=ratio))
    largest_step = max(p.out_features + p.in_features for p in plan.projections)
    before, after = plan.parameters()
    assert after <= ratio * before
    if ratio < 0.8:  # near 1 a matrix must jump from its break-even rank to dense
        assert after > ratio * before - largest_step


def test_a_budget_below_rank_one_is_refused(checkpoint: Path) -> None:
    with pytest.raises(PlanError, match="below rank 1 everywhere"):
        planned(load(checkpoint), BudgetSchedule(parameter_ratio=0.01))


def test_power_law_sizes_heads_by_depth(checkpoints: dict[str, Path]) -> None:
    plan = planned(load(checkpoints["chronos-t5"]), PowerLawSchedule(d_0=1.5, alpha=0.3))
    heads = 4
    assert plan.ranks["encoder.block.0.layer.0.SelfAttention.q"] == heads * 2
    assert plan.ranks["encoder.block.1.layer.0.SelfAttention.q"] == heads * 2
    # cross-attention of decoder block 1 is at depth 3: ceil(1.5 * 4^0.3) = 3
    assert plan.ranks["decoder.block.1.layer.1.EncDecAttention.q"] == heads * 3


@two_stacks
def test_ranks_without_savings_stay_dense_with_a_reason(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    limit = break_even_rank(32, 24)
    plan = planned(loaded, RankSchedule(rank=limit + 1))
    assert not plan.ranks
    assert {p.reason for p in plan.projections} == {
        "two factors of the chosen rank would not be smaller"
    }
    assert "would not be smaller" in plan.summary()
    assert len(planned(loaded, RankSchedule(rank=limit)).ranks) == len(plan.projections)


@two_stacks
def test_exclusions_stay_dense_and_unknown_patterns_fail(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=2), exclude=["*.v", "encoder.block.0.*"])
    assert not any(
        name.endswith(".v") or "block.0." in name for name in plan.ranks if "enc" in name
    )
    assert any(name.endswith(".q") for name in plan.ranks)
    with pytest.raises(PlanError, match="matches no planned layer"):
        planned(loaded, RankSchedule(rank=2), exclude=["nothing.*"])


@two_stacks
def test_feed_forward_is_planned_only_when_asked(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    assert {p.part for p in planned(loaded, RankSchedule(rank=2)).projections} == {"attention"}
    plan = planned(loaded, RankSchedule(rank=2), feed_forward=True)
    apply_plan_(loaded, plan)
    assert {p.part for p in plan.projections} == {"attention", "feed_forward"}
    assert torch.isfinite(predict(loaded)).all()
    with pytest.raises(PlanError, match="cannot size feed-forward"):
        planned(load(loaded.directory), PowerLawSchedule(d_0=1, alpha=0), feed_forward=True)


@two_stacks
def test_plans_round_trip_and_diff(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=3), exclude=["*.o"])
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert plan.diff(again) == []
    content = json.loads((tmp_path / "plan.json").read_text())
    content["projections"][0]["rank"] = 5
    name = content["projections"][0]["name"]
    assert plan.diff(Plan.parse(content)) == [f"{name}: 3 -> 5"]


@any_family
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "projections.0.rank"),
        ({"rank": -3}, "projections.0.rank"),
        ({"rank": 10_000}, "no fewer than the dense"),
        ({"color": "red"}, "projections.0.color"),
        ({"in_features": "many"}, "projections.0.in_features"),
    ],
)
def test_bad_plans_name_the_key(
    checkpoint: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    content = planned(load(checkpoint), RankSchedule(rank=2)).model_dump(mode="json")
    content["projections"][0].update(change)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


@two_stacks
def test_a_plan_for_another_model_is_refused_before_anything_changes(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=2))
    stranger = ProjectionPlan(
        name="encoder.block.9.q", part="attention", out_features=4, in_features=4, rank=1
    )
    wrong = plan.model_copy(update={"projections": (*plan.projections, stranger)})
    before = predict(loaded)
    with pytest.raises(PlanError, match=r"encoder\.block\.9\.q"):
        apply_plan_(loaded, wrong)
    assert torch.equal(predict(loaded), before)
    reshaped = plan.projections[0].model_copy(update={"in_features": 99})
    with pytest.raises(PlanError, match="x99"):
        apply_plan_(loaded, plan.model_copy(update={"projections": (reshaped,)}))


def test_a_head_that_is_the_token_embedding_is_not_factored(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    rows, columns = loaded.model.lm_head.weight.shape
    head = ProjectionPlan(
        name="lm_head", part="attention", out_features=rows, in_features=columns, rank=1
    )
    plan = planned(loaded, RankSchedule(rank=2)).model_copy(update={"projections": (head,)})
    with pytest.raises(PlanError, match="'lm_head', whose weight is the token embedding's"):
        apply_plan_(loaded, plan)


# --------------------------------------------------------------------------------------------------
# Surgery
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["svd", "activation-svd"])
def test_factors_of_full_rank_reproduce_the_dense_output(checkpoint: Path, method: str) -> None:
    """Rank at the break-even point of a matrix that is itself of no higher rank loses nothing."""
    dense = load(checkpoint, dtype=torch.float32)
    rank = break_even_rank(32, 24)
    for _, _, name in dense.architecture.attention_projections():
        weight = dense.model.get_submodule(name).weight
        U, S, Vt = torch.linalg.svd(weight.data.double(), full_matrices=False)
        S[rank:] = 0
        weight.data = ((U * S) @ Vt).float()
    batch = calibration_batches(dense, CALIBRATION)[-1]

    def output() -> torch.Tensor:
        result = run_teacher_forced(dense, batch)
        return result.logits if "logits" in result else result.quantile_preds

    names = [name for _, _, name in dense.architecture.attention_projections()]
    moments = collect_moments(dense, calibration_batches(dense, CALIBRATION), names)
    before = output()
    plan = make_plan(
        dense.model,
        dense.architecture,
        method,
        RankSchedule(rank=rank),
        moments=moments,  # type: ignore[arg-type]
    )
    assert len(plan.ranks) == len(names)
    apply_plan_(dense, plan, moments)
    difference = torch.linalg.norm(output() - before) / torch.linalg.norm(before)
    assert float(difference) < 1e-5


def test_activation_svd_keeps_more_of_the_output_than_svd(checkpoints: dict[str, Path]) -> None:
    """On the calibration data, layer by layer, at the same rank."""
    dense = load(checkpoints["chronos-bolt"], dtype=torch.float32)
    name = "encoder.block.1.layer.0.SelfAttention.k"
    moments = collect_moments(dense, calibration_batches(dense, CALIBRATION), [name])
    weight = dense.model.get_submodule(name).weight.detach().double()
    errors = {}
    for method in ("svd", "activation-svd"):
        loaded = load(checkpoints["chronos-bolt"], dtype=torch.float32)
        entry = ProjectionPlan(name=name, part="attention", out_features=32, in_features=24, rank=2)
        plan = Plan(family=loaded.family, method=method, projections=(entry,))  # type: ignore[arg-type]
        apply_plan_(loaded, plan, moments)
        module = loaded.model.get_submodule(name)
        assert isinstance(module, LowRankLinear)
        lost = weight - (module.left.weight.double() @ module.right.weight.double()).detach()
        errors[method] = float(torch.trace(lost @ moments[name].second @ lost.T))
    assert errors["activation-svd"] < errors["svd"]


def test_degenerate_moments_never_give_nan(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    moments = {
        name: Moment(
            torch.zeros(loaded.model.get_submodule(name).in_features, dtype=torch.float64).diag()
        )  # type: ignore[arg-type]
        for _, _, name in loaded.architecture.attention_projections()
    }
    plan = make_plan(
        loaded.model, loaded.architecture, "activation-svd", RankSchedule(rank=2), moments=moments
    )
    apply_plan_(loaded, plan, moments)
    assert torch.isfinite(predict(loaded)).all()


@two_stacks
def test_failed_factorization_names_the_layer_and_keeps_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=2))
    before = predict(loaded)
    calls = 0

    def failing(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise torch.linalg.LinAlgError("did not converge")
        return original(*args, **kwargs)  # type: ignore[arg-type, no-any-return, return-value]

    original = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", failing)
    with pytest.raises(FactorizationError, match=r"\.[qkvo] failed: did not converge"):
        apply_plan_(loaded, plan)
    monkeypatch.undo()
    assert torch.equal(predict(loaded), before)


@any_family
def test_activation_svd_without_moments_is_refused(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=2)).model_copy(update={"method": "activation-svd"})
    with pytest.raises(FactorizationError, match="needs the input moments"):
        apply_plan_(loaded, plan)


def test_low_rank_linear_keeps_the_bias_and_the_dtype() -> None:
    linear = torch.nn.Linear(5, 7, dtype=torch.bfloat16)
    module = LowRankLinear.from_factors(linear, torch.ones(7, 2), torch.ones(2, 5))
    assert module.left.bias is not None
    assert torch.equal(module.left.bias, linear.bias)
    assert module.weight.dtype == torch.bfloat16
    assert (module.in_features, module.out_features, module.rank) == (5, 7, 2)


# --------------------------------------------------------------------------------------------------
# Save, load again
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["svd", "activation-svd"])  # of fold, see test_folding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_is_bit_equal(
    checkpoint: Path, tmp_path: Path, dtype: str, method: Method
) -> None:
    source = tmp_path / checkpoint.name
    original = load(checkpoint, dtype=dtype)
    original.model.save_pretrained(source)
    compressed = tscompress.compress(source, method=method, rank=4, calibration=CALIBRATION)
    assert str(compressed.model.dtype) == f"torch.{dtype}"
    output = tscompress.save(compressed, tmp_path / "small")
    again = load(output)
    assert again.plan == Plan.load(output / "plan.json") == compressed.plan
    assert again.family == compressed.family
    assert torch.equal(predict(again), predict(compressed))
    written = load_file(output / "model.safetensors")
    assert {str(t.dtype) for t in written.values()} == {f"torch.{dtype}"}
    assert not list(tmp_path.glob(".*"))


@any_family
@pytest.mark.parametrize("method", ["fold", "activation-svd"])
def test_provenance_records_the_source(checkpoint: Path, tmp_path: Path, method: Method) -> None:
    compressed = tscompress.compress(checkpoint, method=method, rank=4, calibration=CALIBRATION)
    output = tscompress.save(compressed, tmp_path / "small")
    provenance = json.loads((output / "provenance.json").read_text())
    assert provenance["source"]["model"] == str(checkpoint)
    assert len(provenance["source"]["sha256"]["model.safetensors"]) == 64
    assert provenance["calibration"]["series"] == CALIBRATION.num_series
    assert provenance["libraries"]["torch"] == importlib.metadata.version("torch")
    # The recipe says what was done and where it went.
    kept = load_recipe(output / "recipe.yaml")
    assert (kept.model, kept.output, kept.method) == (str(checkpoint), str(output), method)


@any_family
def test_series_given_to_a_method_that_does_not_calibrate_are_refused(checkpoint: Path) -> None:
    series = [np.arange(30, dtype=np.float32)]
    with pytest.raises(UsageError, match="svd does not calibrate"):
        tscompress.compress(checkpoint, method="svd", rank=3, series=series)
    plan = planned(load(checkpoint), RankSchedule(rank=3))
    with pytest.raises(UsageError, match="no schedule or selection"):
        tscompress.compress(checkpoint, plan=plan, exclude=["*.v"])


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("chronos-bolt", {"method": "activation-svd", "rank": 4}),
        *((family, {"schedule": (2.5, 0.5)}) for family in FAMILIES),
    ],
    indirect=["checkpoint"],
    ids=str,
)
def test_stock_chronos_refuses_and_the_registered_pipeline_opens(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], stock_chronos: StockChronos
) -> None:
    assert stock_chronos.refusal(checkpoint) is None
    compressed = tscompress.compress(checkpoint, calibration=CALIBRATION, **options)
    output = tscompress.save(compressed, tmp_path / "small")
    refused = stock_chronos.refusal(output)
    assert refused is not None
    assert refused[0] == "ValueError"
    assert "tscompress" in refused[1]

    import_module("tscompress.pipelines")  # registers

    pipeline = BaseChronosPipeline.from_pretrained(output)
    assert type(pipeline) is type(compressed.forecaster)
    opened = load(output)
    opened.pipeline, opened.model = pipeline, pipeline.inner_model
    assert torch.equal(predict(opened), predict(compressed))
    half = BaseChronosPipeline.from_pretrained(
        output, dtype="bfloat16", device_map="cpu", token=None, cache_dir=None
    )
    assert half.inner_model.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="does not take colour"):
        BaseChronosPipeline.from_pretrained(output, colour="red")


@any_family
def test_an_existing_output_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    compressed = tscompress.compress(checkpoint, rank=4, method="svd")
    target = tmp_path / "small"
    target.mkdir()
    (target / "precious.txt").write_text("data")
    with pytest.raises(OutputExistsError, match="--force"):
        tscompress.save(compressed, target)
    assert (target / "precious.txt").read_text() == "data"
    with pytest.raises(OutputExistsError, match=r"precious\.txt"):
        tscompress.save(compressed, target, force=True)
    (target / "precious.txt").unlink()
    tscompress.save(compressed, target, force=True)
    tscompress.save(compressed, target, force=True)  # over its own
    assert torch.equal(predict(load(target)), predict(compressed))


@any_family
def test_unverified_save_leaves_no_files(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed = tscompress.compress(checkpoint, rank=4, method="svd")

    def garble(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        tensors = original(model)
        first = next(name for name in tensors if name.endswith("left.weight"))
        return tensors | {first: tensors[first] + 1}

    factored = import_module("tscompress.checkpoints.format")
    original = factored.unique_tensors
    monkeypatch.setattr(factored, "unique_tensors", garble)
    with pytest.raises(VerificationError, match=r"left\.weight"):
        tscompress.save(compressed, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_weights_aligned_otherwise_than_in_a_file_are_saved(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Products of unaligned memory round otherwise; a good checkpoint was once refused for it."""
    compressed = tscompress.compress(checkpoints["chronos-2"], method="svd", budget=0.25)
    for parameter in compressed.model.parameters():
        room = torch.empty(parameter.numel() + 1)
        parameter.data = room[1:].view(parameter.shape).copy_(parameter.data)
    saved = tscompress.save(compressed, tmp_path / "small")
    assert all(parameter.data_ptr() % 16 == 0 for parameter in compressed.model.parameters())
    assert torch.equal(predict(load(saved)), predict(compressed))


@two_stacks
def test_an_all_dense_plan_is_not_saved(checkpoint: Path, tmp_path: Path) -> None:
    compressed = tscompress.compress(checkpoint, method="svd", schedule="epsilon=1e-9")
    with pytest.raises(PlanError, match="nothing to save"):
        tscompress.save(compressed, tmp_path / "small")


@any_family
@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "plan", "version", "truncated"])
def test_damaged_factored_checkpoints_are_refused(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    compressed = tscompress.compress(checkpoint, rank=4, method="svd")
    output = tscompress.save(compressed, tmp_path / "small")
    weights = output / "model.safetensors"
    tensors = load_file(weights)
    name = next(n for n in tensors if n.endswith("left.weight"))
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["stranger"] = torch.zeros(1)
    elif damage == "shape":
        tensors[name] = tensors[name][:, :2].contiguous()
    save_file(tensors, weights)
    if damage == "plan":
        content = json.loads((output / "plan.json").read_text())
        content["projections"][0]["rank"] = 5
        (output / "plan.json").write_text(json.dumps(content))
    elif damage == "version":
        config = json.loads((output / "config.json").read_text())
        (output / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError):
        load(output)


@any_family
def test_a_compressed_checkpoint_is_not_compressed_again(checkpoint: Path, tmp_path: Path) -> None:
    output = tscompress.save(
        tscompress.compress(checkpoint, rank=4, method="svd"), tmp_path / "small"
    )
    for options in (
        {"rank": 2, "method": "svd"}, {"rank": 2}, {"ff_ratio": 0.5}, {"schedule": "epsilon=0.5"},
    ):  # fmt: skip
        with pytest.raises(PlanError, match="compress the original"):
            tscompress.compress(output, **options)


def test_folded_checkpoint_is_stock_and_folds_again(checkpoint: Path, tmp_path: Path) -> None:
    folded = tscompress.compress(checkpoint, rank=4, calibration=CALIBRATION)
    with pytest.raises(PlanError, match="compress the original"):
        tscompress.compress(folded, rank=2)
    saved = tscompress.save(folded, tmp_path / "small")
    again = tscompress.compress(saved, rank=2, calibration=CALIBRATION)
    assert again.config["d_kv"] == 2


@two_stacks
def test_a_plan_that_keeps_all_layers(checkpoint: Path) -> None:
    loaded = tscompress.load(checkpoint)
    kept = {"encoder": (0, 1)}
    plan = Plan(family=loaded.family, method="fold", kept_layers=kept)
    with pytest.raises(PlanError, match="kept_layers"):
        tscompress.compress(loaded, plan=plan)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 4, "multiple": 0},
        {"rank": 4, "layout": ""},
        {"budget": "parameters=0.5", "multiple": 0},
        {"budget": "parameters=0.5", "layout": ""},
        {"schedule": (float("inf"), 1.0)},
        {"schedule": (1e300, 300.0)},
        {"rank": 10**20},
    ],
)
def test_empty_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tscompress.compress("anywhere", **options)


@any_family
def test_plan_excludes_other_sizes(checkpoint: Path) -> None:
    plan = Plan(family="chronos-bolt", method="fold", kept_layers={"encoder": (0,)})
    with pytest.raises(UsageError, match="a plan has every size"):
        tscompress.compress(checkpoint, plan=plan, rank=0)


@any_family
@pytest.mark.parametrize("series", [[np.array([1.0, 2.0, np.inf] * 30)] * 8, [[1.0, 1e300] * 40]])
def test_infinite_values_count_as_missing(checkpoint: Path, series: Any) -> None:
    small = tscompress.compress(checkpoint, rank=4, series=series)
    assert all(torch.isfinite(weight).all() for weight in small.model.parameters())


@two_stacks
def test_dry_run_plan_equals_the_real_one(checkpoint: Path) -> None:
    loaded = tscompress.load(checkpoint, dtype="float32")
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    for options in ({"schedule": RankSchedule(rank=4), "ff_ratio": 0.5},
                    {"schedule": RankSchedule(rank=4), "method": "svd"}):  # fmt: skip
        recipe = Recipe.model_validate(
            {"model": "-", "output": "-", "calibration": CALIBRATION, **options}
        )
        plan = plan_loaded(loaded, recipe)
        after = dict(loaded.model.named_parameters())
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        done = compress_loaded_(tscompress.load(checkpoint, dtype="float32"), recipe)
        assert done.plan == plan


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "none was given"),
        ({"rank": 2, "budget": 0.5}, "rank and budget were given"),
        ({"budget": 1.5}, "budget"),
        ({"rank": 0}, "rank"),
        ({"epsilon": 2.0}, "epsilon"),
        ({"schedule": (0.0, 0.3)}, "schedule"),
        ({"rank": 2, "powers_of_two": True}, "give schedule"),
    ],
)
def test_schedules_out_of_range_are_refused(
    options: dict[str, Any], message: str, method: Method
) -> None:
    with pytest.raises(UsageError, match=message):
        tscompress.compress("anywhere", method=method, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5}, r"budget 0\.5 .*parameters=0\.5"),
        ({"budget": "parameters=0"}, "'parameters=0'"),
        ({"budget": "parameters=0.5", "rank": 4}, "rank and budget were given"),
        ({"budget": "parameters=0.5", "ff_ratio": 0.5}, "no ff_ratio"),
        ({"budget": "parameters=0.5", "exclude": ["*"]}, "no exclude"),
        ({"budget": "parameters=0.5", "layout": "loose"}, "layout: .*folded"),
        ({"budget": "parameters=0.5", "multiple": 3}, "multiple: .*1, 8 or 16"),
        (
            {"budget": "parameters=0.5", "layout": "factored", "depth": True},
            "depth .*folded",
        ),
        ({"rank": 4, "layout": "factored"}, "layout"),
        ({"rank": 4, "multiple": 8}, "multiple"),
        ({"rank": 4, "depth": True}, "depth"),
        ({"rank": 4, "feed_forward": True}, "ff_ratio"),
        ({"rank": 4, "ff_ratio": 0.0}, "ff_ratio"),
        ({"rank": 4, "ff_ratio": 1.5}, "ff_ratio"),
        ({"fit": 1.0}, "fit: "),
        ({"method": "svd", "schedule": "fit=0.1"}, "svd needs a schedule"),
        ({"method": "svd", "budget": "parameters=0.5"}, "svd"),
        ({"method": "svd", "rank": 4, "ff_ratio": 0.5}, "ff_ratio is for fold"),
        ({"method": "svd", "budget": 0.5, "depth": True}, "depth"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TscompressError, match=message):
        tscompress.compress("anywhere", **options)


def test_edited_plan_is_applied_exactly(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    plan = planned(loaded, RankSchedule(rank=2))
    first = plan.projections[0].model_copy(update={"rank": None})
    edited = plan.model_copy(update={"projections": (first, *plan.projections[1:])})
    compressed = tscompress.compress(checkpoint, plan=edited)
    assert compressed.plan == edited
    assert isinstance(compressed.model.get_submodule(first.name), torch.nn.Linear)
    assert compressed.recipe is None
    with pytest.raises(UsageError, match="no schedule"):
        tscompress.compress(checkpoint, plan=edited, rank=3)


def test_sizes_that_change_nothing_are_refused_before_any_calibration(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("it was folded")

    monkeypatch.setattr("tscompress.workflows.compress.compress_loaded_", fail)
    content = {"model": str(checkpoints["chronos-bolt"]), "output": str(tmp_path / "small")}
    chosen = validate(Recipe, {**content, "width": 1.0}, source="test")
    with pytest.raises(PlanError, match="keeps every layer"):
        compress_checkpoint(chosen)
    assert not (tmp_path / "small").exists()


def test_nothing_is_recovered_where_a_schedule_found_nothing_to_cut(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("it was recovered")

    monkeypatch.setattr("tscompress.workflows.compress.recover_resumed_", fail)
    content = {"model": "m", "output": "o", "method": "svd", "schedule": "epsilon=1e-9"}
    chosen = validate(Recipe, {**content, "recover": {"steps": 2}}, source="test")
    with pytest.raises(PlanError, match="keeps every layer"):
        compress_loaded_(load(checkpoints["chronos-bolt"]), chosen)
