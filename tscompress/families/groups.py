"""Which series a model can take together."""

from __future__ import annotations

from chronos import BaseChronosPipeline
from torch import nn

from tscompress.families.registry import adapter_of, adapter_of_pipeline
from tscompress.layers.univariate import is_univariate


def group_size(family: str, model: nn.Module) -> int:
    """Series in a calibration or recovery group; 1: no groups.

    Raises
    ------
    UnsupportedModelError
        The family is only for profiling.
    """
    return 1 if is_univariate(model) else adapter_of(family).group_size


def reads_covariates(pipeline: BaseChronosPipeline) -> bool:
    """Whether other series can go with the one that is forecast.

    Raises
    ------
    UnsupportedModelError
        The pipeline's class is unknown.
    """
    return group_size(adapter_of_pipeline(pipeline).name, pipeline.inner_model) > 1


def kind_of(pipeline: BaseChronosPipeline) -> str:
    """The family of a pipeline, and whether it is univariate, for people.

    Raises
    ------
    UnsupportedModelError
        The pipeline's class is unknown.
    """
    name = adapter_of_pipeline(pipeline).name
    return f"univariate {name}" if is_univariate(pipeline.inner_model) else name
