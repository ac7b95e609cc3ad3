"""The batch of every step of a pretraining; depends on nothing but the recipe and the step."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tscompress.data.batch import ForecastBatch
from tscompress.data.multivariate import draw_groups
from tscompress.data.synthetic import SyntheticCorpus
from tscompress.data.training_collections import training_series
from tscompress.errors import RecipeError
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.windows import draw_bucket, split_windows

#: Signals that processes drawing batches leave to the training.
_LEFT = (signal.SIGINT, signal.SIGTERM)


def stage_corpora(recipe: PretrainRecipe) -> list[SyntheticCorpus]:
    """The corpus of every stage.

    Raises
    ------
    RecipeError
        No series are left to draw.
    """
    real = training_series(recipe.real_series)
    try:
        return [SyntheticCorpus(stage.corpus or recipe.corpus, real) for stage in recipe.stages]
    except ValueError as error:
        raise RecipeError(f"corpus: {error}.") from None


def make_batch(
    recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], step: int
) -> ForecastBatch:
    """The batch of a step; depends on nothing but the recipe and the step."""
    rng = np.random.default_rng([recipe.seed, step])
    index = recipe.stage_at(step)
    stage, corpus = recipe.stages[index], corpora[index]
    bucket = draw_bucket(rng, stage.buckets)
    length, horizon = bucket.context_length, bucket.horizon
    if stage.horizon_multiple is not None:
        most = horizon // stage.horizon_multiple
        horizon = stage.horizon_multiple * int(rng.integers(1, most + 1))
    if stage.groups is None:
        series = corpus.sample(rng, bucket.batch_size, length + horizon)
        context, target = split_windows(
            rng, series, length, recipe.missing_probability, stage.shorten_probability
        )
        return ForecastBatch(torch.from_numpy(context), torch.from_numpy(target))
    groups = draw_groups(rng, corpus, bucket.batch_size, length + horizon, stage.groups)
    context, target = split_windows(
        rng,
        groups.series,
        length,
        recipe.missing_probability,
        stage.shorten_probability,
        groups.group_ids,
    )
    return groups.batch(context, target)


class _Steps(Dataset[ForecastBatch]):
    """The batches of the steps from ``first`` on."""

    def __init__(
        self, recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], first: int
    ) -> None:
        self.recipe, self.corpora, self.first = recipe, corpora, first

    def __len__(self) -> int:
        return self.recipe.total_steps - self.first

    def __getitem__(self, index: int) -> ForecastBatch:
        return make_batch(self.recipe, self.corpora, self.first + index)


def batches_from(
    recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], first: int, processes: int = 0
) -> Generator[ForecastBatch]:
    """The batches of all steps from ``first`` on, the same for any number of processes.

    ``processes`` draw them ahead and end when the iterator is closed; with 0, this one draws each
    as it is asked for. Where Python starts processes afresh (Windows, macOS, Linux from 3.14 on), a
    script that trains on a GPU needs its ``if __name__ == "__main__"``.
    """
    loader = DataLoader(
        _Steps(recipe, corpora, first),
        batch_size=None,
        num_workers=processes,
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # or it would draw from the one of the training
    )
    others = set(multiprocessing.active_children())
    with _signals_held():
        drawn = iter(loader)
    started = [child for child in multiprocessing.active_children() if child not in others]
    # At its exit Python asks its children to end with a signal that these ignore, and waits.
    killed = Finalize(None, _kill, (started,), exitpriority=0)
    try:
        yield from drawn
    finally:
        del drawn  # ends them in order
        killed()


@contextmanager
def _signals_held() -> Generator[None]:
    """Ctrl-C and SIGTERM wait, also in processes that start meanwhile, where they are ignored."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals(_: int) -> None:
    """The training saves and ends its processes itself; Ctrl-C and SIGTERM often reach all."""
    for number in _LEFT:
        signal.signal(number, signal.SIG_IGN)


def _kill(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)


def drawing_processes(device: torch.device) -> int:
    """Processes that draw batches: a core draws some 5000 series of Chronos-2 a second, and an H200
    trains on 33 thousand (4 layers, 256 dimensions, batches of 1536).
    """
    if device.type == "cpu":
        return 0
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(1, min(8, cores // 2))
