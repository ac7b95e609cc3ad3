"""Arguments of the Python API: refusals of wrong types in one line, and former names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tscompress.errors import UsageError
from tscompress.io.untrusted import shown

P = ParamSpec("P")
R = TypeVar("R")


def check_type(name: str, value: object, kinds: tuple[type, ...], allowed: str) -> None:
    """Refuse an argument of another type than ``kinds``.

    Raises
    ------
    UsageError
        It names what came, and ``allowed``, such as ``a path``.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {described(value)}; give {allowed}.")


def check_counts(**values: object) -> None:
    """Refuse arguments by name that are neither an integer nor None; UsageError."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise UsageError(f"{name} is {described(value)}; give an integer.")


def check_number(name: str, value: object) -> None:
    """Refuse a value that is no number; UsageError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} is {described(value)}; give a number.")


def check_list(name: str, value: object, kinds: tuple[type, ...], allowed: str) -> None:
    """Refuse all but None and a list, tuple, set or array of ``kinds``; UsageError."""
    if value is None:
        return
    is_list = isinstance(value, Sequence | set | frozenset | np.ndarray)
    if isinstance(value, str | bytes) or not is_list:
        raise UsageError(f"{name} is {described(value)}; give a list of {allowed}.")
    for one in value:  # type: ignore[attr-defined]
        if isinstance(one, bool) or not isinstance(one, kinds):
            raise UsageError(f"{name} has {described(one)}; give a list of {allowed}.")


def described(value: object) -> str:
    """A value for a message: plain ones as they are, of others the class."""
    if value is None or isinstance(value, str | bool | int | float):
        return shown(value)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def renamed(former: str, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept the ``former`` keyword for ``name``, with a DeprecationWarning."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if former not in options:
                return function(*args, **options)
            keywords: dict[str, Any] = dict(options)
            keywords[name] = keywords.pop(former)
            warnings.warn(f"{former} is {name} now", DeprecationWarning, stacklevel=2)
            return function(*args, **keywords)

        return call

    return wrap


def refuse_unknown(function: str, given: Mapping[str, object], allowed: Sequence[str]) -> None:
    """Refuse keywords that a function does not take; UsageError names them and what it takes."""
    unknown = sorted(given.keys() - set(allowed))
    if unknown:
        raise UsageError(
            f"{function} takes no {', '.join(unknown)}; further options are {', '.join(allowed)}."
        )
