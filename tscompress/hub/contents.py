"""The files to upload from a directory: read once, and checked against their recorded hashes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import ModelCard, get_token
from yaml import YAMLError

from tscompress.checkpoints.integrity import weight_files
from tscompress.checkpoints.load import load
from tscompress.checkpoints.names import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    PLAN_FILE,
    PROVENANCE_FILE,
    WEIGHTS_FILE,
)
from tscompress.errors import CorruptCheckpointError, UsageError, VerificationError
from tscompress.hub.card import CARD_FILE
from tscompress.hub.origin import CheckpointRecord
from tscompress.io.hashing import sha256_of
from tscompress.io.network import one_line
from tscompress.io.own_outputs import RANKS_LOG
from tscompress.io.seeds import kept_random_state
from tscompress.io.untrusted import UnreadableFileError, regular_file, single_line
from tscompress.training.pretrain_recipe import PRETRAIN_FILE
from tscompress.workflows.save import RECIPE_FILE, RECOVERY_FIGURE_FILE, RECOVERY_LOG_FILE

#: Files to upload besides the weights and the card; no others are.
RECORDS = (
    CONFIG_FILE, GENERATION_FILE, PLAN_FILE, RECIPE_FILE, PRETRAIN_FILE, PROVENANCE_FILE,
    RECOVERY_LOG_FILE, RECOVERY_FIGURE_FILE, RANKS_LOG, INDEX_FILE,
)  # fmt: skip
_MAX_RECORD_BYTES = 64 * 2**20
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


@dataclass(frozen=True)
class Contents:
    """The verified files to upload, without the card.

    Attributes
    ----------
    records
        Small files, in memory.
    weights
        Paths of large ones, with the hash and the state by which a later change is found.
    """

    records: Mapping[str, bytes]
    weights: Mapping[str, WeightFile]

    @property
    def sizes(self) -> dict[str, int]:
        """In bytes."""
        small = {name: len(content) for name, content in self.records.items()}
        return small | {name: found.state[0] for name, found in self.weights.items()}

    def beside(self, other: Contents) -> Contents:
        """These files and those of ``other``."""
        return Contents({**self.records, **other.records}, {**self.weights, **other.weights})

    def check_state(self) -> None:
        """Raises VerificationError if weights were replaced or written to since."""
        for found in self.weights.values():
            if not found.path.is_file() or _state(found.path) != found.state:
                raise _changed(found.path)

    def check_hash(self, name: str, sha256: str) -> None:
        """Raises VerificationError if the weights that were sent have another hash."""
        if sha256 != self.weights[name].sha256:
            raise _changed(self.weights[name].path)


@dataclass(frozen=True)
class WeightFile:
    """One large file: its hash, and its size, inode and time, which are quick to compare."""

    path: Path
    state: tuple[int, int, int]
    sha256: str

    @classmethod
    def of(cls, path: Path) -> WeightFile:
        """Of a file as it is now."""
        state = _state(path)  # before the hash, so that a change while hashing is found
        return cls(path, state, sha256_of(path))


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_ino, found.st_mtime_ns


def _changed(path: Path) -> VerificationError:
    return VerificationError(
        f"{path.name} in {str(path.parent)!r} changed while it was being pushed; nothing was "
        "committed: run it again when nothing writes there."
    )


def read_records(directory: Path) -> dict[str, bytes]:
    """The small files to upload, read once, so that the checked content is the uploaded one.

    Raises
    ------
    UsageError
        One is a link or no file.
    CorruptCheckpointError
        One is too large, or cannot be read.
    """
    found = {}
    for path in (directory / name for name in RECORDS):
        if not os.path.lexists(path):
            continue
        check_is_file(path)
        try:
            regular_file(path, _MAX_RECORD_BYTES)
            found[path.name] = path.read_bytes()
        except (UnreadableFileError, OSError) as error:
            raise CorruptCheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    return found


def check_is_file(path: Path) -> None:
    """Refuse links, whose target may be any file of this machine.

    Raises
    ------
    UsageError
    """
    if path.is_symlink() or not path.is_file():
        raise UsageError(f"{str(path)!r} is a link or no file; put the file itself there.")


def verified(
    checkpoint: CheckpointRecord, records: Mapping[str, bytes]
) -> tuple[Contents, list[str]]:
    """Compare files with their recorded hashes; returns notes about unrecorded files.

    Raises
    ------
    CorruptCheckpointError
        There is no record of hashes.
    VerificationError
        A file differs from its record, or is missing.
    UsageError
        Weights are a link.
    """
    directory = checkpoint.directory
    recorded = checkpoint.provenance.get("sha256")
    paths = weight_files(directory)
    if not isinstance(recorded, dict) or not paths or not {p.name for p in paths} <= {*recorded}:
        raise CorruptCheckpointError(
            f"{PROVENANCE_FILE} of {str(directory)!r} has no sha256 of {WEIGHTS_FILE}, so nothing "
            "shows that these are the weights that were verified; compress again."
        )
    for path in paths:
        check_is_file(path)
    weights = {path.name: WeightFile.of(path) for path in paths}
    found = {name: hashlib.sha256(content).hexdigest() for name, content in records.items()}
    found |= {name: one.sha256 for name, one in weights.items()}
    for name, expected in recorded.items():
        if found.get(name) != expected:
            state = "differs from what tscompress wrote" if name in found else "is gone"
            raise VerificationError(
                f"{single_line(name)} in {str(directory)!r} {state} (sha256 in {PROVENANCE_FILE}); "
                "compress again, or restore it."
            )
    checked = (CONFIG_FILE, GENERATION_FILE, PLAN_FILE, INDEX_FILE, RECIPE_FILE, PRETRAIN_FILE)
    unknown = [name for name in checked if name in records and name not in recorded]
    notes = [
        f"an older tscompress recorded no sha256 of {', '.join(unknown)}: changes since cannot be "
        "found"
    ]
    return Contents(records, weights), notes if unknown else []


def about_local_paths(checkpoint: CheckpointRecord) -> list[str]:
    """A note that names local paths in recipe and provenance; none without any."""
    paths = ", ".join(map(single_line, checkpoint.local_paths))
    return [f"a recipe or {PROVENANCE_FILE} names {paths}"] if paths else []


def check_forecast(directory: Path) -> None:
    """Load the checkpoint as a user will, and check one forecast.

    Raises
    ------
    VerificationError
        The forecast is not finite.
    TscompressError
        The checkpoint does not load.
    """
    forecaster = load(directory).forecaster
    with kept_random_state():
        forecast = forecaster.predict([torch.sin(torch.arange(48.0) / 3)], prediction_length=4)
    if not all(bool(torch.isfinite(part).all()) for part in forecast):
        raise VerificationError(f"{str(directory)!r} forecasts values that are not finite.")


def check_is_card(text: str, directory: Path) -> None:
    """Refuse a card with metadata that the Hub cannot read.

    Raises
    ------
    UsageError
    """
    try:
        ModelCard(text)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, YAMLError) as error:
        # The rest is advice for callers of huggingface_hub.
        reason = one_line(error).partition(". Pass `ignore_metadata_errors")[0]
        raise UsageError(
            f"{str(directory / CARD_FILE)!r} is no model card: {reason}; fix it, or pass --force."
        ) from None


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Refuse to publish a Hub token that was pasted into a recipe, a card or a message.

    Raises
    ------
    UsageError
    """
    token = get_token()
    for name, text in texts.items():
        if _TOKEN.search(text) or (token and token in text):
            raise UsageError(f"{name} holds what looks like a Hub token; take it out first.")
