"""Vision transformers (ViT and DINOv2), for profiling only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tscompress.families.base import EmbeddingTable, Family, projections_of
from tscompress.plan.architecture import Architecture, AttentionBlock, FeedForward

#: Names since transformers 5, and before that.
_ATTENTION = {
    "q": ["attention.q_proj", "attention.attention.query"],
    "k": ["attention.k_proj", "attention.attention.key"],
    "v": ["attention.v_proj", "attention.attention.value"],
    "o": ["attention.o_proj", "attention.output.dense"],
}
#: The gated ones are those of DINOv2's largest model.
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
        config: Any = model.config
        attention: list[AttentionBlock] = []
        feed_forward: list[FeedForward] = []
        for name, layer in model.named_modules():
            projections = projections_of(layer, name, _ATTENTION)
            if projections.keys() != _ATTENTION.keys():
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
                    projections=projections,
                )
            )
            feed_forward.append(
                FeedForward(
                    name=f"{name}.mlp",
                    stack="encoder",
                    layer=depth,
                    sublayer=1,
                    projections=projections_of(layer, name, _FEED_FORWARD),
                )
            )
        return Architecture(self.name, tuple(attention), tuple(feed_forward))

    def embedding_table(self, model: nn.Module, config: Mapping[str, Any]) -> EmbeddingTable:
        """What each pixel of a patch adds to its embedding, ``[channels * P * P, d_model]``."""
        weights = dict(model.named_parameters())
        name = next(one for one in weights if one.endswith("patch_embeddings.projection.weight"))
        projection: Tensor = weights[name].detach()  # [d_model, channels, P, P]
        return EmbeddingTable(projection.flatten(1).T, "pixels", "position")
