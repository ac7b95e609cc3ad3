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


# --------------------------------------------------------------------------------------------------
# Folding
# --------------------------------------------------------------------------------------------------


def random_moment(n: int, seed: int, rank: int | None = None) -> torch.Tensor:
    """A second moment of ``rank`` directions, by default all."""
    X = random_matrix(n if rank is None else rank, n, seed)
    return X.T @ X / len(X)


def unweighted(n: int) -> linalg.Roots:
    return linalg.Roots(*torch.eye(n, dtype=torch.float64).expand(2, n, n))


def random_roots(n: int, seed: int, rank: int | None) -> linalg.Roots:
    """Of a moment of that rank; None: of inputs about which nothing is known."""
    if rank is None:
        return unweighted(n)
    return linalg.Roots.of(random_moment(n, seed, rank))


HEADS = st.tuples(st.integers(1, 6), st.integers(6, 10), st.integers(0, 1000))  # k, d, seed


@settings(deadline=None)
@given(HEADS, st.sampled_from([None, 1, 3, 20]))
def test_fold_bilinear_at_full_rank_reproduces_the_scores(
    head: tuple[int, int, int], moment_rank: int | None
) -> None:
    k, d, seed = head
    W_Q, W_K = random_matrix(k, d, seed), random_matrix(k, d, seed + 1)
    C_x, C_y = (random_roots(d, seed + i, moment_rank) for i in (2, 3))
    queries, keys, sigma = linalg.fold_bilinear(W_Q, W_K, C_x, C_y, k)
    assert queries.shape == keys.shape == (k, d)
    assert len(sigma) == k
    torch.testing.assert_close(queries.T @ keys, W_Q.T @ W_K, rtol=1e-7, atol=1e-7)


@settings(deadline=None)
@given(HEADS, st.booleans())
def test_fold_bilinear_truncates_best_in_the_whitened_norm(
    head: tuple[int, int, int], weigh: bool
) -> None:
    k, d, seed = head
    W_Q, W_K = random_matrix(k, d, seed), random_matrix(k, d, seed + 1)
    C_x, C_y = (random_roots(d, seed + i, d if weigh else None) for i in (2, 3))
    M = W_Q.T @ W_K
    expected = linalg.singular_values(C_x.root @ M @ C_y.root)
    for rank in range(1, k + 1):
        queries, keys, sigma = linalg.fold_bilinear(W_Q, W_K, C_x, C_y, rank)
        assert queries.shape == keys.shape == (rank, d)
        torch.testing.assert_close(sigma, expected[:k], rtol=1e-8, atol=1e-8)
        error = torch.linalg.norm(C_x.root @ (M - queries.T @ keys) @ C_y.root)
        assert float(error) == pytest.approx(float(expected[rank:].norm()), abs=1e-6)


def test_fold_bilinear_is_weighted_by_moments() -> None:
    """A direction that is never seen is dropped, however large its weights."""
    W_Q = W_K = torch.diag(torch.tensor([100.0, 1.0], dtype=torch.float64))
    C = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    seen, unknown = linalg.Roots.of(C), unweighted(2)
    queries, keys, _ = linalg.fold_bilinear(W_Q, W_K, seen, seen, 1)
    assert float((queries.T @ keys)[1, 1]) == pytest.approx(1.0)
    queries, keys, _ = linalg.fold_bilinear(W_Q, W_K, unknown, unknown, 1)
    assert float((queries.T @ keys)[1, 1]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-300])
def test_zero_moments_give_finite_heads(scale: float) -> None:
    W_Q, W_K = random_matrix(4, 6, 0), random_matrix(4, 6, 1)
    none, some = linalg.Roots.of(scale * random_moment(6, 2, 1)), random_roots(6, 3, 6)
    for moments in ((none, none), (some, none), (none, some)):
        for factor in linalg.fold_bilinear(W_Q, W_K, *moments, 2):
            assert torch.isfinite(factor).all()
        for factor in linalg.fold_rotary(W_Q, W_K, *moments, [{0: 1.0, 1: 0.5}]):
            assert torch.isfinite(factor).all()


