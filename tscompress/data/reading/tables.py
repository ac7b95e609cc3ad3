"""Files to tables of cells: delimited text, Parquet, Arrow (Feather) and JSON lines.

Cells of text files stay text: 007 is a name, and what a number is depends on the decimal sign.
"""

from __future__ import annotations

import csv
import itertools
import json
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd

from tscompress.data.reading.arrow_files import (
    ARROW,
    VALUES_AT_ONCE,
    arrow_parts,
    read_arrow_table,
)
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.packed import COMPRESSED, only_member, open_text
from tscompress.errors import DataError
from tscompress.io.untrusted import shown, single_line

_TEXT = (".csv", ".tsv")
_JSON = (".jsonl", ".json", ".ndjson")
#: Of uncompressed files; text may also be compressed.
SUFFIXES = (*_TEXT, ".parquet", *ARROW, *_JSON)

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
        RecursionError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, csv.Error,
    ) as error:  # fmt: skip
        raise DataError(f"{path.name!r} cannot be read: {single_line(error)}.") from None


def kind_of(path: str | Path) -> str:
    """Kind of a file, one of :data:`SUFFIXES`; empty for other files.

    ``sales.csv.gz`` is CSV; ``sales.zip`` is what its only member is, and CSV if it is not there.
    """
    path = Path(path)
    outer = path.suffix.lower()
    if outer not in COMPRESSED:
        return outer if outer in SUFFIXES else ""
    inner = Path(path.stem).suffix.lower()
    if outer == ".zip" and not inner:
        inner = ".csv"
        with suppress(OSError, zipfile.BadZipFile):  # it is refused when it is read
            inner = Path(only_member(path)).suffix.lower() if path.is_file() else inner
    return inner if inner in (*_TEXT, *_JSON) else ""


def read_frame(path: Path, form: SeriesFormat) -> tuple[pd.DataFrame, SeriesFormat]:
    """All cells of a file, and ``form`` with the separator that was found.

    Raises
    ------
    ValueError, OSError, ImportError
        And what else the libraries raise; see :func:`naming_file`.
    """
    kind = kind_of(path)
    if kind in _TEXT:
        form, _ = _with_separator(path, kind, form)
        with open_text(path, form.encoding, whole=True) as stream:
            return _checked(pd.read_csv(stream, **_csv_options(form))), form
    if kind in _JSON:
        with open_text(path, form.encoding, whole=True) as stream:
            return pd.DataFrame(list(_records(stream))), form
    return read_arrow_table(path, kind), form


def read_parts(path: Path, form: SeriesFormat) -> Iterator[tuple[pd.DataFrame, SeriesFormat]]:
    """The same in parts, of which the rows follow one another."""
    kind = kind_of(path)
    if kind in _TEXT:
        form, columns = _with_separator(path, kind, form)
        rows = max(1, min(ROWS_AT_ONCE, VALUES_AT_ONCE // columns))
        with (
            open_text(path, form.encoding, whole=False) as stream,
            pd.read_csv(stream, chunksize=rows, **_csv_options(form)) as chunks,
        ):
            for chunk in chunks:
                yield _checked(chunk), form
    elif kind in _JSON:
        with open_text(path, form.encoding, whole=False) as stream:
            for frame in record_parts(_records(stream)):
                yield frame, form
    else:
        for frame in arrow_parts(path, kind, ROWS_AT_ONCE, LISTS_AT_ONCE):
            yield frame, form


def record_parts(records: Iterable[dict[str, Any]]) -> Iterator[pd.DataFrame]:
    """Rows in parts: few where they hold lists, many of single values."""
    rows = iter(records)
    first = next(rows, None)
    if first is None:
        return
    lists = any(map(pd.api.types.is_list_like, first.values()))
    single = max(1, min(ROWS_AT_ONCE, VALUES_AT_ONCE // max(1, len(first))))
    rows = itertools.chain([first], rows)
    while part := list(itertools.islice(rows, LISTS_AT_ONCE if lists else single)):
        yield pd.DataFrame(part)


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


def _with_separator(path: Path, kind: str, form: SeriesFormat) -> tuple[SeriesFormat, int]:
    """The notation with the separator that was found, and how many columns the header names.

    Raises
    ------
    ValueError
        Two columns have the same name, which pandas would change; or as :func:`_separator`.
    """
    form = form.model_copy(update={"separator": _separator(path, kind, form)})
    with open_text(path, form.encoding, whole=False) as stream:
        header = next(filter(any, csv.reader(stream, delimiter=form.separator or ",")), [])
    names = Counter(name.strip() for name in header)
    twice = [name for name, count in names.items() if name and count > 1]
    if twice:
        raise ValueError(f"several columns are named {shown(twice[0])}")
    return form, max(len(header), 1)


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
    with open_text(path, form.encoding, whole=False) as stream:
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
        record = json.loads(line, object_pairs_hook=_distinct)
        if not isinstance(record, dict):
            raise ValueError(
                f"line {number} is {shown(record)}; each line holds one object, such as "
                '{"target": [1, 2, 3]}'
            )
        yield record


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of whose equal keys Python keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"several columns are named {shown(twice)}")
    return found
