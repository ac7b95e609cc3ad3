"""Checkpoints of a training run: weights, moments of the optimizer and a record, in one file.

A checkpoint replaces the previous one in one rename, so a stopped or killed run resumes to the same
weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from tscompress.checkpoints.format import save_tensors
from tscompress.errors import CorruptCheckpointError, RecipeError
from tscompress.io.own_outputs import TRAINING_STATE, UNFINISHED_STATE, is_unfinished_state

STATE_FILE = TRAINING_STATE
STATE_FILES = (STATE_FILE, UNFINISHED_STATE)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class TrainingState:
    """Content of a checkpoint besides weights and moments.

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
    for path in unfinished_states(directory):
        path.unlink(missing_ok=True)
    temporary = directory / UNFINISHED_STATE
    save_tensors(
        {key: value.contiguous() for key, value in tensors.items()},
        temporary,
        {**state.record, "step": str(state.step)},
    )
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    temporary.replace(directory / STATE_FILE)


def unfinished_states(directory: Path) -> list[Path]:
    """What saves that were killed left: safetensors writes under a name of its own at first."""
    return [path for path in directory.glob(".tmp*") if is_unfinished_state(path)]


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
        key.removeprefix("kept."): value.clone()  # the file is mapped, and will be replaced
        for key, value in tensors.items()
        if key.startswith("kept.")
    }
    return TrainingState(int(record.pop("step")), record, kept)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error of safetensors on a damaged file into a CorruptCheckpointError."""
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}; start afresh.") from None
