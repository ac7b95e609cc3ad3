"""Fracast-0, a time-series model of 85,001 parameters by others, as a pipeline of Chronos.

`pip install tscompress[peers]` installs it, weights included (wheel `fracast`, Apache-2.0). It is
convolutional, was trained by its authors on public data that may hold the test series, and has the
quantiles 0.1 to 0.9 of its own, so that none is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import ChronosBoltPipeline
from torch import Tensor, nn

from tscompress.errors import UsageError

#: The file of weights that the library loads by default.
WEIGHTS_FILE = "model.int8.safetensors"


class FracastPipeline(ChronosBoltPipeline):  # type: ignore[misc]
    """Called as a Chronos-Bolt pipeline is: the class by which tscompress knows how to do that."""

    def __init__(self, forecaster: Any) -> None:
        parts = nn.ModuleDict({"core": forecaster.core, "head": forecaster.head})
        super().__init__(model=parts.eval())
        self.forecaster = forecaster

    @property
    def model_context_length(self) -> int:
        return int(self.forecaster.context_length)

    @property
    def model_prediction_length(self) -> int:
        return int(self.forecaster.horizon)

    @property
    def quantiles(self) -> list[float]:
        return list(self.forecaster.quantiles)

    def predict(
        self, inputs: Tensor | list[Tensor], prediction_length: int | None = None, **_: Any
    ) -> Tensor:
        """All quantiles, ``[B, 9, H]``; beyond 48 steps the median is forecast on from."""
        context = self._prepare_and_validate_context(inputs)  # [B, T], NaN where missing
        found = self.forecaster.forecast_batch(context.numpy(), horizon=prediction_length)
        return torch.from_numpy(np.asarray(found, dtype=np.float32)).transpose(1, 2)

    def predict_quantiles(
        self,
        inputs: Tensor | list[Tensor],
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Quantiles ``[B, H, Q]`` and the median ``[B, H]``.

        Raises
        ------
        UsageError
            A level is none of the model's.
        """
        if not set(quantile_levels) <= set(self.quantiles):
            raise UsageError(
                f"levels are {list(quantile_levels)}; Fracast-0 has only {self.quantiles}."
            )
        levels = [self.quantiles.index(level) for level in quantile_levels]
        found = self.predict(inputs, prediction_length)
        return found[:, levels].transpose(1, 2), found[:, self.quantiles.index(0.5)]


@dataclass(frozen=True)
class Fracast:
    """Model and pipeline, named as those of a :class:`tscompress.LoadedModel` are.

    Attributes
    ----------
    bytes_on_disk
        Of the file that it was loaded from.
    """

    model: nn.Module
    forecaster: FracastPipeline
    bytes_on_disk: int


def load_fracast() -> Fracast:
    """Fracast-0 with the weights of its wheel, in float32 on the CPU.

    Raises
    ------
    UsageError
        fracast is not installed.
    """
    try:
        import fracast
    except ImportError:
        raise UsageError("Fracast-0 needs fracast; pip install 'tscompress[peers]'.") from None
    pipeline = FracastPipeline(fracast.FracastModel.from_pretrained())
    file = Path(fracast.__file__).parent / "weights" / WEIGHTS_FILE
    return Fracast(pipeline.inner_model, pipeline, file.stat().st_size)
