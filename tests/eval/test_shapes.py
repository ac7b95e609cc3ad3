"""Which shapes eval/shapes.py times, how their models are made, and what it refuses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from eval_scripts import imported
from shared_fixtures import ROOT

from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.sizes import parameter_count
from tscompress.benchmark.workload import Workload, forecast, synthetic_batch
from tscompress.errors import UsageError
from tscompress.families.registry import build_empty
from tscompress.layers.univariate import is_univariate
from tscompress.training.pretrain_model import design


@pytest.fixture(scope="module")
def scripts() -> Any:
    with imported(("shapes", "reproduce")) as found:
        yield found


@pytest.fixture
def shapes(scripts: Any) -> Any:
    return scripts.shapes


@pytest.fixture
def tiny(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Official models of few parameters in the place of the published ones."""
    little = {
        family: {
            size: shapes.Published(
                d_model=128 if size == "small" else 160, d_ff=64,
                layers=tuple(min(2, count) for count in known.layers), heads=2,
                settings=known.settings,
            )
            for size, known in sizes.items()
        }
        for family, sizes in shapes.OFFICIAL.items()
    }  # fmt: skip
    monkeypatch.setattr(shapes, "OFFICIAL", little)
    return shapes


def recipe_folds(shapes: Any) -> list[Any]:
    found = []
    for name in ("gentle", "balanced", "extreme"):
        recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
        heads = (recipe["schedule"] or {"rank": shapes.DENSE_D_KV})["rank"]
        found.append(shapes.Fold(recipe["width"], recipe["ff_ratio"], heads))
    return found


def test_every_comparison_has_the_sizes_of_the_recipes_between_two_official_models(
    shapes: Any,
) -> None:
    for comparison in shapes.COMPARISONS:
        assert set(recipe_folds(shapes)) <= set(comparison.folded)
        dense, *folded, smaller = comparison.shapes
        assert len({shape.name for shape in comparison.shapes}) == len(folded) + 2 <= 9
        assert dense.fold == smaller.fold == shapes.Fold()
        assert (dense.size, smaller.size) == (comparison.size, shapes.SMALLER[comparison.size])
        assert smaller.d_model < dense.d_model
        assert all(shape.d_model % 16 == 0 for shape in folded)  # what a GPU multiplies at once


def test_no_name_is_the_default_of_the_device(shapes: Any) -> None:
    names = [comparison.name for comparison in shapes.COMPARISONS]
    assert {one.name for one in shapes.chosen(None, "cpu")} == {
        "chronos-t5-small", "chronos-bolt-small",
    }  # fmt: skip
    assert [one.name for one in shapes.chosen(None, "cuda")] == names
    asked = ["chronos-2-base", "chronos-t5-small", "chronos-2-base"]
    assert [one.name for one in shapes.chosen(asked, "cpu")] == asked[:2]
    with pytest.raises(UsageError, match="chronos-2-large"):
        shapes.chosen(["chronos-2-base", "chronos-2-large"], "cpu")


