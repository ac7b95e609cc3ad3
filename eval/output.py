"""What the scripts of this folder share: their options, and the tables that they write."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tscompress.checkpoints.load import check_device
from tscompress.errors import UsageError
from tscompress.io.files import write_text_atomically


def parser_of(
    description: str | None,
    writes: str | None = None,
    *,
    max_series: bool = False,
    device: bool = False,
) -> argparse.ArgumentParser:
    """A parser of options whose help is a script's docstring.

    Parameters
    ----------
    writes
        File endings for ``--output``, such as ``.csv and .md``; None: no such option.
    max_series
        Also ``--max-series``.
    device
        Also ``--device``, of scores and skill.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    if writes is not None:
        parser.add_argument("--output", type=Path, required=True, help=f"prefix of {writes}")
    if max_series:
        parser.add_argument("--max-series", type=int, help="first N series of each dataset")
    if device:
        parser.add_argument(
            "--device", type=_device, default="cpu",
            help="where models are scored and probed, such as cuda; they are made and timed on the "
            "CPU. Default: cpu",
        )  # fmt: skip
    return parser


def _device(name: str) -> str:
    try:
        return check_device(name)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write_tables(stem: str | Path, frame: pd.DataFrame, table: str) -> None:
    """``stem.csv`` with every digit, and ``stem.md`` for people; each replaced in one step."""
    write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
    write_text_atomically(Path(f"{stem}.md"), table)


def rows_of(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that an earlier run left in a CSV and that have all of ``columns``.

    Of no file, or one that cannot be read, none. ``settings`` are read as text.
    """
    if not path.exists():
        return []
    try:
        frame = pd.read_csv(path, dtype={"settings": str})
    except ValueError:  # of pandas: no columns, lines of other lengths; or no UTF-8
        return []
    if not set(columns) <= set(frame):
        return []
    return frame.dropna(subset=list(columns)).to_dict("records")


def rows_with(
    path: Path, columns: Sequence[str], settings: Collection[str]
) -> list[dict[str, Any]]:
    """Those of :func:`rows_of` that were measured with one of ``settings``; says how many were not.

    The column ``settings`` comes after all that is taken: a line that was cut off lacks it.
    """
    rows = rows_of(path, columns)
    kept = [row for row in rows if row.get("settings") in settings]
    if len(kept) < len(rows):
        print(
            f"{path}: {len(rows) - len(kept)} of {len(rows)} rows are of another model, other "
            "options, code or versions, and are not taken."
        )
    return kept


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to print while a script runs."""
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
    }


def plain_table(frame: pd.DataFrame, digits: int = 3) -> str:
    """Every column of ``frame`` as Markdown, numbers to the right."""
    numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in frame]
    lines = [
        " | ".join(map(str, frame.columns)),
        " | ".join("--:" if number else "---" for number in numeric),
    ]
    for row in frame.itertuples(index=False):
        cells = (f"{value:.{digits}f}" if isinstance(value, float) else value for value in row)
        lines.append(" | ".join(map(str, cells)))
    return "".join(f"| {line} |\n" for line in lines)
