"""Attention as the paper writes it: tokens are columns, and softmax makes columns sum to 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.spectra import gaussian, head_size


class Attention(NamedTuple):
    """Weights of an attention layer with ``heads`` heads, each ``[d, d]``, heads as blocks of rows.

    There is no output projection (paper eq. 19).
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    heads: int = 1

    def split(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each head, ``[d_h, d]`` each."""
        size = head_size(len(self.W_Q), self.heads)
        for start in range(0, len(self.W_Q), size):
            rows = slice(start, start + size)
            yield self.W_Q[rows], self.W_K[rows], self.W_V[rows]

    def __call__(self, U: Tensor) -> Tensor:
        """The output ``[d, L]`` for tokens ``U`` ``[d, L]``; see :func:`multihead_attention`."""
        return multihead_attention(U, self)


def attention_probabilities(U: Tensor, W_Q: Tensor, W_K: Tensor) -> Tensor:
    """softmax(U^T W_Q^T W_K U / sqrt(d_h)) ``[L, L]`` of one head, over each column.

    ``U`` is ``[d, L]``, ``W_Q`` and ``W_K`` are ``[d_h, d]``. The paper's W_K^T in section 3 is a
    slip: its appendices have W_K.
    """
    scores = (W_K @ U).T @ (W_Q @ U) / math.sqrt(len(W_Q))  # transposed: columns lie together
    return torch.softmax(scores, 1).T


def multihead_attention(U: Tensor, weights: Attention) -> Tensor:
    """MH-Attention(U; W_Q, W_K, W_V, h) (paper sec. 3 and eq. 19).

    Parameters
    ----------
    U
        Tokens as columns, ``[d, L]``.

    Returns
    -------
    Tensor
        ``[d, L]``: the outputs of the heads, one below the other.

    Raises
    ------
    UsageError
        The heads do not divide d, or the weights read another d.
    """
    if weights.W_Q.shape[1] != len(U):
        raise UsageError(f"weights read d = {weights.W_Q.shape[1]}, the tokens have {len(U)}.")
    outputs = [
        (W_V @ U) @ attention_probabilities(U, W_Q, W_K) for W_Q, W_K, W_V in weights.split()
    ]
    return torch.cat(outputs)


def spectral_norm(W: Tensor) -> float:
    """The largest singular value of ``W`` ``[m, n]``."""
    return float(torch.linalg.matrix_norm(W, 2))


def random_attention(
    d: int,
    heads: int,
    generator: torch.Generator,
    *,
    score_norm: float | None = None,
    value_norm: float | None = None,
) -> Attention:
    """Gaussian weights, scaled in each head to the norms that a theorem assumes.

    Parameters
    ----------
    score_norm, value_norm
        Spectral norms of W_Q^T W_K and of W_V in each head; None: entries stay N(0, 1).
    """
    size = head_size(d, heads)
    parts: list[list[Tensor]] = [[], [], []]
    for _ in range(heads):
        W_Q, W_K, W_V = (gaussian(size, d, generator=generator) for _ in range(3))
        if score_norm is not None:
            scale = math.sqrt(score_norm / product_norm(W_Q, W_K))
            W_Q, W_K = scale * W_Q, scale * W_K
        if value_norm is not None:
            W_V = value_norm / spectral_norm(W_V) * W_V
        for part, W in zip(parts, (W_Q, W_K, W_V), strict=True):
            part.append(W)
    queries, keys, values = (torch.cat(part) for part in parts)
    return Attention(queries, keys, values, heads)


def product_norm(W_Q: Tensor, W_K: Tensor) -> float:
    """The spectral norm of W_Q^T W_K, from triangular factors ``[d_h, d_h]``."""
    R_Q = torch.linalg.qr(W_Q.T, mode="r").R
    R_K = torch.linalg.qr(W_K.T, mode="r").R
    return spectral_norm(R_Q @ R_K.T)
