"""The forecast loss of a model, and of one with a single part changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from tscompress.plan.plan import HeadPlan

T = TypeVar("T")


def forecast_loss(loaded: LoadedModel, batch: ForecastBatch) -> tuple[float, int]:
    """Teacher-forced loss of the forecast of ``batch``, summed over observed target steps.

    Negative log-likelihood of the target's tokens, or twice the pinball loss of scaled quantiles;
    see ``forecast_loss`` of :mod:`tscompress.families`.

    Returns
    -------
    The sum, and the number of steps.
    """
    output = run_teacher_forced(loaded, batch)
    return adapter_of(loaded.family).forecast_loss(loaded.forecaster, output, batch)


class _Recalled(nn.Module):
    """Stands where something unchanged is, and gives back what that put out for each batch."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.outputs = outputs
        self.batch = 0

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.outputs[self.batch]


class Forecasts:
    """Losses of the model as it is, run only from the block on that may have changed."""

    def __init__(self, loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> None:
        self.loaded = loaded
        self.batches = batches
        self._start: tuple[str, int] | None = ("", 0)
        self._recalled: dict[str, _Recalled] = {}

    def loss(self) -> float:
        """Mean over all observed target steps."""
        totals = list(self._each(lambda batch: forecast_loss(self.loaded, batch)))
        count = sum(steps for _, steps in totals)
        if not count:
            raise DataError(
                "no window to measure the loss on has an observed target after a context that "
                "varies; give other series."
            )
        return sum(total for total, _ in totals) / count

    def start_at(self, layer: tuple[str, int] | None) -> None:
        """Recall what precedes a layer, given by stack and index; None: all layers.

        The model must be the original as far as that, and starts only ever move forward.
        """
        if layer == self._start:
            return
        self._start = layer
        stacks = list(stack_layers(self.loaded.model))
        stack, depth = layer or ("", 0)
        done = stacks[: stacks.index(stack)] if layer else stacks
        recalled = {name: self._recalled.get(name) or self._recall(name) for name in done}
        if depth:
            # Each layer reads what the one before put out, so all may say what the last one said.
            last = self._recall(layer_name(stack, depth - 1))
            recalled |= {layer_name(stack, index): last for index in range(depth)}
        self._recalled = recalled

    def _recall(self, name: str) -> _Recalled:
        outputs: list[Any] = []
        module = self.loaded.model.get_submodule(name)
        handle = module.register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            list(self._each(lambda batch: run_teacher_forced(self.loaded, batch)))
        finally:
            handle.remove()
        return _Recalled(outputs)

    def _each(self, run: Callable[[ForecastBatch], T]) -> Iterator[T]:
        with ExitStack() as stand_ins:
            for name, recalled in self._recalled.items():
                stand_ins.enter_context(swapped(self.loaded.model, name, recalled))
            for index, batch in enumerate(self.batches):
                for recalled in self._recalled.values():
                    recalled.batch = index
                yield run(batch)


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
    """``fold`` changes the module ``name`` in place, so it gets a copy."""
    with swapped(model, name, copy.deepcopy(model.get_submodule(name))):
        fold()
        yield


@contextmanager
def without_layer(model: nn.Module, name: str) -> Iterator[None]:
    """Take away what the sublayers add to the residual stream.

    They still run: the relative position bias that the first one computes is for all layers.
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
