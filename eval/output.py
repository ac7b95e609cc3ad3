"""Where the scripts of this folder leave what they measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tscompress.io.files import write_text_atomically


def write_tables(stem: str | Path, frame: pd.DataFrame, table: str) -> None:
    """``stem.csv`` with every digit, and ``stem.md`` for people; each replaced in one step."""
    write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
    write_text_atomically(Path(f"{stem}.md"), table)


def rows_of(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that an earlier run left in a CSV and that have all of ``columns``; of no file, none."""
    if not path.exists():
        return []
    frame = pd.read_csv(path)
    if not set(columns) <= set(frame):
        return []
    return frame.dropna(subset=list(columns)).to_dict("records")


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
