"""Documents: their commands are commands that the program takes, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from shared_fixtures import ROOT

from tscompress.cli.app import app

INLINE = re.compile(r"`(?:python -m )?tscompress ([a-z]+ [^`]*)`")
AT_START = re.compile(r"^(?:# )?(?:[$] )?tscompress ([^#\n]+)", re.MULTILINE)
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

FRONT_PAGE = ROOT / "README.md"
#: Of folders of the package that have a page.
FOLDERS = (
    "checkpoints", "compression", "data", "evaluation", "exporting", "families", "hub", "probing",
    "training", "workflows",
)  # fmt: skip
PAGES = [
    FRONT_PAGE,
    *(ROOT / "tscompress" / folder / "README.md" for folder in FOLDERS),
    ROOT / "recipes" / "README.md",
    ROOT / "recipes" / "your-data.md",
    ROOT / "recipes" / "fine-tuning.md",
    ROOT / "eval" / "README.md",
    ROOT / "tests" / "README.md",
    ROOT / "eval" / "RESULTS.md",
    ROOT / "eval" / "lab" / "README.md",
    *sorted((ROOT / "eval" / "notes").glob("*.md")),
]


def commands(path: Path) -> list[str]:
    """What follows ``tscompress``: in shell blocks and running text, or in a recipe's comments."""
    text = path.read_text(encoding="utf-8")
    blocks = [text] if path.suffix == ".yaml" else SHELL_BLOCK.findall(text)
    joined = [re.sub(r"\\\n(?:#\s*)?\s*", " ", block) for block in blocks]
    lines = [line.strip() for block in joined for line in AT_START.findall(block)]
    lines += [" ".join(line.split()) for line in INLINE.findall(text)]
    return [line for line in dict.fromkeys(lines) if "..." not in line]


def documents() -> list[Path]:
    return [*PAGES, *sorted((ROOT / "recipes").rglob("*.yaml"))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub derives them."""
    titles = HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


CASES = [
    pytest.param(line, id=f"{path.relative_to(ROOT)}: {line}"[:80])
    for path in documents()
    for line in commands(path)
]


def test_the_front_page_shows_the_common_commands() -> None:
    shown = {line.split()[0] for line in commands(FRONT_PAGE)}
    assert shown >= {"compress", "evaluate", "probe", "bench", "recover", "run", "push"}


def test_every_command_is_shown_somewhere() -> None:
    shown = {line.split()[0] for page in PAGES for line in commands(page)}
    assert shown == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def script_of(path: Path) -> Path | None:
    """The script of eval/ that the first line of a recipe runs with it; None: there is none."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    found = re.match(rf"# python (eval/\S+\.py) .*{re.escape(str(path.relative_to(ROOT)))}", first)
    script = ROOT / found[1] if found else None
    return script if script is not None and script.is_file() else None


def test_pages_and_recipes_have_commands() -> None:
    without = {path for path in documents() if not commands(path)}
    of_scripts = {
        ROOT / "eval" / "RESULTS.md",
        ROOT / "eval" / "lab" / "README.md",
        *(ROOT / "eval" / "notes").glob("*.md"),
    }
    of_scripts |= {path for path in without if script_of(path)}
    assert without <= {ROOT / "tests" / "README.md"} | of_scripts


def test_the_front_page_is_one_page() -> None:
    text = FRONT_PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900


def test_every_page_is_known() -> None:
    found = {*(ROOT / "tscompress").glob("*/README.md"), *ROOT.glob("[!.]*/README.md")}
    assert found <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("line", CASES)
def test_a_documented_command_parses(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments)
    assert context.params
