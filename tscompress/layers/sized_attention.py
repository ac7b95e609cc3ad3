"""Attention of T5 and Chronos-2 in which values may have another size than queries and keys.

Stock configs cannot express this: the classes replace stock modules, under the same names.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, TypeVar

import torch
from chronos.chronos2.layers import MHA, AttentionOutput
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.models.t5.modeling_t5 import T5Attention

from tscompress.lab.in_context_models import SelfAttention

_Module = TypeVar("_Module", bound=nn.Module)


class _Values(Tensor):
    """Values of all heads, ``[batch, tokens, heads * vo_size]``, with their number of heads.

    ``T5Attention.forward`` splits queries, keys and values into heads of the same size, by one
    ``view`` of the values before cache and attention weights. Overriding that ``view`` keeps the
    stock forward: its signature, cache and outputs differ between transformers 4.49, 4.57, 5.0 and
    5.24, and the ``view`` does not.
    """

    # As for nn.Parameter: results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    num_heads: int

    def view(self, *_: Any) -> Tensor:
        """``[batch, tokens, heads, vo_size]``, for any requested head size."""
        return self.reshape(*self.shape[:-1], self.num_heads, -1)


def _split_by_heads(num_heads: int, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: the output of a projection splits into ``num_heads`` heads of any size."""
    values = output.as_subclass(_Values)
    values.num_heads = num_heads
    return values


def _splits_by_heads(module: nn.Module) -> bool:
    """Whether it has the hook, as a replica for another device has that of its original."""
    hooks = module._forward_hooks.values()
    return any(isinstance(hook, partial) and hook.func is _split_by_heads for hook in hooks)


