"""``tscompress evaluate`` and ``compare``: scores of models, and ratios of scores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tscompress.cli.console import integers, path, progress_bars, refuse, say_note, say_series, show
from tscompress.cli.options import (
    AsJson,
    BatchSize,
    CrossLearning,
    Device,
    Dtype,
    Force,
    Margin,
    Revision,
    Samples,
)
from tscompress.cli.series_options import (
    COLUMN_OPTIONS,
    NOTHING_SAID,
    SeriesOptions,
    with_series_options,
)
from tscompress.errors import UsageError
from tscompress.progress import silent

if TYPE_CHECKING:
    from tscompress.data.suites import Suite
    from tscompress.evaluation.results import EvaluationResult
    from tscompress.evaluation.score_cache import ScoreCache
    from tscompress.workflows.evaluate_models import EvaluatedModels, Scored
    from tscompress.workflows.recipe import EvaluationConfig

_WINDOW_OPTIONS = ("windows", "seasonality")
_LONG_FORMAT_OPTIONS = (*_WINDOW_OPTIONS, *COLUMN_OPTIONS)
SuiteName = Annotated[
    str,
    typer.Option(
        help="offline, offline-frequencies, covariates, zero-shot, in-domain, a YAML file, or a "
        "file of series (with --horizon)."
    ),
]
Horizon = Annotated[int | None, typer.Option(help="Of a file of series: steps to forecast.", min=1)]
Windows = Annotated[
    int, typer.Option(help="Of a file of series: windows to forecast, up to its end.", min=1)
]
Seasonality = Annotated[
    int | None, typer.Option(help="Of a file of series: steps in a season, for MASE.", min=1)
]
Datasets = Annotated[list[str] | None, typer.Option(help="Only this dataset; repeatable.")]
FirstSeries = Annotated[
    int | None, typer.Option(help="Only the first N series of each dataset.", min=1)
]
AsUnivariate = Annotated[
    bool,
    typer.Option("--as-univariate", help="No series sees another; covariates are not read."),
]
SortQuantiles = Annotated[bool, typer.Option("--sort-quantiles", help="Before they are scored.")]
Root = Annotated[
    Path | None, typer.Option(help="Local copy: ROOT/<dataset>/*.parquet.", parser=path)
]
Seeds = Annotated[
    str | None, typer.Option(help="0,1,2: average over several seeds, for less noise.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Do not reuse scores of earlier runs.")]

_SETTINGS = ("cross_learning", "as_univariate", "sort_quantiles")
#: Before a file of fev's tasks, as a suite's name.
_FEV = "fev:"
_NAIVE = "seasonal-naive"  # as evaluation.results has it, which is slow to import
#: What a result of seasonal naive does not depend on.
_OF_CHECKPOINTS = (
    "revision", "device", "dtype", "seed", "seeds", "num_samples", "batch_size", *_SETTINGS,
)  # fmt: skip
_FOR_MODELS = (
    "suite", "horizon", *_LONG_FORMAT_OPTIONS, "dataset", "max_series", "root", "batch_size",
    "seeds", "num_samples", *_SETTINGS, "no_cache", "device", "dtype",
)  # fmt: skip
_NOT_FOR_FEV = (
    "horizon", *_LONG_FORMAT_OPTIONS, "dataset", "max_series", "root", "seeds", "margin",
    "fidelity", "gift_eval", "sort_quantiles", "no_cache",
)  # fmt: skip


@with_series_options(hold_out=False)
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A MODEL, or seasonal-naive.")],
    against: Annotated[
        str | None, typer.Option(help="Compare with this model, or seasonal-naive.")
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="offline, offline-frequencies, covariates, zero-shot, in-domain, a YAML file, a "
            "file of series (with --horizon), or fev:FILE, a YAML file of fev's tasks."
        ),
    ] = "offline",
    horizon: Horizon = None,
    windows: Windows = 1,
    seasonality: Seasonality = None,
    files: SeriesOptions = NOTHING_SAID,
    dataset: Datasets = None,
    max_series: FirstSeries = None,
    root: Root = None,
    batch_size: BatchSize = "32",
    seed: Annotated[int, typer.Option(help="Of the sample paths of Chronos-T5.")] = 0,
    seeds: Seeds = None,
    num_samples: Samples = None,
    cross_learning: CrossLearning = False,
    as_univariate: AsUnivariate = False,
    sort_quantiles: SortQuantiles = False,
    margin: Margin = 0.005,
    fidelity: Annotated[
        bool,
        typer.Option("--fidelity", help="With --against: how forecasts changed; worst series."),
    ] = False,
    gift_eval: Annotated[
        bool, typer.Option("--gift-eval", help="Also write all_results.csv in GIFT-Eval's layout.")
    ] = False,
    no_cache: NoCache = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory for CSV and JSON, or FILE.json, for compare; of fev FILE.csv.",
            parser=path,
        ),
    ] = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure WQL and MASE on real series, relative to seasonal naive and to another model.

    Scores are cached below $TSCOMPRESS_CACHE, so a stopped run resumes. Several processes:
    torchrun --standalone --nproc_per_node 2 $(which tscompress) evaluate ...
    """
    from tscompress.evaluation.batching import Processes, parse_batch_size
    from tscompress.evaluation.comparison import check_comparison
    from tscompress.evaluation.gift_eval import GiftEvalResults
    from tscompress.workflows.claims import claimed_by_main
    from tscompress.workflows.evaluate_models import (
        check_evaluation,
        evaluate_models,
        save_evaluation,
    )

    if suite.startswith(_FEV):
        refuse(context, "fev's tasks define what is forecast and scored", _NOT_FOR_FEV)
        _evaluate_fev(context)
        return
    processes = Processes()
    if processes.is_main and processes.count > 1:
        typer.echo(f"{processes.count} processes share the batches", err=True)
    inputs = model, against, suite, root
    if output is not None:
        check_evaluation(output, gift_eval=gift_eval, force=force, inputs=inputs)
    if fidelity and against is None:
        raise UsageError("--fidelity needs another model; give --against.")
    if against is None:
        refuse(context, "there is no --against", ("margin",))
    else:
        check_comparison(2, margin=margin)
    if gift_eval and (output is None or output.suffix == ".json"):
        raise UsageError("--gift-eval writes files; give a directory with --output.")
    config = _evaluation_config(context, files, batch_size=parse_batch_size(batch_size), seed=seed)
    _refuse_ignored(context, model, against)
    _read_suite(config, processes.is_main)
    context.with_resource(claimed_by_main(output))
    cache = None if no_cache else _own_cache()
    layout = GiftEvalResults() if gift_eval else None
    scored = partial(_scored, device=processes.device(device), dtype=dtype)
    with progress_bars() as advance:
        evaluated = evaluate_models(
            config,
            scored(model, revision),
            None if against is None else scored(against, None),
            fidelity=fidelity,
            seeds=None if seeds is None else integers(seeds, "--seeds"),
            num_samples=num_samples,
            cache=cache,
            on_note=say_note if processes.is_main else lambda note: None,
            on_forecasts=layout,
            on_progress=advance if processes.is_main else silent,
        )
    processes.leave()
    if not processes.is_main:
        return
    _say_trouble(cache)
    if gift_eval or fidelity:
        _say_first_seed(evaluated.model)
    if output is not None:
        also = None if layout is None else partial(layout.save, result=evaluated.model, dtype=dtype)
        save_evaluation(output, evaluated, margin, also=also, force=force, inputs=inputs)
    show(as_json, _shown(evaluated, margin), *_tables(evaluated, margin))


