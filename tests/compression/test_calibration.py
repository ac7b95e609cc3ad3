"""Which series a model is run on, in which batches, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from shared_fixtures import cache_of

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.activations import collect_moments
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
    seasonal_share,
)
from tscompress.data.batch import ForecastBatch
from tscompress.data.series import LabelledSeries, read_series
from tscompress.data.synthetic import CorpusConfig, FloatArray
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import DataError, UsageError
from tscompress.families.chronos2 import Chronos2
from tscompress.families.registry import adapter_of

#: The tiny Bolt predicts 16 steps, so that a window has at most 56.
CONFIG = CalibrationConfig(source="synthetic", num_series=12, context_length=40, batch_size=4)
LONGEST = 56


@pytest.fixture(scope="module")
def bolt(checkpoints: dict[str, Path]) -> LoadedModel:
    return load(checkpoints["chronos-bolt"])


@pytest.fixture(scope="module")
def chronos2(checkpoints: dict[str, Path]) -> LoadedModel:
    return load(checkpoints["chronos-2"])


@pytest.fixture
def alone(chronos2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model of 128 steps whose series have no groups, so that windows are cuts of theirs."""
    monkeypatch.setattr(Chronos2, "group_size", 1)
    return chronos2


def constant(value: float, length: int = 30) -> FloatArray:
    return np.full(length, value, dtype=np.float32)


def noise(length: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).normal(size=length).astype(np.float32)


def changed(**changes: object) -> CalibrationConfig:
    return CONFIG.model_copy(update=changes)


def ahead(batch: ForecastBatch) -> torch.Tensor:
    """What comes after the contexts, whether it is to be forecast or known."""
    if batch.future is None:
        return batch.target
    assert not (torch.isfinite(batch.target) & torch.isfinite(batch.future)).any()
    return batch.target.where(torch.isfinite(batch.target), batch.future)


def rows(batches: Sequence[ForecastBatch]) -> list[FloatArray]:
    """Observed context and target of every row, or what is known ahead of it, as one series."""
    both = [torch.cat([b.context, ahead(b)], dim=1).numpy() for b in batches]
    return [row[np.isfinite(row)] for values in both for row in values]


def where(window: FloatArray, series: FloatArray) -> tuple[int, int]:
    """Start and stop of a window in the series it was cut from."""
    start = int(np.flatnonzero(series == window[0])[0])
    assert np.array_equal(series[start : start + len(window)], window)
    return start, start + len(window)


# --------------------------------------------------------------------------------------------------
# Strata
# --------------------------------------------------------------------------------------------------


def mixed_frequencies() -> LabelledSeries:
    names = ["D"] * 90 + ["h"] * 6 + [None] * 4
    values = {"D": 1.0, "h": 2.0, None: 3.0}
    return LabelledSeries([constant(values[name]) for name in names], names)


def drawn(loaded: LoadedModel, config: CalibrationConfig, series: list[FloatArray]) -> list[int]:
    """How many series were drawn of each value 1, 2, 3."""
    found = Counter(float(row[0]) for row in rows(calibration_batches(loaded, config, series)))
    return [found[1.0], found[2.0], found[3.0]]


def test_every_frequency_gets_the_same_share(bolt: LoadedModel) -> None:
    assert drawn(bolt, CONFIG, mixed_frequencies()) == [4, 4, 4]
    # Without strata as often as they come.
    assert drawn(bolt, changed(stratify=False), mixed_frequencies())[0] >= 9
    # Bare arrays have no frequency.
    assert drawn(bolt, CONFIG, list(mixed_frequencies()))[0] >= 9


def test_quota_of_a_small_stratum_goes_to_the_others(bolt: LoadedModel) -> None:
    assert drawn(bolt, changed(num_series=16), mixed_frequencies()) == [6, 6, 4]
    assert drawn(bolt, changed(num_series=40), mixed_frequencies()) == [30, 6, 4]


