"""Fuzz the readers of files that others write: plans, recipes, safetensors headers, series.

    python eval/fuzz.py plan --seconds 200
    python eval/fuzz.py recipe --seconds 200
    python eval/fuzz.py header --seconds 200
    python eval/fuzz.py series --seconds 200

Whatever the bytes are, a reader returns or raises an error of the package with one line; anything
else ends the run with a traceback, and the bytes that did it lie in ``crash-*``. With atheris
(``pip install atheris``) coverage guides the search; without it, bytes of the seeds are changed at
random. Series are the files of ``written_series.py``, with bytes and whole lines changed and
encodings mixed, or read as a file of another kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

_INSTRUMENTED = [
    "tscompress.data.reading",
    "tscompress.io.untrusted",
    "tscompress.plan.plan",
    "tscompress.workflows.recipe",
    "yaml",
    "json",
]
with atheris.instrument_imports(include=_INSTRUMENTED) if atheris else contextlib.nullcontext():
    from written_series import GOOD, OTHER, REFUSED

    from tscompress.data.reading.format import SeriesFormat
    from tscompress.data.reading.read import read_file, read_in_parts
    from tscompress.data.reading.summary import summarize
    from tscompress.data.reading.tables import naming_file
    from tscompress.data.reading.time_grid import RegularSeries
    from tscompress.errors import TscompressError
    from tscompress.io.untrusted import UnreadableFileError, read_header
    from tscompress.plan.plan import Plan
    from tscompress.workflows.recipe import load_recipe

_LONGEST_INPUT = 16384
_LONGEST_LINE = 1000


def _plan_seeds() -> list[bytes]:
    projection = {"name": "encoder.q", "part": "attention", "out_features": 32, "in_features": 24}
    head = {"name": "time", "kind": "time", "d_model": 24, "num_heads": 4, "head_size": 8,
            "qk_size": 4, "vo_size": 4, "frequencies": [0, 2]}  # fmt: skip
    latent = {"name": "cross", "kind": "cross", "d_model": 24, "num_heads": 4, "head_size": 8,
              "qk_size": 4, "vo_size": 4, "latent": True}  # fmt: skip
    hidden = {"name": "ff", "part": "feed_forward", "in_features": 24, "out_features": 24,
              "d_ff": 40, "kept": 10, "gated": False}  # fmt: skip
    plans: list[dict[str, Any]] = [
        {"method": "svd", "projections": [projection | {"rank": 4}], "schedule": {"rank": 4}},
        {"method": "fold", "heads": [head], "hidden": [hidden], "kept_layers": {"encoder": [0]}},
        {"method": "fold", "heads": [latent], "version": 1},
    ]
    return [json.dumps(plan | {"family": "chronos-bolt"}).encode() for plan in plans]


def _recipe_seeds() -> list[bytes]:
    texts = (
        "model: reference/bolt\noutput: out\nschedule: {kind: rank, rank: 8}\nff_ratio: 0.5\n",
        "model: a\noutput: b\nmethod: svd\nschedule:\n  kind: epsilon\n  epsilon: 1e-1\n",
        "model: a\noutput: b\nschedule: {kind: planned, budget: {measure: bytes, bytes: 9}}\n",
        "recover: {steps: 3}\ncalibration:\n- 2001-01-01\n- 0x1f\n- !!binary aGk=\n- 1:30:00\n",
        "a: &x 1\nb: *x\n<<: {c: .inf}\n? !!set {d}\n: |\n  text\n",
    )
    return [text.encode() for text in texts]


def _header_seeds() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    other = {"dtype": "BF16", "shape": [2], "data_offsets": [16, 20]}
    headers = (
        {"a": entry, "b": other, "__metadata__": {"format": "pt"}},
        {"a": entry, "b": {**other, "dtype": "F8_E4M3"}},
        {},
    )
    return [
        len(text).to_bytes(8, "little") + text + bytes(20)
        for text in (json.dumps(header).encode() for header in headers)
    ]


def _read_plan(path: Path) -> None:
    plan = Plan.load(path)
    plan.summary()
    assert Plan.parse(json.loads(plan.model_dump_json())) == plan


def _read_recipe(path: Path) -> None:
    load_recipe(path).to_yaml()


#: Endings of a file of series, one of which its first byte chooses.
_ENDINGS = (
    ".csv",
    ".tsv",
    ".jsonl",
    ".parquet",
    ".feather",
    ".csv.gz",
    ".csv.bz2",
    ".csv.xz",
    ".zip",
)
_TEXTS = _ENDINGS[:3]
#: Options of a file of series, of which its second byte chooses.
_FORMS = tuple(
    SeriesFormat.model_validate(options)
    for options in ({}, *(dict(written.options) for written in GOOD if written.options))
)


def _series_seeds() -> list[bytes]:
    seeds = []
    with tempfile.TemporaryDirectory() as directory:
        for written in (*GOOD, *OTHER, *REFUSED):
            path = written.write(Path(directory))
            ending = next((one for one in _ENDINGS if path.name.endswith(one)), _ENDINGS[0])
            form = _FORMS.index(SeriesFormat.model_validate(dict(written.options)))
            content = path.read_bytes()
            if ending in _TEXTS:  # short lines are changed more often than cells in the middle
                content = b"".join(content.splitlines(keepends=True)[:9])
            seeds.append(bytes([_ENDINGS.index(ending), form]) + content)
    return seeds


def _read_series(path: Path) -> None:
    """Whole and in parts: the same series, unless one of them refuses; never with a warning."""
    content = path.read_bytes()
    ending, options, rest = content[:1], content[1:2], content[2:]
    file = path.with_suffix(_ENDINGS[sum(ending) % len(_ENDINGS)])
    form = _FORMS[sum(options) % len(_FORMS)]
    file.write_bytes(rest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = _in_parts(file, form)
        read = read_file(file, form)
        assert summarize(read).line().isprintable()
    if parts is not None:
        assert [one.name for one in read.series] == [one.name for one in parts]
        assert [one.values.tobytes() for one in read.series] == [
            one.values.tobytes() for one in parts
        ]


def _in_parts(file: Path, form: SeriesFormat) -> list[RegularSeries] | None:
    try:
        with naming_file(file):
            return [one for part in read_in_parts(file, form) for one in part]
    except TscompressError as error:
        _check_line(error)
        return None


def _check_line(error: Exception) -> None:
    text = str(error)
    assert text.isprintable(), text
    assert 0 < len(text) <= _LONGEST_LINE, text


def one_input(read: Callable[[Path], Any], path: Path, content: bytes) -> None:
    """Read ``content``; an error of the package has one line, and any other one passes through."""
    path.write_bytes(content)
    try:
        read(path)
    except (TscompressError, UnreadableFileError) as error:
        _check_line(error)


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few bytes changed, cut out, doubled, or taken from another one."""
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.randint(1, 12))
        other = rng.choice(seeds)
        cut = rng.randrange(len(other) + 1)
        piece = (
            rng.randbytes(stop - start),
            b"",
            bytes(content[start:stop]) * 2,
            other[cut : cut + 12],
            rng.choice([b"-1", b"1e999", b"9" * 50, b"[", b"{", b"*x", b"null", b"\xff"]),
        )
        content[start:stop] = rng.choice(piece)
    return bytes(content[:_LONGEST_INPUT])


