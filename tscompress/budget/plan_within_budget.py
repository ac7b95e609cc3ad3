"""Sizes within a budget: sensitivities are measured, candidates priced, and the best is chosen."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from tscompress.benchmark.workload import Workload
from tscompress.budget.costs import CostModel, Measure
from tscompress.budget.measure_sensitivity import DEFAULT_WIDTHS, measure_sensitivity
from tscompress.budget.search import (
    Candidate,
    choose_factored,
    choose_folded,
    folded_candidates,
    latency_of,
)
from tscompress.budget.sensitivity import PartKind, Sensitivity
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.apply import config_of_layers, fold_planned_, keep_layers_
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.residual_stream import narrowed_config
from tscompress.data.batch import ForecastBatch
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DataError, PlanError
from tscompress.families.registry import adapter_of, build_empty, describe
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.linalg import even_picks
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule
from tscompress.progress import OnProgress, silent

#: Of calibration windows, one in so many is kept from the statistics and only measured on.
_HOLD_OUT = 4


def plan_within_budget(
    loaded: LoadedModel,
    schedule: PlannedSchedule,
    batches: Sequence[ForecastBatch],
    fold: FoldConfig,
    workload: Workload | None,
    on_progress: OnProgress = silent,
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
    narrows = schedule.may_narrow
    sensitivity = _measured(
        loaded, fitted, held_out, fold, on_progress, depth=schedule.depth, width=narrows
    )
    itemsize = loaded.stored_dtype.itemsize
    costs = CostModel(loaded.family, loaded.model, workload, bytes_per_number=itemsize)

    def narrower(width: int) -> CostModel:
        config = narrowed_config(loaded.family, loaded.config, width)
        model = build_empty(loaded.family, config)
        return CostModel(loaded.family, model, workload, bytes_per_number=itemsize)

    trials = _Trials(loaded, schedule, fold, fitted, held_out, workload, on_progress)
    measuring: dict[str, Any] = {
        "measure_latency": trials.latency,
        "measure_wql": trials.quality,
        "on_measured": trials.note,
    }
    if schedule.layout == "factored":
        chosen = choose_factored(
            sensitivity, costs, schedule.budget, multiple=schedule.multiple, **measuring
        )
    else:
        candidates = folded_candidates(
            sensitivity,
            costs,
            multiple=schedule.multiple,
            depth=schedule.depth,
            narrower=narrower if narrows else None,
        )
        chosen = choose_folded(candidates, schedule.budget, costs, **measuring)
    plan = plan_of(loaded, chosen, schedule, fold)
    found = _found(chosen, costs, trials.measured.get(id(chosen)))
    return plan.model_copy(update={"schedule": {**plan.schedule, "found": found}})


class _Trials:
    """Candidates that are measured: their latency, or the WQL of a copy that is folded to them.

    Attributes
    ----------
    measured
        Ratio to the original, by the identity of the candidate.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        schedule: PlannedSchedule,
        fold: FoldConfig,
        fitted: Sequence[ForecastBatch],
        held_out: Sequence[ForecastBatch],
        workload: Workload,
        on_progress: OnProgress,
    ) -> None:
        self.loaded, self.schedule, self.fold = loaded, schedule, fold
        self.fitted, self.workload, self.on_progress = fitted, workload, on_progress
        self.base = _Wql(loaded, held_out) if schedule.budget.measure == "wql" else None
        self.measured: dict[int, float] = {}

    def latency(self, candidate: Candidate) -> float:
        return latency_of(self.loaded, candidate, self.workload)

    def quality(self, candidate: Candidate) -> float:
        assert self.base is not None
        plan = plan_of(self.loaded, candidate, self.schedule, self.fold)
        trial = copy.deepcopy(self.loaded)
        fold_planned_(trial, plan, self.fitted, self.fold)
        return self.base.ratio(trial)

    def note(self, candidate: Candidate, ratio: float) -> None:
        self.measured[id(candidate)] = ratio
        self.on_progress("candidates", len(self.measured), len(self.measured) + 1)


