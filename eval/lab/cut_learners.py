"""In-context learners that are cut: trained or written down, and what is measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from cuts import Subject, measured_cuts
from learners import (
    TEST_SEED,
    CovariatesRecipe,
    InstrumentsRecipe,
    RegressorRun,
    load_model,
    looped_loss,
    regressor_loss,
    regressor_runs,
    shortened_recipe,
    train_looped,
    train_regressor,
)
from pydantic import Field

from tscompress.errors import UsageError
from tscompress.io.own_outputs import TRAINING_DIRECTORY
from tscompress.io.strict import Strict
from tscompress.lab.explicit_2sls import Explicit2SLS, Linear2SLS
from tscompress.lab.in_context import Array, RegressionPrompts, RegressionTask
from tscompress.lab.in_context_models import (
    InContextRegressor,
    LayoutName,
    LoopedTransformer,
    instrument_tokens,
)
from tscompress.lab.instruments import (
    InstrumentPrompts,
    InstrumentTask,
    Predictor,
    StepSizes,
    bias_slope,
    coefficients,
    linear_predictor,
    ordinary_least_squares,
    step_limits,
    two_stage_least_squares,
)
from tscompress.training.in_context import InContextTraining

#: Change of a covariate of variance 1 in Algorithm 2; regressors of instruments have about 8.
MOVED = 1.0


#: Forecasts beyond this have diverged.
DIVERGED = 1e6


#: Loops of the explicit transformer; of its loops every fourth is calibrated on.
LOOPS, STRIDE = 60, 4


class Prompts(Strict):
    """How many prompts a cut is calibrated on and measured on."""

    calibration: int = Field(default=512, ge=2)
    test: int = Field(default=1000, ge=2)
    contexts: int = Field(default=48, ge=2, description="each forecasts every query")
    queries: int = Field(default=16, ge=1)


class UnderCompressionRecipe(Strict):
    """Learners to train, and what recovers their cuts."""

    layouts: tuple[LayoutName, ...] = Field(min_length=1)
    covariates: CovariatesRecipe
    instruments: InstrumentsRecipe
    recovery: InContextTraining
    recovered_sizes: tuple[int, ...] | None = Field(default=None, description="null: every size")
    sizes: tuple[int, ...] | None = Field(default=None, description="null: every size")
    prompts: Prompts = Prompts()

    def runs(self) -> list[RegressorRun]:
        """Trainings of regressors."""
        return [run for run in regressor_runs(self.covariates) if run.label in self.layouts]


def shortened(recipe: UnderCompressionRecipe) -> UnderCompressionRecipe:
    """The same for a look."""
    changes = {
        "covariates": shortened_recipe(recipe.covariates),
        "instruments": shortened_recipe(recipe.instruments),
        "recovery": recipe.recovery.model_copy(update={"steps": 2, "batch": 4, "log_every": 2}),
        "prompts": Prompts(calibration=8, test=16, contexts=3, queries=2),
        "sizes": (1, 3),
        "recovered_sizes": (1,),
    }
    return recipe.model_copy(update=changes)


@dataclass(frozen=True)
class Asked:
    """A recipe, the directory of its trainings and cuts, and whether learners may be trained."""

    recipe: UnderCompressionRecipe
    models: Path
    output: Path
    trained_only: bool = False

    def regressors(self) -> list[tuple[RegressorRun, InContextRegressor]]:
        """Trained regressors; those that are missing are trained, unless told not.

        Raises
        ------
        UsageError
            There is none, and none may be trained.
        """
        own, place = self.recipe.covariates, self.models / "covariates"
        found = []
        for run in self.recipe.runs():
            if not self.trained_only:
                found.append((run, train_regressor(run, own, place, lambda: None)[0]))
            elif (place / run.name / TRAINING_DIRECTORY).exists():
                model = run.model(own.width, own.heads)
                found.append((run, load_model(model, place / run.name)))
        return self._some(found, place)

    def looped(self) -> list[tuple[int, LoopedTransformer]]:
        """Seeds and trained looped transformers, as :meth:`regressors`."""
        own, place = self.recipe.instruments, self.models / "instruments"
        found = []
        for seed in own.seeds:
            if not self.trained_only:
                found.append((seed, train_looped(own, seed, place, lambda: None)[0]))
            elif (place / f"seed-{seed}" / TRAINING_DIRECTORY).exists():
                found.append((seed, load_model(own.model(seed), place / f"seed-{seed}")))
        return self._some(found, place)

    def cuts(self, subjects: Sequence[Subject], name: str, draw: Any) -> pd.DataFrame:
        """Every cut of every subject; the figure is drawn as they come."""
        frames: list[pd.DataFrame] = []
        for subject in subjects:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            frames.append(
                measured_cuts(subject, self.recipe.recovery, self.models / "cuts", lambda: None)
            )
            draw(pd.concat(frames, ignore_index=True), Path(f"{self.output}-{name}.png"))
        return pd.concat(frames, ignore_index=True)

    def _some(self, found: list[Any], place: Path) -> list[Any]:
        if not found:
            raise UsageError(
                f"{str(place)!r} holds no training; leave --trained-only out, or name the "
                "directory of trainings with --models."
            )
        return found


def _bounded(forecasts: Array) -> Array:
    """Forecasts, those that diverged at the largest that counts."""
    return np.clip(np.nan_to_num(forecasts, nan=DIVERGED), -DIVERGED, DIVERGED)


def regression_measures(model: InContextRegressor, task: RegressionTask, sizes: Prompts) -> Any:
    """Losses and coefficients of a regressor at the last index.

    ``last`` is the loss, ``skill`` its distance to forecasting 0 as a share. Coefficients are those
    of Algorithm 2: ``coefficient error`` is E (w_hat - w)^2, ``response`` the slope of w_hat on w.
    """
    prompts = task.draw(sizes.test, np.random.default_rng(TEST_SEED))
    forecasts = _last(model, prompts)
    target = prompts.y[:, -1]
    found, weights = _implied(model, prompts, forecasts), _weights_of(prompts)
    return {
        "last": float(np.square(forecasts - target).mean()),
        "skill": 1 - float(np.square(forecasts - target).mean() / np.square(target).mean()),
        "coefficient error": float(np.square(found - weights).mean()),
        "response": float((found * weights).sum() / np.square(weights).sum()),
    }


def regression_skill(model: InContextRegressor, task: RegressionTask, sizes: Prompts) -> float:
    """``skill`` alone, of :func:`regression_measures`."""
    prompts = task.draw(sizes.test, np.random.default_rng(TEST_SEED))
    errors = np.square(_last(model, prompts) - prompts.y[:, -1])
    return 1 - float(errors.mean() / np.square(prompts.y[:, -1]).mean())


@torch.no_grad()
def _last(model: InContextRegressor, prompts: RegressionPrompts) -> Array:
    x, y = (torch.as_tensor(a, dtype=torch.float32) for a in (prompts.x, prompts.y))
    return _bounded(np.asarray(model(x, y)[:, -1].double().numpy()))


def _implied(model: InContextRegressor, prompts: RegressionPrompts, base: Array) -> Array:
    """Coefficients ``[B, d]``: what each covariate of the query, moved, changes of the forecast."""
    columns = []
    for k in range(prompts.x.shape[-1]):
        x = prompts.x.copy()
        # Towards 0, so that no query is moved to where training had few.
        moved = np.where(x[:, -1, k] > 0, -MOVED, MOVED)
        x[:, -1, k] += moved
        columns.append((_last(model, RegressionPrompts(x, prompts.y)) - base) / moved)
    return np.stack(columns, axis=-1)


def _weights_of(prompts: RegressionPrompts) -> Array:
    """w ``[B, d]`` of linear functions without noise, from all points of a prompt."""
    return np.asarray((np.linalg.pinv(prompts.x) @ prompts.y[..., None])[..., 0])


def _crossed_regression(model: InContextRegressor, task: RegressionTask, sizes: Prompts) -> Array:
    """Forecasts ``[2 K, Q]`` of queries after other contexts, and after these negated."""
    rng = np.random.default_rng(TEST_SEED + 1)
    contexts = task.draw(sizes.contexts, rng)
    x, y = (np.repeat(a, sizes.queries, axis=0) for a in (contexts.x, contexts.y))
    asked = rng.standard_normal((sizes.queries, task.dim))
    x[:, -1] = np.tile(asked, (sizes.contexts, 1))
    both = [_last(model, RegressionPrompts(x, sign * y)) for sign in (1, -1)]
    return np.concatenate(both).reshape(-1, sizes.queries)


def regressor_subject(
    run: RegressorRun, model: InContextRegressor, recipe: UnderCompressionRecipe
) -> Subject:
    """A trained regressor, to be cut."""
    calibration = run.task.draw(recipe.prompts.calibration, np.random.default_rng(TEST_SEED + 2))
    own = recipe.covariates
    return Subject(
        name=f"{run.label}, {run.layers} layer" + "s" * (run.layers > 1),
        learner=model,
        head_size=own.width // own.heads,
        calibrate=lambda learner: _last(learner, calibration),
        measure=lambda learner: regression_measures(learner, run.task, recipe.prompts),
        skill=lambda learner: regression_skill(learner, run.task, recipe.prompts),
        average=lambda learner: _crossed_regression(learner, run.task, recipe.prompts),
        loss=lambda learner: regressor_loss(learner, run.task, recipe.recovery.batch),
        setup=f"{run} {own.width} {own.heads} {recipe.prompts}",
        sizes=recipe.sizes,
        recovered=recipe.recovered_sizes,
    )


def instrument_measures(predict: Predictor, task: InstrumentTask, sizes: Prompts, n: int) -> Any:
    """Prediction error, coefficients and bias of a predictor, all as in instruments.py.

    ``response`` is the slope of its coefficients on beta, ``median`` the median squared error of
    coefficients.
    """
    prompts = task.draw(sizes.test, n, np.random.default_rng(TEST_SEED))

    def bounded(given: InstrumentPrompts) -> Array:
        return _bounded(predict(given))

    icpe = float(np.square(bounded(prompts) - prompts.query_y).mean())
    found = coefficients(bounded, prompts)
    biased = ordinary_least_squares(prompts.x, prompts.y)
    errors = np.square(found - prompts.beta)
    return {
        "icpe": icpe,
        "skill": 1 - icpe / float(np.square(prompts.query_y).mean()),
        "coefficient error": float(errors.mean()),
        "median": float(np.median(errors)),
        "bias slope": bias_slope(found, biased, prompts.beta),
        "response": float((found * prompts.beta).sum() / np.square(prompts.beta).sum()),
    }


def instrument_skill(predict: Predictor, task: InstrumentTask, sizes: Prompts, n: int) -> float:
    """``skill`` alone, of :func:`instrument_measures`."""
    prompts = task.draw(sizes.test, n, np.random.default_rng(TEST_SEED))
    errors = np.square(_bounded(predict(prompts)) - prompts.query_y)
    return 1 - float(errors.mean() / np.square(prompts.query_y).mean())


def _crossed_instruments(predict: Predictor, task: InstrumentTask, sizes: Prompts, n: int) -> Array:
    """Forecasts ``[2 K, Q]`` of queries after other contexts, and after these negated."""
    rng = np.random.default_rng(TEST_SEED + 1)
    contexts, queries = task.draw(sizes.contexts, n, rng), task.draw(sizes.queries, n, rng)
    every = {
        name: np.repeat(getattr(contexts, name), sizes.queries, axis=0)
        for name in ("z", "x", "y", "query_y", "beta")
    }
    asked = {
        name: np.tile(getattr(queries, name), (sizes.contexts, 1))
        for name in ("query_z", "query_x")
    }
    prompts = InstrumentPrompts(**every, **asked)
    both = [prompts, replace(prompts, y=-prompts.y)]
    return np.concatenate([_bounded(predict(one)) for one in both]).reshape(-1, sizes.queries)


def looped_subject(seed: int, model: LoopedTransformer, recipe: UnderCompressionRecipe) -> Subject:
    """A trained looped transformer, to be cut."""
    own, task = recipe.instruments, recipe.instruments.distribution()
    n = own.examples[1]
    calibration = task.draw(
        recipe.prompts.calibration // 2, n, np.random.default_rng(TEST_SEED + 2)
    )
    return Subject(
        name="looped" if len(own.seeds) == 1 else f"looped, seed {seed}",
        learner=model,
        head_size=own.width // own.heads,
        calibrate=lambda learner: learner(instrument_tokens(calibration)),
        measure=lambda learner: instrument_measures(learner.predict, task, recipe.prompts, n),
        skill=lambda learner: instrument_skill(learner.predict, task, recipe.prompts, n),
        average=lambda learner: _crossed_instruments(learner.predict, task, recipe.prompts, n),
        loss=lambda learner: looped_loss(learner, own, recipe.recovery.batch),
        setup=f"{own.model_dump_json(exclude={'seeds'})} {seed} {recipe.prompts}",
        sizes=recipe.sizes,
        recovered=recipe.recovered_sizes,
    )


def few_prompts(recipe: UnderCompressionRecipe) -> Prompts:
    """A quarter of the prompts, for the explicit transformer, whose loops take time."""
    return recipe.prompts.model_copy(update={"test": recipe.prompts.test // 4})


def estimators(recipe: UnderCompressionRecipe, sizes: Prompts) -> dict[str, dict[str, float]]:
    """OLS and 2SLS, and forecasting 0, on the same prompts: measure to name to value."""
    own, task = recipe.instruments, recipe.instruments.distribution()
    predictors: dict[str, Predictor] = {
        "OLS": linear_predictor(lambda g: ordinary_least_squares(g.x, g.y)),
        "2SLS": linear_predictor(lambda g: two_stage_least_squares(g.z, g.x, g.y)),
        "forecasting 0": lambda g: np.zeros(len(g.y)),
    }
    found = {
        name: instrument_measures(predict, task, sizes, own.examples[1])
        for name, predict in predictors.items()
    }
    return {
        measure: {name: values[measure] for name, values in found.items()}
        for measure in ("icpe", "coefficient error", "median", "bias slope")
    }


def explicit_subject(recipe: UnderCompressionRecipe, loops: int = LOOPS) -> Subject:
    """2SLS written down as a transformer, to be cut; untrained, so that nothing recovers it."""
    own, task = recipe.instruments, recipe.instruments.distribution()
    n = own.examples[1]
    drawn = task.draw(400, n, np.random.default_rng(TEST_SEED + 3))
    alpha, eta = (0.5 * float(np.quantile(limit, 0.05)) for limit in step_limits(drawn.z, drawn.x))
    built = Explicit2SLS(own.task.p, own.task.q, n, StepSizes(alpha, eta))
    model = Linear2SLS(built)
    few = few_prompts(recipe)
    calibration = task.draw(few.calibration // 8, n, np.random.default_rng(TEST_SEED + 2))

    def predict(learner: Any) -> Predictor:
        def forecast(given: InstrumentPrompts) -> Array:
            with torch.no_grad():
                return built.forecast(learner(built.embed(given), loops))

        return forecast

    def calibrate(learner: Any) -> None:
        tokens = built.embed(calibration)
        for loop in range(0, loops, STRIDE):
            learner.encoder(tokens)
            for _ in range(min(STRIDE, loops - loop)):
                tokens = built.step(tokens)

    return Subject(
        name="explicit",
        learner=model,
        head_size=max(one.head_size for one in heads_of(model)),
        calibrate=calibrate,
        measure=lambda learner: instrument_measures(predict(learner), task, few, n),
        skill=lambda learner: instrument_skill(predict(learner), task, few, n),
        average=lambda learner: _crossed_instruments(predict(learner), task, few, n),
        loss=None,
        setup=f"{own.task} {n} {alpha} {eta} {loops} {recipe.prompts}",
        sizes=recipe.sizes,
    )


def heads_of(model: Any) -> list[Any]:
    """Attention of every layer."""
    return [part.attention for block in model.encoder.block for part in block.layer]
