"""The recipe: one YAML file that defines a compression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.locate import model_name
from tscompress.compression.calibration import OWN_SOURCES, CalibrationConfig
from tscompress.compression.fold_config import FoldConfig
from tscompress.data.competitions import OFFLINE_SUITE
from tscompress.data.evaluation_sets import LongFormat
from tscompress.data.fingerprints import Fingerprints, label_fingerprints
from tscompress.data.reading.format import GivenSeries, SeriesFormat
from tscompress.data.reading.summary import SeriesSummary
from tscompress.data.series import LabelledSeries, given_series, read_series
from tscompress.data.suites import (
    COVARIATES_SUITE,
    FREQUENCIES_SUITE,
    Suite,
    find_suite,
    load_suite,
)
from tscompress.data.synthetic import FloatArray
from tscompress.errors import RecipeError
from tscompress.evaluation.batching import DEFAULT_BATCH_SIZE, GivenBatchSize
from tscompress.exporting.graph import Precision
from tscompress.io.files import user_path
from tscompress.io.strict import Strict
from tscompress.io.untrusted import (
    UnreadableFileError,
    first_problem,
    key_problem,
    read_yaml,
    shown,
)
from tscompress.plan.plan import DROPS
from tscompress.plan.schedules import AnySchedule, Method, PlannedSchedule, RankSchedule
from tscompress.plan.width import Width
from tscompress.probing.measure import ProbeConfig
from tscompress.profiling.measure import DEFAULT_EPSILONS, SMALLEST_EPSILON
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.recovery_config import RecoveryConfig

#: Beyond all that a recipe can mean; more than seeds of 63 bits.
_LARGEST_NUMBER = 1e19
M = TypeVar("M", bound=BaseModel)


class EvaluationConfig(Strict):
    """Data and settings of an evaluation."""

    suite: str = "offline"
    long_format: LongFormat | None = Field(
        default=None, description="for a suite that is a file of series: horizon, columns, ..."
    )
    datasets: tuple[str, ...] | None = Field(default=None, description="null: the whole suite")
    max_series: int | None = Field(
        default=None, ge=1, le=10**9, description="first N series of each dataset"
    )
    batch_size: GivenBatchSize = Field(
        default=DEFAULT_BATCH_SIZE, description="auto: as many series as fit into free memory"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    root: str | None = Field(
        default=None, description="local copy of the datasets: <root>/<dataset>/*.parquet"
    )
    cross_learning: bool = Field(
        default=False, description="all series of a batch see one another; Chronos-2 alone"
    )
    as_univariate: bool = Field(
        default=False, description="no series sees another, and covariates are not read"
    )
    sort_quantiles: bool = Field(default=False, description="before they are scored")

    def selected(self) -> Suite:
        """The datasets; RecipeError: there is no such suite, or no such dataset in it."""
        return find_suite(self.suite, self.long_format).select(self.datasets)


class ProfileConfig(Strict):
    """Thresholds of the rank profile."""

    epsilons: tuple[Annotated[float, Field(ge=SMALLEST_EPSILON, lt=1)], ...] = Field(
        default=DEFAULT_EPSILONS, min_length=1, max_length=100
    )


class ExportConfig(Strict):
    """The ONNX graph of a compressed model."""

    precision: Precision = Field(default="float32", description="as `tscompress export` has them")


def with_columns(config: EvaluationConfig, form: GivenSeries) -> EvaluationConfig:
    """``config`` with the columns of ``form``, where it has none of its own."""
    if config.long_format is None:
        return config
    fields = SeriesFormat.model_fields.items()
    known = {
        name: getattr(form, name)
        for name, field in fields
        if getattr(config.long_format, name) == field.default
    }
    return config.model_copy(update={"long_format": config.long_format.model_copy(update=known)})


#: Fields of fold that need no schedule of head sizes.
SIZES_BESIDE_HEADS = ("ff_ratio", "latent", "embedding_rank", "width", "layers")


class Recipe(Strict):
    """A compression from the model to the output directory."""

    model: str
    revision: str | None = None
    output: str
    method: Method = "fold"
    schedule: AnySchedule | None = Field(
        default=RankSchedule(rank=16),
        description="also as text: rank=16, epsilon=0.1, or 5,0.35; null, with fold: heads stay, "
        "as they do beside other sizes unless it is given",
    )
    ff_ratio: float | None = Field(
        default=None, gt=0, le=1, description="share of hidden units that fold keeps; null: all"
    )
    latent: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="with fold: size of one latent for all cross-attention",
    )
    embedding_rank: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="with fold of a Chronos-T5: rank of the token embedding and the output head",
    )
    width: Width | None = Field(
        default=None,
        description="with fold: new d_model; an integer from 2 is dimensions, 0.5 a share",
    )
    layers: tuple[PositiveInt, ...] | None = Field(
        default=None, min_length=1, max_length=2,
        description="experimental, with fold: layers that stay, of the encoder and of the decoder",
    )  # fmt: skip
    fold: FoldConfig = FoldConfig()
    exclude: tuple[str, ...] = Field(
        default=(), description="shell patterns on layer names; a width slices these as well"
    )
    feed_forward: bool = Field(default=False, description="svd factors feed-forwards too")
    series: GivenSeries = Field(
        default=GivenSeries(), description="how files of series are written: columns, dates, ..."
    )
    calibration: CalibrationConfig = CalibrationConfig()
    recover: RecoveryConfig | None = Field(
        default=None, description="distil from the original afterwards; null: no training"
    )
    profile: ProfileConfig | None = Field(default=ProfileConfig(), description="null: skip it")
    evaluation: EvaluationConfig | None = Field(
        default=EvaluationConfig(), description="null: skip it"
    )
    probe: ProbeConfig | None = Field(
        default=None, description="skill of both models at known processes; null: skip it"
    )
    bench: Workload | None = Field(default=Workload(), description="null: skip it")
    export: ExportConfig | None = Field(
        default=None,
        description="the compressed model as an ONNX graph, scored and timed too; null: skip it",
    )

    @model_validator(mode="before")
    @classmethod
    def _heads_stay_beside_other_sizes(cls, values: Any) -> Any:
        """As of the command and of :func:`tscompress.compress`; runs after what is below."""
        if not isinstance(values, Mapping) or values.get("method", "fold") != "fold":
            return values
        fold = values.get("fold")
        given = [values.get(name) for name in SIZES_BESIDE_HEADS]
        given += [fold.get(name) or None for name in DROPS] if isinstance(fold, Mapping) else []
        given += [fold.dropped or None] if isinstance(fold, FoldConfig) else []
        if "schedule" in values or all(size is None for size in given):
            return values
        return {**values, "schedule": None}

    @model_validator(mode="before")
    @classmethod
    def _drops_are_options_of_fold(cls, values: Any) -> Any:
        """Recipes written before have ``univariate`` and ``single_token`` outside of ``fold``."""
        outside = [name for name in DROPS if isinstance(values, Mapping) and name in values]
        if not outside:
            return values
        kept = {name: value for name, value in values.items() if name not in outside}
        fold = kept.get("fold", {})
        if isinstance(fold, FoldConfig):
            fold = fold.model_dump(exclude_unset=True)
        if not isinstance(fold, Mapping):
            return kept  # refused by its own check
        twice = [name for name in outside if name in fold and fold[name] != values[name]]
        if twice:
            raise ValueError(f"{twice[0]} and fold.{twice[0]} differ; give fold.{twice[0]} alone")
        return {**kept, "fold": {**fold, **{name: values[name] for name in outside}}}

    @model_validator(mode="after")
    def _options_belong_to_the_method(self) -> Recipe:
        refusals = _fold_refusals(self) if self.method == "fold" else _factoring_refusals(self)
        for reason in refusals:
            raise ValueError(reason)
        return self

    @property
    def calibrates(self) -> bool:
        """Whether it fits the model to series."""
        sizes = (self.schedule, *(getattr(self, name) for name in SIZES_BESIDE_HEADS))
        alone = self.fold.dropped and all(size is None for size in sizes)
        return self.method != "svd" and not alone

    @property
    def names_series(self) -> bool:
        """Whether it calibrates, trains or is scored on a file of series."""
        scored = self.evaluation is not None and self.evaluation.long_format is not None
        trained = self.recover is not None and bool(self.recover.series)
        return self.calibration.source not in OWN_SOURCES or scored or trained

    @property
    def scored_on(self) -> EvaluationConfig | None:
        """What it is evaluated on; a file of series has the columns of ``series``."""
        return None if self.evaluation is None else with_columns(self.evaluation, self.series)

    def to_yaml(self) -> str:
        """The recipe as YAML, which :func:`load_recipe` reads."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


