"""A graph in onnxruntime, opened only as it was exported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tscompress.errors import CorruptCheckpointError, UsageError
from tscompress.runtime.external import external_files
from tscompress.runtime.record import GRAPH_FILE, Record

Array: TypeAlias = npt.NDArray[Any]

#: The one output of every graph, ``[B, Q, H]``.
OUTPUT = "quantiles"
_INSTALL = "pip install 'tscompress[onnx]'"


class Graph:
    """A session of onnxruntime on the CPU.

    Parameters
    ----------
    directory, record
        Of the exported model.
    inputs
        Names of the inputs that a forecast gives.
    threads
        Of onnxruntime.

    Raises
    ------
    CorruptCheckpointError
        The file is not the one that was exported, names further files, or lacks an input.
    UsageError
        onnxruntime is not installed.
    """

    def __init__(
        self, directory: Path, record: Record, inputs: Collection[str], threads: int
    ) -> None:
        path = directory / GRAPH_FILE
        self._session = _session(_checked(path, record), path, threads)
        self._check_names(path, inputs)

    def __call__(self, **inputs: Array) -> npt.NDArray[np.float32]:
        """Quantiles, float32 ``[B, Q, H]``."""
        found: npt.NDArray[np.float32] = self._session.run([OUTPUT], inputs)[0]
        return found

    def _check_names(self, path: Path, inputs: Collection[str]) -> None:
        there = {one.name for one in self._session.get_inputs()}
        outputs = {one.name for one in self._session.get_outputs()}
        wrong = sorted((set(inputs) ^ there) | ({OUTPUT} - outputs))
        if wrong:
            raise CorruptCheckpointError(
                f"{str(path)!r} and this tscompress differ in the input or output {wrong[0]!r}; "
                f"a graph of this family has {', '.join(inputs)} and {OUTPUT}: export it again."
            )


def _checked(path: Path, record: Record) -> bytes:
    """Content of the graph file, by its recorded hash."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(
            f"{str(path)!r} cannot be read: {error.strerror or error}."
        ) from None
    if hashlib.sha256(content).hexdigest() != record.graph_sha256:
        raise CorruptCheckpointError(
            f"{str(path)!r} does not have the sha256 of its record; it was changed or damaged "
            "since it was exported: export it again."
        )
    try:
        outside = external_files(content)
    except ValueError as error:
        raise CorruptCheckpointError(f"{str(path)!r}: {error}.") from None
    if outside:
        raise CorruptCheckpointError(
            f"{str(path)!r} reads data from another file ({outside[0][:100]!r}), which graphs of "
            "tscompress never do; it is not opened."
        )
    return content


def _session(content: bytes, path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(f"an exported model needs onnxruntime; {_INSTALL}.") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(
            content, sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has its own, without a common base
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptCheckpointError(
            f"{str(path)!r} is not opened by onnxruntime {onnxruntime.__version__}: {reason}."
        ) from None


def thread_count(threads: int | None) -> int:
    """Threads that were asked for; None: one for each core that this process may use.

    Raises
    ------
    UsageError
        It is not a positive integer.
    """
    if threads is None:
        # As many as there are cores would be too many where a process may use fewer.
        usable = getattr(os, "sched_getaffinity", None)
        return len(usable(0)) if usable else os.cpu_count() or 1
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UsageError(f"threads is {threads!r}; give a positive integer, or None.")
    return threads
