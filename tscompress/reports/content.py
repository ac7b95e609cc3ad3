"""Content of a report of a run, as plain data: sentences, rows and ratios; pages lay it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tscompress.errors import UsageError
from tscompress.evaluation.comparison import (
    Comparison,
    ModelComparison,
    Ratio,
    check_contributions,
    compare_results,
)
from tscompress.evaluation.results import (
    MEASURES,
    METRICS,
    EvaluationResult,
    relative_or_none,
    series_text,
)
from tscompress.io.text import numbered, percent
from tscompress.plan.plan import Plan
from tscompress.probing.results import ProbeComparison, shared_tasks
from tscompress.profiling.rank_profile import RankProfile
from tscompress.reports.costs import Cost, cost_note, cost_rows
from tscompress.reports.exported import (
    ExportedRow,
    exported_comparison,
    exported_note,
    exported_point,
    exported_rows,
)
from tscompress.reports.points import TABLE_SUFFIX, Point, check_table_is_of, table_points
from tscompress.reports.terms import MEANINGS, spelled_out
from tscompress.reports.verdict import Verdict, make_verdict
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.run import RunResult
from tscompress.workflows.run_files import (
    have_same_weights,
    is_same_original,
    load_run,
    read_provenance,
)


class QualityRow(NamedTuple):
    """Both models on one dataset; pairs are original, compressed."""

    dataset: str
    series: str
    wql: tuple[float, float]
    mase: tuple[float, float]
    wql_ratio: Ratio
    mase_ratio: Ratio


class Tile(NamedTuple):
    """One number at a glance."""

    label: str
    ratio: float
    change: str
    note: str = ""


class RankRow(NamedTuple):
    """ε-ranks of the projections of one attention block and the feed-forward behind it."""

    kind: str
    depth: int
    cells: tuple[RankCell | None, ...]
    kept: str


class RankCell(NamedTuple):
    """Shares of the full rank in per cent, in the order of the profile's ε."""

    percents: tuple[int, ...]
    tip: str


class Missing(NamedTuple):
    """A part of the report without data, and how to get it."""

    title: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """Content of a page about a run.

    Attributes
    ----------
    comparison
        Compressed against original; None where the run evaluated nothing.
    points
        Of the Pareto figure; the original first.
    calibration
        Sentences on coverage and crossing quantiles, and on settings of the evaluation.
    """

    result: RunResult
    recipe: Recipe
    verdict: Verdict
    comparison: Comparison | None
    naive: dict[str, Any] | None
    provenance: dict[str, Any] | None
    points: tuple[Point, ...] = ()
    missing: tuple[Missing, ...] = ()
    quality: tuple[QualityRow, ...] = ()
    calibration: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()
    cost_note: str = ""
    findings: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = field(default=())
    probe: ProbeComparison | None = None
    exported: tuple[ExportedRow, ...] = ()
    exported_note: str = ""
    exported_comparison: ModelComparison | None = None


def make_report(result: RunResult, recipe: Recipe, others: Sequence[str | Path] = ()) -> Report:
    """Sentences and rows from the measurements of a run.

    Parameters
    ----------
    others
        Directories of more runs with the same original, or tables of models that ``sweep`` or
        ``eval/peers.py`` wrote, for the Pareto figure.

    Raises
    ------
    UsageError
        One of ``others`` is not a run, or is of another model or on other series.
    DataError
        A score is not finite, or a file cannot be read.
    """
    if result.probes is not None:  # a model that reads no covariates skipped their tasks
        original, compressed = result.probes
        shared = shared_tasks(original, compressed), shared_tasks(compressed, original)
        result = replace(result, probes=shared)
    comparison = naive = None
    if result.original is not None and result.compressed is not None:
        comparison = compare_results([result.original, result.compressed])
    if result.compressed is not None and result.baseline is not None:
        naive = relative_or_none(result.compressed, result.baseline)
    costs = tuple(cost_rows(result.bench))
    graph = exported_comparison(result)
    return Report(
        result=result,
        recipe=recipe,
        verdict=_verdict(result, recipe, comparison),
        comparison=comparison,
        naive=naive,
        provenance=read_provenance(result.checkpoint),
        points=tuple(_points(result, recipe, comparison, others)),
        missing=tuple(_missing(result)),
        quality=tuple(_quality_rows(result, comparison)),
        calibration=tuple(_calibration(result)),
        costs=costs,
        cost_note=cost_note(result.bench),
        findings=() if result.profile is None else tuple(result.profile.findings()),
        tiles=tuple(_tiles(result, comparison, naive, costs)),
        probe=_probe(result),
        exported=tuple(exported_rows(result, comparison, graph)),
        exported_note=exported_note(result),
        exported_comparison=graph,
    )


