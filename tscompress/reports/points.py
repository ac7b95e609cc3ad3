"""Models in the plane of cost and quality, and tables of them that others measured.

``tscompress sweep`` and ``eval/peers.py`` write a CSV with a row for each model, the original among
them. Columns of costs may be amounts or ratios: all are divided by the original's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tscompress.errors import DataError, RecipeError, UsageError
from tscompress.evaluation.comparison import Ratio
from tscompress.evaluation.intervals import pareto_front
from tscompress.evaluation.results import METRICS
from tscompress.io.text import listed
from tscompress.io.untrusted import single_line
from tscompress.workflows.recipe import Recipe, with_columns
from tscompress.workflows.run_files import is_same_original
from tscompress.workflows.sweep import RECIPE_FILE as SWEEP_FILE
from tscompress.workflows.sweep import TABLE_FILE as SWEEP_TABLE
from tscompress.workflows.sweep_points import load_sweep_recipe

TABLE_SUFFIX = ".csv"
#: Cost to the names that its column may have.
_COSTS = {
    "parameters": ("parameters",),
    "latency_ms": ("latency_ms", "latency"),
    "bytes_on_disk": ("bytes_on_disk", "on disk"),
    "peak_memory_bytes": ("peak_memory_bytes", "peak MiB"),
    "macs": ("macs",),
}
#: Value of ``method`` or ``kind`` in the row of the original.
_ORIGINAL = ("original", "dense")
#: Fields of an evaluation that leave its scores comparable.
_NO_SCORE = {"batch_size", "seed", "root"}


class Point(NamedTuple):
    """A model in the plane of cost and quality; ratios are to the original."""

    name: str
    kind: str
    costs: dict[str, float]
    quality: dict[str, Ratio]


def table_points(path: Path, model: str) -> list[Point]:
    """The models of a CSV of ``tscompress sweep`` or ``eval/peers.py``, but for the original.

    Parameters
    ----------
    model
        The original of the table, checked if it has a column ``model``; that of a sweep has none,
        see :func:`check_table_is_of`.

    Raises
    ------
    UsageError
        There is no such file, or the table is of another model.
    DataError
        The file cannot be read, lacks a column or the original's row, or has a number that is none.
    """
    if not path.is_file():
        raise UsageError(f"there is no table {str(path)!r}; give a CSV file of `tscompress sweep`.")
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} is no table of models: {single_line(error)}.") from error
    kinds = _column(frame, ("method", "kind"), path)
    originals = frame[frame[kinds].isin(_ORIGINAL)]
    if len(originals) != 1:
        raise DataError(
            f"{str(path)!r} has {len(originals)} rows with {' or '.join(_ORIGINAL)} in {kinds!r}; "
            "give a table that has the original once, as sweep and eval/peers.py write it."
        )
    others = sorted({*map(str, frame["model"])} - {model}) if "model" in frame else []
    if others:
        raise UsageError(
            f"{str(path)!r} is of {single_line(others[0])!r}, this run of {model!r}; compare "
            "models made of the same original."
        )
    original = originals.iloc[0]
    labels = _column(frame, ("label",), path)
    return [
        Point(
            _name(str(row[kinds]), str(row[labels])),
            "other",
            dict(_costs(row, original, path)),
            {metric: _ratio(row, metric, path) for metric in METRICS},
        )
        for _, row in frame[~frame[kinds].isin(_ORIGINAL)].iterrows()
    ]


def check_table_is_of(path: Path, recipe: Recipe) -> None:
    """Refuse the table of a sweep that is of another model, or scored otherwise, than a run.

    What it is of is in the recipe beside it; a table without one is not checked.

    Raises
    ------
    UsageError
        The model, its revision, or what it was scored on differs.
    DataError
        The recipe beside the table is damaged.
    """
    beside = path.with_name(SWEEP_FILE)
    if path.name != SWEEP_TABLE or not path.is_file() or not beside.is_file():
        return
    try:
        swept = load_sweep_recipe(beside)
    except RecipeError as error:
        raise DataError(str(error)) from None
    if not is_same_original(swept, recipe):
        theirs, ours = (_revised(one.model, one.revision) for one in (swept, recipe))
        raise UsageError(
            f"{str(path)!r} is of {theirs!r}, this run of {ours!r}; compare models made of the "
            "same original."
        )
    if recipe.scored_on is None:
        return
    scored = with_columns(swept.evaluation, swept.series).model_dump(exclude=_NO_SCORE)
    ours_scored = recipe.scored_on.model_dump(exclude=_NO_SCORE)
    others = [name for name, value in scored.items() if value != ours_scored[name]]
    if others:
        raise UsageError(
            f"{str(path)!r} was evaluated with other {listed(others)} than this run; evaluate both "
            "alike."
        )


def _revised(model: str, revision: str | None) -> str:
    return model if revision is None else f"{model}@{revision}"


def front(points: Sequence[Point], metric: str, cost: str) -> set[str]:
    """Names of the points that no other beats in both; all have the cost."""
    costs = np.array([point.costs[cost] for point in points])
    scores = np.array([point.quality[metric].ratio for point in points])
    best = pareto_front(costs, scores)
    return {point.name for point, on_front in zip(points, best, strict=True) if on_front}


def _name(kind: str, label: str) -> str:
    return label if label.startswith(kind) else f"{kind}: {label}"


def _column(frame: pd.DataFrame, names: Sequence[str], path: Path) -> str:
    found = next((name for name in names if name in frame.columns), None)
    if found is None:
        raise DataError(
            f"{str(path)!r} has no column {' or '.join(map(repr, names))}; give a table that "
            "tscompress sweep or eval/peers.py wrote."
        )
    return found


def _costs(row: Any, original: Any, path: Path) -> Iterator[tuple[str, float]]:
    """Ratios of those that the table has for this model."""
    for cost, names in _COSTS.items():
        name = next((name for name in names if name in row), None)
        if name is None or pd.isna(row[name]) or pd.isna(original[name]):
            continue
        yield cost, _number(row, name, path) / _number(original, name, path)


def _ratio(row: Any, metric: str, path: Path) -> Ratio:
    central = metric if metric in row else f"{metric}_ratio"
    if central not in row:
        raise DataError(f"{str(path)!r} has no column {metric!r} or '{metric}_ratio'.")
    ends = []
    for end in ("low", "high"):
        name = next((n for n in (f"{metric} {end}", f"{metric}_{end}") if n in row), None)
        known = name is not None and not pd.isna(row[name])
        ends.append(_number(row, str(name), path) if known else None)
    return Ratio(ratio=_number(row, central, path), low=ends[0], high=ends[1])


def _number(row: Any, name: str, path: Path) -> float:
    try:
        number = float(row[name])
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number) or number <= 0:
        raise DataError(f"{str(path)!r} has {single_line(row[name])!r} in column {name!r}.")
    return number
