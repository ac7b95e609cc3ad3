"""Self-attention of a T5 decoder that reads a single token: values without queries and keys.

The softmax is then over one key, so its output is W_O W_V x. Several tokens are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tscompress.errors import UsageError
from tscompress.layers.latent_cross_attention import CACHE_NAMES
from tscompress.layers.univariate import OwnValues


class OwnToken(OwnValues):
    """W_O W_V x in the place of a ``T5Attention`` to a single token."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, mask: Tensor | None = None, **options: Any
    ) -> tuple[Any, ...]:
        """As ``T5Attention.forward``, of ``[B, 1, d_model]``.

        Neither mask nor position bias changes a softmax over one key, nothing is cached, and there
        are no attention weights.

        Raises
        ------
        UsageError
            There are several tokens.
        """
        if hidden_states.shape[1] > 1:
            raise UsageError(
                f"the decoder got {hidden_states.shape[1]} tokens, and this model, compressed with "
                "--single-token, reads one; give one, or take the original."
            )
        found = super().forward(hidden_states)
        if "past_key_value" in options:  # transformers 4.49 expects the cache in the output
            cache = next((options[name] for name in CACHE_NAMES if name in options), None)
            return found, cache, None, None
        return found, None, None
