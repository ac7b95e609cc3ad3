"""The synthetic corpus: reproducible, well-formed, and every option does something."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tscompress.data.synthetic import (
    CorpusConfig,
    FloatArray,
    SyntheticCorpus,
    count_series,
    kernel_compositions,
    seasonal_series,
    stochastic_series,
    structural_series,
    trend_series,
)

PLAIN: dict[str, Any] = {
    "kernel_weight": 0,
    "structural_weight": 0,
    "stochastic_weight": 0,
    "count_weight": 0,
    "real_weight": 0,
    "mixup_probability": 0,
    "shift_probability": 0,
    "outlier_probability": 0,
}
REAL = [np.arange(10, dtype=np.float32) + 1, np.sin(np.arange(300, dtype=np.float32)) + 5]


def draw(seed: int = 0, count: int = 64, length: int = 96, **config: Any) -> FloatArray:
    corpus = SyntheticCorpus(CorpusConfig(**config), REAL)
    return corpus.sample(np.random.default_rng(seed), count, length)


def same(first: FloatArray, second: FloatArray) -> bool:
    return np.array_equal(first, second, equal_nan=True)


@pytest.fixture(autouse=True)
def _each_draw_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests take a copy of what was drawn before with the same seed."""
    monkeypatch.setattr(SyntheticCorpus, "sample", inspect.unwrap(SyntheticCorpus.sample))


def test_the_seed_decides() -> None:
    assert same(draw(seed=1), draw(seed=1))
    assert not same(draw(seed=1), draw(seed=2))


@pytest.mark.parametrize("length", [2, 3, 7, 64, 513])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_shape_dtype_and_missing_values(count: int, length: int) -> None:
    series = draw(count=count, length=length)
    assert series.shape == (count, length)
    assert series.dtype == np.float32
    assert not np.isinf(series).any()
    missing = np.isnan(series)
    assert np.array_equal(missing, np.logical_and.accumulate(missing, axis=1))  # left padding
    assert not missing[:, -1].any()


def test_without_real_series_nothing_is_missing() -> None:
    series = SyntheticCorpus().sample(np.random.default_rng(0), 2000, 128)
    assert np.isfinite(series).all()


@pytest.mark.parametrize(
    "family", [kernel_compositions, structural_series, stochastic_series, count_series]
)
def test_families_draw_lively_finite_series(family: Any) -> None:
    series = family(np.random.default_rng(0), 400, 200)
    assert series.shape == (400, 200)
    assert series.dtype == np.float32
    assert np.isfinite(series).all()
    assert (series.std(axis=1) > 0).mean() > 0.95
    assert len(np.unique(series.round(3), axis=0)) > 380


@pytest.mark.parametrize("length", [16, 64, 200])
def test_repeated_patterns_repeat(length: int) -> None:
    """Within noise and trend: differences one period apart are small for most of them."""
    config = CorpusConfig(seasonal_periods=(7,), seasonal_extras=False)
    series = seasonal_series(np.random.default_rng(0), 400, length, config)
    assert series.shape == (400, length)
    assert series.dtype == np.float32
    # Trends are lines or damped lines: second differences a period apart take out the former.
    twice = series[:, 14:] - 2 * series[:, 7:-7] + series[:, :-14]
    share = np.abs(twice).mean(axis=1) / np.abs(np.diff(series)).mean(axis=1)
    assert np.median(share) < 0.25
    assert (share < 1e-2).mean() > 0.1  # some have no noise at all


def test_repeated_patterns_are_shown_twice() -> None:
    """A period that does not fit twice is not drawn where another is."""
    rng = np.random.default_rng(0)
    config = CorpusConfig(seasonal_periods=(4, 48), seasonal_extras=False)
    series = seasonal_series(rng, 300, 60, config)
    apart = np.abs(series[:, 8:] - 2 * series[:, 4:-4] + series[:, :-8]).mean(axis=1)
    assert (apart < np.abs(np.diff(series)).mean(axis=1)).mean() > 0.95


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_share_of_repeated_patterns_without_noise(share: float) -> None:
    config = CorpusConfig(seasonal_periods=(7,), seasonal_extras=False, seasonal_noise_free=share)
    series = seasonal_series(np.random.default_rng(0), 400, 70, config)
    twice = series[:, 14:] - 2 * series[:, 7:-7] + series[:, :-14]
    steps = np.abs(np.diff(series)).mean(axis=1)
    # A damped trend is left over by second differences; the least noise is 0.01 of the pattern.
    silent = np.abs(twice - twice.mean(axis=1, keepdims=True)).mean(axis=1) / steps < 2e-3
    assert silent.mean() == pytest.approx(0.85 * share, abs=0.15 * share + 1e-9)


def test_trends_have_nothing_else_in_them() -> None:
    series = trend_series(np.random.default_rng(0), 200, 96)
    time = np.linspace(-1, 1, 96)
    fit = np.polynomial.polynomial.polyfit(time, series.T, 5)
    left = series - np.polynomial.polynomial.polyval(time, fit)
    assert (left.std(axis=1) < 0.25 * series.std(axis=1)).all()
    assert np.median(left.std(axis=1) / series.std(axis=1)) < 0.05
    assert 0.3 < (series[:, -1] > series[:, 0]).mean() < 0.7  # rises and falls


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_weight", 2.0),
        ("structural_weight", 2.0),
        ("stochastic_weight", 2.0),
        ("count_weight", 2.0),
        ("real_weight", 2.0),
        ("trend_weight", 2.0),
        ("seasonal_weight", 2.0),
        ("seasonal_periods", (7,)),
        ("seasonal_extras", False),
        ("seasonal_noise_free", 0.0),
        ("noise_scale", 0.1),
        ("seasonal_share", 0.0),
        ("longest_period", 0.1),
        ("mixup_probability", 0.9),
        ("shift_probability", 0.9),
        ("outlier_probability", 0.9),
    ],
)
def test_every_field_changes_the_draw(field: str, value: Any) -> None:
    some = {"seasonal_weight": 0.5}  # or their options change nothing
    assert not same(draw(**some), draw(**(some | {field: value})))


