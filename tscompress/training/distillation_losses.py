"""Distances of a student from its teacher and from the targets, as pure functions.

Every loss is a mean within each series, ``[B]``, so the loss of a batch does not depend on how its
series are spread over processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tscompress.data.batch import ForecastBatch

#: Of a series beside covariates known ahead: use of them is what a cut costs most, and few series
#: of a batch ask for it (eval/notes/recovery.md).
DRIVEN_WEIGHT = 3.0


@dataclass(frozen=True)
class Losses:
    """One value per series, ``[B]``; losses that do not apply are 0.

    Attributes
    ----------
    teacher
        Distance of scaled quantiles, or KL divergence in nats per token, from the teacher's.
    truth
        Loss on the targets: twice the pinball loss of scaled quantiles, or cross-entropy in nats
        per token.
    """

    teacher: Tensor
    truth: Tensor

    def stack(self) -> Tensor:
        """Both, ``[2, B]``."""
        return torch.stack([self.teacher, self.truth])


def quantile_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean absolute distance of two sets of quantiles ``[B, Q, H]`` in each series, ``[B]``."""
    return (student.float() - teacher.float()).abs().mean((1, 2))


def target_weights(batch: ForecastBatch) -> Tensor:
    """Weights ``[B]``: 0 for covariates known ahead, :data:`DRIVEN_WEIGHT` beside one, else 1.

    Chronos-2 forecasts covariates too, but was not trained to. Weights of a row depend on its group
    alone, so parts of a batch add up to it.
    """
    if batch.future is None:
        return torch.ones(len(batch), device=batch.context.device)
    known = torch.isfinite(batch.future).any(1)
    if batch.group_ids is None:
        return (~known).float()
    beside = torch.isin(batch.group_ids, batch.group_ids[known])
    return torch.where(beside, DRIVEN_WEIGHT, 1.0) * ~known


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

    Logits ``[B, H, V]``; labels and the mask of observed ones ``[B, H]``.
    """
    log_student = student.float().log_softmax(-1)
    log_teacher = teacher.float().log_softmax(-1)
    divergence = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)  # [B, H]
    entropy = -log_student.gather(-1, labels[..., None])[..., 0]
    return _row_means(divergence, observed), _row_means(entropy, observed)


def _row_means(values: Tensor, counted: Tensor) -> Tensor:
    """Means of ``values`` ``[B, H]`` over ``counted``; 0 in rows without any."""
    return values.where(counted, 0.0).sum(1) / counted.sum(1).clamp_min(1)
