"""Folding: the same layers with smaller heads and fewer hidden units, and no extra product.

Attention sees queries and keys only through W_Q^T W_K of each head, and values only through
W_O W_V. With scaling 1 and an additive bias both products can be factored anew through fewer
numbers; rotary embeddings allow it for values, and for queries and keys pair by pair. Of a
feed-forward, hidden units are dropped and the output is fitted again to those that stay. What is
lost is measured on calibration data, layer by layer. Keys and values of all cross-attention can
also be folded into one latent of the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import (
    CalibrationBatch,
    drawn_continuations,
    run_teacher_forced,
)
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS, settle_fold_plan
from tscompress.compression.layer_walk import (
    PassEnded,
    Step,
    leave_layers_out_,
    multiplies_bfloat16,
    record,
    record_entry,
    run_embedding,
    runs_of,
    small_batches,
    walk,
)
from tscompress.compression.residual_stream import cut_embeddings_, cut_rows_, readers_of_end
from tscompress.errors import FactorizationError
from tscompress.families.registry import adapter_of
from tscompress.io.freed_memory import return_memory, returning_memory
from tscompress.layers.resize import replace_heads_, resize_hidden_
from tscompress.linalg import (
    Roots,
    even_picks,
    fold_bilinear,
    fold_rotary,
    fold_values,
    least_squares,
    select_units,
    shared_latent,
    symmetric_roots,
)
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.plan import HeadPlan, HiddenPlan, Plan
from tscompress.removed import without_removed

#: Rows of a moment's matrix for each of its columns, at most. Neighbouring positions say much the
#: same, and the product of all of them would take longer than everything else.
_ROWS_PER_COLUMN = 8
_ENOUGH_POSITIONS = 16384
_ROWS_PER_HIDDEN_UNIT, _FEWEST_ROWS = 4, 8192
#: For products as wide as those of hidden units float32 is as good: what was lost in a fit to 256
#: of 1024 units agreed to three digits. They are most of the arithmetic of folding a large model.
_WIDE = torch.float32
#: Symmetric products of at least so many columns are computed in strips from the diagonal to the
#: right, which saves a third of the time; narrower ones take little of it.
_STRIPS_FROM, _STRIP = 2048, 512
#: Rounds of fitting values of all heads together (:func:`~tscompress.linalg.fold_values`).
_VALUE_SWEEPS = 10


class FoldConfig(BaseModel):
    """How folding uses calibration data. ``eval/NOTES.md`` has what each switch is worth.

    Attributes
    ----------
    refit
        What output projections are fitted to: ``none``, what the ``layer`` put out itself (not with
        a latent), or what brings the ``residual`` stream of the model folded so far back to the
        original's. Where layers are left out, what is before them is fitted to what they put out;
        unless it is ``residual``, the original is what the rest of them make.
    continuations
        What the decoder of Chronos-T5 reads after a context: the ``given`` steps, or ``both`` these
        and, after the shorter half of the contexts, a path that the original draws, as when it
        forecasts.
    frequencies
        Rotary pairs that stay: ``stock``, those that the plan says, by default a plain config's;
        ``free``, as many of those whose scores vary most, for a factored checkpoint. Experimental:
        only Chronos-2 has such pairs, and that was never measured on trained weights.
    precision
        Of feed-forwards while the model is run; by default bfloat16 where the hardware multiplies
        in it. Attention, what the layers add up to, moments and fits are float32 or float64.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    refit: Literal["residual", "layer", "none"] = "residual"
    continuations: Literal["given", "both"] = "both"
    frequencies: Literal["stock", "free"] = "stock"
    precision: Literal["float32", "bfloat16"] | None = None
    damping: float = Field(default=1e-2, gt=0, description="of the fit to the residual stream")

    _removed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "query_moments": (True,),
        "centre_keys": (True,),
        "value_moments": ("attention",),
        "value_sweeps": (_VALUE_SWEEPS,),
        "order": ("compressed",),
        "select": ("greedy",),
    }

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values, cls._removed)

    def resolved(self, loaded: LoadedModel) -> FoldConfig:
        """With the precision of this machine in place of null."""
        if self.precision is not None:
            return self
        native = multiplies_bfloat16(next(loaded.model.parameters()).device)
        return self.model_copy(update={"precision": "bfloat16" if native else "float32"})


