"""A fev task on a local Parquet file: chronos' own `predict_fev`, and a loop over the windows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fev
import job
import numpy as np
import pandas as pd
import torch


class ChronosCheckpoint(fev.ForecastingModel):
    """The adapter that fev's benchmarks call, around `predict_fev` of a chronos pipeline."""

    model_name = "chronos-checkpoint"

    def __init__(self, checkpoint: str, seed: int) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.seed = seed

    def _fit_predict(self, task: fev.Task) -> list[datasets.DatasetDict]:
        from chronos import BaseChronosPipeline

        pipeline = BaseChronosPipeline.from_pretrained(self.checkpoint)
        torch.manual_seed(self.seed)
        predictions, self.inference_time = pipeline.predict_fev(task)
        return predictions


def ways(task: job.Job) -> Iterator[job.Way]:
    yield job.Way("ForecastingModel, predict_fev", "quantiles", lambda: by_adapter(task))
    yield job.Way("Task.iter_windows", "quantiles", lambda: by_windows(task))


def by_adapter(task: job.Job) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        fev_task = make_task(task, Path(directory))
        model = ChronosCheckpoint(task.checkpoint, task.seed)
        predictions = model.fit_predict(fev_task)
        return scored(fev_task, predictions, task)


def by_windows(task: job.Job) -> Any:
    from chronos import BaseChronosPipeline

    pipeline = BaseChronosPipeline.from_pretrained(task.checkpoint)
    levels = task.quantile_levels
    torch.manual_seed(task.seed)
    with tempfile.TemporaryDirectory() as directory:
        fev_task = make_task(task, Path(directory))
        predictions = []
        for window in fev_task.iter_windows():
            past, _ = window.get_input_data()
            series = [torch.tensor(values, dtype=torch.float32) for values in past["target"]]
            found, _ = pipeline.predict_quantiles(series, task.horizon, quantile_levels=levels)
            # Chronos-2 has a dimension of variates more.
            quantiles = np.stack(found).reshape(len(series), task.horizon, len(levels))
            predictions.append(
                [
                    {
                        "predictions": values[:, levels.index(0.5)],
                        **{str(level): values[:, i] for i, level in enumerate(levels)},
                    }
                    for values in quantiles
                ]
            )
        return scored(fev_task, predictions, task)


def make_task(task: job.Job, directory: Path) -> fev.Task:
    """One window: the last steps of every series, which end where the forecasts do."""
    rows = [
        {
            "id": str(index),
            "timestamp": pd.date_range(task.start, periods=len(past) + task.horizon, freq="MS"),
            "target": np.concatenate([past, future]),
        }
        for index, (past, future) in enumerate(zip(task.series, task.future, strict=True))
    ]
    path = directory / "series.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return fev.Task(
        dataset_path=str(path),
        horizon=task.horizon,
        seasonality=12,
        eval_metric="MASE",
        extra_metrics=["WQL"],
        quantile_levels=task.quantile_levels,
    )


def scored(fev_task: fev.Task, predictions: list[Any], task: job.Job) -> Any:
    """The quantiles, [series, steps, levels], once fev has scored them."""
    summary = fev_task.evaluation_summary(predictions, model_name="checkpoint")
    if not math.isfinite(summary["test_error"]):
        raise ValueError(f"fev scored the forecasts {summary['test_error']}")
    (found,) = predictions
    rows = found["target"] if isinstance(found, datasets.DatasetDict) else found
    return np.stack([[row[str(level)] for level in task.quantile_levels] for row in rows]).swapaxes(
        1, 2
    )


if __name__ == "__main__":
    job.main(ways)
