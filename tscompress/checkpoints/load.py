"""Load checkpoints: Hub ids, directories, shipped references, and outputs of tscompress."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from chronos import BaseChronosPipeline
from torch import nn

from tscompress.checkpoints.config_checks import check_config, check_given
from tscompress.checkpoints.factored_methods import keep_structure_, name_place_
from tscompress.checkpoints.format import (
    apply_structure_,
    base_config_of,
    is_factored_config,
    load_weights_strictly_,
    read_plan,
)
from tscompress.checkpoints.integrity import (
    check_complete,
    check_count,
    check_files,
    check_finite,
    check_fits,
    check_generation_file,
    most_common_dtype,
    read_config,
    stored_tensors,
    weight_files,
)
from tscompress.checkpoints.locate import locate, model_name
from tscompress.errors import (
    CorruptCheckpointError,
    ModelLoadError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.families.empty import BUILDING
from tscompress.families.registry import (
    FAMILIES,
    FORECAST_FAMILIES,
    adapter_of,
    build_empty,
    describe,
    family_of,
    wrap_pipeline,
)
from tscompress.families.t5_stack import tie_weights_
from tscompress.io.arguments import check_type
from tscompress.io.quiet import quiet_transformers
from tscompress.io.text import rounded_count
from tscompress.io.untrusted import StoredTensor, single_line
from tscompress.plan.architecture import Architecture
from tscompress.plan.plan import Plan
from tscompress.runtime.record import is_exported

#: The name of the argument of from_pretrained; chronos passes unknown arguments on.
_DTYPE_ARGUMENT = (
    "dtype"
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
    else "torch_dtype"
)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(repr=False)
class LoadedModel:
    """A model in memory and where it came from.

    Attributes
    ----------
    model
        The inner transformers model, in ``eval`` mode.
    pipeline
        The chronos pipeline around it; None for families that do not forecast.
    family
        Name of the model family, such as ``chronos-bolt``.
    config
        The checkpoint's ``config.json``; of a factored checkpoint, the original's.
    source
        The argument of :func:`load`. ``name`` is for people, ``source`` for provenance.
    directory
        Of the checkpoint; None for a pipeline in memory.
    revision
        The commit that a Hub id resolved to.
    plan
        The plan of a factored checkpoint.
    stored_dtype
        The dtype of the weights on disk, and of a compressed model when saved.
    """

    model: nn.Module
    pipeline: BaseChronosPipeline | None
    family: str
    name: str
    source: str
    directory: Path | None
    stored_dtype: torch.dtype
    config: Mapping[str, Any] = field(repr=False)
    revision: str | None = None
    plan: Plan | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts())})"

    def _facts(self) -> list[str]:
        """Name, family, size, dtype and device, for people."""
        parameters = list(self.model.parameters())
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
        devices = {str(parameter.device) for parameter in parameters}
        count = rounded_count(sum(parameter.numel() for parameter in parameters))
        what = [repr(self.name), self.family, f"{count} parameters"]
        return [*what, " and ".join(sorted(dtypes)), " and ".join(sorted(devices))]

    @property
    def architecture(self) -> Architecture:
        """Attention blocks and feed-forwards of the model, by name."""
        return describe(self.family, self.model)

    @property
    def forecaster(self) -> BaseChronosPipeline:
        """The pipeline.

        Raises
        ------
        UnsupportedModelError
            The family is only for profiling.
        """
        if self.pipeline is None:
            raise UnsupportedModelError(
                f"{self.name!r} is a {self.family} model, which does not forecast; "
                f"families that do: {', '.join(FORECAST_FAMILIES)}."
            )
        return self.pipeline


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk with its config and headers; weights are not loaded yet.

    Attributes
    ----------
    source
        The argument of :func:`find`.
    revision
        The commit that a Hub id resolved to.
    stored
        Tensor name to its declaration in the headers of the weight files.
    """

    source: str
    directory: Path
    revision: str | None
    config: Mapping[str, Any] = field(repr=False)
    stored: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def is_factored(self) -> bool:
        """Whether it needs tscompress to load."""
        return is_factored_config(self.config)

    @property
    def parameters(self) -> int:
        """Number of stored weights."""
        return sum(math.prod(tensor.shape) for tensor in self.stored.values())

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all weight files."""
        return sum(path.stat().st_size for path in weight_files(self.directory))


def find(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Locate a checkpoint, download it if necessary, and read config and headers.

    Parameters and errors are as for :func:`load`.
    """
    source = str(model)
    check_type("revision", revision, (str, type(None)), "a branch, tag or commit")
    directory, commit = locate(source, revision)
    if is_exported(directory):
        raise UnsupportedModelError(exported_message(source))
    try:
        check_files(directory, source)
        config = read_config(directory, source)
        stored = stored_tensors(directory, source)
    except PermissionError as error:
        raise ModelLoadError(
            f"{source!r}: {error.filename} cannot be read (permission denied)."
        ) from None
    return Checkpoint(source, directory, commit, config, stored)


