"""How the progress of long work is reported."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of a stage, steps done and steps in all.
OnProgress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
