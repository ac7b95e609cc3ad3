"""Progress and result of a recovery, and whether a checkpoint belongs to a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.load import LoadedModel
from tscompress.data.reading.tables import naming_file
from tscompress.data.series import Given
from tscompress.data.streaming import series_files
from tscompress.data.training_collections import training_series
from tscompress.families.registry import adapter_of
from tscompress.io.files import user_path
from tscompress.io.hashing import known_sha256_of
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

#: So many series of what has no length are part of a run's hash.
_UNCOUNTED = 64
#: Key of the record of a recovery that also trained on series which its settings do not name.
BESIDE_CONFIG = "series_beside_config"
#: What differs if the hash of a run does.
OTHER = {
    "student": "another student", "teacher": "another teacher", "series": "other series",
    "collections": "other series of a wheel",
}  # fmt: skip


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
    replayed
        The settings that a recipe replays it with, if not ``config``: a file that came beside
        these is among its series.
    beside_config
        It also trained on series that ``replayed`` does not name, such as arrays.
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
    replayed: RecoveryConfig | None = field(default=None, repr=False)
    beside_config: bool = False

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
            "config": (self.replayed or self.config).model_dump(mode="json"),
            "steps": self.steps,
            "best_step": self.best_step,
            "seconds": round(self.seconds, 1),
            "held_out_before": self.before,
            "held_out_after": self.after,
            **({BESIDE_CONFIG: True} if self.beside_config else {}),
            **({} if self.finished else {"finished": False}),
        }


OnRecovery = Callable[[RecoveryProgress], None]


def has_checkpoint(directory: Path) -> bool:
    """Whether a recovery left a checkpoint to resume from."""
    return (directory / CHECKPOINT / STATE_FILE).exists()


def can_resume(
    student: LoadedModel,
    teacher: LoadedModel,
    config: RecoveryConfig,
    directory: Path,
    series: Given = None,
) -> bool:
    """Whether ``directory`` holds a checkpoint of this very run: all but how long is the same.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    if not has_checkpoint(directory):
        return False
    return differences_from(directory, config, teacher, student, series) is None


def differences_from(
    directory: Path,
    config: RecoveryConfig,
    teacher: LoadedModel,
    student: LoadedModel | None = None,
    series: Given = None,
) -> str | None:
    """Why a run cannot resume from the checkpoint in ``directory``; None: it can.

    Without a ``student``, only differences that are known before compression. ``series`` are those
    that a caller gave beside ``config``.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    if not has_checkpoint(directory):
        return None
    record = read_training_record(directory / CHECKPOINT)
    scheme = adapter_of(teacher.family).defaults.recovery_scheme
    ours = config.resolved(student or teacher, teacher, series_given=series is not None)
    found = differing_settings(record, ours, scheme)
    if student is None and config.learning_rate is None:
        found.pop("learning_rate", None)  # it follows how much was cut
    for name in ("real_series", "synthetic_share"):
        if getattr(config, name) is None:
            found.pop(name, None)  # it follows whether series were given
    for name, (before, now) in found.items():
        return f"{name} {before}, not {now}"
    stored = recorded_digests(record)
    for role, digest in run_digests(student or teacher, teacher, ours, series).items():
        if (role != "student" or student is not None) and digest != stored.get(role, digest):
            return OTHER[role]
    return None


def run_digests(
    student: LoadedModel, teacher: LoadedModel, config: RecoveryConfig, series: Given
) -> dict[str, str]:
    """Hashes of what a run learns with, before it changes it: of :data:`OTHER`'s keys."""
    models = {"student": student, "teacher": teacher}
    found = {role: model_digest(loaded.forecaster) for role, loaded in models.items()}
    collections = training_series(config.real_series or ())  # but for those that are scored
    return {
        **found,
        "series": _series_digest([*config.series, series]),
        "collections": _series_digest([collections]),
    }


def _series_digest(sources: Iterable[Given]) -> str:
    """Of values and files their content; of a directory the names and sizes of its files.

    Of the Hub's datasets the name, and of what has no length, such as a simulator, the first
    values.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    digest = hashlib.sha256()
    for source in sources:
        if isinstance(source, str | Path):
            path = user_path(source)
            with naming_file(path):
                digest.update(_path_digest(path).encode())
        elif source is not None:
            for values in source if isinstance(source, Sized) else islice(source, _UNCOUNTED):
                with suppress(TypeError, ValueError):  # what is no list of numbers is refused later
                    numbers = np.ascontiguousarray(values, dtype=np.float64)
                    digest.update(f"{numbers.shape}".encode() + numbers.tobytes())
    return digest.hexdigest()


def _path_digest(path: Path) -> str:
    if path.is_dir():
        return str([(str(f.relative_to(path)), f.stat().st_size) for f in series_files(path)])
    return known_sha256_of(path) if path.is_file() else str(path)


def recorded_digests(record: dict[str, str]) -> dict[str, str]:
    """What :func:`run_digests` was, as a checkpoint records it; earlier ones without series."""
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
    # Nothing reads it then; earlier records have one all the same.
    if ours["synthetic_share"] is None:
        stored["synthetic_share"] = None
    return {
        name: (stored.get(name), value)
        for name, value in {**ours, **lost}.items()
        if value != stored.get(name) and name not in _FREE_ON_RESUME
    }
