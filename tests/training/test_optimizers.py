"""Muon against torch's own, against AdamW, and against singular values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tscompress.training.optimizers import Muon, polar_factors

SHAPES = [(16, 64), (64, 16), (24, 24), (16, 64)]


@pytest.mark.parametrize("shape", [(3, 16, 64), (3, 64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_factors_keep_directions_and_lose_sizes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = polar_factors(matrices, dtype)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.65
    assert values.max() < 1.25
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ found @ right.mT  # diagonal where the directions are the matrix's own
    apart = inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))
    assert apart.abs().max() < (1e-4 if dtype == torch.float32 else 0.05)


def test_the_size_of_a_gradient_does_not_matter_and_none_is_none() -> None:
    matrices = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(polar_factors(1e-6 * matrices), polar_factors(1e6 * matrices))
    assert not polar_factors(torch.zeros(2, 8, 32)).any()


def _parameters(seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    others = [nn.Parameter(torch.randn(n, generator=generator)) for n in (5, 7)]
    return matrices, others


def _trained(
    optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter], steps: int = 5
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _groups(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": matrices, "orthogonal": True, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with torch 2.9")
def test_torchs_muon_gets_the_matrices() -> None:
    matrices, others = _parameters()
    ours = _trained(
        [Muon(_groups(matrices, others), lr=1e-2, dtype=torch.bfloat16)], [*matrices, *others]
    )
    matrices, others = _parameters()
    started = [p.detach().clone() for p in (*matrices, *others)]
    theirs = _trained(
        [
            torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0),
        ],
        [*matrices, *others],
    )
    for our, their, start in zip(ours, theirs, started, strict=True):
        # Iterations in bfloat16 round differently in a batch; moves are 0.006 in the mean.
        assert (their - start).abs().mean() > 0.005
        torch.testing.assert_close(our, their, rtol=0, atol=5e-4)


def test_adamw_gets_the_other_parameters() -> None:
    matrices, others = _parameters()
    ours = _trained([Muon(_groups(matrices, others), lr=1e-2)], [*matrices, *others])
    _, same = _parameters()
    generator = torch.Generator().manual_seed(1)
    adamw = torch.optim.AdamW(same, lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        for shape in SHAPES:
            torch.randn(shape, generator=generator)
        for parameter in same:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        adamw.step()
    for our, their in zip(ours[len(SHAPES) :], same, strict=True):
        torch.testing.assert_close(our, their.detach(), rtol=0, atol=0)


def test_matrices_without_a_gradient_stay_and_others_do_not() -> None:
    matrices, others = _parameters()
    before = [p.detach().clone() for p in matrices]
    optimizer = Muon(_groups(matrices, others), lr=1e-2)
    matrices[1].grad = torch.ones_like(matrices[1])
    optimizer.step()
    moved = [not torch.equal(p, b) for p, b in zip(matrices, before, strict=True)]
    assert moved == [False, True, False, False]


def test_states_come_back() -> None:
    matrices, others = _parameters()
    optimizer = Muon(_groups(matrices, others), lr=1e-2)
    _trained([optimizer], [*matrices, *others], steps=2)
    stored = copy.deepcopy(optimizer.state_dict())  # or both would share their moments
    again = Muon(_groups(*_copies(matrices, others)), lr=1e-2)
    again.load_state_dict(stored)
    copies = [p for group in again.param_groups for p in group["params"]]
    for ours, theirs in zip(
        _trained([optimizer], [*matrices, *others]), _trained([again], copies), strict=True
    ):
        assert torch.equal(ours, theirs)


def _copies(
    matrices: list[nn.Parameter], others: list[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return (
        [nn.Parameter(p.detach().clone()) for p in matrices],
        [nn.Parameter(p.detach().clone()) for p in others],
    )


def test_a_vector_is_no_matrix() -> None:
    _, others = _parameters()
    with pytest.raises(ValueError, match=r"matrices, not shape \(5,\)"):
        Muon([{"params": others, "orthogonal": True}], lr=1e-2)
