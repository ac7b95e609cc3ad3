"""Synthetic series that were drawn before are copied: most tests draw the same few."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from tscompress.data.synthetic import FloatArray, SyntheticCorpus

#: Draws that are remembered, and values of a draw beyond which it is made each time.
_MOST, _MOST_VALUES = 512, 2**17

_Sample = Callable[[SyntheticCorpus, np.random.Generator, int, int], FloatArray]


def drawn_once(sample: _Sample) -> _Sample:
    """``SyntheticCorpus.sample`` that copies what it drew with a generator in the same state, which
    is left in the state that it had then."""
    drawn: OrderedDict[str, tuple[FloatArray, object]] = OrderedDict()

    @functools.wraps(sample)
    def draw_or_copy(
        corpus: SyntheticCorpus, rng: np.random.Generator, batch_size: int, length: int
    ) -> FloatArray:
        if corpus.real_series or batch_size * length > _MOST_VALUES:
            return sample(corpus, rng, batch_size, length)
        state = rng.bit_generator.state
        key = repr((state, corpus.config.model_dump(), batch_size, length))
        if key not in drawn:
            found = sample(corpus, rng, batch_size, length)
            drawn[key] = found.copy(), rng.bit_generator.state
            if len(drawn) > _MOST:
                drawn.popitem(last=False)
            return found
        drawn.move_to_end(key)
        found, after = drawn[key]
        rng.bit_generator.state = copy.deepcopy(after)
        return found.copy()

    return draw_or_copy
