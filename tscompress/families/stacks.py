"""Stacks of layers of T5 and Chronos-2, the models that can be compressed.

``encoder.block.3.layer.1`` is the second sublayer of the encoder's fourth layer. A sublayer is an
attention or a feed-forward with its norm and residual connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tscompress.plan.architecture import STACKS, AttentionBlock, FeedForward

Block = AttentionBlock | FeedForward
#: Prefixes of the names of all parameters within layers.
LAYER_PREFIXES = tuple(f"{stack}.block." for stack in STACKS)


def layer_name(stack: str, layer: int) -> str:
    """Dotted name of a layer."""
    return f"{stack}.block.{layer}"


def sublayer_name(stack: str, layer: int, sublayer: int) -> str:
    """Dotted name of a sublayer."""
    return f"{layer_name(stack, layer)}.layer.{sublayer}"


def sublayer_of(block: Block) -> str:
    """Dotted name of the sublayer that holds an attention block or a feed-forward."""
    return sublayer_name(block.stack, block.layer, block.sublayer)


@dataclass(frozen=True)
class Sublayer:
    """A sublayer and its position."""

    stack: str
    layer: int
    index: int
    module: nn.Module

    @property
    def name(self) -> str:
        """Its dotted name."""
        return sublayer_name(self.stack, self.layer, self.index)


def stack_layers(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Stack to its layers, in the order of a forward pass."""
    stacks: dict[str, Any] = {name: getattr(model, name, None) for name in STACKS}
    return {name: stack.block for name, stack in stacks.items() if stack is not None}


def sublayers(model: nn.Module) -> Iterator[Sublayer]:
    """Every sublayer, in the order of a forward pass."""
    for stack, layers in stack_layers(model).items():
        for depth, layer in enumerate(layers):
            parts: Any = layer.layer
            for index, module in enumerate(parts):
                yield Sublayer(stack, depth, index, module)


def layer_matrices(model: nn.Module) -> set[str]:
    """Names of the projections within layers: no embedding, bias, norm or head."""
    return {
        f"{layer_name(stack, depth)}.{name}"
        for stack, layers in stack_layers(model).items()
        for depth, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.ndim == 2 and "bias" not in name
    }
