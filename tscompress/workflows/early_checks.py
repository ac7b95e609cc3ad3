"""What later stages of a recipe would refuse, refused before the first one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tscompress.benchmark.workload import Workload, check_fits, check_sampling
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import OWN_SOURCES
from tscompress.data.leakage import check_no_leak, guarded
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.series import DEFAULT_FORMAT
from tscompress.data.streaming import check_sources, summaries
from tscompress.data.suites import COVARIATES_SUITE, check_present, load_suite
from tscompress.errors import RecipeError, UsageError
from tscompress.evaluation.forecasting import check_sampling as check_forecasts
from tscompress.evaluation.joint import are_joint, check_settings
from tscompress.evaluation.results import Settings
from tscompress.families.groups import group_size
from tscompress.training.recovery import check_shares
from tscompress.workflows.compress import check_sizes
from tscompress.workflows.recipe import (
    EvaluationConfig,
    Recipe,
    calibration_series,
    labels_of,
    summary_of,
)

_ALONE = "a univariate model sees one series at a time; leave out cross_learning."


def check_stages(recipe: Recipe, loaded: LoadedModel, device: str) -> None:
    """Raise errors that later stages would raise for this model.

    Raises
    ------
    PlanError
        It has not the sizes that are asked for.
    RecipeError, UsageError
        There is no such suite or dataset, the model does not read as much as bench asks for, or
        draws no samples and bench asks for some, it sees one series at a time, or it reads no
        covariates and a task or a dataset has some; or the recovery has nothing to learn.
    DataError, LeakError
        The recovery cannot learn from a source, or it has series that are scored.
    """
    check_sizes(loaded, recipe)
    check_measurements(recipe, loaded, device)
    check_recovery(recipe)
    check_training(recipe, loaded)


def check_sources_are_read(recipe: Recipe) -> None:
    """Refuse a file of series that no stage reads, and notation without a file.

    Raises
    ------
    RecipeError
    """
    source = recipe.calibration.source
    if source not in OWN_SOURCES and not recipe.calibrates and recipe.profile is None:
        method = recipe.method if recipe.method == "svd" else "this fold"
        raise RecipeError(
            f"calibration: source: {source!r}, and {method} reads no series; leave it out."
        )
    if recipe.series != DEFAULT_FORMAT and not recipe.names_series:
        raise RecipeError(
            "series says how files of series are written, and the recipe names no file; give one "
            "as calibration.source, recover.series or evaluation.suite, or leave series out."
        )


def check_measurements(recipe: Recipe, loaded: LoadedModel, device: str) -> None:
    """The same, of what is measured."""
    if recipe.probe is not None:
        check_forecasts(loaded.forecaster, recipe.probe.batch_size, recipe.probe.num_samples)
        recipe.probe.check_reads(loaded.forecaster, univariate=recipe.fold.univariate)
    if recipe.scored_on is not None:
        _check_evaluation(recipe.scored_on, recipe, loaded)
    if recipe.bench is not None:
        asked, kind = recipe.bench.device, torch.device(device).type
        if asked not in ("cpu", kind):  # cpu is also what recorded recipes say of themselves
            raise RecipeError(
                f"bench: device: {asked!r}, and the models are on {device!r}; give --device "
                f"{asked}, or leave it out."
            )
        _check_bench(recipe.bench.on(device), recipe, loaded)


def check_recovery(recipe: Recipe) -> None:
    """The same, of what the recovery learns from; of large sources the first series."""
    if recipe.recover is not None and recipe.recover.series:
        with guarded(labels_of(recipe)):
            check_sources(recipe.recover.series, _form_of_recovery(recipe))


def check_training(recipe: Recipe, loaded: LoadedModel) -> None:
    """The same, of how a model learns."""
    if recipe.recover is None:
        return
    config = recipe.recover.resolved(loaded)
    groups = 1 if recipe.fold.univariate else group_size(loaded.family, loaded.model)
    check_shares(config, 1, groups)
    if recipe.latent is not None and config.watch_ranks:
        raise RecipeError(
            "recover: watch_ranks: attention with a latent has no keys and values of its own; "
            "leave watch_ranks out."
        )


def check_calibration(recipe: Recipe) -> None:
    """The same, of what it is calibrated on, where that is not its own.

    Raises
    ------
    DataError, LeakError
    """
    given = calibration_series(recipe) if recipe.calibrates else None
    if given is not None:
        with guarded(labels_of(recipe)):
            check_no_leak(given)


def read_summaries(recipe: Recipe) -> Iterator[SeriesSummary | None]:
    """What each file of series of a recipe holds: calibration, evaluation and recovery.

    Raises
    ------
    DataError, RecipeError
        One cannot be read.
    """
    if recipe.calibrates:
        yield summary_of(calibration_series(recipe))
    yield from other_summaries(recipe)


def other_summaries(recipe: Recipe) -> Iterator[SeriesSummary | None]:
    """The same without the calibration."""
    config = recipe.scored_on
    if config is not None and config.long_format is not None:
        yield from (dataset.summary for dataset in load_suite(config.selected()))
    if recipe.recover is not None:
        yield from summaries(recipe.recover.series, _form_of_recovery(recipe))


def _form_of_recovery(recipe: Recipe) -> GivenSeries:
    own = None if recipe.recover is None else recipe.recover.series_format
    return recipe.series if own is None else own


def _check_evaluation(config: EvaluationConfig, recipe: Recipe, loaded: LoadedModel) -> None:
    suite = config.selected()
    check_forecasts(loaded.forecaster, config.batch_size, None)
    check_present(suite, config.root)
    settings = Settings(cross_learning=config.cross_learning, as_univariate=config.as_univariate)
    check_settings(loaded.forecaster, settings, config.batch_size)
    if recipe.fold.univariate and config.cross_learning:
        raise UsageError(_ALONE)
    if config.long_format is None and suite.name != COVARIATES_SUITE:
        return
    for dataset in load_suite(suite, 1, root=config.root):
        are_joint(loaded.forecaster, dataset, settings)
        if recipe.fold.univariate and dataset.covariates and not config.as_univariate:
            raise UsageError(
                f"{dataset.name!r} has covariates, and a univariate model reads none; give "
                "as_univariate: true to forecast its series alone."
            )


def _check_bench(workload: Workload, recipe: Recipe, loaded: LoadedModel) -> None:
    check_fits(loaded.forecaster, repr(loaded.name), workload)
    check_sampling([loaded.forecaster], workload.num_samples)
    if recipe.fold.univariate and workload.cross_learning:
        raise UsageError(_ALONE)
