"""The model card of a compressed checkpoint: ``README.md``, with metadata that the Hub reads.

Everything in it comes from files: plan, recipe, provenance and the header of the weights; scores
and latencies where they were measured. What is not known is left out or said to be unknown.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import jinja2
import pandas as pd
import pydantic
import yaml
from huggingface_hub import (
    EvalResult,
    ModelCard,
    ModelCardData,
    hf_hub_download,
    try_to_load_from_cache,
)
from safetensors import safe_open

from tscompress.data import SUFFIXES
from tscompress.errors import (
    CorruptCheckpointError,
    DataError,
    HubError,
    OutputExistsError,
    UsageError,
    VerificationError,
)
from tscompress.evaluation import METRICS, SCORES_FILE, EvaluationResult, load_results, relative
from tscompress.factored import CONFIG_FILE, PLAN_FILE, is_factored_config
from tscompress.files import sha256_of, user_path, write_text_atomically
from tscompress.loading import (
    PROVENANCE_FILE,
    REFERENCE_PREFIX,
    read_config,
    stored_dtype,
    weight_files,
)
from tscompress.network import bounded_requests, is_repo_id, network_errors
from tscompress.plan import Plan
from tscompress.pretraining import PRETRAIN_FILE, PretrainRecipe
from tscompress.readers import (
    UnreadableFileError,
    first_problem,
    read_json,
    regular_file,
    single_line,
)
from tscompress.recipe import Recipe, load_pretrain_recipe, load_recipe
from tscompress.serialization import RECIPE_FILE
from tscompress.statistics import compare

CARD_FILE = "README.md"
TASK = "time-series-forecasting"
_MARK = "<!-- written by tscompress: "
_LICENCE_KEYS = ("license", "license_name", "license_link")
_COMMIT = re.compile("[0-9a-f]{40}")
_MAX_CARD_BYTES = 2**20
#: Of recipes and of provenance.json, whose values may be paths of the machine they were made on.
_PATH_KEYS = (
    "model", "output", "source", "series", "suite", "root", "teacher", "embedding_from",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What was measured
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardScore:
    """Scores on one dataset; ``original`` the uncompressed model's, with the same keys."""

    dataset: str
    scores: Mapping[str, float]
    original: Mapping[str, float] | None = None
    series: int | None = None


@dataclass(frozen=True)
class CardScores:
    """What the card says of forecast quality.

    Attributes
    ----------
    suite
        Name of the evaluation suite; None if the file does not tell.
    ratios
        WQL and MASE: geometric mean over the datasets of the ratio to the original.
    intervals
        95 % confidence interval of each ratio, where it was measured.
    model, against
        Names of the two models in the results; None where the file does not tell.
    """

    rows: tuple[CardScore, ...]
    suite: str | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    model: str | None = None
    against: str | None = None

    @classmethod
    def of(cls, result: EvaluationResult, original: EvaluationResult | None = None) -> CardScores:
        """Scores as :func:`tscompress.evaluate` gives them, next to those of the original.

        Raises
        ------
        UsageError, DataError
            The two were not evaluated on the same series, or a ratio is not finite.
        """
        theirs = {row.dataset: row for row in original.rows} if original is not None else {}
        rows = tuple(
            CardScore(
                row.dataset,
                {metric: getattr(row, metric) for metric in METRICS},
                {metric: getattr(theirs[row.dataset], metric) for metric in METRICS}
                if row.dataset in theirs
                else None,
                row.series_count,
            )
            for row in result.rows
        )
        if original is None:
            return cls(rows, result.suite, model=result.model)
        ratios = relative(result, original)
        return cls(
            rows,
            result.suite,
            {m: ratios[m] for m in METRICS},
            _intervals(result, original),
            result.model,
            original.model,
        )


