"""What the scripts of in-context learners share: recipes, trainings that resume, their curves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from verdicts import parser_of_sections

from tscompress.checkpoints.names import WEIGHTS_FILE
from tscompress.errors import RecipeError
from tscompress.io.own_outputs import TRAINING_DIRECTORY, TRAINING_LOG
from tscompress.io.strict import Strict
from tscompress.io.untrusted import UnreadableFileError, first_problem, read_yaml
from tscompress.lab.in_context import (
    RegressionPrompts,
    RegressionTask,
    last_index_loss,
    validation_loss,
)
from tscompress.lab.in_context_models import (
    LAYOUTS,
    InContextRegressor,
    LayoutName,
    LoopedTransformer,
    instrument_tokens,
)
from tscompress.lab.instruments import InstrumentPrompts, InstrumentTask, coefficients
from tscompress.training.checkpoint import load_training_state
from tscompress.training.in_context import BatchLoss, InContextTraining, train_in_context

ROOT = Path(__file__).resolve().parents[2]
TEST_SEED = 10_000
Recipe = TypeVar("Recipe", bound=BaseModel)
Trainings = TypeVar("Trainings", bound="RecipeTrainings[Any]")


def options_of(description: str | None, recipe: str, sections: Sequence[str]) -> argparse.Namespace:
    """Options as they were given; ``recipe`` is the default's name in recipes/lab."""
    parser = parser_of_sections(description, sections, "a few steps, to see that it runs")
    default = ROOT / "recipes" / "lab" / f"{recipe}.yaml"
    parser.add_argument("--recipe", type=Path, default=default)
    parser.add_argument("--models", type=Path, help="directory of trainings")
    parser.add_argument(
        "--seeds", type=int, nargs="+", action="extend", help="default: the recipe's"
    )
    parser.add_argument("--trained-only", action="store_true", help="train nothing")
    parser.add_argument("--device", default="cpu", help="where to train; default: cpu")
    return parser.parse_args()


def asked_for(given: argparse.Namespace, kind: type[Recipe]) -> tuple[Recipe, Path]:
    """The recipe that the options ask for, and the directory of its trainings."""
    recipe = read_recipe(kind, given.recipe)
    if given.seeds:
        recipe = recipe.model_copy(update={"seeds": tuple(given.seeds)})
    models = given.models or ROOT / "results" / given.output.name
    if given.quick:
        return shortened_recipe(recipe), models.with_name(f"{models.name}-quick")
    return recipe, models


@dataclass(frozen=True)
class RecipeTrainings(Generic[Recipe]):
    """Trainings of a recipe: where they are, whether there may be new ones, and on which device."""

    recipe: Recipe
    models: Path
    output: Path
    trained_only: bool = False
    device: str = "cpu"

    @classmethod
    def asked(cls: type[Trainings], given: argparse.Namespace, kind: type[Recipe]) -> Trainings:
        """Those that the options ask for."""
        recipe, models = asked_for(given, kind)
        return cls(recipe, models, given.output, given.trained_only, given.device)


def read_recipe(kind: type[Recipe], path: Path) -> Recipe:
    """A recipe of a YAML file.

    Raises
    ------
    RecipeError
        The file cannot be read, or an entry is unknown or not allowed.
    """
    try:
        return kind.model_validate(read_yaml(path))
    except ValidationError as error:
        where, message, _ = first_problem(error)
        raise RecipeError(f"{path}: {where}: {message}.") from None
    except (OSError, UnreadableFileError) as error:
        raise RecipeError(f"{path} cannot be read: {error}.") from None


# --------------------------------------------------------------------------------------------------
# Covariates
# --------------------------------------------------------------------------------------------------


class Size(Strict):
    """Covariates and labelled examples of a prompt."""

    dim: int = Field(ge=1)
    history: int = Field(ge=1)


class Comparison(Strict):
    """The four layouts, trained alike."""

    layers: int = Field(ge=1)
    function: Literal["linear", "network"] = "linear"
    training: InContextTraining


class Patches(Strict):
    """Shifted causal attention without softmax, on patches of several sizes."""

    layers: int = Field(ge=1)
    history: int = Field(ge=1, description="one more is a multiple of every size")
    sizes: tuple[int, ...] = Field(min_length=1)
    training: InContextTraining


