"""From a schedule to a plan: which rank each projection gets."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.architectures import Architecture
from tscompress.calibration import Moment
from tscompress.errors import FactorizationError, PlanError
from tscompress.linalg import (
    break_even_rank,
    energy_rank,
    epsilon_rank,
    power_law_ranks,
    singular_values,
    symmetric_roots,
)
from tscompress.plan import Plan, ProjectionPlan

Method = Literal["svd", "activation-svd"]


class _Schedule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EpsilonSchedule(_Schedule):
    """Keep the ε-rank of each matrix (paper sec. 5)."""

    kind: Literal["epsilon"] = "epsilon"
    epsilon: float = Field(gt=0, lt=1)


class RankSchedule(_Schedule):
    """The same rank for every projection."""

    kind: Literal["rank"] = "rank"
    rank: int = Field(ge=1)


class EnergySchedule(_Schedule):
    """The smallest rank that keeps this share of the squared singular values."""

    kind: Literal["energy"] = "energy"
    energy: float = Field(gt=0, le=1)


class PowerLawSchedule(_Schedule):
    """Head size ceil(d_0 (1 + i)^alpha) at depth i, times the number of heads (paper sec. 5)."""

    kind: Literal["power-law"] = "power-law"
    d_0: float = Field(gt=0)
    alpha: float = Field(ge=0)
    powers_of_two: bool = Field(default=False, description="round down, as the authors' code")


class BudgetSchedule(_Schedule):
    """Ranks that keep most of every matrix's energy at a given ``parameter_ratio``."""

    kind: Literal["budget"] = "budget"
    parameter_ratio: float = Field(gt=0, le=1, description="of the planned parts, after / before")


Schedule = Annotated[
    EpsilonSchedule | RankSchedule | EnergySchedule | PowerLawSchedule | BudgetSchedule,
    Field(discriminator="kind"),
]


def make_plan(
    model: nn.Module,
    architecture: Architecture,
    method: Method,
    schedule: Schedule,
    *,
    moments: Mapping[str, Moment] | None = None,
    exclude: Sequence[str] = (),
    feed_forward: bool = False,
) -> Plan:
    """Choose a rank for every attention projection, and for the feed-forwards if asked.

    Parameters
    ----------
    moments
        Second moments of the inputs, for ``activation-svd``, whose spectra are those of W C^{1/2}.
    exclude
        Shell patterns on dotted names (``encoder.block.0.*``, ``*.v``); these stay dense.
    feed_forward
        Plan the feed-forward layers too.

    Raises
    ------
    PlanError
        A pattern matches nothing, a power law is to size a feed-forward, or the budget is too low.
    FactorizationError
        A spectrum could not be computed; names the layer.
    """
    rows = [(block, "attention", name) for block, _, name in architecture.attention_projections()]
    if feed_forward:
        if isinstance(schedule, PowerLawSchedule):
            raise PlanError(
                "a power law gives head sizes and cannot size feed-forward layers; "
                "use epsilon, rank, energy or budget, or leave feed_forward out."
            )
        rows += [
            (block, "feed_forward", name)  # type: ignore[misc]
            for block, _, name in architecture.feed_forward_projections()
        ]
    excluded = _excluded([name for _, _, name in rows], exclude)
    linears: dict[str, nn.Linear] = {}
    for _, _, name in rows:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise PlanError(
                f"{name} is a {type(module).__name__} already; compress the original checkpoint."
            )
        linears[name] = module
    open_names = [name for _, _, name in rows if name not in excluded]
    wanted = _wanted_ranks(linears, open_names, rows, method, schedule, moments)
    projections = []
    for _, part, name in rows:
        out_features, in_features = linears[name].weight.shape
        rank, reason = _settle(wanted.get(name), out_features, in_features, name in excluded)
        projections.append(
            ProjectionPlan(
                name=name,
                part=part,
                out_features=out_features,
                in_features=in_features,
                rank=rank,
                reason=reason,
            )
        )
    return Plan(
        family=architecture.family,
        method=method,
        schedule=schedule.model_dump(),
        projections=tuple(projections),
    )


