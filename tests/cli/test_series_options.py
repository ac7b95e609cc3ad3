"""Options of files of series: the same flags, help and limits, whatever command reads the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tscompress.cli.app import app
from tscompress.cli.series_options import COLUMN_OPTIONS, SERIES_OPTIONS
from tscompress.data.reading.format import GivenSeries, SeriesFormat
from tscompress.errors import RecipeError, UsageError
from tscompress.families.registry import FORECAST_FAMILIES

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
WITH_HOLD_OUT = ("profile", "sensitivity", "compress", "recover", "series")


def options_of(command: str) -> dict[str, Any]:
    return {option.name: option for option in COMMANDS[command].params}


def described(option: Any) -> tuple[Any, ...]:
    return option.opts, option.help, option.default, option.rich_help_panel


def test_the_options_are_the_keys_of_a_recipe() -> None:
    assert set(COLUMN_OPTIONS) == set(SeriesFormat.model_fields)
    assert set(SERIES_OPTIONS) == set(GivenSeries.model_fields)


@pytest.mark.parametrize("command", [*WITH_HOLD_OUT, "evaluate"])
def test_every_command_has_the_same_options(command: str) -> None:
    expected = SERIES_OPTIONS if command in WITH_HOLD_OUT else COLUMN_OPTIONS
    ours, theirs = options_of(command), options_of("series")
    assert [name for name in ours if name in SERIES_OPTIONS] == list(expected)
    assert [described(ours[name]) for name in expected] == [
        described(theirs[name]) for name in expected
    ]


@pytest.mark.parametrize("command", ["compress", "sensitivity"])
def test_help_says_how_many_series_each_family_is_calibrated_on(command: str) -> None:
    said = options_of(command)["calibration_series"].help
    for family in FORECAST_FAMILIES.values():
        assert str(family.defaults.calibration_windows) in said


def test_an_option_reaches_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("shop|day|sales|price\na|03.01.2024|1,5|9\na|04.01.2024|2,5|9\n")
    given = ["--id-column", "shop", "--time-column", "day", "--target-column", "sales"]
    given += ["--decimal", ",", "--separator", "|", "--date-format", "%d.%m.%Y"]
    outcome = CliRunner().invoke(app, ["series", str(path), *given, "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert '"first": "2024-01-03' in outcome.output


@pytest.mark.parametrize("command", ["profile", "sensitivity", "compress", "recover"])
def test_an_option_without_a_file_is_refused(command: str, tmp_path: Path) -> None:
    needed = {
        "compress": ["--output", str(tmp_path / "out")],
        "recover": ["--teacher", "x", "--output", str(tmp_path / "out")],
    }
    given = [command, "reference/bolt", *needed.get(command, []), "--id-column", "shop"]
    outcome = CliRunner().invoke(app, given)
    assert isinstance(outcome.exception, UsageError)
    assert "--id-column" in str(outcome.exception)


def test_a_file_without_a_horizon_needs_one() -> None:
    given = ["evaluate", "reference/bolt", "--suite", "sales.csv", "--id-column", "shop"]
    outcome = CliRunner().invoke(app, given)
    assert isinstance(outcome.exception, RecipeError)
    assert "by --horizon" in str(outcome.exception)
    given[3] = "offline"
    outcome = CliRunner().invoke(app, given)
    assert isinstance(outcome.exception, UsageError)
    assert "'offline' is no file of series; --id-column" in str(outcome.exception)


def test_an_option_out_of_range_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("y\n1\n2\n")
    outcome = CliRunner().invoke(app, ["series", str(tmp_path / "x.csv"), "--separator", "::"])
    assert isinstance(outcome.exception, RecipeError)
    assert "separator" in str(outcome.exception)
