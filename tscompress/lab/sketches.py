"""Sparse sketches by heads, and how much of a row space they hold (paper App. F.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.spectra import checked_sizes, gaussian, head_size


def sparse_sketch(d: int, heads: int, rank: int, generator: torch.Generator) -> Tensor:
    """W_{2,h} ``[h r, d]``: every row has d / h entries N(0, 1) at random places (paper App. F.2).

    So all h give the same number of entries, r d. The paper's "it has exactly d_h non-zero
    entries" is of a row.
    """
    entries = head_size(d, heads)
    checked_sizes(rank=rank)
    order = torch.rand(heads * rank, d, generator=generator).argsort(1)
    values = gaussian(heads * rank, entries, generator=generator)
    return torch.zeros(heads * rank, d, dtype=torch.float64).scatter(1, order[:, :entries], values)


def row_space(W: Tensor) -> Tensor:
    """Orthonormal columns that span the rows of ``W`` ``[r, L]``, to rounding, by its SVD.

    Rows of a sparse sketch can depend on one another: two with a single entry at the same place do.
    """
    _, sigma, Vt = torch.linalg.svd(W, full_matrices=False)
    rounding = max(W.shape) * torch.finfo(W.dtype).eps * sigma[0]
    rows: Tensor = Vt[sigma > rounding]
    return rows.T


def sketch_distance(W: Tensor, X: Tensor) -> float:
    """|(P - I) X^T|_2 with P the projector onto the rows of W X (paper eq. 18, W_2 for its W_R).

    It depends on X ``[d, L]`` by U and sigma alone, so X may be given as U diag(sigma) ``[d, d]``.

    Parameters
    ----------
    W
        The sketch ``[r, d]``.

    Raises
    ------
    UsageError
        W does not read the rows of X.
    """
    if W.shape[1] != len(X):
        raise UsageError(f"the sketch reads {W.shape[1]} rows, X has {len(X)}.")
    q = row_space(W @ X)
    rest = X.T - q @ (q.T @ X.T)
    return float(torch.linalg.matrix_norm(rest, 2))
