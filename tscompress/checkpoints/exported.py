"""A directory of ``tscompress export`` as a loaded model, for what measures models."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tscompress.checkpoints.config_checks import check_config, check_given
from tscompress.checkpoints.load import LoadedModel, exported_message, family_name
from tscompress.checkpoints.locate import model_name
from tscompress.errors import CorruptCheckpointError, UnsupportedModelError, UsageError
from tscompress.families.empty import BUILDING
from tscompress.families.exported import ExportedModel, exported_pipeline
from tscompress.families.registry import adapter_of
from tscompress.io.files import user_path
from tscompress.runtime.load import load as load_forecaster
from tscompress.runtime.record import is_exported, read_record

#: More layers than any model has; the graph does not record how many there are.
_MOST_LAYERS = 1024


def load_exported(source: str, directory: Path) -> LoadedModel:
    """An exported model in the stock pipeline's interface, on the CPU.

    onnxruntime has as many threads as torch.

    Raises
    ------
    TscompressError
        As :func:`tscompress.runtime.load`.
    """
    record = read_record(directory)
    family = family_name(record.config, source)
    if family != record.family:
        raise CorruptCheckpointError(
            f"{source!r} is recorded as {record.family[:40]!r} with the config of a "
            f"{family}; export it again."
        )
    check_config(record.config, source, _MOST_LAYERS)
    check_given(record.config, adapter_of(family).needed_settings, source)
    with BUILDING:
        pipeline = exported_pipeline(load_forecaster(directory, threads=torch.get_num_threads()))
    loaded = LoadedModel(
        model=pipeline.inner_model,
        pipeline=pipeline,
        family=record.family,
        name=model_name(source),
        source=source,
        directory=directory,
        stored_dtype=torch.float32,
        config=record.config,
    )
    loaded.model.eval()
    return loaded


def is_exported_model(loaded: LoadedModel) -> bool:
    """Whether a loaded model is a graph, which has no layers here."""
    return isinstance(loaded.model, ExportedModel)


def exported_directory(model: object) -> Path | None:
    """The directory of an exported model, given by its path; None: it is none."""
    if not isinstance(model, str | os.PathLike) or not str(model):
        return None
    path = user_path(os.fspath(model))
    return path if is_exported(path) else None


def refuse_exported(loaded: LoadedModel) -> None:
    """Refuse a graph where layers are needed.

    Raises
    ------
    UnsupportedModelError
    """
    if is_exported_model(loaded):
        raise UnsupportedModelError(exported_message(loaded.source))


def refuse_options(source: str, **options: object) -> None:
    """Refuse a device, dtype or revision that an exported model does not have.

    Raises
    ------
    UsageError
    """
    allowed = {"revision": (None,), "device": (None, "cpu"), "dtype": (None, "float32", "stored")}
    for name, value in options.items():
        if str(value).removeprefix("torch.") not in map(str, allowed[name]):
            raise UsageError(
                f"{source!r} is an exported graph, which runs as it is on the CPU; leave {name} "
                "out."
            )
