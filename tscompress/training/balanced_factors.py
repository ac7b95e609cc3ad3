"""Factors of a student with equal singular values, so that one learning rate suits both."""

from __future__ import annotations

import torch

from tscompress.checkpoints.load import LoadedModel
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import truncated_svd


@torch.no_grad()
def balance_factors_(student: LoadedModel) -> None:
    """Give both factors of each product L R the same singular values; the product stays.

    A cut that weights inputs leaves what it undoes in R: that of SVD-LLM is then a hundred times
    smaller than L, that of activation-svd less so. Steps of Muon and AdamW do not grow with the
    weights they change, so no learning rate suits both (eval/notes/recovery.md). Forecasts stay up
    to rounding in float32.
    """
    for module in student.model.modules():
        if isinstance(module, LowRankLinear):
            left, right = module.left.weight, module.right.weight
            L, R = truncated_svd(left.double() @ right.double(), module.rank)
            left.copy_(L)
            right.copy_(R)
