"""The walk, top to bottom: load, profile, plan, surgery, evaluate, save, load again.

Each function takes what the one before it returned. :func:`run` does them all from one recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tscompress import latency
from tscompress.calibration import (
    SYNTHETIC,
    CalibrationConfig,
    Moment,
    calibration_batches,
    collect_moments,
)
from tscompress.corpus import FloatArray
from tscompress.errors import UsageError
from tscompress.evaluation import SEASONAL_NAIVE, EvaluationResult, evaluate
from tscompress.files import check_output
from tscompress.loading import LoadedModel, cast_parameters_, load
from tscompress.plan import Plan
from tscompress.planning import (
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    Method,
    PowerLawSchedule,
    RankSchedule,
    Schedule,
    make_plan,
)
from tscompress.profiling import profile
from tscompress.rank_profile import RankProfile
from tscompress.recipe import EvaluationConfig, Recipe
from tscompress.serialization import CompressedModel, save
from tscompress.surgery import apply_plan_

#: Called with the name of a stage, steps done and steps in all.
OnProgress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    pass


def choose_schedule(
    *,
    rank: int | None = None,
    epsilon: float | None = None,
    energy: float | None = None,
    schedule: tuple[float, float] | None = None,
    budget: float | None = None,
    powers_of_two: bool = False,
) -> Schedule:
    """The schedule that exactly one of the options asks for.

    Raises
    ------
    UsageError
        None or several were given, or a value is out of range.
    """
    given: dict[str, Callable[[], Schedule]] = {}
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
    if budget is not None:
        given["budget"] = lambda: BudgetSchedule(parameter_ratio=budget)
    if powers_of_two and schedule is None:
        raise UsageError("powers_of_two rounds a power law; give schedule D0,ALPHA with it.")
    if len(given) != 1:
        came = f"{' and '.join(given)} were given" if given else "none was given"
        raise UsageError(f"{came}; give exactly one of rank, epsilon, energy, schedule and budget.")
    ((name, make),) = given.items()
    try:
        return make()
    except ValueError as error:
        reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise UsageError(f"{name}: {reason}.") from None


def compress(
    model: str | Path | LoadedModel,
    *,
    method: Method = "activation-svd",
    rank: int | None = None,
    epsilon: float | None = None,
    energy: float | None = None,
    schedule: tuple[float, float] | None = None,
    budget: float | None = None,
    powers_of_two: bool = False,
    plan: Plan | None = None,
    exclude: Sequence[str] = (),
    feed_forward: bool = False,
    calibration: CalibrationConfig | None = None,
    series: Sequence[FloatArray] | None = None,
    revision: str | None = None,
    device: str = "cpu",
    on_progress: OnProgress = _silent,
) -> CompressedModel:
    """Load a model and factor its attention, and its feed-forwards if asked.

    Parameters
    ----------
    model
        As for :func:`tscompress.load`, or a model already loaded, which is then changed in place.
    method
        ``svd`` (paper sec. 5) or ``activation-svd`` (whitened by calibration moments).
    rank, epsilon, energy, schedule, budget
        Exactly one: the same rank everywhere, ε of the ε-rank, share of energy to keep,
        (d_0, alpha) of the power law on head sizes, or the ``parameter_ratio`` to reach.
        ``powers_of_two`` rounds the power law down.
    plan
        Instead of them: a plan made or edited before.
    exclude
        Shell patterns on names of layers that stay dense.
    calibration, series
        Which series ``activation-svd`` is calibrated on; ``series`` overrides the config's source.

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
    if plan is None:
        chosen = choose_schedule(
            rank=rank,
            epsilon=epsilon,
            energy=energy,
            schedule=schedule,
            budget=budget,
            powers_of_two=powers_of_two,
        )
    elif any((rank, epsilon, energy, schedule, budget, powers_of_two, exclude, feed_forward)):
        raise UsageError("a plan says every rank; give no schedule or selection with it.")
    else:
        method, chosen = plan.method, BudgetSchedule(parameter_ratio=1.0)
    if isinstance(model, LoadedModel):
        loaded = model
        cast_parameters_(loaded.model, torch.float32)
    else:
        loaded = load(model, revision=revision, device=device, dtype=torch.float32)
    recipe = Recipe(
        model=loaded.source,
        revision=loaded.revision,
        output="",
        method=method,
        schedule=chosen,
        exclude=tuple(exclude),
        feed_forward=feed_forward,
        calibration=calibration or CalibrationConfig(),
    )
    return compress_loaded_(loaded, recipe, plan=plan, series=series, on_progress=on_progress)


