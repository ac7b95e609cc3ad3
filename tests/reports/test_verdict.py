"""The verdict: each case of what can be measured, and none that says more than the intervals.

Whole sentences are in ``test_messages``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tscompress.benchmark.results import BenchResult, ModelBench
from tscompress.benchmark.workload import Workload
from tscompress.evaluation.comparison import Comparison, ModelComparison, Ratio, few_series
from tscompress.evaluation.results import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.io.text import counted, listed
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


def comparison_of(wql: Ends, mase: Ends, ratio: float = 1.012) -> Comparison:
    """With these ends of the intervals."""

    def one(ends: Ends) -> Ratio:
        known = None not in ends
        return Ratio(ratio=sum(ends) / 2 if known else ratio, low=ends[0], high=ends[1])  # type: ignore[arg-type]

    model = ModelComparison(model="small", WQL=one(wql), MASE=one(mase), verdicts=(), datasets=())
    return Comparison(
        reference="m", models=(model,), confidence=0.95, margin=0.005, resamples=2000, seed=0
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
    group = GroupChange(group="seasons", able=1, tasks=1, original=1, compressed=kept, kept=share)
    return ProbeComparison(
        compressed="small", original="m", kept=share, groups=(group,), tasks=changes
    )


def verdict(wql: Ends = (0.996, 1.004), mase: Ends = (0.997, 1.003), **changes: Any) -> Verdict:
    """On 40 series of the user's, if not said otherwise."""
    given = {"original": scores(), "own_series": True, **changes}
    return make_verdict(PLAN, comparison=comparison_of(wql, mase), **given)


@pytest.mark.parametrize(
    ("wql", "mase", "level", "says", "never"),
    [
        ((0.996, 1.004), (0.997, 1.003), "good", "no measurable loss", "ruled out"),
        ((1.0, 1.0), (1.0, 1.0), "good", "same scores", "loss"),
        ((0.97, 0.99), (0.996, 1.004), "good", "WQL is 1 to 3 % better", "MASE"),
        ((1.01, 1.03), (0.996, 1.004), "loss", "WQL is 1 to 3 % worse", "MASE"),
        ((1.01, 1.03), (0.98, 0.99), "loss", "MASE is 1 to 2 % better", "no measurable"),
        ((1.001, 1.004), (0.996, 1.004), "loss", "slightly worse", "no measurable"),
        ((0.99, 1.031), (0.99, 1.02), "unsure", "up to 3.1 % cannot be ruled out", "worse"),
        ((None, None), (None, None), "unsure", "too few to tell", "no measurable"),
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


@pytest.mark.parametrize("few", [scores(8), scores(200, large=2)])
def test_few_series_never_make_a_good_verdict(few: EvaluationResult) -> None:
    found = verdict(original=few)
    assert found.level == "unsure"
    assert "few" in found.clauses[0]
    assert any("--windows" in line for line in found.advice)
    assert any(few_series(few).values())


def test_windows_are_not_counted_as_series() -> None:
    assert "your 20 series" in verdict(original=scores(60, windows=3)).sentence
    assert "your series" in verdict(original=scores(40, windows=40)).sentence
    assert "40 series of sales" in verdict(own_series=False).sentence


def test_what_was_not_measured_is_said() -> None:
    found = make_verdict(PLAN)
    assert found.level == "unknown"
    assert "not scored" in found.sentence
    assert "25 % of the feed-forward parameters" in found.sentence
    assert "speed and skills were not measured" in found.sentence
    assert "not measured" not in verdict(bench=bench_of(5), probe=probe_of(1.0)).sentence
    assert "speed was not" in verdict(probe=probe_of(1.0)).sentence
    assert "skills were not" in verdict(bench=bench_of(5)).sentence


@pytest.mark.parametrize(
    ("milliseconds", "noise", "says"),
    [
        (3.0, 0.01, "3.3 times as fast"),
        (9.5, 0.01, "1.05 times as fast"),
        (20.0, 0.01, "takes 2 times as long"),
        (10.0, 0.01, "no faster"),
    ],
)
def test_speed(milliseconds: float, noise: float, says: str) -> None:
    found = verdict(bench=bench_of(milliseconds, noise))
    assert says in found.sentence
    assert "36 % of the parameters" in found.sentence


def test_lost_skills_are_named_once_a_period() -> None:
    tasks = {
        "period_48": (0.9, 0.7),
        "period_48_noise_0.1": (0.9, 0.6),
        "period_52": (0.9, 0.1),
        "linear_trend": (0.9, 0.9),
    }
    found = verdict(probe=probe_of(0.9, **tasks))
    assert "keeps 90 % of what the probe measures" in found.sentence
    assert "most of period 52 and some of period 48" in found.sentence
    assert "linear" not in found.sentence
    assert any("recover" in line for line in found.advice)
    assert not verdict(probe=probe_of(0.999)).advice
    assert "keeps all" in verdict(probe=probe_of(0.999)).sentence
    assert "nothing could be lost" in verdict(probe=probe_of(None)).sentence


def test_lost_use_of_covariates_is_a_clause() -> None:
    change = CovariateChange(
        name="promotions", original=0.8, compressed=0.2, kept=Estimate(value=0.25), change="lost"
    )
    told = {"covariates_kept": Estimate(value=0.25), "covariates": (change,)}
    lost = probe_of(0.9).model_copy(update=told)
    assert "keeps 25 % of what covariates add" in verdict(probe=lost).sentence
    kept = lost.model_copy(update={"covariates": (change.model_copy(update={"change": "kept"}),)})
    assert "covariates" not in verdict(probe=kept).sentence


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


def test_singulars_and_lists() -> None:
    assert counted(1, "step") == "1 step"
    assert counted(1200, "step") == "1,200 steps"
    assert counted(1, "series") == "1 series"
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
