"""Parquet and Arrow (Feather) files to tables, bounded by memory before they are converted.

A few bytes may declare a billion equal values, or one list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tscompress.io.memory import available_bytes

ARROW = (".arrow", ".feather")
#: Values of a part of a file that is read in parts; rows in it follow from their length.
VALUES_AT_ONCE = 2**24
_BYTES_PER_VALUE = 16  # of a table and of the series that are made of it


def read_arrow_table(path: Path, kind: str) -> pd.DataFrame:
    """A whole file; ``kind`` is its suffix.

    Raises
    ------
    ValueError
        It is damaged, or memory cannot hold its values.
    """
    return _READERS[kind](path)


def arrow_parts(path: Path, kind: str, rows: int, lists: int) -> Iterator[pd.DataFrame]:
    """The same in parts of at most ``rows`` rows, or ``lists`` where rows hold whole series."""
    return _PARTS[kind](path, rows, lists)


def check_values(count: int) -> None:
    """Refuse values that free memory cannot hold.

    Raises
    ------
    ValueError
    """
    needed, available = _BYTES_PER_VALUE * count, available_bytes()
    if needed > available:
        raise ValueError(
            f"{count:,} values need about {needed / 1e9:,.0f} GB, {available / 1e9:,.0f} GB are "
            "free; split it"
        )


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        check_values(sum(_declared(file.metadata.row_group(i)) for i in range(file.num_row_groups)))
        return _frame(file.read())


def _declared(group: Any) -> int:
    """Values of a row group as its columns declare them, those of lists one by one."""
    return sum(max(group.num_rows, group.column(i).num_values) for i in range(group.num_columns))


def _read_arrow(path: Path) -> pd.DataFrame:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader, batches = _arrow_reader(source)
        found, count = [], 0
        for batch in batches:
            count += _checked(batch)
            check_values(count)
            found.append(batch)
        return _frame(pa.Table.from_batches(found, reader.schema))


def _frame(table: Any) -> pd.DataFrame:
    for batch in table.to_batches():
        _checked(batch)
    frame: pd.DataFrame = table.to_pandas()
    return frame


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": _read_parquet,
    **dict.fromkeys(ARROW, _read_arrow),
}


def _arrow_reader(source: Any) -> tuple[Any, Iterable[Any]]:
    """Of the file format, or of the stream format, in which datasets keeps its files."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_stream(source)
        return reader, reader
    return reader, (reader.get_batch(index) for index in range(reader.num_record_batches))


def _parquet_parts(path: Path, rows: int, lists: int) -> Iterator[pd.DataFrame]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        most = lists if any(_is_list(field.type) for field in file.schema_arrow) else rows
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            each = _declared(group) // max(group.num_rows, 1)  # values of a row
            check_values(each)
            size = max(1, min(most, VALUES_AT_ONCE // max(each, 1)))
            for batch in file.iter_batches(batch_size=size, row_groups=[index]):
                _checked(batch)
                yield batch.to_pandas()


def _arrow_parts(path: Path, rows: int, lists: int) -> Iterator[pd.DataFrame]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader, batches = _arrow_reader(source)
        most = lists if any(_is_list(field.type) for field in reader.schema) else rows
        for batch in batches:
            _checked(batch)
            for start in range(0, batch.num_rows, most):
                yield batch.slice(start, most).to_pandas()


_PARTS: dict[str, Callable[[Path, int, int], Iterator[pd.DataFrame]]] = {
    ".parquet": _parquet_parts,
    **dict.fromkeys(ARROW, _arrow_parts),
}


def _checked(batch: Any) -> int:
    """Values of a record batch, those of lists one by one.

    pyarrow trusts files blindly, so that offsets are validated first.

    Raises
    ------
    ValueError
        An offset or a length points outside, or memory cannot hold the values.
    """
    batch.validate(full=True)
    count = 0
    for column in batch.columns:
        count += _values_of(column)
        check_values(count)
    return count


def _values_of(array: Any) -> int:
    import pyarrow.compute as pc

    count = len(array)
    while _is_list(array.type):
        inside = pc.sum(pc.list_value_length(array)).as_py() or 0
        check_values(count + inside)  # before a view of one list a thousand times is spelled out
        array = array.flatten()
        count += inside
    return count


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    tests = (getattr(pa.types, f"is_{name}", None) for name in names)
    return any(test is not None and test(kind) for test in tests)
