"""The ``tscompress`` command. Thin: every command calls one function and shows what it returned.

Nothing heavy is imported until a command runs, so that ``--help`` is instant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tscompress._version import __version__
from tscompress.cli.console import (
    duration,
    integers,
    pair,
    path,
    progress_bars,
    quiet_libraries,
    refuse,
    say,
    say_memory,
    say_note,
    show,
    training_progress,
    write_what_can_be,
)
from tscompress.cli.interrupts import STOPPED, STOPPED_MESSAGE, arrived
from tscompress.errors import OutputError, TscompressError, UsageError
from tscompress.io.network import check_endpoint

if TYPE_CHECKING:
    from tscompress.checkpoints.load import Checkpoint, LoadedModel
    from tscompress.evaluation.fidelity import Fidelity
    from tscompress.evaluation.results import EvaluationResult

app = typer.Typer(
    name="tscompress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Make pretrained Chronos models smaller and faster, and measure what it cost.\n\n"
        "A MODEL is a Hub id (amazon/chronos-bolt-small), a directory, reference/bolt or "
        "reference/t5 (small models that ship with tscompress), or the output of compress.\n\n"
        "A first walk, offline:\n\n"
        "  tscompress profile reference/bolt\n\n"
        "  tscompress compress reference/bolt --rank 8 --ff-ratio 0.25 --output small\n\n"
        "  tscompress evaluate small --against reference/bolt\n\n"
        "  tscompress bench small --against reference/bolt"
    ),
)
_debug = False
_PLANNING_OPTIONS = (
    "method", "rank", "ff_ratio", "latent", "width", "layers", "epsilon", "energy", "schedule",
    "fit", "powers_of_two", "budget", "layout", "multiple", "depth", "keep_width", "exclude",
    "feed_forward",
)  # fmt: skip
_LONG_FORMAT_OPTIONS = (
    "windows", "seasonality", "frequency", "id_column", "time_column", "target_column",
)  # fmt: skip
_NOT_FOR_FEV = (
    "horizon", *_LONG_FORMAT_OPTIONS, "dataset", "max_series", "root", "seeds", "margin",
    "fidelity", "gift_eval", "no_cache",
)  # fmt: skip
#: ClickException; typer brings a click of its own, or not, depending on its version.
_UsageMistake: Any = typer.BadParameter.__mro__[2]

Model = Annotated[str, typer.Argument(help="Hub id, directory, or reference/bolt, reference/t5.")]
Against = Annotated[str | None, typer.Option(help="Compare with this model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or 'stored' for the checkpoint's own.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Epsilons = Annotated[
    list[float] | None,
    typer.Option("--epsilon", "-e", help="Threshold of the ε-rank; repeat for several."),
]
Margin = Annotated[
    float, typer.Option(help="Loss that is still acceptable, as a share, for the verdict.")
]
SeriesFile = Annotated[
    Path | None, typer.Option(help="Series in CSV, Parquet, Arrow or JSON lines.", parser=path)
]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and all logs.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    global _debug
    _debug = debug
    if version:
        say(f"tscompress {__version__}")
        raise typer.Exit
    check_endpoint()
    if not debug:
        quiet_libraries()


def _load(
    model: str | Checkpoint, device: str, dtype: str, revision: str | None = None
) -> LoadedModel:
    from tscompress.checkpoints.load import load

    return load(model, device=device, dtype=None if dtype == "stored" else dtype, revision=revision)


def _distinct(name: str, other: str) -> str:
    return name if name != other else f"{name} (2)"


# --------------------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------------------


@app.command()
def profile(
    model: Model,
    epsilon: Epsilons = None,
    series: SeriesFile = None,
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
    """Measure the ε-ranks of embedding, weights and layer inputs, and what they would save."""
    from tscompress.compression.calibration import CalibrationConfig
    from tscompress.data.series import read_series
    from tscompress.io.files import check_output, new_directory
    from tscompress.profiling.figures import save_profile_figures
    from tscompress.profiling.measure import DEFAULT_EPSILONS
    from tscompress.profiling.measure import profile as measure
    from tscompress.profiling.tables import profile_table

    if output is not None:
        check_output(output, force=force, inputs=(model, series), keep=True)
    given = None if series is None else read_series(series)
    loaded = _load(model, device, "float32", revision)
    with progress_bars() as advance:
        result = measure(
            loaded,
            epsilons=tuple(epsilon or DEFAULT_EPSILONS),
            series=given,
            calibration=None if weights_only else CalibrationConfig(),
            on_progress=advance,
        )
    if output is not None:
        inputs = model, series
        with new_directory(output, force=force, keep=True, inputs=inputs) as directory:
            result.save(directory)
            save_profile_figures(result, directory)
    findings = "\n".join(result.findings())
    show(as_json, result.to_dict(), *profile_table(result), findings)


@app.command()
def sensitivity(
    model: Model,
    series: SeriesFile = None,
    calibration_series: Annotated[
        int | None, typer.Option(help="Series to measure on; 256 or 1024 by default.", min=1)
    ] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Experimental: also what leaving out each layer costs.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write all sizes to FILE.json.", parser=path)
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure what each block costs in forecast loss when it alone is made smaller.

    What --budget plans with: measured once for a model and its series, then read from a cache.
    """
    from tscompress.budget.plan_within_budget import sensitivities, sensitivity_tables
    from tscompress.compression.calibration import MIXED, CalibrationConfig
    from tscompress.data.series import read_series
    from tscompress.io.files import check_output

    if output is not None:
        check_output(output, force=force, inputs=(model, series))
    given = None if series is None else read_series(series)
    calibration = CalibrationConfig(
        num_series=calibration_series, source=MIXED if series is None else str(series)
    )
    loaded = _load(model, device, "float32", revision)
    with progress_bars() as advance:
        found = sensitivities(
            loaded, series=given, calibration=calibration, depth=depth, on_progress=advance
        )
    if output is not None:
        found.save(output)
    what = f"rise of the forecast loss, {found.base_loss:.4f}, with one part alone at a size:"
    show(as_json, found.model_dump(mode="json"), what, *sensitivity_tables(found))


