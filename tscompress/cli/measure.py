"""Measure a model: ``profile``, ``compare-profiles``, ``sensitivity``, ``probe`` and ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import path, progress_bars, say_series, show
from tscompress.cli.options import (
    Against,
    AsJson,
    BatchSize,
    CrossLearning,
    Device,
    Dtype,
    Epsilons,
    Force,
    Model,
    Revision,
    Samples,
    Threads,
)
from tscompress.cli.series_options import (
    NOTHING_SAID,
    SeriesFile,
    SeriesOptions,
    with_series_options,
)
from tscompress.families.calibration_sizes import BY_DEFAULT, LOSS_OF_TOKENS


@with_series_options()
def profile(
    model: Model,
    epsilon: Epsilons = None,
    series: SeriesFile = None,
    files: SeriesOptions = NOTHING_SAID,
    output: Annotated[
        Path | None, typer.Option(help="Write profile.json, CSV and figures here.", parser=path)
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Do not run the model on series.")
    ] = False,
    revision: Revision = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure the ε-ranks of embedding, weights and layer inputs, and the possible savings."""
    from tscompress.compression.calibration import CalibrationConfig
    from tscompress.data.series import read_series
    from tscompress.io.files import check_output, new_directory
    from tscompress.profiling.figures import FIGURE_FILES, save_profile_figures
    from tscompress.profiling.measure import DEFAULT_EPSILONS
    from tscompress.profiling.measure import profile as measure
    from tscompress.profiling.rank_profile import PROFILE_FILE, RANKS_FILE
    from tscompress.profiling.tables import profile_table

    inputs, names = (model, series), (PROFILE_FILE, RANKS_FILE, *FIGURE_FILES)
    if output is not None:
        check_output(output, force=force, inputs=inputs, writes=names)
    form = files.form(reads=series is not None)
    given = None if series is None else read_series(series, form)
    say_series(None if given is None else given.summary)
    with progress_bars() as advance:
        result = measure(
            model,
            epsilons=tuple(epsilon or DEFAULT_EPSILONS),
            series=given,
            calibration=None if weights_only else CalibrationConfig(),
            revision=revision,
            device=device,
            on_progress=advance,
        )
    if output is not None:
        with new_directory(output, force=force, writes=names, inputs=inputs) as directory:
            result.save(directory)
            save_profile_figures(result, directory)
    findings = "\n".join(result.findings())
    show(as_json, result.to_dict(), *profile_table(result), findings)


