"""The tables of the pages of results are those that the scripts wrote."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from shared_fixtures import ROOT

from tscompress.errors import UsageError

EVAL = ROOT / "eval"
PAGE = """# Page

<!-- table: one -->
<!-- /table -->

text

<!-- table: two -->
old
<!-- /table -->
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        yield importlib.import_module("results_page")
        for name in ("results_page", "reproduce"):
            sys.modules.pop(name, None)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "one.md").write_text("| a |\n|--:|\n| 1 |\n")
    (tmp_path / "two.md").write_text("### shape\n\n| b |\n|--:|\n| 2 |\n")
    return tmp_path


def test_the_pages_show_the_tables_as_measured(page: Any) -> None:
    for path in page.PAGES:
        assert page.stale(path.read_text(encoding="utf-8"), page.RESULTS) == []


def test_the_pages_have_every_table_that_was_measured_and_can_be_again_once(page: Any) -> None:
    reproduce = importlib.import_module("reproduce")
    texts = [path.read_text(encoding="utf-8") for path in page.PAGES]
    shown = [name for text in texts for name in page.names(text)]
    known = [table.name for table in reproduce.TABLES]
    measured = [name for name in known if (page.RESULTS / f"{name}.md").is_file()]
    assert sorted(shown) == sorted(measured)


def test_the_front_page_shows_its_table_as_measured() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- table: sizes -->")[2].partition("<!-- /table -->")[0]
    _, _, *shown = table.strip().splitlines()
    measured = pd.read_csv(EVAL / "results" / "fold-front-bolt.csv")
    rows = [
        f"{row['parameters']:.0%} | {row['WQL']:.3f} | {row['MASE']:.3f} | {row['skill']:.1%} |"
        for row in measured.to_dict("records")
    ]
    assert [line.partition(" | ")[2] for line in shown] == rows


def test_the_front_page_says_what_recovery_brought_as_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    measured = pd.read_csv(EVAL / "results" / "recover-bolt.csv")
    smallest = measured[measured["parameters"] == measured["parameters"].min()]
    assert smallest["seed"].nunique() == 3
    assert set(smallest["bound"]) == {"600 steps"}
    mean = smallest[["parameters", "skill before", "skill", "CPU minutes"]].mean()
    assert f"[{mean['CPU minutes']:.0f} minutes]" in readme
    assert (
        f"took a fold to {mean['parameters']:.1%} of reference/bolt "
        f"from {mean['skill before']:.0%} to {mean['skill']:.0%} of its skill"
    ) in readme


def test_tables_are_filled_and_the_text_around_them_stays(page: Any, results: Path) -> None:
    assert page.names(PAGE) == ["one", "two"]
    assert page.stale(PAGE, results) == ["one", "two"]
    new = page.filled(PAGE, results)
    assert "| a |\n|--:|\n| 1 |" in new
    assert "**shape**" in new
    assert "old" not in new
    assert "\n\ntext\n\n" in new
    assert page.stale(new, results) == []
    assert page.filled(new, results) == new


def test_a_table_measured_again_is_stale(page: Any, results: Path) -> None:
    new = page.filled(PAGE, results)
    (results / "two.md").write_text("| b |\n|--:|\n| 3 |\n")
    assert page.stale(new, results) == ["two"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<!-- table: one -->\n| 1 |\n", "one"),
        ("<!-- table: one -->\n<!-- table: two -->\n<!-- /table -->\n", "one"),
        ("<!-- table: three -->\n<!-- /table -->\n", "three"),
        ("<!-- /table -->\n", "<!-- /table -->"),
        ("<!-- table: one -->\n<!-- /table -->\n<!-- /table -->\n", "<!-- /table -->"),
    ],
)
def test_unmatched_table_marks_are_refused(page: Any, results: Path, text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        page.filled(text, results)


def test_the_check_fails_on_a_stale_page_and_changes_nothing(
    page: Any, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results / "RESULTS.md"
    path.write_text(PAGE)
    monkeypatch.setattr(page, "PAGES", (path,))
    monkeypatch.setattr(sys, "argv", ["results_page.py", "--check"])
    monkeypatch.setattr(page, "RESULTS", results)
    with pytest.raises(SystemExit) as ended:
        page.main()
    assert ended.value.code != 0
    assert path.read_text() == PAGE
