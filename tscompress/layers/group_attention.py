"""Group attention of Chronos-2 within its groups, instead of across a batch with a mask.

Stock group attention compares all series of a batch and masks those of other groups: of 256 series,
its backward pass on a CPU took a third of a training step. Groups are few series, or one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from chronos.chronos2.layers import MHA
from torch import Tensor, nn

#: Of stock attention, fused and not.
_METHODS = ("_sdpa_attention", "_eager_attention")


@contextmanager
def attention_within_groups(model: nn.Module) -> Iterator[None]:
    """Within the block, group attention of ``model`` is computed group by group.

    The results at observed patches are the same, up to rounding; those at patches without data are
    read by nothing. Models without group attention are unchanged.
    """
    replaced = [m for m in model.modules() if isinstance(m, MHA) and not m.use_rope]
    for module in replaced:
        for name in _METHODS:
            setattr(module, name, partial(_within_groups, module))
    try:
        yield
    finally:
        for module in replaced:
            for name in _METHODS:
                delattr(module, name)


def _within_groups(
    module: MHA, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, None]:
    """Attention of ``[T, heads, B, d]`` across series; ``mask`` ``[T, 1, B, B]`` is additive."""
    dropout = module.dropout if module.training else 0.0
    rows, members, at = _groups_of(mask, smallest=1 if dropout else 2)
    if not len(members):  # each series is alone: one value, of weight 1
        return values, None
    there = rows >= 0
    index = rows.clamp_min(0)  # [N, G]
    steps, heads = queries.shape[:2]
    q, k, v = (
        states.index_select(2, index.flatten()).reshape(steps, heads, *index.shape, -1)
        for states in (queries, keys, values)
    )  # [T, heads, N, G, d], values of a size of their own
    bias = mask[:, :, index[:, :, None], index[:, None, :]]  # [T, 1, N, G, G]
    bias = bias.masked_fill(~there[:, None, :], torch.finfo(mask.dtype).min)
    weights = torch.softmax((q @ k.transpose(-1, -2)).float() + bias, dim=-1)
    found = nn.functional.dropout(weights, dropout).to(v.dtype) @ v
    return values.index_copy(2, members, found.flatten(2, 3).index_select(2, at)), None


def _groups_of(mask: Tensor, smallest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of at least ``smallest`` rows.

    The rows of each ``[N, G]``, -1 where a group is smaller; all of these rows ``[M]``, and the
    place of each in the first ``[M]``. The last patch of a series is of the future, which all
    series of its group attend to.
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
    rows[group, place] = members
    return rows, members, group * most + place
