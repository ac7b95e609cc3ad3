"""From a schedule to a fold plan: the size of every layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tscompress.errors import PlanError
from tscompress.families.t5_stack import token_table
from tscompress.io.untrusted import first_problem
from tscompress.linalg import (
    energy_rank,
    epsilon_rank,
    fit_power_law,
    power_law_ranks,
    singular_values,
)
from tscompress.plan.architecture import Architecture, AttentionBlock
from tscompress.plan.layer_plans import (
    INPUT_PATCHES,
    OUTPUT_PATCHES,
    TOKENS,
    EmbeddingPlan,
    HeadPlan,
    HiddenPlan,
    WidthPlan,
    stock_frequencies,
)
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import (
    BudgetSchedule,
    EnergySchedule,
    EpsilonSchedule,
    FitSchedule,
    PowerLawSchedule,
    RankSchedule,
    Schedule,
)

#: One size for every layer, or sizes by name; other layers keep theirs, and None keeps all.
Sizes = int | Mapping[str, int] | None
PATCH_EMBEDDINGS = (INPUT_PATCHES, OUTPUT_PATCHES)

L = TypeVar("L", HeadPlan, HiddenPlan, EmbeddingPlan, WidthPlan, Plan)


def head_sizes(
    model: nn.Module,
    architecture: Architecture,
    schedule: Schedule,
    *,
    free_frequencies: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of queries and keys, and of values, by attention block, for :func:`fold_plan`.

    A schedule with sizes by block rounds those of rotary queries and keys up to a size that a
    stock config allows, or with ``free_frequencies`` to an even one.

    ``epsilon`` and ``energy`` use the singular values of W_Q^T W_K and of W_O W_V of each head; a
    block has the largest size that one of its heads needs. ``fit`` smooths ε-ranks over depth.

    Raises
    ------
    PlanError
        The schedule sizes projections, not heads.
    """
    names = [block.name for block in architecture.attention]
    if isinstance(schedule, RankSchedule):
        alike = dict.fromkeys(names, schedule.rank)
        return alike, alike
    if isinstance(schedule, BudgetSchedule):
        raise PlanError(
            "a budget for fold names its measure, such as parameters=0.5; "
            "a bare share of the planned layers is for svd and activation-svd."
        )
    depths = [block.depth for block in architecture.attention]
    limits = [
        dense_linear(model, block.projections["q"]).out_features // block.num_heads
        for block in architecture.attention
    ]
    if isinstance(schedule, PowerLawSchedule):
        wanted = power_law_ranks(
            depths, schedule.d_0, schedule.alpha, powers_of_two=schedule.powers_of_two
        )
        qk, vo = wanted, wanted
    else:
        both = [_head_spectra(model, block) for block in architecture.attention]
        qk, vo = (
            _spectral_sizes(schedule, depths, [spectra[side] for spectra in both])
            for side in (0, 1)
        )
    return (
        {
            block.name: (
                _rotary_size(size, limit, free_frequencies) if block.rotary else min(size, limit)
            )
            for block, size, limit in zip(architecture.attention, qk, limits, strict=True)
        },
        {name: min(size, limit) for name, size, limit in zip(names, vo, limits, strict=True)},
    )


def _spectral_sizes(
    schedule: EpsilonSchedule | EnergySchedule | FitSchedule,
    depths: Sequence[int],
    spectra: Sequence[Sequence[Tensor]],
) -> list[int]:
    """Head size of each block, from the singular values of each of its heads."""
    if isinstance(schedule, EnergySchedule):
        return [max(1, *(energy_rank(s, schedule.energy) for s in heads)) for heads in spectra]
    ranks = [[max(1, epsilon_rank(s, schedule.epsilon)) for s in heads] for heads in spectra]
    if isinstance(schedule, EpsilonSchedule):
        return [max(of_heads) for of_heads in ranks]
    means = [sum(of_heads) / len(of_heads) for of_heads in ranks]
    return power_law_ranks(depths, *fit_power_law(depths, means))


