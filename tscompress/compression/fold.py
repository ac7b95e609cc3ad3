"""Folding: the same layers with smaller heads and fewer hidden units, and no extra product.

Attention depends on queries and keys only through W_Q^T W_K of each head, and on values only
through W_O W_V. With scaling 1 and an additive bias, both products can be factored again at a
smaller head size; rotary embeddings allow this for values, and for queries and keys pair by pair.
In a feed-forward, hidden units are dropped and the output projection is fitted to the kept ones.
Errors are weighted by calibration data, layer by layer. Keys and values of all cross-attention can
also be folded into one latent of the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import small_batches
from tscompress.compression.complete_fold_plan import complete_fold_plan
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
    patch_moments,
    rows_for_units,
    valid_rows,
)
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS
from tscompress.compression.layer_walk import Step, is_across, walk
from tscompress.compression.recording import (
    DroppedSublayer,
    Recording,
    drop_layers_,
    record,
    record_entry,
)
from tscompress.compression.residual_stream import readers_of_end, slice_embeddings_, slice_rows_
from tscompress.compression.token_embedding import principal_rows, project_rows_
from tscompress.compression.univariate import fold_own_values_, separate_series_
from tscompress.data.batch import CalibrationBatch, batches_of_series
from tscompress.io.memory import return_memory, returning_memory
from tscompress.linalg import least_squares
from tscompress.plan.architecture import AttentionBlock
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan
from tscompress.plan.plan import Plan

#: Bytes of a model's weights, of which those that a step frees are handed back to the system.
LARGE_MODEL = 2**26

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

    Layers that the plan does not name keep their size. With ``plan.width``, ``loaded`` must be
    rotated before (:func:`~tscompress.compression.residual_stream.rotate_`); nothing is then
    written beyond the first ``width`` dimensions of its residual stream.

    Parameters
    ----------
    original
        The model with all layers, including those that ``plan.kept_layers`` drops. The fold is
        fitted to its residual stream. Weights that it shares with ``loaded`` change. None:
        ``loaded`` before folding.

    Returns
    -------
    Plan
        With every layer, and the chosen rotary frequencies.

    Raises
    ------
    PlanError
        The plan does not fit the model.
    FactorizationError
        A decomposition failed or is not finite; the message names the layer.
    """
    plan = complete_fold_plan(loaded.model, loaded.architecture, plan)
    config = config.resolved(loaded)
    if plan.dropped:
        separate_series_(loaded, plan)
    if series := batches_of_series(batches):
        batches = small_batches(loaded, series)
    return _Fold(loaded, plan, batches, config, on_layer).run(original)


