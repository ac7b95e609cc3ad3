"""Memory that is free, and freed memory that glibc keeps, handed back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

#: Limit and use of a container's memory, and what of the use are pages of files, which make way:
#: of control groups version 2, and 1.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    (
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)  # fmt: skip


def available_bytes(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Free memory of the machine, or what a container's limit leaves, if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit, used, parts, of_files in _CONTROL_GROUPS:
        try:
            most, now = (int((control_groups / name).read_text()) for name in (limit, used))
            fields = map(str.split, (control_groups / parts).read_text().splitlines())
            now -= sum(int(one[1]) for one in fields if len(one) == 2 and one[0] in of_files)
        except (OSError, ValueError):  # there is none, or "max"
            continue
        free = min(free, max(0, most - now))
    return free


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
