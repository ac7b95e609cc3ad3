"""What every training run needs: batches, a stop that loses nothing, and checkpoints.

The batch of a step depends on nothing but its generator, optimizer state is saved with the weights,
and a checkpoint replaces the one before it in one rename: a run that was stopped or killed goes on
to the weights it would have had.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from tscompress.checkpoints.format import save_tensors
from tscompress.data.synthetic import FloatArray
from tscompress.errors import CorruptCheckpointError, RecipeError

STATE_FILE = "state.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")

# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


class Bucket(BaseModel):
    """One batch shape, drawn with ``weight`` against the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context_length: int = Field(ge=2)
    horizon: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    weight: float = Field(default=1.0, gt=0)


def draw_bucket(rng: np.random.Generator, buckets: Sequence[Bucket]) -> Bucket:
    """One of the buckets, in proportion to their weights."""
    weights = np.array([bucket.weight for bucket in buckets])
    return buckets[rng.choice(len(weights), p=weights / weights.sum())]


def split_windows(
    rng: np.random.Generator,
    windows: FloatArray,
    context_length: int,
    missing_probability: float,
    shorten_probability: float = 0.5,
) -> tuple[FloatArray, FloatArray]:
    """Context ``[B, T]`` and target ``[B, H]`` of windows ``[B, T + H]``, as a model meets them.

    A share ``shorten_probability`` of the contexts is shortened, in a share
    ``missing_probability`` of them values go missing, and targets that cannot follow from their
    context are NaN.
    """
    context, target = windows[:, :context_length].copy(), windows[:, context_length:].copy()
    _shorten_contexts(rng, context, shorten_probability)
    _drop_values(rng, context, missing_probability)
    _mask_unpredictable(context, target)
    # A context in which nothing is observed has no scale; give it one value to normalise by.
    context[~np.isfinite(context).any(axis=1), -1] = 0.0
    return context, target


def _shorten_contexts(rng: np.random.Generator, context: FloatArray, probability: float) -> None:
    """Some of the series keep a shorter history, uniformly from 6 steps to the bucket's."""
    count, length = context.shape
    kept = rng.integers(min(6, length), length + 1, size=count)
    kept[rng.random(count) >= probability] = length
    context[np.arange(length)[None, :] < length - kept[:, None]] = np.nan


def _drop_values(rng: np.random.Generator, context: FloatArray, probability: float) -> None:
    count, length = context.shape
    share = rng.uniform(0, 0.3, (count, 1)) * (rng.random((count, 1)) < probability)
    context[rng.random((count, length)) < share] = np.nan


def _mask_unpredictable(context: FloatArray, target: FloatArray) -> None:
    """Targets many deviations away from their context teach nothing and swamp the loss."""
    with np.errstate(all="ignore"):
        observed = np.isfinite(context)
        count = np.maximum(observed.sum(axis=1, keepdims=True), 1)
        mean = np.where(observed, context, 0).sum(axis=1, keepdims=True) / count
        spread = np.sqrt(
            (np.where(observed, context - mean, 0) ** 2).sum(axis=1, keepdims=True) / count
        )
        distant = ~(np.abs(target - mean) <= 15 * spread + 1e-6 * np.abs(mean))
    target[distant] = np.nan


# --------------------------------------------------------------------------------------------------
# Stopping
# --------------------------------------------------------------------------------------------------


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a flag, so that a step is never cut in two."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other is told of signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:  # a second signal means now
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def attention_for_training(model: nn.Module) -> Iterator[None]:
    """Within the block, attention with learnt biases is plain products of matrices on a CPU.

    There, fused attention has no fast way back through a bias that is learnt.
    """
    configs: list[Any] = []
    device = next(model.parameters()).device.type
    if device == "cpu" and any("relative_attention_bias" in n for n, _ in model.named_parameters()):
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        configs = [c for c in found.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    for config in configs:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """What a checkpoint holds besides weights and moments.

    Attributes
    ----------
    step
        Steps done.
    record
        Anything else, as text.
    kept
        Further weights by name, such as the best so far.
    """

    step: int
    record: dict[str, str] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)


def save_training_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Weights and moments of the optimizer as safetensors, replaced in one rename."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value.detach()
    tensors |= {f"kept.{name}": value for name, value in state.kept.items()}
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{STATE_FILE}.tmp"
    save_tensors(
        {key: value.contiguous() for key, value in tensors.items()},
        temporary,
        {**state.record, "step": str(state.step)},
    )
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    temporary.replace(directory / STATE_FILE)


def read_training_record(directory: Path) -> dict[str, str]:
    """The record of a checkpoint, ``step`` among it, without its weights.

    Raises
    ------
    RecipeError
        There is no checkpoint.
    CorruptCheckpointError
        The file is damaged.
    """
    path = directory / STATE_FILE
    if not path.exists():
        raise RecipeError(f"there is no checkpoint at {str(path)!r} to resume from.")
    with _readable(path), safe_open(path, framework="pt") as reader:
        record: dict[str, str] = dict(reader.metadata())
        int(record["step"])
        return record


def load_training_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainingState:
    """Restore what :func:`save_training_state` wrote.

    Raises
    ------
    RecipeError
        There is no checkpoint.
    CorruptCheckpointError
        The file is damaged, or belongs to a model of another shape.
    """
    record = read_training_record(directory)
    path = directory / STATE_FILE
    with _readable(path):
        tensors = load_file(path)
    for name, parameter in model.named_parameters():
        stored = tensors.get(f"model.{name}")
        if stored is None or stored.shape != parameter.shape:
            raise CorruptCheckpointError(
                f"{path} has no {name} of shape {tuple(parameter.shape)}; it belongs to another "
                "recipe. Resume with that one, or choose another output."
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            moments = {
                key: tensors[f"optimizer.{key}.{name}"].to(parameter.device, copy=True)
                for key in _MOMENTS
                if f"optimizer.{key}.{name}" in tensors
            }
            if moments:
                optimizer.state[parameter] = moments
    kept = {
        key.removeprefix("kept."): value
        for key, value in tensors.items()
        if key.startswith("kept.")
    }
    return TrainingState(int(record.pop("step")), record, kept)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns whatever a damaged file makes safetensors raise into one error."""
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}; start afresh.") from None
