"""Check a ``config.json`` before a model is built and sampled from.

Sizes are checked against bounds before anything is built: a config of a billion layers would
exhaust memory before its weights are found not to fit. Keys that make transformers fetch or run
anything but the checkpoint's weights are refused, and so are settings of generation that Chronos
does not use: a million beams need no large file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tscompress.errors import CorruptCheckpointError, UnsupportedModelError
from tscompress.io.untrusted import shown

MAX_WIDTH = 2**24
_WIDTHS = (
    "d_model", "d_kv", "d_ff", "num_heads", "vocab_size", "relative_attention_num_buckets",
    "relative_attention_max_distance", "hidden_size", "intermediate_size", "num_attention_heads",
    "max_position_embeddings", "type_vocab_size", "embedding_size", "image_size", "patch_size",
    "num_channels", "mlp_ratio", "pooler_output_size", "num_mel_bins", "encoder_ffn_dim",
    "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads", "max_source_positions",
    "max_target_positions",
)  # fmt: skip
_LAYERS = (
    "num_layers", "num_decoder_layers", "num_hidden_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
#: Lower and upper bounds, inclusive.
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
    "top_k": MAX_WIDTH,
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

#: Settings of generation that chronos sets in every forecast.
_OVERRULED = (
    "do_sample", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "num_return_sequences", "temperature", "top_k", "top_p",
)  # fmt: skip
_BOOKKEEPING = ("_from_model_config", "transformers_version", "use_cache")
#: Neutral values of the other settings in transformers 4 and 5, besides null and false.
_NEUTRAL: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "generation_kwargs": {},
    "guidance_scale": None,
    "length_penalty": 1.0,
    "min_p": None,
    "no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "target_lookbehind": 10,
    "typical_p": 1.0,
    "watermarking_config": None,
}
#: Others, such as kernels from the Hub, are code.
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2")


def check_given(config: Mapping[str, Any], names: Sequence[str], source: str) -> None:
    """Refuse a config without a setting that forecasting needs.

    Raises
    ------
    CorruptCheckpointError
        One of ``names`` is missing or null.
    """
    for name in names:
        if config.get(name) is None:
            raise CorruptCheckpointError(f"{source!r}: its config has no {name}.")


def check_config(
    config: Mapping[str, Any], source: str, tensors: int, *, generates: bool = True
) -> None:
    """Refuse implausible sizes, and keys that would load anything but the weights.

    Parameters
    ----------
    tensors
        Number of tensors in the checkpoint, an upper bound of the number of layers.
    generates
        Whether forecasts are sampled, so that settings of generation are checked too.

    Raises
    ------
    CorruptCheckpointError
        A size is not an integer within bounds, or a setting is not a number.
    UnsupportedModelError
        It refers to other weights, an adapter, or code for its attention.
    """
    _check_redirections(config, source)
    for name in _WIDTHS:
        _check_whole(config, name, MAX_WIDTH, source)
    for name in _LAYERS:
        if config.get(name) is not None or name == "num_layers":
            _check_whole(config, name, tensors, source)
    _check_buckets(config, source)
    for name, bounds in _NUMBERS.items():
        _check_number(config, name, bounds, source)
    vocab_size = config.get("vocab_size", MAX_WIDTH)
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
    if generates:  # transformers 4 stored settings of generation here; they are still read
        given = {key: config[key] for key in _NEUTRAL if key in config}
        _check_neutral(given, source, "config.json")


def check_generation(settings: Any, source: str, vocab_size: int) -> None:
    """Refuse a ``generation_config.json`` that changes how forecasts are sampled.

    Raises
    ------
    CorruptCheckpointError
        It is not an object, or a token is not below ``vocab_size``.
    UnsupportedModelError
        It has a setting that Chronos does not use.
    """
    file = "generation_config.json"
    if not isinstance(settings, Mapping):
        raise CorruptCheckpointError(f"{source!r}: {file} is not an object.")
    rest = dict(settings)
    for name in (*_BOOKKEEPING, *_OVERRULED):
        rest.pop(name, None)
    for name in _TOKENS:
        value = rest.pop(name, None)
        for token in value if isinstance(value, list) and len(value) == 1 else [value]:
            if token is not None:
                _check_whole({name: token}, name, vocab_size - 1, source, lowest=0, file=file)
    _check_neutral(rest, source, file)


def _check_buckets(config: Mapping[str, Any], source: str) -> None:
    """Distances of T5 have a bucket each up to half of them, and share the others beyond."""
    names = ("relative_attention_num_buckets", "relative_attention_max_distance")
    buckets, furthest = config.get(names[0], 32), config.get(names[1], 128)
    if buckets < 4:
        raise _bad(names[0], buckets, "an integer from 4", source)
    if furthest <= buckets // 2:
        raise _bad(names[1], furthest, f"above {buckets // 2}, half of the buckets", source)


def _check_neutral(settings: Mapping[str, Any], source: str, file: str) -> None:
    for name, value in settings.items():
        if value not in (None, False) and value != _NEUTRAL.get(name):
            raise UnsupportedModelError(
                f"{source!r}: {file} has {shown(name)}: {shown(value)}, which Chronos does not "
                "use; remove the key."
            )


def _check_redirections(config: Mapping[str, Any], source: str) -> None:
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if config.get(name) not in _ATTENTION:
            raise UnsupportedModelError(
                f"{source!r}: config.json has {name} {shown(config[name])}; allowed: "
                f"{', '.join(filter(None, _ATTENTION))}. Remove the key."
            )
    for name in ("transformers_weights", "quantization_config"):
        if config.get(name) is not None:
            raise UnsupportedModelError(
                f"{source!r}: config.json has {name}; tscompress reads only weights in "
                "model.safetensors. Save the model without it."
            )


def _check_forecast(forecast: Mapping[str, Any], vocab_size: int, source: str) -> None:
    """Check ``chronos_config``: forecasting allocates memory for horizons and samples."""
    for name, highest in _FORECAST_WIDTHS.items():
        _check_whole(forecast, name, highest, source)
    for name, bounds in _FORECAST_NUMBERS.items():
        _check_number(forecast, name, bounds, source)
    # Every token has a row in the embedding and a bin in the tokenizer, hence the same bound.
    _check_whole(forecast, "n_tokens", vocab_size, source)
    _check_whole(forecast, "n_special_tokens", vocab_size, source)
    tokenizer = forecast.get("tokenizer_class", "MeanScaleUniformBins")
    if tokenizer != "MeanScaleUniformBins":
        raise UnsupportedModelError(
            f"{source!r}: config.json has tokenizer_class {shown(tokenizer)}; "
            "supported: MeanScaleUniformBins."
        )
    special = forecast.get("n_special_tokens", 0)
    if "n_tokens" in forecast and forecast["n_tokens"] < special + 3:
        allowed = f"at least {special + 3}: three bins and the special tokens"
        raise _bad("n_tokens", forecast["n_tokens"], allowed, source)
    limits = forecast.get("tokenizer_kwargs", {})
    if not isinstance(limits, Mapping):
        raise _bad("tokenizer_kwargs", limits, "an object", source)
    ends = ("low_limit", "high_limit")
    for name in ends:
        _check_number(limits, name, (-1e6, 1e6), source)
    if all(name in limits for name in ends) and not limits[ends[0]] < limits[ends[1]]:
        raise _bad("high_limit", limits[ends[1]], f"above low_limit, {limits[ends[0]]}", source)
    levels = forecast.get("quantiles")
    if levels is not None and not _are_levels(levels):
        raise _bad(
            "quantiles", levels, f"at most {_MAX_QUANTILES} ascending numbers in (0, 1)", source
        )


def _are_levels(levels: Any) -> bool:
    if not isinstance(levels, list) or not 0 < len(levels) <= _MAX_QUANTILES:
        return False
    numbers = all(_is_number(level) and 0 < level < 1 for level in levels)
    return numbers and levels == sorted(set(levels))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(
    settings: Mapping[str, Any],
    name: str,
    highest: int,
    source: str,
    *,
    lowest: int = 1,
    file: str = "config.json",
) -> None:
    if name not in settings:
        return
    value = settings[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not lowest <= value <= highest:
        raise _bad(name, value, f"an integer from {lowest} to {highest:,}", source, file)


def _check_number(
    settings: Mapping[str, Any], name: str, bounds: tuple[float, float], source: str
) -> None:
    if name not in settings:
        return
    value = settings[name]
    low, high = bounds
    if not _is_number(value) or not low <= value <= high:  # NaN is in no bounds
        raise _bad(name, value, f"a number from {low:g} to {high:g}", source)


def _bad(
    name: str, value: Any, allowed: str, source: str, file: str = "config.json"
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{source!r}: {file} has {name} {shown(value)}; it must be {allowed}. "
        "Fetch the checkpoint again."
    )
