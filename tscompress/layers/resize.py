"""Stand-ins for attention and feed-forward modules whose sizes differ from layer to layer.

In a factored checkpoint each head of a block has ``qk_size`` numbers for queries and keys and
``vo_size`` for values, and each feed-forward has hidden units of its own. No config of the stock
software can say so: a stock model is built and the planned modules are replaced by empty ones of
the planned sizes, under the same names, to be filled with weights afterwards. Cross-attention can
also read one latent of the encoder's output, the same for all heads of all layers.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, TypeVar

import torch
from chronos.chronos2.layers import MHA, MLP, AttentionOutput
from chronos.chronos2.layers import ResidualBlock as Chronos2ResidualBlock
from chronos.chronos_bolt import ResidualBlock as BoltResidualBlock
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.t5.modeling_t5 import (
    T5Attention,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerCrossAttention,
)

from tscompress.errors import PlanError
from tscompress.plan.plan import HeadPlan, HiddenPlan

_Module = TypeVar("_Module", bound=nn.Module)
#: What layers call their key-value cache: in transformers since 5.24, since 4.56, and before that.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value")


def cache_name(module: nn.Module) -> str:
    """What ``module.forward`` calls the key-value cache that it is given."""
    known = inspect.signature(module.forward).parameters
    return next(name for name in CACHE_NAMES if name in known)


class _Values(Tensor):
    """Values of all heads, ``[batch, tokens, heads * vo_size]``, that know their number of heads.

    ``T5Attention.forward`` splits queries, keys and values into heads by one and the same size.
    All it does to the values before they meet cache and attention weights is that one ``view``.
    So the values answer ``view`` and the stock forward stays in charge: its signature, cache and
    outputs differ between transformers 4.49, 4.57, 5.0 and 5.24, and that ``view`` does not.
    """

    # As for nn.Parameter: whatever is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    num_heads: int

    def view(self, *_: Any) -> Tensor:
        """``[batch, tokens, heads, vo_size]``, whatever size of head was asked for."""
        return self.reshape(*self.shape[:-1], self.num_heads, -1)


class _ValueProjection(nn.Linear):
    """A Linear layer whose output splits into ``num_heads`` heads, of whatever size."""

    num_heads: int

    def forward(self, input: Tensor) -> Tensor:
        values = super().forward(input).as_subclass(_Values)
        values.num_heads = self.num_heads
        return values


class SizedT5Attention(T5Attention):  # type: ignore[misc]
    """T5 attention in which values may have another size than queries and keys.

    Attributes
    ----------
    qk_size, vo_size
        Numbers of each head's queries and keys, and of its values.
    """

    qk_size: int
    vo_size: int

    @classmethod
    def empty_like(cls, attention: T5Attention, qk_size: int, vo_size: int) -> SizedT5Attention:
        """The stand-in for ``attention``: its settings and relative bias, other projections.

        ``q``, ``k`` ``[heads * qk_size, d_model]``, ``v`` ``[heads * vo_size, d_model]`` and ``o``
        ``[d_model, heads * vo_size]`` are uninitialised, on the devices and in the dtypes of the
        original's. The relative bias is the original's module, not a copy.
        """
        sized = _stand_in(cls, attention, qk_size, vo_size, value_class=_ValueProjection)
        sized.v.num_heads = sized.n_heads
        sized.key_value_proj_dim = qk_size  # by which the stock forward splits queries and keys
        return sized


class LatentCrossAttention(T5Attention):  # type: ignore[misc]
    """T5 cross-attention whose keys and values are both z = A y, for all heads of all layers.

    y is the encoder's output. Every head multiplies what turns z into its keys into its queries,
    and what turns z into its values into the output projection. So the cache holds z alone, in the
    place of the first layer's keys, and the other layers read it there.

    Attributes
    ----------
    down
        A, ``[size, d_model]``; the first decoder layer's alone, as is T5's relative bias.
    first
        The module that holds ``down``; None: this one. Not registered as a child, so that the
        state dict names ``down`` once.
    """

    first: LatentCrossAttention | None
    down: nn.Linear

    @classmethod
    def empty_like(
        cls, attention: T5Attention, size: int, first: LatentCrossAttention | None
    ) -> LatentCrossAttention:
        """The stand-in for ``attention``: its settings, other projections, uninitialised.

        ``q`` ``[heads * size, d_model]``, ``o`` ``[d_model, heads * size]`` and, if ``first`` is
        None, ``down``, on the devices and in the dtypes of the original's.
        """
        latent: Any = bare(cls, attention)
        width = latent.n_heads * size
        latent.q = _empty_linear(latent.q, out_features=width)
        latent.o = _empty_linear(latent.o, in_features=width)
        if first is None:
            latent.down = _empty_linear(latent.k, out_features=size)
        del latent.k, latent.v
        vars(latent)["first"] = first
        latent.key_value_proj_dim, latent.inner_dim = size, width
        return latent  # type: ignore[no-any-return]

    @property
    def cached_numbers(self) -> int:
        """Numbers that this layer adds to the cache for each of the encoder's tokens."""
        return 0 if self.first is not None else self.down.out_features

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """As ``T5Attention.forward``, of cross-attention.

        ``position_bias`` is not read: T5's cross-attention has none, and what dense layers pass on
        in its place is zeros, to which older versions have added the mask. The cache is among
        ``options``, by whichever name.
        """
        cache = next((options[name] for name in CACHE_NAMES if name in options), None)
        latent = self._latent(key_value_states, cache)  # [B, 1, S, r]
        batch, tokens = hidden_states.shape[:2]
        # All heads have the same keys, so that heads are but further queries: one product.
        queries = self.q(hidden_states).view(batch, 1, tokens * self.n_heads, -1)
        if mask is not None:  # [B, 1, 1 or T, S]
            mask = mask[..., : latent.shape[-2]]
            if mask.shape[-2] > 1:
                mask = mask.repeat_interleave(self.n_heads, dim=-2)
        dropout = self.dropout if self.training else 0.0
        weights = None
        # Older versions of T5 have no such setting, and return weights on request only.
        chosen = getattr(getattr(self, "config", None), "_attn_implementation", "sdpa")
        if options.get("output_attentions") or chosen == "eager":
            mixed, weights = _eager_attention(queries, latent, mask, dropout)
            weights = weights.view(batch, tokens, self.n_heads, -1).transpose(1, 2)
        else:
            mixed = F.scaled_dot_product_attention(
                queries, latent, latent, attn_mask=mask, dropout_p=dropout, scale=1.0
            )
        output = self.o(mixed.reshape(batch, tokens, -1))
        if "past_key_value" in options:  # transformers 4.49 names it so, and wants it back
            return output, cache, None, weights
        return output, None, weights

    def _latent(self, encoded: Tensor | None, cache: Any) -> Tensor:
        """z, ``[B, 1, S, size]``, from the cache if it is there; otherwise it is put there."""
        first = self if self.first is None else self.first
        if not isinstance(cache, EncoderDecoderCache):
            computed: Tensor = first.down(encoded)[:, None]
            return computed
        held, index = cache.cross_attention_cache, first.layer_idx
        if not cache.is_updated.get(index):
            computed = first.down(encoded)[:, None]
            # No values: they are the keys. Other layers have no entry at all.
            held.update(computed, computed[..., :0], index)
            cache.is_updated[index] = True
        # Before transformers 4.54 a cache had no layers, but one list of all keys.
        keys: Tensor = held.layers[index].keys if hasattr(held, "layers") else held.key_cache[index]
        return keys


