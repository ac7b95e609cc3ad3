"""Silence of libraries: no bars and no advice meant for their own users."""

from __future__ import annotations

import importlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

_lock = threading.Lock()
_of_stderr = threading.Lock()
_inside = 0
#: What the last to leave calls.
_restore: Callable[[], None] | None = None


@contextmanager
def quiet_horizons() -> Iterator[None]:
    """Within, models do not warn about horizons beyond theirs: a suite or a workload sets them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="We recommend keeping prediction length")
        yield


@contextmanager
def without_bars() -> Iterator[None]:
    """Within, nothing is written to ``sys.stderr``; one thread at a time, or it stays replaced.

    gluonts opens a progress bar that cannot be switched off.
    """
    with _of_stderr, redirect_stderr(io.StringIO()):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within, transformers shows no bars, and logs errors alone unless more than warnings was set.

    Bars of downloads are huggingface_hub's and belong outside. Everything is as before afterwards,
    also where several threads are within.
    """
    global _inside, _restore
    with _lock:
        if not _inside:
            _restore = _silence()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _restore is not None:
                _restore()


def _silence() -> Callable[[], None]:
    """Silence transformers; returns what undoes it."""
    from transformers.utils import logging as theirs

    hub: Any = importlib.import_module("huggingface_hub.utils.tqdm")
    bars, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    groups = dict(hub.progress_bar_states)
    theirs.disable_progress_bar()  # and with them huggingface_hub's
    if level == logging.WARNING:
        theirs.set_verbosity_error()

    def undo() -> None:
        if bars:
            with warnings.catch_warnings():  # a variable of the environment keeps the hub's away
                warnings.simplefilter("ignore")
                theirs.enable_progress_bar()
        hub.progress_bar_states.clear()
        hub.progress_bar_states.update(groups)
        if level == logging.WARNING:
            theirs.set_verbosity(level)

    return undo
