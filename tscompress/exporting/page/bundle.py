"""One folder: page, scripts, model and engine, which forecast from a disk or any static host.

A page that was opened from a disk may not read files beside it; plain scripts it may. So model and
engine are scripts that hold their bytes, compressed, as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from tscompress._version import __version__
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.exporting.directory import shown_source
from tscompress.exporting.page.engine import PACKAGE, VERSION, Engine, notices
from tscompress.families.registry import FORECAST_FAMILIES, adapter_of
from tscompress.io.text import rounded_count
from tscompress.runtime.forecaster import PatchForecaster
from tscompress.runtime.record import GRAPH_FILE, RECORD_FILE

#: Record of the folder: its sources, and hashes by which it is known as ours.
PAGE_RECORD = "tscompress-page.json"

_SCRIPTS = ("read.js", "forecast.js", "chart.js", "page.js")
_PLANES = (1, 2, 4)
_MODEL, _ENGINE, _ORT = "model.js", "engine.js", "ort.wasm.min.js"


@dataclass(frozen=True)
class PageSizes:
    """Bytes of a page.

    Attributes
    ----------
    page
        All files but those of the engine and its notices.
    engine
        The WebAssembly and its scripts.
    """

    page: int
    engine: int


def check_family(family: str) -> None:
    """Refuse families whose forecasts the page does not compute.

    Raises
    ------
    UnsupportedModelError
    """
    if adapter_of(family).page_name is None:
        known = [one.name for one in FORECAST_FAMILIES.values() if one.page_name is not None]
        raise UnsupportedModelError(
            f"a {family} model has no page: pages forecast with {' and '.join(known)}; give "
            "one of these, or leave out --page."
        )


def write_page(
    directory: Path, forecaster: PatchForecaster, engine: Engine, *, name: str
) -> PageSizes:
    """Write the folder of an exported model.

    Parameters
    ----------
    directory
        Empty.
    forecaster
        The exported model.
    name
        Of the model, for readers.

    Raises
    ------
    UsageError
        The model forecasts no median, or no two levels as far from it.
    """
    _check_levels(forecaster)
    graph = (forecaster.directory / GRAPH_FILE).read_bytes()
    engine_files = {
        _ORT: engine.script,
        _ENGINE: _script("ENGINE", module=_packed(engine.module), wasm=_packed(engine.wasm)),
    }
    legal = {f"onnxruntime-{Path(at).stem}.txt": text for at, text in notices().items()}
    page_files = {script: _own(script) for script in (*_SCRIPTS, "page.css")}
    page_files[_MODEL] = _model(forecaster, graph)
    engine_bytes = sum(map(len, engine_files.values()))
    page_files["index.html"] = _html(
        forecaster, name=name, model_bytes=len(page_files[_MODEL]), engine_bytes=engine_bytes,
        notices=list(legal),
    )  # fmt: skip
    every = {**page_files, **engine_files, **legal}
    for file, content in every.items():
        (directory / file).write_bytes(content)
    record = _record(forecaster, name, every)
    (directory / PAGE_RECORD).write_bytes(record)
    return PageSizes(sum(map(len, page_files.values())) + len(record), engine_bytes)


def _check_levels(forecaster: PatchForecaster) -> None:
    forecaster.median_index()
    levels = forecaster.quantiles
    if not any(low < 0.5 and abs(low + high - 1) < 1e-6 for low in levels for high in levels):
        raise UsageError(f"the model forecasts the quantiles {levels}, which make no interval.")


def _model(forecaster: PatchForecaster, graph: bytes) -> bytes:
    """The graph, its bytes in the order that compresses best.

    The bytes at one place of all floats resemble each other, and of weights that were bfloat16 half
    of them are 0.
    """
    ways = {
        planes: _packed(b"".join(graph[at::planes] for at in range(planes))) for planes in _PLANES
    }
    planes = min(ways, key=lambda one: len(ways[one]))
    return _script("MODEL", **_settings(forecaster), planes=planes, graph=ways[planes])


def _settings(forecaster: PatchForecaster) -> dict[str, Any]:
    return {
        "family": forecaster.record.family,
        "univariate": forecaster.record.univariate,
        "quantiles": forecaster.quantiles,
        "context_length": forecaster.context_length,
        "patch_size": forecaster.patch_size,
        "prediction_length": forecaster.prediction_length,
    }


def _packed(content: bytes) -> str:
    """Compressed, as text; the same bytes give the same text."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _script(constant: str, **values: object) -> bytes:
    """A script that defines a constant."""
    return f'"use strict";\nconst {constant} = {json.dumps(values)};\n'.encode()


def _own(name: str) -> bytes:
    return (files("tscompress.exporting.page") / "files" / name).read_bytes()


def _html(
    forecaster: PatchForecaster,
    *,
    name: str,
    model_bytes: int,
    engine_bytes: int,
    notices: list[str],
) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tscompress.exporting.page", "files"),
        autoescape=True,  # names of models are other people's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    record = forecaster.record
    text = environment.get_template("index.html.j2").render(
        version=__version__,
        scripts=[_MODEL, _ENGINE, _ORT, *_SCRIPTS],
        name=name,
        family=adapter_of(record.family).page_name,
        precision=record.precision,
        parameters=rounded_count(record.parameters),
        model_size=_megabytes(model_bytes),
        engine_size=_megabytes(engine_bytes),
        engine_version=VERSION,
        context=f"{forecaster.context_length:,}",
        horizon=forecaster.prediction_length,
        notices=notices,
    )
    return text.encode()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count < 10e6 else f"{count / 1e6:.0f} MB"


def _record(forecaster: PatchForecaster, name: str, content: Mapping[str, bytes]) -> bytes:
    exported = json.loads((forecaster.directory / RECORD_FILE).read_text(encoding="utf-8"))
    record = {
        "tscompress": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "name": name,
        # Of a directory its name: a page may be published.
        "source": {**exported["source"], "model": shown_source(exported["source"])},
        "graph": {key: exported[key] for key in ("family", "precision", "opset", "difference")},
        "engine": {"package": PACKAGE, "version": VERSION, "license": "MIT"},
        "sha256": {file: hashlib.sha256(given).hexdigest() for file, given in content.items()},
    }
    return (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
