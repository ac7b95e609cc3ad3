"""The report: what it says, that it needs nothing but itself, and that names are only text."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from chromium import browser_path
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.results import BenchResult, ModelBench
from tscompress.benchmark.workload import Workload
from tscompress.cli import app as cli
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset, LongFormat
from tscompress.data.suites import find_suite, load_suite
from tscompress.errors import DataError, OutputError, OutputExistsError, UsageError
from tscompress.evaluation.comparison import Ratio
from tscompress.evaluation.results import EvaluationResult, Settings
from tscompress.evaluation.typical_series import ForecastExample, typical_examples
from tscompress.hub.card_scores import read_scores
from tscompress.plan.schedules import RankSchedule
from tscompress.probing.measure import ProbeConfig
from tscompress.reports.content import make_report, plan_label, rank_rows, texts
from tscompress.reports.forecast_charts import forecast_chart
from tscompress.reports.page import render_page
from tscompress.reports.points import Point, front, table_points
from tscompress.reports.svg import Chart, ticks
from tscompress.reports.write import rewrite_report, write_report
from tscompress.workflows.recipe import EvaluationConfig, ProfileConfig, Recipe
from tscompress.workflows.run import RunResult, run
from tscompress.workflows.run_files import load_run, save_run

DATASETS = ("monash_m3_yearly", "monash_m1_yearly")
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FIGURES = {
    "figure-pareto", "figure-forest", "figure-forecasts", "figure-fidelity", "figure-worst",
    "figure-ranks", "figure-heads", "figure-flow", "figure-skill", "figure-tasks",
}  # fmt: skip
#: Figures that need no scores.
APART = ("ranks", "heads", "flow", "skill", "tasks")
Run = tuple[RunResult, Recipe]


def bench_of(names: tuple[str, str], milliseconds: float = 5.0) -> BenchResult:
    """What a benchmark would have measured; the second model takes half of everything."""
    models = tuple(
        ModelBench(
            name=name,
            latencies_ms=tuple(milliseconds * (2 - index) + 0.1 * round_ for round_ in range(6)),
            batch_size=2,
            parameters=8_000_000 // (1 + index),
            parameter_bytes=32_000_000 // (1 + index),
            kv_cache_bytes=4_000 // (1 + index),
            bytes_on_disk=32_000_000 // (1 + index),
            macs=10**9 // (1 + index),
            memory=MemoryUse(10**8, 2 * 10**8, 3 * 10**8 - index * 10**8),
        )
        for index, name in enumerate(names)
    )
    return BenchResult(Workload(batch_size=2, repeats=6), models, 2, "x86_64", "2.13.0")


@pytest.fixture(scope="module")
def walked(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a tiny model, measured but for its costs, which are made up."""
    recipe = Recipe(
        model=str(checkpoints["chronos-bolt"]),
        output=str(tmp_path_factory.mktemp("run")),
        schedule=RankSchedule(rank=2),
        calibration=CalibrationConfig(num_series=6, context_length=32, batch_size=3),
        profile=ProfileConfig(epsilons=(0.3, 0.1, 0.03)),
        probe=ProbeConfig(tasks=("period-4*", "linear-trend", "gaps"), num_series=4),
        evaluation=EvaluationConfig(datasets=DATASETS, max_series=6),
        bench=None,
    )
    result = run(recipe)
    result.bench = bench_of(("chronos-bolt", "chronos-bolt-fold"))
    save_run(result, recipe)
    return result, recipe


