"""Whether a compressed model was fitted to the steps that it is scored on."""

from __future__ import annotations

from pathlib import Path

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.fingerprints import Fingerprints, label_fingerprints
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.read import read_file
from tscompress.data.reading.tables import kind_of
from tscompress.data.streaming import iterate_series
from tscompress.errors import DataError, LeakError
from tscompress.io.files import user_path
from tscompress.io.hashing import sha256_of
from tscompress.io.network import is_repo_id
from tscompress.workflows.fitted_to import (
    FittedSource,
    calibration_sources,
    each_once,
    recorded_sources,
    recovery_sources,
)
from tscompress.workflows.recipe import Recipe, load_recipe
from tscompress.workflows.save import RECIPE_FILE, CompressedModel


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
    recipe: Recipe | None = None
    found: list[FittedSource] = []
    if isinstance(loaded, CompressedModel):
        recipe, found = loaded.recipe, [*loaded.fitted_to]
    elif loaded.source:
        # A pipeline has no directory of its own, but remembers the path that it was loaded from.
        directory = loaded.directory or user_path(loaded.source)
        path = directory / RECIPE_FILE
        recipe = load_recipe(path) if path.is_file() else None
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
