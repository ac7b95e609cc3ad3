"""Scores of earlier evaluations, found again by the content of everything they depend on.

One file holds the scores of one model on one dataset. Its name is the SHA-256 of the model in
memory, the series, the protocol, the code that computes it, the versions of the libraries and the
kind of hardware; all of that stands in the file, too. A model that was moved or renamed is found,
one whose weights changed in one bit is not. A file that is damaged in any way counts as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import BaseChronosPipeline
from torch import nn

from tscompress._version import __version__
from tscompress.data.suites import EvaluationDataset
from tscompress.errors import OutputError
from tscompress.evaluation.batching import model_device
from tscompress.io.files import cache_directory, write_text_atomically

_FORMAT = 1
_LIBRARIES = ("torch", "transformers", "chronos-forecasting", "gluonts", "numpy")
_PACKAGE = Path(__file__).resolve().parents[1]
#: What forecasts and scores; in a development version it changes without a number.
_CODE = ("evaluation", "families", "layers", "data")
#: Where a model was read from or written by, not what it says.
_NOT_CONTENT = ("_name_or_path", "name_or_path", "transformers_version")
_PLAIN = (int, float, str, bool, list, tuple, type(None))


class ScoreCache:
    """A directory of scores.

    Parameters
    ----------
    directory
        By default ``scores`` in ``$TSCOMPRESS_CACHE``, or in the user's directory of caches.

    Attributes
    ----------
    hits
        Names of the datasets whose scores were found.
    trouble
        Why the last scores could not be kept; empty if they could.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = cache_directory() / "scores" if directory is None else Path(directory)
        self.hits: list[str] = []
        self.trouble = ""

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of what :func:`score_key` returned."""
        return self.directory / f"{_digest_of(key)}.json"

    def read(self, key: Mapping[str, Any]) -> Any:
        """What was written for ``key``; None if there is nothing, or nothing whole."""
        try:
            stored = json.loads(self.path(key).read_text(encoding="utf-8"))
            whole = stored["format"] == _FORMAT and _digest_of(stored["key"]) == _digest_of(key)
            content = stored["content"]
            return content if whole and stored["sha256"] == _digest_of(content) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, key: Mapping[str, Any], content: Any) -> None:
        """Keep ``content``, plain data; a disk that refuses it is noted in ``trouble``."""
        stored = {
            "format": _FORMAT,
            "key": dict(key),
            "sha256": _digest_of(content),
            "content": content,
        }
        try:
            write_text_atomically(self.path(key), json.dumps(stored) + "\n")
        except OutputError as error:  # the scores are there all the same
            self.trouble = str(error)


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------


def score_key(
    model: BaseChronosPipeline | str,
    model_hash: str,
    dataset: EvaluationDataset,
    protocol: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the scores of a model on a dataset depend on, as plain data.

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
        "code": code_digest(),
        "versions": versions(),
        "hardware": None if isinstance(model, str) else hardware(model_device(model)),
    }


def model_digest(model: BaseChronosPipeline | str) -> str:
    """SHA-256 of a pipeline as it is in memory: config, structure, dtypes and weights.

    Not of its files: it may have been cast or changed since. Of a baseline, its name.
    """
    digest = _ContentHash()
    if isinstance(model, str):
        digest.add("baseline", model)
        return digest.hexdigest()
    inner: Any = model.inner_model
    digest.add("classes", [type(part).__qualname__ for part in (model, inner)])
    for holder in (inner, model.model):
        for name in ("config", "generation_config", "chronos_config"):
            digest.add(name, _settings(getattr(holder, name, None)))
    for name, module in inner.named_modules():
        digest.add(f"module {name}", [type(module).__qualname__, _plain_attributes(module)])
    for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
        digest.add_tensor(name, tensor)
    return digest.hexdigest()


def dataset_digest(dataset: EvaluationDataset) -> str:
    """SHA-256 of the series and all that is known of them, the season's length included."""
    digest = _ContentHash()
    digest.add("season", [dataset.freq, dataset.seasonality])
    for known in dataclasses.fields(dataset):
        digest.add_value(known.name, getattr(dataset, known.name))
    return digest.hexdigest()


def code_digest(parts: Sequence[str] = _CODE) -> str:
    """SHA-256 of the source of modules and folders, by default of those that forecast and score."""
    digest = hashlib.sha256()
    for part in parts:
        for path in sorted([*_PACKAGE.glob(f"{part}.py"), *_PACKAGE.glob(f"{part}/**/*.py")]):
            digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of tscompress and the libraries that a forecast or a score comes from."""
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"tscompress": __version__, **found}


def hardware(device: torch.device) -> list[str]:
    """The kind of device, and what decides how it rounds."""
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return [device.type, kind, torch.get_float32_matmul_precision()]


class _ContentHash:
    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, label: str, value: object) -> None:
        text = json.dumps(value, sort_keys=True, default=str)
        self._digest.update(f"{label} {text}\n".encode())

    def add_tensor(self, label: str, tensor: torch.Tensor) -> None:
        self.add(label, [str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._digest.update(flat.view(torch.uint8).numpy().data)

    def add_value(self, label: str, value: object) -> None:
        """Plain data or arrays, or a sequence of either."""
        if isinstance(value, np.ndarray):
            self.add_tensor(label, torch.from_numpy(np.ascontiguousarray(value)))
        elif isinstance(value, tuple | list):
            self.add(label, len(value))
            for item in value:
                self.add_value(label, item)
        else:
            self.add(label, value)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _settings(config: Any) -> Any:
    """A config of transformers or chronos as plain data."""
    if hasattr(config, "to_dict"):
        content = config.to_dict() | {"attention": getattr(config, "_attn_implementation", None)}
        return {key: value for key, value in content.items() if key not in _NOT_CONTENT}
    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return dataclasses.asdict(config) if is_record else None


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Sizes and switches, such as the number of heads, which no weight tells."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NOT_CONTENT and isinstance(value, _PLAIN)
    }
