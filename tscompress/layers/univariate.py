"""Chronos-2 for series that are groups of their own: values without queries, keys and masks.

The softmax of group attention is then over one element, so its output is W_O W_V x. Several series
in a group are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from chronos.chronos2.layers import MHA, AttentionOutput, GroupSelfAttention
from chronos.chronos2.model import Chronos2Encoder
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from tscompress.errors import PlanError, UsageError
from tscompress.layers.sized_attention import bare, empty_linear
from tscompress.runtime.univariate import groups_message


class OwnValues(nn.Module):
    """W_O W_V x in the place of attention to a single key.

    Attributes
    ----------
    v, o
        Values and outputs, ``[r, d_model]`` and ``[d_model, r]``; None if they are one matrix.
    vo
        Their product, ``[d_model, d_model]``; None if they are two.
    """

    v: nn.Linear | None
    o: nn.Linear | None
    vo: nn.Linear | None

    def __init__(self, v: nn.Linear | None, o: nn.Linear | None, vo: nn.Linear | None) -> None:
        super().__init__()
        self.v, self.o, self.vo = v, o, vo

    @classmethod
    def of(cls, attention: MHA | T5Attention) -> OwnValues:
        """The same layers of values and outputs, not copies."""
        return cls(attention.v, attention.o, None).train(attention.training)

    def resize_(self, rank: int | None) -> None:
        """Empty layers of ``rank`` dimensions instead; None: one matrix of all."""
        assert self.v is not None
        assert self.o is not None
        v, o = self.v, self.o
        if rank is None:
            self.v, self.o, self.vo = None, None, empty_linear(v, out_features=o.out_features)
        else:
            self.v, self.o = empty_linear(v, out_features=rank), empty_linear(o, in_features=rank)

    def product(self) -> Tensor:
        """W_O W_V, float64 ``[d_model, d_model]``."""
        layers = [one for one in (self.o, self.v, self.vo) if one is not None]
        matrices = [one.weight.detach().to(torch.float64) for one in layers]
        return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., d_model]`` of ``[..., d_model]``."""
        if self.vo is not None:
            merged: Tensor = self.vo(hidden_states)
            return merged
        assert self.v is not None
        assert self.o is not None
        found: Tensor = self.o(self.v(hidden_states))
        return found


class OwnValuesLayer(GroupSelfAttention):  # type: ignore[misc]
    """The sublayer of :class:`OwnValues`; series are not transposed, and no mask is read."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> AttentionOutput:
        """As ``GroupSelfAttention.forward``; weights ``[S, 1, B, B]`` are 1 for each series."""
        values = self.self_attention(self.layer_norm(hidden_states))
        weights = None
        if output_attentions:
            series, steps = hidden_states.shape[:2]
            weights = torch.eye(series, device=hidden_states.device).expand(steps, 1, -1, -1)
        return AttentionOutput(
            hidden_states=hidden_states + self.dropout(values), attn_weights=weights
        )


class UnivariateEncoder(Chronos2Encoder):  # type: ignore[misc]
    """The stock encoder for series that are groups of their own."""

    @staticmethod
    def _construct_and_invert_group_time_mask(*_: Any) -> None:
        """No mask: no layer reads one."""

    def forward(self, inputs_embeds: Tensor, *, group_ids: Tensor, **options: Any) -> Any:
        """As ``Chronos2Encoder.forward``.

        Raises
        ------
        UsageError
            Two series have the same group.
        """
        largest = int(torch.unique(group_ids, return_counts=True)[1].max()) if len(group_ids) else 1
        if largest > 1:
            raise UsageError(groups_message(largest))
        return super().forward(inputs_embeds, group_ids=group_ids, **options)


def is_univariate(model: nn.Module) -> bool:
    """Whether a model, or an exported one, takes only series that are groups of their own."""
    return bool(getattr(model, "univariate", False))


def drop_groups_(model: nn.Module) -> None:
    """Let a Chronos-2 take only series that are groups of their own.

    Raises
    ------
    PlanError
        Some group attention still has queries and keys.
    """
    chronos: Any = model
    for depth, block in enumerate(chronos.encoder.block):
        name = f"encoder.block.{depth}.layer.1"
        layer = block.layer[1]
        if not isinstance(layer.self_attention, OwnValues):
            raise PlanError(f"{name} is not univariate; make all group attention so, or none.")
        model.set_submodule(name, bare(OwnValuesLayer, layer))
    model.set_submodule("encoder", bare(UnivariateEncoder, chronos.encoder))
    chronos.univariate = True
