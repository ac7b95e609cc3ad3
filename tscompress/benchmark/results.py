"""Measurements of models under one workload, and their ratios to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.workload import Workload
from tscompress.errors import UsageError
from tscompress.io.text import rounded_count

_MEBI = 2**20

# Fewer rounds than this carry no information about the tails of a 95% interval.
_MIN_ROUNDS_FOR_INTERVAL = 5
_RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One timed ``predict`` call."""

    model: str
    round: int
    latency_ms: float


@dataclass(frozen=True)
class ModelBench:
    """Measurements of one model; ``None`` where there is none.

    Attributes
    ----------
    dtype
        Of its weights, in which it computes, such as ``float32``; None of an exported model.
    """

    name: str
    latencies_ms: tuple[float, ...]
    batch_size: int
    parameters: int
    parameter_bytes: int
    kv_cache_bytes: int | None
    bytes_on_disk: int | None = None
    macs: int | None = None
    memory: MemoryUse | None = None
    dtype: str | None = None

    @property
    def latency_ms(self) -> float:
        """Median of the runs."""
        return float(np.median(self.latencies_ms))

    @property
    def latency_p95_ms(self) -> float:
        """95th percentile of the runs."""
        return float(np.percentile(self.latencies_ms, 95))

    @property
    def latency_iqr_ms(self) -> float:
        """Distance between the quartiles."""
        lower, upper = np.percentile(self.latencies_ms, [25, 75])
        return float(upper - lower)

    @property
    def series_per_second(self) -> float:
        """Throughput at the median latency."""
        return 1000 * self.batch_size / self.latency_ms

    @property
    def peak_memory_bytes(self) -> int | None:
        """Weights and working memory of one forecast; of loading if that took more, on a CPU."""
        if self.memory is None:
            return None
        return self.memory.peak_bytes - self.memory.before_load_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types of JSON."""
        derived = {measure.name: getattr(self, measure.name) for measure in MEASURES}
        return {**asdict(self), "latencies_ms": list(self.latencies_ms), **derived}


@dataclass(frozen=True)
class Measure:
    """A row of the table: a figure of :class:`ModelBench` in display units."""

    name: str
    label: str
    unit_size: float = 1
    has_ratio: bool = True


MEASURES = (
    Measure("latency_ms", "latency, median (ms)"),
    Measure("latency_p95_ms", "latency, p95 (ms)"),
    # The ratio of two noisy spreads has no meaning.
    Measure("latency_iqr_ms", "latency, IQR (ms)", has_ratio=False),
    Measure("series_per_second", "throughput (series/s)"),
    Measure("macs", "compute (GMAC)", 1e9),
    Measure("parameters", "parameters (M)", 1e6),
    Measure("parameter_bytes", "weights (MiB)", _MEBI),
    Measure("bytes_on_disk", "on disk (MiB)", _MEBI),
    Measure("kv_cache_bytes", "KV cache (MiB)", _MEBI),
    Measure("peak_memory_bytes", "peak memory (MiB)", _MEBI),
)


@dataclass(frozen=True)
class BenchResult:
    """Measurements of all models under one workload; ratios are against the first."""

    workload: Workload
    models: tuple[ModelBench, ...]
    threads: int
    device_name: str
    torch_version: str

    def __repr__(self) -> str:
        first = self.models[0]
        found = [
            f"{model.name!r} {model.latency_ms:.3g} ms"
            + ("" if model is first else f" (× {model.latency_ms / first.latency_ms:.2f})")
            + f", {rounded_count(model.parameters)} parameters"
            for model in self.models
        ]
        return f"BenchResult({'; '.join(found)})"

    @property
    def dtypes(self) -> list[str]:
        """In which the models compute, each once."""
        return list(dict.fromkeys(model.dtype for model in self.models if model.dtype))

    def ratios(self, name: str) -> dict[str, float]:
        """``name`` / first model, for every measure that both have and that has a ratio.

        Raises
        ------
        UsageError
            No model of that name was measured.
        """
        model, first = self._model(name), self.models[0]
        pairs = {
            measure.name: (getattr(model, measure.name), getattr(first, measure.name))
            for measure in MEASURES
            if measure.has_ratio
        }
        return {
            measure: value / base
            for measure, (value, base) in pairs.items()
            if value is not None and base
        }

    def latency_ratio_interval(self, name: str) -> tuple[float, float] | None:
        """95% interval of the latency ratio; ``None`` with fewer than five rounds.

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
        """Everything, in types of JSON."""
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
    baseline_ms: Sequence[float], candidate_ms: Sequence[float]
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of median(candidate) / median(baseline).

    Both are ``[rounds]``; entries of the same round were timed together. Rounds are resampled
    whole, so that a slowdown of both models cancels.
    """
    rounds = np.array([baseline_ms, candidate_ms])  # [2, R]
    rng = np.random.default_rng(0)
    drawn = rng.integers(rounds.shape[1], size=(_RESAMPLES, rounds.shape[1]))
    medians = np.median(rounds[:, drawn], axis=-1)  # [2, resamples]
    lower, upper = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return float(lower), float(upper)
