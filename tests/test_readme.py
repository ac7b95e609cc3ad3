"""The commands that documents show are commands that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from tscompress.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
INLINE = re.compile(r"`(?:python -m )?tscompress ([a-z]+ [^`]*)`")
AT_START = re.compile(r"^(?:# )?(?:[$] )?tscompress ([^#\n]+)", re.MULTILINE)
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    """What follows ``tscompress``: in shell blocks and running text, or in a recipe's comments."""
    text = path.read_text(encoding="utf-8")
    blocks = [text] if path.suffix == ".yaml" else SHELL_BLOCK.findall(text)
    joined = [re.sub(r"\\\n(?:#\s*)?\s*", " ", block) for block in blocks]
    lines = [line.strip() for block in joined for line in AT_START.findall(block)]
    lines += [" ".join(line.split()) for line in INLINE.findall(text)]
    return [line for line in dict.fromkeys(lines) if "..." not in line]


def documents() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "eval" / "RESULTS.md",
        ROOT / "eval" / "NOTES.md",
        *sorted((ROOT / "recipes").rglob("*.yaml")),
    ]


CASES = [
    pytest.param(line, id=f"{path.name}: {line}"[:80])
    for path in documents()
    for line in commands(path)
]


def test_there_are_commands_to_look_at() -> None:
    readme = commands(ROOT / "README.md")
    shown = {line.split()[0] for line in readme}
    assert shown >= {"profile", "compress", "evaluate", "bench", "run", "recover", "push", "sweep"}
    assert all(commands(path) for path in documents()[2:])


@pytest.mark.parametrize("line", CASES)
def test_a_documented_command_parses(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments)
    assert context.params
