"""T5 and BERT, for profiling only: language models to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tscompress.families.base import Family, projections_of
from tscompress.families.t5_stack import describe_t5
from tscompress.plan.architecture import Architecture, AttentionBlock, FeedForward


class T5(Family):
    """Adapter of T5 that is no Chronos model: an encoder, with or without its decoder."""

    name = "t5"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        chronos = "chronos_config" in config or config.get("chronos_pipeline_class")
        return config.get("model_type") in ("t5", "mt5") and not chronos

    def describe(self, model: nn.Module) -> Architecture:
        return describe_t5(self.name, model)


class Bert(Family):
    """Adapter of BERT and of encoders built like it."""

    name = "bert"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in ("bert", "roberta", "electra", "xlm-roberta")

    def describe(self, model: nn.Module) -> Architecture:
        config: Any = model.config
        attention: list[AttentionBlock] = []
        feed_forward: list[FeedForward] = []
        for name, layer in model.named_modules():
            if not all(hasattr(layer, child) for child in ("attention", "intermediate", "output")):
                continue
            depth = len(attention)
            attention.append(
                AttentionBlock(
                    name=f"{name}.attention",
                    stack="encoder",
                    layer=depth,
                    sublayer=0,
                    kind="encoder",
                    depth=depth,
                    num_heads=config.num_attention_heads,
                    projections=projections_of(layer, name, _ATTENTION),
                )
            )
            feed_forward.append(
                FeedForward(
                    name=name,
                    stack="encoder",
                    layer=depth,
                    sublayer=1,
                    projections=projections_of(layer, name, _FEED_FORWARD),
                )
            )
        return Architecture(self.name, tuple(attention), tuple(feed_forward))


_ATTENTION = {
    "q": ["attention.self.query"],
    "k": ["attention.self.key"],
    "v": ["attention.self.value"],
    "o": ["attention.output.dense"],
}
_FEED_FORWARD = {"wi": ["intermediate.dense"], "wo": ["output.dense"]}
