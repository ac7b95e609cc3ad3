"""``tscompress export``: a model as an ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tscompress.cli.console import path, show
from tscompress.cli.options import AsJson, Force, Model, Revision


def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="Directory of the graph or page.", parser=path)],
    precision: Annotated[
        str,
        typer.Option(
            help="float32, float16 (half of the bytes), int8 (matrices in 8 bits), or int8-weights "
            "(stored in 8 bits, multiplied in float32)."
        ),
    ] = "float32",
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Write, instead of the graph, a folder whose index.html forecasts in a browser, "
            "also offline. The engine, 33 MB, comes from the npm registry once.",
        ),
    ] = False,
    onnxruntime_web: Annotated[
        Path | None,
        typer.Option(
            help="For --page without a network: what `npm pack onnxruntime-web@1.30.0` wrote.",
            parser=path,
        ),
    ] = None,
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
        page=page,
        onnxruntime_web=onnxruntime_web,
        revision=revision,
        force=force,
    )
    lines = [
        f"{done.model}, {done.family}, {done.precision}: {done.graph_bytes / 1e6:.2f} MB",
        f"{done.compared} differ from the model's by at most {done.difference:.1e} of the largest",
        f"wrote {done.directory}",
    ]
    if done.page is not None:
        lines[-1:] = [
            f"page {done.page.page / 1e6:.2f} MB, and engine {done.page.engine / 1e6:.2f} MB",
            f"wrote {done.directory}; open {done.directory / 'index.html'}",
        ]
    show(as_json, done.to_dict(), "\n".join(lines))
