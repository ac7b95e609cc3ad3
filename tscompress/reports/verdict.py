"""The verdict of a report: what a run found, in plain words, from results and their intervals.

Forecasts are judged by the ratios of WQL and MASE to the original's, each with a 95% interval from
low to high, and by the margin m of the comparison. The first rule that fits counts:

================================  =====================================================  ======
a low > 1                         "worse"; "slightly worse" if no high of these > 1 + m  loss
an interval is unknown            the ratios, and that series are too few, or that none  unsure
                                  has recorded scores, to tell a loss from chance
all low = high = 1                "the same scores"                                      good
a high > 1 + m                    "no clear change", or "better" with what is better;    unsure
                                  "a loss of up to ... cannot be ruled out"
a high < 1                        "better"                                               good
otherwise                         "no measurable loss"                                   good
================================  =====================================================  ======

- Few series (:func:`few_series`), or a single one however many its windows: good becomes unsure,
  and "no measurable loss" becomes "no loss seen".
- Datasets whose low > 1 + m are named, the worst with its interval, and good becomes unsure. Beside
  a loss of the mean only those are named whose low is also above the mean's high.
- Intervals: if the share of outcomes in the 80% interval is further from 80% than the original's,
  by more than 5 points, both are said and good becomes loss. Few series do not tell.
- Tasks of the probe that got worse are counted in the first clause, and the level is loss. Without
  such a task, groups of them that got worse together are named; without these, a share of skill
  kept below 95% makes good unsure.
- Speed: not changed measurably if the interval of the latency ratio has 1, or if the ratio is
  written as 1.00; unsure without an interval.
- Skill: of lost tasks "most" is gone if less than half of the original's is kept, else "some".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tscompress.benchmark.results import BenchResult
from tscompress.evaluation.comparison import (
    Comparison,
    DatasetComparison,
    ModelComparison,
    Ratio,
    few_series,
)
from tscompress.evaluation.fidelity import Fidelity
from tscompress.evaluation.results import METRICS, EvaluationResult
from tscompress.io.text import counted, listed, percent
from tscompress.plan.plan import Plan
from tscompress.probing.results import KEPT, ProbeComparison, TaskChange

Level = Literal["good", "loss", "unsure", "unknown"]
Ends = tuple[float, float]
#: Of a task's skill that is kept, below which most of it counts as lost.
_MOST = 0.5
#: Of the share of outcomes in the 80% interval, beyond which intervals got worse.
_COVERAGE_MARGIN = 0.05
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
    fidelity: Fidelity | None = None,
    own_series: bool = False,
    bench: BenchResult | None = None,
    probe: ProbeComparison | None = None,
) -> Verdict:
    """The verdict on a compressed model; missing measurements are named.

    Parameters
    ----------
    comparison, original
        Compressed against original, and the original's scores; both None without an evaluation.
    fidelity
        Of the same forecasts.
    own_series
        Whether the series are the user's, from a file.
    bench
        Of the original, the compressed model and perhaps its graph, in this order.
    """
    level: Level = "unknown"
    quality = "forecasts were not scored"
    advice: list[str] = []
    if comparison is not None and original is not None:
        level, quality = _quality(comparison, original, _series(original, own_series))
        few = _few(original)
        if fidelity is not None and not few and (coverage := _worse_coverage(fidelity)):
            quality += f", {_joint(level)} {coverage}"
            level = "loss" if level == "good" else level
        advice += _quality_advice(level, few)
    if probe is not None:
        if lost := _lost_skill(probe):
            quality += f", {_joint(level)} {lost}"
            level = "loss"
        elif _skill_is_open(probe):
            level = "unsure" if level == "good" else level
            advice.append("Probe more series (`--num-series`) to see whether skill was lost.")
    if level == "loss":
        advice.append("`tscompress recover` wins back some of what was lost.")
    speed = [] if bench is None else [_speed(bench)]
    skill = [] if probe is None else list(_skill(probe))
    unmeasured = [
        name for name, part in (("speed", bench), ("skills", probe)) if part is None
    ]  # fmt: skip
    if unmeasured:
        were = "were" if "skills" in unmeasured else "was"
        skill.append(f"{' and '.join(unmeasured)} {were} not measured")
    first = quality[0].upper() + quality[1:]
    return Verdict(level, (first, *speed, _size(plan, bench), *skill), tuple(advice))


def _joint(level: Level) -> str:
    return "but" if level == "good" else "and"


# --------------------------------------------------------------------------------------------------
# Forecasts
# --------------------------------------------------------------------------------------------------


def _series(original: EvaluationResult, own: bool) -> str:
    """``your 20 series``, or ``20 series of monash_m3_yearly``."""
    count = sum(row.series_count // (row.windows or 1) for row in original.rows)
    if own:
        return f"your {'one series' if count == 1 else counted(count, 'series')}"
    names = [row.dataset for row in original.rows]
    of = names[0] if len(names) == 1 else counted(len(names), "dataset")
    return f"{counted(count, 'series')} of {of}"


def _few(original: EvaluationResult) -> bool:
    """Whether the scores of a dataset rest on few series, or on a single one."""
    single = any(row.cluster_count == 1 for row in original.rows)
    return single or any(few_series(original).values())


def _quality(comparison: Comparison, original: EvaluationResult, where: str) -> tuple[Level, str]:
    """The first rule that fits; see above."""
    (model,) = comparison.models
    ratios = {metric: _ratio(model, metric) for metric in METRICS[::-1]}
    known = {
        metric: (ratio.low, ratio.high)
        for metric, ratio in ratios.items()
        if ratio.low is not None and ratio.high is not None
    }
    most = 1 + comparison.margin
    few = _few(original)
    unsure = ", too few to be sure" if few else ""
    worse = {metric: ends for metric, ends in known.items() if ends[0] > 1}
    better = {metric: ends for metric, ends in known.items() if ends[1] < 1}
    told = listed([_between(*one) for one in (*worse.items(), *better.items())])
    if worse:
        change = "slightly worse" if all(high <= most for _, high in worse.values()) else "worse"
        return "loss", f"{change} on {where}: {told}{unsure}{_far_worse(model, worse, most)}"
    parts = _worse_datasets(model, dict.fromkeys(METRICS, most))
    exception = f", but {parts}" if parts else ""
    if len(known) < len(ratios):
        changes = listed([f"{metric} {_change(one.ratio)}" for metric, one in ratios.items()])
        return "unsure", f"{changes} on {where}, {_untold(model, original)}{exception}"
    if all(ends == (1.0, 1.0) for ends in known.values()):
        return "good", f"the same scores on {where}"
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


def _worse_datasets(model: ModelComparison, limits: Mapping[str, float]) -> str:
    """Datasets with a ratio surely above the limit of its metric, the worst first and with it."""
    found = [
        (ratio.low, ratio.high, metric, part.dataset)
        for part in model.datasets
        for metric, limit in limits.items()
        if (ratio := _ratio(part, metric)).low is not None and ratio.high is not None
        if ratio.low > limit
    ]
    if not found:
        return ""
    found.sort(reverse=True)
    low, high, metric, _ = found[0]
    first, *others = dict.fromkeys(name for *_, name in found)
    less = f", less so on {listed(others)}" if others else ""
    return f"{metric} is {_span(low, high)} worse on {first}{less}"


def _far_worse(model: ModelComparison, worse: Mapping[str, Ends], most: float) -> str:
    """Datasets that lost more than the mean did."""
    limits = {metric: max(most, worse.get(metric, (most, most))[1]) for metric in METRICS}
    parts = _worse_datasets(model, limits)
    return f", and {parts}" if parts else ""


def _ratio(part: ModelComparison | DatasetComparison, metric: str) -> Ratio:
    found: Ratio = getattr(part, metric)
    return found


def _untold(model: ModelComparison, original: EvaluationResult) -> str:
    """Why there is no interval."""
    if any(row.series is None for row in original.rows):
        return "without scores of each series to tell a loss from chance"
    single = [
        part.dataset
        for part in model.datasets
        if any(_ratio(part, metric).low is None for metric in METRICS)
    ]
    of = f" of {listed(single)}" if 0 < len(single) < len(model.datasets) else ""
    return f"too few{of} to tell a loss from chance"


def _worse_coverage(fidelity: Fidelity) -> str:
    """Of the 80% interval, if it is clearly further from 80% than the original's."""
    before, after = fidelity.coverage
    if abs(after - 0.8) - abs(before - 0.8) <= _COVERAGE_MARGIN:
        return ""
    return (
        f"its 80% intervals hold {percent(after, 0)} of the outcomes, the original's "
        f"{percent(before, 0)}"
    )