def _intervals(
    result: EvaluationResult, original: EvaluationResult
) -> dict[str, tuple[float, float]]:
    """Confidence intervals of the ratios, where both results kept what each series adds."""
    if any(row.series is None for row in (*result.rows, *original.rows)):
        return {}
    (found,) = compare([original, result]).models
    ratios = {metric: getattr(found, metric) for metric in METRICS}
    return {m: (r.low, r.high) for m, r in ratios.items() if r.low is not None}


def read_scores(path: str | Path) -> CardScores:
    """Scores from JSON: ``EvaluationResult.to_dict()``, or ``scores.json`` of ``evaluate``.

    Raises
    ------
    DataError
        It is neither.
    UsageError
        The original was not evaluated on the same series.
    """
    return CardScores.of(*load_results(path))


_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class _BenchedWorkload(pydantic.BaseModel):
    batch_size: int
    context_length: int
    horizon: int
    device: str


class _BenchedModel(pydantic.BaseModel):
    name: str
    latency_ms: _Positive
    latency_p95_ms: _Amount | None = None
    macs: _Amount | None = None
    parameters: int | None = None
    kv_cache_bytes: _Amount | None = None
    peak_memory_bytes: _Amount | None = None
    ratios: dict[str, _Amount] = {}
    latency_ratio_interval: tuple[_Positive, _Positive] | None = None


class _Bench(pydantic.BaseModel):
    """What the card takes from the measurements of ``tscompress bench``."""

    workload: _BenchedWorkload
    threads: int
    device_name: str
    torch_version: str
    models: tuple[_BenchedModel, ...] = pydantic.Field(min_length=1)


def read_bench(path: str | Path) -> dict[str, Any]:
    """What ``tscompress bench --json`` printed.

    Raises
    ------
    DataError
        It is something else.
    """
    content = _read_json(Path(path))
    _parse_bench(content, repr(str(path)))
    return content


def _parse_bench(content: Mapping[str, Any], source: str) -> _Bench:
    try:
        return _Bench.model_validate(content)
    except pydantic.ValidationError as error:
        where, reason, _ = first_problem(error)
        raise DataError(
            f"{source} is not what `tscompress bench --json` prints: {where}: {reason}."
        ) from None


