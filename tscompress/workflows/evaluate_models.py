"""Models scored as a recipe says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.suites import find_suite
from tscompress.evaluation.evaluate import evaluate
from tscompress.evaluation.metrics import Quantiles
from tscompress.evaluation.results import EvaluationResult
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.progress import OnProgress, silent
from tscompress.workflows.recipe import EvaluationConfig


def score(
    model: Any,
    name: str,
    config: EvaluationConfig,
    on_progress: OnProgress = silent,
    *,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    cache: ScoreCache | None = None,
    on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None = None,
) -> EvaluationResult:
    """Evaluate a pipeline or ``"seasonal-naive"`` as ``config`` says.

    The other parameters are those of :func:`tscompress.evaluation.evaluate.evaluate`.
    """
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        on_progress(f"evaluate {name}", done, total)

    suite = find_suite(config.suite, config.long_format)
    total = len(suite.select(config.datasets).datasets)
    return evaluate(
        model,
        suite,
        name=name,
        max_series=config.max_series,
        datasets=config.datasets,
        batch_size=config.batch_size,
        seed=config.seed,
        seeds=seeds,
        num_samples=num_samples,
        root=config.root,
        cache=cache,
        on_dataset=count,
        on_forecasts=on_forecasts,
    )
