"""Seeds that change the random state of one device, and for a while only.

:func:`torch.manual_seed` seeds every device, and :func:`torch.random.fork_rng` keeps those that it
is told of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# Threads share the generators: two would draw each other's numbers.
_lock = threading.RLock()
#: Types of devices without a generator of their own.
_OF_CPU = ("cpu", "meta")


def seed_(seed: int, device: str | torch.device = "cpu") -> None:
    """Seed the generators of the CPU and of ``device``."""
    torch.default_generator.manual_seed(seed)
    device = torch.device(device)
    if device.type == "mps":
        torch.mps.manual_seed(seed)
    elif device.type not in _OF_CPU:
        module: Any = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


@contextmanager
def kept_random_state(device: str | torch.device = "cpu") -> Iterator[None]:
    """Restore the generators of the CPU and of ``device`` afterwards; one thread at a time."""
    device = torch.device(device)
    with _lock, ExitStack() as stack:
        if device.type == "mps":
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        if device.type in (*_OF_CPU, "mps"):
            stack.enter_context(torch.random.fork_rng([]))
        else:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield


@contextmanager
def seeded(seed: int, device: str | torch.device = "cpu") -> Iterator[None]:
    """Both: seed them, and restore them afterwards."""
    with kept_random_state(device):
        seed_(seed, device)
        yield
