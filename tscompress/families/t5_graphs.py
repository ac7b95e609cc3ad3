"""Graphs of Chronos-T5: an encoder, which runs once a series, and one step of the decoder.

The encoder's graph ends in the keys and values that cross-attention reads, so that these exist once
a series, whatever the number of its paths. A step of the decoder reads keys and values of the steps
before from slots that its caller keeps, and gives those of its own token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tscompress.families.graphs import GraphSource
from tscompress.families.t5_stack import has_own_head
from tscompress.layers.latent_cross_attention import LatentCrossAttention
from tscompress.layers.low_rank import LowRankLinear
from tscompress.runtime.contexts import stacked
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.t5_names import (
    DECODER_FILE,
    ENCODER_FILE,
    LOGITS,
    cross_names,
    past_names,
    step_names,
)
from tscompress.runtime.tokens import IntArray

#: Tokens of each path by which a graph is compared: more than the slots that are added at once.
_COMPARED_STEPS = 20
#: Of a token embedding of lower rank; in 8 bits it would round all that enters the stream.
_EMBEDDED = "embed_tokens.up"

NOTES = """\
`encoder.onnx` runs once a series, and gives the keys and values of cross-attention. `decoder.onnx`
is one step of all paths: it reads the keys and values of the steps before in slots, of which
`position` are in use, and gives those of its own token and the `logits` of the next."""


def compared_logits(
    pipeline: Any, forecaster: Any, contexts: Sequence[FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Logits ``[B, P, N, V]`` of a graph and its source after random tokens, two paths a series."""
    context = stacked([np.asarray(one, np.float32) for one in contexts])
    settings = pipeline.inner_model.config.chronos_config
    shape = (len(context), 2, _COMPARED_STEPS)
    draw = np.random.default_rng(0)
    tokens = draw.integers(settings["n_special_tokens"], settings["n_tokens"], shape)
    return forecaster.logits(context, tokens), _stock_logits(pipeline, context, tokens)


def _stock_logits(pipeline: Any, context: FloatArray, tokens: IntArray) -> FloatArray:
    model, paths = pipeline.inner_model, tokens.shape[1]
    read, observed, _ = pipeline.tokenizer.context_input_transform(torch.from_numpy(context))
    chosen = torch.from_numpy(tokens).flatten(0, 1)  # [B P, N]
    start = torch.full_like(chosen[:, :1], model.config.decoder_start_token_id)
    device = model.device
    with torch.no_grad():
        found = model(
            input_ids=read.repeat_interleave(paths, dim=0).to(device),
            attention_mask=observed.repeat_interleave(paths, dim=0).to(device),
            decoder_input_ids=torch.cat([start, chosen[:, :-1]], dim=1).to(device),
            use_cache=False,
        ).logits
    logits: FloatArray = found.float().cpu().reshape(*tokens.shape, -1).numpy()
    return logits


