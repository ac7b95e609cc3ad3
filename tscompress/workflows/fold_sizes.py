"""The sizes of a fold that a recipe names, or that are measured for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tscompress.budget.layer_removal import layers_that_stay
from tscompress.budget.plan_within_budget import plan_within_budget
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.apply import keep_layers_
from tscompress.compression.fold_plans import fold_plan_of
from tscompress.data.batch import ForecastBatch
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule
from tscompress.plan.width import dimensions_of
from tscompress.progress import OnProgress
from tscompress.workflows.recipe import Recipe


def chosen_fold_plan(
    loaded: LoadedModel,
    recipe: Recipe,
    batches: Sequence[ForecastBatch],
    on_progress: OnProgress,
) -> Plan:
    """The fold plan of a recipe; ``batches`` are for measurements."""
    if isinstance(schedule := recipe.schedule, PlannedSchedule):
        width = width_of(loaded, recipe)
        if recipe.width is not None and width is None:
            schedule = schedule.model_copy(update={"keep_width": True})  # a share of all
        return plan_within_budget(
            loaded, schedule, batches, recipe.fold, recipe.bench, on_progress, width=width
        )
    plan = named_fold_plan(loaded, recipe)  # what no layer allows is refused before measuring
    if recipe.layers is None:
        return plan
    kept = layers_that_stay(loaded, recipe.layers, batches, recipe.fold, on_progress)
    fewer = replace(loaded)  # weights are shared
    keep_layers_(fewer, kept)
    plan = named_fold_plan(fewer, recipe)
    chosen = {**plan.schedule, "layers": list(recipe.layers)}
    return plan.model_copy(update={"kept_layers": kept, "schedule": chosen})


def named_fold_plan(loaded: LoadedModel, recipe: Recipe) -> Plan:
    """The sizes that a recipe without a budget names, for all layers of a model."""
    schedule = recipe.schedule
    assert not isinstance(schedule, PlannedSchedule)
    return fold_plan_of(
        loaded.model,
        loaded.architecture,
        schedule,
        ff_ratio=recipe.ff_ratio,
        latent=recipe.latent,
        embedding_rank=recipe.embedding_rank,
        width=width_of(loaded, recipe),
        exclude=recipe.exclude,
        free_frequencies=recipe.fold.frequencies == "free",
        univariate=recipe.fold.univariate,
        single_token=recipe.fold.single_token,
    )


def width_of(loaded: LoadedModel, recipe: Recipe) -> int | None:
    """Dimensions of the residual stream that a recipe names, if it does."""
    if recipe.width is None:
        return None
    return dimensions_of(recipe.width, loaded.config["d_model"])
