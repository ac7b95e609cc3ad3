"""Observations onto a regular grid: the steps between them, and where a value is missing.

Models read values alone, so that a row which is not there must become a missing value, and times
between two steps are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.data.reading.covariates import Column
from tscompress.data.reading.observed import Observed
from tscompress.data.reading.times import Times

Integers = npt.NDArray[np.int64]

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

#: Steps of pandas, of all its versions: business and custom variants, starts and ends of periods.
_LONG_STEP = re.compile(r"(?:B|CB)?(?P<unit>[AYQM])[SE]?")
_SHORT_STEPS = {
    **dict.fromkeys(("s", "S", "L", "ms", "U", "us", "N", "ns"), "s"),
    **dict.fromkeys(("min", "T"), "min"),
    **dict.fromkeys(("h", "H", "bh", "BH"), "h"),
    **dict.fromkeys(("D", "B", "C"), "D"),
    "W": "W",
}
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
#: From which rows at one distance from one another are of a step of their own.
_MIN_REGULAR_ROWS = 8


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
        if factor and (long := _LONG_STEP.fullmatch(name)):
            return cls("months", factor * _MONTHS[long["unit"]])
        raise ValueError(
            f"{frequency!r} is no frequency; use a number and one of s, min, h, D, B, W, M, Q, Y, "
            "such as 30min"
        )

    @classmethod
    def infer(cls, times: Sequence[Times]) -> Step | None:
        """The most common distance of two times of a series; None if no series has two.

        Parameters
        ----------
        times
            Of each series, sorted.
        """
        steps = np.concatenate([np.diff(one.astype(np.int64)) for one in times])
        if not steps.size:
            return None
        common = _most_common(steps)
        if common == _DAY and (steps == 3 * _DAY).any() and all(map(_on_business_days, times)):
            return cls("business days", 1)
        weeks = len(steps) > 2 and common % (7 * _DAY) == 0 and not (steps % common).any()
        if common < 28 * _DAY or weeks:
            return cls("fixed", common)
        months = np.concatenate([np.diff(_months(one)) for one in times])
        return cls("months", max(1, _most_common(months)))

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

    def times(self, begin: pd.Timestamp, steps: Sequence[int]) -> list[str]:
        """ISO 8601 times at these steps after the first one, as fine as a step is.

        Months as ``2024-03``, years as ``2024``, whole days without a time of day.

        Parameters
        ----------
        begin
            Time of step 0, without a time zone.
        """
        if self.unit == "months":
            form = "%Y" if self.count % 12 == 0 else "%Y-%m"
            first = begin.to_period("M")
            return [(first + self.count * step).strftime(form) for step in steps]
        if self.unit == "business days":
            day = np.datetime64(begin, "D")
            return [str(np.busday_offset(day, step, roll="forward")) for step in steps]
        whole = self.count % _DAY == 0 and begin == begin.normalize()
        unit = "D" if whole else "m" if self.count % (60 * 10**9) == 0 else "s"
        at = np.datetime64(begin, "ns") + np.array(steps) * np.timedelta64(self.count, "ns")
        return [str(time).replace("T", " ") for time in at.astype(f"datetime64[{unit}]")]

    def period(self, begin: Any, steps: int) -> pd.Period:
        """The period this many steps after that of ``begin``."""
        start = pd.Period(begin, freq=self.frequency)
        if self.unit != "business days":
            return start + steps
        day = np.busday_offset(np.datetime64(start.start_time, "D"), steps, roll="forward")
        return pd.Period(str(day), freq=self.frequency)

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
        """A working week; None where the frequency defines the season."""
        return 5 if self.unit == "business days" else None

    @property
    def label(self) -> str:
        """The nearest of :data:`FREQUENCIES`."""
        if self.unit == "business days":
            return "D"
        seconds = self.count / 10**9
        if self.unit == "months":
            seconds = self.count * FREQUENCIES["M"]
        return _nearest_frequency(seconds)

    def __str__(self) -> str:
        return "business day" if self.unit == "business days" else self.frequency


def _months(stamps: Times) -> Integers:
    return stamps.astype("datetime64[M]").astype(np.int64)


def _on_business_days(stamps: Times) -> bool:
    """Whether all are on Monday to Friday, at one time of day."""
    days = stamps.astype("datetime64[D]")
    return bool(np.is_busday(days).all() and len(np.unique(stamps - days)) <= 1)


def _most_common(values: Integers) -> int:
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[counts.argmax()])


def _nearest_frequency(seconds: float) -> str:
    return min(FREQUENCIES, key=lambda name: abs(np.log(FREQUENCIES[name] / seconds)))


def named_frequency(name: str) -> str:
    """Class of a pandas frequency such as ``30T``, ``W-SUN`` or ``QE-DEC``.

    Not pandas' own parser: that of each version warns about or refuses the names of another. A name
    in other words still distinguishes series, and stays.
    """
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


@dataclass(frozen=True)
class RegularSeries:
    """A series on a regular grid.

    Attributes
    ----------
    name
        Its id; empty for the only series of a table without ids.
    start
        Period of the first value; None where the file has no times.
    values
        ``[T]``; NaN where there is no observation, but for the first and the last.
    step
        Distance of two values; None where it is not known.
    frequency
        One of :data:`FREQUENCIES`, or another name that the file has; None: unknown.
    begin, end
        Times of the first and of the last value; None where the file has none.
    covariates
        Name to ``[T]``: numbers, NaN where missing, or text, None where missing.
    group
        Name of the group that it is forecast with; such series are equally long, and at each end
        one of them has a value. None: it is forecast by itself.
    """

    name: str
    start: pd.Period | None
    values: npt.NDArray[np.float64]
    step: Step | None = None
    frequency: str | None = None
    begin: pd.Timestamp | None = None
    end: pd.Timestamp | None = None
    covariates: Mapping[str, Column] = field(default_factory=dict)
    group: str | None = None


def usual_step(observed: Sequence[Observed]) -> Step | None:
    """The most common distance of two times; None if no series has two."""
    times = {id(one.times): one.times for one in observed if one.times is not None}
    return Step.infer(list(times.values())) if times else None


def regular_series(
    observed: Sequence[Observed], frequency: str | None, usual: Step | None = None
) -> list[RegularSeries]:
    """Series on the grid of one step; steps without a row are NaN, and both ends are observed.

    A series whose times do not lie on the grid of the others may have one of its own.

    Parameters
    ----------
    frequency
        See :meth:`Step.parse`; by default the most common distance of two times.
    usual
        That distance in the rest of the file; None: these are all of it.

    Raises
    ------
    ValueError
        Times are not whole steps apart, or no series has two.
    """
    given = None if frequency is None else Step.parse(frequency)
    step = given or usual or usual_step(observed)
    if step is None and any(one.times is not None and len(one.times) for one in observed):
        raise ValueError(
            "no series has two times, so that its frequency is unknown; give another "
            "--id-column, or --frequency"
        )
    return [
        _without_times(one, given) if one.times is None else _on_grid(one, step, given is None)
        for one in observed
    ]


def _without_times(one: Observed, given: Step | None) -> RegularSeries:
    """Of values that follow one another."""
    first, last = _observed_range(_observed(one))
    step, label = given, None if given is None else given.label
    if given is None and one.frequency is not None:
        label = named_frequency(one.frequency)
        try:
            step = Step.parse(one.frequency)
        except ValueError:  # a name in other words
            step = None
    start = None
    if step is not None and one.start is not None:
        start = step.period(one.start, first)
    cut = slice(first, last + 1)
    beside = {name: column[cut] for name, column in one.covariates.items()}
    return RegularSeries(
        one.name, start, one.values[cut], step, label, covariates=beside, group=one.group
    )


def _observed(one: Observed) -> npt.NDArray[np.bool_]:
    return np.isfinite(one.values) if one.observed is None else one.observed


def _on_grid(one: Observed, step: Step | None, may_differ: bool) -> RegularSeries:
    assert one.times is not None
    if not len(one.times):
        return RegularSeries(
            one.name, None, np.zeros(0), step, None if step is None else step.label
        )
    assert step is not None
    trouble = _trouble(one, step)
    if trouble is not None:
        own = _own_step(one.times)
        if own is not None and may_differ:
            step = own
        elif own is not None or may_differ or step.positions(one.times) is None:
            raise ValueError(trouble)
        # Otherwise few rows of a step that was given are just few.
    elif may_differ and (coarser := _coarser_step(one.times, step)) is not None:
        step = coarser
    positions = step.positions(one.times)
    assert positions is not None
    length = int(positions[-1]) + 1
    first, last = _observed_range(_placed(_observed(one), positions, length))
    cut = slice(first, last + 1)
    start = step.period(pd.Timestamp(one.times[0]), first)
    begin, end = (
        pd.Timestamp(one.times[np.searchsorted(positions, max(place, 0))])
        for place in (first, last)
    )
    beside = {
        name: _placed(column, positions, length)[cut] for name, column in one.covariates.items()
    }
    values = _placed(one.values, positions, length)[cut]
    return RegularSeries(one.name, start, values, step, step.label, begin, end, beside, one.group)


def _placed(column: Column, positions: Integers, length: int) -> Column:
    """A column on the grid; what has no row is missing."""
    nothing = {"O": None, "b": False}.get(column.dtype.kind, np.nan)
    grid: Column = np.full(length, nothing, column.dtype)
    grid[positions] = column
    return grid


def _own_step(times: Times) -> Step | None:
    """The step that a series has of its own; months are at one day of theirs, or at their ends."""
    own = Step.infer([times])
    positions = None if own is None else own.positions(times)
    if positions is None or len(positions) < _MIN_OBSERVED_SHARE * (int(positions[-1]) + 1):
        return None
    days = pd.DatetimeIndex(times)
    at_one_day = days.day.nunique() == 1 or days.is_month_end.all()
    return own if own is not None and (own.unit != "months" or at_one_day) else None


def _coarser_step(times: Times, step: Step) -> Step | None:
    """The step of a series whose every row is several of ``step`` after the one before.

    Quarters among months, for example: with fewer rows than some, or with a gap, it is not told
    apart from a series of that step with missing values.
    """
    positions = step.positions(times)
    if positions is None or len(positions) < _MIN_REGULAR_ROWS:
        return None
    steps = np.diff(positions)
    if steps[0] == 1 or (steps != steps[0]).any():
        return None
    return _own_step(times)


def _trouble(one: Observed, step: Step) -> str | None:
    """Why the times of a series are none of a grid; None if they are."""
    times, of = one.times, f" of series {one.name!r}" if one.name else ""
    assert times is not None
    positions = step.positions(times)
    if positions is None:
        return (
            f"the times{of} are not regular: not all are whole steps of one {step} from "
            f"{pd.Timestamp(times[0])}; resample them, or give --frequency"
        )
    length = int(positions[-1]) + 1
    if len(positions) < _MIN_OBSERVED_SHARE * length:
        return (
            f"{len(positions)} rows{of} cover {length:,} steps of one {step}; put series of other "
            "frequencies into files of their own, or give --frequency"
        )
    return None


def _observed_range(observed: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Positions of the first and the last value; 0 and -1 if there is none."""
    places = np.flatnonzero(observed)
    return (int(places[0]), int(places[-1])) if places.size else (0, -1)
