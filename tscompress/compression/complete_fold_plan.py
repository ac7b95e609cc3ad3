"""A fold plan with every layer of the model that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tscompress.compression.fold_plans import check_heads, fold_plan
from tscompress.errors import PlanError
from tscompress.families.t5_stack import token_table
from tscompress.plan.architecture import Architecture
from tscompress.plan.layer_plans import TOKENS, HeadPlan, HiddenPlan
from tscompress.plan.plan import Plan, validated


def check_width(model: Any, plan: Plan) -> None:
    """Refuse a plan with a width for another ``d_model`` than the model's.

    Raises
    ------
    PlanError
    """
    if plan.width is None:
        return
    d_model = model.config.d_model
    if plan.width.d_model != d_model:
        raise PlanError(f"the plan has a d_model of {plan.width.d_model}; the model has {d_model}.")


def complete_fold_plan(model: nn.Module, architecture: Architecture, plan: Plan) -> Plan:
    """The plan with every layer of the model; layers that it does not name keep their size.

    Raises
    ------
    PlanError
        The plan is for another family, has a layer that does not exist, or one of another size.
    """
    if plan.family != architecture.family:
        raise PlanError(f"the plan is for {plan.family}; the model is a {architecture.family}.")
    whole = fold_plan(
        model, architecture, univariate=plan.univariate, single_token=plan.single_token
    )
    check_heads(plan.heads)
    there: tuple[HeadPlan | HiddenPlan, ...] = (*whole.heads, *whole.hidden)
    given: tuple[HeadPlan | HiddenPlan, ...] = (*plan.heads, *plan.hidden)
    known = {layer.name: layer for layer in there}
    for layer in given:
        found = known.get(layer.name)
        if type(found) is not type(layer):
            hint = ""
            if plan.kept_layers:
                hint = " with only its kept_layers; layers are numbered after dropping"
            raise PlanError(f"the plan names {layer.name!r}, which the model does not have{hint}.")
        before, after = (_unfolded(one) for one in (layer, found))
        if before != after:
            key = next(key for key in before if before[key] != after[key])
            raise PlanError(
                f"the plan has {layer.name} with {key} {before[key]}; the model has {after[key]}."
            )
    _check_drops(architecture, plan.heads)
    check_width(model, plan)
    _check_embedding(model, plan)
    heads = {head.name: head for head in plan.heads}
    hidden = {entry.name: entry for entry in plan.hidden}
    complete = plan.model_copy(
        update={
            "heads": tuple(heads.get(head.name, head) for head in whole.heads),
            "hidden": tuple(hidden.get(entry.name, entry) for entry in whole.hidden),
        }
    )
    return validated(Plan, complete.model_dump(), "the plan", "its layers")


def _check_drops(architecture: Architecture, heads: Sequence[HeadPlan]) -> None:
    """Refuse to drop of an attention block what it does need."""
    blocks = {block.name: block for block in architecture.attention}
    for head in heads:
        for key in ("single_key", "constant_query"):
            if getattr(head, key) and not getattr(blocks[head.name], key):
                raise PlanError(f"the plan has {head.name} with {key}, which it has not.")


def _check_embedding(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan for another token embedding than the model's."""
    if plan.embedding is None:
        return
    found = token_table(model)
    if found is None:
        raise PlanError(f"the plan has a rank of {TOKENS!r}, which the model does not have.")
    rotated = plan.width is not None and not found.tied  # which unties the head
    for key in ("vocabulary", "d_model", *(() if rotated else ("tied",))):
        planned, have = (getattr(one, key) for one in (plan.embedding, found))
        if planned != have:
            raise PlanError(f"the plan has {TOKENS} with {key} {planned}; the model has {have}.")


def _unfolded(layer: HeadPlan | HiddenPlan | None) -> dict[str, object]:
    """The fields of a planned layer that describe the original."""
    assert layer is not None
    chosen = {"qk_size", "vo_size", "frequencies", "latent", "univariate", "kept"}
    chosen |= {"single_key", "constant_query"}
    return layer.model_dump(exclude=chosen)