class _Fold:
    """One fold of a model; see :func:`fold_`.

    Attributes
    ----------
    heads, hidden
        Plans by name; heads with the frequencies chosen so far.
    narrowed
        Heads by name, as planned at the new residual-stream width.
    width
        New residual-stream width; None: unchanged.
    ends
        Stack to the reconstruction of its output, set by
        :func:`~tscompress.compression.layer_walk.walk`.
    latent
        The projections to and from the latent of all cross-attention, once computed.
    is_large
        Whether freed weights are worth a walk through all of the process's memory, after each step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        batches: Sequence[CalibrationBatch],
        config: FoldConfig,
        on_layer: Callable[[int, int], None],
    ) -> None:
        self.loaded, self.plan, self.batches, self.config = loaded, plan, batches, config
        self.heads = {head.name: head for head in plan.heads}
        self.narrowed = {head.name: head for head in plan.narrowed().heads}
        self.hidden = {entry.name: entry for entry in plan.hidden}
        self.width = None if plan.width is None else plan.width.kept
        self.ends: dict[str, Tensor] = {}
        self.latent: tuple[Tensor, Tensor] | None = None
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        self.is_large = weights >= LARGE_MODEL
        self.on_layer, self.done = on_layer, 0

    def run(self, original: LoadedModel | None) -> Plan:
        """Fold every layer, from input to output."""
        recording, left_out = self._record(original)
        entries = None
        if self.plan.embedding is not None:
            series = batches_of_series(self.batches)
            rows = principal_rows(self.loaded, series)
            project_rows_(self.loaded, rows, self.plan.embedding.rank)
            entries = Recording(entries=record(self.loaded, self.batches).entries)
        if self.width is not None:
            slice_embeddings_(self.loaded, self.width)
        first, last = PATCH_EMBEDDINGS
        if first in self.hidden:
            self._fold_patch(first)
            entries = record_entry(self.loaded, self.batches)
        steps = walk(
            self.loaded,
            recording,
            on_compressed=True,
            residual_targets=self.config.refit == "residual",
            entries=entries,
            left_out=left_out,
            width=self.width,
            ends=self.ends,
            precision=torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32,
        )
        for step in steps:
            if self.width is not None:
                _slice_(self.loaded.model, step, self.width, self.ends)
            self._fold_step(step)
            if self.is_large:
                return_memory()
            self._count()
        if self.ends:
            stack, fitted = list(self.ends.items())[-1]
            _compose_(self.loaded.model, readers_of_end(self.loaded.model, stack), fitted)
        if last in self.hidden:
            self._fold_patch(last)
        return self.plan.model_copy(update={"heads": tuple(self.heads.values())})

    def _record(
        self, original: LoadedModel | None
    ) -> tuple[Recording, dict[str, list[DroppedSublayer]] | None]:
        """Calls of the kept sublayers, and the dropped ones if their output is fitted."""
        kept = self.plan.kept_layers
        if original is None or not kept or self.config.refit != "residual":
            return record(self.loaded, self.batches), None
        recording = record(original, self.batches)
        return recording, drop_layers_(recording, original, kept)

    def _fold_step(self, step: Step) -> None:
        """Fold the layer of a step and fit its output."""
        name = step.block.name
        if not isinstance(step.block, AttentionBlock):
            _fold_feed_forward_(self.loaded, step, self.hidden[name], self.config)
        elif self.heads[name].values_only:
            head = self.narrowed[name]
            values, role = fold_own_values_(self.loaded, step, head, self.config)
            refit_(step, values, role, self.config)
        elif self.heads[name].latent:
            if self.latent is None:  # keys and values of later layers are still the original's
                fitted = self.ends.get("encoder")
                self.latent = shared_latent_of(self.loaded, self.plan, step, fitted)
            attention = fold_latent_(self.loaded, self.heads[name], *self.latent)
            refit_(step, attention, "o", self.config)
        else:
            self.heads[name] = _fold_heads_(self.loaded, step, self.heads[name], self.config)

    def _fold_patch(self, name: str) -> None:
        """Fold a patch embedding with moments of the current model."""
        plan = self.hidden[name]
        if plan.kept < plan.d_ff:
            moments = patch_moments(self.loaded, batches_of_series(self.batches), plan)
            fold_patch_(self.loaded, plan, moments, self.config)
        self._count()

    def _count(self) -> None:
        self.done += 1
        self.on_layer(self.done, len(self.heads) + len(self.hidden))


def _slice_(model: nn.Module, step: Step, width: int, ends: Mapping[str, Tensor]) -> None:
    """Let the sublayer of ``step`` read and write only ``width`` dimensions of the stream.

    The others are reconstructed by least squares from these; see ``Step.reconstruction``.
    """
    *inputs, output = step.block.projections.values()
    slice_rows_(model.get_submodule(output), width)
    if step.reconstruction is None:
        return
    encoded = []
    if isinstance(step.block, AttentionBlock) and step.block.reads_encoder:
        encoded = [step.block.projections[role] for role in "kv"]
    _compose_(model, [name for name in inputs if name not in encoded], step.reconstruction)
    if encoded:
        _compose_(model, encoded, ends["encoder"])


def _compose_(model: nn.Module, names: Sequence[str], fitted: Tensor) -> None:
    """Compose Linear layers with ``fitted`` ``[d, d]``, applied to their input."""
    for name in names:
        weight = model.get_parameter(f"{name}.weight")
        fill_(weight, weight.detach().to(torch.float64) @ fitted, name)


def _fold_heads_(loaded: LoadedModel, step: Step, plan: HeadPlan, config: FoldConfig) -> HeadPlan:
    """Fold an attention block and fit its output; returns its plan with chosen frequencies."""
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
    """Fit the last projection of a sublayer to the step's reference, on its present input."""
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
            # Outputs follow from the projection's inputs, which are far narrower: keep those.
            narrow = 4 * linear.in_features <= linear.out_features
            for index, valid in enumerate(step.valid):
                # Fit the difference, not the whole: no cancellation if nothing changes.
                missing = step.reference[index] - step.run(index)
                u = seen["u"].transpose(0, 1) if is_across(step.block) else seen["u"]  # [B, S, n]
                products.add(valid_rows(u, valid), valid_rows(missing, valid))
                if narrow:
                    reached.append(u)
    still = torch.zeros_like(linear.weight)
    assert config.damping is not None  # resolved
    change = least_squares(products.cross, products.second, still, config.damping)
    if step.width is not None:
        change[step.width :] = 0
    fill_(linear.weight, linear.weight.detach().to(torch.float64) + change, step.block.name)
    if reached:
        with torch.no_grad():
            for index, u in enumerate(reached):
                step.inputs[index] = step.inputs[index] + linear(u.to(linear.weight.dtype))
        step.moved = True
