"""ONNX files that an earlier push left in a repository, and whether they are of other weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from tscompress.errors import CorruptCheckpointError, UnsupportedModelError
from tscompress.hub.card import ONNX_FOLDER
from tscompress.hub.contents import Contents
from tscompress.hub.onnx_files import made_of
from tscompress.io.hashing import sha256_of
from tscompress.runtime.record import RECORD_FILE, read_record, readable

_RECORD = f"{ONNX_FOLDER}/{RECORD_FILE}"
#: Of a dry run, which does not look at the repository.
WOULD_REMOVE = (
    f"if an earlier push with --onnx left files of other weights in {ONNX_FOLDER}/, they would be "
    "removed"
)


@dataclass(frozen=True)
class EarlierOnnx:
    """What becomes of ONNX files that a repository has.

    Attributes
    ----------
    stale
        Those that tscompress wrote, unchanged since, of other weights than those that go up.
    notes
        Why others stay, one sentence each.
    seen_at
        The commit that was looked at.
    """

    stale: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen_at: str | None = None


def earlier_onnx(api: HfApi, repo_id: str, revision: str | None, contents: Contents) -> EarlierOnnx:
    """Look at the ONNX files of a repository beside ``contents``, which are about to go up.

    The record that ``tscompress export`` writes says which files are its own, by their hashes, and
    of which weights they were made. Without it nothing there is ours.
    """
    info = api.model_info(repo_id, revision=revision, files_metadata=True)
    there = {one.rfilename: one for one in info.siblings or ()}
    if _RECORD not in there:
        return EarlierOnnx()

    def local(name: str) -> Path:
        return Path(api.hf_hub_download(repo_id, name, revision=info.sha))

    record = _record_of(local(_RECORD))
    if record is None and _RECORD in contents.records:
        return EarlierOnnx()
    if record is None:
        note = f"{ONNX_FOLDER}/ in {repo_id!r} stays: its {RECORD_FILE} is none of this tscompress"
        return EarlierOnnx(notes=(note,))
    if made_of(record["source"], contents):
        own = _RECORD in contents.records
        note = (
            f"{ONNX_FOLDER}/ in {repo_id!r} is of these weights and stays; give --onnx as well, "
            "for the card to name it"
        )
        return EarlierOnnx(notes=() if own else (note,))
    if not record["source"].get("sha256"):
        note = f"{ONNX_FOLDER}/ in {repo_id!r} stays: its record names no weights that it is of"
        return EarlierOnnx(notes=() if _RECORD in contents.records else (note,))
    ours, changed = [_RECORD], list[str]()
    for name, sha256 in record["sha256"].items():
        place = f"{ONNX_FOLDER}/{name}"
        if place in there and Path(name).name == name:
            large = there[place].lfs
            found = sha256_of(local(place)) if large is None else large.sha256
            (ours if found == sha256 else changed).append(place)
    staying = [place for place in changed if place not in contents.sizes]
    notes = tuple(f"{place} in {repo_id!r} was changed since and stays" for place in staying)
    stale = tuple(name for name in ours if name not in contents.sizes)
    return EarlierOnnx(stale, notes, info.sha)


def _record_of(path: Path) -> Mapping[str, Any] | None:
    """The content of an export's record; None if this version does not read it."""
    try:
        read_record(path.parent)
        with readable(path):
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return {name: dict(content[name]) for name in ("source", "sha256")}
    except (CorruptCheckpointError, UnsupportedModelError):
        return None