def _own_cache() -> ScoreCache | None:
    """None where there is no home directory for it: scores are then computed again each time."""
    from tscompress.evaluation.batching import Processes
    from tscompress.evaluation.score_cache import ScoreCache

    try:
        return ScoreCache()
    except UsageError as error:
        if Processes().is_main:
            say_note(f"scores are not cached: {error}")
        return None


def _refuse_ignored(context: typer.Context, model: str, against: str | None) -> None:
    """Refuse one seed beside several, and what seasonal naive does not depend on."""
    if context.params["seeds"] is not None:
        refuse(context, "--seeds has every seed", ("seed",))
    if model == _NAIVE:
        refuse(context, f"{_NAIVE} is no checkpoint", ("revision",))
    if {model, against} <= {_NAIVE, None}:
        refuse(context, f"{_NAIVE} is no checkpoint", _OF_CHECKPOINTS)


def _say_first_seed(scored: EvaluationResult) -> None:
    """What is of one seed, where scores are means over several."""
    if scored.sampling is not None and len(scored.sampling.seeds) > 1:
        say_note(
            f"scores are means over {len(scored.sampling.seeds)} seeds; fidelity and "
            f"all_results.csv are of seed {scored.sampling.seeds[0]} alone."
        )


def _shown(evaluated: EvaluatedModels, margin: float) -> dict[str, Any]:
    """What ``--json`` prints: contributions of series are only for files."""
    content = evaluated.to_dict(margin)
    for key in ("result", "against"):
        for row in content.get(key, {}).get("rows", ()):
            row.pop("series", None)
            row.pop("series_names", None)
    return content


