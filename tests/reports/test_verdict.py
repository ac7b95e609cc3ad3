"""The verdict: each case of what can be measured, and none that says more than the intervals.

Whole sentences are in ``test_messages``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tscompress.benchmark.results import BenchResult, ModelBench
from tscompress.benchmark.workload import Workload
from tscompress.evaluation.comparison import (
    Comparison,
    DatasetComparison,
    ModelComparison,
    Ratio,
    compare_results,
    few_series,
)
from tscompress.evaluation.fidelity import Calibration, DatasetFidelity, Fidelity
from tscompress.evaluation.results import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.io.text import counted, listed, percent, rounded_count
from tscompress.plan.layer_plans import HiddenPlan
from tscompress.plan.plan import Plan
from tscompress.probing.results import (
    CovariateChange,
    GroupChange,
    ProbeComparison,
    TaskChange,
)
from tscompress.probing.skill import Estimate
from tscompress.reports.terms import MEANINGS, spelled_out
from tscompress.reports.verdict import Verdict, make_verdict

MARGIN = 0.005
Ends = tuple[float | None, float | None]
PLAN = Plan(
    family="chronos-bolt",
    method="fold",
    hidden=(
        HiddenPlan(name="ff", part="feed_forward", in_features=4, out_features=4, d_ff=8, kept=2),
    ),
)


def scores(count: int = 40, *, windows: int | None = None, large: int = 0) -> EvaluationResult:
    """Of one dataset; ``large`` series have nearly all of the loss."""
    losses = np.ones(count)
    losses[:large] = 1e6
    columns = SeriesContributions(
        quantile_loss=tuple(losses),
        absolute_label=tuple(losses),
        scaled_error=(1.0,) * count,
        scaled_steps=(1,) * count,
    )
    row = DatasetScore(
        dataset="sales", model="m", MASE=1, WQL=1, series_count=count, seconds=1, series=columns,
        windows=windows,
    )  # fmt: skip
    return EvaluationResult(suite="sales.csv", model="m", rows=(row,))


def comparison_of(
    wql: Ends, mase: Ends, ratio: float = 1.012, datasets: tuple[DatasetComparison, ...] = ()
) -> Comparison:
    """With these ends of the intervals."""

    def one(ends: Ends) -> Ratio:
        known = None not in ends
        return Ratio(ratio=sum(ends) / 2 if known else ratio, low=ends[0], high=ends[1])  # type: ignore[arg-type]

    model = ModelComparison(
        model="small", WQL=one(wql), MASE=one(mase), verdicts=(), datasets=datasets
    )
    return Comparison(
        reference="m", models=(model,), confidence=0.95, margin=MARGIN, resamples=2000, seed=0
    )


def bench_of(milliseconds: float, noise: float = 0.01) -> BenchResult:
    """A second model of so many milliseconds, and the first of ten."""
    models = tuple(
        ModelBench(
            name=name,
            latencies_ms=tuple(time * (1 + noise * (-1) ** turn) for turn in range(10)),
            batch_size=1,
            parameters=parameters,
            parameter_bytes=4 * parameters,
            kv_cache_bytes=0,
            bytes_on_disk=None,
            macs=None,
            memory=None,
        )
        for name, time, parameters in (("m", 10.0, 1000), ("small", milliseconds, 364))
    )
    return BenchResult(Workload(), models, 1, "cpu", "2")


def probe_of(kept: float | None, **tasks: tuple[float, float]) -> ProbeComparison:
    """A share kept, and tasks with the skill before and after."""
    changes = tuple(
        TaskChange(
            name=name.replace("_", "-"),
            group="seasons",
            original=before,
            compressed=after,
            kept=Estimate(value=after / before),
            change="lost" if after < 0.95 * before else "kept",
        )
        for name, (before, after) in tasks.items()
    )
    share = None if kept is None else Estimate(value=kept, low=kept - 0.01, high=kept + 0.01)
    count = len(changes)
    group = GroupChange(
        group="seasons", able=count, tasks=count, original=1, compressed=kept, kept=share
    )
    return ProbeComparison(
        compressed="small", original="m", kept=share, groups=(group,), tasks=changes
    )


def verdict(
    wql: Ends = (0.996, 1.004),
    mase: Ends = (0.997, 1.003),
    datasets: tuple[DatasetComparison, ...] = (),
    **changes: Any,
) -> Verdict:
    """On 40 series of the user's, if not said otherwise."""
    given = {"original": scores(), "own_series": True, **changes}
    return make_verdict(PLAN, comparison=comparison_of(wql, mase, datasets=datasets), **given)


