"""A process of stock chronos, without tscompress, that opens checkpoints.

One path a line on stdin; one JSON answer a line on stdout: the name of the error and what it says,
or null where the checkpoint opened. It starts once for many checkpoints, because importing chronos
takes longer than a refusal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path


class StockChronos:
    """The process, and questions to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def refusal(self, checkpoint: Path) -> tuple[str, str] | None:
        """Name and text of the error with which stock chronos refuses; None: it opens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{checkpoint}\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return None if found is None else (str(found[0]), str(found[1]))

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    warnings.simplefilter("ignore")
    from chronos import BaseChronosPipeline

    for line in sys.stdin:
        answer: tuple[str, str] | None = None
        try:
            BaseChronosPipeline.from_pretrained(line.strip())
        except Exception as error:
            answer = (type(error).__name__, str(error))
        assert not any(name.partition(".")[0] == "tscompress" for name in sys.modules)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
