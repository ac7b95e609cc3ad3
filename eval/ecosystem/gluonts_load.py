"""A gluonts predictor around a chronos pipeline, written to disk and read back by gluonts.

gluonts 0.17 has no Chronos of its own; this is how its users wrap one, and how its evaluation,
which tscompress uses too, takes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job
import numpy as np
import pandas as pd
import torch
from gluonts.core.component import validated
from gluonts.dataset.common import Dataset, ListDataset
from gluonts.dataset.util import forecast_start
from gluonts.model.forecast import Forecast, QuantileForecast, SampleForecast
from gluonts.model.predictor import Predictor, RepresentablePredictor


class ChronosPredictor(RepresentablePredictor):
    """Forecasts of any Chronos checkpoint, all series in one batch."""

    @validated()
    def __init__(
        self, checkpoint: str, prediction_length: int, quantile_levels: list[float], seed: int
    ) -> None:
        super().__init__(prediction_length=prediction_length)
        self.checkpoint = checkpoint
        self.quantile_levels = quantile_levels
        self.seed = seed

    def predict(self, dataset: Dataset, **kwargs: Any) -> Iterator[Forecast]:
        from chronos import BaseChronosPipeline, ForecastType

        pipeline = BaseChronosPipeline.from_pretrained(self.checkpoint)
        entries = list(dataset)
        series = [torch.from_numpy(entry["target"]) for entry in entries]
        torch.manual_seed(self.seed)
        if pipeline.forecast_type is ForecastType.SAMPLES:
            samples = pipeline.predict(series, self.prediction_length).numpy()
            for entry, values in zip(entries, samples, strict=True):
                yield SampleForecast(values, start_date=forecast_start(entry))
            return
        quantiles, _ = pipeline.predict_quantiles(
            series, self.prediction_length, quantile_levels=self.quantile_levels
        )
        # Chronos-2 has a dimension of variates more.
        shape = (len(series), self.prediction_length, len(self.quantile_levels))
        for entry, values in zip(entries, np.stack(quantiles).reshape(shape), strict=True):
            yield QuantileForecast(
                values.T,
                start_date=forecast_start(entry),
                forecast_keys=[str(level) for level in self.quantile_levels],
            )


def ways(task: job.Job) -> Iterator[job.Way]:
    kind: job.Kind = "samples" if task.family == "chronos-t5" else "quantiles"
    yield job.Way("RepresentablePredictor, serialized", kind, lambda: forecast(task))


def forecast(task: job.Job) -> Any:
    dataset = ListDataset(
        [{"start": pd.Period(task.start, "M"), "target": values} for values in task.series],
        freq="M",
    )
    predictor = ChronosPredictor(
        checkpoint=task.checkpoint,
        prediction_length=task.horizon,
        quantile_levels=task.quantile_levels,
        seed=task.seed,
    )
    with tempfile.TemporaryDirectory() as directory:
        predictor.serialize(Path(directory))
        found = list(Predictor.deserialize(Path(directory)).predict(dataset))
    if task.family == "chronos-t5":
        return np.stack([one.samples for one in found])
    return np.stack(
        [[one.quantile(level) for level in task.quantile_levels] for one in found]
    ).swapaxes(1, 2)


if __name__ == "__main__":
    job.main(ways)
