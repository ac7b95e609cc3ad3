"""Calibrate and compress the layers of a learner on the residual streams that enter them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.batch import StreamBatch
from tscompress.families.in_context import InContext, LayersAlone
from tscompress.lab.in_context_models import Encoder


def layers_alone(encoder: Encoder, name: str) -> LoadedModel:
    """The layers of a learner of :mod:`tscompress.lab`, as compression takes a model.

    They stay the learner's own: what compression does to them, it does to the learner.
    """
    dtype = next(encoder.parameters()).dtype
    return LoadedModel(
        model=LayersAlone(encoder).eval(),
        pipeline=None,
        family=InContext.name,
        name=name,
        source=name,
        directory=None,
        stored_dtype=dtype,
        config={},
    )


@contextmanager
def entering_streams(encoder: Encoder) -> Iterator[list[StreamBatch]]:
    """What enters ``encoder`` within the context, a batch a call: of a looped model each loop."""
    seen: list[StreamBatch] = []

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(StreamBatch(args[0].detach()))

    handle = encoder.register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            yield seen
    finally:
        handle.remove()