def test_fewer_draws_than_strata_take_different_ones(bolt: LoadedModel) -> None:
    seen = set()
    for seed in range(12):
        counts = drawn(bolt, changed(num_series=2, seed=seed), mixed_frequencies())
        assert sorted(counts) == [0, 1, 1]
        seen.add(tuple(counts))
    assert len(seen) == 3


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_of_the_collections_a_model_of_tokens_sees_shorter_windows(family: str) -> None:
    reads = SimpleNamespace(model_context_length=512, model_prediction_length=64)
    loaded: Any = SimpleNamespace(family=family, forecaster=reads, model=torch.nn.Identity())
    collected = training_series(TRAINING_COLLECTIONS)

    def longest(series: Sequence[FloatArray] | None) -> int:
        config = CalibrationConfig(num_series=256)
        known = joined(collected if series is None else series)
        found = rows(calibration_batches(loaded, config, series))
        observed = [row[np.isfinite(row)] for row in found if is_part_of(row, known)]
        return max(map(len, observed))

    whole = 512 + 64
    assert longest(None) == (320 if family == "chronos-t5" else whole)
    long = [values for values in collected if len(values) > whole][:8]
    assert longest(long) == whole  # what a user gives is not cut


def test_every_octave_of_length_gets_the_same_share(bolt: LoadedModel) -> None:
    # 40 and 500 steps are the same to a model that sees 56; 8 to 15 and 16 to 31 are not.
    lengths = [40, 500] * 30 + [20] * 6 + [8, 12, 15] * 2
    values = {40: 1.0, 500: 1.0, 20: 2.0}
    series = [constant(values.get(length, 3.0), length) for length in lengths]
    assert drawn(bolt, CONFIG, series) == [4, 4, 4]
    assert drawn(bolt, changed(stratify=False), series)[0] >= 8


def test_frequencies_of_a_file_are_used(bolt: LoadedModel, tmp_path: Path) -> None:
    lines = ["id,ds,y"]
    for item in range(40):
        step, value = ("D", 1) if item < 36 else ("h", 2)
        stamps = np.arange(np.datetime64("2024-01-01T00"), np.datetime64("2024-03-01T00"))
        stamps = stamps[:: 24 if step == "D" else 1][:30]
        lines += [f"{item},{stamp},{value}" for stamp in stamps]
    path = tmp_path / "series.csv"
    path.write_text("\n".join(lines))
    config = changed(source=str(path), num_series=8)
    assert drawn(bolt, config, read_series(path)) == [4, 4, 0]
    found = Counter(float(row[0]) for row in rows(calibration_batches(bolt, config)))
    assert found == {1.0: 4, 2.0: 4}


def test_the_draw_depends_on_the_seed_alone(bolt: LoadedModel) -> None:
    series = LabelledSeries([constant(v) for v in range(1, 41)], ["D", "h"] * 20)

    def values(seed: int) -> list[float]:
        return [float(r[0]) for r in rows(calibration_batches(bolt, changed(seed=seed), series))]

    assert values(0) == values(0)
    assert len(set(values(0))) == 12
    assert sorted(values(0)) != sorted(values(1))


def test_a_changed_list_has_no_labels(bolt: LoadedModel) -> None:
    series = LabelledSeries([constant(1)], ["D"])
    series.append(constant(2))
    with pytest.raises(DataError, match="2 series have 1 frequencies"):
        calibration_batches(bolt, CONFIG, series)


# --------------------------------------------------------------------------------------------------
# Windows of long series
# --------------------------------------------------------------------------------------------------


def test_a_long_series_is_cut_side_by_side_into_several_lengths(bolt: LoadedModel) -> None:
    series = noise(2000)
    found = [where(row, series) for row in rows(calibration_batches(bolt, CONFIG, [series]))]
    assert len(found) == CONFIG.num_series
    assert (2000 - LONGEST, 2000) in found
    assert {stop - start for start, stop in found} == {LONGEST}  # half of it were shorter than 32
    ordered = sorted(found)
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    # As before: the newest window alone.
    (alone,) = rows(calibration_batches(bolt, changed(stratify=False), [series]))
    assert where(alone, series) == (2000 - LONGEST, 2000)


