"""Outputs that a test replaces together, as ``tscompress run`` does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tscompress.io.making_way import claimed


@contextmanager
def making_way(paths: Iterable[Path]) -> Iterator[None]:
    """Claim some paths, and move what stands there aside while the block runs."""
    with claimed(paths) as claim, claim.making_way():
        yield