# --------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------


def verdict_of(result: RunResult, recipe: Recipe) -> Verdict:
    """What a run found, in plain words."""
    comparison = None
    if result.original is not None and result.compressed is not None:
        comparison = compare_results([result.original, result.compressed])
    return _verdict(result, recipe, comparison)


def texts(report: Report) -> tuple[str, str]:
    """The verdict, and what the metrics of the page mean; each is spelled out once."""
    meanings = "" if report.comparison is None else " ".join(MEANINGS)
    verdict, meanings = spelled_out([report.verdict.sentence, meanings])
    return verdict, meanings


def _verdict(result: RunResult, recipe: Recipe, comparison: Comparison | None) -> Verdict:
    evaluation = recipe.evaluation
    return make_verdict(
        result.plan,
        comparison=comparison,
        original=result.original,
        fidelity=result.fidelity,
        own_series=evaluation is not None and evaluation.long_format is not None,
        bench=result.bench,
        probe=_probe(result),
    )


def _probe(result: RunResult) -> ProbeComparison | None:
    if result.probes is None:
        return None
    original, compressed = result.probes
    return compressed.against(original)


def plan_label(plan: Plan) -> str:
    """The sizes in a few words."""
    sizes = plan.uniform_sizes
    width = "" if plan.width is None else f"d_model {plan.width.kept}, "
    if plan.kept_layers:
        counts = " + ".join(str(len(kept)) for kept in plan.kept_layers.values())
        width = f"{counts} {'layer' if counts == '1' else 'layers'}, {width}"
    if sizes is not None:
        return f"fold, {width}d_kv {sizes[0]}, d_ff {sizes[1]}"
    tokens = "" if plan.embedding is None else f", embedding of {plan.embedding.text}"
    return f"{plan.method}, {width}attention {percent(plan.attention_parameter_ratio, 0)}{tokens}"


def _missing(result: RunResult) -> Iterable[Missing]:
    again = "run `tscompress run` again with --force"
    if result.compressed is None:
        yield Missing(
            "Forecast quality and forecasts",
            f"were not measured: give the recipe a section `evaluation:` and {again}.",
        )
    elif result.fidelity is None or not result.examples:
        yield Missing(
            "Forecasts and fidelity",
            f"were not kept by the version of tscompress that wrote this run: {again}.",
        )
    if result.probes is None:
        yield Missing(
            "Skill at known processes",
            f"was not measured: give the recipe a section `probe:` and {again}.",
        )
    if result.bench is None:
        yield Missing(
            "Latency and memory",
            f"were not measured: give the recipe a section `bench:` and {again}.",
        )
    if result.profile is None:
        yield Missing(
            "Ranks", f"were not measured: give the recipe a section `profile:` and {again}."
        )


# --------------------------------------------------------------------------------------------------
# Quality and cost
# --------------------------------------------------------------------------------------------------


def _quality_rows(result: RunResult, comparison: Comparison | None) -> Iterable[QualityRow]:
    if comparison is None or result.original is None or result.compressed is None:
        return
    ours = {row.dataset: row for row in result.compressed.rows}
    (model,) = comparison.models
    for dense, ratios in zip(result.original.rows, model.datasets, strict=True):
        small = ours[dense.dataset]
        yield QualityRow(
            dataset=dense.dataset,
            series=series_text(dense.series_count, dense.windows),
            wql=(dense.WQL, small.WQL),
            mase=(dense.MASE, small.MASE),
            wql_ratio=ratios.WQL,
            mase_ratio=ratios.MASE,
        )


