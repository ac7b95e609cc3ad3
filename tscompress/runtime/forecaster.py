"""What forecasters of all families have in common."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tscompress.errors import UsageError
from tscompress.runtime.contexts import pad_left
from tscompress.runtime.graph import Graph, thread_count
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.record import Record

DEFAULT_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Forecaster(ABC):
    """An exported model that forecasts.

    Attributes
    ----------
    directory, record
        Where it is, and what is written there of it.
    quantiles
        Levels that the model forecasts.
    context_length
        Steps of a series that it reads, the last ones.
    prediction_length
        Steps of one call; later ones continue from the quantiles before.
    threads
        Of onnxruntime.
    """

    #: Names of the inputs of the graph.
    inputs: ClassVar[tuple[str, ...]]

    def __init__(self, directory: Path, record: Record, threads: int | None) -> None:
        self.directory, self.record = directory, record
        settings = record.settings
        self.quantiles: list[float] = [float(level) for level in settings["quantiles"]]
        self.context_length = int(settings["context_length"])
        self.patch_size = int(settings["input_patch_size"])
        self.threads = thread_count(threads)
        self.graph = Graph(directory, record, self.inputs, self.threads)

    def __repr__(self) -> str:
        record = self.record
        return f"{type(self).__name__}({record.source!r}, {record.family}, {record.precision})"

    @property
    @abstractmethod
    def prediction_length(self) -> int:
        """Steps of one call."""

    @abstractmethod
    def predict_quantiles(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = DEFAULT_LEVELS,
    ) -> tuple[Any, Any]:
        """Quantiles and the median of each series, as the stock pipeline's ``predict_quantiles``.

        Raises
        ------
        UsageError
            A level or the length is out of range, or ``contexts`` of a wrong type.
        DataError
            A series is empty, all NaN, or not numeric.
        """

    def patched(self, context: FloatArray) -> dict[str, npt.NDArray[Any]]:
        """The inputs ``context`` and ``observed`` of ``[B, T]``: whole patches, nothing missing."""
        steps = -(-context.shape[-1] // self.patch_size) * self.patch_size
        return self.masked("context", "observed", pad_left(context, steps))

    @staticmethod
    def masked(name: str, mask: str, values: FloatArray) -> dict[str, npt.NDArray[Any]]:
        """Values without NaN, and 1 where there is one."""
        there = np.isfinite(values)
        return {name: np.where(there, values, np.float32(0)), mask: there.astype(np.float32)}

    def checked_length(self, prediction_length: int | None) -> int:
        """Steps to forecast; a warning where one call does not reach them.

        Raises
        ------
        UsageError
            It is not a positive integer.
        """
        if prediction_length is None:
            return self.prediction_length
        wrong = isinstance(prediction_length, bool) or not isinstance(
            prediction_length, int | np.integer
        )
        if wrong or prediction_length < 1:
            raise UsageError(
                f"prediction_length is {prediction_length!r}; give a positive integer."
            )
        if prediction_length > self.prediction_length:
            warnings.warn(
                f"prediction_length is {prediction_length}, and the model forecasts "
                f"{self.prediction_length} steps at once; later ones continue from its quantiles "
                "and may be worse.",
                stacklevel=3,
            )
        return int(prediction_length)

    def checked_levels(self, levels: Sequence[float]) -> list[float]:
        """Quantile levels, each from 0 to 1.

        Raises
        ------
        UsageError
        """
        found = [float(level) for level in levels]
        if not found or not all(0 <= level <= 1 for level in found):
            raise UsageError(f"quantile_levels are {found}; give one or more from 0 to 1.")
        return found

    def median_index(self) -> int:
        """Position of the median among the model's quantiles.

        Raises
        ------
        UsageError
            It forecasts none.
        """
        if 0.5 not in self.quantiles:
            raise UsageError(
                f"the model forecasts the quantiles {self.quantiles}, without the median; use "
                "predict."
            )
        return self.quantiles.index(0.5)
