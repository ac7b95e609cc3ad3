"""Whether a checkpoint on disk is the model in memory that it was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
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
    ours_out = _output(replace(reloaded, model=model), probe)
    if not torch.allclose(ours_out, _output(reloaded, probe), rtol=0, atol=0, equal_nan=True):
        raise VerificationError("the saved model predicts differently; it was not kept.")


def _probe(rows: int, steps: int) -> torch.Tensor:
    time = torch.arange(steps, dtype=torch.float32)
    return torch.stack([torch.sin(time / (2 + row)) + 0.01 * time for row in range(rows)])


def _output(loaded: LoadedModel, probe: ForecastBatch) -> torch.Tensor:
    output = run_teacher_forced(loaded, probe)
    result: torch.Tensor = output.logits if "logits" in output else output.quantile_preds
    return result
