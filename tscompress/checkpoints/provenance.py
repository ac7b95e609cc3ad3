"""``provenance.json``: the origin of a checkpoint, versions, and hashes of its files."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tscompress._version import __version__
from tscompress.checkpoints.integrity import source_files, weight_files
from tscompress.checkpoints.names import PROVENANCE_FILE
from tscompress.io.files import write_text_atomically
from tscompress.io.hashing import sha256_of
from tscompress.io.untrusted import UnreadableFileError, read_json

_RECORDED_LIBRARIES = (
    "torch", "transformers", "chronos-forecasting", "safetensors", "numpy",
)  # fmt: skip


def write_provenance(
    directory: Path, source: dict[str, Any], *, others: Iterable[Path] = (), **facts: Any
) -> None:
    """Write ``provenance.json`` beside weights, configs and plan, which must exist.

    Parameters
    ----------
    source
        ``model``, ``revision``, ``family`` and ``sha256`` of the original; for a model trained from
        scratch, ``model`` and ``revision`` are None.
    others
        More files to hash.
    facts
        Further records; plain data.
    """
    record = {
        "tscompress": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": source,
        "sha256": hashes([*sorted(directory.glob("*.json")), *weight_files(directory), *others]),
        **facts,
        "libraries": {name: importlib.metadata.version(name) for name in _RECORDED_LIBRARIES},
        "python": platform.python_version(),
    }
    write_text_atomically(directory / PROVENANCE_FILE, json.dumps(record, indent=2) + "\n")


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """File name to hexadecimal SHA-256."""
    return {path.name: sha256_of(path) for path in paths}


def recorded_hashes(directory: Path) -> dict[str, str] | None:
    """SHA-256 of configs and weights by a directory's own record; None without one."""
    try:
        recorded = dict(read_json(directory / PROVENANCE_FILE)["sha256"])
    except (OSError, UnreadableFileError, KeyError, TypeError, ValueError):
        return None
    return hashes_of_model(directory, recorded)


def hashes_of_model(directory: Path, recorded: Mapping[str, str]) -> dict[str, str] | None:
    """Of ``recorded`` hashes those of files that determine forecasts; None without weights."""
    names = {path.name for path in source_files(directory)}
    found = {name: str(digest) for name, digest in recorded.items() if name in names}
    weights = {path.name for path in weight_files(directory)}
    return found if weights and weights <= found.keys() else None
