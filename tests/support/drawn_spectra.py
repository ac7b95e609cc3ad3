"""Spectra that hypothesis draws, and generators with a seed."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def from_drops(drops: list[float]) -> Tensor:
    """1, and then values that are each below the last by one of these logarithms."""
    logarithms = torch.tensor([0.0, *drops], dtype=torch.float64).cumsum(0)
    return torch.exp(-logarithms)


def spectra(size: int, most: float = 1.0) -> st.SearchStrategy[Tensor]:
    """Spectra ``[size]`` from 1, each value at most e^-``most`` of the one before."""
    drops = st.floats(0.0, most, allow_subnormal=False)
    return st.lists(drops, min_size=size - 1, max_size=size - 1).map(from_drops)
