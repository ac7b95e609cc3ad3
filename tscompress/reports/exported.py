"""The exported graph in a report, beside the compressed model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tscompress.benchmark.results import BenchResult
from tscompress.evaluation.comparison import (
    Comparison,
    ModelComparison,
    Ratio,
    compare_results,
)
from tscompress.evaluation.results import METRICS
from tscompress.io.text import ratio_text
from tscompress.reports.costs import COSTS, cost_label
from tscompress.reports.points import Point
from tscompress.workflows.run import RunResult


class ExportedRow(NamedTuple):
    """One measure of the compressed model and of its graph, as ratios to the original."""

    label: str
    compressed: Ratio
    exported: Ratio


def exported_line(result: RunResult) -> str:
    """Scores of the graph in a line; empty where it was not scored."""
    found = exported_comparison(result)
    if found is None or result.exported is None:
        return ""
    ratios = [
        f"{metric} {ratio_text(ratio.ratio, ratio.low, ratio.high, 3)}"
        for metric in METRICS[::-1]
        if (ratio := getattr(found, metric))
    ]
    return f"exported ({result.exported.precision}), to the original: {', '.join(ratios)}"


def exported_comparison(result: RunResult) -> ModelComparison | None:
    """The graph's scores against the original's."""
    if result.original is None or result.exported_scores is None:
        return None
    (found,) = compare_results([result.original, result.exported_scores]).models
    return found


def exported_rows(
    result: RunResult, comparison: Comparison | None, graph: ModelComparison | None
) -> Iterable[ExportedRow]:
    """Scores, latency and sizes that both have; all is relative to the original."""
    if comparison is not None and graph is not None:
        (model,) = comparison.models
        for metric in METRICS[::-1]:
            yield ExportedRow(metric, getattr(model, metric), getattr(graph, metric))
    if result.bench is None or len(result.bench.models) < 3:
        return
    for key in ("latency_ms", "bytes_on_disk", "peak_memory_bytes"):
        found = [_cost_ratio(result.bench, one.name, key) for one in result.bench.models[1:]]
        if found[0] is not None and found[1] is not None:
            yield ExportedRow(cost_label(key), found[0], found[1])


def _cost_ratio(bench: BenchResult, name: str, key: str) -> Ratio | None:
    ratio = bench.ratios(name).get(key)
    if ratio is None:
        return None
    ends = bench.latency_ratio_interval(name) if key == "latency_ms" else None
    low, high = ends or (None, None)
    return Ratio(ratio=ratio, low=low, high=high)


def exported_note(result: RunResult) -> str:
    """What the graph is; empty where there is none."""
    graph = result.exported
    if graph is None:
        return ""
    return (
        f"{graph.directory.name} holds the compressed model as an ONNX graph, in "
        f"{graph.precision}, which forecasts without torch. Its {graph.compared} on test series "
        f"differ from the compressed model's by at most {graph.difference:.2g} of the largest."
    )


def exported_point(result: RunResult) -> Point | None:
    """The graph in the plane of cost and quality."""
    graph = exported_comparison(result)
    if graph is None or result.exported is None or result.bench is None:
        return None
    ratios = result.bench.ratios(result.bench.models[2].name)
    costs = {key: ratio for key, ratio in ratios.items() if key in COSTS}
    name = f"exported, {result.exported.precision}"
    return Point(name, "exported", costs, {metric: getattr(graph, metric) for metric in METRICS})
