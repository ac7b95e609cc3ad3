"""Stock methods of models and pipelines that would lose the structure of a factored model.

``save_pretrained`` writes the stock config beside weights that it does not describe, and stock
loaders silently replace such weights by random ones. ``fit`` of Chronos-2 builds the copy
that it trains from the stock config, and fails. Both are replaced on the instances, whose classes
stay the stock ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch
from chronos import BaseChronosPipeline
from torch import nn
from transformers import T5Config

from tscompress.checkpoints.format import MAX_SHARD_SIZE, write_factored
from tscompress.errors import UsageError
from tscompress.layers.low_rank import LowRankLinear
from tscompress.plan.plan import Plan

#: Projections of attention that an adapter changes by default, and the output layer of patches: as
#: stock ``fit`` does. Values and outputs of a univariate model may be one.
_ADAPTED = tuple(f"self_attention.{role}" for role in ("q", "k", "v", "o", "vo"))
_ADAPTED_OUTPUT = "output_patch_embedding.output_layer"
#: Rank and scale of an adapter, as in stock ``fit``.
_ADAPTER = {"r": 8, "lora_alpha": 16}
_ONE_AT_A_TIME = Lock()


def keep_structure_(
    model: nn.Module,
    pipeline: BaseChronosPipeline,
    plan: Plan,
    config: Mapping[str, Any],
) -> None:
    """Let ``save_pretrained`` and ``fit`` of a factored model keep what ``plan`` made of it.

    Parameters
    ----------
    config
        ``config.json`` of the original, as in a factored checkpoint.
    """
    factored: Any = model
    factored.factored_plan, factored.factored_config = plan, dict(config)
    factored.save_pretrained = partial(_save_pretrained, model)
    keep_fit_(pipeline)


def name_place_(model: nn.Module, directory: Path) -> None:
    """Let an adapter that is trained on ``model`` name the directory of its checkpoint.

    Not on a factored T5: peft would read a stock config there when it saves the adapter.
    """
    named: Any = model
    named.config._name_or_path = str(directory)
    is_t5 = hasattr(model, "factored_plan") and isinstance(named.config, T5Config)
    named.name_or_path = "" if is_t5 else str(directory)


def forget_place_(model: nn.Module) -> None:
    """Let an adapter name no checkpoint: ``model`` was changed since it was loaded.

    Its config keeps the place, whose records say what was calibrated on.
    """
    named: Any = model
    named.name_or_path = ""


def keep_fit_(pipeline: Any) -> None:
    """Let ``fit`` of the pipeline of a factored Chronos-2 keep the structure of its model."""
    if hasattr(type(pipeline), "fit"):
        pipeline.fit = partial(_fit, pipeline)


def _save_pretrained(
    model: Any,
    save_directory: str | Path,
    *,
    state_dict: Mapping[str, Any] | None = None,
    is_main_process: bool = True,
    safe_serialization: bool = True,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a factored checkpoint of the weights as they are; ``state_dict`` are the same ones.

    Raises
    ------
    UsageError
        ``safe_serialization`` is false.
    """
    if not safe_serialization:
        raise UsageError(
            "a factored model is saved as safetensors alone; leave safe_serialization out."
        )
    if not is_main_process:
        return
    directory = Path(save_directory)
    directory.mkdir(parents=True, exist_ok=True)
    # `fit` may have raised the lengths that the model is used at.
    config = {**model.factored_config, "chronos_config": dict(model.config.chronos_config)}
    write_factored(model, model.factored_plan, config, directory, max_shard_size)


def _fit(pipeline: Any, *args: Any, **options: Any) -> BaseChronosPipeline:
    """Stock ``fit`` of a copy that has the structure of the model.

    Adapters change the same layers as those of stock ``fit``; of a layer of two factors, both.
    """
    stock = type(pipeline).fit
    given = inspect.signature(stock).bind(pipeline, *args, **options).arguments
    if given.get("finetune_mode") == "lora" and given.get("lora_config") is None:
        options["lora_config"] = _ADAPTER | {"target_modules": adapted_layers(pipeline.model)}
    # A subclass may have one of its own, elsewhere; the model is built where chronos has it.
    own: Any = next(c for c in type(pipeline).__mro__ if c.__module__.startswith("chronos."))
    with _copied_when_built(pipeline.model, inspect.unwrap(own.fit).__globals__):
        tuned: BaseChronosPipeline = stock(pipeline, *args, **options)
    keep_fit_(tuned)
    return tuned


def adapted_layers(model: nn.Module) -> list[str]:
    """Linear layers of a factored Chronos-2 for the ``target_modules`` of an adapter."""
    names = []
    for name, module in model.named_modules():
        if name.endswith(_ADAPTED) or name == _ADAPTED_OUTPUT:
            factored = isinstance(module, LowRankLinear)
            names += [f"{name}.right", f"{name}.left"] if factored else [name]
    return names


@contextmanager
def _copied_when_built(model: nn.Module, names: dict[str, Any]) -> Iterator[None]:
    """Within, the first model that code with these global ``names`` builds is a copy of ``model``.

    Other threads build as ever, and wait for one another no longer than until that copy is made.
    """
    kind, here = type(model), get_ident()
    with ExitStack() as until_built:

        def build(config: Any) -> nn.Module:
            if get_ident() != here:
                return kind(config)
            until_built.close()
            twin = copy.deepcopy(model)
            for parameter in twin.parameters():  # a model that is built has weights of this dtype
                parameter.data = parameter.data.to(torch.get_default_dtype())
            return twin

        if names.get(kind.__name__) is not kind:  # an adapter around a model
            yield
            return
        until_built.enter_context(_ONE_AT_A_TIME)
        names[kind.__name__] = build
        until_built.callback(names.__setitem__, kind.__name__, kind)
        yield
