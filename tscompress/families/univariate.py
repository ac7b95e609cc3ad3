"""Chronos-2 whose series are groups of their own: its pipeline and its graph."""

from __future__ import annotations

from typing import Any

import torch
from chronos import Chronos2Pipeline
from torch import Tensor, nn

from tscompress.errors import UsageError
from tscompress.families.graphs import Chronos2Graph, GraphSource, exportable_copy
from tscompress.families.patches import patch_size
from tscompress.runtime.univariate import CROSS_LEARNING, UnivariateForecaster


class UnivariateChronos2Pipeline(Chronos2Pipeline):  # type: ignore[misc]
    """The stock pipeline of a univariate model, which refuses several series in a group."""

    def predict(
        self,
        inputs: Any,
        prediction_length: int | None = None,
        batch_size: int = 256,
        context_length: int | None = None,
        cross_learning: bool = False,
        limit_prediction_length: bool = False,
        **options: Any,
    ) -> list[Tensor]:
        """As the stock pipeline's.

        Raises
        ------
        UsageError
            ``cross_learning`` is true, or a task has several targets or covariates.
        """
        if cross_learning:
            raise UsageError(CROSS_LEARNING)
        found: list[Tensor] = super().predict(
            inputs,
            prediction_length=prediction_length,
            batch_size=batch_size,
            context_length=context_length,
            limit_prediction_length=limit_prediction_length,
            **options,
        )
        return found


class UnivariateGraph(Chronos2Graph):
    """A univariate Chronos-2 from contexts and their masks to quantiles: no groups, no masks of
    them, nothing known ahead."""

    def forward(  # type: ignore[override]
        self, context: Tensor, observed: Tensor, steps_ahead: Tensor
    ) -> Tensor:
        """Quantiles ``[B, Q, F P]``.

        Parameters
        ----------
        context, observed
            ``[B, S P]``; 1 where a step is observed.
        steps_ahead
            ``[F P]``: 0, 1, ..., one for each step to forecast.
        """
        # All series have the same patches ahead, which are embedded once.
        time = (steps_ahead / self.model.chronos_config.time_encoding_scale)[None]
        nothing = torch.zeros_like(time)
        future = self.embedding(time, nothing, nothing).expand(context.shape[0], -1, -1)
        return self.quantiles(context, observed, future, None)


def univariate_source(model: nn.Module) -> GraphSource:
    """What is exported of a univariate Chronos-2."""
    size = patch_size(model)
    past = torch.zeros(3, 2 * size)
    free = {0: "batch", 1: "patches"}
    examples = past, torch.ones_like(past), torch.arange(2.0 * size)
    sizes = free, free, {0: "future_patches"}
    names = UnivariateForecaster.inputs
    return GraphSource(
        module=UnivariateGraph(exportable_copy(model)),
        inputs=dict(zip(names, examples, strict=True)),
        sizes=dict(zip(names, sizes, strict=True)),
        patch_size=size,
    )
