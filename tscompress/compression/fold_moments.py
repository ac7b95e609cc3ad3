"""Statistics for folding one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS
from tscompress.compression.layer_walk import Step, is_across, runs_of
from tscompress.compression.recording import (
    PassEnded,
    run_embedding,
)
from tscompress.data.batch import ForecastBatch
from tscompress.families.registry import adapter_of
from tscompress.linalg import even_picks, scattered_picks
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.layer_plans import HiddenPlan

#: At most this many rows per column of a moment. Neighbouring positions are alike, and the product
#: of all rows would take longer than everything else.
ROWS_PER_COLUMN = 8
_ROWS_PER_HIDDEN_UNIT, _FEWEST_ROWS = 4, 8192
#: For products as wide as those of hidden units float32 suffices: the error of a fit to 256 of 1024
#: units agreed to three digits. They are most of the arithmetic of folding a large model.
WIDE = torch.float32
#: Symmetric products of at least this many columns are computed in strips from the diagonal to the
#: right, which saves a third of the time.
STRIPS_FROM, STRIP = 2048, 512


@dataclass
class AttentionMoments:
    """Statistics of an attention block's inputs.

    Attributes
    ----------
    queries, keys
        Second moments of their inputs, ``[d, d]``; keys centred where scores are invariant to it.
    values
        Second moment of the attention-weighted values of all heads, ``[H k, H k]``.
    distances
        Share of the pairs of a query and a key that are 0, 1, ... steps apart, ``[T]``; all 0
        without rotary embedding.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    distances: Tensor


@dataclass
class HiddenMoments:
    """Second moment of hidden units, ``[n, n]``; with more, see :func:`patch_moments`."""

    hidden: Tensor


def attention_moments(loaded: LoadedModel, step: Step) -> AttentionMoments:
    """Statistics of the attention block of ``step`` on the step's inputs."""
    assert isinstance(step.block, AttentionBlock)
    linears: dict[str, Any] = {
        role: loaded.model.get_submodule(step.block.projections[role]) for role in "qkvo"
    }
    device = linears["q"].weight.device
    queries = Products(linears["q"].in_features, device)
    keys = Products(linears["k"].in_features, device)
    values = Products(linears["o"].in_features, device)
    # A constant added to all keys of a sequence shifts all scores of a query alike, unless keys
    # rotate with the position. Only a softmax does not see that.
    centre = step.block.softmax and not step.block.rotary
    longest = max(stream.shape[1] for stream in step.inputs)
    distances = torch.zeros(longest, dtype=torch.float64)
    # Every batch: neighbouring positions are alike, other series are not.
    streams = step.inputs
    in_groups = _rows_in_groups(step) if is_across(step.block) else {}
    reading = [x for i, x in enumerate(streams) if not in_groups or in_groups[i][0].any()]
    limits = row_shares(ROWS_PER_COLUMN * linears["q"].in_features, streams, of=reading)
    value_limits = row_shares(ROWS_PER_COLUMN * linears["o"].in_features, streams)
    reads = {"x": linears["q"], "y": linears["k"], "c": linears["o"]}
    with inputs_of(reads, until="c") as seen:
        shares = zip(streams, limits, value_limits, strict=True)
        for index, (stream, limit, value_limit) in enumerate(shares):
            with suppress(PassEnded):
                step.run(index)
            x, y, c = seen["x"], seen["y"], seen["c"]  # [B, S, d]; group attention: [S, B, d]
            valid, key_valid = step.valid[index], step.key_valid[index]
            query_valid = valid
            if is_across(step.block):
                valid, key_valid = _transposed(valid), _transposed(key_valid)
                query_valid, key_valid = in_groups.get(index, (valid, key_valid))
                y = y - _group_means(y, step, index) if centre else y
            elif centre:
                y = y - _means(y, key_valid)
            queries.add(thinned(valid_rows(x, query_valid), limit, index))
            keys.add(thinned(valid_rows(y, key_valid), limit, index))
            values.add(thinned(valid_rows(c, valid), value_limit, index))
            if step.block.rotary:
                distances += _distances(valid, key_valid, stream, longest)
    distances /= distances.sum().clamp_min(1)
    return AttentionMoments(queries.second, keys.second, values.second, distances)


