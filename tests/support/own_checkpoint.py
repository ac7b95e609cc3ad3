"""A directory that tscompress takes for its own."""

from __future__ import annotations

import json
from pathlib import Path

from tscompress.io.hashing import sha256_of

RECORD = "provenance.json"


def made(directory: Path) -> Path:
    """A checkpoint of ours with the file ``a.txt``, alone in its parent."""
    directory.mkdir(parents=True)
    (directory / "a.txt").write_text("old")
    record(directory)
    return directory


def record(directory: Path) -> None:
    """Write down the hashes of its files, as a checkpoint has them."""
    hashes = {path.name: sha256_of(path) for path in directory.iterdir() if path.name != RECORD}
    content = {"tscompress": "0", "source": {}, "sha256": hashes}
    (directory / RECORD).write_text(json.dumps(content))
