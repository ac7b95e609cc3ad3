"""Time, memory and size of forecasters, alone or side by side.

Every figure comes from ``pipeline.predict``, the call that users make. Models are timed in turn
within one process, because absolute seconds on a shared machine drift: the ratio of two models
that ran seconds apart is what holds up, so it is reported with an interval.

``python -m tscompress.benchmark.bench DIRECTORY DTYPE WORKLOAD_JSON [shared]`` prints the memory
that one checkpoint takes; :func:`process_memory` runs it.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from chronos import BaseChronosPipeline
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tscompress.errors import ModelNotFoundError, RecipeError, TscompressError, UsageError
from tscompress.families.base import Pass
from tscompress.families.registry import adapter_of_model, adapter_of_pipeline
from tscompress.layers.resize import LatentCrossAttention
from tscompress.layers.shared_cross_attention import share_cross_attention, shares_cross_attention

_MEBI = 2**20
_SHARED = "shared"
# Fewer rounds than this carry no information about the tails of a 95 % interval.
_MIN_ROUNDS_FOR_INTERVAL = 5


class Workload(BaseModel):
    """What one ``predict`` call is asked for, and how often it is timed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(default=32, ge=1, description="series")
    context_length: int = Field(default=512, ge=1, description="time steps of each series")
    horizon: int = Field(default=64, ge=1, description="time steps forecast")
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1, description="None: as PyTorch is set")
    repeats: int = Field(default=20, ge=1, description="timed rounds; each model runs once in each")
    warmup: int = Field(default=3, ge=0, description="untimed runs of each model")
    num_samples: int | None = Field(
        default=None, ge=1, description="sample paths, Chronos-T5 only; None: the model's own"
    )
    seed: int = Field(default=0, ge=0, description="of the series and of the sampling")


