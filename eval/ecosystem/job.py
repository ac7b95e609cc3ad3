"""What every `*_load.py` shares: its command line, the series it forecasts, the file it leaves.

These scripts run in environments without tscompress, so this imports numpy alone at the top.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
#: What a forecast is, so that tscompress can be asked for the same one.
#: ``quantiles``: [series, steps, levels]. ``each``: the same, every series in a batch of its own.
#: ``samples``: [series, samples, steps]. ``median``: [series, steps], of samples or quantiles,
#: every series by itself and from the same seed. ``logits``: [series, steps, vocabulary].
Kind = Literal["quantiles", "each", "samples", "median", "logits"]


@dataclass(frozen=True)
class Job:
    """A checkpoint, and monthly series to forecast with it."""

    checkpoint: str
    family: Literal["chronos-t5", "chronos-bolt", "chronos-2"]
    series: list[FloatArray]  # each [T_i]
    future: list[FloatArray]  # each [horizon]: what really came
    start: str
    freq: str
    quantile_levels: list[float]
    seed: int

    @property
    def horizon(self) -> int:
        return len(self.future[0])


@dataclass(frozen=True)
class Way:
    """One way in which a library loads a checkpoint and forecasts.

    Attributes
    ----------
    name
        As a user of the library would call it.
    forecast
        Loads and forecasts.
    dtype
        That the model is loaded in; None for the one on disk.
    cross_learning
        Chronos-2 lets the series of a batch see each other.
    data_loader
        Batches come from a torch ``DataLoader``, which draws a number for its workers' seed before
        the model draws its first.
    """

    name: str
    kind: Kind
    forecast: Callable[[], Any]
    dtype: str | None = None
    cross_learning: bool = False
    data_loader: bool = False


def read_job(path: Path, checkpoint: str) -> Job:
    values = json.loads(path.read_text())
    arrays = {
        name: [np.array(one, dtype=np.float32) for one in values.pop(name)]
        for name in ("series", "future")
    }
    families = values.pop("families")
    return Job(checkpoint=checkpoint, family=families[checkpoint], **arrays, **values)


def tokens(job: Job) -> list[list[int]]:
    """Tokens that every Chronos-T5 of the references' vocabulary has, [series, 64]."""
    return np.random.default_rng(job.seed).integers(2, 4096, (len(job.series), 64)).tolist()


def pipeline_forecast(pipeline: Any, job: Job) -> Any:
    """Quantiles, or raw samples of a Chronos-T5, as chronos' own pipelines give them."""
    import torch

    series = [torch.from_numpy(values) for values in job.series]
    torch.manual_seed(job.seed)
    if job.family == "chronos-t5":
        return pipeline.predict(series, job.horizon)
    levels = job.quantile_levels
    return pipeline.predict_quantiles(series, job.horizon, quantile_levels=levels)[0]


def main(ways: Callable[[Job], Iterable[Way]]) -> None:
    """Forecast in each way; leave the forecasts, and of those that failed the error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", help="a directory")
    parser.add_argument("series", type=Path, help="JSON that run.py wrote")
    parser.add_argument("output", type=Path, help="NPZ of forecasts; their story in .json")
    parser.add_argument("--register", help="a module to import before anything is loaded")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.register:
        importlib.import_module(arguments.register)
    elif importlib.util.find_spec("tscompress") is not None:
        raise SystemExit("tscompress is installed here: this would not show what the library does.")
    import torch

    torch.set_num_threads(1)  # both sides add in the same order
    job = read_job(arguments.series, arguments.checkpoint)
    forecasts, stories = {}, {}
    for way in ways(job):
        story = {
            "kind": way.kind,
            "dtype": way.dtype,
            "cross_learning": way.cross_learning,
            "data_loader": way.data_loader,
        }
        try:
            forecasts[way.name] = np.asarray(way.forecast(), dtype=np.float32)
        except Exception as error:  # whatever a library says is its answer
            story["error"] = f"{type(error).__name__}: {error}"
        stories[way.name] = story
    partial = arguments.output.with_suffix(".partial.npz")
    np.savez(partial, **forecasts)
    arguments.output.with_suffix(".json").write_text(json.dumps(stories))
    os.replace(partial, arguments.output)  # noqa: PTH105  (last: it says that all is there)