def _between(metric: str, ends: Ends) -> str:
    return f"{metric} is {_span(*ends)} {'worse' if ends[0] > 1 else 'better'}"


def _span(low: float, high: float) -> str:
    """``1 to 3%``: how far the ends are from 1, both on one side."""
    least, greatest = sorted(_digits(abs(end - 1)) for end in (low, high))
    if greatest == 0:
        return "less than 0.1%"
    if least == greatest:
        return percent(greatest)
    return f"{percent(least).removesuffix('%')} to {percent(greatest)}"


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
    """A bound on a share: rounded up."""
    steps = 1000 if share < 0.0995 else 100
    return percent(math.ceil(round(steps * share, 6)) / steps)


def _quality_advice(level: Level, few: bool) -> Iterator[str]:
    if level == "unsure" or few:
        # More windows of the same series make none of them more.
        what = (
            "The scores rest on few series. Score more series"
            if few
            else "Score more series, or more windows of each (`--windows`, `windows:`),"
        )
        yield f"{what} for a surer verdict."


# --------------------------------------------------------------------------------------------------
# Speed, size and skill
# --------------------------------------------------------------------------------------------------


def _speed(bench: BenchResult) -> str:
    name = bench.models[1].name
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
        share = bench.ratios(bench.models[1].name)["parameters"]
        return f"{percent(share, 0)} of the parameters"
    shares = []
    parts = {"attention": "attention", "feed_forward": "feed-forward", "embedding": "embedding"}
    for part, name in parts.items():
        before, after = plan.parameters(part)
        if before:
            shares.append(f"{percent(after / before, 0)} of the {name} parameters")
    of_kept = " of the kept layers" if plan.kept_layers else ""
    return f"{listed(shares)}{of_kept}" if shares else "no layer was changed"


