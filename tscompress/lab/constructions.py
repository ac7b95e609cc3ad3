"""Attention layers and tokens that the proofs of Theorems 3, 4 and 6 construct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.attention import Attention
from tscompress.lab.spectra import checked_sizes, checked_spectrum, gaussian, head_size

#: A score from which softmax is one-hot in float64: e^-200 is nothing beside 1.
ONE_HOT = 200.0


def padded_diagonal(tau: Tensor, L: int) -> Tensor:
    """Tokens [diag(tau) 0] ``[d, L]``.

    Raises
    ------
    UsageError
        There are fewer than d tokens.
    """
    checked_sizes(L=L)
    if len(tau) > L:
        raise UsageError(f"{L} tokens are too few for d = {len(tau)}; give at least as many.")
    return torch.cat([torch.diag(tau), tau.new_zeros(len(tau), L - len(tau))], 1)


# --------------------------------------------------------------------------------------------------
# Theorems 3 and 5: inputs of low rank
# --------------------------------------------------------------------------------------------------


def leading_projector(Xi: Tensor, rank: int) -> Tensor:
    """P = U_r U_r^T ``[d, d]`` on the leading left singular vectors of a vocabulary ``[d, N]``.

    Raises
    ------
    UsageError
        The rank is not in 1 … min(d, N).
    """
    if not 1 <= rank <= min(Xi.shape):
        raise UsageError(f"rank {rank} of a vocabulary {list(Xi.shape)}; it is {min(Xi.shape)}.")
    U: Tensor = torch.linalg.svd(Xi, full_matrices=False).U[:, :rank]
    return U @ U.T


def projected_attention(weights: Attention, P: Tensor) -> Attention:
    """W_Q P, W_K P, W_V P, P ``[d, d]``: the same weights for all inputs (Theorems 3.1 and 5)."""
    return Attention(weights.W_Q @ P, weights.W_K @ P, weights.W_V @ P, weights.heads)


class Example(NamedTuple):
    """Tokens ``[d, L]`` as columns, and an attention layer."""

    U: Tensor
    weights: Attention


def repeated_column(sigma: float, d: int, L: int) -> tuple[Tensor, Example]:
    """Why Theorem 3.1 needs the multiplicity of tokens: an error of sqrt(d L) sigma_2 exactly.

    The vocabulary is [e_1, sigma e_2]; the tokens are its second column, L times. W_V is
    sqrt(d) I, and W_Q and W_K are 0, which meets all premises with C = 1. No other W_V of rank 1
    helps: one of the two columns, L times, has an error of at least sqrt(d L / 2) sigma_2.

    Returns
    -------
    tuple
        The vocabulary ``[d, 2]``, and tokens and layer.

    Raises
    ------
    UsageError
        ``d`` is below 2, ``L`` below 1, or ``sigma`` above 1.
    """
    checked_spectrum([sigma], largest=1.0)
    checked_sizes(L=L)
    if d < 2:
        raise UsageError(f"d is {d}; the example needs 2 dimensions.")
    identity = torch.eye(d, dtype=torch.float64)
    vocabulary = identity[:, :2] * torch.tensor([1.0, sigma], dtype=torch.float64)
    zero = torch.zeros_like(identity)
    layer = Attention(zero, zero, math.sqrt(d) * identity)
    return vocabulary, Example(vocabulary[:, 1:].repeat(1, L), layer)


def self_attending(
    sigma: Tensor | Sequence[float], L: int, W_V: Tensor, *, printed: bool = False
) -> Example:
    """Tokens that attend to themselves: the lower bound of Theorem 3.2.

    U = [diag(sigma) 0] and W_Q^T W_K = log(4 L) sigma_d^-2 sqrt(d) I. Then no W_V of rank r comes
    closer to an orthogonal W_V than sigma_{r+1} / 4.

    Parameters
    ----------
    W_V
        Orthogonal, ``[d, d]``.
    printed
        log(4 d) as the paper prints it, for which the proof fails if L > 4 d + 1.

    Raises
    ------
    UsageError
        The spectrum is not one, or longer than L.
    """
    values = checked_spectrum(sigma, largest=1.0)
    U, d = padded_diagonal(values, L), len(values)
    scale = math.sqrt(math.log(4 * (d if printed else L)) * math.sqrt(d)) / float(values[-1])
    W = scale * torch.eye(d, dtype=torch.float64)
    return Example(U, Attention(W, W, W_V))


def _of_heads(sigma: Tensor | Sequence[float], heads: int) -> tuple[Tensor, int]:
    """The spectrum ``[d]``, checked, and d_h, at least 2."""
    values = checked_spectrum(sigma, largest=1.0)
    size = head_size(len(values), heads)
    if size < 2:
        raise UsageError(f"{heads} heads leave d_h = 1 of d = {len(values)}; heads need 2 rows.")
    return values, size


# --------------------------------------------------------------------------------------------------
# Theorem 4: the flow of ranks
# --------------------------------------------------------------------------------------------------


def copying_heads(sigma: Tensor | Sequence[float], heads: int, L: int) -> Example:
    """Heads that copy the leading values onto the places of small ones (Theorem 4.2).

    U = [diag(sigma) 0]; head i copies sigma_1 … sigma_{d_h - 1} onto the diagonal of its block.
    |W_V| is 1, but W_Q and W_K are unbounded, which Theorem 4.1 excludes.

    Raises
    ------
    UsageError
        The spectrum is not one or longer than L, the heads do not divide d, or d_h is 1.
    """
    values, size = _of_heads(sigma, heads)
    d = len(values)
    U = padded_diagonal(values, L)
    W_Q = torch.zeros(size, d, dtype=torch.float64)
    W_Q[:, :size] = torch.diag(ONE_HOT * math.sqrt(size) / values[:size])
    W_V = torch.zeros(size, d, dtype=torch.float64)
    W_V[:-1, : size - 1] = torch.eye(size - 1)
    W_K = []
    for i in range(heads):
        block = slice(i * size, (i + 1) * size)
        keys = torch.zeros(size, d, dtype=torch.float64)
        keys[-1] = 1 / values  # all columns outside of the block look at row d_h, which W_V drops
        keys[:, block] = torch.diag(1 / values[block])
        W_K.append(keys)
    return Example(U, Attention(W_Q.repeat(heads, 1), torch.cat(W_K), W_V.repeat(heads, 1), heads))


def uniform_heads(small: float, heads: int) -> Example:
    """Attention within the premises of Theorem 4.1 that disproves the printed Corollary 1.

    The tokens ``[2 h, 4 h + 4]`` have singular values 1 and ``small``, repeated. W_Q and W_K are 0,
    so that every head averages all tokens; the last head maps the leading direction onto a new one.
    So sigma_1 and, with h = 2, sigma_2 of U + MH(U) stay where they are when ``small`` goes to 0.

    Raises
    ------
    UsageError
        ``small`` is not in (0, 1], or there is no head.
    """
    checked_sizes(heads=heads)
    checked_spectrum([small], largest=1.0)
    d, L = 2 * heads, 4 * heads + 4
    values = torch.full((d,), small, dtype=torch.float64)
    values[0] = 1.0
    V = _half_constant_basis(L, d)
    U = torch.diag(values) @ V.T
    zero = torch.zeros(d, d, dtype=torch.float64)
    W_V = zero.clone()
    W_V[-1, 0] = 1.0
    return Example(U, Attention(zero, zero, W_V, heads))


def _half_constant_basis(L: int, d: int) -> Tensor:
    """Orthonormal columns ``[L, d]``, the first at 45 degrees to the constant vector."""
    constant = torch.full((L,), 1 / math.sqrt(L), dtype=torch.float64)
    alternating = constant * (1 - 2 * (torch.arange(L) % 2))
    first = (constant + alternating) / math.sqrt(2)
    start = torch.cat([first[:, None], torch.eye(L, dtype=torch.float64)[:, : d - 1]], 1)
    q, r = torch.linalg.qr(start)
    basis: Tensor = q * torch.sign(r.diagonal())
    return basis


# --------------------------------------------------------------------------------------------------
# Theorem 6: a sketch of each head
# --------------------------------------------------------------------------------------------------


class Sketched(NamedTuple):
    """Two factors ``[d_h, r + 1]`` and ``[r + 1, d]`` of one head's queries, keys or values."""

    left: Tensor
    right: Tensor


