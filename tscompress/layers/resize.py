"""Replace layers of a model by empty ones of planned sizes.

In a factored checkpoint a block has heads of ``qk_size`` dimensions for queries and keys and
``vo_size`` for values, and feed-forwards differ in their number of hidden units. A stock model is
built, the planned modules are replaced by empty ones, and weights are filled in afterwards.
"""

from __future__ import annotations

from typing import Any

from chronos.chronos2.layers import MHA, MLP
from chronos.chronos2.layers import ResidualBlock as Chronos2ResidualBlock
from chronos.chronos_bolt import ResidualBlock as BoltResidualBlock
from torch import nn
from transformers.models.t5.modeling_t5 import (
    T5Attention,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerCrossAttention,
)

from tscompress.errors import PlanError
from tscompress.lab.in_context_models import SelfAttention
from tscompress.layers.latent_cross_attention import LatentCrossAttention
from tscompress.layers.single_token import OwnToken
from tscompress.layers.sized_attention import (
    SizedChronos2Attention,
    SizedT5Attention,
    empty_linear,
    with_smaller_heads,
)
from tscompress.layers.univariate import OwnValues
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan


def replace_heads_(model: nn.Module, plan: HeadPlan) -> nn.Module:
    """Replace ``plan.name`` by empty attention of the planned head sizes, and return it.

    Raises
    ------
    PlanError
        The model has no such module, or one that does not fit the plan.
    """
    attention = _planned_module(model, plan.name)
    if not isinstance(attention, T5Attention | MHA | SelfAttention):
        raise PlanError(
            f"the plan names {plan.name!r}, a {type(attention).__name__}; "
            "T5Attention, Chronos-2's MHA and the lab's attention have heads that can be resized."
        )
    if isinstance(attention, LatentCrossAttention):
        raise PlanError(f"{plan.name} reads a latent already; compress the original checkpoint.")
    if plan.latent and not plan.name.endswith(".EncDecAttention"):
        raise PlanError(f"the plan gives {plan.name} a latent; only T5's cross-attention has one.")
    size, rotary = plan.head_size, plan.frequencies is not None
    heads = attention.n_heads
    qk_size, vo_size = attention.k.out_features // heads, attention.v.out_features // heads
    turns = getattr(attention, "use_rope", False)
    _check_same(
        plan.name,
        _heads_text(plan.num_heads, size, size, plan.d_model, rotary),
        _heads_text(heads, qk_size, vo_size, attention.d_model, turns),
    )
    sized: Any
    if plan.values_only:
        sized = own_values_of(attention, plan)
        sized.resize_(None if plan.merged else plan.num_heads * plan.vo_size)
    elif plan.latent:
        first = _first_latent(model, plan)
        sized = LatentCrossAttention.empty_like(attention, plan.qk_size, first)
    elif isinstance(attention, T5Attention):
        sized = SizedT5Attention.empty_like(attention, plan.qk_size, plan.vo_size)
    elif isinstance(attention, SelfAttention):
        sized = with_smaller_heads(attention, plan.qk_size, plan.vo_size)
    else:
        sized = SizedChronos2Attention.empty_like(
            attention, plan.qk_size, plan.vo_size, plan.frequencies
        )
    model.set_submodule(plan.name, sized)
    return sized  # type: ignore[no-any-return]


def own_values_of(attention: nn.Module, plan: HeadPlan) -> OwnValues:
    """The values and outputs of attention to a single key, not copies.

    Raises
    ------
    PlanError
        Attention of another kind than the plan's.
    """
    if plan.univariate and isinstance(attention, MHA):
        return OwnValues.of(attention)
    if plan.single_key and isinstance(attention, T5Attention):
        return OwnToken.of(attention)
    kind = "univariate; only Chronos-2 has group" if plan.univariate else "to a single key; T5 has"
    raise PlanError(f"the plan has {plan.name} {kind} attention.")


def _first_latent(model: nn.Module, plan: HeadPlan) -> LatentCrossAttention | None:
    """Attention of the first decoder layer, which holds the projection to the latent; None if it is
    the planned one."""
    layers = (
        name for name, part in model.named_modules() if isinstance(part, T5LayerCrossAttention)
    )
    name = f"{next(layers)}.EncDecAttention"
    if name == plan.name:
        return None
    first = _planned_module(model, name)
    if isinstance(first, LatentCrossAttention) and first.cached_values == plan.qk_size:
        return first
    raise PlanError(
        f"{plan.name} reads the latent of {name}; plan that one before it, with latent "
        f"{plan.qk_size} too."
    )


def resize_hidden_(model: nn.Module, plan: HiddenPlan) -> None:
    """Give the feed-forward or patch embedding ``plan.name`` empty layers of ``plan.kept`` units.

    The residual layer of a patch embedding stays as it is.

    Raises
    ------
    PlanError
        The model has no such module, or one that does not fit the plan.
    """
    module = _planned_module(model, plan.name)
    gated = isinstance(module, T5DenseGatedActDense)
    if gated or isinstance(module, T5DenseActDense | MLP):
        part, output = "feed_forward", "wo"
        inputs = ("wi_0", "wi_1") if gated else ("wi",)
    elif isinstance(module, BoltResidualBlock | Chronos2ResidualBlock):
        part, output, inputs = "patch", "output_layer", ("hidden_layer",)
    else:
        raise PlanError(
            f"the plan names {plan.name!r}, a {type(module).__name__}; only feed-forwards of T5, "
            "of Chronos-2 and ResidualBlock have hidden units that can be removed."
        )
    first, last = getattr(module, inputs[0]), getattr(module, output)
    _check_same(
        plan.name,
        _hidden_text(plan.part, plan.gated, plan.in_features, plan.d_ff, plan.out_features),
        _hidden_text(part, gated, first.in_features, first.out_features, last.out_features),
    )
    for role in inputs:
        setattr(module, role, empty_linear(getattr(module, role), out_features=plan.kept))
    setattr(module, output, empty_linear(last, in_features=plan.kept))


def _planned_module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"the plan names {name!r}, which the model does not have.") from None


def _check_same(name: str, planned: str, found: str) -> None:
    if planned != found:
        raise PlanError(f"the plan has {name} as {planned}; the model has {found}.")


def _heads_text(heads: int, qk_size: int, vo_size: int, d_model: int, rotary: bool) -> str:
    embedding = "with" if rotary else "without"
    return (
        f"{heads} heads of size {qk_size} (q, k) and {vo_size} (v) at d_model {d_model}, "
        f"{embedding} rotary embedding"
    )


def _hidden_text(part: str, gated: bool, inputs: int, units: int, outputs: int) -> str:
    return f"{'gated ' if gated else ''}{part} {inputs} -> {units} units -> {outputs}"
