"""A model as users hold it, as a :class:`LoadedModel`: what every measurement takes.

Given is one of

- a directory, a Hub id or ``reference/...``, which is loaded;
- a directory of ``tscompress export``, whose graph is opened;
- a :class:`LoadedModel`, such as :func:`tscompress.load` and :func:`tscompress.compress` return;
- a pipeline of chronos-forecasting;
- a predictor around one pipeline: AutoGluon's ``TimeSeriesPredictor`` or one of its Chronos models,
  a predictor of gluonts, or any other object that keeps a pipeline in an attribute.

Neither AutoGluon nor gluonts is imported: predictors are known by what they have.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from chronos import BaseChronosPipeline
from safetensors import SafetensorError, safe_open
from torch import nn

from tscompress.checkpoints.exported import (
    exported_directory,
    is_exported_model,
    load_exported,
    refuse_exported,
    refuse_options,
)
from tscompress.checkpoints.integrity import stored_tensors, weight_files
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.checkpoints.locate import model_name
from tscompress.errors import CorruptCheckpointError, UsageError
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.arguments import check_type, described
from tscompress.io.files import user_path

#: What :func:`loaded_of` takes, and any predictor around a pipeline.
AnyModel: TypeAlias = str | Path | LoadedModel | BaseChronosPipeline

_EXPECTED = (
    "a directory, a Hub id, a loaded model, a Chronos pipeline, or a predictor around a pipeline"
)
#: What AutoGluon applies around a model, which the pipeline alone lacks.
_TRANSFORMS = ("target_scaler", "covariate_scaler", "covariate_regressor")


def loaded_of(
    model: AnyModel,
    *,
    name: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    argument: str = "model",
    exported: bool = True,
) -> LoadedModel:
    """Whatever the user gave as a model, as a loaded model.

    What is in memory is neither copied nor changed. What then measures it may replace or watch its
    layers meanwhile, so that no other thread may forecast with it.

    Parameters
    ----------
    model
        See :mod:`tscompress.checkpoints.given`.
    name
        In results; None: the model's own.
    revision, device, dtype
        Of a path or a Hub id alone. By default ``cpu`` and ``float32``.
    argument
        Name of the argument, for messages.
    exported
        Whether an exported graph will do, which forecasts and has no layers.

    Raises
    ------
    UsageError
        It is of another type, holds no pipeline or several, or is in training mode; or an option
        cannot go with a model in memory.
    ModelLoadError
        As :func:`tscompress.load`; or a pipeline's class is unknown.
    """
    check_type("name", name, (str, type(None)), "a name for the results")
    place = exported_directory(model)
    if place is not None and exported:
        refuse_options(str(model), revision=revision, device=device, dtype=dtype)
        loaded = load_exported(str(model), place)
    elif isinstance(model, str | os.PathLike):
        dtype = "float32" if dtype is None else dtype
        loaded = load(os.fspath(model), revision=revision, device=device or "cpu", dtype=dtype)
    else:
        loaded = _in_memory(model, argument)
        if not exported:
            refuse_exported(loaded)
        _refuse_options(loaded, model, argument, revision=revision, device=device, dtype=dtype)
        if loaded.model.training:
            raise UsageError(
                f"{loaded.name!r} is in training mode, dropout included; call .eval() first."
            )
    return loaded if name is None else replace(loaded, name=name)


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """The same model, or a copy in float32 of one that is not."""
    if all(parameter.dtype == torch.float32 for parameter in loaded.model.parameters()):
        return loaded
    loaded = copy.deepcopy(loaded)
    cast_parameters_(loaded.model, torch.float32)
    return loaded


def weights_directory(loaded: LoadedModel) -> Path | None:
    """The directory whose weight files have the tensors of a model in memory, by name and shape.

    None where there is none: for a pipeline, or a model that was compressed since it was loaded.
    """
    if loaded.directory is None or not loaded.directory.is_dir():
        return None
    if is_exported_model(loaded):
        return loaded.directory
    stored = stored_tensors(loaded.directory, loaded.source)
    here = {name: tuple(tensor.shape) for name, tensor in loaded.model.state_dict().items()}
    same = all(here.get(name) == tuple(tensor.shape) for name, tensor in stored.items())
    return loaded.directory if same else None


def places_of(loaded: LoadedModel) -> list[Path]:
    """Directories that a model was loaded from or saved to, of those that are there."""
    named = getattr(getattr(loaded.model, "config", None), "_name_or_path", "")
    given = [user_path(one) for one in (loaded.directory, loaded.source, named) if one]
    return [one for one in dict.fromkeys(given) if os.path.isdir(one)]  # noqa: PTH112  (long names)


def stored_in(loaded: LoadedModel) -> Path | None:
    """The directory of :func:`places_of` whose weight files hold a model's weights, to the bit.

    None where there is none: the model was changed since, or its files are not known.
    """
    return next((one for one in places_of(loaded) if _holds_weights(one, loaded.model)), None)


def _holds_weights(directory: Path, model: nn.Module) -> bool:
    here = model.state_dict()
    stored: set[int] = set()
    try:
        for path in weight_files(directory):
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118
                    ours = here.get(name)
                    if ours is None or not _same_values(ours, reader.get_tensor(name)):
                        return False
                    stored.add(ours.data_ptr())
    except (CorruptCheckpointError, SafetensorError, OSError):
        return False
    return {one.data_ptr() for one in here.values() if one.numel()} <= stored  # tied ones are once


def _same_values(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors ``[...]`` are equal; float32 holds the values of both."""
    return torch.equal(ours.detach().cpu().float(), theirs.float())


