"""Tables of series in long format, one row an observation: files, columns, values and times."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil

from tscompress.errors import DataError
from tscompress.io.untrusted import shown, single_line

ID_COLUMNS = ("item_id", "id", "unique_id", "series_id", "series")
TIME_COLUMNS = ("timestamp", "time", "ds", "date", "datetime")
TARGET_COLUMNS = ("target", "y", "value")

#: Steps of pandas, of all its versions: business and custom variants, starts and ends of periods.
LONG_STEP = re.compile(r"(?:B|CB)?(?P<unit>[AYQM])[SE]?")

Times = npt.NDArray[np.datetime64]


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
    # pyarrow's errors are ValueErrors, but for NotImplementedErrors; numbers that numpy cannot hold
    # are ArithmeticErrors.
    except (
        OSError, ValueError, KeyError, TypeError, IndexError, ArithmeticError, NotImplementedError,
        RecursionError,
    ) as error:  # fmt: skip
        raise DataError(f"{path.name!r} cannot be read: {single_line(error)}.") from None


def read_frame(path: Path) -> pd.DataFrame:
    """A CSV, Parquet or Arrow (Feather) file, whatever its columns.

    Raises
    ------
    ValueError, OSError, ImportError
        And what else the libraries raise; see :func:`naming_file`.
    """
    return _FRAME_READERS[path.suffix.lower()](path)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        check_rows(file.metadata.num_rows, file.metadata.num_columns)
        return _frame(file.read())


def _read_arrow(path: Path) -> pd.DataFrame:
    import pyarrow.feather

    table = pyarrow.feather.read_table(path, memory_map=True)
    check_rows(table.num_rows, table.num_columns)
    return _frame(table)


def _frame(table: Any) -> pd.DataFrame:
    frame: pd.DataFrame = whole(table).to_pandas()
    return frame


_FRAME_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    # Read in parts, a column may be of numbers in one and of names in the next.
    ".csv": lambda path: pd.read_csv(path, low_memory=False),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
TABLE_SUFFIXES = tuple(_FRAME_READERS)


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


def first_of(columns: dict[str, Any], names: Sequence[str]) -> Any | None:
    """The first of ``names`` that is there, as the table spells it."""
    return next((columns[name] for name in names if name in columns), None)


def sort_by_time(column: Any) -> tuple[Any, Any]:
    """Positions in order of time, and the times in that order, datetime64; None for numbers.

    What is neither a number nor a date comes last, as NaT.
    """
    numbers = pd.api.types.is_numeric_dtype(column)
    if not numbers:
        column = pd.to_datetime(column, errors="coerce", utc=True, format="mixed")
    column = column.reset_index(drop=True).sort_values(kind="stable")
    order = column.index.to_numpy()
    return order, None if numbers else column.to_numpy(dtype="datetime64[ms]")


def floats(values: Any) -> npt.NDArray[np.float32]:
    """Numbers as float32; what is no number, or too large for one, is NaN."""
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
    # What float32 cannot hold is no more usable than what is missing.
    numbers = np.where(np.abs(numbers) < np.finfo(np.float32).max, numbers, np.nan)
    single: npt.NDArray[np.float32] = numbers.astype(np.float32)
    return single


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a long table; None: one of the usual names."""

    id: str | None = None
    time: str | None = None
    target: str | None = None

    def of(self, frame: pd.DataFrame) -> tuple[Any | None, Any, Any]:
        """Columns of ids, times and values, as the table spells them; without ids one series.

        Raises
        ------
        ValueError
            A column is not there.
        """
        return (
            _column(frame, "id", self.id, ID_COLUMNS, required=False),
            _column(frame, "time", self.time, TIME_COLUMNS),
            _column(frame, "target", self.target, TARGET_COLUMNS),
        )


