"""Held-out calibration windows, and the weighted quantile loss of a model on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.batch import ForecastBatch
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.data.multivariate import Groups, driven_windows, led_windows
from tscompress.errors import DataError
from tscompress.families.groups import group_size
from tscompress.families.registry import adapter_of
from tscompress.io.seeds import seeded
from tscompress.layers.shared_cross_attention import cross_attention_shared

#: One calibration window in this many is held out of the statistics, for measuring the loss.
HOLD_OUT = 4


def split_windows(
    batches: Sequence[ForecastBatch],
) -> tuple[list[ForecastBatch], list[ForecastBatch]]:
    """Rows for folding, and every fourth row, or group of rows, held out for the loss.

    Windows of the same series are on the same side, but for those in groups: a group has series of
    both. With fewer than four such series, or groups, they are split.

    Raises
    ------
    DataError
        There are fewer than four series.
    """
    for whole_groups, whole_series in ((True, True), (True, False), (False, False)):
        fitted: list[ForecastBatch] = []
        held_out: list[ForecastBatch] = []
        before = 0  # rows or groups in the batches so far
        sides: dict[int, bool] = {}  # of series
        for batch in batches:
            numbers = torch.arange(len(batch.context))
            asked = torch.ones(len(batch.context), dtype=torch.bool)
            if batch.group_ids is not None and whole_groups:
                numbers = batch.group_ids
            elif batch.group_ids is not None:
                # Covariates known ahead have no target to measure.
                asked = torch.isfinite(batch.target).any(1)
                numbers = asked.cumsum(0)
            away = asked & ((numbers + before) % HOLD_OUT == HOLD_OUT - 1)
            before += int(numbers.max()) + 1
            if whole_series and batch.group_ids is None and batch.series is not None:
                for row, series in enumerate(batch.series.tolist()):
                    if series >= 0:
                        away[row] = sides.setdefault(series, len(sides) % HOLD_OUT == HOLD_OUT - 1)
            for part, chosen in ((fitted, ~away), (held_out, away)):
                if bool(chosen.any()):
                    part.append(batch.rows(chosen))
        if fitted and held_out:
            return fitted, joined(held_out, max(map(len, batches)))
    raise DataError("sensitivities are measured on at least four calibration series; give more.")


def with_drivers(
    loaded: LoadedModel, held_out: Sequence[ForecastBatch], seed: int = 0
) -> list[ForecastBatch]:
    """What the loss is measured on: for a model that reads covariates, groups of series as well.

    They are the windows without groups, two thirds of them with covariates that are known ahead, a
    third with a leading series that is not, and is not forecast, where there are enough. Batches
    are joined, and those with groups come first.
    """
    found = list(held_out)
    if group_size(loaded.family, loaded.model) == 1:
        return found
    rng = np.random.default_rng(seed)
    for batch in held_out:
        if batch.group_ids is not None:
            continue
        windows = torch.cat([batch.context, batch.target], dim=1).numpy()
        horizon = batch.target.shape[1]
        cut = -(-2 * len(windows) // 3)
        if cut > 1:
            groups = driven_windows(rng, windows[:cut], horizon)
            found.append(_as_batch(groups, horizon, asked=~groups.known))
        if len(windows) - cut > 1:
            groups = led_windows(rng, windows[cut:], horizon)
            follows = np.append(np.diff(groups.group_ids) == 0, [False])  # the last of each leads
            found.append(_as_batch(groups, horizon, asked=follows))
    return joined(found, max(map(len, found)))


def _as_batch(groups: Groups, horizon: int, asked: NDArray[np.bool_]) -> ForecastBatch:
    """Groups of which the rows ``asked`` ``[B]`` have a target, the last ``horizon`` steps."""
    past = groups.series.shape[1] - horizon
    target = np.where(asked[:, None], groups.series[:, past:], np.float32(np.nan))
    return groups.batch(groups.series[:, :past], target)


def joined(batches: Sequence[ForecastBatch], most_rows: int) -> list[ForecastBatch]:
    """The same rows in fewer batches: those of one shape together, up to ``most_rows``.

    What is held out of a batch is a few rows of it, and a pass of few rows takes nearly as long.
    Rows of a group, which attend to each other, stay together; batches with groups come first.
    """
    grouped: dict[tuple[object, ...], list[list[ForecastBatch]]] = {}
    alone: dict[tuple[object, ...], list[ForecastBatch]] = {}
    for batch in batches:
        absent = tuple(getattr(batch, entry.name) is None for entry in fields(batch))
        shape = (batch.context.shape[1], batch.target.shape[1], absent)
        if batch.group_ids is None:
            alone.setdefault(shape, []).append(batch)
            continue
        runs = grouped.setdefault(shape, [[]])
        if sum(map(len, runs[-1])) + len(batch) > most_rows:
            runs.append([])
        runs[-1].append(batch)
    found = [ForecastBatch.concatenated(run) for runs in grouped.values() for run in runs if run]
    for same in alone.values():
        rows = ForecastBatch.concatenated(same)
        found += [rows.rows(slice(at, at + most_rows)) for at in range(0, len(rows), most_rows)]
    return found


def every_nth(batches: Sequence[ForecastBatch], every: int) -> list[ForecastBatch]:
    """Every Nth row, or group of rows, of each batch, and at least one: all lengths stay."""
    found = []
    for index, batch in enumerate(batches):
        numbers = torch.arange(len(batch.context))
        if batch.group_ids is not None:
            numbers = torch.unique(batch.group_ids, return_inverse=True)[1]
        first = index % min(every, int(numbers.max()) + 1)
        found.append(batch.rows(numbers % every == first))
    return found


class LossRatios(NamedTuple):
    """Losses of a model / those of the original; NaN of forecasts that are not finite.

    Attributes
    ----------
    without_covariates, with_covariates
        Of series without a covariate, and of those with one; None: there are none.
    """

    without_covariates: float | None
    with_covariates: float | None

    @property
    def worst(self) -> float:
        """The larger one: what a budget is held to."""
        return float(np.max([ratio for ratio in self if ratio is not None]))  # NaN if one is


class WindowLoss:
    """Weighted quantile loss on windows, relative to the original's.

    Series with a covariate are apart: what it explains is a small part of the loss of all windows,
    and the first that a cut loses. Each window is scaled by its context or its target, whichever is
    larger, so that no window (as after a context of zeros) outweighs the others.

    Raises
    ------
    DataError
        The original's loss is 0 or not finite.
    """

    def __init__(self, original: LoadedModel, batches: Sequence[ForecastBatch]) -> None:
        self.batches = batches
        self.bases = self.of(original)
        if not 0 < sum(self.bases) < math.inf:
            raise DataError(
                "a budget in WQL needs calibration windows with observed targets other than zero "
                "and a finite WQL of the original above 0; give other series."
            )

    def ratios(self, loaded: LoadedModel) -> LossRatios:
        """Losses of a model / losses of the original."""
        pairs = zip(self.of(loaded), self.bases, strict=True)
        return LossRatios(*(_ratio(loss, base) for loss, base in pairs))

    def of(self, loaded: LoadedModel) -> tuple[float, float]:
        """Loss on series without and with covariates; 0 if no window has an observed target."""
        losses, scales = [0.0, 0.0], [0.0, 0.0]
        for index, batch in enumerate(self.batches):
            forecast = batch_quantiles(loaded, batch, seed=index)  # [B, H, 9]
            for kind, rows in enumerate((~batch.driven, batch.driven)):
                loss, scale = _loss(forecast[rows], batch.rows(rows))
                losses[kind] += loss
                scales[kind] += scale
        without, with_one = (
            loss / scale if scale > 0 else 0.0 for loss, scale in zip(losses, scales, strict=True)
        )
        return without, with_one


def _ratio(loss: float, base: float) -> float | None:
    if base:
        return loss / base
    return math.inf if loss else None  # of a kind that there is none of both are 0


def _loss(forecast: Tensor, batch: ForecastBatch) -> tuple[float, float]:
    """Summed loss of forecasts ``[B, H, 9]`` in scaled units, and the summed size of targets."""
    levels = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64)
    context, target = (x.to(torch.float64) for x in (batch.context, batch.target))
    size = torch.fmax(context.abs().nanmean(1), target.abs().nanmean(1))
    known = torch.isfinite(size) & (size > 0)
    size, target = size[known, None], target[known]
    error = (target[..., None] - forecast[known]) / size[..., None]
    pinball = torch.maximum(levels * error, (levels - 1) * error)
    # Over observed steps; NaN forecasts make the loss NaN.
    loss = float(pinball[torch.isfinite(target)].sum()) * 2 / len(QUANTILE_LEVELS)
    return loss, float((target / size).abs().nansum())


def batch_quantiles(loaded: LoadedModel, batch: ForecastBatch, seed: int) -> Tensor:
    """Forecasts of ``predict``, float64 ``[B, H, 9]``; NaN of covariates known ahead."""
    horizon = batch.target.shape[1]
    # Chronos-T5 draws sample paths: the same random numbers for every model.
    device = next(loaded.model.parameters()).device
    with seeded(seed, device), cross_attention_shared(loaded.forecaster):
        found = adapter_of(loaded.family).quantiles(
            loaded.forecaster,
            batch.context,
            horizon,
            QUANTILE_LEVELS,
            batch.group_ids,
            batch.future,
        )
    return found.to(torch.float64)
