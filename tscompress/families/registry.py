"""The supported families: how they are told apart, and how their models are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tscompress.errors import UnsupportedModelError
from tscompress.io.untrusted import shown
from tscompress.plan.architecture import (
    STACKS,
    Architecture,
    AttentionBlock,
    BlockKind,
    FeedForward,
)


@dataclass(frozen=True)
class Family:
    """How to recognise a family by its config and how to take its models apart."""

    recognises: Callable[[Mapping[str, Any]], bool]
    describe: Callable[[str, nn.Module], Architecture]
    forecasts: bool


def family_of(config: Mapping[str, Any]) -> str:
    """Name of the family of a ``config.json``.

    Raises
    ------
    UnsupportedModelError
        No family recognises the config.
    """
    for name, family in FAMILIES.items():
        if family.recognises(config):
            return name
    kind = config.get("model_type", "model without model_type")
    raise UnsupportedModelError(
        f"a {shown(kind)} checkpoint is not supported; supported families: {', '.join(FAMILIES)}."
    )


def describe(family: str, model: nn.Module) -> Architecture:
    """The architecture of ``model``, which belongs to ``family``.

    Raises
    ------
    UnsupportedModelError
        Its cross-attention reads a latent already.
    """
    return FAMILIES[family].describe(family, model)


# --------------------------------------------------------------------------------------------------
# T5 stacks: Chronos-T5, Chronos-Bolt, T5
# --------------------------------------------------------------------------------------------------


def _describe_t5(family: str, model: nn.Module) -> Architecture:
    attention: list[AttentionBlock] = []
    feed_forward: list[FeedForward] = []
    encoder_layers = len(model.encoder.block)  # type: ignore[union-attr, arg-type]
    for stack in STACKS:
        if getattr(model, stack, None) is None:
            continue
        for depth, block in enumerate(getattr(model, stack).block):
            for index, layer in enumerate(block.layer):
                prefix = f"{stack}.block.{depth}.layer.{index}"
                if hasattr(layer, "SelfAttention"):
                    kind: BlockKind = "encoder" if stack == "encoder" else "decoder"
                    name = f"{prefix}.SelfAttention"
                    heads = layer.SelfAttention.n_heads
                    attention.append(AttentionBlock(name, kind, depth, heads, _children(name)))
                elif hasattr(layer, "EncDecAttention"):
                    name = f"{prefix}.EncDecAttention"
                    if not hasattr(layer.EncDecAttention, "k"):
                        raise UnsupportedModelError(
                            f"{name} reads a latent and has no keys and values to look at; "
                            "profile or compress the original checkpoint."
                        )
                    heads = layer.EncDecAttention.n_heads
                    attention.append(
                        AttentionBlock(
                            name, "cross", encoder_layers + depth, heads, _children(name)
                        )
                    )
                else:
                    name = f"{prefix}.DenseReluDense"
                    roles = [
                        role
                        for role in ("wi", "wi_0", "wi_1", "wo")
                        if hasattr(layer.DenseReluDense, role)
                    ]
                    feed_forward.append(
                        FeedForward(name, depth, {role: f"{name}.{role}" for role in roles})
                    )
    return Architecture(family, tuple(attention), tuple(feed_forward))


def _describe_chronos2(family: str, model: nn.Module) -> Architecture:
    attention: list[AttentionBlock] = []
    feed_forward: list[FeedForward] = []
    kinds: tuple[BlockKind, BlockKind] = ("time", "group")
    for depth, block in enumerate(model.encoder.block):  # type: ignore[union-attr, arg-type]
        for index, kind in enumerate(kinds):
            name = f"encoder.block.{depth}.layer.{index}.self_attention"
            heads = block.layer[index].self_attention.n_heads
            attention.append(AttentionBlock(name, kind, depth, heads, _children(name)))
        name = f"encoder.block.{depth}.layer.2.mlp"
        feed_forward.append(
            FeedForward(name, depth, {role: f"{name}.{role}" for role in ("wi", "wo")})
        )
    return Architecture(family, tuple(attention), tuple(feed_forward))


def _describe_bert(family: str, model: nn.Module) -> Architecture:
    attention: list[AttentionBlock] = []
    feed_forward: list[FeedForward] = []
    for name, module in model.named_modules():
        if not all(hasattr(module, child) for child in ("attention", "intermediate", "output")):
            continue
        depth = len(attention)
        inner = f"{name}.attention.self"
        projections = {
            "q": f"{inner}.query",
            "k": f"{inner}.key",
            "v": f"{inner}.value",
            "o": f"{name}.attention.output.dense",
        }
        heads = model.config.num_attention_heads  # type: ignore[union-attr]
        attention.append(AttentionBlock(f"{name}.attention", "encoder", depth, heads, projections))  # type: ignore[arg-type]
        feed_forward.append(
            FeedForward(
                name, depth, {"wi": f"{name}.intermediate.dense", "wo": f"{name}.output.dense"}
            )
        )
    return Architecture(family, tuple(attention), tuple(feed_forward))


def _children(attention: str) -> dict[str, str]:
    return {role: f"{attention}.{role}" for role in "qkvo"}


def _pipeline_class(config: Mapping[str, Any]) -> str | None:
    if "chronos_pipeline_class" in config:
        return str(config["chronos_pipeline_class"])
    # The first Chronos-T5 checkpoints carry a chronos_config and no pipeline class.
    return "ChronosPipeline" if "chronos_config" in config else None


def _is_chronos_t5(config: Mapping[str, Any]) -> bool:
    return (
        _pipeline_class(config) == "ChronosPipeline"
        and config.get("chronos_config", {}).get("model_type", "seq2seq") == "seq2seq"
    )


FAMILIES: dict[str, Family] = {
    "chronos-t5": Family(_is_chronos_t5, _describe_t5, forecasts=True),
    "chronos-bolt": Family(
        lambda config: _pipeline_class(config) == "ChronosBoltPipeline", _describe_t5, True
    ),
    "chronos-2": Family(
        lambda config: _pipeline_class(config) == "Chronos2Pipeline", _describe_chronos2, True
    ),
    "t5": Family(
        lambda config: config.get("model_type") in ("t5", "mt5") and not _pipeline_class(config),
        _describe_t5,
        forecasts=False,
    ),
    "bert": Family(
        lambda config: config.get("model_type") in ("bert", "roberta", "electra", "xlm-roberta"),
        _describe_bert,
        forecasts=False,
    ),
}
