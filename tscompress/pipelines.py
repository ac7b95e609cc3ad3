"""Import this module to let stock chronos open factored checkpoints.

``import tscompress.pipelines`` registers the config and the pipeline class, after which
``BaseChronosPipeline.from_pretrained(DIR)`` returns the stock pipeline of the model's family, with
the factored model inside. So do ``ChronosPipeline``, ``ChronosBoltPipeline`` and
``Chronos2Pipeline``: their ``from_pretrained`` is wrapped, because they do not look the class up in
the config. An adapter (LoRA) of a factored Chronos-2 opens merged into it. Other checkpoints open
as before. Without the import, transformers refuses the ``model_type``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from chronos import BaseChronosPipeline, ChronosPipeline
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from tscompress.checkpoints.factored_methods import keep_fit_
from tscompress.checkpoints.format import is_factored_config
from tscompress.checkpoints.load import load
from tscompress.checkpoints.names import ADAPTER_FILE, MODEL_TYPE
from tscompress.errors import ModelLoadError, UnsupportedModelError, UsageError
from tscompress.families.registry import FORECAST_FAMILIES
from tscompress.io.untrusted import UnreadableFileError, read_json, single_line

#: Ways to compute attention that layers of sizes of their own have.
_ATTENTION = ("eager", "sdpa")
#: Arguments of ``from_pretrained`` that locate a config.
_WHERE = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
#: Of these, those of an adapter alone, not of its base.
_OF_THE_ADAPTER = ("revision", "subfolder")


class FactoredConfig(PretrainedConfig):  # type: ignore[misc]
    """``config.json`` of a factored checkpoint; the original's is its ``base_config``."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Add the original's ``architectures``, by which sktime recognises families."""
        base = config_dict.get("base_config")
        named = base.get("architectures") if isinstance(base, Mapping) else None
        return super().from_dict({"architectures": named, **config_dict}, **kwargs)


class FactoredChronosPipeline(BaseChronosPipeline):  # type: ignore[misc]
    """The ``chronos_pipeline_class`` of factored checkpoints; only an entry point."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, **kwargs: Any
    ) -> BaseChronosPipeline:
        """The stock pipeline with the factored model. Takes ``revision`` (of a Hub id),
        ``device_map`` (one device, also as a number or ``{"": device}``), ``attn_implementation``
        and ``dtype`` or ``torch_dtype``, as stock pipelines do.

        Raises
        ------
        TypeError
            Another keyword is given.
        TscompressError
            As :func:`tscompress.load`.
        """
        dtype = kwargs.pop("torch_dtype", None) or kwargs.pop("dtype", None)
        kwargs.pop("dtype", None)
        device = _device_of(kwargs.pop("device_map", None))
        revision, attention = kwargs.pop("revision", None), kwargs.pop("attn_implementation", None)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if kwargs:
            raise TypeError(
                f"a factored checkpoint does not take {', '.join(sorted(kwargs))}; "
                "allowed: revision, device_map, dtype, torch_dtype, attn_implementation."
            )
        pipeline = load(
            pretrained_model_name_or_path,
            revision=None if Path(pretrained_model_name_or_path).is_dir() else revision,
            device=device,
            dtype=None if dtype == "auto" else dtype,
        ).forecaster
        if attention is not None:
            _compute_attention_as_(pipeline.inner_model, attention)
        return pipeline


