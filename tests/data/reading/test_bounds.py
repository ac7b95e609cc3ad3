"""Files that would fill memory, and damaged or contradictory ones: each is one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tscompress.cli.app import app
from tscompress.data.reading import arrow_files, packed
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import read_file, read_in_parts
from tscompress.data.reading.tables import naming_file
from tscompress.data.series import read_series
from tscompress.data.streaming import iterate_series, series_files
from tscompress.errors import DataError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
}  # fmt: skip


def refusal(path: Path, read: Callable[[Path], object] = read_file) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    return message


def in_parts(path: Path) -> None:
    with naming_file(path):
        for _ in read_in_parts(path, SeriesFormat()):
            pass


def zipped(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.csv", content)
    return path


# --- too large ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_of_text_is_refused_before_it_expands(
    packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_EXPANDED_BYTES", 2**18)
    path = tmp_path / f"bomb.csv.{packer}"
    path.write_bytes(PACKERS[packer](b"y\n" + b"1\n" * 2**23))
    tracemalloc.start()
    try:
        assert "expands" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_bomb_in_an_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_EXPANDED_BYTES", 2**18)
    assert "expands" in refusal(zipped(tmp_path / "bomb.zip", b"y\n" + b"1\n" * 2**20))


@pytest.mark.parametrize("name", ["line.csv.gz", "line.jsonl.gz", "line.csv"])
@pytest.mark.parametrize("read", [read_file, in_parts])
def test_a_line_without_end_is_refused(
    name: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading in parts bounds memory only if a line is bounded."""
    monkeypatch.setattr(packed, "MAX_LINE_BYTES", 2**18)
    content = b'{"target": [' + b"1," * 2**19 if "json" in name else b"y," * 2**19
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert "line" in refusal(tmp_path / name, read)


def test_long_files_of_short_lines_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_EXPANDED_BYTES", 2**10)
    monkeypatch.setattr(packed, "MAX_LINE_BYTES", 2**10)
    lines = [json.dumps({"id": str(row), "target": [1.0, 2.0, 4.0 + row]}) for row in range(500)]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert sum(len(part) for part in read_in_parts(path, SeriesFormat())) == 500


def test_text_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MEMORY_PER_BYTE", 2**40)
    (tmp_path / "x.csv").write_text("y\n1\n2\n")
    assert "memory" in refusal(tmp_path / "x.csv")


def equal_list(values: int) -> Any:
    """One list of equal values, of which a file holds a few bytes."""
    return pa.ListArray.from_arrays([0, values], pa.nulls(values))


def long_list(path: Path) -> None:
    pq.write_table(pa.table({"target": [[1.0] * 10**6]}), path, compression="zstd")


def null_list(path: Path) -> None:
    table = pa.table({"target": equal_list(10**9)})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


