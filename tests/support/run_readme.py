"""Run every Python block of Markdown files, in order, each file in an empty directory.

python tests/support/run_readme.py README.md tscompress/training/README.md
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path


def python_blocks(text: str) -> list[str]:
    """The fenced blocks marked ``python``."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run(path: Path) -> None:
    blocks = python_blocks(path.read_text(encoding="utf-8"))
    if not blocks:
        raise SystemExit(f"{path} has no Python block")
    namespace: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for number, block in enumerate(blocks, start=1):
            print(f"--- block {number} of {path}")
            exec(compile(block, f"{path} block {number}", "exec"), namespace)
        os.chdir(path.parent)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        run(path)


if __name__ == "__main__":
    main()
