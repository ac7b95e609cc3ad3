"""Costs of a planned architecture: parameters, bytes, compute and key-value cache.

For given layers and a given workload, every cost is an affine function of the head sizes and the
numbers of hidden units. A :class:`CostModel` finds the coefficients once, from shapes, and then
prices any sizes with a few additions. Results are exact: they equal the counts of
:mod:`tscompress.benchmark.sizes` on a model of that shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from tscompress.benchmark.workload import Workload
from tscompress.errors import PlanError, UnsupportedModelError, UsageError
from tscompress.families.base import Pass
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.families.t5_stack import has_own_head
from tscompress.io.text import counted
from tscompress.plan.architecture import Architecture, AttentionBlock
from tscompress.plan.layer_plans import HeadPlan, HiddenPlan
from tscompress.plan.plan import Plan

SizeKind = Literal["qk", "vo", "hidden"]
Measure = Literal["parameters", "bytes", "macs", "kv-cache"]


#: Of a number in float32.
_BYTES_WHOLE = 4
#: Upper bounds of the bytes of a safetensors header: its length, metadata and padding; and for each
#: tensor, besides its name, a dtype, a shape of two and two offsets of up to twelve digits each.
_HEADER_START, _HEADER_ENTRY = 64, 88


@dataclass(frozen=True)
class Costs:
    """Costs of a model, of a part, or of one unit of a part.

    Attributes
    ----------
    parameters, bytes
        Of the weights; tied ones count once.
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
    """Costs of any sizes of one model under one workload.

    Parameters
    ----------
    family, model
        The dense original, from a :class:`~tscompress.checkpoints.load.LoadedModel`. Only shapes
        are read, so the model may be on the meta device.
    workload
        The ``predict`` call whose ``macs`` and ``kv_cache_bytes`` count.
    bytes_per_number
        ``itemsize`` of the dtype of stored weights and of cached keys and values.
    whole
        Names of layers that are stored in float32 all the same.

    Attributes
    ----------
    original
        Costs of the original.
    header_bytes
        Upper bound of the header of its weight file, and of that of a model compressed from it.

    Raises
    ------
    UnsupportedModelError
        The family does not forecast, or the model is not dense.
    UsageError
        The context is longer than the model reads, or the horizon longer than one pass forecasts.
    """

    def __init__(
        self,
        family: str,
        model: nn.Module,
        workload: Workload,
        *,
        bytes_per_number: int,
        whole: Collection[str] = (),
    ) -> None:
        adapter = adapter_of(family)
        self.family = family
        settings: Mapping[str, Any] = model.config.chronos_config  # type: ignore[union-attr,assignment]
        _check_single_pass(settings, workload)
        work = next(adapter.passes(settings, workload))
        architecture = adapter.describe(model)
        self._places = _places(model, architecture)
        self._parts = {
            (part.name, part.kind): part
            for part in (
                *_attention_parts(model, architecture, work, bytes_per_number),
                *_feed_forward_parts(model, architecture, work, bytes_per_number, whole),
                *_patch_parts(model, work, bytes_per_number),
            )
        }
        self._latent_block, self._latent_shared = _latent_costs(
            model, architecture, work, bytes_per_number
        )
        # Costs of each layer (stack and index); under None of all that is in no layer.
        self._layers: dict[tuple[str, int] | None, Costs] = {
            None: Costs(macs=_fixed_macs(model, work))
        }
        self.header_bytes = _HEADER_START
        layers = _layers_of_parameters(model)
        for name, count in _parameters(model):
            self.header_bytes += len(name) + _HEADER_ENTRY
            is_whole = not set(whole).isdisjoint(name.split("."))
            size = _BYTES_WHOLE if is_whole else bytes_per_number
            self._add(layers.get(name), _weights(count, size))
        for part in self._parts.values():
            self._add(self.layer_of(part.name), replace(part.cost, parameters=0, bytes=0))
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
        """Costs of the whole model with other sizes; parts that are not named keep theirs.

        A dropped layer costs nothing, layer norms included. The relative position bias stays: the
        first remaining layer takes it over.

        Parameters
        ----------
        qk, vo
            Attention block to the head size of queries and keys, and of values.
        hidden
            Feed-forward or patch embedding to its hidden units.
        latent
            Dimensions of the latent that all cross-attention reads; ``qk`` and ``vo`` then have no
            cross-attention.
        kept_layers
            Stack to the original's indices of the kept layers, in order. Names in the other
            arguments are then those after dropping, as in a plan.

        Raises
        ------
        PlanError
            A name or a layer is unknown, or a size is impossible.
        """
        kept = {} if kept_layers is None else self._checked(kept_layers)
        dropped = (
            cost
            for layer, cost in self._layers.items()
            if layer is not None and layer[0] in kept and layer[1] not in kept[layer[0]]
        )
        total = self.original - sum(dropped, start=Costs())
        by_kind: tuple[tuple[SizeKind, Mapping[str, int] | None], ...] = (
            ("qk", qk),
            ("vo", vo),
            ("hidden", hidden),
        )
        for kind, sizes in by_kind:
            for name, size in (sizes or {}).items():
                part = self._part(self._name_before_drop(name, kept), kind)
                total += part.cost_of_change(size)
        if latent is not None:
            total += self._latent_shared * latent
            for name, unit in self._latent_block.items():
                layer = self.layer_of(name)
                assert layer is not None
                if layer[0] not in kept or layer[1] in kept[layer[0]]:
                    dense = self._part(name, "qk").cost + self._part(name, "vo").cost
                    total += unit * latent - dense
        return total

    def of_plan(self, plan: Plan) -> Costs:
        """Costs of the model after a fold plan; see :meth:`costs` on dropped layers.

        Raises
        ------
        PlanError
            The plan is for another method or another model.
        """
        if plan.family != self.family or plan.method != "fold":
            raise PlanError(
                f"costs are of a fold plan for a {self.family} model; "
                f"this is a {plan.method} plan for a {plan.family} model."
            )
        if plan.width is not None:
            raise PlanError(
                "the plan has another width; build the cost model from the sliced model and give "
                "it plan.narrowed()."
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

    def layer_of(self, name: str) -> tuple[str, int] | None:
        """Stack and index of the layer that a part is or belongs to; None: no layer."""
        place = self._places.get(name)
        return None if place is None else place[:2]

    def _name_before_drop(self, name: str, kept_layers: Mapping[str, Sequence[int]]) -> str:
        place = self._places.get(name)
        if place is None or place[0] not in kept_layers:
            return name
        stack, index, part = place
        kept = kept_layers[stack]
        if index >= len(kept):
            raise PlanError(f"{name!r} is beyond the {len(kept)} kept layers of {stack!r}.")
        before = (stack, kept[index], part)
        return next((other for other, found in self._places.items() if found == before), name)

    def _add(self, layer: tuple[str, int] | None, cost: Costs) -> None:
        self._layers[layer] = self._layers.get(layer, Costs()) + cost

    def _part(self, name: str, kind: SizeKind) -> _Part:
        try:
            return self._parts[name, kind]
        except KeyError:
            known = [other for other, of_kind in self._parts if of_kind == kind]
            raise PlanError(
                f"the model has no {kind} size at {name!r}; it has {len(known)}: "
                f"{known[0]} to {known[-1]}."
            ) from None

    def _check_shapes(self, plan: Plan) -> None:
        """Refuse a plan for another size of the same family, whose names are the same."""
        kept = plan.kept_layers or {}
        heads: tuple[SizeKind, ...] = ("qk", "vo")
        hidden: tuple[SizeKind, ...] = ("hidden",)
        layers: tuple[HeadPlan | HiddenPlan, ...] = (*plan.heads, *plan.hidden)
        for layer in layers:
            name = self._name_before_drop(layer.name, kept)
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
                    "give each kept layer once."
                )
        return kept_layers


