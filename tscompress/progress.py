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
        self._total: int | None = None
        self._began, self._before, self._done = clock(), 0, 0

    def after(self, done: int, total: int) -> float | None:
        """Seconds for the steps that are left; None while none was timed.

        The first call, and one with another total or fewer steps done, starts the clock: what was
        done before it took no time here.
        """
        if total != self._total or done < self._done:
            self._total, self._began, self._before = total, self._clock(), done
        self._done = done
        timed = done - self._before
        return (self._clock() - self._began) / timed * (total - done) if timed > 0 else None


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
