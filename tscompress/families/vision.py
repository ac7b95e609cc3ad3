"""Vision transformers (ViT and DINOv2), only for profiling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tscompress.families.base import EmbeddingTable, Family, describe_encoder
from tscompress.plan.architecture import Architecture

#: Names since transformers 5, and before that.
_ATTENTION = {
    "q": ["attention.q_proj", "attention.attention.query"],
    "k": ["attention.k_proj", "attention.attention.key"],
    "v": ["attention.v_proj", "attention.attention.value"],
    "o": ["attention.o_proj", "attention.output.dense"],
}
#: DINOv2's largest model has gated feed-forwards.
_FEED_FORWARD = {
    "wi": ["mlp.fc1", "intermediate.dense", "mlp.weights_in"],
    "wi_0": ["mlp.gate_proj"],
    "wi_1": ["mlp.up_proj"],
    "wo": ["mlp.fc2", "mlp.down_proj", "output.dense", "mlp.weights_out"],
}


class VisionTransformer(Family):
    """Adapter of ViT and DINOv2."""

    name = "vit"
    names_kept = False  # files keep the names from before transformers 5

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in ("vit", "dinov2")

    def describe(self, model: nn.Module) -> Architecture:
        return describe_encoder(self.name, model, _ATTENTION, _FEED_FORWARD, ".mlp")

    def embedding_table(self, model: nn.Module, config: Mapping[str, Any]) -> EmbeddingTable:
        """Weights of each pixel of a patch in its embedding, ``[channels * P * P, d_model]``."""
        weights = dict(model.named_parameters())
        name = next(one for one in weights if one.endswith("patch_embeddings.projection.weight"))
        projection: Tensor = weights[name].detach()  # [d_model, channels, P, P]
        return EmbeddingTable(projection.flatten(1).T, "pixels", "position")
