"""Whether a checkpoint on disk is the model in memory that it was written from."""

from __future__ import annotations

from pathlib import Path

import torch

from tscompress.checkpoints.format import unique_tensors
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.calibration import run_teacher_forced
from tscompress.data.batch import ForecastBatch
from tscompress.errors import VerificationError


def verify(saved: LoadedModel, directory: Path) -> None:
    """Load ``directory`` and compare weights and one forward pass, bit for bit.

    Parameters
    ----------
    saved
        The model in memory, in inference mode; its weights are moved in memory.
    directory
        What was written of it.

    Raises
    ------
    VerificationError
        A weight or the output differs.
    """
    device = str(next(saved.model.parameters()).device)
    reloaded = load(directory, device=device)
    # Frozen weights take another path through matmul, with other rounding.
    reloaded.model.requires_grad_(next(saved.model.parameters()).requires_grad)
    ours, theirs = unique_tensors(saved.model), unique_tensors(reloaded.model)
    different = [n for n in ours if n not in theirs or not torch.equal(ours[n], theirs[n])]
    if different or len(ours) != len(theirs):
        name = (different or sorted(set(theirs) - set(ours)))[0]
        raise VerificationError(f"{name} does not load back as it was in memory; nothing was kept.")
    for model in (saved.model, reloaded.model):
        for parameter in model.parameters():
            # Products of differently aligned memory, as in a loaded file, round differently.
            parameter.data = parameter.data.clone()
    probe = ForecastBatch(_probe(2, 48), _probe(2, 8))
    ours_out, theirs_out = _output(saved, probe), _output(reloaded, probe)
    if not torch.allclose(ours_out, theirs_out, rtol=0, atol=0, equal_nan=True):
        raise VerificationError("the saved model predicts differently; nothing was kept.")


def _probe(rows: int, steps: int) -> torch.Tensor:
    time = torch.arange(steps, dtype=torch.float32)
    return torch.stack([torch.sin(time / (2 + row)) + 0.01 * time for row in range(rows)])


def _output(loaded: LoadedModel, probe: ForecastBatch) -> torch.Tensor:
    output = run_teacher_forced(loaded, probe)
    result: torch.Tensor = output.logits if "logits" in output else output.quantile_preds
    return result
