"""What each part of a model costs in forecast loss when it alone is made smaller.

The loss is measured, not weight error: every attention block's queries and keys, its values, every
feed-forward and every layer is compressed alone, and the whole model forecasts held-out windows.
A pass runs the model hundreds of times, so its result is kept in a file named by the content of
everything it depends on, block by block, and an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from tscompress.checkpoints.digests import code_digest, versions
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.fold import refit_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_layers import (
    fill_,
    fold_hidden_,
    fold_patch_,
    folded_heads,
    naming_failures,
    with_free_frequencies,
)
from tscompress.compression.fold_moments import attention_moments, hidden_moments, patch_moments
from tscompress.compression.fold_plans import PATCH_EMBEDDINGS, check_heads, fold_plan
from tscompress.compression.layer_walk import Step, advance_, walk
from tscompress.compression.recording import Recording, blocks_of, record
from tscompress.compression.residual_stream import projected, stream_bases
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError, FactorizationError, PlanError, UsageError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_name, stack_layers, sublayers
from tscompress.io.files import cache_directory, write_text_atomically
from tscompress.layers.resize import replace_heads_
from tscompress.plan.plan import HeadPlan, HiddenPlan, read_json, stock_frequencies

SENSITIVITY_VERSION: Literal[1] = 1
#: What folds and measures; in a development version it changes without a number.
_CODE = ("compression", "layers", "linalg", "budget")

PartKind = Literal["qk", "vo", "hidden", "layer", "width"]
#: The part whose size is ``d_model``.
STREAM = "stream"
DEFAULT_WIDTHS = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
T = TypeVar("T")


class Part(BaseModel):
    """One thing that can be made smaller, and what that costs.

    Attributes
    ----------
    name
        Attention block, feed-forward or patch embedding; of kind ``layer``: ``encoder.block.3``;
        of kind ``width``: ``stream``.
    size
        Of the original: head size, hidden units or ``d_model``; 1 for a layer.
    sizes
        Measured sizes, descending, below ``size``; of a layer ``(0,)``.
    losses
        Forecast loss of the model with only this part at that size, less the original's; without a
        layer, with the feed-forward before it fitted; of a narrower stream, with nothing fitted.
        Raw: noise may make it slightly negative.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: PartKind
    size: int = Field(ge=1)
    sizes: tuple[int, ...]
    losses: tuple[float, ...]

    @model_validator(mode="after")
    def _is_measured(self) -> Part:
        if len(self.sizes) != len(self.losses):
            raise ValueError(
                f"{self.name} has {len(self.sizes)} sizes and {len(self.losses)} losses"
            )
        smallest = 0 if self.kind == "layer" else 1
        descends = all(a > b for a, b in itertools.pairwise((self.size, *self.sizes)))
        if not descends or min(self.sizes, default=smallest) < smallest:
            raise ValueError(f"sizes of {self.name} must descend from below {self.size}")
        if not all(map(math.isfinite, self.losses)):
            raise ValueError(f"{self.name} has losses that are not finite")
        return self

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """``losses`` made monotone: smaller sizes never cost less, nothing costs less than 0."""
        return tuple(max(0.0, value) for value in rising(self.losses))


