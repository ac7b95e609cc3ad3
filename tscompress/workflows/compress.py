"""Compress a model, in memory or to a checkpoint: calibrate, plan, apply, recover."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tscompress.budget.layer_removal import check_layers
from tscompress.budget.plan_within_budget import check_width_beside_budget
from tscompress.checkpoints import load as loading
from tscompress.checkpoints.factored_methods import forget_place_, keep_structure_
from tscompress.checkpoints.format import MAX_SHARD_SIZE, shard_bytes
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, check_double
from tscompress.compression.activations import Moment, collect_moments
from tscompress.compression.apply import fold_planned_
from tscompress.compression.calibration import calibration_batches, seasonal_share
from tscompress.compression.factor import apply_plan_, make_plan
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.batch import ForecastBatch
from tscompress.data.leakage import guarded
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.series import DEFAULT_FORMAT, Given, read_again, read_series
from tscompress.errors import DataError, PlanError, RecipeError, UsageError
from tscompress.evaluation.batching import Processes
from tscompress.families.registry import wrap_pipeline
from tscompress.io.files import check_output
from tscompress.io.making_way import undo_killed
from tscompress.io.memory import return_memory
from tscompress.io.text import counted
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import (
    FitSchedule,
    Method,
    PlannedSchedule,
    PowerLawSchedule,
    RankSchedule,
)
from tscompress.progress import OnProgress, silent
from tscompress.training.recovery_state import differences_from
from tscompress.workflows.claims import claimed_by_main
from tscompress.workflows.fitted_to import (
    calibration_sources,
    given_source,
    recorded_again,
    recorded_of,
    replayable,
    unless_named,
    with_source,
)
from tscompress.workflows.fold_sizes import chosen_fold_plan, named_fold_plan, width_of
from tscompress.workflows.memory import compression_memory_bytes
from tscompress.workflows.recipe import (
    Recipe,
    calibration_series,
    inputs_of,
    labels_of,
    summary_of,
)
from tscompress.workflows.save import GIVEN_SERIES, CompressedModel, check_smaller, save
from tscompress.workflows.seen_steps import sources_of
from tscompress.workflows.unfinished import (
    check_recovery_directory,
    check_unfinished,
    finish_recovery,
    recover_resumed_,
    recovery_directory,
)


@dataclass(frozen=True)
class Compression:
    """Result of :func:`compress_checkpoint`.

    Attributes
    ----------
    output
        The checkpoint; None after a dry run.
    note
        A caveat on the calibration series, if any, in one line.
    """

    plan: Plan
    output: Path | None = None
    note: str | None = None


def compress_checkpoint(
    recipe: Recipe,
    *,
    plan: Plan | None = None,
    series: Path | None = None,
    device: str = "cpu",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    dry_run: bool = False,
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
    on_series: Callable[[SeriesSummary | None], None] = lambda summary: None,
    on_memory: Callable[[Mapping[str, int]], None] = lambda needed: None,
    on_progress: OnProgress = silent,
) -> Compression:
    """Compress the model of a recipe and save a verified checkpoint to its output.

    What a recovery is resumed from lies beside the output until that is saved.

    Parameters
    ----------
    plan
        Sizes, instead of the recipe's.
    series
        A file of series to calibrate and recover on, instead of the config's source.
    max_shard_size
        As for :func:`tscompress.save`.
    dry_run
        Only plan; a ``plan`` is applied in memory, to check that it fits.
    inputs
        Besides those of the recipe: what the output must not replace.
    on_series
        Called with what was read of a file of series, before a model is.
    on_memory
        Called before weights are read with an estimate of memory in bytes, by part.

    Raises
    ------
    TscompressError
        One of its subclasses; no partial output is left.
    """
    Processes().check_alone("compress")
    largest = shard_bytes(max_shard_size)
    output = Path(recipe.output)
    work = None if dry_run else recovery_directory(output)
    if work is not None:
        inputs = *inputs, series, *inputs_of(recipe)
        undo_killed([output])
        check_output(output, force=force, inputs=inputs)
        if recipe.recover is not None:
            check_recovery_directory(work, inputs)
    given = None if series is None else read_series(series, recipe.series)
    if calibrates(recipe, plan):
        summary = summary_of(calibration_series(recipe, given))
        on_series(summary)
        if summary is not None and not summary.series:
            raise DataError(
                f"{counted(summary.too_short, 'series')} to calibrate on, none with three observed "
                "values; give longer ones."
            )
    found = loading.find(recipe.model, revision=recipe.revision)
    on_memory(compression_memory_bytes(found, recipe))
    loaded = loading.load(found, device=device, dtype=torch.float32)
    recipe = recipe.model_copy(update={"model": loaded.source, "revision": loaded.revision})
    if plan is None:
        if dry_run:
            planned = plan_loaded(loaded, recipe, series=given, on_progress=on_progress)
            return Compression(check_smaller(planned))
        check_sizes(loaded, recipe)
    with (
        claimed_by_main(None if dry_run else output),
        claimed_by_main(work if recipe.recover is not None else None),
    ):
        compressed = compress_loaded_(
            loaded,
            recipe,
            plan=plan,
            series=given,
            directory=work,
            force=force,
            on_progress=on_progress,
        )
        assert compressed.plan is not None
        if work is None:
            return Compression(compressed.plan, note=compressed.note)
        save(compressed, output, force=force, max_shard_size=largest)
        finish_recovery(compressed, work)
    return Compression(compressed.plan, output, compressed.note)


def compress_loaded_(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    plan: Plan | None = None,
    series: Given = None,
    directory: Path | None = None,
    force: bool = False,
    on_progress: OnProgress = silent,
) -> CompressedModel:
    """Calibrate, plan, compress and recover a model in memory by ``recipe``.

    Its weights change. ``directory`` is for the checkpoint and log of a recovery; a stopped one
    resumes from there. With ``force`` one of other models or settings is replaced.
    """
    with guarded(labels_of(recipe, given=series is not None)):
        return _compress_loaded_(loaded, recipe, plan, series, directory, force, on_progress)


def _compress_loaded_(
    loaded: LoadedModel,
    recipe: Recipe,
    plan: Plan | None,
    series: Given,
    directory: Path | None,
    force: bool,
    on_progress: OnProgress,
) -> CompressedModel:
    _check_original(loaded)
    check_fold_settings(loaded, recipe)
    earlier = sources_of(loaded)  # a folded checkpoint may be folded again
    if recipe.recover is not None:
        recipe.recover.resolved(loaded)  # refuses what there is nothing to learn from
    series = read_again(series)
    recipe = _with_format(recipe)
    trained = recorded_of(recipe.recover, recipe.series, series)
    beside = unless_named(recipe.recover, recipe.series, series)
    if recipe.recover is not None and directory is not None and not force:
        early = differences_from(directory, recipe.recover, loaded, series=beside)
        check_unfinished(directory, early)
    return_memory()  # of the stored weights, which were converted to float32
    method = method_of(recipe, plan)
    fits = calibrates(recipe, plan)
    calibrated = calibration_series(recipe, series) if fits else None
    grouped = not (recipe.fold.univariate or (plan is not None and plan.univariate))
    batches = _batches(loaded, recipe, fits, calibrated if fits else series, grouped)
    summary = summary_of(calibrated)
    given = given_source(series, recipe.series)
    record: dict[str, Any] = {}
    if batches:
        source = None if series is None else GIVEN_SERIES if given is None else given.source
        record = _calibration_record(recipe, source, summary, batches)
    original = _copy(loaded) if recipe.recover is not None else loaded
    if method == "fold":
        recipe = recipe.model_copy(update={"fold": recipe.fold.resolved(loaded)})
        if batches:
            record["precision"] = recipe.fold.precision
        _fold_(loaded, recipe, plan, batches, on_progress)
    else:
        _factor_(loaded, recipe, plan, batches, on_progress)
    assert loaded.plan is not None
    loaded.plan = _calibrated_on(loaded.plan, summary)
    recovery, config = None, recipe.recover
    if config is not None:
        check_smaller(loaded.plan)
        recovery = recover_resumed_(loaded, original, config, beside, directory, force, on_progress)
        recovery = replayable(recovery, recipe.series, series)
    cast_parameters_(loaded.model, loaded.stored_dtype)
    if loaded.plan.uniform_sizes is None:
        keep_structure_(loaded.model, loaded.forecaster, loaded.plan, loaded.config)
    forget_place_(loaded.model)
    known = {field.name: getattr(loaded, field.name) for field in fields(LoadedModel)}
    trained += recorded_again(recipe.recover, recipe.series, series)
    recipe = with_source(recipe, series)
    fitted = calibration_sources(recipe, calibrated) if batches else []
    return CompressedModel(
        **known,
        # A plan made by hand has no recipe: plan.json alone records the compression.
        recipe=recipe if plan is None else None,
        calibration=record,
        recovery=recovery,
        fitted_to=(*earlier, *fitted, *trained),
    )


def _calibration_record(
    recipe: Recipe,
    source: str | None,
    summary: SeriesSummary | None,
    batches: Sequence[ForecastBatch],
) -> dict[str, Any]:
    """The record of a calibration; ``source`` of given series, None: the recipe's."""
    record = recipe.calibration.model_dump()
    if source is not None:
        record["source"] = source
    if summary is not None:
        record["read"] = summary.model_dump(mode="json", exclude_none=True)
    record["series"] = sum(len(batch.context) for batch in batches)
    record["seasonal_share"] = seasonal_share(batches)
    return record


