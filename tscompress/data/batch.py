"""A batch of series, split at the forecast origin, as calibration and training have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForecastBatch:
    """Contexts and what came after them; missing values and left padding are NaN.

    Attributes
    ----------
    context
        ``[B, T]``.
    target
        ``[B, H]``.
    group_ids
        ``[B]``, int64; Chronos-2 attends across rows of one group. None: each row is alone.
    future
        ``[B, H]``; what Chronos-2 is given of the steps ahead, NaN elsewhere. None: nothing.
    series
        ``[B]``, int64; the same for windows of one series, −1 for windows of no other. None: not
        known.
    """

    context: Tensor
    target: Tensor
    group_ids: Tensor | None = None
    future: Tensor | None = None
    series: Tensor | None = None

    def __len__(self) -> int:
        return len(self.context)

    @property
    def driven(self) -> Tensor:
        """``[B]``, bool: rows of a group with a covariate, itself included.

        A covariate is what has no target: its future is known, not asked for, or all missing.
        """
        if self.group_ids is None:
            return torch.zeros(len(self), dtype=torch.bool, device=self.context.device)
        given = ~torch.isfinite(self.target).any(1)
        return torch.isin(self.group_ids, self.group_ids[given])

    def rows(self, chosen: slice | Tensor) -> ForecastBatch:
        """The batch of some of the rows, by a slice, a mask or indices."""
        return self._each(lambda tensor: tensor[chosen])

    def last_steps(self, steps: int) -> ForecastBatch:
        """The batch with the last ``steps`` of each context."""
        return replace(self, context=self.context[:, -steps:])

    @classmethod
    def concatenated(cls, batches: Sequence[ForecastBatch]) -> ForecastBatch:
        """The rows of batches of one shape that have the same fields; groups stay apart."""
        first = batches[0]
        names = [entry.name for entry in fields(first) if getattr(first, entry.name) is not None]
        parts = {name: [getattr(one, name) for one in batches] for name in names}
        if "group_ids" in parts:
            ids = parts["group_ids"]
            for place in range(1, len(ids)):
                ids[place] = ids[place] - ids[place].min() + ids[place - 1].max() + 1
        return cls(**{name: torch.cat(tensors) for name, tensors in parts.items()})

    def to(self, device: torch.device) -> ForecastBatch:
        """The batch on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> ForecastBatch:
        present = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(self, **{n: change(t) for n, t in present.items() if t is not None})


@dataclass(frozen=True)
class StreamBatch:
    """What enters the layers of a model that reads no series.

    Attributes
    ----------
    stream
        Residual stream ``[B, S, d_model]``; every position counts.
    """

    stream: Tensor

    def __len__(self) -> int:
        return len(self.stream)


#: What a compression is calibrated on.
CalibrationBatch = ForecastBatch | StreamBatch


def batches_of_series(batches: Iterable[CalibrationBatch]) -> list[ForecastBatch]:
    """Those batches that hold series."""
    return [batch for batch in batches if isinstance(batch, ForecastBatch)]
