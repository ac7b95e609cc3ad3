"""Sizes and speed of a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.ticker import EngFormatter

from tscompress.benchmark.results import BenchResult
from tscompress.io.text import counted


class Cost(NamedTuple):
    """One measure of size or speed, of both models."""

    key: str
    label: str
    original: str
    compressed: str
    ratio: float
    interval: tuple[float, float] | None = None


#: Measure of a bench: its name for people, and its unit.
COSTS = {
    "latency_ms": ("latency, median", "s"),
    "parameters": ("parameters", ""),
    "bytes_on_disk": ("size on disk", "B"),
    "peak_memory_bytes": ("peak memory", "B"),
    "kv_cache_bytes": ("KV cache", "B"),
    "macs": ("multiply-accumulates", ""),
}


def cost_label(key: str) -> str:
    """A measure's name for people."""
    return COSTS[key][0]


def cost_rows(bench: BenchResult | None) -> Iterable[Cost]:
    """Sizes and speed of the original and the compressed model."""
    if bench is None:
        return
    original, compressed = bench.models[:2]
    ratios = bench.ratios(compressed.name)
    for key, (label, unit) in COSTS.items():
        values = (getattr(original, key), getattr(compressed, key))
        if None in values or ratios.get(key) is None:
            continue
        shown = EngFormatter(unit=unit, places=2 if unit != "s" else 1)
        scale = 1e-3 if key == "latency_ms" else 1
        before, after = (shown(value * scale) for value in values)
        interval = bench.latency_ratio_interval(compressed.name) if unit == "s" else None
        yield Cost(key, label, before, after, ratios[key], interval)


def cost_note(bench: BenchResult | None) -> str:
    """How the models were timed."""
    if bench is None:
        return ""
    interval = bench.latency_ratio_interval(bench.models[1].name)
    spread = "" if interval is None else f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})"
    work = bench.workload
    where = f"{bench.device_name}, {counted(bench.threads, 'thread')}, torch {bench.torch_version}"
    settings = ", ".join([*work.words(), *bench.dtypes, counted(work.repeats, "round")])
    count = "Both" if len(bench.models) == 2 else "The three"
    return (
        f"{count} models took turns in one process on {work.device} ({where}), batch "
        f"{work.batch_size}, context {work.context_length}, horizon {work.horizon}, "
        f"{settings}; the latency ratio{spread} is of medians."
    )
