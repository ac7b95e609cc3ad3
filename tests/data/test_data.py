"""Series from files and wheels, and the guard that keeps evaluation series out."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.data.fingerprints import fingerprints
from tscompress.data.leakage import check_no_leak, evaluation_dataset_names, guarded, leaks
from tscompress.data.reading.format import GivenSeries
from tscompress.data.series import LabelledSeries, given_series, read_series
from tscompress.data.suites import find_suite, load_suite
from tscompress.data.synthetic import CorpusConfig, FloatArray, SyntheticCorpus
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import DataError, LeakError, RecipeError

OFFLINE = [config.name for config in find_suite("offline").datasets]


def write(directory: Path, name: str, text: str) -> Path:
    (directory / name).write_text(text)
    return directory / name


def lists(series: list[FloatArray]) -> list[list[float]]:
    assert all(values.dtype == np.float32 and values.ndim == 1 for values in series)
    return [values.tolist() for values in series]


LONG = pd.DataFrame(
    {
        "item_id": ["b", "a", "b", "a", "b"],
        "timestamp": pd.to_datetime(
            ["2024-01-03", "2024-01-02", "2024-01-01", "2024-01-01", "2024-01-02"]
        ),
        "target": [3.0, 20.0, 1.0, 10.0, None],
    }
)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("x.csv", lambda frame, path: frame.to_csv(path, index=False)),
        ("x.CSV", lambda frame, path: frame.to_csv(path, index=False)),
        ("x.parquet", lambda frame, path: frame.to_parquet(path)),
        ("x.arrow", lambda frame, path: frame.to_feather(path)),
        ("x.feather", lambda frame, path: frame.to_feather(path)),
    ],
)
def test_long_tables_are_split_by_id_and_sorted_by_time(
    tmp_path: Path, name: str, save: Callable[[pd.DataFrame, Path], None]
) -> None:
    save(LONG, tmp_path / name)
    # The rows of b and a are mixed; sorted by time a comes first.
    series = {len(values): values for values in read_series(tmp_path / name)}
    assert series[2].tolist() == [10, 20]
    assert np.array_equal(series[3], np.array([1, np.nan, 3], np.float32), equal_nan=True)


def test_series_come_in_file_order(tmp_path: Path) -> None:
    rows = [
        "b,2024-01-02,2",
        "b,2024-01-01,1",
        "a,2023-01-01,9",
        "c,2023-01-01,7",
        "a,2023-01-02,8",
    ]
    path = write(tmp_path, "x.csv", "\n".join(["id,ds,y", *rows]))
    series = read_series(path)
    assert lists(series) == [[1, 2], [9, 8], [7]]
    assert series.names == ("b", "a", "c")


@pytest.mark.parametrize("target", ["target", "y", "value", "Value", "Y"])
def test_one_series(tmp_path: Path, target: str) -> None:
    path = write(tmp_path, "x.csv", f"ds,{target}\n2024-01-02,2\n2024-01-01,1\n")
    assert lists(read_series(str(path))) == [[1, 2]]


@pytest.mark.parametrize("identifier", ["item_id", "id", "unique_id", "series_id"])
def test_names_of_the_id_column(tmp_path: Path, identifier: str) -> None:
    path = write(tmp_path, "x.csv", f"{identifier},y\n1,1\n2,5\n1,2\n")
    assert lists(read_series(path)) == [[1, 2], [5]]


def test_rows_of_wide_tables_are_sorted_by_time(tmp_path: Path) -> None:
    path = write(tmp_path, "x.csv", "date,a,b\n2024-01-02,2,20\n2024-01-01,1,10\n")
    assert lists(read_series(path, GivenSeries(target_column="*"))) == [[1, 2], [10, 20]]
    with pytest.raises(DataError, match=r"no target column.*'\*' if each"):
        read_series(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    records = [{"target": [1, None, 3], "start": "2024-01-01"}, {"target": [[4, 5], [6, 7]]}]
    path = write(tmp_path, "x" + suffix, "\n\n".join(map(json.dumps, records)) + "\n")
    first, *others = read_series(path)
    assert np.array_equal(first, np.array([1, np.nan, 3], np.float32), equal_nan=True)
    assert lists(others) == [[4, 5], [6, 7]]


@pytest.mark.parametrize("bad", ["1e300", "-1.1e18", "inf", "n/a?", "1_000"])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DataError, match=r"1 values of column 'y' .* in row 2"):
        read_series(write(tmp_path, "x.csv", f"y\n1\n{bad}\n3\n"))


def test_rows_without_times_follow_one_another(tmp_path: Path) -> None:
    series = read_series(write(tmp_path, "x.csv", "id,y\nb,1\na,5\nb,2\n"))
    assert lists(series) == [[1, 2], [5]]
    assert series.frequencies == (None, None)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("x.txt", "y\n1\n", r"'\.txt'.*\.csv"),
        ("x", "y\n1\n", "''.*csv"),
        ("x.csv", "", r"'x\.csv'"),
        ("x.csv", "y\n", "there are no rows"),
        ("x.csv", "y\n\n\n", "there are no rows"),
        ("x.csv", "y\nnan\nnan\n", "no series"),
        ("x.csv", "y\na\nb\n", "'y'.*'a'"),
        ("x.csv", "name,city\na,b\n", "--target-column"),
        ("x.csv", "name,city,a\na,b,1\n", "--target-column"),
        ("x.csv", 'y\n"1\n2', "cannot be read"),
        ("x.parquet", "not parquet", r"'x\.parquet'"),
        ("x.arrow", "not arrow", r"'x\.arrow'"),
        ("x.jsonl", "", "there are no rows"),
        ("x.jsonl", "[1, 2]", r"line 1 .*\[1, 2\]"),
        ("x.jsonl", '{"target": [1]}\n{"target": 3}', "row 2 .*'target'"),
        ("x.jsonl", '{"target": [1', "cannot be read"),
        ("x.jsonl", '{"target": []}', "no series"),
        ("x.jsonl", '{"target": [[[1, 2]], [[3, 4]]]}', "row 1 "),
        ("x.jsonl", '{"target": [[1, 2], 3]}', "row 1 .*'target'"),
    ],
)
def test_files_without_series(tmp_path: Path, name: str, text: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_series(write(tmp_path, name, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.csv", "."])
def test_missing_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=re.escape(name)):
        read_series(tmp_path / name)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    for name in ("x.csv", "x.jsonl"):
        (tmp_path / name).write_bytes(b"y\n\xff\xfe\x00\x81")
        with pytest.raises(DataError, match="cannot be read"):
            read_series(tmp_path / name)


def test_pyarrow_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LONG.to_feather(tmp_path / "x.arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'tscompress\[arrow\]'"):
        read_series(tmp_path / "x.arrow")


# --------------------------------------------------------------------------------------------------
# Frequencies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("s", "s"), ("min", "min"), ("15min", "15min"), ("30min", "30min"), ("h", "h"),
        ("D", "D"), ("B", "D"), ("W-WED", "W"), ("MS", "M"), ("QS", "Q"), ("YS", "Y"),
    ],
)  # fmt: skip
def test_frequency_of_stamps(tmp_path: Path, step: str, expected: str) -> None:
    stamps = pd.date_range("2021-03-01", periods=30, freq=step)
    kept = [i for i in range(30) if i not in (4, 5, 17, 18, 19)]  # gaps do not change it
    expected_values = np.full(30, np.nan)
    expected_values[kept] = np.arange(25.0)
    frame = pd.DataFrame({"ds": stamps[kept], "y": np.arange(25.0)})
    frame.sample(frac=1, random_state=0).to_csv(tmp_path / "x.csv", index=False)
    frame.to_parquet(tmp_path / "x.parquet")
    for name in ("x.csv", "x.parquet"):
        series = read_series(tmp_path / name)
        assert series.frequencies == (expected,)
        assert np.array_equal(series[0], expected_values, equal_nan=True)


def test_each_series_has_its_own_frequency(tmp_path: Path) -> None:
    rows = ["id,ds,y"]
    rows += [f"hourly,2024-01-01 {hour:02}:00,{hour}" for hour in range(5)]
    rows += [f"daily,2024-01-{day:02},{day}" for day in range(1, 6)]
    rows += ["alone,2024-01-01,1"]
    series = read_series(write(tmp_path, "x.csv", "\n".join(rows)))
    assert series.frequencies == ("h", "D", "h")  # what has no step has the file's
    assert lists(series)[:2] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y\n1\n2\n", [None]),
        ("date,a,b\n2024-01-01,1,10\n2024-02-01,2,20\n2024-03-01,2,20\n", ["M", "M"]),
        ("a,b\n1,10\n2,20\n", [None, None]),
    ],
)
def test_frequency_of_tables_without_ids(
    tmp_path: Path, text: str, expected: list[str | None]
) -> None:
    path = write(tmp_path, "x.csv", text)
    assert read_series(path, GivenSeries(target_column="*")).frequencies == tuple(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H", "h"), ("1h", "h"), ("T", "min"), ("30T", "30min"), ("60min", "h"), ("10S", "10s"),
        ("ms", "s"), ("D", "D"), ("B", "D"), ("7D", "W"), ("W-SUN", "W"), ("M", "M"), ("MS", "M"),
        ("BME", "M"), ("3M", "Q"), ("Q-DEC", "Q"), ("QE-DEC", "Q"), ("A", "Y"), ("YE-JUN", "Y"),
        ("12M", "Y"), ("AS", "Y"), ("lunar", "lunar"), ("0D", "D"), ("every day", "every day"),
        ("9" * 400 + "D", "9" * 400 + "D"), ("", None), (3, None), (None, None),
    ],
)  # fmt: skip
def test_frequency_named_in_json_lines(tmp_path: Path, name: object, expected: str | None) -> None:
    records = [
        {"start": "2024-01-01", "freq": name, "target": [1, 2, 3]},
        {"freq": name, "target": [[1, 2], [3, 4]]},
        {"start": "2024-01-01", "target": [1]},
    ]
    text = "\n".join(map(json.dumps, records))
    series = read_series(write(tmp_path, "x.jsonl", text))
    assert series.frequencies == (expected, expected, expected, None)


def test_labels_belong_to_the_list_as_made() -> None:
    series = LabelledSeries([np.zeros(3, np.float32)] * 2, ["D", None])
    assert isinstance(series, list)
    assert type(series[:1]) is list
    assert type(series + series) is list
    with pytest.raises(DataError, match="1 frequencies for 2 series"):
        LabelledSeries(series, ["D"])


# --------------------------------------------------------------------------------------------------
# The guard
# --------------------------------------------------------------------------------------------------


def sample(name: str, count: int = 3) -> list[FloatArray]:
    """The longest of the first 40 series of an evaluation dataset."""
    (dataset,) = load_suite("offline", datasets=[name], max_series=40)
    longest = sorted(dataset.series, key=len)[-count:]
    return [values.astype(np.float32) for values in longest]


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize(
    "change",
    [
        lambda values: values,
        lambda values: np.float32(0.37) * values,
        lambda values: values + 1000,
        lambda values: values[:-8],
        lambda values: values[5:],
        lambda values: values[3:19],
        lambda values: np.insert(values, 4, np.nan),
        lambda values: np.r_[np.float32([7, 1, 9]), values],
    ],
    ids=["same", "scaled", "raised", "no tail", "no head", "16 steps", "gap", "longer"],
)
def test_evaluation_series_are_refused(
    name: str, change: Callable[[FloatArray], FloatArray]
) -> None:
    for values in sample(name):
        with pytest.raises(LeakError, match="1 of 2 series"):
            check_no_leak([np.arange(40, dtype=np.float32) % 7, change(values)])


@pytest.mark.parametrize("name", [c.name for c in find_suite("offline-frequencies").datasets])
def test_series_at_other_frequencies_are_refused(name: str) -> None:
    (dataset,) = load_suite("offline-frequencies", 1, [name])
    values = dataset.contexts[-1][-400:].astype(np.float32)
    with pytest.raises(LeakError, match=r"2 of 2 series .*offline-frequencies"):
        check_no_leak([values, 2 * values + 5])


def test_calibration_refuses_them_too(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    series = [2 * values for values in sample("monash_m3_monthly")]
    with pytest.raises(LeakError, match="3 of 3 series"):
        calibration_batches(loaded, CalibrationConfig(), series)
    path = tmp_path / "series.jsonl"
    path.write_text("\n".join(json.dumps({"target": values.tolist()}) for values in series))
    with pytest.raises(LeakError, match="3 of 3 series"):
        calibration_batches(loaded, CalibrationConfig(source=str(path)))


def test_threads_do_not_share_what_they_are_scored_on() -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    known, entered = [fingerprints([values])], threading.Barrier(2, timeout=30)

    def inside() -> tuple[bool, bool]:
        with guarded(known):
            entered.wait()  # the other looks now
            entered.wait()
            return leaks(values), leaks(values[::-1].copy())

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(inside)
        entered.wait()
        assert not leaks(values)
        entered.wait()
        assert other.result() == (True, False)


def test_guards_within_guards_add_up_and_end() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    with guarded([fingerprints([first])]):
        with guarded([fingerprints([second])]):
            assert leaks(first)
            assert leaks(second)
        assert not leaks(second)
    assert not leaks(first)


def test_no_training_collection_is_an_evaluation_dataset() -> None:
    names = evaluation_dataset_names()
    for name, (file, *_) in TRAINING_COLLECTIONS.items():
        assert not {name.lower(), Path(file).stem.lower()} & names


@pytest.mark.parametrize("name", list(TRAINING_COLLECTIONS))
def test_training_collections_are_not_accused(name: str) -> None:
    check_no_leak(training_series([name]))


@pytest.mark.parametrize("length", [12, 60, 400])
def test_synthetic_series_are_not_accused(length: int) -> None:
    corpus = SyntheticCorpus(CorpusConfig(), training_series(["aus_production"]))
    check_no_leak(list(corpus.sample(np.random.default_rng(length), 500, length)))


# --------------------------------------------------------------------------------------------------
# Collections
# --------------------------------------------------------------------------------------------------


def test_training_series_are_long_enough_and_trimmed() -> None:
    series = training_series(["aus_production", "global_economy"])
    assert len(series) > 500
    for values in series:
        assert values.dtype == np.float32
        assert np.isfinite(values).sum() >= 16
        assert np.isfinite(values[[0, -1]]).all()
    first = training_series(["aus_production"])
    assert len(first) == 6
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, series, strict=False))


def test_unknown_collection() -> None:
    with pytest.raises(RecipeError, match=r"'m4'.*aus_retail"):
        training_series(["m4"])


def test_rows_that_no_id_tells_apart(tmp_path: Path) -> None:
    """Else twelve shops would be one series, sorted by date."""
    days = pd.date_range("2020-01-01", periods=5).repeat(12)
    table = pd.DataFrame({"store": [*range(12)] * 5, "date": days, "target": np.arange(60.0)})
    table.to_csv(tmp_path / "shops.csv", index=False)
    with pytest.raises(DataError, match=r"55 rows repeat a time.*--id-column"):
        read_series(tmp_path / "shops.csv")
    table.rename(columns={"store": "id"}).to_csv(tmp_path / "named.csv", index=False)
    assert len(read_series(tmp_path / "named.csv")) == 12


def test_given_series_are_numbers_in_one_dimension(tmp_path: Path) -> None:
    found = given_series([[1, 2, np.inf], np.array([1e300, 3.0, np.nan])])
    assert [values.dtype for values in found] == [np.float32, np.float32]
    np.testing.assert_array_equal(found[0], [1, 2, np.nan])
    np.testing.assert_array_equal(found[1], [np.nan, 3, np.nan])
    labelled = given_series(LabelledSeries([np.arange(4.0)], ["D"]))
    assert isinstance(labelled, LabelledSeries)
    assert labelled.frequencies == ("D",)
    (tmp_path / "one.csv").write_text("y\n1\n2\n")
    np.testing.assert_array_equal(given_series(tmp_path / "one.csv")[0], [1, 2])
    for bad in ([[1.0, 2.0], ["a"]], [[1.0], np.ones((2, 2))]):
        with pytest.raises(DataError, match="series 1 "):
            given_series(bad)
    with pytest.raises(DataError, match="series 0 "):
        given_series(np.arange(5.0))
