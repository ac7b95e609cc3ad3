"""Cache of scores, keyed by a hash of everything that they depend on.

One file has the scores of one model on one dataset. Its name is the SHA-256 of the model in memory,
the series, the protocol, the code, the versions of the libraries and the type of hardware; the file
has all of these too. Moving or renaming a model keeps the key; changing one bit of its weights does
not. A damaged file is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronos import BaseChronosPipeline

from tscompress.checkpoints.digests import code_digest, dataset_digest, hardware, versions
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import OutputError
from tscompress.evaluation.batching import model_device
from tscompress.io.files import cache_directory, write_text_atomically

_FORMAT = 1
#: Code that forecasts and scores; a development version changes it without a version number.
CODE = ("evaluation", "families", "layers", "data", "runtime")


class ScoreCache:
    """A directory of scores.

    Parameters
    ----------
    directory
        By default ``scores`` in ``$TSCOMPRESS_CACHE``, or in the user's cache directory.

    Attributes
    ----------
    hits
        Names of the datasets with cached scores.
    trouble
        Why the last scores could not be cached; empty if they were.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = cache_directory() / "scores" if directory is None else Path(directory)
        self.hits: list[str] = []
        self.trouble = ""

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file for a result of :func:`score_key`."""
        return self.directory / f"{_digest_of(key)}.json"

    def read(self, key: Mapping[str, Any]) -> Any:
        """The content for ``key``; None if there is none, or it is damaged."""
        try:
            stored = json.loads(self.path(key).read_text(encoding="utf-8"))
            whole = stored["format"] == _FORMAT and _digest_of(stored["key"]) == _digest_of(key)
            content = stored["content"]
            return content if whole and stored["sha256"] == _digest_of(content) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, key: Mapping[str, Any], content: Any) -> None:
        """Cache ``content``, plain data; an error of the disk is recorded in ``trouble``."""
        stored = {
            "format": _FORMAT,
            "key": dict(key),
            "sha256": _digest_of(content),
            "content": content,
        }
        try:
            write_text_atomically(self.path(key), json.dumps(stored) + "\n")
        except OutputError as error:  # the scores are still returned
            self.trouble = (
                f"{str(self.directory)!r} cannot be written: {error.reason or error}; set "
                "TSCOMPRESS_CACHE to another directory"
            )


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def score_key(
    model: BaseChronosPipeline | str,
    model_hash: str,
    dataset: EvaluationDataset,
    protocol: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything on which the scores of a model on a dataset depend, as plain data.

    Parameters
    ----------
    model, model_hash
        The model and its :func:`model_digest`, which takes a second for a large one.
    protocol
        Levels, seeds, samples and batches, as plain data.
    """
    return {
        "model": model_hash,
        "dataset": dataset_digest(dataset),
        "protocol": dict(protocol),
        "code": code_digest(CODE),
        "versions": versions(),
        "hardware": None if isinstance(model, str) else hardware(model_device(model)),
    }
