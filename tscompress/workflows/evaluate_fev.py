"""Evaluate models on tasks of fev."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.errors import UsageError
from tscompress.evaluation import fev_tasks
from tscompress.evaluation.results import SEASONAL_NAIVE, Settings
from tscompress.families.groups import kind_of, reads_covariates
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    write_output,
    write_text_atomically,
)
from tscompress.io.text import counted
from tscompress.progress import OnProgress, silent
from tscompress.workflows.evaluate_models import Scored
from tscompress.workflows.seen_steps import check_unseen, sources_of

_FILES = (fev_tasks.SUMMARIES_FILE,)


def evaluate_fev(
    path: str,
    models: Sequence[Scored],
    *,
    batch_size: int | Literal["auto"],
    seed: int,
    num_samples: int | None,
    cross_learning: bool = False,
    as_univariate: bool = False,
    on_progress: OnProgress = silent,
    on_note: Callable[[str], None] = lambda note: None,
) -> list[dict[str, Any]]:
    """fev's summaries of its tasks for each model and for seasonal naive.

    Parameters
    ----------
    path
        A YAML file of fev's tasks.
    cross_learning, as_univariate
        See :func:`tscompress.evaluation.fev_tasks.predict_task`.
    models
        All are loaded and checked before one forecasts. A second one of the same name gets the
        suffix ``(2)``.
    on_note
        Called once with each note: on what a model was fitted to and cannot be looked at again, and
        on covariates that a model does not read.

    Raises
    ------
    LeakError
        A model was fitted to steps that are scored, as far as what it was fitted to can be read.
    TscompressError
        Tasks or a model cannot be used; see :mod:`tscompress.errors`.
    """
    tasks = fev_tasks.load_tasks(path)
    summaries: list[dict[str, Any]] = []
    scored: list[tuple[EvaluationDataset, int]] = []
    notes: set[str] = set()
    settings = Settings(cross_learning=cross_learning, as_univariate=as_univariate)
    opened = [None if isinstance(m, str) else m() for m in dict.fromkeys([*models, SEASONAL_NAIVE])]
    for loaded in opened:
        for task in tasks:
            model = SEASONAL_NAIVE if loaded is None else loaded.forecaster
            fev_tasks.check_task(model, task, batch_size, num_samples, settings)
    for loaded in opened:
        if loaded is not None and sources_of(loaded):
            scored = scored or [one for task in tasks for one in fev_tasks.scored_windows(task)]
            for window, needed in scored:
                if (note := check_unseen(loaded, window, needed)) and note not in notes:
                    notes.add(note)
                    on_note(note)
        shown = fev_tasks.model_name(SEASONAL_NAIVE if loaded is None else loaded.name)
        if any(summary["model_name"] == shown for summary in summaries):
            shown = f"{shown} (2)"
        if loaded is not None and not reads_covariates(loaded.forecaster) and not as_univariate:
            left_out = sum(map(fev_tasks.has_covariates, tasks))
            if left_out:
                on_note(
                    f"{shown}: {kind_of(loaded.forecaster)} reads no covariates; the series of "
                    f"{counted(left_out, 'task')} with some are forecast alone."
                )
        own: list[dict[str, Any]] = []
        for task in tasks:
            own += fev_tasks.evaluate_tasks(
                SEASONAL_NAIVE if loaded is None else loaded.forecaster,
                [task],
                name=shown,
                batch_size=batch_size,
                seed=seed,
                num_samples=num_samples,
                settings=settings,
            )
            on_progress(f"evaluate {shown}", len(own), len(tasks))
        summaries += own
    return summaries


def check_summaries(
    output: Path, *, force: bool = False, inputs: Sequence[str | Path | None] = ()
) -> None:
    """Refuse, before any work, an output that :func:`save_summaries` would refuse.

    Raises
    ------
    UsageError
        A name of another kind of file.
    """
    if output.suffix == ".json" and not output.is_dir():
        raise UsageError(f"{str(output)!r} is no table: fev's summaries are written to FILE.csv.")
    if _is_file(output):
        check_file(output, force=force, inputs=inputs)
    else:
        check_output(output, force=force, inputs=inputs, writes=_FILES)


def _is_file(output: Path) -> bool:
    return output.suffix == ".csv" and not output.is_dir()


def save_summaries(
    output: Path,
    summaries: Sequence[dict[str, Any]],
    *,
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
) -> None:
    """Write summaries to FILE.csv, or to a directory; raises as ``save_evaluation``."""
    content = fev_tasks.summaries_csv(summaries)
    if _is_file(output):
        write_output(output, content, force=force, inputs=inputs)
        return
    with new_directory(output, force=force, writes=_FILES, inputs=inputs) as directory:
        write_text_atomically(directory / fev_tasks.SUMMARIES_FILE, content)
