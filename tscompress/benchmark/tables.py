"""Measurements for a terminal."""

from __future__ import annotations

import math

from rich.markup import escape
from rich.table import Table

from tscompress.benchmark.results import MEASURES, BenchResult
from tscompress.io.text import counted, ratio_text


def bench_table(result: BenchResult) -> Table:
    """One row per measure, one column per model, and the ratio of each later model to the first.

    The latency ratio has its 95% interval. Measures that no model has (such as the cache of an
    encoder) are omitted.
    """
    workload = result.workload
    table = Table(
        title=f"{workload.batch_size} series × {workload.context_length} steps, "
        f"horizon {workload.horizon}, "
        + ", ".join(
            [
                *workload.words(),
                *result.dtypes,
                workload.device,
                counted(result.threads, "thread"),
                counted(workload.repeats, "round"),
            ]
        )
    )
    first, *others = result.models
    table.add_column("per predict call")
    table.add_column(escape(first.name), justify="right")
    for model in others:
        table.add_column(escape(model.name), justify="right")
        table.add_column(f"ratio to {escape(first.name)}", justify="right", style="bold")
    for measure in MEASURES:
        if not any(getattr(model, measure.name) for model in result.models):
            continue
        cells = [_figure(getattr(first, measure.name), measure.unit_size)]
        for model in others:
            cells.append(_figure(getattr(model, measure.name), measure.unit_size))
            cells.append(_ratio(result, model.name, measure.name))
        table.add_row(measure.label, *cells)
    return table


def _figure(value: float | None, unit_size: float) -> str:
    """At least three significant digits, without an exponent."""
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
    low, high = interval or (None, None)
    return ratio_text(ratio, low, high, 2)
