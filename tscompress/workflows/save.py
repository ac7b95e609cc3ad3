"""Save a compressed model, and verify that it loads back bit-equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tscompress.checkpoints.factored_methods import name_place_
from tscompress.checkpoints.format import (
    MAX_SHARD_SIZE,
    write_factored,
    write_folded,
)
from tscompress.checkpoints.integrity import source_files
from tscompress.checkpoints.load import LoadedModel
from tscompress.checkpoints.names import GENERATION_FILE, PLAN_FILE, PROVENANCE_FILE
from tscompress.checkpoints.provenance import hashes, write_provenance
from tscompress.compression.verify import verify
from tscompress.data.seasonality import season_note
from tscompress.errors import PlanError
from tscompress.io.arguments import check_type
from tscompress.io.files import new_directory, user_path, write_text_atomically
from tscompress.io.memory import return_memory
from tscompress.io.own_outputs import RANKS_LOG
from tscompress.io.untrusted import UnreadableFileError, read_json
from tscompress.plan.plan import Plan
from tscompress.plotting import loss_figure, save_figure
from tscompress.training.rank_watch import ranks_text
from tscompress.training.recovery_state import RecoveryResult
from tscompress.workflows.fitted_to import FITTED_TO, FittedSource, as_record, recorded_sources
from tscompress.workflows.recipe import Recipe, load_recipe

RECIPE_FILE = "recipe.yaml"
#: Key of ``provenance.json``, of what was compressed before: its original, as in ``source``.
ORIGINAL = "original"
#: Of what was recovered more than once: the records of all recoveries but the last, in order.
EARLIER = "earlier_recoveries"
#: What a record has as the source of calibration series that were arrays: no recipe names these.
GIVEN_SERIES = "given series"
_ON_GIVEN_SERIES = (
    "# Calibrated on series given in memory; this recipe alone calibrates on others.\n",
    "# Recovered on more series than it names; this recipe alone recovers on others.\n",
)
RECOVERY_LOG_FILE, RECOVERY_FIGURE_FILE = "recovery.jsonl", "recovery.png"


@dataclass(repr=False)
class CompressedModel(LoadedModel):
    """A compressed model with the record of its compression.

    Attributes
    ----------
    recipe
        Repeats the compression; None of a plan made by hand.
    calibration
        Record of the calibration: its settings, and what its series were.
    recovery
        How the recovery went; None: there was none.
    fitted_to
        Sources of series that it was fitted to, of which ``evaluate`` scores no step.
    original
        Of a checkpoint that was compressed before: what its ``provenance.json`` says of its
        original. None: ``source`` is the original.
    earlier_recoveries
        The records of those that it had by then.
    """

    recipe: Recipe | None = None
    original: dict[str, Any] | None = None
    earlier_recoveries: tuple[dict[str, Any], ...] = ()
    calibration: dict[str, Any] = field(default_factory=dict)
    recovery: RecoveryResult | None = None
    fitted_to: tuple[FittedSource, ...] = ()

    def _facts(self) -> list[str]:
        facts = super()._facts()
        if self.plan is None:
            return facts
        lines = self.plan.summary().splitlines()[:1]
        return [*facts, *lines, *(["recovered"] if self.recovery is not None else [])]

    @property
    def note(self) -> str | None:
        """Caveats on the calibration series and on the recovery, a line each, if any."""
        record = self.calibration
        lacking = season_note(record.get("seasonal_share"), record.get("series", 0))
        notes = [lacking, self.recovery and self.recovery.note]
        return "\n".join(note for note in notes if note) or None


def save(
    compressed: CompressedModel,
    output: str | Path,
    *,
    force: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> Path:
    """Write a checkpoint directory, load it back, compare, and only then put it in place.

    A model folded to the same sizes everywhere becomes a stock checkpoint that other libraries
    load; any other becomes a factored one. Besides config and weights the directory holds
    ``plan.json``, ``recipe.yaml`` and ``provenance.json`` (source, revision, hashes, library
    versions, calibration), and after a recovery its log, ``recovery.jsonl``, ``recovery.png`` and,
    if asked for, ``ranks.jsonl``.
    Give it a name that contains the original's: AutoGluon chooses batch size and device by it.

    Parameters
    ----------
    compressed
        What :func:`tscompress.compress` or :func:`tscompress.recover` returned.
    output
        The directory.
    force
        Replace what tscompress wrote there.
    max_shard_size
        Of one weight file, in bytes or as ``"5GB"``; more is spread over several files, with the
        index that stock software reads.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    PlanError
        The plan keeps every layer as it is: there is nothing to save.
    UsageError
        ``max_shard_size`` is not a size.
    OutputExistsError
        ``output`` holds something and ``force`` is false; or it is or holds the model that
        ``compressed`` was made from.
    VerificationError
        What was written does not load back bit-equal.
    """
    check_type("compressed", compressed, (CompressedModel,), "what compress or recover returned")
    check_type("output", output, (str, Path), "the path of a directory")
    plan = check_smaller(compressed.plan)
    output = user_path(output)
    return_memory()  # of the float32 weights, before the result is loaded beside itself
    with new_directory(output, force=force, inputs=[compressed.directory]) as directory:
        _write_model(compressed, plan, directory, max_shard_size)
        if compressed.recipe is not None:
            resolved: dict[str, str | None] = {"output": str(output)}
            if compressed.original is None:  # else the revision is that of the student
                resolved |= {"revision": compressed.revision}
            recipe = compressed.recipe.model_copy(update=resolved)
            said = "".join(_caveats_of_recipe(compressed))
            write_text_atomically(directory / RECIPE_FILE, said + recipe.to_yaml())
        _write_provenance(compressed, directory)
        if compressed.recovery is not None:
            _write_log(compressed.recovery, directory)
        verify(compressed.model, directory)
    name_place_(compressed.model, output)
    return output


def _caveats_of_recipe(compressed: CompressedModel) -> list[str]:
    """Comments where a model was fitted to series that its recipe cannot name."""
    calibrated = compressed.calibration.get("source") == GIVEN_SERIES
    recovered = compressed.recovery is not None and compressed.recovery.beside_config
    said = zip(_ON_GIVEN_SERIES, (calibrated, recovered), strict=True)
    return [comment for comment, is_so in said if is_so]


def check_smaller(plan: Plan | None) -> Plan:
    """Refuse a plan that leaves nothing to save, and return any other.

    Raises
    ------
    PlanError
        It keeps every layer as it is, or there is none.
    """
    if plan is None or not plan.changes_anything:
        raise PlanError(
            "the plan keeps every layer dense, so there is nothing to save; "
            "ask for a lower rank, a larger epsilon or a smaller budget."
        )
    return plan


def _write_model(
    compressed: CompressedModel, plan: Plan, directory: Path, max_shard_size: int | str
) -> None:
    if plan.uniform_sizes is None:
        write_factored(compressed.model, plan, compressed.config, directory, max_shard_size)
        return
    dtype = compressed.stored_dtype
    write_folded(compressed.model, plan, compressed.config, dtype, directory, max_shard_size)
    assert compressed.directory is not None  # compress refuses pipelines
    generation = compressed.directory / GENERATION_FILE
    if generation.is_file():
        shutil.copyfile(generation, directory / GENERATION_FILE)


def _write_log(recovery: RecoveryResult, directory: Path) -> None:
    records = [asdict(line) for line in recovery.history]
    text = "".join(json.dumps(record) + "\n" for record in records)
    write_text_atomically(directory / RECOVERY_LOG_FILE, text)
    if recovery.ranks:
        write_text_atomically(directory / RANKS_LOG, ranks_text(recovery.ranks))
    figure = loss_figure(records, recovery.best_step)
    save_figure(figure, directory / RECOVERY_FIGURE_FILE)


def _write_provenance(compressed: CompressedModel, directory: Path) -> None:
    assert compressed.directory is not None
    source = {
        "model": compressed.source,
        "revision": compressed.revision,
        "family": compressed.family,
        "sha256": hashes(source_files(compressed.directory)),
    }
    recipe = directory / RECIPE_FILE
    write_provenance(
        directory,
        source,
        others=[recipe] if recipe.is_file() else [],
        dtype=str(compressed.stored_dtype).removeprefix("torch."),
        calibration=compressed.calibration,
        recovery=None if compressed.recovery is None else compressed.recovery.record(),
        **_before(compressed),
        **{FITTED_TO: as_record(compressed.fitted_to)},
    )


def _before(compressed: CompressedModel) -> dict[str, Any]:
    """What the record of a checkpoint that was recovered again keeps of the one before."""
    kept = {ORIGINAL: compressed.original, EARLIER: [*compressed.earlier_recoveries]}
    return {key: value for key, value in kept.items() if value}


def as_compressed(loaded: LoadedModel) -> CompressedModel:
    """Add the plan and the recipe beside a compressed checkpoint.

    Raises
    ------
    PlanError
        There is no plan: it is not an output of ``compress``.
    """
    if isinstance(loaded, CompressedModel):
        return loaded
    if loaded.directory is None:
        raise PlanError(f"{loaded.name!r} is a pipeline in memory, without a plan; save it first.")
    known = {field.name: getattr(loaded, field.name) for field in fields(LoadedModel)}
    known["plan"] = loaded.plan or Plan.load(loaded.directory / PLAN_FILE)
    path = loaded.directory / RECIPE_FILE
    recipe = load_recipe(path) if path.is_file() else None
    provenance = _provenance_of(loaded.directory)
    calibration = provenance.get("calibration")
    return CompressedModel(
        **known,
        recipe=recipe,
        original=_original_of(provenance, recipe, loaded.family),
        earlier_recoveries=tuple(_recoveries_in(provenance)),
        calibration=calibration if isinstance(calibration, dict) else {},
        fitted_to=recorded_sources(loaded.directory),
    )


def _provenance_of(directory: Path) -> dict[str, Any]:
    """The record of a checkpoint; empty if there is none."""
    try:
        provenance = read_json(directory / PROVENANCE_FILE)
    except (FileNotFoundError, UnreadableFileError):
        return {}
    return provenance if isinstance(provenance, dict) else {}


def _original_of(
    provenance: Mapping[str, Any], recipe: Recipe | None, family: str
) -> dict[str, Any] | None:
    """What the records of a checkpoint say of its original.

    The recipe knows it where that of a recovery has its student as the source, or there is none.
    """
    keys = "model", "revision", "family", "sha256"
    found = provenance.get(ORIGINAL, provenance.get("source"))
    if not isinstance(found, dict) or not isinstance(found.get("model"), str):
        found = None
    if recipe is not None:
        named = recipe.model, recipe.revision
        if found is None or (found["model"], found.get("revision")) != named:
            return dict(zip(keys, (*named, family, None), strict=True))
    return found and {key: found.get(key) for key in keys}


def _recoveries_in(provenance: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of all recoveries, in order."""
    earlier = provenance.get(EARLIER)
    found = [*(earlier if isinstance(earlier, list) else []), provenance.get("recovery")]
    return [one for one in found if isinstance(one, dict)]
