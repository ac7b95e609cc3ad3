"""Series in long format: which columns, which grid, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tscompress.data.evaluation_sets import LongFormat
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import read_table
from tscompress.data.reading.time_grid import RegularSeries, Step
from tscompress.data.suites import Suite, find_suite, load_suite
from tscompress.errors import DataError, RecipeError


def frame(times: Any, values: Any = None, ids: Any = None) -> pd.DataFrame:
    content: dict[str, Any] = {"ds": times, "y": range(len(times)) if values is None else values}
    if ids is not None:
        content["id"] = ids
    return pd.DataFrame(content)


def read(table: pd.DataFrame, **options: Any) -> tuple[RegularSeries, ...]:
    return read_table(table, SeriesFormat(**options)).series


def dates(count: int, freq: str, start: str = "2024-01-01") -> pd.DatetimeIndex:
    return pd.date_range(start, periods=count, freq=freq)


def only(table: pd.DataFrame, **options: Any) -> tuple[str, list[float]]:
    """Frequency and values of the only series."""
    (series,) = read(table, **options)
    assert series.step is not None
    return series.step.frequency, series.values.tolist()


# --- grids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ("10s", "10s"), ("min", "min"), ("15min", "15min"), ("30min", "30min"), ("h", "h"),
        ("6h", "6h"), ("D", "D"), ("W-WED", "W"), ("28D", "28D"), ("MS", "M"), ("M", "M"),
        ("2MS", "2M"), ("QS-FEB", "Q"), ("YS", "Y"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gap", [False, True])
def test_frequency_is_inferred_and_gaps_are_missing(freq: str, expected: str, gap: bool) -> None:
    if freq == "M":
        times = pd.date_range("2024-01-31", periods=12, freq=pd.offsets.MonthEnd())
    else:
        times = dates(12, freq)
    table = frame(times)
    found, values = only(table.drop(index=[4, 7]) if gap else table)
    assert found == expected
    wanted = np.arange(12.0)
    if gap:
        wanted[[4, 7]] = np.nan
    assert np.array_equal(values, wanted, equal_nan=True)


def test_business_days_have_no_weekends() -> None:
    times = dates(15, "D")
    table = frame(times[times.dayofweek < 5])
    (series,) = read(table.drop(index=6))
    assert series.step is not None
    assert series.step.seasonality == 5
    assert np.isnan(series.values).tolist() == [False] * 6 + [True] + [False] * 4
    (with_weekends,) = read(frame(times))
    assert with_weekends.step is not None
    assert with_weekends.step.seasonality is None


def test_business_days_are_counted_from_the_first_value_and_from_weekends_on() -> None:
    step = Step("business days", 1)
    monday = pd.Timestamp("2024-01-01")
    assert str(step.period(monday, 7)) == "2024-01-10"
    assert str(Step("months", 1).period(monday, 2)) == "2024-03"
    assert step.times(pd.Timestamp("2024-01-06"), [0, 1, 5]) == [
        "2024-01-08", "2024-01-09", "2024-01-15",
    ]  # fmt: skip


def test_business_days_may_have_a_time_of_day() -> None:
    times = dates(15, "D")
    closing = times[times.dayofweek < 5] + pd.Timedelta("16h")
    for options in ({}, {"frequency": "B"}):
        (series,) = read(frame(closing), **options)
        assert series.step is not None
        assert series.step.seasonality == 5
        assert not np.isnan(series.values).any()
    with pytest.raises(ValueError, match="not regular"):
        read(frame([*closing[:-1], closing[-1] + pd.Timedelta("1h")]))


@pytest.mark.parametrize(("freq", "coarser", "expected"), [("MS", "QS", "Q"), ("h", "3h", "3h")])
def test_a_series_of_coarser_steps_has_no_missing_ones(
    freq: str, coarser: str, expected: str
) -> None:
    fine, coarse = (pd.date_range("2020-01-01", periods=40, freq=one) for one in (freq, coarser))
    table = frame([*fine, *coarse[:12]], range(52), ["a"] * 40 + ["b"] * 12)
    of_a, of_b = read(table)
    assert [one.step.frequency for one in (of_a, of_b) if one.step] == [
        Step.parse(freq).frequency,
        expected,
    ]
    assert of_b.values.tolist() == list(range(40, 52))
    # With a gap it is not told apart from one with missing values, nor where the step was given.
    _, gap = read(table.drop(index=45))
    _, given = read(table, frequency=freq)
    for one in (gap, given):
        assert one.step is not None
        assert one.step.frequency == Step.parse(freq).frequency
        assert len(one.values) == 34


def test_few_rows_of_a_given_frequency_are_missing_values() -> None:
    days = pd.date_range("2024-01-01", periods=60)
    few = frame([*days, days[0], days[40], days[59]], range(63), ["a"] * 60 + ["b"] * 3)
    with pytest.raises(ValueError, match="give --frequency"):
        read(few)
    (_, sparse) = read(few, frequency="D")
    assert len(sparse.values) == 60
    assert np.flatnonzero(np.isfinite(sparse.values)).tolist() == [0, 40, 59]


def test_rows_are_sorted_and_ids_keep_their_order() -> None:
    table = frame(
        ["2024-01-03", "2024-01-02", "2024-01-01", "2024-01-02", "2024-01-03"],
        [3, 20, 1, 2, 30],
        ["b", "a", "b", "b", "a"],
    )
    series = read(table)
    assert [(one.name, one.values.tolist()) for one in series] == [
        ("b", [1, 2, 3]),
        ("a", [20, 30]),
    ]
    assert [str(one.start) for one in series] == ["2024-01-01", "2024-01-02"]


def test_missing_values_at_the_ends_are_dropped() -> None:
    (series,) = read(frame(dates(6, "D"), [np.nan, 1, np.nan, 3, np.nan, np.nan]))
    assert np.array_equal(series.values, [1, np.nan, 3], equal_nan=True)
    assert str(series.start) == "2024-01-02"


@settings(deadline=None, max_examples=50)
@given(
    kept=st.sets(st.integers(0, 59), min_size=35),
    freq=st.sampled_from(["min", "h", "D", "MS"]),
    seed=st.integers(0, 99),
)
def test_any_rows_in_any_order_keep_their_place(kept: set[int], freq: str, seed: int) -> None:
    positions = sorted(kept)
    table = frame(dates(60, freq)[positions], positions).sample(frac=1, random_state=seed)
    _, values = only(table, frequency=freq)
    assert len(values) == positions[-1] - positions[0] + 1
    observed = [value for value in values if not np.isnan(value)]
    assert observed == positions
    assert all(values[p - positions[0]] == p for p in positions)


@pytest.mark.parametrize(
    ("frequency", "step"),
    [
        ("30T", Step("fixed", 1800 * 10**9)),
        ("H", Step("fixed", 3600 * 10**9)),
        ("W-SUN", Step("fixed", 7 * 86400 * 10**9)),
        ("ME", Step("months", 1)),
        ("BQS-FEB", Step("months", 3)),
        ("A-DEC", Step("months", 12)),
        ("B", Step("business days", 1)),
    ],
)
def test_frequencies_of_all_versions_of_pandas(frequency: str, step: Step) -> None:
    assert Step.parse(frequency) == step


@pytest.mark.parametrize("frequency", ["", "fortnight", "0h", "2B", "-1D", "h h", "1.5h"])
def test_unknown_frequencies(frequency: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(frequency))):
        Step.parse(frequency)


def test_a_given_frequency_is_finer_than_the_rows() -> None:
    assert len(only(frame(dates(4, "2h")), frequency="h")[1]) == 7
    with pytest.raises(ValueError, match="one D"):
        only(frame(dates(4, "2h")), frequency="D")


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times",
    [
        ["2024-01-01T00:00:00Z", "2024-01-01T01:00:00+00:00", "2024-01-01 02:00:00 UTC"],
        ["2024-01-01 00:00:00+05:30", "2024-01-01 01:00:00+05:30", "2024-01-01 02:00:00+05:30"],
        ["2024-01-01", "2024-01-01 01:00", "2024-01-01T02:00:00.000"],
        ["01/13/2024 00:00", "01/13/2024 01:00", "01/13/2024 02:00"],
        ["13.01.2024 00:00", "13.01.2024 01:00", "13.01.2024 02:00"],
        dates(3, "h").tz_localize("Asia/Kathmandu"),
    ],
)
def test_forms_of_times(times: Any) -> None:
    assert only(frame(times)) == ("h", [0, 1, 2])


def test_local_days_are_days_when_clocks_change() -> None:
    days = dates(6, "D", "2024-03-28").tz_localize("Europe/Berlin")
    assert only(frame(days)) == ("D", [0, 1, 2, 3, 4, 5])
    hours = dates(100, "h", "2024-03-29").tz_localize("UTC").tz_convert("Europe/Berlin")
    assert only(frame(hours)) == ("h", list(range(100)))


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (frame(["2024-01-01 00:00+01:00", "2024-01-01 01:00+02:00"]), r"zones \(\+01:00, \+02"),
        (frame(["2024-01-01 00:00Z", "2024-01-01 01:00"]), r"mixes time zones \(UTC, none\)"),
        (frame(["2024-01-01", "2024-01-01"]), "repeat a time.* 2024-01-01"),
        (frame(["2024-01-01"] * 2 + ["2024-01-02"], ids=[7, 7, 8]), "series '7'.*--id-column"),
        (frame(["2024-01-01", None]), "no time.*'ds'"),
        (frame(["2024-01-01", "soon"]), "'ds'.*'soon'"),
        (frame(["13/01/2024", "01/14/2024"]), "'ds'.*13/01/2024"),
        (frame(["01/02/2024", "02/02/2024"]), "'ds'.*--date-format"),
        (frame(["1998 S1", "1998 S2"]), "'ds'.*1998 S1"),
        (frame([2023, 2024]), "'ds'.*--date-format"),
        (frame(["2024-01-01"]), "--frequency"),
        (frame(["2024-01-01", "2024-01-02", "2024-01-03 07:00"]), "not regular"),
        (frame(["2024-01-01", "2024-01-02"], ids=["a", None]), "1 rows have no id"),
        (frame(["2024-01-01", "2024-01-02"], ["1,5x", "2"]), "1 values of column 'y' are"),
        (frame(["2024-01-01", "2024-01-02"], [1, np.inf]), "the first, in row 2, is 'inf'"),
        (frame(["2024-01-01", "2024-01-02"], [1, 1e300]), "the first, in row 2, is '1e"),
        (frame([], []), "there are no rows"),
    ],
)  # fmt: skip
def test_refused_tables(table: pd.DataFrame, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read(table)


def test_series_of_another_frequency(tmp_path: Path) -> None:
    daily, monthly = frame(dates(90, "D"), ids=["d"] * 90), frame(dates(9, "MS"), ids=["m"] * 9)
    both = pd.concat([daily, monthly])
    assert [str(one.step) for one in read(both)] == ["D", "M"]
    with pytest.raises(ValueError, match=r"series 'm'.* one D"):
        read(both, frequency="D")
    both.to_csv(tmp_path / "x.csv", index=False)
    with pytest.raises(DataError, match=r"'d'.*'m'.*--frequency"):
        next(load_suite(find_suite(tmp_path / "x.csv", LongFormat(horizon=1))))


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("identifier", ["id", "item_id", "unique_id", "series", "Series_ID"])
@pytest.mark.parametrize("time", ["timestamp", "date", "ds", "Time", "datetime"])
@pytest.mark.parametrize("target", ["target", "value", "Y"])
def test_usual_names(identifier: str, time: str, target: str) -> None:
    table = frame(dates(3, "D"), ids=["a"] * 3)
    renamed = table.rename(columns={"id": identifier, "ds": time, "y": target})
    (series,) = read(renamed.assign(other="x"))
    assert (series.name, series.values.tolist()) == ("a", [0, 1, 2])


def test_given_names_come_before_the_usual_ones() -> None:
    table = frame(dates(4, "D"), ids=["a"] * 4).assign(
        shop=["x", "x", "z", "z"], sales=[5, 6, 7, 8]
    )
    series = read(table, id_column="shop", target_column="sales")
    assert [(one.name, one.values.tolist()) for one in series] == [("x", [5, 6]), ("z", [7, 8])]


def test_an_index_of_ids_and_times() -> None:
    table = frame(dates(3, "D"), ids=["a"] * 3).set_index(["id", "ds"])
    (series,) = read(table)
    assert series.name == "a"


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"target_column": "sales"}, r"there is no column 'sales'; it has \['ds', 'y'\]"),
        ({"id_column": "shop"}, "there is no column 'shop'"),
    ],
)
def test_columns_that_are_not_there(columns: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read(frame(dates(3, "D")), **columns)


@pytest.mark.parametrize(("column", "role"), [("ds", "time"), ("y", "target")])
def test_columns_of_unusual_names_must_be_given(column: str, role: str) -> None:
    table = frame(dates(3, "D")).assign(price=1.0).rename(columns={column: "unusual"})
    with pytest.raises(ValueError, match=f"--{role}-column"):
        read(table)
    assert read(table, **{f"{role}_column": "unusual"})[0].values.tolist() == [0, 1, 2]


def test_the_only_column_that_is_left_is_the_target() -> None:
    table = frame(dates(3, "D"), ids=["a"] * 3).rename(columns={"y": "sales"})
    assert read(table)[0].values.tolist() == [0, 1, 2]


# --- as a suite -----------------------------------------------------------------------------------


def long_table(count: int = 3, length: int = 40, freq: str = "h") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.concat(
        frame(dates(length, freq), rng.normal(9, 1, length), [f"s{index}"] * length)
        for index in range(count)
    )


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("x.csv", lambda table, path: table.to_csv(path, index=False)),
        ("x.parquet", lambda table, path: table.to_parquet(path, index=False)),
        ("x.arrow", lambda table, path: table.reset_index(drop=True).to_feather(path)),
    ],
)
def test_a_file_is_a_suite_of_one_dataset(
    tmp_path: Path, name: str, save: Callable[[pd.DataFrame, Path], None]
) -> None:
    table = long_table()
    save(table, tmp_path / name)
    suite = find_suite(tmp_path / name, LongFormat(horizon=6, seasonality=8))
    (dataset,) = load_suite(suite)
    assert (dataset.name, dataset.freq, dataset.seasonality, dataset.horizon) == ("x", "h", 8, 6)
    assert np.allclose(np.concatenate(dataset.series), table["y"])
    assert dataset.labels.shape == (3, 6)
    assert [d.name for d in load_suite(suite, 2, ["x"])] == ["x"]


def test_windows_of_a_file_follow_one_another(tmp_path: Path) -> None:
    frame(dates(10, "D")).to_csv(tmp_path / "x.csv")
    (dataset,) = load_suite(find_suite(tmp_path / "x.csv", LongFormat(horizon=2, windows=3)))
    assert dataset.windows == 3
    assert dataset.labels.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert [len(context) for context in dataset.contexts] == [4, 6, 8]


def test_series_that_are_too_short(tmp_path: Path) -> None:
    pd.concat([long_table(), frame(dates(6, "h"), ids=["new"] * 6)]).to_csv(tmp_path / "x.csv")
    (dataset,) = load_suite(find_suite(tmp_path / "x.csv", LongFormat(horizon=6)))
    assert dataset.names == ("s0", "s1", "s2")
    assert dataset.summary is not None
    assert (dataset.summary.series, dataset.summary.too_short_names) == (3, ("new",))
    with pytest.raises(DataError, match=r"'x\.csv'.* 60 steps"):
        next(load_suite(find_suite(tmp_path / "x.csv", LongFormat(horizon=60))))


def test_errors_name_the_file(tmp_path: Path) -> None:
    frame([2020, 2021]).to_csv(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"'x\.csv'.*'ds'"):
        next(load_suite(find_suite(tmp_path / "x.csv", LongFormat(horizon=1))))
    with pytest.raises(DataError, match=r"y\.csv"):
        next(load_suite(find_suite(tmp_path / "y.csv", LongFormat(horizon=1))))


def test_options_of_files_belong_to_files() -> None:
    with pytest.raises(RecipeError, match=r"'x\.csv'"):
        find_suite("x.csv")
    with pytest.raises(RecipeError, match="'offline'"):
        find_suite("offline", LongFormat(horizon=3))
    suite = Suite("mine", ())
    assert find_suite(suite) is suite


# --- as a command ---------------------------------------------------------------------------------


def invoke(*arguments: object) -> Any:
    from tscompress.cli.app import app

    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_evaluate_a_file(tmp_path: Path) -> None:
    table = long_table(2, 60).rename(columns={"id": "shop", "y": "sales"})
    table.to_csv(tmp_path / "sales.csv", index=False)
    done = invoke(
        "seasonal-naive", "--suite", tmp_path / "sales.csv", "--horizon", 6, "--windows", 2,
        "--seasonality", 12, "--frequency", "h", "--id-column", "shop", "--target-column", "sales",
        "--time-column", "ds", "--json", "--no-cache",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["result"]["rows"]
    assert (row["dataset"], row["series_count"], row["windows"]) == ("sales", 4, 2)

    values = table["sales"].to_numpy().reshape(2, 60)
    errors = scale = 0.0
    for series in values:
        for end in (54, 60):
            context, label = series[: end - 6], series[end - 6 : end]
            error = np.abs(label - context[-12:-6]).sum()
            errors += error / np.abs(context[12:] - context[:-12]).mean()
            scale += 6
    assert row["MASE"] == pytest.approx(errors / scale, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "x.csv"], "'x.csv'"),
        (["--suite", "x.csv", "--windows", "2"], "by --horizon"),
        (["--horizon", "3"], "'offline'"),
    ],
)
def test_misuse_is_one_line(options: list[str], message: str) -> None:
    from tscompress.errors import UsageError

    outcome = invoke("seasonal-naive", *options)
    assert isinstance(outcome.exception, UsageError)
    assert message in str(outcome.exception)
