"""Pipelines around exported models: the stock interface, computed by onnxruntime."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from chronos import Chronos2Pipeline, ChronosBoltPipeline
from torch import Tensor, nn

from tscompress.families.registry import build_empty
from tscompress.runtime.chronos2 import Chronos2Forecaster
from tscompress.runtime.chronos_bolt import ChronosBoltForecaster
from tscompress.runtime.contexts import Task, stacked, tasks_of
from tscompress.runtime.forecaster import Forecaster
from tscompress.runtime.load import load
from tscompress.runtime.record import GRAPH_FILE


class ExportedModel(nn.Module):
    """Config and identity of an exported model, in the place of the model that it was.

    Attributes
    ----------
    config, chronos_config
        As of the stock model.
    graph_sha256, onnxruntime
        What its forecasts depend on: the graph, and a version; for caches.
    weights, graph_bytes
        Parameters of the model that was exported; bytes of the graph.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        super().__init__()
        stock: Any = build_empty(forecaster.record.family, forecaster.record.config)
        self.config, self.chronos_config = stock.config, stock.chronos_config
        self.graph_sha256 = forecaster.record.graph_sha256
        self.weights = forecaster.record.parameters
        self.graph_bytes = (forecaster.directory / GRAPH_FILE).stat().st_size
        self.onnxruntime = importlib.metadata.version("onnxruntime")
        # Forecasts are float32 on the CPU, as this says; the weights are in the graph.
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.place.device


class _Threads:
    """Gives onnxruntime as many threads as torch is set to."""

    forecaster: Any

    def _on_threads(self) -> Any:
        threads = torch.get_num_threads()
        if self.forecaster.threads != threads:
            self.forecaster = load(self.forecaster.directory, threads=threads)
        return self.forecaster


class ExportedBoltPipeline(_Threads, ChronosBoltPipeline):  # type: ignore[misc]
    """An exported Chronos-Bolt as the stock pipeline."""

    def __init__(self, forecaster: ChronosBoltForecaster) -> None:
        super().__init__(model=ExportedModel(forecaster))
        self.forecaster = forecaster

    def predict(
        self,
        inputs: Tensor | list[Tensor],
        prediction_length: int | None = None,
        limit_prediction_length: bool = False,
    ) -> Tensor:
        """Quantiles ``[B, Q, H]``, as the stock pipeline's."""
        context = self._prepare_and_validate_context(inputs).numpy().astype(np.float32)
        steps = _steps(self.forecaster, prediction_length, limit_prediction_length)
        return torch.from_numpy(self._on_threads().forecast(context, steps).copy())


class ExportedChronos2Pipeline(_Threads, Chronos2Pipeline):  # type: ignore[misc]
    """An exported Chronos-2 as the stock pipeline, for series and groups of them."""

    def __init__(self, forecaster: Chronos2Forecaster) -> None:
        super().__init__(model=ExportedModel(forecaster))
        self.forecaster = forecaster

    def predict(
        self,
        inputs: Tensor | Sequence[Any],
        prediction_length: int | None = None,
        batch_size: int = 256,
        context_length: int | None = None,
        cross_learning: bool = False,
        limit_prediction_length: bool = False,
    ) -> list[Tensor]:
        """Quantiles ``[R, Q, H]`` of each task: ``[T]``, ``[R, T]``, or one with covariates."""
        steps = _steps(self.forecaster, prediction_length, limit_prediction_length)
        read = context_length or self.forecaster.context_length
        tasks = _tasks(inputs, steps)
        tasks = [Task(one.context[:, -read:], one.future, one.targets) for one in tasks]
        found = self._on_threads().forecast(
            tasks, steps, batch_size=batch_size, cross_learning=cross_learning
        )
        return [torch.from_numpy(one.copy()) for one in found]


_PIPELINES: Mapping[type[Forecaster], Any] = {
    ChronosBoltForecaster: ExportedBoltPipeline,
    Chronos2Forecaster: ExportedChronos2Pipeline,
}


def exported_pipeline(forecaster: Forecaster) -> Any:
    """The stock interface of an exported model."""
    return _PIPELINES[type(forecaster)](forecaster)


def _tasks(inputs: Tensor | Sequence[Any], steps: int) -> list[Task]:
    """Tasks; targets without covariates are not checked, as in the stock pipeline."""
    if isinstance(inputs[0], Mapping):
        if "context" in inputs[0]:  # as chronos-forecasting prepares data frames
            return [
                Task(one["context"].numpy(), one["future_covariates"].numpy(), one["n_targets"])
                for one in inputs
            ]
        return tasks_of(list(inputs), steps)
    rows = [stacked([np.asarray(one, np.float32)]) for one in inputs]
    return [Task(one, np.full((len(one), steps), np.nan, np.float32), len(one)) for one in rows]


def _steps(forecaster: Forecaster, steps: int | None, limited: bool) -> int:
    longest = forecaster.prediction_length
    steps = longest if steps is None else steps
    if limited and steps > longest:
        raise ValueError(f"prediction_length is {steps}; one call has {longest} steps.")
    return steps
