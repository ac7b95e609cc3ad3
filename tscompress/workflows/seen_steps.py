"""Whether a compressed model was fitted to the steps that it is scored on."""

from __future__ import annotations

from pathlib import Path

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import OWN_SOURCES
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.fingerprints import label_fingerprints
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.read import read_file
from tscompress.data.streaming import iterate_series
from tscompress.errors import DataError, LeakError
from tscompress.io.files import user_path
from tscompress.workflows.recipe import Recipe, load_recipe
from tscompress.workflows.save import RECIPE_FILE, CompressedModel


def check_unseen(loaded: LoadedModel, dataset: EvaluationDataset, path: Path) -> str | None:
    """Refuse a model that was calibrated, or recovered, on steps that a file is scored on.

    The series of the recipe beside its weights are read again; they may hold the history before the
    scored steps.

    Returns
    -------
    str or None
        A note, where that cannot be read any more.

    Raises
    ------
    LeakError
    """
    recipe = recipe_of_model(loaded)
    if recipe is None:
        return None
    for source, form in _sources(recipe):
        if not user_path(source).exists():
            return (
                f"{source!r}, to which {loaded.name} was fitted, is not there: whether it holds "
                "the steps that are scored is not known"
            )
        seen = _seen(source, form, dataset, path)
        if seen:
            needed = dataset.horizon * dataset.windows
            raise LeakError(
                f"{loaded.name!r} was fitted to steps of {source!r} that are scored, of "
                f"{seen:,} series; scores would mean nothing. Compress it with --hold-out "
                f"{needed}, or score other series."
            )
    return None


def recipe_of_model(loaded: LoadedModel) -> Recipe | None:
    """Of a model compressed in memory its own recipe, of others the one beside their weights."""
    if isinstance(loaded, CompressedModel):
        return loaded.recipe
    path = None if loaded.directory is None else loaded.directory / RECIPE_FILE
    return None if path is None or not path.is_file() else load_recipe(path)


def _sources(recipe: Recipe) -> list[tuple[str, GivenSeries]]:
    """Files and directories of series that a model was fitted to, and how they are written."""
    found = []
    if recipe.method != "svd" and recipe.calibration.source not in OWN_SOURCES:
        found.append((recipe.calibration.source, recipe.series))
    if recipe.recover is not None:
        form = recipe.recover.series_format or recipe.series
        found += [(source, form) for source in recipe.recover.series]
    return found


def _seen(source: str, form: GivenSeries, dataset: EvaluationDataset, path: Path) -> int:
    """How many series of a source hold steps that are scored."""
    file = user_path(source)
    if file.resolve() == path.resolve() and form.hold_out < dataset.horizon * dataset.windows:
        return len(read_file(path, form).series)  # series too smooth to be recognised among them
    known = label_fingerprints(dataset)
    try:
        return sum(known.recognise(values) for values in iterate_series(source, form))
    except DataError:  # it has changed since
        return 0
