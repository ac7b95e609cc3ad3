"""Recovery: losses, and runs that are shared out, stopped, killed and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from chronos import BaseChronosPipeline
from forked import Program
from hooks import hook_count
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared_fixtures import FAMILIES, Command
from torch import Tensor

import tscompress
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.batch import ForecastBatch
from tscompress.data.fingerprints import fingerprints
from tscompress.data.leakage import guarded
from tscompress.data.reading.format import GivenSeries
from tscompress.data.series import read_series
from tscompress.data.suites import load_suite
from tscompress.data.synthetic import HALF_PATTERNS, CorpusConfig
from tscompress.data.training_collections import TRAINING_COLLECTIONS, training_series
from tscompress.errors import (
    CorruptCheckpointError,
    DataError,
    DivergenceError,
    LeakError,
    OutputExistsError,
    PlanError,
    RecipeError,
    UsageError,
)
from tscompress.families.registry import adapter_of
from tscompress.io.making_way import claimed
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import RankSchedule
from tscompress.training import recovery
from tscompress.training.checkpoint import STATE_FILE, read_training_record
from tscompress.training.distillation import (
    Distillation,
    QuantileDistillation,
    TokenDistillation,
    distillation_of,
)
from tscompress.training.distillation_losses import (
    pinball_loss,
    quantile_distance,
    target_weights,
    token_losses,
)
from tscompress.training.loop import attention_for_training
from tscompress.training.recovery import recover_, recovery_optimizer
from tscompress.training.recovery_batches import Batches, with_history
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.recovery_files import LOG_FILE
from tscompress.training.recovery_memory import memory_bytes
from tscompress.training.recovery_state import (
    CHECKPOINT,
    RecoveryProgress,
    can_resume,
    differences_from,
)
from tscompress.training.windows import Bucket
from tscompress.workflows.recipe import Recipe, load_recipe, load_recovery_config
from tscompress.workflows.recover import recover_checkpoint
from tscompress.workflows.save import CompressedModel, save
from tscompress.workflows.unfinished import check_recovery_directory, finish_recovery

CALIBRATION = CalibrationConfig(source="synthetic", num_series=16, context_length=48, batch_size=8)
BUCKETS = (Bucket(context_length=32, horizon=16, batch_size=8),)
SHORT = {
    "synthetic_share": 0.5,
    "steps": 6,
    "buckets": BUCKETS,
    "precision": "no",
    "held_out_series": 8,
    "evaluate_every": 3,
    "warmup_steps": 1,
    "learning_rate": 3e-3,
}


def short(**changes: Any) -> RecoveryConfig:
    return RecoveryConfig.model_validate(SHORT | changes)


def smooth(**changes: Any) -> RecoveryConfig:
    """A Bolt's run of steps so small that rounding changes little."""
    settings = {"truth_weight": 0.5, "learning_rate": 1e-4}
    return short(held_out_series=32, **settings, **changes)  # four batches, for processes to share


