"""Recovery: minutes of distillation from the original win back what surgery lost.

The student learns to forecast as its teacher does, on synthetic series, real ones, the user's own.
The batch of a step does not depend on how many processes share it, nor do its losses but for
rounding, and a checkpoint has everything: a run of a number of steps that was stopped or killed
goes on to the same weights.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel, cast_parameters_
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DivergenceError, RecipeError, UsageError
from tscompress.evaluation.score_cache import model_digest
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_matrices
from tscompress.training.distillation import (
    Distillation,
    Lesson,
    TrainingBatch,
    check_comparable,
    recomputed_layers,
)
from tscompress.training.loop import (
    STATE_FILE,
    StopRequest,
    TrainingState,
    attention_for_training,
    load_training_state,
    read_training_record,
    save_training_state,
)
from tscompress.training.optimizers import make_optimizer
from tscompress.training.recovery_config import Batches, RecoveryConfig

CHECKPOINT, LOG_FILE = "checkpoint", "log.jsonl"
_LOG_EVERY = 10
#: A forecast loss on held-out series that has grown by this factor will not come back.
_DIVERGED = 2.0
#: What may differ between a run and the one that goes on from its checkpoint.
_FREE_ON_RESUME = frozenset({"learning_rate", "patience", "checkpoint_steps", "checkpoint_minutes"})


@dataclass(frozen=True)
class RecoveryProgress:
    """What a run reports; one line of its log.

    Attributes
    ----------
    loss, teacher, truth
        Means over the steps since the line before: the weighted sum, and its parts.
    held_out, held_out_teacher, held_out_truth
        The same on held-out series, where they were evaluated.
    series_per_second
        All processes together, without evaluation.
    """

    step: int
    total_steps: int | None
    seconds: float
    eta_seconds: float
    loss: float | None = None
    teacher: float | None = None
    truth: float | None = None
    learning_rate: float | None = None
    series_per_second: float | None = None
    held_out: float | None = None
    held_out_teacher: float | None = None
    held_out_truth: float | None = None

    @property
    def share(self) -> float:
        """Of the run that is done, 0 to 1."""
        return self.seconds / max(self.seconds + self.eta_seconds, 1e-9)


@dataclass
class RecoveryResult:
    """How a run went.

    Attributes
    ----------
    finished
        False after Ctrl-C.
    best_step
        The step whose weights the student has.
    before, after
        The weighted loss on held-out series of the student as it came and as it is.
    """

    finished: bool
    teacher: str
    steps: int
    seconds: float
    best_step: int
    before: float
    after: float
    config: RecoveryConfig
    history: list[RecoveryProgress] = field(repr=False)

    def record(self) -> dict[str, Any]:
        """For ``provenance.json``."""
        return {
            "teacher": self.teacher,
            "config": self.config.model_dump(mode="json"),
            "steps": self.steps,
            "best_step": self.best_step,
            "seconds": round(self.seconds, 1),
            "held_out_before": self.before,
            "held_out_after": self.after,
        }


OnRecovery = Callable[[RecoveryProgress], None]


def _silent(_: object) -> None:
    pass


def has_checkpoint(directory: Path) -> bool:
    """Whether a recovery left something to go on from; before its first checkpoint it has not."""
    return (directory / CHECKPOINT / STATE_FILE).exists()


def can_resume(
    student: LoadedModel, teacher: LoadedModel, config: RecoveryConfig, directory: Path
) -> bool:
    """Whether ``directory`` holds a checkpoint of this very run: models and settings are the same.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    return has_checkpoint(directory) and what_differs(directory, config, teacher, student) is None


