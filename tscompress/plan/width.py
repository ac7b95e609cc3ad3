"""A new residual-stream width: dimensions, or a share of the model's ``d_model``."""

from __future__ import annotations

from numbers import Integral
from typing import Annotated

from pydantic import BeforeValidator

_LEAST = 2


def _read_width(value: object) -> int | float:
    """An integer from 2, or a float above 0 and at most 1, also as text."""
    number = _number(value)
    if number is not None and number >= _LEAST and number == int(number):
        return int(number)
    if isinstance(number, float) and 0 < number <= 1:
        return number
    if number == 1:
        raise ValueError("1 could be a dimension or a share; give 1.0 for all of d_model")
    raise ValueError(
        "a width is a number of dimensions, an integer of at least 2, or a share of d_model, "
        "above 0 and at most 1.0"
    )


def _number(value: object) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None  # NaN neither
    if not isinstance(value, str):
        return None
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return _number(float(value))
    except ValueError:
        return None


#: An integer from 2 counts dimensions; a float in (0, 1] is a share of ``d_model``.
Width = Annotated[int | float, BeforeValidator(_read_width)]


def dimensions_of(width: int | float, d_model: int) -> int | None:
    """The new ``d_model``; None if a share keeps all dimensions.

    A share is rounded to the nearest integer, as ``ff_ratio`` is, and is at least 2.
    """
    if isinstance(width, int):
        return width
    kept = max(_LEAST, round(width * d_model))
    return kept if kept < d_model else None
