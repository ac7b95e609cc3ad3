"""What the scripts of training share: models of a recipe with some keys changed, trained once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.progress import silent
from tscompress.profiling.measure import profile_weights
from tscompress.profiling.rank_profile import WeightProfile
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.pretraining import pretrain
from tscompress.workflows.recipe import load_pretrain_recipe

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = ROOT / "recipes" / "lab"
EPSILONS = (0.3, 0.1, 0.03, 0.01)
#: Index of ε = 0.1.
MIDDLE = 1
#: Steps of a training with --quick.
QUICK_STEPS = 20


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """``--runs`` and ``--quick``."""
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "results" / "lab",
        help="trained models; those that are there are not trained again",
    )
    parser.add_argument("--quick", action="store_true", help="few steps, of fewer models")


def variant(name: str, *, quick: bool, **changes: Any) -> PretrainRecipe:
    """The recipe ``name`` with other values of some keys; of architecture, only those given."""
    content = load_pretrain_recipe(RECIPES / f"{name}.yaml").model_dump()
    for key, value in changes.items():
        merged = isinstance(value, Mapping) and isinstance(content[key], Mapping)
        content[key] = {**content[key], **value} if merged else value
    if quick:
        content["stages"][0]["steps"] = QUICK_STEPS
    return PretrainRecipe.model_validate(content)


def trained(recipe: PretrainRecipe, directory: Path, **options: Any) -> LoadedModel:
    """The model of ``recipe``, trained into ``directory`` unless that training is there."""
    if not (directory / "model").is_dir():
        started = time.process_time()
        resume = (directory / "checkpoint").is_dir()
        pretrain(recipe, directory, resume=resume, log_every=100, **options)
        print(f"{directory.name}: {time.process_time() - started:.0f} CPU seconds", flush=True)
    return load(directory / "model")


def query_weights(loaded: LoadedModel, kind: str | None = None) -> list[WeightProfile]:
    """Spectra of every W_Q and of its heads, of one kind of attention or all."""
    weights = profile_weights(loaded, EPSILONS, silent)
    return [w for w in weights if w.role == "q" and kind in (None, w.kind)]
