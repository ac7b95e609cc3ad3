"""eval/lab/bridge.py: rows, verdicts and figures, with a step of training and few groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from eval_scripts import imported

from tscompress.errors import UsageError
from tscompress.probing.measure import probe
from tscompress.probing.regressions import GROUP, RESPONSES

NAMES = ("verdicts", "micro", "learners", "bridge_patches", "bridge_response")


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with imported(NAMES) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.bridge_patches, "PATCHES", (4, 16))
        patch.setattr(found.bridge_patches, "QUICK_STEPS", 1)
        patch.setattr(found.bridge_patches, "FEW", 4)
        yield found


def test_models_of_each_patch_are_trained_alike_and_measured(lab: Any, tmp_path: Path) -> None:
    asked = lab.bridge_patches.Trainings(tmp_path, quick=True, trained_only=False)
    one, other = (asked.recipe(patch).model_dump() for patch in (4, 16))
    assert one.pop("architecture") != other.pop("architecture")
    assert one == other
    found = lab.bridge_patches.patches(asked, True)
    assert set(found.numbers["patch"]) == {4, 16}
    assert set(found.numbers["covariates"]) == {1, 2}
    assert found.numbers["regret"].notna().all()
    assert len(found.verdicts) == 5
    again = lab.bridge_patches.Trainings(tmp_path, quick=True, trained_only=True)
    pd.testing.assert_frame_equal(lab.bridge_patches.patches(again, True).numbers, found.numbers)


def test_without_a_training_there_is_nothing_to_measure(lab: Any, tmp_path: Path) -> None:
    asked = lab.bridge_patches.Trainings(tmp_path, quick=True, trained_only=True)
    with pytest.raises(UsageError, match="no trained model"):
        asked.steps(4)


@pytest.mark.parametrize(
    ("regrets", "holds"),
    [((0.2, 0.3, 0.8), True), ((0.2, 0.9, 0.8), False), ((0.95, 0.97, 1), False)],
)
def test_regret_rises_only_if_something_was_learnt(lab: Any, regrets: Any, holds: bool) -> None:
    part = pd.DataFrame(
        {"patch": [1, 4, 16], "regret": regrets, "leakage": [0.1, 0.2, 0.3],
         "regret, low": [r - 0.01 for r in regrets], "regret, high": [r + 0.01 for r in regrets]}
    )  # fmt: skip
    rises, leaks = lab.bridge_patches.rises(part, 1, 100)
    assert rises.holds == holds
    assert leaks.holds


def test_every_model_has_its_rows_and_verdicts(lab: Any, checkpoints: dict[str, Path]) -> None:
    section = lab.bridge_response
    names = [section.ORIGINAL, section.FOLDED, *section.STRENGTHS, section.RANK_1]
    results = {
        name: probe(checkpoints["chronos-2"], [GROUP, "promotions"], num_series=3, name=name)
        for name in names
    }
    found = section.found(results, dict.fromkeys(names, 1.0))
    assert len(found.numbers) == len(names) * (len(RESPONSES) + 1)
    folded = [one for one in found.verdicts if "full rank" in one.statement]
    assert [one.holds for one in folded] == [True]  # the same model, here
    assert len({one.statement + one.claim for one in found.verdicts}) == len(found.verdicts)
