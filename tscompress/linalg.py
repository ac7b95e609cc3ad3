"""Pure functions on matrices: ranks, spectra, factorizations, rank schedules.

Single letters are the paper's ("Understanding Transformers for Time Series: Rank Structure,
Flow-of-ranks, and Compressibility"). Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def singular_values(W: Tensor) -> Tensor:
    """Singular values of ``W`` ``[..., m, n]``, descending, float64 ``[..., min(m, n)]``."""
    sigma: Tensor = torch.linalg.svdvals(W.detach().to(torch.float64))
    return sigma


def epsilon_rank(sigma: Tensor, epsilon: float) -> int:
    """Number of singular values ``[r]`` with sigma_j / sigma_1 > epsilon (paper eq. 1).

    0 for W = 0.
    """
    if sigma.numel() == 0 or sigma[0] <= 0:
        return 0
    return int((sigma / sigma[0] > epsilon).sum())


def stable_rank(sigma: Tensor) -> float:
    """|W|_F^2 / sigma_1^2 of singular values ``[r]`` in descending order; 0 for W = 0."""
    if sigma.numel() == 0 or sigma[0] <= 0:
        return 0.0
    return float((sigma.double() / sigma[0].double()).square().sum())


@lru_cache(maxsize=256)
def random_spectrum(m: int, n: int) -> tuple[float, ...]:
    """Singular values of one Gaussian matrix ``[m, n]`` of unit variance, in descending order.

    The spectrum of a weight matrix as it is initialised, up to a factor; always the same draw.
    """
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(max(m, n), min(m, n), generator=generator, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(W.T @ W)
    return tuple(eigenvalues.clamp_min(0).flip(0).sqrt().tolist())


def energy_rank(sigma: Tensor, energy: float) -> int:
    """Smallest rank whose squared values of ``[r]`` sum to at least ``energy`` of the total."""
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

    At the ε-rank of ``W`` their product is within ε|W|_2 of ``W`` in the spectral norm.

    Returns ``L`` ``[m, r]`` and ``R`` ``[r, n]``, float64, with the singular values shared evenly:
    L = U_r S_r^{1/2}, R = S_r^{1/2} V_r^T.
    """
    U, S, Vt = torch.linalg.svd(W.detach().to(torch.float64), full_matrices=False)
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vt[:rank]


def symmetric_roots(C: Tensor, damping: float = 1e-6) -> tuple[Tensor, Tensor]:
    """C^{1/2} and C^{-1/2} of a positive semi-definite ``C`` ``[n, n]``, by ``eigh``.

    ``C`` is nearly singular when inputs have low rank, so ``damping`` times the largest eigenvalue
    is added to every eigenvalue. For C = 0 both roots are the identity: without measurements all
    directions have the same weight.
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
    """Rank-``rank`` factors of ``W`` ``[m, n]`` of least mean squared error of W x.

    ``C`` ``[n, n]`` is the second moment of x. Minimises E |W x - L R x|^2, which is
    |(W - L R) C^{1/2}|_F^2, by truncating the SVD of W C^{1/2} and undoing C^{1/2}
    (SVD-LLM, Wang et al., 2024).
    """
    root, inverse_root = symmetric_roots(C, damping)
    L, R = truncated_svd(W.detach().to(torch.float64) @ root, rank)
    return L, R @ inverse_root


@dataclass(frozen=True)
class Roots:
    """C^{1/2} and C^{-1/2} of a second moment ``[d, d]``, shared by all heads of a block."""

    root: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, C: Tensor) -> Roots:
        """Roots of C ``[d, d]`` by :func:`symmetric_roots`."""
        return cls(*symmetric_roots(C))


def fold_bilinear(
    W_Q: Tensor, W_K: Tensor, C_x: Roots, C_y: Roots, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Smaller queries and keys of one head, of least error of its scores x^T W_Q^T W_K y.

    Truncates the SVD of C_x^{1/2} W_Q^T W_K C_y^{1/2}, which minimises the mean squared error of
    the scores for independently drawn queries and keys. QR of the thin factors comes first, so
    only the moments are d x d decompositions.

    Parameters
    ----------
    W_Q, W_K
        ``[k, d]``.
    C_x, C_y
        Second moments of the inputs of queries and keys.
    rank
        At most ``k``.

    Returns
    -------
    tuple
        ``W_Q'``, ``W_K'`` ``[rank, d]`` with W_Q'^T W_K' the truncated form, and the ``k`` singular
        values, all float64.
    """
    Q_x, R_x = torch.linalg.qr(C_x.root @ W_Q.detach().to(torch.float64).T)  # [d, k], [k, k]
    Q_y, R_y = torch.linalg.qr(C_y.root @ W_K.detach().to(torch.float64).T)
    U, S, Vt = torch.linalg.svd(R_x @ R_y.T)
    half = S[:rank].sqrt()
    queries = C_x.inverse @ (Q_x @ (U[:, :rank] * half))
    keys = C_y.inverse @ (Q_y @ (Vt[:rank].T * half))
    return queries.T, keys.T, S


