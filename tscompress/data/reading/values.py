"""Cells to numbers: the decimal sign, thousands, missing values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.io.untrusted import shown, single_line

Decimal = Literal[".", ","]

#: Cells that hold no value.
BLANK = frozenset(
    {"", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NAN", "null", "NULL", "None"}
)
#: By the sign that parts thousands: whole groups of three digits, and what may follow them.
_GROUPED = {
    ",": r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?",
    ".": r"[-+]?[1-9]\d{0,2}(?:\.\d{3})+(?:,\d*)?",
}
_MILLIONS = r"[-+]?[1-9]\d{0,2}(?:\.\d{3}){2,}(?:,\d*)?"
_DECIMAL_COMMA = r"[-+]?(?:\d*|[1-9]\d{0,2}(?:\.\d{3})+),\d+(?:[eE][-+]?\d+)?"
_GAPS = r"(?<=\d)[ \u00a0\u202f'’](?=\d{3})"  # thousands in French and in Swiss numbers


def floats(values: Any) -> npt.NDArray[np.float32]:
    """Numbers as float32; what is no number, or too large for one, is NaN."""
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
    # What float32 cannot hold is no more usable than what is missing.
    numbers = np.where(np.abs(numbers) < np.finfo(np.float32).max, numbers, np.nan)
    single: npt.NDArray[np.float32] = numbers.astype(np.float32)
    return single


def target_values(column: pd.Series[Any], decimal: Decimal) -> npt.NDArray[np.float64]:
    """Values as float64, missing ones NaN.

    Raises
    ------
    ValueError
        A cell holds text that is no number, or a number that models cannot compute with.
    """
    numbers = _as_numbers(column)
    left = np.flatnonzero(np.isnan(numbers))
    if decimal == "," and not pd.api.types.is_numeric_dtype(column):
        left = np.arange(len(column))
    others = column.iloc[left]
    texts = others.astype(str).str.strip()
    empty = (others.isna() | texts.isin(BLANK)).to_numpy()
    numbers[left] = _as_numbers(_plain(texts, decimal).mask(empty))
    blank = np.zeros(len(column), dtype=bool)
    blank[left] = empty
    usable = np.abs(numbers) < np.finfo(np.float32).max  # models compute in single precision
    bad = np.flatnonzero(~usable & ~blank)
    if bad.size:
        raise ValueError(
            f"{bad.size} values of column {str(column.name)!r} are no finite numbers, the first, "
            f"in row {bad[0] + 1}, is {single_line(column.iloc[bad[0]])!r}"
        )
    return numbers


def _as_numbers(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """Cells as Python writes numbers; others are NaN."""
    found = pd.to_numeric(column, errors="coerce")
    return np.array(found.to_numpy(np.float64, na_value=np.nan))


def _plain(texts: pd.Series[str], decimal: Decimal) -> pd.Series[str]:
    """Numbers as Python writes them; what is of another notation becomes no number."""
    group = "," if decimal == "." else "."
    texts = texts.str.replace(_GAPS, "", regex=True)
    grouped = texts.str.fullmatch(_GROUPED[group])
    texts = texts.mask(grouped, texts.str.replace(group, "", regex=False))
    if decimal == ",":
        texts = texts.str.replace(".", "?", regex=False).str.replace(",", ".", regex=False)
    return texts


def find_decimal(columns: Iterable[pd.Series[Any]], separator: str | None) -> Decimal:
    """The decimal sign of text: a point, unless commas can be nothing else.

    Raises
    ------
    ValueError
        All values with the sign could be decimal fractions and thousands.
    """
    signs: set[Decimal] = set()
    doubtful: tuple[str, Any] | None = None
    for column in columns:
        if separator != ";":  # what needs no other notation leaves no doubt
            column = column[np.isnan(_as_numbers(column))]
        if pd.api.types.is_numeric_dtype(column):
            continue
        texts = column.dropna().astype(str).str.strip()
        found, example = _decimal_of(texts, separator)
        signs |= found
        if example is not None:
            doubtful = str(column.name), example
    if len(signs) > 1:
        raise ValueError("some numbers have a decimal comma and some a decimal point")
    if doubtful is not None and not signs:
        raise ValueError(
            f"{shown(doubtful[1])} in column {doubtful[0]!r} may be a fraction or have thousands; "
            "give --decimal . or --decimal ,"
        )
    return signs.pop() if signs else "."


def _decimal_of(texts: pd.Series[str], separator: str | None) -> tuple[set[Decimal], str | None]:
    """The sign that the texts show, and one that shows it either way."""
    commas = texts[texts.str.contains(",", regex=False)]
    if len(commas):
        point = commas.str.fullmatch(_GROUPED[","])
        comma = commas.str.fullmatch(_DECIMAL_COMMA)
        signs: set[Decimal] = set()
        if (point & ~comma).any():
            signs.add(".")
        if (comma & ~point).any():
            signs.add(",")
        either = commas[point & comma]
        return signs, either.iloc[0] if len(either) else None
    points = texts[texts.str.contains(".", regex=False)]
    if points.str.fullmatch(_MILLIONS).any():
        return {","}, None
    if separator == ";" and len(points) and points.str.fullmatch(_GROUPED["."]).all():
        return set(), points.iloc[0]
    return ({"."} if len(points) else set()), None