def test_lengths_from_short_to_the_longest_the_model_sees(alone: LoadedModel) -> None:
    config = changed(num_series=24, context_length=128)
    assert alone.forecaster.model_context_length == 128
    horizon = alone.forecaster.model_prediction_length
    assert horizon == 64
    series = noise(100 * 192)
    found = [where(row, series) for row in rows(calibration_batches(alone, config, [series]))]
    lengths = Counter(stop - start for start, stop in found)
    assert set(lengths) == {192, 96, 48}
    assert max(lengths.values()) - min(lengths.values()) <= 3
    ordered = sorted(found)
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))


def test_windows_overlap_only_without_alternative(alone: LoadedModel) -> None:
    series = noise(6 * 192)
    for count, overlapping in ((5, False), (30, True)):
        config = changed(num_series=count, context_length=128)
        batches = calibration_batches(alone, config, [series])
        found = sorted(where(row, series) for row in rows(batches))
        assert len(set(found)) == count
        assert any(a[1] > b[0] for a, b in pairwise(found)) is overlapping


def test_short_cuts_of_a_series_the_model_sees_whole(alone: LoadedModel) -> None:
    series = noise(130)
    config = changed(num_series=20, context_length=128)
    found = [where(row, series) for row in rows(calibration_batches(alone, config, [series]))]
    # All there is: the whole, its halves, its quarters, the oldest steps left out.
    assert sorted(found) == sorted(
        [(0, 130), (65, 130), (0, 65), (98, 130), (66, 98), (34, 66), (2, 34)]
    )


def test_every_series_comes_before_a_second_window_of_any(bolt: LoadedModel) -> None:
    series = [noise(5000, seed=1), *(constant(value) for value in range(2, 10))]
    for count in (9, 12):
        found = rows(calibration_batches(bolt, changed(num_series=count), series))
        assert len(found) == count
        constants = [float(row[0]) for row in found if row[0] == row[1]]
        assert sorted(constants) == list(range(2, 10))


def test_gaps_are_not_windows(bolt: LoadedModel) -> None:
    series = noise(600)
    series[100:500] = np.nan
    found = rows(calibration_batches(bolt, changed(num_series=50), [series]))
    assert 1 < len(found) < 10
    assert all(len(row) >= 3 for row in found)
    # Too far apart for any window to have three.
    sparse = np.full(601, np.nan, dtype=np.float32)
    sparse[::300] = 1
    with pytest.raises(DataError, match="56 steps"):
        calibration_batches(bolt, CONFIG, [sparse])
    with pytest.raises(DataError, match="calibration series"):
        calibration_batches(bolt, CONFIG, [constant(np.nan), constant(1, length=2)])


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