#: Fields that a budget of fold chooses, in the order of checks.
_CHOSEN_BY_A_BUDGET = {
    "ff_ratio": "a budget chooses the hidden units; give no ff_ratio with it",
    "latent": "a budget plans folded heads; give no latent with it",
    "embedding_rank": "a budget by layer chooses the rank of the embedding; give none with it",
    "layers": "a budget chooses the layers by depth: true; give no layers too",
    "exclude": "a budget considers every layer; give no exclude with it",
}
#: Fields that only fold has.
_OF_FOLD = {
    "ff_ratio": "ff_ratio is for fold; {method} has feed_forward",
    "latent": "latent is for fold; {method} factors each projection",
    "embedding_rank": "embedding_rank is for fold; {method} factors each projection",
    "width": "width is for fold; {method} factors each projection",
    "layers": "layers is for fold; {method} keeps all of them",
}


def _fold_refusals(recipe: Recipe) -> Iterator[str]:
    """Reasons why a recipe of fold is invalid."""
    schedule = recipe.schedule
    sizes = [getattr(recipe, name) for name in SIZES_BESIDE_HEADS]
    drops = recipe.fold.dropped
    if schedule is None and not drops and all(size is None for size in sizes):
        yield (
            "fold needs a schedule of head sizes, ff_ratio, latent, embedding_rank, width, layers, "
            "univariate or single_token"
        )
    if schedule is not None and schedule.kind == "budget":
        yield (
            "a budget for fold has a measure, such as "
            "{kind: planned, budget: {measure: parameters, ratio: 0.5}}"
        )
    if isinstance(schedule, PlannedSchedule):
        yield from _given(recipe, _CHOSEN_BY_A_BUDGET)
        yield from (
            f"a budget plans all attention; give sizes with {name} instead" for name in drops
        )
        if recipe.width is not None and (schedule.keep_width or schedule.depth):
            yield "a width with a budget says what d_model is; leave out keep_width and depth"
        if schedule.layout == "folded" and recipe.fold.frequencies == "free":
            yield "free frequencies make a factored checkpoint; give layout: factored with them"
    if recipe.layers is not None and recipe.exclude:
        yield "exclude cannot name layers before layers are dropped; leave it out, or edit the plan"
    if recipe.feed_forward:
        yield "fold sizes feed-forwards by ff_ratio; leave out feed_forward"


