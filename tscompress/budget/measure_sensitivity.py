"""Sensitivity: the rise of the forecast loss when one part of a model is made smaller.

The loss is measured, not weight error: every attention block's queries and keys, its values, every
feed-forward and every layer is compressed alone, and the whole model forecasts held-out windows. It
is the loss at the truth, or for Chronos-2 and Chronos-T5 at the forecasts of the original.
A pass runs the model hundreds of times, so its result is saved after each block, in a file named
by a hash of everything that it depends on, and an interrupted pass resumes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from tscompress.budget.forecast_loss import (
    Forecasts,
    swapped,
    with_heads,
    with_hidden,
    without_layer,
)
from tscompress.budget.sensitivity import STREAM, Part, PartKind, Sensitivity
from tscompress.budget.sensitivity_cache import SensitivityStore, WantedPart, content_key
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.fold import refit_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_layers import (
    fold_hidden_,
    fold_patch_,
    folded_heads,
    naming_failures,
    with_free_frequencies,
)
from tscompress.compression.fold_moments import attention_moments, hidden_moments, patch_moments
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS, fold_plan
from tscompress.compression.layer_walk import Step, advance_, walk
from tscompress.compression.recording import Recording, blocks_of, record
from tscompress.compression.residual_stream import principal_directions, projected
from tscompress.compression.token_embedding import principal_rows, projected_rows
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError, FactorizationError, PlanError, UsageError
from tscompress.families.stacks import layer_name, sublayers
from tscompress.families.t5_stack import token_table
from tscompress.io.files import cache_directory
from tscompress.plan.layer_plans import TOKENS, HeadPlan, HiddenPlan, stock_frequencies

HIDDEN_RATIOS = (0.75, 0.5, 0.25, 0.125)
EMBEDDING_RATIOS = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125)
DEFAULT_WIDTHS = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)


# --------------------------------------------------------------------------------------------------
# The pass
# --------------------------------------------------------------------------------------------------


def measure_sensitivity(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    *,
    holdout: Sequence[ForecastBatch] | None = None,
    original: LoadedModel | None = None,
    fold: FoldConfig,
    head_sizes: Sequence[int] | None = None,
    hidden_ratios: Sequence[float] = HIDDEN_RATIOS,
    width_ratios: Sequence[float] = DEFAULT_WIDTHS,
    embedding_ratios: Sequence[float] = EMBEDDING_RATIOS,
    layers: bool | Sequence[str] = True,
    cache: Path | Literal["default"] | None = "default",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivity:
    """Measure the forecast loss with each part at each size, all others as they are.

    The model is unchanged to the bit when this returns or raises.

    Parameters
    ----------
    batches
        For the statistics of folding.
    holdout
        For the loss; None: ``batches``.
    original
        Before layers, or width, were cut of ``loaded``; None: nothing was.
    fold
        How layers are folded. Each is fitted to its original output (unless ``refit`` is
        ``none``), on ``batches`` and in float32: ``precision`` is ignored.
    head_sizes
        Sizes to try below the original; None: halves and three quarters of halves down to 1.
        Queries and keys with rotary embedding are tried only at sizes that a stock config allows,
        or with free ``frequencies`` at even ones.
    hidden_ratios
        Hidden units to try, as shares of the original's, in (0, 1).
    width_ratios
        Residual-stream widths to try, as shares of ``d_model``, in (0, 1).
    embedding_ratios
        Ranks of the token embedding of a Chronos-T5 to try, likewise; those at which factors have
        fewer weights.
    layers
        Also measure dropping whole layers, of all or of some stacks. A feed-forward before a
        dropped layer is fitted to the original's residual stream after both.
    cache
        Directory of results; ``default``: ``$TSCOMPRESS_CACHE``, or ``tscompress`` in
        ``$XDG_CACHE_HOME`` or ``~/.cache``; None: no cache.
    on_progress
        Called with the number of measurements done and in all.

    Raises
    ------
    PlanError
        A size or ratio is impossible, or the model is compressed already.
    DataError
        There is no window, or none has an observed target.
    FactorizationError
        A decomposition or a loss is not finite; the message names the layer.
    UnsupportedModelError
        The model does not forecast.
    """
    holdout = batches if holdout is None else holdout
    _check_measurable(loaded, batches, holdout)
    refit: Literal["layer", "none"] = "none" if fold.refit == "none" else "layer"
    changes = {"refit": refit, "precision": "float32"}
    config = fold.resolved(loaded).model_copy(update=changes)
    free = config.frequencies == "free"
    wanted = _wanted_parts(
        loaded,
        head_sizes,
        hidden_ratios,
        width_ratios,
        embedding_ratios,
        layers,
        free_frequencies=free,
    )
    store = None
    directory = _default_cache() if cache == "default" else cache
    if directory is not None:
        key = content_key(loaded, batches, holdout, config, wanted, original=original)
        store = SensitivityStore(Path(directory), key)
    result = store.read(wanted) if store else None
    forecasts = None
    if result is None:
        forecasts = Forecasts(loaded, holdout, original)
        result = _nothing_measured(loaded, batches, holdout, config, forecasts)
        if store is not None:
            store.write(result, complete=False)
    measured = {(part.name, part.kind) for part in result.parts}
    remaining = {(p.name, p.kind): p for p in wanted if (p.name, p.kind) not in measured}
    if not remaining:
        total = sum(len(part.sizes) for part in wanted)
        on_progress(total, total)
        return result
    forecasts = forecasts or Forecasts(loaded, holdout, original)
    measuring = _Pass(loaded, batches, config, forecasts, remaining, result, store, on_progress)
    return measuring.run()


def unmeasured(loaded: LoadedModel, fold: FoldConfig, *, layers: bool) -> Sensitivity:
    """The same parts and sizes, all without loss: what a search can reach is known by that."""
    wanted = _wanted_parts(
        loaded, None, HIDDEN_RATIOS, DEFAULT_WIDTHS, EMBEDDING_RATIOS, layers,
        free_frequencies=fold.frequencies == "free",
    )  # fmt: skip
    parts = tuple(Part(**part._asdict(), losses=(0.0,) * len(part.sizes)) for part in wanted)
    settings = {"fold": fold.model_dump(mode="json")}
    return Sensitivity(family=loaded.family, base_loss=1.0, parts=parts, settings=settings)


def _default_cache() -> Path | None:
    """None where there is no home directory: what is measured is then not kept."""
    try:
        return cache_directory()
    except UsageError:
        return None


def _check_measurable(
    loaded: LoadedModel, batches: Sequence[ForecastBatch], holdout: Sequence[ForecastBatch]
) -> None:
    if not batches or not holdout:
        raise DataError("a sensitivity pass needs at least one batch for folding and for the loss.")
    if loaded.plan is not None:
        raise PlanError(f"{loaded.name!r} is compressed already; measure the original checkpoint.")
    loaded.forecaster  # noqa: B018  raises for families that do not forecast


def _nothing_measured(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    holdout: Sequence[ForecastBatch],
    config: FoldConfig,
    forecasts: Forecasts,
) -> Sensitivity:
    """A sensitivity that has only the loss of the model as it is."""
    base_loss = forecasts.base
    if not math.isfinite(base_loss):
        raise DataError(f"the model's own forecast loss is {base_loss}; check the windows.")
    return Sensitivity(
        family=loaded.family,
        base_loss=base_loss,
        parts=(),
        settings={
            "fold": config.model_dump(mode="json"),
            "calibration_windows": sum(len(batch.context) for batch in batches),
            "holdout_windows": sum(len(batch.context) for batch in holdout),
        },
    )


def _wanted_parts(
    loaded: LoadedModel,
    head_sizes: Sequence[int] | None,
    hidden_ratios: Sequence[float],
    width_ratios: Sequence[float],
    embedding_ratios: Sequence[float],
    layers: bool | Sequence[str],
    *,
    free_frequencies: bool,
) -> list[WantedPart]:
    if any(size < 1 for size in head_sizes or ()):
        raise PlanError(f"head sizes must be at least 1, not {min(head_sizes or ())}.")
    shares = {"hidden": hidden_ratios, "width": width_ratios, "embedding": embedding_ratios}
    for label, ratio in ((label, ratio) for label, ratios in shares.items() for ratio in ratios):
        if not 0 < ratio < 1:
            raise PlanError(f"{label} ratios must lie between 0 and 1, not {ratio}.")
    architecture = loaded.architecture
    whole = fold_plan(loaded.model, architecture)
    width = whole.heads[0].d_model
    widths = _below(width, [max(1, round(r * width)) for r in width_ratios])
    wanted: list[WantedPart] = [WantedPart(STREAM, "width", width, widths)] if widths else []
    for head in whole.heads:
        size = head.head_size
        tried = _below(size, default_head_sizes(size) if head_sizes is None else head_sizes)
        tried = tuple(one for one in tried if one <= head.d_model)
        rotated = tried
        if head.frequencies is not None:
            kept = (lambda s: s % 2 == 0) if free_frequencies else partial(stock_frequencies, size)
            rotated = tuple(s for s in tried if kept(s))
        wanted += [
            WantedPart(head.name, "qk", size, rotated),
            WantedPart(head.name, "vo", size, tried),
        ]
    for hidden in whole.hidden:
        units = _below(hidden.d_ff, [max(1, round(r * hidden.d_ff)) for r in hidden_ratios])
        wanted.append(WantedPart(hidden.name, "hidden", hidden.d_ff, units))
    if embedding_ratios and (table := token_table(loaded.model)) is not None:
        ranks = _below(width, [max(1, round(r * width)) for r in embedding_ratios])
        smaller = tuple(rank for rank in ranks if rank < table.break_even)
        wanted += [WantedPart(TOKENS, "embedding", width, smaller)] if smaller else []
    if layers:
        names = dict.fromkeys(
            layer_name(block.stack, block.layer)
            for block in architecture.attention
            if layers is True or block.stack in layers
        )
        wanted += [WantedPart(name, "layer", 1, (0,)) for name in names]
    return wanted


def default_head_sizes(size: int) -> tuple[int, ...]:
    """Halves of ``size`` down to 1, and three quarters of those from 8 on: 64 -> 48, 32, 24, ..."""
    halves = [size >> shift for shift in range(size.bit_length())]
    return _below(size, [*halves, *(3 * half // 4 for half in halves if half >= 8)])


def _below(size: int, sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({s for s in sizes if s < size}, reverse=True))


@dataclass
class _Pass:
    """One walk through the model. Parts that ``result`` has already are not measured again."""

    loaded: LoadedModel
    batches: Sequence[ForecastBatch]
    config: FoldConfig
    forecasts: Forecasts
    open: dict[tuple[str, PartKind], WantedPart]
    result: Sensitivity
    store: SensitivityStore | None
    on_progress: Callable[[int, int], None]

    def run(self) -> Sensitivity:
        self.done = sum(len(part.sizes) for part in self.result.parts)
        self.total = self.done + sum(len(part.sizes) for part in self.open.values())
        self.on_progress(self.done, self.total)
        self.model = self.loaded.model
        plan = fold_plan(self.model, self.loaded.architecture)
        self.heads = {head.name: head for head in plan.heads}
        self.hidden = {hidden.name: hidden for hidden in plan.hidden}
        for part in [part for part in self.open.values() if not part.sizes]:
            self._measure(part.name, part.kind, lambda _: nullcontext())  # no sizes to try
        self._width()
        self._tokens()
        self._patch(PATCH_EMBEDDINGS[0])
        recording = record(self.loaded, self.batches)
        for step in walk(self.loaded, recording, on_compressed=False, residual_targets=False):
            name, stack, depth = step.block.name, step.block.stack, step.block.layer
            layer, following = layer_name(stack, depth), layer_name(stack, depth + 1)
            here: list[tuple[str, PartKind]] = [(name, "qk"), (name, "vo"), (name, "hidden")]
            if self.open.keys().isdisjoint([(layer, "layer"), (following, "layer"), *here]):
                continue
            self.forecasts.start_at((stack, depth))
            self._layer(layer)
            if name in self.heads:
                self._attention(step, self.heads[name])
            else:
                self._feed_forward(step, self.hidden[name])
                self._layer_after(step, following, recording)
        if (PATCH_EMBEDDINGS[1], "hidden") in self.open:
            self.forecasts.start_at(None)
            self._patch(PATCH_EMBEDDINGS[1])
        return self.result

    def _width(self) -> None:
        if (STREAM, "width") in self.open:
            bases = principal_directions(self.loaded, self.batches)
            self._measure(STREAM, "width", lambda size: projected(self.loaded, bases, size))

    def _tokens(self) -> None:
        if (TOKENS, "embedding") in self.open:
            rows = principal_rows(self.loaded, self.batches)
            self._measure(TOKENS, "embedding", lambda rank: projected_rows(self.loaded, rows, rank))

    def _layer(self, name: str) -> None:
        """The first layer of a stack: no feed-forward before it can be fitted."""
        self._measure(name, "layer", lambda _: without_layer(self.model, name))

    def _is_followed(self, layer: str) -> bool:
        *_, last = sublayers(self.model)
        return layer != layer_name(last.stack, last.layer)

    def _layer_after(self, step: Step, name: str, recording: Recording) -> None:
        """A layer after the feed-forward of ``step``, which is fitted to the output of both."""
        if (name, "layer") not in self.open:
            return
        block = step.block.name
        reference = list(step.inputs)
        advance_(reference, step)
        blocks = blocks_of(self.loaded)
        for sublayer in sublayers(self.model):
            if layer_name(sublayer.stack, sublayer.layer) == name:
                other = dataclasses.replace(
                    step,
                    block=blocks[sublayer.name],
                    module=sublayer.module,
                    arguments=recording.arguments[sublayer.name],
                )
                advance_(reference, other)
        fitted = dataclasses.replace(step, reference=reference)
        if recording.forecast and not self._is_followed(name):  # it becomes the last one
            fitted.valid = [*recording.forecast]

        @contextmanager
        def left_out(_: int) -> Iterator[None]:
            with (
                swapped(self.model, block, copy.deepcopy(self.model.get_submodule(block))),
                without_layer(self.model, name),
            ):
                if self.config.refit != "none":
                    refit_(fitted, self.model.get_submodule(block), "wo", self.config)
                yield

        self._measure(name, "layer", left_out)

    def _attention(self, step: Step, whole: HeadPlan) -> None:
        if self.open.keys().isdisjoint([(whole.name, "qk"), (whole.name, "vo")]):
            return
        attention = self.model.get_submodule(whole.name)
        with naming_failures(whole.name):
            moments = attention_moments(self.loaded, step)
        leading: dict[str, Tensor] = {}

        def smaller_scores(size: int) -> AbstractContextManager[None]:
            nonlocal leading
            plan = _with_qk(whole, size)
            with naming_failures(whole.name):
                if self.config.frequencies == "free":
                    plan = with_free_frequencies(attention, plan, moments)
                if plan.frequencies is not None or not leading:
                    leading = folded_heads(attention, plan, moments, self.config)
            # Components are in order of importance: the largest size has all others.
            weights = {
                role: weight.reshape(plan.num_heads, -1, plan.d_model)[:, :size].flatten(0, 1)
                if role in ("q", "k")
                else weight
                for role, weight in leading.items()
            }
            return with_heads(self.model, plan, weights)

        def smaller_values(size: int) -> AbstractContextManager[None]:
            plan = whole.model_copy(update={"vo_size": size})
            with naming_failures(whole.name):
                weights = folded_heads(attention, plan, moments, self.config)
            return with_heads(self.model, plan, weights)

        self._measure(whole.name, "qk", smaller_scores)
        self._measure(whole.name, "vo", smaller_values)

    def _feed_forward(self, step: Step, whole: HiddenPlan) -> None:
        if (whole.name, "hidden") not in self.open:
            return
        moments = hidden_moments(self.loaded, step)
        self._units(whole, lambda plan: fold_hidden_(self.loaded, plan, moments, self.config))

    def _patch(self, name: str) -> None:
        if (name, "hidden") in self.open:
            moments = patch_moments(self.loaded, self.batches, self.hidden[name])
            fold = partial(fold_patch_, self.loaded, moments=moments, config=self.config)
            self._units(self.hidden[name], lambda plan: fold(plan=plan))

    def _units(self, whole: HiddenPlan, fold: Callable[[HiddenPlan], object]) -> None:
        def fewer(size: int) -> AbstractContextManager[None]:
            plan = whole.model_copy(update={"kept": size})
            return with_hidden(self.model, whole.name, lambda: fold(plan))

        self._measure(whole.name, "hidden", fewer)

    def _measure(
        self, name: str, kind: PartKind, changed: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        part = self.open.pop((name, kind), None)
        if part is None:
            return
        losses = []
        for size in part.sizes:
            with changed(size):
                loss = self.forecasts.loss()
            if not math.isfinite(loss):
                raise FactorizationError(f"{kind} of {name} at {size} gives a loss of {loss}.")
            losses.append(loss - self.result.base_loss)
            self.done += 1
            self.on_progress(self.done, self.total)
        measured = Part(**part._asdict(), losses=tuple(losses))
        self.result = self.result.model_copy(update={"parts": (*self.result.parts, measured)})
        if self.store is not None:
            self.store.write(self.result, complete=not self.open)


def _with_qk(whole: HeadPlan, size: int) -> HeadPlan:
    kept = None
    if whole.frequencies is not None:
        kept = stock_frequencies(whole.head_size, size) or tuple(range(size // 2))
    return whole.model_copy(update={"qk_size": size, "frequencies": kept})
