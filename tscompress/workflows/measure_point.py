"""One point of a sweep: compress, save, load again, evaluate, measure size and memory."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from tscompress.benchmark.process_memory import process_memory
from tscompress.benchmark.sizes import bytes_on_disk
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.checkpoints.locate import model_name
from tscompress.checkpoints.names import CONFIG_FILE, PLAN_FILE
from tscompress.errors import DataError
from tscompress.evaluation.results import EvaluationResult
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.files import write_text_atomically
from tscompress.io.strict import Strict
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.save import save
from tscompress.workflows.sweep_points import (
    Point,
    digest_of,
    identity_of,
    original_digest,
    suite_content,
)

POINTS_DIRECTORY, POINT_FILE = "points", "point.json"
#: Keys of a plan that say how sizes were chosen.
_NOT_OF_A_SHAPE = {"schedule", "calibrated_on"}
ORIGINAL = "original"


class Measured(Strict):
    """Measurements of a point, without latency.

    Attributes
    ----------
    id
        Hash of everything that it depends on, and the name of its directory.
    checkpoint
        Name of the directory of the checkpoint below it; None for the original.
    bytes_on_disk
        Of the weights.
    peak_memory_bytes
        Memory that loading and one forecast add to a process; None if not measured.
    fit_seconds
        Of compression and recovery.
    """

    id: str
    label: str
    method: str
    recovered: bool
    checkpoint: str | None
    parameters: int
    bytes_on_disk: int
    peak_memory_bytes: int | None
    fit_seconds: float
    scores: EvaluationResult


def measure_point(point: Point, identity: str, output: Path, device: str) -> Measured:
    """Measure a point and write the result to ``output/points/<id>``.

    ``point.json`` is written last: a point without it is incomplete.

    Raises
    ------
    TscompressError
        One of its subclasses; nothing of the point is left.
    """
    recipe = point.recipe
    directory = output / POINTS_DIRECTORY / identity
    name = f"{Path(model_name(recipe.model)).name}-{recipe.method}"
    try:
        started = time.perf_counter()
        loaded = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
        model_hash = original_digest(loaded)
        compressed = compress_loaded_(loaded, recipe)
        seconds = time.perf_counter() - started
        save(compressed, directory / name, force=True)
        again = load(directory / name, device=device, dtype=torch.float32)
        measured = _measured(again, point, identity, name, seconds)
        if point.identity(model_hash, _content_of(recipe)) != identity:
            raise DataError(
                "the model, its series or what is scored changed while the sweep ran; run it again."
            )
        _write(measured, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return measured


def _content_of(recipe: Recipe) -> dict[str, str]:
    """The present content of what a point is scored on."""
    assert recipe.scored_on is not None
    return suite_content(recipe.scored_on)


def _measured(
    loaded: LoadedModel, point: Point, identity: str, checkpoint: str | None, seconds: float
) -> Measured:
    recipe = point.recipe
    assert recipe.scored_on is not None
    assert loaded.directory is not None  # it was loaded from one
    memory = None
    if recipe.bench is not None and next(loaded.model.parameters()).device.type == "cpu":
        use = process_memory(loaded.directory, torch.float32, recipe.bench)
        memory = use.peak_bytes - use.before_load_bytes
    return Measured(
        id=identity,
        label=point.label,
        method=ORIGINAL if checkpoint is None else recipe.method,
        recovered=recipe.recover is not None,
        checkpoint=checkpoint,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        bytes_on_disk=bytes_on_disk(loaded.directory),
        peak_memory_bytes=memory,
        fit_seconds=seconds,
        scores=score(loaded.forecaster, point.label, recipe.scored_on, cache=ScoreCache()),
    )


def _write(measured: Measured, directory: Path) -> None:
    """With a hash of the content, so that a damaged figure is none."""
    content = measured.model_dump(mode="json")
    text = json.dumps({"sha256": digest_of(content), "result": content})
    write_text_atomically(directory / POINT_FILE, text + "\n")


def finished(output: Path, identity: str) -> Measured | None:
    """The result of :func:`measure_point`; None if it did not finish, or was changed since."""
    try:
        path = output / POINTS_DIRECTORY / identity / POINT_FILE
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["sha256"] != digest_of(stored["result"]):
            return None
        found = Measured.model_validate(stored["result"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found.id == identity else None


def measure_original(
    original: LoadedModel,
    any_point: Point,
    model_hash: str,
    scored_on: Mapping[str, str],
    output: Path,
) -> Measured:
    """The same measurements of the original."""
    recipe = any_point.recipe.model_copy(update={"recover": None})
    content = recipe.model_dump(mode="json", include={"evaluation", "bench"})
    identity = f"{ORIGINAL}-{identity_of(model_hash, content, scored_on)}"
    found = finished(output, identity)
    if found is None:
        found = _measured(original, Point(recipe, ORIGINAL), identity, None, 0.0)
        if _content_of(recipe) != scored_on:
            raise DataError("what is scored changed while points were scored; run the sweep again.")
        _write(found, output / POINTS_DIRECTORY / identity)
    return found


def checkpoint_of(output: Path, point: Measured) -> Path:
    """Directory of the checkpoint that a point kept."""
    assert point.checkpoint is not None
    return output / POINTS_DIRECTORY / point.id / point.checkpoint


def shape_name(output: Path, point: Measured) -> str:
    """A name of the checkpoint's shape: the same for checkpoints that differ only in weights."""
    directory = checkpoint_of(output, point)
    config, plan = (json.loads((directory / one).read_text()) for one in (CONFIG_FILE, PLAN_FILE))
    return digest_of([config, {key: plan[key] for key in plan.keys() - _NOT_OF_A_SHAPE}])
