"""Compressed checkpoints are trained further, as those of chronos-forecasting are.

Chronos-2 by its own ``fit``, whole and with an adapter (LoRA), which needs peft; Chronos-Bolt and
Chronos-T5, whose pipelines cannot train, by a plain loop. What was trained is saved by stock
methods and opens again.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from shared_fixtures import COMPRESSIONS, FAMILIES, made_smaller
from torch import Tensor, nn

from tscompress.checkpoints.load import load
from tscompress.data.batch import ForecastBatch
from tscompress.errors import ModelLoadError, UsageError
from tscompress.pipelines import FactoredChronosPipeline
from tscompress.training.pretrain_losses import loss_function
from tscompress.workflows.save import save

HORIZON = 8
#: peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
Fit = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _factored_checkpoints_open() -> None:
    import_module("tscompress.pipelines")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fit`` writes to the working directory by default."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=COMPRESSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(compressed: dict[tuple[str, str], Path], kind: str) -> Path:
    """Of a compressed Chronos-2."""
    return compressed["chronos-2", kind]


@pytest.fixture
def pipeline(checkpoint: Path) -> Any:
    return Chronos2Pipeline.from_pretrained(checkpoint)


def fitted(pipeline: Any, inputs: Any, **options: Any) -> Any:
    """A few steps of stock ``fit``, without bars; its result is in training mode."""
    settings = {"num_steps": 3, "min_past": 1, "batch_size": 16, "learning_rate": 1e-2}
    quiet = {"disable_tqdm": True, "remove_printer_callback": True}
    tuned = pipeline.fit(inputs, HORIZON, **settings, **quiet, **options)
    tuned.model.eval()
    return tuned


def series() -> Tensor:
    """Three tasks of two variates, ``[3, 2, 40]``."""
    steps = torch.arange(40.0)
    return torch.stack([torch.stack([steps.sin(), steps.cos()]) * scale for scale in (1, 2, 3)])


def tasks() -> list[dict[str, Any]]:
    """Targets with a known and a past-only covariate."""
    generator = np.random.default_rng(0)
    return [
        {
            "target": generator.normal(size=steps).cumsum(),
            "past_covariates": {name: generator.normal(size=steps) for name in ("price", "visits")},
            "future_covariates": {"price": generator.normal(size=HORIZON)},
        }
        for steps in (20, 40, 33)
    ]


def forecast(pipeline: Any, inputs: Any) -> Tensor:
    return torch.cat(pipeline.predict(inputs, prediction_length=HORIZON))


def assert_loads_as(
    directory: Path, kind: str, pipeline: Any, inputs: Any, tolerance: float = 0.0
) -> None:
    """A checkpoint of the same kind as before, which forecasts as the pipeline does."""
    factored = json.loads((directory / "config.json").read_text())["model_type"] == "tscompress"
    assert factored == (kind == "factored")
    expected = forecast(pipeline, inputs)
    for opened in (Chronos2Pipeline.from_pretrained(directory), load(directory).forecaster):
        found = forecast(opened, inputs)
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------
# Chronos-2: fit
# --------------------------------------------------------------------------------------------------


def test_fit_trains_a_copy_and_saves_it(pipeline: Any, kind: str, tmp_path: Path) -> None:
    before = forecast(pipeline, series())
    tuned = fitted(pipeline, series(), output_dir=tmp_path / "out")
    assert torch.equal(forecast(pipeline, series()), before)
    assert not torch.allclose(forecast(tuned, series()), before, rtol=1e-3)
    assert_loads_as(tmp_path / "out" / "finetuned-ckpt", kind, tuned, series())
    again = fitted(tuned, series())
    assert not torch.allclose(forecast(again, series()), forecast(tuned, series()), rtol=1e-3)


# `fit` of a folded checkpoint is that of chronos.
@pytest.mark.parametrize("kind", ["factored"])
def test_fit_keeps_the_best_of_its_validation(pipeline: Any, kind: str, tmp_path: Path) -> None:
    tuned = fitted(
        pipeline,
        tasks(),
        validation_inputs=tasks(),
        eval_steps=1,
        save_steps=1,
        output_dir=str(tmp_path / "out"),
    )
    assert forecast(tuned, tasks()).isfinite().all()
    assert_loads_as(tmp_path / "out" / "finetuned-ckpt", kind, tuned, tasks())
    (kept,) = (tmp_path / "out").glob("checkpoint-*")  # of save_total_limit 1
    assert_loads_as(kept, kind, tuned, tasks())


@pytest.mark.parametrize("kind", ["factored"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_fit_takes_covariates_without_a_future(pipeline: Any, mode: str) -> None:
    unknown = tasks()
    for task, empty in zip(unknown, (None, np.array([]), torch.zeros(0)), strict=True):
        task["future_covariates"]["price"] = empty
    ends = {"eval_steps": 3, "save_steps": 3, "finetune_mode": mode}
    tuned = fitted(pipeline, unknown, validation_inputs=unknown, **ends)
    before, after = forecast(pipeline, tasks()), forecast(tuned, tasks())
    assert after.isfinite().all()
    assert not torch.allclose(before, after, rtol=1e-3)


@pytest.mark.parametrize("kind", ["factored"])
def test_fit_of_series_that_are_too_short_is_refused(pipeline: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        fitted(pipeline, series()[..., : HORIZON - 1])
    assert forecast(fitted(pipeline, series()), series()).isfinite().all()


@pytest.mark.parametrize("kind", ["factored"])
def test_fit_for_a_longer_horizon_is_saved_with_it(pipeline: Any, tmp_path: Path) -> None:
    longer = 5 * 16
    assert pipeline.model_prediction_length < longer
    quiet = {"disable_tqdm": True, "remove_printer_callback": True, "output_dir": tmp_path}
    long = torch.rand(2, 1, 100)
    pipeline.fit(long, longer, num_steps=1, min_past=1, **quiet)
    opened = Chronos2Pipeline.from_pretrained(tmp_path / "finetuned-ckpt")
    assert opened.model_prediction_length == longer


@pytest.mark.parametrize("kind", ["factored"])
def test_a_model_compressed_in_memory_can_be_trained(
    checkpoints: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    small = made_smaller(checkpoints["chronos-2"], kind)
    tuned = fitted(small.forecaster, series(), output_dir=tmp_path)
    assert_loads_as(tmp_path / "finetuned-ckpt", kind, tuned, series())


# --------------------------------------------------------------------------------------------------
# Chronos-2: adapters
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def _peft() -> None:
    pytest.importorskip("peft")


@pytest.mark.usefixtures("_peft")
def test_an_adapter_is_saved_and_opens_again(
    pipeline: Any, checkpoint: Path, tmp_path: Path
) -> None:
    before = forecast(pipeline, tasks())
    tuned = fitted(pipeline, tasks(), finetune_mode="lora", output_dir=tmp_path)
    trained = [name for name, one in tuned.model.named_parameters() if one.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    adapter = tmp_path / "finetuned-ckpt"
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(checkpoint)
    opened = Chronos2Pipeline.from_pretrained(adapter)
    assert torch.allclose(forecast(opened, tasks()), forecast(tuned, tasks()), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(forecast(opened, tasks()), before, rtol=1e-3)
    assert torch.equal(forecast(pipeline, tasks()), before)


@pytest.mark.usefixtures("_peft")
def test_a_merged_adapter_is_a_checkpoint_of_the_same_kind(
    pipeline: Any, kind: str, tmp_path: Path
) -> None:
    fitted(pipeline, series(), finetune_mode="lora", output_dir=tmp_path)
    merged = Chronos2Pipeline.from_pretrained(tmp_path / "finetuned-ckpt")
    merged.save_pretrained(tmp_path / "merged")
    # Frozen weights take another path through matmul, with other rounding.
    assert_loads_as(tmp_path / "merged", kind, merged, series(), tolerance=1e-4)


@pytest.mark.usefixtures("_peft")
@pytest.mark.parametrize("kind", ["factored"])
def test_a_revision_is_of_the_adapter_and_a_dtype_of_its_base(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(pipeline, series(), finetune_mode="lora", output_dir=tmp_path)
    asked: list[dict[str, Any]] = []
    opened = FactoredChronosPipeline.from_pretrained

    def noting(source: str, **options: Any) -> Any:
        asked.append(options)
        return opened(source, **options)

    monkeypatch.setattr(FactoredChronosPipeline, "from_pretrained", noting)
    adapter = tmp_path / "finetuned-ckpt"
    merged = Chronos2Pipeline.from_pretrained(adapter, revision="abc", torch_dtype=torch.bfloat16)
    assert asked == [{"torch_dtype": torch.bfloat16}]
    assert merged.inner_model.dtype == torch.bfloat16


@pytest.mark.usefixtures("_peft")
def test_an_adapter_of_a_model_in_memory_names_where_that_was_saved(
    checkpoints: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    small = made_smaller(checkpoints["chronos-2"], kind)
    save(small, tmp_path / "small")
    tuned = fitted(small.forecaster, series(), finetune_mode="lora", output_dir=tmp_path)
    opened = Chronos2Pipeline.from_pretrained(tmp_path / "finetuned-ckpt")
    assert torch.allclose(forecast(opened, series()), forecast(tuned, series()), atol=1e-3)


@pytest.mark.usefixtures("_peft")
@pytest.mark.parametrize("kind", ["factored"])
def test_an_adapter_of_another_model_is_refused(
    pipeline: Any, compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    whole = Chronos2Pipeline.from_pretrained(compressed["chronos-2", "folded"])
    fitted(whole, series(), finetune_mode="lora", output_dir=tmp_path)
    adapter = tmp_path / "finetuned-ckpt"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(compressed["chronos-2", "factored"])
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="adapter"):
        Chronos2Pipeline.from_pretrained(adapter)


# --------------------------------------------------------------------------------------------------
# Plain loops
# --------------------------------------------------------------------------------------------------


def trained_a_little(model: nn.Module) -> tuple[float, float]:
    """Loss before and after a few steps on one batch, in evaluation mode: no dropout."""
    steps = torch.arange(56.0)
    values = torch.stack([(steps / 2).sin(), (steps / 3).cos()]) + 2
    batch = ForecastBatch(values[:, :40], values[:, 40:])
    loss_of: Any = loss_function(model)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_loop_trains_and_stock_methods_save(
    compressed: dict[tuple[str, str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    pipeline: Any = BaseChronosPipeline.from_pretrained(compressed[family, kind])
    before, after = trained_a_little(pipeline.inner_model)
    assert after < before
    pipeline.inner_model.save_pretrained(tmp_path / "tuned")
    opened: Any = BaseChronosPipeline.from_pretrained(tmp_path / "tuned")
    weights, expected = (one.inner_model.state_dict() for one in (opened, pipeline))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert load(tmp_path / "tuned").family == family


@pytest.mark.usefixtures("_peft")
def test_an_adapter_of_a_factored_t5_is_saved_and_opens_again(
    compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    peft = import_module("peft")  # of a Bolt, also a stock one, it makes no adapter
    place = compressed["chronos-t5", "factored"]
    pipeline: Any = BaseChronosPipeline.from_pretrained(place)
    config = peft.LoraConfig(target_modules=r".*Attention\.[qv]\.left", init_lora_weights=False)
    adapted = peft.get_peft_model(pipeline.inner_model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    again: Any = BaseChronosPipeline.from_pretrained(place)
    before = {name: one.clone() for name, one in again.inner_model.state_dict().items()}
    opened = peft.PeftModel.from_pretrained(again.inner_model, tmp_path / "adapter")
    ours, theirs = (one.merge_and_unload().state_dict() for one in (adapted, opened))
    assert all(torch.equal(ours[name], theirs[name]) for name in before)
    assert any(not torch.equal(ours[name], before[name]) for name in before)


def test_an_adapter_of_a_model_that_was_not_saved_names_no_checkpoint(
    checkpoints: dict[str, Path],
) -> None:
    small = made_smaller(checkpoints["chronos-2"], "factored")
    assert small.model.name_or_path == ""
    # The leak guard goes by what its config names.
    assert small.model.config._name_or_path == str(checkpoints["chronos-2"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["factored"])
def test_a_factored_pipeline_goes_to_another_process(
    compressed: dict[tuple[str, str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    pipeline: Any = BaseChronosPipeline.from_pretrained(compressed[family, kind])
    again = pickle.loads(pickle.dumps(pipeline))
    again.inner_model.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").plan == pipeline.inner_model.factored_plan
    with torch.no_grad():
        for parameter in again.inner_model.parameters():
            parameter.zero_()
    again.inner_model.save_pretrained(tmp_path / "zero")
    assert not any(x.any() for x in load(tmp_path / "zero").model.state_dict().values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["factored"])
def test_a_factored_model_is_saved_as_safetensors_alone(
    compressed: dict[tuple[str, str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    model: Any = load(compressed[family, kind]).model
    with pytest.raises(UsageError, match="safe_serialization"):
        model.save_pretrained(tmp_path / "tuned", safe_serialization=False)
    model.save_pretrained(tmp_path / "tuned", is_main_process=False)
    assert not (tmp_path / "tuned").exists()