def compress_loaded_(
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    plan: Plan | None = None,
    series: Sequence[FloatArray] | None = None,
    on_progress: OnProgress = _silent,
) -> CompressedModel:
    """Calibrate, plan and operate on a model in memory, as ``recipe`` says; its weights change."""
    _ = loaded.forecaster  # families that do not forecast are for profiling only
    architecture = loaded.architecture
    if recipe.method == "svd" and series is not None:
        raise UsageError("svd does not calibrate; give no series, or use activation-svd.")
    method = plan.method if plan is not None else recipe.method
    moments: dict[str, Moment] | None = None
    record: dict[str, Any] = {}
    if method == "activation-svd":
        names = [name for _, _, name in architecture.attention_projections()]
        if recipe.feed_forward or (plan is not None and plan.parameters("feed_forward")[0]):
            names += [name for _, _, name in architecture.feed_forward_projections()]
        batches = calibration_batches(loaded, recipe.calibration, series)
        moments = collect_moments(
            loaded, batches, names, lambda done: on_progress("calibrate", done, len(batches))
        )
        record = recipe.calibration.model_dump()
        if series is not None and recipe.calibration.source == SYNTHETIC:
            record["source"] = "given series"
        record["series"] = sum(len(batch.context) for batch in batches)
    given_plan = plan is not None
    if plan is None:
        on_progress("plan", 0, 1)
        plan = make_plan(
            loaded.model,
            architecture,
            recipe.method,
            recipe.schedule,
            moments=moments,
            exclude=recipe.exclude,
            feed_forward=recipe.feed_forward,
        )
        on_progress("plan", 1, 1)
    apply_plan_(loaded, plan, moments, lambda done, total: on_progress("factor", done, total))
    cast_parameters_(loaded.model, loaded.stored_dtype)
    known = {field.name: getattr(loaded, field.name) for field in fields(LoadedModel)}
    # A plan made by hand has no recipe: plan.json alone says what was done.
    return CompressedModel(**known, recipe=None if given_plan else recipe, calibration=record)


@dataclass
class RunResult:
    """What :func:`run` measured; everything is also on disk."""

    directory: Path
    plan: Plan
    profile: RankProfile | None
    original: EvaluationResult | None
    compressed: EvaluationResult | None
    baseline: EvaluationResult | None
    bench: latency.BenchResult | None


def run(
    recipe: Recipe,
    *,
    force: bool = False,
    device: str = "cpu",
    on_progress: OnProgress = _silent,
) -> RunResult:
    """The whole walk: the compressed checkpoint goes below ``recipe.output``, and is measured.

    The checkpoint's directory keeps the original's name (``chronos-t5-base-activation-svd``):
    AutoGluon chooses batch size and device by it.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; nothing is left half-written.
    """
    output = Path(recipe.output)
    target = output / f"{Path(recipe.model).name}-{recipe.method}"
    check_output(target, force=force)
    loaded = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
    measured: RankProfile | None = None
    if recipe.profile is not None:
        measured = profile(
            loaded,
            epsilons=recipe.profile.epsilons,
            calibration=recipe.calibration,
            on_progress=lambda *step: on_progress("profile", *_last_two(step)),
        )
    compressed = compress_loaded_(loaded, recipe, on_progress=on_progress)
    save(compressed, target, force=force)

    original = load(recipe.model, revision=loaded.revision, device=device, dtype=torch.float32)
    again = load(target, device=device, dtype=torch.float32)
    scores: list[EvaluationResult] = []
    if recipe.evaluation is not None:
        for name, model in (
            (SEASONAL_NAIVE, SEASONAL_NAIVE),
            (original.name, original.forecaster),
            (again.name, again.forecaster),
        ):
            scores.append(score(model, name, recipe.evaluation, on_progress))
    timed: latency.BenchResult | None = None
    if recipe.bench is not None:
        workload = recipe.bench.model_copy(update={"device": torch.device(device).type})
        timed = latency.bench(
            [(original.name, original.forecaster), (again.name, again.forecaster)],
            workload,
            measure_memory=True,
            directories={original.name: original.directory, again.name: again.directory},
            on_run=lambda done: on_progress("bench", done.round + 1, workload.repeats),
        )
    assert compressed.plan is not None
    baseline, dense, small = scores if scores else (None, None, None)
    return RunResult(output, compressed.plan, measured, dense, small, baseline, timed)


def score(
    model: Any, name: str, config: EvaluationConfig, on_progress: OnProgress = _silent
) -> EvaluationResult:
    """Evaluate a pipeline or ``"seasonal-naive"`` as ``config`` says."""
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        on_progress(f"evaluate {name}", done, total)

    from tscompress.suites import find_suite

    total = len(find_suite(config.suite).select(config.datasets).datasets)
    return evaluate(
        model,
        config.suite,
        name=name,
        max_series=config.max_series,
        datasets=config.datasets,
        batch_size=config.batch_size,
        seed=config.seed,
        root=config.root,
        on_dataset=count,
    )


def _last_two(step: Sequence[Any]) -> tuple[int, int]:
    done, total = step[-2:]
    return int(done), int(total)