def _head_spectra(model: nn.Module, block: AttentionBlock) -> tuple[list[Tensor], list[Tensor]]:
    """Singular values of W_Q^T W_K and of W_O W_V of each head."""
    q, k, v, o = (
        dense_linear(model, block.projections[role]).weight.detach().to(torch.float64)
        for role in "qkvo"
    )
    pairs = ((q, k), (o.T, v))
    scores, outputs = (
        [
            singular_values(torch.linalg.qr(a.T).R @ torch.linalg.qr(b.T).R.T)
            for a, b in zip(left.chunk(block.num_heads), right.chunk(block.num_heads), strict=True)
        ]
        for left, right in pairs
    )
    return scores, outputs


def _rotary_size(size: int, limit: int, free_frequencies: bool) -> int:
    """The next even size; in a stock config it also divides the original's."""
    start = min(max(2, size), limit)
    return next(
        d for d in range(start, limit + 1) if d % 2 == 0 and (free_frequencies or limit % d == 0)
    )


def fold_plan_of(
    model: nn.Module,
    architecture: Architecture,
    schedule: Schedule | None,
    *,
    ff_ratio: float | None = None,
    latent: int | None = None,
    embedding_rank: int | None = None,
    width: int | None = None,
    exclude: Sequence[str] = (),
    free_frequencies: bool = False,
    univariate: bool = False,
    single_token: bool = False,
) -> Plan:
    """A plan to fold heads by a schedule, and all hidden layers to a share of their units.

    Parameters
    ----------
    schedule
        None: heads keep their size.
    ff_ratio
        Share of hidden units to keep; None: all. Also for patch embeddings, since a stock config
        has one ``d_ff`` for all.
    latent
        As for :func:`fold_plan`; overrides the schedule for cross-attention.
    embedding_rank
        Of the token embedding; None: as it is.
    width
        As for :func:`fold_plan`.
    exclude
        Shell patterns on names of attention blocks, feed-forwards and patch embeddings that keep
        their size; the result is then a factored checkpoint.
    free_frequencies, univariate, single_token
        As for :func:`fold_plan`.

    Raises
    ------
    PlanError
        A pattern matches nothing, or matches cross-attention while a latent is given; or a size is
        impossible.
    """
    qk, vo = (
        ({}, {})
        if schedule is None
        else head_sizes(model, architecture, schedule, free_frequencies=free_frequencies)
    )
    whole = fold_plan(model, architecture)
    hidden = {
        entry.name: max(1, round((1.0 if ff_ratio is None else ff_ratio) * entry.d_ff))
        for entry in whole.hidden
    }
    excluded = excluded_names([layer.name for layer in whole.layers], exclude)
    cross: set[str] = set()
    if latent is not None:
        cross = {block.name for block in architecture.attention if block.reads_encoder}
        if excluded & cross:
            raise PlanError(
                f"{min(excluded & cross)} is excluded, but a latent is for all cross-attention; "
                "exclude other layers, or leave out the latent."
            )
    for name in excluded | cross:
        for sizes in (qk, vo, hidden):
            sizes.pop(name, None)
    record: dict[str, object] = {} if schedule is None else schedule.model_dump()
    if ff_ratio is not None:
        record["ff_ratio"] = ff_ratio
    for name, size in (("latent", latent), ("embedding_rank", embedding_rank), ("width", width)):
        if size is not None:
            record[name] = size
    record |= {
        name: True
        for name, asked in (("univariate", univariate), ("single_token", single_token))
        if asked
    }
    return fold_plan(
        model,
        architecture,
        qk=qk,
        vo=vo,
        hidden=hidden,
        embedding=embedding_rank,
        latent=latent,
        width=width,
        free_frequencies=free_frequencies,
        univariate=univariate,
        single_token=single_token,
        schedule=record,
    )


