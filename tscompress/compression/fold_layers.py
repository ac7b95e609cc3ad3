"""Weights of a folded layer: attention block, feed-forward or patch embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.fold_config import VALUE_SWEEPS, FoldConfig
from tscompress.compression.fold_moments import (
    ROWS_PER_COLUMN,
    AttentionMoments,
    HiddenMoments,
    Products,
    row_shares,
    thinned,
    valid_rows,
)
from tscompress.compression.layer_walk import Step
from tscompress.errors import FactorizationError
from tscompress.layers.resize import replace_heads_, resize_hidden_
from tscompress.linalg import (
    Roots,
    fold_bilinear,
    fold_rotary,
    fold_values,
    least_squares,
    select_units,
    shared_latent,
    symmetric_roots,
)
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan
from tscompress.plan.plan import Plan


def fold_attention_(
    loaded: LoadedModel,
    block: AttentionBlock,
    plan: HeadPlan,
    moments: AttentionMoments,
    config: FoldConfig,
) -> nn.Module:
    """Replace the attention ``block`` by one with smaller heads."""
    old: Any = loaded.model.get_submodule(block.name)
    with naming_failures(block.name):
        weights = folded_heads(old, plan, moments, config)
    new: Any = replace_heads_(loaded.model, plan)
    for role, weight in weights.items():
        fill_(getattr(new, role).weight, weight, block.name)
    return new  # type: ignore[no-any-return]


def shared_latent_of(
    loaded: LoadedModel, plan: Plan, step: Step, fitted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A ``[r, d]`` and B ``[d, r]``: the encoder's output y is approximated by B z, z = A y.

    ``fitted`` is the reconstruction of a sliced encoder's output. Keys and values of ``step`` have
    been composed with it, those of later layers will be.
    """
    assert step.encoded is not None
    assert plan.latent is not None
    readers: list[Any] = [loaded.model.get_submodule(h.name) for h in plan.heads if h.latent]
    width: int = readers[0].k.in_features
    products = Products(width, readers[0].k.weight.device)
    limits = row_shares(ROWS_PER_COLUMN * width, step.encoded)
    for index, states in enumerate(step.encoded):
        rows = valid_rows(states, step.key_valid[index])
        products.add(thinned(rows, limits[index], index))
    read = torch.zeros_like(products.second)
    for reader in readers:
        for role in "kv":
            wide = getattr(reader, role).weight.detach().to(torch.float64)
            if fitted is not None and reader is not loaded.model.get_submodule(step.block.name):
                wide = wide @ fitted
            read += wide.T @ wide
    with naming_failures("the latent of all cross-attention"):
        return shared_latent(read, Roots.of(products.second), plan.latent)


def fold_latent_(loaded: LoadedModel, plan: HeadPlan, down: Tensor, up: Tensor) -> nn.Module:
    """Let the heads of a cross-attention read z = ``down`` y; y is approximated by ``up`` z.

    For a latent of r dimensions ``down`` is ``[r, d]`` and ``up`` ``[d, r]``.
    """
    old: Any = loaded.model.get_submodule(plan.name)
    W = {role: getattr(old, role).weight.detach().to(torch.float64) for role in "qkvo"}
    by_head = (plan.num_heads, plan.head_size)
    keys, values = ((W[role] @ up).unflatten(0, by_head) for role in "kv")  # [H, k, r]
    queries = torch.einsum("hkr,hkd->hrd", keys, W["q"].unflatten(0, by_head))
    outputs = torch.einsum("dhk,hkr->dhr", W["o"].unflatten(1, by_head), values)
    new: Any = replace_heads_(loaded.model, plan)
    fill_(new.q.weight, queries.flatten(0, 1), plan.name)
    fill_(new.o.weight, outputs.flatten(1), plan.name)
    if new.first is None:
        fill_(new.down.weight, down, plan.name)
    return new  # type: ignore[no-any-return]