def fold_rotary(
    W_Q: Tensor,
    W_K: Tensor,
    C_x: Roots,
    C_y: Roots,
    groups: Sequence[Mapping[int, float]],
) -> tuple[Tensor, Tensor]:
    """Fewer rotary pairs for one head: each kept frequency represents a group of pairs.

    Rows j and j + k/2 form a complex number that rotates with frequency w_j. The score of the pair
    at distance t is Re(conj(q_j) k_j e^{i w_j t}): a complex bilinear form of rank one. Over the
    distances that occur, its component at another frequency w is the form times
    E cos((w_j - w) t). So the forms of a group are summed with these weights and truncated to rank
    one. A group of one pair is unchanged.

    Parameters
    ----------
    W_Q, W_K
        ``[k, d]``.
    C_x, C_y
        Second moments of the inputs of queries and keys.
    groups
        For each kept pair, the pairs that it represents and their weights; its own weight is 1.

    Returns
    -------
    tuple
        ``W_Q'``, ``W_K'`` ``[2 len(groups), d]`` in the same layout, float64.
    """
    half = len(W_Q) // 2
    Q, K = (torch.complex(W[:half], W[half:]) for W in (W_Q.double(), W_K.double()))  # [k/2, d]
    queries, keys = [], []
    for group in groups:
        index = torch.tensor(list(group), device=Q.device)
        if len(group) == 1:
            queries.append(Q[index[0]])
            keys.append(K[index[0]])
            continue
        weights = torch.tensor(list(group.values()), dtype=Q.dtype, device=Q.device)
        U_x, R_x = torch.linalg.qr(C_x.root.to(Q.dtype) @ Q[index].mH)  # [d, g], [g, g]
        U_y, R_y = torch.linalg.qr(C_y.root.to(Q.dtype) @ (K[index] * weights[:, None]).T)
        U, S, Vh = torch.linalg.svd(R_x @ R_y.T)
        queries.append((C_x.inverse.to(Q.dtype) @ (U_x @ U[:, 0])).conj() * S[0].sqrt())
        keys.append(C_y.inverse.to(Q.dtype) @ (U_y @ Vh[0]) * S[0].sqrt())
    q, k = torch.stack(queries), torch.stack(keys)
    return torch.cat([q.real, q.imag]), torch.cat([k.real, k.imag])


