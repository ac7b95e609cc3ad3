"""Files as people have them: each layout, notation and defect, and what the reader makes of it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tscompress.cli.series import plot
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.evaluation_sets import LongFormat
from tscompress.data.reading.format import GivenSeries, SeriesFormat
from tscompress.data.reading.read import read_file
from tscompress.data.reading.summary import SeriesSummary, summarize
from tscompress.data.series import LabelledSeries, read_series
from tscompress.data.streaming import iterate_series
from tscompress.data.suites import find_suite, load_suite
from tscompress.errors import DataError, RecipeError
from tscompress.workflows.recipe import Recipe, calibration_series, validate, with_columns

DAYS = pd.date_range("2023-01-01", periods=40)
IDS = ["007", "7", "Köln"]
VALUES = (np.random.default_rng(0).normal(2000, 300, (3, 40)) * 4).round() / 4  # [3, 40], exact


def long(**columns: Any) -> pd.DataFrame:
    """Twenty values and more of a shop, one below the other, with columns of unusual names."""
    frame = pd.DataFrame(
        {"item_id": np.repeat(IDS, 40), "date": np.tile(DAYS, 3), "sales": VALUES.ravel()}
    )
    return frame.assign(**columns)


def wide() -> pd.DataFrame:
    return pd.DataFrame(VALUES.T, columns=IDS).assign(date=DAYS)[["date", *IDS]]


def rows(names: list[str]) -> pd.DataFrame:
    """As in M5: attributes that several rows share, an id, and a column a step."""
    steps = pd.DataFrame(VALUES, columns=names)
    return pd.concat(
        [pd.DataFrame({"id": IDS, "item_id": "x", "store": ["a", "b", "b"]}), steps], axis=1
    )


def lists() -> pd.DataFrame:
    return pd.DataFrame({"item_id": IDS, "timestamp": [list(DAYS)] * 3, "target": VALUES.tolist()})


def csv(frame: pd.DataFrame, **how: Any) -> bytes:
    return frame.to_csv(index=False, **how).encode("utf-8")


def written(path: Path, save: Callable[[Path], object]) -> bytes:
    save(path)
    return path.read_bytes()


def zipped(path: Path, *members: str) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, csv(long()))
    return path.read_bytes()


def dates(form: str) -> Any:
    return lambda frame: frame["date"].dt.strftime(form)


def numbers(form: str) -> Any:
    return lambda frame: frame["sales"].map(form.format)


def comma(frame: pd.DataFrame) -> Any:
    text = frame["sales"].map("{:,.2f}".format)
    return text.str.translate(str.maketrans(",.", ".,"))


DATED = [day.strftime("%Y-%m-%d") for day in DAYS]
COUNTED = [f"d_{day}" for day in range(1, 41)]
Write = Callable[[Path], bytes]

#: Name, content and options of files that hold the same three series.
GOOD: list[tuple[str, Write, dict[str, str]]] = [
    ("long.csv", lambda p: csv(long()), {}),
    ("index.csv", lambda p: long().to_csv().encode(), {}),
    ("shuffled.csv", lambda p: csv(pd.concat([long()[::3], long()[1::3], long()[2::3]])), {}),
    ("semicolon.csv", lambda p: csv(long(), sep=";", decimal=","), {}),
    ("bar.csv", lambda p: csv(long(), sep="|"), {}),
    ("tabs.tsv", lambda p: csv(long(), sep="\t"), {}),
    ("tabs.csv", lambda p: csv(long(), sep="\t"), {}),
    ("days_first.csv", lambda p: csv(long(date=dates("%d.%m.%Y"))), {}),
    ("slashes.csv", lambda p: csv(long(date=dates("%d/%m/%Y"))), {}),
    ("american.csv", lambda p: csv(long(date=dates("%m/%d/%Y"))), {}),
    ("short_years.csv", lambda p: csv(long(date=dates("%d.%m.%y"))), {"date_format": "%d.%m.%y"}),
    ("compact.csv", lambda p: csv(long(date=dates("%Y%m%d"))), {"date_format": "%Y%m%d"}),
    ("utc.csv", lambda p: csv(long(date=dates("%Y-%m-%dT%H:%M:%SZ"))), {}),
    ("seconds.csv", lambda p: csv(long(date=lambda f: f["date"].astype("int64") // 10**9)),
     {"date_format": "s"}),
    ("thousands.csv", lambda p: csv(long(sales=numbers("{:,.2f}"))), {}),
    ("swiss.csv", lambda p: csv(long(sales=lambda f: numbers("{:,.2f}")(f).str.replace(",", "'"))),
     {}),
    ("german.csv", lambda p: csv(long(sales=comma), sep=";"), {}),
    ("cp1252.csv", lambda p: long().to_csv(index=False).encode("cp1252"), {"encoding": "cp1252"}),
    ("utf16.csv", lambda p: long().to_csv(index=False).encode("utf-16"), {"encoding": "utf-16"}),
    ("bom.csv", lambda p: b"\xef\xbb\xbf" + csv(long()), {}),
    ("covariates.csv", lambda p: csv(long(price=2.5, promotion=1)), {"target_column": "sales"}),
    ("packed.csv.gz", lambda p: gzip.compress(csv(long())), {}),
    ("packed.csv.bz2", lambda p: bz2.compress(csv(long())), {}),
    ("packed.csv.xz", lambda p: lzma.compress(csv(long())), {}),
    ("packed.zip", lambda p: zipped(p, "sales.csv"), {}),
    ("wide.csv", lambda p: csv(wide()), {"target_column": "*"}),
    ("wide_index.csv", lambda p: wide().set_index("date").rename_axis(None).to_csv().encode(),
     {"target_column": "*"}),
    ("rows.csv", lambda p: csv(rows(DATED)), {}),
    ("m5.csv", lambda p: csv(rows(COUNTED)), {"frequency": "D"}),
    ("long.parquet", lambda p: written(p, long().to_parquet), {}),
    ("long.feather", lambda p: written(p, long().to_feather), {}),
    ("berlin.parquet",
     lambda p: written(p, long(date=np.tile(DAYS.tz_localize("Europe/Berlin"), 3)).to_parquet), {}),
    ("lists.parquet", lambda p: written(p, lists().to_parquet), {}),
    ("lists.jsonl", lambda p: lists().assign(start="2023-01-01", freq="D").drop(
        columns="timestamp").to_json(orient="records", lines=True).encode(), {}),
    ("rows.jsonl", lambda p: long(date=dates("%Y-%m-%d")).to_json(
        orient="records", lines=True).encode(), {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options"), GOOD, ids=[good[0] for good in GOOD])
def test_the_same_series_however_they_are_written(
    tmp_path: Path, name: str, content: Write, options: dict[str, str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content(path))
    form = GivenSeries.model_validate(options)

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
            "model": "m", "output": "o", "series": options, "calibration": {"source": str(path)},
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


EARLY = long()[lambda frame: frame["date"].dt.day <= 12]
#: Name, content, and the option or the word that tells what to do.
REFUSED: list[tuple[str, Write, str]] = [
    ("days.csv", lambda p: csv(EARLY.assign(date=dates("%d/%m/%Y"))), "--date-format"),
    ("years.csv", lambda p: csv(long(date=dates("%d.%m.%y"))), "--date-format"),
    ("numbers.csv", lambda p: csv(long(date=np.tile(range(40), 3))), "--date-format"),
    ("wide.csv", lambda p: csv(wide()), "--target-column"),
    ("two.csv", lambda p: csv(long(price=2.5)), "--target-column"),
    ("store.csv", lambda p: csv(long(target=1.0).rename(columns={"item_id": "shop"})),
     "--id-column"),
    ("week.csv", lambda p: csv(long().rename(columns={"date": "week", "sales": "y"})),
     "--time-column"),
    ("m5.csv", lambda p: csv(rows(COUNTED).drop(columns="id")), "--id-column"),
    ("thousands.csv", lambda p: csv(long(sales=numbers("{:,.0f}"))), "--decimal"),
    ("dots.csv", lambda p: csv(long(sales=lambda f: numbers("{:,.0f}")(f).str.replace(",", ".")),
                               sep=";"), "--decimal"),
    ("cp1252.csv", lambda p: long().to_csv(index=False).encode("cp1252"), "--encoding"),
    ("both.csv", lambda p: b"a;b,c;d\n1;2,3;4\n", "--separator"),
    ("cells.csv", lambda p: b"date,y\n2024-01-01,1,5\n2024-01-02,2,5\n", "--separator"),
    ("again.csv", lambda p: csv(pd.concat([long(), long().head(1)])), "repeat a time"),
    ("header.csv", lambda p: csv(long()) + csv(long().iloc[:0]), "'date'"),
    ("text.csv", lambda p: csv(long().astype(object).replace(VALUES[0, 3], "closed")), "'closed'"),
    ("irregular.csv", lambda p: b"date,y\n2024-01-01,1\n2024-01-02,2\n2024-01-03 07:00,3\n",
     "--frequency"),
    ("zones.csv", lambda p: b"date,y\n2024-03-31 01:00+01:00,1\n2024-03-31 03:00+02:00,2\n", "UTC"),
    ("autumn.csv", lambda p: b"date,y\n2024-10-27 02:00,1\n2024-10-27 02:00,2\n", "UTC"),
    ("no_id.csv", lambda p: csv(long(item_id=[None, *["a"] * 119])), "have no id"),
    ("two.zip", lambda p: zipped(p, "a.csv", "b.csv"), "one file"),
    ("lists.parquet", lambda p: written(p, lists().assign(more=VALUES.tolist()).rename(
        columns={"target": "sales"}).to_parquet), "--target-column"),
    ("times.parquet", lambda p: written(p, lists().assign(
        timestamp=[list(DAYS[1:])] * 3).to_parquet), "39 times for 40 values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "remedy"), REFUSED, ids=[bad[0] for bad in REFUSED])
def test_what_is_ambiguous_or_broken_is_refused_alike(
    tmp_path: Path, name: str, content: Write, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content(path))
    table = LongFormat(horizon=2)
    ways: list[Callable[[], object]] = [
        lambda: read_series(path),
        lambda: list(iterate_series(path)),
        lambda: list(load_suite(find_suite(path, table))) if name != "two.zip" else read_file(path),
    ]
    messages = set()
    for way in ways:
        with pytest.raises(DataError) as caught:
            way()
        messages.add(str(caught.value))
    (message,) = messages
    assert remedy in message
    assert name in message
    assert "\n" not in message


def read_series_line(series: LabelledSeries) -> str:
    assert series.summary is not None
    return series.summary.line()


def test_series_of_five_layouts_calibrate_the_same(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from tscompress.api import compress

    weights = []
    for name, content, options in GOOD:
        if name in ("long.csv", "german.csv", "wide.csv", "rows.csv", "lists.parquet"):
            path = tmp_path / name
            path.write_bytes(content(path))
            series = read_series(path, GivenSeries.model_validate(options))
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
        "3 series, 40 daily steps each, 2023-01-01 to 2023-02-09, 1.7% missing, "
        "1 too short and left out, the last 7 steps of each held out"
    )
    one = summarize(read_file(tmp_path / "x.csv"), hold_out=1)
    assert one.line().endswith("the last step of each held out")
    assert summary.too_short_names == ("new",)
    assert summary.form.target_column == "sales"
    assert SeriesSummary.model_validate_json(summary.model_dump_json()) == summary


def test_summaries_of_several_frequencies_and_of_none(tmp_path: Path) -> None:
    monthly = pd.date_range("2020-01-01", periods=9, freq="MS")
    other = pd.DataFrame({"item_id": "m", "date": monthly, "sales": np.arange(9.0)})
    pd.concat([long(), other]).to_csv(tmp_path / "x.csv", index=False)
    line = summarize(read_file(tmp_path / "x.csv")).line()
    assert line == "4 series, 9 to 40 steps (3 daily, 1 monthly), 2020-01-01 to 2023-02-09"
    (tmp_path / "y.csv").write_text("y\n1\n2\n3\n")
    assert summarize(read_file(tmp_path / "y.csv")).line() == "1 series, 3 steps, without times"


def test_what_was_found_reads_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(csv(long(date=dates("%d.%m.%Y"), sales=comma), sep=";"))
    found = read_file(path).form
    assert (found.separator, found.decimal, found.date_format) == (";", ",", "%d.%m.%Y")
    assert (found.id_column, found.time_column, found.target_column) == ("item_id", "date", "sales")
    assert read_file(path, found).form == found


def test_several_id_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(csv(long(store=np.tile(["n", "s"], 60))))
    form = SeriesFormat(id_column="store, item_id", target_column="sales")
    names = [one.name for one in read_file(path, form).series]
    assert names == ["n/007", "s/007", "n/7", "s/7", "n/Köln", "s/Köln"]


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
