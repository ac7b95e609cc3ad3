"""Whole messages, a handful: one line with what came, what is allowed and what to do.

Other tests name the exception and the offending key, so that a sentence is changed here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tscompress
from tscompress.errors import (
    DataError,
    ModelNotFoundError,
    OutputExistsError,
    RecipeError,
    TscompressError,
    UsageError,
    shortened,
)
from tscompress.io.files import check_output
from tscompress.plan.schedules import parse_budget
from tscompress.workflows.recipe import load_recipe


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sales.csv").write_text("1,2\n")
    (tmp_path / "shops.csv").write_text("date,a,b\n2024-01-01,1,2\n")
    (tmp_path / "twice.csv").write_text("date,y,y\n2024-01-01,1,2\n")
    (tmp_path / "recipe.yaml").write_text("model: reference/bolt\noutput: x\nbench: {repeat: 3}\n")


@pytest.mark.parametrize(
    ("act", "error", "code", "message"),
    [
        (
            lambda: check_output(Path("out"), force=False),
            OutputExistsError,
            2,
            "'out' exists already; choose another output or pass --force.",
        ),
        (
            lambda: check_output(Path("out"), force=True, inputs=["out/sales.csv"]),
            OutputExistsError,
            2,
            "'out' holds the input 'out/sales.csv', which would be lost; choose another output.",
        ),
        (
            lambda: load_recipe("none.yaml"),
            RecipeError,
            2,
            "there is no recipe at 'none.yaml'.",
        ),
        (
            lambda: load_recipe("recipe.yaml"),
            RecipeError,
            2,
            "'recipe.yaml': unknown key 'bench.repeat'; allowed here: see the docs.",
        ),
        (
            lambda: tscompress.load("./nowhere"),
            ModelNotFoundError,
            1,
            "there is no directory './nowhere'.",
        ),
        (
            lambda: tscompress.load("out"),
            ModelNotFoundError,
            1,
            "'out' has no config.json; is it a checkpoint?",
        ),
        (
            lambda: tscompress.read_series("out/sales.csv"),
            DataError,
            1,
            "'sales.csv' cannot be read: there are no rows.",
        ),
        (
            lambda: tscompress.read_series("shops.csv"),
            DataError,
            1,
            "'shops.csv' cannot be read: no target column among ['date', 'a', 'b']; name one of "
            "target, y, value, or give --target-column, '*' if each of the others is a series, and "
            "--id-column if one tells series apart.",
        ),
        (
            lambda: tscompress.read_series("twice.csv"),
            DataError,
            1,
            "'twice.csv' cannot be read: several columns are named 'y'.",
        ),
        (
            lambda: parse_budget("wql=1"),
            UsageError,
            2,
            "'wql=1' is no budget; allowed are parameters, bytes, macs, kv-cache or latency = a "
            "ratio above 0 and at most 1; parameters or macs = a number (k, M, G, T); bytes or "
            "kv-cache = an amount (B, kB, MB, GB, KiB, MiB, GiB); wql = a percentage above 0; for "
            "example parameters=0.5, bytes=20MB or wql=1%.",
        ),
    ],
    ids=[
        "exists",
        "input",
        "no recipe",
        "unknown key",
        "no directory",
        "no config",
        "no rows",
        "no target",
        "name twice",
        "budget",
    ],
)
def test_golden_messages(
    act: Callable[[], object], error: type[TscompressError], code: int, message: str
) -> None:
    with pytest.raises(error) as caught:
        act()
    assert str(caught.value) == message
    assert caught.value.exit_code == code


@pytest.mark.parametrize("name", ["x" * 5000, "owner/" + "x" * 5000])
def test_a_name_without_end_is_not_repeated_whole(name: str) -> None:
    for act in (
        lambda: check_output(Path(name), force=False),
        lambda: load_recipe(name),
        lambda: parse_budget(name),
    ):
        with pytest.raises((TscompressError, OSError)) as caught:
            act()
        assert len(shortened(str(caught.value))) < 700
