"""Series from files and callers, for training and calibration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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
from tscompress.errors import DataError
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
