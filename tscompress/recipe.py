"""The recipe: one YAML file that says everything about a compression."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tscompress.calibration import CalibrationConfig
from tscompress.errors import RecipeError
from tscompress.latency import Workload
from tscompress.planning import BudgetSchedule, Method, Schedule
from tscompress.pretraining import PretrainRecipe

M = TypeVar("M", bound=BaseModel)
_STRICT = ConfigDict(extra="forbid", frozen=True)


class EvaluationConfig(BaseModel):
    """What a compressed model is scored on."""

    model_config = _STRICT

    suite: str = "offline"
    datasets: tuple[str, ...] | None = Field(default=None, description="null: the whole suite")
    max_series: int | None = Field(default=None, ge=1, description="first N series of each dataset")
    batch_size: int = Field(default=32, ge=1)
    seed: int = 0
    root: str | None = Field(
        default=None, description="local copy of the datasets: <root>/<dataset>/*.parquet"
    )


class ProfileConfig(BaseModel):
    """Thresholds of the rank profile."""

    model_config = _STRICT

    epsilons: tuple[float, ...] = Field(default=(0.3, 0.1, 0.03, 0.01), min_length=1)


class Recipe(BaseModel):
    """A compression from the model to the output directory."""

    model_config = _STRICT

    model: str
    revision: str | None = None
    output: str
    method: Method = "activation-svd"
    schedule: Schedule = BudgetSchedule(parameter_ratio=0.25)
    exclude: tuple[str, ...] = Field(default=(), description="shell patterns on layer names")
    feed_forward: bool = False
    calibration: CalibrationConfig = CalibrationConfig()
    profile: ProfileConfig | None = Field(default=ProfileConfig(), description="null: skip it")
    evaluation: EvaluationConfig | None = Field(
        default=EvaluationConfig(), description="null: skip it"
    )
    bench: Workload | None = Field(default=Workload(), description="null: skip it")

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


def load_recipe(path: str | Path) -> Recipe:
    """Read a compression recipe.

    Raises
    ------
    RecipeError
        The file is missing, is not YAML, or has an unknown key or a value out of range.
    """
    return _parse(Recipe, path)


def load_pretrain_recipe(path: str | Path) -> PretrainRecipe:
    """Read a pretraining recipe; RecipeError as in :func:`load_recipe`."""
    return _parse(PretrainRecipe, path)


def _parse(model: type[M], path: str | Path) -> M:
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        # Aliases of aliases can make a few lines stand for gigabytes.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise RecipeError(f"{str(path)!r} has YAML aliases (*name); write the values out.")
        content: Any = yaml.safe_load(text)
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe at {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(f"{str(path)!r} cannot be read as YAML: {reason}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{str(path)!r} holds no mapping; see recipes/ for examples.")
    return validate(model, content, source=repr(str(path)))


def validate(model: type[M], content: dict[str, Any], source: str) -> M:
    """``content`` as ``model``; RecipeError names the first offending key."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(model.model_fields) if len(first["loc"]) == 1 else "see the docs"
            raise RecipeError(
                f"{source}: unknown key {where!r}; allowed here: {allowed}."
            ) from None
        got = reprlib.repr(first["input"])
        raise RecipeError(f"{source}: {where}: {first['msg']} (got {got}).") from None
