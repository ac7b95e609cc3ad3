"""Which software loads what tscompress writes, and whether it forecasts what tscompress does.

    python eval/ecosystem/run.py --environments DIR --output eval/results/ecosystem [--only sktime]

Each library gets a virtual environment of its own from the package registry, without tscompress;
environments that are there are used again. Folded checkpoints, folded ones with a narrower residual
stream, and factored ones of the three families are written once: of the references, and of a tiny
Chronos-2 of random weights. In each environment one `*_load.py` forecasts a few real monthly series
with every checkpoint. The same forecasts are made by `tscompress.load(...).forecaster` on the same
torch and transformers, and compared. Factored checkpoints are then tried once more with tscompress
beside the library and `import tscompress.pipelines` as the first line.

A library that cannot be installed, or that refuses a checkpoint, is a line of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import torch
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from environments import (
    Environment,
    InstallError,
    clean_environ,
    make_environment,
    reinstall,
)
from rich.console import Console
from transformers.utils import logging

import tscompress
from tscompress.data.suites import load_suite
from tscompress.io.files import write_text_atomically

HERE = Path(__file__).resolve().parent
REGISTER = "tscompress.pipelines"
FAMILIES = ("chronos-t5", "chronos-bolt", "chronos-2")
KINDS = ("folded", "narrower", "factored")
MONTHS = 12
#: Of the tiny Chronos-2; no series is longer, since darts refuses what stock chronos cuts off.
CONTEXT_LENGTH = 128
SEED = 7
#: Largest difference, relative to the largest forecast, that another order of adding float32
#: numbers makes; and that bfloat16, with its 8 bits, makes.
ROUNDING = {"float32": 1e-5, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Library:
    """Software that loads Chronos checkpoints."""

    name: str
    requirements: tuple[str, ...]
    families: tuple[str, ...] = FAMILIES

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}_load.py"


LIBRARIES = (
    Library("stock", ("chronos-forecasting",)),
    Library("gluonts", ("gluonts", "chronos-forecasting")),
    Library("fev", ("fev", "chronos-forecasting")),
    Library("sktime", ("sktime", "chronos-forecasting")),
    Library("darts", ("darts[torch]",), ("chronos-2",)),
    Library("autogluon", ("autogluon.timeseries",)),
)


@dataclass(frozen=True)
class Row:
    """How one library took one checkpoint, in one way."""

    library: str
    way: str
    family: str
    kind: str  # one of KINDS
    registered: bool  # after `import tscompress.pipelines`
    result: str
    difference: float | None = None  # relative to the largest forecast
    reason: str = ""


@dataclass
class Findings:
    """All rows, and what it took to make the environments."""

    rows: list[Row] = field(default_factory=list)
    environments: dict[str, Environment] = field(default_factory=dict)
    complaints: dict[str, list[str]] = field(default_factory=dict)  # with tscompress beside it
    failures: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------
# Checkpoints and series
# --------------------------------------------------------------------------------------------------


def write_checkpoints(root: Path) -> dict[str, tuple[str, str]]:
    """Directory to its family and kind; those that are in ``root`` already stay.

    Names keep the original's, which AutoGluon reads.
    """
    sources: dict[str, Any] = {
        "chronos-t5": "reference/t5",
        "chronos-bolt": "reference/bolt",
        "chronos-2": root / "chronos-2",
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny_chronos2().save_pretrained(sources["chronos-2"])  # the same one every time
    written = {}
    for family, source in sources.items():
        name = family if family == "chronos-2" else f"{family}-tiny"
        # Half of 8 for the tiny Chronos-2: a plain config drops every other frequency.
        folded = {"rank": 4 if family == "chronos-2" else 8, "ff_ratio": 0.25}
        sizes: dict[str, dict[str, Any]] = {
            "folded": folded,
            "narrower": {**folded, "width": 12 if family == "chronos-2" else 64},
            "factored": {"method": "activation-svd", "budget": 0.25},
        }
        for kind in KINDS:
            directory = root / f"{name}-{kind}"
            if not directory.exists():
                tscompress.save(tscompress.compress(source, **sizes[kind]), directory)
            written[str(directory)] = (family, kind)
    return written


def tiny_chronos2() -> Chronos2Model:
    """Random weights, of a shape that every library here loads in a moment."""
    return Chronos2Model(
        Chronos2CoreConfig(
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            initializer_factor=0.3,
            chronos_config={
                "context_length": CONTEXT_LENGTH,
                "output_patch_size": 16,
                "input_patch_size": 16,
                "input_patch_stride": 16,
                "quantiles": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
                "use_reg_token": True,
                "use_arcsinh": True,
                "max_output_patches": 4,
            },
            chronos_pipeline_class="Chronos2Pipeline",
            architectures=["Chronos2Model"],
        )
    )


def write_job(path: Path, families: dict[str, str]) -> None:
    """A few real series of different lengths, and what each checkpoint is."""
    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"])
    by_length = {
        len(values): values for values in dataset.series if len(values) <= CONTEXT_LENGTH + MONTHS
    }
    lengths = sorted(by_length)[:: len(by_length) // 3]
    chosen = [by_length[length] for length in lengths]
    job = {
        "series": [values[:-MONTHS].tolist() for values in chosen],
        "future": [values[-MONTHS:].tolist() for values in chosen],
        "start": "2000-01-01",
        "freq": "MS",
        "quantile_levels": [0.1, 0.5, 0.9],
        "seed": SEED,
        "families": families,
    }
    path.write_text(json.dumps(job))


# --------------------------------------------------------------------------------------------------
# Both sides
# --------------------------------------------------------------------------------------------------


def own_forecasts(
    python: Path, checkpoint: str, job: Path, stories: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Forecasts of tscompress by way, for those that did not fail.

    Raises
    ------
    RuntimeError
        tscompress failed.
    """
    requests = {way: story for way, story in stories.items() if "error" not in story}
    if not requests:
        return {}
    asked, output = directory / "requests.json", directory / "own.npz"
    asked.write_text(json.dumps(requests))
    command = [python, HERE / "own_forecast.py", checkpoint, job, asked, output]
    result = execute(list(map(str, command)), directory)
    if result.returncode != 0:
        raise RuntimeError(f"tscompress does not forecast: {result.stderr[-3000:]}")
    with np.load(output) as stored:
        return dict(stored)