def scores_of_run(directory: Path, plan: Plan) -> CardScores | None:
    """Scores that ``tscompress run`` left above its checkpoint; None if there are none of it."""
    report = _report_of_run(directory, plan)
    if report is None:
        return None
    above = directory.resolve().parent
    if (above / SCORES_FILE).is_file():
        return read_scores(above / SCORES_FILE)
    try:
        ours, theirs = (
            pd.read_csv(above / name).set_index("dataset")
            for name in ("scores.csv", "scores-original.csv")
        )
        rows = tuple(
            CardScore(
                str(dataset),
                {metric: float(ours.loc[dataset, metric]) for metric in METRICS},
                {metric: float(theirs.loc[dataset, metric]) for metric in METRICS},
            )
            for dataset in ours.index
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ratios = report.get("relative") or {}
    evaluation = report["recipe"].get("evaluation") or {}
    return CardScores(rows, evaluation.get("suite"), {m: ratios[m] for m in METRICS if m in ratios})


def bench_of_run(directory: Path, plan: Plan) -> dict[str, Any] | None:
    """Latencies that ``tscompress run`` left above its checkpoint; None if there are none of it."""
    report = _report_of_run(directory, plan)
    bench = None if report is None else report.get("bench")
    if bench is not None:
        _parse_bench(bench, repr(str(directory.resolve().parent / "report.json")))
    return bench


def _report_of_run(directory: Path, plan: Plan) -> dict[str, Any] | None:
    """``report.json`` above ``directory``, if it tells of a checkpoint with this very plan."""
    path = directory.resolve().parent / "report.json"
    if not path.is_file():
        return None
    report = _read_json(path)
    same = report.get("plan") == plan.model_dump(mode="json")
    return report if same and isinstance(report.get("recipe"), dict) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {str(path)!r}.") from None
    except UnreadableFileError as error:
        raise DataError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{str(path)!r} is not a JSON object.")
    return content


def about_measurements(
    made: Made, repo_id: str, scores: CardScores | None, bench: Mapping[str, Any] | None
) -> list[str]:
    """What speaks against scores or latencies being of this checkpoint: a sentence each."""
    named = {"scores": None if scores is None else scores.model}
    named["latencies"] = None if bench is None else str(bench["models"][-1]["name"])
    ours = made.names(repo_id)
    return [
        f"the {what} are of a model called {name!r}; see that it is this one"
        for what, name in named.items()
        if name is not None and name.removesuffix(" (2)") not in ours
    ]


def _check_scores_are_of(made: Made, name: str, scores: CardScores) -> None:
    """Refuse scores of the original against this model.

    Raises
    ------
    UsageError
    """
    ours = made.names(name)
    if scores.against in ours and scores.model not in ours:
        raise UsageError(
            f"the scores are of {scores.model!r} against {scores.against!r}, the wrong way round; "
            "evaluate this model, with the original as --against."
        )


def _check_bench_is_of(made: Made, bench: _Bench) -> None:
    """Refuse latencies of a model with another number of parameters.

    Raises
    ------
    UsageError
    """
    first, last = bench.models[0], bench.models[-1]
    if last.parameters is None or last.parameters == made.parameters:
        return
    if first.parameters == made.parameters:
        raise UsageError(
            f"the latencies are of {last.name!r} against {first.name!r}, the wrong way round; "
            "bench this model, with the original as --against."
        )
    raise UsageError(
        f"the latencies are of {last.name!r}, which has {last.parameters:,} parameters; this "
        f"model has {made.parameters:,}: bench this one."
    )


# --------------------------------------------------------------------------------------------------
# What was done
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseModel:
    """The original of a compressed checkpoint.

    Attributes
    ----------
    source
        What ``compress`` was asked for: a Hub id, ``reference/...`` or a directory.
    hub_id, revision
        The Hub id and the commit; both None if it did not come from the Hub.
    """

    source: str
    hub_id: str | None
    revision: str | None

    @property
    def is_local(self) -> bool:
        """Whether others have no way to it: neither on the Hub nor shipped with tscompress."""
        return self.hub_id is None and not _is_shipped(self.source)

    @property
    def shown(self) -> str:
        """For people elsewhere: of a path on this machine only the name."""
        return _name_of(self.source) if self.is_local else self.source


@dataclass(frozen=True)
class Made:
    """What lies in the directory of a checkpoint that was compressed or pretrained.

    Attributes
    ----------
    plan
        None for a model pretrained with the same sizes everywhere.
    pretraining
        The recipe of a model trained from scratch; it has no ``base``.
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
        return is_factored_config(self.config)

    @property
    def family(self) -> str:
        return str(self.provenance["source"]["family"])

    def names(self, repo_id: str) -> Collection[str]:
        """What measurements may call it: the directory's name, or that of the repository."""
        return {self.directory.resolve().name, repo_id, repo_id.rpartition("/")[2]}

    @property
    def local_paths(self) -> list[str]:
        """Paths of this machine that recipe and provenance carry along."""
        recipes = [recipe.model_dump() for recipe in (self.recipe, self.pretraining) if recipe]
        found = set(_local_paths([self.provenance, *recipes]))
        if self.base is not None and self.base.shown != self.base.source:
            found.add(self.base.source)
        return sorted(found)

    @property
    def base(self) -> BaseModel | None:
        """The recipe knows the original even where what was recovered came from a directory."""
        if self.pretraining is not None:
            return None
        source = self.provenance["source"]
        found = (source["model"], source["revision"])
        if self.recipe is not None:
            found = (self.recipe.model, self.recipe.revision)
        name, revision = str(found[0]), found[1]
        if not _COMMIT.fullmatch(str(revision)) or not is_repo_id(name):
            return BaseModel(name, None, None)
        return BaseModel(name, name, str(revision))


def read_made(directory: str | Path) -> Made:
    """Read what :func:`tscompress.save` wrote beside the weights, and their header.

    Raises
    ------
    UsageError
        tscompress did not write this directory.
    CorruptCheckpointError
        A file is damaged.
    """
    directory = user_path(directory)
    _check_is_written(directory)
    plan, pretraining = directory / PLAN_FILE, directory / PRETRAIN_FILE
    provenance = _read_json(directory / PROVENANCE_FILE)
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
    return Made(
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
    """Refuse what tscompress did not write, and say what lies near it.

    Raises
    ------
    UsageError
    """
    shown = repr(str(directory))
    if directory.is_file():
        raise UsageError(f"{shown} is a file; give the directory that it is in.")
    if not directory.is_dir():
        if _is_shipped(str(directory)):
            raise UsageError(
                f"{shown} comes with tscompress; give a directory that compress, recover or run "
                "wrote, or the model of pretrain."
            )
        raise UsageError(f"there is no directory {shown}.")
    records = (PLAN_FILE, PRETRAIN_FILE)
    if (directory / PROVENANCE_FILE).is_file() and any((directory / n).is_file() for n in records):
        return
    below = sorted(path.parent for path in directory.glob(f"*/{PROVENANCE_FILE}"))
    if below:
        rest = f" (or another of {len(below)} in it)" if len(below) > 1 else ""
        raise UsageError(f"{shown} is no checkpoint; give {str(below[0])!r}{rest}.")
    raise UsageError(
        f"{shown} was not written by tscompress: it lacks {PROVENANCE_FILE} or {PLAN_FILE}; give "
        "what compress, recover or run wrote, or the model of pretrain."
    )


def _check_same_original(recipe: Recipe, provenance: Mapping[str, Any], directory: Path) -> None:
    """Hold the recipe against the provenance, which of a recovered model names the student.

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
            "restore what was written, or compress again."
        )


def _is_shipped(source: str) -> bool:
    """Whether it is one of the references of tscompress."""
    name = source.removeprefix(REFERENCE_PREFIX)
    if source == name or Path(name).name != name:
        return False
    return files("tscompress").joinpath(source).joinpath(CONFIG_FILE).is_file()


def _name_of(path: str) -> str:
    return Path(path).name or path


def _is_local_path(text: str) -> bool:
    """Whether a value of a recipe names a file or directory that others do not have.

    ``owner/name`` is on the Hub unless there is such a directory.
    """
    path = Path(text)
    if path.name == text or _is_shipped(text):
        return False
    return (
        text.startswith((".", "~"))
        or path.is_absolute()
        or len(path.parts) > 2
        or path.suffix.lower() in (*SUFFIXES, ".yaml", ".yml")
        or os.path.exists(text)  # noqa: PTH110  (Path raises for names that are too long)
    )


def _local_paths(record: Any, key: str = "") -> Iterator[str]:
    """Paths of this machine in plain data, at any depth."""
    if isinstance(record, Mapping):
        for name, value in record.items():
            yield from _local_paths(value, name)
    elif isinstance(record, list | tuple):
        for value in record:
            yield from _local_paths(value, key)
    elif key in _PATH_KEYS and isinstance(record, str) and _is_local_path(record):
        yield record


def _without_paths(record: Any, key: str = "") -> Any:
    """Plain data with the bare names of what :func:`_local_paths` finds."""
    if isinstance(record, Mapping):
        return {name: _without_paths(value, name) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [_without_paths(value, key) for value in record]
    local = key in _PATH_KEYS and isinstance(record, str) and _is_local_path(record)
    return _name_of(record) if local else record


def _stored_parameters(path: Path) -> int:
    with safe_open(path, framework="pt") as reader:
        shapes = [reader.get_slice(key).get_shape() for key in reader.keys()]  # noqa: SIM118
    return sum(math.prod(shape) for shape in shapes)


def licence_of(made: Made, *, fetch: bool = False) -> dict[str, str]:
    """The licence in the original's own card: keys of card metadata; empty if it cannot be known.

    A directory must still hold the very weights that were compressed. A Hub id's card is taken
    from the cache, or with ``fetch`` from the Hub.
    """
    base = made.base
    path: Path | None = None
    if base is None:
        return {}
    if base.hub_id is not None:
        path = _hub_card(base.hub_id, base.revision, fetch=fetch)
    elif base.source.startswith(REFERENCE_PREFIX):
        path = Path(str(files("tscompress").joinpath(base.source))) / CARD_FILE
    elif Path(base.source).is_dir():
        recorded = made.provenance["source"].get("sha256") or {}
        present = {file.name: sha256_of(file) for file in weight_files(Path(base.source))}
        path = (
            Path(base.source) / CARD_FILE
            if present and present.items() <= recorded.items()
            else None
        )
    if path is None:
        return {}
    try:
        card = ModelCard(_read_card(path), ignore_metadata_errors=True)
        metadata: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]
    except Exception:  # YAML of strangers: whatever is wrong with it, there is no licence to read
        return {}
    return {key: str(metadata[key]) for key in _LICENCE_KEYS if metadata.get(key)}


def _hub_card(repo_id: str, revision: str | None, *, fetch: bool) -> Path | None:
    cached = try_to_load_from_cache(repo_id, CARD_FILE, revision=revision)
    if isinstance(cached, str) or not fetch:
        return Path(cached) if isinstance(cached, str) else None
    try:
        with bounded_requests(10.0):
            return Path(hf_hub_download(repo_id, CARD_FILE, revision=revision))
    except HubError:  # asked to wait
        return None
    except network_errors():
        return None


# --------------------------------------------------------------------------------------------------
# The card
# --------------------------------------------------------------------------------------------------


def make_card(
    directory: str | Path,
    repo_id: str | None = None,
    *,
    scores: CardScores | None = None,
    bench: Mapping[str, Any] | None = None,
    licence: Mapping[str, str] | None = None,
) -> ModelCard:
    """The card of a checkpoint that :func:`tscompress.save` wrote.

    Parameters
    ----------
    repo_id
        Where it will be; the directory's name by default.
    scores, bench
        What was measured; by default what ``tscompress run`` left above the directory.
    licence
        ``license`` and perhaps ``license_name`` and ``license_link``; by default the original's,
        where its own card can be read without a network.

    Raises
    ------
    UsageError
        tscompress did not write this directory, or what was measured is not of it.
    CorruptCheckpointError, DataError, VerificationError
        A file in or above it is damaged, or is not what was written.
    """
    return card_of(read_made(directory), repo_id, scores=scores, bench=bench, licence=licence)


def measured_of(
    made: Made, scores: CardScores | None, bench: Mapping[str, Any] | None
) -> tuple[CardScores | None, Mapping[str, Any] | None]:
    """The measurements that were given, or else what ``tscompress run`` left."""
    if made.plan is not None:
        scores = scores if scores is not None else scores_of_run(made.directory, made.plan)
        bench = bench if bench is not None else bench_of_run(made.directory, made.plan)
    return scores, bench


def card_of(
    made: Made,
    repo_id: str | None = None,
    *,
    scores: CardScores | None = None,
    bench: Mapping[str, Any] | None = None,
    licence: Mapping[str, str] | None = None,
) -> ModelCard:
    """:func:`make_card` of a checkpoint whose records were read."""
    scores, bench = measured_of(made, scores, bench)
    licence = licence if licence is not None else licence_of(made)
    name = repo_id or made.directory.resolve().name
    costs = None if bench is None else _parse_bench(bench, "the bench")
    if scores is not None:
        _check_scores_are_of(made, name, scores)
    if costs is not None:
        _check_bench_is_of(made, costs)
    base = made.base
    how = "pretraining" if base is None or made.plan is None else made.plan.method
    data = ModelCardData(
        base_model=None if base is None else base.hub_id,
        library_name="tscompress" if made.factored else "chronos-forecasting",
        pipeline_tag=TASK,
        tags=["time-series", "forecasting", made.family,
              *([] if base is None else ["compression"]), "tscompress", how],
        model_name=name.rpartition("/")[2] if scores is not None else None,
        eval_results=_eval_results(scores) if scores is not None else None,
        **licence,  # type: ignore[arg-type]
    )  # fmt: skip
    shown = {
        "made": made,
        "name": name,
        "scores": scores,
        "bench": costs,
        "costs": [] if costs is None else _cost_rows(costs),
        "licence": licence.get("license_name") or licence.get("license"),
        "recipe": _shown_recipe(made),
        "bare": lambda source: _name_of(source) if _is_local_path(source) else source,
        "metrics": METRICS,
    }
    try:
        text = _template().render(shown)
    except (jinja2.UndefinedError, TypeError) as error:  # a record that lacks what it had
        raise CorruptCheckpointError(
            f"a record in or above {str(made.directory)!r} is incomplete: {error}."
        ) from None
    head = f"---\n{data.to_yaml()}\n---\n"
    return ModelCard(head + _mark(head + text) + "\n" + text)


def write_card(
    directory: str | Path,
    repo_id: str | None = None,
    *,
    scores: CardScores | None = None,
    bench: Mapping[str, Any] | None = None,
    licence: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write :func:`make_card` into the directory, but not over a card that a person wrote.

    Raises
    ------
    OutputExistsError
        ``README.md`` was written or changed by hand, and ``force`` is false.
    TscompressError
        As of :func:`make_card`.
    """
    path = user_path(directory) / CARD_FILE
    if card_by_hand(path, force=force) is not None:
        raise OutputExistsError(
            f"{str(path)!r} was written or changed by hand; keep it, or pass --force."
        )
    card = make_card(directory, repo_id, scores=scores, bench=bench, licence=licence)
    write_text_atomically(path, str(card))
    return path


def card_by_hand(path: Path, *, force: bool = False) -> str | None:
    """The text of a card that a person wrote or changed.

    None where there is none, where it is as :func:`write_card` left it, and with ``force``: then a
    new one may be written there.

    Raises
    ------
    OutputExistsError
        What is there is neither a card to push nor one to replace.
    """
    shown = repr(str(path))
    if path.is_dir() and not path.is_symlink():
        raise OutputExistsError(f"{shown} is a directory, where the card belongs; move it away.")
    if force or not os.path.lexists(path):
        return None
    if path.is_symlink():  # it may lead to anything on this machine
        raise OutputExistsError(f"{shown} is a link; put the file itself there, or pass --force.")
    try:
        text = _read_card(path)
    except UnreadableFileError as error:
        raise OutputExistsError(
            f"{shown} cannot be read as a card: {error}; mend it, or pass --force."
        ) from None
    return None if is_own_card(text) else text


def _read_card(path: Path) -> str:
    """UTF-8 text of a regular file, its line ends as they are."""
    regular_file(path, _MAX_CARD_BYTES)
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFileError(single_line(error)) from None


def is_own_card(text: str) -> bool:
    """Whether a card is as :func:`write_card` left it, to the letter."""
    found = re.search(rf"^({re.escape(_MARK)}\w+ -->)\n", text, flags=re.MULTILINE)
    return found is not None and _mark(text.replace(found[0], "", 1)) == found[1]


def _mark(content: str) -> str:
    """A comment with the hash of the card around it: an edit of any kind shows."""
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return f"{_MARK}{digest} -->"


def _eval_results(scores: CardScores) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=TASK,
            task_name="Time series forecasting",
            dataset_type=row.dataset,
            dataset_name=row.dataset,
            dataset_args=None if row.series is None else {"series": row.series},
            metric_type=metric.lower(),
            metric_name=metric,
            metric_value=round(row.scores[metric], 6),
        )
        for row in scores.rows
        for metric in METRICS
    ]


