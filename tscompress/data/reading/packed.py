"""Text files, compressed or not, opened within bounds: a few bytes may expand to terabytes."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tscompress.io.memory import available_bytes

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
#: Suffixes of compressed text.
COMPRESSED = (*_OPENERS, ".zip")

#: Compressed text that is read whole expands to at most so much.
MAX_EXPANDED_BYTES = 2**32
#: Text that is read whole takes about so many times its size in memory.
MEMORY_PER_BYTE = 8
#: Longest line; a list of 20 million values has one of about this length.
MAX_LINE_BYTES = 2**28


def only_member(path: Path) -> str:
    """Name of the one file in a zip archive; empty where it holds several, or none."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    return names[0] if len(names) == 1 else ""


@contextmanager
def open_text(path: Path, encoding: str, *, whole: bool) -> Iterator[TextIO]:
    """A text file that may be compressed.

    Parameters
    ----------
    whole
        All of it will be held in memory, so that its size is bounded; else only its lines are.

    Raises
    ------
    ValueError
        An archive holds more than one file, or an encrypted one; while it is read: the text, or a
        line of it, is larger than :data:`MAX_EXPANDED_BYTES`, than fits into free memory, or than
        :data:`MAX_LINE_BYTES`, or holds zero bytes.
    """
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    suffix = path.suffix.lower()
    with ExitStack() as stack:
        if suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(path))
            raw = stack.enter_context(archive.open(_readable_member(archive, path)))
        else:
            raw = stack.enter_context(_OPENERS.get(suffix, open)(path, "rb"))
        bounded = _Bounded(
            raw,
            packed=suffix in COMPRESSED,
            whole=whole,
            zeros=b"\0" in "a".encode(encoding),  # UTF-16, UTF-32
        )
        buffered = io.BufferedReader(bounded, 2**16)
        yield stack.enter_context(io.TextIOWrapper(buffered, encoding=encoding, newline=""))


def _readable_member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    member = only_member(path)
    if not member:
        raise ValueError("it holds several files, or none; put one into each archive")
    info = archive.getinfo(member)
    if info.flag_bits & 1:
        raise ValueError("it is encrypted; unpack it")
    return info


#: First bytes of UTF-16, and of UTF-32.
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


class _Bounded(io.RawIOBase):
    """Passes bytes on until there are too many of them, or too many without a line break.

    Zero bytes are refused unless characters of the encoding have them.
    """

    def __init__(self, raw: Any, *, packed: bool, whole: bool, zeros: bool) -> None:
        self._raw = raw
        self._zeros = zeros
        self._packed = packed
        self._free = available_bytes() // MEMORY_PER_BYTE if whole else None
        self._most = MAX_EXPANDED_BYTES if whole and packed else None
        self._count = self._in_line = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, as ``io.RawIOBase``."""
        count: int = self._raw.readinto(buffer)
        self._count += count
        content = bytes(buffer[:count])
        after_break = count - 1 - max(content.rfind(b"\n"), content.rfind(b"\r"))
        self._in_line = after_break if after_break < count else self._in_line + count
        if self._count == count and content.startswith(_MARKS):
            self._zeros = True  # decoding it says what it is
        if not self._zeros and b"\0" in content:
            raise ValueError(
                "it holds zero bytes, which are no text; give --encoding, if it is utf-16"
            )
        self._check()
        return count

    def _check(self) -> None:
        if self._in_line > MAX_LINE_BYTES:
            raise ValueError(
                f"it has a line of more than {_megabytes(MAX_LINE_BYTES)}; write each series in "
                "rows of its own"
            )
        does = "expands to" if self._packed else "has"
        if self._most is not None and self._count > self._most:
            raise ValueError(
                f"its text expands to more than {_megabytes(self._most)}, the most that is read of "
                "compressed text; unpack it, or split it"
            )
        if self._free is not None and self._count > self._free:
            raise ValueError(
                f"its text {does} more than {_megabytes(self._free)}, which needs "
                f"{MEMORY_PER_BYTE} times as much memory as is free; split it"
            )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
