"""What is timed, counted and measured; nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import Chronos2Pipeline, ChronosBoltPipeline, ChronosPipeline
from chronos.chronos import ChronosConfig, ChronosModel
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from rich.console import Console
from shared_fixtures import cache_of
from torch import nn

from tscompress.benchmark.bench import bench
from tscompress.benchmark.named_models import loaded_pipelines
from tscompress.benchmark.process_memory import forget_peak, peak_rss_bytes, process_memory
from tscompress.benchmark.results import BenchResult, Run, ratio_interval
from tscompress.benchmark.sizes import (
    bytes_on_disk,
    count_macs,
    kv_cache_bytes,
    parameter_bytes,
    parameter_count,
)
from tscompress.benchmark.tables import bench_table
from tscompress.benchmark.workload import Workload, forecast, make_workload, synthetic_batch
from tscompress.checkpoints.given import loaded_of
from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.errors import ModelNotFoundError, RecipeError, TscompressError, UsageError
from tscompress.families.registry import adapter_of_pipeline
from tscompress.layers.low_rank import LowRankLinear
from tscompress.layers.shared_cross_attention import shares_cross_attention
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

D_MODEL, D_KV, D_FF, HEADS, LAYERS, VOCABULARY, PATCH, BLOCK = 16, 4, 24, 2, 2, 64, 8, 6
INNER = HEADS * D_KV
SHAPE = Architecture(
    d_model=D_MODEL,
    d_kv=D_KV,
    d_ff=D_FF,
    num_layers=LAYERS,
    num_decoder_layers=LAYERS,
    num_heads=HEADS,
    context_length=32,
    prediction_length=BLOCK,
    vocab_size=VOCABULARY,
    patch_size=PATCH,
    top_k=5,
)
WORKLOAD = Workload(batch_size=3, context_length=20, horizon=5, num_samples=4)


def build(family: str) -> Any:
    stage = Stage(steps=1, buckets=(Bucket(context_length=32, horizon=BLOCK, batch_size=1),))
    recipe = PretrainRecipe(family=family, name="tiny", architecture=SHAPE, stages=(stage,))
    return build_model(recipe).eval()


@pytest.fixture
def t5() -> Any:
    model = build("chronos-t5")
    config = ChronosConfig(**model.config.chronos_config)
    return ChronosPipeline(config.create_tokenizer(), ChronosModel(config, model))


@pytest.fixture
def bolt() -> Any:
    return ChronosBoltPipeline(build("chronos-bolt"))


@pytest.fixture
def chronos2() -> Any:
    config = Chronos2CoreConfig(
        d_model=D_MODEL,
        d_kv=D_KV,
        d_ff=D_FF,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        vocab_size=2,
        reg_token_id=1,
        chronos_config={
            "context_length": 32,
            "input_patch_size": 4,
            "input_patch_stride": 4,
            "output_patch_size": 4,
            "max_output_patches": 4,
            "quantiles": list(QUANTILE_LEVELS),
            "use_reg_token": True,
            "use_arcsinh": True,
        },
    )
    return Chronos2Pipeline(Chronos2Model(config).eval())


class FakeClock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FakePipeline(ChronosBoltPipeline):  # type: ignore[misc]
    """Takes ``durations_ms`` one after the other, on a clock that the test owns."""

    model_context_length = 512

    def __init__(self, clock: FakeClock, durations_ms: list[float], log: list[str], name: str):
        self.inner_model = nn.Linear(2, 3).eval()
        self.clock, self.log, self.name = clock, log, name
        self.durations_ms = iter(durations_ms)

    def predict(self, series: torch.Tensor, prediction_length: int) -> None:
        self.log.append(self.name)
        self.clock.seconds += next(self.durations_ms) / 1000


def fake_bench(
    durations_ms: dict[str, list[float]], **options: Any
) -> tuple[BenchResult, list[str]]:
    clock, log = FakeClock(), list[str]()
    pipelines: Any = {n: FakePipeline(clock, d, log, n) for n, d in durations_ms.items()}
    workload = Workload(
        batch_size=4, context_length=8, warmup=0, repeats=len(next(iter(durations_ms.values())))
    )
    return bench(pipelines, workload, measure_macs=False, clock=clock, **options), log


@pytest.fixture
def threads() -> Iterator[Callable[[], int]]:
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# Workload
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size: .*got 0"),
        ({"batch": 8}, r"batch: .*got 8; .*'batch_size'"),
        ({"device": "tpu"}, "device: .*got 'tpu'"),
    ],
)
def test_invalid_workload_is_named_in_one_line(fields: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        make_workload(fields)
    assert "\n" not in str(error.value)


def test_synthetic_batch_is_finite_and_fixed_by_the_seed() -> None:
    batch = synthetic_batch(WORKLOAD)
    assert batch.shape == (3, 20)
    assert batch.isfinite().all()
    assert torch.equal(batch, synthetic_batch(WORKLOAD))
    assert not torch.equal(batch, synthetic_batch(WORKLOAD.model_copy(update={"seed": 1})))


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------


def test_tied_parameters_count_once(t5: Any) -> None:
    model = t5.inner_model
    assert model.lm_head.weight is model.shared.weight
    attention = 4 * D_MODEL * INNER
    buckets = model.config.relative_attention_num_buckets * HEADS
    encoder_layer = attention + 2 * D_MODEL * D_FF + 2 * D_MODEL
    decoder_layer = 2 * attention + 2 * D_MODEL * D_FF + 3 * D_MODEL
    stacks = LAYERS * (encoder_layer + decoder_layer) + 2 * (buckets + D_MODEL)
    assert parameter_count(model) == VOCABULARY * D_MODEL + stacks
    assert parameter_bytes(model) == 4 * parameter_count(model)
    assert parameter_bytes(model.to(torch.bfloat16)) == 2 * parameter_count(model)


def test_bytes_on_disk_sums_weight_files(tmp_path: Path) -> None:
    """Of the model alone: not of an optimizer, nor of leftover shards."""
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(shards, start=1):
        (tmp_path / name).write_bytes(b"x" * 10 * number)
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "optimizer.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "config.json").write_text("{}")
    assert bytes_on_disk(tmp_path) == 30
    (tmp_path / "model.safetensors").write_bytes(b"x" * 7)
    assert bytes_on_disk(tmp_path) == 7


def test_bytes_on_disk_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no \*\.safetensors file"):
        bytes_on_disk(tmp_path)


def largest_cache_bytes(pipeline: Any, workload: Workload) -> int:
    """Bytes of the fullest cache that the decoder really held."""
    sizes = []

    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        cache = cache_of(output)
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))

    hook = pipeline.inner_model.decoder.register_forward_hook(record)
    forecast(pipeline, synthetic_batch(workload), workload)
    hook.remove()
    return max(sizes)


# The last two go past prediction_length: a second pass reads a longer, then a clipped, context.
CACHE_SHAPES = [(20, 5), (17, BLOCK), (20, BLOCK + 2), (31, 2 * BLOCK)]


@pytest.mark.parametrize(("context_length", "horizon"), CACHE_SHAPES)
def test_t5_cache_bytes_equal_the_real_cache(t5: Any, context_length: int, horizon: int) -> None:
    workload = WORKLOAD.model_copy(update={"context_length": context_length, "horizon": horizon})
    assert kv_cache_bytes(t5.inner_model, workload) == largest_cache_bytes(t5, workload)


@pytest.mark.filterwarnings("ignore:We recommend keeping prediction length")
@pytest.mark.parametrize(("context_length", "horizon"), CACHE_SHAPES)
def test_bolt_cache_bytes_equal_the_real_cache(
    bolt: Any, context_length: int, horizon: int
) -> None:
    workload = WORKLOAD.model_copy(update={"context_length": context_length, "horizon": horizon})
    assert kv_cache_bytes(bolt.inner_model, workload) == largest_cache_bytes(bolt, workload)


def test_cache_follows_head_sizes_of_each_layer_and_factored_projections(t5: Any) -> None:
    model = t5.inner_model
    shrunk = model.decoder.block[1].layer[1].EncDecAttention
    shrunk.key_value_proj_dim, shrunk.inner_dim = 1, HEADS
    for role in ("q", "k", "v"):
        setattr(shrunk, role, LowRankLinear(D_MODEL, HEADS, 3))
    shrunk.o = nn.Linear(HEADS, D_MODEL, bias=False)
    dense = kv_cache_bytes(build("chronos-t5"), WORKLOAD)
    assert kv_cache_bytes(model, WORKLOAD) == largest_cache_bytes(t5, WORKLOAD) < dense


def test_cache_uses_the_models_own_number_of_samples(t5: Any) -> None:
    own = WORKLOAD.model_copy(update={"num_samples": None})
    twenty = WORKLOAD.model_copy(update={"num_samples": 20})
    assert kv_cache_bytes(t5.inner_model, own) == kv_cache_bytes(t5.inner_model, twenty)


def test_cache_of_a_meta_model_in_another_dtype(t5: Any) -> None:
    full = kv_cache_bytes(t5.inner_model, WORKLOAD)
    half = kv_cache_bytes(t5.inner_model.to("meta"), WORKLOAD, dtype=torch.bfloat16)
    assert 2 * half == full


def test_encoder_has_no_cache(chronos2: Any) -> None:
    assert kv_cache_bytes(chronos2.inner_model, WORKLOAD) == 0


# --------------------------------------------------------------------------------------------------
# Multiply-accumulates
# --------------------------------------------------------------------------------------------------


def attention_macs(queries: int, keys: int, projected_keys: int | None = None) -> int:
    """q, o for each query; k, v for each key that is not cached; QK^T and the weighted values."""
    projected = keys if projected_keys is None else projected_keys
    return 2 * (queries + projected) * D_MODEL * INNER + 2 * queries * keys * INNER


def feed_forward_macs(tokens: int) -> int:
    return 2 * tokens * D_MODEL * D_FF


def encoder_macs(tokens: int) -> int:
    return LAYERS * (attention_macs(tokens, tokens) + feed_forward_macs(tokens))


def residual_block_macs(rows: int, inputs: int, outputs: int) -> int:
    return rows * (inputs * D_FF + D_FF * outputs + inputs * outputs)


def test_bolt_macs_equal_the_hand_count(bolt: Any) -> None:
    patches = 3  # 20 steps in patches of 8
    tokens = patches + 1
    decoder = LAYERS * (attention_macs(1, 1) + attention_macs(1, tokens) + feed_forward_macs(1))
    one_series = (
        residual_block_macs(patches, 2 * PATCH, D_MODEL)
        + encoder_macs(tokens)
        + decoder
        + residual_block_macs(1, D_MODEL, len(QUANTILE_LEVELS) * BLOCK)
    )
    assert count_macs(bolt, WORKLOAD) == WORKLOAD.batch_size * one_series


def test_t5_macs_equal_the_hand_count(t5: Any) -> None:
    tokens = WORKLOAD.context_length + 1
    one_path = 0
    for step in range(WORKLOAD.horizon):
        # Cross keys and values are projected once; the self-attention cache grows by one.
        own = attention_macs(1, step + 1, projected_keys=1)
        cross = attention_macs(1, tokens, projected_keys=0 if step else tokens)
        one_path += LAYERS * (own + cross + feed_forward_macs(1)) + D_MODEL * VOCABULARY
    samples = WORKLOAD.num_samples or 0
    assert count_macs(t5, WORKLOAD) == WORKLOAD.batch_size * (
        encoder_macs(tokens) + samples * one_path
    )


@pytest.mark.parametrize("family", ["t5", "bolt", "chronos2"])
def test_eager_and_fused_attention_count_the_same(
    family: str, request: pytest.FixtureRequest
) -> None:
    pipeline = request.getfixturevalue(family)
    counts = []
    for implementation in ("sdpa", "eager"):
        for module in pipeline.inner_model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = implementation
        counts.append(count_macs(pipeline, WORKLOAD))
    assert counts[0] == counts[1] > 0


# --------------------------------------------------------------------------------------------------
# Timing
# --------------------------------------------------------------------------------------------------


def test_models_run_in_turn_and_the_first_place_rotates() -> None:
    runs: list[Run] = []
    _, log = fake_bench({"a": [1.0] * 3, "b": [1.0] * 3}, on_run=runs.append)
    assert log == ["a", "b", "b", "a", "a", "b"]
    assert [(run.model, run.round) for run in runs] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("a", 1),
        ("a", 2),
        ("b", 2),
    ]


def test_warmup_runs_are_not_timed() -> None:
    clock, log = FakeClock(), list[str]()
    pipeline: Any = FakePipeline(clock, [1000.0, 1000.0, 5.0], log, "a")
    workload = Workload(context_length=8, warmup=2, repeats=1)
    result = bench([("a", pipeline)], workload, measure_macs=False, clock=clock)
    assert result.models[0].latencies_ms == pytest.approx((5.0,))


def test_figures_of_known_durations() -> None:
    original = [10.0, 20.0, 10.0, 40.0, 10.0]  # the machine was busy in two rounds
    result, _ = fake_bench({"original": original, "small": [d / 4 for d in original]})
    first, small = result.models
    assert (first.latency_ms, first.latency_iqr_ms) == pytest.approx((10.0, 10.0))
    assert first.latency_p95_ms == pytest.approx(36.0)
    assert first.series_per_second == pytest.approx(400.0)
    assert result.ratios("small")["latency_ms"] == pytest.approx(0.25)
    assert result.ratios("small")["series_per_second"] == pytest.approx(4.0)
    assert result.latency_ratio_interval("small") == pytest.approx((0.25, 0.25))
    assert small.parameters == 9


def test_ratio_interval_covers_the_ratio_and_pairs_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    drift = (1 + 10 * torch.rand(40, generator=generator)).tolist()
    assert ratio_interval(drift, [2 * value for value in drift]) == pytest.approx((2.0, 2.0))
    lower, upper = ratio_interval(drift, drift[::-1])
    assert lower < 1 < upper


def test_too_few_rounds_have_no_interval() -> None:
    result, _ = fake_bench({"a": [1.0] * 4, "b": [1.0] * 4})
    assert result.latency_ratio_interval("b") is None


def test_threads_and_random_state_are_restored(bolt: Any, threads: Callable[[], int]) -> None:
    torch.set_num_threads(2)
    state = torch.random.get_rng_state()
    workload = WORKLOAD.model_copy(update={"threads": 1, "repeats": 1, "warmup": 0})
    seen: list[int] = []
    result = bench({"a": bolt}, workload, on_run=lambda run: seen.append(threads()))
    assert (seen, result.threads) == ([1], 1)
    assert threads() == 2
    assert torch.equal(torch.random.get_rng_state(), state)


def test_threads_are_restored_after_a_failure(bolt: Any, threads: Callable[[], int]) -> None:
    torch.set_num_threads(2)

    def fail(run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench({"a": bolt}, WORKLOAD.model_copy(update={"threads": 1}), on_run=fail)
    assert threads() == 2


@pytest.mark.parametrize("family", ["t5", "bolt", "chronos2"])
def test_bench_of_every_family(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    pipeline = request.getfixturevalue(family)
    workload = WORKLOAD.model_copy(update={"repeats": 2, "warmup": 0})
    directories = {"original": tmp_path, "small": None}
    result = bench({"original": pipeline, "small": pipeline}, workload, directories=directories)
    original, small = result.models
    assert (original.bytes_on_disk, small.bytes_on_disk) == (100, None)
    assert original.macs == count_macs(pipeline, workload)
    assert result.ratios("small")["macs"] == 1
    assert "bytes_on_disk" not in result.ratios("small")
    assert json.loads(json.dumps(result.to_dict()))["models"][1]["ratios"]["macs"] == 1


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


def test_cross_learning_is_timed_where_series_see_one_another(chronos2: Any, bolt: Any) -> None:
    sizes = {"context_length": 32, "horizon": 8, "batch_size": 3, "repeats": 1, "warmup": 0}
    result = bench(chronos2, **sizes, cross_learning=True)
    assert result.workload.cross_learning
    assert "cross-learning" in str(bench_table(result).title)
    series = synthetic_batch(result.workload)
    together = adapter_of_pipeline(chronos2).predict_together(chronos2, series, 8)
    alone = chronos2.predict(series[:, None], prediction_length=8)
    assert (torch.cat(together) - torch.cat(alone)).abs().max() > 1e-4
    with pytest.raises(UsageError, match="chronos-bolt"):
        bench(bolt, **sizes, cross_learning=True)


def test_samples_are_refused_where_no_model_draws_any(t5: Any, bolt: Any, chronos2: Any) -> None:
    sizes = {"context_length": 32, "horizon": 5, "batch_size": 2, "repeats": 1, "warmup": 0}
    for models in (bolt, [bolt, chronos2]):
        with pytest.raises(UsageError, match="num_samples"):
            bench(models, **sizes, num_samples=3)
    # Another model may draw them, or a workload that serves all families have them.
    both = bench({"bolt": bolt, "t5": t5}, **sizes, num_samples=3, measure_macs=False)
    assert both.workload.num_samples == 3
    assert bench(bolt, Workload(**sizes, num_samples=3), measure_macs=False).models


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda(bolt: Any) -> None:
    with pytest.raises(UsageError, match="finds no CUDA device; use device 'cpu'"):
        bench({"a": bolt}, Workload(device="cuda"))


def test_model_elsewhere(bolt: Any) -> None:
    bolt.inner_model.to("meta")
    with pytest.raises(UsageError, match="'meta'"):
        bench({"a": bolt}, WORKLOAD)


def test_model_in_training_mode(bolt: Any) -> None:
    bolt.inner_model.train()
    with pytest.raises(UsageError, match="'a' is in training mode"):
        bench({"a": bolt}, WORKLOAD)


def test_context_longer_than_the_model_reads(bolt: Any) -> None:
    with pytest.raises(UsageError, match="reads only the last 32 steps"):
        count_macs(bolt, WORKLOAD.model_copy(update={"context_length": 33}))


def test_names(bolt: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model to measure"):
        bench({}, WORKLOAD)
    with pytest.raises(UsageError, match="names are not unique"):
        bench([("a", bolt), ("a", bolt)], WORKLOAD)
    with pytest.raises(UsageError, match=r"directories of unknown models \['b'\]"):
        bench({"a": bolt}, WORKLOAD, directories={"b": tmp_path})
    result, _ = fake_bench({"a": [1.0]})
    with pytest.raises(UsageError, match="no measurements of 'b'"):
        result.ratios("b")


def test_a_model_named_by_itself_does_not_take_a_given_name(bolt: Any) -> None:
    bolt.inner_model.config._name_or_path = "elsewhere/small"
    other = ChronosBoltPipeline(build("chronos-bolt"))
    pairs: Any = [(None, bolt), ("elsewhere/small", other)]
    named, _ = loaded_pipelines(pairs, share=False)
    assert named == {"elsewhere/small (2)": bolt, "elsewhere/small": other}


def test_a_revision_is_of_all_models_but_what_they_are_held_against(
    bolt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def loaded(model: str, *, name: str | None, revision: str | None) -> Any:
        asked.append((model, revision))
        return loaded_of(bolt, name=model)

    monkeypatch.setattr("tscompress.benchmark.named_models.loaded_of", loaded)
    pairs: Any = [(None, "a"), (None, "b")]
    loaded_pipelines(pairs, share=False, revision="v1")
    loaded_pipelines(pairs, share=False, against=True, revision="v1")
    assert asked == [("a", "v1"), ("b", "v1"), ("a", None), ("b", "v1")]


def test_a_shared_model_does_not_take_a_given_name(t5: Any) -> None:
    other = deepcopy(t5)
    named, _ = loaded_pipelines([("a", t5), ("a, shared", other)], share=True)
    assert list(named) == ["a", "a, shared", "a, shared (2)", "a, shared, shared"]
    assert named["a, shared"] is other
    assert named["a, shared (2)"].inner_model is t5.inner_model
    assert shares_cross_attention(named["a, shared (2)"])


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def test_memory_comes_from_the_last_line_of_a_process_for_each_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory_of_a_process: list[Path]
) -> None:
    figures = {"before_load_bytes": 100, "after_load_bytes": 150, "peak_bytes": 180}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert make_workload(json.loads(command[-1])).batch_size == 4
        assert command[-3:-1] == [str(tmp_path), "float32"]
        return subprocess.CompletedProcess(command, 0, f"loading\n{json.dumps(figures)}\n", "")

    platform.processor()  # starts a process of its own, once
    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "model.safetensors").touch()
    durations = {"a": [1.0], "b": [1.0]}
    result, _ = fake_bench(durations, directories={"a": tmp_path}, measure_memory=True)
    assert result.models[0].peak_memory_bytes == 80
    assert result.models[1].memory is None
    assert memory_of_a_process == [tmp_path]


def test_failed_memory_process_gives_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: too large\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(TscompressError, match="status 1: MemoryError"):
        process_memory(tmp_path, torch.float32, WORKLOAD)


@pytest.mark.slow
def test_memory_of_a_real_process(tmp_path: Path) -> None:
    save_pretrained(build("chronos-bolt"), tmp_path)
    ballast = torch.ones(2**28)  # 1 GiB here must not show up there
    memory = process_memory(tmp_path, torch.bfloat16, WORKLOAD)
    assert 0 < memory.before_load_bytes <= memory.after_load_bytes <= memory.peak_bytes
    assert memory.peak_bytes - memory.before_load_bytes < ballast.nbytes / 2


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot start anew here"
)
def test_memory_of_before_is_not_in_the_peak() -> None:
    passing = np.ones(10**8, dtype=np.uint8)
    before = peak_rss_bytes()
    del passing
    forget_peak()
    assert before - peak_rss_bytes() > 5 * 10**7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", ["t5", "bolt", "chronos2"])
def test_bench_on_cuda(family: str, request: pytest.FixtureRequest) -> None:
    pipeline = request.getfixturevalue(family)
    macs_on_cpu = count_macs(pipeline, WORKLOAD)
    pipeline.inner_model.to("cuda")
    workload = WORKLOAD.model_copy(update={"device": "cuda", "repeats": 2})
    result = bench({"a": pipeline}, workload, measure_memory=True)
    assert result.models[0].macs == macs_on_cpu
    peak = result.models[0].peak_memory_bytes
    assert peak is not None
    assert peak > result.models[0].parameter_bytes


# --------------------------------------------------------------------------------------------------
# Table
# --------------------------------------------------------------------------------------------------


def rendered(result: BenchResult) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(bench_table(result))
    return capture.get().splitlines()


def test_table_title_has_singular_and_plural_rounds() -> None:
    for durations, counted in (([10.0], "1 round"), ([10.0] * 2, "2 rounds")):
        title = " ".join(rendered(fake_bench({"a": durations})[0])[:2])
        assert f" {counted} " in f"{title} "


def test_table_shows_ratios_with_their_interval() -> None:
    durations = {"chronos[bold]": [10.0] * 5, "small": [4.0] * 5}
    text = rendered(fake_bench(durations)[0])
    header = next(line for line in text if "small" in line)
    assert "chronos[bold]" in header
    assert "ratio to" in header
    latency = next(line for line in text if "latency, median (ms)" in line)
    assert [cell.strip() for cell in latency.split("│")[2:5]] == [
        "10.0",
        "4.00",
        "0.40 (0.40–0.40)",
    ]
    assert not any("KV cache" in line or "GMAC" in line for line in text)


def test_table_of_one_model_has_no_ratio_column() -> None:
    text = "\n".join(rendered(fake_bench({"alone": [1234.0]})[0]))
    assert "ratio" not in text
    assert "1,234" in text
