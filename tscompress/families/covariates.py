"""Series that go with the one that is forecast."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Covariates(NamedTuple):
    """Covariates of one series of T steps, for a forecast of H steps.

    Attributes
    ----------
    past
        ``[C, T]``, NaN where missing.
    future
        ``[K, H]``, K ≤ C: the first K covariates, known ahead. The others end with the series.
    """

    past: Tensor
    future: Tensor