def _skill(probe: ProbeComparison) -> Iterator[str]:
    kept = None if probe.response is None else probe.response.slope_kept
    if kept is not None and _responds_less(probe):
        yield f"keeps {percent(kept.value, 0)} of its response to covariates"
    if probe.response is not None and not probe.tasks:
        return
    if probe.kept is None:
        yield "the original can do none of the tasks of the probe, so nothing could be lost there"
        return
    share = percent(probe.kept.value, 0)
    lost = _lost(probe)
    if round(100 * probe.kept.value) >= 100:
        share = "nearly all" if lost else "all"
    elif round(100 * probe.kept.value) <= 0:
        share = "nothing"
    told = [
        f"{much} of {listed(names)}"
        for much, names in (
            ("most", _names(task for task in lost if _left(task) < _MOST)),
            ("some", _names(task for task in lost if _left(task) >= _MOST)),
        )
        if names
    ]
    tail = f", loses {' and '.join(told)}" if told else ""
    if _skill_is_open(probe):
        tail = ", which may be chance"
    yield f"keeps {share} of what the probe measures{tail}"
    if probe.covariates_kept is not None and any(o.change == "lost" for o in probe.covariates):
        yield f"keeps {percent(probe.covariates_kept.value, 0)} of what covariates add"


def _lost_skill(probe: ProbeComparison) -> str:
    """Tasks that got worse, by number; without one, the groups or the use that did."""
    if lost := _lost(probe):
        able = sum(group.able for group in probe.groups)
        of = f"{len(lost)} of the {able} tasks" if able > 1 else "the one task"
        return f"{of} of the probe got worse"
    groups = [group.group.replace("-", " ") for group in probe.groups if group.lost]
    if groups:
        return f"the probe's tasks of {listed(groups)} got worse together"
    return "covariates are used less well" if _uses_covariates_less(probe) else ""


def _uses_covariates_less(probe: ProbeComparison) -> bool:
    return _responds_less(probe) or any(one.change == "lost" for one in probe.covariates)


def _responds_less(probe: ProbeComparison) -> bool:
    return probe.response is not None and any(one.change == "lost" for one in probe.response.tasks)


def _skill_is_open(probe: ProbeComparison) -> bool:
    """Whether a loss was seen that no task or group shows for sure."""
    return probe.kept is not None and probe.kept.value < KEPT and not _lost_skill(probe)


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
