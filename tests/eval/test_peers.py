"""The peers that folding is measured beside do what their descriptions say."""

from __future__ import annotations

import importlib
import shutil
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
from tscompress.benchmark.bench import bench
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
from tscompress.probing.measure import ProbeConfig

EVAL = Path(__file__).parents[2] / "eval"
CALIBRATION = CalibrationConfig(source="synthetic", num_series=24, context_length=48, batch_size=8)
STACKS = ("chronos-t5", "chronos-bolt")


@pytest.fixture(scope="module")
def eval_scripts() -> Any:
    """``eval/`` can be imported from, as it can when one of its scripts runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVAL))
        yield
        for name in ("peers", "peer_methods", "testbed", "output", "fracast_pipeline"):
            sys.modules.pop(name, None)


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def methods(eval_scripts: None) -> ModuleType:
    return script("peer_methods")


@pytest.fixture(scope="module")
def peers(eval_scripts: None) -> ModuleType:
    return script("peers")


@pytest.fixture(scope="module")
def testbed(eval_scripts: None) -> ModuleType:
    return script("testbed")


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


def test_statistics_are_of_real_positions_across_series(
    methods: ModuleType, checkpoints: dict[str, Path]
) -> None:
    loaded = load(checkpoints["chronos-2"], dtype="float32")
    batches = batches_of(loaded)
    found = methods.input_statistics(loaded, batches)
    across = [block for block in loaded.architecture.attention if block.across_series]
    names = [name for block in across for name in block.projections.values()]
    moments = collect_moments(loaded, batches, names)
    for name, moment in moments.items():
        seen = found[name]
        assert seen.count == moment.count
        torch.testing.assert_close(seen.gram / seen.count, moment.second, rtol=1e-4, atol=1e-6)


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


def test_a_model_of_one_stack_loses_half_of_that(
    methods: ModuleType, checkpoints: dict[str, Path]
) -> None:
    loaded = load(checkpoints["chronos-2"], dtype="float32")
    assert methods.every_second(loaded) == {"encoder": (0,)}
    batches = batches_of(loaded)
    losses = [
        methods.mean_loss(methods.with_layers(loaded, {"encoder": (layer,)}), batches)
        for layer in (0, 1)
    ]
    best = losses.index(min(losses))
    assert methods.least_needed_gone(loaded, batches) == {"encoder": (best,)}


def test_half_the_layers(methods: ModuleType, loaded: LoadedModel) -> None:
    batches = batches_of(loaded)
    assert methods.every_second(loaded) == {"encoder": (0,), "decoder": (0,)}
    losses = {}
    for encoder in (0, 1):
        for decoder in (0, 1):
            kept = {"encoder": (encoder,), "decoder": (decoder,)}
            losses[encoder, decoder] = methods.mean_loss(methods.with_layers(loaded, kept), batches)
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
        found: int = peers.working_bytes(loaded.forecaster, workload)
        return found

    assert 0 < working(2) < working(16)


def test_every_peer_is_named_once_and_drawn(peers: ModuleType, tmp_path: Path) -> None:
    found = peers.peers([tmp_path / "nano" / "model"])
    names = [(peer.kind, peer.label) for peer in found]
    assert len(set(names)) == len(names)
    assert {kind for kind, _ in names} == peers.STYLES.keys() == {*peers.KINDS[1:]}
    assert ("next smaller size", "nano") in names
    assert ("fold", "d_model 128, d_kv 64, d_ff 50%") in names


def test_a_narrower_peer_is_narrower_and_shares_are_of_its_parameters(
    methods: ModuleType, testbed: ModuleType, checkpoints: dict[str, Path]
) -> None:
    for family in STACKS:
        bed = methods.PeerTestbed(str(checkpoints[family]), calibration=CALIBRATION)
        size = testbed.Size(4, 0.5, 12)
        found = bed.folded(size)
        config = found.config
        assert (config["d_model"], config["d_kv"], config["d_ff"]) == (12, 4, 20)
        share = parameter_count(found.model) / parameter_count(bed.original.model)
        assert bed.share_of(size) == share


def little_bed(methods: ModuleType, checkpoints: dict[str, Path], **options: Any) -> Any:
    """A testbed of a tiny Chronos-Bolt that is evaluated and probed on little."""
    bed = methods.PeerTestbed(
        str(checkpoints["chronos-bolt"]), 2, datasets=("monash_m1_yearly",), **options
    )
    bed.probe = ProbeConfig(tasks=("seasons", "trends"), num_series=2)
    return bed


def test_rows_are_kept_and_costs_added(
    peers: ModuleType,
    methods: ModuleType,
    testbed: ModuleType,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, size = tmp_path / "rows.csv", testbed.Size(4, 0.5)
    found = [
        peers.Peer("fold", "small", partial(peers.folded, size)),
        peers.Peer("SVD-LLM, updated", "small", partial(peers.svd_llm, size, True)),
        peers.Peer("half the layers", "by loss", partial(peers.half_the_layers, True)),
        peers.Peer("fewer bits", "bfloat16", partial(peers.in_bfloat16, methods.PeerTestbed.dense)),
    ]
    console = Console(quiet=True)
    bed = little_bed(methods, checkpoints, calibration=CALIBRATION)
    first = peers.measure(bed, found[:1], path, console)
    frame = peers.measure(bed, found, path, console)
    # Time is never the same twice: the row was not measured again.
    assert frame["CPU minutes"][0] == pytest.approx(first["CPU minutes"][0], rel=1e-12)
    assert list(frame["label"]) == [peer.label for peer in found]
    assert frame[["WQL", "SQL", "MASE", "own skill"]].notna().all(axis=None)

    monkeypatch.setattr(peers, "LITTLE", CALIBRATION)
    workload = Workload(batch_size=2, context_length=32, horizon=4, repeats=5, warmup=0)
    rows = peers.with_costs(bed, frame, found, workload).set_index("kind")
    assert list(rows.index) == ["dense", *(peer.kind for peer in found)]
    assert rows["on disk"]["dense"] == rows["KV cache"]["dense"] == rows["skill"]["dense"] == 1
    assert rows["KV cache"]["fold"] == rows["KV cache"]["half the layers"] == 0.5
    assert rows["KV cache"]["SVD-LLM, updated"] == 1
    assert rows["parameters"]["SVD-LLM, updated"] <= rows["parameters"]["fold"] < 1
    assert rows["in memory MiB"]["fewer bits"] == rows["in memory MiB"]["dense"] / 2
    assert (rows["peak MiB"] > rows["in memory MiB"]).all()
    assert "| fold | small |" in peers.markdown(rows.reset_index())
    said = peers.setting(bed, workload)
    assert "the first 2 series of each dataset" in said
    assert "scores and skill on" not in said  # nothing of it on a GPU
    monkeypatch.setattr(methods.PeerTestbed, "scored_on", "Abacus 1")
    assert "on one Abacus 1, of Fracast-0 on the CPU" in peers.setting(bed, workload)
    assert "2 series × 32 steps, horizon 4" in said
    assert "training data may hold the test series" in said


def test_rows_of_an_earlier_version_are_measured_again(
    peers: ModuleType, methods: ModuleType, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame([{"kind": "dense copy", "label": "", "WQL": 9.0}]).to_csv(path, index=False)
    found = [peers.Peer("dense copy", "", methods.PeerTestbed.dense)]
    bed = little_bed(methods, checkpoints)
    (row,) = peers.measure(bed, found, path, Console(quiet=True)).to_dict("records")
    assert [row[name] for name in ("WQL", "SQL", "MASE")] == [1.0] * 3
    assert row["own skill"] == bed.skills.overall().value


CHANGES = ("weights", "series", "skills", "calibration", "code", "version", "smaller", "script")


@pytest.mark.parametrize("what", [*CHANGES, "none", "a line that was cut off", "no table"])
def test_a_row_is_taken_only_if_all_it_depends_on_is_the_same(
    peers: ModuleType,
    methods: ModuleType,
    testbed: ModuleType,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    path, given = tmp_path / "rows.csv", tmp_path / "model"
    shutil.copytree(checkpoints["chronos-bolt"], given)
    found = [
        peers.Peer("dense copy", "c", methods.PeerTestbed.dense),
        peers.Peer("next smaller size", "m", partial(peers.smaller, str(given)), str(given)),
    ]
    measured = []

    def measure(**options: Any) -> pd.DataFrame:
        bed = little_bed(methods, checkpoints, **options)
        if what == "weights" and measured:
            with torch.no_grad():
                next(bed.original.model.parameters())[0] += 1
        if what == "series" and measured:
            bed.config = bed.config.model_copy(update={"max_series": 3})
        if what == "skills" and measured:
            bed.probe = ProbeConfig(tasks=("seasons",), num_series=2)
        measured.clear()
        monkeypatch.setattr(bed, "row", lambda pipeline, label: (
            measured.append(label) or {"WQL": 1.0, "SQL": 1.0, "own skill": 0.5}
        ))  # fmt: skip
        frame: pd.DataFrame = peers.measure(bed, found, path, Console(quiet=True))
        return frame

    first = measure()
    assert measured == ["c", "m"]
    options: dict[str, Any] = {}
    if what == "calibration":
        options["calibration"] = CALIBRATION
    elif what == "code":
        monkeypatch.setattr(testbed, "code_digest", lambda parts: "another")
    elif what == "version":
        monkeypatch.setattr(testbed, "versions", lambda: {"torch": "0"})
    elif what == "script":
        monkeypatch.setattr(testbed, "__file__", str(tmp_path / "testbed.py"))
        for file in EVAL.glob("*.py"):
            shutil.copy(file, tmp_path)
        with (tmp_path / "peer_methods.py").open("a") as stream:
            stream.write("# another method\n")
    elif what == "smaller":
        loaded = load(given)
        with torch.no_grad():
            next(loaded.model.parameters())[0] += 1
        loaded.model.save_pretrained(given)
    elif what == "a line that was cut off":
        path.write_text(path.read_text()[:-4])
    elif what == "no table":
        path.write_text('a,b\n1,2,3,4\n"')
    again = {"none": [], "smaller": ["m"], "a line that was cut off": ["m"]}.get(what, ["c", "m"])
    frame = measure(**options)
    assert measured == again
    assert sorted(frame["label"]) == sorted(first["label"])
    said = capsys.readouterr().out
    assert ("are of another model" in said) == (what in CHANGES or what.startswith("a line"))


class Echo:
    """In place of Fracast's forecaster: the last value, and its quantiles a level apart."""

    context_length, horizon = 64, 48
    quantiles = tuple(level / 10 for level in range(1, 10))

    def __init__(self) -> None:
        self.core, self.head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)

    def forecast_batch(self, context: Any, *, horizon: int | None) -> Any:
        last = torch.as_tensor(context)[:, -1, None, None]
        return (last + torch.tensor(self.quantiles)).expand(-1, horizon or 48, -1).numpy()


