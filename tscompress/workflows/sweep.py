"""Sweep: many compressions of one model under the same measurements, and their Pareto fronts.

Every combination of a recipe's grid is a point: the model is compressed, recovered if asked for,
saved, loaded again and scored. At the end models of all shapes take turns for their latency, and
points that no other beats in both quality and cost are the Pareto front. A point's directory is
named by a hash of everything that it depends on, so a stopped sweep resumes and a grid can grow.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pandas as pd
import torch
from chronos import BaseChronosPipeline
from pydantic import TypeAdapter, ValidationError

from tscompress.benchmark.bench import bench
from tscompress.benchmark.results import BenchResult
from tscompress.benchmark.workload import Workload
from tscompress.budget.candidate_latency import fill_randomly_
from tscompress.checkpoints.digests import versions
from tscompress.checkpoints.format import apply_structure_, is_factored_config, read_plan
from tscompress.checkpoints.integrity import read_config
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.data.reading.summary import SeriesSummary
from tscompress.errors import (
    OutputExistsError,
    PlanError,
    TscompressError,
    UsageError,
)
from tscompress.evaluation.batching import Processes, memory_ran_out
from tscompress.families.registry import build_empty, family_of, wrap_pipeline
from tscompress.io.files import check_file, check_output, user_path, write_text_atomically
from tscompress.io.making_way import claimed, undo_killed
from tscompress.io.untrusted import single_line
from tscompress.plotting import save_figure
from tscompress.progress import OnProgress, silent
from tscompress.workflows.compress import check_sizes
from tscompress.workflows.early_checks import (
    check_calibration,
    check_measurements,
    check_recovery,
    check_training,
    read_summaries,
)
from tscompress.workflows.measure_point import (
    ORIGINAL,
    Measured,
    checkpoint_of,
    finished,
    measure_original,
    measure_point,
    shape_name,
)
from tscompress.workflows.recipe import Recipe, with_columns
from tscompress.workflows.sweep_points import (
    Point,
    SweepRecipe,
    digest_of,
    original_digest,
    points_of,
    suite_content,
)
from tscompress.workflows.sweep_results import SweepResult, results_frame, sweep_figure

RECIPE_FILE, TABLE_FILE, FIGURE_FILE, LATENCY_FILE = (
    "sweep.yaml", "sweep.csv", "sweep.png", "latency.json",
)  # fmt: skip
#: The stage of progress that counts points.
POINTS = "points"
_BENCH = TypeAdapter(BenchResult)


def sweep(
    recipe: SweepRecipe,
    *,
    processes: int = 1,
    device: str = "cpu",
    force: bool = False,
    inputs: Sequence[str | Path | None] = (),
    on_series: Callable[[SeriesSummary | None], None] = lambda summary: None,
    on_point: Callable[[Measured | None, str, int, int], None] = lambda *_: None,
    on_progress: OnProgress = silent,
) -> SweepResult:
    """Measure every point that is not there yet, then all of them together.

    Parameters
    ----------
    processes
        Number of processes that measure points; with several, each has one thread.
    force
        The output may hold the sweep of another recipe; its points are kept.
    inputs
        Besides those of the recipe: what the output must not replace.
    on_series
        Called with what was read of each file of series, before a model is loaded.
    on_point
        Called with each point just measured, or None and the reason of its failure, and with the
        numbers of points done and in all.
    on_progress
        Called with a stage, steps done and steps in all.

    Returns
    -------
    SweepResult
        Written to the output as ``sweep.csv`` and ``sweep.png``, too.

    Raises
    ------
    OutputExistsError
        The output holds something else, or another process measures there.
    TscompressError
        One of its subclasses; measured points are kept. A point that fails is in ``failures``,
        unless all do; one with sizes that the model cannot have is refused before the first, and
        so is what cannot be measured, calibrated or trained on.
    """
    Processes().check_alone("sweep")
    if processes < 1:
        raise UsageError(f"processes is {processes}; it must be at least 1.")
    points = points_of(recipe)
    output = user_path(recipe.output)
    inputs = *inputs, recipe.model, recipe.evaluation.suite, recipe.evaluation.root
    _check_output(output, recipe, force=force, inputs=inputs)
    original = _checked(recipe, points, device, on_series)
    scored_on = suite_content(with_columns(recipe.evaluation, recipe.series))
    model_hash = original_digest(original)
    named = {point.identity(model_hash, scored_on): point for point in points}
    # A second sweep would remove points that it began and this one has finished.
    with claimed([output / RECIPE_FILE]):
        write_text_atomically(output / RECIPE_FILE, _recipe_text(recipe))
        failures = _measure_missing(named, output, processes, device, on_point, on_progress)
        done = [found for identity in named if (found := finished(output, identity)) is not None]
        if not done:
            label, reason = next(iter(failures.items()))
            raise TscompressError(
                f"none of {len(points)} points could be measured; {label}: {reason}"
            )
        dense = measure_original(original, points[0], model_hash, scored_on, output)
        timed = None
        if recipe.bench is not None:
            timed = _latencies(original, model_hash, done, output, recipe.bench, on_progress)
        frame = results_frame(dense, done, timed, output)
        gone = _drop_weights(recipe, frame, done, output)
        write_text_atomically(output / TABLE_FILE, frame.to_csv(index=False, lineterminator="\n"))
        save_figure(sweep_figure(frame, original.name), output / FIGURE_FILE)
    return SweepResult(recipe, output, frame, failures, timed, gone)


def _checked(
    recipe: SweepRecipe,
    points: Sequence[Point],
    device: str,
    on_series: Callable[[SeriesSummary | None], None],
) -> LoadedModel:
    """The original, once nothing that is known now keeps a point from being measured."""
    # What they read is the same, but that some points are not recovered, or not calibrated.
    reading = {_reads(point.recipe): point.recipe for point in points}
    said: list[SeriesSummary | None] = []
    for summary in (found for one in reading.values() for found in read_summaries(one)):
        if summary not in said:
            said.append(summary)
            on_series(summary)
    original = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
    for point in points:
        _check_point(original, point)
    check_measurements(points[0].recipe, original, device)
    for one in reading.values():
        check_calibration(one)
        check_recovery(one)
    return original


def _reads(recipe: Recipe) -> tuple[bool, bool]:
    return recipe.calibrates, recipe.recover is not None


def _check_point(original: LoadedModel, point: Point) -> None:
    """Refuse, before any is measured, sizes that the model cannot have, or what cannot train it.

    Raises
    ------
    PlanError, UsageError
    """
    try:
        check_sizes(original, point.recipe)
        check_training(point.recipe, original)
    except (PlanError, UsageError) as error:
        raise type(error)(f"grid: {point.label}: {error}") from None


def _recipe_text(recipe: SweepRecipe) -> str:
    return recipe.model_dump_json(indent=2) + "\n"  # JSON is YAML


def _check_output(
    output: Path, recipe: SweepRecipe, *, force: bool, inputs: Sequence[str | Path | None]
) -> None:
    """Refuse a directory that is not empty and not of this sweep, or, with force, of any.

    Raises
    ------
    OutputExistsError
        It is, or another process measures there.
    """
    path = output / RECIPE_FILE
    undo_killed([path])
    if not path.is_file():
        check_output(output, force=False, in_place=True)
        return
    # Without force a recipe there is only ever written over by the same one.
    for name in (TABLE_FILE, FIGURE_FILE, LATENCY_FILE, *([RECIPE_FILE] if force else [])):
        check_file(output / name, force=True, inputs=inputs)
    if not force and not _is_of(path, recipe):
        raise OutputExistsError(
            f"{str(output)!r} holds the sweep of another recipe; choose another output, or "
            "pass --force to put this one in its place and use its points."
        )


def _is_of(path: Path, recipe: SweepRecipe) -> bool:
    """Whether a file has this recipe, for whatever output."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(stored, dict) and stored | {"output": ""} == recipe.model_dump(
        mode="json"
    ) | {"output": ""}


