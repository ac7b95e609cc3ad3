"""The series that a compressed model was fitted to, as they are recorded beside its weights.

A recipe names those that it was written with; ``provenance.json`` also those that came beside it,
with ``--series``, a plan or from a caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tscompress.checkpoints.names import PROVENANCE_FILE
from tscompress.compression.calibration import OWN_SOURCES
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.tables import naming_file
from tscompress.data.series import Given, LabelledSeries, read_series
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DataError, TscompressError
from tscompress.io.files import user_path
from tscompress.io.hashing import known_sha256_of
from tscompress.io.strict import Strict
from tscompress.io.untrusted import UnreadableFileError, read_json
from tscompress.runtime.record import RECORD_FILE, is_exported
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_state import RecoveryResult
from tscompress.workflows.recipe import Recipe

#: Key of ``provenance.json``.
FITTED_TO = "fitted_to"


class FittedSource(Strict):
    """A file, directory or Hub dataset of series, and how it is read.

    Attributes
    ----------
    sha256
        Of a file when it was read, or just before or after, in records always: it may have another
        name where the model is scored, or other content by then.
    """

    source: str
    series: GivenSeries = GivenSeries()
    sha256: str | None = None


_RECORD = TypeAdapter(tuple[FittedSource, ...])


def given_source(series: Given, form: GivenSeries) -> FittedSource | None:
    """Where a caller's series are from; None where that is not known, or there are none.

    Parameters
    ----------
    form
        How a path is read; what was read already remembers its own.
    """
    if isinstance(series, str | Path):
        return FittedSource(source=str(series), series=form)
    if isinstance(series, LabelledSeries) and series.source is not None:
        return FittedSource(source=series.source, series=series.form, sha256=series.sha256)
    return None


def calibration_sources(
    recipe: Recipe, read: Sequence[FloatArray] | None = None
) -> list[FittedSource]:
    """What a recipe calibrates on, where that is not its own.

    Parameters
    ----------
    read
        What was read of it; it remembers the hash of its file.
    """
    source = recipe.calibration.source
    if recipe.method == "svd" or source in OWN_SOURCES:
        return []
    sha256 = read.sha256 if isinstance(read, LabelledSeries) else None
    return [FittedSource(source=source, series=recipe.series, sha256=sha256)]


def recovery_sources(
    config: RecoveryConfig | None, form: GivenSeries, series: Given = None
) -> list[FittedSource]:
    """What a recovery trains on.

    Parameters
    ----------
    form
        That of the recipe.
    series
        What a caller gave in addition to the series of ``config``.
    """
    if config is None:
        return []
    read_as = config.series_format or form
    found = [FittedSource(source=source, series=read_as) for source in config.series]
    given = given_source(series, read_as)
    return found if given is None else [*found, given]


def recorded_of(
    config: RecoveryConfig | None, form: GivenSeries, series: Given = None
) -> tuple[FittedSource, ...]:
    """The same with the hashes of what their files hold now.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    return tuple(map(with_hash, recovery_sources(config, form, series)))


def recorded_again(
    config: RecoveryConfig | None, form: GivenSeries, series: Given = None
) -> tuple[FittedSource, ...]:
    """The same after a training, whose result is not lost where a file has become unreadable."""
    try:
        return recorded_of(config, form, series)
    except DataError:
        return ()


def with_source(recipe: Recipe, series: Given) -> Recipe:
    """The recipe that calibrates, and recovers, on the file which was given beside ``recipe``."""
    given = given_source(series, recipe.series)
    if given is None:
        return recipe
    calibration = recipe.calibration.model_copy(update={"source": given.source})
    recover = recipe.recover and trained_on(recipe.recover, recipe.series, series)
    update = {"calibration": calibration, "series": given.series, "recover": recover}
    return recipe.model_copy(update=update)


def trained_on(config: RecoveryConfig, form: GivenSeries, series: Given) -> RecoveryConfig:
    """A recovery's settings as a recipe replays them, whose own format of series is another.

    Parameters
    ----------
    form
        How its series were read, unless it says.
    series
        What a caller gave beside them. Of a file that was read in another way than these it stays
        out: a recipe has one format for all.
    """
    read_as = config.series_format or form
    given = given_source(series, read_as)
    if given is not None and not _is_among(given.source, config.series):
        if not config.series:
            read_as = given.series
        if read_as == given.series:
            config = config.model_copy(update={"series": (*config.series, given.source)})
    if not config.series:
        return config
    return config.model_copy(update={"series_format": read_as})


def names(config: RecoveryConfig, form: GivenSeries, series: Given) -> bool:
    """Whether a recovery's settings name the series that a caller gave beside them.

    What was read of a file before is named where the file has it still. ``form``: how the series
    of the settings are read, unless they say.
    """
    if series is None:
        return True
    read_as = config.series_format or form
    given = given_source(series, read_as)
    if given is None or given.series != read_as or not _is_among(given.source, config.series):
        return False
    return isinstance(series, str | Path) or _is_in_file(series, given)


def replayable(result: RecoveryResult, form: GivenSeries, series: Given) -> RecoveryResult:
    """A result that knows how a recipe replays it, and whether that leaves out what was given."""
    replayed = trained_on(result.config, form, series)
    return replace(result, replayed=replayed, beside_config=not names(replayed, form, series))


def _is_among(source: str, sources: Iterable[str]) -> bool:
    """Whether it is one of them, however a path is spelt."""
    return user_path(source).resolve() in {user_path(one).resolve() for one in sources}


def _is_in_file(series: Sequence[FloatArray], given: FittedSource) -> bool:
    """Whether a file holds these very values."""
    try:
        held = read_series(given.source, given.series)
        return len(held) == len(series) and all(
            np.array_equal(one, other, equal_nan=True)
            for one, other in zip(held, series, strict=True)
        )
    except (TscompressError, TypeError, ValueError):
        return False


def unless_named(config: RecoveryConfig | None, form: GivenSeries, series: Given) -> Given:
    """What a caller gave; None where the settings name it, so that it is not read twice."""
    return None if config is not None and names(config, form, series) else series


def recorded_sources(directory: Path) -> tuple[FittedSource, ...]:
    """What the record of a checkpoint, or of an exported one, names of the series it was fitted to.

    Nothing where it is not there, or damaged.
    """
    name = RECORD_FILE if is_exported(directory) else PROVENANCE_FILE
    try:
        content = read_json(directory / name)
        return _RECORD.validate_python(content.get(FITTED_TO, ()))
    except (FileNotFoundError, UnreadableFileError, AttributeError, ValidationError):
        return ()


def as_record(sources: Iterable[FittedSource]) -> list[dict[str, Any]]:
    """Plain data for ``provenance.json``, each source once, and files with their hashes."""
    named = each_once(map(with_hash, sources))
    return [one.model_dump(mode="json", exclude_defaults=True) for one in named]


def each_once(sources: Iterable[FittedSource]) -> list[FittedSource]:
    """Without repetitions; of a source whose content is known, without the mention of it alone.

    The same file may have had other content when it was read again.
    """
    once = list(dict.fromkeys(sources))
    known = {(one.source, one.series) for one in once if one.sha256 is not None}
    return [one for one in once if one.sha256 or (one.source, one.series) not in known]


def with_hash(one: FittedSource) -> FittedSource:
    """The same with the hash of what the file holds now, unless it has one, or is no file."""
    path = user_path(one.source)
    with naming_file(path):
        if one.sha256 is not None or not path.is_file():
            return one
        return one.model_copy(update={"sha256": known_sha256_of(path)})
