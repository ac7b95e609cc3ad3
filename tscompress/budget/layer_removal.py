"""Fewer layers: drop those that the forecast loss needs least."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from tscompress.budget.measure_sensitivity import measure_sensitivity
from tscompress.budget.sensitivity import Sensitivity
from tscompress.budget.window_loss import split_windows, with_drivers
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.apply import config_of_layers, keep_layers_
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.data.batch import ForecastBatch
from tscompress.errors import PlanError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.progress import OnProgress, silent


def check_layers(loaded: LoadedModel, counts: Sequence[int]) -> dict[str, int]:
    """Stack to the number of layers that stay of it; refuses impossible numbers.

    Parameters
    ----------
    counts
        As for :func:`layers_that_stay`.

    Raises
    ------
    PlanError
        The model does not have more layers than these, or lacks a stack.
    """
    have = {stack: len(layers) for stack, layers in stack_layers(loaded.model).items()}
    asked = ",".join(map(str, counts))
    if len(counts) == 1:
        counts = [*counts] * len(have)
    if len(counts) != len(have):
        raise PlanError(f"layers {asked} are of two stacks; {loaded.name!r} has only an encoder.")
    wanted = dict(zip(have, counts, strict=True))
    if any(not 1 <= wanted[stack] <= have[stack] for stack in have) or wanted == have:
        raise PlanError(
            f"layers {asked} of {','.join(map(str, have.values()))} of {loaded.name!r} cannot be "
            "kept; give from 1 to as many, and fewer for one stack."
        )
    config_of_layers(loaded, {stack: range(count) for stack, count in wanted.items()})
    return wanted


def layers_that_stay(
    loaded: LoadedModel,
    counts: Sequence[int],
    batches: Sequence[ForecastBatch],
    fold: FoldConfig,
    on_progress: OnProgress = silent,
) -> dict[str, tuple[int, ...]]:
    """Stack to the indices of the layers that the forecast loss on ``batches`` needs most.

    The others are dropped one by one: always the one whose loss rises least once the feed-forward
    before it is fitted. Each time all kept layers are fitted again, if ``fold`` refits to the
    residual stream. Losses are cached.

    Parameters
    ----------
    counts
        Layers of the encoder and, if there is one, of the decoder; a single number is for both.
    fold
        How the kept layers are fitted.

    Raises
    ------
    PlanError
        The model does not have more layers than these, or lacks a stack.
    """
    have = {stack: len(layers) for stack, layers in stack_layers(loaded.model).items()}
    wanted = check_layers(loaded, counts)  # before anything is measured
    kept = {stack: list(range(count)) for stack, count in have.items()}
    going = sum(have.values()) - sum(wanted.values())
    trial = replace(loaded, model=copy.deepcopy(loaded.model))
    fitted, held_out = split_windows(batches)
    if not fold.univariate:  # or covariates would decide that it does not read
        held_out = with_drivers(loaded, held_out)
    for gone in range(going):
        on_progress("layers", gone, going)
        may_go = [stack for stack in have if _may_lose(loaded, kept, wanted, stack)]
        sensitivity = measure_sensitivity(
            trial,
            fitted,
            holdout=held_out,
            original=loaded if gone else None,
            fold=fold,
            head_sizes=(),
            hidden_ratios=(),
            width_ratios=(),
            embedding_ratios=(),
            layers=may_go,
            on_progress=partial(on_progress, "sensitivity"),
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
    """Whether a layer of ``stack`` may be dropped next, on the way from ``kept`` to ``wanted``."""
    left = {name: len(layers) - (name == stack) for name, layers in kept.items()}
    refused = adapter_of(loaded.family).layers_refused(left)
    return left[stack] >= wanted[stack] and refused is None


def _least_needed_layer(
    model: nn.Module, sensitivity: Sensitivity, stacks: Collection[str]
) -> tuple[str, int]:
    """Stack and index of the layer whose removal raises the loss least."""
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
    """Drop a layer and fit the others again, at their sizes."""
    before = replace(loaded)
    layers = range(len(stack_layers(loaded.model)[stack]))
    kept = {stack: tuple(index for index in layers if index != layer)}
    keep_layers_(loaded, kept)
    if fold.refit == "residual":
        whole = fold_plan(loaded.model, loaded.architecture, kept_layers=kept)
        fold_(loaded, whole, batches, fold, original=before)
