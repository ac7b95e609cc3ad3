"""Rotate and slice the residual stream: the same layers with a smaller ``d_model``.

A layer reads the residual stream through an RMS norm and adds to the stream. RMS norms are
invariant to the orthonormal basis of the stream, so it may be rotated if its readers and writers
are rotated too (Ashkboos et al., 2024, SliceGPT, arXiv:2401.15024, sec. 3). Here every stack has
one basis, the principal directions of its norms' inputs. So no rotation remains between layers, and
the first ``width`` dimensions are the residual stream of a stock config. Embeddings of time series,
and the streams that follow from them, need few of these directions (Yu et al., 2025, theorems 1 and
3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import fed_positions, run_teacher_forced, small_batches
from tscompress.data.batch import ForecastBatch
from tscompress.errors import FactorizationError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import LAYER_PREFIXES, stack_layers, sublayer_of, sublayers
from tscompress.plan.layer_plans import INPUT_PATCHES, OUTPUT_PATCHES

_EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


@dataclass(frozen=True)
class Streams:
    """Readers and writers of the residual stream of each stack, by dotted names.

    Attributes
    ----------
    norms
        Every RMS norm to the stack whose stream it reads.
    readers
        Every Linear layer that reads a stream to the norm before it.
    writers
        Every Linear layer that adds to a stream to its stack.
    """

    norms: dict[str, str] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)


def streams_of(model: Any) -> Streams:
    """Readers and writers of a model of T5 stacks or of Chronos-2, with any head sizes."""
    streams = Streams()
    there = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    encoder_end = "encoder.final_layer_norm"
    for sublayer in sublayers(model):
        norm = f"{sublayer.name}.layer_norm"
        streams.norms[norm] = sublayer.stack
        reads_encoder = hasattr(sublayer.module, "EncDecAttention")
        for linear in sorted(one for one in there if one.startswith(f"{sublayer.name}.")):
            role = linear.rpartition(".")[2]
            if role in ("o", "wo", "vo"):
                streams.writers[linear] = sublayer.stack
            if role not in ("o", "wo"):  # in cross-attention only queries read the decoder's stream
                of_encoder = reads_encoder and role != "q"
                streams.readers[linear] = encoder_end if of_encoder else norm
    stacks = list(stack_layers(model))
    streams.norms.update({f"{stack}.final_layer_norm": stack for stack in stacks})
    heads = {"lm_head", *(f"{OUTPUT_PATCHES}.{role}_layer" for role in ("hidden", "residual"))}
    streams.readers.update(dict.fromkeys(heads & there, f"{stacks[-1]}.final_layer_norm"))
    inputs = {f"{INPUT_PATCHES}.{role}_layer" for role in ("output", "residual")}
    streams.writers.update(dict.fromkeys(inputs & there, "encoder"))
    return streams


def readers_of_end(model: Any, stack: str) -> list[str]:
    """Linear layers outside the stacks that read the output of ``stack``."""
    norm = f"{stack}.final_layer_norm"
    readers = streams_of(model).readers
    return [
        name
        for name, read in readers.items()
        if read == norm and not name.startswith(LAYER_PREFIXES)
    ]


@torch.no_grad()
def principal_directions(
    loaded: LoadedModel, batches: Sequence[ForecastBatch]
) -> dict[str, Tensor]:
    """Principal directions of each stack's residual stream, ``[d_model, d_model]``, float64.

    Columns are orthonormal, in descending order of energy. They are eigenvectors of the second
    moment of the norms' outputs before their weights, over valid positions; every norm and every
    batch has the same weight. Stacks that embed the same tokens have the same basis.

    Raises
    ------
    FactorizationError
        The decomposition failed.
    """
    model: Any = loaded.model
    streams = streams_of(model)
    groups = [block for block in loaded.architecture.attention if block.across_series]
    transposed = {f"{sublayer_of(block)}.layer_norm" for block in groups}
    width = int(model.config.d_model)
    device = next(model.parameters()).device
    norms = Counter(streams.norms.values())

    def zeros() -> dict[str, Tensor]:
        return {
            stack: torch.zeros(width, width, dtype=torch.float64, device=device) for stack in norms
        }

    moments, of_batch, seen = zeros(), zeros(), dict.fromkeys(norms, 0)
    valid: dict[str, Tensor | None] = {}

    def see_mask(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        valid["encoder"] = None if mask is None else mask.detach() > 0

    def see(norm: str, stack: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            counted = valid.get(stack)
            if counted is not None and norm in transposed:
                counted = counted.T
            rows = args[0].flatten(0, -2) if counted is None else args[0][counted]
            rows = rows.to(torch.float64)
            size = rows.square().mean(-1, keepdim=True).sqrt()
            rows = rows / size.clamp_min(torch.finfo(torch.float32).tiny)
            of_batch[stack].addmm_(rows.T, rows)
            seen[stack] += len(rows)

        return hook

    with ExitStack() as hooks:
        handle = model.encoder.register_forward_pre_hook(see_mask, with_kwargs=True)
        hooks.callback(handle.remove)
        for norm, stack in streams.norms.items():
            handle = model.get_submodule(norm).register_forward_pre_hook(see(norm, stack))
            hooks.callback(handle.remove)
        for batch in batches:
            of_batch, seen = zeros(), dict.fromkeys(norms, 0)
            for part in small_batches(loaded, [batch], trim=False):
                valid["decoder"] = fed_positions(loaded, part)
                run_teacher_forced(loaded, part)
            for stack, moment in moments.items():  # all norms of a stack have the same positions
                moment.add_(of_batch[stack], alpha=norms[stack] / max(1, seen[stack]))
    if adapter_of(loaded.family).one_embedding(model.config):
        total = torch.stack([m / m.trace().clamp_min(1e-300) for m in moments.values()]).sum(0)
        moments = dict.fromkeys(moments, total)
    try:
        return {
            stack: torch.linalg.eigh(moment).eigenvectors.flip(1)
            for stack, moment in moments.items()
        }
    except LinAlgError as error:
        raise FactorizationError(f"a residual stream has no basis: {error}.") from error


@contextmanager
def projected(loaded: LoadedModel, bases: Mapping[str, Tensor], width: int) -> Iterator[None]:
    """Within the block, project the input of every norm onto the first ``width`` directions.

    This is the sliced model before any fit.
    """
    parameter = next(loaded.model.parameters())
    projections = {
        stack: (basis[:, :width] @ basis[:, :width].T).to(parameter)
        for stack, basis in bases.items()
    }

    def see(projection: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
        return lambda _, args: (args[0] @ projection,)

    with ExitStack() as hooks:
        for norm, stack in streams_of(loaded.model).norms.items():
            module = loaded.model.get_submodule(norm)
            hooks.callback(module.register_forward_pre_hook(see(projections[stack])).remove)
        yield


@torch.no_grad()
def rotate_(loaded: LoadedModel, bases: Mapping[str, Tensor]) -> None:
    """Rotate each stack's residual stream to another orthonormal basis; forecasts are unchanged.

    The weights of the norms are absorbed into their readers and become 1. So the output head of a
    Chronos-T5 is no longer its token embedding: the two are untied, as in T5 1.1.

    Parameters
    ----------
    bases
        Stack to ``[d_model, d_model]``, orthonormal columns; see :func:`principal_directions`.
    """
    model: Any = loaded.model
    streams = streams_of(model)
    family = adapter_of(loaded.family)
    loaded.config = {**loaded.config, **family.untie_(model)}
    for name, norm in streams.readers.items():
        weight = model.get_submodule(name).weight
        scale = model.get_submodule(norm).weight.to(torch.float64)
        weight.copy_((weight.to(torch.float64) * scale) @ bases[streams.norms[norm]])
    for norm in streams.norms:
        model.get_submodule(norm).weight.fill_(1.0)
    for name, stack in streams.writers.items():
        linear = model.get_submodule(name)
        linear.weight.copy_(bases[stack].T @ linear.weight.to(torch.float64))
        if linear.bias is not None:
            linear.bias.copy_(bases[stack].T @ linear.bias.to(torch.float64))
    table = model.shared.weight
    turned = table.to(torch.float64) @ bases["encoder"]
    if not family.one_embedding(model.config):
        start = model.config.decoder_start_token_id
        turned[start] = table[start].to(torch.float64) @ bases["decoder"]
    table.copy_(turned)


@torch.no_grad()
def slice_rows_(linear: Any, width: int) -> None:
    """Let a Linear layer write only to the first ``width`` dimensions of the stream."""
    linear.weight[width:] = 0
    if linear.bias is not None:
        linear.bias[width:] = 0


@torch.no_grad()
def slice_embeddings_(loaded: LoadedModel, width: int) -> None:
    """Let the embeddings write only to the first ``width`` dimensions of the stream."""
    model: Any = loaded.model
    model.shared.weight[:, width:] = 0
    for name in streams_of(model).writers:
        if name.startswith(f"{INPUT_PATCHES}."):
            slice_rows_(model.get_submodule(name), width)


def sliced_config(family: str, config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Config of a rotated model sliced to the first ``width`` dimensions of its stream."""
    # The mean of squares is over fewer dimensions, so the norm's epsilon scales with it.
    epsilon = config.get("layer_norm_epsilon", 1e-6) * config["d_model"] / width
    rotated = adapter_of(family).rotated_config
    return {**config, **rotated, "d_model": width, "layer_norm_epsilon": epsilon}


@torch.no_grad()
def sliced_weights(loaded: LoadedModel, width: int) -> dict[str, Tensor]:
    """State dict of a rotated model sliced to the first ``width`` dimensions of each stream.

    If nothing writes to the others, the function is unchanged: the mean of squares over all
    ``d_model`` dimensions is ``width / d_model`` of the mean over these, and readers are rescaled.
    """
    streams = streams_of(loaded.model)
    wider = math.sqrt(loaded.config["d_model"] / width)
    weights = {}
    for key, tensor in loaded.model.state_dict().items():
        name, _, kind = key.rpartition(".")
        if name in streams.readers and kind == "weight":
            tensor = (tensor[:, :width].to(torch.float64) * wider).to(tensor.dtype)
        if name in streams.writers or name in streams.norms:
            tensor = tensor[:width]
        elif name in _EMBEDDINGS:
            tensor = tensor[:, :width]
        weights[key] = tensor.clone(memory_format=torch.contiguous_format)  # no view of the whole
    return weights
