"""Factored checkpoints: some Linear layers are two factors, or sizes differ from layer to layer.

Stock software must not open one by accident: it would find no ``q.weight`` and silently start from
random queries. So ``config.json`` has its own ``model_type``, which stock loaders refuse, and
contains the original config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tscompress.checkpoints.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MODEL_TYPE,
    PIPELINE_CLASS,
    PLACE_KEYS,
    PLAN_FILE,
)
from tscompress.errors import CorruptCheckpointError, PlanError, UsageError
from tscompress.families.t5_stack import tie_weights_
from tscompress.io.files import write_text_atomically
from tscompress.io.places import cannot_write
from tscompress.io.untrusted import (
    StoredTensor,
    UnreadableFileError,
    read_header,
    shown,
    single_line,
)
from tscompress.layers.low_rank import LowRankLinear
from tscompress.layers.resize import replace_heads_, resize_hidden_
from tscompress.layers.token_embedding import replace_tokens_
from tscompress.layers.univariate import drop_groups_
from tscompress.plan.plan import Plan

FORMAT_VERSION = 1
#: Upper bound of one weight file; larger checkpoints have several files and an index.
MAX_SHARD_SIZE = "5GB"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def is_factored_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a factored checkpoint."""
    return config.get("model_type") == MODEL_TYPE


