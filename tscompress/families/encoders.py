"""T5 and BERT, only for profiling: language models to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tscompress.families.base import Family, describe_encoder
from tscompress.families.t5_stack import describe_t5
from tscompress.plan.architecture import Architecture


class T5(Family):
    """Adapter of T5 language models: an encoder, with or without its decoder."""

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
        return describe_encoder(self.name, model, _ATTENTION, _FEED_FORWARD)


_ATTENTION = {
    "q": ["attention.self.query"],
    "k": ["attention.self.key"],
    "v": ["attention.self.value"],
    "o": ["attention.output.dense"],
}
_FEED_FORWARD = {"wi": ["intermediate.dense"], "wo": ["output.dense"]}
