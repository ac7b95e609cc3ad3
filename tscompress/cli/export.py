"""``tscompress export``: a model as an ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import path, show
from tscompress.cli.options import AsJson, Force, Model, Revision


def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="Directory of the graph.", parser=path)],
    precision: Annotated[
        str, typer.Option(help="float32, float16 (half of the bytes) or int8 (matrices in 8 bits).")
    ] = "float32",
    revision: Revision = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as an ONNX graph that forecasts without torch.

    Needs the extra onnx. tscompress.runtime and evaluate open the directory.
    """
    from tscompress.workflows.export import export as export_model

    done = export_model(
        model,
        output,
        precision=precision,  # type: ignore[arg-type]  # refused there
        revision=revision,
        force=force,
    )
    lines = [
        f"{done.model}, {done.family}, {done.precision}: {done.graph_bytes / 1e6:.2f} MB",
        f"{done.compared} differ from the model's by at most {done.difference:.1e} of the largest",
        f"wrote {done.directory}",
    ]
    show(as_json, done.to_dict(), "\n".join(lines))
