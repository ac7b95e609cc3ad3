"""Folding: the same layers with smaller heads and fewer hidden units, and no extra product.

Attention sees queries and keys only through W_Q^T W_K of each head, and values only through
W_O W_V. With scaling 1 and an additive bias both products can be factored anew through fewer
numbers; rotary embeddings allow it for values, and for queries and keys pair by pair. Of a
feed-forward, hidden units are dropped and the output is fitted again to those that stay. What is
lost is measured on calibration data, layer by layer. Keys and values of all cross-attention can
also be folded into one latent of the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import (
    CalibrationBatch,
    drawn_continuations,
    small_batches,
)
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_layers import (
    fill_,
    fold_attention_,
    fold_hidden_,
    fold_latent_,
    fold_patch_,
    naming_failures,
    shared_latent_of,
    with_free_frequencies,
)
from tscompress.compression.fold_moments import (
    WIDE,
    Products,
    _rows,
    attention_moments,
    chosen_rows,
    hidden_moments,
    inputs_of,
    is_group,
    patch_moments,
    rows_for_units,
)
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS, settle_fold_plan
from tscompress.compression.layer_walk import Step, walk
from tscompress.compression.recording import (
    leave_layers_out_,
    record,
    record_entry,
)
from tscompress.compression.residual_stream import cut_embeddings_, cut_rows_, readers_of_end
from tscompress.families.registry import adapter_of
from tscompress.io.freed_memory import return_memory, returning_memory
from tscompress.linalg import (
    least_squares,
)
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.plan import HeadPlan, HiddenPlan, Plan

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
                latent = shared_latent_of(loaded, plan, step)
            attention = fold_latent_(loaded, heads[name], *latent)
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
    precision = WIDE if wide else torch.float64
    products = Products(linear.in_features, linear.weight.device, linear.out_features, precision)
    reached = []
    with inputs_of({"u": linear}) as seen, torch.no_grad():
        if step.positionwise:
            for rows, reference in chosen_rows(step, rows_for_units(linear.in_features)):
                missing = reference - step.run(0, rows[None])[0]
                products.add(seen["u"][0], missing)
        else:
            # What reaches the projection gives the outputs too; while far narrower, it is kept.
            narrow = 4 * linear.in_features <= linear.out_features
            for index, valid in enumerate(step.valid):
                # What is still missing, not the whole: nothing then cancels in a fit of no change.
                missing = step.reference[index] - step.run(index)
                u = seen["u"].transpose(0, 1) if is_group(step) else seen["u"]  # [B, S, n]
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


# --------------------------------------------------------------------------------------------------
# One layer
# --------------------------------------------------------------------------------------------------