def fold_values(
    W_O: Tensor, C: Tensor, num_heads: int, rank: int, sweeps: int = 0, *, refit: bool = True
) -> tuple[Tensor, Tensor]:
    """Smaller values of all heads of a block, of least error of its output W_O c.

    c ``[H k]`` has the attention-weighted values of all heads. Head h keeps P_h c_h, ``[rank]``,
    and the output matrix becomes W_O'. Starts from the truncated SVD of each W_O^h C_hh^{1/2}. Each
    sweep then minimises E |W_O c - W_O' P c|^2 over W_O' and over each P_h in turn, with the others
    fixed. Redundancy across heads is used, and the error never grows.

    Parameters
    ----------
    W_O
        ``[d, H k]``.
    C
        Second moment of c, ``[H k, H k]``. Zero: the values are truncated by weight alone.
    rank
        At most k.
    sweeps
        0: the truncated SVDs, and W_O' fitted to them.
    refit
        False: the truncated SVDs alone.

    Returns
    -------
    tuple
        ``P`` ``[H, rank, k]`` and ``W_O'`` ``[d, H rank]``, float64.
    """
    W, C = W_O.detach().to(torch.float64), C.to(torch.float64)
    size = W.shape[1] // num_heads
    P = torch.zeros(num_heads, rank, size, dtype=torch.float64, device=W.device)
    out = torch.zeros(len(W), num_heads, rank, dtype=torch.float64, device=W.device)
    heads = [slice(h * size, (h + 1) * size) for h in range(num_heads)]
    for h, head in enumerate(heads):
        # Damping in proportion to rounding: these moments may have rank one.
        out[:, h], P[h] = whitened_svd(W[:, head], C[head, head], rank, damping=1e-12)
    if not refit or float(C.diagonal().sum()) <= 0:
        return P, out.flatten(1)
    inverses = [_pseudo_inverse(C[head, head]) for head in heads] if sweeps else []
    WC = W @ C
    EC, change = torch.empty_like(WC), torch.empty_like(WC)  # fresh pages would cost more
    for _ in range(sweeps):
        block = _block_diagonal(P)
        out = least_squares(WC @ block.T, block @ C @ block.T, out.flatten(1)).view_as(out)
        # E = W - W' P, the error
        torch.sub(WC, torch.mm(out.flatten(1), block @ C, out=change), out=EC)
        for h, head in enumerate(heads):
            gram = _pseudo_inverse(out[:, h].T @ out[:, h])
            without = EC[:, head] + out[:, h] @ (P[h] @ C[head, head])
            better = gram @ (out[:, h].T @ without) @ inverses[h]
            EC -= torch.mm(out[:, h], (better - P[h]) @ C[head], out=change)
            P[h] = better
    block = _block_diagonal(P)
    return P, least_squares(WC @ block.T, block @ C @ block.T, out.flatten(1))


