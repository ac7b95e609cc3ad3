"""Sizes within a budget: sensitivities are measured, candidates priced, and the best is chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tscompress.architectures import describe
from tscompress.calibration import CalibrationBatch
from tscompress.candidates import (
    Candidate,
    choose_factored,
    choose_folded,
    folded_candidates,
    latency_of,
)
from tscompress.costs import CostModel
from tscompress.errors import DataError
from tscompress.folding import FoldConfig
from tscompress.latency import Workload
from tscompress.loading import LoadedModel, build_empty
from tscompress.plan import Plan
from tscompress.planning import fold_plan
from tscompress.recipe import PlannedSchedule
from tscompress.sensitivity import measure_sensitivity
from tscompress.surgery import apply_fold_, config_of_layers, keep_layers_

#: Of calibration windows, one in so many is kept from the statistics and only measured on.
_HOLD_OUT = 4
_LEVELS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def plan_within_budget(
    loaded: LoadedModel,
    schedule: PlannedSchedule,
    batches: Sequence[CalibrationBatch],
    fold: FoldConfig,
    workload: Workload | None,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Plan:
    """The plan to fold that is predicted to lose least within a budget.

    Sensitivities are measured once for a model and its calibration, and then read from a cache.
    Budgets in latency or WQL measure a few candidates on top: real ones, folded and timed or
    scored.

    Parameters
    ----------
    workload
        The ``predict`` call that MACs, key-value cache and latency are of; None: the default.

    Raises
    ------
    PlanError
        No size fits the budget.
    """
    workload = _fitting(loaded, workload or Workload())
    fitted, held_out = _split(batches)
    sensitivity = measure_sensitivity(
        loaded,
        fitted,
        holdout=held_out,
        fold=fold,
        layers=schedule.depth,
        on_progress=lambda done, total: on_progress("sensitivity", done, total),
    )
    costs = CostModel(
        loaded.family, loaded.model, workload, bytes_per_number=loaded.stored_dtype.itemsize
    )
    base = _Wql(loaded, held_out) if schedule.budget.measure == "wql" else None
    measured = 0

    def count(candidate: Candidate, value: float) -> None:
        nonlocal measured
        measured += 1
        on_progress("candidates", measured, measured + 1)

    def quality(candidate: Candidate) -> float:
        assert base is not None
        plan = plan_of(loaded, candidate, schedule)
        trial = copy.deepcopy(loaded)
        if plan.kept_layers:
            keep_layers_(trial, plan.kept_layers)
        apply_fold_(trial, plan, fitted, fold)
        return base.ratio(trial)

    def latency(candidate: Candidate) -> float:
        return latency_of(loaded, candidate, workload)

    if schedule.layout == "folded":
        candidates = folded_candidates(
            sensitivity, costs, multiple=schedule.multiple, depth=schedule.depth
        )
        chosen = choose_folded(
            candidates,
            schedule.budget,
            costs,
            measure_latency=latency,
            measure_wql=quality,
            on_measured=count,
        )
    else:
        chosen = choose_factored(
            sensitivity,
            costs,
            schedule.budget,
            multiple=schedule.multiple,
            measure_latency=latency,
            measure_wql=quality,
            on_measured=count,
        )
    return plan_of(loaded, chosen, schedule)


def plan_of(loaded: LoadedModel, candidate: Candidate, schedule: PlannedSchedule) -> Plan:
    """The plan that folds ``loaded`` to a candidate's sizes."""
    model = loaded.model
    if candidate.kept_layers:
        model = build_empty(loaded.family, config_of_layers(loaded, candidate.kept_layers))
    return fold_plan(
        model,
        describe(loaded.family, model),
        qk=candidate.qk,
        vo=candidate.vo,
        hidden=candidate.hidden,
        kept_layers=candidate.kept_layers,
        schedule={
            **schedule.model_dump(mode="json", exclude={"budget"}),
            "budget": str(schedule.budget),
        },
    )


def _split(
    batches: Sequence[CalibrationBatch], *, whole_groups: bool = True
) -> tuple[list[CalibrationBatch], list[CalibrationBatch]]:
    """Rows to fold on, and every fourth row, or group of rows, to measure on."""
    fitted: list[CalibrationBatch] = []
    held_out: list[CalibrationBatch] = []
    before = 0  # rows or groups in the batches so far
    for batch in batches:
        numbers = torch.arange(len(batch.context))
        if whole_groups and batch.group_ids is not None:
            numbers = batch.group_ids
        away = (numbers + before) % _HOLD_OUT == _HOLD_OUT - 1
        before += int(numbers.max()) + 1
        for part, chosen in ((fitted, ~away), (held_out, away)):
            if bool(chosen.any()):
                ids = None if batch.group_ids is None else batch.group_ids[chosen]
                part.append(CalibrationBatch(batch.context[chosen], batch.target[chosen], ids))
    if held_out:
        return fitted, held_out
    if whole_groups:  # fewer than four groups
        return _split(batches, whole_groups=False)
    raise DataError("a budget takes at least four calibration series; give more.")


def _fitting(loaded: LoadedModel, workload: Workload) -> Workload:
    """The workload, no longer than what the model reads and forecasts in one pass."""
    pipeline = loaded.forecaster
    return workload.model_copy(
        update={
            "context_length": min(workload.context_length, pipeline.model_context_length),
            "horizon": min(workload.horizon, pipeline.model_prediction_length),
        }
    )


class _Wql:
    """Weighted quantile loss on windows, each scaled by its context, against the original's."""

    def __init__(self, original: LoadedModel, batches: Sequence[CalibrationBatch]) -> None:
        self.batches = batches
        self.base = self.of(original)

    def ratio(self, loaded: LoadedModel) -> float:
        return self.of(loaded) / self.base

    def of(self, loaded: LoadedModel) -> float:
        loss = scale = 0.0
        levels = torch.tensor(_LEVELS, dtype=torch.float64)
        for index, batch in enumerate(self.batches):
            forecast = _quantiles(loaded, batch, seed=index)  # [B, H, 9]
            target = batch.target[..., None].to(torch.float64)
            size = batch.context.abs().nanmean(1)[:, None, None].clamp_min(1e-9)
            error = (target - forecast) / size
            pinball = torch.maximum(levels * error, (levels - 1) * error)
            loss += float(pinball.nansum()) * 2 / len(_LEVELS)
            scale += float((target / size).abs().nansum())
        return loss / scale if scale > 0 else loss


def _quantiles(loaded: LoadedModel, batch: CalibrationBatch, seed: int) -> Tensor:
    # Chronos-T5 draws sample paths: the same random numbers for every model.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        forecasts, _ = loaded.forecaster.predict_quantiles(
            _inputs(loaded, batch), batch.target.shape[1], quantile_levels=_LEVELS
        )
    stacked = torch.stack(list(forecasts)) if isinstance(forecasts, list) else forecasts
    return stacked.reshape(len(batch.target), batch.target.shape[1], -1).to(torch.float64)


def _inputs(loaded: LoadedModel, batch: CalibrationBatch) -> Tensor:
    # Chronos-2 takes [series, variates, steps].
    return batch.context[:, None] if loaded.family == "chronos-2" else batch.context
