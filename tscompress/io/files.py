"""Writing so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tscompress.errors import OutputError, OutputExistsError, UsageError
from tscompress.io.making_way import claimed_once, journal_of, undo_killed
from tscompress.io.own_outputs import foreign_part, holds_own, is_own_file
from tscompress.io.places import CAN_LOCK, followed, foreign, lock, naming, remove, sync

_ATTEMPTS = 100
_asking_umask = threading.Lock()
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


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
        The disk is full, the directory cannot be written to, or a device lies there.
    """
    with naming(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OutputError("", "it is a device, a pipe or a socket")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(PermissionError):  # of a mount where others own what is written
                Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def cache_directory() -> Path:
    """``$TSCOMPRESS_CACHE``, or ``tscompress`` in the user's directory of caches.

    Raises
    ------
    UsageError
        There is neither, nor a home directory.
    """
    own, shared = (os.environ.get(name) for name in ("TSCOMPRESS_CACHE", "XDG_CACHE_HOME"))
    if own:
        return user_path(own)
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "tscompress"
    except RuntimeError:
        raise UsageError(
            "there is no home directory for the cache; name one in TSCOMPRESS_CACHE."
        ) from None


def check_output(
    target: Path,
    *,
    force: bool,
    inputs: Iterable[str | Path | None] = (),
    writes: Collection[str] | None = None,
    in_place: bool = False,
) -> None:
    """Refuse, before any work, a directory that cannot be written or would cost something.

    Parameters
    ----------
    target
        A directory; a link stands for what it points to.
    force
        What tscompress wrote there may be replaced, see :mod:`tscompress.io.own_outputs`.
    inputs
        Files and directories that the work reads; not None, nor names that nothing here has, such
        as a Hub id.
    writes
        Names of the files that are written beside what the target holds, so that inputs may lie
        in it; None: it is replaced whole. See :func:`new_directory`.
    in_place
        Files are written into a directory that is there; no new one takes its place.

    Raises
    ------
    OutputExistsError
        It holds something and ``force`` is false. Also with ``force`` where it would replace what
        tscompress did not write, an input, or the home or the working directory.
    OutputError
        It cannot be made where it is to be.
    UsageError
        Its name cannot be written into a file.
    """
    inputs = tuple(inputs)
    with naming(target):
        place = followed(target)
        _spare(target, place, inputs, keep=writes is not None)
        there = place.exists()
        empty = place.is_dir() and not any(place.iterdir())
        _refuse_special(target, place)
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
        if there and not empty:
            _refuse_foreign(target, place, writes)
            for name in writes or ():
                _spare(target / name, place / name, inputs, keep=True)
        _check_place(place, place if in_place else place.parent)


def check_file(
    target: Path,
    *,
    force: bool,
    inputs: Iterable[str | Path | None] = (),
    through_links: bool = True,
) -> None:
    """The same for a file; raises as :func:`check_output`, and for a directory an OutputError.

    Without ``through_links`` the file takes the place of ``target`` itself, which is to be no link.
    """
    with naming(target):
        if target.is_symlink() and not through_links:
            raise foreign(target, "is a link that tscompress did not make")
        place = followed(target)
        _spare(target, place, inputs, keep=True)
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _refuse_special(target, place)
        if place.exists():
            if not force:
                raise _exists(target)
            if not is_own_file(place):
                raise foreign(target, "is a file that tscompress did not write")
        _check_place(place, place.parent)


def write_output(
    target: Path, text: str, *, force: bool, inputs: Iterable[str | Path | None] = ()
) -> None:
    """Write a file that :func:`check_file` allows, in one step; behind a link, where that leads."""
    check_file(target, force=force, inputs=inputs)
    write_text_atomically(followed(target), text)


def _check_place(place: Path, directory: Path) -> None:
    """Raise the OSError of making ``place``: better said now than when the work is done."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(journal_of(place))  # its name is the longest
    above = next(found for found in (directory, *directory.parents) if found.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _refuse_special(target: Path, place: Path) -> None:
    if place.exists() and not (place.is_dir() or place.is_file()):
        raise OutputExistsError(
            f"{str(target)!r} is a device, a pipe or a socket, and is not replaced; choose another "
            "output."
        )


def _refuse_foreign(target: Path, place: Path, writes: Collection[str] | None) -> None:
    """Refuse to replace what tscompress did not write, or to write beside nothing of its own."""
    if not place.is_dir():
        raise OutputExistsError(
            f"{str(target)!r} is a file, where a directory is to be; choose another output."
        )
    if writes is None:
        part = _foreign_part(place)
        if part is not None:
            raise foreign(
                target,
                f"holds {part!r}, which is not of one checkpoint that tscompress wrote, or was "
                "changed since",
            )
        return
    if not holds_own(place):
        raise foreign(target, "holds only what tscompress did not write")
    for name in writes:
        found = place / name
        linked = os.path.realpath(found) != str(found)
        if os.path.lexists(found) and (linked or not is_own_file(found)):
            raise foreign(target, f"holds {name!r}, which tscompress did not write")


def _foreign_part(place: Path) -> str | None:
    """As :func:`foreign_part`; looked at again where another process replaced it meanwhile."""
    part = None
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError), _held(place):
            before = place.stat()
            part = foreign_part(place)
            if os.path.samestat(before, place.stat()):
                break
    return part


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """No other directory gets its inode meanwhile, also if it is removed."""
    if not CAN_LOCK:  # Windows opens no directories
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield
    finally:
        os.close(descriptor)


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
    writes: Collection[str] | None = None,
    inputs: Iterable[str | Path | None] = (),
) -> Iterator[Path]:
    """A temporary sibling of ``target`` that takes its place when the block ends without an error.

    Siblings that a killed process left are removed first. Of a link, what it points to is the
    target. With ``writes``, what ``target`` holds stays as it is, but for what the block writes,
    and for files of ``writes`` that it does not: those are of an earlier run. ``target`` is claimed
    while such a block runs: of two processes, each would keep what the other is about to replace.

    Raises
    ------
    OutputExistsError
        ``target`` holds something, or does when the block ends, and ``force`` is false; or what
        tscompress did not write or one of ``inputs`` would be replaced, see :func:`check_output`;
        or another process has claimed it, see :func:`tscompress.io.making_way.claimed`.
    OutputError
        The disk is full, or the directory cannot be written to.
    """
    shown, inputs = target, tuple(inputs)
    with ExitStack() as stack, naming(shown):
        target = followed(shown)
        if writes is None:
            undo_killed([target])
        else:
            stack.enter_context(claimed_once([target]))
        _restore(target, _aside(target))
        _remove_leftovers(target)
        check_output(shown, force=force, inputs=inputs, writes=writes)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = _locked_sibling(target)
        try:
            yield temporary
            _settle(temporary)
            if writes is not None:
                files = (path for path in temporary.rglob("*") if not path.is_dir())
                writes = {*writes, *(str(path.relative_to(temporary)) for path in files)}
            if force:  # what stands there now may have come meanwhile
                check_output(shown, force=True, inputs=inputs, writes=writes)
            if writes is not None and target.is_dir():
                _link_others(target, temporary, writes)
            if not put(temporary, target, force=force):
                raise _exists(shown)
            try:
                sync(target.parent)
            except OSError:
                _take_back(temporary, target)
                raise
        finally:
            try:
                _restore(target, _aside(target))
            finally:
                remove(temporary)
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
    if not CAN_LOCK:
        return None
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if lock(descriptor, wait=wait):
        return descriptor
    os.close(descriptor)
    return None


def _restore(target: Path, aside: Path) -> None:
    """Put back what was moved aside, unless something took its place."""
    if not os.path.lexists(aside):
        return
    if os.path.lexists(target):
        remove(aside)
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
            remove(path)
            os.close(lock)


def _link_others(old: Path, new: Path, writes: Collection[str]) -> None:
    """Hard links in ``new`` to the files of ``old``, but for those of ``writes``."""

    def link(source: str, copy: str) -> str:
        if os.path.relpath(copy, new) not in writes:
            try:
                os.link(source, copy, follow_symlinks=False)
            except OSError:  # a file system without
                shutil.copyfile(source, copy, follow_symlinks=False)
                with suppress(PermissionError):
                    shutil.copystat(source, copy, follow_symlinks=False)
                if not Path(copy).is_symlink():
                    sync(Path(copy))
        return copy

    try:
        shutil.copytree(old, new, copy_function=link, symlinks=True, dirs_exist_ok=True)
    except shutil.Error as error:  # of many files; the first tells the reason
        # Directories of a mount where others own what is written keep its permissions.
        for failed in error.args[0]:
            if _is_kept_as_it_is(*failed):
                continue
            found = re.match(r"\[Errno (\d+)\]", failed[-1])
            if found is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
    sync(new)


def _is_kept_as_it_is(source: str, _: str, reason: str) -> bool:
    """Whether a directory was copied, but for its permissions."""
    return Path(source).is_dir() and reason.startswith(f"[Errno {errno.EPERM}]")


def _umask() -> int:
    with _asking_umask:  # it is asked by setting it, and a second thread would keep the 0
        mask = os.umask(0)
        os.umask(mask)
    return mask


def _settle(temporary: Path) -> None:
    """Flush to disk, with the permissions that mkdir and open would have given."""
    mask = _umask()
    for file in temporary.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with suppress(PermissionError):
                file.chmod(0o666 & ~mask)
            sync(file)
    sync(temporary)
    with suppress(PermissionError):
        temporary.chmod(0o777 & ~mask)


def put(source: Path, target: Path, *, force: bool) -> bool:
    """Rename ``source`` to ``target``; False if something is there and ``force`` is false.

    Raises
    ------
    OSError
        The system refuses the rename.
    """
    for _ in range(_ATTEMPTS):
        try:
            source.rename(target)  # also over an empty directory, but for Windows
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if os.name == "nt" and _removed_if_empty(target):
            continue
        if not force:
            return False
        with suppress(FileNotFoundError):  # another process moved it away in between
            if exchange(source, target):
                return True
            _move_aside(target)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _removed_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


def _take_back(source: Path, target: Path) -> None:
    """Undo :func:`put`; what was moved aside is put back by :func:`_restore`."""
    if os.path.lexists(source):
        exchange(source, target)
    else:
        target.rename(source)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two paths name, in one step; False where the system cannot.

    Raises
    ------
    OSError
        The system can, and refuses these.
    """
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
    remove(_aside(target))
    target.rename(_aside(target))
