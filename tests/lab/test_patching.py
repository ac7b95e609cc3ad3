"""What patches cost a linear head: the bound, exact errors, and heads that training finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.patching import PatchedRegression, estimates, least_squares


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def error(case: PatchedRegression, U: Tensor, v: Tensor, batch: int = 20_000) -> float:
    z, w = case.draw(batch, seeded(1))
    return float(((estimates(U, v, z) - w) ** 2).sum(-1).mean())


@pytest.mark.parametrize("p", [1, 2, 5])
def test_the_natural_head_is_unbiased_and_has_its_exact_error(p: int) -> None:
    case = PatchedRegression(3, 20, p, 1.5)
    U, v = case.natural_head()
    assert case.bias_of(U, v) < 1e-15
    assert case.noise_part(U, v) == pytest.approx(p * 1.5**2 * 3 / 20)
    assert error(case, U, v) == pytest.approx(case.unbiased_error(3), rel=0.04)


def test_the_best_multiple_has_its_exact_error_and_none_is_better() -> None:
    case = PatchedRegression(3, 20, 2)
    U, v = case.natural_head()
    unbiased = case.unbiased_error(3)
    best = 3 / (unbiased + 3)
    found = [error(case, scale * U, v) for scale in (0.9 * best, best, 1.1 * best)]
    assert found[1] == pytest.approx(case.shrunken_error, rel=0.04)
    assert found[1] == min(found)


@settings(max_examples=30, deadline=None)
@given(d=st.integers(1, 4), p=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_no_unbiased_head_is_below_either_bound(d: int, p: int, seed: int) -> None:
    """Drawn heads whose condition of eq. 3 is met, without the parts that eqs. 4 and 5 forbid."""
    case = PatchedRegression(d, 4 * p, p)
    draw = seeded(seed)
    Ux = torch.randn(d, p, d, dtype=torch.float64, generator=draw)
    vy = torch.randn(p, dtype=torch.float64, generator=draw) + 0.1
    lacking = p / case.n * torch.eye(d, dtype=torch.float64) - torch.einsum("j,djc->dc", vy, Ux)
    Ux += torch.einsum("dc,j->djc", lacking, vy / (vy @ vy))
    U = torch.cat([Ux, torch.zeros(d, p, 1, dtype=torch.float64)], dim=-1).flatten(1)
    v = torch.cat([torch.zeros(p, d, dtype=torch.float64), vy[:, None]], dim=-1).flatten()
    assert case.bias_of(U, v) < 1e-9
    noise = case.noise_part(U, v)
    assert noise >= case.printed_bound
    assert noise >= case.sharper_bound
    assert noise >= p * d / case.n * (1 - 1e-9)  # without those parts the factor is p


def test_a_head_with_both_parts_meets_the_bound_with_one_covariate() -> None:
    """(3) to (5) hold, and the noise part is p / 2 to the letter."""
    case = PatchedRegression(1, 8, 2)
    root = (2 / 8 / 2) ** 0.5
    U = torch.tensor([[root, 0.0, 0.0, root]], dtype=torch.float64)  # Ux_1, uy_1, Ux_2, uy_2
    v = torch.tensor([0.0, root, root, 0.0], dtype=torch.float64)
    assert case.bias_of(U, v) < 1e-15
    assert case.noise_part(U, v) == pytest.approx(case.printed_bound)
    assert case.printed_bound == pytest.approx(case.sharper_bound)


def test_least_squares_has_its_exact_error_and_no_patches() -> None:
    case = PatchedRegression(3, 20, 4, 0.5)
    z, w = case.draw(20_000, seeded(2))
    found = float(((least_squares(z, 4) - w) ** 2).sum(-1).mean())
    assert found == pytest.approx(case.least_squares_error, rel=0.03)


def test_training_finds_about_the_best_multiple() -> None:
    case = PatchedRegression(2, 12, 2)
    U, v = case.trained_head(600, seeded())
    assert error(case, U, v) == pytest.approx(case.shrunken_error, rel=0.05)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="divides"):
        PatchedRegression(2, 10, 3)
    with pytest.raises(UsageError, match="d \\+ 1"):
        _ = PatchedRegression(3, 4, 2).least_squares_error