def fold_plan(
    model: nn.Module,
    architecture: Architecture,
    *,
    qk: Sizes = None,
    vo: Sizes = None,
    hidden: Sizes = None,
    embedding: Sizes = None,
    latent: int | None = None,
    width: int | None = None,
    free_frequencies: bool = False,
    univariate: bool = False,
    single_token: bool = False,
    kept_layers: Mapping[str, Sequence[int]] | None = None,
    schedule: Mapping[str, object] | None = None,
) -> Plan:
    """A plan to fold the model to the given sizes.

    Parameters
    ----------
    qk, vo
        Sizes of queries and keys, and of values, of each head, by name of the attention block.
    hidden
        Hidden units, by name of the feed-forward or patch embedding.
    embedding
        Rank of the token embedding. A factored checkpoint.
    latent
        Dimensions of one latent of the encoder's output that all cross-attention reads; a single
        ``qk`` or ``vo`` then excludes cross-attention. The result is a factored checkpoint.
    width
        New residual-stream width, ``d_model``.
    free_frequencies
        Rotary queries and keys may have any even size. If no stock config has the size, the plan
        has the fastest frequencies; folding then chooses which to keep.
    univariate
        Every series is a group of its own: group attention has no queries and keys. The result is a
        factored checkpoint.
    single_token
        The decoder reads a single token: its self-attention has no queries and keys, and its first
        layer one dimension a head where all series have the same query. A factored checkpoint.
    kept_layers
        Stack to the indices of the kept layers. ``model`` already has only these.
    schedule
        How the sizes were chosen, for the record.

    Raises
    ------
    PlanError
        A size is impossible, or a name is unknown.
    """
    sized = {name for sizes in (qk, vo, hidden) if isinstance(sizes, Mapping) for name in sizes}
    if latent is not None:
        _check_latent(architecture, sized)
    _check_single_keys(architecture, univariate, single_token)
    heads = []
    for block in architecture.attention:
        if (univariate and block.across_series) or (single_token and block.single_key):
            heads.append(_values_plan(model, block, vo))
            continue
        reads_latent = latent is not None and block.reads_encoder
        sizes = (latent, latent) if reads_latent else (qk, vo)
        head = _head_plan(model, block, *sizes, reads_latent, free_frequencies)
        if single_token and block.constant_query and not reads_latent:
            head = head.model_copy(update={"qk_size": 1, "constant_query": True})
        heads.append(head)
    units = _hidden_plans(model, architecture, hidden)
    known = {head.name for head in heads} | {layer.name for layer in units}
    tokens = embedding_plan(model, architecture, embedding, width)
    if sized - known:
        raise PlanError(f"the model has no {sorted(sized - known)[0]!r}; give it no size.")
    narrow = None
    if width is not None:
        narrow = _validated(WidthPlan, d_model=heads[0].d_model, kept=width)
    return _validated(
        Plan,
        family=architecture.family,
        method="fold",
        schedule=dict(schedule or {}),
        heads=tuple(heads),
        hidden=units,
        embedding=tokens,
        kept_layers=None if not kept_layers else {k: tuple(v) for k, v in kept_layers.items()},
        width=narrow,
    )


def _check_single_keys(architecture: Architecture, univariate: bool, single_token: bool) -> None:
    """Refuse to drop queries and keys that matter, or are not there."""
    family, blocks = architecture.family, architecture.attention
    if univariate and not any(block.across_series for block in blocks):
        raise PlanError(
            f"a {family} model has no group attention, so every series is forecast alone already; "
            "leave out univariate."
        )
    if single_token and not any(block.single_key for block in blocks):
        raise PlanError(
            f"a {family} model has no decoder that reads a single token, as Chronos-Bolt's does; "
            "leave out single_token."
        )


def _check_latent(architecture: Architecture, sized: set[str]) -> None:
    """Refuse a latent without cross-attention, and head sizes for blocks that read a latent."""
    cross = {block.name for block in architecture.attention if block.reads_encoder}
    if not cross:
        raise PlanError(
            f"a {architecture.family} model has no cross-attention that could read a latent; "
            "leave it out."
        )
    if sized & cross:
        raise PlanError(f"{min(sized & cross)} reads the latent; give it no head size.")


