"""Pretraining: losses, schedules, and runs that are stopped, killed and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from chronos import BaseChronosPipeline, Chronos2Pipeline, ChronosBoltPipeline, ChronosPipeline
from forked import Program
from pydantic import ValidationError
from safetensors.torch import load_file
from shared_fixtures import ROOT, Command, tiny_recipe

import tscompress
from tscompress.data.batch import ForecastBatch
from tscompress.data.multivariate import GroupsConfig
from tscompress.data.synthetic import CorpusConfig
from tscompress.errors import (
    CorruptCheckpointError,
    DivergenceError,
    OutputExistsError,
    RecipeError,
    UsageError,
)
from tscompress.families.registry import adapter_of
from tscompress.io.making_way import claimed
from tscompress.training import pretraining
from tscompress.training.optimizers import OptimizerName
from tscompress.training.pretrain_batches import (
    batches_from,
    drawing_processes,
    make_batch,
    stage_corpora,
)
from tscompress.training.pretrain_losses import loss_function, token_cross_entropy
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import PretrainRecipe, Stage
from tscompress.training.pretrain_state import whole
from tscompress.training.pretraining import Progress, parameter_groups, pretrain
from tscompress.training.token_tables import fourier_token_embedding
from tscompress.training.windows import Bucket

TRAINED = ["chronos-bolt", "chronos-t5", "chronos-2"]
SEASONAL = CorpusConfig(
    kernel_weight=0,
    stochastic_weight=0,
    count_weight=0,
    noise_scale=0.0,
    seasonal_share=1.0,
    longest_period=0.3,
    mixup_probability=0,
    shift_probability=0,
    outlier_probability=0,
)


def short(family: str, steps: int = 6, **changes: object) -> PretrainRecipe:
    bucket = Bucket(context_length=32, horizon=16, batch_size=4)
    return tiny_recipe(family, stages=(Stage(steps=steps, buckets=(bucket,)),), **changes)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TRAINED)
def test_the_loss_falls(family: str, tmp_path: Path) -> None:
    bucket = Bucket(context_length=32, horizon=16, batch_size=16)
    recipe = tiny_recipe(
        family,
        stages=(Stage(steps=40, buckets=(bucket,)),),
        corpus=SEASONAL,
        learning_rate=5e-3,
        missing_probability=0.0,
    )
    seen: list[Progress] = []
    pretrain(recipe, tmp_path, report=seen.append, log_every=10)
    assert [progress.step for progress in seen] == [10, 20, 30, 40]
    assert seen[-1].loss < 0.92 * seen[0].loss
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log == [progress.__dict__ for progress in seen]


@pytest.mark.parametrize(("family", "pipeline"), [
    ("chronos-bolt", ChronosBoltPipeline),
    ("chronos-t5", ChronosPipeline),
    ("chronos-2", Chronos2Pipeline),
])  # fmt: skip
def test_the_result_opens_in_stock_chronos(family: str, pipeline: type, tmp_path: Path) -> None:
    model = pretrain(short(family, steps=1), tmp_path)
    assert model == tmp_path / "model"
    config = json.loads((model / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights(model).values()} == {torch.bfloat16}
    loaded = BaseChronosPipeline.from_pretrained(model)
    assert type(loaded) is pipeline
    _, mean = loaded.predict_quantiles([torch.arange(30.0)], prediction_length=4)
    assert torch.isfinite(mean[0]).all()


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [("chronos-bolt", "muon"), ("chronos-t5", "adamw"), ("chronos-2", "muon")],
)
def test_stopped_and_resumed_is_bit_equal(
    family: str, optimizer: OptimizerName, tmp_path: Path
) -> None:
    recipe = short(family).model_copy(update={"optimizer": optimizer})
    whole = pretrain(recipe, tmp_path / "whole")
    assert whole is not None

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what Ctrl-C sends

    handler = signal.getsignal(signal.SIGINT)
    output = tmp_path / "parts"
    assert pretrain(recipe, output, report=stop, log_every=1) is None
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (output / "model").exists()

    steps: list[int] = []
    resumed = pretrain(
        recipe, output, resume=True, report=lambda p: steps.append(p.step), log_every=1
    )
    assert resumed is not None
    assert steps == [4, 5, 6]
    assert_equal(weights(whole), weights(resumed))
    logged = [json.loads(line)["step"] for line in (output / "log.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 3, 4, 5, 6]
    if family == "chronos-bolt":
        other = pretrain(short(family), tmp_path / "other")
        assert other is not None
        moved, plain = weights(resumed), weights(other)
        assert not any(torch.equal(moved[name], plain[name]) for name in moved if ".v." in name)


def test_muon_moves_only_matrices_within_layers() -> None:
    for family in TRAINED:
        recipe = short(family)
        model = build_model(recipe)
        groups = parameter_groups(model, recipe)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {
            names[id(p)] for group in groups if group.get("orthogonal") for p in group["params"]
        }
        assert found == {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".block." in name
        }
        assert sum(len(group["params"]) for group in groups) == len(names)


def test_a_second_signal_means_now(tmp_path: Path) -> None:
    def stop_twice(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        pretrain(short("chronos-bolt"), tmp_path, report=stop_twice, log_every=1)


def test_killed_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", checkpoint_minutes=1e-9)  # a checkpoint after each step

    def die(progress: Progress) -> None:
        if progress.step == 4:  # before the checkpoint of this step
            raise SystemExit

    output = tmp_path / "killed"
    with pytest.raises(SystemExit):
        pretrain(recipe, output, report=die, log_every=1)
    (output / "checkpoint" / "state.safetensors.tmp").write_bytes(b"half")  # cut in the middle
    assert not (output / "model").exists()
    steps: list[int] = []
    resumed = pretrain(
        recipe, output, resume=True, report=lambda p: steps.append(p.step), log_every=1
    )
    assert steps == [4, 5, 6]
    whole = pretrain(recipe, tmp_path / "whole")
    assert resumed is not None
    assert whole is not None
    assert_equal(weights(whole), weights(resumed))


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", steps=2)
    model = pretrain(recipe, tmp_path)
    assert model is not None
    before = weights(model)
    assert pretrain(recipe, tmp_path, resume=True) == model
    assert_equal(before, weights(model))


@pytest.mark.parametrize("key", ["start_from", "embedding_from"])
def test_a_model_that_is_read_is_not_replaced(command: Command, tmp_path: Path, key: str) -> None:
    model = pretrain(short("chronos-bolt", steps=1), tmp_path)
    assert model is not None
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = short("chronos-bolt", steps=1, **{key: str(model)})
    with pytest.raises(OutputExistsError, match="model' is the input"):
        pretrain(again, tmp_path, force=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    recipe = tmp_path / "again.yaml"
    recipe.write_text(again.model_dump_json())  # JSON is YAML
    outcome = command("pretrain", recipe, "--output", tmp_path, "--force")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "model' is the input" in outcome.err


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValidationError, match="seed"):
        short("chronos-bolt", seed=-1)


def test_seeds_differ(tmp_path: Path) -> None:
    first, second = (
        pretrain(short("chronos-bolt", steps=1, seed=seed), tmp_path / str(seed)) for seed in (0, 1)
    )
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    again = pretrain(short("chronos-bolt", steps=1), tmp_path / "again")
    assert torch.equal(torch.rand(2), expected)  # the caller's generator is as it was
    assert first is not None
    assert second is not None
    assert again is not None
    assert_equal(weights(first), weights(again))
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert not torch.equal(weights(first)[name], weights(second)[name])


@pytest.mark.parametrize("what", ["loss", "gradient's norm"])
def test_divergence_keeps_the_last_checkpoint(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def diverging(model: torch.nn.Module, batch: ForecastBatch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = adapter_of("chronos-bolt").stock_loss(model, batch)
        if calls == 3 and what == "loss":
            return loss * math.nan
        if calls == 3:  # a finite loss, of which the gradient is not
            return loss + (0.0 * next(model.parameters())).abs().sum().sqrt()
        return loss

    recipe = short("chronos-bolt", checkpoint_minutes=1e-9)
    monkeypatch.setattr(pretraining, "loss_function", lambda *_: diverging)
    match = rf"the {what} is nan at step 3; lower learning_rate \(0.001\).*--resume"
    with pytest.raises(DivergenceError, match=match):
        pretrain(recipe, tmp_path / "run")
    monkeypatch.undo()
    state = load_file(tmp_path / "run" / "checkpoint" / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    resumed = pretrain(recipe, tmp_path / "run", resume=True)
    whole = pretrain(recipe, tmp_path / "whole")
    assert resumed is not None
    assert whole is not None
    assert_equal(weights(whole), weights(resumed))


def test_arguments_of_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tscompress.pretrain(short("chronos-bolt", steps=1), "out/run") == Path("out/run/model")
    with pytest.raises(UsageError, match="give what tscompress\\.load_pre"):
        tscompress.pretrain("recipe.yaml", tmp_path)
    recipe = tscompress.load_pretrain_recipe(ROOT / "recipes" / "pretrain" / "bolt-nano.yaml")
    assert recipe.family == "chronos-bolt"


def test_unfit_checkpoints_are_refused_on_resume(tmp_path: Path) -> None:
    pretrain(short("chronos-bolt", steps=1), tmp_path / "bolt")
    with pytest.raises(RecipeError, match="was begun with family 'chronos-bolt'"):
        pretrain(short("chronos-t5"), tmp_path / "bolt", resume=True)
    pretrain(short("chronos-bolt", steps=2), tmp_path / "bolt", resume=True)
    with pytest.raises(RecipeError, match="has 2 steps, the recipe 1"):
        pretrain(short("chronos-bolt", steps=1), tmp_path / "bolt", resume=True)
    state = tmp_path / "bolt" / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        pretrain(short("chronos-bolt"), tmp_path / "bolt", resume=True)


# --------------------------------------------------------------------------------------------------
# Recipes and schedules
# --------------------------------------------------------------------------------------------------


def grouped(**changes: object) -> PretrainRecipe:
    bucket = Bucket(context_length=32, horizon=16, batch_size=64)
    stage = Stage(steps=1, buckets=(bucket,), groups=GroupsConfig(share=0.8), horizon_multiple=4)
    return tiny_recipe("chronos-2", stages=(stage,), missing_probability=0.0, **changes)


def test_a_known_series_has_a_future_and_no_target() -> None:
    recipe = grouped()
    batch = make_batch(recipe, stage_corpora(recipe), 0)
    assert batch.future is not None
    assert batch.group_ids is not None
    known = batch.future.isfinite().any(1)
    assert 0 < known.sum() < len(batch)
    assert batch.future[known].isfinite().all()
    assert not batch.target[known].isfinite().any()
    for group in batch.group_ids.unique():
        rows = batch.group_ids == group
        assert not known[rows].all()
        begins = batch.context[rows].isfinite().int().argmax(1)
        assert len(begins.unique()) == 1  # contexts of a group are cut alike


def test_horizons_are_drawn_in_multiples() -> None:
    recipe = grouped()
    horizons = {
        make_batch(recipe.model_copy(update={"seed": seed}), stage_corpora(recipe), 0).target.shape[
            1
        ]
        for seed in range(40)
    }
    assert horizons == {4, 8, 12, 16}


def test_a_known_future_changes_the_loss_of_others() -> None:
    recipe = grouped()
    batch = make_batch(recipe, stage_corpora(recipe), 0)
    model = build_model(recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
        loss_of = loss_function(model)
        assert batch.future is not None
        hidden = replace(batch, future=torch.full_like(batch.future, torch.nan))
        alone = replace(hidden, group_ids=None)
        assert len({float(loss_of(model, one)) for one in (batch, hidden, alone)}) == 3


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_the_loss_is_a_mean_over_observed_steps(family: str) -> None:
    model = build_model(short(family))
    series = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    batch = ForecastBatch(series[:, :32], series[:, 32:])
    halves = []
    for rows in (slice(0, 4), slice(4, 8)):
        target = torch.full_like(batch.target, torch.nan)
        target[rows] = batch.target[rows]
        halves.append(loss_function(model)(model, replace(batch, target=target)).item())
    whole = loss_function(model)(model, batch).item()
    assert sum(halves) / 2 == pytest.approx(whole, rel=1e-4)


def test_groups_of_a_family_that_reads_series_alone_are_refused() -> None:
    stage = grouped().stages[0]
    with pytest.raises(ValidationError, match="groups"):
        tiny_recipe("chronos-bolt", stages=(stage,))


def test_groups_without_a_relation_are_refused() -> None:
    nothing = {name: 0 for name in GroupsConfig.model_fields if name.endswith("_weight")}
    with pytest.raises(ValidationError, match="at least one relation"):
        GroupsConfig.model_validate(nothing)


@pytest.mark.parametrize("levels", [(), (0.5, 0.1), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5)])
def test_quantiles_that_do_not_rise_are_refused(levels: tuple[float, ...]) -> None:
    shape = tiny_recipe("chronos-2").architecture.model_dump() | {"quantiles": levels}
    with pytest.raises(ValidationError, match="quantiles"):
        tiny_recipe("chronos-2", architecture=shape)


@pytest.mark.parametrize(
    ("family", "shape", "word"),
    [
        ("chronos-2", {"num_decoder_layers": 2}, "num_decoder_layers"),
        ("chronos-bolt", {"num_decoder_layers": 0}, "num_decoder_layers"),
        ("chronos-t5", {"num_decoder_layers": 0}, "num_decoder_layers"),
        ("chronos-2", {"prediction_length": 17}, "prediction_length"),
        ("chronos-2", {"d_kv": 5}, "d_kv is 5; chronos-2 turns pairs"),
    ],
)
def test_a_shape_that_a_family_lacks_is_refused(
    family: str, shape: dict[str, int], word: str
) -> None:
    plain = tiny_recipe(family)
    architecture = plain.architecture.model_copy(update=shape)
    with pytest.raises(RecipeError, match=word):
        build_model(plain.model_copy(update={"architecture": architecture}))


def test_learning_rate_warms_up_holds_and_decays() -> None:
    recipe = short("chronos-bolt", steps=100, warmup_steps=10, decay_fraction=0.2,
                   learning_rate=1.0)  # fmt: skip
    rates = [recipe.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[9:81] == [1.0] * 72
    assert rates[80:] == pytest.approx([1 - step / 20 for step in range(20)])
    assert rates[-1] > 0


def test_no_warmup() -> None:
    assert short("chronos-bolt", warmup_steps=0, learning_rate=0.5).learning_rate_at(0) == 0.5


def test_steps_belong_to_stages() -> None:
    stage = short("chronos-bolt").stages[0]
    stages = tuple(stage.model_copy(update={"steps": steps}) for steps in (2, 1, 3))
    recipe = tiny_recipe("chronos-bolt", stages=stages)
    assert recipe.total_steps == 6
    assert [recipe.stage_at(step) for step in range(6)] == [0, 0, 1, 2, 2, 2]
    with pytest.raises(RecipeError, match="step 6 "):
        recipe.stage_at(6)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rates": 1e-3},
        {"learning_rate": 0},
        {"learning_rate": "fast"},
        {"architecture": {"d_model": 8}},
        {"stages": ()},
        {"decay_fraction": 0},
        {"corpus": {"kernels": 1}},
    ],
)
def test_unknown_keys_and_bad_values(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        tiny_recipe("chronos-bolt", **change)


def changed(name: str, **changes: object) -> tuple[object, object]:
    """``name`` of what two recipes lead to that differ in ``changes``."""
    plain, other = (short("chronos-t5", **more) for more in ({}, changes))
    if name == "batch":
        first, second = (
            torch.cat([make_batch(r, stage_corpora(r), step).context for step in range(6)])
            for r in (plain, other)
        )
    else:
        torch.manual_seed(0)
        first = build_model(plain).shared.weight
        torch.manual_seed(0)
        second = build_model(other).shared.weight
    return first, second


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("batch", {"seed": 1}),
        ("batch", {"missing_probability": 1.0}),
        ("batch", {"corpus": SEASONAL}),
        ("batch", {"real_series": ("aus_production",)}),
        ("embedding", {"token_embedding": "normal"}),
    ],
)
def test_each_option_changes_the_run(name: str, changes: dict[str, object]) -> None:
    first, second = changed(name, **changes)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert not torch.equal(first.nan_to_num(), second.nan_to_num())


def state_after_three_steps(output: Path, **changes: object) -> dict[str, torch.Tensor]:
    pretrain(short("chronos-bolt", steps=3, **changes), output)
    return load_file(output / "checkpoint" / "state.safetensors")


@pytest.fixture(scope="module")
def plain_state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of a run without any change."""
    return state_after_three_steps(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_decay": 0.5},
        {"learning_rate": 1e-2},
        {"max_grad_norm": 1e-3},
        {"position_bias_rate": 30.0},
        {"warmup_steps": 5},
        {"decay_fraction": 1.0},
        {"precision": "bf16"},
    ],
)
def test_options_of_the_optimizer_change_the_weights(
    changes: dict[str, object], plain_state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = state_after_three_steps(tmp_path, **changes)
    bias = "model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    query = "model.encoder.block.0.layer.0.SelfAttention.q.weight"
    name = bias if "position_bias_rate" in changes else query
    assert not torch.equal(state[name], plain_state[name])


def test_a_rate_of_position_biases_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is 30, and a chronos-2 trains no position biases"):
        pretrain(short("chronos-2", position_bias_rate=30), tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("chronos-bolt", {"vocab_size": 64}, "a chronos-bolt reads no vocab_size"),
        ("chronos-2", {"top_k": 5}, "a chronos-2 reads no top_k"),
        ("chronos-t5", {"patch_size": 8}, "a chronos-t5 reads no patch_size"),
        ("chronos-t5", {"quantiles": (0.5,)}, "a chronos-t5 reads no quantiles"),
    ],
)
def test_a_shape_that_a_family_does_not_read_is_refused(
    tmp_path: Path, family: str, change: dict[str, object], said: str
) -> None:
    shape = short(family).architecture.model_dump() | change
    with pytest.raises(RecipeError, match=said):
        pretrain(short(family, architecture=shape), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_series_that_no_corpus_draws_are_refused(tmp_path: Path) -> None:
    none = CorpusConfig(real_weight=0)
    with pytest.raises(RecipeError, match="real_weight of a corpus, which is 0 in every stage"):
        pretrain(short("chronos-bolt", real_series=("prison",), corpus=none), tmp_path / "out")


def test_a_bucket_reads_no_more_than_the_architecture(tmp_path: Path) -> None:
    bucket = Bucket(context_length=65, horizon=8, batch_size=4)
    recipe = tiny_recipe("chronos-bolt", stages=(Stage(steps=1, buckets=(bucket,)),))
    with pytest.raises(RecipeError, match=r"context_length is 65, .* of the architecture 64"):
        pretrain(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write there")
def test_the_parent_of_an_output_may_be_read_only(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    tmp_path.chmod(0o555)
    try:
        assert pretrain(short("chronos-bolt", steps=1), tmp_path / "run") is not None
    finally:
        tmp_path.chmod(0o755)


def test_batches_depend_on_the_step_only() -> None:
    recipe = short("chronos-bolt")
    corpora = stage_corpora(recipe)
    first, again, other = (make_batch(recipe, corpora, step) for step in (4, 4, 5))
    assert np.array_equal(first.context, again.context, equal_nan=True)
    assert np.array_equal(first.target, again.target, equal_nan=True)
    assert not np.array_equal(first.context, other.context, equal_nan=True)
    assert first.context.shape == (4, 32)
    assert first.target.shape == (4, 16)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("processes", [0, 2])
def test_batches_are_the_same_from_any_number_of_processes(processes: int) -> None:
    recipe = short("chronos-2", steps=6)
    corpora = stage_corpora(recipe)
    state = torch.get_rng_state()
    drawn = list(batches_from(recipe, corpora, 2, processes))
    assert torch.equal(torch.get_rng_state(), state)  # the training's own draws are left alone
    assert len(drawn) == recipe.total_steps - 2
    for step, batch in enumerate(drawn, start=2):
        alone = make_batch(recipe, corpora, step)
        for name in ("context", "target", "group_ids", "future"):
            found, expected = getattr(batch, name), getattr(alone, name)
            assert (found is None) == (expected is None)
            if found is not None:
                assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))


def drawn_by_processes(end: str, folder: Path) -> tuple[int, bytes, bytes]:
    """A program that has two processes draw 40 batches, one of which is slow to start, and goes on
    as ``end`` says after the first."""
    recipe = short("chronos-bolt", steps=40)
    code = f"""
import multiprocessing, os, signal, time
from tscompress.training import pretrain_batches
from tscompress.training.loop import StopRequest
from tscompress.training.pretrain_recipe import PretrainRecipe
os.setsid()
recipe = PretrainRecipe.model_validate_json({recipe.model_dump_json()!r})
leave_signals = pretrain_batches._leave_signals
def slowly(worker):
    time.sleep(worker)
    leave_signals(worker)
pretrain_batches._leave_signals = slowly
batches = pretrain_batches.batches_from(
    recipe, pretrain_batches.stage_corpora(recipe), 0, 2
)
with StopRequest() as stop:
    drawn = [next(batches)]
{textwrap.indent(end, "    ")}
"""
    return Program((), folder, code).run()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_processes_that_draw_outlive_a_signal_to_the_training(tmp_path: Path) -> None:
    code, out, err = drawn_by_processes(
        """
for process in multiprocessing.active_children():
    os.kill(process.pid, signal.SIGTERM)
os.killpg(os.getpgrp(), signal.SIGTERM)
drawn += batches
print(stop.requested, len(drawn), len(multiprocessing.active_children()))
""",
        tmp_path,
    )
    assert (code, out.split()) == (0, [b"True", b"40", b"0"]), err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes without a main module")
def test_a_training_that_fails_ends_though_processes_draw_for_it(tmp_path: Path) -> None:
    code, _, err = drawn_by_processes('raise RuntimeError("it failed")', tmp_path)
    assert code == 1
    assert b"it failed" in err


def test_a_gpu_has_its_batches_drawn_ahead() -> None:
    assert drawing_processes(torch.device("cpu")) == 0
    assert 1 <= drawing_processes(torch.device("cuda")) <= 8


def test_every_context_has_an_observed_value() -> None:
    recipe = short("chronos-bolt", steps=50, missing_probability=1.0)
    corpora = stage_corpora(recipe)
    for step in range(50):
        batch = make_batch(recipe, corpora, step)
        assert torch.isfinite(batch.context).any(dim=1).all()
        assert not torch.isinf(batch.context).any()


# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing_bins", [0.3, 1.0, 2.5])
def test_label_smoothing_agrees_with_explicit_soft_targets(smoothing_bins: float) -> None:
    vocabulary, special = 40, 2
    labels = torch.tensor([0, 1, 2, 3, 20, 38, 39])
    logits = torch.randn(len(labels), vocabulary, generator=torch.Generator().manual_seed(0))
    soft = torch.zeros(len(labels), vocabulary)
    for row, label in enumerate(labels.tolist()):
        if label < special:
            soft[row, label] = 1
            continue
        for token in range(special, vocabulary):
            if abs(token - label) <= math.ceil(3 * smoothing_bins):
                soft[row, token] = math.exp(-0.5 * ((token - label) / smoothing_bins) ** 2)
    soft /= soft.sum(dim=1, keepdim=True)
    expected = torch.nn.functional.cross_entropy(logits, soft)
    actual = token_cross_entropy(logits, labels, smoothing_bins, special)
    torch.testing.assert_close(actual, expected)


def test_no_smoothing_is_plain_cross_entropy() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 5, 10, 11])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(token_cross_entropy(logits, labels, 0.0), expected)
    torch.testing.assert_close(token_cross_entropy(logits, labels, 1e-3), expected)


