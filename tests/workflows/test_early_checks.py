"""What a later stage would refuse of a model without group attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.compression.fold_config import FoldConfig
from tscompress.errors import RecipeError, UsageError
from tscompress.workflows.early_checks import check_measurements
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


def test_a_univariate_fold_is_not_scored_with_covariates(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("vega_datasets")
    scores = EvaluationConfig(suite="covariates", datasets=("seattle_weather_daily",), max_series=2)
    loaded = load(checkpoints["chronos-2"])
    with pytest.raises(UsageError, match="as_univariate"):
        check_measurements(univariate(checkpoints["chronos-2"], evaluation=scores), loaded, "cpu")
    alone = scores.model_copy(update={"as_univariate": True})
    check_measurements(univariate(checkpoints["chronos-2"], evaluation=alone), loaded, "cpu")
