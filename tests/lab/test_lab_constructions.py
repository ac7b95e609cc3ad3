"""Lower bounds of Theorems 3, 4 and 6 are reached by what their proofs construct."""

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
from tscompress.lab.attention import Attention, attention_probabilities, spectral_norm
from tscompress.lab.bounds import flow_lower_bound
from tscompress.lab.constructions import (
    copying_heads,
    interleaved_heads,
    padded_diagonal,
    repeated_column,
    self_attending,
    sketched_attention,
    sketched_heads,
    uniform_heads,
)
from tscompress.lab.spectra import exponential_spectrum, gaussian, orthonormal_columns
from tscompress.linalg import singular_values

SEEDS = st.integers(0, 2**31)


def frobenius(W: Tensor) -> float:
    return float(torch.linalg.matrix_norm(W))


# --------------------------------------------------------------------------------------------------
# Theorem 3.2
# --------------------------------------------------------------------------------------------------


def best_rank(weights: Attention, U: Tensor, rank: int) -> Attention:
    """W_V of this rank whose output is nearest, by the truncated SVD of the output."""
    left = torch.linalg.svd(weights(U), full_matrices=False).U[:, :rank]
    return weights._replace(W_V=left @ (left.T @ weights.W_V))


@given(spectra(5), st.integers(5, 40), st.integers(1, 4), SEEDS)
@settings(max_examples=40, deadline=None)
def test_no_value_matrix_of_low_rank_comes_near_self_attending_tokens(
    sigma: Tensor, L: int, rank: int, seed: int
) -> None:
    W_V = orthonormal_columns(5, 5, seeded(seed))
    U, weights = self_attending(sigma, L, W_V)
    torch.testing.assert_close(singular_values(U), sigma)
    least = float(sigma[rank]) / 4
    low = gaussian(5, rank, generator=seeded(seed + 1)) @ gaussian(
        rank, 5, generator=seeded(seed + 2)
    )
    for W in (best_rank(weights, U, rank).W_V, low):
        assert frobenius(weights(U) - weights._replace(W_V=W)(U)) >= least
    d = len(sigma)
    block = attention_probabilities(U, weights.W_Q, weights.W_K)[:d, :d]
    assert float(singular_values(block)[-1]) >= 0.25


def test_the_printed_constant_log_4d_fails_for_many_tokens() -> None:
    """It is below 1/4 for L = 100 d, where log(4 L) is above it."""
    identity = torch.eye(4, dtype=torch.float64)
    found = []
    for printed in (True, False):
        U, weights = self_attending([1.0] * 4, 400, identity, printed=printed)
        block = attention_probabilities(U, weights.W_Q, weights.W_K)[:4, :4]
        found.append(float(singular_values(block)[-1]))
        if printed:
            error = frobenius(weights(U) - best_rank(weights, U, 1)(U))
            assert error < 0.25  # sigma_2 / 4 for sigma = 1
    assert found[0] < 0.05
    assert found[1] > 0.75


# --------------------------------------------------------------------------------------------------
# Theorem 4.2
# --------------------------------------------------------------------------------------------------


