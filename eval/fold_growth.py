"""Time and memory of folding Chronos-T5 models of the published shapes, tiny to base.

    python eval/fold_growth.py --output eval/results/fold-growth [--size base] [--threads 2]

Random weights of each true shape (bfloat16, as published) are saved to a temporary directory; a
fresh process then does what `tscompress compress DIR --rank 8 --ff-ratio 0.25` does, and another
what it does with `--rank 16 --ff-ratio 0.5 --width` of half of the stream. Time is split into
loading, folding (calibration included) and saving with the check of what was written. Memory is the
peak of the resident set above what the process had before loading, and its ratio to the weights in
float32, in which folding works. `large` is not run: its figures are the power law
through the two largest others, and marked as estimated. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from output import parser_of, write_tables

from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

#: d_model, d_ff, layers of each stack, heads
SHAPES = {
    "tiny": (256, 1024, 4, 4),
    "mini": (384, 1536, 4, 8),
    "small": (512, 2048, 6, 8),
    "base": (768, 3072, 12, 12),
}
LARGE = 709e6  # parameters
#: What the child is asked for; shares of `d_model` become a width.
SETTINGS: dict[str, dict[str, float]] = {
    "d_kv 8, d_ff 25%": {"rank": 8, "ff_ratio": 0.25},
    "d_model 50%, d_kv 16, d_ff 50%": {"rank": 16, "ff_ratio": 0.5, "width": 0.5},
}

_CHILD = """
import json, re, sys, time
import torch
torch.set_num_threads(int(sys.argv[2]))
import tscompress
from tscompress import api  # what the command has imported by then
from tscompress.workflows import save
def resident(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
before = resident("VmRSS")
started = time.perf_counter()
loaded = tscompress.load(sys.argv[1], dtype="float32")
parameters = sum(p.numel() for p in loaded.model.parameters())
loading = time.perf_counter()
folded = tscompress.compress(loaded, **json.loads(sys.argv[3]))
folding = time.perf_counter()
peak = resident("VmHWM")
tscompress.save(folded, sys.argv[1] + "/../folded")
done = time.perf_counter()
print(json.dumps({
    "parameters": parameters,
    "load_s": loading - started,
    "fold_s": folding - loading,
    "save_s": done - folding,
    "total_s": done - started,
    "peak_bytes": peak - before,
    "peak / weights": (peak - before) / (4 * parameters),
}))
"""


def measure(size: str, setting: str, threads: int) -> dict[str, Any]:
    """One row, from a process of its own."""
    d_model, d_ff, layers, heads = SHAPES[size]
    recipe = PretrainRecipe(
        family="chronos-t5",
        name=f"{size}-shape",
        architecture=Architecture(
            d_model=d_model, d_kv=64, d_ff=d_ff, num_layers=layers, num_decoder_layers=layers,
            num_heads=heads, context_length=512,
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=8, horizon=1, batch_size=1),)),),
        token_embedding="normal",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / f"chronos-t5-{size}"
        torch.manual_seed(0)
        save_pretrained(build_model(recipe).to(torch.bfloat16), source)
        asked = dict(SETTINGS[setting])
        if "width" in asked:
            asked["width"] = round(asked["width"] * d_model)
        child = [sys.executable, "-c", _CHILD, str(source), str(threads), json.dumps(asked)]
        answer = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    return {"size": size, "setting": setting, "estimated": False, **found}


def estimate_large(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The power laws through the two largest shapes that were measured, of one setting.

    Of memory what comes on top of the weights, which are known.
    """
    last = rows[-2:]

    def power_law(values: list[float]) -> float:
        x, y = np.log([row["parameters"] for row in last]), np.log(values)
        slope = (y[1] - y[0]) / (x[1] - x[0])
        return float(np.exp(y[1] + slope * (np.log(LARGE) - x[1])))

    times = {key: power_law([row[key] for row in last]) for key in ("load_s", "fold_s", "save_s")}
    work = power_law([row["peak_bytes"] - 4 * row["parameters"] for row in last])
    peak = 4 * LARGE + work
    row = {"size": "large", "setting": last[0]["setting"], "estimated": True}
    return row | {
        "parameters": LARGE, **times, "total_s": sum(times.values()), "peak_bytes": peak,
        "peak / weights": peak / (4 * LARGE),
    }  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub shows it."""
    lines = [
        "| shape | parameters | folded to | load | fold | save and check | total | peak memory | "
        "/ weights |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        name = f"{row['size']} (estimated)" if row["estimated"] else row["size"]
        seconds = (f"{row[key]:.0f} s" for key in ("load_s", "fold_s", "save_s", "total_s"))
        lines.append(
            f"| {name} | {row['parameters'] / 1e6:.0f}M | {row['setting']} | "
            f"{' | '.join(seconds)} | "
            f"{row['peak_bytes'] / 1e9:.2f} GB | {row['peak / weights']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Time and memory against parameters, both axes logarithmic."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    panels = (
        (axes[0], "total_s", "seconds to fold and save", 1.0),
        (axes[1], "peak_bytes", "peak memory above start, GB", 1e9),
    )
    for axis, key, title, unit in panels:
        for (setting, rows), color in zip(
            frame.groupby("setting", sort=False), ("#1f6feb", "#b35900"), strict=False
        ):
            measured = rows[~rows["estimated"]]
            axis.plot(rows["parameters"], rows[key] / unit, color=color, lw=1, ls=":", zorder=1)
            axis.plot(
                measured["parameters"], measured[key] / unit, color=color, lw=1.6, zorder=2,
                label=setting,
            )  # fmt: skip
            for row in rows.to_dict("records"):
                axis.plot(
                    row["parameters"], row[key] / unit, "o", ms=6, zorder=3, mew=1.4, color=color,
                    mfc="white" if row["estimated"] else color,
                )  # fmt: skip
        for _, rows in frame.groupby("size", sort=False):
            row = rows.loc[rows[key].idxmax()]
            label = f"{row['size']}\n(estimated)" if row["estimated"] else row["size"]
            axis.annotate(
                label, (row["parameters"], row[key] / unit), (0, 8), textcoords="offset points",
                ha="right", fontsize=8.5,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="parameters", title=title)
        for scale, ticks in ((axis.xaxis, (1.0,)), (axis.yaxis, (1.0, 2.0, 5.0))):
            scale.set_major_locator(LogLocator(subs=ticks))
            scale.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:g}M"))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.margins(x=0.12, y=0.18)
        axis.grid(alpha=0.25, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, loc="lower right", fontsize=8.5, title="folded to")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    parser = parser_of(__doc__, ".csv, .md and .png")
    parser.add_argument("--size", action="append", choices=list(SHAPES), help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sizes = arguments.size or list(SHAPES)
    rows = []
    for setting in SETTINGS:
        of_setting = []
        for size in sizes:
            of_setting.append(row := measure(size, setting, arguments.threads))
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
        if len(of_setting) > 1:
            of_setting.append(estimate_large(of_setting))
        rows += of_setting
    frame = pd.DataFrame(rows)
    write_tables(arguments.output, frame, markdown(frame))
    if len(sizes) > 1:
        draw(frame, Path(f"{arguments.output}.png"))
    print(markdown(frame))


if __name__ == "__main__":
    main()
