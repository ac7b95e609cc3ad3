"""Paired statistics: intervals against theory, degenerate cases, and verdicts."""

from __future__ import annotations

import dataclasses
import math
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from rich.table import Table

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.comparison import (
    Ratio,
    compare_results,
    effective_series,
    few_series,
    series_frame,
    verdict,
)
from tscompress.evaluation.derived import mean_of_runs, scaled_quantile_losses
from tscompress.evaluation.intervals import percentile_interval, resampled_log_ratios
from tscompress.evaluation.metrics import seasonal_errors, series_contributions
from tscompress.evaluation.results import (
    DatasetScore,
    EvaluationResult,
    Sampling,
    SeriesContributions,
)
from tscompress.evaluation.tables import comparison_tables

Losses = dict[str, np.ndarray]


def text_of(tables: list[Table]) -> str:
    console = Console(file=StringIO(), width=110)
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def result(model: str, losses: Losses, **changes: Any) -> EvaluationResult:
    """Series of label 2 whose losses, and scaled errors, are as given; each has 4 steps."""
    rows = []
    for dataset, values in losses.items():
        columns = SeriesContributions(
            quantile_loss=tuple(values.tolist()),
            absolute_label=(2.0,) * len(values),
            scaled_error=tuple((3 * values).tolist()),
            scaled_steps=(4,) * len(values),
        )
        rows.append(
            DatasetScore(
                dataset=dataset,
                model=model,
                MASE=columns.score("MASE"),
                WQL=columns.score("WQL"),
                series_count=len(values),
                seconds=1.0,
                series=columns,
            )
        )
    return EvaluationResult(suite="s", model=model, rows=tuple(rows), **changes)


def pair(rng: np.random.Generator, count: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    before = np.exp(0.4 * rng.normal(size=count))
    return before, before * np.exp(shift + 0.2 * rng.normal(size=count))


def without_series(given: EvaluationResult) -> EvaluationResult:
    return EvaluationResult.from_dict(given.to_dict(series=False))


# --- the bootstrap --------------------------------------------------------------------------------


def test_bootstrap_spread_is_that_of_the_delta_method() -> None:
    before, after = pair(np.random.default_rng(0), 400)
    draws = resampled_log_ratios(before, after[:, None], 20_000, np.random.default_rng(1))[:, 0]
    # var(log ratio of sums) = Σ (b/B − a/A)² n / (n − 1)
    influence = after / after.sum() - before / before.sum()
    sd = math.sqrt(np.square(influence).sum() * 400 / 399)
    assert draws.std() == pytest.approx(sd, rel=0.03)
    assert draws.mean() == pytest.approx(math.log(after.sum() / before.sum()), abs=sd / 20)


def test_bootstrap_variance_of_few_series_is_unbiased() -> None:
    """Draws of n − 1: those of n would have 3/4 of this variance."""
    after = np.array([0.99, 1.0, 1.0, 1.01])
    draws = resampled_log_ratios(np.ones(4), after[:, None], 40_000, np.random.default_rng(1))
    assert draws.var() == pytest.approx(after.var(ddof=1) / 4, rel=0.03)


def test_intervals_have_nominal_coverage() -> None:
    rng = np.random.default_rng(2)
    truth = 0.05  # of the mean log ratio: both factors are independent of the size of a series
    truth += 0.2**2 / 2
    hits = 0
    for _ in range(300):
        draws = []
        for count in (20, 40, 80):
            before, after = pair(rng, count, shift=0.05)
            draws.append(resampled_log_ratios(before, after[:, None], 300, rng)[:, 0])
        low, high = percentile_interval(np.mean(draws, axis=0), 0.9) or (0.0, 0.0)
        hits += low <= math.exp(truth) <= high
    assert 0.85 <= hits / 300 <= 0.95


def test_resamples_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = pair(np.random.default_rng(0), 50)
    whole = resampled_log_ratios(before, after[:, None], 100, np.random.default_rng(3))
    monkeypatch.setattr("tscompress.evaluation.intervals.MAX_DRAWS", 350)
    parts = resampled_log_ratios(before, after[:, None], 100, np.random.default_rng(3))
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-15)


