"""Tables 3 and 4 of the paper: models compressed before they are trained, beside the dense one.

    python eval/by_design.py --recipe recipes/pretrain/by-design-t5.yaml --reuse reference/t5
        --schedule 3,0.27 --schedule 5,0.35 --schedule 7,0.40 --size 64,0.5 --max-series 100
        --models results/by-design-t5 --output eval/results/by-design-t5 [--trained-only]

Of each schedule d_0, alpha a model with heads of size ceil(d_0 (1 + i)^alpha) at depth i is trained
from random weights on the very batches of the dense one, for as many steps; with `--reuse` another
that starts with the embedding of that trained model (Yu et al., 2025, Tables 3 and 4). Beside them
stands the dense one folded to the same sizes, without training, and last folded to each `--size`
(d_kv, d_ff and d_model as in fold.py), which leaves heads as they are. Ratios are to the dense one:
WQL, SQL and MASE on the offline suite with 95 % intervals (paired bootstrap over series), skill
kept (`tscompress probe`), parameters, and latency, for which all models take turns in one process.

Trainings go on where they stopped, and those that are done are not done again. They are meant for a
GPU; with `--trained-only` all must be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
from output import parser_of, write_tables
from pretrained import pretrained
from rich.console import Console
from testbed import RATIOS, WORKLOADS, Size, Testbed, as_stored, with_interval

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.checkpoints.load import LoadedModel
from tscompress.errors import TscompressError, UsageError
from tscompress.plan.schedules import PowerLawSchedule, parse_schedule
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.workflows.recipe import load_pretrain_recipe

DENSE, DESIGNED, REUSED, FOLDED = "dense", "by design", "embedding reused", "folded afterwards"


def recipes_of(
    dense: PretrainRecipe, schedules: Sequence[str], reuse: str | None
) -> dict[tuple[str, str], PretrainRecipe]:
    """Recipes of the dense model, of each schedule, and of each with an embedding reused.

    Keys are a kind of row and its schedule, as given.

    Raises
    ------
    UsageError
        A schedule is no power law.
    """
    found = {(DENSE, ""): dense}
    for text in schedules:
        designed = {"schedule": power_law(text), "name": f"{dense.family}-by-design-{text}"}
        found[DESIGNED, text] = dense.model_copy(update=designed)
        if reuse is not None:
            found[REUSED, text] = dense.model_copy(update=designed | {"embedding_from": reuse})
    return found


def power_law(text: str) -> PowerLawSchedule:
    """The schedule of ``d_0,alpha``.

    Raises
    ------
    UsageError
        It is none, or one of another kind.
    """
    found = parse_schedule(text)
    if not isinstance(found, PowerLawSchedule):
        raise UsageError(f"schedule is {text!r}; give d_0,alpha, such as 5,0.35.")
    return found


def directory_of(kind: str, schedule: str) -> str:
    """Name of a training below the models: ``dense``, ``5-0.35``, ``5-0.35-reused``."""
    if kind == DENSE:
        return kind
    return schedule.replace(",", "-") + ("-reused" if kind == REUSED else "")


def models_of(
    bed: Testbed, places: Mapping[tuple[str, str], Path], sizes: Sequence[Size]
) -> Iterator[tuple[tuple[str, str], LoadedModel]]:
    """Every model, in float32; after those of a schedule the dense one folded to its sizes."""
    schedules = dict.fromkeys(schedule for kind, schedule in places if kind != DENSE)
    yield (DENSE, ""), bed.original
    for schedule in schedules:
        for kind in (DESIGNED, REUSED):
            if (kind, schedule) in places:
                found = tscompress.load(str(places[kind, schedule]), dtype="float32")
                yield (kind, schedule), found
        folded = tscompress.compress(bed.model, schedule=schedule, calibration=bed.calibration)
        yield (FOLDED, schedule), as_stored(folded)
    for size in sizes:
        yield (f"folded, {size.label}", ""), bed.folded(size)


def measure(
    bed: Testbed,
    places: Mapping[tuple[str, str], Path],
    sizes: Sequence[Size],
    console: Console,
) -> pd.DataFrame:
    """A row for each model, relative to the dense one."""
    models = dict(models_of(bed, places, sizes))
    names = {key: ", ".join(filter(None, key)) for key in models}
    pipelines = {names[key]: model.forecaster for key, model in models.items()}
    times = bench(pipelines, WORKLOADS[bed.original.family], measure_macs=False)
    rows = []
    for (kind, schedule), name in names.items():
        ratios = times.ratios(name)
        low, high = times.latency_ratio_interval(name) or (float("nan"), float("nan"))
        quality = bed.original_row() if kind == DENSE else bed.row(pipelines[name], name)
        rows.append(
            {"schedule": schedule, "model": kind, "parameters": ratios["parameters"],
             "latency": ratios["latency_ms"], "latency low": low, "latency high": high, **quality}
        )  # fmt: skip
        console.print(f"{name}: WQL {quality['WQL']:.4f}, MASE {quality['MASE']:.4f}")
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it."""
    lines = [
        f"| d₀, α | | parameters | latency | {' | '.join(RATIOS)} | skill kept | own skill |",
        f"|---|---|--:|--:{'|--:' * (len(RATIOS) + 2)}|",
    ]
    for row in frame.to_dict("records"):
        if row["model"] == DENSE:
            ratios = ["1"] * (len(RATIOS) + 2)
        else:
            ratios = [with_interval(row, "latency", 2)]
            ratios += [with_interval(row, name) for name in RATIOS]
            ratios.append(with_interval(row, "skill", 3))
        lines.append(
            f"| {row['schedule']} | {row['model']} | {row['parameters']:.1%} | "
            f"{' | '.join(ratios)} | {row['own skill']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True)
    parser.add_argument("--recipe", type=Path, required=True, help="of the dense model")
    parser.add_argument("--models", type=Path, required=True, help="directory of trainings")
    parser.add_argument("--schedule", action="append", required=True, help="d_0,alpha")
    parser.add_argument("--size", action="append", default=[], type=Size.parse, help="also folded")
    parser.add_argument("--reuse", help="a trained model whose embedding to start from")
    parser.add_argument("--trained-only", action="store_true", help="train nothing")
    given = parser.parse_args()
    console = Console()
    try:
        dense = load_pretrain_recipe(given.recipe)
        recipes = recipes_of(dense, given.schedule, given.reuse)
        places = {
            key: pretrained(
                recipe, given.models / directory_of(*key), trained_only=given.trained_only
            )
            for key, recipe in recipes.items()
        }
        bed = Testbed(str(places[DENSE, ""]), given.max_series)
        frame = measure(bed, places, given.size, console)
    except TscompressError as error:
        parser.error(str(error))
    write_tables(given.output, frame, markdown(frame))
    console.print(markdown(frame), markup=False)


if __name__ == "__main__":
    main()
