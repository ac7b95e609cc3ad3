"""Which windows a model is run on before it is compressed, and how it is run on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.batch import ForecastBatch
from tscompress.data.leakage import check_no_leak
from tscompress.data.seasonality import has_season
from tscompress.data.series import LabelledSeries, given_series
from tscompress.data.synthetic import MOSTLY_PATTERNS, CorpusConfig, FloatArray, SyntheticCorpus
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import DataError, UnsupportedModelError
from tscompress.families.registry import adapter_of

SYNTHETIC = "synthetic"
MIXED = "mixed"
#: What needs no file.
OWN_SOURCES = (MIXED, SYNTHETIC)

#: A window cut from a longer series has at least two patches of the models that read patches.
_SHORTEST_CUT = 32
#: Batches of a single length are worth this many times as many batches.
_MORE_BATCHES = 1.5
#: Of the model, in a batch: the default of :func:`small_batches`.
_STEPS_PER_BATCH = 1024


class CalibrationConfig(BaseModel):
    """Which series a model is run on before it is compressed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        default=MIXED,
        description=f"'{SYNTHETIC}', '{MIXED}', of which half are real series from a wheel, or a "
        "file of series",
    )
    num_series: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="series, or windows of long ones; null: 256 for Chronos-T5, 4096 for the "
        "others, whose decoder sees one position a series",
    )
    context_length: int = Field(
        default=2048, ge=2, le=10**7, description="longest context; cut to the model's own"
    )
    batch_size: int = Field(default=32, ge=1, le=10**6)
    seed: int = Field(default=0, ge=0, lt=2**63)
    corpus: CorpusConfig = Field(
        default=MOSTLY_PATTERNS, description="of which the synthetic series are drawn"
    )
    stratify: bool = Field(
        default=True,
        description="give each frequency and each octave of length the same share of the series, "
        "and cut long series where there are too few; else draw at random",
    )


class _Drawn(NamedTuple):
    """A window, and the number of its series if others are of it, too."""

    window: FloatArray
    series: int = -1


def calibration_batches(
    loaded: LoadedModel,
    config: CalibrationConfig,
    series: Sequence[FloatArray] | str | Path | None = None,
) -> list[ForecastBatch]:
    """Batches of about equally long series, at lengths from short to the longest allowed.

    Synthetic series come in eight lengths, for families whose decoder sees one position a series
    the more of a length the shorter it is. Real series, of a file or a wheel, are stratified by
    frequency and length, unless ``config.stratify`` is off: the strata take turns until
    ``num_series`` are drawn, and where the series do not suffice, windows of long ones are added.
    The last steps of every series are its target.

    For Chronos-2 every second batch, the last among them, is made of groups of four: without,
    group attention sees a single key a query, and all its queries and keys would seem irrelevant.
    The last of each four is a covariate that is known ahead; it has no target.

    Parameters
    ----------
    series
        Series, each 1-D, or a file of them, instead of ``config.source``; a
        :class:`~tscompress.data.series.LabelledSeries` also knows their frequencies.

    Raises
    ------
    DataError
        No series is long enough, or one is no list of numbers.
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
            # A test holds that none of them is of an evaluation suite.
            collected = training_series(TRAINING_COLLECTIONS)
            most = min(longest + horizon, family.defaults.collection_steps or longest + horizon)
            kinds.append(_given_windows(rng, collected, real, config.stratify, most))
    else:
        given = given_series(config.source if series is None else series)
        check_no_leak(given)
        kinds.append(_given_windows(rng, given, count, config.stratify, longest + horizon))

    def split(drawn: _Drawn) -> tuple[int, int]:
        # Short series give a third of themselves as target and keep the rest as context.
        steps = min(horizon, max(1, len(drawn.window) // 3))
        return min(longest, len(drawn.window) - steps), steps

    batches = []
    chunks = [chunk for kind in kinds for chunk in _chunks(kind, config.batch_size, split)]
    for later, chunk in zip(reversed(range(len(chunks))), chunks, strict=True):
        group_size = family.group_size if later % 2 == 0 else 1
        if group_size > 1 and own:
            related = _related(rng, [one.window for one in chunk], group_size)
            chunk = [_Drawn(window) for window in related]
        batches.append(_batch([(one, *split(one)) for one in chunk], group_size))
    return batches


def seasonal_share(batches: Sequence[ForecastBatch]) -> float:
    """Share of the contexts that hold a season, see
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
    """Windows of the batches, by length; batches of one length need neither padding nor masks."""

    def pieces(ordered: list[_Drawn]) -> list[list[_Drawn]]:
        return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]

    ordered = sorted(windows, key=split)
    filled = pieces(ordered)
    of_one_length = [piece for _, same in groupby(ordered, split) for piece in pieces(list(same))]
    return of_one_length if len(of_one_length) <= _MORE_BATCHES * len(filled) else filled


