"""Pipelines around exported models: the stock interface, computed by onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from chronos import Chronos2Pipeline, ChronosBoltPipeline, ChronosPipeline
from chronos.chronos import ChronosConfig, ChronosModel
from numpy.typing import NDArray
from torch import Tensor, nn

from tscompress.families.registry import build_empty
from tscompress.runtime.chronos2 import Chronos2Forecaster
from tscompress.runtime.chronos_bolt import ChronosBoltForecaster
from tscompress.runtime.chronos_t5 import ChronosT5Forecaster
from tscompress.runtime.contexts import Task, stacked, tasks_of
from tscompress.runtime.forecaster import Forecaster
from tscompress.runtime.graph import imported_onnxruntime
from tscompress.runtime.load import load
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.sampling import Sampling, drawn
from tscompress.runtime.tokens import IntArray
from tscompress.runtime.univariate import UnivariateForecaster


class ExportedModel(nn.Module):
    """Config and identity of an exported model, in the place of the model that it was.

    Attributes
    ----------
    config, chronos_config
        As of the stock model, if it has one.
    graph_sha256, onnxruntime
        What its forecasts depend on: the graphs, and a version; for caches.
    weights, graph_bytes
        Parameters of the model that was exported; bytes of the graphs.
    univariate
        Whether it takes only series that are groups of their own.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        super().__init__()
        stock: Any = build_empty(forecaster.record.family, forecaster.record.config)
        self.config, self.chronos_config = stock.config, getattr(stock, "chronos_config", None)
        self.graph_sha256 = forecaster.record.graph_sha256
        self.weights = forecaster.record.parameters
        self.univariate = forecaster.record.univariate
        files = [forecaster.directory / name for name in forecaster.record.graphs]
        # One that is missing is refused by its name where it is read.
        self.graph_bytes = sum(file.stat().st_size for file in files if file.is_file())
        self.onnxruntime = imported_onnxruntime().__version__
        # Records that forecasts are float32 on the CPU; the weights are in the graph.
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


def open_on_threads(pipeline: object) -> None:
    """Open an exported model for torch's number of threads, as its next forecast would."""
    if isinstance(pipeline, _Threads):
        pipeline._on_threads()


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
        context = _values(self._prepare_and_validate_context(inputs))
        steps = _steps(self.forecaster, prediction_length, limit_prediction_length)
        # As the stock pipeline, in one call.
        found = self._on_threads().forecast(context, steps, batch_size=len(context))
        return torch.from_numpy(found.copy())


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


class ExportedT5Pipeline(_Threads, ChronosPipeline):  # type: ignore[misc]
    """An exported Chronos-T5 as the stock pipeline.

    Attributes
    ----------
    draws_as_source
        Whether tokens are drawn with the random numbers that the stock pipeline draws them with,
        which takes longer than a step of a small model; otherwise numpy's, of torch's seed.
    """

    def __init__(self, forecaster: ChronosT5Forecaster) -> None:
        model = ExportedModel(forecaster)
        config = ChronosConfig(**model.config.chronos_config)
        super().__init__(config.create_tokenizer(), ChronosModel(config=config, model=model))
        self.forecaster = forecaster
        self.draws_as_source = False

    def predict(
        self,
        inputs: Tensor | list[Tensor],
        prediction_length: int | None = None,
        num_samples: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        limit_prediction_length: bool = False,
    ) -> Tensor:
        """Paths ``[B, P, H]``, as the stock pipeline's."""
        context = _values(self._prepare_and_validate_context(inputs))
        steps = _steps(self.forecaster, prediction_length, limit_prediction_length)
        settings = self.forecaster.record.settings
        sampling = Sampling.of(settings, temperature=temperature, top_k=top_k, top_p=top_p)
        choose = partial(_drawn_by_torch, sampling) if self.draws_as_source else _Seeded(sampling)
        paths = num_samples or settings["num_samples"]
        return torch.from_numpy(self._on_threads().forecast(context, steps, paths, choose))


@contextmanager
def draws_as_source(pipeline: Any) -> Iterator[None]:
    """Inside the block, an exported model that samples draws with its source's random numbers.

    Of other pipelines, nothing changes.
    """
    if not isinstance(pipeline, ExportedT5Pipeline):
        yield
        return
    before, pipeline.draws_as_source = pipeline.draws_as_source, True
    try:
        yield
    finally:
        pipeline.draws_as_source = before


class _Seeded:
    """Tokens by numpy's random numbers, of a seed that is torch's next."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.draw = np.random.default_rng(int(torch.randint(2**62, ())))

    def __call__(self, logits: FloatArray) -> IntArray:
        return drawn(self.sampling, logits, self.draw.random(len(logits)))


def _drawn_by_torch(sampling: Sampling, logits: FloatArray) -> IntArray:
    """Tokens ``[N]`` by torch's random numbers, in the order of the stock pipeline."""
    tokens, scores = sampling.candidates(logits)
    probabilities = np.zeros_like(logits)
    chosen = torch.from_numpy(scores).softmax(-1).numpy()
    np.put_along_axis(probabilities, tokens, chosen, axis=1)
    found: IntArray = torch.multinomial(torch.from_numpy(probabilities), 1)[:, 0].numpy()
    return found


_PIPELINES: Mapping[type[Forecaster], Any] = {
    ChronosBoltForecaster: ExportedBoltPipeline,
    Chronos2Forecaster: ExportedChronos2Pipeline,
    UnivariateForecaster: ExportedChronos2Pipeline,
    ChronosT5Forecaster: ExportedT5Pipeline,
}


def exported_pipeline(forecaster: Forecaster) -> Any:
    """The stock interface of an exported model."""
    return _PIPELINES[type(forecaster)](forecaster)


def _values(series: Tensor) -> NDArray[np.float32]:
    """From whatever device and dtype."""
    values: NDArray[np.float32] = series.detach().to("cpu", torch.float32).numpy()
    return values


def _tasks(inputs: Tensor | Sequence[Any], steps: int) -> list[Task]:
    """Tasks; targets may have no values, as in the stock pipeline."""
    if isinstance(inputs[0], Mapping):
        if "context" in inputs[0]:  # as chronos-forecasting prepares data frames
            return [
                Task(one["context"].numpy(), one["future_covariates"].numpy(), one["n_targets"])
                for one in inputs
            ]
        return tasks_of(list(inputs), steps, None)
    values = (_values(one) if isinstance(one, Tensor) else one for one in inputs)
    rows = [stacked([np.asarray(one, np.float32)]) for one in values]
    return [Task(one, np.full((len(one), steps), np.nan, np.float32), len(one)) for one in rows]


def _steps(forecaster: Forecaster, steps: int | None, limited: bool) -> int:
    longest = forecaster.prediction_length
    steps = longest if steps is None else steps
    if limited and steps > longest:
        raise ValueError(f"prediction_length is {steps}; one call has {longest} steps.")
    return steps
