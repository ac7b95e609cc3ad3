"""Record the arguments of every sublayer in one forward pass of each batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import fed_positions, run_teacher_forced
from tscompress.data.batch import CalibrationBatch, ForecastBatch
from tscompress.families.registry import adapter_of_layers
from tscompress.families.stacks import Block, Sublayer, stack_layers, sublayer_of, sublayers
from tscompress.layers.latent_cross_attention import CACHE_NAMES


@dataclass
class Recording:
    """Arguments of every sublayer in one forward pass of each batch.

    Attributes
    ----------
    arguments
        Sublayer to ``(args, kwargs)`` of each batch, without the residual stream; see
        :meth:`Step.call`.
    entries
        Stack to its input stream of each batch; see :meth:`entered`.
    encoder_valid, decoder_valid
        Masks of valid positions of each batch, bool ``[B, S]``; None: all are valid.
    ahead, forecast
        Masks of those positions of the last stack of each batch that the model makes its output
        of, and of those among them where the output is a forecast and not of a series that is known
        ahead; empty: it reads all.
    """

    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    entries: dict[str, list[Tensor] | RowTable] = field(default_factory=dict)
    encoder_valid: list[Tensor | None] = field(default_factory=list)
    decoder_valid: list[Tensor | None] = field(default_factory=list)
    ahead: list[Tensor] = field(default_factory=list)
    forecast: list[Tensor] = field(default_factory=list)

    def entered(self, stack: str) -> list[Tensor]:
        """Take the input stream of a stack, ``[B, S, d_model]`` of each batch, out of here."""
        entry = self.entries.pop(stack)
        return entry.batches() if isinstance(entry, RowTable) else entry


class RowTable:
    """Streams whose positions are rows of one table, such as embedded tokens."""

    def __init__(self, table: Tensor, places: list[Tensor]) -> None:
        self.table, self.places = table, places

    def batches(self) -> list[Tensor]:
        """Streams ``[B, S, d]`` of each batch."""
        return [self.table[place] for place in self.places]

    @classmethod
    def of(cls, batches: list[Tensor]) -> RowTable | list[Tensor]:
        """``batches`` ``[B, S, d]`` as a table, if many positions are equal to the bit."""
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(batches[0].shape[-1], generator=generator, dtype=torch.float64)
        marks = torch.cat([(b.to("cpu", torch.float64) @ direction).flatten() for b in batches])
        _, place = torch.unique(marks, return_inverse=True)
        count = int(place.max()) + 1
        if 2 * count > len(place):
            return batches
        table = batches[0].new_empty(count, len(direction))
        places = [
            part.view(batch.shape[:2]).to(batch.device)
            for part, batch in zip(
                place.split([b.shape[:2].numel() for b in batches]), batches, strict=True
            )
        ]
        for batch, own in zip(batches, places, strict=True):
            table[own.flatten()] = batch.flatten(0, 1)
        same = all(torch.equal(table[own], b) for own, b in zip(places, batches, strict=True))
        return cls(table, places) if same else batches


class TensorSum:
    """A mask or position bias ``[B, H, T, S]``, stored as terms that may be far smaller.

    T5 adds the mask of each batch to a position bias that all batches share.
    """

    def __init__(self, shape: torch.Size, *terms: Tensor) -> None:
        self.shape, self.terms = shape, terms

    def tensor(self) -> Tensor:
        """The sum of the terms, ``[B, H, T, S]``."""
        return sum(self.terms[1:], start=self.terms[0]).expand(self.shape)


def _narrowed(value: Tensor) -> Tensor:
    """``value`` with size 1 along rows, heads and queries where it is constant."""
    for dim in range(3):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and torch.equal(value, first.expand_as(value)):
            value = first
    return value.clone()


class PassEnded(Exception):
    """Raised by hooks to end a forward pass early."""


@torch.no_grad()
def record(loaded: LoadedModel, batches: Sequence[CalibrationBatch]) -> Recording:
    """Record the arguments of every sublayer, for each batch."""
    recording = Recording()
    entries: dict[str, list[Tensor]] = {}
    with _recorders(loaded, recording, entries), _attention_of_first_blocks_only(loaded):
        for batch in batches:
            recording.decoder_valid.append(fed_positions(loaded, batch))
            with suppress(PassEnded):
                run_teacher_forced(loaded, batch)
    _mark_what_is_read(loaded, batches, recording, list(entries.values())[-1])
    recording.entries = {name: RowTable.of(entry) for name, entry in entries.items()}
    return recording


def _mark_what_is_read(
    loaded: LoadedModel,
    batches: Sequence[CalibrationBatch],
    recording: Recording,
    streams: Sequence[Tensor],
) -> None:
    """Set ``ahead`` and ``forecast`` of a recording; ``streams`` enter the last stack."""
    family = adapter_of_layers(loaded.family)
    for batch, stream in zip(batches, streams, strict=True):
        last = family.positions_ahead(loaded.model, batch)
        if last is None:
            return
        read = torch.zeros(stream.shape[:2], dtype=torch.bool, device=stream.device)
        read[:, -last:] = True
        assert isinstance(batch, ForecastBatch)
        asked = torch.isfinite(batch.target).any(1).to(stream.device)
        recording.ahead.append(read)
        recording.forecast.append(read & asked[:, None])
    if not any(bool(one.any()) for one in recording.forecast):
        recording.forecast = recording.ahead


@contextmanager
def _attention_of_first_blocks_only(loaded: LoadedModel) -> Iterator[None]:
    """Skip all other sublayers, and end the pass in the last stack.

    Arguments of sublayers are the same in all blocks. Further outputs of attention, such as the
    position bias, are those of the first block.
    """
    model: Any = loaded.model
    feed_forwards = {sublayer_of(block) for block in loaded.architecture.feed_forward}
    first: dict[tuple[str, int], Any] = {}  # by stack and index in the layer
    restored: list[nn.Module] = []
    handles = []

    def pass_on(key: tuple[str, int]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            returned = first[key]
            if isinstance(returned, Tensor):
                return hidden_states
            if isinstance(returned, tuple):
                return (hidden_states, *returned[1:])
            return type(returned)(hidden_states, *list(returned.values())[1:])

        return forward

    def keep(key: tuple[str, int]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            first[key] = output

        return hook

    def end(*_: object) -> None:
        raise PassEnded

    handles.append(getattr(model, "decoder", model.encoder).register_forward_hook(end))
    for sublayer in sublayers(model):
        module: Any = sublayer.module
        place = sublayer.stack, sublayer.index
        if sublayer.name in feed_forwards:
            module.forward = lambda hidden_states, *_, **__: hidden_states
            restored.append(module)
        elif sublayer.layer == 0:
            handles.append(module.register_forward_hook(keep(place)))
        else:
            module.forward = pass_on(place)
            restored.append(module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in restored:
            del module.forward


@torch.no_grad()
def record_entry(loaded: LoadedModel, batches: Sequence[CalibrationBatch]) -> Recording:
    """Input stream of the encoder alone, after a change to the embedding of patches."""
    entries: dict[str, list[Tensor]] = {}
    with _recorders(loaded, Recording(), entries, entries_only=True):
        for batch in batches:
            with suppress(PassEnded):
                run_teacher_forced(loaded, batch)
    return Recording(entries={"encoder": entries["encoder"]})


def run_embedding(loaded: LoadedModel, batch: CalibrationBatch) -> None:
    """Run a forward pass up to the end of the input embedding."""

    def stop(*_: object) -> None:
        raise PassEnded

    model: Any = loaded.model
    handle = model.encoder.register_forward_pre_hook(stop)
    try:
        with suppress(PassEnded):
            run_teacher_forced(loaded, batch)
    finally:
        handle.remove()


@contextmanager
def _recorders(
    loaded: LoadedModel,
    recording: Recording,
    entries: dict[str, list[Tensor]],
    *,
    entries_only: bool = False,
) -> Iterator[None]:
    """Hooks that fill ``recording`` and, by stack, ``entries``; optionally only the latter."""
    model: Any = loaded.model
    recorder = _Recorder(recording, entries, entries_only)
    hooks: list[tuple[nn.Module, _Hook]] = [(model.encoder, recorder.see_mask)]
    hooks += [(sublayer.module, recorder.see_call(sublayer)) for sublayer in sublayers(model)]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class _Recorder:
    """Records arguments of sublayers; equal masks and biases are stored once.

    Attributes
    ----------
    known
        Tensors ``[B, H, T, S]`` of the batches so far.
    """

    recording: Recording
    entries: dict[str, list[Tensor]]
    entries_only: bool
    known: list[Tensor] = field(default_factory=list)

    def see_mask(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the encoder's mask of valid positions."""
        mask = kwargs.get("attention_mask")
        valid = None if mask is None else mask.detach() > 0
        # A batch of full rows needs no mask.
        full = valid is None or bool(valid.all())
        self.recording.encoder_valid.append(None if full else valid)

    def see_call(self, sublayer: Sublayer) -> _Hook:
        """The hook of a sublayer; that of a stack's first also records the stack's input."""
        calls = self.recording.arguments.setdefault(sublayer.name, [])
        first = (sublayer.layer, sublayer.index) == (0, 0)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # No cache: every pass is a full one. The encoder's output comes from the walk.
            kept = {
                key: None if key == "key_value_states" else self._held(key, kwargs)
                for key in kwargs
                if key not in CACHE_NAMES
            }
            calls.append((args[1:], kept))
            if first:
                self.entries.setdefault(sublayer.stack, []).append(args[0].detach())
                if self.entries_only:
                    raise PassEnded

        return hook

    def _held(self, key: str, kwargs: dict[str, Any]) -> Any:
        value, mask = kwargs[key], kwargs.get("attention_mask")
        if not isinstance(value, Tensor) or value.ndim != 4:
            return value
        if (
            key == "position_bias"
            and isinstance(mask, Tensor)
            and mask.is_floating_point()
            and len(mask) == len(value) > 1
        ):
            fullest = int(mask.flatten(1).sum(1).argmax())
            row = slice(fullest, fullest + 1)
            parts = value[row], mask - mask[row]
            if torch.equal(parts[0] + parts[1], value):
                return TensorSum(value.shape, *(self._shared(part) for part in parts))
        return TensorSum(value.shape, self._shared(value))

    def _shared(self, value: Tensor) -> Tensor:
        """The equal tensor of another batch, or the corner of one, so that it is stored once."""
        value = _narrowed(value)
        rows, heads, queries, keys = value.shape
        for other in self.known:
            corner = other[:rows, :heads, :queries, :keys]
            if corner.shape == value.shape and torch.equal(corner, value):
                return corner
        self.known.append(value)
        return value


