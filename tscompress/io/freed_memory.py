"""What glibc's allocator keeps of freed memory, handed back to the system; elsewhere nothing."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@contextmanager
def returning_memory() -> Iterator[None]:
    """Let glibc hand freed blocks of a megabyte and more back to the system at once.

    It would keep ever larger ones, up to 32 MiB, of which a walk frees thousands: as much memory
    again as the streams take. Afterwards those limits hold, to which glibc would have risen.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def return_memory() -> None:
    """Hand the pages that glibc holds between blocks in use back to the system.

    Weights of layers that were replaced lie among others, and are as much as a whole model.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(function: str) -> Any:
    """A function of the C library; None where it is another one."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