class InterleavedHeads(NamedTuple):
    """Tokens and layer of Theorem 6, and what their reduced heads are made of.

    Attributes
    ----------
    tau
        The spectrum ``[d]`` in the order of U's diagonal: head i owns sigma_i, sigma_{h+i}, ….
    directions
        Unit vectors v_1 … v_d, the columns of ``[d_h, d]``.
    sharpness
        alpha.
    """

    U: Tensor
    weights: Attention
    tau: Tensor
    directions: Tensor
    sharpness: float


def interleaved_heads(
    sigma: Tensor | Sequence[float],
    heads: int,
    L: int,
    generator: torch.Generator,
    *,
    C: float = 1.0,
) -> InterleavedHeads:
    """Tokens and layer for which a sketch of each head beats a shared one (Theorem 6).

    All heads attend alike and nearly one-hot; W_V is the identity. The tolerance is that of the
    smallest sigma, since the layer must not depend on the rank, with (1 + C sqrt(d))^-1 for the
    paper's (1 + C)^-1.

    Parameters
    ----------
    C
        Shared reductions of W_V have at most C times its Frobenius norm.

    Raises
    ------
    UsageError
        The spectrum is not one or longer than L, the heads do not divide d, or d_h is 1.
    """
    values, size = _of_heads(sigma, heads)
    d = len(values)
    tau = values.reshape(size, heads).T.reshape(-1)  # head i owns sigma_i, sigma_{h + i}, …
    directions = gaussian(size, d, generator=generator)
    directions = directions / directions.norm(dim=0)
    overlap = float((directions.T @ directions - torch.eye(d)).abs().max())
    tolerance = min(1.0, float(values[-1]) / (4 * (1 + C * math.sqrt(d))))
    gap = math.log(2 * L / tolerance) / (1 - overlap)
    sharpness = math.sqrt(math.sqrt(size) * gap)
    W = (sharpness * directions / tau).repeat(heads, 1)
    identity = torch.eye(d, dtype=torch.float64)
    layer = Attention(W, W, identity, heads)
    return InterleavedHeads(padded_diagonal(tau, L), layer, tau, directions, sharpness)


