"""What a later stage would refuse, or would not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.compression.fold_config import FoldConfig
from tscompress.errors import RecipeError, UsageError
from tscompress.workflows.early_checks import check_measurements, check_sources_are_read
from tscompress.workflows.recipe import EvaluationConfig, Recipe

BENCH = Workload(batch_size=2, context_length=32, horizon=4, cross_learning=True)
SCORES = EvaluationConfig(
    datasets=("monash_m1_yearly",), max_series=2, cross_learning=True, batch_size=2
)


def univariate(model: Path, **measured: Workload | EvaluationConfig | None) -> Recipe:
    """A recipe that folds a model to a univariate one, and takes these measurements of it."""
    nothing: dict[str, Any] = {"bench": None, "evaluation": None, "probe": None}
    fold = FoldConfig(univariate=True)
    return Recipe(model=str(model), output="out", fold=fold, **nothing | measured)


@pytest.mark.parametrize(
    "measured", [{"bench": BENCH}, {"evaluation": SCORES}], ids=["bench", "evaluation"]
)
def test_a_univariate_fold_is_not_measured_with_cross_learning(
    checkpoints: dict[str, Path], measured: dict[str, Any]
) -> None:
    recipe, loaded = (
        univariate(checkpoints["chronos-2"], **measured),
        load(checkpoints["chronos-2"]),
    )
    with pytest.raises(UsageError, match="cross_learning"):
        check_measurements(recipe, loaded, "cpu")
    # With group attention both can be.
    check_measurements(recipe.model_copy(update={"fold": FoldConfig()}), loaded, "cpu")


def test_a_device_of_the_bench_that_is_not_the_commands_is_refused(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-2"])
    measured = univariate(checkpoints["chronos-2"], bench=BENCH)
    recipe = measured.model_copy(
        update={"fold": FoldConfig(), "bench": BENCH.model_copy(update={"device": "cuda"})}
    )
    with pytest.raises(RecipeError, match=r"bench: device: 'cuda'.* give --device cuda"):
        check_measurements(recipe, loaded, "cpu")
    if not torch.cuda.is_available():  # else it may well be measured there
        with pytest.raises(UsageError, match="finds no CUDA"):
            check_measurements(recipe, loaded, "cuda:1")


def test_a_univariate_fold_is_not_scored_with_covariates(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("vega_datasets")
    scores = EvaluationConfig(suite="covariates", datasets=("seattle_weather_daily",), max_series=2)
    loaded = load(checkpoints["chronos-2"])
    with pytest.raises(UsageError, match="as_univariate"):
        check_measurements(univariate(checkpoints["chronos-2"], evaluation=scores), loaded, "cpu")
    alone = scores.model_copy(update={"as_univariate": True})
    check_measurements(univariate(checkpoints["chronos-2"], evaluation=alone), loaded, "cpu")


NOTATION = {"series": {"id_column": "shop", "hold_out": 24}}
FILE = {"calibration": {"source": "sales.csv"}}


def of(**fields: Any) -> Recipe:
    return Recipe.model_validate({"model": "reference/bolt", "output": "out", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (NOTATION, "^series says how files .* names no file; .* or leave series out"),
        (NOTATION | {"evaluation": {"suite": "offline-frequencies"}}, "names no file"),
        (
            FILE | {"method": "svd", "profile": None},
            "^calibration: source: 'sales.csv', and svd reads no series; leave it out",
        ),
        (
            FILE | {"model": "reference/chronos2", "fold": {"univariate": True}, "profile": None},
            "this fold reads no series",
        ),
    ],
)
def test_a_file_or_its_notation_that_no_stage_reads_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        check_sources_are_read(of(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        FILE,
        FILE | NOTATION,
        FILE | {"method": "svd"},  # its profile reads it
        NOTATION | {"recover": {"steps": 1, "series": ["sales.csv"]}},
        NOTATION | {"evaluation": {"suite": "sales.csv", "long_format": {"horizon": 8}}},
    ],
)
def test_files_that_a_stage_reads_pass(fields: dict[str, Any]) -> None:
    check_sources_are_read(of(**fields))
