"""Chronos-T5: paths of tokens, drawn one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tscompress.errors import UsageError
from tscompress.runtime.contexts import stacked, univariate
from tscompress.runtime.decoding import Paths
from tscompress.runtime.forecaster import Forecaster, positive_integer
from tscompress.runtime.graph import Graph
from tscompress.runtime.quantiles import DEFAULT_LEVELS, FloatArray, empirical
from tscompress.runtime.record import Record, positive
from tscompress.runtime.sampling import Sampling, drawn
from tscompress.runtime.t5_names import (
    DECODER_FILE,
    ENCODER_FILE,
    LOGITS,
    cross_names,
    past_names,
    step_names,
)
from tscompress.runtime.tokens import IntArray, UniformBins

#: Tokens ``[N]`` of logits ``[N, V]``, one path after the other, of one series after the other.
Choose: TypeAlias = Callable[[FloatArray], IntArray]


class ChronosT5Forecaster(Forecaster):
    """Forecasts of an exported Chronos-T5.

    Attributes
    ----------
    tokenizer
        Values as tokens, and back.
    vocabulary
        Number of tokens.
    """

    continues_from = "median"

    def __init__(self, directory: Path, record: Record, threads: int | None) -> None:
        super().__init__(directory, record, threads)
        self.tokenizer = UniformBins(record.settings)
        self.vocabulary = int(record.config["vocab_size"])
        self.start = int(record.config["decoder_start_token_id"])
        self.encoder = Graph(directory, record, ENCODER_FILE, self.threads)
        self.decoder = Graph(directory, record, DECODER_FILE, self.threads)
        layers = _decoder_layers(record)
        # Of a latent there is one for all layers.
        cross = cross_names(layers if cross_names(layers)[-1] in self.encoder.outputs else 1)
        self.encoder.check_names(("tokens", "observed"), cross)
        self.decoder.check_names(
            ("tokens", "position", "observed", *past_names(layers), *cross),
            (LOGITS, *step_names(layers)),
        )

    @staticmethod
    def check_settings(record: Record) -> None:
        settings = record.settings
        for name in ("prediction_length", "num_samples"):
            positive(settings[name], name)
        UniformBins.check(settings)
        if int(record.config["vocab_size"]) < int(settings["n_tokens"]):
            raise ValueError("vocab_size")
        positive(_decoder_layers(record), "num_decoder_layers")
        if not 0 <= int(record.config["decoder_start_token_id"]) < int(record.config["vocab_size"]):
            raise ValueError("decoder_start_token_id")
        for name in ("temperature", "top_k", "top_p"):
            float(settings[name])

    def predict(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        num_samples: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        limit_prediction_length: bool = False,
        *,
        seed: int | None = None,
        uniforms: npt.ArrayLike | None = None,
        batch_size: int = 32,
    ) -> FloatArray:
        """Sample paths.

        Parameters
        ----------
        contexts
            ``[T]``, ``[B, T]`` or a sequence of ``[T_i]``; missing values are NaN.
        prediction_length
            Steps to forecast, H; None: those of one call. Beyond one call, the median of the paths
            becomes the context, as in the stock pipeline.
        num_samples
            Paths of each series, P. This, ``temperature``, ``top_k`` and ``top_p`` are the config's
            where they are None; a ``top_k`` of 0 keeps all tokens.
        limit_prediction_length
            Refuse a ``prediction_length`` beyond one call, instead of a warning.
        seed
            Of the random numbers; None: others in each call.
        uniforms
            The random numbers themselves, ``[B, P, H]``, from 0 to below 1.
        batch_size
            Series that are decoded together; forecasts depend on it by rounding, those of an int8
            graph more, whose scale of activations is that of all its series.

        Returns
        -------
        ndarray
            ``[B, P, H]``.

        Raises
        ------
        UsageError, DataError
            See :meth:`predict_quantiles`.
        """
        if limit_prediction_length:
            self._refuse_beyond_one_call(prediction_length)
        steps = self.checked_length(prediction_length)
        settings = self.record.settings
        sampling = Sampling.of(settings, temperature=temperature, top_k=top_k, top_p=top_p)
        given = settings["num_samples"] if num_samples is None else num_samples
        paths = positive_integer(given, "num_samples")
        size = positive_integer(batch_size, "batch_size")
        context = stacked(univariate(contexts, self.context_length), self.context_length)
        numbers = _random_numbers((len(context), paths, steps), seed, uniforms)
        found = []
        for first in range(0, len(context), size):
            rows = slice(first, first + size)
            choose = _InOrder(sampling, numbers[rows])
            found.append(self.forecast(context[rows], steps, paths, choose))
        return np.concatenate(found)

    def predict_quantiles(
        self,
        contexts: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = DEFAULT_LEVELS,
        **options: Any,
    ) -> tuple[FloatArray, FloatArray]:
        """Quantiles ``[B, H, Q]`` of the paths, and their mean ``[B, H]``.

        Parameters
        ----------
        options
            Of :meth:`predict`: ``num_samples``, ``temperature``, ``top_k``, ``top_p``, ``seed``,
            ``uniforms``, ``limit_prediction_length``, ``batch_size``.

        Raises
        ------
        UsageError
            A level, the length or an option is out of range, or ``contexts`` of a wrong type.
        DataError
            A series is empty, all NaN, or not numeric.
        """
        levels = self.checked_levels(quantile_levels)
        paths = self.predict(contexts, prediction_length, **options).swapaxes(1, 2)  # [B, H, P]
        return empirical(paths, levels), paths.mean(axis=-1)

    def forecast(self, context: FloatArray, steps: int, paths: int, choose: Choose) -> FloatArray:
        """Paths ``[B, P, steps]`` of contexts ``[B, T]``, which are not checked.

        Parameters
        ----------
        choose
            The next tokens, called once a step.
        """
        found: list[FloatArray] = []
        while (done := sum(one.shape[-1] for one in found)) < steps:
            if found:
                ordered = np.sort(found[-1], axis=1)
                context = np.concatenate([context, ordered[:, (paths - 1) // 2]], axis=-1)
            ahead = min(steps - done, self.prediction_length)
            found.append(self._call(context, ahead, paths, choose))
        return np.concatenate(found, axis=-1)

    def logits(self, context: FloatArray, tokens: IntArray) -> FloatArray:
        """Logits ``[B, P, N, V]`` after the start and each of the given tokens but the last.

        Parameters
        ----------
        context
            ``[B, T]``, NaN where missing.
        tokens
            ``[B, P, N]``, those of each path.
        """
        decoded, _ = self._decoded(context, tokens.shape[1])
        before = np.concatenate([np.full_like(tokens[..., :1], self.start), tokens[..., :-1]], -1)
        steps = [decoded.step(before[..., step]).copy() for step in range(tokens.shape[2])]
        return np.stack(steps, axis=2)

    def _call(self, context: FloatArray, steps: int, paths: int, choose: Choose) -> FloatArray:
        decoded, scale = self._decoded(context, paths)
        tokens = np.full((len(context), paths, steps + 1), self.start, np.int64)
        for step in range(steps):
            logits = decoded.step(tokens[..., step])
            chosen = choose(logits.reshape(-1, logits.shape[-1]))
            tokens[..., step + 1] = chosen.reshape(logits.shape[:2])
        return self.tokenizer.values(tokens[..., 1:], scale)

    def _decoded(self, context: FloatArray, paths: int) -> tuple[Paths, FloatArray]:
        """Paths before their first token, and the scale ``[B]``; each series is encoded once."""
        read = self.tokenizer.tokens(context)
        cross = self.encoder.all_outputs(tokens=read.tokens, observed=read.observed)
        return Paths(self.decoder, cross, read.observed, paths, self.vocabulary), read.scale

    def _refuse_beyond_one_call(self, prediction_length: int | None) -> None:
        longest = self.prediction_length
        steps = longest if prediction_length is None else prediction_length
        if positive_integer(steps, "prediction_length") > longest:
            raise UsageError(
                f"prediction_length is {steps}, and one call has {longest} steps; forecast fewer, "
                "or leave limit_prediction_length out."
            )


class _InOrder:
    """Tokens by random numbers ``[B, P, H]``, those of the next step in each call."""

    def __init__(self, sampling: Sampling, numbers: npt.NDArray[np.float64]) -> None:
        self.sampling, self.numbers, self.step = sampling, numbers, 0

    def __call__(self, logits: FloatArray) -> IntArray:
        numbers = self.numbers[..., self.step].reshape(-1)
        self.step += 1
        return drawn(self.sampling, logits, numbers)


def _random_numbers(
    shape: tuple[int, int, int], seed: int | None, given: npt.ArrayLike | None
) -> npt.NDArray[np.float64]:
    if given is None:
        if seed is not None and (
            isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0
        ):
            raise UsageError(f"seed is {seed!r}; give an integer from 0, or None.")
        return np.random.default_rng(seed).random(shape)
    if seed is not None:
        raise UsageError("seed and uniforms are given; give one of them.")
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise UsageError(
            f"uniforms is a {type(given).__name__} that is no array of numbers; give {list(shape)} "
            "(series, paths, steps) from 0 to below 1."
        ) from None
    if numbers.shape != shape or not ((numbers >= 0) & (numbers < 1)).all():
        raise UsageError(
            f"uniforms has the shape {numbers.shape}; give {list(shape)} (series, paths, steps) "
            "of numbers from 0 to below 1."
        )
    return numbers


def _decoder_layers(record: Record) -> int:
    found = record.config.get("num_decoder_layers") or record.config["num_layers"]
    return int(found)