def sketched_heads(layer: InterleavedHeads, rank: int) -> list[tuple[Sketched, Sketched, Sketched]]:
    """Factors of queries, keys and values of every head, of inner size r + 1 (Theorem 6.2).

    Rows of right factors have at most d_h entries, but for the last one of the keys, which sends
    every token that the head does not read to one place that its values drop.

    Raises
    ------
    UsageError
        Not 0 < r < d_h.
    """
    d, heads = len(layer.tau), layer.weights.heads
    size = head_size(d, heads)
    if not 0 < rank < size:
        raise UsageError(f"rank {rank} of heads of {size}; it must be in 1 … {size - 1}.")
    found = []
    for i in range(heads):
        own = torch.arange(i * size, i * size + rank)
        other = ((i + 1) % heads) * size if heads > 1 else rank
        rows = torch.zeros(rank + 1, d, dtype=torch.float64)
        rows[torch.arange(rank), own] = 1.0
        left = torch.zeros(size, rank + 1, dtype=torch.float64)
        left[:, :rank] = layer.directions[:, own] / layer.tau[own]
        left[:, rank] = layer.directions[:, other]
        left = layer.sharpness * left
        queries, keys = rows.clone(), rows.clone()
        queries[rank, other] = 1 / layer.tau[other]
        keys[rank] = 1 / layer.tau
        keys[rank, own] = 0.0
        drop = torch.eye(size, rank + 1, dtype=torch.float64)
        drop[:, rank] = 0.0
        found.append((Sketched(left, queries), Sketched(left, keys), Sketched(drop, rows)))
    return found


def sketched_attention(layer: InterleavedHeads, rank: int) -> Attention:
    """The layer that multiplies the factors of :func:`sketched_heads` out."""
    stacked = [
        torch.cat([factors.left @ factors.right for factors in role])
        for role in zip(*sketched_heads(layer, rank), strict=True)
    ]
    W_Q, W_K, W_V = stacked
    return Attention(W_Q, W_K, W_V, layer.weights.heads)
