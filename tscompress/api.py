"""The walk, top to bottom: load, profile, plan, surgery, recover, evaluate, save, load again.

Each function takes what the one before it returned. :func:`run` does them all from one recipe.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tscompress import latency
from tscompress.allocator import return_memory
from tscompress.budgets import parse_budget
from tscompress.calibration import (
    OWN_SOURCES,
    CalibrationBatch,
    CalibrationConfig,
    Moment,
    calibration_batches,
    collect_moments,
)
from tscompress.corpus import FloatArray
from tscompress.data import guarded
from tscompress.errors import OutputExistsError, PlanError, UsageError
from tscompress.evaluation import SEASONAL_NAIVE, EvaluationResult, Quantiles, evaluate
from tscompress.examples import ForecastExample, typical_example
from tscompress.factored import PLAN_FILE
from tscompress.fidelity import DatasetFidelity, Fidelity, dataset_fidelity, summarize
from tscompress.files import check_output, user_path
from tscompress.folding import FoldConfig
from tscompress.loading import (
    PROVENANCE_FILE,
    LoadedModel,
    cast_parameters_,
    load,
    model_name,
    wrap_pipeline,
)
from tscompress.plan import Plan
from tscompress.planning import (
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    FitSchedule,
    Method,
    PowerLawSchedule,
    RankSchedule,
    Schedule,
    fold_plan_of,
    make_plan,
)
from tscompress.probing.measure import ProbeConfig, probe
from tscompress.probing.results import ProbeResult
from tscompress.profiling import profile
from tscompress.rank_profile import RankProfile
from tscompress.readers import UnreadableFileError, read_json
from tscompress.recipe import (
    SIZES_BESIDE_HEADS,
    EvaluationConfig,
    PlannedSchedule,
    Recipe,
    load_recipe,
    validate,
)
from tscompress.recovery import OnRecovery, can_resume, recover_, what_differs
from tscompress.recovery_config import RecoveryConfig
from tscompress.score_cache import ScoreCache
from tscompress.serialization import RECIPE_FILE, CompressedModel, save
from tscompress.sizing import layers_that_stay, plan_within_budget
from tscompress.suites import (
    FREQUENCIES_SUITE,
    OFFLINE_SUITE,
    EvaluationDataset,
    Fingerprints,
    find_suite,
    label_fingerprints,
    load_suite,
)
from tscompress.surgery import apply_plan_, fold_planned_, keep_layers_

#: Called with the name of a stage, steps done and steps in all.
OnProgress = Callable[[str, int, int], None]


#: Where a run keeps what an unfinished recovery is resumed from.
WORK = "recovery"


def _silent(stage: str, done: int, total: int) -> None:
    pass


def choose_schedule(
    *,
    method: Method = "fold",
    rank: int | None = None,
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
    required: bool = True,
) -> Schedule | PlannedSchedule | None:
    """The schedule that one of rank, epsilon, energy, schedule, fit and budget asks for.

    Raises
    ------
    UsageError
        Several were given, or none although it is ``required``; an option was given that goes
        with another one; or a value is out of range.
    """
    given: dict[str, Callable[[], Schedule | PlannedSchedule]] = {}
    if rank is not None:
        given["rank"] = lambda: RankSchedule(rank=rank)
    if epsilon is not None:
        given["epsilon"] = lambda: EpsilonSchedule(epsilon=epsilon)
    if energy is not None:
        given["energy"] = lambda: EnergySchedule(energy=energy)
    if schedule is not None:
        d_0, alpha = schedule
        given["schedule"] = lambda: PowerLawSchedule(
            d_0=d_0, alpha=alpha, powers_of_two=powers_of_two
        )
    if fit is not None:
        given["fit"] = lambda: FitSchedule(epsilon=fit)
    if budget is not None:
        given["budget"] = lambda: _budget_schedule(
            method, budget, layout, multiple, depth, keep_width
        )
    if powers_of_two and schedule is None:
        raise UsageError("powers_of_two rounds a power law; give schedule D0,ALPHA with it.")
    asked = depth or keep_width or (layout, multiple) != (None, None)
    if asked and (budget is None or method != "fold"):
        raise UsageError("layout, multiple, depth and keep_width go with a budget of fold.")
    if not given and not required:
        return None
    if len(given) != 1:
        came = f"{' and '.join(given)} were given" if given else "none was given"
        raise UsageError(
            f"{came}; give exactly one of rank, epsilon, energy, schedule, fit and budget"
            + (", or ff_ratio, latent or layers alone." if method == "fold" and not given else ".")
        )
    ((name, make),) = given.items()
    try:
        return make()
    except ValueError as error:
        reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise UsageError(f"{name}: {reason}.") from None


def needs_schedule(method: str, fields: Mapping[str, Any]) -> bool:
    """Whether a recipe with these fields would change nothing without a schedule of ranks."""
    return method != "fold" or all(fields[name] is None for name in SIZES_BESIDE_HEADS)


def unplanned(method: Method) -> dict[str, Any]:
    """Fields of a recipe whose sizes a plan given by hand says: they stand for nothing."""
    if method == "fold":
        return {"schedule": None, "ff_ratio": 1.0}
    return {"schedule": BudgetSchedule(parameter_ratio=1.0).model_dump(), "ff_ratio": None}


def _budget_schedule(
    method: Method,
    budget: float | str,
    layout: Literal["folded", "factored"] | None,
    multiple: int | None,
    depth: bool,
    keep_width: bool,
) -> BudgetSchedule | PlannedSchedule:
    share: float | None
    try:
        share = float(budget)
    except ValueError:
        share = None
    if method == "fold":
        if share is not None:
            raise UsageError(
                f"budget {budget} does not say of what; for fold give parameters={budget}, "
                f"bytes=20MB, macs={budget}, kv-cache={budget}, latency={budget} or wql=1%."
            )
        return PlannedSchedule.model_validate(
            {
                "budget": parse_budget(str(budget)),
                "layout": "folded" if layout is None else layout,
                "multiple": 1 if multiple is None else multiple,
                "depth": depth,
                "keep_width": keep_width,
            }
        )
    if share is None:
        raise UsageError(
            f"budget {budget!r} is for fold; {method} takes the share of parameters that the "
            "planned layers keep, such as 0.25."
        )
    return BudgetSchedule(parameter_ratio=share)


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
    on_progress: OnProgress = _silent,
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


def compress_loaded_(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    plan: Plan | None = None,
    series: Sequence[FloatArray] | str | Path | None = None,
    directory: Path | None = None,
    force: bool = False,
    on_progress: OnProgress = _silent,
) -> CompressedModel:
    """Calibrate, plan, operate on and recover a model in memory, as ``recipe`` says.

    Its weights change. ``directory`` is for the checkpoint and log of a recovery; one that was
    stopped goes on from there. With ``force`` one of other models or settings makes way.
    """
    with guarded(labels_of(recipe, given=series is not None)):
        return _compress_loaded_(loaded, recipe, plan, series, directory, force, on_progress)


def _compress_loaded_(
    loaded: LoadedModel,
    recipe: Recipe,
    plan: Plan | None,
    series: Sequence[FloatArray] | str | Path | None,
    directory: Path | None,
    force: bool,
    on_progress: OnProgress,
) -> CompressedModel:
    _check_original(loaded)
    if recipe.recover is not None:
        recipe.recover.check_options(loaded.family)  # before the work
        if plan is not None and plan.width is not None and recipe.recover.hidden_weight > 0:
            raise UsageError(
                "hidden_weight compares residual streams of one width, and the plan makes that "
                f"{plan.width.kept}; leave it out."
            )
        if directory is not None and not force:
            _check_unfinished(directory, what_differs(directory, recipe.recover, loaded))
    return_memory()  # of the stored weights, which were loaded before they became float32
    method = plan.method if plan is not None else recipe.method
    batches = _batches(loaded, recipe, method, series)
    record: dict[str, Any] = {}
    if batches:
        record = recipe.calibration.model_dump()
        if series is not None and recipe.calibration.source in OWN_SOURCES:
            record["source"] = "given series"
        record["series"] = sum(len(batch.context) for batch in batches)
    original = _copy(loaded) if recipe.recover is not None else loaded
    if method == "fold":
        recipe = recipe.model_copy(update={"fold": recipe.fold.resolved(loaded)})
        record["precision"] = recipe.fold.precision
        _fold_(loaded, recipe, plan, batches, on_progress)
    else:
        _factor_(loaded, recipe, plan, batches, on_progress)
    recovery = None
    if recipe.recover is not None:
        stopped = directory is not None and can_resume(loaded, original, recipe.recover, directory)
        if directory is not None and not force:
            differs = what_differs(directory, recipe.recover, original, loaded)
            _check_unfinished(directory, differs)
        recovery = recover_(
            loaded,
            original,
            recipe.recover,
            series=series,
            directory=directory,
            resume=stopped,
            report=lambda line: on_progress("recover", round(1000 * line.share), 1000),
        )
        if not recovery.finished:
            raise KeyboardInterrupt
    cast_parameters_(loaded.model, loaded.stored_dtype)
    known = {field.name: getattr(loaded, field.name) for field in fields(LoadedModel)}
    # A plan made by hand has no recipe: plan.json alone says what was done.
    return CompressedModel(
        **known, recipe=recipe if plan is None else None, calibration=record, recovery=recovery
    )


def _check_unfinished(directory: Path, differs: str | None) -> None:
    """Refuse to replace a recovery that was stopped and is not the one that is asked for.

    Raises
    ------
    OutputExistsError
    """
    if differs is not None:
        raise OutputExistsError(
            f"{str(directory)!r} holds a recovery that did not finish, with {differs}; go on as it "
            "was begun, or start afresh with --force (force=True)."
        )


def plan_loaded(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    series: Sequence[FloatArray] | str | Path | None = None,
    on_progress: OnProgress = _silent,
) -> Plan:
    """What :func:`compress_loaded_` would do to a model, which stays as it is.

    Free rotary frequencies are chosen only when the model is folded.
    """
    _check_original(loaded)
    if recipe.method != "fold":
        batches = _batches(loaded, recipe, recipe.method, series)
        return _factor_plan(loaded, recipe, batches, on_progress)[0]
    measures = isinstance(recipe.schedule, PlannedSchedule) or recipe.layers is not None
    recipe = recipe.model_copy(update={"fold": recipe.fold.resolved(loaded)})
    batches = _batches(loaded, recipe, "fold", series) if measures else []
    return _fold_plan(loaded, recipe, batches, on_progress)


def _check_original(loaded: LoadedModel) -> None:
    _ = loaded.forecaster  # families that do not forecast are for profiling only
    if loaded.plan is not None:
        raise PlanError(f"{loaded.name!r} is compressed already; compress the original checkpoint.")


def _batches(
    loaded: LoadedModel,
    recipe: Recipe,
    method: Method,
    series: Sequence[FloatArray] | str | Path | None,
) -> list[CalibrationBatch]:
    """What the method is calibrated on; nothing for svd."""
    if method != "svd":
        return calibration_batches(loaded, recipe.calibration, series)
    if series is not None:
        raise UsageError("svd does not calibrate; give no series, or use another method.")
    return []


def _copy(loaded: LoadedModel) -> LoadedModel:
    """The same model with weights of its own."""
    model = copy.deepcopy(loaded.model)
    return replace(loaded, model=model, pipeline=wrap_pipeline(loaded.family, model))


def _factor_(
    loaded: LoadedModel,
    recipe: Recipe,
    plan: Plan | None,
    batches: Sequence[CalibrationBatch],
    on_progress: OnProgress,
) -> None:
    """Replace projections by two factors."""
    if plan is None:
        plan, moments = _factor_plan(loaded, recipe, batches, on_progress)
    else:
        feed_forward = bool(plan.parameters("feed_forward")[0])
        moments = _moments(loaded, plan.method, feed_forward, batches, on_progress)
    apply_plan_(loaded, plan, moments, lambda done, total: on_progress("factor", done, total))


def _factor_plan(
    loaded: LoadedModel,
    recipe: Recipe,
    batches: Sequence[CalibrationBatch],
    on_progress: OnProgress,
) -> tuple[Plan, dict[str, Moment] | None]:
    """The ranks that a recipe asks for, and the moments they were chosen by."""
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
    batches: Sequence[CalibrationBatch],
    on_progress: OnProgress,
) -> dict[str, Moment] | None:
    """Second moments of what feeds the projections; None for a method without."""
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
    batches: Sequence[CalibrationBatch],
    on_progress: OnProgress,
) -> None:
    """Make heads and hidden layers smaller."""
    if plan is None:
        plan = _fold_plan(loaded, recipe, batches, on_progress)
    fold_planned_(
        loaded,
        plan,
        batches,
        recipe.fold,
        lambda done, total: on_progress("fold", done, total),
    )


def _fold_plan(
    loaded: LoadedModel,
    recipe: Recipe,
    batches: Sequence[CalibrationBatch],
    on_progress: OnProgress,
) -> Plan:
    """The sizes that a recipe asks for; ``batches`` are for what is measured first."""
    if isinstance(recipe.schedule, PlannedSchedule):
        return plan_within_budget(
            loaded, recipe.schedule, batches, recipe.fold, recipe.bench, on_progress
        )
    schedule = recipe.schedule

    def planned(loaded: LoadedModel) -> Plan:
        return fold_plan_of(
            loaded.model,
            loaded.architecture,
            schedule,
            ff_ratio=recipe.ff_ratio,
            latent=recipe.latent,
            width=recipe.width,
            exclude=recipe.exclude,
            free_frequencies=recipe.fold.frequencies == "free",
        )

    if recipe.layers is None:
        return planned(loaded)
    planned(loaded)  # what no layer allows is refused before anything is measured
    kept = layers_that_stay(loaded, recipe.layers, batches, recipe.fold, on_progress)
    fewer = replace(loaded)  # weights are shared
    keep_layers_(fewer, kept)
    plan = planned(fewer)
    chosen = {**plan.schedule, "layers": list(recipe.layers)}
    return plan.model_copy(update={"kept_layers": kept, "schedule": chosen})


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
        A subclass says what was wrong; see :func:`tscompress.recovery.recover_`.
    """
    ours, theirs = (
        model if isinstance(model, LoadedModel) else load(model, device=device)
        for model in (student, teacher)
    )
    smaller = _as_compressed(ours)
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


