"""Second moments of the inputs of Linear layers, over valid positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import fed_positions, run_teacher_forced
from tscompress.data.batch import CalibrationBatch
from tscompress.plan.architecture import Architecture


@dataclass
class Moment:
    """Second moment of one layer's input.

    Attributes
    ----------
    second
        Mean of x x^T over valid positions, float64 ``[n, n]``; zero without positions.
    count
        Number of positions.
    """

    second: Tensor
    count: int = 0

    def add(self, inputs: Tensor) -> None:
        """Update the mean with rows ``[N, n]``."""
        if not len(inputs):
            return
        rows = inputs.detach().to(torch.float64)
        total = self.count + len(rows)
        self.second += (rows.T @ rows - len(rows) * self.second) / total
        self.count = total


def collect_moments(
    loaded: LoadedModel,
    batches: Sequence[CalibrationBatch],
    names: Sequence[str],
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, Moment]:
    """Second moments of the inputs of the Linear layers ``names``.

    Padding and missing values do not count. Layers that read the same input share one
    :class:`Moment`. All hooks are removed when this returns or raises.
    """
    readers = _first_readers(loaded.architecture)
    moments: dict[str, Moment] = {}
    for name in {readers[name] for name in names}:
        linear: Any = loaded.model.get_submodule(name)
        width = linear.in_features
        zero = torch.zeros(width, width, dtype=torch.float64, device=linear.weight.device)
        moments[name] = Moment(zero)
    with _observe(loaded, moments) as validity:
        for done, batch in enumerate(batches, start=1):
            validity.decoder = fed_positions(loaded, batch)
            run_teacher_forced(loaded, batch)
            on_batch(done)
    return {name: moments[readers[name]] for name in names}


def _first_readers(architecture: Architecture) -> dict[str, str]:
    """Each projection to the first one with the same input: k and v to q, in cross-attention v to
    k; in gated feed-forwards, the second input layer to the first."""
    readers: dict[str, str] = {}
    for block, role, name in architecture.attention_projections():
        first = "k" if block.reads_encoder else next(iter(block.projections))
        shared = role in ("k", "v") or role == first
        readers[name] = block.projections[first] if shared else name
    for feed_forward, role, name in architecture.feed_forward_projections():
        readers[name] = feed_forward.projections["wi_0"] if role == "wi_1" else name
    return readers


class _Validity:
    """Mask of valid positions of the current batch, bool ``[B, S]``; None: all are valid."""

    encoder: Tensor | None = None
    decoder: Tensor | None = None

    def capture(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self.encoder = None if mask is None else mask.detach() > 0


@contextmanager
def _observe(loaded: LoadedModel, moments: dict[str, Moment]) -> Iterator[_Validity]:
    validity = _Validity()
    sides = _input_sides(loaded.architecture)
    model: Any = loaded.model
    handles = [model.encoder.register_forward_pre_hook(validity.capture, with_kwargs=True)]
    try:
        for name, moment in moments.items():
            hook = _moment_hook(moment, sides[name], validity)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
        yield validity
    finally:
        for handle in handles:
            handle.remove()


def _moment_hook(
    moment: Moment, side: str, validity: _Validity
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs: Tensor = args[0]  # [B, S, n]; group attention: [S, B, n]
        valid = validity.decoder if side == "decoder" else validity.encoder
        if valid is None:
            moment.add(inputs.flatten(0, -2))
            return
        moment.add(inputs[valid.T if side == "transposed" else valid])

    return hook


def _input_sides(architecture: Architecture) -> dict[str, str]:
    """Axes of each input: positions of the encoder, transposed or not, or of the decoder."""
    sides: dict[str, str] = {}
    for block, role, name in architecture.attention_projections():
        of_encoder = block.reads_encoder and role in ("k", "v")
        sides[name] = "encoder" if of_encoder else block.stack
        if block.across_series:
            sides[name] = "transposed"
    for feed_forward, _, name in architecture.feed_forward_projections():
        sides[name] = feed_forward.stack
    return sides
