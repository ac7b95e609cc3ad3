"""Scripts of eval/lab/ that train: their models, numbers and verdicts, with two steps each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from eval_scripts import imported

from tscompress.errors import UsageError

NAMES = (
    "verdicts", "micro", "chebyshev", "heads", "watch", "cut_advice",
    "training_patches", "training_table", "training_widths",
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with imported(NAMES) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.micro, "QUICK_STEPS", 2)
        yield found


def test_rank_of_w_q_is_taken_for_every_table(lab: Any, tmp_path: Path) -> None:
    found = lab.chebyshev.figure_4c(tmp_path, [0], True)
    assert set(found.numbers["table rank"]) == {2, 8, 32}
    assert found.numbers["mean rank"].between(1, 64).all()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"chebyshev-{rank}-0" for rank in (2, 8, 32)
    }
    assert len(found.verdicts) == 4


def test_heads_are_compared_by_rank_and_angle(lab: Any, tmp_path: Path) -> None:
    ranks = lab.heads.figure_16(tmp_path, [0], True)
    assert set(ranks.numbers["heads"]) == {2, 16}
    assert (ranks.numbers["head"] <= ranks.numbers["W_Q"] + 1e-9).all()
    angles = lab.heads.figure_14(tmp_path, [0], True)
    assert angles.numbers[["within", "between"]].gt(0).all(axis=None)


def test_watch_compares_both_initial_scales(lab: Any, tmp_path: Path) -> None:
    found = lab.watch.figure_13(tmp_path, True)
    first = found.numbers[found.numbers["step"] == 0].groupby("factor")["σ_1"].mean()
    assert first[1.0] == pytest.approx(20 * first[0.05], rel=0.1)
    assert [v.holds for v in found.verdicts][-1]  # two steps leave a random matrix random


def test_a_training_of_another_recipe_is_not_taken(lab: Any, tmp_path: Path) -> None:
    recipe = lab.micro.variant("watch", quick=True)
    lab.micro.trained(recipe, tmp_path)
    written = (tmp_path / "log.jsonl").stat().st_mtime_ns
    lab.micro.trained(recipe, tmp_path)
    assert (tmp_path / "log.jsonl").stat().st_mtime_ns == written
    with pytest.raises(UsageError, match="another recipe"):
        lab.micro.trained(lab.micro.variant("watch", quick=True, seed=5), tmp_path)


def test_patches_of_every_size_are_embedded_while_training(lab: Any, tmp_path: Path) -> None:
    found = lab.training_patches.figure_3a(tmp_path, True)
    assert {path.name for path in tmp_path.iterdir()} == {"patches-2", "patches-16"}
    assert lab.training_patches.recipe_of(16, False).architecture.context_length == 16 * 64
    assert set(found.numbers["step"]) == {1, 2}
    falls = found.numbers.groupby(["k", "step"])["sigma"].agg(
        lambda sigma: (sigma.diff() <= 0).sum()
    )
    assert (falls == 127).all()  # after the first of 128
    assert next(v for v in found.verdicts if v.statement.startswith("Theorem 2")).holds


def test_bins_are_counted_as_training_reads_them(lab: Any, tmp_path: Path) -> None:
    found = lab.training_table.token_table(tmp_path, True)
    small, large = (found.numbers[found.numbers["factor"] == factor] for factor in (0.05, 1.0))
    assert small["rank 0.1, all bins"].tolist() == large["rank 0.1, all bins"].tolist() == [64, 64]
    recipe = lab.micro.variant("token-table", quick=True, initializer_factor=0.05)
    bins = lab.training_table.bins_of(
        recipe, lab.micro.trained(recipe, tmp_path / "token-table-0.05")
    )
    bucket = recipe.stages[0].buckets[0]
    most = recipe.total_steps * bucket.batch_size * (bucket.context_length + bucket.horizon)
    assert most / 2 < bins.counts.sum() <= most


def test_cosine_of_rows_is_that_of_the_pairs_that_have_weight(lab: Any) -> None:
    angle = torch.linspace(0, torch.pi, 33, dtype=torch.float64)
    around = torch.cat([angle, angle[1:-1] + torch.pi])
    circle = torch.stack([around.cos(), around.sin()], dim=1)  # of mean zero
    every = torch.ones(len(circle), dtype=torch.float64)
    for distance in (1, 4):
        expected = float(torch.cos(distance * angle[1]))
        assert lab.training_table.cosine(circle, every, distance) == pytest.approx(expected)
    noise = torch.cat([circle, torch.randn(8, 2, dtype=torch.float64)])
    weights = torch.cat([every, torch.zeros(8, dtype=torch.float64)])
    same = lab.training_table.cosine(noise, weights, 1)
    assert same == pytest.approx(lab.training_table.cosine(circle, every, 1))


def test_growth_with_the_width_is_that_of_the_mean_over_seeds(lab: Any, tmp_path: Path) -> None:
    found = lab.training_widths.figure_4a(tmp_path, [0], True)
    # Two steps leave random matrices, whose rank is a share of their width.
    assert lab.training_widths.growth(found.numbers, 0.1) == pytest.approx(2, rel=0.05)
    assert (found.numbers["mean rank"] <= found.numbers["d"]).all()


def test_verdicts_are_those_of_the_numbers(lab: Any) -> None:
    rows = [
        {"table rank": rank, "seed": 0, "attention": "all", "ε": 0.1, "mean rank": mean}
        for rank, mean in ((1, 9.0), (2, 1.0), (4, 2.0), (8, 3.0))
    ]
    assert lab.chebyshev.rises(pd.DataFrame(rows), "all", 0.1).holds
    rows[-1]["mean rank"] = 0.5
    assert not lab.chebyshev.rises(pd.DataFrame(rows), "all", 0.1).holds


def test_advised_rank_is_the_first_that_the_bound_allows(lab: Any) -> None:
    relative = (1.0, 0.3, 0.06, 0.01)
    assert lab.cut_advice.advised_rank(relative, 1, 0.1) == 2
    assert lab.cut_advice.advised_rank(relative, 4, 0.1) == 3
    assert lab.cut_advice.advised_rank(relative, 10**4, 0.1) == 4
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0]])
    assert lab.cut_advice.greatest_multiplicity(rows) == 3