def _factoring_refusals(recipe: Recipe) -> Iterator[str]:
    """Reasons why a recipe of svd or activation-svd is invalid."""
    if recipe.schedule is None or recipe.schedule.kind in ("fit", "planned"):
        yield (
            f"{recipe.method} needs a schedule of kind epsilon, rank, energy, power-law or budget"
        )
    yield from _given(recipe, _OF_FOLD)
    for name in recipe.fold.dropped:
        yield f"{name} is for fold; {recipe.method} factors each projection"


def _given(recipe: Recipe, reasons: Mapping[str, str]) -> Iterator[str]:
    """The reasons for fields that the recipe has."""
    for name, reason in reasons.items():
        if getattr(recipe, name) not in (None, (), False):
            yield reason.format(method=recipe.method)


def load_recipe(
    path: str | Path, *, model: str | None = None, output: str | Path | None = None
) -> Recipe:
    """Read a compression recipe.

    Parameters
    ----------
    path
        A YAML file.
    model, output
        Replace those of the file. The file may then lack ``model``; its ``revision`` is ignored for
        another model. With ``model`` and no ``output`` the results are below the file's output, in
        a directory named after the model, so one recipe serves many models.

    Raises
    ------
    RecipeError
        The file is missing, is not YAML, or has an unknown key or a value out of range.
    """
    content = read_recipe(path)
    if model is not None:
        if content.get("model") not in (None, model):
            content.pop("revision", None)
        content["model"] = model
    if output is not None:
        content["output"] = str(output)
    for key in ("model", "output"):
        if key not in content:
            raise RecipeError(f"{str(path)!r}: {key}: missing; add it, or give --{key}.")
    recipe = validate(Recipe, content, source=repr(str(path)))
    if model is not None and output is None:
        below = Path(recipe.output) / Path(model_name(model)).name
        recipe = recipe.model_copy(update={"output": str(below)})
    return recipe


def load_pretrain_recipe(path: str | Path) -> PretrainRecipe:
    """Read a pretraining recipe; RecipeError as in :func:`load_recipe`."""
    return parse_recipe(PretrainRecipe, path)


def load_recovery_config(path: str | Path) -> RecoveryConfig:
    """Read the ``recover`` part of a recipe from its own file; raises as :func:`load_recipe`."""
    return parse_recipe(RecoveryConfig, path)


