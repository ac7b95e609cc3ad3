"""Whether a ``config.json`` is one that a model may be built from.

Sizes are held against bounds before anything is built: a config of a billion layers would take the
machine down long before its weights were found not to fit. Keys that make transformers fetch or run
something else than the checkpoint's weights are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tscompress.errors import CorruptCheckpointError, UnsupportedModelError
from tscompress.readers import shown

_MAX_WIDTH = 2**24
_WIDTHS = (
    "d_model", "d_kv", "d_ff", "num_heads", "vocab_size", "relative_attention_num_buckets",
    "relative_attention_max_distance", "hidden_size", "intermediate_size", "num_attention_heads",
    "max_position_embeddings", "type_vocab_size", "embedding_size",
)  # fmt: skip
_LAYERS = ("num_layers", "num_decoder_layers", "num_hidden_layers")
#: Bounds of numbers, both inclusive.
_NUMBERS: dict[str, tuple[float, float]] = {
    "layer_norm_epsilon": (0, 1),
    "layer_norm_eps": (0, 1),
    "dropout_rate": (0, 1),
    "initializer_factor": (0, 1e6),
    "rope_theta": (1e-6, 1e12),
}

_TOKENS = (
    "pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "reg_token_id",
)  # fmt: skip
_FLAGS = (
    "is_encoder_decoder", "is_decoder", "is_gated_act", "use_cache", "tie_word_embeddings",
    "scale_decoder_outputs", "use_reg_token", "use_arcsinh", "use_eos_token",
)  # fmt: skip

_MAX_STEPS = 2**24
_FORECAST_WIDTHS: dict[str, int] = {
    "context_length": _MAX_STEPS,
    "prediction_length": 2**20,
    "num_samples": 10_000,
    "top_k": _MAX_WIDTH,
    "input_patch_size": 2**16,
    "input_patch_stride": 2**16,
    "output_patch_size": 2**16,
    "max_output_patches": 2**16,
    "time_encoding_scale": _MAX_STEPS,
}
_FORECAST_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (1e-6, 1e6),
    "top_p": (1e-6, 1),
}
_MAX_QUANTILES = 1000
#: The Hub's kernels, which these are not, are code.
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2")


def check_config(config: Mapping[str, Any], source: str, tensors: int) -> None:
    """Refuse what no model has, or what would load something else.

    Parameters
    ----------
    tensors
        How many the checkpoint stores: it cannot have more layers.

    Raises
    ------
    CorruptCheckpointError
        A size is no whole number within bounds, or a setting is no number.
    UnsupportedModelError
        It names other weights, an adapter, or code for its attention.
    """
    _check_redirections(config, source)
    for name in _WIDTHS:
        _check_whole(config, name, _MAX_WIDTH, source)
    for name in _LAYERS:
        if config.get(name) is not None or name == "num_layers":
            _check_whole(config, name, tensors, source)
    for name, bounds in _NUMBERS.items():
        _check_number(config, name, bounds, source)
    vocab_size = config.get("vocab_size", _MAX_WIDTH)
    forecast = config.get("chronos_config")
    for settings in (config, forecast if isinstance(forecast, Mapping) else {}):
        for name in _TOKENS:
            if settings.get(name) is not None:
                _check_whole(settings, name, max(vocab_size, 2) - 1, source, lowest=0)
        for name in _FLAGS:
            if not isinstance(settings.get(name, False), bool):
                raise _bad(name, settings[name], "true or false", source)
    if isinstance(forecast, Mapping):
        _check_forecast(forecast, vocab_size, source)


def _check_redirections(config: Mapping[str, Any], source: str) -> None:
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if config.get(name) not in _ATTENTION:
            raise UnsupportedModelError(
                f"{source!r}: config.json asks for {name} {shown(config[name])}; allowed: "
                f"{', '.join(filter(None, _ATTENTION))}. Remove the key."
            )
    for name in ("transformers_weights", "quantization_config"):
        if config.get(name) is not None:
            raise UnsupportedModelError(
                f"{source!r}: config.json has {name}; tscompress reads plain weights from "
                "model.safetensors. Save the model without it."
            )


def _check_forecast(forecast: Mapping[str, Any], vocab_size: int, source: str) -> None:
    """``chronos_config``: horizons and samples are allocated when a forecast is made."""
    for name, highest in _FORECAST_WIDTHS.items():
        _check_whole(forecast, name, highest, source)
    for name, bounds in _FORECAST_NUMBERS.items():
        _check_number(forecast, name, bounds, source)
    # Every token has a row in the embedding and a bin in the tokenizer.
    _check_whole(forecast, "n_tokens", vocab_size, source)
    _check_whole(forecast, "n_special_tokens", vocab_size, source)
    tokenizer = forecast.get("tokenizer_class", "MeanScaleUniformBins")
    if tokenizer != "MeanScaleUniformBins":
        raise UnsupportedModelError(
            f"{source!r}: config.json has tokenizer_class {shown(tokenizer)}; "
            "supported: MeanScaleUniformBins."
        )
    limits = forecast.get("tokenizer_kwargs", {})
    if not isinstance(limits, Mapping):
        raise _bad("tokenizer_kwargs", limits, "an object", source)
    for name in ("low_limit", "high_limit"):
        _check_number(limits, name, (-1e6, 1e6), source)
    levels = forecast.get("quantiles")
    if levels is not None and not _are_levels(levels):
        raise _bad(
            "quantiles", levels, f"at most {_MAX_QUANTILES} rising numbers in (0, 1)", source
        )


def _are_levels(levels: Any) -> bool:
    if not isinstance(levels, list) or not 0 < len(levels) <= _MAX_QUANTILES:
        return False
    numbers = all(_is_number(level) and 0 < level < 1 for level in levels)
    return numbers and levels == sorted(set(levels))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(
    settings: Mapping[str, Any], name: str, highest: int, source: str, *, lowest: int = 1
) -> None:
    if name not in settings:
        return
    value = settings[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not lowest <= value <= highest:
        raise _bad(name, value, f"a whole number from {lowest} to {highest:,}", source)


def _check_number(
    settings: Mapping[str, Any], name: str, bounds: tuple[float, float], source: str
) -> None:
    if name not in settings:
        return
    value = settings[name]
    low, high = bounds
    if not _is_number(value) or math.isnan(value) or not low <= value <= high:
        raise _bad(name, value, f"a number from {low:g} to {high:g}", source)


def _bad(name: str, value: Any, allowed: str, source: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{source!r}: config.json has {name} {shown(value)}; it must be {allowed}. "
        "Fetch the checkpoint again."
    )