def shared_latent(G: Tensor, C: Roots, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of least error of W y when y is approximated by B z, z = A y ``[rank]``.

    With V_r the leading right singular vectors of W C^{1/2}, A = V_r^T C^{-1/2} and
    B = C^{1/2} V_r minimise E |W y - W B A y|^2.

    Parameters
    ----------
    G
        W^T W, ``[d, d]``; the sum over several matrices that read y.
    C
        Second moment of y.
    rank
        At most ``d``; at ``d``, B A is the identity to rounding.

    Returns
    -------
    tuple
        A ``[rank, d]`` and B ``[d, rank]``, float64.
    """
    whitened = C.root @ G.to(torch.float64) @ C.root
    V = torch.linalg.eigh((whitened + whitened.T) / 2).eigenvectors.flip(1)[:, :rank]
    return V.T @ C.inverse, C.root @ V


def _block_diagonal(P: Tensor) -> Tensor:
    """``[H r, H k]`` of ``[H, r, k]``."""
    block: Tensor = torch.block_diag(*P)  # type: ignore[no-untyped-call]
    return block


def _pseudo_inverse(C: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.pinv(C, rtol=1e-9, hermitian=True)
    return inverse


def least_squares(T: Tensor, C: Tensor, W: Tensor, damping: float = 1e-6) -> Tensor:
    """``W'`` ``[m, n]`` that minimises E |t - W' u|^2, with ridge regularisation towards ``W``.

    Solves W' (C + s I) = T + s W with s = ``damping`` times the mean eigenvalue of C, so ``W`` is
    kept in directions of little energy. With C = 0 the result is ``W``.

    Parameters
    ----------
    T
        E t u^T, ``[m, n]``.
    C
        E u u^T, ``[n, n]``.
    """
    C, T, W = (matrix.to(torch.float64) for matrix in (C, T, W))
    strength = damping * float(C.diagonal().mean())
    if not strength > 0:
        return W
    damped = C + strength * torch.eye(len(C), dtype=torch.float64, device=C.device)
    # T + s W = (T - W C) + W (C + s I): solving for the change keeps W to the bit where the change
    # is zero.
    change: Tensor = torch.linalg.solve(damped, (T - W @ C).T).T
    return W + change


def select_units(W: Tensor, C: Tensor, count: int, *, sketch: int = 128) -> Tensor:
    """Hidden units S of least error E |W h - W' h_S|^2, by greedy column selection.

    Each step adds the unit that lowers the error most, with the best W' for the units so far,
    through a pivoted Cholesky factorization of C.

    Parameters
    ----------
    W
        ``[m, n]``, the output projection.
    C
        Second moment of the hidden units, ``[n, n]``.
    count
        Units to keep, at most ``n``.
    sketch
        More outputs than this are replaced by this many random combinations of them; the relative
        error of a unit's gain is then about (2 / sketch)^{1/2}.

    Returns
    -------
    Tensor
        Indices of the units, ascending, ``[count]``.
    """
    # float32 suffices for a choice of units.
    W, C = W.detach().float(), C.float()
    n = len(C)
    if len(W) > sketch:
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(sketch, len(W), generator=generator, dtype=torch.float32)
        W = mix.to(W.device) @ W
    reach = W @ C  # [m, n]: E (residual) h^T
    left = C.diagonal().clone()  # residual variance of each unit given the chosen ones
    floor = 1e-6 * float(left.max())
    factor = torch.zeros(count, n, device=C.device)
    chosen = torch.zeros(n, dtype=torch.bool, device=C.device)
    for step in range(count):
        gain = reach.square().sum(0) / left.clamp_min(floor or 1.0)
        gain[left <= floor] = 0.0  # constant 0, or a combination of the chosen ones
        gain[chosen] = -1.0
        pick = int(gain.argmax())
        chosen[pick] = True
        pivot = float(left[pick])
        if pivot <= floor:
            continue
        row = C[pick] - factor[:step, pick] @ factor[:step]
        factor[step] = row / math.sqrt(pivot)
        reach.addr_(reach[:, pick] / pivot, row, alpha=-1)
        left -= factor[step] ** 2
    return chosen.nonzero()[:, 0]


def power_law_ranks(
    depths: Sequence[int], d_0: float, alpha: float, *, powers_of_two: bool = False
) -> list[int]:
    """Head sizes ceil(d_0 (1 + i)^alpha) at depths i (paper sec. 5).

    ``powers_of_two`` takes the power of two nearest to d_0 (1 + i)^alpha on a logarithmic axis, at
    least 1, as the authors' code does for hardware: 2^round(log2(d_0 (1 + i)^alpha)).
    """
    sizes = [d_0 * (1 + depth) ** alpha for depth in depths]
    if powers_of_two:
        return [1 << max(0, round(math.log2(size))) for size in sizes]
    # A fitted law comes back a rounding error above a whole rank.
    return [max(1, math.ceil(size * (1 - 1e-9))) for size in sizes]


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
    """Indices ``[N]`` of an even sub-sample of N, at most ``most``, of ``count`` rows, in order."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def scattered_picks(count: int, most: int, seed: int = 0) -> Tensor:
    """Indices ``[N]`` of at most ``most`` of ``count`` rows, in order, a random one of every Nth.

    The same for the same numbers. Even steps take the same few positions of every sequence, as soon
    as its length is a multiple of the step or the step one of the length.
    """
    if count <= most:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    within = torch.rand(most, generator=generator, dtype=torch.float64)
    edges = torch.arange(most + 1) * count // most
    return edges[:-1] + (within * edges.diff()).long()
