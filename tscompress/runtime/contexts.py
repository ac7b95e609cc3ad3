"""Series as users give them, as float32 arrays; what cannot be forecast is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tscompress.errors import DataError, UsageError
from tscompress.runtime.quantiles import FloatArray

_LARGEST = float(np.finfo(np.float32).max)
_KEYS = ("target", "past_covariates", "future_covariates")


@dataclass(frozen=True)
class Task:
    """Series that are forecast together, and what is known beside them.

    Attributes
    ----------
    context
        ``[R, T]``: targets, covariates of the past, covariates that are known ahead.
    future
        ``[R, H]``, NaN where nothing is known.
    targets
        How many of the rows are forecast.
    """

    context: FloatArray
    future: FloatArray
    targets: int


def univariate(contexts: Any, reads: int) -> list[FloatArray]:
    """Each series ``[T]``, of one 1-D or 2-D array or a sequence of 1-D ones.

    Raises
    ------
    UsageError
        It is none of these.
    DataError
        There is no series, or one is empty, all NaN in its last ``reads`` steps, not numeric or
        beyond float32.
    """
    if isinstance(contexts, np.ndarray) and contexts.ndim == 1 and contexts.dtype != object:
        contexts = contexts[None]
    listed = _listed(contexts)
    for at, item in enumerate(listed):
        if isinstance(item, Mapping):
            raise UsageError(
                f"series {at} is a mapping, as of a target with covariates, and this model reads "
                "none; give its target alone."
            )
    return [
        _series(values, f"series {at}", ndim=1, reads=reads) for at, values in enumerate(listed)
    ]


def tasks_of(contexts: Any, horizon: int, reads: int | None) -> list[Task]:
    """Tasks, of a 3-D array, or of a sequence of 1-D or 2-D arrays or mappings.

    Parameters
    ----------
    contexts
        Of a 3-D array ``[N, R, T]`` and a 2-D one ``[R, T]`` all rows are targets. A mapping has
        ``target`` ``[T]`` or ``[R, T]``, and may have ``past_covariates``, name to ``[T]``, and
        ``future_covariates``, name to ``[horizon]``, of which every name is a past one, too.
    reads
        A target without any value in so many last steps is refused; None: none is.

    Raises
    ------
    UsageError, DataError
        As :func:`univariate`; or covariates do not fit.
    """
    if isinstance(contexts, np.ndarray) and contexts.ndim != 3 and contexts.dtype != object:
        raise UsageError(
            f"contexts is an array of {contexts.ndim} dimensions; give [series, variates, steps], "
            "or a list of series."
        )
    return [
        _task(item, f"series {at}", horizon, reads) for at, item in enumerate(_listed(contexts))
    ]


def stacked(rows: Sequence[FloatArray], steps: int | None = None) -> FloatArray:
    """``[B, T]`` of the last ``steps`` of arrays ``[T_i]`` or ``[R_i, T_i]``; None: of all.

    NaN come before those that are shorter than the longest.
    """
    if steps is not None:
        rows = [one[..., -steps:] for one in rows]
    longest = max(one.shape[-1] for one in rows)
    return np.concatenate([pad_left(np.atleast_2d(one), longest) for one in rows])


def pad_left(values: FloatArray, steps: int) -> FloatArray:
    """``[..., steps]``, with NaN before."""
    width = [(0, 0)] * (values.ndim - 1) + [(steps - values.shape[-1], 0)]
    return np.pad(values, width, constant_values=np.nan)


def _listed(contexts: Any) -> list[Any]:
    if isinstance(contexts, str | bytes | Mapping) or not isinstance(
        contexts, Sequence | np.ndarray
    ):
        raise UsageError(
            f"contexts is a {type(contexts).__name__}; give an array or a list of them."
        )
    if not len(contexts):
        raise DataError("contexts is empty; give at least one series.")
    return list(contexts)


def _task(item: Any, name: str, horizon: int, reads: int | None) -> Task:
    if not isinstance(item, Mapping):
        context = np.atleast_2d(_series(item, name, ndim=2, reads=reads))
        nothing = np.full((len(context), horizon), np.nan, np.float32)
        return Task(context, nothing, len(context))
    unknown = sorted(set(map(str, item)) - set(_KEYS))
    if unknown or "target" not in item:
        raise UsageError(
            f"{name} has the keys {', '.join(map(str, item))}; target is needed, and "
            f"{' and '.join(_KEYS[1:])} are allowed."
        )
    target = np.atleast_2d(_series(item["target"], name, ndim=2, reads=reads))
    past, ahead = (_covariates(item, key, name) for key in _KEYS[1:])
    if extra := ahead.keys() - past.keys():
        raise UsageError(
            f"{name} has no past_covariates of {min(extra, key=str)!r}; give its past, too."
        )
    try:
        later = sorted(ahead)
        # Those that are known ahead come last; within both, by name.
        order = [*sorted(past.keys() - ahead.keys()), *later]
    except TypeError:
        kinds = " and ".join(sorted({type(key).__name__ for key in past}))
        raise UsageError(f"{name} has covariates with names of {kinds}; give texts.") from None
    rows = [_covariate(past[key], f"{name}, {key}", target.shape[1]) for key in order]
    known = [_covariate(ahead[key], f"{name}, {key} ahead", horizon) for key in later]
    context = np.concatenate([target, *(row[None] for row in rows)])
    future = np.full((len(context), horizon), np.nan, np.float32)
    if known:
        future[-len(known) :] = known
    return Task(context, future, len(target))


def _covariates(item: Mapping[str, Any], key: str, name: str) -> Mapping[Any, Any]:
    found = item.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{name} has {key} of the type {type(found).__name__}; give a mapping, name to values."
        )
    return found


def _covariate(values: Any, name: str, steps: int) -> FloatArray:
    found = _numbers(values, name, truths=False)
    if found.shape != (steps,):
        raise DataError(f"{name} has the shape {found.shape}; give {steps} values.")
    return found


def _series(values: Any, name: str, ndim: int, *, reads: int | None) -> FloatArray:
    """Numbers of one or at most ``ndim`` dimensions, with a value in the last ``reads`` of each
    row; None: or without."""
    found = _numbers(values, name)
    if not found.ndim:
        raise DataError(
            f"{name} is a single number; give each series as an array, and several as a list."
        )
    if found.ndim > ndim:
        raise DataError(f"{name} has {found.ndim} dimensions; at most {ndim} are forecast.")
    if not found.size:
        raise DataError(f"{name} is empty; leave it out, or give at least one value.")
    if reads is not None and not np.isfinite(np.atleast_2d(found)[:, -reads:]).any(axis=-1).all():
        where = f" in the last {reads} steps, which the model reads" * (found.shape[-1] > reads)
        raise DataError(
            f"{name} has only missing values{where}; leave it out, or give at least one value."
        )
    return found


def _numbers(values: Any, name: str, *, truths: bool = True) -> FloatArray:
    """Float32; without ``truths``, True and False are categories, as texts are."""
    try:
        given = np.asarray(values)
        kinds = {type(one) for one in given.flat} if given.dtype.kind == "O" else set()
        # numpy would read the digits of texts, and count the days of dates.
        if given.dtype.kind not in "biufO" or kinds & {str, bytes, np.str_}:
            raise TypeError
        found = np.array(given, dtype=np.float64)
        if isinstance(values, np.ma.MaskedArray):
            found[np.ma.getmaskarray(values)] = np.nan
    except (TypeError, ValueError):
        raise DataError(f"{name} is not numeric; give numbers, and NaN for missing ones.") from None
    if not truths and (given.dtype.kind == "b" or kinds & {bool, np.bool_}):
        raise DataError(f"{name} has categories, True and False; give a number for each.")
    beyond = np.isinf(found) | (np.abs(np.nan_to_num(found, posinf=0, neginf=0)) > _LARGEST)
    if beyond.any():
        raise DataError(
            f"{name} holds {found[beyond][0]:g}, which is beyond float32; rescale it, or use NaN."
        )
    return found.astype(np.float32)