@pytest.mark.parametrize(
    ("wql", "mase", "level", "says", "never"),
    [
        ((0.996, 1.004), (0.997, 1.003), "good", "no measurable loss", "ruled out"),
        ((0.99, 1 + MARGIN), (0.99, 1.0), "good", "no measurable loss", "ruled out"),
        ((0.99, 1.00501), (0.99, 1.0), "unsure", "up to 0.6% cannot be ruled out", "measurable"),
        ((1.0, 1.0), (1.0, 1.0), "good", "same scores", "loss"),
        ((1.0, 1.0), (1.0, 1.001), "good", "no measurable loss", "same"),
        ((0.97, 0.99), (0.996, 1.004), "good", "WQL is 1 to 3% better", "MASE"),
        ((1.01, 1.03), (0.996, 1.004), "loss", "WQL is 1 to 3% worse", "MASE"),
        ((1.01, 1.03), (0.98, 0.99), "loss", "MASE is 1 to 2% better", "no measurable"),
        ((0.97, 0.99), (0.96, 1.05), "unsure", "though MASE may be up to 5% worse", "ruled out"),
        ((0.9, 1.0), (0.9, 1.0), "good", "no measurable loss", "better"),
        ((1.0, 1.03), (0.996, 1.004), "unsure", "up to 3% cannot be ruled out", "worse"),
        ((1.001, 1 + MARGIN), (0.996, 1.004), "loss", "slightly worse", "no measurable"),
        ((1.001, 1.006), (0.996, 1.004), "loss", "worse on", "slightly"),
        ((1.0001, 1.0004), (0.996, 1.004), "loss", "WQL is less than 0.1% worse", "MASE"),
        ((0.99, 1.031), (0.99, 1.02), "unsure", "up to 3.1% cannot be ruled out", "worse"),
        ((0.8, 1.25), (0.99, 1.02), "unsure", "no clear change", "no measurable"),
        ((None, None), (None, None), "unsure", "too few to tell", "no measurable"),
        ((1.01, 1.03), (None, None), "loss", "WQL is 1 to 3% worse", "too few"),
        ((0.97, 0.99), (None, None), "unsure", "too few to tell", "better on"),
    ],
)  # fmt: skip
def test_forecasts_are_judged_by_their_intervals(
    wql: Ends, mase: Ends, level: str, says: str, never: str
) -> None:
    found = verdict(wql, mase)
    assert found.level == level
    assert says.lower() in found.clauses[0].lower()
    assert never not in found.clauses[0]
    assert "your 40 series" in found.clauses[0]
    assert ("recover" in " ".join(found.advice)) == (level == "loss")
    assert ("--windows" in " ".join(found.advice)) == (level == "unsure")


@pytest.mark.parametrize(
    "few",
    [scores(8), scores(200, large=2), scores(80, windows=10), scores(40, windows=40)],
)
def test_few_series_never_make_a_good_verdict(few: EvaluationResult) -> None:
    found = verdict(original=few)
    assert found.level == "unsure"
    assert "few" in found.clauses[0]
    assert "no measurable" not in found.clauses[0]
    assert any("more series" in line for line in found.advice)
    assert not any("--windows" in line for line in found.advice)
    assert any(few_series(few).values()) == (few.rows[0].cluster_count > 1)


def test_windows_are_not_counted_as_series() -> None:
    assert "your 20 series" in verdict(original=scores(60, windows=3)).sentence
    assert "your one series" in verdict(original=scores(40, windows=40)).sentence
    assert "40 series of sales" in verdict(own_series=False).sentence


def test_missing_measurements_are_named() -> None:
    found = make_verdict(PLAN)
    assert found.level == "unknown"
    assert "not scored" in found.sentence
    assert "25% of the feed-forward parameters" in found.sentence
    assert "speed and skills were not measured" in found.sentence
    assert "not measured" not in verdict(bench=bench_of(5), probe=probe_of(1.0)).sentence
    assert "speed was not" in verdict(probe=probe_of(1.0)).sentence
    assert "skills were not" in verdict(bench=bench_of(5)).sentence


