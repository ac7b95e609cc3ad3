"""A batch in parts of series of like length, each without the steps that none of its series has.

Half of the contexts of a batch are shortened, and many real series are short. Missing steps before
a series are masked, so a model computes the same without them, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tscompress.data.batch import ForecastBatch

#: What another part costs, in positions of one series.
_PART_COST = 100


def without_padding(batch: ForecastBatch, steps_per_position: int | None) -> list[ForecastBatch]:
    """The rows of ``batch`` in parts, their contexts cut to what is observed.

    Parameters
    ----------
    batch
        Contexts ``[B, T]``, NaN before a series begins. Rows of one group stay together.
    steps_per_position
        Steps of a context that a position of the encoder reads; None: nothing is cut.

    Returns
    -------
    list
        Batches ``[b, T']`` with T' of at most T, shortest first: as many as cost less than the
        padding that they save.
    """
    if steps_per_position is None:
        return [batch]
    length = batch.context.shape[1]
    needed = _needed(batch, steps_per_position)  # [B]
    order = needed.argsort(stable=True)
    parts = []
    for rows in _split(needed[order], order):
        steps = min(length, int(needed[rows].max()) * steps_per_position)
        part = batch if len(rows) == len(batch) else batch.rows(rows)
        parts.append(part.last_steps(steps))
    return parts


def _needed(batch: ForecastBatch, steps_per_position: int) -> Tensor:
    """Positions from the first observed step of each row's group to the last, ``[B]``."""
    observed = torch.isfinite(batch.context)
    length = observed.shape[1]
    first = torch.where(observed.any(1), observed.int().argmax(1), length - 1)
    needed = (length - first + steps_per_position - 1) // steps_per_position
    if batch.group_ids is None:
        return needed
    _, group = torch.unique(batch.group_ids, return_inverse=True)
    longest = needed.new_zeros(len(needed)).scatter_reduce(0, group, needed, "amax")
    return longest[group]


def _split(needed: Tensor, rows: Tensor) -> list[Tensor]:
    """``rows`` where they are cut, at rises of ``needed``, both ``[b]`` in its ascending order."""
    below = torch.arange(1, len(rows))  # rows before a cut
    saved = below * (needed[-1] - needed[:-1])
    if not len(saved) or saved.max() <= _PART_COST:
        return [rows]
    cut = int(saved.argmax()) + 1
    return _split(needed[:cut], rows[:cut]) + _split(needed[cut:], rows[cut:])
