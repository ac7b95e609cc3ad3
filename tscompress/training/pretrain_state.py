"""State that a resumed pretraining checks against the run that it continues, and its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tscompress.errors import RecipeError
from tscompress.io.files import write_text_atomically
from tscompress.io.untrusted import shown
from tscompress.training.checkpoint import read_training_record
from tscompress.training.pretrain_recipe import PretrainRecipe

#: Fields of a recipe that a resumed run may change, besides the steps of the last stage.
_FREE_ON_RESUME = ("learning_rate", "precision", "checkpoint_minutes", "watch_ranks")


def log_up_to(step: int, path: Path) -> Path:
    """Cut a log after ``step``: a killed run logged steps that it did not save."""
    kept = []
    if step and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):  # an incomplete line
                break
            kept.append(line)
    write_text_atomically(path, "".join(kept))
    return path


def record_of(recipe: PretrainRecipe, parts: list[list[float]]) -> dict[str, str]:
    """Record of a run in its checkpoint, as text."""
    return {"recipe": recipe.model_dump_json(), "parts": json.dumps(parts)}


def check_resumable(recipe: PretrainRecipe, checkpoint: Path) -> list[list[float]]:
    """The parts of the run so far; refuses a recipe other than the one at its start.

    Raises
    ------
    RecipeError
        Names the first key that differs.
    """
    record = read_training_record(checkpoint)
    ours = recipe.model_dump(mode="json")
    begun = whole(json.loads(record.get("recipe", "{}")))
    for content in (begun, ours):
        for stage in content.get("stages", [])[-1:]:
            stage["steps"] = "any"
    for name, value in ours.items():
        if begun.get(name) != value and name not in _FREE_ON_RESUME:
            raise RecipeError(
                f"{str(checkpoint)!r} was begun with {name} {shown(begun.get(name))}; the recipe "
                f"has {shown(value)}. Resume with the recipe it was begun with, or choose another "
                "output."
            )
    parts: list[list[float]] = json.loads(record["parts"])
    return parts


def whole(begun: dict[str, Any]) -> dict[str, Any]:
    """The recipe that a checkpoint holds; keys of later versions have their defaults."""
    try:
        return PretrainRecipe.model_validate(begun).model_dump(mode="json")
    except ValidationError:  # one of another version, whose first strange key is named
        return begun


def with_part(parts: list[list[float]], first: int, recipe: PretrainRecipe) -> list[list[float]]:
    """``parts`` and, unless it continues the last one, a part from step ``first`` on.

    A part is its first step, learning rate and steps in all.
    """
    settings = [recipe.learning_rate, recipe.total_steps]
    if parts and parts[-1][1:] == settings:
        return parts
    return [*parts, [first, *settings]]
