"""What the layers of a model see: second moments of their inputs over valid positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from tscompress.architectures import Architecture
from tscompress.corpus import FloatArray, SyntheticCorpus
from tscompress.data import check_no_leak, read_series
from tscompress.errors import DataError, UnsupportedModelError
from tscompress.loading import LoadedModel

SYNTHETIC = "synthetic"


class CalibrationConfig(BaseModel):
    """Which series a model is run on before it is compressed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(default=SYNTHETIC, description=f"'{SYNTHETIC}' or a file of series")
    num_series: int = Field(default=256, ge=1)
    context_length: int = Field(
        default=512, ge=2, description="longest context; cut to the model's own"
    )
    batch_size: int = Field(default=32, ge=1)
    seed: int = 0


@dataclass(frozen=True)
class CalibrationBatch:
    """Contexts with NaN on the left where a series is shorter, and what came after them."""

    context: Tensor  # [B, T]
    target: Tensor  # [B, H]


@dataclass
class Moment:
    """Second moment of one layer's input.

    Attributes
    ----------
    second
        Mean of x x^T over valid positions, float64 ``[n, n]``; zero when nothing was seen.
    count
        Positions it was taken over.
    """

    second: Tensor
    count: int = 0

    def add(self, inputs: Tensor) -> None:
        """Take in rows ``[N, n]``."""
        if not len(inputs):
            return
        rows = inputs.detach().to(torch.float64)
        total = self.count + len(rows)
        self.second += (rows.T @ rows - len(rows) * self.second) / total
        self.count = total


