"""What changed between two models' forecasts, on forecasts made by hand."""

from __future__ import annotations

import json
import math
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.fidelity import (
    Fidelity,
    PairedForecasts,
    calibration,
    dataset_fidelity,
    summarize,
)
from tscompress.evaluation.metrics import seasonal_errors, series_contributions
from tscompress.evaluation.tables import fidelity_tables
from tscompress.plotting import forecast_figure

HORIZON = 4
OFFSETS = np.linspace(-1.28, 1.28, 9)


def dataset(count: int = 40, freq: str = "Y", name: str = "toy", seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    start = pd.Period("2000-01-01", freq=freq)
    series = tuple(rng.normal(size=20 + 3 * index) for index in range(count))
    return EvaluationDataset(name, HORIZON, series, (start,) * count)


def forecasts(data: EvaluationDataset, shift: float = 0.0) -> np.ndarray:
    """Quantiles ``[N, 9, H]`` of about a standard normal, moved by ``shift``."""
    return np.tile(OFFSETS[None, :, None] + shift, (len(data.series), 1, HORIZON))


def test_shift_is_in_seasonal_errors() -> None:
    data = dataset()
    found = dataset_fidelity(forecasts(data), forecasts(data, 0.5), data)
    expected = (0.5 / seasonal_errors(data)).mean()
    np.testing.assert_allclose(found.shift, expected)


def test_a_model_is_close_to_itself() -> None:
    data = dataset()
    found = dataset_fidelity(forecasts(data), forecasts(data), data)
    assert found.ratio == 1
    assert set(found.shift) == {0}
    assert set(found.drift) == {1}
    assert {group.ratio for group in found.contexts} == {1}
    assert found.original == found.compressed
    assert found.worst == ()


def test_ratios_are_those_of_the_scores() -> None:
    data = dataset()
    pair = forecasts(data), forecasts(data, 0.5)
    before, after = (series_contributions(values, data) for values in pair)
    found = dataset_fidelity(*pair, data)
    assert found.ratio == pytest.approx(after.score("WQL") / before.score("WQL"))
    assert sum(group.series_count for group in found.contexts) == len(data.series)
    short = [index for index, context in enumerate(data.contexts) if len(context) <= 32]
    (group,) = [group for group in found.contexts if group.group == "1–32"]
    losses = [np.array(columns.quantile_loss)[short].sum() for columns in (before, after)]
    assert group.ratio == pytest.approx(losses[1] / losses[0])
    assert group.series_count == len(short)


def test_drift_shows_the_step_that_got_worse() -> None:
    data = dataset()
    moved = forecasts(data)
    moved[:, :, 2] += 3
    drift = dataset_fidelity(forecasts(data), moved, data).drift
    assert [ratio == 1 for ratio in drift] == [True, True, False, True]
    assert drift[2] is not None
    assert drift[2] > 2


def test_calibration_by_hand() -> None:
    quantiles = np.arange(1.0, 10.0)[None, :, None] * np.ones((2, 1, 2))  # [2, 9, 2]
    labels = np.array([[0.0, 5.0], [9.5, np.nan]])
    found = calibration(quantiles, labels)
    # 0 is below every quantile, 5 at or below the last five, 9.5 above all; the last is missing.
    assert found.frequencies == pytest.approx([1 / 3] * 4 + [2 / 3] * 5)
    assert found.coverage == pytest.approx(1 / 3)
    errors = [abs(f - level) for f, level in zip(found.frequencies, QUANTILE_LEVELS, strict=True)]
    assert found.error == pytest.approx(sum(errors) / 9)
    assert found.crossing_rate == 0


def test_flat_series_that_are_forecast_exactly_are_covered() -> None:
    labels = np.array([[299.99], [17.31], [0.1]])
    quantiles = np.broadcast_to(labels.astype(np.float32)[:, None], (3, 9, 1))
    found = calibration(quantiles, labels)
    assert found.coverage == 1.0
    assert found.frequencies == (1.0,) * 9


def test_crossing_quantiles_are_counted() -> None:
    quantiles = np.arange(9.0)[None, :, None] * np.ones((1, 1, 2))
    quantiles[0, 3, 1] = 7.0  # above the next four levels, and one pair of neighbours crosses
    assert calibration(quantiles, np.zeros((1, 2))).crossing_rate == pytest.approx(1 / 16)


def test_worst_series_are_found_with_their_figure_data() -> None:
    data = dataset()
    moved = forecasts(data)
    moved[[7, 11]] += 5
    moved[3] *= 0.99  # hardly worse, or better
    worst = dataset_fidelity(forecasts(data), moved, data).worst
    assert {one.series for one in worst[:2]} == {7, 11}
    first = worst[0]
    assert first.ratio == pytest.approx(first.compressed_loss / first.original_loss)
    assert first.label == tuple(data.labels[first.series])
    assert first.context == tuple(data.contexts[first.series][-2 * HORIZON :])
    np.testing.assert_allclose(first.compressed, moved[first.series, [0, 4, 8]])
    assert f"series {first.series}, loss × " in first.panel().title


def test_exact_forecasts_do_not_lead_the_worst_for_their_ratio_alone() -> None:
    data = dataset()
    before = forecasts(data)
    before[0] = data.labels[0] + 1e-9
    after = before.copy()
    after[0] += 1e-3  # a million times the loss, and nothing to see
    after[1] += 4
    worst = dataset_fidelity(before, after, data).worst
    assert worst[0].series == 1


def test_flat_contexts_and_missing_labels() -> None:
    start = pd.Period("2000", freq="Y")
    flat = np.full(14, 3.0)
    gap = np.arange(14.0)
    gap[[1, -1]] = np.nan
    data = EvaluationDataset("odd", HORIZON, (flat, gap, np.zeros(14)), (start,) * 3)
    found = dataset_fidelity(np.ones((3, 9, HORIZON)), np.zeros((3, 9, HORIZON)), data)
    assert found.shift == pytest.approx([1.0] * 9)  # of the series with a seasonal error
    assert [one.series for one in found.worst] == [0, 1]
    assert math.isnan(found.worst[1].label[-1])
    whole = summarize([found])
    content = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    again = Fidelity.from_dict(content)
    assert again.to_dict() == content
    assert math.isnan(again.worst[1].label[-1])


def test_a_suite_counts_each_dataset_once() -> None:
    sets = [dataset(10, "Y", "a"), dataset(30, "M", "b", seed=1), dataset(5, "Y", "c", seed=2)]
    pairs = PairedForecasts()
    for data in sets:
        pairs.original(data, forecasts(data))
    for data, shift in zip(sets, (0.2, 0.4, 0.8), strict=True):
        pairs.compressed(data, forecasts(data, shift))
    found = pairs.summary()
    ratios = [part.ratio for part in found.datasets]
    yearly, monthly = found.frequencies
    assert (yearly.series_count, monthly.series_count) == (15, 30)
    assert yearly.ratio == pytest.approx(math.sqrt(ratios[0] * ratios[2]))
    assert monthly.ratio == pytest.approx(ratios[1])
    assert found.shift[4] == pytest.approx(np.mean([part.shift[4] for part in found.datasets]))
    # A dataset whose series have no seasonal error has no shift, and counts for none.
    flat = found.datasets[0].model_copy(update={"shift": (math.nan,) * 9})
    rest = summarize([flat, *found.datasets[1:]])
    assert rest.shift[4] == pytest.approx(np.mean([part.shift[4] for part in found.datasets[1:]]))
    assert Fidelity.model_validate_json(rest.model_dump_json()).shift == pytest.approx(rest.shift)
    assert math.isnan(summarize([flat]).shift[4])
    (table, *_) = fidelity_tables(summarize([flat]))
    assert [*table.columns[1].cells] == ["–"]
    assert len(found.worst) == 10
    severities = [one.severity for one in found.worst]
    assert severities == sorted(severities, reverse=True)
    assert len(found.drift) == HORIZON


def test_wrong_input_is_refused() -> None:
    data = dataset(3)
    good = forecasts(data)
    with pytest.raises(UsageError, match=r"\(3, 9, 3\).* \(3, 9, 4"):
        dataset_fidelity(good, good[:, :, :3], data)
    bad = good.copy()
    bad[0, 0, 0] = np.nan
    with pytest.raises(DataError, match=r"compressed .*'toy'"):
        dataset_fidelity(good, bad, data)
    exact = np.repeat(data.labels[:, None], 9, axis=1)
    with pytest.raises(DataError, match=r"ratio .*'toy'"):
        dataset_fidelity(exact, good, data)
    with pytest.raises(UsageError, match="no dataset"):
        summarize([])
    with pytest.raises(UsageError, match=r"original .*'toy'"):
        PairedForecasts().compressed(data, good)
    with pytest.raises(DataError, match="not a comparison of forecasts"):
        Fidelity.from_dict({})


def test_tables() -> None:
    data = dataset()
    found = summarize([dataset_fidelity(forecasts(data), forecasts(data, 0.5), data)])
    console = Console(file=StringIO(), width=110)
    for table in fidelity_tables(found):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("80% interval", "context 33–64", "step 4", "series that got worst"):
        assert words in text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_figure_draws_each_series(count: int) -> None:
    data = dataset()
    worst = dataset_fidelity(forecasts(data), forecasts(data, 0.5), data).worst
    figure = forecast_figure([one.panel() for one in worst[:count]])
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in drawn] == [
        o.panel().title for o in worst[:count]
    ]
    figure.canvas.draw()


def test_empty_figure_is_refused() -> None:
    with pytest.raises(UsageError, match="no series to draw"):
        forecast_figure([])