def test_synthetic_batches_have_one_length_each(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    batches = calibration_batches(loaded, changed(num_series=64, batch_size=8))
    found: dict[int, int] = {}
    for batch in batches:
        assert torch.isfinite(batch.context).all()
        assert torch.isfinite(ahead(batch)).all()
        length = batch.context.shape[1]
        found[length] = found.get(length, 0) + len(batch.context)
    counts = list(found.values())
    assert sum(counts) == 64
    if loaded.family == "chronos-2":  # the first steps of groups are the past of causes
        assert (len(counts), max(found)) == (9, 36)
        return
    assert (len(counts), max(found)) == (8, 40)
    if loaded.family == "chronos-t5":
        assert set(counts) == {8}
    else:  # the decoder sees one position a series: short ones cost little
        assert counts[0] > counts[3] > counts[-1]


@pytest.mark.parametrize(("family", "count"), [("chronos-t5", 1024), ("chronos-bolt", 4096)])
def test_how_many_series_by_default(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, count: int
) -> None:
    defaults = adapter_of(family).defaults
    assert defaults.calibration_windows == count
    monkeypatch.setattr(adapter_of(family), "defaults", replace(defaults, calibration_windows=24))
    assert len(rows(calibration_batches(load(checkpoints[family]), CalibrationConfig()))) == 24


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_half_are_real_series_unless_told_otherwise(
    checkpoints: dict[str, Path], family: str
) -> None:
    loaded = load(checkpoints[family])
    mixed = rows(calibration_batches(loaded, CalibrationConfig(num_series=12, context_length=40)))
    invented = rows(calibration_batches(loaded, changed(num_series=6)))
    collected = training_series(TRAINING_COLLECTIONS)
    assert len(mixed) == 12
    assert sum(any(is_part_of(row, other) for other in invented) for row in mixed) == 6
    assert sum(is_part_of(row, joined(collected)) for row in mixed) == 6


def joined(series: Sequence[FloatArray]) -> FloatArray:
    """One series after another, with a gap behind each."""
    return np.concatenate([np.append(values, np.float32("nan")) for values in series])


def is_part_of(row: FloatArray, values: FloatArray) -> bool:
    """Whether the observed values of ``row`` are a stretch of one of the joined series."""
    observed = row[np.isfinite(row)]
    steps = len(observed)
    starts = np.flatnonzero(values[: max(0, len(values) - steps + 1)] == observed[0])
    starts = starts[values[starts + steps - 1] == observed[-1]]
    return any(np.array_equal(values[start : start + steps], observed) for start in starts)


def test_batches_break_where_the_length_changes(bolt: LoadedModel) -> None:
    series = [constant(1, 30)] * 6 + [constant(2, 45)] * 6
    shapes = [tuple(b.context.shape) for b in calibration_batches(bolt, CONFIG, series)]
    assert shapes == [(4, 20), (2, 20), (4, 30), (2, 30)]  # 4 for 3
    # Many lengths would make too many batches; those share, with NaN on the left.
    series = [constant(1, length) for length in range(20, 32)]
    batches = calibration_batches(bolt, CONFIG, series)
    assert [len(b.context) for b in batches] == [4, 4, 4]
    assert torch.isnan(batches[0].context[0, 0])


# --------------------------------------------------------------------------------------------------
# Groups
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_every_second_batch_of_chronos2_has_groups(chronos2: LoadedModel, given: bool) -> None:
    series = [noise(30, seed) for seed in range(22)] if given else None
    config = changed(num_series=22, batch_size=6)
    batches = calibration_batches(chronos2, config, series)
    assert len(batches) == 4
    assert [batch.group_ids is not None for batch in batches] == [False, True, False, True]
    for batch in batches[1::2]:
        assert batch.group_ids is not None
        assert batch.group_ids.dtype == torch.long
        assert_groups(batch, 4)


def assert_groups(batch: ForecastBatch, size: int) -> None:
    """Contiguous groups; none crosses a multiple of ``size``, each has something to forecast."""
    assert batch.group_ids is not None
    assert batch.future is not None
    ids = batch.group_ids.unique_consecutive()
    assert ids.tolist() == list(range(len(ids)))
    blocks = torch.arange(len(batch)) // size
    assert all(len(blocks[batch.group_ids == group].unique()) == 1 for group in ids)
    told = torch.isfinite(batch.future).any(1)
    assert not (told & torch.isfinite(batch.target).any(1)).any()
    for group in ids:
        assert not told[batch.group_ids == group].all()


def test_most_of_the_series_in_groups_have_company(chronos2: LoadedModel) -> None:
    batches = calibration_batches(chronos2, changed(num_series=256, batch_size=32))
    grouped = [batch for batch in batches if batch.group_ids is not None]
    sizes = torch.cat([batch.group_ids.unique_consecutive(return_counts=True)[1]  # type: ignore
                       for batch in grouped])  # fmt: skip
    assert set(sizes.tolist()) == {1, 2, 3, 4}
    assert float(sizes[sizes > 1].sum() / sizes.sum()) > 0.6
    told = torch.cat([torch.isfinite(b.future).any(1) for b in grouped if b.future is not None])
    assert 0.05 < float(told.float().mean()) < 0.5


def test_a_single_batch_has_groups(chronos2: LoadedModel) -> None:
    (batch,) = calibration_batches(chronos2, changed(num_series=3))
    assert_groups(batch, 4)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_other_families_have_no_groups(checkpoints: dict[str, Path], family: str) -> None:
    loaded = load(checkpoints[family])
    assert all(b.group_ids is None for b in calibration_batches(loaded, CONFIG))


def test_groups_reach_the_model(chronos2: LoadedModel) -> None:
    """Queries and keys of group attention matter in groups, and only there."""
    batch = ForecastBatch(torch.randn(4, 48), torch.randn(4, 16))
    alone = ForecastBatch(batch.context, batch.target, torch.arange(4))
    together = ForecastBatch(batch.context, batch.target, torch.zeros(4, dtype=torch.long))

    def outputs(kind: ForecastBatch) -> torch.Tensor:
        quantiles: torch.Tensor = run_teacher_forced(chronos2, kind).quantile_preds
        return quantiles

    before = {kind: outputs(batch) for kind, batch in (("alone", alone), ("together", together))}
    torch.testing.assert_close(outputs(batch), before["alone"])
    assert not torch.allclose(before["alone"], before["together"])
    name = "encoder.block.0.layer.1.self_attention.q"
    layer: Any = chronos2.model.get_submodule(name)
    weight = layer.weight
    original = weight.data.clone()
    try:
        weight.data *= -2
        torch.testing.assert_close(outputs(alone), before["alone"])
        assert not torch.allclose(outputs(together), before["together"])
    finally:
        weight.data = original


def test_covariates_known_ahead_reach_their_group(chronos2: LoadedModel) -> None:
    """Or what reads known steps of the future would be fitted to none."""
    batches = calibration_batches(chronos2, changed(num_series=64, batch_size=16))
    told = torch.zeros(0, dtype=torch.bool)
    for batch in batches:
        if batch.group_ids is None:
            assert batch.future is None
            continue
        assert batch.future is not None
        told = torch.isfinite(batch.future).any(1)
        helped = torch.isin(batch.group_ids, batch.group_ids[told])
        without = replace(batch, future=None)
        known, unknown = (
            run_teacher_forced(chronos2, one).quantile_preds for one in (batch, without)
        )
        changed_rows = (known != unknown).flatten(1).any(1)
        assert changed_rows[helped].all()
        torch.testing.assert_close(known[~helped], unknown[~helped])
    assert told.any()


def test_moments_of_groups_count_every_row(chronos2: LoadedModel) -> None:
    batches = calibration_batches(chronos2, CONFIG)
    names = [name for _, _, name in chronos2.architecture.attention_projections()]
    moments = collect_moments(chronos2, batches, names)
    assert len({moment.count for moment in moments.values()}) == 1
    assert all(torch.isfinite(moment.second).all() for moment in moments.values())


# --------------------------------------------------------------------------------------------------
# Running the model
# --------------------------------------------------------------------------------------------------


def test_t5_allocates_no_cache(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoints["chronos-t5"])
    batch = calibration_batches(loaded, CONFIG)[0]
    output = run_teacher_forced(loaded, batch)
    assert cache_of(output) is None
    model: Any = loaded.model
    forward = model.forward

    def cached(**kwargs: Any) -> Any:
        return forward(**{**kwargs, "use_cache": True})

    monkeypatch.setattr(model, "forward", cached)
    with_cache = run_teacher_forced(loaded, batch)
    assert cache_of(with_cache) is not None
    torch.testing.assert_close(output.logits, with_cache.logits)


def test_corpus_decides_on_synthetic_series(bolt: LoadedModel) -> None:
    patterns = CorpusConfig(
        kernel_weight=0, structural_weight=0, stochastic_weight=0, count_weight=0, seasonal_weight=1
    )
    walks = CorpusConfig(
        kernel_weight=0, structural_weight=0, stochastic_weight=1, count_weight=0, real_weight=0
    )
    shares = [
        seasonal_share(calibration_batches(bolt, changed(num_series=64, corpus=corpus)))
        for corpus in (patterns, walks)
    ]
    assert shares[0] > shares[1] + 0.2


def test_a_corpus_of_nothing_is_refused(bolt: LoadedModel) -> None:
    kinds = ("kernel", "structural", "stochastic", "count", "real")
    nothing = CorpusConfig.model_validate({f"{kind}_weight": 0 for kind in kinds})
    with pytest.raises(UsageError, match=r"calibration: .*; give another corpus"):
        calibration_batches(bolt, CalibrationConfig(source="synthetic", corpus=nothing))
    with pytest.raises(ValidationError, match="seasonal_periods"):
        CorpusConfig(seasonal_periods=(12, 0))
