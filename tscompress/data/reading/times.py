"""Cells to times: dates of one form and of one time zone."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from tscompress.io.untrusted import shown

Times = npt.NDArray[np.datetime64]

_SINCE_1970 = ("s", "ms", "us", "ns")
_UTC = ("Z", "UTC", "GMT", "+00", "+0000", "+00:00")
_OFFSET = r"(?P<offset>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)$"
_TIME_WITH_OFFSET = r"\d:\d{2}.*?\s*" + _OFFSET
#: 2023Q1 and 2023-Q1.
QUARTER = r"\d{4}[- ]?[Qq][1-4]"


def parse_times(column: pd.Series[Any], date_format: str | None = None) -> tuple[Times, str | None]:
    """Times of all rows, datetime64[ns], and the form they have, None for ISO 8601 and types.

    They are of one time zone, which is dropped: moments of UTC where there is one, local dates
    where each is a midnight.

    Raises
    ------
    ValueError
        A time is missing, is no date, or its zone, or day and month, are not those of the others.
    """
    name = str(column.name)
    if not pd.api.types.is_datetime64_any_dtype(column):
        column = column.astype(object)
        column = column.mask(column == "")
    codes, unique = pd.factorize(column)
    missing = int((codes < 0).sum())
    if missing:
        raise ValueError(f"{missing} rows have no time in column {name!r}")
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        index = pd.DatetimeIndex(unique)
        wall = index.tz_localize(None)
        # Local days have 23 or 25 hours now and then: dates are counted as dates.
        index = wall if (wall == wall.normalize()).all() else index.tz_convert("UTC")
        parsed = index.tz_localize(None)
    elif pd.api.types.is_datetime64_dtype(column):
        parsed = pd.DatetimeIndex(unique)
    else:
        texts = pd.Series(unique).astype(str).str.strip()
        if date_format is None:
            parsed, date_format = _parsed(texts, name)
        else:
            parsed = _of_form(texts, date_format, name)
    missing = int(np.isin(codes, np.flatnonzero(parsed.isna())).sum())  # blanks
    if missing:
        raise ValueError(f"{missing} rows have no time in column {name!r}")
    times: Times = parsed.to_numpy().astype("datetime64[ns]")[codes]
    return times, date_format


def _of_form(texts: pd.Series[str], date_format: str, name: str) -> pd.DatetimeIndex:
    """Of the form that was given."""
    try:
        if date_format in _SINCE_1970:
            since: Any = date_format
            return pd.DatetimeIndex(pd.to_datetime(pd.to_numeric(texts), unit=since))
        zoned = "%z" in date_format
        parsed = pd.DatetimeIndex(pd.to_datetime(texts, format=date_format, utc=zoned))
        return parsed.tz_localize(None) if zoned else parsed
    except (ValueError, TypeError, OverflowError):
        raise ValueError(
            f"column {name!r} holds times that are not of the form {date_format!r}, such as "
            f"{shown(texts.iloc[0])}; give another --date-format"
        ) from None


def _parsed(texts: pd.Series[str], name: str) -> tuple[pd.DatetimeIndex, str | None]:
    """Of a form that the texts leave no doubt about."""
    if texts.str.fullmatch(r"[-+]?\d+(\.\d*)?").any():
        raise ValueError(
            f"column {name!r} holds numbers; write times as dates, as in 2024-01-31, or give "
            "--date-format, such as %Y, %Y%m%d, or s for seconds since 1970"
        )
    if texts.str.fullmatch(QUARTER).all():
        quarters = texts.str.replace(r"[- ]", "", regex=True).str.upper()
        return pd.PeriodIndex(quarters, freq="Q").to_timestamp(), None
    zones = texts.str.extract(_TIME_WITH_OFFSET, expand=True)["offset"]
    zones = zones.where(~zones.isin(_UTC), "UTC").fillna("none")
    if zones.nunique() > 1:
        raise ValueError(
            f"column {name!r} mixes time zones ({', '.join(sorted(zones.unique())[:4])}); write "
            "all times in UTC, or all without an offset"
        )
    if zones.iloc[0] != "none":
        texts = texts.str.replace(_OFFSET, "", regex=True).str.strip()
    iso = _read(texts, "ISO8601")
    if iso is not None:
        return iso, None
    if not texts.str.contains(r"\d{4}").all():
        raise _unclear(name, "that are no dates, or years without four digits", texts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the order that was not asked for
        forms = {guess_datetime_format(texts.iloc[0], dayfirst=first) for first in (False, True)}
    readings = {form: read for form in forms - {None} if (read := _read(texts, form)) is not None}
    if not readings:
        raise _unclear(name, "that are no dates, or of many forms", texts)
    (form, first), *others = sorted(readings.items())
    if any(not other.equals(first) for _, other in others):
        raise _unclear(name, "with days or months first", texts)
    return first, form


def _read(texts: pd.Series[str], form: str | None) -> pd.DatetimeIndex | None:
    """Times of this form; None where one has another, or another offset."""
    try:
        # Kept, not raised: filters are those of all threads.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FutureWarning)  # pandas 2 warns of several offsets
            times = pd.DatetimeIndex(pd.to_datetime(texts, format=form))
    except (ValueError, OverflowError):
        return None
    return None if any("time zone" in str(one.message) for one in said) else times


def _unclear(name: str, reason: str, texts: pd.Series[str]) -> ValueError:
    others = texts[pd.to_datetime(texts, format="ISO8601", errors="coerce", utc=True).isna()]
    odd = others[~others.str.contains(r"\d{4}")]
    first = (odd if len(odd) else others).iloc[0]
    return ValueError(
        f"column {name!r} holds times {reason}, such as {shown(first)}; write them as in "
        "2024-01-31 or 2024-01-31 13:30, or give --date-format, such as %d/%m/%Y"
    )
