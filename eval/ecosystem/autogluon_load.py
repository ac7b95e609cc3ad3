"""AutoGluon-TimeSeries: `TimeSeriesPredictor.fit` with a checkpoint as `model_path`, on a CPU."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import job
import numpy as np
import pandas as pd


def ways(task: job.Job) -> Iterator[job.Way]:
    if task.family == "chronos-2":
        # Its default: the series of a batch see each other.
        yield job.Way("Chronos2", "quantiles", lambda: forecast(task, "Chronos2"), None, True)
    else:
        yield job.Way("Chronos", "quantiles", lambda: forecast(task, "Chronos"), data_loader=True)


def forecast(task: job.Job, model: str) -> Any:
    """[series, steps, levels], from a predictor that was saved and loaded again."""
    from autogluon.timeseries import TimeSeriesDataFrame, TimeSeriesPredictor

    frame = TimeSeriesDataFrame.from_data_frame(
        pd.concat(
            pd.DataFrame(
                {
                    "item_id": str(index),
                    "timestamp": pd.date_range(task.start, periods=len(values), freq=task.freq),
                    "target": values,
                }
            )
            for index, values in enumerate(task.series)
        )
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autogluon").addHandler(handler)
    with tempfile.TemporaryDirectory() as directory:
        predictor = TimeSeriesPredictor(
            prediction_length=task.horizon,
            freq=task.freq,
            quantile_levels=task.quantile_levels,
            path=directory,
        )
        try:
            predictor.fit(
                frame,
                hyperparameters={model: {"model_path": task.checkpoint, "device": "cpu"}},
                enable_ensemble=False,
                skip_model_selection=True,
            )
            predictor = TimeSeriesPredictor.load(directory)
            predictor.persist()  # before the seed is set: to load takes random numbers too
            found = predictor.predict(frame, random_seed=task.seed)
        except Exception as error:
            # It logs why a model failed, and raises that none is left.
            reasons = re.findall(
                r"^\s*(\w*(?:Error|Exception): .*)$", "\n".join(said), re.MULTILINE
            )
            if not reasons:
                raise
            raise RuntimeError(reasons[-1]) from error
    columns = [str(level) for level in task.quantile_levels]
    return np.stack([found.loc[str(i)][columns].to_numpy() for i in range(len(task.series))])


if __name__ == "__main__":
    job.main(ways)
