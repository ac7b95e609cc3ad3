"""Which outputs tscompress wrote, told by their content: ``--force`` replaces nothing else.

A file is known by what no other program writes: many keys of JSON, metadata, a mark. A checkpoint
is known by the SHA-256 of its files, which its record holds. Names decide nothing, but for the
state of a training beside its log.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tscompress.io.hashing import sha256_of

if TYPE_CHECKING:  # it takes long to import
    import pandas as pd

#: Ranks of a training's weights, beside its log.
RANKS_LOG = "ranks.jsonl"
#: Of a training: its log, beside that the directory of its state, and in that the state, whole and
#: as it is being written.
TRAINING_LOG, TRAINING_DIRECTORY, TRAINING_STATE = "log.jsonl", "checkpoint", "state.safetensors"
UNFINISHED_STATE = f"{TRAINING_STATE}.tmp"

#: How safetensors names a file until it is whole.
_UNFINISHED = re.compile(r"\.tmp[A-Za-z0-9]{6}")

_HEAD_BYTES = 4096
#: Of what is read whole.
_LARGEST_TEXT = 2**30
_LARGEST_HEADER = 2**24

#: Of JSON objects, those that all files of a kind have, enough of them that no other program does.
_KEYS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("version", "family", "base_loss", "parts", "settings"),  # sensitivities
            ("model", "family", "epsilons", "weight_floor", "input_floor", "weights"),  # ranks
            ("recipe", "plan", "checkpoint", "attention_parameter_ratio", "relative"),  # a run
            ("datasets", "shift", "drift", "frequencies", "contexts", "worst"),  # changed forecasts
            ("dataset", "series", "context", "label", "original", "compressed"),  # forecasts
            ("model", "revision", "output", "grid", "fold", "calibration", "recover",
             "evaluation", "bench", "keep"),  # a sweep
            ("id", "label", "method", "recovered", "checkpoint", "fit_seconds", "scores"),
            ("version", "method", "family", "schedule", "projections", "heads", "hidden"),  # a plan
            ("model", "model_type", "model_dtype", "written_by_tscompress"),  # for GIFT-Eval
        ),
    )
)  # fmt: skip
_RECORD = frozenset(("tscompress", "source", "sha256"))
#: Of a JSON object by name: of the first entry of the list by the second name, what it has.
_LISTS: tuple[tuple[frozenset[str], str, frozenset[str]], ...] = (
    (
        frozenset(("suite", "model", "rows")),
        "rows",
        frozenset(("dataset", "model", "MASE", "WQL", "series_count", "seconds")),
    ),
    (
        frozenset(("model", "seed", "tasks")),
        "tasks",
        frozenset(("task", "skill", "seasonal_naive", "coverage", "crossing_rate")),
    ),
)
_LATENCIES = frozenset(("workload", "models", "threads", "device_name", "torch_version"))
#: First lines of tables that no other program writes. Of others, which stand in the format of a
#: benchmark, the first name is in quotes, see :func:`table_csv`.
_COLUMNS = (
    "model,reference,dataset,metric,ratio,low,high",
    "model,dataset,series,name,quantile_loss,absolute_label,scaled_error,scaled_steps",
    "matrix,part,kind,depth,role,head,full_rank,epsilon,rank",
    "profile,family,matrix,kind,d_model,matrices,epsilon,mean_rank,mean_share",
    "number,id,label,method,recovered,parameters,bytes_on_disk,",
)
_QUOTED = re.compile(
    r'"(dataset",model,(MASE,WQL\n|eval_metrics/)|benchmark",metric,value\n|model_name",)'
)
_HTML = re.compile(
    r'(?i)<!doctype html>\s.*^<meta name="generator" content="tscompress ', re.M | re.S
)
#: The keys that every line of a log has, the first three in this order.
_LINE = frozenset(("step", "total_steps", "eta_seconds", "series_per_second", "learning_rate"))
_RANKS_LINE = frozenset(("step", "name", "kind", "depth", "role", "sigma_1", "stable_rank"))
_CUT_LINE = re.compile(r'\{"step": \d+, "total_steps": (null|\d+), "(seconds|loss)": [^{}\n]*')
_MARK = "<!-- written by tscompress: "


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
        if not stat.S_ISREG(found.st_mode):
            return False
        if not found.st_size:
            return True
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        kinds = _KINDS if found.st_size <= _LARGEST_TEXT else _KINDS_OF_ANY_SIZE
        return _is_of_training(path) or any(of_kind(path, head) for of_kind in kinds)
    except (OSError, ValueError, RecursionError):
        return False


def _is_of_training(path: Path) -> bool:
    """Whether it is the state of a training whose log lies beside, told by its place alone.

    A training that was killed leaves half of a state, in which nothing tells whose it is, and that
    perhaps before the first line of its log.
    """
    unfinished = is_unfinished_state(path)
    if path.name != TRAINING_STATE and not unfinished:
        return False
    if path.parent.name != TRAINING_DIRECTORY:
        return False
    log = path.parent.parent / TRAINING_LOG
    logged = is_own_file(log) and log.stat().st_size > 0
    return logged or (unfinished and is_own_file(log))


def is_unfinished_state(path: Path) -> bool:
    """Whether a name is that of the state of a training that is being written."""
    return path.name == UNFINISHED_STATE or _UNFINISHED.fullmatch(path.name) is not None


def _is_figure(path: Path, head: bytes) -> bool:
    return head.startswith(b"\x89PNG") and b"tEXtSoftware\0tscompress " in head


def _is_training_state(path: Path, head: bytes) -> bool:
    """Weights and moments of a training that can be resumed."""
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or length > _LARGEST_HEADER:
        return False
    with path.open("rb") as stream:
        stream.seek(8)
        metadata = json.loads(stream.read(length)).get("__metadata__") or {}
    recovery = {"step", "config", "models", "seconds", "held_out", "pending"}
    return metadata.keys() >= recovery or metadata.keys() >= {"step", "recipe", "parts"}


def _is_text(path: Path, head: bytes) -> bool:
    """A table, a log, a page, a card."""
    start = head.decode(errors="ignore")
    if start.startswith(_COLUMNS) or _QUOTED.match(start) or _HTML.match(start):
        return True
    if start.startswith('{"step": '):
        return _is_log(start)
    return start[:1] in ("#", "-", "<") and is_marked(path.read_text(encoding="utf-8"))


def _is_log(start: str) -> bool:
    """Whether a training wrote these lines, of which the first may be cut off."""
    first, newline, _ = start.partition("\n")
    if not newline and _CUT_LINE.fullmatch(first):
        return True
    keys = set(json.loads(first))
    return keys >= _LINE or keys >= _RANKS_LINE


def _is_json(path: Path, head: bytes) -> bool:
    if head.lstrip()[:1] not in (b"{", b"["):
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        content = content.get("result", content)
    if isinstance(content, list):
        content = content[0] if content else {}
    return isinstance(content, dict) and _is_object(content)


def _is_object(content: dict[str, Any]) -> bool:
    if any(keys <= content.keys() for keys in _KEYS) or _is_record(content):
        return True
    for keys, name, first in _LISTS:
        if keys <= content.keys() and isinstance(content[name], list) and content[name]:
            entry = content[name][0]
            return isinstance(entry, dict) and first <= entry.keys()
    bench = content.get("bench")
    return (
        content.keys() == {"key", "bench"}
        and isinstance(bench, dict)
        and bench.keys() >= _LATENCIES
    )


def _is_record(content: Mapping[str, Any]) -> bool:
    """What is written down of a checkpoint."""
    return content.keys() >= _RECORD and all(
        isinstance(content[name], dict) for name in ("source", "sha256")
    )


#: Told by their heads: a state of 90 million parameters has more than a gigabyte.
_KINDS_OF_ANY_SIZE: tuple[Callable[[Path, bytes], bool], ...] = (_is_figure, _is_training_state)
_KINDS = (*_KINDS_OF_ANY_SIZE, _is_text, _is_json)


def _recorded_hashes(paths: list[Path]) -> Mapping[str, str] | None:
    """Name to SHA-256, of the record that lies among the files of a checkpoint; None without."""
    for path in paths:
        if path.suffix == ".json" and _is_regular(path):
            content = _object_in(path)
            if _is_record(content):
                return dict(content["sha256"])
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


def table_csv(frame: pd.DataFrame) -> str:
    """A table as CSV, of which the first column's name is in quotes.

    Every program reads it as it would without them, and no other writes them: so that tables in the
    format of a benchmark are told from those of others.
    """
    text: str = frame.to_csv(index=False, lineterminator="\n")
    first = str(frame.columns[0]) if len(frame.columns) else ""
    return f'"{first}"{text.removeprefix(first)}' if first.isidentifier() else text


def is_marked(text: str) -> bool:
    """Whether a text is to the letter what :func:`mark_of` was of."""
    found = re.search(rf"^({re.escape(_MARK)}\w+ -->)\n", text, flags=re.MULTILINE)
    return found is not None and mark_of(text.replace(found[0], "", 1)) == found[1]
