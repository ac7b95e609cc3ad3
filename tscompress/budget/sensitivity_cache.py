"""Sensitivities cached in files named by a hash of everything that they depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tscompress.budget.sensitivity import SENSITIVITY_VERSION, PartKind, Sensitivity
from tscompress.checkpoints.digests import code_digest, hardware, versions
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.batch import ForecastBatch
from tscompress.io.files import write_text_atomically

_log = logging.getLogger(__name__)
#: Code that folds and measures; a development version changes it without a version number.
CODE = ("budget", "checkpoints", "compression", "data", "families", "layers", "linalg", "plan")


class WantedPart(NamedTuple):
    """A part of a model, its full size, and the sizes that are measured."""

    name: str
    kind: PartKind
    size: int
    sizes: tuple[int, ...]


class SensitivityStore:
    """File of one result. While incomplete it is marked so, and cannot be loaded as a result."""

    def __init__(self, directory: Path, key: str) -> None:
        self.path = directory / "sensitivity" / f"{key}.json"
        self._unwritable = False

    def read(self, wanted: Sequence[WantedPart]) -> Sensitivity | None:
        """The parts measured so far; None if there is no usable file."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            incomplete = isinstance(content, dict) and "incomplete" in content
            found = Sensitivity.model_validate(content["incomplete"] if incomplete else content)
        except (OSError, ValueError, RecursionError):
            return None
        parts = [WantedPart(part.name, part.kind, part.size, part.sizes) for part in found.parts]
        enough = len(parts) < len(wanted) if incomplete else len(parts) == len(wanted)
        fits = enough and len(set(parts)) == len(parts) and set(parts) <= set(wanted)
        return found if fits else None

    def write(self, result: Sensitivity, *, complete: bool) -> None:
        """Keep a result; warn once if the cache cannot be written, and do without it."""
        text = result.model_dump_json(indent=2)
        if self._unwritable:
            return
        try:
            write_text_atomically(
                self.path, f"{text}\n" if complete else f'{{"incomplete": {text}}}\n'
            )
        except OSError as error:
            self._unwritable = True
            _log.warning(
                "sensitivities are not kept for a later run: %s Set TSCOMPRESS_CACHE to a "
                "directory that can be written.",
                error,
            )


def content_key(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    holdout: Sequence[ForecastBatch],
    config: FoldConfig,
    wanted: Sequence[WantedPart],
    *,
    original: LoadedModel | None = None,
) -> str:
    """SHA-256 of everything a result depends on: the models in memory, windows and settings."""
    digest = hashlib.sha256()

    def add(label: str, value: object) -> None:
        digest.update(f"{label} {json.dumps(value, sort_keys=True, default=str)}\n".encode())

    def add_tensor(label: str, tensor: Tensor) -> None:
        add(label, [str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)

    add("version", SENSITIVITY_VERSION)
    add("code", code_digest(CODE))
    add("versions", versions())
    add("hardware", hardware(next(loaded.model.parameters()).device))
    add("family", loaded.family)
    add("config", dict(loaded.config))
    add("original", dict(original.config) if original else None)
    add("fold", config.model_dump(mode="json"))
    add("wanted", wanted)
    # Hash the model in memory, not its files: it may have been cast, or have lost layers.
    for model in (loaded.model, *([original.model] if original else [])):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            add_tensor(name, tensor)
    for label, windows in (("calibration", batches), ("holdout", holdout)):
        for batch, field in itertools.product(windows, dataclasses.fields(ForecastBatch)):
            tensor = getattr(batch, field.name)
            add(f"{label} {field.name}", None) if tensor is None else add_tensor(label, tensor)
    return digest.hexdigest()