def parse_recipe(model: type[M], path: str | Path) -> M:
    """A YAML file as ``model``; RecipeError as in :func:`load_recipe`."""
    return validate(model, read_recipe(path), source=repr(str(path)))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, not validated yet.

    Raises
    ------
    RecipeError
        The file is missing, is not YAML, or holds no mapping.
    """
    path = user_path(path)
    try:
        content: Any = read_yaml(path)
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe at {str(path)!r}.") from None
    except UnreadableFileError as error:
        raise RecipeError(f"{str(path)!r} cannot be read as YAML: {error}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{str(path)!r} is not a mapping; see recipes/ for examples.")
    return content


def validate(model: type[M], content: dict[str, Any], source: str) -> M:
    """``content`` as ``model``; RecipeError names the first offending key."""
    try:
        found = model.model_validate(content)
        _refuse_odd_numbers(content, found, source)
        return found
    except ValidationError as error:
        where, reason, first = first_problem(error, content)
        if not where:  # a check of several keys: its message names them
            raise RecipeError(f"{source}: {reason}.") from None
        if problem := key_problem(where, first, model):
            raise RecipeError(f"{source}: {problem}.") from None
        raise RecipeError(f"{source}: {where}: {reason} (got {shown(first['input'])}).") from None


def _refuse_odd_numbers(content: Any, found: Any, source: str, where: str = "") -> None:
    """Refuse a yes for a number, which pydantic takes for 1, and numbers without bounds.

    ``found`` is what ``content`` was read as, and ``where`` its dotted key.

    Raises
    ------
    RecipeError
    """
    if isinstance(content, Mapping | list | tuple):
        parts = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in parts:
            below = f"{where}.{key}" if where else str(key)
            _refuse_odd_numbers(value, _part(found, key), source, below)
    elif isinstance(content, bool) and type(found) in (int, float):
        raise RecipeError(f"{source}: {where}: a number is needed (got {shown(content)}).")
    elif type(found) in (int, float) and not abs(found) < _LARGEST_NUMBER:
        raise RecipeError(
            f"{source}: {where}: a number below {_LARGEST_NUMBER:.0e} is needed "
            f"(got {shown(content)})."
        )


def _part(found: Any, key: Any) -> Any:
    if isinstance(found, BaseModel):
        return getattr(found, str(key), None)
    try:
        return found[key]
    except (KeyError, IndexError, TypeError):
        return None


def inputs_of(recipe: Recipe) -> list[str | Path | None]:
    """Inputs of a recipe: paths, and names such as Hub ids and suites."""
    source = recipe.calibration.source
    found = [recipe.model, *series_files(recipe.recover)]
    found += [] if source in OWN_SOURCES else [source]
    if recipe.probe is not None:
        found.append(recipe.probe.tasks_file)
    if recipe.evaluation is not None:
        found += [recipe.evaluation.suite, recipe.evaluation.root]
    return found


def calibration_series(
    recipe: Recipe, series: Sequence[FloatArray] | str | Path | None = None
) -> Sequence[FloatArray] | None:
    """What a recipe is calibrated on, where that is not its own: ``series``, or those of a file.

    Raises
    ------
    DataError
        They cannot be read.
    """
    source = recipe.calibration.source
    if series is None and source not in OWN_SOURCES:
        series = source
    if isinstance(series, str | Path):
        return read_series(series, recipe.series)
    return None if series is None else given_series(series)


def summary_of(series: Sequence[FloatArray] | None) -> SeriesSummary | None:
    """What was read, of series of a file."""
    return series.summary if isinstance(series, LabelledSeries) else None


def series_files(config: RecoveryConfig | None) -> list[str | Path | None]:
    """The sources of series of a recovery, including all files in directories."""
    found: list[str | Path | None] = []
    for source in () if config is None else config.series:
        directory = user_path(source)
        found += [source, *(directory.rglob("*") if directory.is_dir() else ())]
    return found


def labels_of(recipe: Recipe, *, given: bool = False) -> list[Fingerprints]:
    """What a recipe is scored on, where it may learn from that; the offline suites are known.

    Of the suites that have names, what wheels have in common with them is not offered anyway.
    ``given``: it learns from series besides its own.
    """
    config, trained = recipe.scored_on, recipe.recover.series if recipe.recover else ()
    if config is None:
        return []
    if config.root is None and config.suite in (OFFLINE_SUITE, FREQUENCIES_SUITE, COVARIATES_SUITE):
        return []
    from_files = given or trained or recipe.calibration.source not in OWN_SOURCES
    if not from_files and not Path(config.suite).suffix:
        return []
    suite = find_suite(config.suite, config.long_format)
    datasets = load_suite(suite, config.max_series, config.datasets, root=config.root)
    return [label_fingerprints(dataset) for dataset in datasets]