def projection_spectra(
    linears: Mapping[str, nn.Linear],
    names: Sequence[str],
    method: Method,
    moments: Mapping[str, Moment] | None = None,
) -> dict[str, Tensor]:
    """Singular values of W, or of W C^{1/2} for ``activation-svd``, by name."""
    spectra = {}
    for name in names:
        weight = linears[name].weight.detach().to(torch.float64)
        try:
            if method == "activation-svd":
                weight = (
                    weight @ symmetric_roots(_moment(moments, name).second.to(weight.device))[0]
                )
            spectra[name] = singular_values(weight).cpu()
        except LinAlgError as error:
            raise FactorizationError(f"the SVD of {name} failed: {error}.") from error
    return spectra


def _moment(moments: Mapping[str, Moment] | None, name: str) -> Moment:
    if moments is None or name not in moments:
        raise FactorizationError(
            f"activation-svd needs the input moments of {name}; calibrate it first."
        )
    return moments[name]


def _excluded(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    excluded: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise PlanError(
                f"the exclusion {pattern!r} matches no planned layer; names look like {names[0]!r}."
            )
        excluded.update(matching)
    return excluded


def _wanted_ranks(
    linears: Mapping[str, nn.Linear],
    names: Sequence[str],
    rows: Sequence[tuple[object, str, str]],
    method: Method,
    schedule: Schedule,
    moments: Mapping[str, Moment] | None,
) -> dict[str, int]:
    if isinstance(schedule, RankSchedule):
        return dict.fromkeys(names, schedule.rank)
    if isinstance(schedule, PowerLawSchedule):
        blocks = {name: block for block, _, name in rows}
        return {
            name: blocks[name].num_heads  # type: ignore[attr-defined]
            * power_law_ranks(
                [blocks[name].depth],  # type: ignore[attr-defined]
                schedule.d_0,
                schedule.alpha,
                powers_of_two=schedule.powers_of_two,
            )[0]
            for name in names
        }
    spectra = projection_spectra(linears, names, method, moments)
    if isinstance(schedule, EpsilonSchedule):
        return {n: max(1, epsilon_rank(s, schedule.epsilon)) for n, s in spectra.items()}
    if isinstance(schedule, EnergySchedule):
        return {n: max(1, energy_rank(s, schedule.energy)) for n, s in spectra.items()}
    everything = sum(linear.weight.numel() for linear in linears.values())
    fixed = everything - sum(linears[name].weight.numel() for name in names)
    allowed = int(schedule.parameter_ratio * everything) - fixed
    return _budget_ranks(spectra, {n: linears[n].weight.shape for n in names}, allowed)


def _budget_ranks(
    spectra: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], allowed: int
) -> dict[str, int]:
    """Spend ``allowed`` parameters where a further singular value keeps most energy per parameter.

    Energy is relative to the matrix's own, so that no layer starves for having small weights. A
    matrix that would pass its break-even rank is made dense when that still fits.
    """
    minimum = sum(sum(shape) for shape in shapes.values())
    if minimum > allowed:
        raise PlanError(
            f"a budget of {allowed:,} parameters is below rank 1 everywhere, which takes "
            f"{minimum:,}; raise the budget or exclude less."
        )
    gains: list[tuple[float, str, int]] = []
    for name, sigma in spectra.items():
        squared = sigma**2
        total = float(squared.sum()) or 1.0
        cost = sum(shapes[name])
        gains += [
            (float(value) / total / cost, name, j) for j, value in enumerate(squared[1:], start=2)
        ]
    # Within a matrix singular values descend, so sorting keeps ranks in order.
    gains.sort(key=lambda gain: -gain[0])
    ranks = dict.fromkeys(spectra, 1)
    left = allowed - minimum
    dense: set[str] = set()
    for _, name, _ in gains:
        if name in dense:
            continue
        m, n = shapes[name]
        cost = m + n
        if ranks[name] >= break_even_rank(m, n):
            cost = m * n - ranks[name] * (m + n)
            if cost <= left:
                dense.add(name)
                ranks[name] = min(m, n)
                left -= cost
        elif cost <= left:
            ranks[name] += 1
            left -= cost
    return ranks


def _settle(
    wanted: int | None, out_features: int, in_features: int, excluded: bool
) -> tuple[int | None, str | None]:
    if excluded:
        return None, "excluded by pattern"
    assert wanted is not None
    if wanted > break_even_rank(out_features, in_features):
        return None, "two factors of the rank it gets would not be smaller"
    return wanted, None
