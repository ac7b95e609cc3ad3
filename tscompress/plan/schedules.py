"""How sizes are chosen: schedules of ranks and head sizes, and budgets of costs.

A schedule or budget is an object with a text form: ``rank=16``, ``5,0.35``, ``parameters=0.5``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from tscompress.errors import UsageError
from tscompress.io.strict import Strict
from tscompress.io.untrusted import first_problem

Method = Literal["fold", "svd", "activation-svd"]

_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Units of an amount, by measure; latency and WQL have none.
_UNITS = {"parameters": _COUNTS, "macs": _COUNTS, "bytes": _BYTES, "kv-cache": _BYTES}


class Budget(Strict):
    """An upper bound of a cost of the compressed model.

    Attributes
    ----------
    measure
        The cost, of the whole model; ``macs``, ``kv-cache`` and ``latency`` are of one ``predict``
        call, ``wql`` is on held-out calibration windows, of series without a covariate
        or of those with one, whichever rises more.
    ratio
        Upper bound of after / before.
    limit
        Upper bound of the amount; not for ``latency`` and ``wql``.
    percent
        Only for ``wql``: upper bound of its rise.
    """

    measure: Literal["parameters", "bytes", "macs", "kv-cache", "latency", "wql"]
    ratio: float | None = Field(default=None, gt=0, le=1)
    limit: int | None = Field(default=None, gt=1, le=10**18)
    percent: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_one_amount(self) -> Budget:
        given = [name for name in ("ratio", "limit", "percent") if getattr(self, name) is not None]
        takes = {"latency": ["ratio"], "wql": ["percent"]}.get(self.measure, ["ratio", "limit"])
        if len(given) != 1 or given[0] not in takes:
            got = " and ".join(given) or "neither"
            raise ValueError(f"{self.measure} takes {' or '.join(takes)}, got {got}")
        return self

    @property
    def is_measured(self) -> bool:
        """Whether a candidate is timed or scored to see if it fits; the others are counted."""
        return self.measure in ("latency", "wql")

    def __str__(self) -> str:
        """The text that :func:`parse_budget` reads."""
        if self.limit is not None:
            return f"{self.measure}={_amount_text(self.limit, _UNITS[self.measure])}"
        if self.percent is not None:
            return f"{self.measure}={_number_text(self.percent)}%"
        assert self.ratio is not None
        return f"{self.measure}={_number_text(self.ratio)}"


def parse_budget(text: str) -> Budget:
    """Read ``parameters=0.5``, ``bytes=20MB``, ``macs=2G``, ``latency=0.4``, ``wql=1%``.

    A number up to 1 is a ratio to the original, a larger one or one with a unit is an amount.

    Raises
    ------
    UsageError
        Names what came, what is allowed, and an example.
    """
    measure, _, amount = text.strip().partition("=")
    found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?) ?([a-z]*|%)", amount, re.I)
    units = {unit.casefold(): size for unit, size in _UNITS.get(measure, {}).items()}
    fields: dict[str, float | int] = {}
    if found:
        number, unit = Decimal(found[1]), found[2].casefold()
        if unit == "%":
            fields = {"percent": float(number)}
        elif not unit and number <= 1:
            fields = {"ratio": float(number)}
        elif unit in units or (not unit and number == int(number)):
            fields = {"limit": math.floor(number * units.get(unit, 1))}
    try:
        return Budget.model_validate({"measure": measure, **fields})
    except ValidationError:
        raise UsageError(
            f"{text!r} is no budget; allowed are parameters, bytes, macs, kv-cache or latency = a "
            "ratio above 0 and at most 1; parameters or macs = a number (k, M, G, T); bytes or "
            "kv-cache = an amount (B, kB, MB, GB, KiB, MiB, GiB); wql = a percentage above 0; for "
            "example parameters=0.5, bytes=20MB or wql=1%."
        ) from None


def _number_text(value: float) -> str:
    return repr(value).removesuffix(".0")


def _amount_text(amount: int, units: Mapping[str, int]) -> str:
    """The shortest way to write it exactly."""
    texts = {unit: f"{Decimal(amount) / size:f}" for unit, size in units.items()}
    exact = [text + unit for unit, text in texts.items() if Decimal(text) * units[unit] == amount]
    return min(exact, key=len)


class EpsilonSchedule(Strict):
    """Keep the ε-rank of each matrix (paper sec. 5).

    Attributes
    ----------
    epsilon
        Singular values above this share of the largest are kept; in (0, 1).
    """

    kind: Literal["epsilon"] = "epsilon"
    epsilon: float = Field(gt=0, lt=1)


class RankSchedule(Strict):
    """The same rank for every projection; with ``fold``, the same size for every head (d_kv).

    Attributes
    ----------
    rank
        At least 1.
    """

    kind: Literal["rank"] = "rank"
    rank: int = Field(ge=1, le=2**31)


class EnergySchedule(Strict):
    """The smallest rank that keeps a share of the squared singular values.

    Attributes
    ----------
    energy
        The share, above 0 and at most 1.
    """

    kind: Literal["energy"] = "energy"
    energy: float = Field(gt=0, le=1)


class PowerLawSchedule(Strict):
    """Head size ceil(d_0 (1 + i)^alpha) at depth i, times the number of heads (paper sec. 5).

    Attributes
    ----------
    d_0
        Head size at depth 0.
    alpha
        Exponent of the growth over depth; 0: the same size everywhere.
    powers_of_two
        The nearest power of two, on a logarithmic axis, as in the authors' code.
    """

    kind: Literal["power-law"] = "power-law"
    d_0: float = Field(gt=0, le=1e6)
    alpha: float = Field(ge=0, le=100)
    powers_of_two: bool = Field(
        default=False, description="the nearest power of two, as in the authors' code"
    )


class FitSchedule(Strict):
    """Head sizes by the power law that fits the ε-ranks of the heads best, for ``fold``.

    Attributes
    ----------
    epsilon
        Threshold of the ε-ranks, between 0 and 1.
    """

    kind: Literal["fit"] = "fit"
    epsilon: float = Field(gt=0, lt=1)


class BudgetSchedule(Strict):
    """Ranks that keep most of every matrix's energy within a budget, for ``svd``.

    Attributes
    ----------
    parameter_ratio
        Parameters of the planned layers, after / before; above 0 and at most 1.
    """

    kind: Literal["budget"] = "budget"
    parameter_ratio: float = Field(gt=0, le=1, description="of the planned parts, after / before")


ProjectionSchedule = (
    EpsilonSchedule | RankSchedule | EnergySchedule | PowerLawSchedule | BudgetSchedule
)
Schedule = ProjectionSchedule | FitSchedule


class PlannedSchedule(Strict):
    """Sizes of least predicted loss within a budget of the whole model; for ``fold``.

    Attributes
    ----------
    budget
        A :class:`Budget`, or its text: ``parameters=0.5``, ``bytes=20MB``, ``wql=1%``.
    layout
        ``folded``: the same sizes in every layer, a stock checkpoint. ``factored``: sizes by layer.
    multiple
        Sizes are multiples of 1, 8 or 16, which are fast on GPUs.
    depth
        Experimental: may drop whole layers; only with ``folded``.
    keep_width
        Keep ``d_model``, as ``factored`` does anyway for a budget in latency or WQL.
    """

    kind: Literal["planned"] = "planned"
    budget: Budget = Field(description="also as text: parameters=0.5, bytes=20MB, wql=1%")
    layout: Literal["folded", "factored"] = Field(
        default="folded", description="one size everywhere, a stock config; or sizes by layer"
    )
    multiple: Literal[1, 8, 16] = Field(default=1, description="sizes that suit the hardware")
    depth: bool = Field(default=False, description="experimental: may drop whole layers")
    keep_width: bool = Field(
        default=False, description="keep d_model, which a budget otherwise chooses, too"
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _read_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse_budget(value)
        except UsageError as error:
            raise ValueError(str(error).removesuffix(".")) from None

    @model_validator(mode="after")
    def _layout_allows(self) -> PlannedSchedule:
        if self.depth and self.layout == "factored":
            raise ValueError("depth goes with the folded layout only")
        return self

    @property
    def may_narrow(self) -> bool:
        """Whether it may choose another ``d_model``."""
        by_layer = self.layout == "factored"
        return not (self.keep_width or (by_layer and self.budget.is_measured))


_Tagged = Annotated[Schedule | PlannedSchedule, Field(discriminator="kind")]
_SCHEDULES: TypeAdapter[Schedule | PlannedSchedule] = TypeAdapter(_Tagged)
#: Fields that the text of a schedule gives, by what stands before its equals sign.
_TEXTS = {
    "": ("power-law", "d_0", "alpha"),
    "power-law": ("power-law", "d_0", "alpha"),
    "rank": ("rank", "rank"),
    "epsilon": ("epsilon", "epsilon"),
    "energy": ("energy", "energy"),
    "fit": ("fit", "epsilon"),
}


def parse_schedule(text: str) -> Schedule | PlannedSchedule:
    """Read ``5,0.35`` (a power law, D0 and ALPHA), ``rank=16``, ``epsilon=0.1``, ``fit=0.1``, ...

    Raises
    ------
    UsageError
        Names what came, what is allowed, and an example.
    """
    name, _, amounts = text.strip().rpartition("=")
    kind, *fields = _TEXTS.get(name, ("",))
    values = amounts.split(",")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if len(numbers) != len(fields) or not fields:
        raise UsageError(
            f"schedule {text!r} is not D0,ALPHA such as 5,0.35, nor rank=16, epsilon=0.1, "
            "energy=0.9 or fit=0.1."
        )
    try:
        return _SCHEDULES.validate_python({"kind": kind, **dict(zip(fields, numbers, strict=True))})
    except ValidationError as error:
        _, reason, _ = first_problem(error)
        raise UsageError(f"schedule {text!r}: {reason}.") from None


def _read_schedule(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_schedule(value)
    except UsageError as error:
        raise ValueError(str(error).removesuffix(".")) from None


#: In a recipe: a mapping with its ``kind``, or the text of :func:`parse_schedule`.
AnySchedule = Annotated[_Tagged, BeforeValidator(_read_schedule)]