@dataclass
class AttentionMoments:
    """What an attention block sees.

    Attributes
    ----------
    queries, keys
        Second moments of what feeds them, ``[d, d]``; keys centred where scores do not see it.
    values
        Second moment of what the heads read, side by side, ``[H k, H k]``.
    distances
        How often two positions are that many steps apart, ``[T]``.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    distances: Tensor


@dataclass
class HiddenMoments:
    """Second moment of hidden units, ``[n, n]``; with more, see :func:`patch_moments`."""

    hidden: Tensor


# --------------------------------------------------------------------------------------------------
# The walk
# --------------------------------------------------------------------------------------------------


@returning_memory()
def fold_(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[CalibrationBatch],
    config: FoldConfig,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    *,
    original: LoadedModel | None = None,
) -> Plan:
    """Fold the planned layers of ``loaded.model`` in place, from input to output.

    Layers that the plan does not name keep their size. Returns the plan with every layer in it,
    and with the rotary frequencies that were chosen.

    Parameters
    ----------
    original
        With the layers too that ``plan.kept_layers`` leaves out: its forecasts are continued, and
        its residual stream is fitted to. Weights that it shares with ``loaded`` change. None: what
        ``loaded`` is now.

    With ``plan.width`` the streams of ``loaded`` have been turned
    (:func:`~tscompress.compression.residual_stream.turn_`); nothing is written beyond the first so
    many numbers then.

    Raises
    ------
    PlanError
        The plan does not fit the model.
    FactorizationError
        A decomposition failed or gave values that are not finite; names the layer.
    """
    plan = settle_fold_plan(loaded.model, loaded.architecture, plan)
    config = config.resolved(loaded)
    heads = {head.name: head for head in plan.heads}
    hidden = {entry.name: entry for entry in plan.hidden}
    total = len(heads) + len(hidden)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_layer(done, total)

    if adapter_of(loaded.family).draws_samples and config.continuations == "both":
        batches = [*batches, *drawn_continuations(original or loaded, batches)]
    batches = small_batches(loaded, batches)
    left_out = None
    if original is not None and plan.kept_layers and config.refit == "residual":
        recording = record(original, batches)
        left_out = leave_layers_out_(recording, original, plan.kept_layers)
    else:
        recording = record(loaded, batches)
    last = hidden.get(PATCH_EMBEDDINGS[1])
    entry = None
    width = None if plan.width is None else plan.width.kept
    if width is not None:
        cut_embeddings_(loaded, width)
    if PATCH_EMBEDDINGS[0] in hidden:
        _fit_patch_(loaded, batches, hidden[PATCH_EMBEDDINGS[0]], config)
        count()
        entry = record_entry(loaded, batches)
    latent: tuple[Tensor, Tensor] | None = None
    ends: dict[str, Tensor] = {}
    steps = walk(
        loaded,
        recording,
        on_compressed=True,
        residual_targets=config.refit == "residual",
        encoder_entry=entry,
        left_out=left_out,
        width=width,
        ends=ends,
        precision=torch.bfloat16 if config.precision == "bfloat16" else torch.float32,
    )
    for step in steps:
        name = step.block.name
        if width is not None:
            _narrow_(loaded.model, step, width, ends)
        if not isinstance(step.block, AttentionBlock):
            _fold_feed_forward_(loaded, step, hidden[name], config)
        elif heads[name].latent:
            if latent is None:  # keys and values of the layers to come are still the original's
                latent = _latent_of(loaded, plan, step)
            attention = _fold_latent_(loaded, heads[name], *latent)
            refit_(step, attention, "o", config)
        else:
            heads[name] = _fold_heads_(loaded, step, heads[name], config)
        return_memory()
        count()
    if ends:
        stack, fitted = list(ends.items())[-1]
        _read_(loaded.model, readers_of_end(loaded.model, stack), fitted)
    if last is not None:
        _fit_patch_(loaded, batches, last, config)
        count()
    return plan.model_copy(update={"heads": tuple(heads.values())})


def _narrow_(model: nn.Module, step: Step, width: int, ends: Mapping[str, Tensor]) -> None:
    """Let the sublayer of ``step`` write and read ``width`` numbers of the stream alone.

    What is not there to be read is guessed from what is, by a linear fit; see ``Step.reading``.
    """
    *inputs, output = step.block.projections.values()
    cut_rows_(model.get_submodule(output), width)
    if step.reading is None:
        return
    encoded = []
    if isinstance(step.block, AttentionBlock) and step.block.reads_encoder:
        encoded = [step.block.projections[role] for role in "kv"]
    _read_(model, [name for name in inputs if name not in encoded], step.reading)
    if encoded:
        _read_(model, encoded, ends["encoder"])


def _read_(model: nn.Module, names: Sequence[str], fitted: Tensor) -> None:
    """Let Linear layers read what ``fitted`` ``[d, d]`` makes of their input."""
    for name in names:
        weight = model.get_parameter(f"{name}.weight")
        fill_(weight, weight.detach().to(torch.float64) @ fitted, name)


def _fold_heads_(loaded: LoadedModel, step: Step, plan: HeadPlan, config: FoldConfig) -> HeadPlan:
    """Fold an attention block and fit its output; its plan, with the frequencies chosen."""
    assert isinstance(step.block, AttentionBlock)
    attention = loaded.model.get_submodule(plan.name)
    if plan.parameters < plan.dense_parameters:
        moments = attention_moments(loaded, step)
        if config.frequencies == "free":
            with naming_failures(plan.name):
                plan = with_free_frequencies(attention, plan, moments)
        attention = fold_attention_(loaded, step.block, plan, moments, config)
        del moments
    refit_(step, attention, "o", config)
    return plan


def _fold_feed_forward_(
    loaded: LoadedModel, step: Step, plan: HiddenPlan, config: FoldConfig
) -> None:
    """Fold a feed-forward and fit its output."""
    feed_forward = loaded.model.get_submodule(plan.name)
    if plan.kept < plan.d_ff:
        feed_forward = fold_hidden_(loaded, plan, hidden_moments(loaded, step), config)
    refit_(step, feed_forward, "wo", config)


def _fit_patch_(
    loaded: LoadedModel,
    batches: Sequence[CalibrationBatch],
    plan: HiddenPlan,
    config: FoldConfig,
) -> None:
    """Fold a patch embedding by the moments of the model as it is now."""
    if plan.kept < plan.d_ff:
        fold_patch_(loaded, plan, patch_moments(loaded, batches, plan), config)


def refit_(step: Step, module: nn.Module, role: str, config: FoldConfig) -> None:
    """Fit the last projection of a sublayer to the step's reference, on what now reaches it."""
    if step.reference is None:
        return
    linear: Any = getattr(module, role)
    wide = step.positionwise or linear.in_features > linear.out_features
    precision = _WIDE if wide else torch.float64
    products = _Products(linear.in_features, linear.weight.device, linear.out_features, precision)
    reached = []
    with _inputs_of({"u": linear}) as seen, torch.no_grad():
        if step.positionwise:
            for rows, reference in _chosen_rows(step, _rows_for_units(linear.in_features)):
                missing = reference - step.run(0, rows[None])[0]
                products.add(seen["u"][0], missing)
        else:
            # What reaches the projection gives the outputs too; while far narrower, it is kept.
            narrow = 4 * linear.in_features <= linear.out_features
            for index, valid in enumerate(step.valid):
                # What is still missing, not the whole: nothing then cancels in a fit of no change.
                missing = step.reference[index] - step.run(index)
                u = seen["u"].transpose(0, 1) if _is_group(step) else seen["u"]  # [B, S, n]
                products.add(_rows(u, valid), _rows(missing, valid))
                if narrow:
                    reached.append(u)
    still = torch.zeros_like(linear.weight)
    change = least_squares(products.cross, products.second, still, config.damping)
    if step.width is not None:
        change[step.width :] = 0
    fill_(linear.weight, linear.weight.detach().to(torch.float64) + change, step.block.name)
    if reached:
        with torch.no_grad():
            for index, u in enumerate(reached):
                step.inputs[index] = step.inputs[index] + linear(u.to(linear.weight.dtype))
        step.moved = True


