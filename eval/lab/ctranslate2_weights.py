"""Weights of a CTranslate2 `model.bin` (version 6), read with every length checked.

The file is little-endian: version, name and revision of a specification, then variables (name,
dimensions, type, bytes, data) and aliases. Nothing in it is run.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tscompress.errors import DataError

VERSION = 6
LARGEST_FILE, MOST_VARIABLES, MOST_DIMENSIONS, LONGEST_NAME = 2**30, 10_000, 4, 1024
#: By the number that a file has for it.
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


class _Reader:
    """Bytes of a file, taken from the front."""

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            if not path.is_file() or size > LARGEST_FILE:
                raise DataError(f"{str(path)!r} is no file of at most {LARGEST_FILE} bytes.")
            self.data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        self.path, self.at = path, 0

    def fail(self, reason: str) -> DataError:
        return DataError(f"{str(self.path)!r} holds no CTranslate2 model: {reason}.")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.fail(f"{count} bytes at {self.at} are beyond its end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        length = self.number(2)
        if not 1 <= length <= LONGEST_NAME:
            raise self.fail(f"a name of {length} bytes")
        try:
            return self.take(length).rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise self.fail("a name that is no text") from error

    def variable(self) -> np.ndarray:
        rank = self.number(1)
        if rank > MOST_DIMENSIONS:
            raise self.fail(f"a variable of {rank} dimensions")
        shape = tuple(self.number(4) for _ in range(rank))
        kind, size = self.number(1), self.number(4)
        if kind not in TYPES:
            raise self.fail(f"a variable of type {kind}; types are {sorted(TYPES)}")
        dtype = np.dtype(TYPES[kind])
        if math.prod(shape) * dtype.itemsize != size:
            raise self.fail(f"{size} bytes for {shape} numbers of {dtype.itemsize} bytes")
        return np.frombuffer(self.take(size), dtype).reshape(shape)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Name to array, aliases included, in the types of the file.

    Raises
    ------
    DataError
        It is no such file, of another version, too large, cut off or has something behind its end.
    """
    reader = _Reader(path)
    version = reader.number(4)
    if version != VERSION:
        raise reader.fail(f"version {version}, {VERSION} is read")
    reader.text(), reader.number(4)  # specification and its revision
    count = reader.number(4)
    if count > MOST_VARIABLES:
        raise reader.fail(f"{count} variables, at most {MOST_VARIABLES} are read")
    found: dict[str, np.ndarray] = {}
    for _ in range(count):
        name = reader.text()
        if name in found:
            raise reader.fail(f"{name!r} twice")
        found[name] = reader.variable()
    for _ in range(min(reader.number(4), MOST_VARIABLES)):
        alias, name = reader.text(), reader.text()
        if name not in found or alias in found:
            raise reader.fail(f"an alias of {name!r}")
        found[alias] = found[name]
    if reader.at != len(reader.data):
        raise reader.fail(f"{len(reader.data) - reader.at} bytes behind its end")
    return found
