"""The bounds of Theorems 1 to 5 hold; where the printed statement does not, that is shown too."""

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
from tscompress.lab.attention import (
    Attention,
    attention_probabilities,
    multihead_attention,
    product_norm,
    random_attention,
    spectral_norm,
)
from tscompress.lab.bounds import (
    analytic_embedding_bound,
    corollary_bound,
    corollary_index,
    flow_bound,
    flow_lower_bound,
    least_depth,
    patch_rank_bound,
    reduced_attention_bound,
    relative_flow_bound,
    smooth_embedding_bound,
    swish_ellipse,
)
from tscompress.lab.constructions import (
    leading_projector,
    projected_attention,
    repeated_column,
    uniform_heads,
)
from tscompress.lab.embeddings import residual_patches, swish_embedding
from tscompress.lab.spectra import exponential_spectrum, gaussian, matrix_with_spectrum
from tscompress.linalg import singular_values

SEEDS = st.integers(0, 2**31)


def uniform(*shape: int, seed: int) -> Tensor:
    """In [-1, 1]."""
    return 2 * torch.rand(*shape, generator=seeded(seed), dtype=torch.float64) - 1


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4]), SEEDS)
def test_attention_is_the_sum_that_the_paper_writes(heads: int, seed: int) -> None:
    d, L = 8, 5
    weights = random_attention(d, heads, seeded(seed))
    U = gaussian(d, L, generator=seeded(seed + 1))
    found = multihead_attention(U, weights)
    for i, (W_Q, W_K, W_V) in enumerate(weights.split()):
        for column in range(L):
            scores = [
                float((W_Q @ U[:, t]) @ (W_K @ U[:, column])) / math.sqrt(d // heads)
                for t in range(L)
            ]
            shares = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
            expected = sum(shares[t] * (W_V @ U[:, t]) for t in range(L))
            rows = slice(i * d // heads, (i + 1) * d // heads)
            torch.testing.assert_close(found[rows, column], expected)
    assert torch.equal(weights(U), found)


def test_columns_of_attention_sum_to_1() -> None:
    W = gaussian(3, 6, generator=seeded())
    shares = attention_probabilities(gaussian(6, 9, generator=seeded(1)), W, W)
    torch.testing.assert_close(shares.sum(0), torch.ones(9).double())


@given(st.sampled_from([1, 2, 4]), SEEDS)
def test_random_attention_has_the_norms_of_a_theorem(heads: int, seed: int) -> None:
    weights = random_attention(8, heads, seeded(seed), score_norm=3.0, value_norm=0.5)
    for W_Q, W_K, W_V in weights.split():
        assert spectral_norm(W_Q.T @ W_K) == pytest.approx(3.0)
        assert product_norm(W_Q, W_K) == pytest.approx(3.0)
        assert spectral_norm(W_V) == pytest.approx(0.5)


# --------------------------------------------------------------------------------------------------
# Theorem 1, Corollary 2
# --------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 3]), SEEDS)
@settings(max_examples=20, deadline=None)
def test_smooth_embeddings_are_below_their_bound(nu: int, seed: int) -> None:
    d, L = 24, 60
    x, centres = uniform(L, seed=seed), uniform(d, seed=seed + 1)
    sigma = singular_values((x - centres[:, None]).abs() ** nu)
    # |x - t|^nu has nu! 2 sign(x - t) / 2 as its last derivative, which jumps by 2 nu!.
    variation = 2.0 * math.factorial(nu)
    for j in range(nu + 2, d):
        bound = smooth_embedding_bound(j, d, L, nu=nu, variation=variation)
        assert float(sigma[j]) <= bound * (1 + 1e-12)


@given(st.floats(0.3, 50), SEEDS)
@settings(max_examples=20, deadline=None)
def test_time_moe_embeddings_are_below_their_bound(beta: float, seed: int) -> None:
    d, L = 24, 60
    w, v = uniform(d, seed=seed), uniform(d, seed=seed + 1)
    sigma = singular_values(swish_embedding(uniform(L, seed=seed + 2), w, v, beta))
    rho, maximum = swish_ellipse(beta)
    for j in range(d):
        bound = analytic_embedding_bound(j, d, L, rho=rho, maximum=maximum)
        assert float(sigma[j]) <= bound + 1e-13


def test_the_printed_corollary_2_has_rank_1_and_large_w_break_its_rate() -> None:
    d, L, beta = 64, 256, 0.25
    x, v = uniform(L, seed=0), uniform(d, seed=1)
    printed = v[:, None] * x**2 / (1 + torch.exp(-beta * x))
    assert float(singular_values(printed)[1]) < 1e-12
    w = torch.logspace(0, 3, d, dtype=torch.float64)
    w[::2] *= -1
    sigma = singular_values(swish_embedding(x, w, 1 / w, beta))  # |w_i v_i| = 1
    rho, maximum = swish_ellipse(beta)
    above = sigma > 1e-13 * sigma[0]  # not rounding
    bounds = [analytic_embedding_bound(j, d, L, rho=rho, maximum=maximum) for j in range(d)]
    assert float((sigma / torch.tensor(bounds))[above].max()) > 1e6


@given(st.floats(0.5, 8), SEEDS)
@settings(max_examples=10, deadline=None)
def test_quasimatrices_are_below_their_bound(beta: float, seed: int) -> None:
    """Their singular values are those of a matrix of quadrature points with roots of weights."""
    d = 16
    jacobi = torch.arange(1, 64, dtype=torch.float64)
    off = jacobi / torch.sqrt(4 * jacobi**2 - 1)
    points, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    weights = 2 * vectors[0] ** 2  # Gauss and Legendre, by Golub and Welsch
    w, v = uniform(d, seed=seed), uniform(d, seed=seed + 1)
    s = singular_values(swish_embedding(points, w, v, beta) * weights.sqrt())
    rho, maximum = swish_ellipse(beta)
    for j in range(d):
        bound = analytic_embedding_bound(j, d, None, rho=rho, maximum=maximum)
        assert float(s[j]) <= bound + 1e-13


# --------------------------------------------------------------------------------------------------
# Theorem 2
# --------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.floats(0.05, 1.5), SEEDS)
@settings(max_examples=30, deadline=None)
def test_embedded_patches_are_below_their_bound(k: int, epsilon: float, seed: int) -> None:
    d, hidden, L = 24, 40, 50
    X = gaussian(k, L, generator=seeded(seed))
    W_1, W_2, W_3 = (
        gaussian(*shape, generator=seeded(seed + n))
        for n, shape in enumerate([(hidden, k), (d, hidden), (d, k)], 1)
    )
    scale = spectral_norm(W_2) * spectral_norm(W_1 @ X)
    for activation in (None, torch.nn.SiLU(), torch.nn.Tanh()):
        sigma = singular_values(residual_patches(X, W_1, W_2, W_3, activation))
        assert int((sigma > epsilon * scale).sum()) <= patch_rank_bound(k, epsilon)


@given(st.integers(1, 4), st.floats(0.05, 1.5), SEEDS)
@settings(max_examples=30, deadline=None)
def test_biases_are_one_input_more(k: int, epsilon: float, seed: int) -> None:
    d, hidden, L = 24, 40, 50
    generator = seeded(seed)
    X = gaussian(k, L, generator=generator)
    W_1, W_2, W_3, b_1, b_2, b_3 = (
        gaussian(*shape, generator=generator)
        for shape in [(hidden, k), (d, hidden), (d, k), (hidden, 1), (d, 1), (d, 1)]
    )
    embedded = W_3 @ X + b_3 + W_2 @ torch.relu(W_1 @ X + b_1) + b_2
    scale = spectral_norm(W_2) * spectral_norm(W_1 @ X + b_1)
    count = int((singular_values(embedded) > epsilon * scale).sum())
    assert count <= patch_rank_bound(k, epsilon, biases=True)


# --------------------------------------------------------------------------------------------------
# Theorems 3.1 and 5
# --------------------------------------------------------------------------------------------------


def reduction_error(Xi: Tensor, U: Tensor, weights: Attention, rank: int) -> float:
    reduced = projected_attention(weights, leading_projector(Xi, rank))
    return float(torch.linalg.matrix_norm(weights(U) - reduced(U)))


@given(spectra(8), st.sampled_from([1, 2, 4]), st.integers(1, 7), st.integers(1, 4), SEEDS)
@settings(max_examples=40, deadline=None)
def test_reduced_attention_is_below_its_bound(
    sigma: Tensor, heads: int, rank: int, multiplicity: int, seed: int
) -> None:
    Xi = matrix_with_spectrum(sigma, 8, 12, seeded(seed))
    norm = math.sqrt(8 // heads)
    weights = random_attention(8, heads, seeded(seed + 1), score_norm=norm, value_norm=norm)
    error = reduction_error(Xi, Xi.repeat(1, multiplicity), weights, rank)
    bound = reduced_attention_bound(float(sigma[rank]), 8, multiplicity=multiplicity)
    assert error <= bound
    # The reduced weights are as small as the weights, and of the rank that was asked for.
    reduced = projected_attention(weights, leading_projector(Xi, rank))
    assert torch.linalg.matrix_rank(reduced.W_V) <= rank
    for (W_Q, W_K, W_V), (R_Q, R_K, R_V) in zip(weights.split(), reduced.split(), strict=True):
        assert product_norm(R_Q, R_K) <= product_norm(W_Q, W_K) * (1 + 1e-9)
        assert spectral_norm(R_V) <= spectral_norm(W_V) * (1 + 1e-9)


@pytest.mark.parametrize("L", [1, 16, 256])
@pytest.mark.parametrize(("d", "sigma"), [(2, 0.5), (6, 1e-3)])
def test_a_repeated_column_has_an_error_of_the_root_of_its_number(
    d: int, sigma: float, L: int
) -> None:
    """So Theorem 3.1 as printed, without the multiplicity, is false for every constant."""
    Xi, (U, weights) = repeated_column(sigma, d, L)
    assert reduction_error(Xi, U, weights, 1) == pytest.approx(math.sqrt(d * L) * sigma, rel=1e-12)
    assert spectral_norm(weights.W_V) == pytest.approx(math.sqrt(d))
    assert math.sqrt(d * L) * sigma <= reduced_attention_bound(sigma, d, multiplicity=L)


@given(st.floats(0.01, 1), st.sampled_from([2, 5]), SEEDS)
def test_no_reduction_of_rank_1_serves_both_columns(sigma: float, d: int, seed: int) -> None:
    L = 9
    Xi, (_, weights) = repeated_column(sigma, d, L)
    left, right = (gaussian(d, 1, generator=seeded(seed + n)) for n in (0, 1))
    reduced = weights._replace(W_V=left @ right.T)
    worst = max(
        float(torch.linalg.matrix_norm(weights(U) - reduced(U)))
        for U in (column.repeat(1, L) for column in Xi.split(1, dim=1))
    )
    assert worst >= math.sqrt(d * L / 2) * sigma * (1 - 1e-9)


def test_an_input_that_is_repeated_m_times_has_a_root_m_times_the_error() -> None:
    Xi = matrix_with_spectrum(exponential_spectrum(8, 0.5), 8, 16, seeded())
    weights = random_attention(8, 2, seeded(1), score_norm=2.0, value_norm=2.0)
    once, *more = (reduction_error(Xi, Xi.repeat(1, m), weights, 3) for m in (1, 4, 16))
    assert more == pytest.approx([2 * once, 4 * once], rel=1e-9)


# --------------------------------------------------------------------------------------------------
# Theorem 4, Corollary 1
# --------------------------------------------------------------------------------------------------


def flowed(U: Tensor, weights: Attention, depth: int) -> Tensor:
    return singular_values(U + weights(U) / math.sqrt(depth))


@given(spectra(8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 10_000]), SEEDS)
@settings(max_examples=40, deadline=None)
def test_the_flow_of_ranks_is_below_its_bound(
    sigma: Tensor, heads: int, depth: int, seed: int
) -> None:
    U = matrix_with_spectrum(sigma, 8, 12, seeded(seed))
    norm = math.sqrt(8 // heads)
    weights = random_attention(8, heads, seeded(seed + 1), score_norm=norm, value_norm=1.0)
    found = flowed(U, weights, depth)
    assert bool((found <= flow_bound(sigma, heads, depth) + 1e-12).all())
    if depth >= least_depth(heads):
        relative = relative_flow_bound(sigma, heads, depth)
        assert bool((found / found[0] <= relative + 1e-12).all())
    if depth == 1:
        assert bool((found <= corollary_bound(sigma, heads) + 1e-12).all())


@given(spectra(8), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 7, 4000]))
def test_the_flow_bound_is_the_minimum_that_is_printed(
    sigma: Tensor, heads: int, depth: int
) -> None:
    found = flow_bound(sigma, heads, depth)
    for k in range(1, 9):
        expected = min(
            float(sigma[k - j])
            + math.e**2 * heads / math.sqrt(depth) * float(sigma[(j - 1) // heads])
            for j in range(1, k + 1)
        )
        assert float(found[k - 1]) == pytest.approx(expected)


@given(spectra(12), st.sampled_from([1, 2, 3, 4, 6]))
def test_the_corollary_follows_from_the_theorem(sigma: Tensor, heads: int) -> None:
    corollary = corollary_bound(sigma, heads)
    assert bool((flow_bound(sigma, heads, 1) <= corollary * (1 + 1e-12)).all())


def test_the_premise_of_theorem_4_needs_hundreds_of_layers() -> None:
    assert [least_depth(heads) for heads in (1, 4, 8, 12)] == [219, 3495, 13978, 31449]


@pytest.mark.parametrize("heads", [1, 2])
def test_the_printed_index_of_corollary_1_fails_within_its_premises(heads: int) -> None:
    """sigma_h(Z) stays while the bound, a constant times sigma_2, goes to 0."""
    assert corollary_index(heads, heads, printed=True) == 2
    kept = []
    for small in (1e-2, 1e-4, 1e-8):
        U, weights = uniform_heads(small, heads)
        for W_Q, W_K, W_V in weights.split():
            assert product_norm(W_Q, W_K) <= math.sqrt(2)
            assert spectral_norm(W_V) <= 1 + 1e-12
        sigma = singular_values(U)
        assert sigma.tolist() == pytest.approx([1.0, *[small] * (2 * heads - 1)])
        found = flowed(U, weights, 1)
        assert bool((found <= corollary_bound(sigma, heads) + 1e-12).all())
        kept.append(float(found[heads - 1]))
    assert min(kept) > 0.4
    printed = corollary_bound([1.0, *[1e-8] * (2 * heads - 1)], heads, printed=True)
    assert kept[-1] > 1e6 * float(printed[heads - 1])


@given(spectra(8), st.sampled_from([1, 2, 4]), st.integers(1, 9))
def test_the_lower_bound_is_the_maximum_that_is_printed(
    sigma: Tensor, heads: int, depth: int
) -> None:
    size = 8 // heads
    for k, found in enumerate(flow_lower_bound(sigma, heads, depth).tolist(), 1):
        positions = [(i, -(-k // i)) for i in range(1, heads + 1) if -(-k // i) < size]
        values = [
            float(sigma[(i - 1) * size + p - 1] + sigma[p - 1] / math.sqrt(depth)) / 4
            for i, p in positions
        ]
        assert math.isnan(found) if not values else found == pytest.approx(max(values))
        assert math.isnan(found) == (k > heads * (size - 1))  # d - h, not d - d_h


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda: smooth_embedding_bound(2, 10, 10, nu=1, variation=2.0),
        lambda: smooth_embedding_bound(10, 10, 10, nu=1, variation=2.0),
        lambda: smooth_embedding_bound(4, 10, 10, nu=0, variation=2.0),
        lambda: analytic_embedding_bound(1, 10, 10, rho=1.0, maximum=1.0),
        lambda: analytic_embedding_bound(10, 10, 10, rho=2.0, maximum=1.0),
        lambda: swish_ellipse(0.0),
        lambda: patch_rank_bound(0, 0.1),
        lambda: patch_rank_bound(3, 0.0),
        lambda: reduced_attention_bound(0.1, 4, multiplicity=0),
        lambda: flow_bound([2.0, 1.0], 1, 1),
        lambda: flow_bound([1.0, 0.0], 1, 1),
        lambda: flow_bound([1.0, 0.5], 0, 1),
        lambda: relative_flow_bound([1.0, 0.5], 1, 218),
        lambda: relative_flow_bound([0.9, 0.5], 1, 219),
        lambda: flow_lower_bound([1.0, 0.5, 0.2], 2, 1),
        lambda: corollary_index(0, 1),
        lambda: leading_projector(torch.eye(3), 4),
        lambda: leading_projector(torch.eye(3), 0),
        lambda: random_attention(8, 3, seeded()),
        lambda: multihead_attention(torch.ones(3, 2), random_attention(4, 1, seeded())),
    ],
)
def test_cases_outside_a_theorem_are_refused_in_one_line(use: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as error:
        use()
    assert "\n" not in str(error.value)
