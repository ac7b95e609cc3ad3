"""Scripts of ``eval/``, imported by name as one of them that runs imports the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EVAL = Path(__file__).parents[2] / "eval"
LAB = EVAL / "lab"


@contextmanager
def imported(names: Sequence[str]) -> Iterator[Any]:
    """Modules by name within the block; afterwards neither they nor what they import is there."""
    before, path = set(sys.modules), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        for folder in (EVAL, LAB):
            patch.syspath_prepend(str(folder))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).parent in (EVAL, LAB):
            del sys.modules[name]
