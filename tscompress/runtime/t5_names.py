"""Files of an exported Chronos-T5, and the names of inputs and outputs of its graphs."""

from __future__ import annotations

ENCODER_FILE, DECODER_FILE = "encoder.onnx", "decoder.onnx"
LOGITS = "logits"


def past_names(layers: int) -> tuple[str, ...]:
    """Keys and values of the tokens before, ``[B, P, H, C, d]``: inputs of the decoder."""
    return _names("keys", "values", layers)


def step_names(layers: int) -> tuple[str, ...]:
    """Keys and values of the token itself, ``[B, P, H, 1, d]``: outputs of the decoder."""
    return _names("key", "value", layers)


def cross_names(layers: int) -> tuple[str, ...]:
    """Keys and values ``[B, H, d, T]`` of cross-attention.

    Outputs of the encoder and inputs of the decoder. A latent is one layer with one head.
    """
    return _names("cross_keys", "cross_values", layers)


def _names(keys: str, values: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{one}_{layer}" for layer in range(layers) for one in (keys, values))
