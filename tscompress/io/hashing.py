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
    """The same, computed once for a file of one size and time of change: it may have gigabytes."""
    status = path.stat()
    return _sha256_as_of(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache
def _sha256_as_of(path: Path, _changed: int, _size: int) -> str:
    return sha256_of(path)


def git_hash_of(path: Path) -> str:
    """The name that git gives to the content of a file, hexadecimal."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
