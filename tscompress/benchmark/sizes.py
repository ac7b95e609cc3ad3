"""Sizes of a model: parameters, bytes, key-value cache, multiply-accumulates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from chronos import BaseChronosPipeline
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tscompress.benchmark.workload import Workload, check_fits, forecast, settings, synthetic_batch
from tscompress.checkpoints.integrity import weight_files
from tscompress.errors import ModelNotFoundError
from tscompress.families.base import Pass
from tscompress.families.exported import ExportedModel
from tscompress.families.registry import adapter_of_model
from tscompress.layers.latent_cross_attention import LatentCrossAttention
from tscompress.layers.univariate import OwnValues
from tscompress.runtime.record import GRAPH_SUFFIX, is_exported


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; tied ones count once. Of an exported model, those of its source."""
    if isinstance(model, ExportedModel):
        return model.weights
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters in memory; tied ones count once. Of an exported model, its graph."""
    if isinstance(model, ExportedModel):
        return model.graph_bytes
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def bytes_on_disk(directory: Path) -> int:
    """Bytes of the weights of a checkpoint directory, or of an exported graph.

    Raises
    ------
    ModelNotFoundError
        There is no such file.
    """
    exported = is_exported(directory)
    files = list(directory.glob(f"*{GRAPH_SUFFIX}")) if exported else weight_files(directory)
    if not files:
        raise ModelNotFoundError(
            f"{directory} holds no *.safetensors file; give a checkpoint directory."
        )
    return sum(file.stat().st_size for file in files)


def kv_cache_bytes(
    model: nn.Module,
    workload: Workload,
    *,
    dtype: torch.dtype | None = None,
    shared_cross_attention: bool = False,
) -> int:
    """Bytes of the key-value cache at its fullest during one ``predict`` call.

    The cache holds the keys and values of every decoder layer: of its self-attention (over decoder
    tokens) and its cross-attention (over encoder tokens). A latent that all cross-attention reads
    is cached once:

    * Chronos-T5 keeps ``batch_size * num_samples`` rows, because the encoder output is repeated
      for each sample path. Encoder tokens are the context plus EOS, decoder tokens the horizon.
    * Chronos-Bolt takes one decoder step on ``batch_size`` rows. Its cache is held until the last
      layer is done, though it is not read again: patches plus REG, and one decoder token.
    * Chronos-2 has no decoder: 0.

    A horizon beyond the model's ``prediction_length`` is forecast in several passes over a growing
    context (for Bolt on ``batch_size * num_quantiles`` rows from the second pass on); the largest
    counts. Sizes are read from each attention module, so head sizes may differ by layer and the
    model may be on the meta device.

    Parameters
    ----------
    model
        ``pipeline.inner_model``.
    workload
        Gives ``batch_size``, ``context_length``, ``horizon`` and ``num_samples``.
    dtype
        Of the cached tensors; the model's by default.
    shared_cross_attention
        Whether the sample paths of a series share one row of cross-attention, as with
        :func:`tscompress.share_cross_attention`.
    """
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        return 0
    dtype = dtype or model_dtype(model)
    self_width = cross_width = 0  # values cached per token, over all layers
    for block in decoder.block:
        self_width += _cached_values_per_token(block.layer[0].SelfAttention)
        cross_width += _cached_values_per_token(block.layer[1].EncDecAttention)
    chronos_config: dict[str, Any] = model.config.chronos_config  # type: ignore[union-attr,assignment]

    def cached_values(one: Pass) -> int:
        rows = one.series * one.paths
        cross_rows = one.series if shared_cross_attention else rows
        return rows * self_width * one.outputs + cross_rows * cross_width * one.encoder_tokens

    passes = adapter_of_model(model).passes(chronos_config, workload)
    return max(map(cached_values, passes)) * dtype.itemsize


def model_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of the model's first parameter."""
    return next(model.parameters()).dtype


def _cached_values_per_token(attention: Any) -> int:
    if isinstance(attention, LatentCrossAttention):  # one latent for all layers
        return attention.cached_values
    if isinstance(attention, OwnValues):
        return 0
    return int(attention.k.out_features) + int(attention.v.out_features)


def count_macs(pipeline: BaseChronosPipeline, workload: Workload) -> int:
    """Multiply-accumulates of one ``predict`` call, over the whole batch.

    Counted on a real call, so decoder steps, sample paths, factored projections and attention
    (eager or fused) are exact. Element-wise operations are not counted. Takes about one run.

    Raises
    ------
    UsageError
        The workload does not fit the pipeline.
    """
    check_fits(pipeline, "the model", workload)
    # PyTorch counts fused attention on CUDA only; without this, attention on a CPU counts as 0.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={cpu_attention: _attention_flops})
    with settings(workload), counter:
        forecast(pipeline, synthetic_batch(workload), workload)
    return counter.get_total_flops() // 2


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Both matrix products of attention, from the shapes ``[B, heads, tokens, head size]``."""
    batch, heads, queries, head_size = query
    return 2 * batch * heads * queries * key[2] * (head_size + value[3])
