"""Which outputs tscompress wrote, told by their content: ``--force`` replaces nothing else.

A file is known by what its kind always has (keys of JSON, columns of a table, metadata), so that
those of earlier versions are known too. A checkpoint is known by the SHA-256 of its files, which
its record holds. Names decide nothing, but for figures of versions that put no mark into them.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tscompress.io.hashing import sha256_of

_HEAD_BYTES = 4096
_LARGEST_TEXT = 2**30
_LARGEST_HEADER = 2**24

#: Of JSON objects, those that all files of a kind have.
_KEYS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("suite", "model", "rows"),  # scores
            ("model", "seed", "tasks"),  # a probe
            ("family", "base_loss", "parts"),  # sensitivities
            ("model", "family", "epsilons", "weights"),  # ranks
            ("recipe", "plan", "checkpoint"),  # a run
            ("datasets", "shift", "drift"),  # how forecasts changed
            ("dataset", "context", "label", "original", "compressed"),  # forecasts
            ("model", "output", "grid"),  # a sweep
            ("key", "bench"),  # its latencies
            ("id", "label", "checkpoint", "scores"),  # a point of it
            ("tscompress", "source", "sha256"),  # a checkpoint's record
            ("method", "family", "projections"),  # a plan
            ("model", "model_type", "model_dtype"),  # for GIFT-Eval
        ),
    )
)
_RECORD = frozenset(("tscompress", "source", "sha256"))
#: First columns of tables.
_COLUMNS = (
    "dataset,model,MASE,WQL", "benchmark,metric,value", "model,reference,dataset,metric,ratio",
    "model,dataset,series,quantile_loss", "model,dataset,series,name,quantile_loss",
    "matrix,part,kind,depth,role,head", "number,id,label,",
    "dataset,model,eval_metrics/", "model_name,",
)  # fmt: skip
#: What other texts hold near their start, or anywhere.
_HTML, _LOG = '<meta name="generator" content="tscompress ', '{"step": '
_MARKDOWN = "run `tscompress run recipe.yaml`"
#: All keys, in order, as only a program writes them.
_RECIPE = re.compile(r"(?sm)model: .*^method: .*^feed_forward: .*^calibration:")
_MARK = "<!-- written by tscompress: "
#: Figures of earlier versions, which bear only Matplotlib's mark.
_FIGURES = {
    "comparison", "embedding", "flow_of_ranks", "head_ranks", "recovery", "spectra", "sweep",
    "weight_ranks", "worst",
}  # fmt: skip


def foreign_part(directory: Path) -> str | None:
    """The first entry of a directory that is not of one checkpoint that tscompress wrote.

    None: it is such a checkpoint. A file that was changed since is none of it.
    """
    paths = sorted(directory.iterdir())
    hashes = _recorded_hashes(paths)
    for path in paths:
        known = (hashes or {}).get(path.name)
        if known is not None and _is_regular(path):
            if sha256_of(path) != known:
                return path.name
        elif hashes is None or not is_own_file(path):
            return path.name
    return None


def holds_own(directory: Path) -> bool:
    """Whether something that tscompress wrote lies in a directory, or nothing with content.

    Looked at is what lies in it and in its directories.
    """
    entries = list(directory.iterdir())
    below = [e for d in entries if d.is_dir() and not d.is_symlink() for e in d.iterdir()]
    files = [e for e in entries if e.is_symlink() or not e.is_dir()] + below
    own = [path for path in files if is_own_file(path)]
    return any(path.stat().st_size for path in own) or len(own) == len(files)


def is_own_file(path: Path) -> bool:
    """Whether a file, not a link to one, is one that tscompress wrote, or is empty."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_TEXT:
            return False
        if not found.st_size:
            return True
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        return any(of_kind(path, head) for of_kind in _KINDS)
    except (OSError, ValueError, RecursionError):
        return False


def _is_figure(path: Path, head: bytes) -> bool:
    marks = [b"Software\0tscompress"]
    if path.stem in _FIGURES:
        marks.append(b"Software\0Matplotlib")
    return head.startswith(b"\x89PNG") and any(mark in head for mark in marks)


def _is_training_state(path: Path, head: bytes) -> bool:
    """Weights and moments of a training that can be resumed."""
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or length > _LARGEST_HEADER:
        return False
    with path.open("rb") as stream:
        stream.seek(8)
        metadata = json.loads(stream.read(length)).get("__metadata__") or {}
    return "step" in metadata and ("recipe" in metadata or "config" in metadata)


def _is_text(path: Path, head: bytes) -> bool:
    """A table, a log, a page, a card."""
    start = head.decode(errors="ignore")
    if start.startswith((*_COLUMNS, _LOG)) or _HTML in start:
        return True
    if start.lstrip()[:1] not in ("#", "-", "m"):
        return False
    text = path.read_text(encoding="utf-8")
    return _MARKDOWN in text or _RECIPE.match(text) is not None or is_marked(text)


def _is_json(path: Path, head: bytes) -> bool:
    if head.lstrip()[:1] not in (b"{", b"["):
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        content = content.get("result", content)
    if isinstance(content, list):
        content = content[0] if content else {}
    return isinstance(content, dict) and any(keys <= content.keys() for keys in _KEYS)


_KINDS: tuple[Callable[[Path, bytes], bool], ...] = (
    _is_figure, _is_training_state, _is_text, _is_json,
)  # fmt: skip


def _recorded_hashes(paths: list[Path]) -> Mapping[str, str] | None:
    """Name to SHA-256, of the record that lies among the files of a checkpoint; None without."""
    for path in paths:
        if path.suffix == ".json" and _is_regular(path):
            content = _object_in(path)
            if content.keys() >= _RECORD and isinstance(content["sha256"], dict):
                return content["sha256"]
    return None


def _object_in(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def mark_of(content: str) -> str:
    """A comment with the hash of the text around it: an edit of any kind shows."""
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return f"{_MARK}{digest} -->"


def is_marked(text: str) -> bool:
    """Whether a text is to the letter what :func:`mark_of` was of."""
    found = re.search(rf"^({re.escape(_MARK)}\w+ -->)\n", text, flags=re.MULTILINE)
    return found is not None and mark_of(text.replace(found[0], "", 1)) == found[1]
