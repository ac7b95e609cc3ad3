"""The rank watch of pretraining and recovery."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_fixtures import Command, assert_refused, tiny_recipe

import tscompress
from tscompress.checkpoints.load import load
from tscompress.errors import OutputExistsError, UsageError
from tscompress.families.registry import adapter_of
from tscompress.linalg import epsilon_rank, random_spectrum, singular_values, stable_rank
from tscompress.plan.architecture import Architecture
from tscompress.profiling.untrained import looks_untrained
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretraining import Progress, pretrain
from tscompress.training.rank_watch import (
    EPSILONS,
    RankWatch,
    is_watched,
    read_ranks,
    watch_findings,
)
from tscompress.training.windows import Bucket
from tscompress.workflows.recover import recover_checkpoint

FAMILIES = ["chronos-bolt", "chronos-t5", "chronos-2"]


def test_watched_steps_grow_by_a_constant_factor() -> None:
    steps = [step for step in range(1001) if is_watched(step)]
    assert steps[:8] == [0, 1, 2, 3, 5, 7, 10, 15]
    assert steps[-1] == 1000
    assert len(steps) == 19


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_ranks_of_the_weights_and_of_their_heads(family: str, tmp_path: Path) -> None:
    model = build_model(tiny_recipe(family))
    architecture = adapter_of(family).describe(model)
    watch = RankWatch(architecture, tmp_path)
    watch.start()
    watch.look(model, 0)
    rows = read_ranks(tmp_path / "ranks.jsonl")
    assert rows == watch.rows
    projections = list(architecture.attention_projections())
    assert [row["name"] for row in rows] == [name for _, _, name in projections]
    for row, (block, role, name) in zip(rows, projections, strict=True):
        W = model.get_submodule(name).weight.detach().double()
        sigma = singular_values(W)
        assert row["sigma_1"] == pytest.approx(float(sigma[0]), rel=1e-3)
        assert row["stable_rank"] == pytest.approx(stable_rank(sigma), rel=1e-3)
        assert row["ranks"] == [epsilon_rank(sigma, epsilon) for epsilon in EPSILONS]
        assert len(row["heads"]["ranks"]) == block.num_heads
        first = W[:, : W.shape[1] // block.num_heads] if role == "o" else W[: len(W) // 4]
        found = row["heads"]["sigma_1"][0]
        assert found == pytest.approx(float(singular_values(first)[0]), rel=1e-3)


def test_a_stopped_and_resumed_run_has_the_same_rows(tmp_path: Path) -> None:
    recipe = tiny_recipe("chronos-t5", watch_ranks=True, checkpoint_minutes=1e-9)

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    pretrain(recipe, tmp_path / "whole")
    pretrain(recipe, tmp_path / "parts", report=stop, log_every=1)
    ranks = tmp_path / "parts" / "ranks.jsonl"
    late = read_ranks(ranks)[-1] | {"step": 5}  # of a step that a killed run did not save
    with ranks.open("a") as stream:
        stream.write(json.dumps(late) + "\n")
    pretrain(recipe, tmp_path / "parts", resume=True)
    assert ranks.read_text() == (tmp_path / "whole" / "ranks.jsonl").read_text()
    assert list(dict.fromkeys(row["step"] for row in read_ranks(ranks))) == [0, 1, 2, 3, 4]


def test_rows_of_an_earlier_run_go(tmp_path: Path) -> None:
    watched = tiny_recipe("chronos-bolt", watch_ranks=True)
    pretrain(watched, tmp_path)
    ranks = tmp_path / "ranks.jsonl"
    rows = read_ranks(ranks)
    RankWatch(adapter_of("chronos-bolt").describe(build_model(watched)), tmp_path).start(2)
    assert {row["step"] for row in read_ranks(ranks)} == {0, 1, 2}
    assert read_ranks(ranks) == [row for row in rows if row["step"] <= 2]
    pretrain(tiny_recipe("chronos-bolt"), tmp_path, force=True)
    assert not ranks.exists()


def test_watching_changes_no_weight_and_may_begin_on_resume(tmp_path: Path) -> None:
    plain, watched = (
        pretrain(tiny_recipe("chronos-bolt", watch_ranks=watch), tmp_path / str(watch))
        for watch in (False, True)
    )
    assert plain is not None
    assert watched is not None
    assert not (tmp_path / "False" / "ranks.jsonl").exists()
    ours, theirs = (tscompress.load(path).model.state_dict() for path in (plain, watched))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    pretrain(tiny_recipe("chronos-bolt", watch_ranks=True), tmp_path / "False", resume=True)
    assert {row["step"] for row in read_ranks(tmp_path / "False" / "ranks.jsonl")} == {4}


def test_recovery_leaves_the_rows_beside_its_log(
    checkpoints: dict[str, Path], compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    config = tscompress.RecoveryConfig(
        steps=2, held_out_series=8, watch_ranks=True, real_series=(), synthetic_share=1.0,
        buckets=(Bucket(context_length=32, horizon=8, batch_size=4),),
    )  # fmt: skip
    for kind in ("folded", "factored"):
        output = tmp_path / kind
        student = str(compressed["chronos-bolt", kind])
        result = recover_checkpoint(student, str(checkpoints["chronos-bolt"]), output, config)
        rows = read_ranks(output / "ranks.jsonl")
        assert rows == result.ranks
        assert {row["step"] for row in rows} == {0, 1, 2}
    # It is replaced like everything else that a recovery wrote.
    recover_checkpoint(student, str(checkpoints["chronos-bolt"]), output, config, force=True)


def test_the_last_rows_are_of_the_last_step_also_when_patience_ends(
    checkpoints: dict[str, Path], compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    config = tscompress.RecoveryConfig(
        steps=100, evaluate_every=4, patience=1, learning_rate=1e-12, held_out_series=8,
        watch_ranks=True, real_series=(), synthetic_share=1.0,
        buckets=(Bucket(context_length=32, horizon=8, batch_size=4),),
    )  # fmt: skip
    student, teacher = compressed["chronos-bolt", "folded"], checkpoints["chronos-bolt"]
    result = recover_checkpoint(str(student), str(teacher), tmp_path / "out", config)
    assert result.steps < 100
    assert not is_watched(result.steps)
    assert result.ranks[-1]["step"] == result.steps


def test_ranks_of_a_latent_are_refused_before_anything_changes(
    checkpoints: dict[str, Path],
) -> None:
    teacher = load(checkpoints["chronos-t5"], dtype="bfloat16")
    few = tscompress.CalibrationConfig(source="synthetic", num_series=8, context_length=32)
    small = tscompress.compress(checkpoints["chronos-t5"], latent=6, calibration=few)
    before = {name: weight.clone() for name, weight in small.model.state_dict().items()}
    with pytest.raises(UsageError, match=r"watch_ranks: .* reads a latent .*; leave watch_ranks"):
        tscompress.recover(small, teacher, tscompress.RecoveryConfig(steps=1, watch_ranks=True))
    assert {p.dtype for p in teacher.model.parameters()} == {torch.bfloat16}
    after = small.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_random_matrix_looks_untrained_and_a_cut_one_does_not() -> None:
    sigma = torch.tensor(random_spectrum(48, 64))
    assert looks_untrained(sigma, (48, 64))
    assert looks_untrained(0.05 * sigma, (48, 64))
    grown = sigma.clone()
    grown[0] *= 4  # of full ε-rank still, and led by one direction
    assert epsilon_rank(grown, 0.05) == epsilon_rank(sigma, 0.2)
    assert not looks_untrained(grown, (48, 64))
    assert not looks_untrained(torch.cat([sigma[:8], 1e-3 * sigma[8:]]), (48, 64))


def test_findings_name_matrices_that_look_untrained(tmp_path: Path) -> None:
    pretrain(tiny_recipe("chronos-t5", watch_ranks=True), tmp_path)
    rows = read_ranks(tmp_path / "ranks.jsonl")
    lines = watch_findings(rows)
    assert "at step 4" in lines[0]
    assert "encoder 0 q" in lines[1]
    trained = [{**row, "untrained": False} for row in rows]
    assert not any("untrained" in line for line in watch_findings(trained))
    assert watch_findings([]) == []


def test_untrained_ranks_that_stay_have_not_settled() -> None:
    def said(last: int, untrained: bool) -> str:
        rows = [
            {"step": step, "kind": "encoder", "depth": 0, "role": "q",
             "ranks": [1, rank, rank, rank], "untrained": untrained}
            for step, rank in ((0, 20), (1, 20), (2, last))
        ]  # fmt: skip
        return watch_findings(rows)[-1]

    assert "settled" in said(20, untrained=False)
    assert "move" in said(10, untrained=False)
    assert "initial" in said(20, untrained=True)


def test_the_option_watches_and_prints(command: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny_recipe("chronos-t5").model_dump(mode="json")))
    outcome = command("pretrain", recipe, "--output", tmp_path / "run", "--watch-ranks", "--json")
    assert outcome.code == 0
    assert outcome.json["ranks"]
    assert read_ranks(tmp_path / "run" / "ranks.jsonl")
    foreign = tmp_path / "other" / "ranks.jsonl"
    foreign.parent.mkdir()
    foreign.write_text('{"step": 1, "rank": 3}\n')
    refused = command("pretrain", recipe, "--output", foreign.parent, "--force")
    assert_refused(refused, 2, "did not write")
    assert foreign.read_text() == '{"step": 1, "rank": 3}\n'


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="attention"):
        RankWatch(Architecture("convolutional", (), ()), None)


def test_rows_of_others_are_never_replaced(tmp_path: Path) -> None:
    architecture: Any = adapter_of("chronos-t5").describe(build_model(tiny_recipe("chronos-t5")))
    (tmp_path / "ranks.jsonl").write_text("ours\n")
    with pytest.raises(OutputExistsError):
        RankWatch(architecture, tmp_path).start()
