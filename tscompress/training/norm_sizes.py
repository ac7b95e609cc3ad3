"""Norms of a student as large as its teacher's, so that steps of its training are as long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.residual_stream import streams_of
from tscompress.families.stacks import LAYER_PREFIXES, layer_name

#: Smaller norms count as this: what reads them is hardly used, as the queries of a decoder that
#: sees a single token.
_LEAST = 2.0**-5


@torch.no_grad()
def keep_norm_sizes_(student: LoadedModel, teacher: LoadedModel) -> None:
    """Give the norms that layers read the size of the teacher's; forecasts stay to the bit.

    A narrower stream leaves norms of 1 whose weights went into the matrices that read them
    (:func:`~tscompress.compression.residual_stream.rotate_`). Steps of Muon do not grow with the
    weights they change, so behind norms of 1 these matrices move as many times as far as in a
    teacher as its norms are smaller. Norms are multiplied by powers of two, and their readers
    divided by them, which rounds nothing.
    """
    if student.plan is None or student.plan.width is None:
        return
    kept = student.plan.kept_layers or {}
    model: Any = student.model
    theirs, streams = _sizes(teacher.model), streams_of(model)
    for norm, size in _sizes(model).items():
        factor = theirs.get(_before_dropping(norm, kept), size) / size  # it may lack the layer
        model.get_submodule(norm).weight.mul_(factor)
        for name, read in streams.readers.items():
            if read == norm:
                model.get_submodule(name).weight.div_(factor)


def _sizes(model: Any) -> dict[str, float]:
    """Root mean squares of the weights of norms that layers read, to the nearest power of two."""
    readers = streams_of(model).readers
    found = {}
    for norm in sorted({norm for name, norm in readers.items() if name.startswith(LAYER_PREFIXES)}):
        weight = model.get_submodule(norm).weight.detach().to(torch.float64)
        found[norm] = 2.0 ** round(math.log2(max(float(weight.square().mean().sqrt()), _LEAST)))
    return found


def _before_dropping(name: str, kept: Mapping[str, Sequence[int]]) -> str:
    """Name in the teacher, which has all layers, of what is called ``name`` among those kept."""
    for stack, stay in kept.items():
        for place, index in enumerate(stay):
            if name.startswith(f"{layer_name(stack, place)}."):
                return name.replace(layer_name(stack, place), layer_name(stack, index), 1)
    return name