def plan_loaded(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    series: Given = None,
    on_progress: OnProgress = silent,
) -> Plan:
    """The plan of :func:`compress_loaded_` for a model, which is left unchanged.

    Free rotary frequencies are chosen only in folding.
    """
    _check_original(loaded)
    given = calibration_series(recipe, series) if recipe.calibrates else None
    summary = summary_of(given)
    if recipe.method != "fold":
        batches = _batches(loaded, recipe, recipe.calibrates, series if given is None else given)
        return _calibrated_on(_factor_plan(loaded, recipe, batches, on_progress)[0], summary)
    measures = isinstance(recipe.schedule, PlannedSchedule) or recipe.layers is not None
    recipe = recipe.model_copy(update={"fold": recipe.fold.resolved(loaded)})
    batches = _batches(loaded, recipe, True, given, not recipe.fold.univariate) if measures else []
    return _calibrated_on(chosen_fold_plan(loaded, recipe, batches, on_progress), summary)


def calibrates(recipe: Recipe, plan: Plan | None) -> bool:
    """Whether a compression fits the model to series."""
    return recipe.calibrates if plan is None else plan.calibrates


def method_of(recipe: Recipe, plan: Plan | None) -> Method:
    """Of a plan made by hand, or of the recipe."""
    return recipe.method if plan is None else plan.method


