"""Who writes an output, where several processes run one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tscompress.evaluation.batching import Processes
from tscompress.io.making_way import claimed


@contextmanager
def claimed_by_main(path: Path | None) -> Iterator[None]:
    """Keep other processes from an output or the directory of a recovery while the block runs.

    None: from none. Of the processes of one recovery or evaluation, the first claims it.

    Raises
    ------
    OutputExistsError
        Another process writes there.
    OutputError
        Nothing can be written beside it.
    """
    if path is None or not Processes().is_main:
        yield
        return
    with claimed([path]):
        yield