@pytest.mark.parametrize(
    ("milliseconds", "noise", "says"),
    [
        (3.0, 0.01, "3.3 times as fast"),
        (9.5, 0.01, "1.05 times as fast"),
        (0.05, 0.01, "200 times as fast"),
        (20.0, 0.01, "takes 2 times as long"),
        (10.0, 0.01, "no measurable change in speed"),
        (9.97, 1e-5, "no measurable change in speed"),
    ],
)
def test_speed(milliseconds: float, noise: float, says: str) -> None:
    found = verdict(bench=bench_of(milliseconds, noise))
    assert says in found.sentence
    assert "36% of the parameters" in found.sentence


def test_lost_skills_are_named_once_a_period() -> None:
    tasks = {
        "period_48": (0.9, 0.7),
        "period_48_noise_0.1": (0.9, 0.6),
        "period_52": (0.9, 0.1),
        "linear_trend": (0.9, 0.9),
    }
    found = verdict(probe=probe_of(0.9, **tasks))
    assert "keeps 90% of what the probe measures" in found.sentence
    assert "most of period 52 and some of period 48" in found.sentence
    assert "linear" not in found.sentence
    assert not verdict(probe=probe_of(0.999)).advice
    assert "nothing could be lost" in verdict(probe=probe_of(None)).sentence


def test_lost_use_of_covariates_is_a_clause() -> None:
    change = CovariateChange(
        name="promotions", original=0.8, compressed=0.2, kept=Estimate(value=0.25), change="lost"
    )
    told = {"covariates_kept": Estimate(value=0.25), "covariates": (change,)}
    lost = probe_of(1.0).model_copy(update=told)
    assert "keeps 25% of what covariates add" in verdict(probe=lost).sentence
    assert verdict(probe=lost).level == "loss"
    assert ", but covariates are used less well" in verdict(probe=lost).clauses[0]
    kept = lost.model_copy(update={"covariates": (change.model_copy(update={"change": "kept"}),)})
    assert "covariates" not in verdict(probe=kept).sentence


@pytest.mark.parametrize(
    ("left", "much"), [(0.449, "most of period 48"), (0.45, "some of period 48")]
)
def test_most_of_a_skill_is_lost_below_half_of_it(left: float, much: str) -> None:
    assert f"loses {much}" in verdict(probe=probe_of(0.9, period_48=(0.9, left))).sentence


@pytest.mark.parametrize(
    ("kept", "lost", "says"),
    [
        (0.994, False, "keeps 99% of"),
        (0.995, False, "keeps all of"),
        (1.2, False, "keeps all of"),
        (0.996, True, "keeps nearly all of"),
        (-0.2, True, "keeps nothing of"),
    ],
)
def test_skill_kept(kept: float, lost: bool, says: str) -> None:
    tasks = {"period_48": (0.9, 0.7 if lost else 0.9)}
    assert says in verdict(probe=probe_of(kept, **tasks)).clauses[-2]


@pytest.mark.parametrize(
    ("wql", "joint"), [((0.996, 1.004), "but"), ((1.01, 1.03), "and"), ((0.9, 1.1), "and")]
)
def test_a_verdict_is_not_good_beside_lost_skills(wql: Ends, joint: str) -> None:
    found = verdict(wql, probe=probe_of(0.96, period_48=(0.9, 0.7), gaps=(0.9, 0.9)))
    assert found.level == "loss"
    assert f", {joint} 1 of the 2 tasks of the probe got worse" in found.clauses[0]
    assert any("recover" in line for line in found.advice)
    alone = make_verdict(PLAN, probe=probe_of(0.96, period_48=(0.9, 0.7)))
    assert alone.level == "loss"
    assert "not scored, and the one task of the probe got worse" in alone.clauses[0]
    assert verdict(wql, probe=probe_of(1.0, gaps=(0.9, 0.9))).level == verdict(wql).level


