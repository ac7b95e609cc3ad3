"""Embeddings of numbers and patches that the paper speaks of."""

from __future__ import annotations

import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.spectra import checked_sizes, orthonormal_columns

#: Where Chronos cuts scaled values off.
X_MAX = 15.0


def chebyshev_polynomials(x: Tensor, degree: int) -> Tensor:
    """T_1(x) … T_k(x) for ``x`` ``[N]`` in [-1, 1], by their recurrence, float64 ``[N, k]``.

    Raises
    ------
    UsageError
        The degree is below 1, or a point is outside of [-1, 1].
    """
    checked_sizes(degree=degree)
    x = x.to(torch.float64)
    outside = x[~(x.abs() <= 1 + 1e-12)]
    if len(outside):
        raise UsageError(f"a point is {outside[0]:g}; Chebyshev tables are of points in [-1, 1].")
    polynomials = [torch.ones_like(x), x]
    for _ in range(degree - 1):
        polynomials.append(2 * x * polynomials[-1] - polynomials[-2])
    return torch.stack(polynomials[1:], 1)


def chebyshev_table(
    values: Tensor, rank: int, d: int, generator: torch.Generator, *, x_max: float = X_MAX
) -> Tensor:
    """A smooth embedding of numbers of algebraic rank k, one row a number (paper App. H, Fig. 15).

    Phi_k(x) = sum_{j=1}^k T_j(x / x_max) u_j with random orthonormal u_j.

    Parameters
    ----------
    values
        Numbers ``[N]`` in [-x_max, x_max].
    rank
        k, at most d.

    Returns
    -------
    Tensor
        ``[N, d]``, float64; not scaled.

    Raises
    ------
    UsageError
        The rank is below 1 or above d, or a value is outside of [-x_max, x_max].
    """
    checked_sizes(rank=rank, d=d)
    if rank > d:
        raise UsageError(f"rank {rank} does not fit an embedding of width {d}.")
    u = orthonormal_columns(d, rank, generator)  # [d, k]
    return chebyshev_polynomials(values.to(torch.float64) / x_max, rank) @ u.T


def swish_embedding(x: Tensor, w: Tensor, v: Tensor, beta: float) -> Tensor:
    """Time-MoE's swish_beta(w_i x) v_i x ``[d, L]`` for ``x`` ``[L]``, ``w`` and ``v`` ``[d]``.

    It is w_i v_i x^2 / (1 + e^(-beta w_i x)); the paper's Corollary 2 leaves the w_i of the
    exponent out.
    """
    product = w[:, None] * x  # [d, L]
    return product * torch.sigmoid(beta * product) * v[:, None] * x


def residual_patches(
    X: Tensor, W_1: Tensor, W_2: Tensor, W_3: Tensor, activation: torch.nn.Module | None = None
) -> Tensor:
    """W_3 X + W_2 omega(W_1 X) ``[d, L]`` for patches ``X`` ``[k, L]`` (paper Theorem 2).

    ``W_1`` is ``[d_f, k]``, ``W_2`` ``[d, d_f]``, ``W_3`` ``[d, k]``; omega is ReLU by default.
    """
    hidden = (activation or torch.nn.ReLU())(W_1 @ X)
    embedded: Tensor = W_3 @ X + W_2 @ hidden
    return embedded