def exported_message(source: str) -> str:
    """Why an exported graph is refused where a checkpoint is needed."""
    return (
        f"{source!r} holds an exported graph, which evaluate, compare, probe and bench take; give "
        "the checkpoint that it was exported from."
    )


def load(
    model: str | Path | Checkpoint,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
) -> LoadedModel:
    """Load a checkpoint as a chronos pipeline.

    Parameters
    ----------
    model
        A Hub id (``amazon/chronos-bolt-small``), a directory, ``reference/bolt``,
        ``reference/bolt-nano``, ``reference/t5``, ``reference/t5-nano``, ``reference/chronos2``,
        or the output of ``tscompress compress``. Or a result of :func:`find`.
    revision
        Branch, tag or commit of a Hub id.
    device
        ``cpu``, ``cuda``, ``cuda:1``, ...
    dtype
        ``float32``, ``bfloat16``, ``float16`` or a torch dtype; None or ``stored`` keeps the stored
        one.

    Raises
    ------
    ModelNotFoundError, GatedModelError, OfflineError
        The checkpoint could not be found or downloaded.
    UnsupportedModelError
        It is of another family, or has no safetensors weights.
    CorruptCheckpointError
        It is truncated, incomplete, or has weights that are not finite.
    UsageError
        ``device`` or ``dtype`` is not available.
    """
    kinds = (str, os.PathLike, Checkpoint)
    check_type("model", model, kinds, "a path, a Hub id, or a result of find")
    check_type("device", device, (str, torch.device), "cpu, cuda, cuda:1, ...")
    device = check_device(str(device))
    target_dtype = _resolve_dtype(dtype)
    found = model if isinstance(model, Checkpoint) else find(model, revision=revision)
    parts = found.source, found.directory, found.config, found.stored, target_dtype
    with BUILDING:
        loaded = _load_factored(*parts) if found.is_factored else _load_stock(*parts)
    loaded.revision = found.revision
    check_finite(loaded.model, found.source)
    loaded.model.to(device).eval()
    return loaded


# --------------------------------------------------------------------------------------------------
# Device and dtype
# --------------------------------------------------------------------------------------------------


