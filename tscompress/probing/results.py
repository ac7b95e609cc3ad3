"""Skill of a model at each task, with intervals, and the share that a compressed model kept.

Where series come with covariates, the skill without them is measured too: what they add is the
model's use of other series, and a cut can lose it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from tscompress.errors import UsageError
from tscompress.evaluation.metrics import Band
from tscompress.evaluation.typical_series import Known
from tscompress.io.files import user_path, write_text_atomically
from tscompress.io.results import Result, results_json
from tscompress.io.strict import Strict
from tscompress.io.text import counted
from tscompress.probing.responses import (
    ResponseComparison,
    ResponseScore,
    compare_responses,
    share_text,
)
from tscompress.probing.skill import Array, Estimate, Losses, estimate
from tscompress.probing.tasks import ProbeTask

#: A model cannot do a task if its skill is at most this or its interval reaches 0; such skill
#: cannot be lost.
ABLE = 0.1
#: Smallest share of skill that counts as kept.
KEPT = 0.95
#: What covariates add, below which they mislead.
_MISLED = -0.05
#: Lower bound of a task's skill in means, so that one failed task does not dominate them.
FLOOR = -1.0
_NAMED = 4


class Example(Strict):
    """The first series of a task and its forecast, for figures."""

    context: Known
    label: Known
    best: tuple[float, ...]
    """Median of the best possible forecast."""
    forecast: Band
    covariates: tuple[Known, ...] = ()
    """Values at the steps of context and label, of the first covariates; None where unknown."""


class TaskScore(Strict):
    """One model at one task."""

    task: ProbeTask
    skill: Estimate
    seasonal_naive: float
    """Its skill."""
    coverage: float | None
    """Share of outcomes from the quantile 0.1 to 0.9, best 0.8; None without noise and of counts"""
    crossing_rate: float
    """Share of neighbouring quantiles that cross."""
    losses: Losses
    example: Example
    without_covariates: Estimate | None = None
    """Skill on the same series alone; None: the task has no covariates."""
    covariates_add: Estimate | None = None
    """Skill minus that without covariates."""

    @model_validator(mode="after")
    def _with_and_without(self) -> TaskScore:
        parts = self.losses.without_covariates, self.without_covariates, self.covariates_add
        if any((part is None) != (not self.task.covariates) for part in parts):
            raise ValueError(
                "skill without covariates belongs to tasks with covariates, and to all of them"
            )
        return self

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def able(self) -> bool:
        """Whether the model can do the task at all; see :data:`ABLE`."""
        return self.skill.value > ABLE and (self.skill.low is None or self.skill.low > 0)

    def draws(self) -> Array:
        """Skill on resampled series, ``[RESAMPLES]``."""
        return self.losses.resampled(self.name)

    def added_draws(self) -> Array:
        """What covariates add on resampled series, ``[RESAMPLES]``."""
        return self.draws() - self.losses.resampled(self.name, "without_covariates")


class ProbeResult(Result):
    """Skill of one model at each task."""

    kind: ClassVar[str] = "a result of a probe"
    command: ClassVar[str] = "tscompress probe --output"

    model: str
    seed: int
    num_samples: int | None = None
    """Sample paths of a Chronos-T5; None for the others."""
    tasks: tuple[TaskScore, ...]
    skipped: tuple[str, ...] = ()
    """Tasks with covariates that the model was not asked, because it reads none."""
    responses: tuple[ResponseScore, ...] = ()
    """How its forecasts respond to covariates; none in results of earlier versions."""

    def __repr__(self) -> str:
        groups = self.groups().items() if self.tasks else ()
        means = [f"{group} {found.value:.2f}" for group, found in groups]
        overall = [f"skill {self.overall().value:.2f}"] if self.tasks else []
        facts = [repr(self.model), counted(len(self.tasks), "task"), *overall, *means[:6]]
        facts += [counted(len(self.responses), "response")] if self.responses else []
        return f"ProbeResult({', '.join(facts)})"

    def __str__(self) -> str:
        return repr(self)

    def skills(self) -> dict[str, float]:
        """Name of a task to skill."""
        return {score.name: score.skill.value for score in self.tasks}

    def groups(self) -> dict[str, Estimate]:
        """Group to the mean skill of its tasks, none of them counted below :data:`FLOOR`."""
        return {group: _mean([scores]) for group, scores in _by_group(self.tasks).items()}

    def naive_groups(self) -> dict[str, float]:
        """The same of seasonal naive."""
        return {
            group: float(np.mean([max(FLOOR, score.seasonal_naive) for score in scores]))
            for group, scores in _by_group(self.tasks).items()
        }

    def overall(self) -> Estimate:
        """Mean over the groups, each counted once.

        Raises
        ------
        UsageError
            There is no task but those of the response to covariates, which have no skill.
        """
        if not self.tasks:
            raise UsageError(f"{self.model!r} was asked no task that has a skill; choose some.")
        return _mean(list(_by_group(self.tasks).values()))

    def against(self, original: ProbeResult) -> ProbeComparison:
        """Share of the original's skill that this model kept.

        Raises
        ------
        UsageError
            The two were probed on different series.
        """
        return compare_probes(self, original)

    def summary(self) -> dict[str, Any]:
        """Mean skills for JSON, without the tasks."""
        return {
            "model": self.model,
            "overall": self.overall().model_dump() if self.tasks else None,
            "groups": {name: found.model_dump() for name, found in self.groups().items()},
            "seasonal_naive": self.naive_groups(),
        }

    def to_dict(self, *, series: bool = True) -> dict[str, Any]:
        """Plain data, for JSON; with ``series`` :meth:`from_dict` reads it back.

        Parameters
        ----------
        series
            Include the numbers of every series and the examples, which are most of the data.
        """
        left_out: Any = {
            "tasks": {"__all__": {"losses", "example"}},
            "responses": {"__all__": {"columns"}},
        }
        return self.model_dump(mode="json", exclude=None if series else left_out)

    def save(self, path: str | Path) -> None:
        """Write JSON; the file is replaced in one step or not at all."""
        write_text_atomically(user_path(path), results_json(probe_content(self)))

    @classmethod
    def load(cls, path: str | Path) -> ProbeResult:
        """Read the output of :meth:`save` or ``tscompress probe --output``; DataError otherwise."""
        return load_probes(path)[0]


def probe_content(
    result: ProbeResult, original: ProbeResult | None = None, *, series: bool = True
) -> dict[str, Any]:
    """Content of a file of probes; :func:`load_probes` reads it back if it has the ``series``."""
    content = {"result": result.to_dict(series=series), "summary": result.summary()}
    if original is not None:
        content |= {
            "against": original.to_dict(series=series),
            "comparison": result.against(original).to_dict(),
        }
    return content


def load_probes(path: str | Path) -> tuple[ProbeResult, ...]:
    """The result in a file and, if the file has it, that of the original.

    Raises
    ------
    DataError
        There is no such file, or it holds something else.
    """
    return ProbeResult.read_file(Path(path))


def _by_group(scores: Iterable[TaskScore]) -> dict[str, list[TaskScore]]:
    found: dict[str, list[TaskScore]] = {}
    for score in scores:
        found.setdefault(score.task.group, []).append(score)
    return found


def _mean(groups: Sequence[Sequence[TaskScore]]) -> Estimate:
    """Mean over groups of the mean over their tasks."""
    value = np.mean([np.mean([max(FLOOR, s.skill.value) for s in scores]) for scores in groups])
    return estimate(float(value), _mean_draws(groups))


def _mean_draws(groups: Sequence[Sequence[TaskScore]]) -> Array:
    means = [np.mean([np.maximum(FLOOR, s.draws()) for s in scores], axis=0) for scores in groups]
    return np.asarray(np.mean(means, axis=0))


# --------------------------------------------------------------------------------------------------
# Two models
# --------------------------------------------------------------------------------------------------


class TaskChange(Strict):
    """Change of the skill at one task."""

    name: str
    group: str
    original: float
    compressed: float
    kept: Estimate | None
    """Compressed / original; None where the original cannot do the task."""
    change: Literal["kept", "lost", "gained", "absent"]
    """``absent``: the original cannot do it, nor can the compressed model."""


class CovariateChange(Strict):
    """Change of what covariates add to the skill at one task."""

    name: str
    original: float
    compressed: float
    kept: Estimate | None
    """Compressed / original; None where they add too little to the original."""
    change: Literal["kept", "lost", "misled"]
    """``misled``: they added nothing to the original, and make the compressed model worse."""


class GroupChange(Strict):
    """Change of the skill at the tasks of a group that the original can do."""

    group: str
    able: int
    """Tasks that the original can do."""
    tasks: int
    original: float | None
    compressed: float | None
    """Mean skill at those; None without any."""
    kept: Estimate | None

    @property
    def lost(self) -> bool:
        """Whether the tasks surely lost skill together, even if none did by itself."""
        kept = self.kept
        return kept is not None and kept.value < KEPT and (kept.high is None or kept.high < 1)


class ProbeComparison(Strict):
    """Skill of a compressed model relative to its original."""

    compressed: str
    original: str
    kept: Estimate | None
    """Share of the original's mean skill at the tasks that it can do; each group counts once."""
    groups: tuple[GroupChange, ...]
    tasks: tuple[TaskChange, ...]
    covariates_kept: Estimate | None = None
    """Share of what covariates add to the original, over the tasks where they add something."""
    covariates: tuple[CovariateChange, ...] = ()
    response: ResponseComparison | None = None
    """Of the response to covariates; None unless both models were asked."""

    def __repr__(self) -> str:
        kept = "nothing to keep" if self.kept is None else f"skill kept {share_text(self.kept)}"
        lost = f"{len(self._changed('lost'))} of {len(self.tasks)} tasks lost"
        facts = [f"{self.compressed!r} against {self.original!r}", kept, lost]
        if self.response is not None and self.response.slope_kept is not None:
            facts.append(f"response kept {share_text(self.response.slope_kept)}")
        return f"ProbeComparison({', '.join(facts)})"

    def __str__(self) -> str:
        return repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**self.model_dump(mode="json"), "lines": self.lines()}

    def lines(self) -> list[str]:
        """Sentences on skill kept, lost and gained, and on tasks that the original cannot do."""
        found = [self._overall()] if self.tasks else []
        for group in self.groups:
            lost = [
                task for task in self.tasks if (task.group, task.change) == (group.group, "lost")
            ]
            if lost and group.kept is not None:
                lost.sort(key=lambda task: task.compressed - task.original)
                names = _listed([f"{t.name} ({t.original:.2f} → {t.compressed:.2f})" for t in lost])
                found.append(f"lost in {group.group}, {share_text(group.kept)} kept: {names}.")
            elif group.lost and group.kept is not None:
                share = share_text(group.kept)
                found.append(f"lost in {group.group}, {share} kept: by no task for sure.")
        found += self._use_of_covariates()
        found += [] if self.response is None else self.response.lines()
        if gained := self._changed("gained"):
            found.append(f"gained: {_listed([task.name for task in gained])}.")
        if absent := self._changed("absent"):
            found.append(
                f"could not be lost: {_listed([task.name for task in absent])}; the original "
                f"cannot do these (skill {ABLE:g} or less, or maybe none), so a cut costs nothing "
                "there."
            )
        return found

    def _use_of_covariates(self) -> list[str]:
        """Sentences on other series that the compressed model uses less, or is misled by."""
        told = {
            change: [
                f"{one.name} ({one.original:.2f} → {one.compressed:.2f})"
                for one in sorted(self.covariates, key=lambda one: one.compressed - one.original)
                if one.change == change
            ]
            for change in ("lost", "misled")
        }
        found = []
        if told["lost"] and self.covariates_kept is not None:
            found.append(
                f"use of covariates was lost, {share_text(self.covariates_kept)} of what they add "
                f"to the skill is kept: {_listed(told['lost'])}."
            )
        if told["misled"]:
            found.append(f"{self.compressed} is misled by covariates: {_listed(told['misled'])}.")
        return found

    def _changed(self, change: str) -> list[TaskChange]:
        return [task for task in self.tasks if task.change == change]

    def _overall(self) -> str:
        able = sum(group.able for group in self.groups)
        if self.kept is None:
            return f"{self.original} can do none of the {len(self.tasks)} tasks: nothing to lose."
        lost = len(self._changed("lost"))
        return (
            f"{self.compressed} keeps {share_text(self.kept)} of the skill of {self.original} at "
            f"{able} of {counted(len(self.tasks), 'task')}, those that it can do; "
            + (f"{lost} of them got worse." if lost else "none of them got worse.")
        )