def test_percentiles_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    before, after = pair(np.random.default_rng(4), 300)
    draws = resampled_log_ratios(before, after[:, None], 20_000, np.random.default_rng(5))[:, 0]
    theirs = stats.bootstrap(
        (before, after),
        lambda a, b, axis: b.sum(axis) / a.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=20_000,
        random_state=np.random.default_rng(6),
    ).confidence_interval
    np.testing.assert_allclose(percentile_interval(draws, 0.95), tuple(theirs), atol=1e-3)


# --- compare --------------------------------------------------------------------------------------


def losses(seed: int = 0, shift: float = 0.0, sizes: tuple[int, ...] = (60, 40)) -> list[Losses]:
    rng = np.random.default_rng(seed)
    pairs = {f"d{index}": pair(rng, size, shift) for index, size in enumerate(sizes)}
    return [{name: values[side] for name, values in pairs.items()} for side in (0, 1)]


def test_compare_gives_geometric_means_of_ratios() -> None:
    before, after = losses()
    found = compare_results([result("a", before), result("b", after)])
    ratios = [after[name].sum() / before[name].sum() for name in before]
    (model,) = found.models
    for ratio in (model.WQL, model.MASE):
        assert ratio.ratio == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.low < ratio.ratio < ratio.high
    assert [part.dataset for part in model.datasets] == ["d0", "d1"]
    assert model.datasets[0].WQL.ratio == pytest.approx(ratios[0])
    assert compare_results([result("a", before), result("b", after)]) == found
    other = compare_results([result("a", before), result("b", after)], seed=1)
    assert other.models[0].WQL.low != model.WQL.low


def test_intervals_of_a_dataset_do_not_depend_on_the_others() -> None:
    before, after = losses(sizes=(60, 40, 30))
    whole = compare_results([result("a", before), result("b", after)]).models[0].datasets[1]
    alone = compare_results([result("a", {"d1": before["d1"]}), result("b", {"d1": after["d1"]})])
    assert alone.models[0].datasets[0] == whole


def test_models_are_compared_with_the_first_on_the_same_resamples() -> None:
    before, after = losses()
    three = [
        result(name, given) for name, given in zip("abc", (before, after, before), strict=True)
    ]
    found = compare_results(three)
    assert [model.model for model in found.models] == ["b", "c"]
    assert found.models[0].WQL == compare_results(three[:2]).models[0].WQL
    assert found.models[1].WQL.model_dump() == {"ratio": 1, "low": 1, "high": 1}


def test_identical_models_are_equal_to_the_last_bit() -> None:
    before, _ = losses(sizes=(700, 3))
    found = compare_results([result("a", before), result("a", before)])
    (model,) = found.models
    assert model.model == "a (2)"
    for part in (model, *model.datasets):
        assert part.WQL == part.MASE == Ratio(ratio=1, low=1, high=1)
    assert model.verdicts == ("MASE is the same", "WQL is the same")


def test_one_series_has_no_interval() -> None:
    before, after = losses(sizes=(50, 1))
    found = compare_results([result("a", before), result("b", after)])
    (model,) = found.models
    assert model.datasets[0].WQL.low is not None
    assert model.datasets[1].WQL.low is None
    assert model.WQL.low is None
    assert any(note.endswith(": d1") for note in found.notes)
    assert "without an interval" in model.verdicts[0]


def test_few_large_series_are_told() -> None:
    values = np.concatenate([np.full(100, 0.01), [5.0, 5.0]])
    found = compare_results([result("a", {"d": values}), result("b", {"d": values})])
    (note,) = (note for note in found.notes if note.startswith("WQL"))
    assert "d on about 2 of its 102" in note  # of what
    assert "more series" in note  # what to do
    effective, scored = few_series(result("a", {"d": values}))["WQL"]["d"]
    assert (round(effective), scored) == (2, 102)
    assert few_series(result("a", {"d": np.ones(30)})) == {"MASE": {}, "WQL": {}}
    assert effective_series(result("a", {"d": np.ones(30)}).rows[0], "WQL") == pytest.approx(30)


