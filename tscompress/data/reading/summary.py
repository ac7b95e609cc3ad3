"""What was read from a file of series, in one line and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.observed import Kind
from tscompress.data.reading.read import SeriesFile
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.io.strict import Strict
from tscompress.io.text import percent

#: Models learn nothing from fewer observed values.
MIN_OBSERVED = 3
_UNKNOWN = "unknown"
_NAMED = 20  # series that are left out and named in records
_ADVERBS = {
    "s": "one-second", "min": "one-minute", "h": "hourly", "D": "daily", "business day": "business-"
    "daily", "W": "weekly", "M": "monthly", "Q": "quarterly", "Y": "yearly",
}  # fmt: skip


class SeriesSummary(Strict):
    """How many series of what length a file has, and how it was read.

    Attributes
    ----------
    series
        Without those that were left out.
    steps
        Of the shortest and of the longest series.
    frequencies
        Distance of two values to the number of series.
    first, last
        Times of the earliest and of the latest value; None where the file has none.
    missing
        Share of the steps without a value.
    too_short
        Series that were left out, and the names of the first of them.
    hold_out
        Steps at the end of each series that were left for evaluation.
    together
        Series that are forecast together; 1: each by itself.
    known, past
        Covariates with values over the horizon, and the others, each with a word on its values.
    """

    file: str
    layout: Kind
    series: int
    steps: tuple[int, int]
    frequencies: dict[str, int]
    first: str | None
    last: str | None
    missing: float
    too_short: int = 0
    too_short_names: tuple[str, ...] = ()
    hold_out: int = 0
    together: int = 1
    known: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    form: SeriesFormat

    def line(self) -> str:
        """In one line, such as ``20 series, 730 daily steps each, 2023-01-01 to 2024-12-30``."""
        groups = f" in groups of {self.together}" if self.together > 1 else ""
        parts = [f"{self.series:,} series{groups}", self._steps()]
        if self.first is not None and self.last is not None:
            parts.append(f"{self.first} to {self.last}")
        elif _UNKNOWN in self.frequencies:
            parts.append("without times")
        if self.missing:
            share = percent(self.missing, 1) if self.missing >= 0.0005 else "less than 0.1%"
            parts.append(f"{share} missing")
        if self.too_short:
            parts.append(f"{self.too_short:,} with too few values and left out")
        if self.hold_out:
            steps = "step" if self.hold_out == 1 else f"{self.hold_out} steps"
            parts.append(f"the last {steps} of each held out")
        beside = {"known covariates": self.known, "past covariates": self.past}
        lists = [f"; {name}: {', '.join(columns)}" for name, columns in beside.items() if columns]
        return ", ".join(parts) + "".join(lists)

    def _steps(self) -> str:
        shortest, longest = self.steps
        count = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        each = " each" if shortest == longest and self.series > 1 else ""
        kinds = {_ADVERBS.get(name, name): many for name, many in self.frequencies.items()}
        if len(kinds) > 1:
            mixed = ", ".join(f"{many:,} {kind}" for kind, many in kinds.items())
            return f"{count} steps{each} ({mixed})"
        kind = "".join(f"{kind} " for kind in kinds if kind != _UNKNOWN)
        return f"{count} {kind}steps{each}"


def usable(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
    """Whether a series has values enough to learn from."""
    return int(np.isfinite(values).sum()) >= MIN_OBSERVED


def summarize(
    read: SeriesFile, left_out: list[str] | None = None, *, hold_out: int = 0
) -> SeriesSummary:
    """Sum up a file.

    Parameters
    ----------
    left_out
        Names of the series that are too short for what they are read for; by default those with
        fewer than :data:`MIN_OBSERVED` values.
    """
    if left_out is None:
        left_out = [
            one.name
            for one in read.series
            if not usable(one.values[: max(0, len(one.values) - hold_out)])
        ]
    out = set(left_out)
    kept = [one for one in read.series if one.name not in out]
    lengths = [len(one.values) for one in kept]
    total = sum(lengths)
    observed = sum(int(np.isfinite(one.values).sum()) for one in kept)
    frequencies = Counter(_frequency(one) for one in kept)
    starts = [one.begin for one in kept if one.begin is not None]
    ends = [one.end for one in kept if one.end is not None]
    midnight = all(time == time.normalize() for time in (*starts, *ends))
    return SeriesSummary(
        file=read.name,
        layout=read.kind,
        series=len(kept),
        steps=(min(lengths, default=0), max(lengths, default=0)),
        frequencies=dict(frequencies.most_common()),
        first=_time(min(starts, default=None), midnight),
        last=_time(max(ends, default=None), midnight),
        missing=1 - observed / total if total else 0.0,
        too_short=len(left_out),
        too_short_names=tuple(left_out[:_NAMED]),
        hold_out=hold_out,
        together=max(
            Counter(one.group for one in kept if one.group is not None).values(), default=1
        ),
        known=_described(read.known, kept),
        past=_described(read.past, kept),
        form=read.form,
    )


def _described(names: Sequence[str], series: Sequence[RegularSeries]) -> tuple[str, ...]:
    """Each covariate with a note on its values."""
    return tuple(name + _said_of(name, series) for name in names if series)


def _said_of(name: str, series: Sequence[RegularSeries]) -> str:
    columns = [one.covariates[name] for one in series]
    without = sum(bool(pd.isna(column).all()) for column in columns)
    values = pd.Series(np.concatenate(columns)).dropna()
    count = values.nunique()
    text = f"{count} categories" if columns[0].dtype == object else ""
    said = ["constant" if count == 1 else text]
    said += [f"missing in {without:,} series"] if without else []
    return f" ({', '.join(filter(None, said))})" if any(said) else ""


def _frequency(one: RegularSeries) -> str:
    if one.step is not None:
        return str(one.step)
    return one.frequency or _UNKNOWN


def _time(time: pd.Timestamp | None, midnight: bool) -> str | None:
    if time is None:
        return None
    return time.strftime("%Y-%m-%d" if midnight else "%Y-%m-%d %H:%M")
