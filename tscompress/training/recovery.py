"""Recovery: a compressed model is distilled from its original for some minutes.

The student learns to forecast as its teacher does, on synthetic series, real ones, or the user's.
The batch of a step does not depend on the number of processes, and its losses only by rounding. A
checkpoint has the whole state: a stopped or killed run of a given number of steps resumes to the
same weights.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel, cast_parameters_, check_double
from tscompress.data.batch import ForecastBatch
from tscompress.data.series import read_again
from tscompress.data.synthetic import FloatArray
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.families.groups import group_size
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_matrices
from tscompress.layers.univariate import is_univariate
from tscompress.training.balanced_factors import balance_factors_
from tscompress.training.distillation import check_comparable, distillation_of
from tscompress.training.held_out import HeldOut
from tscompress.training.loop import StopRequest, attention_for_training, only_what_is_read
from tscompress.training.norm_sizes import keep_norm_sizes_
from tscompress.training.optimizers import make_optimizer
from tscompress.training.padding import without_padding
from tscompress.training.rank_watch import RankWatch
from tscompress.training.recomputation import recomputed_layers
from tscompress.training.recovery_batches import Batches
from tscompress.training.recovery_config import RecoveryConfig, rate_by_distance
from tscompress.training.recovery_files import RecoveryFiles, Snapshot
from tscompress.training.recovery_state import (
    OnRecovery,
    RecoveryProgress,
    RecoveryResult,
    run_digests,
)

#: Steps from one line of the log to the next, and seconds where these take longer.
_LOG_EVERY, _LOG_SECONDS = 10, 30


def recover_(
    student: LoadedModel,
    teacher: LoadedModel,
    config: RecoveryConfig | None = None,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    directory: Path | None = None,
    resume: bool = False,
    report: OnRecovery = lambda line: None,
) -> RecoveryResult:
    """Train ``student``, in place and in float32, to forecast as ``teacher`` does.

    The weights of least loss on held-out series are kept, the initial ones included. Ctrl-C and
    SIGTERM stop after the current step.

    Parameters
    ----------
    series
        Further series, each 1-D, or a file or directory of them, in addition to ``config.series``.
    directory
        For the checkpoint and the log; None: nothing is written.
    resume
        Resume from the checkpoint in ``directory``.
    report
        Called with each line of the log.

    Raises
    ------
    UsageError
        Teacher and student do not fit, or a batch cannot be divided among processes.
    DataError, LeakError
        The series cannot be used.
    DivergenceError
        The loss is not finite or grew too large; the student then has its best weights.
    RecipeError, CorruptCheckpointError
        There is nothing to resume from, or it belongs to another run.
    """
    if not isinstance(config, RecoveryConfig | None):
        raise UsageError(
            f"config is a {type(config).__name__}; give a RecoveryConfig, as in "
            "RecoveryConfig(steps=100)."
        )
    asked = config or RecoveryConfig()
    config = asked.resolved(student, teacher, series_given=series is not None)
    check_comparable(teacher, student)
    check_double(student.model)
    grouped = not (is_univariate(student.model) or is_univariate(teacher.model))
    series = read_again(series)
    digests = {} if directory is None else run_digests(student, teacher, config, series)
    batches = Batches(student.family, config, series, grouped=grouped)
    if config.watch_ranks:
        _check_watched(student)
    with ExitStack() as stack:
        stack.callback(_Surroundings(teacher.model).restore)
        run = _Run(student, teacher, config, directory, digests, report)
        stack.callback(run.close)
        if asked.learning_rate is None:
            run.rate_by_distance = rate_by_distance(student.family, config.optimizer)
        stack.enter_context(attention_for_training(student.model))
        stack.enter_context(only_what_is_read(teacher.model))
        if config.gradient_checkpointing:
            stack.enter_context(recomputed_layers(student.model))
        return run.train(batches, resume)


def check_shares(config: RecoveryConfig, processes: int, group_size: int) -> None:
    """Refuse batches that do not divide among processes, and into the parts of each.

    Groups of ``group_size`` series stay together.

    Raises
    ------
    UsageError
    """
    parts = processes * config.accumulate
    multiple = parts * group_size
    for bucket in config.buckets or ():
        if parts > 1 and bucket.batch_size % multiple:
            raise UsageError(
                f"a batch of {bucket.batch_size} series does not divide into {processes} "
                f"process(es) times accumulate {config.accumulate}; choose batch sizes that are "
                f"multiples of {multiple}."
            )


def _check_watched(student: LoadedModel) -> None:
    """Refuse ranks of attention that has no keys and values of its own.

    Raises
    ------
    UsageError
    """
    try:
        _ = student.architecture
    except UnsupportedModelError as error:
        what = str(error).partition(";")[0]
        raise UsageError(f"watch_ranks: {what}; leave watch_ranks out.") from None


class _Run:
    """One recovery: both models, the optimizer, and the loop."""

    def __init__(
        self,
        student: LoadedModel,
        teacher: LoadedModel,
        config: RecoveryConfig,
        directory: Path | None,
        digests: dict[str, str],
        report: OnRecovery,
    ) -> None:
        self.config, self.report = config, report
        self.student, self.teacher = student, teacher
        grouped = group_size(student.family, student.model) > 1
        self.accelerator = _accelerator(student.model, config, grouped=grouped)
        scheme = adapter_of(student.family).defaults.recovery_scheme
        is_main = self.accelerator.is_main_process
        self.files = RecoveryFiles(directory, config, digests, scheme, is_main)
        self.processes = self.accelerator.num_processes
        check_shares(config, self.processes, group_size(student.family, student.model))
        for loaded in (student, teacher):
            cast_parameters_(loaded.model, torch.float32)
        teacher.model.to(self.accelerator.device)
        balance_factors_(student)
        if adapter_of(student.family).defaults.keeps_norm_sizes:
            keep_norm_sizes_(student, teacher)
        self._trained = {p: p.requires_grad for p in _parameters(student, teacher)}
        student.model.requires_grad_(True)
        if config.freeze_embeddings:
            for name in ("shared", "input_patch_embedding"):
                getattr(student.model, name, nn.Module()).requires_grad_(False)
        self.distillation = distillation_of(teacher, student)
        self.held_out = HeldOut(self.distillation, student.model, self.accelerator, config)
        optimizer = recovery_optimizer(student.model, config)
        self.model, self.optimizer = self.accelerator.prepare(student.model, optimizer)
        self.rate_by_distance = math.inf
        # Before training: a model without attention is refused then.
        place = directory if self.accelerator.is_main_process else None
        self.watch = RankWatch(student.architecture, place) if config.watch_ranks else None
        self.step = 0
        self.seconds, self.logged_at = 0.0, time.monotonic()
        self.history: list[RecoveryProgress] = []
        self.meter = _Meter()

    def close(self) -> None:
        """Remove hooks and wrappers, and make parameters trainable again."""
        self.distillation.close()
        self.held_out.close()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        for parameter, trained in self._trained.items():
            parameter.requires_grad_(trained)
            parameter.grad = None

    def train(self, batches: Batches, resume: bool) -> RecoveryResult:
        """Run all steps; the student then has its best weights."""
        held_out = [part for batch in batches.held_out() for part in self._unpadded(batch)]
        if resume:
            self._resume()
            batches.skip(self.step)
        else:
            self.files.clear()
        if not self.held_out.state:
            before: dict[str, Any] = {**self.held_out.evaluate(held_out, self.step)}
            self._log(replace(self._line(), **before))
        self._bound_learning_rate()
        if self.watch is not None:
            self.watch.start(self.step)
        self._look()
        clock = _Clock(self.seconds)
        saved_at = time.monotonic()
        stopped = False
        with StopRequest() as stop:
            while not self._is_done and not stopped:
                started = time.monotonic()
                rate = self._learning_rate()
                batch = batches.at(self.step)
                losses, stopped, self.seconds = self._train_step(batch, rate, stop, clock)
                self.step += 1
                self.meter.add(losses, len(batch), time.monotonic() - started)
                self._look()
                self._log_if_due(rate, held_out)
                if self._is_due(saved_at):
                    self._save()
                    saved_at = time.monotonic()
            self._look()  # at the last step, also where an evaluation ended the run
            self._save()
        finished = self._is_done
        self.held_out.restore_best()
        return RecoveryResult(
            finished=finished,
            teacher=self.teacher.source,
            steps=self.step,
            seconds=self.seconds,
            best_step=int(self.held_out.state["best_step"]),
            before=self.held_out.state["before"],
            after=self.held_out.state["best"],
            config=self.config,
            history=self.history,
            ranks=self.watch.rows if self.watch is not None else [],
        )

    # ----------------------------------------------------------------------------------------------
    # One step
    # ----------------------------------------------------------------------------------------------

    def _train_step(
        self, batch: ForecastBatch, rate: float, stop: StopRequest, clock: _Clock
    ) -> tuple[np.ndarray[Any, Any], bool, float]:
        """Losses summed over the batch, whether to stop, and seconds; the same in all processes.

        The losses are the distances to the teacher and to the targets, and their weighted sum.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self._parts(batch)
        weights = self._weights()
        sums = torch.zeros(2, device=self.accelerator.device)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    losses = self.distillation(self.model, part).stack().sum(1)  # [2]
                # Gradients are averaged over processes; this makes it the mean over the batch.
                self.accelerator.backward((weights @ losses) * self.processes / len(batch))
            sums += losses.detach()
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        main = self.accelerator.is_main_process
        flags = [float(stop.requested), clock.seconds() if main else 0.0]
        losses = torch.cat([sums, (weights @ sums)[None]])
        shared = torch.cat([losses.double(), sums.new_tensor(flags, dtype=torch.float64)])
        *totals, stopped, seconds = self.accelerator.reduce(shared, "sum").tolist()
        if not (math.isfinite(sum(totals)) and math.isfinite(float(norm))):
            raise self.held_out.diverged(
                f"the loss or its gradient is not finite at step {self.step + 1}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return np.array(totals), stopped > 0, seconds

    def _parts(self, batch: ForecastBatch) -> list[ForecastBatch]:
        """This process's share of the batch, in parts that are run one after another."""
        size = len(batch) // (self.processes * self.config.accumulate)
        first = self.accelerator.process_index * self.config.accumulate
        starts = [size * (first + index) for index in range(self.config.accumulate)]
        shares = [batch.rows(slice(s, s + size)) for s in starts]
        parts = [part for share in shares for part in self._unpadded(share)]
        return [part.to(self.accelerator.device) for part in parts]

    def _unpadded(self, batch: ForecastBatch) -> list[ForecastBatch]:
        """The batch without padding on a CPU; a GPU would wait for the calls of its parts."""
        if self.accelerator.device.type != "cpu":
            return [batch]
        steps = adapter_of(self.student.family).steps_per_position(self.student.model)
        return without_padding(batch, steps)

    def _weights(self) -> Tensor:
        """Weights of the distances to the teacher and to the targets."""
        weights = [self.config.teacher_weight, self.config.truth_weight or 0.0]
        return torch.tensor(weights, device=self.accelerator.device)

    def _done(self) -> float:
        """Used share of the budget of steps or time."""
        shares = [0.0]
        if self.config.steps is not None:
            shares.append(self.step / self.config.steps)
        if self.config.minutes is not None:
            shares.append(self.seconds / (60 * self.config.minutes))
        return max(shares)

    @property
    def _is_done(self) -> bool:
        patience, waited = self.config.patience, self.held_out.evaluations_since_best
        return self._done() >= 1 or (patience is not None and waited >= patience)

    def _bound_learning_rate(self) -> None:
        """Lower the rate where the student came close to its teacher."""
        state, rate = self.held_out.state, self.config.learning_rate
        assert rate is not None
        distance = state.get("teacher_before", state["before"])  # not in checkpoints of before
        bounded = min(rate, self.rate_by_distance * distance) or rate
        self.config = self.config.model_copy(update={"learning_rate": bounded})
        self.held_out.config = self.config

    def _learning_rate(self) -> float:
        """Warm-up, then a cosine to 0 (Loshchilov and Hutter, 2017)."""
        assert self.config.learning_rate is not None
        warmup = min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self._done())))
        return self.config.learning_rate * warmup * cosine

    # ----------------------------------------------------------------------------------------------
    # Log and checkpoint
    # ----------------------------------------------------------------------------------------------

    def _line(self) -> RecoveryProgress:
        """How far the run is, without losses."""
        done = self._done()
        return RecoveryProgress(
            step=self.step,
            total_steps=self.config.steps,
            seconds=self.seconds,
            eta_seconds=self.seconds * (1 - done) / done if done else 0.0,
        )

    def _log_if_due(self, rate: float, held_out: Sequence[ForecastBatch]) -> None:
        """Report every ``_LOG_EVERY`` steps, or seconds; evaluate every ``evaluate_every``."""
        evaluates = self.step % self.config.evaluate_every == 0 or self._is_done
        slow = time.monotonic() - self.logged_at > _LOG_SECONDS
        if not evaluates and not slow and self.step % _LOG_EVERY:
            return
        found: dict[str, Any] = {"learning_rate": rate, **self.meter.means()}
        if evaluates:
            found |= self.held_out.evaluate(held_out, self.step)
        self._log(replace(self._line(), **found))
        self.meter = _Meter()

    def _look(self) -> None:
        """Write ranks, if the config asks for them and this is a watched step."""
        if self.watch is not None:
            self.watch.look(self.student.model, self.step, last=self._is_done)

    def _log(self, line: RecoveryProgress) -> None:
        self.history.append(line)
        self.logged_at = time.monotonic()
        if self.accelerator.is_main_process:
            self.files.append(line)
            self.report(line)

    def _is_due(self, saved_at: float) -> bool:
        every = self.config.checkpoint_steps
        late = time.monotonic() - saved_at > 60 * self.config.checkpoint_minutes
        return late or (every is not None and self.step % every == 0)

    def _save(self) -> None:
        snapshot = Snapshot(
            self.step,
            self.seconds,
            self.held_out.state,
            self.held_out.best,
            self.meter.sums,
            self.meter.counted,
        )
        self.files.save(snapshot, self.student.model, self.optimizer)

    def _resume(self) -> None:
        snapshot, self.history = self.files.load(self.student.model, self.optimizer)
        self.step, self.seconds = snapshot.step, snapshot.seconds
        self.held_out.state, self.held_out.best = snapshot.held_out, snapshot.best
        self.meter = _Meter(snapshot.pending, snapshot.counted)


