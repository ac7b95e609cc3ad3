"""Run a model one sublayer at a time and change each on the output of the changed ones before it.

Every sublayer (attention or feed-forward, with its norm and residual connection) maps the residual
stream to the residual stream. Its other arguments (masks, position biases) do not depend on the
weights before it. So one forward pass records these arguments, and the streams of the original and
of the partly changed model are then carried through the layers side by side. Only one set of
weights is in memory, apart from dropped layers, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.recording import DroppedSublayer, Recording, TensorSum, blocks_of
from tscompress.families.registry import adapter_of_layers
from tscompress.families.stacks import Block, Sublayer, sublayers
from tscompress.linalg import least_squares, scattered_picks
from tscompress.plan.architecture import AttentionBlock, FeedForward

#: Hidden units of all positions on which a feed-forward is run together.
UNITS_AT_ONCE = 1 << 22
#: Rows for the fit of a reconstruction per dimension of the stream, and the damping of the fit.
_ROWS_PER_NUMBER, _READING_DAMPING = 64, 1e-2


@dataclass
class Step:
    """One sublayer and its input streams.

    Attributes
    ----------
    block
        Its attention block or feed-forward.
    module
        The sublayer; its forward takes and returns the residual stream.
    inputs
        Residual stream for statistics, ``[B, S, d_model]`` of each batch.
    reference
        Target of the fit: the original's stream after the sublayer and after dropped layers that
        follow it; None without a fit.
    valid, key_valid
        Masks of valid positions, of queries and of keys.
    precision
        Of the products of a feed-forward; its output is float32. Attention is in float32: softmax
        of unscaled scores magnifies rounding errors, and a fit would follow them.
    width
        Residual-stream width of the changed model; the other dimensions are 0. None: all.
    reconstruction
        With a width: the linear map, ``[d_model, d_model]``, from the changed model's normed stream
        to the original's; columns beyond the width are 0.
    even_rows
        Whether rows of a feed-forward are taken at even steps.
    moved
        ``inputs`` have the output of the changed sublayer already; set by the caller that changed
        them.
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
    reconstruction: Tensor | None = None
    even_rows: bool = False
    moved: bool = False

    def call(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the sublayer on batch ``index``, without streams."""
        args, kwargs = self.arguments[index]
        return args, {k: v.tensor() if isinstance(v, TensorSum) else v for k, v in kwargs.items()}

    @property
    def positionwise(self) -> bool:
        """Whether positions are independent."""
        return isinstance(self.block, FeedForward)

    @property
    def positions_at_once(self) -> int:
        """Number of positions, of several batches, to run together; 0: batches run one by one."""
        if not self.positionwise:
            return 0
        widest = max(m.out_features for m in self.module.modules() if isinstance(m, nn.Linear))
        return max(1, UNITS_AT_ONCE // widest)

    @torch.no_grad()
    def run(self, index: int, stream: Tensor | None = None) -> Tensor:
        """The stream ``[B, S, d]`` after the sublayer in its present state, for batch ``index``."""
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
    entries: Recording | None = None,
    left_out: Mapping[str, Sequence[DroppedSublayer]] | None = None,
    width: int | None = None,
    ends: dict[str, Tensor] | None = None,
    precision: torch.dtype = torch.float32,
) -> Iterator[Step]:
    """Every sublayer in order; the caller may change its module before taking the next one.

    A recording is for one walk, which consumes its streams.

    Parameters
    ----------
    on_compressed
        Take inputs from the partly changed model; otherwise from the original.
    residual_targets
        Carry the original's stream along and set the reference of each step.
    entries
        With the input streams of the changed model, of those stacks where they changed; consumed.
    left_out
        Dropped sublayers (:func:`drop_layers_`): only the original's stream passes through them,
        and the sublayer before them has the stream after them as its reference.
    width
        Residual-stream width of the changed model; other dimensions of its input become 0.
    ends
        With a width: filled with the reconstruction of each stack's output, by stack.
    precision
        Of the products in feed-forwards.
    """
    walked = _Walk(
        loaded,
        recording,
        on_compressed=on_compressed,
        residual_targets=residual_targets,
        entries=entries or Recording(),
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
        Current streams of both models, ``[B, S, d_model]`` of each batch; empty if they are not
        carried along.
    encoded
        The encoder's output in both models; None: unknown.
    """

    loaded: LoadedModel = field(kw_only=False)
    recording: Recording = field(kw_only=False)
    on_compressed: bool
    residual_targets: bool
    entries: Recording
    left_out: Mapping[str, Sequence[DroppedSublayer]]
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
            # The caller still holds the step, which must not keep the streams alive.
            step.inputs, step.reference = [], None
        forecast: list[Tensor | None] = [*self.recording.forecast]
        self._reconstruct_end(stack, forecast or self._valid(stack), self._last_norm(stack))

    def _enter(self, stack: str) -> None:
        entered = self.recording.entered(stack)  # each stream is freed once it is used
        entry = self.entries.entered(stack) if stack in self.entries.entries else entered
        self.original = list(entered) if self.carries_original else []
        self.changed = list(entry) if self.on_compressed else []
        if self.width is not None:
            wide = self.changed
            self.changed = [
                F.pad(x[..., : self.width], (0, x.shape[-1] - self.width)) for x in wide
            ]
            del wide
        del entered, entry
        self._pass_through(stack)

    def _leave_encoder(self, stack: str) -> None:
        """Its normed output is the input of cross-attention."""
        norm = self._last_norm(stack)
        for stream in (self.original, self.changed):
            with torch.no_grad():
                for index in range(len(stream)):
                    stream[index] = norm(stream[index])
        self._reconstruct_end(stack, self.recording.encoder_valid, None)
        self.encoded = (
            self.original if self.carries_original else None,
            self.changed if self.on_compressed else None,
        )

    def _step(self, sublayer: Sublayer) -> Step:
        """The step of a sublayer, with the original's stream advanced through it."""
        block, module = self.blocks[sublayer.name], sublayer.module
        valid, key_valid = self._counted(sublayer)
        step = Step(
            block,
            module,
            inputs=self.changed if self.on_compressed else self.original,
            reference=None,
            arguments=self.recording.arguments[sublayer.name],
            valid=valid,
            key_valid=key_valid,
            encoded=self.encoded[1 if self.on_compressed else 0],
            precision=self.precision,
            width=self.width,
            even_rows=adapter_of_layers(self.loaded.family).even_rows,
        )
        # Where there are keys they are read at least where queries are.
        has_keys = isinstance(block, AttentionBlock) and "k" in block.projections
        of_encoder = isinstance(block, AttentionBlock) and block.reads_encoder
        read = key_valid if has_keys and not of_encoder else valid
        step.reconstruction = self._reconstruction(read, module.layer_norm)  # type: ignore[arg-type]
        if self.carries_original:
            reference = replace(step, inputs=self.original, encoded=self.encoded[0])
            if not self.on_compressed:  # statistics still need the input
                self.original = list(self.original)
            advance_(self.original, reference)
            self._pass_through(sublayer.name)
            step.reference = self.original if self.residual_targets else None
        return step

    def _pass_through(self, name: str) -> None:
        """Advance the original's stream through the dropped layers that follow ``name``."""
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

    def _counted(self, sublayer: Sublayer) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Masks of positions of queries, and of what passes them, and of keys."""
        block, valid = self.blocks[sublayer.name], self._valid(sublayer.stack)
        keys = valid
        if isinstance(block, AttentionBlock) and block.reads_encoder:
            keys = self.recording.encoder_valid
        *_, last = sublayers(self.model)
        if not self.recording.ahead or (sublayer.stack, sublayer.layer) != (last.stack, last.layer):
            return valid, keys
        # Other series are read until the last attention across them, and only the steps ahead.
        across = [
            one.index
            for one in sublayers(self.model)
            if (one.stack, one.layer) == (last.stack, last.layer)
            and is_across(self.blocks[one.name])
        ]
        if is_across(block):
            keys = [*self.recording.ahead]
        before = bool(across) and sublayer.index < across[-1]
        return [*(self.recording.ahead if before else self.recording.forecast)], keys

    def _valid(self, stack: str) -> list[Tensor | None]:
        recording = self.recording
        return recording.encoder_valid if stack == "encoder" else recording.decoder_valid

    def _last_norm(self, stack: str) -> Any:
        return getattr(self.model, stack).final_layer_norm

    def _reconstruction(self, valid: list[Tensor | None], norm: nn.Module | None) -> Tensor | None:
        if self.width is None or not self.residual_targets:
            return None
        return reconstruction(self.original, self.changed, valid, self.width, norm)

    def _reconstruct_end(
        self, stack: str, valid: list[Tensor | None], norm: nn.Module | None
    ) -> None:
        found = self._reconstruction(valid, norm)
        if found is not None:
            self.ends[stack] = found


def is_across(block: Block) -> bool:
    """Whether it is attention across series (group attention of Chronos-2)."""
    return isinstance(block, AttentionBlock) and block.across_series


@torch.no_grad()
def reconstruction(
    original: Sequence[Tensor],
    changed: Sequence[Tensor],
    valid: Sequence[Tensor | None],
    width: int,
    norm: nn.Module | None = None,
) -> Tensor:
    """Linear map that reconstructs the original's normed stream from a sliced one.

    The missing dimensions are reconstructed by damped least squares from the others; the damping
    shrinks them to 0. With ``norm`` None, the streams themselves are used.

    Parameters
    ----------
    original, changed
        ``[B, S, d_model]`` of each batch; only the first ``width`` dimensions of the latter count.
    valid
        Masks of valid positions of each batch; None: all are valid.

    Returns
    -------
    Tensor
        ``[d_model, d_model]``, float64; columns beyond ``width`` are 0.
    """
    size, device = original[0].shape[-1], original[0].device
    cross = torch.zeros(size, width, dtype=torch.float64, device=device)
    second = torch.zeros(width, width, dtype=torch.float64, device=device)
    positions = sum(map(count_positions, original, valid))
    share = min(1.0, _ROWS_PER_NUMBER * size / max(1, positions))
    for index, batch in enumerate(zip(original, changed, valid, strict=True)):
        *streams, counted = batch
        rows = [x.flatten(0, 1) if counted is None else x[counted] for x in streams]
        most = math.ceil(share * len(rows[0]))
        chosen = scattered_picks(len(rows[0]), most, seed=index).to(device)
        rows = [x[chosen] if norm is None else norm(x[chosen]) for x in rows]
        ours = rows[1][:, :width].to(torch.float64)
        cross.addmm_(rows[0].to(torch.float64).T, ours)
        second.addmm_(ours.T, ours)
    found = torch.zeros(size, size, dtype=torch.float64, device=device)
    kept = torch.eye(size, width, dtype=torch.float64, device=device)
    found[:, :width] = least_squares(cross, second, kept, _READING_DAMPING)
    return found


def count_positions(stream: Tensor, valid: Tensor | None) -> int:
    """Valid ones of a stream ``[B, S, d]``."""
    return stream.shape[:2].numel() if valid is None else int(valid.sum())


@torch.no_grad()
def advance_(stream: list[Tensor], step: Step) -> None:
    """Advance a stream through a sublayer in place, part by part."""
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
    """Runs of consecutive indices whose sizes add up to at most ``most``, or a single index."""
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
