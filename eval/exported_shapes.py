"""Time, memory and bytes of exported models of the published shapes, with random weights.

    python eval/exported_shapes.py --output eval/results/exported-shapes [--shape chronos-2-small]
    python eval/exported_shapes.py --output OUT --quick --repeats 2

The published small and base shapes of Chronos-Bolt, Chronos-2 and Chronos-T5, and each folded to
the recipe `balanced`, run in torch and as ONNX graphs in float32, int8 and with weights of 8 bits
(`int8-weights`). The eight of a shape take turns in one process on one thread, for one series and
for 32 of 512 and 2048 steps (Chronos-T5: 4 series and 20 paths of 512 steps). Ratios of latency are
to the original in torch, with 95 % intervals over the rounds. Peak memory is that of a process of
its own, which opens the model and forecasts, beyond the interpreter and its libraries; of the first
and the last call. Random weights have no quality; time, memory and bytes do not depend on them.

Rows are written after each call, and a run that is started again resumes after the last; those of
other code, versions or machines are measured again. Shapes that are not asked for stay in the table
as they are: every ratio is to a model of its own shape and call. `--quick` only shows that it runs.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from exported import directories_of, graph_bytes, in_turn
from output import parser_of, rows_of, write_tables
from rich import print as show
from shapes import (
    PATCH_WORKLOAD,
    QUICK,
    T5_WORKLOAD,
    FamilyName,
    Fold,
    Shape,
    positive,
    write_checkpoint,
)
from testbed import digest, with_interval

from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.digests import code_digest, hardware, versions
from tscompress.errors import UsageError

FAMILIES: tuple[FamilyName, ...] = ("chronos-bolt", "chronos-2", "chronos-t5")
SHAPES = {shape.label: shape for size in ("small", "base") for family in FAMILIES
          if (shape := Shape(family, size))}  # fmt: skip
#: Of recipes/balanced.yaml.
FOLDED = Fold(0.5, 0.5)
#: Series and steps.
_CALLS = ((1, 512), (32, 512), (1, 2048), (32, 2048))
#: Code of the package that a row depends on.
_CODE = ("benchmark", "checkpoints", "exporting", "families", "layers", "runtime", "workflows")
_KEY = ("shape", "series", "steps")
_MEASURED = ("latency", "bytes", "settings")


def workloads(family: FamilyName, *, repeats: int, quick: bool = False) -> list[Workload]:
    """The calls that models of a family are timed by."""
    changes = {"threads": 1, "warmup": 1} | (QUICK if quick else {}) | {"repeats": repeats}
    if family == "chronos-t5":
        return [T5_WORKLOAD.model_copy(update=changes)]
    calls = [{"batch_size": batch, "context_length": steps} for batch, steps in _CALLS]
    found = [PATCH_WORKLOAD.model_copy(update=call | changes) for call in calls]
    return list(dict.fromkeys(found))  # quick ones are alike


def measure(shape: Shape, calls: Sequence[Workload], known: set[tuple[Any, ...]]) -> Any:
    """Rows of each call that is not ``known``, one for each model, a call at a time."""
    missing = [call for call in calls if key_of(shape, call) not in known]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as place:
        sources = {}
        for label, fold in {"original": Fold(), "folded": FOLDED}.items():
            folder = Path(place, label)
            folder.mkdir()
            sources[label] = write_checkpoint(Shape(shape.family, shape.size, fold), folder)
        models = directories_of(sources, Path(place))
        for call in missing:
            found = in_turn(models, call, memory=call in (calls[0], calls[-1]))
            yield [
                dict(zip(_KEY, key_of(shape, call), strict=True))
                | {"model": label, "rounds": call.repeats, "bytes": graph_bytes(models[label])}
                | columns
                for label, columns in found.items()
            ]  # fmt: skip


def key_of(shape: Shape, call: Workload) -> tuple[Any, ...]:
    """What a row is known by, beside its model."""
    return shape.label, call.batch_size, call.context_length


def settings_of(call: Workload) -> str:
    """Eight characters that change with all that the rows of a call depend on."""
    sources = [Path(__file__).with_name(name).read_text() for name in ("shapes.py", "exported.py")]
    return digest(
        call.model_copy(update={"batch_size": 1, "context_length": 1, "repeats": 1}),
        code_digest(_CODE),
        versions(),
        importlib.metadata.version("onnxruntime"),
        hardware(torch.device("cpu")),
        FOLDED,
        *sources,
    )


def markdown(frame: pd.DataFrame) -> str:
    """A heading and a table for each shape."""
    parts = []
    for label, rows in frame.groupby("shape", sort=False):
        calls = list(dict.fromkeys(zip(rows["series"], rows["steps"], strict=True)))
        taken = rows.dropna(subset="peak bytes")
        weighed = list(dict.fromkeys(zip(taken["series"], taken["steps"], strict=True)))
        heads = ["model", "MB", *(f"{batch} × {steps}" for batch, steps in calls)]
        heads += [f"peak MB, {batch} × {steps}" for batch, steps in weighed]
        lines = [" | ".join(heads), " | ".join(["---"] + ["--:"] * (len(heads) - 1))]
        by_call = rows.set_index(["model", "series", "steps"]).to_dict("index")
        for model in dict.fromkeys(rows["model"]):
            here = {call: by_call[(model, *call)] for call in calls}
            cells = [model, f"{here[calls[0]]['bytes'] / 1e6:.1f}"]
            cells += [with_interval(here[call], "latency", 3) for call in calls]
            cells += [f"{here[call]['peak bytes'] / 1e6:.0f}" for call in weighed]
            lines.append(" | ".join(cells))
        parts.append(f"### {label}\n\n" + "".join(f"| {line} |\n" for line in lines))
    return "\n".join(parts)


def chosen(names: Sequence[str] | None) -> list[Shape]:
    """Shapes of these names, in their order; of none, all.

    Raises
    ------
    UsageError
        There is no shape of such a name.
    """
    if unknown := [name for name in names or () if name not in SHAPES]:
        raise UsageError(f"no shape of {unknown[0]!r}; there are {', '.join(SHAPES)}.")
    return [SHAPES[name] for name in dict.fromkeys(names or SHAPES)]


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md")
    parser.add_argument("--shape", action="append", metavar="NAME", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=positive, default=9, help="timed rounds")
    parser.add_argument("--quick", action="store_true", help="tiny workloads: does it run?")
    options = parser.parse_args()
    try:
        shapes = chosen(options.shape)
    except UsageError as error:
        parser.error(str(error))
    calls = {
        family: workloads(family, repeats=options.repeats, quick=options.quick)
        for family in FAMILIES
    }
    settings = {family: settings_of(found[0]) for family, found in calls.items()}
    wanted = {shape.label: settings[shape.family] for shape in shapes}
    earlier = rows_of(Path(f"{options.output}.csv"), (*_KEY, *_MEASURED))
    rows = [row for row in earlier if row["settings"] == wanted.get(row["shape"], row["settings"])]
    known = {tuple(row[name] for name in _KEY) for row in rows}
    for shape in shapes:
        for found in measure(shape, calls[shape.family], known):
            rows += [row | {"settings": settings[shape.family]} for row in found]
            frame = in_order(pd.DataFrame(rows))
            write_tables(options.output, frame, markdown(frame))
            show(f"{found[0]['shape']}, {found[0]['series']} × {found[0]['steps']}")


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of the shapes, whenever they were measured."""
    places = frame["shape"].map(list(SHAPES).index)
    return frame.iloc[places.argsort(kind="stable")].reset_index(drop=True)


if __name__ == "__main__":
    main()
