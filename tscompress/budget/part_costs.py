"""Costs of one unit of each part of a model: of a head dimension, of a hidden unit, of a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tscompress.benchmark.workload import Workload
from tscompress.errors import PlanError, UnsupportedModelError, UsageError
from tscompress.families.base import Pass
from tscompress.families.t5_stack import token_table
from tscompress.io.text import counted
from tscompress.plan.architecture import Architecture, AttentionBlock
from tscompress.plan.layer_plans import TOKENS, TokenTable

SizeKind = Literal["qk", "vo", "hidden", "embedding"]
Measure = Literal["parameters", "bytes", "macs", "kv-cache"]
#: Of a number in float32.
BYTES_WHOLE = 4
#: Upper bounds of the bytes of a safetensors header: its length, metadata and padding; and for each
#: tensor, besides its name, a dtype, a shape of two and two offsets of up to twelve digits each.
HEADER_START, HEADER_ENTRY = 64, 88


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


def check_single_pass(settings: Mapping[str, Any], workload: Workload) -> None:
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
class SizedPart:
    """Something of adjustable size: queries and keys or values of a block, hidden units, a rank.

    ``step`` is 2 for queries and keys that a rotary embedding rotates in pairs, otherwise 1.
    """

    name: str
    kind: SizeKind
    size: int
    step: int
    cost_per_step: Costs

    @property
    def cost(self) -> Costs:
        """At its full size."""
        return self.cost_per_step * (self.size // self.step)

    def cost_of_change(self, size: int) -> Costs:
        """What another size adds; mostly negative.

        Raises
        ------
        PlanError
            No part has that size.
        """
        if size < 1 or size % self.step:
            allowed = "positive" if self.step == 1 else "positive and even"
            raise PlanError(f"{self.kind} size {size} of {self.name!r} is not {allowed}.")
        return self.cost_per_step * ((size - self.size) // self.step)


@dataclass(frozen=True)
class TokenPart(SizedPart):
    """The token embedding and the head over tokens, whose size is a rank.

    ``cost_per_step`` is the cost of the dense ones: that of factors is not a share of it.
    """

    table: TokenTable
    work: Pass
    bytes_per_number: int

    @property
    def cost(self) -> Costs:
        return self.cost_per_step

    def cost_of_change(self, size: int) -> Costs:
        if size == self.size:
            return Costs()
        vocabulary, width, _ = self.table
        if not 1 <= size < self.table.break_even:
            raise PlanError(
                f"{self.kind} size {size} of {self.name!r} is not from 1 to below "
                f"{self.table.break_even:.1f}, where factors have fewer weights."
            )
        read = _encoded(self.work) + _decoded(self.work)
        macs = size * (read * width + _decoded(self.work) * (width + vocabulary))
        # Two tensors more in the header of the file, with longer names.
        header = Costs(bytes=2 * (HEADER_ENTRY + len(f"{self.name}.table.weight")))
        weights = weights_cost(self.table.factored(size), self.bytes_per_number)
        return weights + Costs(macs=macs) + header - self.cost


def weights_cost(count: int, bytes_per_number: int) -> Costs:
    """Costs of so many weights, without their use."""
    return Costs(parameters=count, bytes=count * bytes_per_number)


def attention_parts(
    model: nn.Module, architecture: Architecture, work: Pass, bytes_per_number: int
) -> Iterator[SizedPart]:
    """Queries and keys, and values, of every attention block."""
    kinds: tuple[tuple[SizeKind, str, str], ...] = (("qk", "q", "k"), ("vo", "o", "v"))
    for block in architecture.attention:
        attended = _attended(work, block)
        linears = {role: _linear(model, name) for role, name in block.projections.items()}
        for kind, of_queries, of_keys in kinds:
            inner = linears[of_keys].out_features
            width_q, width_k = (_outer_width(linears[r], inner) for r in (of_queries, of_keys))
            unit = weights_cost(block.num_heads * (width_q + width_k), bytes_per_number) + Costs(
                macs=block.num_heads
                * (attended.queries * width_q + attended.keys * width_k + attended.pairs),
                kv_cache_bytes=block.num_heads * attended.cached * bytes_per_number,
            )
            step = 1
            if block.rotary and kind == "qk":
                step = 2
                # The angles, position times frequency, are one more matrix product.
                unit = unit * step + Costs(macs=work.encoder_tokens)
            yield SizedPart(block.name, kind, inner // block.num_heads, step, unit)


def latent_costs(
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
        by_name[block.name] = weights_cost(weights, bytes_per_number) + Costs(
            macs=attended.queries * weights + 2 * block.num_heads * attended.pairs
        )
        shared = weights_cost(key.in_features, bytes_per_number) + Costs(
            macs=attended.keys * key.in_features,
            kv_cache_bytes=attended.cached * bytes_per_number,
        )
    return by_name, shared


def feed_forward_parts(
    model: nn.Module,
    architecture: Architecture,
    work: Pass,
    bytes_per_number: int,
    whole: Collection[str],
) -> Iterator[SizedPart]:
    """Every feed-forward; layers named in ``whole`` are stored in float32."""
    for block in architecture.feed_forward:
        linears = {role: _linear(model, name) for role, name in block.projections.items()}
        units = linears["wo"].in_features
        cost = Costs()
        tokens = _decoded(work) if block.stack == "decoder" else _encoded(work)
        for role, linear in linears.items():
            weights = _outer_width(linear, units)
            size = BYTES_WHOLE if role in whole else bytes_per_number
            cost += weights_cost(weights, size) + Costs(macs=tokens * weights)
        yield SizedPart(block.name, "hidden", units, 1, cost)


def patch_parts(model: nn.Module, work: Pass, bytes_per_number: int) -> Iterator[SizedPart]:
    """The patch embeddings, if the model has them."""
    for name, tokens in _patch_tokens(model, work).items():
        first = _linear(model, f"{name}.hidden_layer")
        last = _linear(model, f"{name}.output_layer")
        weights = first.in_features + last.out_features
        bias = 1
        cost = weights_cost(weights + bias, bytes_per_number) + Costs(macs=tokens * weights)
        yield SizedPart(name, "hidden", first.out_features, 1, cost)


def token_parts(model: nn.Module, work: Pass, bytes_per_number: int) -> Iterator[SizedPart]:
    """The token embedding and the head, if the model has them."""
    if hasattr(model, "lm_head"):
        _linear(model, "lm_head")
    if (table := token_table(model)) is not None:
        head = Costs(macs=_decoded(work) * table.vocabulary * table.d_model)
        dense = weights_cost(table.weights, bytes_per_number) + head
        yield TokenPart(TOKENS, "embedding", table.d_model, 1, dense, table, work, bytes_per_number)


def _patch_tokens(model: nn.Module, work: Pass) -> dict[str, int]:
    """Patch embeddings of the model, and the tokens that go through each."""
    if not hasattr(model, "input_patch_embedding"):
        return {}
    return {
        "input_patch_embedding": work.series * work.input_patches,
        "output_patch_embedding": _decoded(work),
    }


def fixed_macs(model: nn.Module, work: Pass) -> int:
    """MACs of matrix products whose shapes no plan changes."""
    patch_tokens = _patch_tokens(model, work)
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
