"""A budget: what the compressed model may cost, in a recipe or on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tscompress.errors import UsageError

_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Units of an amount, by measure; latency and WQL have none.
_UNITS = {"parameters": _COUNTS, "macs": _COUNTS, "bytes": _BYTES, "kv-cache": _BYTES}


class Budget(BaseModel):
    """What the compressed model may cost.

    Attributes
    ----------
    measure
        Of the whole model; ``macs``, ``kv-cache`` and ``latency`` of one ``predict`` call; ``wql``
        on the calibration windows.
    ratio
        At most this much of the original's: after / before.
    limit
        At most this much; not for ``latency`` and ``wql``.
    percent
        Only for ``wql``: it may rise by this much.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    def __str__(self) -> str:
        """As :func:`parse_budget` reads it."""
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


class PlannedSchedule(BaseModel):
    """Sizes that lose least, as measured, within a budget of the whole model; for ``fold``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["planned"] = "planned"
    budget: Budget = Field(description="also as text: parameters=0.5, bytes=20MB, wql=1%")
    layout: Literal["folded", "factored"] = Field(
        default="folded", description="one size everywhere, a plain config; or sizes by layer"
    )
    multiple: Literal[1, 8, 16] = Field(default=1, description="sizes that suit the hardware")
    depth: bool = Field(default=False, description="experimental: may drop whole layers")
    keep_width: bool = Field(
        default=False, description="with layout folded: d_model stays, as it does in factored"
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
        if self.keep_width and self.layout == "factored":
            raise ValueError("the factored layout always keeps the width; leave out keep_width")
        return self

    @property
    def may_narrow(self) -> bool:
        """Whether it may choose another ``d_model``."""
        return self.layout == "folded" and not self.keep_width
