"""Recover a compressed model: distil from the original, and save the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState

from tscompress.checkpoints.factored_methods import forget_place_
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.series import DEFAULT_FORMAT, Given
from tscompress.data.streaming import summaries
from tscompress.errors import OutputExistsError, UsageError
from tscompress.evaluation.batching import Processes
from tscompress.families.registry import adapter_of
from tscompress.io.files import check_output
from tscompress.io.making_way import undo_killed
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import SHARE_BESIDE_WHEELS, RecoveryConfig
from tscompress.training.recovery_memory import memory_bytes
from tscompress.training.recovery_state import OnRecovery, RecoveryResult, has_checkpoint
from tscompress.workflows.claims import claimed_by_main
from tscompress.workflows.fitted_to import (
    recorded_again,
    recorded_of,
    replayable,
    unless_named,
)
from tscompress.workflows.recipe import series_files
from tscompress.workflows.save import CompressedModel, as_compressed, save
from tscompress.workflows.unfinished import (
    check_recovery_directory,
    finish_recovery,
    recovery_directory,
)


def recover_loaded_(
    student: LoadedModel,
    teacher: LoadedModel,
    config: RecoveryConfig | None = None,
    *,
    series: Given = None,
    directory: Path | None = None,
    resume: bool = False,
    force: bool = False,
    report: OnRecovery = lambda line: None,
) -> CompressedModel:
    """Distil ``student`` from ``teacher`` in memory; see :func:`tscompress.recover`."""
    if directory is not None:
        _check_no_state(directory, allowed=resume or force)
    smaller = as_compressed(student)
    asked = config if isinstance(config, RecoveryConfig) else RecoveryConfig()
    # Before and after: training takes its time, and a file may grow meanwhile.
    sources = recorded_of(asked, DEFAULT_FORMAT, series)
    try:
        result = recover_(
            smaller,
            teacher,
            config,
            series=unless_named(asked, DEFAULT_FORMAT, series),
            directory=directory,
            resume=resume,
            report=report,
        )
    finally:
        cast_parameters_(smaller.model, smaller.stored_dtype)
        forget_place_(smaller.model)
    result = replayable(result, DEFAULT_FORMAT, series)
    before = () if smaller.recovery is None else (smaller.recovery.record(),)
    return replace(
        smaller,
        recipe=smaller.recipe and smaller.recipe.model_copy(update={"recover": result.replayed}),
        recovery=result,
        earlier_recoveries=(*smaller.earlier_recoveries, *before),
        fitted_to=(*smaller.fitted_to, *sources, *recorded_again(asked, DEFAULT_FORMAT, series)),
    )


def recover_checkpoint(
    student: str,
    teacher: str,
    output: Path,
    config: RecoveryConfig,
    *,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    device: str = "cpu",
    inputs: Sequence[str | Path | None] = (),
    on_series: Callable[[SeriesSummary], None] = lambda summary: None,
    on_memory: Callable[[Mapping[str, int], int], None] = lambda needed, processes: None,
    report: OnRecovery = lambda line: None,
) -> RecoveryResult:
    """Recover a checkpoint and save the result to ``output``, in the first process.

    The training state is beside the output until the result is saved. A run that Ctrl-C stopped
    saves no result.

    Parameters
    ----------
    threads
        CPU threads of torch; None: as they are.
    inputs
        Besides the models and the series: what the output must not replace.
    on_series
        Called by the first process with what each file of series holds, before a model is loaded.
    on_memory
        Called by the first process before training: bytes by part, and how many processes.

    Raises
    ------
    OutputExistsError
        ``output`` exists, or beside it lies a run that did not finish, and ``force`` is false; or
        an input would be lost; or another process recovers to it.
    TscompressError
        As for :func:`recover_loaded_`.
    """
    inputs = student, teacher, *inputs, *series_files(config)
    work, processes = recovery_directory(output), Processes()
    if processes.is_main:
        undo_killed([output])
        check_output(output, force=force, inputs=inputs)
        check_recovery_directory(work, inputs)
    _check_no_state(work, allowed=resume or force)
    if threads is not None:
        torch.set_num_threads(threads)
    if processes.is_main:
        for summary in summaries(config.series, config.series_format or DEFAULT_FORMAT):
            on_series(summary)
    here = processes.device(device)
    ours, theirs = (load(name, device=here) for name in (student, teacher))
    _check_share(ours, config)
    needed = memory_bytes(ours, theirs, config, processes.count)
    if processes.is_main:
        on_memory(needed, processes.count)
    with claimed_by_main(work):
        if processes.is_main:
            # Another process may have ended meanwhile.
            check_output(output, force=force, inputs=inputs)
            _check_no_state(work, allowed=resume or force)
        recovered = recover_loaded_(
            ours, theirs, config, directory=work, resume=resume, force=force, report=report
        )
        result = recovered.recovery
        assert result is not None
        if processes.is_main and result.finished:
            save(recovered, output, force=force)
            finish_recovery(recovered, work)
    if processes.count > 1:
        PartialState().destroy_process_group()
    return result


def _check_share(student: LoadedModel, config: RecoveryConfig) -> None:
    """Refuse a share of what is drawn beside series where all is drawn from a corpus.

    Raises
    ------
    UsageError
    """
    weight = adapter_of(student.family).defaults.real_weight
    # Earlier records have a share of a recovery that does not read it.
    given = config.synthetic_share not in (None, SHARE_BESIDE_WHEELS)
    if given and not config.series and weight is not None:
        raise UsageError(
            f"synthetic_share is {config.synthetic_share:g}, and without series a {student.family} "
            "draws real series by the real_weight of its corpus; give series with it, or leave it "
            "out."
        )


def _check_no_state(work: Path, *, allowed: bool) -> None:
    """Refuse to replace the state of another run; before a checkpoint there is none.

    Raises
    ------
    OutputExistsError
    """
    if has_checkpoint(work) and not allowed:
        raise OutputExistsError(
            f"{str(work)!r} holds the state of a recovery; resume it with --resume (resume=True), "
            "or start afresh with --force (force=True)."
        )