def _with_format(recipe: Recipe) -> Recipe:
    """The recovery reads files of series like the recipe, unless it has its own format."""
    config = recipe.recover
    if config is None or config.series_format is not None or recipe.series == DEFAULT_FORMAT:
        return recipe
    recover = config.model_copy(update={"series_format": recipe.series})
    return recipe.model_copy(update={"recover": recover})


def _calibrated_on(plan: Plan, summary: SeriesSummary | None) -> Plan:
    """The plan with what it is calibrated on now; one made by hand may name another file."""
    line = None if summary is None else summary.line()
    return plan.model_copy(update={"calibrated_on": line})


def _check_original(loaded: LoadedModel) -> None:
    check_double(loaded.model)
    _ = loaded.forecaster  # raises for families that are only for profiling
    if loaded.plan is not None:
        raise PlanError(f"{loaded.name!r} is compressed already; compress the original checkpoint.")


def _batches(
    loaded: LoadedModel,
    recipe: Recipe,
    fits: bool,
    series: Given,
    grouped: bool = True,
) -> list[ForecastBatch]:
    """Calibration batches, in groups of series unless every series is to be alone; none for svd and
    for a fold without sizes."""
    if fits:
        return calibration_batches(loaded, recipe.calibration, series, grouped=grouped)
    if series is not None and recipe.recover is None:
        if recipe.method == "svd":
            raise UsageError("svd does not calibrate; give no series, or use another method.")
        raise UsageError(
            "single_token or univariate alone does not calibrate; give no series, or sizes with it."
        )
    return []