def what_differs(
    directory: Path,
    config: RecoveryConfig,
    teacher: LoadedModel,
    student: LoadedModel | None = None,
) -> str | None:
    """What keeps a run from going on from the checkpoint in ``directory``; None: nothing does.

    Without a ``student``, what can be told before there is one.

    Raises
    ------
    CorruptCheckpointError
        The checkpoint is damaged.
    """
    if not has_checkpoint(directory):
        return None
    record = read_training_record(directory / CHECKPOINT)
    found = _differences(record, config.resolved(student or teacher, teacher))
    if student is None and config.learning_rate is None:
        found.pop("learning_rate", None)  # it follows how much was cut
    for name, (stored, ours) in found.items():
        return f"{name} {stored}, not {ours}"
    for role, digest in _digests(student or teacher, teacher).items():
        if (role == "teacher" or student is not None) and digest != _models_in(record)[role]:
            return f"another {role}"
    return None


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------


def recover_(
    student: LoadedModel,
    teacher: LoadedModel,
    config: RecoveryConfig | None = None,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    directory: Path | None = None,
    resume: bool = False,
    report: OnRecovery = _silent,
) -> RecoveryResult:
    """Train ``student``, in place and in float32, to forecast as ``teacher`` does.

    The weights that were best on held-out series are kept, and those are never worse there than
    the ones the student came with. Ctrl-C and SIGTERM stop after the current step.

    Parameters
    ----------
    series
        Series, each 1-D, or a file or directory of them, besides those of ``config.series``.
    directory
        For the checkpoint and the log; None: nothing is written.
    resume
        Go on from the checkpoint in ``directory``.
    report
        Called with each line of the log.

    Raises
    ------
    UsageError
        Teacher and student do not belong together, or a batch cannot be shared out.
    DataError, LeakError
        The series cannot be used.
    DivergenceError
        The loss is not finite, or grew beyond return; the student then has its best weights.
    RecipeError, CorruptCheckpointError
        There is nothing to resume from, or it belongs to another run.
    """
    if not isinstance(config, RecoveryConfig | None):
        raise UsageError(
            f"config is a {type(config).__name__}; give a RecoveryConfig, as in "
            "RecoveryConfig(steps=100)."
        )
    config = (config or RecoveryConfig()).resolved(student, teacher)
    check_comparable(teacher, student)
    run = _Run(student, teacher, config, directory, report)
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.enter_context(attention_for_training(student.model))
        if config.gradient_checkpointing:
            stack.enter_context(recomputed_layers(student.model))
        return run.train(Batches(student.family, config, series), resume)


