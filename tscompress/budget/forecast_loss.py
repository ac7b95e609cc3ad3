"""The forecast loss of a model, and of the model with a single part changed."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.fold_layers import fill_
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.layers.resize import replace_heads_
from tscompress.plan.layer_plans import HeadPlan

T = TypeVar("T")


#: Sum of the loss over observed target steps, and the number of these.
_Total = tuple[float, int]


def forecast_losses(
    loaded: LoadedModel,
    batch: ForecastBatch,
    original: Tensor | None = None,
    *,
    relative: bool = False,
) -> tuple[_Total, _Total]:
    """Teacher-forced loss of the forecast of ``batch``, summed over observed target steps.

    Negative log-likelihood of the target's tokens, or twice the pinball loss of scaled quantiles;
    see ``forecast_loss`` of :mod:`tscompress.families`.

    Parameters
    ----------
    original
        What cuts are compared with, see ``cut_loss`` there; None: the targets.
    relative
        By ``relative_cut_loss`` there.

    Returns
    -------
    tuple
        The sum, and the number of steps: of series without a covariate, and of those with one.
    """
    return _losses(loaded, batch, run_teacher_forced(loaded, batch), original, relative=relative)


def _losses(
    loaded: LoadedModel,
    batch: ForecastBatch,
    output: Any,
    original: Tensor | None,
    *,
    relative: bool,
) -> tuple[_Total, _Total]:
    """:func:`forecast_losses` of a model that put out ``output`` on ``batch``."""
    family = adapter_of(loaded.family)
    cut_loss = family.relative_cut_loss if relative else family.cut_loss

    def total(windows: ForecastBatch) -> _Total:
        return cut_loss(loaded.forecaster, output, windows, original)

    driven = batch.driven[:, None]
    if not bool(driven.any()):
        return total(batch), (0.0, 0)
    without, with_one = (batch.target.masked_fill(rows, math.nan) for rows in (driven, ~driven))
    return total(replace(batch, target=without)), total(replace(batch, target=with_one))


def forecast_loss(loaded: LoadedModel, batch: ForecastBatch) -> tuple[float, int]:
    """Of all series: the sum of :func:`forecast_losses`, and the number of steps."""
    (without, few), (with_one, more) = forecast_losses(loaded, batch)
    return without + with_one, few + more


class _CachedOutput(nn.Module):
    """Takes the place of an unchanged module and returns its cached output for each batch."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.outputs = outputs
        self.batch = 0

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.outputs[self.batch]


