"""Strips of the report, as wide as their column: ratios by dataset, skills by group of tasks."""

from __future__ import annotations

import math
from typing import NamedTuple

from tscompress.evaluation.comparison import DatasetComparison, ModelComparison, Ratio
from tscompress.io.text import counted
from tscompress.probing.results import CovariateChange, ProbeComparison, ProbeResult
from tscompress.probing.skill import Estimate
from tscompress.reports.svg import Value, limits_of, ticks


class ForestRow(NamedTuple):
    """A ratio on a strip; positions in per cent of its width."""

    name: str
    series: str
    """``20 series``, ``20 series × 3 windows``; empty for a mean."""
    ratio: Ratio
    at: float
    low: float | None
    high: float | None
    is_mean: bool = False


class Forest(NamedTuple):
    """Ratios of all datasets on one logarithmic scale, geometric means last."""

    rows: tuple[ForestRow, ...]
    one: float
    ticks: tuple[tuple[float, str], ...]


def forest(model: ModelComparison, metric: str, exported: ModelComparison | None = None) -> Forest:
    """Where the ratios of one metric lie on a strip; of the exported model's, the mean."""
    named: list[tuple[str, str, Ratio]] = [
        (part.dataset, _size(part), getattr(part, metric)) for part in model.datasets
    ]
    named.append(("geometric mean", "", getattr(model, metric)))
    if exported is not None:
        named.append(("geometric mean, exported", "", getattr(exported, metric)))
    values = [v for _, _, r in named for v in (r.ratio, r.low, r.high) if v is not None and v > 0]
    low, high = limits_of([math.log(value) for value in [*values, 0.995, 1.005]])

    def place(value: Value) -> float | None:
        if value is None or value <= 0 or not math.isfinite(value):
            return None
        return round(100 * (math.log(value) - low) / (high - low), 2)

    rows = tuple(
        ForestRow(
            name,
            series,
            ratio,
            place(ratio.ratio) or 0.0,
            place(ratio.low),
            place(ratio.high),
            is_mean=not series,
        )
        for name, series, ratio in named
    )
    shown = ticks((math.exp(low), math.exp(high)), 3)
    placed = tuple((at, text) for value, text in shown if (at := place(value)) is not None)
    return Forest(rows, place(1.0) or 0.0, placed)


def _size(part: DatasetComparison) -> str:
    windows = part.windows or 1
    series = counted(part.series_count // windows, "series")
    return series if windows == 1 else f"{series} × {counted(windows, 'window')}"


class SkillRow(NamedTuple):
    """Mean skill of a group of tasks on a strip; positions in per cent of its width."""

    name: str
    tasks: int
    original: float
    compressed: float
    seasonal_naive: float
    kept: Estimate | None
    able: int
    at: tuple[float, float, float]
    """Of original, compressed and seasonal naive."""


class SkillStrip(NamedTuple):
    """Skills of all groups on one scale, the mean of the groups last."""

    rows: tuple[SkillRow, ...]
    zero: float
    ticks: tuple[tuple[float, str], ...]


def skill_strip(original: ProbeResult, compressed: ProbeResult) -> SkillStrip:
    """Where the skills of both models and of seasonal naive lie on a strip."""
    comparison = compressed.against(original)
    before, after, naive = original.groups(), compressed.groups(), compressed.naive_groups()
    values = {
        change.group: (before[change.group].value, after[change.group].value, naive[change.group])
        for change in comparison.groups
    }
    means = (original.overall().value, compressed.overall().value, sum(naive.values()) / len(naive))
    # Seasonal naive may be far below, where there is no season; it then lies at the edge.
    low = min(-0.25, *(value for row in (*values.values(), means) for value in row[:2])) - 0.03
    high = max(1.0, *(value for row in (*values.values(), means) for value in row)) + 0.03

    def place(value: float) -> float:
        return round(100 * (max(low, value) - low) / (high - low), 2)

    def row(name: str, kept: Estimate | None, able: int, tasks: int) -> SkillRow:
        skills = values.get(name, means)
        at = place(skills[0]), place(skills[1]), place(skills[2])
        return SkillRow(name, tasks, *skills, kept, able, at)

    rows = [row(c.group, c.kept, c.able, c.tasks) for c in comparison.groups]
    able = sum(change.able for change in comparison.groups)
    rows.append(row("mean of the groups", comparison.kept, able, len(comparison.tasks)))
    shown = tuple((place(value), f"{value:g}") for value in (-1.0, -0.5, 0.0, 0.5, 1.0))
    inside = tuple((at, text) for at, text in shown if float(text) > low)
    return SkillStrip(tuple(rows), place(0.0), inside)


class CovariateRow(NamedTuple):
    """Skill without covariates at a task, and what they add."""

    change: CovariateChange
    without: tuple[float, float]
    """Skill of original and compressed."""


def covariate_rows(
    original: ProbeResult, compressed: ProbeResult, comparison: ProbeComparison
) -> list[CovariateRow]:
    """A row for each task with covariates."""
    alone = [
        {score.name: score.without_covariates.value for score in result.tasks
         if score.without_covariates is not None}
        for result in (original, compressed)
    ]  # fmt: skip
    return [
        CovariateRow(change, (alone[0][change.name], alone[1][change.name]))
        for change in comparison.covariates
    ]