def replace_module_(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module ``name`` by ``module``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def projection_(model: nn.Module, name: str) -> nn.Linear:
    """The Linear layer called ``name``.

    Raises
    ------
    PlanError
        There is no such layer, or it is not a Linear.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"the plan names {name!r}, which the model does not have.") from None
    if not isinstance(module, nn.Linear):
        kind = type(module).__name__
        raise PlanError(f"the plan names {name!r}, a {kind}; only Linear layers can be factored.")
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
    if any(table.weight is module.weight for table in tables):
        raise PlanError(f"the plan names {name!r}, whose weight is the token embedding's, too.")
    return module


def apply_structure_(model: nn.Module, plan: Plan) -> None:
    """Replace the planned layers by empty ones, on their device and in their dtype.

    If the plan has a width, ``model`` must have that width already.
    """
    plan = plan.narrowed()
    for head in plan.heads:
        replace_heads_(model, head)
    if plan.univariate:
        drop_groups_(model)
    for hidden in plan.hidden:
        resize_hidden_(model, hidden)
    if plan.embedding is not None:
        replace_tokens_(model, plan.embedding)
    for entry in plan.projections:
        linear = projection_(model, entry.name)
        entry.check_shape((linear.out_features, linear.in_features))
        if entry.rank is not None:
            factors = LowRankLinear(
                linear.in_features,
                linear.out_features,
                entry.rank,
                bias=linear.bias is not None,
                device=linear.weight.device,
                dtype=linear.weight.dtype,
            )
            replace_module_(model, entry.name, factors)


def write_factored(
    model: nn.Module,
    plan: Plan,
    base_config: Mapping[str, Any],
    directory: Path,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write ``config.json``, ``plan.json`` and the weights; the directory must exist.

    Raises
    ------
    UsageError
        ``max_shard_size`` is not a size.
    OutputError
        The disk is full, or the directory cannot be written to.
    """
    config = {
        "model_type": MODEL_TYPE,
        "format_version": FORMAT_VERSION,
        "chronos_pipeline_class": PIPELINE_CLASS,
        # Model classes of transformers only warn about another model_type: they look for their own
        # among nested configs, else use default sizes and random weights. This text is no size, so
        # they fail.
        "d_model": "in base_config",
        "base_model_type": base_config.get("model_type"),
        "base_config": {
            k: v for k, v in base_config.items() if k not in ("model_type", *PLACE_KEYS)
        },
    }
    _write(model, plan, config, directory, max_shard_size)


def write_folded(
    model: nn.Module,
    plan: Plan,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    directory: Path,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a stock checkpoint, and ``plan.json`` for the record.

    ``config`` is that of the folded model. The dtype is written under the names of both old and
    new versions of transformers. Raises as :func:`write_factored`.
    """
    name = str(dtype).removeprefix("torch.")
    both = {"dtype": name, "torch_dtype": name}
    _write(model, plan, {**config, **both}, directory, max_shard_size)


def _write(
    model: nn.Module,
    plan: Plan,
    config: Mapping[str, Any],
    directory: Path,
    max_shard_size: int | str,
) -> None:
    write_weights(unique_tensors(model), directory, max_shard_size)
    plan.save(directory / PLAN_FILE)
    content = {key: value for key, value in config.items() if key not in PLACE_KEYS}
    write_text_atomically(
        directory / CONFIG_FILE, json.dumps(content, indent=2, sort_keys=True) + "\n"
    )


def write_weights(
    tensors: Mapping[str, torch.Tensor], directory: Path, max_shard_size: int | str
) -> None:
    """Write ``model.safetensors``, or several files and the index that transformers reads.

    Of weights that were written there before, what is not written again is removed. Tensors on
    another device are copied to the CPU one file at a time.

    Parameters
    ----------
    max_shard_size
        Of one file, in bytes, or as text such as ``"5GB"`` (powers of ten). A larger tensor has its
        own file.

    Raises
    ------
    UsageError
        ``max_shard_size`` is not a size.
    OutputError
        The disk is full, or the directory cannot be written to; or earlier weights there cannot be
        removed.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes(max_shard_size),
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].cpu().contiguous() for name in names}
        save_tensors(shard, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text_atomically(
            directory / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    _remove_earlier(directory, {*split.filename_to_tensors}, index=not split.is_sharded)


def _remove_earlier(directory: Path, written: set[str], *, index: bool) -> None:
    """Remove weight files besides those ``written`` and, if asked, the index.

    Raises
    ------
    OutputError
        One cannot be removed.
    """
    path = directory
    try:
        for path in list(directory.iterdir()):
            earlier = _WEIGHTS.fullmatch(path.name) and path.name not in written
            if earlier or (index and path.name == INDEX_FILE):
                path.unlink()
    except OSError as error:
        raise cannot_write(path, error.strerror or single_line(error)) from None


def shard_bytes(size: int | str) -> int:
    """Size in bytes, from a number or from text such as ``"1.5GB"``.

    Raises
    ------
    UsageError
        It is not a size, or not above 0.
    """
    given = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", str(size).strip().upper())
    count = 0 if given is None else int(float(given[1]) * 1000 ** " KMGT".index(given[2] or " "))
    if count < 1:
        raise UsageError(
            f"{shown(size)} is not a size of weight files; give bytes, or 500MB or 5GB."
        )
    return count


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, not atomically.

    Raises
    ------
    OutputError
        The disk is full, or the directory cannot be written to.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except (SafetensorError, OSError) as error:  # safetensors wraps the system's message
        reason = re.sub(r".*I/O error: (.*) \(os error \d+\)", r"\1", single_line(error))
        raise cannot_write(path, reason) from None


def unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with each tied tensor once; nothing is copied."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.detach()
    return tensors


def base_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The original's config, from the ``config.json`` of a factored checkpoint.

    Raises
    ------
    CorruptCheckpointError
        It is missing.
    """
    base = config.get("base_config")
    if not isinstance(base, Mapping):
        raise CorruptCheckpointError("config.json of a factored checkpoint has no 'base_config'.")
    kind = config.get("base_model_type")
    return {**base} if kind is None else {**base, "model_type": kind}


def read_plan(config: Mapping[str, Any], directory: Path) -> Plan:
    """The plan of the factored checkpoint in ``directory``, whose ``config.json`` is ``config``.

    Raises
    ------
    CorruptCheckpointError
        The config has another format version or no base config.
    PlanError
        ``plan.json`` is missing or is not a plan.
    """
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise CorruptCheckpointError(
            f"{str(directory)!r} has format version {shown(version)}; "
            f"this tscompress reads {FORMAT_VERSION}."
        )
    if not isinstance(config.get("base_config"), Mapping):
        raise CorruptCheckpointError(f"{str(directory)!r}: config.json has no 'base_config'.")
    return Plan.load(directory / PLAN_FILE)


def load_weights_strictly_(model: nn.Module, paths: Sequence[Path]) -> None:
    """Fill a model built on the meta device from safetensors files; every key must match.

    Tied tensors, saved once, are tied again. Non-persistent buffers are left alone. The tensors
    are views of the mapped files: memory is taken only where they are changed.

    Raises
    ------
    CorruptCheckpointError
        A key is missing, unknown or of another shape, or the file is damaged.
    """
    for path in paths:
        model.load_state_dict(_read_shard(path, model.state_dict()), strict=False, assign=True)
    tie_weights_(model)
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        where = ", ".join(path.name for path in paths)
        raise CorruptCheckpointError(
            f"{where} in {str(paths[0].parent)!r} has no {empty[0]!r} ({len(empty)} keys missing)."
        )


def _read_shard(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one weight file, all of which the model must have."""
    try:
        stored = read_header(path)
        for name, found in stored.items():
            if name not in expected:
                raise CorruptCheckpointError(
                    f"{str(path)!r} has {shown(name)}, which the plan does not know."
                )
            check_stored(name, found, expected[name], str(path))
        with safe_open(path, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in stored}
    except (UnreadableFileError, SafetensorError, OSError) as error:
        raise CorruptCheckpointError(
            f"{str(path)!r} cannot be read: {single_line(error)}."
        ) from None


def check_stored(name: str, found: StoredTensor, expected: torch.Tensor, source: str) -> None:
    """Check a header's declaration against the tensor of an empty model, of any shape ``[...]``.

    Raises
    ------
    CorruptCheckpointError
        It has another shape, or an integer dtype.
    """
    if found.shape != tuple(expected.shape):
        raise CorruptCheckpointError(
            f"{source!r}: the weights do not fit the config ({name} is {list(found.shape)}, by the "
            f"config {list(expected.shape)})."
        )
    if expected.is_floating_point() and not found.is_floating:
        raise CorruptCheckpointError(
            f"{source!r}: {name} has dtype {found.dtype}, which weights do not have."
        )