class Sensitivity(BaseModel):
    """The parts of a model, measured.

    Attributes
    ----------
    base_loss
        Forecast loss of the original on the same windows.
    settings
        How it was measured, for the record.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = SENSITIVITY_VERSION
    family: str
    base_loss: float
    parts: tuple[Part, ...]
    settings: dict[str, Any] = Field(default_factory=dict)

    def cost(self, name: str, kind: PartKind, size: int) -> float:
        """Predicted rise of the loss with this part alone at ``size``, at least 0.

        Measured losses are made monotone and interpolated linearly in log(size); at the full size
        the cost is 0.

        Raises
        ------
        PlanError
            Nothing was measured of that part, or ``size`` is outside the measured sizes.
        """
        matching = (part for part in self.parts if part.name == name and part.kind == kind)
        part = next(matching, None)
        if part is None:
            raise PlanError(f"the sensitivity holds no {kind} of {name!r}.")
        sizes, costs = (part.size, *part.sizes), (0.0, *part.costs)
        if not sizes[-1] <= size <= sizes[0]:
            raise PlanError(
                f"{kind} of {name} was measured at sizes {sizes[0]} to {sizes[-1]}, not {size}."
            )
        at = next(i for i, known in enumerate(sizes) if known <= size)
        if sizes[at] == size:
            return costs[at]
        larger, smaller = math.log(sizes[at - 1]), math.log(sizes[at])
        share = (larger - math.log(size)) / (larger - smaller)
        return costs[at - 1] + share * (costs[at] - costs[at - 1])

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing the file in one step."""
        write_text_atomically(Path(path), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read a sensitivity file.

        Raises
        ------
        PlanError
            The file is missing, is not JSON, or is not a sensitivity; names the first offending
            key.
        """
        content = read_json(path, "sensitivity")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "sensitivity"
            raise PlanError(f"{str(path)!r}: {where}: {first['msg']}.") from None


def rising(values: Sequence[float]) -> list[float]:
    """Nearest non-decreasing sequence in least squares, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        pools.append((mean, length))
    return [mean for mean, length in pools for _ in range(length)]


# --------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------


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


class _Forecasts:
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
        with ExitStack() as swapped:
            for name, recalled in self._recalled.items():
                swapped.enter_context(_swapped(self.loaded.model, name, recalled))
            for index, batch in enumerate(self.batches):
                for recalled in self._recalled.values():
                    recalled.batch = index
                yield run(batch)


# --------------------------------------------------------------------------------------------------
# The model with one part changed
# --------------------------------------------------------------------------------------------------


@contextmanager
def _swapped(model: nn.Module, name: str, other: nn.Module) -> Iterator[None]:
    original = model.get_submodule(name)
    try:
        model.set_submodule(name, other)
        yield
    finally:
        model.set_submodule(name, original)


@contextmanager
def _with_heads(model: nn.Module, plan: HeadPlan, weights: dict[str, Tensor]) -> Iterator[None]:
    with _swapped(model, plan.name, model.get_submodule(plan.name)):
        attention = replace_heads_(model, plan)
        for role, weight in weights.items():
            fill_(getattr(attention, role).weight, weight, plan.name)
        yield


@contextmanager
def _with_hidden(model: nn.Module, name: str, fold: Callable[[], object]) -> Iterator[None]:
    """``fold`` changes the module ``name`` in place, so it gets a copy."""
    with _swapped(model, name, copy.deepcopy(model.get_submodule(name))):
        fold()
        yield


@contextmanager
def _without_layer(model: nn.Module, name: str) -> Iterator[None]:
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


# --------------------------------------------------------------------------------------------------
# The pass
# --------------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    name: str
    kind: PartKind
    size: int
    sizes: tuple[int, ...]


def measure_sensitivity(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    *,
    holdout: Sequence[ForecastBatch] | None = None,
    fold: FoldConfig,
    head_sizes: Sequence[int] | None = None,
    hidden_ratios: Sequence[float] = (0.75, 0.5, 0.25, 0.125),
    width_ratios: Sequence[float] = DEFAULT_WIDTHS,
    layers: bool | Sequence[str] = True,
    cache: Path | Literal["default"] | None = "default",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivity:
    """Measure what each part costs at each size, all else being the original.

    The model is bit for bit as before when this returns or raises.

    Parameters
    ----------
    batches
        Statistics for folding come from these.
    holdout
        The loss is measured on these; None: on ``batches``.
    fold
        How layers are folded; each is fitted to its own original output, whatever ``refit`` says
        but ``none``, on ``batches`` alone and in float32: ``continuations`` and ``precision``
        have no say.
    head_sizes
        Sizes to try, where they are smaller; None: halves and three quarters of halves down to 1.
        Queries and keys with rotary embedding are tried only at sizes that a plain config allows,
        or with free ``frequencies`` at even ones.
    hidden_ratios
        Hidden units to try, as shares of the original's, in (0, 1).
    width_ratios
        Numbers of the residual stream to try, as shares of the original's, in (0, 1).
    layers
        Measure leaving out whole layers too, or those of some stacks. Where a feed-forward precedes
        a layer, it is fitted to what comes after both.
    cache
        Directory to keep results in; ``default``: ``$TSCOMPRESS_CACHE``, or ``tscompress`` in
        ``$XDG_CACHE_HOME`` or ``~/.cache``; None: keep nothing.
    on_progress
        Called with the number of measurements made and to be made.

    Raises
    ------
    PlanError
        A size or ratio is not possible, or the model is compressed already.
    DataError
        There is no window, or none has an observed target.
    FactorizationError
        A decomposition or a loss is not finite; names the layer.
    UsageError
        The cache cannot be written.
    UnsupportedModelError
        The model does not forecast.
    """
    holdout = batches if holdout is None else holdout
    if not batches or not holdout:
        raise DataError("a sensitivity pass needs at least one batch to fold and to measure on.")
    if loaded.plan is not None:
        raise PlanError(f"{loaded.name!r} is compressed already; measure the original checkpoint.")
    loaded.forecaster  # noqa: B018  raises for families that do not forecast
    refit: Literal["layer", "none"] = "none" if fold.refit == "none" else "layer"
    same = {"continuations": "given", "precision": "float32"}
    config = fold.model_copy(update={"refit": refit, **same})
    free = config.frequencies == "free"
    wanted = _wanted_parts(
        loaded, head_sizes, hidden_ratios, width_ratios, layers, free_frequencies=free
    )
    store = None
    if cache is not None:
        directory = cache_directory() if cache == "default" else Path(cache)
        store = _Store(directory, _content_key(loaded, batches, holdout, config, wanted))
    forecasts = _Forecasts(loaded, holdout)
    result = store.read(wanted) if store else None
    if result is None:
        base_loss = forecasts.loss()
        if not math.isfinite(base_loss):
            raise DataError(f"the original's own forecast loss is {base_loss}; check the windows.")
        result = Sensitivity(
            family=loaded.family,
            base_loss=base_loss,
            parts=(),
            settings={
                "fold": config.model_dump(mode="json"),
                "calibration_windows": sum(len(batch.context) for batch in batches),
                "holdout_windows": sum(len(batch.context) for batch in holdout),
            },
        )
        if store is not None:
            store.write(result, complete=False)
    measured = {(part.name, part.kind) for part in result.parts}
    remaining = {(p.name, p.kind): p for p in wanted if (p.name, p.kind) not in measured}
    if not remaining:
        total = sum(len(part.sizes) for part in wanted)
        on_progress(total, total)
        return result
    measuring = _Pass(loaded, batches, config, forecasts, remaining, result, store, on_progress)
    return measuring.run()


def _wanted_parts(
    loaded: LoadedModel,
    head_sizes: Sequence[int] | None,
    hidden_ratios: Sequence[float],
    width_ratios: Sequence[float],
    layers: bool | Sequence[str],
    *,
    free_frequencies: bool,
) -> list[_Wanted]:
    if any(size < 1 for size in head_sizes or ()):
        raise PlanError(f"head sizes must be at least 1, not {min(head_sizes or ())}.")
    for label, ratios in (("hidden", hidden_ratios), ("width", width_ratios)):
        for ratio in ratios:
            if not 0 < ratio < 1:
                raise PlanError(f"{label} ratios must lie between 0 and 1, not {ratio}.")
    architecture = loaded.architecture
    whole = fold_plan(loaded.model, architecture)
    check_heads(whole.heads)
    width = whole.heads[0].d_model
    widths = _below(width, [max(1, round(r * width)) for r in width_ratios])
    wanted: list[_Wanted] = [_Wanted(STREAM, "width", width, widths)] if widths else []
    for head in whole.heads:
        size = head.head_size
        tried = _below(size, default_head_sizes(size) if head_sizes is None else head_sizes)
        turned = tried
        if head.frequencies is not None:
            kept = (lambda s: s % 2 == 0) if free_frequencies else partial(stock_frequencies, size)
            turned = tuple(s for s in tried if kept(s))
        wanted += [_Wanted(head.name, "qk", size, turned), _Wanted(head.name, "vo", size, tried)]
    for hidden in whole.hidden:
        units = _below(hidden.d_ff, [max(1, round(r * hidden.d_ff)) for r in hidden_ratios])
        wanted.append(_Wanted(hidden.name, "hidden", hidden.d_ff, units))
    if layers:
        names = dict.fromkeys(
            layer_name(block.stack, block.layer)
            for block in architecture.attention
            if layers is True or block.stack in layers
        )
        wanted += [_Wanted(name, "layer", 1, (0,)) for name in names]
    return wanted


def default_head_sizes(size: int) -> tuple[int, ...]:
    """Halves of ``size`` down to 1, and three quarters of those from 8 on: 64 -> 48, 32, 24, ..."""
    halves = [size >> shift for shift in range(size.bit_length())]
    return _below(size, [*halves, *(3 * half // 4 for half in halves if half >= 8)])


def _below(size: int, sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({s for s in sizes if s < size}, reverse=True))


@dataclass
class _Pass:
    """One walk through the model. Parts that ``result`` holds already are not measured again."""

    loaded: LoadedModel
    batches: Sequence[ForecastBatch]
    config: FoldConfig
    forecasts: _Forecasts
    open: dict[tuple[str, PartKind], _Wanted]
    result: Sensitivity
    store: _Store | None
    on_progress: Callable[[int, int], None]

    def run(self) -> Sensitivity:
        self.done = sum(len(part.sizes) for part in self.result.parts)
        self.total = self.done + sum(len(part.sizes) for part in self.open.values())
        self.model = self.loaded.model
        plan = fold_plan(self.model, self.loaded.architecture)
        self.heads = {head.name: head for head in plan.heads}
        self.hidden = {hidden.name: hidden for hidden in plan.hidden}
        for part in [part for part in self.open.values() if not part.sizes]:
            self._measure(part.name, part.kind, lambda _: nullcontext())  # there is nothing to try
        self._width()
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
            bases = stream_bases(self.loaded, self.batches)
            self._measure(STREAM, "width", lambda size: projected(self.loaded, bases, size))

    def _layer(self, name: str) -> None:
        """The first layer of a stack: nothing before it can make up for it."""
        self._measure(name, "layer", lambda _: _without_layer(self.model, name))

    def _layer_after(self, step: Step, name: str, recording: Recording) -> None:
        """A layer that the feed-forward of ``step`` precedes: fitted to what comes after both."""
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

        @contextmanager
        def left_out(_: int) -> Iterator[None]:
            with (
                _swapped(self.model, block, copy.deepcopy(self.model.get_submodule(block))),
                _without_layer(self.model, name),
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
            # Components come in the order of what they tell: the largest size has all others.
            weights = {
                role: weight.reshape(plan.num_heads, -1, plan.d_model)[:, :size].flatten(0, 1)
                if role in ("q", "k")
                else weight
                for role, weight in leading.items()
            }
            return _with_heads(self.model, plan, weights)

        def smaller_values(size: int) -> AbstractContextManager[None]:
            plan = whole.model_copy(update={"vo_size": size})
            with naming_failures(whole.name):
                weights = folded_heads(attention, plan, moments, self.config)
            return _with_heads(self.model, plan, weights)

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
            return _with_hidden(self.model, whole.name, lambda: fold(plan))

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
    turned = None
    if whole.frequencies is not None:
        turned = stock_frequencies(whole.head_size, size) or tuple(range(size // 2))
    return whole.model_copy(update={"qk_size": size, "frequencies": turned})


# --------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------


class _Store:
    """One result's file. Until it is complete it says so, and cannot be loaded as a result."""

    def __init__(self, directory: Path, key: str) -> None:
        self.path = directory / "sensitivity" / f"{key}.json"

    def read(self, wanted: Sequence[_Wanted]) -> Sensitivity | None:
        """What was measured so far; None if there is nothing that can be used."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            incomplete = isinstance(content, dict) and "incomplete" in content
            found = Sensitivity.model_validate(content["incomplete"] if incomplete else content)
        except (OSError, ValueError, RecursionError):
            return None
        parts = [_Wanted(part.name, part.kind, part.size, part.sizes) for part in found.parts]
        enough = len(parts) < len(wanted) if incomplete else len(parts) == len(wanted)
        fits = enough and len(set(parts)) == len(parts) and set(parts) <= set(wanted)
        return found if fits else None

    def write(self, result: Sensitivity, *, complete: bool) -> None:
        text = result.model_dump_json(indent=2)
        try:
            write_text_atomically(
                self.path, f"{text}\n" if complete else f'{{"incomplete": {text}}}\n'
            )
        except OSError as error:
            raise UsageError(
                f"{str(self.path)!r} cannot be written ({error}); set TSCOMPRESS_CACHE to a "
                "directory that can, or do without a cache."
            ) from None


def _content_key(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    holdout: Sequence[ForecastBatch],
    config: FoldConfig,
    wanted: Sequence[_Wanted],
) -> str:
    """SHA-256 of everything a result depends on: the model in memory, windows and settings."""
    digest = hashlib.sha256()

    def add(label: str, value: object) -> None:
        digest.update(f"{label} {json.dumps(value, sort_keys=True, default=str)}\n".encode())

    def add_tensor(label: str, tensor: Tensor) -> None:
        add(label, [str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)

    add("version", SENSITIVITY_VERSION)
    add("code", code_digest(_CODE))
    add("versions", versions())
    add("family", loaded.family)
    add("config", dict(loaded.config))
    add("fold", config.model_dump(mode="json"))
    add("wanted", wanted)
    # Of what is in memory, not of its files: it may have been cast, or have lost layers since.
    for name, tensor in [*loaded.model.named_parameters(), *loaded.model.named_buffers()]:
        add_tensor(name, tensor)
    for label, windows in (("calibration", batches), ("holdout", holdout)):
        for batch, field in itertools.product(windows, dataclasses.fields(ForecastBatch)):
            tensor = getattr(batch, field.name)
            add(f"{label} {field.name}", None) if tensor is None else add_tensor(label, tensor)
    return digest.hexdigest()
