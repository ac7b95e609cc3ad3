"""The batch of every step of a recovery, and the held-out ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tscompress.data.batch import ForecastBatch
from tscompress.data.multivariate import GroupsConfig, related_windows
from tscompress.data.series import DEFAULT_FORMAT
from tscompress.data.streaming import SeriesStream
from tscompress.data.synthetic import FloatArray, SyntheticCorpus
from tscompress.data.training_collections import training_series
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket, draw_bucket, split_windows

#: Most groups are driven by what is known ahead, whose use a cut costs most. Half of the drivers
#: are white noise, which follows from nothing else, so only its use is learnt.
_RELATIONS = GroupsConfig(
    share=0.9,
    known_share=0.8,
    white_share=0.5,
    least_share=0.5,
    driven_weight=0.5,
    events_weight=0.2,
    leading_weight=0.2,
    mixed_weight=0.05,
    unrelated_weight=0.05,
    cointegrated_weight=0,
)
_HELD_OUT_OF = 16  # one series of a wheel in this many is not trained on


class Batches:
    """The batch of every step; depends on the configuration, the series and the step alone.

    ``grouped``: whether the model can take several series in a group, if its family does.
    """

    def __init__(
        self,
        family: str,
        config: RecoveryConfig,
        series: Sequence[FloatArray] | str | Path | None = None,
        *,
        grouped: bool = True,
    ) -> None:
        assert config.buckets is not None
        # Without a share there is nothing but the corpus.
        self._given_share = 0.0 if config.synthetic_share is None else 1 - config.synthetic_share
        adapter = adapter_of(family)
        self.group_size = adapter.group_size if grouped else 1
        self.config, self.buckets = config, config.buckets
        real = training_series(config.real_series or ())
        as_given = adapter.defaults.real_weight is None
        in_corpus = [] if as_given else real
        kept = in_corpus[::_HELD_OUT_OF]
        trained = [series for i, series in enumerate(in_corpus) if i % _HELD_OUT_OF] or kept
        try:
            self.corpus = SyntheticCorpus(config.corpus, trained)
            self.held_out_corpus = SyntheticCorpus(config.corpus, kept)
        except ValueError as error:
            raise UsageError(f"{error}; give another corpus, or real_series for it.") from None
        sources: list[str | Path | Sequence[FloatArray]] = [*config.series]
        if series is not None:
            sources.append(series)
        known_apart = not sources  # a test asserts that no suite has a series of a wheel
        if real and as_given:
            sources.append(real)
        if not sources and config.synthetic_share == 0:
            raise UsageError("synthetic_share is 0 and there are no series; give series.")
        self.stream: SeriesStream | None = None
        if sources:
            longest = max(bucket.context_length + bucket.horizon for bucket in self.buckets)
            self.stream = SeriesStream(
                sources,
                longest=longest,
                seed=config.seed,
                form=config.series_format or DEFAULT_FORMAT,
                buffer_size=config.shuffle_series,
                known_apart=known_apart,
            )

    def at(self, step: int) -> ForecastBatch:
        """The batch of ``step``; steps must be asked for in order, see :meth:`skip`."""
        rng = np.random.default_rng([self.config.seed, step])
        bucket, given = self._draw(rng)
        rng.random()  # of an option that is gone: what follows stays as it was
        windows = self._given(step, bucket, given)
        return self._batch(rng, self.corpus, bucket, windows)

    def skip(self, steps: int) -> None:
        """Read past the series of the first ``steps`` steps, as a resumed run must."""
        for step in range(steps if self.stream is not None else 0):
            self._given(step, *self._draw(np.random.default_rng([self.config.seed, step])))

    def held_out(self) -> list[ForecastBatch]:
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
                given = math.ceil(rows * self._given_share)
                length = bucket.context_length + bucket.horizon
                windows = self.stream.sample_held_out(rng, given, length) if given else None
            batches.append(self._batch(rng, self.held_out_corpus, bucket, windows))
            count, index = count + rows, index + 1
        return batches

    def _draw(self, rng: np.random.Generator) -> tuple[Bucket, int]:
        """A batch shape, and how many of its series are given ones."""
        bucket = draw_bucket(rng, self.buckets)
        if self.stream is None:
            return bucket, 0
        return bucket, int(bucket.batch_size * self._given_share + rng.random())

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
    ) -> ForecastBatch:
        length = bucket.context_length + bucket.horizon
        parts = [] if given is None else [given]
        if missing := bucket.batch_size - sum(map(len, parts)):
            parts.append(corpus.sample(rng, missing, length))
        windows = with_history(np.concatenate(parts), bucket.horizon)  # [B, T + H]
        if self.group_size > 1:
            known = 0 if given is None else len(given)
            return self._grouped(rng, windows[known:], windows[:known], bucket.horizon)
        context, target = split_windows(
            rng, windows, bucket.context_length, self.config.missing_probability
        )
        return ForecastBatch(torch.from_numpy(context), torch.from_numpy(target))

    def _grouped(
        self, rng: np.random.Generator, windows: FloatArray, given: FloatArray, horizon: int
    ) -> ForecastBatch:
        """Windows ``[B, T + H]`` as related series, whose first steps are the past of a cause.

        Given ones stay as they are, each a task of its own; without others they are related.
        """
        if not len(windows):
            windows, given = given, windows
        groups = related_windows(rng, windows, horizon, self.group_size, _RELATIONS)
        # Last: no group may lie across two parts of the batch.
        groups = groups.with_alone(given[:, given.shape[1] - groups.series.shape[1] :])
        context, target = split_windows(
            rng,
            groups.series,
            groups.series.shape[1] - horizon,
            self.config.missing_probability,
            group_ids=groups.group_ids,
        )
        return groups.batch(context, target)


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
