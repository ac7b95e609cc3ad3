"""What does not load back as it was in memory is refused, and the model in memory stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import verify as module
from tscompress.compression.verify import verify
from tscompress.errors import VerificationError


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """What was loaded to compare with."""
    found: list[LoadedModel] = []

    def loading(directory: Path, **options: Any) -> LoadedModel:
        found.append(load(directory, **options))
        return found[-1]

    monkeypatch.setattr(module, "load", loading)
    return found


def test_each_weight_is_compared_as_it_was_trained(
    checkpoint: Path, reloaded: list[LoadedModel]
) -> None:
    """Frozen ones and others, in one model."""
    model = load(checkpoint).model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    frozen = list(before)[::2]
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    verify(model, checkpoint)
    for one in (model, reloaded[0].model):
        weights = dict(one.named_parameters())
        assert [name for name in weights if not weights[name].requires_grad] == frozen
        assert all(torch.equal(weights[name], before[name]) for name in before)


def test_another_forecast_of_the_same_weights_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(directory: Path, **options: Any) -> LoadedModel:
        loaded = load(directory, **options)
        for part in loaded.model.modules():
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = 1.0
        return loaded

    model = load(checkpoint).model
    verify(model, checkpoint)
    monkeypatch.setattr(module, "load", otherwise)
    with pytest.raises(VerificationError, match="predicts differently"):
        verify(model, checkpoint)
