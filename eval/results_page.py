"""Fill the tables of RESULTS.md and other pages of results from files that scripts wrote.

    python eval/results_page.py            # after a table in eval/results was measured again
    python eval/results_page.py --check    # exit status 1 if a page is stale

A page marks where a table goes; what lies between the marks is replaced by ``results/NAME.md``:

    <!-- table: NAME -->
    <!-- /table -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tscompress.errors import UsageError
from tscompress.io.files import write_text_atomically

HERE = Path(__file__).resolve().parent
PAGES = (
    HERE / "RESULTS.md",
    HERE / "lab" / "README.md",
    HERE.parent / "recipes" / "fine-tuning.md",
)
RESULTS = HERE / "results"

_OPENING = re.compile(r"<!-- table: (\S+) -->")
_CLOSING = "<!-- /table -->"


def filled(text: str, results: Path) -> str:
    """The page ``text`` with every marked table as ``results`` has it.

    Raises
    ------
    UsageError
        A mark is not closed, is closed twice, or names a table that ``results`` does not have.
    """
    before, *parts = _OPENING.split(text)
    pages = [_outside(before)]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        _, closed, after = part.partition(_CLOSING)
        if not closed:
            raise UsageError(f"table {name!r} is not closed; end it with {_CLOSING!r}.")
        table = _table(name, results)
        pages.append(f"<!-- table: {name} -->\n\n{table}\n\n{_CLOSING}{_outside(after)}")
    return "".join(pages)


def names(text: str) -> list[str]:
    """The tables that the page ``text`` marks, in its order."""
    return _OPENING.findall(text)


def stale(text: str, results: Path) -> list[str]:
    """Tables of the page ``text`` that differ from ``results``; UsageError as in `filled`."""
    new = filled(text, results)
    return [
        name
        for name, ours, theirs in zip(names(text), _tables(text), _tables(new), strict=True)
        if ours != theirs
    ]


def _tables(text: str) -> list[str]:
    return [part.partition(_CLOSING)[0] for part in _OPENING.split(text)[2::2]]


def _outside(text: str) -> str:
    if _CLOSING in text:
        raise UsageError(f"{_CLOSING!r} closes no table; remove it, or open one above it.")
    return text


def _table(name: str, results: Path) -> str:
    """``results/NAME.md``; its headings become bold lines, so that sections stay the page's."""
    path = results / f"{name}.md"
    if not path.is_file():
        raise UsageError(f"there is no {path.name} in {results}; measure it, or unmark {name!r}.")
    text = path.read_text(encoding="utf-8").strip()
    return re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    arguments = parser.parse_args()
    old: dict[str, list[str]] = {}
    try:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            if found := stale(text, RESULTS):
                old[page.name] = found
            if not arguments.check:
                write_text_atomically(page, filled(text, RESULTS))
    except UsageError as error:
        parser.error(str(error))
    if old and arguments.check:
        named = "; ".join(f"{name}: {', '.join(tables)}" for name, tables in old.items())
        sys.exit(f"stale tables in {named}. Run python eval/results_page.py.")


if __name__ == "__main__":
    main()
