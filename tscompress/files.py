"""Writing so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tscompress.errors import OutputExistsError


def write_text_atomically(path: Path, text: str) -> None:
    """Write to a temporary sibling, flush it to disk, and rename it over ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_output(directory: Path, *, force: bool) -> None:
    """Refuse a target that holds something, unless ``force``.

    Raises
    ------
    OutputExistsError
    """
    if force or not directory.exists():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise OutputExistsError(
            f"{str(directory)!r} exists already; choose another output or pass --force."
        )


@contextmanager
def new_directory(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary sibling of ``target`` that takes its place when the block ends without an error.

    Raises
    ------
    OutputExistsError
        ``target`` holds something and ``force`` is false.
    """
    check_output(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        # Temporary files are private; the target gets what mkdir and open would have given it.
        mask = os.umask(0)
        os.umask(mask)
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(0o666 & ~mask)
                _sync(file)
        _sync(temporary)
        temporary.chmod(0o777 & ~mask)
        _replace_directory(temporary, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_directory(source: Path, target: Path) -> None:
    if not target.exists():
        source.rename(target)
        return
    # A directory cannot be renamed over a full one: move the old one aside first.
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) / target.name
    target.rename(old)
    try:
        source.rename(target)
    except BaseException:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
