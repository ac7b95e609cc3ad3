"""One reader for every command: a file, or a table in memory, to series on a regular grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from tscompress.data.reading.format import SeriesFormat
from tscompress.data.reading.layouts import find_layout, named_columns, observed_series
from tscompress.data.reading.observed import Kind, Layout
from tscompress.data.reading.tables import (
    SUFFIXES,
    kind_of,
    naming_file,
    read_frame,
    read_parts,
)
from tscompress.data.reading.time_grid import RegularSeries, Step, regular_series, usual_step
from tscompress.errors import DataError
from tscompress.io.files import user_path
from tscompress.io.hashing import sha256_of
from tscompress.io.untrusted import UnreadableFileError, regular_file, shown

DEFAULT_FORMAT = SeriesFormat()
_HEAD = 8  # rows that are kept to be shown


@dataclass(frozen=True)
class SeriesFile:
    """What was read, and how.

    Attributes
    ----------
    series
        In the order of their first rows.
    form
        Columns and notation, as found.
    head
        The first rows, with the columns that were read.
    known, past
        Names of the covariates with values over the horizon, and of the others.
    sha256
        Of the file as it was read; None of a table in memory.
    """

    name: str
    series: tuple[RegularSeries, ...]
    kind: Kind
    form: SeriesFormat
    head: pd.DataFrame
    known: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    sha256: str | None = None


def read_file(path: str | Path, form: SeriesFormat = DEFAULT_FORMAT) -> SeriesFile:
    """Series of one file; see ``tscompress/data/README.md`` for what it may hold.

    Parameters
    ----------
    form
        What the file itself does not show.

    Raises
    ------
    DataError
        The file is missing or of another kind, cannot be read, or could be read in several ways;
        the message names the option that decides.
    """
    path = user_path(path)
    check_is_file(path)
    found = path.stat()
    plain = SeriesFormat(**{name: getattr(form, name) for name in SeriesFormat.model_fields})
    return _read_file(path.resolve(), found.st_mtime_ns, found.st_size, plain)


def check_is_file(path: Path) -> None:
    """Refuse a name that is not that of a file of series.

    Raises
    ------
    DataError
    """
    try:
        regular_file(path)
    except UnreadableFileError as error:
        raise DataError(f"{str(path)!r} is no file of series: {error}; give the file.") from None
    except FileNotFoundError:
        raise DataError(f"there is no file {str(path)!r}.") from None
    with naming_file(path):
        kind = kind_of(path)
    if not kind:
        raise DataError(
            f"{path.name!r} has suffix {path.suffix!r}; supported: {', '.join(sorted(SUFFIXES))}, "
            "and text compressed as .gz, .bz2, .xz or .zip with one file in it."
        )


# A command scores several models on one file.
@lru_cache(maxsize=1)
def _read_file(path: Path, changed: int, size: int, form: SeriesFormat) -> SeriesFile:
    with naming_file(path):
        sha256 = sha256_of(path)
        frame, form = read_frame(path, form)
        return replace(read_table(frame, form, path.name), sha256=sha256)


def read_table(
    frame: pd.DataFrame, form: SeriesFormat = DEFAULT_FORMAT, name: str = "table"
) -> SeriesFile:
    """Series of a table in memory.

    Raises
    ------
    ValueError
        A column is missing or ambiguous, a value is no number, times are not dates of one form and
        time zone, two rows have the same id and time, or times are not on a grid.
    """
    frame = named_columns(frame, form)
    layout = find_layout(frame, form)
    observed, form = observed_series(frame, layout)
    if layout.kind != "lists":
        form = form.model_copy(update={"decimal": form.decimal or "."})
    series = regular_series(observed, form.frequency)
    for one in series:
        one.values.setflags(write=False)  # they are handed out again and again
    head = frame.head(_HEAD)[_shown_columns(layout)]
    known, past = (tuple(map(str, columns)) for columns in (layout.known, layout.past))
    return SeriesFile(name, tuple(series), layout.kind, form, head, known, past)


def _shown_columns(layout: Layout) -> list[str]:
    time = [] if layout.time is None else [layout.time]
    return [*layout.ids, *time, *layout.targets[:_HEAD], *(*layout.known, *layout.past)[:_HEAD]]


def read_in_parts(path: Path, form: SeriesFormat) -> Iterator[list[RegularSeries]]:
    """Series of a file that is larger than memory, in its order.

    A wide table is read whole. Otherwise as :func:`series_of_parts`, with its errors.
    """

    def whole() -> list[RegularSeries]:
        return list(read_file(path, form).series)

    return series_of_parts(read_parts(path, form), whole)


def series_of_parts(
    parts: Iterable[tuple[pd.DataFrame, SeriesFormat]],
    whole: Callable[[], list[RegularSeries]] | None = None,
) -> Iterator[list[RegularSeries]]:
    """Series of a table that comes in parts, each some rows and how they are written.

    What the first parts show holds for all. Of a long table the rows of one series must follow one
    another.

    Parameters
    ----------
    whole
        Reads a table whose columns are series, all at once; None: such a table is refused.

    Raises
    ------
    ValueError
        As :func:`read_table`; or the rows of a series do not follow one another.
    """
    rows: _WholeSeries | None = None
    known: _Known | None = None
    for frame, form in parts:
        frame = named_columns(frame, form)
        known = known or _Known(find_layout(frame, form))
        if known.layout.kind in ("wide", "one series"):
            if whole is None:
                wide = known.layout.kind == "wide"
                raise ValueError(
                    "its columns are series, and its rows come in parts; give a file"
                    if wide
                    else "its rows are values of one series, and come in parts; name the columns "
                    "that identify series (id_column), or give a file"
                )
            yield whole()
            return
        if known.layout.kind == "long":
            rows = rows or _WholeSeries(known.layout.ids)
            frame = rows.add(frame)
        if len(frame):
            yield known.series(frame)
    if known is None:
        raise ValueError("there are no rows")
    if rows is not None:
        yield known.series(rows.rest())


@dataclass
class _Known:
    """What parts of a table have shown so far: its notation, and the step of its times."""

    layout: Layout
    step: Step | None = None

    def series(self, frame: pd.DataFrame) -> list[RegularSeries]:
        """Those of the next part."""
        observed, form = observed_series(frame, self.layout)
        self.layout = self.layout._replace(form=form)
        self.step = self.step or usual_step(observed)
        return regular_series(observed, form.frequency, self.step)


class _WholeSeries:
    """Rows of a long table that comes in parts, by whole series."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        self._ids = ids
        self._ended: set[int] = set()
        #: Rows of the last series, which may continue, and its name.
        self._held: list[pd.DataFrame] = []
        self._name: str | None = None

    def add(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Rows of the series that have ended with the next part; none while one goes on.

        Raises
        ------
        ValueError
            Rows of one series are apart.
        """
        columns = [frame[name].astype(str).to_numpy(object) for name in self._ids]
        changed = np.any([texts[1:] != texts[:-1] for texts in columns], axis=0)
        starts = np.flatnonzero(np.r_[True, changed])
        names = ["/".join(parts) for parts in zip(*(c[starts] for c in columns), strict=True)]
        before = [] if self._name in (None, names[0]) else [self._name]
        *over, last = [*before, *names]
        for name in over:
            self._check_new(name)
            self._ended.add(hash(name))
        self._check_new(last)
        if not over:
            self._held.append(frame)
            self._name = last
            return frame.iloc[:0]
        done = pd.concat([*self._held, frame.iloc[: starts[-1]]], ignore_index=True)
        self._held, self._name = [frame.iloc[starts[-1] :]], last
        return done

    def rest(self) -> pd.DataFrame:
        """Rows of the last series."""
        return pd.concat(self._held, ignore_index=True)

    def _check_new(self, name: str) -> None:
        if hash(name) in self._ended:
            raise _apart(name, self._ids)


def _apart(name: str, ids: tuple[str, ...]) -> ValueError:
    return ValueError(
        f"rows of series {shown(name)} do not follow one another; sort the file by {','.join(ids)}"
    )
