"""The directory of an exported model: graph, record, card."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tscompress._version import __version__
from tscompress.exporting.graph import Precision, opset_of
from tscompress.exporting.packages import library_versions
from tscompress.io.files import write_text_atomically
from tscompress.io.hashing import sha256_of
from tscompress.runtime.record import FORMAT_VERSION, GRAPH_FILE, RECORD_FILE

CARD_FILE = "README.md"

_CARD = """\
# {name}, as an ONNX graph

{family} of {source}, {precision}, {megabytes:.2f} MB, opset {opset}, by tscompress {version}.
On test series its quantiles differ from the source's by at most {difference:.1e} of the largest.

```python
import tscompress.runtime  # needs numpy and onnxruntime, no torch

forecaster = tscompress.runtime.load("{name}")
quantiles, median = forecaster.predict_quantiles([series], 24, [0.1, 0.5, 0.9])
```

Inputs of the graph: {inputs}; NaN or a mask of 0 stand for missing steps, and contexts are padded
to whole patches of {patch} steps. Its output: `quantiles`, one row for each of {levels}.
"""


def write_directory(
    directory: Path,
    graph: bytes,
    *,
    name: str,
    family: str,
    config: Mapping[str, Any],
    source: Mapping[str, Any],
    precision: Precision,
    inputs: tuple[str, ...],
    **facts: Any,
) -> None:
    """Write graph and record; :func:`write_card` adds the card.

    Parameters
    ----------
    name
        Of the exported directory.
    config
        ``config.json`` of the source.
    source
        ``model``, ``revision`` and ``sha256`` of the model that was exported.
    inputs
        Names of the inputs of the graph.
    facts
        Further records; plain data.
    """
    (directory / GRAPH_FILE).write_bytes(graph)
    record = {
        "tscompress": __version__,
        "format": FORMAT_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "name": name,
        "family": family,
        "precision": precision,
        "opset": opset_of(graph),
        "inputs": list(inputs),
        "source": dict(source),
        "sha256": {GRAPH_FILE: hashlib.sha256(graph).hexdigest()},
        **facts,
        "libraries": library_versions(),
        "python": platform.python_version(),
        "config": dict(config),
    }
    _write(directory, record)


def write_card(directory: Path, difference: float) -> None:
    """Add the card, its hash, and how far the forecasts are from those of the source.

    Parameters
    ----------
    difference
        Largest difference of a quantile, as a share of the largest quantile of its series.
    """
    record = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
    settings = record["config"]["chronos_config"]
    card = _CARD.format(
        name=record["name"],
        family=record["family"],
        source=record["source"]["model"] or "a model in memory",
        precision=record["precision"],
        megabytes=(directory / GRAPH_FILE).stat().st_size / 1e6,
        opset=record["opset"],
        version=__version__,
        difference=difference,
        inputs=", ".join(f"`{one}`" for one in record["inputs"]),
        patch=settings["input_patch_size"],
        levels=", ".join(f"{level:g}" for level in settings["quantiles"]),
    )
    write_text_atomically(directory / CARD_FILE, card)
    record["difference"] = difference
    record["sha256"][CARD_FILE] = sha256_of(directory / CARD_FILE)
    _write(directory, record)


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_text_atomically(directory / RECORD_FILE, text)
