"""From options of ``compress`` to a recipe, for Python, the command and sweeps.

A missing option is None, False, empty, or not in the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from pydantic import BaseModel, ValidationError

from tscompress.errors import UsageError
from tscompress.io.arguments import check_type
from tscompress.io.untrusted import shown
from tscompress.plan.plan import DROPS, Plan
from tscompress.plan.schedules import (
    Budget,
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    FitSchedule,
    Method,
    PlannedSchedule,
    PowerLawSchedule,
    RankSchedule,
    Schedule,
    parse_budget,
    parse_schedule,
)
from tscompress.workflows.recipe import SIZES_BESIDE_HEADS, Recipe, validate

Options = Mapping[str, Any]

#: At most one of these may be given: it chooses ranks or head sizes.
_SCHEDULES = ("rank", "epsilon", "energy", "schedule", "fit", "budget")
_WITH_BUDGET = ("layout", "multiple", "depth", "keep_width")
_SELECTION = ("exclude", "feed_forward", *DROPS)
#: Every option that a plan made by hand replaces, besides ``method``.
SIZE_OPTIONS = (*_SCHEDULES, "powers_of_two", *_WITH_BUDGET, *SIZES_BESIDE_HEADS, *_SELECTION)

PLAN_ALONE = "a plan has every size; give no schedule or selection with it."
_NO_POWER_LAW = "powers_of_two rounds a power law; give schedule D0,ALPHA with it."


def recipe_of(
    options: Options, *, plan: Plan | None = None, source: str = "the options", **fields: Any
) -> Recipe:
    """The recipe of some options.

    Parameters
    ----------
    options
        ``method`` and :data:`SIZE_OPTIONS`, as for :func:`tscompress.compress` or the command.
    plan
        Every size, instead of options.
    source
        Names the options in an error.
    fields
        Other fields of the recipe: ``model``, ``output``, ``calibration``, ``fold``, ... The
        options ``univariate`` and ``single_token`` become fields of ``fold``.

    Raises
    ------
    UsageError
        Options exclude each other or need another one, none is given, or a value is out of range
        (RecipeError for fields of a recipe).
    """
    method = options.get("method", "fold")
    fold = dict(fields.pop("fold", {}))
    dropped = [name for name in DROPS if fold.get(name) or is_given(options.get(name))]
    if plan is not None:
        if dropped or any(is_given(options.get(name)) for name in SIZE_OPTIONS):
            raise UsageError(PLAN_ALONE)
        sizes = _sizes_of_plan(plan.method)
    else:
        sizes = {name: options.get(name) for name in SIZES_BESIDE_HEADS}
        needed = method != "fold" or not (dropped or any(map(is_given, sizes.values())))
        schedule = choose_schedule(method, options, required=needed)
        layers = sizes["layers"]
        sizes |= {
            "method": method,
            "schedule": None if schedule is None else schedule.model_dump(),
            "layers": (layers,) if isinstance(layers, int) else layers,
            "exclude": tuple(options.get("exclude") or ()),
            "feed_forward": options.get("feed_forward", False),
            "fold": fold | dict.fromkeys(dropped, True),
        }
    known = {"model": "-", "output": "-", "fold": fold}
    return validate(Recipe, {**known, **sizes, **fields}, source)


def is_given(value: object) -> bool:
    """Whether an option has a value; 0 and an empty text count as (invalid) values."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) > 0
    return value is not None and value is not False


