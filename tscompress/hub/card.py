"""The model card of a compressed checkpoint: ``README.md``, with metadata that the Hub reads.

Everything in it comes from files: plan, recipe, provenance and the header of the weights; scores
and latencies where they were measured. Unknown facts are omitted or marked as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import (
    EvalResult,
    ModelCard,
    ModelCardData,
    hf_hub_download,
    try_to_load_from_cache,
)

from tscompress.checkpoints.integrity import weight_files
from tscompress.checkpoints.locate import (
    bare_name,
    is_local_path,
    is_reference,
    reference_directory,
)
from tscompress.errors import (
    CorruptCheckpointError,
    HubError,
    OutputExistsError,
)
from tscompress.evaluation.results import METRICS
from tscompress.families.registry import adapter_of
from tscompress.hub.card_scores import (
    Bench,
    CardScores,
    bench_of_run,
    check_bench_is_of,
    check_scores_are_of,
    parse_bench,
    read_bench,
    read_scores,
    scores_of_run,
)
from tscompress.hub.origin import (
    CheckpointRecord,
    read_checkpoint_record,
    without_paths,
)
from tscompress.io.arguments import check_type
from tscompress.io.files import user_path, write_text_atomically
from tscompress.io.hashing import sha256_of
from tscompress.io.network import bounded_requests, network_errors
from tscompress.io.own_outputs import is_marked, mark_of
from tscompress.io.text import plain
from tscompress.io.untrusted import UnreadableFileError, regular_file, single_line

CARD_FILE = "README.md"
#: Where exported files are in a repository.
ONNX_FOLDER = "onnx"
TASK = "time-series-forecasting"
_LICENCE_KEYS = ("license", "license_name", "license_link")
_MAX_CARD_BYTES = 2**20
ScoresOrFile = CardScores | str | Path | None
BenchOrFile = Mapping[str, Any] | str | Path | None


@dataclass(frozen=True)
class OnnxFacts:
    """Facts for a card about an exported model beside the checkpoint.

    Attributes
    ----------
    precision
        Such as ``float32``.
    graph_bytes
        Size of the graphs.
    difference
        Largest difference of a forecast from the checkpoint's, as ``tscompress export`` recorded
        it; None: unknown.
    """

    precision: str
    graph_bytes: int
    difference: float | None


def make_card(
    directory: str | Path,
    repo_id: str | None = None,
    *,
    scores: ScoresOrFile = None,
    bench: BenchOrFile = None,
    licence: Mapping[str, str] | None = None,
) -> ModelCard:
    """The card of a checkpoint that :func:`tscompress.save` wrote.

    Parameters
    ----------
    repo_id
        Where it will be; the directory's name by default.
    scores, bench
        Measurements, or files of ``evaluate`` and ``bench --json``; by default those of
        ``tscompress run`` above the directory.
    licence
        ``license`` and perhaps ``license_name`` and ``license_link``; by default the original's,
        where its own card can be read without a network.

    Raises
    ------
    UsageError
        tscompress did not write this directory, or the measurements are of another checkpoint.
    CorruptCheckpointError, DataError, VerificationError
        A file in or above it is damaged or was changed.
    """
    return card_of(
        read_checkpoint_record(directory), repo_id, scores=scores, bench=bench, licence=licence
    )


def measured_of(
    checkpoint: CheckpointRecord, scores: ScoresOrFile, bench: BenchOrFile
) -> tuple[CardScores | None, Mapping[str, Any] | None]:
    """The given measurements, else those that ``tscompress run`` wrote above the directory.

    Raises
    ------
    UsageError
        They are of another type.
    DataError
        A file is not what ``evaluate`` or ``bench`` writes.
    """
    paths, nothing = (str, Path), type(None)
    check_type("scores", scores, (CardScores, *paths, nothing), "scores.json, or a CardScores")
    check_type("bench", bench, (Mapping, *paths, nothing), "the JSON of bench, or what it holds")
    scores = read_scores(scores) if isinstance(scores, paths) else scores
    bench = read_bench(bench) if isinstance(bench, paths) else bench
    if checkpoint.plan is not None:
        scores = scores if scores is not None else scores_of_run(checkpoint)
        bench = bench if bench is not None else bench_of_run(checkpoint)
    return scores, bench


def card_of(
    checkpoint: CheckpointRecord,
    repo_id: str | None = None,
    *,
    scores: ScoresOrFile = None,
    bench: BenchOrFile = None,
    licence: Mapping[str, str] | None = None,
    inherited: bool = False,
    onnx: OnnxFacts | None = None,
    revision: str | None = None,
) -> ModelCard:
    """:func:`make_card` of a checkpoint whose records were read, and of its exported files.

    Parameters
    ----------
    inherited
        Whether ``licence`` is that of the original.
    revision
        The branch of the repository that it is on; None: the main one.
    """
    scores, bench = measured_of(checkpoint, scores, bench)
    if licence is None:
        licence, inherited = licence_of(checkpoint), True
    name = repo_id or checkpoint.directory.resolve().name
    costs = None if bench is None else parse_bench(bench, "the bench")
    if scores is not None:
        check_scores_are_of(checkpoint, name, scores)
    if costs is not None:
        check_bench_is_of(checkpoint, costs)
    base, start = checkpoint.base, checkpoint.start
    above = base or start
    how = "pretraining" if base is None or checkpoint.plan is None else checkpoint.plan.method
    data = ModelCardData(
        base_model=None if above is None else above.hub_id,
        library_name="tscompress" if checkpoint.factored else "chronos-forecasting",
        pipeline_tag=TASK,
        tags=["time-series", "forecasting", checkpoint.family,
              *([] if base is None else ["compression"]), "tscompress", how],
        model_name=name.rpartition("/")[2] if scores is not None else None,
        eval_results=_eval_results(scores) if scores is not None else None,
        **licence,  # type: ignore[arg-type]
    )  # fmt: skip
    shown = {
        "checkpoint": checkpoint,
        "base": base,
        "start": start,
        "name": name,
        "scores": scores,
        "scores_against": _against(checkpoint, None if scores is None else scores.against),
        "bench": costs,
        "bench_against": _against(checkpoint, None if costs is None else costs.against),
        "costs": [] if costs is None else _cost_rows(costs),
        "onnx": onnx,
        "compared": "" if onnx is None else adapter_of(checkpoint.family).compared_values,
        "onnx_folder": ONNX_FOLDER,
        "licence": licence.get("license_name") or licence.get("license"),
        "inherited": inherited,
        "revision": revision,
        "recipe": _shown_recipe(checkpoint),
        "bare": lambda source: bare_name(source) if is_local_path(source) else source,
        "metrics": METRICS,
    }
    try:
        text = _template().render(shown)
    except (jinja2.UndefinedError, TypeError) as error:  # a field is missing
        raise CorruptCheckpointError(
            f"a record in or above {str(checkpoint.directory)!r} is incomplete: {error}."
        ) from None
    head = f"---\n{data.to_yaml()}\n---\n"
    return ModelCard(head + mark_of(head + text) + "\n" + text)


def write_card(
    directory: str | Path,
    repo_id: str | None = None,
    *,
    scores: ScoresOrFile = None,
    bench: BenchOrFile = None,
    licence: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write :func:`make_card` into the directory, but not over a card that a person wrote.

    Raises
    ------
    OutputExistsError
        ``README.md`` was written or changed by hand, and ``force`` is false.
    TscompressError
        As of :func:`make_card`.
    """
    path = user_path(directory) / CARD_FILE
    if card_by_hand(path, force=force) is not None:
        raise OutputExistsError(
            f"{str(path)!r} was written or changed by hand; keep it, or pass --force."
        )
    card = make_card(directory, repo_id, scores=scores, bench=bench, licence=licence)
    write_text_atomically(path, str(card))
    return path


