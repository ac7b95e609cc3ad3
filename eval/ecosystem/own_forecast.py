"""What tscompress itself forecasts, in the environment of the library it is compared with.

Two releases of transformers round a bfloat16 model differently, so both sides run on the same one.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import job
import numpy as np
import torch

import tscompress


def forecast(task: job.Job, request: dict[str, Any]) -> Any:
    """The same as a :class:`job.Way` of this kind, dtype and cross-learning."""
    loaded = tscompress.load(task.checkpoint, dtype=request["dtype"])
    if request["kind"] == "logits":
        tokens = torch.tensor(job.tokens(task))
        with torch.no_grad():
            found = loaded.model(input_ids=tokens, decoder_input_ids=tokens[:, : task.horizon])
        return found.logits.float()
    pipeline: Any = loaded.forecaster
    if request["kind"] == "samples":
        return job.pipeline_forecast(pipeline, task)
    series = [torch.from_numpy(values) for values in task.series]
    if request["kind"] == "median":
        return np.stack([median_of(pipeline, values, task) for values in series])
    options: dict[str, Any] = {"quantile_levels": task.quantile_levels}
    if request["cross_learning"]:
        options["cross_learning"] = True
    batches = [series] if request["kind"] == "quantiles" else [[values] for values in series]
    found = []
    for batch in batches:
        torch.manual_seed(task.seed)
        if request["data_loader"]:
            torch.empty((), dtype=torch.int64).random_()
        found.extend(pipeline.predict_quantiles(batch, task.horizon, **options)[0])
    # Chronos-2 has a dimension of variates more.
    return np.stack(found).reshape(len(series), task.horizon, len(task.quantile_levels))


def median_of(pipeline: Any, values: torch.Tensor, task: job.Job) -> Any:
    """[steps]: the middle of samples or of quantiles."""
    torch.manual_seed(task.seed)
    if task.family == "chronos-2":
        found = pipeline.predict([values], task.horizon)[0][0]  # [quantiles, steps]
        return found[pipeline.quantiles.index(0.5)].numpy()
    return np.median(pipeline.predict(values, task.horizon)[0].numpy(), axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a directory")
    parser.add_argument("series", type=Path, help="JSON that run.py wrote")
    parser.add_argument(
        "requests", type=Path, help="JSON: name to kind, dtype and the rest of a Way"
    )
    parser.add_argument("output", type=Path, help="NPZ of forecasts by name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # both sides add in the same order
    task = job.read_job(arguments.series, arguments.checkpoint)
    requests = json.loads(arguments.requests.read_text())
    found = {
        name: np.asarray(forecast(task, request), dtype=np.float32)
        for name, request in requests.items()
    }
    partial = arguments.output.with_suffix(".partial.npz")
    np.savez(partial, **found)
    os.replace(partial, arguments.output)  # noqa: PTH105  (last: it says that all is there)


if __name__ == "__main__":
    main()
