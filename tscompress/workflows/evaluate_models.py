"""Evaluate a model, seasonal naive and, optionally, another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.suites import find_suite
from tscompress.evaluation.comparison import Comparison, compare_results
from tscompress.evaluation.fidelity import Fidelity, OnPair, PairedForecasts
from tscompress.evaluation.gift_eval import CONFIG_FILE, RESULTS_FILE
from tscompress.evaluation.metrics import Quantiles
from tscompress.evaluation.results import (
    SCORES_FILE,
    SEASONAL_NAIVE,
    EvaluationResult,
    aggregate,
    relative,
)
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    write_output,
    write_text_atomically,
)
from tscompress.io.own_outputs import is_own_file, table_csv
from tscompress.io.results import results_json
from tscompress.plotting import forecast_figure, save_figure
from tscompress.progress import OnProgress, silent
from tscompress.workflows.evaluate import evaluate
from tscompress.workflows.recipe import EvaluationConfig

_TABLE_FILE, _AGAINST_FILE, _TOTALS_FILE, _WORST_FILE = (
    "scores.csv", "scores-against.csv", "agg-rel-scores.csv", "worst.png",
)  # fmt: skip
_FILES = (SCORES_FILE, _TABLE_FILE, _AGAINST_FILE, _TOTALS_FILE, _WORST_FILE)
#: In the layout of GIFT-Eval.
_LAYOUT = (RESULTS_FILE, CONFIG_FILE)
#: Called with a dataset and the quantiles ``[N, 9, horizon]`` forecast for it.
OnForecasts = Callable[[EvaluationDataset, Quantiles], None]
#: Loads a model when its turn comes; or the baseline.
Scored = Callable[[], LoadedModel] | Literal["seasonal-naive"]


@dataclass(frozen=True)
class EvaluatedModels:
    """Scores of a model, of seasonal naive, and of the model to compare with.

    Attributes
    ----------
    fidelity
        How the forecasts of ``model`` differ from those of ``against``; None if not requested.
    """

    model: EvaluationResult
    naive: EvaluationResult
    against: EvaluationResult | None = None
    fidelity: Fidelity | None = None

    def comparison(self, margin: float) -> Comparison | None:
        """Ratios to ``against``, with intervals; ``margin`` is the acceptable rise, as a share."""
        return (
            None
            if self.against is None
            else compare_results([self.against, self.model], margin=margin)
        )

    def to_dict(self, margin: float) -> dict[str, Any]:
        """Content of ``scores.json``."""
        content: dict[str, Any] = {
            "result": self.model.to_dict(),
            "relative_to_seasonal_naive": relative(self.model, self.naive),
        }
        comparison = self.comparison(margin)
        if self.against is not None and comparison is not None:
            content["against"] = self.against.to_dict()
            content["relative_to_against"] = relative(self.model, self.against)
            content["comparison"] = comparison.to_dict()
        if self.fidelity is not None:
            content["fidelity"] = self.fidelity.to_dict()
        return content


def evaluate_models(
    config: EvaluationConfig,
    model: Scored,
    against: Scored | None = None,
    *,
    fidelity: bool = False,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    cache: ScoreCache | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_forecasts: OnForecasts | None = None,
    on_pair: OnPair | None = None,
    on_progress: OnProgress = silent,
) -> EvaluatedModels:
    """Score a model, seasonal naive and, if given, the model to compare with.

    Parameters
    ----------
    fidelity
        With ``against``: also how the forecasts differ.
    seeds, num_samples, cache
        As for :func:`tscompress.evaluate`.
    on_forecasts
        Called with the forecasts of ``model``.
    on_note
        Called with what should be known of a model before it is scored, if anything.
    on_pair
        With ``fidelity``: called with both models' forecasts of a dataset.

    Raises
    ------
    LeakError
        A model was fitted to steps that are scored, of a file or a suite.
    TscompressError
        A model, or data, cannot be used; see :mod:`tscompress.errors`.
    """
    pairs = PairedForecasts(on_pair) if fidelity else None
    said: set[str] = set()

    def note_once(note: str) -> None:
        if note not in said:
            said.add(note)
            on_note(note)

    def opened(one: Scored) -> LoadedModel | str:
        return one if isinstance(one, str) else one()

    def scored(one: LoadedModel | str, keep: OnForecasts | None = None) -> EvaluationResult:
        if isinstance(one, str):
            return score(one, one, config, on_progress, cache=cache, on_forecasts=keep)
        return score(
            one,
            one.name,
            config,
            on_progress,
            seeds=seeds,
            num_samples=num_samples,
            cache=cache,
            on_note=note_once,
            on_forecasts=keep,
        )

    # Both are opened before one is scored: a name that is wrong costs no scores.
    ours, theirs = opened(model), None if against is None else opened(against)
    other = None if theirs is None else scored(theirs, None if pairs is None else pairs.original)
    result = scored(ours, _all_of(None if pairs is None else pairs.compressed, on_forecasts))
    known = (one for one in (result, other) if one is not None and one.model == SEASONAL_NAIVE)
    naive = next(known, None) or scored(SEASONAL_NAIVE)
    return EvaluatedModels(result, naive, other, None if pairs is None else pairs.summary())


def _all_of(*hooks: OnForecasts | None) -> OnForecasts | None:
    """One hook that calls those that are given; None if none is."""
    given = [hook for hook in hooks if hook is not None]

    def call(dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        for hook in given:
            hook(dataset, quantiles)

    return call if given else None


def check_evaluation(
    output: Path,
    *,
    gift_eval: bool = False,
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
) -> None:
    """Refuse, before any work, an output that :func:`save_evaluation` would refuse.

    Raises
    ------
    OutputExistsError, OutputError
        As :func:`tscompress.io.files.check_output`.
    """
    if _is_file(output):
        check_file(output, force=force, inputs=inputs)
    else:
        names = (*_FILES, *_LAYOUT) if gift_eval else _written(output)
        check_output(output, force=force, inputs=inputs, writes=names)


def _written(output: Path) -> tuple[str, ...]:
    """Files of an evaluation, with those of the layout that an earlier one wrote there."""
    return (*_FILES, *(name for name in _LAYOUT if is_own_file(output / name)))


def _is_file(output: Path) -> bool:
    return output.suffix == ".json" and not output.is_dir()


def save_evaluation(
    output: Path,
    evaluated: EvaluatedModels,
    margin: float,
    *,
    also: Callable[[Path], None] | None = None,
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
) -> None:
    """Write all scores to FILE.json; or to a directory, with CSV tables and the worst series drawn.

    Parameters
    ----------
    also
        Writes more into the directory.
    inputs
        What the output must not replace.

    Raises
    ------
    OutputExistsError
        ``output`` holds something and ``force`` is false, or is an input.
    """
    text = results_json(evaluated.to_dict(margin))
    if _is_file(output):
        write_output(output, text, force=force, inputs=inputs)
        return
    with new_directory(output, force=force, writes=_written(output), inputs=inputs) as directory:
        evaluated.model.to_csv(directory / _TABLE_FILE)
        if evaluated.against is not None:
            evaluated.against.to_csv(directory / _AGAINST_FILE)
        totals = table_csv(aggregate(evaluated.model, evaluated.naive))
        write_text_atomically(directory / _TOTALS_FILE, totals)
        write_text_atomically(directory / SCORES_FILE, text)
        if evaluated.fidelity is not None and evaluated.fidelity.worst:
            panels = [series.panel() for series in evaluated.fidelity.worst]
            save_figure(forecast_figure(panels), directory / _WORST_FILE)
        if also is not None:
            also(directory)


def score(
    model: Any,
    name: str,
    config: EvaluationConfig,
    on_progress: OnProgress = silent,
    *,
    seeds: Sequence[int] | None = None,
    num_samples: int | None = None,
    cache: ScoreCache | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_forecasts: OnForecasts | None = None,
) -> EvaluationResult:
    """Evaluate a model or ``"seasonal-naive"`` by ``config``.

    The other parameters are those of :func:`tscompress.evaluate`.
    """
    return evaluate(
        model,
        find_suite(config.suite, config.long_format),
        name=name,
        max_series=config.max_series,
        datasets=config.datasets,
        batch_size=config.batch_size,
        seed=config.seed,
        seeds=seeds,
        num_samples=num_samples,
        root=config.root,
        cross_learning=config.cross_learning,
        as_univariate=config.as_univariate,
        sort_quantiles=config.sort_quantiles,
        cache=cache,
        on_note=on_note,
        on_forecasts=on_forecasts,
        on_progress=on_progress,
    )
