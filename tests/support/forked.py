"""Commands in processes of their own, forked from one that has imported the libraries.

Importing torch and chronos takes seconds, which a test of signals, exit codes or what stdout cannot
take need not wait for each time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

#: Seconds after which nothing is waited for.
LIMIT = 300
# The server outlives the test that starts it: a process takes the environment it is to have.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "tscompress.api",
        "tscompress.cli.app",
        "tscompress.plotting",
        "tscompress.evaluation.evaluate",
        "tscompress.training.pretraining",
        "tscompress.workflows.compress",
    ]
)


@dataclass(frozen=True)
class Program:
    """Python to run as a program of its own, the command by default.

    Attributes
    ----------
    arguments
        After the name of the program.
    folder
        What the program prints is in ``out`` and ``err`` there.
    code
        The program.
    encoding
        Of what it prints.
    out
        Where its output goes in place of ``out``; "": to a pipe that nobody reads.
    """

    arguments: tuple[str, ...]
    folder: Path
    code: str = "from tscompress.__main__ import main; main()"
    encoding: str = "utf-8"
    out: str | None = None

    @contextmanager
    def started(self) -> Iterator[ForkServerProcess]:
        """The process, which runs; none does after the block."""
        self.folder.mkdir(parents=True, exist_ok=True)
        process = PROCESSES.Process(target=_run, args=(self, dict(os.environ)))
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()

    def run(self) -> tuple[int, bytes, bytes]:
        """Exit code, and what the program printed to stdout and stderr."""
        with self.started() as process:
            return self.finish(process)

    def finish(self, process: ForkServerProcess) -> tuple[int, bytes, bytes]:
        """The same of one that was started."""
        process.join(LIMIT)
        assert process.exitcode is not None, self._printed("err")
        return process.exitcode, self._printed("out"), self._printed("err")

    def interrupt(self, process: ForkServerProcess, after: str) -> None:
        """Ctrl-C once the program has printed a text to stdout."""
        end = time.monotonic() + LIMIT
        while after.encode() not in self._printed("out"):
            assert process.exitcode is None, self._printed("err")
            assert time.monotonic() < end, self._printed("err")
            time.sleep(0.02)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)

    def _printed(self, name: str) -> bytes:
        path = self.folder / name
        return path.read_bytes() if path.exists() else b""


def _run(program: Program, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # Python's own
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name, place in ((1, "out", program.out), (2, "err", None)):
        if place == "":
            reader, stream = os.pipe()
            os.close(reader)
        else:
            path = program.folder / name if place is None else Path(place)
            stream = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, number)
        opened = os.fdopen(number, "w", encoding=program.encoding, closefd=False)
        setattr(sys, f"std{name}", opened)
    sys.argv = ["tscompress", *program.arguments]
    try:
        exec(program.code, {"__name__": "__main__"})
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            os._exit(120)  # as the interpreter does at its end
