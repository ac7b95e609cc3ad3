"""Files that are broken, or made to harm: a finite result or one clear line, and soon."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from forked import Program
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shared_fixtures import Command

from tscompress.api import compress
from tscompress.checkpoints.config_checks import check_config
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data import series as data
from tscompress.data.reading.tables import SUFFIXES
from tscompress.data.streaming import iterate_series
from tscompress.data.suites import find_suite
from tscompress.errors import (
    CorruptCheckpointError,
    DataError,
    PlanError,
    RecipeError,
    TscompressError,
    UnsupportedModelError,
)
from tscompress.plan.plan import Plan
from tscompress.workflows.recipe import load_pretrain_recipe, load_recipe, load_recovery_config
from tscompress.workflows.save import save

WEIGHTS = "model.safetensors"
SECONDS = 60.0  # of a busy machine; what is meant is no end
LONGEST_LINE = 1000
KINDS = ("chronos-t5", "chronos-bolt", "chronos-2", "factored", "latent")
#: One reader of configs serves both of those that tscompress alone reads.
KINDS_OF_CONFIG = KINDS[:-1]
#: One reader of weights serves all stock checkpoints, one the factored ones.
FILES = ("chronos-bolt", "factored")

#: The same cases every time; a longer search is ``eval/fuzz.py``.
EVERY_TIME = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


# --------------------------------------------------------------------------------------------------
# What may happen
# --------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """No Exception: nobody may take it for a bad config."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong(f"it took more than {seconds} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def assert_one_line(error: TscompressError) -> None:
    text = str(error)
    assert text.strip()
    assert len(text) <= LONGEST_LINE, text
    assert text.isprintable(), text


def attempt(action: Callable[[], Any]) -> TscompressError | None:
    """The error of the package that ``action`` ended with; any other one is a failure."""
    with time_limit():
        try:
            action()
        except TscompressError as error:
            assert_one_line(error)
            return error
    return None


def load_and_forecast(directory: Path) -> None:
    loaded = load(directory)
    quantiles, mean = loaded.forecaster.predict_quantiles(
        [torch.sin(torch.arange(40.0))], prediction_length=3
    )
    for forecast in (*quantiles, *mean):
        assert torch.isfinite(forecast).all()


# --------------------------------------------------------------------------------------------------
# Checkpoints to break
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Stock checkpoints of three families, and two that tscompress alone reads."""
    root = tmp_path_factory.mktemp("originals")
    calibration = CalibrationConfig(
        source="synthetic", num_series=6, context_length=48, batch_size=6
    )
    factored = compress(checkpoints["chronos-t5"], rank=2, method="svd")
    latent = compress(checkpoints["chronos-bolt"], latent=4, calibration=calibration)
    return checkpoints | {
        "factored": save(factored, root / "factored"),
        "latent": save(latent, root / "latent"),
    }


@contextmanager
def broken(original: Path) -> Iterator[Path]:
    """A copy; hypothesis runs many examples in one test, so no fixture of pytest fits."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(shutil.copytree(original, Path(parent) / "copy"))


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["chronos-bolt"], tmp_path / "copy"))


def with_header(content: bytes, header: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def header_of(content: bytes) -> dict[str, Any]:
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(content[8 : 8 + length])
    return found


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
@settings(EVERY_TIME, max_examples=6)
@given(share=st.floats(0, 1), where=st.sampled_from(["header", "anywhere"]))
def test_truncated_weights(originals: dict[str, Path], kind: str, share: float, where: str) -> None:
    with broken(originals[kind]) as directory:
        content = (directory / WEIGHTS).read_bytes()
        whole = len(content) if where == "anywhere" else 8 + len(json.dumps(header_of(content)))
        (directory / WEIGHTS).write_bytes(content[: int(share * whole)])
        error = attempt(lambda: load_and_forecast(directory))
        assert isinstance(error, CorruptCheckpointError) or share == 1


@pytest.mark.parametrize("kind", FILES)
@settings(EVERY_TIME, max_examples=10)
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4
    ),
    in_header=st.booleans(),
)
def test_flipped_bits(
    originals: dict[str, Path], kind: str, flips: list[tuple[float, int]], in_header: bool
) -> None:
    with broken(originals[kind]) as directory:
        content = bytearray((directory / WEIGHTS).read_bytes())
        start = int.from_bytes(content[:8], "little") + 8
        for share, bit in flips:
            size = start if in_header else len(content) - start
            content[int(share * size) + (0 if in_header else start)] ^= 1 << bit
        (directory / WEIGHTS).write_bytes(content)
        attempt(lambda: load_and_forecast(directory))


