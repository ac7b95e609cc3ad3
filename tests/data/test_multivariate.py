"""Groups of dependent series: reproducible, well-formed, of the relations asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from tscompress.data.multivariate import (
    Groups,
    GroupsConfig,
    draw_groups,
    driven_windows,
    led_windows,
    related,
    related_windows,
)
from tscompress.data.synthetic import CorpusConfig, SyntheticCorpus

RELATIONS = ("driven", "events", "mixed", "leading", "cointegrated", "unrelated", "calendar")
NOISE = CorpusConfig(
    kernel_weight=0,
    structural_weight=0,
    count_weight=0,
    real_weight=0,
    mixup_probability=0,
    shift_probability=0,
    outlier_probability=0,
)
REAL = [np.arange(10, dtype=np.float32) + 1, np.sin(np.arange(300, dtype=np.float32)) + 5]


def only(relation: str, **changes: Any) -> GroupsConfig:
    weights = {f"{name}_weight": float(name == relation) for name in RELATIONS}
    return GroupsConfig.model_validate({"share": 1.0, **weights, **changes})


def draw(
    config: GroupsConfig, seed: int = 0, count: int = 120, corpus: CorpusConfig = NOISE
) -> Groups:
    rng = np.random.default_rng(seed)
    return draw_groups(rng, SyntheticCorpus(corpus, REAL), count, 160, config)


def correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def best_lag(leader: NDArray[Any], follower: NDArray[Any], longest: int) -> tuple[int, float]:
    """The lag with the highest absolute correlation, and that."""
    found = [
        abs(correlation(leader[: len(leader) - lag], follower[lag:])) for lag in range(longest + 1)
    ]
    return int(np.argmax(found)), max(found)


@pytest.mark.parametrize("relation", RELATIONS)
def test_groups_are_well_formed(relation: str) -> None:
    groups = draw(only(relation), corpus=CorpusConfig())
    assert groups.series.shape == (120, 160)
    assert groups.series.dtype == np.float32
    assert not np.isinf(groups.series).any()
    missing = np.isnan(groups.series)
    assert np.array_equal(missing, np.logical_and.accumulate(missing, axis=1))  # left padding
    steps = np.diff(groups.group_ids)
    assert set(steps.tolist()) <= {0, 1}
    sizes = np.bincount(groups.group_ids)
    assert sizes.max() <= 6
    for group in range(len(sizes)):
        assert not groups.known[groups.group_ids == group].all()


def test_the_seed_decides() -> None:
    first, again, other = (draw(GroupsConfig(), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.series, again.series, equal_nan=True)
    assert np.array_equal(first.known, again.known)
    assert not np.array_equal(first.series, other.series, equal_nan=True)


def test_share_and_size_of_groups() -> None:
    alone = draw(GroupsConfig(share=0.0))
    assert np.bincount(alone.group_ids).tolist() == [1] * 120
    assert not alone.known.any()
    pairs = draw(only("mixed", largest=2))
    assert np.bincount(pairs.group_ids).tolist() == [2] * 60


def test_known_futures_follow_the_share() -> None:
    assert not draw(only("driven", known_share=0.0)).known.any()
    sizes = np.bincount(draw(only("driven", known_share=1.0)).group_ids)
    known = draw(only("driven", known_share=1.0)).known
    assert known.sum() == (sizes - 1).sum()  # all but the driven series


def test_a_leading_series_is_followed_after_its_lag() -> None:
    groups = draw(only("leading", largest=2, longest_lag=10), count=400)
    leaders, followers = groups.series[1::2], groups.series[0::2]
    found = [best_lag(a, b, 10) for a, b in zip(leaders, followers, strict=True)]
    copies = [lag for lag, strength in found if strength > 0.9999]  # of nothing else
    assert len(copies) > 10
    assert set(copies) <= set(range(2, 11))
    assert len(set(copies)) > 3


def test_lags_of_what_leads_can_be_given() -> None:
    groups = draw(only("leading", largest=2, least_share=1.0, leading_lags=(3, 8)), count=200)
    pairs = zip(groups.series[1::2], groups.series[0::2], strict=True)
    found = [lag for lag, strength in (best_lag(*pair, 10) for pair in pairs) if strength > 0.9999]
    assert len(found) > 50
    assert set(found) == {3, 8}


def test_leaders_of_noise_do_not_tell_their_next_step() -> None:
    for share, least, most in ((1.0, 0.0, 0.3), (0.0, 0.5, 1.0)):
        groups = draw(only("leading", largest=2, white_leader_share=share), count=200)
        next_step = [abs(correlation(row[:-1], row[1:])) for row in groups.series[1::2]]
        assert least < np.median(next_step) < most


def longest_span(flag: NDArray[Any]) -> int:
    """Steps of the longest span of what a flag marks, the rarer of its two values."""
    rare = flag if flag.mean() < 0.5 else 1 - flag
    ends = np.flatnonzero(np.diff(np.concatenate([[0], rare, [0]])))
    return int((ends[1::2] - ends[::2]).max(initial=0))


def test_flags_of_a_calendar_mark_a_season_or_spells() -> None:
    groups = draw(only("calendar", largest=2), count=600)
    assert not groups.known[0::2].any()
    below, spans = [], []
    for series, flag in zip(groups.series[0::2], groups.series[1::2], strict=True):
        assert set(np.unique(flag)) <= {0.0, 1.0}
        rare = flag if flag.mean() < 0.5 else 1 - flag
        gaps = set(np.diff(np.flatnonzero(rare)).tolist())
        if len(gaps) == 1 and gaps <= {4, 5, 7, 12, 24}:
            marked = series[rare == 1].mean() - series[rare == 0].mean()
            below.append(float(marked / series.std()))
        else:
            spans.append(longest_span(flag))
    assert 60 < len(below) < 140  # of 300 flags
    assert np.median(below) < -0.4  # the series has the season that the flag tells
    assert sum(3 <= span <= 9 for span in spans) > 20
    assert sum(span > 20 for span in spans) > 20


def test_a_driver_explains_its_series() -> None:
    # Of two series with a linear effect at once, the correlation is the root of the share.
    groups = draw(only("driven", largest=2, longest_lag=1), count=400)
    strengths = [
        best_lag(groups.series[row + 1], groups.series[row], 1)[1] for row in range(0, 400, 2)
    ]
    unrelated = draw(only("unrelated", largest=2, longest_lag=1), count=400)
    others = [
        best_lag(unrelated.series[row + 1], unrelated.series[row], 1)[1] for row in range(0, 400, 2)
    ]
    assert np.median(strengths) > np.median(others) + 0.2


def test_events_are_marks_that_repeat_two_values() -> None:
    groups = draw(only("events", largest=3))
    first = np.flatnonzero(np.diff(groups.group_ids, prepend=-1))
    marks = np.delete(groups.series, first, axis=0)
    assert all(len(np.unique(row)) <= 2 for row in marks)


def test_cointegrated_series_share_a_walk() -> None:
    groups = draw(only("cointegrated", largest=2))
    found = [
        abs(correlation(groups.series[row], groups.series[row + 1])) for row in range(0, 120, 2)
    ]
    assert np.median(found) > 0.6


@pytest.mark.parametrize(
    "changes",
    [{"share": 1.5}, {"largest": 1}, {"longest_lag": 0}, {"sizes": 3}, {"leading_lags": (25,)}],
)
def test_bounds_of_a_config(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        GroupsConfig.model_validate(changes)


def test_a_config_without_relations_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        draw(GroupsConfig.model_validate({f"{name}_weight": 0 for name in RELATIONS}))


#: The easiest of all: one driver known ahead, at the same step, and nothing else.
EASY = {
    "largest": 2,
    "lagged_share": 0.0,
    "nonlinear_share": 0.0,
    "least_share": 1.0,
    "known_share": 1.0,
}


def driven_pairs(**changes: Any) -> list[float]:
    """Correlations of driven series with their only driver."""
    series = draw(only("driven", **EASY | changes), count=200).series
    return [correlation(*pair) for pair in zip(series[0::2], series[1::2], strict=True)]


def test_a_driver_alone_says_all() -> None:
    found = np.array(driven_pairs())
    assert np.abs(found).min() > 0.999
    assert 0.2 < (found < 0).mean() < 0.7
    assert min(driven_pairs(positive=True)) > 0.999


def test_lags_effects_and_own_variance_are_shares_of_the_driven() -> None:
    for changes in ({"lagged_share": 1.0}, {"nonlinear_share": 1.0}, {"least_share": 0.2}):
        assert np.median(np.abs(driven_pairs(**changes))) < 0.99


def test_drivers_of_noise_do_not_tell_their_next_step() -> None:
    for share, most in ((1.0, 0.3), (0.0, 1.0)):
        drivers = draw(only("driven", **EASY, white_share=share), count=200).series[1::2]
        next_step = [abs(correlation(row[:-1], row[1:])) for row in drivers]
        assert np.median(next_step) < most
        assert max(next_step) < most
    assert np.median(next_step) > 0.5  # of those that are series of the corpus


def test_groups_stay_within_their_block() -> None:
    rng = np.random.default_rng(0)
    windows = rng.standard_normal((50, 90)).astype(np.float32)
    groups = related(rng, windows, GroupsConfig(share=1.0, largest=6), block=4)
    assert groups.series.shape == (50, 90 - 24)
    for group in np.unique(groups.group_ids):
        rows = np.flatnonzero(groups.group_ids == group)
        assert rows[0] // 4 == rows[-1] // 4


def test_missing_values_stay_where_they_are() -> None:
    rng = np.random.default_rng(0)
    windows = (100 + rng.standard_normal((40, 80))).astype(np.float32)
    windows[::3, :50] = np.nan
    windows[1::3, 40:44] = np.nan
    windows[7] = np.nan
    groups = related_windows(rng, windows, 16, 4)
    assert groups.series.shape == (40, 80 - 16)
    assert np.array_equal(np.isnan(groups.series), np.isnan(windows[:, 16:]))


def walks(count: int = 300) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(count, 120)).cumsum(1).astype(np.float32)


def first_and_last(groups: Groups) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The first and the last row of each group, ``[B]`` each."""
    changes = np.diff(groups.group_ids) > 0
    return np.append([True], changes), np.append(changes, [True])