def hidden_moments(loaded: LoadedModel, step: Step) -> HiddenMoments:
    """Statistics of the hidden units of the feed-forward of ``step`` on the step's inputs."""
    last: Any = loaded.model.get_submodule(step.block.projections["wo"])
    products = Products(last.in_features, last.weight.device, precision=WIDE)
    with inputs_of({"h": last}, until="h") as seen:
        for rows, _ in chosen_rows(step, rows_for_units(last.in_features)):
            with suppress(PassEnded):
                step.run(0, rows[None])
            products.add(seen["h"][0])
    return HiddenMoments(products.second)


def _distances(queries: Tensor | None, keys: Tensor | None, stream: Tensor, longest: int) -> Tensor:
    """Number of pairs of a query and a key 0, 1, ... steps apart, either way, ``[longest]``.

    Masks are ``[B, S]``; None: all positions.
    """
    steps = stream.shape[1]
    all_of = torch.ones(stream.shape[:2], dtype=torch.float64)
    q, k = (all_of if mask is None else mask.to(all_of) for mask in (queries, keys))
    pairs = torch.zeros(longest, dtype=torch.float64)
    for apart in range(steps):
        ends, starts = slice(apart, None), slice(0, steps - apart)
        pairs[apart] = (q[:, ends] * k[:, starts]).sum()
        if apart:
            pairs[apart] += (k[:, ends] * q[:, starts]).sum()
    return pairs


class Products:
    """Running means of u u^T, ``second``, and, with ``outputs``, of t u^T, ``cross``."""

    def __init__(
        self,
        width: int,
        device: torch.device,
        outputs: int | None = None,
        precision: torch.dtype = torch.float64,
    ) -> None:
        self.precision = precision
        self.strip = STRIP if width >= STRIPS_FROM else width
        self._second = torch.zeros(width, width, dtype=precision, device=device)
        self.cross = torch.zeros(outputs or 0, width, dtype=precision, device=device)
        self.count = 0

    def add(self, rows: Tensor, targets: Tensor | None = None) -> None:
        """Add ``rows`` ``[N, in]`` to the means, and ``targets`` ``[N, out]`` to ``cross``."""
        if not len(rows):
            return
        self.count += len(rows)
        share = len(rows) / self.count
        rows = rows.to(self.precision)
        weights = {"beta": 1 - share, "alpha": share / len(rows)}
        for start in range(0, len(self._second), self.strip):
            strip = slice(start, start + self.strip)
            self._second[strip, start:].addmm_(rows[:, strip].T, rows[:, start:], **weights)
        if targets is not None:
            self.cross.addmm_(targets.to(self.precision).T, rows, **weights)

    @property
    def second(self) -> Tensor:
        """``[width, width]``; the part left of the diagonal strips is filled in here."""
        for start in range(self.strip, len(self._second), self.strip):
            strip = slice(start, start + self.strip)
            self._second[strip, :start] = self._second[:start, strip].T
        return self._second


