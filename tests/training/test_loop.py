"""What every training run needs."""

import pytest
import torch

from tscompress.training import loop
from tscompress.training.loop import training_precision
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.recovery_config import RecoveryConfig


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "no")])
def test_precision_is_what_the_hardware_multiplies_in(
    native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "multiplies_bfloat16", lambda device: native)
    assert training_precision(torch.device("cpu")) == expected


def test_no_precision_is_chosen_before_the_hardware_is_known() -> None:
    assert RecoveryConfig().precision is None
    assert PretrainRecipe.model_fields["precision"].default is None
