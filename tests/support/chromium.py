"""A headless Chromium, driven through its own pipe: no package beside the browser is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str | None:
    """A Chromium on PATH."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One open page.

    Attributes
    ----------
    said
        Errors of its scripts, what it wrote to the console, what its policy refused.
    asked
        Addresses of all that it requested.
    """

    def __init__(self, commands: int, answers: BinaryIO) -> None:
        self._commands, self._answers = commands, answers
        self._next, self._session = 0, ""
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to an address."""
        self._call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of what it promises."""
        found = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        found = self.evaluate(
            f"""new Promise((done) => {{
              const end = performance.now() + {1000 * seconds};
              const look = () => {{
                let there = false;
                try {{ there = !!({condition}); }} catch {{ there = false; }}
                if (there || performance.now() > end) done(there); else setTimeout(look, 20);
              }};
              look();
            }})"""
        )
        assert found, f"never: {condition}"

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size of the window, and the colours that the reader prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """A key of the keyboard: ``Tab`` or ``Enter``."""
        number = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number
            )

    def _call(self, method: str, **parameters: object) -> Mapping[str, Any]:
        self._next += 1
        command = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                found: Mapping[str, Any] = answer["result"]
                return found
            self._hear(answer)

    def _read(self) -> bytes:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            found += byte
        return bytes(found)

    def _hear(self, event: Mapping[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded":
            self.said.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])


@contextmanager
def open_page(browser: str, profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip

    def connect() -> None:  # it reads commands from its descriptor 3 and writes to 4
        os.dup2(theirs_in, 3)
        os.dup2(theirs_out, 4)

    with os.fdopen(ours_in, "rb") as answers:
        process = subprocess.Popen(
            command, preexec_fn=connect, pass_fds=(3, 4),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, answers)
        finally:
            os.close(ours_out)
            process.terminate()
            process.wait(30)
