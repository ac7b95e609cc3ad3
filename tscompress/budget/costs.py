"""Costs of a planned architecture: parameters, bytes, compute and key-value cache.

For given layers and a given workload, every cost is an affine function of the head sizes, of the
numbers of hidden units and, below its full size, of the rank of a token embedding. A
:class:`CostModel` finds the coefficients once, from shapes, and then prices any sizes with a few
additions. Results are exact: they equal the counts of :mod:`tscompress.benchmark.sizes` on a model
of that shape; bytes of a model with more tensors have what these add to the header of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tscompress.benchmark.workload import Workload
from tscompress.budget.part_costs import (
    BYTES_WHOLE,
    HEADER_ENTRY,
    HEADER_START,
    Costs,
    SizedPart,
    SizeKind,
    attention_parts,
    check_single_pass,
    feed_forward_parts,
    fixed_macs,
    latent_costs,
    patch_parts,
    token_parts,
    weights_cost,
)
from tscompress.errors import PlanError
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.families.t5_stack import has_own_head
from tscompress.plan.architecture import Architecture
from tscompress.plan.layer_plans import EmbeddingPlan, HeadPlan, HiddenPlan
from tscompress.plan.plan import Plan


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
        check_single_pass(settings, workload)
        work = next(adapter.passes(settings, workload))
        architecture = adapter.describe(model)
        self._places = _places(model, architecture)
        self._parts = {
            (part.name, part.kind): part
            for part in (
                *attention_parts(model, architecture, work, bytes_per_number),
                *feed_forward_parts(model, architecture, work, bytes_per_number, whole),
                *patch_parts(model, work, bytes_per_number),
                *token_parts(model, work, bytes_per_number),
            )
        }
        self._latent_block, self._latent_shared = latent_costs(
            model, architecture, work, bytes_per_number
        )
        # Costs of each layer (stack and index); under None of all that is in no layer.
        self._layers: dict[tuple[str, int] | None, Costs] = {
            None: Costs(macs=fixed_macs(model, work))
        }
        self.header_bytes = HEADER_START
        layers = _layers_of_parameters(model)
        for name, count in _parameters(model):
            self.header_bytes += len(name) + HEADER_ENTRY
            is_whole = not set(whole).isdisjoint(name.split("."))
            size = BYTES_WHOLE if is_whole else bytes_per_number
            self._add(layers.get(name), weights_cost(count, size))
        for part in self._parts.values():
            self._add(self.layer_of(part.name), replace(part.cost, parameters=0, bytes=0))
        self.original = sum(self._layers.values(), start=Costs())

    def costs(
        self,
        qk: Mapping[str, int] | None = None,
        vo: Mapping[str, int] | None = None,
        hidden: Mapping[str, int] | None = None,
        embedding: Mapping[str, int] | None = None,
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
        embedding
            The token embedding to its rank.
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
            ("embedding", embedding),
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
            {tokens.name: tokens.rank for tokens in [plan.embedding] if tokens},
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

    def _part(self, name: str, kind: SizeKind) -> SizedPart:
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
        tokens: tuple[SizeKind, ...] = ("embedding",)
        layers: tuple[HeadPlan | HiddenPlan | EmbeddingPlan, ...] = plan.layers  # type: ignore[assignment]
        for layer in layers:
            name = self._name_before_drop(layer.name, kept)
            of_layer = heads if isinstance(layer, HeadPlan) else hidden
            of_layer = tokens if isinstance(layer, EmbeddingPlan) else of_layer
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