@pytest.fixture(scope="module")
def students(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Family to its checkpoint folded to smaller sizes; ``factored``: Bolt in two factors."""
    root = tmp_path_factory.mktemp("students")
    found = {}
    for family in FAMILIES:
        small = tscompress.compress(
            checkpoints[family], rank=4, ff_ratio=0.25, calibration=CALIBRATION
        )
        found[family] = save(small, root / family)
    factored = tscompress.compress(checkpoints["chronos-bolt"], method="svd", rank=2)
    found["factored"] = save(factored, root / "factored")
    return found


def pair(
    students: dict[str, Path], checkpoints: dict[str, Path], family: str
) -> tuple[LoadedModel, LoadedModel]:
    """Student and teacher, fresh."""
    original = "chronos-bolt" if family == "factored" else family
    return load(students[family]), load(checkpoints[original])


@pytest.fixture
def bolt(students: dict[str, Path], checkpoints: dict[str, Path]) -> Callable[[], Any]:
    return lambda: pair(students, checkpoints, "chronos-bolt")


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_before_short_series_are_not_computed(
    students: dict[str, Path], checkpoints: dict[str, Path], family: str
) -> None:
    student, teacher = pair(students, checkpoints, family)
    student.model.eval()
    seen = {"student": [], "teacher": []}  # type: ignore[var-annotated]
    watched = {"student": student.model, "teacher": teacher.model}
    for name, model in watched.items():
        part = model.encoder.block[0]  # type: ignore[union-attr, index]
        part.register_forward_pre_hook(
            lambda _, args, kwargs, lengths=seen[name]: lengths.append(
                (args[0] if args else kwargs["hidden_states"]).shape[1]
            ),
            with_kwargs=True,
        )
    series = [np.sin(np.arange(24.0) + k) for k in range(40)]
    buckets = (Bucket(context_length=480, horizon=16, batch_size=8),)
    recover_(student, teacher, short(steps=2, synthetic_share=0, buckets=buckets), series=series)
    for lengths in seen.values():
        assert lengths
        assert max(lengths) < 40  # 12 steps of history, or their patches, and those ahead


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loaded.model.named_parameters()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def batch_of(family: str, **changes: Any) -> ForecastBatch:
    return Batches(family, short(**changes)).at(1)


# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def test_pinball_agrees_with_the_training_loss_of_chronos(checkpoints: dict[str, Path]) -> None:
    bolt = load(checkpoints["chronos-bolt"])
    batch = batch_of("chronos-bolt")
    target = batch.target.nan_to_num()
    output = bolt.model(context=batch.context, target=target.clone())
    with torch.no_grad():
        teacher = load(checkpoints["chronos-bolt"])
        losses = distillation_of(teacher, bolt)(
            bolt.model, dataclasses.replace(batch, target=target)
        )
    torch.testing.assert_close(losses.truth.mean(), output.loss.detach() / target.shape[1])


def test_missing_targets_are_ignored() -> None:
    quantiles = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([0.1, 0.5, 0.9])
    target = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    half = target.clone()
    half[0, 2:] = math.nan
    half[1] = math.nan
    expected = pinball_loss(quantiles[:1, :, :2], target[:1, :2], levels)
    torch.testing.assert_close(
        pinball_loss(quantiles, half, levels), torch.cat([expected, expected * 0])
    )


def test_distances_of_quantiles() -> None:
    theirs, ours = torch.zeros(2, 3, 4), torch.full((2, 3, 4), -2.0)
    assert quantile_distance(ours, theirs).tolist() == [2, 2]


def test_token_losses_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 2, 5, 7, generator=generator)
    labels = torch.randint(7, (2, 5), generator=generator)
    observed = torch.ones(2, 5, dtype=torch.bool)
    observed[1, 2:] = False
    divergence, entropy = token_losses(ours, theirs, labels, observed)
    for row, count in ((0, 5), (1, 2)):
        expected = torch.nn.functional.kl_div(
            ours[row, :count].log_softmax(-1),
            theirs[row, :count].softmax(-1),
            reduction="batchmean",
        )
        torch.testing.assert_close(divergence[row], expected)
        expected = torch.nn.functional.cross_entropy(ours[row, :count], labels[row, :count])
        torch.testing.assert_close(entropy[row], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_at_no_distance_from_itself(
    family: str, checkpoints: dict[str, Path], students: dict[str, Path]
) -> None:
    teacher, same = load(checkpoints[family]), load(checkpoints[family])
    batch = batch_of(family)
    distillation = distillation_of(teacher, same)
    losses = distillation(same.model, batch)
    assert losses.teacher.shape == losses.truth.shape == (8,)
    assert float(losses.teacher.detach().abs().max()) < 1e-6
    distillation.close()
    assert hook_count(same.model) == 0
    student = load(students[family])
    other = distillation_of(teacher, student)(student.model, batch)
    assert float(other.teacher.detach()[target_weights(batch) > 0].min()) > 0


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_attention_for_training_is_the_same_attention(
    family: str, checkpoints: dict[str, Path]
) -> None:
    loaded = load(checkpoints[family])
    model: Any = loaded.model
    stacks = (model, model.encoder, model.decoder)
    [batch] = Batches(family, short(held_out_series=8).resolved(loaded)).held_out()
    distillation = distillation_of(load(checkpoints[family]), loaded)

    def learnt() -> dict[str, Tensor]:
        distillation(model, batch).truth.mean().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    assert {stack.config._attn_implementation for stack in stacks} == {"sdpa"}
    fused = learnt()
    with attention_for_training(model):
        assert {stack.config._attn_implementation for stack in stacks} == {"eager"}
        plain = learnt()
    assert {stack.config._attn_implementation for stack in stacks} == {"sdpa"}
    assert any("relative_attention_bias" in name for name in plain)
    assert plain.keys() == fused.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(gradient, fused[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recovery_trains_products_and_restores_factors(
    checkpointing: bool, students: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    student, teacher = pair(students, checkpoints, "chronos-t5")
    model: Any = student.model
    seen: list[str] = []

    def watch(_: RecoveryProgress) -> None:
        seen.append(model.decoder.config._attn_implementation)
        if len(seen) == 3:
            raise RuntimeError

    config = short(gradient_checkpointing=checkpointing, evaluate_every=1)
    with pytest.raises(RuntimeError):
        recover_(student, teacher, config, report=watch)
    assert seen == ["eager"] * 3
    assert model.decoder.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(block) for block in model.decoder.block)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_attention_ends_with_the_training(
    family: str, checkpoints: dict[str, Path]
) -> None:
    model: Any = load(checkpoints[family]).model
    before = model.config._attn_implementation
    with attention_for_training(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == before


def test_both_models_compute_what_is_read_while_they_train(
    students: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    student, teacher = pair(students, checkpoints, "chronos-2")
    config = short().resolved(student, teacher)
    ahead = {-(-bucket.horizon // 16) for bucket in config.buckets or ()}  # of patches
    seen: dict[str, set[int]] = {"student": set(), "teacher": set()}
    for name, loaded in (("student", student), ("teacher", teacher)):
        model: Any = loaded.model
        model.encoder.block[-1].layer[2].register_forward_pre_hook(
            lambda _, args, name=name: seen[name].add(args[0].shape[1])
        )
    recover_(student, teacher, short())
    assert seen == {"student": ahead, "teacher": ahead}
    assert hook_count(student.model) == hook_count(teacher.model) == 1  # those of above


def test_unrelated_models_are_refused(checkpoints: dict[str, Path]) -> None:
    bolt, t5 = load(checkpoints["chronos-bolt"]), load(checkpoints["chronos-t5"])
    with pytest.raises(UsageError, match="family chronos-t5"):
        recover_(t5, bolt, short())


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "factored"])
def test_recovery_lowers_the_loss_and_keeps_the_structure(
    family: str,
    students: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if family == "chronos-bolt":
        request.getfixturevalue("drawn_figures")
    student, teacher = pair(students, checkpoints, family)
    before = {name: p.shape for name, p in student.model.named_parameters()}
    lines: list[RecoveryProgress] = []
    config = short(steps=24, evaluate_every=8, learning_rate=1e-3, truth_weight=0.0)
    recovered = tscompress.recover(
        student, teacher, config, directory=tmp_path / "work", report=lines.append
    )
    result = recovered.recovery
    assert result is not None
    assert result.finished
    assert result.after < 0.97 * result.before
    assert result.best_step > 0
    assert result.note is None
    assert {name: p.shape for name, p in recovered.model.named_parameters()} == before
    assert all(p.requires_grad for p in teacher.model.parameters())
    assert {p.dtype for p in teacher.model.parameters()} == {torch.float32}  # as it came
    assert "forward" not in vars(recovered.model)

    logged = (tmp_path / "work" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in logged] == [dataclasses.asdict(line) for line in lines]
    assert [line.step for line in lines if line.held_out is not None] == [0, 8, 16, 24]
    saved = save(recovered, tmp_path / "saved")
    # Written with the checkpoint, so that a kill leaves both or neither.
    assert (saved / "recovery.png").stat().st_size > (5000 if family == "chronos-bolt" else 0)
    assert len((saved / "recovery.jsonl").read_text().splitlines()) == len(lines)
    assert not list(saved.glob(".*"))
    finish_recovery(recovered, tmp_path / "work")
    assert not (tmp_path / "work").exists()
    provenance = json.loads((saved / "provenance.json").read_text())
    assert provenance["recovery"]["best_step"] == result.best_step
    assert Plan.load(saved / "plan.json") == Plan.load(students[family] / "plan.json")
    if family != "factored":
        pipeline = BaseChronosPipeline.from_pretrained(saved)
        assert type(pipeline) is type(teacher.forecaster)


def test_a_fresh_start_leaves_no_older_checkpoint(bolt: Callable[[], Any], tmp_path: Path) -> None:
    """After one that diverged, say: nobody shall go on from that."""
    student, teacher = bolt()
    recover_(student, teacher, short(steps=1), directory=tmp_path)

    def die(line: RecoveryProgress) -> None:
        raise SystemExit

    student, _ = bolt()
    with pytest.raises(SystemExit):
        recover_(student, teacher, short(learning_rate=1e-4), directory=tmp_path, report=die)
    student, _ = bolt()
    with pytest.raises(RecipeError, match="no checkpoint"):
        recover_(student, teacher, short(), directory=tmp_path, resume=True)


@pytest.mark.parametrize("half", [b"half", b"\x00" * 4096], ids=["short", "zeros"])
def test_half_written_states_of_a_killed_run_make_way(
    bolt: Callable[[], Any], tmp_path: Path, half: bytes
) -> None:
    student, teacher = bolt()
    recover_(student, teacher, short(steps=1), directory=tmp_path)
    unfinished = tmp_path / "checkpoint" / "state.safetensors.tmp"
    unfinished.write_bytes(half)
    check_recovery_directory(tmp_path, [])
    student, _ = bolt()
    recover_(student, teacher, short(steps=1), directory=tmp_path)
    assert not unfinished.exists()


@pytest.mark.parametrize("log", ["step,loss\n1,0.5\n", None], ids=["foreign", "none"])
@pytest.mark.parametrize("name", ["state.safetensors", "state.safetensors.tmp"])
def test_a_state_beside_no_log_of_ours_stays(
    bolt: Callable[[], Any], tmp_path: Path, name: str, log: str | None
) -> None:
    state = tmp_path / "checkpoint" / name
    state.parent.mkdir()
    state.write_bytes(b"mine")
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    student, teacher = bolt()
    with pytest.raises(OutputExistsError, match=tmp_path.name):
        check_recovery_directory(tmp_path, [])
    with pytest.raises(OutputExistsError, match=name):
        recover_(student, teacher, short(steps=1), directory=tmp_path)
    assert state.read_bytes() == b"mine"


def test_a_kill_while_older_files_are_removed_hinders_no_start(
    bolt: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = bolt()
    recover_(student, teacher, short(steps=1), directory=tmp_path)
    state = tmp_path / "checkpoint" / "state.safetensors"
    state.with_name("state.safetensors.tmp").write_bytes(b"half")
    unlink = Path.unlink

    def once(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        raise KeyboardInterrupt

    student, _ = bolt()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", once)
        with pytest.raises(KeyboardInterrupt):
            recover_(student, teacher, short(steps=1), directory=tmp_path)
    check_recovery_directory(tmp_path, [])
    recover_(student, teacher, short(steps=1), directory=tmp_path)


def test_invalid_config_and_series_are_refused(bolt: Callable[[], Any]) -> None:
    student, teacher = bolt()
    config: Any = {"steps": 3}
    with pytest.raises(UsageError, match=r"a dict; give a RecoveryConfig"):
        recover_(student, teacher, config)
    with pytest.raises(DataError, match="give a list of series"):
        recover_(student, teacher, short(), series=np.arange(50.0))
    with pytest.raises(UsageError, match="synthetic_share is 0"):
        recover_(student, teacher, short(synthetic_share=0.0, real_series=()))


def test_a_run_does_not_keep_the_device_of_the_one_before(bolt: Callable[[], Any]) -> None:
    recover_(*bolt(), short(steps=1))
    state = PartialState()
    state.device = torch.device("meta")  # as if that had been elsewhere
    student, teacher = bolt()
    recover_(student, teacher, short(steps=1))
    for loaded in (student, teacher):
        assert {p.device.type for p in loaded.model.parameters()} == {"cpu"}


@pytest.mark.parametrize("change", [{"accumulate": 3}, {"synthetic_share": 0.0, "real_series": ()}])
def test_refused_recovery_leaves_models_unchanged(
    change: dict[str, Any], students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    small = load(students["chronos-bolt"])
    cast_parameters_(small.model, torch.bfloat16)
    student = replace(small, stored_dtype=torch.bfloat16)
    teacher = load(checkpoints["chronos-bolt"], dtype="bfloat16")
    with pytest.raises(UsageError):
        tscompress.recover(student, teacher, short(**change))
    for loaded in (student, teacher):
        assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_refused_series_leave_factors_as_they_are(checkpoints: dict[str, Path]) -> None:
    small = tscompress.compress(checkpoints["chronos-bolt"], method="svd", rank=3)
    before = {name: weight.clone() for name, weight in small.model.state_dict().items()}
    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"], max_series=2)
    with pytest.raises(LeakError):
        tscompress.recover(small, checkpoints["chronos-bolt"], short(), series=dataset.contexts)
    after = small.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_recovered_checkpoint_records_its_source(
    students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A student of the Hub comes without a recipe, but with a revision."""
    directory = shutil.copytree(students["chronos-bolt"], tmp_path / "hub")
    (directory / "recipe.yaml").unlink()
    student = replace(load(directory), revision="a" * 40)
    recovered = tscompress.recover(student, checkpoints["chronos-bolt"], short(steps=1))
    saved = save(recovered, tmp_path / "saved")
    before, after = (json.loads((d / "provenance.json").read_text()) for d in (directory, saved))
    assert after["source"]["revision"] == "a" * 40
    assert after["calibration"] == before["calibration"] != {}


def test_a_student_without_a_plan_is_refused(checkpoints: dict[str, Path]) -> None:
    model = checkpoints["chronos-bolt"]
    with pytest.raises(PlanError, match=r"plan\.json"):
        tscompress.recover(model, model, short())


@pytest.mark.parametrize(
    "change", [{"optimizer": "adamw"}, {"precision": "bf16"}, {"learning_rate": None}]
)
def test_stopped_and_resumed_is_bit_equal(
    change: dict[str, Any], bolt: Callable[[], Any], tmp_path: Path
) -> None:
    config = short(**change)
    whole, teacher = bolt()
    uninterrupted = recover_(whole, teacher, config)

    def stop(line: RecoveryProgress) -> None:
        if line.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what Ctrl-C sends

    handler = signal.getsignal(signal.SIGINT)
    student, _ = bolt()
    result = recover_(student, teacher, config, directory=tmp_path, report=stop)
    assert not result.finished
    assert result.record()["finished"] is False
    assert result.steps < 6
    assert signal.getsignal(signal.SIGINT) is handler
    resumed, _ = bolt()
    result = recover_(resumed, teacher, config, directory=tmp_path, resume=True)
    assert result.finished
    assert "finished" not in result.record()
    assert_equal(weights(whole), weights(resumed))
    told = {line.step: line.loss for line in result.history}
    assert told == {line.step: line.loss for line in uninterrupted.history}
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


#: Imports once, then runs each of its jobs in a process of its own, all at the same time.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tscompress.checkpoints.load import load
from tscompress.training import checkpoint
from tscompress.training.recovery import recover_
from tscompress.training.recovery_config import RecoveryConfig


def work(student, teacher, config, directory, kill_at, environment):
    os.environ.update(environment)

    def report(line):
        if line.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_half(tensors, path, metadata):
        save_tensors(tensors, path, metadata)
        if metadata["step"] == str(-kill_at):
            os.truncate(path, 100)  # as far as it was written, in the middle of the header
            os.kill(os.getpid(), signal.SIGKILL)

    save_tensors, checkpoint.save_tensors = checkpoint.save_tensors, save_half
    smaller = load(student)
    config = RecoveryConfig.model_validate(config)
    recover_(smaller, load(teacher), config, directory=Path(directory), report=report)
    if environment.get("RANK", "0") == "0":
        tensors = {name: p.detach() for name, p in smaller.model.named_parameters()}
        save_file(tensors, Path(directory) / "weights.safetensors")
    if environment:
        torch.distributed.destroy_process_group()


children = []
for job in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        code = 1
        try:
            work(**job)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@dataclasses.dataclass(frozen=True)
class Processes:
    """What runs in other processes left behind; ``shared`` has a directory for each family."""

    killed: Path
    killed_config: RecoveryConfig
    saving: Path
    shared: Path


def free_ports() -> Iterator[str]:
    """Below those that the system gives to whoever asks for any."""
    for port in range(20000 + 3 * (os.getpid() % 4000), 32768):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            yield str(port)


@pytest.fixture(scope="module")
def processes(
    students: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Processes:
    """Runs that were killed with SIGKILL after the fifth step or while they saved the fourth, and
    two in two processes each."""
    root = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"target": rng.normal(size=60).cumsum().tolist()}) for _ in range(40)]
    (root / "series.jsonl").write_text("\n".join(lines))
    # A stream that does not fit the buffer must be read past what was drawn.
    config = short(
        checkpoint_steps=2,
        evaluate_every=5,
        series=(str(root / "series.jsonl"),),
        shuffle_series=16,
    )
    ports = dict(zip(("chronos-bolt", "chronos-2"), free_ports(), strict=False))

    def models(family: str) -> dict[str, str]:
        return {"student": str(students[family]), "teacher": str(checkpoints[family])}

    jobs: list[dict[str, Any]] = [
        {"config": config.model_dump(), "directory": name, "kill_at": step, "environment": {}}
        | models("chronos-bolt")
        for name, step in (("killed", 5), ("saving", -4))
    ]
    for (family, port), rank in itertools.product(ports.items(), ("0", "1")):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
        }
        shared = half_alone() if family == "chronos-2" else smooth(accumulate=2)
        jobs.append({
            "config": shared.model_dump(),
            "directory": f"shared/{family}",
            "kill_at": 99,
            "environment": environment,
            **models(family),
        })  # fmt: skip
    jobs = [{**job, "directory": str(root / job["directory"])} for job in jobs]
    _, out, err = Program((json.dumps(jobs),), root, SCRIPT).run()
    assert json.loads(out) == [-signal.SIGKILL] * 2 + [0] * 4, err
    return Processes(root / "killed", config, root / "saving", root / "shared")


