"""sktime's forecasters: its own copy of chronos, the package chronos, and Chronos-2.

They forecast one series at a time, as the median of samples or of quantiles, in bfloat16 unless
told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import job
import numpy as np
import pandas as pd
import torch


def ways(task: job.Job) -> Iterator[job.Way]:
    for dtype in ("bfloat16", "float32"):
        if task.family == "chronos-2":
            name = f"Chronos2Forecaster, {dtype}"
            yield job.Way(name, "median", lambda d=dtype: chronos2(task, d), dtype)
            continue
        for package in (False, True):
            source = "the package chronos" if package else "sktime's own copy"
            name = f"ChronosForecaster, {source}, {dtype}"
            yield job.Way(name, "median", lambda d=dtype, p=package: chronos(task, d, p), dtype)


def chronos(task: job.Job, dtype: str, package: bool) -> Any:
    from sktime.forecasting.chronos import ChronosForecaster

    return medians(
        task,
        lambda: ChronosForecaster(
            model_path=task.checkpoint,
            config={"torch_dtype": getattr(torch, dtype)},
            seed=task.seed,
            use_source_package=package,
        ),
    )


def chronos2(task: job.Job, dtype: str) -> Any:
    from sktime.forecasting.chronos2 import Chronos2Forecaster

    return medians(
        task,
        lambda: Chronos2Forecaster(
            model_path=task.checkpoint,
            config={"torch_dtype": getattr(torch, dtype)},
            seed=task.seed,
        ),
    )


def medians(task: job.Job, make: Any) -> Any:
    """[series, steps]"""
    found = []
    for values in task.series:
        index = pd.period_range(task.start, periods=len(values), freq="M")
        forecaster = make().fit(pd.Series(values, index=index))
        steps = list(range(1, task.horizon + 1))
        found.append(forecaster.predict(fh=steps).to_numpy().ravel())
    return np.stack(found)


if __name__ == "__main__":
    job.main(ways)
