"""Losses of a recovery on held-out series, and the weights of least loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tscompress.data.batch import ForecastBatch
from tscompress.errors import DivergenceError
from tscompress.training.distillation import Distillation, TeacherOutput
from tscompress.training.recovery_config import RecoveryConfig

#: A run whose loss on the targets grew by this factor does not recover.
_DIVERGED = 2.0


class HeldOut:
    """Evaluates a student repeatedly on the same held-out series, and keeps its best weights.

    Attributes
    ----------
    state
        The weighted loss ``before`` and at ``best``, ``best_step``, the distance to the teacher
        before, and more that a checkpoint needs; empty before the first evaluation.
    best
        Weights of the best step, by name, on the CPU.
    """

    def __init__(
        self,
        distillation: Distillation,
        student: nn.Module,
        accelerator: Accelerator,
        config: RecoveryConfig,
    ) -> None:
        self.distillation, self.student = distillation, student
        self.accelerator, self.config = accelerator, config
        self.state: dict[str, float] = {}
        self.best: dict[str, Tensor] = {}
        self._teacher_outputs: dict[int, TeacherOutput] = {}  # of each batch of this process

    def close(self) -> None:
        """Drop the teacher's cached outputs."""
        self._teacher_outputs.clear()

    @property
    def evaluations_since_best(self) -> float:
        """Evaluations since the lowest loss."""
        return self.state["evaluations"] - self.state["best_evaluation"]

    def evaluate(self, batches: Sequence[ForecastBatch], step: int) -> dict[str, float]:
        """Means over the series of all processes; the weights are kept if they are the best so far.

        Returns
        -------
        dict
            ``held_out``, ``held_out_teacher`` and ``held_out_truth``, see
            :class:`~tscompress.training.recovery_state.RecoveryProgress`.

        Raises
        ------
        DivergenceError
            The loss is not finite, or grew beyond return.
        """
        teacher, truth, counted = self._sums(batches)
        truth = truth / counted
        weights = (self.config.teacher_weight, self.config.truth_weight or 0.0)
        total = weights[0] * teacher / counted + weights[1] * truth
        if not math.isfinite(total):
            raise self.diverged(f"the loss on held-out series is {total} at step {step}")
        if not self.state:
            self.state = {"before": total, "evaluations": -1}
            self.state |= {"teacher_before": teacher / counted, "truth_before": truth}
        elif truth > _DIVERGED * self.state["truth_before"] > 0:
            raise self.diverged(
                f"at step {step} the forecast loss on held-out series is {truth:.3g}, "
                f"and was {self.state['truth_before']:.3g} before"
            )
        self.state["evaluations"] += 1
        if total < self.state.get("best", math.inf):
            now = {"best_step": step, "best_evaluation": self.state["evaluations"]}
            self.state |= {"best": total, **now}
            named = self.student.named_parameters()
            self.best = {name: p.detach().cpu().clone() for name, p in named}
        return {"held_out": total, "held_out_teacher": teacher / counted, "held_out_truth": truth}

    @torch.no_grad()
    def _sums(self, batches: Sequence[ForecastBatch]) -> tuple[float, float, float]:
        """Distance to the teacher, loss on the targets, and series, summed over all processes."""
        device = self.accelerator.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        mine = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        for index, batch in enumerate(batches[mine]):
            batch = batch.to(device)
            with self.accelerator.autocast():
                if index not in self._teacher_outputs:
                    self._teacher_outputs[index] = self.distillation.teacher_output(batch)
                output = self._teacher_outputs[index]
                losses = self.distillation(self.student, batch, output).stack()
            count = torch.tensor([len(batch)], device=device)
            sums += torch.cat([losses.sum(1), count]).double()
        teacher, truth, counted = self.accelerator.reduce(sums, "sum").tolist()
        return teacher, truth, counted

    @torch.no_grad()
    def restore_best(self) -> None:
        """Give the student its best weights."""
        for name, parameter in self.student.named_parameters():
            if name in self.best:
                parameter.copy_(self.best[name])

    def diverged(self, reason: str) -> DivergenceError:
        """The error to raise; the student has its best weights then."""
        self.restore_best()
        lower = f"learning_rate ({self.config.learning_rate:g})"
        if self.config.optimizer != "muon":  # which does not depend on the size of a gradient
            lower += f" or max_grad_norm ({self.config.max_grad_norm:g})"
        return DivergenceError(f"{reason}; lower {lower} and run again.")
