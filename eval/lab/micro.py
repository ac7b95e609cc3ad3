"""What the scripts of training share: models of a recipe with some keys changed, trained once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scipy.stats import spearmanr
from verdicts import parser_of, pretrained

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.profiling.measure import profile_weights
from tscompress.profiling.rank_profile import WeightProfile
from tscompress.training.pretrain_output import MODEL
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.workflows.recipe import load_pretrain_recipe

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = ROOT / "recipes" / "lab"
EPSILONS = (0.3, 0.1, 0.03, 0.01)
#: Index of ε = 0.1.
MIDDLE = 1
#: Steps of a training with --quick.
QUICK_STEPS = 20


def options_of(description: str | None, seeds: Sequence[int] = ()) -> argparse.Namespace:
    """``--output``, ``--runs`` and ``--quick`` as they were given, and ``--seeds`` if several."""
    parser = parser_of(description, ".csv, .md, and -SECTION.csv and .png")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "results" / "lab",
        help="trained models; those that are there are not trained again",
    )
    parser.add_argument("--quick", action="store_true", help="few steps, of fewer models")
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="of training")
    given = parser.parse_args()
    if given.quick:  # other models than those of a full run
        given.runs = given.runs / "quick"
    torch.set_num_threads(1)
    return given


def variant(name: str, *, quick: bool, **changes: Any) -> PretrainRecipe:
    """The recipe ``name`` with other values of some keys; of architecture, only those given."""
    content = load_pretrain_recipe(RECIPES / f"{name}.yaml").model_dump()
    for key, value in changes.items():
        merged = isinstance(value, Mapping) and isinstance(content[key], Mapping)
        content[key] = {**content[key], **value} if merged else value
    if quick:
        content["stages"][0]["steps"] = QUICK_STEPS
    return PretrainRecipe.model_validate(content)


def trained(recipe: PretrainRecipe, directory: Path) -> LoadedModel:
    """The model of ``recipe``, as by :func:`pretrained`."""
    return load(pretrained(recipe, directory))


def moments(directory: Path, last: int) -> dict[int, Path]:
    """Models of a training by step: its snapshots, and after ``last`` steps the model."""
    models = {int(path.name.removeprefix("step-")): path for path in directory.glob("step-*")}
    return dict(sorted({**models, last: directory / MODEL}.items()))


def mean_rank(weights: Sequence[WeightProfile], index: int = MIDDLE) -> float:
    """Mean ε-rank of whole matrices."""
    return fmean(weight.spectrum.ranks[index] for weight in weights)


def mean_head_rank(weights: Sequence[WeightProfile], index: int = MIDDLE) -> float:
    """Mean ε-rank of their heads."""
    return fmean(head.ranks[index] for weight in weights for head in weight.heads)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN where one of them is constant."""
    if len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan
    return float(spearmanr(x, y)[0])


def query_weights(loaded: LoadedModel, kind: str | None = None) -> list[WeightProfile]:
    """Spectra of every W_Q and of its heads, of one kind of attention or all."""
    weights = profile_weights(loaded, EPSILONS)
    return [w for w in weights if w.role == "q" and kind in (None, w.kind)]
