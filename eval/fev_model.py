"""A compressed checkpoint as a model of fev, for results on fev-bench.

Copy this file to models/tscompress/model.py in a checkout of https://github.com/autogluon/fev, with
a requirements.txt of the one line `tscompress[fev]==<version>` beside it, and run there

    python models/evaluate.py -m tscompress -n chronos-bolt-small-compressed \
        -k '{"model_path": "me/chronos-bolt-small-compressed", "device": "cuda"}'

which evaluates on fev_bench_mini and leaves a CSV of summaries; fev's models/README.md says how to
submit it. `tscompress evaluate MODEL --suite fev:FILE` makes the same summaries without a checkout.
"""

from __future__ import annotations

from typing import Any

import fev

from tscompress.checkpoints.load import load
from tscompress.evaluation.fev_tasks import predict_task


class TSCompressModel(fev.ForecastingModel):
    """Chronos-T5, Chronos-Bolt or Chronos-2, compressed or not.

    Parameters
    ----------
    model_path
        Whatever `tscompress` loads: a Hub id or a directory.
    dtype
        Of the weights, e.g. float32 or bfloat16; by default as stored.
    trained_on
        Dataset configs of autogluon/fev_datasets that the original was trained on. Compression and
        recovery add none unless they were given some.
    """

    model_name = "tscompress"

    def __init__(
        self,
        model_path: str = "reference/bolt",
        device: str = "cpu",
        dtype: str | None = None,
        batch_size: int = 32,
        seed: int = 0,
        trained_on: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.trained_on_datasets = list(trained_on)
        self.batch_size = batch_size
        self.seed = seed
        self.pipeline = load(model_path, device=device, dtype=dtype).forecaster

    def _fit_predict(self, task: fev.Task) -> list[Any]:
        predictions, self.inference_time = predict_task(
            self.pipeline, task, batch_size=self.batch_size, seed=self.seed
        )
        return predictions
