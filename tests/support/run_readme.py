"""Run every Python block of Markdown files, in order, each file in an empty directory.

python tests/support/run_readme.py --processes 2 README.md tscompress/training/README.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def python_blocks(text: str) -> list[str]:
    """The fenced blocks marked ``python``."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run(path: Path) -> None:
    blocks = python_blocks(path.read_text(encoding="utf-8"))
    if not blocks:
        raise ValueError(f"{path} has no Python block")
    namespace: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for number, block in enumerate(blocks, start=1):
            print(f"--- block {number} of {path}", flush=True)
            exec(compile(block, f"{path} block {number}", "exec"), namespace)
        os.chdir(path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=1, help="so many files at a time")
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    paths = [path.resolve() for path in given.files]
    spawn = multiprocessing.get_context("spawn")  # as if each were run alone
    with ProcessPoolExecutor(given.processes, mp_context=spawn) as processes:
        list(processes.map(run, paths))


if __name__ == "__main__":
    main()
