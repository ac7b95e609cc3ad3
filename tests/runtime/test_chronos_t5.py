"""Chronos-T5 without torch: tokens, logits and paths of the stock pipeline; refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos.chronos import ChronosConfig
from test_runtime import assert_close, series, write_graph_file, write_record
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tscompress import runtime
from tscompress.checkpoints.load import load
from tscompress.errors import CorruptCheckpointError, DataError, UsageError
from tscompress.families.exported import draws_as_source, exported_pipeline
from tscompress.runtime.contexts import stacked
from tscompress.runtime.sampling import Sampling, drawn
from tscompress.runtime.t5_names import DECODER_FILE, ENCODER_FILE
from tscompress.runtime.tokens import UniformBins

onnx: Any = pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings(
    "ignore:We recommend keeping prediction length", "ignore:prediction_length is"
)


@pytest.fixture
def forecaster(exported: dict[str, Path]) -> Any:
    return runtime.load(exported["chronos-t5"], threads=1)


@pytest.fixture
def stock(checkpoints: dict[str, Path]) -> Any:
    return load(checkpoints["chronos-t5"]).forecaster


# --------------------------------------------------------------------------------------------------
# Tokens
# --------------------------------------------------------------------------------------------------


def settings_of(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer_class": "MeanScaleUniformBins",
        "tokenizer_kwargs": {"low_limit": -15.0, "high_limit": 15.0},
        "n_tokens": 4096, "n_special_tokens": 2, "pad_token_id": 0, "eos_token_id": 1,
        "use_eos_token": True, "model_type": "seq2seq", "context_length": 512,
        "prediction_length": 64, "num_samples": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_eos_token": False, "context_length": 30},
        {"n_tokens": 64, "n_special_tokens": 3, "eos_token_id": 2},
        {"tokenizer_kwargs": {"low_limit": -3.3, "high_limit": 7.1}, "n_tokens": 517},
    ],
    ids=["published", "no end", "few", "uneven limits"],
)
def test_tokens_and_values_are_those_of_chronos(changes: dict[str, Any]) -> None:
    settings = settings_of(**changes)
    theirs: Any = ChronosConfig(**settings).create_tokenizer()
    ours = UniformBins(settings)
    assert np.array_equal(ours.centers, theirs.centers.numpy())
    assert np.array_equal(ours.boundaries, theirs.boundaries.numpy())
    context = np.stack(series(80, 80, 80, 80, 80))
    context[2] = np.nan
    context[3] = 0
    context[4, -5:] = 1e6  # beyond the last bin
    ids, mask, scale = theirs.context_input_transform(torch.from_numpy(context))
    found = ours.tokens(context)
    assert np.array_equal(found.tokens, ids.numpy())
    assert np.array_equal(found.observed, mask.numpy())
    assert np.allclose(found.scale, scale.numpy(), rtol=1e-6)
    samples = np.arange(settings["n_tokens"]).reshape(1, 1, -1)  # special ones included
    values = theirs.output_transform(torch.from_numpy(samples), torch.tensor([2.5])).numpy()
    assert np.array_equal(ours.values(samples, np.array([2.5], np.float32)), values)


# --------------------------------------------------------------------------------------------------
# Logits and paths
# --------------------------------------------------------------------------------------------------


def stock_logits(pipeline: Any, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """``[B, P, N, V]`` after the start and tokens ``[B, P, N - 1]``, without a cache."""
    read, mask, _ = pipeline.tokenizer.context_input_transform(torch.from_numpy(context))
    paths = tokens.shape[1]
    before = torch.from_numpy(np.pad(tokens, ((0, 0), (0, 0), (1, 0)))).flatten(0, 1)
    with torch.no_grad():
        output = pipeline.inner_model(
            input_ids=read.repeat_interleave(paths, 0),
            attention_mask=mask.repeat_interleave(paths, 0),
            decoder_input_ids=before,
            use_cache=False,
        )
    logits: np.ndarray = output.logits.reshape(*before.shape[:1], *output.logits.shape[1:]).numpy()
    return logits.reshape(*tokens.shape[:2], -1, logits.shape[-1])


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("lengths", [(48,), (5, 64, 100)], ids=str)
def test_logits_are_those_of_torch(
    lengths: tuple[int, ...], paths: int, forecaster: Any, stock: Any
) -> None:
    context = stacked(series(*lengths))
    # More tokens than slots are added at once, and than distances have a bias of their own.
    tokens = np.random.default_rng(3).integers(2, 64, (len(lengths), paths, 150))
    expected = stock_logits(stock, context, tokens[..., :-1])
    assert_close(forecaster.logits(context, tokens), expected)


def by_inverse_cdf(
    logits: torch.Tensor, uniforms: np.ndarray, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """Tokens of ``[N, V]``, by the warpers of transformers and uniform numbers ``[N]``."""
    warpers = [
        *([TemperatureLogitsWarper(temperature)] if temperature != 1 else []),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ]
    scores = logits.clone()
    scores[:, 1] = -torch.inf  # the end
    for warper in warpers:
        scores = warper(torch.empty(0), scores)
    cumulative = scores.double().softmax(-1).cumsum(-1)
    reached = torch.from_numpy(uniforms)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached, right=True)[:, 0].numpy()


SAMPLING = [
    (1.0, 50, 1.0), (0.7, 5, 1.0), (1.3, 0, 1.0), (1.0, 20, 0.6), (1.0, 0, 0.9), (1, 1, 1),
    (1.0, 0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING)
def test_equal_numbers_draw_equal_tokens(temperature: float, top_k: int, top_p: float) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(200, 64)).astype(np.float32) * 2
    logits[7] = logits[7].round()  # as probable as the last that is kept
    logits[9] = 0
    uniforms = draw.random(200)
    sampling = Sampling(temperature, top_k, top_p, never=1)
    found = drawn(sampling, logits.copy(), uniforms)
    expected = by_inverse_cdf(torch.from_numpy(logits), uniforms, temperature, top_k, top_p)
    different = (found != expected).mean()
    assert different <= (0.01 if top_p < 1 else 0)  # ties are cut by their order
    assert not (found == 1).any()


def test_smallest_number_draws_no_token_without_probability() -> None:
    logits = np.array([[9.0, -np.inf, 1.0, 2.0]], np.float32)
    assert drawn(Sampling(1.0, 0, 1.0, never=0), logits, np.zeros(1)).tolist() == [2]


@pytest.mark.parametrize("horizon", [7, 40], ids=["one call", "three calls"])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING[:4])
def test_equal_numbers_draw_equal_paths(
    horizon: int, temperature: float, top_k: int, top_p: float, forecaster: Any, stock: Any
) -> None:
    contexts = series(48, 20)
    uniforms = np.random.default_rng(5).random((2, 3, horizon))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    found = forecaster.predict(contexts, horizon, 3, uniforms=uniforms, **options)
    context, expected = stacked(contexts), []
    for first in range(0, horizon, 16):
        tokens = np.zeros((2, 3, 0), np.int64)
        for step in range(first, min(first + 16, horizon)):
            logits = torch.from_numpy(stock_logits(stock, context, tokens)[:, :, -1])
            chosen = by_inverse_cdf(logits.flatten(0, 1), uniforms[..., step].ravel(), **options)
            tokens = np.concatenate([tokens, chosen.reshape(2, 3, 1)], axis=-1)
        *_, scale = stock.tokenizer.context_input_transform(torch.from_numpy(context))
        paths = stock.tokenizer.output_transform(torch.from_numpy(tokens), scale)
        expected.append(paths.numpy())
        context = np.concatenate([context, paths.median(dim=1).values.numpy()], axis=-1)
    assert_close(found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("horizon", [None, 40])
def test_torch_numbers_draw_the_paths_of_the_stock_pipeline(
    horizon: int | None, forecaster: Any, stock: Any
) -> None:
    contexts = [torch.from_numpy(one) for one in series(48, 20, 100)]
    pipeline = exported_pipeline(forecaster)
    found = []
    for one in (pipeline, stock):
        with torch.random.fork_rng(), draws_as_source(one):
            torch.manual_seed(11)
            found.append(one.predict(contexts, horizon, num_samples=4, top_k=10))
    assert_close(*found)
    assert not pipeline.draws_as_source


def test_seeds_and_batches(forecaster: Any) -> None:
    contexts = series(48, 48, 48)
    first = forecaster.predict(contexts, 20, 4, seed=3)
    assert first.shape == (3, 4, 20)
    assert np.array_equal(first, forecaster.predict(contexts, 20, 4, seed=3))
    assert not np.array_equal(first, forecaster.predict(contexts, 20, 4, seed=4))
    assert_close(forecaster.predict(contexts, 20, 4, seed=3, batch_size=2), first)
    pipeline = exported_pipeline(forecaster)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one = pipeline.predict(torch.from_numpy(contexts[0]), 8)
        torch.manual_seed(0)
        assert torch.equal(one, pipeline.predict(torch.from_numpy(contexts[0]), 8))


def test_quantiles_and_mean_of_paths(forecaster: Any) -> None:
    levels = [0.05, 0.5, 0.9]
    paths = torch.from_numpy(forecaster.predict(series(48, 20), 6, seed=1))
    quantiles, mean = forecaster.predict_quantiles(series(48, 20), 6, levels, seed=1)
    assert_close(quantiles, torch.quantile(paths, torch.tensor(levels), dim=1).permute(1, 2, 0))
    assert_close(mean, paths.mean(1))


WITHOUT_TORCH = """
import json, sys, warnings
for name in ("torch", "transformers", "chronos", "pandas", "onnx", "pydantic", "yaml"):
    sys.modules[name] = None
