"""The report as one HTML page that needs nothing but itself: no network, no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import jinja2

from tscompress._version import __version__
from tscompress.evaluation.fidelity import WorstSeries
from tscompress.evaluation.results import METRICS
from tscompress.evaluation.typical_series import ForecastExample
from tscompress.io.text import counted, percent
from tscompress.linalg import even_picks
from tscompress.probing.responses import pair_text
from tscompress.probing.tables import covers, kept_text
from tscompress.reports.content import Report, rank_roles, rank_rows, texts
from tscompress.reports.costs import cost_label
from tscompress.reports.fidelity_charts import (
    calibration_chart,
    drift_chart,
    fidelity_row,
    shift_chart,
)
from tscompress.reports.forecast_charts import covariate_chart, forecast_chart, task_chart
from tscompress.reports.quality_charts import FAR, is_far, pareto_chart
from tscompress.reports.rank_charts import flow_charts, head_charts
from tscompress.reports.strips import covariate_rows, forest, skill_strip

MAX_EXAMPLES = 9
#: Cost axes of the Pareto figure, the first one shown first.
_PARETO_COSTS = ("parameters", "latency_ms", "bytes_on_disk", "peak_memory_bytes", "macs")
#: What stays on one line: options with their value, factors, changes, spans, numbers with a unit.
_UNBROKEN = re.compile(
    r"((?<![\w-])--[a-z][a-z-]*(?: \d[\d.]*)?"
    r"|(?:loss )?× \d[\d.]*"
    r"|\(\d[\d.]* → -?\d[\d.]*\)"
    r"|\d[\d.]*%? to \d[\d.]*%?"
    r"|\d[\d.,]* (?:[mµn]?s|[kMGT]i?B?|B)\b)"
)
_SECTIONS = {
    "glance": "At a glance",
    "missing": "Not in this report",
    "pareto": "Quality against cost",
    "quality": "Quality by dataset",
    "exported": "Exported graph",
    "skill": "Skill",
    "response": "Response",
    "forecasts": "Forecasts",
    "fidelity": "Fidelity",
    "worst": "Worst series",
    "ranks": "Ranks",
    "reproduce": "Reproduce",
}


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tscompress.reports"),
        # Names of models and datasets are other people's text.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "counted": counted,
        "covers": covers,
        "kept": kept_text,
        "pair": pair_text,
        "percent": percent,
        "unbroken": _UNBROKEN.split,
    }
    return environment.get_template("report.html.j2")


def render_page(report: Report) -> str:
    """The page of a run. Parts without measurements are omitted, with a note."""
    parts = {**_quality(report), **_skill(report), **_forecasts(report), **_ranks(report)}
    shown = {
        "missing": report.missing,
        "quality": parts["forests"],
        "exported": report.exported_note,
        "forecasts": parts["examples"],
    }
    sections = [
        (id_, title)
        for id_, title in _SECTIONS.items()
        if id_ in ("glance", "reproduce") or shown.get(id_, parts.get(id_))
    ]
    verdict, meanings = texts(report)
    return _template().render(
        report=report,
        verdict=verdict,
        meanings=meanings,
        version=__version__,
        sections=sections,
        provenance=list(_facts(report.provenance or {})),
        **parts,
    )


def _quality(report: Report) -> dict[str, Any]:
    """Figures of scores and of cost."""
    known = report.points[1].costs if report.points else {}
    costs = [key for key in _PARETO_COSTS if key in known]
    charts = [
        (key, pareto_chart(report.points, metric, key)) for key in costs for metric in METRICS[::-1]
    ]
    forests = []
    if report.comparison is not None:
        (model,) = report.comparison.models
        graph = report.exported_comparison
        forests = [(metric, forest(model, metric, graph)) for metric in METRICS[::-1]]
    return {
        "pareto": charts,
        "costs": [(key, cost_label(key)) for key in costs],
        "far": sum(any(is_far(p, metric) for metric in METRICS) for p in report.points),
        "far_percent": percent(FAR),
        "forests": forests,
        "metrics": [(metric, metric) for metric, _ in forests],
    }


def _skill(report: Report) -> dict[str, Any]:
    """Both models at known processes: figures, and rows of original, compressed and change."""
    response = None if report.probe is None else report.probe.response
    if report.result.probes is None or report.probe is None or not report.probe.tasks:
        return {"skill": None, "tasks": {}, "covariates": [], "response": response}
    original, compressed = report.result.probes
    tasks: dict[str, list[dict[str, Any]]] = {}
    for before, after, change in zip(
        original.tasks, compressed.tasks, report.probe.tasks, strict=True
    ):
        row = {"original": before, "compressed": after, "change": change}
        charts = {"chart": task_chart(before, after), "below": covariate_chart(before)}
        tasks.setdefault(change.group, []).append({**row, **charts})
    return {
        "skill": skill_strip(original, compressed),
        "tasks": tasks,
        "covariates": covariate_rows(original, compressed, report.probe),
        "response": response,
    }


def _forecasts(report: Report) -> dict[str, Any]:
    """Forecasts drawn, and how they differ."""
    examples = report.result.examples
    several = len({one.dataset for one in examples}) > 1
    picked = [examples[i] for i in even_picks(len(examples), MAX_EXAMPLES).tolist()]
    found: dict[str, Any] = {
        "examples": [forecast_chart(one, _title(one, several)) for one in picked],
        "fidelity": [],
        "fidelity_rows": [],
        "groups": [],
        "worst": [],
        "several": several,
    }
    fidelity = report.result.fidelity
    if fidelity is None:
        return found
    return {
        **found,
        "fidelity": [draw(fidelity) for draw in (calibration_chart, shift_chart, drift_chart)],
        "fidelity_rows": [fidelity_row(part) for part in fidelity.datasets],
        "groups": [("frequency", fidelity.frequencies), ("context of", fidelity.contexts)],
        "worst": [forecast_chart(one, _title(one, several)) for one in fidelity.worst],
    }


def _title(series: ForecastExample | WorstSeries, several: bool) -> str:
    """The series' id, with its dataset where there are ``several`` or it has none."""
    name = series.name or f"series {series.series}"
    title = f"{series.dataset}, {name}" if several or not series.name else name
    if isinstance(series, WorstSeries) and series.ratio is not None:
        title += f", loss × {series.ratio:.2f}"
    return title


def _ranks(report: Report) -> dict[str, Any]:
    """The profile of the original."""
    profile, plan = report.result.profile, report.result.plan
    if profile is None:
        return {"ranks": [], "heads": [], "flow": []}
    return {
        "ranks": rank_rows(profile, plan),
        "roles": rank_roles(profile),
        "epsilons": [(index, f"{epsilon:g}") for index, epsilon in enumerate(profile.epsilons)],
        "middle": profile.middle,
        "heads": head_charts(profile, plan),
        "flow": flow_charts(profile),
    }


def _facts(provenance: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Versions and hashes as rows; whatever the file lacks is left out."""
    for name in ("tscompress", "python"):
        if name in provenance:
            yield name, str(provenance[name])
    libraries = provenance.get("libraries")
    if isinstance(libraries, dict):
        yield from ((str(name), str(version)) for name, version in libraries.items())
    source = provenance.get("source")
    if isinstance(source, dict):
        if source.get("revision"):
            yield "commit of the original", str(source["revision"])
        yield from _hashes("original", source.get("sha256"))
    yield from _hashes("compressed", provenance.get("sha256"))


def _hashes(whose: str, hashes: object) -> Iterable[tuple[str, str]]:
    if isinstance(hashes, dict):
        yield from ((f"{whose}: {name}", str(value)) for name, value in hashes.items())
