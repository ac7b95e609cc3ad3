"""Pure functions on matrices: ranks, spectra, factorizations, rank schedules.

Single letters are the paper's ("Understanding Transformers for Time Series: Rank Structure,
Flow-of-ranks, and Compressibility"). Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def singular_values(W: Tensor) -> Tensor:
    """Singular values of ``W`` ``[..., m, n]``, descending, float64 ``[..., min(m, n)]``."""
    sigma: Tensor = torch.linalg.svdvals(W.detach().to(torch.float64))
    return sigma


def epsilon_rank(sigma: Tensor, epsilon: float) -> int:
    """Number of singular values with sigma_j / sigma_1 > epsilon (paper eq. 1); 0 for W = 0."""
    if sigma.numel() == 0 or sigma[0] <= 0:
        return 0
    return int((sigma / sigma[0] > epsilon).sum())


def energy_rank(sigma: Tensor, energy: float) -> int:
    """Smallest rank whose squared singular values sum to at least ``energy`` of the total."""
    squared = sigma.to(torch.float64) ** 2
    total = float(squared.sum())
    if total <= 0:
        return 0
    # The margin keeps rounding in the sum from asking for one rank too many at energy 1.
    reached = torch.cumsum(squared, 0) >= energy * total * (1 - 1e-12)
    return int(reached.to(torch.int64).argmax()) + 1


def break_even_rank(m: int, n: int) -> int:
    """Largest rank r at which two factors are smaller than the matrix: r (m + n) < m n."""
    return (m * n - 1) // (m + n)


def truncated_svd(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-``rank`` factors of ``W`` ``[m, n]`` in the Frobenius norm (paper sec. 5).

    Returns ``L`` ``[m, r]`` and ``R`` ``[r, n]``, float64, with the singular values shared evenly:
    L = U_r S_r^{1/2}, R = S_r^{1/2} V_r^T.
    """
    U, S, Vt = torch.linalg.svd(W.detach().to(torch.float64), full_matrices=False)
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vt[:rank]


def symmetric_roots(C: Tensor, damping: float = 1e-6) -> tuple[Tensor, Tensor]:
    """C^{1/2} and C^{-1/2} of a positive semi-definite ``C`` ``[n, n]``, by ``eigh``.

    ``C`` is nearly singular when inputs have low rank, so ``damping`` times the largest eigenvalue
    is added to every eigenvalue. For C = 0 both roots are the identity: with nothing measured,
    all directions count alike.
    """
    C = C.to(torch.float64)
    eigenvalues, Q = torch.linalg.eigh((C + C.T) / 2)
    largest = float(eigenvalues[-1])
    if not largest > 0:
        identity = torch.eye(len(C), dtype=torch.float64, device=C.device)
        return identity, identity
    root = (eigenvalues.clamp_min(0) + damping * largest).sqrt()
    return (Q * root) @ Q.T, (Q / root) @ Q.T


def whitened_svd(W: Tensor, C: Tensor, rank: int, damping: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Rank-``rank`` factors of ``W`` ``[m, n]`` that lose least of ``W x`` for inputs x.

    ``C`` ``[n, n]`` is the second moment of x. Minimises E |W x - L R x|^2, which is
    |(W - L R) C^{1/2}|_F^2, by truncating the SVD of W C^{1/2} and undoing C^{1/2}
    (SVD-LLM, Wang et al., 2024).
    """
    root, inverse_root = symmetric_roots(C, damping)
    L, R = truncated_svd(W.detach().to(torch.float64) @ root, rank)
    return L, R @ inverse_root


def power_law_ranks(
    depths: Sequence[int], d_0: float, alpha: float, *, powers_of_two: bool = False
) -> list[int]:
    """Head sizes ceil(d_0 (1 + i)^alpha) at depths i (paper sec. 5).

    ``powers_of_two`` rounds each down to a power of two, as the authors' code does for hardware.
    """
    ranks = [max(1, math.ceil(d_0 * (1 + depth) ** alpha)) for depth in depths]
    if powers_of_two:
        return [1 << (rank.bit_length() - 1) for rank in ranks]
    return ranks


def fit_power_law(depths: Sequence[int], ranks: Sequence[float]) -> tuple[float, float]:
    """(d_0, alpha) of the least-squares line log r = log d_0 + alpha log(1 + i).

    With a single depth alpha is 0; ranks below 1 count as 1.
    """
    x = torch.tensor([math.log1p(depth) for depth in depths], dtype=torch.float64)
    y = torch.tensor([math.log(max(rank, 1.0)) for rank in ranks], dtype=torch.float64)
    spread = ((x - x.mean()) ** 2).sum()
    alpha = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 0 else 0.0
    return math.exp(float(y.mean()) - alpha * float(x.mean())), alpha


def angle_matrix(U: Tensor) -> Tensor:
    """Angles between the lines spanned by the rows of ``U`` ``[N, d]``, ``[N, N]`` in [0, pi/2].

    theta(u, v) = arccos(|u^T v| / (|u| |v|)) (paper eq. 2). A zero row is orthogonal to all.
    """
    U = U.detach().to(torch.float64)
    norms = U.norm(dim=1, keepdim=True)
    unit = U / torch.where(norms > 0, norms, 1)
    return torch.arccos((unit @ unit.T).abs().clamp(max=1.0))


def even_picks(count: int, most: int) -> Tensor:
    """Indices of an even sub-sample of at most ``most`` of ``count`` rows, in order."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()