def test_a_model_of_others_is_evaluated_probed_and_timed(
    methods: ModuleType, checkpoints: dict[str, Path]
) -> None:
    pipeline = script("fracast_pipeline").FracastPipeline(Echo())
    quantiles, median = pipeline.predict_quantiles(
        [torch.arange(9.0), torch.arange(4.0)], prediction_length=3, quantile_levels=[0.1, 0.9]
    )
    torch.testing.assert_close(quantiles[:, 0], torch.tensor([[8.1, 8.9], [3.1, 3.9]]))
    torch.testing.assert_close(median, torch.tensor([[8.5] * 3, [3.5] * 3]))
    with pytest.raises(UsageError, match=r"0\.25"):
        pipeline.predict_quantiles([torch.arange(9.0)], 3, [0.25])
    bed = little_bed(methods, checkpoints)
    row = bed.row(pipeline, "echo")
    assert {"WQL", "SQL", "MASE", "skill", "seasons", "own skill"} <= row.keys()
    workload = Workload(batch_size=2, context_length=32, horizon=4, repeats=1, warmup=0)
    pipelines = {"dense": bed.original.forecaster, "echo": pipeline}
    timed = bench(pipelines, workload, measure_macs=False).ratios("echo")
    assert timed["parameters"] == 11 / parameter_count(bed.original.model)
    assert timed["kv_cache_bytes"] == 0