class CovariatesRecipe(Strict):
    """Trainings of Figures 2 and 3 of Dange et al."""

    task: Size
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    comparisons: tuple[Comparison, ...] = ()
    patches: tuple[Patches, ...] = ()


@dataclass(frozen=True)
class RegressorRun:
    """One training of a regressor.

    Attributes
    ----------
    panel, label
        Panel of the figure, and the curve in it: a layout, or a size of patches.
    """

    panel: str
    label: str
    task: RegressionTask
    layout: LayoutName
    layers: int
    patch: int
    linear: bool
    training: InContextTraining

    def model(self, width: int, heads: int) -> InContextRegressor:
        """Its model before training."""
        torch.manual_seed(self.training.seed)
        return InContextRegressor(
            self.layout, dim=self.task.dim, points=self.task.points, width=width, heads=heads,
            layers=self.layers, patch=self.patch, linear=self.linear,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Of its directory."""
        name = f"{self.panel}/{self.label}/seed-{self.training.seed}"
        return name.replace(",", "").replace(" ", "-")


def regressor_runs(recipe: CovariatesRecipe) -> list[RegressorRun]:
    """All trainings of a recipe: the first seed of every panel before the second of any."""
    found = []
    for seed in recipe.seeds:
        for one in recipe.comparisons:
            task = RegressionTask(recipe.task.dim, recipe.task.history, one.function)
            panel = f"{_layers(one.layers)}, {one.function}"
            found += [
                RegressorRun(panel, layout, task, layout, one.layers, 1, False, _of(one, seed))
                for layout in LAYOUTS
            ]
        for several in recipe.patches:
            task = RegressionTask(recipe.task.dim, several.history)
            panel = f"{_layers(several.layers)}, patches"
            found += [
                RegressorRun(
                    panel,
                    f"patch {p}",
                    task,
                    "shifted",
                    several.layers,
                    p,
                    True,
                    _of(several, seed),
                )
                for p in several.sizes
            ]
    return found


def _layers(count: int) -> str:
    return f"{count} layer" + ("s" if count > 1 else "")


def _of(part: Comparison | Patches, seed: int) -> InContextTraining:
    return part.training.model_copy(update={"seed": seed})


def held_out_prompts(task: RegressionTask, count: int) -> RegressionPrompts:
    """Prompts that no training sees."""
    return task.draw(count, np.random.default_rng(TEST_SEED))


def regressor_loss(model: InContextRegressor, task: RegressionTask, batch: int) -> BatchLoss:
    """The training loss of drawn prompts."""

    def loss(rng: np.random.Generator) -> Tensor:
        prompts = task.draw(batch, rng)
        device = model.read_in.weight.device
        x, y = (torch.as_tensor(part).float().to(device) for part in (prompts.x, prompts.y))
        return model.loss(x, y)

    return loss


def train_regressor(
    run: RegressorRun,
    recipe: CovariatesRecipe,
    directory: Path,
    logged: Callable[[], None],
    device: str = "cpu",
) -> tuple[InContextRegressor, list[dict[str, Any]]]:
    """The trained model and its log; a training that was stopped goes on."""
    model = run.model(recipe.width, recipe.heads)
    held_out = held_out_prompts(run.task, 256)
    loss = regressor_loss(model, run.task, run.training.batch)

    def measure() -> dict[str, float]:
        found = model.forecasts(held_out, first=2 * run.task.dim)
        return {
            "last": last_index_loss(found, held_out),
            "validation": validation_loss(found, held_out),
        }

    place = directory / run.name
    setup = repr(
        (run.task, run.layout, run.layers, run.patch, run.linear, recipe.width, recipe.heads)
    )
    lines = train_in_context(
        model, loss, measure, run.training, place, lambda _: logged(), setup=setup, device=device
    )
    save_model(model, place)
    return model, lines


def save_model(model: nn.Module, directory: Path) -> None:
    """Weights as safetensors beside the log."""
    save_file(model.state_dict(), directory / WEIGHTS_FILE)


# --------------------------------------------------------------------------------------------------
# Instruments
# --------------------------------------------------------------------------------------------------


class Causal(Strict):
    """Regressors, instruments and confounding of a prompt."""

    p: int = Field(ge=1)
    q: int = Field(ge=1)
    endogeneity: float = Field(default=1.0, ge=0, allow_inf_nan=False)


class InstrumentsRecipe(Strict):
    """In-context pretraining of a looped transformer (Liang et al., 2025, section 4)."""

    task: Causal
    examples: tuple[int, int] = Field(description="fewest and most labelled examples of a prompt")
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    layers: int = Field(ge=1)
    loops: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    training: InContextTraining

    def distribution(self, **changes: Any) -> InstrumentTask:
        """Prompts as those of training, but for ``changes``."""
        settings = {"p": self.task.p, "q": self.task.q, "endogeneity": self.task.endogeneity}
        return InstrumentTask(**(settings | changes))

    def model(self, seed: int) -> LoopedTransformer:
        """The model before training."""
        torch.manual_seed(seed)
        return LoopedTransformer(
            self.task.p, self.task.q, width=self.width, heads=self.heads, layers=self.layers,
            loops=self.loops,
        )  # fmt: skip


def held_out_examples(recipe: InstrumentsRecipe) -> InstrumentPrompts:
    """500 prompts of the most examples, on which trainings are measured."""
    most = recipe.examples[1]
    return recipe.distribution().draw(500, most, np.random.default_rng(TEST_SEED))


def looped_loss(model: LoopedTransformer, recipe: InstrumentsRecipe, batch: int) -> BatchLoss:
    """The training loss of drawn prompts, whose number of examples is drawn too."""
    task, (fewest, most) = recipe.distribution(), recipe.examples

    def loss(rng: np.random.Generator) -> Tensor:
        prompts = task.draw(batch, int(rng.integers(fewest, most + 1)), rng)
        device = model.read_in.weight.device
        target = torch.as_tensor(prompts.query_y).float().to(device)
        return ((model(instrument_tokens(prompts).to(device)) - target) ** 2).mean()

    return loss


def train_looped(
    recipe: InstrumentsRecipe,
    seed: int,
    directory: Path,
    logged: Callable[[], None],
    device: str = "cpu",
) -> tuple[LoopedTransformer, list[dict[str, Any]]]:
    """The trained model and its log; a training that was stopped goes on."""
    model = recipe.model(seed)
    training = recipe.training.model_copy(update={"seed": seed})
    held_out = held_out_examples(recipe)
    loss = looped_loss(model, recipe, training.batch)

    def measure() -> dict[str, float]:
        found = coefficients(model.predict, held_out)
        return {
            "icpe": float(((model.predict(held_out) - held_out.query_y) ** 2).mean()),
            "mse": float(((found - held_out.beta) ** 2).mean()),
        }

    place = directory / f"seed-{seed}"
    setup = recipe.model_dump_json(exclude={"seeds", "training"})
    lines = train_in_context(
        model, loss, measure, training, place, lambda _: logged(), setup=setup, device=device
    )
    save_model(model, place)
    return model, lines


def shortened_recipe(recipe: Recipe) -> Recipe:
    """The same for a look: one seed, and a few steps of every training."""

    def short(part: Any) -> Any:
        training = part.training.model_copy(update={"steps": 6, "batch": 4, "log_every": 3})
        return part.model_copy(update={"training": training})

    changes: dict[str, Any] = {"seeds": recipe.seeds[:1]}  # type: ignore[attr-defined]
    if isinstance(recipe, CovariatesRecipe):
        changes["comparisons"] = tuple(map(short, recipe.comparisons))
        changes["patches"] = tuple(map(short, recipe.patches))
        return recipe.model_copy(update=changes)
    return short(recipe).model_copy(update=changes)


def logged_lines(directory: Path) -> list[dict[str, Any]]:
    """Lines that a training has logged so far; of none, none."""
    log = directory / TRAINING_LOG
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


Model = TypeVar("Model", bound=nn.Module)


def load_model(model: Model, directory: Path) -> Model:
    """Weights of the last state of a training, finished or not."""
    load_training_state(directory / TRAINING_DIRECTORY, model, torch.optim.Adam(model.parameters()))
    return model


def plain_log_axis(axes: Axes) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5, written as they are."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