def check_device(device: str) -> str:
    """The name of a device that torch can use here.

    Raises
    ------
    UsageError
        It is none, or it is not there.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise UsageError(f"{device!r} is not a device; try cpu or cuda.") from None
    if wanted.type == "meta":  # shapes without values
        raise UsageError(f"{device!r} is not a device; try cpu or cuda.")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} is not available: torch finds no CUDA; use cpu.")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no {device!r}; torch finds {torch.cuda.device_count()} device(s)."
        )
    if wanted.type not in ("cpu", "cuda"):
        try:
            torch.empty(1, device=wanted)
        except Exception:  # each kind of device has errors of its own
            raise UsageError(
                f"device {device!r} was asked for, but torch cannot use it here; use cpu."
            ) from None
    return device


def check_double(model: nn.Module) -> None:
    """Refuse a model on a device without float64, which moments, fits and losses are summed in.

    Raises
    ------
    UsageError
    """
    device = next(model.parameters()).device
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        raise UsageError(f"device {str(device)!r} has no float64; use cpu.") from None


def _resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "stored":
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype {str(dtype)!r} is not one of {', '.join(DTYPES)}, stored.")
    return found


# --------------------------------------------------------------------------------------------------
# Into memory
# --------------------------------------------------------------------------------------------------


def _load_stock(
    source: str,
    directory: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> LoadedModel:
    name = family_name(config, source)
    family = FAMILIES[name]
    forecasts = name in FORECAST_FAMILIES
    check_config(config, source, len(stored), generates=forecasts)
    if forecasts:
        check_given(config, adapter_of(name).needed_settings, source)
        check_generation_file(directory, config, source)
    with _misfits(source):
        empty = _empty_model(name, json.dumps(config))
    if family.names_kept:
        check_fits(empty, stored, source)
    else:
        check_count(empty, stored, source)
    kept_dtype = most_common_dtype(stored)
    # A .bin file beside the weights is never an alternative.
    options = {_DTYPE_ARGUMENT: dtype or kept_dtype, "use_safetensors": True}
    pipeline = None
    with _misfits(source), quiet_transformers():
        if forecasts:
            pipeline = adapter_of(name).open_stock(directory, config, **options)
            model = pipeline.inner_model
        else:
            model, info = family.model_class(config).from_pretrained(
                directory, trust_remote_code=False, output_loading_info=True, **options
            )
    if pipeline is None:
        check_complete(info, source)
    else:
        try:
            config = adapter_of(name).stock_settings(config)
            config = adapter_of(name).complete_config(model, config, stored.keys())
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{source!r}: {error}") from None
    return LoadedModel(
        model, pipeline, name, model_name(source), source, directory, kept_dtype, config
    )


@lru_cache(maxsize=8)
def _empty_model(family: str, config: str) -> nn.Module:
    """Of a ``config.json``; nobody changes it. A small model loads a sixth sooner when another of
    its config was loaded before.
    """
    empty = FAMILIES[family].empty_model(json.loads(config))
    tie_weights_(empty)
    return empty


def family_name(config: Mapping[str, Any], source: str) -> str:
    """Name of the model family of a ``config.json``.

    Raises
    ------
    CorruptCheckpointError
        Its ``chronos_config`` is not an object.
    UnsupportedModelError
        No family recognises it.
    """
    if not isinstance(config.get("chronos_config", {}), Mapping):
        raise CorruptCheckpointError(f"{source!r}: chronos_config is not an object.")
    try:
        return family_of(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source!r}: {error}") from None


@contextmanager
def _misfits(source: str) -> Iterator[None]:
    """Turn any exception of transformers and chronos on a bad config into a typed error."""
    try:
        yield
    except Exception as error:
        raise CorruptCheckpointError(
            f"{source!r}: the weights do not fit the config ({single_line(error)})."
        ) from error


def _load_factored(
    source: str,
    directory: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> LoadedModel:
    plan = read_plan(config, directory)
    base_config = base_config_of(config)
    family = family_name(base_config, source)
    if family not in FORECAST_FAMILIES:
        raise UnsupportedModelError(f"{source!r}: there are no factored {family} checkpoints.")
    base_config = {**adapter_of(family).stock_settings(base_config)}
    check_config(base_config, source, len(stored))
    check_given(base_config, adapter_of(family).needed_settings, source)
    check_generation_file(directory, base_config, source)
    kept_dtype = most_common_dtype(stored)
    with _misfits(source):
        model = build_empty(family, base_config)
    apply_structure_(model, plan)
    load_weights_strictly_(model, weight_files(directory))
    cast_parameters_(model, dtype or kept_dtype)
    with _misfits(source):
        pipeline = wrap_pipeline(family, model)
    keep_structure_(model, pipeline, plan, base_config)
    name_place_(model, directory)
    return LoadedModel(
        model,
        pipeline,
        family,
        model_name(source),
        source,
        directory,
        kept_dtype,
        base_config,
        plan=plan,
    )


def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of the weights but not of buffers: rotary frequencies stay float32.

    So do the layers that transformers leaves in float32 where the others are in float16: ``wo`` of
    a T5.
    """
    whole = kept_whole(model, dtype)
    for name, parameter in model.named_parameters():
        kept = whole.intersection(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)


def kept_whole(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Names of the layers that are stored in float32 where the others are in ``dtype``."""
    names = getattr(model, "_keep_in_fp32_modules", None) if dtype == torch.float16 else None
    return frozenset(names or ())
