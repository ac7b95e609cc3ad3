"""A model run one sublayer at a time, so that each is changed on what those before it left.

Every sublayer (attention or feed-forward, with its norm and residual connection) maps the residual
stream to the residual stream; everything else it is called with (masks, position biases) is the
same whatever the weights. So one ordinary forward pass records those calls, and the streams of the
original and of the model changed so far are then carried through the layers side by side. Only one
set of weights is in memory, but for those of layers left out, and nothing is computed twice however
deep the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import CalibrationBatch, fed_positions, run_teacher_forced
from tscompress.families.stacks import Block, stack_layers, sublayer_of, sublayers
from tscompress.layers.resize import CACHE_NAMES
from tscompress.linalg import least_squares
from tscompress.plan.architecture import AttentionBlock, FeedForward

_STEPS_PER_BATCH = 1024
#: Hidden units of all positions that a feed-forward is run on side by side.
_UNITS_AT_ONCE = 1 << 22
#: Rows that a reading is fitted on, for each number of the stream, and how much it is damped.
_ROWS_PER_NUMBER, _READING_DAMPING = 64, 1e-2


@dataclass
class Recording:
    """Calls of every sublayer in one forward pass of each batch.

    Attributes
    ----------
    arguments
        Sublayer to ``(args, kwargs)`` of each batch, without the residual stream; see
        :meth:`Step.call`.
    entries
        Stack to the residual stream that enters it, of each batch; see :meth:`entered`.
    encoder_valid, decoder_valid
        Positions of each batch that are real, bool ``[B, S]``; None: all are.
    """

    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    entries: dict[str, list[Tensor] | _Lookup] = field(default_factory=dict)
    encoder_valid: list[Tensor | None] = field(default_factory=list)
    decoder_valid: list[Tensor | None] = field(default_factory=list)

    def entered(self, stack: str) -> list[Tensor]:
        """``[B, S, d_model]`` of each batch; handed over, and freed here."""
        entry = self.entries.pop(stack)
        return entry.batches() if isinstance(entry, _Lookup) else entry


class _Lookup:
    """Streams of batches whose positions are rows of one table, as embedded tokens are."""

    def __init__(self, table: Tensor, places: list[Tensor]) -> None:
        self.table, self.places = table, places

    def batches(self) -> list[Tensor]:
        return [self.table[place] for place in self.places]

    @classmethod
    def of(cls, batches: list[Tensor]) -> _Lookup | list[Tensor]:
        """``batches`` ``[B, S, d]`` as a table, where many positions are alike to the last bit."""
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


@dataclass
class Step:
    """One sublayer, and the streams that reach it.

    Attributes
    ----------
    block
        What it holds.
    module
        The sublayer itself; its forward takes and returns the residual stream.
    inputs
        Residual stream that statistics are to be taken on, ``[B, S, d_model]`` of each batch.
    reference
        The original's stream after the sublayer, and after layers left out that follow it, if the
        sublayer is asked to reach it.
    valid, key_valid
        Positions that are real, of queries and of keys.
    precision
        Of the products of a feed-forward; what it adds to the stream is float32. Attention stays in
        float32: softmax of unscaled scores magnifies their rounding, which a fit would then follow.
    width
        Numbers of the stream that the changed model has; the others are 0. None: all.
    reading
        With a width: what the original reads here, as a linear map of what the changed model reads,
        ``[d_model, d_model]`` of both behind the norm; columns beyond the width are 0.
    moved
        ``inputs`` hold what comes out of the changed sublayer; set by whoever changed it and put it
        there.
    """

    block: Block
    module: nn.Module
    inputs: list[Tensor]
    reference: list[Tensor] | None
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]
    valid: list[Tensor | None]
    key_valid: list[Tensor | None]
    encoded: list[Tensor] | None
    precision: torch.dtype = torch.float32
    width: int | None = None
    reading: Tensor | None = None
    moved: bool = False

    def call(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the sublayer is called with on batch ``index``, besides streams."""
        args, kwargs = self.arguments[index]
        return args, {k: v.tensor() if isinstance(v, _Sum) else v for k, v in kwargs.items()}

    @property
    def positionwise(self) -> bool:
        """Whether positions do not see each other."""
        return isinstance(self.block, FeedForward)

    @property
    def positions_at_once(self) -> int:
        """How many, of several batches, are run side by side; 0: batches run one by one."""
        if not self.positionwise:
            return 0
        widest = max(m.out_features for m in self.module.modules() if isinstance(m, nn.Linear))
        return max(1, _UNITS_AT_ONCE // widest)

    @torch.no_grad()
    def run(self, index: int, stream: Tensor | None = None) -> Tensor:
        """The stream after the sublayer for batch ``index``, as the module is now."""
        args, kwargs = self.call(index)
        if self.encoded is not None and "key_value_states" in kwargs:
            kwargs = {**kwargs, "key_value_states": self.encoded[index]}
        stream = self.inputs[index] if stream is None else stream
        half = self.positionwise and self.precision != torch.float32
        with torch.autocast(stream.device.type, self.precision if half else None, enabled=half):
            output = self.module(stream, *args, **kwargs)
        result: Tensor = output if isinstance(output, Tensor) else output[0]
        return result


class _Sum:
    """A mask or position bias ``[B, H, T, S]``, held as terms that may be far smaller.

    T5 adds the mask of each batch to the position bias of all.
    """

    def __init__(self, shape: torch.Size, *terms: Tensor) -> None:
        self.shape, self.terms = shape, terms

    def tensor(self) -> Tensor:
        return sum(self.terms[1:], start=self.terms[0]).expand(self.shape)


def _narrowed(value: Tensor) -> Tensor:
    """``value`` with size 1 along rows, heads and queries where it is the same for all."""
    for dim in range(3):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and torch.equal(value, first.expand_as(value)):
            value = first
    return value.clone()


class PassEnded(Exception):
    """Ends a forward pass once what was wanted of it is known; for hooks to raise."""


@torch.no_grad()
def record(loaded: LoadedModel, batches: Sequence[CalibrationBatch]) -> Recording:
    """Note how every sublayer is called, for each batch."""
    recording = Recording()
    entries: dict[str, list[Tensor]] = {}
    with _recorders(loaded, recording, entries), _attention_of_first_blocks_only(loaded):
        for batch in batches:
            recording.decoder_valid.append(fed_positions(loaded, batch))
            with suppress(PassEnded):
                run_teacher_forced(loaded, batch)
    recording.entries = {name: _Lookup.of(entry) for name, entry in entries.items()}
    return recording


@contextmanager
def _attention_of_first_blocks_only(loaded: LoadedModel) -> Iterator[None]:
    """All other sublayers pass the stream on, and the last stack ends the pass.

    How sublayers are called is alike in all blocks. The rest of what an attention returns, the
    position bias for one, is taken from its counterpart in the first block.
    """
    model: Any = loaded.model
    feed_forwards = {sublayer_of(block) for block in loaded.architecture.feed_forward}
    first: dict[tuple[str, int], Any] = {}  # by stack and index in the layer
    restored: list[nn.Module] = []
    handles = []

    def pass_on(key: tuple[str, int]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            returned = first[key]
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
def record_entry(loaded: LoadedModel, batches: Sequence[CalibrationBatch]) -> list[Tensor]:
    """The residual stream that enters the encoder, after a change to what embeds the input."""
    entries: dict[str, list[Tensor]] = {}
    with _recorders(loaded, Recording(), entries, entries_only=True):
        for batch in batches:
            with suppress(PassEnded):
                run_teacher_forced(loaded, batch)
    return entries["encoder"]


def run_embedding(loaded: LoadedModel, batch: CalibrationBatch) -> None:
    """As much of a forward pass as embeds the input."""

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
    model: Any = loaded.model
    handles = []
    known: list[Tensor] = []

    def shared(value: Tensor) -> Tensor:
        """The same as in another batch, or the corner of it, so that it is held once."""
        value = _narrowed(value)
        rows, heads, queries, keys = value.shape
        for other in known:
            corner = other[:rows, :heads, :queries, :keys]
            if corner.shape == value.shape and torch.equal(corner, value):
                return corner
        known.append(value)
        return value

    def held(key: str, kwargs: dict[str, Any]) -> Any:
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
                return _Sum(value.shape, shared(parts[0]), shared(parts[1]))
        return _Sum(value.shape, shared(value))

    def see_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        valid = None if mask is None else mask.detach() > 0
        # One batch of full rows needs no masking at all.
        recording.encoder_valid.append(None if valid is None or bool(valid.all()) else valid)

    handles.append(model.encoder.register_forward_pre_hook(see_mask, with_kwargs=True))
    for sublayer in sublayers(model):
        calls = recording.arguments.setdefault(sublayer.name, [])
        first = (sublayer.layer, sublayer.index) == (0, 0)

        def see_call(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            calls: list[Any] = calls,
            entry: str | None = sublayer.stack if first else None,
        ) -> None:
            # Without a cache every pass starts afresh. The encoder's output comes from the walk.
            kept = {
                key: None if key == "key_value_states" else held(key, kwargs)
                for key in kwargs
                if key not in CACHE_NAMES
            }
            calls.append((args[1:], kept))
            if entry is not None:
                entries.setdefault(entry, []).append(args[0].detach())
                if entries_only:
                    raise PassEnded

        handle = sublayer.module.register_forward_pre_hook(see_call, with_kwargs=True)
        handles.append(handle)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class LeftOut:
    """A sublayer that the original has, and the model that is changed has not."""

    block: Block
    module: nn.Module
    arguments: list[Any]


def leave_layers_out_(
    recording: Recording, original: LoadedModel, kept: Mapping[str, Sequence[int]]
) -> dict[str, list[LeftOut]]:
    """Make a recording of ``original`` one of the model with the layers ``kept`` alone.

    Returns
    -------
    The sublayers of the others, by the sublayer that they follow, under the name it has in that
    model; those before all that stay by the name of the stack.
    """
    blocks = blocks_of(original)
    calls, left_out = {}, defaultdict(list)
    after: dict[str, str] = {}  # of each stack, the last sublayer that stays
    for sublayer in sublayers(original.model):
        stack = sublayer.stack
        stay = list(kept.get(stack, range(len(stack_layers(original.model)[stack]))))
        arguments = recording.arguments[sublayer.name]
        if sublayer.layer in stay:
            moved = replace(sublayer, layer=stay.index(sublayer.layer))
            after[stack] = moved.name
            calls[moved.name] = arguments
        else:
            found = LeftOut(blocks[sublayer.name], sublayer.module, arguments)
            left_out[after.get(stack, stack)].append(found)
    recording.arguments = calls
    return left_out


def blocks_of(loaded: LoadedModel) -> dict[str, Block]:
    """What each sublayer holds, by its name."""
    architecture = loaded.architecture
    held: tuple[Block, ...] = (*architecture.attention, *architecture.feed_forward)
    return {sublayer_of(block): block for block in held}


def walk(
    loaded: LoadedModel,
    recording: Recording,
    *,
    on_compressed: bool,
    residual_targets: bool,
    encoder_entry: list[Tensor] | None = None,
    left_out: Mapping[str, Sequence[LeftOut]] | None = None,
    width: int | None = None,
    ends: dict[str, Tensor] | None = None,
    precision: torch.dtype = torch.float32,
) -> Iterator[Step]:
    """Every sublayer in order; whoever iterates may change the module before asking for the next.

    A recording serves one walk: the streams in it are handed over.

    Parameters
    ----------
    on_compressed
        Inputs come from the model as changed so far; otherwise from the original.
    residual_targets
        Carry the original's stream along and say what each sublayer should add to reach it.
    encoder_entry
        What enters the encoder of the changed model, if the embedding of the input changed; handed
        over, and left empty.
    left_out
        Sublayers that the original's stream goes through, and the changed one's does not: what is
        before them is asked to reach what comes after (:func:`leave_layers_out_`).
    width
        Numbers of the stream that the changed model has; the others of what enters it become 0.
    ends
        With a width: where to put, by stack, what is read of its end, as :attr:`Step.reading`.
    precision
        Of the products in feed-forwards.
    """
    model: Any = loaded.model
    blocks = blocks_of(loaded)
    carry_original = residual_targets or not on_compressed
    ends = {} if ends is None else ends
    original: list[Tensor] = []
    changed: list[Tensor] = []
    encoded: dict[str, list[Tensor] | None] = {"original": None, "changed": None}
    current = ""

    def fitted_reading(valid: list[Tensor | None], norm: nn.Module | None = None) -> Tensor | None:
        if width is None or not residual_targets:
            return None
        return reading(original, changed, valid, width, norm)

    def pass_through(name: str) -> None:
        """Take the original's stream through what follows ``name`` there."""
        for gone in (left_out or {}).get(name, ()):
            step = Step(
                **vars(gone),
                inputs=original,
                reference=None,
                valid=[],
                key_valid=[],
                encoded=encoded["original"],
                precision=precision,
            )
            advance_(original, step)

    for sublayer in sublayers(model):
        name, module, stack = sublayer.name, sublayer.module, sublayer.stack
        if stack != current:
            if current:  # the encoder is done: its normed output is what cross-attention reads
                norm = getattr(model, current).final_layer_norm
                for stream in (original, changed):
                    with torch.no_grad():
                        for index in range(len(stream)):
                            stream[index] = norm(stream[index])
                if (found := fitted_reading(recording.encoder_valid)) is not None:
                    ends[current] = found
                encoded = {
                    "original": original if carry_original else None,
                    "changed": changed if on_compressed else None,
                }
            entered = recording.entered(stack)  # each stream is freed once it has moved on
            original = list(entered) if carry_original else []
            entry = encoder_entry if stack == "encoder" and encoder_entry else None
            changed = list(entry or entered) if on_compressed else []
            if width is not None:
                changed = [F.pad(s[..., :width], (0, s.shape[-1] - width)) for s in changed]
            if entry:
                entry.clear()
            del entered, entry
            current = stack
            pass_through(stack)
        block = blocks[name]
        valid = recording.encoder_valid if stack == "encoder" else recording.decoder_valid
        is_cross = isinstance(block, AttentionBlock) and block.reads_encoder
        step = Step(
            block,
            module,
            inputs=changed if on_compressed else original,
            reference=None,
            arguments=recording.arguments[name],
            valid=valid,
            key_valid=recording.encoder_valid if is_cross else valid,
            encoded=encoded["changed" if on_compressed else "original"],
            precision=precision,
            width=width,
        )
        step.reading = fitted_reading(valid, module.layer_norm)  # type: ignore[arg-type]
        if carry_original:
            reference = replace(step, inputs=original, encoded=encoded["original"])
            if not on_compressed:  # statistics are still to be taken on what enters
                original = list(original)
            advance_(original, reference)
            pass_through(name)
            step.reference = original if residual_targets else None
            del reference
        yield step
        if on_compressed and not step.moved:
            advance_(changed, step)
        # Whoever iterates still holds the step; it must not hold the streams as well.
        step.inputs, step.reference = [], None
    norm = getattr(model, current).final_layer_norm
    if (found := fitted_reading(valid, norm)) is not None:
        ends[current] = found


@torch.no_grad()
def reading(
    original: Sequence[Tensor],
    changed: Sequence[Tensor],
    valid: Sequence[Tensor | None],
    width: int,
    norm: nn.Module | None = None,
) -> Tensor:
    """What is read of one stream, as a linear map of what is read of a narrower one.

    Both are looked at behind ``norm``; None: as they are. What the narrower one lacks is guessed
    from the rest by least squares, drawn towards leaving it out.

    Parameters
    ----------
    original, changed
        ``[B, S, d_model]`` of each batch; of the latter only the first ``width`` numbers count.
    valid
        Positions of each batch that are real; None: all are.

    Returns
    -------
    ``[d_model, d_model]``, float64; columns beyond ``width`` are 0.
    """
    size, device = original[0].shape[-1], original[0].device
    cross = torch.zeros(size, width, dtype=torch.float64, device=device)
    second = torch.zeros(width, width, dtype=torch.float64, device=device)
    positions = sum(states.shape[:2].numel() for states in original)
    stride = max(1, positions // (_ROWS_PER_NUMBER * size))
    for batch in zip(original, changed, valid, strict=True):
        *streams, counted = batch
        rows = [x.flatten(0, 1) if counted is None else x[counted] for x in streams]
        # A multiple of the length would see the same position of every series.
        step = stride - 1 if stride > 1 and stride % streams[0].shape[1] == 0 else stride
        rows = [x[::step] if norm is None else norm(x[::step]) for x in rows]
        ours = rows[1][:, :width].to(torch.float64)
        cross.addmm_(rows[0].to(torch.float64).T, ours)
        second.addmm_(ours.T, ours)
    found = torch.zeros(size, size, dtype=torch.float64, device=device)
    kept = torch.eye(size, width, dtype=torch.float64, device=device)
    found[:, :width] = least_squares(cross, second, kept, _READING_DAMPING)
    return found


@torch.no_grad()
def advance_(stream: list[Tensor], step: Step) -> None:
    """Move a stream on through a sublayer part by part, so that no second one is ever held."""
    sizes = [states.shape[:2].numel() for states in stream]
    for group in runs_of(sizes, step.positions_at_once):
        if len(group) == 1:
            stream[group[0]] = step.run(group[0], stream[group[0]])
            continue
        rows = torch.cat([stream[index].flatten(0, 1) for index in group])
        moved = torch.split(step.run(group[0], rows[None])[0], [sizes[index] for index in group])
        for index, part in zip(group, moved, strict=True):
            stream[index] = part.view_as(stream[index])


def runs_of(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Consecutive indices whose sizes add up to at most ``most``, or one alone."""
    group: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(index)
        total += size
    if group:
        yield group


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware itself multiplies in bfloat16, several times faster than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def small_batches(
    loaded: LoadedModel,
    batches: Sequence[CalibrationBatch],
    steps: int = _STEPS_PER_BATCH,
    *,
    trim: bool = True,
) -> list[CalibrationBatch]:
    """The same rows in batches of at most so many positions, where rows do not see each other.

    Attention takes memory for each head and pair of positions of a batch: for a model of base size
    more than its weights, at 32 contexts of 512. With ``trim`` they lose the steps that no row has,
    and with these the position after the last target.
    """
    config: Any = loaded.model.config
    stride = config.chronos_config.get("input_patch_stride", 1)
    parts = []
    for batch in batches:
        rows = max(1, steps * stride // batch.context.shape[1])
        if batch.group_ids is not None or rows >= len(batch.context):
            parts.append(batch)
            continue
        for start in range(0, len(batch.context), rows):
            chosen = slice(start, start + rows)
            part = CalibrationBatch(batch.context[chosen], batch.target[chosen])
            parts.append(_trimmed(part) if trim else part)
    # The longest first: position biases of shorter ones are corners of theirs.
    return sorted(parts, key=lambda part: -part.context.shape[1])


def _trimmed(batch: CalibrationBatch) -> CalibrationBatch:
    """Without the steps on the left, and the last ones, that no row has."""
    context, target = batch.context, batch.target
    past, ahead = (torch.isfinite(steps).any(0).nonzero()[:, 0] for steps in (context, target))
    first = int(past[0]) if len(past) else 0
    end = int(ahead[-1]) + 1 if len(ahead) else target.shape[1]
    return CalibrationBatch(context[:, first:], target[:, :end])
