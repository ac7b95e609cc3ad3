"""Hashes of files, read in pieces."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def known_sha256_of(path: Path) -> str:
    """The same, computed once for a file that did not change: it may have gigabytes."""
    found = path.stat()
    state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _sha256_as_of(path.resolve(), state)


@lru_cache
def _sha256_as_of(path: Path, _state: tuple[int, ...]) -> str:
    return sha256_of(path)


def git_hash_of(path: Path) -> str:
    """The name that git gives to the content of a file, hexadecimal."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
