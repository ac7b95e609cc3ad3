"""Cells to numbers: the decimal sign, thousands, missing values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.io.untrusted import shown, single_line

Decimal = Literal[".", ","]
Table = npt.NDArray[np.float64]

#: Models square values in single precision.
LARGEST = 1e18
CELLS_AT_ONCE = 2**20  # that are read as numbers

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
    """Numbers as float32; text and values too large for it are NaN."""
    if not (isinstance(values, np.ndarray) and values.dtype.kind == "f"):
        values = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
    # Larger values are no more usable than missing ones.
    numbers = np.where(np.abs(values) <= LARGEST, values, np.nan)
    single: npt.NDArray[np.float32] = numbers.astype(np.float32)
    return single


def target_values(cells: pd.DataFrame, decimal: Decimal) -> Table:
    """Values as float64, ``[rows, columns]``, correctly rounded; missing ones are NaN.

    Raises
    ------
    ValueError
        A cell holds text that is no number, or a number that models cannot compute with.
    """
    table = np.empty(cells.shape)
    for columns, block in _blocks(cells):
        numbers, blank = _numbers(block, decimal)
        usable = np.abs(numbers) <= LARGEST
        bad = ~usable & ~blank
        if bad.any():
            column = int(bad.any(axis=0).argmax())
            rows = np.flatnonzero(bad[:, column])
            cell = block.iloc[rows[0], column]
            found = numbers[rows[0], column]
            reason = f"beyond ±{LARGEST:g}" if np.isfinite(found) else "no finite numbers"
            raise ValueError(
                f"{rows.size} values of column {str(block.columns[column])!r} are {reason}, the "
                f"first, in row {rows[0] + 1}, is {single_line(cell)!r}"
            )
        table[:, columns] = numbers
    return table


def _blocks(cells: pd.DataFrame) -> Iterator[tuple[slice, pd.DataFrame]]:
    """Some columns at a time, numbers and text apart: few calls, and little memory beside them."""
    typed = [pd.api.types.is_numeric_dtype(dtype) for dtype in cells.dtypes]
    most = max(1, CELLS_AT_ONCE // max(len(cells), 1))
    start = 0
    for _, same in groupby(typed):
        stop = start + len(list(same))
        for first in range(start, stop, most):
            columns = slice(first, min(first + most, stop))
            yield columns, cells.iloc[:, columns]
        start = stop


def _numbers(block: pd.DataFrame, decimal: Decimal) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Numbers, and which cells are blank, both ``[rows, columns]``; other text is NaN."""
    if pd.api.types.is_numeric_dtype(block.dtypes.iloc[0]):
        return block.to_numpy(np.float64, na_value=np.nan), block.isna().to_numpy()
    cells = _cells(block)
    if decimal == ",":
        numbers, left = np.full(cells.size, np.nan), np.arange(cells.size)
    else:
        numbers = _as_numbers(cells)
        left = np.flatnonzero(np.isnan(numbers))
    blank = np.zeros(cells.size, dtype=bool)
    texts, places = _distinct(cells[left])
    empty = texts.isin(BLANK).to_numpy()
    plain = _plain(texts, decimal).to_numpy(object).copy()
    plain[empty] = None
    numbers[left], blank[left] = _as_numbers(plain)[places], empty[places]
    rows, columns = block.shape
    return numbers.reshape(columns, rows).T, blank.reshape(columns, rows).T


def _cells(block: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Cells column by column, ``[columns * rows]``."""
    flat: npt.NDArray[np.object_] = block.to_numpy(object).ravel("F")
    return flat


def _distinct(cells: npt.NDArray[np.object_]) -> tuple[pd.Series[str], npt.NDArray[np.intp]]:
    """Each text once, missing ones empty, and for each cell the place of its text."""
    known = cells.copy()
    known[pd.isna(cells)] = ""
    codes, unique = pd.factorize(pd.Series(known, dtype=object).astype(str).str.strip())
    return pd.Series(unique, dtype=object), codes


def _as_numbers(cells: npt.NDArray[np.object_]) -> npt.NDArray[np.float64]:
    """Cells as Python writes numbers, correctly rounded; others are NaN."""
    with suppress(ValueError, TypeError, OverflowError):
        numbers = cells.astype(np.float64)
        written = _written(cells)
        if written.isascii() and "_" not in written:  # Python also reads 1_000 and other digits
            return numbers
    # Several times as slow, and some of it not rounded correctly.
    rough = pd.to_numeric(pd.Series(cells, dtype=object), errors="coerce")
    numbers = np.array(rough.to_numpy(np.float64, na_value=np.nan))
    known = np.flatnonzero(~np.isnan(numbers))
    with suppress(ValueError, TypeError, OverflowError):
        numbers[known] = cells[known].astype(np.float64)
    return numbers


def _written(cells: npt.NDArray[np.object_]) -> str:
    """All text of the cells, joined."""
    try:
        return "".join(cells.tolist())
    except TypeError:  # not all are text
        return "".join([cell for cell in cells if type(cell) is str])


def _plain(texts: pd.Series[str], decimal: Decimal) -> pd.Series[str]:
    """Numbers as Python writes them; text in other notations becomes no number."""
    group = "," if decimal == "." else "."
    texts = texts.str.replace(_GAPS, "", regex=True)
    grouped = texts.str.fullmatch(_GROUPED[group])
    texts = texts.mask(grouped, texts.str.replace(group, "", regex=False))
    if decimal == ",":
        texts = texts.str.replace(".", "?", regex=False).str.replace(",", ".", regex=False)
    return texts


def find_decimal(cells: pd.DataFrame, separator: str | None) -> Decimal | None:
    """The decimal sign of text: a point, unless commas can be nothing else; None without any.

    Raises
    ------
    ValueError
        All values with the sign could be decimal fractions and thousands.
    """
    signs: set[Decimal] = set()
    doubtful: tuple[Any, str] | None = None
    for _, block in _blocks(cells):
        if pd.api.types.is_numeric_dtype(block.dtypes.iloc[0]):
            continue
        for name, texts in _unclear(block, separator):
            found, example = _decimal_of(texts, separator)
            signs |= found
            if example is not None:
                doubtful = name, example
    if len(signs) > 1:
        raise ValueError("some numbers have a decimal comma and some a decimal point")
    if doubtful is not None and not signs:
        raise ValueError(
            f"{shown(doubtful[1])} in column {str(doubtful[0])!r} may be a fraction or have "
            "thousands; give --decimal . or --decimal ,"
        )
    return signs.pop() if signs else None


def _unclear(block: pd.DataFrame, separator: str | None) -> Iterator[tuple[Any, pd.Series[str]]]:
    """Columns with texts that may be of another notation, and these texts, each once."""
    cells = _cells(block)
    # Where a semicolon parts cells a point may part thousands; else a number leaves no doubt.
    left = np.ones(cells.size, dtype=bool) if separator == ";" else np.isnan(_as_numbers(cells))
    rows = len(block)
    for number, name in enumerate(block.columns):
        part = slice(number * rows, (number + 1) * rows)
        if left[part].any():
            texts, _ = _distinct(cells[part][left[part]])
            yield name, texts[texts != ""]


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
