"""``tscompress-export.json``: the record of an exported model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tscompress.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError

#: Of models of one graph.
GRAPH_FILE = "model.onnx"
GRAPH_SUFFIX = ".onnx"
RECORD_FILE = "tscompress-export.json"
#: Of the directory: names of files, inputs and outputs of graphs, keys of the record.
FORMAT_VERSION = 1

_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Record:
    """What is known of an exported model.

    Attributes
    ----------
    family
        Such as ``chronos-bolt``.
    config
        ``config.json`` of the source.
    graphs
        File to SHA-256, hexadecimal, of each graph.
    precision
        ``float32``, ``float16``, ``int8`` or ``int8-weights``.
    source
        Name of the model that was exported, ``""`` if it had none.
    parameters
        Of that model.
    univariate
        Whether it is a Chronos-2 without group attention.
    """

    family: str
    config: Mapping[str, Any]
    graphs: Mapping[str, str]
    precision: str
    source: str
    parameters: int
    univariate: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """``chronos_config``: lengths, patch size, quantile levels."""
        found: Mapping[str, Any] = self.config["chronos_config"]
        return found

    @property
    def graph_sha256(self) -> str:
        """Of all graphs, in the order of their names."""
        return "+".join(self.graphs[name] for name in sorted(self.graphs))


def is_exported(directory: Path) -> bool:
    """Whether a directory holds an exported model."""
    return _is_file(directory / RECORD_FILE)


def read_record(directory: Path) -> Record:
    """The record of an exported model.

    Raises
    ------
    ModelNotFoundError
        There is none.
    UnsupportedModelError
        It is of another version of the format.
    CorruptCheckpointError
        It is damaged, or lacks something.
    """
    path = directory / RECORD_FILE
    if not _is_file(path):
        raise ModelNotFoundError(
            f"{str(directory)!r} has no {RECORD_FILE}; give a directory of tscompress export."
        )
    content = _object_in(path)
    version = content.get("format")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise UnsupportedModelError(
            f"{str(path)!r}: the format is {str(version)[:40]!r}, and this tscompress reads "
            f"{FORMAT_VERSION}; export the model again, or use the version that wrote it."
        )
    with readable(path):
        return _record_of(content)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What is missing of a record, or has another form, as one line.

    Raises
    ------
    CorruptCheckpointError
        For the errors of a look-up or a conversion inside the block.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{str(path)!r} lacks {error}, or has it in another form; export the model again."
        ) from None


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  (Path raises for names that are too long)


def _object_in(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise CorruptCheckpointError(f"{str(path)!r} cannot be read: {reason}.") from None
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{str(path)!r} is not a JSON object.")
    return content


def _record_of(content: Mapping[str, Any]) -> Record:
    positive(content["config"]["chronos_config"]["context_length"], "context_length")
    hashes = content["sha256"].items()
    return Record(
        family=str(content["family"]),
        config=content["config"],
        graphs={name: str(one) for name, one in hashes if name.endswith(GRAPH_SUFFIX)},
        precision=str(content["precision"]),
        source=str(content["source"].get("model") or ""),
        parameters=positive(content["parameters"], "parameters"),
        univariate=content.get("univariate") is True,
    )


def positive(value: object, name: str) -> int:
    """A setting that is a positive integer.

    Raises
    ------
    ValueError
        It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(name)
    return value
