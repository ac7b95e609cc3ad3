"""Do the heads of a matrix share their directions? Angles between rows, and a sharing index.

Yu et al., 2025, Fig. 14 and 16: rows of W_Q of one head are more alike than rows of two, and with
more heads W_Q has more rank, while a head keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from torch import Tensor

from tscompress.io.strict import Strict
from tscompress.linalg import angle_matrix


class HeadAngles(Strict):
    """Mean angles in radians between rows of one W_Q ``[H d_kv, d]``, in [0, pi/2].

    Attributes
    ----------
    name
        Of the projection.
    within, between
        Over pairs of different rows of the same head, and of two heads.
    """

    name: str
    heads: int
    within: float
    between: float


def head_angles(W: Tensor, num_heads: int, name: str) -> HeadAngles | None:
    """Mean angles between rows of ``W`` ``[H d_kv, d]``; None with one head, or one row a head."""
    size = len(W) // num_heads
    if num_heads < 2 or size < 2:
        return None
    angles = angle_matrix(W)
    blocks = angles.reshape(num_heads, size, num_heads, size).diagonal(dim1=0, dim2=2)  # own head
    own = float(blocks.sum() - angles.diagonal().sum())
    pairs = num_heads * size * (size - 1)
    others = float(angles.sum() - blocks.sum())
    return HeadAngles(
        name=name,
        heads=num_heads,
        within=round(own / pairs, 4),
        between=round(others / (len(W) * (len(W) - size)), 4),
    )


def sharing_index(rank: int, head_ranks: Sequence[int]) -> float:
    """The ε-rank of a matrix over the sum of those of its heads.

    1 / H if all heads span the same directions, 1 if each has its own. Weak directions that several
    heads have in common can add up to more than each head's count, so slightly above 1 occurs.
    """
    return rank / max(1, sum(head_ranks))


#: Mean rank of a head, as a share of full rank, above which a sharing index means nothing.
NEARLY_FULL = 0.9


def sharing_findings(
    indices: Sequence[float],
    num_heads: int,
    share_of_full: float,
    epsilon: float,
    angles: HeadAngles | None,
) -> list[str]:
    """What sharing indices of W_Q of all blocks, and angles of the first, mean for a user.

    Parameters
    ----------
    share_of_full
        Mean ε-rank of the heads over their full rank.
    """
    if num_heads < 2 or not indices:
        return []
    index = fmean(indices)
    lines = [
        f"The ε-rank of W_Q is {index:.2f} of the sum of its heads' at ε = {epsilon:g} "
        f"({1 / num_heads:.2g}: all heads the same, 1: each its own): "
        f"{_meaning(index, num_heads, share_of_full)}."
    ]
    if angles is not None:
        lines.append(
            f"Rows of W_Q of the first block are {angles.within:.2f} rad apart within a head and "
            f"{angles.between:.2f} between heads, on average."
        )
    return lines


def _meaning(index: float, num_heads: int, share_of_full: float) -> str:
    if share_of_full > NEARLY_FULL:
        return "heads have nearly full rank, so the index does not show what they share"
    position = (index - 1 / num_heads) / (1 - 1 / num_heads)
    if position < 1 / 3:
        return "heads use much the same directions, which one latent for all can hold (--latent)"
    if position > 2 / 3:
        return (
            "each head has directions of its own, for which smaller heads (--rank) suit better "
            "than one latent for all (--latent)"
        )
    return (
        "heads share some directions, and neither smaller heads (--rank) nor one latent for "
        "all (--latent) suits clearly better"
    )