def test_fracast_has_its_own_quantiles(methods: ModuleType) -> None:
    pytest.importorskip("fracast")
    loaded = script("fracast_pipeline").load_fracast()
    assert parameter_count(loaded.model) == 85_001
    assert loaded.bytes_on_disk < 2 * 85_001
    series = torch.sin(torch.arange(96.0) / 12 * 2 * torch.pi).expand(2, -1) + 3
    quantiles, _ = loaded.forecaster.predict_quantiles(series, prediction_length=6)
    assert quantiles.shape == (2, 6, 9)
    assert quantiles[..., 4].median() > quantiles[..., 0].median()


def test_fracast_is_optional(methods: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fracast", None)
    with pytest.raises(UsageError, match=r"pip install 'tscompress\[peers\]'"):
        script("fracast_pipeline").load_fracast()


def test_table_and_figure(peers: ModuleType, tmp_path: Path) -> None:
    rows = []
    for kind in ("dense", *peers.STYLES):
        row: dict[str, Any] = {"kind": kind, "label": "l", "parameters": 0.5, "on disk": 0.25}
        row |= {"in memory MiB": 8.0, "peak MiB": 21.0, "KV cache": 0.125, "CPU minutes": 1.0}
        row |= {"seasons": 0.75, "own skill": 0.5}
        for measure in ("latency", "WQL", "SQL", "MASE", "skill"):
            row |= {measure: 0.9, f"{measure} low": 0.8, f"{measure} high": 1.1}
        rows.append(row)
    frame = pd.DataFrame(rows)
    table = peers.markdown(frame).splitlines()
    assert len(table) == 2 + len(frame)
    (fold,) = (line for line in table if line.startswith("| fold |"))
    assert "| l | 50.0% | 25.0% | 8.0 | 21 | 12.5% | 0.90 (0.80–1.10) | 0.9000 (0.8" in fold
    assert fold.endswith("| 0.900 (0.800–1.100) | 0.750 | 0.500 | 1.0 |")
    peers.draw(frame, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
