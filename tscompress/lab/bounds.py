"""The bounds of the paper's theorems, as they hold: slips of the printed version are named.

Indices are the paper's: ``j`` and ``k`` count singular values from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.spectra import checked_sizes, checked_spectrum, head_size

# --------------------------------------------------------------------------------------------------
# Embeddings: Theorems 1 and 2, Corollary 2
# --------------------------------------------------------------------------------------------------


def _from_approximation(error: float, d: int, L: int | None) -> float:
    """The bound of sigma_{j+1} from polynomials of degree j - 1 (paper eq. 7 and 8).

    ``L`` None: of the quasimatrix on [-1, 1], whose rows have at most sqrt(2) times the maximum
    norm; the paper prints 2.
    """
    return error * (math.sqrt(d * L) if L is not None else 2 * math.sqrt(d))


def smooth_embedding_bound(j: int, d: int, L: int | None, *, nu: int, variation: float) -> float:
    """Upper bound of sigma_{j+1} of a smooth embedding of [-1, 1] in d dimensions (Theorem 1.1).

    Parameters
    ----------
    L
        Points, of a matrix ``[d, L]``; None: the quasimatrix of the functions themselves.
    nu, variation
        Every coordinate has nu derivatives, the last of variation V.

    Raises
    ------
    UsageError
        Not nu + 1 < j < d.
    """
    checked_sizes(nu=nu)
    if not nu + 1 < j < d:
        raise UsageError(f"j = {j} is outside of Theorem 1: it must be in {nu + 2} … {d - 1}.")
    error = 2 * variation / (math.pi * nu * (j - 1 - nu) ** nu)  # eq. 9
    return _from_approximation(error, d, L)


def analytic_embedding_bound(j: int, d: int, L: int | None, *, rho: float, maximum: float) -> float:
    """Upper bound of sigma_{j+1} of an analytic embedding of [-1, 1] in d dimensions (Theorem 1.2).

    Parameters
    ----------
    L
        As for :func:`smooth_embedding_bound`.
    rho, maximum
        Every coordinate continues analytically to the Bernstein ellipse of parameter rho, the sum
        of its semi-axes, and is at most M there.

    Raises
    ------
    UsageError
        rho is not above 1, or not 0 <= j < d.
    """
    if rho <= 1:
        raise UsageError(f"rho is {rho:g}; a Bernstein ellipse has rho above 1.")
    if not 0 <= j < d:
        raise UsageError(f"j = {j} is outside of Theorem 1: it must be in 0 … {d - 1}.")
    return _from_approximation(2 * maximum * rho ** (1 - j) / (rho - 1), d, L)


def swish_ellipse(beta: float) -> tuple[float, float]:
    """rho and M of Time-MoE's embedding (Corollary 2): 1 + pi / (2 beta), ((rho + 1/rho) / 2)^2.

    For |w_i| <= 1 and |w_i v_i| <= 1. In that ellipse |Im(beta w z)| <= pi / 2, so that the
    denominator is at least 1 and a coordinate at most |z|^2. The corollary as printed has no w in
    the exponent, which makes all coordinates multiples of one function, and bounds only w_i v_i.

    Raises
    ------
    UsageError
        ``beta`` is not positive.
    """
    if beta <= 0:
        raise UsageError(f"beta is {beta:g}; it must be positive.")
    rho = 1 + math.pi / (2 * beta)
    return rho, ((rho + 1 / rho) / 2) ** 2


def patch_rank_bound(k: int, epsilon: float, *, biases: bool = False) -> float:
    """(1 + eps^-2) k: singular values of embedded patches above eps |W_2| |W_1 X| (Theorem 2).

    That scale is not sigma_1 of the embedded patches, so this bounds no eps-rank. With ``biases``
    every patch has a constant 1 more: W_1 [x; 1] and W_3 [x; 1] hold those of all three layers.

    Raises
    ------
    UsageError
        ``epsilon`` or ``k`` is not positive.
    """
    checked_sizes(k=k)
    if epsilon <= 0:
        raise UsageError(f"epsilon is {epsilon:g}; it must be positive.")
    return (1 + epsilon**-2) * (k + biases)


# --------------------------------------------------------------------------------------------------
# Reduced attention: Theorems 3 and 5
# --------------------------------------------------------------------------------------------------


def reduced_attention_bound(
    sigma_next: float, d: int, *, C: float = 1.0, multiplicity: int = 1
) -> float:
    """Upper bound of |MH(U; W) - MH(U; W P)|_F for the projector P (Theorems 3.1 and 5, repaired).

    (C + 2 C^4) e^(2 C^3) sqrt(m d) sigma_{r+1}, where every column of the vocabulary occurs at most
    m times in U. Printed without m, the statement is false: a column repeated L times has an error
    of sqrt(d L) sigma_{r+1} (see :func:`tscompress.lab.constructions.repeated_column`).

    Parameters
    ----------
    sigma_next
        sigma_{r+1} of the vocabulary.
    C
        Columns have norm at most C; in each head |W_Q^T W_K| and |W_V| are at most C sqrt(d_h).
    multiplicity
        m.
    """
    checked_sizes(d=d, multiplicity=multiplicity)
    constant = (C + 2 * C**4) * math.exp(2 * C**3)
    return constant * math.sqrt(multiplicity * d) * sigma_next


# --------------------------------------------------------------------------------------------------
# The flow of ranks: Theorem 4 and Corollary 1
# --------------------------------------------------------------------------------------------------


def flow_bound(sigma: Tensor | Sequence[float], heads: int, depth: int) -> Tensor:
    """Upper bounds ``[d]`` of sigma_k(Z), Z = U + MH(U) / sqrt(D) (paper eq. 27), for every D.

    Parameters
    ----------
    sigma
        Singular values ``[d]`` of U, at most 1.
    heads
        h, each with |W_Q^T W_K| <= sqrt(d_h) and |W_V| <= 1.
    depth
        D, the number of layers.

    Raises
    ------
    UsageError
        As of :func:`checked_spectrum`, or a size is not a whole number above 0.
    """
    values = checked_spectrum(sigma, largest=1.0)
    checked_sizes(heads=heads, depth=depth)
    factor = math.e**2 * heads / math.sqrt(depth)
    of_heads = factor * values[torch.arange(len(values)) // heads]  # sigma_{floor((j-1)/h)+1}
    sums = [values[:k].flip(0) + of_heads[:k] for k in range(1, len(values) + 1)]
    return torch.stack([found.min() for found in sums])


def least_depth(heads: int) -> int:
    """The fewest layers that meet the premise of Theorem 4.1, sqrt(D) >= 2 e^2 h."""
    checked_sizes(heads=heads)
    return math.ceil((2 * math.e**2 * heads) ** 2)


def relative_flow_bound(sigma: Tensor | Sequence[float], heads: int, depth: int) -> Tensor:
    """Upper bounds ``[d]`` of sigma_k(Z) / sigma_1(Z) (paper eq. 5): twice :func:`flow_bound`.

    Raises
    ------
    UsageError
        There are fewer layers than :func:`least_depth`, or sigma_1 is not 1.
    """
    if depth < least_depth(heads):
        raise UsageError(
            f"{depth} layers are too few for Theorem 4.1 with {heads} heads, which needs "
            f"{least_depth(heads)}; flow_bound holds for every depth."
        )
    values = checked_spectrum(sigma, largest=1.0)
    if values[0] < 1 - 1e-12:
        raise UsageError(f"sigma_1 is {values[0]:g}; Theorem 4.1 has 1: divide by it.")
    return 2 * flow_bound(values, heads, depth)


def flow_lower_bound(sigma: Tensor | Sequence[float], heads: int, depth: int) -> Tensor:
    """Lower bounds ``[d]`` of sigma_k(Z) / sigma_1(Z) that some attention reaches (paper eq. 6).

    NaN where no number of heads i <= h has ceil(k / i) < d_h.
    """
    values = checked_spectrum(sigma, largest=1.0)
    d, size = len(values), head_size(len(values), heads)
    bounds = torch.full((d,), torch.nan, dtype=torch.float64)
    for k in range(1, d + 1):
        for i in range(1, heads + 1):
            position = -(-k // i)
            if position < size:
                own, copied = values[(i - 1) * size + position - 1], values[position - 1]
                found = (own + copied / math.sqrt(depth)) / 4
                bounds[k - 1] = torch.fmax(bounds[k - 1], found)
    return bounds


def corollary_index(k: int, heads: int, *, printed: bool = False) -> int:
    """The index of Corollary 1: floor((k - 1) / (h + 1)) + 1; ``printed`` has k + 1 for k - 1."""
    checked_sizes(k=k, heads=heads)
    return (k + 1 if printed else k - 1) // (heads + 1) + 1


def corollary_bound(
    sigma: Tensor | Sequence[float], heads: int, *, printed: bool = False
) -> Tensor:
    """Upper bounds ``[d]`` of sigma_k(U + MH(U)) (Corollary 1): (1 + e^2 h) sigma_index.

    It is eq. 27 at D = 1 and j = k - index + 1. With the ``printed`` index it is false: 0 is where
    that index is beyond d.
    """
    values = checked_spectrum(sigma, largest=1.0)
    padded = torch.cat([values, values.new_zeros(2)])
    indices = [corollary_index(k, heads, printed=printed) for k in range(1, len(values) + 1)]
    return (1 + math.e**2 * heads) * padded[torch.tensor(indices) - 1]
