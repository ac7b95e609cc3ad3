"""darts' Chronos2Model, a port of the model with a loader of its own, from a local directory.

darts 0.48 has no other Chronos. Its model has a fixed input length, so each series gets one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import job
import numpy as np
import pandas as pd


def ways(task: job.Job) -> Iterator[job.Way]:
    if task.family == "chronos-2":
        yield job.Way("Chronos2Model(local_dir=...)", "each", lambda: forecast(task))


def forecast(task: job.Job) -> Any:
    from darts import TimeSeries
    from darts.models import Chronos2Model
    from darts.utils.likelihood_models import QuantileRegression

    found = []
    for values in task.series:
        index = pd.date_range(task.start, periods=len(values), freq=task.freq)
        series = TimeSeries.from_series(pd.Series(values, index=index))
        model = Chronos2Model(
            input_chunk_length=len(values),
            output_chunk_length=task.horizon,
            likelihood=QuantileRegression(quantiles=task.quantile_levels),
            local_dir=task.checkpoint,
            pl_trainer_kwargs={"accelerator": "cpu", "logger": False},
        )
        model.fit(series)  # trains nothing
        predicted = model.predict(task.horizon, predict_likelihood_parameters=True)
        found.append(predicted.values())  # [steps, levels]
    return np.stack(found)


if __name__ == "__main__":
    job.main(ways)
