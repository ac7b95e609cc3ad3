"""``export``: a model as an ONNX graph that forecasts without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tscompress.checkpoints.given import (
    AnyModel,
    in_float32,
    loaded_of,
    places_of,
    stored_in,
)
from tscompress.checkpoints.integrity import source_files
from tscompress.checkpoints.load import LoadedModel
from tscompress.checkpoints.provenance import hashes
from tscompress.errors import UsageError, VerificationError
from tscompress.exporting.directory import write_card, write_directory
from tscompress.exporting.graph import PRECISIONS, Precision, onnx_graph
from tscompress.exporting.packages import check_packages
from tscompress.exporting.page.bundle import PageSizes, check_family, write_page
from tscompress.exporting.page.engine import find_engine
from tscompress.exporting.parity import largest_difference
from tscompress.families.registry import adapter_of
from tscompress.io.arguments import check_type
from tscompress.io.files import check_output, new_directory, user_path
from tscompress.layers.univariate import is_univariate
from tscompress.runtime.forecaster import PatchForecaster
from tscompress.runtime.load import load as load_exported
from tscompress.workflows.fitted_to import FITTED_TO, as_record
from tscompress.workflows.seen_steps import sources_of

#: A float32 graph that differs by more is not what torch computes.
_LARGEST_DIFFERENCE = 1e-4
#: Of a smaller precision: those of the references differ by up to 0.1, one that saturated by 0.46.
_LARGEST_ROUNDED = 0.25


@dataclass(frozen=True)
class ExportResult:
    """An exported model.

    Attributes
    ----------
    directory
        Where it is.
    model, family, precision
        What was exported, and how.
    graph_bytes
        Size of the graph, or graphs, with the weights.
    difference
        Largest difference of a quantile from the source's on test series, as a share of the
        largest quantile of its series; of Chronos-T5, of a logit.
    compared
        ``quantiles`` or ``logits``: what ``difference`` is of.
    page
        Of a page, bytes of its own files and of its engine.
    """

    directory: Path
    model: str
    family: str
    precision: str
    graph_bytes: int
    difference: float
    compared: str = "quantiles"
    page: PageSizes | None = None

    def __repr__(self) -> str:
        size = f"{self.graph_bytes / 1e6:.2f} MB"
        where = f"{str(self.directory)!r}, {self.family}, {self.precision}, {size}"
        return f"ExportResult({where}, difference {self.difference:.1e})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"directory": str(self.directory)}


def export(
    model: AnyModel,
    output: str | Path,
    *,
    precision: Precision = "float32",
    page: bool = False,
    onnxruntime_web: str | Path | None = None,
    revision: str | None = None,
    force: bool = False,
) -> ExportResult:
    """Write a model as an ONNX graph, open that, compare forecasts, and only then put it in place.

    The directory holds ``model.onnx`` with the weights (of Chronos-T5, ``encoder.onnx`` and
    ``decoder.onnx``), ``tscompress-export.json`` (format, family, config, hashes, source,
    precision, opset, library versions) and a card. :func:`tscompress.runtime.load` opens it without
    torch; ``evaluate`` and ``probe`` take it like a model.

    Parameters
    ----------
    model
        A directory, a Hub id, a loaded model, a Chronos pipeline or a predictor around one: a
        Chronos-T5, Chronos-Bolt or Chronos-2, original or compressed. It is not changed.
    output
        Directory to write.
    precision
        ``float32``; ``float16``: half of the bytes; ``int8``: the matrices of the layers in 8
        bits, what writes the quantiles or logits in float32; ``int8-weights``: stored so, and
        multiplied in float32, so that only the file is smaller.
    page
        Write, instead of that directory, a folder with ``index.html``, which forecasts in a browser
        from a disk or any static host: the graph, and onnxruntime-web of the npm registry.
    onnxruntime_web
        For a page, the archive that ``npm pack onnxruntime-web@1.30.0`` writes; None: from the
        cache or the registry.
    revision
        Of a Hub id.
    force
        Replace an output that tscompress wrote.

    Raises
    ------
    UsageError
        ``precision`` is unknown, the extra ``onnx`` is not installed, the graph is too large, or
        ``onnxruntime_web`` is another file.
    DownloadError
        onnxruntime-web cannot be fetched.
    UnsupportedModelError
        The model has settings that cannot be exported, or torch cannot export it.
    OutputExistsError
        ``output`` holds something and ``force`` is false; or it is or holds the model.
    VerificationError
        The graph forecasts otherwise than the model.
    TscompressError
        The model cannot be loaded.
    """
    check_type("output", output, (str, Path), "the path of a directory")
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}.")
    if onnxruntime_web is not None and not page:
        raise UsageError("onnxruntime_web is the engine of a page; give --page, too.")
    check_packages()
    target = user_path(output)
    given = model if isinstance(model, str | Path) else None
    inputs: list[str | Path | None] = [given, onnxruntime_web]
    check_output(target, force=force, inputs=inputs)
    loaded = in_float32(loaded_of(model, revision=revision, argument="model", exported=False))
    inputs += places_of(loaded)
    check_output(target, force=force, inputs=inputs)
    source = _source(loaded, loaded.directory if given is not None else stored_in(loaded))
    if page:
        return _export_page(
            loaded, target, precision, source, onnxruntime_web, force=force, inputs=inputs
        )
    return _export(loaded, target, precision, source, force=force, inputs=inputs)


def _export(
    loaded: LoadedModel,
    target: Path,
    precision: Precision,
    recorded_source: Mapping[str, Any],
    *,
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
) -> ExportResult:
    """Write the directory of a model in float32; ``recorded_source`` is as of :func:`_source`."""
    pipeline = loaded.forecaster  # refused here if it does not forecast
    sources = adapter_of(loaded.family).graph_sources(loaded.model)
    graphs = {file: onnx_graph(source, precision) for file, source in sources.items()}
    with new_directory(target, force=force, inputs=inputs) as directory:
        write_directory(
            directory,
            graphs,
            name=target.name,
            family=loaded.family,
            config=loaded.config,
            source=recorded_source,
            precision=precision,
            inputs={file: tuple(source.inputs) for file, source in sources.items()},
            parameters=sum(one.numel() for one in loaded.model.parameters()),
            univariate=is_univariate(loaded.model),
            **{FITTED_TO: as_record(sources_of(loaded))},
        )
        difference = largest_difference(pipeline, load_exported(directory))
        compared = adapter_of(loaded.family).compared_values
        _check_difference(difference, precision, compared)
        write_card(directory, difference)
        size = sum(len(graph) for graph in graphs.values())
    return ExportResult(target, loaded.name, loaded.family, precision, size, difference, compared)


def _export_page(
    loaded: LoadedModel,
    target: Path,
    precision: Precision,
    recorded_source: Mapping[str, Any],
    onnxruntime_web: str | Path | None,
    *,
    force: bool,
    inputs: Sequence[str | Path | None],
) -> ExportResult:
    check_family(loaded.family)
    engine = find_engine(onnxruntime_web)
    with tempfile.TemporaryDirectory() as folder:
        done = _export(loaded, Path(folder, "graph"), precision, recorded_source)
        forecaster = load_exported(done.directory)
        assert isinstance(forecaster, PatchForecaster)  # check_family refuses others
        with new_directory(target, force=force, inputs=inputs) as directory:
            sizes = write_page(directory, forecaster, engine, name=done.model)
    return replace(done, directory=target, page=sizes)


def _source(loaded: LoadedModel, directory: Path | None) -> dict[str, Any]:
    """The record of what is exported.

    Parameters
    ----------
    directory
        Whose files hold the weights of ``loaded``; None: no files are known to.
    """
    if directory is None:
        known = {"model": loaded.source, "revision": loaded.revision, "sha256": dict[str, str]()}
        return {**known, "changed": True} if places_of(loaded) else known
    source, revision = loaded.source, loaded.revision
    if directory not in (loaded.directory, user_path(source or ".")):  # it was saved since
        source, revision = str(directory), None
    return {"model": source, "revision": revision, "sha256": hashes(source_files(directory))}


def _check_difference(difference: float, precision: str, compared: str) -> None:
    allowed = _LARGEST_DIFFERENCE if precision == "float32" else _LARGEST_ROUNDED
    if not difference <= allowed:  # nor NaN
        raise VerificationError(
            f"the {precision} graph forecasts otherwise than the model ({compared} differ by "
            f"{difference:.1e} of the largest); nothing was kept."
        )