@pytest.mark.parametrize("read", [read_file, in_parts])
@pytest.mark.parametrize(("name", "write"), [("x.parquet", long_list), ("x.arrow", null_list)])
def test_lists_are_held_against_memory(
    name: str,
    write: Callable[[Path], None],
    read: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row may hold a billion values: rows alone say nothing of what a table needs."""

    class Memory:
        available = 10**6

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    write(tmp_path / name)
    assert "GB" in refusal(tmp_path / name, read)


def test_parts_of_long_lists_have_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "VALUES_AT_ONCE", 100)
    lists = [np.arange(60.0) + row for row in range(10)]
    pq.write_table(pa.table({"id": list("abcdefghij"), "target": lists}), tmp_path / "x.parquet")
    parts = [
        len(part) for part in arrow_files.arrow_parts(tmp_path / "x.parquet", ".parquet", 9, 9)
    ]
    assert parts == [1] * 10
    found = list(read_in_parts(tmp_path / "x.parquet", SeriesFormat()))
    assert [one.values[0] for part in found for one in part] == list(range(10))


# --- damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_damaged_compressed_text(packer: str, damage: str, tmp_path: Path) -> None:
    text = "\n".join(["y", *map(str, np.random.default_rng(0).normal(size=9000))])
    content = bytearray(PACKERS[packer](text.encode()))
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2 : len(content) // 2 + 50] = b"\xff" * 50
    else:
        content = bytearray(b"y\n1\n2\n")
    path = tmp_path / f"x.csv.{packer}"
    path.write_bytes(content)
    refusal(path)
    refusal(path, in_parts)


@pytest.mark.parametrize("damage", ["cut", "flipped", "directory", "empty", "text"])
def test_damaged_archives(damage: str, tmp_path: Path) -> None:
    text = "\n".join(["y", *map(str, np.random.default_rng(0).normal(size=9000))])
    path = zipped(tmp_path / "x.zip", text.encode())
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2 : len(content) // 2 + 50] = b"\xff" * 50
    elif damage == "directory":
        start = content.rfind(b"PK\x01\x02")
        content[start : start + 4] = b"\x00" * 4
    else:
        content = bytearray(b"" if damage == "empty" else b"y\n1\n2\n")
    path.write_bytes(content)
    refusal(path)
    assert series_files(tmp_path) == [path]


def test_an_encrypted_archive_is_named(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", b"y\n1\n2\n")
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.find(mark) + offset] |= 1
    path.write_bytes(content)
    assert "encrypted" in refusal(path)


# --- contradictory --------------------------------------------------------------------------------


def twice_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1.0, 2.0])] * 2, names=["y", "y"]), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.csv", lambda path: path.write_text("date,y,y\n2024-01-01,1,2\n2024-01-02,3,4\n")),
        ("s.csv", lambda path: path.write_text("date, y,y\n2024-01-01,1,2\n2024-01-02,3,4\n")),
        ("x.jsonl", lambda path: path.write_text('{"id": "a", "y": [1, 2], "y": [3, 4]}\n')),
        ("x.parquet", twice_parquet),
    ],
)
def test_a_column_name_that_comes_twice_is_refused(
    name: str, write: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path / name)
    for read in (read_file, in_parts):
        assert "'y'" in refusal(tmp_path / name, read)


@pytest.mark.parametrize("times", [False, True])
def test_empty_lists_are_series_that_are_too_short(tmp_path: Path, times: bool) -> None:
    days = [f"2024-01-0{day}" for day in range(1, 6)]
    records: list[dict[str, Any]] = [
        {"id": "a", "target": [], "timestamp": []},
        {"id": "b", "target": [1, 2, 3, 4, 5], "timestamp": days},
        {"id": "c", "target": [], "timestamp": []},
    ]
    for record in records:
        if not times:
            del record["timestamp"]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    read = read_series(path)
    assert [values.tolist() for values in read] == [[1, 2, 3, 4, 5]]
    assert read.summary is not None
    assert read.summary.too_short_names == ("a", "c")
    assert len(list(iterate_series(path))) == 3


@pytest.mark.parametrize("times", [False, True])
def test_nothing_but_empty_lists_is_refused(tmp_path: Path, times: bool) -> None:
    record = {"id": "a", "target": []} | ({"timestamp": []} if times else {})
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    assert "no series" in refusal(tmp_path / "x.jsonl", read_series)


def test_joined_ids_stay_apart(tmp_path: Path) -> None:
    """Of shop `a/b`, item `c` and of shop `a`, item `b/c` the joined name is the same."""
    days = ["2024-01-01", "2024-01-02", "2024-01-03"]
    table = pd.DataFrame(
        {"shop": ["a/b"] * 3 + ["a"] * 3, "item": ["c"] * 3 + ["b/c"] * 3, "date": days * 2}
    )
    table.assign(y=range(6)).to_csv(tmp_path / "x.csv", index=False)
    form = SeriesFormat(id_column="shop,item")
    assert "'a/b/c'" in refusal(tmp_path / "x.csv", lambda path: read_file(path, form))
    table.assign(y=range(6), shop=["x/y"] * 3 + ["z"] * 3).to_csv(tmp_path / "ok.csv", index=False)
    names = [one.name for one in read_file(tmp_path / "ok.csv", form).series]
    assert names == ["x/y/c", "z/b/c"]


def test_control_characters_in_ids_reach_no_terminal(tmp_path: Path) -> None:
    names = ["a\x1b[31m", "b\nc", "d\x00", "e\u202ef"]
    lines = [json.dumps({"id": name, "target": [1, 2, 3, 4]}) for name in names]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    assert [one.name for one in read_file(path).series] == names
    outcome = CliRunner().invoke(app, ["series", str(path)])
    assert outcome.exit_code == 0, outcome.output
    assert not {"\x1b", "\x00", "\u202e"} & set(outcome.output)
    path.write_text(path.read_text() + '\n{"id": "b\\nc", "target": [1]}')
    assert "'b\\nc'" in refusal(path)


def test_a_zero_byte_in_a_cell_is_refused(tmp_path: Path) -> None:
    rows = [f"2024-01-{day:02d},{day}" for day in range(1, 29)]
    text = "\n".join(["date,y", *rows])
    (tmp_path / "cut.csv").write_text(text.replace(",12", ",1\0002"))
    assert "zero bytes" in refusal(tmp_path / "cut.csv")
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        (tmp_path / "wide.csv").write_text(text, encoding=encoding)
        found = read_file(tmp_path / "wide.csv", SeriesFormat(encoding=encoding)).series
        assert list(found[0].values) == list(range(1, 29))
        assert "--encoding" in refusal(tmp_path / "wide.csv")
