"""Whether the files of a checkpoint are whole and fit each other."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tscompress.checkpoints.config_checks import check_generation
from tscompress.checkpoints.format import check_stored
from tscompress.checkpoints.names import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, WEIGHTS_FILE
from tscompress.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError
from tscompress.families.stacks import LAYER_PREFIXES
from tscompress.io.untrusted import (
    StoredTensor,
    UnreadableFileError,
    is_loop,
    leads_outside,
    read_header,
    read_json,
    shown,
    single_line,
)

_LAYER_NORM = {"gamma": "weight", "beta": "bias"}
#: Flipped bits make larger ones, and they make forecasts that are not finite.
_LARGEST_WEIGHT = 1e8


def read_config(directory: Path, source: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises
    ------
    ModelNotFoundError
        There is none.
    CorruptCheckpointError
        It is not a JSON object.
    """
    path = directory / CONFIG_FILE
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no config.json; is it a checkpoint?") from None
    except UnreadableFileError as error:
        raise CorruptCheckpointError(
            f"{source!r}: config.json cannot be read as JSON: {error}."
        ) from None
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{source!r}: config.json is not an object.")
    return config


def check_generation_file(directory: Path, config: Mapping[str, Any], source: str) -> None:
    try:
        settings = read_json(directory / GENERATION_FILE)
    except FileNotFoundError:
        return
    except UnreadableFileError as error:
        raise CorruptCheckpointError(
            f"{source!r}: {GENERATION_FILE} cannot be read as JSON: {error}."
        ) from None
    check_generation(settings, source, int(config.get("vocab_size", 0)))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from the index if it is sharded."""
    index = directory / INDEX_FILE
    single = directory / WEIGHTS_FILE
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    try:
        names = set(read_json(index)["weight_map"].values())
        outside = any(Path(name).name != name for name in names)
        others = not names or any(Path(name).suffix != ".safetensors" for name in names)
    except (UnreadableFileError, KeyError, AttributeError, TypeError):
        raise CorruptCheckpointError(f"{str(index)!r} is not a safetensors index.") from None
    if outside:
        raise CorruptCheckpointError(f"{str(index)!r} points outside its directory.")
    if others:
        raise CorruptCheckpointError(f"{str(index)!r} names files that are not safetensors.")
    return [directory / name for name in sorted(names)]


def source_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that determine what it forecasts: its configs and its weights."""
    names = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE)
    configs = [directory / name for name in names if (directory / name).is_file()]
    return [*configs, *weight_files(directory)]


def check_files(directory: Path, source: str) -> None:
    """Refuse links that lead elsewhere, and adapters, whose weights are on top of other ones."""
    for path in directory.iterdir():
        if path.suffix in (".json", ".safetensors", ".yaml") and leads_outside(path):
            how = "a link to itself" if is_loop(path) else "a link out of the directory"
            raise CorruptCheckpointError(f"{source!r}: {path.name} is {how}; copy the file there.")
        if path.name == "adapter_config.json":
            raise UnsupportedModelError(
                f"{source!r} is an adapter; merge it into its model and save that."
            )


def stored_tensors(directory: Path, source: str) -> dict[str, StoredTensor]:
    """What the headers of all weight files declare, held against the files' sizes.

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError
        There are no weights, or only pickled ones.
    CorruptCheckpointError
        A file is missing, truncated, or its header lies.
    """
    found = weight_files(directory)
    if not found:
        pickles = sorted(p.name for p in directory.glob("*.bin"))
        if pickles:
            raise UnsupportedModelError(
                f"{source!r} has only pickled weights ({pickles[0]}); tscompress reads safetensors "
                "alone and never unpickles. Save the model again with safe_serialization=True."
            )
        raise ModelNotFoundError(f"{source!r} has no {WEIGHTS_FILE}.")
    tensors: dict[str, StoredTensor] = {}
    for path in found:
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{source!r} lacks {path.name}.") from None
        except UnreadableFileError as error:
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} is truncated or damaged ({error}); fetch it again."
            ) from None
        if twice := tensors.keys() & header.keys():
            raise CorruptCheckpointError(
                f"{source!r} has {single_line(min(twice))!r} in two files, one {path.name}; "
                "fetch it again."
            )
        tensors |= header
    return tensors


def stored_dtype(directory: Path) -> torch.dtype:
    """The floating-point dtype of most stored tensors; raises as :func:`stored_tensors`."""
    return most_common_dtype(stored_tensors(directory, str(directory)))


def most_common_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    counts = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in names)
    return names[counts.most_common(1)[0][0]] if counts else torch.float32


def check_finite(model: nn.Module, source: str) -> None:
    for name, parameter in model.named_parameters():
        low, high = (float(bound) for bound in torch.aminmax(parameter.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):  # aminmax passes NaN on
            raise CorruptCheckpointError(f"{source!r}: {name} has values that are not finite.")
        if max(-low, high) > _LARGEST_WEIGHT:
            raise CorruptCheckpointError(
                f"{source!r}: {name} has a value of {max(-low, high):.3g}, which no trained "
                "network has; fetch the checkpoint again."
            )


def check_fits(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Hold the headers against an empty model, before any memory is given to weights.

    transformers fills missing weights with random ones and only logs it; here it is an error.
    """
    # Old BERT checkpoints name the two weights of a LayerNorm as TensorFlow did.
    found = {
        re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_LAYER_NORM[m[1]]}", key): tensor
        for key, tensor in stored.items()
    }
    by_storage: dict[int, list[str]] = {}
    expected = model.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        by_storage.setdefault(id(tensor), []).append(name)  # tied names share one parameter
    missing = [names[0] for names in by_storage.values() if not found.keys() & set(names)]
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    spare = sorted(
        key
        for key in found.keys() - expected.keys()
        if key.startswith(LAYER_PREFIXES)
        and not any(re.search(pattern, key) for pattern in ignored)
    )
    if spare:
        raise CorruptCheckpointError(
            f"{source!r} has {shown(spare[0])} ({len(spare)} weights), which the config lacks."
        )
    for name, tensor in expected.items():
        if name in found:
            check_stored(name, found[name], tensor, source)


def check_count(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Refuse a config of a larger model than the headers have weights for.

    Of families whose checkpoints name weights otherwise, see :func:`check_complete`.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    found = sum(math.prod(tensor.shape) for tensor in stored.values())
    if asked > found:
        raise CorruptCheckpointError(
            f"{source!r} lacks weights: the config asks for {asked:,}, the files hold {found:,}."
        )


def check_complete(info: Mapping[str, Any], source: str) -> None:
    """Refuse a model some of whose weights transformers drew, having found none."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )
