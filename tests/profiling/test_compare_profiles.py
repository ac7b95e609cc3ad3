"""Profiles side by side: what is compared is what each has, and what cannot be is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

import tscompress
from tscompress.compression.fold_config import FoldConfig
from tscompress.errors import DataError, OutputExistsError, UsageError
from tscompress.profiling.compare_profiles import (
    COMPARED_FILES,
    MOST_PROFILES,
    compare_profiles,
    read_profile,
)
from tscompress.profiling.compared_figures import compared_ranks_figure
from tscompress.profiling.measure import profile
from tscompress.profiling.rank_profile import RankProfile

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def profiles(checkpoints: dict[str, Path]) -> dict[str, RankProfile]:
    """Family to the profile of its tiny checkpoint, not run."""
    return {
        family: profile(path, calibration=None, name=family) for family, path in checkpoints.items()
    }


@pytest.fixture
def both(profiles: dict[str, RankProfile], tmp_path: Path) -> list[Path]:
    """Directories of two profiles."""
    for family in ("chronos-t5", "chronos-bolt"):
        profiles[family].save(tmp_path / family)
    return [tmp_path / "chronos-t5", tmp_path / "chronos-bolt"]


def test_means_are_those_of_the_profiles(profiles: dict[str, RankProfile]) -> None:
    found = compare_profiles(list(profiles.values()))
    assert list(found.profiles) == list(profiles)
    rows = found.rows()
    for family, one in profiles.items():
        for index, epsilon in enumerate(one.epsilons):
            (row,) = [
                row
                for row in rows
                if (row.profile, row.matrix, row.epsilon) == (family, "embedding", epsilon)
            ]
            assert row.mean_rank == one.embedding[0].spectrum.ranks[index]
            for kind in {weight.kind for weight in one.weights if weight.role == "q"}:
                queries = [w for w in one.weights if (w.role, w.kind) == ("q", kind)]
                (row,) = [
                    row
                    for row in rows
                    if (row.profile, row.matrix, row.kind, row.epsilon)
                    == (family, "W_Q", kind, epsilon)
                ]
                assert row.matrices == len(queries)
                assert row.mean_rank == fmean(w.spectrum.ranks[index] for w in queries)
                assert row.d_model == queries[0].in_features


def test_files_directories_and_results_compare_alike(
    both: list[Path], profiles: dict[str, RankProfile]
) -> None:
    in_memory = compare_profiles([profiles["chronos-t5"], profiles["chronos-bolt"]])
    of_files = tscompress.compare_profiles([both[0], both[1] / "profile.json"])
    assert of_files.to_dict() == in_memory.to_dict()
    assert "chronos-bolt" in repr(of_files)


def test_models_of_one_name_are_numbered(profiles: dict[str, RankProfile]) -> None:
    one = profiles["chronos-bolt"]
    assert list(compare_profiles([one, one]).profiles) == ["chronos-bolt", "chronos-bolt (2)"]
    assert list(compare_profiles([one, one], names=["a", "b"]).profiles) == ["a", "b"]


@pytest.mark.usefixtures("drawn_figures")
def test_table_and_figures_are_written_once_and_replaced_by_force(
    profiles: dict[str, RankProfile], tmp_path: Path
) -> None:
    found = compare_profiles(list(profiles.values()))
    written = found.save(tmp_path / "compared")
    assert sorted(path.name for path in written) == sorted(COMPARED_FILES)
    with (tmp_path / "compared" / "compared_ranks.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(found.rows())
    with pytest.raises(OutputExistsError):
        found.save(tmp_path / "compared")
    found.save(tmp_path / "compared", force=True)
    (tmp_path / "compared" / "compared_ranks.csv").write_text("mine\n")
    with pytest.raises(OutputExistsError):
        found.save(tmp_path / "compared", force=True)


def test_every_model_and_kind_of_attention_is_in_the_figure(
    profiles: dict[str, RankProfile],
) -> None:
    figure = compared_ranks_figure(profiles)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*profiles, "encoder, time", "decoder, group", "cross"]


def test_table_fits_a_terminal(profiles: dict[str, RankProfile]) -> None:
    console = Console(width=100, record=True)
    console.print(compare_profiles(list(profiles.values())).table())
    text = console.export_text()
    assert all(family in text for family in profiles)
    assert "…" not in text


# --------------------------------------------------------------------------------------------------
# Refused
# --------------------------------------------------------------------------------------------------


def test_a_kind_without_queries_keeps_its_feed_forwards(
    checkpoints: dict[str, Path], profiles: dict[str, RankProfile]
) -> None:
    """As of a Chronos-2 whose series see none but themselves."""
    small = tscompress.compress(checkpoints["chronos-2"], fold=FoldConfig(univariate=True))
    alone = profile(small, calibration=None, name="alone")
    group = [weight for weight in alone.weights if weight.kind == "group"]
    assert {weight.role for weight in group if weight.part == "attention"} == {"vo"}
    assert not any(weight.heads for weight in group)  # a product of all heads has none of its own
    heads = [head.full_rank for weight in alone.weights for head in weight.heads]
    assert max(heads) == profiles["chronos-2"].weights[0].heads[0].full_rank
    table = compare_profiles([profiles["chronos-2"], alone]).table()
    cells = [list(column.cells) for column in table.columns]
    rows = dict(zip(zip(cells[0], cells[1], strict=True), cells[-1], strict=True))
    assert rows["", "group"]
    assert len(cells[0]) == 4


def test_names_are_text_in_the_table(profiles: dict[str, RankProfile], tmp_path: Path) -> None:
    names = ["bolt [base]", "a[/]"]
    found = compare_profiles([profiles["chronos-bolt"], profiles["chronos-t5"]], names=names)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(found.table())
    assert all(name in captured.get() for name in names)


def test_home_is_expanded(
    profiles: dict[str, RankProfile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    profiles["chronos-bolt"].save("~/p")
    assert (tmp_path / "p" / "profile.json").is_file()
    found = compare_profiles(["~/p", "~/p/profile.json"])
    found.save("~/compared")
    assert (tmp_path / "compared" / "compared_ranks.csv").is_file()


def test_other_epsilons_are_refused_by_name(
    profiles: dict[str, RankProfile], checkpoints: dict[str, Path]
) -> None:
    other = profile(checkpoints["chronos-t5"], calibration=None, epsilons=(0.2,))
    with pytest.raises(UsageError, match=r"0\.2"):
        compare_profiles([profiles["chronos-bolt"], other])


@pytest.mark.parametrize("number", [0, 1, MOST_PROFILES + 1])
def test_number_of_profiles_is_bounded(profiles: dict[str, RankProfile], number: int) -> None:
    with pytest.raises(UsageError, match=str(MOST_PROFILES)):
        compare_profiles([profiles["chronos-bolt"]] * number)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", " "]])
def test_names_belong_to_profiles(profiles: dict[str, RankProfile], names: list[str]) -> None:
    with pytest.raises(UsageError, match="name"):
        compare_profiles([profiles["chronos-bolt"]] * 2, names=names)


def _relative(content: dict[str, Any], values: list[float]) -> None:
    content["weights"][0]["spectrum"]["relative"][: len(values)] = values


WRONG: dict[str, Edit] = {
    "negative": lambda content: _relative(content, [1.0, -0.5]),
    "rising": lambda content: _relative(content, [0.1, 0.9]),
    "above one": lambda content: _relative(content, [7.0]),
    "not a number": lambda content: _relative(content, [float("nan")]),
    "ranks": lambda content: content["embedding"][0]["spectrum"].update(ranks=[1]),
    "rank": lambda content: content["embedding"][0]["spectrum"].update(ranks=[999] * 4),
    "length": lambda content: content["embedding"][0]["spectrum"].update(full_rank=1),
    "epsilons": lambda content: content.update(epsilons=[0.01, 0.03, 0.1, 0.3]),
    "no epsilon": lambda content: content.update(epsilons=[]),
    "nothing embedded": lambda content: content.update(embedding=[]),
    "unknown key": lambda content: content.update(more=1),
    "no weights": lambda content: content.pop("weights"),
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG)
def test_numbers_that_no_profile_has_are_refused(both: list[Path], edit: Edit) -> None:
    path = both[0] / "profile.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not JSON", "[" * 100_000])
def test_other_files_are_no_profiles(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=r"x\.json|rank profile"):
        compare_profiles([tmp_path / "x.json"] * 2)