class _Run:
    """One recovery: models, optimizer, and what a checkpoint holds."""

    def __init__(
        self,
        student: LoadedModel,
        teacher: LoadedModel,
        config: RecoveryConfig,
        directory: Path | None,
        report: OnRecovery,
    ) -> None:
        self.config, self.directory, self.report = config, directory, report
        self.student, self.teacher = student, teacher
        self._models = _digests(student, teacher) if directory is not None else {}
        self._teacher_dtype = next(teacher.model.parameters()).dtype
        device = next(student.model.parameters()).device
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        if device.type == "cuda" and alone:
            torch.cuda.set_device(device)  # accelerate takes the current one
        # Or a second run in a process keeps the precision of the first, and its device.
        AcceleratorState._reset_state(reset_partial_state=alone)
        self.accelerator = Accelerator(mixed_precision=config.precision, cpu=device.type == "cpu")
        self.processes = self.accelerator.num_processes
        self._check_shares()
        for loaded in (student, teacher):
            cast_parameters_(loaded.model, torch.float32)
        teacher.model.to(self.accelerator.device)
        self._trained = {p: p.requires_grad for p in _parameters(student, teacher)}
        student.model.requires_grad_(True)
        if config.freeze_embeddings:
            for name in ("shared", "input_patch_embedding"):
                getattr(student.model, name, nn.Module()).requires_grad_(False)
        self.distillation = Distillation(teacher, student)
        optimizer = _optimizer(student.model, config)
        self.model, self.optimizer = self.accelerator.prepare(student.model, optimizer)
        self.step = 0
        self.seconds = 0.0
        self.state: dict[str, float] = {}  # of the held-out losses: before, best, and when
        self.best: dict[str, Tensor] = {}
        self.history: list[RecoveryProgress] = []
        self.pending, self.counted = np.zeros(3), 0  # losses since the last line of the log
        self._lessons: dict[int, Lesson] = {}  # of held-out batches

    def close(self) -> None:
        """Leave the models as models: no hooks, no wrappers, parameters that can be trained."""
        self.distillation.close()
        self._lessons.clear()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        for parameter, trained in self._trained.items():
            parameter.requires_grad_(trained)
            parameter.grad = None
        cast_parameters_(self.teacher.model, self._teacher_dtype)

    def train(self, batches: Batches, resume: bool) -> RecoveryResult:
        """All steps; the student then has the weights that were best."""
        held_out = batches.held_out()
        if resume:
            self._load()
            batches.skip(self.step)
        elif self._writes:
            assert self.directory is not None
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in (LOG_FILE, f"{CHECKPOINT}/{STATE_FILE}"):
                (self.directory / stale).unlink(missing_ok=True)
        if not self.state:
            self._log(self._evaluated(held_out))
        clock = _Clock(self.seconds)
        saved_at = time.monotonic()
        sums, counted, rows, trained = self.pending, self.counted, 0, 0.0
        stopped = False
        with StopRequest() as stop:
            while not self._is_done and not stopped:
                started = time.monotonic()
                rate = self._learning_rate()
                batch = batches.at(self.step)
                losses, requested, self.seconds = self._step(batch, rate, stop, clock)
                stopped = requested
                self.step += 1
                sums, counted = sums + losses, counted + len(batch.context)
                rows += len(batch.context)
                trained += time.monotonic() - started
                evaluates = self.step % self.config.evaluate_every == 0 or self._is_done
                if evaluates or self.step % _LOG_EVERY == 0:
                    line = self._line(sums / counted, rate, rows / trained)
                    if evaluates:
                        line = self._evaluated(held_out, line)
                    self._log(line)
                    sums, counted, rows, trained = np.zeros(3), 0, 0, 0.0
                self.pending, self.counted = sums, counted
                if self._is_due(saved_at):
                    self._save()
                    saved_at = time.monotonic()
            self._save()
        finished = self._is_done
        self._restore_best()
        return RecoveryResult(
            finished,
            self.teacher.source,
            self.step,
            self.seconds,
            int(self.state["best_step"]),
            self.state["before"],
            self.state["best"],
            self.config,
            self.history,
        )

    # ----------------------------------------------------------------------------------------------
    # One step
    # ----------------------------------------------------------------------------------------------

    def _step(
        self, batch: TrainingBatch, rate: float, stop: StopRequest, clock: _Clock
    ) -> tuple[np.ndarray[Any, Any], bool, float]:
        """Losses summed over the batch, whether to stop, and seconds; alike in all processes.

        The losses are distances to teacher and truth, and their weighted sum.
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
        told = torch.cat([losses.double(), sums.new_tensor(flags, dtype=torch.float64)])
        *totals, stopped, seconds = self.accelerator.reduce(told, "sum").tolist()
        if not (math.isfinite(sum(totals)) and math.isfinite(float(norm))):
            self._diverged(f"the loss or its gradient is not finite at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return np.array(totals), stopped > 0, seconds

    def _parts(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """This process's share, in the parts that are run one after another."""
        size = len(batch) // (self.processes * self.config.accumulate)
        first = self.accelerator.process_index * self.config.accumulate
        starts = [size * (first + index) for index in range(self.config.accumulate)]
        return [batch.rows(slice(s, s + size)).to(self.accelerator.device) for s in starts]

    def _check_shares(self) -> None:
        parts = self.processes * self.config.accumulate
        multiple = parts * adapter_of(self.student.family).group_size
        for bucket in self.config.buckets or ():
            if parts > 1 and bucket.batch_size % multiple:
                raise UsageError(
                    f"a batch of {bucket.batch_size} series does not divide into {self.processes} "
                    f"process(es) times accumulate {self.config.accumulate}; choose batch sizes "
                    f"that are multiples of {multiple}."
                )

    def _weights(self) -> Tensor:
        """Of the distances to teacher and truth."""
        weights = [self.config.teacher_weight, self.config.truth_weight or 0.0]
        return torch.tensor(weights, device=self.accelerator.device)

    def _done(self) -> float:
        """Share of the budget that is used."""
        shares = [0.0]
        if self.config.steps is not None:
            shares.append(self.step / self.config.steps)
        if self.config.minutes is not None:
            shares.append(self.seconds / (60 * self.config.minutes))
        return max(shares)

    @property
    def _is_done(self) -> bool:
        waited = self.state["evaluations"] - self.state["best_evaluation"]
        impatient = self.config.patience is not None and waited >= self.config.patience
        return self._done() >= 1 or impatient

    def _learning_rate(self) -> float:
        """Warm-up, then a cosine to 0 (Loshchilov and Hutter, 2017)."""
        assert self.config.learning_rate is not None
        warmup = min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self._done())))
        return self.config.learning_rate * warmup * cosine

    def _diverged(self, what: str) -> None:
        self._restore_best()
        lower = f"learning_rate ({self.config.learning_rate:g})"
        if self.config.optimizer != "muon":  # to whom the size of a gradient is nothing
            lower += f" or max_grad_norm ({self.config.max_grad_norm:g})"
        raise DivergenceError(f"{what}; lower {lower} and run again.")

    # ----------------------------------------------------------------------------------------------
    # Held-out series
    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluated(
        self, held_out: Sequence[TrainingBatch], line: RecoveryProgress | None = None
    ) -> RecoveryProgress:
        """Evaluate, keep the weights if they are the best so far, and say so in ``line``."""
        device = self.accelerator.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        mine = slice(self.accelerator.process_index, None, self.processes)
        for index, batch in enumerate(held_out[mine]):
            batch = batch.to(device)
            with self.accelerator.autocast():
                lesson = self._lessons.get(index) or self.distillation.lesson(batch)
                losses = self.distillation(self.student.model, batch, lesson).stack()
            self._lessons[index] = lesson
            count = torch.tensor([len(batch)], device=device)
            sums += torch.cat([losses.sum(1), count]).double()
        teacher, truth, counted = self.accelerator.reduce(sums, "sum").tolist()
        truth = truth / counted
        weights = (self.config.teacher_weight, self.config.truth_weight or 0.0)
        total = weights[0] * teacher / counted + weights[1] * truth
        if not math.isfinite(total):
            self._diverged(f"the loss on held-out series is {total} at step {self.step}")
        if not self.state:
            self.state = {"before": total, "truth_before": truth, "evaluations": -1}
        elif truth > _DIVERGED * self.state["truth_before"] > 0:
            self._diverged(
                f"at step {self.step} the forecast loss on held-out series is {truth:.3g}, "
                f"and was {self.state['truth_before']:.3g} before"
            )
        self.state["evaluations"] += 1
        if total < self.state.get("best", math.inf):
            self.state |= {
                "best": total,
                "best_step": self.step,
                "best_evaluation": self.state["evaluations"],
            }
            self.best = {n: p.detach().cpu().clone() for n, p in self._named_parameters()}
        base = asdict(line) if line is not None else asdict(self._line(None, None, None))
        base |= {"held_out": total, "held_out_teacher": teacher / counted, "held_out_truth": truth}
        return RecoveryProgress(**base)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.student.model.named_parameters())

    @torch.no_grad()
    def _restore_best(self) -> None:
        for name, parameter in self._named_parameters():
            if name in self.best:
                parameter.copy_(self.best[name])

    # ----------------------------------------------------------------------------------------------
    # Checkpoint and log
    # ----------------------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        return self.directory is not None and self.accelerator.is_main_process

    def _is_due(self, saved_at: float) -> bool:
        every = self.config.checkpoint_steps
        late = time.monotonic() - saved_at > 60 * self.config.checkpoint_minutes
        return late or (every is not None and self.step % every == 0)

    def _save(self) -> None:
        if not self._writes:
            return
        assert self.directory is not None
        record = {
            "config": self.config.model_dump_json(),
            "models": json.dumps(self._models),
            "seconds": repr(self.seconds),
            "held_out": json.dumps(self.state),
            "pending": json.dumps([*self.pending.tolist(), self.counted]),
        }
        state = TrainingState(self.step, record, self.best)
        save_training_state(self.directory / CHECKPOINT, self.student.model, self.optimizer, state)

    def _load(self) -> None:
        if self.directory is None:
            raise UsageError("resume needs the directory of the run.")
        checkpoint = self.directory / CHECKPOINT
        record = read_training_record(checkpoint)
        for name, (stored, ours) in _differences(record, self.config).items():
            raise RecipeError(
                f"{checkpoint} is of a run with {name} {stored}, not {ours}; "
                "resume with the same options, or start afresh."
            )
        for role, digest in _models_in(record).items():
            if digest != self._models[role]:
                raise RecipeError(
                    f"{checkpoint} is of a run with another {role}; resume with the same models, "
                    "or start afresh."
                )
        state = load_training_state(checkpoint, self.student.model, self.optimizer)
        self.step, self.best = state.step, state.kept
        self.seconds = float(state.record["seconds"])
        self.state = json.loads(state.record["held_out"])
        *pending, self.counted = json.loads(state.record["pending"])
        if len(pending) == 4:  # of before, with a distance of layers that is gone
            del pending[2]
        self.pending = np.array(pending)
        self.history = [line for line in read_log(self.directory) if line.step <= self.step]
        if self._writes:  # a killed run may have logged steps that it did not save
            lines = "".join(json.dumps(asdict(line)) + "\n" for line in self.history)
            (self.directory / LOG_FILE).write_text(lines, encoding="utf-8")

    def _line(
        self,
        losses: np.ndarray[Any, Any] | None,
        rate: float | None,
        series_per_second: float | None,
    ) -> RecoveryProgress:
        done = self._done()
        line = RecoveryProgress(
            step=self.step,
            total_steps=self.config.steps,
            seconds=self.seconds,
            eta_seconds=self.seconds * (1 - done) / done if done else 0.0,
            learning_rate=rate,
            series_per_second=series_per_second,
        )
        if losses is None:
            return line
        teacher, truth, loss = losses.tolist()
        parts = {"loss": loss, "teacher": teacher, "truth": truth}
        return RecoveryProgress(**{**asdict(line), **parts})

    def _log(self, line: RecoveryProgress) -> None:
        self.history.append(line)
        if not self.accelerator.is_main_process:
            return
        if self.directory is not None:
            with (self.directory / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(line)) + "\n")
        self.report(line)


