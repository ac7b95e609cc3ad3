"""Files to tables of cells: delimited text, Parquet, Arrow (Feather) and JSON lines.

Cells of text files stay text: 007 is a name, and what a number is depends on the decimal sign.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import psutil

from tscompress.data.reading.format import SeriesFormat
from tscompress.errors import DataError
from tscompress.io.untrusted import shown, single_line

_TEXT = (".csv", ".tsv")
_JSON = (".jsonl", ".json", ".ndjson")
_ARROW = (".arrow", ".feather")
#: Of uncompressed files; text may also be compressed.
SUFFIXES = (*_TEXT, ".parquet", *_ARROW, *_JSON)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_COMPRESSED = (*_OPENERS, ".zip")

_SEPARATORS = ",;\t|"
_SAMPLE = 20  # lines that the separator is found in
ROWS_AT_ONCE = 65_536  # of a table that is read in parts
LISTS_AT_ONCE = 256  # rows, where each holds a whole series


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turns whatever a reader raises over a bad file into one DataError that names it."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path.name!r} needs {error.name}; install it with pip install 'tscompress[arrow]'."
        ) from None
    except MemoryError:
        raise DataError(f"{path.name!r} cannot be read: it does not fit into memory.") from None
    except UnicodeError as error:
        encoding = getattr(error, "encoding", "text")
        raise DataError(
            f"{path.name!r} cannot be read: it is not {encoding}; give --encoding, such as cp1252 "
            "or utf-16."
        ) from None
    # pyarrow's errors are ValueErrors, but for NotImplementedErrors; numbers that numpy cannot hold
    # are ArithmeticErrors; a truncated archive is an EOFError.
    except (
        OSError, ValueError, KeyError, TypeError, IndexError, ArithmeticError, NotImplementedError,
        RecursionError, EOFError, lzma.LZMAError, zipfile.BadZipFile, csv.Error,
    ) as error:  # fmt: skip
        raise DataError(f"{path.name!r} cannot be read: {single_line(error)}.") from None


def kind_of(path: str | Path) -> str:
    """The one of :data:`SUFFIXES` that says what is in a file; empty for other files.

    ``sales.csv.gz`` is CSV; ``sales.zip`` is what its only member is, and CSV if it is not there.
    """
    path = Path(path)
    outer = path.suffix.lower()
    if outer not in _COMPRESSED:
        return outer if outer in SUFFIXES else ""
    inner = Path(path.stem).suffix.lower()
    if outer == ".zip" and not inner:
        with_member = path.is_file() and zipfile.is_zipfile(path)
        inner = Path(_only_member(path)).suffix.lower() if with_member else ".csv"
    return inner if inner in (*_TEXT, *_JSON) else ""


def _only_member(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    return names[0] if len(names) == 1 else ""


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """A text file that may be compressed.

    Raises
    ------
    ValueError
        An archive holds more than one file.
    """
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    suffix = path.suffix.lower()
    if suffix != ".zip":
        opener = _OPENERS.get(suffix, open)
        with opener(path, "rt", encoding=encoding, newline="") as stream:
            yield stream
        return
    member = _only_member(path)
    if not member:
        raise ValueError("it holds several files, or none; put one into each archive")
    with (
        zipfile.ZipFile(path) as archive,
        archive.open(member) as raw,
        io.TextIOWrapper(raw, encoding=encoding, newline="") as stream,
    ):
        yield stream


def read_frame(path: Path, form: SeriesFormat) -> tuple[pd.DataFrame, SeriesFormat]:
    """All cells of a file, and ``form`` with the separator that was found.

    Raises
    ------
    ValueError, OSError, ImportError
        And what else the libraries raise; see :func:`naming_file`.
    """
    kind = kind_of(path)
    if kind in _TEXT:
        form = form.model_copy(update={"separator": _separator(path, kind, form)})
        with open_text(path, form.encoding) as stream:
            return _checked(pd.read_csv(stream, **_csv_options(form))), form
    if kind in _JSON:
        with open_text(path, form.encoding) as stream:
            return pd.DataFrame(list(_records(stream))), form
    return _TABLES[kind](path), form


def read_parts(path: Path, form: SeriesFormat) -> Iterator[tuple[pd.DataFrame, SeriesFormat]]:
    """The same in parts, of which the rows follow one another."""
    kind = kind_of(path)
    if kind in _TEXT:
        form = form.model_copy(update={"separator": _separator(path, kind, form)})
        with (
            open_text(path, form.encoding) as stream,
            pd.read_csv(stream, chunksize=ROWS_AT_ONCE, **_csv_options(form)) as chunks,
        ):
            for chunk in chunks:
                yield _checked(chunk), form
    elif kind in _JSON:
        with open_text(path, form.encoding) as stream:
            records = _records(stream)
            while part := list(itertools.islice(records, LISTS_AT_ONCE)):
                yield pd.DataFrame(part), form
    else:
        batches = _parquet_batches if kind == ".parquet" else _arrow_batches
        for frame in batches(path):
            yield frame, form


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


def _csv_options(form: SeriesFormat) -> dict[str, Any]:
    return {"sep": form.separator, "dtype": str, "keep_default_na": False, "low_memory": False}


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    """Refuse what pandas takes for an index: cells that no column name stands over."""
    if not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(
            "rows have more cells than the header; quote cells that hold the separator, or give "
            "--separator"
        )
    return frame


def _separator(path: Path, kind: str, form: SeriesFormat) -> str:
    """The given one, or the one at which the header and the first row fall into as many cells.

    Raises
    ------
    ValueError
        Several do that.
    """
    if form.separator is not None:
        return form.separator
    if kind == ".tsv":
        return "\t"
    with open_text(path, form.encoding) as stream:
        lines = list(itertools.islice(stream, _SAMPLE))
    widths = {
        one: [len(cells) for cells in csv.reader(lines, delimiter=one)][:2] for one in _SEPARATORS
    }
    several = {one: width for one, width in widths.items() if width and width[0] > 1}
    alike = [one for one, width in several.items() if len(set(width)) == 1]
    found = alike or list(several)
    if len(alike) > 1:
        raise ValueError(
            f"cells may be separated by {' or '.join(map(repr, alike))}; give --separator"
        )
    return found[0] if found else ","


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(
                f"line {number} is {shown(record)}; each line holds one object, such as "
                '{"target": [1, 2, 3]}'
            )
        yield record


# --------------------------------------------------------------------------------------------------
# Parquet and Arrow
# --------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        check_rows(file.metadata.num_rows, file.metadata.num_columns)
        return _frame(file.read())


def _read_arrow(path: Path) -> pd.DataFrame:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader, batches = _arrow_reader(source)
        found = list(batches)
        check_rows(sum(batch.num_rows for batch in found), len(reader.schema))
        return _frame(pa.Table.from_batches(found, reader.schema))


def _frame(table: Any) -> pd.DataFrame:
    frame: pd.DataFrame = whole(table).to_pandas()
    return frame


_TABLES: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": _read_parquet,
    **dict.fromkeys(_ARROW, _read_arrow),
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


def _parquet_batches(path: Path) -> Iterator[pd.DataFrame]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        rows = _batch_rows(file.schema_arrow)
        for batch in file.iter_batches(batch_size=rows):
            yield whole(batch).to_pandas()


def _arrow_batches(path: Path) -> Iterator[pd.DataFrame]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader, batches = _arrow_reader(source)
        rows = _batch_rows(reader.schema)
        for batch in batches:
            check_rows(batch.num_rows, batch.num_columns)
            whole(batch)
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows).to_pandas()


def _batch_rows(schema: Any) -> int:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    many = any(is_a(field.type) for field in schema for is_a in lists)
    return LISTS_AT_ONCE if many else ROWS_AT_ONCE


def check_rows(rows: int, columns: int) -> None:
    """Refuse a table that memory cannot hold: a few bytes may declare a billion equal values.

    Raises
    ------
    ValueError
    """
    needed, available = 16 * rows * columns, psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"{rows:,} rows need about {needed / 1e9:,.0f} GB, {available / 1e9:,.0f} GB are free"
        )


def whole(table: Any) -> Any:
    """``table`` of pyarrow, whose offsets are held against its buffers: it trusts files blindly.

    Raises
    ------
    ValueError
        An offset or a length points outside.
    """
    table.validate(full=True)
    return table
