"""Chronos-Bolt: all quantiles of a block of steps in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tscompress.runtime.contexts import stacked, univariate
from tscompress.runtime.forecaster import PatchForecaster, positive_integer
from tscompress.runtime.quantiles import DEFAULT_LEVELS, FloatArray, empirical
from tscompress.runtime.record import Record, positive


class ChronosBoltForecaster(PatchForecaster):
    """Forecasts of an exported Chronos-Bolt."""

    inputs = ("context", "observed")

    @staticmethod
    def check_settings(record: Record) -> None:
        PatchForecaster.check_settings(record)
        positive(record.settings["prediction_length"], "prediction_length")

    def predict(
        self, contexts: Any, prediction_length: int | None = None, *, batch_size: int = 256
    ) -> FloatArray:
        """The model's own quantiles.

        Parameters
        ----------
        contexts
            ``[T]``, ``[B, T]`` or a sequence of ``[T_i]``; missing values are NaN.
        prediction_length
            Steps to forecast, H; None: those of one call.
        batch_size
            Series that are forecast together; forecasts depend on it by rounding, those of an int8
            graph more, whose scale of activations is that of all its series.

        Returns
        -------
        ndarray
            ``[B, Q, H]``.

        Raises
        ------
        UsageError, DataError
            See :meth:`predict_quantiles`.
        """
        steps = self.checked_length(prediction_length)
        context = stacked(univariate(contexts, self.context_length), self.context_length)
        return self.forecast(context, steps, batch_size=batch_size)

    def predict_quantiles(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = DEFAULT_LEVELS,
        *,
        batch_size: int = 256,
    ) -> tuple[FloatArray, FloatArray]:
        """Quantiles ``[B, H, Q]`` at any levels, and the median ``[B, H]``; see :meth:`predict`.

        Levels that the model does not forecast are between its own, as the stock pipeline's.

        Raises
        ------
        UsageError
            A level, the length or the batch size is out of range, or ``contexts`` of a wrong type.
        DataError
            A series is empty, all NaN, or not numeric.
        """
        levels = self.checked_levels(quantile_levels)
        median = self.median_index()
        steps = self.checked_length(prediction_length)
        context = stacked(univariate(contexts, self.context_length), self.context_length)
        own = self.forecast(context, steps, batch_size=batch_size).swapaxes(1, 2)  # [B, H, Q]
        if set(levels) <= set(self.quantiles):
            return own[..., [self.quantiles.index(one) for one in levels]], own[..., median]
        widened = np.concatenate([own[..., :1], own, own[..., -1:]], axis=-1)
        return empirical(widened, levels), own[..., median]

    def forecast(self, context: FloatArray, steps: int, *, batch_size: int = 256) -> FloatArray:
        """Quantiles ``[B, Q, steps]`` of contexts ``[B, T]``, which are not checked.

        Beyond one call every quantile continues a path of its own, and the quantiles of all that
        come out are the next forecast.

        Raises
        ------
        UsageError
            ``batch_size`` is not a positive integer.
        """
        size = positive_integer(batch_size, "batch_size")
        firsts = range(0, len(context), size)
        return np.concatenate([self._forecast(context[at : at + size], steps) for at in firsts])

    def _forecast(self, context: FloatArray, steps: int) -> FloatArray:
        levels = len(self.quantiles)
        found = [self._call(context)]
        paths = np.repeat(context[:, None, -self.context_length :], levels, axis=1)  # [B, Q, T]
        while sum(one.shape[-1] for one in found) < steps:
            paths = np.concatenate([paths, found[-1]], axis=-1)[..., -self.context_length :]
            ahead = self._call(paths.reshape(-1, paths.shape[-1]))
            every = ahead.reshape(len(context), levels * levels, -1).swapaxes(1, 2)
            found.append(empirical(every, self.quantiles).swapaxes(1, 2))
        return np.concatenate(found, axis=-1)[..., :steps]

    def _call(self, context: FloatArray) -> FloatArray:
        return self.graph(**self.patched(context[:, -self.context_length :]))
