"""Options of ``compress`` to a recipe: the one place for Python, the command and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tscompress.compression.fold_plans import (
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    FitSchedule,
    Method,
    PowerLawSchedule,
    RankSchedule,
    Schedule,
)
from tscompress.errors import UsageError
from tscompress.plan.schedules import PlannedSchedule, parse_budget
from tscompress.workflows.recipe import SIZES_BESIDE_HEADS


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
