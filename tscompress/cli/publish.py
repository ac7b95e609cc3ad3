"""``tscompress push``: a checkpoint and its card to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import path, show
from tscompress.cli.options import AsJson


def push(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Output of compress or recover, or the checkpoint of run or pretrain.",
            parser=path,
        ),
    ],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create it private; refuse a public one.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option(help="Commit to this branch; created if missing.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    scores: Annotated[
        Path | None, typer.Option(help="For the card: scores.json of evaluate.", parser=path)
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="For the card: output of bench --json.", parser=path)
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(help="Output of export, to push as onnx/.", parser=path)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the Hub.")] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded; use no network.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the card over one written by hand.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a compressed checkpoint and push it to the Hub, with a model card, in one commit.

    The token is from `hf auth login`, or HF_TOKEN.
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
        onnx=onnx,
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
        lines += [f"     removed  {name}" for name in done.removed]
        lines = [*lines, f"pushed to {done.repo_id}: {where}"]
    show(as_json, done.to_dict(), "\n".join(lines))