def mutate_series(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Lines, columns, encodings, or bytes as :func:`mutate` changes them."""
    seed = rng.choice(seeds)
    head, content = bytearray(seed[:2]), seed[2:]
    for _ in range(rng.randint(1, 3)):
        change = rng.choice((_lines, _columns, _encoding, _bytes, _bytes))
        content = change(rng, content, seeds)
    if rng.random() < 0.2:
        head[rng.randrange(2)] = rng.randrange(256)
    return (bytes(head) + content)[:_LONGEST_INPUT]


def _bytes(rng: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    return mutate(rng, [content, *(rng.choice(seeds)[2:] for _ in range(2))])


def _lines(rng: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    """One of them left out, doubled, cut short or moved, or one of another file among them."""
    lines = content.splitlines(keepends=True) or [b""]
    place = rng.randrange(len(lines))
    line = lines.pop(place)
    others = rng.choice(seeds)[2:].splitlines(keepends=True) or [b""]
    found = ([], [line, line], [line[: len(line) // 2]], [line, b"\n"], [rng.choice(others)])
    place = rng.choice((place, rng.randrange(len(lines) + 1)))
    return b"".join([*lines[:place], *rng.choice(found), *lines[place:]])


def _columns(rng: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    """One of them left out, doubled, or replaced by another one."""
    separator = rng.choice([b",", b";", b"\t", b"|"])
    place, other = rng.randrange(5), rng.randrange(5)
    change = rng.choice(("cut", "double", "replace"))
    found = []
    for line in content.split(b"\n"):
        cells = line.split(separator)
        if max(place, other) < len(cells):
            double = {"cut": [], "double": [cells[place]] * 2, "replace": [cells[other]]}
            cells[place : place + 1] = double[change]
        found.append(separator.join(cells))
    return b"\n".join(found)


def _encoding(rng: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    """All of the text, or its end, in another encoding."""
    start = rng.choice((0, rng.randrange(len(content) + 1)))
    name = rng.choice(("utf-16", "utf-16-le", "utf-8-sig", "utf-32", "cp037"))
    return content[:start] + content[start:].decode("latin-1").encode(name, "replace")


#: Target to its reader, its seeds, and what changes them.
TARGETS: dict[
    str,
    tuple[
        Callable[[Path], Any],
        Callable[[], list[bytes]],
        Callable[[random.Random, list[bytes]], bytes],
    ],
] = {
    "plan": (_read_plan, _plan_seeds, mutate),
    "recipe": (_read_recipe, _recipe_seeds, mutate),
    "header": (read_header, _header_seeds, mutate),
    "series": (_read_series, _series_seeds, mutate_series),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    read, make_seeds, change = TARGETS[arguments.target]
    seeds = make_seeds()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input"
        corpus = Path(directory) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / str(number)).write_bytes(seed)
        if atheris is not None:
            limits = [f"-max_total_time={arguments.seconds}", f"-max_len={_LONGEST_INPUT}"]
            options = [*limits, f"-seed={arguments.seed + 1}", "-timeout=20", "-rss_limit_mb=4096"]
            atheris.Setup(
                [sys.argv[0], *options, str(corpus)], lambda data: one_input(read, path, data)
            )
            atheris.Fuzz()
            return
        rng = random.Random(arguments.seed)
        started, runs = time.monotonic(), 0
        while time.monotonic() - started < arguments.seconds:
            content = change(rng, seeds)
            try:
                one_input(read, path, content)
            except BaseException:
                Path(f"crash-{arguments.target}-{runs}").write_bytes(content)
                raise
            runs += 1
        print(f"{runs} runs without atheris in {arguments.seconds} s")


if __name__ == "__main__":
    main()
