"""One evaluation dataset: how it is asked for, and its series with the steps to forecast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from gluonts.time_feature.seasonality import get_seasonality
from pydantic import ConfigDict, Field

from tscompress.data.covariates import SeriesCovariates
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.read import SeriesFile
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.reading.time_grid import Step
from tscompress.errors import DataError
from tscompress.io.strict import Strict
from tscompress.runtime.quantiles import DEFAULT_LEVELS

SeriesArray = npt.NDArray[np.float64]

#: Levels at which forecasts are asked for and scored.
QUANTILE_LEVELS = list(DEFAULT_LEVELS)


class LongFormat(SeriesFormat):
    """How a file of series is written and evaluated."""

    horizon: int = Field(ge=1, description="steps to forecast")
    windows: int = Field(default=1, ge=1, description="consecutive ones, the last ends each series")
    seasonality: int | None = Field(default=None, ge=1, description="null: by the frequency")


class DatasetConfig(Strict):
    """One backtest, with the keys of the official Chronos benchmark configs.

    ``offset`` counts steps from the end of a series to the first forecast origin:
    −``prediction_length`` · ``num_rolls`` forecasts the last windows, one after another; a smaller
    number leaves the steps behind the last window unused.
    """

    name: str
    hf_repo: str
    offset: int = Field(lt=0)
    prediction_length: int = Field(ge=1)
    num_rolls: int = Field(default=1, ge=1)

    @property
    def unused_steps(self) -> int:
        """Steps after the last forecast window, which neither context nor label contains."""
        return -self.offset - self.prediction_length * self.num_rolls


class FileConfig(DatasetConfig):
    """A backtest on a file of series."""

    hf_repo: str = ""
    path: Path
    table: LongFormat


class TableConfig(DatasetConfig):
    """A backtest on a table in memory, which has been read."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    hf_repo: str = ""
    read: SeriesFile
    table: LongFormat


@dataclass(frozen=True)
class EvaluationDataset:
    """Series of one frequency, each ending with the ``horizon`` steps to forecast.

    With several ``windows`` each measured series is here ``windows`` times, one after another, cut
    where each window ends.

    Attributes
    ----------
    name
        As in the published result tables, e.g. ``monash_m1_monthly``.
    horizon
        Steps to forecast.
    series
        Each ``[T_i]`` float64 with ``T_i > horizon``; missing values are NaN.
    starts
        Period of the first value of each series; all have the same frequency.
    season_length
        Steps in a season where the frequency does not define them; None: see :attr:`seasonality`.
    windows
        How many of ``series`` are cut from the same measurements.
    names
        Of each of ``series`` in its file; empty where they have none.
    summary
        What was read from the file; None if it is not from one.
    step
        Distance of two values; None where that is not known.
    begins
        Time of the first value of each of ``series``; empty where they have no times. Unlike
        ``starts``, which some series get only for their frequency.
    covariates
        Of each of ``series``; empty where they have none.
    groups
        Of each of ``series``, equal for those that are forecast together; empty: each by itself.
    notes
        What a user may not expect of its forecasts.
    """

    name: str
    horizon: int
    series: tuple[SeriesArray, ...]
    starts: tuple[pd.Period, ...]
    season_length: int | None = None
    windows: int = 1
    names: tuple[str, ...] = ()
    summary: SeriesSummary | None = None
    step: Step | None = None
    begins: tuple[pd.Timestamp, ...] = ()
    covariates: tuple[SeriesCovariates, ...] = ()
    groups: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.series:
            raise DataError(f"dataset {self.name!r} has no series.")
        for index, values in enumerate(self.series):
            if values.ndim != 1 or len(values) <= self.horizon:
                raise DataError(
                    f"series {index} of {self.name!r} has shape {values.shape}; expected one "
                    f"dimension and more than the horizon of {self.horizon} steps."
                )
        for index, (values, beside) in enumerate(zip(self.series, self.covariates, strict=False)):
            where = f"series {index} of {self.name!r}"
            beside.check_fits(len(values) - self.horizon, self.horizon, where)

    @property
    def freq(self) -> str:
        """The pandas offset alias, e.g. ``ME``."""
        return str(self.starts[0].freq.freqstr)

    @property
    def seasonality(self) -> int:
        """``season_length``, or by gluonts' table: 24 for hours, 12 for months, 1 for days."""
        return self.season_length or int(get_seasonality(self.freq))

    @property
    def contexts(self) -> list[SeriesArray]:
        """What a model may see of each series, ``[T_i - horizon]``."""
        return [values[: -self.horizon] for values in self.series]

    @property
    def labels(self) -> SeriesArray:
        """What it has to forecast, ``[N, horizon]``."""
        return np.stack([values[-self.horizon :] for values in self.series])

    def series_name(self, index: int) -> str | None:
        """The name of a series in its file; None where it has none."""
        return self.names[index] or None if self.names else None

    def times(self, index: int, last: int) -> tuple[str, ...]:
        """ISO times of the ``last`` values of a series; empty where it has none."""
        if self.step is None or not self.begins:
            return ()
        length = len(self.series[index])
        return tuple(self.step.times(self.begins[index], range(length - last, length)))

    def entries(self) -> list[dict[str, Any]]:
        """The series as a gluonts dataset."""
        pairs = zip(self.starts, self.series, strict=True)
        return [{"start": start, "target": values} for start, values in pairs]
