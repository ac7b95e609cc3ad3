"""Fuzz the readers of files that others write: plans, recipes, safetensors headers.

    python eval/fuzz.py plan --seconds 200
    python eval/fuzz.py recipe --seconds 200
    python eval/fuzz.py header --seconds 200

Whatever the bytes are, a reader returns or raises an error of the package with one line; anything
else ends the run with a traceback, and the bytes that did it lie in ``crash-*``. With atheris
(``pip install atheris``) coverage guides the search; without it, bytes of the seeds are changed at
random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

_INSTRUMENTED = [
    "tscompress.io.untrusted",
    "tscompress.plan.plan",
    "tscompress.workflows.recipe",
    "yaml",
    "json",
]
with atheris.instrument_imports(include=_INSTRUMENTED) if atheris else contextlib.nullcontext():
    from tscompress.errors import TscompressError
    from tscompress.io.untrusted import UnreadableFileError, read_header
    from tscompress.plan.plan import Plan
    from tscompress.workflows.recipe import load_recipe

_LONGEST_INPUT = 4096
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


#: Target to its reader and seeds.
TARGETS: dict[str, tuple[Callable[[Path], Any], Callable[[], list[bytes]]]] = {
    "plan": (_read_plan, _plan_seeds),
    "recipe": (_read_recipe, _recipe_seeds),
    "header": (read_header, _header_seeds),
}


def one_input(read: Callable[[Path], Any], path: Path, content: bytes) -> None:
    """Read ``content``; an error of the package has one line, and any other one passes through."""
    path.write_bytes(content)
    try:
        read(path)
    except (TscompressError, UnreadableFileError) as error:
        text = str(error)
        assert text.isprintable(), text
        assert 0 < len(text) <= _LONGEST_LINE, text


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    read, make_seeds = TARGETS[arguments.target]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input"
        corpus = Path(directory) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(make_seeds()):
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
            content = mutate(rng, make_seeds())
            try:
                one_input(read, path, content)
            except BaseException:
                Path(f"crash-{arguments.target}-{runs}").write_bytes(content)
                raise
            runs += 1
        print(f"{runs} runs without atheris in {arguments.seconds} s")


if __name__ == "__main__":
    main()
