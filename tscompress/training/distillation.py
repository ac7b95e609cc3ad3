"""How far a student is from its teacher and from the targets, by its forecasts.

Every loss is a mean within each series, ``[B]``, so that the loss of a batch does not depend on how
its series are spread over processes. Chronos-Bolt and Chronos-2 are compared by their quantiles in
the scaled space, in which they were trained; Chronos-T5 by its token distributions (Hinton et al.,
2015), fed the true target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tscompress.checkpoints.load import LoadedModel
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import stack_layers
from tscompress.plan.architecture import STACKS
from tscompress.plan.plan import OUTPUT_PATCHES


@dataclass(frozen=True)
class TrainingBatch:
    """Series split at the forecast origin; missing values and left padding are NaN."""

    context: Tensor  # [B, T]
    target: Tensor  # [B, H]
    group_ids: Tensor | None = None  # [B]; Chronos-2 attends across rows of one group
    future: Tensor | None = None  # [B, H]; what Chronos-2 is told of steps ahead, NaN elsewhere

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, part: slice) -> TrainingBatch:
        """Some of the series."""
        return self._each(lambda tensor: tensor[part])

    def to(self, device: torch.device) -> TrainingBatch:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(t) for n, t in present.items() if t is not None})


@dataclass(frozen=True)
class Losses:
    """One value a series, ``[B]``; what does not apply is 0.

    Attributes
    ----------
    teacher
        Distance of scaled quantiles, or KL divergence in nats a token, from the teacher's.
    truth
        Twice the pinball loss of scaled quantiles, or cross-entropy in nats a token.
    """

    teacher: Tensor
    truth: Tensor

    def stack(self) -> Tensor:
        """Both, ``[2, B]``."""
        return torch.stack([self.teacher, self.truth])


@dataclass(frozen=True)
class Lesson:
    """What a teacher made of a batch; a student can learn from it more than once.

    Attributes
    ----------
    forecast
        Scaled quantiles ``[B, Q, H]``, or logits ``[B, H, V]``.
    inputs
        Chronos-T5: what the model is called with.
    labels, observed
        Chronos-T5: the tokens of the target, and which of them count, ``[B, H]``.
    """

    forecast: Tensor
    inputs: dict[str, Any] = field(default_factory=dict)
    labels: Tensor | None = None
    observed: Tensor | None = None


# --------------------------------------------------------------------------------------------------
# Pure functions
# --------------------------------------------------------------------------------------------------


def quantile_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean absolute distance of two sets of quantiles ``[B, Q, H]`` in each series, ``[B]``."""
    return (student.float() - teacher.float()).abs().mean((1, 2))


def _asked(batch: TrainingBatch) -> Tensor:
    """Weights ``[B]``, of mean 1: none for what is known ahead, which Chronos-2 forecasts anyhow.

    It was never trained there, and what it says means nothing.
    """
    if batch.future is None:
        return torch.ones(len(batch), device=batch.context.device)
    asked = (~torch.isfinite(batch.future).any(1)).float()
    return asked / asked.mean().clamp_min(1e-9)


def pinball_loss(quantiles: Tensor, target: Tensor, levels: Tensor) -> Tensor:
    """Twice the pinball loss, mean over levels and observed steps of each series, ``[B]``.

    ``quantiles`` ``[B, Q, H]`` at ``levels`` ``[Q]``; ``target`` ``[B, H]`` is NaN where missing.
    """
    observed = torch.isfinite(target)
    error = target.nan_to_num(posinf=0, neginf=0)[:, None] - quantiles.float()  # [B, Q, H]
    loss = 2 * torch.maximum(levels[:, None] * error, (levels[:, None] - 1) * error)
    return _row_means(loss.mean(1), observed)


def token_losses(
    student: Tensor, teacher: Tensor, labels: Tensor, observed: Tensor
) -> tuple[Tensor, Tensor]:
    """KL divergence from teacher to student, and cross-entropy of ``labels``, each ``[B]``.

    Logits ``[B, H, V]``; labels and which of them count ``[B, H]``.
    """
    log_student = student.float().log_softmax(-1)
    log_teacher = teacher.float().log_softmax(-1)
    divergence = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)  # [B, H]
    entropy = -log_student.gather(-1, labels[..., None])[..., 0]
    return _row_means(divergence, observed), _row_means(entropy, observed)


def _row_means(values: Tensor, counted: Tensor) -> Tensor:
    """Means of ``values`` ``[B, H]`` where ``counted``; 0 in rows where nothing is."""
    return values.where(counted, 0.0).sum(1) / counted.sum(1).clamp_min(1)


# --------------------------------------------------------------------------------------------------
# Running both models
# --------------------------------------------------------------------------------------------------


