"""Exported directories in the place of models: measured like their source, refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import Command, assert_refused

import tscompress
from tscompress.checkpoints.given import loaded_of
from tscompress.errors import CorruptCheckpointError, LeakError, UnsupportedModelError, UsageError
from tscompress.families.covariates import Covariates, Joint
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.seeds import seeded
from tscompress.runtime.record import RECORD_FILE

FEW: dict[str, Any] = {"datasets": ["monash_m1_yearly", "monash_m3_yearly"], "max_series": 3}


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt", "chronos-2"])
def test_scores_are_those_of_the_source(
    family: str, exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    ours = tscompress.evaluate(exported[family], **FEW)
    theirs = tscompress.evaluate(checkpoints[family], **FEW)
    assert ours.model == exported[family].name
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert pytest.approx(other.WQL, rel=1e-5) == one.WQL
        assert pytest.approx(other.MASE, rel=1e-5) == one.MASE


def test_command_evaluates_and_compares(
    exported: dict[str, Path], checkpoints: dict[str, Path], command: Command
) -> None:
    few = ("--dataset", "monash_m1_yearly", "--max-series", 3, "--json")
    source, graph = checkpoints["chronos-bolt"], exported["chronos-bolt"]
    outcome = command("evaluate", graph, "--against", source, *few)
    assert outcome.code == 0, outcome.err
    scores, source_scores = (outcome.json[key]["rows"][0] for key in ("result", "against"))
    assert scores["WQL"] == pytest.approx(source_scores["WQL"], rel=1e-5)
    outcome = command("compare", source, graph, *few)
    assert outcome.code == 0, outcome.err
    outcome = command("probe", graph, "--tasks", "season-and-trend", "--num-series", 2, "--json")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_skill_is_that_of_the_source(
    family: str, exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    options: dict[str, Any] = {"num_series": 2, "tasks": ["season-and-trend"]}
    ours = tscompress.probe(exported[family], **options)
    theirs = tscompress.probe(checkpoints[family], **options)
    assert ours.overall().value == pytest.approx(theirs.overall().value, abs=1e-4)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_bench_has_the_bytes_of_the_graphs(
    family: str, exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    directory = exported[family]
    result = tscompress.bench(
        directory, against=checkpoints[family], repeats=1, warmup=0, batch_size=1,
        context_length=32, horizon=8, threads=1, measure_memory=False,
    )  # fmt: skip
    by_name = {model.name: model for model in result.models}
    graph = next(model for model in result.models if model.macs is None)
    (source,) = [model for model in by_name.values() if model is not graph]
    assert graph.parameters == source.parameters
    assert graph.kv_cache_bytes is None
    assert (source.kv_cache_bytes or 0) > 0
    assert graph.bytes_on_disk == sum(one.stat().st_size for one in directory.glob("*.onnx"))


@pytest.mark.parametrize(
    "act",
    [
        lambda path: tscompress.load(path),
        lambda path: tscompress.compress(path, rank=4),
        lambda path: tscompress.profile(path),
        lambda path: tscompress.compress(loaded_of(path), rank=4),
        lambda path: tscompress.export(path, path.parent / "again"),
        lambda path: tscompress.recover(path, "reference/bolt"),
    ],
    ids=["load", "compress", "profile", "in memory", "export", "recover"],
)
def test_functions_of_layers_refuse_a_graph(act: Any, exported: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="exported graph"):
        act(exported["chronos-bolt"])


def test_compress_command_refuses_a_graph(
    exported: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    outcome = command("compress", exported["chronos-2"], "--rank", 4, "--output", tmp_path / "out")
    assert_refused(outcome, 1, "exported graph")


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"dtype": "bfloat16"}, {"revision": "x"}])
def test_options_that_a_graph_does_not_have(option: Any, exported: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        loaded_of(exported["chronos-bolt"], **option)


def changed(directory: Path, copy: Path, **changes: Any) -> Path:
    shutil.copytree(directory, copy)
    path = copy / RECORD_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copy


def test_config_of_another_family(exported: dict[str, Path], tmp_path: Path) -> None:
    other = json.loads((exported["chronos-2"] / RECORD_FILE).read_text())["config"]
    directory = changed(exported["chronos-bolt"], tmp_path / "mixed", config=other)
    with pytest.raises(CorruptCheckpointError, match="chronos-2"):
        loaded_of(directory)


def test_steps_that_the_source_was_fitted_to(exported: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    rows = [f"2024-01-{day:02d},{day * day % 13}" for day in range(1, 31)]
    file.write_text("\n".join(["date,y", *rows]) + "\n")
    fitted = [{"source": str(file)}]
    directory = changed(exported["chronos-bolt"], tmp_path / "leaky", fitted_to=fitted)
    tscompress.evaluate(exported["chronos-bolt"], file, horizon=4)
    with pytest.raises(LeakError, match=r"mine\.csv"):
        tscompress.evaluate(directory, file, horizon=4)


def test_covariates_are_read_as_by_the_source(
    exported: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    draw = torch.Generator().manual_seed(0)
    series = [torch.randn(40, generator=draw).cumsum(0) for _ in range(2)]
    known = [
        Covariates(torch.randn(2, 40, generator=draw), torch.randn(1, 20, generator=draw))
        for _ in series
    ]
    tasks = [Joint(one[None], beside) for one, beside in zip(series, known, strict=True)]
    found = []
    for path in (exported["chronos-2"], checkpoints["chronos-2"]):
        pipeline: Any = loaded_of(path).forecaster
        family = adapter_of_pipeline(pipeline)
        found.append(family.joint_quantiles(pipeline, tasks, 20, [0.1, 0.5]))
    assert torch.allclose(*found, rtol=0, atol=1e-5 * float(found[1].abs().max()))


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt", "chronos-2"])
def test_contexts_in_bfloat16_and_with_gradients_are_taken(
    family: str, exported: dict[str, Path]
) -> None:
    pipeline = loaded_of(exported[family]).forecaster
    series = torch.arange(24.0).sin().bfloat16()
    with seeded(0):
        wanted = pipeline.predict([series.float()], prediction_length=3)
    with seeded(0):
        found = pipeline.predict([series.clone().requires_grad_()], prediction_length=3)
    torch.testing.assert_close(found[0], wanted[0])


def test_arrays_are_taken_as_they_are(exported: dict[str, Path]) -> None:
    """Whether they can be written to or not, in any order of memory, and lists."""
    pipeline = loaded_of(exported["chronos-2"]).forecaster
    series = np.sin(np.arange(24.0))
    series.flags.writeable = False
    wanted = pipeline.predict([torch.tensor(series)], prediction_length=3)
    for given in (series, series[::-1].copy()[::-1], series.tolist()):
        found = pipeline.predict([given], prediction_length=3)
        torch.testing.assert_close(found[0], wanted[0])