def _device_of(device_map: Any) -> str:
    """One device, as transformers reads them: numbers are GPUs, and each process has its own."""
    device = device_map
    if isinstance(device, Mapping) and set(device) == {""}:
        device = device[""]
    if device is None:
        return "cpu"
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = int(os.environ.get("LOCAL_RANK", "0"))
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _compute_attention_as_(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of all layers; UsageError if there is no such implementation."""
    if implementation not in _ATTENTION:
        raise UsageError(
            f"attn_implementation {implementation!r} is not one of {', '.join(_ATTENTION)}, which "
            "factored checkpoints have."
        )
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = implementation


def _open_factored_too_(pipeline_class: type[BaseChronosPipeline]) -> None:
    """Let ``pipeline_class.from_pretrained`` open factored checkpoints of its family."""
    stock = pipeline_class.from_pretrained.__func__
    if getattr(stock, "opens_factored", False):  # this module was reloaded
        return

    @wraps(stock)
    def from_pretrained(
        cls: type[BaseChronosPipeline],
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        **kwargs: Any,
    ) -> BaseChronosPipeline:
        adapted = _factored_base(pretrained_model_name_or_path, kwargs.get("subfolder"))
        if adapted is not None:
            return _with_adapter(cls, adapted, pretrained_model_name_or_path, kwargs)
        if not _is_factored(pretrained_model_name_or_path, kwargs):
            found: BaseChronosPipeline = stock(cls, pretrained_model_name_or_path, *args, **kwargs)
            return found
        found = FactoredChronosPipeline.from_pretrained(
            pretrained_model_name_or_path, *args, **kwargs
        )
        if issubclass(cls, type(found)):
            return _opened_as(cls, found)
        if not isinstance(found, cls):
            raise UnsupportedModelError(
                f"{str(pretrained_model_name_or_path)!r} opens as a {type(found).__name__}, not as "
                f"a {cls.__name__}; use that class, or BaseChronosPipeline."
            )
        return found

    from_pretrained.opens_factored = True  # type: ignore[attr-defined]
    pipeline_class.from_pretrained = classmethod(from_pretrained)


def _opened_as(cls: Any, pipeline: Any) -> BaseChronosPipeline:
    """A pipeline of a subclass around the same model."""
    if cls is type(pipeline):
        return cast(BaseChronosPipeline, pipeline)
    parts = {"tokenizer": pipeline.tokenizer} if isinstance(pipeline, ChronosPipeline) else {}
    found: BaseChronosPipeline = cls(model=pipeline.model, **parts)
    keep_fit_(found)
    return found


def _factored_base(source: str | Path, subfolder: str | None) -> str | None:
    """The factored checkpoint that the adapter in the directory ``source`` changes, if it is one.

    An adapter on the Hub is opened as stock chronos does.
    """
    try:
        named = read_json(Path(source) / (subfolder or "") / ADAPTER_FILE)
    except (OSError, UnreadableFileError):
        return None
    base = named.get("base_model_name_or_path") if isinstance(named, Mapping) else None
    return base if isinstance(base, str) and base and _is_factored(base, {}) else None


def _with_adapter(
    pipeline_class: type[BaseChronosPipeline],
    base: str,
    adapter: str | Path,
    options: dict[str, Any],
) -> BaseChronosPipeline:
    """The pipeline of a factored checkpoint with an adapter merged into its weights.

    Raises
    ------
    ImportError
        There is no peft.
    ModelLoadError
        The adapter does not fit the checkpoint.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise ImportError(f"{str(adapter)!r} is an adapter: pip install peft.") from None
    of_base = {name: value for name, value in options.items() if name not in _OF_THE_ADAPTER}
    pipeline = pipeline_class.from_pretrained(base, **of_base)
    try:
        place = Path(adapter) / (options.get("subfolder") or "")
        adapted = PeftModel.from_pretrained(pipeline.inner_model, str(place))
    except (ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"the adapter {str(adapter)!r} does not fit {base!r} ({single_line(error)}); train one "
            "on that checkpoint."
        ) from error
    adapted.merge_and_unload()  # layers of the model itself
    return pipeline


def _is_factored(source: str | Path, options: Mapping[str, Any]) -> bool:
    """Whether ``source`` has the config of a factored checkpoint."""
    if str(source).startswith("s3://"):  # chronos downloads it and calls again with a directory
        return False
    where = {name: options[name] for name in _WHERE if name in options}
    try:
        config, _ = PretrainedConfig.get_config_dict(source, **where)
    except (OSError, ValueError):  # stock chronos reports the error
        return False
    return is_factored_config(config)


AutoConfig.register(MODEL_TYPE, FactoredConfig, exist_ok=True)
for _family in FORECAST_FAMILIES.values():
    _open_factored_too_(_family.pipeline_class)
