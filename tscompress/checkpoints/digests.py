"""SHA-256 of the inputs of a result: models in memory, datasets and source code."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import BaseChronosPipeline
from torch import nn

from tscompress._version import __version__
from tscompress.checkpoints.names import PLACE_KEYS
from tscompress.data.covariates import SeriesCovariates
from tscompress.data.evaluation_sets import EvaluationDataset

LIBRARIES = ("torch", "transformers", "chronos-forecasting", "gluonts", "numpy")
PACKAGE = Path(__file__).resolve().parents[1]

#: Keys of a config that do not change forecasts: its source and the versions that wrote it.
_NOT_CONTENT = (*PLACE_KEYS, "transformers_version")
_PLAIN = (int, float, str, bool, list, tuple, type(None))


def model_digest(model: BaseChronosPipeline | str) -> str:
    """SHA-256 of a pipeline in memory: config, structure, dtypes and weights.

    Its files are not hashed: it may have been cast or changed since. For a baseline, of its name.
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
    # Quantized layers of torch.ao hold their weights as neither.
    held = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    held |= {name for name, _ in inner.named_buffers(remove_duplicate=False)}
    for name, value in inner.state_dict().items():
        if name not in held:
            digest.add_value(name, value)
    return digest.hexdigest()


def dataset_digest(dataset: EvaluationDataset) -> str:
    """SHA-256 of every field of a dataset, with its frequency and season length."""
    digest = _ContentHash()
    digest.add("season", [dataset.freq, dataset.seasonality])
    for known in dataclasses.fields(dataset):
        digest.add_value(known.name, getattr(dataset, known.name))
    return digest.hexdigest()


def code_digest(parts: Sequence[str]) -> str:
    """SHA-256 of the source of the named modules and folders of the package, read once."""
    return _code_digest(PACKAGE, tuple(parts))


@cache
def _code_digest(package: Path, parts: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for path in sorted([*package.glob(f"{part}.py"), *package.glob(f"{part}/**/*.py")]):
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of tscompress and of the libraries that affect forecasts and scores."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"tscompress": __version__, **found}


def hardware(device: torch.device) -> list[str]:
    """Type of the device, and the settings that affect its rounding."""
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
        """Add plain data, an array, a record, or a sequence or mapping of these."""
        if isinstance(value, np.ndarray) and value.dtype == object:
            self.add(label, value.tolist())
        elif isinstance(value, np.ndarray):
            self.add_tensor(label, torch.from_numpy(np.array(value, order="C")))
        elif isinstance(value, tuple | list):
            self.add(label, len(value))
            for item in value:
                self.add_value(label, item)
        elif isinstance(value, Mapping):
            self.add(label, list(value))
            self.add_value(label, tuple(value.values()))
        elif isinstance(value, torch.Tensor):
            self.add_tensor(label, value.dequantize() if value.is_quantized else value)
        elif isinstance(value, SeriesCovariates):
            self.add_value(label, (value.past, value.future))
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
    """Sizes and flags that do not follow from weights, such as the number of heads."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NOT_CONTENT and isinstance(value, _PLAIN)
    }
