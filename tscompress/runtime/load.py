"""Open a directory of ``tscompress export``."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.runtime.chronos2 import Chronos2Forecaster
from tscompress.runtime.chronos_bolt import ChronosBoltForecaster
from tscompress.runtime.chronos_t5 import ChronosT5Forecaster
from tscompress.runtime.forecaster import Forecaster
from tscompress.runtime.record import RECORD_FILE, read_record, readable
from tscompress.runtime.univariate import UnivariateForecaster

_FAMILIES: dict[str, type[Forecaster]] = {
    "chronos-t5": ChronosT5Forecaster,
    "chronos-bolt": ChronosBoltForecaster,
    "chronos-2": Chronos2Forecaster,
}
_UNIVARIATE: dict[str, type[Forecaster]] = {"chronos-2": UnivariateForecaster}


def _reduced(forecaster: Forecaster) -> tuple[Callable[[str], Forecaster], tuple[str]]:
    """Pickled as its directory, which is opened again."""
    return partial(load, threads=forecaster.given_threads), (str(forecaster.directory),)


for _kind in (*_FAMILIES.values(), *_UNIVARIATE.values()):
    copyreg.pickle(_kind, _reduced)


def load(directory: str | Path, *, threads: int | None = None) -> Forecaster:
    """An exported model, checked against its record.

    Parameters
    ----------
    directory
        Output of ``tscompress export``.
    threads
        Of onnxruntime; None: one for each core that this process may use, in a container at most
        its quota, rounded up.

    Raises
    ------
    UsageError
        onnxruntime is not installed, or an argument is of a wrong type.
    ModelNotFoundError
        There is no exported model.
    UnsupportedModelError
        It is of another version of the format, or of an unknown family.
    CorruptCheckpointError
        It was changed since it was exported, or its graph reads other files or lacks an input.
    """
    if not isinstance(directory, str | os.PathLike):
        raise UsageError(f"directory is a {type(directory).__name__}; give a path.")
    if not str(directory):
        raise UsageError("directory is empty; give a path, or . for the working directory.")
    place = Path(os.path.expanduser(directory))  # noqa: PTH111  (~nobody stays as it is)
    record = read_record(place)
    found = (_UNIVARIATE if record.univariate else _FAMILIES).get(record.family)
    if found is None:
        raise UnsupportedModelError(
            f"{str(place)!r} is an exported {record.family[:40]!r} model; known families: "
            f"{', '.join(_FAMILIES)}."
        )
    with readable(place / RECORD_FILE):
        found.check_settings(record)
    return found(place.absolute(), record, threads)
