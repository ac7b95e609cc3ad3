"""Progress and result of a recovery, and whether a checkpoint belongs to a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.load import LoadedModel
from tscompress.families.registry import adapter_of
from tscompress.io.own_outputs import TRAINING_DIRECTORY
from tscompress.training.checkpoint import STATE_FILE, read_training_record
from tscompress.training.rank_watch import Row
from tscompress.training.recovery_config import RecoveryConfig

CHECKPOINT = TRAINING_DIRECTORY

#: Settings that may differ between a run and the one that resumes from its checkpoint.
_FREE_ON_RESUME = frozenset(
    {
        "learning_rate",
        "patience",
        "precision",
        "checkpoint_steps",
        "checkpoint_minutes",
        "watch_ranks",
    }
)


@dataclass(frozen=True)
class RecoveryProgress:
    """What a run reports; one line of its log.

    Attributes
    ----------
    loss, teacher, truth
        Means over the steps since the line before: the weighted sum, and its parts.
    held_out, held_out_teacher, held_out_truth
        The same on held-out series, where they were evaluated.
    series_per_second
        All processes together, without evaluation.
    """

    step: int
    total_steps: int | None
    seconds: float
    eta_seconds: float
    loss: float | None = None
    teacher: float | None = None
    truth: float | None = None
    learning_rate: float | None = None
    series_per_second: float | None = None
    held_out: float | None = None
    held_out_teacher: float | None = None
    held_out_truth: float | None = None

    @property
    def share(self) -> float:
        """Of the run that is done, 0 to 1."""
        return self.seconds / max(self.seconds + self.eta_seconds, 1e-9)


@dataclass
class RecoveryResult:
    """How a run went.

    Attributes
    ----------
    finished
        False after Ctrl-C.
    best_step
        The step whose weights the student has.
    before, after
        The weighted loss on held-out series of the student as it came and as it is.
    ranks
        Rows of a rank watch, if the config asks for one.
    """

    finished: bool
    teacher: str
    steps: int
    seconds: float
    best_step: int
    before: float
    after: float
    config: RecoveryConfig
    history: list[RecoveryProgress] = field(repr=False)
    ranks: list[Row] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        end = "" if self.finished else ", stopped"
        return (
            f"RecoveryResult(from {self.teacher!r}, {self.steps} steps in {self.seconds:.0f} s, "
            f"held-out loss {self.before:.4g} -> {self.after:.4g} at step {self.best_step}{end})"
        )

    @property
    def note(self) -> str | None:
        """That no step was better than the student as it came, where none was; in one line."""
        if self.best_step or not self.finished:
            return None
        return (
            f"recovery won nothing back in {self.steps} steps at a learning rate of "
            f"{self.config.learning_rate:.1e}, and the weights it began with are kept; "
            "try more minutes or another learning rate."
        )

    def record(self) -> dict[str, Any]:
        """For ``provenance.json``."""
        return {
            "teacher": self.teacher,
            "config": self.config.model_dump(mode="json"),
            "steps": self.steps,
            "best_step": self.best_step,
            "seconds": round(self.seconds, 1),
            "held_out_before": self.before,
            "held_out_after": self.after,
        }


OnRecovery = Callable[[RecoveryProgress], None]


def has_checkpoint(directory: Path) -> bool:
    """Whether a recovery left a checkpoint to resume from."""
    return (directory / CHECKPOINT / STATE_FILE).exists()


def can_resume(
    student: LoadedModel, teacher: LoadedModel, config: RecoveryConfig, directory: Path
) -> bool:
    """Whether ``directory`` holds a checkpoint of this very run: models and settings are the same.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    return (
        has_checkpoint(directory) and differences_from(directory, config, teacher, student) is None
    )


def differences_from(
    directory: Path,
    config: RecoveryConfig,
    teacher: LoadedModel,
    student: LoadedModel | None = None,
) -> str | None:
    """Why a run cannot resume from the checkpoint in ``directory``; None: it can.

    Without a ``student``, only differences that are known before compression.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    if not has_checkpoint(directory):
        return None
    record = read_training_record(directory / CHECKPOINT)
    scheme = adapter_of(teacher.family).defaults.recovery_scheme
    found = differing_settings(record, config.resolved(student or teacher, teacher), scheme)
    if student is None and config.learning_rate is None:
        found.pop("learning_rate", None)  # it follows how much was cut
    for name in ("real_series", "synthetic_share"):
        if getattr(config, name) is None:
            found.pop(name, None)  # it follows whether series were given
    for name, (stored, ours) in found.items():
        return f"{name} {stored}, not {ours}"
    for role, digest in model_digests(student or teacher, teacher).items():
        if (role == "teacher" or student is not None) and digest != recorded_digests(record)[role]:
            return f"another {role}"
    return None


def model_digests(student: LoadedModel, teacher: LoadedModel) -> dict[str, str]:
    """Hashes of the models of a run, before it changes them."""
    models = {"student": student, "teacher": teacher}
    return {role: model_digest(loaded.forecaster) for role, loaded in models.items()}


def recorded_digests(record: dict[str, str]) -> dict[str, str]:
    """SHA-256 of student and teacher, as a checkpoint records them."""
    found: dict[str, str] = json.loads(record.get("models", "{}"))
    return found


def differing_settings(
    record: dict[str, str], config: RecoveryConfig, scheme: int
) -> dict[str, tuple[Any, Any]]:
    """Settings in which a checkpoint's run differs from ``config``, and both their values.

    ``scheme``: the family's ``recovery_scheme``; checkpoints of 1 do not record it.
    """
    stored, ours = json.loads(record.get("config", "{}")), config.model_dump(mode="json")
    lost = {name: allowed[0] for name, allowed in config.removed.items() if name in stored}
    stored["recovery_scheme"], ours["recovery_scheme"] = int(record.get("scheme", "1")), scheme
    return {
        name: (stored.get(name), value)
        for name, value in {**ours, **lost}.items()
        if value != stored.get(name) and name not in _FREE_ON_RESUME
    }
