"""A process that runs tscompress commands against the Hub that its environment names.

huggingface_hub reads ``HF_ENDPOINT`` when it is imported, so that tests talk to their server from a
process of its own: one JSON request a line on stdin, one JSON answer a line on stdout. Sleeps are
shortened and reported.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import time
from typing import Any
from unittest.mock import patch

import typer.main

SHARE_OF_SLEEP = 0.02


def serve() -> None:
    answers = sys.stdout
    waits: list[float] = []
    sleep = time.sleep

    def shorter(seconds: float) -> None:
        waits.append(seconds)
        sleep(seconds * SHARE_OF_SLEEP)

    time.sleep = shorter
    from tscompress.cli import app as cli
    from tscompress.cli.console import quiet_libraries

    quiet_libraries()  # before what follows imports them, as a command does
    from opened_once import opened_once

    from tscompress.families.opening import Openable

    # Copies of a checkpoint lie in a folder of each test.
    Openable.open_stock = opened_once(Openable.open_stock, by_place=False)
    typer.main.get_command = functools.cache(typer.main.get_command)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        os.environ.update(request["environment"])
        waits.clear()
        out, err = io.StringIO(), io.StringIO()
        sys.argv = ["tscompress", *request["arguments"]]
        started = time.monotonic()
        with contextlib.ExitStack() as within:
            for name, value in request["constants"].items():
                within.enter_context(patch(f"huggingface_hub.constants.{name}", value))
            within.enter_context(contextlib.redirect_stdout(out))
            within.enter_context(contextlib.redirect_stderr(err))
            try:
                cli.main()
                code: Any = 0
            except SystemExit as stop:
                code = stop.code
        answer = {
            "code": code,
            "out": out.getvalue(),
            "err": err.getvalue(),
            "waits": list(waits),
            "seconds": time.monotonic() - started,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
