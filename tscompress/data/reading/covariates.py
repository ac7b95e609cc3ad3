"""Columns beside the targets of a long table: which they are, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.data.reading.values import BLANK, Decimal, target_values
from tscompress.io.untrusted import shown

Column: TypeAlias = npt.NDArray[Any]
"""``[T]``: float64, NaN where missing; or text, None where missing, whose values are categories."""

_ROLES = {
    "id": ("the id", "--id-column"),
    "time": ("the time", "--time-column"),
    "target": ("a target", "--target-column"),
    "known": ("a known covariate", "--known-covariates"),
    "past": ("a past covariate", "--past-covariates"),
}


def columns_named(names: Sequence[Any], text: str | None) -> tuple[Any, ...]:
    """The columns of a text such as ``promo,holiday``.

    Raises
    ------
    ValueError
        One is not there, or named twice.
    """
    if text is None:
        return ()
    parts = [text] if text in names else [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in names:
            listed = shown([str(name) for name in names])
            raise ValueError(f"there is no column {part!r}; it has {listed}")
        if parts.count(part) > 1:
            raise ValueError(f"column {part!r} is named twice in {shown(text)}; name it once")
    return tuple(parts)


def check_roles(roles: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a column that is two things, such as a target and a covariate.

    Raises
    ------
    ValueError
    """
    seen: dict[Any, str] = {}
    for role, columns in roles.items():
        for name in columns:
            if name is not None and seen.get(name) == role:
                first, option = _ROLES[role]
                raise ValueError(f"column {str(name)!r} is {first} twice; name it once in {option}")
            if name is not None and name in seen:
                (first, option), (second, other) = _ROLES[seen[name]], _ROLES[role]
                raise ValueError(
                    f"column {str(name)!r} is {first} and {second}; name it in one of {option} and "
                    f"{other}"
                )
            seen[name] = role


def with_numbers(frame: pd.DataFrame, columns: Sequence[Any], *, of_text: bool) -> list[Any]:
    """Those of the columns that hold numbers, or, ``of_text``, cells that may be some."""
    return [name for name in columns if _may_be_numbers(frame[name], of_text)]


def covariate_values(
    frame: pd.DataFrame, columns: Sequence[Any], decimal: Decimal, *, of_text: bool
) -> dict[str, Column]:
    """Name to values ``[rows]``: numbers, or categories as chronos takes them.

    Columns of numbers are numbers, and booleans, text and categories are categories. Cells
    ``of_text`` files are numbers if all of them are.

    Raises
    ------
    ValueError
        A column has no value.
    """
    found: dict[str, Column] = {}
    for name in columns:
        values = _numbers(frame[name], decimal, of_text)
        column = _categories(frame[name], of_text) if values is None else values
        if pd.isna(column).all():
            raise ValueError(f"covariate {str(name)!r} has no values; leave it out")
        found[str(name)] = column
    return found


def _may_be_numbers(cells: pd.Series[Any], of_text: bool) -> bool:
    if pd.api.types.is_numeric_dtype(cells.dtype):
        return not pd.api.types.is_bool_dtype(cells.dtype)
    if not of_text:
        return False
    texts = _texts(cells)
    return bool(texts.str.contains(r"\d").all()) and not texts.str.contains(r"[^\W\dEe]").any()


def _numbers(
    cells: pd.Series[Any], decimal: Decimal, of_text: bool
) -> npt.NDArray[np.float64] | None:
    """None: they are categories."""
    if not _may_be_numbers(cells, of_text):
        return None
    typed = pd.api.types.is_numeric_dtype(cells.dtype)
    try:
        return target_values(cells.to_frame(), decimal)[:, 0]
    except ValueError:
        if typed:
            raise
        return None


def _texts(cells: pd.Series[Any]) -> pd.Series[str]:
    """Each text once, without those of missing values."""
    texts = pd.Series(cells.dropna().astype(str).unique(), dtype=object).str.strip()
    return texts[~texts.isin(BLANK)]


def _categories(cells: pd.Series[Any], of_text: bool) -> Column:
    """Typed tables have nulls of their own, so that ``None`` is a category as any other."""
    texts = cells.astype(object)
    missing = texts.isna() | texts.astype(str).str.strip().isin(BLANK if of_text else {""})
    column: Column = texts.astype(str).str.strip().to_numpy(object).copy()
    column[missing.to_numpy()] = None
    return column