@given(spectra(12), st.sampled_from([1, 2, 3, 4, 6]), st.integers(12, 30), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_copying_heads_reach_the_lower_bound(sigma: Tensor, heads: int, L: int, depth: int) -> None:
    U, weights = copying_heads(sigma, heads, L)
    torch.testing.assert_close(singular_values(U), sigma)
    assert max(spectral_norm(W_V) for _, _, W_V in weights.split()) <= 1 + 1e-12
    found = singular_values(U + weights(U) / math.sqrt(depth))
    lower = flow_lower_bound(sigma, heads, depth)
    known = ~lower.isnan()
    assert bool((found[known] / found[0] >= lower[known] * (1 - 1e-9)).all())


def test_copying_heads_write_the_leading_values_into_each_block() -> None:
    sigma = exponential_spectrum(6, 1.0)
    U, weights = copying_heads(sigma, 2, 6)
    expected = torch.diag(torch.tensor([1, math.exp(-1), 0, 1, math.exp(-1), 0]).double())
    torch.testing.assert_close(weights(U), expected)


# --------------------------------------------------------------------------------------------------
# Theorem 6
# --------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from([(8, 2, 8), (12, 3, 20), (12, 4, 16), (6, 1, 9)])


@given(SHAPES, st.data(), SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_sketch_of_each_head_reaches_what_a_shared_one_cannot(
    shape: tuple[int, int, int], data: st.DataObject, seed: int
) -> None:
    d, heads, L = shape
    sigma = data.draw(spectra(d))
    rank = data.draw(st.integers(1, d // heads - 1))
    layer = interleaved_heads(sigma, heads, L, seeded(seed))
    torch.testing.assert_close(singular_values(layer.U), sigma)
    output = layer.weights(layer.U)
    # The heads attend alike, so that the best shared values are the truncated SVD of the output.
    shared = best_rank(layer.weights, layer.U, rank)
    assert frobenius(shared.W_V) <= frobenius(layer.weights.W_V)
    assert spectral_norm(output - shared(layer.U)) >= float(sigma[rank]) / 2
    per_head = sketched_attention(layer, rank)
    error = spectral_norm(output - per_head(layer.U))
    assert error <= 4 * math.sqrt(heads) * float(sigma[heads * rank]) * (1 + 1e-9)
    for reduced, W in zip(per_head[:3], layer.weights[:3], strict=True):
        assert frobenius(reduced) <= frobenius(W) * (1 + 1e-12)


def test_factors_of_a_head_are_small_and_sparse() -> None:
    layer = interleaved_heads(exponential_spectrum(12, 0.1), 3, 15, seeded())
    for head in sketched_heads(layer, 2):
        for role, factors in zip("qkv", head, strict=True):
            assert factors.left.shape == (4, 3)
            assert factors.right.shape == (3, 12)
            entries = (factors.right != 0).sum(1)
            assert int(entries[:2].max()) <= 4
            assert role == "k" or int(entries[2]) <= 4


def test_each_head_owns_every_hth_value() -> None:
    layer = interleaved_heads(exponential_spectrum(6, 1.0), 2, 6, seeded())
    expected = torch.exp(-torch.tensor([0.0, 2, 4, 1, 3, 5]).double())
    torch.testing.assert_close(layer.tau, expected)


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda: padded_diagonal(torch.ones(3), 2),
        lambda: repeated_column(0.0, 4, 2),
        lambda: repeated_column(2.0, 4, 2),
        lambda: repeated_column(0.5, 1, 2),
        lambda: repeated_column(0.5, 4, 0),
        lambda: self_attending([1.0, 0.0], 4, torch.eye(2)),
        lambda: self_attending([1.0, 0.5], 1, torch.eye(2)),
        lambda: copying_heads([1.0, 0.5, 0.2], 2, 4),
        lambda: copying_heads([1.0, 0.5], 2, 4),
        lambda: copying_heads([1.0, 0.5], 1, 1),
        lambda: uniform_heads(0.0, 2),
        lambda: uniform_heads(0.5, 0),
        lambda: interleaved_heads([1.0, 0.5, 0.2], 2, 4, seeded()),
        lambda: interleaved_heads([1.0, 0.5], 2, 4, seeded()),
        lambda: interleaved_heads([1.0, -0.5], 1, 4, seeded()),
        lambda: sketched_heads(interleaved_heads([1.0, 0.5, 0.2, 0.1], 2, 4, seeded()), 2),
        lambda: sketched_heads(interleaved_heads([1.0, 0.5, 0.2, 0.1], 2, 4, seeded()), 0),
    ],
)
def test_cases_without_a_construction_are_refused_in_one_line(use: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as error:
        use()
    assert "\n" not in str(error.value)
