"""Output of the commands: results, progress, memory estimates and notes; checks of options.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tscompress.errors import OutputError, UsageError
from tscompress.io.files import user_path
from tscompress.progress import OnProgress, TimeLeft

if TYPE_CHECKING:
    from tscompress.data.reading.summary import SeriesSummary

#: Width of tables in a pipe, which has none.
_WIDTH = 110
#: From one line of a long work to the next, where there is no terminal.
_SECONDS = 30
#: 128 + SIGPIPE, the exit code of a tool whose output is no longer read.
_NOT_READ = 141


def path(text: str) -> Path:
    """A path of the command line, see :func:`tscompress.io.files.user_path`."""
    return user_path(text)


def duration(seconds: float) -> str:
    """``HH:MM:SS``, with any number of hours."""
    minutes, rest = divmod(max(0, round(seconds)), 60)  # a limit of minutes may be passed
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def replace_unencodable() -> None:
    """Print characters that the encoding lacks, such as ε in ASCII, as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def quiet_libraries() -> None:
    """Silence the logs and progress bars of libraries; a command shows its own progress.

    On a terminal downloads keep theirs, and :mod:`tscompress.io.quiet` silences loading.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("chronos", "matplotlib"):  # which warns of a home that it cannot write to
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def show(as_json: bool, content: dict[str, Any], *shown: object) -> None:
    """Print a result: ``content`` as JSON, or the texts and rich tables in ``shown``.

    Raises as :func:`say`.
    """
    if as_json:
        say(json.dumps(_finite(content), indent=2, allow_nan=False, default=str))
        return
    console = _Results()
    if not console.is_terminal:
        console = _Results(width=_WIDTH)
    with _printing():
        for item in shown:
            # Text is printed verbatim: no line breaks in paths, no markup in brackets.
            plain = isinstance(item, str)
            console.print(item, markup=not plain, highlight=not plain, soft_wrap=plain)


def _finite(content: Any) -> Any:
    """The same with null for numbers that JSON cannot say: infinite ones, and NaN."""
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def say(text: str) -> None:
    """Print a line to stdout and flush.

    Raises
    ------
    typer.Exit
        The pipe is closed; silently and with 141, as other tools.
    OutputError
        It cannot be written; the work of the command is done nevertheless.
    """
    with _printing():
        print(text, flush=True)


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """Some versions of rich exit with 1 in the except clause that calls this."""
        raise


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with suppress(OSError, ValueError):  # or the interpreter flushes again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(_NOT_READ) from None
        raise OutputError(
            f"the result could not be printed: {error.strerror}; files of the command are complete."
        ) from None


def say_memory(needed: Mapping[str, int], processes: int = 1) -> None:
    """Print an estimate of memory by part, in bytes, and a note if less is free.

    ``needed`` is for each of several ``processes``.
    """
    from tscompress.io.memory import available_bytes

    total = sum(needed.values())
    parts = ", ".join(f"{name} {_size(count)}" for name, count in needed.items())
    each = f" for each of {processes} processes" if processes > 1 else ""
    typer.echo(f"memory, about: {_size(total)}{each} ({parts})", err=True)
    free = available_bytes()
    if processes * (total - needed.get("process", 0)) > free:
        typer.echo(f"note: only {_size(free)} of memory are free.", err=True)


def say_series(summary: SeriesSummary | None) -> None:
    """What was read from a file of series, before anything is done with it."""
    if summary is not None:
        typer.echo(f"series: {summary.line()}", err=True)


def say_note(note: str | None) -> None:
    """Print notes to stderr, a line each, if there are any."""
    for line in (note or "").splitlines():
        typer.echo(f"note: {line}", err=True)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def refuse(context: typer.Context, reason: str, names: Sequence[str]) -> None:
    """Refuse options that were given and would be ignored.

    Raises
    ------
    UsageError
        One of ``names`` was given on the command line; the message starts with ``reason``.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{reason}; --{name.replace('_', '-')} cannot go with it.")


def integers(text: str, option: str) -> list[int]:
    """Read ``0,1,2`` as a list; UsageError with the name of the option for other text."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a list of integers such as 0,1,2.") from None


@contextmanager
def progress_bars(quiet_seconds: float = 30.0) -> Iterator[OnProgress]:
    """Bars on stderr, one per stage; yields ``advance(stage, done, total)``.

    If stderr is not a terminal, work that takes long is told in lines, ``quiet_seconds`` apart.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressLines(quiet_seconds)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        tasks: dict[str, Any] = {}
        reached: dict[str, int] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in bars.tasks:  # what is done makes room: each dataset is a stage
                    if task.finished:
                        bars.update(task.id, visible=False)
                tasks[stage] = bars.add_task(stage, total=total)
            elif done < reached[stage]:  # it begins again
                bars.reset(tasks[stage], total=total)
            reached[stage] = done
            bars.update(tasks[stage], completed=done, total=total, visible=True)

        yield advance


class _ProgressLines:
    """A line now and then: the stage, steps done, and about how much time is left."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._told: dict[str, float] = {}
        self._stages: dict[str, TimeLeft] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        seconds = self._stages.setdefault(stage, TimeLeft()).after(done, total)
        quiet = time.monotonic() - self._told.setdefault(stage, time.monotonic())
        if seconds is None or quiet < self._quiet_seconds or done == total:
            return
        self._told[stage] = time.monotonic()
        with suppress(OSError):  # the work continues although the pipe is closed
            typer.echo(f"{stage}: {done} of {total}, about {duration(seconds)} left", err=True)


@contextmanager
def training_progress(shown: bool) -> Iterator[Callable[[Any], None]]:
    """One bar with loss, learning rate and time left on stderr; lines if it is not a terminal."""
    console = Console(stderr=True)
    live = console.is_terminal
    with Progress(
        TextColumn("recover"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
        disable=not (live and shown),
    ) as bars:
        task = bars.add_task("recover", total=1.0, text="")
        held_out, printed = "", time.monotonic()

        def report(line: Any) -> None:
            nonlocal held_out, printed
            if line.held_out is not None:
                held_out = f"  held out {line.held_out:.4f}"
            steps = f"/{line.total_steps}" if line.total_steps else ""
            left = duration(line.eta_seconds)
            loss = "" if line.loss is None else (
                f"  loss {line.loss:.4f}  lr {line.learning_rate:.2e}  "
                f"{line.series_per_second:.0f} series/s"
            )  # fmt: skip
            text = f"step {line.step}{steps}{loss}{held_out}  left {left}"
            if live:
                bars.update(task, completed=line.share, text=text)
            elif shown and (line.held_out is not None or time.monotonic() - printed > _SECONDS):
                printed = time.monotonic()
                with suppress(OSError):  # a recovery continues although the pipe is closed
                    typer.echo(text, err=True)

        yield report
