"""The recovery of a compression: where it stands, how it goes on, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.series import Given
from tscompress.errors import CorruptCheckpointError, OutputExistsError
from tscompress.io.files import check_output
from tscompress.io.making_way import undo_killed
from tscompress.progress import OnProgress
from tscompress.training.checkpoint import unfinished_states
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_files import RECOVERY_FILES
from tscompress.training.recovery_state import (
    CHECKPOINT,
    RecoveryResult,
    can_resume,
    differences_from,
)
from tscompress.workflows.save import CompressedModel


def recovery_directory(output: Path) -> Path:
    """Where the recovery of a checkpoint at ``output`` is resumed from."""
    return output.parent / f"{output.name}.recovery"


def check_recovery_directory(work: Path, inputs: Iterable[str | Path | None]) -> None:
    """Refuse a directory where a recovery would replace other files, or another process trains.

    Raises
    ------
    OutputExistsError, OutputError
        As :func:`tscompress.io.files.check_output`, and as
        :func:`~tscompress.workflows.claims.claimed_by_main`.
    """
    undo_killed([work])
    check_output(work, force=True, inputs=inputs, writes=RECOVERY_FILES, in_place=True)


def check_unfinished(directory: Path, differs: str | None) -> None:
    """Refuse to replace a recovery that was stopped and is not the one that is asked for.

    Raises
    ------
    OutputExistsError
    """
    if differs is not None:
        raise OutputExistsError(
            f"{str(directory)!r} holds a recovery that did not finish, with {differs}; resume it "
            "as it was begun, or start afresh with --force (force=True)."
        )


def recover_resumed_(
    loaded: LoadedModel,
    original: LoadedModel,
    config: RecoveryConfig,
    series: Given,
    directory: Path | None,
    force: bool,
    on_progress: OnProgress,
) -> RecoveryResult:
    """Distil from the original; a stopped run of the same resumes.

    Raises
    ------
    OutputExistsError
        ``directory`` holds a stopped run of another, and ``force`` is false.
    CorruptCheckpointError
        It cannot be read, and ``force`` is false.
    KeyboardInterrupt
        It was stopped.
    """
    stopped = directory is not None and _can_resume(
        loaded, original, config, directory, series, force=force
    )
    if directory is not None and not force:
        check_unfinished(directory, differences_from(directory, config, original, loaded, series))
    result = recover_(
        loaded,
        original,
        config,
        series=series,
        directory=directory,
        resume=stopped,
        report=lambda line: on_progress("recover", round(1000 * line.share), 1000),
    )
    if not result.finished:
        raise KeyboardInterrupt
    return result


def _can_resume(
    loaded: LoadedModel,
    original: LoadedModel,
    config: RecoveryConfig,
    directory: Path,
    series: Given,
    *,
    force: bool,
) -> bool:
    try:
        return can_resume(loaded, original, config, directory, series)
    except CorruptCheckpointError:
        if not force:
            raise
        return False


def finish_recovery(compressed: CompressedModel, work: Path) -> None:
    """Remove the state of a recovery in ``work``, whose result is saved."""
    if compressed.recovery is None:
        return
    for path in (*unfinished_states(work / CHECKPOINT), *(work / name for name in RECOVERY_FILES)):
        path.unlink(missing_ok=True)
    for directory in (work / CHECKPOINT, work):
        with suppress(OSError):  # it is not there, or holds something else
            directory.rmdir()
