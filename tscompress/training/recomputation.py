"""Gradient checkpointing: layers are run again in the backward pass, for less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tscompress.families.stacks import stack_layers
from tscompress.plan.architecture import STACKS


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, layers store only their inputs and are run again in the backward pass."""
    blocks = [layer for layers in stack_layers(model).values() for layer in layers]
    modules = (model, *(getattr(model, stack, None) for stack in STACKS))
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = [config for config in configs if config is not None]
    caching = [getattr(config, "use_cache", None) for config in configs]
    try:
        for config in configs:  # a layer run twice must not write to a cache twice
            config.use_cache = False
        for block in blocks:
            vars(block)["forward"] = _recomputed(block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
        for config, value in zip(configs, caching, strict=True):
            config.use_cache = value


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
