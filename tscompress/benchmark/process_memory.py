"""Memory of a model: on the CPU in a separate process, on CUDA in this one.

``python -m tscompress.benchmark.process_memory DIRECTORY DTYPE WORKLOAD_JSON [shared]`` prints the
memory of one checkpoint; :func:`process_memory` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from chronos import BaseChronosPipeline

from tscompress.benchmark.sizes import model_dtype, parameter_bytes
from tscompress.benchmark.workload import (
    Workload,
    forecast,
    make_workload,
    settings,
    synthetic_batch,
)
from tscompress.checkpoints.exported import exported_directory
from tscompress.checkpoints.given import loaded_of
from tscompress.errors import TscompressError, UsageError
from tscompress.layers.shared_cross_attention import share_cross_attention, shares_cross_attention
from tscompress.runtime.graph import imported_onnxruntime

_SHARED = "shared"


@dataclass(frozen=True)
class MemoryUse:
    """Memory around loading a model and forecasting with it, in bytes.

    On the CPU these are resident set sizes of a fresh process; the first is that of the
    interpreter and its libraries. On CUDA they are the allocator's, starting at 0.
    """

    before_load_bytes: int
    after_load_bytes: int
    peak_bytes: int


def process_memory(
    directory: Path, dtype: torch.dtype, workload: Workload, *, shared: bool = False
) -> MemoryUse:
    """Memory on the CPU of the checkpoint in ``directory``, loaded as ``dtype``.

    Measured in a separate process, because the peak of a resident set never falls: a second model
    in the same process would inherit the first one's. With ``shared``, sample paths share
    cross-attention.

    Raises
    ------
    TscompressError
        The process failed; the message ends with its last line. A UsageError where it was one
        there, such as of an exported model without onnxruntime.
    """
    arguments = [str(directory), str(dtype).removeprefix("torch."), workload.model_dump_json()]
    arguments += [_SHARED] if shared else []
    done = subprocess.run(
        [sys.executable, "-m", "tscompress.benchmark.process_memory", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        kind = UsageError if done.returncode == UsageError.exit_code else TscompressError
        raise kind(
            f"measuring the memory of {directory} ended with status {done.returncode}: {reason}"
        )
    # Libraries may print while loading; the figures are the last line.
    return MemoryUse(**json.loads(done.stdout.strip().splitlines()[-1]))


def measure_this_process(
    directory: Path, dtype: str, workload: Workload, *, shared: bool
) -> MemoryUse:
    """Memory in bytes of loading the checkpoint here and forecasting twice, the second time warm.

    Raises
    ------
    TscompressError
        As :func:`tscompress.load`; for an exported model as :func:`tscompress.runtime.load`.
    """
    if exported_directory(directory) is not None:
        imported_onnxruntime()  # a library, as torch is
    forget_peak()
    before = psutil.Process().memory_info().rss
    with settings(workload):  # a graph is opened for a number of threads, and again for another
        pipeline = loaded_of(directory, dtype=dtype).forecaster
        if shared:
            pipeline = share_cross_attention(pipeline)
        after = psutil.Process().memory_info().rss
        series = synthetic_batch(workload)
        for _ in range(2):
            forecast(pipeline, series, workload)
    return MemoryUse(before, after, peak_rss_bytes())


def forget_peak() -> None:
    """Reset the peak on Linux: importing libraries must not count as the model's."""
    with suppress(OSError):  # no such file elsewhere, and some containers refuse it
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    if sys.platform == "linux":
        # Not ru_maxrss: on Linux a spawned child inherits the parent's peak.
        status = Path("/proc/self/status").read_text()
        found = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        if found:  # gVisor has none
            return 1024 * int(found[0].split()[1])
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _cuda_memory(
    pipeline: BaseChronosPipeline, series: torch.Tensor, workload: Workload
) -> MemoryUse:
    """The model's weights, and the memory allocated on top during one forecast."""
    weights = parameter_bytes(pipeline.inner_model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()  # includes the other models of the comparison
    forecast(pipeline, series, workload)
    torch.cuda.synchronize()
    return MemoryUse(0, weights, weights + torch.cuda.max_memory_allocated() - resident)


def memory_of(
    pipeline: BaseChronosPipeline, directory: Path | None, workload: Workload
) -> MemoryUse | None:
    """On CUDA measured here; on the CPU that of the checkpoint in ``directory``, or None."""
    if workload.device == "cuda":
        with settings(workload):
            return _cuda_memory(pipeline, synthetic_batch(workload), workload)
    if directory is None:
        return None
    shared = shares_cross_attention(pipeline)
    return process_memory(directory, model_dtype(pipeline.inner_model), workload, shared=shared)


def main(arguments: Sequence[str]) -> None:
    """Print the :class:`MemoryUse` of a directory, dtype and workload, as JSON.

    An expected error is one line and an exit code, as of the ``tscompress`` command.
    """
    directory, dtype, given, *shared = arguments
    try:
        workload = make_workload(json.loads(given))
        memory = measure_this_process(Path(directory), dtype, workload, shared=shared == [_SHARED])
    except TscompressError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(asdict(memory)))


if __name__ == "__main__":
    main(sys.argv[1:])