@pytest.mark.parametrize(
    "options",
    [
        ["--models", "chronos-2-large"],
        ["--device", "cuda"],
        ["--device", "cuda", "--models", "chronos-2-base"],
        ["--repeats", "0"],
        ["--repeats", "many"],
        ["--threads", "-1"],
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    shapes: Any,
    options: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--output", str(tmp_path / "t"), *options])
    with pytest.raises(SystemExit) as ended:
        shapes.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("shapes.py: error:")
    assert options[-1] in said[-1] or options[1] == "cuda"
    assert list(tmp_path.iterdir()) == []


def test_large_batches_run_on_a_gpu_alone(shapes: Any) -> None:
    for comparison in shapes.COMPARISONS:
        on_cpu, on_gpu = (comparison.workloads(device) for device in ("cpu", "cuda"))
        assert [one.device for one in on_cpu] == ["cpu"]
        assert {one.device for one in on_gpu} == {"cuda"}
        assert len(on_gpu) == (1 if comparison.large_batch is None else 2)
        assert on_gpu[0].batch_size == on_cpu[0].batch_size
        assert on_gpu[1:] == [] or on_gpu[1].batch_size > on_gpu[0].batch_size


def test_chronos_2_has_as_many_parameters_as_published(shapes: Any) -> None:
    counts = [
        parameter_count(build_empty(shape.family, design(shapes.recipe_of(shape))[0].to_dict()))
        for shape in (shapes.Shape("chronos-2", size) for size in ("base", "small"))
    ]
    assert round(counts[0] / 1e6, 1) == 119.5
    assert round(counts[1] / counts[0], 2) == 0.23


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt", "chronos-2"])
def test_models_are_of_the_sizes_that_the_table_says_and_forecast_in_bfloat16(
    tiny: Any, family: str
) -> None:
    comparison = next(one for one in tiny.COMPARISONS if one.family == family)
    call = Workload(batch_size=2, context_length=40, horizon=3)
    for shape in comparison.shapes:
        pipeline = tiny.build(shape, "cpu", torch.bfloat16)
        model: Any = pipeline.inner_model
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        assert all(weight.isfinite().all() for weight in model.parameters())
        assert not model.training
        config = model.config
        assert (config.d_model, config.d_kv, config.d_ff) == (
            shape.d_model, shape.fold.d_kv, shape.d_ff,
        )  # fmt: skip
        assert len(model.encoder.block) == shape.layers[0]
        assert is_univariate(model) == shape.fold.univariate
        forecast(pipeline, synthetic_batch(call), call)


def test_a_quick_run_writes_one_row_a_shape(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shapes"
    options = ["--quick", "--repeats", "2", "--models", "chronos-2-base", "chronos-t5-small"]
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--output", str(output), *options])
    tiny.main()
    capsys.readouterr()
    frame = pd.read_csv(f"{output}.csv")
    comparisons = tiny.chosen(options[4:], "cpu")
    assert len(frame) == sum(len(one.shapes) for one in comparisons)
    assert (frame["parameters"] == frame["bytes"]).all()  # as the heading of the column says
    assert frame["KV cache"].isna().equals(frame["model"].str.startswith("chronos-2"))
    assert frame["peak memory"].isna().all()
    first, second = Path(f"{output}.md").read_text().split("### ")[1:]
    assert "2 rounds" in first
    assert "KV cache" not in first
    assert "KV cache" in second
    for text, comparison in zip((first, second), comparisons, strict=True):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(comparison.shapes)
        assert len({line.count("|") for line in lines}) == 1


def test_times_and_the_dtype_of_a_gpu_stand_in_its_table(tiny: Any) -> None:
    comparison = tiny.Comparison("chronos-t5", "small", (), tiny.T5_WORKLOAD)
    (result,) = tiny.measure(comparison, device="cpu", quick=True)
    on_gpu = result.workload.model_copy(update={"device": "cuda"})
    memory = MemoryUse(0, 1000, 2000)
    models = tuple(dataclasses.replace(model, memory=memory) for model in result.models)
    as_if = dataclasses.replace(result, workload=on_gpu, models=models)
    before, after = (tiny.markdown(comparison, one) for one in (result, as_if))
    for word in ("bfloat16", " ms |", "peak memory"):
        assert (word in after, word in before) == (True, False)


@pytest.mark.slow  # a process for each model
def test_memory_on_a_cpu_is_measured_of_every_model(tiny: Any) -> None:
    comparison = tiny.Comparison(
        "chronos-2", "base", (tiny.Fold(0.5, 0.5, univariate=True),), tiny.PATCH_WORKLOAD
    )
    (result,) = tiny.measure(comparison, device="cpu", quick=True, memory=True)
    assert all(row["peak memory"] > 0 for row in tiny.rows(comparison, result))
    assert "peak memory" in tiny.markdown(comparison, result)


def test_tables_that_need_a_gpu_are_asked_for_by_their_whole_name(scripts: Any) -> None:
    reproduce = scripts.reproduce
    on_gpu = [table.name for table in reproduce.TABLES if table.needs_gpu]
    assert "shapes-gpu" in on_gpu
    assert not any(table.needs_gpu for table in reproduce.chosen([]))
    assert [table.name for table in reproduce.chosen(["shape"])] == [
        "shapes", "shapes-chronos2", "exported-shapes",
    ]  # fmt: skip
    assert [table.name for table in reproduce.chosen(["shapes-gpu"])] == ["shapes-gpu"]
    with pytest.raises(UsageError, match="shapes-g"):
        reproduce.chosen(["shapes-g"])
