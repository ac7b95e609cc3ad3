"""Whole messages, a handful: one line with what came, what is allowed and what to do.

Other tests name the exception and the offending key, so that a sentence is changed here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tscompress
from tscompress.errors import (
    DataError,
    ModelNotFoundError,
    OutputExistsError,
    RecipeError,
    TscompressError,
    UsageError,
    shortened,
)
from tscompress.evaluation.comparison import Comparison, ModelComparison, Ratio
from tscompress.evaluation.results import DatasetScore, EvaluationResult, SeriesContributions
from tscompress.io.files import check_output
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import parse_budget
from tscompress.reports.terms import spelled_out
from tscompress.reports.verdict import make_verdict
from tscompress.workflows.recipe import load_recipe


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sales.csv").write_text("1,2\n")
    (tmp_path / "shops.csv").write_text("date,a,b\n2024-01-01,1,2\n")
    (tmp_path / "twice.csv").write_text("date,y,y\n2024-01-01,1,2\n")
    (tmp_path / "recipe.yaml").write_text("model: reference/bolt\noutput: x\nbench: {repeat: 3}\n")


@pytest.mark.parametrize(
    ("act", "error", "code", "message"),
    [
        (
            lambda: check_output(Path("out"), force=False),
            OutputExistsError,
            2,
            "'out' exists already; choose another output or pass --force.",
        ),
        (
            lambda: check_output(Path("out"), force=True, inputs=["out/sales.csv"]),
            OutputExistsError,
            2,
            "'out' holds the input 'out/sales.csv', which would be lost; choose another output.",
        ),
        (
            lambda: load_recipe("none.yaml"),
            RecipeError,
            2,
            "there is no recipe at 'none.yaml'.",
        ),
        (
            lambda: load_recipe("recipe.yaml"),
            RecipeError,
            2,
            "'recipe.yaml': unknown key 'bench.repeat'; allowed here: batch_size, "
            "context_length, horizon, device, threads, repeats, warmup, num_samples, "
            "cross_learning, seed.",
        ),
        (
            lambda: tscompress.load("./nowhere"),
            ModelNotFoundError,
            1,
            "there is no directory './nowhere'.",
        ),
        (
            lambda: tscompress.load("out"),
            ModelNotFoundError,
            1,
            "'out' has no config.json; is it a checkpoint?",
        ),
        (
            lambda: tscompress.read_series("out/sales.csv"),
            DataError,
            1,
            "'sales.csv' cannot be read: there are no rows.",
        ),
        (
            lambda: tscompress.read_series("shops.csv"),
            DataError,
            1,
            "'shops.csv' cannot be read: no target column among ['date', 'a', 'b']; name one of "
            "target, y, value, or give --target-column, '*' if each of the others is a series, and "
            "--id-column if one identifies series.",
        ),
        (
            lambda: tscompress.read_series("twice.csv"),
            DataError,
            1,
            "'twice.csv' cannot be read: several columns are named 'y'.",
        ),
        (
            lambda: parse_budget("wql=1"),
            UsageError,
            2,
            "'wql=1' is no budget; allowed are parameters, bytes, macs, kv-cache or latency = a "
            "ratio above 0 and at most 1; parameters or macs = a number (k, M, G, T); bytes or "
            "kv-cache = an amount (B, kB, MB, GB, KiB, MiB, GiB); wql = a percentage above 0; for "
            "example parameters=0.5, bytes=20MB or wql=1%.",
        ),
    ],
    ids=[
        "exists",
        "input",
        "no recipe",
        "unknown key",
        "no directory",
        "no config",
        "no rows",
        "no target",
        "name twice",
        "budget",
    ],
)
def test_golden_messages(
    act: Callable[[], object], error: type[TscompressError], code: int, message: str
) -> None:
    with pytest.raises(error) as caught:
        act()
    assert str(caught.value) == message
    assert caught.value.exit_code == code


def ratios(wql: tuple[float, float], mase: tuple[float, float]) -> Comparison:
    """Of a model whose intervals end here."""
    found = {
        name: Ratio(ratio=sum(ends) / 2, low=ends[0], high=ends[1])
        for name, ends in (("WQL", wql), ("MASE", mase))
    }
    model = ModelComparison(model="small", verdicts=(), datasets=(), **found)
    return Comparison(
        reference="m", models=(model,), confidence=0.95, margin=0.005, resamples=2000, seed=0
    )


def scores_of(count: int) -> EvaluationResult:
    """Of equal series."""
    same = (1.0,) * count
    columns = SeriesContributions(
        quantile_loss=same, absolute_label=same, scaled_error=same, scaled_steps=(1,) * count
    )
    row = DatasetScore(
        dataset="sales", model="m", MASE=1, WQL=1, series_count=count, seconds=1, series=columns
    )
    return EvaluationResult(suite="sales.csv", model="m", rows=(row,))


@pytest.mark.parametrize(
    ("wql", "mase", "count", "sentence"),
    [
        (
            (0.996, 1.004),
            (0.998, 1.002),
            20,
            "No measurable loss on your 20 series; no layer was changed; speed and skills were not "
            "measured.",
        ),
        (
            (1.011, 1.03),
            (0.98, 0.99),
            20,
            "Worse on your 20 series: weighted quantile loss (WQL) is 1.1 to 3% worse and mean "
            "absolute scaled error (MASE) is 1 to 2% better; no layer was changed; speed and "
            "skills were not measured.",
        ),
        (
            (0.97, 1.031),
            (0.99, 1.02),
            20,
            "No clear change on your 20 series, though a loss of up to 3.1% cannot be ruled "
            "out; no layer was changed; speed and skills were not measured.",
        ),
        (
            (0.96, 0.98),
            (0.998, 1.002),
            8,
            "Better on your 8 series: weighted quantile loss (WQL) is 2 to 4% better, too few to "
            "be sure; no layer was changed; speed and skills were not measured.",
        ),
    ],
    ids=["no loss", "worse", "unsure", "few"],
)
def test_golden_verdicts(
    wql: tuple[float, float], mase: tuple[float, float], count: int, sentence: str
) -> None:
    found = make_verdict(
        Plan(family="chronos-bolt", method="fold"),
        comparison=ratios(wql, mase),
        original=scores_of(count),
        own_series=True,
    )
    assert spelled_out([found.sentence]) == [sentence]


@pytest.mark.parametrize("name", ["x" * 5000, "owner/" + "x" * 5000])
def test_a_name_without_end_is_not_repeated_whole(name: str) -> None:
    for act in (
        lambda: check_output(Path(name), force=False),
        lambda: load_recipe(name),
        lambda: parse_budget(name),
    ):
        with pytest.raises((TscompressError, OSError)) as caught:
            act()
        assert len(shortened(str(caught.value))) < 700
