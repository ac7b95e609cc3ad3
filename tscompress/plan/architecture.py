"""What a model has: its attention blocks and feed-forwards, by name.

Algorithms elsewhere walk :class:`AttentionBlock` and :class:`FeedForward` objects and never ask
which family they came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

STACKS = ("encoder", "decoder")
BlockKind = Literal["encoder", "decoder", "cross", "time", "group"]


@dataclass(frozen=True)
class AttentionBlock:
    """One q, k, v, o set.

    Attributes
    ----------
    name
        Dotted name of the attention module.
    kind
        ``encoder`` and ``decoder`` self-attention, ``cross`` attention; Chronos-2: ``time`` and
        ``group``.
    depth
        Layers of mixing that its inputs went through. Cross-attention reads the encoder's output,
        so it counts after every encoder layer (paper sec. 5).
    projections
        Role (``q``, ``k``, ``v``, ``o``) to dotted name of the Linear layer.
    """

    name: str
    kind: BlockKind
    depth: int
    num_heads: int
    projections: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward block: roles ``wi`` (``wi_0``, ``wi_1`` if gated) and ``wo``."""

    name: str
    depth: int
    projections: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class Architecture:
    """The compressible parts of a model, in the order in which a forward pass meets them."""

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