@dataclass(frozen=True)
class DroppedSublayer:
    """A sublayer of the original that the changed model does not have."""

    block: Block
    module: nn.Module
    arguments: list[Any]


def drop_layers_(
    recording: Recording, original: LoadedModel, kept: Mapping[str, Sequence[int]]
) -> dict[str, list[DroppedSublayer]]:
    """Make a recording of ``original`` one of the model with only the ``kept`` layers.

    Returns
    -------
    dict
        The dropped sublayers, by the name in that model of the kept sublayer before them; by the
        name of the stack if there is none.
    """
    blocks = blocks_of(original)
    calls, left_out = {}, defaultdict(list)
    after: dict[str, str] = {}  # of each stack, the last kept sublayer
    for sublayer in sublayers(original.model):
        stack = sublayer.stack
        stay = list(kept.get(stack, range(len(stack_layers(original.model)[stack]))))
        arguments = recording.arguments[sublayer.name]
        if sublayer.layer in stay:
            moved = replace(sublayer, layer=stay.index(sublayer.layer))
            after[stack] = moved.name
            calls[moved.name] = arguments
        else:
            found = DroppedSublayer(blocks[sublayer.name], sublayer.module, arguments)
            left_out[after.get(stack, stack)].append(found)
    recording.arguments = calls
    return left_out


def blocks_of(loaded: LoadedModel) -> dict[str, Block]:
    """The attention block or feed-forward of each sublayer, by name of the sublayer."""
    architecture = loaded.architecture
    held: tuple[Block, ...] = (*architecture.attention, *architecture.feed_forward)
    return {sublayer_of(block): block for block in held}
