"""Putting a plan into effect: Linear layers become two factors. The model is changed in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.calibration import Moment
from tscompress.errors import FactorizationError
from tscompress.factored import projection_, replace_module_
from tscompress.linalg import truncated_svd, whitened_svd
from tscompress.loading import LoadedModel
from tscompress.low_rank import LowRankLinear
from tscompress.plan import Plan


def apply_plan_(
    loaded: LoadedModel,
    plan: Plan,
    moments: Mapping[str, Moment] | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Factor the planned layers of ``loaded.model`` and note the plan on ``loaded``.

    Parameters
    ----------
    moments
        Second moments of the layers' inputs, for ``activation-svd``.

    Raises
    ------
    PlanError
        The plan names a layer that is not there or has another shape.
    FactorizationError
        A decomposition failed or gave values that are not finite; names the layer. The model is
        then as it was.
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