def test_driven_windows_have_drivers_known_ahead() -> None:
    groups = driven_windows(np.random.default_rng(1), walks(), 16)
    sizes = np.bincount(groups.group_ids)
    assert set(sizes[:-1].tolist()) == {1, 2, 3, 4, 5, 6}  # alone at the end of a block
    first, _ = first_and_last(groups)
    assert np.array_equal(groups.known, ~first)
    drivers = groups.series[groups.known]
    correlated = [np.corrcoef(row[1:], row[:-1])[0, 1] for row in drivers if len(set(row)) > 2]
    assert len(correlated) < len(drivers)  # the others are events
    assert abs(float(np.mean(correlated))) < 0.05


def test_led_windows_have_a_leader_of_noise_at_their_end() -> None:
    groups = led_windows(np.random.default_rng(1), walks(), 16)
    assert not groups.known.any()
    _, last = first_and_last(groups)
    followed = 0
    for row in np.flatnonzero(~last):
        leader = groups.series[np.flatnonzero(last & (np.arange(len(last)) > row))[0]]
        assert abs(correlation(leader[1:], leader[:-1])) < 0.4
        followed += best_lag(leader, groups.series[row], 24)[1] > 0.5
    assert followed > 0.4 * (~last).sum()


def test_short_windows_are_led_by_one_step() -> None:
    for past in (3, 4, 6, 7, 8):
        groups = led_windows(np.random.default_rng(0), walks(40)[:, : past + 4], 4)
        assert groups.series.shape == (40, past + 4 - max(1, past // 4))


def test_drivers_of_related_windows_may_be_white() -> None:
    """Smooth series stay smooth but for drivers, which nothing else in their group tells."""
    steps = np.arange(200)
    windows = np.stack([np.sin(steps / (20 + k)) for k in range(80)]).astype(np.float32)

    def noisy(share: float) -> float:
        groups = related_windows(
            np.random.default_rng(1), windows, 16, 4, GroupsConfig(share=0.8, white_share=share)
        )
        rows = groups.series - groups.series.mean(axis=1, keepdims=True)
        following = (rows[:, 1:] * rows[:, :-1]).sum(axis=1) / (rows**2).sum(axis=1)
        return float((np.abs(following) < 0.3).mean())

    assert noisy(0.0) < 0.1 < noisy(0.5) < noisy(1.0)
