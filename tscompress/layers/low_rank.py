"""A Linear layer as two factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """y = L (R x) + b with ``R`` ``[rank, in_features]`` and ``L`` ``[out_features, rank]``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.right = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.left = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_factors(cls, linear: nn.Linear, L: Tensor, R: Tensor) -> LowRankLinear:
        """Factors L ``[out, r]`` and R ``[r, in]``, with dtype, device and bias of ``linear``."""
        weight = linear.weight
        module = cls(
            linear.in_features,
            linear.out_features,
            len(R),
            bias=linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            module.right.weight.copy_(R)
            module.left.weight.copy_(L)
            if linear.bias is not None:
                module.left.bias.copy_(linear.bias)
        module.requires_grad_(weight.requires_grad)
        return module

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.right.in_features

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.left.out_features

    @property
    def rank(self) -> int:
        """Size between the two factors."""
        return self.right.out_features

    @property
    def weight(self) -> Tensor:
        """The factor ``[rank, in]`` that reads the input; T5's feed-forward casts to its dtype."""
        return self.right.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        y: Tensor = self.left(self.right(x))
        return y

    def extra_repr(self) -> str:
        return f"rank={self.rank}"