SIZES = st.sampled_from([-1, 0, 1, 3, 24, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, 1.5, "8", None])
ENTRIES = st.one_of(
    st.tuples(st.just("shape"), st.lists(SIZES, max_size=3)),
    st.tuples(st.just("data_offsets"), st.lists(SIZES, max_size=3)),
    st.tuples(
        st.just("dtype"),
        st.sampled_from(
            ["F64", "F16", "I64", "I32", "BOOL", "F8_E4M3", "F4", "C64", "X", "", 3, None, []]
        ),
    ),
    st.tuples(st.just("spare"), st.just(1)),
)


@pytest.mark.parametrize("kind", FILES)
@settings(EVERY_TIME, max_examples=12)
@given(pick=st.integers(0, 10**6), entry=ENTRIES)
def test_false_headers_are_refused(
    originals: dict[str, Path], kind: str, pick: int, entry: tuple[str, Any]
) -> None:
    with broken(originals[kind]) as directory:
        content = (directory / WEIGHTS).read_bytes()
        header = header_of(content)
        names = sorted(name for name in header if name != "__metadata__")
        header[names[pick % len(names)]][entry[0]] = entry[1]
        (directory / WEIGHTS).write_bytes(with_header(content, json.dumps(header).encode()))
        attempt(lambda: load_and_forecast(directory))


def overlapping(header: dict[str, Any]) -> None:
    first, second = sorted(name for name in header if name != "__metadata__")[:2]
    header[second] = dict(header[first])


def beyond_the_end(header: dict[str, Any]) -> None:
    for entry in (value for name, value in header.items() if name != "__metadata__"):
        entry["data_offsets"] = [offset + 10**9 for offset in entry["data_offsets"]]


def huge(header: dict[str, Any]) -> None:
    name = next(name for name in header if name != "__metadata__")
    header[name] = {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("change", [overlapping, beyond_the_end, huge, dict.clear])
def test_false_offsets_are_refused(
    originals: dict[str, Path], kind: str, change: Callable[[dict[str, Any]], None]
) -> None:
    with broken(originals[kind]) as directory:
        content = (directory / WEIGHTS).read_bytes()
        header = header_of(content)
        change(header)
        (directory / WEIGHTS).write_bytes(with_header(content, json.dumps(header).encode()))
        error = attempt(lambda: load_and_forecast(directory))
        assert isinstance(error, CorruptCheckpointError)
        assert "truncated or damaged" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        (2**63).to_bytes(8, "little"),
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (6).to_bytes(8, "little") + b"\xff" * 6,
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (17 * 2**20).to_bytes(8, "little") + b" " * (17 * 2**20),
    ],
    ids=range(8),
)
def test_false_header_lengths_are_refused(copy: Path, content: bytes) -> None:
    (copy / WEIGHTS).write_bytes(content)
    assert isinstance(attempt(lambda: load(copy)), CorruptCheckpointError)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -3e38])
