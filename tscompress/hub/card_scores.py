"""Measurements of a checkpoint: scores and latencies, from files of evaluate, bench and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import pydantic

from tscompress.checkpoints.provenance import hashes_of_model
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.comparison import compare_results
from tscompress.evaluation.results import (
    METRICS,
    SCORES_FILE,
    EvaluationResult,
    load_results,
    relative,
    series_text,
)
from tscompress.hub.origin import CheckpointRecord, read_record
from tscompress.io.files import user_path
from tscompress.io.own_outputs import is_own_file
from tscompress.io.text import counted
from tscompress.io.untrusted import first_problem, single_line


@dataclass(frozen=True)
class CardScore:
    """Scores on one dataset.

    Attributes
    ----------
    original
        The uncompressed model's, with the same keys.
    series, windows
        Number of series, and of windows of each; None: unknown, and one.
    """

    dataset: str
    scores: Mapping[str, float]
    original: Mapping[str, float] | None = None
    series: int | None = None
    windows: int | None = None

    @property
    def series_shown(self) -> str:
        """The series, and how many windows each has; a dash if unknown."""
        if self.series is None:
            return "–"
        return series_text(self.series * (self.windows or 1), self.windows)


@dataclass(frozen=True)
class CardScores:
    """Forecast quality, for the card.

    Attributes
    ----------
    suite
        Name of the evaluation suite; None if the file does not record it.
    ratios
        WQL and MASE: geometric mean over the datasets of the ratio to the original.
    intervals
        95% confidence interval of each ratio, where it was measured.
    model, against
        Names of the two models in the results; None if the file does not record them.
    settings
        Of the evaluation, what is unlike the default.
    sha256
        Of the files of the model; None if they do not record it.
    """

    rows: tuple[CardScore, ...]
    suite: str | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    model: str | None = None
    against: str | None = None
    settings: tuple[str, ...] = ()
    sha256: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        ratios = [f"{metric} × {value:.3f}" for metric, value in self.ratios.items()]
        facts = [repr(self.model), f"{len(self.rows)} datasets", *ratios]
        return f"CardScores({', '.join(facts)})"

    @classmethod
    def of(cls, result: EvaluationResult, original: EvaluationResult | None = None) -> CardScores:
        """Scores as :func:`tscompress.evaluate` gives them, next to those of the original.

        Raises
        ------
        UsageError, DataError
            The two were not evaluated on the same series, or a ratio is not finite.
        """
        theirs = {row.dataset: row for row in original.rows} if original is not None else {}
        rows = tuple(
            CardScore(
                row.dataset,
                {metric: getattr(row, metric) for metric in METRICS},
                {metric: getattr(theirs[row.dataset], metric) for metric in METRICS}
                if row.dataset in theirs
                else None,
                row.series_count // (row.windows or 1),
                row.windows,
            )
            for row in result.rows
        )
        settings = () if result.settings is None else tuple(result.settings.words())
        if original is None:
            return cls(
                rows, result.suite, model=result.model, settings=settings, sha256=result.sha256
            )
        ratios = relative(result, original)
        return cls(
            rows,
            result.suite,
            {m: ratios[m] for m in METRICS},
            _intervals(result, original),
            result.model,
            original.model,
            settings,
            result.sha256,
        )


def _intervals(
    result: EvaluationResult, original: EvaluationResult
) -> dict[str, tuple[float, float]]:
    """Confidence intervals of the ratios, if both results have contributions of series."""
    if any(row.series is None for row in (*result.rows, *original.rows)):
        return {}
    (found,) = compare_results([original, result]).models
    ratios = {metric: getattr(found, metric) for metric in METRICS}
    return {m: (r.low, r.high) for m, r in ratios.items() if r.low is not None}


def read_scores(path: str | Path) -> CardScores:
    """Scores from JSON: ``EvaluationResult.to_dict()``, or ``scores.json`` of ``evaluate``.

    Raises
    ------
    DataError
        The file has neither format.
    UsageError
        The original was not evaluated on the same series.
    """
    return CardScores.of(*load_results(path))


_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class _BenchedWorkload(pydantic.BaseModel):
    batch_size: int
    context_length: int
    horizon: int
    device: str
    num_samples: int | None = None
    cross_learning: bool = False


class _BenchedModel(pydantic.BaseModel):
    name: str
    latency_ms: _Positive
    latency_p95_ms: _Amount | None = None
    macs: _Amount | None = None
    parameters: int | None = None
    kv_cache_bytes: _Amount | None = None
    peak_memory_bytes: _Amount | None = None
    ratios: dict[str, _Amount] = {}
    latency_ratio_interval: tuple[_Positive, _Positive] | None = None
    dtype: str | None = None


class Bench(pydantic.BaseModel):
    """Figures from ``tscompress bench``, for the card."""

    workload: _BenchedWorkload
    threads: int
    device_name: str
    torch_version: str
    models: tuple[_BenchedModel, ...] = pydantic.Field(min_length=1)

    @property
    def against(self) -> str | None:
        """The model that the ratios are to, if there are two."""
        return None if len(self.models) == 1 else self.models[0].name

    @property
    def settings(self) -> list[str]:
        """What is unlike the default, and the dtypes that the models compute in."""
        samples = self.workload.num_samples
        said = [] if samples is None else [counted(samples, "sample path")]
        together = ["cross-learning"] if self.workload.cross_learning else []
        dtypes = dict.fromkeys(single_line(one.dtype) for one in self.models if one.dtype)
        return [*said, *together, *dtypes]


def read_bench(path: str | Path) -> dict[str, Any]:
    """Read the output of ``tscompress bench --json``.

    Raises
    ------
    DataError
        The file has other content.
    """
    content = read_record(user_path(path))
    parse_bench(content, repr(str(path)))
    return content


def parse_bench(content: Mapping[str, Any], source: str) -> Bench:
    """The measurements in ``content``; ``source`` names it in the error.

    Raises
    ------
    DataError
        They are not in the format of ``tscompress bench --json``.
    """
    try:
        return Bench.model_validate(content)
    except pydantic.ValidationError as error:
        where, reason, _ = first_problem(error)
        raise DataError(
            f"{source} is not what `tscompress bench --json` prints: {where}: {reason}."
        ) from None


def scores_of_run(checkpoint: CheckpointRecord) -> CardScores | None:
    """Scores that ``tscompress run`` wrote above this checkpoint; None without any."""
    report = _report_of_run(checkpoint)
    if report is None:
        return None
    above = checkpoint.directory.resolve().parent
    if (above / SCORES_FILE).is_file():
        return read_scores(above / SCORES_FILE)
    try:
        ours, theirs = (
            pd.read_csv(above / name).set_index("dataset")
            for name in ("scores.csv", "scores-original.csv")
        )
        rows = tuple(
            CardScore(
                str(dataset),
                {metric: float(ours.loc[dataset, metric]) for metric in METRICS},
                {metric: float(theirs.loc[dataset, metric]) for metric in METRICS},
            )
            for dataset in ours.index
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ratios = report.get("relative") or {}
    evaluation = report["recipe"].get("evaluation") or {}
    return CardScores(rows, evaluation.get("suite"), {m: ratios[m] for m in METRICS if m in ratios})


def bench_of_run(checkpoint: CheckpointRecord) -> dict[str, Any] | None:
    """Latencies that ``tscompress run`` wrote above this checkpoint; None without any.

    They are of the original and of the checkpoint: a graph of it, timed as third, is left out.
    """
    report = _report_of_run(checkpoint)
    bench = None if report is None else report.get("bench")
    if report is None or bench is None:
        return None
    parse_bench(bench, repr(str(checkpoint.directory.resolve().parent / "report.json")))
    if report.get("exported") is None:
        return dict(bench)
    return {**bench, "models": bench["models"][:2]}


def _report_of_run(checkpoint: CheckpointRecord) -> dict[str, Any] | None:
    """``report.json`` above the checkpoint, if it is of these files.

    One that was written before it had their hashes is of the checkpoint that it names.
    """
    directory = checkpoint.directory.resolve()
    path = directory.parent / "report.json"
    if not is_own_file(path):  # other programs write files of this name, too
        return None
    report = read_record(path)
    plan = checkpoint.plan
    if plan is None or report.get("plan") != plan.model_dump(mode="json"):
        return None
    if report.get("sha256") is None:
        same = report.get("checkpoint") == directory.name
    else:
        same = report["sha256"] == checkpoint.provenance.get("sha256")
    return report if same and isinstance(report.get("recipe"), dict) else None


def about_measurements(
    checkpoint: CheckpointRecord,
    repo_id: str,
    scores: CardScores | None,
    bench: Mapping[str, Any] | None,
) -> list[str]:
    """Reasons to doubt that scores or latencies are of this checkpoint, one sentence each."""
    named = {"scores": None if scores is None else scores.model}
    named["latencies"] = None if bench is None else str(bench["models"][-1]["name"])
    ours = checkpoint.names(repo_id)
    return [
        f"the {what} are of a model called {name!r}; check that it is this one"
        for what, name in named.items()
        if name is not None and name.removesuffix(" (2)") not in ours
    ]


def check_scores_are_of(checkpoint: CheckpointRecord, name: str, scores: CardScores) -> None:
    """Refuse scores of the original against this model, and those of other weights.

    Raises
    ------
    UsageError
    """
    ours = checkpoint.names(name)
    if scores.against in ours and scores.model not in ours:
        raise UsageError(
            f"the scores are of {scores.model!r} against {scores.against!r}, the wrong way round; "
            "evaluate this model, with the original as --against."
        )
    recorded = checkpoint.provenance.get("sha256")
    here = hashes_of_model(checkpoint.directory, recorded) if isinstance(recorded, dict) else None
    if None not in (here, scores.sha256) and here != scores.sha256:
        raise UsageError(
            f"the scores are of {scores.model!r} with other weights or settings than "
            f"{str(checkpoint.directory)!r} has: evaluate it again."
        )


def check_bench_is_of(checkpoint: CheckpointRecord, bench: Bench) -> None:
    """Refuse latencies of a model with another number of parameters, or of more than two models.

    Raises
    ------
    UsageError
    """
    if len(bench.models) > 2:
        raise UsageError(
            f"the latencies are of {len(bench.models)} models; a card has those of this model and "
            "of one that it is held against: bench these two, without --share-cross-attention."
        )
    first, last = bench.models[0], bench.models[-1]
    if last.parameters is None or last.parameters == checkpoint.parameters:
        return
    if first.parameters == checkpoint.parameters:
        raise UsageError(
            f"the latencies are of {last.name!r} against {first.name!r}, the wrong way round; "
            "bench this model, with the original as --against."
        )
    raise UsageError(
        f"the latencies are of {last.name!r}, which has {last.parameters:,} parameters; this "
        f"model has {checkpoint.parameters:,}: bench this one."
    )
