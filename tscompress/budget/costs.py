"""What a planned architecture costs: parameters, bytes, compute and key-value cache.

With the layers and the workload given, every cost is a constant plus a multiple of each head size
and of each number of hidden units. A :class:`CostModel` finds these numbers once, from shapes
alone, and then prices any sizes with a few additions. The results are not estimates: they are what
:mod:`tscompress.benchmark.sizes` counts on a model of that shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.format import has_own_head
from tscompress.errors import PlanError, UnsupportedModelError, UsageError
from tscompress.families.registry import FAMILIES, describe
from tscompress.plan.architecture import Architecture, BlockKind
from tscompress.plan.plan import HeadPlan, HiddenPlan, Plan

PartKind = Literal["qk", "vo", "hidden"]
Measure = Literal["parameters", "bytes", "macs", "kv-cache"]


#: Bytes of a safetensors header: its length, metadata and padding, and of each tensor what stands
#: beside its name, at most: dtype, a shape of two and two offsets of up to twelve digits each.
_HEADER_START, _HEADER_ENTRY = 64, 88


@dataclass(frozen=True)
class Costs:
    """What a model costs, or a part of one, or one unit of a part.

    Attributes
    ----------
    parameters, bytes
        Of the weights; a tied one counts once.
    macs
        Multiply-accumulates of one ``predict`` call, over the whole batch.
    kv_cache_bytes
        Of the key-value cache at its fullest during that call.
    """

    parameters: int = 0
    bytes: int = 0
    macs: int = 0
    kv_cache_bytes: int = 0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.parameters + other.parameters,
            self.bytes + other.bytes,
            self.macs + other.macs,
            self.kv_cache_bytes + other.kv_cache_bytes,
        )

    def __sub__(self, other: Costs) -> Costs:
        return self + other * -1

    def __mul__(self, count: int) -> Costs:
        return Costs(
            self.parameters * count,
            self.bytes * count,
            self.macs * count,
            self.kv_cache_bytes * count,
        )

    def of(self, measure: Measure) -> int:
        """The figure called ``measure``."""
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "macs": self.macs,
            "kv-cache": self.kv_cache_bytes,
        }[measure]


class CostModel:
    """Prices sizes of one model under one workload.

    Parameters
    ----------
    family, model
        The original, dense; of a :class:`~tscompress.checkpoints.load.LoadedModel`. Only shapes are
        read, so the model may live on the meta device.
    workload
        The ``predict`` call whose ``macs`` and ``kv_cache_bytes`` count.
    bytes_per_number
        Of stored weights and cached keys and values: the ``itemsize`` of their dtype.

    Attributes
    ----------
    original
        Costs of the model as it is.
    header_bytes
        At most what the header of its weights takes on disk, and that of a model made of it.

    Raises
    ------
    UnsupportedModelError
        The family does not forecast, or the model is not dense.
    UsageError
        The context is longer than the model reads, or the horizon longer than one pass forecasts.
    """

    def __init__(
        self, family: str, model: nn.Module, workload: Workload, *, bytes_per_number: int
    ) -> None:
        if not FAMILIES[family].forecasts:
            able = [name for name, known in FAMILIES.items() if known.forecasts]
            raise UnsupportedModelError(
                f"a {family} model does not forecast, so no workload has a cost; "
                f"families that do: {', '.join(able)}."
            )
        self.family = family
        work = _work(family, model, workload)
        architecture = describe(family, model)
        self._parts = {
            (part.name, part.kind): part
            for part in (
                *_attention_parts(model, architecture, work, bytes_per_number),
                *_feed_forward_parts(model, architecture, work, bytes_per_number),
                *_patch_parts(model, work, bytes_per_number),
            )
        }
        self._latent_block, self._latent_shared = _latent_costs(
            model, architecture, work, bytes_per_number
        )
        # Costs of each layer (stack and index), and under None of what is in no layer.
        self._layers: dict[tuple[str, int] | None, Costs] = {
            None: Costs(macs=_fixed_macs(model, work))
        }
        self.header_bytes = _HEADER_START
        for name, count in _parameters(model):
            self.header_bytes += len(name) + _HEADER_ENTRY
            # Shared by all layers of a stack: block 0 only owns it.
            layer = None if "relative_attention_bias" in name else _layer(name)
            self._add(layer, _weights(count, bytes_per_number))
        for part in self._parts.values():
            self._add(_layer(part.name), replace(part.cost, parameters=0, bytes=0))
        self.original = sum(self._layers.values(), start=Costs())

    def costs(
        self,
        qk: Mapping[str, int] | None = None,
        vo: Mapping[str, int] | None = None,
        hidden: Mapping[str, int] | None = None,
        *,
        latent: int | None = None,
        kept_layers: Mapping[str, Sequence[int]] | None = None,
    ) -> Costs:
        """Costs of the whole model with other sizes; what is not named keeps its own.

        A dropped layer costs nothing: its layer norms go with it. The relative position bias
        stays, because the first layer that is left takes it over.

        Parameters
        ----------
        qk, vo
            Attention block to the size of queries and keys, and of values, of each head.
        hidden
            Feed-forward or patch embedding to its hidden units.
        latent
            Numbers of the latent that all cross-attention reads; then ``qk`` and ``vo`` name none.
        kept_layers
            Stack to the original's indices of the layers that stay, in order. Names in the other
            arguments are then those after the drop, as in a plan.

        Raises
        ------
        PlanError
            A name or a layer is unknown, or a size is not possible.
        """
        kept = {} if kept_layers is None else self._checked(kept_layers)
        dropped = (
            cost
            for layer, cost in self._layers.items()
            if layer is not None and layer[0] in kept and layer[1] not in kept[layer[0]]
        )
        total = self.original - sum(dropped, start=Costs())
        by_kind: tuple[tuple[PartKind, Mapping[str, int] | None], ...] = (
            ("qk", qk),
            ("vo", vo),
            ("hidden", hidden),
        )
        for kind, sizes in by_kind:
            for name, size in (sizes or {}).items():
                part = self._part(_name_before_drop(name, kept), kind)
                total += part.cost_of_change(size)
        if latent is not None:
            total += self._latent_shared * latent
            for name, unit in self._latent_block.items():
                layer = _layer(name)
                assert layer is not None
                if layer[0] not in kept or layer[1] in kept[layer[0]]:
                    dense = self._part(name, "qk").cost + self._part(name, "vo").cost
                    total += unit * latent - dense
        return total

    def of_plan(self, plan: Plan) -> Costs:
        """Costs of the model after a plan to fold it; see :meth:`costs` on dropped layers.

        Raises
        ------
        PlanError
            The plan is of another method or another model.
        """
        if plan.family != self.family or plan.method != "fold":
            raise PlanError(
                f"a {plan.method} plan of a {plan.family} model has no costs here; "
                f"give a fold plan of a {self.family} model."
            )
        if plan.width is not None:
            raise PlanError(
                "costs of a narrower stream are those of the narrower model; give its cost model "
                "the plan.narrowed()."
            )
        self._check_shapes(plan)
        heads = [head for head in plan.heads if not head.latent]
        return self.costs(
            {head.name: head.qk_size for head in heads},
            {head.name: head.vo_size for head in heads},
            {entry.name: entry.kept for entry in plan.hidden},
            latent=plan.latent,
            kept_layers=plan.kept_layers,
        )

    def _add(self, layer: tuple[str, int] | None, cost: Costs) -> None:
        self._layers[layer] = self._layers.get(layer, Costs()) + cost

    def _part(self, name: str, kind: PartKind) -> _Part:
        try:
            return self._parts[name, kind]
        except KeyError:
            known = [other for other, of_kind in self._parts if of_kind == kind]
            raise PlanError(
                f"the model has no {kind} size at {name!r}; it has {len(known)}: "
                f"{known[0]} to {known[-1]}."
            ) from None

    def _check_shapes(self, plan: Plan) -> None:
        """Names alone do not tell a plan for another size of the same family."""
        kept = plan.kept_layers or {}
        heads: tuple[PartKind, ...] = ("qk", "vo")
        hidden: tuple[PartKind, ...] = ("hidden",)
        layers: tuple[HeadPlan | HiddenPlan, ...] = (*plan.heads, *plan.hidden)
        for layer in layers:
            name = _name_before_drop(layer.name, kept)
            of_layer = heads if isinstance(layer, HeadPlan) else hidden
            parts = [self._part(name, kind) for kind in of_layer]
            found = sum(part.cost.parameters for part in parts)
            if found != layer.dense_parameters:
                raise PlanError(
                    f"the plan has {layer.name!r} with {layer.dense_parameters:,} parameters "
                    f"before; the model has {found:,} there."
                )

    def _checked(self, kept_layers: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        layers = [layer for layer in self._layers if layer is not None]
        for stack, kept in kept_layers.items():
            known = {index for of_stack, index in layers if of_stack == stack}
            if not known.issuperset(kept) or len(set(kept)) < len(kept) or not kept:
                raise PlanError(
                    f"cannot keep layers {list(kept)} of {stack!r}, which has {len(known)}; "
                    "give each that stays once."
                )
        return kept_layers


# --------------------------------------------------------------------------------------------------
# What one predict call does
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attended:
    """Work of one attention block, summed over the batch and over decoding steps.

    Attributes
    ----------
    queries, keys
        Tokens that the projections of queries and outputs see, and those of keys and values.
    pairs
        Of a query and a key, in one head.
    cached
        Tokens in the key-value cache at its fullest.
    """

    queries: int
    keys: int
    pairs: int
    cached: int = 0


@dataclass(frozen=True)
class _Work:
    """Tokens of one ``predict`` call.

    Attributes
    ----------
    series
        In the batch.
    encoder_tokens
        Of each series.
    input_patches
        Of each series, through the input patch embedding; 0 without one.
    paths
        Rows in the decoder for each series. Chronos-T5 encodes a series once and repeats what came
        out for each sample path, so everything in the decoder, cross-attention keys included, is
        done for every path.
    outputs
        Tokens decoded one after the other in each path; Chronos-2: patches put out at once.
    """

    series: int
    encoder_tokens: int
    input_patches: int
    paths: int
    outputs: int

    @property
    def encoded(self) -> int:
        return self.series * self.encoder_tokens

    @property
    def decoded(self) -> int:
        return self.series * self.paths * self.outputs

    def attended(self, kind: BlockKind) -> _Attended:
        if kind in ("encoder", "time"):
            return _Attended(self.encoded, self.encoded, self.encoded * self.encoder_tokens)
        if kind == "group":  # over the batch, at each token
            return _Attended(self.encoded, self.encoded, self.encoded * self.series)
        if kind == "decoder":  # step t reads the keys of steps 1 to t
            pairs = self.decoded * (self.outputs + 1) // 2
            return _Attended(self.decoded, self.decoded, pairs, cached=self.decoded)
        projected_once = self.encoded * self.paths
        pairs = projected_once * self.outputs
        return _Attended(self.decoded, projected_once, pairs, cached=projected_once)


def _work(family: str, model: nn.Module, workload: Workload) -> _Work:
    settings: Mapping[str, Any] = model.config.chronos_config  # type: ignore[union-attr,assignment]
    _check_single_pass(settings, workload)
    if family == "chronos-t5":
        return _Work(
            series=workload.batch_size,
            encoder_tokens=workload.context_length + settings["use_eos_token"],
            input_patches=0,
            paths=workload.num_samples or settings["num_samples"],
            outputs=workload.horizon,
        )
    size, stride = settings["input_patch_size"], settings["input_patch_stride"]
    padded = math.ceil(workload.context_length / size) * size
    patches = (padded - size) // stride + 1
    outputs = 1
    if family == "chronos-2":
        outputs = math.ceil(workload.horizon / settings["output_patch_size"])
        patches += outputs  # the future is embedded too, as patches of unknown values
    return _Work(
        series=workload.batch_size,
        encoder_tokens=patches + settings.get("use_reg_token", False),
        input_patches=patches,
        paths=1,
        outputs=outputs,
    )


def _check_single_pass(settings: Mapping[str, Any], workload: Workload) -> None:
    """Later passes read a longer context, some of them on more rows: not worth a formula each."""
    if workload.context_length > settings["context_length"]:
        raise UsageError(
            f"context_length is {workload.context_length} but the model reads only the last "
            f"{settings['context_length']} steps; ask for that or less."
        )
    longest = settings.get("prediction_length") or (
        settings["max_output_patches"] * settings["output_patch_size"]
    )
    if workload.horizon > longest:
        raise UsageError(
            f"a horizon of {workload.horizon} takes several passes; costs are known of one pass, "
            f"which forecasts {longest} steps: ask for that or less."
        )


# --------------------------------------------------------------------------------------------------
# What each part of the model costs
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Something of adjustable size: queries and keys or values of a block, or hidden units.

    ``step`` is 2 for queries and keys that a rotary embedding turns in pairs, otherwise 1.
    """

    name: str
    kind: PartKind
    size: int
    step: int
    cost_per_step: Costs

    @property
    def cost(self) -> Costs:
        return self.cost_per_step * (self.size // self.step)

    def cost_of_change(self, size: int) -> Costs:
        if size < 1 or size % self.step:
            allowed = "positive" if self.step == 1 else "positive and even"
            raise PlanError(f"{self.kind} size {size} of {self.name!r} is not {allowed}.")
        return self.cost_per_step * ((size - self.size) // self.step)


def _weights(count: int, bytes_per_number: int) -> Costs:
    return Costs(parameters=count, bytes=count * bytes_per_number)


def _attention_parts(
    model: nn.Module, architecture: Architecture, work: _Work, bytes_per_number: int
) -> Iterator[_Part]:
    kinds: tuple[tuple[PartKind, str, str], ...] = (("qk", "q", "k"), ("vo", "o", "v"))
    for block in architecture.attention:
        attended = work.attended(block.kind)
        linears = {role: _linear(model, name) for role, name in block.projections.items()}
        for kind, of_queries, of_keys in kinds:
            inner = linears[of_keys].out_features
            width_q, width_k = (_outer_width(linears[r], inner) for r in (of_queries, of_keys))
            unit = _weights(block.num_heads * (width_q + width_k), bytes_per_number) + Costs(
                macs=block.num_heads
                * (attended.queries * width_q + attended.keys * width_k + attended.pairs),
                kv_cache_bytes=block.num_heads * attended.cached * bytes_per_number,
            )
            step = 1
            if block.kind == "time" and kind == "qk":
                step = 2
                # The angles, position times frequency, come from a matrix product of their own.
                unit = unit * step + Costs(macs=work.encoder_tokens)
            yield _Part(block.name, kind, inner // block.num_heads, step, unit)


def _latent_costs(
    model: nn.Module, architecture: Architecture, work: _Work, bytes_per_number: int
) -> tuple[dict[str, Costs], Costs]:
    """For each number of a latent: costs of each cross-attention, and of what they share."""
    shared, by_name = Costs(), {}
    for block in architecture.attention:
        if block.kind != "cross":
            continue
        attended = work.attended("cross")
        query, key = (_linear(model, block.projections[role]) for role in "qk")
        weights = block.num_heads * 2 * query.in_features
        by_name[block.name] = _weights(weights, bytes_per_number) + Costs(
            macs=attended.queries * weights + 2 * block.num_heads * attended.pairs
        )
        shared = _weights(key.in_features, bytes_per_number) + Costs(
            macs=attended.keys * key.in_features,
            kv_cache_bytes=attended.cached * bytes_per_number,
        )
    return by_name, shared


def _feed_forward_parts(
    model: nn.Module, architecture: Architecture, work: _Work, bytes_per_number: int
) -> Iterator[_Part]:
    for block in architecture.feed_forward:
        linears = {role: _linear(model, name) for role, name in block.projections.items()}
        units = linears["wo"].in_features
        weights = sum(_outer_width(linear, units) for linear in linears.values())
        tokens = work.decoded if block.name.startswith("decoder.") else work.encoded
        cost = _weights(weights, bytes_per_number) + Costs(macs=tokens * weights)
        yield _Part(block.name, "hidden", units, 1, cost)


def _patch_parts(model: nn.Module, work: _Work, bytes_per_number: int) -> Iterator[_Part]:
    for name, tokens in _patch_tokens(model, work).items():
        first = _linear(model, f"{name}.hidden_layer")
        last = _linear(model, f"{name}.output_layer")
        weights = first.in_features + last.out_features
        bias = 1
        cost = _weights(weights + bias, bytes_per_number) + Costs(macs=tokens * weights)
        yield _Part(name, "hidden", first.out_features, 1, cost)


def _patch_tokens(model: nn.Module, work: _Work) -> dict[str, int]:
    """Patch embeddings of the model, and the tokens that go through each."""
    if not hasattr(model, "input_patch_embedding"):
        return {}
    return {
        "input_patch_embedding": work.series * work.input_patches,
        "output_patch_embedding": work.decoded,
    }


def _fixed_macs(model: nn.Module, work: _Work) -> int:
    """Of matrix products whose shapes no plan changes."""
    patch_tokens = _patch_tokens(model, work)
    if not patch_tokens:
        head = _linear(model, "lm_head")
        return work.decoded * head.in_features * head.out_features
    residuals = {name: _linear(model, f"{name}.residual_layer") for name in patch_tokens}
    return sum(
        tokens * residuals[name].in_features * residuals[name].out_features
        for name, tokens in patch_tokens.items()
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise UnsupportedModelError(
            f"{name} is a {type(module).__name__}, not a Linear; costs are those of a dense model, "
            "so give the original."
        )
    return module


def _outer_width(linear: nn.Linear, inner: int) -> int:
    """Weights for each of the ``inner`` numbers that it writes or reads."""
    return linear.weight.numel() // inner


def _parameters(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and size of every parameter, a tied one once, also where meta tensors lost the ties."""
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if not has_own_head(model.config):
        tied.add("lm_head.weight")
    for name, parameter in model.named_parameters():
        if not (parameter.is_meta and name in tied):
            yield name, parameter.numel()


def _layer(name: str) -> tuple[str, int] | None:
    """Stack and index of the layer that a dotted name belongs to."""
    found = re.match(r"(\w+)\.block\.(\d+)\.", name)
    return (found[1], int(found[2])) if found else None


def _name_before_drop(name: str, kept_layers: Mapping[str, Sequence[int]]) -> str:
    layer = _layer(name)
    if layer is None or layer[0] not in kept_layers:
        return name
    stack, index = layer
    kept = kept_layers[stack]
    if index >= len(kept):
        raise PlanError(f"{name!r} is beyond the {len(kept)} layers of {stack!r} that stay.")
    prefix = f"{stack}.block.{index}."
    return f"{stack}.block.{kept[index]}.{name.removeprefix(prefix)}"