def compare_profiles(
    profiles: Annotated[
        list[Path],
        typer.Argument(help="Directories of profile --output, or their profile.json.", parser=path),
    ],
    names: Annotated[
        str | None, typer.Option(help="One for each, such as A,B; default: those of the models.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write a table and figures here.", parser=path)
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Put the rank profiles of several models side by side, in a table and in one axis."""
    from tscompress.io.files import check_output
    from tscompress.profiling.compare_profiles import COMPARED_FILES
    from tscompress.profiling.compare_profiles import compare_profiles as compare

    if output is not None:
        check_output(output, force=force, inputs=profiles, writes=COMPARED_FILES)
    named = None if names is None else [name.strip() for name in names.split(",")]
    found = compare(profiles, names=named)
    if output is not None:
        found.save(output, force=force)
    show(as_json, found.to_dict(), found.table())


@with_series_options()
def sensitivity(
    model: Model,
    series: SeriesFile = None,
    files: SeriesOptions = NOTHING_SAID,
    calibration_series: Annotated[
        int | None,
        typer.Option(
            help=f"Series to measure on; {BY_DEFAULT}; with a Chronos-T5 some {LOSS_OF_TOKENS} "
            "windows tell the loss.",
            min=1,
            max=10**6,
        ),
    ] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Experimental: also measure dropping each layer.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write all sizes to FILE.json.", parser=path)
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure the rise of the forecast loss when one block is made smaller.

    --budget uses this; it is measured once for a model and its series, and then cached.
    """
    from tscompress.budget.plan_within_budget import sensitivities, sensitivity_tables
    from tscompress.compression.calibration import MIXED, CalibrationConfig
    from tscompress.data.series import read_series
    from tscompress.io.files import check_file, write_output

    if output is not None:
        check_file(output, force=force, inputs=(model, series))
    form = files.form(reads=series is not None)
    given = None if series is None else read_series(series, form)
    say_series(None if given is None else given.summary)
    calibration = CalibrationConfig(
        num_series=calibration_series, source=MIXED if series is None else str(series)
    )
    with progress_bars() as advance:
        found = sensitivities(
            model,
            series=given,
            calibration=calibration,
            depth=depth,
            revision=revision,
            device=device,
            on_progress=advance,
        )
    if output is not None:
        write_output(output, found.to_json(), force=force, inputs=(model, series))
    title = f"rise of the forecast loss, {found.base_loss:.4f}, with only one part at a size:"
    show(as_json, found.model_dump(mode="json"), title, *sensitivity_tables(found))


def probe(
    model: Model,
    against: Annotated[
        str | None, typer.Option(help="The original, for the share of its skill that is kept.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Names, groups or patterns: seasons,'period-7*'; default: all; repeatable."
        ),
    ] = None,
    tasks_file: Annotated[
        Path | None, typer.Option(help="YAML with your own tasks instead.", parser=path)
    ] = None,
    num_series: Annotated[int | None, typer.Option(help="Of each task.", min=1)] = None,
    num_samples: Samples = None,
    batch_size: BatchSize = "32",
    seed: Annotated[int, typer.Option(help="Of the series.", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option(help="FILE.json, with the loss of every series.", parser=path)
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure skill at tasks with a known best forecast: seasons, trends, gaps, covariates, ...

    1 is the best possible forecast, 0 the best constant one. Seconds for a tiny Chronos-Bolt. Of
    Chronos-2 also the response to covariates (--tasks response): the change of the forecast for
    one more of a covariate at one step ahead, against that of the best forecast.
    """
    from tscompress.benchmark.workload import check_sampling
    from tscompress.checkpoints.given import loaded_of
    from tscompress.evaluation.batching import parse_batch_size
    from tscompress.evaluation.forecasting import draws_samples
    from tscompress.io.files import check_file, write_output
    from tscompress.io.results import results_json
    from tscompress.io.text import numbered
    from tscompress.probing.measure import ProbeConfig
    from tscompress.probing.measure import probe as measure
    from tscompress.probing.results import probe_content
    from tscompress.probing.tables import probe_tables
    from tscompress.workflows.recipe import validate

    inputs = model, against, tasks_file
    if output is not None:
        check_file(output, force=force, inputs=inputs)
    fields = {
        "tasks": tuple(",".join(tasks).split(",")) if tasks else None,
        "tasks_file": None if tasks_file is None else str(tasks_file),
        "num_series": num_series,
        "num_samples": num_samples,
        "batch_size": parse_batch_size(batch_size),
        "seed": seed,
    }
    config = validate(ProbeConfig, fields, source="the options")
    config.chosen()  # check it before a model is loaded
    names = [(model, revision)] if against is None else [(model, revision), (against, None)]
    loaded = [loaded_of(name, device=device, dtype=dtype, revision=at) for name, at in names]
    for one in loaded:
        config.check_reads(one.forecaster)
    labels = [one.name for one in loaded]
    labels[0] = numbered(labels[0], labels[1:])
    check_sampling([one.forecaster for one in loaded], num_samples)
    draws = [draws_samples(one.forecaster) for one in loaded]
    results = []
    with progress_bars() as advance:
        for one, label, samples in zip(loaded, labels, draws, strict=True):
            tell = partial(_tell_task, partial(advance, f"probe {label}"))
            asked = {**dict(config), "num_samples": num_samples if samples else None}
            results.append(measure(one, **asked, halved=any(draws), name=label, on_task=tell))
    if output is not None:
        text = results_json(probe_content(*results))
        write_output(output, text, force=force, inputs=inputs)
    lines = [] if against is None else results[0].against(results[1]).lines()
    tables = probe_tables(*results)
    show(as_json, probe_content(*results, series=False), *tables, *lines)


def _tell_task(advance: Callable[[int, int], None], _: object, done: int, total: int) -> None:
    advance(done, total)


def bench(
    model: Model,
    against: Against = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    context_length: Annotated[int, typer.Option(min=1)] = 512,
    horizon: Annotated[int, typer.Option(min=1)] = 64,
    num_samples: Samples = None,
    cross_learning: CrossLearning = False,
    repeats: Annotated[int, typer.Option(help="Timed runs of each model.", min=1)] = 20,
    warmup: Annotated[int, typer.Option(min=0)] = 3,
    threads: Threads = None,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Peak memory; on a CPU in a separate process."),
    ] = True,
    share: Annotated[
        bool,
        typer.Option(
            "--share-cross-attention",
            help="Chronos-T5: also measure each model with sample paths that share the "
            "cross-attention keys and values of their series.",
        ),
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure latency, memory, MACs and size; two models take turns in one process."""
    from tscompress.benchmark.bench import bench as bench_models
    from tscompress.benchmark.tables import bench_table

    with progress_bars() as advance:
        result = bench_models(
            model,
            against=against,
            batch_size=batch_size,
            context_length=context_length,
            horizon=horizon,
            num_samples=num_samples,
            cross_learning=cross_learning,
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            measure_memory=memory,
            share_cross_attention=share,
            device=device,
            dtype=dtype,
            on_run=lambda run: advance("bench", run.round + 1, repeats),
        )
    show(as_json, result.to_dict(), bench_table(result))