# --------------------------------------------------------------------------------------------------
# Work of one predict call
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attended:
    """Work of one attention block, summed over the batch and over decoding steps.

    Attributes
    ----------
    queries, keys
        Tokens that go through the projections of queries and outputs, and of keys and values.
    pairs
        Query-key pairs in one head.
    cached
        Tokens in the key-value cache at its fullest.
    """

    queries: int
    keys: int
    pairs: int
    cached: int = 0


def _attended(work: Pass, block: AttentionBlock) -> _Attended:
    """Work of one attention block in a pass."""
    encoded, decoded = _encoded(work), _decoded(work)
    if block.reads_encoder:
        projected_once = encoded * work.paths
        pairs = projected_once * work.outputs
        return _Attended(decoded, projected_once, pairs, cached=projected_once)
    if block.stack == "decoder":  # step t reads the keys of steps 1 to t
        pairs = decoded * (work.outputs + 1) // 2
        return _Attended(decoded, decoded, pairs, cached=decoded)
    # Across the batch at each token, or across the tokens of each series.
    others = work.series if block.across_series else work.encoder_tokens
    return _Attended(encoded, encoded, encoded * others)


def _encoded(work: Pass) -> int:
    """Tokens that go through the encoder."""
    return work.series * work.encoder_tokens


def _decoded(work: Pass) -> int:
    """Tokens that are decoded."""
    return work.series * work.paths * work.outputs


def _check_single_pass(settings: Mapping[str, Any], workload: Workload) -> None:
    """Refuse several passes: later ones read a longer context, some on more rows."""
    if workload.context_length > settings["context_length"]:
        raise UsageError(
            f"context_length is {workload.context_length} but the model reads only the last "
            f"{counted(settings['context_length'], 'step')}; ask for that or less."
        )
    longest = settings.get("prediction_length") or (
        settings.get("max_output_patches", 1) * settings["output_patch_size"]
    )
    if workload.horizon > longest:
        raise UsageError(
            f"horizon {workload.horizon} takes several passes; costs are known for one pass of "
            f"{longest} steps: ask for that or less."
        )