class _Clock:
    """Seconds since it was made, after those of runs before."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before

    def seconds(self) -> float:
        return time.monotonic() - self._start


def _digests(student: LoadedModel, teacher: LoadedModel) -> dict[str, str]:
    """What tells the models of a run from others, before it has changed them."""
    models = {"student": student, "teacher": teacher}
    return {role: model_digest(loaded.forecaster) for role, loaded in models.items()}


def _models_in(record: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = json.loads(record.get("models", "{}"))
    return found


def _differences(record: dict[str, str], config: RecoveryConfig) -> dict[str, tuple[Any, Any]]:
    """Settings in which a checkpoint's run differs from ``config``, and both their values."""
    stored, ours = json.loads(record.get("config", "{}")), config.model_dump(mode="json")
    lost = {name: allowed[0] for name, allowed in config.removed.items() if name in stored}
    return {
        name: (stored.get(name), value)
        for name, value in {**ours, **lost}.items()
        if value != stored.get(name) and name not in _FREE_ON_RESUME
    }


def read_log(directory: Path) -> list[RecoveryProgress]:
    """The lines of a run's log; a last one that was cut in two is left out."""
    path = directory / LOG_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for text in lines:
        try:
            line = json.loads(text)
            line.pop("hidden", None)  # of before, a distance of layers
            found.append(RecoveryProgress(**line))
        except (ValueError, TypeError, AttributeError):
            break
    return found


def _parameters(*models: LoadedModel) -> list[nn.Parameter]:
    return [parameter for loaded in models for parameter in loaded.model.parameters()]


def _optimizer(model: nn.Module, config: RecoveryConfig) -> torch.optim.AdamW:
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