def _shown_recipe(made: Made) -> str | None:
    """Without paths of this machine: they tell others nothing."""
    if made.pretraining is not None:
        return _yaml(_without_paths(made.pretraining.model_dump(mode="json")))
    if made.recipe is None or made.base is None:
        return None
    content = _without_paths(made.recipe.model_dump(mode="json"))
    return _yaml(content | {"model": made.base.shown, "output": _name_of(made.recipe.output)})


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text


_COSTS = (
    ("latency_ms", "latency, median (ms)", 1.0),
    ("latency_p95_ms", "latency, p95 (ms)", 1.0),
    ("macs", "compute (GMAC)", 1e9),
    ("parameters", "parameters (M)", 1e6),
    ("kv_cache_bytes", "KV cache (MB)", 1e6),
    ("peak_memory_bytes", "peak memory (MB)", 1e6),
)


def _cost_rows(bench: _Bench) -> list[dict[str, Any]]:
    """Figures of the first model, the last one, and their ratio where two were measured."""
    first, last = bench.models[0], bench.models[-1]
    rows = []
    for key, label, unit in _COSTS:
        ours = getattr(last, key)
        if not ours:
            continue
        original = getattr(first, key) if first is not last else None
        spread = last.latency_ratio_interval if key == "latency_ms" else None
        rows.append(
            {
                "label": label,
                "original": None if original is None else original / unit,
                "compressed": ours / unit,
                "ratio": None if original is None else last.ratios.get(key),
                "interval": None if original is None else spread,
            }
        )
    return rows


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(_TEMPLATE)


