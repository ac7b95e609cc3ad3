"""Run a recipe: profile, compress, recover, save, export, evaluate, probe, bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tscompress.benchmark.bench import bench
from tscompress.benchmark.results import BenchResult
from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.given import loaded_of
from tscompress.checkpoints.load import LoadedModel, check_device, load
from tscompress.checkpoints.locate import model_name
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.leakage import guarded
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.synthetic import FloatArray
from tscompress.errors import DataError, UsageError
from tscompress.evaluation.batching import Processes
from tscompress.evaluation.fidelity import Fidelity
from tscompress.evaluation.metrics import Quantiles
from tscompress.evaluation.results import EvaluationResult
from tscompress.evaluation.typical_series import EXAMPLES, ForecastExample, typical_examples
from tscompress.exporting.packages import check_packages
from tscompress.io.arguments import check_type
from tscompress.io.files import check_file, check_output, user_path
from tscompress.io.making_way import claimed, journal_of, undo_killed
from tscompress.plan.plan import Plan
from tscompress.probing.measure import ProbeConfig, probe
from tscompress.probing.results import ProbeResult
from tscompress.profiling.measure import profile
from tscompress.profiling.rank_profile import RankProfile
from tscompress.progress import OnProgress, silent
from tscompress.runtime.record import is_exported
from tscompress.workflows.claims import claimed_by_main
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.early_checks import (
    check_sources_are_read,
    check_stages,
    other_summaries,
)
from tscompress.workflows.evaluate_models import evaluate_models, score
from tscompress.workflows.export import ExportResult, export
from tscompress.workflows.recipe import (
    EvaluationConfig,
    Recipe,
    calibration_series,
    inputs_of,
    labels_of,
    summary_of,
)
from tscompress.workflows.save import save
from tscompress.workflows.unfinished import check_recovery_directory, finish_recovery

#: Directory of the state of an unfinished recovery.
WORK = "recovery"


@dataclass
class RunResult:
    """Measurements of :func:`run`; :mod:`tscompress.workflows.run_files` writes and reads them.

    Attributes
    ----------
    directory, checkpoint
        The recipe's output, and the compressed checkpoint in it.
    examples
        Forecasts of both models, for one series of each dataset.
    probes
        Skill of the original and of the compressed model.
    exported, exported_scores
        The compressed model as an ONNX graph, and its scores; :attr:`bench` has it as third model.
    note
        A caveat on the calibration series, if any; not in the files.
    """

    directory: Path
    checkpoint: Path
    plan: Plan
    profile: RankProfile | None = None
    original: EvaluationResult | None = None
    compressed: EvaluationResult | None = None
    baseline: EvaluationResult | None = None
    fidelity: Fidelity | None = None
    examples: tuple[ForecastExample, ...] = ()
    probes: tuple[ProbeResult, ProbeResult] | None = None
    bench: BenchResult | None = None
    exported: ExportResult | None = None
    exported_scores: EvaluationResult | None = None
    note: str | None = None

    def __repr__(self) -> str:
        names = (
            "profile", "original", "compressed", "baseline", "fidelity", "examples", "probes",
            "bench", "exported",
        )  # fmt: skip
        measured = ", ".join(name for name in names if getattr(self, name))
        return f"RunResult({str(self.checkpoint)!r}, {self.plan!r}, with {measured or 'no scores'})"


def run(
    recipe: Recipe,
    *,
    force: bool = False,
    device: str = "cpu",
    on_series: Callable[[SeriesSummary | None], None] = lambda summary: None,
    on_progress: OnProgress = silent,
) -> RunResult:
    """Run a recipe: write the compressed checkpoint below ``recipe.output`` and measure it.

    The checkpoint's directory keeps the original's name (``chronos-bolt-base-fold``): AutoGluon
    chooses batch size and device by it, and asks for a GPU where the path contains
    ``chronos-t5-small``, ``-base`` or ``-large``. A stopped recovery resumes when the same
    recipe is run again; with another, only ``force`` replaces it. A graph that an earlier run
    exported goes with its checkpoint, also where the recipe exports none.

    ``on_series`` is called with what was read of each file of series, before a model is loaded.

    Raises
    ------
    TscompressError
        One of its subclasses; the output is as before, except for a recovery to resume.
    """
    check_type("recipe", recipe, (Recipe,), "a Recipe, as tscompress.load_recipe reads it")
    with finishing_run(
        recipe, force=force, device=device, on_series=on_series, on_progress=on_progress
    ) as result:
        return result


@contextmanager
def finishing_run(
    recipe: Recipe,
    *,
    force: bool = False,
    device: str = "cpu",
    beside: Sequence[Path] = (),
    inputs: Sequence[str | Path | None] = (),
    on_series: Callable[[SeriesSummary | None], None] = lambda summary: None,
    on_progress: OnProgress = silent,
) -> Iterator[RunResult]:
    """The same; the checkpoint stays, and one of before goes, only if the block ends as well.

    Parameters
    ----------
    beside
        Files that the block writes into the output; with ``force``, those of before stay or go as
        the checkpoint does. Whatever else lies there stays.
    inputs
        Besides those of the recipe: what the output must not replace.
    """
    Processes().check_alone("run")
    if recipe.export is not None:
        _check_export(device)
    output = user_path(recipe.output)
    target, work = output / f"{Path(model_name(recipe.model)).name}-{recipe.method}", output / WORK
    inputs = *inputs, *inputs_of(recipe)
    graph = _graph_of(target)
    if beside:
        _undo_killed(output, beside)
    undo_killed([target, graph, *beside])
    # A graph of before is of the weights that go, so that it goes with them.
    goes = recipe.export is not None or _is_graph(graph)
    outputs = [target, graph] if goes else [target]
    replaced = [*outputs, *beside]
    _check_outputs(outputs, beside, force, inputs)
    if recipe.recover is not None:
        check_recovery_directory(work, inputs)
    if recipe.probe is not None:
        recipe.probe.chosen()  # check it before the work
    check_sources_are_read(recipe)
    reads = recipe.method != "svd" or recipe.profile is not None
    given = calibration_series(recipe) if reads else None
    on_series(summary_of(given))
    for summary in other_summaries(recipe):
        on_series(summary)
    loaded = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
    check_stages(recipe, loaded, device)
    revision, digest = loaded.revision, model_digest(loaded.forecaster)
    training = claimed_by_main(work if recipe.recover is not None else None)
    # One file that runs of every method write: of two at once, each would take the other's.
    report = claimed(beside[:1]) if beside else nullcontext()
    with report, claimed(replaced) as claim, training:
        measured = _profile(loaded, recipe, given, on_progress)
        compressed = compress_loaded_(
            loaded, recipe, directory=work, force=force, on_progress=on_progress
        )
        _check_outputs(outputs, beside, force, inputs)  # they may have come meanwhile
        with claim.making_way():
            save(compressed, target)
            assert compressed.plan is not None
            result = RunResult(output, target, compressed.plan, measured, note=compressed.note)
            _export_(result, recipe, graph, on_progress)
            original = load(recipe.model, revision=revision, device=device, dtype=torch.float32)
            if model_digest(original.forecaster) != digest:
                raise DataError(f"{recipe.model!r} changed while the run went on; run it again.")
            _measure_(result, recipe, original, on_progress)
            yield result
        finish_recovery(compressed, work)


def _undo_killed(output: Path, beside: Sequence[Path]) -> None:
    """Undo what killed runs left of files that all runs into an output write, of any method.

    Raises
    ------
    OutputExistsError
        Another run writes there; or as :func:`tscompress.io.making_way.undo_killed`.
    """
    start, end = journal_of(output / "*").name.split("*")
    for journal in sorted(output.glob(f"{start}*{end}")):
        with suppress(FileNotFoundError):  # its owner has just ended
            if journal.lstat().st_size:
                first = output / journal.name.removeprefix(start).removesuffix(end)
                undo_killed([first, _graph_of(first), *beside])
    undo_killed(beside[:1])


def _graph_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}-onnx")


def _check_outputs(
    directories: Sequence[Path],
    files: Sequence[Path],
    force: bool,
    inputs: Sequence[str | Path | None],
) -> None:
    """Refuse to replace unasked what lies there, such as the report of a run of another method.

    Raises
    ------
    OutputExistsError, OutputError
        As :func:`tscompress.io.files.check_output`.
    """
    for path in directories:
        check_output(path, force=force, inputs=inputs)
    for path in files:
        check_file(path, force=force, inputs=inputs, through_links=False)


def _is_graph(directory: Path) -> bool:
    """Whether an exported model lies there; behind a link it is somewhere else's."""
    return is_exported(directory) and not directory.is_symlink()


