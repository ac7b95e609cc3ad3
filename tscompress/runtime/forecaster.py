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
from tscompress.runtime.graph import OUTPUT, Graph, thread_count
from tscompress.runtime.quantiles import DEFAULT_LEVELS, FloatArray
from tscompress.runtime.record import GRAPH_FILE, Record, positive

#: Steps of one forecast; more would run for hours, and hold the memory of all of them.
LONGEST_HORIZON = 65_536


class Forecaster(ABC):
    """An exported model that forecasts.

    Attributes
    ----------
    directory, record
        Where it is, and its record there.
    context_length
        Steps of a series that it reads, the last ones.
    prediction_length
        Steps of one call; later ones continue from the forecast before.
    given_threads, threads
        Of onnxruntime, as they were asked for and as they are.
    """

    #: What a forecast beyond one call continues from.
    continues_from: ClassVar[str] = "quantiles"

    def __init__(self, directory: Path, record: Record, threads: int | None) -> None:
        self.directory, self.record = directory, record
        self.context_length = int(record.settings["context_length"])
        self.given_threads, self.threads = threads, thread_count(threads)

    def __repr__(self) -> str:
        record = self.record
        return f"{type(self).__name__}({record.source!r}, {record.family}, {record.precision})"

    @staticmethod
    @abstractmethod
    def check_settings(record: Record) -> None:
        """Refuse a config that lacks a setting of the forecast.

        Raises
        ------
        KeyError, TypeError, ValueError
            Names the setting that is missing or of another form.
        """

    @property
    def prediction_length(self) -> int:
        """Steps of one call."""
        return int(self.record.settings["prediction_length"])

    @abstractmethod
    def predict_quantiles(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = DEFAULT_LEVELS,
    ) -> tuple[Any, Any]:
        """Quantiles and the point forecast of the stock pipeline's ``predict_quantiles``.

        Raises
        ------
        UsageError
            A level or the length is out of range, or ``contexts`` of a wrong type.
        DataError
            A series is empty, all NaN, or not numeric.
        """

    def checked_length(self, prediction_length: int | None) -> int:
        """Steps to forecast; a warning where one call does not reach them.

        Raises
        ------
        UsageError
            It is not a positive integer, or above :data:`LONGEST_HORIZON`.
        """
        if prediction_length is None:
            return self.prediction_length
        steps = positive_integer(prediction_length, "prediction_length")
        if steps > LONGEST_HORIZON:
            raise UsageError(
                f"prediction_length is {steps}, and the most is {LONGEST_HORIZON}; forecast fewer "
                "steps."
            )
        if steps > self.prediction_length:
            warnings.warn(
                f"prediction_length is {steps}, and the model forecasts "
                f"{self.prediction_length} steps at once; later ones continue from its "
                f"{self.continues_from} and may be worse.",
                stacklevel=3,
            )
        return steps

    def checked_levels(self, levels: Sequence[float]) -> list[float]:
        """Quantile levels, each from 0 to 1.

        Raises
        ------
        UsageError
        """
        try:
            found = [float(level) for level in levels]
        except (TypeError, ValueError):
            raise UsageError(
                f"quantile_levels is {repr(levels)[:80]}; give a list of numbers from 0 to 1."
            ) from None
        if not found or not all(0 <= level <= 1 for level in found):
            raise UsageError(f"quantile_levels are {found}; give one or more from 0 to 1.")
        return found


class PatchForecaster(Forecaster):
    """A model of one graph that reads whole patches and forecasts quantiles.

    Attributes
    ----------
    quantiles
        Levels that the model forecasts.
    patch_size
        Steps in a patch.
    """

    #: Names of the inputs of the graph.
    inputs: ClassVar[tuple[str, ...]]

    def __init__(self, directory: Path, record: Record, threads: int | None) -> None:
        super().__init__(directory, record, threads)
        settings = record.settings
        self.quantiles: list[float] = [float(level) for level in settings["quantiles"]]
        self.patch_size = int(settings["input_patch_size"])
        self.graph = Graph(directory, record, GRAPH_FILE, self.threads)
        self.graph.check_names(self.inputs, (OUTPUT,))

    def checked_levels(self, levels: Sequence[float]) -> list[float]:
        """As of all; a warning where the model forecasts none as low or as high."""
        found = super().checked_levels(levels)
        low, high = min(self.quantiles), max(self.quantiles)
        if beyond := [f"{level:g}" for level in found if not low - 1e-6 < level < high + 1e-6]:
            warnings.warn(
                f"quantile levels are {', '.join(beyond)}, and the model forecasts {low:g} to "
                f"{high:g}; they become its lowest or highest.",
                stacklevel=3,
            )
        return found

    @staticmethod
    def check_settings(record: Record) -> None:
        settings = record.settings
        positive(settings["input_patch_size"], "input_patch_size")
        if not settings["quantiles"] or not all(0 < level < 1 for level in settings["quantiles"]):
            raise ValueError("quantiles")

    def patched(self, context: FloatArray) -> dict[str, npt.NDArray[Any]]:
        """The inputs ``context`` and ``observed`` of ``[B, T]``: whole patches, nothing missing."""
        steps = -(-context.shape[-1] // self.patch_size) * self.patch_size
        return self.masked("context", "observed", pad_left(context, steps))

    @staticmethod
    def masked(name: str, mask: str, values: FloatArray) -> dict[str, npt.NDArray[Any]]:
        """``[...]`` without NaN, and 1 where there is a value; both as inputs of the graph."""
        there = np.isfinite(values)
        return {name: np.where(there, values, np.float32(0)), mask: there.astype(np.float32)}

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


def positive_integer(value: object, name: str) -> int:
    """An argument that is a positive integer.

    Raises
    ------
    UsageError
        It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UsageError(f"{name} is {value!r}; give a positive integer.")
    return int(value)
