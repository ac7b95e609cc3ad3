"""Where the scripts of this folder leave what they measured."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tscompress.io.files import write_text_atomically


def write_tables(stem: str | Path, frame: pd.DataFrame, table: str) -> None:
    """``stem.csv`` with every digit, and ``stem.md`` for people; each replaced in one step."""
    write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
    write_text_atomically(Path(f"{stem}.md"), table)


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
