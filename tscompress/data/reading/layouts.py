"""Tables to series: long, wide, a row a series, lists in a row, or one series alone.

A column is a series only by its name, where no other column is left, or where the user names it:
numbers may also be ids, prices or row numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tscompress.data.reading.covariates import (
    check_roles,
    columns_named,
    covariate_values,
    with_numbers,
)
from tscompress.data.reading.format import ID_COLUMNS, TARGET_COLUMNS, TIME_COLUMNS, SeriesFormat
from tscompress.data.reading.observed import Kind, Layout, Observed, check_distinct, numbered
from tscompress.data.reading.times import QUARTER, Times, parse_times
from tscompress.data.reading.values import LARGEST, find_decimal, target_values
from tscompress.io.untrusted import shown

#: Names that pandas gives to a column without one: mostly its row numbers.
_UNNAMED = ("", "Unnamed: 0", "level_0", "index")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}\b.*|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b.*|" + QUARTER)
_NUMBER = re.compile(r"[-+]?[\d.,]*\d([eE][-+]?\d+)?")
_COUNTED = re.compile(r"(?P<prefix>.*?)(?P<number>\d{1,9})")
_FEWEST_STEPS = 3  # columns that follow one another before they are taken for steps
_YEARS = range(1500, 2200)


def named_columns(frame: pd.DataFrame, form: SeriesFormat) -> pd.DataFrame:
    """With an index as columns, and without row numbers.

    Raises
    ------
    ValueError
        There are no rows, or two columns have the same name.
    """
    index = frame.index
    if not isinstance(index, pd.RangeIndex) and (len(frame.columns) or len(index.names) > 1):
        frame = frame.reset_index()
    if not len(frame):
        raise ValueError("there are no rows")
    frame = frame.rename(columns=lambda name: str(name).strip())
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise ValueError(f"several columns are named {shown(twice)}")
    first = frame.columns[0] if len(frame.columns) else None
    given = (form.id_column, form.time_column, form.target_column)
    if first in _UNNAMED and first not in given and len(frame.columns) > 1:
        if frame[first].astype(str).str.fullmatch(r"\d+").all():
            return frame.drop(columns=[first])
        timed = (
            form.time_column is not None or _named(list(frame.columns), TIME_COLUMNS) is not None
        )
        if not timed and frame[first].astype(str).str.match(_DATE.pattern).all():
            return frame.rename(columns={first: "time"})
    return frame


def find_layout(frame: pd.DataFrame, form: SeriesFormat) -> Layout:
    """Which columns are ids, times and values.

    Raises
    ------
    ValueError
        A given column is missing, or the others are ambiguous.
    """
    names = list(frame.columns)
    ids = _ids(names, form)
    time = _given(names, form.time_column) or _named(names, TIME_COLUMNS)
    known, past = (
        columns_named(names, text) for text in (form.known_covariates, form.past_covariates)
    )
    beside = {*known, *past}
    lists = tuple(name for name in names if _holds_lists(frame[name]))
    if lists:
        _refuse_covariates(beside, "lists in a row")
        return _lists_layout(frame, form, ids, time, lists)
    if time is None and form.target_column is None:
        steps = _steps_in_header([name for name in names if name not in {*ids, *beside}])
        if steps and (layout := _rows_layout(frame, form, ids, steps)) is not None:
            _refuse_covariates(beside, "a row a series")
            return layout
    left = [name for name in names if name not in {*ids, time, *beside}]
    if len(names) == 1 and form.target_column is None and _NUMBER.fullmatch(str(names[0]).strip()):
        raise ValueError(
            f"the only column is called {shown(names[0])}, which may be its first value; give the "
            f"file a header, or --target-column {names[0]}"
        )
    targets = _targets(names, left, form)
    check_roles({"id": ids, "time": (time,), "target": targets, "known": known, "past": past})
    if time is None and (others := [name for name in left if name not in targets]):
        raise ValueError(
            f"no time column among {_listed(names)}; name one of {', '.join(TIME_COLUMNS)}, or "
            f"give --time-column; without times leave {_listed(others)} out"
        )
    kind: Kind = "long" if ids else "wide" if len(targets) > 1 else "one series"
    together = len(targets) > 1 and targets == _listed_targets(names, form)
    found = _layout(kind, ids, time, targets, form)
    return found._replace(known=known, past=past, together=together)


def _refuse_covariates(beside: Collection[Any], layout: str) -> None:
    if beside:
        raise ValueError(
            f"covariates are columns of a long table, with a row a value; this one has {layout}"
        )


def _layout(
    kind: Kind, ids: Sequence[Any], time: Any | None, targets: Sequence[Any], form: SeriesFormat
) -> Layout:
    known = {
        "id_column": ",".join(ids) or None,
        "time_column": time,
        "target_column": targets[0] if len(targets) == 1 else form.target_column,
    }
    return Layout(kind, tuple(ids), time, tuple(targets), form.model_copy(update=known))


def observed_series(frame: pd.DataFrame, layout: Layout) -> tuple[list[Observed], SeriesFormat]:
    """The series of a table, in the order of their first rows, and the notation they are in.

    Its decimal sign is None where no number shows one.

    Raises
    ------
    ValueError
        A value is no number, times are not dates of one form and zone, an id is missing, or two
        rows have the same id and time.
    """
    if layout.kind == "lists":
        return _of_lists(frame, layout)
    decimal = layout.form.decimal
    if decimal is None:
        beside = with_numbers(frame, (*layout.known, *layout.past), of_text=_is_text(layout))
        decimal = find_decimal(frame[[*layout.targets, *beside]], layout.form.separator)
        form = layout.form.model_copy(update={"decimal": decimal})
        layout = layout._replace(form=form)
    return (_of_rows if layout.kind == "rows" else _of_columns)(frame, layout)


def _is_text(layout: Layout) -> bool:
    """Whether cells are those of a text file, in which nothing has a type."""
    return layout.form.separator is not None


# --------------------------------------------------------------------------------------------------
# Columns by name
# --------------------------------------------------------------------------------------------------


def _listed(names: Sequence[Any]) -> str:
    return shown([str(name) for name in names])


def _named(names: Sequence[Any], usual: Sequence[str]) -> Any | None:
    lower = {str(name).lower(): name for name in reversed(list(names))}
    return next((lower[name] for name in usual if name in lower), None)


def _given(names: Sequence[Any], name: str | None) -> Any | None:
    if name is not None and name not in names:
        raise ValueError(f"there is no column {name!r}; it has {_listed(names)}")
    return name


def _ids(names: Sequence[Any], form: SeriesFormat) -> tuple[Any, ...]:
    given = form.id_column
    if given is None:
        usual = _named(names, ID_COLUMNS)
        return () if usual is None else (usual,)
    parts = [given] if given in names else [part.strip() for part in given.split(",")]
    return tuple(_given(names, part) for part in parts)


def _targets(names: Sequence[Any], left: Sequence[Any], form: SeriesFormat) -> tuple[Any, ...]:
    pattern = form.target_column
    if pattern is not None:
        if pattern in names:
            return (pattern,)
        if listed := _listed_targets(names, form):
            return listed
        matched = tuple(name for name in left if fnmatchcase(name, pattern))
        return matched or (_given(names, pattern),)
    usual = _named(left, TARGET_COLUMNS)
    if usual is not None:
        return (usual,)
    if len(left) == 1:
        return (left[0],)
    raise ValueError(
        f"no target column among {_listed(names)}; name one of {', '.join(TARGET_COLUMNS)}, or "
        "give --target-column, '*' if each of the others is a series, and --id-column if one "
        "identifies series"
    )


def _listed_targets(names: Sequence[Any], form: SeriesFormat) -> tuple[Any, ...]:
    """Targets named one by one, which are forecast together; none of another kind."""
    text = form.target_column
    several = text is not None and text not in names and "," in text
    return columns_named(names, text) if several else ()


def _holds_lists(column: pd.Series[Any]) -> bool:
    if column.dtype != object:
        return False
    first = column.iat[0]
    if first is None or first is np.nan:
        first = next(iter(column.dropna()), None)
    return isinstance(first, list | np.ndarray)


def _steps_in_header(names: Sequence[Any]) -> tuple[Any, ...]:
    """Names that are dates, or count up as d_1, d_2, d_3 do; none if there are fewer than three."""
    dates = tuple(name for name in names if _DATE.fullmatch(str(name)))
    if len(dates) >= _FEWEST_STEPS:
        return dates
    whole = tuple(name for name in names if str(name).isdecimal())
    if len(whole) >= _FEWEST_STEPS and all(map(_is_year, whole)):
        return whole  # years that are not there are missing values
    runs: dict[str, list[Any]] = {}
    for name in names:
        match = _COUNTED.fullmatch(str(name))
        if match is not None:
            run = runs.setdefault(match["prefix"], [])
            if not run or int(match["number"]) == _number(run[-1]) + 1:
                run.append(name)
    longest = max(runs.values(), key=len, default=[])
    return tuple(longest) if len(longest) >= _FEWEST_STEPS else ()


def _number(name: Any) -> int:
    match = _COUNTED.fullmatch(str(name))
    assert match is not None
    return int(match["number"])


def _is_year(name: Any) -> bool:
    return str(name).isdecimal() and int(name) in _YEARS


def _check_none_left_out(steps: Sequence[Any], others: Sequence[Any]) -> None:
    """Refuse columns that are named as the steps are, and do not follow one another."""
    match = _COUNTED.fullmatch(str(steps[0]))
    if match is None or _DATE.fullmatch(str(steps[0])):
        return
    for name in others:
        other = _COUNTED.fullmatch(str(name))
        if other is not None and other["prefix"] == match["prefix"]:
            raise ValueError(
                f"columns {shown(steps[0])} to {shown(steps[-1])} seem to be steps, but "
                f"{shown(name)} does not follow; number them one by one, or name them by date"
            )


# --------------------------------------------------------------------------------------------------
# Long and wide
# --------------------------------------------------------------------------------------------------


def _of_columns(frame: pd.DataFrame, layout: Layout) -> tuple[list[Observed], SeriesFormat]:
    form = layout.form
    numbers, names = numbered(frame, layout.ids)
    times: Times | None = None
    order = np.argsort(numbers, kind="stable")
    if layout.time is not None:
        times, date_format = parse_times(frame[layout.time], form.date_format)
        form = form.model_copy(update={"date_format": date_format})
        order = np.lexsort((times, numbers))
        times = times[order]
    same = np.diff(numbers[order]) == 0
    if times is not None:
        check_distinct(numbers[order], names, times, same)
    bounds = np.flatnonzero(~same) + 1
    stamps = [None] * len(names) if times is None else np.split(times, bounds)
    decimal = form.decimal or "."
    table = target_values(frame[list(layout.targets)], decimal)[order]  # [rows, targets]
    columns = (*layout.known, *layout.past)
    beside = covariate_values(frame, columns, decimal, of_text=_is_text(layout))
    parts = {name: np.split(column[order], bounds) for name, column in beside.items()}
    found = []
    for number, (name, rows) in enumerate(zip(names, np.split(table, bounds), strict=True)):
        covariates = {key: columns[number] for key, columns in parts.items()}
        there = np.atleast_1d(np.isfinite(rows).any(axis=1))
        group = name if layout.together else None
        for target, values in zip(layout.targets, rows.T, strict=True):
            several = len(layout.targets) > 1
            full = "/".join(filter(None, (name, str(target)))) if several else name
            one = Observed(full, values, stamps[number], covariates=covariates)
            found.append(one._replace(group=group, observed=there if layout.together else None))
    if not layout.together:  # in the order of the targets
        found = [
            one for at in range(len(layout.targets)) for one in found[at :: len(layout.targets)]
        ]
    return found, form


# --------------------------------------------------------------------------------------------------
# A row a series
# --------------------------------------------------------------------------------------------------


def _rows_layout(
    frame: pd.DataFrame, form: SeriesFormat, ids: Sequence[Any], steps: tuple[Any, ...]
) -> Layout | None:
    """Where columns are steps; None if they may as well be series."""
    others = [name for name in frame.columns if name not in steps]
    if form.id_column is None:
        unique = [name for name in others if frame[name].is_unique]
        usual = [name for name in unique if str(name).lower() in ID_COLUMNS]
        text = [name for name in unique if not pd.api.types.is_numeric_dtype(frame[name])]
        ids = (usual or text)[:1]
        if ids and not usual and not _DATE.fullmatch(str(steps[0])) and _holds_times(frame[ids[0]]):
            raise ValueError(
                f"{shown(ids[0])} holds times, and {shown(steps[0])} to {shown(steps[-1])} may be "
                f"series or steps; give --time-column {ids[0]}, or --id-column {ids[0]}"
            )
    if not ids and not _DATE.fullmatch(str(steps[0])):
        if not others:
            return None
        raise ValueError(
            f"rows seem to be series, from {shown(steps[0])} to {shown(steps[-1])}, but no column "
            f"among {_listed(others)} names each row; give --id-column"
        )
    _check_none_left_out(steps, [name for name in others if name not in ids])
    return _layout("rows", ids, None, steps, form)


def _holds_times(cells: pd.Series[Any]) -> bool:
    if pd.api.types.is_datetime64_any_dtype(cells.dtype):
        return True
    return bool(len(cells)) and all(_DATE.fullmatch(str(cell).strip()) for cell in cells)


def _of_rows(frame: pd.DataFrame, layout: Layout) -> tuple[list[Observed], SeriesFormat]:
    form, steps = layout.form, layout.targets
    numbers, names = numbered(frame, layout.ids)
    if not layout.ids:
        names = [str(row) for row in range(len(frame))]
    elif len(names) < len(frame):
        first = names[int(np.bincount(numbers).argmax())]
        raise ValueError(
            f"several rows are of series {first!r}; give --id-column, several as in store,item"
        )
    times: Times | None = None
    if _DATE.fullmatch(str(steps[0])):
        header = pd.Series([str(name) for name in steps], name="header")
        times, date_format = parse_times(header, form.date_format)
        form = form.model_copy(update={"date_format": date_format})
    elif all(map(_is_year, steps)):
        times, _ = parse_times(pd.Series([str(name) for name in steps], name="header"), "%Y")
    order = slice(None) if times is None else np.argsort(times)
    if times is not None:
        times = times[order]
        if (times[1:] == times[:-1]).any():
            raise ValueError("several columns are of the same time")
    table = target_values(frame[list(steps)], form.decimal or ".")[:, order]  # [rows, T]
    return [Observed(name, row, times) for name, row in zip(names, table, strict=True)], form


# --------------------------------------------------------------------------------------------------
# Lists in a row
# --------------------------------------------------------------------------------------------------


def _lists_layout(
    frame: pd.DataFrame,
    form: SeriesFormat,
    ids: Sequence[Any],
    time: Any | None,
    lists: Sequence[Any],
) -> Layout:
    left = [name for name in lists if name != time]
    usual = _named(list(frame.columns), TARGET_COLUMNS) if form.target_column is None else None
    if usual is not None and usual not in lists:
        left = [usual]  # some of its rows may hold lists
    targets = _targets(list(frame.columns), left, form)
    if time is None and form.time_column is None:
        time = _named(list(frame.columns), ("start",))
    return _layout("lists", ids, time, targets, form)


def _of_lists(frame: pd.DataFrame, layout: Layout) -> tuple[list[Observed], SeriesFormat]:
    form = layout.form
    rows = pd.Series(range(len(frame)), name="row")
    named = frame.assign(row=rows.to_numpy()) if not layout.ids else frame
    numbers, names = numbered(named, layout.ids or ("row",))
    if len(names) < len(frame):
        raise ValueError(
            f"several rows are of series {names[int(np.bincount(numbers).argmax())]!r}; give "
            "--id-column, several as in store,item"
        )
    stamps, starts, form = _times_of_rows(frame, layout)
    freqs = frame["freq"].tolist() if "freq" in frame.columns else [None] * len(frame)
    found: list[Observed] = []
    for row, name in enumerate(names):
        known = str(freqs[row]) if isinstance(freqs[row], str) and freqs[row] else None
        for target in layout.targets:
            full = f"{name}/{target}" if len(layout.targets) > 1 else name
            for one, values in _cell(frame[target].iloc[row], full, f"row {row + 1}", target):
                found.append(_in_order(Observed(one, values, stamps[row], known, starts[row]), row))
    return found, form


def _times_of_rows(
    frame: pd.DataFrame, layout: Layout
) -> tuple[list[Times | None], list[pd.Timestamp | None], SeriesFormat]:
    """Times of the values of each row, or when they start, where the file has them."""
    form, count = layout.form, len(frame)
    stamps: list[Times | None] = [None] * count
    starts: list[pd.Timestamp | None] = [None] * count
    if layout.time is None:
        return stamps, starts, form
    column = frame[layout.time]
    if _holds_lists(column):
        if column.isna().any():
            raise ValueError(f"{int(column.isna().sum())} rows have no times")
        flat = pd.Series(np.concatenate([np.asarray(cell) for cell in column]))
        if flat.empty:
            return [np.zeros(0, dtype="datetime64[ns]")] * count, starts, form
        times, date_format = parse_times(flat.rename(str(layout.time)), form.date_format)
        stamps = list(np.split(times, np.cumsum([len(cell) for cell in column])[:-1]))
    else:
        known = np.flatnonzero(column.notna())
        times, date_format = parse_times(column.iloc[known], form.date_format)
        for row, time in zip(known, times, strict=True):
            starts[row] = pd.Timestamp(time)
    return stamps, starts, form.model_copy(update={"date_format": date_format})


def _cell(
    cell: Any, name: str, place: str, target: Any
) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    """Names and values of the series of one cell: a list of numbers, or of such lists."""
    if not isinstance(cell, list | np.ndarray):
        raise ValueError(f"{place} has no list {str(target)!r}")
    kinds = set() if _is_flat(cell) else set(map(type, cell))
    nested = kinds & {list, np.ndarray}
    if nested and nested != kinds:
        raise ValueError(f"{place} mixes numbers and lists in {str(target)!r}")
    if not nested:
        yield name, _numbers(cell, place)
        return
    for number, part in enumerate(cell):
        yield f"{name}/{number}", _numbers(part, place)


def _is_flat(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype != object


def _numbers(values: Any, place: str) -> npt.NDArray[np.float64]:
    """A list of numbers as float64, ``[T]``; None is NaN."""
    text = not _is_flat(values) and str in set(map(type, values))
    try:
        if text:
            return target_values(pd.DataFrame({"": pd.Series(values, dtype=object)}), ".")[:, 0]
        numbers = np.array(values, dtype=np.float64)
    except (ValueError, TypeError, ArithmeticError):
        numbers = np.full(1, np.inf)
    usable = np.abs(numbers) <= LARGEST
    if numbers.ndim != 1 or not (usable | np.isnan(numbers)).all():
        raise ValueError(
            f"{place} holds a value that is no finite number within ±{LARGEST:g}: "
            f"{shown(list(values))}"
        )
    return numbers


def _in_order(one: Observed, row: int) -> Observed:
    if one.times is None:
        return one
    if len(one.times) != len(one.values):
        raise ValueError(f"row {row + 1} has {len(one.times)} times for {len(one.values)} values")
    order = np.argsort(one.times, kind="stable")
    times = one.times[order]
    numbers = np.zeros(len(times), dtype=np.int64)
    check_distinct(numbers, [one.name], times, np.diff(numbers) == 0)
    return one._replace(values=one.values[order], times=times)
