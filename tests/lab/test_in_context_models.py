"""Shifted causal attention and the four layouts: what meets what, and what never leaks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.in_context import RegressionTask
from tscompress.lab.in_context_models import (
    LAYOUTS,
    InContextRegressor,
    LayoutName,
    LoopedTransformer,
    SelfAttention,
    ShiftedCausalAttention,
    instrument_tokens,
    shifted_causal_attention,
)
from tscompress.lab.instruments import InstrumentTask


def heads(length: int = 6, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, length, size, generator=draw, dtype=torch.float64)
    return q, k, v


def regressor(layout: LayoutName, patch: int = 1, layers: int = 2) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(
        layout, dim=3, points=8, width=16, heads=4, layers=layers, patch=patch, linear=patch > 1
    ).double()


def prompts(points: int = 8) -> tuple[Tensor, Tensor]:
    drawn = RegressionTask(3, points - 1).draw(2, np.random.default_rng(0))
    return torch.as_tensor(drawn.x), torch.as_tensor(drawn.y)


# --------------------------------------------------------------------------------------------------
# Shifted causal attention (eq. 1)
# --------------------------------------------------------------------------------------------------


def test_shifted_attention_is_the_double_loop() -> None:
    q, k, v = heads()
    found = shifted_causal_attention(q, k, v)
    for b in range(2):
        for t in range(6):
            scores = [math.exp(float(q[b, t] @ k[b, j]) / 2) for j in range(t + 1)]
            total = scores[t] * v[b, t]
            for j in range(t):
                total = total + scores[j] * v[b, j + 1]
            torch.testing.assert_close(found[b, t], total / sum(scores))


@pytest.mark.parametrize("linear", [False, True])
def test_later_tokens_never_change_earlier_outputs(linear: bool) -> None:
    q, k, v = heads()
    found = shifted_causal_attention(q, k, v, linear=linear)
    for s in range(1, 6):
        changed = [one.clone() for one in (q, k, v)]
        for one in changed:
            one[:, s:] += 1
        moved = shifted_causal_attention(*changed, linear=linear)
        torch.testing.assert_close(moved[:, :s], found[:, :s], rtol=0, atol=0)
        assert (moved[:, s] - found[:, s]).abs().max() > 1e-3


def test_a_single_token_returns_its_value() -> None:
    q, k, v = heads(1)
    torch.testing.assert_close(shifted_causal_attention(q, k, v), v)


def test_linear_weights_make_one_layer_a_step_of_gradient_descent() -> None:
    x, y = prompts()
    before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
    found = shifted_causal_attention(0.7 * x, x, before[..., None], linear=True)[..., 0]
    for t in range(1, 8):
        gradient = (y[:, :t, None] * x[:, :t]).sum(1)  # of half the squared error at w = 0
        own = (x[:, t] ** 2).sum(-1) * before[:, t]  # eq. 1 lets t meet itself
        expected = 0.7 / math.sqrt(3) * ((x[:, t] * gradient).sum(-1) + own) / (t + 1)
        torch.testing.assert_close(found[:, t], expected)


def test_plain_causal_attention_on_lagged_tokens_learns_nothing_in_one_linear_layer() -> None:
    """No pair (x_j, y_j) meets: its best linear head has the error of forecasting 0."""
    task = RegressionTask(3, 19)
    rng = np.random.default_rng(1)
    train, test = task.draw(20_000, rng), task.draw(5000, rng)

    def features(x: np.ndarray, y: np.ndarray, shift: int) -> np.ndarray:
        """What a head can weigh: x_T times sums of x_j and lagged or own labels."""
        sums = np.einsum("btd,bt->bd", x[:, shift:-1], y[:, : y.shape[1] - 1 - shift])
        return np.einsum("bd,be->bde", x[:, -1], sums).reshape(len(x), -1)

    def error(shift: int) -> float:
        a, b = (features(one.x, one.y, shift) for one in (train, test))
        weights = np.linalg.lstsq(a, train.y[:, -1])[0]
        return float(((b @ weights - test.y[:, -1]) ** 2).mean())

    assert error(1) == pytest.approx(task.null_loss, rel=0.06)  # x_j meets y_{j-1}
    assert error(0) < 0.3 * task.null_loss  # x_j meets y_j, as in shifted attention


# --------------------------------------------------------------------------------------------------
# Layouts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_no_forecast_depends_on_its_own_label_or_on_what_comes_later(layout: LayoutName) -> None:
    model = regressor(layout).float()
    drawn = RegressionTask(3, 7).draw(2, np.random.default_rng(0))
    found = model.forecasts(drawn)
    assert found.shape == drawn.y.shape
    for t in range(8):
        drawn.y[:, t] += 3
        moved = model.forecasts(drawn)
        np.testing.assert_array_equal(moved[:, : t + 1], found[:, : t + 1])
        assert t == 7 or np.abs(moved[:, t + 1] - found[:, t + 1]).max() > 0
        drawn.y[:, t] -= 3
        if t < 7:
            drawn.x[:, t + 1] += 3
            moved = model.forecasts(drawn)
            np.testing.assert_array_equal(moved[:, : t + 1], found[:, : t + 1])
            drawn.x[:, t + 1] -= 3


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_training_loss_is_of_the_points_that_one_pass_forecasts(layout: LayoutName) -> None:
    model, (x, y) = regressor(layout), prompts()
    forecasts = model(x, y)
    assert forecasts.shape == ((2, 1) if layout == "aligned" else (2, 8))
    expected = ((forecasts - y[:, -forecasts.shape[1] :]) ** 2).mean()
    torch.testing.assert_close(model.loss(x, y), expected)


@pytest.mark.parametrize("patch", [2, 4])
def test_points_of_a_patch_share_the_labels_of_the_patches_before(patch: int) -> None:
    model, (x, y) = regressor("shifted", patch), prompts()
    found = model(x, y)
    assert found.shape == (2, 8)
    changed = y.clone()
    changed[:, patch] += 3  # in the second patch
    moved = model(x, changed)
    torch.testing.assert_close(moved[:, : 2 * patch], found[:, : 2 * patch], rtol=0, atol=0)
    if patch == 2:
        assert (moved[:, 4:6] - found[:, 4:6]).abs().min() > 0


def test_shifted_attention_of_a_module_projects_heads() -> None:
    torch.manual_seed(0)
    module = ShiftedCausalAttention(8, 2)
    hidden = torch.randn(1, 5, 8)
    parts = []
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (hidden @ one.weight[rows].T for one in (module.q, module.k, module.v))
        parts.append(shifted_causal_attention(q, k, v))
    torch.testing.assert_close(module(hidden), module.o(torch.cat(parts, dim=-1)))


def test_widths_that_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="72 or 84"):
        SelfAttention(80, 12)
    with pytest.raises(UsageError, match="layout"):
        regressor("diagonal")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="patch"):
        regressor("aligned", 2)
    with pytest.raises(UsageError, match="multiple"):
        regressor("shifted", 3)


# --------------------------------------------------------------------------------------------------
# Looped
# --------------------------------------------------------------------------------------------------


def test_loops_apply_the_same_blocks_and_the_order_of_examples_does_not_matter() -> None:
    torch.manual_seed(0)
    model = LoopedTransformer(2, 3, width=16, heads=2, layers=1, loops=3)
    tokens = instrument_tokens(InstrumentTask(2, 3).draw(2, 9, np.random.default_rng(0)))
    hidden = model.read_in(tokens)
    for _ in range(3):
        hidden = model.encoder.block[0](hidden)
    last = model.encoder.final_layer_norm(hidden[:, -1])
    torch.testing.assert_close(model(tokens), model.read_out(last)[:, 0])
    order = torch.cat([torch.randperm(9), torch.tensor([9])])
    torch.testing.assert_close(model(tokens[:, order]), model(tokens))


def test_tokens_hide_the_outcome_of_the_query_and_mark_it() -> None:
    drawn = InstrumentTask(2, 3).draw(4, 9, np.random.default_rng(0))
    tokens = instrument_tokens(drawn)
    assert tokens.shape == (4, 10, 7)
    assert tokens[:, -1, -2:].abs().max() == 0
    assert tokens[:, :-1, -1].min() == 1
    np.testing.assert_allclose(tokens[:, :-1, -2], drawn.y, rtol=1e-6)