def layers_that_stay(
    loaded: LoadedModel,
    counts: Sequence[int],
    batches: Sequence[ForecastBatch],
    fold: FoldConfig,
    on_progress: OnProgress = silent,
) -> dict[str, tuple[int, ...]]:
    """Stack to the indices of the layers that the forecast loss on ``batches`` needs most.

    The others go one by one, always the one that costs least after what precedes it was fitted to
    make up for it; each time all that stay are fitted anew. What it costs is kept in a cache.

    Parameters
    ----------
    counts
        Layers of the encoder and of the decoder, if there is one; a single number is for each.
    fold
        How what stays is fitted.

    Raises
    ------
    PlanError
        The model has no such layers, or no more than these.
    """
    have = {stack: len(layers) for stack, layers in stack_layers(loaded.model).items()}
    asked = ",".join(map(str, counts))
    if len(counts) == 1:
        counts = [*counts] * len(have)
    if len(counts) != len(have):
        raise PlanError(f"layers {asked} are of two stacks; {loaded.name!r} has an encoder alone.")
    wanted = dict(zip(have, counts, strict=True))
    if any(not 1 <= wanted[stack] <= have[stack] for stack in have) or wanted == have:
        raise PlanError(
            f"layers {asked} cannot stay of {','.join(map(str, have.values()))} of "
            f"{loaded.name!r}; give from 1 to as many, and fewer of one stack."
        )
    # What no model can do is refused before anything is measured.
    config_of_layers(loaded, {stack: range(count) for stack, count in wanted.items()})
    kept = {stack: list(range(count)) for stack, count in have.items()}
    going = sum(have.values()) - sum(wanted.values())
    trial = replace(loaded, model=copy.deepcopy(loaded.model))
    fitted, held_out = _split(batches)
    for gone in range(going):
        on_progress("layers", gone, going)
        may_go = [stack for stack in have if _may_lose(loaded, kept, wanted, stack)]
        sensitivity = measure_sensitivity(
            trial,
            fitted,
            holdout=held_out,
            fold=fold,
            head_sizes=(),
            hidden_ratios=(),
            width_ratios=(),
            layers=may_go,
            on_progress=lambda done, total: on_progress("sensitivity", done, total),
        )
        stack, least = _least_needed_layer(trial.model, sensitivity, may_go)
        del kept[stack][least]
        if gone + 1 < going:
            _leave_out_(trial, stack, least, fitted, fold)
    on_progress("layers", going, going)
    return {stack: tuple(layers) for stack, layers in kept.items()}


def _may_lose(
    loaded: LoadedModel,
    kept: Mapping[str, Sequence[int]],
    wanted: Mapping[str, int],
    stack: str,
) -> bool:
    """Whether a layer of ``stack`` may go next, on the way from ``kept`` to ``wanted``."""
    left = {name: len(layers) - (name == stack) for name, layers in kept.items()}
    refused = adapter_of(loaded.family).layers_refused(left)
    return left[stack] >= wanted[stack] and refused is None


def _least_needed_layer(
    model: nn.Module, sensitivity: Sensitivity, stacks: Collection[str]
) -> tuple[str, int]:
    """Stack and index of the layer, of these stacks, without which the loss is least."""
    have = stack_layers(model)
    places = {layer_name(s, index): (s, index) for s in stacks for index in range(len(have[s]))}
    losses = {
        places[part.name]: part.losses[0]
        for part in sensitivity.parts
        if part.kind == "layer" and part.sizes and part.name in places
    }
    return min(losses, key=losses.__getitem__)