def clustered(
    given: EvaluationResult, windows: int | None = None, groups: tuple[int, ...] | None = None
) -> EvaluationResult:
    """The same contributions, of series of several windows or of groups."""
    (row,) = given.rows
    assert row.series is not None
    series = row.series.model_copy(update={"groups": groups})
    row = row.model_copy(update={"windows": windows, "series": series})
    return given.model_copy(update={"rows": (row,)})


def test_all_windows_of_a_series_are_drawn_together() -> None:
    rng = np.random.default_rng(5)
    before, after = pair(rng, 30)
    windows = np.repeat(before, 8), np.repeat(after, 8)  # alike: they tell nothing more
    one = compare_results([result("a", {"d": before}), result("b", {"d": after})])
    many = [clustered(result(n, {"d": v}), 8) for n, v in zip("ab", windows, strict=True)]
    groups = tuple(np.repeat(np.arange(30), 8).tolist())
    grouped = [
        clustered(result(n, {"d": v}), None, groups) for n, v in zip("ab", windows, strict=True)
    ]
    for compared in (compare_results(many), compare_results(grouped)):
        for metric in ("MASE", "WQL"):
            found, expected = getattr(compared.models[0], metric), getattr(one.models[0], metric)
            assert found.low == pytest.approx(expected.low, rel=1e-12)
            assert found.high == pytest.approx(expected.high, rel=1e-12)
    alone = compare_results([clustered(one) for one in many])
    width = [c.models[0].WQL.high - c.models[0].WQL.low for c in (one, alone)]  # type: ignore[operator]
    assert width[1] < width[0] / 2
    assert effective_series(many[0].rows[0], "WQL") == pytest.approx(
        effective_series(result("a", {"d": before}).rows[0], "WQL")
    )


def test_windows_of_one_series_are_drawn_and_told() -> None:
    before, after = pair(np.random.default_rng(5), 40)
    results = [clustered(result(n, {"d": v}), 40) for n, v in (("a", before), ("b", after))]
    found = compare_results(results)
    (alone,) = compare_results([result("a", {"d": before}), result("b", {"d": after})]).models
    assert (found.models[0].WQL.low, found.models[0].WQL.high) == (alone.WQL.low, alone.WQL.high)
    (note,) = (note for note in found.notes if "single series" in note)
    assert "windows" in note
    assert note.endswith(": d")
    group = compare_results(
        [clustered(one, 20, (0,) * 40) for one in results]  # two targets, 20 windows of each
    )
    assert group.models[0].WQL.low is not None
    assert group.models[0].WQL.low != alone.WQL.low
    assert few_series(results[0]) == {"MASE": {}, "WQL": {}}
    assert "1 series in 40 windows" in repr(results[0])
    shown = text_of(comparison_tables(found))
    assert "1 × 40" in shown


def test_windows_are_drawn_where_one_series_has_an_error() -> None:
    before, after = pair(np.random.default_rng(5), 20)
    results = []
    for name, values in (("a", before), ("b", after)):
        given = clustered(result(name, {"d": values}), 10)  # the second series never varies
        row = given.rows[0]
        assert row.series is not None
        steps = (*row.series.scaled_steps[:10], *(0,) * 10)
        errors = (*row.series.scaled_error[:10], *(0.0,) * 10)
        series = row.series.model_copy(update={"scaled_steps": steps, "scaled_error": errors})
        row = row.model_copy(update={"series": series})
        results.append(given.model_copy(update={"rows": (row,)}))
    found = compare_results(results)
    assert found.models[0].MASE.low is not None
    assert any("windows alone" in note and note.endswith(": d") for note in found.notes)
    alone = compare_results([without_series(one) for one in results])
    assert not any("single series" in note for note in alone.notes)


def test_windows_do_not_make_few_series_many() -> None:
    given = clustered(result("a", {"d": np.ones(40)}), 8)
    effective, scored = few_series(given)["WQL"]["d"]
    assert (round(effective), scored) == (5, 5)


def quarterly(values: np.ndarray, count: int) -> EvaluationDataset:
    starts = (pd.Period("2000Q1", freq="Q"),) * count
    return EvaluationDataset("d", 8, tuple(np.asarray(row) for row in values), starts)


