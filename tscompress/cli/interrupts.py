"""Reliable Ctrl-C, also during imports of libraries that swallow it.

Python only reports an exception that a signal raises within a callback, such as a finalizer, and
some libraries continue after any error of their imports. So Ctrl-C is raised again until it is
handled. The native part of torch imports Python and aborts the process at an exception there, so
that Ctrl-C waits for ``import torch``.
"""

from __future__ import annotations

import signal
import sys
from pathlib import PurePath
from types import FrameType
from typing import Any

STOPPED = 130  # exit code of a command that SIGINT ended
STOPPED_MESSAGE = "stopped; nothing half-written was kept."
_SECONDS = 0.2
_TORCH = ("torch", "__init__.py")
_heard = _listening = False


def listen() -> None:
    """Repeat Ctrl-C from here to :func:`arrived`, unless the process ignores SIGINT."""
    global _listening
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    _listening = True
    sys.unraisablehook = _report
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, _insist)
    signal.signal(signal.SIGINT, _interrupt)


def arrived() -> bool:
    """Whether Ctrl-C was pressed. From here on, another one ends the process silently."""
    global _listening
    if _listening:
        _listening = False
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _heard


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, _SECONDS, _SECONDS)
        if _imports_torch(frame):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that hangs ends at the second
            return
    raise KeyboardInterrupt


def _insist(_signal: int, frame: FrameType | None) -> None:
    """Raise it again, unless it is propagating and cleanup is running."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    if error is None and _listening and not _imports_torch(frame):
        signal.signal(signal.SIGINT, _interrupt)
        raise KeyboardInterrupt


def _imports_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and PurePath(code.co_filename).parts[-2:] == _TORCH:
            return True
        frame = frame.f_back
    return False


def _report(unraisable: Any) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
