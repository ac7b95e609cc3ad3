"""Latency, memory and size of one forecaster or several.

Every figure comes from ``pipeline.predict``, the call that users make. Absolute times drift on a
shared machine, so models are timed in turn within one process and the ratio of two models is
reported with an interval.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from chronos import BaseChronosPipeline

from tscompress.benchmark.named_models import (
    Benched,
    loaded_pipelines,
    named_models,
    workload_of,
)
from tscompress.benchmark.process_memory import memory_of
from tscompress.benchmark.results import BenchResult, ModelBench, Run
from tscompress.benchmark.sizes import (
    bytes_on_disk,
    count_macs,
    kv_cache_bytes,
    parameter_bytes,
    parameter_count,
)
from tscompress.benchmark.workload import (
    Workload,
    check_fits,
    check_sampling,
    forecast,
    settings,
    synthetic_batch,
)
from tscompress.checkpoints.given import AnyModel
from tscompress.errors import UsageError
from tscompress.families.exported import ExportedModel, open_on_threads
from tscompress.io.arguments import renamed
from tscompress.layers.shared_cross_attention import shares_cross_attention


@renamed("pipelines", "models")
def bench(
    models: Benched,
    workload: Workload | None = None,
    *,
    against: AnyModel | None = None,
    directories: Mapping[str, Path | None] | None = None,
    measure_macs: bool = True,
    measure_memory: bool = False,
    share_cross_attention: bool = False,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
    clock: Callable[[], float] = time.perf_counter,
    **sizes: Any,
) -> BenchResult:
    """Measure the models under one workload; the first is the baseline of all ratios.

    Models run in turn, and the first of a round rotates, so that neither drift of the machine nor
    the place in a round favours a model. Threads and random state are restored afterwards.

    Parameters
    ----------
    models
        A model, a list of them, or models by name. Each is a directory, a Hub id, a loaded model, a
        Chronos pipeline or a predictor around one; see :mod:`tscompress.checkpoints.given`.
    workload
        The call that is measured; None: that of ``sizes``, fields of :class:`Workload` such as
        ``batch_size=8, repeats=5``, on the device of the models.
    against
        A further model, the baseline.
    directories
        Checkpoint directory by name; needed for ``bytes_on_disk`` and for peak memory on the CPU.
        By default those of models that were loaded, and not changed since.
    measure_macs
        Count multiply-accumulates; takes about one more run of each model.
    measure_memory
        Measure peak memory: on the CPU in a fresh process for each directory, on CUDA here.
    share_cross_attention
        Also measure each model with :func:`tscompress.share_cross_attention`; Chronos-T5 only.
    revision, device, dtype
        Of directories and Hub ids, as for :func:`tscompress.load`; by default float32 on the
        workload's device. ``revision`` is not ``against``'s.
    on_run
        Called after each timed run.
    clock
        Returns seconds; for tests.

    Raises
    ------
    UsageError
        CUDA is not available, names are unknown or given twice, the workload does not fit a model,
        ``sizes`` have ``num_samples`` where no model draws samples, or an argument is of a wrong
        type.
    ModelNotFoundError
        A directory holds no weights.
    """
    given = named_models(models, against)
    workload = workload_of(workload, sizes, device, given)
    options = {"revision": revision, "device": device or workload.device, "dtype": dtype}
    named, paths = loaded_pipelines(
        given, share=share_cross_attention, against=against is not None, **options
    )
    for name, pipeline in named.items():
        check_fits(pipeline, repr(name), workload)
    check_sampling(named.values(), sizes.get("num_samples"))
    if unknown := sorted((directories or {}).keys() - named.keys()):
        raise UsageError(f"directories of unknown models {unknown}; models: {list(named)}.")
    paths |= directories or {}
    disk = {name: bytes_on_disk(path) for name, path in paths.items() if path is not None}
    with _device_of(named, workload):
        with settings(workload):
            latencies = _time_in_turn(named, workload, on_run, clock)
            threads = torch.get_num_threads()
        return BenchResult(
            workload=workload,
            models=tuple(
                ModelBench(
                    name=name,
                    latencies_ms=tuple(latencies[name]),
                    batch_size=workload.batch_size,
                    parameters=parameter_count(pipeline.inner_model),
                    parameter_bytes=parameter_bytes(pipeline.inner_model),
                    kv_cache_bytes=_cache_bytes(pipeline, workload),
                    bytes_on_disk=disk.get(name),
                    macs=count_macs(pipeline, workload)
                    if measure_macs and not isinstance(pipeline.inner_model, ExportedModel)
                    else None,
                    memory=memory_of(pipeline, paths.get(name), workload)
                    if measure_memory
                    else None,
                    dtype=_dtype(pipeline),
                )
                for name, pipeline in named.items()
            ),
            threads=threads,
            device_name=_device_name(workload),
            torch_version=torch.__version__,
        )


def _dtype(pipeline: BaseChronosPipeline) -> str | None:
    model = pipeline.inner_model
    if isinstance(model, ExportedModel):
        return None
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _cache_bytes(pipeline: BaseChronosPipeline, workload: Workload) -> int | None:
    """Of an exported model None: its layers are in the graph."""
    model = pipeline.inner_model
    if isinstance(model, ExportedModel):
        return None
    shared = shares_cross_attention(pipeline)
    return kv_cache_bytes(model, workload, shared_cross_attention=shared)


def _device_of(
    pipelines: Mapping[str, BaseChronosPipeline], workload: Workload
) -> AbstractContextManager[Any]:
    """The device of the workload; of several GPUs, the first model's."""
    if workload.device != "cuda":
        return nullcontext()
    first = next(iter(pipelines.values()))
    return torch.cuda.device(next(first.inner_model.parameters()).device)


def _time_in_turn(
    pipelines: Mapping[str, BaseChronosPipeline],
    workload: Workload,
    on_run: Callable[[Run], None],
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Latencies of each model in milliseconds, one per round."""
    series = synthetic_batch(workload)
    for pipeline in pipelines.values():
        open_on_threads(pipeline)
        for _ in range(workload.warmup):
            forecast(pipeline, series, workload)
    names = list(pipelines)
    latencies: dict[str, list[float]] = {name: [] for name in names}
    for number in range(workload.repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            latency_ms = _time_once(pipelines[name], series, workload, clock)
            latencies[name].append(latency_ms)
            on_run(Run(name, number, latency_ms))
    return latencies


def _time_once(
    pipeline: BaseChronosPipeline,
    series: torch.Tensor,
    workload: Workload,
    clock: Callable[[], float],
) -> float:
    _synchronize(workload)
    started = clock()
    forecast(pipeline, series, workload)
    _synchronize(workload)
    return 1000 * (clock() - started)


def _synchronize(workload: Workload) -> None:
    if workload.device == "cuda":
        torch.cuda.synchronize()


def _device_name(workload: Workload) -> str:
    if workload.device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()