@pytest.fixture
def directory(walked: Run, tmp_path: Path) -> Path:
    """A copy of the run's directory that a test may spoil."""
    target = tmp_path / "run"
    shutil.copytree(walked[0].directory, target)
    return target


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(re.sub(r'<span class="unbroken">([^<]*)</span>', r"\1", text))
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def values(self, attribute: str) -> list[str]:
        return [str(found[attribute]) for _, found in self.elements if attribute in found]

    @property
    def prose(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(walked: Run) -> Page:
    return Page(render_page(make_report(*walked)))


# --------------------------------------------------------------------------------------------------
# What is on the page
# --------------------------------------------------------------------------------------------------


def test_everything_that_was_measured_is_on_the_page(walked: Run, page: Page) -> None:
    result, recipe = walked
    report = make_report(result, recipe)
    verdict, meanings = texts(report)
    assert verdict in page.prose
    assert meanings in page.prose
    assert page.prose.index(verdict) < page.prose.index("At a glance")
    for name in ("weighted quantile loss", "mean absolute scaled error"):
        assert page.prose.count(name) == 1
    assert set(page.values("id")) >= FIGURES
    assert not report.missing
    assert "Not in this report" not in page.prose
    for dataset in DATASETS:
        assert dataset in page.prose
    assert report.comparison is not None
    for line in report.comparison.lines():
        assert line in page.prose
    for line in report.findings:
        assert line in page.prose
    (calibration,) = report.calibration
    assert result.compressed is not None
    assert f"{100 * (result.compressed.mean_of('coverage') or 0):.1f}%" in calibration
    assert calibration in page.prose
    assert report.probe is not None
    for line in report.probe.lines():
        assert line in page.prose
    for task in report.probe.tasks:
        assert f"{task.name}: skill {task.original:.2f} → {task.compressed:.2f}" in page.prose
    assert result.fidelity is not None
    assert "× 0.500" in page.prose  # latency, parameters, ...
    assert "95%: 0.490 to" in page.prose or "95%: 0.5" in page.prose
    for line in recipe.to_yaml().splitlines():
        assert " ".join(line.split()) in page.prose
    record = json.loads((result.checkpoint / "provenance.json").read_text())
    assert record["sha256"]["model.safetensors"] in page.prose
    assert record["libraries"]["torch"] in page.prose


def test_the_page_needs_nothing_but_itself(page: Page) -> None:
    assert not page.values("src")
    assert all(href.startswith("#") or href == "data:," for href in page.values("href"))
    assert not re.search(r"url\(|@import|https?:|//\w+\.", page.text)
    assert page.count("script") == page.count("style") == 1
    assert len(page.text.encode()) < 1_500_000


def test_links_and_names_of_elements(page: Page) -> None:
    ids = page.values("id")
    assert len(set(ids)) == len(ids)
    targets = [href[1:] for href in page.values("href") if href.startswith("#")]
    assert len(targets) >= 7
    assert set(targets) <= set(ids)
    assert set(page.values("aria-labelledby")) <= set(ids)


def test_the_page_can_be_read_by_everyone(page: Page) -> None:
    elements = page.elements
    assert ("html", {"lang": "en"}) in elements
    assert any(found.get("name") == "viewport" for _, found in elements)
    assert page.count("h1") == page.count("main") == page.count("title") == 1
    assert page.count("table") == page.count("caption")
    assert page.count("figure") == page.count("figcaption") == len(FIGURES)
    for tag, found in elements:
        if tag == "svg":
            assert found.get("aria-hidden") or len(found.get("aria-label") or "") > 20
        if tag == "th":
            assert found.get("scope") in ("row", "col")
    css = page.text[page.text.index("<style>") : page.text.index("</style>")]
    for query in ("prefers-color-scheme: dark", "media print", "max-width: 600px"):
        assert query in css


def test_every_mark_is_in_its_panel(page: Page) -> None:
    """Also: no position is NaN, which a browser would report and not draw."""
    places = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"}
    for tag, found in page.elements:
        for name in places & found.keys():
            if tag not in ("rect", "svg"):
                assert -1 <= float(found[name] or "") <= 361, (tag, found)
        for pair in (found.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 360
            assert 0 <= y <= 250
    assert "nan" not in page.text.lower().replace("nanum", "")


# --------------------------------------------------------------------------------------------------
# Names are only text
# --------------------------------------------------------------------------------------------------


def renamed(walked: Run, name: str) -> Run:
    """The run, with ``name`` wherever somebody else chooses a name."""
    result, recipe = walked

    def of(part: object, **changes: object) -> object:
        return part.model_copy(update=changes)  # type: ignore[attr-defined]

    def scores(scored: object) -> object:
        rows = (of(row, dataset=f"{name}{i}") for i, row in enumerate(scored.rows))  # type: ignore[attr-defined]
        return of(scored, model=name, rows=tuple(rows))

    fidelity = result.fidelity
    assert fidelity is not None
    assert result.profile is not None
    assert result.bench is not None
    changed = replace(
        result,
        original=scores(result.original),
        compressed=scores(result.compressed),
        baseline=scores(result.baseline),
        examples=tuple(of(one, dataset=name) for one in result.examples),
        fidelity=of(
            fidelity,
            datasets=tuple(of(part, dataset=name, freq=name) for part in fidelity.datasets),
            worst=tuple(of(one, dataset=name) for one in fidelity.worst),
            frequencies=tuple(of(group, group=name) for group in fidelity.frequencies),
        ),
        profile=of(
            result.profile,
            model=name,
            corpus=name,
            inputs=tuple(of(entry, kind=name) for entry in result.profile.inputs),
        ),
        bench=replace(result.bench, device_name=name),
    )
    return changed, recipe.model_copy(update={"model": name})


def test_names_are_text_and_never_markup(walked: Run) -> None:
    page = Page(render_page(make_report(*renamed(walked, HOSTILE))))
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert all(not name.startswith("on") for _, found in page.elements for name in found)
    assert not page.values("src")
    assert page.prose.count("<script>alert(1)</script>") > 10
    assert "{{ 7 * 7 }}" in page.prose


def test_names_are_text_in_markdown_too(walked: Run, tmp_path: Path) -> None:
    result, recipe = renamed(walked, "a|b <script>\n[x](http://y)")
    text = write_report(replace(result, directory=tmp_path, profile=None, bench=None), recipe)
    body, _, _ = text.read_text().partition("## Reproduce")
    assert not re.search(r"(?<!\\)<script", body)
    assert not re.search(r"(?<!\\)\]\(http", body)
    rows = [line for line in body.splitlines() if line.startswith("| a")]
    assert len(rows) == len(DATASETS)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {9}


# --------------------------------------------------------------------------------------------------
# What was not measured
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lacking", "gone", "says"),
    [
        ({"profile"}, {"figure-ranks", "figure-heads", "figure-flow"}, "profile:"),
        ({"bench"}, {"figure-pareto"}, "bench:"),
        ({"probes"}, {"figure-skill", "figure-tasks"}, "probe:"),
        (
            {"original", "compressed", "baseline", "fidelity", "examples"},
            {name for name in FIGURES if name.split("-")[1] not in APART},
            "evaluation:",
        ),
        (
            {"fidelity", "examples"},
            {"figure-forecasts", "figure-fidelity", "figure-worst"},
            "--force",
        ),
    ],
)  # fmt: skip
def test_missing_parts_are_left_out_and_named(
    walked: Run, lacking: set[str], gone: set[str], says: str
) -> None:
    result, recipe = walked
    less = replace(result, **{name: () if name == "examples" else None for name in lacking})
    page = Page(render_page(make_report(less, recipe)))
    ids = set(page.values("id"))
    assert FIGURES - gone == FIGURES & ids
    assert {href[1:] for href in page.values("href") if href.startswith("#")} <= ids
    assert "Not in this report" in page.prose
    assert says in page.prose


def test_a_run_that_measured_nothing_still_has_a_page(walked: Run) -> None:
    result, recipe = walked
    bare = RunResult(result.directory, result.checkpoint, result.plan)
    page = Page(render_page(make_report(bare, recipe)))
    assert not FIGURES & set(page.values("id"))
    assert "attention parameters" in page.prose
    assert "Reproduce" in page.prose


# --------------------------------------------------------------------------------------------------
# Data on disk
# --------------------------------------------------------------------------------------------------


def test_saved_reports_are_read_back_equal(walked: Run, directory: Path) -> None:
    result, recipe = walked
    again, read = load_run(directory)
    assert read == recipe
    for name in (
        "plan",
        "profile",
        "original",
        "compressed",
        "baseline",
        "examples",
        "probes",
        "bench",
    ):
        assert getattr(again, name) == getattr(result, name), name
    assert again.checkpoint == directory / result.checkpoint.name
    page, before = (render_page(make_report(*one)) for one in ((again, read), walked))
    assert page == before
    # The model card reads the same scores.
    assert set(read_scores(directory / "scores.json").intervals) == {"WQL", "MASE"}
    for path in directory.glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_measurements_of_an_earlier_run_go(walked: Run, directory: Path) -> None:
    result, recipe = walked
    bare = RunResult(directory, directory / result.checkpoint.name, result.plan)
    write_report(bare, recipe)
    again, _ = load_run(directory)
    assert again == bare


def test_missing_values_survive(walked: Run, directory: Path) -> None:
    result, recipe = walked
    assert result.fidelity is not None
    first, *others = result.fidelity.worst
    gaps = (math.nan, *first.context[1:])
    worst = (first.model_copy(update={"context": gaps}), *others)
    fidelity = result.fidelity.model_copy(update={"worst": worst})
    save_run(replace(result, directory=directory, fidelity=fidelity), recipe)
    again, _ = load_run(directory)
    assert again.fidelity is not None
    assert np.isnan(again.fidelity.worst[0].context[0])
    assert "nan" not in render_page(make_report(again, recipe)).lower()


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["tscompress", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


def test_the_page_is_made_again_without_the_model(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.rmtree(directory / "chronos-bolt-fold")
    output = tmp_path / "elsewhere" / "page.html"
    code, out, _ = command(monkeypatch, capsys, directory, "--output", output)
    assert (code, out) == (0, f"report: {output}\n")
    assert Page(output.read_text()).count("figure") == len(FIGURES)
    assert not (directory / "report.html").exists()

    output.write_text("mine")
    code, out, err = command(monkeypatch, capsys, directory, "--output", output)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "--force" in err
    assert len(err.splitlines()) == 1
    assert output.read_text() == "mine"
    code, out, err = command(monkeypatch, capsys, directory, "--output", output, "--force")
    assert (code, out) == (2, "")  # no page of ours
    assert output.read_text() == "mine"
    output.unlink()
    assert command(monkeypatch, capsys, directory, "--output", output)[0] == 0
    code, out, _ = command(monkeypatch, capsys, directory, "--output", output, "--force", "--json")
    assert json.loads(out) == {"page": str(output), "bytes": output.stat().st_size}


def test_page_and_markdown_in_the_directory(directory: Path) -> None:
    page = rewrite_report(directory)
    assert page == directory / "report.html"
    text = (directory / "report.md").read_text()
    assert "(report.html)" in text
    assert "![" not in text  # this run was saved without figures for Markdown
    with pytest.raises(OutputExistsError, match="--force"):
        rewrite_report(directory)
    with pytest.raises(OutputError, match="directory"):
        rewrite_report(directory, directory)


@pytest.mark.parametrize(
    ("file", "content", "error", "says"),
    [
        ("report.json", None, UsageError, "not the directory of a finished run"),
        ("report.json", "{", DataError, "cannot be read"),
        ("report.json", "[]", DataError, "not what `tscompress run` writes"),
        ("report.json", '{"recipe": 1, "plan": 2}', DataError, "no mappings"),
        ("scores.json", '{"result": 1}', DataError, "not an evaluation result"),
        ("fidelity.json", "[1]", DataError, "fidelity.json"),
        ("fidelity.json", '{"datasets": [1], "drift": 2}', DataError, "fidelity.json"),
        ("forecasts.json", '[{"dataset": 3}]', DataError, "forecasts.json"),
        ("profile/profile.json", "{}", DataError, "profile.json"),
        ("chronos-bolt-fold/provenance.json", "3", DataError, "provenance.json"),
    ],
)
def test_directories_that_cannot_be_reported(
    directory: Path, file: str, content: str | None, error: type[Exception], says: str
) -> None:
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(error, match=says) as caught:
        rewrite_report(directory)
    assert "\n" not in str(caught.value)
    assert not (directory / "report.html").exists()


def test_a_checkpoint_of_another_run(directory: Path) -> None:
    path = directory / "chronos-bolt-fold" / "plan.json"
    plan = json.loads(path.read_text())
    for head in plan["heads"]:
        head["qk_size"] = 1
    path.write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="incomplete"):
        rewrite_report(directory)


def test_a_checkpoint_with_the_plan_of_the_run_and_other_weights(directory: Path) -> None:
    """As a recovery leaves it."""
    path = directory / "chronos-bolt-fold" / "provenance.json"
    record = json.loads(path.read_text())
    record["sha256"]["model.safetensors"] = "0" * 64
    path.write_text(json.dumps(record))
    rewritten = directory / "report.html"
    with pytest.raises(UsageError, match="from another run") as caught:
        rewrite_report(directory, force=True)
    assert "\n" not in str(caught.value)
    assert not rewritten.exists()
    path.unlink()
    with pytest.raises(UsageError, match="from another run"):
        rewrite_report(directory, force=True)
    report = directory / "report.json"
    older = json.loads(report.read_text())
    del older["sha256"]  # which reports did not always have
    report.write_text(json.dumps(older))
    assert rewrite_report(directory) == rewritten


def test_more_runs_in_the_figure(walked: Run, directory: Path, tmp_path: Path) -> None:
    result, recipe = walked
    other = tmp_path / "slower"
    faster = replace(result, directory=other, bench=bench_of(("original", "other"), 50.0))
    save_run(faster, recipe)
    output = tmp_path / "page.html"
    page = Page(rewrite_report(directory, output, compare=[other]).read_text())
    assert "slower: fold, d_kv 2" in page.prose
    assert "--compare" not in page.prose
    twin = tmp_path / "twin" / "slower"
    save_run(replace(faster, directory=twin), recipe)
    text = Page(rewrite_report(directory, output, compare=[other, twin], force=True).read_text())
    assert re.search(r"slower: fold, d_kv 2[^()]*\(2\)", text.prose)

    save_run(faster, recipe.model_copy(update={"model": "another"}))
    with pytest.raises(UsageError, match="same original"):
        rewrite_report(directory, output, compare=[other], force=True)
    save_run(replace(faster, bench=None), recipe)
    with pytest.raises(UsageError, match="no cost"):
        rewrite_report(directory, output, compare=[other], force=True)
    with pytest.raises(UsageError, match="not the directory of a finished run"):
        rewrite_report(directory, output, compare=[tmp_path], force=True)
    fewer = result.original
    assert fewer is not None
    assert result.compressed is not None
    save_run(
        replace(
            faster,
            original=fewer.model_copy(update={"rows": fewer.rows[:1]}),
            compressed=fewer.model_copy(
                update={"rows": fewer.rows[:1], "model": result.compressed.model}
            ),
            baseline=None,
        ),
        recipe,
    )
    with pytest.raises(UsageError, match="other series"):
        rewrite_report(directory, output, compare=[other], force=True)
    save_run(
        replace(faster, original=relabelled(result.original), compressed=relabelled(
            result.compressed), baseline=None), recipe,
    )  # fmt: skip
    with pytest.raises(UsageError, match="other series"):
        rewrite_report(directory, output, compare=[other], force=True)


def test_layers_that_go_are_named(walked: Run) -> None:
    """The plan's names count the layers that stay, those of a profile all of them."""
    result, recipe = walked
    assert result.profile is not None
    plan = result.plan

    def stays(name: str) -> bool:
        return not name.startswith("encoder.block.1.")

    fewer = plan.model_copy(update={
        "heads": tuple(head for head in plan.heads if stays(head.name)),
        "hidden": tuple(hidden for hidden in plan.hidden if stays(hidden.name)),
        "kept_layers": {"encoder": (1,)},
    })  # fmt: skip
    whole, found = (rank_rows(result.profile, one) for one in (plan, fewer))
    by_depth = [
        {row.depth: row.kept for row in rows if row.kind == "encoder"} for rows in (whole, found)
    ]
    assert by_depth[1] == {0: "dropped", 1: by_depth[0][1]}
    others = [[row.kept for row in rows if row.kind != "encoder"] for rows in (whole, found)]
    assert others[0] == others[1]
    assert plan_label(fewer) == "fold, 1 layer, d_kv 2, d_ff 40"
    assert "parameters of the kept layers (" in fewer.summary()
    page = Page(render_page(make_report(replace(result, plan=fewer, bench=None), recipe)))
    assert "attention parameters of the kept layers" in page.prose
    assert "feed-forward parameters of the kept layers" in page.prose


def test_windows_are_named_beside_the_number_of_series(walked: Run) -> None:
    result, recipe = walked
    first = make_report(result, recipe).quality[0]
    windows = int(first.series)

    def cut(scores: EvaluationResult | None) -> EvaluationResult:
        assert scores is not None
        rows = [row.model_copy(update={"windows": windows}) for row in scores.rows]
        return scores.model_copy(update={"rows": tuple(rows)})

    other = replace(result, original=cut(result.original), compressed=cut(result.compressed))
    report = make_report(other, recipe)
    assert report.quality[0].series == f"1 × {windows}"
    assert f"1 series × {windows} windows" in render_page(report)


def relabelled(scores: EvaluationResult | None) -> EvaluationResult:
    """The same numbers of series, of other values."""
    assert scores is not None
    content = scores.to_dict()
    for row in content["rows"]:
        row["series"]["absolute_label"] = [2 * one for one in row["series"]["absolute_label"]]
    return EvaluationResult.from_dict(content)


def test_settings_of_an_evaluation_are_on_the_page(
    walked: Run, directory: Path, tmp_path: Path
) -> None:
    result, recipe = walked
    crossed = Settings(cross_learning=True, batch_size=32)
    assert result.original is not None
    assert result.compressed is not None
    other = replace(
        result,
        directory=tmp_path / "crossed",
        original=result.original.model_copy(update={"settings": crossed}),
        compressed=result.compressed.model_copy(update={"settings": crossed}),
    )
    save_run(other, recipe)
    page = Page(rewrite_report(other.directory, tmp_path / "page.html").read_text())
    assert "cross-learning in batches of 32" in page.prose
    with pytest.raises(UsageError, match="cross-learning"):
        rewrite_report(directory, tmp_path / "both.html", compare=[other.directory])


PEERS = """model,kind,label,WQL,WQL low,WQL high,MASE,MASE low,MASE high,parameters,on disk,latency
M,dense,,1,1,1,1,1,1,1,1,1
M,fold,small,0.998,0.99,1.01,1.002,1.001,1.003,0.2,0.2,0.3
M,half the layers,by loss,1.25,1.2,1.3,1.26,1.2,1.3,0.5,0.5,0.5
"""
SWEEP = (
    "number,label,method,WQL_ratio,WQL_low,WQL_high,MASE_ratio,MASE_low,MASE_high,parameters,"
    "bytes_on_disk,peak_memory_bytes,latency_ms\n"
    "0,original,original,1,,,1,,,1000,2000,5000,8.0\n"
    '1,"fold, d_kv 8",fold,1.01,1.0,1.02,1.0,0.99,1.01,250,500,,2.0\n'
)


def test_a_table_of_models_in_the_figure(walked: Run, directory: Path, tmp_path: Path) -> None:
    _, recipe = walked
    peers, sweep = tmp_path / "peers.csv", tmp_path / "sweep.csv"
    peers.write_text(PEERS.replace("M,", f"{recipe.model},"))
    sweep.write_text(SWEEP)
    (swept,) = table_points(sweep, recipe.model)
    assert swept.name == "fold, d_kv 8"
    assert swept.costs == {"parameters": 0.25, "latency_ms": 0.25, "bytes_on_disk": 0.25}
    assert swept.quality["WQL"] == Ratio(ratio=1.01, low=1.0, high=1.02)
    fold, half = table_points(peers, recipe.model)
    assert (fold.name, half.name) == ("fold: small", "half the layers: by loss")
    assert fold.costs == {"parameters": 0.2, "latency_ms": 0.3, "bytes_on_disk": 0.2}

    text = rewrite_report(directory, tmp_path / "a.html", compare=[peers, sweep]).read_text()
    assert text.count(">fold: small</text>") > 0
    # Too far to be drawn beside the rest: left out of that chart, and the caption says so.
    assert "half the layers: by loss</text>" not in text
    page = Page(text)
    assert "half the layers: by loss" in page.prose
    assert "1 of them loses more than 10%" in page.prose
    assert "is left out of the charts of that metric" in page.prose


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({}, None, ""),
        ({"evaluation": {"batch_size": 3}}, None, ""),
        ({"model": "another"}, UsageError, "is of 'another', this run of"),
        ({"revision": "v2"}, UsageError, "@v2', this run of"),
        ({"evaluation": {"suite": "offline-frequencies"}}, UsageError, "other suite than this run"),
        ({"evaluation": {"max_series": 2}}, UsageError, "with other max_series than this run"),
        ({"no_such_key": 1}, DataError, "no_such_key"),
    ],
)
def test_a_sweep_of_another_model_or_suite_is_not_compared(
    walked: Run,
    directory: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception] | None,
    says: str,
) -> None:
    _, recipe = walked
    assert recipe.evaluation is not None
    evaluation = recipe.evaluation.model_dump(mode="json") | changes.get("evaluation", {})
    grid = [{"method": "fold", "rank": [8]}]
    content = {"model": recipe.model, "output": "out", "grid": grid}
    content |= {**changes, "evaluation": evaluation}
    table = tmp_path / "sweep.csv"
    table.write_text(SWEEP)
    (tmp_path / "sweep.yaml").write_text(json.dumps(content))  # JSON is YAML
    if error is None:
        text = rewrite_report(directory, compare=[table]).read_text()
        assert "fold, d_kv 8" in Page(text).prose
        return
    with pytest.raises(error, match=says) as caught:
        rewrite_report(directory, compare=[table])
    assert "\n" not in str(caught.value)
    assert not (directory / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", DataError, "no table of models"),
        ("label,WQL\nx,1\n", DataError, "no column 'method' or 'kind'"),
        (PEERS.replace("M,dense", "M,dance"), DataError, "has 0 rows with original or dense"),
        (PEERS, UsageError, "is of 'M', this run of 'ours'"),
        (PEERS.replace("M,", "ours,").replace("0.998", "-1"), DataError, "has '-1.0' in column"),
        (PEERS.replace("M,", "ours,").replace("0.998", "much"), DataError, "'much' in column"),
        (PEERS.replace("M,", "ours,").replace("MASE,", "mase,"), DataError, "no column 'MASE'"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, text: str, error: type[Exception], says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(error, match=says) as caught:
        table_points(path, "ours")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no table"):
        table_points(tmp_path / "none.csv", "ours")


@given(st.lists(st.tuples(st.floats(0.1, 1), st.floats(0.9, 1.1)), min_size=1, max_size=12))
def test_points_on_the_front_are_beaten_by_none(pairs: list[tuple[float, float]]) -> None:
    points = [
        Point(str(i), "other", {"c": cost}, {"WQL": Ratio(ratio=ratio)})
        for i, (cost, ratio) in enumerate(pairs)
    ]
    best = front(points, "WQL", "c")
    for point in points:
        cost, ratio = point.costs["c"], point.quality["WQL"].ratio
        beaten = any(
            p.costs["c"] <= cost
            and p.quality["WQL"].ratio <= ratio
            and (p.costs["c"], p.quality["WQL"].ratio) != (cost, ratio)
            for p in points
        )
        assert not (beaten and point.name in best)
    assert min(points, key=lambda p: (p.quality["WQL"].ratio, p.costs["c"])).name in best


# --------------------------------------------------------------------------------------------------
# Examples and charts
# --------------------------------------------------------------------------------------------------


def dataset_of(errors: list[float]) -> tuple[EvaluationDataset, np.ndarray]:
    """Series of one seasonal error that are forecast with these absolute errors."""
    context = np.array([0.0, 1.0, 0.0, 1.0])
    series = tuple(np.concatenate([context, [error, error]]) for error in errors)
    starts = tuple(pd.Period("2000", freq="Y") for _ in errors)
    quantiles = np.zeros((len(errors), len(QUANTILE_LEVELS), 2))
    return EvaluationDataset("planted", 2, series, starts), quantiles


def test_the_example_is_the_series_of_median_error() -> None:
    dataset, quantiles = dataset_of([5.0, 1.0, 9.0, 2.0, 3.0])
    (found,) = typical_examples(quantiles, quantiles + 1, dataset)
    assert found.series == 4
    assert found.label == (3.0, 3.0)
    assert found.original == ((0.0, 0.0),) * 3
    assert found.compressed == ((1.0, 1.0),) * 3
    with pytest.raises(UsageError, match="planted"):
        typical_examples(quantiles[:1], quantiles, dataset)


def test_examples_are_at_even_steps_of_error() -> None:
    dataset, quantiles = dataset_of([5.0, 1.0, 9.0, 2.0, 3.0, 7.0])
    found = typical_examples(quantiles, quantiles, dataset, 3)
    assert [one.label[0] for one in found] == [1.0, 3.0, 7.0]
    every = typical_examples(quantiles, quantiles, dataset, 20)
    assert [one.label[0] for one in every] == [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]


@pytest.mark.parametrize(
    ("frequency", "begin", "first", "last", "ticks_"),
    [
        ("D", "2024-02-20", "2024-02-26", "2024-03-02", {"Mar"}),
        ("B", "2024-02-22", "2024-03-01", "2024-03-08", {"Mar"}),  # no weekends
        ("M", "2024-01-31", "2024-07", "2024-12", {"Jul"}),
        ("Y", "2001-12-31", "2007", "2012", {"2008"}),
        ("h", "2024-02-20 20:00", "2024-02-21 02:00", "2024-02-21 07:00", {"Feb-21"}),
    ],
)
def test_dates_and_names_of_own_series(
    tmp_path: Path, frequency: str, begin: str, first: str, last: str, ticks_: set[str]
) -> None:
    steps = {"M": "ME", "Y": "YE"}.get(frequency, frequency)
    days = pd.date_range(begin, periods=12, freq=steps)
    rows = [(name, day, index + size) for size, name in ((9, "Porto"), (1, "Faro"))
            for index, day in enumerate(days)]  # fmt: skip
    pd.DataFrame(rows, columns=["id", "date", "sales"]).to_csv(tmp_path / "s.csv", index=False)
    suite = find_suite(str(tmp_path / "s.csv"), LongFormat(horizon=6))
    (dataset,) = load_suite(suite)
    quantiles = np.zeros((2, len(QUANTILE_LEVELS), 6))
    (example,) = typical_examples(quantiles, quantiles, dataset)
    assert example.name == "Faro"
    assert len(example.times) == len(example.context) + 6
    assert (example.times[-6], example.times[-1]) == (first, last)
    chart = forecast_chart(example, "Faro")
    assert chart.x_label == f"forecast from {first}"
    assert "Faro" in chart.label
    texts_ = {mark.text for mark in chart.marks if mark.css == "tick middle"}
    assert ticks_ <= texts_
    tips = [m.attributes["data-tip"] for m in chart.marks if m.css == "hit"]
    assert tips[0].startswith(f"{first} (step 1): ")


def test_series_without_dates_count_steps(tmp_path: Path) -> None:
    pd.DataFrame({"sales": range(12)}).to_csv(tmp_path / "s.csv", index=False)
    suite = find_suite(str(tmp_path / "s.csv"), LongFormat(horizon=1, frequency="D"))
    (dataset,) = load_suite(suite)
    quantiles = np.zeros((1, len(QUANTILE_LEVELS), 1))
    (example,) = typical_examples(quantiles, quantiles, dataset)
    assert example.times == ()
    chart = forecast_chart(example, "s")
    assert chart.x_label == "steps from the forecast"
    assert chart.label.endswith("over 1 step")


def test_an_example_of_flat_series_is_the_first() -> None:
    starts = (pd.Period("2000", freq="Y"),) * 2
    dataset = EvaluationDataset("flat", 2, (np.ones(6), np.ones(6)), starts)
    quantiles = np.ones((2, len(QUANTILE_LEVELS), 2))
    assert [one.series for one in typical_examples(quantiles, quantiles, dataset, 3)] == [0]


def test_missing_values_leave_a_gap() -> None:
    band = ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0))
    example = ForecastExample(
        dataset="gaps",
        series=0,
        context=(1.0, None, 3.0, 4.0),
        label=(None, 5.0),
        original=band,
        compressed=band,
    )
    chart = forecast_chart(example, "gaps")
    lines = [m.attributes["points"] for m in chart.marks if m.css == "line truth"]
    assert [len(points.split()) for points in lines] == [2, 2, 2]  # alone, a pair, alone
    assert "step 1: –" in next(m.attributes["data-tip"] for m in chart.marks if m.css == "hit")


