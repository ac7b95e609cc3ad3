"""What eval/exported_shapes.py and eval/exported.py time, keep and print of exported models."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
import yaml
from eval_scripts import imported
from shared_fixtures import ROOT

from tscompress.benchmark.process_memory import MemoryUse


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported(("exported_shapes", "exported", "shapes")) as found:
        # Its own process for each model takes seconds; tests/benchmark measures with one.
        monkeypatch.setattr("tscompress.benchmark.bench.memory_of", lambda *_: MemoryUse(1, 2, 3))
        monkeypatch.setattr(found.exported, "PRECISIONS", ("float32",))
        yield found


@pytest.fixture
def tiny(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with models of few parameters in the place of the published ones."""
    little = {
        family: {
            size: scripts.shapes.Published(
                d_model=128, d_ff=64, layers=tuple(min(1, count) for count in known.layers),
                heads=2, settings=known.settings,
            )
            for size, known in sizes.items()
        }
        for family, sizes in scripts.shapes.OFFICIAL.items()
    }  # fmt: skip
    monkeypatch.setattr(scripts.shapes, "OFFICIAL", little)
    return scripts.exported_shapes


def run(script: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *options: str) -> pd.DataFrame:
    monkeypatch.setattr(sys, "argv", ["script", "--output", str(output), "--quick", *options])
    script.main()
    return pd.read_csv(f"{output}.csv", dtype={"settings": str})


def little_graph(source: Any, precision: str) -> bytes:
    """In the place of a model's graph one of as many weights, which forecasts the mean."""
    _, levels, steps = source.module(*source.inputs.values()).shape
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 17]>
        little (float[B, T] context, float[B, T] observed)
            => (float[B, {levels}, {steps}] quantiles)
        <int64[1] axis = {{1}}, int64[3] shape = {{1, {levels}, {steps}}}>
        {{
            mean = ReduceMean <axes = [1]> (context)
            column = Unsqueeze (mean, axis)
            quantiles = Expand (column, shape)
        }}
    """)
    weights = np.zeros(sum(one.numel() for one in source.module.parameters()), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "weights"))
    content: bytes = model.SerializeToString()
    return content


def test_shapes_are_the_published_ones_folded_as_the_recipe_balanced(scripts: Any) -> None:
    script = scripts.exported_shapes
    recipe = yaml.safe_load((ROOT / "recipes" / "balanced.yaml").read_text(encoding="utf-8"))
    assert scripts.shapes.Fold(recipe["width"], recipe["ff_ratio"]) == script.FOLDED
    assert recipe["schedule"] is None
    assert set(script.SHAPES) == {
        f"{family}-{size}" for family in script.FAMILIES for size in ("small", "base")
    }
    calls = {family: script.workloads(family, repeats=5) for family in script.FAMILIES}
    for family, found in calls.items():
        sizes = [(one.batch_size, one.context_length) for one in found]
        assert {one.threads for one in found} == {1}
        if family == "chronos-t5":
            assert [(*size, found[0].num_samples) for size in sizes] == [(4, 512, 20)]
        else:
            assert set(sizes) == {(1, 512), (32, 512), (1, 2048), (32, 2048)}


def test_models_take_turns_and_a_run_started_again_measures_what_is_missing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting = "tscompress.workflows.export"
    monkeypatch.setattr(f"{exporting}.onnx_graph", little_graph)
    monkeypatch.setattr(f"{exporting}.largest_difference", lambda *_: 0.0)
    output = tmp_path / "s"
    options = ("--repeats", "5", "--shape", "chronos-bolt-small")
    first = run(tiny, monkeypatch, output, *options)
    assert first["model"].tolist() == [
        "original, torch", "folded, torch", "original, float32", "folded, float32",
    ]  # fmt: skip
    assert first["latency"].iloc[0] == 1
    assert (first["latency low"] <= first["latency high"]).all()
    assert first["peak bytes"].eq(2).all()
    assert (first["bytes"].iloc[1::2].to_numpy() < first["bytes"].iloc[::2].to_numpy()).all()
    text = Path(f"{output}.md").read_text(encoding="utf-8")
    assert text.startswith("### chronos-bolt-small\n")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    monkeypatch.setattr(tiny, "write_checkpoint", None)  # nothing is made again
    pd.testing.assert_frame_equal(run(tiny, monkeypatch, output, *options), first)
    monkeypatch.setattr(tiny, "measure", lambda shape, calls, known: asked.append(known) or ())
    asked: list[set[tuple[Any, ...]]] = []
    monkeypatch.setattr(tiny, "code_digest", lambda parts: "another")
    run(tiny, monkeypatch, output, "--shape", "chronos-2-small")
    run(tiny, monkeypatch, output, *options)
    assert asked == [{("chronos-bolt-small", 1, 32)}, set()]  # what is not asked for stays
    # A shape that was measured first stands where the table has it.
    both = tiny.in_order(pd.concat([first.assign(shape="chronos-2-small"), first]))
    assert list(dict.fromkeys(both["shape"])) == ["chronos-bolt-small", "chronos-2-small"]


def test_rows_of_other_code_are_measured_again(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = tiny.workloads("chronos-bolt", repeats=5)[0]
    more = tiny.workloads("chronos-bolt", repeats=6)[0]
    before = tiny.settings_of(call)
    assert tiny.settings_of(tiny.workloads("chronos-bolt", repeats=5)[-1]) == before
    assert tiny.settings_of(more) == before  # more rounds are the same figures, closer
    monkeypatch.setattr(tiny, "code_digest", lambda parts: "another")
    assert tiny.settings_of(call) != before


def test_an_unknown_shape_is_one_line_and_writes_nothing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tiny, monkeypatch, tmp_path / "s", "--shape", "chronos-bolt-tiny")
    assert ended.value.code == 2
    assert "chronos-bolt-tiny" in capsys.readouterr().err.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_a_reference_has_its_peak_memory(
    scripts: Any, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = scripts.exported
    monkeypatch.setitem(exported.SHAPES, "chronos-bolt", ((1, 32), (2, 32), (2, 48)))
    models = {"original, torch": checkpoints["chronos-bolt"]}
    columns = exported.latencies(models, "chronos-bolt", 1)["original, torch"]
    assert columns["2 × 32"] == 1
    assert [name for name in columns if "peak" in name] == [
        "peak bytes, 1 × 32", "peak bytes, 2 × 48",
    ]  # fmt: skip
    frame = pd.DataFrame([{"model": "original, torch", "bytes": 1e6} | columns])
    lines = exported.markdown(frame, ["1 × 32", "2 × 32", "2 × 48"]).splitlines()
    assert "peak MB, 2 × 48" in lines[0]
    assert len({line.count("|") for line in lines}) == 1
    found = exported.in_turn(models, exported.Workload(repeats=1, context_length=16), memory=False)
    assert math.isnan(found["original, torch"]["peak bytes"])