def _head_plan(
    model: nn.Module,
    block: AttentionBlock,
    qk: Sizes,
    vo: Sizes,
    reads_latent: bool,
    free_frequencies: bool,
) -> HeadPlan:
    before = _heads_before(model, block, "q")
    size = before["head_size"]
    qk_size = _size_of(qk, block.name, size)
    frequencies = None
    if block.rotary:
        frequencies = stock_frequencies(size, qk_size)
        if frequencies is None and free_frequencies:
            frequencies = tuple(range(qk_size // 2))
        if frequencies is None:
            raise PlanError(
                f"{block.name} has rotary embeddings: a stock config keeps the original's "
                f"frequencies only if the head size divides {size} and is even, not at {qk_size}."
            )
    return _validated(
        HeadPlan,
        **before,
        qk_size=qk_size,
        vo_size=_size_of(vo, block.name, size),
        frequencies=frequencies,
        latent=reads_latent,
    )


def _values_plan(model: nn.Module, block: AttentionBlock, vo: Sizes) -> HeadPlan:
    """The plan of a block without queries and keys."""
    before = _heads_before(model, block, "v")
    size = 1 if block.constant_query else _size_of(vo, block.name, before["head_size"])
    why = {"univariate": block.across_series, "single_key": block.single_key}
    constant = block.constant_query
    return _validated(
        HeadPlan, **before, qk_size=size, vo_size=size, **why, constant_query=constant
    )


def _heads_before(model: nn.Module, block: AttentionBlock, role: str) -> dict[str, Any]:
    """The fields of a :class:`HeadPlan` that describe the original, by one of its projections."""
    weight = dense_linear(model, block.projections[role]).weight  # [heads * head size, d_model]
    return {
        "name": block.name,
        "kind": block.kind,
        "d_model": weight.shape[1],
        "num_heads": block.num_heads,
        "head_size": len(weight) // block.num_heads,
    }


def _hidden_plans(
    model: nn.Module, architecture: Architecture, sizes: Sizes
) -> tuple[HiddenPlan, ...]:
    """Plans of every feed-forward and patch embedding."""
    names: list[tuple[str, str, str, str, bool]] = []  # layer, part, first and last Linear, gated
    for block in architecture.feed_forward:
        first, *others = block.projections.values()
        names.append((block.name, "feed_forward", first, others[-1], len(others) == 2))
    for name in PATCH_EMBEDDINGS:
        if hasattr(model, name):
            names.append((name, "patch", f"{name}.hidden_layer", f"{name}.output_layer", False))
    plans = []
    for name, part, first, last, gated in names:
        d_ff = dense_linear(model, first).out_features
        plan = _validated(
            HiddenPlan,
            name=name,
            part=part,
            in_features=dense_linear(model, first).in_features,
            out_features=dense_linear(model, last).out_features,
            d_ff=d_ff,
            kept=_size_of(sizes, name, d_ff),
            gated=gated,
        )
        plans.append(plan)
    return tuple(plans)


def embedding_plan(
    model: nn.Module, architecture: Architecture, rank: Sizes, width: int | None = None
) -> EmbeddingPlan | None:
    """The plan of a token embedding of lower rank; None: it stays.

    Raises
    ------
    PlanError
        The model has none, the factors would be no smaller, or the rank is above a new ``width``.
    """
    given = rank if isinstance(rank, int) else (rank or {}).get(TOKENS)
    if given is None:
        return None
    found = token_table(model)
    if found is None:
        raise PlanError(
            f"a {architecture.family} model has no token embedding, as Chronos-T5 has; leave out "
            "its rank."
        )
    plan = _validated(EmbeddingPlan, **found._asdict(), rank=given)
    plan.check(width)
    return plan


def check_heads(heads: Iterable[HeadPlan]) -> None:
    """Refuse to fold heads to more dimensions than their input has; a rank is at most that.

    Raises
    ------
    PlanError
    """
    for head in heads:
        sizes = [size for size in (head.qk_size, head.vo_size) if size < head.head_size]
        if sizes and max(sizes) > head.d_model:
            raise PlanError(
                f"{head.name}: head size {max(sizes)} is above d_model {head.d_model}, which is "
                "the most that such heads have use for. Give that, or less."
            )


def _size_of(sizes: Sizes, name: str, size: int) -> int:
    return sizes if isinstance(sizes, int) else (sizes or {}).get(name, size)


def _validated(layer: type[L], **fields: object) -> L:
    try:
        return layer.model_validate(fields)
    except ValidationError as error:
        _, reason, _ = first_problem(error)
        raise PlanError(f"{reason}.") from None


def dense_linear(model: nn.Module, name: str) -> nn.Linear:
    """The Linear layer ``name``; PlanError if it is factored already."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise PlanError(
            f"{name} is a {type(module).__name__} already; compress the original checkpoint."
        )
    return module


def excluded_names(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Names that match any of the patterns; PlanError if a pattern matches none."""
    excluded: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise PlanError(
                f"the exclusion {pattern!r} matches no planned layer; names look like {names[0]!r}."
            )
        excluded.update(matching)
    return excluded
