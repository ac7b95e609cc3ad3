"""Common base of families that read patches of a series and forecast quantiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from chronos import BaseChronosPipeline
from torch import Tensor, nn

from tscompress.errors import UnsupportedModelError
from tscompress.families.base import ForecastFamily, Windows
from tscompress.families.calibration_sizes import OF_PATCHES
from tscompress.families.defaults import BatchShape, FamilyDefaults
from tscompress.runtime.quantiles import FloatArray

#: Measured on Chronos-Bolt (eval/notes); Chronos-2 has the same values, unmeasured.
PATCH_DEFAULTS = FamilyDefaults(
    calibration_windows=OF_PATCHES,
    # Long contexts dominate the time of a pass.
    calibration_length_power=0.5,
    collection_steps=None,
    batch_shapes=(
        BatchShape(64, 64, 128, 0.25),
        BatchShape(128, 64, 128, 0.3),
        BatchShape(256, 64, 128, 0.2),
        BatchShape(512, 64, 96, 0.15),
        BatchShape(2048, 64, 32, 0.1),
    ),
    target_weight=0.0,
    held_out_series=256,
    real_weight=None,
    learning_rates={"adamw": 5e-4, "muon": 2e-3},
    learning_rate_by_distance=3e-3,
)


#: Spreads of its context beyond which a target's mean distance counts no more: a jump that no model
#: forecasts would otherwise outweigh all other series together.
FURTHEST = 10.0
#: Added to the spread of a forecast that is a unit of loss, in spreads of the context: a series
#: whose future is certain does not outweigh all others.
LEAST_SPREAD = 0.03


class PatchFamily(ForecastFamily):
    """A family whose models normalise a context, embed its patches, and forecast quantiles."""

    defaults = PATCH_DEFAULTS

    def embedding_table(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        return None

    def card_notes(self, settings: Mapping[str, Any]) -> str:
        return (
            "NaN or a mask of 0 stand for missing steps, and contexts are padded to whole patches\n"
            f"of {settings['input_patch_size']} steps. The output is `quantiles`, one row for each "
            f"of\n{', '.join(f'{level:g}' for level in settings['quantiles'])}."
        )

    def compared(
        self, pipeline: Any, forecaster: Any, contexts: Sequence[FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        horizon = forecaster.prediction_length
        series = [torch.from_numpy(one) for one in contexts]
        # A model need not forecast the median, which predict_quantiles gives as well.
        both = forecaster.predict(contexts, horizon), pipeline.predict(series, horizon)
        ours, theirs = (
            np.concatenate([np.asarray(one).reshape(-1, *one.shape[-2:]) for one in rows])
            for rows in both
        )
        return ours, theirs  # [B, Q, H]

    def targets(self, pipeline: BaseChronosPipeline, batch: Windows) -> tuple[Tensor, Tensor]:
        model: Any = pipeline.inner_model
        _, loc_scale = model.instance_norm(_read(model, batch.context))
        scaled, _ = model.instance_norm(batch.target, loc_scale)
        return scaled, torch.isfinite(batch.target)

    def steps_per_position(self, model: nn.Module) -> int | None:
        settings: Any = model.chronos_config
        size = int(settings.input_patch_size)
        return size if settings.input_patch_stride == size else None  # where a patch begins

    def forecast_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows
    ) -> tuple[float, int]:
        """Twice the pinball loss, mean over quantile levels.

        In the space of training: after instance normalisation, and for Chronos-2 arcsinh. So every
        series has the same weight, and one whose target lies further from the context than
        :data:`FURTHEST` of its spreads, on average, the weight of that. Steps beyond the model's
        horizon are ignored, and so are series with a constant context, which have no scale.
        """
        return self._loss(pipeline, output, batch, batch.target[:, None])

    def _loss(
        self,
        pipeline: BaseChronosPipeline,
        output: Any,
        batch: Windows,
        outcomes: Tensor,
        *,
        relative: bool = False,
    ) -> tuple[float, int]:
        """The loss at outcomes ``[B, S, H]``, mean over S; steps count where the target is known.

        Parameters
        ----------
        relative
            Outcomes are quantiles of an original, and the loss of a series is in units of their
            spread: of their own loss at them, and :data:`LEAST_SPREAD`.

        Returns
        -------
        tuple
            The sum over steps, and their number.
        """
        model: Any = pipeline.inner_model
        preds = output.quantile_preds  # [B, Q, H]
        steps = min(preds.shape[-1], batch.target.shape[1])
        context = _read(model, batch.context).to(preds.device)
        outcomes = outcomes[..., :steps].to(preds.device)
        _, (loc, scale) = model.instance_norm(context)  # [B, 1]
        each = (loc[:, None], scale[:, None])
        scaled = model.instance_norm(outcomes, each)[0].double()
        scaled_preds = model.instance_norm(preds[..., :steps], each)[0].double()
        levels = torch.tensor(
            model.chronos_config.quantiles, dtype=torch.float64, device=preds.device
        )[:, None]
        away = scaled.abs().nanmean((1, 2)).nan_to_num()  # [B]
        far = (away / FURTHEST).clamp(min=1)[:, None, None]
        pinball = _summed_loss(scaled, scaled_preds, levels, far)
        if relative:
            spread = _summed_loss(scaled, scaled, levels, far).mean(1, keepdim=True)
            pinball = pinball / (spread / scaled.shape[1] + LEAST_SPREAD)
        # If a context is constant up to rounding, its scale is arbitrary, and so is the loss.
        varies = (scale > 1e-5 * loc.abs()) & (_spread(context) > 0)
        counts = torch.isfinite(batch.target[:, :steps]).to(preds.device) & varies
        return float(pinball[counts].sum()) / scaled.shape[1], int(counts.sum())


def _summed_loss(outcomes: Tensor, quantiles: Tensor, levels: Tensor, units: Tensor) -> Tensor:
    """Twice the pinball loss of quantiles ``[B, Q, h]``, their mean, summed over outcomes.

    Outcomes are ``[B, S, h]``, levels ``[Q, 1]``; errors are in ``units`` ``[B, 1, 1]``. Returns
    ``[B, h]``.
    """
    pinball = torch.zeros_like(outcomes[:, 0])
    for outcome in outcomes.unbind(1):  # [B, h]
        error = (outcome[:, None] - quantiles) / units  # [B, Q, h]
        pinball += 2 * torch.maximum(levels * error, (levels - 1) * error).mean(1)
    return pinball


def per_observed_step(loss: Tensor, observed: Tensor, quantiles: Tensor) -> Tensor:
    """A mean over all steps that a model forecasts, as a mean over the observed ones.

    Parameters
    ----------
    loss
        A scalar; steps that are not observed add nothing.
    observed
        Bool ``[B, H]``.
    quantiles
        Forecast ``[B, Q, H']``, H' ≥ H.
    """
    share = observed.float().mean() * observed.shape[-1] / quantiles.shape[-1]
    return loss / share.clamp_min(1e-3)


def patch_size(model: Any) -> int:
    """Steps in a patch of the input, of a model whose patches follow one another.

    Raises
    ------
    UnsupportedModelError
        They overlap, or leave steps out.
    """
    settings = model.chronos_config
    if settings.input_patch_stride != settings.input_patch_size:
        overlap = settings.input_patch_stride < settings.input_patch_size
        raise UnsupportedModelError(
            f"a model with input_patch_stride {settings.input_patch_stride} and patches of "
            f"{settings.input_patch_size} steps cannot be exported: they "
            f"{'overlap' if overlap else 'leave steps out'}. Use it with chronos."
        )
    return int(settings.input_patch_size)


def patch_count(settings: Mapping[str, Any], steps: int) -> int:
    """Number of patches of a context of this many steps, the last one padded."""
    size, stride = settings["input_patch_size"], settings["input_patch_stride"]
    padded = math.ceil(steps / size) * size
    return int((padded - size) // stride + 1)


def _read(model: Any, context: Tensor) -> Tensor:
    """The steps of ``context`` ``[B, T]`` that the model reads."""
    return context[:, -model.chronos_config.context_length :]


def _spread(context: Tensor) -> Tensor:
    """Largest minus smallest observed value, ``[B, 1]``; negative if there is none."""
    observed = torch.isfinite(context)
    highest = context.where(observed, -math.inf).amax(1, keepdim=True)
    return highest - context.where(observed, math.inf).amin(1, keepdim=True)
