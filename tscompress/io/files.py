"""Writing so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tscompress.errors import OutputError, OutputExistsError, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 100
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: What the system says where there is no room left.
_FULL = {os.strerror(code) for code in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))}


def user_path(text: str | Path) -> Path:
    """A path as a person writes it: ``~`` is the home, also where no shell has expanded it.

    Raises
    ------
    UsageError
        It is empty, which would be the working directory.
    """
    if not str(text):
        raise UsageError("an empty path was given; give a name, or . for the working directory.")
    return Path(os.path.expanduser(text))  # noqa: PTH111  (~nobody stays as it is, as in a shell)


def write_text_atomically(path: Path, text: str) -> None:
    """Write to a temporary sibling, flush it to disk, and rename it over ``path``.

    Raises
    ------
    OutputError
        The disk is full, or the directory cannot be written to.
    """
    with _naming(path):
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


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Turns what the system says of a temporary file into one line about ``target``."""
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


def cache_directory() -> Path:
    """``$TSCOMPRESS_CACHE``, or ``tscompress`` in the user's directory of caches."""
    own, shared = (os.environ.get(name) for name in ("TSCOMPRESS_CACHE", "XDG_CACHE_HOME"))
    if own:
        return user_path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "tscompress"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def git_hash_of(path: Path) -> str:
    """The name that git gives to the content of a file, hexadecimal."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def check_output(
    target: Path,
    *,
    force: bool,
    inputs: Iterable[str | Path | None] = (),
    keep: bool = False,
    in_place: bool = False,
) -> None:
    """Refuse, before any work, an output that cannot be written or would cost something.

    Parameters
    ----------
    target
        A file or directory; a link stands for what it points to.
    force
        What the target holds may be replaced.
    inputs
        Files and directories that the work reads; not None, nor names that nothing here has, such
        as a Hub id.
    keep
        What the target holds stays, so that inputs may lie in it; see :func:`new_directory`.
    in_place
        Files are written into a directory that is there; no new one takes its place.

    Raises
    ------
    OutputExistsError
        It holds something and ``force`` is false. Also with ``force`` where it would replace an
        input, or the home or the working directory.
    OutputError
        It cannot be made where it is to be.
    UsageError
        Its name cannot be written into a file.
    """
    with _naming(target):
        place = _followed(target)
        _spare(target, place, inputs, keep=keep)
        there = place.exists()
        empty = place.is_dir() and not any(place.iterdir())
        if there and not empty and not force:
            raise _exists(target)
        if there and not (in_place and empty) and place in _irreplaceable():
            raise OutputExistsError(
                f"{str(target)!r} is or holds the home or the working directory, and would "
                "be replaced whole; choose an output of its own."
            )
        if not in_place and os.path.ismount(place):
            raise OutputExistsError(
                f"{str(target)!r} is a mount point, and would be replaced whole; choose an output "
                f"in it, such as {str(target / 'output')!r}."
            )
        # Better said now than when the work is done.
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(_aside(place))  # its name is the longest
        candidates = (place, *place.parents) if in_place else place.parents
        above = next(directory for directory in candidates if directory.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _followed(target: Path) -> Path:
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


def _spare(target: Path, place: Path, inputs: Iterable[str | Path | None], *, keep: bool) -> None:
    """Refuse to replace ``place`` where it is an input, is part of one, or has one in it.

    Raises
    ------
    OutputExistsError
    """
    if not place.exists():
        return
    for given in inputs:
        source = os.path.expanduser(given or "")  # noqa: PTH111
        if not os.path.exists(source):  # noqa: PTH110  (False too of what can be no path)
            continue
        paths = Path(source).absolute(), Path(os.path.realpath(source))
        if any(map(place.samefile, paths)):
            how = "is"
        elif not keep and any(place.samefile(p) for path in paths for p in path.parents):
            how = "holds"
        elif place.is_file() and any(map(place.parent.samefile, paths)):
            how = "is part of"
        else:
            continue
        raise OutputExistsError(
            f"{str(target)!r} {how} the input {str(given)!r}, which would be lost; "
            "choose another output."
        )


def _irreplaceable() -> set[Path]:
    """The home and the working directory, and all that they are in."""
    found: set[Path] = set()
    for find in (Path.home, Path.cwd):
        with suppress(OSError, RuntimeError):  # there may be none
            path = find().resolve()
            found |= {path, *path.parents}
    return found


def _exists(target: Path) -> OutputExistsError:
    return OutputExistsError(
        f"{str(target)!r} exists already; choose another output or pass --force."
    )


@contextmanager
def new_directory(
    target: Path,
    *,
    force: bool = False,
    keep: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> Iterator[Path]:
    """A temporary sibling of ``target`` that takes its place when the block ends without an error.

    Siblings that a killed process left are removed first. With ``keep``, what ``target`` holds and
    the block does not write stays as it is. Of a link, what it points to is the target.

    Raises
    ------
    OutputExistsError
        ``target`` holds something, or does when the block ends, and ``force`` is false; or one of
        ``inputs``, see :func:`check_output`, would be replaced.
    OutputError
        The disk is full, or the directory cannot be written to.
    """
    shown, inputs = target, tuple(inputs)
    with _naming(shown):
        target = _followed(shown)
        _restore(target)
        _remove_leftovers(target)
        check_output(shown, force=force, inputs=inputs, keep=keep)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = _locked_sibling(target)
        try:
            yield temporary
            _settle(temporary)
            if keep and target.is_dir():
                for path in temporary.rglob("*"):
                    name = path.relative_to(temporary)
                    if not path.is_dir():
                        _spare(shown / name, target / name, inputs, keep=True)
                _link_others(target, temporary)
            if not _put(temporary, target, force=force):
                raise _exists(shown)
            _sync(target.parent)
        finally:
            _restore(target)
            _remove(temporary)
            if lock is not None:
                os.close(lock)


def _locked_sibling(target: Path) -> tuple[Path, int | None]:
    """A new directory that no other process takes for a leftover while this one lives."""
    while True:
        temporary = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        )
        lock = _lock(temporary, wait=True)
        if temporary.exists():
            return temporary, lock
        if lock is not None:  # it was taken for a leftover before it was locked
            os.close(lock)


def _lock(directory: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of ``directory``; None if it is taken or cannot be had."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _restore(target: Path) -> None:
    """Put back what :func:`_move_aside` moved, unless something took its place."""
    aside = _aside(target)
    if not os.path.lexists(aside):
        return
    if os.path.lexists(target):
        _remove(aside)
    else:
        aside.rename(target)


def _remove_leftovers(target: Path) -> None:
    """Siblings of processes that are gone: nobody holds their locks."""
    leftover = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.tmp")
    if not target.parent.is_dir():
        return
    for path in target.parent.iterdir():
        if not leftover.fullmatch(path.name):
            continue
        lock = _lock(path, wait=False)
        if lock is not None:
            _remove(path)
            os.close(lock)


def _link_others(old: Path, new: Path) -> None:
    """Hard links in ``new`` to the files of ``old`` that it has no file of its own for."""

    def link(source: str, copy: str) -> str:
        if not os.path.lexists(copy):
            try:
                os.link(source, copy, follow_symlinks=False)
            except OSError:  # a file system without
                shutil.copy2(source, copy, follow_symlinks=False)
                if not Path(copy).is_symlink():
                    _sync(Path(copy))
        return copy

    shutil.copytree(old, new, copy_function=link, symlinks=True, dirs_exist_ok=True)
    _sync(new)


def _settle(temporary: Path) -> None:
    """Flush to disk, with the permissions that mkdir and open would have given."""
    mask = os.umask(0)
    os.umask(mask)
    for file in temporary.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~mask)
            _sync(file)
    _sync(temporary)
    temporary.chmod(0o777 & ~mask)


def _put(source: Path, target: Path, *, force: bool) -> bool:
    """Rename ``source`` to ``target``; False if something is there and ``force`` is false."""
    for _ in range(_ATTEMPTS):
        try:
            source.rename(target)  # also over an empty directory
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if not force:
            return False
        with suppress(FileNotFoundError):  # another process moved it away in between
            if exchange(source, target):
                return True
            _move_aside(target)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def exchange(one: Path, other: Path) -> bool:
    """Swap what two paths name, in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code))


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.tscompress-old")


def _move_aside(target: Path) -> None:
    """Without an exchange there is a moment with no target; :func:`_restore` ends it."""
    _remove(_aside(target))
    target.rename(_aside(target))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
