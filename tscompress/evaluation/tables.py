"""Scores, comparisons and changes of forecasts for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from tscompress.evaluation.calibration import Calibration
from tscompress.evaluation.comparison import Comparison, ModelComparison, Ratio
from tscompress.evaluation.fidelity import Fidelity
from tscompress.evaluation.metrics import MEDIAN
from tscompress.evaluation.results import METRICS, EvaluationResult, relative, series_text
from tscompress.io.text import counted, percent, ratio_text
from tscompress.io.untrusted import single_line


def evaluation_table(
    result: EvaluationResult,
    against: EvaluationResult | None = None,
    baseline: EvaluationResult | None = None,
) -> Table:
    """The scores of each dataset, and their ratios to those of up to two other results.

    Parameters
    ----------
    against
        The model that ``result`` replaces, usually the original.
    baseline
        The common reference of both, usually seasonal naive.
    """
    references = [reference for reference in (against, baseline) if reference is not None]
    notes = [f"({i}) = {escape(r.model)}" for i, r in enumerate(references, start=1)]
    earlier = None
    if cached := sum(row.cached is True for row in result.rows):
        earlier = f"{cached} of {counted(len(result.rows), 'dataset')} from an earlier run"
    settings = [] if result.settings is None else result.settings.words()
    calibrated = _calibration_line(result)
    table = Table(
        title=", ".join([escape(f"{result.model} on {result.suite}"), *settings]),
        caption="\n".join(filter(None, (", ".join(notes), earlier, calibrated))) or None,
        show_footer=bool(references),
        box=box.SIMPLE_HEAD,
    )
    table.add_column("dataset", footer="geometric mean", no_wrap=True)
    table.add_column("series", justify="right")
    for metric in METRICS:
        table.add_column(metric, justify="right")
    measures = _MEASURES if calibrated and len(references) < 2 else {}
    for header in measures.values():
        table.add_column(header, justify="right")
    comparisons = [relative(result, reference) for reference in references]
    for index, comparison in enumerate(comparisons, start=1):
        for metric in METRICS:
            header = f"{metric}\n/ ({index})"
            table.add_column(header, justify="right", footer=f"{comparison[metric]:.3f}")
    for row in result.rows:
        ratios = [
            f"{comparison['datasets'][row.dataset][metric]:.3f}"
            for comparison in comparisons
            for metric in METRICS
        ]
        scores = [f"{row.MASE:.3f}", f"{row.WQL:.4f}"]
        scores += [percent(getattr(row, measure), 1) for measure in measures]
        series = series_text(row.series_count, row.windows)
        table.add_row(escape(row.dataset), series, *scores, *ratios)
    return table


#: Of a forecast, beside its scores.
_MEASURES = {"coverage": "80% band\ncovers", "crossing_rate": "crossing\nquantiles"}


def _calibration_line(result: EvaluationResult) -> str | None:
    """Means over the datasets; None in results of earlier versions."""
    coverage, error = result.mean_of("coverage"), result.mean_of("coverage_error")
    crossing = result.mean_of("crossing_rate")
    if coverage is None or error is None or crossing is None:
        return None
    return (
        f"80% band covers {percent(coverage, 1)} (coverage error {percent(error, 1)}), "
        f"{percent(crossing, 1)} of neighbouring quantiles cross"
    )


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Ratios with intervals: of all models, if there are several, and of each by dataset."""
    tables = []
    if len(comparison.models) > 1:
        table = _ratio_table(f"relative to {comparison.reference}", "model", comparison)
        for model in comparison.models:
            table.add_row(escape(model.model), *(_cell(getattr(model, m)) for m in METRICS))
        tables.append(table)
    for model in comparison.models:
        title = f"{model.model} relative to {comparison.reference}"
        table = _ratio_table(title, "dataset", comparison, model)
        for part in model.datasets:
            cells = (_cell(getattr(part, metric)) for metric in METRICS)
            table.add_row(
                escape(part.dataset), series_text(part.series_count, part.windows), *cells
            )
        tables.append(table)
    return tables


