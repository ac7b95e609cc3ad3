"""Is a larger model, compressed, better than the next smaller one?

    python eval/family.py --output eval/results/family-t5 --larger reference/t5 \\
        --smaller reference/t5-nano --max-series 100

The larger model, as it is and folded to several sizes, against a smaller one that a recipe of its
own trained from scratch: ratios of WQL, SQL and MASE on the offline suite with 95 % intervals
(paired bootstrap over series), of parameters, and of latency, for which all models take turns in
one process; skill against the best possible forecasts (`tscompress probe`), and the share of the
larger model's skill that is kept. No training after the cut; calibration on the default series.
"""

from __future__ import annotations

import pandas as pd
from output import parser_of, write_tables
from rich.console import Console
from testbed import (
    FRONT_SIZES,
    RATIOS,
    WORKLOADS,
    Testbed,
    quality,
    skills_kept,
    with_interval,
)

from tscompress.benchmark.bench import bench

SMALLER = "the smaller model"


def measure(larger: str, smaller: str, max_series: int | None) -> pd.DataFrame:
    """A row for the smaller model, the larger one and each of its folded ones."""
    bed, reference = Testbed(larger, max_series), Testbed(smaller, max_series)
    pipelines = {SMALLER: reference.original.forecaster, "as it is": bed.original.forecaster}
    pipelines |= {size.label: bed.folded(size).forecaster for size in FRONT_SIZES}
    times = bench(pipelines, WORKLOADS[reference.original.family], measure_macs=False)
    rows = []
    for name, pipeline in pipelines.items():
        low, high = times.latency_ratio_interval(name) or (float("nan"), float("nan"))
        ratios = times.ratios(name)
        skills = bed.probed(pipeline)
        scores = reference.scores if name == SMALLER else reference.score(pipeline, name)
        rows.append({
            "model": name,
            "parameters": ratios["parameters"],
            "latency": ratios["latency_ms"],
            "latency low": low,
            "latency high": high,
            **quality(scores, reference.scores, reference.datasets),
            "own skill": skills.overall().value,
            **skills_kept(skills, bed.skills),
        })  # fmt: skip
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; ratios to the smaller model, 95 % intervals."""
    lines = [
        f"| | parameters | latency | {' | '.join(RATIOS)} | own skill | share of the larger "
        "model's | of seasons |",
        f"|---|--:|--:{'|--:' * (len(RATIOS) + 3)}|",
    ]
    for row in frame.to_dict("records"):
        ratios = [with_interval(row, "latency", 2)]
        ratios += [with_interval(row, metric) for metric in RATIOS]
        if row["model"] == SMALLER:
            ratios = ["1"] * len(ratios)
        lines.append(
            f"| {row['model']} | {row['parameters']:.1%} | {' | '.join(ratios)} | "
            f"{row['own skill']:.3f} | {with_interval(row, 'skill', 3)} | "
            f"{with_interval(row, 'seasons', 3)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True)
    parser.add_argument("--larger", required=True, help="a directory or a name")
    parser.add_argument("--smaller", required=True, help="a directory or a name")
    arguments = parser.parse_args()
    frame = measure(arguments.larger, arguments.smaller, arguments.max_series)
    table = markdown(frame)
    write_tables(arguments.output, frame, table)
    Console().print(table, markup=False)


if __name__ == "__main__":
    main()
