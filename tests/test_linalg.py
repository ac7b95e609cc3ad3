from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tscompress import linalg

SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 12))


def random_matrix(m: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator, dtype=torch.float64)


def planted(sigma: list[float], m: int, n: int) -> torch.Tensor:
    """A matrix with the given singular values."""
    U = torch.linalg.qr(random_matrix(m, m, 1))[0][:, : len(sigma)]
    V = torch.linalg.qr(random_matrix(n, n, 2))[0][:, : len(sigma)]
    return (U * torch.tensor(sigma, dtype=torch.float64)) @ V.T


@pytest.mark.parametrize(("epsilon", "rank"), [(0.9, 1), (0.4, 2), (0.05, 3), (0.001, 4)])
def test_epsilon_rank_counts_relative_singular_values(epsilon: float, rank: int) -> None:
    sigma = linalg.singular_values(planted([10.0, 5.0, 1.0, 0.05], 7, 6))
    assert linalg.epsilon_rank(sigma, epsilon) == rank


def test_epsilon_rank_is_strict_and_zero_for_a_zero_matrix() -> None:
    assert linalg.epsilon_rank(torch.tensor([2.0, 1.0]), 0.5) == 1
    assert linalg.epsilon_rank(linalg.singular_values(torch.zeros(3, 4)), 0.1) == 0


def test_energy_rank_is_the_smallest_that_reaches_the_share() -> None:
    sigma = torch.tensor([3.0, 2.0, 1.0])  # energies 9, 4, 1 of 14
    assert linalg.energy_rank(sigma, 9 / 14) == 1
    assert linalg.energy_rank(sigma, 0.9) == 2
    assert linalg.energy_rank(sigma, 1.0) == 3
    assert linalg.energy_rank(torch.zeros(3), 0.5) == 0


@given(SHAPES)
def test_break_even_rank_is_the_last_that_saves_parameters(shape: tuple[int, int]) -> None:
    m, n = shape
    rank = linalg.break_even_rank(m, n)
    assert rank * (m + n) < m * n <= (rank + 1) * (m + n)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 100))
def test_truncated_svd_reaches_the_eckart_young_bound(shape: tuple[int, int], seed: int) -> None:
    W = random_matrix(*shape, seed)
    sigma = linalg.singular_values(W)
    for rank in range(1, min(shape) + 1):
        L, R = linalg.truncated_svd(W, rank)
        assert L.shape == (shape[0], rank)
        assert R.shape == (rank, shape[1])
        error = torch.linalg.norm(W - L @ R)
        assert float(error) == pytest.approx(float(sigma[rank:].norm()), abs=1e-9)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 100))
def test_whitened_svd_at_full_rank_is_the_matrix(shape: tuple[int, int], seed: int) -> None:
    W = random_matrix(*shape, seed)
    X = random_matrix(max(1, shape[1] // 2), shape[1], seed + 1)  # fewer rows: C is singular
    L, R = linalg.whitened_svd(W, X.T @ X, min(shape))
    torch.testing.assert_close(L @ R, W, rtol=1e-8, atol=1e-8)


def test_whitened_svd_loses_less_output_than_plain_svd_and_no_rank_does_better() -> None:
    W = random_matrix(10, 8, 0)
    X = random_matrix(200, 8, 1) * torch.logspace(0, -2, 8, dtype=torch.float64)
    C = X.T @ X / len(X)

    def output_error(factors: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(torch.linalg.norm((W - factors[0] @ factors[1]) @ X.T) / len(X) ** 0.5)

    whitened = output_error(linalg.whitened_svd(W, C, 3, damping=1e-12))
    assert whitened < 0.8 * output_error(linalg.truncated_svd(W, 3))
    bound = linalg.singular_values(W @ linalg.symmetric_roots(C, 1e-12)[0])[3:].norm()
    assert whitened == pytest.approx(float(bound), rel=1e-4)


def test_roots_of_degenerate_moments_are_finite_and_inverse_to_each_other() -> None:
    for C in (torch.zeros(5, 5), torch.ones(5, 5), torch.diag(torch.tensor([1.0, 0, 0, 0, 0]))):
        root, inverse = linalg.symmetric_roots(C)
        torch.testing.assert_close(root @ inverse, torch.eye(5, dtype=torch.float64))


def test_power_law_matches_the_paper_and_rounds_like_its_code() -> None:
    # d_i = ceil(d_0 (1 + i)^alpha), paper sec. 5 with (3, 0.27)
    assert linalg.power_law_ranks(range(6), 3, 0.27) == [3, 4, 5, 5, 5, 5]
    assert linalg.power_law_ranks(range(6), 3, 0.27, powers_of_two=True) == [2, 4, 4, 4, 4, 4]
    assert linalg.power_law_ranks(range(3), 64, 0.0) == [64, 64, 64]


@given(st.floats(1, 40), st.floats(0, 1.5))
def test_fit_recovers_an_exact_power_law(d_0: float, alpha: float) -> None:
    depths = list(range(8))
    ranks = [d_0 * (1 + i) ** alpha for i in depths]
    fitted = linalg.fit_power_law(depths, ranks)
    assert fitted == pytest.approx((d_0, alpha), rel=1e-6, abs=1e-6)


def test_fit_of_one_depth_is_flat() -> None:
    assert linalg.fit_power_law([3], [5.0]) == pytest.approx((5.0, 0.0))


def test_angles_are_between_lines() -> None:
    U = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    theta = linalg.angle_matrix(U)
    assert float(theta[0, 1]) == pytest.approx(0.0, abs=1e-7)
    assert float(theta[0, 2]) == pytest.approx(math.pi / 4)
    assert float(theta[0, 3]) == pytest.approx(math.pi / 2)