@pytest.mark.parametrize("family", TRAINED)
def test_missing_targets_are_ignored(family: str) -> None:
    torch.manual_seed(0)
    model = build_model(short(family))
    loss_of = loss_function(model)
    context = torch.sin(torch.arange(32.0))[None].repeat(2, 1)
    target = torch.cos(torch.arange(8.0))[None].repeat(2, 1)
    half = target.clone()
    half[1] = math.nan
    single = loss_of(model, ForecastBatch(context[:1], target[:1]))
    torch.testing.assert_close(loss_of(model, ForecastBatch(context, half)), single)
    nothing = loss_of(model, ForecastBatch(context, torch.full_like(target, math.nan)))
    assert float(nothing.detach()) == 0
    nothing.backward()


def test_fourier_table_is_smooth_and_of_unit_variance() -> None:
    centers = torch.linspace(-15, 15, 500)
    for d_model in (24, 25):
        table = fourier_token_embedding(centers, d_model)
        assert table.shape == (500, d_model)
        assert table.pow(2).mean() == pytest.approx(24 / d_model, rel=0.1)
        distance = torch.cdist(table, table)
        neighbours = distance.diagonal(1)
        assert float(neighbours.max()) < float(distance.diagonal(100).min())
        assert float(neighbours.min()) > 0