def _column(
    frame: pd.DataFrame, role: str, given: str | None, usual: Sequence[str], required: bool = True
) -> Any | None:
    spelled = {str(column): column for column in frame.columns}
    if given is not None:
        if given not in spelled:
            raise ValueError(f"there is no column {given!r}; it has {shown(list(spelled))}")
        return spelled[given]
    found = first_of({name.lower(): column for name, column in spelled.items()}, usual)
    if found is None and required:
        raise ValueError(
            f"no {role} column among {shown(list(spelled))}; name one of {', '.join(usual)}, "
            f"or give --{role}-column"
        )
    return found


def target_values(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """Values as float64, missing ones NaN; a text that is no number is a mistake in the file."""
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    blank = column.isna() | column.astype(str).str.strip().eq("")
    usable = np.abs(numbers) < np.finfo(np.float32).max  # models compute in single precision
    bad = np.flatnonzero(~usable & ~blank.to_numpy())
    if bad.size:
        raise ValueError(
            f"{bad.size} values of column {str(column.name)!r} are no finite numbers, the first "
            f"is {single_line(column.iloc[bad[0]])!r}"
        )
    return numbers


_UTC = ("Z", "UTC", "GMT", "+00", "+0000", "+00:00")
_OFFSET = r"(?P<offset>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"
_TIME_WITH_OFFSET = r"\d:\d{2}.*?\s*" + _OFFSET


def parse_times(column: pd.Series[Any]) -> Times:
    """Times of all rows, datetime64[ns]; of one time zone, which is dropped."""
    name = str(column.name)
    if pd.api.types.is_numeric_dtype(column):
        raise ValueError(f"column {name!r} holds numbers; write times as dates, as in 2024-01-31")
    codes, unique = pd.factorize(column)
    missing = int((codes < 0).sum())
    if missing:
        raise ValueError(f"{missing} rows have no time in column {name!r}")
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        index = pd.DatetimeIndex(unique)
        wall = index.tz_localize(None)
        # Local days have 23 or 25 hours now and then: dates are counted as dates.
        index = wall if (wall == wall.normalize()).all() else index.tz_convert("UTC")
        parsed = index.tz_localize(None)
    elif pd.api.types.is_datetime64_dtype(column):
        parsed = pd.DatetimeIndex(unique)
    else:
        parsed = _parsed(pd.Series(unique).astype(str).str.strip(), name)
    times: Times = parsed.to_numpy().astype("datetime64[ns]")[codes]
    return times


def _parsed(texts: pd.Series[str], name: str) -> pd.DatetimeIndex:
    zones = texts.str.extract(_TIME_WITH_OFFSET, expand=True)["offset"]
    zones = zones.where(~zones.isin(_UTC), "UTC").fillna("none")
    if zones.nunique() > 1:
        raise ValueError(
            f"column {name!r} mixes time zones ({', '.join(sorted(zones.unique())[:4])}); write "
            "all times in UTC, or all without an offset"
        )
    if zones.iloc[0] != "none":
        texts = texts.str.replace(_OFFSET, "", regex=True).str.strip()
    try:
        return pd.DatetimeIndex(pd.to_datetime(texts, format="ISO8601"))
    except ValueError:
        pass
    readings = [
        reading
        for reading in (_read_alike(texts, False), _read_alike(texts, True))
        if reading is not None
    ]
    if not readings or not readings[0].equals(readings[-1]):
        reason = "with days or months first" if readings else "that are no dates, or of many forms"
        raise ValueError(
            f"column {name!r} holds times {reason}, such as {shown(texts.iloc[0])}; write them as "
            "in 2024-01-31 or 2024-01-31 13:30"
        )
    return readings[0]


def _read_alike(texts: pd.Series[str], day_first: bool) -> pd.DatetimeIndex | None:
    """All times by the form of the first one; None if they have not the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = pd.DatetimeIndex(pd.to_datetime(texts, dayfirst=day_first))
        except ValueError:
            return None
    # pandas warns before it guesses the form of each time alone, days and months mixed up.
    return None if any("infer format" in str(one.message) for one in caught) else found