def _calibration(result: RunResult) -> Iterable[str]:
    """How forecasts were made, and what their quantiles are worth."""
    before, after = result.original, result.compressed
    if before is None or after is None:
        return
    if after.settings is not None and (words := after.settings.words()):
        yield f"Both models were evaluated with these settings: {', '.join(words)}."
    pairs = [(before.mean_of(measure), after.mean_of(measure)) for measure in MEASURES]
    shown = [
        f"{percent(one, 1)} → {percent(other, 1)}"
        for one, other in pairs
        if one is not None and other is not None
    ]
    if len(shown) == len(MEASURES):
        yield (
            f"The 80% band covers {shown[0]} of the values, with a coverage error of {shown[1]}, "
            f"and {shown[2]} of neighbouring quantiles cross (means over the datasets)."
        )


def _tiles(
    result: RunResult,
    comparison: Comparison | None,
    naive: dict[str, Any] | None,
    costs: Sequence[Cost],
) -> Iterable[Tile]:
    if comparison is not None:
        (model,) = comparison.models
        for metric in METRICS[::-1]:
            beside = "" if naive is None else f"{naive[metric]:.3f} × seasonal naive"
            ratio: Ratio = getattr(model, metric)
            yield Tile(metric, ratio.ratio, beside, _interval(ratio.low, ratio.high))
    shown = list(costs)
    if not shown:  # the plan knows parameters without a bench
        parts = {
            "attention parameters": "attention",
            "feed-forward parameters": "feed_forward",
            "embedding parameters": "embedding",
        }
        of_kept = " of the kept layers" if result.plan.kept_layers else ""
        for label, part in parts.items():
            before, after = result.plan.parameters(part)
            if before:
                yield Tile(label + of_kept, after / before, f"{before:,} → {after:,}")
    for cost in shown:
        note = _interval(*cost.interval) if cost.interval else ""
        yield Tile(cost.label, cost.ratio, f"{cost.original} → {cost.compressed}", note)