def make_workload(fields: Mapping[str, Any]) -> Workload:
    """Validate ``fields`` into a workload.

    Raises
    ------
    RecipeError
        A key, type or value is wrong. The message is one line and names each of them.
    """
    try:
        return Workload.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"
            for problem in error.errors()
        )
        raise RecipeError(
            f"invalid workload: {problems}; allowed keys: {sorted(Workload.model_fields)}."
        ) from error


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters in memory; a tied one counts once."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def bytes_on_disk(directory: Path) -> int:
    """Bytes of the ``*.safetensors`` files in a checkpoint directory.

    Raises
    ------
    ModelNotFoundError
        There is no such file.
    """
    files = list(directory.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(
            f"{directory} holds no *.safetensors file; give a checkpoint directory."
        )
    return sum(file.stat().st_size for file in files)


def kv_cache_bytes(
    model: nn.Module,
    workload: Workload,
    *,
    dtype: torch.dtype | None = None,
    shared_cross_attention: bool = False,
) -> int:
    """Bytes of the key-value cache at its fullest during one ``predict`` call.

    The cache holds keys and values, as wide as the projections that make them, of the
    self-attention (over decoder tokens) and the cross-attention (over encoder tokens) of
    every decoder layer, or of cross-attention the one latent that all layers read:

    * Chronos-T5 keeps ``batch_size * num_samples`` rows, because the encoder output is repeated
      for each sample path. Encoder tokens are the context plus EOS, decoder tokens the horizon.
    * Chronos-Bolt takes one decoder step on ``batch_size`` rows. Its cache is never read again,
      but it is held until the last layer is done: patches plus REG, and one decoder token.
    * Chronos-2 has no decoder: 0.

    A horizon beyond the model's ``prediction_length`` is forecast in several passes over a growing
    context (on ``batch_size * num_quantiles`` rows from the second one on for Bolt); the largest
    counts. Sizes are read from each attention module, so head sizes may differ by layer and the
    model may live on the meta device.

    Parameters
    ----------
    model
        ``pipeline.inner_model``.
    workload
        Gives ``batch_size``, ``context_length``, ``horizon`` and ``num_samples``.
    dtype
        Type of the cached tensors; the model's own by default.
    shared_cross_attention
        Whether the sample paths of a series share one row of cross-attention, as those of
        :func:`tscompress.share_cross_attention` do.
    """
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        return 0
    dtype = dtype or _dtype(model)
    self_width = cross_width = 0  # numbers cached per token, over all layers
    for block in decoder.block:
        self_width += _cached_numbers_per_token(block.layer[0].SelfAttention)
        cross_width += _cached_numbers_per_token(block.layer[1].EncDecAttention)
    chronos_config: dict[str, Any] = model.config.chronos_config  # type: ignore[union-attr,assignment]

    def numbers(one: Pass) -> int:
        rows = one.series * one.paths
        cross_rows = one.series if shared_cross_attention else rows
        return rows * self_width * one.outputs + cross_rows * cross_width * one.encoder_tokens

    passes = adapter_of_model(model).passes(chronos_config, workload)
    return max(map(numbers, passes)) * dtype.itemsize


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _cached_numbers_per_token(attention: Any) -> int:
    if isinstance(attention, LatentCrossAttention):  # one latent for all layers
        return attention.cached_numbers
    return int(attention.k.out_features) + int(attention.v.out_features)


# --------------------------------------------------------------------------------------------------
# One forecast
# --------------------------------------------------------------------------------------------------


def synthetic_batch(workload: Workload) -> torch.Tensor:
    """Noisy daily cycles without missing values, float32 ``[batch_size, context_length]``."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch_size, workload.context_length)
    phase = 2 * math.pi * torch.rand(shape[0], 1, generator=generator)
    angle = 2 * math.pi / 24 * torch.arange(shape[1])[None, :]
    noise = torch.randn(shape, generator=generator)
    return 10 + torch.sin(angle + phase) + 0.3 * noise


def forecast(pipeline: BaseChronosPipeline, series: torch.Tensor, workload: Workload) -> None:
    """One ``predict`` call on ``series`` ``[B, T]``, from a fixed seed."""
    torch.manual_seed(workload.seed)
    family = adapter_of_pipeline(pipeline)
    family.predict(pipeline, series, workload.horizon, workload.num_samples)


def count_macs(pipeline: BaseChronosPipeline, workload: Workload) -> int:
    """Multiply-accumulates of one ``predict`` call, over the whole batch.

    Counted on the real call rather than extrapolated: every matrix product is seen with the shape
    it has, so decoder steps, sample paths, factored projections and attention (eager or fused)
    are exact. Element-wise work is left out. The call costs about one untimed run.

    Raises
    ------
    UsageError
        The workload does not fit the pipeline.
    """
    _check(pipeline, "the model", workload)
    # PyTorch knows the cost of the fused attention kernels of CUDA only; without this, attention
    # on a CPU would count as free.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={cpu_attention: _attention_flops})
    with _settings(workload), counter:
        forecast(pipeline, synthetic_batch(workload), workload)
    return counter.get_total_flops() // 2


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Both matrix products of attention, from the shapes ``[B, heads, tokens, head size]``."""
    batch, heads, queries, head_size = query
    return 2 * batch * heads * queries * key[2] * (head_size + value[3])


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """Memory around loading a model and forecasting with it, in bytes.

    On the CPU these are resident set sizes of a fresh process, the first one being the
    interpreter and its libraries. On CUDA they are what the allocator handed out, from 0.
    """

    before_load_bytes: int
    after_load_bytes: int
    peak_bytes: int


def process_memory(
    directory: Path, dtype: torch.dtype, workload: Workload, *, shared: bool = False
) -> MemoryUse:
    """Memory that the checkpoint in ``directory``, loaded as ``dtype``, takes on the CPU.

    Measured in a process of its own, because the peak of a resident set never falls: a second
    model in the same process would inherit the first one's. With ``shared`` its sample paths
    share cross-attention.

    Raises
    ------
    TscompressError
        The process failed; the message ends with the last line that it wrote.
    """
    arguments = [str(directory), str(dtype).removeprefix("torch."), workload.model_dump_json()]
    arguments += [_SHARED] if shared else []
    done = subprocess.run(
        [sys.executable, "-m", "tscompress.benchmark.bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TscompressError(
            f"measuring the memory of {directory} ended with status {done.returncode}: {reason}"
        )
    # Libraries may print on loading; the figures are the last line.
    return MemoryUse(**json.loads(done.stdout.strip().splitlines()[-1]))


def _measure_this_process(
    directory: Path, dtype: str, workload: Workload, *, shared: bool
) -> MemoryUse:
    """Load the checkpoint and forecast twice (the second call runs with warm pools)."""
    from tscompress.checkpoints.load import load

    _forget_peak()
    before = psutil.Process().memory_info().rss
    pipeline = load(directory, dtype=dtype).forecaster
    if shared:
        pipeline = share_cross_attention(pipeline)
    after = psutil.Process().memory_info().rss
    series = synthetic_batch(workload)
    with _settings(workload):
        for _ in range(2):
            forecast(pipeline, series, workload)
    return MemoryUse(before, after, _peak_rss_bytes())


def _forget_peak() -> None:
    """On Linux, so that what importing libraries took for a moment is not the model's."""
    with suppress(OSError):  # no such file elsewhere, and some containers refuse it
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    if sys.platform == "linux":
        # Not ru_maxrss: Linux hands the parent's peak down to a spawned child.
        status = Path("/proc/self/status").read_text()
        return next(
            1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
        )
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _cuda_memory(
    pipeline: BaseChronosPipeline, series: torch.Tensor, workload: Workload
) -> MemoryUse:
    """The model's own weights, and on top what the allocator handed out during one forecast."""
    weights = parameter_bytes(pipeline.inner_model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()  # includes the other models of the comparison
    forecast(pipeline, series, workload)
    torch.cuda.synchronize()
    return MemoryUse(0, weights, weights + torch.cuda.max_memory_allocated() - resident)


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One timed ``predict`` call."""

    model: str
    round: int
    latency_ms: float


@dataclass(frozen=True)
class ModelBench:
    """What was measured of one model; ``None`` where it was not."""

    name: str
    latencies_ms: tuple[float, ...]
    batch_size: int
    parameters: int
    parameter_bytes: int
    kv_cache_bytes: int
    bytes_on_disk: int | None = None
    macs: int | None = None
    memory: MemoryUse | None = None

    @property
    def latency_ms(self) -> float:
        """Median of the runs."""
        return float(np.median(self.latencies_ms))

    @property
    def latency_p95_ms(self) -> float:
        return float(np.percentile(self.latencies_ms, 95))

    @property
    def latency_iqr_ms(self) -> float:
        """Distance between the quartiles."""
        lower, upper = np.percentile(self.latencies_ms, [25, 75])
        return float(upper - lower)

    @property
    def series_per_second(self) -> float:
        return 1000 * self.batch_size / self.latency_ms

    @property
    def peak_memory_bytes(self) -> int | None:
        """What the model adds: weights and the working memory of one forecast."""
        if self.memory is None:
            return None
        return self.memory.peak_bytes - self.memory.before_load_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        derived = {measure.name: getattr(self, measure.name) for measure in _MEASURES}
        return {**asdict(self), "latencies_ms": list(self.latencies_ms), **derived}


@dataclass(frozen=True)
class _Measure:
    """A row of the table: a figure of :class:`ModelBench` in display units."""

    name: str
    label: str
    unit_size: float = 1
    has_ratio: bool = True


_MEASURES = (
    _Measure("latency_ms", "latency, median (ms)"),
    _Measure("latency_p95_ms", "latency, p95 (ms)"),
    # A spread of two noisy samples of different size says nothing as a ratio.
    _Measure("latency_iqr_ms", "latency, IQR (ms)", has_ratio=False),
    _Measure("series_per_second", "throughput (series/s)"),
    _Measure("macs", "compute (GMAC)", 1e9),
    _Measure("parameters", "parameters (M)", 1e6),
    _Measure("parameter_bytes", "weights (MiB)", _MEBI),
    _Measure("bytes_on_disk", "on disk (MiB)", _MEBI),
    _Measure("kv_cache_bytes", "KV cache (MiB)", _MEBI),
    _Measure("peak_memory_bytes", "peak memory (MiB)", _MEBI),
)


@dataclass(frozen=True)
class BenchResult:
    """Measurements of all models under one workload; ratios are against the first."""

    workload: Workload
    models: tuple[ModelBench, ...]
    threads: int
    device_name: str
    torch_version: str

    def ratios(self, name: str) -> dict[str, float]:
        """``name`` / first model, for every measure that both have and where it means something.

        Raises
        ------
        UsageError
            No model of that name was measured.
        """
        model, first = self._model(name), self.models[0]
        pairs = {
            measure.name: (getattr(model, measure.name), getattr(first, measure.name))
            for measure in _MEASURES
            if measure.has_ratio
        }
        return {
            measure: value / base
            for measure, (value, base) in pairs.items()
            if value is not None and base
        }

    def latency_ratio_interval(self, name: str) -> tuple[float, float] | None:
        """95 % interval of the latency ratio; ``None`` with fewer than five rounds.

        Raises
        ------
        UsageError
            No model of that name was measured.
        """
        model = self._model(name)
        if self.workload.repeats < _MIN_ROUNDS_FOR_INTERVAL:
            return None
        return ratio_interval(self.models[0].latencies_ms, model.latencies_ms)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return {
            "workload": self.workload.model_dump(),
            "threads": self.threads,
            "device_name": self.device_name,
            "torch_version": self.torch_version,
            "models": [
                {
                    **model.to_dict(),
                    "ratios": self.ratios(model.name),
                    "latency_ratio_interval": self.latency_ratio_interval(model.name),
                }
                for model in self.models
            ],
        }

    def _model(self, name: str) -> ModelBench:
        for model in self.models:
            if model.name == name:
                return model
        raise UsageError(
            f"no measurements of {name!r}; measured: {[model.name for model in self.models]}."
        )


def ratio_interval(
    baseline_ms: Sequence[float],
    candidate_ms: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of median(candidate) / median(baseline).

    Entry ``i`` of both, ``[rounds]``, was timed in the same round; rounds are resampled whole, so
    that what slowed both models down at once cancels.
    """
    rounds = np.array([baseline_ms, candidate_ms])  # [2, R]
    rng = np.random.default_rng(0)
    drawn = rng.integers(rounds.shape[1], size=(resamples, rounds.shape[1]))
    medians = np.median(rounds[:, drawn], axis=-1)  # [2, resamples]
    tail = 50 * (1 - confidence)
    lower, upper = np.percentile(medians[1] / medians[0], [tail, 100 - tail])
    return float(lower), float(upper)


# --------------------------------------------------------------------------------------------------
# The benchmark
# --------------------------------------------------------------------------------------------------


def bench(
    pipelines: Mapping[str, BaseChronosPipeline] | Iterable[tuple[str, BaseChronosPipeline]],
    workload: Workload,
    *,
    directories: Mapping[str, Path | None] | None = None,
    measure_macs: bool = True,
    measure_memory: bool = False,
    on_run: Callable[[Run], None] = lambda run: None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchResult:
    """Measure the models under one workload; the first is the baseline of all ratios.

    Models run in turn, and who goes first rotates from round to round, so that neither a drift of
    the machine nor the place in a round favours one. Threads and random state are as before
    afterwards.

    Parameters
    ----------
    pipelines
        Name and pipeline of each model, already on ``workload.device``.
    workload
        What is asked of each.
    directories
        Checkpoint directory of each name, where there is one: needed for ``bytes_on_disk`` and
        for peak memory on the CPU.
    measure_macs
        Count multiply-accumulates, at the cost of about one more run of each model.
    measure_memory
        Measure peak memory: on the CPU in a fresh process for each directory, on CUDA here.
    on_run
        Called after each timed run.
    clock
        Seconds; for tests.

    Raises
    ------
    UsageError
        CUDA is asked for and missing, names are unknown or given twice, or the workload does not
        fit a pipeline.
    ModelNotFoundError
        A directory holds no weights.
    """
    named = _by_name(pipelines)
    for name, pipeline in named.items():
        _check(pipeline, repr(name), workload)
    paths = dict(directories or {})
    if unknown := sorted(paths.keys() - named.keys()):
        raise UsageError(f"directories of unknown models {unknown}; models: {list(named)}.")
    disk = {name: bytes_on_disk(path) for name, path in paths.items() if path is not None}
    with _device_of(named, workload):
        with _settings(workload):
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
                    kv_cache_bytes=kv_cache_bytes(
                        pipeline.inner_model,
                        workload,
                        shared_cross_attention=shares_cross_attention(pipeline),
                    ),
                    bytes_on_disk=disk.get(name),
                    macs=count_macs(pipeline, workload) if measure_macs else None,
                    memory=_memory(pipeline, paths.get(name), workload) if measure_memory else None,
                )
                for name, pipeline in named.items()
            ),
            threads=threads,
            device_name=_device_name(workload),
            torch_version=torch.__version__,
        )


def _by_name(
    pipelines: Mapping[str, BaseChronosPipeline] | Iterable[tuple[str, BaseChronosPipeline]],
) -> dict[str, BaseChronosPipeline]:
    pairs = list(pipelines.items() if isinstance(pipelines, Mapping) else pipelines)
    named = dict(pairs)
    if not pairs:
        raise UsageError("no model to measure; give at least one name and pipeline.")
    if len(named) < len(pairs):
        raise UsageError(f"names are not unique: {[name for name, _ in pairs]}; rename one.")
    return named


def _check(pipeline: BaseChronosPipeline, label: str, workload: Workload) -> None:
    """Refuse what would be measured wrongly without anyone noticing."""
    if workload.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda' but PyTorch finds no CUDA device; use device 'cpu'.")
    model = pipeline.inner_model
    device = next(model.parameters()).device.type
    if device != workload.device:
        raise UsageError(
            f"{label} is on {device!r} but the workload says {workload.device!r}; "
            f"load it with device={workload.device!r}."
        )
    if model.training:
        raise UsageError(f"{label} is in training mode, dropout included; call .eval() first.")
    if workload.context_length > pipeline.model_context_length:
        raise UsageError(
            f"context_length is {workload.context_length} but {label} reads only the last "
            f"{pipeline.model_context_length} steps; ask for that or less."
        )


def _device_of(
    pipelines: Mapping[str, BaseChronosPipeline], workload: Workload
) -> AbstractContextManager[Any]:
    """Of several GPUs the one that the first model is on is waited for and measured."""
    if workload.device != "cuda":
        return nullcontext()
    first = next(iter(pipelines.values()))
    return torch.cuda.device(next(first.inner_model.parameters()).device)


@contextmanager
def _settings(workload: Workload) -> Iterator[None]:
    """The workload's threads and a random state of its own; both restored on leaving."""
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if workload.device == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            torch.set_num_threads(workload.threads or threads)
            yield
        finally:
            torch.set_num_threads(threads)


def _time_in_turn(
    pipelines: Mapping[str, BaseChronosPipeline],
    workload: Workload,
    on_run: Callable[[Run], None],
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Latencies of each model in milliseconds, one a round."""
    series = synthetic_batch(workload)
    for pipeline in pipelines.values():
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


def _memory(
    pipeline: BaseChronosPipeline, directory: Path | None, workload: Workload
) -> MemoryUse | None:
    if workload.device == "cuda":
        with _settings(workload):
            return _cuda_memory(pipeline, synthetic_batch(workload), workload)
    if directory is None:
        return None
    shared = shares_cross_attention(pipeline)
    return process_memory(directory, _dtype(pipeline.inner_model), workload, shared=shared)


def _device_name(workload: Workload) -> str:
    if workload.device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


# --------------------------------------------------------------------------------------------------
# Table
# --------------------------------------------------------------------------------------------------


def bench_table(result: BenchResult) -> Table:
    """One row a measure, one column a model, and the ratio of each later model to the first.

    The latency ratio carries its 95 % interval. Measures that no model has (such as the
    cache of an encoder) are left out.
    """
    workload = result.workload
    table = Table(
        title=f"{workload.batch_size} series × {workload.context_length} steps, "
        f"horizon {workload.horizon}, {workload.device}, "
        f"{_counted(result.threads, 'thread')}, {_counted(workload.repeats, 'round')}"
    )
    first, *others = result.models
    table.add_column("per predict call")
    table.add_column(escape(first.name), justify="right")
    for model in others:
        table.add_column(escape(model.name), justify="right")
        table.add_column(f"ratio to {escape(first.name)}", justify="right", style="bold")
    for measure in _MEASURES:
        if not any(getattr(model, measure.name) for model in result.models):
            continue
        cells = [_figure(getattr(first, measure.name), measure.unit_size)]
        for model in others:
            cells.append(_figure(getattr(model, measure.name), measure.unit_size))
            cells.append(_ratio(result, model.name, measure.name))
        table.add_row(measure.label, *cells)
    return table


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _figure(value: float | None, unit_size: float) -> str:
    """At least three significant digits, never in exponents."""
    if value is None:
        return "–"
    shown = value / unit_size
    digits = 2 - math.floor(math.log10(shown)) if shown > 0 else 0
    return f"{shown:,.{max(0, digits)}f}"


def _ratio(result: BenchResult, name: str, measure: str) -> str:
    ratio = result.ratios(name).get(measure)
    if ratio is None:
        return "–"
    interval = result.latency_ratio_interval(name) if measure == "latency_ms" else None
    spread = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
    return f"{ratio:.2f}{spread}"


def main(arguments: Sequence[str]) -> None:
    """Print the :class:`MemoryUse` of a directory, dtype and workload, as JSON."""
    directory, dtype, workload, *shared = arguments
    memory = _measure_this_process(
        Path(directory), dtype, make_workload(json.loads(workload)), shared=shared == [_SHARED]
    )
    print(json.dumps(asdict(memory)))


if __name__ == "__main__":
    main(sys.argv[1:])
