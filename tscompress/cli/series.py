"""``tscompress series``: what every command would read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tscompress.cli.console import path, show
from tscompress.cli.options import AsJson
from tscompress.cli.series_options import NOTHING_SAID, SeriesOptions, with_series_options

if TYPE_CHECKING:
    from rich.table import Table

    from tscompress.data.reading.read import SeriesFile
    from tscompress.data.reading.time_grid import RegularSeries

_LISTED = 8  # series that are shown
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # of a plot, in characters


@with_series_options()
def series(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV, TSV (also .gz, .bz2, .xz, .zip), Parquet, Arrow or JSON lines.", parser=path
        ),
    ],
    files: SeriesOptions = NOTHING_SAID,
    as_json: AsJson = False,
) -> None:
    """Show how a file of series is read: how many, how long, and each with a small plot.

    What --series of the other commands, and --suite FILE of evaluate, would read with the same
    options.
    """
    from tscompress.data.reading.read import read_file
    from tscompress.data.reading.summary import summarize
    from tscompress.data.series import check_observed

    form = files.form()
    read = read_file(file, form)
    check_observed(read, form.hold_out)
    summary = summarize(read, hold_out=form.hold_out)
    show(
        as_json,
        {**summary.model_dump(mode="json"), "each": [_record(one) for one in read.series]},
        f"{read.name}: {summary.line()}",
        f"layout: {read.kind}; {_said(read)}",
        _first_rows(read),
        _plots(read.series),
    )


def _said(read: SeriesFile) -> str:
    """Columns and notation, as options."""
    known = read.form.model_dump(exclude_none=True)
    shown = {name: "tab" if value == "\t" else value for name, value in known.items()}
    return " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in shown.items())


def _record(one: RegularSeries) -> dict[str, Any]:
    import numpy as np

    return {
        "name": one.name,
        "steps": len(one.values),
        "missing": int(np.isnan(one.values).sum()),
        "frequency": one.frequency,
        "first": None if one.begin is None else one.begin.isoformat(),
        "last": None if one.end is None else one.end.isoformat(),
    }


def _first_rows(read: SeriesFile) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tscompress.io.untrusted import single_line

    table = Table(title="first rows, as read", box=box.SIMPLE_HEAD)
    for column in read.head.columns:
        table.add_column(Text(single_line(column, 30)))
    for row in read.head.itertuples(index=False):
        table.add_row(*(Text(single_line(cell, 30)) for cell in row))
    return table


def _plots(every: Sequence[RegularSeries]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tscompress.io.untrusted import single_line

    title = f"the first {_LISTED} of {len(every):,} series" if len(every) > _LISTED else "series"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for header in ("name", "steps", "missing", "first", "last", "values"):
        table.add_column(header, justify="right" if header in ("steps", "missing") else "left")
    for one in every[:_LISTED]:
        known = _record(one)
        times = (str(known[end] or "").removesuffix("T00:00:00") for end in ("first", "last"))
        name = Text(single_line(one.name, 30) if one.name else "")
        table.add_row(
            name, f"{known['steps']:,}", f"{known['missing']:,}", *times, plot(one.values)
        )
    return table


def plot(values: Any) -> str:
    """A series in at most forty blocks, each the mean of as many steps; a space where none is."""
    import numpy as np

    parts = np.array_split(np.asarray(values, dtype=np.float64), min(_WIDTH, max(len(values), 1)))
    means = np.array([np.nan if np.isnan(p).all() else np.nanmean(p) for p in parts])
    if np.isnan(means).all():
        return ""
    low, high = np.nanmin(means), np.nanmax(means)
    share = (means - low) / (high - low) if high > low else np.where(np.isnan(means), np.nan, 0.0)
    steps = np.nan_to_num(share * (len(_BLOCKS) - 1)).round().astype(int)
    return "".join(
        " " if np.isnan(mean) else _BLOCKS[step] for mean, step in zip(means, steps, strict=True)
    )