finite = st.floats(-1e12, 1e12, allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=3, max_size=20), st.integers(0, 2))
@example([0.0, 1e-310, 2e-310], 1)
@example([1e-308, 1e-308, 1e-308], 0)
@example([1e-279, 2e-279, 0.0], 1)
def test_any_values_have_a_place(values: list[float], flat: int) -> None:
    context = [values[0]] * len(values) if flat == 0 else values
    band = tuple(tuple(sorted(values)[i : i + 1]) for i in range(3))
    example = ForecastExample(
        dataset="d", series=0, context=tuple(context), label=(values[0],), original=band,
        compressed=band,
    )  # fmt: skip
    chart = forecast_chart(example, "any")
    low, high = chart.y_range
    assert low < high
    drawn = [*context[-12:], values[0], *(value for row in band for value in row)]
    assert all(0 <= chart.y(value) <= chart.height for value in drawn)
    written = [text for _, text in ticks(chart.y_range, 4)]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.98, 1.03), ["0.98", "1.00", "1.02"]),
        ((0.0, 45000.0), ["0", "10k", "20k", "30k", "40k"]),
    ],
)
def test_ticks_are_round(limits: tuple[float, float], expected: list[str]) -> None:
    assert [text for _, text in ticks(limits, 5)] == expected


def test_a_column_for_one_step() -> None:
    chart = Chart("one step", (0.0, 2.0), (0.0, 1.0))
    chart.hits([1.0], ["tip"])
    assert float(chart.marks[0].attributes["width"]) > 100