def _leave_out_(
    loaded: LoadedModel,
    stack: str,
    layer: int,
    batches: Sequence[ForecastBatch],
    fold: FoldConfig,
) -> None:
    """Drop a layer and fit the others to make up for it, at the sizes they have."""
    before = replace(loaded)
    layers = range(len(stack_layers(loaded.model)[stack]))
    kept = {stack: tuple(index for index in layers if index != layer)}
    keep_layers_(loaded, kept)
    if fold.refit == "residual":
        whole = fold_plan(loaded.model, loaded.architecture, kept_layers=kept)
        given = fold.model_copy(update={"continuations": "given"})
        fold_(loaded, whole, batches, given, original=before)


def sensitivities(
    model: str | Path | LoadedModel,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    calibration: CalibrationConfig | None = None,
    fold: FoldConfig | None = None,
    depth: bool = False,
    on_progress: OnProgress = silent,
) -> Sensitivity:
    """What each part of a model costs in forecast loss when it alone is made smaller.

    It is what a budget plans with, and comes from the same cache: planning is instant after this.

    Parameters
    ----------
    model
        As for :func:`tscompress.load`, or a model already loaded, in float32; it stays as it is.
    series, calibration, fold
        As for :func:`tscompress.compress`.
    depth
        Measure leaving out whole layers too.

    Returns
    -------
    Sensitivity
        Nats a token of Chronos-T5, scaled pinball loss of the others, on held-out windows.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; see
        :func:`tscompress.budget.measure_sensitivity.measure_sensitivity`.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model, dtype=torch.float32)
    batches = calibration_batches(loaded, calibration or CalibrationConfig(), series)
    fold = fold or FoldConfig()
    return _measured(loaded, *_split(batches), fold, on_progress, depth=depth, width=True)


def _measured(
    loaded: LoadedModel,
    fitted: Sequence[ForecastBatch],
    held_out: Sequence[ForecastBatch],
    fold: FoldConfig,
    on_progress: OnProgress,
    *,
    depth: bool,
    width: bool,
) -> Sensitivity:
    return measure_sensitivity(
        loaded,
        fitted,
        holdout=held_out,
        fold=fold,
        width_ratios=DEFAULT_WIDTHS if width else (),
        layers=depth,
        on_progress=lambda done, total: on_progress("sensitivity", done, total),
    )


_KINDS: dict[PartKind, str] = {
    "width": "residual stream", "qk": "queries and keys", "vo": "values", "hidden": "hidden units",
    "layer": "whole layers",
}  # fmt: skip
_MAX_SIZES = 6


def sensitivity_tables(found: Sensitivity) -> list[Table]:
    """For a terminal, one table for each kind: rises of the forecast loss, by size."""
    tables = []
    for kind, title in _KINDS.items():
        parts = [part for part in found.parts if part.kind == kind]
        if not parts:
            continue
        sizes = sorted({size for part in parts for size in part.sizes}, reverse=True)
        shown = [sizes[index] for index in even_picks(len(sizes), _MAX_SIZES).tolist()]
        table = Table(
            title=title,
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("", no_wrap=True)
        for size in shown:
            table.add_column("left out" if kind == "layer" else str(size), justify="right")
        for part in parts:
            losses = dict(zip(part.sizes, part.losses, strict=True))
            cells = (_signed(losses[size]) if size in losses else "" for size in shown)
            table.add_row(part.name, *cells)
        tables.append(table)
    return tables


def _signed(loss: float) -> str:
    text = f"{loss:+.4f}"
    return text if float(text) else f"{0:.4f}"


def _found(chosen: Candidate, costs: CostModel, measured: float | None) -> dict[str, float]:
    """What was chosen, for the record: ratios to the original, and the predicted rise of loss.

    ``measured`` is the ratio of what a budget in latency or WQL was measured in.
    """
    found = {} if measured is None else {"measured": measured}
    for measure in get_args(Measure):
        if original := costs.original.of(measure):
            found[measure] = chosen.costs.of(measure) / original
    return found | {"predicted_loss": chosen.loss}


def plan_of(
    loaded: LoadedModel, candidate: Candidate, schedule: PlannedSchedule, fold: FoldConfig
) -> Plan:
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
        width=candidate.width,
        free_frequencies=fold.frequencies == "free",
        kept_layers=candidate.kept_layers,
        schedule={
            **schedule.model_dump(mode="json", exclude={"budget"}),
            "budget": str(schedule.budget),
        },
    )


def _split(
    batches: Sequence[ForecastBatch],
) -> tuple[list[ForecastBatch], list[ForecastBatch]]:
    """Rows to fold on, and every fourth row, or group of rows, to measure on.

    Of series that several windows are of, every fourth is measured on with all of them. Fewer than
    four series of that kind, or groups, are not kept whole.
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
                # What is known ahead has no target to measure on.
                asked = torch.isfinite(batch.target).any(1)
                numbers = asked.cumsum(0)
            away = asked & ((numbers + before) % _HOLD_OUT == _HOLD_OUT - 1)
            before += int(numbers.max()) + 1
            if whole_series and batch.group_ids is None and batch.series is not None:
                for row, series in enumerate(batch.series.tolist()):
                    if series >= 0:
                        away[row] = sides.setdefault(
                            series, len(sides) % _HOLD_OUT == _HOLD_OUT - 1
                        )
            for part, chosen in ((fitted, ~away), (held_out, away)):
                if bool(chosen.any()):
                    part.append(batch.rows(chosen))
        if fitted and held_out:
            return fitted, held_out
    raise DataError("what parts cost is measured on at least four calibration series; give more.")