def refuse_pipeline(function: str, model: object, argument: str) -> None:
    """Refuse all but a path, an id and a loaded model, for functions that keep provenance.

    Raises
    ------
    UsageError
    """
    if not isinstance(model, str | os.PathLike | LoadedModel):
        raise UsageError(
            f"{function} takes a directory, a Hub id or a model of tscompress.load as {argument}, "
            f"whose files it records, not {described(model)}; give what that was loaded from."
        )


# --------------------------------------------------------------------------------------------------
# In memory
# --------------------------------------------------------------------------------------------------


def _in_memory(model: Any, argument: str) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, BaseChronosPipeline):
        return _of_pipeline(model)
    learner = getattr(model, "_learner", None)
    if callable(getattr(learner, "load_trainer", None)):
        return _of_autogluon(model)
    return _of_holder(model, argument)


def _refuse_options(loaded: LoadedModel, model: object, argument: str, **options: Any) -> None:
    """Refuse options of loading for a model in memory, unless it has these."""
    parameter = next(loaded.model.parameters())
    has: dict[str, set[str | None]] = {
        "revision": {loaded.revision},
        "device": {str(parameter.device), parameter.device.type},
        "dtype": {"stored", str(parameter.dtype), str(parameter.dtype).removeprefix("torch.")},
    }
    for name, value in options.items():
        if value is not None and str(value) not in has[name]:
            raise UsageError(
                f"{name} {str(value)!r} goes with a path or a Hub id; {argument} is "
                f"{described(model)} in memory: leave {name} out."
            )


def _of_pipeline(pipeline: BaseChronosPipeline, name: str | None = None) -> LoadedModel:
    family = adapter_of_pipeline(pipeline)
    config = family.config_in_memory(pipeline)
    model = pipeline.inner_model
    loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
    source = str(config.get("_name_or_path") or loaded_from or "")
    dtypes = [parameter.dtype for parameter in model.parameters()]
    return LoadedModel(
        model=model,
        pipeline=pipeline,
        family=family.name,
        name=name or (model_name(source) if source else type(pipeline).__name__),
        source=source,
        directory=None,
        stored_dtype=max(set(dtypes), key=dtypes.count),
        config=config,
    )


def _of_holder(holder: Any, argument: str) -> LoadedModel:
    """Of an object that keeps one pipeline in an attribute, such as a predictor of gluonts."""
    pipelines = {id(found): found for found in _pipelines_in(holder)}
    if len(pipelines) == 1:
        return _of_pipeline(*pipelines.values())
    if pipelines:
        raise UsageError(
            f"{argument} is {described(holder)} with {len(pipelines)} pipelines; give one of them."
        )
    advice = ""
    if callable(getattr(holder, "predict", None)):
        advice = (
            " It keeps no Chronos pipeline: give the directory or Hub id that it forecasts with."
        )
    raise UsageError(f"{argument} is {described(holder)}; give {_EXPECTED}.{advice}")


def _pipelines_in(holder: Any) -> Iterator[BaseChronosPipeline]:
    """Pipelines in the attributes of an object, or behind AutoGluon's way to load one."""
    if _loads_pipeline(holder):
        _refuse_transforms(holder)
        if holder._model_pipeline is None:
            holder.load_model_pipeline()
        yield holder._model_pipeline
        return
    for value in getattr(holder, "__dict__", {}).values():
        if isinstance(value, BaseChronosPipeline):
            yield value


# --------------------------------------------------------------------------------------------------
# AutoGluon
# --------------------------------------------------------------------------------------------------


def _loads_pipeline(model: Any) -> bool:
    """Whether it is a Chronos model of AutoGluon, which loads its pipeline when it is needed."""
    return hasattr(model, "_model_pipeline") and callable(
        getattr(model, "load_model_pipeline", None)
    )


def _of_autogluon(predictor: Any) -> LoadedModel:
    """Of a ``TimeSeriesPredictor`` that has one Chronos model, or whose best model is one.

    Raises
    ------
    UsageError
        It has none, or several of which none is the best.
    """
    trainer = predictor._learner.load_trainer()
    names = [str(name) for name in trainer.get_model_names()]
    # Names begin with the class, and only these are read from the disk.
    held = {
        name: _unwrapped(trainer.load_model(name)) for name in names if "chronos" in name.lower()
    }
    held = {name: model for name, model in held.items() if _loads_pipeline(model)}
    if not held:
        raise UsageError(
            f"the predictor of AutoGluon has no Chronos model ({', '.join(names) or 'no model'}); "
            f"give {_EXPECTED}."
        )
    name = next(iter(held)) if len(held) == 1 else str(predictor.model_best)
    if name not in held:
        raise UsageError(
            f"the predictor of AutoGluon has {len(held)} Chronos models ({', '.join(held)}); call "
            "predictor.export_model(DIRECTORY, model=NAME) and give the directory."
        )
    (pipeline,) = _pipelines_in(held[name])
    return _of_pipeline(pipeline, name)


def _unwrapped(model: Any) -> Any:
    """Of a model that was refitted for several windows, the last."""
    inner = getattr(model, "most_recent_model", None)
    return model if inner is None else inner


def _refuse_transforms(model: Any) -> None:
    """As AutoGluon's own export refuses: the pipeline alone would forecast something else."""
    around = [name for name in _TRANSFORMS if getattr(model, name, None) is not None]
    if around:
        raise UsageError(
            f"AutoGluon applies a {' and a '.join(around)} around {str(model.name)!r}, without "
            "which its pipeline forecasts something else; fit it without, or give the pipeline."
        )
