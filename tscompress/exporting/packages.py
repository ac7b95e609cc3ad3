"""The libraries that an export needs, of the extra ``onnx``."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from tscompress.errors import UsageError
from tscompress.runtime.graph import imported_onnxruntime

LIBRARIES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Refuse to export without them.

    Raises
    ------
    UsageError
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"export needs {', '.join(missing)}; pip install 'tscompress[onnx]'.")


def library_versions() -> dict[str, str]:
    """Name to version of what wrote a graph."""
    names = ("torch", "transformers", "chronos-forecasting", *LIBRARIES)
    found = {n: importlib.metadata.version(n) for n in names if n != "onnxruntime"}
    # It may be installed under another name, such as onnxruntime-gpu.
    return found | {"onnxruntime": str(imported_onnxruntime().__version__)}
