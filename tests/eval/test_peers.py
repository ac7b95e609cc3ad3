"""The peers that folding is measured beside do what their descriptions say."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import Tensor

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.benchmark.workload import Workload
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression.activations import collect_moments
from tscompress.compression.apply import keep_layers_
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
    small_batches,
)
from tscompress.data.batch import ForecastBatch
from tscompress.errors import FactorizationError, UsageError
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import truncated_svd
from tscompress.workflows.recipe import EvaluationConfig

EVAL = Path(__file__).parents[2] / "eval"
CALIBRATION = CalibrationConfig(source="synthetic", num_series=24, context_length=48, batch_size=8)
STACKS = ("chronos-t5", "chronos-bolt")


@pytest.fixture(scope="module")
def eval_scripts() -> Any:
    """``eval/`` can be imported from, as it can when one of its scripts runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        yield
        for name in ("peers", "peer_methods", "methods", "fold"):
            sys.modules.pop(name, None)


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def methods(eval_scripts: None) -> ModuleType:
    return script("peer_methods")


@pytest.fixture(scope="module")
def peers(eval_scripts: None) -> ModuleType:
    return script("peers")


@pytest.fixture(params=STACKS)
def loaded(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> LoadedModel:
    return load(checkpoints[request.param], dtype="float32")


def batches_of(loaded: LoadedModel) -> list[ForecastBatch]:
    return small_batches(loaded, calibration_batches(loaded, CALIBRATION))


def outputs(loaded: LoadedModel, batches: list[ForecastBatch]) -> Tensor:
    found = [run_teacher_forced(loaded, batch) for batch in batches]
    return torch.cat([(o.logits if "logits" in o else o.quantile_preds).flatten() for o in found])


def inputs_and_weight(rank: int = 12) -> tuple[Tensor, Tensor]:
    """500 inputs ``[500, 12]`` that span ``rank`` directions unevenly, and a layer's weight."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, rank, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(rank, 12, generator=generator, dtype=torch.float64)
    return x * torch.logspace(0, -2, 12), torch.randn(8, 12, generator=generator).double()


def error(W: Tensor, factors: tuple[Tensor, Tensor], x: Tensor) -> float:
    left, right = factors
    return float(torch.linalg.norm(x @ (W - left @ right).T))


@pytest.mark.parametrize("directions", [12, 5])
def test_whitening_at_full_rank_is_the_dense_layer(methods: ModuleType, directions: int) -> None:
    x, W = inputs_and_weight(directions)
    left, right = methods.whitened_factors(W, x.T @ x, 8)
    torch.testing.assert_close(left @ right, W, rtol=0, atol=1e-6)


def test_whitened_error_is_the_truncated_singular_values(methods: ModuleType) -> None:
    x, W = inputs_and_weight()
    factors = methods.whitened_factors(W, x.T @ x, 3)
    lost = torch.linalg.svdvals(x @ W.T)[3:]  # truncation-aware: the loss is what was cut off
    assert error(W, factors, x) == pytest.approx(float(lost.norm()), rel=1e-6)
    assert error(W, factors, x) < error(W, truncated_svd(W, 3), x)


def test_cholesky_needs_no_definite_matrix(methods: ModuleType) -> None:
    x, _ = inputs_and_weight(5)
    gram = x.T @ x
    root = methods.cholesky_root(gram)
    torch.testing.assert_close(root @ root.T, gram, rtol=0, atol=1e-7 * float(gram.max()))
    assert torch.isfinite(methods.cholesky_root(torch.zeros(3, 3).double())).all()
    with pytest.raises(FactorizationError, match="not finite"):
        methods.cholesky_root(torch.full((3, 3), torch.nan).double())


def test_scaling_by_the_power_zero_is_a_plain_svd(methods: ModuleType) -> None:
    x, W = inputs_and_weight()
    magnitude = x.abs().mean(0)
    left, right = methods.scaled_factors(W, magnitude, 0.0, 3)
    plain_left, plain_right = truncated_svd(W, 3)
    torch.testing.assert_close(left @ right, plain_left @ plain_right)
    scaled = methods.scaled_factors(W, magnitude, 0.5, 3)
    assert error(W, scaled, x) < error(W, (plain_left, plain_right), x)


def test_update_is_least_squares(methods: ModuleType) -> None:
    x, W = inputs_and_weight()
    seen = x + 0.3 * x.roll(1, dims=1)  # what layers before it pass on once they are compressed
    left, right = methods.whitened_factors(W, x.T @ x, 3)
    updated = methods.updated_left(W, left, right, seen.T @ (seen @ right.T))
    fitted = torch.linalg.lstsq(seen @ right.T, seen @ W.T).solution.T
    torch.testing.assert_close(updated, fitted)
    assert error(W, (updated, right), seen) < error(W, (left, right), seen)


def test_statistics_are_of_real_positions(methods: ModuleType, loaded: LoadedModel) -> None:
    batches = batches_of(loaded)
    found = methods.input_statistics(loaded, batches)
    moments = collect_moments(loaded, batches, list(methods.linears(loaded)))
    assert found.keys() == moments.keys()
    for name, moment in moments.items():
        seen = found[name]
        assert seen.count == moment.count
        torch.testing.assert_close(seen.gram / seen.count, moment.second, rtol=1e-4, atol=1e-6)
    q, k = (found[f"encoder.block.0.layer.0.SelfAttention.{role}"] for role in "qk")
    assert q is k


@pytest.mark.parametrize("update", [False, True])
def test_svd_llm_at_full_rank_changes_nothing(
    methods: ModuleType, loaded: LoadedModel, update: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of(loaded)
    before = outputs(loaded, batches)
    statistics = methods.input_statistics(loaded, batches)
    full = {name: min(linear.weight.shape) for name, linear in methods.linears(loaded).items()}
    monkeypatch.setattr(methods, "ranks_within", lambda *_: full)
    methods.svd_llm_(loaded, 1.0, statistics, batches if update else None)
    assert isinstance(loaded.model.get_submodule(next(iter(full))), LowRankLinear)
    torch.testing.assert_close(outputs(loaded, batches), before, rtol=1e-3, atol=1e-3)


def test_factored_peers_keep_their_share(methods: ModuleType, loaded: LoadedModel) -> None:
    batches = batches_of(loaded)
    statistics = methods.input_statistics(loaded, batches)
    dense = parameter_count(loaded.model)
    before = outputs(loaded, batches)
    methods.svd_llm_(loaded, 0.7, statistics, batches)
    assert 0.6 * dense < parameter_count(loaded.model) <= 0.7 * dense
    difference = (outputs(loaded, batches) - before).norm() / before.norm()
    assert 0 < difference < 1


def test_asvd_keeps_its_share(methods: ModuleType, loaded: LoadedModel) -> None:
    statistics = methods.input_statistics(loaded, batches_of(loaded))
    dense = parameter_count(loaded.model)
    methods.asvd_(loaded, 0.7, statistics)
    assert 0.6 * dense < parameter_count(loaded.model) <= 0.7 * dense
    assert loaded.forecaster.predict(torch.arange(30.0), prediction_length=4).isfinite().all()


def test_no_rank_is_left(methods: ModuleType, loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="leave some matrix no rank"):
        methods.ranks_within(loaded, 0.01)


def test_multiplied_back_says_the_same_and_saves_nothing(
    methods: ModuleType, checkpoints: dict[str, Path]
) -> None:
    path = checkpoints["chronos-bolt"]
    factored = tscompress.compress(path, method="svd", rank=4)
    batches = batches_of(factored)
    before = outputs(factored, batches)
    methods.multiply_back_(factored)
    torch.testing.assert_close(outputs(factored, batches), before, rtol=1e-4, atol=1e-4)
    assert parameter_count(factored.model) == parameter_count(load(path).model)


def test_half_the_layers(methods: ModuleType, loaded: LoadedModel) -> None:
    batches = batches_of(loaded)
    assert methods.every_second(loaded) == {"encoder": (0,), "decoder": (0,)}
    losses = {}
    for encoder in (0, 1):
        for decoder in (0, 1):
            kept = {"encoder": (encoder,), "decoder": (decoder,)}
            losses[encoder, decoder] = methods.mean_loss(
                methods._with_layers(loaded, kept), batches
            )
    kept = methods.least_needed_gone(loaded, batches)
    ((encoder,), (decoder,)) = kept.values()
    others = [losses[1 - encoder, decoder], losses[encoder, 1 - decoder]]
    assert losses[encoder, decoder] <= max(others)  # the last of the two was chosen by its loss
    keep_layers_(loaded, kept)
    assert len(loaded.model.encoder.block) == len(loaded.model.decoder.block) == 1
    assert loaded.forecaster.predict(torch.arange(30.0), prediction_length=4).isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_int8_is_a_byte_a_weight_and_its_scales(
    methods: ModuleType, loaded: LoadedModel, dynamic: bool
) -> None:
    pytest.importorskip("torchao")
    batches = batches_of(loaded)
    before = outputs(loaded, batches)
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, torch.nn.Linear)}
    layers.pop("lm_head", None)
    # For each output a float32 scale and, though the weights are symmetric, an int8 zero point.
    saved = sum(3 * m.weight.numel() - 5 * m.out_features for m in layers.values())
    dense = methods.held_bytes(loaded.model)
    methods.int8_(loaded.model, dynamic=dynamic)
    assert methods.held_bytes(loaded.model) == dense - saved
    difference = (outputs(loaded, batches) - before).norm() / before.norm()
    assert 0 < difference < 0.1


def test_torchao_is_optional(
    methods: ModuleType, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r"pip install 'tscompress\[peers\]'"):
        methods.int8_(loaded.model, dynamic=False)


def test_bytes(methods: ModuleType, loaded: LoadedModel) -> None:
    count = parameter_count(loaded.model)
    assert methods.held_bytes(loaded.model) == 4 * count
    assert methods.stored_bytes(loaded.model, torch.bfloat16) == 2 * count


def test_working_memory_grows_with_the_batch(peers: ModuleType, loaded: LoadedModel) -> None:
    def working(batch_size: int) -> int:
        workload = Workload(batch_size=batch_size, context_length=32, horizon=2, num_samples=2)
        found: int = peers.working_bytes(loaded, workload)
        return found

    assert 0 < working(2) < working(16)


def test_every_peer_is_named_once_and_drawn(peers: ModuleType, tmp_path: Path) -> None:
    found = peers.peers([tmp_path / "nano" / "model"], "chronos-bolt")
    names = [(peer.kind, peer.label) for peer in found]
    assert len(set(names)) == len(names)
    assert {kind for kind, _ in names} == peers.STYLES.keys() == {*peers.KINDS[1:]}
    assert ("next smaller size", "nano") in names
    assert ("fold, narrower", "d_model 12.5%, d_kv 4, d_ff 12.5%") in names
    assert set(peers.NARROW) == {"chronos-bolt", "chronos-t5"}


def test_a_narrower_peer_is_narrower(peers: ModuleType, checkpoints: dict[str, Path]) -> None:
    bed = peers.Bed(str(checkpoints["chronos-bolt"]), CALIBRATION)
    found = peers.folded((4, 0.5), bed, width=0.5)
    assert (found.config["d_model"], found.config["d_kv"], found.config["d_ff"]) == (12, 4, 20)


def test_rows_are_kept_and_costs_added(
    peers: ModuleType,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path = str(checkpoints["chronos-bolt"]), tmp_path / "rows.csv"
    found = [
        peers.Peer("fold", "small", partial(peers.folded, (4, 0.5))),
        peers.Peer("SVD-LLM, updated", "small", partial(peers.svd_llm, (4, 0.5), True)),
        peers.Peer("half the layers", "by loss", partial(peers.half_the_layers, True)),
        peers.Peer("fewer bits", "bfloat16", partial(peers.in_bfloat16, peers.Bed.dense)),
    ]
    config = EvaluationConfig(max_series=2, datasets=("monash_m1_yearly",))
    console = Console(quiet=True)
    first = peers.measure(peers.Bed(name, CALIBRATION), found[:1], config, path, console)
    frame = peers.measure(peers.Bed(name, CALIBRATION), found, config, path, console)
    # Time is never the same twice: the row was not measured again.
    assert frame["CPU minutes"][0] == pytest.approx(first["CPU minutes"][0], rel=1e-12)
    assert list(frame["label"]) == [peer.label for peer in found]

    monkeypatch.setattr(peers, "_LITTLE", CALIBRATION)
    workload = Workload(batch_size=2, context_length=32, horizon=4, repeats=5, warmup=0)
    rows = peers.with_costs(name, frame, found, workload).set_index("kind")
    assert list(rows.index) == ["dense", *(peer.kind for peer in found)]
    assert rows["on disk"]["dense"] == rows["KV cache"]["dense"] == 1
    assert rows["KV cache"]["fold"] == rows["KV cache"]["half the layers"] == 0.5
    assert rows["KV cache"]["SVD-LLM, updated"] == 1
    assert rows["parameters"]["SVD-LLM, updated"] <= rows["parameters"]["fold"] < 1
    assert rows["in memory MiB"]["fewer bits"] == rows["in memory MiB"]["dense"] / 2
    assert (rows["peak MiB"] > rows["in memory MiB"]).all()
    assert "| fold | small |" in peers.markdown(rows.reset_index())
    said = peers.setting("reference/bolt", 2, workload)
    assert "the first 2 series of each dataset" in said
    assert "2 series × 32 steps, horizon 4" in said


def test_table_and_figure(peers: ModuleType, tmp_path: Path) -> None:
    rows = []
    for kind in ("dense", *peers.STYLES):
        row: dict[str, Any] = {"kind": kind, "label": "l", "parameters": 0.5, "on disk": 0.25}
        row |= {"in memory MiB": 8.0, "peak MiB": 21.0, "KV cache": 0.125, "CPU minutes": 1.0}
        for measure in ("latency", "WQL", "MASE"):
            row |= {measure: 0.9, f"{measure} low": 0.8, f"{measure} high": 1.1}
        rows.append(row)
    frame = pd.DataFrame(rows)
    table = peers.markdown(frame).splitlines()
    assert len(table) == 2 + len(frame)
    (fold,) = (line for line in table if line.startswith("| fold |"))
    assert "| l | 50.0% | 25.0% | 8.0 | 21 | 12.5% | 0.90 (0.80–1.10) | 0.9000 (0.8" in fold
    peers.draw(frame, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
