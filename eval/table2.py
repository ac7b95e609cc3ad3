"""The paper's Table 2 on other models: what truncated SVD costs them, and what it cost Chronos.

    python eval/table2.py --output eval/results/table2-t5 --model reference/t5 --max-series 100

Every matrix of attention keeps the singular values that are at least ε times its largest, is
multiplied back and stored in bfloat16, at the tolerances of the paper's own code
(amazon-science/TSFM-Compression, comparison/compress_chronos.py, commit 8ea0b35). Of each model:
the share of singular values kept (the paper's ratio), their mean number, the Jaccard overlap of the
ten likeliest tokens with the original's, ratios of WQL, SQL and MASE on the offline suite with 95 %
intervals, and the share of the original's skill that is kept (`tscompress probe`). As in the
paper's code, what is forecast for the overlap is the context itself; its windows are of half-hourly
electricity demand, the paper's of electricity by the quarter of an hour.
Beside these stands what the paper reports, zero-shot, of Chronos; by its code that is
amazon/chronos-t5-base. Nothing is saved by such a cut: the question is how hard a model is to cut.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from chronos.chronos import MeanScaleUniformBins
from output import parser_of, rounded, write_tables
from rich.console import Console
from testbed import RATIOS, Testbed, with_interval
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.bundled import collection_series
from tscompress.linalg import epsilon_rank, singular_values, truncated_svd

#: Table 2, Chronos: exponent of ε = 10^x, ratio, overlap, and of the zero-shot datasets WQL, MASE.
PUBLISHED = (
    (-3.0, 0.889, 0.999, 1.016, 1.001),
    (-2.5, 0.755, 0.999, 1.027, 1.000),
    (-2.0, 0.569, 0.997, 0.945, 0.995),
    (-1.5, 0.393, 0.979, 0.990, 0.994),
    (-1.0, 0.237, 0.883, 1.030, 1.011),
    (-0.75, 0.151, 0.717, 1.566, 1.576),
    (-0.5, 0.073, 0.308, 3.562, 3.435),
)
WINDOWS, LENGTH, TOP = 64, 512, 10


def truncate_(loaded: LoadedModel, epsilon: float) -> tuple[float, float]:
    """Cut all matrices of attention; the share of singular values kept, and their mean number."""
    ranks, sizes = [], []
    for block in loaded.architecture.attention:
        for name in block.projections.values():
            weight: Any = loaded.model.get_submodule(name).weight
            sigma = singular_values(weight.detach())
            rank = epsilon_rank(sigma, epsilon)
            outer, inner = truncated_svd(weight.detach(), rank)
            with torch.no_grad():
                weight.copy_((outer @ inner).to(torch.bfloat16))
            ranks.append(rank)
            sizes.append(len(sigma))
    return sum(ranks) / sum(sizes), sum(ranks) / len(ranks)


def windows() -> Tensor:
    """Half-hourly demand, ``[WINDOWS, LENGTH]``, spread over three years."""
    (series,) = collection_series("vic_elec_30min")
    values = torch.tensor(series.values, dtype=torch.float32)
    starts = torch.linspace(0, len(values) - LENGTH, WINDOWS).round().long()
    return torch.stack([values[start : start + LENGTH] for start in starts])


@torch.no_grad()
def likeliest(loaded: LoadedModel, series: Tensor) -> Tensor:
    """The likeliest tokens at each step of a forecast of the context itself, ``[N, L, TOP]``."""
    model: Any = loaded.model
    tokenizer: MeanScaleUniformBins = loaded.forecaster.tokenizer
    found = []
    for chunk in series.split(8):
        tokens, mask, _ = tokenizer.context_input_transform(chunk)
        start = torch.full_like(tokens[:, :1], model.config.decoder_start_token_id)
        fed = torch.cat([start, tokens[:, :-1]], dim=1)
        logits = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=fed).logits
        found.append(logits.topk(TOP, dim=-1).indices)
    return torch.cat(found)


def overlap(a: Tensor, b: Tensor) -> float:
    """Mean Jaccard overlap of sets of tokens, ``[..., TOP]``."""
    common = (a[..., :, None] == b[..., None, :]).sum((-1, -2)).double()
    return float((common / (2 * TOP - common)).mean())


def measure(bed: Testbed, console: Console) -> pd.DataFrame:
    """A row for every tolerance of the paper."""
    series = windows()
    tokens = likeliest(bed.original, series)
    rows = []
    for exponent, *published in PUBLISHED:
        cut = bed.dense()
        share, rank = truncate_(cut, 10**exponent)
        row = {
            "model": bed.model,
            "epsilon": 10**exponent,
            "ratio": share,
            "mean rank": rank,
            "overlap": overlap(tokens, likeliest(cut, series)),
            **bed.row(cut.forecaster, f"{exponent}"),
            **dict(zip(("published ratio", "published overlap", "published WQL", "published MASE"),
                       published, strict=True)),
        }  # fmt: skip
        console.print(rounded(row))
        rows.append(row)
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it; what is published in parentheses' place, after a stroke."""
    lines = [
        "| ε | kept | published | mean rank | overlap | published | WQL | published | SQL | MASE | "
        "published | skill kept | of seasons |",
        f"|--:{'|--:' * 12}|",
    ]
    for row in frame.to_dict("records"):
        quality_of = {metric: with_interval(row, metric) for metric in RATIOS}
        lines.append(
            f"| {row['epsilon']:.3g} | {row['ratio']:.1%} | {row['published ratio']:.1%} | "
            f"{row['mean rank']:.0f} | {row['overlap']:.3f} | {row['published overlap']:.3f} | "
            f"{quality_of['WQL']} | {row['published WQL']:.3f} | {quality_of['SQL']} | "
            f"{quality_of['MASE']} | {row['published MASE']:.3f} | "
            f"{with_interval(row, 'skill', 3)} | {with_interval(row, 'seasons', 3)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True, device=True)
    parser.add_argument("--model", default="reference/t5", help="a Chronos-T5")
    arguments = parser.parse_args()
    console = Console()
    bed = Testbed(arguments.model, arguments.max_series, device=arguments.device)
    frame = measure(bed, console)
    table = markdown(frame)
    write_tables(arguments.output, frame, table)
    console.print(table, markup=False)


if __name__ == "__main__":
    main()