def _read_suite(config: EvaluationConfig, says: bool) -> Suite:
    """Refuse an unknown suite before a model is loaded; describe a file of series."""
    from tscompress.data.suites import find_suite, load_suite

    found = find_suite(config.suite, config.long_format)
    if config.long_format is not None:
        (read,) = load_suite(found, config.max_series)
        if says:
            say_series(read.summary)
    return found


def _evaluation_config(
    context: typer.Context, files: SeriesOptions, **sampling: Any
) -> EvaluationConfig:
    """The evaluation config from the options of ``evaluate`` or ``compare``.

    ``sampling`` are the fields whose options mean something else in ``compare``, or are not there.
    """
    from tscompress.data.evaluation_sets import LongFormat
    from tscompress.data.suites import find_suite
    from tscompress.workflows.recipe import EvaluationConfig, validate

    given = context.params
    long_format = None
    if given["horizon"] is None:
        find_suite(given["suite"])  # a file of series says that it needs a horizon
        reason = f"suite {given['suite']!r} is no file of series"
        refuse(context, reason, _LONG_FORMAT_OPTIONS)
    else:
        names = ("horizon", *_WINDOW_OPTIONS)
        said = {name: given[name] for name in names if given[name] is not None}
        long_format = validate(LongFormat, {**said, **files.said}, source="the options")
    fields = {
        "suite": given["suite"],
        "long_format": long_format,
        "datasets": tuple(given["dataset"]) if given["dataset"] else None,
        "max_series": given["max_series"],
        "root": None if given.get("root") is None else str(given["root"]),
        **{name: given[name] for name in _SETTINGS},
        **sampling,
    }
    return validate(EvaluationConfig, fields, source="the options")


def _scored(name: str, revision: str | None, device: str, dtype: str) -> Scored:
    from tscompress.checkpoints.given import loaded_of

    if name == _NAIVE:
        return "seasonal-naive"
    return partial(loaded_of, name, device=device, dtype=dtype, revision=revision)


def _tables(evaluated: EvaluatedModels, margin: float) -> list[object]:
    """Tables of scores, of the comparison with the other model, and of fidelity."""
    from tscompress.evaluation.tables import comparison_tables, evaluation_table, fidelity_tables

    model, naive, against = evaluated.model, evaluated.naive, evaluated.against
    table = evaluation_table(
        model,
        against=None if against is naive else against,
        baseline=None if model is naive else naive,
    )
    shown: list[object] = [table]
    comparison = evaluated.comparison(margin)
    if comparison is not None:
        shown += [*comparison_tables(comparison), "\n".join(comparison.lines())]
    if evaluated.fidelity is not None:
        shown += fidelity_tables(evaluated.fidelity)
    return shown


def _evaluate_fev(context: typer.Context) -> None:
    """``evaluate`` with a suite of fev's tasks."""
    from tscompress.evaluation.batching import Processes, parse_batch_size
    from tscompress.evaluation.fev_tasks import summaries_table
    from tscompress.workflows.claims import claimed_by_main
    from tscompress.workflows.evaluate_fev import check_summaries, evaluate_fev, save_summaries

    given = context.params
    tasks = given["suite"].removeprefix(_FEV)
    against = [] if given["against"] is None else [(given["against"], None)]
    models = dict.fromkeys([(given["model"], given["revision"]), *against])
    batch_size = parse_batch_size(given["batch_size"])
    output, force = given["output"], given["force"]
    inputs = tasks, *(name for name, _ in models)
    if output is not None:
        check_summaries(output, force=force, inputs=inputs)
    context.with_resource(claimed_by_main(output))
    processes = Processes()
    scored = partial(_scored, device=processes.device(given["device"]), dtype=given["dtype"])
    with progress_bars() as advance:
        summaries = evaluate_fev(
            tasks,
            [scored(name, at) for name, at in models],
            batch_size=batch_size,
            seed=given["seed"],
            num_samples=given["num_samples"],
            cross_learning=given["cross_learning"],
            as_univariate=given["as_univariate"],
            on_progress=advance,
            on_note=say_note if processes.is_main else lambda note: None,
        )
    processes.leave()
    if not processes.is_main:
        return
    if output is not None:
        save_summaries(output, summaries, force=force, inputs=inputs)
    show(given["as_json"], {"summaries": summaries}, summaries_table(summaries))