def choose_schedule(
    method: Method, options: Options, *, required: bool = True
) -> Schedule | PlannedSchedule | None:
    """The schedule from one of rank, epsilon, energy, schedule, fit and budget.

    Raises
    ------
    UsageError
        Several were given, or none although one is ``required``; an option needs another one; or a
        value is out of range.
    """
    given = {name: options[name] for name in _SCHEDULES if options.get(name) is not None}
    how = {name: options[name] for name in _WITH_BUDGET if is_given(options.get(name))}
    if how and ("budget" not in given or method != "fold"):
        raise UsageError("layout, multiple, depth and keep_width go with a budget of fold.")
    if options.get("powers_of_two") and "schedule" not in given:
        raise UsageError(_NO_POWER_LAW)
    if not given and not required:
        return None
    if len(given) != 1:
        came = f"{' and '.join(given)} were given" if given else "none was given"
        alone = method == "fold" and not given
        raise UsageError(
            f"{came}; give exactly one of rank, epsilon, energy, schedule, fit and budget"
            + (
                ", or width, ff_ratio, latent, embedding_rank, layers, univariate or "
                "single_token alone."
                if alone
                else "."
            )
        )
    ((name, value),) = given.items()
    if isinstance(value, bool):
        raise UsageError(f"{name} is {value}; give a number or a text.")
    if name in _KINDS:
        check_type(name, value, *_KINDS[name])
    try:
        if name == "budget":
            return _budget_schedule(method, value, how)
        if name == "schedule":
            return _power_of_two(_read_schedule(value), bool(options.get("powers_of_two")))
        return _BY_NUMBER[name](value)
    except ValidationError as error:
        first = error.errors()[0]
        at = next((str(part) for part in first["loc"] if part in how), name)
        raise UsageError(f"{at}: {first['msg']} (got {shown(first['input'])}).") from None


#: Types of what is not a number alone, and how they are called.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "budget": (
        (Real, str, Budget, PlannedSchedule),
        "a share such as 0.25, a text such as 'parameters=0.4', or a Budget",
    ),
    "schedule": (
        (str, list, tuple, BaseModel),
        "a text such as '8,0.25', a pair (8, 0.25), or a schedule",
    ),
}
_BY_NUMBER: Mapping[str, Callable[[Any], Schedule]] = {
    "rank": lambda rank: RankSchedule(rank=rank),
    "epsilon": lambda epsilon: EpsilonSchedule(epsilon=epsilon),
    "energy": lambda energy: EnergySchedule(energy=energy),
    "fit": lambda epsilon: FitSchedule(epsilon=epsilon),
}


def _read_schedule(value: Any) -> Schedule | PlannedSchedule:
    if isinstance(value, str):
        return parse_schedule(value)
    if not isinstance(value, Sequence):
        return value  # type: ignore[no-any-return]  # an object already
    if len(value) != 2:
        raise UsageError(f"schedule is {shown(value)}; give a pair (d_0, alpha) such as (8, 0.25).")
    d_0, alpha = value
    return PowerLawSchedule(d_0=d_0, alpha=alpha)


def _power_of_two(
    schedule: Schedule | PlannedSchedule, rounded: bool
) -> Schedule | PlannedSchedule:
    if not rounded:
        return schedule
    if not isinstance(schedule, PowerLawSchedule):
        raise UsageError(_NO_POWER_LAW)
    return schedule.model_copy(update={"powers_of_two": True})


def _budget_schedule(
    method: Method, budget: float | str | Budget | PlannedSchedule, how: Options
) -> BudgetSchedule | PlannedSchedule:
    """A budget of the whole model for fold; a share of the planned layers for the others."""
    if isinstance(budget, PlannedSchedule):
        return PlannedSchedule.model_validate({**budget.model_dump(), **how})
    share = None if isinstance(budget, Budget) else _share(budget)
    if method != "fold":
        if share is None:
            raise UsageError(
                f"budget {str(budget)!r} is for fold; for {method} give the share of parameters "
                "that the planned layers keep, such as 0.25."
            )
        return BudgetSchedule(parameter_ratio=share)
    if share is not None:
        raise UsageError(
            f"budget {budget} has no measure; for fold give parameters={budget}, "
            f"bytes=20MB, macs={budget}, kv-cache={budget}, latency={budget} or wql=1%."
        )
    read = budget if isinstance(budget, Budget) else parse_budget(str(budget))
    return PlannedSchedule.model_validate({"budget": read, **how})


def _share(budget: float | str) -> float | None:
    try:
        return float(budget)
    except ValueError:
        return None


def _sizes_of_plan(method: Method) -> dict[str, Any]:
    """Fields of a recipe whose sizes a plan made by hand gives; these are placeholders."""
    if method == "fold":
        return {"method": method, "schedule": None, "ff_ratio": 1.0}
    return {"method": method, "schedule": BudgetSchedule(parameter_ratio=1.0).model_dump()}