def _measure_missing(
    named: Mapping[str, Point],
    output: Path,
    processes: int,
    device: str,
    on_point: Callable[[Measured | None, str, int, int], None],
    on_progress: OnProgress,
) -> dict[str, str]:
    """Measure missing points; returns labels of failed points and the reasons."""
    missing = {
        identity: point for identity, point in named.items() if finished(output, identity) is None
    }
    failures: dict[str, str] = {}
    done = len(named) - len(missing)
    tasks = (
        _in_turn(missing, output, device)
        if processes == 1
        else _in_processes(missing, output, device, min(processes, max(1, len(missing))))
    )
    on_progress(POINTS, done, len(named))
    for point, work in tasks:
        done += 1
        try:
            on_point(work(), point.label, done, len(named))
        except Exception as error:
            if not (isinstance(error, TscompressError) or memory_ran_out(error)):
                raise
            reason = str(error) if isinstance(error, TscompressError) else single_line(error)
            failures[point.label] = reason
            on_point(None, f"{point.label}: {reason}", done, len(named))
        on_progress(POINTS, done, len(named))
    return failures


_Task = tuple[Point, Callable[[], Measured]]


def _in_turn(missing: Mapping[str, Point], output: Path, device: str) -> Iterator[_Task]:
    for identity, point in missing.items():
        yield point, lambda p=point, i=identity: measure_point(p, i, output, device)  # type: ignore[misc]


