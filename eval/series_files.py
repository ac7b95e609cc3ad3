"""What every command makes of the same file of series: its summary, or its refusal.

    python eval/series_files.py --output eval/results/series-files

Seven commands run on each file of ``written_series.py``, a few steps of each on a small model, and
``read_series`` of the Python API. They agree if all give the same summary, or all refuse with the
same message; sensitivity needs four series, and is not asked about one. Of each file that is read,
the weights of a compression are compared as well: of files with the same series they are equal to
the bit.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import yaml
from output import parser_of, plain_table, write_tables
from rich.console import Console
from written_series import GOOD, OTHER, REFUSED, Written

import tscompress
from tscompress.cli.app import main as command
from tscompress.errors import TscompressError
from tscompress.io.hashing import sha256_of
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

COMMANDS = ("series", "profile", "compress", "sensitivity", "recover", "run", "evaluate")
_API = "read_series"
_LABELS = ("layout", "separator", "dates", "encoding", "defect")
_HORIZON = 3
_RANK = "4"
_SERIES = "8"  # to calibrate on
#: One step of recovery on one small batch.
_RECOVERY = {
    "steps": 1, "synthetic_share": 0.0, "held_out_series": 4, "precision": "no",
    "buckets": [{"context_length": 16, "horizon": 16, "batch_size": 4}],
}  # fmt: skip


def arguments_of(name: str, written: Written, model: str, student: str, here: Path) -> list[str]:
    """The command line of one of :data:`COMMANDS` on a file in the directory ``here``."""
    path, compressed = str(here / written.name), str(here / "compressed")
    recovery, recipe = here / "recovery.yaml", here / "recipe.yaml"
    form = dict(written.options)
    recovery.write_text(yaml.safe_dump({**_RECOVERY, "series": [path], "series_format": form}))
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": model,
                "output": str(here / "run"),
                "schedule": f"rank={_RANK}",
                "series": form,
                "profile": None,
                "evaluation": None,
                "bench": None,
                "calibration": {"source": path, "num_series": int(_SERIES)},
            }
        )
    )
    little = ["--calibration-series", _SERIES]
    given = {
        "series": [path],
        "profile": [model, "--series", path],
        "compress": [model, "--series", path, *little, "--rank", _RANK, "--output", compressed],
        "sensitivity": [model, "--series", path, *little],
        "recover": [student, "--teacher", model, "--config", str(recovery), "--output",
                    str(here / "recovered")],
        "run": [str(recipe)],
        "evaluate": [model, "--suite", path, "--horizon", str(_HORIZON), "--no-cache"],
    }[name]  # fmt: skip
    options = [[f"--{key.replace('_', '-')}", value] for key, value in written.options.items()]
    if name in ("recover", "run"):
        options = []  # they stand in the file of the command
    return [name, *given, *(word for option in options for word in option)]


def run(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the ``tscompress`` command."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tscompress", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            command()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the command ends with an exit code")


def said(name: str, file: str, code: int, out: str, err: str) -> str:
    """The summary that a command printed, or its refusal with the exit code.

    Raises
    ------
    TscompressError
        It printed neither.
    """
    text, start = (out, f"{file}: ") if name == "series" and not code else (err, "series: ")
    if code:
        start = "error: "
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    if len(lines) != 1 or (code and len(err.splitlines()) != 1):
        raise TscompressError(f"{name} on {file} ended with {code} and printed {err!r}.")
    return f"refused ({code}): {lines[0]}" if code else lines[0]


def said_by_api(path: Path, options: Mapping[str, str]) -> str:
    """The summary that :func:`tscompress.read_series` returns, or its refusal, as :func:`said`."""
    try:
        series = tscompress.read_series(path, tscompress.GivenSeries.model_validate(options))
    except TscompressError as error:
        return f"refused ({error.exit_code}): {error}"
    return "" if series.summary is None else series.summary.line()


def row_of(written: Written, model: str, student: str) -> dict[str, Any]:
    """What each command said of a file, whether they agree, and the hash of compressed weights."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        written.write(here)
        answers = {
            name: said(name, written.name, *run(arguments_of(name, written, model, student, here)))
            for name in COMMANDS
            if name != "sensitivity" or written.layout != "one series"  # it needs four
        }
        answers[_API] = said_by_api(here / written.name, written.options)
        weights = here / "compressed" / "model.safetensors"
        digest = sha256_of(weights)[:12] if weights.exists() else ""
    labels = {label: getattr(written, label) for label in _LABELS}
    options = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in written.options.items())
    agree = len(set(answers.values())) == 1
    return {"file": written.name, **labels, "options": options, "weights": digest,
            "agree": agree, **answers}  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    """What the commands said of each file; where they disagree, what each said."""
    same = frame[frame["file"].isin([written.name for written in GOOD])]
    hashes = same["weights"].nunique()
    shown = frame[["file", *_LABELS, "options"]].assign(
        said=[_answer(row) for row in frame.to_dict("records")], weights=frame["weights"]
    )
    return (
        f"{len(frame)} files: `{'`, `'.join((*COMMANDS, _API))}` agree on "
        f"{int(frame['agree'].sum())}. Of the {len(same)} files with the same series, compressed "
        f"weights have {hashes} hash{'' if hashes == 1 else 'es'} (SHA-256, first 12 digits).\n\n"
        f"{plain_table(shown.map(_cell))}"
    )


def _answer(row: dict[str, Any]) -> str:
    if row["agree"]:
        return str(row[COMMANDS[0]])
    return "; ".join(
        f"{name}: {row[name]}" for name in (*COMMANDS, _API) if isinstance(row[name], str)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write_tiny(directory: Path) -> None:
    """A Chronos-Bolt of one layer and random weights: what is read does not depend on it."""
    recipe = PretrainRecipe(
        family="chronos-bolt",
        name="tiny",
        architecture=Architecture(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
            context_length=64, prediction_length=16,
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=8, horizon=1, batch_size=1),)),),
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(recipe)
    for parameter in model.parameters():
        parameter.data *= 4  # at the official scale every forecast is nearly constant
    model.save_pretrained(directory)


@contextlib.contextmanager
def models(given: str | None) -> Iterator[tuple[str, str]]:
    """A model, by default a tiny one, and one compressed from it; a cache that starts empty."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        if given is None:
            write_tiny(here / "tiny")
        model, student = given or str(here / "tiny"), str(here / "student")
        arguments = ["compress", model, "--rank", _RANK, "--output", student]
        with mock.patch.dict(os.environ, {"TSCOMPRESS_CACHE": str(here / "cache")}):
            code, _, err = run([*arguments, "--calibration-series", _SERIES])
            if code:
                raise TscompressError(f"{model} could not be compressed: {err}")
            yield model, student


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ".csv and .md")
    parser.add_argument("--model", help="default: one layer of random weights")
    parser.add_argument("--file", action="append", help="only this one; repeatable")
    options = parser.parse_args(arguments)
    console = Console()
    rows = []
    with models(options.model) as (model, student):
        for written in (*GOOD, *OTHER, *REFUSED):
            if options.file is None or written.name in options.file:
                rows.append(row_of(written, model, student))
                state = "agree" if rows[-1]["agree"] else "DISAGREE"
                console.print(f"{written.name}: {state}", markup=False)
    frame = pd.DataFrame(rows)
    text = markdown(frame)
    write_tables(options.output, frame, text)
    console.print(text, markup=False)


if __name__ == "__main__":
    main()