def _interval(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"95%: {low:.3f} to {high:.3f}"


# --------------------------------------------------------------------------------------------------
# Cost against quality
# --------------------------------------------------------------------------------------------------


def _points(
    result: RunResult,
    recipe: Recipe,
    comparison: Comparison | None,
    others: Sequence[str | Path],
) -> Iterable[Point]:
    ours = _point(plan_label(result.plan), "compressed", result, comparison)
    if ours is None:
        if others:
            raise UsageError(
                "runs are compared by quality and cost, and this one measured only one of them; "
                "leave --compare out, or run it with evaluation and bench."
            )
        return
    same = dict.fromkeys(METRICS, Ratio(ratio=1.0, low=1.0, high=1.0))
    yield Point("original", "original", dict.fromkeys(ours.costs, 1.0), same)
    yield ours
    if (graph := exported_point(result)) is not None:
        yield graph
    taken: list[str] = []
    for path in map(Path, others):
        if path.suffix == TABLE_SUFFIX:
            check_table_is_of(path, recipe)
            yield from table_points(path, recipe.model)
        else:
            point = _other_point(path, result, recipe)
            taken.append(numbered(point.name, taken))
            yield point._replace(name=taken[-1])


def _point(name: str, kind: str, result: RunResult, comparison: Comparison | None) -> Point | None:
    if comparison is None or result.bench is None:
        return None
    (model,) = comparison.models
    costs = {cost.key: cost.ratio for cost in cost_rows(result.bench)}
    return Point(name, kind, costs, {metric: getattr(model, metric) for metric in METRICS})


def _other_point(directory: Path, result: RunResult, recipe: Recipe) -> Point:
    other, theirs = load_run(directory)
    if not is_same_original(theirs, recipe):
        raise UsageError(
            f"{str(directory)!r} compressed {theirs.model!r}, this run {recipe.model!r}; compare "
            "runs of the same original."
        )
    if not have_same_weights(other, result):
        raise UsageError(
            f"{str(directory)!r} compressed other weights of {recipe.model!r} than this run; "
            "compare runs of the same original."
        )
    point = None
    if other.original is not None and other.compressed is not None:
        if not _same_series(other.original, result.original):
            raise UsageError(
                f"{str(directory)!r} was evaluated on other series; use the same suite or file, "
                "datasets, max_series, horizon and windows."
            )
        if _settings(other.original) != _settings(result.original):
            raise UsageError(
                f"{str(directory)!r} was evaluated with "
                f"{' and '.join(_settings(other.original)) or 'no such settings'}, this run with "
                f"{' and '.join(_settings(result.original)) or 'none'}; evaluate both alike."
            )
        comparison = compare_results([other.original, other.compressed])
        name = directory.resolve().name
        point = _point(f"{name}: {plan_label(other.plan)}", "other", other, comparison)
    if point is None:
        raise UsageError(
            f"{str(directory)!r} measured no quality or no cost; run it with evaluation and bench."
        )
    return point


def _settings(scores: EvaluationResult | None) -> list[str]:
    return [] if scores is None or scores.settings is None else scores.settings.words()


def _same_series(other: EvaluationResult, ours: EvaluationResult | None) -> bool:
    """Whether two results are for the same labels, as far as these were kept."""
    if ours is None or _counts(other) != _counts(ours):
        return False
    try:
        check_contributions(ours, other)
    except UsageError:
        return False
    return True


def _counts(scores: EvaluationResult) -> dict[str, int]:
    return {row.dataset: row.series_count for row in scores.rows}


# --------------------------------------------------------------------------------------------------
# Ranks
# --------------------------------------------------------------------------------------------------


def rank_roles(profile: RankProfile) -> list[str]:
    """q, k, v, o and the feed-forward's, as far as there are weights of them."""
    return list(dict.fromkeys(weight.role for weight in profile.weights))


def rank_rows(profile: RankProfile, plan: Plan) -> list[RankRow]:
    """One row for each attention block, grouped by kind."""
    roles = rank_roles(profile)
    blocks: dict[tuple[str, int], dict[str, RankCell]] = {}
    for weight in profile.weights:
        percents = tuple(round(100 * share) for share in weight.spectrum.relative_ranks())
        ranks = zip(profile.epsilons, weight.spectrum.ranks, strict=True)
        lines = [f"{weight.name}, {weight.out_features} × {weight.in_features}"]
        lines += [f"ε = {e:g}: rank {rank} of {weight.spectrum.full_rank}" for e, rank in ranks]
        cell = RankCell(percents, "\n".join(lines))
        blocks.setdefault((weight.kind, weight.depth), {})[weight.role] = cell
    kept = _kept(profile, plan)
    kinds = list(dict.fromkeys(kind for kind, _ in blocks))
    return [
        RankRow(*block, tuple(cells.get(role) for role in roles), kept.get(block, ""))
        for block, cells in sorted(blocks.items(), key=lambda item: kinds.index(item[0][0]))
    ]


def _kept(profile: RankProfile, plan: Plan) -> dict[tuple[str, int], str]:
    """Share of the parameters of each attention block that the plan keeps.

    A profile names the layers of the original.
    """
    found: dict[tuple[str, int], str] = {}
    for weight in profile.weights:
        if weight.part != "attention":
            continue
        block = weight.name.rpartition(".")[0]
        if plan.drops_layer_of(block):
            found[weight.kind, weight.depth] = "dropped"
            continue
        layers, narrower = (
            [one for one in layers if f"{plan.name_before(one.name)}.".startswith(f"{block}.")]
            for layers in (plan.layers, plan.narrowed().layers)
        )
        before = sum(layer.dense_parameters for layer in layers)
        if before:
            share = sum(layer.parameters for layer in narrower) / before
            found[weight.kind, weight.depth] = percent(share, 1)
    return found