def folded_heads(
    attention: Any, plan: HeadPlan, moments: AttentionMoments, config: FoldConfig
) -> dict[str, Tensor]:
    """Weights of q, k, v and o with the planned head sizes, float64."""
    W = {role: getattr(attention, role).weight.detach().to(torch.float64) for role in "qkvo"}
    heads = [slice(h * plan.head_size, (h + 1) * plan.head_size) for h in range(plan.num_heads)]
    weights: dict[str, Tensor] = {}
    if plan.qk_size == plan.head_size:
        weights |= {"q": W["q"], "k": W["k"]}
    else:
        C_x, C_y = Roots.of(moments.queries), Roots.of(moments.keys)
        if plan.frequencies is not None:
            groups = frequency_groups(attention, plan, moments.distances)
            pairs = [fold_rotary(W["q"][h], W["k"][h], C_x, C_y, groups) for h in heads]
        else:
            pairs = [fold_bilinear(W["q"][h], W["k"][h], C_x, C_y, plan.qk_size)[:2] for h in heads]
        weights["q"] = torch.cat([queries for queries, _ in pairs])
        weights["k"] = torch.cat([keys for _, keys in pairs])
    if plan.vo_size == plan.head_size:
        weights |= {"v": W["v"], "o": W["o"]}
    else:
        fits = config.refit != "none"
        P, out = fold_values(
            W["o"], moments.values, plan.num_heads, plan.vo_size, VALUE_SWEEPS, refit=fits
        )
        weights["v"] = torch.cat([P[h] @ W["v"][head] for h, head in enumerate(heads)])
        weights["o"] = out
    return weights


def frequency_groups(attention: Any, plan: HeadPlan, distances: Tensor) -> list[dict[int, float]]:
    """Rotary pairs that each kept frequency represents, with their weights.

    A dropped pair belongs to the kept frequency of the largest weight: the mean of
    cos((w - w') t) over t by their weights ``distances`` ``[T]``, near 1 for slow pairs and near 0
    for fast ones. Distances t are in tokens.
    """
    assert plan.frequencies is not None
    inverse = attention.rope_embed.inv_freq.detach().to("cpu", torch.float64)
    steps = torch.arange(len(distances), dtype=torch.float64)
    groups: list[dict[int, float]] = [{kept: 1.0} for kept in plan.frequencies]
    for pair in sorted(set(range(len(inverse))) - set(plan.frequencies)):
        likeness = [
            float((torch.cos((inverse[pair] - inverse[kept]) * steps) * distances).sum())
            for kept in plan.frequencies
        ]
        best = max(range(len(likeness)), key=likeness.__getitem__)
        if likeness[best] > 0:
            groups[best][pair] = likeness[best]
    return groups


