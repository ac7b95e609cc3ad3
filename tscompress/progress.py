"""How the progress of long work is reported."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Called with the name of a stage, steps done and steps in all.
OnProgress = Callable[[str, int, int], None]


class TimeLeft:
    """Time left of steps that take about as long as those before them.

    Parameters
    ----------
    clock
        Seconds, as of :func:`time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._before: int | None = None

    def after(self, done: int, total: int) -> float | None:
        """Seconds for the steps that are left, or None while no step was timed.

        Steps that were done before the first call, but for the last of them, took no time here.
        """
        if self._before is None:
            self._before = max(0, done - 1)
        timed = done - self._before
        return (self._clock() - self._began) / timed * (total - done) if timed > 0 else None


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
