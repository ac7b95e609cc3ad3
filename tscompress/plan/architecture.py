"""The attention blocks and feed-forwards of a model, by name and position.

Algorithms elsewhere iterate over :class:`AttentionBlock` and :class:`FeedForward` objects and never
check the family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

STACKS = ("encoder", "decoder")
BlockKind = Literal["encoder", "decoder", "cross", "time", "group"]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A part of one layer.

    Attributes
    ----------
    name
        Dotted name of the module.
    stack, layer, sublayer
        Position: the stack (``encoder`` or ``decoder``), the index of the layer in it, and the
        index of the part in the layer.
    projections
        Role to dotted name of the Linear layer.
    """

    name: str
    stack: str
    layer: int
    sublayer: int
    projections: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class AttentionBlock(_Block):
    """One q, k, v, o set; these are the roles of its projections.

    Attention to a single key may have only ``v`` and ``o``, or their product ``vo``.

    Attributes
    ----------
    kind
        ``encoder`` and ``decoder`` self-attention, ``cross`` attention; Chronos-2: ``time`` and
        ``group``.
    softmax
        Whether scores pass a softmax, which a constant added to all keys does not change.
    depth
        Index of its layer in the stack (i of Yu et al., 2025, sec. 5). Cross-attention reads the
        encoder's output, so its index counts on from the number of encoder layers.
    single_key
        Whether its softmax is always over one key, so that queries and keys do nothing.
    constant_query
        Whether its queries are the same for all series.
    """

    kind: BlockKind
    depth: int
    num_heads: int
    softmax: bool = True
    single_key: bool = False
    constant_query: bool = False

    @property
    def reads_encoder(self) -> bool:
        """Whether keys and values are projected from the encoder's output."""
        return self.kind == "cross"

    @property
    def across_series(self) -> bool:
        """Whether series attend to each other, at one time step; inputs are ``[S, B, d]``."""
        return self.kind == "group" and "k" in self.projections

    @property
    def rotary(self) -> bool:
        """Whether pairs of queries and keys are rotated by their position."""
        return self.kind == "time"


@dataclass(frozen=True, kw_only=True)
class FeedForward(_Block):
    """One feed-forward block: roles ``wi`` (``wi_0``, ``wi_1`` if gated) and ``wo``."""


@dataclass(frozen=True)
class Architecture:
    """The compressible parts of a model, in the order of a forward pass."""

    family: str
    attention: tuple[AttentionBlock, ...]
    feed_forward: tuple[FeedForward, ...]

    def attention_projections(self) -> Iterator[tuple[AttentionBlock, str, str]]:
        """``(block, role, dotted name)`` of every attention projection."""
        for block in self.attention:
            for role, name in block.projections.items():
                yield block, role, name

    def feed_forward_projections(self) -> Iterator[tuple[FeedForward, str, str]]:
        """``(block, role, dotted name)`` of every feed-forward projection."""
        for block in self.feed_forward:
            for role, name in block.projections.items():
                yield block, role, name