def _fitting(loaded: LoadedModel, workload: Workload) -> Workload:
    """The workload on the model's device, no longer than what it reads and forecasts at once."""
    pipeline = loaded.forecaster
    return workload.model_copy(
        update={
            "device": next(loaded.model.parameters()).device.type,
            "context_length": min(workload.context_length, pipeline.model_context_length),
            "horizon": min(workload.horizon, pipeline.model_prediction_length),
        }
    )


class _Wql:
    """Weighted quantile loss on windows against the original's.

    Each window is scaled by its context or its target, whichever is larger, so that none, such as
    one that follows nothing but zeros, outweighs all others.
    """

    def __init__(self, original: LoadedModel, batches: Sequence[ForecastBatch]) -> None:
        self.batches = batches
        self.base = self.of(original)
        if not 0 < self.base < math.inf:
            raise DataError(
                "a budget in WQL needs calibration windows that are observed, are not zero and are "
                "forecast neither without error nor without bounds; give other series."
            )

    def ratio(self, loaded: LoadedModel) -> float:
        return self.of(loaded) / self.base

    def of(self, loaded: LoadedModel) -> float:
        loss = scale = 0.0
        levels = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64)
        for index, batch in enumerate(self.batches):
            forecast = _quantiles(loaded, batch, seed=index)  # [B, H, 9]
            context, target = (x.to(torch.float64) for x in (batch.context, batch.target))
            size = torch.fmax(context.abs().nanmean(1), target.abs().nanmean(1))
            told = torch.isfinite(size) & (size > 0)
            size = size[told, None]
            error = (target[told, :, None] - forecast[told]) / size[..., None]
            pinball = torch.maximum(levels * error, (levels - 1) * error)
            # Of steps that came; a forecast that is no number makes the loss none.
            loss += float(pinball[torch.isfinite(target[told])].sum()) * 2 / len(QUANTILE_LEVELS)
            scale += float((target[told] / size).abs().nansum())
        return loss / scale if scale > 0 else 0.0


def _quantiles(loaded: LoadedModel, batch: ForecastBatch, seed: int) -> Tensor:
    """Forecasts ``[B, H, 9]`` as ``predict`` makes them."""
    horizon = batch.target.shape[1]
    # Chronos-T5 draws sample paths: the same random numbers for every model.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = adapter_of(loaded.family).quantiles(
            loaded.forecaster, batch.context, horizon, QUANTILE_LEVELS, batch.group_ids
        )
    return found.to(torch.float64)
