"""Group attention of Chronos-2 within its groups, instead of across a batch with a mask.

Stock group attention compares all series of a batch and masks those of other groups: of 256 series,
its backward pass on a CPU took a third of a training step. Groups are few series, or one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from chronos.chronos2.layers import MHA, AttentionOutput, GroupSelfAttention
from torch import Tensor, nn


@contextmanager
def attention_within_groups(model: nn.Module) -> Iterator[None]:
    """Within the block, group attention of ``model`` is computed group by group.

    The results at observed patches are the same, up to rounding; those at patches without data are
    read by nothing. Models without group attention are unchanged.
    """
    replaced = [
        module
        for module in model.modules()
        if isinstance(module, GroupSelfAttention) and isinstance(module.self_attention, MHA)
    ]
    for module in replaced:
        module.forward = partial(_within_groups, module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _within_groups(
    module: Any, hidden_states: Tensor, attention_mask: Tensor, output_attentions: bool = False
) -> AttentionOutput:
    """As ``GroupSelfAttention.forward`` of ``[B, T, d_model]``, without attention weights.

    The mask ``[T, 1, B, B]`` is additive. Series that are alone have no queries and keys.
    """
    attention = module.self_attention
    normed = module.layer_norm(hidden_states)
    values = attention.v(normed)  # [B, T, heads * d]
    dropout = attention.dropout if attention.training else 0.0
    rows, members, at = _groups_of(attention_mask, smallest=1 if dropout else 2)
    if len(members):
        seen, own = (states.index_select(0, members) for states in (normed, values))
        projected = (attention.q(seen), attention.k(seen), own)
        bias = _bias(attention_mask, rows, members)
        found = _mixed(projected, rows, bias, attention.n_heads, dropout)
        values = values.index_copy(0, members, found.index_select(0, at))
    output = hidden_states + module.dropout(attention.o(values))
    return AttentionOutput(hidden_states=output, attn_weights=None)


def _mixed(
    projected: tuple[Tensor, ...], rows: Tensor, bias: Tensor, heads: int, dropout: float
) -> Tensor:
    """Values of the rows of groups ``[N, G]`` mixed within each, ``[N * G, T, heads * d]``.

    Queries, keys and values are ``[M, T, heads * d]``, values with a d of their own.
    """
    places = rows.clamp_min(0).flatten()
    q, k, v = (
        states.index_select(0, places)
        .reshape(*rows.shape, states.shape[1], heads, -1)
        .permute(0, 2, 3, 1, 4)
        for states in projected
    )  # [N, T, heads, G, d]
    weights = torch.softmax((q @ k.transpose(-1, -2)).float() + bias, dim=-1)
    found = nn.functional.dropout(weights, dropout).to(v.dtype) @ v
    return found.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)


def _bias(mask: Tensor, rows: Tensor, members: Tensor) -> Tensor:
    """The mask ``[T, 1, B, B]`` within groups ``[N, G]`` of ``members``, ``[N, T, 1, G, G]``."""
    of_batch = members[rows.clamp_min(0)]
    bias = mask[:, 0, of_batch[:, :, None], of_batch[:, None, :]]  # [T, N, G, G]
    bias = bias.masked_fill((rows < 0)[:, None, :], torch.finfo(mask.dtype).min)
    return bias.transpose(0, 1)[:, :, None]


def _groups_of(mask: Tensor, smallest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of at least ``smallest`` rows.

    All of their rows ``[M]``, the second; which of them each group has ``[N, G]``, -1 where it is
    smaller; and the place of each of them in the first ``[M]``. The last patch of a series is of
    the future, which all series of its group attend to.
    """
    together = mask[-1, 0] == 0  # [B, B]
    members = (together.sum(dim=1) >= smallest).nonzero()[:, 0]  # [M]
    first = together[members].int().argmax(dim=1)
    _, group = torch.unique(first, return_inverse=True)
    order = group.argsort(stable=True)
    sizes = torch.bincount(group)
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    most = int(sizes.max()) if len(sizes) else 0
    rows = torch.full((len(sizes), most), -1, dtype=torch.long, device=group.device)
    rows[group, place] = torch.arange(len(group), device=group.device)
    return rows, members, group * most + place
