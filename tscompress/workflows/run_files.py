"""Files of :func:`tscompress.run` besides the checkpoint: writing and reading.

``report.json`` has the recipe, plan, sizes and latencies; ``scores.json`` (both models) and
``scores-seasonal-naive.json`` the scores with each series' contributions, ``scores-exported.json``
those of the graph; ``fidelity.json`` and
``forecasts.json`` the changes of forecasts; ``probe.json`` skills; ``profile/`` ranks. All of it is
plain data, so tables and pages need no model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from tscompress.benchmark.results import BenchResult
from tscompress.checkpoints.names import PLAN_FILE, PROVENANCE_FILE
from tscompress.checkpoints.provenance import recorded_hashes
from tscompress.errors import DataError, PlanError, RecipeError, UsageError
from tscompress.evaluation.fidelity import Fidelity
from tscompress.evaluation.results import (
    SCORES_FILE,
    EvaluationResult,
    load_results,
    relative,
    relative_or_none,
)
from tscompress.evaluation.typical_series import ForecastExample
from tscompress.io.files import write_text_atomically
from tscompress.io.network import is_commit
from tscompress.io.own_outputs import table_csv
from tscompress.io.results import results_json
from tscompress.io.untrusted import UnreadableFileError, first_problem, read_json
from tscompress.plan.plan import Plan
from tscompress.probing.results import ProbeResult, load_probes, probe_content
from tscompress.profiling.figures import FIGURE_FILES
from tscompress.profiling.rank_profile import PROFILE_FILE, RANKS_FILE, RankProfile
from tscompress.workflows.export import ExportResult
from tscompress.workflows.recipe import Recipe, validate
from tscompress.workflows.run import RunResult

RUN_FILE = "report.json"
BASELINE_FILE = "scores-seasonal-naive.json"
EXPORTED_FILE = "scores-exported.json"
FIDELITY_FILE = "fidelity.json"
FORECASTS_FILE = "forecasts.json"
PROBE_FILE = "probe.json"
FIGURE_FILE = "comparison.png"
PROFILE_DIRECTORY = "profile"
_TABLES = (
    "scores.csv", "scores-original.csv", "scores-seasonal-naive.csv", "scores-exported.csv",
)  # fmt: skip
_PROFILE_FILES = (PROFILE_FILE, RANKS_FILE, *FIGURE_FILES)
#: All that a run may write beside its checkpoint and the pages of its report.
FILES = (
    RUN_FILE, SCORES_FILE, BASELINE_FILE, EXPORTED_FILE, FIDELITY_FILE, FORECASTS_FILE, PROBE_FILE,
    FIGURE_FILE, *_TABLES, *(f"{PROFILE_DIRECTORY}/{name}" for name in _PROFILE_FILES),
)  # fmt: skip


class _Original(Protocol):
    """What a recipe of a run and one of a sweep say of their original."""

    @property
    def model(self) -> str: ...

    @property
    def revision(self) -> str | None: ...


_EXAMPLES = TypeAdapter(tuple[ForecastExample, ...])
_BENCH = TypeAdapter(BenchResult)
_EXPORTED = TypeAdapter(ExportResult)


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def save_run(result: RunResult, recipe: Recipe) -> None:
    """Write everything that was measured below ``result.directory``.

    Each file is replaced in one step. What an earlier run left of its measurements and figures
    goes away, so that no page ever mixes two runs.

    Raises
    ------
    OutputError
        The directory cannot be written to.
    """
    directory = result.directory
    content = _contents(result)
    # Removed first and written last: a directory without it is not a finished run.
    for path in written_before(directory):
        if path.name not in content:
            path.unlink(missing_ok=True)
    for name, text in content.items():
        write_text_atomically(directory / name, text)
    if result.profile is not None:
        result.profile.save(directory / PROFILE_DIRECTORY)
    write_text_atomically(
        directory / RUN_FILE, json.dumps(_record(result, recipe), indent=2) + "\n"
    )


def written_before(directory: Path) -> list[Path]:
    """Measurements and figures that an earlier run may have left, :data:`RUN_FILE` first."""
    return [directory / name for name in FILES]


def _contents(result: RunResult) -> dict[str, str]:
    """Text of each file with content."""
    found: dict[str, str] = {}
    if result.compressed is not None and result.original is not None:
        scores: dict[str, Any] = {
            "result": result.compressed.to_dict(),
            "against": result.original.to_dict(),
            "relative_to_against": relative(result.compressed, result.original),
        }
        if result.baseline is not None:
            naive = relative_or_none(result.compressed, result.baseline)
            scores["relative_to_seasonal_naive"] = naive
        found[SCORES_FILE] = results_json(scores)
    if result.baseline is not None:
        found[BASELINE_FILE] = results_json({"result": result.baseline.to_dict()})
    if result.exported_scores is not None:
        found[EXPORTED_FILE] = results_json({"result": result.exported_scores.to_dict()})
    tables = (result.compressed, result.original, result.baseline, result.exported_scores)
    for name, scored in zip(_TABLES, tables, strict=True):
        if scored is not None:
            found[name] = table_csv(scored.frame())
    if result.fidelity is not None:
        found[FIDELITY_FILE] = json.dumps(result.fidelity.to_dict()) + "\n"
    if result.examples:
        found[FORECASTS_FILE] = _EXAMPLES.dump_json(result.examples).decode() + "\n"
    if result.probes is not None:
        original, compressed = result.probes
        found[PROBE_FILE] = results_json(probe_content(compressed, original))
    return found


def _record(result: RunResult, recipe: Recipe) -> dict[str, Any]:
    """Content of ``report.json``."""
    ratios = naive = None
    probes = result.probes
    if result.compressed is not None and result.original is not None:
        ratios = relative(result.compressed, result.original)
    if result.compressed is not None and result.baseline is not None:
        naive = relative_or_none(result.compressed, result.baseline)
    return {
        "recipe": recipe.model_dump(mode="json"),
        "checkpoint": result.checkpoint.name,
        # Of the files that were measured: a recovery leaves the plan and changes the weights.
        "sha256": (read_provenance(result.checkpoint) or {}).get("sha256"),
        "plan": result.plan.model_dump(mode="json"),
        "attention_parameter_ratio": result.plan.attention_parameter_ratio,
        "relative": ratios,
        "relative_to_seasonal_naive": naive,
        "probe": None if probes is None else probes[1].against(probes[0]).to_dict(),
        "bench": None if result.bench is None else result.bench.to_dict(),
        "exported": _exported_record(result),
    }


def _exported_record(result: RunResult) -> dict[str, Any] | None:
    """What the graph is and how it scored; its directory by name, as the run may be moved."""
    if result.exported is None:
        return None
    ratios = None
    if result.exported_scores is not None and result.original is not None:
        ratios = relative(result.exported_scores, result.original)
    directory = result.exported.directory.name
    return result.exported.to_dict() | {"directory": directory, "relative": ratios}


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def load_run(directory: str | Path) -> tuple[RunResult, Recipe]:
    """Read files of :func:`save_run`; no model is loaded.

    Missing measurements are None. The checkpoint may have been moved.

    Raises
    ------
    UsageError
        It is not the directory of a run, or its checkpoint is from another run.
    DataError
        A file has other content than that of a run.
    """
    directory = Path(directory)
    path = directory / RUN_FILE
    if not path.is_file():
        raise UsageError(
            f"{str(directory)!r} is not the directory of a finished run: it has no {RUN_FILE}; "
            "give the output of `tscompress run`."
        )
    content = _read(path)
    if not isinstance(content, dict) or not {"recipe", "plan"} <= content.keys():
        raise DataError(f"{str(path)!r} is not what `tscompress run` writes; run it again.")
    recipe, plan = _parsed(content, path)
    checkpoint = directory / Path(str(content.get("checkpoint") or "-")).name
    _check_checkpoint(checkpoint, plan, content.get("sha256"))
    scores = _scores(directory, checkpoint)
    baseline, graph_scores = directory / BASELINE_FILE, directory / EXPORTED_FILE
    exported = _exported(content, path)
    result = RunResult(
        directory=directory,
        checkpoint=checkpoint,
        plan=plan,
        profile=_profile(directory / PROFILE_DIRECTORY / PROFILE_FILE),
        original=scores[1] if scores else None,
        compressed=scores[0] if scores else None,
        baseline=EvaluationResult.load(baseline) if baseline.is_file() else None,
        fidelity=_fidelity(directory / FIDELITY_FILE),
        examples=_validated(_EXAMPLES.validate_python, directory / FORECASTS_FILE) or (),
        probes=_probes(directory / PROBE_FILE),
        bench=_bench(content, path, count=2 if exported is None else 3),
        exported=exported,
        exported_scores=EvaluationResult.load(graph_scores) if graph_scores.is_file() else None,
    )
    return result, recipe


def read_provenance(checkpoint: Path) -> dict[str, Any] | None:
    """``provenance.json`` beside the weights; None if there is none.

    Raises
    ------
    DataError
        They cannot be read.
    """
    path = checkpoint / PROVENANCE_FILE
    if not path.is_file():
        return None
    content = _read(path)
    if not isinstance(content, dict):
        raise DataError(f"{str(path)!r} is not what `tscompress compress` writes.")
    return content


def measured_recipe(result: RunResult, recipe: Recipe) -> Recipe:
    """The recipe of a run with the commit of the original, where that came from the Hub."""
    source = (read_provenance(result.checkpoint) or {}).get("source")
    if not isinstance(source, dict) or source.get("model") != recipe.model:
        return recipe
    revision = source.get("revision")
    return recipe.model_copy(update={"revision": revision}) if is_commit(revision) else recipe


def have_same_weights(one: RunResult, other: RunResult) -> bool:
    """Whether two runs read equal files of their original; so it is where one has no record."""
    sources = [(read_provenance(run.checkpoint) or {}).get("source") for run in (one, other)]
    hashes = [source.get("sha256") if isinstance(source, dict) else None for source in sources]
    return not all(hashes) or hashes[0] == hashes[1]


def is_same_original(one: _Original, other: _Original) -> bool:
    """Whether two recipes compress the same model; of a commit and a branch that is not known."""
    revisions = one.revision, other.revision
    if one.model != other.model:
        return False
    return revisions[0] == revisions[1] or is_commit(revisions[0]) != is_commit(revisions[1])


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, UnreadableFileError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}; run it again.") from None


def _parsed(content: dict[str, Any], path: Path) -> tuple[Recipe, Plan]:
    source = repr(str(path))
    try:
        if not isinstance(content["recipe"], dict) or not isinstance(content["plan"], dict):
            raise DataError(f"{source}: recipe and plan are no mappings; run it again.")
        return validate(Recipe, content["recipe"], source), Plan.parse(content["plan"], source)
    except (RecipeError, PlanError) as error:
        raise DataError(str(error)) from None


def _check_checkpoint(checkpoint: Path, plan: Plan, sha256: Any) -> None:
    """Refuse a checkpoint with another plan than the run's, or with other files.

    Parameters
    ----------
    sha256
        Of the files that the run measured; None in reports of before they were recorded.

    Raises
    ------
    UsageError
    DataError
        ``provenance.json`` cannot be read.
    """
    path = checkpoint / PLAN_FILE
    if not path.is_file():
        return
    if Plan.load(path) != plan:
        raise UsageError(
            f"{str(checkpoint.parent)!r} is incomplete: {RUN_FILE} has another plan than "
            f"{checkpoint.name}, so that run did not finish; run it again with --force."
        )
    if sha256 is not None and (read_provenance(checkpoint) or {}).get("sha256") != sha256:
        raise UsageError(
            f"{str(checkpoint)!r} is from another run: it has other files than those that "
            f"{RUN_FILE} has measurements of; run it again with --force."
        )


def _scores(directory: Path, checkpoint: Path) -> tuple[EvaluationResult, EvaluationResult] | None:
    if not (directory / SCORES_FILE).is_file():
        return None
    found = load_results(directory)
    if len(found) != 2:
        raise DataError(
            f"{str(directory / SCORES_FILE)!r} has no scores of the original; run it again."
        )
    here = recorded_hashes(checkpoint)
    changed = None not in (here, found[0].sha256) and found[0].sha256 != here
    if changed or found[0].model not in (checkpoint.name, checkpoint.resolve().name):
        raise UsageError(
            f"{str(directory / SCORES_FILE)!r} has scores of another model than the run's; run it "
            "again with --force."
        )
    return found[0], found[1]


def _validated(parse: Any, path: Path) -> Any:
    """A JSON file through ``parse``; None if there is no file."""
    if not path.is_file():
        return None
    content = _read(path)
    try:
        return parse(content)
    except ValidationError as error:
        where, reason, _ = first_problem(error)
        raise DataError(
            f"{str(path)!r} is not what `tscompress run` writes: {where}: {reason}; run it again."
        ) from None


def _profile(path: Path) -> RankProfile | None:
    found: RankProfile | None = _validated(RankProfile.model_validate, path)
    return found


def _probes(path: Path) -> tuple[ProbeResult, ProbeResult] | None:
    if not path.is_file():
        return None
    found = load_probes(path)
    if len(found) != 2:
        raise DataError(f"{str(path)!r} has no probe of the original; run it again.")
    return found[1], found[0]


def _exported(content: dict[str, Any], path: Path) -> ExportResult | None:
    record = content.get("exported")
    if record is None:
        return None
    try:
        found = _EXPORTED.validate_python(record)
    except ValidationError as error:
        where, reason, _ = first_problem(error)
        raise DataError(f"{str(path)!r}: exported.{where}: {reason}; run it again.") from None
    return replace(found, directory=path.parent / found.directory.name)


def _bench(content: dict[str, Any], path: Path, count: int) -> BenchResult | None:
    """Of ``count`` models."""
    if content.get("bench") is None:
        return None
    try:
        found = _BENCH.validate_python(content["bench"])
    except ValidationError as error:
        where, reason, _ = first_problem(error)
        raise DataError(f"{str(path)!r}: bench.{where}: {reason}; run it again.") from None
    if len(found.models) != count:
        raise DataError(f"{str(path)!r}: bench has {len(found.models)} models, not {count}.")
    return found


def _fidelity(path: Path) -> Fidelity | None:
    found: Fidelity | None = _validated(Fidelity.model_validate, path)
    return found
