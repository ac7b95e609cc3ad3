"""What every training run needs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared_fixtures import tiny_recipe

from tscompress.checkpoints.load import load
from tscompress.training import loop
from tscompress.training.loop import training_precision
from tscompress.training.pretraining import pretrain
from tscompress.training.recovery_config import RecoveryConfig


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "no")])
def test_precision_follows_the_hardware(
    native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "multiplies_bfloat16", lambda device: native)
    assert training_precision(torch.device("cpu")) == expected


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "no")])
def test_recovery_precision_follows_the_hardware(
    native: bool, expected: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "multiplies_bfloat16", lambda device: native)
    student = load(checkpoints["chronos-bolt"])
    assert RecoveryConfig().resolved(student).precision == expected
    assert RecoveryConfig(precision="bf16").resolved(student).precision == "bf16"


@pytest.mark.parametrize("native", [True, False])
def test_pretraining_precision_follows_the_hardware(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "multiplies_bfloat16", lambda device: native)
    states = {}
    for precision in (None, "no", "bf16"):
        output = tmp_path / str(precision)
        pretrain(tiny_recipe("chronos-bolt", precision=precision), output)
        states[precision] = load_file(output / "checkpoint" / "state.safetensors")
    same = {
        said: all(torch.equal(states[None][name], state[name]) for name in state)
        for said, state in states.items()
    }
    assert same == {None: True, "no": not native, "bf16": native}