def test_resume_without_checkpoint_is_refused_and_keeps_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no checkpoint at .* to resume from"):
        pretrain(short("chronos-bolt"), tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_only_some_keys_may_change_on_the_way(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", checkpoint_minutes=1e-9)

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    assert pretrain(recipe, tmp_path, report=stop, log_every=1) is None
    with pytest.raises(RecipeError, match=r"seed 0; .* 99"):
        pretrain(recipe.model_copy(update={"seed": 99}), tmp_path, resume=True)
    with pytest.raises(RecipeError, match=r"was begun with missing_probability"):
        pretrain(recipe.model_copy(update={"missing_probability": 0.9}), tmp_path, resume=True)
    model = pretrain(recipe.model_copy(update={"learning_rate": 5e-4}), tmp_path, resume=True)
    assert model is not None
    record = json.loads((model / "provenance.json").read_text())["pretraining"]
    assert record["parts"] == [[0, recipe.learning_rate, 6], [3, 5e-4, 6]]


def test_a_checkpoint_of_before_a_key_was_there_resumes() -> None:
    recipe = short("chronos-bolt")
    begun = recipe.model_dump(mode="json")
    del begun["keep_of_start"], begun["corpus"]["trend_weight"], begun["stages"][0]["groups"]
    assert whole(begun) == recipe.model_dump(mode="json")
    assert whole(begun | {"gone": 1}) == begun | {"gone": 1}


def test_a_training_is_not_replaced_unasked(command: Command, tmp_path: Path) -> None:
    recipe, output = short("chronos-bolt", steps=1), tmp_path / "run"
    pretrain(recipe, output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    said = r"holds the state of a training; resume it with --resume .*--force \(force=True\)"
    with pytest.raises(OutputExistsError, match=said):
        pretrain(recipe, output)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.model_dump_json())  # JSON is YAML
    outcome = command("pretrain", file, "--output", output)
    assert outcome.code == 2
    assert "resume it with --resume" in outcome.err
    (output / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(OutputExistsError, match="exists already"):
        pretrain(recipe, output)
    del before[output / "checkpoint" / "state.safetensors"]
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_two_trainings_to_one_output_exclude_each_other(tmp_path: Path) -> None:
    recipe, output = short("chronos-bolt", steps=2), tmp_path / "run"

    def start_another(progress: Progress) -> None:
        with (
            pytest.raises(OutputExistsError, match="another process writes to"),
            claimed([output / "log.jsonl"]),
        ):
            pytest.fail("two have it")

    assert pretrain(recipe, output, report=start_another, log_every=1) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fresh_start_leaves_nothing_of_an_older_run(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", steps=2)
    pretrain(short("chronos-bolt", steps=2, snapshots=(0.5,)), tmp_path)
    (tmp_path / "step-7").mkdir()
    shutil.copy(tmp_path / "model" / "pretrain.yaml", tmp_path / "step-7")
    (tmp_path / "step-7" / "config.json").write_text("{}")  # that is none of ours
    assert len(list(tmp_path.glob("step-*"))) == 2

    def die(progress: Progress) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        pretrain(recipe, tmp_path, force=True, report=die, log_every=1)
    assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-7"]
    with pytest.raises(RecipeError, match="no checkpoint"):
        pretrain(recipe, tmp_path, resume=True)


def test_an_older_snapshot_that_is_read_is_not_removed(tmp_path: Path) -> None:
    pretrain(short("chronos-bolt", steps=2, snapshots=(0.5,)), tmp_path)
    (snapshot,) = tmp_path.glob("step-*")
    with pytest.raises(OutputExistsError, match="is the input"):
        pretrain(short("chronos-bolt", start_from=str(snapshot)), tmp_path, force=True)
    assert (snapshot / "config.json").is_file()


@pytest.mark.parametrize("log", ["ours", "empty"])
def test_half_written_states_of_a_killed_run_make_way(tmp_path: Path, log: str) -> None:
    recipe = short("chronos-bolt", steps=1)
    pretrain(recipe, tmp_path)
    unfinished = tmp_path / "checkpoint" / "state.safetensors.tmp"
    unfinished.write_bytes(b"half")
    by_library = unfinished.with_name(".tmpaB3xYz")  # as safetensors begins a file
    by_library.write_bytes(b"half")
    if log == "empty":  # killed before its first line
        (tmp_path / "log.jsonl").write_text("")
    else:
        unfinished.with_name("state.safetensors").write_bytes(b"half")
    pretrain(recipe, tmp_path, force=True)
    assert not unfinished.exists()
    assert not by_library.exists()


@pytest.mark.parametrize("log", ["step,loss\n1,0.5\n", "", None], ids=["foreign", "empty", "none"])
def test_a_state_beside_no_log_of_ours_stays(tmp_path: Path, log: str | None) -> None:
    state = tmp_path / "checkpoint" / "state.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"mine")
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    with pytest.raises(OutputExistsError, match=tmp_path.name):
        pretrain(short("chronos-bolt"), tmp_path)
    assert state.read_bytes() == b"mine"


def test_lost_steps_leave_the_log(tmp_path: Path) -> None:
    """A killed run logged what it had not saved, the last line of it in part."""
    recipe = short("chronos-bolt", steps=4)
    pretrain(recipe, tmp_path, log_every=1)
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, lines[-1].replace('"step": 4', '"step": 5'), '{"st']))
    pretrain(short("chronos-bolt", steps=6), tmp_path, resume=True, log_every=1)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [*range(1, 7)]


def test_untrainable_recipes_are_refused(tmp_path: Path) -> None:
    bucket = Bucket(context_length=32, horizon=64, batch_size=4)
    with pytest.raises(ValidationError, match=r"horizon is 64, prediction_length"):
        tiny_recipe("chronos-bolt", stages=(Stage(steps=1, buckets=(bucket,)),))
    families = ("kernel", "structural", "stochastic", "count")
    nothing = CorpusConfig.model_validate({f"{family}_weight": 0 for family in families})
    with pytest.raises(RecipeError, match="corpus: "):
        pretrain(short("chronos-bolt", corpus=nothing), tmp_path / "out")


def test_a_run_does_not_keep_the_device_of_the_one_before(tmp_path: Path) -> None:
    pretrain(short("chronos-bolt", steps=1), tmp_path / "first")
    PartialState().device = torch.device("meta")  # as if that had been elsewhere
    assert pretrain(short("chronos-bolt", steps=1), tmp_path / "second") is not None
    assert PartialState().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_training_in_a_thread(tmp_path: Path) -> None:
    """Only the main thread may ask for signals; another goes without."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(pretrain, short("chronos-bolt", steps=1), tmp_path).result()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        pretrain(short("chronos-bolt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_snapshots_of_a_run_are_models(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", steps=4, snapshots=(0.25, 0.5))
    final = pretrain(recipe, tmp_path)
    assert final is not None
    kept = [weights(tmp_path / f"step-{step}") for step in (1, 2)]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2"]
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    tensors = [one[name] for one in (*kept, weights(final))]
    assert not torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[1], tensors[2])
    with pytest.raises(ValidationError, match="snapshots are shares"):
        short("chronos-bolt", snapshots=(1.0,))


def test_resuming_with_another_curriculum_is_refused(tmp_path: Path) -> None:
    recipe = short("chronos-bolt", steps=1)
    pretrain(recipe, tmp_path)
    (stage,) = recipe.stages
    other = stage.model_copy(update={"corpus": CorpusConfig(seasonal_weight=1.0)})
    with pytest.raises(RecipeError, match="was begun with stages"):
        pretrain(recipe.model_copy(update={"stages": (other,)}), tmp_path, resume=True)


def test_stages_report_truncated_contexts() -> None:
    (stage,) = short("chronos-bolt").stages
    whole = stage.model_copy(update={"shorten_probability": 0.0})
    recipe = short("chronos-bolt", missing_probability=0.0)
    recipe = recipe.model_copy(update={"stages": (whole,)})
    batches = [make_batch(recipe, stage_corpora(recipe), step) for step in range(4)]
    assert all(torch.isfinite(batch.context).all() for batch in batches)