@contextmanager
def inputs_of(
    modules: Mapping[str, nn.Module], until: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """The latest input of each module, by name; the call of ``until`` ends the pass."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = args[0].detach()
            if name == until:
                raise PassEnded

        return hook

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def valid_rows(states: Tensor, valid: Tensor | None) -> Tensor:
    """``[N, d]`` of the valid positions of ``[B, S, d]``."""
    return states.flatten(0, -2) if valid is None else states[valid]


def chosen_rows(step: Step, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some positions of the inputs of ``step``, and the reference there, ``[N, d]`` each.

    If positions are independent, only the chosen ones are run, and those of small batches together.
    Without a reference, the inputs take its place.
    """
    limits = row_shares(limit, step.inputs)

    def chosen(index: int, states: Tensor) -> Tensor:
        rows = valid_rows(states, step.valid[index])
        if step.even_rows:
            return rows[even_picks(len(rows), limits[index]).to(rows.device)]
        return thinned(rows, limits[index], index)

    for group in runs_of(limits, step.positions_at_once):
        streams = step.inputs, step.reference or step.inputs
        rows, reference = (torch.cat([chosen(i, states[i]) for i in group]) for states in streams)
        yield rows, reference


def row_shares(
    limit: int, batches: Sequence[Tensor], of: Sequence[Tensor] | None = None
) -> list[int]:
    """Number of the ``limit`` rows for each batch: the same for every series.

    ``of`` are the batches that have rows to give; None: all.
    """
    series = sum(len(batch) for batch in (batches if of is None else of))
    return [limit * len(batch) // series + 1 for batch in batches]


def rows_for_units(units: int) -> int:
    """Rows to keep for the least-squares fit of this many hidden units."""
    return max(_ROWS_PER_HIDDEN_UNIT * units, _FEWEST_ROWS)


def thinned(rows: Tensor, limit: int, batch: int) -> Tensor:
    """At most ``limit`` of the rows ``[N, d]``, scattered over them, other ones in each batch."""
    if len(rows) <= limit:
        return rows
    return rows[scattered_picks(len(rows), limit, seed=batch).to(rows.device)]


def _means(y: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid positions of each sequence, ``[B, 1, d]``."""
    if valid is None:
        return y.mean(1, keepdim=True)
    weight = valid.to(y.dtype)[..., None]
    return (y * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)


def _transposed(valid: Tensor | None) -> Tensor | None:
    """``[S, B]`` of a mask ``[B, S]``."""
    return None if valid is None else valid.T


def _rows_in_groups(step: Step) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys that see another row, ``[S, B]`` each, by batch; none if no batch has any.

    Scores of a row that is alone do nothing, and half of all batches have only such.
    """
    found = {}
    for index in range(len(step.inputs)):
        others = _seen(step, index).sum(-1) > 1
        queries, keys = _transposed(step.valid[index]), _transposed(step.key_valid[index])
        found[index] = (
            others if queries is None else others & queries,
            others if keys is None else others & keys,
        )
    return found if any(queries.any() for queries, _ in found.values()) else {}


def _seen(step: Step, index: int) -> Tensor:
    """Which keys share a query's group and time step, ``[S, B, B]``."""
    mask: Tensor = step.call(index)[1]["attention_mask"]  # additive, [S, 1, B, B]
    return mask[:, 0] > -1


def _group_means(y: Tensor, step: Step, index: int) -> Tensor:
    """Mean over the keys that share a query's group and time step, ``[S, B, d]``."""
    seen = _seen(step, index).to(y.dtype)
    means: Tensor = seen @ y / seen.sum(-1, keepdim=True).clamp_min(1)
    return means


def patch_moments(
    loaded: LoadedModel, batches: Sequence[ForecastBatch], plan: HiddenPlan
) -> HiddenMoments:
    """Statistics of a patch embedding: of its hidden units, then its inputs and a constant 1.

    The residual layer and the bias read the latter and are fitted too.
    """
    module: Any = loaded.model.get_submodule(plan.name)
    products = Products(plan.d_ff + plan.in_features + 1, module.output_layer.weight.device)
    limits = row_shares(rows_for_units(plan.d_ff), [b.context for b in batches])
    inputs: list[Tensor] = []  # Chronos-2 embeds the context and what is known ahead in two calls

    def see(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        x = args[0].detach()
        if plan.name == PATCH_EMBEDDINGS[0]:
            x = x.flatten(0, -2)
            inputs.append(x[adapter_of(loaded.family).attended_patches(x)])
        else:  # of what is known ahead nothing is forecast
            inputs.append((x[asked] if asked.any() else x).flatten(0, -2))

    run = run_embedding if plan.name == PATCH_EMBEDDINGS[0] else run_teacher_forced
    handle = module.register_forward_hook(see)
    try:
        for index, batch in enumerate(batches):
            inputs.clear()
            asked = torch.isfinite(batch.target).any(1)
            run(loaded, batch)
            x = thinned(torch.cat(inputs), limits[index], index)
            with torch.no_grad():
                h = module.act(module.hidden_layer(x))
            products.add(torch.cat([h, x, torch.ones_like(x[:, :1])], dim=1))
    finally:
        handle.remove()
    return HiddenMoments(products.second)