def _as_compressed(loaded: LoadedModel) -> CompressedModel:
    """With the plan and the recipe that lie beside a compressed checkpoint.

    Raises
    ------
    PlanError
        There is no plan: it is not what ``compress`` wrote.
    """
    if isinstance(loaded, CompressedModel):
        return loaded
    known = {field.name: getattr(loaded, field.name) for field in fields(LoadedModel)}
    known["plan"] = loaded.plan or Plan.load(loaded.directory / PLAN_FILE)
    path = loaded.directory / RECIPE_FILE
    recipe = load_recipe(path) if path.is_file() else None
    known["revision"] = loaded.revision if recipe is None else recipe.revision
    return CompressedModel(**known, recipe=recipe, calibration=_calibration_of(loaded.directory))


def _calibration_of(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of the series that it was calibrated on; empty if nothing."""
    try:
        provenance = read_json(directory / PROVENANCE_FILE)
    except (FileNotFoundError, UnreadableFileError):
        return {}
    found = provenance.get("calibration") if isinstance(provenance, dict) else None
    return found if isinstance(found, dict) else {}


def finish_recovery(compressed: CompressedModel, work: Path) -> None:
    """Remove ``work``, which a recovery is resumed from: its result is saved."""
    if compressed.recovery is not None:
        shutil.rmtree(work, ignore_errors=True)


def inputs_of(recipe: Recipe) -> list[str | Path | None]:
    """What a recipe reads: paths, and names of other things, such as Hub ids and suites."""
    found = [recipe.model, recipe.calibration.source, *series_files(recipe.recover)]
    if recipe.probe is not None:
        found.append(recipe.probe.tasks_file)
    if recipe.evaluation is not None:
        found += [recipe.evaluation.suite, recipe.evaluation.root]
    return found


def series_files(config: RecoveryConfig | None) -> list[str | Path | None]:
    """The sources of series of a recovery, and all that lies in those that are directories."""
    found: list[str | Path | None] = []
    for source in () if config is None else config.series:
        directory = user_path(source)
        found += [source, *(directory.rglob("*") if directory.is_dir() else ())]
    return found


@dataclass
class RunResult:
    """What :func:`run` measured; :mod:`tscompress.runs` puts it on disk and reads it back.

    Attributes
    ----------
    directory, checkpoint
        The recipe's output, and the compressed checkpoint in it.
    examples
        Forecasts of both models, for one series of each dataset.
    probes
        Skill of the original and of the compressed model.
    """

    directory: Path
    checkpoint: Path
    plan: Plan
    profile: RankProfile | None = None
    original: EvaluationResult | None = None
    compressed: EvaluationResult | None = None
    baseline: EvaluationResult | None = None
    fidelity: Fidelity | None = None
    examples: tuple[ForecastExample, ...] = ()
    probes: tuple[ProbeResult, ProbeResult] | None = None
    bench: latency.BenchResult | None = None


def run(
    recipe: Recipe,
    *,
    force: bool = False,
    device: str = "cpu",
    on_progress: OnProgress = _silent,
) -> RunResult:
    """The whole walk: the compressed checkpoint goes below ``recipe.output``, and is measured.

    The checkpoint's directory keeps the original's name (``chronos-bolt-base-fold``): AutoGluon
    chooses batch size and device by it, and asks for a GPU where the path contains
    ``chronos-t5-small``, ``-base`` or ``-large``. A recovery that was stopped goes on when the same
    recipe is run again; with another, only ``force`` replaces it.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; nothing is left half-written.
    """
    output = user_path(recipe.output)
    target, work = output / f"{Path(model_name(recipe.model)).name}-{recipe.method}", output / WORK
    check_output(target, force=force, inputs=inputs_of(recipe))
    if recipe.recover is not None:
        check_output(work, force=True, inputs=inputs_of(recipe), in_place=True)
    if recipe.probe is not None:
        recipe.probe.chosen()  # what is wrong with it is said before the work
    loaded = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
    if recipe.recover is not None:
        recipe.recover.check_options(loaded.family)
    measured: RankProfile | None = None
    if recipe.profile is not None:
        with guarded(labels_of(recipe)):
            measured = profile(
                loaded,
                epsilons=recipe.profile.epsilons,
                calibration=recipe.calibration,
                on_progress=lambda *step: on_progress("profile", *_last_two(step)),
            )
    compressed = compress_loaded_(
        loaded, recipe, directory=work, force=force, on_progress=on_progress
    )
    save(compressed, target, force=force)
    finish_recovery(compressed, work)

    original = load(recipe.model, revision=loaded.revision, device=device, dtype=torch.float32)
    again = load(target, device=device, dtype=torch.float32)
    assert compressed.plan is not None
    result = RunResult(output, target, compressed.plan, measured)
    if recipe.evaluation is not None:
        _evaluate_(result, original, again, recipe.evaluation, on_progress)
    if recipe.probe is not None:
        result.probes = (
            _probe(original, recipe.probe, on_progress),
            _probe(again, recipe.probe, on_progress),
        )
    if recipe.bench is not None:
        workload = recipe.bench.model_copy(update={"device": torch.device(device).type})
        result.bench = latency.bench(
            [(original.name, original.forecaster), (again.name, again.forecaster)],
            workload,
            measure_memory=True,
            directories={original.name: original.directory, again.name: again.directory},
            on_run=lambda done: on_progress("bench", done.round + 1, workload.repeats),
        )
    return result


def _probe(model: LoadedModel, config: ProbeConfig, on_progress: OnProgress) -> ProbeResult:
    stage = f"probe {model.name}"
    return probe(
        model, **dict(config), on_task=lambda _, done, total: on_progress(stage, done, total)
    )


def labels_of(recipe: Recipe, *, given: bool = False) -> list[Fingerprints]:
    """What a recipe is scored on, where it may learn from that; the offline suites are known.

    Of the suites that have names, what wheels have in common with them is not offered anyway.
    ``given``: it learns from series besides its own.
    """
    config, trained = recipe.evaluation, recipe.recover.series if recipe.recover else ()
    if config is None or config.suite in (OFFLINE_SUITE, FREQUENCIES_SUITE):
        return []
    from_files = given or trained or recipe.calibration.source not in OWN_SOURCES
    if not from_files and not Path(config.suite).suffix:
        return []
    suite = find_suite(config.suite, config.long_format)
    datasets = load_suite(suite, config.max_series, config.datasets, root=config.root)
    return [label_fingerprints(dataset) for dataset in datasets]


def _evaluate_(
    result: RunResult,
    original: LoadedModel,
    compressed: LoadedModel,
    config: EvaluationConfig,
    on_progress: OnProgress,
) -> None:
    """Put the scores of both models and of seasonal naive into ``result``, and how both differ."""
    before: dict[str, Quantiles] = {}
    parts: list[DatasetFidelity] = []
    examples: list[ForecastExample] = []

    def keep(dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        before[dataset.name] = quantiles

    def hold_against(dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        dense = before.pop(dataset.name)
        parts.append(dataset_fidelity(dense, quantiles, dataset))
        examples.append(typical_example(dense, quantiles, dataset))

    result.baseline = score(SEASONAL_NAIVE, SEASONAL_NAIVE, config, on_progress)
    result.original = score(
        original.forecaster, original.name, config, on_progress, on_forecasts=keep
    )
    result.compressed = score(
        compressed.forecaster, compressed.name, config, on_progress, on_forecasts=hold_against
    )
    result.fidelity = summarize(parts)
    result.examples = tuple(examples)


def score(
    model: Any,
    name: str,
    config: EvaluationConfig,
    on_progress: OnProgress = _silent,
    *,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    cache: ScoreCache | None = None,
    on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None = None,
) -> EvaluationResult:
    """Evaluate a pipeline or ``"seasonal-naive"`` as ``config`` says.

    The other parameters are those of :func:`tscompress.evaluation.evaluate`.
    """
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        on_progress(f"evaluate {name}", done, total)

    suite = find_suite(config.suite, config.long_format)
    total = len(suite.select(config.datasets).datasets)
    return evaluate(
        model,
        suite,
        name=name,
        max_series=config.max_series,
        datasets=config.datasets,
        batch_size=config.batch_size,
        seed=config.seed,
        seeds=seeds,
        num_samples=num_samples,
        root=config.root,
        cache=cache,
        on_dataset=count,
        on_forecasts=on_forecasts,
    )


def _last_two(step: Sequence[Any]) -> tuple[int, int]:
    done, total = step[-2:]
    return int(done), int(total)
