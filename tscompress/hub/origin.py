"""The origin of a checkpoint, from its records: model, recipe, plan and provenance.

Everything comes from files: plan, recipe, provenance and the header of the weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tscompress.checkpoints.format import is_factored_config
from tscompress.checkpoints.integrity import read_config, stored_dtype, weight_files
from tscompress.checkpoints.locate import bare_name, is_local_path, is_reference, model_name
from tscompress.checkpoints.names import PLAN_FILE, PROVENANCE_FILE
from tscompress.errors import CorruptCheckpointError, DataError, UsageError, VerificationError
from tscompress.io.files import user_path
from tscompress.io.network import is_commit, is_repo_id
from tscompress.io.untrusted import UnreadableFileError, read_json, single_line
from tscompress.plan.plan import Plan
from tscompress.training.pretrain_recipe import PRETRAIN_FILE, PretrainRecipe
from tscompress.training.recovery_state import BESIDE_CONFIG
from tscompress.workflows.recipe import Recipe, load_pretrain_recipe, load_recipe
from tscompress.workflows.save import EARLIER, GIVEN_SERIES, ORIGINAL, RECIPE_FILE

#: Keys of recipes and of provenance.json whose values may be local paths.
_PATH_KEYS = (
    "model", "output", "source", "series", "suite", "root", "teacher", "embedding_from",
    "start_from", "tasks_file",
)  # fmt: skip


@dataclass(frozen=True)
class Original:
    """The original of a compressed checkpoint, or the start of a pretrained one.

    Attributes
    ----------
    source
        The argument of ``compress``, or ``start_from``: a Hub id, ``reference/...`` or a directory.
    hub_id, revision
        The Hub id and the commit; both None if no record says that it came from the Hub.
    """

    source: str
    hub_id: str | None
    revision: str | None

    @property
    def is_local(self) -> bool:
        """Whether it is only on this machine: neither on the Hub nor shipped with tscompress."""
        return self.hub_id is None and not is_reference(self.source)

    @property
    def shown(self) -> str:
        """The source as in a card; of a local path only the name."""
        return bare_name(self.source) if self.is_local else self.source


@dataclass(frozen=True)
class CheckpointRecord:
    """The records of a checkpoint that was compressed or pretrained.

    Attributes
    ----------
    plan
        None for a model pretrained with the same sizes everywhere.
    pretraining
        The recipe of a pretrained model; it has no ``base``, but perhaps a ``start``.
    """

    directory: Path
    config: Mapping[str, Any]
    plan: Plan | None
    recipe: Recipe | None
    provenance: Mapping[str, Any]
    parameters: int
    bytes_on_disk: int
    dtype: str
    pretraining: PretrainRecipe | None = None

    @property
    def factored(self) -> bool:
        """Whether the checkpoint needs tscompress to load."""
        return is_factored_config(self.config)

    @property
    def family(self) -> str:
        """Name of the model family."""
        return str(self.provenance["source"]["family"])

    def names(self, repo_id: str) -> Collection[str]:
        """Its possible names in measurements: of the directory, and of the repository."""
        return {self.directory.resolve().name, repo_id, repo_id.rpartition("/")[2]}

    @property
    def local_paths(self) -> list[str]:
        """Local paths in recipe and provenance."""
        recipes = [recipe.model_dump() for recipe in (self.recipe, self.pretraining) if recipe]
        found = set(_local_paths([self.provenance, *recipes]))
        above = self.base or self.start
        if above is not None and above.shown != above.source:
            found.add(above.source)
        return sorted(found)

    @property
    def source(self) -> Mapping[str, Any]:
        """The record of the original: ``model``, ``revision`` and perhaps ``sha256``."""
        found = self.provenance.get(ORIGINAL)
        if isinstance(found, Mapping) and {"model", "revision"} <= found.keys():
            return found
        source: Mapping[str, Any] = self.provenance["source"]
        return source

    @property
    def calibrated_on_given(self) -> bool:
        """Whether its calibration series were given in memory, so that no recipe names them."""
        return bool(self._recorded("calibration").get("source") == GIVEN_SERIES)

    @property
    def recovered_beside_recipe(self) -> bool:
        """Whether its recovery also trained on series that the recipe does not name."""
        return bool(self._recorded("recovery").get(BESIDE_CONFIG))

    def _recorded(self, key: str) -> Mapping[str, Any]:
        found = self.provenance.get(key)
        return found if isinstance(found, Mapping) else {}

    @property
    def recoveries(self) -> int:
        """How many times it was recovered."""
        earlier = self.provenance.get(EARLIER)
        before = len(earlier) if isinstance(earlier, list) else 0
        return before + bool(self.provenance.get("recovery"))

    @property
    def base(self) -> Original | None:
        """The original; a recovery records its student as the source, the original beside it."""
        if self.pretraining is not None:
            return None
        source = self.source
        found = (source["model"], source["revision"])
        if self.recipe is not None:
            found = (self.recipe.model, self.recipe.revision)
        return _original(str(found[0]), found[1])

    def is_original(self, name: str | None) -> bool:
        """Whether measurements that name a model mean the original; None: they name none."""
        base = self.base
        if base is None:
            return False
        if name is None:
            return True
        name = name.removesuffix(" (2)")
        whole = base.source if is_reference(base.source) else base.hub_id
        if whole is not None and "/" in name and not is_local_path(name):
            return name == whole  # the model of another owner is another
        known = {"original", bare_name(base.source), bare_name(model_name(base.source))}
        return bare_name(name) in known

    @property
    def start(self) -> Original | None:
        """The model that a pretrained one was grown from; None: it began from scratch."""
        name = None if self.pretraining is None else self.pretraining.start_from
        if name is None:
            return None
        trained = self.provenance.get("pretraining")
        if not isinstance(trained, Mapping) or trained.get("start_from") != name:
            return _original(name, None)
        return _original(name, trained.get("start_revision"))


def _original(source: str, revision: object) -> Original:
    """Of the Hub only with a commit: a name alone may be that of a directory that is gone."""
    if not is_commit(revision) or not is_repo_id(source):
        return Original(source, None, None)
    return Original(source, source, str(revision))


def read_checkpoint_record(directory: str | Path) -> CheckpointRecord:
    """Read the records that :func:`tscompress.save` wrote, and the header of the weights.

    Raises
    ------
    UsageError
        tscompress did not write this directory.
    CorruptCheckpointError, PlanError, RecipeError, DataError
        The weights, the plan, a recipe or the provenance are damaged.
    """
    directory = user_path(directory)
    _check_is_written(directory)
    plan, pretraining = directory / PLAN_FILE, directory / PRETRAIN_FILE
    provenance = read_record(directory / PROVENANCE_FILE)
    source = provenance.get("source")
    if not isinstance(source, dict) or not {"model", "revision", "family"} <= source.keys():
        raise CorruptCheckpointError(f"{PROVENANCE_FILE} of {str(directory)!r} has no source.")
    recipe = load_recipe(directory / RECIPE_FILE) if (directory / RECIPE_FILE).is_file() else None
    if recipe is not None:
        _check_same_original(recipe, provenance, directory)
    weights = weight_files(directory)
    try:
        parameters = sum(map(_stored_parameters, weights))
    except Exception as error:  # safetensors raises a class of its own, and OSErrors
        raise CorruptCheckpointError(f"{str(directory)!r}: {error}.") from None
    return CheckpointRecord(
        directory,
        read_config(directory, str(directory)),
        Plan.load(plan) if plan.is_file() else None,
        recipe,
        provenance,
        parameters,
        sum(path.stat().st_size for path in weights),
        str(stored_dtype(directory)).removeprefix("torch."),
        load_pretrain_recipe(pretraining) if pretraining.is_file() else None,
    )


def _check_is_written(directory: Path) -> None:
    """Refuse a directory that tscompress did not write; the message names a checkpoint below it.

    Raises
    ------
    UsageError
    """
    shown = repr(str(directory))
    # Path raises for names that are too long.
    if os.path.isfile(directory):  # noqa: PTH113
        raise UsageError(f"{shown} is a file; give the directory that it is in.")
    if not os.path.isdir(directory):  # noqa: PTH112
        if is_reference(str(directory)):
            raise UsageError(
                f"{shown} comes with tscompress; give a directory that compress, recover or run "
                "wrote, or the model of pretrain."
            )
        raise UsageError(f"there is no directory {shown}.")
    records = (PLAN_FILE, PRETRAIN_FILE)
    if (directory / PROVENANCE_FILE).is_file() and any((directory / n).is_file() for n in records):
        return
    below = sorted(path.parent for path in directory.glob(f"*/{PROVENANCE_FILE}"))
    if below and not (directory / "config.json").is_file():
        rest = f" (or another of {len(below)} in it)" if len(below) > 1 else ""
        raise UsageError(f"{shown} is no checkpoint; give {str(below[0])!r}{rest}.")
    raise UsageError(
        f"{shown} was not written by tscompress: it lacks {PROVENANCE_FILE} or {PLAN_FILE}; give "
        "the output of compress, recover or run, or the model of pretrain."
    )


def _check_same_original(recipe: Recipe, provenance: Mapping[str, Any], directory: Path) -> None:
    """Check that recipe and provenance name the same original.

    The provenance of a recovered model names the student instead, so it is not compared.

    Raises
    ------
    VerificationError
    """
    source = provenance["source"]
    recorded = source["model"], source["revision"]
    if provenance.get("recovery") is None and recorded != (recipe.model, recipe.revision):
        raise VerificationError(
            f"{RECIPE_FILE} in {str(directory)!r} names {single_line(recipe.model)!r} as the "
            f"original, {PROVENANCE_FILE} {single_line(recorded[0])!r}, or another revision; "
            "restore the files, or compress again."
        )


def _local_paths(record: Any, key: str = "") -> Iterator[str]:
    """Local paths in plain data, at any depth."""
    if isinstance(record, Mapping):
        for name, value in record.items():
            yield from _local_paths(value, name)
    elif isinstance(record, list | tuple):
        for value in record:
            yield from _local_paths(value, key)
    elif key in _PATH_KEYS and isinstance(record, str) and is_local_path(record):
        yield record


def without_paths(record: Any, key: str = "") -> Any:
    """Plain data with local paths replaced by their last parts."""
    if isinstance(record, Mapping):
        return {name: without_paths(value, name) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [without_paths(value, key) for value in record]
    local = key in _PATH_KEYS and isinstance(record, str) and is_local_path(record)
    return bare_name(record) if local else record


def _stored_parameters(path: Path) -> int:
    with safe_open(path, framework="pt") as reader:
        shapes = [reader.get_slice(key).get_shape() for key in reader.keys()]  # noqa: SIM118
    return sum(math.prod(shape) for shape in shapes)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises
    ------
    UsageError
        There is no such file.
    DataError
        It is not a JSON object.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {str(path)!r}.") from None
    except UnreadableFileError as error:
        raise DataError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{str(path)!r} is not a JSON object.")
    return content
