"""Cells to numbers: every file has the same bits of the same series, however large it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscompress.data.reading import values as cells
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import read_file
from tscompress.data.reading.values import Decimal, find_decimal, target_values

doubles = st.floats(-1e18, 1e18).filter(lambda value: value == 0 or abs(value) > 1e-300)


@settings(deadline=None, max_examples=200)
@given(st.lists(doubles, min_size=1, max_size=20))
def test_text_has_the_bits_of_the_double(numbers: list[float]) -> None:
    table = pd.DataFrame({"y": list(map(repr, numbers))}, dtype=object)
    for frame in (table, pd.concat([table, pd.DataFrame({"y": ["", "NA"]})])):
        found = target_values(frame, ".")[: len(numbers), 0]
        assert found.tobytes() == np.array(numbers).tobytes()
    comma = table.assign(y=[repr(number).replace(".", ",") for number in numbers])
    assert target_values(comma, ",")[:, 0].tobytes() == np.array(numbers).tobytes()


def test_text_lines_and_parquet_have_the_same_bits(tmp_path: Path) -> None:
    """pandas reads 8.71466e-66 and the like a bit off, unless it is told not to."""
    rng = np.random.default_rng(0)
    numbers = (rng.normal(size=(3, 500)) * 10.0 ** rng.integers(-30, 17, (3, 500))).tolist()
    table = pd.DataFrame(numbers, columns=[f"d_{step}" for step in range(1, 501)])
    table.insert(0, "id", ["a", "b", "c"])
    table.astype(object).map(str).to_csv(tmp_path / "x.csv", index=False)
    records = [json.dumps({"id": i, "target": row}) for i, row in zip("abc", numbers, strict=True)]
    (tmp_path / "x.jsonl").write_text("\n".join(records))
    table.to_parquet(tmp_path / "x.parquet")
    for name in ("x.csv", "x.jsonl", "x.parquet"):
        read = read_file(tmp_path / name)
        assert [one.values.tobytes() for one in read.series] == [
            np.array(row).tobytes() for row in numbers
        ]


@pytest.mark.parametrize("most", [1, 7, 2**20])
@pytest.mark.parametrize("decimal", [".", ","])
def test_blocks_of_columns_change_nothing(
    most: int, decimal: Decimal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "CELLS_AT_ONCE", most)
    values = np.arange(24.0).reshape(4, 6) / 8
    table = pd.DataFrame(values, columns=list("abcdef"), dtype=object).map(str)
    table = table.map(lambda text: text.replace(".", decimal)).assign(c=values[:, 2], d=range(4))
    table.loc[1, "a"] = "NA"
    expected = values.copy()
    expected[1, 0], expected[:, 3] = np.nan, range(4)
    assert (find_decimal(table, None) or ".") == decimal
    np.testing.assert_array_equal(target_values(table, decimal), expected)
    with pytest.raises(ValueError, match=r"'e'.* row 3"):
        target_values(table.assign(e=["1", "2", "x", "y"]), decimal)


@pytest.mark.parametrize("cell", ["1_000", "٣", "0x10", "1e", "nan(1)", "True", "--1", "inf"])
def test_cells_that_python_alone_reads_are_no_numbers(cell: str) -> None:
    with pytest.raises(ValueError, match="'y'"):
        target_values(pd.DataFrame({"y": ["1.5", cell]}, dtype=object), ".")


def test_columns_of_one_table_have_one_decimal_sign() -> None:
    table = pd.DataFrame({"a": ["1,5", "2"], "b": ["1.5", "2"]}, dtype=object)
    with pytest.raises(ValueError, match="decimal comma"):
        find_decimal(table, ";")
    assert find_decimal(table[["a"]], ";") == ","
    assert find_decimal(table[["b"]], ";") == "."


def test_rows_that_are_series_make_no_objects_for_each_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of the width of M5: cells become numbers in blocks, not column by column."""
    steps = pd.DataFrame(np.ones((20, 1913), dtype=int), columns=[f"d_{i}" for i in range(1913)])
    steps.insert(0, "id", [f"item{row}" for row in range(20)])
    steps.to_csv(tmp_path / "m5.csv", index=False)
    made: list[int] = []
    plain = pd.Series.__init__
    monkeypatch.setattr(
        pd.Series, "__init__", lambda self, *a, **k: (made.append(1), plain(self, *a, **k))[1]
    )
    read = read_file(tmp_path / "m5.csv", SeriesFormat(frequency="D"))
    assert len(read.series) == 20
    assert len(made) < 2 * 1913  # read_csv itself makes one a column
