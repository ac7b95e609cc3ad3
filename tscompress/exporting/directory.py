"""The directory of an exported model: graph, record, card."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tscompress._version import __version__
from tscompress.checkpoints.locate import bare_name, is_local_path
from tscompress.checkpoints.names import PLACE_KEYS
from tscompress.exporting.graph import Precision, opset_of
from tscompress.exporting.packages import library_versions
from tscompress.families.registry import adapter_of
from tscompress.io.files import write_text_atomically
from tscompress.io.hashing import sha256_of
from tscompress.runtime.record import FORMAT_VERSION, RECORD_FILE

CARD_FILE = "README.md"

_CARD = """\
# {name}, as {graphs}

{family} of {source}, {precision}, {megabytes:.2f} MB, opset {opset}, by tscompress {version}.
On test series its {compared} differ from the source's by at most {difference:.1e} of the largest.

```python
import tscompress.runtime  # needs numpy and onnxruntime, no torch

forecaster = tscompress.runtime.load("{name}")
quantiles, {point} = forecaster.predict_quantiles([series], 24, [0.1, 0.5, 0.9])
```

Inputs: {inputs}. {notes}
"""


def write_directory(
    directory: Path,
    graphs: Mapping[str, bytes],
    *,
    name: str,
    family: str,
    config: Mapping[str, Any],
    source: Mapping[str, Any],
    precision: Precision,
    inputs: Mapping[str, Sequence[str]],
    **facts: Any,
) -> None:
    """Write graphs and record; :func:`write_card` adds the card.

    Parameters
    ----------
    graphs
        File name to content.
    name
        Of the exported directory.
    config
        ``config.json`` of the source.
    source
        ``model``, ``revision`` and ``sha256`` of the model that was exported; ``sha256`` is empty
        where no files hold its weights, and ``changed`` is true where files of it hold others.
    inputs
        File name to the names of the inputs of the graph.
    facts
        Further records; plain data.
    """
    for file, graph in graphs.items():
        (directory / file).write_bytes(graph)
    record = {
        "tscompress": __version__,
        "format": FORMAT_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "name": name,
        "family": family,
        "precision": precision,
        "opset": max(map(opset_of, graphs.values())),
        "inputs": {file: list(names) for file, names in inputs.items()},
        "source": dict(source),
        "sha256": {file: hashlib.sha256(graph).hexdigest() for file, graph in graphs.items()},
        **facts,
        "libraries": library_versions(),
        "python": platform.python_version(),
        "config": {key: value for key, value in config.items() if key not in PLACE_KEYS},
    }
    _write(directory, record)


def write_card(directory: Path, difference: float) -> None:
    """Add the card, its hash, and how far the forecasts are from those of the source.

    Parameters
    ----------
    difference
        Largest difference of a quantile, as a share of the largest quantile of its series; of a
        family that draws samples, of logits.
    """
    record = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
    family = adapter_of(record["family"])
    files = list(record["inputs"])
    card = _CARD.format(
        name=record["name"],
        graphs="an ONNX graph" if len(files) == 1 else "ONNX graphs",
        family=family.name,
        source=shown_source(record["source"]),
        precision=record["precision"],
        megabytes=sum((directory / file).stat().st_size for file in files) / 1e6,
        opset=record["opset"],
        version=__version__,
        difference=difference,
        compared=family.compared_values,
        point="mean" if family.draws_samples else "median",
        inputs="; ".join(_shown_inputs(names) for names in record["inputs"].values()),
        notes=family.card_notes(record["config"]["chronos_config"]),
    )
    write_text_atomically(directory / CARD_FILE, card)
    record["difference"] = difference
    record["sha256"][CARD_FILE] = sha256_of(directory / CARD_FILE)
    _write(directory, record)


def shown_source(source: Mapping[str, Any]) -> str:
    """Of a directory its name: the page may be published."""
    name = str(source["model"] or "a model in memory")
    if is_local_path(name):
        name = bare_name(name)
    return f"{name}, with other weights than its files" if source.get("changed") else name


def _shown_inputs(names: Sequence[str]) -> str:
    """Those of one graph; of a layer, only the first of its kind."""
    return ", ".join(f"`{one}`" for one in names if not one[-1].isdigit() or one.endswith("_0"))


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_text_atomically(directory / RECORD_FILE, text)
