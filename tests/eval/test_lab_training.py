"""Scripts of eval/lab/ that train: their models, numbers and verdicts, with two steps each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from eval_scripts import imported

NAMES = ("verdicts", "micro", "chebyshev", "heads", "watch", "cut_advice")


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