def test_killed_run_resumes_from_its_last_checkpoint(
    processes: Processes, bolt: Callable[[], Any]
) -> None:
    resumed, teacher = bolt()
    seen: list[RecoveryProgress] = []
    recover_(
        resumed,
        teacher,
        processes.killed_config,
        directory=processes.killed,
        resume=True,
        report=seen.append,
    )
    assert [line.step for line in seen] == [5, 6]
    whole, _ = bolt()
    recover_(whole, teacher, processes.killed_config)
    assert_equal(weights(whole), weights(resumed))


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_killed_while_it_saved_goes_on_or_makes_way(
    processes: Processes, bolt: Callable[[], Any], tmp_path: Path, resume: bool
) -> None:
    left = tmp_path / "left"
    shutil.copytree(processes.saving, left)
    assert (left / "checkpoint" / "state.safetensors.tmp").stat().st_size == 100
    check_recovery_directory(left, [])
    student, teacher = bolt()
    seen: list[RecoveryProgress] = []
    config = processes.killed_config
    recover_(student, teacher, config, directory=left, resume=resume, report=seen.append)
    assert [line.step for line in seen] == ([5, 6] if resume else [0, 5, 6])
    assert [path.name for path in (left / "checkpoint").iterdir()] == ["state.safetensors"]


def test_two_processes_have_the_losses_of_one(
    processes: Processes, bolt: Callable[[], Any]
) -> None:
    directory = processes.shared / "chronos-bolt"
    log = (directory / "log.jsonl").read_text().splitlines()
    shared = [json.loads(line) for line in log]
    alone, teacher = bolt()
    history = recover_(alone, teacher, smooth()).history
    assert [line["step"] for line in shared] == [line.step for line in history] == [0, 3, 6]
    for line, expected in zip(shared, history, strict=True):
        assert line["held_out"] == pytest.approx(expected.held_out, rel=1e-4)
        if expected.loss is not None:
            assert line["loss"] == pytest.approx(expected.loss, rel=1e-4)
    for name, tensor in load_file(directory / "weights.safetensors").items():
        torch.testing.assert_close(tensor, weights(alone)[name], rtol=1e-3, atol=1e-4)


def half_alone() -> RecoveryConfig:
    """Of a Chronos-2, whose second process has series that are alone, and so no group attention."""
    buckets = (Bucket(context_length=32, horizon=16, batch_size=16),)
    return smooth(buckets=buckets, real_series=("prison",))