class Distillation:
    """Losses of a student against its teacher; watches both models until :meth:`close`.

    Parameters
    ----------
    teacher, student
        Models of one family, on one device.

    Raises
    ------
    UsageError
        The two cannot be compared.
    """

    def __init__(self, teacher: LoadedModel, student: LoadedModel) -> None:
        check_comparable(teacher, student)
        self.teacher, self.student = teacher, student
        self._family = adapter_of(teacher.family)
        head = [] if self._has_tokens else [OUTPUT_PATCHES]
        self._of_teacher = _Watch(teacher.model, head)
        self._of_student = _Watch(student.model, head)

    def close(self) -> None:
        """Remove every hook."""
        self._of_teacher.close()
        self._of_student.close()

    @torch.no_grad()
    def lesson(self, batch: TrainingBatch) -> Lesson:
        """What the teacher makes of ``batch``."""
        found = (self._token_lesson if self._has_tokens else self._quantile_lesson)(batch)
        self._of_teacher.forget()
        return found

    def __call__(
        self, model: nn.Module, batch: TrainingBatch, lesson: Lesson | None = None
    ) -> Losses:
        """Losses of ``model``, the student or a wrapper around it, on ``batch``.

        ``lesson`` is the teacher's of this very batch; None: the teacher is run.
        """
        lesson = lesson or self.lesson(batch)
        losses = (self._token_losses if self._has_tokens else self._quantile_losses)(
            model, batch, lesson
        )
        self._of_student.forget()
        return losses

    @property
    def _has_tokens(self) -> bool:
        return self._family.draws_samples

    def _inputs(self, batch: TrainingBatch) -> dict[str, Any]:
        return self._family.inputs(self.teacher.forecaster, batch)

    def _quantile_lesson(self, batch: TrainingBatch) -> Lesson:
        inner: Any = self.teacher.model
        inner(**self._inputs(batch))
        patches = self._of_teacher.seen[OUTPUT_PATCHES]
        return Lesson(_scaled_quantiles(patches, len(inner.chronos_config.quantiles)))

    def _quantile_losses(self, model: nn.Module, batch: TrainingBatch, lesson: Lesson) -> Losses:
        inner: Any = self.teacher.model
        model(**self._inputs(batch))
        levels = torch.tensor(inner.chronos_config.quantiles, device=batch.context.device)
        ours = _scaled_quantiles(self._of_student.seen[OUTPUT_PATCHES], len(levels))
        target, _ = self._family.targets(self.teacher.forecaster, batch)  # [B, H]
        asked = _asked(batch)
        return Losses(
            asked * quantile_distance(ours, lesson.forecast),
            asked * pinball_loss(ours[..., : target.shape[1]], target, levels),
        )

    def _token_lesson(self, batch: TrainingBatch) -> Lesson:
        inner: Any = self.teacher.model
        inputs = self._inputs(batch)
        labels, observed = self._family.targets(self.teacher.forecaster, batch)
        return Lesson(inner(**inputs).logits, inputs, labels, observed)

    def _token_losses(self, model: nn.Module, _: TrainingBatch, lesson: Lesson) -> Losses:
        labels, observed = lesson.labels, lesson.observed
        assert labels is not None
        assert observed is not None
        ours = model(**lesson.inputs).logits
        return Losses(*token_losses(ours, lesson.forecast, labels, observed))


def check_comparable(teacher: LoadedModel, student: LoadedModel) -> None:
    """Refuse a teacher of another family, forecast or width; a plan may have narrowed a student.

    Raises
    ------
    UsageError
    """

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


def _scaled_quantiles(patches: Tensor, levels: int) -> Tensor:
    """``[B, n, levels * p]`` as the head puts them out to quantiles ``[B, levels, n * p]``."""
    rows, count, _ = patches.shape
    return patches.view(rows, count, levels, -1).transpose(1, 2).reshape(rows, levels, -1)


class _Watch:
    """Keeps what modules last put out."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.seen: dict[str, Tensor] = {}
        self._handles = [
            model.get_submodule(name).register_forward_hook(self._keep(name)) for name in names
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()

    def forget(self) -> None:
        self.seen.clear()

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.seen[name] = output if isinstance(output, Tensor) else output[0]

        return hook


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, layers keep their inputs alone and are run again on the way back."""
    blocks = [layer for layers in stack_layers(model).values() for layer in layers]
    modules = (model, *(getattr(model, stack, None) for stack in STACKS))
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = [config for config in configs if config is not None]
    caching = [getattr(config, "use_cache", None) for config in configs]
    try:
        for config in configs:  # a layer that is run twice must not write to a cache twice
            config.use_cache = False
        for block in blocks:
            vars(block)["forward"] = _recomputed(block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
        for config, value in zip(configs, caching, strict=True):
            config.use_cache = value


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
