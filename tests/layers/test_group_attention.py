"""Group attention within groups: what stock group attention computes with a mask."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from shared_fixtures import tiny_chronos2
from torch import Tensor, nn

from tscompress.layers.group_attention import attention_within_groups
from tscompress.layers.sized_attention import SizedChronos2Attention

GROUPS = {
    "one series each": [0, 1, 2, 3, 4, 5],
    "one group": [0, 0, 0, 0, 0, 0],
    "sizes of one to three": [0, 0, 1, 2, 2, 2],
    "scattered": [3, 1, 3, 0, 1, 3],
}


def outputs(
    groups: list[int], implementation: str, *, within: bool, sizes: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantiles, and the gradient of the values' projection in the first layer.

    ``sizes`` are those of a folded model's queries and keys, and of its values.
    """
    torch.manual_seed(0)
    model = tiny_chronos2().eval()
    for block in model.encoder.block if sizes else ():
        block.layer[1].self_attention = SizedChronos2Attention.empty_like(
            block.layer[1].self_attention, *sizes, None
        ).to_empty(device="cpu")
        for weight in block.layer[1].self_attention.parameters():
            nn.init.normal_(weight, std=0.3)
    for config in {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }.values():
        config._attn_implementation = implementation
    context = torch.randn(6, 48).cumsum(1)
    context[1, :20] = torch.nan  # a patch without data
    context[4, 30:] = torch.nan
    call = {"context": context, "group_ids": torch.tensor(groups), "num_output_patches": 2}
    if within:
        with attention_within_groups(model):
            found = model(**call).quantile_preds
    else:
        found = model(**call).quantile_preds
    weight = model.encoder.block[0].layer[1].self_attention.v.weight
    return found, torch.autograd.grad(found.square().mean(), weight)[0]


@pytest.mark.parametrize("sizes", [None, (6, 3)], ids=["stock", "folded by layer"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_outputs_and_gradients_are_those_of_stock(
    groups: list[int], implementation: str, sizes: tuple[int, int] | None
) -> None:
    stock = outputs(groups, implementation, within=False, sizes=sizes)
    ours = outputs(groups, implementation, within=True, sizes=sizes)
    for expected, found in zip(stock, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_series_alone_have_no_queries_and_keys() -> None:
    module: Any = tiny_chronos2().eval().encoder.block[0].layer[1]
    rows: list[int] = []
    for role in "qk":
        part = getattr(module.self_attention, role)
        part.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for groups, expected in (([0, 1, 2, 3], []), ([0, 0, 1, 2], [2, 2])):
        ids = torch.tensor(groups)
        mask = torch.where(ids[:, None] == ids, 0.0, torch.finfo().min).expand(5, 1, 4, 4)
        rows.clear()
        with attention_within_groups(nn.ModuleList([module])):
            module(torch.randn(4, 5, 24), attention_mask=mask)
        assert rows == expected


def test_groups_matter() -> None:
    alone, _ = outputs(GROUPS["one series each"], "sdpa", within=True)
    together, _ = outputs(GROUPS["one group"], "sdpa", within=True)
    assert not torch.allclose(alone, together, rtol=1e-3)


def test_stock_attention_is_back_after_the_block() -> None:
    model = tiny_chronos2()
    module = model.encoder.block[0].layer[1]
    with contextlib.suppress(KeyError), attention_within_groups(model):
        assert "forward" in vars(module)
        raise KeyError
    assert "forward" not in vars(module)


def test_dropout_is_kept() -> None:
    torch.manual_seed(0)
    model = tiny_chronos2().train()
    module = model.encoder.block[0].layer[1]
    module.dropout.p = 0.0
    hidden, alone = torch.randn(6, 5, 24), torch.zeros(5, 1, 6, 6).fill_(torch.finfo().min)
    alone[:, 0, range(6), range(6)] = 0.0
    with attention_within_groups(model):
        found = module(hidden, attention_mask=alone).hidden_states
        module.self_attention.dropout = 0.0
        whole = module(hidden, attention_mask=alone).hidden_states
    assert not torch.equal(found, whole)