@app.command()
def compress(
    context: typer.Context,
    model: Model,
    output: Annotated[
        Path, typer.Option(help="Directory of the compressed checkpoint.", parser=path)
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="YAML; instead of all options below.", parser=path)
    ] = None,
    method: Annotated[
        str, typer.Option(help="fold (smaller layers), svd or activation-svd (two factors).")
    ] = "fold",
    rank: Annotated[
        int | None, typer.Option(help="Of every projection; with fold the size of heads, d_kv.")
    ] = None,
    ff_ratio: Annotated[
        float | None, typer.Option(help="With fold: share of hidden units to keep.")
    ] = None,
    latent: Annotated[
        int | None,
        typer.Option(
            help="With fold: all cross-attention reads one latent of this size; smallest KV cache, "
            "fewer parameters if well below half of heads x d_kv, needs tscompress to load."
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            help="With fold: numbers of the residual stream that stay, d_model; makes every layer "
            "smaller."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Experimental, with fold, ENCODER,DECODER: how many layers stay, those that the "
            "forecast needs most; one number is for each. Recover afterwards."
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Keep each matrix's ε-rank.")] = None,
    energy: Annotated[float | None, typer.Option(help="Keep this share of the energy.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="D0,ALPHA: head sizes ⌈D0 (1+i)^ALPHA⌉ at depth i.")
    ] = None,
    fit: Annotated[
        float | None, typer.Option(help="With fold: the schedule that fits the ranks at this ε.")
    ] = None,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="Round the schedule down to powers of two.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="With fold, of the whole model: parameters=0.5, bytes=20MB, macs=0.4, "
            "kv-cache=0.125, latency=0.4 or wql=1%. With svd: share of the planned layers."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="With a budget: folded (a plain checkpoint) or factored (by layer)."),
    ] = None,
    multiple: Annotated[
        int | None, typer.Option(help="With a budget: sizes in multiples of 8 or 16.")
    ] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Experimental, with a budget: may drop whole layers.")
    ] = False,
    keep_width: Annotated[
        bool, typer.Option("--keep-width", help="With a budget: d_model stays as it is.")
    ] = False,
    plan: Annotated[Path | None, typer.Option(help="Apply this plan.json.", parser=path)] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Shell pattern of layers to leave (but for a --width); repeatable."),
    ] = None,
    feed_forward: Annotated[
        bool, typer.Option("--feed-forward", help="With svd: factor the feed-forwards too.")
    ] = False,
    series: SeriesFile = None,
    calibration_series: Annotated[
        int | None, typer.Option(help="Series to calibrate on; 256 or 1024 by default.", min=1)
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of one weight file; larger ones become several and an index.")
    ] = "5GB",
    revision: Revision = None,
    device: Device = "cpu",
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; no checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the layers of a model smaller and save a verified checkpoint."""
    from tscompress.checkpoints.format import shard_bytes
    from tscompress.checkpoints.load import find
    from tscompress.compression.calibration import MIXED, CalibrationConfig
    from tscompress.data.series import read_series
    from tscompress.io.files import check_output
    from tscompress.plan.plan import Plan
    from tscompress.workflows.compress import compress_loaded_, finish_recovery, plan_loaded
    from tscompress.workflows.memory import compression_memory_bytes
    from tscompress.workflows.options import choose_schedule, needs_schedule, unplanned
    from tscompress.workflows.recipe import Recipe, inputs_of, load_recipe, validate
    from tscompress.workflows.save import save

    largest = shard_bytes(max_shard_size)
    edited = None if plan is None else Plan.load(plan)
    if edited is not None:
        refuse(context, "--plan says every size", _PLANNING_OPTIONS)
    if recipe is None and (method if edited is None else edited.method) == "svd":
        refuse(context, "svd does not calibrate", ("series", "calibration_series"))
    if recipe is not None:
        others = ("plan", "calibration_series", *_PLANNING_OPTIONS)
        refuse(context, "--recipe says everything", others)
        chosen = load_recipe(recipe)
    else:
        fields: dict[str, Any] = {
            "model": model,
            "output": str(output),
            "method": edited.method if edited is not None else method,
            "exclude": tuple(exclude or ()),
            "feed_forward": feed_forward,
            "schedule": None,
            "ff_ratio": ff_ratio,
            "latent": latent,
            "width": width,
            "layers": None if layers is None else integers(layers, "--layers"),
            "calibration": CalibrationConfig(
                num_series=calibration_series,
                source=MIXED if series is None else str(series),
            ).model_dump(),
        }
        if edited is not None:
            fields |= unplanned(edited.method)
        else:
            asked = choose_schedule(
                method=method,  # type: ignore[arg-type]
                rank=rank,
                epsilon=epsilon,
                energy=energy,
                schedule=None if schedule is None else pair(schedule),
                fit=fit,
                budget=budget,
                powers_of_two=powers_of_two,
                layout=layout,  # type: ignore[arg-type]
                multiple=multiple,
                depth=depth,
                keep_width=keep_width,
                required=needs_schedule(method, fields),
            )
            fields["schedule"] = None if asked is None else asked.model_dump()
        chosen = validate(Recipe, fields, source="the options")
    inputs = model, recipe, plan, series, *inputs_of(chosen)
    work = None
    if not dry_run:
        check_output(output, force=force, inputs=inputs)
        work = _recovery_directory(output)
        if chosen.recover is not None:
            check_output(work, force=True, inputs=inputs, in_place=True)
    given = None if series is None else read_series(series)
    found = find(model, revision=revision or chosen.revision)
    say_memory(compression_memory_bytes(found, chosen))
    loaded = _load(found, device, "float32")
    chosen = chosen.model_copy(
        update={"model": loaded.source, "revision": loaded.revision, "output": str(output)}
    )
    if work is None and edited is None:
        with progress_bars() as advance:
            planned = plan_loaded(loaded, chosen, series=given, on_progress=advance)
        show(as_json, planned.model_dump(mode="json"), planned.summary())
        return
    with _keeping(work), progress_bars() as advance:
        compressed = compress_loaded_(
            loaded,
            chosen,
            plan=edited,
            series=given,
            directory=work,
            force=force,
            on_progress=advance,
        )
    assert compressed.plan is not None
    say_note(compressed.note)
    summary = compressed.plan.summary()
    if work is None:  # an edited plan is tried out, to see whether it fits
        show(as_json, compressed.plan.model_dump(mode="json"), summary)
        return
    save(compressed, output, force=force, max_shard_size=largest)
    finish_recovery(compressed, work)
    show(
        as_json,
        {"output": str(output), "plan": compressed.plan.model_dump(mode="json")},
        summary,
        f"saved and loaded back bit-equal: {output}",
    )


@app.command()
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Like every MODEL, or seasonal-naive.")],
    against: Annotated[str | None, typer.Option(help="Compare with it; or seasonal-naive.")] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="offline, offline-frequencies, zero-shot, in-domain, a YAML file, a CSV, Parquet "
            "or Arrow file of series (with --horizon), or fev:FILE, a YAML file of fev's tasks."
        ),
    ] = "offline",
    horizon: Annotated[
        int | None, typer.Option(help="Of a file of series: steps to forecast.", min=1)
    ] = None,
    windows: Annotated[
        int, typer.Option(help="Of a file of series: forecast so often, up to its end.", min=1)
    ] = 1,
    seasonality: Annotated[
        int | None, typer.Option(help="Of a file of series: steps in a season, for MASE.", min=1)
    ] = None,
    frequency: Annotated[
        str | None, typer.Option(help="Of a file of series, such as 30min; or from its times.")
    ] = None,
    id_column: Annotated[str | None, typer.Option(help="Of a file of series.")] = None,
    time_column: Annotated[str | None, typer.Option(help="Of a file of series.")] = None,
    target_column: Annotated[str | None, typer.Option(help="Of a file of series.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Only this dataset; repeatable.")
    ] = None,
    max_series: Annotated[
        int | None, typer.Option(help="Only the first N series of each dataset.", min=1)
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Local copy: ROOT/<dataset>/*.parquet.", parser=path)
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Series at a time; auto: as many as fit into free memory.")
    ] = "32",
    seed: Annotated[int, typer.Option(help="Of the sample paths of Chronos-T5.")] = 0,
    seeds: Annotated[
        str | None, typer.Option(help="0,1,2: average over several, so that less is chance.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Sample paths of Chronos-T5.", min=1)
    ] = None,
    margin: Margin = 0.005,
    fidelity: Annotated[
        bool,
        typer.Option("--fidelity", help="With --against: how forecasts changed, and the worst."),
    ] = False,
    gift_eval: Annotated[
        bool, typer.Option("--gift-eval", help="Into the output also all_results.csv, its layout.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Forecast anew what an earlier run has scored.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for CSV and JSON, or FILE.json; for compare.", parser=path),
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """WQL and MASE on real series, next to seasonal naive and, if given, another model.

    Scores are kept below $TSCOMPRESS_CACHE, so that a run that was stopped goes on. Several
    processes: torchrun --standalone --nproc_per_node 2 $(which tscompress) evaluate ...
    """
    from tscompress.data.evaluation_sets import LongFormat
    from tscompress.data.suites import find_suite
    from tscompress.evaluation.batching import Processes, parse_batch_size
    from tscompress.evaluation.comparison import compare
    from tscompress.evaluation.fidelity import PairedForecasts
    from tscompress.evaluation.gift_eval import GiftEvalResults
    from tscompress.evaluation.results import SEASONAL_NAIVE, relative
    from tscompress.evaluation.score_cache import ScoreCache
    from tscompress.evaluation.tables import comparison_tables, evaluation_table, fidelity_tables
    from tscompress.io.files import check_output
    from tscompress.workflows.evaluate_models import score
    from tscompress.workflows.recipe import EvaluationConfig

    if suite.startswith("fev:"):
        refuse(context, "fev's tasks say what to forecast and score", _NOT_FOR_FEV)
        _evaluate_fev(
            suite.removeprefix("fev:"),
            [(model, revision)] if against is None else [(model, revision), (against, None)],
            parse_batch_size(batch_size),
            seed,
            num_samples,
            output,
            lambda name, at: _load(name, device, dtype, at),
            force=force,
            as_json=as_json,
        )
        return
    processes = Processes()
    if processes.is_main and processes.count > 1:
        typer.echo(f"{processes.count} processes share the batches", err=True)
    cache = None if no_cache else ScoreCache()
    inputs = model, against, suite, root
    if output is not None:
        check_output(output, force=force, inputs=inputs, keep=True)
    if fidelity and against is None:
        raise UsageError("--fidelity compares with another model; give --against.")
    if gift_eval and (output is None or output.suffix == ".json"):
        raise UsageError("--gift-eval writes files; give a directory with --output.")
    if seeds is not None:
        refuse(context, "--seeds says every seed", ("seed",))
    long_format = None
    if horizon is not None:
        long_format = LongFormat(
            horizon=horizon,
            windows=windows,
            seasonality=seasonality,
            frequency=frequency,
            id_column=id_column,
            time_column=time_column,
            target_column=target_column,
        )
    else:
        refuse(context, "without --horizon there is no file of series", _LONG_FORMAT_OPTIONS)
    find_suite(suite, long_format)  # what is wrong with it is said before a model is loaded
    config = EvaluationConfig(
        suite=suite,
        long_format=long_format,
        datasets=tuple(dataset) if dataset else None,
        max_series=max_series,
        batch_size=parse_batch_size(batch_size),
        seed=seed,
        root=None if root is None else str(root),
    )
    averaged = None if seeds is None else integers(seeds, "--seeds")
    pairs = PairedForecasts() if fidelity else None
    layout = GiftEvalResults() if gift_eval else None

    def scored(name: str, at: str | None = None, keep: Any = None) -> EvaluationResult:
        if name == SEASONAL_NAIVE:
            return score(name, name, config, advance, cache=cache, on_forecasts=keep)
        here = processes.device(device)
        loaded = _load(name, here, dtype, at)
        return score(
            loaded.forecaster,
            loaded.name,
            config,
            advance,
            seeds=averaged,
            num_samples=num_samples,
            cache=cache,
            on_forecasts=keep,
        )

    with progress_bars() as advance:
        other = None if against is None else scored(against, None, pairs and pairs.original)
        kept = _all_of(None if pairs is None else pairs.compressed, layout)
        result = scored(model, revision, kept)
        naive = next(
            (r for r in (result, other) if r is not None and r.model == SEASONAL_NAIVE), None
        ) or scored(SEASONAL_NAIVE)
    processes.leave()
    if not processes.is_main:
        return
    if cache is not None and cache.trouble:
        typer.echo(f"note: scores are not kept: {cache.trouble}", err=True)
    content: dict[str, Any] = {
        "result": result.to_dict(),
        "relative_to_seasonal_naive": relative(result, naive),
    }
    table = evaluation_table(
        result,
        against=None if other is naive else other,
        baseline=None if result is naive else naive,
    )
    shown: list[Any] = [table]
    if other is not None:
        content |= {"against": other.to_dict(), "relative_to_against": relative(result, other)}
        comparison = compare([other, result], margin=margin)
        content["comparison"] = comparison.to_dict()
        shown += [*comparison_tables(comparison), "\n".join(comparison.lines())]
    changes = None if pairs is None else pairs.summary()
    if changes is not None:
        content["fidelity"] = changes.to_dict()
        shown += fidelity_tables(changes)
    if output is not None:
        also = None if layout is None else partial(layout.save, result=result, dtype=dtype)
        results = result, naive, other
        _write_scores(output, content, *results, changes, also, force=force, inputs=inputs)
    for key in ("result", "against"):  # every series is for files
        if key in content:
            _drop_series(content[key])
    show(as_json, content, *shown)


def _evaluate_fev(
    path: str,
    models: list[tuple[str, str | None]],
    batch_size: Any,
    seed: int,
    num_samples: int | None,
    output: Path | None,
    load: Callable[[str, str | None], LoadedModel],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Of each model and of seasonal naive the summaries that fev makes of its tasks."""
    from tscompress.evaluation import fev_tasks
    from tscompress.evaluation.results import SEASONAL_NAIVE
    from tscompress.io.files import check_output, new_directory, write_text_atomically

    inputs = path, *(name for name, _ in models)
    if output is not None:
        check_output(output, force=force, inputs=inputs, keep=True)
    tasks = fev_tasks.load_tasks(path)
    summaries: list[dict[str, Any]] = []
    with progress_bars() as advance:
        for name, at in dict.fromkeys([*models, (SEASONAL_NAIVE, None)]):
            loaded = None if name == SEASONAL_NAIVE else load(name, at)
            shown = fev_tasks.model_name(name if loaded is None else loaded.name)
            if any(summary["model_name"] == shown for summary in summaries):
                shown = _distinct(shown, shown)
            own: list[dict[str, Any]] = []
            for task in tasks:
                own += fev_tasks.evaluate_tasks(
                    SEASONAL_NAIVE if loaded is None else loaded.forecaster,
                    [task],
                    name=shown,
                    batch_size=batch_size,
                    seed=seed,
                    num_samples=num_samples,
                )
                advance(f"evaluate {shown}", len(own), len(tasks))
            summaries += own
    table = fev_tasks.summaries_table(summaries)
    if output is not None and output.suffix == ".csv" and not output.is_dir():
        write_text_atomically(output.resolve(), fev_tasks.summaries_csv(summaries))
    elif output is not None:
        with new_directory(output, force=force, keep=True, inputs=inputs) as directory:
            content = fev_tasks.summaries_csv(summaries)
            write_text_atomically(directory / fev_tasks.SUMMARIES_FILE, content)
    show(as_json, {"summaries": summaries}, table)