class _Meter:
    """Losses since the last line of the log, and the pace of this run meanwhile."""

    def __init__(self, sums: np.ndarray[Any, Any] | None = None, counted: int = 0) -> None:
        self.sums = np.zeros(3) if sums is None else sums
        self.counted = counted
        self._series, self._seconds = 0, 0.0  # timed; others are of a run before

    def add(self, losses: np.ndarray[Any, Any], series: int, seconds: float) -> None:
        """Count one step; ``losses`` ``[3]`` are summed over its series."""
        self.sums = self.sums + losses
        self.counted += series
        self._series += series
        self._seconds += seconds

    def means(self) -> dict[str, float]:
        """Fields of :class:`RecoveryProgress`."""
        teacher, truth, loss = (self.sums / self.counted).tolist()
        pace = self._series / self._seconds
        return {"loss": loss, "teacher": teacher, "truth": truth, "series_per_second": pace}


class _Clock:
    """Seconds since it was made, after those of runs before."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before

    def seconds(self) -> float:
        return time.monotonic() - self._start


class _Surroundings:
    """The teacher's dtype and device, and what accelerate and CUDA keep for the whole process."""

    def __init__(self, teacher: nn.Module) -> None:
        given = next(teacher.parameters())
        self._teacher, self._dtype, self._place = teacher, given.dtype, given.device
        self._kept = [(state, dict(state)) for state in self._shared()]
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device() if started else None

    @staticmethod
    def _shared() -> list[dict[str, Any]]:
        states = AcceleratorState, PartialState, GradientState
        return [state._shared_state for state in states]

    def restore(self) -> None:
        cast_parameters_(self._teacher, self._dtype)
        self._teacher.to(self._place)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return  # the processes go on together
        for state, kept in self._kept:
            state.clear()
            state.update(kept)
        if self._device is not None:
            torch.cuda.set_device(self._device)


