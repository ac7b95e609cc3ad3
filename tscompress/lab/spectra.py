"""Spectra, and random matrices that have them (paper App. F).

Single letters are those of "Understanding Transformers for Time Series: Rank Structure,
Flow-of-ranks, and Compressibility", called the paper in this folder. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tscompress.errors import UsageError


def checked_spectrum(sigma: Tensor | Sequence[float], *, largest: float | None = None) -> Tensor:
    """A spectrum as float64 ``[r]``.

    Parameters
    ----------
    largest
        What sigma_1 may be at most.

    Raises
    ------
    UsageError
        It is empty or not one-dimensional, a value is not positive and finite, the values ascend
        somewhere, or sigma_1 is above ``largest``.
    """
    values = torch.as_tensor(sigma, dtype=torch.float64)
    if values.ndim != 1 or not len(values):
        raise UsageError(f"a spectrum of shape {list(values.shape)}; give one row of values.")
    wrong = [value for value in values.tolist() if not 0 < value < float("inf")]
    if wrong:
        raise UsageError(f"a spectrum has the value {wrong[0]:g}; all must be positive and finite.")
    if bool((values.diff() > 0).any()):
        place = int((values.diff() > 0).to(torch.int64).argmax())
        raise UsageError(
            f"a spectrum ascends after index {place}, from {values[place]:g} to "
            f"{values[place + 1]:g}; sort it in descending order."
        )
    if largest is not None and values[0] > largest * (1 + 1e-12):
        raise UsageError(f"sigma_1 is {values[0]:g}; it may be at most {largest:g}: divide by it.")
    return values


def checked_sizes(**sizes: int) -> None:
    """Raise ``UsageError`` for the first of these sizes that is not a whole number above 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} is {size!r}; it must be a whole number above 0.")


def head_size(d: int, heads: int) -> int:
    """d_h = d / h; ``UsageError`` unless h divides d."""
    checked_sizes(d=d, heads=heads)
    if d % heads:
        raise UsageError(f"{heads} heads do not divide d = {d}; take a divisor of it.")
    return d // heads


def exponential_spectrum(d: int, rate: float) -> Tensor:
    """sigma_j = e^(-rate (j - 1)), ``[d]``."""
    checked_sizes(d=d)
    return torch.exp(-rate * torch.arange(d, dtype=torch.float64))


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    """Independent N(0, 1) entries ``[*shape]``, float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthonormal_columns(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns ``[rows, columns]``, by QR of a Gaussian matrix (App. F.1).

    Raises
    ------
    UsageError
        There are more columns than rows.
    """
    checked_sizes(rows=rows, columns=columns)
    if columns > rows:
        raise UsageError(f"{columns} columns in {rows} dimensions cannot be orthonormal.")
    q: Tensor = torch.linalg.qr(gaussian(rows, columns, generator=generator)).Q
    return q


def matrix_with_spectrum(
    sigma: Tensor | Sequence[float], d: int, N: int, generator: torch.Generator
) -> Tensor:
    """X = U diag(sigma) V^T ``[d, N]`` with random orthonormal U and V (paper App. F.1).

    Singular values beyond those of ``sigma`` ``[r]`` are zero.

    Raises
    ------
    UsageError
        As of :func:`checked_spectrum`, or ``sigma`` has more values than d or N.
    """
    values = checked_spectrum(sigma)
    if len(values) > min(d, N):
        raise UsageError(f"{len(values)} singular values do not fit a matrix [{d}, {N}].")
    U = orthonormal_columns(d, len(values), generator)
    V = orthonormal_columns(N, len(values), generator)
    return (U * values) @ V.T
