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
from tscompress.compression.calibration import drawn_continuations, small_batches
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
    attention_moments,
    chosen_rows,
    hidden_moments,
    inputs_of,
    is_group,
    patch_moments,
    rows_for_units,
    valid_rows,
)
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS, settle_fold_plan
from tscompress.compression.layer_walk import Step, walk
from tscompress.compression.recording import (
    LeftOut,
    Recording,
    leave_layers_out_,
    record,
    record_entry,
)
from tscompress.compression.residual_stream import cut_embeddings_, cut_rows_, readers_of_end
from tscompress.data.batch import ForecastBatch
from tscompress.families.registry import adapter_of
from tscompress.io.freed_memory import return_memory, returning_memory
from tscompress.linalg import least_squares
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.plan import HeadPlan, HiddenPlan, Plan

# --------------------------------------------------------------------------------------------------
# The walk
# --------------------------------------------------------------------------------------------------


@returning_memory()
def fold_(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[ForecastBatch],
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
    if adapter_of(loaded.family).draws_samples and config.continuations == "both":
        batches = [*batches, *drawn_continuations(original or loaded, batches)]
    batches = small_batches(loaded, batches)
    return _Fold(loaded, plan, batches, config, on_layer).run(original)


class _Fold:
    """One fold of a model; see :func:`fold_`.

    Attributes
    ----------
    heads, hidden
        Plans by name; heads with the frequencies that were chosen so far.
    width
        Dimensions of the residual stream that stay; None: all.
    ends
        By stack, how its end is read, as :func:`~tscompress.compression.layer_walk.walk` finds it.
    latent
        The projections to and from the latent of all cross-attention, once they are found.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        batches: Sequence[ForecastBatch],
        config: FoldConfig,
        on_layer: Callable[[int, int], None],
    ) -> None:
        self.loaded, self.plan, self.batches, self.config = loaded, plan, batches, config
        self.heads = {head.name: head for head in plan.heads}
        self.hidden = {entry.name: entry for entry in plan.hidden}
        self.width = None if plan.width is None else plan.width.kept
        self.ends: dict[str, Tensor] = {}
        self.latent: tuple[Tensor, Tensor] | None = None
        self.on_layer, self.done = on_layer, 0

    def run(self, original: LoadedModel | None) -> Plan:
        """Fold every layer, from input to output."""
        recording, left_out = self._record(original)
        if self.width is not None:
            cut_embeddings_(self.loaded, self.width)
        first, last = PATCH_EMBEDDINGS
        entry = None
        if first in self.hidden:
            self._fold_patch(first)
            entry = record_entry(self.loaded, self.batches)
        steps = walk(
            self.loaded,
            recording,
            on_compressed=True,
            residual_targets=self.config.refit == "residual",
            encoder_entry=entry,
            left_out=left_out,
            width=self.width,
            ends=self.ends,
            precision=torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32,
        )
        for step in steps:
            if self.width is not None:
                _narrow_(self.loaded.model, step, self.width, self.ends)
            self._fold_step(step)
            return_memory()
            self._count()
        if self.ends:
            stack, fitted = list(self.ends.items())[-1]
            _read_(self.loaded.model, readers_of_end(self.loaded.model, stack), fitted)
        if last in self.hidden:
            self._fold_patch(last)
        return self.plan.model_copy(update={"heads": tuple(self.heads.values())})

    def _record(
        self, original: LoadedModel | None
    ) -> tuple[Recording, dict[str, list[LeftOut]] | None]:
        """Calls of the sublayers that stay, and the sublayers left out if they are fitted for."""
        kept = self.plan.kept_layers
        if original is None or not kept or self.config.refit != "residual":
            return record(self.loaded, self.batches), None
        recording = record(original, self.batches)
        return recording, leave_layers_out_(recording, original, kept)

    def _fold_step(self, step: Step) -> None:
        """Fold the layer of a step and fit its output."""
        name = step.block.name
        if not isinstance(step.block, AttentionBlock):
            _fold_feed_forward_(self.loaded, step, self.hidden[name], self.config)
        elif self.heads[name].latent:
            if self.latent is None:  # keys and values of later layers are still the original's
                self.latent = shared_latent_of(self.loaded, self.plan, step)
            attention = fold_latent_(self.loaded, self.heads[name], *self.latent)
            refit_(step, attention, "o", self.config)
        else:
            self.heads[name] = _fold_heads_(self.loaded, step, self.heads[name], self.config)

    def _fold_patch(self, name: str) -> None:
        """Fold a patch embedding by the moments of the model as it is now."""
        plan = self.hidden[name]
        if plan.kept < plan.d_ff:
            moments = patch_moments(self.loaded, self.batches, plan)
            fold_patch_(self.loaded, plan, moments, self.config)
        self._count()

    def _count(self) -> None:
        self.done += 1
        self.on_layer(self.done, len(self.heads) + len(self.hidden))


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
                products.add(valid_rows(u, valid), valid_rows(missing, valid))
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