def scored(quantiles: np.ndarray, dataset: EvaluationDataset) -> EvaluationResult:
    columns = series_contributions(quantiles, dataset)
    given = result("m", {dataset.name: np.ones(len(quantiles))})
    row = given.rows[0].model_copy(update={"series": columns})
    return given.model_copy(update={"rows": (row,)})


def sql(quantiles: np.ndarray, dataset: EvaluationDataset) -> float:
    return scaled_quantile_losses(scored(quantiles, dataset), [dataset]).rows[0].WQL


def test_sql_is_that_of_fev() -> None:
    metrics = pytest.importorskip("fev.metrics")
    rng = np.random.default_rng(0)
    values = 10.0 ** rng.uniform(-3, 6, (12, 1)) * (2 + rng.random((12, 40)))
    values[3] = 7.0  # no seasonal error: left out
    values[5, -2] = np.nan  # a label that is missing
    values[6, 10] = np.nan  # a gap in the context
    dataset = quarterly(values, 12)
    medians = np.nan_to_num(values[:, None, -12:-4], nan=1.0)
    quantiles = np.sort(medians * (1 + 0.1 * rng.normal(size=(12, 9, 8))), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = metrics.SQL().compute(
            y_true=values[:, -8:, None],
            y_pred=quantiles[:, 4, :, None],
            y_past=values[:, :-8].reshape(-1, 1),
            y_past_lengths=np.full(12, 32),
            q_pred=quantiles.transpose(0, 2, 1)[:, :, None],
            seasonality=4,
            quantile_levels=[level / 10 for level in range(1, 10)],
        )
    assert sql(quantiles, dataset) == pytest.approx(expected, rel=1e-12)


def test_sql_does_not_ask_how_large_a_series_is() -> None:
    rng = np.random.default_rng(1)
    values = 2 + rng.random((2, 40))
    quantiles = values[:, None, -8:] + rng.normal(size=(2, 9, 8))
    unit = np.array([[1.0], [1e6]])
    first = sql(quantiles, quarterly(values, 2))
    assert sql(quantiles * unit[:, None], quarterly(values * unit, 2)) == pytest.approx(first)


def test_sql_is_compared_as_wql_is() -> None:
    rng = np.random.default_rng(2)
    values = {name: 2 + rng.random((30, 40)) for name in "de"}
    datasets = [dataclasses.replace(quarterly(values[n], 30), name=n) for n in "de"]
    before = {name: 1 + rng.random(30) for name in "de"}
    after = {"d": 1.1 * before["d"], "e": 0.8 * before["e"]}
    pair_ = [
        scaled_quantile_losses(result(n, x), datasets) for n, x in (("b", before), ("a", after))
    ]
    ratio = compare_results(pair_).models[0].WQL
    assert ratio.ratio == pytest.approx((1.1 * 0.8) ** 0.5)
    assert ratio.low == pytest.approx(ratio.high)  # each series has the same ratio
    (one,) = scaled_quantile_losses(result("a", after), datasets[1:]).rows
    errors = seasonal_errors(datasets[1])
    expected = (after["e"] / errors).sum() / (4 * 30)
    assert pytest.approx(expected) == one.WQL


def test_sql_of_other_series_is_refused() -> None:
    values = 2 + np.random.default_rng(3).random((3, 40))
    dataset = quarterly(values, 3)
    flat = quarterly(np.vstack([values[:2], np.ones((1, 40))]), 3)
    given = result("a", {"d": np.ones(3)})
    for other in (quarterly(values[:2], 2), flat):
        with pytest.raises(DataError, match="'a' was evaluated on other series of 'd'"):
            scaled_quantile_losses(given, [other])
    with pytest.raises(DataError, match="no series of 'e' were kept for 'a'"):
        scaled_quantile_losses(given, [dataclasses.replace(dataset, name="e")])
    with pytest.raises(DataError, match="no series of 'd' were kept for 'a'"):
        scaled_quantile_losses(without_series(given), [dataset])


def test_mean_of_runs_scores_the_mean_and_is_surer_than_one() -> None:
    rng = np.random.default_rng(3)
    before, _ = pair(rng, 200)
    runs = [result(name, {"d": before * np.exp(0.4 * rng.normal(size=200))}) for name in "abcd"]
    mean = mean_of_runs(runs)
    for metric in ("WQL", "MASE"):
        expected = np.mean([getattr(run.rows[0], metric) for run in runs])
        assert getattr(mean.rows[0], metric) == pytest.approx(expected)
    reference = result("r", {"d": before})
    one, all_ = (compare_results([reference, other]).models[0].WQL for other in (runs[0], mean))
    assert one.low is not None
    assert one.high is not None
    assert all_.low is not None
    assert all_.high is not None
    assert all_.high - all_.low < 0.7 * (one.high - one.low)
    drawn = [Sampling(seeds=(seed,), num_samples=20, batch_size=8) for seed in (0, 1)]
    alike, other = (
        mean_of_runs([runs[0].model_copy(update={"sampling": drawn[i]}) for i in pair_])
        for pair_ in ((0, 0), (0, 1))
    )
    assert alike.sampling == drawn[0]
    assert other.sampling is None
    with pytest.raises(UsageError, match="not evaluated on the same series"):
        mean_of_runs([runs[0], result("e", {"d": before[:100]})])
    with pytest.raises(DataError, match="no series of 'd' were kept for 'b'"):
        mean_of_runs([runs[0], without_series(runs[1])])


def test_mean_of_runs_has_their_mean_coverage() -> None:
    before, _ = losses(sizes=(5,))
    runs = []
    for coverage, crossing in ((0.7, 0.1), (0.88, 0.3)):
        run = result("a", before)
        measures = {"coverage": coverage, "crossing_rate": crossing}
        measures["coverage_error"] = abs(coverage - 0.8)
        row = run.rows[0].model_copy(update=measures)
        runs.append(run.model_copy(update={"rows": (row,)}))
    (row,) = mean_of_runs(runs).rows
    assert (row.coverage, row.crossing_rate) == (pytest.approx(0.79), pytest.approx(0.2))
    assert row.coverage_error == pytest.approx(0.01)
    (row,) = mean_of_runs([runs[0], result("a", before)]).rows
    assert (row.coverage, row.coverage_error) == (None, None)


def test_results_without_series_have_ratios_only() -> None:
    before, after = losses()
    a, b, c = result("a", before), without_series(result("b", after)), result("c", after)
    found = compare_results([a, b, c])
    assert found.models[0].WQL.low is None
    assert found.models[0].WQL.ratio == pytest.approx(found.models[1].WQL.ratio)
    assert found.models[1].WQL.low is not None
    assert any(note.startswith("no contributions of series for b") for note in found.notes)
    assert compare_results([without_series(a), c]).models[0].WQL.low is None


def test_series_that_do_not_count_for_mase_are_not_resampled() -> None:
    values = np.array([1.0, 2.0, 3.0, 0.0, 0.0, 0.0])
    pair_ = []
    for name, scale in (("a", 1.0), ("b", 1.1)):
        given = result(name, {"d": values * scale})
        content = given.to_dict()
        content["rows"][0]["series"]["scaled_steps"] = [4, 4, 4, 0, 0, 0]
        pair_.append(EvaluationResult.from_dict(content))
    (model,) = compare_results(pair_).models
    # With the last three, some resamples would hold nothing at all.
    assert model.MASE.low == pytest.approx(1.1)
    assert model.MASE.high == pytest.approx(1.1)


def test_resamples_that_hold_no_loss_of_the_reference() -> None:
    perfect = np.array([0.0, 0.0, 1.0])
    found = compare_results([result("a", {"d": perfect}), result("b", {"d": np.ones(3)})])
    assert found.models[0].WQL.low is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_contributions_that_are_not_finite(bad: float) -> None:
    before, after = losses()
    content = result("b", after).to_dict()
    content["rows"][1]["series"]["quantile_loss"][7] = bad
    with pytest.raises(DataError, match=r"series 7 of 'd1' .* 'b'"):
        compare_results([result("a", before), EvaluationResult.from_dict(content)])


def test_scores_of_zero() -> None:
    with pytest.raises(DataError, match="ratio"):
        compare_results([result("a", {"d": np.zeros(3)}), result("b", {"d": np.ones(3)})])


def test_other_labels_are_other_series() -> None:
    before, after = losses()
    content = result("b", after).to_dict()
    content["rows"][0]["series"]["absolute_label"][0] = 3.0
    with pytest.raises(UsageError, match="'d0'"):
        compare_results([result("a", before), EvaluationResult.from_dict(content)])
    with pytest.raises(UsageError, match="not evaluated on the same series"):
        compare_results([result("a", before), result("b", {"d0": after["d0"]})])


def test_other_seasons_are_other_units_of_mase() -> None:
    before = np.exp(np.random.default_rng(0).normal(size=20))

    def of_season(model: str, steps: int | None) -> EvaluationResult:
        found = result(model, {"d": before})
        (row,) = found.rows
        return found.model_copy(update={"rows": (row.model_copy(update={"seasonality": steps}),)})

    with pytest.raises(UsageError, match="seasons of 12 and 7 steps of 'd'"):
        compare_results([of_season("a", 7), of_season("b", 12)])
    assert compare_results([of_season("a", 7), of_season("b", None)]).models  # of earlier versions


def test_a_mean_of_several_checkpoints_is_of_none() -> None:
    runs = [result("a", {"d": np.ones(4)}, sha256={"w": str(i)}) for i in (0, 0, 1)]
    assert mean_of_runs(runs[:2]).sha256 == {"w": "0"}
    assert mean_of_runs(runs).sha256 is None


def test_different_random_numbers_are_told() -> None:
    before, after = losses()
    drawn = [Sampling(seeds=(seed,), num_samples=20, batch_size=32) for seed in (0, 1)]
    a, b = (
        result(name, given, sampling=sampling)
        for name, given, sampling in zip("ab", (before, after), drawn, strict=True)
    )
    assert any("different seeds" in note for note in compare_results([a, b]).notes)
    assert not compare_results([a, result("c", after, sampling=drawn[0])]).notes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"margin": -0.1}, "margin is -0.1"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"resamples": 10}, "resamples is 10"),
        ({"seed": -1}, "seed is -1"),
        ({"margin": math.nan}, "margin is nan"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    before, after = losses()
    with pytest.raises(UsageError, match=text):
        compare_results([result("a", before), result("b", after)], **options)
    with pytest.raises(UsageError, match="1 result given"):
        compare_results([result("a", before)])


# --- words and tables -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.98, 0.99, "WQL is better by between 1.00% and 2.00% (95%)"),
        (1.01, 1.02, "WQL is worse by between 1.00% and 2.00% (95%)"),
        (1.001, 1.004, "WQL is worse by between 0.10% and 0.40% (95%), no more than"),
        (0.99, 1.004, "WQL is no worse by more than 0.5% (95%): between 1.00% better"),
        (0.99, 1.02, "WQL cannot be distinguished from equal: between 1.00% better"),
        (1.0, 1.0, "WQL is the same"),
        (None, None, "WQL × 1.0012, without an interval"),
    ],
)
def test_verdicts(low: float | None, high: float | None, words: str) -> None:
    assert verdict("WQL", Ratio(ratio=1.0012, low=low, high=high), 0.005, 0.95).startswith(words)


def test_frames() -> None:
    before, after = losses(sizes=(5, 4))
    results = [result("a", before), result("b", after), without_series(result("c", after))]
    frame = compare_results(results).frame()
    assert list(frame) == ["model", "reference", "dataset", "metric", "ratio", "low", "high"]
    assert len(frame) == 2 * 3 * 2
    series = series_frame(results)
    assert list(series)[:3] == ["model", "dataset", "series"]
    assert series.groupby("model").size().to_dict() == {"a": 9, "b": 9}
    assert series_frame([without_series(results[0])]).empty


def test_tables_show_intervals() -> None:
    before, after = losses()
    found = compare_results([result("[a]", before), result("b", after), result("c", before)])
    text = text_of(comparison_tables(found))
    mean = found.models[0].WQL
    assert f"{mean.ratio:.4f} ({mean.low:.4f}–{mean.high:.4f})" in text
    assert "relative to [a]" in text
    assert "1.0000 (1.0000–1.0000)" in text
    assert found.lines()[0].startswith("b: MASE ")