def with_free_frequencies(attention: Any, plan: HeadPlan, moments: AttentionMoments) -> HeadPlan:
    """The plan with its number of rotary pairs replaced by those whose scores vary most."""
    if plan.frequencies is None:
        return plan
    chosen = choose_frequencies(attention, plan.num_heads, plan.qk_size // 2, moments)
    return plan.model_copy(update={"frequencies": chosen})


def choose_frequencies(
    attention: Any, num_heads: int, count: int, moments: AttentionMoments
) -> tuple[int, ...]:
    """The ``count`` rotary pairs whose scores vary most, summed over heads; ascending."""
    size = attention.q.out_features // num_heads
    root_x, _ = symmetric_roots(moments.queries)
    root_y, _ = symmetric_roots(moments.keys)
    Q, K = (
        (getattr(attention, role).weight.detach().to(torch.float64) @ root).square().sum(1)
        for role, root in (("q", root_x), ("k", root_y))
    )  # [H k]: mean square of each query and key
    energy = [side.view(num_heads, 2, size // 2).sum(1) for side in (Q, K)]
    scores = (energy[0] * energy[1]).sum(0)
    return tuple(sorted(scores.topk(count).indices.tolist()))


def fold_hidden_(
    loaded: LoadedModel, plan: HiddenPlan, moments: HiddenMoments, config: FoldConfig
) -> nn.Module:
    """Keep the planned number of hidden units of a feed-forward."""
    module: Any = loaded.model.get_submodule(plan.name)
    inputs = ("wi_0", "wi_1") if plan.gated else ("wi",)
    old = {role: getattr(module, role).weight.detach() for role in (*inputs, "wo")}
    with naming_failures(plan.name):
        kept, out = folded_hidden(old["wo"], moments, plan.kept, config)
    resize_hidden_(loaded.model, plan)
    for role in inputs:
        fill_(getattr(module, role).weight, old[role][kept], plan.name)
    fill_(module.wo.weight, out, plan.name)
    return module  # type: ignore[no-any-return]


def folded_hidden(
    W: Tensor, moments: HiddenMoments, count: int, config: FoldConfig
) -> tuple[Tensor, Tensor]:
    """Indices of the kept units, ``[count]``, and their output weights ``[m, count]``."""
    W, C = W.detach().to(torch.float64), moments.hidden
    if count == W.shape[1]:
        return torch.arange(count, device=W.device), W
    kept = select_units(W, C, count)
    out = W[:, kept]
    if config.refit != "none":
        second = C[:, kept].to(torch.float64)
        cross, second = W @ second, second[kept]
        del W  # in float64 larger than the layer, and the solver needs memory
        out = least_squares(cross, second, out)
    return kept, out


def fold_patch_(
    loaded: LoadedModel, plan: HiddenPlan, moments: HiddenMoments, config: FoldConfig
) -> None:
    """Keep the planned number of hidden units of a patch embedding; fit its residual layer too."""
    module: Any = loaded.model.get_submodule(plan.name)
    with naming_failures(plan.name):
        kept, out, residual, bias = _folded_patch(module, moments.hidden, plan, config)
    old = module.hidden_layer
    resize_hidden_(loaded.model, plan)
    fill_(module.hidden_layer.weight, old.weight.detach()[kept], plan.name)
    fill_(module.hidden_layer.bias, old.bias.detach()[kept], plan.name)
    fill_(module.output_layer.weight, out, plan.name)
    fill_(module.output_layer.bias, bias, plan.name)
    fill_(module.residual_layer.weight, residual, plan.name)


def _folded_patch(
    module: Any, C: Tensor, plan: HiddenPlan, config: FoldConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kept units, weights of output and residual layer, and the output's bias."""
    W = torch.cat(
        [
            module.output_layer.weight.detach(),
            module.residual_layer.weight.detach(),
            module.output_layer.bias.detach()[:, None],
        ],
        dim=1,
    ).to(torch.float64)
    units, always = slice(0, plan.d_ff), torch.arange(plan.d_ff, len(C), device=C.device)
    # Units are chosen for the residual after regression on the inputs, which are all kept.
    told = least_squares(C[units][:, always], C[always][:, always], C[units][:, always] * 0)
    rest = C[units][:, units] - told @ C[always][:, units]
    kept, out = folded_hidden(W[:, units], HiddenMoments((rest + rest.T) / 2), plan.kept, config)
    if config.refit == "none":
        return kept, out, W[:, plan.d_ff : -1], W[:, -1]
    chosen = torch.cat([kept, always])
    fitted = least_squares(W @ C[:, chosen], C[chosen][:, chosen], W[:, chosen])
    return kept, fitted[:, : plan.kept], fitted[:, plan.kept : -1], fitted[:, -1]


@contextmanager
def naming_failures(name: str) -> Iterator[None]:
    """Raise a failed decomposition as a FactorizationError that names the layer."""
    try:
        yield
    except LinAlgError as error:
        raise FactorizationError(f"a decomposition of {name} failed: {error}.") from error


def fill_(parameter: Tensor, value: Tensor, name: str) -> None:
    """Write a weight of layer ``name``, ``[...]`` as the parameter.

    Raises
    ------
    FactorizationError
        It is not finite.
    """
    if not bool(torch.isfinite(value).all()):
        raise FactorizationError(f"folding {name} gave weights that are not finite.")
    with torch.no_grad():
        parameter.copy_(value)
