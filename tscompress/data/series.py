"""Series from files and callers, for training and calibration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.read import SeriesFile, read_file
from tscompress.data.reading.summary import SeriesSummary, summarize
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.data.reading.values import floats
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DataError
from tscompress.io.text import counted

DEFAULT_FORMAT = GivenSeries()

#: Series of a caller, the path of a file of them, or none.
Given = Sequence[FloatArray] | str | Path | None


class LabelledSeries(list[FloatArray]):
    """A list of 1-D series that knows how often each was sampled, and where it is from.

    A slice or a sum is a plain list: the labels hold for the list as it was made.

    Attributes
    ----------
    frequencies
        For each series a key of :data:`tscompress.data.reading.time_grid.FREQUENCIES`, or another
        name of the user's; None where unknown.
    names
        Of each series in its file; empty where they have none.
    summary
        What was read from the file; None if they are not from one.
    source, form
        The file, and how it was read; ``source`` is None if they are not from one.
    sha256
        Of the file when it was read.

    Raises
    ------
    DataError
        Not one frequency a series.
    """

    def __init__(
        self,
        series: Iterable[FloatArray],
        frequencies: Iterable[str | None],
        names: Iterable[str] = (),
        summary: SeriesSummary | None = None,
        source: str | None = None,
        form: GivenSeries = DEFAULT_FORMAT,
        sha256: str | None = None,
    ) -> None:
        super().__init__(series)
        self.frequencies = tuple(frequencies)
        self.names = tuple(names)
        self.summary = summary
        self.source, self.form, self.sha256 = source, form, sha256
        if len(self.frequencies) != len(self):
            raise DataError(
                f"{len(self.frequencies)} frequencies for {len(self)} series; give one a series, "
                "None where it is unknown."
            )

    def __repr__(self) -> str:
        said = counted(len(self), "series") if self.summary is None else self.summary.line()
        return f"LabelledSeries({said})"


def read_series(path: str | Path, form: GivenSeries = DEFAULT_FORMAT) -> LabelledSeries:
    """Series of a file, float32, each 1-D, in file order; missing values are NaN.

    CSV, Parquet, Arrow and JSON lines in the layouts that ``tscompress/data/README.md`` shows:
    long, wide, a row a series, lists in a row. The list also has each series' name and frequency,
    and a summary of what was read.

    Parameters
    ----------
    path
        The file.
    form
        Columns and notation where the file does not show them, and how many steps at the end of
        each series to leave out.

    Raises
    ------
    DataError
        The file is missing, of another kind, could be read in several ways, or holds no series.
    """
    read = read_file(path, form)
    check_observed(read, form.hold_out)
    series = [(floats(_calibrated(one, form.hold_out)), one) for one in read.series]
    kept = [(values, one) for values, one in series if np.isfinite(values).any()]
    return LabelledSeries(
        [values for values, _ in kept],
        [one.frequency for _, one in kept],
        [one.name for _, one in kept],
        summarize(read, hold_out=form.hold_out),
        str(path),
        form,
        read.sha256,
    )


def check_observed(read: SeriesFile, hold_out: int) -> None:
    """Refuse a file without any observed value before the steps that are held out.

    Raises
    ------
    DataError
    """
    if not any(np.isfinite(_calibrated(one, hold_out)).any() for one in read.series):
        raise DataError(
            f"{read.name!r} has no series with an observed value"
            + (f" before the last {hold_out} steps; lower --hold-out." if hold_out else ".")
        )


def _calibrated(one: RegularSeries, hold_out: int) -> npt.NDArray[np.float64]:
    """The values before the steps that are held out."""
    return one.values[: max(0, len(one.values) - hold_out)]


def read_again(series: Given) -> Given:
    """What may be read more than once: the series of a generator as a list."""
    return list(series) if isinstance(series, Iterator) else series


def given_series(series: Sequence[FloatArray] | str | Path) -> list[FloatArray]:
    """Series from a caller, as :func:`iterate_given` has them; a path is read by
    :func:`read_series`, and a :class:`LabelledSeries` keeps its labels.

    Raises
    ------
    DataError
        Names the first series that is no list of numbers.
    """
    if isinstance(series, str | Path):
        return read_series(series)
    found = iterate_given(series)
    if isinstance(series, LabelledSeries):
        if len(series.frequencies) != len(series):
            raise DataError(
                f"{len(series)} series have {len(series.frequencies)} frequencies: the list was "
                "changed after it was made. Make a new LabelledSeries."
            )
        return LabelledSeries(
            found, series.frequencies, series.names, series.summary, series.source, series.form,
            series.sha256,
        )  # fmt: skip
    return list(found)


def iterate_given(series: Iterable[FloatArray]) -> Iterator[FloatArray]:
    """Each series as float32, 1-D; values that are not finite, or too large, are NaN.

    Raises
    ------
    DataError
        Names the first series that is no list of numbers.
    """
    for index, values in enumerate(series):
        try:
            array = np.asarray(values, dtype=np.float64)
        except (ValueError, TypeError):
            raise DataError(f"series {index} is no list of numbers.") from None
        if array.ndim != 1:
            raise DataError(
                f"series {index} has {array.ndim} dimensions; give a list of series, each a list "
                "of numbers, as in [[1.0, 2.0, 3.0], ...]."
            )
        yield floats(array)