@pytest.mark.parametrize(
    ("low", "named"), [(1.0049, False), (1 + MARGIN, False), (1.0051, True), (None, False)]
)
@pytest.mark.parametrize("wql", [(0.996, 1.004), (0.97, 0.99), (0.9, 1.1)])
def test_a_dataset_that_got_worse_is_named(wql: Ends, low: float | None, named: bool) -> None:
    high = None if low is None else low + 0.02
    worse = DatasetComparison(
        dataset="traffic",
        series_count=20,
        WQL=Ratio(ratio=0.99, low=0.98, high=1.0),
        MASE=Ratio(ratio=1.01, low=low, high=high),
    )
    found = verdict(wql, datasets=(worse,))
    assert ("but MASE is 0.5 to 2.5% worse on traffic" in found.clauses[0]) == named
    assert ("traffic" in found.clauses[0]) == named
    if named:
        assert found.level == "unsure"


def suite(factors: dict[str, float], counts: dict[str, int], spread: float) -> EvaluationResult:
    """Datasets of 20 series, or of ``counts``; losses are those of others times the factor."""
    rows = []
    for index, (dataset, factor) in enumerate(factors.items()):
        count = counts.get(dataset, 20)
        noise = np.random.default_rng(index).normal(1, spread, count) if spread else 1.0
        losses = tuple(np.random.default_rng(index).uniform(1, 2, count) * noise * factor)
        columns = SeriesContributions(
            quantile_loss=losses,
            absolute_label=(1.0,) * count,
            scaled_error=losses,
            scaled_steps=(1,) * count,
        )
        score = float(np.mean(losses))
        rows.append(
            DatasetScore(
                dataset=dataset, model="m", MASE=score, WQL=score, series_count=count, seconds=1,
                series=columns,
            )
        )  # fmt: skip
    return EvaluationResult(suite="own", model="m", rows=tuple(rows))


TWENTY = [f"d{index}" for index in range(20)]


@pytest.mark.parametrize(
    ("others", "one", "counts", "level", "says"),
    [
        (1.0, 1.0, {}, "good", "no measurable loss on 400 series of 20 datasets"),
        (0.99, 1.15, {}, "unsure", "% worse on d7"),
        (1.0, 1.6, {}, "loss", "worse, and WQL is 5"),
        (
            1.0,
            1.5,
            {"d3": 1},
            "unsure",
            "of d3 to tell a loss from chance, but WQL is 4",
        ),
        (1.0, 1.5, {"d7": 1}, "unsure", "too few of d7 to tell a loss from chance"),
    ],
)
def test_a_loss_in_one_dataset_of_twenty_is_named(
    others: float, one: float, counts: dict[str, int], level: str, says: str
) -> None:
    original = suite(dict.fromkeys(TWENTY, 1.0), counts, 0)
    compressed = suite({**dict.fromkeys(TWENTY, others), "d7": one}, counts, 0.02)
    found = make_verdict(
        PLAN,
        comparison=compare_results([original, compressed]),
        original=original,
        own_series=False,
    )
    assert found.level == level
    assert says.lower() in found.clauses[0].lower()
    assert ("worse on d7" in found.clauses[0]) == (one > 1 and counts.get("d7") != 1)


def test_a_loss_alike_in_all_datasets_names_none() -> None:
    original = suite(dict.fromkeys(TWENTY, 1.0), {}, 0)
    compressed = suite(dict.fromkeys(TWENTY, 1.1), {}, 0.002)
    found = make_verdict(
        PLAN, comparison=compare_results([original, compressed]), original=original
    )
    assert found.level == "loss"
    assert "on d" not in found.clauses[0]


@pytest.mark.parametrize("counts", [{}, {"sales": 1}])
def test_scores_without_series_have_that_reason(counts: dict[str, int]) -> None:
    given = suite({"sales": 1.0}, counts, 0)
    if not counts:
        rows = tuple(row.model_copy(update={"series": None}) for row in given.rows)
        given = given.model_copy(update={"rows": rows})
    found = make_verdict(PLAN, comparison=compare_results([given, given]), original=given)
    assert found.level == "unsure"
    assert ("without scores of each series" in found.clauses[0]) == (not counts)
    assert ("1 series of sales, too few to tell" in found.clauses[0]) == bool(counts)