def card_by_hand(path: Path, *, force: bool = False) -> str | None:
    """The text of a card that a person wrote or changed; None if a new card may replace the file.

    A new card may be written where there is no file, over an unchanged one of :func:`write_card`,
    and with ``force``.

    Raises
    ------
    OutputExistsError
        The file there is neither a card to push nor one to replace.
    """
    shown = repr(str(path))
    if path.is_dir() and not path.is_symlink():
        raise OutputExistsError(f"{shown} is a directory, where the card belongs; move it away.")
    if force or not os.path.lexists(path):
        return None
    if path.is_symlink():  # its target may be any file
        raise OutputExistsError(f"{shown} is a link; put the file itself there, or pass --force.")
    try:
        text = _read_card(path)
    except UnreadableFileError as error:
        raise OutputExistsError(
            f"{shown} cannot be read as a card: {error}; fix it, or pass --force."
        ) from None
    return None if is_marked(text) else text


def _read_card(path: Path) -> str:
    """UTF-8 text of a regular file, with its line ends unchanged."""
    regular_file(path, _MAX_CARD_BYTES)
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFileError(single_line(error)) from None


def _eval_results(scores: CardScores) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=TASK,
            task_name="Time series forecasting",
            dataset_type=row.dataset,
            dataset_name=row.dataset,
            dataset_args=None if row.series is None else {"series": row.series},
            metric_type=metric.lower(),
            metric_name=metric,
            metric_value=round(row.scores[metric], 6),
        )
        for row in scores.rows
        for metric in METRICS
    ]