# --------------------------------------------------------------------------------------------------
# In a browser
# --------------------------------------------------------------------------------------------------

PROBE = """
<script>
addEventListener("load", () => {
  const found = {errors: window.errors, svg: [], wide: [], links: [], views: [], tips: []};
  const every = (query, act) => document.querySelectorAll(query).forEach(act);
  every("details", (e) => { e.open = true; });
  const drawn = () => every("svg", (e) => {
    if (e.closest("[hidden]")) return;
    const {width, height} = e.getBoundingClientRect();
    if (!(width > 5 && height > 5)) found.svg.push(e.outerHTML.slice(0, 200));
  });
  drawn();
  found.wide = [document.documentElement.scrollWidth, window.innerWidth];
  every("a[href]", (e) => {
    e.click();
    const there = !!document.querySelector(location.hash);
    found.links.push([e.getAttribute("href"), location.hash, there]);
  });
  every("[data-switch] input", (e) => {
    e.click();
    const figure = e.closest("figure");
    const shown = [...figure.querySelectorAll("[data-view]")].filter((v) => !v.hidden);
    found.views.push([e.value, [...new Set(shown.map((v) => v.dataset.view))].join(),
      getComputedStyle(figure.querySelector(".cell") || figure).backgroundColor]);
    drawn();
  });
  every("[data-models] input", (e) => {
    e.click();
    const mark = e.closest("figure").querySelector(".panel svg ." + e.value);
    found.views.push([e.value, getComputedStyle(mark).display]);
  });
  every("[data-tip]", (e) => {
    e.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 90, clientY: 90}));
    const tip = document.getElementById("tip");
    if (tip.hidden || tip.textContent !== e.dataset.tip) found.tips.push(e.dataset.tip);
  });
  found.loadMs = performance.now();
  document.body.dataset.found = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    return browser_path() or pytest.skip("no Chromium on PATH")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1280,900", "500,844"])
def test_the_page_works_in_a_browser(walked: Run, browser: str, tmp_path: Path, size: str) -> None:
    text = render_page(make_report(*renamed(walked, HOSTILE)))
    errors = "<script>window.errors = []; onerror = (m) => errors.push(String(m));</script>"
    path = tmp_path / "page.html"
    path.write_text(text.replace("<head>", f"<head>{errors}").replace("</body>", f"{PROBE}</body>"))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    page = HTMLParser()
    results: list[str] = []
    page.handle_starttag = lambda tag, attrs: results.extend(  # type: ignore[method-assign]
        str(value) for name, value in attrs if name == "data-found"
    )
    page.feed(done.stdout)
    (found,) = map(json.loads, results)
    assert found["errors"] == found["svg"] == found["tips"] == []
    assert found["wide"][0] <= found["wide"][1], "nothing is wider than the window"
    assert len(found["links"]) >= 7
    assert all(href == hash_ and there for href, hash_, there in found["links"])
    views = found["views"]
    for value, shown, *_ in views:
        if value in ("original", "compressed"):
            assert shown == "none"
        elif not value.isdigit():  # ε changes the cells, not what is shown
            assert shown == value
    assert len({color for value, _, color in (v for v in views if v[0].isdigit())}) > 1
