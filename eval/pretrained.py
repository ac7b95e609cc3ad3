"""Models that scripts train by a recipe: once, and resumed where a training stopped."""

from __future__ import annotations

from pathlib import Path

from tscompress.cli.console import duration
from tscompress.errors import UsageError
from tscompress.training.pretrain_output import CHECKPOINT, MODEL
from tscompress.training.pretrain_recipe import PRETRAIN_FILE, PretrainRecipe
from tscompress.training.pretraining import Progress, pretrain
from tscompress.workflows.recipe import load_pretrain_recipe


def pretrained(recipe: PretrainRecipe, directory: Path, *, trained_only: bool = False) -> Path:
    """The directory of the model of a recipe, trained first unless it is there.

    Raises
    ------
    UsageError
        It is not there, and nothing may be trained; or what is there is of another recipe.
    SystemExit
        The training was stopped; the next run resumes it.
    """
    model = directory / MODEL
    if model.is_dir():
        check_recipe(recipe, model)
        return model
    if trained_only:
        raise UsageError(f"{str(model)!r} does not exist; leave --trained-only out.")

    def tell(progress: Progress) -> None:
        left = duration(progress.eta_seconds)
        print(f"{directory.name}: step {progress.step}, {left} left", flush=True)

    resume = (directory / CHECKPOINT).is_dir()  # before the first one there is nothing to lose
    options = {"resume": resume, "force": not resume}
    if pretrain(recipe, directory, report=tell, log_every=100, **options) is None:
        raise SystemExit(f"stopped; the next run resumes {directory}")
    return model


def check_recipe(recipe: PretrainRecipe, model: Path) -> None:
    """Refuse a model that another recipe made, but for its name; UsageError."""
    made_by = load_pretrain_recipe(model / PRETRAIN_FILE)
    if made_by.model_copy(update={"name": recipe.name}) != recipe:
        raise UsageError(
            f"{str(model.parent)!r} holds a training of another recipe; delete it, or name another "
            "directory of trainings."
        )
