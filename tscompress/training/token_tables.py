"""Initial token tables of Chronos-T5: rows are functions of the value that a bin stands for."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tscompress.lab.embeddings import chebyshev_table


def fourier_token_embedding(
    centers: torch.Tensor, d_model: int, longest: float = 12.0, shortest: float = 0.06
) -> torch.Tensor:
    """A smooth initial token table ``[n_bins, d_model]`` of unit variance.

    Row ``j`` holds sines and cosines of asinh of the bin centre, at wavelengths spaced evenly in
    the logarithm from ``longest`` to ``shortest`` (in units of asinh). So similar values have
    similar embeddings from the start, which random tables must first learn.
    """
    coordinate = torch.asinh(centers.double())[:, None]
    pairs = d_model // 2
    wavelength = torch.logspace(
        math.log10(longest), math.log10(shortest), pairs, dtype=torch.float64
    )
    angle = 2 * math.pi * coordinate / wavelength[None, :]
    features = torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2)
    if features.shape[1] < d_model:
        features = nn.functional.pad(features, (0, d_model - features.shape[1]))
    return features.float()


def chebyshev_token_embedding(centers: Tensor, d_model: int, rank: int, *, seed: int = 0) -> Tensor:
    """A smooth token table of an exact rank (Yu et al., 2025, App. H).

    :func:`.chebyshev_table` of the bin centres, x_max the largest of their absolute values, scaled
    to entries with a mean square of 1. Its directions depend on ``seed``.

    Parameters
    ----------
    centers
        Bin centres ``[n_bins]``, not all zero.
    rank
        At most ``n_bins`` and ``d_model``.

    Returns
    -------
    Tensor
        ``[n_bins, d_model]``, float32.
    """
    generator = torch.Generator().manual_seed(seed)
    largest = float(centers.abs().max())
    table = chebyshev_table(centers, rank, d_model, generator, x_max=largest)
    scaled: Tensor = (table / table.square().mean().sqrt()).float()
    return scaled
