"""Outputs that a long work replaces together: it ends, or they are as they were, also after a kill.

While it lasts, what stood there lies beside under another name, and a journal records which did.
The journal is locked, so that nobody else works there and a living process differs from a killed
one, whose half of an output the next one undoes.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tscompress.errors import OutputExistsError, UsageError
from tscompress.io.own_outputs import foreign_part, is_own_file
from tscompress.io.places import CAN_LOCK, followed, foreign, lock, naming, remove, sync

#: First byte of the journal of a work that has ended; a JSON object before.
_ENDED, _OPEN = b"}", b"{"
#: Of names for a few dozen outputs, more than enough.
_LONGEST_JOURNAL = 2**20
#: What this process has claimed, as absolute paths behind all links.
CLAIMED: set[Path] = set()


class Claim:
    """The right to replace some paths, of one process at a time; see :func:`claimed`."""

    def __init__(self, paths: Sequence[Path], descriptor: int | None) -> None:
        self._paths, self._descriptor = paths, descriptor
        #: What a killed process left to undo of other paths, by its journal.
        self._left: dict[str, bool] = {}

    @contextmanager
    def making_way(self) -> Iterator[None]:
        """Move what stands there aside, and delete it when the block ends.

        If it fails, what was there comes back, and what took its place goes.
        """
        there = {str(path): os.path.lexists(path) for path in self._paths}
        written = {_key(p, self._paths): there[str(p)] for p in self._paths}
        self._write(self._left | written)
        try:
            for path in self._paths:
                if there[str(path)]:
                    with naming(path):
                        path.rename(_before(path))
            yield
            self._mark(_ENDED)  # from here on the new outputs are the ones that stay
        except BaseException:
            self._mark(_OPEN)
            _undo(self._paths, there, trusted=True)
            self._write(self._left)
            raise
        for path in self._paths:
            if there[str(path)]:
                remove(_before(path))
        self._write(self._left)

    def undo_killed(self) -> None:
        """Undo what a killed process left of these paths, if its work had not ended.

        Raises
        ------
        OutputExistsError
            The journal is unreadable, something lies at a place of moved outputs without a journal,
            or an output was changed since.
        """
        if self._descriptor is not None:
            record = os.pread(self._descriptor, _LONGEST_JOURNAL, 0)
            if record:
                self._undo(record)
        for path in filter(os.path.lexists, map(_before, self._paths)):
            raise foreign(path, "lies where outputs make way to, and no run recorded it")

    def _undo(self, record: bytes) -> None:
        """Delete what ended works moved; of others, put back what was in paths that are claimed."""
        found = _entries(record, self._paths)
        places = {key: self._paths[0].parent / key for key in found}
        if record[:1] == _ENDED:
            for key, was_there in found.items():
                if was_there:
                    remove(_before(places[key]))
        else:
            own = {_key(path, self._paths): str(path) for path in self._paths}
            there = {own[key]: was_there for key, was_there in found.items() if key in own}
            _undo(self._paths, there, trusted=False)
            for key in found.keys() - own.keys():
                if os.path.lexists(_before(places[key]) if found[key] else places[key]):
                    self._left[key] = found[key]
        self._write(self._left)

    def release(self) -> None:
        """Let others have it; the journal stays where something is left to undo."""
        CLAIMED.difference_update(self._paths)
        if self._descriptor is None:
            return
        if not os.fstat(self._descriptor).st_size:
            journal_of(self._paths[0]).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _write(self, entries: Mapping[str, bool]) -> None:
        """Replace the journal's content; without entries nothing is left to undo."""
        text = json.dumps(entries) if entries else ""
        if self._descriptor is not None:
            with naming(self._paths[0]):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, text.encode(), 0)
                os.fsync(self._descriptor)
                sync(self._paths[0].parent)

    def _mark(self, state: bytes) -> None:
        """Replace the journal's first byte, in one step."""
        if self._descriptor is not None:
            with naming(self._paths[0]):
                os.pwrite(self._descriptor, state, 0)
                os.fsync(self._descriptor)


@contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[Claim]:
    """Keep other processes from some paths while the block runs, and undo what a killed one left.

    The first path stands for all: who claims it claims the others.

    Raises
    ------
    OutputExistsError
        Another process has claimed them. Or a killed one left outputs that were changed since, what
        tscompress did not write, or a journal that cannot be read.
    OutputError
        Nothing can be written there.
    """
    given = list(paths)
    with naming(given[0]):
        places = [followed(path) for path in given]
        places[0].parent.mkdir(parents=True, exist_ok=True)
        claim = Claim(places, _locked(journal_of(places[0]), given[0]))
    CLAIMED.update(places)
    try:
        with naming(given[0]):
            claim.undo_killed()
        yield claim
    finally:
        claim.release()


@contextmanager
def claimed_once(paths: Sequence[Path]) -> Iterator[None]:
    """The same; what this process has claimed already stays claimed by it, and nothing is undone.

    Raises
    ------
    OutputExistsError, OutputError
        As :func:`claimed`.
    """
    with naming(paths[0]):
        held = followed(paths[0]) in CLAIMED
    if held:
        yield
        return
    with claimed(paths):
        yield


def undo_killed(paths: Sequence[Path]) -> None:
    """Undo what a killed process left of outputs that it replaced; raises as :func:`claimed`.

    Nothing is undone of what this process has claimed.
    """
    with naming(paths[0]):
        places = [followed(path) for path in paths]
        if places[0] in CLAIMED:
            return
    if any(map(os.path.lexists, (journal_of(places[0]), *map(_before, places)))):
        with claimed(paths):
            pass


def journal_of(path: Path) -> Path:
    """Where it is written down what stood in a path and others that are claimed with it."""
    return path.with_name(f".{path.name}.tscompress-unfinished")


def _locked(journal: Path, shown: Path) -> int | None:
    """A descriptor of the journal, with its lock; None where there are no locks."""
    while CAN_LOCK:
        if os.path.lexists(journal) and not stat.S_ISREG(journal.lstat().st_mode):
            raise _no_journal(journal)
        descriptor = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        held = lock(descriptor, wait=False)
        if held is None:
            if not os.fstat(descriptor).st_size:
                journal.unlink()
            os.close(descriptor)
            break
        if not held:
            os.close(descriptor)
            raise OutputExistsError(
                f"another process writes to {str(shown)!r}; wait for its end, or choose another "
                "output."
            )
        try:
            found = os.fstat(descriptor)
            if os.path.samestat(journal.lstat(), found):
                return descriptor
        except FileNotFoundError:  # its owner has just ended, and removed it
            pass
        os.close(descriptor)
    return None


def _entries(record: bytes, paths: Sequence[Path]) -> dict[str, bool]:
    """Entries of a journal: whether each path was there. It reaches ``paths`` and its directory.

    Raises
    ------
    OutputExistsError
        No process wrote this, or not to its end.
    """
    with suppress(ValueError, RecursionError, OSError, UsageError):
        found = json.loads(_OPEN + record[1:])
        own = {_key(path, paths) for path in paths}
        if record[:1] in (_OPEN, _ENDED) and all(
            isinstance(was_there, bool) and (key in own or _is_below(key, paths[0].parent))
            for key, was_there in found.items()
        ):
            return dict(found)
    raise _no_journal(journal_of(paths[0]))


def _is_below(key: str, directory: Path) -> bool:
    """Whether a name is that of something in a directory, and not only by a link."""
    return (
        followed(directory / key).parent.is_relative_to(directory) and ".." not in Path(key).parts
    )


def _no_journal(journal: Path) -> OutputExistsError:
    return OutputExistsError(
        f"{str(journal)!r} should record what a killed run moved, and cannot be read; nothing was "
        "undone: look at what lies beside it, then remove it."
    )


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
    """Refuse files that tscompress did not write, or that were changed since.

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
