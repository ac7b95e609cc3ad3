"""The family of a config, a model or a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chronos import BaseChronosPipeline
from torch import nn

from tscompress.errors import UnsupportedModelError
from tscompress.families.base import Family, ForecastFamily, LayeredFamily
from tscompress.families.chronos2 import Chronos2
from tscompress.families.chronos_bolt import ChronosBolt
from tscompress.families.chronos_t5 import ChronosT5
from tscompress.families.encoders import T5, Bert
from tscompress.families.in_context import InContext
from tscompress.families.vision import VisionTransformer
from tscompress.families.whisper import Whisper
from tscompress.io.untrusted import shown
from tscompress.plan.architecture import Architecture

_FORECASTING: tuple[ForecastFamily, ...] = (ChronosT5(), ChronosBolt(), Chronos2())
_PROFILING_ONLY: tuple[Family, ...] = (T5(), Bert(), VisionTransformer(), Whisper())
#: Models of :mod:`tscompress.lab`, which have no checkpoints.
_IN_MEMORY: tuple[LayeredFamily, ...] = (InContext(),)

#: Families that can be compressed, by name.
FORECAST_FAMILIES = {family.name: family for family in _FORECASTING}
#: Families whose layers can be compressed, with those that are in memory alone.
LAYERED_FAMILIES: dict[str, LayeredFamily] = {
    family.name: family for family in (*_FORECASTING, *_IN_MEMORY)
}
#: All that have checkpoints. The first that recognises a config is its family.
FAMILIES: dict[str, Family] = {family.name: family for family in (*_FORECASTING, *_PROFILING_ONLY)}


def family_of(config: Mapping[str, Any]) -> str:
    """Name of the family of a ``config.json``.

    Raises
    ------
    UnsupportedModelError
        No family recognises the config.
    """
    for name, family in FAMILIES.items():
        if family.recognises(config):
            return name
    pipeline = config.get("chronos_pipeline_class")
    if pipeline is not None or "chronos_config" in config:
        known = ", ".join(one.pipeline_class.__name__ for one in FORECAST_FAMILIES.values())
        raise UnsupportedModelError(
            f"a checkpoint of the pipeline {shown(pipeline)} with this chronos_config is not "
            f"supported; supported pipelines: {known}, of which ChronosPipeline is for seq2seq."
        )
    kind = config.get("model_type", "model without model_type")
    raise UnsupportedModelError(
        f"a {shown(kind)} checkpoint is not supported; supported families: {', '.join(FAMILIES)}."
    )


def adapter_of(family: str) -> ForecastFamily:
    """The adapter of a family that forecasts.

    Raises
    ------
    UnsupportedModelError
        It is only for profiling.
    """
    if family not in FORECAST_FAMILIES:
        raise UnsupportedModelError(
            f"a {family} model does not forecast; families that do: {', '.join(FORECAST_FAMILIES)}."
        )
    return FORECAST_FAMILIES[family]


def adapter_of_layers(family: str) -> LayeredFamily:
    """The adapter of a family whose layers can be compressed.

    Raises
    ------
    UnsupportedModelError
        It is only for profiling.
    """
    return LAYERED_FAMILIES[family] if family in LAYERED_FAMILIES else adapter_of(family)


def adapter_of_model(model: nn.Module) -> ForecastFamily:
    """The adapter of a model in memory, by its config; raises as :func:`adapter_of`."""
    config: Any = model.config
    return adapter_of(family_of(config.to_dict()))


def adapter_of_pipeline(pipeline: BaseChronosPipeline) -> ForecastFamily:
    """The adapter of a pipeline, by its class.

    Raises
    ------
    UnsupportedModelError
        Its class is unknown.
    """
    for family in FORECAST_FAMILIES.values():
        if isinstance(pipeline, family.pipeline_class):
            return family
    known = [family.pipeline_class.__name__ for family in FORECAST_FAMILIES.values()]
    name = type(pipeline).__name__
    whose = f" of {type(pipeline).__module__}" if name in known else ""
    raise UnsupportedModelError(
        f"a {name}{whose} is not supported; supported pipelines of chronos-forecasting: "
        f"{', '.join(known)}."
    )


def describe(family: str, model: nn.Module) -> Architecture:
    """The architecture of ``model``, which belongs to ``family``.

    Raises
    ------
    UnsupportedModelError
        Its cross-attention reads a latent already.
    """
    return (FAMILIES | LAYERED_FAMILIES)[family].describe(model)


def build_empty(family: str, config: Mapping[str, Any]) -> nn.Module:
    """A model of ``config`` with parameters on the meta device: no memory, no initialisation."""
    return FAMILIES[family].empty_model(config)


def wrap_pipeline(family: str, model: nn.Module) -> BaseChronosPipeline:
    """The stock pipeline of ``family`` around a model in memory."""
    return adapter_of(family).pipeline(model)