def t5_sources(model: nn.Module) -> Mapping[str, GraphSource]:
    """File to what is exported of a Chronos-T5, which is copied."""
    copied: Any = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    encoder, decoder = T5EncoderGraph(copied), T5DecoderGraph(copied)
    tokens, observed = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5)
    inputs = {"tokens": tokens, "observed": observed}
    with torch.no_grad():
        found = encoder(tokens, observed)
    cross = dict(zip(cross_names(len(found) // 2), found, strict=True))
    free = {0: "batch", 1: "steps"}
    past = decoder.empty_past(paths=3, slots=4)
    return {
        ENCODER_FILE: GraphSource(
            module=encoder,
            inputs=inputs,
            sizes={"tokens": free, "observed": free},
            outputs=tuple(cross),
            whole=(_EMBEDDED,),
            weights_only=True,
        ),
        DECODER_FILE: GraphSource(
            module=decoder,
            inputs={
                "tokens": tokens[:, :3],
                "position": torch.tensor(2),
                "observed": observed,
                **past,
                **cross,
            },
            listed=len(past) + len(cross),
            sizes={
                "tokens": {0: "batch", 1: "paths"},
                "position": {},
                "observed": free,
                **{name: {0: "batch", 1: "paths", 3: "slots"} for name in past},
                **{name: {0: "batch", 3: "steps"} for name in cross},
            },
            outputs=(LOGITS, *step_names(len(past) // 2)),
            whole=(_EMBEDDED, "lm_head"),
            weights_only=True,
        ),
    }


class T5EncoderGraph(nn.Module):
    """From tokens to the keys and values that the decoder's cross-attention reads.

    Parameters
    ----------
    model
        In float32; stock, or with factors, head sizes of its own or a latent.
    """

    offsets: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        stack = model.encoder
        self.embed_tokens, self.block = stack.embed_tokens, stack.block
        self.final_layer_norm = stack.final_layer_norm
        self.cross = nn.ModuleList(_cross_projections(model))
        self.heads = [block.layer[1].EncDecAttention.n_heads for block in model.decoder.block]
        attention = stack.block[0].layer[0].SelfAttention
        self.furthest = int(attention.relative_attention_max_distance)
        self.register_buffer("offsets", _bias_of_offsets(attention, self.furthest))

    def forward(self, tokens: Tensor, observed: Tensor) -> tuple[Tensor, ...]:
        """Keys and values ``[B, H, d, T]`` of each decoder layer; a latent has one head.

        Parameters
        ----------
        tokens, observed
            ``[B, T]``; 1 where a token is attended to.
        """
        hidden = self.embed_tokens(tokens)
        bias = self._bias(tokens.shape[1]) + _additive(observed)[:, None, None]  # [B, H, T, T]
        for block in self.block:
            layer = block.layer[0]
            attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
            queries, keys, values = (
                _heads(_projected(part, normed), attention.n_heads).transpose(1, 2)
                for part in (attention.q, attention.k, attention.v)
            )
            weights = (queries @ keys.transpose(-1, -2) + bias).softmax(-1)
            mixed = (weights @ values).transpose(1, 2).flatten(2)
            hidden = block.layer[-1](hidden + _projected(attention.o, mixed))
        return self._cross_states(self.final_layer_norm(hidden))

    def _bias(self, steps: int) -> Tensor:
        """``[1, H, T, T]``, of the distance from query to key."""
        time = torch.arange(steps)
        offset = (time[None] - time[:, None]).clamp(-self.furthest, self.furthest)
        return self.offsets[offset + self.furthest].permute(2, 0, 1)[None]

    def _cross_states(self, encoded: Tensor) -> tuple[Tensor, ...]:
        found = []
        for parts, heads in zip(self.cross, self.heads, strict=False):
            states = [_projected(part, encoded) for part in parts]  # type: ignore[attr-defined]
            keys, values = (states[0], states[-1])
            count = heads if len(states) == 2 else 1  # a latent is read by all heads
            # Few queries read them: so stored, onnxruntime multiplies with both the fastest.
            found += [_heads(one, count).permute(0, 2, 3, 1) for one in (keys, values)]
        return tuple(found)


class T5DecoderGraph(nn.Module):
    """One token of each path: logits of the next, and keys and values of this one.

    Parameters
    ----------
    model
        As of :class:`T5EncoderGraph`.
    """

    distances: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        stack, config = model.decoder, model.config
        self.embed_tokens, self.block = stack.embed_tokens, stack.block
        self.final_layer_norm, self.lm_head = stack.final_layer_norm, model.lm_head
        self.scale = 1.0 if has_own_head(config) else float(config.d_model) ** -0.5
        attention = stack.block[0].layer[0].SelfAttention
        self.furthest = int(attention.relative_attention_max_distance)
        past = _bias_of_offsets(attention, self.furthest)[: self.furthest + 1]
        self.register_buffer("distances", past.flip(0).contiguous())  # [D + 1, H]

    def empty_past(self, paths: int, slots: int) -> dict[str, Tensor]:
        """Zeros of the shapes of keys and values, for two series."""
        shapes: list[tuple[int, int]] = []
        for block in self.block:
            attention: Any = block.layer[0].SelfAttention
            outputs = (_out_features(part) for part in (attention.k, attention.v))
            shapes += [(attention.n_heads, size // attention.n_heads) for size in outputs]
        zeros = [torch.zeros(2, paths, heads, slots, size) for heads, size in shapes]
        return dict(zip(past_names(len(self.block)), zeros, strict=True))

    def forward(
        self, tokens: Tensor, position: Tensor, observed: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits ``[B, P, V]``, and keys and values ``[B, P, H, 1, d]`` of each layer.

        Parameters
        ----------
        tokens
            ``[B, P]``, of P paths of each series.
        position
            Tokens before this one, a number; the first is the decoder's start.
        observed
            ``[B, T]``, as of the encoder.
        states
            Keys and values ``[B, P, H, C, d]`` of each layer, of which the first ``position`` slots
            are read; then those of cross-attention, as the encoder gives them.
        """
        past, cross = states[: 2 * len(self.block)], states[2 * len(self.block) :]
        hidden = self.embed_tokens(tokens)
        bias = self._bias(position, past[0].shape[3])  # [H, 1, C]
        masked = _additive(observed)[:, None, None]
        own: list[Tensor] = []
        for index, block in enumerate(self.block):
            layers: Any = block.layer
            mixed, *new = self._attended(layers[0], hidden, past[2 * index : 2 * index + 2], bias)
            hidden, own = hidden + mixed, own + new
            first = 2 * index if len(cross) > 2 else 0  # of a latent there is one for all layers
            hidden = hidden + _crossed(layers[1], hidden, cross[first : first + 2], masked)
            hidden = layers[-1](hidden)
        logits = self.lm_head(self.final_layer_norm(hidden) * self.scale)
        return (logits, *own)

    def _bias(self, position: Tensor, slots: int) -> Tensor:
        """``[H, 1, C]``: of the distance of each slot, and closed from ``position`` on."""
        slot = torch.arange(slots)
        distance = (position - slot).clamp(0, self.furthest)
        bias = self.distances[distance].transpose(0, 1)  # [H, C]
        return torch.where(slot < position, bias, torch.finfo(bias.dtype).min)[:, None]

    def _attended(
        self, layer: Any, hidden: Tensor, past: list[Tensor], bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output ``[B, P, d_model]`` of self-attention; the token's keys and values."""
        attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
        queries, key, value = (
            _heads(_projected(part, normed), attention.n_heads)[..., None, :]
            for part in (attention.q, attention.k, attention.v)
        )  # [B, P, H, 1, d]
        keys, values = past
        before = queries @ keys.transpose(-1, -2) + bias  # [B, P, H, 1, C]
        here = (queries * key).sum(-1, keepdim=True) + self.distances[0][:, None, None]
        weights = torch.cat([here, before], dim=-1).softmax(-1)
        mixed = weights[..., 1:] @ values + weights[..., :1] * value
        return _projected(attention.o, mixed.flatten(2)), key, value


def _crossed(layer: Any, hidden: Tensor, cross: list[Tensor], masked: Tensor) -> Tensor:
    """Output ``[B, P, d_model]`` of cross-attention; paths are queries of one attention."""
    attention, (keys, values) = layer.EncDecAttention, cross
    queries = _heads(_projected(attention.q, layer.layer_norm(hidden)), attention.n_heads)
    shape = queries.shape  # [B, P, H, d]
    if isinstance(attention, LatentCrossAttention):
        queries = queries.flatten(1, 2)[:, None]
    else:
        queries = queries.transpose(1, 2)
    mixed = (queries @ keys + masked).softmax(-1) @ values.transpose(-1, -2)
    if isinstance(attention, LatentCrossAttention):
        mixed = mixed.reshape(shape[0], shape[1], -1)
    else:
        mixed = mixed.transpose(1, 2).flatten(2)
    return _projected(attention.o, mixed)


def _cross_projections(model: Any) -> list[nn.ModuleList]:
    """Of each decoder layer, what makes keys and values; of a latent, the one projection."""
    layers = [block.layer[1].EncDecAttention for block in model.decoder.block]
    if isinstance(layers[0], LatentCrossAttention):
        return [nn.ModuleList([layers[0].down])]
    return [nn.ModuleList([layer.k, layer.v]) for layer in layers]


def _bias_of_offsets(attention: Any, furthest: int) -> Tensor:
    """``[2 D + 1, H]``, of keys from D steps before to D after; beyond, it stays the same."""
    steps = 2 * furthest + 1
    bias: Tensor = attention.compute_bias(steps, steps)  # [1, H, steps, steps]
    return bias[0, :, furthest].transpose(0, 1).detach().contiguous()


def _additive(observed: Tensor) -> Tensor:
    """0 where observed, the lowest number elsewhere."""
    return torch.where(observed > 0, 0.0, torch.finfo(observed.dtype).min)


def _heads(states: Tensor, count: int) -> Tensor:
    """``[..., H, d]`` of ``[..., H d]``."""
    return torch.unflatten(states, -1, (count, -1))


def _projected(projection: Any, hidden: Tensor) -> Tensor:
    """A linear layer or two factors; values of a head size of their own stay a plain tensor."""
    if isinstance(projection, LowRankLinear):
        return _projected(projection.left, _projected(projection.right, hidden))
    return F.linear(hidden, projection.weight, projection.bias)


def _out_features(projection: Any) -> int:
    return int(projection.out_features)
