"""Drop group attention's queries and keys, for series that are groups of their own."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_layers import fill_, naming_failures
from tscompress.compression.fold_moments import (
    ROWS_PER_COLUMN,
    Products,
    inputs_of,
    row_shares,
    thinned,
    valid_rows,
)
from tscompress.compression.fold_plans import complete_fold_plan
from tscompress.compression.layer_walk import Step
from tscompress.compression.recording import PassEnded
from tscompress.families.registry import wrap_pipeline
from tscompress.layers.univariate import OwnValues, drop_groups_
from tscompress.linalg import fold_values
from tscompress.plan.layer_plans import HeadPlan
from tscompress.plan.plan import Plan


def separate_series_(loaded: LoadedModel, plan: Plan) -> None:
    """Keep only values and outputs of the group attention of ``loaded``.

    Forecasts of series that are groups of their own stay, and groups of several are refused.
    """
    for head in plan.heads:
        if head.univariate:
            values = OwnValues.of(loaded.model.get_submodule(head.name))
            loaded.model.set_submodule(head.name, values)
    drop_groups_(loaded.model)
    loaded.pipeline = wrap_pipeline(loaded.family, loaded.model)


def separate_and_merge_(loaded: LoadedModel, plan: Plan) -> None:
    """:func:`separate_series_`, with values and outputs as one matrix where the plan has one.

    For a plan without other changes (``Plan.calibrates`` is false); sets ``loaded.plan``.

    Raises
    ------
    PlanError
        The plan does not fit the model.
    """
    plan = complete_fold_plan(loaded.model, loaded.architecture, plan)
    separate_series_(loaded, plan)
    for head in plan.heads:
        if head.merged:
            _merge_(loaded, head)
    loaded.plan = plan


def fold_own_values_(
    loaded: LoadedModel, step: Step, head: HeadPlan, config: FoldConfig
) -> tuple[OwnValues, str]:
    """Fold values and outputs of a univariate block.

    One matrix is exact. Two have the rank ``num_heads * vo_size``, with the least error of the
    output on the step's inputs.

    Parameters
    ----------
    head
        At the new residual-stream width.

    Returns
    -------
    tuple
        The block, and the role of its last projection.
    """
    values: Any = loaded.model.get_submodule(head.name)
    if head.merged:
        return _merge_(loaded, head), "vo"
    if head.vo_size < head.head_size:
        rank = head.num_heads * head.vo_size
        moment = _value_moment(values, step)
        v, o = (layer.weight.detach().to(torch.float64) for layer in (values.v, values.o))
        with naming_failures(head.name):
            kept, out = fold_values(o, moment, 1, rank, refit=config.refit != "none")
        values.resize_(rank)
        fill_(values.v.weight, kept[0] @ v, head.name)
        fill_(values.o.weight, out, head.name)
    return values, "o"


def _merge_(loaded: LoadedModel, head: HeadPlan) -> OwnValues:
    values: Any = loaded.model.get_submodule(head.name)
    product = values.product()
    values.resize_(None)
    fill_(values.vo.weight, product, head.name)
    return values  # type: ignore[no-any-return]


def _value_moment(values: OwnValues, step: Step) -> Tensor:
    """Second moment of the values of valid positions, ``[r, r]``."""
    assert values.o is not None
    products = Products(values.o.in_features, values.o.weight.device)
    limits = row_shares(ROWS_PER_COLUMN * values.o.in_features, step.inputs)
    with inputs_of({"c": values.o}, until="c") as seen:
        for index, limit in enumerate(limits):
            with suppress(PassEnded):
                step.run(index)
            products.add(thinned(valid_rows(seen["c"], step.valid[index]), limit))
    return products.second
