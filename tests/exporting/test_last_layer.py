"""The graph of a Chronos-2 computes of its last layer what forecasts need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tscompress
from tscompress.checkpoints.given import loaded_of
from tscompress.families.registry import adapter_of
from tscompress.runtime.record import GRAPH_FILE


@pytest.mark.parametrize("univariate", [False, True])
def test_steps_ahead_alone_pass_the_last_layer(
    checkpoints: dict[str, Path], univariate: bool
) -> None:
    small = tscompress.compress(
        checkpoints["chronos-2"],
        fold=tscompress.FoldConfig(univariate=univariate),
        width=20,
        calibration=tscompress.CalibrationConfig(num_series=8, context_length=32),
    )
    source = adapter_of("chronos-2").graph_sources(loaded_of(small).model)[GRAPH_FILE]
    module: Any = source.module
    first, last = (module.model.encoder.block[index].layer for index in (0, -1))
    patches = 2  # of the past in the examples, and ahead
    positions: dict[str, int] = {}

    def see(name: str, dim: int) -> Any:
        return lambda _, args: positions.update({name: args[0].shape[dim]})

    first[2].mlp.register_forward_pre_hook(see("first", 1))
    last[0].register_forward_pre_hook(see("time", 1))
    last[1].register_forward_pre_hook(see("group", 1))
    last[2].mlp.register_forward_pre_hook(see("feed-forward", 1))
    with torch.no_grad():
        module(*source.inputs.values())
    all_positions = 2 * patches + 1  # and REG
    assert positions == {
        "first": all_positions,
        "time": all_positions,
        "group": patches,
        "feed-forward": patches,
    }
