"""The plan: for each projection, dense or the rank it gets. Plain data that one can read and edit.

A plan rebuilds the architecture of a compressed checkpoint, so it is saved inside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tscompress.errors import PlanError
from tscompress.files import write_text_atomically

PLAN_VERSION: Literal[1] = 1


class ProjectionPlan(BaseModel):
    """What becomes of one Linear layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    part: Literal["attention", "feed_forward"]
    out_features: int = Field(ge=1)
    in_features: int = Field(ge=1)
    rank: int | None = Field(default=None, ge=1, description="null: the layer stays dense")
    reason: str | None = Field(default=None, description="why it stays dense")

    @model_validator(mode="after")
    def _factors_are_smaller(self) -> ProjectionPlan:
        if self.rank is not None and self.parameters >= self.dense_parameters:
            raise ValueError(
                f"rank {self.rank} of {self.name} gives {self.parameters} parameters, no fewer "
                f"than the dense {self.dense_parameters}; set rank to null or below "
                f"{self.dense_parameters / (self.out_features + self.in_features):.1f}"
            )
        return self

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise PlanError unless the layer is ``[out_features, in_features]``."""
        if shape != (self.out_features, self.in_features):
            found = "x".join(map(str, shape))
            raise PlanError(
                f"the plan has {self.name} as {self.out_features}x{self.in_features}; "
                f"the model has {found}."
            )

    @property
    def dense_parameters(self) -> int:
        return self.out_features * self.in_features

    @property
    def parameters(self) -> int:
        if self.rank is None:
            return self.dense_parameters
        return self.rank * (self.out_features + self.in_features)


class Plan(BaseModel):
    """Ranks of every projection, and how they came about.

    Attributes
    ----------
    method
        ``svd`` or ``activation-svd``.
    schedule
        The schedule that chose the ranks, as in a recipe, for the record.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = PLAN_VERSION
    family: str
    method: Literal["svd", "activation-svd"]
    schedule: dict[str, Any] = Field(default_factory=dict)
    projections: tuple[ProjectionPlan, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Plan:
        names = [projection.name for projection in self.projections]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"projections named more than once: {', '.join(repeated)}")
        return self

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank of the projections that become two factors."""
        return {p.name: p.rank for p in self.projections if p.rank is not None}

    def parameters(self, part: str | None = None) -> tuple[int, int]:
        """Parameters of the planned projections ``(before, after)``, of one part or of all."""
        chosen = [p for p in self.projections if part in (None, p.part)]
        return sum(p.dense_parameters for p in chosen), sum(p.parameters for p in chosen)

    @property
    def attention_parameter_ratio(self) -> float:
        """After / before, of the attention projections."""
        before, after = self.parameters("attention")
        return after / before if before else 1.0

    def diff(self, other: Plan) -> list[str]:
        """One line for each projection whose rank differs, ``name: rank -> other's rank``."""
        ours = {p.name: p.rank for p in self.projections}
        theirs = {p.name: p.rank for p in other.projections}
        lines = []
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            old, new = (_rank_text(ranks, name) for ranks in (ours, theirs))
            if old != new:
                lines.append(f"{name}: {old} -> {new}")
        return lines

    def summary(self) -> str:
        """Sizes and the reasons why layers stay dense, in a few lines."""
        before, after = self.parameters("attention")
        lines = [
            f"{self.method}: {len(self.ranks)} of {len(self.projections)} projections become two "
            f"factors; attention {before:,} -> {after:,} parameters "
            f"({self.attention_parameter_ratio:.1%})"
        ]
        reasons: dict[str, int] = {}
        for projection in self.projections:
            if projection.rank is None:
                reason = projection.reason or "set to dense by hand"
                reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"dense: {count} projections, {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing the file in one step."""
        write_text_atomically(Path(path), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises
        ------
        PlanError
            The file is missing, is not JSON, or is not a plan; names the first offending key.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PlanError(f"there is no plan at {str(path)!r}.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
        return cls.parse(content, source=repr(str(path)))

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str = "the plan") -> Plan:
        """Validate a plan given as a dictionary; PlanError as in :meth:`load`."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "plan"
            raise PlanError(f"{source}: {where}: {first['msg']}.") from None


def _rank_text(ranks: Mapping[str, int | None], name: str) -> str:
    if name not in ranks:
        return "absent"
    return "dense" if ranks[name] is None else str(ranks[name])
