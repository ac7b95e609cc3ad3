"""``tscompress run``, ``sweep`` and ``report``: run a recipe and report its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import duration, path, progress_bars, say, say_note, say_series, show
from tscompress.cli.options import AsJson, Device, Force, MaxSeries, OutputInstead, keeping_recovery
from tscompress.errors import TscompressError, UsageError
from tscompress.progress import TimeLeft


def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in recipes/.", parser=path)],
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead of the recipe's; without --output the results go below the recipe's "
            "output, in a directory named after the model."
        ),
    ] = None,
    output: OutputInstead = None,
    max_series: MaxSeries = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe: profile, compress, recover, save, export, evaluate, probe, bench, report."""
    from tscompress.io.files import user_path
    from tscompress.reports.write import report_files, report_tables, write_report
    from tscompress.workflows.recipe import load_recipe
    from tscompress.workflows.run import WORK, finishing_run
    from tscompress.workflows.run_files import RUN_FILE

    chosen = load_recipe(recipe, model=model, output=output)
    if max_series is not None:
        if chosen.evaluation is None:
            raise UsageError("--max-series was given, and the recipe has no evaluation.")
        evaluation = chosen.evaluation.model_copy(update={"max_series": max_series})
        chosen = chosen.model_copy(update={"evaluation": evaluation})
    output = user_path(chosen.output)
    with (
        keeping_recovery(output / WORK),
        progress_bars() as advance,
        finishing_run(
            chosen,
            force=force,
            device=device,
            beside=report_files(output),
            inputs=(recipe,),
            on_series=say_series,
            on_progress=advance,
        ) as result,
    ):
        written = write_report(result, chosen)
    say_note(result.note)
    show(
        as_json, json.loads((written.parent / RUN_FILE).read_text()), *report_tables(result, chosen)
    )
    if not as_json:
        say(f"report: {written.with_suffix('.html')} (to read in a terminal: {written.name})")


def sweep(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in recipes/sweep/.", parser=path)],
    output: OutputInstead = None,
    processes: Annotated[
        int, typer.Option(help="Points measured at the same time, with one thread each.", min=1)
    ] = 1,
    max_series: MaxSeries = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure many compressions of one model and their Pareto fronts.

    The same command resumes a stopped sweep.
    """
    from tscompress.workflows.measure_point import POINTS_DIRECTORY, Measured
    from tscompress.workflows.sweep import FIGURE_FILE, POINTS
    from tscompress.workflows.sweep import sweep as measure
    from tscompress.workflows.sweep_points import load_sweep_recipe
    from tscompress.workflows.sweep_results import sweep_table

    chosen = load_sweep_recipe(recipe)
    if output is not None:
        chosen = chosen.model_copy(update={"output": str(output)})
    if max_series is not None:
        evaluation = chosen.evaluation.model_copy(update={"max_series": max_series})
        chosen = chosen.model_copy(update={"evaluation": evaluation})

    left = TimeLeft()

    def tell(measured: Measured | None, text: str, done: int, total: int) -> None:
        state = "failed: " if measured is None else ""
        seconds = left.after(done, total)
        rest = f"  (about {duration(seconds)} left)" if seconds and done < total else ""
        typer.echo(f"{done}/{total}  {state}{text}{rest}", err=True)

    with progress_bars() as advance:

        def progress(stage: str, done: int, total: int) -> None:
            if stage == POINTS:
                left.after(done, total)  # starts the clock
            advance(stage, done, total)

        result = measure(
            chosen,
            processes=processes,
            device=device,
            force=force,
            inputs=(recipe,),
            on_series=say_series,
            on_point=tell,
            on_progress=progress,
        )
    content = {
        "output": str(result.directory),
        "points": json.loads(result.frame.to_json(orient="records")),
        "failures": result.failures,
    }
    if result.gone:
        first = result.directory / POINTS_DIRECTORY / result.gone[0]
        say_note(
            f"an earlier sweep removed weights that this one would keep, of {len(result.gone)} "
            f"points; remove their directories, such as {str(first)!r}, to have them made again"
        )
    show(as_json, content, sweep_table(result), f"figure: {result.directory / FIGURE_FILE}")
    if result.failures:
        label, reason = next(iter(result.failures.items()))
        raise TscompressError(
            f"{len(result.failures)} of {len(result.frame) - 1 + len(result.failures)} points "
            f"could not be measured; {label}: {reason}"
        )


def report(
    directory: Annotated[Path, typer.Argument(help="Output of run.", parser=path)],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write only the page, here; by default report.html in DIRECTORY.", parser=path
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another run of the same original, or a CSV of sweep, for the figure; repeatable.",
            parser=path,
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about a run, from its measurements; needs no model and no network."""
    from tscompress.reports.write import rewrite_report

    page = rewrite_report(directory, output, compare=compare or (), force=force)
    show(as_json, {"page": str(page), "bytes": page.stat().st_size}, f"report: {page}")
