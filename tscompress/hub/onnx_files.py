"""The ONNX files of a checkpoint, to upload beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tscompress.checkpoints.locate import is_local_path
from tscompress.errors import CorruptCheckpointError, UsageError
from tscompress.hub.card import CARD_FILE, ONNX_FOLDER, OnnxFacts
from tscompress.hub.contents import Contents, WeightFile, check_is_file
from tscompress.io.files import user_path
from tscompress.io.untrusted import single_line
from tscompress.runtime.load import load as load_exported
from tscompress.runtime.record import RECORD_FILE, is_exported, read_record


@dataclass(frozen=True)
class OnnxFiles:
    """An exported model, checked.

    Attributes
    ----------
    contents
        Its files, by their place in the repository.
    facts
        For the card.
    notes
        For the user, one sentence each.
    """

    contents: Contents
    facts: OnnxFacts
    notes: tuple[str, ...] = ()


def onnx_files(directory: str | Path, of: Contents) -> OnnxFiles:
    """Open an exported model, and check that it was made of the weights in ``of``.

    Raises
    ------
    UsageError
        It is no exported model, a file is a link, it is of other weights, or onnxruntime is not
        installed.
    CorruptCheckpointError, UnsupportedModelError
        It was changed since it was exported, or is of another version of the format.
    """
    place = user_path(directory)
    if not is_exported(place):
        raise UsageError(
            f"{str(place)!r} is no exported model; give the output of `tscompress export`."
        )
    record = read_record(place)
    for name in (RECORD_FILE, CARD_FILE, *record.graphs):
        if Path(name).name != name:
            raise CorruptCheckpointError(
                f"{str(place / RECORD_FILE)!r} names {single_line(name)}, which is no file beside "
                "it; export the model again."
            )
        check_is_file(place / name)
    content = (place / RECORD_FILE).read_bytes()
    found = json.loads(content)
    _check_source(found["source"], of, place)
    graphs = {f"{ONNX_FOLDER}/{name}": WeightFile.of(place / name) for name in record.graphs}
    load_exported(place, threads=1)  # compares the hashes of the graphs, and opens them
    small = {f"{ONNX_FOLDER}/{RECORD_FILE}": content}
    card = (place / CARD_FILE).read_bytes()
    if found["sha256"].get(CARD_FILE, "") != hashlib.sha256(card).hexdigest():
        raise CorruptCheckpointError(
            f"{str(place / CARD_FILE)!r} does not have the sha256 of its record, by which a later "
            "push knows it as written by tscompress; restore it, or export the model again."
        )
    small[f"{ONNX_FOLDER}/{CARD_FILE}"] = card
    difference = found.get("difference")
    facts = OnnxFacts(
        precision=record.precision,
        graph_bytes=sum(one.state[0] for one in graphs.values()),
        difference=float(difference) if isinstance(difference, int | float) else None,
    )
    notes: tuple[str, ...] = ()
    if is_local_path(record.source):
        notes = (f"{ONNX_FOLDER}/{RECORD_FILE} names {single_line(record.source)}",)
    return OnnxFiles(Contents(small, graphs), facts, notes)


def _check_source(source: Any, of: Contents, place: Path) -> None:
    """Refuse a graph of other weights than those that go up beside it."""
    if not made_of(source, of):
        raise UsageError(
            f"{str(place)!r} was exported of other weights than those to push; export the "
            "checkpoint again, and give that."
        )


def made_of(source: Any, of: Contents) -> bool:
    """Whether an export's record names the weights in ``of`` as those of its source."""
    recorded = source.get("sha256") if isinstance(source, dict) else None
    expected = {
        name: found.sha256
        for name, found in of.weights.items()
        if not name.startswith(f"{ONNX_FOLDER}/")
    }
    return isinstance(recorded, dict) and expected.items() <= recorded.items()
