"""Sample paths of Chronos-T5 that share the cross-attention keys and values of their series.

Chronos-T5 samples many paths of each series, 20 by default. Stock generation repeats the encoder's
output for each path, so every layer projects, caches and reads the same cross-attention keys and
values once per path. Here they exist once per series, and its paths are further queries of one
attention: the same products in the same precision, without 19 in 20 projections, cached bytes and
reads. For prompts of language models this is bifurcated attention (Athiwaratkun et al., 2024,
arXiv:2403.08845).

No weights and no files change: this is another way to run a stock, folded or factored model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from chronos import BaseChronosPipeline, ChronosPipeline
from chronos.chronos import ChronosModel
from torch import Tensor
from transformers import GenerationConfig, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5LayerCrossAttention

from tscompress.errors import UnsupportedModelError
from tscompress.layers.sized_attention import bare


def share_cross_attention(pipeline: BaseChronosPipeline) -> ChronosPipeline:
    """A pipeline around the same model whose sample paths share cross-attention keys and values.

    Forecasts equal those of ``pipeline`` up to rounding, with the same random numbers. Savings of
    time and memory grow with the context and the number of paths.

    Parameters
    ----------
    pipeline
        Of Chronos-T5, from chronos or from :func:`tscompress.load`. Its own forecasts are
        unchanged: the decoder layers share only when called by the new pipeline.

    Raises
    ------
    UnsupportedModelError
        The model does not sample paths with a decoder, or hooks call its layers, as those of
        accelerate do.
    """
    model = getattr(pipeline, "inner_model", None)
    if not isinstance(pipeline, ChronosPipeline) or not isinstance(
        model, T5ForConditionalGeneration
    ):
        raise UnsupportedModelError(
            f"a {type(pipeline).__name__} has no sample paths to share keys and values; only "
            "Chronos-T5 does."
        )
    if _are_hooked(model):
        raise UnsupportedModelError(
            "the layers of this model are called by hooks, as of accelerate (device_map), which "
            "would leave the sharing out; load it onto one device."
        )
    _share_layers_(model)
    sharing = SharingChronosModel(config=pipeline.model.config, model=model)
    return ChronosPipeline(tokenizer=pipeline.tokenizer, model=sharing)


def shares_cross_attention(pipeline: BaseChronosPipeline) -> bool:
    """Whether the sample paths of ``pipeline`` share cross-attention keys and values."""
    return isinstance(getattr(pipeline, "model", None), SharingChronosModel)


@contextmanager
def cross_attention_shared(pipeline: BaseChronosPipeline) -> Iterator[None]:
    """Inside, a stock Chronos-T5 is as after :func:`share_cross_attention`; others are as before.

    Unlike there, it is the given pipeline that shares, so its other methods keep their meaning, and
    all is as before at the end. Layers that are called in another way than by their class, as by
    the hooks of accelerate, are left alone.
    """
    plain: Any = getattr(pipeline, "model", None)
    if type(plain) is not ChronosModel or not isinstance(plain.model, T5ForConditionalGeneration):
        yield
        return
    layers = [block.layer for block in plain.model.decoder.block]
    before = [of_block[1] for of_block in layers]
    if _are_hooked(plain.model):
        yield
        return
    sharing: Any = pipeline
    try:
        _share_layers_(plain.model)
        sharing.model = SharingChronosModel(config=plain.config, model=plain.model)
        yield
    finally:
        sharing.model = plain
        for of_block, layer in zip(layers, before, strict=True):
            of_block[1] = layer


def _are_hooked(model: T5ForConditionalGeneration) -> bool:
    """Whether a cross-attention is called in another way than by its class."""
    layers = [block.layer[1] for block in model.decoder.block]
    return any("forward" in vars(layer) or layer._forward_pre_hooks for layer in layers)


def _share_layers_(model: T5ForConditionalGeneration) -> None:
    for block in model.decoder.block:
        if not isinstance(block.layer[1], SharedCrossAttention):
            block.layer[1] = bare(SharedCrossAttention, block.layer[1])


class SharedCrossAttention(T5LayerCrossAttention):  # type: ignore[misc]
    """Decoder cross-attention in which several rows may read one row of the encoder's output.

    With equal numbers of rows it is the stock layer.
    """

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """As ``T5LayerCrossAttention.forward``.

        Parameters
        ----------
        hidden_states
            ``[B * P, T, d_model]``, the P rows of each series one after the other.
        key_value_states
            ``[B, S, d_model]``.
        attention_mask
            ``[B, 1, 1 or T, S]``.

        Attention weights, if requested, are ``[B, heads, P * T, S]``.
        """
        shape, series = hidden_states.shape, len(key_value_states)
        if shape[0] > series:
            # T5's cross-attention has no relative bias, so paths may be treated as tokens.
            hidden_states = hidden_states.reshape(series, -1, shape[-1])
            if attention_mask is not None and attention_mask.shape[-2] > 1:
                attention_mask = attention_mask.repeat(1, 1, shape[0] // series, 1)
        output, *rest = super().forward(
            hidden_states, key_value_states, attention_mask=attention_mask, **options
        )
        return output.reshape(shape), *rest


class SharingChronosModel(ChronosModel):  # type: ignore[misc]
    """Chronos-T5's model that encodes each series once, for all of its paths."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prediction_length: int | None = None,
        num_samples: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:
        """Token ids ``[B, num_samples, prediction_length]``, as ``ChronosModel.forward``.

        Options that are None default to the checkpoint's ``chronos_config``.
        """
        config = self.config
        steps = config.prediction_length if prediction_length is None else prediction_length
        paths = config.num_samples if num_samples is None else num_samples
        encoded = self.model.encoder(input_ids=input_ids, attention_mask=attention_mask)
        states = encoded.last_hidden_state.as_subclass(_OnceASeries)
        generated = self.model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=attention_mask.as_subclass(_OnceASeries),
            generation_config=GenerationConfig(
                min_new_tokens=steps,
                max_new_tokens=steps,
                do_sample=True,
                num_return_sequences=paths,
                eos_token_id=config.eos_token_id,
                pad_token_id=config.pad_token_id,
                temperature=config.temperature if temperature is None else temperature,
                top_k=config.top_k if top_k is None else top_k,
                top_p=config.top_p if top_p is None else top_p,
            ),
        )
        return generated[:, 1:].reshape(len(input_ids), paths, -1)  # type: ignore[no-any-return]


class _OnceASeries(Tensor):
    """A tensor with one row per series that is not repeated for each path.

    ``generate`` calls ``repeat_interleave`` on each of its tensors before the first step, in all
    versions of transformers since 4.49. This tensor returns itself.
    """

    # As for nn.Parameter: results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def repeat_interleave(self, *_: Any, **__: Any) -> Tensor:
        """Itself."""
        return self
