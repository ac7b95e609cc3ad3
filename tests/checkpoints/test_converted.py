"""Chronos-2 under the names of transformers' own model: huggingface/transformers#47693."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chronos import BaseChronosPipeline

import tscompress
from tscompress.checkpoints.load import load
from tscompress.errors import UnsupportedModelError
from tscompress.families.registry import family_of

FEW = tscompress.CalibrationConfig(num_series=16, context_length=64, batch_size=8)
WAVE = torch.sin(torch.arange(60.0) / 3)
#: What the conversion drops of a config.
DROPPED = ("chronos_pipeline_class", "dense_act_fn", "is_gated_act")


def converted_config(config: dict[str, Any]) -> dict[str, Any]:
    """Another type, and no pipeline class; tensors keep their names."""
    kept = {key: value for key, value in config.items() if key not in DROPPED}
    return {**kept, "model_type": "chronos2", "tie_word_embeddings": False, "use_cache": False}


@pytest.fixture
def converted(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    directory = Path(shutil.copytree(checkpoints["chronos-2"], tmp_path / "converted"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(converted_config(config)))
    return directory


def forecast(pipeline: Any) -> torch.Tensor:
    return torch.cat(pipeline.predict([WAVE], prediction_length=20))


def test_converted_checkpoint_forecasts_as_before(
    converted: Path, checkpoints: dict[str, Path]
) -> None:
    ours, theirs = load(converted), load(checkpoints["chronos-2"])
    assert ours.family == "chronos-2"
    assert torch.equal(forecast(ours.forecaster), forecast(theirs.forecaster))
    half = load(converted, dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "change",
    [
        {"chronos_pipeline_class": "Chronos2Pipeline"},
        {"architectures": None},
        {"model_type": "chronos_2"},
    ],
    ids=str,
)
def test_one_of_the_names_suffices(converted: Path, change: dict[str, Any]) -> None:
    config = json.loads((converted / "config.json").read_text()) | change
    assert family_of(config) == "chronos-2"
    (converted / "config.json").write_text(json.dumps(config))
    assert forecast(load(converted).forecaster).shape == (1, 9, 20)


@pytest.mark.parametrize("options", [{"ff_ratio": 0.5}, {"rank": 4, "width": 16}], ids=str)
def test_written_config_is_read_by_both(
    converted: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    small = tscompress.compress(converted, calibration=FEW, **options)
    out = tscompress.save(small, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    # chronos-forecasting reads the first two; transformers' own model takes a config with the first
    # and the last, and a chronos_config.
    assert config["model_type"] == "t5"
    assert config["chronos_pipeline_class"] == "Chronos2Pipeline"
    assert config["architectures"] == ["Chronos2Model"]
    assert isinstance(config["chronos_config"], dict)
    stock = BaseChronosPipeline.from_pretrained(out)
    assert torch.equal(forecast(stock), forecast(load(out).forecaster))
    # And again under the new names.
    again = Path(shutil.copytree(out, tmp_path / "again"))
    (again / "config.json").write_text(json.dumps(converted_config(config)))
    assert torch.equal(forecast(load(again).forecaster), forecast(stock))


def test_factored_checkpoint_of_a_converted_one(converted: Path, tmp_path: Path) -> None:
    small = tscompress.compress(converted, fold=tscompress.FoldConfig(univariate=True))
    out = tscompress.save(small, tmp_path / "out")
    path = out / "config.json"
    config = json.loads(path.read_text())
    assert config["base_model_type"] == "t5"
    expected = forecast(load(out).forecaster)
    # Of a version that kept the source's names.
    base = converted_config({**config["base_config"], "model_type": "t5"})
    base.pop("model_type")
    path.write_text(json.dumps({**config, "base_model_type": "chronos2", "base_config": base}))
    assert torch.equal(forecast(load(out).forecaster), expected)


def test_other_pipelines_keep_their_family(checkpoints: dict[str, Path]) -> None:
    for family, path in checkpoints.items():
        assert family_of(json.loads((path / "config.json").read_text())) == family
    # The first checkpoints of Chronos-T5 name no pipeline.
    assert family_of({"model_type": "t5", "chronos_config": {}}) == "chronos-t5"
    with pytest.raises(UnsupportedModelError, match="OtherPipeline"):
        family_of({"model_type": "chronos2", "chronos_pipeline_class": "OtherPipeline"})