@pytest.mark.parametrize("kind", FILES)
def test_non_finite_values_are_refused(originals: dict[str, Path], kind: str, value: float) -> None:
    with broken(originals[kind]) as directory:
        tensors = load_file(directory / WEIGHTS)
        name = sorted(tensors)[len(tensors) // 2]
        tensors[name].view(-1)[-1] = value
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})
        assert isinstance(attempt(lambda: load(directory)), CorruptCheckpointError)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_weights_of_other_dtypes(originals: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    with broken(originals[kind]) as directory:
        tensors = load_file(directory / WEIGHTS)
        save_file({n: t.to(dtype) for n, t in tensors.items()}, directory / WEIGHTS)
        error = attempt(lambda: load(directory))
        assert isinstance(error, CorruptCheckpointError) == (not dtype.is_floating_point)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_extra_weights_are_refused(originals: dict[str, Path], kind: str) -> None:
    names = sorted(load_file(originals[kind] / WEIGHTS))
    for name in names[:: max(1, len(names) // 6)]:
        with broken(originals[kind]) as directory:
            tensors = load_file(directory / WEIGHTS)
            spare = tensors | {f"encoder.block.7.{name}\n": torch.zeros(2)}
            save_file(spare, directory / WEIGHTS, {"format": "pt"})
            assert isinstance(attempt(lambda d=directory: load(d)), CorruptCheckpointError)
            del tensors[name]
            save_file(tensors, directory / WEIGHTS, {"format": "pt"})
            assert isinstance(attempt(lambda d=directory: load(d)), CorruptCheckpointError)


# --------------------------------------------------------------------------------------------------
# Links, pipes, pickles, code
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "generation_config.json", "plan.json"])
def test_links_out_of_the_directory(copy: Path, tmp_path: Path, name: str) -> None:
    source = copy / name if (copy / name).exists() else copy / "config.json"
    outside = Path(shutil.copy(source, tmp_path / "outside"))
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(outside)
    error = attempt(lambda: load(copy))
    assert f"{name} is a link out of the directory" in str(error)
    (copy / name).unlink()
    (copy / name).symlink_to(name)  # to itself
    assert attempt(lambda: load(copy)) is not None


def test_links_within_a_directory_and_the_cache_of_the_hub_load(copy: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(copy.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_and_forecast(snapshot)
    (tmp_path / "linked").symlink_to(snapshot)  # the directory itself may be a link
    load_and_forecast(tmp_path / "linked")
    (copy / WEIGHTS).rename(copy / "weights")
    (copy / WEIGHTS).symlink_to("weights")
    load_and_forecast(copy)


@pytest.mark.parametrize(
    "name", ["config.json", WEIGHTS, "model.safetensors.index.json", "adapter_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_special_files_are_refused(copy: Path, name: str, kind: str) -> None:
    for old in (name, WEIGHTS):
        (copy / old).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "directory":
        (copy / name).mkdir()
    else:
        (copy / name).symlink_to("/dev/zero")
    assert attempt(lambda: load(copy)) is not None


def test_pickles_are_not_opened(copy: Path, tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "model.pt"):
        torch.save({"weight": Planted()}, copy / name)
    load_and_forecast(copy)
    (copy / WEIGHTS).unlink()
    assert isinstance(attempt(lambda: load(copy)), UnsupportedModelError)
    index = {"metadata": {}, "weight_map": {"shared.weight": "pytorch_model.bin"}}
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (copy / name).write_text(json.dumps(index))
        assert attempt(lambda: load(copy)) is not None
    assert not (tmp_path / "executed").exists()


CODE = {
    "auto_map": {
        "AutoConfig": "planted.C", "AutoModel": "planted.M", "AutoModelForSeq2SeqLM": "planted.M",
    },
    "custom_pipelines": {"forecast": {"impl": "planted.P"}},
    "architectures": ["planted.M"],
    "model_type": "planted",
    "tokenizer_class": "planted.T",
    "attn_implementation": "planted/kernel",
    "_attn_implementation": "planted/kernel",
    "quantization_config": {"quant_method": "planted"},
    "transformers_weights": "../planted.safetensors",
    "dtype": "planted",
    "feed_forward_proj": "gated-planted",
    "dense_act_fn": "planted",
}  # fmt: skip


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("kind", KINDS_OF_CONFIG)
def test_no_code_of_a_checkpoint_runs(
    originals: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    key: str,
) -> None:
    directory = Path(shutil.copytree(originals[kind], tmp_path / "copy"))
    trace = tmp_path / "executed"
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nC = M = P = T = object\n"
    for name in ("planted.py", "__init__.py", "modeling_planted.py"):
        (directory / name).write_text(code)
    config = json.loads((directory / "config.json").read_text())
    base = config.get("base_config", config)
    for settings_ in (config, base):
        settings_[key] = CODE[key]
    if key in base["chronos_config"]:
        base["chronos_config"][key] = CODE[key]
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(directory)
    attempt(lambda: load_and_forecast(directory))
    assert not trace.exists()


# --------------------------------------------------------------------------------------------------
# Configs
# --------------------------------------------------------------------------------------------------

ABSURD = st.one_of(
    st.sampled_from(
        [
            10**9, 2**31, 2**63, 10**30, 10**400, -1, 0, 1, 3, 1.5, 1e308, math.nan, math.inf,
            -math.inf, True, None, "", "8", "wide", "x" * 10_000, "a\nb\x1b[31m", "\ud800", [],
            [8, 8], [[[[8]]]], {}, {"a": {"b": []}}, [math.nan] * 9, [10**9] * 9,
        ]
    ),
    st.recursive(st.none() | st.integers() | st.floats(), st.lists, max_leaves=8),
)  # fmt: skip


@cache
def config_keys(text: str) -> list[tuple[str, ...]]:
    """Paths to every setting of a config."""

    def walk(settings_: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, value in settings_.items():
            yield (*above, name)
            if isinstance(value, dict):
                yield from walk(value, (*above, name))

    return sorted(walk(json.loads(text), ()))


@pytest.mark.parametrize("kind", KINDS_OF_CONFIG)
@settings(EVERY_TIME, max_examples=15)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), ABSURD), min_size=1, max_size=2),
    delete=st.booleans(),
)
def test_absurd_configs(
    originals: dict[str, Path], kind: str, changes: list[tuple[int, Any]], delete: bool
) -> None:
    with broken(originals[kind]) as directory:
        text = (directory / "config.json").read_text()
        config = json.loads(text)
        keys = config_keys(text)
        for pick, value in changes:
            *above, name = keys[pick % len(keys)]
            inner = config
            for part in above:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if not isinstance(inner, dict):
                continue
            inner.pop(name, None)
            if not delete:
                inner[name] = value
        (directory / "config.json").write_text(json.dumps(config))
        attempt(lambda: load_and_forecast(directory))


OF_FORECASTS = ("temperature", "top_p")


@pytest.mark.parametrize("value", [10**400, -(10**400), math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    ["dropout_rate", "initializer_factor", "layer_norm_epsilon", "rope_theta", *OF_FORECASTS],
)
def test_numbers_out_of_bounds(name: str, value: float) -> None:
    config = {"num_layers": 1, "chronos_config": {}}
    (config["chronos_config"] if name in OF_FORECASTS else config)[name] = value  # type: ignore[index]
    error = attempt(lambda: check_config(config, "it", tensors=9))
    assert isinstance(error, CorruptCheckpointError)
    assert f"config.json has {name} " in str(error)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("relative_attention_num_buckets", {"relative_attention_num_buckets": 3}),
        ("relative_attention_max_distance", {"relative_attention_max_distance": 16}),
        ("n_tokens", {"chronos_config": {"n_tokens": 4, "n_special_tokens": 2}}),
        ("high_limit", {"chronos_config": {"tokenizer_kwargs": {"low_limit": 0, "high_limit": 0}}}),
    ],
)
def test_numbers_that_do_not_go_together(name: str, settings: dict[str, Any]) -> None:
    config = {"num_layers": 1, "vocab_size": 99, **settings}
    error = attempt(lambda: check_config(config, "it", tensors=9))
    assert isinstance(error, CorruptCheckpointError)
    assert f"config.json has {name} " in str(error)


GENERATION = {
    "_from_model_config": True, "decoder_start_token_id": 0, "eos_token_id": [1],
    "pad_token_id": 0, "transformers_version": "4.49.0", "use_cache": True, "max_length": 20,
    "do_sample": True, "num_beams": 1, "output_attentions": False, "suppress_tokens": None,
    "repetition_penalty": 1.0, "temperature": 0.7, "num_assistant_tokens": 20,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["chronos-t5", "factored"])
def test_harmless_generation_settings_are_accepted(originals: dict[str, Path], kind: str) -> None:
    with broken(originals[kind]) as directory:
        (directory / "generation_config.json").write_text(json.dumps(GENERATION))
        load_and_forecast(directory)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_beams": 1_000_000}, "has 'num_beams': 1000000"),
        ({"num_beam_groups": 3}, "has 'num_beam_groups': 3"),
        ({"dola_layers": "low"}, "has 'dola_layers': 'low'"),
        ({"custom_generate": "somebody/code"}, "has 'custom_generate': 'somebody/code'"),
        ({"prompt_lookup_num_tokens": 2}, "has 'prompt_lookup_num_tokens': 2"),
        ({"stop_strings": ["x"]}, "has 'stop_strings': ['x']"),
        ({"suppress_tokens": ["all"]}, "has 'suppress_tokens': ['all']"),
        ({"repetition_penalty": 2.0}, "has 'repetition_penalty': 2.0"),
        ({"forced_eos_token_id": 10**9}, "has 'forced_eos_token_id': 1000000000"),
        ({"eos_token_id": 10**9}, "generation_config.json has eos_token_id 1000000000"),
        ({"eos_token_id": [1, 2]}, "generation_config.json has eos_token_id [1, 2]"),
        ({"decoder_start_token_id": "0"}, "generation_config.json has decoder_start_token_id '0'"),
    ],
)
@pytest.mark.parametrize("kind", ["chronos-t5", "factored"])
def test_harmful_generation_settings_are_refused(
    originals: dict[str, Path], kind: str, change: dict[str, Any], text: str
) -> None:
    with broken(originals[kind]) as directory:
        (directory / "generation_config.json").write_text(json.dumps(GENERATION | change))
        assert text in str(attempt(lambda: load(directory)))
        (directory / "generation_config.json").unlink()
        ours = {"custom_generate", "eos_token_id", "decoder_start_token_id"}
        if kind == "chronos-t5" and not ours & set(change):  # where transformers 4 had the others
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps(config | change))
            assert text in str(attempt(lambda: load(directory)))


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "is not an object"), ("7", "is not an object"), ("{", "cannot be read as JSON")],
)
def test_invalid_generation_settings_are_refused(copy: Path, text: str, said: str) -> None:
    (copy / "generation_config.json").write_text(text)
    assert f"generation_config.json {said}" in str(attempt(lambda: load(copy)))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_forbidden_files_are_refused(copy: Path, name: str) -> None:
    (copy / name).chmod(0)
    assert f"{name} cannot be read (permission" in str(attempt(lambda: load(copy)))


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_unreadable_files_are_refused(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, also for root."""
    before = Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before(path, **options)

    monkeypatch.setattr("tscompress.io.untrusted.Path.stat", refuse)
    assert f"{name} cannot be read (permission" in str(attempt(lambda: load(copy)))


SETTINGS = (
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size",
    "relative_attention_num_buckets", "layer_norm_epsilon", "initializer_factor", "rope_theta",
    "n_tokens", "num_samples", "prediction_length", "input_patch_size", "output_patch_size",
    "quantiles", "temperature", "top_k", "context_length", "max_output_patches",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_absurd_sizes(originals: dict[str, Path], kind: str, name: str) -> None:
    for value in (10**9, 10**18, 0, -1, math.nan, "8", [8], None):
        with broken(originals[kind]) as directory:
            config = json.loads((directory / "config.json").read_text())
            base = config.get("base_config", config)
            inner = base["chronos_config"] if name in base["chronos_config"] else base
            inner[name] = value
            (directory / "config.json").write_text(json.dumps(config))
            attempt(lambda d=directory: load_and_forecast(d))


@pytest.mark.parametrize(
    "text",
    [
        b"{" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"d_model": ' + b"9" * 10_000 + b"}",
        b" " * (17 * 2**20),
        b'{"model_type": "t5", "model_type": ["t5"]}',
        b"\xef\xbb\xbf{}",
        b"\x00",
        b"NaN",
        b'{"model_type": "\\ud800\\u001b[31m"}',
        b'{"chronos_pipeline_class": {"a": []}, "model_type": []}',
    ],
    ids=range(10),
)
def test_invalid_configs_are_refused(copy: Path, text: bytes) -> None:
    (copy / "config.json").write_bytes(text)
    assert attempt(lambda: load(copy)) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 2**24},
        pytest.param({"d_model": 2**20, "d_ff": 2**20}, marks=pytest.mark.slow),
        pytest.param({"num_heads": 2**20}, marks=pytest.mark.slow),
        pytest.param({"num_layers": 10**9}, marks=pytest.mark.slow),
        pytest.param({"weights": 2**40}, marks=pytest.mark.slow),
        pytest.param({"config": 17 * 2**20}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_declared_sizes_take_no_memory(
    originals: dict[str, Path], tmp_path: Path, change: dict[str, int]
) -> None:
    """They are held against the file before anything is allocated."""
    copy = Path(shutil.copytree(originals["chronos-t5"], tmp_path / "copy"))
    if "weights" in change:
        shape = [2**20, change["weights"] // 2**22]
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, change["weights"]]}
        content = (copy / WEIGHTS).read_bytes()
        (copy / WEIGHTS).write_bytes(with_header(content, json.dumps({"shared": entry}).encode()))
    elif "config" in change:
        (copy / "config.json").write_text("[" + "[]," * (change["config"] // 3) + "[]]")
    else:
        config = json.loads((copy / "config.json").read_text()) | change
        (copy / "config.json").write_text(json.dumps(config))
    code = (
        "import resource, sys, torch\n"
        "from tscompress.errors import TscompressError\n"
        "from tscompress.checkpoints.load import load\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try: load(sys.argv[1])\n"
        "except TscompressError as error: print(error)\n"
    )
    returned, out, err = Program((str(copy),), tmp_path / "said", code).run()
    assert returned == 0, err
    assert b"copy" in out


# --------------------------------------------------------------------------------------------------
# Plans and recipes
# --------------------------------------------------------------------------------------------------


def mutated(content: Any, pick: int, value: Any, delete: bool) -> Any:
    """``content`` with one of its leaves or branches replaced or removed."""
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        pairs = inner.items() if isinstance(inner, dict) else enumerate(inner)
        for key, below in list(pairs):
            places.append((inner, key))
            if isinstance(below, dict | list) and below:
                walk(below)

    content = json.loads(json.dumps(content))
    walk(content)
    inner, key = places[pick % len(places)]
    if delete:
        del inner[key]
    else:
        inner[key] = value
    return content


@pytest.mark.parametrize("kind", ["factored", "latent"])
@settings(EVERY_TIME, max_examples=30)
@given(pick=st.integers(0, 10**6), value=ABSURD, delete=st.booleans())
def test_mutated_plans_load_or_are_refused(
    originals: dict[str, Path], kind: str, pick: int, value: Any, delete: bool
) -> None:
    with broken(originals[kind]) as directory:
        plan = json.loads((directory / "plan.json").read_text())
        changed = mutated(plan, pick, value, delete)
        (directory / "plan.json").write_text(json.dumps(changed))
        attempt(lambda: load_and_forecast(directory))
        attempt(lambda: Plan.load(directory / "plan.json").summary())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        "1" * 10_000,
        " " * (17 * 2**20),
        "",
        "[]",
        "NaN",
        '{"a\\nb\\ud800": 1}',
        json.dumps({"family": "t5", "method": "svd", "projections": [
            {"name": f"{n % 2}", "part": "attention", "out_features": 2, "in_features": 2}
            for n in range(100_000)]}),
        json.dumps({"family": "chronos-2", "method": "fold", "heads": [
            {"name": "x", "kind": "time", "d_model": 1, "num_heads": 1, "head_size": 2**31,
             "qk_size": 2, "vo_size": 2, "frequencies": [2**29]}]}),
        json.dumps({"family": "t5", "method": "svd", "projections": [
            {"name": "x", "part": "attention", "out_features": 10**400, "in_features": 10**400,
             "rank": 10**400}]}),
    ],
    ids=range(11),
)  # fmt: skip
def test_invalid_plans_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    attempt(lambda: Plan.load(tmp_path / "plan.json").summary())


RECIPE: dict[str, Any] = {
    "model": "reference/bolt",
    "output": "out",
    "schedule": {"kind": "rank", "rank": 8},
    "ff_ratio": 0.5,
    "calibration": {"num_series": 8, "context_length": 64},
    "recover": {"steps": 3, "buckets": [{"context_length": 8, "horizon": 4, "batch_size": 2}]},
    "bench": {"batch_size": 2, "context_length": 8},
}
RECIPE_READERS = {
    "compress": load_recipe,
    "pretrain": load_pretrain_recipe,
    "recover": load_recovery_config,
    "suite": find_suite,
}


@settings(EVERY_TIME, max_examples=80)
@given(pick=st.integers(0, 10**6), value=ABSURD, delete=st.booleans())
def test_recipes_with_absurd_values(pick: int, value: Any, delete: bool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "recipe.yaml"
        text = yaml.safe_dump(mutated(RECIPE, pick, None, delete) if delete else None)
        if not delete:  # JSON is YAML, and says what YAML's writer would refuse
            text = json.dumps(mutated(RECIPE, pick, value, False))
        path.write_text(text, encoding="utf-8")
        error = attempt(lambda: load_recipe(path))
        assert error is None or isinstance(error, RecipeError)


BOMB = "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]"
                                    for n in range(1, 30)])  # fmt: skip


@pytest.mark.parametrize("reader", RECIPE_READERS)
@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: &a [*a]",
        "<<: &m {<<: *m}",
        "[" * 1_000_000,
        "- " * 100_000,
        "? " * 100_000,
        "{a: " * 10_000,
        "x" * (2 * 2**20),
        "model: 2001-99-99",
        "model: !!float x",
        "model: !!int ''",
        "model: !!bool x",
        "model: !!timestamp x",
        "model: !!binary x",
        "model: !!set {a, b}",
        "model: !!omap 3",
        "model: !!python/object/apply:os.system [ls]",
        "model: !planted {a: b}",
        'model: "\\UFFFFFFFF"',
        'model: "\\ud800"',
        "model: " + "9" * 10_000,
        "model: 0x" + "f" * 10_000,
        "? [a]\n: b",
        "? {a: b}\n: c",
        "1: 2",
        "null: 2",
        "a: b\n---\nc: d",
        "%YAML 9.9\n---\na: b",
        "",
        "\t",
        "\x00",
        "a: 1:60:60:60",
        "[{name: x, hf_repo: y, offset: -1, prediction_length: 1, num_rolls: [[]]}]",
    ],
    ids=range(33),
)
def test_harmful_yaml_is_refused(tmp_path: Path, reader: str, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    error = attempt(lambda: RECIPE_READERS[reader](path))  # type: ignore[operator]
    assert isinstance(error, RecipeError)


@settings(EVERY_TIME, max_examples=100)
@given(content=st.binary(max_size=200), name=st.sampled_from(["plan.json", "recipe.yaml"]))
def test_plans_and_recipes_of_garbage(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / name
        path.write_bytes(content)
        reader: Any = Plan.load if name == "plan.json" else load_recipe
        assert isinstance(attempt(lambda: reader(path)), PlanError | RecipeError)


# --------------------------------------------------------------------------------------------------
# Series
# --------------------------------------------------------------------------------------------------

CELLS = st.one_of(
    st.sampled_from(
        [
            "1", "-2.5", "1e30", "-1e30", "1e300", "1e999", "nan", "inf", "", "text", "2024-01-01",
            "2024-01-01T00:00:00+02:00", "2024-01-01 00:00-05:00", "9999-99-99", "0001-01-01",
            '"a,b"', "1,2", "0x10", "ε", "9" * 400, "True", "\x00", "1_000",
        ]
    ),
    st.floats().map(str),
)  # fmt: skip
COLUMNS = st.sampled_from(
    ["target", "y", "value", "item_id", "id", "timestamp", "ds", "date", "a", "", "Y", "\ufeffy"]
)


def read_both(path: Path) -> list[np.ndarray[Any, Any]]:
    """Through both readers; what they give is float32, one-dimensional and has no infinity."""
    found: list[np.ndarray[Any, Any]] = []
    attempt(lambda: found.extend(data.read_series(path)))
    attempt(lambda: found.extend(iterate_series(path)))
    for values in found:
        assert (values.dtype, values.ndim) == (np.float32, 1)
        assert not np.isinf(values).any()
    return found


@settings(EVERY_TIME, max_examples=80)
@given(
    header=st.lists(COLUMNS, min_size=1, max_size=4),
    rows=st.lists(st.lists(CELLS, max_size=5), max_size=6),
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]),
)
def test_hostile_csv(header: list[str], rows: list[list[str]], encoding: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "x.csv"
        lines = [",".join(cells) for cells in [header, *rows]]
        path.write_text("\n".join(lines) + "\n", encoding=encoding)
        read_both(path)


@settings(EVERY_TIME, max_examples=60)
@given(
    records=st.lists(
        st.fixed_dictionaries(
            {"target": ABSURD | st.lists(ABSURD, max_size=4)},
            optional={"freq": ABSURD | st.sampled_from(["99999999W", "0D", "-1H"])},
        )
        | ABSURD,
        max_size=3,
    )
)
def test_hostile_json_lines(records: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "x.jsonl"
        path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
        read_both(path)


FRAME = pd.DataFrame(
    {
        "item_id": ["a"] * 20 + ["b"] * 20,
        "timestamp": pd.date_range("2024-01-01", periods=40),
        "target": np.arange(40.0),
    }
)


@cache
def table(suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / f"x{suffix}"
        FRAME.to_parquet(path) if suffix == ".parquet" else FRAME.to_feather(path)
        return path.read_bytes()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@settings(EVERY_TIME, max_examples=60)
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    kept=st.floats(0, 1) | st.just(1.0),
)
def test_damaged_tables(suffix: str, flips: list[tuple[float, int]], kept: float) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / f"x{suffix}"
        content = bytearray(table(suffix))
        for share, byte in flips:
            content[int(share * len(content))] = byte
        path.write_bytes(content[: int(kept * len(content))])
        read_both(path)


@settings(EVERY_TIME, max_examples=100)
@given(content=st.binary(max_size=300), suffix=st.sampled_from(SUFFIXES))
def test_series_of_garbage(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / f"x{suffix}"
        path.write_bytes(content)
        read_both(path)


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("y\nnan\nnan\n", False),
        ("y\n", False),
        ("", False),
        ("y\n1\n", True),
        ("y\n" + "5\n" * 50, True),
        ("y\n" + "1e17\n-1e17\n" * 20, True),
        ("y\n" + "3e38\n" * 40, False),
        ("y\n" + "1e-40\n" * 40, True),
        ("y\none\ntwo\n", False),
        ("ds,y\n" + "2024-01-01,1\n" * 30, False),
        ("ds,y\n2024-01-01T00:00+02:00,1\n2024-01-01T00:00-05:00,2\n2024-01-03,3\n", False),
        ("id,y\n" + "a,1\na,\n" * 20 + "b,\n", True),
        ("y,y,y\n1,2,3\n", False),
        ("y\n1,2,3\n4\n5,6\n", None),
        ("a,b\n1,2\n3\n4,5,6\n", False),
    ],
    ids=range(15),
)
def test_odd_series_calibrate_to_finite_weights(
    originals: dict[str, Path], tmp_path: Path, text: str, readable: bool | None
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    found: list[Any] = []
    error = attempt(lambda: found.extend(data.read_series(path)))
    assert readable is None or readable == (error is None), error
    if error is not None:
        assert isinstance(error, DataError)
        return

    def fold_and_forecast() -> None:
        calibration = CalibrationConfig(num_series=4, context_length=48, batch_size=4)
        small = compress(originals["chronos-bolt"], rank=4, series=found, calibration=calibration)
        assert all(torch.isfinite(p).all() for p in small.model.parameters())

    attempt(fold_and_forecast)


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def test_command_refuses_in_one_line(command: Command, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"\xff" * 50)
    (tmp_path / "nan.csv").write_text("y\nnan\n")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"d_model": 10**9}))
    output = ("--output", tmp_path / "out")
    calls: list[tuple[object, ...]] = [
        ("run", tmp_path / "bomb.yaml"),
        ("pretrain", tmp_path / "bomb.yaml", *output),
        ("compress", "reference/bolt", *output, "--recipe", tmp_path / "bomb.yaml"),
        ("compress", "reference/bolt", *output, "--plan", tmp_path / "deep.json"),
        ("compress", "reference/bolt", *output, "--rank", 8, "--series", tmp_path / "bad.parquet"),
        ("compress", "reference/bolt", *output, "--rank", 8, "--series", tmp_path / "nan.csv"),
        ("compress", copy, *output, "--rank", 4),
        ("profile", copy),
        ("compare-profiles", tmp_path / "deep.json", tmp_path / "deep.json"),
        ("evaluate", copy),
        ("evaluate", "seasonal-naive", "--suite", tmp_path / "bomb.yaml"),
        ("bench", copy),
        ("recover", copy, "--teacher", copy, *output),
        ("diff", tmp_path / "deep.json", tmp_path / "deep.json"),
    ]
    for arguments in calls:
        with time_limit(60):
            outcome = command(*arguments)
        assert outcome.code in (1, 2), arguments
        assert "Traceback" not in outcome.err
        assert "unexpected" not in outcome.err, outcome.err
        assert len(outcome.err.splitlines()) == 1, outcome.err
    assert not (tmp_path / "out").exists()