def pairs(W: torch.Tensor) -> torch.Tensor:
    """Rotary pairs as complex rows, ``[k/2, d]``."""
    return torch.complex(*W.chunk(2))


def turning_scores(
    W_Q: torch.Tensor, W_K: torch.Tensor, frequencies: torch.Tensor, distance: float
) -> torch.Tensor:
    """The bilinear form of rotary scores at a distance, ``[d, d]``."""
    turn = torch.exp(1j * frequencies.double() * distance)[:, None]
    return (pairs(W_Q).mH @ (turn * pairs(W_K))).real


ONE_BY_ONE: list[dict[int, float]] = [{0: 1.0}, {1: 1.0}, {2: 1.0}]


def test_single_rotary_pairs_are_unchanged() -> None:
    W_Q, W_K = random_matrix(6, 7, 0), random_matrix(6, 7, 1)
    C_x, C_y = random_roots(7, 2, 7), random_roots(7, 3, 2)
    queries, keys = linalg.fold_rotary(W_Q, W_K, C_x, C_y, ONE_BY_ONE)
    assert torch.equal(queries, W_Q)
    assert torch.equal(keys, W_K)
    some, _ = linalg.fold_rotary(W_Q, W_K, C_x, C_y, [ONE_BY_ONE[2], ONE_BY_ONE[0]])
    assert torch.equal(some, W_Q[[2, 0, 5, 3]])


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 6.3), st.floats(0.1, 3), st.sampled_from([1, 4, 20]))
def test_proportional_rotary_pairs_of_one_frequency_merge_exactly(
    seed: int, angle: float, size: float, moment_rank: int
) -> None:
    d = 6
    Q, K = pairs(random_matrix(4, d, seed)), pairs(random_matrix(4, d, seed + 1))
    Q[1] = size * complex(math.cos(angle), math.sin(angle)) * Q[0]
    W_Q, W_K = (torch.cat([W.real, W.imag]) for W in (Q, K))
    moments = [random_roots(d, seed + i, moment_rank) for i in (2, 3)]
    queries, keys = linalg.fold_rotary(W_Q, W_K, *moments, [{0: 1.0, 1: 1.0}])
    assert queries.shape == keys.shape == (2, d)
    both, one = torch.tensor([0.3, 0.3]), torch.tensor([0.3])
    for distance in (0.0, 1.0, -5.0, 40.0):
        torch.testing.assert_close(
            turning_scores(queries, keys, one, distance),
            turning_scores(W_Q, W_K, both, distance),
            rtol=1e-6,
            atol=1e-6,
        )


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(2, 5), st.sampled_from([2, 20]))
def test_merging_similar_rotary_pairs_beats_dropping_them(
    seed: int, count: int, moment_rank: int
) -> None:
    d = 7
    W_Q, W_K = random_matrix(2 * count, d, seed), random_matrix(2 * count, d, seed + 1)
    moments = [random_roots(d, seed + i, moment_rank) for i in (2, 3)]
    roots = [C.root.to(torch.complex128) for C in moments]

    def lost(W: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Mean square of what the scores lose, over inputs and angles: |.|^2 / 2."""
        form = pairs(W_Q).mH @ pairs(W_K) - pairs(W[0]).mH @ pairs(W[1])
        return float((roots[0] @ form @ roots[1]).abs().square().sum()) / 2

    merged = lost(linalg.fold_rotary(W_Q, W_K, *moments, [dict.fromkeys(range(count), 1.0)]))
    for pair in range(count):
        alone = lost(linalg.fold_rotary(W_Q, W_K, *moments, [{pair: 1.0}]))
        assert merged <= alone * (1 + 1e-9) + 1e-9


def output_error(
    W: torch.Tensor, C: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """E |W c - W' P c|^2."""
    P, out = factors
    lost = W - out @ torch.block_diag(*P)  # type: ignore[no-untyped-call]
    return float(torch.trace(lost @ C @ lost.T))


VALUES = st.tuples(
    st.integers(1, 4), st.integers(2, 5), st.integers(5, 9), st.integers(0, 1000)
)  # heads, size of each, outputs, seed


@settings(deadline=None)
@given(VALUES, st.sampled_from([1, 3, 40]))
def test_the_error_of_values_never_grows_with_sweeps(
    shape: tuple[int, int, int, int], moment_rank: int
) -> None:
    heads, size, d, seed = shape
    W, C = random_matrix(d, heads * size, seed), random_moment(heads * size, seed, moment_rank)
    total = float(torch.trace(W @ C @ W.T))
    for rank in range(1, size):
        plain = output_error(W, C, linalg.fold_values(W, C, heads, rank, refit=False))
        errors = [output_error(W, C, linalg.fold_values(W, C, heads, rank, n)) for n in range(5)]
        for before, after in zip([plain, *errors], errors, strict=False):
            assert after <= before * (1 + 1e-6) + 1e-8 * total


def test_heads_are_fitted_to_the_residual_of_earlier_ones() -> None:
    """Two sweeps of the definition, with what is lost computed afresh for every head."""
    W, C = random_matrix(9, 12, 0), random_moment(12, 1, 40)
    heads = [slice(4 * h, 4 * h + 4) for h in range(3)]
    P, out = linalg.fold_values(W, C, 3, 2, refit=False)
    for _ in range(2):
        block = torch.block_diag(*P)  # type: ignore[no-untyped-call]
        out = linalg.least_squares(W @ C @ block.T, block @ C @ block.T, out)
        for h, head in enumerate(heads):
            own = out[:, 2 * h : 2 * h + 2]
            lost = W - out @ torch.block_diag(*P)  # type: ignore[no-untyped-call]
            lost[:, head] += own @ P[h]
            P[h] = torch.linalg.pinv(own) @ lost @ C[:, head] @ torch.linalg.inv(C[head, head])
    found, _ = linalg.fold_values(W, C, 3, 2, 2)
    torch.testing.assert_close(found, P, rtol=1e-6, atol=1e-8)


@settings(deadline=None)
@given(VALUES, st.integers(0, 2), st.booleans())
def test_full_rank_values_are_exact(
    shape: tuple[int, int, int, int], sweeps: int, refit: bool
) -> None:
    heads, size, d, seed = shape
    W = random_matrix(d + size, heads * size, seed)  # no head is of lower rank than its size
    C = random_moment(heads * size, seed + 1, 60)
    P, out = linalg.fold_values(W, C, heads, size, sweeps, refit=refit)
    assert P.shape == (heads, size, size)
    block = torch.block_diag(*P)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(out @ block, W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sweeps", [0, 3])
@pytest.mark.parametrize("moment_rank", [0, 1, 3])
def test_values_of_degenerate_moments_are_finite(moment_rank: int, sweeps: int) -> None:
    W = random_matrix(5, 12, 0)
    C = torch.zeros(12, 12) if not moment_rank else random_moment(12, 1, moment_rank)
    silent = random_moment(12, 2)
    silent[4:8] = silent[:, 4:8] = 0  # one head that says nothing
    for moment in (C, silent):
        for factor in linalg.fold_values(W, moment, 3, 2, sweeps):
            assert torch.isfinite(factor).all()


def test_redundant_heads_are_fitted_together() -> None:
    """Three heads all say the same four things; one number of each can say more than three SVDs."""
    shared = random_matrix(200, 4, 0) * torch.tensor([1.0, 0.8, 0.6, 0.4])
    c = torch.cat([shared @ random_matrix(4, 4, seed) for seed in (1, 2, 3)], dim=1)
    W, C = random_matrix(6, 12, 4), c.T @ c / len(c)
    alone, together = (output_error(W, C, linalg.fold_values(W, C, 3, 1, n)) for n in (0, 30))
    best = float(linalg.singular_values(W @ linalg.symmetric_roots(C, 0)[0])[3:].square().sum())
    assert best * (1 - 1e-6) <= together < 0.8 * alone


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_least_squares_is_exact_where_the_moment_is_well_conditioned(
    m: int, n: int, seed: int
) -> None:
    right, wrong = random_matrix(m, n, seed), random_matrix(m, n, seed + 1)
    C = random_moment(n, seed + 2) + torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(
        linalg.least_squares(right @ C, C, wrong, damping=1e-13), right, rtol=1e-9, atol=1e-9
    )
    # However strong the damping, what fits already is not touched.
    assert torch.equal(linalg.least_squares(right @ C, C, right, damping=10.0), right)


def test_least_squares_keeps_unseen_directions() -> None:
    W, wanted = random_matrix(3, 5, 0), random_matrix(3, 5, 1)
    assert torch.equal(linalg.least_squares(torch.zeros(3, 5), torch.zeros(5, 5), W), W)
    C = torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    found = linalg.least_squares(wanted @ C, C, W, damping=1e-9)
    seen = [0, 1, 4]
    torch.testing.assert_close(found[:, seen], wanted[:, seen], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[:, 2:4], W[:, 2:4], rtol=1e-7, atol=1e-7)
    # More damping stays closer to W.
    distances = [
        float((linalg.least_squares(wanted @ C, C, W, damping=s) - W).norm())
        for s in (1e-6, 1e-2, 1.0, 100.0)
    ]
    assert distances == sorted(distances, reverse=True)


def selection_error(W: torch.Tensor, C: torch.Tensor, chosen: torch.Tensor) -> float:
    """E |W h - W' h_S|^2 with the best W'."""
    inner = torch.linalg.pinv(C[chosen][:, chosen], rtol=1e-12, hermitian=True)
    left = C - C[:, chosen] @ inner @ C[chosen]
    return float(torch.trace(W @ left @ W.T))


@pytest.mark.parametrize("seed", range(5))
def test_selected_units_beat_random_ones(seed: int) -> None:
    n = 24
    W = random_matrix(6, n, seed)
    C = random_moment(n, seed + 1, 40) * torch.logspace(0, -1, n).double().outer(
        torch.logspace(0, -1, n).double()
    )
    generator = torch.Generator().manual_seed(seed)
    for count in (1, 6, 12, 20):
        chosen = linalg.select_units(W, C, count)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert len(chosen) == count
        error = selection_error(W, C, chosen)
        for _ in range(30):
            others = torch.randperm(n, generator=generator)[:count]
            assert error <= selection_error(W, C, others) * (1 + 1e-9)


def test_the_first_unit_selected_is_the_best_alone() -> None:
    W, C = random_matrix(4, 9, 0), random_moment(9, 1)
    errors = [selection_error(W, C, torch.tensor([unit])) for unit in range(9)]
    assert linalg.select_units(W, C, 1).tolist() == [errors.index(min(errors))]


@settings(deadline=None)
@given(st.sets(st.integers(0, 11), min_size=1), st.integers(0, 1000))
def test_units_that_are_read_are_the_ones_selected(read: set[int], seed: int) -> None:
    W = torch.zeros(5, 12, dtype=torch.float64)
    W[:, sorted(read)] = random_matrix(5, len(read), seed)
    variances = 1 + random_matrix(1, 12, seed + 1)[0].square()
    assert linalg.select_units(W, variances.diag(), len(read)).tolist() == sorted(read)


def test_redundant_units_are_selected_once() -> None:
    h = random_matrix(50, 4, 0)
    h = torch.cat([h, h, torch.zeros(50, 2)], dim=1)  # 4 and their copies, and 2 silent ones
    W, C = random_matrix(3, 10, 1), h.T @ h / len(h)
    chosen = linalg.select_units(W, C, 4)
    assert sorted(unit % 4 for unit in chosen.tolist()) == [0, 1, 2, 3]
    assert int(chosen.max()) < 8
    # Asked for more than say anything, it still keeps the number.
    assert len(linalg.select_units(W, C, 7)) == 7


@pytest.mark.parametrize("moment", [torch.zeros(6, 6), torch.eye(6), torch.ones(6, 6)])
def test_selection_of_all_or_zero_units(moment: torch.Tensor) -> None:
    W = random_matrix(3, 6, 0)
    assert linalg.select_units(W, moment, 6).tolist() == list(range(6))
    assert len(set(linalg.select_units(W, moment, 2).tolist())) == 2
    assert len(set(linalg.select_units(W * 0, moment, 2).tolist())) == 2


def test_a_sketch_of_many_outputs_selects_nearly_as_well() -> None:
    W, C = random_matrix(600, 40, 0), random_moment(40, 1, 60)
    for count in (5, 20):
        exact = selection_error(W, C, linalg.select_units(W, C, count, sketch=600))
        sketched = selection_error(W, C, linalg.select_units(W, C, count))
        assert sketched <= 1.1 * exact
        again = linalg.select_units(W, C, count)
        assert torch.equal(again, linalg.select_units(W, C, count))


# --------------------------------------------------------------------------------------------------
# Schedules
# --------------------------------------------------------------------------------------------------


def test_power_law_matches_the_paper_and_rounds_like_its_code() -> None:
    # d_i = ceil(d_0 (1 + i)^alpha), paper sec. 5 with (3, 0.27)
    assert linalg.power_law_ranks(range(6), 3, 0.27) == [3, 4, 5, 5, 5, 5]
    assert linalg.power_law_ranks(range(6), 3, 0.27, powers_of_two=True) == [4] * 6
    assert linalg.power_law_ranks(range(3), 64, 0.0) == [64, 64, 64]
    for rank in range(1, 65):  # a law that is fitted to whole ranks gives them back
        law = linalg.fit_power_law(range(4), [rank] * 4)
        assert linalg.power_law_ranks(range(4), *law) == [rank] * 4


@given(st.floats(0.01, 500), st.floats(0, 3))
def test_powers_of_two_are_the_nearest_on_a_logarithmic_axis(d_0: float, alpha: float) -> None:
    depths = range(8)
    for depth, size in zip(
        depths, linalg.power_law_ranks(depths, d_0, alpha, powers_of_two=True), strict=True
    ):
        assert size >= 1
        assert size & (size - 1) == 0
        wanted = max(1.0, d_0 * (1 + depth) ** alpha)
        assert 2**-0.5 - 1e-9 <= size / wanted <= 2**0.5 + 1e-9


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


@pytest.mark.parametrize(("series", "length", "most"), [(8, 129, 17), (32, 33, 65), (32, 64, 17)])
def test_scattered_picks_reach_all_positions_of_sequences(
    series: int, length: int, most: int
) -> None:
    found = linalg.scattered_picks(series * length, most)
    assert len(found) == most
    assert bool((found.diff() > 0).all())
    assert int(found[0]) >= 0
    assert int(found[-1]) < series * length
    # Even steps would find two or three positions, and single series not at all.
    assert len(set((found % length).tolist())) > min(most, length) / 2
    per_series = torch.bincount(found // length, minlength=series)
    assert int(per_series.max() - per_series.min()) <= 2
    assert torch.equal(found, linalg.scattered_picks(series * length, most))
    other = linalg.scattered_picks(series * length, most, seed=1)
    assert not torch.equal(found, other)
    assert len(linalg.scattered_picks(9, 8).unique()) == 8
    assert torch.equal(linalg.scattered_picks(5, 5), torch.arange(5))
    assert torch.equal(linalg.scattered_picks(4, 5), torch.arange(4))
