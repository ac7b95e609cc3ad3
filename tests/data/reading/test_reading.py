"""Files as people have them: each layout, notation and defect, and what the reader makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from written_series import GOOD, IDS, OTHER, REFUSED, VALUES, Written, comma, csv, dates, long

from tscompress.cli.series import plot
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.evaluation_sets import LongFormat
from tscompress.data.reading.format import GivenSeries, SeriesFormat
from tscompress.data.reading.read import read_file, read_table
from tscompress.data.reading.summary import SeriesSummary, summarize
from tscompress.data.series import LabelledSeries, read_series
from tscompress.data.streaming import iterate_series
from tscompress.data.suites import find_suite, load_suite
from tscompress.errors import DataError, RecipeError
from tscompress.workflows.recipe import Recipe, calibration_series, validate, with_columns


@pytest.mark.parametrize("written", GOOD, ids=[good.name for good in GOOD])
def test_the_same_series_however_they_are_written(tmp_path: Path, written: Written) -> None:
    path = written.write(tmp_path)
    form = GivenSeries.model_validate(written.options)

    read = read_series(path, form)
    by_name = dict(zip(read.names, read, strict=True))
    assert set(by_name) == set(IDS)
    for one, values in zip(IDS, VALUES, strict=True):
        assert by_name[one].tobytes() == values.astype(np.float32).tobytes()
    assert set(read.frequencies) == {"D"}

    # The other ways in: a stream, a recipe, a suite.
    assert [one.tobytes() for one in iterate_series(path, form)] == [one.tobytes() for one in read]
    recipe = validate(
        Recipe,
        {
            "model": "m", "output": "o", "series": written.options,
            "calibration": {"source": str(path)},
            "evaluation": {"suite": str(path), "long_format": {"horizon": 3}},
        },
        source="test",
    )  # fmt: skip
    calibrated = calibration_series(recipe)
    assert calibrated is not None
    assert [one.tobytes() for one in calibrated] == [one.tobytes() for one in read]
    assert recipe.scored_on is not None
    (dataset,) = load_suite(find_suite(path, recipe.scored_on.long_format))
    assert dataset.names == read.names
    assert [np.float32(one).tobytes() for one in dataset.series] == [one.tobytes() for one in read]
    assert dataset.summary is not None
    assert read.summary is not None
    assert dataset.summary.line() == read.summary.line()


@pytest.mark.parametrize("written", REFUSED, ids=[bad.name for bad in REFUSED])
def test_ambiguous_and_broken_files_are_refused_alike(tmp_path: Path, written: Written) -> None:
    path = written.write(tmp_path)
    table = LongFormat(horizon=2)
    ways: list[Callable[[], object]] = [
        lambda: read_series(path),
        lambda: list(iterate_series(path)),
        lambda: list(load_suite(find_suite(path, table))),
    ]
    messages = set()
    for way in ways:
        with pytest.raises(DataError) as caught:
            way()
        messages.add(str(caught.value))
    (message,) = messages
    assert written.remedy in message
    assert written.name in message
    assert "\n" not in message


#: Steps of the longest series, observed values of all, and the step of files of other series.
HELD = {
    "gaps.csv": (40, 157, "D"), "empty_cells.csv": (40, 158, "D"), "words.csv": (40, 154, "D"),
    "short.csv": (40, 762, "D"), "values.csv": (40, 160, "D"), "zeros.csv": (40, 40, "D"),
    "months.csv": (40, 40, "M"), "quarters.csv": (12, 12, "Q"),
    "quarter_columns.csv": (12, 48, "Q"),
    "year_columns.csv": (30, 116, "Y"), "autumn_utc.csv": (49, 49, "h"),
    "autumn.parquet": (49, 49, "h"), "kolkata.csv": (49, 49, "h"),
}  # fmt: skip


@pytest.mark.parametrize("written", OTHER, ids=[other.name for other in OTHER])
def test_rows_of_other_series_are_read(tmp_path: Path, written: Written) -> None:
    form = GivenSeries.model_validate(written.options)
    read = read_file(written.write(tmp_path), form).series
    steps, observed, step = HELD[written.name]
    assert max(len(one.values) for one in read) == steps
    assert sum(int(np.isfinite(one.values).sum()) for one in read) == observed
    assert {str(one.step) for one in read} == {step}


def test_a_negative_zero_stays_one(tmp_path: Path) -> None:
    (written,) = (one for one in OTHER if one.name == "zeros.csv")
    (one,) = read_file(written.write(tmp_path)).series
    assert np.signbit(one.values[:4]).tolist() == [True, False, True, False]


@pytest.mark.parametrize("form", ["{}Q{}", "{}-Q{}", "{} q{}"])
def test_quarters_are_times_in_cells_and_in_the_header(tmp_path: Path, form: str) -> None:
    quarters = [form.format(2023 + number // 4, number % 4 + 1) for number in range(8)]
    values = np.arange(8.0)
    cells, header = tmp_path / "cells.csv", tmp_path / "header.csv"
    cells.write_bytes(csv(pd.DataFrame({"date": quarters, "y": values})))
    row = pd.DataFrame([values], columns=quarters)[quarters[::-1]]
    header.write_bytes(csv(row.assign(id="a")))
    for path in (cells, header):
        (one,) = read_file(path).series
        assert one.values.tolist() == values.tolist()
        assert str(one.step) == "Q"
        assert one.begin == pd.Timestamp("2023-01-01")


@pytest.mark.parametrize("odd", ["2023-10-28T03:00+000:00+05:30", "2023-10-28T03+01"])
def test_an_offset_that_is_none_is_refused_without_a_warning(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "x.csv"
    times = ["2023-10-28T00:00+05:30", "2023-10-28T01:00+05:30", odd, "2023-10-28T04:00+05:30"]
    path.write_bytes(csv(pd.DataFrame({"date": times, "y": 1.0})))
    with pytest.raises(DataError):
        read_file(path)


def test_years_of_a_header_need_not_follow_one_another(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,1990,1991,1994,1992\na,1,2,5,3\n")
    (one,) = read_file(path).series
    assert np.nan_to_num(one.values, nan=-1).tolist() == [1, 2, 3, -1, 5]


def read_series_line(series: LabelledSeries) -> str:
    assert series.summary is not None
    return series.summary.line()


def test_series_of_five_layouts_calibrate_the_same(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from tscompress.api import compress

    weights = []
    for written in GOOD:
        if written.name in ("long.csv", "german.csv", "wide.csv", "rows.csv", "lists.parquet"):
            path = written.write(tmp_path)
            series = read_series(path, GivenSeries.model_validate(written.options))
            calibration = CalibrationConfig(num_series=6, context_length=32, batch_size=4)
            small = compress(
                checkpoints["chronos-bolt"], rank=4, series=series, calibration=calibration
            )
            assert small.plan is not None
            assert small.plan.calibrated_on == read_series_line(series)
            weights.append([p.detach().numpy().tobytes() for p in small.model.parameters()])
    assert len(weights) == 5
    assert all(other == weights[0] for other in weights)


def test_the_summary_says_what_was_read(tmp_path: Path) -> None:
    table = pd.concat([long().drop(index=[3, 4]), long().tail(2).assign(item_id="new")])
    table.to_csv(tmp_path / "x.csv", index=False)
    summary = summarize(read_file(tmp_path / "x.csv"), hold_out=7)
    assert summary.line() == (
        "4 series, 40 daily steps each, 2023-01-01 to 2023-02-09, 1.2% missing, "
        "1 with too few values and left out, the last 7 steps of each held out"
    )
    one = summarize(read_file(tmp_path / "x.csv"), hold_out=1)
    assert one.line().endswith("the last step of each held out")
    assert summary.too_short_names == ("new",)
    assert summary.form.target_column == "sales"
    assert SeriesSummary.model_validate_json(summary.model_dump_json()) == summary


@pytest.mark.parametrize("hold_out", [0, 24, 30, 45, 60, 90])
def test_what_is_counted_is_what_is_calibrated_on(tmp_path: Path, hold_out: int) -> None:
    lengths = {"a": 50, "b": 20, "c": 60}
    parts = [
        pd.DataFrame(
            {
                "id": name,
                "date": pd.date_range("2024-01-01", periods=n),
                "y": np.arange(1.0 + n)[1:],
            }
        )
        for name, n in lengths.items()
    ]
    pd.concat(parts).to_csv(tmp_path / "x.csv", index=False)
    form = GivenSeries(hold_out=hold_out)
    learnt = sum(n - hold_out >= 3 for n in lengths.values())
    if hold_out >= max(lengths.values()):
        with pytest.raises(DataError, match="hold-out"):
            read_series(tmp_path / "x.csv", form)
        return
    read = read_series(tmp_path / "x.csv", form)
    assert read.summary is not None
    assert (read.summary.series, len(read)) == (learnt, learnt)
    assert len(repr(read)) < 200


@pytest.mark.parametrize("encoding", ["base64", "hex", "zip", "rot13", "none"])
def test_what_is_no_encoding_of_text_is_refused(encoding: str) -> None:
    with pytest.raises(RecipeError, match=encoding):
        validate(GivenSeries, {"encoding": encoding}, source="test")


def test_what_is_there_and_no_file_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    (tmp_path / "directory.csv").mkdir()
    for name in ("loop.csv", "directory.csv"):
        with pytest.raises(DataError, match="no file of series"):
            read_file(tmp_path / name)
    with pytest.raises(DataError, match="there is no file"):
        read_file(tmp_path / "gone.csv")


def test_summaries_of_several_frequencies_and_of_none(tmp_path: Path) -> None:
    monthly = pd.date_range("2020-01-01", periods=9, freq="MS")
    other = pd.DataFrame({"item_id": "m", "date": monthly, "sales": np.arange(9.0)})
    pd.concat([long(), other]).to_csv(tmp_path / "x.csv", index=False)
    line = summarize(read_file(tmp_path / "x.csv")).line()
    assert line == "5 series, 9 to 40 steps (4 daily, 1 monthly), 2020-01-01 to 2023-02-09"
    (tmp_path / "y.csv").write_text("y\n1\n2\n3\n")
    assert summarize(read_file(tmp_path / "y.csv")).line() == "1 series, 3 steps, without times"


def test_the_found_format_reads_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(csv(long(date=dates("%d.%m.%Y"), sales=comma), sep=";"))
    found = read_file(path).form
    assert (found.separator, found.decimal, found.date_format) == (";", ",", "%d.%m.%Y")
    assert (found.id_column, found.time_column, found.target_column) == ("item_id", "date", "sales")
    assert read_file(path, found).form == found


def test_several_id_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(csv(long(store=np.tile(["n", "s"], 80))))
    form = SeriesFormat(id_column="store, item_id", target_column="sales")
    names = [one.name for one in read_file(path, form).series]
    assert names == [f"{store}/{one}" for one in IDS for store in ("n", "s")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("separator", "::"),
        ("decimal", "x"),
        ("encoding", "klingon"),
        ("hold_out", -1),
        ("ids", "a"),
    ],
)
def test_formats_that_cannot_be(key: str, value: object) -> None:
    content = {"model": "m", "output": "o", "series": {key: value}}
    with pytest.raises(RecipeError, match=rf"series\.{key}"):
        validate(Recipe, content, source="test")


def test_a_suite_has_the_columns_of_the_recipe_unless_it_says_so() -> None:
    from tscompress.workflows.recipe import EvaluationConfig

    config = EvaluationConfig(
        suite="x.csv", long_format=LongFormat(horizon=3, target_column="sales")
    )
    form = GivenSeries(target_column="y", id_column="shop", hold_out=3)
    found = with_columns(config, form).long_format
    assert found is not None
    assert (found.horizon, found.target_column, found.id_column) == (3, "sales", "shop")


def test_a_plot_has_a_block_for_each_part() -> None:
    assert plot([0.0, 1.0]) == "▁█"
    assert plot([5.0, np.nan, 5.0]) == "▁ ▁"
    assert plot([np.nan]) == ""
    assert len(plot(np.arange(1000.0))) == 40


@pytest.mark.parametrize("kind", ["object", "string"])
@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_time_is_a_missing_one(kind: str, blank: str) -> None:
    times = pd.Series(["2024-01-01", "2024-01-02", blank, "2024-01-04"], dtype=kind)
    with pytest.raises(ValueError, match="1 rows have no time in column 'date'"):
        read_table(pd.DataFrame({"date": times, "target": [1.0, 2, 3, 4]}))
