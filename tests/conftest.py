"""Tiny checkpoints of the true architectures, made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from transformers.utils.logging import disable_progress_bar

from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

FAMILIES = ("chronos-t5", "chronos-bolt", "chronos-2")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither find nor leave anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSCOMPRESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_bars() -> None:
    """A command says so before it imports transformers; here that has happened already."""
    disable_progress_bar()


def tiny_recipe(family: str, **changes: object) -> PretrainRecipe:
    """A pretraining recipe of a model with inner width 32 != d_model 24, as in mini."""
    settings: dict[str, object] = {
        "family": family,
        "name": f"tiny-{family}",
        "architecture": Architecture(
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            context_length=64,
            prediction_length=16,
            vocab_size=64,
        ),
        "stages": (Stage(steps=4, buckets=(Bucket(context_length=32, horizon=8, batch_size=4),)),),
        "precision": "no",
        "warmup_steps": 1,
    }
    return PretrainRecipe.model_validate(settings | changes)


def tiny_chronos2() -> Chronos2Model:
    chronos_config = {
        "context_length": 128,
        "output_patch_size": 16,
        "input_patch_size": 16,
        "input_patch_stride": 16,
        "quantiles": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        "use_reg_token": True,
        "use_arcsinh": True,
        "max_output_patches": 4,
    }
    return Chronos2Model(
        Chronos2CoreConfig(
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            initializer_factor=0.3,
            chronos_config=chronos_config,
            chronos_pipeline_class="Chronos2Pipeline",
            architectures=["Chronos2Model"],
        )
    )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a directory with a tiny random float32 checkpoint of it."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = {}
    with torch.random.fork_rng():
        for seed, family in enumerate(FAMILIES):
            torch.manual_seed(seed)
            model = tiny_chronos2() if family == "chronos-2" else build_model(tiny_recipe(family))
            if family == "chronos-bolt":
                # At the official initial scale of 0.05 every output is nearly constant.
                for parameter in model.parameters():
                    parameter.data *= 4
            found[family] = root / family
            model.save_pretrained(found[family])
    return found


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    """Each family's checkpoint in turn."""
    return checkpoints[request.param]
