"""Compressibility against training: the same cuts on the checkpoints of one training run.

    tscompress pretrain recipes/pretrain/bolt-nano.yaml --output results/bolt-nano
    python eval/compressibility.py --run results/bolt-nano
        --output eval/results/compressibility [--max-series 100] [--size 64,0.5,128]

Every checkpoint that the run kept (`snapshots` of its recipe), and the model at its end, is folded
without training to each size and compared with itself before folding: WQL and MASE on the offline
suite, and the share of its own skill that is kept. Beside them stand its own scores relative to
seasonal naive and its own skill, so that a cut that costs nothing can be told from a model that has
nothing to lose. Published models saw far more series than any of these: read where the lines point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from fold import rows, size_trials
from output import parser_of, rounded, write_tables
from rich.console import Console
from testbed import Size, Testbed, quality, with_interval

from tscompress.evaluation.results import METRICS, SEASONAL_NAIVE
from tscompress.plotting import GREY, MARKERS, PALETTE, legend_beside, new_figure, style_axes
from tscompress.workflows.evaluate_models import score


def halves(bed: Testbed) -> tuple[Size, ...]:
    """Half of the hidden units, the stream, the head size; then of two of them, of all three."""
    config = bed.original.model.config
    head, stream = int(config.d_kv), int(config.d_model) // 2
    return (
        Size(head, 0.5), Size(head, 1.0, stream), Size(head // 2), Size(head, 0.5, stream),
        Size(head // 2, 0.5, stream),
    )  # fmt: skip


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Steps and directory of every model that a training run kept, in order.

    Raises
    ------
    SystemExit
        The run is not finished, or kept nothing on its way.
    """
    kept = [(int(path.name.removeprefix("step-")), path) for path in run.glob("step-*")]
    if not kept or not (run / "model").is_dir():
        raise SystemExit(f"{run} is no finished run with snapshots; train its recipe first.")
    *_, last = (run / "log.jsonl").read_text().splitlines()
    return sorted([*kept, (json.loads(last)["total_steps"], run / "model")])


def measure(
    run: Path, sizes: Sequence[Size] | None, max_series: int | None
) -> Iterator[dict[str, Any]]:
    """One row a checkpoint and size; without sizes, :func:`halves`."""
    found = checkpoints(run)
    total = found[-1][0]
    for steps, path in reversed(found):  # the whole training first
        bed = Testbed(str(path), max_series)
        against_naive = quality(bed.scores, score(SEASONAL_NAIVE, SEASONAL_NAIVE, bed.config))
        own = {
            "steps": steps,
            "share": steps / total,
            **{f"own {metric}": against_naive[metric] for metric in METRICS},
            "own skill": bed.skills.overall().value,
        }
        for row in rows(bed, size_trials(bed, sizes or halves(bed))):
            yield row | own  # its own skill, not that of the cut


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it."""
    lines = [
        "| steps | its own WQL, MASE, skill | cut | parameters | WQL | SQL | MASE | "
        "skill kept | of seasons |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        lines.append(
            f"| {row['steps']} ({row['share']:.0%}) | {row['own WQL']:.3f}, {row['own MASE']:.3f}, "
            f"{row['own skill']:.2f} | {row['trial']} | {row['parameters']:.1%} | "
            f"{row['WQL']:.4f} | {row['SQL']:.4f} | {row['MASE']:.4f} | "
            f"{with_interval(row, 'skill', 3)} | {with_interval(row, 'seasons', 3)} |"
        )
    return "\n".join(lines) + "\n"


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Kept WQL, MASE and skill of each cut, over the share of the training."""
    figure = new_figure(10.4, 3.2)
    panels = figure.subplots(1, 3)
    shares = sorted(frame["share"].unique())
    titles = {
        "WQL": "WQL / uncut",
        "MASE": "MASE / uncut",
        "skill": "skill kept",
    }
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        style_axes(axes, xlabel="share of the training steps, %", title=title)
        axes.axhline(1, color=GREY, linewidth=0.8)
        cuts = frame.groupby("trial", sort=False)
        for (cut, of_cut), color, marker in zip(cuts, PALETTE, MARKERS, strict=False):
            axes.plot(of_cut["share"], of_cut[column], color=color, marker=marker, ms=5, label=cut)
        axes.set_xticks(shares, [f"{100 * share:.0f}" for share in shares])
    legend_beside(figure, panels[2], title="cut to")
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = parser_of(__doc__, ".csv, .md and .png", max_series=True)
    parser.add_argument("--run", type=Path, required=True, help="what pretrain wrote")
    parser.add_argument(
        "--size", action="append", type=Size.parse, help="D_KV,SHARE of hidden units[,D_MODEL]"
    )
    given = parser.parse_args()
    console = Console()
    found: list[dict[str, Any]] = []
    for row in measure(given.run, given.size, given.max_series):
        console.print(rounded(row))
        found.append(row)
        frame = pd.DataFrame(found).sort_values("steps", kind="stable", ignore_index=True)
        write_tables(given.output, frame, markdown(frame))
        draw(frame, Path(f"{given.output}.png"))


if __name__ == "__main__":
    main()
