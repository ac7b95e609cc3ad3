"""Whisper, an encoder-decoder of speech, only for profiling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tscompress.families.base import Family, projections_of
from tscompress.plan.architecture import Architecture, AttentionBlock, BlockKind, FeedForward

_ROLES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


class Whisper(Family):
    """Adapter of Whisper with encoder and decoder."""

    name = "whisper"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "whisper"

    def describe(self, model: nn.Module) -> Architecture:
        attention: list[AttentionBlock] = []
        feed_forward: list[FeedForward] = []
        encoder_layers = sum(stack == "encoder" for stack, *_ in _layers(model))
        for stack, depth, name, layer in _layers(model):
            own: BlockKind = "encoder" if stack == "encoder" else "decoder"
            kinds: dict[str, BlockKind] = {"self_attn": own, "encoder_attn": "cross"}
            present = [child for child in kinds if hasattr(layer, child)]
            for index, child in enumerate(present):
                module: Any = getattr(layer, child)
                children = {role: [f"{child}.{linear}"] for role, linear in _ROLES.items()}
                block = AttentionBlock(
                    name=f"{name}.{child}",
                    stack=stack,
                    layer=depth,
                    sublayer=index,
                    kind=kinds[child],
                    depth=depth + (encoder_layers if kinds[child] == "cross" else 0),
                    num_heads=module.num_heads,
                    projections=projections_of(layer, name, children),
                )
                attention.append(block)
            feed_forward.append(
                FeedForward(
                    name=name,
                    stack=stack,
                    layer=depth,
                    sublayer=len(present),
                    projections=projections_of(layer, name, {"wi": ["fc1"], "wo": ["fc2"]}),
                )
            )
        return Architecture(self.name, tuple(attention), tuple(feed_forward))


def _layers(model: nn.Module) -> Iterator[tuple[str, int, str, nn.Module]]:
    """Stack, index, dotted name and module of every layer."""
    stacks = [("encoder", "encoder.layers"), ("decoder", "decoder.layers")]
    modules = dict(model.named_modules())
    for stack, end in stacks:
        name = next((one for one in modules if one == end or one.endswith(f".{end}")), None)
        for depth, (index, layer) in enumerate(modules[name].named_children() if name else ()):
            yield stack, depth, f"{name}.{index}", layer