def test_two_processes_share_groups_and_series_alone(
    processes: Processes, students: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    log = (processes.shared / "chronos-2" / "log.jsonl").read_text().splitlines()
    student, teacher = pair(students, checkpoints, "chronos-2")
    history = recover_(student, teacher, half_alone()).history
    for line, expected in zip(map(json.loads, log), history, strict=True):
        assert line["held_out"] == pytest.approx(expected.held_out, rel=1e-4)
        assert line["loss"] == (expected.loss and pytest.approx(expected.loss, rel=1e-4))
    for name, tensor in load_file(processes.shared / "chronos-2" / "weights.safetensors").items():
        torch.testing.assert_close(tensor, weights(student)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_a_teacher_speaks_once_of_held_out_series(
    family: str,
    students: dict[str, Path],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0
    kind = TokenDistillation if family == "chronos-t5" else QuantileDistillation
    teacher_output = kind.teacher_output

    def counting(self: Distillation, batch: ForecastBatch) -> Any:
        nonlocal asked
        asked += 1
        return teacher_output(self, batch)

    monkeypatch.setattr(kind, "teacher_output", counting)
    other = Bucket(context_length=24, horizon=8, batch_size=8)
    config = short(buckets=(*BUCKETS, other), held_out_series=24)
    student, teacher = pair(students, checkpoints, family)
    recover_(student, teacher, config)
    assert asked == 6 + 3  # a step each, and each of three held-out batches once


@pytest.fixture(scope="module")
def trained_plainly() -> dict[str, dict[str, Tensor]]:
    """Weights by family of the run that others are compared with, once it was made."""
    return {}


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
@pytest.mark.parametrize("change", [{"accumulate": 2}, {"gradient_checkpointing": True}])
def test_less_memory_keeps_results(
    family: str,
    change: dict[str, Any],
    students: dict[str, Path],
    checkpoints: dict[str, Path],
    trained_plainly: dict[str, dict[str, Tensor]],
) -> None:
    def trained(**more: Any) -> dict[str, Tensor]:
        student, teacher = pair(students, checkpoints, family)
        recover_(student, teacher, short(steps=2, learning_rate=1e-3, **more))
        assert not any("forward" in vars(module) for module in student.model.modules())
        return weights(student)

    if family not in trained_plainly:
        trained_plainly[family] = trained()
    found = trained(**change)
    for name, expected in trained_plainly[family].items():
        torch.testing.assert_close(expected, found[name], rtol=1e-3, atol=1e-4)


def test_the_best_weights_are_kept_and_patience_ends(bolt: Callable[[], Any]) -> None:
    student, teacher = bolt()
    before = weights(student)
    # So small a step changes nothing but the last digits, and so large a one ruins.
    config = short(steps=40, evaluate_every=2, patience=3, learning_rate=0.02, max_grad_norm=1e9)
    result = recover_(student, teacher, config)
    assert result.finished
    assert result.steps < 40
    assert result.after <= result.before
    if result.best_step == 0:
        assert_equal(before, weights(student))
    waited = result.steps - result.best_step
    assert waited == 6


@pytest.mark.parametrize("when", ["training", "held out"])
def test_divergence_is_one_line_and_leaves_the_best_weights(
    when: str, bolt: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = bolt()
    before = weights(student)
    original = Distillation.__call__
    calls = 0

    def diverging(self: Distillation, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        losses = original(self, *arguments)
        if when == "training" and torch.is_grad_enabled():
            return dataclasses.replace(losses, teacher=losses.teacher * math.nan)
        factor = 1 if calls < 3 else 10.0
        return dataclasses.replace(losses, truth=losses.truth * factor)

    monkeypatch.setattr(Distillation, "__call__", diverging)
    # A default rate is lowered to what the student's distance allows; that one was used.
    monkeypatch.setattr("tscompress.training.recovery.rate_by_distance", lambda *_: 1e-9)
    what = "not finite at step 1" if when == "training" else "at step 3 the forecast loss on held"
    with pytest.raises(DivergenceError, match=rf"{what}.*lower learning_rate \(0.003\)"):
        recover_(student, teacher, short())
    assert_equal(before, weights(student))
    calls = 0
    with pytest.raises(DivergenceError) as refused:
        recover_(student, teacher, short(learning_rate=None))
    rate = re.search(r"lower learning_rate \(([^)]*)\)", str(refused.value))
    assert rate is not None
    assert 0 < float(rate[1]) < 1e-6
    assert not any(p.grad is not None for p in student.model.parameters())


def test_minutes_end_a_run(bolt: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, which is 20 ms later whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 50))
    student, teacher = bolt()
    result = recover_(student, teacher, short(steps=None, minutes=0.02))
    assert result.finished
    assert 1.2 <= result.seconds < 1.3
    rates = [line.learning_rate for line in result.history if line.learning_rate is not None]
    assert rates[-1] < rates[0]


@pytest.fixture(scope="module")
def own_series(tmp_path_factory: pytest.TempPathFactory) -> tuple[str]:
    """A file of series."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("own") / "series.jsonl"
    lines = [{"target": rng.normal(size=80).cumsum().tolist()} for _ in range(40)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return (str(file),)


@pytest.fixture(scope="module")
def two_steps(
    students: dict[str, Path], checkpoints: dict[str, Path]
) -> Callable[[str, dict[str, Any]], float | None]:
    """What is held out after two steps, by family and what is asked for; each run once."""
    known: dict[str, float | None] = {}

    def run(family: str, change: dict[str, Any]) -> float | None:
        key = f"{family} {change}"
        if key not in known:
            base = {"steps": 2, "truth_weight": 0.5, "evaluate_every": 2}
            student, teacher = pair(students, checkpoints, family)
            seen: list[RecoveryProgress] = []
            result = recover_(student, teacher, short(**base | change), report=seen.append)
            assert result.steps == 2
            known[key] = seen[-1].held_out
        return known[key]

    return run


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("chronos-bolt", {"learning_rate": 1e-3}),
        ("chronos-bolt", {"warmup_steps": 6}),
        ("chronos-bolt", {"weight_decay": 0.5}),
        ("chronos-bolt", {"max_grad_norm": 1e-3}),
        ("chronos-bolt", {"teacher_weight": 0.1}),
        ("chronos-bolt", {"truth_weight": 3.0}),
        ("chronos-bolt", {"precision": "bf16"}),
        ("chronos-bolt", {"optimizer": "adamw"}),
        ("chronos-t5", {"truth_weight": 3.0}),
        ("chronos-bolt", {"seed": 1}),
    ],
)  # fmt: skip
def test_each_option_changes_the_run(
    family: str, change: dict[str, Any], two_steps: Callable[[str, dict[str, Any]], float | None]
) -> None:
    assert two_steps(family, change) != two_steps(family, {})


def test_own_series_change_the_run(
    own_series: tuple[str], two_steps: Callable[[str, dict[str, Any]], float | None]
) -> None:
    assert two_steps("chronos-bolt", {"series": own_series}) != two_steps("chronos-bolt", {})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("chronos-bolt", {"corpus": {"kernel_weight": 0}}),
        ("chronos-bolt", {"real_series": ("aus_production",)}),
        ("chronos-bolt", {"real_series": ()}),
        ("chronos-t5", {"real_series": ()}),
        ("chronos-bolt", {"missing_probability": 1.0}),
        ("chronos-bolt", {"synthetic_share": 1.0}),
    ],
)
def test_each_option_of_the_batches_changes_them(
    family: str, change: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    assert_other_batches(family, load(checkpoints[family]), {}, change)


@pytest.mark.parametrize("change", [{"synthetic_share": 0.0}, {"shuffle_series": 16}])
def test_each_option_of_given_series_changes_batches(
    change: dict[str, Any], checkpoints: dict[str, Path], own_series: tuple[str]
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    assert_other_batches("chronos-bolt", loaded, {"series": own_series}, change)


def assert_other_batches(
    family: str, loaded: LoadedModel, base: dict[str, Any], change: dict[str, Any]
) -> None:
    plain, other = (
        Batches(family, short(**options).resolved(loaded)).at(1)
        for options in (base, base | change)
    )
    assert not torch.equal(plain.context.nan_to_num(), other.context.nan_to_num())


def test_frozen_embeddings_stay(bolt: Callable[[], Any], tmp_path: Path) -> None:
    student, teacher = bolt()
    start = weights(student)
    config = short(steps=2, evaluate_every=2, freeze_embeddings=True)
    recover_(student, teacher, config, directory=tmp_path)
    state = load_file(tmp_path / "checkpoint" / "state.safetensors")
    frozen = {name for name in start if torch.equal(start[name], state[f"model.{name}"])}
    embeddings = {name for name in start if name.startswith(("shared", "input_patch"))}
    assert embeddings <= frozen < set(start)
    assert all(p.requires_grad for p in student.model.parameters())


def test_unknown_keys_and_bad_values(tmp_path: Path) -> None:
    for wrong in ({"step": 3}, {"steps": 0}, {"synthetic_share": 2}, {"seed": "x"}):
        with pytest.raises(ValidationError):
            short(**wrong)
    with pytest.raises(ValidationError, match="nothing to learn"):
        short(teacher_weight=0, truth_weight=0)
    path = tmp_path / "config.yaml"
    path.write_text("steps: 3\nrate: 1\n")
    with pytest.raises(RecipeError, match="unknown key 'rate'"):
        load_recovery_config(path)
    path.write_text("steps: 3\n")
    assert load_recovery_config(path) == RecoveryConfig(steps=3)


REMOVED: dict[str, tuple[Any, Any]] = {
    "hidden_weight": (0.0, 1.0),
    "hidden_at": ("layers", "both"),
    "hidden_share": (1.0, 0.3),
    "hidden_first": (False, True),
    "distance": ("absolute", "squared"),
    "temperature": (1.0, 2.0),
    "sampled_share": (None, 0.5),
}


@pytest.mark.parametrize("name", REMOVED)
def test_removed_options_load_with_their_default_alone(name: str, tmp_path: Path) -> None:
    default, other = REMOVED[name]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"steps": 3, name: default}))
    assert load_recovery_config(path) == RecoveryConfig(steps=3)
    path.write_text(yaml.safe_dump({"steps": 3, name: other}))
    message = f"{name} was removed.*commit 27dc031"
    with pytest.raises(RecipeError, match=message) as refused:
        load_recovery_config(path)
    assert "\n" not in str(refused.value)


def make_older(work: Path, **options: Any) -> None:
    """Give a run in ``work`` the record and log that one had which could match layers."""
    state = work / CHECKPOINT / STATE_FILE
    with safe_open(state, "pt") as file:
        record = file.metadata()
    config = {name: default for name, (default, _) in REMOVED.items()} | {"sampled_share": 0.0}
    record["config"] = json.dumps({**json.loads(record["config"]), **config, **options})
    teacher, truth, loss, counted = json.loads(record["pending"])
    record["pending"] = json.dumps([teacher, truth, 0.0, loss, counted])
    save_file(load_file(state), state, record)
    lines = map(json.loads, (work / LOG_FILE).read_text().splitlines())
    (work / LOG_FILE).write_text("".join(json.dumps({**x, "hidden": 0.0}) + "\n" for x in lines))


def test_earlier_runs_resume_without_removed_options(
    bolt: Callable[[], Any], tmp_path: Path
) -> None:
    whole, teacher = bolt()
    expected = recover_(whole, teacher, short())

    def stop(line: RecoveryProgress) -> None:
        if line.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    student, teacher = bolt()
    assert not recover_(student, teacher, short(), directory=tmp_path, report=stop).finished
    make_older(tmp_path)
    student, teacher = bolt()
    assert can_resume(student, teacher, short(), tmp_path)
    result = recover_(student, teacher, short(), directory=tmp_path, resume=True)
    assert result.finished
    assert_equal(weights(whole), weights(student))
    assert [line.loss for line in result.history] == [line.loss for line in expected.history]
    make_older(tmp_path, distance="squared")
    student, teacher = bolt()
    assert differences_from(tmp_path, short(), teacher, student) == "distance squared, not absolute"
    with pytest.raises(RecipeError, match="distance squared"):
        recover_(student, teacher, short(), directory=tmp_path, resume=True)


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5", "chronos-2"])
def test_a_run_of_other_batches_is_not_resumed(
    students: dict[str, Path], checkpoints: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """Those of before the first change of a family's recovery record no scheme."""
    student, teacher = pair(students, checkpoints, family)
    recover_(student, teacher, short(steps=1), directory=tmp_path)
    state = tmp_path / CHECKPOINT / STATE_FILE
    with safe_open(state, "pt") as file:
        record = file.metadata()
    scheme = record.pop("scheme")
    assert int(scheme) == adapter_of(family).defaults.recovery_scheme
    save_file(load_file(state), state, record)
    student, teacher = pair(students, checkpoints, family)
    assert not can_resume(student, teacher, short(steps=1), tmp_path)
    with pytest.raises(RecipeError) as refused:
        recover_(student, teacher, short(steps=1), directory=tmp_path, resume=True)
    assert f"recovery_scheme 1, not {scheme}" in str(refused.value)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_run_on_other_series_is_not_resumed(
    bolt: Callable[[], Any], tmp_path: Path, as_file: bool
) -> None:
    file, run = tmp_path / "own.csv", tmp_path / "run"
    config = short(steps=1, series=(str(file),) if as_file else ())

    def given(level: float) -> list[Any] | None:
        values = level + np.random.default_rng(0).normal(size=(12, 80))
        file.write_text("y\n" + "".join(f"{value}\n" for value in values[0]))
        return None if as_file else [*values]

    first = given(0.0)
    recover_(*bolt(), config, series=first, directory=run)
    assert can_resume(*bolt(), config, run, first)
    recover_(*bolt(), config, series=first, directory=run, resume=True)
    other = given(1.0)
    assert not can_resume(*bolt(), config, run, other)
    with pytest.raises(RecipeError, match="is of a run with other series; resume with the same"):
        recover_(*bolt(), config, series=other, directory=run, resume=True)


def test_a_run_on_series_that_are_scored_by_now_does_not_resume(
    bolt: Callable[[], Any], tmp_path: Path
) -> None:
    config = short(steps=1, real_series=("aus_production",))
    recover_(*bolt(), config, directory=tmp_path)
    assert can_resume(*bolt(), config, tmp_path, None)
    beer, *_ = training_series(["aus_production"])
    with guarded([fingerprints([beer])]):
        assert not can_resume(*bolt(), config, tmp_path, None)
        with pytest.raises(RecipeError, match="is of a run with other series of a wheel"):
            recover_(*bolt(), config, directory=tmp_path, resume=True)


def test_series_of_a_generator_are_trained_on_beside_a_directory(
    bolt: Callable[[], Any], tmp_path: Path
) -> None:
    values = np.random.default_rng(0).normal(size=(12, 80))
    trained = []
    for directory in (None, tmp_path):
        student, teacher = bolt()
        recover_(student, teacher, short(steps=1), series=iter(values), directory=directory)
        trained.append(weights(student))
    assert_equal(*trained)
    with pytest.raises(DataError, match="series 0 is no list of numbers"):
        recover_(*bolt(), short(steps=1), series=["abc"], directory=tmp_path / "other")


def test_a_run_knows_the_files_of_a_directory(bolt: Callable[[], Any], tmp_path: Path) -> None:
    folder, run = tmp_path / "series", tmp_path / "run"
    folder.mkdir()
    values = pd.DataFrame({"y": np.random.default_rng(0).normal(size=80)})
    values.to_csv(folder / "one.csv", index=False)
    recover_(*bolt(), short(steps=1), series=folder, directory=run)
    assert can_resume(*bolt(), short(steps=1), run, f"{folder}/")
    shutil.copy(folder / "one.csv", folder / "two.csv")
    assert not can_resume(*bolt(), short(steps=1), run, folder)


def test_series_of_a_file_are_their_values(bolt: Callable[[], Any], tmp_path: Path) -> None:
    file, run = tmp_path / "own.csv", tmp_path / "run"
    pd.DataFrame({"y": np.random.default_rng(0).normal(size=80)}).to_csv(file, index=False)
    read = read_series(file)
    recover_(*bolt(), short(steps=1), series=read, directory=run)
    assert can_resume(*bolt(), short(steps=1), run, read_series(file))
    other = read_series(file, GivenSeries(hold_out=8))
    assert not can_resume(*bolt(), short(steps=1), run, other)
    read[0] = read[0] + 1
    assert not can_resume(*bolt(), short(steps=1), run, read)


def test_series_without_end_are_not_listed(bolt: Callable[[], Any], tmp_path: Path) -> None:
    class Simulator:
        def __iter__(self) -> Iterator[Any]:
            rng = np.random.default_rng(0)
            while True:
                yield rng.normal(size=80)

    simulator: Any = Simulator()
    recover_(*bolt(), short(steps=1), series=simulator, directory=tmp_path)
    assert can_resume(*bolt(), short(steps=1), tmp_path, simulator)
    assert not can_resume(*bolt(), short(steps=1), tmp_path)


def test_a_file_with_a_bad_name_is_named(bolt: Callable[[], Any], tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        with pytest.raises(DataError, match="File name too long"):
            recover_(*bolt(), short(steps=1), series="x" * 300 + ".csv", directory=directory)


def test_a_model_is_not_its_own_teacher(bolt: Callable[[], Any]) -> None:
    student, _ = bolt()
    with pytest.raises(UsageError, match="student and teacher are one model"):
        recover_(student, student, short(steps=1))


def test_a_recovery_without_any_loss_is_refused(bolt: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="nothing to learn: truth_weight of chronos-bolt is 0"):
        recover_(*bolt(), short(steps=1, teacher_weight=0))


def test_unfit_checkpoints_are_refused_on_resume(bolt: Callable[[], Any], tmp_path: Path) -> None:
    student, teacher = bolt()
    with pytest.raises(RecipeError, match=r"no checkpoint at .* to resume from"):
        recover_(student, teacher, short(), directory=tmp_path, resume=True)
    recover_(student, teacher, short(steps=1), directory=tmp_path)
    with pytest.raises(RecipeError, match="is of a run with steps 1, not 6"):
        recover_(student, teacher, short(), directory=tmp_path, resume=True)
    other, _ = bolt()
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    for models, role in (((other, teacher), "student"), ((bolt()[0], other), "teacher")):
        assert not can_resume(*models, short(steps=1), tmp_path)
        with pytest.raises(RecipeError, match=f"is of a run with another {role}"):
            recover_(*models, short(steps=1), directory=tmp_path, resume=True)
    assert can_resume(*bolt(), short(steps=1), tmp_path)
    assert not can_resume(*bolt(), short(), tmp_path)
    assert not can_resume(*bolt(), short(steps=1), tmp_path / "elsewhere")
    state = tmp_path / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        recover_(student, teacher, short(steps=1), directory=tmp_path, resume=True)


def test_indivisible_batch_is_refused(bolt: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="batch of 8 series"):
        recover_(*bolt(), short(accumulate=3))


def test_evaluation_series_are_refused(bolt: Callable[[], Any]) -> None:
    (dataset,) = load_suite("offline", datasets=["monash_m3_monthly"], max_series=2)
    student, teacher = bolt()
    with pytest.raises(LeakError, match="belongs to the evaluation suite"):
        recover_(student, teacher, short(), series=dataset.contexts)


def test_held_out_series_are_not_trained_on() -> None:
    series = [np.full(60, k, np.float32) + np.sin(np.arange(60)).astype(np.float32)
              for k in range(0, 2000, 100)]  # fmt: skip
    config = short(synthetic_share=0.0, missing_probability=0.0)
    batches = Batches("chronos-bolt", config, series)

    def levels(batch: ForecastBatch) -> set[int]:
        return set((batch.context.nanmean(1) / 100).round().int().tolist())

    held_out = set.union(*(levels(batch) for batch in batches.held_out()))
    trained = set.union(*(levels(batches.at(step)) for step in range(20)))
    assert held_out == {9, 19}
    assert not held_out & trained


def test_real_series_of_wheels_are_held_out_whole() -> None:
    config = short(
        buckets=(Bucket(context_length=24, horizon=4, batch_size=64),),
        corpus={"kernel_weight": 0, "structural_weight": 0, "stochastic_weight": 0,
                "count_weight": 0, "real_weight": 1, "mixup_probability": 0,
                "shift_probability": 0, "outlier_probability": 0},
        real_series=("aus_production", "prison"),
        missing_probability=0.0,
        held_out_series=64,
    )  # fmt: skip
    batches = Batches("chronos-t5", config)

    def known(batch: ForecastBatch) -> set[float]:
        return set(batch.target[torch.isfinite(batch.target)].tolist())

    held_out = set.union(*(known(batch) for batch in batches.held_out()))
    trained = set.union(*(known(batches.at(step)) for step in range(20)))
    real = training_series(config.real_series or ())
    assert len(held_out) > 10
    assert len(trained) > 100
    assert held_out <= {float(x) for series in real[::16] for x in series}
    assert trained <= {float(x) for i, series in enumerate(real) if i % 16 for x in series}


def test_windows_have_as_much_history_as_future() -> None:
    nan = np.nan
    windows = np.array(
        [
            [1, 2, 3, 4, 5, 6, 7, 8],  # long enough
            [nan, nan, nan, nan, 5, 6, 7, 8],  # as short as the horizon
            [nan, nan, nan, 4, nan, 6, 7, 8],  # a gap counts as history
            [nan, nan, nan, nan, nan, nan, nan, 8],
            [nan, nan, nan, nan, nan, nan, nan, nan],
        ],
        dtype=np.float32,
    )
    expected = [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [nan, nan, 5, 6, 7, 8, nan, nan],
        [nan, 4, nan, 6, 7, 8, nan, nan],
        [nan, nan, nan, 8, nan, nan, nan, nan],
        [nan] * 8,
    ]
    np.testing.assert_array_equal(with_history(windows, 4), expected)
    # No more history than there is room for: whole windows stay.
    short_context = np.arange(6, dtype=np.float32)[None, :]
    np.testing.assert_array_equal(with_history(short_context, 4), short_context)
    late = np.array([[nan, nan, nan, 4, 5, 6]], dtype=np.float32)
    np.testing.assert_array_equal(with_history(late, 4), [[4, 5, 6, nan, nan, nan]])


@pytest.mark.parametrize("family", FAMILIES)
def test_short_series_give_observed_targets(family: str) -> None:
    series = [50 + np.arange(20 + k, dtype=np.float32) for k in range(20)]
    bucket = Bucket(context_length=64, horizon=48, batch_size=16)
    config = short(buckets=(bucket,), synthetic_share=0.0, missing_probability=0.0)
    batches = Batches(family, config, series)
    for batch in (*map(batches.at, range(4)), *batches.held_out()):
        for values in (batch.context, ahead(batch)):
            assert (torch.isfinite(values).sum(1) >= 6).all()
        if batch.group_ids is None:  # what comes after the origin follows from what came before
            step = batch.target[:, 0] - batch.context[:, -1]
            torch.testing.assert_close(step, torch.ones_like(step))


def ahead(batch: ForecastBatch) -> Tensor:
    """What comes after the contexts, whether it is to be forecast or known."""
    if batch.future is None:
        return batch.target
    return batch.target.where(torch.isfinite(batch.target), batch.future)


def group_batch(series: list[Any]) -> ForecastBatch:
    """A batch of Chronos-2 whose rows belong to groups of four."""
    bucket = Bucket(context_length=64, horizon=16, batch_size=16)
    config = short(buckets=(bucket,), synthetic_share=0.0, missing_probability=0.0)
    batch = Batches("chronos-2", config, series).at(1)
    assert batch.group_ids is not None
    return batch


def test_a_series_that_begins_late_makes_no_jump_in_its_group() -> None:
    # One of 26 steps at a level of its own, in any group.
    series = [(-1.0) ** k * 100 + np.sin(np.arange(26 + 90 * (k % 3), dtype=np.float32) + k)
              for k in range(16)]  # fmt: skip
    batch = group_batch(series)
    values = torch.cat([batch.context, ahead(batch)], 1)
    assert torch.isnan(values).any()
    steps = values.diff()
    assert float(steps[torch.isfinite(steps)].abs().max()) < 30  # of 100


def test_gaps_of_one_series_are_not_those_of_its_group() -> None:
    # Weekly values on days, each on another one.
    days = np.arange(300)
    series = [np.where(days % 7 == k % 7, 5 + np.sin(days / 30), np.nan) for k in range(14)]
    batch = group_batch(series)
    observed = torch.isfinite(ahead(batch)).sum(1)
    assert float(observed.float().mean()) > 1.2  # of 16 / 7
    assert int(torch.isfinite(batch.context).sum(1).median()) >= 3


def test_empty_corpus_is_refused_in_one_line() -> None:
    nothing = {name: 0 for name in CorpusConfig.model_fields if name.endswith("_weight")}
    config = short(corpus=nothing | {"real_weight": 1}, real_series=())
    with pytest.raises(UsageError, match="weight above 0"):
        Batches("chronos-t5", config)


def test_default_corpora_of_families(checkpoints: dict[str, Path]) -> None:
    found = {family: RecoveryConfig().resolved(load(checkpoints[family])) for family in FAMILIES}
    t5 = found.pop("chronos-t5")
    assert (t5.teacher_weight, t5.truth_weight) == (1, 1)
    assert t5.real_series == tuple(TRAINING_COLLECTIONS)
    assert (t5.optimizer, t5.learning_rate) == ("muon", 6e-4)
    corpus = Batches("chronos-t5", t5).corpus
    shares = dict(zip(corpus.families, corpus.probabilities, strict=True))
    assert {name: round(shares[name], 3) for name in ("real", "seasonal", "trend")} == {
        "real": 0.45,
        "seasonal": 0.225,
        "trend": 0.1,
    }
    assert {family: config.truth_weight for family, config in found.items()} == {
        "chronos-bolt": 0,
        "chronos-2": 1,
    }
    for family, trends in (("chronos-bolt", 0.4), ("chronos-2", 0)):
        config = found[family]
        assert config.teacher_weight == 1
        assert config.real_series == tuple(TRAINING_COLLECTIONS)
        assert config.corpus == HALF_PATTERNS.model_copy(update={"trend_weight": trends})
        assert (config.optimizer, config.learning_rate) == ("muon", 2e-3)
        drawn = Batches(family, config).corpus
        shares = dict(zip(drawn.families, drawn.probabilities, strict=True))
        assert round(shares.get("trend", 0), 3) == (0.182 if trends else 0)
    for family, rate in (("chronos-t5", 3e-4), ("chronos-bolt", 5e-4), ("chronos-2", 5e-4)):
        other = RecoveryConfig(optimizer="adamw").resolved(load(checkpoints[family]))
        assert other.learning_rate == rate


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-2"])
def test_real_series_of_wheels_stand_in_for_given_ones(
    family: str, checkpoints: dict[str, Path]
) -> None:
    loaded = load(checkpoints[family])
    alone = RecoveryConfig(real_series=("prison",), synthetic_share=0.5).resolved(loaded)
    real = {float(x) for one in training_series(["prison"]) for x in one if math.isfinite(x)}
    batch = Batches(family, alone, grouped=False).at(0)  # so nothing is mixed
    from_wheel = [
        bool(row.isfinite().any()) and set(row[row.isfinite()].tolist()) <= real
        for row in batch.target
    ]
    assert 0.35 < np.mean(from_wheel) < 0.65
    assert RecoveryConfig().resolved(loaded).synthetic_share == 0.7
    for given in ({"series_given": True}, {}):
        config = RecoveryConfig() if given else RecoveryConfig(series=("sales.csv",))
        resolved = config.resolved(loaded, **given)
        assert (resolved.real_series, resolved.synthetic_share) == ((), 0.5)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_muon_moves_the_matrices_of_layers(
    precision: str, dtype: torch.dtype, bolt: Callable[[], Any]
) -> None:
    student, _ = bolt()
    config = short(optimizer="muon", precision=precision, weight_decay=0.1).resolved(student)
    optimizer = recovery_optimizer(student.model, config)
    assert optimizer.param_groups[0]["dtype"] == dtype
    names = {p: name for name, p in student.model.named_parameters()}
    matrices, tables, others = (
        {names[p] for p in group["params"]} for group in optimizer.param_groups
    )
    assert matrices | tables | others == set(names.values())
    assert {name.rsplit(".", 2)[-2] for name in matrices} == {"q", "k", "v", "o", "wi", "wo"}
    assert {name.split(".")[0] for name in tables} == {
        "input_patch_embedding", "output_patch_embedding"
    }  # fmt: skip
    assert "shared.weight" in others
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_learning_rate_follows_the_parameter_share(checkpoints: dict[str, Path]) -> None:
    teacher, half = load(checkpoints["chronos-t5"]), load(checkpoints["chronos-t5"])
    config = RecoveryConfig()
    assert config.resolved(half, teacher).learning_rate == 6e-4
    count = sum(p.numel() for p in teacher.model.parameters())
    half.model.encoder = half.model.decoder = torch.nn.Identity()
    assert sum(p.numel() for p in half.model.parameters()) < 0.5 * count
    assert config.resolved(half, teacher).learning_rate == 1e-3
    adamw = RecoveryConfig(optimizer="adamw")
    assert adamw.resolved(half, teacher).learning_rate == 3e-4
    assert RecoveryConfig(learning_rate=2e-4).resolved(half, teacher).learning_rate == 2e-4


@pytest.mark.parametrize("family", ["chronos-bolt", "chronos-t5"])
def test_the_rate_is_bounded_by_the_distance(
    students: dict[str, Path], checkpoints: dict[str, Path], family: str
) -> None:
    student, teacher = pair(students, checkpoints, family)
    result = recover_(student, teacher, short(steps=1, learning_rate=None))
    distance = result.history[0].held_out_teacher
    assert distance is not None
    defaults = adapter_of(family).defaults
    assert defaults.learning_rate_by_distance is not None
    bound = defaults.learning_rate_by_distance * distance
    assert result.config.learning_rate == min(defaults.learning_rates["muon"], bound)
    assert bound < defaults.learning_rates["muon"]  # a fold of random weights loses little

    student, teacher = pair(students, checkpoints, family)
    asked = recover_(student, teacher, short(steps=1, learning_rate=1e-2))
    assert asked.config.learning_rate == 1e-2
    student, teacher = pair(students, checkpoints, family)
    adamw = recover_(student, teacher, short(steps=1, learning_rate=None, optimizer="adamw"))
    assert adamw.config.learning_rate == defaults.learning_rates["adamw"]


def test_recovery_without_gain_is_reported(bolt: Callable[[], Any]) -> None:
    student, teacher = bolt()
    result = recover_(student, teacher, short(steps=3, learning_rate=0.05))
    assert result.best_step == 0
    assert result.note is not None
    assert "5.0e-02" in result.note


@pytest.mark.parametrize("step", [0, 1])
def test_groups_of_chronos_2(step: int) -> None:
    config = short(buckets=(Bucket(context_length=32, horizon=16, batch_size=32),))
    batch = Batches("chronos-2", config).at(step)
    assert batch.group_ids is not None
    assert all(one.group_ids is not None for one in Batches("chronos-2", config).held_out())
    assert Batches("chronos-2", config, grouped=False).at(step).group_ids is None
    assert batch.future is not None
    assert batch.context.shape == (32, 32 - 8)  # a quarter is the past of causes
    blocks = torch.arange(32) // 4
    for group in batch.group_ids.unique():
        assert len(blocks[batch.group_ids == group].unique()) == 1
    told = torch.isfinite(batch.future).any(1)
    assert 0 < int(told.sum()) < 24
    assert not torch.isfinite(batch.target[told]).any()


@pytest.mark.parametrize(("family", "ahead"), [("chronos-2", {16, 32, 64}), ("chronos-bolt", {64})])
def test_horizons_of_recovery(family: str, ahead: set[int]) -> None:
    """A Chronos-2 is asked for one, two and four patches of 16 steps; each length as often."""
    buckets = adapter_of(family).defaults.batch_shapes
    shares = dict.fromkeys([bucket.context_length for bucket in buckets], 0.0)
    for bucket in buckets:
        shares[bucket.context_length] += bucket.weight
    assert shares == pytest.approx({64: 0.25, 128: 0.3, 256: 0.2, 512: 0.15, 2048: 0.1})
    drawn = {(bucket.context_length, bucket.horizon) for bucket in buckets}
    assert drawn == {(length, horizon) for length in shares for horizon in ahead}


def test_given_series_of_chronos_2_are_not_mixed_up() -> None:
    ramp = np.arange(1e6, 1e6 + 300, dtype=np.float32)
    bucket = Bucket(context_length=32, horizon=16, batch_size=30)
    config = short(buckets=(bucket,), synthetic_share=0.5, missing_probability=0.0)
    batches = Batches("chronos-2", config, [ramp, ramp + 1e5])
    for batch in [*map(batches.at, range(3)), *batches.held_out()]:
        assert batch.group_ids is not None
        ids = batch.group_ids
        given = batch.context.nan_to_num().amax(1) > 1e5
        assert int(given.sum()) == len(given) // 2
        assert given[len(given) // 2 :].all()  # so that groups do not lie across parts
        assert all(int((ids == one).sum()) == 1 for one in ids[given])
        assert any(int((ids == one).sum()) > 1 for one in ids[~given])
        rises = torch.cat([batch.context, batch.target], 1)[given].diff()
        assert (rises[torch.isfinite(rises)] == 1).all()
        assert batch.future is not None
        assert not torch.isfinite(batch.future[given]).any()


def test_known_covariates_reach_teacher_and_student(checkpoints: dict[str, Path]) -> None:
    teacher, student = (load(checkpoints["chronos-2"]) for _ in range(2))
    distillation = distillation_of(teacher, student)
    batch = group_batch([np.sin(np.arange(90) / (3 + k)) for k in range(16)])
    told = distillation.teacher_output(batch).forecast
    untold = distillation.teacher_output(replace(batch, future=None)).forecast
    assert not torch.allclose(told, untold)
    with torch.no_grad():
        losses = distillation(student.model, batch)
    assert float(losses.teacher.max()) == 0.0
    # What is known ahead is not judged: Chronos-2 was never trained on what it says there.
    with torch.no_grad():
        for parameter in student.model.parameters():
            parameter.mul_(1.1)
        losses = distillation(student.model, batch)
    assert batch.future is not None
    known = torch.isfinite(batch.future).any(1)
    assert known.any()
    for loss in (losses.teacher, losses.truth):
        assert (loss[known] == 0).all()
        assert (loss[~known] > 0).all()
    distillation.close()


def test_series_beside_covariates_known_ahead_count_more() -> None:
    nothing = torch.full((6, 4), math.nan)
    future = nothing.clone()
    future[1] = 0.0
    groups = torch.tensor([0, 0, 1, 1, 0, 2])
    batch = ForecastBatch(nothing, nothing, group_ids=groups, future=future)
    assert target_weights(batch).tolist() == [3, 0, 1, 1, 3, 1]
    assert target_weights(replace(batch, group_ids=None)).tolist() == [1, 0, 1, 1, 1, 1]
    assert target_weights(replace(batch, future=None)).tolist() == [1] * 6


def test_a_quarter_of_a_recovery_is_beside_covariates_known_ahead() -> None:
    config = RecoveryConfig(steps=1, real_series=()).resolved(load("reference/chronos2"))
    batches = Batches("chronos-2", config)
    beside = [(target_weights(batches.at(step)) > 1).float().mean() for step in range(20)]
    assert 0.2 < float(torch.stack(beside).mean()) < 0.3


def test_memory_is_counted(bolt: Callable[[], Any], checkpoints: dict[str, Path]) -> None:
    student, teacher = bolt()
    config = short()
    needed = memory_bytes(student, teacher, config)
    count = sum(p.numel() for p in student.model.parameters())
    assert needed["process"] > 50_000_000
    assert needed["student"] == 20 * count
    assert needed["teacher"] == 4 * sum(p.numel() for p in teacher.model.parameters())
    levels = len(teacher.model.chronos_config.quantiles)  # type: ignore[union-attr]
    assert needed["forecasts"] == 4 * 8 * 16 * levels
    t5 = load(checkpoints["chronos-t5"])
    tokens = t5.config["chronos_config"]["n_tokens"]
    assert memory_bytes(t5, t5, short(precision="bf16"))["forecasts"] == 2 * 8 * 16 * tokens
    halved = memory_bytes(student, teacher, short(accumulate=2))
    assert halved["activations"] == needed["activations"] // 2
    lean = memory_bytes(student, teacher, short(gradient_checkpointing=True))
    assert lean["activations"] < needed["activations"]


# --------------------------------------------------------------------------------------------------
# Recipes and the command
# --------------------------------------------------------------------------------------------------


def test_compress_recovers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    series = [np.sin(np.arange(80) / (3 + k)).astype(np.float32) for k in range(12)]
    stages: list[str] = []
    config = short(steps=24, evaluate_every=8, truth_weight=0.0)
    small = tscompress.compress(
        checkpoints["chronos-bolt"],
        rank=1,
        ff_ratio=0.25,  # so that something is lost
        calibration=CALIBRATION,
        series=series,
        recover=config,
        on_progress=lambda stage, done, total: stages.append(stage),
    )
    assert isinstance(small, CompressedModel)
    assert small.recovery is not None
    assert small.recovery.teacher == str(checkpoints["chronos-bolt"])
    assert "recover" in stages
    assert small.recipe is not None
    again = Recipe.model_validate(json.loads(small.recipe.model_dump_json()))
    assert again.recover == config
    assert small.recovery.best_step > 0
    plain = tscompress.compress(
        checkpoints["chronos-bolt"], rank=1, ff_ratio=0.25, calibration=CALIBRATION, series=series
    )
    assert plain.recovery is None
    assert any(
        not torch.equal(p, q)
        for p, q in zip(small.model.parameters(), plain.model.parameters(), strict=True)
    )


def test_a_recipe_recovers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    recipe = Recipe(
        model=str(checkpoints["chronos-bolt"]),
        output=str(tmp_path),
        schedule=RankSchedule(rank=4),
        calibration=CALIBRATION,
        recover=short(),
        profile=None,
        evaluation=None,
        bench=None,
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe
    tscompress.run(load_recipe(path))
    found = tmp_path / "chronos-bolt-fold"
    assert (found / "recovery.jsonl").is_file()
    assert (found / "recovery.png").is_file()
    assert json.loads((found / "provenance.json").read_text())["recovery"]["steps"] == 6
    assert not (tmp_path / "recovery").exists()


def test_stopped_recipe_resumes_when_run_again(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def run(output: str, seed: int = 0, **options: Any) -> Path:
        recipe = Recipe(
            model=str(checkpoints["chronos-bolt"]),
            output=str(tmp_path / output),
            schedule=RankSchedule(rank=4),
            calibration=CALIBRATION,
            recover=short(checkpoint_steps=1, seed=seed),
            profile=None,
            evaluation=None,
            bench=None,
        )
        return tscompress.run(recipe, **options).checkpoint

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recover" and 0 < done < total:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run("stopped", on_progress=stop)
    state = tmp_path / "stopped" / "recovery"
    assert can_be_resumed(state)
    shutil.copytree(state, tmp_path / "other" / "recovery")
    before = (state / CHECKPOINT / STATE_FILE).read_bytes()
    with pytest.raises(OutputExistsError, match="seed 0, not 1"):
        run("stopped", seed=1)
    assert (state / CHECKPOINT / STATE_FILE).read_bytes() == before
    shutil.copytree(state, tmp_path / "torn" / "recovery")
    (tmp_path / "torn" / "recovery" / CHECKPOINT / STATE_FILE).write_bytes(
        before[: len(before) // 2]
    )
    with pytest.raises(CorruptCheckpointError):
        run("torn")
    run("torn", force=True)
    run("other", seed=1, force=True)
    done = run("stopped")
    assert not (tmp_path / "stopped" / "recovery").exists()
    assert_equal(weights(load(done)), weights(load(run("whole"))))
    steps = [
        json.loads(line)["step"] for line in (done / "recovery.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))


def can_be_resumed(directory: Path) -> bool:
    return 0 < int(read_training_record(directory / CHECKPOINT)["step"]) < SHORT["steps"]


def test_the_command(
    command: Command,
    students: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "steps: 4\nlearning_rate: 0.003\nprecision: 'no'\nheld_out_series: 8\nevaluate_every: 2\n"
        "buckets: [{context_length: 32, horizon: 16, batch_size: 8}]\n"
    )
    student, teacher = str(students["chronos-bolt"]), str(checkpoints["chronos-bolt"])
    output = tmp_path / "recovered"
    arguments = ("recover", student, "--teacher", teacher, "--output", str(output))
    ran = command(*arguments, "--config", str(config))
    assert ran.code == 0, ran.err
    assert "memory, about: " in ran.err
    assert "step 4/4" in ran.err
    assert "loss on held-out series: " in ran.out
    assert {path.name for path in output.iterdir()} >= {
        "config.json", "model.safetensors", "plan.json", "recipe.yaml", "provenance.json",
        "recovery.jsonl", "recovery.png",
    }  # fmt: skip
    assert not (tmp_path / "recovered.recovery").exists()

    ran = command(*arguments, "--config", str(config))
    assert ran.code == OutputExistsError.exit_code
    assert "exists already" in ran.err
    ran = command(*arguments, "--force", "--config", str(config), "--steps", "3")
    assert ran.code == 2
    assert "--config has all options; --steps cannot go with it" in ran.err
    stopped = tmp_path / "other.recovery" / CHECKPOINT
    stopped.mkdir(parents=True)
    (stopped / STATE_FILE).touch()
    ran = command("recover", student, "--teacher", teacher, "--output", str(tmp_path / "other"))
    assert ran.code == 2
    assert "--resume" in ran.err
    ran = command(*arguments, "--force", "--synthetic-share", "3")
    assert ran.code == 2
    assert "synthetic_share" in ran.err
    ran = command(*arguments, "--force", "--hidden-weight", "1")
    assert ran.code == 2
    assert "hidden_weight was removed" in ran.err


@pytest.mark.slow
def test_the_reference_recovers() -> None:
    small = tscompress.compress("reference/bolt", rank=2, ff_ratio=0.125)
    recovered = tscompress.recover(small, "reference/bolt", RecoveryConfig(steps=60))
    assert recovered.recovery is not None
    assert recovered.recovery.after < recovered.recovery.before


def test_a_synthetic_share_needs_series_beside_it(
    students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Chronos-Bolt has those of a wheel without any given; a T5's are in its corpus."""
    config = short(steps=1, synthetic_share=0.3, real_series=None)
    arguments = [str(checkpoints["chronos-t5"]), tmp_path / "out", config]
    with pytest.raises(UsageError, match=r"synthetic_share is 0.3, .* a chronos-t5 draws real"):
        recover_checkpoint(str(students["chronos-t5"]), *arguments)
    arguments = [str(checkpoints["chronos-bolt"]), tmp_path / "out", config]
    assert recover_checkpoint(str(students["chronos-bolt"]), *arguments).finished


def test_the_state_of_a_recovery_is_not_replaced_unasked(
    students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    models, config = (students["chronos-bolt"], checkpoints["chronos-bolt"]), short(steps=1)
    tscompress.recover(*models, config, directory=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OutputExistsError, match=r"resume it with --resume \(resume=True\)"):
        tscompress.recover(*models, short(steps=2), directory=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    again = tscompress.recover(*models, short(steps=2), directory=tmp_path, force=True)
    assert again.recovery is not None
    assert again.recovery.steps == 2


def test_a_directory_has_one_recovery_at_a_time(
    students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    models = students["chronos-bolt"], checkpoints["chronos-bolt"]
    work = tmp_path / "work"
    with claimed([work / LOG_FILE]), pytest.raises(OutputExistsError, match="another process"):
        tscompress.recover(*models, short(steps=1), directory=work)
    assert list(work.iterdir()) == []


def test_the_callers_accelerator_stays_as_it_was(
    students: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    theirs = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=8)
    theirs.gradient_state._set_sync_gradients(False)
    models = students["chronos-bolt"], checkpoints["chronos-bolt"]
    try:
        with pytest.raises(UsageError, match="accumulate"):
            tscompress.recover(*models, short(accumulate=3))
        done = tscompress.recover(*models, smooth(steps=6)).recovery
        assert done is not None
        assert done.after < done.before  # the optimizer took its steps
        assert theirs.mixed_precision == "bf16"
        assert theirs.gradient_accumulation_steps == 8
        assert not theirs.sync_gradients
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_recovery_on_a_gpu(
    family: str, students: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    student = load(students[family], device="cuda")
    teacher = load(checkpoints[family])
    config = short(precision="bf16")
    recovered = tscompress.recover(student, teacher, config, directory=tmp_path)
    assert recovered.recovery is not None
    assert recovered.recovery.finished
    assert recovered.recovery.after <= recovered.recovery.before
    save(recovered, tmp_path / "saved")
