"""The report of a run whose probe has tasks with covariates: tables, pictures, data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tscompress.compression.calibration import CalibrationConfig
from tscompress.plan.schedules import RankSchedule
from tscompress.probing.measure import ProbeConfig
from tscompress.probing.regressions import RESPONSES
from tscompress.probing.results import load_probes
from tscompress.reports.content import make_report
from tscompress.reports.forecast_charts import covariate_chart, task_chart
from tscompress.reports.page import render_page
from tscompress.reports.svg import LEFT, RIGHT, TOP, WIDTH
from tscompress.reports.write import write_report
from tscompress.workflows.recipe import EvaluationConfig, Recipe
from tscompress.workflows.run import RunResult, run
from tscompress.workflows.run_files import load_run

TASKS = ("covariate-with-gap", "leading-series", "one-covariate-of-8", "period-4")


@pytest.fixture(scope="module")
def walked(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunResult, Recipe]:
    recipe = Recipe(
        model=str(checkpoints["chronos-2"]),
        output=str(tmp_path_factory.mktemp("covariates")),
        schedule=RankSchedule(rank=4),
        calibration=CalibrationConfig(num_series=6, context_length=32, batch_size=3),
        probe=ProbeConfig(tasks=(*TASKS, "response"), num_series=3),
        profile=None,
        evaluation=EvaluationConfig(datasets=("monash_m1_yearly",), max_series=3),
        bench=None,
    )
    result = run(recipe)
    write_report(result, recipe)
    return result, recipe


def written(result: RunResult, table: str) -> tuple[str, str]:
    """A table of the page, and the whole Markdown."""
    page = (result.directory / "report.html").read_text(encoding="utf-8")
    _, _, after = page.partition(f'<table id="{table}">')
    found, closed, _ = after.partition("</table>")
    assert closed
    return found, (result.directory / "report.md").read_text(encoding="utf-8")


def test_gains_from_covariates_are_on_the_page_and_in_the_markdown(
    walked: tuple[RunResult, Recipe],
) -> None:
    result, _ = walked
    table, markdown = written(result, "covariates")
    assert result.probes is not None
    original, compressed = result.probes
    for before, after in zip(original.tasks, compressed.tasks, strict=True):
        assert (before.name in table) == bool(before.task.covariates)
        if before.covariates_add is None or after.covariates_add is None:
            continue
        change = f"{before.covariates_add.value:.2f} → {after.covariates_add.value:.2f}"
        assert change in table
        (line,) = [row for row in markdown.splitlines() if row.startswith(f"| {before.name} |")]
        assert change in line


def test_the_response_is_on_the_page_and_in_the_markdown(walked: tuple[RunResult, Recipe]) -> None:
    result, recipe = walked
    table, markdown = written(result, "responses")
    assert result.probes is not None
    original, compressed = result.probes
    assert len(original.responses) == len(RESPONSES)
    for before, after in zip(original.responses, compressed.responses, strict=True):
        change = f"{before.slope.value:.2f} → {after.slope.value:.2f}"
        assert change in table
        (line,) = [row for row in markdown.splitlines() if row.startswith(f"| {before.name} |")]
        assert change in line
    # A probe of nothing else has this section alone.
    alone = [probe.model_copy(update={"tasks": ()}) for probe in result.probes]
    only = render_page(make_report(replace(result, probes=(alone[0], alone[1])), recipe))
    assert 'id="responses"' in only
    assert 'id="skill"' not in only


def test_the_data_of_a_run_has_them(walked: tuple[RunResult, Recipe]) -> None:
    result, recipe = walked
    assert result.probes is not None
    original, compressed = result.probes
    assert load_probes(result.directory / "probe.json") == (compressed, original)
    content = json.loads((result.directory / "probe.json").read_text(encoding="utf-8"))
    names = [one["name"] for one in content["comparison"]["covariates"]]
    assert names == sorted(TASKS[:3], key=[score.name for score in original.tasks].index)
    assert load_run(result.directory)[0].probes == result.probes
    assert render_page(make_report(*load_run(result.directory))) == render_page(
        make_report(result, recipe)
    )


def test_a_picture_shows_the_covariate_below_the_target(
    walked: tuple[RunResult, Recipe],
) -> None:
    result, _ = walked
    assert result.probes is not None
    pictures = {}
    for before, after in zip(*(probe.tasks for probe in result.probes), strict=True):
        below = covariate_chart(before)
        if below is None:
            assert not before.task.covariates
            continue
        pictures[before.name] = below
        assert below.x_range == task_chart(before, after).x_range  # steps stand below each other
        for mark in below.marks:
            for pair in mark.attributes.get("points", "").split():
                x, y = map(float, pair.split(","))
                assert LEFT <= x <= WIDTH - RIGHT
                assert TOP <= y <= below.height
    assert pictures.keys() == set(TASKS[:3])
    assert len(pictures["one-covariate-of-8"].legend) == 3
    assert "5 more are not drawn" in pictures["one-covariate-of-8"].label
    lines = [mark for mark in pictures["leading-series"].marks if "s0" in mark.css]
    ends = [float(pair.split(",")[0]) for m in lines for pair in m.attributes["points"].split()]
    assert max(ends) < pictures["leading-series"].x(0.5)  # it is not known ahead
    page = (result.directory / "report.html").read_text(encoding="utf-8")
    assert page.count("not known ahead</li>") == 1