def _accelerator(model: nn.Module, config: RecoveryConfig, *, grouped: bool) -> Accelerator:
    device = next(model.parameters()).device
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if device.type == "cuda" and alone:
        torch.cuda.set_device(device)  # accelerate takes the current one
    # Or a second run in a process keeps the precision of the first, and its device.
    AcceleratorState._reset_state(reset_partial_state=alone)
    GradientState._reset_state()  # one that does not sync would keep the optimizer from its steps
    # A process whose series are alone computes no queries and keys of group attention.
    shares = DistributedDataParallelKwargs(find_unused_parameters=grouped)
    return Accelerator(
        mixed_precision=config.precision, cpu=device.type == "cpu", kwargs_handlers=[shares]
    )


def _parameters(*models: LoadedModel) -> list[nn.Parameter]:
    return [parameter for loaded in models for parameter in loaded.model.parameters()]


def recovery_optimizer(model: nn.Module, config: RecoveryConfig) -> torch.optim.AdamW:
    """What is trained, in groups: token table and head, biases and norms do not decay."""
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    in_layers = layer_matrices(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in in_layers:
            matrices.append(parameter)
        else:
            kept = any(part in name for part in ("shared", "lm_head", "bias"))
            decays = parameter.ndim == 2 and not kept
            (tables if decays else others).append(parameter)
    decayed: dict[str, Any] = {"weight_decay": config.weight_decay}
    groups = [
        {"params": matrices, "orthogonal": True, **decayed},
        {"params": tables, **decayed},
        {"params": others, "weight_decay": 0.0},
    ]
    return make_optimizer(
        config.optimizer,
        groups,
        learning_rate=config.learning_rate or 0.0,
        bfloat16=config.precision == "bf16",
    )
