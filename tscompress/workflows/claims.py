"""Who writes an output, where several processes run one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tscompress.errors import UsageError
from tscompress.evaluation.batching import Processes
from tscompress.io.making_way import claimed


def check_alone(command: str) -> None:
    """Refuse several processes, of which each would write the output.

    Raises
    ------
    UsageError
    """
    if Processes().count > 1:
        raise UsageError(f"{command} runs in one process; start it without torchrun or accelerate.")


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
