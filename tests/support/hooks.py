"""Hooks of a model: what records or changes its layers must leave none."""

from __future__ import annotations

from torch import nn


def hook_count(model: nn.Module) -> int:
    """How many hooks all modules of a model have; torch has no public way to ask."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
