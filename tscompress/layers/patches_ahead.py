"""The last layer of a Chronos-2 at the positions that a forecast reads, for training.

These are the patches ahead, the last ones. Of the others the last layer needs keys and values of
time attention, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.layers import AttentionOutput, TimeSelfAttention
from torch import Tensor, nn


@contextmanager
def last_layer_of_patches_ahead(model: nn.Module) -> Iterator[None]:
    """Within the block, ``forward`` of a Chronos-2 skips what its forecast does not read.

    Forecasts and gradients are the same, up to rounding. Hidden states of the last layer are zeros
    elsewhere, so ``embed`` is not to be called within. Other models are unchanged.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Chronos2Model):
                _LastLayer(module, hooks)
        yield


class _LastLayer:
    """Hooks on a model; they read how many patches are ahead in each pass.

    The last pass decides until the next one begins, as a layer may run again in its backward pass.
    """

    def __init__(self, model: Chronos2Model, hooks: ExitStack) -> None:
        self._signature = inspect.signature(model.forward)
        self.ahead = self.positions = 0
        time, group, feed_forward = model.encoder.block[-1].layer
        time.forward = partial(self._attend, time)
        hooks.callback(delattr, time, "forward")
        for handle in (
            model.register_forward_pre_hook(self._count, with_kwargs=True),
            group.register_forward_pre_hook(self._cut_mask, with_kwargs=True),
            feed_forward.register_forward_hook(self._pad),
        ):
            hooks.callback(handle.remove)

    def _count(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        self.ahead = given.arguments["num_output_patches"]

    def _attend(
        self,
        module: TimeSelfAttention,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        output_attentions: bool = False,
    ) -> AttentionOutput:
        """As ``TimeSelfAttention.forward`` of ``[B, T, d_model]``, at the patches ahead."""
        self.positions = hidden_states.shape[1]
        attention: Any = module.self_attention
        normed = module.layer_norm(hidden_states)
        queries = attention.q(normed[:, -self.ahead :])
        projected = (queries, attention.k(normed), attention.v(normed))
        q, k, v = (x.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for x in projected)
        cos, sin = (x[:, None] for x in attention.rope_embed(v, position_ids))
        q, k = (_turned(x, cos[:, :, -x.shape[2] :], sin[:, :, -x.shape[2] :]) for x in (q, k))
        fused = attention.config._attn_implementation == "sdpa"
        attend = attention._sdpa_attention if fused else attention._eager_attention
        mixed, _ = attend(q, k, v, attention_mask)
        output = module.dropout(attention.o(mixed.transpose(1, 2).flatten(2)))
        return AttentionOutput(
            hidden_states=hidden_states[:, -self.ahead :] + output, attn_weights=None
        )

    def _cut_mask(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The mask ``[T, 1, B, B]`` of group attention, at the patches ahead; None stays."""
        mask = kwargs["attention_mask"]
        if mask is None:  # of a univariate model
            return args, kwargs
        return args, {**kwargs, "attention_mask": mask[-self.ahead :]}

    def _pad(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """As many positions as the model expects."""
        return nn.functional.pad(output, (0, 0, self.positions - self.ahead, 0))


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of queries or keys ``[B, heads, T, d]``."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