def test_the_table_above_has_every_field() -> None:
    marks = test_every_field_changes_the_draw.pytestmark  # type: ignore[attr-defined]
    (table,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    assert {field for field, _ in table} == set(CorpusConfig.model_fields)


@pytest.mark.parametrize(
    ("field", "family"),
    [
        ("kernel_weight", kernel_compositions),
        ("stochastic_weight", stochastic_series),
        ("count_weight", count_series),
    ],
)
def test_a_single_weight_draws_that_family_only(field: str, family: Any) -> None:
    rng = np.random.default_rng(3)
    rng.multinomial(16, [1 / 6] * 6)  # the corpus draws the mixture first
    alone = draw(seed=3, count=16, **(PLAIN | {field: 1}))
    expected = family(np.random.default_rng(3), 16, 96)
    assert alone.shape == expected.shape
    if field == "count_weight":
        assert np.array_equal(alone, np.round(alone))
        assert (alone >= 0).all()


def test_weights_are_shares() -> None:
    series = draw(count=4000, length=32, **(PLAIN | {"count_weight": 1, "kernel_weight": 3}))
    whole = (series == np.round(series)).all(axis=1)
    assert whole.mean() == pytest.approx(0.25, abs=0.03)


def test_real_windows_are_stretches_of_the_series_padded_on_the_left() -> None:
    series = draw(length=40, **(PLAIN | {"real_weight": 1}))
    for window in series:
        observed = window[np.isfinite(window)]
        places = [
            np.lib.stride_tricks.sliding_window_view(values, len(observed))
            for values in REAL
            if len(values) >= len(observed)
        ]
        assert any((windows == observed).all(axis=1).any() for windows in places)


def test_real_weight_without_series_counts_for_nothing() -> None:
    with pytest.raises(ValueError, match="weight"):
        SyntheticCorpus(CorpusConfig(**(PLAIN | {"real_weight": 1})))


def test_noiseless_seasons_are_periodic() -> None:
    """Second differences over a season vanish when season and line are all there is."""
    config = CorpusConfig(noise_scale=0.0, seasonal_share=1.0)
    noisy = CorpusConfig(noise_scale=1.0, seasonal_share=1.0)

    def repeating(config: CorpusConfig) -> float:
        series = structural_series(np.random.default_rng(0), 400, 400, config)
        scaled = (series - series.mean(axis=1, keepdims=True)) / series.std(axis=1, keepdims=True)
        hits = np.zeros(len(scaled), dtype=bool)
        for period in (4, 7, 12, 24, 48, 52, 60):
            once = scaled[:, period:] - scaled[:, :-period]
            twice = once[:, period:] - once[:, :-period]
            hits |= np.median(np.abs(twice), axis=1) < 1e-3
        return float(hits.mean())

    assert repeating(config) > 0.15
    assert repeating(noisy) < 0.03


def test_seasonal_share_is_a_share_of_seasonal_series() -> None:
    def wiggling(share: float) -> float:
        config = CorpusConfig(noise_scale=0.0, seasonal_share=share)
        series = structural_series(np.random.default_rng(0), 400, 200, config)
        turns = np.diff(np.sign(np.diff(series, axis=1)), axis=1) != 0
        return float((turns.sum(axis=1) > 80).mean())

    assert wiggling(0.0) < wiggling(0.5) < wiggling(1.0)


def test_longest_period_folds_long_seasons() -> None:
    def lag_correlation(longest: float | None) -> float:
        config = CorpusConfig(noise_scale=0.0, seasonal_share=1.0, longest_period=longest)
        series = structural_series(np.random.default_rng(0), 600, 96, config)
        bends = np.abs(np.diff(series, n=2, axis=1)).mean(axis=1) / series.std(axis=1)
        return float(np.median(bends))

    assert lag_correlation(0.1) > lag_correlation(None)


def test_corruptions_hit_about_the_asked_share() -> None:
    base = draw(count=1000, **(PLAIN | {"kernel_weight": 1}))
    for field, share in (("shift_probability", 0.5), ("outlier_probability", 0.5)):
        changed = draw(count=1000, **(PLAIN | {"kernel_weight": 1, field: share}))
        rows = (changed != base).any(axis=1).mean()
        # One in a hundred steps is an outlier, so some of the chosen series have none.
        assert 0.2 < rows < 0.55, field


def test_mixed_series_keep_left_padding_and_finite_scale() -> None:
    series = draw(**(PLAIN | {"real_weight": 1, "kernel_weight": 1, "mixup_probability": 1}))
    assert not np.isnan(series[:, -1]).any()
    assert np.nanmax(np.abs(series)) < 100  # every part was divided by its mean magnitude


@pytest.mark.parametrize(
    "change",
    [{"kernel_weight": -1}, {"seasonal_share": 1.5}, {"longest_period": 0}, {"noise": 1}],
)
def test_values_out_of_range_and_unknown_keys(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CorpusConfig(**change)


def test_windows_in_a_gap_are_no_warning() -> None:
    gap = np.full(400, np.nan, dtype=np.float32)
    gap[:8], gap[-8:] = 1, 2
    config = CorpusConfig(**PLAIN | {"real_weight": 1, "shift_probability": 1,
                                     "outlier_probability": 1})  # fmt: skip
    corpus = SyntheticCorpus(config, [gap])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        series = corpus.sample(np.random.default_rng(0), 64, 40)
    assert np.isnan(series).all(axis=1).any()
