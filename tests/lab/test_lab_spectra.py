"""Matrices of given spectra, inequalities of singular values, sketches, Chebyshev tables."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from drawn_spectra import seeded, spectra
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.lab.embeddings import chebyshev_polynomials, chebyshev_table
from tscompress.lab.sketches import row_space, sketch_distance, sparse_sketch
from tscompress.lab.spectra import (
    checked_spectrum,
    exponential_spectrum,
    gaussian,
    head_size,
    matrix_with_spectrum,
    orthonormal_columns,
)
from tscompress.linalg import epsilon_rank, singular_values

SEEDS = st.integers(0, 2**31)


# --------------------------------------------------------------------------------------------------
# Spectra
# --------------------------------------------------------------------------------------------------


@given(spectra(6), st.integers(6, 9), st.integers(6, 12), SEEDS)
def test_a_matrix_has_its_spectrum_and_zeros_beyond(
    sigma: Tensor, d: int, N: int, seed: int
) -> None:
    X = matrix_with_spectrum(sigma, d, N, seeded(seed))
    assert X.shape == (d, N)
    found = singular_values(X)
    torch.testing.assert_close(found[:6], sigma, rtol=1e-9, atol=1e-12)
    assert bool((found[6:] < 1e-12).all())


def test_matrices_follow_the_seed() -> None:
    sigma = exponential_spectrum(4, 0.5)
    one, same, other = (matrix_with_spectrum(sigma, 4, 6, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_an_exponential_spectrum_starts_at_1_and_falls_by_its_rate() -> None:
    sigma = exponential_spectrum(5, 0.3)
    assert float(sigma[0]) == 1
    torch.testing.assert_close(sigma[1:] / sigma[:-1], torch.full((4,), math.exp(-0.3)).double())


@pytest.mark.parametrize(
    ("sigma", "says"),
    [
        ([1.0, 0.0], "value 0;"),
        ([1.0, -2.0], "value -2;"),
        ([1.0, float("nan")], "value nan;"),
        ([float("inf"), 1.0], "value inf;"),
        ([1.0, 0.5, 0.7], "after index 1"),
        ([], "shape"),
        ([[1.0]], "shape"),
    ],
)
def test_no_spectrum(sigma: list[float], says: str) -> None:
    for use in (checked_spectrum, lambda s: matrix_with_spectrum(s, 5, 5, seeded())):
        with pytest.raises(UsageError) as error:
            use(sigma)
        assert says in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda: checked_spectrum([2.0, 1.0], largest=1.0),
        lambda: matrix_with_spectrum([1.0, 0.5, 0.2], 2, 5, seeded()),
        lambda: orthonormal_columns(2, 3, seeded()),
        lambda: head_size(10, 4),
        lambda: head_size(10, 0),
        lambda: exponential_spectrum(0, 0.1),
        lambda: sparse_sketch(10, 3, 2, seeded()),
        lambda: sparse_sketch(10, 2, 0, seeded()),
        lambda: sketch_distance(torch.ones(2, 3), torch.ones(4, 4)),
        lambda: chebyshev_polynomials(torch.tensor([1.5]), 2),
        lambda: chebyshev_polynomials(torch.tensor([float("nan")]), 2),
        lambda: chebyshev_polynomials(torch.tensor([0.5]), 0),
        lambda: chebyshev_table(torch.tensor([0.5]), 5, 4, seeded()),
        lambda: chebyshev_table(torch.tensor([16.0]), 2, 4, seeded()),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(use: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as error:
        use()
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# Inequalities that the proofs lean on
# --------------------------------------------------------------------------------------------------


@given(spectra(5), spectra(5), SEEDS, st.integers(0, 4), st.integers(0, 4))
def test_singular_values_of_a_sum_are_below_sums(
    a: Tensor, b: Tensor, seed: int, i: int, j: int
) -> None:
    """sigma_{i+j-1}(A + B) <= sigma_i(A) + sigma_j(B)."""
    A, B = (matrix_with_spectrum(s, 5, 7, seeded(seed + n)) for n, s in enumerate((a, b)))
    if i + j < 5:
        assert float(singular_values(A + B)[i + j]) <= float(a[i] + b[j]) + 1e-12


@given(spectra(4), spectra(4), SEEDS)
def test_a_submatrix_has_no_larger_singular_values(a: Tensor, b: Tensor, seed: int) -> None:
    A, B = (matrix_with_spectrum(s, 4, 6, seeded(seed + n)) for n, s in enumerate((a, b)))
    both = singular_values(torch.cat([A, B]))[:4]
    assert bool((both >= a - 1e-12).all())
    assert bool((singular_values(A[:, :5]) <= a + 1e-12).all())


@given(st.lists(spectra(3), min_size=2, max_size=4), SEEDS)
def test_stacked_heads_are_below_the_sum_of_their_values(parts: list[Tensor], seed: int) -> None:
    """sigma_j of h stacked heads is at most the sum of their sigma_{floor((j - 1) / h) + 1}."""
    heads = [matrix_with_spectrum(s, 3, 8, seeded(seed + n)) for n, s in enumerate(parts)]
    found = singular_values(torch.cat(heads))
    for j in range(len(found)):
        index = j // len(heads)
        assert float(found[j]) <= sum(float(s[index]) for s in parts) + 1e-12


# --------------------------------------------------------------------------------------------------
# Sketches
# --------------------------------------------------------------------------------------------------


@given(st.sampled_from([(12, 1), (12, 3), (12, 4), (12, 12)]), st.integers(1, 3), SEEDS)
def test_rows_of_a_sparse_sketch_have_d_over_h_entries(
    shape: tuple[int, int], rank: int, seed: int
) -> None:
    d, heads = shape
    W = sparse_sketch(d, heads, rank, seeded(seed))
    assert W.shape == (heads * rank, d)
    assert (W != 0).sum(1).tolist() == [d // heads] * (heads * rank)
    assert int((W != 0).sum()) == d * rank


@settings(deadline=None)
@given(spectra(8), st.integers(1, 12), SEEDS)
def test_a_sketch_is_no_better_than_its_rank_and_exact_from_d_rows_on(
    sigma: Tensor, rows: int, seed: int
) -> None:
    X = matrix_with_spectrum(sigma, 8, 10, seeded(seed))
    distance = sketch_distance(gaussian(rows, 8, generator=seeded(seed + 1)), X)
    if rows < 8:
        assert float(sigma[rows]) - 1e-9 <= distance <= 1 + 1e-9
    else:
        assert distance < 1e-8


def test_the_leading_directions_are_the_best_sketch() -> None:
    sigma = exponential_spectrum(8, 0.4)
    X = matrix_with_spectrum(sigma, 8, 12, seeded())
    U = torch.linalg.svd(X, full_matrices=False).U
    assert sketch_distance(U[:, :3].T, X) == pytest.approx(float(sigma[3]))


def test_the_distance_needs_no_right_vectors() -> None:
    sigma = exponential_spectrum(8, 0.4)
    X = matrix_with_spectrum(sigma, 8, 12, seeded())
    U, s, _ = torch.linalg.svd(X, full_matrices=False)
    W = sparse_sketch(8, 4, 1, seeded(3))
    assert sketch_distance(W, X) == pytest.approx(sketch_distance(W, U * s))


def test_rows_that_depend_on_one_another_count_once() -> None:
    W = torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 0, 3.0]], dtype=torch.float64)
    assert row_space(W).shape == (3, 2)
    assert sketch_distance(W, torch.diag(torch.tensor([1.0, 0.5, 0.2]).double())) == 0.5


# --------------------------------------------------------------------------------------------------
# Chebyshev tables
# --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(1, 40))
def test_chebyshev_polynomials_are_cosines(x: list[float], degree: int) -> None:
    points = torch.tensor(x, dtype=torch.float64)
    angles = torch.arccos(points)[:, None] * torch.arange(1, degree + 1)
    found = chebyshev_polynomials(points, degree)
    torch.testing.assert_close(found, torch.cos(angles), rtol=0, atol=1e-6)


@given(st.integers(1, 32), SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_chebyshev_table_has_the_rank_it_was_asked_for(rank: int, seed: int) -> None:
    values = torch.linspace(-15, 15, 200)
    table = chebyshev_table(values, rank, 40, seeded(seed))
    assert table.shape == (200, 40)
    assert table.dtype == torch.float64
    assert epsilon_rank(singular_values(table), 1e-10) == rank


def test_rows_of_a_chebyshev_table_have_the_norms_of_the_polynomials() -> None:
    values = torch.tensor([-15.0, 0.0, 15.0])
    table = chebyshev_table(values, 4, 8, seeded())
    # T_1 … T_4 are -1, 1, -1, 1 at -1, 0, -1, 0, 1 at 0, and 1 at 1.
    torch.testing.assert_close(table.norm(dim=1), torch.tensor([2.0, math.sqrt(2), 2.0]).double())
