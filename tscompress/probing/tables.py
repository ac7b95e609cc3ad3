"""A probe for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from tscompress.io.text import counted, percent
from tscompress.probing.results import ProbeResult, TaskScore, shared_tasks
from tscompress.probing.skill import Estimate

_CAPTION = "1: best possible forecast, 0: best constant one; in brackets 95% intervals"


def probe_tables(result: ProbeResult, original: ProbeResult | None = None) -> list[Table]:
    """Skill by group and by task, beside seasonal naive and, if given, the original.

    What covariates add comes last, if the model was asked for tasks with some. Tasks that only one
    of two models was asked are left out.
    """
    if original is not None:
        result, original = shared_tasks(result, original), shared_tasks(original, result)
    tables = [_group_table(result, original), _task_table(result, original)]
    if any(score.covariates_add is not None for score in result.tasks):
        tables.append(_covariate_table(result, original))
    return tables


def _group_table(result: ProbeResult, original: ProbeResult | None) -> Table:
    naive, overall = result.naive_groups(), result.overall()
    caption = _CAPTION
    if result.skipped:
        skipped = counted(len(result.skipped), "task")
        caption += f"; {skipped} with covariates skipped: {result.model} reads none"
    table = Table(
        title=f"skill of {result.model}", caption=caption, show_footer=True, box=box.SIMPLE_HEAD
    )
    table.add_column("group", footer="mean of groups", no_wrap=True)
    table.add_column("tasks", justify="right", footer=str(len(result.tasks)))
    if original is not None:
        before = original.groups()
        changes = result.against(original)
        kept = {change.group: change for change in changes.groups}
        able = sum(change.able for change in changes.groups)
        table.add_column("original", justify="right", footer=str(original.overall()))
    table.add_column("skill", justify="right", footer=str(overall))
    if original is not None:
        table.add_column("original\ncan do", justify="right", footer=str(able))
        table.add_column("kept\nof these", justify="right", footer=kept_text(changes.kept))
    mean = sum(naive.values()) / len(naive)
    table.add_column("seasonal\nnaive", justify="right", footer=f"{mean:.2f}")
    for group, skill in result.groups().items():
        count = sum(score.task.group == group for score in result.tasks)
        cells = [group, str(count), str(skill), f"{naive[group]:.2f}"]
        if original is not None:
            cells.insert(2, str(before[group]))
            cells[4:4] = [str(kept[group].able), kept_text(kept[group].kept)]
        table.add_row(*cells)
    return table


def _task_table(result: ProbeResult, original: ProbeResult | None) -> Table:
    table = Table(title="by task", box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True)
    for header in ("original",) if original is not None else ():
        table.add_column(header, justify="right")
    for header in ("skill", "seasonal\nnaive", "80% interval\ncovers", "crossing\nquantiles"):
        table.add_column(header, justify="right")
    for index, score in enumerate(result.tasks):
        if index and score.task.group != result.tasks[index - 1].task.group:
            table.add_section()
        cells = [score.name, str(score.skill), f"{score.seasonal_naive:.2f}"]
        cells += [covers(score), percent(score.crossing_rate, 1)]
        if original is not None:
            cells.insert(1, f"{original.tasks[index].skill.value:.2f}")
        table.add_row(*cells)
    return table


def _covariate_table(result: ProbeResult, original: ProbeResult | None) -> Table:
    changes = None if original is None else result.against(original)
    table = Table(title="what covariates add", box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True)
    headers = ["skill", "without\ncovariates", "they add"]
    if changes is not None:
        headers += ["they add to\nthe original", "kept"]
        table.show_footer = True
        table.columns[0].footer = "where they add to the original"
    for header in headers:
        table.add_column(header, justify="right")
    if changes is not None:
        table.columns[-1].footer = kept_text(changes.covariates_kept)
    for score in result.tasks:
        if score.without_covariates is None:
            continue
        cells = [score.name, f"{score.skill.value:.2f}", f"{score.without_covariates.value:.2f}"]
        cells.append(str(score.covariates_add))
        if changes is not None:
            (change,) = (one for one in changes.covariates if one.name == score.name)
            cells += [f"{change.original:.2f}", kept_text(change.kept)]
        table.add_row(*cells)
    return table


def covers(score: TaskScore) -> str:
    """Coverage in per cent; a dash for a task without noise."""
    return "–" if score.coverage is None else percent(score.coverage, 0)


def kept_text(share: Estimate | None) -> str:
    """Share of skill kept, in per cent; a dash for a task that the original cannot do."""
    return "–" if share is None else percent(share.value, 0)
