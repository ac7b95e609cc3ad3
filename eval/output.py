"""Where the scripts of this folder leave what they measured."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tscompress.io.files import write_text_atomically


def write_tables(stem: str | Path, frame: pd.DataFrame, table: str) -> None:
    """``stem.csv`` with every digit, and ``stem.md`` for people; each replaced in one step."""
    write_text_atomically(Path(f"{stem}.csv"), frame.to_csv(index=False))
    write_text_atomically(Path(f"{stem}.md"), table)
