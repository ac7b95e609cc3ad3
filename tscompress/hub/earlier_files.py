"""Files that an earlier push left in a repository, and would be taken for those of the next one.

Loaders read ``model.safetensors`` before shards, and a recipe that is left is read as that of the
new weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from tscompress.checkpoints.names import PROVENANCE_FILE, WEIGHTS_FILE
from tscompress.errors import CorruptCheckpointError, UnsupportedModelError
from tscompress.hub.card import CARD_FILE, ONNX_FOLDER
from tscompress.hub.contents import Contents
from tscompress.hub.onnx_files import made_of
from tscompress.io.hashing import sha256_of
from tscompress.io.untrusted import UnreadableFileError, read_json
from tscompress.runtime.record import RECORD_FILE, read_record, readable

_RECORD = f"{ONNX_FOLDER}/{RECORD_FILE}"
#: Of a dry run, which does not look at the repository.
WOULD_REMOVE = (
    "if an earlier push left files of a checkpoint that this one lacks, or with --onnx "
    f"left files of other weights in {ONNX_FOLDER}/, they would be removed"
)


@dataclass(frozen=True)
class EarlierFiles:
    """What becomes of files that a repository has.

    Attributes
    ----------
    stale
        Those that tscompress wrote, unchanged since, and that do not belong to what goes up.
    notes
        Why others stay, one sentence each.
    seen_at
        The commit that was looked at.
    """

    stale: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen_at: str | None = None


def earlier_files(
    api: HfApi, repo_id: str, revision: str | None, contents: Contents
) -> EarlierFiles:
    """Look at the files of a repository beside ``contents``, which are about to go up."""
    info = api.model_info(repo_id, revision=revision, files_metadata=True)
    there = _Repository(api, repo_id, info.sha, {s.rfilename: s for s in info.siblings or ()})
    stale, notes = earlier_checkpoint(there, contents)
    stale_onnx, notes_on_onnx = earlier_onnx(there, contents)
    return EarlierFiles(stale + stale_onnx, notes + notes_on_onnx, info.sha)


class _Repository(NamedTuple):
    """The files of a repository at one commit."""

    api: HfApi
    repo_id: str
    commit: str | None
    files: Mapping[str, Any]

    def local(self, name: str) -> Path:
        """A copy of a file."""
        return Path(self.api.hf_hub_download(self.repo_id, name, revision=self.commit))

    def unchanged(self, recorded: Mapping[str, Any], folder: str = "") -> dict[str, bool]:
        """Whether files have their recorded hashes still, of those that are there."""
        found = {}
        for name, sha256 in recorded.items():
            place = f"{folder}{name}"
            if place in self.files and Path(name).name == name:
                large = self.files[place].lfs
                now = sha256_of(self.local(place)) if large is None else large.sha256
                found[place] = now == sha256
        return found


#: What is stale, and notes.
_Found = tuple[tuple[str, ...], tuple[str, ...]]


def earlier_checkpoint(there: _Repository, contents: Contents) -> _Found:
    """Files of an earlier checkpoint that ``contents`` lack, as its provenance names them."""
    recorded: Mapping[str, Any] = {}
    if PROVENANCE_FILE in there.files:
        with suppress(UnreadableFileError, KeyError, TypeError, ValueError):
            recorded = dict(read_json(there.local(PROVENANCE_FILE))["sha256"])
    sent = {CARD_FILE, *contents.sizes}
    absent = {name: sha256 for name, sha256 in recorded.items() if name not in sent}
    unchanged = there.unchanged(absent)
    stale = tuple(name for name, same in unchanged.items() if same)
    weights = WEIGHTS_FILE in there.files and WEIGHTS_FILE not in sent.union(stale)
    note = (
        f"{WEIGHTS_FILE} in {there.repo_id!r} is none that tscompress wrote and stays: loaders "
        "read it before the shards that were pushed; delete it there"
    )
    return stale, (note,) if weights else ()


def earlier_onnx(there: _Repository, contents: Contents) -> _Found:
    """ONNX files of other weights.

    The record that ``tscompress export`` writes says which files are its own, by their hashes, and
    of which weights they were made. Without it nothing there is ours.
    """
    repo_id, own = there.repo_id, _RECORD in contents.records
    if _RECORD not in there.files:
        return (), ()
    record = _record_of(there.local(_RECORD))
    if record is None:
        note = f"{ONNX_FOLDER}/ in {repo_id!r} stays: its {RECORD_FILE} is none of this tscompress"
        return (), () if own else (note,)
    if made_of(record["source"], contents):
        note = (
            f"{ONNX_FOLDER}/ in {repo_id!r} is of these weights and stays; give --onnx as well, "
            "for the card to name it"
        )
        return (), () if own else (note,)
    if not record["source"].get("sha256"):
        note = f"{ONNX_FOLDER}/ in {repo_id!r} stays: its record names no weights that it is of"
        return (), () if own else (note,)
    found = there.unchanged(record["sha256"], f"{ONNX_FOLDER}/")
    ours = [_RECORD, *(place for place, same in found.items() if same)]
    changed = [place for place, same in found.items() if not same and place not in contents.sizes]
    notes = tuple(f"{place} in {repo_id!r} was changed since and stays" for place in changed)
    return tuple(name for name in ours if name not in contents.sizes), notes


def _record_of(path: Path) -> Mapping[str, Any] | None:
    """The content of an export's record; None if this version does not read it."""
    try:
        read_record(path.parent)
        with readable(path):
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return {name: dict(content[name]) for name in ("source", "sha256")}
    except (CorruptCheckpointError, UnsupportedModelError):
        return None