def _eager_attention(
    queries: Tensor, latent: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """What queries ``[B, 1, N, r]`` read of ``latent`` ``[B, 1, S, r]``, and with what weights."""
    scores = queries @ latent.transpose(-1, -2)  # [B, 1, N, S]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.float().softmax(-1).type_as(scores), dropout)
    return weights @ latent, weights


class SizedChronos2Attention(MHA):  # type: ignore[misc]
    """Chronos-2 attention in which values may have another size than queries and keys.

    Attributes
    ----------
    qk_size, vo_size
        Numbers of each head's queries and keys, and of its values.
    """

    qk_size: int
    vo_size: int

    @classmethod
    def empty_like(
        cls, attention: MHA, qk_size: int, vo_size: int, frequencies: tuple[int, ...] | None = None
    ) -> SizedChronos2Attention:
        """The stand-in for ``attention``, with uninitialised projections as in T5's.

        Parameters
        ----------
        frequencies
            With rotary embedding: numbers ``j`` and ``j + qk_size / 2`` of each query and key turn
            with the original's frequency ``frequencies[j]``. None without, or to keep them all.
        """
        sized = _stand_in(cls, attention, qk_size, vo_size)
        sized.kv_proj_dim = qk_size
        if frequencies is not None:
            rotary = copy.deepcopy(attention.rope_embed)
            # Every buffer has one number a frequency. Assigning keeps them out of the state dict.
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
        """As ``MHA.forward``, which takes one size for granted; attention itself is inherited."""
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


def _stand_in(
    cls: type[_Module],
    original: nn.Module,
    qk_size: int,
    vo_size: int,
    value_class: type[nn.Linear] = nn.Linear,
) -> _Module:
    """A ``cls`` with the settings and children of ``original``, but empty projections."""
    sized: Any = bare(cls, original)
    qk_width, vo_width = sized.n_heads * qk_size, sized.n_heads * vo_size
    sized.q = _empty_linear(sized.q, out_features=qk_width)
    sized.k = _empty_linear(sized.k, out_features=qk_width)
    sized.v = _empty_linear(sized.v, out_features=vo_width, linear_class=value_class)
    sized.o = _empty_linear(sized.o, in_features=vo_width)
    sized.qk_size, sized.vo_size, sized.inner_dim = qk_size, vo_size, vo_width
    stand_in: _Module = sized
    return stand_in


def bare(cls: type[_Module], original: nn.Module) -> _Module:
    """A ``cls`` with the settings and the very children of ``original``."""
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = set(vars(bare))  # the books of nn.Module: parameters, hooks, ...
    vars(bare).update({name: x for name, x in vars(original).items() if name not in own})
    for name, child in original.named_children():
        bare.add_module(name, child)
    bare.training = original.training
    return bare


def _empty_linear(
    like: nn.Linear,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
    linear_class: type[nn.Linear] = nn.Linear,
) -> nn.Linear:
    """An uninitialised Linear layer that differs from ``like`` in the size that is given."""
    linear: nn.Linear = skip_init(  # type: ignore[no-untyped-call]
        linear_class,
        in_features or like.in_features,
        out_features or like.out_features,
        bias=like.bias is not None,
        device=like.weight.device,
        dtype=like.weight.dtype,
    )
    return linear.requires_grad_(like.weight.requires_grad).train(like.training)


# --------------------------------------------------------------------------------------------------
# Into a model
# --------------------------------------------------------------------------------------------------


def replace_heads_(model: nn.Module, plan: HeadPlan) -> nn.Module:
    """Put empty attention of the planned head sizes where ``plan.name`` is; returns it.

    Raises
    ------
    PlanError
        The model has no such module, or one that does not fit the plan.
    """
    attention = _planned_module(model, plan.name)
    if not isinstance(attention, T5Attention | MHA):
        raise PlanError(
            f"the plan names {plan.name!r}, a {type(attention).__name__}; "
            "only heads of T5Attention and of Chronos-2's MHA can be resized."
        )
    if isinstance(attention, LatentCrossAttention):
        raise PlanError(f"{plan.name} reads a latent already; compress the original checkpoint.")
    if plan.latent and not plan.name.endswith(".EncDecAttention"):
        raise PlanError(f"the plan gives {plan.name} a latent; only cross-attention of T5 has one.")
    size, rotary = plan.head_size, plan.frequencies is not None
    heads = attention.n_heads
    qk_size, vo_size = attention.k.out_features // heads, attention.v.out_features // heads
    turns = getattr(attention, "use_rope", False)
    _check_same(
        plan.name,
        _heads_text(plan.num_heads, size, size, plan.d_model, rotary),
        _heads_text(heads, qk_size, vo_size, attention.d_model, turns),
    )
    sized: nn.Module
    if plan.latent:
        first = _first_latent(model, plan)
        sized = LatentCrossAttention.empty_like(attention, plan.qk_size, first)
    elif isinstance(attention, T5Attention):
        sized = SizedT5Attention.empty_like(attention, plan.qk_size, plan.vo_size)
    else:
        sized = SizedChronos2Attention.empty_like(
            attention, plan.qk_size, plan.vo_size, plan.frequencies
        )
    model.set_submodule(plan.name, sized)
    return sized


def _first_latent(model: nn.Module, plan: HeadPlan) -> LatentCrossAttention | None:
    """Of the first decoder layer, which holds the projection to the latent; None if that is it."""
    layers = (
        name for name, part in model.named_modules() if isinstance(part, T5LayerCrossAttention)
    )
    name = f"{next(layers)}.EncDecAttention"
    if name == plan.name:
        return None
    first = _planned_module(model, name)
    if isinstance(first, LatentCrossAttention) and first.cached_numbers == plan.qk_size:
        return first
    raise PlanError(
        f"{plan.name} reads the latent of {name}; plan that one before it, with latent "
        f"{plan.qk_size} too."
    )


def resize_hidden_(model: nn.Module, plan: HiddenPlan) -> None:
    """Give the feed-forward or patch embedding ``plan.name`` empty layers of ``plan.kept`` units.

    The residual layer of a patch embedding stays as it is.

    Raises
    ------
    PlanError
        The model has no such module, or one that does not fit the plan.
    """
    module = _planned_module(model, plan.name)
    gated = isinstance(module, T5DenseGatedActDense)
    if gated or isinstance(module, T5DenseActDense | MLP):
        part, output = "feed_forward", "wo"
        inputs = ("wi_0", "wi_1") if gated else ("wi",)
    elif isinstance(module, BoltResidualBlock | Chronos2ResidualBlock):
        part, output, inputs = "patch", "output_layer", ("hidden_layer",)
    else:
        raise PlanError(
            f"the plan names {plan.name!r}, a {type(module).__name__}; only hidden units of "
            "feed-forwards of T5 and Chronos-2 and of ResidualBlock can be removed."
        )
    first, last = getattr(module, inputs[0]), getattr(module, output)
    _check_same(
        plan.name,
        _hidden_text(plan.part, plan.gated, plan.in_features, plan.d_ff, plan.out_features),
        _hidden_text(part, gated, first.in_features, first.out_features, last.out_features),
    )
    for role in inputs:
        setattr(module, role, _empty_linear(getattr(module, role), out_features=plan.kept))
    setattr(module, output, _empty_linear(last, in_features=plan.kept))


def _planned_module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"the plan names {name!r}, which the model does not have.") from None


def _check_same(name: str, planned: str, found: str) -> None:
    if planned != found:
        raise PlanError(f"the plan has {name} as {planned}; the model has {found}.")


def _heads_text(heads: int, qk_size: int, vo_size: int, d_model: int, rotary: bool) -> str:
    embedding = "with" if rotary else "without"
    return (
        f"{heads} heads of size {qk_size} (q, k) and {vo_size} (v) at d_model {d_model}, "
        f"{embedding} rotary embedding"
    )


def _hidden_text(part: str, gated: bool, inputs: int, units: int, outputs: int) -> str:
    return f"{'gated ' if gated else ''}{part} {inputs} -> {units} units -> {outputs}"
