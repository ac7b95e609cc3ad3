"""Calibration windows, and running a model on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.batch import (
    CalibrationBatch,
    ForecastBatch,
    StreamBatch,
)
from tscompress.data.leakage import check_no_leak
from tscompress.data.multivariate import related_windows
from tscompress.data.seasonality import has_season
from tscompress.data.series import LabelledSeries, given_series
from tscompress.data.synthetic import MOSTLY_PATTERNS, CorpusConfig, FloatArray, SyntheticCorpus
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import DataError, UsageError
from tscompress.families.calibration_sizes import BY_DEFAULT
from tscompress.families.groups import group_size
from tscompress.families.registry import adapter_of, adapter_of_layers
from tscompress.io.arguments import check_type
from tscompress.io.strict import Strict

SYNTHETIC = "synthetic"
MIXED = "mixed"
#: Sources that need no file.
OWN_SOURCES = (MIXED, SYNTHETIC)

#: A window cut from a longer series has at least two patches of the models that read patches.
_SHORTEST_CUT = 32
#: At most this many times as many batches, so that each has a single length.
_MORE_BATCHES = 1.5
#: Positions in a batch: the default of :func:`small_batches`.
_STEPS_PER_BATCH = 1024


class CalibrationConfig(Strict):
    """Series that a compression is fitted on."""

    source: str = Field(
        default=MIXED,
        description=f"'{SYNTHETIC}', '{MIXED}' (half of them real series of a package), or a file "
        "of series",
    )
    num_series: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description=f"series, or windows of long ones; null: {BY_DEFAULT}",
    )
    context_length: int = Field(
        default=2048, ge=2, le=10**7, description="longest context; at most the model's"
    )
    batch_size: int = Field(default=32, ge=1, le=10**6)
    seed: int = Field(default=0, ge=0, lt=2**63)
    corpus: CorpusConfig = Field(
        default=MOSTLY_PATTERNS, description="distribution of the synthetic series"
    )
    stratify: bool = Field(
        default=True,
        description="same share for each frequency and each octave of length, with windows of long "
        "series where there are too few; false: draw at random",
    )


class _Drawn(NamedTuple):
    """A window, and the index of its series if several windows are from it."""

    window: FloatArray
    series: int = -1


def check_calibration(config: object, series: object) -> None:
    """Refuse calibration options of a wrong type.

    Raises
    ------
    UsageError
    """
    check_type("calibration", config, (CalibrationConfig, type(None)), "a CalibrationConfig")
    check_series(series)


def check_series(series: object) -> None:
    """Refuse all but series, the path of a file of them, and None; UsageError."""
    check_type(
        "series", series, (Iterable, Path, type(None)), "a list of series, or a file of them"
    )


def calibration_batches(
    loaded: LoadedModel,
    config: CalibrationConfig,
    series: Sequence[FloatArray] | str | Path | None = None,
    *,
    grouped: bool = True,
) -> list[ForecastBatch]:
    """Batches of series of similar length, from short to the longest allowed.

    Synthetic series have eight lengths; for families whose decoder has one position per series,
    shorter ones are more frequent. Real series, from a file or a package, are stratified by
    frequency and length, unless ``config.stratify`` is off: the strata take turns until
    ``num_series`` are drawn. Too few series are supplemented by windows of long ones. The last
    steps of every series are its target.

    For Chronos-2 every second batch, including the last, has groups of up to four series, which
    are made to depend on one another; of some the future is known, and they have no target.
    Without groups, group attention has a single key per query, and its queries and keys seem
    irrelevant.

    Parameters
    ----------
    series
        Series, each 1-D, or a file of them, instead of ``config.source``; a
        :class:`~tscompress.data.series.LabelledSeries` also has their frequencies.
    grouped
        Whether there are groups, if the model can take them.

    Raises
    ------
    DataError
        No series is long enough, or one is not a list of numbers.
    LeakError
        A series belongs to an evaluation suite.
    """
    family = adapter_of(loaded.family)
    count = config.num_series or family.defaults.calibration_windows
    longest = min(config.context_length, loaded.forecaster.model_context_length)
    horizon = min(loaded.forecaster.model_prediction_length, max(1, longest // 2))
    rng = np.random.default_rng(config.seed)
    own = series is None and config.source in OWN_SOURCES
    kinds: list[list[_Drawn]] = []
    if own:
        real = count // 2 if config.source == MIXED else 0
        power = family.defaults.calibration_length_power
        synthetic = _synthetic_windows(rng, config.corpus, count - real, longest + horizon, power)
        kinds.append([_Drawn(window) for window in synthetic])
        if real:
            # A test asserts that none of them belongs to an evaluation suite.
            collected = training_series(TRAINING_COLLECTIONS)
            most = min(longest + horizon, family.defaults.collection_steps or longest + horizon)
            kinds.append(_given_windows(rng, collected, real, config.stratify, most))
    else:
        given = given_series(config.source if series is None else series)
        check_no_leak(given)
        kinds.append(_given_windows(rng, given, count, config.stratify, longest + horizon))

    def split(drawn: _Drawn) -> tuple[int, int]:
        # Of short series, the last third is the target and the rest the context.
        steps = min(horizon, max(1, len(drawn.window) // 3))
        return min(longest, len(drawn.window) - steps), steps

    in_group = group_size(loaded.family, loaded.model) if grouped else 1
    batches = []
    chunks = [chunk for kind in kinds for chunk in _chunks(kind, config.batch_size, split)]
    for later, chunk in zip(reversed(range(len(chunks))), chunks, strict=True):
        batch = _batch([(one, *split(one)) for one in chunk])
        if in_group > 1 and later % 2 == 0:
            batch = _related(rng, batch, in_group)
        batches.append(batch)
    return batches


def seasonal_share(batches: Sequence[ForecastBatch]) -> float:
    """Share of the contexts with a season, see
    :func:`~tscompress.data.seasonality.has_season`.
    """
    found = [has_season(row) for batch in batches for row in batch.context.cpu().numpy()]
    return sum(found) / max(len(found), 1)


def _trim(series: FloatArray) -> FloatArray:
    observed = np.flatnonzero(np.isfinite(series))
    return series[observed[0] : observed[-1] + 1] if observed.size else series[:0]


def _chunks(
    windows: Sequence[_Drawn], batch_size: int, split: Callable[[_Drawn], tuple[int, int]]
) -> list[list[_Drawn]]:
    """Windows of each batch, by length; batches of one length need no padding and no masks."""

    def pieces(ordered: list[_Drawn]) -> list[list[_Drawn]]:
        return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]

    ordered = sorted(windows, key=split)
    filled = pieces(ordered)
    of_one_length = [piece for _, same in groupby(ordered, split) for piece in pieces(list(same))]
    return of_one_length if len(of_one_length) <= _MORE_BATCHES * len(filled) else filled


def _batch(rows: Sequence[tuple[_Drawn, int, int]]) -> ForecastBatch:
    """A batch of ``rows``: a window, and the numbers of its last steps for context and target."""
    context = np.full((len(rows), max(past for _, past, _ in rows)), np.nan, dtype=np.float32)
    target = np.full((len(rows), max(steps for *_, steps in rows)), np.nan, dtype=np.float32)
    for row, ((window, _), past, steps) in enumerate(rows):
        cut = len(window) - steps
        context[row, context.shape[1] - past :] = window[cut - past : cut]
        target[row, :steps] = window[cut:]
    return ForecastBatch(
        torch.from_numpy(context),
        torch.from_numpy(target),
        series=torch.tensor([one.series for one, *_ in rows]),
    )


def _related(rng: np.random.Generator, batch: ForecastBatch, group_size: int) -> ForecastBatch:
    """The series of a batch, related in groups."""
    windows = torch.cat([batch.context, batch.target], dim=1).numpy()
    horizon = batch.target.shape[1]
    groups = related_windows(rng, windows, horizon, group_size)
    context, target = map(
        np.ascontiguousarray, np.split(groups.series, [groups.series.shape[1] - horizon], axis=1)
    )
    return replace(groups.batch(context, target), series=batch.series)


# --------------------------------------------------------------------------------------------------
# Synthetic series
# --------------------------------------------------------------------------------------------------


def _synthetic_windows(
    rng: np.random.Generator, mixture: CorpusConfig, count: int, longest: int, power: float
) -> list[FloatArray]:
    """Synthetic series of eight lengths L from 24 to ``longest`` steps, equally spaced in log L.

    The number of each length is proportional to L^-power.
    """
    try:
        corpus = SyntheticCorpus(mixture)
    except ValueError as error:
        raise UsageError(f"calibration: {error}; give another corpus.") from None
    lengths = np.exp(np.linspace(np.log(min(24, longest)), np.log(longest), 8)).round().astype(int)
    weights = lengths.astype(float) ** -power
    shares = np.diff((count * np.cumsum(weights) / weights.sum()).round().astype(int), prepend=0)
    windows: list[FloatArray] = []
    for length, share in zip(lengths.tolist(), shares.tolist(), strict=True):
        if share:
            windows.extend(corpus.sample(rng, share, length))
    return windows


# --------------------------------------------------------------------------------------------------
# Given series
# --------------------------------------------------------------------------------------------------


class _Window(NamedTuple):
    """Steps ``start`` to ``stop`` of one series."""

    series: int
    start: int
    stop: int


def _given_windows(
    rng: np.random.Generator,
    given: Sequence[FloatArray],
    count: int,
    stratify: bool,
    longest: int,
) -> list[_Drawn]:
    """``count`` windows of the given series, or all if there are fewer."""
    known: Sequence[str | None] = [None] * len(given)
    if isinstance(given, LabelledSeries):
        known = given.frequencies
    usable = [(_trim(s), name) for s, name in zip(given, known, strict=True) if _is_usable(s)]
    if not usable:
        raise DataError("no calibration series has three observed values.")
    series = [values for values, _ in usable]
    if not stratify:
        return [_Drawn(series[pick]) for pick in rng.permutation(len(series))[:count]]

    def stratum(window: _Window) -> Hashable:
        return usable[window.series][1], int(np.log2(window.stop - window.start))

    def observed(windows: Iterable[_Window]) -> list[_Window]:
        return [w for w in windows if _is_usable(series[w.series][w.start : w.stop])]

    # Steps beyond the context length do not count as length.
    newest = [_Window(i, max(0, len(s) - longest), len(s)) for i, s in enumerate(series)]
    whole = observed(newest)
    order = _taking_turns(rng, [stratum(window) for window in whole])
    chosen = [whole[pick] for pick in order[:count]]
    missing = count - len(chosen)
    if missing:
        cuts = observed(cut for window in newest for cut in _cuts(window, longest, missing))
        order = _taking_turns(rng, [stratum(cut) for cut in cuts])
        chosen += _apart_first([cuts[pick] for pick in order], chosen, missing)
    if not chosen:
        raise DataError(f"no calibration series has three observed values in {longest} steps.")
    times = Counter(w.series for w in chosen)
    return [
        _Drawn(_trim(series[w.series][w.start : w.stop]), w.series if times[w.series] > 1 else -1)
        for w in chosen
    ]


def _is_usable(values: FloatArray) -> bool:
    return bool(np.isfinite(values).sum() >= 3)


def _taking_turns(rng: np.random.Generator, strata: Sequence[Hashable]) -> list[int]:
    """A random order whose first n, for any n, have each stratum equally often, or all of it."""
    distinct = dict.fromkeys(strata)
    turn = dict(zip(distinct, rng.permutation(len(distinct)).tolist(), strict=True))
    seen: Counter[Hashable] = Counter()
    keys = []
    for index in rng.permutation(len(strata)).tolist():
        stratum = strata[index]
        keys.append((seen[stratum], turn[stratum], index))
        seen[stratum] += 1
    return [index for *_, index in sorted(keys)]


def _cuts(newest: _Window, longest: int, limit: int) -> Iterator[_Window]:
    """Windows of a series besides the newest: of its length, half of it, a quarter and so on.

    Windows of one length do not overlap. There are at most ``limit`` of each, evenly spread.
    """
    size = min(newest.stop, longest)
    while size >= _SHORTEST_CUT:
        places = newest.stop // size
        picks = np.linspace(0, places - 1, min(places, limit + 1)).round()  # the newest is one
        for place in picks.astype(int).tolist():
            stop = newest.stop - place * size
            if (cut := _Window(newest.series, stop - size, stop)) != newest:
                yield cut
        size //= 2


def _apart_first(cuts: Sequence[_Window], taken: Sequence[_Window], count: int) -> list[_Window]:
    """The first ``count`` cuts, but those that overlap with an earlier one last."""
    used: dict[int, list[_Window]] = {}
    for window in taken:
        used.setdefault(window.series, []).append(window)
    apart: list[_Window] = []
    overlapping: list[_Window] = []
    for cut in cuts:
        if len(apart) == count:
            break
        others = used.setdefault(cut.series, [])
        if any(cut.start < other.stop and other.start < cut.stop for other in others):
            overlapping.append(cut)
        else:
            apart.append(cut)
            others.append(cut)
    return (apart + overlapping)[:count]


# --------------------------------------------------------------------------------------------------
# Running the model
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_teacher_forced(loaded: LoadedModel, batch: CalibrationBatch) -> Any:
    """One forward pass; a decoder reads the targets.

    Returns the model's output: token logits of T5, quantiles of Bolt and Chronos-2, and the
    residual stream of layers alone.

    Raises
    ------
    UnsupportedModelError
        The family is only for profiling.
    """
    model: Any = loaded.model
    device = next(model.parameters()).device
    found = adapter_of_layers(loaded.family).inputs(loaded.pipeline, batch)
    return model(**{key: x.to(device) if isinstance(x, Tensor) else x for key, x in found.items()})


def fed_positions(loaded: LoadedModel, batch: CalibrationBatch) -> Tensor | None:
    """Mask ``[B, H]`` of decoder positions with an input: the start and each observed target."""
    if isinstance(batch, StreamBatch) or not adapter_of(loaded.family).draws_samples:
        return None
    observed = torch.isfinite(batch.target)
    fed = torch.cat([torch.ones_like(observed[:, :1]), observed[:, :-1]], dim=1)
    return fed.to(next(loaded.model.parameters()).device)


def small_batches(
    loaded: LoadedModel,
    batches: Sequence[ForecastBatch],
    steps: int = _STEPS_PER_BATCH,
    *,
    trim: bool = True,
) -> list[ForecastBatch]:
    """Split batches of independent rows to at most this many positions.

    The memory of attention grows with each head and pair of positions of a batch: at 32 contexts
    of 512 it exceeds the weights of a base model. ``trim`` removes steps that no row has,
    including the position after the last target.
    """
    config: Any = loaded.model.config
    stride = config.chronos_config.get("input_patch_stride", 1)
    parts = []
    for batch in batches:
        rows = max(1, steps * stride // batch.context.shape[1])
        if batch.group_ids is not None or rows >= len(batch.context):
            parts.append(batch)
            continue
        for start in range(0, len(batch.context), rows):
            chosen = slice(start, start + rows)
            part = ForecastBatch(batch.context[chosen], batch.target[chosen])
            parts.append(_trimmed(part) if trim else part)
    # The longest first: position biases of shorter ones are corners of its bias.
    return sorted(parts, key=lambda part: -part.context.shape[1])


def _trimmed(batch: ForecastBatch) -> ForecastBatch:
    """The batch without the first and last steps that no row has."""
    context, target = batch.context, batch.target
    past, ahead = (torch.isfinite(steps).any(0).nonzero()[:, 0] for steps in (context, target))
    first = int(past[0]) if len(past) else 0
    end = int(ahead[-1]) + 1 if len(ahead) else target.shape[1]
    return ForecastBatch(context[:, first:], target[:, :end])