_TEMPLATE = """\

# {{ name.rpartition("/")[2] }}

{% set base = made.base %}
{% set against = " --against " + base.shown if base else "" %}
{% if not base %}
Trained from scratch by tscompress {{ made.provenance.tscompress }}: \
{{ "{:,}".format(made.parameters) }} parameters, {{ "%.1f"|format(made.bytes_on_disk / 1e6) }} MB \
in {{ made.dtype }}.
{% else %}
`{{ base.shown }}`{% if base.is_local %}, a local model{% endif %}\
{% if base.revision %} at commit `{{ base.revision[:12] }}`{% endif %}, made \
smaller by tscompress {{ made.provenance.tscompress }}: {{ "{:,}".format(made.parameters) }} \
parameters, {{ "%.1f"|format(made.bytes_on_disk / 1e6) }} MB in {{ made.dtype }}.
{% endif %}
{% if made.plan %}

```text
{{ made.plan.summary() }}
```
{% endif %}

## How to load it

{% if made.factored %}
Its layers have sizes of their own or two factors, so it needs tscompress and one import; \
without it, stock chronos refuses it with an error.

```python
import tscompress.pipelines
from chronos import BaseChronosPipeline

pipeline = BaseChronosPipeline.from_pretrained("{{ name }}")
```
{% else %}
It is a plain checkpoint: unmodified `chronos-forecasting` loads it.

```python
import torch
from chronos import BaseChronosPipeline

pipeline = BaseChronosPipeline.from_pretrained("{{ name }}")
quantiles, mean = pipeline.predict_quantiles(
    [torch.arange(48.0)], prediction_length=12, quantile_levels=[0.1, 0.5, 0.9]
)
```
{% endif %}

## Forecast quality

{% if scores %}
Last window of each series{% if scores.suite %}, suite `{{ scores.suite }}`{% endif %}, by the \
protocol of the Chronos benchmark; lower is better.
{% if scores.ratios %}
Geometric mean over the datasets of the ratio to the original\
{{ " (95 % interval)" if scores.intervals else "" }}: \
{% for metric in metrics %}{{ metric }} **{{ "%.4f"|format(scores.ratios[metric]) }}**\
{% if metric in scores.intervals %} ({{ "%.4f"|format(scores.intervals[metric][0]) }} to \
{{ "%.4f"|format(scores.intervals[metric][1]) }}){% endif %}{{ "" if loop.last else ", " }}\
{% endfor %}.
{% endif %}

| dataset | series |{% for metric in metrics %} {{ metric }} | original | ratio |{% endfor %}

|---|--:|{% for metric in metrics %}--:|--:|--:|{% endfor %}

{% for row in scores.rows %}
| {{ row.dataset }} | {{ "–" if row.series is none else row.series }} |\
{% for metric in metrics %} {{ "%.4f"|format(row.scores[metric]) }} |\
{% if row.original %} {{ "%.4f"|format(row.original[metric]) }} | \
{{ "%.4f"|format(row.scores[metric] / row.original[metric]) if row.original[metric] else "–" }} |\
{% else %} – | – |{% endif %}{% endfor %}

{% endfor %}
{% else %}
Not measured for this card. `tscompress evaluate {{ name }}{{ against }}` does.
{% endif %}

## Speed and memory

{% if bench %}
{{ bench.workload.batch_size }} series × {{ bench.workload.context_length }} steps, horizon \
{{ bench.workload.horizon }}, on {{ bench.workload.device }} ({{ bench.device_name }}, \
{{ bench.threads }} threads), torch {{ bench.torch_version }}\
{{ "; the models took turns in one process" if bench.models|length > 1 else "" }}.

| | original | this model | ratio |
|---|--:|--:|--:|
{% for row in costs %}
| {{ row.label }} | {{ "–" if row.original is none else "%.4g"|format(row.original) }} | \
{{ "%.4g"|format(row.compressed) }} | {{ "–" if row.ratio is none else "%.3f"|format(row.ratio) }}\
{% if row.interval %} ({{ "%.3f"|format(row.interval[0]) }}–{{ "%.3f"|format(row.interval[1]) }})\
{% endif %} |
{% endfor %}
{% else %}
Not measured for this card. `tscompress bench {{ name }}{{ against }}` does.
{% endif %}

## Limits

{% if base %}
- It is what the original is, with less of it: it inherits the original's limits and biases.
{% else %}
- It knows what the series below taught it{% if made.pretraining.embedding_from %}, and the \
embedding it began with{% endif %}; nobody else has looked at it yet.
{% endif %}
{% if made.provenance.calibration %}
- It was fitted to {{ made.provenance.calibration.series }} calibration series (source: \
`{{ bare(made.provenance.calibration.source) }}`). On series unlike those it \
may lose more than above.
{% endif %}
{% if not scores %}
- Nothing is said here about {{ "the forecast quality that the compression cost" if base \
else "its forecast quality" }}.
{% elif base and not scores.ratios %}
- Its scores stand alone here: the original was not evaluated beside it.
{% endif %}
{% if bench %}
- Latencies hold for the hardware and the workload that they were measured with.
{% endif %}

## How it was made

{% if not base %}
`tscompress pretrain pretrain.yaml --output DIR`, with:

```yaml
{{ recipe }}```
{% elif recipe %}
`tscompress compress {{ base.shown }} --recipe recipe.yaml --output DIR`, with:

```yaml
{{ recipe }}```
{% else %}
From a plan made by hand: `plan.json` says every size; `tscompress compress {{ base.shown }} \
--plan plan.json` applies it.
{% endif %}

{% set recovery = made.provenance.recovery %}
{% if recovery %}
Afterwards it was distilled from the original; `provenance.json` says how.
{% endif %}
{% if made.provenance.libraries %}
Versions: {% for library, version in made.provenance.libraries.items() %}{{ library }} \
{{ version }}, {% endfor %}Python {{ made.provenance.python }}. `provenance.json` has the SHA-256 \
of these files{% if base %} and of the original's{% endif %}.
{% endif %}

## Licence

{% if licence %}
{{ licence }}{% if base %}, that of `{{ base.shown }}`{% endif %}.
{% elif not base %}
None was chosen: name one in the metadata of this card.
{% else %}
Not known: the card of `{{ base.shown }}` could not be read when this one was written. The \
original's licence applies.
{% endif %}
"""
