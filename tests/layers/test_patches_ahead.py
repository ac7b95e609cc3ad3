"""The last layer at the patches ahead: forecasts and gradients of stock, with less work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hooks import hook_count
from shared_fixtures import tiny_chronos2
from torch import Tensor, nn

from tscompress.layers.patches_ahead import last_layer_of_patches_ahead
from tscompress.layers.sized_attention import SizedChronos2Attention
from tscompress.layers.univariate import OwnValues, drop_groups_
from tscompress.training.recomputation import recomputed_layers

HORIZON_PATCHES = 2


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = tiny_chronos2().eval()
    if kind == "sizes by layer":
        for block in model.encoder.block:
            block.layer[1].self_attention = SizedChronos2Attention.empty_like(
                block.layer[1].self_attention, 6, 3, None
            ).to_empty(device="cpu")
            for weight in block.layer[1].self_attention.parameters():
                nn.init.normal_(weight, std=0.3)
    if kind == "univariate":
        for block in model.encoder.block:
            block.layer[1].self_attention = OwnValues.of(block.layer[1].self_attention)
        drop_groups_(model)
    return model


def call_of(kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    context = torch.randn(4, 48).cumsum(1)
    context[1, :20] = torch.nan  # a patch without data
    groups = torch.arange(4) if kind == "univariate" else torch.tensor([0, 0, 1, 0])
    return {"context": context, "group_ids": groups, "num_output_patches": HORIZON_PATCHES}


def learnt(model: Any, call: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Quantiles, and the gradients of all parameters that have one."""
    quantiles = model(**call).quantile_preds
    quantiles.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return quantiles.detach(), gradients


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("kind", ["stock", "sizes by layer", "univariate"])
def test_forecasts_and_gradients_are_those_of_stock(kind: str, recomputed: bool) -> None:
    model, call = model_of(kind), call_of(kind)
    expected, expected_gradients = learnt(model, call)
    seen: list[int] = []
    last = model.encoder.block[-1].layer[2]
    watched = last.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    within: AbstractContextManager[None] = recomputed_layers(model) if recomputed else nullcontext()
    query: Any = model.encoder.block[-1].layer[0].self_attention.q
    asked = query.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with last_layer_of_patches_ahead(model), within:
        found, gradients = learnt(model, call)
    watched.remove()
    asked.remove()
    assert set(seen) == {HORIZON_PATCHES}
    torch.testing.assert_close(found, expected)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], msg=name)


def test_each_pass_has_its_own_horizon() -> None:
    model, call = model_of("stock"), call_of("stock")
    with last_layer_of_patches_ahead(model):
        for patches in (3, 1):
            asked = {**call, "num_output_patches": patches}
            found = model(**asked).quantile_preds
            with torch.no_grad():
                expected = model_of("stock")(**asked).quantile_preds
            torch.testing.assert_close(found, expected)
        del call["num_output_patches"]  # one, by default
        torch.testing.assert_close(model(**call).quantile_preds, found)


def test_the_model_is_as_before_afterwards() -> None:
    model = model_of("stock")
    with last_layer_of_patches_ahead(model):
        assert hook_count(model) == 3
    assert hook_count(model) == 0
    with last_layer_of_patches_ahead(nn.Linear(2, 2)) as nothing:
        assert nothing is None
