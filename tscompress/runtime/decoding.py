"""Decoding step by step: keys and values of the tokens before stay where they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tscompress.runtime.graph import Array, Graph
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.t5_names import LOGITS, past_names, step_names
from tscompress.runtime.tokens import IntArray

#: Slots are added by this number: each is read in every step, and adding copies those before.
_BLOCK = 16


class Paths:
    """Paths of some series, and their keys and values.

    A step reads slots and cross-attention in place: nothing is copied but the token's own keys and
    values, into its slot.

    Parameters
    ----------
    graph
        A step of the decoder.
    cross
        What the encoder gave, once for each series.
    observed
        ``[B, T]``, what the encoder read.
    paths
        Of each series.
    vocabulary
        Number of tokens.
    """

    def __init__(
        self,
        graph: Graph,
        cross: Mapping[str, Array],
        observed: FloatArray,
        paths: int,
        vocabulary: int,
    ) -> None:
        rows = (len(observed), paths)
        layers = sum(name.startswith("keys_") for name in graph.inputs)
        self._past, self._step = past_names(layers), step_names(layers)
        self._position, self._slots = np.zeros((), np.int64), 0
        self._tokens, self._logits = np.zeros(rows, np.int64), _zeros(*rows, vocabulary)
        shapes = {name: graph.input_shape(name) for name in self._past}
        sizes = {name: (int(shape[2]), int(shape[4])) for name, shape in shapes.items()}
        self._states = {name: _zeros(*rows, heads, 0, d) for name, (heads, d) in sizes.items()}
        own = [_zeros(*rows, heads, 1, d) for heads, d in sizes.values()]
        self._own = dict(zip(self._step, own, strict=True))
        self._bound = graph.bound()
        self._bound.bind(
            {"tokens": self._tokens, "position": self._position, "observed": observed, **cross},
            {LOGITS: self._logits, **self._own},
        )

    def step(self, tokens: IntArray) -> FloatArray:
        """Logits ``[B, P, V]`` of what follows ``tokens`` ``[B, P]``; the next step reuses them."""
        at = int(self._position)
        if at == self._slots:
            self._add_slots()
        self._tokens[:] = tokens
        self._bound.run()
        for past, own in zip(self._past, self._step, strict=True):
            self._states[past][:, :, :, at] = self._own[own][:, :, :, 0]
        self._position += 1
        return self._logits

    def _add_slots(self) -> None:
        self._slots += _BLOCK
        more = ((0, 0), (0, 0), (0, 0), (0, _BLOCK), (0, 0))
        self._states = {name: np.pad(states, more) for name, states in self._states.items()}
        self._bound.bind(self._states, {})


def _zeros(*shape: int) -> FloatArray:
    return np.zeros(shape, np.float32)
