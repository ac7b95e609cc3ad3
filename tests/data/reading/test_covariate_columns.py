"""Covariates and several targets of a long table: which columns, as numbers or categories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tscompress.data.reading.format import GivenSeries, SeriesFormat
from tscompress.data.reading.read import read_file, read_table
from tscompress.data.reading.summary import summarize
from tscompress.data.series import read_series
from tscompress.errors import DataError

DAYS = pd.date_range("2024-01-01", periods=6)
FORM = SeriesFormat(target_column="sales", known_covariates="promo,price", past_covariates="guests")


def table(**columns: Any) -> pd.DataFrame:
    """Two shops of six days."""
    one = pd.DataFrame({"date": DAYS, "sales": np.arange(6.0), "promo": list("aabbab")})
    one = one.assign(price=[1.5, 2, 3, 4, 5, 6], guests=range(6))
    both = pd.concat([one.assign(id="x"), one.assign(id="y", sales=one["sales"] + 10)])
    return both.assign(**columns).reset_index(drop=True)


def test_covariates_stay_beside_their_series() -> None:
    read = read_table(table().sample(frac=1, random_state=0), FORM)
    assert (read.known, read.past) == (("promo", "price"), ("guests",))
    for one in read.series:
        start = 0 if one.name == "x" else 10
        assert one.values.tolist() == [start + step for step in range(6)]
        assert one.covariates["promo"].tolist() == list("aabbab")
        assert one.covariates["price"].tolist() == [1.5, 2, 3, 4, 5, 6]
        assert one.covariates["guests"].dtype == np.float64


def test_a_csv_is_read_as_the_table_that_it_was(tmp_path: Path) -> None:
    path = tmp_path / "shops.csv"
    whole = table(open=[True, False] * 6)
    whole.to_csv(path, index=False)
    whole.to_parquet(path.with_suffix(".parquet"))
    form = FORM.model_copy(update={"past_covariates": "guests,open"})
    texts, typed = read_file(path, form), read_file(path.with_suffix(".parquet"), form)
    for ours, theirs in zip(texts.series, typed.series, strict=True):
        assert ours.covariates.keys() == theirs.covariates.keys()
        for name, column in ours.covariates.items():
            assert column.tolist() == theirs.covariates[name].tolist()
    assert set(texts.series[0].covariates["open"]) == {"True", "False"}  # categories, as in chronos


def test_none_is_a_category_where_nulls_have_a_type(tmp_path: Path) -> None:
    events = ["Easter", "None", None] * 4
    form = FORM.model_copy(update={"past_covariates": "event"})
    whole = table(event=events)
    (one, _) = read_table(whole, form).series
    assert one.covariates["event"].tolist() == events[:6]
    whole.to_csv(tmp_path / "shops.csv", index=False)  # where a text is all that there is
    (one, _) = read_file(tmp_path / "shops.csv", form).series
    assert one.covariates["event"].tolist() == ["Easter", None, None] * 2


def test_digits_with_a_type_of_their_own_are_categories(tmp_path: Path) -> None:
    codes = ["0", "1", "2"] * 4
    form = FORM.model_copy(update={"known_covariates": "promo,price,code"})
    for column in (pd.Categorical([0, 1, 2] * 4), codes, pd.array(codes, "string")):
        (one, _) = read_table(table(code=column), form).series
        assert one.covariates["code"].tolist() == list("012012")
    table(code=pd.Categorical(codes)).to_parquet(tmp_path / "x.parquet")
    assert read_file(tmp_path / "x.parquet", form).series[0].covariates["code"][1] == "1"
    table(code=codes).to_csv(tmp_path / "x.csv")  # where nothing has a type
    assert read_file(tmp_path / "x.csv", form).series[0].covariates["code"][1] == 1.0


def test_a_decimal_comma_holds_for_covariates(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("date;sales;price\n2024-01-01;1;2,5\n2024-01-02;2;3,25\n2024-01-03;3;4,125\n")
    (one,) = read_file(path, SeriesFormat(target_column="sales", known_covariates="price")).series
    assert one.covariates["price"].tolist() == [2.5, 3.25, 4.125]


def test_missing_rows_and_cells_are_missing_covariates() -> None:
    gaps = table(promo=["a", "", "b", "b", None, "b"] * 2, price=[1, 2, np.nan, 4, 5, 6] * 2)
    read = read_table(gaps.drop(index=[3]), FORM)
    first = read.series[0]
    assert first.covariates["promo"].tolist() == ["a", None, "b", None, None, "b"]
    assert np.isnan(first.covariates["price"]).tolist() == [False, False, True, True, False, False]


def test_series_end_with_their_targets() -> None:
    (one, _) = read_table(table(sales=[np.nan, 1, 2, 3, np.nan, np.nan] * 2), FORM).series
    assert one.values.tolist() == [1, 2, 3]
    assert one.covariates["promo"].tolist() == list("abb")
    assert one.begin == DAYS[1]


def test_targets_that_are_named_together_are_one_group() -> None:
    sales = [np.nan, 1, 2, 3, 4, 5] * 2
    other = [9, 8, 7, 6, 5, np.nan] * 2
    form = SeriesFormat(target_column="sales,other", past_covariates="price")
    read = read_table(table(sales=sales, other=other), form)
    assert [one.name for one in read.series] == ["x/sales", "x/other", "y/sales", "y/other"]
    assert [one.group for one in read.series] == ["x", "x", "y", "y"]
    assert {len(one.values) for one in read.series} == {6}  # each end is one of the two's
    assert summarize(read).line().startswith("4 series in groups of 2, 6 daily steps each")


def test_a_pattern_names_series_of_their_own() -> None:
    wide = table()[:6].drop(columns=["id", "promo"])
    read = read_table(wide, SeriesFormat(target_column="*", known_covariates="price"))
    assert [(one.name, one.group) for one in read.series] == [("sales", None), ("guests", None)]
    assert all("price" in one.covariates for one in read.series)


def test_the_only_column_beside_covariates_is_the_target() -> None:
    form = FORM.model_copy(update={"target_column": None})
    assert [one.name for one in read_table(table(), form).series] == ["x", "y"]


def test_lists_of_columns_are_one_text() -> None:
    form = GivenSeries(target_column=["a", "b"], known_covariates=("c",))  # type: ignore[arg-type]
    assert (form.target_column, form.known_covariates) == ("a,b", "c")


def test_the_summary_says_what_covariates_hold() -> None:
    shops = table(price=7, guests=[1.0, 2, 3, 4, 5, 6] + [np.nan] * 6)
    line = summarize(read_table(shops, FORM)).line()
    assert "known covariates: promo (2 categories), price (constant)" in line
    assert "past covariates: guests (missing in 1 series)" in line


def test_calibration_reads_the_targets_alone(tmp_path: Path) -> None:
    table().to_csv(tmp_path / "x.csv", index=False)
    form = GivenSeries(**FORM.model_dump())
    assert read_series(tmp_path / "x.csv", form).names == ("x", "y")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"known_covariates": "nothing"}, "nothing"),
        ({"known_covariates": "sales"}, "sales"),
        ({"past_covariates": "id"}, "id"),
        ({"past_covariates": "date"}, "date"),
        ({"past_covariates": "guests,promo"}, "promo"),
        ({"known_covariates": "price,price"}, "price"),
        ({"target_column": "sales,price"}, "price"),
        ({"target_column": "sales,nothing"}, "nothing"),
    ],
)
def test_columns_of_two_roles_or_none(changes: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_table(table(), FORM.model_copy(update=changes))


def test_a_column_named_twice_is_not_told_to_choose_between_one_option() -> None:
    with pytest.raises(ValueError, match="twice") as refused:
        read_table(table(), FORM.model_copy(update={"id_column": "id,id"}))
    assert str(refused.value).count("--id-column") == 1


def test_a_covariate_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="price"):
        read_table(table(price=np.nan), FORM)


def test_lists_in_a_row_have_no_covariates(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"item_id": "a", "target": [1, 2, 3], "price": [1, 2, 3]}\n')
    with pytest.raises(DataError, match="covariates"):
        read_file(path, SeriesFormat(known_covariates="price"))
