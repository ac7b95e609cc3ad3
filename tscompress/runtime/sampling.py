"""The next token of each path: temperature, the most probable ones, then a draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tscompress.errors import UsageError
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.tokens import IntArray


@dataclass(frozen=True)
class Sampling:
    """What tokens are drawn from, as transformers' generation has it.

    Attributes
    ----------
    temperature
        Logits are divided by it.
    top_k
        So many tokens, the most probable ones, and those as probable as the last of them; 0: all.
    top_p
        Of these, the most probable ones that have this probability together.
    never
        A token that is not drawn: the end, before the last step.
    """

    temperature: float
    top_k: int
    top_p: float
    never: int

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 < self.temperature < np.inf:
            raise UsageError(f"temperature is {self.temperature!r}; give a number above 0.")
        whole = isinstance(self.top_k, int | np.integer) and not isinstance(self.top_k, bool)
        if not whole or self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k!r}; give a positive integer, or 0 for all.")
        if not _is_number(self.top_p) or not 0 <= self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p!r}; give a number from 0 to 1.")

    @classmethod
    def of(cls, settings: Mapping[str, Any], **given: Any) -> Sampling:
        """That of a ``chronos_config``, but for what is given and not None.

        Raises
        ------
        UsageError
            A value is out of range.
        """
        names = ("temperature", "top_k", "top_p")
        found = {name: settings[name] if given.get(name) is None else given[name] for name in names}
        return cls(**found, never=int(settings["eos_token_id"]))

    def candidates(self, logits: FloatArray) -> tuple[IntArray, FloatArray]:
        """Tokens that may be drawn, ascending, and their logits, ``[N, K]`` each.

        Parameters
        ----------
        logits
            ``[N, V]``. A row with fewer candidates has further tokens of minus infinity.
        """
        scores = logits / np.float32(self.temperature)
        scores[:, self.never] = -np.inf
        rows, size = scores.shape
        if 0 < self.top_k < size:
            last = np.partition(scores, size - self.top_k, axis=-1)[:, size - self.top_k]
            kept = scores >= last[:, None]
            tokens = _positions(kept)
            scores = np.where(
                np.take_along_axis(kept, tokens, axis=1),
                np.take_along_axis(scores, tokens, axis=1),
                np.float32(-np.inf),
            )
        else:
            tokens = np.broadcast_to(np.arange(size), (rows, size))
        return tokens, _of_top_p(scores, self.top_p) if self.top_p < 1 else scores


def drawn(sampling: Sampling, logits: FloatArray, uniforms: npt.NDArray[np.float64]) -> IntArray:
    """A token for each row of ``logits`` ``[N, V]``: where the distribution reaches ``uniforms``.

    Parameters
    ----------
    uniforms
        ``[N]``, from 0 to below 1. The token is the first, in the order of tokens, whose cumulative
        probability is above it.
    """
    tokens, scores = sampling.candidates(logits)
    weights = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
    cumulative = weights.cumsum(axis=-1)
    reached = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(axis=-1, keepdims=True)
    reached = np.minimum(reached, tokens.shape[1] - 1)
    found: IntArray = np.take_along_axis(tokens, reached, axis=-1)[:, 0]
    return found


def _positions(kept: npt.NDArray[np.bool_]) -> IntArray:
    """Columns of the true ones in each row, ascending ``[N, K]``; others after, in short rows."""
    counts = kept.sum(axis=-1)
    most = int(counts.max())
    if (counts == most).all():
        return np.nonzero(kept)[1].reshape(-1, most)
    return np.argsort(~kept, axis=-1, kind="stable")[:, :most]


def _of_top_p(scores: FloatArray, share: float) -> FloatArray:
    """Scores ``[N, K]``, minus infinity for the least probable ones, of 1 - ``share`` together."""
    order = np.argsort(scores, axis=-1, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=-1)
    weights = np.exp(ascending - ascending[:, -1:])
    cumulative = (weights / weights.sum(axis=-1, keepdims=True)).cumsum(axis=-1)
    ascending[:, :-1][cumulative[:, :-1] <= 1 - share] = -np.inf  # one stays
    found = np.empty_like(scores)
    np.put_along_axis(found, order, ascending, axis=-1)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
