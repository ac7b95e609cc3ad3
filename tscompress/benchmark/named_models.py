"""What :func:`tscompress.bench` was given, as pipelines with names, and their workload."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from chronos import BaseChronosPipeline

from tscompress.benchmark.workload import Workload, make_workload
from tscompress.checkpoints.given import AnyModel, loaded_of, weights_directory
from tscompress.checkpoints.load import LoadedModel
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.io.arguments import check_type
from tscompress.io.text import numbered
from tscompress.layers.shared_cross_attention import share_cross_attention

#: A model, several, or several with names.
Benched: TypeAlias = AnyModel | Mapping[str, AnyModel] | Iterable[AnyModel | tuple[str, AnyModel]]


def named_models(models: Benched, against: AnyModel | None) -> list[tuple[str | None, AnyModel]]:
    """Names, where they were given, and models; the baseline first.

    Raises
    ------
    UsageError
        There is no model, or a name was given twice.
    """
    pairs: list[tuple[str | None, AnyModel]]
    if isinstance(models, Mapping):
        pairs = list(models.items())
    elif isinstance(models, list | tuple) or hasattr(models, "__next__"):
        several: Any = models
        pairs = [one if _is_named(one) else (None, one) for one in several]
    else:
        pairs = [(None, models)]
    if against is not None:
        pairs.insert(0, (None, against))
    if not pairs:
        raise UsageError("no model to measure; give at least one.")
    names = [name for name, _ in pairs if name is not None]
    for name in names:
        check_type("a name of a model", name, (str,), "text")
    if len(set(names)) < len(names):
        raise UsageError(f"names are not unique: {names}; rename one.")
    return pairs


def _is_named(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)


def loaded_pipelines(
    pairs: Iterable[tuple[str | None, AnyModel]],
    *,
    share: bool,
    against: bool = False,
    **options: Any,
) -> tuple[dict[str, BaseChronosPipeline], dict[str, Path | None]]:
    """Pipelines by name, and the directories of those whose weights lie on a disk.

    Parameters
    ----------
    share
        Each model also with shared cross-attention.
    against
        The first is what the others are held against, and has no ``revision``.
    options
        ``revision``, ``device`` and ``dtype`` of loaded models.
    """
    pipelines: dict[str, BaseChronosPipeline] = {}
    directories: dict[str, Path | None] = {}
    pairs = list(pairs)
    given = [name for name, _ in pairs if name is not None]
    for position, (name, model) in enumerate(pairs):
        if name is not None and isinstance(model, BaseChronosPipeline):
            pipelines[name] = model  # timing needs no more of it than the call
            continue
        loaded = _loaded(model, name, options, has_revision=position > 0 or not against)
        taken = [*pipelines, *given]
        label = loaded.name if name is not None else numbered(loaded.name, taken)
        pipelines[label] = loaded.forecaster
        directories[label] = weights_directory(loaded)
    if share:
        for label, pipeline in list(pipelines.items()):
            name = numbered(f"{label}, shared", pipelines)
            try:
                pipelines[name] = share_cross_attention(pipeline)
            except UnsupportedModelError as error:
                raise UsageError(f"{error} Leave share_cross_attention out.") from None
            directories[name] = directories.get(label)
    return pipelines, directories


def _loaded(
    model: AnyModel, name: str | None, options: Mapping[str, Any], *, has_revision: bool
) -> LoadedModel:
    """The model; of one in memory only ``options`` without effect are left out."""
    if not isinstance(model, str | os.PathLike):
        return loaded_of(model, name=name, argument="a model to measure")
    revision = options["revision"] if has_revision else None
    return loaded_of(model, name=name, **{**options, "revision": revision})


def workload_of(
    workload: Workload | None,
    sizes: Mapping[str, Any],
    device: str | None,
    pairs: Iterable[tuple[str | None, AnyModel]],
) -> Workload:
    """The workload, on the device asked for, or on that of the first model in memory.

    Raises
    ------
    UsageError
        Both a workload and ``sizes`` were given, or a size is unknown or out of range.
    """
    check_type("workload", workload, (Workload, type(None)), "a Workload, or its fields by name")
    check_type("device", device, (str, type(None)), "cpu, cuda, cuda:1, ...")
    if workload is not None:
        if sizes:
            raise UsageError(f"give a workload or {', '.join(sorted(sizes))}, not both.")
        return workload
    kind = sizes.get("device") or (device or _device_of_first(pairs)).partition(":")[0]
    return make_workload({**sizes, "device": kind})


def _device_of_first(pairs: Iterable[tuple[str | None, AnyModel]]) -> str:
    for _, model in pairs:
        pipeline = model.pipeline if isinstance(model, LoadedModel) else model
        if isinstance(pipeline, BaseChronosPipeline):
            return str(next(pipeline.inner_model.parameters()).device.type)
    return "cpu"
