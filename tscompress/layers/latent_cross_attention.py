"""T5 cross-attention that reads one latent of the encoder, the same for all heads and layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.t5.modeling_t5 import T5Attention

from tscompress.layers.sized_attention import bare, empty_linear

#: Names of the key-value cache in ``forward``: in transformers since 5.24, since 4.56, and before.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value")


class LatentCrossAttention(T5Attention):  # type: ignore[misc]
    """T5 cross-attention whose keys and values are both z = A y, for all heads of all layers.

    y is the encoder's output. The map from z to a head's keys is absorbed into its queries, and the
    map from z to its values into the output projection. So the cache holds only z, in the place of
    the first layer's keys, and the other layers read it there.

    Attributes
    ----------
    down
        A, ``[size, d_model]``; only in the first decoder layer, as T5's relative bias.
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
        """A replacement for ``attention`` with its settings and uninitialised projections.

        ``q`` ``[heads * size, d_model]``, ``o`` ``[d_model, heads * size]`` and, if ``first`` is
        None, ``down``, on the devices and in the dtypes of the original's.
        """
        latent: Any = bare(cls, attention)
        width = latent.n_heads * size
        latent.q = empty_linear(latent.q, out_features=width)
        latent.o = empty_linear(latent.o, in_features=width)
        if first is None:
            latent.down = empty_linear(latent.k, out_features=size)
        del latent.k, latent.v
        vars(latent)["first"] = first
        latent.key_value_proj_dim, latent.inner_dim = size, width
        return latent  # type: ignore[no-any-return]

    @property
    def cached_values(self) -> int:
        """Values that this layer caches for each encoder token."""
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

        ``position_bias`` is not read: T5's cross-attention has none, and dense layers pass zeros in
        its place, to which older versions add the mask. The cache is in ``options``, under one of
        :data:`CACHE_NAMES`.
        """
        cache = next((options[name] for name in CACHE_NAMES if name in options), None)
        latent = self._latent(key_value_states, cache)  # [B, 1, S, r]
        batch, tokens = hidden_states.shape[:2]
        # All heads have the same keys, so heads are further queries of one product.
        queries = self.q(hidden_states).view(batch, 1, tokens * self.n_heads, -1)
        if mask is not None:  # [B, 1, 1 or T, S]
            mask = mask[..., : latent.shape[-2]]
            if mask.shape[-2] > 1:
                mask = mask.repeat_interleave(self.n_heads, dim=-2)
        dropout = self.dropout if self.training else 0.0
        weights = None
        # Older versions of T5 have no such setting and return weights only on request.
        chosen = getattr(getattr(self, "config", None), "_attn_implementation", "sdpa")
        if options.get("output_attentions") or chosen == "eager":
            mixed, weights = _eager_attention(queries, latent, mask, dropout)
            weights = weights.view(batch, tokens, self.n_heads, -1).transpose(1, 2)
        else:
            mixed = F.scaled_dot_product_attention(
                queries, latent, latent, attn_mask=mask, dropout_p=dropout, scale=1.0
            )
        output = self.o(mixed.reshape(batch, tokens, -1))
        if "past_key_value" in options:  # transformers 4.49 expects it in the output
            return output, cache, None, weights
        return output, None, weights

    def _latent(self, encoded: Tensor | None, cache: Any) -> Tensor:
        """z, ``[B, 1, S, size]``, from the cache; computed and cached if it is not there."""
        first = self if self.first is None else self.first
        if not isinstance(cache, EncoderDecoderCache):
            computed: Tensor = first.down(encoded)[:, None]
            return computed
        held, index = cache.cross_attention_cache, first.layer_idx
        if not cache.is_updated.get(index):
            computed = first.down(encoded)[:, None]
            # No values: they are the keys. Other layers have no entry.
            held.update(computed, computed[..., :0], index)
            cache.is_updated[index] = True
        # Before transformers 4.54 a cache was one list of all keys, without layers.
        keys: Tensor = held.layers[index].keys if hasattr(held, "layers") else held.key_cache[index]
        return keys


def _eager_attention(
    queries: Tensor, latent: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries ``[B, 1, N, r]`` to ``latent`` ``[B, 1, S, r]``: output and weights."""
    scores = queries @ latent.transpose(-1, -2)  # [B, 1, N, S]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.float().softmax(-1).type_as(scores), dropout)
    return weights @ latent, weights