def fidelity_of(before: float, after: float) -> Fidelity:
    """Coverage of 80% intervals, of the original and the compressed model."""
    nine = (0.0,) * 9
    first, second = (
        Calibration(frequencies=nine, coverage=coverage, error=0, crossing_rate=0)
        for coverage in (before, after)
    )
    part = DatasetFidelity(
        dataset="sales", freq="D", series_count=40, ratio=1, shift=nine, original=first,
        compressed=second, drift=(1.0,), contexts=(),
    )  # fmt: skip
    return Fidelity(
        datasets=(part,), shift=nine, drift=(1.0,), frequencies=(), contexts=(), worst=()
    )


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (0.79, 0.62, True),
        (0.81, 0.93, True),
        (0.79, 0.75, False),
        (0.62, 0.79, False),
        (0.7, 0.9, False),
    ],
)
def test_intervals_that_hold_too_little_or_too_much(
    before: float, after: float, worse: bool
) -> None:
    fidelity = fidelity_of(before, after)
    says = f"but its 80% intervals hold {after:.0%} of the outcomes, the original's {before:.0%}"
    found = verdict(fidelity=fidelity)
    assert (found.level == "loss") == worse
    assert (says in found.clauses[0]) == worse
    for few in (scores(8), scores(1)):
        assert "80% intervals" not in verdict(fidelity=fidelity, original=few).clauses[0]


@pytest.mark.parametrize(
    ("high", "level", "says"),
    [
        (0.99, "loss", "but the probe's tasks of noisy seasons got worse together"),
        (1.01, "unsure", "keeps 90% of what the probe measures, which may be chance"),
    ],
)
def test_a_group_that_lost_skill_without_a_task_that_did(
    high: float, level: str, says: str
) -> None:
    share = Estimate(value=0.9, low=0.8, high=high)
    probe = probe_of(1.0, gaps=(0.9, 0.9))
    group = probe.groups[0].model_copy(update={"group": "noisy-seasons", "kept": share})
    found = verdict(probe=probe.model_copy(update={"kept": share, "groups": (group,)}))
    assert found.level == level
    assert says in found.sentence
    assert ("--num-series" in " ".join(found.advice)) == (level == "unsure")


def test_a_speed_within_the_noise_is_no_change() -> None:
    steady = bench_of(9.8)
    noisy = replace(steady.models[1], latencies_ms=(8.0, 9.8, 12.0, 9.8, 8.0, 12.0))
    first = replace(steady.models[0], latencies_ms=(10.0,) * 6)
    found = verdict(bench=replace(steady, models=(first, noisy)))
    assert "no measurable change in speed" in found.sentence
    assert "1.02 times as fast" in verdict(bench=steady).sentence


def test_too_few_rounds_are_said() -> None:
    few = bench_of(5.0)
    few = replace(few, workload=Workload(repeats=4))
    assert "2 times as fast, timed in too few rounds" in verdict(bench=few).sentence
    assert "too few" not in verdict(bench=bench_of(5.0)).sentence


def test_metrics_are_spelled_out_once_at_their_first_use() -> None:
    text = " ".join(spelled_out([verdict((1.01, 1.03)).sentence, *MEANINGS]))
    for name, meaning in (
        ("WQL", "weighted quantile loss"),
        ("MASE", "mean absolute scaled error"),
    ):
        assert text.count(meaning) == 1
        assert f"{meaning} ({name})" in text
        assert text.index(name) > text.index(meaning)
    assert spelled_out(["SQL", "SQL"]) == ["Scaled quantile loss (SQL)", "SQL"]


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.364, 0, "36%"),
        (0.364, 1, "36.4%"),
        (0.5, 1, "50.0%"),
        (0.95, None, "95%"),
        (0.975, None, "97.5%"),
        (0.005, None, "0.5%"),
        (-0.0001, 0, "0%"),
        (-0.04, 0, "-4%"),
        (12.5, 0, "1250%"),
        (float("nan"), 0, "nan%"),
    ],
)
def test_percentages(share: float, digits: int | None, text: str) -> None:
    assert percent(share, digits) == text


def test_singulars_and_lists() -> None:
    assert counted(1, "step") == "1 step"
    assert counted(1200, "step") == "1,200 steps"
    assert counted(1, "series") == "1 series"
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (9_996, "10.0k"),
        (99_960, "100k"),
        (999_400, "999k"),
        (999_700, "1.00M"),
        (8_650_000, "8.65M"),
        (999_900_000, "1.00B"),
        (1_200_000_000, "1.20B"),
    ],
)
def test_a_rounded_count_has_three_digits_and_the_unit_that_it_rounds_to(
    count: int, says: str
) -> None:
    assert rounded_count(count) == says