@with_series_options(hold_out=False)
def compare(
    context: typer.Context,
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULTS...",
            help="Outputs of evaluate --output, MODELS, or seasonal-naive; the first is the "
            "reference. Models are scored.",
        ),
    ],
    suite: SuiteName = "offline",
    horizon: Horizon = None,
    windows: Windows = 1,
    seasonality: Seasonality = None,
    files: SeriesOptions = NOTHING_SAID,
    dataset: Datasets = None,
    max_series: FirstSeries = None,
    root: Root = None,
    batch_size: BatchSize = "32",
    seeds: Seeds = None,
    num_samples: Samples = None,
    cross_learning: CrossLearning = False,
    as_univariate: AsUnivariate = False,
    sort_quantiles: SortQuantiles = False,
    margin: Margin = 0.005,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    resamples: Annotated[int, typer.Option(help="Of the series, for the intervals.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 0,
    no_cache: NoCache = False,
    output: Annotated[
        Path | None, typer.Option(help="Directory for ratios.csv and series.csv.", parser=path)
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Print ratios of WQL and MASE to the first result, with confidence intervals and a verdict.

    A single result is compared with the one of --against in the same file.
    """
    from tscompress.evaluation.batching import Processes
    from tscompress.evaluation.comparison import series_frame
    from tscompress.evaluation.results import SCORES_FILE
    from tscompress.evaluation.tables import comparison_tables
    from tscompress.io.files import check_output, new_directory, write_text_atomically
    from tscompress.workflows.claims import claimed_by_main
    from tscompress.workflows.evaluate import compare as compare_all
    from tscompress.workflows.evaluate import is_model

    Processes().check_alone("compare")
    places = [path(given) for given in results]
    inputs = [file if (file := given / SCORES_FILE).is_file() else given for given in places]
    inputs += [] if root is None else [root]
    names = "ratios.csv", "series.csv"
    if output is not None:
        check_output(output, force=force, inputs=inputs, writes=names)
    if not any(map(is_model, results)):
        refuse(context, "these are results already", _FOR_MODELS)
        evaluation = {}
    else:
        evaluation = _evaluation_options(context, files)
    context.with_resource(claimed_by_main(output))
    found: list[EvaluationResult] = []
    with progress_bars() as advance:
        if evaluation:
            evaluation["on_progress"] = advance
        comparison = compare_all(
            results,
            margin=margin,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
            on_result=found.append,
            **evaluation,
        )
    _say_trouble(evaluation.get("cache"))
    if output is not None:
        tables = comparison.frame(), series_frame(found)
        with new_directory(output, force=force, writes=names, inputs=inputs) as directory:
            for name, frame in zip(names, tables, strict=True):
                text = frame.to_csv(index=False, lineterminator="\n")
                write_text_atomically(directory / name, text)
    show(
        as_json,
        comparison.to_dict(),
        *comparison_tables(comparison),
        "\n".join(comparison.lines()),
    )


def _evaluation_options(context: typer.Context, files: SeriesOptions) -> dict[str, Any]:
    """Options of ``compare`` for the models among its arguments."""
    from tscompress.evaluation.batching import parse_batch_size

    given = context.params
    config = _evaluation_config(context, files, batch_size=parse_batch_size(given["batch_size"]))
    seeds = {} if given["seeds"] is None else {"seeds": integers(given["seeds"], "--seeds")}
    return {
        "suite": _read_suite(config, says=True),
        "datasets": config.datasets,
        "max_series": config.max_series,
        "root": config.root,
        "batch_size": config.batch_size,
        **seeds,
        "num_samples": given["num_samples"],
        **{name: getattr(config, name) for name in _SETTINGS},
        "cache": None if given["no_cache"] else _own_cache(),
        "device": given["device"],
        "dtype": given["dtype"],
        "on_note": say_note,
    }


def _say_trouble(cache: ScoreCache | None) -> None:
    if cache is not None and cache.trouble:
        say_note(f"scores are not cached: {cache.trouble}")
