"""In-context learners of tscompress.lab: layers in memory, calibrated on residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tscompress.data.batch import StreamBatch
from tscompress.families.base import LayeredFamily
from tscompress.families.stacks import sublayer_name
from tscompress.lab.in_context_models import AttentionLayer, Encoder, FeedForwardLayer
from tscompress.plan.architecture import Architecture, AttentionBlock, FeedForward


class LayersAlone(nn.Module):
    """The layers of a learner without its embedding and head; they are shared with it.

    A looped model comes through its layers several times: each time is a batch of its own here.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, stream: Tensor) -> Tensor:
        """``[B, S, d_model]`` to the same."""
        left: Tensor = self.encoder(stream)
        return left


class InContext(LayeredFamily):
    """Adapter of :class:`LayersAlone`."""

    name = "in-context"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return False  # nothing of this family is on disk as a checkpoint

    def describe(self, model: nn.Module) -> Architecture:
        attention: list[AttentionBlock] = []
        units: list[FeedForward] = []
        for layer, block in enumerate(model.encoder.block):  # type: ignore[union-attr, arg-type]
            for sublayer, part in enumerate(block.layer):
                place: dict[str, Any] = {"stack": "encoder", "layer": layer, "sublayer": sublayer}
                name = sublayer_name("encoder", layer, sublayer)
                if isinstance(part, AttentionLayer):
                    own, depth = f"{name}.attention", len(attention)
                    attention.append(_attention_block(own, part, depth, place))
                elif isinstance(part, FeedForwardLayer):
                    roles = {role: f"{name}.{role}" for role in ("wi", "wo")}
                    units.append(FeedForward(name=name, projections=roles, **place))
        return Architecture(self.name, tuple(attention), tuple(units))

    def inputs(self, pipeline: None, batch: StreamBatch) -> dict[str, Any]:
        return {"stream": batch.stream}


def _attention_block(
    name: str, part: AttentionLayer, depth: int, place: Mapping[str, Any]
) -> AttentionBlock:
    return AttentionBlock(
        name=name,
        kind="encoder",
        depth=depth,
        num_heads=part.attention.n_heads,
        softmax=part.attention.softmax,
        projections={role: f"{name}.{role}" for role in "qkvo"},
        **place,
    )
