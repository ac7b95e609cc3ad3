"""Forecast quality on an evaluation suite, by the protocol of the Chronos benchmark.

Each series is forecast once, over its last window; MASE and the weighted quantile loss (WQL) at the
levels 0.1 … 0.9 come from gluonts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from chronos import BaseChronosPipeline
from pydantic import ValidationError

from tscompress.checkpoints.digests import model_digest
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.data.suites import Suite, find_suite, load_suite
from tscompress.errors import UsageError
from tscompress.evaluation.batching import (
    AUTO,
    DEFAULT_BATCH_SIZE,
    BatchSize,
    Processes,
)
from tscompress.evaluation.calibration import BAND, calibration
from tscompress.evaluation.forecasting import (
    SeasonalNaive,
    check_sampling,
    draws_samples,
    predict,
)
from tscompress.evaluation.joint import are_joint, check_settings, notes_of, predict_joint
from tscompress.evaluation.metrics import (
    Quantiles,
    mean_contributions,
    quantile_array,
    sample_quantiles,
    score_quantiles,
    series_contributions,
)
from tscompress.evaluation.results import (
    METRICS,
    SEASONAL_NAIVE,
    DatasetScore,
    EvaluationResult,
    Sampling,
    SeriesContributions,
    Settings,
)
from tscompress.evaluation.score_cache import ScoreCache, score_key
from tscompress.progress import OnProgress, silent

DEFAULT_SETTINGS = Settings()


def evaluate_pipeline(
    model: BaseChronosPipeline | Literal["seasonal-naive"],
    suite: str | Path | Suite = "offline",
    *,
    name: str,
    max_series: int | None = None,
    datasets: Iterable[str] | None = None,
    batch_size: BatchSize = DEFAULT_BATCH_SIZE,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    root: str | Path | None = None,
    settings: Settings = DEFAULT_SETTINGS,
    cache: ScoreCache | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_dataset: Callable[[DatasetScore], None] | None = None,
    on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None = None,
    on_progress: OnProgress = silent,
) -> EvaluationResult:
    """Score a pipeline in memory, or seasonal naive, on a suite.

    Unlike :func:`tscompress.evaluate`, whose other parameters it has, it loads no model and does
    not look for series that the model was fitted to.

    Parameters
    ----------
    model
        A Chronos pipeline, or ``"seasonal-naive"``.
    name
        Column ``model`` of the result.
    settings
        Which series see one another; seasonal naive sees none.
    on_progress
        Called with a stage for each dataset, series that were forecast and series in all.

    Raises
    ------
    UsageError
        An option is not allowed, or ``model`` is neither of the two.
    DataError, OfflineError
        A dataset cannot be read, or a forecast is not finite.
    """
    if isinstance(model, str) and model != SEASONAL_NAIVE:
        raise UsageError(
            f"model is {model!r}; expected a loaded Chronos pipeline or {SEASONAL_NAIVE!r}."
        )
    draws = not isinstance(model, str) and draws_samples(model)
    used = _distinct_seeds((seed,) if seeds is None else seeds)[: None if draws else 1]
    if not isinstance(model, str):
        check_settings(model, settings, batch_size)
        check_sampling(model, batch_size, num_samples)
    protocol = _Protocol(model, name, used, batch_size, num_samples, settings)
    digest = "" if cache is None else model_digest(model)
    rows = []
    sampling: Sampling | None = None
    alone = False
    for dataset in load_suite(suite, max_series, datasets, root=root):
        joint = protocol.is_joint(dataset)
        alone |= bool(dataset.covariates or dataset.groups) and not joint
        for note in notes_of(dataset, batch_size, settings) if joint else ():
            on_note(note)
        key = score_key(model, digest, dataset, protocol.to_dict()) if cache is not None else {}
        reused = None if on_forecasts is not None else _reused(cache, key, dataset, name)
        row, sampling = reused or protocol.score(dataset, on_forecasts, on_progress)
        if cache is not None and reused is None and Processes().is_main:
            cache.write(key, _Scored(row, sampling).to_dict())
        if dataset.names:
            row = row.model_copy(update={"series_names": dataset.names})
        rows.append(row)
        if on_dataset is not None:
            on_dataset(row)
    suite_name = find_suite(suite).name
    return EvaluationResult(
        suite=suite_name,
        model=name,
        rows=tuple(rows),
        sampling=sampling,
        settings=None if isinstance(model, str) else protocol.recorded(alone),
    )


class _Scored(NamedTuple):
    row: DatasetScore
    sampling: Sampling | None

    def to_dict(self) -> dict[str, Any]:
        sampling = None if self.sampling is None else self.sampling.model_dump(mode="json")
        return {"row": self.row.model_dump(mode="json"), "sampling": sampling}


def _reused(
    cache: ScoreCache | None, key: Mapping[str, Any], dataset: EvaluationDataset, name: str
) -> _Scored | None:
    """Cached scores of the same model, possibly under another name; None if there are none."""
    if cache is None:
        return None
    content = Processes().agree(lambda: cache.read(key))
    try:
        row = DatasetScore.model_validate({**content["row"], "model": name, "cached": True})
        sampling = content["sampling"]
        if sampling is not None:
            sampling = Sampling.model_validate(sampling)
    except (TypeError, KeyError, ValidationError):
        return None
    if (row.dataset, row.series_count) != (dataset.name, len(dataset.series)):
        return None
    cache.hits.append(dataset.name)
    return _Scored(row, sampling)


class _Protocol(NamedTuple):
    """How a model is scored on each dataset."""

    model: BaseChronosPipeline | Literal["seasonal-naive"]
    name: str
    seeds: tuple[int, ...]
    batch_size: BatchSize
    num_samples: int | None
    settings: Settings

    def is_joint(self, dataset: EvaluationDataset) -> bool:
        """Whether series of a dataset see others in a forecast."""
        return not isinstance(self.model, str) and are_joint(self.model, dataset, self.settings)

    def recorded(self, alone: bool) -> Settings:
        """As a result has them; ``alone``: series did not see what there is beside them."""
        together = self.batch_size if self.settings.cross_learning else None
        return self.settings.model_copy(update={"as_univariate": alone, "batch_size": together})

    @property
    def draws(self) -> bool:
        return not isinstance(self.model, str) and draws_samples(self.model)

    def to_dict(self) -> dict[str, Any]:
        """The settings that affect scores, besides model and data."""
        content: dict[str, Any] = {"quantile_levels": QUANTILE_LEVELS, "metrics": METRICS}
        if self.draws:
            content |= {"seeds": self.seeds, "num_samples": self.num_samples}
        if not isinstance(self.model, str):
            content["batch_size"] = self.drawn_together if self.draws else self.batch_size
            content["settings"] = self.settings.model_dump()
        return content

    @property
    def drawn_together(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size == AUTO else self.batch_size

    def score(
        self,
        dataset: EvaluationDataset,
        on_forecasts: Callable[[EvaluationDataset, Quantiles], None] | None,
        on_progress: OnProgress,
    ) -> _Scored:
        runs: list[tuple[dict[str, float], SeriesContributions]] = []
        seconds = 0.0
        for seed in self.seeds:
            told = self._told(dataset, len(runs), on_progress)
            started = time.perf_counter()
            told(0)
            quantiles, paths = self._forecast(dataset, seed, told)
            told(len(dataset.series))  # other processes may have had the last batch
            seconds += time.perf_counter() - started
            if self.settings.sort_quantiles:
                quantiles = np.sort(quantiles, axis=1)
            contributions = series_contributions(quantiles, dataset, name=self.name)
            if on_forecasts is not None and seed == self.seeds[0]:
                on_forecasts(dataset, quantiles)
            measures = {**score_quantiles(quantiles, dataset), **_measures(quantiles, dataset)}
            runs.append((measures, contributions))
        means = {name: float(np.mean([run[name] for run, _ in runs])) for name in runs[0][0]}
        if "coverage" in means:
            means["coverage_error"] = abs(means["coverage"] - BAND)
        sampling = None
        if paths is not None:
            sampling = Sampling(seeds=self.seeds, num_samples=paths, batch_size=self.drawn_together)
        row = DatasetScore(
            dataset=dataset.name,
            model=self.name,
            # The denominators of both are the same for all seeds: means of scores are the scores
            # of mean contributions.
            **means,
            series_count=len(dataset.series),
            seasonality=dataset.seasonality,
            windows=dataset.windows if dataset.windows > 1 else None,
            seconds=seconds,
            series=mean_contributions([contributions for _, contributions in runs]),
        )
        return _Scored(row, sampling)

    def _told(
        self, dataset: EvaluationDataset, runs: int, on_progress: OnProgress
    ) -> Callable[[int], None]:
        """Tells how many series were forecast, after those of ``runs`` seeds; not of the baseline,
        which forecasts all at once."""
        if isinstance(self.model, str):
            return lambda done: None
        count = len(dataset.series)

        def told(done: int) -> None:
            stage = f"{self.name} on {dataset.name}"
            on_progress(stage, runs * count + done, len(self.seeds) * count)

        return told

    def _forecast(
        self, dataset: EvaluationDataset, seed: int, on_series: Callable[[int], None]
    ) -> tuple[Quantiles, int | None]:
        """Quantiles, and of how many sample paths they are, if of any."""
        if isinstance(self.model, str):
            return quantile_array(SeasonalNaive().forecast(dataset)), None
        if self.is_joint(dataset):
            together = self.settings.cross_learning
            quantiles = predict_joint(
                self.model, dataset, self.batch_size, cross_learning=together, on_series=on_series
            )
            return quantiles, None
        values = predict(
            self.model,
            dataset.contexts,
            dataset.horizon,
            seed,
            self.batch_size,
            num_samples=self.num_samples,
            stream=dataset.name,
            on_series=on_series,
        )
        return (sample_quantiles(values), values.shape[1]) if self.draws else (values, None)


def _measures(quantiles: Quantiles, dataset: EvaluationDataset) -> dict[str, float]:
    """Coverage and crossing quantiles; none where every label is missing."""
    if not np.isfinite(dataset.labels).any():
        return {}
    found = calibration(quantiles, dataset.labels)
    return {
        "coverage": found.coverage,
        "crossing_rate": found.crossing_rate,
    }


def _distinct_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise UsageError(f"seeds are {list(seeds)}; give one or more from 0 on, each once.")
    return tuple(seeds)
