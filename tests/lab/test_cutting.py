"""Compression of in-context learners, through the same functions as of forecasters."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hooks import hook_count
from torch import Tensor, nn

from tscompress.compression.activations import collect_moments
from tscompress.compression.factor import apply_plan_, make_plan
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.streams import entering_streams, layers_alone
from tscompress.data.batch import StreamBatch
from tscompress.errors import PlanError, UnsupportedModelError
from tscompress.families.registry import FAMILIES, adapter_of, adapter_of_layers
from tscompress.lab.explicit_2sls import Explicit2SLS, Linear2SLS
from tscompress.lab.in_context import RegressionTask
from tscompress.lab.in_context_models import (
    AttentionLayer,
    Block,
    Encoder,
    InContextRegressor,
    LoopedTransformer,
    SelfAttention,
    instrument_tokens,
)
from tscompress.lab.instruments import InstrumentTask, StepSizes
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import symmetric_roots
from tscompress.plan.schedules import RankSchedule

WIDTH, HEADS, SIZE = 16, 4, 4
KINDS = [("shifted", False), ("shifted", True), ("aligned", False), ("lagged", True)]


def learner(layout: Any = "shifted", linear: bool = False, layers: int = 2) -> Any:
    """A regressor with weights large enough that attention matters, and its prompts."""
    torch.manual_seed(0)
    model = InContextRegressor(
        layout, dim=3, points=11, width=WIDTH, heads=HEADS, layers=layers, linear=linear
    )
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.4)
    drawn = RegressionTask(3, 10).draw(8, np.random.default_rng(0))
    return model, (torch.as_tensor(drawn.x).float(), torch.as_tensor(drawn.y).float())


def looped() -> Any:
    torch.manual_seed(1)
    model = LoopedTransformer(1, 3, width=WIDTH, heads=HEADS, layers=2, loops=3)
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.3)
    drawn = InstrumentTask(1, 3).draw(8, 10, np.random.default_rng(0))
    return model, (instrument_tokens(drawn),)


def explicit() -> Any:
    built = Explicit2SLS(1, 3, 10, StepSizes(0.005, 0.01))
    tokens = built.embed(InstrumentTask(1, 3).draw(8, 10, np.random.default_rng(0)))
    return Linear2SLS(built), (built(tokens, 3), 2)


def streams_of(model: Any, prompts: Any) -> list[StreamBatch]:
    with entering_streams(model.encoder) as seen:
        model(*prompts)
    return seen


def output(model: Any, prompts: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(*prompts)
    return found


def attention_of(model: Any) -> list[SelfAttention]:
    return [part for part in model.encoder.modules() if isinstance(part, SelfAttention)]


def folded(model: Any, prompts: Any, size: int, **options: Any) -> Any:
    """In float32 also where the processor multiplies in bfloat16."""
    cut = copy.deepcopy(model)
    loaded = layers_alone(cut.encoder, "learner")
    sizes = {
        block.name: min(size, part.head_size)
        for block, part in zip(loaded.architecture.attention, attention_of(cut), strict=True)
    }
    plan = fold_plan(loaded.model, loaded.architecture, qk=sizes, vo=sizes)
    fold_(loaded, plan, streams_of(model, prompts), FoldConfig(precision="float32", **options))
    return cut, plan


def factored(model: Any, prompts: Any, method: Any, rank: int) -> Any:
    cut = copy.deepcopy(model)
    loaded = layers_alone(cut.encoder, "learner")
    names = [name for _, _, name in loaded.architecture.attention_projections()]
    moments = collect_moments(loaded, streams_of(cut, prompts), names)
    plan = make_plan(
        loaded.model, loaded.architecture, method, RankSchedule(rank=rank), moments=moments
    )
    apply_plan_(loaded, plan, moments)
    return cut, plan


def lower_rank_(model: Any, rank: int) -> None:
    """Give every head of q, k and v, and so of o, the rank that heads of ``rank`` have."""
    for part in attention_of(model):
        for linear in (part.q, part.k, part.v):
            linear.weight.data.unflatten(0, (HEADS, SIZE))[:, rank:] = 0


# --------------------------------------------------------------------------------------------------
# The adapter
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [learner, looped, explicit])
def test_described_projections_are_the_learners_linear_layers(made: Any) -> None:
    model, _ = made()
    architecture = layers_alone(model.encoder, "learner").architecture
    found = [model.get_submodule(name) for _, _, name in architecture.attention_projections()]
    own = [linear for part in attention_of(model) for linear in (part.q, part.k, part.v, part.o)]
    assert found == own
    units = [model.get_submodule(name) for _, _, name in architecture.feed_forward_projections()]
    assert all(isinstance(linear, nn.Linear) for linear in units)
    assert len(units) == (0 if made is explicit else 4)
    assert [block.depth for block in architecture.attention] == [0, 1]


@pytest.mark.parametrize("linear", [False, True])
def test_attention_says_whether_it_has_a_softmax(linear: bool) -> None:
    model, _ = learner(linear=linear)
    blocks = layers_alone(model.encoder, "learner").architecture.attention
    assert {block.softmax for block in blocks} == {not linear}


def test_a_looped_model_is_calibrated_on_every_loop_and_keeps_no_hook() -> None:
    model, prompts = looped()
    seen = streams_of(model, prompts)
    assert len(seen) == model.loops
    torch.testing.assert_close(seen[1].stream, model.encoder(seen[0].stream))
    assert hook_count(model) == 0


def test_learners_have_no_checkpoints() -> None:
    assert "in-context" not in FAMILIES
    assert adapter_of_layers("in-context").name == "in-context"
    with pytest.raises(UnsupportedModelError):
        adapter_of("in-context")


# --------------------------------------------------------------------------------------------------
# Cuts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "linear"), KINDS)
def test_heads_of_their_own_size_change_nothing(layout: Any, linear: bool) -> None:
    model, prompts = learner(layout, linear)
    cut, plan = folded(model, prompts, SIZE)
    assert not plan.changes_anything
    torch.testing.assert_close(output(cut, prompts), output(model, prompts))


@pytest.mark.parametrize(("layout", "linear"), KINDS)
def test_heads_of_full_rank_reproduce_the_learner(layout: Any, linear: bool) -> None:
    model, prompts = learner(layout, linear)
    lower_rank_(model, 2)
    cut, _ = folded(model, prompts, 2)
    torch.testing.assert_close(output(cut, prompts), output(model, prompts), atol=1e-4, rtol=1e-4)


def test_a_looped_learner_of_low_rank_is_reproduced() -> None:
    model, prompts = looped()
    lower_rank_(model, 2)
    cut, _ = folded(model, prompts, 2)
    torch.testing.assert_close(output(cut, prompts), output(model, prompts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["svd", "activation-svd"])
def test_factors_of_full_rank_reproduce_the_learner(method: str) -> None:
    model, prompts = learner()
    for part in attention_of(model):
        for linear in (part.q, part.k, part.v, part.o):
            U, S, V = torch.linalg.svd(linear.weight.data)
            linear.weight.data = (U[:, :3] * S[:3]) @ V[:3]
    cut, _ = factored(model, prompts, method, 3)
    torch.testing.assert_close(output(cut, prompts), output(model, prompts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["svd", "activation-svd"])
@pytest.mark.parametrize("rank", [1, 5])
def test_factors_have_their_rank_and_the_weights_of_the_plan(method: str, rank: int) -> None:
    model, prompts = learner()
    cut, plan = factored(model, prompts, method, rank)
    weights = 0
    for part in attention_of(cut):
        for factors in (part.q, part.k, part.v, part.o):
            assert isinstance(factors, LowRankLinear)
            product = factors.left.weight @ factors.right.weight
            assert int(torch.linalg.matrix_rank(product)) == rank
            weights += sum(weight.numel() for weight in factors.parameters())
    assert weights == sum(one.parameters for one in plan.projections)


@pytest.mark.parametrize("size", [1, 3])
def test_folded_heads_have_their_size_and_the_weights_of_the_plan(size: int) -> None:
    model, prompts = learner()
    cut, plan = folded(model, prompts, size)
    weights = 0
    for part in attention_of(cut):
        q, k = (one.weight.unflatten(0, (HEADS, -1)) for one in (part.q, part.k))
        ranks = torch.linalg.matrix_rank(q.mT @ k, rtol=1e-5)
        assert ranks.tolist() == [size] * HEADS
        weights += sum(weight.numel() for weight in part.parameters())
    assert weights == sum(head.parameters for head in plan.heads)
    assert not torch.equal(output(cut, prompts), output(model, prompts))


def test_folding_a_head_is_the_best_product_on_what_it_reads() -> None:
    model, prompts = learner(linear=True, layers=1)  # no softmax: keys are not centred
    cut, _ = folded(model, prompts, 2)
    old, new = attention_of(model)[0], attention_of(cut)[0]
    read = model.encoder.block[0].layer[0].layer_norm(streams_of(model, prompts)[0].stream)
    rows = read.detach().flatten(0, 1).double()
    root = symmetric_roots(rows.T @ rows / len(rows))[0]
    for head in range(HEADS):
        one, other = (
            root
            @ part.q.weight.detach().double().chunk(HEADS)[head].T
            @ part.k.weight.detach().double().chunk(HEADS)[head]
            @ root
            for part in (old, new)
        )
        lost = torch.linalg.svdvals(one)[2:].square().sum()
        assert float((one - other).square().sum()) == pytest.approx(float(lost), rel=1e-3)


@pytest.mark.parametrize("softmax", [False, True])
def test_the_mean_key_is_kept_where_no_softmax_removes_it(softmax: bool) -> None:
    """Of two dimensions of a head one reads what is the same in every key, and the larger."""
    torch.manual_seed(0)
    attention = SelfAttention(4, 1, linear=not softmax)
    attention.q, attention.k = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    attention.q.weight.data = torch.eye(4)[:2].clone()
    attention.k.weight.data = torch.stack([10 * torch.eye(4)[2], torch.eye(4)[3]])
    attention.v, attention.o = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    attention.head_size = 2
    encoder = Encoder([Block(AttentionLayer(attention, nn.Identity()))], nn.Identity())
    stream = torch.randn(6, 5, 4)
    stream[..., 2] = 1
    loaded = layers_alone(copy.deepcopy(encoder), "head")
    plan = fold_plan(loaded.model, loaded.architecture, qk=1)
    fold_(loaded, plan, [StreamBatch(stream)], FoldConfig(refit="none"))
    kept = loaded.model.get_submodule(plan.heads[0].name)
    product = (kept.q.weight.T @ kept.k.weight).detach().abs()  # type: ignore[union-attr, operator]
    assert (product[0, 2] < 1e-3) == softmax
    assert (product[1, 3] > 0.5) == softmax
    if softmax:
        found = loaded.model.encoder(stream)  # type: ignore[operator]
        torch.testing.assert_close(found, encoder(stream), atol=1e-5, rtol=1e-4)


def test_a_fit_to_the_stream_brings_outputs_nearer() -> None:
    model, prompts = learner()
    errors = [
        float(
            (
                output(folded(model, prompts, 2, refit=how)[0], prompts) - output(model, prompts)
            ).norm()
        )
        for how in ("none", "residual")
    ]
    assert errors[1] < errors[0]


def test_values_of_the_explicit_transformer_fold_to_as_many_as_instruments() -> None:
    model, (tokens, loops) = explicit()
    cut = copy.deepcopy(model)
    loaded = layers_alone(cut.encoder, "explicit")
    q = model.explicit.q_
    plan = fold_plan(loaded.model, loaded.architecture, vo=q)
    fold_(loaded, plan, streams_of(model, (tokens, loops)), FoldConfig())
    assert [part.v.out_features // part.n_heads for part in attention_of(cut)] == [q, q]
    torch.testing.assert_close(output(cut, (tokens, loops)), output(model, (tokens, loops)))


def test_heads_of_the_explicit_transformer_need_one_dimension_less_than_is_written() -> None:
    """Two dimensions of its queries read the same constant, so that one can carry both keys."""
    model, prompts = explicit()
    q = model.explicit.q_
    assert max(part.head_size for part in attention_of(model)) == q + 2
    whole = output(model, prompts)
    changes = [
        float((output(folded(model, prompts, size)[0], prompts) - whole).abs().max())
        for size in (q + 1, q)
    ]
    assert changes[0] < 1e-8
    assert changes[1] > 1e-3


def test_a_factored_learner_is_not_folded() -> None:
    model, prompts = learner()
    cut, _ = factored(model, prompts, "svd", 2)
    with pytest.raises(PlanError):
        folded(cut, prompts, 2)
