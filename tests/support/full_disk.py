"""A disk that is full from some step of writing on."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tscompress.io import files

#: Calls that need room: each entry of a directory and each block of a file.
STEPS = (
    (os, "fsync"), (os, "pwrite"), (os, "ftruncate"), (os, "link"),
    (Path, "rename"), (Path, "replace"), (files, "exchange"),
)  # fmt: skip


@contextmanager
def full_disk(step: int, *, stays: bool) -> Iterator[Callable[[], bool]]:
    """The given step of writing fails, and with ``stays`` all that follow; tells whether one did.

    Steps are counted from 1.
    """
    count = itertools.count(1)
    failed = False

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal failed
            now = next(count)
            if now == step or (stays and now > step):
                failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield lambda: failed
