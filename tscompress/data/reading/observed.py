"""Observations of series as a file has them, and what each of its columns is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.data.reading.covariates import Column
from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.times import Times

Kind = Literal["long", "wide", "rows", "lists", "one series"]


class Observed(NamedTuple):
    """One series as the file has it, in order of time.

    Attributes
    ----------
    values
        ``[T]``; NaN where a value is missing.
    times
        ``[T]``; None where rows only follow one another.
    frequency
        Distance of two values, as the file names it.
    start
        Time of the first value where there are no ``times``.
    covariates
        Name to ``[T]``: numbers, NaN where missing, or text, None where missing.
    group
        Name of the group that it is forecast with; None: it is forecast by itself.
    observed
        bool ``[T]``, where a value of the group is; None: where a value is.
    """

    name: str
    values: npt.NDArray[np.float64]
    times: Times | None = None
    frequency: str | None = None
    start: pd.Timestamp | None = None
    covariates: Mapping[str, Column] = MappingProxyType({})
    group: str | None = None
    observed: npt.NDArray[np.bool_] | None = None


class Layout(NamedTuple):
    """What each column of a table is, by its names there.

    Attributes
    ----------
    form
        The columns, and the notation once cells were read by it.
    known, past
        Covariates with values over the horizon, and the others.
    together
        Whether the targets of an id are forecast together.
    """

    kind: Kind
    ids: tuple[Any, ...]
    time: Any | None
    targets: tuple[Any, ...]
    form: SeriesFormat
    known: tuple[Any, ...] = ()
    past: tuple[Any, ...] = ()
    together: bool = False


def numbered(frame: pd.DataFrame, ids: Sequence[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """For each row the number of its series, and the names of the series, by first row.

    Raises
    ------
    ValueError
        A row has no id, or two series have one name once their ids are joined.
    """
    if not ids:
        return np.zeros(len(frame), dtype=np.int64), [""]
    columns, numbers = [], np.zeros(len(frame), dtype=np.int64)
    for name in ids:
        texts = frame[name].astype(object)
        missing = int((texts.isna() | (texts == "")).sum())
        if missing:
            raise ValueError(f"{missing} rows have no id in column {str(name)!r}")
        columns.append(texts.astype(str).to_numpy(object))
        codes, unique = pd.factorize(columns[-1])
        numbers, _ = pd.factorize(numbers * len(unique) + codes)
    _, rows = np.unique(numbers, return_index=True)
    names = ["/".join(parts) for parts in zip(*(texts[rows] for texts in columns), strict=True)]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(
            f"several series are named {twice!r} once their ids are joined; rename one"
        )
    return numbers.astype(np.int64), names


def check_distinct(
    numbers: npt.NDArray[np.int64], names: Sequence[str], times: Times, same: npt.NDArray[np.bool_]
) -> None:
    """Refuse two rows of one series and one time, next to each other where ``same``.

    Raises
    ------
    ValueError
    """
    repeated = np.flatnonzero(same & (times[1:] == times[:-1]))
    if not repeated.size:
        return
    first = repeated[0]
    of = f" of series {names[numbers[first]]!r}" if len(names) > 1 else ""
    raise ValueError(
        f"{repeated.size} rows repeat a time, the first {pd.Timestamp(times[first])}{of}; give "
        "--id-column if another column identifies series, keep one row for each id and time, and "
        "write hours in UTC where clocks are put back"
    )
