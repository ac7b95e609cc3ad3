"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

#: Coefficients of the quintic step, Jordan et al. (2024), which brings singular values near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
#: Root mean square of an update of AdamW, so that one learning rate serves both (Liu et al., 2025).
_UPDATE_SIZE = 0.2


OptimizerName = Literal["adamw", "muon"]


def make_optimizer(
    name: OptimizerName, groups: list[dict[str, Any]], *, learning_rate: float, bfloat16: bool
) -> torch.optim.AdamW:
    """AdamW for all groups, or :class:`Muon`, optionally in bfloat16, for orthogonal groups."""
    options: dict[str, Any] = {"lr": learning_rate, "betas": (0.9, 0.98), "fused": True}
    if name == "adamw":
        return torch.optim.AdamW(groups, **options)
    return Muon(groups, dtype=torch.bfloat16 if bfloat16 else torch.float32, **options)


class Muon(torch.optim.AdamW):
    """AdamW in which groups of matrices with ``orthogonal=True`` have orthogonalised updates.

    These keep a mean of their gradients, as ``exp_avg``; their update is the orthogonal factor of
    the gradient looked ahead (Nesterov), times ``0.2 sqrt(max(m, n))``: its directions count nearly
    alike, and its size for nothing. Gradients of such groups are used up by a step.
    From Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), scaled as
    by Liu et al., "Muon is scalable for LLM training" (2025).

    Parameters
    ----------
    groups
        Parameter groups of AdamW.
    momentum
        Of the mean of the gradients.
    dtype
        In which polar factors are found.
    options
        Of AdamW, such as ``lr``, ``betas``, ``fused``.

    Raises
    ------
    ValueError
        A parameter of a group with ``orthogonal=True`` is no matrix.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        matrices = [group for group in groups if group.get("orthogonal")]
        for group in matrices:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon moves matrices, not shape {tuple(parameter.shape)}.")
            group |= {"momentum": momentum, "dtype": dtype}
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("orthogonal"):
                self._step_matrices(group)
        super().step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[Any, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:  # AdamW expects a step of every state that it loads
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
            state["step"] += 1
            mean = state["exp_avg"].lerp_(parameter.grad, 1 - group["momentum"])
            ahead = parameter.grad.lerp(mean, group["momentum"])
            alike[parameter.shape, parameter.device].append((parameter, ahead))
            parameter.grad = None  # nothing is left for AdamW
        rate = group["lr"]
        for (shape, _), found in alike.items():
            factors = polar_factors(torch.stack([ahead for _, ahead in found]), group["dtype"])
            for (parameter, _), factor in zip(found, factors, strict=True):
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(factor, alpha=rate * _UPDATE_SIZE * max(shape) ** 0.5)


def polar_factors(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nearly orthogonal factors of ``[N, m, n]``, float32: singular values of 0.6 to 1.25.

    Five quintic Newton-Schulz iterations. They take small singular values some 500 times as far, so
    that those below a 1000th of a matrix's norm stay smaller, and in bfloat16 rounding counts.
    """
    a, b, c = _QUINTIC
    upright = matrices.shape[-2] > matrices.shape[-1]
    factors = matrices.mT if upright else matrices
    norms = torch.linalg.matrix_norm(factors, keepdim=True)
    factors = (factors / norms.clamp_min(1e-12)).to(dtype)
    for _ in range(_ITERATIONS):
        square = factors @ factors.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        factors = torch.baddbmm(factors, polynomial, factors, beta=a)
    return (factors.mT if upright else factors).float()