def _ratio_table(
    title: str, first: str, comparison: Comparison, total: ModelComparison | None = None
) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, show_footer=total is not None)
    table.add_column(first, footer="geometric mean", no_wrap=True)
    if total is not None:
        table.add_column("series", justify="right", no_wrap=True)
    for metric in METRICS:
        footer = "" if total is None else _cell(getattr(total, metric))
        header = f"{metric} ({percent(comparison.confidence)})"
        # Where the terminal is narrow an interval stands below its ratio.
        narrowest = len("(1.0000–1.0000)")
        table.add_column(header, justify="right", footer=footer, min_width=narrowest)
    return table


def _cell(ratio: Ratio) -> str:
    return ratio_text(ratio.ratio, ratio.low, ratio.high, 4)


def fidelity_tables(fidelity: Fidelity) -> list[Table]:
    """Calibration by dataset; ratios by step, frequency and context; the worst series."""
    return [_calibration_table(fidelity), _group_table(fidelity), _worst_table(fidelity)]


def _calibration_table(fidelity: Fidelity) -> Table:
    measures: list[tuple[str, Callable[[Calibration], float]]] = [
        ("80% interval\ncovers", lambda one: one.coverage),
        ("calibration\nerror", lambda one: one.error),
        ("crossing\nquantiles", lambda one: one.crossing_rate),
    ]
    table = Table(
        title="forecasts, original → compressed",
        caption="shift of the median in seasonal errors",
        box=box.SIMPLE_HEAD,
        show_footer=True,
    )
    table.add_column("dataset", footer="mean", no_wrap=True)
    table.add_column("shift", justify="right", footer=_shift(fidelity.shift))
    for header, value in measures:
        both = [
            np.mean([value(getattr(part, side)) for part in fidelity.datasets])
            for side in ("original", "compressed")
        ]
        footer = " → ".join(percent(float(share), 1) for share in both)
        table.add_column(header, justify="right", footer=footer, no_wrap=True)
    for part in fidelity.datasets:
        cells = [
            f"{percent(value(part.original), 1)} → {percent(value(part.compressed), 1)}"
            for _, value in measures
        ]
        table.add_row(part.dataset, _shift(part.shift), *cells)
    return table


def _shift(of_levels: Sequence[float]) -> str:
    """That of the median; a dash where no series has a seasonal error."""
    median = of_levels[MEDIAN]
    return "–" if math.isnan(median) else f"{median:.4f}"


def _group_table(fidelity: Fidelity) -> Table:
    table = Table(title="loss, compressed / original", box=box.SIMPLE_HEAD)
    table.add_column("series")
    table.add_column("count", justify="right")
    table.add_column("ratio", justify="right")
    for kind, groups in (("freq", fidelity.frequencies), ("context", fidelity.contexts)):
        for group in groups:
            table.add_row(f"{kind} {group.group}", str(group.series_count), f"{group.ratio:.4f}")
        table.add_section()
    last = len(fidelity.drift)
    for step in sorted({1, (1 + last) // 2, last}):
        reach = [part.series_count for part in fidelity.datasets if len(part.drift) >= step]
        ratio = fidelity.drift[step - 1]
        shown = "–" if math.isnan(ratio) else f"{ratio:.4f}"
        table.add_row(f"step {step}", str(sum(reach)), shown)
    return table


def _worst_table(fidelity: Fidelity) -> Table:
    table = Table(title="series that got worst", box=box.SIMPLE_HEAD)
    for header in ("dataset", "series", "loss", "ratio"):
        table.add_column(header, justify="left" if header == "dataset" else "right")
    for one in fidelity.worst:
        ratio = "–" if one.ratio is None else f"{one.ratio:.2f}"
        loss = f"{one.original_loss:.4g} → {one.compressed_loss:.4g}"
        series = escape(single_line(one.name, 40)) if one.name else str(one.series)
        table.add_row(one.dataset, series, loss, ratio)
    return table
