"""Verdicts on the theorems: how they are kept, and that a quick run finds what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from eval_scripts import imported
from shared_fixtures import ROOT

from tscompress.errors import DataError, UsageError
from tscompress.plotting import new_figure

MODULES = ("verdicts", "theory", "theory_attention", "theory_embeddings", "theory_flow",
           "theory_heads", "theory_models")  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with imported(MODULES) as found:
        yield found


def section(lab: Any, *verdicts: Any) -> Any:
    """One that finds these, whatever its size."""
    return lambda quick: lab.verdicts.Found(
        verdicts, pd.DataFrame({"quick": [quick]}), new_figure(1, 1)
    )


def test_verdicts_of_sections_that_are_left_out_stay(lab: Any, tmp_path: Path) -> None:
    verdict, measure = lab.verdicts.Verdict, lab.verdicts.measure
    good = verdict("A", "one", "1", "1", True)
    false = verdict("B, printed", "a | b", "2", "fails", False, False)
    sections = {"first": section(lab, good), "second": section(lab, false)}
    output = tmp_path / "lab"
    assert measure(sections, output, quick=True) == (2, 1, 0)
    again = {**sections, "first": section(lab, good._replace(measured="3"), good)}
    assert measure(again, output, quick=False, only=["first"]) == (3, 2, 0)
    frame = pd.read_csv(f"{output}.csv")
    assert frame["section"].tolist() == ["first", "first", "second"]
    assert frame["measured"].tolist() == [3, 1, 2]
    assert frame["holds"].tolist() == [True, True, False]
    assert frame["as_expected"].all()
    assert pd.read_csv(f"{output}-first.csv")["quick"].tolist() == [False]
    assert (tmp_path / "lab-second.png").is_file()
    table = Path(f"{output}.md").read_text()
    assert len(table.splitlines()) == 5
    assert "a \\| b" in table


@pytest.mark.parametrize(("holds", "should"), [(True, False), (False, True)])
def test_a_verdict_that_is_not_as_expected_is_told_and_no_failure(
    lab: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    holds: bool,
    should: bool,
) -> None:
    verdict = lab.verdicts.Verdict("A", "one", "1", "1", holds, should)
    monkeypatch.setattr(lab.theory, "SECTIONS", {"a": section(lab, verdict)})
    monkeypatch.setattr("sys.argv", ["theory.py", "--output", str(tmp_path / "x"), "--quick"])
    lab.theory.main()  # no exit
    assert "not as expected" in (tmp_path / "x.md").read_text()
    said = capsys.readouterr().out
    assert "not as expected: A: one: 1" in said
    counts = lab.verdicts.Counts(1, int(holds), 1)
    assert said.splitlines()[-1] == f"{tmp_path / 'x'}.md: {counts.line}"


@pytest.mark.parametrize("error", [DataError("no such series"), ValueError("NaN")])
def test_a_measurement_that_fails_is_a_failure(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(quick: bool) -> None:
        raise error

    monkeypatch.setattr(lab.theory, "SECTIONS", {"a": fail})
    monkeypatch.setattr("sys.argv", ["theory.py", "--output", str(tmp_path / "x")])
    with pytest.raises((SystemExit, ValueError)) as ended:
        lab.theory.main()
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 1
    assert list(tmp_path.iterdir()) == []


def test_sections_are_chosen_by_name(lab: Any) -> None:
    sections = lab.theory.SECTIONS
    assert list(lab.verdicts.chosen(sections, None)) == list(sections)
    assert list(lab.verdicts.chosen(sections, ["theorem-4", "theorem-1"])) == [
        "theorem-1", "theorem-4",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="theorem-9"):
        lab.verdicts.chosen(sections, ["theorem-9"])


def test_a_slope_is_that_of_logarithms(lab: Any) -> None:
    assert lab.verdicts.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


@pytest.mark.parametrize("name", ["theorem-1", "theorem-4", "theorem-6", "sketches", "figure-15"])
def test_a_quick_run_finds_what_is_expected(lab: Any, name: str) -> None:
    found = lab.theory.SECTIONS[name](True)
    assert found.verdicts
    assert [v.claim for v in found.verdicts if bool(v.holds) != v.should] == []
    assert len(found.numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theorem-2", "theorem-3", "real-layers"])
def test_a_quick_run_of_large_matrices_and_models_finds_what_is_expected(
    lab: Any, name: str
) -> None:
    found = lab.theory.SECTIONS[name](True)
    assert [v.claim for v in found.verdicts if bool(v.holds) != v.should] == []
    assert len(found.numbers)


def test_the_committed_verdicts_are_as_expected() -> None:
    frame = pd.read_csv(ROOT / "eval" / "results" / "lab-theory.csv")
    assert frame["as_expected"].all()
    printed = frame[frame["statement"].str.contains("printed")]
    assert len(printed) >= 6
    assert not printed["holds"].any()
