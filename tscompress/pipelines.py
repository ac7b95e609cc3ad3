"""Importing this module lets stock chronos open factored checkpoints.

``import tscompress.pipelines`` registers the config and the pipeline class, after which
``BaseChronosPipeline.from_pretrained(DIR)`` returns the stock pipeline of the model's family, with
the factored model inside. Without the import, transformers refuses the ``model_type``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from chronos import BaseChronosPipeline
from transformers import AutoConfig, PretrainedConfig

from tscompress.factored import MODEL_TYPE
from tscompress.loading import load


class FactoredConfig(PretrainedConfig):  # type: ignore[misc]
    """``config.json`` of a factored checkpoint; the original's is its ``base_config``."""

    model_type = MODEL_TYPE


class FactoredChronosPipeline(BaseChronosPipeline):  # type: ignore[misc]
    """What ``chronos_pipeline_class`` of a factored checkpoint names. Only a way in."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, **kwargs: Any
    ) -> BaseChronosPipeline:
        """The stock pipeline with the factored model; takes what chronos' own pipelines take:
        ``revision``, ``device_map`` (one device) and ``dtype`` or ``torch_dtype``.
        """
        dtype = kwargs.pop("torch_dtype", None) or kwargs.pop("dtype", None)
        kwargs.pop("dtype", None)
        device = kwargs.pop("device_map", None) or "cpu"
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        revision = kwargs.pop("revision", None)
        if kwargs:
            raise TypeError(
                f"a factored checkpoint does not take {', '.join(sorted(kwargs))}; "
                "allowed: revision, device_map, dtype, torch_dtype."
            )
        return load(
            pretrained_model_name_or_path,
            revision=revision,
            device=str(device),
            dtype=None if dtype == "auto" else dtype,
        ).forecaster


AutoConfig.register(MODEL_TYPE, FactoredConfig, exist_ok=True)
