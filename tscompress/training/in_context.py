"""Training of the small in-context learners of :mod:`tscompress.lab`.

A stopped training resumes to the same weights: batches depend on the seed and the step alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from tscompress.checkpoints.load import check_device
from tscompress.errors import DivergenceError, RecipeError
from tscompress.io.files import write_text_atomically
from tscompress.io.own_outputs import TRAINING_DIRECTORY, TRAINING_LOG
from tscompress.io.strict import Strict
from tscompress.training.checkpoint import (
    STATE_FILE,
    TrainingState,
    load_training_state,
    read_training_record,
    save_training_state,
)

#: The loss of one batch, from the generator of its step.
BatchLoss = Callable[[np.random.Generator], Tensor]
#: What is measured on held-out prompts.
Measure = Callable[[], Mapping[str, float]]


class InContextTraining(Strict):
    """Steps of Adam with a warm-up, a constant part and a linear decay."""

    steps: int = Field(ge=1)
    batch: int = Field(default=64, ge=1, description="prompts of a step")
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=200, ge=0)
    decay_from: float = Field(default=0.6, ge=0, le=1, description="share of steps before decay")
    clip: float = Field(default=1.0, gt=0, description="largest norm of a gradient")
    log_every: int = Field(default=100, ge=1, description="steps from one measurement to the next")
    seed: int = Field(default=0, ge=0)

    def rate(self, step: int) -> float:
        """Learning rate of a step, 0-based."""
        rise = min(1.0, (step + 1) / (self.warmup_steps + 1))
        start = self.decay_from * self.steps
        fall = 1.0 if step < start else (self.steps - step) / max(self.steps - start, 1)
        return self.learning_rate * min(rise, fall)


def train_in_context(
    model: nn.Module,
    loss: BatchLoss,
    measure: Measure,
    training: InContextTraining,
    directory: Path,
    logged: Callable[[Mapping[str, Any]], None] = lambda line: None,
    *,
    setup: str = "",
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Train ``model`` in place, or resume; lines of the log, one a measurement.

    The directory holds ``log.jsonl`` and ``checkpoint``, from which a later call resumes. Lines
    have ``step``, ``loss`` (the mean since the line before) and what ``measure`` returns.

    Parameters
    ----------
    setup
        What else determines the weights: the prompts and the model, as text.
    device
        Where the model is trained; at the end it is moved to the CPU. ``loss`` and ``measure`` go
        by the model's.

    Raises
    ------
    UsageError
        There is no such device.
    RecipeError
        The directory holds a training of other settings or another setup.
    DivergenceError
        The loss is not finite.
    """
    model.to(check_device(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate)
    step, lines = _resume(model, optimizer, training, directory, setup)
    losses: list[float] = []
    while step < training.steps:
        losses.append(_step(model, optimizer, loss, training, step))
        step += 1
        if step % training.log_every == 0 or step == training.steps:
            line = {"step": step, "loss": float(np.mean(losses)), **measure()}
            lines.append(line)
            losses = []
            record = _record(training, setup, lines)
            _save(model, optimizer, TrainingState(step, record), directory, lines)
            logged(line)
    model.to("cpu")
    return lines


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: BatchLoss,
    training: InContextTraining,
    step: int,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = training.rate(step)
    optimizer.zero_grad(set_to_none=True)
    value = loss(np.random.default_rng((training.seed, step)))
    if not math.isfinite(float(value.detach())):
        raise DivergenceError(
            f"the loss is not finite at step {step + 1}; train at a lower learning rate than "
            f"{training.learning_rate:g}."
        )
    value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), training.clip)
    optimizer.step()
    return float(value.detach())


def _record(training: InContextTraining, setup: str, lines: list[dict[str, Any]]) -> dict[str, str]:
    """What a state holds besides weights; the log too, so that a kill loses no line of it."""
    return {
        "recipe": training.model_dump_json(),
        "parts": "[]",
        "setup": setup,
        "log": json.dumps(lines),
    }


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    directory: Path,
    lines: list[dict[str, Any]],
) -> None:
    save_training_state(directory / TRAINING_DIRECTORY, model, optimizer, state)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_text_atomically(directory / TRAINING_LOG, text)


def _resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    training: InContextTraining,
    directory: Path,
    setup: str,
) -> tuple[int, list[dict[str, Any]]]:
    place = directory / TRAINING_DIRECTORY
    if not (place / STATE_FILE).exists():
        return 0, []
    record, ours = read_training_record(place), _record(training, setup, [])
    # A state of before there was a setup has none.
    if any(record.get(name, ours[name]) != ours[name] for name in ("recipe", "setup")):
        raise RecipeError(
            f"{str(directory)!r} holds a training of other settings; resume with those, or choose "
            "another directory."
        )
    lines: list[dict[str, Any]] = json.loads(record["log"])
    return load_training_state(place, model, optimizer).step, lines