class Forecasts:
    """Losses of the model, computed only from the first changed block on.

    Parameters
    ----------
    original
        With whose forecasts cuts are compared, where they are not with the truth; None: the model
        as it is.
    relative
        See :func:`forecast_losses`.

    Raises
    ------
    DataError
        No window has an observed target after a context that varies.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batches: Sequence[ForecastBatch],
        original: LoadedModel | None = None,
        *,
        relative: bool = False,
    ) -> None:
        self.loaded, self.relative = loaded, relative
        self.batches = batches
        self._start: tuple[str, int] | None = ("", 0)
        self._cached: dict[str, _CachedOutput] = {}
        compared_with = adapter_of(loaded.family).compared_with
        self._originals: list[Tensor | None] = []
        found = []
        for batch in batches:
            output = run_teacher_forced(loaded, batch)
            uncut = output if original is None else run_teacher_forced(original, batch)
            self._originals.append(compared_with(uncut))
            found.append(_losses(loaded, batch, output, self._originals[-1], relative=relative))
        totals = _summed(found)
        count = sum(steps for _, steps in totals)
        if not count:
            raise DataError(
                "no window for measuring the loss has an observed target after a context that "
                "varies; give other series."
            )
        #: Of the model as it is: mean over all observed target steps.
        self.base = sum(total for total, _ in totals) / count
        self._bases = _means(totals)

    def loss(self, of: LoadedModel | None = None) -> float:
        """That of the model as it was, times the mean of its rises, without and with covariates.

        What a covariate explains is a small part of the loss of all windows, and the first that a
        cut can lose unseen.

        Parameters
        ----------
        of
            A cut copy, before any :meth:`start_at`; None: the model as it is now.
        """
        pairs = zip(_means(self._totals(of or self.loaded)), self._bases, strict=True)
        measured = [(mean, base) for mean, base in pairs if base]
        if len(measured) < 2:
            return measured[0][0] if measured else 0.0
        return self.base * sum(mean / base for mean, base in measured) / len(measured)

    def _totals(self, loaded: LoadedModel) -> list[_Total]:
        originals = iter(self._originals)

        def losses(batch: ForecastBatch) -> tuple[_Total, _Total]:
            return forecast_losses(loaded, batch, next(originals), relative=self.relative)

        return _summed(self._each(losses))

    def start_at(self, layer: tuple[str, int] | None) -> None:
        """Cache the outputs before a layer, given by stack and index; None: all layers.

        The model must be the original up to there, and starts only move forward.
        """
        if layer == self._start:
            return
        self._start = layer
        stacks = list(stack_layers(self.loaded.model))
        stack, depth = layer or ("", 0)
        done = stacks[: stacks.index(stack)] if layer else stacks
        cached = {name: self._cached.get(name) or self._cache_output(name) for name in done}
        if depth:
            # Each layer reads the output of the one before, so all may return the last one's.
            last = self._cache_output(layer_name(stack, depth - 1))
            cached |= {layer_name(stack, index): last for index in range(depth)}
        self._cached = cached

    def _cache_output(self, name: str) -> _CachedOutput:
        outputs: list[Any] = []
        module = self.loaded.model.get_submodule(name)
        handle = module.register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            list(self._each(lambda batch: run_teacher_forced(self.loaded, batch)))
        finally:
            handle.remove()
        return _CachedOutput(outputs)

    def _each(self, run: Callable[[ForecastBatch], T]) -> Iterator[T]:
        with ExitStack() as replaced:
            for name, cached in self._cached.items():
                replaced.enter_context(swapped(self.loaded.model, name, cached))
            for index, batch in enumerate(self.batches):
                for cached in self._cached.values():
                    cached.batch = index
                yield run(batch)


def _summed(found: Iterable[tuple[_Total, _Total]]) -> list[_Total]:
    """Of all batches: series without and with covariates."""
    parts = zip(*found, strict=True)
    return [(sum(loss for loss, _ in part), sum(n for _, n in part)) for part in parts]


def _means(totals: Sequence[_Total]) -> list[float]:
    """Loss a step of each total; 0 of one without steps."""
    return [loss / max(1, steps) for loss, steps in totals]


@contextmanager
def swapped(model: nn.Module, name: str, other: nn.Module) -> Iterator[None]:
    """Put ``other`` in the place of the module ``name``, and restore it on leaving."""
    original = model.get_submodule(name)
    try:
        model.set_submodule(name, other)
        yield
    finally:
        model.set_submodule(name, original)


@contextmanager
def with_heads(model: nn.Module, plan: HeadPlan, weights: dict[str, Tensor]) -> Iterator[None]:
    """Give the block ``plan.name`` new head sizes and weights (by role); restore it on leaving."""
    with swapped(model, plan.name, model.get_submodule(plan.name)):
        attention = replace_heads_(model, plan)
        for role, weight in weights.items():
            fill_(getattr(attention, role).weight, weight, plan.name)
        yield


@contextmanager
def with_hidden(model: nn.Module, name: str, fold: Callable[[], object]) -> Iterator[None]:
    """Let ``fold`` change a copy of the module ``name`` in place; restore it on leaving."""
    with swapped(model, name, copy.deepcopy(model.get_submodule(name))):
        fold()
        yield


@contextmanager
def without_layer(model: nn.Module, name: str) -> Iterator[None]:
    """Remove what the sublayers add to the residual stream; restore it on leaving.

    They still run: the first one computes the relative position bias of all layers.
    """

    def skip(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return args[0]
        if isinstance(output, tuple):
            return (args[0], *output[1:])
        return dataclasses.replace(output, hidden_states=args[0])

    with ExitStack() as hooks:
        sublayers: Any = model.get_submodule(name).layer
        for sublayer in sublayers:
            hooks.callback(sublayer.register_forward_hook(skip).remove)
        yield
