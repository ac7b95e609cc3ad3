"""Sample paths that share their series' cross-attention, against stock generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chronos import BaseChronosPipeline
from test_heads import SIZES, pair, set_attention_
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import tscompress
from tscompress.benchmark.bench import bench
from tscompress.benchmark.sizes import count_macs, kv_cache_bytes
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import load
from tscompress.errors import UnsupportedModelError
from tscompress.evaluation.batching import forecast_bytes
from tscompress.evaluation.forecasting import forecast
from tscompress.layers.latent_cross_attention import CACHE_NAMES
from tscompress.layers.shared_cross_attention import (
    SharedCrossAttention,
    cross_attention_shared,
    share_cross_attention,
    shares_cross_attention,
)

WORKLOAD = Workload(batch_size=2, context_length=8, horizon=3, num_samples=5, repeats=1, warmup=0)


def contexts() -> list[Tensor]:
    """Of different lengths, with gaps, and one without any value."""
    torch.manual_seed(3)
    long, short = torch.randn(16).cumsum(0), torch.randn(5).cumsum(0)
    gaps = torch.randn(12).cumsum(0)
    gaps[4:7] = torch.nan
    return [long, short, gaps, torch.full((9,), torch.nan)]


def drawn(pipeline: BaseChronosPipeline, horizon: int, paths: int | None) -> Tensor:
    torch.manual_seed(5)
    samples: Tensor = pipeline.predict(contexts(), prediction_length=horizon, num_samples=paths)
    return samples


@pytest.fixture
def stock(checkpoints: dict[str, Path]) -> BaseChronosPipeline:
    return load(checkpoints["chronos-t5"]).forecaster


@pytest.mark.parametrize("paths", [1, 4, None])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_same_paths_are_drawn(
    stock: BaseChronosPipeline, implementation: str, paths: int | None
) -> None:
    set_attention_(stock.inner_model, implementation)
    shared = share_cross_attention(stock)
    steps = stock.model_prediction_length
    for horizon in (1, steps, steps + 2):  # the last takes a second pass
        expected = drawn(stock, horizon, paths)
        torch.testing.assert_close(drawn(shared, horizon, paths), expected, equal_nan=True)


def test_heads_of_other_sizes_share_too(checkpoints: dict[str, Path]) -> None:
    _, sized = pair(checkpoints["chronos-t5"], *SIZES)
    expected = drawn(sized.forecaster, 4, 3)
    found = drawn(share_cross_attention(sized.forecaster), 4, 3)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_options_of_sampling_are_handed_on(stock: BaseChronosPipeline) -> None:
    options: dict[str, Any] = {"prediction_length": 4, "num_samples": 6}
    options |= {"temperature": 0.4, "top_k": 3, "top_p": 0.9}
    found = []
    for pipeline in (stock, share_cross_attention(stock)):
        torch.manual_seed(2)
        found.append(pipeline.predict(contexts()[:3], **options))
    torch.testing.assert_close(*found)


def test_logits_of_several_tokens_and_rows(stock: BaseChronosPipeline) -> None:
    """Teacher forcing: the mask of each series holds for all of its rows and their tokens."""
    model: Any = share_cross_attention(stock).inner_model
    tokens = torch.randint(3, 20, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    rows = torch.randint(3, 20, (6, 4))
    with torch.no_grad():
        encoded = model.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        by_series, by_row = (
            model(
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded.repeat_interleave(n, 0)),
                attention_mask=mask.repeat_interleave(n, 0),
                decoder_input_ids=rows,
            ).logits
            for n in (1, 3)
        )
    torch.testing.assert_close(by_series, by_row, rtol=1e-4, atol=1e-5)


def test_masks_with_a_row_for_each_token(stock: BaseChronosPipeline) -> None:
    layer: Any = share_cross_attention(stock).inner_model.decoder.block[0].layer[1]  # type: ignore[union-attr]
    width = layer.EncDecAttention.d_model
    states, encoded = torch.randn(6, 2, width), torch.randn(2, 5, width)
    mask = torch.zeros(2, 1, 2, 5)
    mask[1, :, 0, :3] = torch.finfo(torch.float32).min
    with torch.no_grad():
        found, expected = (
            layer(states, encoded.repeat_interleave(n, 0), mask.repeat_interleave(n, 0))[0]
            for n in (1, 3)
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_cache_has_one_row_a_series(
    stock: BaseChronosPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="4.54")  # before, the cache had no layers
    shared = share_cross_attention(stock)
    held: list[tuple[int, int]] = []
    attention: Any = shared.inner_model.decoder.block[1].layer[1].EncDecAttention  # type: ignore[union-attr]
    forward = attention.forward

    def spy(*args: Any, **options: Any) -> Any:
        found = forward(*args, **options)
        cache = next(options[name] for name in CACHE_NAMES if name in options)
        layers = (cache.cross_attention_cache.layers[1], cache.self_attention_cache.layers[1])
        held.append(tuple(len(layer.keys) for layer in layers))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(attention, "forward", spy)
    drawn(shared, 3, 6)
    assert held == [(4, 24)] * 3


def test_original_pipeline_is_unchanged(stock: BaseChronosPipeline) -> None:
    before = drawn(stock, 4, 3)
    names = list(stock.inner_model.state_dict())
    shared = share_cross_attention(stock)
    again = share_cross_attention(shared)
    assert torch.equal(drawn(stock, 4, 3).nan_to_num(), before.nan_to_num())
    assert list(stock.inner_model.state_dict()) == names
    assert shared.inner_model is again.inner_model is stock.inner_model
    assert [shares_cross_attention(p) for p in (stock, shared, again)] == [False, True, True]
    layers = [block.layer[1] for block in stock.inner_model.decoder.block]  # type: ignore[union-attr]
    assert all(type(layer) is SharedCrossAttention for layer in layers)
    model: Any = stock.inner_model
    beams = model.generate(torch.arange(3, 15).view(2, 6), num_beams=3, max_new_tokens=4)
    assert len(beams) == 2


def cross_layers(pipeline: BaseChronosPipeline) -> list[Any]:
    return [block.layer[1] for block in pipeline.inner_model.decoder.block]  # type: ignore[union-attr]


def test_a_pipeline_shares_for_a_while(stock: Any) -> None:
    expected = drawn(stock, 4, 3)
    model, layers = stock.model, cross_layers(stock)
    with cross_attention_shared(stock):
        assert shares_cross_attention(stock)
        torch.testing.assert_close(drawn(stock, 4, 3), expected, equal_nan=True)
        with cross_attention_shared(stock):
            assert shares_cross_attention(stock)
        assert shares_cross_attention(stock)
    with pytest.raises(KeyboardInterrupt), cross_attention_shared(stock):
        raise KeyboardInterrupt
    assert stock.model is model
    assert all(a is b for a, b in zip(cross_layers(stock), layers, strict=True))
    assert torch.equal(drawn(stock, 4, 3).nan_to_num(), expected.nan_to_num())


def test_only_a_stock_chronos_t5_shares_for_a_while(
    stock: Any, checkpoints: dict[str, Path]
) -> None:
    pipelines = [load(checkpoints[family]).forecaster for family in ("chronos-bolt", "chronos-2")]
    hooked: Any = cross_layers(stock)[1]
    hooked.forward = hooked.forward  # as accelerate does
    for pipeline in (*pipelines, stock):
        with cross_attention_shared(pipeline):
            assert not shares_cross_attention(pipeline)
    assert SharedCrossAttention not in map(type, cross_layers(stock))
    with pytest.raises(UnsupportedModelError, match="are called by hooks"):
        share_cross_attention(stock)
    assert SharedCrossAttention not in map(type, cross_layers(stock))


def test_scored_forecasts_share(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention: Any = cross_layers(stock)[0].EncDecAttention
    forward, rows = attention.forward, []

    def spy(*args: Any, **options: Any) -> Any:
        rows.append(len(options["key_value_states"]))
        return forward(*args, **options)

    monkeypatch.setattr(attention, "forward", spy)
    forecast(stock, [series.numpy() for series in contexts()], 3, num_samples=6)
    assert rows == [4] * 3
    assert not shares_cross_attention(stock)


def test_models_without_sample_paths_are_refused(checkpoints: dict[str, Path]) -> None:
    for family in ("chronos-bolt", "chronos-2"):
        with pytest.raises(UnsupportedModelError, match=r"no sample paths.* only Chronos-T5"):
            share_cross_attention(load(checkpoints[family]).forecaster)


def test_shared_cache_is_counted(stock: BaseChronosPipeline) -> None:
    shared = tscompress.share_cross_attention(stock)
    model: Any = stock.inner_model
    width = sum(
        block.layer[1].EncDecAttention.k.out_features
        + block.layer[1].EncDecAttention.v.out_features
        for block in model.decoder.block
    )
    tokens = WORKLOAD.context_length + model.config.chronos_config["use_eos_token"]
    spared = (
        4 * width * tokens * 2 * (5 - 1)
    )  # bytes: float32, two series, of five paths all but one
    whole = kv_cache_bytes(model, WORKLOAD)
    assert whole - kv_cache_bytes(model, WORKLOAD, shared_cross_attention=True) == spared
    result = bench({"stock": stock, "shared": shared}, WORKLOAD)
    assert [one.kv_cache_bytes for one in result.models] == [whole, whole - spared]
    # Projections of keys and values are done once a series; all else is done as before.
    macs = [count_macs(pipeline, WORKLOAD) for pipeline in (stock, shared)]
    assert macs[0] - macs[1] == model.config.d_model * width * tokens * 2 * (5 - 1)
    one = 4 * width * tokens * (5 - 1)
    assert forecast_bytes(stock, 8, 3, 5) - forecast_bytes(shared, 8, 3, 5) == one