def execute(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that may use nothing of this environment, and no network."""
    env = clean_environ() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, check=False
    )


def their_forecasts(
    python: Path, library: Library, checkpoint: str, job: Path, output: Path, *, registered: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forecasts and stories by way; one story of an error if the script died."""
    command = [str(python), str(library.script), checkpoint, str(job), str(output)]
    if registered:
        command += ["--register", REGISTER]
    result = execute(command, output.parent)
    if result.returncode != 0 or not output.exists():
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return {}, {"(the script)": {"error": last}}
    with np.load(output) as stored:
        forecasts = dict(stored)
    return forecasts, json.loads(output.with_suffix(".json").read_text())


def compare(theirs: Any, ours: Any, dtype: str) -> tuple[str, float]:
    """Verdict, and the largest difference relative to the largest forecast."""
    if theirs.size != ours.size:
        return f"other shape: {theirs.shape}, not {ours.shape}", float("nan")
    theirs, ours = theirs.reshape(ours.shape), ours.astype(np.float32)
    if np.array_equal(theirs, ours):
        return "bit-equal", 0.0
    difference = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    if difference <= ROUNDING["float32"]:
        return "equal to rounding", difference
    if dtype == "bfloat16" and difference <= ROUNDING["bfloat16"]:
        return "equal to bfloat16", difference
    return "DIFFERENT", difference


def stored_dtype(checkpoint: str) -> str:
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    return str(config.get("base_config", config)["dtype"])


def try_library(
    library: Library,
    python: Path,
    own_python: Path,
    checkpoints: dict[str, tuple[str, str]],
    job: Path,
    scratch: Path,
    *,
    registered: bool,
) -> Iterator[Row]:
    """Rows of one library, on all checkpoints of the families that it has a model of."""
    for checkpoint, (family, kind) in checkpoints.items():
        if family not in library.families or (registered and kind != "factored"):
            continue
        directory = scratch / f"{library.name}-{family}-{kind}-{registered}"
        directory.mkdir()
        theirs, stories = their_forecasts(
            python, library, checkpoint, job, directory / "theirs.npz", registered=registered
        )
        ours = own_forecasts(own_python, checkpoint, job, stories, directory)
        for way, story in stories.items():
            place = (library.name, way, family, kind, registered)
            if "error" in story:
                yield Row(*place, "refused", reason=one_line(story["error"], checkpoint))
            else:
                dtype = story["dtype"] or stored_dtype(checkpoint)
                yield Row(*place, *compare(theirs[way], ours[way], dtype))


def one_line(message: str, checkpoint: str) -> str:
    """Without line breaks, colours, and the path of a temporary directory."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message).replace(checkpoint, "DIR")
    return " ".join(plain.split())


# --------------------------------------------------------------------------------------------------
# The walk
# --------------------------------------------------------------------------------------------------


def run(
    libraries: Sequence[Library],
    root: Path,
    kept: Path | None,
    time_limit_s: float,
    console: Console,
) -> Iterator[Findings]:
    """What was found so far, after each library; checkpoints are written to ``kept``."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        console.print("writing checkpoints")
        checkpoints = write_checkpoints(scratch if kept is None else kept)
        job = scratch / "series.json"
        write_job(job, {name: family for name, (family, _) in checkpoints.items()})
        wheel = build_wheel(scratch)
        for library in libraries:
            console.print(library.name)
            try:
                environment = make_environment(
                    root / library.name / "library", library.requirements, time_limit_s=time_limit_s
                )
            except InstallError as error:
                findings.failures[library.name] = one_line(str(error), "")
                yield findings
                continue
            findings.environments[library.name] = environment
            place = root / library.name / "with-tscompress"
            both: Path | None = None
            try:
                both, complaints = with_tscompress(place, environment, wheel, time_limit_s)
            except InstallError as error:
                complaints = [one_line(str(error), "")]
            findings.complaints[library.name] = complaints
            for python, registered in ((environment.python, False), (both, True)):
                if python is None:
                    continue
                # Where both cannot be installed together, tscompress answers from here.
                own = both or Path(sys.executable)
                findings.rows += try_library(
                    library, python, own, checkpoints, job, scratch, registered=registered
                )
            yield findings


def build_wheel(directory: Path) -> Path:
    """tscompress as a user would install it."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(HERE.parents[1])]
    subprocess.run([*command, "--wheel-dir", str(directory)], check=True, env=clean_environ())
    (wheel,) = directory.glob("tscompress-*.whl")
    return wheel


def with_tscompress(
    directory: Path, base: Environment, wheel: Path, time_limit_s: float
) -> tuple[Path, list[str]]:
    """The library's environment and tscompress on top of it; what pip says does not fit."""
    fresh = not (directory / "environment.json").exists()
    beside = make_environment(directory, (str(wheel),), base=base, time_limit_s=time_limit_s)
    if not fresh:  # tscompress may have changed since
        reinstall(beside.python, wheel, time_limit_s=time_limit_s)
    changed = [
        f"{name} {base.versions[name]} -> {version}"
        for name, version in beside.versions.items()
        if base.versions.get(name, version) != version
    ]
    return beside.python, [*beside.complaints, *changed]


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def markdown(findings: Findings) -> str:
    reasons: dict[str, int] = {}
    plain = [row for row in findings.rows if not row.registered]
    registered = [row for row in findings.rows if row.registered]
    parts = [
        "`python eval/ecosystem/run.py --environments DIR --output eval/results/ecosystem`",
        f"Made {time.strftime('%Y-%m-%d')}: what each library, without tscompress, makes of a "
        "checkpoint, compared with the forecasts of `tscompress.load(DIR).forecaster` on the same "
        "torch and transformers. "
        "reference/t5 and reference/bolt (stored in bfloat16) and a tiny Chronos-2 of random "
        "weights (float32); folded: d_kv and d_ff smaller everywhere; narrower: d_model as well; "
        "factored: `--method activation-svd --budget 0.25`. Differences are relative to the "
        "largest forecast.",
        table(plain, [(kind, family) for kind in KINDS[:2] for family in FAMILIES], reasons),
        "Factored ones:",
        table(plain, [("factored", family) for family in FAMILIES], reasons),
    ]
    if registered:
        parts += [
            "The same after `import tscompress.pipelines`, tscompress installed beside:",
            table(registered, [("factored", family) for family in FAMILIES], reasons),
        ]
    if reasons:
        # Whole in the CSV: some list every model that there is.
        short = {number: shorten(text, 300) for text, number in reasons.items()}
        parts.append("\n".join(f"{number}. {text}" for number, text in short.items()))
    parts.append(environment_table(findings))
    return "\n\n".join(parts) + "\n"


def table(rows: Iterable[Row], columns: list[tuple[str, str]], reasons: dict[str, int]) -> str:
    """A line for each way, a column for each checkpoint; refusals are numbered in ``reasons``."""
    by_way: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        by_way.setdefault((row.library, row.way), {})[row.kind, row.family] = row
    lines = [
        "| library | way | " + " | ".join(f"{family} {kind}" for kind, family in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for (library, way), found in by_way.items():
        cells = [cell(found.get(column), reasons) for column in columns]
        lines.append(f"| {library} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: Row | None, reasons: dict[str, int]) -> str:
    if row is None:
        return ""
    if row.reason:
        return f"{row.result} ({reasons.setdefault(row.reason, len(reasons) + 1)})"
    return f"{row.result}, {row.difference:.1e}" if row.difference else row.result


def environment_table(findings: Findings) -> str:
    lines = [
        "| environment | versions | MB | install | `pip check`, and with tscompress beside |",
        "|---|---|--:|--:|---|",
    ]
    for name, environment in findings.environments.items():
        versions = ", ".join(f"{key} {value}" for key, value in environment.versions.items())
        complaints = [*environment.complaints, *findings.complaints.get(name, [])]
        lines.append(
            f"| {name} | {versions} | {environment.megabytes:,.0f} | {environment.seconds:.0f} s | "
            f"{'; '.join(complaints) or 'no conflict'} |"
        )
    lines += [f"| {name} | | | | {text} |" for name, text in findings.failures.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [library.name for library in LIBRARIES]
    parser.add_argument("--environments", type=Path, required=True, help="kept for the next run")
    parser.add_argument("--output", type=Path, required=True, help="prefix of .csv and .md")
    parser.add_argument("--only", action="append", choices=names, help="default: all")
    parser.add_argument(
        "--checkpoints", type=Path, help="write them here, and use those that are here"
    )
    parser.add_argument(
        "--install-minutes", type=float, default=20.0, help="for each environment, default: 20"
    )
    arguments = parser.parse_args()
    wanted = [one for one in LIBRARIES if one.name in (arguments.only or names)]
    console = Console()
    torch.set_num_threads(1)  # both sides add in the same order
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    root = arguments.environments.resolve()
    kept = arguments.checkpoints and arguments.checkpoints.resolve()
    for findings in run(wanted, root, kept, arguments.install_minutes * 60, console):
        frame = pd.DataFrame([asdict(row) for row in findings.rows])
        write_text_atomically(Path(f"{arguments.output}.csv"), frame.to_csv(index=False))
        text = markdown(findings)
        write_text_atomically(Path(f"{arguments.output}.md"), text)
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
