"""A graph in onnxruntime, opened only as it was exported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tscompress.errors import CorruptCheckpointError, UsageError
from tscompress.runtime.external import external_files
from tscompress.runtime.record import Record

Array: TypeAlias = npt.NDArray[Any]

#: The one output of a graph of patches, ``[B, Q, H]``.
OUTPUT = "quantiles"
#: Bytes of an ONNX file, which is one protocol buffer.
_LARGEST = 2**31
_INSTALL = "pip install 'tscompress[onnx]'"


class Graph:
    """A session of onnxruntime on the CPU.

    Parameters
    ----------
    directory, record
        Of the exported model.
    file
        Name of the graph's file.
    threads
        Of onnxruntime.

    Raises
    ------
    CorruptCheckpointError
        The file is not the one that was exported, or names further files.
    UsageError
        onnxruntime is not installed.
    """

    def __init__(self, directory: Path, record: Record, file: str, threads: int) -> None:
        self.path = directory / file
        self._record, self._threads = record, threads
        self._opened: dict[int, Any] = {}
        session = self._session
        self.inputs = {one.name: one for one in session.get_inputs()}
        self.outputs: tuple[str, ...] = tuple(one.name for one in session.get_outputs())

    @property
    def _session(self) -> Any:
        """Of this process. A fork has none of the threads of the process above it."""
        process = os.getpid()
        if process not in self._opened:
            for inherited in self._opened.values():
                # Never closed: it would wait for threads that are not here.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
            content = _checked(self.path, self._record)
            self._opened[process] = _session(content, self.path, self._threads)
        return self._opened[process]

    def __call__(self, **inputs: Array) -> npt.NDArray[np.float32]:
        """The first output, float32."""
        found: npt.NDArray[np.float32] = self._session.run([self.outputs[0]], inputs)[0]
        return found

    def all_outputs(self, **inputs: Array) -> dict[str, Array]:
        """Name to array."""
        return dict(zip(self.outputs, self._session.run(None, inputs), strict=True))

    def input_shape(self, name: str) -> tuple[int | str, ...]:
        """Sizes of an input; names of those that are free."""
        return tuple(self.inputs[name].shape)

    def bound(self) -> BoundGraph:
        """The same graph on arrays that stay in place."""
        return BoundGraph(self._session)

    def check_names(self, inputs: Collection[str], outputs: Collection[str]) -> None:
        """Refuse a graph with other inputs, or without an output.

        Raises
        ------
        CorruptCheckpointError
        """
        wrong = sorted((set(inputs) ^ set(self.inputs)) | (set(outputs) - set(self.outputs)))
        if wrong:
            raise CorruptCheckpointError(
                f"{str(self.path)!r} and this tscompress differ in the input or output "
                f"{wrong[0]!r}; such a graph has {_listed(inputs)}, and gives {_listed(outputs)}: "
                "export it again."
            )


class BoundGraph:
    """A graph whose inputs and outputs are arrays of the caller, which it reads and writes."""

    def __init__(self, session: Any) -> None:
        self._session, self._binding = session, session.io_binding()
        self._held: dict[str, Array] = {}

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Read and write these arrays from now on; each is C-contiguous."""
        from onnxruntime import OrtValue

        for name, array in inputs.items():
            self._binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            self._binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(array))
        self._held |= {**inputs, **outputs}  # onnxruntime has pointers to them

    def run(self) -> None:
        """Compute the outputs of the bound inputs."""
        self._session.run_with_iobinding(self._binding)


def _listed(names: Collection[str]) -> str:
    shown = list(names)
    return ", ".join(shown if len(shown) < 8 else [*shown[:6], f"… {len(shown)} in all"])


def _checked(path: Path, record: Record) -> bytes:
    """Content of the graph file, by its recorded hash."""
    if path.name not in record.graphs:
        raise CorruptCheckpointError(
            f"the record of {str(path)!r} does not name it; export the model again."
        )
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise CorruptCheckpointError(f"{str(path)!r} is not a file of at most 2 GB.")
        content = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(
            f"{str(path)!r} cannot be read: {error.strerror or error}."
        ) from None
    if hashlib.sha256(content).hexdigest() != record.graphs[path.name]:
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


def imported_onnxruntime() -> Any:
    """The library.

    Raises
    ------
    UsageError
        It is not installed.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError:
        raise UsageError(f"an exported model needs onnxruntime; {_INSTALL}.") from None


def _session(content: bytes, path: Path, threads: int) -> Any:
    onnxruntime = imported_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    # Weights in 8 bits become float32 once, when the session opens, and not in every call.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Its threads would otherwise spin on after a call, and slow what runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(
            content, sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has its own, without a common base
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptCheckpointError(
            f"{str(path)!r} is not opened by onnxruntime {onnxruntime.__version__}: {reason}."
        ) from None


def cores_of_quota(control_groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that a container may use; infinity without a limit."""
    try:
        quota, period = (control_groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # of control groups version 1
            of_cpu = control_groups / "cpu"
            quota, period = (
                (of_cpu / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max"
        return math.inf


def thread_count(threads: int | None) -> int:
    """Threads that were asked for; None: one for each core that this process may use, in a
    container at most its quota, rounded up.

    Raises
    ------
    UsageError
        It is not a positive integer.
    """
    if threads is None:
        # As many as there are cores would be too many where a process may use fewer.
        usable = getattr(os, "sched_getaffinity", None)
        cores = len(usable(0)) if usable else os.cpu_count() or 1
        return max(1, math.ceil(min(cores, cores_of_quota())))
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UsageError(f"threads is {threads!r}; give a positive integer, or None.")
    return threads
