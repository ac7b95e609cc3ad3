"""What a profile says of heads that share directions, and of matrices that look untrained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import tscompress
from tscompress.linalg import epsilon_rank, singular_values
from tscompress.profiling.heads import head_angles, sharing_findings, sharing_index
from tscompress.profiling.rank_profile import RankProfile
from tscompress.profiling.untrained import untrained_finding


def ranks_of(heads: list[torch.Tensor], epsilon: float = 0.1) -> tuple[int, list[int]]:
    whole = epsilon_rank(singular_values(torch.cat(heads)), epsilon)
    return whole, [epsilon_rank(singular_values(head), epsilon) for head in heads]


def test_sharing_index_is_one_over_the_heads_for_equal_ones_and_one_for_orthogonal_ones() -> None:
    base = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert sharing_index(*ranks_of([base] * 4)) == pytest.approx(1 / 4)
    rows, _ = torch.linalg.qr(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    assert sharing_index(*ranks_of(list(rows.T.split(4)))) == 1


def test_weak_directions_in_common_lift_the_index_above_one() -> None:
    e = torch.eye(8)
    heads = [torch.stack([e[0], 0.09 * e[2]]), torch.stack([e[1], 0.09 * e[2]])]
    whole, parts = ranks_of(heads)
    assert parts == [1, 1]
    assert whole == 3
    assert sharing_index(whole, parts) == 1.5


def test_angles_within_and_between_heads_are_means_over_pairs() -> None:
    e = torch.eye(4)
    diagonal = (e[0] + e[1]) / math.sqrt(2)
    found = head_angles(torch.stack([e[0], diagonal, e[2], e[3]]), 2, "q")
    assert found is not None
    assert found.within == pytest.approx((math.pi / 4 + math.pi / 2) / 2, abs=1e-3)
    assert found.between == pytest.approx(math.pi / 2, abs=1e-3)
    assert head_angles(e, 1, "q") is None
    assert head_angles(e, 4, "q") is None


def test_findings_follow_the_index() -> None:
    same, own, full = (
        sharing_findings([index], 4, share, 0.3, None)[0]
        for index, share in ((0.3, 0.5), (0.9, 0.5), (0.9, 0.95))
    )
    assert len({same, own, full}) == 3
    assert "(--latent)" in same
    assert "(--rank)" not in same
    assert "(--rank)" in own
    assert "--" not in full
    assert sharing_findings([0.5], 1, 0.5, 0.3, None) == []


def test_profile_has_angles_of_the_first_block_and_names_random_matrices(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    found = tscompress.profile(checkpoints["chronos-t5"], calibration=None)
    assert found.head_angles is not None
    assert found.head_angles.name.startswith("encoder.block.0.")
    assert 0 < found.head_angles.between <= math.pi / 2
    lines = found.findings()
    assert any("within a head" in line for line in lines)
    assert any("A cut of an untrained matrix" in line for line in lines)  # the weights are random
    again = RankProfile.model_validate(found.to_dict())
    assert again == found
    before = {k: v for k, v in found.to_dict().items() if k != "head_angles"}
    assert RankProfile.model_validate(before).head_angles is None


def test_a_long_list_of_untrained_matrices_is_cut_short() -> None:
    names = [f"encoder {i} q" for i in range(9)]
    assert "encoder 3 q, ..." in untrained_finding(names, 12)
    assert "encoder 4 q" not in untrained_finding(names, 12)
    assert untrained_finding(names[:1], 12).startswith("1 of 12 attention matrices has")
