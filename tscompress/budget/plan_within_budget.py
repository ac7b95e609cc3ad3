"""Sizes within a budget: measure sensitivities, price candidates, choose the best."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from tscompress.benchmark.workload import Workload
from tscompress.budget.candidate_latency import latency_of
from tscompress.budget.candidates import Candidate, folded_candidates
from tscompress.budget.costs import CostModel
from tscompress.budget.forecast_loss import Forecasts
from tscompress.budget.measure_sensitivity import measure_sensitivity, unmeasured
from tscompress.budget.part_costs import Measure
from tscompress.budget.search import (
    Measurement,
    choose_factored,
    choose_folded,
    choose_width_by_layer,
)
from tscompress.budget.sensitivity import PartKind, Sensitivity
from tscompress.budget.window_loss import (
    LossRatios,
    WindowLoss,
    every_nth,
    split_windows,
    with_drivers,
)
from tscompress.checkpoints.given import AnyModel, in_float32, loaded_of
from tscompress.checkpoints.load import LoadedModel, check_double, kept_whole
from tscompress.compression.apply import config_of_layers, fold_planned_, second_fold
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    check_calibration,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.residual_stream import sliced_config
from tscompress.data.batch import ForecastBatch
from tscompress.data.synthetic import FloatArray
from tscompress.errors import PlanError, UsageError
from tscompress.families.registry import adapter_of, build_empty, describe
from tscompress.io.arguments import check_type
from tscompress.linalg import even_picks
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule
from tscompress.progress import OnProgress, silent


def plan_within_budget(
    loaded: LoadedModel,
    schedule: PlannedSchedule,
    batches: Sequence[ForecastBatch],
    fold: FoldConfig,
    workload: Workload | None,
    on_progress: OnProgress = silent,
    *,
    width: int | None = None,
) -> Plan:
    """The fold plan of least predicted loss within a budget.

    Sensitivities are measured once for a model, its calibration and a given width, and then read
    from a cache. For budgets in latency or WQL a few candidates are also folded, and timed or
    scored; for others a few of different widths, if the residual stream may be narrowed.

    Parameters
    ----------
    workload
        The ``predict`` call for MACs, key-value cache and latency; None: the default.
    width
        The residual-stream width that sizes are chosen for, measured on a copy folded to it; None:
        the schedule says whether the search chooses one, and by layer it then measures
        sensitivities again at that width.

    Raises
    ------
    PlanError
        No size fits the budget, or the model cannot have the width.
    """
    if width is not None:
        check_width_beside_budget(loaded, width)
    workload = workload_for(loaded, workload or Workload())
    search = _Search(loaded, schedule, batches, fold, workload, on_progress)
    if width is None and schedule.layout == "factored" and schedule.may_narrow:
        width = search.best_width()
    original = search.original
    costs = original if width is None else search.narrower(width)
    trials = search.trials()
    alike: dict[str, Any] = {"original": original, "width": width, "multiple": schedule.multiple}
    measuring: dict[str, Any] = {
        "measure_latency": trials.latency,
        "measure_wql": trials.quality,
        "on_measured": trials.note,
    }

    def choose(sensitivity: Sensitivity, measure_loss: Measurement | None = None) -> Candidate:
        if schedule.layout == "factored":
            return choose_factored(sensitivity, costs, schedule.budget, **alike, **measuring)
        candidates = folded_candidates(
            sensitivity,
            costs,
            **alike,
            depth=schedule.depth,
            narrower=search.narrower if schedule.may_narrow and width is None else None,
        )
        measuring["measure_loss"] = measure_loss
        return choose_folded(candidates, schedule.budget, costs, original=original, **measuring)

    sized = loaded if width is None else _of_width(loaded, width)
    if not schedule.budget.is_measured:
        choose(unmeasured(sized, fold, layers=schedule.depth))  # refuses what no size fits
    if width is not None:
        sized = trials.narrowed = _narrowed(loaded, width, search.fitted, fold, on_progress)
    chosen = choose(search.measured(sized), trials.loss)
    plan = plan_of(loaded, chosen, schedule, fold)
    record = {**plan.schedule, "found": trials.found(chosen) | _found(chosen, original)}
    return plan.model_copy(update={"schedule": record | ({"width": width} if width else {})})


class _Search:
    """What a search for sizes reads: windows, costs by width, and sensitivities."""

    def __init__(
        self,
        loaded: LoadedModel,
        schedule: PlannedSchedule,
        batches: Sequence[ForecastBatch],
        fold: FoldConfig,
        workload: Workload,
        on_progress: OnProgress,
    ) -> None:
        self.loaded, self.schedule, self.fold = loaded, schedule, fold
        self.workload, self.on_progress = workload, on_progress
        self.fitted, held_out = split_windows(batches)
        self.held_out = with_drivers(loaded, held_out)
        self.original = self._costs(loaded.model)
        self._narrower: dict[int, CostModel] = {}
        self._whole: Sensitivity | None = None

    def narrower(self, width: int) -> CostModel:
        """Costs of the model at another residual-stream width."""
        if width not in self._narrower:
            self._narrower[width] = self._costs(_of_width(self.loaded, width).model)
        return self._narrower[width]

    def trials(self) -> _Trials:
        """To measure candidates; holds what the original forecasts."""
        return _Trials(
            self.loaded,
            self.schedule,
            self.fold,
            self.fitted,
            self.held_out,
            self.workload,
            self.on_progress,
        )

    def _costs(self, model: nn.Module) -> CostModel:
        return CostModel(
            self.loaded.family,
            model,
            self.workload,
            bytes_per_number=self.loaded.stored_dtype.itemsize,
            whole=kept_whole(self.loaded.model, self.loaded.stored_dtype),
        )

    def measured(self, sized: LoadedModel) -> Sensitivity:
        """Sensitivities of the model, which are measured once, or of a copy that is narrower."""
        is_whole = sized is self.loaded
        if is_whole and self._whole is not None:
            return self._whole
        found = _measured(
            sized,
            self.fitted,
            self.held_out,
            self.fold,
            self.on_progress,
            depth=self.schedule.depth,
            original=None if is_whole else self.loaded,
        )
        if is_whole:
            self._whole = found
        return found

    def best_width(self) -> int | None:
        """Of sizes by layer; None: all of it.

        Raises
        ------
        PlanError
            No size fits the budget.
        """

        def choose(found: Sensitivity, measure_loss: Measurement | None = None) -> Candidate:
            return choose_width_by_layer(
                found,
                self.original,
                self.schedule.budget,
                self.narrower,
                multiple=self.schedule.multiple,
                measure_loss=measure_loss,
            )

        choose(unmeasured(self.loaded, self.fold, layers=False))  # refuses what no size fits
        return choose(self.measured(self.loaded), self.trials().loss).width


def check_width_beside_budget(loaded: LoadedModel, width: int) -> None:
    """Refuse a width beside a budget that the model cannot have.

    Raises
    ------
    PlanError
        It is no smaller than ``d_model``, or below a head size: heads are measured whole, and none
        is larger than the stream.
    """
    plan = fold_plan(loaded.model, loaded.architecture, width=width)
    whole = max(head.head_size for head in plan.heads)
    if width < whole:
        raise PlanError(
            f"width {width} is below the head size {whole}; with a budget give at least {whole}, "
            "or give width, rank and ff_ratio."
        )


def _of_width(loaded: LoadedModel, width: int) -> LoadedModel:
    """A model of the same family, narrower, without weights."""
    config = sliced_config(loaded.family, loaded.config, width)
    return replace(loaded, model=build_empty(loaded.family, config), config=config)


def _narrowed(
    loaded: LoadedModel,
    width: int,
    fitted: Sequence[ForecastBatch],
    fold: FoldConfig,
    on_progress: OnProgress,
) -> LoadedModel:
    """A copy folded to a residual-stream width, all else whole."""
    copied = copy.deepcopy(loaded)
    plan = fold_plan(copied.model, copied.architecture, width=width)
    fold_planned_(copied, plan, fitted, fold, partial(on_progress, "narrow"))
    copied.plan = None  # as a stock model, which it is
    return copied


class _Trials:
    """Measured candidates: their latency, or WQL or loss of a copy folded to their sizes."""

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
        self.held_out = held_out
        self.base = WindowLoss(loaded, held_out) if schedule.budget.measure == "wql" else None
        self.narrowed: LoadedModel | None = None  # a copy folded to a given width
        self._measured: dict[int, float] = {}  # ratio to the original by id of the candidate
        self._parts: dict[int, LossRatios] = {}  # of which it is the worst
        self._finalists = self._folds = 0  # so far

    def latency(self, candidate: Candidate) -> float:
        return latency_of(self.loaded, candidate, self.workload)

    def quality(self, candidate: Candidate) -> float:
        assert self.base is not None
        ratios = self._parts[id(candidate)] = self.base.ratios(self._folded(candidate))
        return ratios.worst

    def loss(self, candidate: Candidate) -> float:
        """Of forecasts, as sensitivities are measured, but relative; infinity if it is none."""
        self.on_progress("candidates", self._finalists, self._finalists + 1)
        self._finalists += 1
        found = self._forecasts.loss(self._folded(candidate))
        self.on_progress("candidates", self._finalists, self._finalists)
        return found if math.isfinite(found) else math.inf

    @cached_property
    def _forecasts(self) -> Forecasts:
        return Forecasts(self.loaded, self.held_out, relative=True)

    def _folded(self, candidate: Candidate) -> LoadedModel:
        """A copy of the model."""
        plan = plan_of(self.loaded, candidate, self.schedule, self.fold)
        start = self.loaded
        if self.narrowed is not None and (second := second_fold(start, plan)) is not None:
            start, plan = self.narrowed, second
        trial = copy.deepcopy(start)
        self._folds += 1
        stage = partial(self.on_progress, f"candidate {self._folds}")
        fold_planned_(trial, plan, self.fitted, self.fold, stage)
        return trial

    def note(self, candidate: Candidate, ratio: float) -> None:
        self._measured[id(candidate)] = ratio
        self.on_progress("candidates", len(self._measured), len(self._measured) + 1)

    def found(self, chosen: Candidate) -> dict[str, float]:
        """Ratio of the candidate to the original, for a budget that is measured.

        For one in WQL also those of series without and with covariates, where there are both.
        """
        measured = self._measured.get(id(chosen))
        found = {} if measured is None else {"measured": measured}
        parts = self._parts.get(id(chosen))
        if parts is None or None in parts:
            return found
        return found | {f"measured_{name}": ratio for name, ratio in parts._asdict().items()}


def sensitivities(
    model: AnyModel,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    calibration: CalibrationConfig | None = None,
    fold: FoldConfig | None = None,
    depth: bool = False,
    name: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> Sensitivity:
    """Measure how much the forecast loss rises when one part of a model is made smaller.

    A budget plans with this result and reads it from the same cache.

    Parameters
    ----------
    model
        A directory, a Hub id, a loaded model, a Chronos pipeline or a predictor around one; see
        :mod:`tscompress.checkpoints.given`. Of one in memory that is not in float32 a copy is
        measured.
    series, calibration, fold
        As for :func:`tscompress.compress`. Of a Chronos-T5 the loss is measured on every Nth of the
        windows held out, some 64 of them.
    depth
        Also measure dropping whole layers.
    name, revision, device
        As for :func:`tscompress.probe`.

    Returns
    -------
    Sensitivity
        On held-out windows: nats per token for Chronos-T5, scaled pinball loss for the others; of
        Chronos-2 and Chronos-T5 at the model's own forecasts. Of Chronos-2 windows with and without
        covariates count alike, groups with drivers or a leading series among them.

    Raises
    ------
    TscompressError
        One of its subclasses; see
        :func:`tscompress.budget.measure_sensitivity.measure_sensitivity`.
    """
    check_calibration(calibration, series)
    check_type("fold", fold, (FoldConfig, type(None)), "a FoldConfig")
    fold = fold or FoldConfig()
    if fold.dropped:
        raise UsageError(f"{fold.dropped[0]} has no sizes to measure; leave it out of fold.")
    loaded = in_float32(
        loaded_of(model, name=name, revision=revision, device=device, exported=False)
    )
    loaded.forecaster  # noqa: B018  raises for families that do not forecast
    check_double(loaded.model)
    batches = calibration_batches(loaded, calibration or CalibrationConfig(), series)
    fitted, held_out = split_windows(batches)
    return _measured(loaded, fitted, with_drivers(loaded, held_out), fold, on_progress, depth=depth)


def _measured(
    loaded: LoadedModel,
    fitted: Sequence[ForecastBatch],
    held_out: Sequence[ForecastBatch],
    fold: FoldConfig,
    on_progress: OnProgress,
    *,
    depth: bool,
    original: LoadedModel | None = None,
) -> Sensitivity:
    """The loss on every Nth window, where a family says that fewer will do."""
    most = adapter_of(loaded.family).defaults.loss_windows
    windows = sum(len(batch.context) for batch in held_out)
    every = 1 if most is None else max(1, round(windows / most))
    return measure_sensitivity(
        loaded,
        fitted,
        holdout=every_nth(held_out, every),
        original=original,
        fold=fold,
        layers=depth,
        on_progress=partial(on_progress, "sensitivity"),
    )


_KINDS: dict[PartKind, str] = {
    "width": "residual stream", "qk": "queries and keys", "vo": "values", "hidden": "hidden units",
    "embedding": "token embedding",
    "layer": "whole layers",
}  # fmt: skip
_MAX_SIZES = 6


def sensitivity_tables(found: Sensitivity) -> list[Table]:
    """One table for each kind of part: rises of the forecast loss by size."""
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


def _found(chosen: Candidate, costs: CostModel) -> dict[str, float]:
    """Cost ratios of the chosen candidate to the original, and the predicted rise of the loss: of a
    given width, or one taken by layer, over that of the model folded to it."""
    found = {}
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
        embedding=candidate.embedding,
        width=candidate.width,
        free_frequencies=fold.frequencies == "free",
        kept_layers=candidate.kept_layers,
        schedule={
            **schedule.model_dump(mode="json", exclude={"budget"}),
            "budget": str(schedule.budget),
        },
    )


def workload_for(loaded: LoadedModel, workload: Workload) -> Workload:
    """The workload on the model's device, at most as long as the model's context and one pass."""
    pipeline = loaded.forecaster
    return workload.model_copy(
        update={
            "device": next(loaded.model.parameters()).device.type,
            "context_length": min(workload.context_length, pipeline.model_context_length),
            "horizon": min(workload.horizon, pipeline.model_prediction_length),
        }
    )
