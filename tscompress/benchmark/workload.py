"""One ``predict`` call: its sizes, its series and the settings that it runs under."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from chronos import BaseChronosPipeline
from pydantic import Field, ValidationError

from tscompress.errors import RecipeError, UsageError
from tscompress.families.groups import kind_of, reads_covariates
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.quiet import quiet_horizons
from tscompress.io.seeds import kept_random_state, seed_
from tscompress.io.strict import Strict
from tscompress.io.text import counted


class Workload(Strict):
    """Sizes of one ``predict`` call, and how often it is timed."""

    batch_size: int = Field(default=32, ge=1, le=10**6, description="series")
    context_length: int = Field(
        default=512, ge=1, le=10**7, description="time steps of each series"
    )
    horizon: int = Field(default=64, ge=1, le=10**6, description="time steps forecast")
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1, le=4096, description="None: as PyTorch is set")
    repeats: int = Field(
        default=20, ge=1, le=10**6, description="timed rounds; each model runs once in each"
    )
    warmup: int = Field(default=3, ge=0, le=10**6, description="untimed runs of each model")
    num_samples: int | None = Field(
        default=None,
        ge=1,
        le=10**5,
        description="sample paths, Chronos-T5 only; None: the model's own",
    )
    cross_learning: bool = Field(
        default=False, description="series see one another, Chronos-2 only"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the series and of the sampling")

    def on(self, device: str | torch.device) -> Workload:
        """The same on another device, of which the type counts."""
        return self.model_copy(update={"device": torch.device(device).type})

    def words(self) -> list[str]:
        """What is unlike the default, of the forecast."""
        samples = [] if self.num_samples is None else [counted(self.num_samples, "sample path")]
        return [*samples, *(["cross-learning"] if self.cross_learning else [])]


def make_workload(fields: Mapping[str, Any]) -> Workload:
    """Validate ``fields`` into a workload.

    Raises
    ------
    RecipeError
        A key, type or value is wrong. The message is one line and names each of them.
    """
    try:
        return Workload.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"
            for problem in error.errors()
        )
        raise RecipeError(
            f"invalid workload: {problems}; allowed keys: {sorted(Workload.model_fields)}."
        ) from error


def synthetic_batch(workload: Workload) -> torch.Tensor:
    """Noisy daily cycles without missing values, float32 ``[batch_size, context_length]``."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch_size, workload.context_length)
    phase = 2 * math.pi * torch.rand(shape[0], 1, generator=generator)
    angle = 2 * math.pi / 24 * torch.arange(shape[1])[None, :]
    noise = torch.randn(shape, generator=generator)
    return 10 + torch.sin(angle + phase) + 0.3 * noise


def forecast(pipeline: BaseChronosPipeline, series: torch.Tensor, workload: Workload) -> None:
    """One ``predict`` call on ``series`` ``[B, T]``, from a fixed seed."""
    seed_(workload.seed, workload.device)
    family = adapter_of_pipeline(pipeline)
    if workload.cross_learning:
        family.predict_together(pipeline, series, workload.horizon)
        return
    family.predict(pipeline, series, workload.horizon, workload.num_samples)


def check_fits(pipeline: BaseChronosPipeline, label: str, workload: Workload) -> None:
    """Raise UsageError for a call that would be measured wrongly without notice."""
    if workload.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda' but PyTorch finds no CUDA device; use device 'cpu'.")
    if workload.cross_learning and not reads_covariates(pipeline):
        raise UsageError(
            f"{label} is a {kind_of(pipeline)}, which forecasts each series alone; leave out "
            "cross-learning."
        )
    model = pipeline.inner_model
    device = next(model.parameters()).device.type
    if device != workload.device:
        raise UsageError(
            f"{label} is on {device!r} but the workload's device is {workload.device!r}; "
            f"load it with device={workload.device!r}."
        )
    if model.training:
        raise UsageError(f"{label} is in training mode, dropout included; call .eval() first.")
    if workload.context_length > pipeline.model_context_length:
        raise UsageError(
            f"context_length is {workload.context_length} but {label} reads only the last "
            f"{counted(pipeline.model_context_length, 'step')}; ask for that or less, as by "
            "--context-length."
        )


def check_sampling(pipelines: Iterable[BaseChronosPipeline], num_samples: int | None) -> None:
    """Refuse a number of sample paths that was asked for where no model draws any.

    A :class:`Workload` in Python may have one all the same, as it serves models of all families;
    the options of a command and the ``bench`` of a recipe are of the models that they name.

    Raises
    ------
    UsageError
    """
    pipelines = list(pipelines)
    if num_samples is None or any(adapter_of_pipeline(one).draws_samples for one in pipelines):
        return
    kinds = " and ".join(sorted({kind_of(one) for one in pipelines}))
    raise UsageError(
        f"num_samples is {num_samples}, and {kinds} forecasts quantiles, not samples; leave "
        "num_samples out."
    )


@contextmanager
def settings(workload: Workload) -> Iterator[None]:
    """Set the workload's threads; restore threads, random state and warnings on leaving."""
    threads = torch.get_num_threads()
    with kept_random_state(workload.device):
        try:
            torch.set_num_threads(workload.threads or threads)
            with quiet_horizons():
                yield
        finally:
            torch.set_num_threads(threads)
