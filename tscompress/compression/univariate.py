"""Drop queries and keys that do nothing: of group attention of series that are groups of their own,
and of a decoder that reads a single token."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.complete_fold_plan import complete_fold_plan
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
from tscompress.compression.layer_walk import Step
from tscompress.compression.recording import PassEnded
from tscompress.data.batch import ForecastBatch
from tscompress.families.registry import wrap_pipeline
from tscompress.layers.resize import own_values_of, replace_heads_
from tscompress.layers.univariate import OwnValues, drop_groups_
from tscompress.linalg import fold_values
from tscompress.plan.layer_plans import HeadPlan
from tscompress.plan.plan import Plan

#: Of a series that is run for what does not depend on it.
_ANY_STEPS = 64


def separate_series_(loaded: LoadedModel, plan: Plan) -> None:
    """Keep only values and outputs of attention to a single key.

    Forecasts of series that are groups of their own stay, and groups of several are refused, or
    several tokens of the decoder.
    """
    for head in plan.heads:
        if head.values_only:
            values = own_values_of(loaded.model.get_submodule(head.name), head)
            loaded.model.set_submodule(head.name, values)
    if plan.univariate:
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
    inputs = _constant_inputs(loaded) if plan.single_token else {}
    separate_series_(loaded, plan)
    for head in plan.heads:
        if head.merged:
            _merge_(loaded, head)
        elif head.constant_query and head.single_key:
            _keep_constant_(loaded, head, inputs[head.name])
        elif head.constant_query:
            _keep_scores_(loaded, head, inputs[head.name])
    loaded.plan = plan


def fold_own_values_(
    loaded: LoadedModel, step: Step, head: HeadPlan, config: FoldConfig
) -> tuple[OwnValues, str]:
    """Fold values and outputs of a block without queries and keys.

    One matrix is exact, and so is one dimension a head of a constant query. Two have else the rank
    ``num_heads * vo_size``, with the least error of the output on the step's inputs.

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
    if head.constant_query:
        with torch.no_grad():
            x: Tensor = step.module.layer_norm(step.inputs[0])[0, 0]  # type: ignore[operator]
        _keep_constant_(loaded, head, x)
    elif head.vo_size < head.head_size:
        rank = head.num_heads * head.vo_size
        moment = _value_moment(values, step)
        v, o = (layer.weight.detach().to(torch.float64) for layer in (values.v, values.o))
        with naming_failures(head.name):
            kept, out = fold_values(o, moment, 1, rank, refit=config.refit != "none")
        values.resize_(rank)
        fill_(values.v.weight, kept[0] @ v, head.name)
        fill_(values.o.weight, out, head.name)
    return values, "o"


@torch.no_grad()
def _constant_inputs(loaded: LoadedModel) -> dict[str, Tensor]:
    """Normed stream that blocks with a constant query read, ``[d_model]``, by name."""
    blocks = [block for block in loaded.architecture.attention if block.constant_query]
    reads = {block.name: loaded.model.get_submodule(block.projections["q"]) for block in blocks}
    steps = torch.arange(_ANY_STEPS, dtype=torch.float32)[None]
    with inputs_of(reads) as seen:
        run_teacher_forced(loaded, ForecastBatch(context=steps, target=steps[:, :1]))
    return {name: states[0, 0] for name, states in seen.items()}


def _keep_constant_(loaded: LoadedModel, head: HeadPlan, x: Tensor) -> None:
    """Keep the output of each head for the input ``x`` ``[d_model]``, which is the only one."""
    values: Any = loaded.model.get_submodule(head.name)
    v, o, x = (
        states.detach().to(torch.float64) for states in (values.v.weight, values.o.weight, x)
    )
    outputs = o.unflatten(1, (head.num_heads, -1)) * (v @ x).unflatten(0, (head.num_heads, -1))
    values.resize_(head.num_heads)
    read = (x / x.square().sum()).expand(head.num_heads, -1)  # 1 for x
    fill_(values.v.weight, read, head.name)
    fill_(values.o.weight, outputs.sum(-1), head.name)


def _keep_scores_(loaded: LoadedModel, head: HeadPlan, x: Tensor) -> None:
    """Keep the scores of cross-attention for the query of ``x`` ``[d_model]``, the only one."""
    old: Any = loaded.model.get_submodule(head.name)
    x, W_Q, W_K = (t.detach().to(torch.float64) for t in (x, old.q.weight, old.k.weight))
    queries, keys = ((W.unflatten(0, (head.num_heads, -1))) for W in (W_Q, W_K))  # [H, k, d]
    size = x.square().sum().sqrt()
    new: Any = replace_heads_(loaded.model, head)
    fill_(new.q.weight, (x / size).expand(head.num_heads, -1), head.name)
    fill_(new.k.weight, torch.einsum("hk,hkd->hd", queries @ x, keys) / size, head.name)
    fill_(new.v.weight, old.v.weight.detach(), head.name)
    fill_(new.o.weight, old.o.weight.detach(), head.name)


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
            products.add(thinned(valid_rows(seen["c"], step.valid[index]), limit, index))
    return products.second
