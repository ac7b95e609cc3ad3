"""Tables of series in long format, one row an observation: reading them, and onto a regular grid.

Calibration takes such files as they are. Evaluation forecasts the last steps of every series, so
that the steps have to be known: times are put onto the grid of one frequency, and what is missing
on it is NaN.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
Integers = npt.NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Columns
# --------------------------------------------------------------------------------------------------


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


def _numbers(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
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


def _times(column: pd.Series[Any]) -> Times:
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


# --------------------------------------------------------------------------------------------------
# Regular grids
# --------------------------------------------------------------------------------------------------

_DAY = 86_400 * 10**9  # nanoseconds
_UNITS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("s", "S"), ("fixed", 10**9)),
    **dict.fromkeys(("min", "T"), ("fixed", 60 * 10**9)),
    **dict.fromkeys(("h", "H"), ("fixed", 3600 * 10**9)),
    "D": ("fixed", _DAY),
    "B": ("business days", 1),
    "W": ("fixed", 7 * _DAY),
}
_MONTHS = {"M": 1, "Q": 3, "Y": 12, "A": 12}
#: A series with rows for less than this share of its steps has other steps than the file.
_MIN_OBSERVED_SHARE = 0.2


@dataclass(frozen=True)
class Step:
    """Distance of two observations: ``count`` nanoseconds, months or business days."""

    unit: Literal["fixed", "months", "business days"]
    count: int

    @classmethod
    def parse(cls, frequency: str) -> Step:
        """From a pandas frequency, of any of its versions: ``30min``, ``h``, ``W-SUN``, ``MS``.

        Raises
        ------
        ValueError
            It is none of seconds to years.
        """
        match = re.fullmatch(r"(\d{0,6})([A-Za-z]+)(?:-\w+)?", frequency.strip())
        count, name = (match[1], match[2]) if match else ("", "")
        factor = int(count or 1)
        if factor and name in _UNITS:
            unit, size = _UNITS[name]
            if unit == "fixed" or factor == 1:
                return cls(unit, factor * size)  # type: ignore[arg-type]
        if factor and (long := LONG_STEP.fullmatch(name)):
            return cls("months", factor * _MONTHS[long["unit"]])
        raise ValueError(
            f"{frequency!r} is no frequency; use a number and one of s, min, h, D, B, W, M, Q, Y, "
            "such as 30min"
        )

    @classmethod
    def infer(cls, stamps: Times, same_series: npt.NDArray[np.bool_]) -> Step:
        """The most common distance of two rows of a series.

        Parameters
        ----------
        stamps
            ``[N]``, sorted within each series.
        same_series
            ``[N - 1]``: whether a row and the next are of one series.

        Raises
        ------
        ValueError
            No series has two rows.
        """
        nanoseconds: Integers = stamps.astype(np.int64)
        steps: Integers = np.diff(nanoseconds)[same_series]
        if not steps.size:
            raise ValueError("no series has two times, so that its frequency is unknown")
        common = _most_common(steps)
        if common == _DAY and _on_business_days(stamps) and (steps == 3 * _DAY).any():
            return cls("business days", 1)
        weeks = len(steps) > 2 and common % (7 * _DAY) == 0 and not (steps % common).any()
        if common < 28 * _DAY or weeks:
            return cls("fixed", common)
        return cls("months", max(1, _most_common(np.diff(_months(stamps))[same_series])))

    def positions(self, stamps: Times) -> Integers | None:
        """Steps from the first of sorted times to each; None if one lies off the grid."""
        if self.unit == "business days":
            if not _on_business_days(stamps):
                return None
            days = stamps.astype("datetime64[D]")
            counted: Integers = np.busday_count(days[0], days).astype(np.int64)
            return counted
        values = _months(stamps) if self.unit == "months" else stamps.astype(np.int64)
        steps, rest = np.divmod(values - values[0], self.count)
        on_grid = not rest.any() and (np.diff(steps) > 0).all()
        return steps if on_grid else None

    @property
    def frequency(self) -> str:
        """As pandas names it for periods; business days count as days: it has none of those."""
        if self.unit == "business days":
            return "D"
        if self.unit == "months":
            names = {1: "M", 3: "Q", 12: "Y"}
            return names.get(self.count, f"{self.count}M")
        if self.count == 7 * _DAY:
            return "W"
        return str(pd.tseries.frequencies.to_offset(pd.Timedelta(self.count, "ns")).freqstr)

    @property
    def seasonality(self) -> int | None:
        """A working week; None where the frequency tells the season."""
        return 5 if self.unit == "business days" else None

    def __str__(self) -> str:
        return "business day" if self.unit == "business days" else self.frequency


def _months(stamps: Times) -> Integers:
    return stamps.astype("datetime64[M]").astype(np.int64)


def _on_business_days(stamps: Times) -> bool:
    days = stamps.astype("datetime64[D]")
    return bool(np.is_busday(days).all() and (stamps == days).all())


def _most_common(values: Integers) -> int:
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[counts.argmax()])


@dataclass(frozen=True)
class RegularSeries:
    """A series on a regular grid.

    Attributes
    ----------
    name
        Its id; empty for the only series of a table without ids.
    start
        Period of the first value.
    values
        ``[T]``; NaN where there is no observation, but for the first and the last.
    """

    name: str
    start: pd.Period
    values: npt.NDArray[np.float64]


def regular_series(
    frame: pd.DataFrame, columns: Columns | None = None, frequency: str | None = None
) -> tuple[Step, list[RegularSeries]]:
    """Split a long table into series on the grid of one step, in the order of their ids' first row.

    Rows are sorted by time; steps without a row are NaN; missing values at both ends are dropped.

    Parameters
    ----------
    columns
        Those that do not have the usual names.
    frequency
        See :meth:`Step.parse`; by default the most common distance of two rows.

    Raises
    ------
    ValueError
        A column is missing, a value is no number, times are not dates of one time zone, two rows
        have the same id and time, or times are not on the grid.
    """
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    if not len(frame):
        raise ValueError("there are no rows")
    identifier, time, target = (columns or Columns()).of(frame)
    numbers, names = np.zeros(len(frame), dtype=np.int64), [""]
    if identifier is not None:
        if frame[identifier].isna().any():
            raise ValueError(f"{frame[identifier].isna().sum()} rows have no id")
        numbers, unique = pd.factorize(frame[identifier])
        names = [str(name) for name in unique]
    values, stamps = _numbers(frame[target]), _times(frame[time])
    order = np.lexsort((stamps, numbers))
    numbers, values, stamps = numbers[order], values[order], stamps[order]
    same_series = np.diff(numbers) == 0
    _check_distinct(numbers, names, stamps, same_series)
    step = Step.infer(stamps, same_series) if frequency is None else Step.parse(frequency)
    bounds = np.flatnonzero(~same_series) + 1
    parts = zip(names, np.split(values, bounds), np.split(stamps, bounds), strict=True)
    return step, [_on_grid(name, part, times, step) for name, part, times in parts]


def _check_distinct(
    numbers: Integers, names: list[str], stamps: Times, same_series: npt.NDArray[np.bool_]
) -> None:
    repeated = np.flatnonzero(same_series & (stamps[1:] == stamps[:-1]))
    if repeated.size:
        first = repeated[0]
        of = f" of series {names[numbers[first]]!r}" if len(names) > 1 else ""
        raise ValueError(
            f"{repeated.size} rows repeat a time, the first {_shown_time(stamps[first])}{of}; keep "
            "one row for each id and time, and write hours in UTC where clocks are put back"
        )


def _on_grid(
    name: str, values: npt.NDArray[np.float64], stamps: Times, step: Step
) -> RegularSeries:
    of = f" of series {name!r}" if name else ""
    positions = step.positions(stamps)
    if positions is None:
        raise ValueError(
            f"the times{of} are not regular: not all are whole steps of one {step} from "
            f"{_shown_time(stamps[0])}; resample them, or give --frequency"
        )
    length = int(positions[-1]) + 1
    if len(positions) < _MIN_OBSERVED_SHARE * length:
        raise ValueError(
            f"{len(positions)} rows{of} cover {length:,} steps of one {step}; put series of other "
            "frequencies into files of their own, or give --frequency"
        )
    grid = np.full(length, np.nan)
    grid[positions] = values
    observed = np.flatnonzero(np.isfinite(grid))
    first, last = (observed[0], observed[-1]) if observed.size else (0, -1)
    start = pd.Period(pd.Timestamp(stamps[0]), freq=step.frequency) + int(first)
    return RegularSeries(name, start, grid[first : last + 1])


def _shown_time(stamp: np.datetime64) -> str:
    return str(pd.Timestamp(stamp))