def _all_of(*hooks: Callable[..., None] | None) -> Callable[..., None] | None:
    """One hook that calls those that are there; None if none is."""
    given = [hook for hook in hooks if hook is not None]

    def call(*values: object) -> None:
        for hook in given:
            hook(*values)

    return call if given else None


def _drop_series(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        row.pop("series", None)


def _write_scores(
    output: Path,
    content: dict[str, Any],
    result: EvaluationResult,
    naive: EvaluationResult,
    other: EvaluationResult | None,
    changes: Fidelity | None,
    also: Callable[[Path], None] | None,
    *,
    force: bool,
    inputs: Sequence[str | Path | None],
) -> None:
    """Everything in FILE.json; or in a directory, with tables in CSV and the worst series drawn.

    ``also`` writes more into the directory.
    """
    from tscompress.evaluation.results import SCORES_FILE, aggregate
    from tscompress.io.files import new_directory, write_text_atomically
    from tscompress.io.results import results_json
    from tscompress.plotting import DPI, forecast_figure

    if output.suffix == ".json" and not output.is_dir():
        write_text_atomically(output.resolve(), results_json(content))
        return
    with new_directory(output, force=force, keep=True, inputs=inputs) as directory:
        result.to_csv(directory / "scores.csv")
        if other is not None:
            other.to_csv(directory / "scores-against.csv")
        totals = aggregate(result, naive).to_csv(index=False)
        write_text_atomically(directory / "agg-rel-scores.csv", totals)
        write_text_atomically(directory / SCORES_FILE, results_json(content))
        if changes is not None and changes.worst:
            panels = [series.panel() for series in changes.worst]
            forecast_figure(panels).savefig(directory / "worst.png", dpi=DPI)
        if also is not None:
            also(directory)


@app.command()
def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="What evaluate --output wrote; the first is the reference.", parser=path
        ),
    ],
    margin: Margin = 0.005,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    resamples: Annotated[int, typer.Option(help="Of the series, for the intervals.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Directory for ratios.csv and series.csv.", parser=path)
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Ratios of WQL and MASE to the first result, with confidence intervals and a verdict.

    A single result is compared with the one of --against in the same file.
    """
    from tscompress.evaluation.comparison import compare as compare_results
    from tscompress.evaluation.comparison import series_frame
    from tscompress.evaluation.results import SCORES_FILE, load_results
    from tscompress.evaluation.tables import comparison_tables
    from tscompress.io.files import check_output, new_directory, write_text_atomically

    inputs = [given / SCORES_FILE if given.is_dir() else given for given in results]
    if output is not None:
        check_output(output, force=force, inputs=inputs, keep=True)
    if len(results) == 1:
        found = list(reversed(load_results(results[0])))
    else:
        found = [load_results(path)[0] for path in results]
    comparison = compare_results(
        found, margin=margin, confidence=confidence, resamples=resamples, seed=seed
    )
    if output is not None:
        with new_directory(output, force=force, keep=True, inputs=inputs) as directory:
            for name, frame in (
                ("ratios.csv", comparison.frame()),
                ("series.csv", series_frame(found)),
            ):
                write_text_atomically(directory / name, frame.to_csv(index=False))
    show(
        as_json,
        comparison.to_dict(),
        *comparison_tables(comparison),
        "\n".join(comparison.lines()),
    )


@app.command()
def probe(
    model: Model,
    against: Annotated[
        str | None, typer.Option(help="The original: what of its skill is kept.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names, groups or patterns: seasons,'period-7*'; all without."),
    ] = None,
    tasks_file: Annotated[
        Path | None, typer.Option(help="YAML with tasks of your own, instead.", parser=path)
    ] = None,
    num_series: Annotated[int | None, typer.Option(help="Of each task.", min=1)] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Sample paths of Chronos-T5.", min=1)
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Series at a time; auto: as many as fit into free memory.")
    ] = "32",
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
    """Skill at tasks whose best possible forecast is known: seasons, trends, noise, gaps, ...

    1 is the best possible forecast, 0 the best constant one. Seconds for a tiny Chronos-Bolt.
    """
    from tscompress.evaluation.batching import parse_batch_size
    from tscompress.io.files import check_output, write_text_atomically
    from tscompress.io.results import results_json
    from tscompress.probing.measure import ProbeConfig
    from tscompress.probing.measure import probe as measure
    from tscompress.probing.results import probe_content
    from tscompress.probing.tables import probe_tables

    if output is not None:
        check_output(output, force=force, inputs=(model, against, tasks_file))
    config = ProbeConfig(
        tasks=None if tasks is None else tuple(tasks.split(",")),
        tasks_file=None if tasks_file is None else str(tasks_file),
        num_series=num_series,
        num_samples=num_samples,
        batch_size=parse_batch_size(batch_size),
        seed=seed,
    )
    config.chosen()  # what is wrong with it is said before a model is loaded
    names = [(model, revision)] if against is None else [(model, revision), (against, None)]
    loaded = [_load(name, device, dtype, at) for name, at in names]
    labels = [one.name for one in loaded]
    labels[0] = labels[0] if against is None else _distinct(*labels)
    results = []
    with progress_bars() as advance:
        for one, label in zip(loaded, labels, strict=True):
            tell = partial(_tell_task, partial(advance, f"probe {label}"))
            results.append(measure(one, **dict(config), name=label, on_task=tell))
    if output is not None:
        write_text_atomically(output, results_json(probe_content(*results)))
    lines = [] if against is None else results[0].against(results[1]).lines()
    tables = probe_tables(*results)
    show(as_json, probe_content(*results, series=False), *tables, *lines)


def _tell_task(advance: Callable[[int, int], None], _: object, done: int, total: int) -> None:
    advance(done, total)


@app.command()
def bench(
    model: Model,
    against: Against = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    context_length: Annotated[int, typer.Option(min=1)] = 512,
    horizon: Annotated[int, typer.Option(min=1)] = 64,
    num_samples: Annotated[
        int | None, typer.Option(help="Sample paths of Chronos-T5.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each model.", min=1)] = 20,
    warmup: Annotated[int, typer.Option(min=0)] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Peak memory, in a process of its own.")
    ] = True,
    share: Annotated[
        bool,
        typer.Option(
            "--share-cross-attention",
            help="Chronos-T5: measure each model once more, with sample paths that share the "
            "cross-attention keys and values of their series.",
        ),
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Latency, memory, MACs and size; two models take turns in one process."""
    from tscompress.benchmark.bench import bench as bench_models
    from tscompress.benchmark.tables import bench_table
    from tscompress.benchmark.workload import make_workload
    from tscompress.layers.shared_cross_attention import share_cross_attention

    workload = make_workload(
        {
            "batch_size": batch_size,
            "context_length": context_length,
            "horizon": horizon,
            "num_samples": num_samples,
            "repeats": repeats,
            "warmup": warmup,
            "threads": threads,
            "device": device.partition(":")[0],
        }
    )
    # The original comes first: ratios are to it.
    names = [model] if against is None else [against, model]
    loaded = [_load(name, device, dtype) for name in names]
    labels = [one.name for one in loaded]
    if len(labels) == 2:
        labels[1] = _distinct(labels[1], labels[0])
    pipelines = {label: one.forecaster for label, one in zip(labels, loaded, strict=True)}
    directories = {label: one.directory for label, one in zip(labels, loaded, strict=True)}
    if share:
        for label in labels:
            pipelines[f"{label}, shared"] = share_cross_attention(pipelines[label])
            directories[f"{label}, shared"] = directories[label]
    with progress_bars() as advance:
        result = bench_models(
            pipelines,
            workload,
            directories=directories,
            measure_memory=memory,
            on_run=lambda run: advance("bench", run.round + 1, repeats),
        )
    show(as_json, result.to_dict(), bench_table(result))


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in recipes/.", parser=path)],
    output: Annotated[
        Path | None, typer.Option(help="Instead of the recipe's.", parser=path)
    ] = None,
    max_series: Annotated[
        int | None, typer.Option(help="Evaluate on the first N series of each dataset.", min=1)
    ] = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """The whole walk: profile, compress, save, load again, evaluate, bench, report."""
    from tscompress.io.files import check_output, user_path
    from tscompress.reports.write import MARKDOWN_FILE, PAGE_FILE, report_tables, write_report
    from tscompress.workflows.recipe import inputs_of, load_recipe
    from tscompress.workflows.run import WORK
    from tscompress.workflows.run import run as run_recipe
    from tscompress.workflows.run_files import FILES, RUN_FILE

    chosen = load_recipe(recipe)
    if output is not None:
        chosen = chosen.model_copy(update={"output": str(output)})
    if max_series is not None and chosen.evaluation is not None:
        evaluation = chosen.evaluation.model_copy(update={"max_series": max_series})
        chosen = chosen.model_copy(update={"evaluation": evaluation})
    for name in (RUN_FILE, *FILES, PAGE_FILE, MARKDOWN_FILE):
        inputs = recipe, *inputs_of(chosen)
        check_output(user_path(chosen.output) / name, force=True, inputs=inputs, keep=True)
    with _keeping(user_path(chosen.output) / WORK), progress_bars() as advance:
        result = run_recipe(chosen, force=force, device=device, on_progress=advance)
    written = write_report(result, chosen)
    show(as_json, json.loads((written.parent / RUN_FILE).read_text()), *report_tables(result))
    if not as_json:
        say(f"report: {written.with_suffix('.html')} (to read in a terminal: {written.name})")


@app.command()
def sweep(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in recipes/sweep/.", parser=path)],
    output: Annotated[
        Path | None, typer.Option(help="Instead of the recipe's.", parser=path)
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Points measured at the same time, with one thread each.", min=1)
    ] = 1,
    max_series: Annotated[
        int | None, typer.Option(help="Evaluate on the first N series of each dataset.", min=1)
    ] = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Many compressions of one model, and which of them nothing else beats: the Pareto fronts.

    A sweep that was stopped goes on with the same command.
    """
    from tscompress.io.files import check_output, user_path
    from tscompress.workflows.sweep import (
        FIGURE_FILE,
        LATENCY_FILE,
        RECIPE_FILE,
        TABLE_FILE,
        Measured,
        load_sweep_recipe,
        sweep_table,
    )
    from tscompress.workflows.sweep import sweep as measure

    chosen = load_sweep_recipe(recipe)
    if output is not None:
        chosen = chosen.model_copy(update={"output": str(output)})
    if max_series is not None:
        evaluation = chosen.evaluation.model_copy(update={"max_series": max_series})
        chosen = chosen.model_copy(update={"evaluation": evaluation})

    # Without --force a recipe there is only ever written over by the same one.
    for name in (FIGURE_FILE, LATENCY_FILE, TABLE_FILE, *([RECIPE_FILE] if force else [])):
        inputs = recipe, chosen.model, chosen.evaluation.suite
        check_output(user_path(chosen.output) / name, force=True, inputs=inputs, keep=True)

    def tell(measured: Measured | None, text: str, done: int, total: int) -> None:
        state = "failed: " if measured is None else ""
        typer.echo(f"{done}/{total}  {state}{text}", err=True)

    with progress_bars() as advance:
        result = measure(
            chosen,
            processes=processes,
            device=device,
            force=force,
            on_point=tell,
            on_progress=advance,
        )
    content = {
        "output": str(result.directory),
        "points": json.loads(result.frame.to_json(orient="records")),
        "failures": result.failures,
    }
    show(as_json, content, sweep_table(result), f"figure: {result.directory / FIGURE_FILE}")
    if result.failures:
        label, reason = next(iter(result.failures.items()))
        raise TscompressError(
            f"{len(result.failures)} of {len(result.frame) - 1 + len(result.failures)} points "
            f"could not be measured; {label}: {reason}"
        )


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="What run wrote.", parser=path)],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page alone, here; by default report.html in DIRECTORY.", parser=path
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
    """One page of HTML about a run, from its measurements; it needs no model and no network."""
    from tscompress.reports.write import rewrite_report

    page = rewrite_report(directory, output, compare=compare or (), force=force)
    show(as_json, {"page": str(page), "bytes": page.stat().st_size}, f"report: {page}")


@app.command()
def recover(
    context: typer.Context,
    student: Annotated[str, typer.Argument(help="What compress wrote.")],
    teacher: Annotated[str, typer.Option(help="The original it was made from.")],
    output: Annotated[
        Path, typer.Option(help="Directory of the recovered checkpoint.", parser=path)
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, what a recipe has below recover; for all options.", parser=path),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="Of wall time; 5 without steps.")] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            help="Series to train on too: a file (CSV, Parquet, Arrow, JSON lines), a directory of "
            "such, or a Hub dataset owner/name[:config]; repeatable, of any size. The rows of one "
            "series follow one another, in one file."
        ),
    ] = None,
    synthetic_share: Annotated[
        float | None,
        typer.Option(help="Part of each batch that is none of yours, where there are series."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw or muon, which is the default."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Without it: by family, optimizer and what was cut.")
    ] = None,
    hidden_weight: Annotated[float | None, typer.Option(hidden=True)] = None,  # removed
    freeze_embeddings: Annotated[
        bool, typer.Option("--freeze-embeddings", help="Leave the embeddings as they are.")
    ] = False,
    precision: Annotated[str | None, typer.Option(help="bf16 or no.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts to run a batch in.", min=1)] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations without improvement.", min=1)
    ] = None,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1)] = None,
    checkpoint_minutes: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint beside the output.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)] = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Distil from the original what compression lost: minutes, not a training.

    Several processes: torchrun --standalone --nproc_per_node 2 $(which tscompress) recover ..., on
    GPUs also accelerate launch --multi_gpu.
    """
    import torch
    from accelerate import PartialState

    from tscompress.api import recover as run_recovery
    from tscompress.errors import OutputExistsError
    from tscompress.evaluation.batching import Processes
    from tscompress.io.files import check_output
    from tscompress.training.recovery_config import RecoveryConfig
    from tscompress.training.recovery_memory import memory_bytes
    from tscompress.training.recovery_state import has_checkpoint
    from tscompress.workflows.compress import finish_recovery
    from tscompress.workflows.recipe import load_recovery_config, series_files, validate
    from tscompress.workflows.save import save

    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name in (*RecoveryConfig.model_fields, *RecoveryConfig.removed)
        if (value := context.params.get(name)) is not None and value is not False
    }
    if config is not None:
        refuse(context, "--config says everything", tuple(given))
        chosen = load_recovery_config(config)
    else:
        chosen = validate(RecoveryConfig, given, source="the options")
    if synthetic_share is not None and not series:
        raise UsageError("--synthetic-share says how much is not of --series; give series with it.")
    inputs = student, teacher, config, *series_files(chosen)
    check_output(output, force=force, inputs=inputs)
    work = _recovery_directory(output)
    check_output(work, force=True, inputs=inputs, in_place=True)
    # A run that was stopped before its first checkpoint left nothing to go on from.
    if has_checkpoint(work) and not (resume or force):
        raise OutputExistsError(
            f"{str(work)!r} holds a run that did not finish; go on with --resume, or pass --force."
        )
    if threads is not None:
        torch.set_num_threads(threads)
    here = Processes().device(device)
    ours, theirs = (_load(name, here, "stored") for name in (student, teacher))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    needed = memory_bytes(ours, theirs, chosen, processes)
    main = os.environ.get("RANK", "0") == "0"
    if main:
        say_memory(needed, processes)
    with training_progress(main) as report:
        recovered = run_recovery(
            ours,
            theirs,
            chosen,
            directory=work,
            resume=resume,
            report=report,
        )
    result = recovered.recovery
    assert result is not None
    if main and not result.finished:
        show(
            as_json,
            {"output": None, "step": result.steps},
            f"stopped at step {result.steps}; everything is saved. Run again with --resume",
        )
    elif main:
        save(recovered, output, force=force)
        finish_recovery(recovered, work)
        show(
            as_json,
            {"output": str(output), **result.record()},
            f"loss on held-out series: {result.before:.4f} -> {result.after:.4f} "
            f"(weights of step {result.best_step} of {result.steps})",
            f"saved and loaded back bit-equal: {output}",
        )
    if processes > 1:
        PartialState().destroy_process_group()
    if not result.finished:
        raise _StoppedAndSaved


def _recovery_directory(output: Path) -> Path:
    """Where the recovery of a checkpoint is resumed from."""
    return output.with_name(f"{output.name}.recovery")


@app.command()
def pretrain(
    recipe: Annotated[
        Path, typer.Argument(help="A YAML file as in recipes/pretrain/.", parser=path)
    ],
    output: Annotated[
        Path, typer.Option(help="Directory for model, checkpoint and log.", parser=path)
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in the output.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a Chronos-Bolt or Chronos-T5 from scratch on synthetic series.

    With a schedule in the recipe it is compressed by design: a head size of its own for each layer.
    """
    import torch

    from tscompress.io.files import check_output
    from tscompress.training.pretraining import Progress as Trained
    from tscompress.training.pretraining import pretrain as train
    from tscompress.workflows.recipe import load_pretrain_recipe

    chosen = load_pretrain_recipe(recipe)
    inputs = recipe, chosen.embedding_from
    if not resume:
        check_output(output, force=force, inputs=inputs, keep=True, in_place=True)
    check_output(output / "model", force=True, inputs=inputs)
    if threads is not None:
        torch.set_num_threads(threads)

    def tell(progress: Trained) -> None:
        if not as_json:
            with suppress(typer.Exit, OutputError):  # a training goes on though nobody reads
                say(
                    f"step {progress.step}/{progress.total_steps}  loss {progress.loss:.4f}  "
                    f"lr {progress.learning_rate:.2e}  {progress.series_per_second:.0f} series/s  "
                    f"left {duration(progress.eta_seconds)}"
                )

    final = train(chosen, output, resume=resume, report=tell)
    show(as_json, {"model": None if final is None else str(final)}, _trained(final, output))
    if final is None:
        raise _StoppedAndSaved


def _trained(final: Path | None, output: Path) -> str:
    if final is None:
        return f"stopped; everything is saved. Go on with --resume --output {output}"
    if (final / "plan.json").exists():
        return f"saved {final}; stock chronos opens it after `import tscompress.pipelines`"
    return f"saved {final}"


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="plan.json or a compressed checkpoint.", parser=path)],
    new: Annotated[Path, typer.Argument(help="plan.json or a compressed checkpoint.", parser=path)],
    as_json: AsJson = False,
) -> None:
    """Show which layers two plans treat differently."""
    from tscompress.checkpoints.names import PLAN_FILE
    from tscompress.plan.plan import Plan

    first, second = (Plan.load(p / PLAN_FILE if p.is_dir() else p) for p in (old, new))
    lines = first.diff(second)
    ratios = [plan.attention_parameter_ratio for plan in (first, second)]
    text = "\n".join(lines) if lines else "the plans give every layer the same size"
    show(
        as_json,
        {"changes": lines, "attention_parameter_ratio": ratios},
        text,
        f"attention parameter ratio: {ratios[0]:.3f} -> {ratios[1]:.3f}",
    )


@app.command()
def push(
    directory: Annotated[
        Path, typer.Argument(help="What compress, recover or run wrote.", parser=path)
    ],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create it private; refuse a public one.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option(help="Commit to this branch; created if it is not there.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    scores: Annotated[
        Path | None, typer.Option(help="For the card: scores.json of evaluate.", parser=path)
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="For the card: what bench --json printed.", parser=path)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the Hub may stay silent.")] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go up; touch no network.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the card over one written by hand.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a compressed checkpoint and push it to the Hub, with a model card, in one commit.

    The token is the one of `hf auth login`, or HF_TOKEN.
    """
    from tscompress.hub import push as hub
    from tscompress.hub.card_scores import read_bench, read_scores

    done = hub.push(
        directory,
        repo_id,
        private=private,
        branch=branch,
        create_pr=create_pr,
        dry_run=dry_run,
        message=message,
        scores=None if scores is None else read_scores(scores),
        bench=None if bench is None else read_bench(bench),
        force=force,
        timeout_seconds=timeout,
    )
    for note in done.notes:
        typer.echo(f"note: {note}", err=True)
    if done.left_behind:
        typer.echo(f"note: stays here: {', '.join(done.left_behind)}", err=True)
    lines = [f"{size:>12,}  {name}" for name, size in done.files.items()]
    if dry_run:
        lines = ["would push, in bytes:", *lines, "", done.card]
    else:
        where = done.pull_request or done.url
        lines = [*lines, f"pushed to {done.repo_id}: {where}"]
    show(as_json, done.to_dict(), "\n".join(lines))


class _StoppedAndSaved(Exception):
    """Ctrl-C ended a training, and what it goes on from was saved and told."""


@contextmanager
def _keeping(work: Path | None) -> Iterator[None]:
    """Says of a recovery that Ctrl-C stopped, as a part of more, how it goes on."""
    from tscompress.training.recovery_state import has_checkpoint

    try:
        yield
    except KeyboardInterrupt:
        if work is None or not has_checkpoint(work):
            raise
        typer.echo(f"stopped; the recovery is kept in {work}. Run the same again", err=True)
        raise _StoppedAndSaved from None


def main() -> None:
    """Run the command: every expected error is one line and an exit code."""
    write_what_can_be()
    try:
        code = app(prog_name="tscompress", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except _StoppedAndSaved:
        arrived()
        sys.exit(STOPPED)
    except _UsageMistake as error:
        error.show()
        code = error.exit_code
    except TscompressError as error:
        code = _fail(str(error), error.exit_code, error)
    except OSError as error:
        code = _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1, error)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if arrived():  # a library made another error of Ctrl-C
            code = STOPPED
        else:
            code = _fail(f"unexpected {type(error).__name__}: {text}; see --debug", 1, error)
    arrived()
    if code == STOPPED:  # new versions of typer return it, older ones raise Abort
        typer.echo(STOPPED_MESSAGE, err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, error: BaseException) -> int:
    if _debug:
        raise error
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code