import numpy as np, tscompress.runtime
forecaster = tscompress.runtime.load(sys.argv[1])
warnings.simplefilter("ignore")
print(json.dumps(forecaster.predict([np.arange(40.0), np.arange(9.0)], 20, 3, seed=2).tolist()))
"""


def test_paths_need_no_torch(exported: dict[str, Path], forecaster: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(exported["chronos-t5"])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = forecaster.predict([np.arange(40.0), np.arange(9.0)], 20, 3, seed=2)
    assert_close(json.loads(done.stdout), here)


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0}, {"temperature": np.nan}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 1.5},
        {"num_samples": 0}, {"batch_size": 0}, {"seed": -1}, {"seed": 1.5},
        {"uniforms": np.ones((1, 20, 4))}, {"uniforms": np.zeros((1, 2, 3))},
        {"uniforms": "x"},
        {"seed": 1, "uniforms": np.zeros((1, 20, 4))},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_options_out_of_range(option: dict[str, Any], forecaster: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(option))) as refused:
        forecaster.predict_quantiles([[1.0, 2.0]], 4, **option)
    assert len(str(refused.value).splitlines()) == 1


def test_horizons_beyond_one_call_are_said_or_refused(forecaster: Any) -> None:
    with pytest.raises(UsageError, match="limit_prediction_length"):
        forecaster.predict([[1.0, 2.0]], 17, limit_prediction_length=True)
    with pytest.raises(ValueError, match="prediction_length"):
        exported_pipeline(forecaster).predict(torch.ones(9), 17, limit_prediction_length=True)
    for horizon in (None, 16):
        found = forecaster.predict([[1.0, 2.0]], horizon, 1, limit_prediction_length=True)
        assert found.shape == (1, 1, 16)
    with pytest.warns(UserWarning, match="median"):
        forecaster.predict([[1.0, 2.0]], 17, 1)


def test_sampling_options_by_default_are_the_configs(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    given = {"num_samples": 3, "temperature": 0.5, "top_k": 9, "top_p": 0.8}
    directory = tmp_path / "copy"
    shutil.copytree(exported["chronos-t5"], directory)
    change(directory, **given)
    changed, stock = (runtime.load(one, threads=1) for one in (directory, exported["chronos-t5"]))
    found: Any = changed.predict(series(48), 6, seed=1)
    assert found.shape == (1, 3, 6)
    assert np.array_equal(found, stock.predict(series(48), 6, seed=1, **given))
    assert not np.array_equal(found, stock.predict(series(48), 6, 3, seed=1))


def test_series_without_a_value(forecaster: Any) -> None:
    for contexts in ([[np.nan, np.nan]], [[]], []):
        with pytest.raises(DataError, match=r"empty|missing"):
            forecaster.predict(contexts, 4)


def lose_input(directory: Path) -> None:
    model = onnx.load(str(directory / DECODER_FILE))
    kept = [one for one in model.graph.input if one.name != "values_1"]
    zeros = onnx.helper.make_tensor("values_1", onnx.TensorProto.FLOAT, [1, 1, 4, 1, 8], [0.0] * 32)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.append(zeros)
    write_graph_file(directory, DECODER_FILE, model)


def change_bytes(directory: Path) -> None:
    content = bytearray((directory / ENCODER_FILE).read_bytes())
    content[-9] ^= 1
    (directory / ENCODER_FILE).write_bytes(bytes(content))


def change(directory: Path, **settings: Any) -> None:
    write_record(directory, lambda record: record["config"]["chronos_config"].update(settings))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_input, "values_1"),
        (change_bytes, ENCODER_FILE),
        (lambda d: (d / DECODER_FILE).unlink(), DECODER_FILE),
        (lambda d: write_record(d, lambda r: r["sha256"].pop(DECODER_FILE)), DECODER_FILE),
        (lambda d: change(d, tokenizer_class="Other"), "tokenizer_class"),
        (lambda d: change(d, n_tokens=4), "n_tokens"),
        (lambda d: change(d, n_tokens=6400), "vocab_size"),
        (lambda d: change(d, pad_token_id=7), "pad_token_id"),
        (lambda d: change(d, tokenizer_kwargs={"low_limit": 1}), "high_limit"),
        (lambda d: change(d, top_k="many"), "many"),
        (lambda d: write_record(d, lambda r: r["config"].pop("vocab_size")), "vocab_size"),
    ],
)
def test_directory_of_two_graphs_that_is_not_as_it_was_exported(
    damage: Callable[[Path], object], said: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(exported["chronos-t5"], directory)
    damage(directory)
    with pytest.raises(CorruptCheckpointError, match=said) as refused:
        runtime.load(directory)
    assert len(str(refused.value).splitlines()) == 1
