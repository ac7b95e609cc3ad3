"""Compress and recover: options to a recipe, then the workflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import Method, Schedule
from tscompress.data.synthetic import FloatArray
from tscompress.errors import UsageError
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule
from tscompress.progress import OnProgress, silent
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_state import OnRecovery
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.options import choose_schedule, needs_schedule, unplanned
from tscompress.workflows.recipe import Recipe, validate
from tscompress.workflows.save import CompressedModel, as_compressed


def compress(
    model: str | Path | LoadedModel,
    *,
    method: Method = "fold",
    rank: int | None = None,
    ff_ratio: float | None = None,
    latent: int | None = None,
    width: int | None = None,
    layers: int | tuple[int, int] | None = None,
    epsilon: float | None = None,
    energy: float | None = None,
    schedule: tuple[float, float] | None = None,
    fit: float | None = None,
    budget: float | str | None = None,
    powers_of_two: bool = False,
    layout: Literal["folded", "factored"] | None = None,
    multiple: int | None = None,
    depth: bool = False,
    keep_width: bool = False,
    plan: Plan | None = None,
    exclude: Sequence[str] = (),
    feed_forward: bool = False,
    fold: FoldConfig | None = None,
    calibration: CalibrationConfig | None = None,
    series: Sequence[FloatArray] | str | Path | None = None,
    recover: RecoveryConfig | None = None,
    revision: str | None = None,
    device: str = "cpu",
    on_progress: OnProgress = silent,
) -> CompressedModel:
    """Load a model and make it smaller.

    Parameters
    ----------
    model
        As for :func:`tscompress.load`, or a model already loaded, which is then changed in place.
    method
        ``fold``: smaller heads and fewer hidden units, a plain checkpoint if all sizes are alike.
        ``svd`` (paper sec. 5) or ``activation-svd`` (whitened by calibration moments): two factors
        for each projection.
    rank, epsilon, energy, schedule, fit, budget
        At most one, and with svd exactly one. ``rank``: of every projection; with fold the size of
        every head, ``d_kv``. ``epsilon``, ``energy``: of the ε-rank, or share of energy to keep.
        ``schedule``: (d_0, alpha) of the power law on head sizes; ``powers_of_two`` rounds it
        down; ``fit``: the power law fitted to the heads' ranks at this ε, for fold. ``budget``:
        for svd the share of parameters that the planned layers keep; for fold
        ``"parameters=0.5"``, ``"bytes=20MB"``, ``"macs=0.4"``, ``"kv-cache=0.125"``,
        ``"latency=0.4"`` or ``"wql=1%"`` of the whole model.
    ff_ratio
        With fold: share of hidden units to keep.
    latent
        With fold, but not with a budget: all cross-attention reads one latent of this size. The
        smallest KV cache; a factored checkpoint.
    width
        With fold, but not with a budget: numbers of the residual stream, ``d_model``; those of its
        principal directions stay that have most energy. Stays a plain checkpoint.
    layers
        With fold, but not with a budget: how many layers stay, of the encoder and of the decoder;
        one number is for each. The others go one by one, always the one without which the forecast
        loss on held-back calibration series rises least, and what stays is fitted to make up for
        them: follow it with a recovery.
    layout, multiple, depth, keep_width
        With a budget of fold: ``folded`` (the same sizes everywhere, the default) or ``factored``
        (sizes by layer); sizes in multiples of 8 or 16; allow to drop layers; leave ``d_model``.
    plan
        Instead of all of these: a plan made or edited before.
    exclude
        Shell patterns on names of layers that keep their heads and hidden units; a ``width``
        narrows what they read and write all the same.
    feed_forward
        With svd: factor the feed-forwards too.
    fold
        Switches of folding.
    calibration, series
        Which series to calibrate on; ``series``, a list of 1-D series or a file of them, overrides
        the config's source.
    recover
        Distil from the original afterwards, on ``series`` too.

    Returns
    -------
    CompressedModel
        In the stored dtype of the original. Its ``forecaster`` predicts;
        :func:`tscompress.save` writes it.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; see :mod:`tscompress.errors`.
    """
    wanted = {"rank": rank, "epsilon": epsilon, "energy": energy, "schedule": schedule, "fit": fit,
              "budget": budget}  # fmt: skip
    sizes = {"ff_ratio": ff_ratio, "latent": latent, "width": width, "layers": layers}
    chosen: Schedule | PlannedSchedule | None = None
    if plan is not None:
        values = (*wanted.values(), *sizes.values(), multiple, layout)
        switches = (powers_of_two, exclude, feed_forward, depth, keep_width)
        if any(value is not None for value in values) or any(switches):
            raise UsageError("a plan says every size; give no schedule or selection with it.")
        method = plan.method
    else:
        chosen = choose_schedule(
            method=method,
            **wanted,  # type: ignore[arg-type]
            required=needs_schedule(method, sizes),
            powers_of_two=powers_of_two,
            layout=layout,
            multiple=multiple,
            depth=depth,
            keep_width=keep_width,
        )
    fields_of_recipe: dict[str, Any] = {
        "method": method,
        "schedule": None if chosen is None else chosen.model_dump(),
        **sizes,
        "layers": (layers,) if isinstance(layers, int) else layers,
        "fold": (fold or FoldConfig()).model_dump(),
        "exclude": tuple(exclude),
        "feed_forward": feed_forward,
        "calibration": (calibration or CalibrationConfig()).model_dump(),
        "recover": None if recover is None else recover.model_dump(),
    }
    if plan is not None:
        fields_of_recipe |= unplanned(plan.method)
    recipe = validate(Recipe, {"model": "-", "output": "-", **fields_of_recipe}, "the options")
    if isinstance(model, LoadedModel):
        loaded = model
        cast_parameters_(loaded.model, torch.float32)
    else:
        loaded = load(model, revision=revision, device=device, dtype=torch.float32)
    recipe = recipe.model_copy(
        update={"model": loaded.source, "revision": loaded.revision, "output": ""}
    )
    return compress_loaded_(loaded, recipe, plan=plan, series=series, on_progress=on_progress)


def recover(
    student: str | Path | LoadedModel,
    teacher: str | Path | LoadedModel,
    config: RecoveryConfig | None = None,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    report: OnRecovery = lambda line: None,
) -> CompressedModel:
    """Win back by a short distillation what surgery lost.

    Folded stays folded, and factored stays factored: only numbers change.

    Parameters
    ----------
    student
        What ``compress`` wrote or returned. A model in memory is changed in place.
    teacher
        The original, as for :func:`tscompress.load`.
    config
        Budget, losses, data; by default five minutes on synthetic series, Chronos-T5 also on real
        ones.
    series
        Series to train on besides, each 1-D, or a file or directory of them; missing values are
        NaN.
    directory
        For the checkpoint and the log; None: nothing is written.
    resume
        Go on from the checkpoint in ``directory``.
    report
        Called with each line of the log.

    Returns
    -------
    CompressedModel
        In the stored dtype of the student, with the weights that were best on held-out series; its
        ``recovery`` says how it went, and whether it finished or was stopped by Ctrl-C.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; see :func:`tscompress.training.recovery.recover_`.
    """
    ours, theirs = (
        model if isinstance(model, LoadedModel) else load(model, device=device)
        for model in (student, teacher)
    )
    smaller = as_compressed(ours)
    try:
        result = recover_(
            smaller,
            theirs,
            config,
            series=series,
            directory=None if directory is None else Path(directory),
            resume=resume,
            report=report,
        )
    finally:
        cast_parameters_(smaller.model, smaller.stored_dtype)
    recipe = smaller.recipe and smaller.recipe.model_copy(update={"recover": result.config})
    return replace(smaller, recipe=recipe, recovery=result)
