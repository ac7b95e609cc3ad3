"""Covariates of the series of an evaluation dataset: what is known where a forecast begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tscompress.data.reading.covariates import Column
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.errors import DataError
from tscompress.io.text import counted
from tscompress.io.untrusted import single_line


@dataclass(frozen=True)
class SeriesCovariates:
    """Covariates of one series of T steps, for a forecast of H steps.

    Columns are float64, NaN where missing, or text, None where missing.

    Attributes
    ----------
    past
        Name to ``[T]``, of every covariate.
    future
        Name to ``[H]``, of those known ahead.
    """

    past: Mapping[str, Column] = field(default_factory=dict)
    future: Mapping[str, Column] = field(default_factory=dict)

    def check_fits(self, steps: int, horizon: int, name: str) -> None:
        """Refuse columns of another length, and a future without a past.

        Raises
        ------
        DataError
            Names the series by ``name``, and the column.
        """
        if unknown := sorted(self.future.keys() - self.past.keys()):
            raise DataError(
                f"{name}: covariate {unknown[0]!r} has a future and no past; give both."
            )
        for columns, length, where in (
            (self.past, steps, "before the forecast"),
            (self.future, horizon, "over the horizon"),
        ):
            for key, column in columns.items():
                if np.shape(column) != (length,):
                    raise DataError(
                        f"{name}: covariate {key!r} has {np.size(column)} values {where}; give "
                        f"{length}."
                    )

    @property
    def new_categories(self) -> list[str]:
        """Names of covariates whose future has a category that their past lacks."""
        return [
            key
            for key, column in self.future.items()
            if column.dtype == object and not set(column) <= {None, *self.past[key]}
        ]


def covariates_until(
    one: RegularSeries, known: Sequence[str], end: int, horizon: int
) -> SeriesCovariates:
    """Covariates of a series for a forecast of the ``horizon`` steps before ``end``."""
    begin = end - horizon
    return SeriesCovariates(
        {key: column[:begin] for key, column in one.covariates.items()},
        {key: one.covariates[key][begin:end] for key in known},
    )


def check_known_ahead(
    series: Sequence[RegularSeries], known: Sequence[str], unused: int, horizon: int, file: str
) -> None:
    """Refuse covariates that end before the last step to forecast.

    A series without any value of a covariate is forecast without it.

    Parameters
    ----------
    unused
        Steps behind the last one to forecast.

    Raises
    ------
    DataError
        Names the first series and the column.
    """
    for one in series:
        end = len(one.values) - unused
        for key in known:
            column = one.covariates[key][:end]
            there = np.flatnonzero(~pd.isna(column))
            short = end - 1 - int(there[-1]) if there.size else 0
            if short:
                of = f" of series {single_line(one.name, 40)!r}" if one.name else ""
                raise DataError(
                    f"{file!r}: known covariate {key!r}{of} ends {counted(short, 'step')} before "
                    f"the last one to forecast, of {horizon} in a window; give its values, or name "
                    "it in --past-covariates."
                )


def notes_on(covariates: Sequence[SeriesCovariates], name: str) -> list[str]:
    """What a forecast with the covariates of a dataset does that a user may not expect."""
    counts: dict[str, int] = {}
    for one in covariates:
        for key in one.new_categories:
            counts[key] = counts.get(key, 0) + 1
    return [
        f"{name}: covariate {key!r} has categories over the horizon that are not in the past of "
        f"{count:,} of {len(covariates):,} forecasts; the model reads them as unknown"
        for key, count in counts.items()
    ]
