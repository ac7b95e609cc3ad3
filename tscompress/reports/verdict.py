"""The verdict of a report: what a run found, in plain words, from results and their intervals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from tscompress.benchmark.results import BenchResult
from tscompress.evaluation.comparison import Comparison, Ratio, few_series
from tscompress.evaluation.results import METRICS, EvaluationResult
from tscompress.io.text import counted, listed
from tscompress.plan.plan import Plan
from tscompress.probing.results import ProbeComparison, TaskChange

Level = Literal["good", "loss", "unsure", "unknown"]
#: Of a task's skill that is kept, below which most of it counts as lost.
_MOST = 0.5
_PERIOD = re.compile(r"period-(\d+)\b")


class Verdict(NamedTuple):
    """What a run found.

    Attributes
    ----------
    level
        Of the forecasts: no measurable loss, a loss, too few series to tell, or not measured.
    clauses
        On forecasts, speed, size and skill, without full stops.
    advice
        Sentences on what to do next; commands in backticks.
    """

    level: Level
    clauses: tuple[str, ...]
    advice: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """All clauses in one."""
        return "; ".join(self.clauses) + "."


def make_verdict(
    plan: Plan,
    *,
    comparison: Comparison | None = None,
    original: EvaluationResult | None = None,
    own_series: bool = False,
    bench: BenchResult | None = None,
    probe: ProbeComparison | None = None,
) -> Verdict:
    """The verdict on a compressed model; what was not measured is said to be so.

    Parameters
    ----------
    comparison, original
        Compressed against original, and the original's scores; both None without an evaluation.
    own_series
        Whether the series are the user's, from a file.
    bench
        Of the original and the compressed model, in this order.
    """
    level: Level = "unknown"
    quality = "forecasts were not scored"
    advice: list[str] = []
    if comparison is not None and original is not None:
        where = _series(original, own_series)
        level, quality = _quality(comparison, original, where)
        advice += _quality_advice(level, comparison, original)
    speed = [] if bench is None else [_speed(bench)]
    skill = [] if probe is None else list(_skill(probe))
    unmeasured = [
        name for name, part in (("speed", bench), ("skills", probe)) if part is None
    ]  # fmt: skip
    if unmeasured:
        were = "were" if "skills" in unmeasured else "was"
        skill.append(f"{' and '.join(unmeasured)} {were} not measured")
    if level == "loss" or (probe is not None and _lost(probe)):
        advice.append("`tscompress recover` wins back some of what was lost.")
    clauses = [quality, *speed, _size(plan, bench), *skill]
    first = clauses[0]
    return Verdict(level, (first[0].upper() + first[1:], *clauses[1:]), tuple(advice))


# --------------------------------------------------------------------------------------------------
# Forecasts
# --------------------------------------------------------------------------------------------------


def _series(original: EvaluationResult, own: bool) -> str:
    """``your 20 series``, or ``20 series of monash_m3_yearly``."""
    count = sum(row.series_count // (row.windows or 1) for row in original.rows)
    if own:
        return "your series" if count == 1 else f"your {counted(count, 'series')}"
    names = [row.dataset for row in original.rows]
    of = names[0] if len(names) == 1 else counted(len(names), "dataset")
    return f"{counted(count, 'series')} of {of}"


def _quality(comparison: Comparison, original: EvaluationResult, where: str) -> tuple[Level, str]:
    (model,) = comparison.models
    ratios: dict[str, Ratio] = {metric: getattr(model, metric) for metric in METRICS[::-1]}
    known = {
        metric: (ratio.low, ratio.high)
        for metric, ratio in ratios.items()
        if ratio.low is not None and ratio.high is not None
    }
    if len(known) < len(ratios):
        changes = listed([f"{metric} {_change(one.ratio)}" for metric, one in ratios.items()])
        return "unsure", f"{changes} on {where}, too few to tell a loss from chance"
    if all(ends == (1.0, 1.0) for ends in known.values()):
        return "good", f"the same scores on {where}"
    few = any(few_series(original).values())
    unsure = ", too few to be sure" if few else ""
    worse = {metric: ends for metric, ends in known.items() if ends[0] > 1}
    better = {metric: ends for metric, ends in known.items() if ends[1] < 1}
    if worse or better:
        slight = all(high <= 1 + comparison.margin for _, high in worse.values())
        change = ("slightly worse" if slight else "worse") if worse else "better"
        told = listed([_between(*one) for one in (*worse.items(), *better.items())])
        level: Level = "loss" if worse else "unsure" if few else "good"
        return level, f"{change} on {where}: {told}{unsure}"
    largest = max(high for _, high in known.values()) - 1
    if round(largest, 3) <= comparison.margin:  # as it is written
        return "unsure" if few else "good", f"no measurable loss on {where}{unsure}"
    open_ = f"though a loss of up to {_percent(largest)} cannot be ruled out"
    return "unsure", f"no measurable loss on {where}, {open_}"


def _between(metric: str, ends: tuple[float, float]) -> str:
    low, high = sorted(abs(end - 1) for end in ends)
    direction = "worse" if ends[0] > 1 else "better"
    span = _percent(high) if _percent(low) == _percent(high) else (
        f"{_percent(low).removesuffix(' %')} to {_percent(high)}"
    )  # fmt: skip
    return f"{metric} is {span} {direction}"


def _change(ratio: float) -> str:
    """Of a score without an interval."""
    share = _percent(abs(ratio - 1))
    if share == "0 %":
        return "is the same"
    if ratio >= 2:
        return f"is {ratio:.1f} times as large"
    return f"is {share} {'worse' if ratio > 1 else 'better'}"


def _percent(share: float) -> str:
    """At most one digit behind the point."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %" if share < 0.0995 else _share(share)


