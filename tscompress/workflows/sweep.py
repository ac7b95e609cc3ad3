"""Many compressions of one model, measured alike: which of them are worth what they cost.

Every combination of a recipe's grid is a point: the model is compressed, recovered if asked for,
saved, loaded again and scored. At the end models of all shapes take turns for their latency, and
what no other point beats in both quality and cost is the Pareto front. A point lies in a directory
named by a hash of all that it depends on, so that a sweep goes on where it stopped and can grow.
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
from tscompress.budget.search import fill_randomly_
from tscompress.checkpoints.digests import (
    hardware,
    model_digest,
    versions,
)
from tscompress.checkpoints.format import apply_structure_, is_factored_config, read_plan
from tscompress.checkpoints.integrity import read_config
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.errors import DataError, OutputExistsError, TscompressError, UsageError
from tscompress.families.registry import build_empty, family_of, wrap_pipeline
from tscompress.io.files import check_output, user_path, write_text_atomically
from tscompress.plotting import DPI
from tscompress.progress import OnProgress, silent
from tscompress.workflows.measure_point import (
    ORIGINAL,
    Measured,
    checkpoint_of,
    finished,
    measure_original,
    measure_point,
    shape_name,
)
from tscompress.workflows.recipe import with_columns
from tscompress.workflows.sweep_points import (
    Point,
    SweepRecipe,
    digest_of,
    points_of,
    suite_content,
)
from tscompress.workflows.sweep_results import SweepResult, results_frame, sweep_figure

RECIPE_FILE, TABLE_FILE, FIGURE_FILE, LATENCY_FILE = (
    "sweep.yaml", "sweep.csv", "sweep.png", "latency.json",
)  # fmt: skip
_BENCH = TypeAdapter(BenchResult)


def sweep(
    recipe: SweepRecipe,
    *,
    processes: int = 1,
    device: str = "cpu",
    force: bool = False,
    on_point: Callable[[Measured | None, str, int, int], None] = lambda *_: None,
    on_progress: OnProgress = silent,
) -> SweepResult:
    """Measure every point that is not there yet, then all of them together.

    Parameters
    ----------
    processes
        That measure points at the same time, with one thread each where there are several.
    force
        The output may hold the sweep of another recipe; its points are kept.
    on_point
        Called with each point that was just measured, or None and why it was not, and with how
        many are done of how many.
    on_progress
        Called with a stage, steps done and steps in all.

    Returns
    -------
    SweepResult
        Written to the output as ``sweep.csv`` and ``sweep.png``, too.

    Raises
    ------
    OutputExistsError
        The output holds something else.
    TscompressError
        A subclass says what was wrong; points that are done stay. One that fails is in
        ``failures``, unless all do.
    """
    if processes < 1:
        raise UsageError(f"processes is {processes}; it must be at least 1.")
    points = points_of(recipe)
    output = user_path(recipe.output)
    _claim(output, recipe, force=force)
    original = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
    model_hash = model_digest(original.forecaster)
    evaluation = with_columns(recipe.evaluation, recipe.series)
    scored_on = suite_content(evaluation)
    named = {point.identity(model_hash, scored_on): point for point in points}
    complete = all(finished(output, identity) is not None for identity in named)
    failures = _measure_missing(named, output, processes, device, on_point)
    done = [found for identity in named if (found := finished(output, identity)) is not None]
    if not done:
        label, reason = next(iter(failures.items()))
        raise TscompressError(f"none of {len(points)} points could be measured; {label}: {reason}")
    dense = measure_original(original, points[0], model_hash, scored_on, output)
    if not complete and suite_content(evaluation) != scored_on:
        raise DataError(
            f"the data of suite {recipe.evaluation.suite!r} changed while points were scored; run "
            "the sweep again."
        )
    timed = None
    if recipe.bench is not None:
        timed = _latencies(original, model_hash, done, output, recipe.bench, on_progress)
    frame = results_frame(dense, done, timed, output)
    _drop_weights(recipe, frame, done, output)
    result = SweepResult(recipe, output, frame, failures, timed)
    write_text_atomically(output / TABLE_FILE, frame.to_csv(index=False))
    temporary = output / f".{FIGURE_FILE}.tmp"
    sweep_figure(frame, original.name).savefig(temporary, dpi=DPI, format="png")
    temporary.replace(output / FIGURE_FILE)
    return result


def _claim(output: Path, recipe: SweepRecipe, *, force: bool) -> None:
    """Make the directory, or make sure that it is of this sweep."""
    path = output / RECIPE_FILE
    text = recipe.model_dump_json(indent=2) + "\n"  # JSON is YAML
    if path.is_file():
        if path.read_text(encoding="utf-8") != text and not force:
            raise OutputExistsError(
                f"{str(output)!r} holds the sweep of another recipe; choose another output, or "
                "pass --force to put this one in its place and use its points."
            )
    else:
        check_output(output, force=False, in_place=True)
    write_text_atomically(path, text)


def _measure_missing(
    named: Mapping[str, Point],
    output: Path,
    processes: int,
    device: str,
    on_point: Callable[[Measured | None, str, int, int], None],
) -> dict[str, str]:
    """Measure what is not there yet; labels of what could not be, and why."""
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
    for point, work in tasks:
        done += 1
        try:
            on_point(work(), point.label, done, len(named))
        except TscompressError as error:
            failures[point.label] = str(error)
            on_point(None, f"{point.label}: {error}", done, len(named))
    return failures


_Task = tuple[Point, Callable[[], Measured]]


def _in_turn(missing: Mapping[str, Point], output: Path, device: str) -> Iterator[_Task]:
    for identity, point in missing.items():
        yield point, lambda p=point, i=identity: measure_point(p, i, output, device)  # type: ignore[misc]


def _in_processes(
    missing: Mapping[str, Point], output: Path, device: str, count: int
) -> Iterator[_Task]:
    """Each point in the order in which they are done."""
    others = set(multiprocessing.active_children())
    # A fork of a process that has run torch may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _start_worker) as pool:
        futures: dict[Future[Measured], Point] = {
            pool.submit(measure_point, point, identity, output, device): point
            for identity, point in missing.items()
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result
        except BrokenProcessPool:
            raise TscompressError(
                "a process ended without a word, most likely for want of memory; the points that "
                "are done stay: run it again with fewer --processes."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _start_worker() -> None:
    """One thread each: several at a time would share the cores badly. And no bars on stderr."""
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
    """The original and every shape, taking turns; measured again only if there is another.

    Time does not depend on what weights are, so that models that only differ in them share it,
    and weights that were not kept are not missed.
    """
    workload = workload.model_copy(update={"device": next(original.model.parameters()).device.type})
    shapes = {shape_name(output, point): checkpoint_of(output, point) for point in done}
    threads = workload.threads or torch.get_num_threads()
    key = digest_of(
        [
            model_hash,
            sorted(shapes),
            workload.model_dump(),
            threads,
            versions(),
            hardware(next(original.model.parameters()).device),
        ]
    )
    path = output / LATENCY_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return _BENCH.validate_python(stored["bench"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        pass  # nothing that can be used: it is measured
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
    """A model as large as the one in ``directory``, with random weights."""
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
) -> None:
    """Remove weights that are not to be kept; config, plan and measurements stay."""
    if recipe.keep == "all":
        return
    fronts = frame[[name for name in frame.columns if name.startswith("front_")]]
    on_front = set(frame["id"][fronts.any(axis=1)]) if recipe.keep == "front" else set()
    for point in done:
        if point.id not in on_front:
            for path in checkpoint_of(output, point).glob("*.safetensors"):
                path.unlink()
