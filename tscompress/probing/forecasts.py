"""Forecasts of a probed model for the series of a task, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from chronos import BaseChronosPipeline

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.batching import BatchSize
from tscompress.evaluation.forecasting import predict
from tscompress.evaluation.metrics import Quantiles
from tscompress.families.covariates import Covariates
from tscompress.families.registry import adapter_of_pipeline
from tscompress.probing.processes import Array


class Named(Protocol):
    """A task, of whichever kind."""

    @property
    def name(self) -> str:
        """Also the stream of random numbers."""

    @property
    def horizon(self) -> int:
        """Steps to forecast."""


@dataclass(frozen=True)
class Forecaster:
    """A pipeline, and how it is asked.

    Attributes
    ----------
    name
        Of the model, for messages.
    seed
        Of the sample paths of Chronos-T5.
    batch_size, num_samples
        See :func:`tscompress.evaluation.forecasting.forecast`.
    """

    pipeline: BaseChronosPipeline
    name: str
    seed: int
    batch_size: BatchSize
    num_samples: int | None

    def quantiles(
        self, task: Named, context: Array, covariates: Array | None = None, known: int = 0
    ) -> Quantiles:
        """Quantiles 0.1 … 0.9 of series, ``[N, 9, H]``.

        Parameters
        ----------
        context
            ``[N, T]``; missing values are NaN.
        covariates
            ``[N, C, T + H]``, the first ``known`` of them known ahead; None: without any.

        Raises
        ------
        UsageError
            The pipeline returns fewer steps than asked for.
        DataError
            A forecast is not finite.
        """
        values = predict(
            self.pipeline,
            list(context),
            task.horizon,
            self.seed,
            self.batch_size,
            num_samples=self.num_samples,
            stream=task.name,
            covariates=_split(covariates, known, context.shape[1]),
        )
        if values.shape[-1] < task.horizon:
            raise UsageError(
                f"{self.name!r} forecasts {values.shape[-1]} steps, and the task {task.name!r} "
                f"asks for {task.horizon}; choose other tasks."
            )
        if adapter_of_pipeline(self.pipeline).draws_samples:
            # Unlike gluonts, whose median of an even number of paths is the upper of the middle
            # two.
            values = np.quantile(values, QUANTILE_LEVELS, axis=1).swapaxes(0, 1)
        if not np.isfinite(values).all():
            raise DataError(
                f"{self.name!r} forecasts NaN or infinity at the task {task.name!r}; check the "
                "checkpoint, or its dtype."
            )
        return np.asarray(values, dtype=np.float64)


def _split(covariates: Array | None, known: int, length: int) -> Sequence[Covariates] | None:
    """Of each series, as models take them; None without any."""
    if covariates is None:
        return None
    values = torch.as_tensor(covariates, dtype=torch.float32)  # [N, C, T + H]
    return [Covariates(rows[:, :length], rows[:known, length:]) for rows in values]
