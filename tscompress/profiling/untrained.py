"""Which attention matrices still look as they were initialised.

The rank of a fresh matrix is that of its initialisation, nearly full whatever the data. A cut of
such a matrix removes much of its norm, and looks worse than it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tscompress.linalg import epsilon_rank, random_spectrum, stable_rank

#: Tolerance of the ε-ranks that are compared.
EPSILON = 0.1
#: Share of a random matrix's rank above which a matrix counts as untrained.
SHARE = 0.8


def looks_untrained(sigma: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a matrix has nearly the ranks of a Gaussian one of its shape.

    Both its ε-rank and its stable rank |W|_F^2 / sigma_1^2 are above 0.8 of them. The ε-rank alone
    would count many trained matrices, whose few leading directions only the stable rank shows.

    Parameters
    ----------
    sigma
        Singular values ``[r]`` in descending order, or these over the largest.
    shape
        Rows and columns of the matrix.
    """
    random = torch.tensor(random_spectrum(*shape), dtype=torch.float64)
    ours = epsilon_rank(sigma, EPSILON), stable_rank(sigma)
    fresh = epsilon_rank(random, EPSILON), stable_rank(random)
    return all(value > SHARE * of for value, of in zip(ours, fresh, strict=True))


def untrained_finding(untrained: Sequence[str], total: int) -> str:
    """A sentence about the matrices that look untrained, of ``total``; there is at least one."""
    shown = ", ".join(untrained[:4]) + (", ..." if len(untrained) > 4 else "")
    verb = "has" if len(untrained) == 1 else "have"
    return (
        f"{len(untrained)} of {total} attention matrices {verb} the ranks of random ones of their "
        f"shape (above {SHARE:g} of them: {shown}): not trained for long, without effect on the "
        "output, or, as some values and outputs of well-trained models, of full rank. A cut of an "
        "untrained matrix looks worse than it is."
    )