def calibration_batches(
    loaded: LoadedModel,
    config: CalibrationConfig,
    series: Sequence[FloatArray] | None = None,
) -> list[CalibrationBatch]:
    """Batches of about equally long series, at lengths from short to the longest allowed.

    ``series`` overrides ``config.source``. The last steps of every series are its target.

    Raises
    ------
    DataError
        No series is long enough.
    LeakError
        A series belongs to an evaluation suite.
    """
    longest = min(config.context_length, loaded.forecaster.model_context_length)
    horizon = min(loaded.forecaster.model_prediction_length, max(1, longest // 2))
    rng = np.random.default_rng(config.seed)
    if series is None and config.source == SYNTHETIC:
        windows = _synthetic_windows(rng, config.num_series, longest + horizon)
    else:
        given = list(series) if series is not None else read_series(config.source)
        check_no_leak(given)
        windows = [w for w in map(_trim, given) if np.isfinite(w).sum() >= 3]
        if not windows:
            raise DataError("no calibration series has three observed values.")
        picks = rng.permutation(len(windows))[: config.num_series]
        windows = [windows[pick] for pick in picks]
    return list(_batches(windows, config.batch_size, longest, horizon))


def _synthetic_windows(rng: np.random.Generator, count: int, longest: int) -> list[FloatArray]:
    """Synthetic series of lengths spread evenly in the logarithm."""
    corpus = SyntheticCorpus()
    lengths = np.exp(np.linspace(np.log(min(24, longest)), np.log(longest), 8)).round().astype(int)
    share = -(-count // len(lengths))
    windows: list[FloatArray] = []
    for length in lengths:
        windows.extend(corpus.sample(rng, share, int(length)))
    return windows[:count] if share * len(lengths) == count else _thin(windows, count)


def _thin(windows: list[FloatArray], count: int) -> list[FloatArray]:
    picks = np.linspace(0, len(windows) - 1, count).round().astype(int)
    return [windows[pick] for pick in picks]


def _trim(series: FloatArray) -> FloatArray:
    observed = np.flatnonzero(np.isfinite(series))
    return series[observed[0] : observed[-1] + 1] if observed.size else series[:0]


def _batches(
    windows: Sequence[FloatArray], batch_size: int, longest: int, horizon: int
) -> Iterator[CalibrationBatch]:
    ordered = sorted(windows, key=len)
    for start in range(0, len(ordered), batch_size):
        chunk = ordered[start : start + batch_size]
        # Short series give a third of themselves as target and keep the rest as context.
        targets = [min(horizon, max(1, len(window) // 3)) for window in chunk]
        contexts = [w[: len(w) - h][-longest:] for w, h in zip(chunk, targets, strict=True)]
        context = np.full((len(chunk), max(map(len, contexts))), np.nan, dtype=np.float32)
        target = np.full((len(chunk), max(targets)), np.nan, dtype=np.float32)
        for row, (window, past, steps) in enumerate(zip(chunk, contexts, targets, strict=True)):
            context[row, context.shape[1] - len(past) :] = past
            target[row, :steps] = window[len(window) - steps :]
        yield CalibrationBatch(torch.from_numpy(context), torch.from_numpy(target))


# --------------------------------------------------------------------------------------------------
# Running the model
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_teacher_forced(loaded: LoadedModel, batch: CalibrationBatch) -> Any:
    """One forward pass with the true target fed to the decoder, where there is one.

    Returns the model's output: token logits of T5, quantiles of Bolt and Chronos-2.
    """
    model: Any = loaded.model
    device = next(model.parameters()).device
    if loaded.family == "chronos-t5":
        tokenizer: Any = loaded.forecaster.tokenizer
        input_ids, attention_mask, scale = tokenizer.context_input_transform(batch.context)
        labels, _, _ = tokenizer._input_transform(batch.target, scale=scale)
        start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
        return model(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            decoder_input_ids=torch.cat([start, labels[:, :-1]], dim=1).to(device),
        )
    if loaded.family == "chronos-bolt":
        return model(context=batch.context.to(device))
    if loaded.family == "chronos-2":
        patch = loaded.forecaster.model_output_patch_size
        return model(
            context=batch.context.to(device),
            num_output_patches=-(-batch.target.shape[1] // patch),
        )
    raise UnsupportedModelError(
        f"{loaded.name!r} is a {loaded.family} model; calibration needs a forecaster."
    )


def collect_moments(
    loaded: LoadedModel,
    batches: Sequence[CalibrationBatch],
    names: Sequence[str],
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, Moment]:
    """Second moments of the inputs of the Linear layers ``names``.

    Positions that are padding or missing do not count. Layers that read the same input share one
    :class:`Moment`. Every hook is gone when this returns or raises.
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
            validity.decoder = _fed_positions(loaded, batch)
            run_teacher_forced(loaded, batch)
            on_batch(done)
    return {name: moments[readers[name]] for name in names}


def _first_readers(architecture: Architecture) -> dict[str, str]:
    """Each projection to the first one that reads the same input: k and v to q, but in
    cross-attention v to k; gated feed-forwards, the second input layer to the first."""
    readers: dict[str, str] = {}
    for block, role, name in architecture.attention_projections():
        first = "k" if block.kind == "cross" else "q"
        shared = role in ("k", "v") or role == first
        readers[name] = block.projections[first] if shared else name
    for feed_forward, role, name in architecture.feed_forward_projections():
        readers[name] = feed_forward.projections["wi_0"] if role == "wi_1" else name
    return readers


def _fed_positions(loaded: LoadedModel, batch: CalibrationBatch) -> Tensor | None:
    """Decoder positions ``[B, H]`` that are fed a value: the start, then each observed target."""
    if loaded.family != "chronos-t5":
        return None
    observed = torch.isfinite(batch.target)
    fed = torch.cat([torch.ones_like(observed[:, :1]), observed[:, :-1]], dim=1)
    return fed.to(next(loaded.model.parameters()).device)


class _Validity:
    """Which positions of the current batch are real, bool ``[B, S]``; None: all are."""

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
    """What each input ranges over: positions of the encoder, transposed or not, or the decoder."""
    sides: dict[str, str] = {}
    for block, role, name in architecture.attention_projections():
        from_encoder = block.kind in ("encoder", "time") or (
            block.kind == "cross" and role in ("k", "v")
        )
        sides[name] = "encoder" if from_encoder else "decoder"
        if block.kind == "group":
            sides[name] = "transposed"
    for feed_forward, _, name in architecture.feed_forward_projections():
        sides[name] = "decoder" if feed_forward.name.startswith("decoder") else "encoder"
    return sides
