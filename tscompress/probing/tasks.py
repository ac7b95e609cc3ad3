"""The tasks of the probe: those that come with it, and your own from a YAML file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from tscompress.errors import RecipeError, UsageError
from tscompress.evaluation.metrics import Quantiles
from tscompress.io.files import user_path
from tscompress.io.strict import Strict
from tscompress.io.untrusted import (
    UnreadableFileError,
    first_problem,
    key_problem,
    read_yaml,
    shown,
)
from tscompress.probing.covariates import Covariate, Driven
from tscompress.probing.processes import (
    Array,
    Autoregressive,
    Intermittent,
    Season,
    Structural,
    Trend,
)
from tscompress.probing.regressions import RESPONSES, ResponseTask

Process = Annotated[
    Structural | Autoregressive | Intermittent | Driven, Field(discriminator="kind")
]

#: Steps in a season of the tasks that come with the probe.
PERIODS = (4, 5, 7, 12, 24, 48, 52)
NOISES = (0.1, 0.3)
#: Names appear in messages and in anchors of the report.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"


class Drawn(NamedTuple):
    """The series of a task."""

    context: Array
    """``[N, T]``; missing values are NaN."""
    label: Array
    """``[N, H]``."""
    best: Quantiles
    """``[N, 9, H]``: the best possible forecast."""
    constant: Array
    """``[N]``: the best constant forecast; see :attr:`ProbeTask.process`."""
    covariates: Array | None = None
    """``[N, C, T + H]``; NaN where missing, or not known ahead."""
    known: int = 0
    """Covariates known ahead, the first ones."""


class ProbeTask(Strict):
    """Forecast the series of one process.

    The best constant forecast is the median of the label, known only in hindsight. Where a constant
    can be the best possible forecast (a level shift, a random walk), it is the median of the
    context instead.
    """

    name: str = Field(pattern=_NAME)
    group: str = Field(default="own", pattern=_NAME, description="tasks of one group are averaged")
    process: Process
    context_length: int = Field(ge=4, le=8192)
    horizon: int = Field(default=24, ge=1, le=1024)
    num_series: int = Field(default=32, ge=1, le=4096)
    missing: float = Field(default=0.0, ge=0, le=0.9, description="share of the context")

    @model_validator(mode="after")
    def _lengths_fit(self) -> ProbeTask:
        if self.season_length > self.context_length:
            raise ValueError(
                f"a period of {self.season_length} steps is longer than the context of "
                f"{self.context_length}; give a longer context_length"
            )
        if isinstance(self.process, Driven):
            self.process.check_fits(self.context_length, self.horizon)
        if self.missing and isinstance(self.process, Autoregressive):
            raise ValueError(
                "the best forecast of an autoregressive process needs its last value; leave "
                "missing out"
            )
        return self

    @property
    def covariates(self) -> tuple[str, ...]:
        """A few words on each covariate, ``[C]``."""
        return self.process.labels if isinstance(self.process, Driven) else ()

    @property
    def season_length(self) -> int:
        """Steps that a seasonal naive forecast looks back."""
        return self.process.season_length

    @property
    def by_quantiles(self) -> bool:
        """Whether the loss is of all quantiles: the median of rare demand is 0, a constant."""
        return isinstance(self.process, Intermittent) and not self.process.regular

    def draw(self, seed: int = 0) -> Drawn:
        """Draw the series; they depend only on the task and the seed."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        drawn = self.process.paths(rng, self.num_series, self.context_length, self.horizon)
        context = drawn.values[:, : self.context_length].copy()
        label = drawn.values[:, self.context_length :]
        if self.missing:
            # The same number in each series, so that none has no values.
            ranks = rng.random(context.shape).argsort(axis=1).argsort(axis=1)
            count = min(round(self.missing * self.context_length), self.context_length - 1)
            context[ranks < count] = np.nan
        constant = np.nanmedian(context if self.process.ends_constant else label, axis=1)
        return Drawn(context, label, drawn.best, constant, drawn.covariates, drawn.known)


#: A skill at one process, or the response to covariates.
AnyTask = ProbeTask | ResponseTask


