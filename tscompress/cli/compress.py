"""``tscompress compress`` and ``diff``: compress a checkpoint, and compare two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tscompress.cli.console import (
    integers,
    path,
    progress_bars,
    refuse,
    say_memory,
    say_note,
    say_series,
    show,
)
from tscompress.cli.options import (
    AsJson,
    CalibrationSeries,
    Device,
    Force,
    Model,
    Revision,
    keeping_recovery,
)
from tscompress.cli.series_options import (
    NOTHING_SAID,
    SERIES_OPTIONS,
    SeriesFile,
    SeriesOptions,
    with_series_options,
)

if TYPE_CHECKING:
    from tscompress.data.reading.format import GivenSeries
    from tscompress.plan.plan import Plan
    from tscompress.workflows.recipe import Recipe


_CALIBRATION = ("series", "calibration_series")


@with_series_options()
def compress(
    context: typer.Context,
    model: Model,
    output: Annotated[
        Path, typer.Option(help="Directory of the compressed checkpoint.", parser=path)
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="YAML; instead of the options of method, sizes, columns and calibration.",
            parser=path,
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="fold (smaller layers), svd or activation-svd (two factors).")
    ] = "fold",
    rank: Annotated[
        int | None, typer.Option(help="Rank of every projection; with fold the head size, d_kv.")
    ] = None,
    ff_ratio: Annotated[
        float | None, typer.Option(help="With fold: share of hidden units to keep.")
    ] = None,
    latent: Annotated[
        int | None,
        typer.Option(
            help="With fold: all cross-attention reads one latent of this size. Smallest KV cache, "
            "fewer parameters if well below half of heads x d_kv; needs tscompress to load."
        ),
    ] = None,
    embedding_rank: Annotated[
        int | None,
        typer.Option(
            help="With fold of a Chronos-T5: token embedding and output head of this rank; needs "
            "tscompress to load."
        ),
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(
            metavar="DIMENSIONS|SHARE",
            help="With fold: new d_model (residual-stream width), dimensions (an integer from 2) "
            "or a share such as 0.5.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Experimental, with fold: ENCODER,DECODER, the numbers of layers to keep, or one "
            "number for both. The least needed are dropped. Recover afterwards."
        ),
    ] = None,
    univariate: Annotated[
        bool,
        typer.Option(
            "--univariate",
            help="With fold, Chronos-2: forecast every series alone, without the queries and keys "
            "of group attention; exact, refuses covariates, needs tscompress to load.",
        ),
    ] = False,
    single_token: Annotated[
        bool,
        typer.Option(
            "--single-token",
            help="With fold, Chronos-Bolt: without what its decoder, which reads one token, never "
            "needs; exact, needs tscompress to load.",
        ),
    ] = False,
    epsilon: Annotated[float | None, typer.Option(help="Keep each matrix's ε-rank.")] = None,
    energy: Annotated[float | None, typer.Option(help="Keep this share of the energy.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="D0,ALPHA: head sizes ⌈D0 (1+i)^ALPHA⌉ at depth i.")
    ] = None,
    fit: Annotated[
        float | None, typer.Option(help="With fold: the schedule fitted to the ε-ranks at this ε.")
    ] = None,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="The powers of two nearest to the schedule.")
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
        typer.Option(help="With a budget: folded (a stock checkpoint) or factored (by layer)."),
    ] = None,
    multiple: Annotated[
        int | None, typer.Option(help="With a budget: sizes in multiples of 8 or 16.")
    ] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Experimental, with a budget: may drop whole layers.")
    ] = False,
    keep_width: Annotated[
        bool, typer.Option("--keep-width", help="With a budget: keep d_model. Not with --width.")
    ] = False,
    plan: Annotated[Path | None, typer.Option(help="Apply this plan.json.", parser=path)] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Shell pattern of layers to keep (except for --width); repeatable."),
    ] = None,
    feed_forward: Annotated[
        bool, typer.Option("--feed-forward", help="With svd: also factor the feed-forwards.")
    ] = False,
    series: SeriesFile = None,
    files: SeriesOptions = NOTHING_SAID,
    calibration_series: CalibrationSeries = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file; larger models have several and an index.")
    ] = "5GB",
    revision: Revision = None,
    device: Device = "cpu",
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; no checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compress a model and save a verified checkpoint."""
    from tscompress.plan.plan import Plan
    from tscompress.workflows.compress import compress_checkpoint
    from tscompress.workflows.options import SIZE_OPTIONS
    from tscompress.workflows.recipe import load_recipe
    from tscompress.workflows.unfinished import recovery_directory

    sizes = ("method", *SIZE_OPTIONS)
    edited = None if plan is None else Plan.load(plan)
    if edited is not None:
        refuse(context, "--plan has every size", sizes)
    if recipe is None and (method if edited is None else edited.method) == "svd":
        refuse(context, "svd does not calibrate", _CALIBRATION)
    if recipe is not None:
        ignored = ("plan", "calibration_series", *SERIES_OPTIONS, *sizes)
        refuse(context, "--recipe has all options", ignored)
        chosen = load_recipe(recipe, model=model, output=output)
    else:
        given = {name: context.params[name] for name in sizes}
        given["layers"] = None if layers is None else integers(layers, "--layers")
        form = files.form(reads=series is not None)
        chosen = _recipe_of(given, edited, model, output, series, form, calibration_series)
        dropped = chosen.fold.dropped if edited is None else edited.dropped
        if dropped and not (edited or chosen).calibrates:
            refuse(context, f"{dropped[0]} alone does not calibrate", _CALIBRATION)
    if revision is not None:
        chosen = chosen.model_copy(update={"revision": revision})
    work = None if dry_run else recovery_directory(output)
    with keeping_recovery(work), progress_bars() as advance:
        done = compress_checkpoint(
            chosen,
            plan=edited,
            series=series,
            device=device,
            max_shard_size=max_shard_size,
            dry_run=dry_run,
            force=force,
            inputs=(recipe, plan),
            on_series=say_series,
            on_memory=say_memory,
            on_progress=advance,
        )
    say_note(done.note)
    content = done.plan.model_dump(mode="json")
    if done.output is None:
        show(as_json, content, done.plan.summary())
        return
    saved = f"saved and loaded back bit-equal: {done.output}"
    show(as_json, {"output": str(done.output), "plan": content}, done.plan.summary(), saved)


def _recipe_of(
    options: dict[str, Any],
    plan: Plan | None,
    model: str,
    output: Path,
    series: Path | None,
    form: GivenSeries,
    calibration_series: int | None,
) -> Recipe:
    from tscompress.compression.calibration import MIXED, CalibrationConfig
    from tscompress.workflows.options import recipe_of

    source = MIXED if series is None else str(series)
    calibration = CalibrationConfig(num_series=calibration_series, source=source)
    return recipe_of(
        options,
        plan=plan,
        model=model,
        output=str(output),
        calibration=calibration.model_dump(),
        series=form.model_dump(),
    )


def diff(
    old: Annotated[Path, typer.Argument(help="plan.json or a compressed checkpoint.", parser=path)],
    new: Annotated[Path, typer.Argument(help="plan.json or a compressed checkpoint.", parser=path)],
    as_json: AsJson = False,
) -> None:
    """Show the layers whose sizes differ between two plans."""
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