def _check_export(device: str) -> None:
    """Refuse a graph that cannot be written, or timed beside the models.

    Raises
    ------
    UsageError
    """
    check_packages()
    if torch.device(check_device(device)).type != "cpu":
        raise UsageError(
            f"an exported graph runs on the CPU, and the device is {device!r}; leave the device "
            "out, or the section export."
        )


def _profile(
    loaded: LoadedModel,
    recipe: Recipe,
    given: Sequence[FloatArray] | None,
    on_progress: OnProgress,
) -> RankProfile | None:
    """Ranks of the original, if the recipe asks for them."""
    if recipe.profile is None:
        return None
    with guarded(labels_of(recipe)):
        return profile(
            loaded,
            epsilons=recipe.profile.epsilons,
            series=given,
            calibration=recipe.calibration,
            on_progress=lambda *step: on_progress("profile", *_last_two(step)),
        )


def _export_(result: RunResult, recipe: Recipe, graph: Path, on_progress: OnProgress) -> None:
    """Write the saved checkpoint as a graph, if the recipe asks for that."""
    if recipe.export is None:
        return
    on_progress("export", 0, 1)
    result.exported = export(result.checkpoint, graph, precision=recipe.export.precision)
    on_progress("export", 1, 1)


def _measure_(
    result: RunResult,
    recipe: Recipe,
    original: LoadedModel,
    on_progress: OnProgress,
) -> None:
    """Measure original and saved checkpoint as the recipe asks; results go into ``result``."""
    device = str(original.model.device)
    again = load(result.checkpoint, device=device, dtype=torch.float32)
    graph = None if result.exported is None else loaded_of(result.exported.directory)
    if recipe.scored_on is not None:
        _evaluate_(result, original, again, recipe.scored_on, on_progress)
        if graph is not None:
            result.exported_scores = score(graph, graph.name, recipe.scored_on, on_progress)
    if recipe.probe is not None:
        result.probes = (
            _probe(original, recipe.probe, on_progress),
            _probe(again, recipe.probe, on_progress),
        )
    if recipe.bench is not None:
        workload = recipe.bench.on(device)
        models = [one for one in (original, again, graph) if one is not None]
        result.bench = bench(
            [(one.name, one.forecaster) for one in models],
            workload,
            measure_memory=True,
            directories={one.name: one.directory for one in models},
            on_run=lambda done: on_progress("bench", done.round + 1, workload.repeats),
        )


def _probe(model: LoadedModel, config: ProbeConfig, on_progress: OnProgress) -> ProbeResult:
    stage = f"probe {model.name}"
    return probe(
        model, **dict(config), on_task=lambda _, done, total: on_progress(stage, done, total)
    )


def _evaluate_(
    result: RunResult,
    original: LoadedModel,
    compressed: LoadedModel,
    config: EvaluationConfig,
    on_progress: OnProgress,
) -> None:
    """Set scores of both models and of seasonal naive in ``result``, and their fidelity."""
    examples: list[ForecastExample] = []
    count = max(1, EXAMPLES // len(config.selected().datasets))

    def keep_example(dense: Quantiles, folded: Quantiles, dataset: EvaluationDataset) -> None:
        examples.extend(typical_examples(dense, folded, dataset, count))

    scores = evaluate_models(
        config,
        lambda: compressed,
        lambda: original,
        fidelity=True,
        on_pair=keep_example,
        on_progress=on_progress,
    )
    result.baseline, result.original, result.compressed = scores.naive, scores.against, scores.model
    result.fidelity, result.examples = scores.fidelity, tuple(examples)


def _last_two(step: Sequence[Any]) -> tuple[int, int]:
    done, total = step[-2:]
    return int(done), int(total)