def seasonal_naive(context: Array, season_length: int, horizon: int) -> Array:
    """The last known value of each step of the season, ``[N, H]``.

    Parameters
    ----------
    context
        ``[N, T]``; missing values are NaN. A step of the season without any takes the median.
    """
    count, length = context.shape
    seasons = -(-length // season_length)
    padded = np.full((count, seasons * season_length), np.nan)
    padded[:, padded.shape[1] - length :] = context
    last = np.repeat(np.nanmedian(context, axis=1, keepdims=True), season_length, axis=1)
    for season in padded.reshape(count, seasons, season_length).swapaxes(0, 1):
        last = np.where(np.isfinite(season), season, last)
    return np.asarray(last[:, np.arange(horizon) % season_length])


# --------------------------------------------------------------------------------------------------
# The tasks that come with the probe
# --------------------------------------------------------------------------------------------------


def _context(period: int) -> int:
    """Eight periods, more of short ones."""
    return max(96, 8 * period)


def _season(period: int, noise: float = 0.0, **changes: Any) -> Structural:
    return Structural(seasons=(Season(period=period, **changes),), noise=noise)


def _seasons() -> Iterator[ProbeTask]:
    for shape, suffix in (("free", ""), ("smooth", "-smooth")):
        for noise in (0.0, *NOISES):
            for period in PERIODS:
                yield ProbeTask(
                    name=f"period-{period}{suffix}" + (f"-noise-{noise:g}" if noise else ""),
                    group="noisy-seasons" if noise else "seasons",
                    process=_season(period, noise, shape=shape),
                    context_length=_context(period),
                )


def _compound() -> Iterator[ProbeTask]:
    for first, second in ((7, 30), (24, 168)):
        pair = (Season(period=first), Season(period=second, shape="smooth"))
        yield ProbeTask(
            name=f"two-seasons-{first}-{second}",
            group="compound",
            process=Structural(seasons=pair, noise=0.1),
            context_length=3 * 168,
        )
    seasons = (Season(period=12),)
    trend = Trend(rise=5)
    yield ProbeTask(
        name="season-and-trend",
        group="compound",
        process=Structural(seasons=seasons, trend=trend, noise=0.1),
        context_length=96,
    )
    yield ProbeTask(
        name="multiplicative-season",
        group="compound",
        process=Structural(seasons=seasons, trend=trend, multiplicative=True, noise=0.1),
        context_length=96,
    )


def _others() -> Iterator[ProbeTask]:
    parts: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("linear-trend", "trends", Structural(trend=Trend(), noise=0.05), {}),
        ("damped-trend", "trends", Structural(trend=Trend(kind="damped"), noise=0.05),
         {"horizon": 48}),
        ("level-shift", "trends", Structural(level_shift=3, noise=0.3), {}),
        ("ar1", "stochastic", Autoregressive(coefficient=0.9), {"horizon": 8, "num_series": 64}),
        ("random-walk", "stochastic", Autoregressive(coefficient=1), {"num_series": 64}),
        ("gaps-7", "gaps", _season(7), {"missing": 0.2}),
        ("gaps-12-noise-0.1", "gaps", _season(12, 0.1), {"missing": 0.2}),
        ("random-demand", "intermittent", Intermittent(interval=3), {"num_series": 64}),
        ("regular-demand", "intermittent", Intermittent(interval=6, regular=True), {}),
        ("short-12", "short", _season(12, shape="smooth"), {"context_length": 24}),
        ("short-7", "short", _season(7), {"context_length": 21}),
        ("short-24", "short", _season(24), {"context_length": 60}),
        ("long-12", "long", _season(12), {"horizon": 192, "num_series": 16}),
        ("long-24-noise-0.1", "long", _season(24, 0.1),
         {"horizon": 192, "num_series": 16, "context_length": 192}),
        ("long-trend", "long", Structural(trend=Trend(), noise=0.05),
         {"horizon": 192, "num_series": 16}),
    ]  # fmt: skip
    for name, group, process, changes in parts:
        yield ProbeTask(
            name=name, group=group, process=process, **{"context_length": 96, **changes}
        )


