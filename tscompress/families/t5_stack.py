"""Common parts of models of T5 stacks: Chronos-T5, Chronos-Bolt and T5."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import T5ForConditionalGeneration

from tscompress.errors import RecipeError, UnsupportedModelError
from tscompress.families.base import ModelShape
from tscompress.families.stacks import Sublayer, stack_layers, sublayers
from tscompress.layers.token_embedding import LowRankEmbedding
from tscompress.layers.univariate import OwnValues
from tscompress.plan.architecture import Architecture, AttentionBlock, BlockKind, FeedForward
from tscompress.plan.layer_plans import TokenTable

#: transformers 5 always ties, and uses the former only to decide whether to scale.
UNTIED = {"tie_word_embeddings": False, "scale_decoder_outputs": False}


def describe_t5(family: str, model: nn.Module, *, single_token: bool = False) -> Architecture:
    """The architecture of a model of T5 stacks.

    ``single_token``: its decoder always reads the start token alone.

    Raises
    ------
    UnsupportedModelError
        Its cross-attention reads a latent already, or its stacks are within another module.
    """
    attention: list[AttentionBlock] = []
    feed_forward: list[FeedForward] = []
    stacks = stack_layers(model)
    if "encoder" not in stacks:
        raise UnsupportedModelError(
            f"a {type(model).__name__} is not supported; give the model that it is built on."
        )
    encoder_layers = len(stacks["encoder"])
    for sublayer in sublayers(model):
        if hasattr(sublayer.module, "DenseReluDense"):
            feed_forward.append(_feed_forward(sublayer))
        else:
            attention.append(_attention(sublayer, encoder_layers, single_token))
    return Architecture(family, tuple(attention), tuple(feed_forward))


def _attention(sublayer: Sublayer, encoder_layers: int, single_token: bool) -> AttentionBlock:
    cross = hasattr(sublayer.module, "EncDecAttention")
    child = "EncDecAttention" if cross else "SelfAttention"
    attention: Any = getattr(sublayer.module, child)
    name = f"{sublayer.name}.{child}"
    own = isinstance(attention, OwnValues)  # those of one head, whatever the heads were
    roles = [role for role in ("v", "o", "vo") if getattr(attention, role, None)] if own else "qkvo"
    if not (own or hasattr(attention, "k")):
        raise UnsupportedModelError(
            f"{name} reads a latent and has no keys and values; "
            "profile or compress the original checkpoint."
        )
    kind: BlockKind = "encoder" if sublayer.stack == "encoder" else "decoder"
    return AttentionBlock(
        name=name,
        stack=sublayer.stack,
        layer=sublayer.layer,
        sublayer=sublayer.index,
        kind="cross" if cross else kind,
        depth=sublayer.layer + (encoder_layers if cross else 0),
        num_heads=1 if own else attention.n_heads,
        projections={role: f"{name}.{role}" for role in roles},
        single_key=single_token and sublayer.stack == "decoder" and not cross,
        constant_query=single_token and (sublayer.stack, sublayer.layer) == ("decoder", 0),
    )


def _feed_forward(sublayer: Sublayer) -> FeedForward:
    module: Any = sublayer.module
    name = f"{sublayer.name}.DenseReluDense"
    roles = ("wi", "wi_0", "wi_1", "wo")
    return FeedForward(
        name=name,
        stack=sublayer.stack,
        layer=sublayer.layer,
        sublayer=sublayer.index,
        projections={
            role: f"{name}.{role}" for role in roles if hasattr(module.DenseReluDense, role)
        },
    )


def token_table(model: Any) -> TokenTable | None:
    """The token embedding that an output head scores with, too; None: there is none, or factors."""
    if not (hasattr(model, "lm_head") and isinstance(model.shared, nn.Embedding)):
        return None
    return TokenTable(
        model.shared.num_embeddings, model.shared.embedding_dim, not has_own_head(model.config)
    )


def has_own_head(config: Any) -> bool:
    """Whether the output head of a T5 is untied from the token embedding, as in T5 1.1.

    In transformers 5 ``tie_word_embeddings`` is always true, and another key has this.
    """
    tied = getattr(config, "tie_word_embeddings", True)
    return not getattr(config, "scale_decoder_outputs", tied)


def tie_weights_(model: Any) -> None:
    """Tie shared weights; an untied output head stays untied, as in a stock load.

    ``model.tie_weights()`` of transformers 5 ties the head too, unless given the missing keys.
    """
    if isinstance(getattr(model, "shared", None), LowRankEmbedding):
        return  # one module, in all its places
    if not (isinstance(model, T5ForConditionalGeneration) and has_own_head(model.config)):
        model.tie_weights()
        return
    for stack in (model.encoder, model.decoder):
        stack.embed_tokens.weight = model.shared.weight


def shape_settings(shape: ModelShape) -> dict[str, Any]:
    """Arguments of a ``T5Config`` common to all fresh models.

    Raises
    ------
    RecipeError
        There is no decoder layer.
    """
    if shape.num_decoder_layers < 1:
        raise RecipeError(
            f"architecture: num_decoder_layers is {shape.num_decoder_layers}; give at least 1."
        )
    return {
        "d_model": shape.d_model,
        "d_kv": shape.d_kv,
        "d_ff": shape.d_ff,
        "num_layers": shape.num_layers,
        "num_decoder_layers": shape.num_decoder_layers,
        "num_heads": shape.num_heads,
        "dropout_rate": 0.0,
        "feed_forward_proj": "relu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
    }
