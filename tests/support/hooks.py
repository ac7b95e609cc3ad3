"""Hooks of a model: what records or changes its layers must leave none."""

from __future__ import annotations

from torch import nn

from tscompress.layers.sized_attention import SizedT5Attention


def hook_count(model: nn.Module) -> int:
    """How many hooks all modules of a model have; torch has no public way to ask.

    Without the one by which the values of each attention with sizes of its own split into heads.
    """
    found = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
    return found - sum(isinstance(module, SizedT5Attention) for module in model.modules())
