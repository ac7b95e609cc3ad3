"""A model run one sublayer at a time, so that each is changed on what those before it left.

Every sublayer (attention or feed-forward, with its norm and residual connection) maps the residual
stream to the residual stream; everything else it is called with (masks, position biases) is the
same whatever the weights. So one ordinary forward pass records those calls, and the streams of the
original and of the model changed so far are then carried through the layers side by side. Only one
set of weights is in memory, but for those of layers left out, and nothing is computed twice however
deep the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.recording import LeftOut, Recording, TensorSum, blocks_of
from tscompress.families.stacks import Block, Sublayer, sublayers
from tscompress.linalg import least_squares
from tscompress.plan.architecture import AttentionBlock, FeedForward

#: Hidden units of all positions that a feed-forward is run on side by side.
_UNITS_AT_ONCE = 1 << 22
#: Rows that a reading is fitted on, for each number of the stream, and how much it is damped.
_ROWS_PER_NUMBER, _READING_DAMPING = 64, 1e-2


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
        return args, {k: v.tensor() if isinstance(v, TensorSum) else v for k, v in kwargs.items()}

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
    walked = _Walk(
        loaded,
        recording,
        on_compressed=on_compressed,
        residual_targets=residual_targets,
        encoder_entry=encoder_entry,
        left_out=left_out or {},
        width=width,
        ends={} if ends is None else ends,
        precision=precision,
    )
    return walked.steps()


@dataclass(kw_only=True)
class _Walk:
    """One walk; its arguments are those of :func:`walk`.

    Attributes
    ----------
    original, changed
        Streams of both models where the walk is, ``[B, S, d_model]`` of each batch; empty if they
        are not carried along.
    encoded
        Of both, what the encoder put out; None: it is not known.
    """

    loaded: LoadedModel = field(kw_only=False)
    recording: Recording = field(kw_only=False)
    on_compressed: bool
    residual_targets: bool
    encoder_entry: list[Tensor] | None
    left_out: Mapping[str, Sequence[LeftOut]]
    width: int | None
    ends: dict[str, Tensor]
    precision: torch.dtype
    original: list[Tensor] = field(default_factory=list)
    changed: list[Tensor] = field(default_factory=list)
    encoded: tuple[list[Tensor] | None, list[Tensor] | None] = (None, None)

    def __post_init__(self) -> None:
        self.model: Any = self.loaded.model
        self.blocks = blocks_of(self.loaded)
        self.carries_original = self.residual_targets or not self.on_compressed

    def steps(self) -> Iterator[Step]:
        """Every sublayer; see :func:`walk`."""
        stack = ""
        for sublayer in sublayers(self.model):
            if sublayer.stack != stack:
                if stack:
                    self._leave_encoder(stack)
                stack = sublayer.stack
                self._enter(stack)
            step = self._step(sublayer)
            yield step
            if self.on_compressed and not step.moved:
                advance_(self.changed, step)
            # Whoever iterates still holds the step; it must not hold the streams as well.
            step.inputs, step.reference = [], None
        self._read_end(stack, self._valid(stack), self._last_norm(stack))

    def _enter(self, stack: str) -> None:
        entered = self.recording.entered(stack)  # each stream is freed once it has moved on
        entry = self.encoder_entry if stack == "encoder" and self.encoder_entry else None
        self.original = list(entered) if self.carries_original else []
        self.changed = list(entry or entered) if self.on_compressed else []
        if self.width is not None:
            wide = self.changed
            self.changed = [
                F.pad(x[..., : self.width], (0, x.shape[-1] - self.width)) for x in wide
            ]
            del wide
        if entry:
            entry.clear()
        del entered, entry
        self._pass_through(stack)

    def _leave_encoder(self, stack: str) -> None:
        """Its normed output is what cross-attention reads."""
        norm = self._last_norm(stack)
        for stream in (self.original, self.changed):
            with torch.no_grad():
                for index in range(len(stream)):
                    stream[index] = norm(stream[index])
        self._read_end(stack, self.recording.encoder_valid, None)
        self.encoded = (
            self.original if self.carries_original else None,
            self.changed if self.on_compressed else None,
        )

    def _step(self, sublayer: Sublayer) -> Step:
        """The sublayer, once the original's stream has gone through it."""
        block, module = self.blocks[sublayer.name], sublayer.module
        valid = self._valid(sublayer.stack)
        is_cross = isinstance(block, AttentionBlock) and block.reads_encoder
        step = Step(
            block,
            module,
            inputs=self.changed if self.on_compressed else self.original,
            reference=None,
            arguments=self.recording.arguments[sublayer.name],
            valid=valid,
            key_valid=self.recording.encoder_valid if is_cross else valid,
            encoded=self.encoded[1 if self.on_compressed else 0],
            precision=self.precision,
            width=self.width,
        )
        step.reading = self._reading(valid, module.layer_norm)  # type: ignore[arg-type]
        if self.carries_original:
            reference = replace(step, inputs=self.original, encoded=self.encoded[0])
            if not self.on_compressed:  # statistics are still to be taken on what enters
                self.original = list(self.original)
            advance_(self.original, reference)
            self._pass_through(sublayer.name)
            step.reference = self.original if self.residual_targets else None
        return step

    def _pass_through(self, name: str) -> None:
        """Take the original's stream through the layers left out that follow ``name`` there."""
        for gone in self.left_out.get(name, ()):
            step = Step(
                **vars(gone),
                inputs=self.original,
                reference=None,
                valid=[],
                key_valid=[],
                encoded=self.encoded[0],
                precision=self.precision,
            )
            advance_(self.original, step)

    def _valid(self, stack: str) -> list[Tensor | None]:
        recording = self.recording
        return recording.encoder_valid if stack == "encoder" else recording.decoder_valid

    def _last_norm(self, stack: str) -> Any:
        return getattr(self.model, stack).final_layer_norm

    def _reading(self, valid: list[Tensor | None], norm: nn.Module | None) -> Tensor | None:
        if self.width is None or not self.residual_targets:
            return None
        return reading(self.original, self.changed, valid, self.width, norm)

    def _read_end(self, stack: str, valid: list[Tensor | None], norm: nn.Module | None) -> None:
        found = self._reading(valid, norm)
        if found is not None:
            self.ends[stack] = found


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
