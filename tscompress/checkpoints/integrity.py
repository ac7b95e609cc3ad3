"""Check that the files of a checkpoint are complete and consistent."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tscompress.checkpoints.config_checks import MAX_WIDTH, check_generation
from tscompress.checkpoints.format import check_stored
from tscompress.checkpoints.names import (
    ADAPTER_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
)
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
#: Flipped bits give larger values, and forecasts that are not finite.
_LARGEST_WEIGHT = 1e8


def read_config(directory: Path, source: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises
    ------
    ModelNotFoundError
        It is missing.
    CorruptCheckpointError
        It is not a JSON object.
    """
    path = directory / CONFIG_FILE
    try:
        config = _json_of(path, source)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no config.json; is it a checkpoint?") from None
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{source!r}: config.json is not an object.")
    return config


def _json_of(path: Path, source: str) -> Any:
    """Content of a JSON file; CorruptCheckpointError unless it is missing or JSON."""
    try:
        return read_json(path)
    except UnreadableFileError as error:
        raise CorruptCheckpointError(
            f"{source!r}: {path.name} cannot be read as JSON: {error}."
        ) from None


def check_generation_file(directory: Path, config: Mapping[str, Any], source: str) -> None:
    """Check ``generation_config.json``, if there is one; raises as :func:`check_generation`."""
    try:
        settings = _json_of(directory / GENERATION_FILE, source)
    except FileNotFoundError:
        return
    check_generation(settings, source, int(config.get("vocab_size", MAX_WIDTH)))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from the index if it is sharded.

    Raises
    ------
    CorruptCheckpointError
        The index is unreadable, or names files elsewhere or of another format.
    """
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
    """The files of a checkpoint that determine its forecasts: configs and weights."""
    names = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE)
    configs = [directory / name for name in names if (directory / name).is_file()]
    return [*configs, *weight_files(directory)]


def check_files(directory: Path, source: str) -> None:
    """Refuse links out of the directory, and adapters, which need the weights of another model.

    Raises
    ------
    CorruptCheckpointError
        A file is a link out of the directory.
    UnsupportedModelError
        It is an adapter.
    """
    for path in directory.iterdir():
        if path.suffix in (".json", ".safetensors", ".yaml") and leads_outside(path):
            how = "a link to itself" if is_loop(path) else "a link out of the directory"
            raise CorruptCheckpointError(f"{source!r}: {path.name} is {how}; copy the file there.")
        if path.name == ADAPTER_FILE:
            raise UnsupportedModelError(
                f"{source!r} is an adapter; merge it into its model and save that."
            )


def stored_tensors(directory: Path, source: str) -> dict[str, StoredTensor]:
    """Declarations in the headers of all weight files, checked against the files' sizes.

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError
        There are no weights, or only pickled ones.
    CorruptCheckpointError
        A file is missing or truncated, or its header is wrong.
    """
    found = weight_files(directory)
    if not found:
        pickles = sorted(p.name for p in directory.glob("*.bin"))
        if pickles:
            raise UnsupportedModelError(
                f"{source!r} has only pickled weights ({pickles[0]}); tscompress reads only "
                "safetensors. Save the model again with safe_serialization=True."
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
    """The floating-point dtype of most tensors; float32 if none has one."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    counts = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in names)
    return names[counts.most_common(1)[0][0]] if counts else torch.float32


def check_finite(model: nn.Module, source: str) -> None:
    """Raise CorruptCheckpointError for weights that are infinite, NaN or implausibly large."""
    for name, parameter in model.named_parameters():
        low, high = (float(bound) for bound in torch.aminmax(parameter.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):  # aminmax propagates NaN
            raise CorruptCheckpointError(f"{source!r}: {name} has values that are not finite.")
        if max(-low, high) > _LARGEST_WEIGHT:
            raise CorruptCheckpointError(
                f"{source!r}: {name} has a value of {max(-low, high):.3g}, implausible for a "
                "trained network; fetch the checkpoint again."
            )


def check_fits(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Check the headers against an empty model, before memory is allocated for weights.

    transformers fills missing weights with random ones and only logs it; here it is an error.

    Raises
    ------
    CorruptCheckpointError
        A weight is missing, unknown to the config, or of another shape.
    """
    # Old BERT checkpoints have TensorFlow's names for the two weights of a LayerNorm.
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
    """Refuse a config of a larger model than the stored weights.

    For families whose checkpoints have other names of weights; see also :func:`check_complete`.

    Raises
    ------
    CorruptCheckpointError
        The config asks for more weights.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    found = sum(math.prod(tensor.shape) for tensor in stored.values())
    if asked > found:
        raise CorruptCheckpointError(
            f"{source!r} lacks weights: the config asks for {asked:,}, the files hold {found:,}."
        )


def check_complete(info: Mapping[str, Any], source: str) -> None:
    """Refuse a model with missing weights, which transformers initialised at random.

    Raises
    ------
    CorruptCheckpointError
        A weight is missing.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )
