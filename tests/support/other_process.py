"""Another process, which holds outputs while a test looks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tscompress.io.making_way import claimed


@contextmanager
def claimed_elsewhere(paths: Sequence[Path]) -> Iterator[None]:
    """While the block runs, another process has claimed some outputs."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            with claimed(paths):
                os.write(ready[1], b"x")
                os.read(go[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        assert os.read(ready[0], 1) == b"x"
        yield
    finally:
        os.write(go[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (*ready, *go):
            os.close(descriptor)
