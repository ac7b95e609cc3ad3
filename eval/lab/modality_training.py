"""Training of small models of our own, kept as safetensors so that it is done once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


@torch.enable_grad()
def train_(
    model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, name: str
) -> None:
    """Adam with a linear warm-up over a tenth of the steps, and a linear decay; prints losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 20) == 0:
            print(f"{name}: step {step} of {steps}, loss {value.item():.4f}", flush=True)


def kept(model: M, path: Path, train: Callable[[], None]) -> M:
    """``model`` with the weights in ``path``, or trained and written there."""
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    train()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(model.state_dict(), temporary)
    temporary.replace(path)
    return model.eval()