def _copy(loaded: LoadedModel) -> LoadedModel:
    """A copy of the model with separate weights."""
    model = copy.deepcopy(loaded.model)
    return replace(loaded, model=model, pipeline=wrap_pipeline(loaded.family, model))


def _factor_(
    loaded: LoadedModel,
    recipe: Recipe,
    plan: Plan | None,
    batches: Sequence[ForecastBatch],
    on_progress: OnProgress,
) -> None:
    """Replace projections by two factors."""
    if plan is None:
        plan, moments = _factor_plan(loaded, recipe, batches, on_progress)
    else:
        feed_forward = bool(plan.parameters("feed_forward")[0])
        moments = _moments(loaded, plan.method, feed_forward, batches, on_progress)
    apply_plan_(loaded, plan, moments, partial(on_progress, "factor"))


def _factor_plan(
    loaded: LoadedModel,
    recipe: Recipe,
    batches: Sequence[ForecastBatch],
    on_progress: OnProgress,
) -> tuple[Plan, dict[str, Moment] | None]:
    """The plan of a recipe for factoring, and the moments that it was chosen by."""
    assert recipe.schedule is not None
    assert not isinstance(recipe.schedule, PlannedSchedule | FitSchedule)
    moments = _moments(loaded, recipe.method, recipe.feed_forward, batches, on_progress)
    on_progress("plan", 0, 1)
    plan = make_plan(
        loaded.model,
        loaded.architecture,
        recipe.method,
        recipe.schedule,
        moments=moments,
        exclude=recipe.exclude,
        feed_forward=recipe.feed_forward,
    )
    on_progress("plan", 1, 1)
    return plan, moments


def _moments(
    loaded: LoadedModel,
    method: Method,
    feed_forward: bool,
    batches: Sequence[ForecastBatch],
    on_progress: OnProgress,
) -> dict[str, Moment] | None:
    """Second moments of the projections' inputs; None for svd."""
    if method != "activation-svd":
        return None
    architecture = loaded.architecture
    names = [name for _, _, name in architecture.attention_projections()]
    if feed_forward:
        names += [name for _, _, name in architecture.feed_forward_projections()]
    return collect_moments(
        loaded, batches, names, lambda done: on_progress("calibrate", done, len(batches))
    )


def _fold_(
    loaded: LoadedModel,
    recipe: Recipe,
    plan: Plan | None,
    batches: Sequence[ForecastBatch],
    on_progress: OnProgress,
) -> None:
    """Fold heads and hidden layers."""
    if plan is None:
        plan = chosen_fold_plan(loaded, recipe, batches, on_progress)
    fold_planned_(loaded, plan, batches, recipe.fold, partial(on_progress, "fold"))


def check_fold_settings(loaded: LoadedModel, recipe: Recipe) -> None:
    """Refuse settings of folding that a method or a model does not read.

    Raises
    ------
    RecipeError, UsageError
    """
    if recipe.method == "fold":
        recipe.fold.resolved(loaded)
    elif recipe.fold != FoldConfig():
        raise RecipeError(
            f"fold has settings of folding, and {recipe.method} reads none; leave fold out."
        )


def check_sizes(loaded: LoadedModel, recipe: Recipe) -> None:
    """Refuse a model that is compressed already, or has not the sizes that a recipe names.

    Those that are found by measuring are not known yet.

    Raises
    ------
    PlanError
        Also where the sizes are those that it has.
    """
    _check_original(loaded)
    check_fold_settings(loaded, recipe)
    if recipe.layers is not None:
        check_layers(loaded, recipe.layers)
    if recipe.method != "fold":
        if not isinstance(recipe.schedule, RankSchedule | PowerLawSchedule):
            return
        plan, _ = _factor_plan(loaded, recipe.model_copy(update={"method": "svd"}), [], silent)
    elif isinstance(recipe.schedule, PlannedSchedule):
        if (width := width_of(loaded, recipe)) is not None:
            check_width_beside_budget(loaded, width)
        return
    elif isinstance(recipe.schedule, FitSchedule):
        return
    else:
        plan = named_fold_plan(loaded, recipe)
    if recipe.layers is None:
        check_smaller(plan)
