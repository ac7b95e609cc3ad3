"""Outputs that a long work replaces together: it ends, or they are as they were, also after a kill.

While it lasts, what stood there lies beside under another name, and a journal says which did. The
journal is locked, so that nobody else works there and a living process is told from a killed one,
whose half of an output the next one undoes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tscompress.errors import OutputExistsError
from tscompress.io.own_outputs import foreign_part, is_own_file
from tscompress.io.places import CAN_LOCK, followed, foreign, lock, naming, remove, sync

#: First byte of the journal of a work that has ended; a JSON object before.
_ENDED, _OPEN = b"}", b"{"


class Claim:
    """The right to replace some paths, of one process at a time; see :func:`claimed`."""

    def __init__(self, paths: Sequence[Path], descriptor: int | None) -> None:
        self._paths, self._descriptor = paths, descriptor

    @contextmanager
    def making_way(self) -> Iterator[None]:
        """Move what stands there aside, and delete it when the block ends.

        If it fails, what was there comes back, and what took its place goes.
        """
        there = {str(path): os.path.lexists(path) for path in self._paths}
        self._write(json.dumps({_key(p, self._paths): there[str(p)] for p in self._paths}))
        try:
            for path in self._paths:
                if there[str(path)]:
                    remove(_before(path))
                    path.rename(_before(path))
            yield
        except BaseException:
            _undo(self._paths, there, trusted=True)
            self._write("")
            raise
        self._end()
        for path in self._paths:
            if there[str(path)]:
                remove(_before(path))
        self._write("")

    def undo_killed(self) -> None:
        """Undo what a killed process left, if its work had not ended."""
        if self._descriptor is None:
            return
        record = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        try:
            found = json.loads(_OPEN + record[1:])
        except ValueError:  # it was killed before it moved anything
            self._write("")
            return
        there = {str(path): bool(found.get(_key(path, self._paths))) for path in self._paths
                 if _key(path, self._paths) in found}  # fmt: skip
        if record[:1] == _OPEN:
            _undo(self._paths, there, trusted=False)
        else:
            for path in self._paths:
                if there.get(str(path)):
                    remove(_before(path))
        self._write("")

    def release(self) -> None:
        """Let others have it; the journal stays where something is left to undo."""
        if self._descriptor is None:
            return
        if not os.fstat(self._descriptor).st_size:
            journal_of(self._paths[0]).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _write(self, text: str) -> None:
        """Replace the journal's content."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)
            os.fsync(self._descriptor)
            sync(self._paths[0].parent)

    def _end(self) -> None:
        """From here on the new outputs are the ones that stay: one byte, in one step."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, _ENDED, 0)
            os.fsync(self._descriptor)


@contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[Claim]:
    """Keep other processes from some paths while the block runs, and undo what a killed one left.

    The first path stands for all: who claims it claims the others.

    Raises
    ------
    OutputExistsError
        Another process has claimed them. Or a killed one left what was changed since, or what
        tscompress did not write.
    OutputError
        Nothing can be written there.
    """
    given = list(paths)
    with naming(given[0]):
        places = [followed(path) for path in given]
        places[0].parent.mkdir(parents=True, exist_ok=True)
        claim = Claim(places, _locked(journal_of(places[0]), given[0]))
    try:
        with naming(given[0]):
            claim.undo_killed()
        yield claim
    finally:
        claim.release()


@contextmanager
def making_way(paths: Iterable[Path]) -> Iterator[None]:
    """Claim some paths, and :meth:`Claim.making_way` for what takes their place."""
    with claimed(paths) as claim, claim.making_way():
        yield


def undo_killed(paths: Sequence[Path]) -> None:
    """Undo what a killed process left of outputs that it replaced; raises as :func:`claimed`."""
    if os.path.lexists(journal_of(followed(paths[0]))):
        with claimed(paths):
            pass


def journal_of(path: Path) -> Path:
    """Where it is written down what stood in a path and others that are claimed with it."""
    return path.with_name(f".{path.name}.tscompress-unfinished")


def _locked(journal: Path, shown: Path) -> int | None:
    """A descriptor of the journal, with its lock; None where there are no locks."""
    while CAN_LOCK:
        descriptor = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        held = lock(descriptor, wait=False)
        if held is None:
            os.close(descriptor)
            journal.unlink()
            break
        if not held:
            os.close(descriptor)
            raise OutputExistsError(
                f"another process writes to {str(shown)!r}; wait for its end, or choose another "
                "output."
            )
        try:
            if os.path.samestat(journal.lstat(), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:  # its owner has just ended, and removed it
            pass
        os.close(descriptor)
    return None


def _undo(paths: Sequence[Path], there: Mapping[str, bool], *, trusted: bool) -> None:
    """Put back what was there, and take away what was not.

    With ``trusted`` this process made all of it; otherwise only what tscompress wrote goes.
    """
    for path in paths:
        was_there = there.get(str(path))
        if was_there is None or (was_there and not os.path.lexists(_before(path))):
            continue
        if os.path.lexists(path):
            if not trusted:
                _check_own(path)
            _remove_at_once(path)
        if was_there:
            _before(path).rename(path)


def _check_own(path: Path) -> None:
    """Refuse what tscompress did not write, or what was changed since.

    Raises
    ------
    OutputExistsError
    """
    if path.is_dir() and not path.is_symlink():
        part = foreign_part(path)
    else:
        part = None if is_own_file(path) else path.name
    if part is not None:
        raise foreign(
            path,
            f"was left by a run that was killed, and holds {part!r}, which tscompress did not "
            "write, or which was changed since",
        )


def _remove_at_once(path: Path) -> None:
    """A directory first gets the name of a leftover: a kill leaves no half of it in its place."""
    if path.is_dir() and not path.is_symlink():
        leftover = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        path.rename(leftover)
        path = leftover
    remove(path)


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.tscompress-before")


def _key(path: Path, paths: Sequence[Path]) -> str:
    """Names in the journal are relative, so that the directory may be moved."""
    return os.path.relpath(path, paths[0].parent)
