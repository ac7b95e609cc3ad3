"""``eval/by_design.py``: which models are trained, from which recipes, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from eval_scripts import imported
from shared_fixtures import ROOT

from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.workflows.recipe import load_pretrain_recipe

DENSE = ROOT / "recipes" / "pretrain" / "by-design-t5.yaml"


@pytest.fixture
def by_design() -> Iterator[Any]:
    with imported(("by_design",)) as found:
        yield found.by_design


def test_all_models_are_trained_by_the_recipe_of_the_dense_one(by_design: Any) -> None:
    dense = load_pretrain_recipe(DENSE)
    schedules = ("3,0.27", "7,0.40")
    recipes = by_design.recipes_of(dense, schedules, "reference/t5")
    assert len(recipes) == 1 + 2 * len(schedules)
    changed = {"name", "schedule", "embedding_from"}
    for (kind, text), recipe in recipes.items():
        assert recipe.model_dump(exclude=changed) == dense.model_dump(exclude=changed)
        assert (recipe.schedule is None) == (kind == by_design.DENSE)
        assert (recipe.embedding_from is None) == (kind != by_design.REUSED)
        if recipe.schedule is not None:
            assert by_design.power_law(text) == recipe.schedule
    assert len({by_design.directory_of(*key) for key in recipes}) == len(recipes)


@pytest.mark.parametrize("family", ["t5", "bolt"])
def test_dense_recipes_have_the_shape_of_the_references(family: str) -> None:
    dense = load_pretrain_recipe(DENSE.with_name(f"by-design-{family}.yaml"))
    reference = load_pretrain_recipe(DENSE.with_name(f"{family}-tiny.yaml"))
    for shared in ("architecture", "real_series", "optimizer", "learning_rate"):
        assert getattr(dense, shared) == getattr(reference, shared)
    assert dense.start_from is None
    assert dense.schedule is None


def test_the_dense_model_is_folded_to_the_sizes_of_each_schedule(
    by_design: Any, checkpoints: dict[str, Path]
) -> None:
    model = checkpoints["chronos-bolt"]
    bed = SimpleNamespace(
        model=str(model),
        original=load(model, dtype="float32"),
        calibration=CalibrationConfig(source="synthetic", num_series=8, context_length=32),
    )
    places = {(by_design.DENSE, ""): model, (by_design.DESIGNED, "2,0.5"): model}
    found = dict(by_design.models_of(bed, places, ()))
    assert list(found) == [*places, (by_design.FOLDED, "2,0.5")]
    heads = found[by_design.FOLDED, "2,0.5"].plan.heads
    assert {head.qk_size for head in heads} == {2, 3, 4}  # 2, 2 sqrt(2) and 2 sqrt(3), rounded up
    assert {p.dtype for p in found[by_design.FOLDED, "2,0.5"].model.parameters()} == {torch.float32}


def test_a_row_has_ratios_to_the_dense_model(by_design: Any) -> None:
    ratios = {
        f"{name}{end}": 1.5 for name in ("WQL", "SQL", "MASE") for end in ("", " low", " high")
    }
    row = {"parameters": 0.5, "latency": 0.25, "own skill": 0.125, "skill": 0.75, **ratios}
    frame = pd.DataFrame([{**row, "schedule": "", "model": by_design.DENSE},
                          {**row, "schedule": "5,0.35", "model": by_design.DESIGNED}])  # fmt: skip
    *_, dense, designed = by_design.markdown(frame).splitlines()
    assert "1.5" not in dense
    assert "| 5,0.35 | by design | 50.0% | 0.25 | 1.5000" in designed
    assert designed.endswith("| 0.750 | 0.125 |")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--schedule": "rank=3"}, "rank=3"),
        ({"--schedule": "3"}, "3"),
        ({"--recipe": "nowhere.yaml"}, "nowhere.yaml"),
        ({}, "--trained-only"),
    ],
)
def test_bad_input_is_one_line(
    by_design: Any,
    changes: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"--recipe": str(DENSE), "--schedule": "5,0.35"} | changes
    options |= {"--models": str(tmp_path / "none"), "--output": str(tmp_path / "out")}
    words = [word for pair in options.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["by_design.py", *words, "--trained-only"])
    with pytest.raises(SystemExit) as stopped:
        by_design.main()
    *_, last = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert said in last
    assert not list(tmp_path.iterdir())
