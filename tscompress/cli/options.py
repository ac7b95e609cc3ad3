"""Options that several commands share, with their help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import path
from tscompress.families.calibration_sizes import BY_DEFAULT

Model = Annotated[
    str,
    typer.Argument(help="Hub id, directory, or reference/bolt, reference/chronos2, reference/t5."),
]
Against = Annotated[str | None, typer.Option(help="Compare with this model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or 'stored' for the checkpoint's.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that tscompress wrote.")]
Epsilons = Annotated[
    list[float] | None,
    typer.Option("--epsilon", "-e", help="Threshold of the ε-rank; repeat for several."),
]
Margin = Annotated[
    float, typer.Option(help="Acceptable rise of a score, as a share, for the verdict.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)]
Samples = Annotated[int | None, typer.Option(help="Sample paths of Chronos-T5.", min=1)]
BatchSize = Annotated[
    str, typer.Option(help="Series at a time; auto: as many as fit into free memory.")
]
CalibrationSeries = Annotated[
    int | None,
    typer.Option(help=f"Series to calibrate on; {BY_DEFAULT}.", min=1, max=10**6),
]
OutputInstead = Annotated[
    Path | None, typer.Option("--output", help="Instead of the recipe's.", parser=path)
]
MaxSeries = Annotated[
    int | None, typer.Option(help="Evaluate on the first N series of each dataset.", min=1)
]


class StoppedAndSaved(Exception):
    """Ctrl-C ended a training; its checkpoint was saved, and a message explained how to resume."""


@contextmanager
def keeping_recovery(work: Path | None) -> Iterator[None]:
    """If Ctrl-C stops the recovery within a command, print that ``work`` resumes it.

    Raises
    ------
    StoppedAndSaved
    """
    from tscompress.training.recovery_state import has_checkpoint

    try:
        yield
    except KeyboardInterrupt:
        if work is None or not has_checkpoint(work):
            raise
        typer.echo(f"stopped; the recovery is kept in {work}. Run the same again", err=True)
        raise StoppedAndSaved from None


CrossLearning = Annotated[
    bool,
    typer.Option(
        "--cross-learning/--no-cross-learning",
        help="All series of a batch see one another; Chronos-2 alone.",
    ),
]
