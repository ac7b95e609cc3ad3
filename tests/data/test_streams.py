"""Series that are read as they are needed: formats, shuffling, and the guard on evaluation data."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from tscompress.data import streaming as streams
from tscompress.data.reading import tables
from tscompress.data.reading.format import GivenSeries
from tscompress.data.series import read_series
from tscompress.data.streaming import SeriesStream, iterate_series
from tscompress.data.suites import load_suite
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DataError, LeakError, OfflineError


def own_series(count: int = 7) -> list[FloatArray]:
    rng = np.random.default_rng(0)
    found = [rng.normal(size=40 + 3 * i).cumsum().astype(np.float32) for i in range(count)]
    found[-1][5:9] = np.nan
    return found


def long_table(series: list[FloatArray]) -> pd.DataFrame:
    parts = [
        pd.DataFrame(
            {
                "item_id": f"s{i}",
                "timestamp": pd.date_range("2020-01-01", periods=len(s), freq="D"),
                "target": s,
            }
        )
        for i, s in enumerate(series)
    ]
    return pd.concat(parts, ignore_index=True)


def list_table(series: list[FloatArray]) -> pd.DataFrame:
    days = [list(pd.date_range("2020-01-01", periods=len(s), freq="D")) for s in series]
    return pd.DataFrame({"timestamp": days, "target": [s.tolist() for s in series]})


def write(path: Path, series: list[FloatArray], layout: str) -> Path:
    if path.suffix == ".jsonl":
        lines = [
            json.dumps({"target": [None if np.isnan(v) else float(v) for v in s]}) for s in series
        ]
        path.write_text("\n".join(lines) + "\n")
        return path
    table = long_table(series) if layout == "long" else list_table(series)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif layout == "stream":
        pa = pytest.importorskip("pyarrow")
        batch = pa.Table.from_pandas(table)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_table(batch)
    else:
        table.to_feather(path)
    return path


def assert_same(found: list[FloatArray], expected: list[FloatArray]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Read every file as if it were larger than memory."""
    monkeypatch.setattr(streams, "WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(tables, "LISTS_AT_ONCE", 2)


@pytest.mark.parametrize(
    ("suffix", "layout"),
    [
        (".csv", "long"),
        (".parquet", "long"),
        (".parquet", "list"),
        (".arrow", "long"),
        (".feather", "list"),
        (".arrow", "stream"),
        (".jsonl", ""),
    ],
)
def test_files_are_read_in_batches(
    suffix: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = own_series()
    path = write(tmp_path / f"series{suffix}", series, layout)
    assert_same(list(iterate_series(path)), series)
    in_parts(monkeypatch, 17)  # no series ends where a batch does
    assert_same(list(iterate_series(path)), series)


def test_a_directory_is_all_its_files(tmp_path: Path) -> None:
    series = own_series()
    write(tmp_path / "a.csv", series[:3], "long")
    (tmp_path / "below").mkdir()
    write(tmp_path / "below" / "b.jsonl", series[3:], "")
    (tmp_path / "notes.txt").write_text("not series")
    assert_same(list(iterate_series(tmp_path)), series)


def test_a_directory_that_datasets_wrote(tmp_path: Path) -> None:
    """It has notes in JSON beside the series; and a directory may be called like a file."""
    series = own_series()
    rows = datasets.Dataset.from_dict({"target": [values.tolist() for values in series]})
    rows.save_to_disk(tmp_path / "saved")
    assert_same(list(iterate_series(tmp_path / "saved")), series)
    (tmp_path / "more" / "data.parquet").mkdir(parents=True)
    write(tmp_path / "more" / "data.parquet" / "part-0.parquet", series, "lists")
    assert_same(list(iterate_series(tmp_path / "more")), series)


def test_ids_are_names_in_every_part_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """007 is a number where all of a part look like numbers, and there is no other 7."""
    in_parts(monkeypatch, 10)
    names = [*(f"{number:03d}" for number in range(6)), "A1", "A2"]
    parts = [pd.DataFrame({"item_id": [name] * 7, "target": np.arange(7.0)}) for name in names]
    pd.concat(parts).to_csv(tmp_path / "sales.csv", index=False)
    assert_same(list(iterate_series(tmp_path / "sales.csv")), [np.arange(7.0)] * len(names))


def test_ids_are_of_one_kind_in_a_long_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas reads long files in parts, too."""
    path = tmp_path / "sales.csv"
    counts = {"007": 700_000, "abc": 1000}
    with path.open("w") as file:
        file.write("item_id,target\n")
        for name, count in counts.items():
            file.writelines([f"{name},1\n"] * count)
    assert [len(values) for values in read_series(path)] == [*counts.values()]
    in_parts(monkeypatch, 65_536)
    assert [len(values) for values in iterate_series(path)] == [*counts.values()]


def test_a_wide_table_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, form = tmp_path / "wide.csv", GivenSeries(target_column="*")
    pd.DataFrame(np.arange(40.0).reshape(20, 2), columns=["a", "b"]).to_csv(path, index=False)
    in_parts(monkeypatch, 7)
    assert_same(list(iterate_series(path, form)), list(read_series(path, form)))


def test_steps_that_are_held_out_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series, form = own_series(), GivenSeries(hold_out=5)
    path = write(tmp_path / "x.csv", series, "long")
    expected = [values[:-5] for values in series]
    assert_same(list(read_series(path, form)), expected)
    assert_same(list(iterate_series(path, form)), expected)
    in_parts(monkeypatch, 17)
    assert_same(list(iterate_series(path, form)), expected)


def test_rows_of_a_long_table_are_sorted_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = long_table(own_series(2)).iloc[::-1]
    path = tmp_path / "reversed.parquet"
    table.to_parquet(path)
    in_parts(monkeypatch, 17)
    assert_same(list(iterate_series(path)), own_series(2)[::-1])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("nothing.csv", None, r"nothing\.csv"),
        ("series.txt", "1", r"'\.txt'"),
        ("bad.jsonl", "{", r"'bad\.jsonl'"),
        ("bad.jsonl", '{"target": "x"}', "'target'"),
        ("bad.parquet", "no parquet", r"'bad\.parquet'"),
        ("empty", "", "empty"),
    ],
)
def test_unreadable_sources(name: str, content: str | None, match: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=match):
        list(iterate_series(path))


def test_a_stream_is_determined_by_its_seed() -> None:
    def windows(seed: int) -> FloatArray:
        stream = SeriesStream([own_series(30)], longest=20, seed=seed, buffer_size=4)
        rng = np.random.default_rng(seed)
        return np.concatenate([stream.sample(rng, 5, 20) for _ in range(10)])

    first, again, other = windows(0), windows(0), windows(1)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(np.nan_to_num(first), np.nan_to_num(other))


@pytest.mark.parametrize("buffer_size", [3, 100])
def test_every_series_is_drawn_and_the_held_out_never(buffer_size: int) -> None:
    series = [np.arange(30, dtype=np.float32) ** 1.5 + 1000 * i for i in range(25)]
    stream = SeriesStream([series], longest=30, buffer_size=buffer_size)
    drawn = stream.sample(np.random.default_rng(0), 600, 10)
    seen = {int(row[np.isfinite(row)].max() // 1000) for row in drawn}
    assert seen == set(range(25)) - {9, 19}
    assert [int(values[0]) // 1000 for values in stream.held_out] == [9, 19]


def test_a_stream_holds_no_more_than_its_buffer() -> None:
    opened = 0

    class Endless(list[FloatArray]):
        def __iter__(self) -> Iterator[FloatArray]:
            nonlocal opened
            rng = np.random.default_rng(0)
            while True:
                opened += 1
                yield rng.normal(size=5000).astype(np.float32)

    stream = SeriesStream([Endless()], longest=50, buffer_size=8, held_out_limit=2)
    windows = stream.sample(np.random.default_rng(0), 100, 50)
    assert windows.shape == (100, 50)
    assert 108 <= opened <= 125
    assert [len(values) for values in stream.held_out] == [200, 200]  # of 5000, 4 × longest


def test_sources_take_turns() -> None:
    read: list[int] = []

    class Source(list[FloatArray]):
        def __init__(self, number: int, count: int) -> None:
            self.number = number
            super().__init__([np.arange(9, dtype=np.float32) ** 1.1] * count)

        def __iter__(self) -> Iterator[FloatArray]:
            for values in super().__iter__():
                read.append(self.number)
                yield values

    SeriesStream([Source(0, 6), Source(1, 2)], longest=9, held_out_every=0)
    assert read == [0, 1, 0, 1, 0, 0, 0, 0]


def test_evaluation_series_are_refused_when_they_come() -> None:
    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"], max_series=1)
    leaked = dataset.contexts[0]
    with pytest.raises(LeakError, match="series 7 "):
        SeriesStream([[*own_series(7), 3.5 * leaked[10:]]], longest=20)
    stream = SeriesStream([[*own_series(7), leaked]], longest=20, buffer_size=4)
    with pytest.raises(LeakError):
        stream.sample(np.random.default_rng(0), 8, 20)


def test_series_without_values() -> None:
    empty = np.full(20, np.nan, dtype=np.float32)
    with pytest.raises(DataError, match="3 observed values"):
        SeriesStream([[empty]], longest=8)


class _Errors(types.ModuleType):
    class DatasetsError(Exception):
        pass


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """Stands for the package datasets; returns what it was asked for."""
    asked: list[tuple[Any, ...]] = []
    module = types.ModuleType("datasets")

    def load_dataset(repo: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((repo, config, split, streaming))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.exceptions = _Errors("exceptions")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": "a", "target": [1.0, 2.0, None, 5.0], "category": "x"},
        {"id": "b", "target": [[1.0, 2.0], [3.0, 4.0]], "category": "x"},
    ]
    asked = hub(monkeypatch, rows)
    expected: list[Any] = [[1, 2, np.nan, 5], [1, 2], [3, 4]]
    assert_same(list(iterate_series("someone/series:daily")), expected)
    assert asked == [("someone/series", "daily", "train", True)]


def test_hub_datasets_of_the_suites_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [])
    for source in ("autogluon/chronos_datasets:m4_hourly", "autogluon/chronos_datasets"):
        with pytest.raises(LeakError, match=r"chronos_datasets|m4_hourly"):
            list(iterate_series(source))
    assert not asked


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no route"))
    with pytest.raises(OfflineError, match="'someone/series'"):
        list(iterate_series("someone/series"))
    hub(monkeypatch, ValueError("no such config\nat all"))
    with pytest.raises(DataError, match="no such config"):
        list(iterate_series("someone/series"))


def test_rows_of_a_series_that_do_not_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that fits into memory they may; in parts each row would become a series."""
    table = long_table(own_series(5)).sort_values("timestamp", kind="stable")
    table.to_csv(tmp_path / "by_date.csv", index=False)
    assert len(list(iterate_series(tmp_path / "by_date.csv"))) == 5
    in_parts(monkeypatch, 17)
    with pytest.raises(DataError, match=r"by_date\.csv.*s0.*item_id"):
        list(iterate_series(tmp_path / "by_date.csv"))


def test_parts_are_read_as_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last series of one row, or with a gap, and a decimal comma that comes late."""
    lines = [f"a;2024-01-{day:02};{day}" for day in range(1, 9)]
    lines += ["b;2024-01-01;12,345", "b;2024-01-02;2,5", "c;2024-01-01;1", "c;2024-01-06;2", ""]
    path = tmp_path / "days.csv"
    path.write_text("\n".join(["id;date;target", *lines]))
    whole = list(iterate_series(path))
    in_parts(monkeypatch, 3)
    assert_same(list(iterate_series(path)), whole)
    assert [len(one) for one in whole] == [8, 2, 6]
    assert whole[1].tolist() == [pytest.approx(12.345), 2.5]
    path.write_text(path.read_text() + "d;2024-01-01;7\n")
    assert [len(one) for one in iterate_series(path)] == [8, 2, 6, 1]


def test_a_long_dataset_of_the_hub_is_read_as_a_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    days = pd.date_range("2024-01-01", periods=7)
    rows = [{"id": name, "date": day, "target": float(day.day)} for name in "ab" for day in days]
    hub(monkeypatch, rows)
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 3)
    assert [one.tolist() for one in iterate_series("someone/series")] == [list(range(1, 8))] * 2


@pytest.mark.parametrize("form", [GivenSeries(), GivenSeries(target_column="*")])
def test_a_dataset_of_the_hub_without_ids_is_not_cut_into_pieces(
    monkeypatch: pytest.MonkeyPatch, form: GivenSeries
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 256)
    days = pd.date_range("2024-01-01", periods=600)
    hub(monkeypatch, [{"date": day, "target": float(day.day)} for day in days])
    with pytest.raises(DataError, match=r"series, and .*come in parts; .*give a file"):
        list(iterate_series("someone/series", form))


def test_rows_without_an_id_are_refused(tmp_path: Path) -> None:
    table = long_table(own_series(3))
    table.loc[table["item_id"] == "s1", "item_id"] = None
    table.to_csv(tmp_path / "gaps.csv", index=False)
    for read in (iterate_series, read_series):
        with pytest.raises(DataError, match=r"gaps\.csv.*43 rows have no id"):
            list(read(tmp_path / "gaps.csv"))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_of_few_series_one_is_kept_apart(count: int) -> None:
    series = [np.arange(30, dtype=np.float32) ** 1.5 + 1000 * i for i in range(count)]
    stream = SeriesStream([series], longest=30)
    (kept,) = (int(values[0] // 1000) for values in stream.held_out)
    drawn = stream.sample(np.random.default_rng(0), 40 * count, 10)
    seen = {int(row[np.isfinite(row)].max() // 1000) for row in drawn}
    assert seen == set(range(count)) - {kept}
    assert not SeriesStream([own_series(1)], longest=20).held_out
    assert not SeriesStream([own_series(count)], longest=20, held_out_every=0).held_out


def test_a_source_without_a_usable_series_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text("target\nhello\nthere\n")
    (tmp_path / "short.jsonl").write_text('{"target": [1, 2]}\n')
    good = write(tmp_path / "good.csv", own_series(4), "long")
    for bad in ("text.csv", "short.jsonl"):
        with pytest.raises(DataError, match=bad):
            SeriesStream([good, tmp_path / bad], longest=20)


def test_a_leak_names_its_file(tmp_path: Path) -> None:
    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"], max_series=1)
    write(tmp_path / "a.jsonl", own_series(4), "long")
    write(tmp_path / "b.jsonl", [*own_series(2), np.float32(dataset.contexts[0])], "long")
    with pytest.raises(LeakError, match=r"series 2 of 'b\.jsonl' belongs"):
        SeriesStream([tmp_path], longest=20)


@pytest.mark.parametrize("bad", [[[1.0, 2.0], "text"], [np.ones((2, 3))], [1.0, 2.0, 3.0]])
def test_values_that_are_no_list_of_series(bad: Any) -> None:
    with pytest.raises(DataError, match=r"series [01] "):
        SeriesStream([bad], longest=20)