def _batch(rows: Sequence[tuple[_Drawn, int, int]], group_size: int) -> ForecastBatch:
    """``rows`` are windows and how many of their last steps are context, and then target."""
    context = np.full((len(rows), max(past for _, past, _ in rows)), np.nan, dtype=np.float32)
    target = np.full((len(rows), max(steps for *_, steps in rows)), np.nan, dtype=np.float32)
    for row, ((window, _), past, steps) in enumerate(rows):
        cut = len(window) - steps
        context[row, context.shape[1] - past :] = window[cut - past : cut]
        target[row, :steps] = window[cut:]
    batch = ForecastBatch(
        torch.from_numpy(context),
        torch.from_numpy(target),
        series=torch.tensor([one.series for one, *_ in rows]),
    )
    return replace(batch, **in_groups(batch.target, group_size)) if group_size > 1 else batch


def in_groups(target: Tensor, group_size: int) -> dict[str, Tensor]:
    """``target``, ``group_ids`` and ``future`` of a batch of series that attend to each other.

    The last of each group is a covariate that is known ahead: what came is its ``future``, and it
    has no target.
    """
    numbers = torch.arange(len(target))
    covariate = (numbers % group_size == group_size - 1)[:, None]
    nothing = torch.full_like(target, torch.nan)
    return {
        "target": target.where(~covariate, nothing),
        "group_ids": numbers // group_size,
        "future": target.where(covariate, nothing),
    }


# --------------------------------------------------------------------------------------------------
# Synthetic series
# --------------------------------------------------------------------------------------------------


def _synthetic_windows(
    rng: np.random.Generator, mixture: CorpusConfig, count: int, longest: int, power: float
) -> list[FloatArray]:
    """Synthetic series of eight lengths L from 24 to ``longest`` steps, a step apart in log L.

    As many of each length as L^-power says; 0: equally many.
    """
    corpus = SyntheticCorpus(mixture)
    lengths = np.exp(np.linspace(np.log(min(24, longest)), np.log(longest), 8)).round().astype(int)
    weights = lengths.astype(float) ** -power
    shares = np.diff((count * np.cumsum(weights) / weights.sum()).round().astype(int), prepend=0)
    windows: list[FloatArray] = []
    for length, share in zip(lengths.tolist(), shares.tolist(), strict=True):
        if share:
            windows.extend(corpus.sample(rng, share, length))
    return windows


