"""The report of a run: its data, one page of HTML, and Markdown with figures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from tscompress.benchmark.tables import bench_table
from tscompress.evaluation.comparison import Ratio
from tscompress.evaluation.results import relative_or_none
from tscompress.evaluation.tables import evaluation_table
from tscompress.io.files import (
    check_file,
    write_output,
    write_text_atomically,
)
from tscompress.io.own_outputs import mark_of
from tscompress.io.text import plain, ratio_text
from tscompress.plotting import ComparisonRow, comparison_figure, save_figure
from tscompress.probing.responses import pair_text
from tscompress.probing.tables import kept_interval, kept_text, probe_tables
from tscompress.profiling.figures import save_profile_figures
from tscompress.profiling.tables import profile_table
from tscompress.reports.content import (
    Report,
    make_report,
    plan_label,
    texts,
    verdict_of,
)
from tscompress.reports.exported import exported_line
from tscompress.reports.page import render_page
from tscompress.reports.strips import CovariateRow, covariate_rows, skill_strip
from tscompress.reports.terms import spelled_out
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.run import RunResult
from tscompress.workflows.run_files import (
    FIGURE_FILE,
    PROFILE_DIRECTORY,
    load_run,
    measured_recipe,
    save_run,
    written_before,
)

PAGE_FILE = "report.html"
MARKDOWN_FILE = "report.md"


def report_files(directory: Path) -> list[Path]:
    """All that :func:`write_report` may write into the directory of a run."""
    return [*written_before(directory), directory / PAGE_FILE, directory / MARKDOWN_FILE]


def write_report(result: RunResult, recipe: Recipe) -> Path:
    """Write what was measured, ``report.html``, ``report.md`` and figures; returns the Markdown.

    Raises
    ------
    OutputError
        The directory cannot be written to.
    DataError
        A score is not finite.
    """
    recipe = measured_recipe(result, recipe)
    report = make_report(result, recipe)
    directory = result.directory
    save_run(result, recipe)
    write_text_atomically(directory / PAGE_FILE, render_page(report))
    _save_figures(report)
    return write_markdown(report)


def rewrite_report(
    directory: str | Path,
    output: str | Path | None = None,
    *,
    compare: Sequence[str | Path] = (),
    force: bool = False,
) -> Path:
    """Make the page of a run again, from what lies in its directory; no model is loaded.

    Parameters
    ----------
    output
        The page alone, elsewhere; by default ``report.html`` and ``report.md`` in the directory.
    compare
        Directories of more runs with the same original, or CSV files of ``sweep`` or
        ``eval/peers.py``, for the figure of quality against cost.
    force
        Replace a page that exists.

    Returns
    -------
    Path
        Of the page.

    Raises
    ------
    UsageError
        It is not the directory of a run, or one to compare does not fit.
    OutputExistsError
        The page exists and ``force`` is false.
    DataError
        A file holds something else than a run writes.
    OutputError
        The page cannot be written.
    """
    page = Path(directory) / PAGE_FILE if output is None else Path(output)
    report = make_report(*load_run(directory), others=compare)
    read = [path for path in Path(directory).rglob("*") if path.is_file()]
    measured = [path for path in read if path.suffix != ".html"]
    inputs = [*compare, *measured]
    if output is None:
        check_file(Path(directory) / MARKDOWN_FILE, force=True, inputs=compare)
    write_output(page, render_page(report), force=force, inputs=inputs)
    if output is None:
        write_markdown(report)
    return page


def write_markdown(report: Report) -> Path:
    """Write ``report.md`` into the run's directory, with the figures that lie there."""
    directory = report.result.directory
    drawn = [directory / FIGURE_FILE, *sorted((directory / PROFILE_DIRECTORY).glob("*.png"))]
    probes = report.result.probes
    verdict, meanings = texts(report)
    text = _template().render(
        report=report,
        verdict=verdict,
        meanings=meanings,
        skill=None if probes is None or not probes[0].tasks else skill_strip(*probes),
        covariates=_covariate_rows(report),
        response=None if report.probe is None else report.probe.response,
        figures=[figure.relative_to(directory) for figure in drawn if figure.is_file()],
        page=PAGE_FILE,
    )
    path = directory / MARKDOWN_FILE
    write_text_atomically(path, f"{mark_of(text)}\n{text}")
    return path


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tscompress.reports"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": plain, "ratio": _ratio, "kept": kept_text}
    environment.filters |= {"pair": pair_text, "share": kept_interval}
    return environment.get_template("report.md.j2")


def _covariate_rows(report: Report) -> list[CovariateRow]:
    if report.result.probes is None or report.probe is None:
        return []
    return covariate_rows(*report.result.probes, report.probe)


def _ratio(ratio: Ratio) -> str:
    return ratio_text(ratio.ratio, ratio.low, ratio.high, 3)


def _save_figures(report: Report) -> None:
    """Figures of the Markdown, as PNG."""
    directory = report.result.directory
    row = _comparison_row(report)
    if row is not None:
        save_figure(comparison_figure([row]), directory / FIGURE_FILE)
    if report.result.profile is not None:
        save_profile_figures(report.result.profile, directory / PROFILE_DIRECTORY)


def _comparison_row(report: Report) -> ComparisonRow | None:
    if len(report.points) < 2:
        return None
    ours = report.points[1]
    return ComparisonRow(
        plan_label(report.result.plan),
        relative_wql=ours.quality["WQL"].ratio,
        relative_mase=ours.quality["MASE"].ratio,
        latency_ratio=ours.costs["latency_ms"],
        parameter_ratio=ours.costs["parameters"],
    )


def report_tables(result: RunResult, recipe: Recipe) -> list[Any]:
    """Rich tables and lines of everything that was measured, for a terminal."""
    shown: list[Any] = []
    if result.profile is not None:
        shown += [*profile_table(result.profile), "\n".join(result.profile.findings())]
    if result.compressed is not None:
        baseline = result.baseline
        if baseline is not None and relative_or_none(result.compressed, baseline) is None:
            baseline = None  # without error itself
        shown.append(evaluation_table(result.compressed, result.original, baseline))
    if line := exported_line(result):
        shown.append(line)
    if result.probes is not None:
        original, compressed = result.probes
        shown += probe_tables(compressed, original)[:1]  # the others are on the page
        shown.append("\n".join(compressed.against(original).lines()))
    if result.bench is not None:
        shown.append(bench_table(result.bench))
    verdict = verdict_of(result, recipe)
    return [*shown, result.plan.summary(), *spelled_out([verdict.sentence]), *verdict.advice]
