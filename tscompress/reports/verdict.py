"""The verdict of a report: what a run found, in plain words, from results and their intervals.

Forecasts are judged by the ratios of WQL and MASE to the original's, each with a 95% interval from
low to high, and by the margin m of the comparison. The first rule that fits counts:

================================  =====================================================  ======
a low > 1                         "worse"; "slightly worse" if no high of these > 1 + m  loss
an interval is unknown            the ratios, "too few to tell a loss from chance"       unsure
all low = high = 1                "the same scores"                                      good
a high > 1 + m                    "no clear change", or "better" with what is better;    unsure
                                  "a loss of up to ... cannot be ruled out"
a high < 1                        "better"                                               good
otherwise                         "no measurable loss"                                   good
================================  =====================================================  ======

- Few series (:func:`few_series`): good becomes unsure, and "no measurable loss" becomes "no loss
  seen".
- A dataset whose low > 1 + m is named, and good becomes unsure.
- Tasks of the probe that got worse are counted in the first clause, and the level is loss.
- Speed: not changed measurably if the interval of the latency ratio has 1, or if the ratio is
  written as 1.00; unsure without an interval.
- Skill: of lost tasks "most" is gone if less than half of the original's is kept, else "some".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from tscompress.benchmark.results import BenchResult
from tscompress.evaluation.comparison import Comparison, ModelComparison, Ratio, few_series
from tscompress.evaluation.results import METRICS, EvaluationResult
from tscompress.io.text import counted, listed, percent
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
        Of forecasts and skills: no measurable loss, a loss, too few series to tell, or not
        measured.
    clauses
        On forecasts, speed, size and skill, without full stops. The first also counts skills lost.
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
        level, quality = _quality(comparison, original, _series(original, own_series))
        advice += _quality_advice(level, original)
    if probe is not None and (lost := _lost(probe)):
        able = sum(group.able for group in probe.groups)
        joint = "but" if level == "good" else "and"
        of = f"{len(lost)} of the {able} tasks" if able > 1 else "the one task"
        quality += f", {joint} {of} of the probe got worse"
        level = "loss"
    if level == "loss":
        advice.append("`tscompress recover` wins back some of what was lost.")
    speed = [] if bench is None else [_speed(bench)]
    skill = [] if probe is None else [_skill(probe)]
    unmeasured = [
        name for name, part in (("speed", bench), ("skills", probe)) if part is None
    ]  # fmt: skip
    if unmeasured:
        were = "were" if "skills" in unmeasured else "was"
        skill.append(f"{' and '.join(unmeasured)} {were} not measured")
    first = quality[0].upper() + quality[1:]
    return Verdict(level, (first, *speed, _size(plan, bench), *skill), tuple(advice))


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
    """The first rule that fits; see above."""
    (model,) = comparison.models
    ratios: dict[str, Ratio] = {metric: getattr(model, metric) for metric in METRICS[::-1]}
    known = {
        metric: (ratio.low, ratio.high)
        for metric, ratio in ratios.items()
        if ratio.low is not None and ratio.high is not None
    }
    most = 1 + comparison.margin
    few = any(few_series(original).values())
    unsure = ", too few to be sure" if few else ""
    worse = {metric: ends for metric, ends in known.items() if ends[0] > 1}
    better = {metric: ends for metric, ends in known.items() if ends[1] < 1}
    told = listed([_between(*one) for one in (*worse.items(), *better.items())])
    if worse:
        change = "slightly worse" if all(high <= most for _, high in worse.values()) else "worse"
        return "loss", f"{change} on {where}: {told}{unsure}"
    if len(known) < len(ratios):
        changes = listed([f"{metric} {_change(one.ratio)}" for metric, one in ratios.items()])
        return "unsure", f"{changes} on {where}, too few to tell a loss from chance"
    if all(ends == (1.0, 1.0) for ends in known.values()):
        return "good", f"the same scores on {where}"
    parts = _worse_datasets(model, most)
    exception = f", but worse on {listed(parts)}" if parts else ""
    level: Level = "unsure" if few or parts else "good"
    open_ = {metric: _at_most(high - 1) for metric, (_, high) in known.items() if high > most}
    if better:
        tail = "".join(f", though {one} may be up to {loss} worse" for one, loss in open_.items())
        level = "unsure" if open_ else level
        return level, f"better on {where}: {told}{tail}{unsure}{exception}"
    if open_:
        largest = _at_most(max(high for _, high in known.values()) - 1)
        tail = f", though a loss of up to {largest} cannot be ruled out"
        return "unsure", f"no clear change on {where}{tail}{exception}"
    loss = "no loss seen" if few else "no measurable loss"
    return level, f"{loss} on {where}{unsure}{exception}"


def _worse_datasets(model: ModelComparison, most: float) -> list[str]:
    """Names of those with a score that is surely worse by more than the margin."""
    return [
        part.dataset
        for part in model.datasets
        if any((getattr(part, metric).low or 0.0) > most for metric in METRICS)
    ]


def _between(metric: str, ends: tuple[float, float]) -> str:
    low, high = (_digits(abs(end - 1)) for end in ends)
    least, greatest = sorted((low, high))
    if greatest == 0:
        span = "less than 0.1%"
    elif least == greatest:
        span = percent(greatest)
    else:
        span = f"{percent(least).removesuffix('%')} to {percent(greatest)}"
    return f"{metric} is {span} {'worse' if ends[0] > 1 else 'better'}"


def _change(ratio: float) -> str:
    """Of a score without an interval."""
    share = _digits(abs(ratio - 1))
    if share == 0:
        return "is the same"
    if ratio >= 2:
        return f"is {ratio:.1f} times as large"
    return f"is {percent(share)} {'worse' if ratio > 1 else 'better'}"


def _digits(share: float) -> float:
    """Rounded to a tenth of a per cent; from 10% on to a whole one."""
    return round(share, 3 if share < 0.0995 else 2)


def _at_most(share: float) -> str:
    """Rounded up, as one says what a share does not exceed."""
    steps = 1000 if share < 0.0995 else 100
    return percent(math.ceil(round(steps * share, 6)) / steps)


def _quality_advice(level: Level, original: EvaluationResult) -> Iterator[str]:
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
    unchanged = round(ratio, 2) == 1
    if unchanged or (interval is not None and interval[0] <= 1 <= interval[1]):
        return "no measurable change in speed"
    unsure = ", timed in too few rounds to be sure" if interval is None else ""
    if ratio < 1:
        return f"{_times(1 / ratio)} as fast{unsure}"
    return f"slower: takes {_times(ratio)} as long{unsure}"


def _times(factor: float) -> str:
    digits = 2 if factor < 1.095 else 1 if factor < 9.95 else 0
    return f"{factor:.{digits}f}".removesuffix(".0") + " times"


def _size(plan: Plan, bench: BenchResult | None) -> str:
    if bench is not None:
        share = bench.ratios(bench.models[-1].name)["parameters"]
        return f"{percent(share, 0)} of the parameters"
    shares = []
    for part, name in (("attention", "attention"), ("feed_forward", "feed-forward")):
        before, after = plan.parameters(part)
        if before:
            shares.append(f"{percent(after / before, 0)} of the {name} parameters")
    return listed(shares) or "no layer was changed"


def _skill(probe: ProbeComparison) -> str:
    if probe.kept is None:
        return "the original can do none of the tasks of the probe, so nothing could be lost there"
    kept = percent(probe.kept.value, 0)
    lost = _lost(probe)
    if round(100 * probe.kept.value) >= 100:
        kept = "nearly all" if lost else "all"
    elif round(100 * probe.kept.value) <= 0:
        kept = "nothing"
    told = [
        f"{much} of {listed(names)}"
        for much, names in (
            ("most", _names(task for task in lost if _left(task) < _MOST)),
            ("some", _names(task for task in lost if _left(task) >= _MOST)),
        )
        if names
    ]
    tail = f", loses {' and '.join(told)}" if told else ""
    return f"keeps {kept} of what the probe measures{tail}"


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
