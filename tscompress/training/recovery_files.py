"""Checkpoint and log of a recovery, in its directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tscompress.errors import RecipeError, UsageError
from tscompress.io.files import check_file, write_text_atomically
from tscompress.io.own_outputs import RANKS_LOG, TRAINING_LOG
from tscompress.training.checkpoint import (
    STATE_FILES,
    TrainingState,
    load_training_state,
    read_training_record,
    save_training_state,
    unfinished_states,
)
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_state import (
    CHECKPOINT,
    OTHER,
    RecoveryProgress,
    differing_settings,
    recorded_digests,
)

LOG_FILE = TRAINING_LOG
#: All that a recovery writes into its directory, in the order in which it may be removed: the log,
#: which identifies a half-written state, last.
RECOVERY_FILES = (*(f"{CHECKPOINT}/{name}" for name in STATE_FILES), RANKS_LOG, LOG_FILE)


@dataclass
class Snapshot:
    """What a checkpoint holds besides the student and its optimizer.

    Attributes
    ----------
    step, seconds
        How far the run is.
    held_out
        State of the held-out losses, see :class:`tscompress.training.held_out.HeldOut`.
    best
        Weights that were best on held-out series, by name.
    pending, counted
        Losses since the last line of the log, and the number of series that they are summed over:
        distance to the teacher, loss on the targets, and their weighted sum.
    """

    step: int
    seconds: float
    held_out: dict[str, float]
    best: dict[str, Tensor]
    pending: np.ndarray[Any, Any]
    counted: int


class RecoveryFiles:
    """Checkpoint and log of one run.

    Parameters
    ----------
    directory
        None: nothing is written.
    config, models
        Settings and :func:`~tscompress.training.recovery_state.run_digests` of the run, which a
        checkpoint must have to be resumed from.
    scheme
        The family's ``recovery_scheme``, likewise.
    writes
        False in all processes but one.
    """

    def __init__(
        self,
        directory: Path | None,
        config: RecoveryConfig,
        models: dict[str, str],
        scheme: int,
        writes: bool,
    ) -> None:
        self.directory, self.config, self.models = directory, config, models
        self.scheme = scheme
        self._target = directory if writes else None

    def clear(self) -> None:
        """Remove the files of an earlier run, so that none resumes from them.

        Raises
        ------
        OutputExistsError
            There is a file that no recovery wrote.
        """
        if self._target is None:
            return
        self._target.mkdir(parents=True, exist_ok=True)
        stale = unfinished_states(self._target / CHECKPOINT)
        stale += [self._target / name for name in RECOVERY_FILES]  # the log last
        for path in stale:
            check_file(path, force=True)
        for path in stale:
            path.unlink(missing_ok=True)

    def append(self, line: RecoveryProgress) -> None:
        """Add a line to the log."""
        if self._target is not None:
            with (self._target / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(_json_line(line))

    def save(self, snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Replace the checkpoint."""
        if self._target is None:
            return
        record = {
            "config": self.config.model_dump_json(),
            "models": json.dumps(self.models),
            "scheme": str(self.scheme),
            "seconds": repr(snapshot.seconds),
            "held_out": json.dumps(snapshot.held_out),
            "pending": json.dumps([*snapshot.pending.tolist(), snapshot.counted]),
        }
        state = TrainingState(snapshot.step, record, snapshot.best)
        save_training_state(self._target / CHECKPOINT, model, optimizer, state)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Snapshot, list[RecoveryProgress]]:
        """Restore ``model`` and ``optimizer``; the rest of the checkpoint, and the log up to it.

        Raises
        ------
        UsageError
            There is no directory.
        RecipeError
            There is no checkpoint, or it is one of other settings or models.
        CorruptCheckpointError
            It is damaged.
        """
        if self.directory is None:
            raise UsageError("resume needs the directory of the run.")
        checkpoint = self.directory / CHECKPOINT
        self._check_same_run(checkpoint)
        state = load_training_state(checkpoint, model, optimizer)
        *pending, counted = json.loads(state.record["pending"])
        if len(pending) == 4:  # of before, with a distance of layers that is gone
            del pending[2]
        snapshot = Snapshot(
            step=state.step,
            seconds=float(state.record["seconds"]),
            held_out=json.loads(state.record["held_out"]),
            best=state.kept,
            pending=np.array(pending),
            counted=counted,
        )
        history = [line for line in read_log(self.directory) if line.step <= state.step]
        if self._target is not None:  # a killed run may have logged steps that it did not save
            lines = "".join(map(_json_line, history))
            write_text_atomically(self._target / LOG_FILE, lines)
        return snapshot, history

    def _check_same_run(self, checkpoint: Path) -> None:
        record = read_training_record(checkpoint)
        for name, (stored, ours) in differing_settings(record, self.config, self.scheme).items():
            raise RecipeError(
                f"{checkpoint} is of a run with {name} {stored}, not {ours}; "
                "resume with the same options, or start afresh."
            )
        for role, digest in recorded_digests(record).items():
            if digest != self.models[role]:
                raise RecipeError(
                    f"{checkpoint} is of a run with {OTHER[role]}; resume with the same models and "
                    "series, or start afresh."
                )


def _json_line(line: RecoveryProgress) -> str:
    return json.dumps(asdict(line)) + "\n"


def read_log(directory: Path) -> list[RecoveryProgress]:
    """The lines of a run's log; a last one that was cut in two is left out."""
    path = directory / LOG_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for text in lines:
        try:
            line = json.loads(text)
            line.pop("hidden", None)  # of before, a distance of layers
            found.append(RecoveryProgress(**line))
        except (ValueError, TypeError, AttributeError):
            break
    return found
