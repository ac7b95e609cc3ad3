"""Distillation losses: distances of a student's forecasts from its teacher's and from the targets.

Every loss is a mean within each series, ``[B]``, so the loss of a batch does not depend on how its
series are spread over processes. Chronos-Bolt and Chronos-2 are compared by their quantiles in the
scaled space of training; Chronos-T5 by its token distributions (Hinton et al., 2015), with the
targets fed to the decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.batch import ForecastBatch
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of
from tscompress.plan.layer_plans import OUTPUT_PATCHES
from tscompress.training.distillation_losses import (
    Losses,
    pinball_loss,
    quantile_distance,
    target_weights,
    token_losses,
)


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's output for a batch, which may be used more than once.

    Attributes
    ----------
    forecast
        Scaled quantiles ``[B, Q, H]``, or logits ``[B, H, V]``.
    inputs
        Chronos-T5: arguments of the model.
    labels, observed
        Chronos-T5: the tokens of the target, and the mask of observed ones, ``[B, H]``.
    """

    forecast: Tensor
    inputs: dict[str, Any] = field(default_factory=dict)
    labels: Tensor | None = None
    observed: Tensor | None = None


class Distillation(ABC):
    """Losses of a student against its teacher, on one device."""

    def __init__(self, teacher: LoadedModel, watches: Sequence[_Watch] = ()) -> None:
        self.teacher, self._watches = teacher, watches
        self._family = adapter_of(teacher.family)

    def close(self) -> None:
        """Remove every hook."""
        for watch in self._watches:
            watch.close()

    @abstractmethod
    def teacher_output(self, batch: ForecastBatch) -> TeacherOutput:
        """The teacher's output for ``batch``, without gradients."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: ForecastBatch, teacher: TeacherOutput) -> Losses:
        """Losses of ``model``, the student or a wrapper around it, given the teacher's output."""

    def __call__(
        self, model: nn.Module, batch: ForecastBatch, teacher: TeacherOutput | None = None
    ) -> Losses:
        """Losses of ``model``, the student or a wrapper around it, on ``batch``.

        ``teacher`` is the teacher's output for this batch; None: the teacher is run.
        """
        return self.losses(model, batch, teacher or self.teacher_output(batch))

    def _inputs(self, batch: ForecastBatch) -> dict[str, Any]:
        """Arguments of both models' ``forward``."""
        return self._family.inputs(self.teacher.forecaster, batch)


class QuantileDistillation(Distillation):
    """For Chronos-Bolt and Chronos-2: quantiles in the scaled space of training.

    Watches the heads of both models until :meth:`close`, because models return unscaled quantiles.
    """

    def __init__(self, teacher: LoadedModel, student: LoadedModel) -> None:
        self._of_teacher, self._of_student = _Watch(teacher.model), _Watch(student.model)
        super().__init__(teacher, (self._of_teacher, self._of_student))

    @torch.no_grad()
    def teacher_output(self, batch: ForecastBatch) -> TeacherOutput:
        inner: Any = self.teacher.model
        inner(**self._inputs(batch))
        return TeacherOutput(self._of_teacher.quantiles(len(inner.chronos_config.quantiles)))

    def losses(self, model: nn.Module, batch: ForecastBatch, teacher: TeacherOutput) -> Losses:
        inner: Any = self.teacher.model
        model(**self._inputs(batch))
        levels = torch.tensor(inner.chronos_config.quantiles, device=batch.context.device)
        ours = self._of_student.quantiles(len(levels))
        target, _ = self._family.targets(self.teacher.forecaster, batch)  # [B, H]
        weights = target_weights(batch)
        return Losses(
            weights * quantile_distance(ours, teacher.forecast),
            weights * pinball_loss(ours[..., : target.shape[1]], target, levels),
        )


class TokenDistillation(Distillation):
    """For Chronos-T5: token distributions, with the targets fed to the decoder."""

    @torch.no_grad()
    def teacher_output(self, batch: ForecastBatch) -> TeacherOutput:
        inner: Any = self.teacher.model
        inputs = self._inputs(batch)
        labels, observed = self._family.targets(self.teacher.forecaster, batch)
        return TeacherOutput(inner(**inputs).logits, inputs, labels, observed)

    def losses(self, model: nn.Module, batch: ForecastBatch, teacher: TeacherOutput) -> Losses:
        labels, observed = teacher.labels, teacher.observed
        assert labels is not None
        assert observed is not None
        ours = model(**teacher.inputs).logits
        return Losses(*token_losses(ours, teacher.forecast, labels, observed))


def distillation_of(teacher: LoadedModel, student: LoadedModel) -> Distillation:
    """The distillation of two models of one family.

    Raises
    ------
    UsageError
        The two cannot be compared.
    """
    check_comparable(teacher, student)
    if adapter_of(teacher.family).draws_samples:
        return TokenDistillation(teacher)
    return QuantileDistillation(teacher, student)


def check_comparable(teacher: LoadedModel, student: LoadedModel) -> None:
    """Refuse a teacher of another family, forecast or width (before slicing), or the student.

    Raises
    ------
    UsageError
    """
    shared = {*map(id, teacher.model.parameters())} & {*map(id, student.model.parameters())}
    if shared:
        raise UsageError(
            "student and teacher are one model, as compress changes a loaded model in place; load "
            "the original again, as the teacher."
        )

    def facts(loaded: LoadedModel) -> dict[str, object]:
        model: Any = loaded.model
        chronos = dict(model.config.chronos_config)
        forecast = {
            key: chronos.get(key)
            for key in ("quantiles", "prediction_length", "input_patch_size", "n_tokens")
        }
        return {"family": loaded.family, **forecast}

    _ = teacher.forecaster, student.forecaster  # families that forecast
    theirs, ours = facts(teacher), facts(student)
    different = [key for key in theirs if theirs[key] != ours[key]]
    if different:
        key = different[0]
        raise UsageError(
            f"the student has {key} {ours[key]} and the teacher {theirs[key]}; "
            "give the model that the student was made from."
        )
    models: tuple[Any, Any] = student.model, teacher.model
    narrow, wide = (model.config.d_model for model in models)
    made_narrow = student.plan is not None and student.plan.width is not None
    if narrow > wide or (narrow < wide and not made_narrow):
        raise UsageError(
            f"the student has d_model {narrow} and the teacher {wide}; "
            "give the model that the student was made from."
        )


class _Watch:
    """Keeps the last output of a quantile model's head."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[Tensor] = []
        head = model.get_submodule(OUTPUT_PATCHES)
        self._handle = head.register_forward_hook(self._keep)

    def close(self) -> None:
        self._handle.remove()
        self._seen.clear()

    def quantiles(self, levels: int) -> Tensor:
        """Scaled quantiles of the last forward pass, ``[B, levels, H]``; to be called once."""
        patches = self._seen.pop()  # [B, n, levels * p]
        self._seen.clear()
        rows, count, _ = patches.shape
        return patches.view(rows, count, levels, -1).transpose(1, 2).reshape(rows, levels, -1)

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        self._seen[:] = [output if isinstance(output, Tensor) else output[0]]
