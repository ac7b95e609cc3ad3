"""``tscompress recover`` and ``pretrain``: training with a checkpoint to resume from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import (
    duration,
    path,
    refuse,
    say,
    say_memory,
    say_note,
    say_series,
    show,
    training_progress,
)
from tscompress.cli.options import AsJson, Device, Force, StoppedAndSaved, Threads
from tscompress.cli.series_options import (
    NOTHING_SAID,
    SERIES_OPTIONS,
    SeriesOptions,
    with_series_options,
)
from tscompress.errors import OutputError

WatchRanks = Annotated[
    bool,
    typer.Option(
        "--watch-ranks", help="Write the ranks of attention at growing steps into ranks.jsonl."
    ),
]


@with_series_options()
def recover(
    context: typer.Context,
    student: Annotated[str, typer.Argument(help="Output of compress.")],
    teacher: Annotated[str, typer.Option(help="Its original.")],
    output: Annotated[
        Path, typer.Option(help="Directory of the recovered checkpoint.", parser=path)
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML of a recipe's recover; instead of the training's options.", parser=path
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="Of wall time; 5 without steps.")] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            help="Further training series: a file (CSV, Parquet, Arrow, JSON lines), a directory "
            "of files, or a Hub dataset owner/name[:config]; repeatable, of any size. In files "
            "above 64 MB the rows of a series are consecutive."
        ),
    ] = None,
    files: SeriesOptions = NOTHING_SAID,
    synthetic_share: Annotated[
        float | None,
        typer.Option(help="Share of each batch that is synthetic; of a Chronos-T5 with --series."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw or muon, which is the default."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Default: by family, optimizer and compression.")
    ] = None,
    hidden_weight: Annotated[float | None, typer.Option(hidden=True)] = None,  # removed
    freeze_embeddings: Annotated[
        bool, typer.Option("--freeze-embeddings", help="Do not train the embeddings.")
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(help="bf16 or no. Without it: bf16 where the hardware multiplies in it."),
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts to run a batch in.", min=1)] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    patience: Annotated[
        int | None, typer.Option(help="Stop after N evaluations without improvement.", min=1)
    ] = None,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1)] = None,
    checkpoint_minutes: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    watch_ranks: WatchRanks = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the checkpoint beside the output.")
    ] = False,
    threads: Threads = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Recover a compressed model by minutes of distillation from its original.

    Several processes: torchrun --standalone --nproc_per_node 2 $(which tscompress) recover ..., on
    GPUs also accelerate launch --multi_gpu.
    """
    from tscompress.data.reading.format import GivenSeries
    from tscompress.evaluation.batching import Processes
    from tscompress.training.rank_watch import watch_findings
    from tscompress.training.recovery_config import RecoveryConfig
    from tscompress.workflows.recipe import load_recovery_config, validate
    from tscompress.workflows.recover import recover_checkpoint

    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name in (*RecoveryConfig.model_fields, *RecoveryConfig.removed)
        if (value := context.params.get(name)) is not None and value is not False
    }
    form = files.form(reads=bool(series))
    if form != GivenSeries():
        given["series_format"] = form.model_dump()
    if config is not None:
        refuse(context, "--config has all options", (*given, *SERIES_OPTIONS))
        chosen = load_recovery_config(config)
    else:
        chosen = validate(RecoveryConfig, given, source="the options")
    main = Processes().is_main
    with training_progress(main) as report:
        result = recover_checkpoint(
            student,
            teacher,
            output,
            chosen,
            resume=resume,
            force=force,
            threads=threads,
            device=device,
            inputs=(config,),
            on_series=say_series,
            on_memory=say_memory,
            report=report,
        )
    if main and result.finished:
        say_note(result.note)
        found = watch_findings(result.ranks)
        show(
            as_json,
            {"output": str(output), **result.record(), **({"ranks": found} if found else {})},
            f"loss on held-out series: {result.before:.4f} -> {result.after:.4f} "
            f"(weights of step {result.best_step} of {result.steps})",
            f"saved and loaded back bit-equal: {output}",
            *found,
        )
    elif main:
        show(
            as_json,
            {"output": None, "step": result.steps},
            f"stopped at step {result.steps}; everything is saved. Run again with --resume",
        )
    if not result.finished:
        raise StoppedAndSaved


def pretrain(
    recipe: Annotated[
        Path, typer.Argument(help="A YAML file as in recipes/pretrain/.", parser=path)
    ],
    output: Annotated[
        Path, typer.Option(help="Directory for model, checkpoint and log.", parser=path)
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the checkpoint in the output.")
    ] = False,
    watch_ranks: WatchRanks = False,
    threads: Threads = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a Chronos-Bolt, Chronos-T5 or Chronos-2 on synthetic and real series.

    It starts from scratch, or from a smaller model that is grown (start_from in the recipe).

    With a schedule in the recipe it is compressed by design: head sizes differ by layer.
    """
    import torch

    from tscompress.io.own_outputs import RANKS_LOG
    from tscompress.training.pretraining import Progress as Trained
    from tscompress.training.pretraining import pretrain as train
    from tscompress.training.rank_watch import read_ranks, watch_findings
    from tscompress.workflows.recipe import load_pretrain_recipe

    chosen = load_pretrain_recipe(recipe)
    if watch_ranks:
        chosen = chosen.model_copy(update={"watch_ranks": True})
    if threads is not None:
        torch.set_num_threads(threads)

    def tell(progress: Trained) -> None:
        if not as_json:
            with suppress(typer.Exit, OutputError):  # training continues if the pipe is closed
                say(
                    f"step {progress.step}/{progress.total_steps}  loss {progress.loss:.4f}  "
                    f"lr {progress.learning_rate:.2e}  {progress.series_per_second:.0f} series/s  "
                    f"left {duration(progress.eta_seconds)}"
                )

    final = train(chosen, output, resume=resume, force=force, inputs=(recipe,), report=tell)
    found = watch_findings(read_ranks(output / RANKS_LOG)) if chosen.watch_ranks else []
    record = {"model": None if final is None else str(final), **({"ranks": found} if found else {})}
    show(as_json, record, _trained(final, output), *found)
    if final is None:
        raise StoppedAndSaved


def _trained(final: Path | None, output: Path) -> str:
    if final is None:
        return f"stopped; everything is saved. Resume with --resume --output {output}"
    if (final / "plan.json").exists():
        return f"saved {final}; stock chronos opens it after `import tscompress.pipelines`"
    return f"saved {final}"
