"""Where a path leads, what stands there, and the one line of an error about it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tscompress.errors import OutputError, OutputExistsError, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Whether this system has locks that end with a process.
CAN_LOCK = fcntl is not None
#: Errors of a system that cannot flush a directory.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
#: Messages of the system where there is no room left.
_FULL = {os.strerror(code) for code in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))}


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Turn the system's error about a temporary file into one line about ``target``."""
    try:
        yield
    except OutputError as error:
        raise cannot_write(target, error.reason or str(error)) from error
    except OSError as error:
        raise cannot_write(target, error.strerror or str(error)) from error


def cannot_write(target: Path, reason: str) -> OutputError:
    """The error of a file or directory that cannot be written."""
    advice = "make room, or choose another output" if reason in _FULL else "choose another output"
    return OutputError(f"{str(target)!r} cannot be written: {reason}; {advice}.", reason)


def followed(target: Path) -> Path:
    """The absolute path behind all links, also behind one that leads to nothing yet.

    Raises
    ------
    UsageError
        The name cannot be written into a file.
    """
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in str(target)):
        raise UsageError(
            f"{str(target)!r} is no name in UTF-8, in which records name it; choose another output."
        )
    place = Path(os.path.realpath(target))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


def foreign(target: Path, what: str) -> OutputExistsError:
    """The error of what tscompress did not write, and so does not replace."""
    return OutputExistsError(
        f"{str(target)!r} {what}; --force replaces nothing else: choose another output, or move "
        "that away."
    )


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk; Windows flushes only files, open for writing."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Directories of shared folders of virtual machines, among others, cannot be flushed.
        if error.errno not in _NO_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool) -> bool | None:
    """Hold the lock of an open file or directory until it is closed.

    False: another process holds it. None: there are no locks here, see also :data:`CAN_LOCK`.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