class SizedT5Attention(T5Attention):  # type: ignore[misc]
    """T5 attention in which values may have another size than queries and keys.

    Attributes
    ----------
    qk_size, vo_size
        Head size of queries and keys, and of values.
    """

    qk_size: int
    vo_size: int

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; also what an adapter puts in the place of ``v`` gives values."""
        super().__setattr__(name, value)
        if name == "v" and isinstance(value, nn.Module) and not _splits_by_heads(value):
            # Kept: unpickled without it, the hook would make way to the next one anywhere.
            self.hook = value.register_forward_hook(partial(_split_by_heads, self.n_heads))

    @classmethod
    def empty_like(cls, attention: T5Attention, qk_size: int, vo_size: int) -> SizedT5Attention:
        """A replacement for ``attention`` with its settings and relative bias.

        ``q``, ``k`` ``[heads * qk_size, d_model]``, ``v`` ``[heads * vo_size, d_model]`` and ``o``
        ``[d_model, heads * vo_size]`` are uninitialised, on the devices and in the dtypes of the
        original's. The relative bias is the original's module, not a copy.
        """
        sized = _replacement(cls, attention, qk_size, vo_size)
        sized.key_value_proj_dim = qk_size  # by which the stock forward splits queries and keys
        return sized


def same_sizes(attention: SizedT5Attention) -> T5Attention:
    """Stock attention of the same output, whose smaller heads are padded with zeros.

    For exporters, which cannot follow :class:`SizedT5Attention`.
    """
    size = max(attention.qk_size, attention.vo_size)
    stock: Any = bare(T5Attention, attention)
    for role, of_heads in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
        setattr(stock, role, _padded_heads(getattr(attention, role), of_heads, stock.n_heads, size))
    stock.key_value_proj_dim, stock.inner_dim = size, stock.n_heads * size
    return stock


def _padded_heads(linear: nn.Module, dim: int, heads: int, size: int) -> nn.Module:
    """A projection whose heads, along ``dim`` of the weight, have ``size`` dimensions."""
    if isinstance(linear, nn.Linear):
        last = linear
    else:  # two factors, of which one has the heads
        linear = copy.deepcopy(linear)
        factors: Any = linear
        last = factors.left if dim == 0 else factors.right
    split = torch.unflatten(last.weight, dim, (heads, -1))
    missing = size - split.shape[dim + 1]
    shape = list(split.shape)
    shape[dim + 1] = missing
    weight = torch.cat([split, split.new_zeros(shape)], dim + 1).flatten(dim, dim + 1)
    name = "in_features" if dim else "out_features"
    wide = empty_linear(last, **{name: heads * size})
    wide.weight.data = weight.detach().contiguous()
    if isinstance(linear, nn.Linear):
        return wide
    setattr(linear, "left" if dim == 0 else "right", wide)
    return linear


class SizedChronos2Attention(MHA):  # type: ignore[misc]
    """Chronos-2 attention in which values may have another size than queries and keys.

    Attributes
    ----------
    qk_size, vo_size
        Head size of queries and keys, and of values.
    """

    qk_size: int
    vo_size: int

    @classmethod
    def empty_like(
        cls, attention: MHA, qk_size: int, vo_size: int, frequencies: tuple[int, ...] | None = None
    ) -> SizedChronos2Attention:
        """A replacement for ``attention``, with uninitialised projections as in T5's.

        Parameters
        ----------
        frequencies
            With rotary embedding: dimensions ``j`` and ``j + qk_size / 2`` of each query and key
            rotate with the original's frequency ``frequencies[j]``. None: no rotary embedding, or
            keep all frequencies.
        """
        sized = _replacement(cls, attention, qk_size, vo_size)
        sized.kv_proj_dim = qk_size
        if frequencies is not None:
            rotary = copy.deepcopy(attention.rope_embed)
            # Buffers have one value per frequency. Assigning keeps them out of the state dict.
            for name, buffer in list(rotary.named_buffers()):
                setattr(rotary, name, buffer[list(frequencies)])
            sized.rope_embed = rotary
        return sized

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        encoder_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> AttentionOutput:
        """As ``MHA.forward``, which assumes one size; attention itself is inherited."""
        source = hidden_states if encoder_states is None else encoder_states
        projected = (self.q(hidden_states), self.k(source), self.v(source))
        queries, keys, values = (
            states.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for states in projected
        )  # [batch, heads, tokens, size]
        if self.use_rope and encoder_states is None:
            cos, sin = self.rope_embed(queries, position_ids)
            queries, keys = self.rope_embed.apply_rotary_pos_emb(queries, keys, cos, sin)
        if output_attentions or self.config._attn_implementation != "sdpa":
            mixed, weights = self._eager_attention(queries, keys, values, mask)
        else:
            mixed, weights = self._sdpa_attention(queries, keys, values, mask)
        return AttentionOutput(
            hidden_states=self.o(mixed.transpose(1, 2).flatten(2)),
            attn_weights=weights if output_attentions else None,
        )


def with_smaller_heads(attention: SelfAttention, qk_size: int, vo_size: int) -> SelfAttention:
    """A replacement for attention of :mod:`tscompress.lab`, with uninitialised projections.

    It is of the same class, which reads both sizes off its projections.
    """
    return _replacement(type(attention), attention, qk_size, vo_size)


def _replacement(
    cls: type[_Module],
    original: nn.Module,
    qk_size: int,
    vo_size: int,
) -> _Module:
    """A ``cls`` with the settings and children of ``original`` and empty projections."""
    sized: Any = bare(cls, original)
    qk_width, vo_width = sized.n_heads * qk_size, sized.n_heads * vo_size
    sized.q = empty_linear(sized.q, out_features=qk_width)
    sized.k = empty_linear(sized.k, out_features=qk_width)
    sized.v = empty_linear(sized.v, out_features=vo_width)
    sized.o = empty_linear(sized.o, in_features=vo_width)
    sized.qk_size, sized.vo_size, sized.inner_dim = qk_size, vo_size, vo_width
    stand_in: _Module = sized
    return stand_in


def bare(cls: type[_Module], original: nn.Module) -> _Module:
    """A ``cls`` with the settings and the same child modules as ``original``."""
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = set(vars(bare))  # attributes of nn.Module: parameters, hooks, ...
    vars(bare).update({name: x for name, x in vars(original).items() if name not in own})
    for name, child in original.named_children():
        bare.add_module(name, child)
    bare.training = original.training
    return bare


def empty_linear(
    like: nn.Linear,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
) -> nn.Linear:
    """An uninitialised Linear layer like ``like``, with another input or output size."""
    linear: nn.Linear = skip_init(  # type: ignore[no-untyped-call]
        nn.Linear,
        in_features or like.in_features,
        out_features or like.out_features,
        bias=like.bias is not None,
        device=like.weight.device,
        dtype=like.weight.dtype,
    )
    return linear.requires_grad_(like.weight.requires_grad).train(like.training)
