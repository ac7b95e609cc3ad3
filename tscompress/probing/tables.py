"""A probe for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from tscompress.io.text import counted, percent
from tscompress.probing.responses import ResponseComparison, pair_text
from tscompress.probing.results import ProbeResult, TaskScore, shared_tasks
from tscompress.probing.skill import Estimate

RESPONSE_CAPTION = (
    "one covariate is raised by 1 at one step ahead; slope: the change of the median there against "
    "that of the best forecast, 1 right, 0 none; leakage: share of the change at other steps; "
    "regret: 0 as ridge regression, 1 as the mean; when shuffled: slope and regret with the "
    "covariates in another order; bias taken: 0 the response is to the causal effect, 1 to the "
    "association, which is right for forecasts and wrong for interventions"
)
_CAPTION = "1: best possible forecast, 0: best constant one; in brackets 95% intervals"


def probe_tables(result: ProbeResult, original: ProbeResult | None = None) -> list[Table]:
    """Skill by group and by task, beside seasonal naive and, if given, the original.

    What covariates add, and the response to them, come last, if the model was asked for tasks with
    some. Tasks that only one of two models was asked are left out.
    """
    if original is not None:
        result, original = shared_tasks(result, original), shared_tasks(original, result)
    tables = [_group_table(result, original), _task_table(result, original)] if result.tasks else []
    if any(score.covariates_add is not None for score in result.tasks):
        tables.append(_covariate_table(result, original))
    if result.responses:
        tables.append(_response_table(result))
    if original is not None and (response := result.against(original).response) is not None:
        tables.append(_kept_response_table(response))
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


def _response_table(result: ProbeResult) -> Table:
    table = Table(title=f"response of {result.model} to covariates", box=box.SIMPLE_HEAD)
    table.caption = RESPONSE_CAPTION
    table.add_column("task", no_wrap=True)
    confounded = any(score.task.confounded for score in result.responses)
    table.add_column("slope", justify="right", no_wrap=True)
    headers = ["R²", "leakage", "regret", "when\nshuffled"]
    for header in headers + ["bias\ntaken"] * confounded:
        table.add_column(header, justify="right")
    for score in result.responses:
        cells = [score.name, _interval(score.slope)]
        cells += [_value(one) for one in (score.r_squared, score.leakage, score.regret)]
        cells.append(f"{score.shuffled_slope.value:.2f}, {score.shuffled_regret.value:.2f}")
        table.add_row(*cells, *[_value(score.association)] * confounded)
    return table


def _kept_response_table(comparison: ResponseComparison) -> Table:
    table = Table(
        title="response to covariates, original → compressed", show_footer=True, box=box.SIMPLE_HEAD
    )
    table.add_column("task", no_wrap=True, footer="all that respond")
    for header in ("slope", "leakage"):
        table.add_column(header, justify="right")
    for header, kept in (
        ("slope kept", comparison.slope_kept),
        ("gain kept", comparison.gain_kept),
    ):
        table.add_column(header, justify="right", footer=kept_interval(kept))
    for change in comparison.tasks:
        pairs = (pair_text(pair) for pair in (change.slope, change.leakage))
        table.add_row(
            change.name, *pairs, kept_interval(change.slope_kept), kept_interval(change.gain_kept)
        )
    return table


def kept_interval(kept: Estimate | None) -> str:
    """:func:`kept_text` and, where there is one, its interval."""
    if kept is None or kept.low is None or kept.high is None:
        return kept_text(kept)
    return f"{kept_text(kept)} ({100 * kept.low:.0f} to {percent(kept.high, 0)})"


def _interval(one: Estimate) -> str:
    return str(one).replace(" to ", "–")


def _value(one: Estimate | None) -> str:
    return "–" if one is None else f"{one.value:.2f}"


def covers(score: TaskScore) -> str:
    """Coverage in per cent; a dash for a task without noise."""
    return "–" if score.coverage is None else percent(score.coverage, 0)


def kept_text(share: Estimate | None) -> str:
    """Share of skill kept, in per cent; a dash for a task that the original cannot do."""
    return "–" if share is None else percent(share.value, 0)
