"""A token embedding of lower rank, against the dense original."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from shared_fixtures import Command, assert_refused, tiny_recipe
from torch import Tensor, nn

import tscompress
from tscompress.benchmark.sizes import count_macs, parameter_bytes, parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel
from tscompress.budget.plan_within_budget import plan_within_budget
from tscompress.budget.search import choose_factored
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.checkpoints.format import apply_structure_
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.apply import fold_planned_
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.token_embedding import (
    RARE,
    principal_rows,
    projected_rows,
    token_usage,
)
from tscompress.errors import (
    CorruptCheckpointError,
    PlanError,
    RecipeError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.families.registry import adapter_of, wrap_pipeline
from tscompress.layers.token_embedding import LowRankEmbedding
from tscompress.plan.layer_plans import EmbeddingPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule, parse_budget
from tscompress.reports.content import plan_label
from tscompress.training.pretrain_model import build_model
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket
from tscompress.workflows.save import CompressedModel

VOCABULARY, D_MODEL, RANK = 64, 24, 6  # of the checkpoint in shared_fixtures
CALIBRATION = CalibrationConfig(source="synthetic", num_series=12, context_length=40)
FOLD = FoldConfig(precision="float32")
WORKLOAD = Workload(batch_size=2, context_length=40, horizon=8, num_samples=3, threads=1)


@pytest.fixture
def t5(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["chronos-t5"]


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> CompressedModel:
    """A model of which the embedding alone is compressed."""
    t5 = checkpoints["chronos-t5"]
    return tscompress.compress(t5, embedding_rank=RANK, calibration=CALIBRATION)


@pytest.fixture(scope="module")
def saved_alone(alone: CompressedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tscompress.save(alone, tmp_path_factory.mktemp("saved") / "small")


def low_rank(path: Path) -> LoadedModel:
    """A dense model whose embedding has rank :data:`RANK` already."""
    loaded = load(path)
    table: Tensor = loaded.model.shared.weight  # type: ignore[assignment,union-attr]
    left, values, right = torch.linalg.svd(table.detach(), full_matrices=False)
    with torch.no_grad():
        table.copy_((left * values)[:, :RANK] @ right[:RANK])
    return loaded


def planned(loaded: LoadedModel, rank: int = RANK, **sizes: Any) -> Plan:
    return fold_plan(loaded.model, loaded.architecture, embedding=rank, **sizes)


def folded(loaded: LoadedModel, plan: Plan, config: FoldConfig = FOLD) -> LoadedModel:
    small = copy.deepcopy(loaded)
    fold_planned_(small, plan, calibration_batches(loaded, CALIBRATION), config)
    return small


def logits(loaded: LoadedModel) -> Tensor:
    """Of teacher-forced windows, ``[B, H, V]``."""
    (batch, *_) = calibration_batches(loaded, CALIBRATION)
    inputs = adapter_of(loaded.family).inputs(loaded.forecaster, batch)
    with torch.no_grad():
        found: Tensor = loaded.model(**inputs).logits
    return found


# --------------------------------------------------------------------------------------------------
# The fold
# --------------------------------------------------------------------------------------------------


def test_what_has_the_rank_already_is_factored_exactly(t5: Path) -> None:
    loaded = low_rank(t5)
    small = folded(loaded, planned(loaded))
    assert parameter_count(small.model) < parameter_count(loaded.model)
    torch.testing.assert_close(logits(small), logits(loaded), rtol=1e-4, atol=1e-4)


def test_embedding_and_head_are_one_table_in_all_their_places(t5: Path) -> None:
    model: Any = folded(load(t5), planned(load(t5))).model
    assert isinstance(model.shared, LowRankEmbedding)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens is model.shared
    assert model.lm_head.table is model.shared.table
    assert model.shared.table.weight.shape == (VOCABULARY, RANK)
    tokens = torch.arange(VOCABULARY)
    torch.testing.assert_close(model.shared(tokens), model.shared.weight)


def test_a_narrower_stream_needs_no_table_for_its_head(t5: Path) -> None:
    loaded = low_rank(t5)
    wide = folded(loaded, fold_plan(loaded.model, loaded.architecture, width=16))
    small = folded(loaded, planned(loaded, width=16))
    saved = parameter_count(wide.model) - parameter_count(small.model)
    assert saved == 2 * VOCABULARY * 16 - RANK * (VOCABULARY + 2 * 16)
    # Sliced tables have the rank still: nothing more is lost, but for a second fit.
    found, cut, whole = (logits(one).softmax(-1) for one in (small, wide, loaded))
    assert (found - whole).norm() < 1.3 * (cut - whole).norm()


def test_tokens_that_occur_count(t5: Path) -> None:
    loaded = load(t5)
    batches = calibration_batches(loaded, CALIBRATION)
    usage = token_usage(loaded, batches)
    assert usage.shape == (VOCABULARY,)
    assert float(usage.mean()) == pytest.approx(1)
    rare = usage.min()
    assert float(rare) == pytest.approx(RARE / (1 + RARE))
    inputs = [adapter_of(loaded.family).inputs(loaded.forecaster, batch) for batch in batches]
    read = torch.cat([one["input_ids"][one["attention_mask"].bool()] for one in inputs])
    often = int(read.bincount().argmax())
    assert usage[often] > 2 * rare
    table: Any = loaded.model.shared.weight  # type: ignore[union-attr]
    before = table.detach().clone()
    directions = principal_rows(loaded, batches)
    with projected_rows(loaded, directions, RANK):
        ours = ((table - before).double().square().sum(1) * usage).sum()
    assert torch.equal(table, before)
    right = torch.linalg.svd(before, full_matrices=False).Vh[:RANK]
    plain = ((before @ right.T @ right - before).double().square().sum(1) * usage).sum()
    assert ours < plain


def test_layers_make_up_for_what_the_embedding_lost(t5: Path) -> None:
    loaded = load(t5)
    plan = planned(loaded, 3)
    whole = logits(loaded)
    fitted, left = (
        (logits(folded(loaded, plan, FOLD.model_copy(update={"refit": refit}))) - whole).norm()
        for refit in ("residual", "none")
    )
    assert fitted < left


def test_an_embedding_alone_is_compressed_saved_and_opened(
    t5: Path, alone: CompressedModel, saved_alone: Path
) -> None:
    plan = alone.plan
    assert plan.embedding == EmbeddingPlan(vocabulary=VOCABULARY, d_model=D_MODEL, rank=RANK)
    assert plan.schedule == {"embedding_rank": RANK}
    assert f"token embedding: rank {RANK} of {D_MODEL}" in plan.summary()
    assert torch.equal(logits(load(saved_alone)), logits(alone))
    again = Plan.load(saved_alone / "plan.json")
    assert again == plan
    assert again.diff(fold_plan(load(t5).model, load(t5).architecture)) == [
        f"shared: rank {RANK} -> absent"
    ]


@pytest.mark.parametrize(
    "others", [{"width": 16}, {"width": 16, "rank": 4}, {"rank": 4}, {"latent": 8}]
)
def test_it_goes_with_other_sizes(t5: Path, tmp_path: Path, others: dict[str, int]) -> None:
    small = tscompress.compress(t5, embedding_rank=RANK, calibration=CALIBRATION, **others)
    tscompress.save(small, tmp_path / "small")
    opened = load(tmp_path / "small")
    assert torch.equal(logits(opened), logits(small))
    assert opened.plan == small.plan
    costs = CostModel("chronos-t5", load(t5).model, WORKLOAD, bytes_per_number=4)
    if "width" not in others:
        assert costs.of_plan(small.plan).parameters == parameter_count(opened.model)


def test_it_learns_in_a_recovery_as_one_table(t5: Path, alone: CompressedModel) -> None:
    few = (Bucket(context_length=32, horizon=8, batch_size=4),)
    recover = RecoveryConfig(steps=2, buckets=few, held_out_series=4)
    small = tscompress.compress(t5, embedding_rank=RANK, calibration=CALIBRATION, recover=recover)
    model: Any = small.model
    assert model.lm_head.table is model.shared.table
    before: Any = alone.model
    assert not torch.equal(model.shared.table.weight, before.shared.table.weight)


def test_it_is_profiled(alone: CompressedModel) -> None:
    profile = tscompress.profile(alone, calibration=CALIBRATION)
    assert profile.embedding[0].spectrum.ranks[-1] <= RANK


# --------------------------------------------------------------------------------------------------
# Costs and budgets
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 16])
@pytest.mark.parametrize("rank", [1, 12])
def test_costs_equal_counts_of_the_folded_model(t5: Path, rank: int, width: int | None) -> None:
    loaded = load(t5)
    if width is not None:
        loaded = folded(loaded, fold_plan(loaded.model, loaded.architecture, width=width))
        loaded.plan = None
    costs = CostModel(loaded.family, loaded.model, WORKLOAD, bytes_per_number=4)
    plan = planned(loaded, rank)
    assert plan.parameters("embedding")[0] == VOCABULARY * (width or D_MODEL) * (2 if width else 1)
    small = folded(loaded, plan)
    found = costs.of_plan(plan)
    assert found.parameters == parameter_count(small.model)
    assert found.macs == count_macs(wrap_pipeline(small.family, small.model), WORKLOAD)
    header = found.bytes - parameter_bytes(small.model)
    assert 0 < header < 300  # of two names more
    saved = plan.parameters()[0] - plan.parameters()[1]
    assert costs.original.parameters - found.parameters == saved


def test_a_budget_by_layer_chooses_a_rank(t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = low_rank(t5)
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(t5.parent / "cache"))
    batches = calibration_batches(loaded, CALIBRATION)
    schedule = PlannedSchedule(
        budget=parse_budget("parameters=0.85"), layout="factored", keep_width=True
    )
    plan = plan_within_budget(loaded, schedule, batches, FOLD, WORKLOAD)
    assert plan.embedding is not None
    assert plan.embedding.rank >= RANK  # less would lose more than any other part
    small = folded(loaded, plan)
    share = parameter_count(small.model) / parameter_count(loaded.model)
    assert 0.8 < share <= 0.85
    alike = schedule.model_copy(update={"layout": "folded", "keep_width": True})
    assert plan_within_budget(loaded, alike, batches, FOLD, WORKLOAD).embedding is None


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


def test_ranks_that_save_nothing_are_refused(t5: Path) -> None:
    loaded = load(t5)
    with pytest.raises(PlanError, match="no fewer than the 1,536 without factors; give a lower"):
        planned(loaded, 14)
    costs = CostModel(loaded.family, loaded.model, WORKLOAD, bytes_per_number=4)
    for rank in (0, 14):
        with pytest.raises(PlanError, match=r"from 1 to below 13\.7"):
            costs.costs(embedding={"shared": rank})
    with pytest.raises(PlanError, match="rank 10 of the token embedding is above the width, 8"):
        planned(loaded, 10, width=8)
    content = planned(loaded, RANK, width=8).model_dump()
    content["embedding"]["rank"] = 10
    with pytest.raises(PlanError, match="rank 10 of the token embedding is above the width, 8"):
        Plan.parse(content)
    narrow = folded(loaded, fold_plan(loaded.model, loaded.architecture, width=16))
    narrow.plan = None
    assert planned(narrow, 16).embedding is not None  # its head is a table of its own


def test_other_families_have_no_token_embedding(checkpoints: dict[str, Path]) -> None:
    for family in ("chronos-bolt", "chronos-2"):
        with pytest.raises(PlanError, match=f"a {family} model has no token embedding"):
            planned(load(checkpoints[family]))
        plan = planned(load(checkpoints["chronos-t5"]))
        alone = plan.model_copy(update={"heads": (), "hidden": ()})
        with pytest.raises(PlanError, match="only a Chronos-T5 that has none yet"):
            apply_structure_(load(checkpoints[family]).model, alone)


@pytest.mark.parametrize(("name", "size"), [("vocabulary", 80), ("d_model", 32)])
def test_a_plan_for_another_table_is_refused(t5: Path, name: str, size: int) -> None:
    loaded = load(t5)
    content = planned(loaded).model_dump()
    content["embedding"][name] = size
    plan = Plan.model_validate(content)
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    with pytest.raises(PlanError, match=f"shared with {name} {size}; the model has"):
        fold_planned_(loaded, plan, calibration_batches(loaded, CALIBRATION), FOLD)
    assert all(torch.equal(value, before[key]) for key, value in loaded.model.state_dict().items())
    with pytest.raises(PlanError, match="the model has 64 and 24"):
        apply_structure_(loaded.model, plan)


def test_a_checkpoint_with_another_rank_than_its_plan_is_damaged(
    saved_alone: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(saved_alone, tmp_path / "small") / "plan.json"
    content = json.loads(path.read_text())
    content["embedding"]["rank"] = RANK - 1
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        load(tmp_path / "small")


def test_options_that_exclude_a_rank(t5: Path, tmp_path: Path, command: Command) -> None:
    with pytest.raises(UsageError, match="by layer chooses the rank"):
        tscompress.compress(t5, embedding_rank=RANK, budget="parameters=0.5")
    with pytest.raises(RecipeError, match="embedding_rank is for fold"):
        tscompress.compress(t5, method="svd", rank=4, embedding_rank=RANK)
    arguments = ("compress", t5, "--output", tmp_path / "o", "--embedding-rank")
    assert_refused(command(*arguments, 0), 2, "embedding_rank: ")
    assert_refused(command(*arguments, 20), 2, "give a lower rank")
    assert not (tmp_path / "o").exists()


def test_only_a_dense_table_is_replaced(t5: Path) -> None:
    loaded = load(t5)
    plan = planned(loaded)
    small = folded(loaded, plan)
    assert isinstance(small.model, nn.Module)
    with pytest.raises(PlanError):
        fold_planned_(small, plan, calibration_batches(loaded, CALIBRATION), FOLD)


def test_a_plan_that_ties_what_is_untied_is_refused(t5: Path) -> None:
    loaded = load(t5)
    content = planned(loaded).model_dump()
    content["embedding"] |= {"tied": False, "rank": 20}
    with pytest.raises(PlanError, match="shared with tied False; the model has True"):
        folded(loaded, Plan.model_validate(content))


def test_a_rank_beside_a_width_is_held_against_the_narrower_model(t5: Path) -> None:
    loaded = load(t5)
    plan = planned(loaded, 16, width=22)  # more than the wide model's table, less than two narrow
    small = folded(loaded, plan)
    assert plan.parameters("embedding") == (VOCABULARY * D_MODEL, 16 * (VOCABULARY + 2 * 22))
    assert parameter_count(small.model) < parameter_count(loaded.model) + VOCABULARY * D_MODEL


def test_padding_is_not_read(t5: Path) -> None:
    loaded = load(t5)
    (batch, *_) = calibration_batches(loaded, CALIBRATION)
    usage = token_usage(loaded, [batch])
    cut = batch.target.clone()
    cut[:, 4:] = torch.nan  # padding from the sixth position on
    config: Any = loaded.model.config
    after = token_usage(loaded, [replace(batch, target=cut)])
    assert after[config.pad_token_id] < usage[config.pad_token_id] * 1.5


@pytest.mark.slow
def test_int8_rounds_nothing_that_enters_the_stream(alone: CompressedModel, tmp_path: Path) -> None:
    tscompress.export(alone, tmp_path / "out", precision="int8")
    for file in ("encoder.onnx", "decoder.onnx"):
        graph = onnx.load(str(tmp_path / "out" / file)).graph
        stored = {tuple(one.dims): one.data_type for one in graph.initializer}
        assert stored[RANK, D_MODEL] == onnx.TensorProto.FLOAT  # the projection of the table
        assert stored[D_MODEL, 40] == onnx.TensorProto.INT8  # a feed-forward


def test_costs_are_of_a_dense_model(t5: Path) -> None:
    small = folded(load(t5), planned(load(t5)))
    with pytest.raises(UnsupportedModelError, match="LowRankHead"):
        CostModel(small.family, small.model, WORKLOAD, bytes_per_number=4)


def test_steps_that_save_nothing_are_left_out(t5: Path) -> None:
    loaded = load(t5)
    few = WORKLOAD.model_copy(update={"num_samples": 1, "horizon": 1})
    costs = CostModel(loaded.family, loaded.model, few, bytes_per_number=4)
    assert costs.costs(embedding={"shared": 12}).macs > costs.original.macs
    parts = tuple(
        Part(name=name, kind="hidden", size=40, sizes=(20,), losses=(0.5,))
        for name in (block.name for block in loaded.architecture.feed_forward)
    )
    tokens = Part(name="shared", kind="embedding", size=24, sizes=(12, 3), losses=(0.0, 1e-3))
    found = Sensitivity(family=loaded.family, base_loss=1.0, parts=(tokens, *parts))
    alone = Sensitivity(family=loaded.family, base_loss=1.0, parts=parts)
    heads = tuple(
        Part(name=block.name, kind=kind, size=8, sizes=(4,), losses=(0.5,))
        for block in loaded.architecture.attention
        for kind in ("qk", "vo")
    )
    found, alone = (
        one.model_copy(update={"parts": (*one.parts, *heads)}) for one in (found, alone)
    )
    for share in (0.9, 0.7):
        budget = parse_budget(f"macs={share}")
        ours, without = (choose_factored(one, costs, budget) for one in (found, alone))
        assert ours.loss <= without.loss
        assert ours.embedding.get("shared") != 12


def test_another_training_cannot_take_its_embedding(saved_alone: Path) -> None:
    with pytest.raises(RecipeError, match=r"embedding_from: the embedding of .* has a lower rank"):
        build_model(tiny_recipe("chronos-t5", embedding_from=str(saved_alone)))


def test_reports_without_a_bench_tell_of_it(t5: Path) -> None:
    plan = planned(load(t5))
    assert plan_label(plan) == f"fold, attention 100%, embedding of rank {RANK}"
