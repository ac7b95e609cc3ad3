"""Observations of a table onto the regular grid of one frequency.

Evaluation forecasts the last steps of every series, so the steps must be known: times are put onto
the grid of one frequency, and what is missing on it is NaN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.data.tables import LONG_STEP, Columns, Times, parse_times, target_values

Integers = npt.NDArray[np.int64]

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
    values, stamps = target_values(frame[target]), parse_times(frame[time])
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
