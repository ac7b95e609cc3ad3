"""Trainings of in-context learners: resuming, rates, refusals, and that they learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tscompress.errors import DivergenceError, RecipeError, UsageError
from tscompress.lab.in_context import RegressionTask, last_index_loss
from tscompress.lab.in_context_models import InContextRegressor, LayoutName
from tscompress.training.in_context import InContextTraining, train_in_context

TASK = RegressionTask(2, 6)


def regressor(layout: LayoutName = "shifted", task: RegressionTask = TASK) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(layout, dim=task.dim, points=task.points, width=32, heads=2, layers=1)


def trained(
    directory: Path,
    training: InContextTraining,
    model: InContextRegressor | None = None,
    task: RegressionTask = TASK,
    stop_at: int | None = None,
    setup: str = "",
) -> tuple[InContextRegressor, list[dict[str, float]]]:
    model = model or regressor(task=task)
    held_out = task.draw(256, np.random.default_rng(9))
    measured: list[float] = []

    def loss(rng: np.random.Generator) -> Tensor:
        prompts = task.draw(training.batch, rng)
        return model.loss(torch.as_tensor(prompts.x).float(), torch.as_tensor(prompts.y).float())

    def measure() -> dict[str, float]:
        measured.append(last_index_loss(model.forecasts(held_out), held_out))
        return {"last": measured[-1]}

    def logged(_: object) -> None:
        if len(measured) == stop_at:
            raise KeyboardInterrupt

    return model, train_in_context(model, loss, measure, training, directory, logged, setup=setup)


def test_a_stopped_training_resumes_to_the_same_weights_and_log(tmp_path: Path) -> None:
    training = InContextTraining(steps=6, batch=4, warmup_steps=2, log_every=2)
    whole, lines = trained(tmp_path / "whole", training)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", training, stop_at=1)
    resumed, again = trained(tmp_path / "parts", training)
    assert again == lines
    assert [line["step"] for line in lines] == [2, 4, 6]
    for name, weights in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weights, rtol=0, atol=0)
    written = (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == lines


def test_rates_rise_stay_and_fall() -> None:
    training = InContextTraining(steps=100, learning_rate=1.0, warmup_steps=9, decay_from=0.6)
    rates = [training.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:60] == [1.0] * 51
    assert rates[80] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.05


def test_another_recipe_does_not_resume(tmp_path: Path) -> None:
    training = InContextTraining(steps=2, batch=4, log_every=1)
    trained(tmp_path, training)
    with pytest.raises(RecipeError, match="other settings"):
        trained(tmp_path, training.model_copy(update={"seed": 1}))
    with pytest.raises(RecipeError, match="other settings"):
        trained(tmp_path, training, setup="noisy prompts")


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    training = InContextTraining(steps=1, batch=4)
    with pytest.raises(UsageError, match="toaster"):
        train_in_context(
            regressor(), lambda _: torch.zeros(()), dict, training, tmp_path, device="toaster"
        )
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    model = regressor()
    with torch.no_grad():
        model.read_out.bias.fill_(torch.inf)
    with pytest.raises(DivergenceError, match="step 1"):
        trained(tmp_path, InContextTraining(steps=2, batch=4), model)
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.slow
def test_shifted_attention_learns_in_context_in_480_steps_and_plain_does_not(
    tmp_path: Path,
) -> None:
    """Acceptance of the small version of Figure 2: d = 3, H = 12, one layer."""
    task = RegressionTask(3, 12)
    training = InContextTraining(steps=480, learning_rate=5e-3, log_every=480)
    found = {
        layout: trained(tmp_path / layout, training, regressor(layout, task), task)[1][-1]["last"]
        for layout in ("shifted", "lagged")
    }
    assert found["shifted"] < 0.45 * task.null_loss
    assert found["lagged"] > 0.7 * task.null_loss
