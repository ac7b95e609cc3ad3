"""Common parts of training loops: a safe stop on signals, fast attention, precision."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from tscompress.compression.fold_config import multiplies_bfloat16
from tscompress.layers.group_attention import attention_within_groups
from tscompress.layers.patches_ahead import last_layer_of_patches_ahead

Precision = Literal["no", "bf16"]


def training_precision(device: torch.device) -> Precision:
    """``bf16`` where ``device`` multiplies in bfloat16 itself.

    Elsewhere it is emulated: a step of a small Chronos-Bolt took 14 times as long on a CPU with
    AVX2 alone as in float32.
    """
    return "bf16" if multiplies_bfloat16(device) else "no"


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a flag, so that no step is interrupted."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # the only one with signals
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is None:  # of a host that embeds Python
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:  # a second signal stops at once
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def attention_for_training(model: nn.Module) -> Iterator[None]:
    """Within the block, attention of ``model`` is computed as is fastest with a backward pass.

    On a CPU that is unfused matrix products: the backward pass of fused attention is slow through a
    learnt bias, and for the few patches of Chronos-2; see also :func:`only_what_is_read`.
    """
    configs: list[Any] = []
    if next(model.parameters()).device.type == "cpu":
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        configs = [c for c in found.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    for config in configs:
        config._attn_implementation = "eager"
    try:
        with only_what_is_read(model):
            yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"


@contextmanager
def only_what_is_read(model: nn.Module) -> Iterator[None]:
    """Within the block, a Chronos-2 computes only what its forecasts are made of.

    That is group attention within groups, and the last layer of the patches ahead. Forecasts and
    gradients of ``model`` are the same, up to rounding; its hidden states are not.
    """
    with attention_within_groups(model), last_layer_of_patches_ahead(model):
        yield
