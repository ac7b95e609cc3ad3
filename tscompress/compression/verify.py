"""Whether a checkpoint on disk is the model in memory that it was written from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tscompress.checkpoints.format import unique_tensors
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import run_teacher_forced
from tscompress.data.batch import ForecastBatch
from tscompress.errors import VerificationError


def verify(model: PreTrainedModel, directory: Path) -> None:
    """Load ``directory`` and compare weights and one forward pass, bit for bit.

    Parameters
    ----------
    model
        In memory, in inference mode; its weights are moved there. Where its output is NaN, that of
        the checkpoint must be.
    directory
        What was written of it.

    Raises
    ------
    VerificationError
        A weight or the output differs.
    """
    reloaded = load(directory, device=str(model.device))
    ours, theirs = unique_tensors(model), unique_tensors(reloaded.model)
    different = [n for n in ours if n not in theirs or not torch.equal(ours[n], theirs[n])]
    if different or len(ours) != len(theirs):
        name = (different or sorted(set(theirs) - set(ours)))[0]
        raise VerificationError(f"{name} does not load back as it was in memory; it was not kept.")
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    for name, weight in reloaded.model.named_parameters():
        # Frozen weights take another path through matmul, with other rounding.
        weight.requires_grad_(trained.get(name, weight.requires_grad))
    for weight in (*model.parameters(), *reloaded.model.parameters()):
        # Products of differently aligned memory, as in a loaded file, round differently.
        weight.data = weight.data.clone()
    probe = ForecastBatch(_probe(2, 48), _probe(2, 8))
    with _attention_as_of(model, reloaded.model):
        ours_out = _output(replace(reloaded, model=model), probe)
    theirs_out = _output(reloaded, probe)
    if ours_out.dtype != theirs_out.dtype or not torch.allclose(
        ours_out, theirs_out, rtol=0, atol=0, equal_nan=True
    ):
        raise VerificationError("the saved model predicts differently; it was not kept.")


@contextmanager
def _attention_as_of(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Within the block, both compute attention alike: a training may have chosen another way."""
    found: Any = [getattr(module, "config", None) for module in model.modules()]
    configs = list({id(config): config for config in found if config is not None}.values())
    before = [getattr(config, "_attn_implementation", None) for config in configs]
    wanted = getattr(other.config, "_attn_implementation", None)
    try:
        for config in configs:
            config._attn_implementation = wanted
        yield
    finally:
        for config, known in zip(configs, before, strict=True):
            config._attn_implementation = known


def _probe(rows: int, steps: int) -> torch.Tensor:
    time = torch.arange(steps, dtype=torch.float32)
    return torch.stack([torch.sin(time / (2 + row)) + 0.01 * time for row in range(rows)])


def _output(loaded: LoadedModel, probe: ForecastBatch) -> torch.Tensor:
    output = run_teacher_forced(loaded, probe)
    result: torch.Tensor = output.logits if "logits" in output else output.quantile_preds
    return result