def _in_processes(
    missing: Mapping[str, Point], output: Path, device: str, count: int
) -> Iterator[_Task]:
    """Points in order of completion."""
    others = set(multiprocessing.active_children())
    # A fork of a process that has run torch may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _start_worker) as pool:
        try:
            futures: dict[Future[Measured], Point] = {
                pool.submit(measure_point, point, identity, output, device): point
                for identity, point in missing.items()
            }
            for future in as_completed(futures):
                if isinstance(future.exception(), BrokenProcessPool):
                    raise BrokenProcessPool
                yield futures[future], future.result
        except BrokenProcessPool:
            raise TscompressError(
                "a process was killed, most likely for lack of memory; measured points are kept: "
                "run it again with fewer --processes."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _start_worker() -> None:
    """Use one thread per process, so that they share the cores; no bars on stderr."""
    torch.set_num_threads(1)
    logging.getLogger("chronos").setLevel(logging.ERROR)


def _latencies(
    original: LoadedModel,
    model_hash: str,
    done: Sequence[Measured],
    output: Path,
    workload: Workload,
    on_progress: OnProgress,
) -> BenchResult:
    """Latencies of the original and every shape, in turn; measured again only for a new shape.

    Latency does not depend on the values of weights, so models of one shape share it, and deleted
    weights are not needed.
    """
    workload = workload.on(next(original.model.parameters()).device)
    shapes = {shape_name(output, point): checkpoint_of(output, point) for point in done}
    threads = workload.threads or torch.get_num_threads()
    key = digest_of(
        [
            model_hash,
            sorted(shapes),
            workload.model_dump(),
            threads,
            versions(),
        ]
    )
    path = output / LATENCY_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return _BENCH.validate_python(stored["bench"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        pass  # no usable file: measure
    pipelines = [(ORIGINAL, original.forecaster)]
    pipelines += [(name, _shape(directory, workload)) for name, directory in shapes.items()]
    result = bench(
        pipelines,
        workload,
        measure_memory=workload.device == "cuda",
        on_run=lambda run: on_progress("bench", run.round + 1, workload.repeats),
    )
    write_text_atomically(path, json.dumps({"key": key, "bench": result.to_dict()}) + "\n")
    return result


def _shape(directory: Path, workload: Workload) -> BaseChronosPipeline:
    """A model of the shape in ``directory``, with random weights."""
    config = read_config(directory, str(directory))
    factored = is_factored_config(config)
    base = config["base_config"] if factored else config
    family = family_of(base)
    model = build_empty(family, base)
    if factored:
        apply_structure_(model, read_plan(config, directory))
    fill_randomly_(model, torch.float32, workload.device)
    return wrap_pipeline(family, model.to(workload.device).eval())


def _drop_weights(
    recipe: SweepRecipe, frame: pd.DataFrame, done: Sequence[Measured], output: Path
) -> tuple[str, ...]:
    """Remove weights that are not to be kept; keep config, plan and measurements.

    Returns
    -------
    tuple of str
        Ids of points whose weights should be there and are not: an earlier sweep removed them.
    """
    wanted = {point.id for point in done}
    if recipe.keep != "all":
        fronts = frame[[name for name in frame.columns if name.startswith("front_")]]
        wanted = set(frame["id"][fronts.any(axis=1)]) if recipe.keep == "front" else set()
    gone = []
    for point in done:
        weights = list(checkpoint_of(output, point).glob("*.safetensors"))
        if point.id not in wanted:
            for path in weights:
                path.unlink()
        elif not weights:
            gone.append(point.id)
    return tuple(gone)
