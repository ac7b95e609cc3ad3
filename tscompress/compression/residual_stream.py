"""A narrower residual stream: the same layers with a smaller ``d_model``.

All that a layer reads is the residual stream after an RMS norm, and all that it does is to add to
the stream. RMS norms do not see in which orthonormal basis the stream is written, so it may be
turned freely as long as whoever reads and writes it is turned along (Ashkboos et al., 2024,
SliceGPT, arXiv:2401.15024, sec. 3). Here every stack has one basis, the principal directions of
what its norms read, so that nothing has to turn between layers and the first ``width`` numbers of
the stream are a model of a plain config by themselves. That time series need few of these
directions is what the paper says of their embeddings and of what follows from them (its Theorems 1
and 3).
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
from tscompress.plan.plan import INPUT_PATCHES, OUTPUT_PATCHES

_EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


@dataclass(frozen=True)
class Streams:
    """Who reads and who writes the residual stream of each stack, by dotted names.

    Attributes
    ----------
    norms
        Every RMS norm to the stack whose stream it reads.
    readers
        Every Linear layer that reads a stream to the norm between them.
    writers
        Every Linear layer that adds to a stream to its stack.
    """

    norms: dict[str, str] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)


def streams_of(model: Any) -> Streams:
    """The readers and writers of a model of T5 stacks or of Chronos-2, of whatever head sizes."""
    streams = Streams()
    there = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    encoder_end = "encoder.final_layer_norm"
    for sublayer in sublayers(model):
        norm = f"{sublayer.name}.layer_norm"
        streams.norms[norm] = sublayer.stack
        reads_encoder = hasattr(sublayer.module, "EncDecAttention")
        for linear in sorted(one for one in there if one.startswith(f"{sublayer.name}.")):
            role = linear.rpartition(".")[2]
            if role in ("o", "wo"):
                streams.writers[linear] = sublayer.stack
            else:  # of cross-attention only the queries are of the decoder's own stream
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
    """The Linear layers outside of the stacks that read what ``stack`` puts out."""
    norm = f"{stack}.final_layer_norm"
    readers = streams_of(model).readers
    return [
        name
        for name, read in readers.items()
        if read == norm and not name.startswith(LAYER_PREFIXES)
    ]


@torch.no_grad()
def stream_bases(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> dict[str, Tensor]:
    """Principal directions of each stack's residual stream, ``[d_model, d_model]``, float64.

    Columns are orthonormal, those with most energy first. The moment is that of what the norms
    put out before their weights, over positions that are real, every norm and every batch alike.
    Stacks that embed the same tokens have the same basis.

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
            for stack, moment in moments.items():  # all its norms see the same positions
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
    """Within the block every norm sees the first ``width`` directions of its stream alone.

    So does the narrower model, before anything makes up for what it lacks.
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
def turn_(loaded: LoadedModel, bases: Mapping[str, Tensor]) -> None:
    """Write each stack's residual stream in another orthonormal basis; the model says the same.

    The weights of the norms go into what reads them and are 1 afterwards. So the output head of a
    Chronos-T5 is no longer its table of tokens: the two are untied, as in T5 1.1.

    Parameters
    ----------
    bases
        Stack to ``[d_model, d_model]``, orthonormal columns; see :func:`stream_bases`.
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
def cut_rows_(linear: Any, width: int) -> None:
    """Let a Linear layer write to the first ``width`` numbers of the stream alone."""
    linear.weight[width:] = 0
    if linear.bias is not None:
        linear.bias[width:] = 0


@torch.no_grad()
def cut_embeddings_(loaded: LoadedModel, width: int) -> None:
    """Let what is embedded have nothing but the first ``width`` numbers of the stream."""
    model: Any = loaded.model
    model.shared.weight[:, width:] = 0
    for name in streams_of(model).writers:
        if name.startswith(f"{INPUT_PATCHES}."):
            cut_rows_(model.get_submodule(name), width)


def narrowed_config(family: str, config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The config of a turned model with the first ``width`` numbers of its stream alone."""
    # The mean of squares is over fewer numbers, and what keeps it from 0 has to keep its share.
    epsilon = config.get("layer_norm_epsilon", 1e-6) * config["d_model"] / width
    rotated = adapter_of(family).rotated_config
    return {**config, **rotated, "d_model": width, "layer_norm_epsilon": epsilon}


@torch.no_grad()
def narrowed_weights(loaded: LoadedModel, width: int) -> dict[str, Tensor]:
    """Its state dict with the first ``width`` numbers of each stream alone.

    If nothing writes to the others, it is that of the same model: a mean of squares over all
    ``d_model`` numbers is ``width / d_model`` of that over these, which the readers make up for.
    """
    streams = streams_of(loaded.model)
    wider = math.sqrt(loaded.config["d_model"] / width)
    weights = {}
    for key, tensor in loaded.model.state_dict().items():
        name, _, kind = key.rpartition(".")
        if name in streams.readers and kind == "weight":
            tensor = (tensor[:, :width].to(torch.float64) * wider).to(tensor.dtype)
        elif name in streams.writers or name in streams.norms:
            tensor = tensor[:width]
        elif name in _EMBEDDINGS:
            tensor = tensor[:, :width]
        weights[key] = tensor.contiguous()
    return weights