@dataclass(frozen=True)
class _Against:
    """What measurements of this model are held against: the original, or another by its name."""

    is_original: bool
    sentence: str
    column: str


def _against(checkpoint: CheckpointRecord, name: str | None) -> _Against:
    if name is None or checkpoint.is_original(name):
        return _Against(True, "the original", "original")
    shown = bare_name(name) if is_local_path(name) else name
    cell = single_line(shown).replace("|", "\\|")
    return _Against(False, f"`{single_line(shown)}`", f"`{cell}`")


def _shown_recipe(checkpoint: CheckpointRecord) -> str | None:
    """The recipe as YAML, with only the names of local files and directories."""
    if checkpoint.pretraining is not None:
        start = checkpoint.start
        shown = {} if start is None else {"start_from": start.shown}
        return _yaml(without_paths(checkpoint.pretraining.model_dump(mode="json")) | shown)
    if checkpoint.recipe is None or checkpoint.base is None:
        return None
    content = without_paths(checkpoint.recipe.model_dump(mode="json"))
    return _yaml(
        content | {"model": checkpoint.base.shown, "output": bare_name(checkpoint.recipe.output)}
    )


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text


_COSTS = (
    ("latency_ms", "latency, median (ms)", 1.0),
    ("latency_p95_ms", "latency, p95 (ms)", 1.0),
    ("macs", "compute (GMAC)", 1e9),
    ("parameters", "parameters (M)", 1e6),
    ("kv_cache_bytes", "KV cache (MB)", 1e6),
    ("peak_memory_bytes", "peak memory (MB)", 1e6),
)


def _cost_rows(bench: Bench) -> list[dict[str, Any]]:
    """Costs of the first and the last model, and their ratio if there are two."""
    first, last = bench.models[0], bench.models[-1]
    rows = []
    for key, label, unit in _COSTS:
        ours = getattr(last, key)
        if not ours:
            continue
        original = getattr(first, key) if first is not last else None
        spread = last.latency_ratio_interval if key == "latency_ms" else None
        rows.append(
            {
                "label": label,
                "original": None if original is None else original / unit,
                "compressed": ours / unit,
                "ratio": None if original is None else last.ratios.get(key),
                "interval": None if original is None else spread,
            }
        )
    return rows


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["plain"] = plain
    text = files("tscompress").joinpath("hub/templates/card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


# --------------------------------------------------------------------------------------------------
# Licence
# --------------------------------------------------------------------------------------------------


def licence_of(checkpoint: CheckpointRecord, *, fetch: bool = False) -> dict[str, str]:
    """The licence in the card of the original, or of the start of a pretrained model.

    Keys of card metadata; empty if unknown. The card of a directory counts only if the weights
    there are still those that were compressed. The card of a Hub id comes from the cache, or with
    ``fetch`` from the Hub.
    """
    base = checkpoint.base or checkpoint.start
    path: Path | None = None
    if base is None:
        return {}
    if base.hub_id is not None:
        path = _hub_card(base.hub_id, base.revision, fetch=fetch)
    elif is_reference(base.source):
        path = reference_directory(base.source) / CARD_FILE
    elif (place := user_path(base.source)).is_dir():
        recorded = checkpoint.source.get("sha256") or {}
        present = {file.name: sha256_of(file) for file in weight_files(place)}
        path = place / CARD_FILE if present and present.items() <= recorded.items() else None
    if path is None:
        return {}
    try:
        card = ModelCard(_read_card(path), ignore_metadata_errors=True)
        metadata: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]
    except Exception:  # untrusted YAML: with any error in it the licence is unknown
        return {}
    found = {key: _one_text(metadata.get(key)) for key in _LICENCE_KEYS}
    return {key: text for key, text in found.items() if text}


def _one_text(value: Any) -> str | None:
    """A text, or the only one of a list, in one line; None of anything else."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return single_line(value) if isinstance(value, str) else None


def _hub_card(repo_id: str, revision: str | None, *, fetch: bool) -> Path | None:
    cached = try_to_load_from_cache(repo_id, CARD_FILE, revision=revision)
    if isinstance(cached, str) or not fetch:
        return Path(cached) if isinstance(cached, str) else None
    try:
        with bounded_requests(10.0):
            return Path(hf_hub_download(repo_id, CARD_FILE, revision=revision))
    except HubError:  # rate limit
        return None
    except network_errors():
        return None