def _with_covariates() -> Iterator[ProbeTask]:
    """Tasks for models that read covariates."""
    smooth, useless = Covariate(shape="smooth"), Covariate(shape="smooth", strength=0)

    def changed(covariate: Covariate, **changes: Any) -> tuple[Covariate, ...]:
        return (covariate.model_copy(update=changes),)

    season = (Season(period=12),)
    parts: list[tuple[str, tuple[Covariate, ...], tuple[Season, ...]]] = [
        ("covariate-lag-0", (smooth,), ()),
        ("covariate-lag-4", changed(smooth, lag=4), ()),
        ("covariate-noise", changed(smooth, shape="noise"), ()),
        ("covariate-squared", changed(smooth, effect="square"), ()),
        ("promotions", changed(smooth, shape="pulses", strength=3.0), ()),
        ("leading-series", changed(smooth, lag=24, known=False), ()),
        ("covariate-and-season", (smooth,), season),
        ("covariate-with-gap", changed(smooth, missing=0.3), ()),
        ("one-covariate-of-8", (smooth, *changed(useless, count=7)), ()),
        ("irrelevant-covariates", changed(useless, count=3), season),
    ]
    for name, covariates, seasons in parts:
        yield ProbeTask(
            name=name,
            group="covariates",
            process=Driven(covariates=covariates, seasons=seasons, noise=0.1),
            context_length=192,
        )


#: By name; tasks of one ``group`` are summarized together.
TASKS: dict[str, ProbeTask] = {
    task.name: task for task in (*_seasons(), *_compound(), *_others(), *_with_covariates())
}


# --------------------------------------------------------------------------------------------------
# Which tasks
# --------------------------------------------------------------------------------------------------


class TaskFile(Strict):
    """Content of a YAML file of tasks."""

    tasks: tuple[ProbeTask, ...] = Field(min_length=1)

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: tuple[ProbeTask, ...]) -> tuple[ProbeTask, ...]:
        names, taken = [task.name for task in tasks], {*TASKS, *RESPONSES}
        twice = sorted({name for name in names if names.count(name) > 1 or name in taken})
        if twice:
            raise ValueError(f"the name {twice[0]!r} is taken; give each task one of its own")
        return tasks


def load_tasks(path: str | Path) -> tuple[ProbeTask, ...]:
    """Tasks of a YAML file.

    Raises
    ------
    RecipeError
        The file is missing, is not YAML, has an unknown key or a value out of range, such as a
        period longer than its context.
    """
    path = user_path(path)
    source = repr(str(path))
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise RecipeError(f"there is no file of tasks at {source}.") from None
    except (OSError, UnreadableFileError) as error:
        raise RecipeError(f"{source} cannot be read as YAML: {error}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{source} is not a mapping; start it with 'tasks:'.")
    try:
        return TaskFile.model_validate(content).tasks
    except ValidationError as error:
        where, reason, first = first_problem(error, content)
        if problem := key_problem(where, first, TaskFile):
            raise RecipeError(f"{source}: {problem}.") from None
        given = "" if isinstance(first["input"], dict | list) else f" (got {shown(first['input'])})"
        raise RecipeError(f"{source}: {where}: {reason}{given}.") from None


def choose_tasks(
    names: Sequence[str] | None = None, own: Iterable[ProbeTask] = ()
) -> tuple[AnyTask, ...]:
    """Tasks by name, group or shell pattern, in the order of the battery.

    Parameters
    ----------
    names
        None: all of ``own``, or the whole battery if there are none.
    own
        Tasks of the caller; ``names`` may select them too.

    Raises
    ------
    UsageError
        A name is neither a task nor a group.
    """
    own = tuple(own)
    if names is None:
        return own or (*TASKS.values(), *RESPONSES.values())
    known: tuple[AnyTask, ...] = (*TASKS.values(), *own, *RESPONSES.values())
    for name in names:
        if not any(_matches(task, name) for task in known):
            groups = ", ".join(dict.fromkeys(task.group for task in known))
            single = ", ".join(task.name for task in known if "season" not in task.group)
            raise UsageError(
                f"there is no task {name!r}; groups: {groups}; tasks: {single}, and "
                "period-P[-smooth][-noise-N] with P one of "
                f"{', '.join(map(str, PERIODS))}, N one of {', '.join(map(str, NOISES))}."
            )
    return tuple(task for task in known if any(_matches(task, name) for name in names))


def _matches(task: AnyTask, name: str) -> bool:
    return name == task.group or fnmatchcase(task.name, name)
