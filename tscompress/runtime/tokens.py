"""Values as tokens: scaled by the mean of their size, then one of many bins of equal width.

As ``MeanScaleUniformBins`` of chronos-forecasting does it, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.record import positive

IntArray = npt.NDArray[np.int64]

TOKENIZER = "MeanScaleUniformBins"
#: Beyond all values, which are scaled float32 numbers.
_OUTERMOST = np.float32(1e20)


class Tokens(NamedTuple):
    """Series as tokens.

    Attributes
    ----------
    tokens
        ``[B, T]``.
    observed
        ``[B, T]``, 1 where a token is attended to.
    scale
        ``[B]``.
    """

    tokens: IntArray
    observed: FloatArray
    scale: FloatArray


class UniformBins:
    """The tokenizer of a ``chronos_config``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.context_length = int(settings["context_length"])
        self.special = int(settings["n_special_tokens"])
        self.last = int(settings["n_tokens"]) - 1
        self.pad, self.end = int(settings["pad_token_id"]), int(settings["eos_token_id"])
        self.appends_end = bool(settings["use_eos_token"])
        limits = settings["tokenizer_kwargs"]
        self.centers = _evenly_spaced(
            limits["low_limit"], limits["high_limit"], self.last - self.special
        )
        between = (self.centers[1:] + self.centers[:-1]) / np.float32(2)
        self.boundaries = np.concatenate([[-_OUTERMOST], between, [_OUTERMOST]])

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """Refuse settings that lack one of the tokenizer.

        Raises
        ------
        KeyError, TypeError, ValueError
            Names the setting that is missing or of another form.
        """
        if settings["tokenizer_class"] != TOKENIZER:
            raise ValueError("tokenizer_class")
        special = positive(settings["n_special_tokens"], "n_special_tokens")
        if positive(settings["n_tokens"], "n_tokens") < special + 3:
            raise ValueError("n_tokens")
        limits = settings["tokenizer_kwargs"]
        if not float(limits["low_limit"]) < float(limits["high_limit"]):
            raise ValueError("tokenizer_kwargs")
        for name in ("pad_token_id", "eos_token_id"):
            if not 0 <= int(settings[name]) < special:
                raise ValueError(name)
        bool(settings["use_eos_token"])

    def tokens(self, context: FloatArray) -> Tokens:
        """The last steps of series ``[B, T]``, NaN where missing, with the end if it is used."""
        context = context[:, -self.context_length :]
        there = ~np.isnan(context)
        values = np.where(there, context, np.float32(0))
        sizes = np.abs(values).sum(axis=1, dtype=np.float64) / np.maximum(there.sum(axis=1), 1)
        scale = sizes.astype(np.float32)
        scale[~(scale > 0)] = 1
        scaled = values / scale[:, None]
        found = np.searchsorted(self.boundaries, scaled, side="right") + self.special
        found = np.where(there, np.minimum(found, self.last), self.pad).astype(np.int64)
        if self.appends_end:
            found = np.pad(found, ((0, 0), (0, 1)), constant_values=self.end)
            there = np.pad(there, ((0, 0), (0, 1)), constant_values=True)
        return Tokens(found, there.astype(np.float32), scale)

    def values(self, tokens: IntArray, scale: FloatArray) -> FloatArray:
        """Values ``[B, P, H]`` of tokens; special ones are the lowest."""
        index = np.clip(tokens - self.special - 1, 0, len(self.centers) - 1)
        found: FloatArray = self.centers[index] * scale[:, None, None]
        return found


def _evenly_spaced(low: float, high: float, count: int) -> FloatArray:
    """``[count]``, rounded as torch rounds: the step to float32, then each sum once."""
    first, last = np.float32(low), np.float32(high)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    up = np.float64(first) + step * index
    down = np.float64(last) - step * (count - 1 - index)
    return np.where(index < count // 2, up, down).astype(np.float32)