def _listed(names: Sequence[str]) -> str:
    """The first few by name, the others by number."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def compare_probes(compressed: ProbeResult, original: ProbeResult) -> ProbeComparison:
    """Compare task by task; see :meth:`ProbeResult.against`.

    Raises
    ------
    UsageError
        The two were probed on different series.
    """
    compressed, original = shared_tasks(compressed, original), shared_tasks(original, compressed)
    if _asked(compressed) != _asked(original):
        raise UsageError(
            f"{compressed.model!r} and {original.model!r} were probed with different tasks or "
            "seeds; probe both with the same, and with halved=True beside a Chronos-T5."
        )
    pairs = list(zip(compressed.tasks, original.tasks, strict=True))
    able = [(ours, theirs) for ours, theirs in pairs if theirs.able]
    names = list(_by_group(original.tasks))
    kept = _kept([[pair for pair in able if pair[1].task.group == name] for name in names])
    with_covariates = [pair for pair in pairs if pair[1].covariates_add is not None]
    return ProbeComparison(
        compressed=compressed.model,
        original=original.model,
        kept=kept,
        groups=tuple(_group_change(name, pairs, able) for name in names),
        tasks=tuple(_task_change(*pair) for pair in pairs),
        covariates_kept=_added_kept([pair for pair in with_covariates if _adds(pair[1])]),
        covariates=tuple(_covariate_change(*pair) for pair in with_covariates),
        response=compare_responses(compressed.responses, original.responses),
    )


def _asked(result: ProbeResult) -> list[Any]:
    skills = [score.task for score in result.tasks]
    return [result.seed, skills, [score.task for score in result.responses]]


def shared_tasks(result: ProbeResult, other: ProbeResult) -> ProbeResult:
    """A result without the tasks that the other model was not asked.

    Also without the responses, if the other's result has none: earlier versions took none.
    """
    asked = tuple(score for score in result.tasks if score.name not in other.skipped)
    responses = result.responses if other.responses else ()
    return result.model_copy(update={"tasks": asked, "responses": responses})


Pair = tuple[TaskScore, TaskScore]


def _kept(groups: Sequence[Sequence[Pair]]) -> Estimate | None:
    """Ratio of mean skills, compressed to original; None if the groups are empty."""
    ours, theirs = ([[pair[i] for pair in group] for group in groups if group] for i in (0, 1))
    if not theirs:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = _mean_draws(ours) / _mean_draws(theirs)
    return estimate(_mean(ours).value / _mean(theirs).value, draws)


def _group_change(name: str, pairs: Sequence[Pair], able: Sequence[Pair]) -> GroupChange:
    members = [pair for pair in able if pair[1].task.group == name]
    ours, theirs = ([pair[i] for pair in members] for i in (0, 1))
    return GroupChange(
        group=name,
        able=len(members),
        tasks=sum(theirs.task.group == name for _, theirs in pairs),
        original=_mean([theirs]).value if members else None,
        compressed=_mean([ours]).value if members else None,
        kept=_kept([members]),
    )


def _task_change(ours: TaskScore, theirs: TaskScore) -> TaskChange:
    after, before = ours.skill.value, theirs.skill.value
    differences = ours.draws() - theirs.draws()
    surely = estimate(after - before, differences)
    kept = _kept([[(ours, theirs)]]) if theirs.able else None
    change: Literal["kept", "lost", "gained", "absent"]
    if kept is None:
        more = ours.able and (surely.low is None or surely.low > 0)
        change = "gained" if more else "absent"
    else:
        less = kept.value < KEPT and (surely.high is None or surely.high < 0)
        change = "lost" if less else "kept"
    return TaskChange(
        name=ours.name,
        group=ours.task.group,
        original=before,
        compressed=after,
        kept=kept,
        change=change,
    )


# --------------------------------------------------------------------------------------------------
# What covariates add
# --------------------------------------------------------------------------------------------------


def _added(score: TaskScore) -> Estimate:
    assert score.covariates_add is not None
    return score.covariates_add


def _adds(score: TaskScore) -> bool:
    """Whether covariates add so much skill that it can be lost; see :data:`ABLE`."""
    added = _added(score)
    return added.value > ABLE and (added.low is None or added.low > 0)


def _added_kept(pairs: Sequence[Pair]) -> Estimate | None:
    """Ratio of the means of what covariates add, compressed to original; None without tasks."""
    if not pairs:
        return None
    values = [np.mean([_added(pair[i]).value for pair in pairs]) for i in (0, 1)]
    draws = [np.mean([pair[i].added_draws() for pair in pairs], axis=0) for i in (0, 1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return estimate(float(values[0] / values[1]), draws[0] / draws[1])


def _covariate_change(ours: TaskScore, theirs: TaskScore) -> CovariateChange:
    after, before = _added(ours), _added(theirs)
    less = estimate(after.value - before.value, ours.added_draws() - theirs.added_draws())
    surely_less = less.value < 0 and (less.high is None or less.high < 0)
    kept = _added_kept([(ours, theirs)]) if _adds(theirs) else None
    change: Literal["kept", "lost", "misled"] = "kept"
    if kept is not None and kept.value < KEPT and surely_less:
        change = "lost"
    elif kept is None and after.value < _MISLED and surely_less:
        change = "misled"
    return CovariateChange(
        name=ours.name,
        original=before.value,
        compressed=after.value,
        kept=kept,
        change=change,
    )