def _related(
    rng: np.random.Generator, windows: Sequence[FloatArray], group_size: int
) -> list[FloatArray]:
    """Each window mixed with those of its group that are as long: convex, in its own unit."""
    related: list[FloatArray] = []
    for first in range(0, len(windows), group_size):
        group = windows[first : first + group_size]
        for window in group:
            members = np.stack(
                [w[-len(window) :] for w in group if len(w) >= len(window)]
            )  # [m, L]
            magnitude = np.maximum(np.nanmean(np.abs(members), axis=1), 1e-12)
            share = rng.dirichlet(np.ones(len(members)))
            unit = np.nanmean(np.abs(window)) or 1.0
            related.append((unit * (share / magnitude) @ members).astype(np.float32))
    return related


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
    """``count`` windows of the given series, or as many as they yield."""
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

    # What the model cannot see of a series does not make it longer.
    newest = [_Window(i, max(0, len(s) - longest), len(s)) for i, s in enumerate(series)]
    whole = observed(newest)
    order = _taking_turns(rng, [stratum(window) for window in whole])
    chosen = [whole[pick] for pick in order[:count]]
    missing = count - len(chosen)
    if missing:
        cuts = observed(cut for window in newest for cut in _cuts(window, longest, missing))
        order = _taking_turns(rng, [stratum(cut) for cut in cuts])
        chosen += _apart_first([cuts[pick] for pick in order], chosen)[:missing]
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
    """A random order of which any first n hold each stratum equally often, or all of it."""
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
    """Windows of a series besides the newest, of its length, half of it, a quarter and so on.

    Those of one length lie side by side, and at most ``limit`` of a length come, spread evenly.
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


def _apart_first(cuts: Sequence[_Window], taken: Sequence[_Window]) -> list[_Window]:
    """``cuts`` in order, but after all others those that share steps with one before them."""
    used: dict[int, list[_Window]] = {}
    for window in taken:
        used.setdefault(window.series, []).append(window)
    apart, overlapping = [], []
    for cut in cuts:
        others = used.setdefault(cut.series, [])
        if any(cut.start < other.stop and other.start < cut.stop for other in others):
            overlapping.append(cut)
        else:
            apart.append(cut)
            others.append(cut)
    return apart + overlapping


# --------------------------------------------------------------------------------------------------
# Running the model
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_teacher_forced(loaded: LoadedModel, batch: ForecastBatch) -> Any:
    """One forward pass with the true target fed to the decoder, where there is one.

    Returns the model's output: token logits of T5, quantiles of Bolt and Chronos-2.

    Raises
    ------
    UnsupportedModelError
        The model does not forecast.
    """
    model: Any = loaded.model
    device = next(model.parameters()).device
    found = adapter_of(loaded.family).inputs(loaded.forecaster, batch)
    return model(**{key: x.to(device) if isinstance(x, Tensor) else x for key, x in found.items()})


@torch.no_grad()
def drawn_continuations(
    loaded: LoadedModel, batches: Sequence[ForecastBatch], seed: int = 0
) -> list[ForecastBatch]:
    """The shorter half of the contexts, each followed by a path that the model itself draws.

    Forecasting, the decoder of Chronos-T5 reads its own samples, which the true continuation of a
    series need not look like. The paths are as long as the model's horizon; with short contexts
    they cost little, and the decoder is what they are for. The global random state is left as it
    was.

    Raises
    ------
    UnsupportedModelError
        The model does not sample.
    """
    if not adapter_of(loaded.family).draws_samples:
        raise UnsupportedModelError(f"a {loaded.family} model draws no paths.")
    forecaster: Any = loaded.forecaster
    device = next(loaded.model.parameters()).device
    shortest_first = sorted(batches, key=lambda batch: batch.context.shape[1])
    missing = sum(len(batch.context) for batch in batches) // 2
    drawn: list[ForecastBatch] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for batch in shortest_first:
            if missing <= 0:
                break
            paths = forecaster.predict(batch.context, num_samples=1)  # [B, 1, H]
            drawn.append(ForecastBatch(batch.context, paths[:, 0].to(batch.target.dtype)))
            missing -= len(batch.context)
    return drawn


def fed_positions(loaded: LoadedModel, batch: ForecastBatch) -> Tensor | None:
    """Decoder positions ``[B, H]`` that are fed a value: the start, then each observed target."""
    if not adapter_of(loaded.family).draws_samples:
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
    """The same rows in batches of at most so many positions, where rows do not see each other.

    Attention takes memory for each head and pair of positions of a batch: for a model of base size
    more than its weights, at 32 contexts of 512. With ``trim`` they lose the steps that no row has,
    and with these the position after the last target.
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
    # The longest first: position biases of shorter ones are corners of theirs.
    return sorted(parts, key=lambda part: -part.context.shape[1])


def _trimmed(batch: ForecastBatch) -> ForecastBatch:
    """Without the steps on the left, and the last ones, that no row has."""
    context, target = batch.context, batch.target
    past, ahead = (torch.isfinite(steps).any(0).nonzero()[:, 0] for steps in (context, target))
    first = int(past[0]) if len(past) else 0
    end = int(ahead[-1]) + 1 if len(ahead) else target.shape[1]
    return ForecastBatch(context[:, first:], target[:, :end])
