"""What the scripts of this folder share: verdicts on claims, and the files of a section."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from rich.console import Console

from tscompress.errors import TscompressError, UsageError
from tscompress.io.files import write_text_atomically
from tscompress.plotting import save_figure

sys.path.append(str(Path(__file__).resolve().parent.parent))
from output import parser_of, rows_of, write_tables
from pretrained import pretrained

__all__ = [
    "Counts", "Found", "Section", "Verdict", "chosen", "listed", "measure", "one_line_errors",
    "parser_of", "parser_of_sections", "plain_ticks", "pretrained", "slope",
]  # fmt: skip

COLUMNS = ("section", "statement", "claim", "measured", "expected", "holds", "as_expected")


class Verdict(NamedTuple):
    """A claim and what was measured of it.

    Attributes
    ----------
    statement
        Where it stands, and in which version: ``Theorem 3.1, printed``.
    expected
        What the measurement must show for the claim to hold, or why it should not.
    holds
        Whether it does.
    should
        Whether it was expected to.
    """

    statement: str
    claim: str
    measured: str
    expected: str
    holds: bool
    should: bool = True


class Found(NamedTuple):
    """Of one section: verdicts, the numbers of its figure, and the figure."""

    verdicts: Sequence[Verdict]
    numbers: pd.DataFrame
    figure: Figure


class Counts(NamedTuple):
    """Of the verdicts in a table: all, those that hold, and those that are not as expected."""

    verdicts: int
    hold: int
    unexpected: int

    @property
    def line(self) -> str:
        """``12 verdicts: 9 hold, 3 do not; 2 are not as expected``."""
        fail = self.verdicts - self.hold
        return (
            f"{self.verdicts} verdicts: {self.hold} hold, {fail} do not; {self.unexpected} are not "
            "as expected"
        )


#: Measures a section, quickly or in full.
Section = Callable[[bool], Found]


def parser_of_sections(
    description: str | None, names: Iterable[str], quick: str
) -> argparse.ArgumentParser:
    """A parser of ``--output``, ``--quick``, whose help is given, and ``--only``."""
    parser = parser_of(description, ".csv, .md, and -SECTION.csv and .png")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="SECTION", help=", ".join(names)
    )
    return parser


@contextmanager
def one_line_errors() -> Iterator[None]:
    """An error of tscompress ends the script with one line and its exit status."""
    try:
        yield
    except TscompressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def chosen(sections: Mapping[str, Section], only: Sequence[str] | None) -> dict[str, Section]:
    """The sections of these names; None: all.

    Raises
    ------
    UsageError
        No section has such a name.
    """
    unknown = [name for name in only or () if name not in sections]
    if unknown:
        raise UsageError(f"no section is called {unknown[0]!r}; there are {', '.join(sections)}.")
    return {name: run for name, run in sections.items() if not only or name in only}


def measure(
    sections: Mapping[str, Section], output: Path, *, quick: bool, only: Sequence[str] | None = None
) -> Counts:
    """Write ``output-NAME.csv`` and ``.png`` of each section, and all verdicts to ``output``.

    Verdicts of sections that are left out stay as an earlier run wrote them. One that is not as
    expected is a finding and no failure: it is told, and the last line counts them all.
    """
    console, todo = Console(), chosen(sections, only)
    rows = rows_of(Path(f"{output}.csv"), COLUMNS)
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    for name, run in todo.items():
        start = time.monotonic()
        found = run(quick)
        write_text_atomically(Path(f"{output}-{name}.csv"), found.numbers.to_csv(index=False))
        save_figure(found.figure, Path(f"{output}-{name}.png"))
        console.print(f"{name}: {time.monotonic() - start:.0f} s")
        for verdict in found.verdicts:
            console.print(f"  {_mark(verdict.holds)} {verdict.statement}: {verdict.measured}")
        rows = [row for row in rows if row["section"] != name]
        rows += [_row(name, verdict) for verdict in found.verdicts]
        rows.sort(key=lambda row: list(sections).index(row["section"]))
        frame = pd.DataFrame(rows, columns=list(COLUMNS))
        write_tables(output, frame, markdown(frame))
    wrong = frame[~frame["as_expected"].astype(bool)]
    for row in wrong.itertuples():
        console.print(f"not as expected: {row.statement}: {row.claim}: {row.measured}")
    counts = Counts(len(frame), int(frame["holds"].astype(bool).sum()), len(wrong))
    console.print(f"{output}.md: {counts.line}", soft_wrap=True)
    return counts


def _row(section: str, verdict: Verdict) -> dict[str, Any]:
    *texts, holds, should = verdict
    holds = bool(holds)
    return dict(zip(COLUMNS, (section, *texts, holds, holds == should), strict=True))


def _mark(holds: object) -> str:
    return "yes" if holds else "**no**"


def markdown(frame: pd.DataFrame) -> str:
    """The verdicts as GitHub shows them."""
    lines = ["| statement | claim | measured | expected | holds |", "|---|---|---|---|---|"]
    for row in frame.itertuples():
        note = "" if row.as_expected else ", not as expected"
        cells = (row.statement, row.claim, row.measured, row.expected, _mark(row.holds) + note)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line of log y on log x."""
    return float(np.polyfit(np.log(np.asarray(x)), np.log(np.asarray(y)), 1)[0])


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Ticks at these values alone, written as they are, of a logarithmic axis."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def listed(values: Sequence[float], digits: int = 2) -> str:
    """``1.05, 0.98``, to significant digits."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