def _quality_advice(
    level: Level, comparison: Comparison, original: EvaluationResult
) -> Iterator[str]:
    few = any(few_series(original).values())
    if level == "unsure" or few:
        yield (
            f"{'The scores rest on few series. ' if few else ''}Score more series, or more "
            "windows of each (`--windows`, `windows:`), for a surer verdict."
        )


# --------------------------------------------------------------------------------------------------
# Speed, size and skill
# --------------------------------------------------------------------------------------------------


def _speed(bench: BenchResult) -> str:
    name = bench.models[-1].name
    ratio = bench.ratios(name)["latency_ms"]
    interval = bench.latency_ratio_interval(name)
    if interval is not None and interval[0] <= 1 <= interval[1]:
        return "no faster"
    return f"{_times(1 / ratio)} as fast" if ratio < 1 else f"slower: takes {_times(ratio)} as long"


def _times(factor: float) -> str:
    return f"{factor:.2f} times" if factor < 1.095 else f"{factor:.2g} times"


def _size(plan: Plan, bench: BenchResult | None) -> str:
    if bench is not None:
        share = bench.ratios(bench.models[-1].name)["parameters"]
        return f"{_share(share)} of the parameters"
    shares = []
    for part, name in (("attention", "attention"), ("feed_forward", "feed-forward")):
        before, after = plan.parameters(part)
        if before:
            shares.append(f"{_share(after / before)} of the {name} parameters")
    return listed(shares) or "no layer was changed"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _skill(probe: ProbeComparison) -> Iterator[str]:
    if probe.kept is None:
        yield "the original can do none of the tasks of the probe, so nothing could be lost there"
        return
    kept = "all" if round(100 * probe.kept.value) >= 100 else _share(probe.kept.value)
    lost = _lost(probe)
    told = [
        f"{much} of {listed(names)}"
        for much, names in (
            ("most", _names(task for task in lost if _left(task) < _MOST)),
            ("some", _names(task for task in lost if _left(task) >= _MOST)),
        )
        if names
    ]
    tail = f", loses {' and '.join(told)}" if told else ""
    yield f"keeps {kept} of what the probe measures{tail}"
    if probe.covariates_kept is not None and any(one.change == "lost" for one in probe.covariates):
        yield f"keeps {_share(probe.covariates_kept.value)} of what covariates add"


def _lost(probe: ProbeComparison) -> list[TaskChange]:
    """What lost most first."""
    lost = [task for task in probe.tasks if task.change == "lost"]
    return sorted(lost, key=lambda task: task.compressed - task.original)


def _left(task: TaskChange) -> float:
    return 1.0 if task.kept is None else task.kept.value


def _names(tasks: Iterable[TaskChange]) -> Sequence[str]:
    """Of tasks, for people; those of one period are one."""
    names = (
        f"period {match[1]}" if (match := _PERIOD.match(task.name)) else task.name for task in tasks
    )
    return list(dict.fromkeys(names))
