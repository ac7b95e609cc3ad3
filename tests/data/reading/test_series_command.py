"""``tscompress series FILE``: what it shows of a file is what every command reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tscompress.cli.app import app
from tscompress.data.reading.read import read_file
from tscompress.data.reading.summary import summarize
from tscompress.errors import DataError

DAYS = pd.date_range("2024-01-01", periods=30)


def shown(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["series", str(path), *options])


def shops(path: Path, count: int = 3) -> Path:
    table = pd.DataFrame(
        {
            "item_id": np.repeat([f"shop{number}" for number in range(count)], 30),
            "date": np.tile(DAYS, count),
            "sales": np.arange(30.0 * count),
        }
    )
    table.drop(index=4).to_csv(path, index=False)
    return path


def test_what_every_command_refuses_is_refused(tmp_path: Path) -> None:
    outcome = shown(shops(tmp_path / "x.csv"), "--hold-out", "30")
    assert isinstance(outcome.exception, DataError)
    assert not outcome.stdout


def test_the_line_is_that_of_every_command(tmp_path: Path) -> None:
    path = shops(tmp_path / "x.csv")
    outcome = shown(path)
    assert outcome.exit_code == 0, outcome.output
    assert f"x.csv: {summarize(read_file(path)).line()}" in outcome.output
    assert "layout: long; --id-column 'item_id' --time-column 'date'" in outcome.output
    assert all(f"shop{number}" in outcome.output for number in range(3))
    assert "▁" in outcome.output
    assert "█" in outcome.output


def test_printed_options_read_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("shop;tag;wert\na;03.01.2024;1,5\na;04.01.2024;2,5\na;13.01.2024;9,5\n")
    first = ["--id-column", "shop", "--time-column", "tag", "--frequency", "D"]
    line = next(row for row in shown(path, *first).output.splitlines() if "layout" in row)
    said = line.partition("; ")[2].replace("'", "").split(" ")
    again = shown(path, *said)
    assert again.exit_code == 0, again.output
    assert again.output == shown(path, *first).output


def test_json_names_each_series(tmp_path: Path) -> None:
    outcome = shown(shops(tmp_path / "x.csv"), "--json", "--hold-out", "5")
    content = json.loads(outcome.stdout)
    assert (content["series"], content["layout"], content["hold_out"]) == (3, "long", 5)
    first, *others = content["each"]
    assert first == {
        "name": "shop0", "steps": 30, "missing": 1, "frequency": "D",
        "first": "2024-01-01T00:00:00", "last": "2024-01-30T00:00:00",
    }  # fmt: skip
    assert [one["missing"] for one in others] == [0, 0]


def test_of_many_series_the_first_are_shown(tmp_path: Path) -> None:
    output = shown(shops(tmp_path / "x.csv", 20)).output
    assert "20 series" in output
    assert "shop7" in output
    assert "shop8" not in output


def test_series_without_times_or_values_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "a", "target": [1, null, 3, 4]}\n{"id": "b", "target": [null, null]}\n')
    outcome = shown(path)
    assert outcome.exit_code == 0, outcome.output
    assert "without times" in outcome.output
    assert "1 with too few values" in outcome.output
    each = json.loads(shown(path, "--json").stdout)["each"]
    assert [(one["name"], one["steps"], one["first"]) for one in each] == [
        ("a", 4, None), ("b", 0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("x.csv", "date,a,b\n2024-01-01,1,2\n", "--target-column"),
        ("x.csv", "y\n", "no rows"),
        ("x.txt", "y\n1\n", "'.txt'"),
        ("x.parquet", "y", "x.parquet"),
        ("missing.csv", None, "missing.csv"),
    ],
)
def test_unreadable_files_are_one_line(
    name: str, text: str | None, key: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    outcome = shown(tmp_path / name)
    assert isinstance(outcome.exception, DataError)
    assert outcome.exception.exit_code == 1
    assert key in str(outcome.exception)
    assert "\n" not in str(outcome.exception)


def test_no_file_is_a_mistake_of_usage() -> None:
    assert CliRunner().invoke(app, ["series"]).exit_code == 2
