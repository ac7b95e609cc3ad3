"""Ranks for svd and activation-svd, and the two factors of each projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.checkpoints.format import projection_, replace_module_
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.activations import Moment
from tscompress.compression.fold_plans import dense_linear, excluded_names
from tscompress.errors import FactorizationError, PlanError
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import (
    break_even_rank,
    energy_rank,
    epsilon_rank,
    power_law_ranks,
    singular_values,
    symmetric_roots,
    truncated_svd,
    whitened_svd,
)
from tscompress.plan.architecture import Architecture
from tscompress.plan.layer_plans import ProjectionPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import (
    EnergySchedule,
    EpsilonSchedule,
    Method,
    PowerLawSchedule,
    ProjectionSchedule,
    RankSchedule,
)


def make_plan(
    model: nn.Module,
    architecture: Architecture,
    method: Method,
    schedule: ProjectionSchedule,
    *,
    moments: Mapping[str, Moment] | None = None,
    exclude: Sequence[str] = (),
    feed_forward: bool = False,
) -> Plan:
    """Choose a rank for every attention projection and, optionally, feed-forward.

    Parameters
    ----------
    moments
        Second moments C of the inputs, for ``activation-svd``, which uses spectra of W C^{1/2}.
    exclude
        Shell patterns on dotted names (``encoder.block.0.*``, ``*.v``); these stay dense.
    feed_forward
        Also plan the feed-forward layers.

    Raises
    ------
    PlanError
        A pattern matches nothing, a power law is given for feed-forwards, or the budget is too low.
    FactorizationError
        A spectrum could not be computed; the message names the layer.
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
    excluded = excluded_names([name for _, _, name in rows], exclude)
    linears: dict[str, nn.Linear] = {}
    for _, _, name in rows:
        linears[name] = dense_linear(model, name)
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
    """Singular values of W, or of W C^{1/2} for ``activation-svd``, by name.

    Raises
    ------
    FactorizationError
        An SVD fails; it names the layer.
    """
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


def _wanted_ranks(
    linears: Mapping[str, nn.Linear],
    names: Sequence[str],
    rows: Sequence[tuple[object, str, str]],
    method: Method,
    schedule: ProjectionSchedule,
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
    """Spend ``allowed`` parameters on the singular values of most energy per parameter.

    Energy is relative to each matrix's total, so that small weights do not matter. A matrix that
    would exceed its break-even rank stays dense if that fits.
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
        return None, "two factors of the chosen rank would not be smaller"
    return wanted, None


def apply_plan_(
    loaded: LoadedModel,
    plan: Plan,
    moments: Mapping[str, Moment] | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Factor the planned layers of ``loaded.model`` and set ``loaded.plan``.

    Parameters
    ----------
    moments
        Second moments of the layers' inputs, for ``activation-svd``.

    Raises
    ------
    PlanError
        The plan has a layer that does not exist or has another shape.
    FactorizationError
        A decomposition failed or is not finite; the message names the layer. The model is left
        unchanged.
    """
    factors: dict[str, LowRankLinear] = {}
    for done, entry in enumerate(plan.projections, start=1):
        linear = projection_(loaded.model, entry.name)
        entry.check_shape(tuple(linear.weight.shape))
        if entry.rank is not None:
            factors[entry.name] = _factor(linear, entry.name, entry.rank, plan.method, moments)
        on_layer(done, len(plan.projections))
    for name, module in factors.items():
        replace_module_(loaded.model, name, module)
    loaded.plan = plan


def _factor(
    linear: torch.nn.Linear,
    name: str,
    rank: int,
    method: str,
    moments: Mapping[str, Moment] | None,
) -> LowRankLinear:
    weight = linear.weight.detach().to(torch.float64)
    try:
        if method == "svd":
            left, right = truncated_svd(weight, rank)
        elif moments is None or name not in moments:
            raise FactorizationError(f"{method} needs the input moments of {name}.")
        else:
            left, right = whitened_svd(weight, moments[name].second.to(weight.device), rank)
    except LinAlgError as error:
        raise FactorizationError(f"the SVD of {name} failed: {error}.") from error
    module = LowRankLinear.from_factors(linear, left, right)
    if not all(bool(torch.isfinite(p).all()) for p in module.parameters()):
        raise FactorizationError(f"the factors of {name} are not finite in {linear.weight.dtype}.")
    return module