# --------------------------------------------------------------------------------------------------
# Moments
# --------------------------------------------------------------------------------------------------


def attention_moments(loaded: LoadedModel, step: Step) -> AttentionMoments:
    """What the attention block of ``step`` sees on the step's inputs."""
    assert isinstance(step.block, AttentionBlock)
    linears: dict[str, Any] = {
        role: loaded.model.get_submodule(step.block.projections[role]) for role in "qkvo"
    }
    device = linears["q"].weight.device
    queries = _Products(linears["q"].in_features, device)
    keys = _Products(linears["k"].in_features, device)
    values = _Products(linears["o"].in_features, device)
    # A constant added to all keys of a sequence shifts all scores of a query alike, unless they
    # turn with the position.
    centre = not step.block.rotary
    longest = max(stream.shape[1] for stream in step.inputs)
    distances = torch.zeros(longest, dtype=torch.float64)
    # Of many positions every second or third batch says enough. Not so for group attention: only
    # every second batch has groups at all.
    positions = sum(stream.shape[:2].numel() for stream in step.inputs)
    stride = 1 if _is_group(step) else max(1, positions // _ENOUGH_POSITIONS)
    chosen = range(0, len(step.inputs), stride)
    rows = _ROWS_PER_COLUMN * linears["q"].in_features
    limits = _shares(rows, [step.inputs[index] for index in chosen])
    reads = {"x": linears["q"], "y": linears["k"], "c": linears["o"]}
    with _inputs_of(reads, until="c") as seen:
        for index, limit in zip(chosen, limits, strict=True):
            stream = step.inputs[index]
            with suppress(PassEnded):
                step.run(index)
            x, y, c = seen["x"], seen["y"], seen["c"]  # [B, S, d]; group attention: [S, B, d]
            valid, key_valid = step.valid[index], step.key_valid[index]
            if _is_group(step):
                valid = key_valid = None if valid is None else valid.T
                y = y - _group_means(y, step, index) if centre else y
            elif centre:
                y = y - _means(y, key_valid)
            queries.add(_thin(_rows(x, valid), limit))
            keys.add(_thin(_rows(y, key_valid), limit))
            values.add(_thin(_rows(c, valid), limit))
            distances += _distances(valid, stream, longest)
    shares = distances / distances.sum()
    return AttentionMoments(queries.second, keys.second, values.second, shares)


def hidden_moments(loaded: LoadedModel, step: Step) -> HiddenMoments:
    """What the hidden units of the feed-forward of ``step`` say on the step's inputs."""
    last: Any = loaded.model.get_submodule(step.block.projections["wo"])
    products = _Products(last.in_features, last.weight.device, precision=_WIDE)
    with _inputs_of({"h": last}, until="h") as seen:
        for rows, _ in _chosen_rows(step, _rows_for_units(last.in_features)):
            with suppress(PassEnded):
                step.run(0, rows[None])
            products.add(seen["h"][0])
    return HiddenMoments(products.second)


def _distances(valid: Tensor | None, stream: Tensor, longest: int) -> Tensor:
    """How many pairs of valid positions are 0, 1, ... steps apart, ``[longest]``."""
    lengths = torch.full((len(stream),), stream.shape[1])
    if valid is not None and valid.shape == stream.shape[:2]:
        lengths = valid.sum(1).cpu()
    apart = torch.arange(longest, dtype=torch.float64)
    return (lengths[:, None] - apart).clamp_min(0).sum(0)


class _Products:
    """Running means of u u^T, ``second``, and, with ``outputs``, of t u^T, ``cross``."""

    def __init__(
        self,
        width: int,
        device: torch.device,
        outputs: int | None = None,
        precision: torch.dtype = torch.float64,
    ) -> None:
        self.precision = precision
        self.strip = _STRIP if width >= _STRIPS_FROM else width
        self._second = torch.zeros(width, width, dtype=precision, device=device)
        self.cross = torch.zeros(outputs or 0, width, dtype=precision, device=device)
        self.count = 0

    def add(self, rows: Tensor, targets: Tensor | None = None) -> None:
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
        """``[width, width]``, whose part left of the diagonal strips is filled in here."""
        for start in range(self.strip, len(self._second), self.strip):
            strip = slice(start, start + self.strip)
            self._second[strip, :start] = self._second[:start, strip].T
        return self._second


@contextmanager
def _inputs_of(
    modules: Mapping[str, nn.Module], until: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """The latest input of each module, by name; that of ``until`` ends the pass."""
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


def _rows(states: Tensor, valid: Tensor | None) -> Tensor:
    """``[N, d]`` of the valid positions of ``[B, S, d]``."""
    return states.flatten(0, -2) if valid is None else states[valid]


def _chosen_rows(step: Step, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of the positions that reach ``step``, and the reference there, ``[N, d]`` each.

    Where positions do not see each other, only those that count need to be run, and those of small
    batches side by side. Without a reference it is what reaches the step once more.
    """
    limits = _shares(limit, step.inputs)

    def chosen(index: int, states: Tensor) -> Tensor:
        return _thin(_rows(states, step.valid[index]), limits[index])

    for group in runs_of(limits, step.positions_at_once):
        streams = step.inputs, step.reference or step.inputs
        rows, reference = (torch.cat([chosen(i, states[i]) for i in group]) for states in streams)
        yield rows, reference


def _shares(limit: int, batches: Sequence[Tensor]) -> list[int]:
    """How many of ``limit`` rows each batch may give: the same for every series."""
    series = sum(len(batch) for batch in batches)
    return [limit * len(batch) // series + 1 for batch in batches]


def _rows_for_units(units: int) -> int:
    return max(_ROWS_PER_HIDDEN_UNIT * units, _FEWEST_ROWS)


def _thin(rows: Tensor, limit: int) -> Tensor:
    return rows if len(rows) <= limit else rows[even_picks(len(rows), limit).to(rows.device)]


def _means(y: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid positions of each sequence, ``[B, 1, d]``."""
    if valid is None:
        return y.mean(1, keepdim=True)
    weight = valid.to(y.dtype)[..., None]
    return (y * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)


def _is_group(step: Step) -> bool:
    return isinstance(step.block, AttentionBlock) and step.block.across_series


def _group_means(y: Tensor, step: Step, index: int) -> Tensor:
    """Mean over the keys that share a query's group and time step, ``[S, B, d]``."""
    mask: Tensor = step.call(index)[1]["attention_mask"]  # additive, [S, 1, B, B]
    seen = (mask[:, 0] > -1).to(y.dtype)
    means: Tensor = seen @ y / seen.sum(-1, keepdim=True).clamp_min(1)
    return means


# --------------------------------------------------------------------------------------------------
# One layer
# --------------------------------------------------------------------------------------------------


def fold_attention_(
    loaded: LoadedModel,
    block: AttentionBlock,
    plan: HeadPlan,
    moments: AttentionMoments,
    config: FoldConfig,
) -> nn.Module:
    """Put smaller heads where ``block`` is."""
    old: Any = loaded.model.get_submodule(block.name)
    with naming_failures(block.name):
        weights = folded_heads(old, plan, moments, config)
    new: Any = replace_heads_(loaded.model, plan)
    for role, weight in weights.items():
        fill_(getattr(new, role).weight, weight, block.name)
    return new  # type: ignore[no-any-return]


def _latent_of(loaded: LoadedModel, plan: Plan, step: Step) -> tuple[Tensor, Tensor]:
    """A ``[r, d]`` and B ``[d, r]``: the encoder's output y is about B z with z = A y."""
    assert step.encoded is not None
    assert plan.latent is not None
    readers: list[Any] = [loaded.model.get_submodule(h.name) for h in plan.heads if h.latent]
    weights = [getattr(reader, role).weight.detach() for reader in readers for role in "kv"]
    products = _Products(weights[0].shape[1], weights[0].device)
    limits = _shares(_ROWS_PER_COLUMN * weights[0].shape[1], step.encoded)
    for states, valid, limit in zip(step.encoded, step.key_valid, limits, strict=True):
        products.add(_thin(_rows(states, valid), limit))
    read = torch.zeros_like(products.second)
    for weight in weights:
        wide = weight.to(torch.float64)
        read += wide.T @ wide
    with naming_failures("the latent of all cross-attention"):
        return shared_latent(read, Roots.of(products.second), plan.latent)


def _fold_latent_(loaded: LoadedModel, plan: HeadPlan, down: Tensor, up: Tensor) -> nn.Module:
    """Let the heads of a cross-attention read z = ``down`` y, with y about ``up`` z."""
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
    """Weights of q, k, v, o with the planned head sizes, float64."""
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
            W["o"], moments.values, plan.num_heads, plan.vo_size, _VALUE_SWEEPS, refit=fits
        )
        weights["v"] = torch.cat([P[h] @ W["v"][head] for h, head in enumerate(heads)])
        weights["o"] = out
    return weights


def frequency_groups(attention: Any, plan: HeadPlan, distances: Tensor) -> list[dict[int, float]]:
    """Which rotary pairs each kept frequency stands for, and with what weight.

    A dropped pair goes to the kept frequency that it moves with most over the distances that
    occur: the mean of cos((w - w') t), which is near 1 for slow ones and near 0 for fast ones.
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
    """The plan with the rotary pairs that tell most, as many as it has, if it has any."""
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
    """Indices of the units that stay, ``[count]``, and their output weights ``[m, count]``."""
    W, C = W.detach().to(torch.float64), moments.hidden
    if count == W.shape[1]:
        return torch.arange(count, device=W.device), W
    kept = select_units(W, C, count)
    out = W[:, kept]
    if config.refit != "none":
        second = C[:, kept].to(torch.float64)
        cross, second = W @ second, second[kept]
        del W  # in float64 larger than the layer, and a solver needs room
        out = least_squares(cross, second, out)
    return kept, out


def patch_moments(
    loaded: LoadedModel, batches: Sequence[CalibrationBatch], plan: HiddenPlan
) -> HiddenMoments:
    """What the hidden units of a patch embedding say, and after them its inputs and a constant 1.

    The residual layer and the bias read the latter, and are fitted along.
    """
    module: Any = loaded.model.get_submodule(plan.name)
    products = _Products(plan.d_ff + plan.in_features + 1, module.output_layer.weight.device)
    limits = _shares(_rows_for_units(plan.d_ff), [b.context for b in batches])
    limit = 0

    def see(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        x = args[0].detach().flatten(0, -2)
        if plan.name == PATCH_EMBEDDINGS[0]:
            x = x[adapter_of(loaded.family).attended_patches(x)]
        x = _thin(x, limit)
        with torch.no_grad():
            h = module.act(module.hidden_layer(x))
        products.add(torch.cat([h, x, torch.ones_like(x[:, :1])], dim=1))

    run = run_embedding if plan.name == PATCH_EMBEDDINGS[0] else run_teacher_forced
    handle = module.register_forward_hook(see)
    try:
        for index, batch in enumerate(batches):
            limit = limits[index]
            run(loaded, batch)
    finally:
        handle.remove()
    return HiddenMoments(products.second)


def fold_patch_(
    loaded: LoadedModel, plan: HiddenPlan, moments: HiddenMoments, config: FoldConfig
) -> None:
    """Keep the planned number of hidden units of a patch embedding; its residual layer helps."""
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
    """Units that stay, and weights of output and residual layer, and the output's bias."""
    W = torch.cat(
        [
            module.output_layer.weight.detach(),
            module.residual_layer.weight.detach(),
            module.output_layer.bias.detach()[:, None],
        ],
        dim=1,
    ).to(torch.float64)
    units, always = slice(0, plan.d_ff), torch.arange(plan.d_ff, len(C), device=C.device)
    # Units are chosen for what the inputs, which stay, do not tell already.
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
    """A decomposition that fails in here says which layer it was for."""
    try:
        yield
    except LinAlgError as error:
        raise FactorizationError(f"a decomposition of {name} failed: {error}.") from error


def fill_(parameter: Tensor, value: Tensor, name: str) -> None:
    """Write a weight of layer ``name``; FactorizationError if it is not finite."""
    if not bool(torch.isfinite(value).all()):
        raise FactorizationError(f"folding {name} gave weights that are not finite.")
    with torch.no_grad():
        parameter.copy_(value)