# --------------------------------------------------------------------------------------------------
# Costs of each part
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Something of adjustable size: queries and keys or values of a block, or hidden units.

    ``step`` is 2 for queries and keys that a rotary embedding rotates in pairs, otherwise 1.
    """

    name: str
    kind: SizeKind
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
    model: nn.Module, architecture: Architecture, work: Pass, bytes_per_number: int
) -> Iterator[_Part]:
    kinds: tuple[tuple[SizeKind, str, str], ...] = (("qk", "q", "k"), ("vo", "o", "v"))
    for block in architecture.attention:
        attended = _attended(work, block)
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
            if block.rotary and kind == "qk":
                step = 2
                # The angles, position times frequency, are one more matrix product.
                unit = unit * step + Costs(macs=work.encoder_tokens)
            yield _Part(block.name, kind, inner // block.num_heads, step, unit)


def _latent_costs(
    model: nn.Module, architecture: Architecture, work: Pass, bytes_per_number: int
) -> tuple[dict[str, Costs], Costs]:
    """For each dimension of a latent: costs of each cross-attention, and of the shared latent."""
    shared, by_name = Costs(), {}
    for block in architecture.attention:
        if not block.reads_encoder:
            continue
        attended = _attended(work, block)
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
    model: nn.Module,
    architecture: Architecture,
    work: Pass,
    bytes_per_number: int,
    whole: Collection[str],
) -> Iterator[_Part]:
    for block in architecture.feed_forward:
        linears = {role: _linear(model, name) for role, name in block.projections.items()}
        units = linears["wo"].in_features
        cost = Costs()
        tokens = _decoded(work) if block.stack == "decoder" else _encoded(work)
        for role, linear in linears.items():
            weights = _outer_width(linear, units)
            size = _BYTES_WHOLE if role in whole else bytes_per_number
            cost += _weights(weights, size) + Costs(macs=tokens * weights)
        yield _Part(block.name, "hidden", units, 1, cost)


def _patch_parts(model: nn.Module, work: Pass, bytes_per_number: int) -> Iterator[_Part]:
    for name, tokens in _patch_tokens(model, work).items():
        first = _linear(model, f"{name}.hidden_layer")
        last = _linear(model, f"{name}.output_layer")
        weights = first.in_features + last.out_features
        bias = 1
        cost = _weights(weights + bias, bytes_per_number) + Costs(macs=tokens * weights)
        yield _Part(name, "hidden", first.out_features, 1, cost)


def _patch_tokens(model: nn.Module, work: Pass) -> dict[str, int]:
    """Patch embeddings of the model, and the tokens that go through each."""
    if not hasattr(model, "input_patch_embedding"):
        return {}
    return {
        "input_patch_embedding": work.series * work.input_patches,
        "output_patch_embedding": _decoded(work),
    }


def _fixed_macs(model: nn.Module, work: Pass) -> int:
    """MACs of matrix products whose shapes no plan changes."""
    patch_tokens = _patch_tokens(model, work)
    if not patch_tokens:
        head = _linear(model, "lm_head")
        return _decoded(work) * head.in_features * head.out_features
    residuals = {name: _linear(model, f"{name}.residual_layer") for name in patch_tokens}
    return sum(
        tokens * residuals[name].in_features * residuals[name].out_features
        for name, tokens in patch_tokens.items()
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise UnsupportedModelError(
            f"{name} is a {type(module).__name__}, not a Linear; costs are of a dense model: "
            "give the original."
        )
    return module


def _outer_width(linear: nn.Linear, inner: int) -> int:
    """Weights for each of the ``inner`` dimensions that it writes or reads."""
    return linear.weight.numel() // inner


def _parameters(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and size of every parameter, tied ones once, even if meta tensors lost their ties."""
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if not has_own_head(model.config):
        tied.add("lm_head.weight")
    for name, parameter in model.named_parameters():
        if not (parameter.is_meta and name in tied):
            yield name, parameter.numel()


def _places(model: nn.Module, architecture: Architecture) -> dict[str, tuple[str, int, int]]:
    """Stack, layer and sublayer of every block, and of every whole layer (sublayer -1)."""
    blocks = (*architecture.attention, *architecture.feed_forward)
    places = {block.name: (block.stack, block.layer, block.sublayer) for block in blocks}
    for stack, layers in stack_layers(model).items():
        places |= {layer_name(stack, index): (stack, index, -1) for index in range(len(layers))}
    return places


def _layers_of_parameters(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Stack and index of the layer that each parameter belongs to."""
    return {
        f"{layer_name(stack, index)}.{name}": (stack, index)
        for stack, layers in stack_layers(model).items()
        for index, layer in enumerate(layers)
        for name, _ in layer.named_parameters()
        if "relative_attention_bias" not in name  # shared by all layers; the first only holds it
    }
